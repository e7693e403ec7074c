"""What is known of a method's declarations: whether the code that was tested is the code that runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedaudit import registry
from fedaudit.errors import RunError
from fedaudit.runtime.declarations import tested
from fedaudit.runtime.declarations.tested import (
    NAME,
    TestedMethod,
    chosen,
    declarations_of,
    file_of,
    key_of,
    read,
    write,
)


@pytest.mark.parametrize(
    ("source", "held", "verdict"),
    [
        ("as it is", True, "held"),
        ("as it is", False, "broken"),
        ("as it was", True, "another source"),
        ("as it was", False, "another source"),
        (None, True, "never"),
    ],
)
def test_a_verdict_is_of_one_source(source, held, verdict, monkeypatch):
    method = registry.find("fedavg").make({})
    entry = TestedMethod(source=source or "", held=held, fields={}, fedaudit="1.0", twin_sets=2)
    monkeypatch.setattr(tested, "source_of_method", lambda method: "as it is")
    monkeypatch.setattr(tested, "read", lambda path: {key_of(type(method)): entry} if source else {})
    found = declarations_of(method)
    assert (found.tested, found.source) == (verdict, "as it is")
    assert found.tested_source == source


def entry(**facts):
    return TestedMethod(**({"source": "s", "held": True, "fields": {"Local.w": "held"}, "fedaudit": "1.0"} | facts))


def test_an_entry_that_was_edited_does_not_count():
    sealed = entry(twin_sets=2).sealed()
    assert sealed.whole
    assert not entry(twin_sets=2).whole
    for change in ({"held": False}, {"source": "t"}, {"twin_sets": 3}, {"fields": {}}):
        assert not sealed.model_copy(update=change).whole
    old = entry().sealed()
    assert old.whole
    assert not old.model_copy(update={"twin_sets": 1}).whole


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two methods of one module of somebody's own, in a file."""
    module = ModuleType("somebodys_methods")
    module.__file__ = str(tmp_path / "somebodys_methods.py")
    monkeypatch.setitem(sys.modules, "somebodys_methods", module)
    return [type(name, (), {"__module__": "somebodys_methods"}) for name in ("A", "B")]


def test_verdicts_of_other_methods_in_the_folder_stay(two, tmp_path):
    a, b = two
    assert file_of(a) == tmp_path / NAME
    assert read(tmp_path / NAME) == {}
    write(b, entry(source="b"))
    write(a, entry(source="a"))
    write(a, entry(source="a2", held=False))
    found = read(tmp_path / NAME)
    assert {key: (one.source, one.held) for key, one in found.items()} == {
        "somebodys_methods:A": ("a2", False), "somebodys_methods:B": ("b", True),
    }  # fmt: skip
    text = (tmp_path / NAME).read_text()
    assert text.index("somebodys_methods:A") < text.index("somebodys_methods:B")
    (tmp_path / NAME).write_text(text.replace('"source": "b"', '"source": "c"'))
    assert sorted(read(tmp_path / NAME)) == ["somebodys_methods:A"], "the other one was edited"
    (tmp_path / NAME).write_text("{}")
    assert read(tmp_path / NAME) == {}


def test_code_that_lies_in_no_file_keeps_no_verdict():
    cls = type("C", (), {"__module__": "no_such_module"})
    assert file_of(cls) is None
    with pytest.raises(RunError, match="is not in a file"):
        write(cls, entry())


def test_our_own_methods_share_one_file_above_their_families():
    path = file_of(registry.find("fedavg"))
    assert path.name == NAME
    assert path.parent.name == "methods"
    assert path == file_of(registry.find("dffke"))
    assert isinstance(path, Path)


def test_which_methods_a_command_names(monkeypatch):
    states = {"a": "held", "b": "broken", "c": "another source"}
    monkeypatch.setattr(tested, "names", lambda kind: list(states))
    monkeypatch.setattr(tested, "find", lambda name: type("M", (), {"make": staticmethod(lambda given: name)}))
    monkeypatch.setattr(tested, "declarations_of", lambda name: type("D", (), {"tested": states[name]}))
    assert chosen(["all"]) == ["a", "b", "c"]
    assert chosen(["edited"]) == ["b", "c"]
    assert chosen(["c", "all"]) == ["c", "all"]
