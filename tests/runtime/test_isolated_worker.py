"""The process from which parties are forked: what it imports before, and what it says; and the frames it reads."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

from fedaudit import Down, Record, Up, public
from fedaudit.aggregation.terms import Terms
from fedaudit.errors import ContractError, DataError, DeviceError, RunError, SettingError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import HandedOver, Neighbour, Tape
from fedaudit.runtime import isolated_worker
from fedaudit.runtime.isolated_worker import Apart, receive, send
from fedaudit.runtime.meter import Span
from fedaudit.runtime.site import Swap, drawn_half
from fedaudit.runtime.task import Done, Task
from fedaudit.setting import Setting
from fedaudit.wire.codec import decode, encode, encode_tree
from fedaudit.wire.release import Protection


@pytest.fixture
def started(monkeypatch):
    """Carry out `main` for a nursery that is closed at once; return what it imported, found and said."""
    done = SimpleNamespace(imported=[], said=[], all_methods=0, found=[])
    control = SimpleNamespace(sendall=done.said.append)
    monkeypatch.setattr(isolated_worker.signal, "signal", lambda *of: None)
    monkeypatch.setattr(isolated_worker.socket, "socket", lambda fileno: control)
    monkeypatch.setattr(isolated_worker.socket, "recv_fds", lambda *of: (b"", [], 0, None))
    monkeypatch.setattr(isolated_worker.importlib, "import_module", done.imported.append)
    monkeypatch.setattr(isolated_worker.registry, "names", lambda kind: setattr(done, "all_methods", 1))

    def find(name):
        done.found.append(name)
        if name == "unknown":
            raise RunError("there is none")

    monkeypatch.setattr(isolated_worker.registry, "find", find)
    threads = iter([1, 1])
    monkeypatch.setattr(isolated_worker, "_threads", lambda: next(threads))

    def main(*words, now=1):
        nonlocal threads
        threads = iter([1, now])
        monkeypatch.setattr(sys, "argv", ["worker", "5", *words])
        isolated_worker.main()
        return done

    return main


def test_what_is_there_is_imported_before_any_fork(started):
    done = started("", "json", "no_such_module")
    assert done.imported == [*isolated_worker.USUAL, "json"], "a module that is not installed is no error"
    assert done.all_methods == 1
    assert done.found == []
    assert done.said == [b"f" if isolated_worker.FORK else b"o"]


def test_a_nursery_of_one_method_imports_that_one(started, monkeypatch):
    monkeypatch.setattr(isolated_worker, "FORK", True)
    done = started("fedavg")
    assert (done.all_methods, done.found, done.said) == (0, ["fedavg"], [b"f"])


def test_a_method_that_computes_while_it_is_imported_is_not_forked(started, monkeypatch):
    monkeypatch.setattr(isolated_worker, "FORK", True)
    assert started("fedavg", now=3).said == [b"o"]


def test_without_fork_it_serves_one_party(started, monkeypatch):
    monkeypatch.setattr(isolated_worker, "FORK", False)
    assert started("fedavg").said == [b"o"]


def test_a_method_that_is_not_there_is_said(started):
    assert started("unknown").said == [b"e"]


def test_frames_hold_what_was_sent():
    file = io.BytesIO()
    send(file, {"what": "twin", "n": 3}, [b"abc", b"", b"de"])
    send(file, {}, [])
    file.seek(0)
    assert receive(file) == ({"what": "twin", "n": 3}, [b"abc", b"", b"de"])
    assert receive(file) == ({}, [])
    with pytest.raises(EOFError):
        receive(file)


@pytest.mark.parametrize(
    "text",
    [b'{"said": [1], "blobs": []}', b'{"said": {}, "blobs": [-1]}', b'{"said": {}, "blobs": ["x"]}', b"[]", b"no"],
)
def test_frames_of_another_form_are_refused(text):
    file = io.BytesIO(len(text).to_bytes(8, "little") + text)
    with pytest.raises(RunError, match="something that is not a frame"):
        receive(file)


def test_frames_that_are_too_long_are_refused(monkeypatch):
    text = b'{"said": {}, "blobs": [4]}'
    frame = len(text).to_bytes(8, "little") + text + b"abcd"
    monkeypatch.setattr(isolated_worker, "LONGEST", len(text))
    monkeypatch.setattr(isolated_worker, "LARGEST", 4)
    assert receive(io.BytesIO(frame)) == ({}, [b"abcd"])
    with pytest.raises(EOFError):
        receive(io.BytesIO(frame[:-1]))
    monkeypatch.setattr(isolated_worker, "LARGEST", 3)
    with pytest.raises(RunError, match="not a frame"):
        receive(io.BytesIO(frame))
    monkeypatch.setattr(isolated_worker, "LONGEST", len(text) - 1)
    with pytest.raises(RunError, match="too long"):
        receive(io.BytesIO(frame))


def test_a_party_knows_its_own_records_alone():
    """Client 3 of a run, with 5 records of two persons. Then the process turns to client 4."""
    here = SimpleNamespace(_facts={"k": 3, "count": 5, "people": [7, 7, 8, 7, 8], "public_labelled": False})
    here._given = {"own 3": "rows of 3", "validation 3": "held out of 3", "own 4": "rows of 4"}
    here._only = lambda name, k: Apart._only(here, name, k)
    assert Apart.count(here, 3) == 5
    assert Apart.people(here, 3).tolist() == [7, 7, 8, 7, 8]
    assert (Apart.members(here, 3), Apart.validation(here, 3)) == ("rows of 3", "held out of 3")
    assert Apart.public_labelled.fget(here) is False
    for asked in (Apart.count, Apart.people, Apart.members, Apart.seen_members, Apart.validation):
        with pytest.raises(ContractError, match="client 4"):
            asked(here, 4)
    Apart.turn_to(here, {"k": 4, "people": None, "count": 9})
    assert (Apart.count(here, 4), Apart.people(here, 4), Apart.members(here, 4)) == (9, None, "rows of 4")
    with pytest.raises(ContractError, match="client 3"):
        Apart.members(here, 3)
    here.setting = SimpleNamespace(method="fedmd")
    with pytest.raises(SettingError, match="fedmd needs a public transfer set"):
        Apart.public(here)
    here._given["public"] = "the public set"
    assert Apart.public(here) == "the public set"


def test_a_party_is_not_told_where_the_records_lie():
    found = isolated_worker.without_data(
        Setting.make(dataset="digits", data_dir="/data", public_dataset="digits", seed=7)
    )
    assert (found.dataset, found.data_dir, found.public_dataset, found.seed) == ("(elsewhere)", "", None, 7)


class Note(Down):
    n: int


class Reply(Up):
    n: int = public()


class Kept(Record):
    n: int


@pytest.fixture
def apart(monkeypatch):
    """A function that carries out a server's round in a process of its own; the other side answers by hand."""
    sent, answers = [], []
    monkeypatch.setattr(isolated_worker, "send", lambda file, said, blobs: sent.append((said, blobs)))
    monkeypatch.setattr(isolated_worker, "receive", lambda file: answers.pop(0))
    monkeypatch.setattr(isolated_worker, "function_path", lambda method, fn: f"path of {fn}")
    monkeypatch.setattr(isolated_worker, "compute", lambda world: contextlib.nullcontext())
    monkeypatch.setattr(isolated_worker, "Server", lambda hub, t, meter: SimpleNamespace(t=t))
    cpu = torch.device("cpu")

    def carried_out(method, what="round", back=()):
        sent.clear()
        answers[:] = back
        world = SimpleNamespace(method=method, device=cpu, setting=SimpleNamespace(seed=5, flops=False), hub=None)
        said = {"t": 4, "what": what, "ids": [1, 2, 5, 6]}
        isolated_worker._server("file", world, said, [encode(Kept(30))])
        return sent

    return carried_out


