"""The time left of an audit: small cases by hand, and logs of whole audits replayed."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept_log import read, replay

from fedaudit.setting import Setting
from fedaudit.suite.cell import Cell, stage_of
from fedaudit.suite.forecast import novelty_first, work_of
from fedaudit.suite.time_left import TimeLeft, Work

LOGS = sorted((Path(__file__).parent / "kept_logs").glob("*.jsonl"))
FROM = 0.2  # of the way: from there on an estimate is judged
END_S, END_SHARE = 10.0, 0.05  # the very end, in seconds or of the whole: there the difference is judged, and may be so


def work(name: str, row: str = "row", method: str = "m", behind: float = 0.0, **units: float) -> Work:
    return Work((name, row, method, "any"), units, behind)  # type: ignore[arg-type]


def carried_out(left: TimeLeft, cell: str, at: float, rounds: float, attacks: float) -> float:
    """A cell that takes so many seconds for its rounds and its attacks; returns when it is through."""
    left.begun(cell, at)
    left.progress(cell, "rounds", 0.0, at)
    left.progress(cell, "rounds", 1.0, at + rounds)
    left.progress(cell, "attacks", 0.0, at + rounds)
    left.finished(cell, at + rounds + attacks)
    return at + rounds + attacks


# --- by hand ---------------------------------------------------------------------------------------------------


def test_nothing_is_said_before_there_is_ground():
    """Rounds were measured, but how long attacks take nobody knows until a cell is through with them."""
    left = TimeLeft(1)
    left.add("a", work("a", rounds=2, attacks=3))
    left.add("b", work("b", rounds=2, attacks=3))
    assert left.left(0.0) is None
    left.begun("a", 0.0)
    left.progress("a", "rounds", 0.0, 1.0)
    left.progress("a", "rounds", 1.0, 5.0)
    assert left.left(5.0) is None
    left.progress("a", "attacks", 0.0, 5.0)
    assert left.left(8.0) is None
    left.finished("a", 11.0)
    assert left.left(11.0) == pytest.approx(4 + 6), "b as a: 2 units of rounds in 4 s, 3 of attacks in 6 s"


def test_a_cell_without_attacks_needs_no_more_than_a_round():
    """One of four rounds took 2 s: 6 s are left of this cell, and 8 s of the other."""
    left = TimeLeft(1)
    left.add("a", work("a", rounds=4))
    left.add("b", work("b", rounds=4))
    left.begun("a", 0.0)
    left.progress("a", "rounds", 0.0, 1.0)
    left.progress("a", "rounds", 0.25, 3.0)
    assert left.left(3.0) == pytest.approx(6 + 8)
    assert left.left(4.0) == pytest.approx(5 + 8), "a second later a second less"


def test_a_cell_that_is_put_back_counts_whole_and_comes_first():
    """A round takes 2 s. The cell that was put back after one of its rounds has four again, as the other has."""
    left = TimeLeft(1)
    for name in ("a", "b"):
        left.add(name, work(name, rounds=4))
    left.begun("a", 0.0)
    left.progress("a", "rounds", 0.0, 1.0)
    left.progress("a", "rounds", 0.25, 3.0)
    left.put_back("a")
    assert left.left(3.0) == pytest.approx(16)
    assert list(left._waiting) == ["a", "b"]
    left.begun("a", 3.0)


def test_units_scale_what_was_measured():
    """Another method with three times the rounds: at the rate of the one that was measured, 3 x 4 s."""
    left = TimeLeft(1)
    left.add("a", work("a", rounds=2, attacks=1))
    left.add("b", work("b", row="other", method="other", rounds=6, attacks=1))
    carried_out(left, "a", 0.0, 4.0, 1.0)
    assert left.left(5.0) == pytest.approx(12 + 1)


def test_nothing_is_said_while_most_of_it_is_guessed():
    """One cell was measured, and of what waits more than half is of other methods; then another method was, too."""
    left = TimeLeft(1)
    for name, method in (("a", "m"), ("b", "m"), ("c", "n"), ("d", "n"), ("e", "o")):
        left.add(name, Work((name, f"row {method}", method, "any"), {"rounds": 1.0}, near=3))
    left.begun("a", 0.0)
    left.progress("a", "rounds", 0.0, 0.0)
    left.progress("a", "rounds", 1.0, 2.0)
    left.finished("a", 2.0)
    assert left.left(2.0) is None
    left.begun("c", 2.0)
    left.progress("c", "rounds", 0.0, 2.0)
    left.progress("c", "rounds", 0.5, 4.0)
    assert left.left(4.0) == pytest.approx(2 + 2 + 4 + 4 / 1.5), "e at the mean: 1.5 units took 4 s"


def test_the_nearest_that_was_measured_counts():
    """A row of its own at 10 s a cell, another method at 2: a cell of the row is taken for 10, not for the mean."""
    left = TimeLeft(1)
    for name, row in (("a", "slow"), ("b", "fast"), ("c", "slow"), ("d", "fast")):
        left.add(name, work(name, row=row, method=row, rounds=1, attacks=1))
    at = carried_out(left, "a", 0.0, 8.0, 2.0)
    at = carried_out(left, "b", at, 1.0, 1.0)
    assert left.left(at) == pytest.approx(10 + 2)
    left.finished("c", at, "failed")
    assert left.left(at) == pytest.approx(2)


def test_jobs_are_dealt_out_in_order():
    """Three cells of 10, 2 and 2 s on two jobs take 10 s, in the order 2, 2, 10 they take 12."""
    for order, wanted in (("abb", 10.0), ("bba", 12.0)):
        left = TimeLeft(2)
        for kind, seconds in (("a", 10.0), ("b", 2.0)):
            left.measured((kind,), "rounds", seconds, 1.0, before=False)
        for i, kind in enumerate(order):
            left.add(f"{i}", Work((f"{i}", kind), {"rounds": 1.0}))
        assert left.left(0.0) == pytest.approx(wanted)


def test_claims_count_as_long_as_the_rounds_until_some_were_measured():
    left = TimeLeft(1)
    left.add("a", work("a", rounds=1, claims=1))
    left.add("b", work("b", rounds=1, claims=1))
    left.begun("a", 0.0)
    left.progress("a", "rounds", 0.0, 0.0)
    left.progress("a", "rounds", 1.0, 3.0)
    assert left.left(3.0) == pytest.approx(3 + 6, rel=0.06), "the claims of a, and b"
    left.progress("a", "claims", 0.0, 3.0)
    left.finished("a", 23.0)
    assert left.left(23.0) == pytest.approx(3 + 20)


def test_what_is_late_counts_for_those_like_it():
    """Claims that should take 3 s have taken 23: half of what they are late is to come, in the next as well."""
    left = TimeLeft(1)
    left.add("a", work("a", rounds=1, claims=1))
    left.add("b", work("b", rounds=1, claims=1))
    left.begun("a", 0.0)
    left.progress("a", "rounds", 0.0, 0.0)
    left.progress("a", "rounds", 1.0, 3.0)
    left.progress("a", "claims", 0.0, 3.0)
    rest = 0.05 * 3 + 0.5 * 20
    assert left.left(26.0) == pytest.approx(rest + 3 + 23 + rest), "b: 3 s of rounds, and claims as long as those of a"


def test_the_first_starts_tell_nothing():
    """A process that is started imports everything, for 20 s; the cells after it begin at once."""
    left = TimeLeft(1)
    for name in "abc":
        left.add(name, work(name, start=1, rounds=1))
    left.begun("a", 0.0)
    left.progress("a", "rounds", 0.0, 20.0)
    left.progress("a", "rounds", 1.0, 22.0)
    left.finished("a", 22.0)
    assert left.left(22.0) == pytest.approx(2 * 2)
    left.begun("b", 22.0)
    left.progress("b", "rounds", 0.0, 23.0)
    assert left.left(23.0) == pytest.approx(2 + 1 + 2), "from here on a start is taken for 1 s"


def test_what_is_refused_takes_its_row_along_and_what_was_done_before_counts_no_more():
    left = TimeLeft(1, report=1.0)
    left.measured(("any",), "rounds", 8.0, 1.0, before=True)
    for name, row, behind in (("a", "no", 0.0), ("b", "no", 0.0), ("c", "yes", 0.75)):
        left.add(name, work(name, row=row, rounds=1, behind=behind))
    assert left.left(0.0) == pytest.approx(8 + 8 + 2 + 3), "no start was measured: 3 s"
    left.begun("a", 0.0)
    left.finished("a", 0.5, "refused")
    assert left.left(0.5) == pytest.approx(2 + 3)


def test_this_audit_counts_before_an_earlier_one():
    left = TimeLeft(1)
    left.measured(("row", "any"), "rounds", 100.0, 1.0, before=True)
    left.add("a", Work(("a", "row", "any"), {"rounds": 1.0}))
    assert left.left(0.0) == pytest.approx(100.0)
    left.measured(("row", "any"), "rounds", 4.0, 1.0, before=False)
    assert left.left(0.0) == pytest.approx(4.0)


def test_the_report_comes_last():
    """Half a start of a process, which took 8 s: 4 s."""
    left = TimeLeft(1, report=0.5)
    left.add("a", work("a", start=1, rounds=1))
    left.begun("a", 0.0)
    left.progress("a", "rounds", 0.0, 8.0)
    left.progress("a", "rounds", 0.5, 9.0)
    assert left.left(9.0) == pytest.approx(1 + 4)
    left.finished("a", 10.0)
    left.reporting(10.0)
    assert left.left(11.0) == pytest.approx(3.0)
    assert left.left(20.0) == pytest.approx(0.05 * 4 + 0.5 * 6), "late"


def test_where_only_ends_are_seen_the_rest_takes_as_long_as_the_same_amount_took():
    left = TimeLeft(None)
    for name, rounds in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        left.add(name, work(name, rounds=rounds))
    assert left.left(100.0) is None
    left.finished("a", 110.0)
    assert left.left(110.0) == pytest.approx(30.0), "a quarter took 10 s"


def test_two_jobs_and_all_stages_by_hand():
    """Cells of two rows, one with a start and claims, one without. 40 % of the third's rounds are made already."""
    left = TimeLeft(2, report=0.5)
    for stage, seconds, units in (
        ("start", 6.0, 3.0),
        ("rounds", 30.0, 10.0),
        ("attacks", 8.0, 4.0),
        ("claims", 5.0, 1.0),
    ):
        left.measured(("r", "m", "any"), stage, seconds, units, before=True)
    left.measured(("s", "n"), "rounds", 14.0, 2.0, before=True)
    left.measured(("s", "n"), "attacks", 1.0, 2.0, before=True)
    whole = {"start": 1.0, "rounds": 10.0, "attacks": 4.0, "claims": 1.0}
    left.add("a", work("a", "r", "m", **whole))
    left.add("b", work("b", "s", "n", rounds=2.0, attacks=2.0))
    left.add("c", work("c", "r", "m", behind=0.4, **whole))
    a, b, c = 2 + 30 + 8 + 5, 14 + 1, 2 + 18 + 8 + 5
    assert left.left(0.0) == pytest.approx(max(a, b + c) + 0.5 * 3)
    left.begun("a", 0.0)
    left.begun("b", 0.0)
    left.progress("a", "rounds", 0.0, 4.0)
    left.progress("b", "rounds", 0.0, 10.0)
    left.progress("a", "rounds", 0.2, 14.0)  # 10 s for two units: 5 s each
    left.progress("b", "rounds", 0.5, 16.0)  # 6 s for one
    a, b, c = (40 - 2) + 8 + 5, 6 + 1, 2 + 0.6 * 50 + 8 + 5
    assert left.left(16.0) == pytest.approx(max(a, b + c) + 0.5 * (4 + 10) / 2), "the first starts took 7 s on average"
    left.progress("a", "attacks", 0.0, 54.0)  # eight units took 40 s, without a report in between
    left.progress("b", "rounds", 0.5, 50.0)  # nothing new
    a, b, c = 8 - 2 + 5, (0.05 * 6 + 0.5 * (40 - 6)) + 1, 2 + 0.6 * 250 + 8 + 5
    assert left.left(56.0) == pytest.approx(max(a + c, b) + 3.5), "50 s for two units, as far as they were told"


