"""SCAFFOLD, FedNova and FedMD under attack: the view is read right where messages hold more than one model's worth, and
what an overtrained client sends gives its records away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fedaudit
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._view import by_class, images_in, inputs_of, received, row_numbers, uploaded
from fedaudit.runtime.folder import RunFolder
from fedaudit.wire.message import State

SMALL = {"dataset": "digits", "model": "mlp", "eval_clients": False, "aux": 0.5, "holdout": 0.45, "validation": 0.05}


def scene_of(folder):
    run = RunFolder(folder)
    return Scene(run, run.transcript.view("server"), 0, *run.world.nonmembers(0)), run.world


def scaffold(folder, **options):
    fedaudit.run(method="scaffold", clients=3, partition="iid", rounds=2, out=folder, set=options, **SMALL)
    return folder


def test_the_model_is_told_from_the_control_variate(tmp_path):
    """x and c have the same shapes where there is no batch norm, and so have y and delta c."""
    scene, _ = scene_of(scaffold(tmp_path / "a", B=32, eta_l=0.1))
    entry, model = uploaded(scene, 0)[2]
    sent = next(e for e in scene.view.entries(direction="down", client=0, t=2))
    assert any(bool(t.any()) for t in sent["c"]), "c is not zero any more"
    before = received(scene, entry).state_dict()
    assert all(torch.equal(t, before[name]) for name, t in sent["x"].items())
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in entry["y"].items())


@pytest.mark.slow
def test_updates_of_scaffold_give_members_away(tmp_path):
    (found,) = attack_run(scaffold(tmp_path / "a", E=15, B=8, eta_l=0.2), attacks=["update_alignment"])[:1]
    assert found.pooled.auc.low > 0.5, found.verdict


@pytest.mark.slow
def test_scores_of_fedmd_are_read_with_their_images_and_attacked(tmp_path):
    """The rows' numbers were sent, and not the images: all of the public set, in another order."""
    options = {"E_0": 0, "E_k": 60, "B_0": 1000, "E": 0, "B": 8, "eta": 0.004}
    fedaudit.run(
        method="fedmd", clients=3, partition="iid", rounds=1, public=0.3, out=tmp_path / "a", set=options, **SMALL
    )
    scene, world = scene_of(tmp_path / "a")
    entry, field = scene.released("logits")[0]
    d = next(e for e in scene.view.entries(direction="down", client=0, t=1))["d"].long()
    public = world.public()[0]
    assert len(d) == len(public)
    assert d.tolist() != sorted(d.tolist())
    assert torch.equal(inputs_of(scene, entry, len(entry[field])).cpu(), public[d])
    (gap,) = attack_run(tmp_path / "a", attacks=[{"attack": "logit_gap", "steps": 120}])[:1]
    assert gap.pooled.auc.low > 0.5, gap.verdict


def test_a_part_of_the_public_set_is_found_by_its_numbers(tmp_path):
    options = {"E_0": 0, "E_k": 1, "B_0": 50, "E": 0}
    fedaudit.run(
        method="fedmd", clients=2, partition="iid", rounds=1, public=0.3, out=tmp_path / "a", set=options, **SMALL
    )
    scene, world = scene_of(tmp_path / "a")
    entry, field = scene.released("logits")[0]
    d = next(e for e in scene.view.entries(direction="down", client=0, t=1))["d"].long()
    assert torch.equal(inputs_of(scene, entry, len(entry[field])).cpu(), world.public()[0][d])


# --- values by hand


SCENE = SimpleNamespace(shape=(1, 2, 2), device="cpu")


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        (torch.zeros(5, 1, 2, 2), [5]),
        (torch.zeros(3, 5, 1, 2, 2), [15]),
        (torch.zeros(1, 2, 2), []),  # one image is no table of images: it may be anything of three dimensions
        (torch.zeros(5, 1, 2, 3), []),
        (torch.zeros(5, 1, 2, 2, dtype=torch.long), []),
        ({"a": torch.zeros(2, 1, 2, 2), 3: [torch.zeros(4, 1, 2, 2)]}, [2, 4]),
        (State({"a": torch.zeros(2, 1, 2, 2)}), []),
        ("text", []),
    ],
)
def test_which_tensors_hold_images(value, rows):
    found = list(images_in(SCENE, value))
    assert [len(images) for images in found] == rows
    assert all(images.shape[1:] == (1, 2, 2) for images in found)


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ([2, 0, 1], True), ([0], True), ([3], True), ([-1, 2], False), ([4], False), ([0, 4], False), ([1, 1], False),
        ([], False), ([[0, 1]], False), ([0.0, 1.0], False),
    ],
)  # fmt: skip
def test_what_numbers_rows_of_the_public_set(value, right):
    made = torch.tensor(value) if value else torch.zeros(0, dtype=torch.long)
    assert row_numbers(made, torch.zeros(4, 1)) is right
    assert row_numbers(value, torch.zeros(4, 1)) is False, "a list is no tensor"


@pytest.mark.parametrize(
    ("value", "classes"),
    [
        ({0: torch.zeros(2), 2: torch.zeros(2)}, [0, 2]),
        ({0: torch.zeros(2), 3: torch.zeros(2)}, []),  # of three classes
        ({0: torch.zeros(2), 1: torch.zeros(2, 2)}, []),
        ({0: torch.zeros(2, dtype=torch.long)}, []),
        (State({"a": torch.zeros(2)}), []),
        (torch.zeros(3, 2), []),
    ],
)
def test_what_is_a_table_by_class(value, classes):
    assert list(by_class(value, 3)) == classes