def test_a_message_that_several_clients_get_is_sent_once(apart):
    """Clients 1 and 5 get one message, 2 and 6 others, which are equal. Client 6 does not answer."""
    common, own, equal = Note(8), Note(9), Note(9)
    found = []

    def round(before, server, cohort):
        found.append(cohort.ask("update", {6: equal, 1: common, 5: common, 2: own}))
        found.append((server.t, list(cohort.ids)))
        mean = cohort.mean("update", common, by="n")
        found.append((mean.value.n, mean.count))
        return Kept(before.n + 1)

    back = [
        ({"left": [1, 2, 5], "replied": [1, 2, 5]}, [encode(Reply(n)) for n in (10, 20, 50)]),
        ({"left": [1, 2], "count": 2}, [encode(Reply(77))]),
    ]
    asked, averaged, (facts, state) = apart(SimpleNamespace(round=round), back=back)
    said, blobs = asked
    assert said == {"ask": "path of update", "to": [[1, 0], [2, 1], [5, 0], [6, 2]], "mean": None}
    assert [decode(blob, Note).n for blob in blobs] == [8, 9, 9]
    assert averaged[0] == {"ask": "path of update", "to": [[1, 0], [2, 0], [5, 0]], "mean": {"by": "n"}}
    assert len(averaged[1]) == 1
    assert {k: reply.n for k, reply in found[0].items()} == {1: 10, 2: 20, 5: 50}
    assert found[1:] == [(4, [1, 2, 5]), (77, 2)]
    assert decode(state[0], Kept).n == 31
    assert facts.keys() == {"spans", "rss", "gpu", "unrecorded"}
    assert [(span["party"], span["round"]) for span in facts["spans"] if span["phase"] == "round"] == [("server", 4)]