def test_starts_count_after_the_first_of_each_job():
    """Two jobs: the third start is measured, the first two go into the time of the report."""
    left = TimeLeft(2, report=1.0)
    for name in "abcd":
        left.add(name, work(name, start=1, rounds=1))
    for name, at, start in (("a", 0.0, 5.0), ("b", 0.0, 9.0), ("c", 20.0, 2.0)):
        left.begun(name, at)
        left.progress(name, "rounds", 0.0, at + start)
        left.progress(name, "rounds", 1.0, at + start + 1)
        left.finished(name, at + start + 1)
    assert left.left(23.0) == pytest.approx(2 + 1 + 7)


def test_first_starts_are_timed_from_when_they_began():
    left = TimeLeft(1, report=1.0)
    left.add("a", work("a", start=1, rounds=1))
    left.begun("a", 1000.0)
    left.progress("a", "rounds", 0.0, 1008.0)
    left.progress("a", "rounds", 0.5, 1009.0)
    left.progress("a", "rounds", 0.5, 1009.5)
    assert left.left(1009.5) == pytest.approx(0.5 + 8), "told the same again, half a second later"


def test_of_two_that_are_late_the_slower_one_counts_for_others():
    """Attacks should take 2 s a unit. The one unit of x runs for 20 s, and so do the four of y."""
    left = TimeLeft(2)
    left.measured(("any",), "rounds", 1.0, 1.0, before=True)
    left.measured(("any",), "attacks", 2.0, 1.0, before=True)
    for name, units in (("x", 1.0), ("y", 4.0), ("z", 4.0)):
        left.add(name, work(name, row=name, method=name, attacks=units))
    for name in "xy":
        left.begun(name, 0.0)
        left.progress(name, "attacks", 0.0, 0.0)
    x, y = 0.05 * 2 + 0.5 * 18, 0.05 * 8 + 0.5 * 12
    assert left.left(20.0) == pytest.approx(max(x, y + 4 * (20 + x))), "z waits for y, at the rate of x"
    assert left.left(2.0) == pytest.approx(max(0.1 + 4 * 2, 6)), "exactly in time is not late"
    left.measured(("any",), "attacks", 9.0, 3.0, before=False)
    assert left.left(20.0) == pytest.approx(0.05 * 12 + 0.5 * 8 + 4 * 3), "what was measured counts before what is late"


