"""Suites: reading them, resuming, failing cells, attacks, budgets, forecasts, one audit at a time."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from suite_tools import comparable

from fedaudit import read_record, run
from fedaudit.errors import FedauditError, RunError
from fedaudit.runtime.folder import folder_name
from fedaudit.runtime.run_record import audit_seconds
from fedaudit.setting import Setting
from fedaudit.suite import scheduler as auditing
from fedaudit.suite.cell import Cell, carry_out, look, missing
from fedaudit.suite.forecast import Pace, duration, forecast, total
from fedaudit.suite.scheduler import audit, make_cells
from fedaudit.suite.suite_file import Suite, read_suite
from fedaudit.suite.time_left import TimeLeft

SMALL = {"clients": 3, "rounds": 1, "set": {"E": 1}, "model": "mlp", "aux": 0.6}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(text)
    return path


# --- reading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("attack = []", r"Unknown key of the suite 'attack'\. Did you mean 'attacks'\?"),
        ("[base]\nround = 3", r"Unknown setting 'round' in \[base\]\. Did you mean 'rounds'\?"),
        ("[grid]\nseeds = [0]", r"Unknown setting 'seeds' in \[grid\]\. Did you mean 'seed'\?"),
        ('[[methods]]\nmetod = "local"', r"Unknown setting 'metod' in \[\[methods\]\]\. Did you mean 'method'\?"),
        ("[grid]\nseed = 0", "grid.seed = 0: input should be a valid list"),
        ("[grid]\nseed = []", r"no cell, because a list in \[grid\] is empty"),
        ("[base]\nrounds = -1", "rounds = -1"),
        ('[base]\nmethod = "fedavgg"', "Unknown method 'fedavgg'. Did you mean 'fedavg'"),
        ('[base]\ndataset = "digit"', "'digit'.*[Dd]id you mean 'digits'"),
        ('attacks = ["los"]', "Unknown attack 'los'. Did you mean 'loss'"),
        ('attacks = [{ attack = "loss", stepps = 3 }]', "Unknown setting of loss 'stepps'"),
        ("attacks = [{ name = 'loss' }]", "does not name an attack"),
        ('attacks = ["loss", "loss"]', "'loss' is listed twice"),
        ("trials = 9\ntrials_on = [3]", "no cell has the seed 3"),
        ('threats = ["sever"]', "Unknown threat 'sever'"),
        ("[base.privacy.embedings]\nepsilon = 1", "'embedings'.*Did you mean 'embeddings'"),
        ("[base.privacy.weights]\nepsilon = 1", "Use DP-SGD"),
        ("[base.privacy.logits]\neps = 1", "'eps'.*Did you mean 'epsilon'"),
        ("[[budgets]]\nmaximum = 1", "Unknown key of a budget in budgets 'maximum'. Did you mean 'max'"),
        ("[[budgets]]\ndirection = 'up'", "needs one of max, min and baseline"),
        ("[[budgets]]\nmethod = 'fedaf'\nmax = 1", "about the method 'fedaf', which no cell has"),
        ("budgets = 'nowhere.toml'", "There is no file"),
        ("budgets = [3]", "3 is not a budget"),
        ("[base", "not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_suite_is_said_before_anything_runs(tmp_path, text, words):
    with pytest.raises(FedauditError, match=rf"(?s)s\.toml.*{words}"):
        read_suite(written(tmp_path, text))


def test_a_bad_suite_is_one_paragraph_and_exit_code_2(fedaudit, tmp_path):
    code, out, err = fedaudit("audit", written(tmp_path, "[base]\nround = 3"), "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_method_wins_over_the_grid_and_the_grid_over_the_base():
    suite = Suite(base={"rounds": 1, "seed": 7}, grid={"seed": [0, 1]}, methods=[{"method": "local"}, {"seed": 5}])
    assert [(cell.method, cell.seed, cell.rounds) for cell in suite.cells()] == [
        ("local", 0, 1), ("local", 1, 1), ("fedavg", 5, 1),
    ]  # fmt: skip


def test_a_cell_is_named_by_what_it_computes():
    """Where and how it is carried out changes nothing; anything else does."""
    one = Setting.make(rounds=1)
    assert folder_name(one) == folder_name(Setting.make(rounds=1, engine="ray", workers=2, data_dir="/elsewhere"))
    others = [Setting.make(rounds=1, **{key: value}) for key, value in (("seed", 1), ("set", {"E": 2}), ("aux", 0.2))]
    assert len({folder_name(s) for s in [one, *others]}) == 4


def test_budgets_of_a_suite_from_a_file_or_in_it(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "budgets.toml").write_text(
        '[[budget]]\nmax = "1 MiB"\n[[budget]]\nbaseline = "main.json"\nmax_growth = "1 %"\n'
    )
    first, second = read_suite(written(tmp_path, 'budgets = "b/budgets.toml"')).budgets
    assert first.max == "1 MiB"
    assert second.baseline == str(tmp_path / "b" / "main.json"), "beside the file that names it"
    (inline,) = read_suite(written(tmp_path, 'budgets = { max = "2 MiB" }')).budgets
    assert inline.max == "2 MiB"
    (table,) = read_suite(written(tmp_path, '[[budgets]]\nbaseline = "x.json"\nmax_growth = "1 %"')).budgets
    assert table.baseline == str(tmp_path / "x.json")


# --- carrying out ----------------------------------------------------------------------------------------------


def test_finished_cells_are_left_alone_failing_ones_listed_and_new_attacks_run_alone(quick, tmp_path, monkeypatch):
    suite = Suite(
        base=SMALL,
        attacks=["loss"],
        methods=[{"method": "outside:Broken", "set": {}}, {"method": "fedavg"}, {"method": "fedavg", "seed": 1}],
    )
    broken, one, two = audit(suite, tmp_path, jobs=2)
    assert broken.status == "failed"
    assert "ZeroDivisionError" in broken.error
    assert (one.status, two.status) == ("done", "done")
    saved = json.loads((tmp_path / "audit.json").read_text())["cells"]
    assert [row["status"] for row in saved] == ["failed", "done", "done"]
    assert "ZeroDivisionError" in saved[0]["reason"]

    before = [comparable(cell.folder, timings=True) for cell in (one, two)]
    again = audit(suite, tmp_path)
    assert [cell.status for cell in again] == ["failed", "done", "done"]
    assert [comparable(cell.folder, timings=True) for cell in (one, two)] == before, "not touched, not even its times"

    wider = suite.model_copy(update={"attacks": ["loss", "outside:Margin"], "threats": ["server", "outsider"]})
    audit(wider, tmp_path)
    found = {(a.attack, a.threat): a for a in read_record(one.folder).attacks if not a.blind}
    assert set(found) == {(a, t) for a in ("loss", "outside:Margin") for t in ("server", "outsider")}
    assert found["loss", "server"].model_dump(mode="json") in before[0]["attacks"], "the old result with its old time"
    assert comparable(one.folder, timings=True) | {"attacks": []} == before[0] | {"attacks": []}


@pytest.mark.parametrize(("times", "status"), [(1, "done"), (9, "failed")])
@pytest.mark.parametrize("lost", [False, True], ids=["memory", "device"])
def test_a_cell_that_lacked_memory_or_the_device_beside_others_goes_on(quick, tmp_path, times, status, lost):
    """Without memory, beside fewer, and it fails where nobody else is at work. A device may have gone with a process
    that was killed beside it: that cell goes on once. What it had done is kept."""
    left = tmp_path / "left"
    left.write_text(str(times))
    hungry = {"method": "outside:Hungry", "set": {"left": str(left), "device": lost}}
    others = [{"method": "fedavg"}, {"method": "fedavg", "seed": 1}]
    suite = Suite(base={**SMALL, "rounds": 3}, attacks=["loss"], methods=[hungry, *others])
    said = []
    found = audit(suite, tmp_path / "out", watch=lambda *told: said.append(told[2]), jobs=2)
    assert [cell.status for cell in found] == [status, "done", "done"]
    memory, device = "out of memory beside other cells, goes on when fewer", "device failed beside other cells, goes on"
    assert any((device if lost else memory) in text for text in said)
    assert not any((memory if lost else device) in text for text in said)
    assert int(left.read_text()) == max(0, times - 2), "once beside the other, once alone"
    record = read_record(found[0].folder)
    if status == "done":
        alone = run(found[0].setting, out=tmp_path / "alone")
        assert [r.utility for r in record.rounds] == [r.utility for r in alone.rounds]
    else:
        assert ("the device failed" if lost else "ran out of memory") in found[0].error
        assert len(record.rounds) == 1


def test_a_device_that_was_lost_while_others_were_at_work_is_tried_again_when_they_have_ended(quick, tmp_path):
    """All that a killed process takes along fail one after the other: the last of them has nobody beside it any more.
    What was lost is over, so that cells go on beside as many as before."""
    other = Setting.make(**{**SMALL, "method": "fedavg"})
    ended = tmp_path / "out" / "runs" / folder_name(other) / "seal.json"
    (tmp_path / "left").write_text("1")
    lost = {"left": str(tmp_path / "left"), "device": True, "after": str(ended)}
    suite = Suite(base=SMALL, attacks=[], methods=[{"method": "outside:Hungry", "set": lost}, {"method": "fedavg"}])
    assert [cell.status for cell in audit(suite, tmp_path / "out", jobs=2)] == ["done", "done"]


@pytest.mark.parametrize(
    ("before", "crowded", "beside", "again"),
    [
        (None, "memory", 1, True), ("memory", "memory", 1, True), (None, "memory", 0, False), (None, None, 3, False),
        (None, "device", 1, True), ("device", "device", 3, False), ("memory", "device", 1, True),
        (None, "device", 0, False), ("device", "memory", 1, True),
    ],
)  # fmt: skip
def test_what_others_may_have_caused_is_tried_again(before, crowded, beside, again):
    """Memory as often as somebody was at work beside it, a device once."""
    cell = bare("a")
    cell.crowded = before
    assert auditing._others_may_have_caused(cell, crowded, beside) is again


def test_an_attack_counts_for_its_transcript_its_settings_and_all_clients(tmp_path):
    from fedaudit.attack.attack_run import attack_run

    setting = Setting.make(**SMALL)
    cell = Cell(tmp_path / "a", setting, ["suite_tools:Scaled"], ["server"])
    run(setting, out=cell.folder)
    attack_run(cell.folder, attacks=["suite_tools:Scaled"], clients=[1])
    assert len(missing(cell, read_record(cell.folder))) == 1, "of one client only"
    carry_out(cell)
    assert cell.status == "done"
    assert missing(cell, read_record(cell.folder)) == []
    cell.attacks = [{"attack": "suite_tools:Scaled", "by": 1.0}]
    assert missing(cell, read_record(cell.folder)) == [], "the default, written out"
    cell.attacks = [{"attack": "suite_tools:Scaled", "by": -1.0}]
    assert len(missing(cell, read_record(cell.folder))) == 1
    cell.status = "to do"
    carry_out(cell)
    assert {"by": -1.0} in [a.settings for a in read_record(cell.folder).attacks]
    run(setting.model_copy(update={"rounds": 2}), out=cell.folder, resume=True)
    assert len(missing(cell, read_record(cell.folder))) == 1, "the transcript is another one"


def test_one_failing_attack_fails_its_cell_and_stops_no_other_attack(tmp_path):
    cell = Cell(tmp_path / "a", Setting.make(**SMALL), ["suite_tools:BrokenAttack", "loss"], ["server"])
    carry_out(cell)
    assert cell.status == "failed"
    assert cell.reason.startswith("attack suite_tools:BrokenAttack by server: ZeroDivisionError")
    assert "loss" in [a.attack for a in read_record(cell.folder).attacks]


@pytest.mark.parametrize("where", ["an attack", "all of them"])
@pytest.mark.parametrize("lacked", ["memory", "device", None])
def test_an_attack_that_lacks_memory_or_the_device_says_so(tmp_path, monkeypatch, lacked, where):
    """So that its cell goes on beside fewer; what a later try does not lack any more is not told."""
    errors = {"memory": torch.OutOfMemoryError("CUDA out of memory"), "device": RuntimeError("CUDA error: unspecified")}
    error = errors.get(lacked, ValueError("its own"))

    def fails(folder, *, attacks, threat, watch, failed):
        if where == "all of them" and threat == "server":
            raise error
        if threat == "server":
            failed("loss", error)
        failed("entropy", ValueError("its own, later"))

    cell = Cell(tmp_path / "a", Setting.make(**SMALL), ["loss"], ["server", "outsider"])
    with monkeypatch.context() as patched:
        patched.setattr("fedaudit.suite.cell.attack_run", fails)
        carry_out(cell)
    assert (cell.status, cell.crowded) == ("failed", lacked)
    cell.status = "to do"
    carry_out(cell)
    assert (cell.status, cell.crowded) == ("done", None)


def test_claims_that_could_not_be_tried_for_lack_of_memory_say_so(tmp_path, monkeypatch):
    def fails(folder, trials):
        raise torch.OutOfMemoryError("CUDA out of memory")

    privacy = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}
    cell = Cell(tmp_path / "a", Setting.make(**SMALL, privacy=privacy), [], ["server"], trials=20)
    monkeypatch.setattr("fedaudit.epsilon.release_path.audit_releases", fails)
    carry_out(cell)
    assert cell.reason.startswith("claims of epsilon: OutOfMemoryError")
    assert (cell.status, cell.crowded) == ("failed", "memory")


def test_attacks_of_a_cell_share_its_blind_baselines(tmp_path, monkeypatch):
    """Each membership result is held against them; they are made once for a threat, not once for each attack."""
    from fedaudit.attacks.baselines.blind_prior import BlindPrior

    made = []
    of = BlindPrior.run
    monkeypatch.setattr(BlindPrior, "run", lambda self, scene: made.append(scene.target) or of(self, scene))
    cell = Cell(tmp_path / "a", Setting.make(**SMALL), ["loss", "entropy"], ["server", "outsider"])
    carry_out(cell)
    assert cell.status == "done"
    clients = list(range(cell.setting.clients))
    assert made == [*clients, *clients]
    found = {(a.attack, a.threat): a for a in read_record(cell.folder).attacks}
    for name in ("loss", "entropy"):
        for threat in ("server", "outsider"):
            assert set(found[name, threat].against_blind) == {"blind_nearest", "blind_pixels", "blind_prior"}
            assert found[name, threat].verdict


def test_claims_are_tried_in_runs_of_the_named_seeds_alone(tmp_path):
    suite = Suite(base=SMALL | {"rounds": 1}, grid={"seed": [0, 1, 2]}, trials=20, trials_on=[1])
    assert [(cell.setting.seed, cell.trials) for cell in make_cells(suite, tmp_path)] == [(0, 0), (1, 20), (2, 0)]
    everywhere = make_cells(suite.model_copy(update={"trials_on": None}), tmp_path)
    assert [cell.trials for cell in everywhere] == [20, 20, 20]


def test_a_killed_cell_stops_no_other(quick, tmp_path):
    """What the kernel does when memory is short."""
    suite = Suite(base=SMALL, attacks=[], methods=[{"method": "suite_tools:Killed", "set": {}}, {"method": "fedavg"}])
    killed, other = audit(suite, tmp_path)
    assert killed.status == "failed"
    assert "its process ended with signal 9" in killed.reason
    assert other.status == "done"


def test_when_nothing_comes_through(quick, tmp_path):
    suite = Suite(base={**SMALL, "method": "outside:Broken", "set": {}}, attacks=[])
    with pytest.raises(RunError, match=r"No cell of the suite succeeded\..*ZeroDivisionError"):
        audit(suite, tmp_path)


def test_a_damaged_record_fails_its_cell_alone(quick, tmp_path):
    suite = Suite(base=SMALL, attacks=[], grid={"seed": [0, 1]})
    first, second = audit(suite, tmp_path)
    (first.folder / "record.json").write_text("{")
    first, second = audit(suite, tmp_path)
    assert first.status == "failed"
    assert "cannot be read" in first.reason
    assert second.status == "done"


def test_two_audits_of_one_folder_do_not_clash(quick, tmp_path, monkeypatch):
    monkeypatch.setattr(auditing, "PATIENCE", 0.1)
    suite = Suite(base=SMALL, attacks=[])
    with auditing.locked(tmp_path, "audit"), pytest.raises(RunError, match="Another audit is at work in"):
        audit(suite, tmp_path)
    assert audit(suite, tmp_path)[0].status == "done"


@pytest.mark.slow
def test_on_ray_the_cells_are_the_same(quick, ray_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(auditing, "make_engine", lambda setting: ray_engine)
    monkeypatch.setattr(ray_engine, "close", lambda: None)
    suite = Suite(base=SMALL, attacks=["loss"], grid={"seed": [0, 1]})
    serial, on_ray = audit(suite, tmp_path / "a"), audit(suite, tmp_path / "b", engine="ray")
    assert [cell.folder.name for cell in serial] == [cell.folder.name for cell in on_ray]
    for a, b in zip(serial, on_ray, strict=True):
        assert read_record(b.folder).setting.engine == "ray"
        assert comparable(a.folder) == comparable(b.folder)
    with pytest.raises(FedauditError, match="--jobs 2 does not go with the engine ray"):
        audit(suite, tmp_path / "c", engine="ray", jobs=2)
    with pytest.raises(FedauditError, match="engine = 'rai'"):
        audit(suite, tmp_path / "c", engine="rai")


@pytest.mark.long
def test_progress_with_time_left_is_told_to_whoever_watches(quick, tmp_path):
    """Nothing while no attack was measured; then something until the end, the report among it."""
    told = []
    suite = Suite(base={**SMALL, "rounds": 3}, attacks=["loss"], grid={"seed": [0, 1]})
    audit(suite, tmp_path, watch=lambda *what: told.append(what), report=True)
    assert told[0] == (0, 2, "0 of 2 cells", None)
    done, whole, what, left = told[-1]
    assert (done, whole, what) == (2, 2, "2 of 2 cells, writing the report")
    assert left > 0
    assert [done for done, *_ in told] == sorted(done for done, *_ in told), "it never goes back"
    second = [left for _, _, what, left in told if what.startswith("1 of 2 cells, fedavg: round 2")]
    assert second
    assert all(left is not None and left > told[-1][3] for left in second)
    first = [left for _, _, what, left in told if what.startswith("0 of 2 cells, fedavg: round")]
    assert first
    assert all(left is None for left in first), "how long attacks take nobody knows yet"


def test_the_time_left_is_told_while_nothing_is_heard(quick, tmp_path, monkeypatch):
    """A stage may take minutes without a word: a line is told every `TICK` seconds all the same."""
    monkeypatch.setattr(auditing, "TICK", 0.02)
    told = []
    audit(Suite(base=SMALL, attacks=["loss"]), tmp_path, watch=lambda *what: told.append(what[:3]))
    assert any(a == b for a, b in itertools.pairwise(told))


@pytest.mark.long
def test_an_audit_that_goes_on_knows_the_pace_of_the_last(quick, tmp_path):
    """The records that an earlier audit left are measured already: the first line has an estimate."""
    base = {**SMALL, "rounds": 2}
    audit(Suite(base=base, attacks=["loss"]), tmp_path)
    told = []
    audit(Suite(base=base, attacks=["loss"], grid={"seed": [0, 1]}), tmp_path, watch=lambda *what: told.append(what))
    (first,) = [record for record in [read_record(tmp_path / "runs" / p.name) for p in (tmp_path / "runs").iterdir()]
                if record.setting.seed == 0]  # fmt: skip
    took = sum(row.wall_s for row in first.rounds) + sum(a.wall_s for a in first.attacks if hasattr(a, "wall_s"))
    assert told[0] == (1, 2, "1 of 2 cells", pytest.approx(took))


# --- privacy that does not apply -------------------------------------------------------------------------------

CLIP = {"embeddings": {"epsilon": 1.0, "sensitivity": "clip:1"}, "logits": {"epsilon": 1.0, "sensitivity": "clip:1"}}


def test_privacy_that_is_about_nothing_released_is_refused_and_marked(quick, tmp_path):
    suite = Suite(base=SMALL, attacks=["loss"], grid={"privacy": [{}, CLIP]})
    plain, private = audit(suite, tmp_path)
    assert (plain.status, private.status) == ("done", "refused")
    words = "a policy on embeddings, logits protects nothing where count, weights is released."
    assert private.reason == words
    record = read_record(private.folder)
    assert record.status == "refused"
    assert record.notes == [f"the privacy setting does not apply: {words}"]
    assert record.rounds == []
    assert record.privacy_applies is False
    assert read_record(plain.folder).privacy_applies is None
    again = audit(suite, tmp_path)[1]
    assert (again.status, again.reason) == ("refused", words), "known without another try"


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"logits": {"epsilon": 1.0, "sensitivity": "random-pixel"}}, "random-pixel sensitivity is not applicable"),
        ({"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}, "client.optimise cannot be made private"),
    ],
)
def test_privacy_that_turns_out_not_to_apply_is_refused_too(tmp_path, privacy, words):
    """FedAF's class means of logits are no function of one image, and its condensation is no training of a model."""
    setting = Setting.make(method="fedaf", set={"IPC": 1, "steps": 1, "E": 1}, clients=2, rounds=1, privacy=privacy)
    cell = Cell(tmp_path / "a", setting, ["loss"], ["server"])
    carry_out(cell)
    assert cell.status == "refused"
    assert words in cell.reason
    assert read_record(cell.folder).privacy_applies is False


