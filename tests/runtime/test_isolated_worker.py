"""The process from which parties are forked: what it imports before, and what it says; and the frames it reads."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from fedaudit.errors import ContractError, RunError, SettingError
from fedaudit.runtime import isolated_worker
from fedaudit.runtime.isolated_worker import Apart, receive, send
from fedaudit.setting import Setting


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
