"""Export of runs to TensorBoard: a log folder each with scalars by round, figures of the whole run, and the setting."""

from __future__ import annotations

import json
from pathlib import Path

from fedaudit.reports.export import Export, fresh_folder, library

EVENTS = "events.out.tfevents."


def write(found: Export, out: str) -> str:
    library("tensorboard", "tensorboard")
    from torch.utils.tensorboard import SummaryWriter  # fedaudit has torch; its writer needs tensorboard

    folder = Path(out)
    fresh_folder(folder, "TensorBoard", _ours)
    for run in found.runs:
        below = folder / run.name
        for old in below.glob(f"{EVENTS}*") if below.is_dir() else ():
            old.unlink()  # from an earlier export: two files of one run would be drawn as one line
        writer = SummaryWriter(str(below))
        last, end = 0, 0.0
        for t, at, values in run.by_round():
            last, end = t, at
            for name, value in values.items():
                writer.add_scalar(name, value, t, walltime=at)
        for name, value in run.whole().items():
            writer.add_scalar(name if "/" in name else f"run/{name}", value, last, walltime=end)
        setting = json.dumps({**run.parameters(), **run.words()}, indent=1)
        writer.add_text("setting", "    " + setting.replace("\n", "\n    "), last, walltime=end)
        writer.close()
    return f"{len(found.runs)} runs in {folder}; tensorboard --logdir {folder} shows them"


def _ours(path: Path) -> bool:
    """Say if the path is a log file, or a folder that holds log files only."""
    if path.is_symlink():
        return False
    if path.is_dir():
        return all(_ours(inside) for inside in path.iterdir())
    return path.name.startswith(EVENTS)
