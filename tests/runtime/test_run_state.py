"""What a run in progress tells of itself, and that it closes what it opened."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.runtime.run_state import RunState
from fedaudit.runtime.runner import _close
from fedaudit.runtime.task import Done
from fedaudit.training.cuda_graphs import MEMORY_FULL


def telling(now):
    said = []
    record = SimpleNamespace(notes=["known"])
    run = SimpleNamespace(
        watch=lambda *words: said.append(words), now=now, setting=SimpleNamespace(rounds=9), record=record
    )
    run.note = lambda notes: RunState.note(run, notes)
    return run, said


def test_slower_steps_are_told_with_the_rounds_that_are_behind():
    for now, behind in ((0, 0), (1, 0), (4, 3)):
        run, said = telling(now)
        RunState.tell_slower(run, "not compiled: no compiler")
        RunState.tell_slower(run, "no graph")
        RunState.tell_slower(run, MEMORY_FULL)
        (first, second, third) = said
        assert first[:2] == second[:2] == third[:2] == (behind, 9)
        assert "small networks takes 2 to 3 times as long as compiled, of deep ones up to a sixth longer" in first[2]
        assert "several times" in second[2]
        assert "Let fewer runs share the GPU" in third[2]


def test_what_is_not_stacked_is_told_once():
    run, said = telling(4)
    RunState.note_alone(run, "client_update", ["dropout"])
    RunState.note_alone(run, "client_update", ["dropout"])
    assert said == [(3, 9, "note: not stacked: client_update: dropout")]
    assert run.record.notes == ["known", "not stacked: client_update: dropout"]


class Closing:
    def __init__(self, **parts):
        self.closed = []
        self.store = SimpleNamespace(abandon=lambda: self.closed.append("store"))
        self.given_engine = None
        vars(self).update({name: SimpleNamespace(close=lambda n=name: self.closed.append(n)) for name in parts})

    def __getattr__(self, name):  # a run makes its engine when it is first asked for
        raise AssertionError(f"{name} is made in order to be closed")


def test_a_run_closes_what_it_opened_and_nothing_else():
    bare, whole, given = Closing(), Closing(engine=True, twins=True), Closing(engine=True)
    given.given_engine = given.engine
    for run in (bare, whole, given):
        _close(run)
    assert bare.closed == ["store"]
    assert whole.closed == ["twins", "store", "engine"]
    assert given.closed == ["store"], "its caller goes on with that engine"


def test_the_whole_text_of_a_failure_is_logged(tmp_path):
    run = SimpleNamespace(folder=tmp_path)
    run.log = lambda text: RunState.log(run, text)
    RunState.log_failure(run, 3, 1, Done(4, error="ValueError"))
    assert not (tmp_path / "errors.log").exists(), "nothing more is known than the record says"
    RunState.log_failure(run, 3, 1, Done(4, error="ValueError", detail="a trace"))
    RunState.log_failure(run, 5, 0, Done(2, error="KeyError", detail="another"))
    assert (tmp_path / "errors.log").read_text() == (
        "round 3, ask 1, client 4: a trace\nround 5, ask 0, client 2: another\n"
    )


@pytest.mark.parametrize(
    ("start", "rounds", "begun"),
    [(None, [], True), (None, ["one"], True), ("a run", [], False), ("a run", ["one"], True)],
)
def test_a_client_begins_with_its_first_answer_in_this_run(start, rounds, begun):
    """A state that was taken over from another run is none of this one."""
    run = SimpleNamespace(
        store=SimpleNamespace(clients={3: "a state"}), setting=SimpleNamespace(start=start),
        record=SimpleNamespace(rounds=rounds),
    )  # fmt: skip
    assert RunState.has_begun(run, 3) is begun
    assert not RunState.has_begun(run, 4)


def test_the_evaluated_model_is_deployed_if_it_is_of_that_round():
    built = []
    run = SimpleNamespace(
        deployed=(4, "evaluated"), setting=SimpleNamespace(seed=1), world=SimpleNamespace(device="cpu"), state="state",
        server=lambda t: t, method=SimpleNamespace(predictor=lambda state, t: built.append((state, t)) or "built"),
    )  # fmt: skip
    assert RunState.predictor(run, 4) == "evaluated"
    assert built == []
    assert RunState.predictor(run, 5) == "built"
    run.deployed = None
    assert RunState.predictor(run, 4) == "built"
    assert built == [("state", 5), ("state", 4)]
