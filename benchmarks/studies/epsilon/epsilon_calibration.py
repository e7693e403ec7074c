"""How often bounds and tests are wrong, and how near the truth they come: the tables of docs/results/epsilon.md.

    python benchmarks/studies/epsilon/epsilon_calibration.py OUT.json [--repetitions 400] [--seed 0]
        [--table noise --release uint8]

Every bound: 400 repetitions without any leak (null) and 400 of a mechanism that is exactly as private as it claims.
A bound above the truth is an error; 5 % are allowed. Every test of noise: 400 repetitions of honest noise. The table
`level` says how often a true claim is refuted, at one in a thousand: give it 20,000 repetitions.
Numpy and SciPy only, one thread.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit.attack.membership import _tpr_interval
from fedaudit.epsilon import lower_bounds as eps
from fedaudit.epsilon.noise_tests import Residual, _shape, examine, residual
from fedaudit.significance import LEVEL
from fedaudit.stats import clopper_pearson

TRIALS = 1000  # of each of the two neighbours
EPSILONS, DELTAS = (0.5, 1.0, 2.0, 8.0), (1e-5, 1e-2)
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


CLAIMS: Bounds = {  # the p-value of epsilon = 1
    "Clopper-Pearson, ranks": lambda s, m, d: eps.from_scores(s, m, d).p_value(1.0),
    "mu-GDP, mean shift": lambda s, m, d: eps.gdp_mean_shift(s, m, d).p_value(1.0),
    "one run, Steinke": _guessed(eps.one_run_steinke),
    "one run, f-DP": _guessed(eps.one_run_fdp),
}


def rate(count: int, n: int) -> dict[str, Any]:
    low, high = clopper_pearson(count, n)
    return {"wrong": count, "of": n, "rate": count / n, "low": low, "high": high}


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
    """Canaries, each guessed by the sign of a Gaussian score mu apart; every one is guessed."""
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
    "noise": noise,
    "coverage": coverage,
    "level": level,
    "shape": shape,
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
        for name in chosen.table or (name for name in TABLES if name not in ("level", "shape"))
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps({"repetitions": chosen.repetitions, "seed": chosen.seed, **tables}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
