"""Export of runs to MLflow: an experiment with parameters, metrics by round, tags, and each record as an artifact.

`out` is a folder, or the address of a store that MLflow knows (`sqlite:///mlflow.db`, `http://...`). A folder gets a
database, `mlflow.db`, and the artifacts beside it: MLflow 3 refuses stores that are folders of files. A run that the
experiment holds already, by the digest of its transcript and its folder's name, is not written again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fedaudit.errors import RunError
from fedaudit.reports.export import Export, Tracked, library, started

DATABASE = "mlflow.db"
LONGEST = 5000  # the most characters in a tag's or parameter's value
IDENTITY = ("fedaudit.run", "fedaudit.digest")


def write(found: Export, out: str) -> str:
    mlflow = library("mlflow", "mlflow")
    from mlflow.exceptions import MlflowException

    where, artifacts = _store(out)
    try:
        client = mlflow.MlflowClient(tracking_uri=where)
        known = client.get_experiment_by_name(found.project)
        if known is None:
            experiment = client.create_experiment(found.project, artifact_location=artifacts)
        else:
            experiment = known.experiment_id
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


def _store(out: str) -> tuple[str, str | None]:
    """Return the store's address and the place for artifacts; None leaves that to the store."""
    if "://" in out:
        return out, None
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{out} is a file, but MLflow's store needs a folder. Choose another --out.")
    if not (folder / DATABASE).exists() and any(folder.glob("*/meta.yaml")):
        raise RunError(
            f"{out} holds a store of files, which MLflow 3 refuses. Choose another --out for a store with a database."
        )
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger("alembic").setLevel(logging.WARNING)  # it tells of every table that it makes
    return f"sqlite:///{(folder / DATABASE).resolve()}", (folder / "artifacts").resolve().as_uri()


def _write_run(client: Any, experiment: str, run: Tracked) -> None:
    from mlflow.entities import Metric, Param, RunTag

    begun = started(run.record)
    made = client.create_run(experiment, run_name=run.name, start_time=int(1000 * begun))
    metrics, last, end, of_last = [], 0, begun, dict[str, float]()
    for t, at, values in run.by_round():
        last, end, of_last = t, at, values
        metrics += [Metric(key, value, int(1000 * at), t) for key, value in values.items()]
    # The figures of the whole run come last: they are what a list of runs shows. No figure has two values of one step.
    whole = {f"run/{key}" if key in of_last else key: v for key, v in run.whole().items() if of_last.get(key) != v}
    metrics += [Metric(_named(key), value, int(1000 * end), last) for key, value in whole.items()]
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
