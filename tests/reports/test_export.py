"""Exports, each opened with its own library: what is in a run's record is there, and nothing else."""

from __future__ import annotations

import ast
import io
import json
import math
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
import reported
import unequal
from wandb_file import records_of

import fedaudit
from fedaudit.errors import RunError, SettingError
from fedaudit.extras import install
from fedaudit.reports.export import TARGETS, Export, export
from fedaudit.reports.run_tables import Tables, columns_of
from fedaudit.runtime.attack_result import results
from fedaudit.runtime.run_record import read_record, save_attacks
from fedaudit.setting import Setting


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return reported.write(tmp_path_factory.mktemp("audit"))


# --- tables ----------------------------------------------------------------------------------------------------


def test_an_audit_as_data_frames(folder):
    """13 runs: three seeds of three settings, two of one, one of two, of which one was refused and has no round."""
    pd = pytest.importorskip("pandas")
    audit = fedaudit.load(folder)
    assert isinstance(audit.runs, pd.DataFrame)
    assert [len(frame) for frame in (audit.runs, audit.rounds)] == [13, 24]
    plain = audit.runs[(audit.runs.method == "fedavg") & (audit.runs.privacy == "none")].set_index("seed")
    assert plain.accuracy.to_dict() == {0: 0.90, 1: 0.91, 2: 0.89}
    assert plain.auc.to_dict() == {0: 0.61, 1: 0.63, 2: 0.62}
    assert plain.leaks.tolist() == [1, 1, 1]
    assert plain.epsilon.tolist() == [math.inf] * 3
    assert plain.up_payload.tolist() == [4000] * 3
    assert plain.up_wire.tolist() == [4020] * 3
    private = audit.runs[audit.runs.run == "fedavg-dp-1"].iloc[0]
    assert private.epsilon == pytest.approx(9.3)
    assert (private.delta, private.refuted) == (0.04, 0)
    assert audit.runs.set_index("run").refuted["evil-0"] == 1
    assert audit.runs.set_index("run").lower_bound["evil-0"] == 2.25
    rounds = audit.rounds[audit.rounds.run == "fedavg-0"].set_index("round")
    assert rounds.accuracy.to_dict() == {1: 0.89, 2: 0.90}
    assert rounds.high.to_dict() == {1: pytest.approx(0.98), 2: pytest.approx(0.99)}
    assert rounds.up_payload.tolist() == [2000, 2000]
    attacks = audit.attacks[(audit.attacks.run == "fedavg-0") & (audit.attacks.attack == "loss")].set_index("measure")
    assert attacks.value["auc"] == 0.61
    assert attacks.low["auc"] == pytest.approx(0.57)
    assert attacks.value["tpr_at_fpr_0.01"] == pytest.approx(0.11)
    assert "1000 non-members" in attacks.reason["tpr_at_fpr_0.001"]
    assert bool(attacks.leak["auc"])
    idle = audit.attacks[audit.attacks.attack == "peek"]
    assert not idle.ran.any()
    assert "sees no embeddings" in idle.reason.iloc[0]
    releases = audit.releases[audit.releases.run == "fedavg-dp-0"]
    assert len(releases) == 6, "three entries of two clients"
    training = releases[releases.kind == "training"].iloc[0]
    assert (training.noise_multiplier, training.releases, training.epsilon_of_kind) == (1.0, 2, 9.2)
    assert releases[releases.kind == "weights"].seen_by.tolist() == ["server", "server"]


def test_one_run_is_loaded_by_its_own_folder(folder):
    pytest.importorskip("pandas")
    run = fedaudit.load(str(folder / "runs" / "local-2"))
    assert run.runs.run.tolist() == ["local-2"]
    assert run.releases.empty
    assert list(run.releases.columns) == columns_of("releases")
    with pytest.raises(SettingError, match="no folder"):
        fedaudit.load(folder / "nothing")


def test_load_still_puts_a_state_into_a_model():
    from torch import nn

    model = nn.Linear(2, 1)
    state = fedaudit.state_of(nn.Linear(2, 1))
    assert fedaudit.load(model, state) is model
    assert model.weight.equal(state["weight"])


