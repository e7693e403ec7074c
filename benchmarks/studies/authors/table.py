"""The table of docs/results/authors.md: printed readings against those of the authors' code, from kept records.

python benchmarks/studies/authors/table.py --keep AUDIT --commit COMMIT   # the figures of an audit's runs: digits.json
python benchmarks/studies/authors/table.py                                # prints the table
python benchmarks/studies/authors/table.py --write                        # puts it into docs/results/authors.md

What made a figure (rounds, seeds, precision, commit) is read from the runs, and a row that mixes any of it is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedaudit.errors import DataError
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.stats import student_t

HERE = Path(__file__).resolve().parent
KEPT = HERE / "digits.json"
PAGE = HERE.parents[2] / "docs" / "results" / "authors.md"
MARK = "<!-- the table of benchmarks/studies/authors/table.py -->"
POINT = "test batch statistics"
CLIENTS = ("dffke", "local")  # no global model: the clients' own, on the common test set


@dataclass(frozen=True)
class Kept:
    """One finished run: what it was, what made it, and its accuracy in each round."""

    method: str
    reading: str
    init: str
    seed: int
    rounds: int
    precision: str
    commit: str
    torch: str
    last: float
    best: float  # of all rounds, by the test set
    batch: float | None = None  # the last round's point that is normalised by the test batches
    inner: float | None = None  # the best inner step of all rounds, in that mode: selected on the test set


def reading_of(setting: Any) -> str:
    """Return which reading a run is of: by its preset, or by what it sets."""
    if setting.preset == "authors":
        return "authors' code"
    if "student" in (said := str(setting.set.get("kl") or setting.set.get("md") or "")):
        return "printed" if said.startswith("student") else "default"
    if setting.set.get("weighting") == "uniform":
        return "default, uniform weights"
    return "default" if setting.method in ("dffke", "dfrd", "fedavg+dfrd") else "printed"


def kept(record: RunRecord, commit: str) -> Kept:
    """Return what is kept of a run."""
    name = record.setting.method
    shown = [r.utility for r in record.rounds if r.utility is not None]
    if name in CLIENTS:
        scores = [u.clients.global_test.mean for u in shown]
    else:
        scores = [u.global_.test.accuracy for u in shown]
    points = [{n: p.test.accuracy for n, p in u.global_points.items() if n.startswith(POINT)} for u in shown]
    inner = [v for of_round in points for n, v in of_round.items() if "inner" in n]
    return Kept(
        name, reading_of(record.setting), record.setting.init, record.setting.seed, len(record.rounds),
        record.setting.precision, commit, record.versions["torch"], scores[-1], max(scores), points[-1].get(POINT),
        max(inner) if inner else None,
    )  # fmt: skip


def keep(audit: Path, commit: str, to: Path = KEPT) -> None:
    """Write the figures of all finished runs of an audit."""
    folders = sorted(path.parent for path in audit.glob("**/record.json"))
    found = [record for record in map(read_record, folders) if record.status == "done"]
    rows = sorted((kept(record, commit) for record in found), key=lambda r: (r.method, r.reading, r.init, r.seed))
    to.write_text("[\n" + ",\n".join(" " + json.dumps(asdict(row)) for row in rows) + "\n]\n")


def read(path: Path = KEPT) -> list[Kept]:
    return [Kept(**row) for row in json.loads(path.read_text())]


def figure(values: Sequence[float]) -> str:
    """Return the mean in percent with its 95 % interval over seeds (Student's t)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{100 * mean:.1f}"
    found = student_t(list(values))
    low, high = max(found.low or 0.0, 0.0), min(found.high or 1.0, 1.0)
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def one(values: Sequence[Any], what: str, row: str) -> Any:
    """Return the one value that all runs of a row share; refuse a row that mixes several."""
    if len(found := sorted(set(values))) != 1:
        raise DataError(f"{row} mixes runs of different {what}: {', '.join(map(str, found))}. Run them all anew.")
    return found[0]


def table(runs: Sequence[Kept]) -> str:
    """Return the table in Markdown, a line for each method, reading and start."""
    lines = [
        "| method | reading | starts | last round | best round by the test set | by test batch statistics, last | the "
        "same, best inner step of all rounds | rounds, seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in sorted({(r.method, r.reading, r.init) for r in runs}):
        of = [r for r in runs if (r.method, r.reading, r.init) == key]
        row = f"{key[0]}, {key[1]}"
        rounds = one([r.rounds for r in of], "numbers of rounds", row)
        seeds = ", ".join(str(r.seed) for r in of)
        batch, inner = ([v for r in of if (v := getattr(r, name)) is not None] for name in ("batch", "inner"))
        cells = [figure([r.last for r in of]), figure([r.best for r in of])]
        cells += [figure(values) if len(values) == len(of) else "-" for values in (batch, inner)]
        lines.append(f"| `{key[0]}` | {key[1]} | {key[2]} | " + " | ".join(cells) + f" | {rounds}; {seeds} |")
    made = " ".join(
        f"{what} {one([getattr(r, name) for r in runs], name, 'The table')}"
        for what, name in (("Commit", "commit"), ("in", "precision"), ("with torch", "torch"))
    )
    return "\n".join(lines) + f"\n\n{made}. Intervals are of 95 % over seeds."


def written(page: str, made: str) -> str:
    """Return the page with the table between its two marks."""
    before, found, rest = page.partition(MARK)
    _, closed, after = rest.partition(MARK)
    if not (found and closed):
        raise DataError(f"{PAGE.name} lacks the two marks {MARK} between which the table stands. Put them back.")
    return f"{before}{MARK}\n\n{made}\n\n{MARK}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, metavar="AUDIT")
    parser.add_argument("--commit", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.keep:
        if not given.commit:
            sys.exit("--keep needs --commit: the commit that made the runs.")
        keep(given.keep, given.commit)
    made = table(read())
    print(made)
    if given.write:
        PAGE.write_text(written(PAGE.read_text(), made))


if __name__ == "__main__":
    main()
