"""A clip that follows a quantile of the clients' norms: its steps by hand, its cost, and where it arrives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedaudit.errors import PrivacyError
from fedaudit.privacy.accounting import compose
from fedaudit.privacy.adaptive_clip import moved, update_multiplier, vote, vote_deviation, within
from fedaudit.privacy.policy import parse_policy
from fedaudit.privacy.update_policy import UpdatePolicy, read_updates
from fedaudit.privacy.updates import Guarantee


def test_a_vote_says_on_which_side_the_norm_is():
    """A client that is zeroed out has a vote of 0, so that it moves the sum by a half and not by one."""
    assert [vote(norm, 2.0) for norm in (0.0, 0.1, 2.0, 2.0001)] == [0.0, 0.5, 0.5, -0.5]


def test_the_share_by_hand():
    """Three of four within: the votes sum to 1, so that the share is 1/2 + 1/4."""
    assert within(sum(vote(norm, 1.0) for norm in (0.5, 0.6, 0.7, 2.0)), 4) == 0.75


def test_the_clip_moves_against_the_share():
    """All are within the clip where half should be: it shrinks by exp(-0.2 / 2)."""
    assert moved(3.0, 1.0, 0.5, 0.2) == pytest.approx(3.0 * math.exp(-0.1))
    assert moved(3.0, 0.0, 0.5, 0.2) == pytest.approx(3.0 * math.exp(0.1))
    assert moved(3.0, 0.7, 0.7, 0.2) == 3.0


@pytest.mark.parametrize(("z", "cohort"), [(0.5, 100), (1.0, 5), (4.0, 40), (2.0, 1000)])
def test_updates_and_votes_together_have_the_multiplier(z, cohort):
    """Both as one Gaussian release: the squares of sensitivity over deviation add up, 1 / z_D^2 + (1/2 / sigma_b)^2."""
    sigma_b = vote_deviation(z, cohort)
    assert sigma_b == max(cohort / 20, z)
    z_D = update_multiplier(z, sigma_b)
    assert (1 / z_D) ** 2 + (0.5 / sigma_b) ** 2 == pytest.approx(1 / z**2)
    assert z < z_D <= z * math.sqrt(4 / 3) + 1e-12


def test_a_followed_clip_costs_what_a_fixed_one_does_and_has_more_noise():
    fixed = Guarantee(UpdatePolicy(epsilon=8.0, clip=2.0, delta=1e-3), 100, 10, 0.3, True)
    follows = Guarantee(UpdatePolicy(epsilon=8.0, clip=2.0, delta=1e-3, quantile=0.5), 100, 10, 0.3, True)
    assert fixed.vote_sigma is None
    assert follows.multiplier == fixed.multiplier
    assert follows.epsilon() == fixed.epsilon()
    assert follows.sigma > fixed.sigma
    later = follows.at(0.5)
    assert later.sigma == pytest.approx(follows.sigma / 4)
    assert later.entry("f", "weights").noise_multiplier == fixed.entry("f", "weights").noise_multiplier
    assert (later.entry("f", "weights").clip, later.entry("f", "weights").sensitivity) == (0.5, 0.5)
    rounds = [later.entry("f", "weights").model_copy(update={"rounds": list(range(1, 11))}).events()]
    assert compose(rounds, 1e-3).epsilon_of_record <= 8.0
    assert "vote" in follows.entry("f", "weights").condition
    assert "vote" not in fixed.entry("f", "weights").condition


def test_the_clip_arrives_at_the_quantile():
    """Norms from a log-normal, 200 clients, noised votes: after 60 sums C is near the 0.3 quantile of the norms."""
    rng = np.random.default_rng(0)
    norms = np.exp(rng.normal(1.0, 0.5, 200))
    C = 0.1
    for _ in range(60):
        votes = sum(vote(norm, C) for norm in norms) + rng.normal(0, vote_deviation(1.0, 200))
        C = moved(C, within(votes, 200), 0.3, 0.2)
    assert np.quantile(norms, 0.2) < C < np.quantile(norms, 0.4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantile": 0.0}, "quantile = 0; give a number between 0 and 1"),
        ({"quantile": 1.0}, "quantile = 1; give a number between 0 and 1"),
        ({"quantile": 0.5, "clip_rate": 0.0}, "clip_rate = 0; give a number above 0"),
        ({"quantile": 0.5, "where": "client"}, "only where = 'server' has"),
        ({"quantile": 0.5, "where": "shares"}, "only where = 'server' has"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(PrivacyError, match=words):
        read_updates({"updates": {"epsilon": 8.0, **options}})


def test_the_command_line_and_labels_know_it():
    name, policy = parse_policy("updates:eps=8,clip=1,quantile=0.5,unit=client,where=server")
    assert (name, policy["quantile"]) == ("updates", 0.5)
    assert read_updates({"updates": policy}).text() == "ε=8 per client, clip at the 0.5 quantile, noise by the server"
