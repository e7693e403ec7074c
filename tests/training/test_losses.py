from __future__ import annotations

import math

import pytest
import torch

from fedaudit.training.losses import ce, kl


def test_kl_by_hand():
    """p = (3/4, 1/4), q = (1/2, 1/2): KL[p || q] = 3/4 ln(3/2) + 1/4 ln(1/2), KL[q || p] = 1/2 ln(2/3) + 1/2 ln 2.
    At temperature 2 the logits ln 9, 0 become ln 3, 0: the same p."""
    p, q = torch.tensor([[math.log(3.0), 0.0]]), torch.zeros(1, 2)
    assert kl(p, q).item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)
    assert kl(q, p).item() == pytest.approx(0.5 * math.log(2 / 3) + 0.5 * math.log(2), abs=1e-6)
    assert kl(torch.tensor([[math.log(9.0), 0.0]]), q, tau=2).item() == pytest.approx(kl(p, q).item(), abs=1e-6)
    assert kl(p, p).item() == 0


def test_ce_gives_one_value_per_row():
    x = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    assert ce(lambda x: x, x, torch.tensor([0, 0])).tolist() == pytest.approx([math.log(2), math.log(4 / 3)])
