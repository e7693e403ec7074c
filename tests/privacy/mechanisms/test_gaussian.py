"""Gaussian noise by every branch: whose entropy, which calibration, relation and dependence, and what is billed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gaussian_by_hand import delta_of, epsilon_of, multiplier_for
from noised import Counts, Images, Many, Means, Rows, context, released
from scipy import stats
from torch import Tensor

from fedaudit.errors import PrivacyError
from fedaudit.privacy.accounting import compose
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanisms import gaussian
from fedaudit.privacy.mechanisms.base import mechanism_named, mechanism_of
from fedaudit.privacy.policy import Policy, read_policies
from fedaudit.privacy.sensitivity import Bounding
from fedaudit.wire.message import KINDS
from fedaudit.wire.release import Protection

EPSILON, DELTA, C, RELEASES = 0.8, 1e-3, 1.5, 5  # `noised.context` plans five releases


def multiplier_of(calibration: str) -> float:
    """Exactly enough; by sqrt(2 ln(1.25 / delta)) / epsilon; or for five releases, whose squares of 1 / m add up."""
    exact = multiplier_for(EPSILON, DELTA)
    classical = math.sqrt(2 * math.log(1.25 / DELTA)) / EPSILON
    return {"analytic": exact, "classical": classical, "total": exact * math.sqrt(RELEASES)}[calibration]


# A row of one record; 20 rows that each depend on all records; counts, of which a record moves two or one.
CASES: dict[str, tuple[type, Tensor, dict[str, float]]] = {
    "record": (Rows, torch.zeros(50, 40), {"replace-one": 2 * C, "zero-out": C}),
    "all": (Many, torch.zeros(20, 100), dict.fromkeys(("replace-one", "zero-out"), math.sqrt(20) * 2 * C)),
    "histogram": (Counts, torch.zeros(2000), {"replace-one": math.sqrt(2), "zero-out": 1.0}),
}


def policy(calibration: str, relation: str, secure: bool, **more: Any) -> dict[str, Any]:
    values = {"epsilon": EPSILON, "delta": DELTA, "sensitivity": f"clip:{C}", "calibration": calibration}
    return {**values, "relation": relation, "secure": secure, **more}


@pytest.mark.parametrize("depends", CASES)
@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("calibration", ["analytic", "classical", "total"])
@pytest.mark.parametrize("secure", [False, True], ids=["keyed", "secure"])
def test_the_noise_is_as_large_as_its_branch_says(depends, relation, calibration, secure):
    """2,000 numbers: normal by Kolmogorov and Smirnov, and of the deviation by hand within the interval of
    chi-squared at 1 - 1e-6."""
    cls, value, swing = CASES[depends]
    sigma = multiplier_of(calibration) * swing[relation]
    how, ready, (noisy,) = released(cls, value, policy(calibration, relation, secure))
    noise = noisy.double().numpy().ravel()
    assert ready.sigmas == pytest.approx([sigma], rel=1e-6)
    assert stats.kstest(noise / sigma, "norm").pvalue > 1e-6
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], len(noise)) / len(noise)
    assert low < np.mean(noise**2) / sigma**2 < high
    residual = how.noise(noisy.double().numpy(), ready, 0, 0).z
    assert residual.ravel() == pytest.approx(noise / sigma)
    again = released(cls, value, policy(calibration, relation, secure))[2][0]
    assert torch.equal(noisy, again) is not secure


RECORDS = {0: 3, 4: 11, 7: 41, 9: 1}  # by class; a class of one record has the noise of one of two


def means() -> dict[int, Tensor]:
    return {c: torch.full((1500,), 0.001 * (c + 1)) for c in RECORDS}


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("calibration", ["analytic", "classical", "total"])
@pytest.mark.parametrize("secure", [False, True], ids=["keyed", "secure"])
def test_each_class_mean_has_the_noise_of_its_own_number_of_records(relation, calibration, secure):
    """A record that changes its label moves two means: sqrt(2) 2 C / (N - 1) under replace-one, half of it if it is
    zeroed. 1,500 numbers of each class: normal, and of that deviation within the interval of chi-squared at 1 - 1e-6.
    The bill is that of the largest, and the residuals are counted in each class's own deviation."""
    values = policy(calibration, relation, secure)
    how, ready, noisy = released(Means, means(), values, tables=[RECORDS])
    swing = {"replace-one": 2 * C, "zero-out": C}[relation]
    sigmas = {c: multiplier_of(calibration) * math.sqrt(2) * swing / max(n - 1, 1) for c, n in RECORDS.items()}
    assert ready.sigmas == pytest.approx([*sigmas.values()], rel=1e-6)
    low, high = stats.chi2.ppf([5e-7, 1 - 5e-7], 1500) / 1500
    for i, (c, sigma) in enumerate(sigmas.items()):
        noise = (noisy[i].double() - means()[c].double()).numpy()
        assert stats.kstest(noise / sigma, "norm").pvalue > 1e-6, c
        assert low < np.mean(noise**2) / sigma**2 < high, c
        assert how.noise(noisy[i].double().numpy(), ready, i, 0).z.ravel() == pytest.approx(noise / sigma, abs=1e-6)
    assert not np.allclose(*((noisy[i] - means()[c]).numpy() / sigmas[c] for i, c in enumerate([0, 4])))
    entry = how.entry("Means.p", "prototypes", read_policies({"prototypes": values}, KINDS)["prototypes"], ready)
    assert entry.noise_multiplier == pytest.approx(multiplier_of(calibration), rel=1e-6)
    assert (entry.sensitivity, entry.sigma) == pytest.approx((math.sqrt(2) * swing, sigmas[9]), rel=1e-6)
    assert entry.condition == "given the classes and their counts"


