"""A worker whose audit was killed while it imports ends at once: it holds the folder's lock."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
