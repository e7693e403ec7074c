"""Functions that take turns in threads of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedaudit.runtime import lockstep
from fedaudit.runtime.lockstep import Globals, Turn, carry_out, take_turns
from fedaudit.training.fit import Fitted, sgd
from fedaudit.training.losses import ce
from fedaudit.training.stacked.stack import Job

# In this mode MKL's products depend on the number of threads; on processors without MKL all of them are equal anyway.
OTHER_BITS = {"MKL_CBWR": "COMPATIBLE"}
SCRIPT = """
import torch
from fedaudit.runtime.lockstep import Globals, Turn, take_turns

torch.manual_seed(0)
a, w, c = torch.randn(6, 128), torch.randn(10, 128), torch.randn(10)
for threads in (1, 2):
    torch.set_num_threads(threads)
    turn = Turn(lambda: torch.addmm(c, a, w.t()), Globals(torch.device("cpu")))
    take_turns([turn])
    assert torch.equal(turn.result, torch.addmm(c, a, w.t())), threads
"""


@pytest.mark.slow
def test_a_turn_computes_with_as_many_threads_as_who_gave_it() -> None:
    """A thread that was just started has OpenMP's own number of threads, whatever torch says it has."""
    for cores in ("1", "2"):
        env = {**os.environ, **OTHER_BITS, "OMP_NUM_THREADS": cores}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


def job(steps: int) -> Job:
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(steps)), torch.arange(12) % 2
    options = {"opt": sgd(0.1), "batch": 4, "steps": steps}
    return Job(nn.Linear(3, 2), ce, rows, torch.Generator().manual_seed(steps), options)


