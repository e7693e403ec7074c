"""The folder of a run: its name, its marker, its lock, its record, its transcript, its published models.

A folder is ours if it holds our marker. In any other folder nothing is overwritten: a folder that holds any of the
names we write is refused. Within our own folders, no symbolic link under such a name is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from fedaudit.errors import RunError
from fedaudit.privacy.noise_key import FILE as KEY_FILE
from fedaudit.privacy.noise_key import read_secret
from fedaudit.registry import read_from
from fedaudit.runtime.checkpoint import Store, write_atomic
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.runtime.world import World, chosen_engine, name_of, world_of
from fedaudit.setting import EXECUTION, ROUNDING, Setting
from fedaudit.wire.codec.packing import file_of
from fedaudit.wire.contents import Contents, check_contents
from fedaudit.wire.message import state_of
from fedaudit.wire.transcript import Transcript


def folder_name(setting: Setting) -> str:
    """Return a folder's name that follows from what its setting computes."""
    return f"{setting.method.replace(':', '_')}-{setting_key(setting)[:12]}"


def default_folder(setting: Setting) -> Path:
    name = re.sub(r"[^\w.+@-]", "_", f"{setting.method}-{setting.dataset}")
    return Path("runs") / f"{name}-{setting_key(setting)[:8]}"


ONLY_SECURE = ("threshold", "update_bound")  # change nothing where sums are plain
SUMS = ("sampling", "aggregate", *ONLY_SECURE)  # a setting's key holds them only where they are not as usual


def setting_key(setting: Setting) -> str:
    """Return a key for what a setting computes. How a run is carried out does not count, unless it changes the
    rounding."""
    kept = setting.model_dump(exclude={*EXECUTION, *ROUNDING}) | rounding(setting)
    if setting.compress is None:
        del kept["compress"]  # so that settings from before there was a choice keep their key
    usual = Setting.model_fields
    for name in SUMS:
        if kept[name] == usual[name].default or (setting.aggregate == "plain" and name in ONLY_SECURE):
            del kept[name]
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def rounding(setting: Setting) -> dict[str, Any]:
    """Return the options of the execution on which the last bits depend: none, unless clients are stacked or steps are
    compiled."""
    stacked = {"engine": "stacked", "together": setting.together} if chosen_engine(setting) == "stacked" else {}
    return stacked | setting.rounding()


STALE = ".stale"  # in the folder of an audit: runs of code that has changed since
MARKER = ".fedaudit"  # says that a folder is ours
_RUN_NAMES = (
    "record.json", "setting.json", "attacks.json", "audits.json", "seal.json", "verified.json", "checkpoint",
    "transcript", "models", "twins",
)  # fmt: skip
_OF_ATTACKS = ("pictures", "scores", "shadows", "active")
NAMES = {
    "run": (*_RUN_NAMES, *_OF_ATTACKS),
    "audit": ("runs", "audit.json", "suite.json", STALE),
}  # what is written, by purpose


