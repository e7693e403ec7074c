"""Local training as several methods share it: how long a client trains in a round, and on which views of its images.

A method that inherits from `WithLocalTraining` has the hyper-parameters `steps`, `crop` and `flip` beside its epochs E,
and trains with `client.fit(loss, **self.local_training, ...)`. By default it trains for E epochs on the images as they
are.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from fedaudit import Augment
from fedaudit.methods.shared._optimiser import WithOptimiser

BLACK = -1.0  # in a record's units: what torchvision's RandomCrop has around an image


class WithLocalTraining(WithOptimiser):
    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    steps: int = Field(default=0, ge=0)  # local steps, in the place of epochs; 0: E epochs
    crop: int = Field(default=0, ge=0)  # in local training images are moved by so many pixels at most, over black
    flip: bool = False  # and mirrored every other time

    @property
    def local_training(self) -> dict[str, Any]:
        """Return how a client trains in a round, as `fit` takes it: for so many steps or epochs, on which images."""
        augment = Augment(crop=self.crop, flip=self.flip, fill=BLACK) if self.crop or self.flip else None
        return {**({"steps": self.steps} if self.steps else {"epochs": self.E}), "augment": augment}
