"""Randomness: named generators that are derived, never carried.

Every generator follows from (run seed, party, round, ask, purpose), so a task gives the same bits wherever and
whenever it runs, and a resumed run needs no saved generator.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_of(*parts: object) -> int:
    """A 63-bit seed for a path such as (run seed, "client 3", 7, 0, "noise")."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: object, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed_of(*parts))


WORDS = 625  # of 32 bits: numpy's global generator has 624 numbers, and where it stands among them


class _Numpys:
    """numpy's global generator. Its own functions copy its state number by number, which takes longer than all the rest
    of `seeded`: here the memory is copied, where it is laid out as expected and holds all there is to know.

    What does not stand there is the second of two normal numbers that were drawn at once. There is none after seeding,
    and none comes without a draw, which shows in the memory.
    """

    def __init__(self) -> None:
        self._of: object = None  # the bit generator that the address is of
        self._at: int | None = None
        self._known = b""  # a state after which nothing else is to be known

    def _address(self) -> int | None:
        now = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
        if now is not self._of:
            self._of, self._at, self._known = now, None, b""
            state = np.random.get_state()
            if isinstance(now, np.random.MT19937) and isinstance(state, tuple):
                at = int(now.ctypes.state_address)
                laid_out = np.append(state[1], np.uint32(state[2])).astype(np.uint32).tobytes()
                self._at = at if ctypes.string_at(at, 4 * WORDS) == laid_out else None
        return self._at

    def state(self) -> Any:
        """As it is now: its memory, or what numpy says."""
        at = self._address()
        if at is not None and ctypes.string_at(at, 4 * WORDS) == self._known:
            return self._known
        state: Any = np.random.get_state()
        if at is not None and state[3] == 0:
            self._known = ctypes.string_at(at, 4 * WORDS)
            return self._known
        return state

    def seed(self, seed: int) -> None:
        np.random.seed(seed)
        at = self._address()
        self._known = ctypes.string_at(at, 4 * WORDS) if at is not None else b""

    def put_back(self, state: Any) -> None:
        at = self._address()
        if not isinstance(state, bytes):
            np.random.set_state(state)
        elif at is not None:
            np.random.seed(0)  # no second number is left over
            ctypes.memmove(at, state, len(state))
            self._known = state
        else:  # somebody has put another generator in its place
            numbers = np.frombuffer(state, np.uint32)
            np.random.set_state(("MT19937", numbers[:-1], int(numbers[-1]), 0, 0.0))


numpys = _Numpys()


@contextmanager
def seeded(*parts: object, device: torch.device | str = "cpu") -> Iterator[None]:
    """Run a block inside a seeded fork of the global generators: layer initialisation and dropout know no other."""
    seed = seed_of(*parts)
    device = torch.device(device)
    devices = (
        [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    )
    before = random.getstate(), numpys.state()
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)
        numpys.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            numpys.put_back(before[1])
