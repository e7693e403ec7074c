"""Make the table under the verdict of each paper's page: what is published, ours seed by seed, the difference.

    python benchmarks/studies/shared/first_tables.py            # prints the tables
    python benchmarks/studies/shared/first_tables.py --write    # puts them into docs/results/*.md

`published.toml` names the rows of each page, either by a cell of its own or, for a control, by records.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from typing import Any

import results_table as table

from fedaudit.stats import student_t

TITLE = "**Published beside ours.**"
NEXT = "\n\n**What comes out.**"
SAID = (
    f'{TITLE} Test accuracy, %, {{when}}. The paper has no figure for rows with "-". An interval is Student\'s of 95 % '
    "over the seeds{paired}; the published mean is taken as exact, and an interval that holds 0 does not show "
    "that a figure comes out. What differs from the paper, row by row: [README](README.md)."
)
Cell = dict[str, Any]


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the mean of the differences, with its interval over seeds if there are several."""
    each = [value - other for value, other in zip(values, others, strict=True)]
    if len(each) == 1:
        return f"{each[0]:+.2f}, one seed"
    found = student_t(each)
    return f"{found.value:+.2f} [{found.low:.2f}, {found.high:.2f}]"


def run_of(asked: Cell, cells: dict[str, Cell]) -> Cell:
    """Return the cell that a row names, with what the row says itself."""
    return {**cells[asked["cell"]], **asked} if "cell" in asked else asked


def records_of(cell: Cell) -> list[dict[str, Any]]:
    """Return the kept records, which must be of the runs that the cell or control means."""
    return [table.checked(name, cell["asked"]) for name in cell["records"]]


def by_seed(cell: Cell) -> dict[int, float]:
    """Return the figure of each seed: from its record, or as the run printed it."""
    records = records_of(cell)
    kept = zip((record["setting"]["seed"] for record in records), table.values(cell, records), strict=True)
    printed = {int(seed): float(value) for seed, value in cell.get("printed", {}).items()}
    return dict(sorted({**dict(kept), **printed}.items()))


def length(cell: Cell) -> str:
    """Return how long the runs are, and which of them are shorter than planned."""
    if "length" in cell:
        return str(cell["length"])
    records, planned = records_of(cell), cell.get("rounds", 0)
    short = [record for record in records if record["rounds_done"] < planned]
    if not short:
        return f"{table.span(records)} rounds"
    if len(short) == 1 < len(records):
        return f"seed {short[0]['setting']['seed']}: {short[0]['rounds_done']} of {planned} rounds"
    return f"{table.span(records)} of {planned} rounds"


def row(asked: Cell, cells: dict[str, Cell], control: Cell | None = None) -> list[str]:
    """Return a row's label, published figure, figure of each seed, and difference; then the difference to a control."""
    cell = run_of(asked, cells)
    found = by_seed(cell)
    ours = ", ".join(f"{value:.2f}" for value in found.values())
    if list(found) != [0, 1, 2]:
        ours += f" (seed{'s' if len(found) > 1 else ''} {' and '.join(map(str, found))})"
    told = [f"{asked['label']} ({length(cell)})", "-", ours, "-", "-"]
    if "cell" in asked:
        told[1] = table.figure(cell)
        told[3] = difference(list(found.values()), [cell["mean"]] * len(found))
    if control is not None:
        beside = by_seed(run_of(control, cells))
        common = sorted(found.keys() & beside.keys())
        told[4] = difference([found[seed] for seed in common], [beside[seed] for seed in common])
    return told


def tables() -> dict[str, str]:
    """Return the paragraph and table of each page."""
    told = tomllib.loads((table.HERE / "published.toml").read_text())
    cells = {cell["key"]: cell for cell in told["cell"]}
    return {page["page"]: made(page, cells) for page in told["first_table"]}


def made(page: dict[str, Any], cells: dict[str, Cell]) -> str:
    """Return the paragraph and table of a page. It has a column for a control if the page names one."""
    named = {asked["name"]: asked for asked in page["rows"] if "name" in asked}
    rows = [row(asked, cells, named[asked["minus"]] if "minus" in asked else None) for asked in page["rows"]]
    head = ["", "published", "ours, seeds 0, 1 and 2", "ours minus published", page.get("control", "")]
    width = 5 if "control" in page else 4
    said = SAID.format(when=page["when"], paired=" (in the last column, over their differences)" if width == 5 else "")
    return "\n".join([said, "", *table.lines(head[:width], [cells[:width] for cells in rows])])


def placed(text: str, new: str) -> str:
    """Return a page with the table between its verdict and what follows, in the place of the one that was there."""
    before, _, after = text.partition(NEXT)
    return f"{before.partition(TITLE)[0].rstrip()}\n\n{new}{NEXT}{after}"


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    for name, new in tables().items():
        page = table.RESULTS / f"{name}.md"
        if sys.argv[1:]:
            page.write_text(placed(page.read_text(), new))
        else:
            print(f"{page.name}\n\n{new}\n")
