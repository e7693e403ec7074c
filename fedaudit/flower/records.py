"""The adapter: it tells an auditor facts about an app's nodes that are in no message.

Only the app knows which records were members of a node's training data. A subclass of `Records`, beside the app, tells
them by `partition-id`. With it, membership attacks, blind baselines and accuracy work. If it can also make the app
train on other records (`serving`), canaries and shadow models work, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from fedaudit.data import Federation
from fedaudit.data.datasets import Dataset
from fedaudit.data.federation import share_out
from fedaudit.errors import DataError, ThreatError
from fedaudit.shape import Shape
from fedaudit.training.models import Net

Rows = tuple[Any, Any]  # records and labels: tensors or arrays


class Records:
    """The base class of adapters. Subclass it and name the subclass: `adapter = "package.module:Class"`."""

    classes: int = 0  # number of classes; labels are 0, 1, ...

    def members(self, partition: int, partitions: int) -> Rows:
        """Return the records that the node of this `partition-id` trains on, as its model takes them, and labels."""
        raise DataError(
            f"{type(self).__name__}.members is missing. Write it: it returns the records that a node trains on."
        )

    def nonmembers(self, partition: int, partitions: int) -> Rows:
        """Return records of the same distribution that the node does not train on, chosen without looking at them."""
        raise DataError(
            f"{type(self).__name__}.nonmembers is missing. Write it: it returns records to compare members with."
        )

    def auxiliary(self) -> Rows | None:
        """Return records of the same distribution that no node holds, for the attackers; None if there are none."""
        return None

    def test(self) -> Rows | None:
        """Return the common test set; None stands for all nodes' non-members together."""
        return None

    def model(self) -> nn.Module | None:
        """Return the model whose state is the array record, by the same names, with logits as output, or None."""
        return None

    def serving(self, x: Tensor, y: Tensor) -> AbstractContextManager[None]:
        """Make the node train on these records while the context is open. `served` makes most such contexts."""
        raise ThreatError(
            f"{type(self).__name__}.serving is missing: without it an app trains on its own records only, so "
            "there are no canaries and no shadow models"
        )


@contextlib.contextmanager
def served(place: str, value: Any) -> Iterator[None]:
    """Make a function of the app ("package.module:function") return this value meanwhile. For `Records.serving`."""
    module, _, name = place.partition(":")
    with mock.patch.object(importlib.import_module(module), name, return_value=value):
        yield


def as_net(model: nn.Module, arch: str) -> Net:
    """Return an app's model as attacks take it, with its own names. Its embedding is the last linear layer's input."""
    made = cast(Net, model)
    if isinstance(model, Net):
        return made
    made.__class__ = type(type(model).__name__, (type(model), _Split, Net), {})
    made.arch = arch
    return made


class _Split:
    """Gives a model an encoder and a classifier that was not written in two parts."""

    @property
    def classifier(self) -> nn.Module:
        """Return the last linear layer, or the whole model if there is none."""
        whole = cast(nn.Module, self)
        linear: list[nn.Module] = [m for m in whole.modules() if isinstance(m, nn.Linear)]
        return (linear or [whole])[-1]

    def encode(self, x: Tensor) -> Tensor:
        last, seen = self.classifier, [x.flatten(1)]
        if last is not self:
            hook = last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
            try:
                cast(nn.Module, self)(x)
            finally:
                hook.remove()
        return seen[-1]

    def classify(self, e: Tensor) -> Tensor:
        return self.classifier(e)


@dataclasses.dataclass(frozen=True, eq=False)
class _Given(Dataset):
    """Records as an app's model takes them, of any shape."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y) or len(self.test_x) != len(self.test_y):
            self._off("x", f"has {len(self.x)} rows and {len(self.y)} labels")
        low, high = int(self.y.min()), int(self.y.max())
        if low < 0 or high >= self.classes:
            self._off(
                "y", f"has labels from {low} to {high}, but the adapter says that there are {self.classes} classes"
            )

    @property
    def shape(self) -> Shape:
        ids = self.x.dtype == torch.int64 and self.x.ndim == 2  # token ids
        return Shape(self.x.shape[1:], int(self.x.max()) + 1 if ids else 0)


class _AsGiven(Federation):
    def rows(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy(np.asarray(index, dtype=np.int64))
        return self.dataset.x[at], self.dataset.y[at]

    def test(self) -> tuple[Tensor, Tensor]:
        return self.dataset.test_x, self.dataset.test_y


def federation_of(records: Records, partitions: int, canaries: int, seed: int, name: str) -> Federation:
    """Return all that an adapter tells, as a federation like that of any run."""
    parts: list[tuple[Tensor, Tensor]] = []
    held: list[tuple[np.ndarray, np.ndarray]] = []

    def put(rows: Rows | None) -> np.ndarray:
        begin = sum(len(y) for _, y in parts)
        if rows is not None:
            parts.append(tensors_of(rows, type(records).__name__))
        return np.arange(begin, sum(len(y) for _, y in parts))

    for k in range(partitions):
        held.append((put(records.members(k, partitions)), put(records.nonmembers(k, partitions))))
    aux = put(records.auxiliary())
    x, y = (torch.cat(column) for column in zip(*parts, strict=True))
    test = records.test()
    if test is None:
        rest = np.concatenate([out for _, out in held])
        test = (x[rest], y[rest]) if len(rest) else (x, y)
    test_x, test_y = tensors_of(test, type(records).__name__)
    labels = tuple(str(c) for c in range(records.classes))
    dataset = _Given(name=name, x=x, y=y, test_x=test_x, test_y=test_y, class_names=labels)
    return share_out(dataset, held, aux, canaries=canaries, seed=seed, cls=_AsGiven)


def tensors_of(rows: Rows, whose: str) -> tuple[Tensor, Tensor]:
    x, y = (part if isinstance(part, Tensor) else torch.from_numpy(np.asarray(part)) for part in rows)
    if len(x) != len(y):
        raise DataError(f"{whose} gives {len(x)} records with {len(y)} labels. Give one label per record.")
    return x.to(torch.get_default_dtype()) if x.is_floating_point() else x, y.to(torch.int64)
