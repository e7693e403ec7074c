"""Kept records: a cell's figures are those of its run, files are small and versioned, new cells change no others."""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from types import SimpleNamespace

import pytest
import reported
import unequal

import fedaudit
from fedaudit.errors import SettingError
from fedaudit.runtime.attack_result import results
from fedaudit.runtime.run_record import REFUSED, read_record
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


# --- a run in which everything differs: helpers/runs/unequal ---------------------------------------------------------


@pytest.fixture(scope="module")
def uneven():
    """Four rounds with eight tasks in all, and the attacks on them: two that count, one blind one, one that did not."""
    return unequal.record(), results.validate_python(unequal.attacks("digits", 0))


def test_every_figure_of_an_uneven_run_is_kept(uneven):
    """Clients' tasks took 3.5, 0.75 and 8 s; rounds 1, 4, 9 and 16 s; attacks 0.25, 2 and 0.125 s."""
    record, attacks = uneven
    up, down = (sum(getattr(row, f"{way}_payload") for row in record.rounds) for way in ("up", "down"))
    found = kept_records.cell_figures(record.model_copy(update={"harness": "of today"}), attacks, "its report failed")
    assert found.model_dump(exclude={"attacks", "code", "key"}) == {
        "partition": "dirichlet:0.5", "seed": 0, "protection": "both", "asked": 8.0, "status": "done",
        "reason": "its report failed", "harness": "of today", "global_test": 0.74, "own": pytest.approx(0.7),
        "common": pytest.approx(0.74 - 0.34 / 3, rel=1e-4), "epsilon": 7.25, "open": {}, "up": round(up / 8, 1),
        "down": round(down / 8, 1), "seconds": round(12.25 / 8, 4), "server_seconds": round(1.75 / 4, 4),
        "wall": round(30 + 2.375, 2),
    }  # fmt: skip
    assert len(found.key) == 12
    assert [(of.attack, of.threat, of.value, of.leak) for of in found.attacks] == [
        ("weak", "outsider", 0.53, False),
        ("strong", "server", 0.71, True),
    ]
    assert [(of.low, of.high, of.baseline) for of in found.attacks] == [(0.49, 0.57, None), (0.67, 0.75, None)]


def test_what_was_not_reached_is_not_kept(uneven):
    """A run without a global model, without clients' models, without rounds, with a client of no finite epsilon."""
    record, _ = uneven
    last = record.result.last

    def found(reached=last, **change):
        changed = record.model_copy(update={"result": record.result.model_copy(update={"last": reached}), **change})
        return kept_records.cell_figures(changed, [])

    assert found(last.model_copy(update={"global_": None})).global_test is None
    alone = found(last.model_copy(update={"clients": None}))
    assert (alone.global_test, alone.own, alone.common) == (0.74, None, None)
    half = found(last.model_copy(update={"clients": last.clients.model_copy(update={"local_test": None})}))
    assert (half.own, half.common is None) == (None, False)
    other = found(last.model_copy(update={"clients": last.clients.model_copy(update={"global_test": None})}))
    assert (other.own is None, other.common) == (False, None)
    for least in (math.inf, None):
        ledger = [record.ledger[0].model_copy(update={"epsilon": least}), *record.ledger[1:]]
        assert found(ledger=ledger).epsilon is None
    assert found(ledger=[]).epsilon == 0.0
    empty = found(rounds=[])
    assert (empty.seconds, empty.server_seconds, empty.wall, empty.up) == (12.25, 1.75, 0.0, record.bytes("up"))


