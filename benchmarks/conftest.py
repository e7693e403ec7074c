"""What the benchmarks share. They report times and gate ratios of two things measured in turn in one run: an absolute
time says more about the machine than about the code."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable

THREADS = 1  # on both sides of every comparison; the harness gets it as `threads`
# Before torch is imported: some of its libraries (on ARM the one for convolutions) take threads from here alone.
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))

import pytest  # noqa: E402
import torch  # noqa: E402

from fedaudit.gates.in_turns import Pairs, clock  # noqa: E402


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def paired(benchmark):
    """Time `ours` and `theirs` in turn, ours first in every other pair, and report ours as the benchmark's time.

    `between` tidies up after each of the two; nobody is billed for it.
    """

    def measure(
        ours: Callable[[], object],
        theirs: Callable[[], object],
        *,
        pairs: int,
        between: Callable[[], object] = lambda: None,
    ) -> Pairs:
        found, wall, cpu = Pairs(), Pairs(), Pairs()

        def one(work: Callable[[], object], side: str) -> None:
            clocks = ((found, clock), (wall, time.perf_counter), (cpu, time.process_time))
            since = [read() for _, read in clocks]
            work()
            for (pairs, read), begun in zip(clocks, since, strict=True):
                getattr(pairs, side).append(read() - begun)

        def other() -> None:
            gc.collect()  # what one side left behind is not on the other's bill
            one(theirs, "theirs")
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
            benchmark.pedantic(one, (ours, "ours"), setup=before, teardown=after, rounds=pairs)
        finally:
            gc.unfreeze()
        if benchmark.disabled:
            pytest.skip("--benchmark-disable: it ran, and nothing was compared")
        benchmark.extra_info |= {
            "ratio": round(found.ratio, 4),
            "on_the_wall": round(wall.ratio, 4),
            "cpu_ratio": round(cpu.ratio, 4),
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
