"""Every step of private training: honest steps pass, and what only their sum would hide is found."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from protected import few_steps
from scipy.stats import chi2, norm
from torch import nn

from fedaudit.epsilon import client_replay, private_steps
from fedaudit.epsilon.client_replay import noise_of, repeat
from fedaudit.epsilon.finished_run import other_conditions
from fedaudit.epsilon.private_steps import MadeStep, MadeTraining, Span, StepWatch, Told, aligned, doubled, sum_of_noise
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.privacy import dpsgd, dpsgd_stack
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.policy import Policy
from fedaudit.progress import unwatched
from fedaudit.runtime import party
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import compute
from fedaudit.training.fit import sgd

REAL_SUM, REAL_DRAWN = dpsgd.clip_and_sum, dpsgd._drawn


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return few_steps(tmp_path_factory.mktemp("steps") / "trained")


@pytest.fixture(scope="module")
def stacked(tmp_path_factory):
    return few_steps(tmp_path_factory.mktemp("steps") / "stacked", engine="stacked")


def test_each_step_of_the_run_is_made_again(trained):
    run = RunFolder(trained)
    with compute(run.world):
        found = repeat(run, 0, unwatched, noise_of)
    steps = sum(e.steps * len(e.rounds) for e in run.record.ledger[0].entries if e.kind == "training")
    assert sum(made.steps for made in found.made) == sum(len(made.found) for made in found.made) == steps
    assert all(made.longest <= 1 + 1e-9 for made in found.made)
    assert all(made.span.dimensions > 20 and made.span.p > 1e-4 and made.span.p_outside > 1e-4 for made in found.made)
    squares = sum(float((z**2).sum()) for made in found.made for step in made.found for z in step.noise.values())
    numbers = sum(z.size for made in found.made for step in made.found for z in step.noise.values())
    assert squares == pytest.approx(numbers, rel=6 * math.sqrt(2 / numbers))
    assert found.exact
    assert not found.lacking


def over_steps(monkeypatch, change):
    from opacus.optimizers import DPOptimizer

    real, planned, at = DPOptimizer.add_noise, dpsgd.planned, {}

    def plan(*args, **more):
        made = planned(*args, **more)
        at.update(step=0, steps=made.steps)
        return made

    def add_noise(self):
        real(self)
        for p in self.params:
            total = p.summed_grad.view_as(p)
            p.grad = total + change(p.grad - total, at["step"], at["steps"])
        at["step"] += 1

    monkeypatch.setattr(DPOptimizer, "add_noise", add_noise)
    monkeypatch.setattr(dpsgd, "planned", plan)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        lambda noise, t, steps: noise * (math.sqrt(steps) if t == steps - 1 else 0.0),
        lambda noise, t, steps: noise * (math.sqrt(2) if t % 2 else 0.0) if steps > 1 else noise,
    ],
)
def test_noise_that_is_right_in_sum_only_is_found(trained, monkeypatch, change):
    over_steps(monkeypatch, change)
    (found,) = audit_residuals(trained)
    assert found.verdict == "refuted"


def test_one_weak_step_is_named(trained, monkeypatch):
    over_steps(monkeypatch, lambda noise, t, steps: noise * (0.9 if t == 1 else 1.0))
    (found,) = audit_residuals(trained, clients=[0])
    assert found.verdict == "refuted"
    assert ", step 1" in found.how or "scale" in found.how


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("fixed", lambda n, q, rng: torch.randperm(n, generator=rng)[: round(q * n)].sort().values),
        pytest.param("all", lambda n, q, rng: torch.arange(n), marks=pytest.mark.long),
        ("twice", lambda n, q, rng: REAL_DRAWN(n, min(1.0, 2 * q), rng)),
    ],
)
def test_records_that_the_key_does_not_draw_are_found(trained, monkeypatch, name, drawn):
    monkeypatch.setattr(dpsgd, "_drawn", drawn)
    (found,) = audit_residuals(trained)
    assert found.verdict == "refuted", name


def per_layer(gradients, C):
    sums, norms = {}, None
    for name, g in gradients.items():
        one, norms = REAL_SUM({name: g}, C)
        sums |= one
    return sums, norms


def whole_batch(gradients, C):
    sums, norms = REAL_SUM(gradients, 1e9)
    size = math.sqrt(sum(float(s.square().sum()) for s in sums.values()))
    return {name: s * min(1.0, C / max(size, 1e-12)) for name, s in sums.items()}, norms


@pytest.mark.parametrize(
    ("clip", "times"), [(per_layer, "1.414"), (whole_batch, "2"), (lambda g, C: REAL_SUM(g, 3 * C), "3")]
)
def test_clipping_by_anything_but_the_record_is_found(trained, monkeypatch, clip, times):
    monkeypatch.setattr(dpsgd, "clip_and_sum", clip)
    (found,) = audit_residuals(trained, clients=[0])
    assert found.verdict == "refuted"
    assert f"a record's gradient has {times} times the clipping norm" in found.how


@pytest.mark.long
def test_what_a_stack_does_is_tested_in_a_stack(stacked, monkeypatch):
    (found,) = audit_residuals(stacked)
    assert found.verdict == "not refuted"
    real = dpsgd_stack._Training._noise
    monkeypatch.setattr(
        dpsgd_stack._Training, "_noise", lambda self, k, sums: {n: 0.95 * z for n, z in real(self, k, sums).items()}
    )
    (found,) = audit_residuals(stacked)
    assert found.verdict == "refuted"
    assert "scale" in found.how


@pytest.mark.long
def test_a_run_that_was_weaker_than_its_code_is_found(tmp_path, monkeypatch):
    with monkeypatch.context() as m:
        over_steps(m, lambda noise, t, steps: 0.5 * noise)
        weak = few_steps(tmp_path / "weak")
    (found,) = audit_residuals(weak)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how
    with monkeypatch.context() as m:
        m.setattr(dpsgd, "clip_and_sum", lambda g, C: REAL_SUM(g, 1e9))
        loose = few_steps(tmp_path / "loose")
    (found,) = audit_residuals(loose)
    assert found.verdict == "refuted"
    assert "is not what this code makes of the run's own key" in found.how
    # Where the run was made with something else, another result is no evidence, and what is other is named.
    from fedaudit.epsilon import finished_run

    monkeypatch.setattr(finished_run, "versions", lambda: {"torch": "1.0", "platform": "elsewhere"})
    (found,) = audit_residuals(loose)
    assert found.verdict == "cannot tell"
    assert "the run was made with" in found.how
    assert "torch" in other_conditions(RunFolder(loose))


def test_what_is_missing_of_noise_has_its_direction():
    rng = torch.Generator().manual_seed(0)
    noise, again, other = (torch.randn(1000, generator=rng).numpy() for _ in range(3))
    cosine, p = aligned(again + 0.1 * noise, again, noise)
    assert cosine == pytest.approx(1)
    assert p < 1e-100
    cosine, p = aligned(again + 0.1 * other, again, noise)
    assert abs(cosine) < 0.2
    assert p > 1e-4


def test_a_span_adds_up():
    span = Span() + Span(10.0, 12, 2.0, 1) + Span(60.0, 12, 4.0, 1)
    assert (span.squares, span.dimensions) == (70.0, 24)
    assert span.p < 1e-5
    assert span.p_outside == pytest.approx(2 * norm.sf(6 / math.sqrt(2)))
    assert Span().p == Span().p_outside == 1


def test_what_cannot_be_made_again_is_named(tmp_path, monkeypatch):
    """What stands for the system's entropy is fixed: of honest noise, the audit refutes one run in a thousand."""
    entropy = SimpleNamespace(urandom=random.Random(0).randbytes)
    monkeypatch.setattr(party, "os", entropy)
    monkeypatch.setattr(client_replay, "os", entropy)
    secure = few_steps(tmp_path / "a", {"secure": True})
    (found,) = audit_residuals(secure)
    assert (
        "single steps were not looked at: its noise and samples came from the operating system's entropy" in found.how
    )
    assert found.verdict == "cannot tell"


