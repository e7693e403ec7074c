"""Prints where a method stands beside all others, and writes the comparison into the audit's folder."""

from __future__ import annotations

from pathlib import Path

from fedaudit.cli.output import wrapped
from fedaudit.suite.beside import Beside
from fedaudit.suite.kept_records import cells_of, gathered


def say_place(compared: Beside, method: str, out: Path) -> None:
    """Print the method's place on each partition, and write `beside.md` and `beside.png`."""
    from fedaudit.reports.method_comparison import picture, place, risk, rows_of, table

    new = {records.method: records for records in gathered(cells_of(out))}
    records = {**compared.kept, **new}
    partitions = dict.fromkeys(cell.partition for cell in new[method].cells)
    rows = rows_of(records, list(records), partitions)
    for row in rows:
        if row.method == method:
            print(wrapped(f"{place(row, rows)}. {risk(row)}."))
    if not compared.kept:
        print("There are no kept records to compare with: `fedaudit audit --suite all` makes them.")
    if compared.changed:
        print(wrapped(f"kept records of other code: {', '.join(compared.changed)}. --fresh runs these methods again."))
    if compared.other_harness:
        print(wrapped("The kept records were made by another version of fedaudit's own code."))
    (out / "beside.md").write_text(table(rows) + "\n")
    file = picture(rows, out / "beside.png", mine=method)
    print(f"The table is in {out / 'beside.md'}, the picture in {file}")
