"""The training loop against loops written out by hand."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedaudit.errors import ContractError
from fedaudit.training import fit as module
from fedaudit.training.augment import Augment
from fedaudit.training.fit import (
    Fitted,
    Opt,
    Running,
    Turns,
    adam,
    batches,
    check_pure,
    check_rows,
    fit,
    moments_of,
    sgd,
)


def ce(f, x, y):
    return cross_entropy(f(x), y, reduction="none")


def rows(n=21):
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("opt", [sgd(0.1, momentum=0.9, weight_decay=0.01), adam(0.01)])
def test_equals_a_loop_written_out(opt):
    (x, y), f, g = rows(), model(), model()
    done = fit(f, ce, (x, y), opt=opt, batch=8, epochs=3, rng=torch.Generator().manual_seed(7))
    rng = torch.Generator().manual_seed(7)
    optimiser = opt.build(list(g.parameters()))
    for _ in range(3):
        order = torch.randperm(21, generator=rng)
        total = 0.0
        for i in range(0, 21, 8):
            index = order[i : i + 8]
            loss = cross_entropy(g(x[index]), y[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(index)
    assert torch.equal(f.weight, g.weight)
    assert torch.equal(f.bias, g.bias)
    assert done.steps == 9
    assert done.epochs == 3
    assert done.loss == pytest.approx(total / 21, rel=1e-5)


def test_a_last_row_alone_joins_the_batch_before():
    sizes = [len(b) for b in batches(17, 8, torch.Generator())]
    assert sizes == [8, 9]
    assert sorted(torch.cat(list(batches(17, 8, torch.Generator()))).tolist()) == list(range(17))
    assert [len(b) for b in batches(1, 8, torch.Generator())] == [1]
    assert [len(b) for b in batches(16, 8, torch.Generator())] == [8, 8]


def test_steps_and_until():
    done = fit(model(), ce, rows(), opt=sgd(0.1), batch=8, steps=4, rng=torch.Generator())
    assert (done.steps, done.epochs) == (4, 2)
    seen = []

    def until(f, x, y):
        seen.append(f(x).shape)
        return len(seen) == 2

    done = fit(model(), ce, rows(), opt=sgd(0.1), batch=8, epochs=9, rng=torch.Generator(), until=until)
    assert done.epochs == 2
    assert seen == [(21, 3), (21, 3)]


def test_given_and_params_make_a_proximal_loss():
    """The gradient of 0.5 |w - w0|^2 is w - w0: from w0 + 1 one step of size 0.1 goes a tenth of the way back."""

    def proximal(f, x, y, w0):
        return 0.5 * sum(((p - w0[name]) ** 2).sum() for name, p in f.params.items()) + 0 * y

    f = model()
    w0 = {name: p.detach() - 1 for name, p in f.named_parameters()}
    fit(f, proximal, rows(), opt=sgd(0.1), batch=21, epochs=1, rng=torch.Generator(), given={"w0": w0})
    for name, p in f.named_parameters():
        assert torch.allclose(p, w0[name] + 0.9)


def test_mode_is_restored_and_frozen_parameters_stay():
    f = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)).eval()
    f[0].requires_grad_(False)
    before = f[0].weight.clone()
    fit(f, ce, rows(), opt=sgd(0.1), batch=8, epochs=1, rng=torch.Generator())
    assert not f.training
    assert torch.equal(f[0].weight, before)


def test_contract_errors():
    options = {"opt": sgd(0.1), "batch": 8, "rng": torch.Generator()}

    def reduced(f, x, y):
        return cross_entropy(f(x), y)

    with pytest.raises(ContractError, match=r"reduced returned the shape \(\) for 8 rows"):
        fit(model(), reduced, rows(), epochs=1, **options)
    fit(model(), reduced, rows(), epochs=1, separable=False, **options)
    with pytest.raises(ContractError, match="either epochs or steps"):
        fit(model(), ce, rows(), **options)
    with pytest.raises(ContractError, match="one common, positive number of rows"):
        fit(model(), ce, (torch.ones(3, 4), torch.ones(2)), epochs=1, **options)
    with pytest.raises(ContractError, match="tuple of tensors"):
        fit(model(), ce, (), epochs=1, **options)


def test_a_loss_carries_no_tensor_or_module():
    teacher, target = nn.Linear(2, 2), torch.ones(2)
    tau = 2.0

    def closes(f, x, y):
        return teacher(x).sum(1)

    def defaults(f, x, y, t=target):
        return t * x

    def fine(f, x, y):
        return f(x).sum(1) / tau

    check_pure(fine)
    check_pure(functools.partial(fine, y=3))
    for loss in (closes, defaults, functools.partial(fine, y=target), teacher.forward):
        with pytest.raises(ContractError, match="carries a"):
            check_pure(loss)


def test_fewer_than_no_epochs_are_refused():
    with pytest.raises(ContractError, match="-1 epochs: give a number from 0 up"):
        fit(model(), ce, rows(), opt=sgd(0.1), batch=8, epochs=-1, rng=torch.Generator())


def which(x):
    """To which of two parts of 5 and 3 rows each batch belongs; it must not mix them."""
    parts = {int(i >= 5) for i in x.tolist()}
    assert len(parts) == 1
    return parts.pop()


@pytest.mark.parametrize(("by", "order"), [("step", [0, 1, 0]), ("epoch", [0, 0, 1])])
def test_parts_take_turns(by, order):
    """Five rows and three, in batches of two. Five make two batches, as a last row alone joins the one before; three
    make one batch. By step the longer part ends alone. Each part is shuffled by itself, in order."""
    seen = list(batches(8, 2, torch.Generator().manual_seed(0), Turns((5, 3), by)))
    assert [which(index) for index in seen] == order
    first = torch.Generator().manual_seed(0)
    alone = [torch.randperm(5, generator=first).tolist(), (torch.randperm(3, generator=first) + 5).tolist()]
    assert [[i for index in seen if which(index) == part for i in index.tolist()] for part in (0, 1)] == alone
    assert [len(index) for index in batches(5, 3, first, Turns((0, 5), by))] == [3, 2], "an empty part has no turn"


def test_one_optimiser_serves_all_parts():
    """SGD with momentum on x -> (w - x)^2 / 2, two parts of one row each, 1 and 3, w = 0, learning rate 1/2, momentum
    1/2. Step 1 on 1: gradient -1, v = -1, w = 1/2. Step 2 on 3: gradient -5/2, v = -1/2 - 5/2 = -3, w = 2. With a new
    optimiser in step 2, w would be 1/2 + 5/4."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    rows = (torch.tensor([[1.0], [3.0]]),)

    def half_square(f, x):
        return ((f(torch.ones_like(x)) - x) ** 2 / 2)[:, 0]

    opt = sgd(0.5, momentum=0.5)
    fit(model, half_square, rows, opt=opt, batch=1, epochs=1, rng=torch.Generator(), turns=Turns((1, 1)))
    assert model.weight.item() == 2.0