def test_csv_is_read_by_pandas(folder, tmp_path):
    pd = pytest.importorskip("pandas")
    said = export(folder, "csv", tmp_path / "tables")
    assert "13 runs" in said
    frames = fedaudit.load(folder)
    for table in Tables.names:
        read = pd.read_csv(tmp_path / "tables" / f"{table}.csv")
        mine = getattr(frames, table)
        assert list(read.columns) == list(mine.columns)
        assert len(read) == len(mine)
        for column in mine.select_dtypes("number"):
            pd.testing.assert_series_equal(read[column], mine[column], check_dtype=False)
    assert reported.HOSTILE in pd.read_csv(tmp_path / "tables" / "runs.csv").method.tolist()
    export(folder, "csv", tmp_path / "tables")  # over an earlier export
    (tmp_path / "tables" / "runs.csv").write_text("my own notes\n")
    with pytest.raises(RunError, match=r"runs\.csv, which is not from an export"):
        export(folder, "csv", tmp_path / "tables")


# --- trackers --------------------------------------------------------------------------------------------------


def test_tensorboard_shows_the_curves(folder, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    said = export(folder, "tensorboard", tmp_path / "logs")
    assert "12 runs in" in said
    assert "1 runs without a round are left out" in said
    export(folder, "tensorboard", tmp_path / "logs")  # again: one line, not two
    events = accumulator.EventAccumulator(str(tmp_path / "logs" / "fedavg-1"))
    events.Reload()
    record = read_record(folder / "runs" / "fedavg-1")
    curve = [(e.step, pytest.approx(e.value, rel=1e-6)) for e in events.Scalars("accuracy")]
    assert [(p.round, p.accuracy) for p in record.curve] == curve
    assert [e.value for e in events.Scalars("up_payload")] == [2000.0, 2000.0]
    assert events.Scalars("attacks/loss/server/auc")[0].value == pytest.approx(0.63, rel=1e-6)
    begun, ended = (e.wall_time for e in events.Scalars("accuracy"))
    assert ended - begun == pytest.approx(record.rounds[1].wall_s)
    assert "run/epsilon" not in events.Tags()["scalars"], "infinity is no point of a curve"
    text = events.Tensors("setting/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"method": "fedavg"' in text
    assert '"epsilon": "inf"' in text
    (tmp_path / "logs" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"notes\.txt"):
        export(folder, "tensorboard", tmp_path / "logs")


@pytest.mark.long
def test_mlflow_holds_each_run_once(folder, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    two = tmp_path / "two"
    for name in ("fedavg-0", "fedavg-dp-2"):
        shutil.copytree(folder / "runs" / name, two / name)
    assert "2 runs in the experiment mine" in export(two, "mlflow", tmp_path / "store", project="mine")
    assert "0 runs" in (said := export(two, "mlflow", tmp_path / "store", project="mine"))
    assert "2 were there" in said
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mine")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert len(runs) == 2
    run = runs["fedavg-dp-2"]
    assert run.data.params["method"] == "fedavg"
    assert run.data.params["privacy.training.noise_multiplier"] == "1.0"
    assert run.data.metrics["epsilon"] == pytest.approx(9.4)
    assert run.data.metrics["attacks/loss/server/auc"] == pytest.approx(0.54)
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "clients_mean")
    assert [(m.step, m.value) for m in history] == [(1, pytest.approx(0.62)), (2, pytest.approx(0.63))]
    for name in run.data.metrics:
        steps = [m.step for m in client.get_metric_history(run.info.run_id, name)]
        assert len(steps) == len(set(steps)), f"{name} has two values of one step"
    assert "epsilon" not in runs["fedavg-0"].data.metrics
    assert runs["fedavg-0"].data.tags["fedaudit.epsilon"] == "inf"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["record.json"]


@pytest.mark.long
def test_a_store_of_files_is_refused_before_mlflow_does(folder, tmp_path):
    pytest.importorskip("mlflow")
    (tmp_path / "store" / "0").mkdir(parents=True)
    (tmp_path / "store" / "0" / "meta.yaml").write_text("name: Default\n")
    with pytest.raises(RunError, match="store of files"):
        export(folder, "mlflow", tmp_path / "store")


@pytest.mark.long
def test_wandb_offline_holds_history_config_and_summary(folder, tmp_path, monkeypatch):
    wandb, ended = pytest.importorskip("wandb"), []
    end = wandb.teardown
    monkeypatch.setattr(wandb, "teardown", lambda: ended.append(end()))
    jobs = "_detect_and_apply_job_inputs"  # of wandb's launcher, whose modules take two seconds
    monkeypatch.setattr(wandb.sdk.wandb_run.Run, jobs, lambda run: None, raising=False)
    said = export(folder / "runs" / "fedavg-dp-0", "wandb", tmp_path / "out", project="mine")
    assert "1 runs in" in said
    assert len(ended) == 1, "until it is told to end, wandb's own process may not have written everything yet"
    (path,) = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    found = list(records_of(path))
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, run.run_group) == ("mine", "fedavg-dp-0", "fedavg")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["method"] == "fedavg"
    assert config["fedaudit.epsilon"] == "9.2"
    history = []
    for record in found:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in items})
    assert [(row["_step"], row["accuracy"]) for row in history] == [(1, 0.69), (2, 0.70)]
    summary = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            for i in record.summary.update:
                summary[i.key or "/".join(i.nested_key)] = json.loads(i.value_json)
    assert summary["attacks/loss/server/auc"] == pytest.approx(0.52)
    assert summary["epsilon"] == pytest.approx(9.2)


