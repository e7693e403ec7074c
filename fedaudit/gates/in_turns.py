"""Two pieces of work timed in turns, and the ratio of their times with its interval.

A time says more about the machine than about the code, and on a machine that others use it changes from second to
second. Two things timed right after each other suffer alike, so their ratio is what gates.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from fedaudit.gates.finding import Told, enough, told
from fedaudit.stats import Estimate, pseudo_median

CONFIDENCE = 0.95  # of the verdict, all looks together
LOOKS = 5  # at 1, 2, 4, 8 and 16 times the rounds that were asked for
FEWEST = 8  # pairs: fewer have no interval at the level of one look


def clock() -> float:
    """Return seconds, without those in which this thread was ready to go on but the system ran somebody else's.

    Waiting for the disk counts. On a quiet machine, and where the system does not tell, this is the time on the wall.
    """
    try:
        with open("/proc/thread-self/schedstat") as file:
            waited = int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        waited = 0.0
    return time.perf_counter() - waited


@contextmanager
def without_garbage() -> Iterator[None]:
    """Keep what lives out of every collection: walking through all of torch takes longer than some of the work."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class Pairs:
    """Seconds of ours and theirs, pair by pair."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """Return the median over pairs: a neighbour's burst of work spoils some pairs, not the middle one."""
        return statistics.median(self.ratios)


@dataclass
class Turns:
    """Two pieces of work that are timed in turns, theirs first in every other pair.

    `rest` waits until neither of the two does anything any more. Nobody pays for it.
    """

    ours: Callable[[], object]
    theirs: Callable[[], object]
    rest: Callable[[], object]
    pairs: Pairs = field(default_factory=Pairs)

    def sample(self) -> None:
        """Take our turn."""
        self.pairs.ours.append(_timed(self.ours))

    def before(self) -> None:
        """Take their turn before ours, in every other pair."""
        if len(self.pairs.ours) % 2 == 0:
            self._theirs()
        self._ready()

    def after(self) -> None:
        """Take their turn after ours, if they had none in this pair."""
        if len(self.pairs.theirs) < len(self.pairs.ours):
            self._theirs()

    def more(self, pairs: int) -> None:
        """Time so many further pairs."""
        for _ in range(pairs):
            self.before()
            self.sample()
            self.after()

    def _theirs(self) -> None:
        self._ready()
        self.pairs.theirs.append(_timed(self.theirs))

    def _ready(self) -> None:
        self.rest()
        gc.collect()  # one side does not pay for what the other left behind


def _timed(work: Callable[[], object]) -> float:
    begun = clock()
    work()
    return clock() - begun


@dataclass(frozen=True)
class Compared:
    """A ratio held against its limit. `ratio` has the centre of all pairs and its interval."""

    ratio: Estimate
    limit: float | None
    told: Told
    rounds_to_tell: int | None  # about how many pairs would tell; None if it is told, or not known

    def shown(self) -> str:
        """Return the ratio with its interval as text."""
        if self.ratio.low is None or self.ratio.high is None:
            return f"{self.ratio.value:.3g}"
        return f"{self.ratio.value:.3g} [{self.ratio.low:.3g}, {self.ratio.high:.3g}]"


def ratio_of(ratios: Sequence[float], confidence: float = CONFIDENCE) -> Estimate:
    """Return the centre of ratios of two things that suffered alike, with its interval.

    The logarithms of such ratios spread alike to both sides.
    """
    found = pseudo_median([math.log(ratio) for ratio in ratios], confidence)
    ends = {end: None if (at := getattr(found, end)) is None else math.exp(at) for end in ("value", "low", "high")}
    return found.model_copy(update=ends)


def compared(ratios: list[float], limit: float | None) -> Compared:
    """Hold the ratio against a limit, at the level of one of several looks.

    Looking again after more rounds is another chance of an error. Each look therefore has its share of the 5 %, and a
    wrong verdict after all looks has a probability of 5 % at most.
    """
    ratio = ratio_of(ratios, 1 - (1 - CONFIDENCE) / LOOKS)
    if limit is None:
        return Compared(ratio, None, "kept", None)
    verdict = told(ratio, limit)
    return Compared(ratio, limit, verdict, enough(ratio, limit) if verdict == "cannot be told" else None)
