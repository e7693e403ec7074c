"""Lower bounds on epsilon from what an attack achieved, and what they say about a claim.

Each bound is a test turned around: the epsilons below it are those that the evidence speaks against at level
1 - confidence. A bound may be 0, which says nothing. A claim is refuted at a stricter level (`significance`), and one
that is not refuted is not thereby true: no verdict says "private".

What each bound takes for granted stands in its `assumes`. The bounds from scores and counts need independent trials.
The one-run bounds need a fair coin per canary, and a number of guesses that was fixed before the scores were seen:
the best of several numbers of guesses is a maximum, as the best of several thresholds is.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr, betainc, nctdtr, ndtr, ndtri

from fedaudit.epsilon.exact_counts import claim_p
from fedaudit.errors import ContractError, SettingError, unknown
from fedaudit.privacy.calibration import gaussian_delta
from fedaudit.significance import LEVEL, Said, said
from fedaudit.stats import Counts, Floats, above, check_confidence, cp_lower, cp_upper, parted, split_classes

Correction = Literal["exact", "split", "bonferroni"]

SMALLEST_P = 1e-15  # p-values found by search are reported down to here
INDEPENDENT = "independent trials: no candidate's score depends on whether another was a member"
COINS = "each canary was in or out by a fair coin of its own; the number of guesses was fixed beforehand"
SHIFT = "independent trials, whose scores are Gaussian with one variance for either class"
GAUSSIAN = "the trade-off function is a Gaussian's, as the claim's is taken to be; " + COINS


@dataclass(frozen=True)
class ClaimVerdict:
    """The evidence's verdict on one claim of (epsilon, delta)."""

    claim: float
    delta: float
    lower_bound: float
    confidence: float
    trials: int
    method: str
    assumes: str
    p_value: float  # of the claim under the test; at least 1e-15
    verdict: Said

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Bound:
    """With probability `confidence`, the mechanism is (e, delta)-DP for no e below `epsilon`."""

    epsilon: float
    delta: float
    confidence: float
    trials: int
    method: str
    assumes: str
    detail: dict[str, Any]
    _p: Callable[[float], float] = field(repr=False, compare=False)

    def p_value(self, claim: float) -> float:
        """Return how probable evidence as strong as this is, at most, if the claimed epsilon holds."""
        if not 0 <= claim < math.inf:
            raise SettingError(
                f"claim = {claim} is not an epsilon that evidence could refute: give a finite number from 0 up, and "
                "report the bound alone where a release was not protected."
            )
        return min(1.0, max(SMALLEST_P, self._p(float(claim))))

    def against(self, claim: float) -> ClaimVerdict:
        p = self.p_value(claim)
        return ClaimVerdict(
            claim=float(claim),
            delta=self.delta,
            lower_bound=self.epsilon,
            confidence=self.confidence,
            trials=self.trials,
            method=self.method,
            assumes=self.assumes,
            p_value=p,
            verdict=said(p, confidence=self.confidence),
        )

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_p"}


# -- validation and search ----------------------------------------------------------------------------------------


def _check_delta(delta: float, least: str = "from 0 up") -> float:
    if not (0 <= delta < 1 if least == "from 0 up" else 0 < delta < 1):
        raise SettingError(f"delta = {delta} is not a failure probability here: give a number {least} and below 1.")
    return float(delta)


def _check_count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise ContractError(f"{name} = {value!r} is not a count: give a whole number from 0 up.")
    return int(value)


