"""Clients that are attacked at the same time: inverters and matched gradients as one stack are what they are alone."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

import fedaudit
from fedaudit.attack import attack_run as module
from fedaudit.attack.attack_run import made
from fedaudit.attacks.inversion import _invert, _matching
from fedaudit.attacks.inversion._invert import Inverter, Inverting, descend
from fedaudit.attacks.inversion._matching import Matching, Steps, flat, simulated
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.lockstep import Globals, Turn, join, take_turns
from fedaudit.runtime.task import compute
from fedaudit.training import models
from fedaudit.wire.transcript import Threat


@pytest.fixture
def stacks(monkeypatch):
    """As on a GPU, where a stack is the faster way."""
    monkeypatch.setattr(_invert, "STACKS", {"cpu"})


# --- inverters -------------------------------------------------------------------------------------------------------


def inverting(k: int, **changes: object) -> Inverting:
    """Client k's: 50 records (so that an epoch's last batch is smaller) of an encoder of its own, with noise."""
    torch.manual_seed(k)
    model = Inverter(6, (1, 8, 8), 2).double().train()
    x, encoder = torch.rand(50, 1, 8, 8).double(), torch.randn(64, 6).double()
    rng = torch.Generator().manual_seed(k)

    def draw(index: Tensor) -> tuple[Tensor, Tensor]:
        e = x[index].flatten(1) @ encoder
        return e + torch.randn(e.shape, generator=rng, dtype=e.dtype), x[index]

    given = {"records": 50, "steps": 7, "batch": 16, "lr": 1e-2} | changes
    return Inverting(model, draw, rng=rng, **given)  # type: ignore[arg-type]


def test_inverters_in_a_stack_learn_what_they_learn_alone():
    one_by_one, stacked = ([inverting(k) for k in range(3)] for _ in range(2))
    for job in one_by_one:
        job.alone()
    assert stacked[0].together(stacked[1:]) == [None] * 3
    for alone, together in zip(one_by_one, stacked, strict=True):
        assert not torch.equal(alone.model.layers[2].running_mean, torch.zeros(2).double())
        found = together.model.state_dict()
        for name, value in alone.model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9, msg=name)
        assert torch.equal(alone.rng.get_state(), together.rng.get_state())
    assert not torch.allclose(stacked[0].model.linear[0].weight, stacked[1].model.linear[0].weight)


def test_a_stack_of_one_inverter_is_a_stack():
    job = inverting(0, steps=0)
    before = {name: t.clone() for name, t in job.model.state_dict().items()}
    assert job.together([]) == [None]
    assert all(torch.equal(t, before[name]) for name, t in job.model.state_dict().items())


def test_a_descent_says_how_far_it_is_over_batches_and_restarts():
    """Three images in batches of two, two steps, two restarts: what is done of a restart, in images."""
    told: list[tuple[float, int, str]] = []
    starts = torch.zeros(3, 1, 1, 1)
    descend(
        lambda x, index: x.flatten(1).sum(1), lambda r: starts + r, steps=2, lr=0.1, restarts=2, batch=2,
        tell=lambda *of: told.append(of),
    )  # fmt: skip
    shares = [0, 1 / 3, 2 / 3, 5 / 6]
    assert [share for share, *_ in told] == pytest.approx([*shares, *(1 + share for share in shares)])
    assert [of[1:] for of in told] == [(2, f"step {step} of 2") for step in (0, 1)] * 4


def test_batches_end_with_the_last_step():
    for steps in (0, 1, 3, 4):
        found = itertools.islice(_invert._endless(4, 2, torch.Generator(), steps), 9)
        assert [len(index) for index in found] == [2] * steps


def test_only_inverters_that_are_alike_are_a_stack(stacks):
    first = inverting(0)
    assert first.like(inverting(1))
    assert not any(first.like(inverting(1, **{name: 3})) for name in ("records", "steps", "batch", "lr"))
    assert not first.like("something else")
    other = inverting(1)
    assert not first.like(Inverting(Inverter(7, (1, 8, 8), 2), other.draw, 50, 7, 16, 1e-2, other.rng))


def test_on_a_processor_they_are_trained_one_after_the_other():
    assert not inverting(0).like(inverting(1))


# --- matched gradients -----------------------------------------------------------------------------------------------


def matching(k: int, restarts: int = 2, **changes: object) -> Matching:
    """Client k's update by two steps on three records, in an order of its own."""
    torch.manual_seed(k)
    model = models.build("mlp", shape=(1, 8, 8), classes=4).double().train()
    x, y = torch.rand(3, 1, 8, 8).double() * 2 - 1, one_hot(torch.randint(4, (3,)), 4).double()
    steps = Steps([torch.randperm(3)[:2], torch.randperm(3)[:2]], 0.5)
    wanted = flat(simulated(model, x, y, steps)).detach()
    begin = [torch.randn(3, 1, 8, 8).double().clamp(-1, 1) for _ in range(restarts)]
    given = {"steps": steps, "y": y, "begin": begin, "tv": 1e-3, "lr": 0.05, "iterations": 8} | changes
    return Matching(model, wanted, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [16, 3])
