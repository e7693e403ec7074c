"""What all mechanisms that add noise share: options, entries that follow from a policy, counted releases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from noised import Counts, Many, Rows, context

from fedaudit.errors import PrivacyError
from fedaudit.privacy.calibration import analytic
from fedaudit.privacy.mechanism import protect
from fedaudit.privacy.mechanisms.additive import as_matrix, check_sensitivity, counted, moves_of
from fedaudit.privacy.mechanisms.base import choices, mechanism_named, mechanisms, span
from fedaudit.privacy.policy import Policy
from fedaudit.wire.release import Protection

GAUSSIAN = mechanism_named("gaussian")


@pytest.mark.parametrize(
    ("kind", "sensitivity", "assume", "words"),
    [
        ("logits", "random-pixel:10", "logits-of-records", None),
        ("logits", "clip:1", "logits-of-records", "only for the random-pixel sensitivity of logits"),
        ("embeddings", "random-pixel:10", "logits-of-records", "only for the random-pixel sensitivity of logits"),
        ("embeddings", "random-pixel:10", "nothing", None),
        ("embeddings", "random-pixel:1.5", "nothing", "give a whole number of edits"),
        ("embeddings", "clip:1.5", "nothing", None),
        ("embeddings", "clip", "nothing", None),
        ("embeddings", "clip:0", "nothing", "give a number above 0"),
        ("embeddings", "clip:-1", "nothing", "give a number above 0"),
        ("embeddings", "clip:inf", "nothing", "give a number above 0"),
        ("embeddings", "clip:one", "nothing", "give a number above 0"),
        ("embeddings", "clap:1", "nothing", "Did you mean 'clip'"),
    ],
)
def test_sensitivities_that_can_be_read(kind, sensitivity, assume, words):
    policy = Policy(epsilon=1.0, sensitivity=sensitivity, assume=assume)
    if words is None:
        check_sensitivity("x", kind, policy)
        return
    with pytest.raises(PrivacyError, match=words):
        check_sensitivity("x", kind, policy)


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_an_entry_follows_from_its_policy(relation):
    """epsilon = 1 and clipping to 3: noise of `analytic` for one release, and sqrt(5) times of it for five."""
    made = context(embeddings={"epsilon": 1.0, "delta": 1e-5, "sensitivity": "clip:3", "relation": relation})
    policy = made.policies["embeddings"]
    entry = protect(Rows(torch.randn(4, 2)), made)[2][0]
    once = GAUSSIAN.follows(entry, policy, 1000, 10, 1)
    assert {name: getattr(entry, name) for name in once} == pytest.approx(once)
    assert once["noise_multiplier"] == pytest.approx(analytic(1.0, 1e-5, 1.0))
    assert once["sigma"] == pytest.approx(analytic(1.0, 1e-5, 1.0) * (6 if relation == "replace-one" else 3))
    total = policy.model_copy(update={"calibration": "total"})
    assert GAUSSIAN.follows(entry, total, 1000, 10, 5)["noise_multiplier"] == pytest.approx(
        analytic(1.0, 1e-5, 1.0) * math.sqrt(5)
    )
    assert "noise_multiplier" not in GAUSSIAN.follows(entry, policy, 1000, 10, None)
    named = policy.model_copy(update={"epsilon": None, "noise_multiplier": 7.0})
    assert GAUSSIAN.follows(entry, named, 1000, 10, None)["noise_multiplier"] == 7.0
    bare = entry.model_copy(update={"clip": None, "sigma": None})
    assert not {"clip", "sigma"} & GAUSSIAN.follows(bare, policy, 1000, 10, 1).keys()


def test_releases_that_share_an_epsilon_are_counted():
    rows = Rows.declared()["e"]
    made = context(embeddings={"epsilon": 1.0})
    policy = made.policies["embeddings"]
    assert [counted(policy, rows, "x", made) for _ in range(9)] == [1] * 9
    assert made.spent == {}
    total = policy.model_copy(update={"calibration": "total"})
    assert [counted(total, rows, "x", made) for _ in range(5)] == [5] * 5, "as many as the method declares"
    assert made.spent == {"embeddings": 5}
    with pytest.raises(PrivacyError, match="planned 5 releases of embeddings, and this is number 6"):
        counted(total, rows, "x", made)
    assert counted(total.model_copy(update={"releases": 9}), rows, "x", made) == 9
    made.releases = lambda kind: None
    with pytest.raises(PrivacyError, match="does not declare its traffic"):
        counted(total, rows, "x", made)


def test_counts_that_one_record_may_change():
    """L2: sqrt(2) squared; L1: 2 itself. Rows are no counts."""
    counts, rows = Counts.declared()["n"], Many.declared()["z"]
    assert moves_of(counts, [1.0, math.sqrt(2)], 2) == 2
    assert moves_of(counts, [2.0], 1) == 2
    assert moves_of(counts, [], 2) == 1
    assert moves_of(rows, [3.0], 2) is None


def test_the_smallest_class_is_told_by_the_noise():
    """C = 3, two classes of N_c - 1 = 10: sensitivity sqrt(2) 2 C / 10 under replace-one, half of it under zero-out."""
    told = Protection(mechanism="gaussian", clip=3.0, sensitivity=math.sqrt(2) * 6 / 10, relation="replace-one")
    assert GAUSSIAN.smallest_class(told) == pytest.approx(10)
    assert GAUSSIAN.smallest_class(told.model_copy(update={"relation": "zero-out"})) == pytest.approx(5)
    assert mechanism_named("laplace").smallest_class(told) == pytest.approx(10 * math.sqrt(2))
    for gone in ("clip", "sensitivity"):
        assert GAUSSIAN.smallest_class(told.model_copy(update={gone: None})) is None


def test_rows_of_residuals():
    assert as_matrix(np.zeros(6)).shape == (1, 6)
    assert as_matrix(np.zeros((2, 3))).shape == (2, 3)
    assert as_matrix(np.zeros((2, 3, 4))).shape == (2, 12)


def test_what_each_mechanism_is_for():
    """Which may be named in a policy, train, protect persons, are normal, and can be looked at after rounding."""
    every = mechanisms()

    def those(fact):
        return {name for name, how in every.items() if getattr(how, fact)}

    assert those("trains") == {"dp-sgd"}
    assert choices(trains=True) == ["dp-sgd"]
    assert "dp-sgd" not in choices(trains=False)
    assert set(choices()) == those("chosen")
    assert {"gaussian", "laplace", "skellam", "discrete-gaussian", "randomised-response", "pure-noise"} <= set(
        choices()
    )
    assert not {"none", "post-processing"} & set(choices())
    assert those("normal") >= {"gaussian"}
    assert not those("normal") & {"laplace", "skellam", "discrete-gaussian", "randomised-response"}
    assert those("rounds") >= {"gaussian", "pure-noise"}
    assert not those("rounds") & {"laplace", "skellam", "discrete-gaussian", "randomised-response"}
    assert span([]) == "–"
    assert span([2.0, 2.0001]) == "2"
    assert span([3.0, 0.5]) == "0.5 to 3"
