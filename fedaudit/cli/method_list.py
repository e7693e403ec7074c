"""Reads what methods and attacks there are from their files, without importing them: importing torch takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedaudit.cli.output import print_lines, wrapped
from fedaudit.registry import SHARED, Group


@dataclass(frozen=True)
class Listed:
    """A method or an attack of this package: its name, its family's title, and its class's docstring in one line."""

    name: str
    family: str
    summary: str

    @property
    def does(self) -> str:
        """Return the first sentence: what it does."""
        return self.summary.partition(". ")[0].rstrip(".")

    @property
    def sends(self) -> str:
        """Return the second sentence: what leaves a client. Empty if there is none."""
        return self.summary.partition(". ")[2].rstrip(".")


def listed(group: Group) -> list[Listed]:
    """Return all methods or attacks of this package, family by family."""
    folder = Path(__file__).parents[1] / group
    families = sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file() and path.name != SHARED)
    return [one for family in families for one in _of_family(family)]


def of_other_packages(group: Group) -> list[str]:
    """Return the names that other packages register as entry points. They are not imported."""
    from importlib.metadata import entry_points  # slow to import, and most commands list nothing

    return sorted(entry.name for entry in entry_points(group=f"fedaudit.{group}"))


def on_hosts(group: Group) -> dict[str, list[str]]:
    """Return the distillations that run on other methods, as in `fedavg+dfrd`: the hosts of each, by its name."""
    common: list[str] = []  # hosts of all that call `register_on_hosts`
    callers: list[str] = []
    found: dict[str, list[str]] = {}
    for path in sorted((Path(__file__).parents[1] / group).glob("*/*.py")):
        tree = ast.parse(path.read_text())
        names = [name for name, _ in _registered(tree)]
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and _called(node.target) == "HOSTS":
                hosts = sorted(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
                found |= dict.fromkeys(names, hosts)
                common = common if names else hosts
            if isinstance(node, ast.Expr) and _called(node.value) == "register_on_hosts":
                callers += names
    return {name: found.get(name, common) for name in sorted([*found, *callers])}


def print_by_family(group: Group) -> None:
    """Print each family's title, and below it what each method or attack does and what leaves a client."""
    rows = listed(group)
    width = max(len(one.name) for one in rows)
    for family in dict.fromkeys(one.family for one in rows):
        print(wrapped(family))
        for one in (one for one in rows if one.family == family):
            print_lines([(f"  {one.name}", one.does)], (width + 2,))
            if one.sends and group == "methods":
                print_lines([("", one.sends)], (width + 2,))
    parts = on_hosts(group)
    for hosts in dict.fromkeys(tuple(hosts) for hosts in parts.values()):
        names = [name for name, of in parts.items() if tuple(of) == hosts]
        print(wrapped(f"And HOST+NAME: {', '.join(names)} on {', '.join(hosts)}"))
    if others := of_other_packages(group):
        print(wrapped(f"Of other packages: {', '.join(others)}"))
    count = len(rows) + sum(map(len, parts.values())) + len(others)
    print(f"{count} {group}; for one in full: fedaudit list {group} NAME")


def _of_family(folder: Path) -> Iterator[Listed]:
    title = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or folder.name).splitlines()[0]
    for path in sorted(folder.glob("[a-z]*.py")):
        tree = ast.parse(path.read_text())
        for name, cls in _registered(tree):
            said = ast.get_docstring(cls) or ast.get_docstring(tree) or ""
            yield Listed(name, title, " ".join(said.split()))


def _registered(tree: ast.Module) -> Iterator[tuple[str, ast.ClassDef]]:
    for node in tree.body:
        for call in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            if isinstance(call, ast.Call) and _called(call) in ("register", "register_attack"):
                first = call.args[0]
                if isinstance(node, ast.ClassDef) and isinstance(first, ast.Constant):
                    yield str(first.value), node


def _called(node: ast.expr) -> str | None:
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else None
