"""`--isolate`: a party's process holds what is the party's, forgets it, and gives the same bits."""

from __future__ import annotations

import os
import subprocess
from types import SimpleNamespace

import pytest
import snoops
import torch
from safetensors.torch import load_file
from suite_tools import opened_in

from fedaudit.errors import ContractError, RunError, SettingError
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime import nursery
from fedaudit.runtime.runner import run
from fedaudit.wire.transcript import Transcript

DP = {"privacy": dict([parse_policy("training:noise=1,clip=1")]), "model": "mlp"}
CASES = {
    "fedavg": {**DP, "dropout": 0.2, "quorum": 0.25},
    "outside:Exchange": {},
    **{name: {} for name in ("dffke", "fedaf", "fedzge", "dfrd", "fedfree", "fedproto", "dsfl", "fedkd")},
}


def bits(record, folder):
    models = {path.name: load_file(path) for path in sorted((folder / "models").iterdir())}
    rows = [{k: v for k, v in row.items() if k != "at"} for row in Transcript(folder / "transcript").rows()]
    rounds = [row.model_dump(exclude={"wall_s"}) for row in record.rounds]
    plain = (rounds, record.result, record.traffic, record.transcript_digest, record.releases, record.ledger, rows)
    return plain, {(f, n): t for f, of in models.items() for n, t in of.items()}


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if i < 1 else pytest.mark.slow) for i, m in enumerate(CASES)]
)
def test_the_bits_are_those_of_the_serial_engine(method, tiny, tmp_path, nursery_at, monkeypatch):
    """Its processes are forks of the nursery's; the next tests start them as a user does."""
    of_nursery = SimpleNamespace(**{**vars(subprocess), "Popen": opened_in(nursery_at)})
    monkeypatch.setattr(nursery, "subprocess", of_nursery)  # libraries start processes of their own
    setting = tiny(method, rounds=2, **CASES[method])
    plain, models = bits(run(setting, out=tmp_path / "a"), tmp_path / "a")
    isolated = setting.model_copy(update={"isolate": True})
    also, also_models = bits(run(isolated, out=tmp_path / "b"), tmp_path / "b")
    assert also == plain
    assert also_models.keys() == models.keys()
    assert all(torch.equal(also_models[name], t) for name, t in models.items())


@pytest.fixture
def found(tiny, tmp_path, monkeypatch):
    """What clients and server of `snoops:Snoops` find in a round that is not theirs."""

    def make(**how):
        monkeypatch.setenv(snoops.SECRET, "of the user's")
        monkeypatch.chdir(tmp_path)
        snoops.LEFT.clear(), snoops.Snoops.shared.clear()
        record = run(tiny("snoops:Snoops", rounds=2, model="mlp", set={}, **how), out=tmp_path / "out")
        return [row.diagnostics["found"] for row in record.rounds]

    yield make
    os.environ.pop("LEFT", None)


@pytest.mark.long
def test_without_isolation_everything_can_be_found(found):
    """The control: what the next test finds nothing of is there to be found."""
    assert all(number > 1000 for number in found())


def test_a_process_holds_nothing_of_anybody_elses_and_leaves_nothing(found, tmp_path):
    assert found(isolate=True) == [0.0, 0.0]
    assert not (tmp_path / "left-by-a-client").exists()


@pytest.mark.slow
def test_a_process_that_dies_is_started_again(tiny, tmp_path):
    """It is lost as a worker on Ray is: nothing of the run changes, and nothing is billed for it."""
    (tmp_path / "died").mkdir()
    setting = tiny("dying:Dies", set={"folder": str(tmp_path / "died")}, **DP)
    record = run(setting.model_copy(update={"isolate": True}), out=tmp_path / "a")
    serial = run(setting, out=tmp_path / "b")  # it has died as often as it was to
    assert [row.redone for row in record.rounds] == [0, 1]
    assert [row.absent for row in record.rounds] == [[], []]
    assert record.transcript_digest == serial.transcript_digest
    assert record.ledger == serial.ledger


@pytest.mark.slow
def test_a_process_that_always_dies_ends_the_run(tiny, tmp_path):
    (tmp_path / "died").mkdir()
    values = {"folder": str(tmp_path / "died"), "times": 7}
    with pytest.raises(RunError, match=r"Client 1's task \(update, round 2\) was lost 3 times.*memory.*--resume"):
        run(tiny("dying:Dies", set=values, isolate=True, **DP), out=tmp_path / "a")
    assert len(list((tmp_path / "died").iterdir())) == 3


@pytest.mark.slow
def test_what_goes_wrong_on_the_server_is_said_as_ever(tiny, tmp_path):
    with pytest.raises(ContractError, match="a download that nobody bills"):
        run(tiny("snoops:Asks", rounds=1, model="mlp", set={}, isolate=True), out=tmp_path / "a")


def test_other_engines_are_refused(tiny, tmp_path):
    with pytest.raises(SettingError, match="Leave one of the two out"):
        run(tiny(isolate=True, engine="stacked"), out=tmp_path / "a")
