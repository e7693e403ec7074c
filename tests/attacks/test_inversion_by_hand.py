"""What inversion attacks make of what a view shows: each step by other code, on tensors that are made up."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scenes import Entry, scene
from torch import nn

from fedaudit.attacks.inversion import (
    _invert,
    class_inversion,
    decoder,
    feature_match,
    paired_logits,
    prototype_inversion,
)
from fedaudit.attacks.inversion._invert import Inverter, Inverting, learn, model_at, per_record
from fedaudit.attacks.inversion.class_inversion import ClassInversion
from fedaudit.attacks.inversion.decoder import DecoderAttack
from fedaudit.attacks.inversion.feature_match import FeatureMatch
from fedaudit.attacks.inversion.gradient_match import closed_form, first_linear
from fedaudit.attacks.inversion.paired_logits import PairedLogits
from fedaudit.attacks.inversion.prototype_inversion import PrototypeInversion
from fedaudit.attacks.inversion.synthetic_leak import SyntheticLeak
from fedaudit.attacks.property import prototype_property
from fedaudit.attacks.property.prototype_property import from_noise
from fedaudit.attacks.shared._means import ShadowMeans
from fedaudit.errors import ThreatError
from fedaudit.training.losses import ce
from fedaudit.wire.release import Protection


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- closed form ------------------------------------------------------------------------------------------------------


def test_inputs_of_a_linear_layer_in_closed_form():
    """Entries of the bias 0, 1, -4, 2, 3 and 0.5, the largest first: -4, 3, 2, 1, 0.5. The row of 3 leaves [-1, 1],
    that of 1 is that of -4 but for 0.005, and that of 0.5 differs from it in one pixel."""
    bias = torch.tensor([0.0, 1.0, -4.0, 2.0, 3.0, 0.5])
    images = torch.tensor([[9.0, 9.0], [0.505, 0.25], [0.5, 0.25], [-1.0, 1.0005], [0.1, 1.5], [0.5, 0.27]])
    update = {"l.weight": images * bias[:, None], "l.bias": bias, "m.bias": torch.ones(6)}
    wanted = [[0.5, 0.25], [-1.0, 1.0005], [0.5, 0.27]]
    assert closed_form(update, "l", 9).numpy() == pytest.approx(np.array(wanted), abs=1e-6)
    assert closed_form(update, "l", 2).numpy() == pytest.approx(np.array(wanted[:2]), abs=1e-6)
    update["l.weight"] = update["l.weight"] + torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])[:, None] * 100
    assert closed_form(update, "l", 9).tolist() == [[-1.0, -1.0]], "none lies within: the first, as near as it may be"


def test_the_first_layer_with_weights_decides():
    linear = nn.Linear(4, 3)
    assert first_linear(nn.Sequential(nn.Flatten(), linear, nn.Linear(3, 2)), 4) == "1"
    assert first_linear(nn.Sequential(nn.Flatten(), linear, nn.Linear(3, 2)), 3) is None
    assert first_linear(nn.Sequential(nn.Conv2d(1, 1, 1), linear), 4) is None
    assert first_linear(nn.Sequential(nn.Linear(4, 3, bias=False)), 4) is None
    assert first_linear(nn.Flatten(), 4) is None


# --- inverters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dull", [False, True])
def test_inputs_are_standardised_by_the_first_draw(dull, monkeypatch):
    """An entry that never varies is divided by a tenth of the mean spread; if none varies, by a millionth."""
    jobs = []
    monkeypatch.setattr(_invert, "join", jobs.append)

    class Through(nn.Module):
        def __init__(self, inputs, shape, width):
            super().__init__()
            jobs.append((inputs, tuple(shape), width))

        def forward(self, e):
            return e

    monkeypatch.setattr(_invert, "Inverter", Through)
    first = torch.tensor([[1.0, 5.0, 7.0], [3.0, 5.0, 13.0]])
    first = first[:1].repeat(2, 1) if dull else first
    later = torch.tensor([[2.0, 6.0, 4.0]])
    images = torch.zeros(2, 1, 4, 4)

    def draw(index):
        return (first, images) if len(index) == 2 else (later, images[:1])

    rng = torch.Generator()
    invert = learn(draw, 2, (1, 4, 4), steps=3, batch=5, width=2, lr=0.25, rng=rng)
    size, job = jobs
    assert size == (3, (1, 4, 4), 2)
    assert (job.records, job.steps, job.batch, job.lr, job.rng) == (2, 3, 5, 0.25, rng)
    mean = first.mean(0)
    scale = torch.full((3,), 1e-6) if dull else torch.tensor([1.0, 0.1 * 4 / 3, 3.0])
    assert job.draw(torch.arange(1))[0][0].tolist() == pytest.approx(((later - mean) / scale)[0].tolist())
    assert invert(later)[0].tolist() == pytest.approx(((later - mean) / scale)[0].tolist())
    assert not job.model.training


def test_an_inverter_learns_by_adam_with_a_falling_step():
    """Four steps by a loop written anew: the step is lr (1 + cos(pi t / 4)) / 2."""
    x, e = drawn(5, 1, 5, 6).clamp(-1, 1), drawn(5, 2, seed=1)
    torch.manual_seed(0)
    model = Inverter(2, (1, 5, 6), 2).double()
    other = Inverter(2, (1, 5, 6), 2).double()
    other.load_state_dict(model.state_dict())
    indices = []

    def draw(index):
        indices.append(index)
        return e[index], x[index]

    told = []
    job = Inverting(model, draw, 5, 4, 3, 0.01, torch.Generator().manual_seed(5), lambda *of: told.append(of))
    job.alone()
    assert [len(index) for index in indices] == [3, 2, 3, 2]
    assert told == [(t, 4, f"inverter, step {t} of 4") for t in range(4)]
    free = [p for p in other.parameters() if p.requires_grad]
    optimiser = torch.optim.Adam(free, lr=0.01)
    for t, index in enumerate(indices):
        optimiser.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * t / 4)) / 2
        optimiser.zero_grad()
        ((other(e[index]) - x[index]) ** 2).mean().backward()
        optimiser.step()
    for name, p in model.state_dict().items():
        torch.testing.assert_close(p, other.state_dict()[name], rtol=1e-6, atol=1e-8)


def test_an_inverter_grows_twice_and_is_cut_to_the_image():
    model = Inverter(3, (2, 5, 6), 4)
    assert model.seed == (8, 2, 2)
    assert model.layers(torch.zeros(1, 8, 2, 2)).shape == (1, 2, 8, 8)
    assert model(torch.zeros(7, 3)).shape == (7, 2, 5, 6)
    widths = [(m.in_channels, m.out_channels, m.kernel_size) for m in model.layers if isinstance(m, nn.Conv2d)]
    assert widths == [(8, 4, (3, 3)), (4, 4, (3, 3)), (4, 2, (3, 3))]
    assert [p.requires_grad for m in model.layers if isinstance(m, nn.Conv2d) for p in (m.bias,)] == [
        False,
        False,
        True,
    ]


def test_the_model_behind_a_release(monkeypatch):
    """The one in the same message if it is whole and was kept, else the one that the client had been sent."""
    sent = nn.Linear(1, 1)
    models = {"whole": nn.Linear(2, 2), "part": None}
    monkeypatch.setattr(_invert, "model_of", lambda scene, target, value: models[value])
    monkeypatch.setattr(_invert, "received", lambda scene, entry: sent if entry.round == 1 else None)
    here = scene()
    own = Entry("up", 0, 1, e=("embeddings", "whole"), w=("weights", "part"), v=("weights", "whole"))
    found = model_at(here, own)
    assert found is models["whole"]
    assert not found.training
    assert not any(p.requires_grad for p in found.parameters())
    for entry in (
        Entry("up", 0, 1, e=("embeddings", "whole")),
        Entry("up", 0, 1, dropped=True, v=("weights", "whole")),
    ):
        sent.train().requires_grad_(True)
        assert model_at(here, entry) is sent
        assert not sent.training
        assert not sent.weight.requires_grad
    assert model_at(here, Entry("up", 0, 2, w=("weights", "part"))) is None


# --- single attacks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "clip"), [("embeddings", 1.5), ("embeddings", None), ("prototypes", 1.5), ("logits", 1.5)]
)
def test_the_gap_of_a_match_by_numpy(kind, clip):
    """Outputs are 2 x of the first two pixels, logits 3 x; only embeddings are clipped. Rows 2 and 0 are matched."""

    class Model:
        def encode(self, x):
            return 2 * x.flatten(1)[:, :2]

        def __call__(self, x):
            return 3 * x.flatten(1)[:, :2]

    targets, x = drawn(3, 2, seed=1), drawn(2, 1, 3, 3, seed=2)
    index = torch.tensor([2, 0])
    protection = Protection(mechanism="gaussian", sigma=1.0, clip=clip)
    found = FeatureMatch(tv=0.5)._loss(kind, Model(), targets, protection)(x, index)
    for i, row in enumerate(index.tolist()):
        image = x[i, 0].numpy()
        made = (3 if kind == "logits" else 2) * image.flatten()[:2]
        if kind == "embeddings" and clip is not None:
            made = made * min(1.0, clip / np.linalg.norm(made))
        target = targets[row].numpy()
        variation = np.abs(np.diff(image, axis=0)).mean() + np.abs(np.diff(image, axis=1)).mean()
        wanted = ((made - target) ** 2).sum() / (target**2).sum() + 0.5 * variation
        assert float(found[i]) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("found", "model", "auxiliary", "words"),
    [
        ([], True, 2, "released no embeddings with one row per record"),
        (["first", "last"], False, 2, "sees no encoder of client 0"),
        (["first", "last"], True, 0, "no auxiliary images to train on"),
        (["first", "last"], True, 2, None),
    ],
)
def test_what_a_decoder_needs(found, model, auxiliary, words, monkeypatch):
    asked = []
    monkeypatch.setattr(decoder.Attack, "cannot", lambda self, scene: None)
    monkeypatch.setattr(decoder, "per_record", lambda scene, kind: [(name, "e") for name in found])
    monkeypatch.setattr(decoder, "model_at", lambda scene, entry: asked.append(entry) or (True if model else None))
    y = torch.zeros(auxiliary).long()
    told = DecoderAttack().cannot(scene(auxiliary=(y, y)))
    assert told is None if words is None else words in told
    assert asked == (["last"] if found else [])
    monkeypatch.setattr(decoder.Attack, "cannot", lambda self, scene: "another reason")
    assert DecoderAttack().cannot(scene(auxiliary=(y, y))) == "another reason"


def test_some_images_of_a_decoder_are_averages_of_two():
    """The draws are repeated from an equal generator: another image, its weight, and whether it is mixed at all."""
    x = drawn(5, 1, 2, 2).float()
    image = x[:3]
    found = DecoderAttack(mix=0.6)._mixed(image, x, torch.Generator().manual_seed(4))
    rng = torch.Generator().manual_seed(4)
    other = torch.randint(5, (3,), generator=rng)
    weight, dice = torch.rand(3, 1, 1, 1, generator=rng), torch.rand(3, 1, 1, 1, generator=rng)
    for i in range(3):
        w = float(weight[i])
        wanted = w * image[i] + (1 - w) * x[other[i]] if float(dice[i]) < 0.6 else image[i]
        torch.testing.assert_close(found[i], wanted)
    for attack in (DecoderAttack(mix=0.0), DecoderAttack(mix=0.6, labels=True)):
        assert attack._mixed(image, x, rng) is image


def test_an_image_of_each_class_from_what_shadows_sent(monkeypatch):
    """Class 0: three shadows, whose images follow their vectors by A. Class 1: one shadow. Class 2: another width."""
    A = torch.tensor([[1.0, 0.0, 0.5, 0.0], [0.0, 0.25, 0.0, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.1, 0.2], [0.3, 0.0], [-0.1, 0.4]], dtype=torch.float64)
    x = p @ A

    def learned(pairs):
        ((vectors, images),) = pairs
        assert torch.equal(vectors, p - p.mean(0))
        assert torch.equal(images, x - x.mean(0))
        return A

    monkeypatch.setattr(prototype_inversion, "learned", learned)
    pairs = {0: (p, x), 1: (p[:1], x[:1]), 2: (torch.zeros(3, 5), x)}
    monkeypatch.setattr(PrototypeInversion, "_pairs", lambda self, scene, shadows, c: pairs[c])
    target = SimpleNamespace(of={2: torch.zeros(2), 0: torch.tensor([0.5, -0.5]), 1: torch.zeros(2)})
    monkeypatch.setattr(PrototypeInversion, "compared", lambda self, scene, online: (target, None) if not online else 0)
    found = PrototypeInversion().run(scene())
    assert found.labels.tolist() == [0]
    wanted = x.mean(0) + (torch.tensor([0.5, -0.5], dtype=torch.float64) - p.mean(0)) @ A
    assert found.images.flatten().tolist() == pytest.approx(wanted.tolist())
    target.of.pop(0)
    with pytest.raises(ThreatError, match="no shadow sent a vector"):
        PrototypeInversion().run(scene())


def test_the_mean_image_behind_a_shadows_vector():
    """Shadows 0 and 2 sent class 1. Records 1, 2 and 4 are of it; shadow 2 holds 2 and 4, shadow 0 none."""
    pool = (torch.arange(5.0)[:, None, None, None].expand(5, 1, 2, 2), torch.tensor([0, 1, 1, 0, 1]))
    member = torch.tensor([[1, 0, 0, 1, 0], [1, 1, 1, 1, 1], [1, 0, 1, 0, 1]]).bool()
    shadows = ShadowMeans([{1: torch.tensor([5.0])}, {0: torch.tensor([6.0])}, {1: torch.tensor([7.0])}], member, ())
    p, x = PrototypeInversion()._pairs(scene(pool=pool), shadows, 1)
    assert (p.tolist(), x[:, 0].tolist()) == ([[5.0], [7.0]], [0.0, 3.0])
    assert [len(part) for part in PrototypeInversion()._pairs(scene(pool=pool), shadows, 2)] == [0, 0]


def test_sizes_of_classes_from_the_noise_by_numpy(monkeypatch):
    """sigma_c is the root mean square of differences of two rounds over sqrt 2, and N_c = 1 + K / sigma_c."""
    smallest = {"value": 3.0}
    monkeypatch.setattr(
        prototype_property, "mechanism_of", lambda public: SimpleNamespace(smallest_class=lambda of: smallest["value"])
    )
    rows = {0: drawn(3, 2), 2: 9.0 * drawn(2, 2, seed=3)}
    found = [
        SimpleNamespace(of={0: rows[0][0], 2: rows[2][0]}, protection=SimpleNamespace(sigma=99.0)),
        SimpleNamespace(of={0: rows[0][1]}, protection=SimpleNamespace(sigma=99.0)),
        SimpleNamespace(of={0: rows[0][2], 2: rows[2][1]}, protection=SimpleNamespace(sigma=2.5)),
    ]
    K = 3.0 * 2.5
    sigma = {c: math.sqrt((np.diff(of.numpy(), axis=0) ** 2).mean() / 2) for c, of in rows.items()}
    wanted = {c: 1 + max(K / sigma[c], 3.0) for c in (0, 2)}
    assert from_noise(found, {0, 2}) == pytest.approx(wanted)
    assert K / sigma[2] < 3.0 < K / sigma[0], "one is at the smallest class, the other above it"
    found[2].of.pop(2)
    assert from_noise(found, {0, 2}) is None, "one vector has no difference"
    assert from_noise(found, {0}) == pytest.approx({0: wanted[0]})
    for value in (None, 0.5):
        smallest["value"] = value
        assert from_noise(found, {0}) is None
    smallest["value"] = 1.0
    assert from_noise(found, {0}) is not None


def test_rows_that_belong_to_records_are_told_from_others():
    own, public = (
        Entry("up", 0, t, unit=unit, e=("embeddings", t), z=("logits", t)) for t, unit in ((1, "record"), (2, "client"))
    )
    again = Entry("up", 0, 3, unit="record", e=("embeddings", 3))
    assert per_record(scene(own, public, again), "embeddings") == [(own, "e"), (again, "e")]


@pytest.mark.parametrize("release", ["auto", "logits", "prototypes"])
def test_a_release_is_matched_that_comes_with_its_model(release, monkeypatch):
    """The last of the first kind that is of records or classes, and whose model was seen."""
    logits = [Entry("up", 0, t, unit="record", z=("logits", drawn(2, 3))) for t in (1, 2)]
    public = Entry("up", 0, 4, unit="client", z=("logits", drawn(2, 3)))
    means = Entry("up", 0, 3, unit="client", p=("prototypes", {2: torch.ones(4)}))
    models = {1: "model 1", 2: "model 2", 3: "model 3", 4: "model 4", 5: None}
    unknown = Entry("up", 0, 5, unit="record", z=("logits", drawn(2, 3)))
    monkeypatch.setattr(feature_match, "model_at", lambda scene, entry: models[entry.round])
    attack = FeatureMatch(release=release)
    found = attack._found(scene(*logits, means, public, unknown))
    own = (logits[1], "z", "model 2", "logits")
    assert found == (own if release == "logits" else (means, "p", "model 3", "prototypes"))
    assert attack.cannot(scene(*logits, means)) is None
    kinds = "embeddings or prototypes or logits" if release == "auto" else release
    why = attack.cannot(scene(public, unknown))
    assert f"sees no {kinds} of client 0 by record or class together with the model" in why


@pytest.mark.parametrize("by_label", [True, False])
def test_images_are_searched_for_the_first_rows_or_classes(by_label, monkeypatch):
    """Two at most. Classes are told as labels, rows by their numbers."""
    rows, asked = drawn(3, 4), {}
    table = {5: rows[0], 1: rows[1], 3: rows[2]}
    public = Protection(mechanism="gaussian", sigma=1.0)
    entry = Entry("up", 0, 1, protection=public, e=("prototypes", table if by_label else rows))
    monkeypatch.setattr(FeatureMatch, "_found", lambda self, of: (entry, "e", "model", "prototypes"))
    monkeypatch.setattr(FeatureMatch, "_loss", lambda self, *of: of)
    monkeypatch.setattr(feature_match, "starts", lambda *of: of)
    monkeypatch.setattr(
        feature_match, "descend", lambda *of, **more: (asked.update(of=of, more=more), (drawn(2, 1), None))[1]
    )
    seen = scene(classes=6, rng=lambda purpose: f"rng of {purpose}", tell="tell")
    found = FeatureMatch(most=2, steps=7, lr=0.4, restarts=3, batch=9).run(seen)
    assert torch.equal(found.images, drawn(2, 1))
    if by_label:
        assert (found.labels.tolist(), found.rows) == ([5, 1], None)
    else:
        assert (found.rows.tolist(), found.labels) == ([0, 1], None)
    (kind, model, targets, protection), begin = asked["of"]
    assert (kind, model, protection, begin) == ("prototypes", "model", public, (seen, 2, "rng of feature_match"))
    assert torch.equal(targets, rows[:2])
    assert asked["more"] == {"steps": 7, "lr": 0.4, "restarts": 3, "batch": 9, "tell": "tell"}


def test_of_classes_that_say_nothing_all_are_alike():
    """A mean that is 0 is of no record: no class is held. One that is not 0 is held alone."""
    empty = Entry("up", 0, 1, unit="client", p=("prototypes", {1: torch.zeros(4)}))
    found = prototype_property.PrototypeProperty().run(scene(empty))
    assert (found.shares.tolist(), found.source) == (pytest.approx([1 / 3] * 3), "classes")
    one = Entry("up", 0, 1, unit="client", p=("prototypes", {1: torch.ones(4), 2: torch.zeros(4)}))
    assert prototype_property.PrototypeProperty().run(scene(one)).shares.tolist() == [0, 1, 0]
    assert prototype_property.is_own(torch.tensor([0.0, 2.0]), [torch.tensor([1.0, 2.0]), torch.tensor([0.0])])
    assert not prototype_property.is_own(torch.tensor([0.0, 2.0]), [torch.ones(2), torch.tensor([0.0, 2.0])])


def test_a_decoder_learns_from_protected_rows_of_several_rounds(monkeypatch):
    """The last two of three releases with a model, side by side, and labels if they travel with them."""
    rows, labels, asked = [drawn(3, 2, seed=t) for t in range(4)], torch.tensor([2, 0, 1]), {}
    entries = [Entry("up", 0, t, unit="record", e=("embeddings", rows[t])) for t in range(4)]
    named = Entry("up", 0, 4, unit="record", y=("labels", labels))
    models = {t: SimpleNamespace(encode=lambda x, t=t: x.flatten(1)[:, :2] * t) for t in (0, 1, 3)}
    monkeypatch.setattr(decoder, "model_at", lambda scene, entry: models.get(entry.round))
    monkeypatch.setattr(decoder, "same_noise", lambda e, how, rng: e + 1)
    monkeypatch.setattr(
        decoder, "learn", lambda draw, *of, **more: asked.update(draw=draw, of=of, more=more) or (lambda e: e)
    )
    x, y = drawn(5, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1])
    seen = scene(*entries, named, auxiliary=(x, y), rng=lambda purpose: f"rng of {purpose}", tell="tell")
    found = DecoderAttack(releases=3, labels=True, steps=9, batch=5, width=3, lr=0.5).run(seen)
    hot = np.eye(3)[[2, 0, 1]]
    np.testing.assert_allclose(found.images.numpy(), np.concatenate([rows[1], rows[3], hot], 1))
    assert found.rows.tolist() == [0, 1, 2]
    assert asked["of"] == (5, seen.shape)
    assert asked["more"] == {
        "steps": 9, "batch": 5, "width": 3, "lr": 0.5, "rng": "rng of decoder", "tell": "tell",
    }  # fmt: skip
    inputs, images = asked["draw"](torch.tensor([3, 1]))
    flat = x[[3, 1]].flatten(1)[:, :2].numpy()
    np.testing.assert_allclose(inputs.numpy(), np.concatenate([flat + 1, 3 * flat + 1, np.eye(3)[[0, 1]]], 1))
    assert torch.equal(images, x[[3, 1]])
    bare = DecoderAttack(releases=1, labels=False, mix=0.0).run(seen).images
    assert torch.equal(bare, rows[3])
    assert asked["draw"](torch.tensor([3]))[0].shape == (1, 2)


def test_synthetic_images_of_the_last_upload_are_the_claim():
    """Three at most of five, in their order."""
    first, x = torch.zeros(9, 1, 2, 2), drawn(5, 1, 2, 2).float()
    tables = {0: first}, {1: x[:2], 2: x[2:]}
    uploads = [Entry("up", 0, t, s=("synthetic_images", table)) for t, table in enumerate(tables, 1)]
    seen = scene(*uploads, rng=lambda purpose: torch.Generator().manual_seed(len(purpose)))
    kept = torch.randperm(5, generator=torch.Generator().manual_seed(len("synthetic_leak")))[:3].sort().values
    assert torch.equal(SyntheticLeak(most=3).run(seen).images, x[kept])
    assert torch.equal(SyntheticLeak(most=5).run(seen).images, x)
    assert SyntheticLeak().cannot(seen) is None
    assert SyntheticLeak().cannot(scene()).endswith("sees no synthetic_images of client 0")
    empty = scene(Entry("up", 0, 1, s=("synthetic_images", {0: torch.zeros(2)})))
    assert SyntheticLeak().cannot(empty) == "client 0 uploaded no synthetic image"


# --- images of each class from a model --------------------------------------------------------------------------------


class Norms(nn.Module):
    """Two layers with batch norms, one of which stores nothing, and a classifier of three classes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
        self.second, self.again = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
        self.free, self.last = nn.BatchNorm2d(3, track_running_stats=False), nn.Linear(12, 3)
        for seed, (norm, n) in enumerate(((self.norm, 2), (self.again, 3))):
            norm.running_mean.copy_(drawn(n, seed=seed))
            norm.running_var.copy_(drawn(n, seed=seed + 5).square() + 0.5)

    def forward(self, x):
        return self.last(self.free(self.again(self.second(self.norm(self.first(x))))).flatten(1))


