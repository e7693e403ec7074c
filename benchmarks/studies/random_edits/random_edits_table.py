"""The table of docs/results/random_edits.md, from the edits that are kept in drawn.json beside this file.

python benchmarks/studies/random_edits/random_edits_table.py          # prints the table
python benchmarks/studies/random_edits/random_edits_table.py --write  # writes it into the page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedaudit.stats import wilson

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "results" / "random_edits.md"
NAMES = ("first", "second", "third")
HEAD = f"| room | {' | '.join(f'{name} draw, as drawn | {name} draw, now' for name in NAMES)} | change nothing |"
RULE = f"| --- |{' --- |' * 2 * len(NAMES)} --: |"
# A mistake in these rooms makes a promise of privacy wrong, so that more is asked of their tests.
STRICT = ("fedaudit/privacy", "fedaudit/epsilon", "fedaudit/attack", "fedaudit/wire")
STRICT_NAME = "privacy, epsilon, attack, wire"

Edits = Sequence[dict[str, Any]]


def kept() -> list[dict[str, Any]]:
    """Return the draws, each with its edits: what each is, and what became of it as drawn (`before`) and now."""
    return list(json.loads((HERE / "drawn.json").read_text())["draws"])


def room_of(edit: str) -> str:
    """Return the folder of the edited file: a room of fedaudit/, or methods, or attacks."""
    parts = Path(edit.partition(":")[0]).parts
    return "/".join(parts[:2]) if parts[0] == "fedaudit" and len(parts) > 2 else parts[0]


def share(fates: Sequence[str]) -> str:
    """Return how many of the edits that count were killed, and the share with Wilson's interval."""
    n = sum(fate in ("killed", "survived") for fate in fates)
    killed = sum(fate == "killed" for fate in fates)
    if not n:
        return "-"
    low, high = wilson(killed, n)
    return f"{killed} of {n}: {killed / n:.0%} [{low:.0%}, {high:.0%}]"


def row(name: str, draws: Sequence[Edits]) -> str:
    """Return a row of the table: every draw, as drawn and now."""
    cells = [share([one[when] for one in edits]) for edits in draws for when in ("before", "after")]
    nothing = sum(one["after"] == "equivalent" for edits in draws for one in edits)
    return f"| {name} | {' | '.join(cells)} | {nothing} |"


def table(draws: Sequence[dict[str, Any]]) -> str:
    """Return a row for each room, one for the rooms of which more is asked, and one for all of them."""
    edits: list[Edits] = [draw["edits"] for draw in draws]
    rooms = sorted({room_of(one["edit"]) for of_draw in edits for one in of_draw})
    lines = [HEAD, RULE]
    for room in rooms:
        lines.append(row(room, [[one for one in of_draw if room_of(one["edit"]) == room] for of_draw in edits]))
    strict = [[one for one in of_draw if room_of(one["edit"]) in STRICT] for of_draw in edits]
    return "\n".join([*lines, row(STRICT_NAME, strict), row("all", edits)])


if __name__ == "__main__":
    found = table(kept())
    if "--write" in sys.argv:
        text = PAGE.read_text()
        start = text.index("| room |")
        end = text.index("\n\n", start)
        PAGE.write_text(text[:start] + found + text[end:])
    else:
        print(found)