@pytest.mark.parametrize(
    ("status", "reached", "failed", "told"),
    [
        ("refused", False, "ignored", ("refused", "no logits; none at all")),
        ("running", True, "it diverged", ("failed", "it diverged")),
        ("running", True, None, ("failed", "it did not end")),
        ("done", False, None, ("failed", "it did not end")),
    ],
)
def test_a_cell_without_a_result_says_why(status, reached, failed, told, uneven):
    record, attacks = uneven
    result = record.result if reached else record.result.model_copy(update={"last": None})
    notes = [f"{REFUSED}no logits", "none at all"]
    record = record.model_copy(update={"status": status, "result": result, "notes": notes})
    found = kept_records.cell_figures(record, attacks, failed)
    assert (found.status, found.reason, found.asked, found.attacks, found.wall) == (*told, 8.0, (), 0.0)


def test_the_cells_of_a_method_are_in_order_and_its_reasons_are_the_servers(uneven):
    """By partition, protection, then the weakest promise last, then the seed. An attack that ran once has no reason."""
    record, (weak, *_, peek) = uneven

    def made(seed, privacy, partition="iid", method="fedavg"):
        setting = record.setting.model_copy(
            update={"seed": seed, "privacy": privacy, "partition": partition, "method": method}
        )
        return record.model_copy(update={"setting": setting})

    def told(threat, reason, attack="peek"):
        return peek.model_copy(update={"threat": threat, "reason": reason, "attack": attack})

    weakly, strongly = {"logits": {"epsilon": 9.0}}, {"logits": {"epsilon": 1.0}}
    cells = [
        (made(1, strongly), [told("peer:1", "first"), told("server", "second"), told("peer:2", "third")], None),
        (made(0, weakly), [weak, told("peer:1", "not in this one", "weak"), told("peer:0", "earlier", "gap")], None),
        (made(0, strongly), [told("peer:1", "later", "gap")], None),
        (made(2, {}, "classes:2"), [], None),
        (made(3, {}, method="dsfl"), [], None),
    ]
    first, second = kept_records.gathered(cells)
    assert (first.method, len(first.cells), second.method) == ("dsfl", 1, "fedavg")
    assert [(of.partition, of.asked, of.seed) for of in second.cells] == [
        ("classes:2", None, 2), ("iid", 9.0, 0), ("iid", 1.0, 0), ("iid", 1.0, 1),
    ]  # fmt: skip
    assert second.not_run == {"gap": "earlier", "peek": "second"}
    assert [of.model_dump() for of in second.fields] == [
        {"field": "Local.w", "kind": "weights", "via": "model", "unit": "client"}
    ]


def test_cells_are_read_from_a_folder_and_from_a_packed_file(uneven, tmp_path):
    """The reasons of failed cells are in the audit's note. A packed file has a line for each cell."""
    record, _ = uneven
    for name in ("b", "a"):
        record.model_copy(update={"transcript_digest": name}).save(tmp_path / "runs" / name)
    rows = [("runs/a", "failed", "why a"), ("runs/b", "done", "told"), ("runs/c", "failed", None)]
    noted = [{"folder": folder, "status": status, "reason": reason} for folder, status, reason in rows]
    (tmp_path / "audit.json").write_text(json.dumps({"cells": noted}))
    found = list(kept_records.cells_of(tmp_path))
    assert [(of.transcript_digest, list(results), why) for of, results, why in found] == [
        ("a", [], "why a"),
        ("b", [], None),
    ]
    attack = {key: value for key, value in unequal.attacks("digits", 0)[1].items() if key != "client"}
    plain = json.loads(record.model_dump_json(by_alias=True))
    lines = [{"record": plain, "attacks": [attack], "folder": name} for name in ("b", "a")]
    with lzma.open(tmp_path / "packed.xz", "wt") as file:
        file.write("\n".join(map(json.dumps, lines)))
    packed = list(kept_records.cells_of(tmp_path / "packed.xz"))
    assert [why for *_, why in packed] == [None, "why a"]
    assert [of.transcript_digest for of, *_ in packed] == [record.transcript_digest] * 2
    assert [[(of.attack, of.pooled.auc.value) for of in results] for _, results, _ in packed] == [
        [("strong", 0.71)]
    ] * 2
    assert kept_records._errors(tmp_path / "nowhere") == {}


