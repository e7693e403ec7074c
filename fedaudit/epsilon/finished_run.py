"""A finished run whose claims are to be held against something: opened once for all audits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedaudit.errors import RunError, SettingError, unknown
from fedaudit.runtime.code_digest import code_of, differences, harness
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import BITS, device_name, versions


def closed_run(folder: Path | str, kinds: Sequence[str] | None, clients: Sequence[int] | None, lacks: str) -> RunFolder:
    """The run, if it is done and protected; `lacks` says what cannot be examined where nothing was."""
    run = RunFolder(folder)
    if run.record.status != "done":
        raise RunError(f"The run in {folder} is not finished, so its ledger is open. Finish it with --resume.")
    _ = run.transcript  # every part of it is looked at first: an audit of what is left would say too much
    world = run.world
    if not world.policies:
        raise SettingError(f"Nothing that left clients in {folder} was protected: {lacks}")
    for kind in kinds or ():
        if kind not in world.policies:
            raise SettingError(unknown("protected kind of this run", kind, world.policies))
    for k in clients or ():
        if not 0 <= k < world.setting.clients:
            raise SettingError(f"There is no client {k}; the run has {world.setting.clients}, numbered from 0.")
    return run


def other_conditions(run: RunFolder) -> str:
    """Return what was other when the run was made, of all on which its numbers depend; empty if nothing was."""
    record, world, now = run.record, run.world, versions()
    found = [f"{name} {record.versions.get(name)}" for name in BITS if record.versions.get(name) != now.get(name)]
    if record.device != device_name(world.device):
        found.append(f"the device {record.device}")
    if record.harness != harness():
        found.append("another version of fedaudit's code")
    if record.code is None or differences(record.code, code_of(world.method, record.setting)):
        found.append("another version of the method's code")
    return ", ".join(found)
