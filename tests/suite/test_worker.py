"""A worker whose audit was killed while it imports ends at once: it holds the folder's lock. What cells share is done
once, before the fork."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from fedaudit.attack import pictures, shared_results
from fedaudit.runtime import code_digest, nursery
from fedaudit.suite import worker

CODE = """
import os, sys, time
from fedaudit.suite.worker import _ending_with
with _ending_with(0):
    print("importing", flush=True)
    time.sleep(float(sys.argv[1]))
import threading
print(threading.active_count(), os.read(0, 100).decode(), flush=True)
"""


@pytest.fixture
def importing():
    """A process that imports for so many seconds."""
    started = []

    def start(seconds: float) -> subprocess.Popen:
        words = [sys.executable, "-c", CODE, str(seconds)]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "importing\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_it_ends_with_its_audit_while_it_imports(importing):
    process = importing(600)
    process.stdin.close()
    assert process.wait(60) == 1


def test_what_was_asked_meanwhile_is_read_afterwards_and_nothing_watches_any_more(importing):
    process = importing(0.3)
    process.stdin.write("a cell")
    process.stdin.flush()
    assert process.stdout.readline() == "1 a cell\n"


def test_imports_are_watched(monkeypatch):
    """As `main` does them; what it serves comes after."""
    order = []

    class Watched:
        def __init__(self, requests):
            self.requests = requests

        def __enter__(self):
            order.append(f"watched {self.requests}")

        def __exit__(self, *error):
            order.append("free")

    monkeypatch.setattr(worker, "_ending_with", Watched)
    monkeypatch.setattr(worker, "prepare", lambda preload: order.append(f"imports {preload}") or "forks")
    monkeypatch.setattr(worker, "serve", lambda *how: order.append(f"serves {how[0]} {how[2]}"))
    for name in ("dup", "dup2", "_exit"):
        monkeypatch.setattr(worker.os, name, lambda *files: 7)
    monkeypatch.setattr(worker.signal, "signal", lambda *what: None)
    worker.main(["mine"])
    assert order == ["watched 0", "imports ['mine']", "free", "serves 0 forks"]


def test_what_cells_may_need_is_imported_where_it_is_installed(monkeypatch):
    monkeypatch.setattr(worker, "USUAL", ("no_such_module_of_anybody",))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    worker.prepare(["colorsys", "neither_is_this"])
    assert "colorsys" in sys.modules


def test_no_fork_looks_through_what_was_imported(monkeypatch):
    """Nothing is collected during the imports, nor is any of it looked at afterwards, whether they succeed or not."""
    order = []
    for name in ("disable", "freeze", "enable"):
        monkeypatch.setattr(worker.gc, name, lambda name=name: order.append(name))
    monkeypatch.setattr(worker, "_prepare", lambda preload: order.append(preload) or "forks")
    assert worker.prepare(["mine"]) == "forks"
    assert order == ["disable", ["mine"], "freeze", "enable"]
    monkeypatch.setattr(worker, "_prepare", lambda preload: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.prepare([])
    assert order[-1] == "enable"


def test_what_pictures_are_drawn_with_is_imported_before_the_fork():
    """Each cell that has a picture would take half a second for it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(pictures.draw)))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert len(modules) == 2
    assert set(modules) <= set(worker.USUAL)


def test_the_code_is_read_before_the_fork(monkeypatch):
    """A fork that found nothing read would take a second for it, in every cell."""
    code_digest.harness.cache_clear()
    monkeypatch.setattr(code_digest, "_parsed", {})
    monkeypatch.setattr(worker, "USUAL", ())
    worker.prepare([])
    read = code_digest.harness.cache_info().misses
    attack = worker.importlib.import_module("fedaudit.registry").find("loss", "attacks")
    parsed = set(code_digest._parsed)
    code_digest.harness()
    code_digest.source_of(attack)
    assert code_digest.harness.cache_info().misses == read == 2
    assert set(code_digest._parsed) == parsed != set()


class Waiting:
    """A process for twins that takes no time."""

    made: list[Waiting] = []  # noqa: RUF012 (shared, to be counted)
    spent = False

    def __init__(self, nurse, scratch):
        self.nurse, self.waited, self.closed = nurse, False, False
        self.made.append(self)

    def wait(self):
        self.waited = True

    def close(self):
        self.closed = True


