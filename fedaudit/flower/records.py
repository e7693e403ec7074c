"""The adapter: what an auditor has to know of an app's nodes, and no message tells.

Who was a member of a node's training data is known to the app alone. A subclass of `Records`, beside the app, tells it
by `partition-id`; with that, membership attacks, blind baselines and accuracy work. Where it can also make the app
train on other records (`serving`), canaries and shadows do.
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
    """Subclass this, and name it: `adapter = "package.module:Class"`."""

    classes: int = 0  # of the labels, which are 0, 1, ...

    def members(self, partition: int, partitions: int) -> Rows:
        """What the node of this `partition-id` trains on, as its model takes it, and the labels."""
        raise DataError(f"{type(self).__name__}.members is missing: it tells what a node trains on.")

    def nonmembers(self, partition: int, partitions: int) -> Rows:
        """Records of the same distribution that the node does not train on, chosen without looking at them."""
        raise DataError(f"{type(self).__name__}.nonmembers is missing: members are told from something.")

    def auxiliary(self) -> Rows | None:
        """Records of the same distribution that no node holds: the attackers' own. None: there are none."""
        return None

    def test(self) -> Rows | None:
        """The common test set. None: all nodes' non-members together."""
        return None

    def model(self) -> nn.Module | None:
        """The model whose state is the array record: with its names, and logits as output. None: there is none."""
        return None

    def serving(self, x: Tensor, y: Tensor) -> AbstractContextManager[None]:
        """While this is open, the node trains on these records, whatever it holds. `served` makes most of them."""
        raise ThreatError(
            f"{type(self).__name__}.serving is missing: without it an app trains on nothing but its own records, and "
            "there are no canaries and no shadows"
        )


@contextlib.contextmanager
def served(place: str, value: Any) -> Iterator[None]:
    """For `Records.serving`: a function of the app ("package.module:function") returns this value meanwhile."""
    module, _, name = place.partition(":")
    with mock.patch.object(importlib.import_module(module), name, return_value=value):
        yield


def as_net(model: nn.Module, arch: str) -> Net:
    """An app's model, under its own names, as attacks take it: the embedding is the input of its last linear layer."""
    made = cast(Net, model)
    if isinstance(model, Net):
        return made
    made.__class__ = type(type(model).__name__, (type(model), _Split, Net), {})
    made.arch = arch
    return made


class _Split:
    """Encoder and classifier of a model that was not written as two."""

    @property
    def classifier(self) -> nn.Module:
        """The last linear layer; the whole model, where there is none."""
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
            self._off("y", f"has labels from {low} to {high}, but the adapter says that there are {self.classes}")

    @property
    def shape(self) -> Shape:
        ids = self.x.dtype == torch.int64 and self.x.ndim == 2  # of tokens
        return Shape(self.x.shape[1:], int(self.x.max()) + 1 if ids else 0)


class _AsGiven(Federation):
    def rows(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        at = torch.from_numpy(np.asarray(index, dtype=np.int64))
        return self.dataset.x[at], self.dataset.y[at]

    def test(self) -> tuple[Tensor, Tensor]:
        return self.dataset.test_x, self.dataset.test_y


def federation_of(records: Records, partitions: int, canaries: int, seed: int, name: str) -> Federation:
    """All that an adapter tells, as any run's federation."""
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
        raise DataError(f"{whose} gives {len(x)} records with {len(y)} labels.")
    return x.to(torch.get_default_dtype()) if x.is_floating_point() else x, y.to(torch.int64)
