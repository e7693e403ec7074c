"""The key from which a task's noise is drawn. No method can name it.

A run has a secret, which is drawn from the system and kept in the run folder. Each task gets a key of its own, which
the driver makes from the secret, so that no task holds the secret itself. Samples and noise of DP-SGD and the noise on
fields follow from that key. The key is no part of the client, of its site or of its world, and it gives each generator
once: whoever draws the noise of a release before the release is made stops the release.

Other generators follow from the run's seed, see `fedaudit.rng`. The two name spaces have nothing in common.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import torch

from fedaudit import rng
from fedaudit.errors import PrivacyError, RunError

FILE = "noise.key"  # in the run folder
SIZE = 32  # bytes of a secret


def fresh_secret() -> bytes:
    """Return a new secret from the system's entropy."""
    return os.urandom(SIZE)


def read_secret(path: Path) -> bytes:
    """Return the secret that a file holds. Raise RunError if the file holds none."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as e:
        raise RunError(
            f"{path} cannot be read ({type(e).__name__}), and it holds the key of the run's noise. Put it back, or "
            "start the run anew in another folder."
        ) from None
    if not re.fullmatch(rf"[0-9a-f]{{{2 * SIZE}}}", text):
        raise RunError(f"{path} is not a key: it must hold {2 * SIZE} digits from 0 to f. Put the run's own file back.")
    return bytes.fromhex(text)


def write_secret(path: Path, secret: bytes) -> None:
    """Keep a secret in a new file that only its owner can read."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as opened:
        opened.write(f"{secret.hex()}\n")


def derived(secret: bytes, *names: object) -> bytes:
    """Return a key for these names. Each name goes in with its length, so that no two lists of names are alike."""
    parts = [str(name).encode() for name in names]
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(text, key=secret, digest_size=SIZE).digest()


def task_key(secret: bytes, k: int, t: int, ask: int, attempt: int) -> bytes:
    """Return the key of one task's noise."""
    return derived(secret, "task", k, t, ask, attempt)


class NoiseKey:
    """Gives the generators of one task's noise, each of them once."""

    def __init__(self, key: bytes, *, once: bool = True):
        """Take the task's key. An audit that repeats the task draws as often as it likes (`once` is False)."""
        self._key, self._once = key, once
        self._given: set[tuple[str, ...]] = set()

    def generator(self, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
        """Return the generator of these names. Raise PrivacyError if it was given before."""
        if not self._key:
            raise PrivacyError(
                "This task has no key for its noise. Run it by fedaudit.run, or give Task(noise=...) a key."
            )
        name = tuple(map(str, names))
        if self._once and name in self._given:
            raise PrivacyError(
                f"The noise of {', '.join(name)} was drawn before in this task: the same noise on two values hides "
                "neither. Protect each value once."
            )
        self._given.add(name)
        seed = int.from_bytes(derived(self._key, *name)[:8], "little") >> 1
        return torch.Generator(device).manual_seed(seed)


Key = tuple[Any, ...]  # names of a generator; one of a run's task begins with its NoiseKey


def noise_generator(key: Key, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a generator for noise: of the task's key if the names begin with one, else of the names alone."""
    if key and hasattr(key[0], "generator"):
        return key[0].generator(*key[1:], *names, device=device)
    return rng.generator(*key, *names, device=device)
