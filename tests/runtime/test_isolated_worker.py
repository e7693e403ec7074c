"""The process from which parties are forked: what it imports before, and what it says; and the frames it reads."""

from __future__ import annotations

import contextlib
import io
import sys
from types import SimpleNamespace

import pytest
import torch

from fedaudit import Down, Record, Up, public
from fedaudit.errors import ContractError, RunError, SettingError
from fedaudit.runtime import isolated_worker
from fedaudit.runtime.isolated_worker import Apart, receive, send
from fedaudit.setting import Setting
from fedaudit.wire.codec import decode, encode


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
