"""Forecasts: the pace of rounds, and what is left to do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import reported
import unequal

from fedaudit.attack.attack_run import made
from fedaudit.errors import NotApplicable, RunError
from fedaudit.runtime.attack_result import results
from fedaudit.runtime.run_record import read_record
from fedaudit.setting import Setting
from fedaudit.suite import forecast as forecast_module
from fedaudit.suite.cell import Cell
from fedaudit.suite.forecast import Forecast, Pace, _keys, _seconds, by_row, duration, forecast, total, work_of

# --- unequal rounds


def test_the_pace_is_over_all_rounds_and_of_the_nearest_cell():
    pace = Pace()
    pace.add_rounds(Setting.make(seed=0), 10.0, 5)
    pace.add_rounds(Setting.make(seed=0), 2.0, 1)
    pace.add_rounds(Setting.make(seed=1), 100.0, 10)
    assert pace.per_round(Setting.make(seed=0)) == (pytest.approx(2.0), "this cell's own rounds")
    assert pace.per_round(Setting.make(seed=2)) == (pytest.approx(112 / 16), "the same with another seed")
    assert pace.per_round(Setting.make(method="local")) is None


def cell(setting=None, **more):
    values = {"attacks": ["loss"], "threats": ["server"], **more}
    return Cell(Path("nowhere"), setting or Setting.make(), **values)


def test_the_total_leaves_out_what_is_done_and_what_does_not_apply():
    forecasts = [
        Forecast(cell(), "done", 0, 0.0), Forecast(cell(), "does not apply", 0, 0.0),
        Forecast(cell(), "new", 4000, 100.0), Forecast(cell(), "new", None, None),
    ]  # fmt: skip
    text = total(forecasts, 2)
    assert text.splitlines()[0] == "4 cells: 1 done, 1 does not apply, 2 to do."
    assert "To send: 4.00 kB of payload, without 1 cells whose traffic is not known." in text
    assert "about 50 s with 2 at a time, without 1 cells that are unlike any measured one" in text


def test_audits_are_forecast_for_each_round():
    """Eight seconds of audits on a run of as many rounds as the record has."""
    record = reported._record("fedavg", 0, 0.8)
    pace = Pace()
    pace.learn(record, {"residuals": 5.0, "release": 3.0})
    assert set(pace.audits.values()) == {8.0 / len(record.rounds)}
    assert len(record.rounds) > 1


# --- runs in which everything differs: helpers/runs/unequal


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Rounds of 1, 4, 9 and 16 s with seed 0, of a second more with seed 1; the audits took 6 and 10 s."""
    folder, pace = unequal.write(tmp_path_factory.mktemp("unequal")), Pace()
    for name, audits in (("digits-0", {"a": 4.0, "b": 2.0}), ("digits-1", {"a": 10.0}), ("mnist-0", {})):
        pace.learn(read_record(folder / "runs" / name), audits)
    pace.learn(None)
    return folder, pace


def test_seconds_a_round_are_of_the_nearest_runs(learnt):
    folder, pace = learnt
    first, second = (read_record(folder / "runs" / f"digits-{seed}").setting for seed in (0, 1))
    assert pace.per_round(first) == (pytest.approx(30 / 4), "this cell's own rounds")
    assert pace.per_round(second) == (pytest.approx(34 / 4), "this cell's own rounds")
    other = first.model_copy(update={"seed": 7})
    assert pace.per_round(other) == (pytest.approx((30 + 34) / 8), "the same with another seed")
    longer = first.model_copy(update={"seed": 7, "rounds": 9})
    assert pace.per_round(longer) == (pytest.approx(64 / 8), "the same with other rounds")
    plain = first.model_copy(update={"privacy": {}})
    assert pace.per_round(plain) == (pytest.approx(64 / 8), "the same under other privacy")
    assert pace.per_round(first.model_copy(update={"dataset": "svhn"})) is None


