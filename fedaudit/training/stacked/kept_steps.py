"""Keeps the recorded steps of a stack from one training to the next, so that only the first round of a run records.

A recorded step reads and writes memory at fixed places. Recording takes about as long as five steps, and the next round
trains as many models of the same form. So the stack, its rows and its recordings stay where they are. The next training
of that form copies its numbers there and replays: the same kernels on the same memory, hence the same bits as with a
recording made anew.

Many rows would lie in memory twice in this way. Where they are large, a batch is fetched to a fixed place before its
step, and the rows stay with whoever trains.

What is kept has a limit, a share of the GPU's memory. What was used least recently goes first.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedaudit.training.cuda_graphs import Recording, halves, holders, new_pool
from fedaudit.training.fit import Loss
from fedaudit.training.stacked.given import copy_given, form_of_given
from fedaudit.training.stacked.likeness import HOOKS, same_function
from fedaudit.training.stacked.mapped_loss import MappedLoss

if TYPE_CHECKING:
    from fedaudit.training.stacked.stack import Job, Stack

SHARE = 4  # a GPU's memory over what may be kept
MOST = 128  # stacks whose steps are kept at a time; models that train side by side are a stack each
LARGE = 1 << 28  # bytes of a model's rows from which on they are not copied to where a recorded step reads them
FORMS = 16  # sizes of batches that a stack has recordings for: clients that take turns in it have many last batches

Form = tuple[int, bool]  # rows in a batch, and whether batch norms leave some of them out
# A recording with what is filled in before it: which rows, or the rows themselves; a mask; numbers of augmentation.
Recorded = tuple[Recording, list[Tensor], Tensor | None, Tensor | None]


@dataclass(frozen=True)
class StepForm:
    """All that a recorded step depends on, but the numbers in its tensors.

    A loss reads nothing but its arguments, so that losses of one text and equal plain values record the same step.
    """

    loss: Loss = field(compare=False)
    plain: Any

    def is_like(self, other: StepForm) -> bool:
        """Return whether a step of the other form may be replayed for one of this form."""
        return self == other and same_function(self.loss, other.loss)


def fetches(jobs: Sequence[Job]) -> bool:
    """Return whether the rows are so large that a batch of them is fetched before its step."""
    return len(jobs) == 1 and sum(row.nbytes for row in jobs[0].rows) >= LARGE


def form_of(jobs: Sequence[Job], stack: Stack, compiled: Sequence[int] | None, apart: bool = False) -> StepForm | None:
    """Return the form of the jobs' steps, or None if they are not kept: a hook may read what no argument tells.

    `compiled` are the sizes of batches whose steps are compiled; None where nothing is.
    """
    first = jobs[0]
    if any(getattr(layer, kind) for layer in first.model.modules() for kind in HOOKS):
        return None
    device = first.rows[0].device
    rows = [(row.shape[1:], row.dtype) for row in first.rows]
    options = {"opt": None, "separable": True, "norms": "batch", "augment": None}
    how = [first.option(name, default) for name, default in options.items()]
    backends = torch.backends.cudnn, torch.backends.cuda.matmul
    kernels = backends[0].allow_tf32, backends[1].allow_tf32, backends[0].benchmark, halves()
    strict = torch.get_deterministic_debug_mode()
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    given = form_of_given(stack.given)
    where = device, stream, fetches(jobs)
    return StepForm(first.loss, (first.structure, len(jobs), rows, how, given, compiled, apart, kernels, strict, where))


@dataclass(eq=False)
class KeptSteps:
    """The memory of a stack and its rows, and the steps that were recorded on it, by the number of models that step.
    Rows that are fetched batch by batch are no part of it.

    `mapped` is held because a recording may read what belongs to it. All recordings share one memory for what a step
    computes on the way: they are replayed one after the other, and read nothing that another one has left there.
    """

    form: StepForm
    stack: Stack
    rows: list[Tensor]
    mapped: MappedLoss
    recordings: dict[int, dict[Form, Recorded]] = field(default_factory=dict)
    grown: int = 0  # bytes that the recordings have taken
    pool: Any = None

    def __post_init__(self) -> None:
        self.pool = new_pool(self.device)
        _alive.add(self)

    @property
    def device(self) -> torch.device:
        return self.stack.total.device

    @property
    def room(self) -> float:
        """Return for how many rows there is room."""
        return len(self.rows[0]) if self.rows else math.inf

    def of(self, models: int) -> dict[Form, Recorded]:
        """Return the recordings of the stack's first so many models."""
        return self.recordings.setdefault(models, {})

    def refill(self, stack: Stack, rows: Sequence[Sequence[Tensor]]) -> None:
        """Copy the numbers of a stack of the same form, and the rows of its jobs, to where the recordings read them."""
        mine = self.stack
        with torch.no_grad():
            for place, of_jobs in zip(self.rows, rows, strict=True):
                torch.cat(list(of_jobs), out=place[: sum(map(len, of_jobs))])
            for into, source in ((mine.params, stack.params), (mine.rest, stack.rest), (mine.state, stack.state)):
                for name, t in into.items():
                    t.copy_(source[name])
            copy_given(mine.given, stack.given)
            mine.total.copy_(stack.total)

    @property
    def bytes(self) -> int:
        """Return the memory that it holds."""
        return self.grown + sum(t.nbytes for t in (*self.rows, *self.stack.tensors()))


_kept: list[KeptSteps] = []  # the one that was used last stands last
_alive: weakref.WeakSet[KeptSteps] = weakref.WeakSet()  # with those that are being used
_lock = threading.Lock()


def held() -> int:
    """Return the bytes that all recordings hold, of kept steps and of those that are being used."""
    return sum(steps.grown for steps in list(_alive))


holders.append(held)


def taken(form: StepForm, count: int) -> KeptSteps | None:
    """Return kept steps of this form with room for so many rows, which are the caller's now; None if there are none.

    Of several it returns those with the least room, so that larger trainings find theirs. If all have too little room,
    the training has outgrown them: the smallest goes, because the caller makes a larger one in its place.
    """
    with _lock:
        like = sorted((s for s in reversed(_kept) if s.form.is_like(form)), key=lambda steps: steps.room)
        found = next((steps for steps in like if steps.room >= count), None)
        if like:
            _kept.remove(like[0] if found is None else found)
        return found


def keep(steps: KeptSteps) -> None:
    """Keep steps for the next training of their form, and let go of the oldest ones if there are too many."""
    limit = _memory(steps.device) // SHARE
    with _lock:
        _kept.append(steps)
        while len(_kept) > MOST or (_kept and sum(other.bytes for other in _kept) > limit):
            _kept.pop(0)


def forget() -> bool:
    """Let go of all kept steps, and return whether there were any."""
    with _lock:
        some = bool(_kept)
        _kept.clear()
    return some


def _memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 1 << 40
    return int(torch.cuda.get_device_properties(device).total_memory)
