"""Measures membership scores against the truth; every number has its interval.

`score` is higher for "was trained on". Nothing depends on the order of the rows: the scores of each class are sorted
before anything else happens, the seeded split included, so two orders give the same bits.

Choices that papers leave open:
- Ties: equal scores are called alike. In the AUC a tied pair counts one half.
- TPR at an FPR: the rule is "score > t" with t the (k+1)-th largest non-member score, k = floor(FPR * non-members): the
  best rule with at most k false positives, no interpolation. With k = 0 there is no number, only the reason. Its
  interval is for the TPR at the true threshold, which is unknown too: see `_tpr_interval`.
- Balanced accuracy and advantage (TPR - FPR): a threshold chosen as the best one on the very records that it is scored
  on is optimistic. Ours is chosen on a random half and evaluated on the other; the maximum is `advantage_best`.

Intervals assume that the rows are independent draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc, expit, gammaln, logit, ndtri

from fedaudit.errors import ContractError, SettingError
from fedaudit.runtime.attack_result import ROC, AtFPR, AtThreshold, MembershipScores, OfGroups, Unscored
from fedaudit.stats import (
    Floats,
    Measured,
    above,
    as_column,
    check_confidence,
    checked,
    clopper_pearson,
    missing_class,
    parted,
    split_classes,
)

FPRS = (0.1, 0.01, 0.001)
ROC_POINTS = 200


def _estimate(value: float, low: float, high: float, interval: str) -> Measured:
    return Measured(value=value, low=low, high=high, interval=interval)


def _auc(inside: Floats, outside: Floats, confidence: float) -> Measured:
    """Return P(member's score > non-member's) + P(equal) / 2, with the interval of DeLong, DeLong and Clarke-Pearson
    (1988).

    Their variance is taken to the logit scale, which keeps the interval inside (0, 1). It is 0 exactly if all pairs
    compare alike (perfect separation, or all scores equal). Nothing is that certain. In that case the n = min(n1, n0)
    disjoint pairs are n independent trials without exception, and exceptions are rarer than u = 1 - (alpha/2)^(1/n).
    """
    n1, n0 = len(inside), len(outside)
    wins = np.searchsorted(outside, inside, "left") + np.searchsorted(outside, inside, "right")  # twice the wins
    losses = np.searchsorted(inside, outside, "left") + np.searchsorted(inside, outside, "right")
    value = int(wins.sum()) / (2 * n1 * n0)
    tail = (1 - confidence) / 2
    if np.ptp(wins) == 0 and np.ptp(losses) == 0:
        u = 1 - tail ** (1 / min(n1, n0))
        return _estimate(value, value * (1 - u), value + u * (1 - value), "Clopper-Pearson on disjoint pairs")
    if min(n1, n0) < 2:
        return _estimate(value, 0.0, 1.0, "none: one record of a class has no variance")
    variance = np.var(wins / (2 * n0), ddof=1) / n1 + np.var(losses / (2 * n1), ddof=1) / n0
    half = -float(ndtri(tail)) * math.sqrt(variance) / (value * (1 - value))
    low, high = expit(logit(value) - half), expit(logit(value) + half)
    return _estimate(value, float(low), float(high), "DeLong, logit scale")


def auc(scores: ArrayLike, member: ArrayLike, confidence: float = 0.95) -> Measured:
    return _auc(*split_classes(scores, member), check_confidence(confidence))


def auc_difference(a: ArrayLike, b: ArrayLike, member: ArrayLike, confidence: float = 0.95) -> Measured:
    """Return the AUC of scores `a` minus that of scores `b` on the same candidates, with DeLong's interval for paired
    curves.

    The contributions of one candidate to the two AUCs are subtracted before the variance is taken, so that the
    correlation of the two is counted. The variance may be 0, as for two attacks without a wrong pair. Nothing is that
    certain. In that case the limits are those of the two AUCs by themselves, each at half of the failure probability.
    """
    tail = (1 - check_confidence(confidence)) / 2
    (scores_a, m), (scores_b, _) = checked(a, member), checked(b, member)
    of_a, of_b = _placements(scores_a, m), _placements(scores_b, m)
    n1, n0 = len(of_a[0]), len(of_a[1])
    value = float(of_a[0].mean() - of_b[0].mean())
    if min(n1, n0) < 2:
        return _estimate(value, -1.0, 1.0, "none: one record of a class has no variance")
    gaps = [x - y for x, y in zip(of_a, of_b, strict=True)]
    if np.ptp(gaps[0]) < 1e-12 and np.ptp(gaps[1]) < 1e-12:
        one, other = (auc(s, m, 1 - tail) for s in (scores_a, scores_b))
        low, high = one.low - other.high, one.high - other.low
        return _estimate(value, low, high, "limits of both AUCs, half the failure probability each")
    half = -float(ndtri(tail)) * math.sqrt(np.var(gaps[0], ddof=1) / n1 + np.var(gaps[1], ddof=1) / n0)
    return _estimate(value, max(-1.0, value - half), min(1.0, value + half), "DeLong, paired")


def _placements(s: Floats, m: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return for each member the share of non-members below it, and for each non-member the share of members above it.

    A tied pair counts one half. The order is that of the candidates, because two attacks are paired candidate by
    candidate.
    """
    inside, outside = split_classes(s, m)
    below = np.searchsorted(outside, s[m], "left") + np.searchsorted(outside, s[m], "right")
    over = 2 * len(inside) - np.searchsorted(inside, s[~m], "left") - np.searchsorted(inside, s[~m], "right")
    return below / (2 * len(outside)), over / (2 * len(inside))


