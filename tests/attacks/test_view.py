"""SCAFFOLD, FedNova and FedMD under attack: the view is read right where messages hold more than one model's worth, and
what an overtrained client sends gives its records away."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scenes import Entry, scene
from torch import nn

import fedaudit
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared import _view
from fedaudit.attacks.shared._view import by_class, images_in, inputs_of, received, row_numbers, uploaded
from fedaudit.errors import ContractError
from fedaudit.runtime.folder import RunFolder
from fedaudit.shape import Shape
from fedaudit.training.models import Net
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


# --- models of a view that is made up -------------------------------------------------------------------------------


def weights(value):
    return State({"classifier.weight": torch.tensor([[float(value)]])})


def seen(*entries, **facts):
    """Return a scene whose models have one weight."""

    def model(arch, state):
        if state.keys() != {"classifier.weight"}:
            raise ContractError("another architecture")
        if arch == "net 2":
            return nn.Identity()
        made = Net(nn.Identity(), nn.Linear(1, 1, bias=False), width=1, arch=arch)
        made.load_state_dict(state)
        return made

    return scene(*entries, model=model, **facts)


def weight_of(model):
    return None if model is None else model.classifier.weight.item()


def test_a_state_that_fits_is_a_model():
    here = seen()
    assert weight_of(_view.model_of(here, 0, weights(3))) == 3
    assert _view.model_of(here, 0, {"classifier.weight": torch.zeros(1, 1)}) is None, "no state"
    assert _view.model_of(here, 0, State({"other": torch.zeros(1)})) is None
    assert _view.model_of(here, 2, weights(3)) is None, "no network of ours"


def test_the_model_that_a_client_got_is_the_last_before_its_answer():
    sent = [
        Entry("down", 0, 2, 0, w=("weights", weights(1)), n=("count", 3)),
        Entry("down", 0, 2, 1, w=("weights", weights(2)), v=("weights", State({"part": torch.zeros(1)}))),
        Entry("down", 0, 2, 1, role="relay", w=("weights", weights(3))),
        Entry("down", 0, 2, 1, dropped=True, w=("weights", weights(4))),
        Entry("down", 0, 2, 2, w=("weights", weights(5))),
        Entry("down", 0, 1, 0, w=("weights", weights(6))),
        Entry("down", 1, 2, 0, w=("weights", weights(7))),
        Entry("up", 0, 2, 0, w=("weights", weights(8))),
    ]
    here = seen(*sent)
    found = [weight_of(received(here, Entry("up", 0, 2, ask))) for ask in (0, 1, 2)]
    assert found == [1, 2, 5]
    assert received(here, Entry("up", 0, 3)) is None


def test_a_clients_own_model_by_round_whole_or_as_a_change():
    """Round 1: 5 + 0.5. Round 2: weights come before gradients. Round 3: no start. Round 4: of other names."""
    change = [Entry("up", 0, t, g=("gradients", weights(0.5))) for t in (1, 2, 3)]
    entries = [
        Entry("down", 0, 1, w=("weights", weights(5))), Entry("down", 0, 2, w=("weights", weights(6))), *change,
        Entry("up", 0, 2, w=("weights", weights(9))),
        Entry("down", 0, 4, w=("weights", weights(7))), Entry("up", 0, 4, g=("gradients", State({"b": torch.ones(1)}))),
        Entry("up", 1, 5, w=("weights", weights(1))), Entry("up", 0, 6, dropped=True, w=("weights", weights(1))),
        Entry("up", 0, 7, n=("count", 4)),
    ]  # fmt: skip
    here = seen(*entries)
    assert {t: (entry.round, name) for t, (entry, name) in _view.uploads(here, 0).items()} == {
        1: (1, "g"), 2: (2, "w"), 3: (3, "g"), 4: (4, "g"),
    }  # fmt: skip
    assert {t: (entry.round, weight_of(model)) for t, (entry, model) in uploaded(here, 0).items()} == {
        1: (1, 5.5), 2: (2, 9),
    }  # fmt: skip
    assert [(e.round, name) for e, name in _view.released(here, "gradients", 0)] == [(t, "g") for t in (1, 2, 3, 4)]
    assert _view.others(here) == [1]
    hidden = Entry("up", 3, 1, dropped=True, w=("weights", weights(1)))
    assert _view.others(seen(hidden, *entries, Entry("up", 2, 1, n=("count", 4)), target=1)) == [0, 2]


def test_images_of_an_answer_are_sent_named_or_the_whole_public_set():
    """What was sent comes first, also in several parts; then rows by their numbers; then the whole set."""
    public, x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 2, 2), torch.rand(5, 1, 2, 2)
    upload = Entry("up", 0, 2, 1)

    def found(rows, **values):
        sent = Entry("down", 0, 2, 1, role="public", **{name: (None, value) for name, value in values.items()})
        late = Entry("down", 0, 2, 2, role="public", x=(None, torch.zeros(7, 1, 2, 2)))
        return inputs_of(scene(sent, late, public=public), upload, rows)

    assert torch.equal(found(5, x=x, n=3), x)
    assert torch.equal(found(3, x=x[:2], z=x[2:]), x[2:])
    assert torch.equal(found(5, x=x[:2], z=x[2:]), x)
    assert found(2, n=torch.tensor([3, 1]))[:, 0, 0, 0].tolist() == [3, 1]
    assert torch.equal(found(4, x=x), public)
    assert found(7, x=x) is None
    assert inputs_of(scene(), upload, 4) is None


def test_log_odds_distances_and_counts_by_numpy():
    z, y = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]]), torch.tensor([1, 0])
    p = np.exp(z.double().numpy()) / np.exp(z.double().numpy()).sum(1, keepdims=True)
    true = p[[0, 1], [1, 0]]
    np.testing.assert_allclose(_view.confidence(z, y).numpy(), np.log(true / (1 - true)))
    rows, to = torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[0.0, 1.0], [3.0, 2.0], [9.0, 9.0]])
    assert _view.nearest(rows, to).tolist() == [1, 2]
    assert _view.nearest(rows[:0], to).tolist() == []
    images = torch.rand(3, 1, 2, 2)
    assert torch.equal(_view.numbers_of(scene(), images), images.flatten(1))
    tokens = torch.tensor([[0, 2, 2], [1, 1, 1]])
    assert _view.numbers_of(scene(shape=Shape((3,), tokens=4)), tokens).tolist() == [[1, 0, 2, 0], [0, 3, 0, 0]]
    wide = _view.numbers_of(scene(shape=Shape((2,), tokens=5000)), torch.tensor([[1, 1025]]))
    assert (wide.shape, wide[0, 1].item()) == ((1, 1024), 2), "tokens share a place"
