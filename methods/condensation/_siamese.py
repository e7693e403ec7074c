"""The siamese augmentation of dataset condensation (Zhao and Bilen, ICML 2021; FedAF's references [36], [37]).

In each step one of six transformations is drawn, and its parameters once. Real and condensed images go through the very
same one, so that two views of one kind are matched. This is written from the published description. The strengths are
the usual ones there (`STRENGTH`); our copy of FedAF names neither transformations nor strengths.

Everything is arithmetic on tensors of fixed shapes: a transformation that was not drawn is the identity. A step can
therefore be recorded, and needs no operation whose backward pass adds in an order of its own. Moving, turning, scaling
and mirroring are one matrix from pixels to pixels, which bilinear interpolation makes from an affine map.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Augmentation = Literal["none", "siamese"]
KINDS = ("colour", "crop", "cutout", "flip", "scale", "rotate")
STRENGTH = {"brightness": 1.0, "saturation": 2.0, "contrast": 0.5, "crop": 0.125, "cutout": 0.5, "scale": 1.2}
DEGREES = 15.0


class View(NamedTuple):
    """One transformation, the same for every image that it is applied to."""

    move: Tensor  # (pixels out, pixels in)
    keep: Tensor  # (height, width), 0 where it is cut out
    brightness: Tensor  # added
    saturation: Tensor  # times the distance from grey
    contrast: Tensor  # times the distance from the image's mean

    def __call__(self, x: Tensor) -> Tensor:
        """Return the transformed images, in [-1, 1]. Pixels from outside, and those cut out, are black (-1)."""
        x = x + self.brightness
        grey = x.mean(1, keepdim=True)
        x = (x - grey) * self.saturation + grey
        mean = x.mean((1, 2, 3), keepdim=True)
        x = (x - mean) * self.contrast + mean
        light = ((x + 1).flatten(2) @ self.move.T).unflatten(2, x.shape[2:])
        return light * self.keep - 1


def view(shape: torch.Size | tuple[int, ...], like: Tensor) -> View:
    """Draw one view for images of (channels, height, width), from the global generator."""
    h, w = shape[1:]
    u = torch.rand(10, device=like.device, dtype=like.dtype)
    kind = (u[0] * len(KINDS)).floor()
    of = {name: (kind == i).to(like.dtype) for i, name in enumerate(KINDS)}  # 1 for the one drawn
    s = 2 * u[1:] - 1  # uniform in [-1, 1]; one kind is at work, so that a number may serve several

    scale_x, scale_y = (STRENGTH["scale"] ** (v * of["scale"]) for v in (s[0], s[1]))
    angle = s[2] * math.radians(DEGREES) * of["rotate"]
    mirror = 1 - 2 * of["flip"] * (u[4] < 0.5).to(like.dtype)
    shift_x, shift_y = (v * STRENGTH["crop"] * 2 * of["crop"] for v in (s[4], s[5]))
    move = _affine(h, w, scale_x * mirror, scale_y, angle, shift_x, shift_y)

    half = STRENGTH["cutout"]  # of the side, hence so much from the middle in [-1, 1]
    rows, columns = _axis(h, like), _axis(w, like)
    inside = ((rows - s[6]).abs() < half)[:, None] & ((columns - s[7]).abs() < half)[None, :]
    keep = 1 - inside.to(like.dtype) * of["cutout"]

    colour = of["colour"]
    brightness = (u[7] - 0.5) * STRENGTH["brightness"] * colour
    saturation = 1 + (u[8] * STRENGTH["saturation"] - 1) * colour
    contrast = 1 + (u[9] + STRENGTH["contrast"] - 1) * colour
    return View(move, keep, brightness, saturation, contrast)


def _axis(n: int, like: Tensor) -> Tensor:
    """Return the middles of n pixels in [-1, 1]."""
    return (torch.arange(n, device=like.device, dtype=like.dtype) * 2 + 1) / n - 1


def _affine(
    h: int, w: int, scale_x: Tensor, scale_y: Tensor, angle: Tensor, shift_x: Tensor, shift_y: Tensor
) -> Tensor:
    """Return where each pixel comes from, as bilinear weights over all pixels: (h w, h w). Outside has no weight."""
    y, x = torch.meshgrid(_axis(h, angle), _axis(w, angle), indexing="ij")
    from_x = scale_x * (angle.cos() * x - angle.sin() * y) + shift_x
    from_y = scale_y * (angle.sin() * x + angle.cos() * y) + shift_y
    hat_x = (1 - (from_x.flatten()[:, None] - _axis(w, angle)).abs() * w / 2).clamp(min=0)  # (h w, w)
    hat_y = (1 - (from_y.flatten()[:, None] - _axis(h, angle)).abs() * h / 2).clamp(min=0)  # (h w, h)
    return (hat_y[:, :, None] * hat_x[:, None, :]).flatten(1)


def views(how: Augmentation, *images: Tensor) -> tuple[Tensor, ...]:
    """Return all of the images, each (rows, channels, height, width), after they went through one and the same view."""
    if how == "none":
        return images
    seen = view(images[0].shape[1:], images[0])
    return tuple(seen(x) for x in images)