def test_matches_in_a_stack_are_what_they_are_alone(stacks, monkeypatch, most):
    """Two clients with two beginnings each: four in a stack, or three and one; each client's best is its own."""
    together = [matching(k, most=most) for k in range(2)]
    found = together[0].together(together[1:])
    monkeypatch.setattr(_invert, "STACKS", set())
    for k, image in enumerate(found):
        torch.testing.assert_close(image, matching(k).alone(), rtol=1e-6, atol=1e-8)
    assert not torch.allclose(*found)


def test_the_best_of_the_restarts_is_taken():
    """Beginning at the records themselves costs nothing but their total variation: 0.05 a step does not lead away."""
    job = matching(0, restarts=1)
    torch.manual_seed(0)
    models.build("mlp", shape=(1, 8, 8), classes=4)
    records = torch.rand(3, 1, 8, 8).double() * 2 - 1
    starts = [torch.zeros_like(records), records, -records]
    several = matching(0, begin=starts, lr=1e-6, tv=0.0, iterations=2)
    assert (several.alone() - records).abs().max() < 1e-3
    assert (matching(0, begin=starts[::-1], lr=1e-6, tv=0.0, iterations=2).alone() - records).abs().max() < 1e-3
    assert job.alone().shape == records.shape


def test_the_best_of_the_trials_goes_on(monkeypatch):
    """Three starts are tried for 5 of 20 steps. The one with the least loss after them alone makes the other 15."""
    made = []
    real = Matching._descend

    def listen(self, jobs, begin, rates, done, of):
        found = real(self, jobs, begin, rates, done, of)
        made.append((rates.steps, begin[0].clone(), *found[0]))
        return found

    monkeypatch.setattr(Matching, "_descend", listen)
    found = matching(0, restarts=3, iterations=20, trial=5).alone()
    assert [steps for steps, *_ in made] == [5, 5, 5, 15]
    least = min(made[:3], key=lambda one: one[3])
    assert len({loss for *_, loss in made[:3]}) == 3
    assert torch.equal(made[3][1], least[2]), "it goes on where it was"
    assert torch.equal(found, made[3][2])
    made.clear()
    matching(0, restarts=1, iterations=20, trial=5).alone()
    assert [steps for steps, *_ in made] == [20], "one start has no rival"