def test_a_servers_first_state_and_its_errors(apart):
    method = SimpleNamespace(init=lambda server: Kept(server.t))
    ((_, state),) = apart(method, "init")
    assert decode(state[0], Kept).n == 4
    ((said, blobs),) = apart(SimpleNamespace(init=lambda server: 3), "init")
    assert (said["error"], blobs) == (
        ["ContractError", "SimpleNamespace.init returned a int; the state is a Record."],
        [],
    )

    def round(before, server, cohort):
        cohort.ask("update", {1: Kept(1)})

    ((said, _),) = apart(SimpleNamespace(round=round))
    assert said["error"] == ["ContractError", "cohort.ask was given a Kept; only a Down message is sent."]

    def gone(server):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        apart(SimpleNamespace(init=gone), "init")


@pytest.mark.parametrize("fork", [False, True])
def test_parties_are_served_until_the_connection_ends(monkeypatch, fork):
    """Without fork one is served, here. With fork this process goes on to the next one, and lets the party's go."""
    served, closed, said = [], [], [(b"c", [7], 0, None), (b"c", [8], 0, None), (b"", [], 0, None)]
    monkeypatch.setattr(isolated_worker.signal, "signal", lambda *of: None)
    monkeypatch.setattr(isolated_worker.socket, "recv_fds", lambda *of: said.pop(0))
    monkeypatch.setattr(
        isolated_worker.socket, "socket", lambda fileno: SimpleNamespace(n=fileno, close=lambda: closed.append(fileno))
    )
    monkeypatch.setattr(isolated_worker, "serve", lambda connection: served.append(connection.n))
    monkeypatch.setattr(isolated_worker.os, "fork", lambda: 1)
    isolated_worker._serve_all("control", fork)
    assert (served, closed, len(said)) == (([], [7, 8], 0) if fork else ([7], [], 2))


# --- what a fork serves -------------------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch):
    """Carry out `serve` over a connection by hand. Return what was sent, and what the fork did to its surroundings."""
    did = SimpleNamespace(served=[], worlds=[], tasks=[])
    at = SimpleNamespace(chdir=lambda folder: did.served.append(("folder", folder)))
    at.environ = {"HOME": "/home", "LEFT": "1"}
    monkeypatch.setattr(isolated_worker, "os", at)
    monkeypatch.setattr(isolated_worker, "sys", SimpleNamespace(path=["before"]))
    monkeypatch.setattr(isolated_worker, "Apart", lambda setting, facts, rows: (setting.seed, facts, sorted(rows)))
    monkeypatch.setattr(isolated_worker, "keep_world", lambda key, world: did.worlds.append((key, world)))

    def run_task(task):
        did.tasks.append(task)
        return Done(task.k, reply=b"done")

    monkeypatch.setattr(isolated_worker, "run_task", run_task)
    for name in ("_twins", "_server"):
        monkeypatch.setattr(
            isolated_worker, name, lambda file, world, said, blobs, name=name: did.served.append((name, world, blobs))
        )

    def carried_out(said, blobs):
        ours, theirs = socket.socketpair()
        with ours, theirs, ours.makefile("rwb") as file:
            setting = Setting.make(seed=9).model_dump_json()
            send(file, {"setting": setting, "facts": {"k": 3}, "folder": "/f", **said}, blobs)
            isolated_worker.serve(theirs)
            assert did.worlds == [(setting, (9, {"k": 3}, ["own 3"]))]
            return did, receive(file) if said["what"] == "task" else None

    return carried_out


