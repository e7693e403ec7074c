"""How much one run with 1,000 canaries can show at epsilon 4, with any number of guesses and by any valid bound.

    python benchmarks/studies/epsilon/epsilon_reach.py OUT.json [--repetitions 20000]

A bound from the number of right guesses refutes a claim where so many are too improbable. It cannot be larger than the
largest probability allows that a mechanism keeps the claim with: `largest` finds it, by a linear programme over all
distributions of that number.

Take a mechanism that draws a number of right guesses from such a distribution, then which canaries are guessed and
which guesses are right, both evenly. All outputs that a coin's flip tells apart are known: a guess on the canary was
right with i + 1 right ones in all, and is wrong with i after the flip, or the other way around. With p_i the
distribution, the first have the probability p_(i+1) (i + 1) / m before the flip and p_i (r - i) / m after it. The
claim holds if and only if for every s >= 1 the sum over outputs of max(0, before - s after) is at most delta(s), the
Gaussian's own. Any mechanism has this property on average over canaries and coins, since the sum is convex. So the
programme's value is a valid limit with any choice of some s, and with all of them no smaller one is valid.

Kept for each number of guesses: the mean of the bound that audits use, and for some the mean of the programme's
(`exact`); and how much the latter grows with three times as many s (`slopes`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sparse
from scipy.optimize import linprog
from scipy.special import ndtri

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from epsilon_calibration import rights  # noqa: E402

from fedaudit.epsilon import lower_bounds as eps  # noqa: E402
from fedaudit.privacy.calibration import gaussian_delta  # noqa: E402

CANARIES, EPSILON, DELTA, LEVEL = 1000, 4.0, 1e-5, 0.05
USED = (20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 137, 150, 160, 180, 200, 250, 300, 400, 500, 700, 1000)
EXACT = (90, 110, 120, 137, 150, 170, 200)
FINER = ((137, 115), (137, 119), (137, 123))  # guesses and right ones
FEW, ALL = np.arange(0, 5.01, 0.125), np.concatenate([np.arange(0, 5, 0.05), np.arange(5, 12, 0.25)])  # log s


def largest(mu: float, m: int, r: int, v: int, slopes: np.ndarray = FEW) -> tuple[float, np.ndarray]:
    """The largest P[at least v of r guesses on m canaries are right] that mu-GDP allows, and the distribution."""
    i, n = np.arange(r), r + 1
    up, down = (i + 1.0), (r - i).astype(float)  # times p_(i+1) and p_i; all in units of 1 / m
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    values: list[np.ndarray] = []
    limits: list[np.ndarray] = []
    at = 0
    for k, slope in enumerate(slopes):
        s, more = math.exp(slope), n + 2 * r * k  # for each output, the positive part of before - s after
        for a, b, one, other, part in ((up, down, i + 1, i, more + i), (down, up, i, i + 1, more + r + i)):
            rows += [at + i] * 3
            columns += [one, other, part]
            values += [a, -s * b, -np.ones(r)]
            limits.append(np.zeros(r))
            at += r
        rows.append(np.full(2 * r, at))
        columns.append(more + np.arange(2 * r))
        values.append(np.ones(2 * r))
        limits.append(np.array([m * gaussian_delta(float(slope), mu)]))
        at += 1
    width = n + 2 * r * len(slopes)
    found = linprog(
        -((np.arange(width) >= v) & (np.arange(width) < n)).astype(float),
        A_ub=sparse.csr_matrix(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(at, width)
        ),
        b_ub=np.concatenate(limits),
        A_eq=sparse.csr_matrix((np.arange(width) < n).astype(float)[None]),
        b_eq=[1.0],
        method="highs",
    )
    if found.x is None:
        raise RuntimeError(f"The programme for {v} of {r} guesses on {m} canaries has no solution: {found.message}")
    p = np.maximum(found.x[:n], 0)
    return -float(found.fun), p / p.sum()


def mu_of(p: np.ndarray, m: int) -> float:
    """The smallest mu with which the mechanism above is mu-GDP, over all its trade-offs."""
    i, r = np.arange(len(p) - 1), len(p) - 1
    right, wrong = p[1:] * (i + 1) / m, p[:-1] * (r - i) / m
    before, after = np.concatenate([right, wrong]), np.concatenate([wrong, right])
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.nan_to_num(before / after, nan=0.0), kind="stable")
    order = order[before[order] > after[order]]
    taken, paid = before[order].cumsum(), after[order].cumsum()
    return float((ndtri(taken) - ndtri(paid)).max(initial=0.0))


def exact_mu(m: int, r: int, v: int, slopes: np.ndarray = FEW) -> float:
    """The largest mu that v of r right guesses refute at 5 %, by the programme, rounded down."""
    low = eps._edge(lambda mu: eps._fdp_refutes(mu, LEVEL, m, r, v), 1e-6)
    high = 1.1 * low + 0.02
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if largest(middle, m, r, v, slopes)[0] < LEVEL else (low, middle)
    return low


def rows(repetitions: int) -> Iterator[dict[str, Any]]:
    numbers = sorted({*USED, *EXACT})
    for made, counts in zip(numbers, rights(repetitions, CANARIES, EPSILON, numbers, [0, 11]), strict=True):
        kinds, times = np.unique(counts, return_counts=True)
        used = [share(eps.one_run_fdp(CANARIES, made, int(v), DELTA).detail["mu"]) for v in kinds]
        row = {"guesses": made, "of": repetitions, "used": float(np.array(used) @ times) / repetitions}
        if made in EXACT:  # at some numbers of right guesses; straight lines between them lie above, if anything
            ends = np.quantile(counts, [0.001, 0.999])
            some = np.unique(np.linspace(*ends, 10).round().astype(int))
            values = [share(exact_mu(CANARIES, made, int(v))) for v in some]
            row["exact"] = float(np.interp(counts, some, values).mean())
        yield row


def slopes() -> Iterator[dict[str, Any]]:
    for made, right in FINER:
        few, all_ = (share(exact_mu(CANARIES, made, right, slopes)) for slopes in (FEW, ALL))
        yield {"guesses": made, "right": right, "few": few, "all": all_}


def share(mu: float) -> float:
    return eps._epsilon_of(mu, DELTA) / EPSILON


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--repetitions", type=int, default=20_000)
    given = parser.parse_args(arguments)
    kept: dict[str, list[dict[str, Any]]] = {"reach": [], "slopes": []}
    for name, made in (("reach", rows(given.repetitions)), ("slopes", slopes())):
        for row in made:
            print(row, file=sys.stderr, flush=True)
            kept[name].append(row)
    given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
