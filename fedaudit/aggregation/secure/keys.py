"""Keys of one client for one secure sum: X25519 agreements, HKDF, AES-CTR as the generator of masks, AES-GCM.

Everything follows from one secret of 32 bytes, so that a client needs no memory between the phases: the same secret
gives the same keys. A secret serves one sum; a second sum under it would repeat its masks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from fedaudit.errors import RunError
from fedaudit.extras import install

CHUNK = 1 << 17  # bytes of a mask that are made at a time: they are added while they are in the processor's cache
_ZEROS = bytes(CHUNK)
SIZE = 32  # bytes of a key

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError:
    HKDF: Any = None  # type: ignore[no-redef]


def check_installed() -> None:
    """Raise unless the library that computes keys and masks is there."""
    if HKDF is None:
        raise RunError(
            f"Secure aggregation needs the library `cryptography`, which is not installed: {install('cryptography')}."
        )


def derived(secret: bytes, purpose: str, size: int = SIZE) -> bytes:
    """Return bytes that follow from a secret, for one purpose (HKDF with SHA-256)."""
    return HKDF(algorithm=hashes.SHA256(), length=size, salt=None, info=f"fedaudit/{purpose}".encode()).derive(secret)


class KeyPair:
    """An X25519 key pair that follows from a secret."""

    def __init__(self, private: bytes):
        self.private = private
        self._key: Any = X25519PrivateKey.from_private_bytes(private)

    @cached_property
    def public(self) -> bytes:
        return bytes(self._key.public_key().public_bytes_raw())

    def agree(self, public: bytes, purpose: str) -> bytes:
        """Return the key that both owners of two key pairs can compute, for one purpose."""
        try:
            return derived(self._key.exchange(X25519PublicKey.from_public_bytes(public)), purpose)
        except ValueError:
            raise RunError("A public key is not a point of the curve X25519. Its client must make a new one.") from None


def add_mask(vector: np.ndarray, key: bytes, sign: int) -> None:
    """Add the mask of a key to a vector of 32-bit words, in place; with sign -1, subtract it.

    The mask is the key stream of AES-256 in counter mode, read as little-endian words. A key gives one mask.
    """
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    room: Any = np.empty(CHUNK + 16, np.uint8)
    words = CHUNK // 4
    act = np.add if sign > 0 else np.subtract
    for begin in range(0, len(vector), words):
        part = vector[begin : begin + words]
        size = 4 * len(part)
        stream.update_into(_ZEROS[:size] if size < CHUNK else _ZEROS, room)
        act(part, room[:size].view("<u4"), out=part)


def stream(key: bytes, size: int) -> bytes:
    """Return so many bytes of a key's stream. A key gives one stream or one mask."""
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(size))


def seal(key: bytes, sender: int, text: bytes) -> bytes:
    """Encrypt and authenticate what one client sends another. A key seals one text for each direction."""
    return AESGCM(key).encrypt(sender.to_bytes(12, "little"), text, None)


def opened(key: bytes, sender: int, sealed: bytes) -> bytes:
    try:
        return AESGCM(key).decrypt(sender.to_bytes(12, "little"), sealed, None)
    except InvalidTag:
        raise RunError(
            f"The share that client {sender} sealed was changed on its way: it does not open. The sum is given up."
        ) from None
