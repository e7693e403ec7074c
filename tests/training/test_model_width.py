"""A common embedding width: `name/512` pools, `name/p512` projects."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import adaptive_avg_pool1d

from fedaudit.errors import SettingError
from fedaudit.training import models


def build(arch, shape=(1, 8, 8)):
    torch.manual_seed(3)
    return models.build(arch, shape=shape, classes=10)


@pytest.mark.parametrize("width", [7, 16, 64, 100, 128])
def test_pooling_is_torchs(width):
    """Narrower, wider, and widths that do not divide one another, against torch's own."""
    own, wide = build("cnn"), build(f"cnn/{width}")
    x = torch.randn(5, 1, 8, 8)
    wide.encoder.own.load_state_dict(own.encoder.state_dict())
    assert wide.width == width
    assert torch.allclose(wide.encode(x), adaptive_avg_pool1d(own.encode(x), width), atol=1e-6)
    assert wide(x).shape == (5, 10)
    assert sum(p.numel() for p in wide.parameters()) == models.count(own) - 640 + 10 * width


def test_projection_is_one_linear_layer():
    own, wide = build("cnn"), build("cnn/p20")
    assert wide.width == 20
    assert models.count(wide) == models.count(own) - 650 + 64 * 20 + 20 + 210
    x = torch.randn(2, 1, 8, 8)
    step = wide.encoder.width
    assert torch.allclose(wide.encode(x), wide.encoder.own(x) @ step.weight.T + step.bias, atol=1e-6)


def test_every_member_of_a_group_gets_it():
    assert models.assign("digits-3/32", 4) == ["cnn/32", "cnn_bn/32", "mlp/32", "cnn/32"]
    assert {models.describe(arch, (3, 32, 32), 10)["width"] for arch in models.assign("HtFE-10/512", 10)} == {512}
    assert {models.describe(arch, (3, 32, 32), 10)["width"] for arch in models.assign("fedfree-8/p512", 8)} == {512}
    assert models.assign("cnn@0.5/32:2,mlp/32:1", 3) == ["cnn@0.5/32", "cnn@0.5/32", "mlp/32"]


@pytest.mark.parametrize("arch", ["cnn/", "cnn/0", "cnn/q5", "cnn/p", "digits-3/x", "cnn/64@0.5"])
def test_what_is_no_width_says_so(arch):
    with pytest.raises(SettingError, match=r"is not an embedding width\. Write for example"):
        models.assign(arch, 3)