def _edge(refuted: Callable[[float], bool], fine: float = 1e-12) -> float:
    """The largest x >= 0 that is refuted, where x is refuted if and only if it is small enough; 0 if none is."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > fine * high:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _least_level(refuted: Callable[[float], bool]) -> float:
    """The smallest level at which a test refutes: its p-value, by search on the log scale."""
    if not refuted(1.0):
        return 1.0
    low, high = math.log(SMALLEST_P), 0.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if refuted(math.exp(middle)) else (middle, high)
    return math.exp(high)


# -- thresholds: Clopper-Pearson ----------------------------------------------------------------------------------


def box_epsilon(tp: ArrayLike, fp: ArrayLike, n1: int, n0: int, delta: float, alpha: float) -> Floats:
    """Elementwise: one fixed threshold's counts refute every epsilon below this at level alpha; -inf where none.

    (epsilon, delta)-DP demands TPR <= e^epsilon FPR + delta and TNR <= e^epsilon FNR + delta (Kairouz, Oh and
    Viswanath 2015, Theorem 2.1; audits: Jagielski, Ullman and Oprea 2020, Nasr et al. 2021). A lower limit on TPR and
    an upper one on FPR, alpha/2 each, serve both, since TNR = 1 - FPR and FNR = 1 - TPR.
    """
    tpr, fpr = cp_lower(tp, n1, alpha / 2), cp_upper(fp, n0, alpha / 2)
    with np.errstate(divide="ignore"):
        by_tpr = np.log(np.maximum(tpr - delta, 0)) - np.log(fpr)
        by_tnr = np.log(np.maximum(1 - fpr - delta, 0)) - np.log(1 - tpr)
    return np.maximum(by_tpr, by_tnr)


def _best_box(tp: Counts, fp: Counts, n1: int, n0: int, delta: float, alpha: float) -> float:
    """The best of several fixed thresholds, by Bonferroni."""
    return float(box_epsilon(tp, fp, n1, n0, delta, alpha / len(tp)).max())


def _box_p(claim: float, tp: Counts, fp: Counts, n1: int, n0: int, delta: float) -> float:
    return _least_level(lambda alpha: _best_box(tp, fp, n1, n0, delta, alpha) > claim)


def _bound_at(
    tp: Counts, fp: Counts, n1: int, n0: int, delta: float, confidence: float, method: str, detail: dict[str, Any]
) -> Bound:
    epsilon = max(0.0, _best_box(tp, fp, n1, n0, delta, 1 - confidence))
    p = partial(_box_p, tp=tp, fp=fp, n1=n1, n0=n0, delta=delta)
    return Bound(epsilon, delta, confidence, n1 + n0, method, INDEPENDENT, detail, p)


def from_counts(tp: int, fn: int, fp: int, tn: int, delta: float, confidence: float = 0.95) -> Bound:
    """The bound at one threshold that was fixed before these records were looked at."""
    counts = {name: _check_count(name, n) for name, n in (("tp", tp), ("fn", fn), ("fp", fp), ("tn", tn))}
    tp, fn, fp, tn = counts.values()
    if tp + fn == 0 or fp + tn == 0:
        raise ContractError(f"{tp + fn} members and {fp + tn} non-members bound no epsilon: count some of both.")
    delta, confidence = _check_delta(delta), check_confidence(confidence)
    method = "Clopper-Pearson at one fixed threshold"
    return _bound_at(np.array([tp]), np.array([fp]), tp + fn, fp + tn, delta, confidence, method, counts)


def _ranks(n: int) -> Counts:
    """0, 1, 3, 7, ..., n/4, 3n/8, n/2: how many errors of one kind a threshold allows. Depends on n alone."""
    return np.unique([*(2 ** np.arange(max(1, n.bit_length() - 1)) - 1), n // 4, 3 * n // 8, n // 2])


def _family(inside: Floats, outside: Floats, ranks1: Counts, ranks0: Counts) -> tuple[Floats, NDArray[np.bool_]]:
    """Thresholds, and whether they are strict: "score > the (k+1)-th largest non-member", then "score >= the (k+1)-th
    smallest member"."""
    t = np.concatenate([outside[len(outside) - 1 - ranks0], inside[ranks1]])
    return t, np.arange(len(t)) < len(ranks0)


def _positives(scores: Floats, t: Floats, strict: NDArray[np.bool_]) -> Counts:
    return np.where(strict, above(scores, t), len(scores) - np.searchsorted(scores, t, "left"))


