"""Descents: minimising what a closure computes over some tensors, for what is no training of a model on rows.

A descent whose closure `repeats` (the same operations on the same memory in every step, whatever it draws) is recorded
on a GPU: forward and backward pass as one CUDA graph, the optimiser's step beside it. Several of them go side by side,
each on a stream of its own with the random numbers that it would draw alone: the same kernels in the same order, so the
same bits, and the small kernels of one fill what the large ones of another leave idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fedaudit.cuda_streams import lane
from fedaudit.training import recorded
from fedaudit.training.fit import Opt, moments_of
from fedaudit.training.recorded import Recording, record_giving_back, records_steps, shared

Moments = dict[str, Tensor]


class Kept:
    """A recording that serves several descents one after the other: on the same tensors with the same closure.

    `steps`: of all of them together. `changes`: what the closure changes beside the parameters, such as a batch norm's
    statistics."""

    def __init__(self, steps: int, changes: Sequence[Tensor] = ()):
        self.steps, self.changes = steps, list(changes)
        self.recording: Recording | None = None
        self.tried = False


@dataclass(frozen=True, eq=False)
class Descent:
    """One call of `optimise`, not yet carried out."""

    params: Sequence[Tensor]
    closure: Callable[[], Tensor]
    steps: int
    opt: Opt
    moments: Mapping[str, Tensor] | None = None
    repeats: bool = False
    # Before each step, with its number: what is no part of the recording. False: other shapes, so it is not replayed.
    before: Callable[[int], bool | None] | None = None
    kept: Kept | None = None

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def records(self) -> bool:
        """Whether its step is to be recorded here. A counter of FLOPs would not see what is replayed."""
        return (
            self.repeats
            and (self.steps if self.kept is None else self.kept.steps) >= recorded.WORTH_IT
            and records_steps(self.device)
            and not is_in_torch_dispatch_mode()
        )

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.params) * self.steps

    def alone(self) -> Moments:
        under = _UnderWay(self)
        under.begin()
        for i in range(self.steps):
            under.step(i)
        return moments_of(under.optimiser)


class _UnderWay:
    def __init__(self, descent: Descent):
        self.descent, self.params = descent, list(descent.params)
        self.optimiser = descent.opt.build(self.params, descent.moments)
        self.recording: Recording | None = None
        self.alike = True  # whether the next step is what was recorded

    def begin(self) -> None:
        """What comes before the first step, and the recording: afterwards everything is as it was, but for memory."""
        self._before(0)
        if self.descent.records:
            self.recording = self._record()

    def _record(self) -> Recording | None:
        kept = self.descent.kept or Kept(self.descent.steps)
        if not kept.tried:
            kept.tried = True
            changed = [*self.params, *kept.changes]
            kept.recording = record_giving_back(self._gradient, changed, self.descent.device)
        return kept.recording

    def step(self, i: int) -> None:
        if i:
            self._before(i)
        if self.recording is None or not self.alike:
            self._gradient()
        else:
            self.recording()
            for p, gradient in zip(self.params, self.recording.outputs, strict=True):
                p.grad = gradient
        self.optimiser.step()

    def _before(self, i: int) -> None:
        if self.descent.before is not None and i < self.descent.steps:
            self.alike = self.descent.before(i) is not False

    def _gradient(self) -> list[Tensor | None]:
        self.optimiser.zero_grad(set_to_none=True)
        self.descent.closure().backward()
        return [p.grad for p in self.params]


def side_by_side(descents: Sequence[Descent], drawn: Sequence[Tensor]) -> list[tuple[Moments, Tensor]]:
    """Carry out descents that record, on a GPU. `drawn`: the state of the device's global generator that belongs to
    each. Returns what each optimiser remembers, and its generator's state after it.

    A recording draws from the generator's state that was in place when it was made, so every descent gets a state of
    its own: numbers of one do not depend on how far the others have come.
    """
    device = descents[0].device
    generator = shared(device)
    usual = generator.graphsafe_get_state()
    begun, lanes = torch.cuda.current_stream(device), []
    try:
        for number, (descent, state) in enumerate(zip(descents, drawn, strict=True)):
            mine = generator.clone_state()
            generator.graphsafe_set_state(mine)
            generator.set_state(state)
            under, stream = _UnderWay(descent), lane(number, device)
            stream.wait_stream(begun)
            with torch.cuda.stream(stream):
                under.begin()
            lanes.append((under, mine, stream))
        for i in range(max(descent.steps for descent in descents)):
            for under, mine, stream in lanes:
                if i < under.descent.steps:
                    generator.graphsafe_set_state(mine)
                    with torch.cuda.stream(stream):
                        under.step(i)
        found = []
        for under, mine, stream in lanes:
            begun.wait_stream(stream)
            generator.graphsafe_set_state(mine)
            found.append((moments_of(under.optimiser), generator.get_state()))
        torch.cuda.synchronize(device)  # so that its time is known
        return found
    finally:
        generator.graphsafe_set_state(usual)
