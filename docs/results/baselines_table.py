"""The runs of baselines.toml as a Markdown table: means over seeds with a 95 % interval of Student's t.

python docs/results/baselines_table.py AUDIT... --json FILE     the figures are kept in FILE
python docs/results/baselines_table.py FILE                     the table from what was kept
python docs/results/baselines_table.py FILE AUDIT --json FILE   what was kept, and more runs
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from fedaudit import RunRecord, read_record
from fedaudit.stats import student_t

SUITE = Path(__file__).with_name("baselines.toml")
COLUMNS = {
    "global": "global model, common test",
    "common": "clients' models, common test",
    "own": "clients' models, own held-out",
}


WAYS = ("prototypes", "classifier")  # in which clients of FedProto and FedTGP may predict: a row for each


def figures(record: RunRecord) -> list[dict[str, Any]]:
    """Of the last round of one run: shares, and bytes that a client sends and receives in a round."""
    last = record.result.model_dump()["last"]
    tasks = sum(len(row.participants) for row in record.rounds)
    shared = {
        "method": record.setting.method,
        "seed": record.setting.seed,
        "set": record.setting.set,
        "global": last["global"]["test"]["accuracy"] if last["global"] else None,
        **{way: record.bytes(way) / tasks for way in ("up", "down")},
    }
    ways = {f"by {way}": last["points"][way] for way in WAYS if way in last.get("points", {})} or {"": last["clients"]}
    return [
        {**shared, "way": way, "common": of["global_test"]["mean"], "own": of["local_test"]["mean"]}
        for way, of in ways.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """One line per method, in the order of the suite."""
    lines = [
        f"| method | {' | '.join(f'{name}, %' for name in COLUMNS.values())} | up, kB | down, kB |",
        "|---|" + "---:|" * (len(COLUMNS) + 2),
    ]
    for method, way in dict.fromkeys((row["method"], row.get("way", "")) for row in rows):
        of = [row for row in rows if (row["method"], row.get("way", "")) == (method, way)]
        cells = [_cell([row[key] for row in of]) for key in COLUMNS]
        traffic = [f"{sum(row[way] for row in of) / len(of) / 1e3:.1f}" for way in ("up", "down")]
        lines.append(f"| {' '.join(filter(None, (method, way)))} | {' | '.join([*cells, *traffic])} |")
    return "\n".join(lines)


def _cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    found = student_t(known)
    if found.low is None:
        return f"{100 * found.value:.1f}"
    return f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def kept(paths: list[Path]) -> list[dict[str, Any]]:
    """Every run once, in the order of the suite: of the same one the last that is given."""
    runs: dict[tuple[str, ...], dict[str, Any]] = {}
    for path in paths:
        if path.is_file():
            rows = json.loads(path.read_text())["runs"]
        else:
            found = map(read_record, sorted(path.glob("runs/*/record.json")))
            rows = [row for record in found if record.status == "done" for row in figures(record)]
        runs |= {(row["method"], row["way"], row["seed"]): row for row in rows}
    order = [method["method"] for method in tomllib.loads(SUITE.read_text())["methods"]]
    return sorted(
        runs.values(), key=lambda row: (order.index(row["method"]), row["way"] != "by prototypes", row["seed"])
    )


def main(words: list[str]) -> None:
    keep = Path(words.pop(words.index("--json") + 1)) if "--json" in words else None
    paths = [Path(word) for word in words if word != "--json"]
    rows = kept(paths)
    if keep:
        keep.write_text(json.dumps({"suite": "baselines.toml", "runs": rows}, separators=(",", ":")) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