def test_half_of_a_stage_is_late_by_what_is_left_of_it():
    """Attacks should take 2 s a unit. Half of the four units of x are done at 1 s, and then nothing comes for 20 s."""
    left = TimeLeft(1)
    left.measured(("any",), "rounds", 1.0, 1.0, before=True)
    left.measured(("row",), "attacks", 2.0, 1.0, before=True)
    left.add("x", work("x", attacks=4.0))
    left.add("z", work("z", row="other", method="other", attacks=1.0))
    left.begun("x", 0.0)
    left.progress("x", "attacks", 0.5, 1.0)
    x = 0.05 * 4 + 0.5 * 16
    assert left.left(21.0) == pytest.approx(x + (20 + x) / 2), "z at the rate of the two units that are late"
    assert left.left(4.0) is None, "x is in time, and tells nothing of z"


def test_a_cell_that_starts_has_only_the_rest_of_its_rounds_before_it():
    left = TimeLeft(1)
    left.measured(("any",), "start", 2.0, 1.0, before=True)
    left.measured(("any",), "rounds", 3.0, 1.0, before=True)
    left.add("a", work("a", behind=0.75, start=1.0, rounds=8.0))
    left.begun("a", 10.0)
    assert left.left(11.0) == pytest.approx(1 + 24 / 4)


