"""Kept records: a cell's figures are those of its run, files are small and versioned, new cells change no others."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import reported

import fedaudit
from fedaudit.errors import SettingError
from fedaudit.runtime.attack_result import results
from fedaudit.runtime.run_record import read_record
from fedaudit.suite import kept_records
from fedaudit.suite.kept_records import CellFigures, Found, MethodRecords


@pytest.fixture(scope="module")
def audit(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    how = {"method": "fedavg", "model": "mlp", "clients": 2, "rounds": 2, "set": {"E": 1, "B": 32, "eta": 0.1}}
    fedaudit.run(**how, out=folder / "runs" / "one")
    fedaudit.attack(folder / "runs" / "one", attacks=["loss", "embedding_match"])
    return folder


def test_a_cells_figures_are_its_runs(audit):
    record = read_record(audit / "runs" / "one")
    (kept,) = kept_records.gathered(kept_records.cells_of(audit))
    (cell,) = kept.cells
    assert kept.method == "fedavg"
    assert [(of.field, of.kind) for of in kept.fields] == [("Local.n", "count"), ("Local.w", "weights")]
    assert cell.global_test == pytest.approx(record.result.last.global_.test.accuracy, rel=1e-4)
    assert cell.up == record.bytes("up") / 4  # two clients, two rounds
    assert cell.epsilon is None
    assert list(cell.open) == ["Local.w"]  # n is public under replace-one
    assert [found.attack for found in cell.attacks] == ["loss"]  # no baselines
    loss = next(result for result in record.attacks if result.attack == "loss")
    assert cell.attacks[0].value == pytest.approx(loss.pooled.auc.value, rel=1e-4)
    assert kept.not_run == {"embedding_match": "the server sees no embeddings of client 0"}


def test_files_are_read_as_they_were_written_and_keep_other_cells(audit, tmp_path):
    (kept,) = kept_records.gathered(kept_records.cells_of(audit))
    other = kept.cells[0].model_copy(update={"key": "other", "seed": 5})
    kept_records.write_records(tmp_path, [kept.model_copy(update={"cells": (other,)})])
    (file,) = kept_records.write_records(tmp_path, [kept])
    assert file.name == "fedavg.json"
    assert kept_records.read_records(tmp_path)["fedavg"].cells == (other, *kept.cells)
    kept_records.write_records(tmp_path, [kept])
    assert len(kept_records.read_file(file).cells) == 2  # the same cell again takes its own place
    assert file.stat().st_size < 4000


def test_another_version_is_refused(tmp_path):
    (tmp_path / "fedavg.json").write_text(json.dumps({"version": 2, "method": "fedavg"}))
    with pytest.raises(SettingError, match="version 2 of kept records"):
        kept_records.read_records(tmp_path)


def test_a_cell_under_way_is_left_out_and_a_failed_one_says_why(audit):
    record = read_record(audit / "runs" / "one").model_copy(update={"status": "running"})
    assert kept_records.gathered([(record, [], None)]) == []
    (kept,) = kept_records.gathered([(record, [], "it diverged")])
    assert (kept.cells[0].status, kept.cells[0].reason) == ("failed", "it diverged")


def test_what_an_attack_has_over_guessing():
    """An AUC of 0.75 is half of the way to 1; an error of 0.3 where a guess has 0.4 saves a quarter of it, and so does
    a gain of 0.1 on it."""
    membership = Found(attack="loss", threat="server", claims="membership", value=0.75)
    images = Found(attack="decoder", threat="server", claims="reconstruction", value=0.3, baseline=0.4)
    assert membership.over_guessing == 0.5
    assert images.over_guessing == pytest.approx(0.25)
    labels = Found(attack="label_histogram", threat="server", claims="histogram", value=0.1, baseline=0.4)
    assert labels.over_guessing == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("privacy", "name", "epsilon"),
    [
        ({}, "none", None),
        ({"training": {"epsilon": 8.0}}, "DP-SGD", 8.0),
        ({"logits": {"epsilon": 2.0}}, "messages", 2.0),
        ({"training": {"epsilon": 4.0}, "logits": {"epsilon": 4.0}}, "both", 8.0),
    ],
)
def test_protections_have_names(privacy, name, epsilon):
    assert kept_records.protection_of(privacy) == name
    assert kept_records.asked_epsilon(privacy) == epsilon


def test_defaults_are_not_written():
    cell = CellFigures(key="k", partition="iid", seed=0, protection="none", status="done")
    records = MethodRecords(method="fedavg", cells=(cell,))
    assert "global_test" not in json.dumps(kept_records._plain(records))


def test_libraries_beside_a_checkout_are_not_a_methods_code():
    own = {"modules": {"fedaudit.methods.fedavg": "3:a"}, "values": {"E": "2"}}
    beside = {"modules": {"fedaudit.methods.fedavg": "3:a", "pydantic.main": "3:b"}, "values": {"E": "2"}}
    assert kept_records.code_digest(beside) == kept_records.code_digest(own)
    other = {"modules": {"fedaudit.methods.fedavg": "3:c"}, "values": {"E": "2"}}
    assert kept_records.code_digest(other) != kept_records.code_digest(own)


def test_packed_results_get_the_places_that_packing_left_out():
    unpacked = kept_records._unpacked
    assert unpacked({"ran": False, "claims": "membership"}) == {"ran": False, "claims": "membership"}
    assert unpacked({"ran": True}) == {"client": {}, "ran": True}
    assert unpacked({"ran": True, "client": {"0": 1}})["client"] == {"0": 1}
    found = unpacked({"ran": True, "claims": "reconstruction", "matched_by": ["psnr"]})
    assert found == {"client": {}, "picture": None, "matched_by": ["psnr"], "ran": True, "claims": "reconstruction"}


def test_fields_without_a_guarantee_are_told_with_the_reason():
    entries = [
        [("b", 0.0, "why b"), ("a", 0.0, None), ("c", 1.5, "protected")],
        [("d", 0.0, "why d"), ("a", 2.0, "protected")],
    ]
    ledger = [
        SimpleNamespace(entries=[SimpleNamespace(field=f, noise_multiplier=z, condition=c) for f, z, c in of])
        for of in entries
    ]
    found = kept_records.unprotected(SimpleNamespace(ledger=ledger))
    assert found == {"a": "", "b": "why b", "d": "why d"}
    assert list(found) == ["a", "b", "d"]


def test_seconds_of_a_client_in_a_task_and_of_the_server_in_a_round(monkeypatch):
    """Two rounds of unequal participants; of a reconstruction the best baseline is kept."""
    record = reported._record("fedavg", 0, 0.8, releases=True)
    tasks = sum(len(row.participants) for row in record.rounds)
    assert (len(record.rounds) > 1, tasks > 1) == (True, True)
    monkeypatch.setattr(kept_records, "_seconds", lambda record, party: {"client": 6.0, "server": 9.0}[party])
    found = kept_records.cell_figures(record, [])
    assert found.seconds == pytest.approx(6 / tasks, abs=1e-4)
    assert found.server_seconds == pytest.approx(9 / len(record.rounds), abs=1e-4)
    rows = [("client 0", "task", 1.0), ("client 1", "task", 2.0), ("client 1", "train", 40.0), ("server", "round", 8.0),
            ("server", "task", 80.0), ("client 0", "round", 16.0)]  # fmt: skip
    monkeypatch.undo()
    timed = SimpleNamespace(timings=[SimpleNamespace(party=p, phase=of, wall_s=s) for p, of, s in rows])
    assert [kept_records._seconds(timed, party) for party in ("client", "server")] == [3.0, 8.0]


def test_the_best_baseline_of_a_reconstruction_is_kept():
    raw = reported._reconstruction("decoder", 0.4)
    one = raw["baselines"]["mean image"]
    raw["baselines"] |= {"better": {**one, "mse": {**one["mse"], "value": 0.1, "low": 0.05, "high": 0.15}}}
    result, histogram = results.validate_python([{**raw, "threat": "peer:1"}, reported._histogram()])
    found = kept_records._found(result)
    assert (found.baseline, found.threat, found.claims, found.leak) == (0.1, "peer", "reconstruction", True)
    assert kept_records._found(histogram).baseline == pytest.approx(histogram.pooled.uniform.value, rel=1e-4)
    assert histogram.pooled.uniform.value is not None
