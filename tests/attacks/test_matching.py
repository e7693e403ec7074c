"""Matching an update: the client's steps as torch makes them, and a search over several starts, piece by piece."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from fedaudit.attacks.inversion import _matching
from fedaudit.attacks.inversion._matching import Matching, Models, Rates, Steps, flat, forecast, match_cosine, simulated


def net(seed=0, *more):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), *more, nn.Linear(3, 2)).double()


def images(n, seed=0):
    return torch.randn(n, 1, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PLAN = [torch.tensor([0, 2]), torch.tensor([1]), torch.tensor([2, 1, 0])]


def trained(model, x, y, eta, plan=PLAN):
    """The parameters before minus after, by torch's loss and a loop over them."""
    own = copy.deepcopy(model)
    for index in plan:
        loss = nn.functional.cross_entropy(own(x[index]), y[index])
        for p, g in zip(own.parameters(), torch.autograd.grad(loss, list(own.parameters())), strict=True):
            p.data -= eta * g
    return torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), own.parameters(), strict=True)]).detach()


def test_the_clients_steps_are_those_of_sgd():
    """Three steps of unequal batches. The update can be followed back to the images."""
    x, y = images(3).requires_grad_(), torch.tensor([0, 1, 1])
    update = simulated(net(), x, one_hot(y).double(), Steps(PLAN, 0.3))
    assert list(update) == [name for name, _ in net().named_parameters()]
    assert torch.allclose(flat(update), trained(net(), x.detach(), y, 0.3), atol=1e-12)
    (gradient,) = torch.autograd.grad(flat(update).square().sum(), x)
    assert (gradient.abs().flatten(1).sum(1) > 0).all()
    assert Steps(PLAN, 0.3).length == pytest.approx(0.9)


def test_a_stack_of_models_makes_the_same_steps():
    """Each with images, labels and an order of its own, and batch norm's buffers of its own."""
    models = [net(seed, nn.BatchNorm1d(3).double()).eval() for seed in range(2)]
    for seed, model in enumerate(models):
        model[3].running_mean += seed + 0.5
    x, y = torch.stack([images(3, 1), images(3, 2)]).requires_grad_(), torch.tensor([[0, 1, 1], [1, 0, 1]])
    plans = [PLAN, [index.flip(0) for index in reversed(PLAN[:1])] + [torch.tensor([0]), torch.tensor([0, 1, 2])]]
    stacked = [torch.stack(of) for of in zip(*plans, strict=True)]
    found = Models.of(models, torch.float64).simulated(x, one_hot(y).double(), stacked, 0.3)
    for k in range(2):
        wanted = trained(models[k], x[k].detach(), y[k], 0.3, plans[k])
        assert torch.allclose(found[k], wanted, atol=1e-12)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    assert (gradient.abs().flatten(2).sum(2) > 0).all()


@pytest.mark.parametrize(("work", "steps"), [(1e30, 2000), (1.0, 200), (None, 731)])
def test_as_many_steps_as_the_work_allows(work, steps, monkeypatch):
    counted, modes = 1234, []

    class Counter:
        def __init__(self, display):
            modes.append(display)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def get_total_flops(self):
            return counted

    monkeypatch.setattr(_matching, "FlopCounterMode", Counter)
    monkeypatch.setattr(_matching, "WORK", {"cpu": 731.5 * counted if work is None else work})
    assert forecast(net(), images(3), 2, Steps(PLAN, 0.3)) == steps
    assert modes == [False]
    counted = 0
    monkeypatch.setattr(_matching, "WORK", {"cpu": 300.0})
    assert forecast(net(), images(3), 2, Steps(PLAN, 0.3)) == 300, "nothing counted is one operation"


def matching(**changes):
    values = {
        "model": net(), "wanted": torch.ones(5, dtype=torch.float64), "steps": Steps(PLAN, 0.3),
        "y": one_hot(torch.tensor([0, 1, 1])).double(), "begin": [images(3)], "tv": 0.1, "lr": 0.2, "iterations": 80,
    }  # fmt: skip
    return Matching(**{**values, **changes})