def from_scores(
    scores: ArrayLike,
    member: ArrayLike,
    delta: float,
    confidence: float = 0.95,
    correction: Correction = "bonferroni",
    seed: int = 0,
) -> Bound:
    """The bound over thresholds on the scores, corrected for having chosen the threshold.

    `bonferroni`: a family of thresholds at ranks fixed beforehand shares the failure probability. Such a threshold is
    an order statistic of one class, hence independent of the other, whose count is binomial. And for its own class
    Clopper-Pearson holds as it stands: of n draws, P[X > (k+1)-th largest] is stochastically at most
    Beta(k + 1, n - k), whose quantile is the upper limit for k of n; ties only make it smaller. With few distinct
    scores up to a factor 2 of the rate is lost between the ranks: `split` is the better choice for those.

    `exact`: the same thresholds and the same correction, with an exact test of both counts at once in place of two
    limits (fedaudit.epsilon.exact_counts), at the three that the limits find best. It gives more, and takes a second.

    `split`: a random fifth of each class (seeded) chooses the threshold, the rest bounds epsilon there. A fifth because
    what the choice gains from more records, the bound loses: on Gaussian toys of 100 to 10,000 records halves gave 7 to
    26 % less, and Bonferroni 4 to 21 % more.
    """
    delta, confidence = _check_delta(delta), check_confidence(confidence)
    inside, outside = split_classes(scores, member)
    if correction in ("bonferroni", "exact"):
        ranks1, ranks0 = _ranks(len(inside)), _ranks(len(outside))
        t, strict = _family(inside, outside, ranks1, ranks0)
        n1, n0 = len(inside), len(outside)
        # The counts of a threshold's own class are the ranks it stands for, whatever ties make of them.
        tp = np.concatenate([above(inside, t[strict]), n1 - ranks1])
        fp = np.concatenate([ranks0, n0 - np.searchsorted(outside, t[~strict], "left")])
        best = int(np.argmax(box_epsilon(tp, fp, n1, n0, delta, (1 - confidence) / len(t))))
        method = f"Clopper-Pearson over {len(t)} thresholds at fixed ranks, Bonferroni"
        if correction == "exact":
            return _exact_bound(tp, fp, n1, n0, delta, confidence, t)
    elif correction == "split":
        if min(len(inside), len(outside)) < 2:
            raise ContractError(
                f"{len(inside)} members and {len(outside)} non-members cannot be split: give at least 2 of each, or "
                "use the Bonferroni correction."
            )
        rng = np.random.default_rng(seed)
        (choose1, inside), (choose0, outside) = parted(inside, rng, 0.2), parted(outside, rng, 0.2)
        grid1, grid0 = (np.unique(np.geomspace(1, len(a), 128).astype(np.int64)) - 1 for a in (choose1, choose0))
        t, strict = _family(choose1, choose0, grid1, grid0)
        pilot = _positives(choose1, t, strict), _positives(choose0, t, strict)
        best = int(np.argmax(box_epsilon(*pilot, len(choose1), len(choose0), delta, 1 - confidence)))
        t, strict, best = t[[best]], strict[[best]], 0
        n1, n0 = len(inside), len(outside)
        tp, fp = _positives(inside, t, strict), _positives(outside, t, strict)
        method = f"Clopper-Pearson, threshold chosen on a random fifth (seed {seed}), evaluated on the rest"
    else:
        raise SettingError(unknown("correction", str(correction), get_args(Correction)))
    detail = {
        "threshold": float(t[best]),
        "rule": "score > threshold" if strict[best] else "score >= threshold",
        "tp": int(tp[best]),
        "fn": n1 - int(tp[best]),
        "fp": int(fp[best]),
        "tn": n0 - int(fp[best]),
    }
    return _bound_at(tp, fp, n1, n0, delta, confidence, method, detail)


EXACT = 3  # thresholds of a family at which both counts are tested exactly
FINE = 1e-4  # to which a bound by exact tests is found


def _exact_bound(
    tp: Counts, fp: Counts, n1: int, n0: int, delta: float, confidence: float, thresholds: Floats
) -> Bound:
    """The best of some of a family's thresholds, at the share of the level that each of the family has."""
    alpha, family = (1 - confidence) / len(tp), len(tp)
    best = np.argsort(-box_epsilon(tp, fp, n1, n0, delta, alpha), kind="stable")[:EXACT]
    pairs = [(int(tp[i]), int(fp[i])) for i in best]

    found = [
        _edge(lambda e, a=a, b=b: claim_p(a, b, n1, n0, e, delta) < alpha, FINE)  # type: ignore[misc]
        for a, b in pairs
    ]
    at = int(np.argmax(found))
    (a, b), i = pairs[at], int(best[at])
    detail = {"threshold": float(thresholds[i]), "tp": a, "fn": n1 - a, "fp": b, "tn": n0 - b}
    method = f"exact test of both counts, at {len(pairs)} of {family} thresholds at fixed ranks, Bonferroni"
    p = partial(_exact_p, pairs=pairs, family=family, n1=n1, n0=n0, delta=delta)
    return Bound(found[at], delta, confidence, n1 + n0, method, INDEPENDENT, detail, p)