@pytest.mark.slow
def test_wandbs_own_reader_reads_the_offline_run(folder, tmp_path):
    """`wandb sync` reads the file and sends it to a server, which here is one of the test's own."""
    pytest.importorskip("wandb")
    from wandb_server import synced

    export(folder / "runs" / "fedavg-dp-0", "wandb", tmp_path / "out", project="mine")
    (run,) = (tmp_path / "out" / "wandb").glob("offline-run-*")
    found = synced(run)
    assert (found.run["project"], found.run["displayName"], found.run["groupName"]) == ("mine", "fedavg-dp-0", "fedavg")
    config = {key: item["value"] for key, item in json.loads(found.run["config"]).items() if key != "_wandb"}
    assert (config["method"], config["fedaudit.epsilon"]) == ("fedavg", "9.2")
    assert [(row["_step"], row["accuracy"]) for row in found.history] == [(1, 0.69), (2, 0.70)]
    assert found.summary["epsilon"] == pytest.approx(9.2)


# --- verdicts --------------------------------------------------------------------------------------------------


def cases(text):
    suite = ElementTree.fromstring(text)
    found = {}
    for case in suite:
        outcome = [child.tag for child in case] or ["passed"]
        found[case.get("classname").removeprefix("fedaudit."), case.get("name")] = (outcome[0], case)
    return suite, found


