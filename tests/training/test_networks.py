"""Many networks at once answer as each would alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit.training import models
from fedaudit.training.cuda_graphs import conditions
from fedaudit.training.stacked import networks as networks_module
from fedaudit.training.stacked.networks import Many, _alike, _groups, _on_gpu, answers, picked_beside

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


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have networks run side by side where steps are recorded, and count those of each pass."""
    counts: list[int] = []
    inner = networks_module.each_on_its_lane
    monkeypatch.setattr(networks_module, "goes_apart", lambda network, rows: True)
    monkeypatch.setattr(networks_module, "records_steps", lambda device: device.type == "cpu")
    monkeypatch.setattr(
        networks_module, "each_on_its_lane", lambda runs, rows: counts.append(len(runs)) or inner(runs, rows)
    )
    return counts


@pytest.mark.parametrize("only", [None, [5, 1, 6, 0, 3]])
def test_side_by_side_each_says_what_it_says_alone(only: list[int] | None, apart: list[int]) -> None:
    """On rows of its own, unequal in number, and with the gradient of each row."""
    nets, xs = networks(), images(3, 5, 4, 7, 2, 6, 8)
    chosen = list(range(7)) if only is None else only
    xs = [xs[i] for i in chosen]
    many = Many(nets, stacked=True)
    found = many.each(xs, only=only)
    assert apart == ([3, 2, 2] if only is None else [2, 2])
    wanted = [nets[i](x) for i, x in zip(chosen, xs, strict=True)]
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    there, back = (
        torch.autograd.grad(sum((i + 2) * out.square().sum() for i, out in enumerate(outs)), xs)
        for outs in (found, wanted)
    )
    torch.testing.assert_close(there, back, atol=1e-10, rtol=1e-10)
    assert all(p.grad is None for net in nets for p in net.parameters())


@pytest.mark.parametrize("method", ["forward", "encode"])
def test_side_by_side_they_look_at_the_same_images(method: str, apart: list[int]) -> None:
    nets, (x,) = networks(), images(5)
    outs = Many(nets, stacked=True)._all(method, x, None)
    wanted = [getattr(net, method)(x) for net in nets]
    assert apart == [3, 2, 2]
    torch.testing.assert_close(outs, wanted, atol=1e-12, rtol=1e-12)
    there, back = (
        torch.autograd.grad(sum((i + 1) * out.square().sum() for i, out in enumerate(of)), x)[0]
        for of in (outs, wanted)
    )
    torch.testing.assert_close(there, back, atol=1e-10, rtol=1e-10)


def test_batch_statistics_side_by_side_are_each_network_s_own(apart: list[int]) -> None:
    nets, xs = [networks()[3].train(), networks()[5].train()], images(4, 7)
    found = Many(nets, stacked=True).each(xs)
    assert apart == [2]
    for got, net, x in zip(found, nets, xs, strict=True):
        torch.testing.assert_close(got, net(x), atol=1e-12, rtol=1e-12)


