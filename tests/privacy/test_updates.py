"""Guarantees for clients: epsilon as an independent accountant has it, and the policy's options."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from fedaudit.errors import PrivacyError
from fedaudit.privacy import updates
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.policy import parse_policy
from fedaudit.privacy.update_policy import UpdatePolicy, read_updates
from fedaudit.privacy.updates import FINE, Guarantee, skellam_epsilon

SETTINGS = [  # where, multiplier, clients, rounds, rate, poisson
    ("server", 0.7, 100, 10, 1.0, False),
    ("server", 1.5, 100, 50, 0.1, False),
    ("client", 4.0, 20, 5, 0.5, True),
    ("client", 0.5, 1000, 1, 1.0, False),
    ("server", 12.0, 1000, 300, 1.0, True),
    ("server", 1.0, 1000, 100, 0.01, True),
    ("server", 0.8, 100, 30, 0.2, True),
    ("server", 2.0, 10_000, 500, 0.05, True),
    ("server", 3.0, 500, 20, 0.05, True),
    ("server", 4.0, 2000, 100, 0.02, True),
]


@pytest.mark.parametrize(("where", "z", "clients", "rounds", "rate", "poisson"), SETTINGS)
def test_epsilon_is_dp_accounting_s(where, z, clients, rounds, rate, poisson):
    """Without sampling: the exact Gaussian of dp-accounting's PLD. By Poisson: its RDP accountant on our orders.

    The best order is a whole one in these settings. At others its series is cut off early and lies up to 1e-4 above.
    """
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_mechanism
    from dp_accounting.rdp import RdpAccountant

    policy = UpdatePolicy(where=where, noise_multiplier=z, clip=1.0, delta=1 / clients**1.1)
    guarantee = Guarantee(policy, clients, rounds, rate, poisson)
    entry = guarantee.entry("Local (update)", "weights").model_copy(update={"rounds": list(range(1, rounds + 1))})
    found = compose([entry.events()], guarantee.delta)
    if not (poisson and rate < 1 and where == "server"):
        loss = privacy_loss_mechanism.GaussianPrivacyLoss(z / math.sqrt(rounds), sensitivity=1.0)
        assert loss.get_delta_for_epsilon(found.epsilon_of_record) == pytest.approx(guarantee.delta, rel=1e-6)
        assert guarantee.epsilon() == pytest.approx(found.epsilon_of_record, abs=1e-9)
        return
    assert entry.sample_rate == rate
    defaults = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
    orders = [1.01, 1.02, 1.05, *defaults, 64, 80, 96, 128, 192, 256, 384, 512, 768, 1024]
    theirs = RdpAccountant(orders)
    theirs.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), rounds)
    assert found.by_accountant["rdp"] == pytest.approx(theirs.get_epsilon(guarantee.delta), abs=1e-6)
    assert found.epsilon_of_record <= found.by_accountant["rdp"] + 0.02


@pytest.mark.parametrize(
    ("where", "rate", "poisson", "amplified"),
    [
        ("server", 0.1, True, True),
        ("server", 0.1, False, False),  # a fixed size
        ("server", 1.0, True, False),
        ("client", 0.1, True, False),  # the server knows the cohort
        ("shares", 0.1, True, False),
    ],
)
def test_amplification_is_claimed_only_where_it_holds(where, rate, poisson, amplified):
    policy = UpdatePolicy(where=where, epsilon=8.0, delta=1e-4)
    guarantee = Guarantee(policy, 1000, 50, rate, poisson)
    assert guarantee.amplified is amplified
    assert guarantee.entry("x", "weights", 1e-4).sample_rate == (rate if amplified else 1.0)
    assert ("without amplification" in guarantee.condition()) == (not amplified and rate < 1)


@pytest.mark.parametrize("where", ["server", "shares", "client"])
@pytest.mark.parametrize(("epsilon", "rounds", "rate"), [(2.0, 30, 0.1), (8.0, 100, 1.0)])
def test_the_noise_meets_epsilon_and_little_less_would_not(where, epsilon, rounds, rate):
    guarantee = Guarantee(UpdatePolicy(where=where, epsilon=epsilon, delta=1e-4), 1000, rounds, rate, True)
    assert guarantee.epsilon() <= epsilon * (1 + 1e-9)
    less = Guarantee(
        UpdatePolicy(where=where, noise_multiplier=0.97 * guarantee.multiplier, delta=1e-4), 1000, rounds, rate, True
    )
    assert less.epsilon() > epsilon


def test_skellam_s_bound_by_hand_and_above_the_truth():
    """One release, shift 256 steps / m, sigma = 256 steps: the divergence at order 2 by summing p^2 / q over the grid.

    By hand at order a = 2, m = 1: 2 / 2 + 9 / (4 * 65536) = 1.0000343. Exactly, log sum p(k)^2 / p(k - v).
    """
    from scipy.special import ive

    k = np.arange(-5000, 5001)
    p = ive(np.abs(k), 256.0**2)
    v = 256
    exact = math.log(float((p[v:] ** 2 / p[:-v]).sum()))
    assert 0.99 < exact <= 2 / 2 + 9 / (4 * FINE**2)
    both = skellam_epsilon(1.0, 3, 1e-5)
    gaussian = compose([Event(1.0, 1.0, 3)], 1e-5).by_accountant["rdp"]
    assert gaussian < both + 1e-3
    assert both < gaussian + 0.15  # whole orders only


def test_the_command_line_s_words():
    kind, values = parse_policy("updates:eps=8,clip=0.5,unit=client,where=shares,delta=1e-5,secure")
    assert kind == "updates"
    policy = read_updates({kind: values})
    assert policy == UpdatePolicy(epsilon=8, clip=0.5, where="shares", delta=1e-5, secure=True)
    assert policy.text() == "ε=8 per client, clip 0.5, noise in shares"
    assert read_updates({}) is None
    with pytest.raises(PrivacyError, match=r"unknown option .wher=server.*where"):
        parse_policy("updates:eps=8,wher=server")


def test_delta_is_one_in_the_number_of_clients():
    assert UpdatePolicy(epsilon=1).delta_for(200) == 1 / 200
    assert UpdatePolicy(epsilon=1, delta=1e-6).delta_for(200) == 1e-6


def test_what_a_round_costs_a_client_by_hand():
    """Five clients, four rounds, half of them in a cohort. A clip of 2 and noise of 3 clips: a deviation of 6. Where
    the clip follows a quantile, the votes have max(2.5 / 20, 3) = 3, and the updates (1/9 - 1/36)^(-1/2) clips."""
    policy = UpdatePolicy(where="server", noise_multiplier=3.0, clip=2.0, delta=1e-3)
    plain = Guarantee(policy, 5, 4, 0.5, True)
    assert (plain.delta, plain.multiplier, plain.vote_sigma, plain.sigma) == (1e-3, 3.0, None, 6.0)
    assert plain.entry("F.u", "weights") == LedgerEntry(
        field="F.u", kind="weights", mechanism="gaussian", noise_multiplier=3.0, relation="zero-out", sample_rate=0.5,
        sigma=6.0, sensitivity=2.0, clip=2.0, delta=1e-3, unit="client", to="peers, outsiders",
        condition="for who does not know the cohort, each client drawn with probability 0.5",
    )  # fmt: skip
    voted = Guarantee(policy.model_copy(update={"quantile": 0.5}), 5, 4, 0.5, True)
    assert voted.vote_sigma == 3.0
    assert voted.sigma == pytest.approx(2 * (1 / 9 - 1 / 36) ** -0.5)
    assert voted.entry("F.u", "weights").sigma == 6.0, "the bill is for update and vote together"
    assert voted.condition().startswith("update and vote on the clip together; for who")
    many = Guarantee(policy.model_copy(update={"quantile": 0.5}), 400, 4, 0.5, True)
    assert many.vote_sigma == 10.0
    other = voted.at(0.25)
    assert (other.policy.clip, other.multiplier, other.sigma) == (0.25, 3.0, pytest.approx(voted.sigma / 8))


@pytest.mark.parametrize(
    ("where", "rate", "poisson", "condition", "mechanism", "to"),
    [
        ("server", 1.0, True, "every client takes part", "gaussian", "peers, outsiders"),
        ("server", 0.5, False, "without amplification: the cohort has a fixed size", "gaussian", "peers, outsiders"),
        ("client", 0.5, True, "without amplification: the server knows the cohort", "gaussian",
         "server, peers, outsiders"),
        ("shares", 1.0, False, "every client takes part", "skellam", "server, peers, outsiders"),
    ],
)  # fmt: skip
def test_against_whom_a_guarantee_holds(where, rate, poisson, condition, mechanism, to):
    policy = UpdatePolicy(where=where, noise_multiplier=3.0, clip=2.0)
    entry = Guarantee(policy, 5, 4, rate, poisson).entry("F.u", "weights", 0.125)
    assert (entry.condition, entry.mechanism, entry.to) == (condition, mechanism, to)
    assert (entry.sample_rate, entry.grid, entry.delta, entry.claim) == (1.0, 0.125, 0.2, None)


def test_the_noise_that_is_asked_for_by_each_way(monkeypatch):
    """A run of no rounds is calibrated for one. Three ways: discrete, by Poisson samples, and in the closed form."""
    asked = []
    for name in ("_skellam_multiplier", "multiplier_for", "total"):
        monkeypatch.setattr(updates, name, lambda *how, name=name: asked.append((name, *how)) or 1.0)
    for where, rounds, rate in (("shares", 7, 0.5), ("server", 0, 0.5), ("server", 0, 1.0), ("client", 7, 0.5),
                                ("shares", 0, 0.5), ("server", 7, 0.5)):  # fmt: skip
        policy = UpdatePolicy(where=where, epsilon=2.0, delta=1e-3)
        assert Guarantee(policy, 5, rounds, rate, True).multiplier == 1.0
    assert asked == [
        ("_skellam_multiplier", 2.0, 1e-3, 7), ("multiplier_for", 2.0, 1e-3, 0.5, 1), ("total", 2.0, 1e-3, 1.0, 1),
        ("total", 2.0, 1e-3, 1.0, 7), ("_skellam_multiplier", 2.0, 1e-3, 1), ("multiplier_for", 2.0, 1e-3, 0.5, 7),
    ]  # fmt: skip


def test_what_all_rounds_cost_by_each_way(monkeypatch):
    asked = []
    answer = SimpleNamespace(epsilon_of_record=1.5)
    monkeypatch.setattr(
        updates, "compose", lambda events, delta, compare: asked.append((events, delta, compare)) or answer
    )
    monkeypatch.setattr(updates, "skellam_epsilon", lambda *how: asked.append(how) or 2.5)
    for where, rate, found in (("server", 0.5, 1.5), ("client", 0.5, 1.5), ("shares", 0.5, 2.5)):
        policy = UpdatePolicy(where=where, noise_multiplier=3.0, delta=1e-3)
        assert Guarantee(policy, 5, 7, rate, True).epsilon() == found
    assert asked == [([Event(3.0, 0.5, 7)], 1e-3, False), ([Event(3.0, 1.0, 7)], 1e-3, False), (3.0, 7, 1e-3)]


@pytest.mark.parametrize("rounds", [1, 9])
def test_the_epsilon_of_discrete_noise_by_the_formula(rounds):
    """The best whole order, by hand. Much noise costs nothing, and not less."""

    def at(a):
        divergence = rounds * (a / (2 * 4) + (2 * a + 5) / (4 * 4 * 256**2))
        return divergence + math.log(1 - 1 / a) - (math.log(1e-3) + math.log(a)) / (a - 1)

    assert skellam_epsilon(2.0, rounds, 1e-3) == pytest.approx(min(at(a) for a in range(2, 2049)))
    assert skellam_epsilon(1e6, rounds, 0.5) == 0.0


@pytest.mark.parametrize(("epsilon", "rounds"), [(0.5, 3), (60.0, 1)])
def test_no_less_discrete_noise_than_is_calibrated_meets_epsilon(epsilon, rounds):
    m = updates._skellam_multiplier.__wrapped__(epsilon, 1e-3, rounds)
    assert skellam_epsilon(m, rounds, 1e-3) <= epsilon < skellam_epsilon(m * (1 - 1.01e-6), rounds, 1e-3)


def test_an_epsilon_that_no_discrete_noise_meets_is_refused():
    with pytest.raises(PrivacyError, match="No noise makes 3 rounds meet"):
        updates._skellam_multiplier(1e-6, 1e-9, 3)
