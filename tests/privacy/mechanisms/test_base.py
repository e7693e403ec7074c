"""What every mechanism promises: limits of the scale that hold as often as they say, and what it does by default."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from noised import Counts, Labels, Many, Rows, honest, released, times
from scipy import stats
from torch import Tensor

from fedaudit import Up
from fedaudit.epsilon.noise_tests import Residual, _scale_test
from fedaudit.errors import PrivacyError
from fedaudit.privacy.accounting import Event
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanisms import base
from fedaudit.privacy.mechanisms.base import (
    Mechanism,
    Noise,
    Prepared,
    mechanism_named,
    mechanism_of,
    reason,
    span,
)
from fedaudit.privacy.mechanisms.base import times as releases_in_words
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.sensitivity import Bounding

TIMES = 60
ONE = {"epsilon": 1.0, "delta": 1e-5}
FOUR = {"epsilon": 4.0, "delta": 1e-5}
# A release of 500 numbers by each mechanism, and whether its noise could be smaller; counts have a deviation of one and
# a half or so.
CASES: dict[str, tuple[type[Up], Tensor, dict[str, Any], bool]] = {
    "gaussian, rows": (Rows, torch.ones(25, 20), ONE, True),
    "gaussian, all records, total": (Many, torch.ones(25, 20), {**ONE, "calibration": "total"}, True),
    "gaussian, secure, zero-out": (Rows, torch.ones(25, 20), {**ONE, "secure": True, "relation": "zero-out"}, True),
    "laplace, rows": (Rows, torch.ones(25, 20), {"epsilon": 1.0, "mechanism": "laplace"}, True),
    "discrete, rows": (Rows, torch.ones(25, 20), {**ONE, "mechanism": "discrete-gaussian"}, True),
    "discrete, counts": (Counts, torch.full((500,), 2.0), {**FOUR, "mechanism": "discrete-gaussian"}, True),
    "skellam, counts": (Counts, torch.full((500,), 2.0), {**FOUR, "mechanism": "skellam"}, True),
    "randomised response": (
        Labels,
        torch.arange(500) % 10,
        {"epsilon": 1.0, "mechanism": "randomised-response"},
        False,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(("case", "factor"), [*((c, 1.0) for c in CASES), *((c, 0.8) for c in CASES if CASES[c][3])])
def test_limits_of_the_scale_hold_as_often_as_they_say(case, factor):
    """Of 60 releases with so much of the promised noise, each side may miss the truth in 2.5 %: 7 or more have a
    probability of 0.1 %."""
    cls, value, policy, _ = CASES[case]
    below = above = 0
    for seed in range(TIMES):
        how, ready, (noisy,) = released(cls, value, policy, seed, honest if factor == 1 else times(factor))
        noise = how.noise(noisy.double().numpy(), ready, 0, seed)
        residual = Residual(0, 0, "part 0", noise.z, noise.z * 0, noise.sizes)
        low, high = _scale_test([residual]).limits(0.05, 0.025)  # as an audit at 95 % takes them
        below, above = below + (high < factor), above + (low > factor)
    assert below <= 6
    assert above <= 6


class Costly(Mechanism):
    """Has an epsilon that tells its arguments apart, and is found by no name."""

    def epsilon(self, multiplier: float, delta: float) -> float:
        return 100 * multiplier + delta


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epsilon": 1.0}, None),
        ({"noise_multiplier": 0.1}, None),
        ({"epsilon": 1.0, "releases": 1}, None),
        ({}, "give either epsilon or noise_multiplier"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "give either epsilon or noise_multiplier"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"noise_multiplier": 0.0}, "give a finite number above 0"),
        ({"noise_multiplier": -1.0}, "give a finite number above 0"),
        ({"noise_multiplier": math.inf}, "give a finite number above 0"),
        ({"epsilon": 1.0, "releases": 0}, "give at least 1"),
    ],
)
def test_options_that_every_mechanism_checks(values, words):
    if words is None:
        Costly().check("x", "logits", Policy(**values))
        return
    with pytest.raises(PrivacyError, match=words):
        Costly().check("x", "logits", Policy(**values))


def test_a_policy_in_a_few_words():
    how = mechanism_named("gaussian")
    assert how.label(Policy(epsilon=2.0, sensitivity="clip:3")) == "ε=2, clip 3"
    assert how.label(Policy(epsilon=2.0, calibration="total")) == "ε=2, whole run, clip 1"
    assert how.label(Policy(noise_multiplier=0.5, sensitivity="random-pixel:9")) == "noise 0.5x, random-pixel"
    assert [how.plans_ahead(Policy(epsilon=2.0, calibration=c)) for c in ("total", "analytic")] == [True, False]


def test_what_a_policy_promises_for_one_release():
    """Its own epsilon, but of `total` and of a multiplier what the noise gives: 100 m + delta here."""
    ready = Prepared([], [], 3.0, 0.25, Bounding("any"))
    assert Costly().claim(Policy(epsilon=2.0), ready) == 2.0
    assert Costly().claim(Policy(epsilon=2.0, calibration="total"), ready) == 300.25
    assert Costly().claim(Policy(noise_multiplier=2.0), ready) == 300.25
    assert Costly().epsilon_at(ready, 0.5, 0.5) == 150.5


def test_what_a_mechanism_does_by_default():
    """A row of three numbers along which two are told apart: 1 / sqrt(3) each. Six steps are charged."""
    how, none = Costly(), Policy(epsilon=1.0)
    assert how.direction(torch.zeros(1, 3)).tolist() == [pytest.approx([1 / math.sqrt(3)] * 3)]
    assert how.direction(torch.zeros(2, 2)).norm() == pytest.approx(1)
    assert how.direction(torch.zeros(0)).shape == (0,)
    assert how.quantiles(np.array([0.1, 0.5, 0.8])) == pytest.approx(stats.norm.ppf([0.1, 0.5, 0.8]))
    entry = LedgerEntry(field="A.b", kind="logits", mechanism="gaussian", noise_multiplier=0.5, relation="any",
                        sample_rate=0.25, steps=2, rounds=[1, 2, 4])  # fmt: skip
    assert how.event(entry) == Event(0.5, 0.25, 6)
    assert how.centre(np.ones(2)).tolist() == [1.0, 1.0]
    assert (how.refuses("logits"), how.clip(none), how.smallest_class(none), how.path) == (None, None, None, None)
    assert how.follows(entry, none, 9, 9, 9) == {}
    assert (how.chosen, how.trains, how.persons, how.normal, how.rounds) == (True, False, False, False, False)
    assert (how.relations, how.summary) == ((), "")
    assert Noise(np.zeros((1, 1))).free is True
    assert Noise(np.zeros((1, 1))).sizes is None


def test_an_entry_is_shown_with_its_noise_where_it_has_some():
    facts = {"field": "A.b", "kind": "logits", "mechanism": "gaussian, odd", "relation": "zero-out"}
    noisy = LedgerEntry(**facts, noise_multiplier=0.5, sigma=1.23456, sensitivity=2.0)
    assert mechanism_of(noisy).shown(noisy) == "gaussian, odd, sigma 1.235, sensitivity 2, zero-out"
    assert mechanism_of(noisy).shown(LedgerEntry(**facts, noise_multiplier=0.5)) == "gaussian, odd"


def test_prepared_noise_by_hand():
    """A multiplier of 3 on sensitivities 2 and 5, noise of deviation 0.5 at scale 1."""
    ready = Prepared([], [2.0, 5.0], 3.0, 0.25, Bounding("any"), 0.5)
    assert (ready.scales, ready.sigmas) == ([6.0, 15.0], [3.0, 7.5])
    plain = Prepared([], [2.0], 3.0, 0.25, Bounding("any"))
    assert (plain.deviation, plain.classes, plain.grid, plain.moves) == (1.0, None, None, None)


def test_numbers_and_releases_in_words():
    assert (span([]), span([2.0]), span([3.0, 0.5, 1.0])) == ("–", "2", "0.5 to 3")
    rounds = [SimpleNamespace(rounds=[1, 2]), SimpleNamespace(rounds=[2]), SimpleNamespace(rounds=[])]
    assert [releases_in_words(rounds[at:]) for at in range(3)] == ["3 releases", "1 release", "0 releases"]
    assert reason(SimpleNamespace(condition="given this")) == ": given this"
    assert reason(SimpleNamespace(condition=None)) == ""


def test_a_name_before_a_comma_is_the_mechanism():
    assert mechanism_named("gaussian, heuristic sensitivity") is mechanism_named("gaussian")
    with pytest.raises(PrivacyError, match="Did you mean 'gaussian'"):
        mechanism_named("gausian")
    for name in ("a mechanism without a name", "odd, gaussian"):
        with pytest.raises(PrivacyError, match="mechanism"):
            mechanism_named(name)


FREE = {"field": "A.b", "kind": "logits", "relation": "any", "condition": "by this"}


def test_files_of_mechanisms_are_read_for_a_name_that_is_not_known_yet(monkeypatch):
    known = {"gaussian": base.mechanisms()["gaussian"]}
    read = []
    more = lambda: read.append(1) or known.update(late="found")  # noqa: E731
    monkeypatch.setattr(base, "_known", known)
    monkeypatch.setattr(base, "_read_files", more)
    assert base.mechanism_named("gaussian, before a sum") is known["gaussian"]
    assert read == []
    assert base.mechanism_named("late") == "found"
    assert read == [1]


def test_words_of_what_has_no_noise_of_its_own():
    """Of several entries the one with the least noise is told."""
    open_, free = (LedgerEntry(**FREE, mechanism="none", noise_multiplier=m, rounds=[1, 2]) for m in (0.0, math.inf))
    none, after = mechanism_named("none"), mechanism_named("post-processing")
    assert none.words([free, open_]) == ("sent as it is, 4 releases", "open")
    assert none.words([free]) == ("costs nothing: by this", "free")
    assert after.words([free]) == ("costs nothing more: by this", "free")
    assert mechanism_named("post-processing of DP-SGD").words([free]) == ("covered by the noise in training", "free")
    assert (none.chosen, after.chosen) == (False, False)


def test_dp_sgd_as_a_mechanism():
    """Its words tell the least noise, and the steps of each client: 2 of 3 rounds and 5 of one."""
    how = mechanism_named("dp-sgd")
    facts = {"field": "training", "kind": "training", "mechanism": "dp-sgd", "relation": "add-or-remove"}
    entries = [LedgerEntry(**facts, noise_multiplier=m, steps=s, rounds=r) for m, s, r in
               ((2.0, 2, [1, 2, 3]), (1.5, 5, [1]))]  # fmt: skip
    assert how.words(entries) == ("DP-SGD: noise 1.5 times the clipping norm, 5 to 6 steps a client", "noise")
    assert how.label(Policy(mechanism="dp-sgd", epsilon=2.0)) == "DP-SGD, ε = 2"
    assert how.label(Policy(mechanism="dp-sgd", noise_multiplier=0.5)) == "DP-SGD, noise 0.5x"
    assert how.plans_ahead(Policy(mechanism="dp-sgd", epsilon=2.0)) is True
    assert how.plans_ahead(Policy(mechanism="dp-sgd", noise_multiplier=0.5, calibration="total")) is False
    assert (how.trains, how.persons, how.relations) == (True, True, ("zero-out",))
    how.check("x", "training", Policy(mechanism="dp-sgd", epsilon=2.0))
    for values, words in (({"relation": "zero-out"}, "takes no relation"), ({"calibration": "total"}, "no calibration"),
                          ({"sensitivity": "random-pixel"}, "Use clip=C")):  # fmt: skip
        with pytest.raises(PrivacyError, match=words):
            how.check("x", "training", Policy(mechanism="dp-sgd", epsilon=2.0, **values))
