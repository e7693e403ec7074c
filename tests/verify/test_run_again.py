"""The same setting again from a run's folder, and a folder of a failed run that is used again."""

from __future__ import annotations

import json

import pytest

import fedaudit as package
from fedaudit.errors import RunError
from fedaudit.runtime import runner
from fedaudit.runtime.folder import clear_unfinished
from fedaudit.runtime.run_record import read_record
from fedaudit.suite.suite_file import read_suite, save_suite, saved_suite

TINY = {"rounds": 1, "clients": 2, "model": "mlp", "partition": "iid", "eval_clients": False, "set": {"B": 64}}
WORDS = ["--rounds", 1, "--clients", 2, "--model", "mlp", "--partition", "iid", "--set", "B=64", "--no-eval-clients"]


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once") / "run"
    package.run(method="fedavg", **TINY, out=folder)
    return folder


def test_run_from_a_folder_gives_the_same_messages(fedaudit, once, tmp_path):
    code, out, _ = fedaudit("run", "--from", once, "--out", tmp_path / "again")
    assert code == 0
    assert "settings tuned for digits" not in out, "the setting is the run's, and no other"
    again, before = read_record(tmp_path / "again"), read_record(once)
    assert again.transcript_digest == before.transcript_digest
    assert again.setting == before.setting


def test_a_runs_setting_json_stands_where_toml_does(fedaudit, once, tmp_path):
    assert fedaudit("run", once / "setting.json", "--out", tmp_path / "again")[0] == 0
    assert read_record(tmp_path / "again").transcript_digest == read_record(once).transcript_digest


def test_a_folder_in_the_place_of_a_file_says_what_to_type(fedaudit, once):
    code, _, err = fedaudit("run", once)
    assert code == 2
    assert f"--from {once}" in err


@pytest.mark.parametrize("words", [("run", "--from", "FOLDER"), ("run", "FOLDER/setting.json")])
def test_foreign_code_in_a_folder_needs_trust(fedaudit, tmp_path, words):
    folder = tmp_path / "theirs"
    folder.mkdir()
    setting = {"method": "a_module_of_theirs:Method", "dataset": "digits"}
    (folder / "setting.json").write_text(json.dumps(setting))
    typed = [word.replace("FOLDER", str(folder)) for word in words]
    code, _, err = fedaudit(*typed, "--out", tmp_path / "out")
    assert code == 2
    assert "--trust" in err


SUITE = (
    'attacks = []\n[base]\nmethod = "fedavg"\nrounds = 1\nclients = 2\nmodel = "mlp"\npartition = "iid"\n'
    'eval_clients = false\nset = { B = 64 }\n[[budgets]]\nmax = "1 GiB"\n'
)


def test_an_audits_folder_holds_its_suite(fedaudit, tmp_path):
    """The same cells, by name, are planned from the file and from the folder."""
    (tmp_path / "suite.toml").write_text(SUITE)
    (tmp_path / "a").mkdir()
    suite = read_suite(tmp_path / "suite.toml")
    save_suite(suite, tmp_path / "a")
    assert saved_suite(tmp_path / "a") == suite
    plans = [
        fedaudit("audit", *words, "--out", tmp_path / "b", "--dry-run")
        for words in ((tmp_path / "suite.toml",), ("--from", tmp_path / "a"))
    ]
    assert plans[0] == plans[1]
    assert plans[0][0] == 0


@pytest.mark.slow
def test_an_audit_is_run_again_from_its_folder(fedaudit, tmp_path):
    suite = tmp_path / "suite.toml"
    suite.write_text(SUITE)
    assert fedaudit("audit", suite, "--out", tmp_path / "a")[0] == 0
    assert fedaudit("audit", "--from", tmp_path / "a", "--out", tmp_path / "b")[0] == 0
    a, b = (read_record(next((tmp_path / name / "runs").iterdir())) for name in "ab")
    assert a.transcript_digest == b.transcript_digest
    code, _, err = fedaudit("audit", "--from", tmp_path / "a", "--out", tmp_path / "a")
    assert code == 2
    assert "another folder" in err


def test_an_audits_folder_that_names_foreign_code_needs_trust(fedaudit, tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "suite.json").write_text(json.dumps({"base": {"method": "a_module_of_theirs:Method"}, "attacks": []}))
    code, _, err = fedaudit("audit", "--from", folder, "--out", tmp_path / "b")
    assert code == 2
    assert "--trust" in err


class Broken(Exception):
    pass


def test_the_folder_of_a_failed_run_is_used_again(fedaudit, tmp_path, monkeypatch):
    """The message says the two ways on, and both work; what is not ours stays."""
    out = tmp_path / "run"

    def fails(run, t):
        raise RunError("the method is broken.")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_one_round", fails)
        code, _, err = fedaudit("run", *WORDS, "--out", out)
    assert code == 2
    assert "--resume goes on from its last whole round" in err
    assert "--overwrite starts anew" in err
    (out / "notes.txt").write_text("mine")
    code, _, err = fedaudit("run", *WORDS, "--out", out)
    assert code == 2
    assert err.count("--overwrite starts anew") == 1
    assert fedaudit("run", *WORDS, "--seed", 3, "--out", out, "--overwrite")[0] == 0
    assert read_record(out).setting.seed == 3
    assert (out / "notes.txt").read_text() == "mine"


def test_a_finished_run_is_not_overwritten(fedaudit, once):
    before = (once / "record.json").read_bytes()
    code, _, err = fedaudit("run", *WORDS, "--out", once, "--overwrite")
    assert code == 2
    assert "is for unfinished ones" in err
    assert (once / "record.json").read_bytes() == before


def test_a_record_that_cannot_be_read_is_not_cleared(tmp_path):
    """It may be the finished run of another version, or a file of somebody else's."""
    (tmp_path / "record.json").write_text('{"schema_version": 99, "status": "done"}')
    with pytest.raises(RunError):
        clear_unfinished(tmp_path)
    assert (tmp_path / "record.json").exists()
