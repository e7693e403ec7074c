"""The phases of a secure sum, as functions of bytes and integers: a client's side and the server's.

    0  advertise   client -> server   two public keys
       roster      server -> client   the public keys of its neighbours
    1  share       client -> server   for each neighbour, sealed: a share of its mask key and a share of its own mask
       deliver     server -> client   the shares that others sealed for it
    2  mask        client -> server   its vector plus all its masks, in the ring of 32-bit words
    3  unmask      server -> client   who of its neighbours sent a vector, and who dropped out
                   client -> server   shares of the own masks of the first, of the mask keys of the second

Masks of a pair cancel in the sum. The server joins the shares, subtracts the own masks of those who stayed and the
pair masks of those who dropped out after phase 1, and has the sum of those who stayed. A client never gives both
shares of one neighbour: with both, the server could unmask that neighbour's vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedaudit.aggregation.secure.graph import needed
from fedaudit.aggregation.secure.keys import KeyPair, add_mask, derived, opened, seal, stream
from fedaudit.aggregation.secure.shamir import BYTES, PRIME, joined, split
from fedaudit.errors import RunError

SEALED = 2 * BYTES + 16  # bytes of two shares, encrypted and authenticated


@dataclass(frozen=True)
class PublicKeys:
    """The two public keys of a client: one seals its shares, one makes its masks."""

    seal: bytes
    mask: bytes


@dataclass(frozen=True)
class Revealed:
    """The shares that one client gives back, by the neighbour whose secret they are of."""

    own: Mapping[int, int]  # of the own masks of those who stayed
    keys: Mapping[int, int]  # of the mask keys of those who dropped out


def point(k: int) -> int:
    """Return where in the field client k's shares lie."""
    return k + 1


def _as_bytes(share: int) -> bytes:
    return share.to_bytes(BYTES, "little")


