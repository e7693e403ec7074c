"""Export of runs to the tools that teams use: TensorBoard, MLflow, Weights & Biases, JUnit, CSV. Nothing is uploaded.

Each target has its own module. It and its library are loaded when needed. A missing library is an error that names
what to install.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fedaudit.errors import RunError, SettingError, unknown
from fedaudit.extras import install
from fedaudit.metrics.metric import metrics
from fedaudit.reports.report import rows_below
from fedaudit.reports.run_tables import AttackRow, RoundRow, RunRow, Tables, columns_of, finite, values_of
from fedaudit.reports.runs import Run, looked_at, read_runs
from fedaudit.reports.summary_rows import SummaryRow
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.run_record import RunRecord, reading
from fedaudit.suite.junit import Case, junit

TARGETS = ("csv", "junit", "mlflow", "tensorboard", "wandb")
BESIDE_ROUNDS = ("run", "method", "seed", "round")  # columns of a round that are not figures


class Export:
    """The runs below a folder, as the targets take them."""

    def __init__(self, folder: Path, project: str = "fedaudit"):
        if not folder.is_dir():
            raise SettingError(f"There is no folder {folder}. Name a run, or the folder of an audit.")
        found, self.problems = read_runs(folder)
        found = looked_at(found)
        self.folder, self.project = folder, project
        self.tables = Tables(found, folder, self.problems)
        runs = [row for row in self.tables.rows["runs"] if isinstance(row, RunRow)]
        self.runs: list[Tracked] = [
            Tracked(row, run, self.tables) for row, run in zip(runs, found, strict=True) if run.record.rounds
        ]
        self.doubts = [
            f"Do not rely on {run.folder}: {'; '.join(run.doubts)}. `fedaudit verify {run.folder}` names each file and "
            "figure. It is exported as it is"
            for run in found
            if run.doubts
        ]  # runs whose files were changed, or that a check contradicted

    def left_out(self) -> str:
        """Return in words what is left out: runs without a round, and runs that cannot be read."""
        idle = len(self.tables.rows["runs"]) - len(self.runs)
        parts = [f"{idle} runs without a round are left out"] if idle else []
        parts += [f"{name} cannot be read: {reason}" for name, reason in sorted(self.problems.items())]
        return "".join(f"; {part}" for part in parts)

    def rows(self) -> tuple[list[SummaryRow], dict[str, str]]:
        """Return the rows of a report, with runs that differ in their seed alone in one row, and the failures."""
        return rows_below(self.folder)


class Tracked:
    """One run as a tracker takes it: parameters, figures by round, figures of the whole run."""

    def __init__(self, row: RunRow, run: Run, tables: Tables):
        self.row, self.run, self.record = row, run, run.record
        self._rounds = [r for r in tables.rows["rounds"] if isinstance(r, RoundRow) and r.run == row.run]
        self._attacks = [r for r in tables.rows["attacks"] if isinstance(r, AttackRow) and r.run == row.run]

    @property
    def name(self) -> str:
        return self.row.run

    def parameters(self) -> dict[str, str]:
        """Return the flat setting, with the method's hyper-parameters under set. and policies under privacy.KIND."""
        values = self.record.setting.model_dump(mode="json", exclude={"set", "privacy"})
        values |= {f"set.{key}": value for key, value in self.record.setting.set.items()}
        for kind, policy in self.record.setting.privacy.items():
            values |= {f"privacy.{kind}.{key}": value for key, value in policy.items()}
        return {key: str(value) for key, value in values.items() if value is not None}

    def by_round(self) -> list[tuple[int, float, dict[str, float]]]:
        """Return each round with its end in seconds since 1970 (evaluation included) and its figures."""
        at, rows = started(self.record), []
        for row in self._rounds:
            at += row.wall_s
            values = {key: getattr(row, key) for key in columns_of("rounds") if key not in BESIDE_ROUNDS}
            rows.append((row.round, at, finite(values)))
        return rows

    def whole(self) -> dict[str, float]:
        """Return the run's figures: its guarantee, its cost, and each attack's measures, as attack/threat/measure."""
        skipped = ("seed", "rounds", "clients", "chosen_round")
        values = {key: value for key, value in values_of(self.row).items() if key not in skipped}
        attacks = {f"attacks/{r.attack}/{r.threat}/{r.measure}": r.value for r in self._attacks if r.measure}
        return finite({**values, **attacks})

    def words(self) -> dict[str, str]:
        """Return the facts that are not numbers, and the figures that are infinite or may be so."""
        figures = {metric.in_table: (metric, metric.value(self.record)) for metric in metrics().values()}
        words = {
            name: metric.why_missing([self.record]) if value is None else f"{value:g}"
            for name, (metric, value) in figures.items()
            if metric.unit == "epsilon" or (value is not None and math.isinf(value))
        }
        return {
            "status": self.row.status, "privacy": self.row.privacy, "device": self.row.device, **words,
            "digest": self.row.digest, **{f"version.{key}": text for key, text in self.record.versions.items()},
        }  # fmt: skip


