"""Label shares from what training changed in the last layer, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scenes import Entry, scene
from torch import nn

from fedaudit.attacks.property import label_histogram
from fedaudit.attacks.property.label_histogram import LabelHistogram, from_update, rows
from fedaudit.wire.message import State
from fedaudit.wire.release import Protection


class Classified(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.classifier = nn.Linear(2, len(weight))
        with torch.no_grad():
            self.classifier.weight.copy_(torch.tensor(weight))
            self.classifier.bias.copy_(torch.tensor(bias))


START = Classified([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], [0.0, 0.0, 0.0])
AFTER = Classified([[2.0, 1.0], [1.5, 1.0], [0.0, 1.0]], [1.0, 0.5, -2.0])


def test_without_an_auxiliary_record_of_each_class_rows_that_grew_are_the_labels():
    """Training raises the row of a label that is there: class 0 by 1 + 1, class 1 by 1/2 + 1/2, class 2 falls."""
    scene = SimpleNamespace(classes=3, auxiliary=(None, torch.tensor([0, 2])))
    shares, size = from_update(scene, START, AFTER)
    assert shares.tolist() == pytest.approx([2 / 3, 1 / 3, 0])
    assert size == pytest.approx((1 + 0.25 + 1 + 1 + 0.25 + 4) ** 0.5)
    assert from_update(scene, START, START) is None, "nothing was learned"


def test_with_all_classes_shares_explain_the_update(monkeypatch):
    """The update is 3 g_0 + 1 g_1, where g_c is the mean gradient of class c, the mean of before and after."""
    g = torch.zeros(3, 3, 3, dtype=torch.float64)
    g[0, 0, 0], g[1, 1, 1], g[2, 2, 2] = 2.0, 2.0, 2.0
    monkeypatch.setattr(label_histogram, "class_gradients", lambda scene, model: g if model is START else 0 * g)
    scene = SimpleNamespace(classes=3, auxiliary=(None, torch.arange(3)))
    end = Classified([[-2.0, 1.0], [1.0, 0.0], [1.0, 1.0]], [0.0, 0.0, 0.0])
    shares, _ = from_update(scene, START, end)
    assert shares.tolist() == pytest.approx([3 / 4, 1 / 4, 0])


def test_layers_of_other_shapes_tell_nothing():
    other = Classified([[1.0, 1.0], [1.0, 1.0]], [0.0, 0.0])
    assert from_update(SimpleNamespace(), START, other) is None
    assert from_update(SimpleNamespace(), SimpleNamespace(classifier=nn.ReLU()), START) is None
    assert [tuple(t.shape) for t in rows(nn.Linear(2, 3))] == [(3, 2), (3, 1)]
    assert len(rows(nn.Linear(2, 3, bias=False))) == 1


def test_one_row_of_known_noise_is_drawn_towards_equal_shares():
    """Five classes, p = 4. The row (3, 1, 1, 1, -1) lies 8 from equal shares: 1 - (4 - 2) 1 / 8 = 3/4."""
    row = torch.tensor([[3.0, 1, 1, 1, -1]]).double()
    assert label_histogram.shrinkage(row, 1.0) == pytest.approx(3 / 4)
    assert label_histogram.shrinkage(row) == 1, "nothing tells its noise"


# --- each source by hand --------------------------------------------------------------------------------------------


def shares(*entries, **facts):
    found = LabelHistogram()._best(scene(*entries, **facts))
    return None if found is None else (found.source, [round(share, 4) for share in found.shares.tolist()])


def counts(t, n, sigma=None):
    protection = None if sigma is None else Protection(mechanism="gaussian", sigma=sigma)
    return Entry("up", 0, t, protection=protection, n=("label_counts", torch.tensor(n)))


def test_counts_are_averaged_over_rounds():
    """(6, 2, 0) and (4, 0, 4) have the mean (5, 1, 2). Counts of other clients, or of other shapes, do not count."""
    both = counts(1, [6.0, 2.0, 0.0]), counts(2, [4.0, 0.0, 4.0])
    assert shares(*both) == ("label_counts", [0.625, 0.125, 0.25])
    assert shares(*both, Entry("up", 1, 1, n=("label_counts", torch.tensor([0.0, 0.0, 9.0])))) == shares(*both)
    assert shares(*both, counts(3, [1.0, 9.0])) == shares(*both)
    assert shares(counts(1, [-1.0, 3.0, -2.0])) == ("label_counts", [0.0, 1.0, 0.0]), "noise may leave less than none"
    assert shares(counts(1, [-1.0, -3.0, -2.0])) == ("label_counts", [0.3333] * 3), "and nothing at all"
    assert shares() is None


def test_counts_under_noise_are_drawn_towards_equal_shares():
    """Five classes: (9, 3, 3, 3, 2), whose mean is 4, lies 25 + 3 + 4 = 32 from it. The noise of the noisier round
    counts: 1 - 2 x 4 / 32 = 3/4, so 4 + 3/4 of each distance: 7.75, 3.25 three times, 2.5."""
    quiet = shares(counts(1, [9.0, 3, 3, 3, 2], sigma=2.0), classes=5)
    assert quiet == ("label_counts", [0.3875, 0.1625, 0.1625, 0.1625, 0.125])
    bare = Entry("up", 0, 1, n=("label_counts", torch.tensor([9.0, 3, 3, 3, 2])))
    two = shares(bare, counts(2, [9.0, 3, 3, 3, 2], sigma=8**0.5), classes=5)
    assert two == quiet, "noise of variance 8 in one of two rounds: 4 in their mean"


def test_labels_are_counted():
    rows_of = (
        Entry("up", 0, 1, y=("labels", torch.tensor([[0, 1], [1, 1]]))),
        Entry("up", 0, 2, y=("labels", torch.tensor([2]))),
    )
    assert shares(*rows_of) == ("labels", [0.2, 0.6, 0.2])
    assert shares(Entry("up", 0, 1, y=("labels", torch.tensor([0.5, 1.0])))) is None, "no whole numbers"
    assert shares(Entry("up", 0, 1, y=("labels", torch.zeros(0).long()))) is None


def test_the_bias_of_a_layer_is_sharpened():
    """The mean of (0.25, 0, 0) and (0, 0, 0.25) is (1/8, 0, 1/8); times 8: e, 1, e over their sum."""
    layer = [Entry("up", 0, t, w=("layers", State({"fc.bias": torch.tensor(b), "fc.weight": torch.ones(3)})))
             for t, b in ((1, [0.25, 0.0, 0.0]), (2, [0.0, 0.0, 0.25]))]  # fmt: skip
    e = 2.718281828459045
    assert shares(*layer) == (
        "layers",
        [round(e / (2 * e + 1), 4), round(1 / (2 * e + 1), 4), round(e / (2 * e + 1), 4)],
    )
    assert shares(Entry("up", 0, 1, w=("layers", State({"fc.bias": torch.ones(2)})))) is None


def test_classes_that_something_was_released_for_are_held():
    vectors = Entry("up", 0, 1, p=("prototypes", {0: torch.ones(4), 2: torch.ones(4)}))
    assert shares(vectors) == ("classes", [0.5, 0.0, 0.5])
    pictures = Entry("up", 0, 1, s=("synthetic_images", {1: torch.zeros(2, 1, 2, 2)}))
    assert shares(pictures) == ("classes", [0.0, 1.0, 0.0])
    assert shares(vectors, pictures) == ("classes", [0.3333] * 3)
    wide = Entry("up", 0, 1, p=("prototypes", {0: torch.ones(2, 2)}))
    assert shares(wide) is None, "rows, not a vector"
    assert shares(Entry("up", 0, 1, p=("prototypes", {5: torch.ones(4)}))) is None, "no such class"


def test_outputs_lean_towards_the_classes_that_a_client_has():
    """Soft labels (1, 0, 0) and (0, 1, 0) have the mean (1/2, 1/2, 0); equal logits a third each. Both count alike."""
    soft = Entry("up", 0, 1, q=("soft_labels", torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])))
    assert shares(soft) == ("outputs", [0.5, 0.5, 0.0])
    logits = Entry("up", 0, 2, z=("logits", torch.zeros(7, 3)))
    assert shares(soft, logits) == ("outputs", [0.4167, 0.4167, 0.1667])
    by_round = Entry("up", 0, 1, z=("logits", {"1": torch.zeros(2, 3)}))
    assert shares(by_round) == ("outputs", [0.3333] * 3)
    passed = SimpleNamespace(value=torch.tensor([[0.0, 0.0, 1.0]]))
    assert shares(relayed=lambda kind: [passed] if kind == "soft_labels" else []) == ("outputs", [0.0, 0.0, 1.0])
    assert shares(Entry("up", 0, 1, z=("logits", torch.zeros(3)))) is None
    assert shares(Entry("up", 0, 1, z=("logits", torch.zeros(2, 4)))) is None


def test_the_most_telling_release_is_read():
    every = [
        Entry("up", 0, 1, q=("soft_labels", torch.tensor([[0.0, 0.0, 1.0]]))),
        Entry("up", 0, 1, p=("prototypes", {1: torch.ones(4)})), Entry("up", 0, 1, y=("labels", torch.tensor([0]))),
        counts(1, [1.0, 1.0, 2.0]),
    ]  # fmt: skip
    for n, source in ((4, "label_counts"), (3, "labels"), (2, "classes"), (1, "outputs")):
        assert shares(*every[:n])[0] == source


@pytest.mark.parametrize("got", [True, False])
def test_rounds_are_weighted_by_the_size_of_their_updates(got, monkeypatch):
    """Updates of sizes 3 and 1 tell (1, 0, 0) and (0, 1, 0). Without the model that a client got, its upload of the
    round before stands for it, and the first round has none."""
    monkeypatch.setattr(label_histogram, "uploaded", lambda scene, k: {2: ("entry 2", "b"), 1: ("entry 1", "a")})
    monkeypatch.setattr(label_histogram, "received", lambda scene, entry: f"got {entry}" if got else None)
    asked = []

    def told(scene, start, model):
        asked.append((start, model))
        one = torch.zeros(3).double()
        one[0 if model == "a" else 1] = 1
        return one, 3.0 if model == "a" else 1.0

    monkeypatch.setattr(label_histogram, "from_update", told)
    found = LabelHistogram()._weights(scene())
    if got:
        assert asked == [("got entry 1", "a"), ("got entry 2", "b")]
        assert found.tolist() == pytest.approx([0.75, 0.25, 0.0])
    else:
        assert asked == [("a", "b")]
        assert found.tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_without_any_update_the_mean_prediction_is_taken(monkeypatch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    nn.init.zeros_(model[1].weight)
    with torch.no_grad():
        model[1].bias.copy_(torch.tensor([0.0, 0.0, 1.0]).mul(2).exp().log())
    monkeypatch.setattr(label_histogram, "uploaded", lambda scene, k: {1: ("entry", model)})
    monkeypatch.setattr(label_histogram, "received", lambda scene, entry: None)
    x = torch.rand(5, 1, 2, 2)
    found = LabelHistogram()._weights(scene(auxiliary=(x, torch.zeros(5).long())))
    assert found.tolist() == pytest.approx(torch.tensor([0.0, 0.0, 2.0]).softmax(0).tolist())
    assert LabelHistogram()._weights(scene()) is None, "no auxiliary record"
    monkeypatch.setattr(label_histogram, "uploaded", lambda scene, k: {})
    assert LabelHistogram()._weights(scene(auxiliary=(x, torch.zeros(5).long()))) is None


@pytest.mark.parametrize("bias", [True, False])
def test_the_mean_gradient_of_each_class_by_numpy(bias):
    """Softmax less the label, times what comes to the last layer; the bias comes last."""
    torch.manual_seed(1)
    model = nn.Module()
    model.encoder = nn.Linear(4, 2)
    model.classifier = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3, bias=bias))
    model.forward = lambda x: model.classifier(model.encoder(x.flatten(1)))
    x, y = torch.rand(6, 1, 2, 2), torch.tensor([0, 2, 0, 1, 0, 2])
    found = label_histogram.class_gradients(scene(auxiliary=(x, y)), model)
    e = model.classifier[0](model.encoder(x.flatten(1))).detach().double().numpy()
    z = np.exp(model(x).detach().double().numpy())
    error = z / z.sum(1, keepdims=True) - np.eye(3)[y]
    e = np.concatenate([e, np.ones((6, 1))], 1) if bias else e
    wanted = [sum(np.outer(error[i], e[i]) for i in range(6) if y[i] == c) / int((y == c).sum()) for c in range(3)]
    np.testing.assert_allclose(found.numpy(), np.stack(wanted), rtol=1e-5, atol=1e-7)
    assert not model.classifier[1]._forward_hooks, "nothing is left at the layer"


def test_a_release_that_speaks_of_classes():
    here, one, pictures = scene(), torch.ones(4), torch.ones(2, 1, 2, 2)
    speaks = label_histogram.speaks_of_classes
    assert speaks({0: one, 2: one}, "prototypes", here)
    assert speaks({0: pictures}, "synthetic_images", here)
    assert not speaks({0: pictures}, "prototypes", here)
    assert not speaks({0: one}, "synthetic_images", here)
    for value in ({0: one, 3: one}, {"0": one}, {0: one, 1: [1.0]}, {0: one, 1: torch.ones(2, 2)}, {-1: one}):
        assert not speaks(value, "logits", here)


def test_the_best_release_is_the_claim_and_without_one_it_says_so():
    seen = scene(counts(1, [6.0, 2.0, 0.0]))
    found = LabelHistogram().run(seen)
    assert (found.shares.tolist(), found.source) == ([0.75, 0.25, 0.0], "label_counts")
    assert LabelHistogram().cannot(seen) is None
    assert (
        LabelHistogram().cannot(scene(target=2)).endswith("sees nothing of client 2 that this could read labels from")
    )