RECORDS = encode_tree({"own 3": [torch.zeros(2, 1), torch.zeros(2)]})
PLAIN = {"fn": "update", "k": 3, "t": 2, "ask": 1, "attempt": 4, "followed": True}


TERMS = Terms("n", 4, 2.0, 3.0, True, ("key", 3), noise=None)


@pytest.mark.parametrize(("state", "terms"), [(b"", None), (b"state", TERMS)])
def test_a_fork_carries_out_the_task_of_an_isolated_client(forked, state, terms):
    plain = None if terms is None else dataclasses.asdict(terms)
    did, (said, blobs) = forked({"what": "task", "task": PLAIN, "terms": plain}, [b"message", state, b"noise", RECORDS])
    (task,) = did.tasks
    assert {name: getattr(task, name) for name in PLAIN} == PLAIN
    assert (task.message, task.state, task.noise, task.terms) == (b"message", state or None, b"noise", terms)
    assert (said["k"], said["blobs"], blobs) == (3, ["reply"], [b"done"])
    assert did.served == [("folder", "/f")]
    assert isolated_worker.os.environ == {"HOME": "/f", "LEFT": "1", "TMPDIR": "/f"}
    assert isolated_worker.sys.path == ["before"]


@pytest.mark.parametrize(("what", "served"), [("twin", "_twins"), ("round", "_server"), ("init", "_server")])
def test_a_twin_of_a_client_that_is_not_isolated_finds_its_surroundings(forked, what, served):
    said = {"what": what, "environment": {"ONLY": "2"}, "path": ["a", "b"]}
    did, _ = forked(said, [b"first", b"second", RECORDS])
    assert did.tasks == []
    assert did.served == [("folder", "/f"), (served, (9, {"k": 3}, ["own 3"]), [b"first", b"second"])]
    assert isolated_worker.os.environ == {"ONLY": "2"}
    assert isolated_worker.sys.path == ["a", "b"]


@pytest.fixture
def followed(monkeypatch):
    """Carry out `_twins` for some tasks. `answer` is called with each task and its gate, and returns its result."""

    def carried_out(frames, answer, mixed=lambda *of: []):
        world, frames = SimpleNamespace(device=torch.device("cpu"), said=[]), list(frames)
        world.take = lambda rows: world.said.append(("take", sorted(rows)))
        world.turn_to = lambda facts: world.said.append(("turn to", facts))
        sent = []

        def receive(file):
            if not frames:
                raise EOFError
            return frames.pop(0)

        monkeypatch.setattr(isolated_worker, "receive", receive)
        monkeypatch.setattr(isolated_worker, "send", lambda file, said, blobs: sent.append((said, blobs)))
        monkeypatch.setattr(isolated_worker, "run_task", answer)
        monkeypatch.setattr(isolated_worker, "_mixed", mixed)
        before = torch.get_default_dtype()
        try:
            isolated_worker._twins("file", world, *frames.pop(0))
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(before)
        return world.said, sent, frames

    return carried_out


def told(k, outputs=0, half=7):
    plain = {"fn": "update", "k": k, "t": 2, "ask": 1, "attempt": 0, "followed": True}
    return {"setting": "{}", "task": plain, "facts": {"k": k}, "dtype": "float64", "outputs": outputs, "half": half}


def output(what):
    return {}, [encode_tree({"what": what, "of": "int", "paid": False, "value": 5})]


