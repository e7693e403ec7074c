"""Noise that only looks like noise: each trick is found by its test, and honest numbers in any format are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedaudit.epsilon import noise_values as values
from fedaudit.epsilon.noise_tests import Residual, examine

POOL = np.random.default_rng(99).normal(size=1000)


def floats(noise, seed=0, shape=(20, 25), releases=4, dtype=torch.float32):
    """Releases in a floating-point format, of two clients in two rounds: 2,000 numbers."""
    rng, found = np.random.default_rng(seed), []
    for i in range(releases):
        clean = torch.from_numpy(rng.normal(size=shape)).to(dtype)
        sent = clean + torch.from_numpy(noise(rng, shape)).to(dtype)
        clean, sent = (t.double().numpy() for t in (clean, sent))
        grain = 2 * values.spacing(sent, torch.finfo(dtype).eps)
        found.append(Residual(i % 2, i // 2, "E", sent - clean, clean, grain=grain))
    return found


def honest(rng, shape):
    return rng.normal(size=shape)


def by_name(finding):
    return {test.name: test.p for test in finding.tests}


def in_format(dtype):
    return lambda rng, shape: torch.from_numpy(honest(rng, shape)).to(dtype).double().numpy()


def mirrored(rng, shape):
    flat = rng.normal(size=shape[0] * shape[1])
    order = rng.permutation(len(flat))
    half = len(flat) // 2
    flat[order[half:]] = -flat[order[:half]]
    return flat.reshape(shape)


def smooth(rng, shape):
    flat = rng.normal(size=shape[0] * shape[1] + 1)
    return ((flat[1:] + flat[:-1]) / np.sqrt(2)).reshape(shape)


def without(rng, shape):
    return np.where(rng.random(shape) < 1 / 50, 0.0, honest(rng, shape) * np.sqrt(50 / 49))


def column(rng, shape):
    made = honest(rng, shape)
    made[:, 3] *= 0.3
    return made


@pytest.mark.parametrize(
    ("noise", "test"),
    [
        (lambda rng, shape: np.round(honest(rng, shape) / 0.1) * 0.1, "repeated"),
        (lambda rng, shape: np.round(honest(rng, shape) / 0.001) * 0.001, "grid"),
        (in_format(torch.bfloat16), "repeated"),
        (in_format(torch.float16), "grid"),
        (lambda rng, shape: rng.choice(POOL, shape), "repeated"),
        (lambda rng, shape: np.resize(rng.normal(size=50), shape), "repeated"),
        (lambda rng, shape: np.resize(rng.normal(size=50), shape), "lags"),
        (mirrored, "repeated"),
        (smooth, "lags"),
        (smooth, "waves"),
        (without, "bare"),
        (column, "coordinate"),
        (lambda rng, shape: rng.standard_t(3, size=shape) / np.sqrt(3), "distribution"),
        (lambda rng, shape: rng.uniform(-np.sqrt(3), np.sqrt(3), size=shape), "distribution"),
    ],
)
def test_each_trick_is_found_by_its_test(noise, test):
    finding = examine(floats(noise), exact=True)
    assert finding.p < 1e-3
    assert by_name(finding)[test] < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_honest_noise_in_any_format_is_no_grid(dtype):
    """20 repetitions each: that one of 20 tests has p < 1e-4 has a probability of 4 %; below 1e-5, 0.4 %."""
    found = [by_name(examine(floats(honest, seed, dtype=dtype, shape=(10, 25)), exact=False)) for seed in range(20)]
    for name in ("repeated", "bare", "grid", "lags", "coordinate", "along"):
        ps = np.array([tests[name] for tests in found])
        assert ps.min() > 1e-5, name
        assert (ps < 0.05).mean() <= 0.2, name


def test_the_same_noise_in_another_field_is_found():
    """The numbers come in another order and with other signs; one in five is enough."""
    rng = np.random.default_rng(1)
    one, other = floats(honest, 1), floats(honest, 2)
    assert by_name(examine(one, others=other))["elsewhere"] > 1e-3
    taken = rng.permutation(np.concatenate([r.z.ravel() for r in one]))[:400] * rng.choice([-1, 1], 400)
    other[0].z.ravel()[:400] = taken
    assert by_name(examine(one, others=other))["elsewhere"] < 1e-6


def test_noise_that_leaves_the_release_itself_free_is_found():
    residuals = floats(honest)
    for r in residuals:
        r.z[:] -= (r.z * r.clean).sum() / (r.clean**2).sum() * r.clean
    finding = examine(residuals, exact=True)
    assert finding.p < 1e-6
    assert finding.strongest.name == "along"


def test_near_counts_what_lies_in_the_union_of_places():
    """Two of three lie near one of 0.2, 0.2004 (overlapping) and 0.9: a share of 0.0034 + 0.002 of all."""
    p = values.near(np.array([0.1995, 0.9005, 0.5]), np.array([0.2004, 0.9, 0.2]), 0.001)
    share = 0.0024 + 0.002
    assert p == pytest.approx(3 * share**2 * (1 - share) + share**3, rel=1e-9)


def test_the_statistic_of_anderson_and_darling_has_the_p_value_that_simulation_gives():
    rng = np.random.default_rng(0)
    ps = np.array([values.distribution(rng.normal(size=100)) for _ in range(4000)])
    assert 0.03 < (ps < 0.05).mean() < 0.062
    assert (ps < 0.002).mean() <= 0.005


def test_frequencies_without_noise_are_found():
    """One of 50 frequencies has none: the noise is x 0.98 in all, and of normal shape."""
    rng = np.random.default_rng(0)
    blocks = []
    for _ in range(8):
        spectrum = np.fft.rfft(rng.normal(size=100))
        spectrum[17] = 0
        blocks.append(np.fft.irfft(spectrum, 100))
    assert values.waves(blocks) < 1e-9
    assert values.waves(rng.normal(size=(8, 100))) > 1e-3
    assert values.waves(rng.normal(size=(40, 7))) == 1.0, "releases of a few numbers have no waves, and are not accused"
