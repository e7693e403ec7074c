"""How often bounds and tests are wrong, and how near the truth they come: the tables of docs/results/epsilon.md.

    python benchmarks/studies/epsilon/epsilon_calibration.py OUT.json [--repetitions 400] [--seed 0]
        [--table noise --release uint8]

Every bound: 400 repetitions without any leak (null) and 400 of a mechanism that is exactly as private as it claims.
A bound above the truth is an error; 5 % are allowed. Every test of noise: 400 repetitions of honest noise. The table
`level` says how often a true claim is refuted, at one in a thousand: give it 20,000 repetitions, as `guesses`,
`exact` and `shift`; `power` says what is found of noise that only looks like noise.
Numpy and SciPy only, one thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from epsilon_shared import rate  # noqa: E402

from fedaudit.attack.membership import _tpr_interval  # noqa: E402
from fedaudit.epsilon import lower_bounds as eps  # noqa: E402
from fedaudit.epsilon.exact_counts import claim_p  # noqa: E402
from fedaudit.epsilon.noise_tests import Residual, _shape, examine, residual  # noqa: E402
from fedaudit.significance import LEVEL  # noqa: E402
from fedaudit.stats import clopper_pearson  # noqa: E402

TRIALS = 1000  # of each of the two neighbours
EPSILONS, DELTAS = (0.5, 1.0, 2.0, 4.0, 8.0), (1e-5, 1e-2)
SCALES = (1.0, 0.9, 0.5, 0.25, 0.0)
LEVELS = np.arange(256) / 127.5 - 1
Bounds = dict[str, Callable[[np.ndarray, np.ndarray, float], float]]


def _at_zero(scores: np.ndarray, member: np.ndarray, delta: float) -> float:
    called = scores > 0
    tp, fp = int(called[member].sum()), int(called[~member].sum())
    n1, n0 = int(member.sum()), int((~member).sum())
    return eps.gdp_from_counts(tp, n1 - tp, fp, n0 - fp, delta).epsilon


BOUNDS: Bounds = {
    "Clopper-Pearson, ranks": lambda s, m, d: eps.from_scores(s, m, d).epsilon,
    "Clopper-Pearson, split": lambda s, m, d: eps.from_scores(s, m, d, correction="split").epsilon,
    "mu-GDP, fixed threshold": _at_zero,
    "mu-GDP, mean shift": lambda s, m, d: eps.gdp_mean_shift(s, m, d).epsilon,
}


def _guessed(bound: Callable[..., eps.Bound]) -> Callable[[np.ndarray, np.ndarray, float], float]:
    """As a one-run audit would have it: as many canaries as scores, each guessed by its sign."""
    known: dict[tuple[int, int, float], float] = {}

    def p(scores: np.ndarray, member: np.ndarray, delta: float) -> float:
        m, right = len(scores), int(((scores > 0) == member).sum())
        if (m, right, delta) not in known:
            known[m, right, delta] = bound(m, m, right, delta).p_value(1.0)
        return known[m, right, delta]

    return p


_mu = functools.cache(eps._mu_of)


def _shifted(scores: np.ndarray, member: np.ndarray, delta: float) -> float:
    """Return what `gdp_mean_shift(...).p_value(1.0)` does, without looking for the bound."""
    inside, outside = scores[member], scores[~member]
    shift, deviation = eps._shift_of(inside, outside)
    t = shift / deviation / math.sqrt(1 / len(inside) + 1 / len(outside))
    return eps._spared_p(_mu(1.0, delta), t, len(inside), len(outside))


CLAIMS: Bounds = {  # the p-value of epsilon = 1
    "Clopper-Pearson, ranks": lambda s, m, d: eps.from_scores(s, m, d).p_value(1.0),
    "mu-GDP, mean shift": _shifted,
    "one run, Steinke": _guessed(eps.one_run_steinke),
    "one run, f-DP": _guessed(eps.one_run_fdp),
}


def bounds(repetitions: int, seed: int) -> Iterator[dict[str, Any]]:
    """Two Gaussians mu deviations apart, where mu is what (epsilon, delta) allows; null: none apart."""
    member = np.arange(2 * TRIALS) < TRIALS
    for delta in DELTAS:
        for epsilon in (0.0, *EPSILONS):
            mu = eps._mu_of(epsilon, delta) if epsilon else 0.0
            rng = np.random.default_rng([seed, int(1e6 * delta), int(10 * epsilon)])
            found: dict[str, list[float]] = {name: [] for name in BOUNDS}
            for _ in range(repetitions):
                scores = rng.normal(size=2 * TRIALS) + mu * (member - 0.5)
                for name, bound in BOUNDS.items():
                    found[name].append(bound(scores, member, delta))
            for name, values in found.items():
                over = float(np.median(values)) / epsilon if epsilon else None
                wrong = rate(sum(v > epsilon for v in values), repetitions)
                row = {"bound": name, "epsilon": epsilon, "delta": delta, "median": float(np.median(values))}
                yield {**row, "found_over_true": over, **wrong}


def one_run(repetitions: int, seed: int, canaries: int = 1000) -> Iterator[dict[str, Any]]:
    """Canaries, guessed by the sign of a Gaussian score mu apart: every one, or as many of the surest as is best for a
    claim of that epsilon (`best_guesses`, f-DP)."""
    for delta in DELTAS:
        for epsilon in (0.0, *EPSILONS):
            mu = eps._mu_of(epsilon, delta) if epsilon else 0.0
            rng = np.random.default_rng([seed, 1, int(1e6 * delta), int(10 * epsilon)])
            right = rng.binomial(canaries, _phi(mu / 2), size=repetitions)
            for name, bound in (("one run, Steinke", eps.one_run_steinke), ("one run, f-DP", eps.one_run_fdp)):
                by_count = {v: bound(canaries, canaries, int(v), delta).epsilon for v in np.unique(right)}
                values = [by_count[v] for v in right]
                over = float(np.median(values)) / epsilon if epsilon else None
                wrong = rate(sum(v > epsilon for v in values), repetitions)
                row = {"bound": name, "epsilon": epsilon, "delta": delta, "median": float(np.median(values))}
                yield {**row, "found_over_true": over, **wrong}
            yield _surest(repetitions, canaries, epsilon, delta, mu, rng)


def _surest(
    repetitions: int, canaries: int, epsilon: float, delta: float, mu: float, rng: np.random.Generator
) -> dict[str, Any]:
    made = eps.best_guesses(canaries, epsilon or 1.0, delta)
    known: dict[int, float] = {}
    values = []
    for _ in range(repetitions):
        inside = rng.random(canaries) < 0.5
        scores = rng.normal(size=canaries) + mu * (inside - 0.5)
        right = int(((scores > 0) == inside)[np.argsort(-np.abs(scores))[:made]].sum())
        if right not in known:
            known[right] = eps.one_run_fdp(canaries, made, right, delta).epsilon
        values.append(known[right])
    over = float(np.median(values)) / epsilon if epsilon else None
    row = {"bound": "one run, f-DP, surest", "epsilon": epsilon, "delta": delta, "median": float(np.median(values))}
    return {**row, "found_over_true": over, **rate(sum(v > epsilon for v in values), repetitions), "guesses": made}


def guesses(repetitions: int, seed: int) -> Iterator[dict[str, Any]]:
    """One run with few and many canaries: as many guesses as `best_guesses` says, beside half of the canaries and all
    of them, on the same draws. In the mean, because with few canaries the median bound is 0."""
    for canaries in (50, 100, 200, 1000):
        for epsilon in (1.0, 4.0, 8.0):
            made = {"surest": eps.best_guesses(canaries, epsilon, 1e-5), "half": (canaries + 1) // 2, "all": canaries}
            found = _mean_bounds(repetitions, canaries, epsilon, list(made.values()), [seed, 9])
            yield from ({"way": way, **row} for way, row in zip(made, found, strict=True))


def _mean_bounds(
    repetitions: int, canaries: int, epsilon: float, numbers: list[int], seed: list[int]
) -> list[dict[str, Any]]:
    """For each number of guesses on the surest canaries the mean bound over the truth, and how often it lies above."""
    rows = []
    for made, counts in zip(numbers, rights(repetitions, canaries, epsilon, numbers, seed), strict=True):
        kinds, times = np.unique(counts, return_counts=True)
        values = np.array([eps.one_run_fdp(canaries, made, int(v), 1e-5).epsilon for v in kinds])
        row = {"canaries": canaries, "epsilon": epsilon, "guesses": made}
        wrong = rate(int(times[values > epsilon].sum()), repetitions)
        rows.append({**row, "mean_over_true": float(values @ times) / repetitions / epsilon, **wrong})
    return rows


def rights(repetitions: int, canaries: int, epsilon: float, numbers: list[int], seed: list[int]) -> np.ndarray:
    """Gaussian scores as far apart as (epsilon, 1e-5) allows: for each number of guesses on the surest canaries, how
    many are right in each repetition."""
    mu, rng = eps._mu_of(epsilon, 1e-5), np.random.default_rng([*seed, canaries, int(10 * epsilon)])
    found: list[np.ndarray] = []
    for begin in range(0, repetitions, 1000):
        inside = rng.random((min(1000, repetitions - begin), canaries)) < 0.5
        scores = rng.normal(size=inside.shape) + mu * (inside - 0.5)
        correct = np.take_along_axis((scores > 0) == inside, np.argsort(-np.abs(scores), 1), 1)
        found.append(correct.cumsum(1)[:, [made - 1 for made in numbers]])
    return np.concatenate(found).T


def exact(repetitions: int, seed: int, only: str = "") -> Iterator[dict[str, Any]]:
    """The exact test of two counts: how often a true claim is refuted at 5 %, beside two limits, and what each finds.

    `edge`: rates that lie exactly at the edge of the claim, where an error is likeliest; `corner`: where both demands
    are just met. `Gaussian`: the counts of two Gaussians as far apart as the claim allows, at a
    threshold 1.2 above the lower one.
    """
    delta = 1e-5
    for n in (50, 200, 1000):
        for epsilon in (0.5, 1.0, 4.0):
            mu, top = eps._mu_of(epsilon, delta), (1 - delta) / math.exp(epsilon)
            cases = {
                f"edge, FPR {share * top:.3g}": (share * top * math.exp(epsilon) + delta, share * top)
                for share in (0.1, 0.5)
            }
            corner = (1 - delta) / (1 + math.exp(epsilon))
            cases |= {"corner": (1 - corner, corner), "Gaussian": (1 - _phi(1.2 - mu), 1 - _phi(1.2))}
            cases = {name: rates for name, rates in cases.items() if only in name}
            for case, (tpr, fpr) in cases.items():
                rng = np.random.default_rng([seed, 7, n, int(10 * epsilon), int(1e6 * fpr)])
                pairs = np.stack([rng.binomial(n, tpr, repetitions), rng.binomial(n, fpr, repetitions)])
                kinds, times = np.unique(pairs, axis=1, return_counts=True)
                wrong = {"exact": 0, "limits": 0}
                for (tp, fp), count in zip(kinds.T.tolist(), times.tolist(), strict=True):
                    wrong["limits"] += count * bool(eps.box_epsilon(tp, fp, n, n, delta, 0.05) > epsilon)
                    wrong["exact"] += count * bool(claim_p(tp, fp, n, n, epsilon, delta) < 0.05)
                row: dict[str, Any] = {"n": n, "epsilon": epsilon, "case": case, "of": repetitions}
                row |= {name: rate(count, repetitions) for name, count in wrong.items()}
                if case == "Gaussian":
                    tp, fp = (int(v) for v in np.median(pairs, axis=1))
                    row["limits_find"] = max(0.0, float(eps.box_epsilon(tp, fp, n, n, delta, 0.05)))
                    row["exact_finds"] = eps._edge(lambda e: claim_p(tp, fp, n, n, e, delta) < 0.05, 1e-3)  # noqa: B023
                yield row


def shift(repetitions: int, seed: int) -> Iterator[dict[str, Any]]:
    """The shift of the means: how often the bound lies above the truth, of ten times as many repetitions."""
    many, delta = 10 * repetitions, 1e-5
    for n in (100, 1000, 10_000):
        for epsilon in (0.0, 1.0, 4.0):
            mu = eps._mu_of(epsilon, delta) if epsilon else 0.0
            rng = np.random.default_rng([seed, 8, n, int(10 * epsilon)])
            apart = rng.normal(mu, math.sqrt(2 / n), many)
            deviation = np.sqrt(rng.chisquare(2 * n - 2, many) / (2 * n - 2))
            t = np.sort(apart / deviation / math.sqrt(2 / n))
            low, high = 0, many  # the least t whose p-value at the truth is below 5 %
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if eps._spared_p(mu, float(t[middle]), n, n) < 0.05 else (middle + 1, high)
            yield {"n": n, "epsilon": epsilon, **rate(many - low, many)}


def power(repetitions: int, seed: int) -> Iterator[dict[str, Any]]:
    """How often noise that is none is refuted, by how many numbers there are: two clients, two rounds, as floats."""
    tape = np.random.default_rng([seed, 9]).normal(size=1_000_000)
    ways: dict[tuple[str, str], Any] = {("honest", ""): _normal}  # each draws so many numbers from a generator
    ways |= {("scale", f"x {s:g}"): lambda g, n, s=s: s * _normal(g, n) for s in (0.98, 0.95, 0.9, 0.8, 0.5)}
    ways |= {
        ("pool", f"{size:,} numbers"): lambda g, n, size=size: tape[g.integers(size, size=n)]
        for size in (100, 1000, 10_000, 100_000, 1_000_000)
    }
    ways |= {
        ("grid", f"{step:g} sigma"): lambda g, n, step=step: np.round(_normal(g, n) / step) * step
        for step in (0.1, 0.01, 1e-3, 1e-4)
    }
    ways |= {
        ("without noise", f"1 in {every}"): lambda g, n, every=every: np.where(
            g.random(n) < 1 / every, 0.0, _normal(g, n) * math.sqrt(every / (every - 1))
        )
        for every in (1000, 200, 50, 10)
    }
    ways |= {("period", f"{at}"): lambda g, n, at=at: np.resize(_normal(g, at), n) for at in (10, 50, 1000)}
    ways |= {
        ("tails", f"t, {df} degrees"): lambda g, n, df=df: g.standard_t(df, n) / math.sqrt(df / (df - 2))
        for df in (3, 5, 10, 30)
    }
    for numbers in (60, 600, 6000, 60_000):
        many = max(10, repetitions if numbers < 60_000 else repetitions // 2)
        for (way, how), draw in ways.items():
            rng = np.random.default_rng([seed, 10, numbers])
            found = sum(examine(_floats(rng, draw, numbers), exact=True).p < LEVEL for _ in range(many))
            yield {"way": way, "how": how, "numbers": numbers, **rate(found, many)}


def _normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=n)


def _floats(
    rng: np.random.Generator, draw: Callable[[np.random.Generator, int], np.ndarray], numbers: int
) -> list[Residual]:
    """Four releases of single precision, which resolve what such a format does."""
    found = []
    for i in range(4):
        n = numbers // 4
        clean = rng.normal(size=n).astype(np.float32)
        sent = (clean + draw(rng, n).astype(np.float32)).astype(np.float32)
        z = (sent.astype(np.float64) - clean).reshape(1, -1)
        grain = 2 * np.spacing(np.abs(sent)).astype(np.float64).reshape(1, -1)
        found.append(Residual(i % 2, i // 2, "E", z, clean.astype(np.float64).reshape(1, -1), grain=grain))
    return found


def _phi(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


RELEASES: dict[str, tuple[str, float, np.ndarray | None]] = {
    "float": ("float", 2.0, None), "uint8": ("uint8", 0.5, LEVELS), "uint8-clamped": ("uint8", 20.0, LEVELS),
}  # fmt: skip


def noise(
    repetitions: int, seed: int, releases: Iterable[str] = RELEASES, scales: Iterable[float] = SCALES
) -> Iterator[dict[str, Any]]:
    """1,000 numbers of ten clients: how often noise of so many times what is promised is refuted."""
    for what, sigma, levels in (RELEASES[name] for name in releases):
        for scale in scales:
            # Rounded releases take a hundred times as long; what is plain needs fewer of them.
            n = repetitions if levels is None or scale >= 0.9 else max(repetitions // 4, 1)
            rng = np.random.default_rng([seed, 2, int(10 * sigma), int(100 * scale)])
            findings = [examine(_releases(rng, scale, sigma, levels)) for _ in range(n)]
            yield {
                "release": what, "sigma": sigma, "noise": scale, **rate(sum(f.p < 0.05 for f in findings), n),
                "refuted": rate(sum(f.p < LEVEL for f in findings), n),
                "finds": float(np.median([f.finds for f in findings])),
            }  # fmt: skip


def level(
    repetitions: int, seed: int, releases: Iterable[str] = RELEASES, claims: Iterable[str] = CLAIMS
) -> Iterator[dict[str, Any]]:
    """How often what is true is refuted, and how often it is suspicious: honest noise; bounds at the claim itself."""
    for name in releases:
        what, sigma, levels = RELEASES[name]
        rng = np.random.default_rng([seed, 4, int(10 * sigma)])
        ps = [examine(_releases(rng, 1.0, sigma, levels)).p for _ in range(repetitions)]
        yield {"test": f"residuals, {what}, sigma {sigma:g}, 1,000 numbers", **_levels(ps)}
    member = np.arange(2 * TRIALS) < TRIALS
    for name in claims:
        for delta in DELTAS:
            rng = np.random.default_rng([seed, 5, int(1e6 * delta)])
            mu = eps._mu_of(1.0, delta)
            draws = (rng.normal(size=2 * TRIALS) + mu * (member - 0.5) for _ in range(repetitions))
            ps = [CLAIMS[name](scores, member, delta) for scores in draws]
            yield {"test": f"{name}, epsilon 1, delta {delta:g}", **_levels(ps)}


def shape(repetitions: int, seed: int) -> Iterator[dict[str, Any]]:
    """Normal numbers: how often two tests of their shape have p < 0.0001; that of skewness and kurtosis, and ours."""
    from scipy.stats import normaltest

    for n in (20, 60, 1000):
        rng, many = np.random.default_rng([seed, 6, n]), max(1, repetitions * 60 // max(n, 60))
        before = now = 0
        for begin in range(0, many, 1000):
            z = rng.normal(size=(min(1000, many - begin), n))
            before += int((normaltest(z, axis=1).pvalue < 1e-4).sum())
            now += sum(_shape(row) < 1e-4 for row in z)
        yield {"numbers": n, "skewness_and_kurtosis": rate(before, many), "geary": rate(now, many)}


def _levels(ps: list[float]) -> dict[str, Any]:
    return {
        "refuted": rate(sum(p < LEVEL for p in ps), len(ps)), "suspicious": rate(sum(p < 0.05 for p in ps), len(ps)),
    }  # fmt: skip


def _releases(rng: np.random.Generator, scale: float, sigma: float, levels: np.ndarray | None) -> list[Residual]:
    found = []
    for k in range(10):
        clean = rng.normal(size=(10, 10)) * 0.3
        sent = clean + scale * sigma * rng.normal(size=clean.shape)
        if levels is not None:
            sent = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, sent)]
        made = residual(sent, clean, sigma, client=k, round=1, part="E", levels=levels, seed=int(rng.integers(1 << 31)))
        found.append(made)
    return found


def coverage(repetitions: int, seed: int) -> Iterator[dict[str, Any]]:
    """Intervals of TPR at a low FPR: Gaussian scores, so that the true TPR is known."""
    from scipy.stats import norm

    for n in (100, 500, 2000):
        for shift in (0.0, 1.0, 2.0):
            rng = np.random.default_rng([seed, 3, n, int(shift)])
            member = np.arange(2 * n) < n
            held = {0.1: 0, 0.01: 0}
            width = {0.1: 0.0, 0.01: 0.0}
            for _ in range(repetitions):
                scores = rng.normal(size=2 * n) + shift * member
                inside, outside = np.sort(scores[member]), np.sort(scores[~member])
                for fpr in held:
                    true = float(norm.sf(norm.isf(fpr) - shift))
                    low, high = _tpr_interval(inside, outside, fpr, 0.95)
                    held[fpr] += low <= true <= high
                    width[fpr] += high - low
            for fpr, count in held.items():
                low, high = clopper_pearson(count, repetitions)
                yield {
                    "n": n, "shift": shift, "fpr": fpr, "covered": count / repetitions, "low": low, "high": high,
                    "of": repetitions, "mean_width": width[fpr] / repetitions,
                }  # fmt: skip


TABLES: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "bounds": bounds,
    "one_run": one_run,
    "guesses": guesses,
    "noise": noise,
    "coverage": coverage,
    "level": level,
    "shape": shape,
    "exact": exact,
    "shift": shift,
    "power": power,
}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repetitions", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", choices=sorted(TABLES), action="append")
    parser.add_argument("--release", choices=sorted(RELEASES), action="append", help="of the tables noise and level")
    parser.add_argument("--claim", choices=sorted(CLAIMS), action="append", help="of the table level")
    parser.add_argument("--noise", type=float, action="append", help="of the table noise: times what is promised")
    chosen = parser.parse_args(arguments)
    some: dict[str, dict[str, Any]] = {
        "noise": {"releases": chosen.release or RELEASES, "scales": chosen.noise or SCALES},
        "level": {
            "releases": chosen.release or ([] if chosen.claim else RELEASES),
            "claims": chosen.claim or ([] if chosen.release else CLAIMS),
        },
    }
    tables = {
        name: list(TABLES[name](chosen.repetitions, chosen.seed, **some.get(name, {})))
        for name in chosen.table or (name for name in TABLES if name in ("bounds", "one_run", "noise", "coverage"))
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({"repetitions": chosen.repetitions, "seed": chosen.seed, **tables}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
