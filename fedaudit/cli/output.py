"""What commands print: tables, progress, a run's summary."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fedaudit.errors import SettingError


@contextlib.contextmanager
def progress_bar(title: str, remaining: bool = True) -> Iterator[Callable[[float, float, str], None] | None]:
    """A progress bar on a terminal; nothing where the output goes to a file or a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    if remaining:  # else the task's description tells
        columns.append(TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)

        def watch(done: float, total: float, what: str) -> None:
            if what.startswith("ready"):
                progress.console.print(f"{title}: {what}", highlight=False)
            progress.update(task, completed=done, total=total, description=f"{title}: {what}")

        yield watch


def chosen_clients(text: str) -> list[int] | None:
    """What `--client` says; None: all."""
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):  # "²" is a digit, too, and no number
        raise SettingError(f"--client {text[:40]!r}: write all, or a client's number.")
    return [int(text)]


def print_table(rows: list[dict[str, Any]], title: str, total: tuple[str, ...] = ()) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title, title_justify="left", show_footer=bool(total))
    for column in columns:
        number = bool(rows) and all(isinstance(row.get(column, 0), int | float) for row in rows)
        footer = _cell(sum(row.get(column) or 0 for row in rows), column) if column in total else ""
        table.add_column(column, justify="right" if number else "left", footer=footer, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column), column) for column in columns))
    Console(emoji=False, markup=False, highlight=False).print(table)


def _cell(value: Any, column: str) -> str:
    from fedaudit.units import bytes_text

    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column in ("payload", "wire", "bytes", "buffers") and isinstance(value, int | float):
        return bytes_text(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_summary(record: Any) -> None:
    from fedaudit.cli.listing import summary

    for line in summary(record):
        print(line)
