"""Functions take turns here, so that their trainings can be carried out together.

Each function runs in a thread of its own, and only one thread runs at any time. It runs until it comes to a training.
The trainings that wait are then carried out together if they are alike, and each function goes on.

Threads are used because a function cannot be left and entered again in the middle. Nothing is concurrent: one thread
hands over to the next, and the global generators are switched with it, for every function has its own state of them.

Turns can be nested. A function that takes its turn may itself let others take turns, as a run does with its clients. It
then hands all trainings of theirs that wait on to whoever gave it its turn, and they become part of larger stacks.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, overload

import torch

from fedaudit.privacy.dpsgd_stack import PrivateJob, Trained, fit_private_together, private_stacks
from fedaudit.rng import numpys, seeded
from fedaudit.runtime.meter import Away
from fedaudit.training.cuda_graphs import each_run
from fedaudit.training.descent import Descent, Moments, side_by_side
from fedaudit.training.fit import Fitted
from fedaudit.training.stacked.stack import Job, fit_together
from fedaudit.training.stacked.stackable import stacks

Found = dict[int, tuple[Fitted | Trained, Away]]  # by number of the job: its result, and its share of the time
AnyJob = Job | PrivateJob
_here = threading.local()


def here() -> Turn | None:
    """Return the turn that this code is part of; None outside of any."""
    return getattr(_here, "turn", None)


def beside() -> list[int]:
    """Return the seeds of the runs that take turns with the run that this code is part of; none outside of any turn."""
    turn = here()
    return [] if turn is None else turn.beside


@overload
def carry_out(job: Job) -> Fitted: ...
@overload
def carry_out(job: PrivateJob) -> Trained: ...
def carry_out(job: AnyJob) -> Fitted | Trained:
    """Train and return the result: at once, or, inside a turn, when all others have come to a training as well."""
    turn = here()
    return job.alone() if turn is None else turn.wait(job)


def descend(descent: Descent) -> Moments:
    """Carry out a descent that is not the training of a model, side by side with others if it can be recorded."""
    turn = here()
    if turn is None or not descent.records or turn.refuse is not None:
        say_alone("what it optimises is free-form")
        return descent.alone()
    return turn.wait_descending(descent)


def say_alone(reason: str) -> None:
    """Note that something is computed for one client alone, and why."""
    if (turn := here()) is not None:
        turn.alone.append(reason)


class Joint(Protocol):
    """Work that several functions may come to at once, and that can then be done as one stack: an attack on several
    clients."""

    def alone(self) -> Any:
        """Return its result, computed by itself."""

    def like(self, other: Any) -> bool:
        """Return whether the two can be one stack."""

    def together(self, others: Sequence[Any]) -> Sequence[Any]:
        """Return the results of this and of `others`, which are like it, in that order. If it fails, nothing is
        changed."""


def join(work: Joint) -> Any:
    """Do such work and return its result: at once, or, inside a turn, together with work that is like it."""
    turn = here()
    return work.alone() if turn is None or turn.refuse is not None else turn.wait_joining(work)


class Globals:
    """The state of the global generators that belongs to one function. It is put in place while it is the function's
    turn."""

    def __init__(self, device: torch.device):
        self.device = device
        self._cuda = device if device.type == "cuda" else None
        self.keep()

    def seed(self, *parts: object) -> None:
        with seeded(*parts, device=self._cuda or "cpu"):
            self.keep()

    def keep(self) -> None:
        cuda = torch.cuda.get_rng_state(self._cuda) if self._cuda else None
        self._state = torch.get_rng_state(), cuda, random.getstate(), numpys.state()

    def put(self) -> None:
        cpu, cuda, python, numpy = self._state
        torch.set_rng_state(cpu)
        if self._cuda and cuda is not None:
            torch.cuda.set_rng_state(cuda, self._cuda)
        random.setstate(python)
        numpys.put_back(numpy)

    @property
    def cuda(self) -> torch.Tensor:
        """Return the state of the device's generator."""
        assert self._state[1] is not None
        return self._state[1]

    @cuda.setter
    def cuda(self, state: torch.Tensor) -> None:
        self._state = self._state[0], state, *self._state[2:]