def test_a_record_in_two_tables_of_means_moves_four():
    """sqrt(2) times the noise of one table, for every class of both."""
    one, two = (released(Means, means(), policy("analytic", "zero-out", False), tables=of)[1] for of in (
        [RECORDS], [{0: 3, 4: 11}, {7: 41, 9: 1}],
    ))  # fmt: skip
    assert two.sigmas == pytest.approx([math.sqrt(2) * sigma for sigma in one.sigmas])


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
@pytest.mark.parametrize("calibration", ["analytic", "classical", "total"])
def test_the_bill_is_that_of_its_branch(calibration, relation):
    """The entry says what was drawn; composed, one release (of `total`, all five) costs what the formula gives."""
    cls, value, swing = CASES["record"]
    values = policy(calibration, relation, secure=False)
    rules = read_policies({"embeddings": values}, KINDS)["embeddings"]
    how, ready, _ = released(cls, value, values)
    entry = how.entry("Rows.e", "embeddings", rules, ready)
    m = multiplier_of(calibration)
    assert entry.noise_multiplier == pytest.approx(m, rel=1e-6)
    assert (entry.sensitivity, entry.sigma) == pytest.approx((swing[relation], m * swing[relation]), rel=1e-6)
    assert (entry.relation, entry.delta, entry.claim, entry.clip) == (relation, DELTA, EPSILON, C)
    count = RELEASES if calibration == "total" else 1
    entry.rounds = list(range(1, count + 1))
    spent = compose([entry.events()], DELTA).epsilon_of_record
    assert delta_of(spent, m / math.sqrt(count)) == pytest.approx(DELTA, rel=1e-4)
    assert spent == pytest.approx(EPSILON, rel=1e-4) if calibration != "classical" else spent < EPSILON
    assert how.epsilon(m, DELTA) == pytest.approx(epsilon_of(m, DELTA), abs=1e-6)


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.3])
def test_the_epsilon_of_so_much_of_the_noise_by_hand(scale):
    """What residuals say of the scale is turned into an epsilon by the claim's own formula."""
    cls, value, _ = CASES["record"]
    how, ready, _ = released(cls, value, policy("analytic", "replace-one", secure=False))
    epsilon = how.epsilon_at(ready, scale, DELTA)
    assert delta_of(epsilon, scale * multiplier_of("analytic")) == pytest.approx(DELTA, rel=1e-4)
    assert how.epsilon_at(ready, 0.0, DELTA) == math.inf


@pytest.mark.parametrize("secure", [False, True], ids=["keyed", "secure"])
def test_bytes_are_clamped_after_the_noise(secure):
    """300 pixels in [-1, 1], a multiplier of 0.02: sensitivity 2 sqrt(300), sigma 0.69. What lies inside is a normal
    number that was cut off there, and as many as the normal distribution has beyond are at the ends."""
    values = {"noise_multiplier": 0.02, "delta": DELTA, "secure": secure}
    sigma = 0.02 * 2 * math.sqrt(300)
    noisy = np.concatenate([released(Images, torch.zeros(3, 1, 10, 10), values, i)[2][0].numpy() for i in range(8)])
    noise = noisy.ravel().astype(np.float64)
    inside = noise[np.abs(noise) < 1]
    assert np.abs(noise).max() == 1
    assert stats.kstest(inside, stats.truncnorm(-1 / sigma, 1 / sigma, scale=sigma).cdf).pvalue > 1e-6
    beyond = 2 * stats.norm.sf(1 / sigma)
    low, high = stats.binom.interval(1 - 1e-6, len(noise), beyond)
    assert low <= (np.abs(noise) == 1).sum() <= high


def test_it_is_the_mechanism_of_these_policies():
    made = context(embeddings=policy("analytic", "replace-one", secure=False))
    assert mechanism_of(made.policies["embeddings"]).name == "gaussian"


def test_uniform_numbers_of_the_system_lie_strictly_between_0_and_1(monkeypatch):
    """52 bits of each eight bytes, and a half: all zeros, all ones, and the highest bit alone. None is rounded to an
    end, where a normal number would be infinite."""
    given = bytes(8) + b"\xff" * 8 + bytes(7) + b"\x80"
    monkeypatch.setattr(gaussian.os, "urandom", lambda size: given[:size])
    assert gaussian.system_uniform(3).tolist() == [2.0**-53, 1 - 2.0**-53, 0.5 + 2.0**-53]
    assert np.isfinite(gaussian.system_normal(3)).all()
    assert gaussian.system_uniform(1).shape == (1,)


