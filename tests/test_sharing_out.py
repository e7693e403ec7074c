"""What `make test` gives to which of its processes."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import pytest

pytest.importorskip("xdist", reason="the suite on two cores needs pytest-xdist")
from sharing_out import JOINED, SECONDS, TOGETHER, SharedOut, unit_of

ROOT = Path(__file__).parents[1]


def test_what_is_named_is_there():
    files = [file for these in TOGETHER.values() for file in these]
    assert len(set(files)) == len(files)
    assert [file for file in files if not (ROOT / file).exists()] == []
    units = {JOINED.get(thing, thing) for thing in TOGETHER}
    assert [unit for unit in SECONDS if unit not in units and not (ROOT / unit).is_file()] == []


def test_who_wants_the_same_gets_the_same_process():
    """Every file that starts Ray's pool or the nursery is among those that go together."""
    wants = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("tests/**/test_*.py")
        if re.search(r"^def test_\w+\(.*\b(ray_engine|quick|nursery_at)\b", path.read_text(), re.MULTILINE)
    }
    assert {unit_of(file) for file in wants} == {"ray"}
    assert unit_of("tests/flower/test_node_log.py") == unit_of("tests/flower/test_in_process_runtime.py") == "flower"
    assert unit_of("tests/test_docs.py") == "tests/test_docs.py"


@pytest.mark.parametrize(
    ("room", "names", "unit"), [("tests/verify", "honest|copy_of", "twins"), ("tests", "dffke_run", "dffke")]
)
def test_runs_that_are_only_read_are_made_in_one_process(room, names, unit):
    wants = {
        unit_of(path.relative_to(ROOT).as_posix())
        for path in ROOT.glob(f"{room}/**/test_*.py")
        if re.search(rf"^def \w+\(.*\b({names})\b", path.read_text(), re.MULTILINE)
    }
    assert wants == {unit}


class Node:
    def __init__(self):
        self.given = []

    def send_runtest_some(self, indices):
        self.given += indices


def test_the_longest_come_first():
    names = ["tests/a.py::x", "tests/test_readme.py::x", "tests/b.py::x", "tests/b.py::y", "tests/flower/c.py::x"]
    shared, node = object.__new__(SharedOut), Node()
    shared.assigned_work, shared.registered_collections, shared.workqueue = {}, {node: names}, OrderedDict()
    for name in names:
        shared.workqueue.setdefault(shared._split_scope(name), {})[name] = False
    while shared.workqueue:
        shared._assign_work_unit(node)
    assert [names[i] for i in node.given] == [names[i] for i in (1, 4, 2, 3, 0)]