@dataclass(frozen=True)
class Carried:
    """The outcome of one training that waited. Without a result it is to be carried out alone."""

    result: Fitted | Trained | None = None
    time: Away | None = None
    alone: Sequence[str] = ()  # why it was not part of the stack that it could have been part of


class Left(BaseException):
    """Ends the thread of a function that nobody waits for."""


@dataclass
class Turn:
    """One function in its thread. It runs until it wants to train, and goes on with the result."""

    work: Callable[[], Any]
    generators: Globals
    away: Callable[[Away], None] = lambda away: None  # called in the function's thread with the time that it waited
    jobs: Sequence[AnyJob] = ()  # the trainings that it waits for: one of its own, or those of turns that it gives
    descent: Descent | None = None
    joint: Joint | None = None
    result: Any = None
    error: BaseException | None = None
    done: bool = False
    refuse: str | None = None  # why it trains by itself in any case
    alone: list[str] = field(default_factory=list)  # why trainings were not part of a stack
    waited_s: float = 0.0  # seconds that it waited for others so far, without its share of what was done together
    seed: int | None = None  # if the function is a whole run: the run's seed
    among: Sequence[Turn] = ()  # all turns that are taken together with this one

    def __post_init__(self) -> None:
        self._carried: Sequence[Carried] = ()
        self._moments: Moments | None = None
        self._shared: tuple[Any] | None = None
        self._time = Away()
        self._left = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        _here.turn = self
        torch.set_num_threads(torch.get_num_threads())  # a new thread's products would be shared out over all cores
        try:
            if not self._left:
                self.result = self.work()
        except Left:
            pass
        except BaseException as e:  # noqa: BLE001 (raised again, or recorded, where the turns are given)
            self.error = e
        self.done = True
        self._stopped.release()

    @property
    def waits(self) -> bool:
        """Return whether it wants something done before it goes on."""
        return bool(self.jobs) or self.descent is not None or self.joint is not None

    @property
    def beside(self) -> list[int]:
        """Return the seeds of the other whole runs that are taking turns with this one and are not through."""
        return sorted(turn.seed for turn in self.among if turn is not self and turn.seed is not None and not turn.done)

    def wait(self, job: AnyJob) -> Fitted | Trained:
        """Wait until the training is done, and return its result. The function calls this in its thread."""
        if self.refuse is not None:
            self.alone.append(self.refuse)
            return job.alone()
        self.jobs = [job]
        self._away(job.rows[0].device)
        (carried,) = self._carried or (Carried(),)
        self.alone += carried.alone
        return job.alone() if carried.result is None else carried.result

    def wait_for_all(self, jobs: Sequence[AnyJob]) -> Sequence[Carried]:
        """Wait until trainings of turns that the function gives are done, and return their outcomes in that order.

        Their time is told to those turns. This turn is told of the device's time only: whoever times it leaves out the
        time in which its own turns were taken.
        """
        self.jobs = jobs
        begun, events = time.perf_counter(), _events(jobs[0].rows[0].device)
        self._hand_over()
        if events:
            events[1].record()
            self.away(Away(events=events))
        times = [carried.time for carried in self._carried if carried.time is not None]
        for of_job in times:
            self.away(Away(stack=of_job.stack, share=of_job.share))
        self.waited_s += time.perf_counter() - begun - sum(of_job.share_s for of_job in times)
        return self._carried or [Carried()] * len(jobs)

    def wait_descending(self, descent: Descent) -> Moments:
        """Wait until the descent is done, and return its result. The function calls this in its thread."""
        self.descent = descent
        self._away(descent.device)
        return descent.alone() if self._moments is None else self._moments

    def wait_joining(self, work: Joint) -> Any:
        """Wait until the shared work is done, and return its result. The function calls this in its thread."""
        self.joint = work
        self._away(torch.device("cpu"))
        return work.alone() if self._shared is None else self._shared[0]

    def _away(self, device: torch.device) -> None:
        begun, events = time.perf_counter(), _events(device)
        self._hand_over()
        if events:
            events[1].record()
            self._time.events = events
        self._time.wall_s = time.perf_counter() - begun
        self.waited_s += self._time.wall_s - self._time.share_s
        self.away(self._time)

    def _hand_over(self) -> None:
        """Let whoever gives the turns go on, until it is this function's turn again."""
        self._stopped.release()
        self._go.acquire()
        if self._left:
            raise Left

    def go_on(
        self, carried: Sequence[Carried] = (), time: Away | None = None, moments: Moments | None = None,
        shared: tuple[Any] | None = None,
    ) -> None:  # fmt: skip
        """Let the function run until it wants to train or is through. Without a result it trains by itself."""
        single = carried[0].time if len(carried) == 1 else None
        self.jobs, self.descent, self.joint = (), None, None
        # A copy, because a turn of one client hands the same outcome on.
        self._time = replace(time or single or Away())
        self._carried, self._moments, self._shared = carried, moments, shared
        self.generators.put()
        self._go.release()
        self._stopped.acquire()
        self.generators.keep()

    def leave(self) -> None:
        """End the function, wherever it is."""
        if not self.done:
            self._left = True
            self._go.release()
            self._thread.join()


