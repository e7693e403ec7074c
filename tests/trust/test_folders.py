"""Nothing of the user's is deleted or overwritten: a folder is ours only if it holds our marker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedaudit import run
from fedaudit.errors import RunError
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.folder import MARKER, claim
from fedaudit.wire.transcript import TranscriptWriter

FOREIGN = {
    "checkpoint/thesis.tex": "years of work",
    "checkpoint/client-000000.1.0": "a name like ours",
    "transcript/index.jsonl": "a user's index",
    "models/global.safetensors": "a user's model",
    "record.json": "{}",
    "setting.json": '{"my": "own"}',
    "attacks.json": "[]",
    "pictures/holiday.png": "sand",
    "scores/bach.pdf": "a fugue",
}


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_refuses_a_folder_with_somebody_elses_files(fedaudit, tmp_path, name, resume):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(FOREIGN[name])
    before = content(tmp_path)
    words = ("run", "--method", "fedavg", "--rounds", "1", "--clients", "2", "--out", tmp_path)
    code, _, err = fedaudit(*words, *(["--resume"] if resume else []))
    assert code == 2
    assert "Traceback" not in err
    assert content(tmp_path) == before


def test_a_run_refuses_a_linked_checkpoint(fedaudit, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "client-000009.1.0").write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / "checkpoint").symlink_to(theirs)
    code, _, err = fedaudit("run", "--method", "fedavg", "--rounds", "1", "--clients", "2", "--out", out)
    assert (code, "symbolic link" in err) == (2, True)
    assert content(theirs) == {"client-000009.1.0": "precious"}


@pytest.mark.parametrize("name", ["runs/notes.txt", "audit.json"])
def test_an_audit_refuses_a_folder_with_somebody_elses_files(fedaudit, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    code, _, err = fedaudit("audit", "--out", tmp_path)
    assert (code, "Nothing was changed" in err) == (2, True)
    assert content(tmp_path) == {name: "mine"}


def test_other_names_beside_a_run_stay_as_they_are(tmp_path, tiny):
    (tmp_path / "README.md").write_text("my project")
    run(tiny(rounds=1, clients=2), out=tmp_path)
    (tmp_path / "checkpoint" / "notes.txt").write_text("kept, too")
    (tmp_path / "transcript" / "mine.pack").write_text("not a pack of ours")
    run(tiny(rounds=2, clients=2), out=tmp_path, resume=True)
    assert (tmp_path / "README.md").read_text() == "my project"
    assert (tmp_path / "checkpoint" / "notes.txt").read_text() == "kept, too"
    assert (tmp_path / "transcript" / "mine.pack").read_text() == "not a pack of ours"


def test_a_run_from_before_the_marker_goes_on_and_gets_one(tmp_path, tiny):
    run(tiny(rounds=1, clients=2), out=tmp_path)
    (tmp_path / MARKER).unlink()
    record = run(tiny(rounds=2, clients=2), out=tmp_path, resume=True)
    assert len(record.rounds) == 2
    assert (tmp_path / MARKER).exists()


def test_an_audit_from_before_the_marker_is_known_by_what_it_left(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "audit.json").write_text(json.dumps({"cells": []}))
    claim(tmp_path, "audit")
    assert (tmp_path / MARKER).exists()


def test_models_are_not_written_through_a_link(tmp_path, tiny):
    run(tiny(rounds=1, clients=2), out=tmp_path / "run")
    theirs = tmp_path / "theirs.safetensors"
    theirs.write_text("a model of somebody's")
    model = tmp_path / "run" / "models" / "global.safetensors"
    model.unlink()
    model.symlink_to(theirs)
    run(tiny(rounds=2, clients=2), out=tmp_path / "run", resume=True)
    assert theirs.read_text() == "a model of somebody's"
    assert not model.is_symlink()


@pytest.mark.parametrize("link", ["pictures", "scores/server", "shadows/x.safetensors"])
def test_an_attack_follows_no_link(fedaudit, tmp_path, tiny, link):
    run(tiny(rounds=0, clients=2), out=tmp_path / "run")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (tmp_path / "run" / link).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / link).symlink_to(theirs)
    code, _, err = fedaudit("attack", tmp_path / "run", "--attack", "loss")
    assert (code, "symbolic link" in err) == (2, True)
    assert not list(theirs.iterdir())


def test_a_sweep_removes_only_names_that_we_write(tmp_path):
    store = Store(tmp_path / "checkpoint")
    store.commit(1, b"state", {})
    kept = ["notes.txt", "client-1", "server.x", "part-of-my-thesis"]
    for name in kept:
        (store.folder / name).write_text(name)
    (store.folder / "server.0").write_text("ours, and old")
    target = tmp_path / "target"
    target.write_text("theirs")
    (store.folder / "server.7").symlink_to(target)
    store.head()
    assert {p.name for p in store.folder.iterdir()} == {"HEAD.json", "server.1", "server.7", *kept}
    assert target.read_text() == "theirs"


def test_an_index_that_is_a_link_is_not_truncated(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("data")
    (tmp_path / "transcript").mkdir()
    (tmp_path / "transcript" / "index.jsonl").symlink_to(theirs)
    from fedaudit.errors import TranscriptError

    with pytest.raises(TranscriptError, match="symbolic link"):
        TranscriptWriter(tmp_path / "transcript", keep_weights=1)
    assert theirs.read_text() == "data"


def test_a_file_in_place_of_the_folder_is_an_error(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(RunError, match="is a file"):
        claim(tmp_path / "out", "run")


def test_looking_into_a_run_makes_no_folder(tmp_path, tiny):
    from fedaudit.runtime.folder import RunFolder

    run(tiny(rounds=0, clients=2), out=tmp_path)
    checkpoint = tmp_path / "checkpoint"
    for path in checkpoint.iterdir():
        path.unlink()
    checkpoint.rmdir()
    assert RunFolder(tmp_path).client_state(0) is None
    assert not checkpoint.exists()


def test_figures_replace_nothing_of_somebody_elses(fedaudit, undrawn, tmp_path, tiny):
    run(tiny(rounds=1, clients=2), out=tmp_path / "runs" / "a")
    figures = tmp_path / "out" / "figures"
    words = ("report", tmp_path / "runs", "--format", "md", "--out", tmp_path / "out")
    assert fedaudit(*words)[0] == 0
    drawn = sorted(path.name for path in figures.glob("*.svg"))
    assert fedaudit(*words)[0] == 0  # ours are replaced
    (figures / MARKER).unlink()
    (figures / drawn[0]).write_text("my drawing")
    code, _, err = fedaudit(*words)
    assert (code, "which is not from a report" in err) == (2, True)
    assert (figures / drawn[0]).read_text() == "my drawing"
    theirs = tmp_path / "theirs"
    figures.rename(theirs)
    figures.symlink_to(theirs)
    (theirs / MARKER).write_text("")
    code, _, err = fedaudit(*words)
    assert (code, "symbolic link" in err) == (2, True)
    assert (theirs / drawn[0]).read_text() == "my drawing"
