"""Where a program's time goes, by samples of its stacks (`benchmarks/stack_samples.py`)."""

from __future__ import annotations

import importlib
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import STUDIES


@pytest.fixture(scope="module")
def sampling() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.append(str(STUDIES.parent))
    yield importlib.import_module("stack_samples")
    sys.path[:] = before


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a package with a function that calls another, which holds on until it may end."""
    (tmp_path / "sampled").mkdir()
    (tmp_path / "sampled" / "__init__.py").write_text("")
    (tmp_path / "sampled" / "work.py").write_text(
        "def outer(ready, over):\n    inner(ready, over)\n\n"
        "def inner(ready, over):\n    ready.set()\n    while not over:\n        pass\n\n"
        "def waits(ready, line):\n    ready.set()\n    line.get()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("sampled.work")


def test_functions_count_while_they_work_and_not_while_they_wait(sampling: Any, package: Any) -> None:
    """Both that stand on a working thread's stack, the inner one as where it stood."""
    over, line, ready = list[int](), queue.Queue[int](), [threading.Event(), threading.Event()]
    works = threading.Thread(target=package.outer, args=(ready[0], over), daemon=True)
    waits = threading.Thread(target=package.waits, args=(ready[1], line), daemon=True)
    samples = sampling.StackSamples("sampled")
    try:
        for thread in (works, waits):
            thread.start()
        for begun in ready:
            assert begun.wait(10)
        for _ in range(1000):  # until the second one has come to its wait
            samples.seen.clear(), samples.leaves.clear()
            samples.take()
            if not any("waits" in name for name in samples.seen):
                break
            time.sleep(0.001)
        samples.take()
    finally:
        over.append(1)
        line.put(0)
        for thread in (works, waits):
            thread.join()
    assert samples.seen == {"work:outer": 2, "work:inner": 2}
    assert set(samples.leaves) == {"work:inner"}


def test_seconds_are_shares_of_the_time_that_was_watched(sampling: Any) -> None:
    samples = sampling.StackSamples("sampled")
    samples.samples, samples.seconds = 20, 10.0
    samples.seen.update({"a:f": 20, "b:g": 5})
    samples.leaves.update({"b:g": 5})
    assert samples.table() == [["a:f", 10.0, 0.0], ["b:g", 2.5, 2.5]]
    assert samples.table(1) == [["a:f", 10.0, 0.0]]


def test_a_block_is_watched_until_it_ends(sampling: Any) -> None:
    samples, before = sampling.StackSamples("sampled", every_s=0.001), threading.active_count()
    with samples.watching():
        while not samples.samples:
            pass
    taken = samples.samples
    time.sleep(0.02)  # in which twenty more would be taken
    assert (samples.samples, threading.active_count()) == (taken, before)
    assert samples.seconds > 0
