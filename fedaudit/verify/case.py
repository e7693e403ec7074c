"""A run folder under examination: its files as they are, and what this machine can compute from them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedaudit.errors import FedauditError
from fedaudit.privacy.update_policy import UPDATES
from fedaudit.progress import Watch, unwatched
from fedaudit.registry import find, read_from
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.code_digest import code_of_setting, differences, harness, is_same
from fedaudit.runtime.folder import RunFolder, kept_rounds
from fedaudit.runtime.run_record import BITS, RunRecord, device_name, versions
from fedaudit.runtime.world import World, chosen_engine, world_of
from fedaudit.verify.finding import Findings
from fedaudit.verify.sum_rows import SumRows, sums_of
from fedaudit.wire.contents import Contents, look_through
from fedaudit.wire.transcript import Transcript

MOST = 16  # resumptions of a run that are tried
RECORD, HEAD = "record.json", "checkpoint/HEAD.json"


@dataclass
class Case:
    """One run folder, and the findings about it."""

    folder: Path
    record: RunRecord
    found: Findings = field(default_factory=Findings)
    data_dir: str | None = None  # where the reviewer keeps data sets; None: where the setting says
    watch: Watch = unwatched

    @cached_property
    def run(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def transcript(self) -> Transcript:
        """Return the transcript unchecked: `contents` has what is wrong with it."""
        return Transcript(self.folder / "transcript")

    @cached_property
    def contents(self) -> Contents:
        rounds = self.record.rounds[-1].round if self.record.rounds else 0
        return look_through(self.folder / "transcript", rounds, kept_rounds(self.record))

    @property
    def whole(self) -> bool:
        """Return whether the transcript is there and undamaged, so that something may be computed from it."""
        there = (self.folder / "transcript" / "index.jsonl").is_file()
        return there and not self.contents.damage and self.contents.digest == self.record.transcript_digest

    @cached_property
    def sums(self) -> dict[tuple[int, int], SumRows]:
        """Return the sums of the transcript by round and ask; none where sums are plain and without noise."""
        setting = self.record.setting
        if setting.aggregate == "plain" and UPDATES not in setting.privacy:
            return {}
        return sums_of(self.transcript)

    @cached_property
    def _opened(self) -> tuple[World | None, str]:
        """Return the run's world, or why this machine cannot build it."""
        setting = self.record.setting
        here: dict[str, Any] = {"engine": "serial", "isolate": False}
        if self.data_dir is not None:
            here["data_dir"] = self.data_dir
        if setting.device.startswith("cuda") and not torch.cuda.is_available():
            here["device"] = "cpu"
        try:
            with read_from(self.folder):
                return world_of(setting.model_copy(update=here).model_dump_json()), ""
        except FedauditError as e:
            return None, str(e)
        except Exception as e:  # noqa: BLE001 (the folder is somebody else's: it may ask for anything)
            return None, f"{type(e).__name__}: {e}"

    @property
    def world(self) -> World | None:
        return self._opened[0]

    @property
    def why_no_world(self) -> str:
        return f"the run's data or code is not here: {self._opened[1]}"

    @cached_property
    def other_code(self) -> str:
        """Return in words how the code here differs from the code that ran; empty if it is the same."""
        if self.record.code is None:
            return "the record does not say which code ran"
        try:
            with read_from(self.folder):
                now = code_of_setting(self.record.setting if self.world is None else self.world.setting)
        except FedauditError as e:
            return self.why_no_world if self.world is None else f"its code is not here: {e}"
        changed = differences(self.record.code, now)
        if not is_same(self.record.harness, harness()):
            changed.append("fedaudit's own code is another here")
        return "; ".join(changed)

    @cached_property
    def other_machine(self) -> str:
        """Return in words why bits may differ here from those of the run; empty if they must be equal."""
        then, now = self.record.versions, versions()
        apart = [
            f"{name} was {then.get(name, 'not recorded')}, is {now.get(name, 'none')}"
            for name in BITS
            if then.get(name) != now.get(name)
        ]
        if self.world is not None and (device := device_name(self.world.device)) != self.record.device:
            apart.append(f"the device was {self.record.device}, is {device}")
        if chosen_engine(self.record.setting) == "stacked":
            apart.append("the run stacked its clients, which rounds otherwise")
        if not self.record.setting.deterministic:
            apart.append("the run allowed operations whose results vary")
        if any(note.startswith("resumed") for note in self.record.notes):
            apart.append("the run was resumed under other conditions")
        return "; ".join(apart)

    @cached_property
    def head(self) -> dict[str, Any] | None:
        """Return what the last checkpoint holds; None if there is none or it cannot be read."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            head = json.loads((self.folder / "checkpoint" / "HEAD.json").read_text())
            return head if isinstance(head, dict) else None
        return None

    @property
    def attempts(self) -> int:
        """Return how many numbers the run may have drawn its noise under: one, and one for each resumption whose bits
        may differ."""
        found = (self.head or {}).get("attempt", 0)
        return 1 + (min(max(found, 0), MOST) if isinstance(found, int) else 0)

    @cached_property
    def store(self) -> Store | None:
        """Return the checkpoint, opened for reading; None if there is none or it is damaged."""
        store = Store(self.folder / "checkpoint")
        try:
            return store if store.peek() is not None else None
        except FedauditError:
            return None

    @cached_property
    def foreign_transport(self) -> bool:
        """Return whether another transport than ours carried the messages, and another server decided the rounds."""
        try:
            with read_from(self.folder):
                return bool(find(self.record.setting.method).foreign_transport)  # type: ignore[attr-defined]
        except FedauditError:
            return False
