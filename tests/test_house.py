"""The house: rooms import downwards only, and no two modules import each other in a circle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "fedaudit"
ROOMS = [
    "ground",
    "wire",
    "data",
    "training",
    "privacy",
    "runtime",
    "attack",
    "suite",
    "cli",
]  # from the ground upwards
DOORS = {"__init__", "__main__", "pytest_plugin"}  # where users come in: they may reach any room
OUTSIDE = {"methods", "attacks", "reports"}


def room_of(module: str) -> str:
    first = module.split(".")[0]
    return first if first in ROOMS else "ground"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(HOUSE.rglob("*.py")):
        parts = path.relative_to(HOUSE).with_suffix("").parts
        if parts[0] not in OUTSIDE and parts != ("__init__",):
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, *, typing: bool, deferred: bool = True) -> set[str]:
    """The modules of the house that a file imports. `typing`: also what only type checkers import; `deferred`: also
    inside functions."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    names = modules()
    found = set()
    for node in ast.walk(tree) if deferred else tree.body:
        if id(node) in for_types and not typing:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedaudit":
            base = ".".join((node.module or "").split(".")[1:])
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                found.add(inner if inner in names else base)
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("fedaudit.") for alias in node.names if alias.name.startswith("fedaudit.")
            }
    return {name for name in found if name}


def test_rooms_import_downwards_only():
    upwards = []
    for name, path in modules().items():
        if name.split(".")[-1] in DOORS or name in DOORS:
            continue
        for other in imports(path, typing=True):
            if other.split(".")[0] in OUTSIDE:
                assert room_of(name) == "cli", f"{name} imports {other}: only the command line may name reports"
            elif ROOMS.index(room_of(other)) > ROOMS.index(room_of(name)):
                upwards.append(f"{name} ({room_of(name)}) imports {other} ({room_of(other)})")
    assert not upwards, "\n".join(upwards)


@pytest.mark.parametrize("deferred", [False, True])
def test_no_circle(deferred):
    """Not even through imports that wait inside a function; what only a type checker reads is no circle."""
    graph = {name: imports(path, typing=False, deferred=deferred) for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name in done or name not in graph:
            return
        for other in sorted(graph[name]):
            if other != name:
                visit(other, [*way, name])
        done.add(name)

    for name in sorted(graph):
        visit(name, [])


def test_every_module_lives_in_a_room():
    ground = {"setting", "errors", "rng", "units", "stats", "kept", "watch", "registry", "_torchvision", *DOORS}
    flat = {name for name in modules() if "." not in name and name not in ROOMS}
    assert flat <= ground, f"{sorted(flat - ground)} belong into a room: see docs/architecture.md"


def test_tests_mirror_the_rooms():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(ROOMS) - {"ground"} <= folders