def test_which_searches_may_be_one_stack(monkeypatch):
    monkeypatch.setattr(_matching, "stacks_on", lambda device: True)
    one = matching()
    assert (one.most, one.trial) == (16, 0)
    assert one.like(matching(model=net(3), begin=[images(3, 5), images(3, 6)]))
    for other in (
        matching(tv=0.2), matching(lr=0.3), matching(iterations=81), matching(trial=1),
        matching(steps=Steps(PLAN, 0.4)), matching(steps=Steps(PLAN[:2], 0.3)), matching(begin=[images(4)]),
        matching(y=torch.ones(3, 4)),
        matching(model=nn.Sequential(nn.Flatten(), nn.Linear(4, 2))), matching(wanted=torch.ones(5, device="meta")),
        "something else",
    ):  # fmt: skip
        assert not one.like(other)
    monkeypatch.setattr(_matching, "stacks_on", lambda device: False)
    assert not one.like(one)


def test_what_draws_is_not_stacked(monkeypatch):
    monkeypatch.setattr(_matching, "stacks_on", lambda device: True)
    assert matching()._stackable()
    assert not matching(model=net(0, nn.Dropout(0.5)).train())._stackable()
    assert matching(model=net(0, nn.Dropout(0.5)).eval())._stackable()
    assert matching(model=net(0, nn.Dropout(0.0)).train())._stackable()
    monkeypatch.setattr(_matching, "stacks_on", lambda device: False)
    assert not matching()._stackable()


@pytest.mark.parametrize(
    ("trial", "starts", "asked"),
    [
        (0, (2, 1), [([2, 1], 80, [30, 50, 70])]),
        (16, (2, 1), [([2, 1], 16, []), ([1, 1], 64, [24, 40, 56])]),
        (16, (1, 1), [([1, 1], 80, [30, 50, 70])]),
        (80, (2, 2), [([2, 2], 80, [30, 50, 70])]),
    ],
)
def test_a_trial_chooses_the_start_that_goes_on(trial, starts, asked, monkeypatch):
    said = []

    def best(self, jobs, begin, steps, falls):
        said.append(([len(of) for of in begin], steps, falls))
        return [of[-1] for of in begin]

    monkeypatch.setattr(Matching, "_best", best)
    first, second = (
        matching(trial=trial, begin=[images(3, 10 * k + i) for i in range(n)]) for k, n in enumerate(starts)
    )
    found = first.together([second])
    assert said == asked
    assert [torch.equal(a, job.begin[-1]) for a, job in zip(found, (first, second), strict=True)] == [True, True]
    assert torch.equal(second.alone(), second.begin[-1])


@pytest.mark.parametrize(("most", "stackable", "parts"), [(2, True, [2, 2, 1]), (16, True, [5]), (2, False, [1] * 5)])
def test_the_best_of_each_searchs_starts_is_taken(most, stackable, parts, monkeypatch):
    """Two starts of the first search, three of the second. Of equal losses the first counts."""
    losses = iter([0.5, 0.4, 0.9, 0.3, 0.3])
    said = []

    def descend(self, jobs, begin, rates, done, of):
        said.append((len(jobs), done, of, rates.steps, rates.lr, len(rates.phase)))
        return [(start, next(losses)) for start in begin]

    monkeypatch.setattr(Matching, "_descend", descend)
    monkeypatch.setattr(Matching, "_stackable", lambda self: stackable)
    one, two = matching(most=most), matching(most=most)
    begin = [[images(3, i) for i in range(2)], [images(3, i) for i in range(2, 5)]]
    found = one._best([one, two], begin, 40, [10])
    assert torch.equal(found[0], begin[0][1])
    assert torch.equal(found[1], begin[1][1])
    firsts = [sum(parts[:i]) for i in range(len(parts))]
    assert said == [(n, first, 5, 40, 0.2, n) for n, first in zip(parts, firsts, strict=True)]


