"""Every step of private training: honest steps pass, and what only their sum would hide is found."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
import pytest
import torch
from protected import few_steps
from scipy.stats import norm
from torch import nn

from fedaudit.epsilon.client_replay import noise_of, repeat
from fedaudit.epsilon.finished_run import other_conditions
from fedaudit.epsilon.private_steps import Span, StepWatch, Told, aligned, doubled
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.privacy import dpsgd, dpsgd_stack
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.policy import Policy
from fedaudit.progress import unwatched
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


def test_what_cannot_be_made_again_is_named(tmp_path):
    secure = few_steps(tmp_path / "a", {"secure": True})
    (found,) = audit_residuals(secure)
    assert (
        "single steps were not looked at: its noise and samples came from the operating system's entropy" in found.how
    )
    assert found.verdict in ("not refuted", "cannot tell")


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
