"""Cells of a suite: what is done, and what is missing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import reported

from fedaudit.errors import RunError
from fedaudit.setting import Setting
from fedaudit.suite.cell import Cell, carry_out, look, missing, untried

# --- unequal rounds


@pytest.fixture
def record():
    """Two clients in round 1, one in round 2; 4000 bytes up and 2000 down."""
    made = reported._record("fedavg", 0, 0.8, releases=True)
    made.rounds[1].participants = [0]
    return made


def cell(setting=None, **more):
    values = {"attacks": ["loss"], "threats": ["server"], **more}
    return Cell(Path("nowhere"), setting or Setting.make(), **values)


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


@pytest.mark.parametrize("status", ["done", "refused", "to do"])
def test_a_cell_that_is_over_is_left_as_it_is(status, monkeypatch):
    """Whatever failed before: only a cell that is still to do can fail."""
    cell = SimpleNamespace(status="", reason="as before")

    def look(cell):
        cell.status = status

    monkeypatch.setattr("fedaudit.suite.cell.look", look)
    carry_out(cell, failed=RunError("broken"))
    wanted = ("failed", "broken") if status == "to do" else (status, "as before")
    assert (cell.status, cell.reason.removeprefix("RunError: ")) == wanted
