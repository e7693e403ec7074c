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
    f"{TITLE} Test accuracy, %, {{when}}. The interval of a difference is Student's of 95 % over the seeds. A row "
    "without a published figure is a control. What differs from the paper, and all other rows, are in "
    "[README](README.md)."
)


def difference(values: Sequence[float], published: float) -> str:
    """Return the mean of the values minus a published figure, with its interval over seeds if there are several."""
    if len(values) == 1:
        return f"{values[0] - published:+.2f}, one seed"
    found = student_t([value - published for value in values])
    return f"{found.value:+.2f} [{found.low:.2f}, {found.high:.2f}]"


def row(asked: dict[str, Any], cells: dict[str, dict[str, Any]]) -> list[str]:
    """Return the row of a cell, or of a control, which names its records itself."""
    cell = {**cells[asked["cell"]], **asked} if "cell" in asked else asked
    records = [table.read(name) for name in cell["records"]]
    planned = cell.get("rounds", 0)
    found = zip((record["setting"]["seed"] for record in records), table.values(cell, records), strict=True)
    by_seed = dict(sorted({**dict(found), **{int(k): v for k, v in asked.get("printed", {}).items()}}.items()))
    seeds, values = list(by_seed), list(by_seed.values())
    cut = any(record["rounds_done"] < planned for record in records)
    label = f"{asked['label']} ({table.span(records)} of {planned} rounds)" if cut else asked["label"]
    ours = ", ".join(f"{value:.2f}" for value in values)
    if seeds != [0, 1, 2]:
        ours += f" (seed{'s' if len(seeds) > 1 else ''} {' and '.join(map(str, seeds))})"
    if "cell" not in asked:
        return [label, "-", ours, "-"]
    figure = f"{cell['mean']:.2f}" + (f" ± {cell['spread']:.2f}" if cell["spread"] >= 0 else "")
    return [label, figure, ours, difference(values, cell["mean"])]


def tables() -> dict[str, str]:
    """Return the paragraph and table of each page."""
    told = tomllib.loads((table.HERE / "published.toml").read_text())
    cells = {cell["key"]: cell for cell in told["cell"]}
    head = ["", "published", "ours, seeds 0, 1 and 2", "ours minus published"]
    return {
        page["page"]: "\n".join(
            [SAID.format(when=page["when"]), "", *table.lines(head, [row(asked, cells) for asked in page["rows"]])]
        )
        for page in told["first_table"]
    }


def placed(text: str, made: str) -> str:
    """Return a page with the table between its verdict and what follows, in the place of the one that was there."""
    before, _, after = text.partition(NEXT)
    return f"{before.partition(TITLE)[0].rstrip()}\n\n{made}{NEXT}{after}"


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    for name, made in tables().items():
        page = table.RESULTS / f"{name}.md"
        if sys.argv[1:]:
            page.write_text(placed(page.read_text(), made))
        else:
            print(f"{page.name}\n\n{made}\n")
