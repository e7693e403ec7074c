"""Layers that stacks run in other ways: the same outputs and gradients, alone and for a stack."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from jobs import distance, make
from torch import nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from fedaudit.training import cuda_graphs
from fedaudit.training.model_copies import copied
from fedaudit.training.models import build
from fedaudit.training.stacked import stack
from fedaudit.training.stacked.layers import (
    ApartConv2d,
    FullNorm1d,
    HalvingPool2d,
    NarrowConv2d,
    SpreadingPool2d,
    TurnedLinear,
    WideConv2d,
    _Convolutions,
    in_full,
    quicker,
)
from fedaudit.training.stacked.networks import Many


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 5, 3, padding=1), (1, 6, 7)),
        (nn.Conv2d(3, 4, 5, padding=2, bias=False), (3, 8, 5)),
        (nn.Conv2d(2, 3, (3, 1), padding=(2, 0)), (2, 4, 6)),
        (nn.Conv2d(6, 4, 5, padding=2), (6, 6, 7)),
        (nn.Conv2d(5, 4, (5, 6), padding=(0, 2), bias=False), (5, 9, 8)),
        (nn.Conv2d(6, 4, 3, padding=1), (6, 6, 7)),
        (nn.Conv2d(5, 4, 3, stride=2, padding=(1, 0), dilation=2, bias=False), (5, 9, 8)),
        (nn.AvgPool2d(2), (3, 6, 8)),
        (nn.AvgPool2d(2), (3, 7, 5)),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_quicker_layer_is_the_layer(layer: nn.Module, shape: tuple[int, ...], compiled: bool) -> None:
    layer = layer.double()
    other = quicker(layer, apart=True, compiled=compiled)
    assert type(other) in (NarrowConv2d, WideConv2d, HalvingPool2d if compiled else SpreadingPool2d, ApartConv2d)
    assert type(layer) in (nn.Conv2d, nn.AvgPool2d), "the model itself is as before"
    x = torch.randn(2, 3, *shape, dtype=torch.float64, requires_grad=True)  # two models, three rows
    found = []
    for each in (layer, other):
        params = {n: torch.stack([p.detach(), 2 * p.detach()]).requires_grad_() for n, p in each.named_parameters()}
        out = vmap(lambda p, x, each=each: functional_call(each, p, (x,)))(params, x)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found.append([out, *torch.autograd.grad((out * weights).sum(), [x, *params.values()])])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    one, two = layer(x[0]), other(x[0])
    torch.testing.assert_close(one, two, atol=1e-12, rtol=0)
    alone = [torch.autograd.grad(o.square().sum(), [x, *f.parameters()]) for o, f in ((one, layer), (two, other))]
    torch.testing.assert_close(alone[0], alone[1], atol=1e-11, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
def test_a_compiled_linear_layer_s_gradient_lies_as_its_weight_does(bias: bool) -> None:
    """As a compiler is given it. Otherwise the optimiser copies each gradient to turn it round."""
    layer = nn.Linear(5, 4, bias=bias).double()
    other = quicker(layer, compiled=True)
    assert type(other) is TurnedLinear
    assert quicker(layer) is layer, "where steps are not compiled it was not measured"
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)  # two models, three rows
    found = []
    for each in (layer, other):
        params = {n: torch.stack([p.detach(), 2 * p.detach()]).requires_grad_() for n, p in each.named_parameters()}
        mapped = vmap(lambda p, x, each=each: functional_call(each, p, (x,)))
        run = mapped if each is layer else torch.compile(mapped, backend="aot_eager", dynamic=False)
        out = run(params, x)
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found.append([out, *torch.autograd.grad((out * weights).sum(), [*params.values(), x])])
        if each is other:
            assert found[-1][1].is_contiguous()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)
    for shape in ((2, 3, 5), (5,)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(layer(x), other(x), atol=0, rtol=0)
    assert other(torch.randn(6, 5, dtype=torch.float64)).view(3, 2, 4).view(-1).shape == (24,), "as a view"

    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    own = Doubled(5, 4)
    assert quicker(own, compiled=True) is own


@pytest.mark.parametrize(("rows", "multiplied"), [(10, 16), (16, 16), (1, 8)])
def test_a_compiled_linear_layer_multiplies_so_many_rows_that_8_divides(rows: int, multiplied: int) -> None:
    """Ten networks that train in batches of 10 take less time in this way (docs/results/speed.md)."""
    seen: list[int] = []

    class Products(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ in ("matmul", "__matmul__"):
                seen.append(args[1].shape[-1])
            return func(*args, **(kwargs or {}))

    layer = nn.Linear(5, 4).double()
    other, x = quicker(layer, compiled=True), torch.randn(rows, 5, dtype=torch.float64)
    with Products():
        found = other(x)
    assert seen == [multiplied]
    torch.testing.assert_close(found, layer(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(3), nn.BatchNorm2d(3, affine=False), nn.BatchNorm3d(3, momentum=0.3)])
def test_a_batch_norm_in_full_takes_16_bits_and_computes_in_its_own(layer: nn.Module) -> None:
    """Its statistics too. In 16 bits the result lies elsewhere."""
    x = torch.randn(4, 3, 2, 2, 2)[(..., *[0] * (3 - int(type(layer).__name__[-2])))].bfloat16()
    layer = layer.train() if layer.affine else layer.eval()
    one, other = copied(layer), in_full(copied(layer))
    assert type(other) is not type(layer)
    assert isinstance(other, type(layer)), "whoever looks for batch norms finds it"
    found, wanted = other(x), one(x.float())
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted.bfloat16())
    assert all(torch.equal(a, b) for a, b in zip(other.buffers(), one.buffers(), strict=True))
    bare = in_full(nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    x = torch.randn(4, 3).bfloat16()
    assert torch.equal(bare(x), nn.BatchNorm1d(3, affine=False, track_running_stats=False)(x.float()).bfloat16())
    for less in ({}, {"affine": False}, {"track_running_stats": False}):
        double = nn.BatchNorm1d(3, **less).double()
        inside: list[torch.dtype] = []
        with mock.patch.object(
            nn.functional, "batch_norm", lambda x, *of, inside=inside, **how: inside.append(x.dtype) or x
        ):
            assert in_full(double)(x).dtype == torch.bfloat16
        assert inside == [torch.float64]


def test_behind_a_batch_norm_in_full_are_16_bits_whatever_came_before_it() -> None:
    with cuda_graphs.conditions("recorded", bf16=True):
        found = in_full(nn.BatchNorm1d(3))(torch.randn(4, 3))
    assert found.dtype == torch.bfloat16


def test_networks_without_batch_norms_or_with_hooks_stay_as_they_are() -> None:
    plain, norm = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.BatchNorm1d(2))
    assert in_full(plain) is plain
    assert in_full(norm) is not norm
    assert type(norm[0]) is nn.BatchNorm1d, "the model itself is as before"
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        heard = nn.Sequential(nn.BatchNorm1d(2))
        getattr(heard[0], register)(lambda *of: None)
        assert in_full(heard) is heard

    class Own(nn.BatchNorm1d):
        pass

    both = in_full(nn.Sequential(Own(2), nn.BatchNorm1d(2)))
    assert [type(m) for m in both] == [Own, FullNorm1d], "nobody knows what another kind does"


def test_between_layers_of_a_stack_nothing_is_copied_but_for_convolutions() -> None:
    """A narrow convolution, batch norm, ReLU and pooling: rows first, then models, forward and in the gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    copied: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default) and out.numel() == whole:
                copied.append(f"{func} {tuple(args[0].shape)}")
            return out

    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)).double()
    x, whole = torch.randn(2, 3, 1, 6, 6, dtype=torch.float64), 2 * 3 * 8 * 6 * 6
    params = {n: torch.stack([p.detach(), 2 * p.detach()]).requires_grad_() for n, p in net.named_parameters()}
    rest = {n: torch.stack([b, b]) for n, b in net.named_buffers()}
    found = []
    for each in (net, quicker(net)):
        copied.clear()
        with Log():
            out = vmap(lambda p, r, x, each=each: functional_call(each, {**p, **r}, (x,)))(params, rest, x)
            found.append([out, *torch.autograd.grad(out.square().sum(), list(params.values()))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)
    assert len(copied) <= 1, "the one that spreads the pooling's gradient"


def test_others_are_left_alone() -> None:
    for layer in (
        nn.Conv2d(8, 8, 3), nn.Conv2d(33, 8, 5), nn.Conv2d(8, 8, 5, stride=2),
        nn.Conv2d(1, 2, 3, stride=2), nn.Conv2d(1, 2, 3, dilation=2), nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(1, 2, 3, padding="same"), nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.AvgPool2d(3),
        nn.AvgPool2d(2, stride=1), nn.AvgPool2d(2, padding=1), nn.AvgPool2d(2, ceil_mode=True), nn.Linear(2, 2),
    ):  # fmt: skip
        assert quicker(layer) is layer
    heard = nn.Sequential(nn.Conv2d(1, 2, 3))
    heard[0].register_forward_hook(lambda m, x, out: None)
    assert quicker(heard) is heard


@pytest.mark.parametrize("tf32", [False, True])
def test_stacks_and_many_run_them_on_a_gpu(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's way, taken on this CPU."""
    monkeypatch.setattr("fedaudit.training.stacked.stackable.on_gpu", lambda rows: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    loops: list[int] = []
    convolve = _Convolutions.apply
    monkeypatch.setattr(_Convolutions, "apply", lambda *given: loops.append(1) or convolve(*given))
    counts = [9, 14, 6]
    together, alone = make("convnet@0.05", counts), make("convnet@0.05", counts)
    ran: list[int] = []
    forward = NarrowConv2d.forward
    monkeypatch.setattr(NarrowConv2d, "forward", lambda self, x: ran.append(1) or forward(self, x))
    stack.fit_together(together)
    assert ran
    assert bool(loops) is not tf32, "model by model in float32 alone"
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-10
    assert [type(m) for m in together[0].model.modules()] == [type(m) for m in alone[0].model.modules()]
    ran.clear()
    monkeypatch.setattr("fedaudit.training.stacked.networks._on_gpu", lambda x: True)
    nets = [build("convnet@0.05", shape=(1, 8, 8), classes=4).double().eval() for _ in range(3)]
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    monkeypatch.setattr("fedaudit.training.stacked.networks.may_choose", lambda: False)
    for got, net in zip(Many(nets, stacked=True)(x), nets, strict=True):
        torch.testing.assert_close(got, net(x), atol=1e-12, rtol=0)
    assert ran