def test_turns_cover_the_rows():
    with pytest.raises(ContractError, match=r"parts that take turns have \(2, 2\) rows, the data 3"):
        fit(nn.Linear(1, 1), lambda f, x: f(x)[:, 0], (torch.ones(3, 1),), opt=sgd(0.1), batch=1, epochs=1,
            rng=torch.Generator(), turns=Turns((2, 2)))  # fmt: skip


@pytest.mark.parametrize("norms", ["batch", "running"])
def test_batch_norms_learn_from_the_batch_or_stay(norms):
    """Rows of mean 4: the running mean goes from 0 to 0.4 (momentum 0.1), or stays; and it is what normalises, or not.
    The weights of the norm are trained either way."""
    norm = nn.BatchNorm1d(1)
    x = torch.tensor([[3.0], [5.0]])
    seen: list[torch.Tensor] = []

    def loss(f, x):
        out = f(x)
        seen.append(out.detach().clone())
        return out[:, 0] ** 2

    fit(norm, loss, (x,), opt=sgd(0.1), batch=2, epochs=1, rng=torch.Generator(), norms=norms)
    output, mean = {"batch": ([-1.0, 1.0], 0.4), "running": ([3.0, 5.0], 0.0)}[norms]
    assert sorted(seen[0].flatten().tolist()) == pytest.approx(output, abs=1e-4)
    assert norm.running_mean.item() == pytest.approx(mean)
    assert norm.weight.item() != 1
    assert norm.training, "as it was before"