def test_turns_within_turns_get_their_own_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two functions give turns to two and three others, each of which trains for another number of steps, and then
    train themselves. All five are one stack, then the two are; each gets the number of its own steps back."""
    sizes = []
    together = lockstep.fit_together

    def counted(jobs: list[Job], **how: bool) -> list[Fitted]:
        sizes.append(len(jobs))
        return together(jobs, **how)

    monkeypatch.setattr(lockstep, "fit_together", counted)
    cpu = torch.device("cpu")
    found: dict[int, int] = {}

    def inner(steps: int) -> None:
        found[steps] = carry_out(job(steps)).steps

    def outer(first: int, last: int) -> int:
        take_turns([Turn(lambda n=n: inner(n), Globals(cpu)) for n in range(first, last)])  # type: ignore[misc]
        return carry_out(job(last)).steps

    turns = [Turn(lambda: outer(2, 4), Globals(cpu)), Turn(lambda: outer(5, 8), Globals(cpu))]
    take_turns(turns)
    assert [turn.error for turn in turns] == [None, None]
    assert found == {2: 2, 3: 3, 5: 5, 6: 6, 7: 7}
    assert [turn.result for turn in turns] == [4, 8]
    assert sizes == [5, 2]


def test_a_turn_that_fails_within_a_turn_ends_that_one_alone() -> None:
    """One of two functions ends with an error while its own turns wait. The other one gets its results."""
    cpu = torch.device("cpu")

    def fails() -> None:
        turn = Turn(lambda: carry_out(job(2)), Globals(cpu))
        take_turns([turn])
        raise ValueError("after its turns")

    def goes_on() -> list[int]:
        turns = [Turn(lambda n=n: carry_out(job(n)).steps, Globals(cpu)) for n in (3, 4)]  # type: ignore[misc]
        take_turns(turns)
        return [turn.result for turn in turns] + [carry_out(job(5)).steps]

    turns = [Turn(fails, Globals(cpu)), Turn(goes_on, Globals(cpu))]
    take_turns(turns)
    assert isinstance(turns[0].error, ValueError)
    assert turns[1].result == [3, 4, 5]


def test_the_state_of_a_devices_generator_is_kept_beside_the_others() -> None:
    held = Globals(torch.device("cpu"))
    before = held._state
    held.cuda = torch.tensor([1, 2, 3])
    assert held.cuda.tolist() == [1, 2, 3]
    assert len(held._state) == len(before)
    assert all(held._state[i] is before[i] for i in (0, 2, 3))


def descending(sizes: list[int]) -> list[SimpleNamespace]:
    """Turns that wait for a descent of so many rows each, and keep what they are told."""
    turns = []
    for size in sizes:
        descent = SimpleNamespace(size=size, params=[torch.zeros(2)], device=torch.device("cpu"))
        turn = SimpleNamespace(descent=descent, generators=SimpleNamespace(cuda=None), alone=[], told=[])
        turn.go_on = lambda turn=turn, **told: turn.told.append(told)
        turns.append(turn)
    return turns


def test_the_time_of_descents_side_by_side_is_shared_out_by_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four seconds; one has a row, the other three. Each gets its own moments and generator back."""
    turns, clock = descending([1, 3]), iter([100.0, 104.0])
    monkeypatch.setattr(lockstep.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(lockstep, "side_by_side", lambda found, states: [("m0", "g0"), ("m1", "g1")])
    lockstep._descend(turns)
    for i, seconds in enumerate((1.0, 3.0)):
        (told,) = turns[i].told
        away = told["time"]
        assert (told.keys(), told["moments"]) == ({"time", "moments"}, f"m{i}")
        assert turns[i].generators.cuda == f"g{i}"
        assert away.share_s == pytest.approx(seconds)
        assert away.share == pytest.approx(seconds / 4)
        assert away.wall_s == 0.0


def test_descents_that_fail_together_go_on_alone_from_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(found, states):
        for descent in found:
            descent.params[0] += 7
        raise RuntimeError("no two\nmore")

    monkeypatch.setattr(lockstep, "side_by_side", fails)
    turns = descending([1, 2, 2])
    lockstep._descend(turns)
    assert [turn.told for turn in turns] == [[{}]] * 3
    assert [turn.alone for turn in turns] == [["RuntimeError: no two"]] * 3
    assert all(float(turn.descent.params[0].abs().max()) == 0 for turn in turns)


def test_a_stacks_end_is_recorded_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two trainings, of 1 and 3 rows, is told both events and its share of the time between them."""
    events = [[], []]
    pair = tuple(SimpleNamespace(record=lambda said=said: said.append("recorded")) for said in events)
    monkeypatch.setattr(lockstep, "_events", lambda device: pair)
    jobs = [SimpleNamespace(generators=[], rows=[torch.zeros(1)], size=n) for n in (1, 3)]
    found, alone, halved = {}, {}, {}
    lockstep._stack(jobs, [0, 1], lambda mine: ["one", "other"], found, alone, halved)
    assert events == [[], ["recorded"]], "the first is recorded where it is made"
    assert [(of, away.share, away.stack) for of, away in found.values()] == [("one", 0.25, pair), ("other", 0.75, pair)]
    assert not alone
    assert not halved


class Events:
    """A pair of events that note when they are recorded."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.pair = tuple(SimpleNamespace(record=lambda n=n: self.said.append(n)) for n in ("first", "last"))


def test_a_turn_that_hands_on_is_told_of_its_trainings_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits from 100 to 109 for three trainings; their shares of the stacks took 2 and 3 of these seconds."""
    events, told = Events(), []
    turn = SimpleNamespace(waited_s=1.0, away=told.append)
    times = [lockstep.Away(share_s=2.0, share=0.25, stack=("a", "b")), None, lockstep.Away(share_s=3.0, share=0.5)]
    outcomes = [lockstep.Carried(f"r{i}", of) for i, of in enumerate(times)]
    turn._hand_over = lambda: setattr(turn, "_carried", outcomes)
    clock = iter([100.0, 109.0])
    monkeypatch.setattr(lockstep.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(lockstep, "_events", lambda device: events.pair)
    jobs = [SimpleNamespace(rows=[torch.zeros(1)]) for _ in range(3)]
    assert Turn.wait_for_all(turn, jobs) == outcomes
    assert turn.jobs == jobs
    assert events.said == ["last"], "the end of the wait"
    assert told == [lockstep.Away(events=events.pair), lockstep.Away(stack=("a", "b"), share=0.25),
                    lockstep.Away(share=0.5)]  # fmt: skip
    assert turn.waited_s == 1.0 + 9.0 - 5.0
    monkeypatch.setattr(lockstep, "_events", lambda device: None)
    clock = iter([0.0, 4.0])
    turn._hand_over = lambda: setattr(turn, "_carried", ())
    assert Turn.wait_for_all(turn, jobs) == [lockstep.Carried()] * 3
    assert (len(told), turn.waited_s) == (3, 9.0)


def test_a_turn_is_told_how_long_it_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    events, told = Events(), []
    turn = SimpleNamespace(waited_s=1.0, away=told.append, _time=lockstep.Away(share_s=2.5))
    turn._hand_over = lambda: None
    clock = iter([100.0, 106.0])
    monkeypatch.setattr(lockstep.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(lockstep, "_events", lambda device: events.pair)
    Turn._away(turn, torch.device("cpu"))
    assert events.said == ["last"]
    assert told == [lockstep.Away(events=events.pair, wall_s=6.0, share_s=2.5)]
    assert turn.waited_s == 1.0 + 6.0 - 2.5


def test_a_training_that_was_not_stacked_is_carried_out_alone() -> None:
    """A turn that refuses does not wait; one without a result trains by itself; else it gets the result."""
    work = SimpleNamespace(rows=[torch.zeros(1)], alone=lambda: "alone")
    turn = SimpleNamespace(refuse="its own way", alone=[])
    assert Turn.wait(turn, work) == "alone"
    assert turn.alone == ["its own way"]
    turn = SimpleNamespace(refuse=None, alone=["before"], _away=lambda device: None)
    for carried, result, reasons in (
        ((), "alone", ["before"]),
        ((lockstep.Carried(None, None, ["memory"]),), "alone", ["before", "memory"]),
        ((lockstep.Carried("stacked", None, ["halved"]),), "stacked", ["before", "memory", "halved"]),
    ):
        turn._carried = carried
        assert Turn.wait(turn, work) == result
        assert turn.alone == reasons
        assert turn.jobs == [work]


class Work:
    """Work of one form, of which several can be done together, unless one is at fault."""

    def __init__(self, form: str, number: int, fails: bool = False):
        self.form, self.number, self.fails = form, number, fails

    def like(self, other: Work) -> bool:
        return self.form == other.form

    def together(self, others: list[Work]) -> list[str]:
        if any(one.fails for one in (self, *others)):
            raise ValueError("no two\nmore")
        return [f"{one.form}{one.number} of {1 + len(others)}" for one in (self, *others)]


def test_alike_work_is_done_together_and_each_gets_its_own() -> None:
    turns = []
    for form, number, fails in (("a", 1, 0), ("b", 2, 0), ("a", 3, 0), ("c", 4, 0), ("b", 5, 1), ("a", 6, 0)):
        turn = SimpleNamespace(joint=Work(form, number, bool(fails)), alone=[], told=[])
        turn.go_on = lambda turn=turn, **told: turn.told.append(told)
        turns.append(turn)
    lockstep._join(turns)
    found = [turn.told for turn in turns]
    assert found == [[{"shared": shared}] for shared in (("a1 of 3",), None, ("a3 of 3",), None, None, ("a6 of 3",))]
    reason = ["ValueError: no two"]
    assert [turn.alone for turn in turns] == [[], reason, [], [], reason, []]


def test_a_stack_that_does_not_fit_is_halved_and_begins_smaller_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven jobs, of which three fit: halves of four and three, then two and two. Each has its share of its stack."""
    monkeypatch.setattr(lockstep, "_fitted", {})
    monkeypatch.setattr(lockstep, "_form", lambda job: "form")
    now = [0.0]
    monkeypatch.setattr(lockstep.time, "perf_counter", lambda: now[0])
    jobs = []
    for i in range(7):
        generators = [torch.Generator().manual_seed(i)]
        jobs.append(SimpleNamespace(generators=generators, rows=[torch.zeros(1)], size=i, number=i))
    before = [job.generators[0].get_state() for job in jobs]
    sizes = []

    def carry(mine):
        sizes.append(len(mine))
        now[0] += 10.0
        if len(mine) > 3:
            for job in mine:
                torch.rand(1, generator=job.generators[0])
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return [f"r{job.number}" for job in mine]

    outcomes = lockstep._kind(jobs, [list(range(7))], {}, carry)
    assert sizes == [7, 4, 2, 2, 3]
    assert [one.result for one in outcomes] == [f"r{i}" for i in range(7)]
    shares = [1 / 2, 1 / 2, 2 / 5, 3 / 5, 4 / 15, 5 / 15, 6 / 15]
    assert [one.time.share for one in outcomes] == pytest.approx(shares)
    assert [one.time.share_s for one in outcomes] == pytest.approx([10 * share for share in shares])
    said = "{} models at once ran out of memory: trained {} at a time"
    assert [one.alone for one in outcomes] == [[said.format(4, 2)]] * 4 + [[said.format(7, 4)]] * 3
    assert all(torch.equal(job.generators[0].get_state(), was) for job, was in zip(jobs, before, strict=True))
    assert lockstep._fitted == {"form": 2}
    sizes.clear()
    again = lockstep._kind(jobs, [list(range(7))], {}, carry)
    assert sizes == [2, 2, 2, 1]
    assert [one.alone for one in again] == [[]] * 7


def test_three_that_do_not_fit_go_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "_fitted", {})
    monkeypatch.setattr(lockstep, "_form", lambda job: "form")
    jobs = [SimpleNamespace(generators=[], rows=[torch.zeros(1)], size=1) for _ in range(5)]

    def carry(mine):
        raise torch.OutOfMemoryError("no memory\nmore")

    outcomes = lockstep._kind(jobs, [[0, 2, 3]], {1: "another form"}, carry)
    reason = "OutOfMemoryError: no memory"
    assert [one.alone for one in outcomes] == [[reason], ["another form"], [reason], [reason], []]
    assert all(one.result is None and one.time is None for one in outcomes)
    assert lockstep._fitted == {}


