"""The finding of a gate: kept, broken, or one that cannot be told, with the sentence that says why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedaudit.stats import Estimate

Told = Literal["kept", "broken", "cannot be told"]


@dataclass(frozen=True)
class Finding:
    """The verdict of one gate."""

    gate: str  # the name of the mark or the argument that set the limit
    told: Told
    message: str


def told(found: Estimate, limit: float) -> Told:
    """Return whether a figure is shown to be above its ceiling, shown not to be, or neither, by its interval."""
    if found.low is None or found.high is None:
        return "cannot be told"
    if found.low > limit:
        return "broken"
    return "kept" if found.high <= limit else "cannot be told"


def enough(found: Estimate, limit: float) -> int | None:
    """Return about how many values would tell, if they were spread like those at hand; None if that is not known.

    An interval narrows with the square root of the number of values. It has to be narrower than the distance from the
    estimate to the limit.
    """
    if found.value is None or found.low is None or found.high is None or not found.n:
        return None
    distance = abs(found.value - limit)
    half = found.value - found.low if found.value > limit else found.high - found.value
    if distance == 0 or half == 0:
        return None
    return math.ceil(found.n * (half / distance) ** 2)