def test_half_may_be_guessed_and_no_more():
    """`near` says how many kinds are more than a guess: the row of a was measured, that of b was not."""
    for near, more, wanted in ((2, 0.0, 8.0), (2, 0.1, None), (1, 0.0, None)):
        left = TimeLeft(1)
        left.measured(("r", "any"), "rounds", 4.0, 1.0, before=True)
        left.add("a", Work(("a", "r", "any"), {"rounds": 1.0}, near=near))
        left.add("b", Work(("b", "s", "any"), {"rounds": 1.0 + more}, near=near))
        assert left.left(0.0) == wanted
        left.begun("b", 0.0)
        left.progress("b", "rounds", 0.0, 0.0)
        assert left.left(0.0) == wanted, "also under way"


def test_only_a_cell_that_is_done_tells_how_long_its_last_stage_takes():
    """Two units of attacks in 6 s, and none in the 50 s after which another failed, or was refused."""
    left = TimeLeft(1)
    for name, row in (("a", "r"), ("b", "r"), ("c", "s"), ("d", "r"), ("e", "s")):
        left.add(name, work(name, row=row, rounds=1, attacks=2))
    at = carried_out(left, "a", 0.0, 4.0, 6.0)
    for name, status in (("b", "failed"), ("c", "refused")):
        left.begun(name, at)
        left.progress(name, "rounds", 0.0, at)
        left.progress(name, "attacks", 0.0, at + 4.0)  # its round was not told: 4 s more for the one unit
        left.finished(name, at + 54.0, status)
        at += 54.0
    rounds = 8.0  # of row r: 4 s and 4 s for one unit
    assert left.left(at) == pytest.approx(rounds + 6), "d; e was refused with its row"
    left.begun("d", at)
    left.progress("d", "rounds", 0.0, at)
    left.progress("d", "rounds", 1.0, at + 2.0)
    left.finished("d", at + 5.0)
    left.add("f", work("f", row="r", rounds=1, attacks=2))
    assert left.left(at + 5.0) == pytest.approx((4 + 4 + 5) / 2 + 6), "what came after the last round is of the rounds"