def stated(norm, x):
    """Return how far the statistics of what comes to a norm are from those that it stores, by numpy."""
    rows = x.detach().numpy().transpose(1, 0, 2, 3).reshape(x.shape[1], -1)
    mean, var = norm.running_mean.numpy(), norm.running_var.numpy()
    return np.sqrt(((rows.mean(1) - mean) ** 2).sum()) + np.sqrt(((rows.var(1) - var) ** 2).sum())


def test_the_loss_of_deep_inversion_by_numpy():
    """Cross-entropy, the prior, and the distance of both norms' statistics over all images, for each image."""
    torch.manual_seed(3)
    model = Norms().double().eval()
    labels, index, x = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([3, 0, 4]), drawn(3, 1, 2, 2, seed=8)
    loss = ClassInversion(tv=0.3, l2=0.7, bn=0.2)._deep(model, labels)
    apart = stated(model.norm, model.first(x)) + stated(model.again, model.second(model.norm(model.first(x))))
    logits, pixels = model(x).detach().numpy(), x.numpy()[:, 0]
    entropies = np.log(np.exp(logits).sum(1)) - logits[np.arange(3), [1, 0, 2]]
    variation = np.abs(np.diff(pixels, axis=1)).mean((1, 2)) + np.abs(np.diff(pixels, axis=2)).mean((1, 2))
    expected = entropies + 0.3 * variation + 0.7 * (pixels**2).mean((1, 2)) + 0.2 * apart
    for _ in range(2):  # a second look counts once
        assert loss(x, index).tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_the_loss_of_miface_is_the_logarithm_of_the_others_share():
    logits = drawn(3, 4)
    loss = class_inversion.miface(lambda x: logits[x], torch.tensor([2, 0, 3, 1]))
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    found = loss(torch.tensor([2, 1]), torch.tensor([3, 0]))
    assert found.tolist() == pytest.approx([np.log(1 - p[2, 1]), np.log(1 - p[1, 2])])


