"""Attacks on one vector per class: each finds a leak that was planted, and nothing in its mended twin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scenes import Entry, scene

import fedaudit
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.score import presence
from fedaudit.attacks.inversion import prototype_inversion
from fedaudit.attacks.inversion.prototype_inversion import PrototypeInversion, learned, solved
from fedaudit.attacks.membership.prototype_membership import ratio
from fedaudit.attacks.property.prototype_property import is_own
from fedaudit.attacks.shared._means import ShadowMeans, releases, vectors
from fedaudit.attacks.shared._models import draw

FEW = {"dataset": "digits", "model": "mlp", "eval_clients": False, "aux": 0.5, "holdout": 0.45, "validation": 0.05}
FEW |= {"clients": 30, "partition": "iid", "rounds": 1}  # about one record of each class for each client
SKEWED = {"dataset": "digits", "model": "mlp", "eval_clients": False, "clients": 4}
STRICT = {"prototypes": {"epsilon": 1.0, "sensitivity": "clip:1", "calibration": "total", "releases": 4}}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs by name, each made once."""
    folder, done = tmp_path_factory.mktemp("means"), {}

    def run(name, **values):
        if name not in done:
            fedaudit.run(out=folder / name, **values)
            done[name] = folder / name
        return done[name]

    return run


def found(folder, attack, clients=None):
    return attack_run(folder, attacks=[attack], clients=clients)[0]


# --- membership -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_candidate_whose_record_is_in_the_mean_is_found_and_not_under_noise(made):
    attack = {"attack": "prototype_membership", "shadows": 8}
    some = list(range(4))
    leak = found(made("open", method="leaky_means:MeanImages", **FEW), attack, some)
    assert leak.leak, leak.verdict
    assert leak.pooled.auc.low > 0.8
    mended = found(made("strict", method="leaky_means:MeanImages", privacy=STRICT, **FEW), attack, some)
    assert not mended.leak, mended.verdict
    assert mended.pooled.auc.low < 0.5 < mended.pooled.auc.high


def test_the_ratio_by_hand():
    """Four shadows' vectors in one entry: 3 and 1 with the candidate, 0 and 0 without. mu_in = 2, mu_out = 0, variance
    2; with a tenth of it added 2.2. For m = 3: (3 - 1) 2 / 2.2 = 20 / 11; for m = 1 it is 0. A candidate that all
    shadows hold, or none, is 0."""
    of_shadows = torch.tensor([[3.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    inside = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 0], [0, 1, 0]]).bool()
    assert ratio(torch.tensor([3.0]).double(), of_shadows, inside).tolist() == pytest.approx([20 / 11, 0, 0])
    assert ratio(torch.tensor([1.0]).double(), of_shadows, inside).tolist() == pytest.approx([0, 0, 0])


# --- inversion --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_records_are_drawn_from_their_means_and_not_under_noise(made):
    attack = {"attack": "prototype_inversion", "shadows": 12}
    some = list(range(4))
    leak = found(made("open", method="leaky_means:MeanImages", **FEW), attack, some)
    assert leak.beats_baselines, leak.verdict
    assert leak.pooled.mse.high < 0.6 * leak.baselines["class_mean"].mse.low
    mended = found(made("strict", method="leaky_means:MeanImages", privacy=STRICT, **FEW), attack, some)
    assert not mended.beats_baselines, mended.verdict


def test_inversion_is_given_no_candidate(made, monkeypatch):
    """Half of the candidates are members: a mean image over them would be nearer to the members by itself."""
    seen = []
    monkeypatch.setattr(
        "fedaudit.attacks.shared._means.draw",
        lambda scene, shadows, online: seen.append(online) or draw(scene, shadows, online),
    )
    found(made("open", method="leaky_means:MeanImages", **FEW), {"attack": "prototype_inversion", "shadows": 4}, [0])
    assert seen == [False]


def test_the_inverse_is_learned_where_there_is_one_and_zero_where_there_is_none():
    g = torch.Generator().manual_seed(0)
    p = torch.randn(40, 6, generator=g, dtype=torch.float64)
    A = torch.randn(6, 9, generator=g, dtype=torch.float64)
    assert torch.allclose(learned([(p, p @ A)]), A, atol=0.05)
    noise = torch.randn(40, 9, generator=g, dtype=torch.float64)
    assert learned([(p, noise)]).abs().max() < 0.1


# --- property ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", ["zero", "echo"])
def test_a_class_that_is_not_held_shows_and_not_where_all_rows_are_the_clients_own(absent, made):
    values = {**SKEWED, "partition": "classes:3", "rounds": 1}
    leak = found(made(absent, method="leaky_means:Padded", set={"absent": absent}, **values), "prototype_property")
    assert leak.leak, leak.verdict
    assert leak.pooled.presence.value == 1
    assert leak.pooled.presence.low > 0.6, "certain it is not"
    assert {client.source for client in leak.client.values()} == {"classes"}
    mended = found(made("mean", method="leaky_means:Padded", set={"absent": "mean"}, **values), "prototype_property")
    assert not mended.leak, mended.verdict
    assert mended.pooled.presence.value == pytest.approx(0.5)


