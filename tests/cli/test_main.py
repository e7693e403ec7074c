"""The commands, as a shell sees them: output, exit codes, and no traceback for anything a user can get wrong."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys

import pytest
import reported
from typer.testing import CliRunner

from fedaudit.cli.main import app


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    from fedaudit import run

    folder = tmp_path_factory.mktemp("runs") / "a"
    run(method="fedavg", rounds=2, clients=3, out=folder)
    return folder


@pytest.mark.parametrize("command", ["", "audit"])
def test_help_answers_in_under_a_second(command):
    """Measured as processor time, which is the wall time where nothing else runs. The best of three. That no other
    command's help imports more: tests/cli/test_epsilon.py."""
    words = [sys.executable, "-m", "fedaudit", *command.split(), "--help"]
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "Usage" in done.stdout
        if times[-1] < 1:
            break
    assert min(times) < 1


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("methods", "fedavg"),
        ("attacks", "loss"),
        ("datasets", "digits"),
        ("models", "resnet18"),
        ("partitions", "iid"),
    ],
)
def test_lists(fedaudit, what, name):
    """The others as tables: tests/cli/test_output.py. Models are all built for a list: once is enough."""
    table = what == "models"
    code, out, _ = fedaudit("list", what, *([] if table else ["--json"]))
    assert code == 0
    assert name in (
        [line.split()[0] for line in out.splitlines()] if table else [row["name"] for row in json.loads(out)]
    )


def test_list_of_nothing(fedaudit):
    code, _, err = fedaudit("list", "method")
    assert code == 2
    assert "Did you mean 'methods'?" in err


@pytest.mark.long
def test_command_line_over_file_over_defaults(fedaudit, tmp_path):
    (tmp_path / "s.toml").write_text('method = "fedavg"\nclients = 3\nrounds = 5\nseed = 4\n[set]\nE = 2\nB = 8\n')
    code, out, err = fedaudit(
        "run", tmp_path / "s.toml", "--rounds", 1, "--set", "B=32", "--out", tmp_path / "a", "--json"
    )
    assert code == 0, err
    setting = json.loads(out)["setting"]
    assert (setting["clients"], setting["rounds"], setting["seed"]) == (3, 1, 4)
    assert setting["set"] == {"E": 2, "B": 32}
    assert setting["participation"] == 1.0


def test_a_run_leaves_record_transcript_and_models(fedaudit, tmp_path):
    words = ["run", "--method", "fedavg", "--dataset", "digits", "--clients", 5, "--partition", "dirichlet:0.1"]
    words += ["--rounds", 3, "--seed", 0, "--set", "E=1", "--out"]
    code, out, _ = fedaudit(*words, tmp_path / "a")
    assert code == 0
    assert "global model, common test set" in out
    assert f"Everything is in {tmp_path / 'a'}" in out
    for part in ("record.json", "transcript/index.jsonl", "models/global.safetensors"):
        assert (tmp_path / "a" / part).exists()


def test_resume_needs_no_other_option(fedaudit, tmp_path):
    assert fedaudit("run", "--clients", 3, "--rounds", 1, "--set", "E=1", "--out", tmp_path / "a")[0] == 0
    code, out, err = fedaudit("run", "--out", tmp_path / "a", "--resume", "--rounds", 2, "--json")
    assert code == 0, err
    assert len(json.loads(out)["rounds"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--method", "fedavgg"], "Did you mean 'fedavg'?"),
        (["--set", "E"], "write NAME=VALUE"),
        (["--set", "epochs=3"], "Unknown hyper-parameter of fedavg 'epochs'"),
        (["missing.toml"], "There is no file missing.toml"),
        (["--engine", "spark"], "engine"),
        (["--dataset", "npz:nowhere.npz"], "nowhere.npz"),
        (["--clients", "100000"], "records"),
    ],
)
def test_errors_are_one_paragraph(fedaudit, words, message, tmp_path):
    code, _, err = fedaudit("run", *words, "--out", tmp_path / "a")
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_malformed_toml(fedaudit, tmp_path):
    (tmp_path / "s.toml").write_text("rounds = = 3")
    code, _, err = fedaudit("run", tmp_path / "s.toml")
    assert code == 2
    assert "is not valid TOML" in err
    (tmp_path / "s.toml").write_text("runds = 3")
    code, _, err = fedaudit("run", tmp_path / "s.toml")
    assert code == 2
    assert "Did you mean 'rounds'?" in err