@pytest.mark.parametrize(
    ("form", "norms", "deep", "words"),
    [
        ("auto", True, True, None),
        ("auto", False, False, None),
        ("miface", True, False, None),
        ("miface", False, False, None),
        ("deepinversion", True, True, None),
        ("deepinversion", False, True, "the model of client 2 has no batch norm with stored statistics"),
    ],
)
def test_an_image_of_each_class_is_searched_from_the_model_that_is_seen(form, norms, deep, words, monkeypatch):
    model = Norms() if norms else nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    seen, asked = scene(target=2, rng=lambda purpose: f"rng of {purpose}", tell="tell"), {}
    attack = ClassInversion(form=form, per_class=2, steps=7, lr=0.4, restarts=3)
    monkeypatch.setattr(class_inversion, "target_model", lambda of: model if of is seen else None)
    monkeypatch.setattr(class_inversion, "starts", lambda *of: of)
    monkeypatch.setattr(class_inversion, "miface", lambda *of: ("miface", *of))
    monkeypatch.setattr(ClassInversion, "_deep", lambda self, *of: ("deep", *of))
    monkeypatch.setattr(
        class_inversion, "descend", lambda *of, **more: (asked.update(of=of, more=more), ("images", None))[1]
    )
    why = attack.cannot(seen)
    assert why is None if words is None else why.startswith(words)
    assert attack.cannot(scene(target=1)).endswith("sees no model of client 1")
    found = attack.run(seen)
    assert found.images == "images"
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]
    (which, attacked, labels), begin = asked["of"]
    assert (which, attacked, labels) == ("deep" if deep else "miface", model, found.labels)
    assert begin == (seen, 6, "rng of class_inversion")
    assert asked["more"] == {"steps": 7, "lr": 0.4, "restarts": 3, "batch": 6, "tell": "tell"}
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