def test_a_step_is_recorded_once_for_each_size_that_comes_often(monkeypatch):
    """The usual size of 4 at once; 3, an epoch's last batch, once it came `OFTEN` times."""
    made = []
    monkeypatch.setattr(module, "record_giving_back", lambda step, state, device: made.append(device) or object())
    monkeypatch.setattr(module, "recordable", lambda model, device, planned: True)
    gradient = module._Gradient(
        torch.nn.Linear(2, 1), None, None, {}, separable=True, total=torch.zeros(()), usual=4, planned=100
    )
    usual, last = [torch.ones(4, 2)], [torch.ones(3, 2)]
    first = gradient._recording(usual)
    assert first is not None
    assert gradient._recording(usual)[0] is first[0]
    assert len(made) == 1
    assert first[1][0] is not usual[0], "batches are copied into rows of its own"
    assert [gradient._recording(last) is None for _ in range(module.OFTEN - 1)] == [True] * (module.OFTEN - 1)
    second = gradient._recording(last)
    assert second is not None
    assert gradient._recording(last)[0] is second[0]
    assert len(made) == 2


def test_what_cannot_be_recorded_is_not_tried_again(monkeypatch):
    tried = []
    monkeypatch.setattr(module, "record_giving_back", lambda step, state, device: tried.append(device))
    monkeypatch.setattr(module, "recordable", lambda model, device, planned: True)
    for size, goes_on in ((3, True), (4, False)):  # without the usual size nothing is recorded at all
        gradient = module._Gradient(
            torch.nn.Linear(2, 1), None, None, {}, separable=True, total=torch.zeros(()), usual=4, planned=50
        )
        tried.clear()
        assert all(gradient._recording([torch.ones(size, 2)]) is None for _ in range(module.OFTEN + 20))
        assert gradient._records == goes_on
        if size == 3:
            assert len(tried) == 1


@pytest.mark.parametrize(
    "data", [(), ([1, 2],), (torch.ones(2), [1, 2]), ([1, 2], torch.ones(2)), (torch.ones(2), torch.tensor(1.0))]
)
def test_each_part_of_the_data_is_a_tensor_with_rows(data):
    with pytest.raises(ContractError, match="data is not a tuple of tensors"):
        check_rows(data)


def test_all_parts_of_the_data_have_the_same_rows():
    assert check_rows((torch.ones(3, 2), torch.ones(3))) == 3
    for sizes in ((3, 2), (0, 0)):
        with pytest.raises(ContractError, match="one common, positive number of rows"):
            check_rows([torch.ones(n) for n in sizes])