def test_kept_figures_without_a_guess_to_compare_with():
    def over(claims, value, baseline=None):
        return Found(attack="a", threat="server", claims=claims, value=value, baseline=baseline).over_guessing

    assert over("participation", 0.8) == pytest.approx(0.6)
    assert over("membership", None) is None
    assert over("histogram", 0.1) is None
    assert over("reconstruction", 0.1, 0.0) is None
    assert over("membership", 0.0) == -1.0


def test_a_short_figure_has_five_digits():
    assert [kept_records._short(value) for value in (None, 0.0, 123.456789, 0.000123456789)] == [
        None, 0.0, 123.46, 0.00012346,
    ]  # fmt: skip


def test_a_digest_is_of_a_methods_own_modules():
    """Eight bytes of BLAKE2b over sorted JSON. Elsewhere, where no module is of this package, all count."""

    def by_hand(code):
        return hashlib.blake2b(json.dumps(code, sort_keys=True).encode(), digest_size=8).hexdigest()

    mine = {"values": {"E": "2"}, "modules": {"my.method": "3:a", "my.other": "3:b"}}
    assert kept_records.code_digest(mine) == by_hand(mine)
    both = {"values": {"E": "2"}, "modules": {"fedaudit.methods.x": "1:c", "my.other": "3:b"}}
    assert kept_records.code_digest(both) == by_hand({"values": {"E": "2"}, "modules": {"fedaudit.methods.x": "1:c"}})
    assert kept_records.code_digest(None) == by_hand(None)


def test_files_of_methods_of_ones_own(tmp_path):
    """A colon is no part of a file's name; a cell that is written again takes the place of its earlier figures."""
    attack = Found(attack="loss", threat="server", claims="membership", value=0.6, low=0.5, high=0.7, leak=True)
    one, two = (
        CellFigures(key=key, partition="iid", seed=seed, protection="none", status="done", attacks=(attack,))
        for key, seed in (("one", 1), ("two", 2))
    )
    records = MethodRecords(method="my.a:B", not_run={"gap": "why"}, cells=(one, two))
    (file,) = kept_records.write_records(tmp_path / "new" / "place", [records])
    assert file == tmp_path / "new" / "place" / "my.a_B.json"
    assert kept_records.read_records(file.parent) == {"my.a:B": records}
    raw = json.loads(file.read_text())
    assert raw["version"] == 1
    assert raw["cells"][0]["attacks"] == [["loss", "server", "membership", 0.6, 0.5, 0.7, True, None]]
    again = one.model_copy(update={"wall": 9.0, "attacks": ()})
    kept_records.write_records(file.parent, [MethodRecords(method="my.a:B", cells=(again,))])
    found = kept_records.read_file(file)
    assert (found.cells, found.not_run) == ((two, again), {})
    assert len(file.read_text().splitlines()) == 4


def test_figures_that_are_not_given():
    cell = CellFigures(key="k", partition="iid", seed=3, protection="none", status="failed")
    assert cell.model_dump(exclude={"key", "partition", "seed", "protection", "status"}) == {
        "asked": None, "reason": None, "code": "", "harness": None, "global_test": None, "own": None, "common": None,
        "epsilon": None, "open": {}, "up": 0.0, "down": 0.0, "seconds": 0.0, "server_seconds": 0.0, "wall": 0.0,
        "attacks": (),
    }  # fmt: skip
    records = MethodRecords(method="fedavg")
    assert (records.version, records.fields, records.not_run, records.cells) == (1, (), {}, ())


def test_an_attack_with_too_few_figures_is_refused(tmp_path):
    cell = {"key": "k", "partition": "iid", "seed": 0, "protection": "none", "status": "done", "attacks": [["loss"]]}
    (tmp_path / "fedavg.json").write_text(json.dumps({"version": 1, "method": "fedavg", "cells": [cell]}))
    with pytest.raises(ValueError, match="zip"):
        kept_records.read_records(tmp_path)