def test_a_search_alone_and_in_a_stack_takes_the_same_steps():
    """Three steps by Adam on signs: the first goes by the whole rate. Each search is told how far it is."""
    told = []
    wanted = trained(net(), images(3, 8), torch.tensor([0, 1, 1]), 0.3)
    one = matching(wanted=wanted, tell=lambda *said: told.append(said))
    two = replace(one, model=net(1), begin=[images(3, 4).clamp(-1, 1)], steps=Steps([i.flip(0) for i in PLAN], 0.3))
    starts = [images(3).clamp(-1, 1), two.begin[0]]
    alone = [
        job._descend([job], [start], Rates(1, 0.2, 3, []), 0, 2)[0]
        for job, start in zip((one, two), starts, strict=True)
    ]
    assert told[:3] == [(0.0, 2, "step 0 of 3"), (1 / 3, 2, "step 1 of 3"), (2 / 3, 2, "step 2 of 3")]
    told.clear()
    stack = one._descend([one, two], starts, Rates(2, 0.2, 3, []), 4, 6)
    assert told == [(4.0, 6, "step 0 of 3"), (4 + 2 / 3, 6, "step 1 of 3"), (4 + 4 / 3, 6, "step 2 of 3")]
    for (x, loss), (other, same) in zip(stack, alone, strict=True):
        assert torch.allclose(x, other, atol=1e-9)
        assert loss == pytest.approx(same, abs=1e-9)
    ((first, loss),) = one._descend([one], starts[:1], Rates(1, 0.2, 1, []), 0, 1)
    x = starts[0].clone().requires_grad_()
    made = flat(simulated(one.model, x, one.y, one.steps))
    beside, below = x[:, :, :, 1:] - x[:, :, :, :-1], x[:, :, 1:] - x[:, :, :-1]
    across = beside.abs().mean((1, 2, 3)) + below.abs().mean((1, 2, 3))
    value = 1 - torch.cosine_similarity(made, one.wanted, dim=0) + 0.1 * across.mean()
    assert loss == pytest.approx(value.item(), abs=1e-9)
    (gradient,) = torch.autograd.grad(value, x)
    assert torch.allclose(first, (starts[0] - 0.2 * gradient.sign()).clamp(-1, 1), atol=1e-6)


def test_a_search_begins_as_often_as_it_is_told(monkeypatch):
    asked = []
    monkeypatch.setattr(_matching, "join", lambda job: asked.append(job) or job.begin[-1])
    update = {"a": torch.ones(2, 2), "b": torch.zeros(1)}
    labels = torch.tensor([1, 0, 1])
    how = {"tv": 0.1, "lr": 0.2, "iterations": 5}
    match_cosine(net(), update, Steps(PLAN, 0.3), labels, lambda r: images(3, r), **how)
    found = match_cosine(
        net(), update, Steps(PLAN, 0.3), labels, lambda r: images(3, r), **how, restarts=3, trial=2, together=4
    )
    assert torch.equal(found, images(3, 2))
    plain, full = asked
    assert (len(plain.begin), plain.trial, plain.most) == (1, 0, 16)
    assert (len(full.begin), full.trial, full.most) == (3, 2, 4)
    assert (full.tv, full.lr, full.iterations) == (0.1, 0.2, 5)
    assert full.wanted.tolist() == [1, 1, 1, 1, 0]
    assert full.y.tolist() == [[0, 1], [1, 0], [0, 1]]


def test_rates_fall_by_tenths_and_end():
    """Falls after 2 and 2 of 5 steps: a phase of no steps is passed over, and its tenth counts."""
    rates = Rates(2, 1.0, 5, [2, 2])
    assert rates.lengths == [2, 0, 3]
    seen = []
    for _ in range(5):
        seen.append(rates.now(torch.zeros(2, 1, 1)).flatten().tolist())
        assert rates.now(torch.zeros(2, 1, 1)).shape == (2, 1, 1)
        ended = rates.after(torch.tensor([1.0, math.inf]))
    assert ended
    assert seen == [pytest.approx([value] * 2) for value in (1.0, 1.0, 0.01, 0.01, 0.01)]
    assert rates.now(torch.zeros(2, 1)).flatten().tolist() == [0.0, 0.0]