def test_seconds_of_attacks_and_audits_are_of_the_nearest_runs(learnt):
    folder, pace = learnt
    first, second = (read_record(folder / "runs" / f"digits-{seed}").setting for seed in (0, 1))
    assert [pace.per_attack(s, "strong", "server") for s in (first, second)] == [2.0, 3.0]
    assert pace.per_attack(first, "peek", "peer:1") == 0.0, "it did not run, which takes no time"
    assert pace.per_attack(first, "strong", "outsider") is None
    assert pace.per_attack(first.model_copy(update={"seed": 9}), "strong", "server") == 3.0, "of the last one seen"
    assert [pace.per_audit(s) for s in (first, second)] == [6.0, 10.0]
    longer = first.model_copy(update={"rounds": 8})
    assert pace.per_audit(longer) == pytest.approx(8 * 10 / 4)


def test_what_is_left_of_a_cell_is_its_rounds_attacks_and_audits(learnt):
    """Half-way: two rounds of 7.5 s, the attacks of 2 s and 0.25 s, and 6 s of audits; without trials no audits."""
    folder, pace = learnt
    done = read_record(folder / "runs" / "digits-0")
    asked = {"attacks": ["loss"], "threats": ["server"]}
    pace.attacks[_keys(done.setting)[0]]["loss", "server"] = 2.25
    half = done.model_copy(update={"rounds": done.rounds[:2], "status": "running"})
    with_audits = Cell(Path("nowhere"), done.setting, trials=100, **asked)
    assert _seconds(with_audits, half, 2, pace) == (pytest.approx(15 + 2.25 + 6), "time from this cell's own rounds")
    without = Cell(Path("nowhere"), done.setting, trials=0, **asked)
    assert _seconds(without, half, 2, pace)[0] == pytest.approx(15 + 2.25)
    unknown = Cell(Path("nowhere"), done.setting, attacks=["loss", "entropy"], threats=["server"], trials=0)
    seconds, note = _seconds(unknown, None, 4, pace)
    assert seconds == pytest.approx(30 + 2.25)
    assert note.endswith("1 attacks not counted")
    fresh = read_record(folder / "runs" / "mnist-0").setting
    audited = Cell(Path("nowhere"), fresh, attacks=[], threats=[], trials=100)
    seconds, note = _seconds(audited, None, 4, pace)
    assert seconds == pytest.approx(30 + 30)
    assert "assumed to take as long as the run" in note


def test_rows_of_a_forecast_add_up_their_seeds():
    cells = [cell(Setting.make(seed=s, dataset=d)) for d in ("digits", "mnist") for s in (0, 1)]
    left = [("new", 3000, 100.0), ("done", 0, 0.0), ("new", 5000, 200.0), ("new", None, 7.0)]
    found = [Forecast(c, *of) for c, of in zip(cells, left, strict=True)]
    assert by_row(found) == [
        ("fedavg dataset=digits", "2", "1 new, 1 done", "3.00 kB", "2 min"),
        ("fedavg dataset=mnist", "2", "new", "?", "3 min"),
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (89.4, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (36000, "10.0 h")],
)
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def test_work_that_is_behind_and_work_that_is_left(learnt):
    """Two rounds of four are half; a longer record than the setting is whole; without rounds nothing is behind."""
    done = read_record(learnt[0] / "runs" / "digits-0")
    asked = {"attacks": ["loss", "entropy"], "threats": ["server", "outsider"]}
    whole = cell(done.setting, **asked)
    half = done.model_copy(update={"rounds": done.rounds[:2], "status": "running"})
    assert (work_of(whole, None).behind, work_of(whole, half).behind, work_of(whole, done).behind) == (0.0, 0.5, 1.0)
    shorter = cell(done.setting.model_copy(update={"rounds": 3}), **asked)
    assert work_of(shorter, done).behind == 1.0
    none = cell(done.setting.model_copy(update={"rounds": 0}), **asked)
    assert work_of(none, done).behind == 0.0
    data = 1438 * 64
    assert work_of(whole, None).units["attacks"] == work_of(whole, half).units["attacks"] == 4 * data
    settings = made("loss")[1].model_dump(mode="json")
    told = {**reported._membership("loss", "server", 0.6), "settings": settings, "clients": [0, 1, 2, 3]}
    ran = results.validate_python([told])
    partly = done.model_copy(update={"attacks": ran})
    whole.keep_stale = True  # whichever code made that result
    assert work_of(whole, partly).units["attacks"] == 3 * data
    assert work_of(whole, partly.model_copy(update={"status": "running"})).units["attacks"] == 4 * data