def test_everything_that_trains_is_in_double_precision():
    layer = nn.Linear(2, 1)
    found = doubled({"m": layer, "t": (torch.zeros(1), [torch.ones(1, dtype=torch.long)]), "n": 3})
    assert found["m"].weight.dtype == torch.float64
    assert layer.weight.dtype == torch.float32, "the method's own model stays"
    assert type(found["t"]) is tuple
    assert found["t"][0].dtype == torch.float64
    assert found["t"][1][0].dtype == torch.long
    assert found["n"] == 3
    assert type(doubled(OrderedDict(a=torch.zeros(1)))) is OrderedDict


def test_the_audits_own_step_has_the_records_of_the_key_and_the_model_of_that_step():
    """One weight w and the loss (w x)^2 / 2: a record's gradient is w x^2, clipped to 1. Steps without noise are made
    here, each of the records that the key draws, with w as the step before left it: nothing is left beyond them.
    """
    x, key, q, eta = torch.linspace(0.2, 1.4, 12)[:, None], ("a", 1), 0.5, 0.2
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    told = Told(
        model, lambda f, x: (f(x) ** 2 / 2)[:, 0], (x,), {}, sgd(eta), 6, Policy(noise_multiplier=1.0),
        1e-4, key, torch.device("cpu"), 4,
    )  # fmt: skip
    watch = StepWatch(told)
    watch.restart()
    sample = noise_generator(("a",), "sample 1", device=torch.device("cpu"))
    w, sizes = 1.0, []
    for t in range(4):
        drawn = torch.rand(12, generator=sample) < q
        sizes.append(int(drawn.sum()))
        gradient = float((w * x[drawn].double() ** 2).clamp(max=1.0).sum()) / 6
        watch.step({"weight": torch.tensor([[gradient]])}, (t, 4))
        w -= eta * gradient
    assert w < 0.7, "the model moves"
    assert len(set(sizes)) > 1
    assert [step.drawn for step in watch.found] == sizes
    assert max(abs(float(step.noise["weight"].item())) for step in watch.found) < 0.1