def test_the_least_loss_of_a_block_tells_whether_there_was_a_gain(monkeypatch):
    """Blocks of two steps, and two blocks without a gain of a hundredth are a plateau. The first search falls once
    within each block; the second falls by too little."""
    monkeypatch.setattr(_matching, "BLOCK", 2)
    monkeypatch.setattr(_matching, "PATIENCE", 2)
    rates = Rates(2, 1.0, 100, [])
    phases = []
    for step in range(8):
        losses = torch.tensor([0.9**step if step % 2 == 0 else 5.0, 1.0 - 0.001 * step])
        assert not rates.after(losses), "one of them goes on"
        phases.append(tuple(rates.phase))
    assert phases == [(0, 0)] * 5 + [(0, 1)] * 3
    assert rates.best[0] == pytest.approx(0.9**6)
    assert rates.made == 8


def test_three_steps_of_adam_on_signs_by_hand():
    """The gradient's sign instead of the gradient, a mean over 0.9, a square over 0.999, both corrected."""
    one = matching(wanted=trained(net(), images(3, 8), torch.tensor([0, 1, 1]), 0.3), lr=0.7)
    start = images(3).clamp(-1, 1)
    ((found, loss),) = one._descend([one], [start], Rates(1, 0.7, 4, []), 0, 1)
    x, mean, square, losses = start.clone(), torch.zeros_like(start), torch.zeros_like(start), []
    for t in range(1, 5):
        x = x.detach().requires_grad_()
        beside, below = x[:, :, :, 1:] - x[:, :, :, :-1], x[:, :, 1:] - x[:, :, :-1]
        rough = (beside.abs().mean((1, 2, 3)) + below.abs().mean((1, 2, 3))).mean()
        made = flat(simulated(one.model, x, one.y, one.steps))
        value = 1 - torch.cosine_similarity(made, one.wanted, dim=0) + 0.1 * rough
        sign = torch.autograd.grad(value, x)[0].sign()
        losses.append(value.item())
        mean, square = 0.9 * mean + 0.1 * sign, 0.999 * square + 0.001 * sign**2
        step = mean / (1 - 0.9**t) / ((square / (1 - 0.999**t)).sqrt() + 1e-8)
        x = (x.detach() - 0.7 * step).clamp(-1, 1)
    assert torch.allclose(found, x, atol=1e-6)
    assert loss == pytest.approx(losses[-1], abs=1e-6)


def test_a_search_whose_rates_end_goes_no_further(monkeypatch):
    """Two searches of at most ten steps. The second ends after one step: its loss is that with which this began."""
    told = []
    one = matching(wanted=trained(net(), images(3, 8), torch.tensor([0, 1, 1]), 0.3), tell=lambda *of: told.append(of))
    starts = [images(3, 2).clamp(-1, 1), images(3).clamp(-1, 1)]
    rates = Rates(2, 0.2, 10, [])
    ends = {1: [0, 1], 3: [1, 1]}

    def after(losses):
        rates.made += 1
        rates.phase, rates._rate = ends.get(rates.made, rates.phase), None
        return rates.made == 3

    monkeypatch.setattr(rates, "after", after)
    found = one._descend([one, one], starts, rates, 0, 2)
    assert [said[2] for said in told] == ["step 0 of 10", "step 1 of 10", "step 2 of 10"]
    alone = one._descend([one], starts[1:], Rates(1, 0.2, 1, []), 0, 1)[0]
    assert torch.allclose(found[1][0], alone[0], atol=1e-9)
    assert found[1][1] == pytest.approx(alone[1], abs=1e-9)


def test_a_pixel_without_a_gradient_stays_as_it_is():
    """An image of one colour has no total variation, and a wanted update of zeros asks for nothing: no pixel moves."""
    one = matching(wanted=trained(net(), images(3, 8), torch.tensor([0, 1, 1]), 0.3) * 0, tv=0.0)
    start = torch.full((3, 1, 2, 2), 0.25, dtype=torch.float64)
    ((found, _),) = one._descend([one], [start], Rates(1, 0.7, 2, []), 0, 1)
    assert torch.equal(found, start)
