"""Many networks at once answer as each would alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.training import models
from fedaudit.training.cuda_graphs import conditions
from fedaudit.training.stacked.networks import Many, _alike, _groups, _on_gpu, answers

ARCHS = ["cnn@0.25", "mlp", "cnn@0.25", "cnn_bn@0.25", "mlp", "cnn_bn@0.25", "cnn@0.25"]


def networks() -> list[nn.Module]:
    made = []
    for i, arch in enumerate(ARCHS):
        torch.manual_seed(i)
        net = models.build(arch, shape=(1, 8, 8), classes=4).to(torch.float64)
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_()  # type: ignore[union-attr]
        made.append(net.eval())
    return made


def images(*sizes: int) -> list[Tensor]:
    torch.manual_seed(99)
    return [torch.randn(n, 1, 8, 8, dtype=torch.float64, requires_grad=True) for n in sizes]


def test_they_are_stacked_by_architecture() -> None:
    assert _groups(networks()) == [[0, 2, 6], [1, 4], [3, 5]]


@pytest.mark.parametrize("method", ["forward", "encode", "classify"])
@pytest.mark.parametrize("only", [None, [5, 1, 6, 0], [2]])
def test_one_pass_is_what_each_says(method: str, only: list[int] | None) -> None:
    nets, (x,) = networks(), images(9)
    if method == "classify":
        nets = [net for net in nets if net.width == nets[1].width]  # type: ignore[attr-defined]
        only = None if only is None else [0]
        x = torch.randn(9, 128, dtype=torch.float64)
    many = Many(nets, stacked=True)
    run: Any = many if method == "forward" else getattr(many, method)
    found = run(x, only=only)
    chosen = nets if only is None else [nets[i] for i in only]
    for got, net in zip(found, chosen, strict=True):
        wanted = net(x) if method == "forward" else getattr(net, method)(x)
        torch.testing.assert_close(got, wanted, atol=1e-12, rtol=1e-12)


def test_gradients_reach_the_images_and_not_the_networks() -> None:
    nets, (x,) = networks(), images(6)
    (there,) = torch.autograd.grad(
        sum((i + 1) * o.square().sum() for i, o in enumerate(Many(nets, stacked=True)(x))), x
    )
    (wanted,) = torch.autograd.grad(sum((i + 1) * net(x).square().sum() for i, net in enumerate(nets)), x)
    torch.testing.assert_close(there, wanted, atol=1e-10, rtol=1e-10)
    assert all(p.grad is None for net in nets for p in net.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_each_gets_its_own_rows(training: bool) -> None:
    """Unequal numbers are filled up, and what fills counts nothing: not in batch norm's statistics either."""
    nets, xs = networks(), images(3, 5, 3, 7, 2, 4, 6)
    for net in nets:
        net.train(training)
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.track_running_stats, m.running_mean, m.running_var = False, None, None
    found = Many(nets, stacked=True).each(xs)
    for got, net, x in zip(found, nets, xs, strict=True):
        torch.testing.assert_close(got, net(x), atol=1e-12, rtol=1e-12)


def test_one_after_the_other_the_bits_are_those_of_a_loop() -> None:
    nets, (x,) = networks(), images(9)
    many = Many(nets)
    assert not many._stacks
    assert all(torch.equal(a, net(x)) for a, net in zip(many(x), nets, strict=True))
    with conditions("eager", stacked=True):
        assert len(Many(nets)._stacks) == 3


def test_who_listens_hears_each_network() -> None:
    nets, (x,) = networks()[::2], images(9)
    many, heard = Many(nets, stacked=True), []
    nets[0].register_forward_hook(lambda m, i, out: heard.append(out))
    found = many(x)
    assert len(heard) == 1
    assert torch.equal(found[0], heard[0])


def test_answers_of_a_plain_list_are_those_of_many() -> None:
    nets, (x,) = [networks()[0], networks()[2]], images(9)
    torch.testing.assert_close(answers(nets, x), answers(Many(nets, stacked=True), x), atol=1e-12, rtol=1e-12)


def test_later_training_does_not_reach_them() -> None:
    nets, (x,) = networks(), images(4)
    many = Many(nets, stacked=True)
    before = [out.detach().clone() for out in many(x)]
    with torch.no_grad():
        for net in nets:
            for p in net.parameters():
                p.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(many(x), before, strict=True))


@pytest.mark.parametrize("training", [False, True])
def test_batch_norms_of_one_channel_are_run_one_after_the_other(training: bool) -> None:
    """cuDNN refuses what a map over models makes of them; frozen ones are folded, and can be stacked."""
    networks = [models.build("cnn_bn@0.0625", shape=(1, 8, 8), classes=4).train(training) for _ in range(2)]
    many = Many(networks, stacked=True)
    assert len(many._stacks) == (0 if training else 1)
    x = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(torch.stack(many(x)), torch.stack([f(x) for f in networks]))


def test_a_tensor_of_the_processor_is_on_no_gpu() -> None:
    assert not _on_gpu(torch.zeros(1))
    assert not _on_gpu(torch.zeros(1, device="meta"))


def test_networks_are_alike_in_structure_mode_and_what_they_draw() -> None:
    """One of them in another mode, wider, or with dropout that draws: not one stack. Dropout that is off draws not."""

    def net(width: int = 3, *more: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(2, width), *more, nn.Linear(width, 2))

    assert _alike(net(), net())
    assert not _alike(net(), net().eval())
    assert not _alike(net().eval(), net())
    assert not _alike(net(), net(4))
    assert not _alike(net(3, nn.Dropout(0.5)), net(3, nn.Dropout(0.5)))
    assert _alike(net(3, nn.Dropout(0.5)).eval(), net(3, nn.Dropout(0.5)).eval())
    assert _alike(net(3, nn.Dropout(0.0)), net(3, nn.Dropout(0.0)))
