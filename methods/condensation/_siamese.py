"""The siamese augmentation of dataset condensation (Zhao and Bilen, ICML 2021; FedAF's references [36], [37]).

In each step one of six transformations is drawn, and its parameters once. Real and condensed images go through the very
same one, so that two views of one kind are matched. This is written from the published description. The strengths are
the usual ones there (`STRENGTH`); our copy of FedAF names neither transformations nor strengths.

The authors' code of distribution matching works on standardised pixels: what comes from outside an image is 0, hence
the channel's mean, and brightness moves by half a standard deviation. `fill` and `unit` say what mean and deviation are
in [-1, 1]. The defaults, black and 1, are our first reading. Where a model is trained (and no image is learned), that
code draws one kind for a mini-batch and its parameters for each image: `siamese-each`.

Everything is arithmetic on tensors of fixed shapes: a transformation that was not drawn is the identity. A step can
therefore be recorded, and needs no operation whose backward pass adds in an order of its own. Moving, turning, scaling
and mirroring are one matrix from pixels to pixels, which bilinear interpolation makes from an affine map.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

from fedaudit.errors import ContractError, SettingError

Augmentation = Literal["none", "siamese", "siamese-each"]  # one view for a batch, or parameters for each image
Fill = tuple[float, ...]  # the pixel that is outside of an image, in [-1, 1]: one number, or one for each channel
BLACK: Fill = (-1.0,)
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

    def __call__(self, x: Tensor, fill: Fill = BLACK, unit: float = 1.0) -> Tensor:
        """Return the transformed images. Pixels from outside, and those cut out, are `fill`; `unit` is the deviation
        that standardised images would have.
        """
        outside = _outside(fill, x)
        light = self.colour((x - outside) / unit)
        light = (light.flatten(2) @ self.move.T).unflatten(2, x.shape[2:])
        return light * self.keep * unit + outside

    def colour(self, x: Tensor) -> Tensor:
        """Return the images with other brightness, saturation and contrast."""
        x = x + self.brightness
        grey = x.mean(1, keepdim=True)
        x = (x - grey) * self.saturation + grey
        mean = x.mean((1, 2, 3), keepdim=True)
        return (x - mean) * self.contrast + mean


def _outside(fill: Fill, like: Tensor) -> Tensor:
    """Return `fill` as (channel, 1, 1), by kernels alone: a recorded step copies nothing from the host."""
    if len(fill) not in (1, like.shape[1]):
        raise SettingError(
            f"aug_fill has {len(fill)} numbers, and the images have {like.shape[1]} channels. Give one number, or one "
            "for each channel."
        )
    return torch.cat([like.new_full((1, 1, 1), value) for value in fill])


class _Parameters(NamedTuple):
    """The parts of a view, one number or one for each image."""

    scale_x: Tensor
    scale_y: Tensor
    angle: Tensor
    shift_x: Tensor
    shift_y: Tensor
    middle_y: Tensor  # of the part that is cut out
    middle_x: Tensor
    cuts: Tensor  # 1 if it is cut out
    brightness: Tensor
    saturation: Tensor
    contrast: Tensor


def _parameters(which: Tensor, u: Tensor) -> _Parameters:
    """Return the parameters that uniform numbers stand for: `which` picks the kind, u (9, ...) the strengths."""
    kind = (which * len(KINDS)).floor()
    of = {name: (kind == i).to(u.dtype) for i, name in enumerate(KINDS)}  # 1 for the one drawn
    s = 2 * u - 1  # uniform in [-1, 1]; one kind is at work, so that a number may serve several
    scale_x, scale_y = (STRENGTH["scale"] ** (v * of["scale"]) for v in (s[0], s[1]))
    angle = s[2] * math.radians(DEGREES) * of["rotate"]
    mirror = 1 - 2 * of["flip"] * (u[3] < 0.5).to(u.dtype)
    shift_x, shift_y = (v * STRENGTH["crop"] * 2 * of["crop"] for v in (s[4], s[5]))
    colour = of["colour"]
    brightness = (u[6] - 0.5) * STRENGTH["brightness"] * colour
    saturation = 1 + (u[7] * STRENGTH["saturation"] - 1) * colour
    contrast = 1 + (u[8] + STRENGTH["contrast"] - 1) * colour
    moved = scale_x * mirror, scale_y, angle, shift_x, shift_y
    return _Parameters(*moved, s[6], s[7], of["cutout"], brightness, saturation, contrast)


def _kept(h: int, w: int, of: _Parameters) -> Tensor:
    """Return (..., height, width), 0 where an image is cut out."""
    half = STRENGTH["cutout"]  # of the side, hence so much from the middle in [-1, 1]
    rows = (_axis(h, of.angle) - of.middle_y[..., None]).abs() < half
    columns = (_axis(w, of.angle) - of.middle_x[..., None]).abs() < half
    return 1 - (rows[..., :, None] & columns[..., None, :]).to(of.cuts) * of.cuts[..., None, None]


def view(shape: torch.Size | tuple[int, ...], like: Tensor) -> View:
    """Draw one view for images of (channels, height, width), from the global generator."""
    h, w = shape[1:]
    u = torch.rand(10, device=like.device, dtype=like.dtype)
    of = _parameters(u[0], u[1:])
    move = _affine(h, w, of.scale_x, of.scale_y, of.angle, of.shift_x, of.shift_y)
    return View(move, _kept(h, w, of), of.brightness, of.saturation, of.contrast)


def each(x: Tensor, fill: Fill = BLACK, unit: float = 1.0) -> Tensor:
    """Return images that went through one kind of transformation, drawn for all, with parameters of their own.

    They carry no gradient: resampling by torch has none that repeats its bits on a GPU.
    """
    if x.requires_grad:
        raise ContractError("siamese-each augments what a model is trained on, not images that are learned.")
    n, _, h, w = x.shape
    u = torch.rand(10, n, device=x.device, dtype=x.dtype)
    of = _parameters(u[0, :1], u[1:])
    outside = _outside(fill, x)
    brightness, saturation, contrast = (t.view(n, 1, 1, 1) for t in (of.brightness, of.saturation, of.contrast))
    light = View(x, x, brightness, saturation, contrast).colour((x - outside) / unit)
    cos, sin = of.angle.cos(), of.angle.sin()
    theta = torch.stack(
        [of.scale_x * cos, -of.scale_x * sin, of.shift_x, of.scale_y * sin, of.scale_y * cos, of.shift_y], 1
    ).view(n, 2, 3)
    grid = affine_grid(theta, [n, 1, h, w], align_corners=False)
    light = grid_sample(light, grid, align_corners=False)  # outside is 0
    return light * _kept(h, w, of)[:, None] * unit + outside


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


def views(how: Augmentation, *images: Tensor, fill: Fill = BLACK, unit: float = 1.0) -> tuple[Tensor, ...]:
    """Return all of the images, each (rows, channels, height, width), after they went through one and the same view, or
    each of them through its own (`siamese-each`).
    """
    if how == "none":
        return images
    if how == "siamese-each":
        return tuple(each(x, fill, unit) for x in images)
    seen = view(images[0].shape[1:], images[0])
    return tuple(seen(x, fill, unit) for x in images)
