"""The tables of docs/results/random_edits.md, from the edits that are kept in drawn.json beside this file.

python benchmarks/studies/random_edits/random_edits_table.py          # prints the tables
python benchmarks/studies/random_edits/random_edits_table.py --write  # writes them into the page
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
NAMES = ("first", "second", "third", "fourth", "fifth")
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


def shares(edits: Edits) -> list[str]:
    """Return the share as drawn, that of edits which change something, and that of now."""
    seen = [one for one in edits if (one["before"], one["after"]) != ("survived", "equivalent")]
    before, of_seen = (share([one["before"] for one in of]) for of in (edits, seen))
    return [before, of_seen, share([one["after"] for one in edits])]


def strict(edits: Edits) -> Edits:
    """Return the edits of the rooms of which more is asked."""
    return [one for one in edits if room_of(one["edit"]) in STRICT]


def by_room(draw: dict[str, Any]) -> str:
    """Return a row for each room of a draw, one for the rooms of which more is asked, and one for all of them."""
    edits: Edits = draw["edits"]
    rooms = sorted({room_of(one["edit"]) for one in edits})
    groups = {room: [one for one in edits if room_of(one["edit"]) == room] for room in rooms}
    whole = {STRICT_NAME: strict(edits)} if draw.get("rooms") else {STRICT_NAME: strict(edits), "all": edits}
    first = "one of the four rooms" if draw.get("rooms") else "room"
    lines = [f"| {first} | as drawn | of those that change something | now |", "| --- | --- | --- | --- |"]
    for name, of in {**groups, **whole}.items():
        lines.append(f"| {name} | {' | '.join(shares(of))} |")
    return "\n".join(lines)


def by_draw(draws: Sequence[dict[str, Any]]) -> str:
    """Return a row for each draw: its seeds, how many edits there were to draw from, and its shares."""
    lines = ["| draw | seeds | from | as drawn | of those that change something | in the four rooms | now |"]
    lines.append("| --- | --- | --: | --- | --- | --- | --- |")
    for name, draw in zip(NAMES, draws, strict=True):
        before, seen, now = shares(draw["edits"])
        seeds = ", ".join(map(str, draw["seeds"]))
        four = shares(strict(draw["edits"]))[1]
        lines.append(f"| {name} | {seeds} | {draw['drawn_from']:,} | {before} | {seen} | {four} | {now} |")
    return "\n".join(lines)


def tables(draws: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tables of the page: the newest draw of the four rooms, the newest of all rooms, and all draws."""
    four, every = (next(draw for draw in reversed(draws) if bool(draw.get("rooms")) is some) for some in (True, False))
    return [by_room(four), by_room(every), by_draw(draws)]


if __name__ == "__main__":
    found = tables(kept())
    if "--write" in sys.argv:
        text = PAGE.read_text()
        for one in found:
            start = text.index(one.partition("\n")[0])
            text = text[:start] + one + text[text.index("\n\n", start) :]
        PAGE.write_text(text)
    else:
        print("\n\n".join(found))
