"""Batch norms folded into convolutions: the same outputs to rounding, and only where nothing else can see it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedaudit.training.folded_norms import folded, pairs
from fedaudit.training.models import build
from fedaudit.training.stacked.networks import Many


def trained(arch: str, seed: int = 0) -> nn.Module:
    """With statistics and lines of its own in every batch norm."""
    torch.manual_seed(seed)
    net = build(arch, shape=(1, 16, 16), classes=4).to(torch.float64)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.running_mean, m.weight, m.bias):
                t.data.normal_()  # type: ignore[union-attr]
            m.running_var.data.uniform_(0.5, 2)  # type: ignore[union-attr]
    return net.eval()


@pytest.mark.parametrize(
    ("arch", "count"),
    [("cnn_bn@0.25", 2), ("convnet@0.05", 3), ("resnet18_cifar@0.1", 20), ("mobilenet_v2@0.1", 52), ("mlp", 0)],
)
def test_a_folded_network_says_the_same(arch: str, count: int) -> None:
    nets = [trained(arch, seed) for seed in (0, 1)]
    x = torch.randn(3, 1, 16, 16, dtype=torch.float64)
    before = [net(x) for net in nets]
    bare, states, norms = folded(nets)
    assert len(norms) == count, "all that there are"
    assert not [m for m in bare.modules() if isinstance(m, nn.BatchNorm2d)]
    for state, wanted in zip(states, before, strict=True):
        torch.testing.assert_close(functional_call(bare, state, (x,)), wanted, atol=1e-9, rtol=1e-9)
    assert all(torch.equal(net(x), was) for net, was in zip(nets, before, strict=True)), "the networks are as before"


@pytest.mark.parametrize("count", [1, 2])
def test_the_norms_that_come_back_are_the_first_networks(count: int) -> None:
    nets = [trained("cnn_bn@0.25", seed) for seed in range(count)]
    norms = folded(nets)[2]
    assert [id(m) for m in norms] == [id(m) for m in nets[0].modules() if isinstance(m, nn.BatchNorm2d)]


def test_what_trains_or_stands_in_two_places_is_not_folded() -> None:
    norm = nn.BatchNorm2d(2)
    net = nn.Sequential(nn.Conv2d(2, 2, 1), norm, nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2)).eval()
    assert pairs(net) == [("0", "1"), ("2", "3")]
    net[2].weight = net[0].weight
    assert pairs(net) == []
    net[2] = nn.Conv2d(2, 2, 1)
    net[4] = norm
    assert pairs(net) == [("2", "3")]
    net[3].train()
    assert pairs(net) == []


def test_a_batch_norm_that_trains_again_is_heard() -> None:
    nets = [trained("cnn_bn@0.25", seed) for seed in (0, 1)]
    many, x = Many(nets, stacked=True), torch.randn(5, 1, 16, 16, dtype=torch.float64)
    for net in nets:
        net.train()
    for got, net in zip(many(x), nets, strict=True):
        torch.testing.assert_close(got, net(x), atol=1e-12, rtol=0)


def test_a_convolution_without_a_bias_gets_the_norms_in_a_stack() -> None:
    nets = [trained("resnet18_cifar@0.05", seed) for seed in (0, 1)]
    assert all(m.bias is None for m in nets[0].modules() if isinstance(m, nn.Conv2d))
    x = torch.randn(3, 1, 16, 16, dtype=torch.float64)
    for got, net in zip(Many(nets, stacked=True)(x), nets, strict=True):
        torch.testing.assert_close(got, net(x), atol=1e-9, rtol=1e-9)


def test_a_network_without_batch_norms_stays_what_it_is() -> None:
    nets = [trained("mlp", seed) for seed in (0, 1)]
    bare, states, norms = folded(nets)
    assert bare is nets[0], "no copy is made"
    assert norms == []
    assert all(dict(net.named_parameters()).keys() == state.keys() for net, state in zip(nets, states, strict=True))
