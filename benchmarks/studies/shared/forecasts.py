"""How long each paper's main table takes, in small and as published: a round of each cell is timed, and multiplied.

python benchmarks/studies/shared/forecasts.py SCALE FILE [--only TABLE=COLUMN] [--method NAME] \
    [--random-data] [--limit SECONDS]
python benchmarks/studies/shared/forecasts.py --table FILE...

The first keeps its times in FILE, the second prints the Markdown table.

`--random-data` writes pictures of noise in the layout of CIFAR-10 and CIFAR-100 where these are not here: what a round
costs does not depend on what is in the pictures. A cell whose round takes longer than `--limit` is left without a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedaudit.suite.forecast import duration
from fedaudit.suite.published import Scale, find_table, wanted

TABLES = ("dffke-2", "fedaf-1", "fedfree-1", "fedzge-2", "dfrd-1")
# Files of n records: the label (CIFAR-100: the coarse one before it) and 3 x 32 x 32 bytes.
LAYOUTS: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "cifar-10-batches-bin": (
        {**{f"data_batch_{k}.bin": 10_000 for k in range(1, 6)}, "test_batch.bin": 10_000},
        (10,),
    ),
    "cifar-100-binary": ({"train.bin": 50_000, "test.bin": 10_000}, (20, 100)),
}


def random_data(root: Path) -> None:
    draw = np.random.default_rng(0)
    for folder, (files, labels) in LAYOUTS.items():
        if (root / folder).exists():
            continue
        (root / folder).mkdir(parents=True)
        for name, n in files.items():
            of = [np.arange(n, dtype=np.uint8)[:, None] % classes for classes in labels]
            rows = np.concatenate([*of, draw.integers(0, 256, (n, 3 * 32 * 32), dtype=np.uint8)], axis=1)
            (root / folder / name).write_bytes(rows.tobytes())


def timed(scale: str, only: dict[str, str], methods: list[str], limit: float, file: Path) -> None:
    """A process for each cell, so that one that is too long stops nobody else. Kept after each."""
    rows: list[dict[str, Any]] = []
    for name in only or TABLES:
        paper, table = name.split("-")
        size: Scale = "gpu" if scale == "gpu" else "cpu"
        for cell in wanted(find_table(paper, table), size, [only[name]] if only.get(name) else []):
            if methods and cell.method not in methods:
                continue
            words = ["reproduce", paper, table, "--scale", scale, "--method", cell.method]
            words += ["--column", cell.column.name, "--seeds", "1", "--dry-run", "--measure", "--json"]
            try:
                said = subprocess.run(
                    [sys.executable, "-m", "fedaudit", *words], capture_output=True, text=True, timeout=limit
                )
            except subprocess.TimeoutExpired:
                note = f"a round takes more than {limit:g} s"
                found = [{"column": cell.column.name, "method": cell.method, "seconds": None, "note": note}]
            else:
                if said.returncode:
                    raise SystemExit(f"fedaudit {' '.join(words)}: {said.stderr or said.stdout}")
                found = [row for row in json.loads(said.stdout) if row["column"] == cell.column.name]
            rows += [{"table": name, "scale": scale, **row} for row in found]
            file.write_text(json.dumps(rows, indent=1) + "\n")
            print(name, cell.column.name, cell.method, [row["seconds"] for row in found], flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| table | scale | column | one seed of each of its methods |", "|---|---|---|---|"]
    for name, scale, column in dict.fromkeys((row["table"], row["scale"], row["column"]) for row in rows):
        of = [row for row in rows if (row["table"], row["scale"], row["column"]) == (name, scale, column)]
        each = ", ".join(f"{row['method']} {'?' if row['seconds'] is None else duration(row['seconds'])}" for row in of)
        known = [row["seconds"] for row in of if row["seconds"] is not None]
        more = "" if len(known) == len(of) else f" and {len(of) - len(known)} not timed"
        lines.append(f"| {name} | {scale} | {column} | {each}; together {duration(sum(known))}{more} |")
    return "\n".join(lines)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("what", nargs="*")
    words.add_argument("--table", action="store_true")
    words.add_argument("--only", action="append", default=[], help="TABLE, or TABLE=COLUMN; repeatable")
    words.add_argument("--method", action="append", default=[], help="only these; repeatable")
    words.add_argument("--random-data", action="store_true")
    words.add_argument("--limit", type=float, default=600.0)
    asked = words.parse_args()
    if asked.table:
        print(table([row for path in asked.what for row in json.loads(Path(path).read_text())]))
        return
    scale, file = asked.what
    if asked.random_data:
        random_data(Path(".data"))
    only = {name: column for name, _, column in (one.partition("=") for one in asked.only)}
    timed(scale, only, asked.method, asked.limit, Path(file))


if __name__ == "__main__":
    main()