def test_the_span_of_gradients_has_as_many_dimensions_as_they_have():
    """The loss w x has the gradient x. Ten records lie in the plane of the first two of five coordinates: the noise's
    part in it is z_1^2 + z_2^2, of two dimensions. Along the sum of the four that were not drawn it is z s / |s|.
    """
    x = torch.zeros(10, 5)
    x[:, :2] = 0.3 * torch.randn(10, 2, generator=torch.Generator().manual_seed(3))
    told = Told(
        nn.Linear(5, 1, bias=False), lambda f, x: f(x)[:, 0], (x,), {}, sgd(0.1), 6, Policy(noise_multiplier=1.0),
        1e-4, ("a", 1), torch.device("cpu"), 4,
    )  # fmt: skip
    watch = StepWatch(told)
    watch.restart()
    z, drawn = torch.tensor([[1.0, -2.0, 7.0, 0.5, 3.0]], dtype=torch.float64), torch.arange(10) < 6
    found = watch._spanned({"weight": z.numpy()}, drawn)
    s = x[6:].double().sum(0)
    assert (found.dimensions, found.steps) == (2, 1)
    assert found.squares == pytest.approx(1 + 4, rel=1e-6)
    assert found.outside == pytest.approx(float(z[0] @ s / s.norm()), rel=1e-6)


def test_the_p_value_of_a_direction_by_hand():
    """A cosine of -0.6 in four dimensions is 1.2 deviations of a random direction's."""
    noise, along = np.array([0.0, 2.0, 0.0, 0.0]), np.array([0.8, -0.6, 0.0, 0.0])
    again = np.array([1.0, 2.0, 3.0, 4.0])
    cosine, p = aligned(again + 5 * along, again, noise)
    assert cosine == pytest.approx(-0.6)
    assert p == pytest.approx(2 * norm.sf(1.2))
    assert aligned(again, again, noise) == (0.0, 1.0)


# --- each part by itself --------------------------------------------------------------------------------------------


def told_of(model=None, rows=None, **facts):
    """Return a training of ten records with the gradient x each, in batches of four, clipped to 1.5."""
    rows = (torch.arange(10.0)[:, None], torch.arange(10)) if rows is None else rows
    values = {"model": model or nn.Linear(1, 1, bias=False), "loss": lambda f, x, *_: f(x)[:, 0], "rows": rows}
    values |= {"given": {}, "opt": sgd(0.1), "batch": 4, "sigma": 0.5, "key": ("a", 1), "steps": 4}
    values |= {"policy": Policy(noise_multiplier=1.0, sensitivity="clip:1.5"), "device": torch.device("cpu")}
    return Told(**{**values, **facts})


