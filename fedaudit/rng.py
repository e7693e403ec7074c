"""Random generators, each derived anew from a name and never passed on.

Every generator follows from (run seed, party, round, ask, purpose). So a task gives the same bits wherever and
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
    """Return a 63-bit seed for a path such as (run seed, "client 3", 7, 0, "noise")."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: object, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed_of(*parts))


@contextmanager
def kept(device: torch.device | str = "cpu") -> Iterator[None]:
    """Run a block, and put the global generators back as they were before it, whatever it did to them."""
    device = torch.device(device)
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    before = random.getstate(), numpys.state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(before[0])
            numpys.put_back(before[1])


WORDS = 625  # words of 32 bits in numpy's global generator: 624 numbers, and its position among them


class _Numpys:
    """Saves and restores the state of numpy's global generator, fast.

    numpy's own functions copy the state number by number, which takes longer than all the rest of `seeded`. This class
    copies the memory, if it is laid out as expected and holds the whole state.

    One thing is not in that memory: the second of two normal numbers that were drawn at once. There is none after
    seeding, and a later one needs a draw, which changes the memory.
    """

    def __init__(self) -> None:
        self._of: object = None  # the bit generator whose address `_at` is
        self._at: int | None = None
        self._known = b""  # memory that is known to be the whole state

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
        """Return the current state: the memory if it is the whole state, else numpy's own tuple."""
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
            np.random.seed(0)  # drops a second normal number that may be left over
            ctypes.memmove(at, state, len(state))
            self._known = state
        else:  # other code has replaced the global generator
            numbers = np.frombuffer(state, np.uint32)
            np.random.set_state(("MT19937", numbers[:-1], int(numbers[-1]), 0, 0.0))


numpys = _Numpys()


@contextmanager
def seeded(*parts: object, device: torch.device | str = "cpu") -> Iterator[None]:
    """Run a block with the global generators seeded, and restore them afterwards.

    Layer initialisation and dropout can only use the global generators.
    """
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
