"""Keeps the verdict on a method's declarations, and the digest of the source that was tested, beside the method's code.

`fedaudit check-method NAME --write` leaves its verdict in `fedaudit-tested.json` in the folder of the method's module,
with the digest of the source that was tested. fedaudit's own methods bring theirs along. An entry counts for that very
source and no other. It is a note for honest people, not a seal: whoever can edit the code can edit the note, and the
entry's own digest only reveals a slip.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from fedaudit.errors import RunError
from fedaudit.registry import find, names, public_module
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.code_digest import source_of_method
from fedaudit.runtime.method import Method
from fedaudit.runtime.run_record import Declarations
from fedaudit.stored_model import StoredModel

NAME = "fedaudit-tested.json"


class TestedMethod(StoredModel):
    """The verdict on one method."""

    source: str
    held: bool
    fields: dict[str, str]  # by "Message.field": the verdict
    fedaudit: str
    settings: dict[str, Any] = Field(default_factory=dict)
    twin_sets: int = 0  # how many sets of other records every client was compared with, in a protected run
    digest: str = ""  # the digest of all other fields

    def sealed(self) -> TestedMethod:
        return self.model_copy(update={"digest": self._digest()})

    @property
    def whole(self) -> bool:
        return self.digest == self._digest()

    def _digest(self) -> str:
        # An entry from before there were twins has none of their fields, and keeps its digest.
        left_out = {"digest"} if self.twin_sets else {"digest", "twin_sets"}
        text = json.dumps(self.model_dump(mode="json", exclude=left_out), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def file_of(cls: type) -> Path | None:
    """Return where the verdict on a method is kept; None for code that lies in no file."""
    origin = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if not origin:
        return None
    inside = public_module(cls.__module__) != cls.__module__  # of this package: one file above the families' folders
    return (Path(origin).parents[1] if inside else Path(origin).parent) / NAME


def key_of(cls: type) -> str:
    return f"{public_module(cls.__module__)}:{cls.__qualname__}"


def read(path: Path) -> dict[str, TestedMethod]:
    """Return the entries of a file, without those that are not as they were written."""
    try:
        at = path.stat()
    except OSError:
        return {}
    return dict(_entries(path, at.st_mtime_ns, at.st_size, at.st_ino))


@functools.lru_cache(maxsize=8)
def _entries(path: Path, *_: int) -> dict[str, TestedMethod]:
    """Return the entries of one version of the file, cached: checking them takes as long as a task of a small run."""
    try:
        raw = json.loads(path.read_text())
        found = {key: TestedMethod.model_validate(value) for key, value in raw["methods"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError):
        return {}
    return {key: entry for key, entry in found.items() if entry.whole}


def write(cls: type, entry: TestedMethod) -> Path:
    """Keep a verdict; those of other methods in the same folder stay."""
    path = file_of(cls)
    if path is None:
        raise RunError(
            f"{key_of(cls)} is not in a file, so its verdict cannot be kept beside it. Put it into a module."
        )
    entries = {**read(path), key_of(cls): entry.sealed()}
    plain = {key: entries[key].model_dump(mode="json") for key in sorted(entries)}
    write_atomic(path, (json.dumps({"methods": plain}, indent=1) + "\n").encode())
    return path


def chosen(methods: Sequence[str]) -> list[str]:
    """Return the methods that a command names; `all`: every registered one; `edited`: those not tested as they are."""
    if list(methods) == ["all"]:
        return names("methods")
    if list(methods) == ["edited"]:
        return [name for name in names("methods") if declarations_of(find(name).make({})).tested != "held"]  # type: ignore[attr-defined]
    return list(methods)


def declarations_of(method: Method) -> Declarations:
    """Return what is known of the running code's declarations."""
    source = source_of_method(method)
    path = file_of(type(method))
    entry = read(path).get(key_of(type(method))) if path is not None else None
    if entry is None:
        return Declarations(source=source, tested="never")
    verdict = ("held" if entry.held else "broken") if entry.source == source else "another source"
    return Declarations(
        source=source,
        tested=verdict,  # type: ignore[arg-type]
        tested_source=entry.source,
        fedaudit=entry.fedaudit,
        settings=entry.settings,
        twin_sets=entry.twin_sets,
    )