# --- pairs of answers -------------------------------------------------------------------------------------------------


def answered(t, kind, answers, images=None, client=2):
    """Return an upload, and the message before it that brought images."""
    upload = Entry("up", client, t, z=(kind, answers))
    return [upload] if images is None else [Entry("down", client, t, x=("images", images)), upload]


def test_answers_are_paired_with_the_images_that_they_are_of():
    """Logits first, then soft labels; the temperature of 2 takes the root of a soft label."""
    logits, soft = drawn(2, 3), torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0], [0.64, 0.0, 0.36]]).double()
    x = [drawn(n, 1, 2, 2, seed=n) for n in (2, 3, 4)]
    entries = [
        *answered(1, "soft_labels", soft, x[1]),
        *answered(2, "logits", logits, x[0]),
        *answered(3, "logits", drawn(4, 2), x[2]),  # of other classes
        *answered(4, "logits", drawn(4, 1, 3), x[2]),
        *answered(5, "logits", {0: drawn(4, 3)}, x[2]),
        *answered(6, "logits", drawn(4, 3)),  # of images that nobody saw
        *answered(7, "logits", drawn(4, 3), x[2], client=1),
        *answered(8, "soft_labels", drawn(3, 3), x[2]),  # of other images
    ]
    halves = np.exp(logits.numpy() / 2)
    roots = np.sqrt([[0.25, 0.75, 0], [1, 0, 0], [0.64, 0, 0.36]])
    expected = np.concatenate([v / v.sum(1, keepdims=True) for v in (halves, roots)])
    images = torch.cat([x[0], x[1]])
    for most, left in ((20, 5), (5, 5), (4, 4)):
        attack = PairedLogits.model_construct(tau=2.0, most=most)
        client, of = attack._pairs(scene(*entries, target=2))
        np.testing.assert_allclose(client.numpy(), expected[-left:], atol=2e-4)
        assert torch.equal(of, images[-left:])
    client, of = PairedLogits()._pairs(scene(target=2, classes=4))
    assert (client.shape, of.shape) == ((0, 4), (0, 1, 2, 2))


