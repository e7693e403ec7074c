"""Trains deep models side by side, each by itself on a stream of the GPU, where a stack would be slower.

Mapped over models, a convolution gets as many groups as there are models. A GPU has fast kernels for one group and slow
ones for many: a step of ten ResNet-18 takes 94 ms in groups, and 25 ms model by model (see docs/results/speed.md). So
each model is a stack of one, with a stream and recordings of its own: small kernels of several models run at once, and
nobody waits for another's last batch, which is smaller. Images and weights lie channels last, which tensor cores take
as they are.

Where steps are compiled, these are too: one function of a loss for all models of an architecture. It joins batch norms
with what is around them.

A few layers of up to 128 channels are as fast in groups, and faster if they are compiled. So only deep networks and
those with a wide convolution are trained this way, by a rule that asks nothing of the clock: a run gives the same bits
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedaudit.cuda_streams import lane
from fedaudit.training.cuda_graphs import capturing, halves, shared
from fedaudit.training.stacked import stackable

DEEP = 16  # convolutions from which on a network is deep: ResNet-18 has 20
WIDE = 256  # channels on both sides from which on a convolution is wide: the last one of `conv4` has 256 and 512


def goes_apart(model: nn.Module, rows: Sequence[Tensor]) -> bool:
    """Return whether models like this one train side by side: deep or wide ones, on a GPU's tensor cores."""
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


class Lanes:
    """Streams of a GPU, one for each model that trains side by side with others. On a CPU all is done in turn.

    All streams begin after what the current stream was given. After `join` the current stream goes on after all of
    them.
    """

    def __init__(self, count: int, device: torch.device):
        self._device = device
        self._streams = [lane(number, device) for number in range(count)] if device.type == "cuda" else []
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(device))

    def on(self, number: int) -> AbstractContextManager[Any]:
        """Return a context whose work goes to the stream of this number."""
        return torch.cuda.stream(self._streams[number]) if self._streams else nullcontext()

    def join(self) -> None:
        """Let the current stream wait for all of them."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)


def in_turn(courses: Sequence[Iterator[None]], lanes: Lanes) -> None:
    """Take a step of each course in turn, on its own lane, until all have come to their end."""
    left = dict(enumerate(courses))
    while left:
        for number, course in list(left.items()):
            with lanes.on(number):
                try:
                    next(course)
                except StopIteration:
                    del left[number]


def each_on_its_lane(runs: Sequence[Callable[[Tensor], Tensor]], rows: Sequence[Tensor]) -> list[Tensor]:
    """Return what each function makes of its own rows, each on a lane of its own. Gradients reach the rows alone."""
    if torch.is_grad_enabled() and any(row.requires_grad for row in rows):
        return list(_EachOnItsLane.apply(tuple(runs), *rows))
    return _on_lanes([partial(run, row) for run, row in zip(runs, rows, strict=True)], rows[0].device)


def _on_lanes(works: Sequence[Callable[[], Tensor]], device: torch.device) -> list[Tensor]:
    lanes, found = Lanes(len(works), device), list[Tensor]()
    for number, work in enumerate(works):
        with lanes.on(number):
            found.append(work())
    lanes.join()
    return found


class _EachOnItsLane(torch.autograd.Function):
    """Functions of rows, forward and backward on lanes. The streams part and meet in both, as a recording needs it."""

    @staticmethod
    def forward(ctx: Any, runs: Sequence[Callable[[Tensor], Tensor]], *rows: Tensor) -> tuple[Tensor, ...]:
        leaves = [row.detach().requires_grad_(row.requires_grad) for row in rows]
        with torch.enable_grad():
            made = _on_lanes([partial(run, x) for run, x in zip(runs, leaves, strict=True)], rows[0].device)
        ctx.inside = leaves, made
        return tuple(out.detach() for out in made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        leaves, made = ctx.inside
        taught = [i for i, x in enumerate(leaves) if x.requires_grad]
        works = [lambda i=i: torch.autograd.grad(made[i], leaves[i], grads[i])[0] for i in taught]
        found = dict(zip(taught, _on_lanes(works, grads[0].device), strict=True))
        return None, *(found.get(i) for i in range(len(leaves)))


@contextmanager
def drawing_nothing(device: torch.device) -> Iterator[None]:
    """Refuse random numbers in this context: models that take steps in turn would not draw what each draws alone.

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
    """Return the same images or filters with their channels last in memory; anything else comes back as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def rounded(device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of one model's forward pass: factors of 16 bits where the setting says so.

    Nothing is kept between two passes, because a recording must not hold what another pass has rounded.
    """
    dtype = halves()
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


class _Halved(torch.autograd.Function):
    """All factors of a model in 16 bits, by one kernel for all of them. Gradients go back likewise."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *full: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = full[0].dtype
        return tuple(_converted(full, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        there = iter(_converted([g for g in grads if g is not None], ctx.dtype))
        return None, *(None if g is None else next(there) for g in grads)


def _converted(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    found = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(found, list(tensors))
    return found


def halved(model: nn.Module, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters, those of convolutions and linear layers in 16 bits where the setting says so.

    Torch's autocast would round each of them to the same bits by a kernel of its own.
    """
    dtype = halves()
    layers = {name for name, m in model.named_modules() if type(m) in (nn.Conv2d, nn.Linear)}
    names = [name for name, p in params.items() if name.rpartition(".")[0] in layers and p.dtype == torch.float32]
    if dtype is None or not names:
        return params
    rounded = _Halved.apply(dtype, *(params[name] for name in names))
    return {**params, **dict(zip(names, rounded, strict=True))}
