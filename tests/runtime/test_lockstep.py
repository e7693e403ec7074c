"""Functions that take turns in threads of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fedaudit.runtime import lockstep
from fedaudit.runtime.lockstep import Globals

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