def test_the_size_of_the_noise_shows_the_shares_and_not_where_it_is_one_size(made):
    values = {**SKEWED, "partition": "dirichlet:1", "rounds": 4, "privacy": STRICT}
    leak = found(made("scaled", method="leaky_means:MeanImages", **values), "prototype_property")
    assert {client.source for client in leak.client.values()} == {"noise"}
    assert leak.leak, leak.verdict
    assert leak.pooled.error.value < 0.1
    even = made("even", method="leaky_means:MeanImages", set={"even": True}, **values)
    mended = found(even, "prototype_property")
    assert {client.source for client in mended.client.values()} == {"classes"}
    assert mended.pooled.error.value > 2 * leak.pooled.error.value


def test_presence_by_hand():
    """Held classes are claimed at 0.5 and 0.3, others at 0.3 and 0: of four pairs three are right and one is tied."""
    claimed, held = np.array([0.5, 0.3, 0.3, 0.0]), np.array([True, True, False, False])
    assert presence(claimed, held).value == pytest.approx(7 / 8)
    assert presence(claimed, held > 2).value is None
    assert presence(claimed, held | True).reason == "all clients hold all classes"


def test_what_speaks_of_a_class():
    v = torch.tensor([1.0, 2.0])
    assert is_own(v, [])
    assert is_own(v, [v + 1])
    assert not is_own(torch.zeros(2), [])
    assert not is_own(v, [v + 1, v.clone()])
    assert list(vectors(torch.zeros(3, 2), 3)) == [0, 1, 2]
    assert vectors(torch.zeros(4, 2), 3) == {}
    assert vectors({0: v}, 3).keys() == {0}


def test_without_vectors_nothing_is_said(made):
    folder = made("local", method="local", dataset="digits", model="mlp", rounds=1, clients=2, eval_clients=False)
    for attack in ("prototype_membership", "prototype_inversion", "prototype_property"):
        assert "no vectors by class" in found(folder, attack).reason


def test_the_ridge_by_hand():
    """p'p = diag(4, 16), whose mean is 10: with a ridge of 0.6 the diagonal is 10 and 22. Infinity leaves nothing."""
    p, x = torch.tensor([[2.0, 0.0], [0.0, 4.0]]).double(), torch.tensor([[5.0], [11.0]]).double()
    assert solved(p, x, 0.6).flatten().tolist() == pytest.approx([1.0, 2.0])
    assert solved(p, x, math.inf).tolist() == [[0.0], [0.0]]
    assert solved(torch.zeros(2, 2).double(), x, 1.0).tolist() == [[0.0], [0.0]], "no division by 0"


def test_a_quarter_of_the_shadows_chooses_the_ridge(monkeypatch):
    """Of eight pairs two are kept aside, of three one. The last of three ridges is best on them, and fits all."""
    asked = []

    def fitted(p, x, ridge):
        asked.append((len(p), ridge))
        return torch.full((1, 1), ridge)

    monkeypatch.setattr(prototype_inversion, "solved", fitted)
    monkeypatch.setattr(prototype_inversion, "RIDGES", (1.0, 2.0, 3.0))
    pairs = [(torch.ones(n, 1), torch.full((n, 1), 2.75)) for n in (8, 3)]
    assert learned(pairs).item() == 3.0
    assert asked == [(8, 1.0), (8, 2.0), (8, 3.0), (11, 3.0)]


def test_vectors_and_mean_images_of_a_class():
    """Three shadows, of which two sent class 1. The first holds records 0 and 2 of it, the other record 2 alone."""
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 2, 2)
    here = scene(pool=(x, torch.tensor([1, 0, 1, 1])))
    member = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    shadows = ShadowMeans([{1: torch.tensor([5.0])}, {0: torch.tensor([9.0])}, {1: torch.tensor([7.0])}], member, ())
    p, images = PrototypeInversion()._pairs(here, shadows, 1)
    assert p.tolist() == [[5.0], [7.0]]
    assert images[:, 0].tolist() == [1.0, 2.0]
    p, images = PrototypeInversion()._pairs(here, shadows, 2)
    assert (len(p), len(images)) == (0, 0)


def test_only_vectors_for_a_whole_client_are_class_means():
    tables = {0: torch.ones(4), 2: torch.ones(4)}
    one = Entry("up", 0, 1, unit="client", p=("prototypes", tables))
    rows_of = Entry("up", 0, 2, unit="record", p=("prototypes", tables))
    assert [(m.entry.round, sorted(m.of)) for m in releases(scene(one, rows_of))] == [(1, [0, 2])]
    assert releases(scene(rows_of)) == []
    whole = Entry("up", 0, 3, unit="client", z=("logits", torch.zeros(3, 3)))
    assert [sorted(m.of) for m in releases(scene(whole))] == [[0, 1, 2]], "a row for each class"
    assert len(releases(scene(one, whole))) == 1, "of the first kind that there is"
