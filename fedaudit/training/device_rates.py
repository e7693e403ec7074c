"""Measures what a device can do: products of matrices in each precision, memory, copies, and the starting of kernels.

These are the machine's own rates, without any network. A run that is slow on a fast device starts too many small
kernels; one that comes near these rates has nothing left to gain but by less arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.training.cuda_graphs import Recording

KERNELS = 100  # kernels in one recording


@dataclass(frozen=True)
class Sizes:
    """The amounts that are computed and moved to measure a rate. They are enough to keep a device busy."""

    side: int = 8192  # of the matrices that are multiplied
    numbers: int = 1 << 28  # of 4 bytes, which are read and written
    times: int = 10


SMALL = Sizes(side=256, numbers=1 << 20, times=3)  # for a CPU


@dataclass(frozen=True)
class Rates:
    """The rates of one device."""

    products: dict[str, float]  # by precision: floating-point operations a second
    memory: float  # bytes a second that are read or written
    to_device: float  # bytes a second from main memory
    start_s: float  # seconds to start a small kernel by itself
    replay_s: float | None  # seconds for a small kernel in a recording; None if the device does not record


def rates(device: torch.device, sizes: Sizes | None = None) -> Rates:
    """Measure a device and return its rates. It takes a few seconds, and about 3 GB of its memory on a GPU."""
    cuda = device.type == "cuda"
    sizes = sizes or (Sizes() if cuda else SMALL)
    products = {"float32": _products(device, sizes, torch.float32)}
    if cuda:
        with _tf32():
            products["tf32"] = _products(device, sizes, torch.float32)
    products["bf16"] = _products(device, sizes, torch.bfloat16)
    source, target = (torch.zeros(sizes.numbers, device=device) for _ in range(2))
    moved = 2 * source.numel() * source.element_size()  # each number is read, and written
    memory = moved / seconds(lambda: target.copy_(source), device, sizes.times)
    here = torch.zeros(sizes.numbers // 4, pin_memory=cuda)
    to_device = here.numel() * here.element_size() / seconds(lambda: target[: len(here)].copy_(here), device, 3)
    one = torch.zeros(1, device=device)
    start = seconds(lambda: one.add_(1), device, 1000)
    return Rates(products, memory, to_device, start, _replay(one, device) if cuda else None)


def _products(device: torch.device, sizes: Sizes, dtype: torch.dtype) -> float:
    a, b = (torch.ones(sizes.side, sizes.side, device=device, dtype=dtype) for _ in range(2))
    return 2 * sizes.side**3 / seconds(lambda: a @ b, device, sizes.times)


def _replay(one: Tensor, device: torch.device) -> float:
    def step() -> list[Tensor | None]:
        for _ in range(KERNELS):
            one.add_(1)
        return []

    return seconds(Recording(step, [one]), device, 20) / KERNELS


def seconds(work: Callable[[], object], device: torch.device, times: int, tries: int = 3) -> float:
    """Return the seconds of one call: the least of several tries, of so many calls each, after one that warms up."""
    found = []
    work()
    for _ in range(tries):
        _wait(device)
        begun = time.perf_counter()
        for _ in range(times):
            work()
        _wait(device)
        found.append((time.perf_counter() - begun) / times)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