def take_turns(turns: Sequence[Turn], *, compile: bool = False) -> None:
    """Run all turns to their end. An error of one stays with it (`turn.error`), and the others go on."""
    before = Globals(turns[0].generators.device)
    for turn in turns:
        turn.among = turns
    try:
        for turn in turns:
            turn.go_on()
        while waiting := [turn for turn in turns if turn.waits]:
            _join([turn for turn in waiting if turn.joint is not None])
            _descend([turn for turn in waiting if turn.descent is not None])
            _train([turn for turn in waiting if turn.jobs], compile)
    finally:
        for turn in turns:
            turn.leave()
        before.put()


def _join(turns: Sequence[Turn]) -> None:
    """Carry out alike work that waits as one, and let each turn go on with its own result, or by itself."""
    left = list(turns)
    while left:
        first = left[0].joint
        assert first is not None
        mine = [turn for turn in left if turn is left[0] or first.like(turn.joint)]
        left = [turn for turn in left if turn not in mine]
        found: Sequence[Any] = []
        if len(mine) > 1:
            try:
                found = first.together([turn.joint for turn in mine[1:]])
            except Exception as e:  # noqa: BLE001 (alone, the one at fault fails and the others do not)
                for turn in mine:
                    turn.alone.append(f"{type(e).__name__}: {e}".splitlines()[0])
        for i, turn in enumerate(mine):
            turn.go_on(shared=(found[i],) if found else None)


def _train(turns: Sequence[Turn], compile: bool) -> None:
    """Carry out the trainings that wait, or hand them on, and let each turn go on with its own results."""
    jobs = [job for turn in turns for job in turn.jobs]
    if not jobs:
        return
    given = here()  # the turn of the function that gives these turns
    hands_on = given is not None and given.refuse is None and not compile
    outcomes = iter(given.wait_for_all(jobs) if given is not None and hands_on else _all_trained(jobs, compile))
    for turn in turns:
        turn.go_on([next(outcomes) for _ in turn.jobs])


def _all_trained(jobs: Sequence[AnyJob], compile: bool) -> list[Carried]:
    """Carry out trainings in stacks of those that are alike, and return their outcomes in that order."""
    plain = [(i, job) for i, job in enumerate(jobs) if isinstance(job, Job)]
    private = [(i, job) for i, job in enumerate(jobs) if isinstance(job, PrivateJob)]
    of_plain, of_private = [job for _, job in plain], [job for _, job in private]
    carried = _kind(of_plain, *stacks(of_plain), functools.partial(fit_together, compile=compile))
    carried += _kind(of_private, *private_stacks(of_private), fit_private_together)
    return [one for _, one in sorted(zip((i for i, _ in (*plain, *private)), carried, strict=True), key=_first)]


def _first(numbered: tuple[int, Any]) -> int:
    return numbered[0]


def _kind(
    jobs: Sequence[Job] | Sequence[PrivateJob],
    groups: Sequence[Sequence[int]],
    alone: dict[int, str],
    carry: Callable[[Any], Sequence[Fitted] | Sequence[Trained]],
) -> list[Carried]:
    """Carry out the trainings of one kind in stacks that are no larger than what fitted into memory before."""
    found: Found = {}
    halved: dict[int, str] = {}
    for group in groups:
        most = _fitted.get(_form(jobs[group[0]]), len(group))
        for first in range(0, len(group), most):
            _stack(jobs, group[first : first + most], carry, found, alone, halved)
    outcomes = []
    for i in range(len(jobs)):
        result, took = found.get(i, (None, None))
        outcomes.append(Carried(result, took, [reasons[i] for reasons in (alone, halved) if i in reasons]))
    return outcomes


