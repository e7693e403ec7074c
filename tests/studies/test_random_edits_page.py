"""The figures of docs/results/random_edits.md, counted again from the kept edits."""

from __future__ import annotations

import json
import re

from pages import RESULTS, STUDIES, script
from scipy.stats import binomtest

KEPT = json.loads((STUDIES / "random_edits" / "drawn.json").read_text())
TEXT = (RESULTS / "random_edits.md").read_text()
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("|")][2:]


def of_room(room: str) -> list[dict[str, str]]:
    if room == "all":
        return KEPT["edits"]
    inner = r"[^/]+\.py" if room == "fedaudit" else r".+\.py"
    return [one for one in KEPT["edits"] if re.match(rf"{room}/{inner}:", one["edit"])]


def test_the_table_counts_the_kept_edits() -> None:
    assert script("random_edits_table").table(KEPT["edits"]) in TEXT
    assert len(ROWS) > 10
    assert sum(len(of_room(room)) for room, *_ in ROWS[:-1]) == len(of_room(ROWS[-1][0])) == len(KEPT["edits"])
    for room, *cells in ROWS:
        edits = of_room(room)
        for when, (count, share) in zip(("before", "after"), (cells[:2], cells[2:4]), strict=True):
            killed, alive = (sum(one[when] == fate for one in edits) for fate in ("killed", "survived"))
            assert count == f"{killed} of {killed + alive}", room
            if killed + alive:
                found = binomtest(killed, killed + alive).proportion_ci(method="wilson")
                assert share == f"{killed / (killed + alive):.0%} [{found.low:.0%}, {found.high:.0%}]", room
        assert cells[4] == str(sum(one["after"] == "equivalent" for one in edits))


def test_what_the_page_says_of_the_draw() -> None:
    edits = KEPT["edits"]
    seeds, number = KEPT["seeds"], KEPT["number"]
    assert seeds == [21, 22, 23]
    assert f"of {number} edits each, from {KEPT['drawn_from']:,} that there are" in TEXT
    assert len(edits) + KEPT["flower"] == len(seeds) * number
    assert f"{KEPT['flower']} of the {len(seeds) * number}) were not tried" in TEXT
    assert f"{sum(one['before'] == 'untried' for one in edits)} edits are left out there" in TEXT
    assert not [one for one in edits if one["edit"].startswith("fedaudit/flower/")]
    for one in edits:
        assert one["after"] in ("killed", "equivalent")
        assert one["before"] != "killed" or one["after"] == "killed"
        assert one["after"] == "equivalent" or one["before"] == "killed" or one["by"].startswith("tests/"), one["edit"]
