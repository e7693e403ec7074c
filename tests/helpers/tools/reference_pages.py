"""Make docs/reference/commands.md of the command line, and docs/reference/settings.md of a run's setting.

python tests/helpers/tools/reference_pages.py --write
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from fedaudit.cli.main import _command
from fedaudit.setting import Setting

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "reference"
MADE = "Made by `python tests/helpers/tools/reference_pages.py --write`; a test makes it again."


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def options(command: Any) -> list[str]:
    """Return a table of a command's arguments and options; nothing where it has none."""
    rows = []
    for one in command.params:
        if one.name in ("help", "install_completion", "show_completion") or getattr(one, "hidden", False):
            continue
        named = one.opts[0].startswith("-")
        name = " ".join(f"`{opt}`" for opt in (*one.opts, *one.secondary_opts)) if named else f"`{one.name.upper()}`"
        simple = isinstance(one.default, str | int | float) and not isinstance(one.default, bool)
        default = f"`{one.default}`" if simple and str(one.default) else ""
        rows.append(f"| {name} | {cell(one.help or '')} | {'required' if one.required else default} |")
    return ["| | | default |", "|---|---|---|", *rows, ""] if rows else []


def described(command: Any, way: str, depth: int) -> list[str]:
    """Return the section of a command, and those of the commands below it."""
    said = [" ".join(part.split()) for part in re.split(r"\n\s*\n", command.help or "")]
    lines = [f"{'#' * depth} {way}", "", *(line for part in said if part for line in (cell(part), ""))]
    lines += options(command)
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        if not inner.hidden:
            lines += described(inner, f"{way} {name}", depth + 1)
    return lines


def commands() -> str:
    head = ["# Commands", "", MADE, "`fedaudit COMMAND --help` says the same in the terminal.", ""]
    found = [
        line
        for name, inner in sorted(_command().commands.items())
        if not inner.hidden
        for line in described(inner, f"fedaudit {name}", 2)
    ]
    return "\n".join([*head, *found]).rstrip() + "\n"


def kind(annotation: Any) -> str:
    """Return in words what a key takes."""
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    inner = [one for one in get_args(annotation) if one is not type(None)]
    if inner and get_origin(annotation) not in (dict, list, tuple):
        return " or ".join(kind(one) for one in inner)
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
    return words.get(get_origin(annotation) or annotation, "a list")


def settings() -> str:
    rows = []
    for name, field in Setting.model_fields.items():
        default = field.default if field.default is not PydanticUndefined else field.default_factory()  # type: ignore
        shown = str(default).lower() if isinstance(default, bool) else default
        said = "" if default is None or default in ({}, [], ()) else f"`{shown}`"
        rows.append(f"| `{name}` | {kind(field.annotation)} | {said} | {cell(field.description or '')} |")
    head = [
        "# Settings of a run",
        "",
        MADE,
        "A key is `--key` on the command line (`_` becomes `-`), a key of `[base]`, `[grid]` or `[[methods]]` in a",
        "[suite](../guide/suites.md), and an argument of `fedaudit.run`. A method's own parameters go into `set`;",
        "`fedaudit list methods NAME` lists them.",
        "",
        "| key | takes | default | |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


PAGES = {"commands.md": commands, "settings.md": settings}


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"] or len(sys.argv) > 3:
        sys.exit(__doc__)
    for name, made in PAGES.items():
        (Path(sys.argv[2]) if sys.argv[2:] else FOLDER).joinpath(name).write_text(made())