@pytest.mark.long
def test_privacy_that_applies_in_part_runs_and_is_marked_so(tmp_path):
    """Exchange releases embeddings and logits, and no prototypes."""
    policy = {"epsilon": 1.0, "sensitivity": "clip:1"}
    setting = Setting.make(
        method="outside:Exchange", clients=2, rounds=1, set={"steps": 1},
        privacy={"embeddings": policy, "prototypes": policy},
    )  # fmt: skip
    cell = Cell(tmp_path / "a", setting, [], ["server"])
    carry_out(cell)
    assert (cell.status, cell.reason) == ("done", None)
    record = read_record(cell.folder)
    assert record.idle_policies == ["prototypes"]
    assert record.privacy_applies is True


@pytest.mark.slow
def test_a_privacy_error_that_the_user_can_mend_is_a_failure(tmp_path):
    """Calibrated for one training in all, and there is one per round: that is a wrong setting, not a hopeless one."""
    privacy = {"training": {"epsilon": 8.0, "sensitivity": "clip:1", "releases": 1}}
    cell = Cell(tmp_path / "a", Setting.make(**{**SMALL, "rounds": 2}, privacy=privacy), [], ["server"])
    carry_out(cell)
    assert cell.status == "failed"
    assert "to the number that there will be" in cell.reason


