"""Export of runs to MLflow: an experiment with parameters, metrics by round, tags, and each record as an artifact.

`out` is a folder, or the address of a store that MLflow knows (`sqlite:///mlflow.db`, `http://...`). A run that the
experiment holds already, by the digest of its transcript and its folder's name, is not written again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedaudit.errors import RunError
from fedaudit.reports.export import Export, Tracked, library, started

LONGEST = 5000  # the most characters in a tag's or parameter's value
IDENTITY = ("fedaudit.run", "fedaudit.digest")


def write(found: Export, out: str) -> str:
    mlflow = library("mlflow", "mlflow")
    from mlflow.exceptions import MlflowException

    where = out
    if "://" not in out:
        if Path(out).exists() and not Path(out).is_dir():
            raise RunError(f"{out} is a file, but MLflow's store needs a folder. Choose another --out.")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user asked for a folder
        where = Path(out).resolve().as_uri()
    try:
        client = mlflow.MlflowClient(tracking_uri=where)
        known = client.get_experiment_by_name(found.project)
        experiment = client.create_experiment(found.project) if known is None else known.experiment_id
        there = {tuple(run.data.tags.get(key) for key in IDENTITY) for run in client.search_runs([experiment])}
        new = [run for run in found.runs if (run.name, run.row.digest) not in there]
        for run in new:
            _write_run(client, experiment, run)
    except MlflowException as e:
        raise RunError(f"MLflow refuses {out}: {str(e)[:300]}") from e
    kept = len(found.runs) - len(new)
    return f"{len(new)} runs in the experiment {found.project} of {out}" + (
        f"; {kept} were there already" if kept else ""
    )


def _write_run(client: Any, experiment: str, run: Tracked) -> None:
    from mlflow.entities import Metric, Param, RunTag

    begun = started(run.record)
    made = client.create_run(experiment, run_name=run.name, start_time=int(1000 * begun))
    metrics, last, end = [], 0, begun
    for t, at, values in run.by_round():
        last, end = t, at
        metrics += [Metric(key, value, int(1000 * at), t) for key, value in values.items()]
    # The figures of the whole run come last: they are what a list of runs shows.
    metrics += [Metric(_named(key), value, int(1000 * end), last) for key, value in run.whole().items()]
    tags = {**{f"fedaudit.{key}": text for key, text in run.words().items()}, "fedaudit.run": run.name}
    number = made.info.run_id
    for begin in range(0, len(metrics), 1000):  # a store takes at most so many at a time
        client.log_batch(number, metrics=metrics[begin : begin + 1000])
    parameters = list(run.parameters().items())
    for begin in range(0, len(parameters), 100):
        client.log_batch(number, params=[Param(_named(k), v[:LONGEST]) for k, v in parameters[begin : begin + 100]])
    client.log_batch(number, tags=[RunTag(_named(key), text[:LONGEST]) for key, text in tags.items()])
    client.log_artifact(number, str(run.run.folder / "record.json"))
    client.set_terminated(number, "FINISHED" if run.row.status == "done" else "FAILED", end_time=int(1000 * end))


def _named(key: str) -> str:
    """Return the key as a name that MLflow takes: letters, digits, and few signs."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in key)
