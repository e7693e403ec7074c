"""Export of runs to Weights & Biases, offline: a folder each under `out`/wandb, which `wandb sync` can send."""

from __future__ import annotations

from pathlib import Path

from fedaudit.errors import RunError
from fedaudit.reports.export import Export, library


def write(found: Export, out: str) -> str:
    wandb = library("wandb", "wandb")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file, but wandb needs a folder. Choose another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    alone = wandb.run is None
    for run in found.runs:
        settings = wandb.Settings(
            mode="offline", silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True,
            x_disable_meta=True,
        )  # fmt: skip
        config = {**run.parameters(), **{f"fedaudit.{key}": text for key, text in run.words().items()}}
        logged = wandb.init(
            project=found.project, name=run.name, dir=str(folder), config=config, settings=settings,
            reinit="create_new", group=run.row.method,
        )  # fmt: skip
        for t, _, values in run.by_round():
            logged.log(values, step=t)
        logged.summary.update(run.whole())
        logged.finish(exit_code=0 if run.row.status == "done" else 1)
    if alone:  # wandb's own process writes late, until it is told to end; a run of the caller's must not be ended
        wandb.teardown()
    return f"{len(found.runs)} runs in {folder / 'wandb'}; wandb sync {folder / 'wandb'}/offline-run-* sends them"