def test_junit_fails_on_refuted_claims_leaks_and_budgets(folder, tmp_path):
    """Plain FedAvg leaks (AUC 0.62, +- 0.04 in each of three seeds) and is rebuilt; a claim of the hostile method is
    refuted; the noise of the private one is not; what was refused is skipped."""
    (tmp_path / "budgets.toml").write_text(
        '[[budget]]\nmethod = "fedavg"\ndirection = "up"\nmax = "1 kB"\n'
        '[[budget]]\nmethod = "local"\nmetric = "accuracy"\nmin = 0.5\n'
    )
    export(folder, "junit", tmp_path / "out" / "verdicts.xml", budget=tmp_path / "budgets.toml")
    suite, found = cases((tmp_path / "out" / "verdicts.xml").read_text())
    by_name = {name: outcome for (_, name), (outcome, _) in found.items()}
    assert by_name["fedavg: membership"] == "failure"
    assert by_name["fedavg: reconstruction"] == "failure"
    claims = {name: found[kind, name] for kind, name in found if kind == "claim"}
    assert [outcome for name, (outcome, _) in claims.items() if reported.HOSTILE in name] == ["failure"]
    refuted = next(case for name, (_, case) in claims.items() if reported.HOSTILE in name)
    assert "at least 2.25" in refuted[0].get("message")
    assert [outcome for name, (outcome, _) in claims.items() if name.startswith("fedavg")] == ["passed"]
    assert next(o for n, o in by_name.items() if n.startswith("fedaf")) == "skipped"
    budgets = {name: outcome for (kind, name), (outcome, _) in found.items() if kind == "budget"}
    assert {o for n, o in budgets.items() if "fedavg" in n} == {"passed"}, "1 kB a client and round is kept"
    assert sorted(o for n, o in budgets.items() if "local" in n) == ["failure", "passed", "passed"]
    assert int(suite.get("tests")) == len(list(suite)) == len(found)
    assert int(suite.get("failures")) == sum(o == "failure" for o in by_name.values())
    with pytest.raises(RunError, match="one file"):
        export(folder, "junit", tmp_path)
    (tmp_path / "mine.xml").write_text("<testsuite name='mine'/>")
    with pytest.raises(RunError, match="was not changed"):
        export(folder, "junit", tmp_path / "mine.xml")


def test_no_leak_passes_and_a_doubtful_one_is_skipped(tmp_path):
    """AUCs of 0.5 in three seeds show nothing. In one of them 0.56 +- 0.04: above chance there, and not over all."""
    folder = reported.write(tmp_path)
    for aucs, expected in (((0.5, 0.5, 0.5), "passed"), ((0.5, 0.56, 0.44), "skipped")):
        for seed, auc in enumerate(aucs):
            path = folder / "runs" / f"local-{seed}"
            found = results.validate_python([reported._membership("loss", "outsider", auc)])
            save_attacks(path, read_record(path).transcript_digest, found)
        export(folder, "junit", tmp_path / "verdicts.xml")
        _, found = cases((tmp_path / "verdicts.xml").read_text())
        assert found["leak", "local: membership"][0] == expected


def test_a_cell_that_failed_is_an_error(tmp_path):
    folder = reported.write(tmp_path)
    cell = {"folder": "runs/broken", "status": "failed", "reason": "no \x00 data"}
    (folder / "audit.json").write_text(json.dumps({"cells": [cell]}))
    export(folder, "junit", tmp_path / "verdicts.xml")
    _, found = cases((tmp_path / "verdicts.xml").read_text())
    outcome, case = found["run", "runs/broken"]
    assert outcome == "error"
    assert case[0].get("message") == "no \ufffd data"


# --- the command -----------------------------------------------------------------------------------------------


def test_the_command(fedaudit, folder, tmp_path):
    code, out, _ = fedaudit("export", folder, "--to", "csv", "--out", tmp_path / "a")
    assert (code, out.split()[0]) == (0, "13")
    assert fedaudit("export", folder, "--to", "excel", "--out", tmp_path / "a")[0] == 2
    code, _, err = fedaudit("export", tmp_path / "none", "--to", "csv", "--out", tmp_path / "b")
    assert code == 2
    assert "no folder" in err
    code, _, err = fedaudit("export", folder, "--to", "csv", "--out", tmp_path / "b", "--budget", "x.toml")
    assert code == 2
    assert "--budget is for --to junit" in err


@pytest.mark.parametrize("target", ["mlflow", "tensorboard", "wandb"])
def test_a_missing_library_is_one_error_that_says_what_to_install(fedaudit, folder, tmp_path, monkeypatch, target):
    monkeypatch.setitem(sys.modules, target, None)
    code, _, err = fedaudit("export", folder, "--to", target, "--out", tmp_path / "a")
    assert code == 2
    assert install(target) in " ".join(err.split())
    assert not (tmp_path / "a").exists()


