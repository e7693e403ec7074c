"""Every column of the tables of runs, of runs in which everything differs, recomputed from the raw files."""

from __future__ import annotations

import csv
import io

import pytest
import unequal

from fedaudit.reports.run_tables import columns_of, tables_of

NAMES = ("digits-0", "digits-1", "mnist-0", "local-0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return unequal.write(tmp_path_factory.mktemp("unequal"))


@pytest.fixture(scope="module")
def tables(folder):
    return tables_of(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_runs(tables, folder, name):
    (row,) = [row for row in tables.rows["runs"] if row.run == name]
    told = unequal.raw(folder, name)
    last = told["rounds"][3]["utility"]
    dataset, _, seed = name.partition("-")
    sends = dataset != "local"
    assert (row.method, row.dataset, row.seed) == (
        ("uneven", dataset, int(seed)) if sends else ("local", "digits", 0)
    )  # fmt: skip
    assert (row.rounds, row.clients, row.status, row.compress) == (4, 4, "done", None)
    assert (row.accuracy, row.low, row.high) == tuple(last["global"]["test"][of] for of in ("accuracy", "low", "high"))
    assert (row.chosen_round, row.chosen_accuracy) == (2, told["rounds"][1]["utility"]["global"]["test"]["accuracy"])
    for direction in ("up", "down"):
        for convention in ("payload", "wire"):
            assert getattr(row, f"{direction}_{convention}") == unequal.sent(told, direction, convention)
    assert row.seconds == pytest.approx(unequal.work(told))
    assert row.peak_memory == 300_000_000 + 7_000_000 * row.seed
    assert row.more["own"] == last["clients"]["local_test"]["mean"]
    assert row.more["global_own"] == last["global"]["local_test"]["mean"]
    assert row.more["flops"] == 1000 + 250 + row.seed + 4000
    assert (row.started, row.finished) == (told["started"], told["finished"])
    assert row.digest == told["transcript_digest"]
    if not sends:
        assert (row.epsilon, row.leaks, row.refuted) == (0.0, 0, 0)
        assert (row.delta, row.auc, row.lower_bound) == (None, None, None)
        return
    audits, (strong, _) = unequal.AUDITS[dataset, row.seed], unequal.AUCS[dataset, row.seed]
    assert row.epsilon == unequal.most_spent(told) == 7.25 + 1.0 * row.seed
    assert row.delta == 0.02, "of those who released something: client 3, with 0.09, did not"
    assert row.lower_bound == max(a.lower_bound for a in audits)
    assert row.refuted == (1 if name == "digits-0" else 0)
    assert row.auc == strong
    assert row.leaks == (1 if dataset == "digits" else 0)
    assert row.more["claim"] == 5.0
    assert row.more["tpr"] == pytest.approx(strong - 0.5)
    assert row.more["up"] == pytest.approx(unequal.sent(told, "up") / 8)
    assert row.more["down"] == pytest.approx(unequal.sent(told, "down") / 8)
    assert unequal.times_asked(told) == 8
    assert row.more["per_byte"] == pytest.approx(100 * row.accuracy / (unequal.sent(told, "up") / 1e6))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_rounds(tables, folder, name):
    told = unequal.raw(folder, name)
    rows = [row for row in tables.rows["rounds"] if row.run == name]
    assert [row.round for row in rows] == [1, 2, 3, 4]
    assert [row.participants for row in rows] == [3, 2, 2, 1]
    assert [row.absent for row in rows] == [0, 1, 0, 0]
    for row, of in zip(rows, told["rounds"], strict=True):
        for column in ("up_payload", "up_wire", "down_payload", "down_wire", "wall_s"):
            assert getattr(row, column) == of[column], "of the round itself, not of all so far"
        if of["utility"] is None:
            assert (row.accuracy, row.low, row.high, row.clients_mean, row.clients_std, row.validation) == (None,) * 6
            continue
        test, clients = of["utility"]["global"]["test"], of["utility"]["clients"]["global_test"]
        assert (row.accuracy, row.low, row.high) == (test["accuracy"], test["low"], test["high"])
        each = clients["each"]
        assert row.clients_mean == pytest.approx(sum(each) / 3)
        assert row.clients_std == pytest.approx(clients["std"])
        assert row.validation == of["utility"]["global"]["validation"]


def test_rows_of_attacks(tables):
    rows = [row for row in tables.rows["attacks"] if row.run == "digits-1"]
    found = {(row.attack, row.measure): row for row in rows}
    for attack, auc in (("strong", 0.65), ("weak", 0.56)):
        row = found[attack, "auc"]
        assert (row.value, row.low, row.high) == (auc, pytest.approx(auc - 0.04), pytest.approx(auc + 0.04))
        assert found[attack, "tpr_at_fpr_0.1"].value == pytest.approx(auc - 0.3)
        assert found[attack, "tpr_at_fpr_0.01"].value == pytest.approx(auc - 0.5)
        assert found[attack, "tpr_at_fpr_0.001"].value is None
        assert "1000 non-members" in found[attack, "tpr_at_fpr_0.001"].reason
        assert (row.threat, row.leak) == (("server", True) if attack == "strong" else ("outsider", False))
    assert (found["blind_prior", "auc"].blind, found["strong", "auc"].blind) == (True, False)
    missing = found["peek", None]
    assert (missing.ran, missing.value, missing.reason, missing.threat) == (False, None, "it sees nothing", "peer:1")


def test_rows_of_releases(tables, folder):
    rows = [row for row in tables.rows["releases"] if row.run == "digits-1"]
    assert [row.client for row in rows] == [0, 1, 2]
    assert [row.records for row in rows] == [10, 25, 60]
    assert [row.releases for row in rows] == [2, 2, 4], "rounds in which each took part"
    assert [row.noise_multiplier for row in rows] == [1.5, 1.25, 1.0]
    assert [row.epsilon_of_kind for row in rows] == [2.5 + 0.5, 7.25 + 1.0, 4.0 + 1.5]
    assert [row.delta for row in rows] == [0.005, 0.02, 0.01], "each epsilon with its own delta"
    assert {row.seen_by for row in rows} == {"server"}
    assert not [row for row in tables.rows["releases"] if row.run == "local-0"]


@pytest.mark.parametrize("table", ["runs", "rounds", "attacks", "releases"])
def test_csv_has_every_row_and_column(tables, table):
    rows = list(csv.DictReader(io.StringIO(tables.csv(table))))
    assert len(rows) == len(tables.rows[table])
    assert list(rows[0]) == columns_of(table)
    for told, row in zip(rows, tables.rows[table], strict=True):
        values = {**vars(row), **getattr(row, "more", {})}
        for column, text in told.items():
            assert text == ("" if values[column] is None else str(values[column])), column