def test_where_only_ends_are_seen_the_report_is_added():
    left = TimeLeft(None, report=2.0)
    for name, rounds in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        left.add(name, work(name, rounds=rounds, attacks=7.0))
    left.left(100.0)
    left.finished("a", 106.0)
    assert left.left(109.0) == pytest.approx(9 * (1 + 2) / 3 + 2 * 3)
    left.finished("b", 112.0, "failed")
    assert left.left(112.0) == pytest.approx(12 * 2 / 4 + 6)


# --- cells -----------------------------------------------------------------------------------------------------


def cell(seed: int = 0, attacks: int = 1, trials: int = 0, **setting: object) -> Cell:
    made = Setting.make(seed=seed, **setting)
    return Cell(Path(f"{made.method}-{seed}"), made, ["loss"] * attacks, ["server", "outsider"], trials)


def test_the_work_of_a_cell():
    """Digits: 1,438 records of 64 numbers. Claims are tried where something is protected."""
    private = {"training": {"epsilon": 8.0}}
    plain = work_of(cell(rounds=4, participation=0.5, trials=9), None)
    data = 1438 * 64
    assert plain.units == {"start": 1, "rounds": 4 * 0.5 * data, "attacks": 2 * data, "claims": 0}
    assert work_of(cell(rounds=4, trials=9, privacy=private), None).units["claims"] == 4 * data
    large = work_of(cell(image_size=16, rounds=1, attacks=0), None)
    assert large.units == {"start": 1, "rounds": 4 * data, "attacks": 0, "claims": 0}
    other = work_of(cell(seed=1, rounds=4, participation=0.5), None)
    assert other.kinds[0] != plain.kinds[0]
    assert other.kinds[1:] == plain.kinds[1:]
    third = work_of(cell(method="local"), None)
    assert third.kinds[-1] == plain.kinds[-1]
    assert not set(third.kinds[: third.near]) & set(plain.kinds), "another method is near nothing"
    tuned = work_of(cell(set={"E": 2}), None)
    assert set(tuned.kinds[: tuned.near]) & set(plain.kinds)


