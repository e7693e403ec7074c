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
