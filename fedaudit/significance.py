"""Significance levels: the one place that says when a claim is refuted.

Refuting a claim takes a stricter level than estimating a bound. A lower bound holds with 95 % probability
(`--confidence`). A claim is *refuted* only if fewer than one in 1,000 honest runs would give evidence as strong as
this, after a correction for all tests that were made (Holm 1979). Between these two levels it is *suspicious*: one
honest run in twenty is, and the remedy is to repeat the run with another seed or more trials. If a test found nothing,
its power counts: a test that would miss a real violation at its corrected level *cannot tell*. In all other cases the
claim is *not refuted*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

LEVEL = 0.001  # for refuting a claim, over all tests of a run (or of a report's row) together
Said = Literal["refuted", "suspicious", "cannot tell", "not refuted"]


def level_of(confidence: float) -> float:
    """Return the level at which a claim is refuted: LEVEL, or 1 - confidence if that is smaller."""
    return min(LEVEL, 1 - confidence)


def said(p: float, tells_at: float | None = None, confidence: float = 0.95, tests: int = 1) -> Said:
    """Return the verdict of one test among `tests` tests.

    `p` is already corrected for the number of tests. `tells_at` is the strictest level at which the test would still
    find a real violation. It is compared with this test's share of the level. None means that this was not measured.
    """
    level = level_of(confidence)
    if p < level:
        return "refuted"
    if p < 1 - confidence:
        return "suspicious"
    return "cannot tell" if tells_at is not None and tells_at >= level / tests else "not refuted"


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Return the p-values adjusted for their number (Holm 1979).

    Calling all adjusted values below 0.05 significant makes an error in at most 5 % of families of tests.
    """
    order = sorted((i for i, p in enumerate(ps) if p is not None), key=lambda i: ps[i])  # type: ignore[arg-type, return-value]
    adjusted: list[float | None] = [None] * len(ps)
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * ps[i]))  # type: ignore[operator]
        adjusted[i] = largest
    return adjusted