def test_one_of_each_kind_comes_first():
    """Method and protection, then the row, then other seeds; within these the suite's own order."""
    eight, two = ({"training": {"epsilon": epsilon}} for epsilon in (8.0, 2.0))
    rows = [
        ("f", {}), ("f8", {"privacy": eight}), ("f2", {"privacy": two}), ("l", {"method": "local"}),
        ("l16", {"method": "local", "image_size": 16}),
    ]  # fmt: skip
    works = {f"{name}-{seed}": work_of(cell(seed, **setting), None) for name, setting in rows for seed in (0, 1)}
    assert novelty_first(works) == [
        "f-0", "f8-0", "l-0", "l16-0", "f2-0", "f-1", "f8-1", "f2-1", "l-1", "l16-1",
    ]  # fmt: skip


def test_stages_are_known_by_what_is_told_of_them():
    told = ["ready; the transcript takes 3 kB", "round 2, evaluating", "attack loss, client 1 by server"]
    assert [stage_of(what) for what in [*told, "claims of epsilon"]] == ["rounds", "rounds", "attacks", "claims"]


# --- whole audits ----------------------------------------------------------------------------------------------


class ByCells(TimeLeft):
    """The control: the time so far, by the share of cells that are through."""

    def left(self, now: float) -> float | None:
        return now * (len(self._works) - len(self._over)) / len(self._over) if self._over else None


def misses(log: list[dict], make: type[TimeLeft] = TimeLeft) -> list[tuple[float, float | None, float]]:
    """Second, estimate and truth, wherever they are not within a factor of two from a fifth of the way on, or there is
    no estimate though two cells are through. At the very end (`END_S`) the difference is judged instead."""
    over = log[-1]["at"]
    _, ground, *_ = [row["at"] for row in log if row["event"] == "finished"]
    end = max(END_S, END_SHARE * over)
    found = []
    for at, left in replay(log, make):
        truth = over - at
        if at < FROM * over or (left is None and at <= ground):
            continue
        right = left is not None and (abs(left - truth) <= end if truth < end else truth / 2 <= left <= 2 * truth)
        if not right:
            found.append((at, left, truth))
    return found


@pytest.mark.parametrize(
    "path", [LOGS[0], *(pytest.param(log, marks=pytest.mark.long) for log in LOGS[1:])], ids=lambda path: path.stem
)
def test_the_estimate_is_within_a_factor_of_two(path):
    log = read(path)
    assert log[-1]["event"] == "over"
    assert misses(log) == []


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_counting_cells_is_not(path):
    """The logs can tell: the control misses the truth at many an instant."""
    assert len(misses(read(path), ByCells)) > 10


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_the_logs_hold_whole_audits(path):
    log = read(path)
    assert len(LOGS) > 1
    added = [row["cell"] for row in log if row["event"] == "add"]
    assert sorted(added) == sorted(row["cell"] for row in log if row["event"] == "finished")
    assert {row["stage"] for row in log if row["event"] == "progress"} >= {"rounds", "attacks"}


@pytest.mark.long
def test_the_quickstart_has_an_estimate_from_a_fifth_of_the_way_on():
    """The small suites spend that fifth on starting processes; a suite of a quarter of an hour does not."""
    log = read(LOGS[0].with_name("quickstart.jsonl"))
    over = log[-1]["at"]
    assert all(left is not None for at, left in replay(log) if FROM * over <= at)
