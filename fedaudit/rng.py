"""Randomness: named generators that are derived, never carried.

Every generator follows from (run seed, party, round, ask, purpose), so a task gives the same bits wherever and
whenever it runs, and a resumed run needs no saved generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_of(*parts: object) -> int:
    """A 63-bit seed for a path such as (run seed, "client 3", 7, 0, "noise")."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: object, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed_of(*parts))


@contextmanager
def seeded(*parts: object, device: torch.device | str = "cpu") -> Iterator[None]:
    """Run a block inside a seeded fork of the global generators: layer initialisation and dropout know no other."""
    seed = seed_of(*parts)
    device = torch.device(device)
    devices = (
        [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    )
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for index in devices:
            torch.cuda.default_generators[index].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
