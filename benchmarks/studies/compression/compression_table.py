"""The tables of compression.md: accuracy against bytes, from the kept figures of the runs.

python benchmarks/studies/compression/compression_table.py --keep AUDIT NAME   # keeps its figures: records/NAME.json
python benchmarks/studies/compression/compression_table.py                      # the tables of compression.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedaudit.reports.run_tables import RunRow, tables_of
from fedaudit.reports.tests_over_seeds import over_seeds
from fedaudit.units import bytes_text

HERE = Path(__file__).parent
NAMES = ("compression", "compression_fmnist")


def keep(audit: Path, name: str) -> None:
    """One line of figures per run, and what made them."""
    found = tables_of(audit)
    rows = [row for row in found.rows["runs"] if isinstance(row, RunRow) and row.status == "done"]
    kept = [
        {
            "compress": row.compress, "seed": row.seed, "rounds": row.rounds, "clients": row.clients,
            "accuracy": row.accuracy, "up": row.up_payload, "up_wire": row.up_wire, "down": row.down_payload,
            "device": row.device,
        }
        for row in sorted(rows, key=lambda row: (str(row.compress), row.seed))
    ]  # fmt: skip
    (HERE / "records" / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def table(name: str) -> str:
    """Markdown: a line per compression, in order of the bytes that it leaves."""
    runs = json.loads((HERE / "records" / f"{name}.json").read_text())
    by: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by.setdefault(run["compress"] or "none", []).append(run)
    plain = sum(run["up"] for run in by["none"]) / len(by["none"])
    lines = [
        "| compress | accuracy, % | sent by one client in one round | share of the whole | accuracy per MB up |",
        "| --- | --- | --- | --- | --- |",
    ]
    for text, of in sorted(by.items(), key=lambda item: -sum(run["up"] for run in item[1])):
        sent = sum(run["up"] for run in of) / len(of)
        one = [run["up"] / (run["rounds"] * run["clients"]) for run in of]
        reached = over_seeds([100 * run["accuracy"] for run in of], (0.0, 100.0))
        each = over_seeds([100 * run["accuracy"] / (run["up"] / 1e6) for run in of], (0.0, float("inf")))
        size = bytes_text(sum(one) / len(one)) if len(set(one)) > 1 else f"{one[0]:,.0f} B"
        lines.append(
            f"| {text} | {reached.value:.1f} [{reached.low:.1f}, {reached.high:.1f}] | {size} | {sent / plain:.3f} | "
            f"{each.value:.1f} [{each.low:.1f}, {each.high:.1f}] |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs=2, metavar=("AUDIT", "NAME"))
    given = parser.parse_args()
    if given.keep:
        keep(Path(given.keep[0]), given.keep[1])
    for name in NAMES:
        if (HERE / "records" / f"{name}.json").exists():
            print(f"{name}\n\n{table(name)}\n")