def test_twins_take_what_their_clients_let_out(followed):
    """Three outputs, of which the first twin asks for one and the second for none. A third one asks for too many."""
    tasks = []

    def answer(task, gate):
        tasks.append(task)
        assert gate.followed
        if task.k == 3:
            assert gate.field("Reply.n", "record", 4, None) == (5, [])
        return Done(task.k, state=b"new", reply=b"reply")

    frames = [
        (told(3, 1), [b"m3", b"", RECORDS]), output("Reply.n"),
        (told(4, 2), [b"m4", b"state"]), output("Reply.n"), output("Reply.m"),
    ]  # fmt: skip
    asked = []

    def mixed(task, done, gate, half, world):
        asked.append((task.k, done.reply, gate.rows, half))
        return [("Reply.n", "mixed")]

    said, sent, left = followed(frames, answer, mixed)
    assert left == []
    assert said == [("take", ["own 3"]), ("turn to", {"k": 3}), ("turn to", {"k": 4})]
    assert [(t.k, t.message, t.state, t.watch, t.fn, t.t, t.ask) for t in tasks] == [
        (3, b"m3", None, True, "update", 2, 1), (4, b"m4", b"state", True, "update", 2, 1),
    ]  # fmt: skip
    assert asked == [(3, b"reply", [("Reply.n", 4)], 7)], "the other twin has no rows"
    assert [answer["differences"] for answer, _ in sent] == [
        [("Reply.n", "mixed")],
        [("Reply.n", "the client's mechanism let it out, and the twin did not ask for it")],
    ]
    assert [answer["k"] for answer, _ in sent] == [3, 4]
    assert [blobs for _, blobs in sent] == [[b"new", b"reply"]] * 2


@pytest.mark.parametrize(
    ("result", "differences"),
    [
        (Done(3, reply=b"reply", rows=[["a"]]), ["mixed"]),
        (Done(3, reply=b"reply"), []),
        (Done(3, error="ValueError", rows=[["a"]]), []),
    ],
)
def test_rows_are_looked_at_where_a_twin_answered(followed, result, differences):
    found = followed([(told(3), [b"m", b""])], lambda task, gate: result, lambda *of: [("x", "mixed")])
    assert [how for _, how in found[1][0][0]["differences"]] == differences


def test_a_twin_that_differs_already_is_not_looked_at_again(followed):
    def answer(task, gate):
        gate.differences.append(("x", "known"))
        return Done(3, reply=b"reply", rows=[["a"]])

    found = followed([(told(3), [b"m", b""])], answer, lambda *of: [("x", "mixed")])
    assert found[1][0][0]["differences"] == [("x", "known")]


def test_what_a_wrong_method_left_is_read_and_not_compared(followed):
    """The run ends: nothing is said of outputs that the twin did not come to."""
    wrong = Done(3, error="no", fatal=ContractError("no"))
    _, sent, left = followed([(told(3, 2), [b"m", b""]), output("a"), output("b")], lambda task, gate: wrong)
    assert left == []
    assert (sent[0][0]["differences"], sent[0][0]["fatal"]) == ([], ["ContractError", "no"])