def started(record: RunRecord) -> float:
    return datetime.fromisoformat(record.started).timestamp()


def export(
    path: Path | str,
    to: str,
    out: Path | str,
    *,
    project: str = "fedaudit",
    budget: Path | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> str:
    """Write a run, or all runs of an audit, to `out`. Return in words what was written.

    `warn` is told of each run whose figures cannot be relied on.
    """
    if to not in TARGETS:
        raise SettingError(unknown("target", to, TARGETS))
    if budget is not None and to != "junit":
        raise SettingError(f"--budget is for --to junit only, because {to} holds no verdicts. Leave --budget out.")
    with reading(Path(path)):
        found = Export(Path(path), project)
        for doubt in found.doubts:
            warn(doubt)
        if to == "junit":
            return _junit(found, Path(out), budget)
        if to == "csv":
            return _csv(found, Path(out))
        if not found.runs:
            raise RunError(
                f"No run below {path} has finished a round, so there is nothing to export. Finish one first."
            )
        write: Callable[[Export, str], str] = importlib.import_module(f"fedaudit.reports.to_{to}").write
        return write(found, str(out)) + found.left_out()


def library(module: str, extra: str) -> Any:
    """Import and return a target's library. If it is missing, the error says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise SettingError(f"--to {extra} needs {extra}: {install(extra)} ({e}).") from None


def fresh_folder(out: Path, what: str, ours: Callable[[Path], bool]) -> None:
    """Make a folder to write into. It must be new, empty, or hold nothing but earlier exports."""
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file, but {what} needs a folder. Choose another --out.")
    if out.is_dir() and (strange := [p.name for p in sorted(out.iterdir()) if not ours(p)]):
        raise RunError(
            f"{out} holds {strange[0]}, which is not from an export. Nothing was changed. Choose another --out."
        )
    out.mkdir(parents=True, exist_ok=True)


# --- files -----------------------------------------------------------------------------------------------------


def _csv(found: Export, out: Path) -> str:
    """Write a CSV file for each table."""
    names = {f"{table}.csv": table for table in Tables.names}

    def ours(path: Path) -> bool:
        if path.name not in names or path.is_symlink() or not path.is_file():
            return False
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().startswith(",".join(columns_of(names[path.name])[:3]) + ",")

    fresh_folder(out, "CSV", ours)
    for name, table in names.items():
        write_atomic(out / name, found.tables.csv(table).encode())
    return f"{len(found.tables.rows['runs'])} runs in {', '.join(names)} in {out}"


def _junit(found: Export, out: Path, budget: Path | None) -> str:
    from fedaudit.reports.verdicts import cases_of

    cases: Sequence[Case] = cases_of(found, budget)
    if out.is_dir():
        raise RunError(f"{out} is a folder, but JUnit's XML is one file. Name a file, such as --out verdicts.xml.")
    if out.is_symlink() or (out.exists() and not out.read_bytes().startswith(b'<testsuite name="fedaudit"')):
        raise RunError(f"{out} is not an export of fedaudit, so it was not changed. Choose another --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, junit(cases).encode())
    failed = sum(case.outcome in ("failure", "error") for case in cases)
    return f"{len(cases)} verdicts, {failed} of them failed, in {out}"