@pytest.fixture
def served(monkeypatch):
    """What forks for cells of these settings say of the process for twins: number made, whether waited for, folder."""
    monkeypatch.setattr(Waiting, "made", [])
    monkeypatch.setattr(nursery, "ForkedNursery", Waiting)
    monkeypatch.setattr(nursery, "_nurseries", {})

    def work(request, requests, replies):
        found = nursery._nurseries.get(os.getpid())
        here = None if found is None else [len(Waiting.made), found[0].waited, found[1]]
        worker._say(replies, {"here": here})

    monkeypatch.setattr(worker, "_work", work)

    def serve(*settings):
        (asked, ask), (read, write) = os.pipe(), os.pipe()
        for setting in settings:
            os.write(ask, json.dumps({"cells": [{"setting": setting}]}).encode() + b"\n")
        os.close(ask)
        worker.serve(asked, write)
        os.close(write)
        with os.fdopen(read) as file:
            said = [json.loads(line) for line in file]
        os.close(asked)
        return [one["here"] for one in said if "here" in one]

    return serve


def test_cells_share_one_process_for_their_twins(served):
    protected = {"privacy": {"training": {}}, "twins": "all"}
    plain, summed = {"privacy": {}, "twins": "all"}, {"privacy": {"updates": {}}, "twins": "all"}
    first, *rest = served(plain, summed, protected, plain, protected)
    assert first is rest[0] is None
    assert rest[1] == rest[2] == rest[3]
    number, waited, scratch = rest[1]
    assert (number, waited) == (1, True)  # a fork would hear the word that it is ready, and no other after it
    assert [one.closed for one in Waiting.made] == [True]
    assert not os.path.exists(scratch)


def test_a_cell_is_told_where_results_are_shared(monkeypatch, tmp_path):
    monkeypatch.setattr(worker.threading, "Thread", lambda **how: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(shared_results, "_folder", None)
    for folder in (str(tmp_path), None):
        with pytest.raises(KeyError, match="setting"):  # no cell: it ends before it begins
            worker._work({"cells": [{}], "shared": folder}, 0, 1)
        assert shared_results._folder == (None if folder is None else tmp_path)


@pytest.mark.parametrize(("needs", "started"), [([], 0), ([False, False], 0), ([False, True], 1), ([True, True], 1)])
def test_twins_are_forked_early_if_one_cell_has_any(needs, started, monkeypatch):
    """The setting's privacy and its twins are looked at, cell by cell; a process that cannot be had is not missed."""
    begun, asked = [], []

    def waits():
        begun.append(1)
        raise OSError("no process")

    def is_needed(privacy, twins):
        asked.append((privacy, twins))
        return privacy

    monkeypatch.setattr(nursery, "is_needed", is_needed)
    monkeypatch.setattr(nursery, "nursery_of_twins", lambda nurse: SimpleNamespace(wait=waits))
    worker._start_nursery({"cells": [{"setting": {"privacy": need, "twins": i}} for i, need in enumerate(needs)]})
    assert len(begun) == started
    assert asked == [(need, i) for i, need in enumerate(needs)][: len(asked)]


@pytest.mark.parametrize("count", [1, 2])
def test_one_cell_is_carried_out_alone_and_several_as_one_stack(count, monkeypatch):
    """Progress is told once for each change, and the end of each cell with its number."""
    told, alone, stacks = [], [], []

    def carry_out(cell, watch):
        alone.append(cell)
        for step in ((1.0, 2.0, "a"), (1.0, 3.0, "a"), (2.0, 3.0, "a")):
            watch(*step)

    def carry_out_together(cells, watches):
        stacks.append(cells)
        for i, watch in enumerate(watches):
            watch(float(i), 1.0, "b")
        return cells

    monkeypatch.setattr("fedaudit.suite.cell.carry_out", carry_out)
    monkeypatch.setattr("fedaudit.suite.cell.carry_out_together", carry_out_together)
    monkeypatch.setattr(
        worker,
        "_cell",
        lambda of: SimpleNamespace(status=f"done {of}", reason="", crowded="memory" if of == 1 else None),
    )
    monkeypatch.setattr(worker, "_stop_with", lambda requests: None)
    monkeypatch.setattr(worker, "_say", lambda replies, message: told.append(message))
    worker._work({"cells": list(range(count))}, 0, 1)
    ends = [
        {"cell": i, "status": f"done {i}", "reason": "", "crowded": "memory" if i == 1 else None} for i in range(count)
    ]
    assert (len(alone), [len(cells) for cells in stacks]) == ((1, []) if count == 1 else (0, [2]))
    if count == 1:
        steps = [(1.0, 2.0, "a"), (2.0, 3.0, "a")]
        assert told == [*({"cell": 0, "t": t, "rounds": r, "what": w} for t, r, w in steps), *ends]
    else:
        assert told == [*({"cell": i, "t": float(i), "rounds": 1.0, "what": "b"} for i in (0, 1)), *ends]
