"""One figure of a report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedaudit.stats import Estimate


@dataclass(frozen=True)
class ReportCell:
    """A figure: mean, interval, number of seeds, and the values that went into it."""

    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    interval: str = ""
    each: dict[int, float] = field(default_factory=dict)  # by seed
    detail: str = ""  # which attack, what the claim is about
    reason: str = ""  # why there is no figure
    flag: str = ""  # a remark that changes how to read the figure

    @classmethod
    def of(cls, estimate: Estimate, each: dict[int, float], detail: str = "") -> ReportCell:
        return cls(
            estimate.value, estimate.low, estimate.high, estimate.n or 0, estimate.interval, each, detail,
            reason=estimate.reason,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        names = ("value", "low", "high", "n", "interval", "each", "detail", "reason", "flag")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if name == "value" or value not in (None, "", {})}