def test_a_rate_falls_on_a_plateau_and_the_search_ends_after_the_last(monkeypatch):
    """Losses that fall by 2 % in each block go the whole way, with the falls where they are. A loss that stands still
    from the first step on has a tenth of its rate after five blocks (the first one is a gain) and after each four more.
    """
    monkeypatch.setattr(_matching, "PATIENCE", 4)
    rates = _matching.Rates(2, 1.0, 800, [300, 500, 700])
    seen = []
    for step in range(800):
        seen.append(rates.now(torch.zeros(2, 1)).flatten().tolist())
        if rates.after(torch.tensor([0.98 ** (step // _matching.BLOCK), 1.0])):
            break
    assert len(seen) == 800
    falls = [[i for i in range(1, 800) if seen[i][k] < seen[i - 1][k]] for k in range(2)]
    assert falls[0] == [300, 500, 700]
    block = _matching.BLOCK
    assert falls[1] == [5 * block, 9 * block, 13 * block, 17 * block]
    assert seen[-1][0] == pytest.approx(1e-3)
    assert seen[-1][1] == 0.0, "it rests while the other goes on"
    alone = _matching.Rates(1, 1.0, 800, [300, 500, 700])
    assert next(step for step in range(800) if alone.after(torch.ones(1))) == 17 * block - 1


def test_matches_in_a_stack_end_each_by_itself(stacks, monkeypatch):
    """With blocks of 2 steps, plateaus come at other steps for each: the images are what they are alone."""
    for name, value in (("BLOCK", 2), ("PATIENCE", 1), ("GAIN", 0.2)):
        monkeypatch.setattr(_matching, name, value)
    together = [matching(k, iterations=40, lr=0.3) for k in range(2)]
    found = together[0].together(together[1:])
    monkeypatch.setattr(_invert, "STACKS", set())
    told = []
    for k, image in enumerate(found):
        alone = matching(k, iterations=40, lr=0.3, tell=lambda done, of, what: told.append(what)).alone()
        torch.testing.assert_close(image, alone, rtol=1e-6, atol=1e-8)
    assert len(told) < 4 * 40, "they end sooner"


@pytest.mark.parametrize(("allowed", "steps"), [(1e18, 2000), (1.0, 200), (None, 700)])
def test_steps_are_as_many_as_their_operations_allow(monkeypatch, allowed, steps):
    """A linear model of 16 pixels and 4 classes, one step on 3 images. Forward and the two gradients of its weight are
    products of 3 x 16 x 4 numbers, and so are their derivatives: a few times 2 * 192 operations.
    """
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 4))
    once = Steps([torch.arange(3)], 0.1)
    if allowed is None:
        monkeypatch.setattr(_matching, "WORK", {"cpu": 1e6})
        monkeypatch.setattr(_matching, "MOST", 10**9)
        whole = _matching.forecast(model, torch.zeros(3, 1, 4, 4), 4, once)
        assert 3 <= 1e6 / whole / 384 <= 8
        twice = _matching.forecast(model, torch.zeros(3, 1, 4, 4), 4, Steps(once.plan * 2, 0.1))
        assert twice < 0.7 * whole, "a longer training is simulated at a higher price"
        return
    monkeypatch.setattr(_matching, "WORK", {"cpu": allowed})
    assert _matching.forecast(model, torch.zeros(3, 1, 4, 4), 4, once) == steps


def test_only_matches_that_are_alike_are_a_stack(stacks):
    first = matching(0)
    assert first.like(matching(1, restarts=5))
    for changes in ({"tv": 0.5}, {"lr": 0.5}, {"iterations": 9}, {"trial": 3}, {"steps": Steps(first.steps.plan, 0.1)}):
        assert not first.like(matching(1, **changes))
    assert not first.like(matching(1, steps=Steps(first.steps.plan[:1], 0.5)))


def test_stacked_steps_are_each_models_own(stacks):
    """Row s of the stacked updates is what model s's own steps give, batch norms included."""
    nets = [models.build("cnn", shape=(1, 8, 8), classes=4).double().train() for _ in range(2)]
    x, y = torch.rand(2, 3, 1, 8, 8).double(), torch.rand(2, 3, 4).double().softmax(2)
    orders = [[torch.tensor([0, 2]), torch.tensor([1, 0])], [torch.tensor([2, 1]), torch.tensor([0, 1])]]
    plan = [torch.stack(step) for step in zip(*orders, strict=True)]
    stacked = _matching.Models.of(nets, torch.float64).simulated(x, y, plan, 0.3)
    for s in range(2):
        torch.testing.assert_close(stacked[s], flat(simulated(nets[s], x[s], y[s], Steps(orders[s], 0.3))))


# --- taking turns ----------------------------------------------------------------------------------------------------


class Work:
    def __init__(self, value: int, fails: bool = False):
        self.value, self.fails, self.how = value, fails, ""

    def alone(self) -> int:
        self.how = "alone"
        return self.value

    def like(self, other: object) -> bool:
        return isinstance(other, Work) and other.value % 2 == self.value % 2

    def together(self, others: list[Work]) -> list[int]:
        if self.fails:
            raise RuntimeError("too large")
        for work in (self, *others):
            work.how = "together"
        return [work.value for work in (self, *others)]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_alike_is_joined_and_each_gets_its_own(fails):
    works = [Work(value, fails) for value in (1, 2, 3, 5)]
    turns = [Turn(lambda w=w: (join(w), join(w)), Globals(torch.device("cpu"))) for w in works]
    take_turns(turns)
    assert [turn.result for turn in turns] == [(1, 1), (2, 2), (3, 3), (5, 5)]
    assert [work.how for work in works] == ["alone" if fails or w.value == 2 else "together" for w in works]
    assert [bool(turn.alone) for turn in turns] == [fails and w.value != 2 for w in works]
    assert join(Work(7)) == 7, "outside of any turn"


# --- on runs ---------------------------------------------------------------------------------------------------------


DATA = {"dataset": "digits", "clients": 3, "partition": "iid", "rounds": 1, "model": "mlp", "eval_clients": False}
DATA |= {"aux": 0.6}


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "dffke"
    quick = {"tau": "off", "E_local": 1, "B": 32, "h": 4, "T_Tran": 0, "T_Dec": 0, "T_FKE": 0, "w_Dec": 1, "R": 1}
    fedaudit.run(method="dffke", set=quick, out=folder, **DATA)
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "fedavg"
    fedaudit.run(method="fedavg", set={"E": 1, "B": 64, "eta": 0.1}, out=folder, **DATA)
    return folder


def claims_of(monkeypatch, folder, spec):
    """What an attack claimed of each client, and what was told on the way; without the blind baselines."""
    told: list[str] = []
    found = []
    real = module._claims

    def listen(attack, name, scenes):
        claims = real(attack, name, scenes)
        found.extend(claims)
        return claims

    opened = RunFolder(folder)
    name, attack = made(spec)
    with monkeypatch.context() as m, compute(opened.world):
        m.setattr(module, "_claims", listen)
        watch = lambda done, whole, what: told.append(what)  # noqa: E731
        module._one(attack, name, opened, opened.world, Threat.parse("server"), None, watch)
    return [claims.images for claims in found], told


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "spec", "words"),
    [
        ("embedded", {"attack": "decoder", "steps": 3, "width": 2}, "inverters of 3 clients, step 0 of 3"),
        ("weights", {"attack": "gradient_match", "steps": 2, "restarts": 2, "most": 2}, "step 0 of 2"),
    ],
)
def test_an_attack_on_all_clients_at_once(run, spec, words, request, monkeypatch):
    folder = request.getfixturevalue(run)
    alone, _ = claims_of(monkeypatch, folder, spec)
    monkeypatch.setattr(_invert, "STACKS", {"cpu"})
    together, told = claims_of(monkeypatch, folder, spec)
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert (alone[0][:2] - alone[1][:2]).abs().mean() > 0.01
    assert any(words in line for line in told)


