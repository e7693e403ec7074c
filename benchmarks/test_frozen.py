"""What a client keeps frozen does not cost more with each round, as what it merely remembers does.

Ten clients hold a buffer of past rounds, one copy of which is the same for all, as in DFFKE. A round reads and keeps
each client's state three times, as three asks do, and commits. Both ways are measured in one process, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from fedaudit import State, freeze
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.task import ClientState
from fedaudit.wire.codec import decode, encode_lazily, packing

CPU = torch.device("cpu")
CLIENTS, ROUNDS, ROWS, WIDTH = 10, 10, 200, 512


def states(folder: Path, keep: Callable[[Any], Any]) -> Store:
    """Return ten clients after round 1, each with a buffer of ten rounds of 4 MB, a tenth of it from each client."""
    rng, store = torch.Generator().manual_seed(0), Store(folder, stays=1 << 40)
    past = {t: {i: torch.randn(ROWS, WIDTH, generator=rng) for i in range(CLIENTS)} for t in range(ROUNDS)}
    for k in range(CLIENTS):
        memory = {"B": {t: keep(E) for t, E in past.items()}}
        store.put_client(k, 1, 0, encode_lazily(ClientState(State({"w": torch.zeros(1000)}), memory, 0, {}), CPU))
    store.commit(1, b"", {})
    return store


def a_round(store: Store, t: int) -> float:
    """Return the seconds that a round takes."""
    begun = time.perf_counter()
    for ask in range(3):
        for k in range(CLIENTS):
            state = decode(store.client(k) or b"", ClientState)
            store.put_client(k, t, ask, encode_lazily(ClientState(state.model, state.memory, 0, {}), CPU))
    store.commit(t, b"", {})
    return time.perf_counter() - begun


@pytest.mark.benchmark(group="frozen")
def test_a_frozen_buffer_is_not_copied_in_each_round(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where states stay and all tensors of a type are gathered: at least three times as fast."""
    monkeypatch.setattr(packing, "_is_home", lambda t: False)
    plain, frozen = states(tmp_path / "plain", lambda E: E), states(tmp_path / "frozen", freeze)
    times = [(a_round(plain, t), a_round(frozen, t)) for t in range(2, 7)]
    ratio = median(a / b for a, b in times)
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(a_round, args=(frozen, 7), rounds=1)
    assert ratio > 3, f"a frozen buffer is only {ratio:.1f} times as fast as one that is copied"
