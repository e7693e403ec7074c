"""The runs of baselines_readings.toml as Markdown: gain over local training.

python benchmarks/studies/baselines/baselines_readings.py AUDIT... --json FILE     the figures are kept in FILE
python benchmarks/studies/baselines/baselines_readings.py FILE                     the tables from what was kept
python benchmarks/studies/baselines/baselines_readings.py FILE AUDIT --json FILE   what was kept, and more runs

A gain is an accuracy minus that of `local` on the same split and seed, in points; its mean over seeds has a 95 %
interval of Student's t. FedProto and FedTGP have two ways to predict; LG-FedAvg, FedGH and FedGen-LG are scored after
training and with the new head; FML and FedKD have a shared model, too.
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
        "set": record.setting.set,
    }
    points = record.result.last.points
    ways = {f"by {way}": of for way, of in points.items() if way in ("prototypes", "classifier")}
    if "new head" in points:
        ways = {"after training": last, "with the new head": points["new head"]}
    shared_model = record.result.last.global_
    return [
        {
            **shared,
            "point": way,
            "own": of.local_test.mean,
            "common": of.global_test.mean,
            "shared": shared_model.local_test.mean if shared_model and shared_model.local_test else None,
        }
        for way, of in (ways or {"": last}).items()
    ]


def name_of(row: dict[str, Any]) -> str:
    """The method, and what sets the row apart from the method's other rows."""
    differs = {key: value for key, value in row["set"].items() if key not in COMMON}
    if row["set"].get("eta", ETA) != ETA:
        differs = {"eta": row["set"]["eta"], **differs}
    words = [f"{key} {value}" for key, value in differs.items()] + ([row["point"]] if row["point"] else [])
    return f"{row['method']}{': ' if words else ''}{', '.join(words)}"


MEASURES = {  # whose accuracy on what; the shared model is held against the client's own of `local`
    "own": ("own", "clients' models, own records"),
    "common": ("common", "clients' models, common test"),
    "shared": ("own", "shared model, clients' records"),
}


def gains(rows: list[dict[str, Any]], measure: str) -> dict[str, Estimate]:
    """By row's name: the mean gain over `local` of the same seed, in points, with its interval."""
    alone = {row["seed"]: row[MEASURES[measure][0]] for row in rows if row["method"] == "local"}
    found: dict[str, Estimate] = {}
    for name in dict.fromkeys(map(name_of, rows)):
        of = [row for row in rows if name_of(row) == name and row["seed"] in alone and row[measure] is not None]
        found[name] = student_t([100 * (row[measure] - alone[row["seed"]]) for row in of])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line per reading; `local` has its accuracy instead of a gain."""
    lines = [f"| method and reading | seeds | {' | '.join(words for _, words in MEASURES.values())} |"]
    lines.append("|---|---:|" + "---:|" * len(MEASURES))
    by_measure = {measure: gains(rows, measure) for measure in MEASURES}
    for name in dict.fromkeys(map(name_of, rows)):
        cells = [_shown(by_measure[measure][name], "+") for measure in MEASURES]
        if name == "local":
            alone = [
                [100 * row[m] for row in rows if row["method"] == "local" and row[m] is not None] for m in MEASURES
            ]
            cells = [_shown(student_t(each), "") for each in alone]
        seeds = len({row["seed"] for row in rows if name_of(row) == name})
        lines.append(f"| {name}{', %' if name == 'local' else ''} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(found: Estimate, sign: str) -> str:
    if found.value is None:
        return "none"
    if found.low is None:
        return f"{found.value:{sign}.1f} (one seed: no interval)"
    return f"{found.value:{sign}.1f} [{found.low:{sign}.1f}, {found.high:{sign}.1f}]"


def kept(paths: list[Path]) -> list[dict[str, Any]]:
    """Every run once, `local` first: of the same one the last that is given."""
    runs: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for path in paths:
        if path.is_file():
            rows = json.loads(path.read_text())["runs"]
        else:
            found = map(read_record, sorted(path.glob("runs/*/record.json")))
            rows = [row for record in found if record.status == "done" for row in figures(record)]
        of = [(row["method"], json.dumps(row["set"], sort_keys=True), row["seed"]) for row in rows]
        for key in dict.fromkeys(of):
            runs[key] = [row for row, its in zip(rows, of, strict=True) if its == key]
    return [row for key in sorted(runs, key=lambda key: (key[0] != "local", *key)) for row in runs[key]]


def main(words: list[str]) -> None:
    keep = Path(words.pop(words.index("--json") + 1)) if "--json" in words else None
    paths = [Path(word) for word in words if word != "--json"]
    rows = kept(paths)
    if keep:
        keep.write_text(json.dumps({"runs": rows}, separators=(",", ":")) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
