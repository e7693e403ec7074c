"""Clipping tested apart from what clips: honest releases hold, and each way of clipping less is found by its words."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from protected import ALL, everything, once

from fedaudit.epsilon.clipping import SLACK, FieldTest, audit_clipping, least_multiplier
from fedaudit.epsilon.joint_verdict import judged, told
from fedaudit.privacy import sensitivity
from fedaudit.privacy.calibration import analytic
from fedaudit.privacy.mechanisms import additive
from fedaudit.privacy.mechanisms.base import mechanism_named
from fedaudit.privacy.mechanisms.gaussian import Gaussian
from fedaudit.privacy.policy import Policy
from fedaudit.runtime.run_record import read_record

REAL = sensitivity.clip_rows


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return everything(tmp_path_factory.mktemp("clipping") / "honest")


def by_kind(audits):
    return {audit.kind: audit for audit in audits}


def clip_by(monkeypatch, clip):
    for module in (sensitivity, additive):
        monkeypatch.setattr(module, "clip_rows", clip)


def test_honest_releases_hold_for_every_kind(honest):
    found = by_kind(audit_clipping(honest))
    assert sorted(found) == sorted(ALL)
    assert {a.verdict for a in found.values()} == {"not refuted"}
    assert found["embeddings"].trials > 40, "values, formats, the path, two clients"
    assert all(a.certain and a.p_value == 1 for a in found.values())
    assert {a.test for a in read_record(honest).audits} >= {"clipping"}


def test_clipping_that_is_left_out_is_found(honest, monkeypatch):
    clip_by(monkeypatch, lambda t, *_: t.clone())
    found = by_kind(audit_clipping(honest))
    assert {kind for kind, a in found.items() if a.verdict == "refuted"} == {"embeddings", "logits", "soft_labels"}
    assert found["embeddings"].lower_bound > 10
    assert "times as long as C" in found["embeddings"].how
    assert "one record moves a class mean" in found["logits"].how


def test_a_little_more_than_c_is_found(honest, monkeypatch):
    clip_by(monkeypatch, lambda t, C, norm=2: REAL(t, 1.01 * C, norm))
    found = by_kind(audit_clipping(honest, kinds=["embeddings"]))
    assert found["embeddings"].verdict == "refuted"


def test_clipping_in_one_format_only_is_found(honest, monkeypatch):
    clip_by(monkeypatch, lambda t, C, norm=2: t.clone() if t.dtype == torch.bfloat16 else REAL(t, C, norm))
    (found,) = audit_clipping(honest, kinds=["embeddings"])
    assert found.verdict == "refuted"
    assert "bfloat16" in found.how


def test_a_release_that_clips_where_it_is_looked_at_only_is_found(honest, monkeypatch):
    """`prepare` is honest, and the noise is added to something else: the path with one noise twice shows it."""
    real = Gaussian.noised

    def other(self, ready, *rest):
        return [noisy + 3 * leaf for noisy, leaf in zip(real(self, ready, *rest), ready.leaves, strict=True)]

    monkeypatch.setattr(Gaussian, "noised", other)
    (found,) = audit_clipping(honest, kinds=["embeddings"])
    assert found.verdict == "refuted"
    assert "as released" in found.how


@pytest.mark.parametrize("what", ["sensitivity", "calibration", "delta"])
def test_noise_that_is_scaled_for_less_is_found(honest, monkeypatch, what):
    bounded, multiplier, delta = additive.bounded, Gaussian.multiplier, additive.AddsNoise.delta
    if what == "sensitivity":

        def half(*args, **more):
            leaves, sensitivities, how = bounded(*args, **more)
            return leaves, [s / 2 for s in sensitivities], how

        monkeypatch.setattr(additive, "bounded", half)
    elif what == "calibration":
        monkeypatch.setattr(Gaussian, "multiplier", lambda self, *a: 0.97 * multiplier(self, *a))
    else:
        monkeypatch.setattr(additive.AddsNoise, "delta", lambda self, *a: 3 * delta(self, *a))
    found = by_kind(audit_clipping(honest))
    expected = set(ALL) if what == "sensitivity" else set(ALL) - {"synthetic_images"}  # these have a multiplier
    assert {kind for kind, a in found.items() if a.verdict == "refuted"} == expected
    assert "of what epsilon, delta and the sensitivity ask for" in found["label_counts"].how


def test_a_delta_of_one_in_n_is_that_of_the_clients_records(tmp_path, monkeypatch):
    """Noise a tenth too small for epsilon = 1 at delta = 1 / n is told as such."""
    folder = once(tmp_path / "a", label_counts={"epsilon": 1.0, "delta": "1/n"})
    assert by_kind(audit_clipping(folder))["label_counts"].verdict == "not refuted"
    real = Gaussian.multiplier
    monkeypatch.setattr(Gaussian, "multiplier", lambda self, *a: 0.9 * real(self, *a))
    found = by_kind(audit_clipping(folder))["label_counts"]
    assert found.verdict == "refuted"
    assert "is 0.9 of what epsilon, delta and the sensitivity ask for" in found.how


def test_counts_that_are_none_must_be_refused(honest, monkeypatch):
    monkeypatch.setattr(sensitivity, "_histogram_sensitivity", lambda *a: math.sqrt(2))
    (found,) = audit_clipping(honest, kinds=["label_counts"])
    assert found.verdict == "refuted"
    assert "counts of" in found.how


def test_pixels_beyond_their_range_are_found(honest, monkeypatch):
    real = additive.bounded

    def loose(leaves, *rest):
        _, sensitivities, how = real(leaves, *rest)
        return leaves, sensitivities, how

    monkeypatch.setattr(additive, "bounded", loose)
    (found,) = audit_clipping(honest, kinds=["synthetic_images"])
    assert found.verdict == "refuted"


def test_laplace_noise_is_held_against_its_own_norm(tmp_path, monkeypatch):
    laplace = {"embeddings": {"epsilon": 1.0, "mechanism": "laplace"}}
    folder = everything(tmp_path / "a", **laplace)
    (found,) = audit_clipping(folder)
    assert found.verdict == "not refuted"
    clip_by(monkeypatch, lambda t, C, norm=2: REAL(t, C, 2))  # in L2, where the noise is for L1
    (found,) = audit_clipping(folder)
    assert found.verdict == "refuted"


def test_the_least_multiplier_is_that_of_the_analytic_mechanism():
    for epsilon, delta in ((0.1, 1e-5), (1.0, 1e-2), (8.0, 1e-5)):
        assert least_multiplier(epsilon, delta) == pytest.approx(analytic(epsilon, delta, 1.0), rel=1e-6)
        assert least_multiplier(epsilon, delta, 4) == pytest.approx(2 * analytic(epsilon, delta, 1.0), rel=1e-6)


@pytest.mark.long
def test_a_bound_that_is_not_random_weakens_no_test_and_needs_no_correction(honest, monkeypatch):
    from fedaudit.epsilon.residuals import audit_residuals

    random = audit_residuals(honest)
    both = [*random, *audit_clipping(honest)]
    assert told(both) == told(random)
    assert [word for audit, word in judged(both) if not audit.certain] == [word for _, word in judged(random)]
    clip_by(monkeypatch, lambda t, *_: t.clone())
    assert told([*random, *audit_clipping(honest)]) == "refuted"


@pytest.mark.parametrize("n", [20, 50])
def test_a_delta_of_one_over_n_is_that_of_the_clients_own_records(n):
    """epsilon = 1 and delta = 1 / n, a record moves the values by 2 at most: nine tenths of that noise lack a ninth."""
    needs = analytic(1.0, 1 / n, 2.0)
    for share, lacking in ((1.0, []), (0.9, [pytest.approx(1 / 0.9, rel=1e-4)])):
        field = SimpleNamespace(
            release=SimpleNamespace(policy=Policy(epsilon=1.0, delta="1/n"), how=mechanism_named("gaussian")),
            client=SimpleNamespace(_context=SimpleNamespace(n=n)),
            ready=lambda share=share: SimpleNamespace(sigmas=[share * needs], deviation=1.0),
            _sensitivities=lambda ready: [2.0],
        )
        ((tried, broken),) = FieldTest._noise(field)
        assert tried == 1
        assert [one.factor for one in broken] == lacking


def noise_found(sigma, *, spent=None, normal=False, **policy):
    """What is said of noise of this deviation on a release of sensitivity 2, drawn with a deviation of 4 per unit."""
    how = SimpleNamespace(normal=normal, epsilon=lambda multiplier, delta: spent(multiplier, delta))
    base = {"delta": 1e-3, "noise_multiplier": None, "epsilon": 1.0, "calibration": "analytic", "releases": None}
    of = SimpleNamespace(
        release=SimpleNamespace(policy=SimpleNamespace(**(base | policy)), how=how), _planned=lambda: 3,
        ready=lambda: SimpleNamespace(sigmas=[sigma], deviation=4.0), _sensitivities=lambda ready: [2.0],
        client=SimpleNamespace(_context=SimpleNamespace(n=50)),
    )  # fmt: skip
    return [None if not broken else round(broken[0].factor, 6) for _, broken in FieldTest._noise(of)]


def test_noise_is_what_its_policy_asks_for_by_hand():
    """sigma = 16 over 4 and over 2: a multiplier of 2."""
    assert noise_found(16.0, noise_multiplier=2.0) == [None]
    assert noise_found(16.0, noise_multiplier=4.0) == [2.0], "half of it is lacking"
    asked = []

    def spent(multiplier, delta):
        asked.append((multiplier, delta))
        return 1.0 if multiplier >= 2 else 1.5

    assert noise_found(16.0, spent=spent) == [None]
    assert noise_found(15.0, spent=spent) == [round(1 + 2 * SLACK, 6)], "more than the epsilon is spent"
    assert noise_found(16.0, spent=spent, delta="1/n") == [None]
    assert asked == [(2.0, 1e-3), (1.875, 1e-3), (2.0, 0.02)]
    assert noise_found(16.0, spent=spent, calibration="total") == [], "for all releases together it has no formula"


@pytest.mark.parametrize(
    ("policy", "releases"), [({}, 1), ({"calibration": "total"}, 3), ({"calibration": "total", "releases": 5}, 5)]
)
def test_gaussian_noise_is_for_as_many_releases_as_are_planned(policy, releases):
    needed = least_multiplier(1.0, 1e-3, releases)
    enough, half = 8 * needed, 4 * needed
    assert noise_found(enough * 1.0001, normal=True, **policy) == [None]
    assert noise_found(half, normal=True, **policy) == [pytest.approx(2.0)]
