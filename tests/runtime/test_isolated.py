"""The engine of isolated parties, with processes that answer by hand."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
import torch

from fedaudit.aggregation.terms import Terms
from fedaudit.errors import ContractError, RunError
from fedaudit.runtime.engines import isolated
from fedaudit.runtime.engines.isolated import IsolatedEngine, encoded_rows, facts_of, plain_task
from fedaudit.runtime.engines.losses import TRIES
from fedaudit.runtime.isolated_worker import done_as_frame, receive
from fedaudit.runtime.task import Done, Task
from fedaudit.setting import Setting
from fedaudit.shape import Shape
from fedaudit.wire.codec import decode_tree


class Known:
    """Some facts, as themselves and nobody else."""

    def __init__(self, **facts):
        vars(self).update(facts)


def world(policies=(), people=None, has_public=True):
    """A world of three classes, in which clients have ten times their number of records."""
    rows = {
        name: (torch.full((2, 1), float(i)), torch.full((2,), i))
        for i, name in enumerate(("public", "own", "validation"))
    }
    return Known(
        shape=Shape((1, 8, 8), 0), classes=3, public_labelled=True, count=lambda k: 10 * k, people=lambda k: people,
        policies=policies, releases=lambda kind: len(kind), absent=lambda t: {f"Z.{t}", "A.w"}, has_public=has_public,
        public=lambda: rows["public"], members=lambda k: rows["own"], validation=lambda k: rows["validation"],
        setting=Setting.make(dataset="digits", data_dir="/data", seed=7),
    )  # fmt: skip


def test_what_a_party_is_told_of_the_run():
    plain = {"shape": [1, 8, 8], "tokens": 0, "classes": 3, "public_labelled": True}
    assert facts_of(world(), None) == plain, "the server"
    own = {"k": 4, "t": 0, "count": 40, "releases": {}, "absent": [], "people": None}
    assert facts_of(world(), 4) == plain | own
    found = facts_of(world({"logits": 1}, torch.tensor([5, 5, 8])), 4, 2)
    assert found.pop("releases") == {kind: len(kind) for kind in isolated.KINDS}
    assert found == plain | {"k": 4, "t": 2, "count": 40, "absent": ["A.w", "Z.2"], "people": [5, 5, 8]}


@pytest.mark.parametrize(
    ("has_public", "public", "there"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_which_records_a_party_holds(has_public, public, there):
    here = world(has_public=has_public)
    first = ["public"] if there else []
    own = {"own": here.members(4), "validation": here.validation(4)}
    found = decode_tree(encoded_rows(here, 4, own, public=public))
    assert list(found) == [*first, "own 4", "validation 4"]
    assert [x.flatten().tolist() for x, _ in found.values()][-2:] == [[1.0, 1.0], [2.0, 2.0]]
    assert list(decode_tree(encoded_rows(here, public=public))) == first
    missing = {"own": (torch.tensor([[float("nan")]]), torch.tensor([1]))}
    assert torch.isnan(decode_tree(encoded_rows(here, 4, missing))["own 4"][0]).all(), "records are as they are"


def test_a_task_in_plain_words():
    task = Task("{}", "update", 3, 2, 1, b"state", b"message", attempt=4, followed=True)
    assert plain_task(task) == {"fn": "update", "k": 3, "t": 2, "ask": 1, "attempt": 4, "followed": True}


@pytest.fixture
def engine(monkeypatch, tmp_path):
    """An engine, the world that it finds, and what its parties were told. `answers` has what they answer."""
    here = world()
    monkeypatch.setattr(isolated, "world_of", lambda text: here)
    monkeypatch.setattr(isolated.tempfile, "mkdtemp", lambda **of: str(tmp_path / "scratch"))
    found = IsolatedEngine(Setting.make())
    told, answers = [], []

    @contextlib.contextmanager
    def party(said, blobs, world):
        told.append((said, blobs))
        yield "file"

    def heard(file):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(found, "_party", party)
    monkeypatch.setattr(isolated, "receive", heard)
    return found, told, answers


TERMS = Terms("n", 4, 2.0, 3.0, True, ("key", 3))


@pytest.mark.parametrize(("state", "terms"), [(None, None), (b"state", TERMS)])
def test_a_client_is_told_its_task_and_its_own_records(engine, state, terms):
    found, told, answers = engine
    answers.append(done_as_frame(Done(3, b"new", b"reply")))
    task = Task("{}", "update", 3, 2, 1, state, b"message", noise=b"noise", terms=terms)
    (done,) = found.map([task])
    assert (done.k, done.state, done.reply, done.redone) == (3, b"new", b"reply", 0)
    ((said, (message, before, noise, rows)),) = told
    plain = None if terms is None else dataclasses.asdict(terms)
    assert (said["what"], said["task"], said["terms"]) == ("task", plain_task(task), plain)
    assert (said["facts"]["k"], said["facts"]["t"], said["facts"]["count"]) == (3, 2, 30)
    assert (message, before, noise) == (b"message", state or b"", b"noise")
    assert list(decode_tree(rows)) == ["public", "own 3", "validation 3"]


@pytest.mark.parametrize("lost", range(TRIES + 1))
def test_a_client_whose_process_ends_is_asked_again(engine, lost):
    found, told, answers = engine
    answers += [EOFError() if i % 2 else OSError("no memory") for i in range(lost)]
    answers.append(done_as_frame(Done(3)))
    task = Task("{}", "update", 3, 2, 1, None, b"")
    if lost < TRIES:
        assert next(found.map([task])).redone == lost
        assert len(told) == lost + 1
    else:
        with pytest.raises(RunError, match=r"Client 3's task \(update, round 2\) was lost 3 times: .*\(no memory\)"):
            next(found.map([task]))
        assert len(told) == TRIES


def test_a_client_that_drops_out_needs_no_process(engine):
    found, told, _ = engine
    assert next(found.map([Task("{}", "f", 3, 2, 1, None, b"", drop=True)])) == Done(3, error="dropped out")
    assert told == []


@pytest.mark.parametrize("state", [None, b"state"])
def test_the_server_is_answered_until_its_round_is_over(engine, state, monkeypatch):
    """It asks clients 5 and 2, who get one message, and 4, who gets another; then for a mean."""
    found, told, answers = engine
    sent, asked = [], []
    monkeypatch.setattr(isolated, "send", lambda file, said, blobs: sent.append((said, blobs)))
    answers += [
        ({"ask": "M.f", "to": [[2, 0], [4, 1], [5, 0]], "mean": None}, [b"a", b"b"]),
        ({"ask": "M.g", "to": [[2, 0]], "mean": {"by": "n"}}, [b"c"]),
        ({"spans": []}, [b"after"]),
    ]

    def answer(path, messages, how):
        asked.append((path, messages, how))
        return {2: b"r2", 4: b"r4"}, [2, 4], 9

    assert found.server("round", 3, state, [2, 4, 5], answer) == ({"spans": []}, [b"after"])
    assert asked == [("M.f", {2: b"a", 4: b"b", 5: b"a"}, None), ("M.g", {2: b"c"}, {"by": "n"})]
    assert sent == [({"replied": [2, 4], "left": [2, 4], "count": 9}, [b"r2", b"r4"])] * 2
    ((said, blobs),) = told
    assert (said["what"], said["t"], said["ids"]) == ("round", 3, [2, 4, 5])
    assert "k" not in said["facts"]
    assert blobs[:-1] == ([] if state is None else [b"state"])
    assert list(decode_tree(blobs[-1])) == ["public"]


@pytest.mark.parametrize(
    ("frame", "error", "words"),
    [
        (({"error": ["ContractError", "no Down"]}, []), ContractError, "no Down"),
        (({"ask": "f", "to": [[1, 3]]}, [b""]), RunError, "not a valid ask"),
        (({"ask": "f", "to": 3}, []), RunError, "not a valid ask"),
        (EOFError(), RunError, "The server's init ended without an answer"),
    ],
)
def test_a_server_that_says_something_else_ends_the_run(engine, frame, error, words):
    found, _, answers = engine
    answers.append(frame)
    with pytest.raises(error, match=words):
        found.server("init", 0, None, [], None)


@pytest.mark.parametrize(("privacy", "preload"), [({}, []), ({"logits": {"epsilon": 1.0}}, ["opacus"])])
def test_each_party_has_a_folder_of_its_own(privacy, preload, monkeypatch):
    """One nursery serves them all until it is spent."""
    made = []

    class Nursery:
        spent = False

        def __init__(self, *of):
            self.closed, self.of = False, of
            made.append(self)

        def hand_over(self, theirs):
            self.theirs = theirs

        def close(self):
            self.closed = True

    monkeypatch.setattr(isolated, "Nursery", Nursery)
    engine = IsolatedEngine(Setting.make(method="fedavg", privacy=privacy))
    scratch, folders = engine._scratch, []
    for spent in (False, True, False):
        if made:
            made[-1].spent = spent
        with engine._party({"what": "task"}, [b"blob"], world()):
            with made[-1].theirs as theirs, theirs.makefile("rwb") as file:
                said, blobs = receive(file)
            folders.append(Path(said["folder"]))
            assert folders[-1].parent == scratch
            assert folders[-1].is_dir()
        assert (said["what"], blobs) == ("task", [b"blob"])
        told = Setting.model_validate_json(said["setting"])
        assert (told.dataset, told.data_dir, told.seed) == ("(elsewhere)", "", 7)
        assert not folders[-1].exists()
    assert len(set(folders)) == 3
    assert [(one.of, one.closed) for one in made] == [(("fedavg", scratch, preload), i == 0) for i in range(2)]
    engine.close()
    assert made[1].closed
    assert not scratch.exists()
    engine.close()
    assert engine.in_process is False
