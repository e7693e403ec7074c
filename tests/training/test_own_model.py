"""Models of somebody's own: how they are made, where they are cut, and what is said of those that cannot be."""

from __future__ import annotations

import mine
import pytest
import torch
from torch import nn

from fedaudit.errors import SettingError
from fedaudit.shape import Shape
from fedaudit.training import models, own_model
from fedaudit.training.transformer import Transformer

ROW, TEXT = Shape((6,)), Shape((5,), tokens=9)


def built(arch, shape=ROW, classes=3):
    torch.manual_seed(0)
    return models.build(arch, shape=shape, classes=classes).eval()


@pytest.mark.parametrize(
    ("arch", "width", "classifier"),
    [
        ("mine:Net", 16, nn.Linear),  # its head is the first to be written down, and the last to be reached
        ("mine:Net#head", 16, nn.Linear),
        ("mine:TwoLayerHead", 8, nn.Linear),
        ("mine:TwoLayerHead#top", 12, nn.Sequential),
        ("mine:logistic", 6, nn.Linear),
        ("mine:Net/4", 4, nn.Linear),
    ],
)
def test_a_model_is_cut_and_says_the_same(arch, width, classifier):
    net, x = built(arch), torch.randn(7, 6)
    assert isinstance(net.classifier, classifier)
    assert (net.width, net.arch) == (width, arch)
    assert net.encode(x).shape == (7, width)
    torch.testing.assert_close(net.classify(net.encode(x)), net(x))
    if "/" not in arch:
        torch.manual_seed(0)
        whole = getattr(mine, arch.partition(":")[2].partition("#")[0])((6,), 3).eval()
        torch.testing.assert_close(net(x), whole(x))  # the very weights that its author would have drawn


def test_its_size_is_planned_without_a_draw():
    before = torch.get_rng_state()
    assert models.describe("mine:Net", ROW, 3)["parameters"] == 6 * 16 + 16 + 16 * 3 + 3
    assert torch.equal(before, torch.get_rng_state())


def test_it_is_made_for_real_also_where_only_sizes_count(monkeypatch):
    """Own code may look at its numbers: they are those that its author fills in."""

    class Ones(nn.Linear):
        def __init__(self, shape, classes):
            super().__init__(6, classes)
            nn.init.ones_(self.weight)

    monkeypatch.setattr(mine, "Ones", Ones, raising=False)
    assert (models.structure("mine:Ones", shape=ROW, classes=3).classifier.weight == 1).all()


def test_clients_may_differ_in_theirs():
    assert models.assign("mine:Net:2,mlp:1", 3) == ["mine:Net", "mine:Net", "mlp"]
    assert models.assign("mine:Net#head/8", 2) == ["mine:Net#head/8"] * 2
    assert own_model.paths_in("mine:Net#head/8:2,mlp:1,mine:logistic:1") == ["mine:Net", "mine:logistic"]


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x):
        return self.layers(x)


class Softmax(Lazy):
    def forward(self, x):
        return super().forward(x).softmax(1)


class Around(Lazy):
    def forward(self, x):
        return super().forward(x) + x[:, :3]


class PerToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 3)

    def forward(self, x):
        return self.out(x.unflatten(1, (3, 2))).amax(1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class HalfTied(nn.Module):
    """The classifier has a bias of its own, and the encoder's weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv1d(1, 3, 6)

    def forward(self, x):
        return self.c(x[:, None])[:, :, 0]


class Wants(Lazy):
    def __init__(self, layers):
        super().__init__()


class Breaks(Lazy):
    def __init__(self):
        raise ZeroDivisionError("on purpose")


READY = Lazy()
NUMBER = 3


def text():
    return "no model"


def wide():
    return nn.Sequential(nn.Linear(6, 4))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Softmax", r"cut before layers\.2: .*losses take logits"),
        ("Around", "goes a second way around it"),
        ("PerToken", r"cut before out: .*PerToken#PART"),
        ("Convolution#c", "one vector for each record"),
        ("Convolution", r"has no linear layer to be cut at.*Convolution#PART, with PART one of c\."),
        ("Lazy#head", r"head is not a part of it\. Choose from layers, layers\.0"),
        ("Wants", "wants layers, and is given shape, classes, num_classes by name"),
        ("Breaks", r"fails while it is made: ZeroDivisionError: on purpose \(.*test_own_model\.py, line \d+\)"),
        ("READY", "is made already, and all clients would train the same one"),
        ("NUMBER", "is a int. Name a class, or a function"),
        ("text", "makes a str. It has to make a torch.nn.Module"),
        ("wide", r"value of shape \(2, 4\)\. It has to be a tensor of shape \(2, 3\)"),
        ("Nobody", "cannot be imported: .*Write package.module:Class"),
    ],
)
def test_what_cannot_be_taken_is_said(name, says, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "own_models", __import__("sys").modules[__name__])
    with pytest.raises(SettingError, match=says):
        built(f"own_models:{name}")


@pytest.mark.parametrize("name", ["Tied", "HalfTied"])
def test_shared_weights_are_not_torn_apart(name, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "own_models", __import__("sys").modules[__name__])
    with pytest.raises(SettingError, match="b shares weights with the encoder"):
        built(f"own_models:{name}", classes=6)


def test_lazy_layers_take_their_sizes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "own_models", __import__("sys").modules[__name__])
    assert built("own_models:Lazy").encoder.layers[0].in_features == 6


@pytest.mark.parametrize(
    ("arch", "shape", "says"),
    [
        ("cnn", ROW, r"is for images, and the records are rows of 6 numbers\. Choose from mlp, or name your own"),
        (
            "mlp",
            TEXT,
            r"is for images and rows, and the records are texts of 5 token ids below 9\. .* from transformer,",
        ),
        ("transformer", Shape((1, 8, 8)), "is for tokens, and the records are images of 1 x 8 x 8"),
        ("mine:Net@0.5", ROW, "only named models have scaled variants"),
        ("mine:", ROW, "is not the path of a model"),
        ("transformer@0.5", TEXT, "no scaled variants"),
    ],
)
def test_models_are_for_their_records(arch, shape, says):
    with pytest.raises(SettingError, match=says):
        built(arch, shape)


def test_padding_says_nothing():
    """More of it, or what else its place would have held, leaves a text's embedding as it is."""
    torch.manual_seed(0)
    net = Transformer(TEXT, width=8, depth=2, heads=2).eval()
    x = torch.tensor([[3, 4, 0, 0, 0]])
    before = net(x)
    with torch.no_grad():
        net.tokens.weight[0] = torch.randn(8)
    torch.testing.assert_close(net(x), before)
    assert not torch.allclose(net(torch.tensor([[3, 4, 7, 0, 0]])), before)
    assert not torch.allclose(net(torch.tensor([[4, 3, 0, 0, 0]])), before)  # places count
    assert bool(torch.isfinite(net(torch.zeros(1, 5, dtype=torch.long))).all())


def test_a_shape_is_told_by_its_tokens_too():
    import copy

    assert Shape((5,)) == (5,)
    assert Shape((5,)) != TEXT
    assert TEXT != (5,)
    assert copy.deepcopy(TEXT) == TEXT
    assert [shape.kind for shape in (ROW, TEXT, Shape((1, 8, 8)))] == ["rows", "tokens", "images"]
    assert [shape.item for shape in (ROW, TEXT)] == [4, 8]