def _exact_p(claim: float, pairs: list[tuple[int, int]], family: int, n1: int, n0: int, delta: float) -> float:
    return min(1.0, family * min(claim_p(a, b, n1, n0, claim, delta) for a, b in pairs))


def from_scores_exactly(scores: ArrayLike, member: ArrayLike, delta: float, confidence: float = 0.95) -> Bound:
    """The bound over thresholds on the scores, with an exact test of both counts: see `from_scores`."""
    return from_scores(scores, member, delta, confidence, "exact")


# -- Gaussian paths -----------------------------------------------------------------------------------------------


def _epsilon_of(mu: float, delta: float) -> float:
    """Return what `gaussian_epsilon` does, without importing scipy.optimize."""
    return _edge(lambda e: gaussian_delta(e, mu) > delta)


def _mu_of(epsilon: float, delta: float) -> float:
    """The largest mu for which N(0, 1) and N(mu, 1) keep (epsilon, delta)."""
    return _edge(lambda mu: gaussian_delta(epsilon, mu) <= delta)


def _box_mu(tp: int, fp: int, n1: int, n0: int, alpha: float) -> float:
    """mu >= Phi^-1(TPR) - Phi^-1(FPR) at any threshold (Dong, Roth and Su 2019); alpha/2 for each limit."""
    tpr, fpr = cp_lower(tp, n1, alpha / 2), cp_upper(fp, n0, alpha / 2)
    return max(0.0, float(ndtri(tpr) - ndtri(fpr)))


def gdp_from_counts(tp: int, fn: int, fp: int, tn: int, delta: float, confidence: float = 0.95) -> Bound:
    """At one threshold that was fixed beforehand, for scores that are Gaussian with one variance: mu by
    Clopper-Pearson, turned into epsilon at delta."""
    counts = {name: _check_count(name, n) for name, n in (("tp", tp), ("fn", fn), ("fp", fp), ("tn", tn))}
    tp, fn, fp, tn = counts.values()
    if tp + fn == 0 or fp + tn == 0:
        raise ContractError(f"{tp + fn} members and {fp + tn} non-members bound no epsilon: count some of both.")
    delta, confidence = _check_delta(delta, "above 0"), check_confidence(confidence)
    n1, n0 = tp + fn, fp + tn
    mu = _box_mu(tp, fp, n1, n0, 1 - confidence)

    def p(claim: float) -> float:
        promised = _mu_of(claim, delta)
        return _least_level(lambda alpha: _box_mu(tp, fp, n1, n0, alpha) > promised)

    method = "mu-GDP, Clopper-Pearson at one fixed threshold"
    detail = {**counts, "mu": mu}
    return Bound(_epsilon_of(mu, delta), delta, confidence, n1 + n0, method, SHIFT, detail, p)


LARGEST_MU = 1e3  # beyond it nothing is protected
SPARE = 1.02  # by which the p-value of a shift is made larger, so that counted errors stay below their share


def _shift_p(mu: float, t: float, n1: int, n0: int) -> float:
    """P[Student's t of two Gaussians mu deviations apart is at least t]: noncentral, with n1 + n0 - 2 degrees.

    It is the mean of Phi(nc - t s) over s, the root of a chi-square number over its degrees. The integral is a sum over
    evenly spaced s: the integrand and all its derivatives vanish at either end, so that the sum is exact to rounding.
    """
    df, nc = n1 + n0 - 2, mu * math.sqrt(n1 * n0 / (n1 + n0))
    if abs(t) < 30 and nc < 30 and df < 100:
        return 1 - float(nctdtr(df, nc, t))
    s = 1 + np.linspace(-12, 12, 801) / math.sqrt(2 * df)
    s = s[s > 0]
    log = (df - 1) * np.log(s) - df * (s**2 - 1) / 2  # the density, but for a factor
    weight = np.exp(log - log.max())
    return float((weight * ndtr(nc - t * s)).sum() / weight.sum())


def _spared_p(mu: float, t: float, n1: int, n0: int) -> float:
    return min(1.0, SPARE * _shift_p(mu, t, n1, n0))


