"""The terms on which a client's reply enters a sum, and what the client then sends.

A task carries them to the client's process as plain values. There the reply becomes an update; it is clipped and gets
its noise if a policy on updates says so; it is scaled to the ring and masked. Nothing else leaves the client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fedaudit.aggregation.secure.messages import Masked, as_words, keys_of
from fedaudit.aggregation.secure.protocol import Member
from fedaudit.aggregation.secure.ring import Ring
from fedaudit.aggregation.update import Update, clipped, restored, update_of
from fedaudit.errors import PrivacyError
from fedaudit.rng import numpy_generator
from fedaudit.wire.message import Down, Up


@dataclass(frozen=True)
class Noise:
    """The noise that a client adds to its own update before it leaves."""

    clip: float  # L2 norm of an update
    sigma: float = 0.0  # deviation of Gaussian noise; 0: none
    variance: float = 0.0  # of Skellam noise in the ring, in steps squared; 0: none
    secure: bool = False  # from the operating system's entropy


@dataclass(frozen=True)
class Terms:
    """The way in which a reply enters a sum. Without `secret` it stays a reply, with the client's own noise."""

    by: str | None
    clients: int  # the most clients in the sum
    bound: float  # the largest size of a number in an update
    largest: float  # the largest weight
    based: bool  # whether all clients were sent the same message, from which an update is counted
    key: tuple[object, ...]  # of this client's noise
    secret: str | None = None  # of its keys, in hexadecimal
    peers: Mapping[str, str] = field(default_factory=dict)  # by neighbour: its public keys, in hexadecimal
    noise: Noise | None = None


def terms_of(values: Mapping[str, Any]) -> Terms:
    """Return terms from their plain values, as they travel to another process."""
    noise = values["noise"]
    return Terms(**{**values, "key": tuple(values["key"]), "noise": None if noise is None else Noise(**noise)})


@dataclass(frozen=True)
class Entered:
    """A client's part in a sum as it is sent, and figures that only the auditor learns."""

    reply: Up
    layout: str = ""
    cut: int = 0  # numbers that were cut off at the bound
    norm: float | None = None  # of the update before it was clipped


def entered(reply: Up, message: Down, terms: Terms, k: int, device: torch.device) -> Entered:
    """Return what client k sends instead of its reply."""
    base = message if terms.based else None
    update, norm = bounded(update_of(reply, base, terms.by, counts=terms.noise is None), terms)
    layout = update.layout
    if terms.secret is None:
        return Entered(restored(layout, update.real, update.whole, 1.0, base, device), layout.text(), norm=norm)
    words, cut = in_ring(update, terms)
    peers = {int(v): keys_of(bytes.fromhex(keys)) for v, keys in terms.peers.items()}
    masked = Member(k, bytes.fromhex(terms.secret)).mask(words, peers)
    return Entered(Masked(as_words(masked)), layout.text(), cut, norm)


def bounded(update: Update, terms: Terms) -> tuple[Update, float | None]:
    """Return the update as a policy lets it go on, clipped and with Gaussian noise, and the norm that it had."""
    if terms.noise is None:
        return update, None
    C = terms.noise.clip
    if terms.secret is not None:
        C = rounded_down(C, update.layout.ring(terms.clients, terms.bound, terms.largest), update.real.size)
    update, norm = clipped(update, C)
    if terms.noise.sigma:
        noise = gaussian(terms.key, "update noise", terms.noise.sigma, update.real.size, secure=terms.noise.secure)
        update = replace(update, real=update.real + noise)
    return update, norm


def in_ring(update: Update, terms: Terms) -> tuple[np.ndarray, int]:
    """Return the update's words with its part of discrete noise, before any mask, and how many numbers were cut off."""
    words, cut = update.layout.ring(terms.clients, terms.bound, terms.largest).encoded(update.parts())
    if terms.noise is not None and terms.noise.variance:
        rng = numpy_generator(terms.key, "update noise", secure=terms.noise.secure)
        words += skellam(rng, terms.noise.variance, update.real.size, len(words))
    return words, cut


def gaussian(key: tuple[object, ...], purpose: str, sigma: float, length: int, *, secure: bool) -> np.ndarray:
    """Return Gaussian noise on a vector. The same key always gives the same noise, unless it is secure."""
    return numpy_generator(key, purpose, secure=secure).normal(0.0, sigma, length)


def rounded_down(C: float, ring: Ring, length: int) -> float:
    """Return the norm to clip to so that it is at most C after rounding, too, which adds up to sqrt(d) step / 2."""
    left = C - math.sqrt(length) * ring.steps()[0] / 2
    if left <= C / 2:
        raise PrivacyError(
            f"The ring of 32 bits is too coarse for {length:,} numbers of a sum of {ring.clients} clients: rounding "
            f"takes more than half of the clipping norm {C:g}. Ask fewer clients in a round, or take a smaller model."
        )
    return left


def skellam(rng: np.random.Generator, variance: float, length: int, whole: int) -> np.ndarray:
    """Return Skellam noise of this variance on the first `length` of `whole` words: a difference of two Poissons."""
    drawn = rng.poisson(variance / 2, length) - rng.poisson(variance / 2, length)
    words = np.zeros(whole, np.uint32)
    words[:length] = drawn.astype(np.int64).astype(np.uint32)
    return words
