"""Convolutions as products of matrices: torch's own numbers, alone and in a stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import distance, make
from torch.nn import functional as F

from fedaudit.training import cuda_graphs, models
from fedaudit.training.stacked import convolution_products, networks, stack
from fedaudit.training.stacked.layers import quicker


@pytest.mark.parametrize(
    ("kernel", "padding", "channels"), [((3, 3), (1, 1), 1), ((5, 5), (2, 2), 3), ((3, 1), (0, 1), 2)]
)
def test_a_product_is_the_convolution(kernel: tuple[int, int], padding: tuple[int, int], channels: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, channels, 7, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, channels, *kernel, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    ours, theirs = convolution_products.conv2d(x, w, b, padding), F.conv2d(x, w, b, padding=padding)
    direction = torch.randn_like(theirs)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    for a, c in zip(*(torch.autograd.grad((out * direction).sum(), (x, w, b)) for out in (ours, theirs)), strict=True):
        assert torch.allclose(a, c, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kernel", "padding"), [((5, 5), (2, 2)), ((4, 7), (0, 2)), ((3, 1), (2, 0)), ((7, 6), (0, 0))]
)
def test_a_compiled_product_is_the_convolution(kernel: tuple[int, int], padding: tuple[int, int]) -> None:
    """Traced as for a compiler, without making kernels."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 3, *kernel, dtype=torch.float64, requires_grad=True)
    traced = torch.compile(convolution_products.conv2d, backend="eager", fullgraph=True, dynamic=False)
    ours, theirs = traced(x, w, None, padding), F.conv2d(x, w, padding=padding)
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(theirs)
    for a, c in zip(*(torch.autograd.grad((out * direction).sum(), (x, w)) for out in (ours, theirs)), strict=True):
        assert torch.allclose(a, c, rtol=1e-12, atol=1e-12)


def test_a_kernel_larger_than_the_image_is_an_error_where_it_is_compiled_too() -> None:
    """Also one that is larger by a single pixel, for which nothing would be left of the image."""
    x, w = torch.randn(2, 3, 7, 6), torch.randn(4, 3, 8, 5)
    traced = torch.compile(convolution_products.conv2d, backend="eager", dynamic=False)
    for way in (traced, convolution_products.conv2d):
        with pytest.raises(RuntimeError):
            way(x, w, None, (0, 0))


def test_other_convolutions_are_left_to_torch() -> None:
    x, w = torch.randn(2, 2, 6, 6), torch.randn(4, 2, 3, 3)
    found = convolution_products.instead_of((x, w), {"padding": 1})
    assert found is not None
    assert torch.allclose(found, F.conv2d(x, w, padding=1), atol=1e-5)
    for other in ({"stride": 2}, {"dilation": (2, 2)}, {"groups": 2}, {"padding": "same"}):
        assert convolution_products.instead_of((x, w), other) is None
    assert convolution_products.instead_of((x[0], w), {}) is None


@pytest.mark.parametrize("arch", ["cnn", "cnn_bn"])
@pytest.mark.parametrize("win", [0.0, 1e9], ids=["products", "grouped"])
def test_a_stack_by_the_faster_way_is_what_each_would_be_alone(
    arch: str,
    win: float,
    replays: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ways are recorded and timed, which changes nothing; then the winner steps."""
    monkeypatch.setattr("fedaudit.training.stacked.stackable.on_gpu", lambda rows: True)
    monkeypatch.setattr(stack, "PRODUCTS_WIN", win)
    monkeypatch.setattr(stack, "_faster", {})
    used: list[bool] = []
    monkeypatch.setattr(
        "fedaudit.training.stacked.mapped_loss.instead_of",
        lambda *of: used.append(True) or convolution_products.instead_of(*of),
    )
    counts = [12, 12, 12]
    alone, together = make(arch, counts), make(arch, counts)
    wanted = [job.alone() for job in alone]
    with cuda_graphs.conditions("recorded"):
        found = stack.fit_together(together)
    assert distance(alone, together) < 1e-10
    for a, b in zip(found, wanted, strict=True):
        assert a.steps == b.steps
        assert a.loss == pytest.approx(b.loss, abs=1e-5)
    assert used
    assert next(iter(stack._faster.values())) is (win == 0.0)
    assert replays[0] > 6 if win == 0.0 else replays[0] == 6  # timed, and what came after


@pytest.mark.parametrize("win", [0.0, 1e9], ids=["products", "grouped"])
def test_many_networks_by_the_faster_way_say_what_each_says(win: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "_on_gpu", lambda x: True)
    monkeypatch.setattr(networks, "PRODUCTS_WIN", win)
    monkeypatch.setattr(networks, "_faster", {})
    torch.manual_seed(0)
    nets = [models.build("cnn_bn", shape=(1, 8, 8), classes=4).double().eval() for _ in range(3)]
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    found = networks.answers(networks.Many(nets, stacked=True), x)
    wanted = torch.stack([f(x) for f in nets])
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
    a, b = (torch.autograd.grad(out.square().sum(), x)[0] for out in (found, wanted))
    assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert list(networks._faster.values()) == [win == 0.0]


def test_a_run_that_promises_bits_has_one_way(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way is faster may come out otherwise in the next run."""
    monkeypatch.setattr("fedaudit.training.stacked.stackable.on_gpu", lambda rows: True)
    monkeypatch.setattr(networks, "_on_gpu", lambda x: True)
    for module in (stack, networks):
        monkeypatch.setattr(module, "PRODUCTS_WIN", 0.0)
        monkeypatch.setattr(module, "_faster", {})
    torch.use_deterministic_algorithms(True)
    try:
        with cuda_graphs.conditions("recorded"):
            stack.fit_together(make("cnn@0.25", [12, 12]))
        nets = [models.build("cnn@0.25", shape=(1, 8, 8), classes=4).eval() for _ in range(2)]
        networks.answers(networks.Many(nets, stacked=True), torch.randn(2, 1, 8, 8))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not stack._faster
    assert not networks._faster
    assert len(replays) == 1


def test_a_compiled_product_s_gradient_is_a_sum_and_no_scatter() -> None:
    """FedFree's network, mapped over three models, as a compiler is given it: torch's own numbers by other operations.

    A scatter costs more than all else in its step, because bits that are promised ask for a sort.
    """
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch.func import functional_call, vmap

    seen: list[str] = []

    def keep(graph: torch.fx.GraphModule, example: object) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch.manual_seed(0)
    net = models.build("fedfree_cnn@0.25", shape=(3, 8, 8), classes=4).double()
    x = torch.randn(3, 4, 3, 8, 8, dtype=torch.float64)
    params = {n: torch.stack([p.detach() * by for by in (1, 2, 3)]).requires_grad_() for n, p in net.named_parameters()}

    def gradients(model: torch.nn.Module, backend: object) -> list[torch.Tensor]:
        mapped = vmap(lambda p, x: functional_call(model, p, (x,)).square().sum())
        run = mapped if backend is None else torch.compile(mapped, backend=backend, dynamic=False)
        return list(torch.autograd.grad(run(params, x).sum(), list(params.values())))

    wanted = gradients(net, None)
    found = gradients(quicker(net, compiled=True), aot_autograd(fw_compiler=keep, bw_compiler=keep))
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)
    assert "aten.bmm.default" in seen, "the products were not seen, so nothing was looked at"
    scattering = [name for name in seen if any(part in name for part in ("index_put", "scatter", "unfold_backward"))]
    assert scattering == []
