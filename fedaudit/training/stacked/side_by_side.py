"""Takes the gradient of each model of a stack by itself, side by side on the streams of a GPU.

Mapped over models, a convolution gets as many groups as there are models. A GPU has fast kernels for one group and slow
ones for many: a step of ten ResNet-18 takes 94 ms in groups, and 25 ms model by model (see docs/results/speed.md). Each
model has a stream of its own, so that small kernels of several models run at once, and its images lie channels last,
which tensor cores take as they are. One recording holds the step of all models.

A few layers of up to 128 channels are as fast in groups, and faster if they are compiled. So only deep networks and
those with a wide convolution are stepped this way, by a rule that asks nothing of the clock: a run gives the same bits
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedaudit.cuda_streams import forked_streams
from fedaudit.training.cuda_graphs import capturing, halves, shared
from fedaudit.training.stacked import stackable

DEEP = 16  # convolutions from which on a network is deep: ResNet-18 has 20
WIDE = 256  # channels on both sides from which on a convolution is wide: the last one of `conv4` has 256 and 512
T = TypeVar("T")


def goes_apart(model: nn.Module, rows: Sequence[Tensor]) -> bool:
    """Return whether models like this one are stepped side by side: deep or wide ones, on a GPU's tensor cores."""
    return stackable.on_gpu(rows) and tensor_cores() and (is_deep(model) or is_wide(model))


def tensor_cores() -> bool:
    """Return whether convolutions may round their factors, to TF32 or to 16 bits.

    Without that the ways were not compared.
    """
    return torch.backends.cudnn.allow_tf32 or halves() is not None


def is_deep(model: nn.Module) -> bool:
    """Return whether a network has so many convolutions that groups of models do not pay."""
    return sum(isinstance(m, nn.Conv2d) and m.groups == 1 for m in model.modules()) >= DEEP


def is_wide(model: nn.Module) -> bool:
    """Return whether a network has a convolution so wide that groups of models do not pay."""
    plain = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.groups == 1]
    return any(min(m.in_channels, m.out_channels) >= WIDE for m in plain)


def side_by_side(count: int, device: torch.device, work: Callable[[int], T]) -> list[T]:
    """Return what `work` gives for each number below `count`. In a recording each call has a stream of its own.

    All streams begin after what the current stream was given, and the current stream goes on after all of them.
    """
    streams = forked_streams(count, device) if device.type == "cuda" else []
    if not streams:
        return [work(number) for number in range(count)]
    here = torch.cuda.current_stream(device)
    found = []
    for stream in streams:
        stream.wait_stream(here)
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            found.append(work(number))
    for stream in streams:
        here.wait_stream(stream)
    return found


@contextmanager
def drawing_nothing(device: torch.device) -> Iterator[None]:
    """Refuse random numbers in this context: models that are stepped in turn would not draw what each draws alone.

    Within a recording nothing can be asked; its first run came before it.
    """
    if capturing():
        yield
        return
    generators = [torch.default_generator, shared(device)]
    before = [generator.get_state() for generator in generators]
    yield
    if not all(torch.equal(g.get_state(), kept) for g, kept in zip(generators, before, strict=True)):
        raise RuntimeError("The loss draws random numbers. Draw them before training, and hand them to it as rows.")


def as_tensor_cores_take_it(x: Tensor) -> Tensor:
    """Return the same images with their channels last in memory; what is no image comes back as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def rounded(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of one model's forward pass: factors of 16 bits where the setting says so.

    Nothing is kept between two passes, because a recording must not hold what another pass has rounded.
    """
    dtype = halves()
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)
