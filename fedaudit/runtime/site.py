"""Where a party stands: what one client holds, and what the server holds. Nothing of anybody else.

A `Site` is the one seam for a client's records: runs, the test of declarations, shadows and the audit of the release
path all give a client its records through it. `Hub` is the server's side, and has no records at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedaudit.privacy.policy import Policy
from fedaudit.shape import Shape
from fedaudit.training.models import Net
from fedaudit.wire.message import State

Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Swap:
    """For the test of declarations: other records, as many as before, once so many private fits are through."""

    after: int
    in_fit: bool = True  # also for training; else only for what reads the records itself
    only: int | None = None  # one record alone is another one, under the same label
    relabel: bool = False  # and under another label


@dataclass(frozen=True)
class Place:
    """What server and clients know of the run."""

    seed: int
    device: torch.device
    shape: Shape
    classes: int
    rounds: int  # T
    public: Callable[[], Rows]  # the public transfer set, of which everybody holds a copy


@dataclass(frozen=True)
class Site(Place):
    """Client k's side: its records, its counts, its policies, its models."""

    k: int
    method: str
    hyperparameters: tuple[Any, ...]  # values of the method's settings: no secret
    policies: Mapping[str, Policy]
    releases: Callable[[str], int | None]  # how often a client will release a kind over the whole run
    absent: Callable[[int], frozenset[str]]  # fields of uploads that are None in a round, whatever the records are
    fresh_model: Callable[[], Net]
    model_with: Callable[[State], Net]
    server_model: Callable[[], Net]
    own: Callable[[], Rows]
    validation: Callable[[], Rows]  # held out to choose by; trained on by nobody
    others: Callable[[], Rows]  # as many records of nobody: for the test of declarations
    count: int
    swap: Swap | None = None
    seen: Callable[[], Rows] | None = None  # its records where they are kept, for who changes nothing in them

    def rows(self, private_fits: int, *, fitting: bool = False) -> Rows:
        """The records as they are seen after so many private fits, by training or by the method itself."""
        swap = self.swap
        swapped = swap is not None and private_fits >= swap.after and (swap.in_fit or not fitting)
        if not swapped or swap is None or swap.only is None:
            return self.others() if swapped else self.own()
        (x, y), (other, _) = self.own(), self.others()
        x = x.clone()
        x[swap.only] = other[swap.only]
        if swap.relabel:
            y = y.clone()
            y[swap.only] = (y[swap.only] + 1) % self.classes
        return x, y


@dataclass(frozen=True)
class Hub(Place):
    """The server's side: which architectures there are, and how to build them."""

    clients: int
    archs: tuple[str, ...]
    server_arch: Callable[[], str]
    build: Callable[[str], Net]
    public_labelled: bool
