"""The folder of a run: its name, its lock, its record, its transcript, its published models."""

from __future__ import annotations

import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from fedaudit.errors import RunError
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.run_record import (
    read_record,
)
from fedaudit.runtime.world import World, chosen_engine, world_of
from fedaudit.setting import EXECUTION, ROUNDING, Setting
from fedaudit.wire.message import state_of
from fedaudit.wire.transcript import Transcript


def folder_name(setting: Setting) -> str:
    """A folder's name that follows from what its setting computes."""
    return f"{setting.method.replace(':', '_')}-{setting_key(setting)[:12]}"


def default_folder(setting: Setting) -> Path:
    name = f"{setting.method}-{setting.dataset}".replace("/", "_").replace(":", "_")
    return Path("runs") / f"{name}-{setting_key(setting)[:8]}"


def setting_key(setting: Setting) -> str:
    """A name for what a setting computes, whatever carries it out; but stacks of clients round otherwise."""
    kept = setting.model_dump(exclude={*EXECUTION, *ROUNDING}) | rounding(setting)
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16).hexdigest()


def rounding(setting: Setting) -> dict[str, Any]:
    """What of the execution the last bits depend on: nothing, unless clients are stacked or steps are compiled."""
    stacked = {"engine": "stacked", "together": setting.together} if chosen_engine(setting) == "stacked" else {}
    return stacked | setting.rounding()


class locked:
    """One writer per run folder."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def __enter__(self) -> None:
        self.file = open(self.folder / ".lock", "w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.close()
            raise RunError(
                f"Another process is running in {self.folder}. Wait for it, or choose another --out."
            ) from None

    def __exit__(self, *_: object) -> None:
        self.file.close()


def save_model(path: Path, model: nn.Module) -> str:
    tensors = {name: t.cpu().contiguous() for name, t in state_of(model).items()}
    arch = getattr(model, "arch", type(model).__name__)
    safetensors.torch.save_file(tensors, path, metadata={"arch": arch})
    return path.name


class RunFolder:
    """A finished or unfinished run on disk: its record, its transcript, its published models."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.record = read_record(self.folder)

    @property
    def transcript(self) -> Transcript:
        return Transcript(self.folder / "transcript")

    @property
    def world(self) -> World:
        return world_of(self.record.setting.model_dump_json())

    def client_state(self, k: int) -> bytes | None:
        """Client k's state after the last whole round; None if it was never asked."""
        store = Store(self.folder / "checkpoint")
        store.peek()
        return store.client(k)