def _shift_of(inside: Floats, outside: Floats) -> tuple[float, float]:
    """The difference of two means, and the common deviation of the two samples."""
    spread = math.sqrt(float(((inside - inside.mean()) ** 2).sum() + ((outside - outside.mean()) ** 2).sum()))
    shift = float(inside.mean() - outside.mean())
    degrees = len(inside) + len(outside) - 2
    return shift, max(spread / math.sqrt(degrees), 1e-12 * abs(shift), np.finfo(np.float64).tiny)


def gdp_mean_shift(scores: ArrayLike, member: ArrayLike, delta: float, confidence: float = 0.95) -> Bound:
    """For scores that are Gaussian with one variance: how far apart their means are at least, in deviations.

    The statistic is Student's t of two samples, noncentral with mu sqrt(n1 n0 / (n1 + n0)): exact for every number of
    trials, and no threshold has to be chosen. N(0, 1) and N(mu, 1) keep (epsilon, delta) only up to some mu. The
    p-value is made 2 % larger than it is, so that a count of errors lies below 5 %, and not around it.
    """
    delta, confidence = _check_delta(delta, "above 0"), check_confidence(confidence)
    inside, outside = split_classes(scores, member)
    n1, n0 = len(inside), len(outside)
    if n1 + n0 < 4:
        raise ContractError(f"{n1} members and {n0} non-members have no common variance: give at least 4 scores.")
    shift, deviation = _shift_of(inside, outside)
    t = shift / deviation / math.sqrt(1 / n1 + 1 / n0)
    p_mu = partial(_spared_p, t=t, n1=n1, n0=n0)
    mu = min(_edge(lambda mu: mu <= LARGEST_MU and p_mu(mu) < 1 - confidence), LARGEST_MU)
    detail = {"mu": mu, "shift": shift / deviation, "members": n1, "nonmembers": n0}
    method = "mu-GDP, shift of the means (noncentral t)"
    epsilon = _epsilon_of(mu, delta) if mu else 0.0
    return Bound(epsilon, delta, confidence, n1 + n0, method, SHIFT, detail, lambda e: p_mu(_mu_of(e, delta)))


def ceiling(bound: Callable[..., Bound], trials: int, delta: float, confidence: float = 0.95, **options: Any) -> float:
    """The largest epsilon that so many trials can show: every one of them right, half of them of either class."""
    if bound in (one_run_steinke, one_run_fdp):
        guesses = options.pop("guesses", trials)
        return bound(trials, guesses, guesses, delta, confidence, **options).epsilon
    n1, n0 = (trials + 1) // 2, trials // 2
    if bound in (from_counts, gdp_from_counts):
        return bound(n1, 0, 0, n0, delta, confidence).epsilon
    return bound(np.repeat([1.0, 0.0], [n1, n0]), np.arange(trials) < n1, delta, confidence, **options).epsilon


SHARES = (1.0, 0.7, 0.5, 0.42, 0.35, 0.25, 0.18, 0.13, 0.09, 0.065, 0.045, 0.03, 0.02)  # of canaries that are guessed
PARTS = ((300, 15), (3000, 7), (math.inf, 1))  # up to so many canaries: how many numbers of right guesses are tried
WORTH = 0.9  # of the largest mean bound, that has to be left if more guesses are made so that a claim can be refuted
LITTLE = 0.2  # of the truth: a mean bound below it is not worth fewer guesses


@lru_cache(maxsize=256)
def best_guesses(canaries: int, claim: float, delta: float, confidence: float = 0.95, steps: int = 1) -> int:
    """The number of guesses that gives the largest bound in the mean, if scores are Gaussian and just as far apart as
    a claim allows, of those numbers with which the claim can be refuted.

    It follows from the number of canaries and from the claim, both of which are known before any score is: many guesses
    use more canaries, few guesses use the surest. Very few could not refute the claim if all of them were right. So
    there are enough (`enough_guesses`) for an attacker who is right nine times of ten; if that would cost more than a
    tenth of the bound, for one who is always right. The bound is that for a claim of at least 1: who refutes a smaller
    one finds more than it allows.
    """
    claim = min(max(claim, 0.1), 12.0) if math.isfinite(claim) else 4.0
    truth, mu = max(claim, 1.0), steps * _mu_of(claim, delta)
    wanted = [enough_guesses(canaries, mu, LEVEL, right) for right in (0.9, 1.0)]
    tried = {math.ceil(share * canaries) for share in SHARES} | {n for n in wanted if n is not None}
    means = {made: _mean_bound(canaries, made, truth, delta, confidence, steps) for made in sorted(tried)}
    most = max(means.values())
    least = WORTH * most if most >= LITTLE * truth else 0.0
    for enough in wanted:
        worth = {made: mean for made, mean in means.items() if enough is not None and made >= enough and mean >= least}
        if worth:
            return max(worth, key=lambda made: (worth[made], -made))
    return max(means, key=lambda made: (means[made], -made))


