"""Forecasts: the pace of rounds, and what is left to do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import reported
import unequal

from fedaudit import registry, run
from fedaudit.attack.attack_run import made
from fedaudit.errors import FedauditError, NotApplicable, RunError
from fedaudit.methods.datafree.dffke import DFFKE
from fedaudit.runtime.asking import participants_of
from fedaudit.runtime.attack_result import NotRun, results
from fedaudit.runtime.run_record import read_record
from fedaudit.setting import Setting
from fedaudit.suite import forecast as forecast_module
from fedaudit.suite.cell import Cell
from fedaudit.suite.forecast import (
    Forecast,
    Pace,
    _keys,
    _seconds,
    by_row,
    duration,
    forecast,
    novelty_first,
    total,
    work_of,
)

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


POISSON = {"sampling": "poisson", "participation": 0.4}


def planned(monkeypatch, reason="", traffic=True, error=None):
    """Let a method send 100 bytes in round 1, 200 in round 2, and so on, by its plans."""
    method = SimpleNamespace()

    def plans(setting):
        if error is not None:
            raise error
        return method, ["the first plan", "another"], "a plan of each round"

    def payload(of, plan_of_round, setting, rounds):
        assert (of, plan_of_round, setting.rounds) == (method, "a plan of each round", 5)
        return sum(100 * t for t in rounds) if traffic else None

    monkeypatch.setattr(forecast_module, "_plans", plans)
    monkeypatch.setattr(forecast_module, "released_kinds", lambda method, plans: (method, plans))
    monkeypatch.setattr(forecast_module, "inapplicable", lambda privacy, kinds: reason)
    monkeypatch.setattr(forecast_module, "payload_of_rounds", payload)
    monkeypatch.setattr(forecast_module, "_seconds", lambda cell, record, left, pace: (10.0 * left, f"{left} left"))


@pytest.mark.parametrize(
    ("behind", "again", "state", "sent", "seconds", "note"),
    [
        (None, None, "new", 1500, 50.0, "5 left"),
        (None, "other code", "again", 1500, 50.0, "again: other code; 5 left"),
        (0, None, "new", 1500, 50.0, "5 left"),
        (2, None, "2 of 5 rounds done", 300 + 400 + 500, 30.0, "3 left"),
        (5, "attacks changed: loss", "attacks", 0, 0.0, "again: attacks changed: loss; 0 left"),
    ],
)
def test_what_is_forecast_of_one_cell(behind, again, state, sent, seconds, note, monkeypatch):
    planned(monkeypatch)
    one = cell(Setting.make(rounds=5, compress="int8"))
    one.again = again
    record = None if behind is None else record_of(behind)
    assert forecast_module._forecast(one, record, Pace(), False) == Forecast(one, state, sent, seconds, note)


def test_a_dry_run_says_that_a_sum_of_one_client_will_fail():
    values = {"method": "fedavg", "clients": 2, "aggregate": "secure"}
    first, second = forecast([cell(Setting.make(participation=p, **values)) for p in (0.5, 1)])
    assert (first.state, first.bytes) == ("will fail", None)
    assert "at least two clients" in first.note
    assert second.state == "new"
    assert second.bytes > 0


def test_a_dry_run_names_the_round_in_which_one_client_is_drawn_for_a_sum(tmp_path):
    """On average there are two of five, so that only the draws of the seed tell it."""
    options = {"method": "fedavg", "model": "mlp", "clients": 5, "participation": 0.5, "sampling": "poisson"}
    setting = Setting.make(**options, aggregate="secure", rounds=10, seed=1)
    (found,) = forecast([cell(setting)])
    sizes = [len(participants_of(setting, t)) for t in range(1, 11)]
    assert (found.state, found.bytes) == ("will fail", None)
    assert found.note.startswith(f"Round {sizes.index(1) + 1}: A sum of one client")
    with pytest.raises(FedauditError, match=f"Round {sizes.index(1) + 1}, "):
        run(setting, out=tmp_path / "run")


@pytest.mark.parametrize(
    "more",
    [
        {"method": "dffke", "preset": "authors", "rounds": 3, "set": {**DFFKE.quick, "R": "unlimited", "tau": "off"}},
        {"method": "fedavg", "rounds": 2, "set": {"E": 1}, "aggregate": "secure"},
        {"method": "fedavg", "rounds": 2, "set": {"E": 1}, "aggregate": "secure", **POISSON, "seed": 1},
        {"method": "fedavg", "rounds": 4, "set": {"E": 1}, **POISSON},
    ],
    ids=["dffke", "fedavg in sums", "fedavg in sums, drawn", "fedavg, drawn"],
)
def test_what_a_dry_run_says_is_sent_is_what_a_run_sends(more, tmp_path):
    """DFFKE sends more in later rounds, which review earlier ones; secure sums send masks beside the updates."""
    options = {"clients": 3, "model": "cnn_bn", "aux": 0.6, **more}
    if more["method"] == "dffke":
        options["set"] = {**options["set"], "E_local": 1, "crop": 1}
    record = run(out=tmp_path / "run", **options)
    sent = [of.up_payload + of.down_payload for of in record.rounds]
    ahead = forecast_module._forecast(cell(record.setting), None, Pace(), False)
    assert ahead.bytes == sum(sent)
    if more.get("sampling"):
        taking_part = {len(of.participants) for of in record.rounds}
        assert taking_part != {1}, "as many as on average"
    behind = record.model_copy(update={"rounds": record.rounds[:1]})
    assert forecast_module._forecast(cell(record.setting), behind, Pace(), False).bytes == sum(sent[1:])
    if more["method"] == "dffke":
        assert sent[0] < sent[1] < sent[2], "every round reviews one more"


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


# --- work, what it learns from, and the words of a forecast ----------------------------------------------------------


def test_the_units_of_a_cells_work():
    """Half of the clients in each of 6 rounds, on digits: 1438 records of 64 numbers; two attacks by two threats."""
    private = Setting.make(rounds=6, participation=0.5, privacy={"weights": {"epsilon": 1.0}})
    asked = {"attacks": ["loss", "entropy"], "threats": ["server", "outsider"]}
    data = 1438 * 64.0
    units = {"start": 1.0, "rounds": 3 * data, "attacks": 4 * data, "claims": 3 * data}
    assert work_of(cell(private, trials=5, **asked), None).units == units
    untested = {**units, "claims": 0.0}
    assert work_of(cell(private, trials=0, **asked), None).units == untested
    assert work_of(cell(private.model_copy(update={"privacy": {}}), trials=5, **asked), None).units == untested
    audited = SimpleNamespace(rounds=[None] * 6, status="running", audits=["one"])
    assert work_of(cell(private, trials=5, **asked), audited).units == untested
    assert (
        work_of(cell(private, trials=5, **asked), SimpleNamespace(rounds=[], status="running", audits=[])).units
        == units
    )


@pytest.mark.parametrize(
    ("facts", "side", "numbers"),
    [
        ((100, (3, 8, 5)), None, 100 * 120.0), ((100, (3, 8, 5)), 4, 100 * 48.0), ((7, (9,)), None, 63.0),
        ((None, (3, 8, 5)), None, 1438 * 64.0), ((100, None), None, 1438 * 64.0), (None, None, 1438 * 64.0),
    ],
)  # fmt: skip
def test_the_numbers_of_a_data_set(facts, side, numbers, monkeypatch):
    def describe(name):
        if facts is None:
            raise RunError(f"no {name}")
        return SimpleNamespace(train=facts[0], shape=facts[1])

    monkeypatch.setattr(forecast_module, "describe", describe)
    assert forecast_module._numbers(Setting.make(image_size=side)) == numbers


def test_stages_of_an_earlier_audit_are_learnt_from(monkeypatch):
    """Two rounds of four, with half of the clients: a round is a quarter of the units. All attacks must be there."""
    noted = []
    left = SimpleNamespace(measured=lambda *given, before: noted.append((*given, before)))
    missing_of = {}
    monkeypatch.setattr(forecast_module, "missing", lambda cell, record: missing_of.get("found", []))
    monkeypatch.setattr(forecast_module, "audit_seconds", lambda folder, digest: took)
    took = {"a": 2.0, "b": 5.0}
    one = cell(
        Setting.make(rounds=4, participation=0.5), attacks=["loss", "gap"], threats=["server", "peer:1", "peer:2"]
    )
    work = SimpleNamespace(kinds=("k",), units={"rounds": 80.0})
    ran = [
        SimpleNamespace(wall_s=3.0),
        SimpleNamespace(wall_s=4.0),
        NotRun(attack="x", threat="server", ran=False, reason=""),
    ]
    record = SimpleNamespace(
        rounds=[SimpleNamespace(wall_s=1.0), SimpleNamespace(wall_s=8.0)],
        attacks=ran,
        status="done",
        transcript_digest="d",
    )

    def learnt(**change):
        noted.clear()
        forecast_module.learn(left, work, one, SimpleNamespace(**{**vars(record), **change}))
        return noted

    rounds, claims = (("k",), "rounds", 9.0, 40.0, True), (("k",), "claims", 7.0, 40.0, True)
    attacks = (("k",), "attacks", 7.0, 6 * 20.0 / 0.5, True)
    assert learnt() == [rounds, attacks, claims]
    assert learnt(status="running") == [rounds, claims]
    assert learnt(attacks=[]) == [rounds, claims]
    assert learnt(rounds=[]) == []
    missing_of["found"] = ["one"]
    took = {}
    assert learnt() == [rounds]


def test_a_report_is_counted_in_starts():
    assert forecast_module.report_starts(0) == pytest.approx(1.7 / 9.1)
    assert forecast_module.report_starts(20) == pytest.approx(4.8 / 9.1)


def test_cells_that_tell_most_come_first():
    """By the method's kind, by what but the noise is alike, and by the row: places 4, 3 and 1. Ties stay in order."""

    def work(row, amount, kind):
        return SimpleNamespace(kinds=("own", row, "length", amount, kind, "method"))

    works = {
        "a": work("r1", "x", "m"), "b": work("r1", "x", "m"), "c": work("r2", "x", "m"), "d": work("r3", "y", "m"),
        "e": work("r4", "z", "n"),
    }  # fmt: skip
    assert novelty_first(works) == ["a", "e", "d", "c", "b"]


