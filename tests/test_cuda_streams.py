"""Streams that are kept: torch's pool is stood in for by one that hands out 32 handles in turn, as torch's does."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedaudit import cuda_streams
from fedaudit.cuda_streams import (
    CONNECTIONS,
    LANES,
    POOL,
    TRANSFER,
    ask_for_connections,
    capture_stream,
    kept_stream,
    lane,
)

DEVICE = torch.device("cuda", 0)
DEFAULT = SimpleNamespace(cuda_stream=0, device=DEVICE)


class Pool:
    """Hands out `POOL` handles a device in turn."""

    def __init__(self) -> None:
        self.taken = 0
        self.current: Any = DEFAULT
        self._turns: dict[int, Any] = {}

    def __call__(self, index: int) -> Any:
        self.taken += 1
        turn = self._turns.setdefault(index, itertools.cycle(range(POOL)))
        return SimpleNamespace(cuda_stream=1 + 1000 * index + next(turn), device=torch.device("cuda", index))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    pool = Pool()
    monkeypatch.setattr(torch.cuda, "Stream", pool)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: pool.current)
    monkeypatch.setattr(cuda_streams, "_kept", {})
    return pool


def test_the_captured_stream_is_never_another_threads(pool: Pool) -> None:
    """300 rounds, each with a recording, lanes, and writers' threads of its own; somebody else takes streams too."""
    captured, others = set(), set()
    for _ in range(300):
        pool.current = DEFAULT
        captured.add(capture_stream().cuda_stream)
        with ThreadPoolExecutor(2) as writers:
            others |= {s.cuda_stream for s in writers.map(lambda _: kept_stream(TRANSFER, DEVICE), range(2))}
        for number in range(20):
            pool.current = lane(number, DEVICE)
            others.add(pool.current.cuda_stream)
            captured.add(capture_stream().cuda_stream)
        pool(0)
    assert len(captured) == 1 + LANES
    assert not captured & others
    assert len(others) == 1 + LANES
    assert pool.taken == 300 + 2 + 2 * LANES, "nothing of ours is taken anew"


def test_recordings_that_go_side_by_side_are_captured_apart(pool: Pool) -> None:
    """Captured on one stream they would share cuBLAS's workspace, and wait for each other for ever."""
    found = []
    for number in range(LANES):
        pool.current = lane(number, DEVICE)
        found.append(capture_stream().cuda_stream)
    assert len(set(found)) == LANES
    assert 2 + 2 * LANES <= POOL, "there are streams for all of them"


def test_a_handle_that_has_a_purpose_is_passed_over(pool: Pool) -> None:
    first = capture_stream()
    for _ in range(POOL - 1):
        pool(0)  # somebody else's: the next in turn is the captured one
    assert kept_stream(TRANSFER, DEVICE).cuda_stream != first.cuda_stream
    assert len({lane(number, DEVICE).cuda_stream for number in range(LANES)} | {first.cuda_stream}) == LANES + 1


def test_every_device_has_its_own(pool: Pool) -> None:
    assert kept_stream(TRANSFER, torch.device("cuda")) is kept_stream(TRANSFER, DEVICE), "the current one by its number"
    assert kept_stream(TRANSFER, torch.device("cuda", 1)) is not kept_stream(TRANSFER, DEVICE)


def test_more_purposes_than_streams_are_refused(pool: Pool) -> None:
    for number in range(POOL):
        kept_stream(str(number), DEVICE)
    with pytest.raises(RuntimeError, match="have a purpose already"):
        kept_stream("one more", DEVICE)


def test_threads_that_ask_at_once_get_one_stream(pool: Pool) -> None:
    start, found = threading.Barrier(8), []

    def take() -> None:
        start.wait()
        found.append(kept_stream(TRANSFER, DEVICE))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(stream) for stream in found}) == 1


def test_lanes_come_again_after_the_last_one(pool: Pool) -> None:
    assert lane(3, DEVICE) is lane(3 + LANES, DEVICE)
    assert lane(3, DEVICE) is not lane(4, DEVICE)


def test_connections_are_asked_for_unless_somebody_did() -> None:
    """A process that shares the device would have two of them, and ten models that train side by side ten lanes."""
    for before, after in (({}, "8"), ({CONNECTIONS: "1"}, "1"), ({CONNECTIONS: "32"}, "32")):
        environment = dict(before)
        ask_for_connections(environment)
        assert environment == {CONNECTIONS: after}


def test_connections_are_asked_for_before_cuda_starts() -> None:
    """Whatever opens a run asks for them while it is imported."""
    code = f"import os, torch, fedaudit.runtime.world; print(os.environ['{CONNECTIONS}'], torch.cuda._initialized)"
    environment = {name: value for name, value in os.environ.items() if name != CONNECTIONS}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["8", "False"]