# --- the command line ------------------------------------------------------------------------------------------


def test_claims_are_held_against_lower_bounds_once(tmp_path, monkeypatch):
    import fedaudit.epsilon.release_path

    privacy = {"embeddings": {"epsilon": 1.0, "sensitivity": "clip:1"}}
    few = {"E_local": 1, "h": 8, "T_Tran": 1, "T_Dec": 1, "T_FKE": 1, "w_Dec": 2, "R": 1}
    setting = Setting.make(method="dffke", model="mlp", clients=2, rounds=1, set=few, privacy=privacy)
    carry_out(Cell(tmp_path / "a", setting, [], ["server"]))
    look(untried := Cell(tmp_path / "a", setting, [], ["server"], trials=20))
    assert untried.status != "done", "its claim has yet to be tried"
    carry_out(cell := Cell(tmp_path / "a", setting, [], ["server"], trials=20))
    assert cell.status == "done", cell.reason
    tried = {audit.test: audit for audit in read_record(tmp_path / "a").audits if audit.kind == "embeddings"}
    assert set(tried) == {"release path", "release path, Gaussian", "residuals", "clipping"}
    assert tried["residuals"].verdict == "not refuted"
    assert all(audit.trials >= 20 and audit.verdict != "refuted" for audit in tried.values())
    monkeypatch.setattr(
        fedaudit.epsilon.release_path, "audit_releases", lambda *_, **__: pytest.fail("it was tried already")
    )
    carry_out(again := Cell(tmp_path / "a", setting, [], ["server"], trials=20))
    assert again.status == "done"