def _best_threshold(inside: Floats, outside: Floats) -> tuple[float, float]:
    """Return the t for which "score >= t" has the largest TPR - FPR, and that maximum (Youden's J)."""
    t = np.unique(np.concatenate([inside, outside]))
    gap = np.searchsorted(outside, t, "left") / len(outside) - np.searchsorted(inside, t, "left") / len(inside)
    best = int(np.argmax(gap))
    return float(t[best]), float(gap[best])


def _held_out(inside: Floats, outside: Floats, seed: int, confidence: float) -> tuple[AtThreshold, AtThreshold]:
    """Return balanced accuracy and advantage on the half that did not choose the threshold."""
    how = f"threshold chosen on a random half of each class (seed {seed}), evaluated on the other"
    if min(len(inside), len(outside)) < 2:
        none = AtThreshold(value=None, reason="a held-out threshold needs at least 2 members and 2 non-members")
        return none, none
    rng = np.random.default_rng(seed)
    (choose1, use1), (choose0, use0) = parted(inside, rng, 0.5), parted(outside, rng, 0.5)
    t, _ = _best_threshold(choose1, choose0)
    tp, tn = len(use1) - int(np.searchsorted(use1, t, "left")), int(np.searchsorted(use0, t, "left"))
    value = (tp / len(use1) + tn / len(use0)) / 2
    each = (1 + confidence) / 2  # two intervals, so that both hold together
    low, high = (
        (a + b) / 2
        for a, b in zip(clopper_pearson(tp, len(use1), each), clopper_pearson(tn, len(use0), each), strict=True)
    )
    name = f"Clopper-Pearson for TPR and TNR at {each:.2%} each, added"

    def scaled(by: float, plus: float) -> AtThreshold:
        value_, low_, high_ = (by * v + plus for v in (value, low, high))
        rule = "score >= threshold"
        return AtThreshold(value=value_, low=low_, high=high_, interval=name, threshold=t, rule=rule, how=how)

    return scaled(1, 0), scaled(2, -1)


def _advantage_best(inside: Floats, outside: Floats, confidence: float) -> AtThreshold:
    """Return the largest TPR - FPR over all thresholds (the Kolmogorov-Smirnov distance, one-sided).

    Its interval holds for the supremum over all thresholds: the band of Dvoretzky, Kiefer and Wolfowitz with Massart's
    constant (1990), half of the failure probability for each class.
    """
    _, value = _best_threshold(inside, outside)
    band = sum(math.sqrt(math.log(4 / (1 - confidence)) / (2 * n)) for n in (len(inside), len(outside)))
    name = "Dvoretzky-Kiefer-Wolfowitz band, both classes"
    how = "maximum over thresholds on the same records: optimistic"
    return AtThreshold(value=value, low=max(0.0, value - band), high=min(1.0, value + band), interval=name, how=how)


def _tpr_at(inside: Floats, outside: Floats, fpr: float, confidence: float) -> AtFPR:
    n1, n0 = len(inside), len(outside)
    k = min(math.floor(fpr * n0 + 1e-9), n0 - 1)  # 1e-9: 0.29 * 100 is 28.999...
    if k < 1:
        need = math.ceil(1 / fpr - 1e-9)
        return AtFPR(fpr=fpr, value=None, reason=f"an FPR of {fpr:g} takes {need} non-members, and there are {n0}")
    t = float(outside[n0 - 1 - k])
    tp, fp = int(above(inside, t)), int(above(outside, t))
    low, high = _tpr_interval(inside, outside, fpr, confidence)
    return AtFPR(
        value=tp / n1,
        low=min(low, tp / n1),
        high=max(high, tp / n1),
        interval="threshold binomial, rate Jeffreys",
        fpr=fpr,
        fpr_measured=fp / n0,
        threshold=t,
        rule="score > threshold",
    )


