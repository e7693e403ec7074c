"""Augmentation of the images that a model is trained on: each is moved, mirrored and coloured anew in each step.

An augmentation treats each image alone. Its random numbers come from the generator of the training, so that a training
draws the same by itself and in a stack. Under DP-SGD it changes nothing in the accounting: what it does to a record
does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedaudit.errors import ContractError

Fill = float | tuple[float, ...] | Literal["mean"]
Colours = Literal["plain", "torchvision"]


class Augmentation(Protocol):
    """Draws random numbers for a batch, and makes other images of its images with them."""

    def draw(self, rows: int, rng: torch.Generator) -> Tensor:
        """Return the random numbers of so many images, (rows, numbers)."""

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        """Return the images (rows, channel, height, width) as the numbers u say."""


@dataclass(frozen=True)
class Augment:
    """Random crops, mirrored images and colours; every image has parameters of its own."""

    crop: int = 0  # pixels by which an image is moved at most, up or down and left or right
    flip: bool = False  # left to right, every other time
    jitter: float = 0.0  # brightness, contrast and saturation times a factor in [1 - jitter, 1 + jitter]
    fill: Fill = "mean"  # pixels from outside, in [-1, 1]; "mean": that of the image's own channel
    # "plain": coloured before it is moved, in the order above, grey being the mean of the channels. "torchvision": as a
    # ColorJitter behind a RandomCrop, what came from outside included, in a drawn order, grey by luma weights.
    colours: Colours = "plain"

    @property
    def numbers(self) -> int:
        """Return how many random numbers an image takes."""
        return 7 if self.colours == "torchvision" else 6

    def __post_init__(self) -> None:
        if self.crop < 0 or not 0 <= self.jitter <= 1:
            raise ContractError(
                f"Augment(crop={self.crop}, jitter={self.jitter}): crop is not a number of pixels from 0 up, or jitter "
                "is not in [0, 1]."
            )

    def draw(self, rows: int, rng: torch.Generator) -> Tensor:
        return torch.rand(rows, self.numbers, generator=rng, device=rng.device, dtype=torch.float32)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        if x.dim() != 4:
            raise ContractError(
                f"fit: the records have the shape {tuple(x.shape[1:])}. An augmentation needs images (channel, height, "
                "width): leave augment out."
            )
        last = self.colours == "torchvision"
        if self.jitter and not last:
            x = self._coloured(x, u[:, 3:])
        if self.crop or self.flip:
            x = self._moved(x, u)
        return self._coloured_in_any_order(x, u[:, 3:]) if self.jitter and last else x

    def _coloured_in_any_order(self, x: Tensor, u: Tensor) -> Tensor:
        """Return images of other brightness, contrast and saturation, each image in an order of its own."""
        by = (1 + self.jitter * (2 * u[:, :3].to(x.dtype) - 1)).unflatten(1, (3, 1, 1, 1))
        drawn = (u[:, 3] * 6).floor().long().clamp(max=5)  # which of the six orders
        first, turned = drawn // 2, drawn % 2 == 1
        low, high = (first == 0).long(), 2 - (first == 2).long()  # the other two
        light = (x + 1) / 2
        for kind in (first, torch.where(turned, high, low), torch.where(turned, low, high)):
            grey = _luma(light)
            towards = torch.where((kind == 1)[:, None, None, None], grey.mean((1, 2, 3), keepdim=True), grey)
            towards = torch.where((kind == 0)[:, None, None, None], 0.0, towards)
            factor = by.gather(1, kind[:, None, None, None, None])[:, 0]
            light = (towards + (light - towards) * factor).clamp(0, 1)
        return light * 2 - 1

    def _coloured(self, x: Tensor, u: Tensor) -> Tensor:
        """Return images of other brightness, contrast and saturation, in this order, each put back into [-1, 1]."""
        by = (1 + self.jitter * (2 * u.to(x.dtype) - 1)).unflatten(1, (3, 1, 1, 1))
        light = ((x + 1) / 2 * by[:, 0]).clamp(0, 1)
        mean = light.mean((1, 2, 3), keepdim=True)
        light = (mean + (light - mean) * by[:, 1]).clamp(0, 1)
        grey = light.mean(1, keepdim=True)
        return (grey + (light - grey) * by[:, 2]).clamp(0, 1) * 2 - 1

    def _moved(self, x: Tensor, u: Tensor) -> Tensor:
        n, channels, h, w = x.shape
        span = 2 * self.crop + 1
        down, right = ((u[:, i, None] * span).floor().long().clamp(max=span - 1) - self.crop for i in (0, 1))
        rows, columns = (torch.arange(side, device=x.device)[None] for side in (h, w))
        mirrored = (u[:, 2, None] < 0.5) & self.flip
        rows, columns = rows + down, torch.where(mirrored, w - 1 - columns, columns) + right
        inside = ((rows >= 0) & (rows < h))[:, None, :, None] & ((columns >= 0) & (columns < w))[:, None, None, :]
        picked = x.gather(2, rows.clamp(0, h - 1)[:, None, :, None].expand(n, channels, h, w))
        picked = picked.gather(3, columns.clamp(0, w - 1)[:, None, None, :].expand(n, channels, h, w))
        return torch.where(inside, picked, self._outside(x))

    def _outside(self, x: Tensor) -> Tensor:
        if self.fill == "mean":
            return x.mean((2, 3), keepdim=True)
        values = self.fill if isinstance(self.fill, tuple) else (float(self.fill),)
        if len(values) not in (1, x.shape[1]):
            raise ContractError(
                f"Augment(fill={self.fill}): the images have {x.shape[1]} channels. Give one number, or one for each."
            )
        return torch.cat([x.new_full((1, 1, 1), value) for value in values])

    def chosen(self) -> list[Any]:
        """Return its numbers, each of which a method may have chosen."""
        filled = self.fill if isinstance(self.fill, tuple) else (self.fill,)
        return [self.crop, self.flip, self.jitter, *filled]


def _luma(light: Tensor) -> Tensor:
    """Return grey images: of three channels the sum by ITU-R 601's weights, of any other number the mean."""
    if light.shape[1] != 3:
        return light.mean(1, keepdim=True)
    red, green, blue = light.split(1, dim=1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def treats_rows_alone(augment: Augmentation | None) -> bool:
    """Return whether an augmentation is known to treat every image without regard to the others."""
    return augment is None or type(augment) is Augment


def augmented(augment: Augmentation | None, rows: Sequence[Tensor], rng: torch.Generator) -> list[Tensor]:
    """Return a batch's rows, with other images in the first place if there is an augmentation. It draws from rng."""
    if augment is None:
        return list(rows)
    return [augment(rows[0], augment.draw(len(rows[0]), rng)), *rows[1:]]
