"""What every mechanism promises of the test of its noise: limits of the scale that hold as often as they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from noised import Counts, Labels, Many, Rows, honest, released, times
from torch import Tensor

from fedaudit import Up
from fedaudit.epsilon.noise_tests import Residual, _scale_test

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
