"""The optimiser of local training, as several methods share it: plain SGD, SGD with momentum, or Adam.

A method that inherits from `WithOptimiser` has the hyper-parameters `opt`, `momentum` and `weight_decay` beside its
learning rate, and trains with `opt=self.optimiser(self.eta)`. The default is plain SGD, as in the papers' algorithms.
The optimiser of an experiment (FedAF's Appendix A: momentum 0.9 for all algorithms) is a setting or a preset.
The state of the optimiser starts anew in each fit: nothing of it travels, and nothing is kept over rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from fedaudit import Method, Opt, adam, sgd


class WithOptimiser(Method):
    on_digits: ClassVar[Mapping[str, Any]] = {"E": 5, "B": 16, "eta": 0.1}

    opt: Literal["sgd", "adam"] = "sgd"  # optimiser of local training
    momentum: float = Field(default=0.0, ge=0, lt=1)  # of SGD
    weight_decay: float = Field(default=0.0, ge=0)  # added to the gradient: an l2 penalty of half this weight

    @field_validator("momentum")
    @classmethod
    def _of_sgd(cls, momentum: float, info: ValidationInfo) -> float:
        if momentum and info.data.get("opt") == "adam":
            raise ValueError('momentum belongs to opt = "sgd"; Adam has its own. Leave momentum out or set it to 0')
        return momentum

    def optimiser(self, eta: float) -> Opt:
        """Return the optimiser of local training, at the learning rate eta."""
        if self.opt == "adam":
            return adam(eta, weight_decay=self.weight_decay)
        return sgd(eta, momentum=self.momentum, weight_decay=self.weight_decay)
