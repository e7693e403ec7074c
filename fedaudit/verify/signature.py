"""Signatures over a run's seal: Ed25519, by the library `cryptography`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedaudit.errors import RunError, SettingError
from fedaudit.extras import install
from fedaudit.runtime.seal import Seal, Signature

HINT = f"Signing needs the package cryptography: {install('cryptography')}."


def _library() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SettingError(HINT) from None
    return serialization, ed25519


def new_key(path: Path) -> Path:
    """Write a new private key to a file that only its owner can read, and its public key beside it; return that."""
    serialization, ed25519 = _library()
    public = path.with_name(f"{path.name}.pub")
    for file in (path, public):
        if file.exists():
            raise SettingError(f"{file} is there already, and a key is not overwritten. Choose another name.")
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(pem)
    public.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return public


def signed(seal: Seal, key_file: Path) -> Seal:
    """Return the seal with a signature by a private key in PEM."""
    serialization, ed25519 = _library()
    key = _loaded(key_file, lambda data: serialization.load_pem_private_key(data, None), "private")
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SettingError(f"{key_file} is not an Ed25519 private key. `fedaudit seal RUN --new-key FILE` makes one.")
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    signature = key.sign(_message(seal))
    return seal.model_copy(update={"signature": Signature(public_key=raw.hex(), signature=signature.hex())})


def check_signature(seal: Seal, key_file: Path | None) -> str | None:
    """Return why a seal's signature does not hold; None if it does.

    With a key file (a public key, or a private one, in PEM) it must also be a signature by that key.
    """
    _, ed25519 = _library()
    if seal.signature is None:
        return "it is not signed"
    try:
        raw = bytes.fromhex(seal.signature.public_key)
        mine = ed25519.Ed25519PublicKey.from_public_bytes(raw)
        mine.verify(bytes.fromhex(seal.signature.signature), _message(seal))
    except Exception as e:  # noqa: BLE001 (InvalidSignature has no other base, and the numbers may be anything)
        return f"the signature does not fit the seal ({type(e).__name__})"
    if key_file is not None:
        wanted = _public(key_file)
        if wanted != raw:
            return f"it is signed by another key, {raw.hex()[:16]}..., than that of {key_file}"
    return None


def _public(key_file: Path) -> bytes:
    serialization, ed25519 = _library()

    def load(data: bytes) -> Any:
        if b"PRIVATE KEY" in data:
            return serialization.load_pem_private_key(data, None).public_key()
        return serialization.load_pem_public_key(data)

    key = _loaded(key_file, load, "public")
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise SettingError(f"{key_file} is not an Ed25519 key. Give the public key of the author, in PEM.")
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def _loaded(path: Path, load: Any, what: str) -> Any:
    try:
        return load(path.read_bytes())
    except OSError as e:
        raise SettingError(f"{path} cannot be read: {e.strerror}. Give the file of a {what} key.") from None
    except (ValueError, TypeError) as e:
        raise SettingError(f"{path} is not a {what} key in PEM: {str(e)[:120]}.") from None
    except Exception as e:  # noqa: BLE001 (the library's own errors, such as UnsupportedAlgorithm)
        raise RunError(f"{path} cannot be used as a {what} key: {type(e).__name__}.") from None


def _message(seal: Seal) -> bytes:
    return f"fedaudit seal {seal.seal_schema} {seal.digest}".encode()
