"""What a repeated client is compared by, and which path of a run its noise is compared with."""

from __future__ import annotations

import math
import os
from types import SimpleNamespace

import pytest
import torch
from protected import SMALL, STEPS_OF_FEW, few_steps
from weak_elsewhere import half_the_noise

from fedaudit import run
from fedaudit.epsilon.client_replay import STEP, PrivateFit, apart, clipped_lengths, noise_of, repeat
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.privacy import dpsgd_stack
from fedaudit.privacy.policy import Policy
from fedaudit.progress import unwatched
from fedaudit.runtime.engines import isolated
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.nursery import nursery_of_twins
from fedaudit.runtime.task import compute


def test_the_largest_difference_counts_relative_to_the_largest_number_sent():
    """Differences 1 and 3 in two tensors; the largest number of the other is 12."""
    mine = {"a": torch.tensor([2.0, 4.0]), "b": torch.tensor([[9.0]])}
    other = {"a": torch.tensor([2.0, 5.0]), "b": torch.tensor([[-12.0]])}
    assert apart(mine, other) == pytest.approx(21 / 12)
    other["b"] = torch.tensor([[12.0]])
    assert apart(mine, other) == pytest.approx(3 / 12)
    assert apart(other, mine) == pytest.approx(3 / 9)
    assert apart(mine, mine) == 0.0


def test_differences_from_zeros_are_taken_as_they_are():
    assert apart(torch.tensor([0.5, -2.0]), torch.zeros(2)) == 2.0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2), torch.zeros(3)),
        ([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
        ("text", torch.zeros(1)),
        ({"a": torch.zeros(0)}, {"b": torch.zeros(0)}),
    ],
)
def test_what_differs_in_anything_else_is_infinitely_far(a, b):
    assert apart(a, b) == math.inf


# --- paths other than a single process: each is sabotaged by itself, in the run alone -----------------------------


def trained(folder, spared=0, **how):
    """The run of `few_steps`, by a method whose noise is halved in every process but the one that is spared."""
    values = {**STEPS_OF_FEW["set"], "spared": spared}
    run(method="weak_elsewhere:WeakElsewhere", out=folder, **{**SMALL, **STEPS_OF_FEW, "set": values, **how})
    return folder


def comes_out_again(folder) -> bool:
    """Whether every step that left is made again from the run's key, to the bit."""
    opened = RunFolder(folder)
    with compute(opened.world):
        found = repeat(opened, 0, unwatched, noise_of)
    assert sum(made.steps for made in found.made) == sum(len(made.found) for made in found.made) > 0
    return found.exact


def test_the_process_that_is_spared_is_honest(tmp_path):
    """The control of the sabotage: in this process it does nothing."""
    (found,) = audit_residuals(trained(tmp_path / "here", os.getpid()))
    assert found.verdict == "not refuted"


@pytest.fixture
def warm(monkeypatch):
    """Isolated processes are forks of the process that this session has for twins, which has imported everything."""
    nursery = nursery_of_twins()
    monkeypatch.setattr(nursery, "close", lambda: None)
    monkeypatch.setattr(isolated, "Nursery", lambda *how: nursery)


@pytest.mark.slow
def test_the_noise_of_an_isolated_process_is_its_own(tmp_path, warm):
    assert comes_out_again(trained(tmp_path / "honest", isolate=True))
    weak = trained(tmp_path / "weak", os.getpid(), isolate=True)
    (found,) = audit_residuals(weak)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how


@pytest.mark.slow
def test_the_noise_of_workers_on_ray_is_their_own(tmp_path, ray_engine):
    honest = trained(tmp_path / "honest", engine=ray_engine)
    assert comes_out_again(honest)
    weak = trained(tmp_path / "weak", os.getpid(), engine=ray_engine)
    (found,) = audit_residuals(weak)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how


def test_what_a_worker_sends_back_is_held_against_the_key(tmp_path, monkeypatch):
    """As on Ray, without its processes: a worker runs the task, and what it sends back is what counts."""
    from fedaudit.runtime.engines import serial

    real = serial.SerialEngine.map

    def weak(self, tasks):
        with half_the_noise():
            yield from real(self, tasks)

    with monkeypatch.context() as m:
        m.setattr(serial.SerialEngine, "map", weak)
        folder = few_steps(tmp_path / "weak")
    (found,) = audit_residuals(folder)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how


@pytest.mark.parametrize("step", ["eager", "compiled"])
def test_the_noise_of_a_stack_is_its_own(tmp_path, monkeypatch, step):
    """Private training in a stack has code of its own, whichever step a run asks for. Sabotaged in the run alone."""
    with monkeypatch.context() as m:
        real = dpsgd_stack._Training._noise
        m.setattr(
            dpsgd_stack._Training, "_noise", lambda self, k, sums: {n: 0.5 * z for n, z in real(self, k, sums).items()}
        )
        weak = few_steps(tmp_path / "weak", engine="stacked", step=step)
        alone = few_steps(tmp_path / "alone", engine="serial", step=step)
    (found,) = audit_residuals(weak)
    assert found.verdict == "refuted"
    assert "it does not hold that noise" in found.how
    assert audit_residuals(alone)[0].verdict == "not refuted"
    assert comes_out_again(few_steps(tmp_path / "honest", engine="stacked", step=step))


class ParameterByParameter(PrivateFit):
    """A training that clips each parameter's gradient by itself, which two parameters at once get past."""

    def after(self, multiplier=None):
        params = {name: p.clone().requires_grad_() for name, p in self.start.items()}
        sums = {name: torch.zeros_like(p) for name, p in params.items()}
        for of_record in self.loss(SimpleNamespace(params=params), *self.rows):
            grads = torch.autograd.grad(of_record, list(params.values()), retain_graph=True, allow_unused=True)
            for name, g in zip(params, grads, strict=True):
                if g is not None:
                    sums[name] += g * min(1.0, self.C / max(float(g.norm()), 1e-300))
        return {name: p.detach() - STEP * sums[name] / len(self.rows[0]) for name, p in params.items()}


@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
def test_a_record_along_two_parameters_is_long_in_both(C):
    """Weight and bias are clipped to C each: a record that is long in both moves the sum by sqrt(2) C, for every C."""
    fit = ParameterByParameter(
        0, 1, torch.nn.Linear(2, 1), lambda f, x: x[:, 0], (torch.zeros(4, 2),), {}, 2, 1, None, 2, 1.0,
        Policy(noise_multiplier=1.0, sensitivity=f"clip:{C}"), 1, ("a", 1), torch.device("cpu"),
    )  # fmt: skip
    assert clipped_lengths(fit) == pytest.approx(math.sqrt(2), rel=1e-6)
