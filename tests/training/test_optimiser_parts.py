"""An optimiser for each part of a model: against torch's own for each part by itself, alone and in a stack."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fedaudit import Opt, adam, run, sgd
from fedaudit.training.optimiser_parts import ByParts, split
from fedaudit.training.stacked.steppers import clipped, stepper
from fedaudit.wire.transcript import Transcript

SIZES = (2, 1, 0, 1)  # tensors of the parts below
OPTS = (adam(0.1, weight_decay=0.3), sgd(0.2, momentum=0.5), sgd(0.7), sgd(0.4))


def parts(opts=OPTS):
    return [(size, opt.make, opt.options) for size, opt in zip(SIZES, opts, strict=True)]


def tensors():
    torch.manual_seed(0)
    return [torch.randn(3, 2), torch.randn(3), torch.randn(2, 2), torch.randn(2)]


def gradients(values, step):
    return [2 * (t - step) * (1 + i) for i, t in enumerate(values)]


def of_torch(start, steps, clip, idle=()):
    """Return what torch's own optimisers make of each part by itself."""
    theirs = [t.clone().requires_grad_() for t in start]
    bounds = [sum(SIZES[:i]) for i in range(len(SIZES) + 1)]
    pieces = [theirs[a:b] for a, b in pairwise(bounds)]
    alone = [
        torch.optim.Adam(pieces[0], 0.1, weight_decay=0.3), torch.optim.SGD(pieces[1], 0.2, momentum=0.5),
        torch.optim.SGD(pieces[3], 0.4),
    ]  # fmt: skip
    for step in range(steps):
        for at, (t, g) in enumerate(zip(theirs, gradients([t.detach() for t in theirs], step), strict=True)):
            t.grad = None if (step, at) in idle else g
        for piece in pieces if clip is not None else ():
            there = [t for t in piece if t.grad is not None]
            if there:
                length = torch.cat([t.grad.flatten() for t in there]).norm().item()
                for t in there:
                    t.grad *= min(1.0, clip / (length + 1e-6))
        for optimiser in alone:
            optimiser.step()
    return [t.detach() for t in theirs]


@pytest.mark.parametrize("clip", [None, 3.0, 1e6])
def test_each_part_has_its_own_optimiser(clip):
    mine = [t.clone().requires_grad_() for t in tensors()]
    both = Opt(ByParts, {"parts": parts(), "clip": clip}).build(mine)
    for step in range(3):
        for t, g in zip(mine, gradients([t.detach() for t in mine], step), strict=True):
            t.grad = g
        both.step()
    expected = of_torch(tensors(), 3, clip)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(mine, expected, strict=True))
    if clip == 3.0:
        assert not any(
            torch.allclose(a, b, atol=1e-3) for a, b in zip(expected, of_torch(tensors(), 3, None), strict=True)
        )
    both.zero_grad()
    assert all(t.grad is None for t in mine)


def test_a_schedule_reaches_each_part():
    """After half of the steps of a cosine, half of each rate."""
    mine = [t.clone().requires_grad_() for t in tensors()]
    opt = Opt(ByParts, {"parts": parts()}, "cosine")
    both = opt.build(mine)
    opt.set_rate(both, 1, 2)
    assert [group["lr"] for group in both.param_groups] == pytest.approx([0.05, 0.1, 0.2])
    assert [part.param_groups[0]["lr"] for part in both.parts] == pytest.approx([0.05, 0.1, 0.2])


def test_parts_are_all_that_is_trained():
    with pytest.raises(ValueError, match="The parts have 4 tensors, and the model trains 3"):
        ByParts([t.clone().requires_grad_() for t in tensors()[:3]], parts())
    assert split("abcd", SIZES) == [["a", "b"], ["c"], [], ["d"]]


@pytest.mark.parametrize("clip", [None, 3.0])
@pytest.mark.parametrize("idle", [(), ((1, 0), (1, 1), (2, 2))])
def test_a_stack_steps_each_part_of_each_model(clip, idle):
    """Three models with other numbers, one of which takes two steps only; some parts have no gradient in a step."""
    start = [[t * (m + 1) + m for t in tensors()] for m in range(3)]
    how = stepper(Opt(ByParts, {"parts": parts(), "clip": clip}))
    assert not isinstance(how, str)
    assert not how.together
    names = ["own.weight", "own.bias", "shared.weight", "W_h"]
    params = {name: torch.stack([of_one[i] for of_one in start]) for i, name in enumerate(names)}
    state = how.state(params)
    assert all(len(t) == 3 for t in state.values())
    for step in range(3):
        models = 3 if step < 2 else 2  # the last one is done
        some, kept = ({name: t[:models] for name, t in of.items()} for of in (params, state))
        grads = {
            name: None
            if (step, i) in idle
            else torch.stack([gradients([t[m] for t in some.values()], step)[i] for m in range(models)])
            for i, name in enumerate(names)
        }
        before = {name: None if g is None else g.clone() for name, g in grads.items()}
        how.step(some, grads, kept)
        assert all(g is None or torch.equal(g, before[name]) for name, g in grads.items()), "gradients stay"
    for m, of_one in enumerate(start):
        expected = of_torch(of_one, 3 if m < 2 else 2, clip, idle)
        for name, t in zip(names, expected, strict=True):
            assert torch.allclose(params[name][m], t, atol=1e-5), (m, name)


def test_each_model_of_a_stack_is_clipped_by_itself():
    """Lengths 5 and 10, cut to 6: the first stays, and the second is cut."""
    grads = {"a": torch.tensor([[3.0], [6.0]]), "b": None, "c": torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]]])}
    found = clipped(grads, 6.0)
    assert found["b"] is None
    assert found["a"].flatten().tolist() == pytest.approx([3.0, 3.6], abs=1e-5)
    assert found["c"].flatten().tolist() == pytest.approx([4.0, 0.0, 0.0, 4.8], abs=1e-5)
    assert clipped({"b": None}, 6.0) == {"b": None}
    assert clipped({}, 6.0) == {}


@pytest.mark.parametrize(("opt", "reason"), [
    (Opt(ByParts, {"parts": parts(), "clip": None}, "cosine"), "the learning rate of ByParts changes"),
    (Opt(ByParts, {"parts": [(1, torch.optim.RMSprop, {"lr": 0.1})]}), "counts steps for all of a stack"),
    (Opt(ByParts, {"parts": [(1, torch.optim.LBFGS, {"lr": 0.1})]}), "LBFGS is not known to treat every number alone"),
])  # fmt: skip
def test_why_parts_are_not_stacked(opt, reason):
    assert reason in stepper(opt)


@pytest.mark.parametrize("method", ["fml", "fedkd"])
@pytest.mark.parametrize("preset", ["dffke_authors", "htfllib"])
def test_pairs_of_networks_are_stacked(method, preset, tiny, tmp_path):
    """What each client sends is what it sends alone, and nothing was trained by itself."""
    sent = []
    for engine in ("serial", "stacked"):
        options = {"E": 2, "B": 16, "clip": 0.5}
        setting = tiny(method, model="mlp", preset=preset, set=options, engine=engine)
        record = run(setting, out=tmp_path / engine)
        assert not [note for note in record.notes if "not stacked" in note], record.notes
        entries = Transcript(tmp_path / engine / "transcript").entries()
        sent.append([t for e in entries if e.direction == "up" for t in e["w" if method == "fml" else "g"].values()])
    assert len(sent[0]) == len(sent[1]) > 4
    assert max(float((a.double() - b.double()).abs().max()) for a, b in zip(*sent, strict=True)) < 1e-5