def test_optimisers_of_which_nothing_else_is_said():
    plain = sgd(0.1)
    assert (plain.make, plain.schedule) == (torch.optim.SGD, "constant")
    assert plain.options == {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False}
    usual = adam()
    assert (usual.make, usual.schedule) == (torch.optim.Adam, "constant")
    assert usual.options == {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    assert sgd(0.1, momentum=0.9, nesterov=True).options["nesterov"] is True
    assert (Opt(torch.optim.SGD).options, Turns((1,)).by) == ({}, "step")


@pytest.mark.parametrize(
    ("done", "planned", "left"), [(0, 4, 1.0), (1, 4, 0.8535534), (2, 4, 0.5), (4, 4, 0.0), (0, 0, 1.0), (1, 0, 0.0)]
)
def test_how_much_of_a_rate_is_left(done, planned, left):
    assert sgd(0.1, schedule="cosine").factor(done, planned) == pytest.approx(left)
    assert sgd(0.1).factor(done, planned) == 1.0


def test_a_schedule_is_of_the_rates_that_the_groups_began_with():
    """Two groups, 0.4 and 0.2. After half of the training each has the half of it, twice in a row; constant ones
    stay."""
    groups = SimpleNamespace(param_groups=[{"lr": 0.4}, {"lr": 0.2}])
    for _ in range(2):
        sgd(0.4, schedule="cosine").set_rate(groups, 1, 2)
        assert [group["lr"] for group in groups.param_groups] == pytest.approx([0.2, 0.1])
    sgd(0.4).set_rate(groups, 0, 2)
    assert [group["lr"] for group in groups.param_groups] == pytest.approx([0.2, 0.1])
    assert sgd(0.4).rates(groups) == pytest.approx([0.4, 0.2])


def test_an_optimiser_goes_on_from_its_moments():
    """Three steps at once are one, then two with the moments of the first."""

    def steps(p, optimiser, count):
        for _ in range(count):
            p.grad = 2 * p.detach()
            optimiser.step()

    whole, halved = (nn.Parameter(torch.tensor([1.0, -3.0])) for _ in range(2))
    opt = adam(0.1)
    steps(whole, opt.build([whole]), 3)
    first = opt.build([halved])
    steps(halved, first, 1)
    kept = moments_of(first)
    assert set(kept) == {"0.step", "0.exp_avg", "0.exp_avg_sq"}
    second = opt.build([halved], kept)
    steps(halved, second, 2)
    assert torch.allclose(whole, halved)
    assert kept["0.exp_avg"].tolist() == pytest.approx([0.2, -0.6]), "they are copies"
    fresh = opt.build([halved], {})
    assert moments_of(fresh) == {}


def test_even_turns_are_spread_over_the_epoch():
    """Six rows, two and two, in batches of two: three batches at 1/6, 1/2 and 5/6, one at 1/2 each, in their order."""
    seen = list(batches(10, 2, torch.Generator().manual_seed(0), Turns((6, 2, 2), "even")))
    parts = [{0 if i < 6 else 1 if i < 8 else 2 for i in index.tolist()} for index in seen]
    assert parts == [{0}, {0}, {1}, {2}, {0}]
    assert sorted(i for index in seen for i in index.tolist()) == list(range(10))


def test_a_part_that_is_gone_through_several_times_is_shuffled_anew_each_time():
    """Two passes through three rows take turns with one pass through six: as many batches, and each row in its pass."""
    turns = Turns((3, 6), "step", (2, 1))
    seen = [index.tolist() for index in batches(9, 3, torch.Generator().manual_seed(0), turns)]
    assert [sorted(index) for index in seen[::2]] == [[0, 1, 2]] * 2
    assert seen[0] != seen[2]
    assert sorted(seen[1] + seen[3]) == [3, 4, 5, 6, 7, 8]
    assert (turns.steps(3), turns.steps(2), Turns((3, 6)).steps(2)) == (4, 7, 5)


def test_nothing_to_do_leaves_the_model():
    for planned in ({"epochs": 0}, {"steps": 0}):
        f = model()
        before = f.weight.detach().clone()
        assert fit(f, ce, rows(), opt=sgd(0.1), batch=8, rng=torch.Generator(), **planned) == Fitted(0, 0, 0.0)
        assert torch.equal(f.weight, before)


def test_the_loss_is_the_mean_over_what_the_last_epoch_saw():
    """A rate of 0. Of 21 rows the last of four steps sees the second epoch's first 8. A batch's value counts n-fold."""
    (x, y), rng = rows(), torch.Generator().manual_seed(5)
    each = ce(model(), x, y).detach()
    done = fit(model(), ce, (x, y), opt=sgd(0.0), batch=8, steps=4, rng=torch.Generator().manual_seed(5))
    torch.randperm(21, generator=rng)
    assert done.loss == pytest.approx(each[torch.randperm(21, generator=rng)[:8]].mean().item(), rel=1e-5)

    def reduced(f, x, y):
        return ce(f, x, y).mean()

    done = fit(model(), reduced, (x, y), opt=sgd(0.0), batch=8, epochs=1, rng=torch.Generator(), separable=False)
    assert done.loss == pytest.approx(each.mean().item(), rel=1e-5)


def test_until_is_asked_in_evaluation_and_without_gradients():
    """Three steps an epoch in training, but for the norms; then once on all rows."""
    f, told = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), []
    f.register_forward_hook(
        lambda _, of, out: told.append((f.training, f[1].training, torch.is_grad_enabled(), len(of[0])))
    )
    done = fit(
        f, ce, rows(), opt=sgd(0.1), batch=8, epochs=2, rng=torch.Generator(), norms="running",
        until=lambda g, x, y: g(x).sum() is None,
    )  # fmt: skip
    assert told == [*((True, False, True, n) for n in (8, 8, 5)), (False, False, False, 21)] * 2
    assert (done.epochs, done.steps, f.training) == (2, 6, True)