@pytest.mark.parametrize(("rows", "auxiliary", "words"), [
    (15, 1, "sees fewer than 16 logits or soft labels of client 2 with the images that they are of"),
    (16, 1, None), (16, 0, "there are no auxiliary records to train a server's model on"),
])  # fmt: skip
def test_what_paired_logits_needs(rows, auxiliary, words):
    entries = answered(1, "logits", drawn(rows, 3), drawn(rows, 1, 2, 2))
    held = torch.zeros(auxiliary, 1, 2, 2), torch.zeros(auxiliary).long()
    why = PairedLogits().cannot(scene(*entries, target=2, auxiliary=held))
    assert why is None if words is None else why.endswith(words)


@pytest.mark.parametrize(("p", "others"), [(None, 1 / 3), (0.5, 0.25), (0.0, 0.5)])
def test_the_network_is_asked_where_the_client_is_certain_and_the_server_is_not(p, others, monkeypatch):
    """It learns images drawn to their mean by gamma = 1/4, from both softened answers."""
    x, logits, asked, queries = drawn(16, 1, 2, 2), drawn(16, 3), {}, []
    weight = drawn(4, 3, seed=4)
    monkeypatch.setattr(PairedLogits, "_server", lambda self, of: lambda images: images.flatten(1) @ weight)

    def learned(draw, *of, **more):
        asked.update(draw=draw, of=of, more=more)
        return lambda query: queries.append(query) or "images"

    monkeypatch.setattr(paired_logits, "learn", learned)
    seen = scene(*answered(1, "logits", logits, x), target=2, rng=lambda purpose: f"rng of {purpose}", tell="tell")
    found = PairedLogits(p=p, gamma=0.25, tau=2.0, steps=9, batch=5, width=3, lr=0.5).run(seen)
    assert found.images == "images"
    assert found.labels.tolist() == [0, 1, 2]
    assert asked["of"] == (16, seen.shape)
    assert asked["more"] == {
        "steps": 9, "batch": 5, "width": 3, "lr": 0.5, "rng": "rng of paired_logits", "tell": "tell",
    }  # fmt: skip
    index = torch.tensor([7, 1])
    inputs, target = asked["draw"](index)
    both = [np.exp(v / 2) for v in (logits.numpy()[[7, 1]], x.numpy()[[7, 1]].reshape(2, 4) @ weight.numpy())]
    np.testing.assert_allclose(inputs.numpy(), np.concatenate([v / v.sum(1, keepdims=True) for v in both], 1), 1e-4)
    np.testing.assert_allclose(target.numpy(), (x.numpy()[[7, 1]] * 4 + x.numpy().mean(0)) / 5)
    sure = 1 / 3 if p is None else p
    undecided = [[sure if c == of else others for c in range(3)] for of in range(3)]
    (query,) = queries
    np.testing.assert_allclose(query.numpy(), np.concatenate([np.eye(3), undecided], 1), rtol=1e-6)


