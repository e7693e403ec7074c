"""The table of docs/results/random_edits.md, from the edits that are kept in drawn.json beside this file.

python benchmarks/studies/random_edits/random_edits_table.py          # prints the table
python benchmarks/studies/random_edits/random_edits_table.py --write  # writes it into the page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fedaudit.stats import wilson

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "results" / "random_edits.md"
HEAD = "| room | noticed as drawn | share, 95 % interval | noticed now | share, 95 % interval | changes nothing |"
RULE = "| --- | --: | --- | --: | --- | --: |"


def kept() -> list[dict[str, str]]:
    """Return the edits: what each is, and what became of it as it was drawn (`before`) and now (`after`)."""
    return list(json.loads((HERE / "drawn.json").read_text())["edits"])


def room_of(edit: str) -> str:
    """Return the folder of the edited file: a room of fedaudit/, or methods, or attacks."""
    parts = Path(edit.partition(":")[0]).parts
    return "/".join(parts[:2]) if parts[0] == "fedaudit" and len(parts) > 2 else parts[0]


def share(fates: Sequence[str]) -> tuple[str, str]:
    """Return how many of the edits that count were killed, and the share with Wilson's interval."""
    n = sum(fate in ("killed", "survived") for fate in fates)
    killed = sum(fate == "killed" for fate in fates)
    if not n:
        return "0 of 0", "-"
    low, high = wilson(killed, n)
    return f"{killed} of {n}", f"{killed / n:.0%} [{low:.0%}, {high:.0%}]"


def table(edits: Sequence[dict[str, str]]) -> str:
    """Return a row for each room, and one for all of them."""
    rooms = sorted({room_of(one["edit"]) for one in edits})
    lines = [HEAD, RULE]
    for room in [*rooms, "all"]:
        mine = [one for one in edits if room in (room_of(one["edit"]), "all")]
        cells = [*share([one["before"] for one in mine]), *share([one["after"] for one in mine])]
        lines.append(f"| {room} | {' | '.join(cells)} | {sum(one['after'] == 'equivalent' for one in mine)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    found = table(kept())
    if "--write" in sys.argv:
        text = PAGE.read_text()
        start = text.index(HEAD)
        end = text.index("\n\n", start)
        PAGE.write_text(text[:start] + found + text[end:])
    else:
        print(found)