def scored(f, x, y):
    """The cross-entropy of each row, and whether its label is right."""
    out = f(x)
    return torch.stack([cross_entropy(out, y, reduction="none"), (out.argmax(1) == y).to(out.dtype)], 1)


def convolution():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    return nn.Sequential(*layers).double().eval()


def images():
    g = torch.Generator().manual_seed(0)
    return torch.randn(21, 1, 4, 4, generator=g, dtype=torch.float64), torch.randint(3, (21,), generator=g)


@pytest.mark.parametrize("augment", [None, Augment(crop=1, flip=True)])
def test_a_running_score_ends_a_training_as_in_a_loop_written_out(augment):
    """Hits count in training mode, on the images that are stepped on, each batch before its step."""
    (x, y), f, g, goal = images(), convolution(), convolution(), 0.7
    opt, own = sgd(0.1, momentum=0.5), torch.Generator().manual_seed(7)
    done = fit(f, scored, (x, y), opt=opt, batch=8, epochs=50, rng=own, until=Running(goal), augment=augment)
    rng = torch.Generator().manual_seed(7)

    def seen(rows):
        return rows if augment is None else augment(rows, augment.draw(len(rows), rng))

    assert (g(seen(x)).argmax(1) == y).double().mean() < goal
    optimiser, epochs, hits, otherwise = opt.build(list(g.parameters())), 0, 0, []
    while hits <= goal * 21:
        epochs, hits, total = epochs + 1, 0, 0.0
        g.train()
        order = torch.randperm(21, generator=rng)
        for index in order.split(8):
            out = g(seen(x[index]))
            hits += (out.argmax(1) == y[index]).sum().item()
            loss = cross_entropy(out, y[index])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            total += loss.item() * len(index)
        otherwise.append((g.eval()(x).argmax(1) == y).double().mean() > goal)
    assert (done.epochs, done.steps) == (epochs, 3 * epochs)
    assert [*otherwise, True].index(True) != epochs - 1, "the accuracy after an epoch would end it at another one"
    for mine, theirs in zip(f.state_dict().values(), g.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)
    assert done.loss == pytest.approx(total / 21, rel=1e-5)
    assert torch.equal(own.get_state(), rng.get_state()), "it drew as much"
    assert not f.training


