"""Trains many models of one architecture at once: the loop of `fedaudit.fit`, stacked by torch.func.

Parameters and buffers of M models become tensors with M on dimension 0, the loss is mapped over them, and one optimiser
steps them all. The M losses are summed. A model's parameters reach its own loss only, so each model gets the gradient
that it would get alone. Every model has its own rows and its own generator, and draws from it what `fit` would draw.
The result is that of M calls of `fit`, to rounding.

The models may have different numbers of records, and take different numbers of steps. Batches of unequal size are
filled up with rows that are masked out, also in the statistics of batch norms (see `norms`). If a loss does not
separate over rows, the models are trained in groups of one batch size. A model that has taken all its steps leaves the
stack.

Not everything can be stacked: `jobs.stacks` says which jobs can, and why the others cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.training.augment import Augment
from fedaudit.training.cuda_graphs import (
    MEMORY_FULL,
    WORTH_IT,
    Recording,
    compiles,
    fall_back,
    halves,
    may_choose,
    record,
    record_giving_back,
    recordable,
    sharing,
    stacks_networks,
    timed,
)
from fedaudit.training.fit import (
    OFTEN,
    Fitted,
    Live,
    Loss,
    Running,
    batches,
    fit,
    train_mode,
)
from fedaudit.training.stacked import kept_steps, stackable
from fedaudit.training.stacked.given import map_given, stacked_given
from fedaudit.training.stacked.kept_steps import Form, KeptSteps, Recorded
from fedaudit.training.stacked.likeness import structure
from fedaudit.training.stacked.mapped_loss import PRODUCTS_WIN, mapped_loss
from fedaudit.training.stacked.masked_norms import Unmaskable
from fedaudit.training.stacked.side_by_side import Lanes, as_tensor_cores_take_it, goes_apart, in_turn
from fedaudit.training.stacked.stackable import fills, masks_norms, never_stacked, refused
from fedaudit.training.stacked.steppers import Stepper, Tensors, stepper


@dataclass(frozen=True, eq=False)
class Job:
    """One call of `fit`, not yet carried out."""

    model: nn.Module
    loss: Loss
    rows: Sequence[Tensor]
    rng: torch.Generator
    options: Mapping[str, Any]

    def alone(self) -> Fitted:
        alike = (self.loss, repr(self.structure)) if self._as_stack else None
        # A stack that failed once is not tried again in the next round.
        if alike is not None and alike not in refused and never_stacked(self) is None:
            before = self.rng.get_state()
            try:
                return fit_together([self])[0]
            except Exception as e:  # noqa: BLE001 (nothing was changed yet, and `fit` says better what is wrong)
                refused.add(alike)
                if compiles():
                    fall_back(f"not compiled: {type(e).__name__}: {e}".splitlines()[0])
                self.rng.set_state(before)
        return fit(self.model, self.loss, self.rows, rng=self.rng, **self.options)

    @property
    def _as_stack(self) -> bool:
        """Return whether the job, trained alone, runs as a stack of one.

        It does where steps are compiled, because only stacks are compiled. It also does with Adam where it need not
        have torch's bits, because a stack records Adam's step too: torch's own takes longer than a small model's
        gradient.
        """
        if compiles():
            return stackable.on_gpu(self.rows)
        small = stacks_networks() and self.option("opt").make is torch.optim.Adam
        return small and recordable(self.model, self.rows[0].device, self.planned)

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)

    @functools.cached_property
    def structure(self) -> Any:
        return structure(self.model), [(name, p.requires_grad) for name, p in self.model.named_parameters()]

    @property
    def batch(self) -> int:
        """Return the number of rows in all batches but an epoch's last."""
        return min(self.option("batch"), len(self.rows[0]))

    @property
    def planned(self) -> int:
        """Return the number of steps, if nothing ends it early."""
        if self.option("steps") is not None:
            return int(self.option("steps"))
        turns, size = self.option("turns"), self.option("batch")
        return int(self.option("epochs") or 0) * (-(-len(self.rows[0]) // size) if turns is None else turns.steps(size))

    @property
    def size(self) -> int:
        """Return the number of rows that it goes through, for its share of a stack's time."""
        return self.planned * self.batch

    @property
    def generators(self) -> list[torch.Generator]:
        return [self.rng]


_faster: dict[Any, bool] = {}  # whether products were the faster way, by what was measured


class Stack:
    """The tensors of M models, with M on dimension 0: parameters, other tensors, and the optimiser's state."""

    def __init__(self, params: Tensors, rest: Tensors, state: Tensors, given: Any, given_dims: Any, total: Tensor):
        self.params, self.rest, self.state = params, rest, state
        self.given, self.given_dims, self.total = given, given_dims, total

    def __len__(self) -> int:
        return len(self.total)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Stack:
        params, rest, state = ({n: fn(t) for n, t in part.items()} for part in (self.params, self.rest, self.state))
        return Stack(params, rest, state, map_given(self.given, self.given_dims, fn), self.given_dims, fn(self.total))

    def take(self, slots: Sequence[int]) -> Stack:
        """Return the models in `slots`: the same memory if they come first in the stack, else copies (see `put`)."""
        if list(slots) == list(range(len(slots))):
            return self if len(slots) == len(self) else self.map(lambda t: t[: len(slots)])
        index = torch.tensor(slots, device=self.total.device)
        return self.map(lambda t: t.index_select(0, index))

    def put(self, slots: Sequence[int], part: Stack) -> None:
        """Write back a part that `take` returned, if it is a copy."""
        if list(slots) == list(range(len(slots))):
            return
        index = torch.tensor(slots, device=self.total.device)
        for mine, theirs in ((self.params, part.params), (self.rest, part.rest), (self.state, part.state)):
            for name, t in mine.items():
                t.index_copy_(0, index, theirs[name])
        self.total.index_copy_(0, index, part.total)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that training changes."""
        return [*self.params.values(), *self.rest.values(), *self.state.values(), self.total]

    def write(self, slot: int, model: nn.Module) -> None:
        """Put one model's numbers into the model itself."""
        with torch.no_grad():
            for name, t in _tensors(model).items():
                t.copy_((self.params[name] if name in self.params else self.rest[name])[slot])


def _tensors(model: nn.Module) -> Tensors:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def build(jobs: Sequence[Job], how: Stepper, apart: bool = False) -> Stack:
    """Return the stack of the jobs' models. One that goes apart from others lies as tensor cores take it."""
    states = [_tensors(job.model) for job in jobs]
    trained = [name for name, p in jobs[0].model.named_parameters() if p.requires_grad]
    if apart:
        (state,) = states
        whole = {name: as_tensor_cores_take_it(t.detach().clone())[None] for name, t in state.items()}
    else:
        whole = {name: torch.stack([s[name].detach() for s in states]) for name in states[0]}
    params = {name: whole.pop(name) for name in trained}
    given, dims = stacked_given([job.option("given") or {} for job in jobs])
    scored = isinstance(jobs[0].option("until"), Running)
    total = torch.zeros((len(jobs), 2) if scored else len(jobs), device=jobs[0].rows[0].device)
    return Stack(params, whole, how.state(params), given, dims, total)


class _Course:
    """Tracks how far one job has come. Its own generator says which rows are next, as in `fit`."""

    def __init__(self, job: Job, skip: Callable[[], bool], stop: Callable[[], bool], begin: Callable[[], None]):
        self.job, self._skip, self._stop, self._begin = job, skip, stop, begin
        self.epochs = self.steps = 0
        self.seen = len(job.rows[0])
        self._next = self._run()
        self.index: Tensor | None = next(self._next, None)

    @property
    def rate(self) -> float:
        """Return the share of the learning rate that its next step has."""
        opt, epochs, steps = (self.job.option(name) for name in ("opt", "epochs", "steps"))
        return float(opt.factor(self.epochs, epochs) if epochs is not None else opt.factor(self.steps, steps))

    def advance(self) -> None:
        self.index = next(self._next, None)

    def _run(self) -> Iterator[Tensor]:
        n, epochs, steps = len(self.job.rows[0]), self.job.option("epochs"), self.job.option("steps")
        stop = self._skip()
        while not stop and (self.epochs < epochs if epochs is not None else self.steps < steps):
            if self.epochs:
                self._begin()
            self.seen = 0
            for index in batches(n, self.job.option("batch"), self.job.rng, self.job.option("turns")):
                yield index
                self.seen += len(index)
                self.steps += 1
                if self.steps == steps:
                    break
            self.epochs += 1
            stop = self._stop()


def fit_together(jobs: Sequence[Job], *, compile: bool = False) -> list[Fitted]:
    """Carry out all jobs as one stack, and return their results. The models end as `fit` would leave each of them.

    Nothing is written into the models before all have come to their end, so that after a failure they can be trained
    alone. The caller then has to put the generators back.

    `compile` has an effect on a GPU only. There a step is many small kernels, and compiling takes seconds; on a CPU it
    takes minutes.
    """
    drawn = [job.rng.get_state() for job in jobs]

    def fitted(way: Callable[[], list[Fitted]]) -> list[Fitted]:
        for job, state in zip(jobs, drawn, strict=True):
            job.rng.set_state(state)
        return way()

    def tried(way: Callable[[], list[Fitted]]) -> list[Fitted]:
        try:
            return fitted(way)
        except torch.OutOfMemoryError:  # what is kept of other trainings may be what is missing
            if not kept_steps.forget():
                raise
        fall_back(MEMORY_FULL)
        return fitted(way)

    if len(jobs) > 1 and goes_apart(jobs[0].model, jobs[0].rows):
        try:
            return tried(lambda: _side_by_side(jobs))
        except Unrecordable:  # eager steps, one by one, would be no faster than no stack
            pass
    try:
        return tried(lambda: _stacked(jobs, compile, by_size=False))
    except Unmaskable:  # a batch norm sees other rows than the batch's, so train in groups of one size
        return tried(lambda: _stacked(jobs, compile, by_size=True))


class Unrecordable(RuntimeError):
    """A model that trains side by side with others has steps that cannot be recorded."""


def _stacked(jobs: Sequence[Job], compile: bool, by_size: bool) -> list[Fitted]:
    """Carry out all jobs as one stack."""
    fitting = _Fitting(jobs, compile, by_size)
    try:
        for _ in fitting.steps():
            pass
    finally:
        fitting.close()
    return fitting.result()


def _side_by_side(jobs: Sequence[Job]) -> list[Fitted]:
    """Carry out each job as a stack of its own, on a lane of its own, a step of each in turn."""
    lanes, fittings = Lanes(len(jobs), jobs[0].rows[0].device), list[_Fitting]()
    try:
        for number, job in enumerate(jobs):
            with lanes.on(number):
                fittings.append(_Fitting([job], compile=False, apart=True))
        in_turn([fitting.steps() for fitting in fittings], lanes)
    finally:
        lanes.join()
        ended = len(fittings) == len(jobs) and all(fitting.through for fitting in fittings)
        for fitting in fittings:
            fitting.close(ended)
    if any(fitting.mapped.compiles and not fitting.compiled_sizes for fitting in fittings):
        fall_back("not compiled: networks side by side with less than a batch of records")
    return [fitting.result()[0] for fitting in fittings]


LASTING = 400  # steps for which compiling once more pays: of last batches, if every fourth step or more is one
EVERY = 4


def last_batches(jobs: Sequence[Job]) -> set[int]:
    """Return the size of an epoch's last batch, if it is another one, the same for all, and worth compiling steps for.

    That is decided before the first step, so that a training that is carried on elsewhere takes the same steps.
    """
    found = set()
    for job in jobs:
        steps, last = divmod(len(job.rows[0]), job.option("batch"))
        worth = last and 0 < steps < EVERY and job.planned >= LASTING * (steps + 1)
        found.add(last if worth and job.option("turns") is None else 0)
    return found - {0} if len(found) == 1 else set()


def compiled_sizes(jobs: Sequence[Job], apart: bool) -> set[int]:
    """Return the sizes of the batches whose steps are compiled, where steps are compiled.

    Models side by side share what was compiled, for whole batches alone: clients have last batches of many sizes, and a
    client with less than a batch of records has a size of its own.
    """
    usual = max(job.batch for job in jobs)
    if apart:
        return {usual} & {jobs[0].option("batch")}
    return {usual, *last_batches(jobs)}


class _Fitting:
    def __init__(self, jobs: Sequence[Job], compile: bool, by_size: bool = False, apart: bool = False):
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i].planned)  # the job that ends first stands last
        self.order, self.jobs = order, [jobs[i] for i in order]
        first = self.jobs[0]
        how = stepper(first.option("opt"))
        assert isinstance(how, Stepper), how
        self.how, self.fills = how, fills(first)
        self.masks_norms = not self.fills and not by_size and masks_norms(first)
        self.norms = first.option("norms", "batch")
        self.device = first.rows[0].device
        self.stack = build(self.jobs, how, apart)
        self.slots = list(range(len(self.jobs)))  # which job stands where in the stack
        sizes = torch.tensor([0, *(len(job.rows[0]) for job in self.jobs)])
        self.offsets = sizes.cumsum(0)[:-1].to(self.device)[:, None]
        self.known: dict[tuple[int, ...], Tensor] = {}
        self.modes = [job.model.training for job in self.jobs]
        looks = [i for i, job in enumerate(self.jobs) if not isinstance(job.option("until"), Running | None)]
        self.before = {i: _copies(self.jobs[i].model) for i in looks}
        compile = (compile or compiles()) and stackable.on_gpu(first.rows)
        self.mapped = mapped_loss(first, self.stack.given_dims, compile, len(jobs) > 1, apart)
        self.usual = max(job.batch for job in self.jobs)
        self.compiled_sizes = compiled_sizes(self.jobs, apart)
        self.compiled_stacks = {len(jobs)}  # of so many models
        self.records = not how.together and recordable(first.model, self.device, self.jobs[0].planned)
        self.kept, self.in_place = self._place(compile), True
        self.recordings: dict[Form, Recorded] = self._recordings()
        self.augment: Augment | None = first.option("augment")
        self.rates: list[float] = []  # that were written last
        self.came: dict[Form, int] = {}  # how often all had batches of that form
        self.idle: set[int] = set()  # jobs that ended, but stay in the stack to keep its shapes
        self.masks: dict[tuple[int, ...], Tensor] = {}
        self.mask_all = self.fills and (self.records or compile)  # one shape for all
        self.ended: dict[int, Tensors] = {}
        self.totals: dict[int, Tensor] = {}
        partial = functools.partial
        self.courses = [
            _Course(job, partial(self._skips, i), partial(self._stops, i), partial(self._begin, i))
            for i, job in enumerate(self.jobs)
        ]

    def _place(self, compile: bool) -> KeptSteps | None:
        """Put the stack and all rows into memory, where possible into that of kept steps, which are returned."""
        rows = [[job.rows[i] for job in self.jobs] for i in range(len(self.jobs[0].rows))]
        self.fetches = self.records and kept_steps.fetches(self.jobs)
        sizes = sorted(self.compiled_sizes) if compile else None
        form = kept_steps.form_of(self.jobs, self.stack, sizes, self.mapped.apart) if self.records else None
        found = None if form is None else kept_steps.taken(form, sum(map(len, rows[0])))
        if found is not None:
            found.refill(self.stack, [] if self.fetches else rows)
            self.stack = found.stack
        if self.fetches:
            self.rows = list(self.jobs[0].rows)
        else:
            self.rows = [torch.cat(of_jobs) for of_jobs in rows] if found is None else found.rows
        if found is not None or form is None:
            return found
        return KeptSteps(form, self.stack, [] if self.fetches else self.rows, self.mapped)

    def _recordings(self) -> dict[Form, Recorded]:
        """Return the steps recorded for the stack as it is now. While it lies where it began, they are kept ones."""
        return self.kept.of(len(self.slots)) if self.kept is not None and self.in_place else {}

    def steps(self) -> Iterator[None]:
        """Take a step of all jobs, each time that the next is asked for, until all have come to their end."""
        train_mode(self.mapped.model, self.norms)
        while True:
            self._leave()
            if not self.active:
                return
            for group in self._groups():
                if not self._recorded_step(group):
                    self._step(group)
                for i in group:
                    self.courses[i].advance()
            yield

    @property
    def through(self) -> bool:
        """Return whether all jobs have come to their end."""
        return len(self.ended) == len(self.jobs)

    @property
    def active(self) -> list[int]:
        return [i for i in self.slots if i not in self.idle]

    def _groups(self) -> list[list[int]]:
        """Return the groups of jobs that take their next step together.

        Usually all jobs step. Those with a batch of unequal size step first and alone, so that the others are as many
        as before.
        """
        if self.fills:
            sizes = {i: len(self._index(i)) for i in self.active}
            return [self.active] if self.records and max(sizes.values()) <= self.usual else _filled(sizes)
        if self.masks_norms:
            sizes = {i: len(self._index(i)) for i in self.active}
            lone = [i for i, size in sizes.items() if size == 1]  # a batch norm may refuse it, with its own error
            if not lone and len(set(sizes.values())) > 1:
                return [self.active] if self.records and max(sizes.values()) <= self.usual else _filled(sizes)
        by_size: dict[int, list[int]] = {}
        for i in self.active:
            by_size.setdefault(len(self._index(i)), []).append(i)
        odd = [group for size, group in by_size.items() if size != self.usual]
        return odd or list(by_size.values())

    def _index(self, i: int) -> Tensor:
        index = self.courses[i].index
        assert index is not None
        return index

    def _step(self, group: Sequence[int]) -> None:
        places = [self.slots.index(i) for i in group]
        self._set_rates()
        part = self.stack.take(places)
        if self.how.together and part is not self.stack:
            raise RuntimeError(f"{self.jobs[0].option('opt').make.__name__} steps all models of a stack at once")
        index, mask = self._places(group)
        self._core(part, self._rows(index, self._drawn(group, index.shape[1])), mask)
        self.stack.put(places, part)

    def _core(self, part: Stack, rows: list[Tensor], mask: Tensor | None) -> list[Tensor | None]:
        compiled = len(part) in self.compiled_stacks and rows[0].shape[1] in self.compiled_sizes
        grads, sums = self.mapped.gradients(part.params, part.rest, rows, part.given, mask, compiled)
        self.how.step(part.params, grads, part.state)
        part.total += sums
        return []  # nothing to return: all changes are in place

    def _recorded_step(self, group: Sequence[int]) -> bool:
        """Replay a recorded step of the whole stack, and return whether the group could be stepped in this way.

        Jobs that have ended step too, and the result is thrown away.
        """
        if not self.records or list(group) != self.active:
            return False
        sizes = {len(self._index(i)) for i in group}
        ragged = len(sizes) > 1
        size = self.usual if self.fills or ragged else max(sizes)
        if max(sizes) > size or (ragged and not (self.fills or self.masks_norms)):
            return False
        form = size, ragged and not self.fills
        if form not in self.recordings and not self._record(form, group):
            return False
        recording, static, static_mask, static_u = self.recordings[form]
        index, mask = self._places(self.slots, size)
        self._put(index, static)
        if (u := self._drawn(self.slots, size)) is not None and static_u is not None:
            static_u.copy_(u)
        self._set_rates()
        if mask is not None and static_mask is not None:
            static_mask.copy_(mask)
        recording()
        return True

    def _record(self, form: Form, group: Sequence[int]) -> bool:
        """Record the step of the whole stack with batches of this form, if enough of them are to come. Return whether
        it was.
        """
        size, usual = form[0], form == (self.usual, False)
        self.came[form] = self.came.get(form, 0) + 1
        often = usual or (self.came[form] >= OFTEN and len(self.recordings) < kept_steps.FORMS)
        if not often or max(self.jobs[i].planned - self.courses[i].steps for i in group) < WORTH_IT:
            return False
        index, mask = self._places(self.slots, size)
        static_mask = None if mask is None else mask.clone()
        static = [row[index] for row in self.rows] if self.fetches else [index.clone()]  # it is written over
        stack = self.stack
        core = functools.partial(self._core, stack)
        u = None if self.augment is None else torch.zeros(*index.shape, self.augment.numbers, device=self.device)
        before = _reserved(self.device)
        with sharing(None if self.kept is None else self.kept.pool):
            step = lambda: core(self._batch(static, u), static_mask)  # noqa: E731 (it holds this fitting)
            made = self._choose(step, stack.tensors(), size, mask is not None)
        if made is None and not usual:
            self.came[form] = -self.jobs[0].planned  # not again
            return False
        if made is None:
            self.records = False
            self._shrink()
            return False
        self.recordings[form] = made, static, static_mask, u
        if self.kept is not None:
            self.kept.grown += max(0, _reserved(self.device) - before)
        return True

    def _choose(
        self, step: Callable[[], list[Tensor | None]], state: list[Tensor], size: int, masked: bool
    ) -> Recording | None:
        """Return the recording of a step with the faster of two ways to do convolutions, measured if not known yet."""
        how = repr((self.jobs[0].structure, torch.backends.cudnn.allow_tf32, halves()))
        key = how, len(self.slots), size

        def recorded() -> Recording | None:
            return record_giving_back(step, state, self.device, like=(how, masked))

        if not (self.mapped.convolves and may_choose()):  # a stack of fewer models does the same operations
            found = recorded()
            if found is None and self.mapped.apart:
                raise Unrecordable("The steps of a model that trains side by side with others cannot be recorded.")
            return found
        if key in _faster:
            self.mapped.products = _faster[key]
            return record(step, state)
        made: dict[bool, Recording | None] = {}
        for products in (True, False):
            self.mapped.products = products
            made[products] = record(step, state)
        one, other = made[True], made[False]
        if one is not None and other is not None:
            _faster[key] = PRODUCTS_WIN * timed(one, state) < timed(other, state)
        self.mapped.products = _faster.get(key, False)
        return made[self.mapped.products]

    def _rows(self, index: Tensor, u: Tensor | None) -> list[Tensor]:
        """Return the rows at these places, (model, row, ...), the first augmented by the numbers u."""
        return self._augmented([row[index] for row in self.rows], u)

    def _augmented(self, rows: list[Tensor], u: Tensor | None) -> list[Tensor]:
        """Return rows of a batch, (model, row, ...), the first augmented by the numbers u."""
        if self.augment is not None and u is not None:
            return [self.augment(rows[0].flatten(0, 1), u.flatten(0, 1)).view_as(rows[0]), *rows[1:]]
        return rows

    def _batch(self, static: list[Tensor], u: Tensor | None) -> list[Tensor]:
        """Return the rows of a recorded step from what was filled in before it."""
        return self._augmented(static, u) if self.fetches else self._rows(static[0], u)

    def _put(self, index: Tensor, static: Sequence[Tensor]) -> None:
        """Fill in what a recorded step reads: which rows are next, or these rows themselves."""
        if not self.fetches:
            static[0].copy_(index)
            return
        which = index.flatten()
        for place, row in zip(static, self.rows, strict=True):
            torch.index_select(row, 0, which, out=place.flatten(0, 1))

    def _drawn(self, group: Sequence[int], most: int) -> Tensor | None:
        """Return the numbers of each job's augmentation, (job, row, number), each drawn as it would be alone."""
        if self.augment is None:
            return None
        drawn = []
        for i in group:
            rows = 0 if i in self.idle else len(self._index(i))
            u = self.augment.draw(rows, self.jobs[i].rng)
            drawn.append(nn.functional.pad(u, (0, 0, 0, most - rows)))
        return torch.stack(drawn)

    def _set_rates(self) -> None:
        """Write each model's share of the learning rate into the stack, where it has changed."""
        if not self.how.scheduled:
            return
        now = [0.0 if i in self.idle else self.courses[i].rate for i in self.slots]
        if now != self.rates:
            self.rates = now
            self.stack.state["rate"].copy_(torch.tensor(now, dtype=torch.float64))

    def _places(self, group: Sequence[int], most: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Return where each job's next rows stand, filled up to one number, and which of them count (None: all)."""
        drawn = [self._index(i) if i not in self.idle else self.offsets.new_zeros(most or 1) for i in group]
        sizes = [len(index) for index in drawn]
        most = most or max(sizes)
        ragged = min(sizes) < most
        if ragged:  # fill up with row 0, which does not count
            drawn = [nn.functional.pad(index, (0, most - len(index))) for index in drawn]
        # The rows of a single job are all there is: two kernels less, in each step of networks that go side by side.
        index = drawn[0][None] if len(self.jobs) == 1 else torch.stack(drawn) + self._offsets(tuple(group))
        mask = self._mask(tuple(sizes), most) if ragged or self.mask_all else None
        return index, mask

    def _mask(self, sizes: tuple[int, ...], most: int) -> Tensor:
        if (most, *sizes) not in self.masks:
            counts = torch.tensor(sizes, device=self.device)[:, None]
            self.masks[(most, *sizes)] = torch.arange(most, device=self.device) < counts
        return self.masks[(most, *sizes)]

    def _offsets(self, group: tuple[int, ...]) -> Tensor:
        """Return where each job's rows begin among all. It is kept, because making it anew would be a transfer to the
        device.
        """
        if group not in self.known:
            self.known[group] = self.offsets[list(group)]
        return self.known[group]

    def _begin(self, i: int) -> None:
        self.stack.total[self.slots.index(i)].zero_()

    def _skips(self, i: int) -> bool:
        job = self.jobs[i]
        until, given = job.option("until"), job.option("given") or {}
        return isinstance(until, Running) and until.reached(
            job.model, job.loss, job.rows, rng=job.rng, given=given, augment=job.option("augment")
        )

    def _stops(self, i: int) -> bool:
        until, model = self.jobs[i].option("until"), self.jobs[i].model
        if until is None:
            return False
        if isinstance(until, Running):
            return until.passed(self.stack.total[self.slots.index(i)], self.courses[i].seen)
        self.stack.write(self.slots.index(i), model)
        model.eval()
        with torch.no_grad():
            stops = bool(until(Live(model), *self.jobs[i].rows))
        train_mode(self.mapped.model, self.norms)  # this job's model may be the one that is mapped
        return stops

    def _leave(self) -> None:
        through = [i for i in self.active if self.courses[i].index is None]
        if not through:
            return
        for i in through:
            slot = self.slots.index(i)
            both = {**self.stack.params, **self.stack.rest}
            self.ended[i] = {name: t[slot].clone() for name, t in both.items()}
            self.totals[i] = self.stack.total[slot].clone()
        self.idle.update(through)
        if not self.records or 2 * len(self.active) <= len(self.slots):
            self._shrink()

    def _shrink(self) -> None:
        """Take the jobs that have ended out of the stack."""
        stay = [place for place, i in enumerate(self.slots) if i not in self.idle]
        self.slots = [self.slots[place] for place in stay]
        self.idle.clear()
        self.rates = []
        if stay:
            self.stack = self.stack.take(stay)
            if max(self.jobs[i].planned - self.courses[i].steps for i in self.slots) >= LASTING:
                self.compiled_stacks.add(len(stay))
            elif self.mapped.compiles:
                fall_back(f"not compiled: fewer than {LASTING} steps of models that are left when others have ended")
        self.in_place = self.in_place and stay == list(range(len(stay)))
        self.recordings = self._recordings()

    def close(self, ended: bool | None = None) -> None:
        """Put the models' modes back, and keep the recordings. `ended` says whether all went well, also elsewhere."""
        ended = self.through if ended is None else ended
        for job, mode in zip(self.jobs, self.modes, strict=True):
            job.model.train(mode)
        self.mapped.model.train(self.modes[0])
        if self.kept is not None and ended and any(self.kept.recordings.values()):
            kept_steps.keep(self.kept)
        self.kept, self.recordings = None, {}
        for i, tensors in self.before.items():
            if not ended:  # it failed
                _write(self.jobs[i].model, tensors)

    def result(self) -> list[Fitted]:
        found: dict[int, Fitted] = {}
        for i, job in enumerate(self.jobs):
            _write(job.model, self.ended[i])
        totals = torch.stack([self.totals[i] for i in range(len(self.jobs))])
        losses = totals.view(len(totals), -1)[:, 0].tolist()  # beside them there may be scores
        for i, course in enumerate(self.courses):
            found[self.order[i]] = Fitted(course.epochs, course.steps, losses[i] / max(course.seen, 1))
        return [found[i] for i in range(len(self.jobs))]


def _reserved(device: torch.device) -> int:
    """Return the bytes that torch has taken of a GPU's memory."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _copies(model: nn.Module) -> Tensors:
    return {name: t.detach().clone() for name, t in _tensors(model).items()}


def _write(model: nn.Module, tensors: Tensors) -> None:
    with torch.no_grad():
        for name, t in _tensors(model).items():
            t.copy_(tensors[name])


def _filled(sizes: Mapping[int, int]) -> list[list[int]]:
    """Return groups of jobs whose batches are filled up to one size.

    All jobs are one group, unless more than half of the rows would be filling.
    """
    groups = []
    left = dict(sizes)
    while left:
        most = max(left.values())
        group = list(left)
        if most * len(left) > 2 * sum(left.values()):
            group = [i for i, size in left.items() if 2 * size > most]
        groups.append(group)
        left = {i: size for i, size in left.items() if i not in group}
    return groups
