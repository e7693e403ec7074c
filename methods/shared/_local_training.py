"""Local training as several methods share it: how long a client trains in a round, and on which views of its images.

A method that inherits from `WithLocalTraining` has the hyper-parameters `steps`, `schedule`, `crop` and `flip` beside
its epochs E, and trains with `client.fit(loss, **self.local_training, opt=self.optimiser(self.eta), ...)`. By default
it trains for E epochs at one rate on the images as they are. One that inherits from `WithViews` has `crop`, `flip`,
`jitter` and `colours`, and trains with `augment=self.augment`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import Field

from fedaudit import Augment, Opt
from fedaudit.methods.shared._optimiser import WithOptimiser
from fedaudit.training.augment import Colours
from fedaudit.training.fit import Schedule

BLACK = -1.0  # in a record's units: what torchvision's RandomCrop has around an image


def views(crop: int, flip: bool, jitter: float = 0.0, colours: Colours = "plain") -> Augment | None:
    """Return the augmentation that makes other views of a client's images, over black; None if nothing is to change."""
    if not (crop or flip or jitter):
        return None
    return Augment(crop=crop, flip=flip, jitter=jitter, fill=BLACK, colours=colours)


class WithViews(WithOptimiser):
    crop: int = Field(default=0, ge=0)  # in local training images are moved by so many pixels at most, over black
    flip: bool = False  # and mirrored every other time
    jitter: float = Field(default=0.0, ge=0, le=1)  # brightness, contrast, saturation change by such a share at most
    colours: Colours = "plain"  # before images are moved, in one order; or after that, in any order, as torchvision

    @property
    def augment(self) -> Augment | None:
        """Return the augmentation of local training; None without."""
        return views(self.crop, self.flip, self.jitter, self.colours)


class WithLocalTraining(WithOptimiser):
    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    steps: int = Field(default=0, ge=0)  # local steps, in the place of epochs; 0: E epochs
    schedule: Schedule = "constant"  # of the local rate within a round; "cosine": from eta down towards 0
    crop: int = Field(default=0, ge=0)  # in local training images are moved by so many pixels at most, over black
    flip: bool = False  # and mirrored every other time

    @property
    def local_training(self) -> dict[str, Any]:
        """Return how a client trains in a round, as `fit` takes it: for so many steps or epochs, on which images."""
        length = {"steps": self.steps} if self.steps else {"epochs": self.E}
        return {**length, "augment": views(self.crop, self.flip)}

    def optimiser(self, eta: float) -> Opt:
        """Return the optimiser of local training, which begins at the learning rate eta."""
        return dataclasses.replace(super().optimiser(eta), schedule=self.schedule)
