"""Every output in which a metric can be read, each with a function that reads it back: folder, metric, scratch."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from wandb_file import records_of

from fedaudit.cli.listing import summary
from fedaudit.gates.record_gates import limited
from fedaudit.metrics.metric import Metric
from fedaudit.reports import compare
from fedaudit.reports.export import export
from fedaudit.reports.report import write_report
from fedaudit.reports.run_tables import tables_of
from fedaudit.runtime.run_record import read_record
from fedaudit.suite.budgets import check_runs

Reader = Callable[[Path, Metric, Path], float]
ALLOWED = 1000


def number(text: str) -> float:
    """The number that a text begins with, in the way of any output to write infinity."""
    if re.match(r"\$?\\infty|∞|inf|1e999", text, re.IGNORECASE):
        return math.inf
    return float(re.match(r"-?[\d.]+(e[+-]?\d+)?", text)[0])


def _record(folder: Path):
    return next(read_record(path.parent) for path in sorted(folder.glob("**/record.json")))


def _budget(folder: Path, metric: Metric, scratch: Path) -> float:
    (scratch / "budgets.toml").write_text(f'[[budget]]\nmetric = "{metric.in_budget}"\nmax = {ALLOWED}\n')
    [outcome] = check_runs([folder], scratch / "budgets.toml")
    assert outcome.kept == (outcome.value <= ALLOWED)
    assert outcome.row()["measured"] == f"{outcome.value:.4g}"
    return outcome.value


def _mark(folder: Path, metric: Metric, scratch: Path) -> float:
    found = limited(_record(folder), metric.in_budget, max=ALLOWED)
    value = number(re.search(rf" {metric.in_budget} is (\S+),", found.message)[1])
    assert found.told == ("kept" if value <= ALLOWED else "broken")
    return value


def _written(folder: Path, scratch: Path, form: str) -> str:
    return write_report(folder, [form], scratch)[0].read_text()


def _csv(folder: Path, metric: Metric, scratch: Path) -> float:
    [line] = csv.DictReader(io.StringIO(_written(folder, scratch, "csv")))
    return number(line[metric.key])


def _json(folder: Path, metric: Metric, scratch: Path) -> float:
    document = json.loads(_written(folder, scratch, "json"))
    assert metric.title in [column["title"] for column in document["columns"]]
    return number(str(document["rows"][0]["cells"][metric.key]["value"]))


def _markdown(folder: Path, metric: Metric, scratch: Path) -> float:
    head, _, line = [t for t in _written(folder, scratch, "md").splitlines() if t.startswith("|")]
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    return number(cells.get(metric.title) or cells[f"{metric.title} |"])


def _html(folder: Path, metric: Metric, scratch: Path) -> float:
    page = html.unescape(_written(folder, scratch, "html"))
    assert metric.help in page
    return number(re.search(rf'<td data-key="{metric.key}" data-sort="([^"]*)"', page)[1])


def _latex(folder: Path, metric: Metric, scratch: Path) -> float:
    page = write_report(folder, ["latex"], scratch, columns=[metric.key])[0].read_text()
    [line] = re.findall(r"\\midrule\n(.*) \\\\", page)
    return number(line.split(" & ")[2])


def _show(folder: Path, metric: Metric, scratch: Path) -> float:
    said = "\n".join(summary(_record(folder)))
    begins = "privacy: epsilon =" if metric.key == "epsilon" else f"{metric.title}:"
    return number(re.search(rf"^  {begins} (\S+)", said, re.MULTILINE)[1])


def _show_json(folder: Path, metric: Metric, scratch: Path) -> float:
    from fedaudit.reports import terminal

    return number(str(json.loads(terminal.as_json(folder))["rows"][0]["cells"][metric.key]["value"]))


def _compare(folder: Path, metric: Metric, scratch: Path) -> float:
    result = compare.compare(folder, folder)
    [change] = [c for c in result.changes if c.column is metric]
    assert re.search(rf"\b{metric.title} ", compare._line(change))
    return number(compare._line(change).split(" -> ")[1])


def _runs_csv(folder: Path, metric: Metric, scratch: Path) -> float:
    export(folder, "csv", scratch / "tables")
    [line] = csv.DictReader((scratch / "tables" / "runs.csv").read_text().splitlines())
    return number(line[metric.in_table])


def _pandas(folder: Path, metric: Metric, scratch: Path) -> float:
    pytest.importorskip("pandas")
    return float(tables_of(folder).runs[metric.in_table].iloc[0])


def _tensorboard(folder: Path, metric: Metric, scratch: Path) -> float:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    export(folder, "tensorboard", scratch / "logs")
    [log] = (scratch / "logs").iterdir()
    events = accumulator.EventAccumulator(str(log))
    events.Reload()
    if f"run/{metric.in_table}" in events.Tags()["scalars"]:
        return events.Scalars(f"run/{metric.in_table}")[0].value
    text = events.Tensors("setting/text_summary")[0].tensor_proto.string_val[0].decode()
    return number(json.loads(text)[metric.in_table])


def _mlflow(folder: Path, metric: Metric, scratch: Path) -> float:
    mlflow = pytest.importorskip("mlflow")
    export(folder, "mlflow", scratch / "store", project="mine")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{scratch / 'store' / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    if metric.in_table in run.data.metrics:
        return run.data.metrics[metric.in_table]
    return number(run.data.tags[f"fedaudit.{metric.in_table}"])


def _wandb(folder: Path, metric: Metric, scratch: Path) -> float:
    wandb = pytest.importorskip("wandb")
    with pytest.MonkeyPatch.context() as patch:  # wandb's launcher, whose modules take two seconds
        patch.setattr(wandb.sdk.wandb_run.Run, "_detect_and_apply_job_inputs", lambda run: None, raising=False)
        export(folder, "wandb", scratch / "out")
    [path] = (scratch / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    found = list(records_of(path))
    updates = [i for record in found if record.WhichOneof("record_type") == "summary" for i in record.summary.update]
    whole = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in updates}
    if metric.in_table in whole:
        return whole[metric.in_table]
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    return number({i.key: json.loads(i.value_json) for i in run.config.update}[f"fedaudit.{metric.in_table}"])


READERS: dict[str, Reader] = {
    "budget": _budget, "mark": _mark, "report.csv": _csv, "report.json": _json, "report.md": _markdown,
    "report.html": _html, "report.tex": _latex, "show": _show, "show --json": _show_json, "compare": _compare,
    "runs.csv": _runs_csv, "pandas": _pandas, "tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb,
}  # fmt: skip
