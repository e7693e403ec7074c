"""Ten ResNet-18 trained by the engine `stacked` against the same ten one after another, on a GPU. And, on a CPU, that
products of matrices, which `gpu_resnets.py` times beside the other ways, are the same network.

The work: the ResNet-18 for small images, 3x32x32, batch 64, steps of SGD with momentum. Two ways in one process are
compared, so that the ratio says nothing of the machine's own speed.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

import pytest
import torch
from gpu_resnets import in_products
from test_shadows import jobs
from torch import nn

from fedaudit.training.cuda_graphs import conditions, unrecorded
from fedaudit.training.models import build
from fedaudit.training.stacked.stack import fit_together


def timed(function: Any) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def work(steps: int) -> list[Any]:
    return jobs("resnet18_cifar", count=10, shape=(3, 32, 32), n=512, batch=64, steps=steps, device="cuda")


def norms_apart(these: list[Any], those: list[Any]) -> float:
    """Return by how much the sum of the norms of a model's parameters differs at most, as a share of it."""
    one, other = ([float(sum(p.norm() for p in job.model.parameters())) for job in part] for part in (these, those))
    return max(abs(a / b - 1) for a, b in zip(one, other, strict=True))


def compare(bf16: bool) -> dict[str, float]:
    """Return the seconds of both ways, without what only a first training has, and how far the models end apart."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    with conditions("eager", bf16=bf16):
        for job in work(4)[:1]:
            job.alone()
        alone = work(40)
        alone_s = timed(lambda: [job.alone() for job in alone])
    with conditions("recorded", bf16=bf16, stacked=True):
        fit_together(work(40))
        together = work(40)
        together_s = timed(lambda: fit_together(together))
    apart = norms_apart(alone, together)
    return {"alone_s": alone_s, "together_s": together_s, "times": alone_s / together_s, "norms_apart": apart}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("precision", "least"), [("tf32", 3), ("bf16", 5)])
def test_ten_resnets_together_are_so_many_times_as_fast(benchmark: Any, precision: str, least: float) -> None:
    found = benchmark.pedantic(compare, (precision == "bf16",), rounds=1)
    benchmark.extra_info |= found
    assert found["norms_apart"] < 0.05, "the same training, or the times mean nothing"
    assert found["times"] >= least


def compare_compiled() -> dict[str, float]:
    """Return the seconds of ten models side by side in bf16, recorded as they are and compiled, without first times."""
    unrecorded.clear()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    spent, ended = {}, {}
    for stepping in ("recorded", "compiled"):
        with conditions(stepping, bf16=True, stacked=True):
            fit_together(work(40))
            ended[stepping] = work(40)
            spent[stepping] = timed(functools.partial(fit_together, ended[stepping]))
    seconds = {f"{stepping}_s": s for stepping, s in spent.items()}
    return seconds | {
        "times": spent["recorded"] / spent["compiled"],
        "norms_apart": norms_apart(ended["recorded"], ended["compiled"]),
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_resnets_side_by_side_are_no_slower(benchmark: Any) -> None:
    """A step of them takes a ninth less in batches of 100 (docs/results/speed.md)."""
    found = benchmark.pedantic(compare_compiled, rounds=1)
    benchmark.extra_info |= found
    assert not unrecorded, "else nothing was compiled"
    assert found["norms_apart"] < 0.05, "the same training, or the times mean nothing"
    assert found["times"] >= 1


def test_a_network_in_products_is_the_network() -> None:
    """In training, with the stem that has a stride; each gradient to a thousandth of its largest number."""
    torch.manual_seed(0)
    model = build("resnet18@0.125", shape=(3, 64, 64), classes=10).train()
    other = in_products(copy.deepcopy(model))
    x = torch.randn(8, 3, 64, 64)
    found, wanted = (f(x) for f in (other, model))
    assert not any(type(m) in (nn.Conv2d, nn.BatchNorm2d) for m in other.modules())
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    direction = torch.randn_like(wanted)
    grads = [
        torch.autograd.grad((out * direction).sum(), list(f.parameters()))
        for out, f in ((found, other), (wanted, model))
    ]
    for a, b in zip(*grads, strict=True):
        assert float((a - b).abs().max()) <= 1e-3 * float(b.abs().max())
