"""Functions that print what commands show: tables, progress, a run's summary."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fedaudit.errors import SettingError

if TYPE_CHECKING:
    from rich.console import Console

    from fedaudit.suite.forecast import Forecast

WIDTH = 80  # columns that every terminal has
EVERY = 10.0  # seconds between two lines of progress if the output is not a terminal
ROOM = 56  # columns of a progress bar and its clock
AT_ONCE = ("ready", "note:")  # progress that begins so gets a line of its own, which stays on the terminal
SHORT = 12  # columns of a bar that has the time left beside it
TIMED = SHORT + 29  # columns of such a bar, its clock, and "about 10:00:00 left"


class Shown(Protocol):
    """The callback that `progress_bar` yields. It serves as a `Watch` and as a `TimedWatch`."""

    def __call__(self, done: float, whole: float, what: str, left: float | None = None, /) -> None: ...


@contextlib.contextmanager
def progress_bar(title: str, remaining: bool = True) -> Iterator[Shown]:
    """Yield a callback that shows progress: a bar on a terminal, else a plain line every `EVERY` seconds for a log.

    With `remaining`, the time left is computed here from the pace so far. Without it, the caller passes it in."""
    if not sys.stderr.isatty():
        yield plain_lines(title, remaining)
        return
    from rich.console import Console

    with bar_on(Console(stderr=True), title, remaining) as watch:
        yield watch


@contextlib.contextmanager
def bar_on(console: Console, title: str, remaining: bool = True) -> Iterator[Shown]:
    """Yield a callback that moves a progress bar on this terminal. Its text is cut to the columns that are left."""
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    text = TextColumn("{task.description}", markup=False)
    columns: list[ProgressColumn] = [text, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()]
    if not remaining:
        columns = [text, BarColumn(SHORT), TimeElapsedColumn(), TextColumn("{task.fields[left]}")]
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None, left="")

        def watch(done: float, whole: float, what: str, left: float | None = None, /) -> None:
            if what.startswith(AT_ONCE):
                progress.console.print(f"{title}: {what}", highlight=False)
            room = max(20, progress.console.width - (ROOM if remaining else TIMED))
            progress.update(
                task, completed=done, total=whole, description=_cut(f"{title}: {what}", room), left=_left(left)
            )

        yield watch


def plain_lines(title: str, remaining: bool = True) -> Shown:
    """Return a callback that prints progress at most once in `EVERY` seconds; a shorter command prints none.

    With `remaining`, the time left is computed here from the pace so far. Without it, the caller passes it in."""
    last = begun = time.monotonic()

    def watch(done: float, whole: float, what: str, left: float | None = None, /) -> None:
        nonlocal last
        if what.startswith("note:"):
            print(f"{title}: {what}", file=sys.stderr, flush=True)
        elif time.monotonic() - last >= EVERY:
            last = time.monotonic()
            share = f"{done / whole:4.0%} " if whole else ""
            if remaining:
                left = (time.monotonic() - begun) * (whole / done - 1) if 0 < done < whole else 0.0
                left = left if left >= max(EVERY, 1) else 0.0
            more = _left(left)
            print(f"{title}: {share}{what}{', ' if more else ''}{more}", file=sys.stderr, flush=True)

    return watch


def _left(seconds: float | None) -> str:
    """Return the time left in words; empty if no time is left."""
    if seconds is None:
        return "estimating"
    return f"about {_clock(max(seconds, 1.0))} left" if seconds else ""


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def chosen_clients(text: str) -> list[int] | None:
    """Return the clients that `--client` names; None stands for all."""
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):  # isdigit() is true for "²", which int() refuses
        raise SettingError(f"--client {text[:40]!r}: write all, or a client's number.")
    return [int(text)]


def print_lines(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> None:
    """Print rows in columns of these widths. The last column has any width; the line is cut to 80 columns."""
    for row in rows:
        head = "".join(f"{_cut(cell, width):<{width + 2}}" for cell, width in zip(row, widths, strict=False))
        print(f"{head}{_cut(row[-1], WIDTH - len(head))}".rstrip())


def print_forecast(forecasts: list[Forecast], jobs: int) -> None:
    """Print what is left to do: a line per row of the grid, and a paragraph on all of it."""
    from fedaudit.suite.forecast import by_row, total

    print_lines([("row", "cells", "state", "to send", "time"), *by_row(forecasts)], (38, 5, 14, 9))
    print(wrapped(total(forecasts, jobs)))


def wrapped(text: str) -> str:
    """Return the text in lines of at most 80 columns; continued lines are indented."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines.append(textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False) if line else "")
    return "\n".join(lines)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def print_table(rows: list[dict[str, Any]], title: str, total: tuple[str, ...] = (), narrow: bool = False) -> None:
    """Print a table. With `narrow` it has no frame and no column of zeros, so that eight columns fit a terminal.

    Where the longest words of all columns together are wider than the terminal, each row is a paragraph instead: no
    word is broken."""
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    if narrow:
        columns = [column for column in columns if column != "buffers" or any(row.get(column) for row in rows)]
    console = Console(emoji=False, markup=False, highlight=False)
    shown = {column: [column, *(_cell(row.get(column), column) for row in rows)] for column in columns}
    feet = {column: _cell(sum(row.get(column) or 0 for row in rows), column) for column in columns if column in total}
    words = {column: _longest_word([*texts, *feet.get(column, "").split()]) for column, texts in shown.items()}
    between = 2 * len(columns) if narrow else 3 * len(columns) + 1
    room = console.width - between - sum(words.values())
    if room < 0:
        _print_paragraphs(rows, columns, title, total)
        return
    frame: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0)} if narrow else {}
    table = Table(title=title, title_justify="left", show_footer=bool(total), **frame)
    widths = _widths(words, {c: max(map(len, [*shown[c], feet.get(c, "")])) for c in columns}, room)
    for column in columns:
        number = bool(rows) and all(isinstance(row.get(column, 0), int | float) for row in rows)
        side: Any = "right" if number else "left"
        table.add_column(column, justify=side, footer=feet.get(column, ""), overflow="fold", width=widths[column])
    for row in rows:
        table.add_row(*(_cell(row.get(column), column) for column in columns))
    console.print(table)


def _widths(least: dict[str, int], most: dict[str, int], room: int) -> dict[str, int]:
    """Return the width of each column, from its longest word up to its longest text: the narrowed first get the room.

    Left to itself, the table gives some columns more than there is, and loses its right edge."""
    widths = dict(least)
    for _ in range(room if widths else 0):
        column = max(widths, key=lambda name: most[name] - widths[name])
        if widths[column] >= most[column]:
            break
        widths[column] += 1
    return widths


def _longest_word(texts: Sequence[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def _print_paragraphs(rows: list[dict[str, Any]], columns: list[str], title: str, total: tuple[str, ...]) -> None:
    """Print each row as a paragraph of 80 columns: its first figure, then the others with their names."""
    print(title)
    for row in rows:
        first, *others = [(column, _cell(row.get(column), column)) for column in columns]
        said = ", ".join(f"{column} {text}" for column, text in others if text)
        print(wrapped(f"  {first[1]}: {said}"))
    for column in total:
        print(f"  all together: {column} {_cell(sum(row.get(column) or 0 for row in rows), column)}")


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

    print(wrapped("\n".join(summary(record))))