def test_what_a_training_was_told():
    told = told_of()
    assert (told.n, told.q, told.C, told.lacks, told.augment, told.people) == (10, 0.4, 1.5, None, None, None)
    assert told_of(rows=(torch.zeros(10, 1), torch.zeros(3))).n == 10
    assert told_of(batch=12).q == 1.0
    assert told_of(policy=Policy(sensitivity="random-pixel")).C == 1.0


def test_why_single_steps_cannot_be_made_again():
    assert "entropy" in told_of(policy=Policy(noise_multiplier=1.0, secure=True)).lacks
    dropout = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    assert "dropout" in told_of(dropout).lacks
    assert told_of(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.0))).lacks is None
    assert "by person" in told_of(people=torch.zeros(10)).lacks


@pytest.mark.parametrize(("steps", "chosen", "spans"), [(4, 4, 4), (16, 16, 6), (40, 16, 6), (13, 13, 6)])
def test_some_of_the_steps_are_made_again_and_fewer_are_spanned(steps, chosen, spans):
    """Sixteen at most; of those every second, up to six, has its span computed."""
    watch = StepWatch(told_of(steps=steps))
    assert len(watch._chosen) == chosen
    assert watch._chosen <= set(range(steps))
    every = sorted(watch._chosen)[:: 2 if chosen > 11 else 1]
    assert sorted(watch._spans) == every[:spans]
    assert sorted(watch._span_rows.tolist()) == list(range(10))
    assert (watch.made, watch.found, watch.wrong, watch.span) == (0, [], "", Span())
    again = StepWatch(told_of(steps=steps))
    assert again._chosen == watch._chosen
    assert again._span_rows.tolist() == watch._span_rows.tolist()


def test_the_choice_of_steps_differs_from_training_to_training():
    """Another number of records is another choice: a fixed one could be evaded."""
    choices = [
        tuple(sorted(StepWatch(told_of(rows=(torch.zeros(n, 1),), steps=40))._chosen)) for n in (8, 9, 10, 11, 12)
    ]
    assert len(set(choices)) == 5


def test_a_restart_forgets_all_that_was_made():
    told = told_of()
    watch = StepWatch(told)
    watch.restart()
    first = told.model.weight.detach().clone()
    watch.step({"weight": torch.tensor([[1.0]])}, (0, 4))
    assert (watch.made, len(watch.found)) == (1, 1)
    assert watch.span.dimensions == 1
    assert watch._model.weight.tolist() == [[pytest.approx(float(first) - 0.1, rel=1e-6)]]
    assert torch.equal(told.model.weight, first)
    noise = watch.found[0].noise["weight"]
    watch.restart()
    assert (watch.made, watch.found, watch.span) == (0, [], Span())
    watch.step({"weight": torch.tensor([[1.0]])}, (0, 4))
    assert watch.found[0].noise["weight"] == pytest.approx(noise), "the sample and the model begin anew"


@pytest.mark.parametrize("rows", [256, 2])
def test_a_look_at_a_step_by_hand(monkeypatch, rows):
    """Records of 1, 2, 3 and -4 are clipped to 1.5: 1 + 1.5 + 1.5 - 1.5 = 2.5. Four are expected: what was sent, 3,
    is 12, so that 9.5 are noise, in units of 1/2. In float32 3 is 2 x 2^-23 from the next number. In two parts, too."""
    monkeypatch.setattr(private_steps, "ROWS", rows)
    watch = StepWatch(told_of())
    watch.restart()
    checked = []
    monkeypatch.setattr(StepWatch, "_check", lambda self, rows, grads: checked.append(rows[0].tolist()))
    watch._spans = {7}
    drawn = torch.arange(10) < 4
    picked = [torch.tensor([[1.0], [2.0], [3.0], [-4.0]]), torch.arange(4)]
    watch._look(7, {"weight": torch.tensor([[3.0]])}, picked, drawn)
    (step,) = watch.found
    assert (step.number, step.drawn) == (7, 4)
    assert step.noise["weight"].tolist() == [[pytest.approx(19.0)]]
    assert step.clean["weight"].tolist() == [[pytest.approx(2.5)]]
    assert step.grain["weight"].tolist() == [[pytest.approx(2 * 4 / 0.5 * 2 * 2**-23)]]
    assert checked == [[[1.0], [2.0], [3.0], [-4.0]][:rows]], "the first part alone is checked"
    assert (watch.span.dimensions, watch.span.steps) == (1, 1)
    assert watch.span.squares == pytest.approx(19.0**2)
    assert watch.span.outside == pytest.approx(19.0)
    watch._look(8, {"weight": torch.tensor([[3.0]])}, picked, drawn)
    assert watch.span.steps == 1, "another step has no span"


