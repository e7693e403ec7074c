"""The messages of a secure sum, and how many bytes they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedaudit.aggregation.secure.protocol import SEALED, PublicKeys
from fedaudit.aggregation.secure.shamir import BYTES
from fedaudit.wire.message import TENSOR_HEADER, Down, Size, Up, masked, public
from fedaudit.wire.traffic import NUMBER, Key

KEYS = 64  # bytes of two public keys
ID = 4  # bytes of a client's number
WORD = 4  # bytes of a number in the ring


class Invited(Down):
    clients: int  # the most clients in the sum
    threshold: float  # share of a neighbourhood that must help to unmask
    bound: float  # the largest size of a number; more is cut off
    largest: float  # the largest weight


class Advertised(Up):
    keys: Tensor = public()  # bytes: the key that seals shares, the key that makes masks


class Roster(Down):
    ids: Tensor  # its neighbours
    keys: Tensor  # theirs


class Shared(Up):
    to: Tensor = public()
    sealed: Tensor = public()  # one row of bytes for each neighbour


class Delivered(Down):
    by: Tensor  # the neighbours that shared
    sealed: Tensor


class Masked(Up):
    y: Tensor = masked()  # its update in the ring, plus its masks


class Unmask(Down):
    stayed: Tensor
    dropped: Tensor


class Helped(Up):
    own: Tensor = public()  # shares of the own masks of those who stayed, in the order asked
    keys: Tensor = public()  # shares of the mask keys of those who dropped out


def as_bytes(rows: Sequence[bytes], width: int) -> Tensor:
    """Return rows of bytes as a tensor."""
    joined = b"".join(rows)
    return torch.from_numpy(np.frombuffer(joined, np.uint8).copy().reshape(len(rows), width))


def rows_of(t: Tensor) -> list[bytes]:
    return [bytes(row) for row in t.cpu().numpy()]


def ids_of(ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int32)


def keys_of(row: bytes) -> PublicKeys:
    return PublicKeys(row[: KEYS // 2], row[KEYS // 2 :])


def words_of(y: Tensor) -> np.ndarray:
    """Return the words of a masked vector; the wire carries them as signed numbers of the same bits."""
    return y.cpu().numpy().view(np.uint32)


def as_words(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.view(np.int32))


@dataclass(frozen=True)
class SumFacts:
    """Who took part in each phase of one sum, as its traffic depends on it. `length`: numbers in a vector."""

    invited: Sequence[int]
    neighbours: Mapping[int, Sequence[int]]  # of those who advertised keys
    shared: Sequence[int]
    masked: Sequence[int]
    helped: Sequence[int]
    length: int


def traffic_of(facts: SumFacts) -> dict[Key, Size]:
    """Return the bytes of one sum's messages, by direction and field. The method's own message is not among them."""
    near, shared, stayed = facts.neighbours, set(facts.shared), set(facts.masked)
    degrees = sum(map(len, near.values()))
    of_shared = sum(len(near[k]) for k in facts.shared)
    delivered = sum(len(shared.intersection(near[k])) for k in facts.shared)
    in_sum = {k: len(stayed.intersection((*near[k], k))) for k in stayed}
    gone = {k: len((shared - stayed).intersection(near[k])) for k in stayed}

    def size(payload: int, messages: int) -> Size:
        return Size(payload, header=TENSOR_HEADER * messages)

    n, m = len(facts.invited), len(stayed)
    return {
        ("down", "Invited.clients"): Size(NUMBER * n),
        ("down", "Invited.threshold"): Size(NUMBER * n),
        ("down", "Invited.bound"): Size(NUMBER * n),
        ("down", "Invited.largest"): Size(NUMBER * n),
        ("up", "Advertised.keys"): size(KEYS * len(near), len(near)),
        ("down", "Roster.ids"): size(ID * degrees, len(near)),
        ("down", "Roster.keys"): size(KEYS * degrees, len(near)),
        ("up", "Shared.to"): size(ID * of_shared, len(shared)),
        ("up", "Shared.sealed"): size(SEALED * of_shared, len(shared)),
        ("down", "Delivered.by"): size(ID * delivered, len(shared)),
        ("down", "Delivered.sealed"): size(SEALED * delivered, len(shared)),
        ("up", "Masked.y"): size(WORD * facts.length * m, m),
        ("down", "Unmask.stayed"): size(ID * sum(in_sum.values()), m),
        ("down", "Unmask.dropped"): size(ID * sum(gone.values()), m),
        ("up", "Helped.own"): size(BYTES * sum(in_sum[k] for k in facts.helped), len(facts.helped)),
        ("up", "Helped.keys"): size(BYTES * sum(gone[k] for k in facts.helped), len(facts.helped)),
    }
