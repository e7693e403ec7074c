"""Small parts of training by hand: divergences, turns, rows, names and sizes."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

from fedaudit.shape import Shape
from fedaudit.training import own_model
from fedaudit.training.descent import Descent
from fedaudit.training.fit import Opt, Turns, adam, moments_of, named, sgd
from fedaudit.training.forward import in_chunks, row_by_row
from fedaudit.training.losses import kl
from fedaudit.training.models import build


def test_a_divergence_by_hand_at_a_temperature():
    """Logits (0, 2 ln 3) at temperature 2 are (1/4, 3/4); (2 ln 2, 0) are (2/3, 1/3)."""
    p, q = torch.tensor([[0.0, 2 * math.log(3)]]), torch.tensor([[2 * math.log(2), 0.0]])
    wanted = 0.25 * math.log(0.25 / (2 / 3)) + 0.75 * math.log(0.75 / (1 / 3))
    assert kl(p, q, 2.0).tolist() == pytest.approx([wanted], rel=1e-5)
    assert kl(p / 2, q / 2).tolist() == pytest.approx([wanted], rel=1e-5)


@pytest.mark.parametrize(
    ("by", "order"),
    [
        # Parts of 4, 0 and 12 rows in batches of 4: A, and B, C, D.
        ("step", "ABCD"), ("epoch", "ABCD"),
        ("even", "BACD"),  # B at 1/6, A and C at 1/2, D at 5/6
    ],
)  # fmt: skip
def test_parts_that_take_turns(by, order):
    found = list(Turns((4, 0, 12), by).batches(4, torch.Generator().manual_seed(0)))
    assert ["A" if max(index) < 4 else "B" for index in found] == ["A" if letter == "A" else "B" for letter in order]
    assert sorted(torch.cat(found).tolist()) == list(range(16))
    long_first = [max(index) < 12 for index in Turns((12, 8), by).batches(4, torch.Generator().manual_seed(0))]
    wanted = {"step": [1, 0, 1, 0, 1], "epoch": [1, 1, 1, 0, 0], "even": [1, 0, 1, 0, 1]}[by]
    assert long_first == [bool(first) for first in wanted]


def test_rows_go_through_alone_and_in_pieces():
    sizes = []

    def centred(x):
        sizes.append(len(x))
        return x - x.mean(0)

    x = torch.arange(10.0).reshape(5, 2) ** 2
    assert row_by_row(lambda part: part - part.mean(0) + part.sum(1, keepdim=True), x, 2).tolist() == [
        [float(row.sum())] * 2 for row in x
    ]
    assert in_chunks(centred, x, 2)[4].tolist() == [0.0, 0.0]
    assert sizes == [2, 2, 1]


class Callable_:
    def __call__(self):
        pass

    def method(self):
        pass


def test_the_name_of_a_function_without_what_it_brings():
    here = __name__
    assert named(kl) == "fedaudit.training.losses.kl"
    assert named(functools.partial(functools.partial(kl, tau=2.0), tau=3.0)) == "fedaudit.training.losses.kl"
    assert named(Callable_()) == f"{here}.Callable_"
    assert named(Callable_().method) == f"{here}.Callable_.method"


def test_the_size_of_a_descent():
    params = [torch.zeros(2, 3), torch.zeros(5)]
    assert Descent(params, lambda: params[0].sum(), 7, sgd(0.1)).size == 77


def test_what_an_optimiser_remembers_is_given_back():
    """One step of Adam on two parameters, and the next from its moments alone, is that of one optimiser."""

    def parameters():
        return [torch.full((2,), 1.0, requires_grad=True), torch.full((1,), -2.0, requires_grad=True)]

    def step(optimiser, of, scale):
        for i, p in enumerate(of):
            p.grad = torch.full_like(p, scale * (i + 1))
        optimiser.step()

    whole, halves = parameters(), parameters()
    one = adam(0.1).build(whole)
    step(one, whole, 1.0)
    step(one, whole, -3.0)
    first = adam(0.1).build(halves)
    step(first, halves, 1.0)
    kept = moments_of(first)
    again = adam(0.1).build(halves, kept)
    step(again, halves, -3.0)
    for a, b in zip(whole, halves, strict=True):
        torch.testing.assert_close(a, b)
    assert all(value is not kept[key] for key, value in moments_of(again).items())


def test_the_options_that_optimisers_have_unless_it_is_said():
    plain = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
    assert sgd(0.5) == Opt(torch.optim.SGD, plain, "constant")
    assert adam() == Opt(torch.optim.Adam, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}, "constant")


def test_own_models_are_tried_on_noise_of_the_records_range():
    """Images and rows in [-1, 1], token ids below their number."""
    images = own_model._noise(Shape((1, 8, 8)))
    assert images.shape == (own_model.ROWS, 1, 8, 8)
    assert (images.min() < -0.8, images.max() > 0.8, images.abs().max() <= 1) == (True, True, True)
    ids = own_model._noise(Shape((40,), tokens=5))
    assert (ids.shape, ids.dtype, sorted(ids.unique().tolist())) == ((own_model.ROWS, 40), torch.int64, [0, 1, 2, 3, 4])


def test_the_sizes_of_the_vision_transformer_that_a_name_stands_for():
    net = build("vit_tiny", shape=(3, 32, 32), classes=7)
    assert (net.width, net.classifier.in_features, net.classifier.out_features) == (192, 192, 7)
    blocks = [module for module in net.encoder.modules() if hasattr(module, "heads")]
    assert {block.heads for block in blocks} == {3}
    assert len([m for m in net.encoder.modules() if isinstance(m, nn.LayerNorm)]) == 2 * 12 + 1