def test_an_expected_batch_is_one_record_at_least():
    """A hundred records in batches of less than a half: steps are divided by 1."""
    watch = StepWatch(told_of(rows=(torch.zeros(100, 1),), batch=0.25))
    watch.restart()
    watch._look(0, {"weight": torch.tensor([[3.0]])}, [torch.zeros(0, 1)], torch.zeros(100, dtype=torch.bool))
    assert watch.found[0].noise["weight"].tolist() == [[6.0]]
    assert watch.found[0].drawn == 0


def test_a_step_of_augmented_records_is_made_of_those(monkeypatch):
    """Every record is drawn, and doubled by the augmentation: 2 x 1 each, clipped to 1.5. No span is known of them."""
    asked = []
    monkeypatch.setattr(
        private_steps, "augmented", lambda how, rows, rng: asked.append((how, rng)) or [2 * rows[0], *rows[1:]]
    )
    rows = (torch.ones(10, 1), torch.arange(10))
    watch = StepWatch(told_of(rows=rows, batch=10, augment="twice"))
    watch.restart()
    watch.step({"weight": torch.tensor([[0.0]])}, (0, 4))
    assert watch.found[0].clean["weight"].tolist() == [[pytest.approx(15.0)]]
    assert asked == [("twice", watch._sample)]
    assert watch.span == Span()


def test_a_step_that_is_not_chosen_still_moves_the_model():
    watch = StepWatch(told_of(batch=10))
    watch.restart()
    watch._chosen = {1}
    for t in range(3):
        watch.step({"weight": torch.tensor([[1.0]])}, (t, 4))
    assert [step.number for step in watch.found] == [1]
    assert watch.made == 3
    began = watch.told.model.weight.item()
    assert watch._model.weight.item() == pytest.approx(began - 0.3, rel=1e-5)