@pytest.mark.long
def test_budgets_are_in_the_exit_code(quick, undrawn, fedaudit, tmp_path):
    base = '[base]\nclients = 3\nrounds = 1\nmodel = "mlp"\n'
    base += '[[methods]]\nmethod = "local"\n[[methods]]\nmethod = "fedavg"\n'
    kept = written(tmp_path, 'attacks = []\nbudgets = { max = "1 MiB" }\n' + base)
    code, out, err = fedaudit("audit", kept, "--out", tmp_path / "out")
    assert code == 0, err
    assert out.count("yes") == 2, "each cell held against it, also the one that sends nothing"
    broken = written(tmp_path, 'attacks = []\nbudgets = { method = "fedavg", max = "1 B" }\n' + base)
    code, out, _ = fedaudit("audit", broken, "--out", tmp_path / "out")
    assert code == 1
    assert "the budget 1 B" in out
    assert "The report is in" in out


@pytest.mark.long
def test_the_audit_says_which_cells_do_not_apply_and_is_quiet_otherwise(quick, undrawn, fedaudit, tmp_path):
    path = written(
        tmp_path,
        'attacks = []\n[base]\nclients = 3\nrounds = 1\nmodel = "mlp"\n[grid]\nseed = [0, 1]\n'
        "privacy = [{}, { embeddings = { epsilon = 1.0 } }]\n",
    )
    code, out, err = fedaudit("audit", path, "--out", tmp_path / "out", "--jobs", 2)
    assert (code, said(err)) == (0, [])
    first, *table, last = out.splitlines()
    assert first == (
        "does not apply (2 cells): fedavg: a policy on embeddings protects nothing where count, weights is released."
    )
    assert max(map(len, table)) <= 80
    assert [line.split()[0] for line in table if line.startswith("fedavg")] == ["fedavg"]
    assert table[-1] == "1 row did not run: the privacy setting applies to nothing that is sent."
    assert last == f"The report is in {tmp_path / 'out' / 'report.html'}"


def said(err: str) -> list[str]:
    """What is on the error stream, but for progress, of which a slow machine shows some."""
    return [line for line in err.splitlines() if not re.match(r"audit: +\d+% \d+ of \d+ cells", line)]


