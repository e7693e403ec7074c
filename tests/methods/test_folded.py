"""Frozen batch norm folded into convolutions: the same numbers as the network itself, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedaudit.methods.condensation import _folded
from fedaudit.methods.condensation._condense import AHEAD, Records, Sampled
from fedaudit.methods.condensation._folded import (
    Folded,
    finish,
    finish_inside,
    fold,
    narrow,
    narrow_images,
    narrow_inside,
    padded,
)
from fedaudit.training import models


def net(arch, shape):
    torch.manual_seed(0)
    made = models.build(arch, shape=shape, classes=10).double()
    for m in made.modules():
        if isinstance(m, nn.BatchNorm2d):  # a trained network's: none of these is 0 or 1
            for t in (m.weight.data, m.running_var):
                t.uniform_(0.5, 2)
            for t in (m.bias.data, m.running_mean):
                t.normal_()
    return made.eval()


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 9)])
@pytest.mark.parametrize("arch", ["cnn", "cnn_bn", "convnet@0.1", "convnet_padded@0.1", "fedfree_cnn@0.1"])
def test_folded_is_the_network_itself(arch, shape):
    """In float64 to rounding, with the gradient of the images; also after the weights changed."""
    f = Sampled(net(arch, shape), folded=True, channels_last=True)
    assert f._folded is not None
    for gamma in (1.0, 0.7):
        now = f.interpolate(gamma)
        x = torch.randn(5, *shape, dtype=torch.float64, requires_grad=True)
        direction = torch.randn(5, now.width, dtype=torch.float64)
        (a,) = torch.autograd.grad((f.encode(x) * direction).sum(), x)
        (b,) = torch.autograd.grad((now.encode(x) * direction).sum(), x)
        assert torch.allclose(f.real(x), now.encode(x), rtol=1e-10, atol=1e-12)
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
        assert a.abs().max() > 0


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 9)])
def test_what_is_compiled_is_the_same_arithmetic(shape, monkeypatch):
    """The forms written for a compiler, run as they stand in place of the usual ones."""
    used = []
    monkeypatch.setattr(_folded, "_compiled", lambda fn, rows=True: used.append(fn) or fn)
    monkeypatch.setattr(_folded, "_fuses", lambda x: True)
    f = Sampled(net("convnet@0.1", shape), folded=True)
    x = torch.randn(5, *shape, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(5, f.f.width, dtype=torch.float64)
    (a,) = torch.autograd.grad((f.encode(x) * direction).sum(), x)
    (b,) = torch.autograd.grad((f.f.encode(x) * direction).sum(), x)
    assert torch.allclose(f.real(x), f.f.encode(x), rtol=1e-10, atol=1e-12)
    assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert set(used) == {fold, narrow, narrow_inside, narrow_images, finish, finish_inside}


@pytest.mark.parametrize("fresh", [lambda w: w.interpolate(0.5), lambda w: w.perturb(3.0)])
def test_norms_are_folded_once_for_each_drawing_of_weights(fresh, monkeypatch):
    folded = []
    monkeypatch.setattr(_folded, "fold", lambda *given: folded.append(1) or fold(*given))
    w = Sampled(net("cnn_bn", (1, 8, 8)), folded=True)
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    fresh(w)
    first = w.encode(x)
    assert torch.equal(first, w.real(x))
    once = len(folded)
    fresh(w)
    assert not torch.allclose(first, w.encode(x))
    assert (once, len(folded)) == (2, 4)  # two stages


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_compiler_takes_the_forms(device, monkeypatch):
    """For two numbers of images: the compiled forms are what they are uncompiled, and none was refused."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    monkeypatch.setattr(_folded, "_fuses", lambda x: True)
    for rows in (5, 3):
        w = Sampled(net("convnet@0.1", (1, 7, 8)).to(device), folded=True)
        x = torch.randn(rows, 1, 7, 8, dtype=torch.float64, device=device, requires_grad=True)
        direction = torch.randn(rows, w.f.width, dtype=torch.float64, device=device)
        (a,) = torch.autograd.grad((w.encode(x) * direction).sum(), x)
        (b,) = torch.autograd.grad((w.f.encode(x) * direction).sum(), x)
        assert torch.allclose(w.real(x), w.f.encode(x), rtol=1e-10, atol=1e-12)
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    assert not _folded._uncompiled