class Member:
    """Client k in one secure sum. Everything it does follows from its secret and what it was sent."""

    def __init__(self, k: int, secret: bytes):
        self.k = k
        self._secret = secret
        self._seal = KeyPair(derived(secret, "seal key"))
        self._mask = KeyPair(derived(secret, "mask key"))
        self._agreed: dict[bytes, bytes] = {}  # by a neighbour's public key: the key that seals shares for it
        self._split: tuple[tuple[int, ...], int, dict[int, int], dict[int, int]] | None = None

    @cached_property
    def _own(self) -> bytes:
        """Return b, from which its own mask is made."""
        return derived(self._secret, "own mask")

    def advertise(self) -> PublicKeys:
        return PublicKeys(self._seal.public, self._mask.public)

    def _shares(self, peers: Sequence[int], threshold: int) -> tuple[dict[int, int], dict[int, int]]:
        points = tuple(point(v) for v in sorted({*peers, self.k}))
        if self._split is None or self._split[:2] != (points, threshold):
            own = split(self._own, points, threshold, self._coefficients("own", threshold))
            keys = split(self._mask.private, points, threshold, self._coefficients("key", threshold))
            self._split = points, threshold, own, keys
        return self._split[2:]

    def _coefficients(self, purpose: str, threshold: int) -> list[int]:
        # 64 bytes for a field of 257 bits: the remainder is uniform to 2^-255.
        drawn = stream(derived(self._secret, f"{purpose} coefficients"), 64 * (threshold - 1))
        return [int.from_bytes(drawn[i : i + 64], "little") % PRIME for i in range(0, len(drawn), 64)]

    def share(self, roster: Mapping[int, PublicKeys], share: float) -> dict[int, bytes]:
        """Return, for each neighbour, its two shares of this client's secrets, sealed for it."""
        if self.k in roster or len(roster) < 1:
            raise RunError(f"Client {self.k} was given a roster without neighbours, or with itself. It shares nothing.")
        if len({key for keys in roster.values() for key in (keys.seal, keys.mask)}) < 2 * len(roster):
            raise RunError(f"Client {self.k} was given one key for two neighbours. It shares nothing.")
        own, keys = self._shares(list(roster), needed(share, len(roster) + 1))
        return {
            v: seal(self._sealing(of), self.k, _as_bytes(own[point(v)]) + _as_bytes(keys[point(v)]))
            for v, of in roster.items()
        }

    def _sealing(self, of: PublicKeys) -> bytes:
        if of.seal not in self._agreed:
            self._agreed[of.seal] = self._seal.agree(of.seal, "seal")
        return self._agreed[of.seal]

    def mask(self, vector: np.ndarray, peers: Mapping[int, PublicKeys]) -> np.ndarray:
        """Return the vector with its own mask and those of all pairs. `peers` are the neighbours that shared."""
        masked = np.array(vector, np.uint32)
        add_mask(masked, self._own, 1)
        for v in sorted(peers):
            add_mask(masked, self._mask.agree(peers[v].mask, "mask"), 1 if self.k < v else -1)
        return masked

    def unmask(
        self,
        roster: Mapping[int, PublicKeys],
        sealed: Mapping[int, bytes],
        stayed: Sequence[int],
        dropped: Sequence[int],
        share: float,
    ) -> Revealed:
        """Return the shares that the server asks for. Raise if it asks for both shares of one client, or for too much.

        `roster` are the neighbours' keys, `sealed` the shares they sealed for this client.
        """
        known = {*roster, self.k}
        if both := set(stayed) & set(dropped):
            raise RunError(
                f"The server asks client {self.k} for both shares of client {min(both)}, which would unmask it."
            )
        if strangers := ({*stayed, *dropped} - known) | (set(dropped) & {self.k}):
            raise RunError(f"The server asks client {self.k} for shares of client {min(strangers)}. It gives none.")
        threshold = needed(share, len(known))
        if len(stayed) < threshold:
            raise RunError(
                f"{len(stayed)} clients around client {self.k} stayed, the threshold is {threshold}: it gives nothing."
            )
        own: dict[int, int] = {}
        keys: dict[int, int] = {}
        for v in [*stayed, *dropped]:
            if v == self.k:
                of_own, _ = self._shares(list(roster), threshold)
                own[v] = of_own[point(v)]
                continue
            if v not in sealed:
                continue
            text = opened(self._sealing(roster[v]), v, sealed[v])
            first, second = int.from_bytes(text[:BYTES], "little"), int.from_bytes(text[BYTES:], "little")
            if v in stayed:
                own[v] = first
            else:
                keys[v] = second
        return Revealed(own, keys)


def total(
    masked: Mapping[int, np.ndarray],
    keys: Mapping[int, PublicKeys],
    neighbours: Mapping[int, Sequence[int]],
    shared: Sequence[int],
    revealed: Mapping[int, Revealed],
    share: float,
) -> np.ndarray:
    """Return the sum of the vectors of those who sent one, on the server. Raise if too few shares came back.

    `shared` are the clients that finished phase 1: each of them masked with those of its neighbours that did, too.
    """
    if not masked:
        raise RunError("No client sent a masked vector: there is no sum.")
    summed = np.zeros_like(next(iter(masked.values())))
    for k in sorted(masked):
        summed += masked[k]
    for k in sorted(masked):
        add_mask(summed, _join({v: r.own[k] for v, r in revealed.items() if k in r.own}, neighbours[k], share, k), -1)
    for k in sorted(set(shared) - set(masked)):
        secret = _join({v: r.keys[k] for v, r in revealed.items() if k in r.keys}, neighbours[k], share, k)
        pair = KeyPair(secret)
        if pair.public != keys[k].mask:
            raise RunError(f"The shares of client {k}'s mask key do not give its key. The sum is given up.")
        for v in neighbours[k]:
            if v in masked:
                add_mask(summed, pair.agree(keys[v].mask, "mask"), -1 if v < k else 1)
    return summed


def _join(shares: Mapping[int, int], neighbours: Sequence[int], share: float, k: int) -> bytes:
    threshold = needed(share, len(neighbours) + 1)
    if len(shares) < threshold:
        raise RunError(
            f"{len(shares)} shares of client {k}'s secret came back, the threshold is {threshold}: there is no sum."
        )
    return joined({point(v): s for v, s in shares.items()}, threshold)
