"""Run folders: their names, who may write into them, what is removed, and which rounds must be there."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest
import reported
import torch
from safetensors import safe_open

from fedaudit import State
from fedaudit.errors import RunError
from fedaudit.runtime import folder
from fedaudit.runtime.folder import (
    MARKER,
    claim,
    claim_for_attacks,
    clear_unfinished,
    default_folder,
    folder_name,
    kept_rounds,
    locked,
    rounding,
    setting_key,
)
from fedaudit.runtime.task import ClientState
from fedaudit.setting import EXECUTION, ROUNDING, Setting
from fedaudit.shape import Shape
from fedaudit.training.models import build
from fedaudit.wire.codec import encode


def key(**values):
    return setting_key(Setting.make(device="cpu", **values))


@pytest.mark.parametrize(
    "same",
    [
        {"label": "mine"}, {"data_dir": "elsewhere"}, {"engine": "serial"}, {"isolate": True}, {"twins": "all"},
        {"together": 3}, {"workers": 2}, {"gpu_fraction": 0.5}, {"step": "eager"}, {"precision": "float32"},
        {"threshold": 0.9}, {"update_bound": 2.0}, {"compress": None}, {"sampling": "fixed"},
    ],
    ids=str,
)  # fmt: skip
def test_how_a_run_is_carried_out_is_not_in_its_key(same):
    """Bounds of secure sums are nothing where sums are plain."""
    assert key(**same) == key()


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1}, {"rounds": 3}, {"method": "local"}, {"compress": "int8"}, {"aggregate": "secure"},
        {"sampling": "poisson"}, {"precision": "bf16"}, {"step": "compiled"}, {"channels_last": True},
        {"engine": "stacked"}, {"privacy": {"logits": {"epsilon": 1.0}}}, {"keep_weights": 3},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_a_result_is_in_its_key(other):
    assert key(**other) != key()


def test_parts_of_the_key_count_where_they_matter():
    assert key(aggregate="secure", threshold=0.9) != key(aggregate="secure")
    assert key(aggregate="secure", threshold=0.6) == key(aggregate="secure"), "as usual"
    assert key(engine="stacked", together=3) != key(engine="stacked")
    assert rounding(Setting.make(engine="stacked", together=3, device="cpu")) == {"engine": "stacked", "together": 3}
    assert rounding(Setting.make(engine="serial", device="cpu")) == {}


def test_names_of_folders():
    setting = Setting.make(method="my.mod:M", dataset="npz:a/b.npz", device="cpu")
    assert folder_name(setting) == f"my.mod_M-{setting_key(setting)[:12]}"
    assert default_folder(setting).as_posix() == f"runs/my.mod_M-npz_a_b.npz-{setting_key(setting)[:8]}"


def test_a_folder_becomes_ours_unless_it_is_somebody_elses(tmp_path):
    claim(tmp_path / "new" / "run", "run")
    assert (tmp_path / "new" / "run" / MARKER).read_text() == "fedaudit run 1\n"
    claim(tmp_path / "new" / "run", "run")
    (tmp_path / "a file").write_text("")
    with pytest.raises(RunError, match="is a file, and a folder is needed"):
        claim(tmp_path / "a file", "run")
    theirs = tmp_path / "theirs"
    (theirs / "models").mkdir(parents=True)
    with pytest.raises(RunError, match=r"holds models, which no run of fedaudit left there"):
        claim(theirs, "run")
    assert not (theirs / MARKER).exists()
    claim(theirs, "audit")  # an audit writes no models: nothing of theirs is in the way


def test_a_folder_of_the_first_version_is_ours(tmp_path):
    (tmp_path / "setting.json").write_text(json.dumps({"method": "fedavg", "dataset": "digits", "partition": "iid"}))
    claim(tmp_path, "run")
    assert (tmp_path / MARKER).exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "setting.json").write_text(json.dumps({"method": "fedavg", "dataset": "digits", "partition": "", "x": 1}))
    with pytest.raises(RunError, match="no run of fedaudit left there"):
        claim(other, "run")
    audit = tmp_path / "audit"
    (audit / "runs" / "a").mkdir(parents=True)
    (audit / "runs" / "a" / "setting.json").write_text((tmp_path / "setting.json").read_text())
    claim(audit, "audit")
    mixed = tmp_path / "mixed"
    (mixed / "runs" / "b").mkdir(parents=True)
    with pytest.raises(RunError, match="no audit of fedaudit left there"):
        claim(mixed, "audit")


@pytest.mark.parametrize(("name", "folder", "word"), [("record.json", True, "folder"), ("models", False, "file")])
def test_what_is_of_the_wrong_kind_was_not_left_by_us(name, folder, word, tmp_path):
    claim(tmp_path, "run")
    (tmp_path / name).mkdir() if folder else (tmp_path / name).write_text("")
    with pytest.raises(RunError, match=f"is a {word}, which no run"):
        claim(tmp_path, "run")


def test_links_are_not_followed(tmp_path):
    claim(tmp_path / "run", "run")
    (tmp_path / "run" / "scores").mkdir()
    claim_for_attacks(tmp_path / "run")
    (tmp_path / "run" / "scores" / "a").symlink_to(tmp_path)
    with pytest.raises(RunError, match="is a symbolic link"):
        claim_for_attacks(tmp_path / "run")
    (tmp_path / "run" / "models").symlink_to(tmp_path)
    with pytest.raises(RunError, match="is a symbolic link"):
        claim(tmp_path / "run", "run")


def test_only_an_unfinished_run_is_cleared_and_only_what_is_ours(tmp_path):
    record = reported._record("fedavg", 0, 0.8)
    clear_unfinished(tmp_path)  # nothing is there
    record.save(tmp_path)
    with pytest.raises(RunError, match="holds a finished run"):
        clear_unfinished(tmp_path)
    record.status = "running"
    record.save(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a").write_text("")
    (tmp_path / "scores").mkdir()
    (tmp_path / "mine.txt").write_text("")
    clear_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_one_writer_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(RunError, match="Another process is running in"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("keep", "rounds", "notes", "kept"),
    [
        (10, 20, [], 10), (0, 20, [], 0), (10, 20, ["keep_weights was raised after round 15"], 5),
        (10, 20, ["keep_weights was raised after round 3"], 10), (3, 0, [], 3),
        (9, 20, ["other", "keep_weights was raised after round 12", "keep_weights was raised after round 18"], 2),
    ],
)  # fmt: skip
def test_rounds_whose_models_must_be_there(keep, rounds, notes, kept):
    """A run that keeps more from round 15 of 20 on has those of the last five."""
    rows = [SimpleNamespace(round=t) for t in range(1, rounds + 1)]
    record = SimpleNamespace(setting=SimpleNamespace(keep_weights=keep), rounds=rows, notes=notes)
    assert kept_rounds(record) == kept


def test_the_key_is_a_digest_of_what_a_setting_computes():
    """Settings from before there was a compression, or a choice of sums, have neither in their key."""
    plain, compressed = (Setting.make(device="cpu", compress=how) for how in (None, "int8"))
    usual = ("sampling", "aggregate", "threshold", "update_bound")

    def by_hand(setting, *left_out):
        kept = setting.model_dump(exclude={*EXECUTION, *ROUNDING, *left_out})
        return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()

    assert setting_key(plain) == by_hand(plain, *usual, "compress")
    assert setting_key(compressed) == by_hand(compressed, *usual)


SETTING = json.dumps({"method": "fedavg", "dataset": "digits", "partition": "iid"})


@pytest.mark.parametrize(
    ("runs", "audit", "ours"),
    [
        ({"a": SETTING, "b": SETTING}, None, True),
        ({"a": SETTING, "b": "{}"}, None, False),
        ({"a": SETTING, "b": None}, None, False),
        ({}, None, False),
        ({"a": None}, '{"cells": []}', True),
        ({"a": SETTING}, '{"cells": 3}', False),
        ({"a": SETTING}, "{}", False),
        ({"a": SETTING}, "no JSON", False),
        ({"a": "[]"}, None, False),
    ],
)
def test_an_audit_of_the_first_version_has_runs_of_ours_alone(runs, audit, ours, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a note").touch()
    for name, text in runs.items():
        (tmp_path / "runs" / name).mkdir()
        if text is not None:
            (tmp_path / "runs" / name / "setting.json").write_text(text)
    if audit is not None:
        (tmp_path / "audit.json").write_text(audit)
    assert folder._left_by_first_version(tmp_path, "audit") is ours


@pytest.mark.parametrize("gone", ["method", "dataset", "partition", None])
def test_a_setting_of_the_first_version_names_three_things(gone, tmp_path):
    plain = {key: value for key, value in json.loads(SETTING).items() if key != gone}
    (tmp_path / "setting.json").write_text(json.dumps(plain | {"seed": 3}))
    assert folder._left_by_first_version(tmp_path, "run") is (gone is None)


def test_another_writer_waits_as_long_as_it_was_told(tmp_path, monkeypatch):
    """The clock goes on by its sleep alone: at the deadline itself it gives up."""
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += 0.5

    monkeypatch.setattr(folder.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(folder.time, "sleep", sleep)
    with locked(tmp_path, "audit") as number:
        assert (tmp_path / MARKER).read_text() == "fedaudit audit 1\n"
        assert isinstance(number, int)
        with pytest.raises(RunError, match="Another audit is at work in"), locked(tmp_path, "audit", patience=1.0):
            pass
    assert slept == [0.05, 0.05]


@pytest.mark.parametrize(("status", "rounds"), [("done", [1, 4]), ("running", [1]), ("done", [])])
def test_the_transcript_of_a_finished_run_is_checked_to_its_last_round(status, rounds, monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "check_contents", lambda *of: of)
    monkeypatch.setattr(folder, "kept_rounds", lambda record: "kept")
    rows = [SimpleNamespace(round=t) for t in rounds]
    record = SimpleNamespace(status=status, rounds=rows, transcript_digest="d")
    found = folder.check_transcript(tmp_path, record)
    assert found == ((tmp_path / "transcript", 4, "kept", "d") if status == "done" and rounds else None)


@pytest.mark.parametrize(
    ("privacy", "aggregate", "read"),
    [({}, "plain", False), ({"logits": {}}, "plain", True), ({}, "secure", True), ({"logits": {}}, "secure", True)],
)
def test_noise_and_masks_have_a_secret(privacy, aggregate, read, monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "read_secret", lambda path: path)
    record = SimpleNamespace(setting=SimpleNamespace(privacy=privacy, aggregate=aggregate))
    found = folder.RunFolder.secret.fget(SimpleNamespace(record=record, folder=tmp_path))
    assert found == (tmp_path / folder.KEY_FILE if read else b"")


def test_a_state_is_that_of_the_last_whole_round(tmp_path):
    store = folder.Store(tmp_path / "checkpoint")
    state = encode(ClientState(State({"w": torch.ones(3)}), {}, 0, {}))
    store.put_client(2, 1, 0, state)
    store.commit(1, b"", {})
    here = SimpleNamespace(folder=tmp_path)
    assert folder.RunFolder.client_state(here, 2) == state
    assert folder.RunFolder.client_state(here, 0) is None


def test_a_saved_model_says_its_architecture(tmp_path):
    made = build("mlp", shape=Shape((1, 8, 8)), classes=3)
    assert folder.save_model(tmp_path / "m.safetensors", made) == "m.safetensors"
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata()["arch"] == "mlp"
        assert {name: list(file.get_tensor(name).shape) for name in file.keys()} == {  # noqa: SIM118 (it is no dict)
            name: list(t.shape) for name, t in made.state_dict().items()
        }