class Shifted(nn.Module):
    """A model with a number that is no parameter, and one that is not trained."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[2.0]]))
        self.fixed = nn.Parameter(torch.tensor([[5.0]]), requires_grad=False)
        self.register_buffer("shift", torch.tensor([3.0]))

    def forward(self, x):
        return x @ self.weight


def test_the_exact_model_is_the_run_s_with_all_that_it_has():
    watch = StepWatch(told_of(Shifted()))
    watch.restart()
    assert list(watch._parameters) == ["weight"]
    with torch.no_grad():
        watch._model.shift.fill_(7.0)
        watch._model.fixed.fill_(8.0)
    watch.step({"weight": torch.tensor([[1.0]])}, (0, 4))
    assert (watch._exact.shift.tolist(), watch._exact.fixed.tolist()) == ([7.0], [[8.0]])
    assert watch._exact.weight.dtype == torch.float64
    assert watch._exact.weight.tolist() == [[2.0]]
    assert list(watch.found[0].noise) == ["weight"]


def test_a_span_without_others_or_without_gradients():
    """All were drawn: nothing lies outside. Records of zero have no direction at all."""
    z = {"weight": np.array([[2.0]])}
    watch = StepWatch(told_of())
    watch.restart()
    found = watch._spanned(z, torch.ones(10, dtype=torch.bool))
    assert (found.dimensions, found.outside, found.steps) == (1, 0.0, 0)
    assert found.squares == pytest.approx(4.0)
    small = StepWatch(told_of(rows=(1e-6 * torch.arange(10.0)[:, None], torch.arange(10))))
    small.restart()
    found = small._spanned(z, torch.zeros(10, dtype=torch.bool))
    assert (found.dimensions, found.steps) == (1, 1), "small gradients have a direction as well"
    assert (found.squares, found.outside) == pytest.approx((4.0, 2.0))
    none = StepWatch(told_of(rows=(torch.zeros(10, 1), torch.arange(10))))
    none.restart()
    assert none._spanned(z, torch.zeros(10, dtype=torch.bool)) == Span()


def test_a_gradient_of_exactly_the_clipping_norm_stays():
    """(0.9, 1.2) is 1.5 long and stays; (1.8, 2.4) is halved. The bias has no part in the loss, and no gradient."""
    model = nn.Linear(2, 1)
    told = told_of(
        model, (torch.tensor([[0.9, 1.2], [1.8, 2.4]]),), loss=lambda f, x: (x * f.params["weight"][0]).sum(1), batch=2
    )
    watch = StepWatch(told)
    watch.restart()
    found = watch._clipped([doubled(row) for row in told.rows])
    assert found["weight"].reshape(2, 2).tolist() == [pytest.approx([0.9, 1.2]), pytest.approx([0.9, 1.2])]
    assert found["bias"].flatten().tolist() == [0.0, 0.0]
    assert watch.wrong == ""


def test_a_loss_that_looks_at_other_records_is_named():
    """The gradient of a record alone is 1. Beside one other it is off by what a test says, relative to 2."""
    watch = StepWatch(told_of())
    watch.restart()
    for off, wrong in ((1.5e-6, False), (2.5e-6, True)):
        watch.wrong = ""
        rows = [torch.tensor([[1.0], [3.0]], dtype=torch.float64), torch.arange(2)]
        watch._check(rows, {"weight": torch.tensor([[[1.0 + off]], [[3.0]]], dtype=torch.float64)})
        words = "the gradient of a single record in weight depends on the records beside it"
        assert watch.wrong == (words if wrong else "")
    watch.wrong = ""
    watch._clipped([torch.zeros(0, 1, dtype=torch.float64), torch.arange(0)], check=True)
    assert watch.wrong == "", "no record, no gradient"


def test_a_parameter_without_a_gradient_has_zeros():
    model = nn.Linear(1, 1)
    watch = StepWatch(told_of(model, loss=lambda f, x, *_: (x @ f.params["weight"].T)[:, 0]))
    watch.restart()
    rows = [torch.tensor([[1.0]], dtype=torch.float64), torch.arange(1)]
    fine = {"weight": torch.ones(1, 1, 1, dtype=torch.float64), "bias": torch.zeros(1, 1, dtype=torch.float64)}
    watch._check(rows, fine)
    assert watch.wrong == ""
    watch._check(rows, {**fine, "bias": torch.ones(1, 1, dtype=torch.float64)})
    assert "in bias depends" in watch.wrong


def test_the_noise_of_all_steps_is_their_sum_if_all_were_made():
    def made(steps, *values):
        found = tuple(MadeStep(t, {"w": np.array([[v]]), "b": np.array([[2 * v, 1.0]])}, {}, {}, 3) for t, v in values)
        return MadeTraining(0, 1, 10, 0.5, steps, 0.5, 2.0, found)

    whole = sum_of_noise(made(2, (0, 1.0), (1, 4.0)))
    assert (whole["w"].tolist(), whole["b"].tolist()) == ([[5.0]], [[10.0, 2.0]])
    assert sum_of_noise(made(1, (0, 3.0)))["w"].tolist() == [[3.0]]
    assert sum_of_noise(made(3, (0, 1.0), (1, 4.0))) is None
    assert sum_of_noise(made(0)) is None
    one = made(0)
    assert (one.multiplier, one.longest, one.wrong, one.lacks, one.span) == (4.0, 0.0, "", "", Span())


def test_tensors_become_matrices():
    assert private_steps._array(torch.arange(8.0).reshape(2, 2, 2)).shape == (2, 4)
    assert private_steps._array(torch.arange(3.0)).shape == (1, 3)
    assert private_steps._array(torch.tensor(2.0)).tolist() == [[2.0]]
    assert private_steps._array(torch.arange(3.0)).dtype == np.float64


def test_spans_differ_in_all_that_adds_up():
    one, other = Span(1.0, 2, 3.0, 4), Span(10.0, 20, -30.0, 40)
    assert one + other == Span(11.0, 22, -27.0, 44)
    assert Span() == Span(0.0, 0, 0.0, 0)
    assert (one + other).p == pytest.approx(chi2.sf(11.0, 22))
    assert (one + other).p_outside == pytest.approx(2 * norm.sf(27 / math.sqrt(44)))
