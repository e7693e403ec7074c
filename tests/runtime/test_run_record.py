"""A record that version 0.1 wrote is still read, to the last number. `version_0_1` was made by
`fedaudit run --method fedavg --rounds 2 --clients 2 --model mlp --set E=1` and an attack, of which a part was kept; the
audit is in the form of that version."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from fedaudit import read_record
from fedaudit.errors import RunError
from fedaudit.runtime.run_record import save_attacks

OLD = Path(__file__).with_name("version_0_1")


def test_an_old_record_is_read():
    raw = json.loads((OLD / "record.json").read_text())
    record = read_record(OLD)
    assert record.setting.init == "own", "what every client did before there was a choice"
    last = record.result.last
    assert last.round == 2
    assert last.global_.test.accuracy == raw["result"]["last"]["global"]["test"]["accuracy"]
    assert last.global_.local_test is None, "it was not tried then"
    assert last.clients.local_test.each == raw["result"]["last"]["clients"]["local_test"]["each"]
    assert [point.accuracy for point in record.curve] == [
        row["utility"]["global"]["test"]["accuracy"] for row in raw["rounds"]
    ]
    assert record.result.best_test_round.model_dump() == raw["result"]["best_test_round"]


def test_what_was_kept_beside_it_is_read():
    record = read_record(OLD)
    assert len(record.attacks) == len(record.audits) == 1
    assert json.loads((OLD / "audits.json").read_text())["audits"][0]["claim_epsilon"] == "Infinity"
    assert record.audits[0].claim_epsilon == math.inf
    [loss] = record.attacks
    assert (loss.attack, loss.claims, loss.source) == ("loss", "membership", None)
    assert [at.fpr for at in loss.pooled.tpr_at_fpr] == [0.1, 0.01, 0.001]


def test_old_attacks_are_written_as_they_were(tmp_path):
    """What a later version would say besides is not made up: the file stays the same, to the last field."""
    record = read_record(OLD)
    save_attacks(tmp_path, record.transcript_digest, record.attacks)
    assert json.loads((tmp_path / "attacks.json").read_text()) == json.loads((OLD / "attacks.json").read_text())


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda attack: attack["pooled"]["auc"].update(value="high"), r"attacks\.0\.membership\.pooled\.auc\.value"),
        (lambda attack: attack["pooled"].pop("auc"), r"attacks\.0\.membership\.pooled\.auc"),
        (lambda attack: attack.update(claims="everything"), r"attacks\.0"),
        (lambda attack: attack.update(leek=True), r"attacks\.0\.membership\.leek"),
    ],
)
def test_a_damaged_attack_is_refused(tmp_path, change, where):
    shutil.copytree(OLD, tmp_path / "run")
    raw = json.loads((OLD / "attacks.json").read_text())
    change(raw["attacks"][0])
    (tmp_path / "run" / "attacks.json").write_text(json.dumps(raw))
    with pytest.raises(RunError, match=rf"attacks\.json cannot be read: {where}: .*attack again"):
        read_record(tmp_path / "run")


def test_an_old_record_is_written_as_it_was(tmp_path):
    """Fields that were added since have values of their own; no old one is lost, renamed or rounded."""
    raw = json.loads((OLD / "record.json").read_text())
    read_record(OLD).save(tmp_path)
    written = json.loads((tmp_path / "record.json").read_text())

    def within(old, new, where="record"):
        if isinstance(old, dict):
            for key in old:
                assert key in new, f"{where}.{key} is lost"
                within(old[key], new[key], f"{where}.{key}")
        elif isinstance(old, list):
            assert len(old) == len(new), where
            for i, (a, b) in enumerate(zip(old, new, strict=True)):
                within(a, b, f"{where}[{i}]")
        else:
            assert old == new, where

    within(raw, written)
    assert list(written["result"]["last"]) == ["round", "global", "clients"], "empty tables are not written"


@pytest.mark.parametrize("damage", ["accuracy", "global"])
def test_a_damaged_score_is_refused(tmp_path, damage):
    shutil.copytree(OLD, tmp_path / "run")
    raw = json.loads((OLD / "record.json").read_text())
    if damage == "accuracy":
        raw["rounds"][0]["utility"]["global"]["test"]["accuracy"] = "high"
    else:
        raw["rounds"][0]["utility"]["globl"] = raw["rounds"][0]["utility"].pop("global")
    (tmp_path / "run" / "record.json").write_text(json.dumps(raw))
    with pytest.raises(RunError, match=r"not a valid run record: rounds\.0\.utility"):
        read_record(tmp_path / "run")
