"""Honest run folders are not accused: methods of all families, attacks, policies, compression, kills and resumes."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import fingerprint
import pytest

import fedaudit
from fedaudit import FedauditError, registry
from fedaudit.errors import NotApplicable
from fedaudit.runtime import runner
from fedaudit.runtime.run_record import read_record
from fedaudit.verify.check import verify

FAMILIES = ["fedfree", "fedproto", "fedgh", "fedgen", "feddm"]  # one of each way to send something; below are all
POLICIES: dict[str, dict[str, Any]] = {
    "training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"},
    "embeddings": {"epsilon": 2.0, "sensitivity": "clip:1", "calibration": "total"},
    "prototypes": {"noise_multiplier": 2.0, "sensitivity": "clip:1"},
    "logits": {"epsilon": 4.0, "sensitivity": "clip:1"},
}


class Killed(Exception):
    pass


def accused(folder, **how) -> str:
    checked = verify(folder, **how)
    assert checked.count("recomputed") > 15
    return "\n".join(finding.text() for finding in checked.contradictions)


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "attacked", "noised", "trained", "summed", "shared"])
def test_what_forgers_copy_is_honest(honest, tmp_path, name):
    """Without a contradiction, also when every task is done again."""
    folder = shutil.copytree(honest / name, tmp_path / name)
    assert not accused(folder, rerun=1.0)


def small(method: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A tiny run of a method, as the fingerprints have it: skewed clients, drop-outs, two architectures if it can."""
    given = next(itertools.islice(fingerprint.settings(method), more.pop("way", 0), None)).model_dump()
    given |= {"server_model": None} if "model" in more else {}
    given["model"] = given["model"].replace("cnn_bn:3,mlp:2", "cnn_bn:2,mlp:1")
    given |= {"rounds": 2, "clients": 3, "seed": 40 + seed, "eval_clients": True, "eval_every": 1, "minimum": 20}
    return given | {"keep_weights": 10, "engine": "serial", "twins": "off"} | more


def run_of(method: str, out: Any, seed: int = 0, **more: Any) -> bool:
    """Run a method with the first of the models that it takes; return whether any fits."""
    for way in range(3):
        given = small(method, seed, way=way, **more)
        try:
            try:
                fedaudit.run(**given, out=out / str(way))
            except Killed:
                fedaudit.run(**given, out=out / str(way), resume=True)
        except NotApplicable:
            return False
        except FedauditError:
            continue
        (out / str(way)).rename(out / "run")
        return True
    return False


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.long if name in ("fedgen", "fedgh") else []) for name in FAMILIES]
)
def test_no_family_of_methods_is_accused(tmp_path, method):
    assert run_of(method, tmp_path)
    assert not accused(tmp_path / "run", rerun=0.2, seed=1)


def test_compressed_uploads_are_not_accused(tmp_path):
    fedaudit.run(**small("fedavg", model="mlp", compress="topk:0.2"), out=tmp_path / "run")
    assert not accused(tmp_path / "run", rerun=0.5, seed=1)


def test_a_stacked_run_is_compared_by_a_tolerance(tmp_path):
    """Stacked clients round otherwise: replies are compared by a stated tolerance, and nobody is accused."""
    fedaudit.run(**{**small("fedavg", model="mlp"), "engine": "stacked"}, out=tmp_path / "run")
    checked = verify(tmp_path / "run", rerun=1.0, seed=1)
    assert not checked.contradictions
    tasks = next(f for f in checked.findings if f.figure == "client tasks")
    assert "up to 0.01 is allowed here" in tasks.reason or "to the bit" in tasks.reason


@pytest.mark.parametrize("mechanism", ["laplace", pytest.param("discrete-gaussian", marks=pytest.mark.long)])
def test_other_mechanisms_are_not_accused(tmp_path, mechanism):
    privacy = {"embeddings": {"mechanism": mechanism, "epsilon": 2.0, "sensitivity": "clip:1"}}
    fedaudit.run(**small("dffke", model="mlp", dropout=0.0, privacy=privacy), out=tmp_path / "run")
    assert not accused(tmp_path / "run", rerun=0.1, seed=1)


