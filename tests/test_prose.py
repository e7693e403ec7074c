"""How docstrings and errors read: a docstring opens with a subject or a verb, and an error does not say "is no"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("fedaudit", "methods", "attacks", "reports")
OPENINGS = re.compile(r"(What|Whether|Of|How|Where|As|Which)\b(?! (is|are)\b.*\?)")
IS_NO = re.compile(r"(?<![Tt]here )\b(is|are) no\b(?! longer)")  # "There is no file X." is plain
# A docstring that opens with one of these words all the same, and the reason.
EXCEPTIONS: dict[str, str] = {}


class Read(NamedTuple):
    """What is read of the sources. Their syntax trees are let go: a million nodes slow down every later test."""

    files: int
    docstrings: list[tuple[str, str]]  # where each stands, and its text
    errors: list[tuple[str, str]]  # where each is raised, and its words


@cache
def read() -> Read:
    files, docstrings, errors = 0, [], []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            files += 1
            name = path.relative_to(ROOT).as_posix()
            for node in statements(ast.parse(path.read_text())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    if text := ast.get_docstring(node):
                        docstrings.append((f"{name}:{getattr(node, 'name', '')}", text))
                elif isinstance(node, ast.Raise) and node.exc is not None:
                    errors.append((f"{name}:{node.lineno}", said(node.exc)))
    return Read(files, docstrings, errors)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a tree and all statements in it: docstrings and errors stand in no expression, and most nodes are those."""
    yield tree
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(tree, name, ()):
            yield from statements(inner)


def said(node: ast.AST) -> str:
    """Return the words of a string, with {} for what is put into it."""
    parts = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            parts.append(inner.value)
    return " ".join(parts)


def test_there_is_something_to_read():
    assert read().files > 200
    assert len(read().docstrings) > 1500
    assert len(read().errors) > 500


def test_docstrings_open_with_a_subject_or_a_verb():
    found = [
        f"{where}: {text.splitlines()[0]}"
        for where, text in read().docstrings
        if OPENINGS.match(text) and where not in EXCEPTIONS
    ]
    assert not found, f"{len(found)} docstrings:\n" + "\n".join(found)


def test_every_exception_is_still_one():
    assert EXCEPTIONS.keys() <= {where for where, text in read().docstrings if OPENINGS.match(text)}
    assert len(EXCEPTIONS) <= 10
    assert all(len(reason.split()) > 3 for reason in EXCEPTIONS.values())


def test_errors_say_what_a_thing_is_not():
    """ "is not a": "is no number" is read twice."""
    found = [f"{where}: {words[:100]}" for where, words in read().errors if IS_NO.search(words)]
    assert not found, f"{len(found)} errors:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "opens"),
    [("What it is.", True), ("Whether it is.", True), ("Of the last pass.", True), ("Return what it is.", False),
     ("Whatever comes, return it.", False), ("Often it is.", False)],
)  # fmt: skip
def test_which_openings_are_found(text: str, opens: bool):
    assert bool(OPENINGS.match(text)) is opens
