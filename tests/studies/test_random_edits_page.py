"""The figures of docs/results/random_edits.md, counted again from the kept edits."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pages import RESULTS, STUDIES, script
from scipy.stats import binomtest

FIRST, SECOND, THIRD = DRAWS = json.loads((STUDIES / "random_edits" / "drawn.json").read_text())["draws"]
TEXT = (RESULTS / "random_edits.md").read_text()
PROSE = " ".join(TEXT.split())
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("|")][2:]
STRICT = r"fedaudit/(privacy|epsilon|attack|wire)/.+\.py:"


def of_room(draw: dict[str, Any], room: str) -> list[dict[str, str]]:
    inner = r"[^/]+\.py" if room == "fedaudit" else r".+\.py"
    pattern = {"all": "", "privacy, epsilon, attack, wire": STRICT}.get(room, rf"{room}/{inner}:")
    return [one for one in draw["edits"] if re.match(pattern, one["edit"])]


def counted(edits: list[dict[str, str]], when: str) -> str:
    """How many of the edits that count were noticed, with Wilson's interval by scipy."""
    killed, alive = (sum(one[when] == fate for one in edits) for fate in ("killed", "survived"))
    if not killed + alive:
        return "-"
    found = binomtest(killed, killed + alive).proportion_ci(method="wilson")
    return f"{killed} of {killed + alive}: {killed / (killed + alive):.0%} [{found.low:.0%}, {found.high:.0%}]"


def test_the_table_counts_the_kept_edits() -> None:
    assert script("random_edits_table").table(DRAWS) in TEXT
    assert len(ROWS) > 10
    assert [room for room, *_ in ROWS[-2:]] == ["privacy, epsilon, attack, wire", "all"]
    for draw in DRAWS:
        assert sum(len(of_room(draw, room)) for room, *_ in ROWS[:-2]) == len(of_room(draw, "all"))
    for room, *cells in ROWS:
        each = [of_room(draw, room) for draw in DRAWS]
        assert cells[:6] == [counted(edits, when) for edits in each for when in ("before", "after")], room
        assert cells[6] == str(sum(one["after"] == "equivalent" for edits in each for one in edits))


@pytest.mark.parametrize(("draw", "seeds"), [(FIRST, [21, 22, 23]), (SECOND, [31, 32, 33, 34]), (THIRD, [41, 42, 43])])
def test_what_the_page_says_of_a_draw(draw: dict[str, Any], seeds: list[int]) -> None:
    edits = draw["edits"]
    assert draw["seeds"] == sorted({one["seed"] for one in edits}) == seeds
    assert f"(seeds {', '.join(map(str, seeds[:-1]))} and {seeds[-1]})" in PROSE
    assert draw["number"] == 105
    assert f"from {draw['drawn_from']:,}" in PROSE
    assert len(edits) + draw.get("flower", 0) + draw.get("missing", 0) == len(seeds) * draw["number"]
    for one in edits:
        assert one["after"] in ("killed", "equivalent", "survived")
        assert one["before"] != "killed" or one["after"] == "killed"
        assert one["after"] != "killed" or one["before"] == "killed" or one["by"].startswith("tests/"), one["edit"]


def test_edits_that_are_left_out_or_have_no_test_are_told() -> None:
    left_out = [
        sum(one["before"] == "untried" and not one["edit"].startswith("fedaudit/flower/") for one in draw["edits"])
        for draw in (FIRST, SECOND)
    ]
    assert f"They are {left_out[0]} of the first draw and {left_out[1]} of the second." in PROSE
    assert not [one for one in FIRST["edits"] if one["after"] == "survived"]
    without = [sum(one["after"] == "survived" for one in draw["edits"]) for draw in (SECOND, THIRD)]
    assert f"On {without[0]} edits of the second draw and {without[1]} of the third no test was seen" in PROSE
    assert not [one for one in THIRD["edits"] if one["before"] == "untried"], "none is left out"
    of_flower = of_room(SECOND, "fedaudit/flower")
    assert not of_room(FIRST, "fedaudit/flower")
    assert {one["before"] for one in of_flower} == {"untried"}
    assert f"The {FIRST['flower']} of the first draw were not tried at all. The {len(of_flower)} of the second" in PROSE
    assert (SECOND["missing"], len(SECOND["edits"])) == (1, 419)


def seen(edits: list[dict[str, str]]) -> list[dict[str, str]]:
    """Those that change something, or were known before not to."""
    return [one for one in edits if (one["before"], one["after"]) != ("survived", "equivalent")]


FOUR = "privacy, epsilon, attack, wire"


def test_the_fresh_shares() -> None:
    """As drawn, and without edits that were marked afterwards; the goal is met in the four rooms of the third draw."""
    plain = [[counted(of_room(draw, room), "before").replace(": ", ", ") for draw in DRAWS] for room in ("all", FOUR)]
    first, second, third = plain[0]
    assert f"Of the first draw {first} were noticed, of the second one {second}, and of the third one {third}." in PROSE
    first, second, third = plain[1]
    assert f"{first} of the first draw were noticed, {second} of the second, and {third} of the third." in PROSE
    told = [
        [counted(seen(of_room(draw, room)), "before").replace(": ", ", ") for draw in DRAWS] for room in ("all", FOUR)
    ]
    first, second, third = told[0]
    assert f"are {first}, {second} and {third}, where the goal is 90 %" in PROSE
    first, second, third = told[1]
    assert f"they are {first}, {second} and {third}, where the goal is 95 %" in PROSE
    shares = [[int(re.findall(r"(\d+)%", share)[0]) for share in row] for row in told]
    assert max(shares[0]) < 90 <= shares[0][2] + 1, "near it"
    assert max(shares[1][:2]) < 95 <= shares[1][2]
    rest = [one for one in seen(THIRD["edits"]) if not re.match(STRICT, one["edit"])]
    assert f"{counted(rest, 'before').replace(': ', ', ')} outside of them" in PROSE
