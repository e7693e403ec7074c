"""What several scripts of this study share: claims of epsilon = 1, private training, small runs, and counted rates."""

from __future__ import annotations

from typing import Any

from fedaudit.stats import clopper_pearson

ONE = {"epsilon": 1.0, "delta": 1e-2}  # for a release
PRIVATE = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:0.5", "delta": 1e-2}}
DIGITS: dict[str, Any] = {"dataset": "digits", "model": "mlp", "partition": "iid"}


def rate(count: int, n: int, what: str = "wrong") -> dict[str, Any]:
    """Return how often something came about in n repetitions, with Clopper and Pearson's limits."""
    low, high = clopper_pearson(count, n)
    return {what: count, "of": n, "rate": count / n, "low": low, "high": high}
