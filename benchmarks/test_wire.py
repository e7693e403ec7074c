"""The codec against safetensors' own save and load of the same tensors.

What the codec does beyond them: it looks for NaN and infinity, hashes every byte when writing and when reading, checks
types against the declaration, and writes the tree around the tensors.
"""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from fedaudit import State, Up, private, state_of
from fedaudit.training import models
from fedaudit.wire.codec import decode, encode

PAIRS = 20


class Weights(Up):
    w: State = private("weights", via="model", unit="client")
    n: int = private("count", via="data", unit="client")


def blocks(megabytes: int, count: int) -> State:
    """So many equal float tensors."""
    rng = torch.Generator().manual_seed(0)
    size = megabytes * 1_000_000 // 4 // count
    return State({f"layer{i}.weight": torch.randn(size, generator=rng) for i in range(count)})


def throughput(paired, benchmark, state: State) -> float:
    """Ours as a share of safetensors': how many times its time we take, turned round."""
    message = Weights(state, 600)
    arrived = decode(encode(message), Weights)
    assert all(torch.equal(arrived.w[name], t) for name, t in state.items())
    del arrived  # neither side keeps a result: what lies on the heap decides how dear fresh memory is

    def ours() -> None:
        decode(encode(message), Weights)

    def theirs() -> None:
        safetensors.torch.load(safetensors.torch.save(dict(state)))

    share = 1 / paired(ours, theirs, pairs=PAIRS).ratio
    payload = sum(t.numel() * t.element_size() for t in state.values())
    seconds = benchmark.extra_info["ours_median_s"]
    benchmark.extra_info |= {
        "of_safetensors": round(share, 3),
        "megabytes": round(payload / 1e6, 1),
        "tensors": len(state),
        "megabytes_per_s": round(payload / 1e6 / seconds),
    }
    return share


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 20])
def test_50_megabytes_at_70_percent_of_safetensors(paired, benchmark, count):
    assert throughput(paired, benchmark, blocks(50, count)) >= 0.7


@pytest.mark.slow
def test_a_resnet_at_70_percent_of_safetensors(paired, benchmark):
    """About 50 MB as they come in practice: 122 tensors, most of them small, so the cost per tensor shows as well."""
    model = models.build("resnet18", shape=(3, 32, 32), classes=1000)
    assert throughput(paired, benchmark, state_of(model)) >= 0.7


def test_quick_50_megabytes(paired, benchmark):
    assert throughput(paired, benchmark, blocks(50, 20)) >= 0.6
