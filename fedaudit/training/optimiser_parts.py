"""An optimiser for each part of a model, and the clipping of each part's gradient by itself.

Two networks that learn side by side in one fit may have optimisers of their own, such as Adam for one and SGD for the
other. A part is so many of the model's parameter tensors, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedaudit.training.plain_optimisers import Optimiser, plain_optimiser

# Of each part: how many of the parameter tensors, the class of its optimiser, and that one's options.
Parts = Sequence[tuple[int, type[torch.optim.Optimizer], Mapping[str, Any]]]


class ByParts(torch.optim.Optimizer):
    """Steps each part of a model by its own optimiser.

    With `clip`, each part's gradient is first scaled down to that norm, if it is longer. A part may be empty.
    """

    def __init__(self, params: Iterable[Tensor], parts: Parts, clip: float | None = None):
        every = list(params)
        if sum(size for size, _, _ in parts) != len(every):
            raise ValueError(
                f"The parts have {sum(size for size, _, _ in parts)} tensors, and the model trains {len(every)}. Give "
                "the sizes of what is trained."
            )
        super().__init__(every, {})
        self.clip, self._tensors = clip, split(every, [size for size, _, _ in parts])
        self.parts = [
            _made(make, of, options) for of, (_, make, options) in zip(self._tensors, parts, strict=True) if of
        ]
        self.param_groups = [group for part in self.parts for group in part.param_groups]  # a schedule sets their rates

    def step(self, closure: Any = None) -> Any:
        for part in self._tensors if self.clip is not None else ():
            if part:
                nn.utils.clip_grad_norm_(part, float(self.clip or 0.0))
        for made in self.parts:
            made.step()


def _made(make: type[torch.optim.Optimizer], parameters: list[Tensor], options: Mapping[str, Any]) -> Optimiser:
    plain = plain_optimiser(make, parameters, options)
    made: Optimiser = make(parameters, **options) if plain is None else plain
    return made


def split(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Return the values of each part, in their order."""
    found, at = [], 0
    for size in sizes:
        found.append(list(values[at : at + size]))
        at += size
    return found
