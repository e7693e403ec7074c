"""SGD and Adam without torch's class: the same numbers, to the bit, and the class wherever only that will do."""

from __future__ import annotations

import pytest
import torch

from fedaudit.training.fit import Opt, adam, moments_of, sgd
from fedaudit.training.plain_optimisers import PlainAdam, PlainSgd, plain_optimiser

SIZES = ((3, 4), (5,), ())


def trained(optimiser, params, steps=4, seed=0):
    """Take steps along random gradients. The last parameter has none, as one that a loss does not use."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimiser.zero_grad()
        for p in params[:-1]:
            p.grad = torch.randn(p.shape, generator=rng, dtype=p.dtype)
        optimiser.step()
    return [p.detach().clone() for p in params]


def fresh(dtype=torch.float32):
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=rng, dtype=dtype, requires_grad=True) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "opt",
    [
        sgd(0.1),
        sgd(0.1, momentum=0.9),
        sgd(0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
        adam(),
        adam(0.05, betas=(0.5, 0.9), weight_decay=1e-2),
        Opt(torch.optim.SGD, {"lr": 0.2}),
        Opt(torch.optim.Adam, {}),
    ],
)
def test_the_numbers_are_torchs(opt, dtype):
    mine, theirs = fresh(dtype), fresh(dtype)
    plain, own = opt.build(mine), opt.make(theirs, **opt.options)
    assert isinstance(plain, PlainSgd | PlainAdam)
    assert not any(isinstance(value, torch.optim.Optimizer) for value in (plain,))
    for a, b in zip(trained(plain, mine), trained(own, theirs), strict=True):
        assert torch.equal(a, b)
    kept, known = moments_of(plain), moments_of(own)
    assert kept.keys() == known.keys()
    assert all(torch.equal(kept[name], known[name]) for name in known)
    # What is remembered goes on where it was, and a changed rate counts.
    again, torchs = opt.build(mine, kept), opt.make(theirs, **opt.options)
    torchs.load_state_dict(own.state_dict())
    for optimiser in (again, torchs):
        optimiser.param_groups[0]["lr"] = 0.01
    for a, b in zip(trained(again, mine, seed=2), trained(torchs, theirs, seed=2), strict=True):
        assert torch.equal(a, b)


def test_gradients_are_forgotten_or_set_to_zero():
    p = torch.ones(2, requires_grad=True)
    optimiser = plain_optimiser(torch.optim.SGD, [p], {"lr": 0.1})
    p.grad = torch.ones(2)
    optimiser.zero_grad(set_to_none=False)
    assert p.grad.tolist() == [0.0, 0.0]
    optimiser.zero_grad()
    assert p.grad is None


class Mine(torch.optim.SGD):
    pass


def test_torchs_class_stays_where_only_it_will_do():
    p = torch.ones(2, requires_grad=True)
    assert plain_optimiser(torch.optim.SGD, [p], {"lr": 0.1}) is not None
    for make, params, options in (
        (Mine, [p], {"lr": 0.1}),
        (torch.optim.AdamW, [p], {}),
        (torch.optim.Adam, [p], {"amsgrad": True}),
        (torch.optim.SGD, [p], {"dampening": 0.5, "momentum": 0.5}),
        (torch.optim.SGD, [p], {"lr": torch.tensor(0.1)}),
        (torch.optim.SGD, [p, p], {}),
        (torch.optim.SGD, [torch.ones(2, requires_grad=True, device="meta")], {}),
        (torch.optim.SGD, [torch.ones(2, dtype=torch.complex64, requires_grad=True)], {}),
    ):
        assert plain_optimiser(make, params, options) is None, (make, options)
        assert isinstance(Opt(make, options).build(params), make)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (torch.optim.SGD, {"lr": -1.0}, "learning rate"),
        (torch.optim.SGD, {"momentum": -0.1}, "momentum"),
        (torch.optim.SGD, {"nesterov": True}, "Nesterov"),
        (torch.optim.Adam, {"betas": (1.0, 0.9)}, "beta"),
        (torch.optim.Adam, {"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_torch_says_what_is_wrong_with_an_option(make, options, words):
    with pytest.raises(ValueError, match=words):
        Opt(make, options).build([torch.ones(2, requires_grad=True)])


def test_torch_says_what_is_wrong_with_parameters():
    with pytest.raises(ValueError, match="non-leaf"):
        sgd(0.1).build([torch.ones(2, requires_grad=True) * 2])
    with pytest.raises(ValueError, match="empty"):
        sgd(0.1).build([])
