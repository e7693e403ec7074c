"""The two sides of a run: `Site` has all that one client holds, and `Hub` all that the server holds.

A `Site` is the only way to a client's records: runs, the test of declarations, shadows and the audit of the release
path all give a client its records through it. A `Hub` has no records at all. Neither has anything of anybody else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedaudit.privacy.policy import Policy
from fedaudit.runtime.work_once import Once
from fedaudit.shape import Shape
from fedaudit.training.models import Net
from fedaudit.wire.message import State

Rows = tuple[Tensor, Tensor]


def nobody() -> None:
    """Stands for records of which nobody says whose they are."""


@dataclass(frozen=True)
class Swap:
    """Tells a site, for the test of declarations, to swap in equally many other records after some private fits."""

    after: int
    in_fit: bool = True  # True: training gets them too; False: only code that reads the records itself
    only: int | None = None  # if set, only this record is swapped; it keeps its label, unless `relabel`
    relabel: bool = False  # the label of that record changes, too
    half: int | None = None  # if set, a half of the records is swapped: those that this number draws, or the `rest`
    rest: bool = False


@dataclass(frozen=True)
class RunFacts:
    """The facts of the run that server and clients both know."""

    seed: int
    device: torch.device
    shape: Shape
    classes: int
    rounds: int  # T
    public: Callable[[], Rows]  # the public transfer set, of which everybody holds a copy


@dataclass(frozen=True)
class Site(RunFacts):
    """Client k's side: its records, its counts, its policies, its models."""

    k: int
    method: str
    hyperparameters: tuple[Any, ...]  # values of the method's settings, which are not secret
    policies: Mapping[str, Policy]
    releases: Callable[[str], int | None]  # how often a client will release a kind over the whole run
    absent: Callable[[int], frozenset[str]]  # fields of uploads that are None in a round, whatever the records are
    fresh_model: Callable[[], Net]
    model_with: Callable[[State], Net]
    server_model: Callable[[], Net]
    blank_server_model: Callable[[], Net]  # the same without weights of its own: they are about to be replaced
    own: Callable[[], Rows]
    validation: Callable[[], Rows]  # held out for choosing; nobody trains on them
    others: Callable[[], Rows]  # equally many records that no client holds, for the test of declarations
    count: int
    swap: Swap | None = None
    people: Callable[[], Tensor | None] = nobody  # whose record each one is, if the guarantee is for persons
    seen: Callable[[], Rows] | None = None  # its records without a copy, for callers that do not change them
    once: Once | None = None  # does the work that clients of this process share; None: each does it alone

    def rows(self, private_fits: int, *, fitting: bool = False) -> Rows:
        """Return the records as training (`fitting`) or the method itself sees them after so many private fits."""
        swap = self.swap
        swapped = swap is not None and private_fits >= swap.after and (swap.in_fit or not fitting)
        if swapped and swap is not None and swap.half is not None:
            return self._half(swap.half, swap.rest)
        if not swapped or swap is None or swap.only is None:
            return self.others() if swapped else self.own()
        (x, y), (other, _) = self.own(), self.others()
        x = x.clone()
        x[swap.only] = other[swap.only]
        if swap.relabel:
            y = y.clone()
            y[swap.only] = (y[swap.only] + 1) % self.classes
        return x, y

    def _half(self, number: int, rest: bool) -> Rows:
        """Return the records with one half of them swapped for others, labels too."""
        (x, y), (other, label) = self.own(), self.others()
        pick = drawn_half(len(y), number, rest).to(y.device)
        return torch.where(pick.view(-1, *[1] * (x.dim() - 1)), other, x), torch.where(pick, label, y)


def drawn_half(n: int, number: int, rest: bool) -> Tensor:
    """Return which of n records are in the half that a number draws, or in the rest."""
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(number)) < 0.5
    return ~drawn if rest else drawn


@dataclass(frozen=True)
class Hub(RunFacts):
    """The server's side: the architectures, and how to build them."""

    clients: int
    archs: tuple[str, ...]
    server_arch: Callable[[], str]
    build: Callable[[str], Net]
    blank: Callable[[str], Net]  # the same without weights of its own: they are about to be replaced
    public_labelled: bool
