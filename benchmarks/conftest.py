"""What the benchmarks share. They report times and gate ratios of two things measured in turn in one run: an absolute
time says more about the machine than about the code."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

THREADS = 1  # on both sides of every comparison; the harness gets it as `threads`


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


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
        """The median over pairs: a neighbour's burst of work spoils some pairs, not the middle one."""
        return statistics.median(self.ratios)


@pytest.fixture
def paired(benchmark):
    """Time `ours` and `theirs` in turn, ours first in every other pair, and report ours as the benchmark's time.

    A side that returns seconds is taken at its word, so that it can leave out what the other does not do.
    """

    def measure(
        ours: Callable[[], float | None],
        theirs: Callable[[], float | None],
        *,
        pairs: int,
        between: Callable[[], None] = lambda: None,
    ) -> Pairs:
        found = Pairs()

        busy = Pairs()  # seconds of CPU: reported beside the ratio, because neighbours hardly change them

        def one(work: Callable[[], float | None], into: list[float], busy: list[float]) -> None:
            begun, cpu = time.perf_counter(), time.process_time()
            said = work()
            into.append(time.perf_counter() - begun if said is None else said)
            busy.append(time.process_time() - cpu)

        def other() -> None:
            gc.collect()  # what one side left behind is not on the other's bill
            one(theirs, found.theirs, busy.theirs)
            between()

        def before() -> None:
            if len(found.ours) % 2 == 0:
                other()
            gc.collect()

        def after(*_: object) -> None:
            between()
            if len(found.theirs) < len(found.ours):
                other()

        for work in (ours, theirs):  # caches, lazy imports, the allocator
            work()
            between()
        gc.collect()
        gc.freeze()  # else each collection walks through all of torch, which takes longer than some of the work
        try:
            benchmark.pedantic(one, (ours, found.ours, busy.ours), setup=before, teardown=after, rounds=pairs)
        finally:
            gc.unfreeze()
        if benchmark.disabled:
            pytest.skip("--benchmark-disable: it ran, and nothing was compared")
        benchmark.extra_info |= {
            "ratio": round(found.ratio, 4),
            "cpu_ratio": round(busy.ratio, 4),
            "pairs": len(found.ratios),
            "ratios": [round(r, 4) for r in found.ratios],
            "ours_median_s": round(statistics.median(found.ours), 5),
            "theirs_median_s": round(statistics.median(found.theirs), 5),
        }
        return found

    return measure


@pytest.fixture(autouse=True)
def _show(benchmark, capsys):
    """Print what pytest-benchmark's table has no column for."""
    yield
    text = ", ".join(f"{key} {value}" for key, value in benchmark.extra_info.items() if key != "ratios")
    with capsys.disabled():
        print(f"\n{benchmark.name}: {text}")
