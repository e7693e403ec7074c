"""FedZGE's Table 2 on CIFAR-10 beside its controls, from the kept records.

python benchmarks/studies/fedzge/fedzge_table2.py

It prints the two tables of docs/results/fedzge.md: best and last rounds of each run, and the curves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WAYS = {
    "printed": "FedZGE",
    "real": "real images in place of x^",
    "central": "all records in one place",
    "cosine": "all records in one place, falling rate",
}
BATCHES = "test batch statistics"
AGREEMENT = "agreement of e with y^"


def kept(way: str) -> list[dict[str, Any]]:
    """Return the kept runs of a way, by seed."""
    folder = "fedzge_central_cifar10" if way in ("central", "cosine") else "fedzge_table2_cifar10"
    runs = [json.loads(file.read_text()) for file in (HERE / "records" / folder).glob(f"{way}-*.json")]
    return sorted(runs, key=lambda run: run["setting"]["seed"])


def curve(run: dict[str, Any], point: str = "") -> dict[int, float]:
    """Return the global model's accuracy in % by round, at the end of the round or at another point."""
    of = {r["round"]: r["global_points"].get(point) if point else r["global"] for r in run["rounds"] if "global" in r}
    return {number: 100 * found["accuracy"] for number, found in of.items() if found}


def agreement(run: dict[str, Any]) -> str:
    """Return the share of x^ that the ensemble takes for their y^, in the first and in the last tested round."""
    shares = [r["diagnostics"][AGREEMENT] for r in run["rounds"] if AGREEMENT in r.get("diagnostics", {})]
    return f"{100 * shares[0]:.0f} %, {100 * shares[-1]:.0f} %" if shares else "-"


def row(way: str, run: dict[str, Any]) -> str:
    ends, batches = curve(run), curve(run, BATCHES) if run["setting"]["method"] == "fedzge" else {}
    last = next(r["global"] for r in reversed(run["rounds"]) if "global" in r)
    interval = f"[{100 * last['low']:.1f}, {100 * last['high']:.1f}]"
    best = f"{max(batches.values()):.2f}" if batches else "-"
    cells = [
        WAYS[way],
        str(run["setting"]["seed"]),
        f"{max(ends.values()):.2f}",
        f"{100 * last['accuracy']:.2f} {interval}",
    ]
    return "| " + " | ".join([*cells, best, agreement(run)]) + " |"


def markdown() -> str:
    """Return the table of best and last rounds."""
    ways = "best round, % | last round, % [95 %] | best round, by test batches' statistics"
    head = f"| | seed | {ways} | e = y^, round 5, round 100 |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(row(way, run) for way in WAYS for run in kept(way))])


def curves() -> str:
    """Return the table of the loops' accuracy by round."""
    at = (5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
    rows = [
        f"| {WAYS[way]}, seed {run['setting']['seed']} | {' | '.join(f'{curve(run)[t]:.1f}' for t in at)} |"
        for way in ("printed", "real")
        for run in kept(way)
    ]
    return "\n".join([f"| round | {' | '.join(map(str, at))} |", "|---" * (1 + len(at)) + "|", *rows])


if __name__ == "__main__":
    print(markdown(), curves(), sep="\n\n")
