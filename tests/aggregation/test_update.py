"""Layouts, rings and bounds of updates by hand: unequal slots, weights and clients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fedaudit.aggregation import terms as module
from fedaudit.aggregation.secure.ring import HALF, Part, Ring
from fedaudit.aggregation.terms import Noise, Terms, bounded, in_ring, rounded_down, skellam, terms_of
from fedaudit.aggregation.update import WHOLE, Layout, Slot, Update, clipped
from fedaudit.errors import ContractError, PrivacyError

SLOTS = (
    Slot("w", "a", (2, 3), False, "state"), Slot("w", "b", (4,), True, "state"), Slot("z", None, (5,), False, "tensor"),
    Slot("r", None, (), False, "number"), Slot("s", None, (), True, "number"), Slot("e", None, (7,), False, "none"),
)  # fmt: skip
WEIGHT = Slot("n", None, (), True, "weight")


def test_lengths_of_slots_by_hand():
    assert [slot.length for slot in (*SLOTS, WEIGHT)] == [6, 4, 5, 1, 1, 0, 0]
    layout = Layout(SLOTS, "a class")
    assert (layout.length(False), layout.length(True), layout.weighted) == (12, 5, False)
    assert Layout((*SLOTS, WEIGHT), "a class").weighted
    assert Layout.of_text(layout.text()) == layout


@pytest.mark.parametrize("weighted", [True, False])
def test_the_ring_of_a_sum(weighted):
    """Five clients, numbers up to 2.5 and weights up to 30: the weight itself is summed in steps of 1."""
    layout = Layout((*SLOTS, WEIGHT) if weighted else SLOTS, "a class")
    found = layout.ring(5, 2.5, 30.0)
    more = (Part(1, float(HALF // 5)),) if weighted else ()
    assert found == Ring((Part(12, 75.0), Part(5, WHOLE * 30.0), *more), 5)
    if weighted:
        assert found.steps()[2] == 1.0
        assert layout.ring(HALF // 256, 1.0, 256.0).clients == HALF // 256
        with pytest.raises(ContractError, match="too large for a sum of"):
            layout.ring(HALF // 256, 1.0, 257.0)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_an_update_enters_a_sum_times_its_weight(weight, weighted):
    layout = Layout((*SLOTS, WEIGHT) if weighted else SLOTS, "a class")
    update = Update(layout, np.array([1.0, -2.0]), np.array([4.0]), weight)
    wanted = [[weight, -2.0 * weight], [4.0 * weight], *([[weight]] if weighted else [])]
    assert [part.tolist() for part in update.parts()] == wanted


def update_of(*real, whole=(7.0,)):
    return Update(Layout(SLOTS[:1], "a class"), np.array(real), np.array(whole), 5.0)


@pytest.mark.parametrize(("C", "real"), [(2.5, [1.5, 2.0]), (5.0, [3.0, 4.0]), (6.0, [3.0, 4.0])])
def test_a_clipped_update_keeps_its_direction_and_no_count(C, real):
    found, norm = clipped(update_of(3.0, 4.0), C)
    assert (found.real.tolist(), found.whole.tolist(), found.weight, norm) == (pytest.approx(real), [0.0], 1.0, 5.0)


@pytest.mark.parametrize("real", [(math.nan, 1.0), (1.0, math.inf), (math.nan, math.nan)])
def test_one_number_that_is_not_finite_is_refused(real):
    with pytest.raises(PrivacyError, match="NaN or infinity"):
        clipped(update_of(*real), 1.0)


def test_rounding_is_taken_off_the_clip():
    """Steps of 8 / levels, and 9 numbers: rounding adds up to 3 steps / 2."""
    ring = Ring((Part(9, 8.0), Part(1, 100.0)), 1000)
    step = 8.0 / (HALF // 1000)
    assert rounded_down(2.0, ring, 9) == pytest.approx(2.0 - 1.5 * step, rel=1e-12)
    with pytest.raises(PrivacyError, match="too coarse"):
        rounded_down(3.0 * step, ring, 9)
    assert rounded_down(3.01 * step, ring, 9) == pytest.approx(1.51 * step)


def terms_with(noise, secret=None):
    return Terms(by=None, clients=4, bound=2.0, largest=3.0, based=True, key=("k", 1), secret=secret, noise=noise)


@pytest.mark.parametrize("secret", [None, "00"])
@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_an_update_is_clipped_and_noised_as_the_terms_say(sigma, secret, monkeypatch):
    asked = []

    def gaussian(key, purpose, sigma, length, *, secure):
        asked.append((key, purpose, sigma, length, secure))
        return np.array([10.0, 20.0])

    monkeypatch.setattr(module, "gaussian", gaussian)
    monkeypatch.setattr(
        module, "rounded_down", lambda C, ring, length: C / 2 if (ring.clients, length) == (4, 2) else 0
    )
    plain = update_of(3.0, 4.0)
    assert bounded(plain, terms_with(None, secret)) == (plain, None)
    found, norm = bounded(plain, terms_with(Noise(clip=2.5, sigma=sigma, secure=True), secret))
    scale = 0.5 if secret is None else 0.25
    wanted = np.array([3.0, 4.0]) * scale + (np.array([10.0, 20.0]) if sigma else 0.0)
    assert (found.real.tolist(), norm) == (pytest.approx(wanted.tolist()), 5.0)
    assert asked == ([(("k", 1), "update noise", 2.0, 2, True)] if sigma else [])


def test_words_with_noise_on_real_numbers_alone(monkeypatch):
    """Six real numbers and four whole ones: the noise is on the first six words."""
    layout = Layout(SLOTS[:2], "a class")
    update = Update(layout, np.linspace(-1.0, 1.0, 6), np.arange(4.0), 1.0)
    bare, cut = in_ring(update, terms_with(None))
    assert bare.tolist() == layout.ring(4, 2.0, 3.0).encoded(update.parts())[0].tolist()
    assert cut == 0
    assert in_ring(update, terms_with(Noise(clip=1.0)))[0].tolist() == bare.tolist()
    noised, _ = in_ring(update, terms_with(Noise(clip=1.0, variance=50.0)))
    apart = (noised - bare).view(np.int32)
    assert apart[:6].any()
    assert apart[6:].tolist() == [0] * 4


def test_skellam_noise_has_its_variance():
    """20,000 draws of variance 30: within five standard errors, 30 sqrt(2 / 20,000) = 0.3 each."""
    words = skellam(np.random.default_rng(1), 30.0, 20_000, 20_003).view(np.int32).astype(float)
    assert words[20_000:].tolist() == [0.0] * 3
    assert words[:20_000].var() == pytest.approx(30.0, abs=1.5)
    assert words.mean() == pytest.approx(0.0, abs=0.2)


def test_the_most_that_rounding_moves_a_mean():
    """Three clients move by half a step each; the weights sum to 12."""
    ring = Ring((Part(2, 8.0), Part(1, 99.0)), 4)
    assert ring.error(3, 12.0) == pytest.approx(3 * (8.0 / (HALF // 4)) / 24.0, rel=1e-12)


def test_terms_travel_as_plain_values():
    of = terms_with(Noise(clip=2.0, sigma=1.0, variance=3.0, secure=True), "ab")
    values = {name: getattr(of, name) for name in of.__dataclass_fields__} | {
        "key": ["k", 1], "noise": {"clip": 2.0, "sigma": 1.0, "variance": 3.0, "secure": True},
    }  # fmt: skip
    assert terms_of(values) == of
    assert terms_of(values | {"noise": None}) == replace(of, noise=None)
    assert Noise(clip=2.0) == Noise(clip=2.0, sigma=0.0, variance=0.0, secure=False)