def test_the_words_of_a_total():
    """Jobs are no more than cells; what is done has no part in the time, and a note is counted by its method."""

    def one(state, size, seconds, note="", method="fedavg"):
        return Forecast(cell(Setting.make(method=method)), state, size, seconds, note)

    assert total([one("done", 0, 0.0)], 1) == "1 cells: 1 done."
    unknown = total(
        [one("new", 1000, None, "why"), one("new", 500, None, "why"), one("new", 1, None, "why", "local")], 4
    )
    assert unknown.splitlines() == [
        "3 cells: 3 to do.",
        "To send: 1.50 kB of payload.",
        "Time: not known, because nothing like these cells was measured in this folder.",
        "--measure runs one round of each kind.",
        "  2 x fedavg: why",
        "  1 x local: why",
    ]
    known = total([one("new", 10, 60.0), one("2 of 5 rounds done", 20, 30.0), one("done", 5, 900.0, "told")], 8)
    assert known.splitlines() == [
        "3 cells: 2 to do, 1 done.", "To send: 30 B of payload.", "Time: about 45 s with 8 at a time.",
        "  1 x fedavg: told",
    ]  # fmt: skip


def test_rows_are_told_apart_by_what_differs():
    privacy = [{}, {"weights": {"epsilon": 1.0, "sensitivity": "clip:1"}, "flag": 3}]
    cells = [cell(Setting.make(privacy=p, rounds=r)) for p, r in zip(privacy, (3, 4), strict=True)]
    found = [Forecast(c, "new", size, seconds) for c, size, seconds in zip(cells, (1, 2), (3.0, None), strict=True)]
    assert by_row(found) == [
        ("fedavg rounds=3", "1", "new", "1 B", "3 s"),
        ("fedavg rounds=4 weights 1.0 clip:1, flag=3", "1", "new", "2 B", "?"),
    ]
    assert by_row(found[:1]) == [("fedavg", "1", "new", "1 B", "3 s")]