def test_kinds_of_work_are_from_this_cell_to_any():
    """The amount is told apart by the kinds that are protected, not by how strongly."""

    def kinds(**values):
        return work_of(cell(Setting.make(**values)), None)

    plain, weak, strong = kinds(), *(kinds(privacy={"logits": {"epsilon": e}}) for e in (1.0, 9.0))
    assert weak.kinds[3:] == strong.kinds[3:]
    assert weak.kinds[0] != strong.kinds[0]
    assert plain.kinds[3] != weak.kinds[3]
    assert plain.kinds[5] == weak.kinds[5]
    assert plain.kinds[7] == kinds(method="local").kinds[7]
    assert plain.near == 6, "six of its kinds are of the method itself"


# --- the forecast of cells, with records and plans that are made up


def record_of(rounds: int, transcript: str = "digest"):
    return SimpleNamespace(rounds=[None] * rounds, transcript_digest=transcript)


@pytest.fixture
def suite(monkeypatch):
    """Cells a to d: without a record, of other code, with changed attacks, and as they should be."""
    records = {"a": None, "b": record_of(1, "of b"), "c": record_of(2, "of c"), "d": record_of(3, "of d")}
    learnt = []

    class Learns(Pace):
        def learn(self, record, audits=None):
            learnt.append((record, audits))

    monkeypatch.setattr(forecast_module, "Pace", Learns)
    monkeypatch.setattr(forecast_module, "look", lambda cell: records[cell.folder.name])
    monkeypatch.setattr(forecast_module, "audit_seconds", lambda folder, digest: {f"{folder} {digest}": 1.0})
    monkeypatch.setattr(
        forecast_module,
        "why_again",
        lambda cell, record, force, keep: (
            "forced" if force else "other code" if cell.folder.name == "b" and not keep else ""
        ),
    )
    monkeypatch.setattr(forecast_module, "is_not_compared", lambda cell, record: cell.folder.name == "c")
    monkeypatch.setattr(
        forecast_module, "stale_attacks", lambda cell, record: ["loss", "gap"] if cell.folder.name in "bc" else []
    )
    monkeypatch.setattr(forecast_module, "_forecast", lambda cell, record, pace, measure: (cell, record, measure))
    cells = [Cell(Path(name), Setting.make(), ["loss"], ["server"], status="done") for name in records]
    return cells, records, learnt


@pytest.mark.parametrize(
    ("how", "again", "status", "counts"),
    [
        ({}, [None, "other code", "attacks changed: loss, gap", None], ["done", "to do", "done", "done"], "cd"),
        ({"keep_stale": True}, [None] * 4, ["done"] * 4, "bcd"),
        ({"force": True, "measure": True}, [None, "forced", "forced", "forced"], ["done", *["to do"] * 3], ""),
    ],
)
def test_which_results_of_an_earlier_audit_count(how, again, status, counts, suite):
    """All are learnt from. A run by other code begins anew, and one with other attacks has only these to do."""
    cells, records, learnt = suite
    found = forecast(cells, **how)
    assert [one[0] for one in found] == cells
    assert [one[1] for one in found] == [records[name] if name in counts else None for name in "abcd"]
    assert {one[2] for one in found} == {how.get("measure", False)}
    assert [cell.again for cell in cells] == again
    assert [cell.status for cell in cells] == status
    assert [cell.not_compared for cell in cells] == [False, False, "c" in counts, False]
    assert [cell.keep_stale for cell in cells] == [how.get("keep_stale", False)] * 4
    assert learnt == [(record, record and {f"{name} of {name}": 1.0}) for name, record in records.items()]


