"""Decoding by a checkpoint takes little more than the decoder's forward pass.

In round t of DFFKE each client decodes by the checkpoints of all t rounds, a few rows by each. To build a decoder for
each of them would take longer than to run it. Both are measured in one process, in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch

from fedaudit import state_of
from fedaudit.methods.datafree._decoder import Decoder, decode

SHAPE = (3, 16, 16)


def seconds(work: Callable[[], Any], times: int = 10) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        work()
    return time.perf_counter() - begun


@pytest.mark.benchmark(group="decoding")
def test_a_checkpoint_decodes_nearly_as_fast_as_its_model(benchmark: Any) -> None:
    model = Decoder(64, SHAPE, width=16).eval()
    state, e = state_of(model), torch.randn(1, 64)

    @torch.no_grad()
    def forward() -> Any:
        return model(e)

    def by_checkpoint() -> Any:
        return decode(state, e, SHAPE)

    forward(), by_checkpoint()
    ratio = median(seconds(by_checkpoint) / seconds(forward) for _ in range(9))
    benchmark.extra_info["ratio"] = ratio
    benchmark.pedantic(by_checkpoint, rounds=3)
    assert ratio < 4, f"decoding by a checkpoint takes {ratio:.1f} times as long as the decoder's forward pass"
