"""Runs and cells that start with the clients of another run."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from fedaudit.attack.replay import replay
from fedaudit.errors import RunError, SettingError, ThreatError
from fedaudit.runtime.folder import RunFolder, folder_name
from fedaudit.runtime.run_record import read_record
from fedaudit.runtime.runner import run
from fedaudit.runtime.starting_clients import first_setting
from fedaudit.runtime.task import ClientState
from fedaudit.setting import Setting
from fedaudit.suite.scheduler import _Queue, audit, make_cells
from fedaudit.suite.suite_file import Suite
from fedaudit.wire.codec import decode

LOCAL = {"method": "local", "rounds": 1, "set": {"E": 2, "B": 32, "eta": 0.1}}
STILL = {"E_k": 0, "E_prime": 0, "E": 1, "B": 16, "q": 2, "d_z": 8}  # clients that only answer
BASE = {"clients": 3, "model": "mlp", "rounds": 1, "eval_clients": False}


def setting(**values):
    return Setting.make(**{"method": "fedzge", "set": STILL, "start": LOCAL, **BASE, **values})


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder with the run `a` and, beside it, the one that it started with."""
    folder = tmp_path_factory.mktemp("start")
    run(setting(), out=folder / "a")
    return folder, folder / folder_name(first_setting(setting()))


def states(folder):
    kept = RunFolder(folder)
    return {k: decode(kept.client_state(k), ClientState) for k in range(3)}


def test_clients_begin_as_the_other_run_left_them(ran):
    """They are never trained here, so each must end with the very weights of its own model there; nobody's of another.
    What they have done with their records goes with them: a release of theirs is not free of it."""
    folder, first = ran
    before, after = states(first), states(folder / "a")
    for k in range(3):
        assert before[k].model.keys() == after[k].model.keys()
        assert all(torch.equal(before[k].model[name], after[k].model[name]) for name in before[k].model)
        assert after[k].plain_fits == before[k].plain_fits == 1
        other = before[(k + 1) % 3].model
        assert any(not torch.equal(before[k].model[name], other[name]) for name in other)
    notes = read_record(folder / "a").notes
    assert any(first.name in note and "1 rounds of local" in note for note in notes)


def test_the_other_run_is_carried_out_once(ran, tmp_path):
    folder, first = shutil.copytree(ran[0], tmp_path / "runs"), ran[1].name
    written = (folder / first / "record.json").stat().st_mtime_ns
    run(setting(set={**STILL, "images": "frozen"}), out=folder / "b")
    assert (folder / first / "record.json").stat().st_mtime_ns == written
    assert sorted(p.name for p in folder.iterdir()) == sorted(["a", "b", first])


def test_it_goes_on_after_a_stop(ran, tmp_path):
    """One round and then another is two rounds, to the bit; the other run's clients are not taken a second time."""
    learning, folder = {**STILL, "E_k": 1}, shutil.copytree(ran[0], tmp_path / "runs")
    run(setting(set=learning), out=folder / "one")
    two = run(setting(set=learning, rounds=2), out=folder / "one", resume=True)
    assert run(setting(set=learning, rounds=2), out=folder / "two").transcript_digest == two.transcript_digest
    assert len([note for note in two.notes if "started as" in note]) == 1


def test_what_was_spent_there_counts_here(tmp_path):
    """FedAvg's unprotected weights have no bound, and FedZGE's protected logits on top of them cannot have one."""
    logits = {"logits": {"noise_multiplier": 1.0, "sensitivity": "clip:3"}}
    spent = {"method": "fedavg", "rounds": 1, "set": {"E": 1}}
    record = run(setting(start=spent, privacy=logits), out=tmp_path / "a")
    for client in record.ledger:
        assert client.by_kind["weights"] == math.inf == client.epsilon
        assert client.by_kind["logits"] < math.inf


def test_only_the_methods_part_may_differ():
    with pytest.raises(SettingError, match=r"start\.seed: both runs have the same clients"):
        first_setting(setting(start={**LOCAL, "seed": 1}))
    same = first_setting(setting(seed=3, partition="iid", privacy={"logits": {"noise_multiplier": 1.0}}))
    assert (same.seed, same.partition, same.privacy, same.start, same.method) == (3, "iid", {}, None, "local")