@pytest.mark.long
def test_a_run_that_was_killed_and_resumed_is_not_accused(tmp_path, monkeypatch):
    given = small("fedavg", model="mlp", rounds=3, privacy={"training": POLICIES["training"]}, norm="group")
    real = runner._one_round

    def dies(run, t):
        if t == 3:
            raise Killed
        real(run, t)

    monkeypatch.setattr(runner, "_one_round", dies)
    with pytest.raises(Killed):
        fedaudit.run(**given, out=tmp_path / "run")
    assert not verify(tmp_path / "run").contradictions, "an unfinished run claims nothing"
    monkeypatch.undo()
    fedaudit.run(**given, out=tmp_path / "run", resume=True)
    assert not accused(tmp_path / "run", rerun=0.5, seed=2)


def test_a_run_that_goes_on_keeping_more_is_not_accused(tmp_path):
    """States of early rounds are gone for good; the record says since when they are kept."""
    given = small("fedavg", model="mlp", keep_weights=1)
    fedaudit.run(**given, out=tmp_path / "run")
    fedaudit.run(**{**given, "rounds": 4, "keep_weights": 4}, out=tmp_path / "run", resume=True)
    assert any("keep_weights was raised" in note for note in read_record(tmp_path / "run").notes)
    assert not accused(tmp_path / "run", rerun=0.2, seed=1)


def test_a_folder_without_its_checkpoint_rests_on_more_words(copy_of):
    folder = copy_of("plain")
    shutil.rmtree(folder / "checkpoint")
    (folder / "seal.json").unlink()
    checked = verify(folder)
    assert not checked.contradictions
    assert any(f.figure == "copy of the record" and f.verdict == "the author's word" for f in checked.findings)
    assert any(f.figure == "accuracy" and f.verdict == "recomputed" for f in checked.findings)


# --- more than two hundred, in about half an hour -----------------------------------------------------------------

ATTACKED = ["loss", "label_histogram", "embedding_match", "nearest_synthetic", "prototype_membership"]
WAYS: dict[str, dict[str, Any]] = {  # all methods go one way before any goes the next
    "attacked": {},
    "killed": {"seed": 1},
    "training": {"kind": "training", "twins": "1"},
    "secure": {"aggregate": "secure"},
    "updates": {"privacy": {"updates": {"epsilon": 8.0, "clip": 1.0, "where": "server"}}},
    "embeddings": {"kind": "embeddings", "twins": "1"},
    "prototypes": {"kind": "prototypes"},
    "logits": {"kind": "logits"},
    "labels": {"privacy": {"labels": {"mechanism": "randomised-response", "epsilon": 2.0}}},
    "counts": {"privacy": {"label_counts": {"mechanism": "discrete-gaussian", "epsilon": 2.0}}},
}
MANY = [(method, way) for way in WAYS for method in registry.names("methods")]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "way"), MANY)
def test_two_hundred_honest_folders_are_not_accused(tmp_path, monkeypatch, method, way):
    more = dict(WAYS[way])
    if (kind := more.pop("kind", None)) is not None:
        more |= {"privacy": {kind: POLICIES[kind]}, "norm": "group"}
    if way == "killed":
        monkeypatch.setattr(runner, "_one_round", _dies_once(runner._one_round))
    if not run_of(method, tmp_path, more.pop("seed", 0), **more):
        pytest.skip("the setting does not apply to it")
    if way == "attacked":
        fedaudit.attack(tmp_path / "run", attacks=ATTACKED)
    assert not accused(tmp_path / "run", rerun=0.1, seed=3)


def _dies_once(real: Any) -> Any:
    left = [1]

    def round_(run: Any, t: int) -> None:
        if t == 2 and left:
            left.pop()
            raise Killed
        real(run, t)

    return round_
