"""At which level evidence speaks: the one place that says when a claim is refuted.

An accusation wants a stricter level than an estimate. A lower bound holds with 95 % probability (`--confidence`); but a
claim is *refuted* only where evidence as strong as this comes about in less than one of 1,000 honest runs, all tests
that were made being considered (Holm 1979). Between the two it is *suspicious*: one honest run in twenty is, and the
remedy is to repeat it with another seed or more trials. Where nothing was found, it counts what could have been: a test
that at the level it is really held to would miss what it should find *cannot tell*. What is left is *not refuted*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

LEVEL = 0.001  # of refuting a claim, over all tests of a run (or of a report's row) together
Said = Literal["refuted", "suspicious", "cannot tell", "not refuted"]


def level_of(confidence: float) -> float:
    """At which a claim is refuted: LEVEL, or less where a bound is asked to hold more surely than that."""
    return min(LEVEL, 1 - confidence)


def said(p: float, tells_at: float | None = None, confidence: float = 0.95, tests: int = 1) -> Said:
    """What one of so many tests says. `p` is corrected for them already; `tells_at` is the strictest level at which
    the test would find what it should (None: that was not asked), to be held against its share of the level."""
    level = level_of(confidence)
    if p < level:
        return "refuted"
    if p < 1 - confidence:
        return "suspicious"
    return "cannot tell" if tells_at is not None and tells_at >= level / tests else "not refuted"


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """p-values adjusted for how many there are (Holm 1979): below 0.05 together, wrong in at most 5 % of families."""
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])  # type: ignore[arg-type, return-value]
    adjusted: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * ps[i]))  # type: ignore[operator]
        adjusted[i] = largest
    return adjusted
