"""Logs of audits as their estimate of the time left heard them, to be replayed: a line of JSON for each event.

    python tests/helpers/tools/kept_log.py tests/suite/kept_logs/NAME.jsonl audit SUITE --out FOLDER --jobs 2

runs `fedaudit audit ...` and keeps its log. The first line is what the estimate was given at the beginning; `at` is in
seconds from then. The last line is the instant at which the report was there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedaudit.suite.time_left import TimeLeft, Work


class Keeping(TimeLeft):
    """An estimate that writes down what it is told."""

    path: Path

    def __init__(self, jobs: int | None, report: float = 0.0):
        super().__init__(jobs, report)
        self.zero = time.monotonic()
        self.file = self.path.open("w")
        self.names: dict[str, str] = {}
        self.last: dict[str, tuple[str, float]] = {}
        self._write(event="first", jobs=jobs, report=report)

    def _write(self, at: float | None = None, **what: Any) -> None:
        at = self.zero if at is None else at
        self.file.write(json.dumps({"at": round(at - self.zero, 2), **what}) + "\n")
        self.file.flush()

    def _name(self, cell: str) -> str:
        return Path(cell).name

    def add(self, cell: str, work: Work) -> None:
        super().add(cell, work)
        kinds = [self.names.setdefault(kind, f"k{len(self.names)}") for kind in work.kinds]
        units = {stage: amount for stage, amount in work.units.items() if amount}
        self._write(event="add", cell=self._name(cell), kinds=kinds, units=units, behind=work.behind, near=work.near)

    def begun(self, cell: str, now: float) -> None:
        super().begun(cell, now)
        self._write(now, event="begun", cell=self._name(cell))

    def progress(self, cell: str, stage: Any, share: float, now: float) -> None:
        super().progress(cell, stage, share, now)
        if self.last.get(cell) != (stage, share):
            self.last[cell] = (stage, share)
            self._write(now, event="progress", cell=self._name(cell), stage=stage, share=round(share, 4))

    def finished(self, cell: str, now: float, status: str = "done") -> None:
        super().finished(cell, now, status)
        self._write(now, event="finished", cell=self._name(cell), status=status)

    def reporting(self, now: float) -> None:
        super().reporting(now)
        self._write(now, event="reporting")

    def over(self) -> None:
        self._write(time.monotonic(), event="over")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replay(log: list[dict[str, Any]], make: type[TimeLeft] = TimeLeft) -> Iterator[tuple[float, float | None]]:
    """Yield the second and the estimate, after every event of the log and at every whole second in between."""
    left = make(log[0]["jobs"], log[0]["report"])
    asked = 0.0
    for row in log[1:]:
        at, event = row["at"], row["event"]
        while asked + 1 < at:
            asked += 1
            yield asked, left.left(asked)
        if event == "over":
            return
        if event == "add":
            left.add(row["cell"], Work(tuple(row["kinds"]), row["units"], row["behind"], row["near"]))
            continue
        if event == "begun":
            left.begun(row["cell"], at)
        elif event == "progress":
            left.progress(row["cell"], row["stage"], row["share"], at)
        elif event == "finished":
            left.finished(row["cell"], at, row["status"])
        elif event == "reporting":
            left.reporting(at)
        yield at, left.left(at)


def main(path: str, *command: str) -> None:
    from fedaudit.cli.main import main as fedaudit
    from fedaudit.reports import report
    from fedaudit.suite import scheduler

    kept: list[Keeping] = []
    write_report = report.write_report

    class Here(Keeping):
        def __init__(self, *args: Any) -> None:
            self.path = Path(path)
            super().__init__(*args)
            kept.append(self)

    def written(*args: Any, **options: Any) -> Any:
        pages = write_report(*args, **options)
        kept[0].over()
        return pages

    scheduler.TimeLeft, report.write_report = Here, written  # type: ignore[misc, assignment]
    sys.argv = ["fedaudit", *command]
    fedaudit()


if __name__ == "__main__":
    main(*sys.argv[1:])
