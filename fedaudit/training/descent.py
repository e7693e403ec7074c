"""Descents: they minimise what a closure computes over some tensors, where this is not training a model on rows.

A descent whose closure `repeats` does the same operations on the same memory in every step, whatever it draws. On a GPU
such a descent is recorded: the forward and backward pass is one CUDA graph, and the optimiser's step runs beside it.
Several descents run side by side. Each has its own stream and the random numbers that it would draw alone, so the same
kernels run in the same order and give the same bits. The small kernels of one descent use the time that the large
kernels of another leave idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fedaudit.cuda_streams import lane
from fedaudit.training import cuda_graphs
from fedaudit.training.cuda_graphs import Recording, record_giving_back, records_steps, shared
from fedaudit.training.fit import Opt, moments_of

Moments = dict[str, Tensor]


class Kept:
    """A recording that serves several descents, one after the other, on the same tensors with the same closure.

    `steps` counts the steps of all these descents together. `changes` lists the tensors that the closure changes beside
    the parameters, such as a batch norm's statistics.
    """

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
    # Called before each step with the step's number; does what is not part of the recording. It returns False if the
    # step has other shapes, which the recording cannot replay.
    before: Callable[[int], bool | None] | None = None
    kept: Kept | None = None

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    @property
    def records(self) -> bool:
        """Return whether this descent's step is to be recorded here.

        A counter of FLOPs would not see replayed work, so nothing is recorded while one is active.
        """
        return (
            self.repeats
            and (self.steps if self.kept is None else self.kept.steps) >= cuda_graphs.WORTH_IT
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
        self.alike = True  # whether the next step has the recorded shapes

    def begin(self) -> None:
        """Prepare the first step and record it. Recording takes memory, and leaves everything else as it was."""
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
        self.descent.opt.set_rate(self.optimiser, i, self.descent.steps)
        self.optimiser.step()

    def _before(self, i: int) -> None:
        if self.descent.before is not None and i < self.descent.steps:
            self.alike = self.descent.before(i) is not False

    def _gradient(self) -> list[Tensor | None]:
        self.optimiser.zero_grad(set_to_none=True)
        self.descent.closure().backward()
        return [p.grad for p in self.params]


def side_by_side(descents: Sequence[Descent], drawn: Sequence[Tensor]) -> list[tuple[Moments, Tensor]]:
    """Carry out descents that record, on a GPU, and return each optimiser's moments and its generator's state
    afterwards.

    `drawn` holds, for each descent, the state of the device's global generator that belongs to it. A recording draws
    from the generator state that was in place when it was made. So every descent gets a state of its own, and its
    numbers do not depend on how far the others have come.
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