def planned(monkeypatch, reason="", traffic=True, error=None):
    """Let a method send 30 + 400 bytes a round by its first plan."""
    sizes = {"up": SimpleNamespace(payload=30), "down": SimpleNamespace(payload=400)}
    method = SimpleNamespace(traffic=lambda plan: f"declared for {plan}" if traffic else None)

    def plans(setting):
        if error is not None:
            raise error
        return method, ["the first plan", "another"]

    def sent(of, compress, declared):
        assert (of, compress, declared) == (method, "int8", "declared for the first plan")
        return sizes, "other"

    monkeypatch.setattr(forecast_module, "_plans", plans)
    monkeypatch.setattr(forecast_module, "released_kinds", lambda method, plans: (method, plans))
    monkeypatch.setattr(forecast_module, "inapplicable", lambda privacy, kinds: reason)
    monkeypatch.setattr(forecast_module, "as_sent", sent)
    monkeypatch.setattr(forecast_module, "_seconds", lambda cell, record, left, pace: (10.0 * left, f"{left} left"))


@pytest.mark.parametrize(
    ("behind", "again", "state", "sent", "seconds", "note"),
    [
        (None, None, "new", 5 * 430, 50.0, "5 left"),
        (None, "other code", "again", 5 * 430, 50.0, "again: other code; 5 left"),
        (0, None, "new", 5 * 430, 50.0, "5 left"),
        (2, None, "2 of 5 rounds done", 3 * 430, 30.0, "3 left"),
        (5, "attacks changed: loss", "attacks", 0, 0.0, "again: attacks changed: loss; 0 left"),
    ],
)
def test_what_is_forecast_of_one_cell(behind, again, state, sent, seconds, note, monkeypatch):
    planned(monkeypatch)
    one = cell(Setting.make(rounds=5, compress="int8"))
    one.again = again
    record = None if behind is None else record_of(behind)
    assert forecast_module._forecast(one, record, Pace(), False) == Forecast(one, state, sent, seconds, note)


def test_what_is_forecast_of_a_cell_that_will_not_run(monkeypatch):
    one = cell(Setting.make(rounds=5))

    def found(status="to do", why=None, **how):
        planned(monkeypatch, **how)
        one.status, one.reason = status, why
        made = forecast_module._forecast(one, None, Pace(), False)
        return made.state, made.bytes, made.seconds, made.note

    assert found("done") == ("done", 0, 0.0, "")
    assert found("refused", "sends no such kind") == ("does not apply", 0, 0.0, "sends no such kind")
    assert found(reason="nothing to protect") == ("does not apply", 0, 0.0, "nothing to protect")
    assert found(error=NotApplicable("needs labels")) == ("does not apply", 0, 0.0, "needs labels")
    assert found(error=RunError("no data")) == ("will fail", None, None, "no data")
    assert found(traffic=False) == ("new", None, 50.0, "its traffic is not declared; 5 left")


def test_a_cell_unlike_any_is_tried_out_if_it_is_asked_for(monkeypatch):
    planned(monkeypatch)
    one = cell(Setting.make(rounds=5, compress="int8"))
    tried, pace = [], Pace()
    run = SimpleNamespace(setting=one.setting, rounds=[SimpleNamespace(own_s=2.0)], attacks=[])
    monkeypatch.setattr(forecast_module, "_try_out", lambda cell: tried.append(cell) or (run, {"noise": 7.0}))
    forecast_module._forecast(one, None, pace, False)
    assert tried == []
    forecast_module._forecast(one, None, pace, True)
    forecast_module._forecast(one, None, pace, True)
    assert tried == [one], "then it is known"
    assert pace.per_round(one.setting) == (2.0, "this cell's own rounds")
    assert set(pace.audits.values()) == {7.0}

    def fails(cell):
        raise RunError("it failed")

    monkeypatch.setattr(forecast_module, "_try_out", fails)
    made = forecast_module._forecast(one, None, Pace(), True)
    assert (made.state, made.bytes, made.seconds, made.note) == ("will fail", None, None, "it failed")