@pytest.mark.slow
def test_a_compiler_makes_one_kernel_of_each_form():
    """Otherwise what lies between two kernels is at full size, and is written and read."""
    from torch._inductor import metrics

    x, b = torch.randn(4, 1, 10, 10), torch.randn(5)
    w, g = torch.randn(9, 5), torch.randn(4, 5, 4, 4)
    z = torch.randn(4, 5, 8, 9).to(memory_format=torch.channels_last)
    forms = (narrow, (x, w, b, (3, 3))), (narrow_inside, (g, x, w, b, (3, 3))), (finish, (z, b))
    for fn, given in (*forms, (finish_inside, (g, z, b))):
        metrics.reset()
        made = _folded._compiled(fn)(*given)
        assert torch.allclose(made, fn(*given), rtol=1e-5, atol=1e-6)
        assert metrics.generated_kernel_count == 1, fn.__name__
        if fn in (finish, finish_inside):
            assert made.stride(1) == 1, "the next convolution wants its channels innermost"
    assert not _folded._uncompiled


@pytest.mark.slow
def test_kernels_of_one_client_serve_all_clients_and_rounds(monkeypatch):
    """Images with a gradient and without, any number of rows, other weights: nothing is compiled for these again."""
    from torch._inductor import metrics

    monkeypatch.setattr(_folded, "_fuses", lambda x: True)
    first = Sampled(net("convnet@0.1", (1, 8, 8)).float(), folded=True)
    first.encode(torch.randn(5, 1, 8, 8).requires_grad_()).sum().backward()
    metrics.reset()
    first.real(torch.randn(7, 1, 8, 8))
    other = Sampled(net("convnet@0.1", (1, 8, 8)).float(), folded=True)
    for gamma in (0.9, 0.8):
        other.interpolate(gamma)
        other.encode(torch.randn(3, 1, 8, 8).requires_grad_()).sum().backward()
        other.real(torch.randn(9, 1, 8, 8))
    assert metrics.generated_kernel_count == 0
    assert not _folded._uncompiled


def test_other_networks_are_left_alone():
    assert Folded.of(models.build("mlp", shape=(1, 8, 8), classes=10)) is None
    assert Folded.of(models.build("resnet18@0.1", shape=(3, 32, 32), classes=10)) is None
    assert Sampled(net("cnn_bn", (1, 8, 8)), "joint", folded=True)._folded is None  # a batch's statistics do not fold
    assert Sampled(net("cnn_bn", (1, 8, 8)))._folded is None  # on a CPU the bits stay


def test_records_drawn_ahead_are_b_different_ones_of_each_class():
    y = torch.arange(40) % 2
    D = Records(torch.arange(40.0)[:, None, None, None], y, B=8)
    seen = []
    for step in range(AHEAD + 2):
        D.ahead(step)
        drawn = D.draw().flatten().long()
        assert torch.equal(drawn, D.draw().flatten().long())  # settled
        assert y[drawn].tolist() == [0] * 8 + [1] * 8
        assert len(set(drawn.tolist())) == 16
        seen.append(tuple(drawn.tolist()))
    assert len(set(seen)) == AHEAD + 2  # another draw in each step
    assert {i for drawn in seen for i in drawn} == set(range(40))
    everything = Records(torch.zeros(4, 1, 1, 1), torch.zeros(4, dtype=torch.long), B=8)
    everything.ahead(0)
    assert everything.draw() is everything.x


@pytest.mark.parametrize(
    ("kernel", "padding", "size"),
    [((3, 3), (1, 1), (6, 8)), ((5, 3), (2, 0), (7, 9)), ((2, 5), (0, 3), (8, 7)), ((3, 1), (2, 1), (5, 5))],
)
def test_kernels_and_paddings_that_differ_by_side(kernel, padding, size):
    """Against torch's own convolution and pooling: values, the gradient inside, and the images' gradient."""
    torch.manual_seed(1)
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    w, b = torch.randn(4, 3, *kernel, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    pooled = nn.functional.avg_pool2d(nn.functional.conv2d(x, w, b, padding=padding).relu(), 2)
    by_neighbour = w.flatten(1).t().contiguous()
    around = padded(x.detach(), padding)
    assert torch.allclose(narrow(around, by_neighbour, b, kernel), pooled, rtol=1e-10, atol=1e-12)
    g = torch.randn_like(pooled)
    (wanted,) = torch.autograd.grad((pooled * g).sum(), x)
    inside = narrow_inside(g, around, by_neighbour, b, kernel)
    found = narrow_images(inside @ by_neighbour.t(), x.detach(), kernel, padding)
    assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)