def test_an_unfinished_run_is_not_taken(ran, tmp_path, monkeypatch):
    """As if another process had taken it up again."""
    folder = shutil.copytree(ran[0], tmp_path / "runs")
    first = folder / ran[1].name
    read_record(first).model_copy(update={"status": "running"}).save(first)
    monkeypatch.setattr("fedaudit.runtime.runner._is_done", lambda folder: True)
    with pytest.raises(RunError, match="is not finished: running"):
        run(setting(), out=folder / "b")


def test_shadows_are_refused(ran):
    folder = RunFolder(ran[0] / "a")
    messages = [e for e in folder.transcript.entries() if e.message == "Query" and e.client == 0]
    with pytest.raises(ThreatError, match="started as another run left them"):
        next(replay(folder.world, messages, folder.world.members(0), [torch.arange(4)]))


# --- suites ------------------------------------------------------------------------------------------------------


def suite(**values):
    methods = [{"method": "fedzge", "set": {**STILL, "images": images}} for images in ("trained", "frozen")]
    return Suite(base={**BASE, "start": LOCAL}, methods=methods, attacks=["loss"], **values)


def test_cells_share_one_first_cell_for_each_seed(tmp_path):
    cells = make_cells(suite(grid={"seed": [0, 1]}), tmp_path)
    assert [(cell.setting.method, cell.setting.seed) for cell in cells] == [
        ("local", 0), ("fedzge", 0), ("local", 1), ("fedzge", 1), ("fedzge", 0), ("fedzge", 1)
    ]  # fmt: skip
    assert [cell.attacks for cell in cells if cell.setting.method == "local"] == [[], []]


def test_a_cell_is_not_taken_before_the_one_it_starts_with_is_done(tmp_path):
    first, *others = make_cells(suite().model_copy(update={"attacks": []}), tmp_path)
    queue = _Queue([first, *others])
    assert queue.take() is first
    assert not queue.ready(), "the others wait"
    first.status = "done"
    assert queue.ready()
    assert queue.take() is others[0]


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_suite_runs_first_cells_first(jobs, quick, tmp_path):
    """With three processes at hand two have to wait for the first, and must not carry it out themselves."""
    few = suite().model_copy(update={"attacks": []})
    cells = audit(few, tmp_path, jobs=jobs)
    assert [cell.status for cell in cells] == ["done"] * 3
    began = [read_record(cell.folder).started for cell in cells]
    assert read_record(cells[0].folder).finished <= min(began[1:])


def test_cells_whose_first_cell_fails_say_so(quick, tmp_path):
    bad = suite().model_copy(update={"attacks": [], "base": {**BASE, "start": {**LOCAL, "set": {"nothing": 1}}}})
    with pytest.raises(RunError, match="No cell of the suite succeeded"):
        audit(bad, tmp_path, jobs=2)
    cells = make_cells(bad, tmp_path)
    audit_json = (tmp_path / "audit.json").read_text()
    assert audit_json.count(f"its clients come from {cells[0].folder.name}, which failed") == 2


def test_the_command_line_takes_a_table(fedaudit, tmp_path):
    options = [word for key, value in STILL.items() for word in ("--set", f"{key}={value}")]
    table = '{ method = "local", rounds = 1, set = { E = 1 } }'
    words = ["--method", "fedzge", *options, "--clients", 2, "--rounds", 1, "--model", "mlp", "--start", table]
    code, _, err = fedaudit("run", *words, "--out", tmp_path / "a")
    assert code == 0, err
    assert read_record(tmp_path / "a").setting.start == {"method": "local", "rounds": 1, "set": {"E": 1}}


def test_the_other_run_goes_on_where_it_was_stopped(tmp_path):
    """It was stopped after the first of two rounds; who starts with its clients carries out the second alone."""
    asked = setting(start={**LOCAL, "rounds": 2, "set": {**LOCAL["set"], "E": 1}})
    beside = tmp_path / folder_name(first_setting(asked))

    def stop(t, rounds, words):
        if t == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(first_setting(asked), out=beside, watch=stop)
    (before,) = read_record(beside).rounds
    run(asked, out=tmp_path / "a")
    after = read_record(beside)
    assert after.status == "done"
    assert after.rounds[0].wall_s == before.wall_s, "it was not carried out again"
    assert len(after.rounds) == 2
    assert not (tmp_path / "record.json").exists(), "each run has a folder of its own"
