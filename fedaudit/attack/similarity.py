"""Measures how alike two images are, as MSE, PSNR and SSIM, one value per pair of rows.

SSIM is scikit-image's with `gaussian_weights=True, sigma=1.5, use_sample_covariance=False`: a Gaussian of 11 taps that
mirrors the image at its border, averaged over the pixels whose window lies inside, then over channels. The window
decides which pixels those are. Images with a side under 11 get the largest odd one that fits (7 on 8 x 8 digits), which
is scikit-image's `win_size=7`.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

DATA_RANGE = 1.0  # images are scored as pixels in [0, 1]
SIGMA, TAPS = 1.5, 11
PSNR_LIMIT = 100.0  # dB: an exact copy would be infinite, which neither JSON nor a mean can hold


def pixels(x: Tensor) -> Tensor:
    """Return what the models see, [-1, 1], as pixels in [0, 1], in double precision. Values outside are clipped."""
    return ((x.detach().double() + 1) / 2).clamp(0, 1)


def window_for(height: int, width: int) -> int:
    side = min(height, width, TAPS)
    return side if side % 2 else side - 1


def mse(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().flatten(1).mean(1)


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the PSNR in dB, at most PSNR_LIMIT."""
    return (10 * torch.log10(DATA_RANGE**2 / mse(a, b))).clamp(max=PSNR_LIMIT)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the SSIM of images (n, C, H, W) with values in a range of DATA_RANGE."""
    height, width = a.shape[-2:]
    rows, columns = _gaussian(height).to(a), _gaussian(width).to(a)

    def blur(x: Tensor) -> Tensor:
        return rows @ x @ columns.T

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    covariance = blur(a * b) - mean_a * mean_b
    c1, c2 = (0.01 * DATA_RANGE) ** 2, (0.03 * DATA_RANGE) ** 2
    s = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    s = s / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    pad = (window_for(height, width) - 1) // 2
    return s[..., pad : height - pad, pad : width - pad].flatten(1).mean(1)


@functools.cache
def _gaussian(side: int) -> Tensor:
    """Return the filter along one side as a matrix. Indices beyond the border are mirrored, with the border pixel
    twice."""
    radius = TAPS // 2
    taps = torch.exp(-0.5 * (torch.arange(-radius, radius + 1, dtype=torch.float64) / SIGMA) ** 2)
    taps /= taps.sum()
    matrix = torch.zeros(side, side, dtype=torch.float64)
    for i in range(side):
        for offset, tap in zip(range(-radius, radius + 1), taps, strict=True):
            j = (i + offset) % (2 * side)
            matrix[i, min(j, 2 * side - 1 - j)] += tap
    return matrix