def test_only_recorded_steps_of_deep_networks_go_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager passes of each network would start too many kernels; shallow ones are faster as one."""
    nets, (x,) = [networks()[0], networks()[2]], images(4)
    stack = next(iter(Many(nets, stacked=True)._stacks.values()))
    seen: list[Any] = []
    for deep in (True, False):
        for recorded in (True, False):
            monkeypatch.setattr(networks_module, "goes_apart", lambda net, rows, d=deep: seen.append((net, rows)) or d)
            monkeypatch.setattr(networks_module, "records_steps", lambda device, r=recorded: r)
            assert stack.apart([x]) is (deep and recorded)
            called: list[Any] = []
            monkeypatch.setattr(stack, "one_apart", lambda *of, seen=called: seen.append(of) or nets[0])
            stack.picked(torch.tensor([0]), x)
            assert bool(called) is (deep and recorded)
    assert seen[0][0] is stack._bare
    assert seen[0][1][0] is x


def test_filters_and_images_lie_as_tensor_cores_take_them(apart: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    nets, (x,) = [networks()[0], networks()[2]], images(4)
    laid: list[torch.Size] = []
    inner = networks_module.as_tensor_cores_take_it
    monkeypatch.setattr(networks_module, "as_tensor_cores_take_it", lambda t: laid.append(t.shape) or inner(t))
    many = Many(nets, stacked=True)
    many(x)
    stack = next(iter(many._stacks.values()))
    assert laid.count(x.shape) == 2
    stacked = {name: t for name, t in stack._laid[None].items() if t.dim() == 5}
    assert stacked
    for which in (1, torch.tensor([1])):
        filters = {name: networks_module._of_network(t, which) for name, t in stacked.items()}
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in filters.values())
        assert all(torch.equal(t, stack._tensors[name][1]) for name, t in filters.items())
    before = dict(stack._laid[None])
    many(x)
    assert all(stack._laid[None][name] is t for name, t in before.items()), "the filters are laid out once"


def of_one_kind(seed: int, count: int) -> list[nn.Module]:
    torch.manual_seed(seed)
    made = [models.build("cnn_bn@0.25", shape=(1, 8, 8), classes=4).double().eval() for _ in range(count)]
    for net in made:
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_()  # type: ignore[union-attr]
    return made


@pytest.mark.parametrize("deep", [True, False])
def test_one_that_is_picked_beside_all_others(deep: bool, apart: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both answer as they would by themselves, gradients too; side by side all of them are of one pass."""
    monkeypatch.setattr(networks_module, "goes_apart", lambda network, rows: deep)
    nets, others, (x,) = of_one_kind(1, 3), of_one_kind(2, 2), images(5)
    for i in (2, 0):
        apart.clear()
        one, rest = Many(nets, stacked=True), Many(others, stacked=True)
        found, said = picked_beside(one, torch.tensor([i]), rest, x)
        assert apart == ([3] if deep else [])
        wanted = [nets[i](x), *(net(x) for net in others)]
        torch.testing.assert_close([found, *said], wanted, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(one.picked(torch.tensor([i]), x), wanted[0], atol=1e-12, rtol=1e-12)
        there, back = (
            torch.autograd.grad(sum((j + 1) * out.square().sum() for j, out in enumerate(of)), x)[0]
            for of in ([found, *said], wanted)
        )
        torch.testing.assert_close(there, back, atol=1e-10, rtol=1e-10)


def test_who_listens_hears_the_others_too(apart: list[int]) -> None:
    """A hook, or a batch norm that is in training again, is for the networks themselves."""
    nets, others, (x,) = of_one_kind(1, 2), of_one_kind(2, 2), images(5)
    one, rest, heard = Many(nets, stacked=True), Many(others, stacked=True), []
    assert one.side_by_side(x) is not None
    assert Many(networks(), stacked=True).side_by_side(x) is None, "of several kinds"
    hook = others[1].register_forward_hook(lambda m, i, out: heard.append(out))
    _, said = picked_beside(one, torch.tensor([0]), rest, x)
    assert len(heard) == 1
    assert torch.equal(said[1], heard[0])
    hook.remove()
    assert rest.side_by_side(x) is not None
    hook = others[0].register_forward_pre_hook(lambda m, given: heard.append(given))
    assert rest.side_by_side(x) is None
    hook.remove()
    hook = nets[0].register_forward_hook(lambda m, i, out: None)
    found, said = picked_beside(one, torch.tensor([1]), rest, x)
    torch.testing.assert_close([found, *said], [nets[1](x), *(net(x) for net in others)], atol=1e-12, rtol=1e-12)
    hook.remove()
    others[0].train()
    assert rest.side_by_side(x) is None


class Scaled(nn.Module):
    """A network with a number of its own, which is no factor of a product."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net
        self.register_buffer("scale", torch.tensor([1 + 2.0**-12]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x).float() * self.scale
        return out


def test_factors_of_deep_networks_have_16_bits_where_the_setting_says_so(apart: list[int]) -> None:
    """They are rounded once. Sums, batch norms and answers keep their type, as in training."""
    nets, x = [Scaled(net.float()).eval() for net in of_one_kind(1, 2)], images(5)[0].detach().float()
    plain = Many(nets, stacked=True)
    exact = torch.stack(plain(x))
    torch.testing.assert_close(exact, torch.stack([net(x) for net in nets]))
    with conditions("recorded", bf16=True, stacked=True):
        many = Many(nets)
        found = torch.stack(many(x))
        (stack,) = many._stacks.values()
        with torch.autocast("cpu", torch.bfloat16):
            wanted = torch.stack([net(x) for net in nets]).float()
        picked = many.picked(torch.tensor([1]), x)
    assert found.dtype == picked.dtype == torch.float32
    rounding = (wanted - exact).abs().max()
    assert rounding > 1e-3, "nothing was rounded"
    assert (found - exact).abs().max() < 4 * rounding, "frozen norms are part of the factors, so that both round"
    assert (found - exact).abs().max() > 0.1 * rounding
    torch.testing.assert_close(picked, found[1], atol=1e-6, rtol=1e-6)
    laid = stack._laid[torch.bfloat16]
    halved = {name for name, t in laid.items() if t.dtype == torch.bfloat16}
    layers = {name for name, m in stack._bare.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert halved == {name for name in laid if name.rpartition(".")[0] in layers}
    torch.testing.assert_close(torch.stack(many(x)), exact, msg="later without rounding")
    with conditions("recorded", bf16=True, stacked=True):
        again = torch.stack(plain(x))
        double = Many([net.double() for net in nets])
        assert double(x.double())[0].dtype == torch.float64, "autocast leaves doubles alone"
        single = Many([net.float() for net in of_one_kind(3, 2)])
        assert {out.dtype for out in (*single(x), single.picked(torch.tensor([0]), x))} == {torch.float32}
    assert torch.equal(again, found)


class Bytes(nn.Module):
    """A network that takes bytes, and makes numbers of them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x.flatten(1).float() / 255)
        return out


def test_answers_to_bytes_are_numbers(apart: list[int]) -> None:
    torch.manual_seed(0)
    nets, x = [Bytes(), Bytes()], torch.randint(256, (5, 1, 2, 2), dtype=torch.uint8)
    for found, net in zip(Many(nets, stacked=True)(x), nets, strict=True):
        torch.testing.assert_close(found, net(x))
    assert apart == [2]