def test_a_row_is_named_by_its_label_and_the_values_that_it_has_alone():
    """E is the same in all rows of fedavg, and mu is set in one of them alone: another method's values do not count."""
    rows = [
        {"set": {"E": 2, "B": 8}},
        {"set": {"E": 2, "B": 16}},
        {"set": {"E": 2, "B": 16, "momentum": 0.5}, "label": "with momentum"},
        {"method": "fedprox", "set": {"E": 3, "mu": 0.1}},
    ]
    found = [Forecast(cell(Setting.make(**row)), "new", 1, 1.0) for row in rows]
    assert [row[0] for row in by_row(found)] == [
        "fedavg B=8", "fedavg B=16", "fedavg with momentum B=16, momentum=0.5", "fedprox",
    ]  # fmt: skip


def test_plans_are_of_the_first_the_second_and_the_last_round(monkeypatch):
    """From the data if they are here: with so many of the clients, at least one. Else from their published size."""
    setting = Setting.make(rounds=9, clients=10, participation=0.25)
    world = SimpleNamespace(method="its method", misfit=lambda: "", plan=lambda t, who: (t, who))
    monkeypatch.setattr(
        forecast_module, "world_of", lambda text: world if Setting.make(**json.loads(text)) == given else None
    )
    monkeypatch.setattr(forecast_module, "available", lambda name, folder: (name, folder) == ("digits", ".data"))
    for given, who in ((setting, [0, 1]), (setting.model_copy(update={"participation": 0.01}), [0])):
        method, plans, plan_of_round = forecast_module._plans(given)
        assert (method, plans) == ("its method", [(t, who) for t in (1, 2, 9)])
        assert [plan_of_round(t) for t in (1, 4)] == [(t, participants_of(given, t)) for t in (1, 4)]
    world.misfit = lambda: "it needs images"
    with pytest.raises(NotApplicable, match=r"^it needs images\.$"):
        forecast_module._plans(given)
    away = setting.model_copy(update={"data_dir": "elsewhere", "rounds": 1, "method": "fedavg", "model": "mlp"})
    method, plans, plan_of_round = forecast_module._plans(away)
    assert [(plan.t, plan.participants, list(plan.n)) for plan in plans] == [(t, [0, 1], [0, 1]) for t in (1, 2)]
    taking = participants_of(away, 7)
    assert (plan_of_round(7).t, plan_of_round(7).participants, list(plan_of_round(7).n)) == (7, taking, taking)
    assert (plans[0].clients, plans[0].n[0]) == (10, 1437 // 10)
    assert isinstance(method, registry.find("fedavg"))


def test_one_round_is_tried_out_in_a_folder_of_its_own(monkeypatch):
    ran = []

    def carry_out(trial):
        ran.append((trial.setting.rounds, trial.attacks, trial.threats, trial.trials, trial.folder.parent.is_dir()))
        trial.status, trial.reason = outcome

    monkeypatch.setattr(forecast_module, "carry_out", carry_out)
    monkeypatch.setattr(forecast_module, "look", lambda trial: record)
    monkeypatch.setattr(forecast_module, "audit_seconds", lambda folder, digest: {f"{folder.name} {digest}": 1.0})
    one = cell(Setting.make(rounds=5), attacks=["gap"], threats=["outsider"], trials=4)
    outcome, record = ("done", None), SimpleNamespace(transcript_digest="d")
    assert forecast_module._try_out(one) == (record, {"run d": 1.0})
    assert ran == [(1, ["gap"], ["outsider"], 4, True)]
    record = None
    assert forecast_module._try_out(one) == (None, {})
    outcome = ("failed", "it diverged")
    with pytest.raises(RunError, match="failed: it diverged"):
        forecast_module._try_out(one)


def test_seconds_of_a_cell_that_has_only_some_attacks_or_claims_left(monkeypatch):
    """Nothing is measured: None. With all rounds done only missing attacks count, and claims only where untried."""
    setting = Setting.make(rounds=3, privacy={"weights": {"epsilon": 1.0}})
    one = cell(setting, attacks=["loss", "entropy"], threats=["server"], trials=9)
    pace = Pace()
    assert _seconds(one, None, 3, pace) == (None, "no similar run was measured yet")
    pace.add_rounds(setting, 20.0, 2)
    for name, seconds in (("loss", 1.0), ("entropy", 0.5)):
        pace.attacks[_keys(setting)[0]][name, "server"] = seconds
    monkeypatch.setattr(forecast_module, "missing", lambda cell, record: [("entropy", "server")])
    done = SimpleNamespace(audits=["one"])
    assert _seconds(one, done, 0, pace)[0] == pytest.approx(0.5)
    assert _seconds(one, SimpleNamespace(audits=[]), 0, pace)[0] == pytest.approx(0.5 + 30)
    assert _seconds(one, done, 1, pace)[0] == pytest.approx(10 + 1.5 + 30)
    pace.audits[_keys(setting)[0]] = 2.0
    assert _seconds(one, None, 3, pace) == (pytest.approx(30 + 1.5 + 6), "time from this cell's own rounds")
