"""FedZGE on digits, trained generator beside frozen one, from kept records.

python benchmarks/studies/fedzge/fedzge_search.py [STUDY]      a folder under records/; fedzge_search is the default

A row per setting, named by what differs from the first row's: the global model in % in the last round, with a Wilson
interval of 95 % over the test records, for the trained generator and for the frozen one, the best evaluated round of
each, and how often the ensemble's answer to x^ is the label y^ at the end. Several seeds are several rows. A run that
was cut off says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"
AROUND = ("model", "image_size", "partition")  # what differs outside the method
USUAL: dict[str, Any] = {
    "E_k": 5, "B_k": 64, "E_prime": 1, "B": 200, "E_G": 5, "q": 5, "E": 20, "eta": 0.003,
    "model": "cnn", "image_size": None, "partition": "dirichlet:0.5",
}  # fmt: skip


def read(study: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((RECORDS / study).glob("*.json"))]


def name_of(record: dict[str, Any]) -> str:
    setting = record["setting"]
    told = {**{key: setting[key] for key in AROUND}, **setting["set"]}
    return ", ".join(f"{key} {value}" for key, value in told.items() if key != "images" and value != USUAL.get(key))


def pairs(records: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """(setting, seed) -> where the images come from -> the run."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for record in records:
        if record["rounds"]:
            images = record["hyper_parameters"]["images"]
            found.setdefault((name_of(record), record["setting"]["seed"]), {})[images] = record
    return found


def accuracies(record: dict[str, Any]) -> list[float]:
    return [100 * at["global"]["accuracy"] for at in record["rounds"]]


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "- | -"
    last = record["rounds"][-1]["global"]
    told = f"{100 * last['accuracy']:.1f} [{100 * last['low']:.1f}, {100 * last['high']:.1f}]"
    if record["status"] != "done":
        told += f" after {record['rounds'][-1]['round']} rounds"
    return f"{told} | {max(accuracies(record)):.1f}"


def markdown(study: str) -> str:
    lines = [
        "| setting | seed | trained, % [95 %] | best | frozen, % [95 %] | best | e = y^, trained |",
        "|---|---|---|---|---|---|---|",
    ]
    found = pairs(read(study))

    def order(key: tuple[str, int]) -> tuple[float, str, int]:
        first = next(iter(found[key].values()))
        return -accuracies(found[key].get("trained", first))[-1], *key

    for name, seed in sorted(found, key=order):
        runs = found[name, seed]
        trained = runs.get("trained") or runs.get("real")
        shares = list((trained or {"rounds": [{}]})["rounds"][-1].get("diagnostics", {}).values())
        agrees = f"{100 * shares[0]:.0f} %" if shares else "-"
        said = (name or "as it is") + (" (real images)" if "real" in runs else "")
        lines.append(f"| {said} | {seed} | {_cell(trained)} | {_cell(runs.get('frozen'))} | {agrees} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(*sys.argv[1:2] or ["fedzge_search"]))
