"""One epsilon for DP-SGD and noised releases: the derivation of docs/design/privacy.md, step by step, its numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import integrate

from fedaudit import sgd
from fedaudit.privacy import accounting
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.dpsgd import fit_private
from fedaudit.privacy.ledger import ClientLedger, LedgerEntry
from fedaudit.privacy.mechanisms.laplace import LaplaceLoss
from fedaudit.privacy.mechanisms.randomised_response import keeps
from fedaudit.privacy.policy import Policy

DELTA = 1e-5
COARSE = {"value_discretization_interval": 1e-3}  # pessimistic, by far less than the tolerance


def release(mechanism="gaussian", relation="zero-out", m=2.0, **more):
    return LedgerEntry(
        field="M.e", kind="embeddings", mechanism=mechanism, noise_multiplier=m, relation=relation, **more
    )


def trained(q=0.02, m=1.0, steps=100):
    return LedgerEntry(
        field="training", kind="training", mechanism="dp-sgd", noise_multiplier=m, sample_rate=q, steps=steps,
        relation="add-or-remove",
    )  # fmt: skip


def ledger(*entries, rounds=5):
    made = ClientLedger(client=0, n=100, delta=DELTA)
    for t in range(1, rounds + 1):
        for entry in entries:
            made.add(entry, t)
    made.close()
    return made


THEIRS = {
    "gaussian": (release(), lambda: pld.from_gaussian_mechanism(2.0, **COARSE)),
    "laplace": (release("laplace"), lambda: pld.from_laplace_mechanism(2.0, **COARSE)),
    "discrete-gaussian": (
        release("discrete-gaussian", sigma=2.0, grid=1.0, moves=1),
        lambda: pld.from_discrete_gaussian_mechanism(2.0, 1, **COARSE),
    ),
    "randomised-response": (
        release("randomised-response", keep=keeps(0.5, 10)),
        lambda: pld.from_randomized_response((1 - keeps(0.5, 10)) * 10 / 9, 10, **COARSE),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "discrete-gaussian" else []) for name in THEIRS]
)
def test_it_is_that_of_dp_accountings_dominating_pairs(name):
    """500 steps at q = 0.02 and five releases under zero-out, delta = 1e-5. dp-accounting composes the dominating pairs
    of both directions; ours is an upper bound, by at most 0.03."""
    entry, pair = THEIRS[name]
    made = ledger(entry, trained())
    assert set(made.by_relation) == {"zero-out"}
    steps = pld.from_gaussian_mechanism(1.0, sampling_prob=0.02, **COARSE).self_compose(500)
    theirs = steps.compose(pair().self_compose(5)).get_epsilon_for_delta(DELTA)
    assert theirs - 5e-3 <= made.epsilon <= theirs + 0.03
    assert made.by_relation["zero-out"].by_accountant["rdp"] >= made.epsilon
    apart = [steps.get_epsilon_for_delta(DELTA), pair().self_compose(5).get_epsilon_for_delta(DELTA)]
    assert max(apart) < made.epsilon < sum(apart)


def test_replace_one_stays_by_itself():
    made = ledger(release(relation="replace-one"), trained())
    assert made.epsilon is None
    assert set(made.by_relation) == {"replace-one", "add-or-remove"}
    three = ledger(release(relation="replace-one"), release(), trained())
    assert three.epsilon is None
    assert set(three.by_relation) == {"replace-one", "zero-out"}


def test_training_alone_is_accounted_as_ever():
    made = ledger(trained())
    assert set(made.by_relation) == {"add-or-remove"}
    assert made.epsilon == compose([Event(1.0, 0.02, 500)], DELTA).epsilon_of_record
    free = ledger(trained(), release(m=math.inf))
    assert set(free.by_relation) == {"add-or-remove", "zero-out"}
    assert free.epsilon == made.epsilon


def test_what_is_unprotected_stays_infinite():
    assert ledger(trained(), release(), release("none", "any", 0.0)).epsilon == math.inf


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([0.5, -1.0]))

    def forward(self, x):
        return x @ self.w


def stepped(rows, seed):
    """Return the parameters after one step without noise, and whether it drew record 0."""
    model, n = Weighted(), len(rows[0])
    drew = bool((torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.5)[0])
    fit_private(
        model, lambda f, x, on: on * f(x).square(), rows, opt=sgd(0.1), batch=n // 2, epochs=None, steps=1,
        rng=torch.Generator().manual_seed(seed), noise=torch.Generator().manual_seed(0), given=None,
        policy=Policy(noise_multiplier=1e-9, mechanism="dp-sgd"), fits=1,
    )  # fmt: skip
    return model.w.detach(), drew


def test_a_zeroed_record_is_one_that_was_not_drawn():
    """The pair of one step: with the record zeroed (its loss counts 0) the step is the one that leaves it out, whether
    it was drawn or not. n stays, and with it the sampling rate and the divisor, so that the other records' part is the
    same. If it was drawn and is not zeroed, the sum differs by its clipped gradient, over the expected batch of 3."""
    x = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [2.0, 0.5], [0.1, 0.2]])
    seen = set()
    for seed in range(12):
        on = torch.ones(6)
        off = on.clone()
        off[0] = 0
        other = x.clone()
        other[0] = torch.tensor([-9.0, 7.0])
        (here, drew), (zeroed, _), (zeroed_other, _) = (
            stepped(rows, seed) for rows in ((x, on), (x, off), (other, off))
        )
        assert torch.equal(zeroed, zeroed_other), "nothing of a zeroed record is left"
        moved = (here - zeroed).norm()
        assert float(moved) == pytest.approx(0.1 * 1.0 / 3 if drew else 0.0, abs=1e-5)
        seen.add(drew)
    assert seen == {True, False}


def test_the_other_direction_of_a_sampled_step():
    """log Q/P under Q = N(0, 1) with P = (1 - q) Q + q N(1, 1), q = 0.3: its distribution by its definition."""
    of = accounting._Reverse(0.3, 1.0)
    x = np.linspace(-12, 12, 400_001)
    density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    loss = -np.log(0.7 + 0.3 * np.exp(x - 0.5))
    for t in (-1.0, -0.2, 0.0, 0.2, 0.35):
        assert float(of.cdf(t)) == pytest.approx(integrate.trapezoid(density * (loss <= t), x), abs=1e-4)
    assert float(of.cdf(-math.log(0.7) + 1e-9)) == 1.0, "log Q/P is at most -log(1 - q)"


@pytest.mark.parametrize(("q", "sigma", "steps"), [(0.02, 1.0, 200), (0.5, 2.0, 5)])
def test_both_directions_are_dp_accountings(q, sigma, steps):
    history = ((2.0, 1.0, 1), (sigma, q, steps))
    theirs = (
        pld.from_gaussian_mechanism(sigma, sampling_prob=q, **COARSE)
        .self_compose(steps)
        .compose(pld.from_gaussian_mechanism(2.0, **COARSE))
    )
    for reverse, pmf in ((False, theirs._pmf_remove), (True, theirs._pmf_add)):
        accountant = accounting._prv_accountant()()
        accountant.history, accountant.reverse = list(history), reverse
        ours = accountant.get_epsilon(DELTA, eps_error=0.01, delta_error=DELTA / 1000)
        truth = pmf.get_epsilon_for_delta(DELTA)
        assert truth - 5e-3 <= ours <= truth + 0.03


def test_a_loss_beyond_the_grid_is_left_to_the_others():
    """epsilon = 700 of one answer does not fit on the grid; the sum of epsilons still holds."""
    done = compose([Event(1 / 700, 1.0, 1, LaplaceLoss(700.0))], DELTA)
    assert done.accountant == "sum"
    assert done.epsilon_of_record == 700.0
    assert "prv" in done.reason
