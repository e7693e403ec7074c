"""The runs of baselines_readings.toml as Markdown: gain over local training.

python docs/results/baselines_readings.py AUDIT... --json FILE     the figures are kept in FILE
python docs/results/baselines_readings.py FILE                     the tables from what was kept

A gain is the accuracy of the clients' models on their own held-out records minus that of `local` on the same split and
seed, in points; its mean over seeds has a 95 % interval of Student's t. FedProto and FedTGP have two ways to predict.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedaudit import RunRecord, read_record
from fedaudit.stats import Estimate, student_t

COMMON = ("E", "B", "eta", "hidden", "S_G")  # settings that are no reading; eta is where a row departs from the others
ETA = 0.05


def figures(record: RunRecord) -> list[dict[str, Any]]:
    """Of the last round of one run: a row for each way to predict that it has."""
    last = record.result.last.clients
    if last is None:
        return []
    shared = {
        "method": record.setting.method,
        "seed": record.setting.seed,
        "partition": record.setting.partition,
        "set": record.setting.set,
    }
    points = record.result.last.points or {}
    ways = {name: of for name, of in points.items() if name != "classifier"}
    rows = [{**shared, "point": "", "own": last.local_test.mean, "common": last.global_test.mean}]
    return rows + [
        {**shared, "point": name, "own": of.local_test.mean, "common": of.global_test.mean}
        for name, of in sorted(ways.items())
    ]


def name_of(row: dict[str, Any]) -> str:
    """The method, and what sets the row apart from the method's other rows."""
    differs = {key: value for key, value in row["set"].items() if key not in COMMON}
    if row["set"].get("eta", ETA) != ETA:
        differs = {"eta": row["set"]["eta"], **differs}
    words = [f"{key} {value}" for key, value in differs.items()] + ([f"by {row['point']}"] if row["point"] else [])
    return f"{row['method']}{': ' if words else ''}{', '.join(words)}"


def gains(rows: list[dict[str, Any]], partition: str, measure: str) -> dict[str, Estimate]:
    """By row's name: the mean gain over seeds with its interval."""
    of = [row for row in rows if row["partition"] == partition]
    alone = {row["seed"]: row[measure] for row in of if row["method"] == "local"}
    found: dict[str, Estimate] = {}
    for name in dict.fromkeys(map(name_of, of)):
        each = [
            100 * (row[measure] - alone[row["seed"]]) for row in of if name_of(row) == name and row["seed"] in alone
        ]
        found[name] = student_t(each)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line per reading, a column per split; `local` has its accuracy instead of a gain."""
    partitions = list(dict.fromkeys(row["partition"] for row in rows))
    lines = [f"| method and reading | {' | '.join(f'{p}, own records' for p in partitions)} |"]
    lines.append("|---|" + "---:|" * len(partitions))
    by_split = {p: gains(rows, p, "own") for p in partitions}
    for name in dict.fromkeys(map(name_of, rows)):
        if name == "local":
            locals_ = [
                [100 * r["own"] for r in rows if r["method"] == "local" and r["partition"] == p] for p in partitions
            ]
            lines.append(f"| local, % | {' | '.join(_shown(student_t(each), '') for each in locals_)} |")
        else:
            lines.append(f"| {name} | {' | '.join(_shown(by_split[p].get(name), '+') for p in partitions)} |")
    return "\n".join(lines)


def _shown(found: Estimate | None, sign: str) -> str:
    if found is None or found.value is None:
        return "not run"
    if found.low is None:
        return f"{found.value:{sign}.1f}"
    return f"{found.value:{sign}.1f} [{found.low:{sign}.1f}, {found.high:{sign}.1f}]"


def main(words: list[str]) -> None:
    keep = Path(words.pop(words.index("--json") + 1)) if "--json" in words else None
    paths = [Path(word) for word in words if word != "--json"]
    if len(paths) == 1 and paths[0].is_file():
        rows = json.loads(paths[0].read_text())["runs"]
    else:
        found = sorted(file for path in paths for file in path.glob("runs/*/record.json"))
        records = [record for record in map(read_record, found) if record.status == "done"]
        rows = [row for record in records for row in figures(record)]
        rows.sort(key=lambda row: (row["method"] != "local", row["method"], json.dumps(row["set"]), row["seed"]))
    if keep:
        keep.write_text(json.dumps({"runs": rows}, separators=(",", ":")) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