def _tpr_interval(inside: Floats, outside: Floats, fpr: float, confidence: float) -> tuple[float, float]:
    """Return limits for the TPR at the threshold whose true FPR is `fpr`, which may not be its FPR on these
    non-members.

    The number j of the n non-members above that threshold follows Bin(n, fpr). Of the m members, c(j) lie above it: the
    middle between those above the j-th non-member and those above the next. A straight line through c(j), weighted by
    the binomial, takes out the steps, which would be counted as uncertainty twice. Given c, the rate is Jeffreys'
    Beta(c + 1/2, m - c + 1/2). The limits are quantiles of this mixture. If the threshold were taken as known, an
    interval would cover far less than it promises: half of the uncertainty is the threshold's.
    """
    from scipy.optimize import brentq  # slow to import, and not every command scores

    n1, n0 = len(inside), len(outside)
    spread = 6 * math.sqrt(n0 * fpr * (1 - fpr)) + 6
    last = min(n0, math.ceil(n0 * fpr + spread))
    j = np.arange(max(0, math.floor(n0 * fpr - spread)), last + 1)
    log = gammaln(n0 + 1) - gammaln(j + 1) - gammaln(n0 - j + 1) + j * math.log(fpr) + (n0 - j) * math.log1p(-fpr)
    weight = np.exp(log) / np.exp(log).sum()
    over = np.concatenate([[0], above(inside, outside[::-1]), [n1]])  # members above the j-th largest, 0 for none
    steps = (over[j] + over[j + 1]) / 2
    centre, level = float(weight @ j), float(weight @ steps)
    slope = float(weight @ ((j - centre) * steps)) / max(float(weight @ (j - centre) ** 2), 1e-12)
    c = np.clip(level + slope * (j - centre), 0, n1)

    def quantile(p: float) -> float:
        return float(brentq(lambda rate: float(weight @ betainc(c + 0.5, n1 - c + 0.5, rate)) - p, 0, 1))

    tail = (1 - confidence) / 2
    return quantile(tail), quantile(1 - tail)


def _roc(inside: Floats, outside: Floats, points: int = ROC_POINTS) -> ROC:
    """Return the best TPR at each FPR, at most `points` of them, evenly spread over log FPR; (0, TPR) is the first."""
    n1, n0 = len(inside), len(outside)
    k = np.unique(np.concatenate([[0], np.geomspace(1, n0, points - 1).round().astype(np.int64)]))
    t = outside[np.maximum(n0 - 1 - k, 0)]
    fp, tp = np.where(k < n0, above(outside, t), n0), np.where(k < n0, above(inside, t), n1)
    keep = np.concatenate([[True], np.diff(fp) > 0])  # tied scores make one point of several k
    return ROC(fpr=(fp[keep] / n0).tolist(), tpr=(tp[keep] / n1).tolist(), drawn="steps, flat to the right")


def membership_scores(
    scores: ArrayLike,
    member: ArrayLike,
    *,
    seed: int = 0,
    confidence: float = 0.95,
    fprs: Sequence[float] = FPRS,
    roc: bool = True,
) -> MembershipScores:
    """Return AUC, balanced accuracy, advantage, TPR at low FPR and ROC points."""
    confidence = check_confidence(confidence)
    for fpr in fprs:
        if not 0 < fpr < 1:
            raise SettingError(f"fpr = {fpr} is not a false-positive rate. Give numbers strictly between 0 and 1.")
    inside, outside = split_classes(scores, member)
    balanced_accuracy, advantage = _held_out(inside, outside, seed, confidence)
    found = MembershipScores(
        members=len(inside),
        nonmembers=len(outside),
        confidence=confidence,
        auc=_auc(inside, outside, confidence),
        balanced_accuracy=balanced_accuracy,
        advantage=advantage,
        advantage_best=_advantage_best(inside, outside, confidence),
        tpr_at_fpr=[_tpr_at(inside, outside, fpr, confidence) for fpr in fprs],
    )
    if roc:
        found.roc = _roc(inside, outside)
    return found


def by_group(scores: ArrayLike, member: ArrayLike, labels: ArrayLike, what: str, **options: Any) -> OfGroups:
    """Return `membership_scores` for the candidates of each label, such as their client or class, by the label's name.

    A group that lacks members or non-members says so. Pooling compares scores across groups: it lowers the result of an
    attack whose scores mean something else for each client.
    """
    s, m = checked(scores, member)
    column = as_column(labels, f"labels of group {what!r}")
    if len(column) != len(s):
        raise ContractError(
            f"Group {what!r} has {len(column)} labels for {len(s)} candidates: give one label per candidate."
        )
    found: OfGroups = {}
    for label in np.unique(column):
        rows = column == label
        n1 = int(m[rows].sum())
        n0 = int(rows.sum()) - n1
        reason = missing_class(n1, n0)
        found[str(label)] = (
            Unscored(members=n1, nonmembers=n0, reason=reason)
            if reason
            else membership_scores(s[rows], m[rows], **(options | {"roc": False}))
        )
    return found