def enough_guesses(canaries: int, mu: float, level: float, right: float) -> int | None:
    """The fewest guesses that refute mu-GDP at a level if such a share of them is right; none where all are too few."""
    low, high = 0, canaries  # low is not enough
    if not _fdp_refutes(mu, level, canaries, high, math.floor(right * high)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        found = _fdp_refutes(mu, level, canaries, middle, math.floor(right * middle))
        low, high = (low, middle) if found else (middle, high)
    return high


def _mean_bound(canaries: int, made: int, truth: float, delta: float, confidence: float, steps: int) -> float:
    """Return what so many guesses bound in the mean, if scores are Gaussian and as far apart as the truth allows."""
    parts = next(parts for most, parts in PARTS if canaries <= most)
    rights = _likely_rights(canaries, made, steps * _mu_of(truth, delta), parts)
    found = {v: _edge(partial(_refuted_by, 1 - confidence, canaries, made, v, steps), 1e-2) for v in set(rights)}
    return math.fsum(_epsilon_of(found[v], delta) for v in rights) / len(rights)


def _likely_rights(canaries: int, made: int, mu: float, parts: int) -> list[int]:
    """Return numbers of right guesses on the surest canaries: the median of each of so many equally likely parts."""
    low, high = 0.0, 40.0
    for _ in range(60):  # the size of score that so many have
        middle = (low + high) / 2
        above = ndtr(mu / 2 - middle) + ndtr(-mu / 2 - middle)
        low, high = (middle, high) if above > made / canaries else (low, middle)
    chance = float(ndtr(mu / 2 - low) / (ndtr(mu / 2 - low) + ndtr(-mu / 2 - low)))
    at = np.searchsorted(bdtr(np.arange(made + 1), made, chance), [(i + 0.5) / parts for i in range(parts)])
    return [int(v) for v in at.clip(max=made)]


def _refuted_by(tau: float, m: int, r: int, v: int, steps: int, mu: float) -> bool:
    return _fdp_refutes(steps * mu, tau, m, r, v)


# -- one run ------------------------------------------------------------------------------------------------------


def _check_one_run(canaries: int, guesses: int, correct: int) -> tuple[int, int, int]:
    m, r, v = _check_count("canaries", canaries), _check_count("guesses", guesses), _check_count("correct", correct)
    if not v <= r <= m or m == 0:
        raise ContractError(
            f"{v} correct of {r} guesses on {m} canaries is impossible: correct <= guesses <= canaries, and canaries "
            "at least 1. A canary without a guess is an abstention."
        )
    return m, r, v


def _group(epsilon: float, delta: float, steps: int) -> tuple[float, float]:
    """Return what (epsilon, delta) promises so many neighbours apart: P <= e^epsilon Q + delta, put into itself."""
    try:
        return steps * epsilon, delta * math.fsum(math.exp(i * epsilon) for i in range(steps))
    except OverflowError:
        return steps * epsilon, 1.0


def _steinke_p(epsilon: float, m: int, r: int, v: int, delta: float, steps: int = 1) -> float:
    """Steinke, Nasr and Jagielski 2023, Theorem 5.2: P[at least v correct] <= beta + 2 m delta alpha, with
    W ~ Bin(r, e^epsilon / (1 + e^epsilon)), beta = P[W >= v] and alpha = max over i >= 1 of P[v > W >= v - i] / i."""
    epsilon, delta = _group(epsilon, delta, steps)
    if v == 0 or delta >= 1:
        return 1.0
    q = 1 / (1 + math.exp(-epsilon))
    beta = float(betainc(v, r - v + 1, q))
    alpha, done, width = 0.0, 0, 256
    while delta > 0 and done < v and alpha * (done + 1) < 1 - beta:  # no later term exceeds (1 - beta) / i
        i = np.arange(done + 1, min(done + width, v) + 1)
        at_least = np.where(i < v, betainc(np.maximum(v - i, 1), r - v + i + 1, q), 1.0)
        alpha, done, width = max(alpha, float(((at_least - beta) / i).max())), int(i[-1]), 2 * width
    return min(1.0, beta + 2 * m * delta * alpha)


def one_run_steinke(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95, steps: int = 1
) -> Bound:
    """Steinke, Nasr and Jagielski 2023: `canaries` in or out by coin flip in one run, guesses on some of them.

    A coin decides between two data sets that are `steps` neighbours apart in the claim's relation: 2 where it exchanges
    one record for another and the claim is about adding or removing one.
    """
    m, r, v = _check_one_run(canaries, guesses, correct)
    delta, confidence = _check_delta(delta), check_confidence(confidence)
    p = partial(_steinke_p, m=m, r=r, v=v, delta=delta, steps=steps)
    epsilon = _edge(lambda e: p(e) < 1 - confidence)
    detail = {"canaries": m, "guesses": r, "correct": v, "steps": steps}
    return Bound(epsilon, delta, confidence, m, "one run, Steinke et al. 2023, Theorem 5.2", COINS, detail, p)


def _fdp_refutes(mu: float, tau: float, m: int, r: int, v: int) -> bool:
    """Return if v of r guesses on m canaries refute mu-GDP at level tau (Mahloujifar, Melis and Chaudhuri 2024).

    Let p_j = P[j guesses are correct], and for a canary drawn at random
    R_i = P[its guess is correct, at least i are] = sum over j >= i of p_j j / m and
    H_i = P[its guess is wrong, at least i others are correct] = sum over j >= i of p_j (r - j) / m.
    Flipping the canary's coin turns the event of R_(i+1) into that of H_i. f-DP and the concavity of 1 - f give
    R_(i+1) <= 1 - f(H_i), which for f(x) = Phi(Phi^-1(1 - x) - mu) reads H_i >= Phi(Phi^-1(R_(i+1)) - mu).
    If P[at least v correct] were tau, R_v + H_v = tau r / m, with the least R_v if all of it is at v; going down from
    there with the least H_i that is allowed, R_0 + H_0 would have to stay within its true value r / m.
    """
    right, wrong, total = tau * v / m, tau * (r - v) / m, r / m
    for i in range(v - 1, -1, -1):
        least = float(ndtr(ndtri(right) - mu))
        if least <= wrong:  # nothing changes from here on
            break
        right, wrong = right + i / (r - i) * (least - wrong), least
        if right + wrong > total:
            return True
    return False


def _fdp_p(epsilon: float, m: int, r: int, v: int, delta: float, steps: int) -> float:
    mu = _mu_of(epsilon, delta)
    return _least_level(lambda tau: _fdp_refutes(steps * mu, tau, m, r, v))


def one_run_fdp(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95, steps: int = 1
) -> Bound:
    """Mahloujifar, Melis and Chaudhuri 2024 with a Gaussian trade-off function, turned into epsilon at delta.

    It refutes Gaussian mechanisms (and compositions near them) that claim (epsilon, delta). A mechanism of another
    shape may meet the same (epsilon, delta) and be more accurate at it: randomised response is. `steps` as above: 1 - f
    = Phi(Phi^-1(x) + mu), put into itself, adds mu at each step (group privacy of Dong, Roth and Su 2019).
    """
    m, r, v = _check_one_run(canaries, guesses, correct)
    delta, confidence = _check_delta(delta, "above 0"), check_confidence(confidence)
    mu = _edge(lambda mu: _fdp_refutes(steps * mu, 1 - confidence, m, r, v))
    detail = {"canaries": m, "guesses": r, "correct": v, "mu": mu, "steps": steps}
    p = partial(_fdp_p, m=m, r=r, v=v, delta=delta, steps=steps)
    method = "one run, f-DP of Mahloujifar et al. 2024, Gaussian trade-off"
    epsilon = _epsilon_of(mu, delta)
    return Bound(epsilon, delta, confidence, m, method, GAUSSIAN, detail, p)