class Halves(nn.Module):
    """Gives half of its rows in evaluation."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.w * (x if self.training else x / 2)


def above_one(f, x):
    out = f(x)
    return torch.stack([out, (out > 1).to(out.dtype)], 1)


@pytest.mark.parametrize(
    ("goal", "epochs"),
    [(0.25, 0), (0.26, 1), (0.74, 1), (0.75, 3)],
    ids=["just reached before", "missed before", "passed", "just reached"],
)
def test_a_goal_is_reached_before_training_and_has_to_be_passed_in_it(goal, epochs):
    """One row of four is above 1 in evaluation, three are in training. No step changes anything."""
    f, rows = Halves(), (torch.tensor([1.0, 1.5, 2.0, 2.5]),)
    done = fit(f, above_one, rows, opt=sgd(0.0), batch=3, epochs=3, rng=torch.Generator(), until=Running(goal))
    assert (done.epochs, f.training) == (epochs, True)


@pytest.mark.parametrize("augment", [None, Augment(flip=True)])
def test_a_model_that_has_reached_its_goal_is_left_as_it_is(augment, monkeypatch):
    """It sees all rows once, in parts and in evaluation, and nothing else is drawn than their augmentation."""
    monkeypatch.setattr(module, "CHUNK", 8)
    f, rng, drawn = convolution().train(), torch.Generator(), torch.Generator()
    before = {name: t.clone() for name, t in f.state_dict().items()}
    told = []
    f.register_forward_hook(lambda _, of, out: told.append((f.training, torch.is_grad_enabled(), of[0])))
    (x, y), options = images(), {"opt": sgd(0.1), "batch": 4, "epochs": 3, "rng": rng, "augment": augment}
    assert fit(f, scored, (x, y), until=Running(0.0), **options) == Fitted(0, 0, 0.0)
    assert [(*of, len(part)) for *of, part in told] == [(False, False, n) for n in (8, 8, 5)]
    shown = x if augment is None else augment(x, augment.draw(21, drawn))
    assert torch.equal(torch.cat([part for *_, part in told]), shown)
    assert torch.equal(rng.get_state(), drawn.get_state())
    assert all(torch.equal(t, before[name]) for name, t in f.state_dict().items())
    assert f.training


@pytest.mark.parametrize(("goal", "epochs"), [(0.4, 1), (0.6, 3)])
def test_a_running_score_is_a_mean_over_all_rows_of_an_epoch(goal, epochs):
    """Three passes through one row, which is above 1, and one through three that are not: 3 of 6."""
    f, rows, turns = Halves(), (torch.tensor([2.0, 0.5, 0.5, 0.5]),), Turns((1, 3), "step", (3, 1))
    options = {"opt": sgd(0.0), "batch": 3, "epochs": 3, "turns": turns, "rng": torch.Generator()}
    done = fit(f, above_one, rows, until=Running(goal), **options)
    assert (done.epochs, done.steps) == (epochs, 4 * epochs)
    assert done.loss == pytest.approx((3 * 2.0 + 3 * 0.5) / 6)


@pytest.mark.parametrize("training", [False, True])
def test_all_rows_count_before_training_and_the_mode_stays(training):
    """3001 rows come in parts, more than half precision can count; one that is wrong misses a goal of 1."""
    f, rows = Halves().train(training), torch.full((3001,), 3.0)
    ask = {"rng": torch.Generator(), "given": {}, "augment": None}
    assert Running(1.0).reached(f, above_one, (rows,), **ask)
    rows[-1] = 1.0
    assert not Running(1.0).reached(f, above_one, (rows,), **ask)
    assert f.training is training
    with pytest.raises(ContractError, match="two columns"):
        Running(1.0).reached(f, lambda f, x: f(x), (rows,), **ask)
    assert f.training is training


@pytest.mark.parametrize("times", [(2,), (1, 1, 1), (0, 1)])
def test_passes_are_given_for_each_part(times):
    with pytest.raises(ContractError, match=r"Turns\(times=.*each of 2 parts.*Give a number from 1 up"):
        Turns((3, 6), "step", times)


def test_a_running_score_needs_a_loss_with_scores():
    options = {"opt": sgd(0.1), "batch": 8, "epochs": 1, "rng": torch.Generator()}

    def wide(f, x, y):
        return scored(f, x, y)[:, [0, 1, 1]]

    for loss, shape in ((ce, r"\(21,\)"), (wide, r"\(21, 3\)")):
        with pytest.raises(ContractError, match=rf"returned the shape {shape} for 21 rows; .* two columns, \(21, 2\)"):
            fit(model(), loss, rows(), until=Running(0.5), **options)
    with pytest.raises(ContractError, match=r"returned the shape \(8, 2\) for 8 rows; it must give one value per row"):
        fit(model(), scored, rows(), until=lambda f, x, y: True, **options)
    with pytest.raises(ContractError, match=r"does not separate over rows .* has no score of each row"):
        fit(model(), scored, rows(), until=Running(0.5), separable=False, **options)
    for goal in (98, -0.1, float("nan")):
        with pytest.raises(ContractError, match=r"Running\(goal=.*Give a goal in there"):
            Running(goal)
    assert [Running(goal).goal for goal in (0.0, 1.0)] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("planned", "batch", "told"), [({"epochs": 3}, 8, (9, 8)), ({"epochs": 2}, 7, (6, 7)), ({"steps": 5}, 50, (5, 21))]
)
def test_how_many_steps_of_which_size_are_planned(planned, batch, told, monkeypatch):
    """21 rows: three batches of 8 or of 7 an epoch, or one of all."""
    seen = []

    class Gradient:
        def __init__(self, *of):
            seen.append((of[-1], of[-2]))

        def __call__(self, rows):
            pass

    monkeypatch.setattr(module, "_Gradient", Gradient)
    fit(model(), ce, rows(), opt=sgd(0.1), batch=batch, rng=torch.Generator(), **planned)
    assert seen == [told]


def test_a_recorded_step_computes_with_the_batch_and_gives_its_gradients(monkeypatch):
    """Frozen parameters have none. What is computed eagerly gives the gradients of the mean, and adds up the loss."""
    f = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    f[0].requires_grad_(False)
    (x, y), total = rows(), torch.zeros(())
    gradient = module._Gradient(f, ce, f, {}, True, total, usual=6, planned=9)
    gradient([x[:6], y[:6]])
    wanted = torch.autograd.grad(cross_entropy(f(x[:6]), y[:6]), list(f[1].parameters()))
    assert [torch.allclose(p.grad, g) for p, g in zip(f[1].parameters(), wanted, strict=True)] == [True, True]
    assert f[0].weight.grad is None
    assert total.item() == pytest.approx(ce(f, x[:6], y[:6]).sum().item(), rel=1e-5)
    ran = []

    class Recording:
        outputs = (torch.ones(3, 4), torch.zeros(3))

        def __call__(self):
            ran.append([static.clone() for static in mine])

    mine = [torch.zeros(6, 4), torch.zeros(6).long()]
    gradient._records = True
    monkeypatch.setattr(gradient, "_recording", lambda rows: (Recording(), mine))
    gradient([x[6:12], y[6:12]])
    assert torch.equal(ran[0][0], x[6:12])
    assert torch.equal(ran[0][1], y[6:12])
    assert [p.grad.sum().item() for p in f[1].parameters()] == [12.0, 0.0]


def test_a_loss_sees_the_models_parts_by_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0]))

        def encode(self, x):
            return x + self.w

        def classify(self, e):
            return e * 3

        def forward(self, x, *, shift=0):
            return self.classify(self.encode(x)) + shift

    live, one = module.Live(Net()), torch.ones(1)
    assert (live(one, shift=5).item(), live.encode(one).item(), live.classify(one).item()) == (14.0, 3.0, 3.0)
    assert {name: p.item() for name, p in live.params.items()} == {"w": 2.0}