def test_show(fedaudit, a_run):
    code, out, _ = fedaudit("show", a_run)
    assert code == 0
    assert "privacy: epsilon = infinity for each client; not protected: Local.w" in out
    code, out, _ = fedaudit("show", a_run, "--json")
    assert json.loads(out)["schema_version"] == 1


@pytest.mark.parametrize("by", ["message", "field", "client", "round"])
def test_transcript_tables_add_up(fedaudit, a_run, by):
    from fedaudit import read_record

    code, out, _ = fedaudit("transcript", a_run, "--by", by, "--json")
    assert code == 0
    rows = json.loads(out)
    record = read_record(a_run)
    for direction in ("up", "down"):
        assert sum(r["payload"] for r in rows if r["direction"] == direction) == record.bytes(direction)
        assert sum(r["wire"] for r in rows if r["direction"] == direction) == record.bytes(direction, "wire")
    if by != "field":
        assert sum(r["messages"] for r in rows) == 2 * 3 * 2
    assert fedaudit("transcript", a_run, "--by", by)[0] == 0


def test_show_of_a_folder_of_runs_is_their_table(fedaudit, a_run, tmp_path):
    """`run --out runs/a`, and then `show runs`."""
    shutil.copytree(a_run, tmp_path / "runs of mine" / "a")
    code, out, _ = fedaudit("show", tmp_path / "runs of mine")
    assert (code, "ledger ε" in out) == (0, True)
    code, _, err = fedaudit("show", tmp_path)
    assert (code, "holds no run" in err) == (2, True)


def test_transcript_of_an_outsider_shows_sizes_only(fedaudit, a_run):
    _, out, _ = fedaudit("transcript", a_run, "--threat", "outsider", "--json")
    assert set(json.loads(out)[0]) == {"seq", "round", "from", "to", "bytes"}


@pytest.mark.long
def test_an_own_method_and_an_own_attack_run_like_the_built_in_ones(fedaudit, tmp_path):
    code, _, err = fedaudit(
        "run", "--method", "outside:Averages", "--clients", 3, "--rounds", 2, "--out", tmp_path / "a"
    )
    assert code == 0, err
    code, out, err = fedaudit("attack", tmp_path / "a", "--attack", "outside:Margin", "--attack", "loss", "--json")
    assert code == 0, err
    own, built_in, *blind = json.loads(out)
    assert all(row["blind"] for row in blind), "the blind baselines always run"
    assert own["ran"]
    assert own["pooled"]["members"] == built_in["pooled"]["members"] > 0
    auc = own["pooled"]["auc"]
    assert auc["low"] <= auc["value"] <= auc["high"]
    assert set(own["client"]) == {"0", "1", "2"}
    code, out, _ = fedaudit("show", tmp_path / "a")
    assert "attack outside:Margin by the server: AUC" in out
    _, out, _ = fedaudit("attack", tmp_path / "a", "--attack", "outside:Margin", "--threat", "outsider", "--json")
    assert json.loads(out)[0] == {
        "attack": "outside:Margin", "threat": "outsider", "settings": {}, "blind": False, "ran": False,
        "source": own["source"],
        "reason": "the outsider sees no weights of client 0",
    }  # fmt: skip


def test_audit_runs_reports_and_does_not_repeat(quick, undrawn, fedaudit, tmp_path):
    (tmp_path / "s.toml").write_text(
        'attacks = ["loss"]\n[base]\nclients = 3\nrounds = 1\nmodel = "mlp"\n'
        '[[methods]]\nmethod = "local"\n[[methods]]\nmethod = "fedavg"\n[[methods]]\nmethod = "outside:Broken"\n'
    )
    code, out, err = fedaudit("audit", tmp_path / "s.toml", "--out", tmp_path / "out")
    assert code == 1, "a failed cell is told by the exit code"
    assert "ZeroDivisionError" in err
    assert f"The report is in {tmp_path / 'out' / 'report.html'}" in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<b>fedavg</b>" in page
    assert "ZeroDivisionError" in page
    records = sorted((tmp_path / "out").glob("runs/*/record.json"))
    before = [path.stat().st_mtime_ns for path in records]
    fedaudit("audit", tmp_path / "s.toml", "--out", tmp_path / "out")
    done = [i for i, path in enumerate(records) if '"status": "done"' in path.read_text()]
    assert len(done) == 2
    assert [records[i].stat().st_mtime_ns for i in done] == [before[i] for i in done]