@pytest.mark.parametrize("n", [0, 5])
def test_neighbours_of_a_twin_exchange_halves_and_one(monkeypatch, n):
    """Two halves that make up all records, then one record; without records there is no third."""
    swaps, asked = [], []

    def run_task(task, gate):
        swaps.append(task.swap)
        assert isinstance(gate, Neighbour)
        gate.rows.append(("R.x", len(swaps)))
        more = [["third"]] if len(swaps) == 1 else []  # a neighbour may come to one more
        return Done(task.k, rows=[[f"first {len(swaps)}"], [f"second {len(swaps)}"], *more])

    def mixed_rows(twin, others, exchanged):
        asked.append((twin, others, exchanged))
        return [("R.x", "how")]

    monkeypatch.setattr(isolated_worker, "run_task", run_task)
    monkeypatch.setattr(isolated_worker, "mixed_rows", mixed_rows)
    monkeypatch.setattr(
        isolated_worker,
        "mixed_means",
        lambda mine, others, exchanged: asked.append((mine, others)) or "second" in mine[0],
    )
    world = SimpleNamespace(device=torch.device("cpu"), count=lambda k: n if k == 3 else 99)
    gate = HandedOver(iter(()), world.device)
    gate.rows = [("R.x", 0)]
    task = Task("{}", "update", 3, 2, 1, None, b"")
    found = isolated_worker._mixed(task, Done(3, rows=[["first"], ["second"]]), gate, 13, world)
    count = 3 if n else 2
    assert swaps == [
        Swap(0, in_fit=False, half=13), Swap(0, in_fit=False, half=13, rest=True), Swap(0, in_fit=False, only=3),
    ][:count]  # fmt: skip
    (twin, others, exchanged), *means = asked
    assert (twin, others) == ([("R.x", 0)], [[("R.x", i + 1)] for i in range(count)])
    assert len(exchanged) == count
    assert exchanged[0] == int(drawn_half(n, 13, False).sum())
    assert exchanged[0] + exchanged[1] == n
    assert exchanged[2:] == [1] * (n > 0)
    assert means == [([of], [[f"{of} {i + 1}"] for i in range(count)]) for of in ("first", "second")]
    assert found == [
        ("R.x", "how"),
        ("update (class means)", "rows that were given to class_means are not of one record each"),
    ]


# --- results as frames --------------------------------------------------------------------------------------------


def whole():
    """A result in which every field differs from what it is by itself."""
    tape = Tape()
    tape.add({"what": "x"})
    return Done(
        3, b"state", b"reply", {"Reply.n": Protection(mechanism="gaussian", clip=1.0, sigma=2.0)},
        [LedgerEntry.unprotected("Reply.n", "count")], b"released", tape, [Span("client 3", 2, "task", 1.5)], 11, 12, 2,
        [["a", "b"]], True, True, "layout", 4, [["row"]], ["why"], "ValueError", "the whole text",
        fatal=SettingError("wrong"),
    )  # fmt: skip


def test_a_result_comes_back_as_it_was_sent():
    done = whole()
    said, blobs = isolated_worker.done_as_frame(done)
    assert said["blobs"] == ["state", "reply", "released", "tape"]
    back = isolated_worker.done_of((json.loads(json.dumps(said)), blobs), 3)
    for field in dataclasses.fields(Done):
        if field.name not in ("tape", "fatal"):
            assert getattr(back, field.name) == getattr(done, field.name), field.name
    assert back.tape.content() == done.tape.content() != b""
    assert (type(back.fatal), str(back.fatal)) == (SettingError, "wrong")
    said, blobs = isolated_worker.done_as_frame(Done(3))
    assert (said["blobs"], said["fatal"], blobs) == ([], None, [])
    assert isolated_worker.done_of((said, blobs), 3) == Done(3)


@pytest.mark.parametrize(
    "change",
    [{"k": 4}, {"blobs": ["state", "reply", "released"]}, {"blobs": ["state", "reply", "released", "secret"]},
     {"spans": [{"x": 1}]}, {"entries": 3}, {"protection": []}],
)  # fmt: skip
def test_a_result_that_is_none_is_a_loss(change):
    said, blobs = isolated_worker.done_as_frame(whole())
    found = isolated_worker.done_of(({**said, **change}, blobs), 3)
    assert (found.k, found.lost, found.reply) == (3, True, None)
    assert found.error.startswith("its process sent something that is not a result (")


def test_errors_that_travel_are_found_by_name():
    assert isolated_worker.error_as_text(DataError("a")) == ["DataError", "a"]
    name, text = isolated_worker.error_as_text(KeyError("x"))
    assert (name, text[:13]) == ("RunError", "KeyError: 'x'")
    for said, cls, text in (
        (["DataError", "a", "b"], DataError, "a b"), (["Setting", "a"], RunError, "a"),
        (["annotations", "a"], RunError, "a"), (["DeviceError", "a", "b"], RunError, "a b"),
        (["SettingError", "y" * 10_001], SettingError, "y" * 10_000),
    ):  # fmt: skip
        found = isolated_worker.error_of(said)
        assert type(found) is cls
        assert str(found) == text
    assert type(isolated_worker.error_of(["DeviceError", "a", "b", "c"])) is DeviceError
