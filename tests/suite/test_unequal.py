"""Budgets and forecasts of unequal rounds: who was asked, which attack was measured, what is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import reported

from fedaudit.errors import SettingError
from fedaudit.setting import Setting
from fedaudit.suite.budgets import Budget, check_budget, measure
from fedaudit.suite.cell import Cell, look, missing, untried
from fedaudit.suite.forecast import Forecast, Pace, total


@pytest.fixture
def record():
    """Two clients in round 1, one in round 2; 4000 bytes up and 2000 down."""
    made = reported._record("fedavg", 0, 0.8, releases=True)
    made.rounds[1].participants = [0]
    return made


@pytest.mark.parametrize(("per", "value"), [("client-round", 4000 / 3), ("round", 2000), ("run", 4000)])
def test_bytes_per_client_round_per_round_and_per_run(record, per, value):
    found, fields = measure(Budget(direction="up", per=per, max=1.0), record)
    assert found == pytest.approx(value)
    assert fields == {"up Local.w": pytest.approx(value)}


def test_directions_fields_and_conventions_are_told_apart(record):
    assert measure(Budget(per="run", max=1.0), record)[0] == 6000
    assert measure(Budget(per="run", max=1.0, direction="down"), record)[0] == 2000
    assert measure(Budget(per="run", max=1.0, field="Global.w"), record)[0] == 2000
    assert measure(Budget(per="run", max=1.0, message="Local"), record)[0] == 4000
    assert measure(Budget(per="run", max=1.0, convention="wire"), record)[0] == 6040
    with pytest.raises(SettingError, match="matches nothing"):
        measure(Budget(per="run", max=1.0, message="Loca"), record)


def test_a_budget_is_kept_up_to_its_limit_and_not_beyond(record):
    assert check_budget(Budget(per="run", max=6000.0), record, "r").kept
    assert not check_budget(Budget(per="run", max=5999.0), record, "r").kept
    assert check_budget(Budget(metric="accuracy", min=0.8), record, "r").kept
    assert not check_budget(Budget(metric="accuracy", min=0.81), record, "r").kept


def test_accuracy_is_of_the_last_round(record):
    record.result.chosen = reported._reached(1, 0.95)
    assert measure(Budget(metric="accuracy", min=0.1), record)[0] == pytest.approx(0.8)


def test_growth_is_measured_against_the_baseline(record, tmp_path):
    """The baseline sent 6000 bytes; 5 % more are allowed: 6300."""
    record.save(tmp_path)
    budget = Budget(per="run", baseline="record.json", max_growth="5 %")
    record.traffic[0].payload += 300
    assert check_budget(budget, record, "r", tmp_path).kept
    record.traffic[0].payload += 1
    found = check_budget(budget, record, "r", tmp_path)
    assert not found.kept
    assert found.limit == pytest.approx(6300)
    assert "Local.w grew most" in found.message()


# --- pace -----------------------------------------------------------------------------------------------------------


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


# --- what was done ----------------------------------------------------------------------------------------------------


def result(attack="loss", threat="server", clients=(0, 1), **more):
    from fedaudit.attack.attack_run import made
    from fedaudit.runtime.attack_result import MembershipResult
    from fedaudit.runtime.code_digest import source_of

    found = made(attack)[1]
    settings, source = found.model_dump(mode="json"), source_of(type(found))
    raw = reported._membership(attack, threat, 0.5, settings=settings, source=source)
    return MembershipResult(**{**raw, "clients": list(clients), **more})


def test_an_attack_on_some_clients_is_not_one_on_all(record):
    record.attacks = [result(clients=[0])]
    assert missing(cell(), record) == [("loss", "server")]
    record.attacks = [result(clients=[0], left_out=["client 1 was never asked"])]
    assert missing(cell(), record) == []
    record.attacks = [result(threat="peer:1", clients=[0])]  # a peer does not attack itself
    assert missing(cell(threats=["peer:1"]), record) == []
    assert missing(cell(threats=["peer:1", "server"]), record) == [("loss", "server")]


def test_claims_are_untried_only_where_there_is_a_claim_and_no_audit(record):
    private = Setting.make(privacy={"weights": {"epsilon": 1.0}})
    assert untried(cell(private, trials=10), record)
    assert not untried(cell(private, trials=0), record)
    assert not untried(cell(trials=10), record)
    record.audits = [reported._audit("not refuted", 9.2, 1.5)]
    assert not untried(cell(private, trials=10), record)


def test_a_cell_is_done_when_its_attacks_and_audits_are(record, tmp_path):
    for attacks, status in (([], "to do"), ([result(clients=[0, 1])], "done")):
        folder = tmp_path / status.replace(" ", "-")
        reported._save(folder, "a", record, attacks)
        found = Cell(folder / "runs" / "a", record.setting, ["loss"], ["server"])
        look(found)
        assert found.status == status


@pytest.mark.parametrize(("key", "value"), [("dataset", "mnist"), ("method", "local"), ("compress", "topk:0.1")])
def test_a_budget_of_another_run_is_not_about_this_one(key, value, record):
    assert Budget(max=1).is_about(record)
    assert Budget(max=1, method="fedavg", dataset="digits", compress="none").is_about(record)
    assert not Budget(max=1, **{key: value}).is_about(record)


def test_audits_are_forecast_for_each_round(record):
    """Eight seconds of audits on a run of as many rounds as the record has."""
    pace = Pace()
    pace.learn(record, {"residuals": 5.0, "release": 3.0})
    assert set(pace.audits.values()) == {8.0 / len(record.rounds)}
    assert len(record.rounds) > 1
