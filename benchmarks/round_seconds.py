"""Tells the seconds of each round of a run as soon as the round ends."""

from __future__ import annotations

import time
from collections.abc import Callable


def each_round(tell: Callable[[list[float]], None]) -> Callable[[float, float, str], None]:
    """Return a run's `watch` that calls `tell` with the seconds of all rounds so far, each time that one has ended.

    What lies between rounds counts in none. Notes and evaluations tell a watch too, and neither begin nor end a round.
    """
    begun, seconds = 0.0, list[float]()

    def watch(done: float, whole: float, what: str) -> None:
        nonlocal begun
        if what == f"round {int(done) + 1}":
            begun = time.perf_counter()
        elif what == f"round {int(done)}":
            seconds.append(round(time.perf_counter() - begun, 1))
            tell(list(seconds))

    return watch