# --- a search by itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signed", [False, True])
def test_the_step_of_a_descent_falls_three_times(signed):
    """A loss with the same slope everywhere: Adam goes one step each time. Of 8 steps of 0.1 three are whole, two are a
    tenth, two a hundredth and one a thousandth: 0.3221. The second batch has one image."""
    start = torch.tensor([0.5, 0.0, -0.25], dtype=torch.float64).reshape(3, 1, 1, 1)
    told = []
    found, _ = descend(
        lambda x, index: x.flatten(1).sum(1) * (3 + index), lambda r: start, steps=8, lr=0.1, batch=2, signed=signed,
        tell=lambda done, of, what: told.append(done),
    )  # fmt: skip
    assert (start - found).flatten().tolist() == pytest.approx([0.3221] * 3, abs=1e-6)
    assert told == pytest.approx([2 * step / 8 / 3 for step in range(8)] + [(2 + step / 8) / 3 for step in range(8)])


def test_the_steps_of_a_match_by_hand():
    """So small a rate that no sign of the gradient turns: each of 8 steps is one rate long, which falls as above."""
    begin = [0.5 * torch.randn(3, 1, 8, 8).double().clamp(-1, 1)]
    found = matching(0, begin=begin, lr=1e-6, tv=0.1, iterations=8).alone()
    moved = (found - begin[0]).abs().flatten()
    assert float(moved.quantile(0.1)) == pytest.approx(3.221e-6, rel=1e-3)
    assert float(moved.max()) == pytest.approx(3.221e-6, rel=1e-3)
