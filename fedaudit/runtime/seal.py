"""The seal of a run folder: a digest of each of its files, and one digest over all of them, in `seal.json`.

A run is sealed when it ends, and again after attacks and audits of epsilon have added their results. Editing, removing
or adding a file breaks the seal, which says which file it was. The seal by itself is not a proof: whoever edits a file
can seal the folder again. A signature over it is (`fedaudit seal RUN --key FILE`, see fedaudit.verify.signature). A
signed seal is not replaced by anything but another `fedaudit seal`.

The key of a run's noise is sealed by its digest, which tells nothing of it. Whoever has the key can subtract the noise,
so a folder may be handed on without it: a key that is missing does not break the seal, and another key does.

Caches, locks and logs are not sealed. Nor is `verified.json`, in which a reviewer's check leaves its note.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from fedaudit.errors import RunError
from fedaudit.privacy.noise_key import FILE as KEY
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.stored_model import StoredModel

NAME = "seal.json"
FILES = ("record.json", "setting.json", "attacks.json", "audits.json", KEY)
FOLDERS = ("transcript", "models", "scores", "pictures", "checkpoint")
CHUNK = 1 << 20
SEVERAL = 1 << 26  # bytes of a folder from which several files are read at a time
READERS = 8  # the most files that are read at a time


class Signature(StoredModel):
    """A signature over the seal's digest, and the public key that it was made with, both as hexadecimal numbers."""

    scheme: Literal["ed25519"] = "ed25519"
    public_key: str
    signature: str


class Seal(StoredModel):
    """The digests of a run's files. `digest` is over all of them, in the order of their names."""

    seal_schema: Literal[1] = 1
    digest: str
    files: dict[str, str]  # by path within the run folder
    signature: Signature | None = None

    @classmethod
    def of(cls, folder: Path) -> Seal:
        """Return the seal of a run folder as it is now, unsigned. A key that was not handed on counts as it was."""
        files = _digests(dict(_sealed(folder)))
        if KEY not in files and (before := _key_before(folder)) is not None:
            files[KEY] = before
        return cls(digest=digest_over(files), files=dict(sorted(files.items())))

    def broken_by(self, now: Seal) -> list[str]:
        """Return the files that are not as they were sealed. A seal from before keys were sealed does not know them."""
        names = sorted(self.files.keys() | now.files.keys())
        known = [name for name in names if name in self.files or name != KEY]
        return [name for name in known if self.files.get(name) != now.files.get(name)]

    def broken_text(self, now: Seal) -> str:
        """Return in words by which files the seal is broken, or by its own digest; empty if it is whole."""
        broken = self.broken_by(now)
        if not broken:
            return "" if self.digest == digest_over(self.files) else f"its digest is not that of the files in {NAME}"
        more = f" and {len(broken) - 3} more file{'s' * (len(broken) > 4)}" if len(broken) > 3 else ""
        return f"not as it was sealed: {', '.join(broken[:3])}{more}"


def digest_over(files: dict[str, str]) -> str:
    """Return one digest over files' names and digests."""
    return hashlib.blake2b(json.dumps(sorted(files.items())).encode(), digest_size=32).hexdigest()


def _sealed(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield what a seal covers: the name within the folder, and the path. Temporary files are left out."""
    for name in FILES:
        if (folder / name).is_file():
            yield name, folder / name
    for inner in FOLDERS:
        for path in (folder / inner).rglob("*"):
            if path.is_file() and not path.is_symlink() and not path.name.endswith(".tmp"):
                yield path.relative_to(folder).as_posix(), path


def _key_before(folder: Path) -> str | None:
    """Return the digest of the key in the seal that the folder has."""
    try:
        seal = read_seal(folder)
    except RunError:
        return None
    return None if seal is None else seal.files.get(KEY)


def _digests(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return each file's digest. Of a large folder, as many files are read at a time as there are processors."""
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    if sum(sizes.values()) < SEVERAL or len(paths) < 2:
        return {name: _digest(path) for name, path in paths.items()}
    largest_first = sorted(paths, key=lambda name: -sizes[name])
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:  # digests are computed outside Python's lock
        return dict(zip(largest_first, pool.map(_digest, (paths[name] for name in largest_first)), strict=True))


def _digest(path: Path) -> str:
    whole = hashlib.blake2b(digest_size=32)
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            whole.update(data)
    return whole.hexdigest()


def read_seal(folder: Path) -> Seal | None:
    """Return a run folder's seal; None if it has none. Raise RunError if the file does not hold one."""
    path = folder / NAME
    try:
        return Seal.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValidationError, ValueError, OSError) as e:
        raise RunError(f"{path} does not hold a seal: {str(e)[:200]}. `fedaudit seal {folder}` makes one.") from None


def write_seal(folder: Path, seal: Seal) -> None:
    write_atomic(folder / NAME, seal.model_dump_json(indent=1).encode())


def unseal(folder: Path) -> None:
    """Remove an unsigned seal before something is added to the folder: a kill on the way must not leave a broken one.

    A signed seal stays, and from then on it says what was changed after the signature.
    """
    if (folder / NAME).exists() and not _signed(folder):
        (folder / NAME).unlink()


def seal_again(folder: Path) -> None:
    """Seal a folder after something was added to it, unless its seal is signed. A record by itself is not sealed."""
    if (folder / "transcript").is_dir() and not _signed(folder):
        write_seal(folder, Seal.of(folder))


def _signed(folder: Path) -> bool:
    try:
        seal = read_seal(folder)
    except RunError:
        return False
    return seal is not None and seal.signature is not None