@pytest.mark.slow
def test_workers_are_processes_of_their_own(tmp_path):
    """The whole command, as a user starts it: everything else here forks its workers to save the imports."""
    suite = written(tmp_path, 'attacks = ["loss"]\n[base]\nclients = 2\nrounds = 1\nmodel = "mlp"\n')
    words = [sys.executable, "-m", "fedaudit", "audit", str(suite), "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, said(done.stderr)) == (0, [])
    (record,) = (tmp_path / "out").glob("runs/*/record.json")
    assert "loss" in [a.attack for a in read_record(record).attacks]


def test_a_worker_forks_for_each_cell(nursery_at):
    """Nothing that it imports keeps it from that: else every cell would pay for the imports, ten seconds of them."""
    from fedaudit.suite.worker import FORK

    assert Path(f"{nursery_at}.forks").read_text() == str(FORK)


# --- forecasts -------------------------------------------------------------------------------------------------


def test_a_dry_run_is_exact_about_bytes_and_honest_about_time(quick, tmp_path):
    suite = Suite(base=SMALL, attacks=["loss"], grid={"seed": [0, 1], "privacy": [{}, CLIP]})
    fresh = forecast(make_cells(suite, tmp_path))
    assert [f.state for f in fresh] == ["new", "does not apply", "new", "does not apply"]
    assert fresh[0].seconds is None
    assert "Time: not known" in total(fresh, 1)
    assert not (tmp_path / "runs").exists(), "nothing ran"

    audit(Suite(base=SMALL, attacks=["loss"]), tmp_path)  # the cell of seed 0
    first, _, second, _ = after = forecast(make_cells(suite, tmp_path))
    record = read_record(first.cell.folder)
    assert (first.state, first.bytes, first.seconds) == ("done", 0, 0.0)
    assert second.bytes == record.bytes("up") + record.bytes("down") == fresh[0].bytes
    (loss,) = (a for a in record.attacks if a.attack == "loss")
    assert second.seconds == pytest.approx(record.rounds[0].wall_s + loss.wall_s)
    assert second.note == "time from the same with another seed"
    assert total(after, 2).startswith("4 cells: 1 done, 2 does not apply, 1 to do.")


def test_a_dry_run_can_measure(tmp_path):
    suite = Suite(base={**SMALL, "rounds": 40}, attacks=["loss"])
    (found,) = forecast(make_cells(suite, tmp_path), measure=True)
    assert found.seconds > 0
    assert found.note == "time from the same with other rounds"
    assert not (tmp_path / "runs").exists(), "what was tried out left nothing"


def test_a_dry_run_names_cells_that_will_fail(fedaudit, tmp_path):
    path = written(tmp_path, "attacks = []\n[base]\nset = { E = 'many' }\n")
    code, out, _ = fedaudit("audit", path, "--dry-run", "--out", tmp_path / "out")
    assert code == 0
    assert "will fail" in out
    assert "hyper-parameter of fedavg E = 'many'" in out


def test_the_pace_of_the_nearest_like_cell():
    """Ten rounds took 20 s: 2 s a round, of the cell itself and of those like it, nearest first."""
    pace = Pace()
    one = Setting.make(rounds=10)
    assert pace.per_round(one) is None
    pace.add_rounds(one, 20.0, 10)
    assert pace.per_round(one) == (2.0, "this cell's own rounds")
    assert pace.per_round(one.model_copy(update={"seed": 1})) == (2.0, "the same with another seed")
    assert pace.per_round(one.model_copy(update={"rounds": 3})) == (2.0, "the same with other rounds")
    assert pace.per_round(one.model_copy(update={"privacy": CLIP})) == (2.0, "the same under other privacy")
    assert pace.per_round(one.model_copy(update={"clients": 6})) is None


@pytest.mark.slow
def test_audits_of_epsilon_are_in_the_forecast(quick, tmp_path):
    """A protected cell with trials: as measured in a like cell; where none was, as long as the run once more."""
    private = {"training": {"noise_multiplier": 1.0, "delta": 1e-2}}
    suite = Suite(base={**SMALL, "privacy": private}, attacks=[], trials=20, grid={"seed": [0, 1]})
    audit(Suite(base={**SMALL, "privacy": private}, attacks=[]), tmp_path)  # the run alone
    first, second = forecast(make_cells(suite, tmp_path))
    per_round = read_record(first.cell.folder).rounds[0].wall_s
    rounds = first.cell.setting.rounds
    assert first.state == "attacks"
    assert first.seconds == pytest.approx(rounds * per_round), "the audits"
    assert second.seconds == pytest.approx(2 * rounds * per_round), "the run, and the audits"
    assert second.note.endswith("audits of epsilon assumed to take as long as the run")

    audit(Suite(base={**SMALL, "privacy": private}, attacks=[], trials=20), tmp_path)
    first, second = forecast(make_cells(suite, tmp_path))
    record = read_record(first.cell.folder)
    took = audit_seconds(first.cell.folder, record.transcript_digest)
    assert {"residuals", "gradient canaries, Gaussian"} <= set(took)
    assert took["residuals"] > 0, "canaries are tried in the same repetition, and cost nothing more"
    assert (first.state, first.seconds) == ("done", 0.0)
    assert second.seconds == pytest.approx(rounds * per_round + sum(took.values()))
    assert "audits of epsilon" not in second.note
    assert audit_seconds(first.cell.folder, "another transcript") == {}


def test_durations():
    assert [duration(s) for s in (0.2, 12, 89, 300, 7200)] == ["1 s", "12 s", "89 s", "5 min", "2.0 h"]


def test_a_cell_half_done_says_so(tmp_path):
    setting = Setting.make(**{**SMALL, "rounds": 3})
    suite = Suite(base=SMALL | {"rounds": 3}, attacks=[])
    (cell,) = make_cells(suite, tmp_path)

    class Enough(Exception):
        pass

    def stop(t, rounds, what):
        if t == 2:
            raise Enough

    with pytest.raises(Enough):
        run(setting, out=cell.folder, watch=stop)
    assert look(cell).status == "running"
    (found,) = forecast([cell])
    assert found.state == "2 of 3 rounds done"
    assert found.note == "time from this cell's own rounds"


def test_counting_many_cells_does_not_keep_the_workers_waiting(monkeypatch):
    """Telling took 1 s, so the next steps are kept back for 20; then the last of them is told."""
    clock, told = [100.0], []
    monkeypatch.setattr(auditing.time, "monotonic", lambda: clock[0])

    def watch(done, whole, what, left):
        told.append(what)
        clock[0] += 1.0

    cell = Cell(Path("one"), Setting.make(), [], [])
    progress = auditing._Progress([cell], watch, TimeLeft(1, 0.0))
    progress.plan({})
    progress.begin(cell)
    for step in range(5):
        progress.step(cell, step, 10, f"round {step}")
        clock[0] += 1.0
    assert [what.partition("round ")[2] for what in told] == ["0"]
    clock[0] += 20.0
    progress.step(cell, 6, 10, "round 6")
    assert told[-1].endswith("round 6")


def test_cells_share_what_all_would_compute_alike(tmp_path, monkeypatch):
    """A folder that is there while cells run, which each is told, and which is gone afterwards."""
    made = []

    class Made(tempfile.TemporaryDirectory):
        def __init__(self, **how):
            super().__init__(dir=tmp_path, **how)
            made.append(self.name)

    monkeypatch.setattr(auditing.tempfile, "TemporaryDirectory", Made)
    auditing._beside([], None, 1, 0)
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == []
    reading, writing = os.pipe()
    worker = object.__new__(auditing._Worker)
    worker.requests, worker.shared = writing, made[0]
    worker.give([Cell(tmp_path, Setting.make(), [], [])])
    os.close(writing)
    with os.fdopen(reading) as file:
        assert json.loads(file.read())["shared"] == made[0]


def test_a_worker_is_asked_and_answers_through_its_pipes():
    pipes = {name: SimpleNamespace(fileno=lambda i=i: i) for i, name in ((7, "stdin"), (8, "stdout"))}
    worker = auditing._Worker(SimpleNamespace(worker=lambda log: SimpleNamespace(**pipes, log=log)))
    assert (worker.requests, worker.replies) == (7, 8)
    assert worker.process.log is worker.log


def test_one_pool_is_made_for_each_kind_of_cell_and_closed(monkeypatch):
    """Four cells of two kinds of engines: two engines are made, and each cell gets its own kind's."""
    same = {"engine": "serial", "together": None, "device": "cpu", "threads": 1, "gpu_fraction": 0, "ray_address": None}
    cells = [
        SimpleNamespace(name=n, setting=SimpleNamespace(**same, workers=w))
        for n, w in zip("abcd", (1, 2, 1, 2), strict=True)
    ]
    closed, ran, said = [], [], []
    monkeypatch.setattr(
        auditing, "make_engine", lambda s: SimpleNamespace(workers=s.workers, close=lambda: closed.append(s.workers))
    )

    class Queue:
        def __init__(self, todo):
            self.ready, self.take = lambda: bool(todo), lambda: todo.pop(0)

    monkeypatch.setattr(auditing, "_Queue", Queue)
    monkeypatch.setattr(auditing, "carry_out", lambda cell, step, engine: (step(3), ran.append((cell.name, engine))))
    progress = SimpleNamespace(
        begin=lambda cell: said.append(("begin", cell.name)),
        step=lambda cell, n: said.append((n, cell.name)),
        tell=lambda text: said.append(text),
    )
    auditing._here(list(cells), progress)
    assert [(name, engine.workers) for name, engine in ran] == [("a", 1), ("b", 2), ("c", 1), ("d", 2)]
    assert ran[0][1] is ran[2][1]
    assert ran[1][1] is ran[3][1]
    assert closed == [1, 2]
    assert said == [row for cell in cells for row in (("begin", cell.name), (3, cell.name), "")]


def test_stale_results_are_put_aside_under_a_number_of_their_own(monkeypatch, tmp_path):
    """Twice for one cell, and once for another: nothing is deleted. What still counts stays where it is."""
    why, stale = ["code changed"], [[]]
    monkeypatch.setattr(auditing, "read_record", lambda folder: (folder / "record.json").read_text())
    monkeypatch.setattr(auditing, "why_again", lambda cell, record, force, keep: why[0])
    monkeypatch.setattr(auditing, "stale_attacks", lambda cell, record: stale[0])
    monkeypatch.setattr(auditing, "is_not_compared", lambda cell, record: f"as {record}")
    monkeypatch.setattr(auditing, "locked", lambda folder: contextlib.nullcontext())

    def put(name, text, keep_stale=False):
        cell = SimpleNamespace(folder=tmp_path / "runs" / name, again=None, not_compared=None)
        if text is not None:
            cell.folder.mkdir(parents=True, exist_ok=True)
            (cell.folder / "record.json").write_text(text)
        auditing._put_aside(cell, tmp_path, False, keep_stale)
        return cell.again, cell.not_compared, (cell.folder / "record.json").exists()

    assert put("a", None) == (None, None, False), "there is nothing to put aside"
    for name, text in (("a", "first"), ("a", "second"), ("b", "third")):
        assert put(name, text) == ("code changed", None, False)
    aside = tmp_path / auditing.STALE
    kept = {folder.name: (folder / "record.json").read_text() for folder in aside.iterdir()}
    assert kept == {"a.1": "first", "a.2": "second", "b.1": "third"}
    why[0] = None
    assert put("c", "fourth") == (None, "as fourth", True)
    stale[0] = ["loss", "lira"]
    assert put("c", "fourth") == ("attacks changed: loss, lira", "as fourth", True)
    assert put("c", "fourth", keep_stale=True) == (None, "as fourth", True)


def test_what_an_audit_does_unless_told():
    """One cell at a time, here, on what is kept, and without a report."""
    defaults = {name: of.default for name, of in inspect.signature(audit).parameters.items()}
    assert {name: value for name, value in defaults.items() if name not in ("suite", "out")} == {
        "watch": None, "jobs": 1, "engine": None, "force": False, "keep_stale": False, "on": "here",
        "ray_address": None, "report": False, "trust": False, "seeds_together": False,
    }  # fmt: skip


# --- each part alone, without a process ------------------------------------------------------------------------------


def bare(name, **values):
    return Cell(Path("out/runs") / name, Setting.make(**values), [], [])


def test_a_run_that_others_start_from_comes_first_and_is_attacked_only_if_it_is_listed(tmp_path):
    start = {"method": "local", "rounds": 2}
    suite = Suite(base={"clients": 3}, attacks=["loss"], threats=["outsider"], trials=5, trials_on=[1])
    rows = [{"method": "fedavg", "start": start}, {"method": "fedprox", "start": start}]
    cells = make_cells(suite.model_copy(update={"methods": rows, "grid": {"seed": [0, 1]}}), tmp_path)
    assert [(c.setting.method, c.setting.seed, c.attacks, c.trials) for c in cells] == [
        ("local", 0, [], 0), ("fedavg", 0, ["loss"], 0), ("local", 1, [], 0), ("fedavg", 1, ["loss"], 5),
        ("fedprox", 0, ["loss"], 0), ("fedprox", 1, ["loss"], 5),
    ]  # fmt: skip
    assert {c.folder for c in cells} == {tmp_path / "runs" / folder_name(c.setting) for c in cells}
    assert {tuple(c.threats) for c in cells} == {("outsider",)}
    listed = make_cells(suite.model_copy(update={"methods": [rows[0], {"method": "local", "rounds": 2}]}), tmp_path)
    assert [(c.setting.method, c.attacks) for c in listed] == [("local", ["loss"]), ("fedavg", ["loss"])]
    assert {c.setting.engine for c in listed} == {"auto"}
    assert {c.setting.engine for c in make_cells(suite, tmp_path, "serial")} == {"serial"}
    assert {c.setting.engine for c in make_cells(suite, tmp_path, seeds_together=True)} == {"stacked"}


@pytest.fixture
def stages(monkeypatch, tmp_path):
    """An audit whose cells are carried out by nobody: what it calls is noted, with three cells of which one is done."""
    noted = SimpleNamespace(said=[], told=[], ends=["done", "failed"], engine="auto", cells=[], aside=[])
    done, *rest = (bare(name, seed=i) for i, name in enumerate("abc"))
    noted.cells = [done, *rest]

    def look(cell):
        cell.status = "done" if cell is done else cell.status
        return f"record of {cell.folder.name}"

    def put_aside(cell, out, force, keep_stale):
        noted.aside.append((cell.folder.name, out, force, keep_stale, cell.keep_stale, cell.trust))
        if cell is rest[1]:
            raise RunError("a damaged record")

    def carried_out(name):
        def run(todo, *given):
            noted.said.append((name, [cell.folder.name for cell in getattr(todo, "cells", todo)], *given))
            for cell, status in zip(rest, noted.ends, strict=True):
                cell.status, cell.reason = status, f"why {cell.folder.name}"

        return run

    class Progress:
        def __init__(self, cells, watch, left):
            noted.said.append(("progress", watch, left.jobs, round(left.report, 4)))

        def plan(self, records):
            noted.said.append(("plan", dict(records)))
            return [cell for cell in noted.cells if cell.status == "to do"]

        def tell(self, what):
            noted.told.append(what)

        def end(self):
            noted.told.append("end")

    @contextlib.contextmanager
    def shared(settings, jobs):
        noted.said.append(("shared", [s.seed for s in settings], jobs))
        yield noted.sharing

    @contextlib.contextmanager
    def locked(out, what, patience):
        noted.said.append(("locked", out, what, patience))
        yield 17

    noted.sharing = None
    for name, value in (
        ("make_cells", lambda suite, out, engine, together: noted.cells), ("look", look), ("_put_aside", put_aside),
        ("save_suite", lambda suite, out: noted.said.append(("saved", out))), ("_Progress", Progress),
        ("shared_gpu", shared), ("locked", locked), ("_here", carried_out("here")), ("_beside", carried_out("beside")),
        ("carry_out_on_ray", carried_out("ray")), ("_save", lambda *given: noted.said.append(("note", *given))),
    ):  # fmt: skip
        monkeypatch.setattr(auditing, name, value)
    return noted


def test_an_audit_does_all_its_steps_in_order(stages, tmp_path):
    suite = Suite()
    found = audit(suite, tmp_path, watch="watch", jobs=2, keep_stale=True, report=True, trust=True)
    assert found == stages.cells
    records = {f"out/runs/{name}": f"record of {name}" for name in "ab"}  # that of c is damaged
    locked, saved, progress, plan, shared, (name, todo, *how), note = stages.said
    assert locked == ("locked", tmp_path, "audit", 10.0)
    assert saved == ("saved", tmp_path)
    assert progress == ("progress", "watch", 2, round((1.7 + 0.155 * 3) / 9.1, 4))
    assert plan == ("plan", records)
    assert shared == ("shared", [1, 2], 2)
    assert (name, todo, how[1:]) == ("beside", ["b", "c"], [2, 17, False])
    assert note == ("note", tmp_path, stages.cells, None)
    assert stages.told == ["", "end"]
    assert stages.aside == [(name, tmp_path, False, True, True, True) for name in "abc"]


def test_an_audit_shares_a_gpu_and_takes_no_more_jobs_than_cells(stages, tmp_path):
    stages.sharing = "two share a GPU"
    audit(Suite(), tmp_path, jobs=9, force=True)
    assert ("shared", [1, 2], 2) in stages.said
    assert stages.said[-1] == ("note", tmp_path, stages.cells, "two share a GPU")
    assert stages.told == ["", "two share a GPU", "end"]
    assert stages.said[2] == ("progress", None, 9, 0.0)
    assert stages.aside[0][2:] == (True, False, False, False)


def test_seeds_together_are_as_many_at_a_time_as_the_longest_row(stages, tmp_path):
    """Three cells that differ in the seed alone are a row."""
    audit(Suite(), tmp_path, jobs=2, seeds_together=True)
    assert stages.said[2] == ("progress", None, 6, 0.0)
    assert stages.said[-2][-1] is True


def test_where_the_cells_of_an_audit_run(stages, tmp_path):
    """On a cluster nobody says when a cell begins; with the engine ray they run here, one after another."""
    audit(Suite(), tmp_path, on="ray", ray_address="there")
    assert stages.said[2] == ("progress", None, None, 0.0)
    name, todo, tell, address = stages.said[4]
    assert (name, todo, address) == ("ray", ["b", "c"], "there")
    tell(stages.cells[1], "done")
    assert stages.told[-1] == "fedavg: done"
    for refused, words in (({"jobs": 2}, "Leave --jobs 2 out"), ({"seeds_together": True}, "--seeds-together out")):
        with pytest.raises(FedauditError, match=words):
            audit(Suite(), tmp_path, on="ray", **refused)
    stages.said.clear()
    for cell in stages.cells[1:]:
        cell.status = "to do"
    stages.cells[2].setting = stages.cells[2].setting.model_copy(update={"engine": "ray"})
    audit(Suite(), tmp_path)
    assert stages.said[4][:2] == ("here", ["b", "c"])
    with pytest.raises(FedauditError, match="--jobs 2 does not go with the engine ray"):
        audit(Suite(), tmp_path, jobs=2)
    with pytest.raises(FedauditError, match="Leave the engine ray out"):
        audit(Suite(), tmp_path, on="ray")


def test_an_audit_without_a_cell_that_is_done_is_an_error(stages, tmp_path):
    stages.cells.pop(0)
    stages.ends = ["refused", "failed"]
    with pytest.raises(RunError, match=r"No cell of the suite succeeded\. out/runs/c: why c"):
        audit(Suite(), tmp_path)
    stages.ends = ["refused", "refused"]
    with pytest.raises(RunError, match=r"out/runs/b: why b"):
        audit(Suite(), tmp_path)
    stages.ends = ["refused", "done"]
    assert audit(Suite(), tmp_path) == stages.cells


def test_a_note_of_an_audit(tmp_path):
    cells = [bare("a"), bare("b", label="Ours")]
    cells[1].status, cells[1].reason = "failed", "why"
    rows = [{"folder": "runs/a", "status": "to do", "reason": None}]
    rows += [{"folder": "runs/b", "status": "failed", "reason": "why", "label": "Ours"}]
    for cell in cells:
        cell.folder = tmp_path / "runs" / cell.folder.name
    auditing._save(tmp_path, cells)
    assert json.loads((tmp_path / "audit.json").read_text()) == {"cells": rows}
    auditing._save(tmp_path, cells, "two share")
    assert json.loads((tmp_path / "audit.json").read_text()) == {"cells": rows, "gpu": "two share"}


def test_how_far_an_audit_is(monkeypatch):
    """Of four cells one is done before and one is refused; the others are at 3 of 4 rounds and at their attacks."""
    clock, told, noted = [100.0], [], []

    class Left:
        report = 0.0

        def __getattr__(self, name):
            return lambda *given: noted.append((name, *given))

        def left(self, now):
            return 1000 - now

    monkeypatch.setattr(auditing.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(auditing, "work_of", lambda cell, record: f"work of {cell.folder.name} {record}")
    monkeypatch.setattr(auditing, "learn", lambda left, work, cell, record: noted.append(("learn", work, record)))
    monkeypatch.setattr(auditing, "novelty_first", lambda works: sorted(works, reverse=True))
    cells = [bare(name, rounds=4, seed=i) for i, name in enumerate("abcd")]
    cells[0].status = "done"
    progress = auditing._Progress(cells, lambda *given: told.append(given), Left())
    assert progress.plan({"out/runs/a": "A", "out/runs/c": "C", "out/runs/d": None}) == [cells[3], cells[2], cells[1]]
    assert noted == [
        ("learn", "work of a A", "A"), ("learn", "work of c C", "C"), ("add", "out/runs/d", "work of d None"),
        ("add", "out/runs/c", "work of c C"), ("add", "out/runs/b", "work of b None"),
    ]  # fmt: skip
    noted.clear()
    progress.begin(cells[1])
    clock[0] = 101.0
    progress.step(cells[1], 3, 4, "round 3")
    progress.step(cells[2], 4, 4, "attack loss by server")
    cells[3].status = "refused"
    clock[0] = 102.0
    progress.tell("")
    assert noted == [
        ("begun", "out/runs/b", 100.0), ("progress", "out/runs/b", "rounds", 0.75, 101.0),
        ("progress", "out/runs/c", "attacks", 0.0, 101.0), ("finished", "out/runs/d", 102.0, "refused"),
    ]  # fmt: skip
    assert told == [
        (1.75, 4, "1 of 4 cells, fedavg: round 3", 899.0),
        (2.75, 4, "1 of 4 cells, fedavg: attack loss by server", 899.0),
        (3.75, 4, "2 of 4 cells", 898.0),
    ]
    progress.end()
    assert (noted[-1], told[-1]) == (("reporting", 102.0), (3.75, 4, "2 of 4 cells", 898.0))
    Left.report = 2.0
    progress.end()
    assert told[-1][2] == "2 of 4 cells, writing the report"
    progress.tell()
    assert told[-1][2] == "2 of 4 cells, writing the report", "it is still being done"
    assert len([of for of in noted if of[0] == "finished"]) == 1
    progress.watch = None
    count = len(told)
    progress.step(cells[1], 0, 0, "round 0")
    assert noted[-1] == ("progress", "out/runs/b", "rounds", 0.0, 102.0)
    assert len(told) == count


def test_the_share_of_a_cell():
    progress = auditing._Progress([], None, None)
    for rounds, done, share in ((4, 3, 0.75), (4, 9, 1.0), (0, 0, 0.0), (0, 1, 1.0)):
        cell = bare("a", rounds=rounds)
        assert progress._share(cell) == 0.0
        progress.rounds = {str(cell.folder): done}
        assert progress._share(cell) == share
        progress.rounds = {}
        cell.status = "failed"
        assert progress._share(cell) == 1.0


def test_cells_wait_for_the_run_from_which_they_take_their_clients():
    start = {"method": "local", "rounds": 2}
    second, other = Setting.make(start=start), Setting.make(method="fedprox", seed=3)
    first = Setting.make(method="local", rounds=2)
    cells = [Cell(Path("out") / folder_name(s), s, [], []) for s in (second, first, other)]
    queue = auditing._Queue(cells)
    assert queue.ready()
    assert [queue.take(), queue.take()] == [cells[1], cells[2]]
    assert not queue.ready()
    cells[1].status = "done"
    assert queue.ready()
    assert queue.take() is cells[0]
    assert not queue.ready()
    for status in ("failed", "refused"):
        queue = auditing._Queue(cells[:2])
        cells[0].status = cells[1].status = "to do"
        assert queue.ready()
        assert queue.take() is cells[1]
        cells[1].status, cells[1].reason = status, "why"
        assert not queue.ready()
        assert cells[0].status == "failed"
        assert cells[0].reason == f"its clients come from {cells[1].folder.name}, which {status}: why"
    alone = auditing._Queue(cells[:1])
    assert alone.ready(), "its clients are not of this audit: its run says what is wrong"
    assert len(cells) == 3


def test_rows_are_cells_that_differ_in_the_seed_alone(monkeypatch):
    monkeypatch.setattr(auditing, "MOST", 3)
    names = ["a0", "b0", "a1", "a2", "b1", "a3", "a4"]
    cells = [bare(name, seed=int(name[1]), rounds={"a": 1, "b": 2}[name[0]]) for name in names]

    def shown(rows):
        return [[cell.folder.name for cell in row] for row in rows]

    assert shown(auditing._rows(cells)) == [["a0", "a1", "a2"], ["b0", "b1"], ["a3", "a4"]]
    queue = auditing._Queue(cells)
    assert shown([queue.take_row() for _ in range(3)]) == [["a0", "a1", "a2"], ["b0", "b1"], ["a3", "a4"]]
    assert queue.cells == []


def test_what_a_worker_says_is_heeded():
    """Progress, an end, then the end of its process: who has not answered has failed, by a signal or an exit code."""
    told = []
    progress = SimpleNamespace(step=lambda *given: told.append(given), tell=told.append)
    cells = [bare(name, seed=i) for i, name in enumerate("abc")]
    worker = SimpleNamespace(cells=cells, answered=set(), beside=1, last_words=lambda: " Its last words.")
    auditing._heed(worker, {"cell": 1, "t": 2.0, "rounds": 5.0, "what": "round 2"}, progress)
    auditing._heed(worker, {"cell": 2, "status": "refused", "reason": "why", "crowded": None}, progress)
    assert told == [(cells[1], 2.0, 5.0, "round 2")]
    assert (cells[2].status, cells[2].reason, worker.answered) == ("refused", "why", {2})
    auditing._heed(worker, {"over": -9}, progress)
    assert [cell.status for cell in cells] == ["failed", "failed", "refused"]
    assert "ended with signal 9, " in cells[0].reason
    assert cells[1].reason.endswith("Try fewer --jobs, or leave out --seeds-together. Its last words.")
    assert (worker.cells, told[1:]) == ([], [""])
    auditing._heed(worker, {"over": 0}, progress)
    assert told[1:] == [""], "nobody waits for it any more"
    worker.cells, worker.answered = [bare("d")], set()
    lonely = worker.cells[0]
    auditing._heed(worker, {"over": 1}, progress)
    assert "ended with exit code 1, " in lonely.reason
    assert "Try fewer --jobs. " in lonely.reason


def test_a_worker_reads_whole_lines_and_keeps_the_rest(tmp_path):
    reading, writing = os.pipe()
    worker = object.__new__(auditing._Worker)
    worker.replies, worker._text = reading, b""
    os.write(writing, b'{"a": 1}\n{"b"')
    assert worker.read() == [{"a": 1}]
    os.write(writing, b": 2}\n")
    assert worker.read() == [{"b": 2}]
    os.close(writing)
    assert worker.read() is None
    os.close(reading)
    with (tmp_path / "log").open("w+b") as worker.log:
        assert worker.last_words() == ""
        worker.log.write(b"one\nthe last \xff\n\n")
        assert worker.last_words() == " Its last line of output: the last \ufffd"


def test_a_worker_is_asked_for_cells(tmp_path):
    reading, writing = os.pipe()
    worker = object.__new__(auditing._Worker)
    worker.requests, worker.shared, worker.answered = writing, None, {3}
    cells = [Cell(tmp_path / "a", Setting.make(seed=3), ["loss"], ["outsider"], 7, keep_stale=True), bare("b")]
    cells[1].trust = True
    worker.give(cells)
    assert (worker.cells, worker.answered) == (cells, set())
    os.close(writing)
    with os.fdopen(reading) as file:
        (line,) = file
    first, second = json.loads(line)["cells"]
    assert Setting.make(**first.pop("setting")) == cells[0].setting
    assert first == {
        "folder": str(tmp_path / "a"), "attacks": ["loss"], "threats": ["outsider"], "trials": 7, "keep_stale": True,
        "trust": False,
    }  # fmt: skip
    assert (second["keep_stale"], second["trust"], second["trials"]) == (False, True, 0)


def test_a_worker_that_does_not_end_is_killed():
    said = []

    def wait(*patience):
        said.append(("wait", *patience))
        if patience and stubborn:
            raise subprocess.TimeoutExpired("worker", *patience)

    pipes = {name: SimpleNamespace(close=lambda name=name: said.append(name)) for name in ("stdin", "stdout")}
    worker = object.__new__(auditing._Worker)
    worker.process = SimpleNamespace(wait=wait, kill=lambda: said.append("kill"), **pipes)
    worker.log = SimpleNamespace(close=lambda: said.append("log"))
    stubborn = False
    worker.close()
    assert said == ["stdin", ("wait", 10.0), "stdout", "log"]
    stubborn = True
    said.clear()
    worker.close()
    assert said == ["stdin", ("wait", 10.0), "kill", ("wait",), "stdout", "log"]


class Acting:
    """A worker that is no process: it answers what a script says, one list of replies for each time it is asked."""

    script: list = []  # noqa: RUF012 (set by each test)
    made: list = []  # noqa: RUF012
    order: list = []  # noqa: RUF012

    def __init__(self, forker):
        self.lock, self.preload, self.cells, self.answered, self.asked = forker.lock, forker.preload, [], set(), []
        self.closed, self.hung_up, self.replies, self.again, self.beside = 0, 0, len(self.made), [], 0
        self.process = SimpleNamespace(wait=lambda: -9)
        self.made.append(self)

    def give(self, cells):
        self.cells, self.answered = cells, set()
        self.asked.append([cell.folder.name for cell in cells])

    def read(self):
        return self.script[self.replies].pop(0)

    def last_words(self):
        return ""

    def hang_up(self):
        self.hung_up += 1
        self.order.append("hang up")

    def close(self):
        self.closed += 1
        self.order.append("close")


@pytest.fixture
def acting(monkeypatch):
    """Processes that only act, and a selector that hears each of them in turn."""
    begun, told, order = [], [], []
    monkeypatch.setattr(Acting, "made", [])
    monkeypatch.setattr(Acting, "order", order)
    monkeypatch.setattr(auditing, "_Worker", Acting)
    monkeypatch.setattr(auditing.Forker, "close", lambda forker: order.append("forker"))

    class Selector:
        def __init__(self):
            self.known, self.waits = {}, 0

        def register(self, file, event, worker):
            self.known[file] = worker

        def unregister(self, file):
            del self.known[file]

        def select(self, tick):
            self.waits += 1
            return [] if self.waits == 1 else [(SimpleNamespace(data=worker), 1) for worker in self.known.values()]

        def close(self):
            self.known = None

    monkeypatch.setattr(auditing.selectors, "DefaultSelector", Selector)
    progress = SimpleNamespace(
        begin=lambda cell: begun.append(cell.folder.name),
        tell=lambda *what: told.append(what),
        step=lambda cell, *how: told.append((cell.folder.name, *how)),
    )
    return SimpleNamespace(progress=progress, begun=begun, told=told)


OVER = [{"cell": 0, "status": "done", "reason": None, "crowded": None}, {"over": 0}]


def test_workers_take_cells_until_there_are_none(acting):
    """Two at a time. The first serves two cells, the second dies with its own, and a third one takes the last."""
    cells = [bare(name, seed=i) for i, name in enumerate("abcd")]
    Acting.script = {
        0: [[{"cell": 0, "t": 1, "rounds": 2, "what": "x"}], OVER, OVER, OVER], 1: [[], None], 2: [OVER],
    }  # fmt: skip
    auditing._beside(list(cells), acting.progress, 2, 17)
    assert [worker.asked for worker in Acting.made] == [[["a"], ["c"]], [["b"]], [["d"]]]
    assert [(worker.lock, worker.preload, worker.closed) for worker in Acting.made] == [(17, [], 1)] * 3
    assert acting.begun == ["a", "b", "c", "d"]
    assert [cell.status for cell in cells] == ["done", "failed", "done", "done"]
    assert "signal 9" in cells[1].reason
    assert acting.told[:2] == [(), ("a", 1, 2, "x")], "what is done is told again while nothing is heard"
    assert len({worker.shared for worker in Acting.made}) == 1


def test_workers_take_rows_and_load_what_privacy_needs(acting):
    cells = [bare(f"{r}{s}", seed=s, rounds=r, privacy={"weights": {"epsilon": 1.0}} if r == 2 else {})
             for r in (1, 2) for s in (0, 1)]  # fmt: skip
    both = [{"cell": 1, "status": "done", "reason": None, "crowded": None}, *OVER]
    Acting.script = {0: [both, both]}
    auditing._beside(list(cells), acting.progress, 1, 0, seeds_together=True)
    (worker,) = Acting.made
    assert worker.asked == [["10", "11"], ["20", "21"]]
    assert worker.preload == ["opacus"]
    assert {cell.status for cell in cells} == {"done"}


def test_workers_are_hung_up_on_where_the_audit_is_stopped(acting):
    Acting.script = {0: [], 1: []}
    with pytest.raises(IndexError):
        auditing._beside([bare("a"), bare("b", seed=1)], acting.progress, 5, 0)
    assert [(worker.hung_up, worker.closed) for worker in Acting.made] == [(1, 1), (1, 1)]
    assert Acting.order == ["hang up", "hang up", "forker", "close", "close"], (
        "one that still imports is not waited for"
    )