def test_without_pandas_there_are_rows_and_csv(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    audit = fedaudit.load(folder)
    assert len(audit.rows["runs"]) == 13
    export(folder, "csv", tmp_path / "a")
    with pytest.raises(SettingError, match=r'pip install "pandas'):
        audit.runs  # noqa: B018
    assert set(TARGETS) == {"csv", "junit", "mlflow", "tensorboard", "wandb"}


def test_no_tracker_is_imported_before_it_is_asked_for():
    """Nothing of theirs stands at the top of a module: start-up is as fast without them as with them."""
    heavy = {"pandas", "mlflow", "wandb", "tensorboard", "torch.utils.tensorboard"}
    root = Path(fedaudit.__file__).parent
    for path in [*root.joinpath("reports").glob("*.py"), *root.joinpath("cli").glob("*.py"), root / "__init__.py"]:
        for node in ast.parse(path.read_text()).body:
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not heavy & set(names), path


def test_a_compressed_run_says_so(tmp_path):
    record = read_record(reported.write(tmp_path) / "runs" / "local-0")
    record.setting = Setting.make(**{**record.setting.model_dump(), "compress": "int8"})
    record.save(tmp_path / "runs" / "local-0")
    rows = {row.run: row for row in fedaudit.load(tmp_path).rows["runs"]}
    assert (rows["local-0"].compress, rows["local-1"].compress) == ("int8", None)
    assert "int8" in io.StringIO(fedaudit.load(tmp_path).csv("runs")).read()


# --- runs in which everything differs: helpers/runs/unequal


def test_a_tracker_gets_each_round_at_its_own_time(uneven):
    """Rounds of seed 1 take 2, 5, 10 and 17 s from the second of February on; round 3 has no accuracy."""
    runs = {tracked.name: tracked for tracked in Export(uneven).runs}
    assert sorted(runs) == ["digits-0", "digits-1", "local-0", "mnist-0"]
    told = unequal.raw(uneven, "digits-1")
    found = runs["digits-1"].by_round()
    midnight = datetime(2026, 2, 2, tzinfo=UTC).timestamp()
    assert [(t, at - midnight) for t, at, _ in found] == [(1, 2.0), (2, 7.0), (3, 17.0), (4, 34.0)]
    for (_, _, figures), row in zip(found, told["rounds"], strict=True):
        assert [figures[name] for name in ("up_payload", "down_wire", "wall_s", "participants")] == [
            row["up_payload"], row["down_wire"], row["wall_s"], len(row["participants"]),
        ]  # fmt: skip
        assert ("accuracy" in figures) == (row["utility"] is not None)
    whole = runs["digits-1"].whole()
    assert whole["epsilon"] == 8.25
    assert whole["delta"] == 0.02
    assert whole["attacks/strong/server/auc"] == 0.65
    assert whole["attacks/weak/outsider/auc"] == 0.56
    assert whole["up_wire"] == unequal.sent(told, "up", "wire")
    assert whole["seconds"] == pytest.approx(unequal.work(told))
    assert "seed" not in whole
    assert runs["digits-1"].parameters()["privacy.training.epsilon"] == "3.0"


def test_verdicts_of_unequal_runs(uneven, tmp_path):
    """On digits a claim is refuted, another one holds, and members leak; on MNIST neither is so."""
    export(uneven, "junit", tmp_path / "verdicts.xml")
    _, found = cases((tmp_path / "verdicts.xml").read_text())
    claims = {name: outcome for (kind, name), (outcome, _) in found.items() if kind == "claim"}
    digits = {name: outcome for name, outcome in claims.items() if "dataset=digits" in name}
    assert sorted(digits.values()) == ["failure", "passed"]
    assert [outcome for name, outcome in digits.items() if "ε = 3 for a claim of 3" in name] == ["failure"]
    assert [outcome for name, outcome in claims.items() if "dataset=mnist" in name] == ["passed"]
    leaks = {name: outcome for (kind, name), (outcome, _) in found.items() if kind == "leak"}
    assert [o for n, o in leaks.items() if "membership" in n and "mnist" not in n and "uneven" in n] == ["failure"]
    assert "failure" not in [o for n, o in leaks.items() if "mnist" in n]