def test_a_devices_generator_is_put_in_place_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(lockstep.torch.cuda, "get_rng_state", lambda of: torch.tensor([of.index, 7]))
    monkeypatch.setattr(lockstep.torch.cuda, "set_rng_state", lambda state, of: said.append((state.tolist(), of)))
    Globals(device).put()
    Globals(torch.device("cpu")).put()
    assert said == [([1, 7], device)]


def test_work_inside_a_turn_waits_unless_the_turn_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of turns, in one that refuses, and where a descent cannot be recorded, all is done at once, alone."""
    work = SimpleNamespace(alone=lambda: "alone", records=True)
    free = SimpleNamespace(alone=lambda: "alone", records=False)
    waits = SimpleNamespace(
        refuse=None, alone=[], wait_joining=lambda of: "joined", wait_descending=lambda of: "beside"
    )
    refuses = SimpleNamespace(**{**vars(waits), "refuse": "its own way", "alone": []})
    reason = ["what it optimises is free-form"]
    for turn, what, joined, beside, said in (
        (None, work, "alone", "alone", None),
        (waits, work, "joined", "beside", []),
        (refuses, work, "alone", "alone", reason),
        (waits, free, "joined", "alone", reason),
    ):
        monkeypatch.setattr(lockstep, "here", lambda turn=turn: turn)
        assert lockstep.join(what) == joined
        assert lockstep.descend(what) == beside
        assert turn is None or turn.alone == said


def test_what_was_not_done_together_is_done_alone() -> None:
    turn = SimpleNamespace(_moments=None, _shared=None, devices=[])
    turn._away = turn.devices.append
    descent = SimpleNamespace(device=torch.device("cuda", 1), alone=lambda: "alone")
    assert Turn.wait_descending(turn, descent) == "alone"
    assert Turn.wait_joining(turn, descent) == "alone"
    turn._moments, turn._shared = "moments", (None,)
    assert Turn.wait_descending(turn, descent) == "moments"
    assert Turn.wait_joining(turn, descent) is None, "a result may be None"
    assert (turn.descent, turn.joint) == (descent, descent)
    assert turn.devices == [torch.device("cuda", 1), torch.device("cpu")] * 2


def test_a_turn_that_has_not_begun_has_waited_for_nothing() -> None:
    turn = Turn(lambda: None, Globals(torch.device("cpu")))
    assert (turn.jobs, turn.descent, turn.joint, turn.result, turn.error) == ((), None, None, None, None)
    assert (turn.done, turn.refuse, turn.alone, turn.waited_s, turn.seed) == (False, None, [], 0.0, None)
    assert turn.among == ()
    take_turns([turn])
    assert turn.done