@pytest.mark.slow  # tests/suite/test_scheduler.py has it without the command line
def test_audit_in_several_processes_gives_the_same(quick, fedaudit, tmp_path):
    from fedaudit import read_record

    (tmp_path / "s.toml").write_text(
        'attacks = ["loss"]\n[base]\nclients = 3\nrounds = 1\n[grid]\nseed = [0, 1]\n'
        '[[methods]]\nmethod = "fedavg"\n[[methods]]\nmethod = "fedavg"\nset = { E = "many" }\nseed = 0\n'
    )
    code, out, _ = fedaudit("audit", tmp_path / "s.toml", "--dry-run")
    assert code == 0
    assert "3 cells" in out
    code, _, err = fedaudit("audit", tmp_path / "s.toml", "--out", tmp_path / "b", "--jobs", 2)
    assert code == 1
    assert "hyper-parameter of fedavg E = 'many'" in err
    fedaudit("audit", tmp_path / "s.toml", "--out", tmp_path / "a")
    digests = [
        {path.parent.name: read_record(path).transcript_digest for path in (tmp_path / name).glob("runs/*/record.json")}
        for name in "ab"
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 2


def test_the_quickstart_suite_is_well_formed():
    from fedaudit.suite.suite_file import read_suite

    suite = read_suite(None)
    cells = suite.cells()
    curves: dict[str, set[float | None]] = {}
    for cell in cells:
        curves.setdefault(cell.method, set()).add(cell.privacy.get("training", {}).get("epsilon"))
    assert curves["fedavg"] == {None, 32.0, 8.0, 2.0}
    assert curves["fedzge"] == {None, 8.0}
    assert curves.keys() >= {"local", "dffke", "fedaf", "fedfree", "fedavg+dfrd"}
    assert {cell.partition for cell in cells} == {"iid", "dirichlet:0.3"}
    assert {cell.aggregate for cell in cells if cell.method == "fedavg"} >= {"secure"}
    assert any(
        isinstance(row, dict) and row.get("attack") == "rmia" for m in suite.methods for row in m.get("attacks", [])
    )
    deltas = {cell.privacy["training"]["delta"] for cell in cells if "training" in cell.privacy}
    assert max(deltas) < 1 / 800**1.1, "a client has at most 800 records"
    assert sum("random-pixel" in str(cell.privacy) for cell in cells) == len({cell.seed for cell in cells}) == 3


def test_report_of_an_empty_folder(fedaudit, tmp_path):
    code, _, err = fedaudit("report", tmp_path)
    assert code == 2
    assert "There is no run below" in err


def test_a_record_that_is_not_valid_is_told_first(fedaudit, tmp_path):
    for name in ("a", "b"):
        reported._save(tmp_path, name, reported._record("fedavg", 0, 0.5), [])
        path = tmp_path / "runs" / name / "record.json"
        path.write_text(path.read_text().replace('"status": "done"', '"status": "over"'))
    first = tmp_path / "runs" / "a"
    for command in (["report", first], ["compare", first, tmp_path], ["export", first, "--to", "csv", "--out", "x"]):
        code, _, err = fedaudit(*command)
        assert code == 2
        assert err.startswith(f"error: {first / 'record.json'} is not a valid run record: status: ")
        assert "There is no run" not in err
    code, _, err = fedaudit("report", tmp_path)
    assert err.startswith(f"error: {first / 'record.json'} is not a valid run record: status: ")
    assert err.rstrip().endswith("(1 more cannot be read either)")


def test_version():
    from fedaudit import __version__

    assert __version__ in CliRunner().invoke(app, ["--version"]).stdout


def test_privacy_commands(fedaudit):
    code, out, _ = fedaudit(
        "privacy", "calibrate", "--epsilon", 1, "--delta", 1e-5, "--calibration", "analytic", "--json"
    )
    assert code == 0
    assert json.loads(out)["sigma"] == pytest.approx(3.7306316348, abs=1e-9)
    code, out, _ = fedaudit(
        "privacy", "calibrate", "--epsilon", 1, "--delta", 1e-5, "--calibration", "total", "--releases", 50, "--json"
    )
    assert json.loads(out)["sigma"] == pytest.approx(26.3795493, abs=1e-6)
    code, out, _ = fedaudit("privacy", "compose", "--noise-multiplier", 5, "--releases", 50, "--delta", 1e-5, "--json")
    composed = json.loads(out)
    assert composed["epsilon_of_record"] == pytest.approx(6.57297006703, abs=1e-10)
    assert composed["epsilon"]["rdp"] == pytest.approx(7.07739, abs=1e-5)
    for words, message in (
        (["calibrate", "--epsilon", 0, "--delta", 1e-5], "epsilon"),
        (["calibrate", "--epsilon", 1, "--delta", 2], "delta"),
        (["calibrate", "--epsilon", 2, "--delta", 1e-5, "--calibration", "classical"], "epsilon <= 1"),
        (["calibrate", "--epsilon", 1, "--delta", 1e-5, "--releases", 5], "--calibration total"),
        (["calibrate", "--epsilon", 1, "--delta", 1e-5, "--calibration", "guess"], "Unknown calibration"),
    ):
        code, _, err = fedaudit("privacy", *words)
        assert code == 2
        assert message in err


def test_comm_plans_without_data(fedaudit):
    """McMahan's FedAvg on ResNet-18: 2 x 10 x 100 x 11,181,642 x 4 bytes, and 8 for each count."""
    words = ["comm", "fedavg", "--dataset", "cifar10", "--model", "resnet18", "--clients", 10, "--rounds", 100]
    code, out, _ = fedaudit(*words, "--json")
    assert code == 0
    planned = json.loads(out)
    assert planned["total"]["bytes"] == 2 * 10 * 100 * 11_181_642 * 4 + 10 * 100 * 8
    assert round(planned["total"]["GiB"], 2) == 83.31
    code, out, _ = fedaudit(*words, "--convention", "wire", "--json")
    assert 1 < json.loads(out)["total"]["bytes"] / planned["total"]["bytes"] < 1.01
    assert fedaudit("comm", "outside:Averages")[0] == 2
    assert fedaudit("comm", "fedavg", "--dataset", "npz:x.npz")[0] == 2
    assert fedaudit(*words)[0] == 0


def test_the_planned_wire_bytes_are_near_the_measured_ones(tmp_path):
    from fedaudit import run
    from fedaudit.runtime.planned_traffic import plan_traffic

    record = run(method="fedavg", rounds=1, clients=3, model="convnet", eval_clients=False, out=tmp_path / "a")
    planned = plan_traffic(record.setting, "wire")
    assert planned["total"]["bytes"] == pytest.approx(
        record.bytes("up", "wire") + record.bytes("down", "wire"), rel=0.005
    )


def test_mistakes_in_an_own_file_are_told_with_file_and_line(fedaudit, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "not_python.py").write_text("x = 1\ndef x(:\n")
    (tmp_path / "fails_itself.py").write_text("\n1 / 0\n")
    code, _, err = fedaudit("run", "--method", "not_python:A", "--out", tmp_path / "a")
    assert code == 2
    assert "not_python.py, line 2: invalid syntax" in " ".join(err.split())
    code, _, err = fedaudit("run", "--method", "fails_itself:A", "--out", tmp_path / "a")
    assert code == 2
    assert "fails while it is imported: ZeroDivisionError" in " ".join(err.split())
    code, _, err = fedaudit("attack", tmp_path, "--attack", "outside:Averages")
    assert code == 2


def test_a_threat_that_is_no_client_is_an_error(fedaudit, a_run):
    code, _, err = fedaudit("transcript", a_run, "--threat", "peer:9")
    assert code == 2
    assert "there is no client 9; the run has 3" in " ".join(err.split())


def test_a_run_without_protection_has_no_claim_to_try(fedaudit, a_run):
    code, _, err = fedaudit("epsilon", "release-path", a_run)
    assert code == 2
    assert "no claim to try" in " ".join(err.split())


def test_a_message_counts_for_each_of_its_fields(fedaudit, a_run):
    """So that a total of messages by field would tell of more than there were; there is none."""
    _, fields, _ = fedaudit("transcript", a_run, "--by", "field", "--json")
    _, messages, _ = fedaudit("transcript", a_run, "--by", "message", "--json")
    assert sum(row["messages"] for row in json.loads(fields)) > sum(row["messages"] for row in json.loads(messages))