def claim(folder: Path, purpose: Literal["run", "audit"]) -> None:
    """Make a folder ours, or refuse. Nothing that somebody else put there is ever removed or overwritten."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file, and a folder is needed. Choose another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    there = [name for name in NAMES[purpose] if os.path.lexists(folder / name)]
    if links := [name for name in (*there, MARKER, ".lock") if (folder / name).is_symlink()]:
        raise RunError(
            f"{folder / links[0]} is a symbolic link, and fedaudit follows none: its target may be somebody else's. "
            "Choose another --out, or make the folder itself a link."
        )
    if (folder / MARKER).is_file() or (there and _left_by_first_version(folder, purpose)):
        kinds = {name: (folder / name).is_dir() for name in there}
        wrong = [name for name, is_folder in kinds.items() if is_folder == name.endswith(".json")]
        if wrong:
            word = "folder" if kinds[wrong[0]] else "file"
            raise RunError(
                f"{folder / wrong[0]} is a {word}, which no {purpose} of fedaudit left. Choose another --out."
            )
    elif there:
        raise RunError(
            f"{folder} holds {', '.join(there)}, which no {purpose} of fedaudit left there (there is no {MARKER}). "
            "Nothing was changed. Choose another --out."
        )
    if not (folder / MARKER).exists():
        write_atomic(folder / MARKER, f"fedaudit {purpose} 1\n".encode())


def clear_unfinished(folder: Path) -> None:
    """Remove what an unfinished run of ours left in its folder, so that it can be used again. Call it with the lock.

    A finished run is refused: nobody means to lose one. So is a record that cannot be read: it may be the result of
    another version. Files that are not ours stay.
    """
    if not (folder / "record.json").exists():
        return
    if read_record(folder).status == "done":
        raise RunError(
            f"{folder} holds a finished run, and --overwrite is for unfinished ones. Choose another --out, or remove "
            "the folder yourself."
        )
    for name in NAMES["run"]:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def ways_on(folder: Path) -> str:
    """Return what can be done with the folder of a run that did not finish."""
    return (
        f"{folder} holds a run that did not finish. --resume goes on from its last whole round, with the same code; "
        "--overwrite starts anew in the same folder."
    )


def claim_for_attacks(folder: Path) -> None:
    """Make a run's folder ours for what attacks write, as `claim` does; refuse if a symbolic link lies anywhere on the
    way."""
    claim(folder, "run")
    for name in _OF_ATTACKS:
        if (folder / name).is_dir() and (links := [p for p in (folder / name).rglob("*") if p.is_symlink()]):
            raise RunError(f"{links[0]} is a symbolic link, and fedaudit follows none. Remove it first.")


def _left_by_first_version(folder: Path, purpose: str) -> bool:
    """Return whether an audit or a run from before there was a marker has left this folder."""
    try:
        if purpose == "audit":
            if (folder / "audit.json").exists():
                return isinstance(json.loads((folder / "audit.json").read_text())["cells"], list)
            inside = [path for path in (folder / "runs").iterdir() if path.is_dir()]
            return bool(inside) and all(_left_by_first_version(path, "run") for path in inside)
        setting = json.loads((folder / "setting.json").read_text())
        known = isinstance(setting, dict) and {"method", "dataset", "partition"} <= setting.keys()
        return known and setting.keys() <= Setting.model_fields.keys()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


BUSY = {"run": "Another process is running in", "audit": "Another audit is at work in"}


@contextlib.contextmanager
def locked(folder: Path, purpose: Literal["run", "audit"] = "run", patience: float = 0.0) -> Iterator[int]:
    """Lock a folder, which is made ours, for one writer; another writer waits for `patience` seconds.

    Yields the lock's file number: processes that inherit it keep the lock until the last of them is gone.
    """
    claim(folder, purpose)
    deadline = time.monotonic() + patience
    with open(folder / ".lock", "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    raise RunError(f"{BUSY[purpose]} {folder}. Wait for it, or choose another --out.") from None
                time.sleep(0.05)
        yield file.fileno()


def save_model(path: Path, model: nn.Module) -> str:
    saving_state(path, state_of(model), name_of(model))()
    return path.name


def saving_state(path: Path, state: Mapping[str, Tensor], arch: str) -> Callable[[], None]:
    """Return a function that saves a state later; nobody may change the state until then."""
    tensors = {name: t.cpu().contiguous() for name, t in state.items()}
    # A link of that name is replaced, not followed; a disk that is full is an OSError, as everywhere.
    return lambda: write_atomic(path, file_of(tensors, {"arch": arch}))


def check_transcript(folder: Path, record: RunRecord) -> Contents | None:
    """Return what the transcript of a finished run holds; raise TranscriptError if any part of it is not as it was.

    Every row and every stored tensor is held against its digest, and all rows together against the record's digest.
    """
    if record.status != "done" or not record.rounds:
        return None
    return check_contents(folder / "transcript", record.rounds[-1].round, kept_rounds(record), record.transcript_digest)


RAISED = re.compile(r"keep_weights was raised after round (\d{1,9})")  # a note in the record


def kept_rounds(record: RunRecord) -> int:
    """Return the number of last rounds whose model states the transcript must hold.

    A run that goes on with a larger keep_weights cannot bring back what was dropped before. Its record has a note.
    """
    kept, last = record.setting.keep_weights, record.rounds[-1].round if record.rounds else 0
    raised = [int(found[1]) for note in record.notes if (found := RAISED.match(note))]
    return min([kept, *(last - t for t in raised)])


class RunFolder:
    """A finished or unfinished run on disk: its record, its transcript, its published models."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.record = read_record(self.folder)

    @cached_property
    def transcript(self) -> Transcript:
        check_transcript(self.folder, self.record)
        return Transcript(self.folder / "transcript")

    @property
    def world(self) -> World:
        with read_from(self.folder):  # a file names the method, not the user
            return world_of(self.record.setting.model_dump_json())

    @property
    def secret(self) -> bytes:
        """Return the secret from which all noise and masks follow; empty if there are none."""
        setting = self.record.setting
        return read_secret(self.folder / KEY_FILE) if setting.privacy or setting.aggregate == "secure" else b""

    def client_state(self, k: int) -> bytes | None:
        """Return client k's state after the last whole round; None if it was never asked."""
        store = Store(self.folder / "checkpoint")
        store.peek()
        state = store.client(k)
        return None if state is None else bytes(state)