def test_a_query_about_one_class_is_certain_on_both_sides(monkeypatch):
    queries = []
    monkeypatch.setattr(PairedLogits, "_server", lambda self, of: lambda images: images.flatten(1)[:, :1])
    monkeypatch.setattr(paired_logits, "learn", lambda *of, **more: queries.append)
    entries = answered(1, "logits", drawn(16, 1), drawn(16, 1, 2, 2))
    PairedLogits().run(scene(*entries, target=2, classes=1, rng=lambda purpose: None, tell=None))
    assert queries[0].tolist() == [[1.0, 1.0]]


def test_the_servers_own_model_is_trained_on_auxiliary_records(monkeypatch):
    fitted, held = {}, (torch.zeros(2, 1, 2, 2), torch.zeros(2).long())
    monkeypatch.setattr(paired_logits.models, "build", lambda arch, **more: fitted.update(arch=arch, **more) or layer)
    monkeypatch.setattr(paired_logits, "fit", lambda *of, **more: fitted.update(of=of, **more))
    layer = nn.Linear(1, 1)
    seen = scene(auxiliary=held, rng=lambda purpose: f"rng of {purpose}")
    assert PairedLogits(server_steps=11)._server(seen) is layer
    assert not layer.training
    opt = fitted.pop("opt")
    assert (opt.make, opt.options["lr"]) == (torch.optim.Adam, 1e-3)
    assert fitted == {
        "arch": "cnn", "shape": seen.shape, "classes": 3, "of": (layer, ce, held), "batch": 32, "steps": 11,
        "rng": "rng of paired_logits server",
    }  # fmt: skip


def test_clients_go_side_by_side_where_models_stack(monkeypatch):
    monkeypatch.setattr(paired_logits, "stacks_on", lambda device: device == "fast")
    assert PairedLogits().at_once(SimpleNamespace(device="fast")) == 16
    assert PairedLogits().at_once(SimpleNamespace(device="slow")) == 1


def test_labels_of_a_decoder_are_those_that_were_sent_last(monkeypatch):
    """Of two releases the second is taken, and of its labels those of its records, in their order."""
    sent = [(torch.tensor([2, 2, 2, 2]), torch.tensor([0, 1])), (torch.tensor([1, 0, 2, 1]), torch.tensor([2, 0]))]
    monkeypatch.setattr(decoder, "per_record", lambda scene, kind: sent if kind == "labels" else [])
    seen = SimpleNamespace(device=torch.device("cpu"), classes=3)
    assert DecoderAttack(labels=True)._labels(seen).tolist() == [[0, 0, 1], [0, 1, 0]]
    assert DecoderAttack(labels=False)._labels(seen) is None
    monkeypatch.setattr(decoder, "per_record", lambda scene, kind: [])
    assert DecoderAttack(labels=True)._labels(seen) is None
