"""The global model on each client's own held-out records: in the record, in `show`, in a report's table."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from fedaudit import Setting, read_record, run
from fedaudit.cli.listing import summary
from fedaudit.reports.runs import grouped, read_runs
from fedaudit.reports.summary_rows import rows_of
from fedaudit.runtime.world import World

SETTING = {"device": "cpu", "clients": 4, "partition": "dirichlet:0.2", "rounds": 1, "set": {"eta": 0.1, "B": 16}}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    return folder, run(Setting.make(method="fedavg", **SETTING), out=folder)


def test_it_is_the_published_model_on_every_clients_own_records(done):
    """Recomputed from the published file: per client right / held out, then the plain mean over clients."""
    folder, record = done
    world = World(record.setting)
    model = world.build("cnn")
    model.load_state_dict(load_file(folder / "models" / "global.safetensors"))
    each = []
    for k in range(4):
        x, y = world.federation.nonmembers(k)
        each.append((model(x).argmax(1) == y).double().mean().item())
    found = record.result.last.global_.local_test
    assert found.each == pytest.approx(each)
    assert found.mean == pytest.approx(sum(each) / 4)
    assert found.std == pytest.approx((sum((a - sum(each) / 4) ** 2 for a in each) / 4) ** 0.5)
    assert found.each != record.result.last.clients.local_test.each, "the clients trained on from it"
    assert len(set(each)) > 1, "a test that could not tell one client's records from another's"


def test_it_needs_no_client_to_be_opened(tmp_path, done):
    record = run(Setting.make(method="fedavg", **SETTING, eval_clients=False), out=tmp_path / "a")
    assert record.result.last.global_.local_test == done[1].result.last.global_.local_test


def test_it_is_shown_under_its_own_name(done):
    mean = done[1].result.last.global_.local_test.mean
    lines = [line for line in summary(done[1]) if "global model, own held-out sets" in line]
    assert lines
    assert f"{100 * mean:.2f}" in lines[0].replace("%", "")
    (row,) = rows_of(grouped(read_runs(done[0])[0]))
    assert row.cells["global_own"].value == mean
    assert row.cells["own"].value == done[1].result.last.clients.local_test.mean != mean


def test_without_a_global_model_or_held_out_records_there_is_none(tmp_path):
    local = run(Setting.make(method="local", **SETTING), out=tmp_path / "a")
    assert local.result.last.global_ is None
    (row,) = rows_of(grouped(read_runs(tmp_path / "a")[0]))
    assert (row.cells["global_own"].value, row.cells["global_own"].reason) == (None, "not measured")
    nothing = run(Setting.make(method="fedavg", **SETTING, holdout=0), out=tmp_path / "b")
    assert nothing.result.last.global_.local_test is None
    assert not any("own held-out sets" in line for line in summary(read_record(tmp_path / "b")))