def _descend(turns: Sequence[Turn]) -> None:
    """Carry out the waiting descents side by side, and let each turn go on; if memory runs out, do it in halves."""
    descents = [turn.descent for turn in turns if turn.descent is not None]
    if len(descents) < 2:
        for turn in turns:
            turn.go_on()
        return
    before = [[p.detach().clone() for p in descent.params] for descent in descents]
    begun, events = time.perf_counter(), _events(descents[0].device)
    try:
        found = side_by_side(descents, [turn.generators.cuda for turn in turns])
    except Exception as e:  # noqa: BLE001 (alone, the one at fault fails and the others do not)
        reason, memory = f"{type(e).__name__}: {e}".splitlines()[0], isinstance(e, torch.OutOfMemoryError)
        found = []
    if not found:
        with torch.no_grad():
            for descent, kept in zip(descents, before, strict=True):
                for p, was in zip(descent.params, kept, strict=True):
                    p.copy_(was)
        if memory:
            torch.cuda.empty_cache()
        for half in (turns[: len(turns) // 2], turns[len(turns) // 2 :]) if memory else [[turn] for turn in turns]:
            for turn in half:
                turn.alone.append(reason)
            _descend(half)
        return
    wall, whole = time.perf_counter() - begun, max(1, sum(descent.size for descent in descents))
    if events:
        events[1].record()
    for turn, descent, (moments, drawn) in zip(turns, descents, found, strict=True):
        turn.generators.cuda = drawn
        share = descent.size / whole
        turn.go_on(time=Away(share_s=wall * share, stack=events, share=share), moments=moments)


def _stack(
    jobs: Sequence[Job] | Sequence[PrivateJob],
    group: Sequence[int],
    carry: Callable[[Any], Sequence[Fitted] | Sequence[Trained]],
    found: Found,
    alone: dict[int, str],
    halved: dict[int, str],
) -> None:
    """Train a group as one stack; if memory runs out, in halves; if it cannot be stacked, note why in `alone`."""
    mine = [jobs[i] for i in group]
    generators = [generator for job in mine for generator in job.generators]
    before = [generator.get_state() for generator in generators]
    begun, events = time.perf_counter(), _events(mine[0].rows[0].device)
    try:
        fitted: Sequence[Any] = carry(mine)
    except Exception as e:  # noqa: BLE001 (nothing was changed yet: alone, the one at fault fails and the others do not)
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        if isinstance(e, torch.OutOfMemoryError):
            del e
            torch.cuda.empty_cache()
            if len(group) > 3:
                half = -(-len(group) // 2)
                _fitted[_form(mine[0])] = half  # later rounds begin there
                halved |= dict.fromkeys(
                    group, f"{len(group)} models at once ran out of memory: trained {half} at a time"
                )
                for part in (group[:half], group[half:]):
                    _stack(jobs, part, carry, found, alone, halved)
                return
        alone |= dict.fromkeys(group, reason)
        return
    wall = time.perf_counter() - begun
    if events:
        events[1].record()
    rows = [max(1, job.size) for job in mine]
    for i, of_job, n in zip(group, fitted, rows, strict=True):
        share = n / sum(rows)
        found[i] = of_job, Away(share_s=wall * share, stack=events, share=share)


_fitted: dict[Any, int] = {}  # how many models may be trained at once, if more ran out of memory in this run
each_run(_fitted.clear)


def _form(job: AnyJob) -> Any:
    """Return a key that trainings have in common if they take equally much memory."""
    plain = job.job if isinstance(job, PrivateJob) else job
    return type(job), repr(plain.structure), plain.batch


def _events(device: torch.device) -> tuple[Any, Any] | None:
    """Return a pair of CUDA events, the first recorded now; None without a GPU."""
    if device.type != "cuda":
        return None
    events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    events[0].record()
    return events
