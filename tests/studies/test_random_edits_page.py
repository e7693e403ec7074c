"""The figures of docs/results/random_edits.md, counted again from the kept edits."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pages import RESULTS, STUDIES, script
from scipy.stats import binomtest

DRAWS = json.loads((STUDIES / "random_edits" / "drawn.json").read_text())["draws"]
FIRST, SECOND, THIRD, FOURTH, FIFTH = DRAWS
TEXT = (RESULTS / "random_edits.md").read_text()
PROSE = " ".join(TEXT.split())
LINES = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("|")]
HEADS = [i for i, cells in enumerate(LINES) if cells[0] in ("one of the four rooms", "room", "draw")]
FOUR_ROOMS, ROWS, OF_DRAWS = (LINES[i + 2 : j] for i, j in zip(HEADS, [*HEADS[1:], None], strict=True))
FOUR = "privacy, epsilon, attack, wire"
STRICT = r"fedaudit/(privacy|epsilon|attack|wire)/.+\.py:"


def of_room(draw: dict[str, Any], room: str) -> list[dict[str, str]]:
    inner = r"[^/]+\.py" if room == "fedaudit" else r".+\.py"
    pattern = {"all": "", FOUR: STRICT}.get(room, rf"{room}/{inner}:")
    return [one for one in draw["edits"] if re.match(pattern, one["edit"])]


def counted(edits: list[dict[str, str]], when: str) -> str:
    """How many of the edits that count were noticed, with Wilson's interval by scipy."""
    killed, alive = (sum(one[when] == fate for one in edits) for fate in ("killed", "survived"))
    if not killed + alive:
        return "-"
    found = binomtest(killed, killed + alive).proportion_ci(method="wilson")
    return f"{killed} of {killed + alive}: {killed / (killed + alive):.0%} [{found.low:.0%}, {found.high:.0%}]"


def seen(edits: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those that change something, or were known before not to."""
    return [one for one in edits if not (one["before"] == "survived" and one["after"] == "equivalent")]


def three(edits: list[dict[str, str]]) -> list[str]:
    return [counted(edits, "before"), counted(seen(edits), "before"), counted(edits, "after")]


def test_the_tables_count_the_kept_edits() -> None:
    for made in script("random_edits_table").tables(DRAWS):
        assert made in TEXT, "python benchmarks/studies/random_edits/random_edits_table.py --write"
    assert len(ROWS) > 10
    assert [room for room, *_ in ROWS[-2:]] == [FOUR, "all"]
    assert sum(len(of_room(FOURTH, room)) for room, *_ in ROWS[:-2]) == len(of_room(FOURTH, "all"))
    for room, *cells in ROWS:
        assert cells == three(of_room(FOURTH, room)), room
    assert [room for room, *_ in FOUR_ROOMS] == [*sorted(FIFTH["rooms"]), FOUR]
    for room, *cells in FOUR_ROOMS:
        assert cells == three(of_room(FIFTH, room)), room
    assert sum(len(of_room(FIFTH, room)) for room in FIFTH["rooms"]) == len(FIFTH["edits"])
    for draw, (name, seeds, there, before, of_seen, four, now) in zip(DRAWS, OF_DRAWS, strict=True):
        assert seeds == ", ".join(map(str, draw["seeds"]))
        assert there == f"{draw['drawn_from']:,}"
        assert [before, of_seen, now] == three(draw["edits"]), name
        assert four == three(of_room(draw, FOUR))[1]


@pytest.mark.parametrize(
    ("draw", "seeds", "number"),
    [
        (FIRST, [21, 22, 23], 105),
        (SECOND, [31, 32, 33, 34], 105),
        (THIRD, [41, 42, 43], 105),
        (FOURTH, [51, 52, 53, 54], 101),
        (FIFTH, [61, 62], [150, 100]),
    ],
)
def test_what_is_kept_of_a_draw(draw: dict[str, Any], seeds: list[int], number: int | list[int]) -> None:
    edits = draw["edits"]
    assert draw["seeds"] == sorted({one["seed"] for one in edits}) == seeds
    assert draw["number"] == number
    asked = sum(number) if isinstance(number, list) else len(seeds) * number
    assert len(edits) + draw.get("flower", 0) + draw.get("missing", 0) == asked
    for one in edits:
        assert one["after"] in ("killed", "equivalent", "survived")
        assert one["before"] != "killed" or one["after"] == "killed"
        assert one["after"] != "killed" or one["before"] == "killed" or one["by"].startswith("tests/"), one["edit"]


def test_edits_that_are_left_out_or_have_no_test_are_told() -> None:
    left_out = [
        sum(one["before"] == "untried" and not one["edit"].startswith("fedaudit/flower/") for one in draw["edits"])
        for draw in DRAWS
    ]
    assert left_out[2] == 0
    assert f"They are {left_out[0]} of the first draw, {left_out[1]} of the second and {left_out[3]} of the" in PROSE
    assert left_out[3] == left_out[4] == 0
    without = [sum(one["after"] == "survived" for one in draw["edits"]) for draw in DRAWS]
    assert without[0] == without[4] == 0
    assert f"On {without[1]} edits of the second draw, {without[2]} of the third and {without[3]} of the" in PROSE
    of_flower = of_room(SECOND, "fedaudit/flower")
    assert not of_room(FIRST, "fedaudit/flower")
    assert {one["before"] for one in of_flower} == {"untried"}
    assert f"The {FIRST['flower']} of the first draw were not tried at all. The {len(of_flower)} of the second" in PROSE
    assert (SECOND["missing"], len(SECOND["edits"])) == (1, 419)
    nothing = [sum(one["after"] == "equivalent" for one in draw["edits"]) for draw in DRAWS]
    assert f"{sum(nothing)} of the edits of all draws change nothing" in PROSE


def test_the_goals_are_held_against_the_newest_draw() -> None:
    """90 % of all edits that change something, and 95 % in the four rooms, are what the page's verdict is about."""
    plain, of_seen, _ = three(FOURTH["edits"])
    four = three(of_room(FOURTH, FOUR))[1]
    rest = counted([one for one in seen(FOURTH["edits"]) if not re.match(STRICT, one["edit"])], "before")
    newest = three(FIFTH["edits"])
    words = [share.replace(": ", ", ") for share in (plain, of_seen, four, rest, *newest)]
    assert f"{words[0]} were noticed" in PROSE
    assert f"of those that change something {words[1]}, where the goal is 90 %" in PROSE
    assert f"it was {words[2]}, and outside of them {words[3]}" in PROSE
    assert f"{len(FIFTH['edits'])} edits, {words[4]} were noticed" in PROSE
    assert f"of those that change something {words[5]}, where the goal is 95 %" in PROSE
    killed, alive = (sum(one["before"] == fate for one in seen(FIFTH["edits"])) for fate in ("killed", "survived"))
    assert killed >= 0.95 * (killed + alive)
