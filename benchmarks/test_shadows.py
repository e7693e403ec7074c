"""Shadows trained together against the same shadows trained one after another.

The work: 64 ConvNets of width 64 (FedAF's network at half its width), 3x32x32 images, batch 64, 200 steps of SGD. On a
GPU one such network leaves most of the device idle; a stack of them does not. On a CPU little is won, and the ratio is
reported only, at a size that a laptop bears.
"""

from __future__ import annotations

import time

import pytest
import torch

from fedaudit import ce, sgd
from fedaudit.training import models
from fedaudit.training.stacked.stack import Job, fit_together
from fedaudit.training.stacked.stackable import why_not


def jobs(arch: str, *, count: int, shape, n: int, batch: int, steps: int, device="cpu", dtype=torch.float32):
    made = []
    for i in range(count):
        torch.manual_seed(i)
        model = models.build(arch, shape=shape, classes=10).to(device, dtype)
        rows = torch.randn(n, *shape, dtype=dtype).to(device), torch.randint(10, (n,)).to(device)
        options = {"opt": sgd(0.01, momentum=0.9), "batch": batch, "steps": steps}
        made.append(Job(model, ce, rows, torch.Generator(device).manual_seed(i), options))
    return made


def difference(these, those) -> float:
    """The largest difference of a number in a model's state."""
    return max(
        float((a - b).abs().max())
        for p, q in zip(these, those, strict=True)
        for a, b in zip(p.model.state_dict().values(), q.model.state_dict().values(), strict=True)
    )


def test_a_stack_is_equal_to_training_one_by_one(benchmark):
    """In float64 to 1e-5 over 10 steps, running statistics of batch norm among it."""
    work = {"count": 8, "shape": (3, 16, 16), "n": 64, "batch": 16, "steps": 10, "dtype": torch.float64}
    alone, together = jobs("convnet@0.125", **work), jobs("convnet@0.125", **work)
    for job in alone:
        job.alone()
    assert why_not(together) is None
    benchmark.pedantic(fit_together, (together,), rounds=1)
    found = difference(alone, together)
    benchmark.extra_info |= {"largest_difference": found}
    assert found < 1e-5


@pytest.mark.parametrize("arch", ["mlp", "cnn", "cnn_bn"])
def test_the_ratio_on_a_cpu(paired, benchmark, arch):
    """Reported, with no bar: a ratio below 1 says that the stack is faster."""
    work = {"count": 16, "shape": (1, 8, 8), "n": 64, "batch": 16, "steps": 5}
    found = paired(
        lambda: fit_together(jobs(arch, **work)), lambda: [job.alone() for job in jobs(arch, **work)], pairs=3
    )
    benchmark.extra_info |= {"times_as_fast": round(1 / found.ratio, 2), "threads": torch.get_num_threads()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_64_convnets_together_are_10_times_as_fast_on_a_gpu(benchmark):
    """Stacked and compiled against one by one. Compiling is done once for all clients of a run: it is timed apart."""

    def work(**other):
        options = {"count": 64, "shape": (3, 32, 32), "n": 512, "batch": 64, "steps": 200, "device": "cuda", **other}
        return jobs("convnet@0.5", **options)

    def timed(function) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        function()
        torch.cuda.synchronize()
        return time.perf_counter() - begun

    for job in work(count=2, steps=5):
        job.alone()
    one_by_one, stacked, compiled = work(), work(), work()
    alone_s = timed(lambda: [job.alone() for job in one_by_one])
    fit_together(work(steps=5))
    stacked_s = timed(lambda: fit_together(stacked))
    compiling_s = timed(lambda: fit_together(work(), compile=True))
    compiled_s = timed(lambda: benchmark.pedantic(fit_together, (compiled,), {"compile": True}, rounds=1))
    benchmark.extra_info |= {
        "device": torch.cuda.get_device_name(),
        "one_by_one_s": round(alone_s, 2),
        "stacked_s": round(stacked_s, 2),
        "compiled_s": round(compiled_s, 2),
        "first_compiled_run_s": round(compiling_s, 2),
        "times_as_fast": round(alone_s / compiled_s, 1),
        "times_as_fast_stacked": round(alone_s / stacked_s, 1),
    }
    # The same training, or the times mean nothing; that it is equal is shown in float64 above.
    losses = [float(torch.stack([p.norm() for p in job.model.parameters()]).sum()) for job in (*one_by_one, *compiled)]
    assert max(abs(a / b - 1) for a, b in zip(losses[:64], losses[64:], strict=True)) < 0.05
    assert alone_s / compiled_s >= 10