def test_normal_numbers_of_the_system_come_in_pieces(monkeypatch):
    """Five in pieces of two: each is the quantile of its uniform number."""
    asked = []

    def uniform(n):
        asked.append(n)
        return np.linspace(0.1, 0.1 * len(asked), n)

    monkeypatch.setattr(gaussian, "system_uniform", uniform)
    found = gaussian.system_normal(5, chunk=2)
    assert asked == [2, 2, 1]
    assert found == pytest.approx(stats.norm.ppf([0.1, 0.1, 0.1, 0.2, 0.1]))
    gaussian.system_normal(1 << 20)
    gaussian.system_normal(3)
    assert asked[3:] == [1 << 20, 3], "a million at a time"


@pytest.mark.parametrize("secure", [False, True], ids=["keyed", "secure"])
def test_noise_has_the_form_of_what_it_is_added_to(monkeypatch, secure):
    monkeypatch.setattr(gaussian, "system_normal", lambda n: np.arange(1.0, n + 1))
    how, rules = mechanism_named("gaussian"), Policy(epsilon=1.0, secure=secure)
    like = torch.zeros(2, 3, dtype=torch.float64)
    drawn = how.draw(like, 3.0, rules, ("k",))
    assert (drawn.shape, drawn.dtype) == ((2, 3), torch.float64)
    if secure:
        assert drawn.tolist() == [[3.0, 6.0, 9.0], [12.0, 15.0, 18.0]]
    else:
        assert torch.allclose(drawn / 3, how.draw(like, 1.0, rules, ("k",)))
        assert not torch.equal(drawn, how.draw(like, 3.0, rules, ("l",)))


def test_so_little_noise_is_none():
    how = mechanism_named("gaussian")
    assert how.epsilon(1e-6, DELTA) == math.inf
    assert how.epsilon(2e-6, DELTA) < math.inf
    assert (how.rounds, how.normal, how.persons, how.norm, how.deviation) == (True, True, True, 2, 1.0)


@pytest.mark.parametrize(("epsilon", "calibration", "taken"), [(1.0, "classical", True), (1.01, "classical", False),
                                                               (1.01, "analytic", True)])  # fmt: skip
def test_the_classical_calibration_is_proven_up_to_one(epsilon, calibration, taken):
    how, rules = mechanism_named("gaussian"), Policy(epsilon=epsilon, calibration=calibration)
    if taken:
        how.check("x", "logits", rules)
        return
    with pytest.raises(PrivacyError, match="proven for epsilon <= 1 only"):
        how.check("x", "logits", rules)


def test_a_multiplier_takes_no_calibration():
    mechanism_named("gaussian").check("x", "logits", Policy(noise_multiplier=2.0, calibration="classical"))


def test_pure_noise_is_free_and_has_no_centre():
    """Two tensors: a multiplier of 1, a sensitivity of 1 each, and noise of their own keys."""
    how, made = mechanism_named("pure-noise"), context("k")
    rules, declared = Policy(mechanism="pure-noise", delta=1e-3), Rows.declared()["e"]
    how.check("x", "weights", Policy(mechanism="pure-noise", epsilon=-1.0))
    ready = how.prepare([torch.ones(2, 3), torch.ones(3)], "A.b", declared, rules, made)
    assert (ready.sensitivities, ready.multiplier, ready.delta, ready.sigmas) == ([1.0, 1.0], 1.0, 1e-3, [1.0, 1.0])
    assert ready.bounded == Bounding("any")
    one, other = how.noised(ready, "A.b", declared, rules, made)
    assert (one.shape, other.shape) == ((2, 3), (3,))
    assert not torch.equal(one[0], other)
    assert torch.equal(one, how.noised(ready, "A.b", declared, rules, made)[0])
    assert how.entry("A.b", "logits", rules, ready) == LedgerEntry.free("A.b", "logits", "the size only", "pure-noise")
    assert (how.epsilon(3.0, 0.1), how.claim(rules, ready), how.clip(rules)) == (0.0, 0.0, None)
    assert how.centre(np.array([3.0, -1.0])).tolist() == [0.0, 0.0]
    found = how.noise(np.array([3.0, -1.0]), ready, 1, 0)
    assert (found.z.tolist(), found.sizes, found.free) == ([[3.0, -1.0]], None, True)
    assert how.words([how.entry("A.b", "logits", rules, ready)]) == ("replaced by noise: the size only", "free")
    assert (how.label(rules), how.rounds, how.normal) == ("replaced by noise", True, False)
    told = Protection(mechanism="pure-noise", clip=3.0, sensitivity=1.0, sigma=5.0)
    assert how.smallest_class(told) is None
    rows = torch.full((3,), 7.0)
    assert torch.equal(
        how.imitated(rows, told, torch.Generator().manual_seed(1)),
        torch.randn(3, generator=torch.Generator().manual_seed(1)),
    )
