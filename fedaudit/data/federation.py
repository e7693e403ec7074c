"""The audit split: which client holds which record, and which records no client holds.

The membership audit asks an attacker to tell members from non-members of one client. Its null hypothesis, "the
attacker guesses", is exact only if the two are exchangeable: within a client every record is a member with the same
probability, independent of its label, its content and its position in the file. So the split is uniform, not
stratified.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedaudit.data.partitions import partition as partition_records
from fedaudit.data.records import Dataset, to_input
from fedaudit.errors import DataError, SettingError
from fedaudit.rng import seed_of


@dataclass(frozen=True, eq=False)
class Shard:
    """The records of one client, as sorted indices into `dataset.x`."""

    members: np.ndarray  # the client trains on these
    nonmembers: np.ndarray  # held out, from the same distribution; also the client's local test set
    validation: np.ndarray  # used to choose rounds and thresholds
    canaries: np.ndarray  # (pairs, 2): a mislabelled record that the client trains on, and one that it does not


@dataclass(frozen=True, eq=False)
class Federation:
    dataset: Dataset
    shards: tuple[Shard, ...]
    aux: np.ndarray  # no client holds these: the attackers' auxiliary set
    public: np.ndarray  # no client holds these: a public transfer set, empty by default

    def rows(self, index: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return records in the form of a model's input, images in [-1, 1], and their labels."""
        at = torch.from_numpy(np.asarray(index, dtype=np.int64))
        return to_input(self.dataset.x[at]), self.dataset.y[at]

    def members(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the records that client k trains on, canaries last.

        A canary's position does not depend on which record of its pair was chosen.
        """
        return self.rows(np.append(self.shards[k].members, self.shards[k].canaries[:, 0]))

    def people(self, k: int) -> Tensor | None:
        """Return whose record each one of `members` is, by number; None if the data does not say."""
        index = np.append(self.shards[k].members, self.shards[k].canaries[:, 0])
        return None if self.dataset.person is None else self.dataset.person[torch.from_numpy(index.astype(np.int64))]

    def candidates(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the members that are exchangeable with the non-members: no canaries; their labels betray them."""
        return self.rows(self.shards[k].members)

    def labels(self, k: int) -> Tensor:
        """Return the labels of `candidates`, without their records."""
        return self.dataset.y[torch.from_numpy(self.shards[k].members.astype(np.int64))]

    def nonmembers(self, k: int) -> tuple[Tensor, Tensor]:
        return self.rows(self.shards[k].nonmembers)

    def validation(self, k: int) -> tuple[Tensor, Tensor]:
        return self.rows(self.shards[k].validation)

    def auxiliary(self) -> tuple[Tensor, Tensor]:
        return self.rows(self.aux)

    def public_set(self) -> tuple[Tensor, Tensor]:
        return self.rows(self.public)

    def test(self) -> tuple[Tensor, Tensor]:
        """Return the data set's own test records and their labels."""
        return to_input(self.dataset.test_x), self.dataset.test_y

    def counts(self) -> np.ndarray:
        """Return the number of members by client (rows) and class (columns)."""
        y = self.dataset.y.numpy()
        return np.stack(
            [
                np.bincount(y[np.append(shard.members, shard.canaries[:, 0])], minlength=self.dataset.classes)
                for shard in self.shards
            ]
        )


def federate(
    dataset: Dataset,
    *,
    clients: int,
    partition: str,
    seed: int,
    minimum: int = 10,
    holdout: float = 0.25,
    validation: float = 0.1,
    aux: float = 0.1,
    public: float = 0.0,
    canaries: int = 0,
) -> Federation:
    """Set `aux` and `public` aside, share out the rest by `partition`, split each client's records, and return all.

    `aux` and `public` are fractions of all training records, `holdout` and `validation` of each client's. A client
    gets at least `minimum` records before its own split. Each step has a generator of its own, so that one setting
    does not change the outcome of another: with more `public` the auxiliary set is the same. `canaries` pairs of
    records leave the auxiliary set, get wrong labels, and are dealt out among the clients, who train on one of each.
    """
    for pair in ({"aux": aux, "public": public}, {"holdout": holdout, "validation": validation}):
        for name, fraction in pair.items():
            if not 0.0 <= fraction < 1.0:
                raise SettingError(f"Federation: {name} is {fraction:g}; give a fraction from 0 to below 1.")
        if sum(pair.values()) >= 1.0:
            both = " and ".join(f"{name} {fraction:g}" for name, fraction in pair.items())
            raise SettingError(f"Federation: {both} leave no records to train on; their sum has to be below 1.")
    total = len(dataset.y)
    aside = _rng(seed, "aux").permutation(total)[: _part(aux, total)]
    taken = np.zeros(total, dtype=bool)
    taken[aside] = True
    order = _rng(seed, "public").permutation(total)
    shared = order[~taken[order]][: _part(public, total)]
    taken[shared] = True
    rest = np.flatnonzero(~taken)
    held = partition_records(
        partition,
        dataset.y.numpy()[rest],
        clients,
        _rng(seed, "partition"),
        classes=dataset.classes,
        minimum=minimum,
        domain=None if dataset.domain is None else dataset.domain.numpy()[rest],
    )
    aside, pairs = aside[2 * canaries :], _canaries(aside, canaries, _rng(seed, "canaries"))
    shards = tuple(
        _shard(k, rest[index], pairs[k::clients], holdout, validation, _rng(seed, f"split/{k}"))
        for k, index in enumerate(held)
    )
    if canaries:
        dataset = dataclasses.replace(dataset, y=_mislabelled(dataset, pairs, _rng(seed, "mislabel")))
    return Federation(dataset, shards, np.sort(aside), np.sort(shared))


F = TypeVar("F", bound=Federation)


def share_out(
    dataset: Dataset,
    held: Sequence[tuple[np.ndarray, np.ndarray]],
    aux: np.ndarray,
    *,
    seed: int,
    canaries: int = 0,
    cls: type[F],
) -> F:
    """Return the federation of records that are shared out already. `held` has each client's members and non-members.

    Both are indices of records. Nothing is held out for validation. Canaries are made as in `federate`.
    """
    aside = _rng(seed, "aux").permutation(aux)
    aside, pairs = aside[2 * canaries :], _canaries(aside, canaries, _rng(seed, "canaries"))
    none = np.empty(0, dtype=np.int64)
    shards = tuple(Shard(members, out, none, pairs[k :: len(held)]) for k, (members, out) in enumerate(held))
    if canaries:
        dataset = dataclasses.replace(dataset, y=_mislabelled(dataset, pairs, _rng(seed, "mislabel")))
    return cls(dataset, shards, np.sort(aside), none)


def _canaries(aside: np.ndarray, pairs: int, rng: np.random.Generator) -> np.ndarray:
    """Return pairs of auxiliary records; the first of each pair is trained on.

    `aside` is in random order already. A fair coin for each pair decides which record comes first.
    """
    if 2 * pairs > len(aside):
        raise SettingError(
            f"Federation: {pairs} pairs of canaries take {2 * pairs} auxiliary records, but there are {len(aside)}. "
            "Ask for fewer canaries, or raise aux."
        )
    drawn = aside[: 2 * pairs].reshape(pairs, 2)
    return np.where(rng.random((pairs, 1)) < 0.5, drawn, drawn[:, ::-1])


def _mislabelled(dataset: Dataset, pairs: np.ndarray, rng: np.random.Generator) -> Tensor:
    """Return the labels, with a random wrong one for each canary. Only training on a canary reveals its label."""
    if dataset.classes < 2:
        raise SettingError(
            f"Federation: {dataset.name} has one class, so no canary can have a wrong label. Set canaries to 0."
        )
    at = torch.from_numpy(pairs.ravel().astype(np.int64))
    y = dataset.y.clone()
    y[at] = (y[at] + torch.from_numpy(rng.integers(1, dataset.classes, len(at)))) % dataset.classes
    return y


def _rng(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng(seed_of(seed, "data", purpose))


def _part(fraction: float, total: int) -> int:
    """Return the rounded fraction of `total`, but at least 1 if the fraction is above 0."""
    return max(int(fraction * total + 0.5), 1) if fraction > 0 else 0


def _shard(
    k: int, records: np.ndarray, canaries: np.ndarray, holdout: float, validation: float, rng: np.random.Generator
) -> Shard:
    total = len(records)
    out, val = _part(holdout, total), _part(validation, total)
    while (
        total - out - val < 2 and max(out, val) > 1
    ):  # two records to train on come first, then one for each part with a fraction above 0
        out, val = (out - 1, val) if out >= val else (out, val - 1)
    if total - out - val < 2:
        raise DataError(
            f"Federation: client {k} has {total} records, too few for 2 to train on, holdout {holdout:g} and "
            f"validation {validation:g}. Raise the minimum, take fewer clients, or drop one of the two."
        )
    nonmembers, chosen, members = np.split(rng.permutation(records), [out, out + val])
    return Shard(np.sort(members), np.sort(nonmembers), np.sort(chosen), canaries)
