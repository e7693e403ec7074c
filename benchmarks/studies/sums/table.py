"""The tables of docs/results/sums.md, from the kept figures of the runs.

python benchmarks/studies/sums/table.py --take FOLDER    # keeps the figures that run.py wrote (figures-NAME.json)
python benchmarks/studies/sums/table.py --page           # writes the tables into the page
python benchmarks/studies/sums/table.py                  # prints them
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from fedaudit.metrics.guarantee import EPSILON
from fedaudit.reports.runs import privacy_text
from fedaudit.reports.tests_over_seeds import over_seeds
from fedaudit.runtime.run_record import RunRecord
from fedaudit.units import bytes_text

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "results" / "sums.md"
NAMES = ("digits", "fashion_100", "fashion_1000")
NONE = "No runs are kept yet."
THREATS = ("server", "peer:0", "outsider")


def take(folder: Path) -> None:
    """Keep the figures of a folder that run.py wrote."""
    (HERE / "records").mkdir(exist_ok=True)
    for name in NAMES:
        for path in (folder / f"figures-{name}.json", folder / f"{name}.json"):
            if path.exists():
                kept = sorted(json.loads(path.read_text()), key=lambda row: (row["row"], row["seed"]))
                (HERE / "records" / f"{name}.json").write_text(json.dumps(kept, indent=1) + "\n")


def figures(record: RunRecord) -> dict[str, Any]:
    """Return what the table needs of one run."""
    last = record.rounds[-1].utility
    assert last is not None
    assert last.global_ is not None
    test = last.global_.test
    assert test is not None
    setting = record.setting
    sums = "secure" if setting.aggregate == "secure" else "open"
    auc = {}
    for attack in record.attacks:
        found = attack.model_dump(mode="json")
        pooled = (found.get("pooled") or {}).get("auc")
        if pooled is not None and not found["blind"]:
            auc[f"{found['attack']} by {found['threat']}"] = {key: pooled[key] for key in ("value", "low", "high")}
    epsilon = EPSILON.limited(record)
    return {
        "row": f"{sums} sums, {privacy_text(setting.privacy) if setting.privacy else 'no noise'}",
        "seed": setting.seed,
        "clients": setting.clients,
        "rounds": setting.rounds,
        "accuracy": test.accuracy,
        "epsilon": "infinite" if epsilon == float("inf") else epsilon,
        "unit": next((e.unit for c in record.ledger for e in c.entries if e.unit == "client"), "record"),
        "to": next((e.to for c in record.ledger for e in c.entries if e.unit == "client"), "everybody"),
        "fewest": min((one.stayed for row in record.rounds for one in row.sums if one.secure), default=None),
        "up": record.bytes("up"),
        "down": record.bytes("down"),
        "seconds": round(sum(row.wall_s for row in record.rounds), 1),
        "auc": auc,
        "device": record.device,
    }


def kept(name: str) -> list[dict[str, Any]]:
    """Return the kept figures of a suite's runs."""
    path = HERE / "records" / f"{name}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def table(name: str) -> str:
    """Return a suite's table as Markdown: one line for each setting, its figures over seeds."""
    by: dict[str, list[dict[str, Any]]] = {}
    for run in kept(name):
        by.setdefault(run["row"], []).append(run)
    if not by:
        return NONE
    asks = any("participation by outsider" in run["auc"] for of in by.values() for run in of)
    columns = [
        "setting",
        "runs",
        "accuracy, %",
        "ε, for whom, against whom",
        "up, a run",
        "`loss`: server; peer; outsider",
    ]
    columns += ["`participation`: outsider"] if asks else []
    lines = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for text, of in sorted(by.items(), key=lambda item: -sum(run["accuracy"] for run in item[1]) / len(item[1])):
        reached = over_seeds([100 * run["accuracy"] for run in of], (0.0, 100.0))
        epsilon = max(
            float("inf") if run["epsilon"] == "infinite" else run["epsilon"] for run in of
        )  # the worst seed's
        promised = "infinite" if epsilon == float("inf") else f"{epsilon:.2f}, a {of[0]['unit']}, {of[0]['to']}"
        interval = "" if reached.low is None or reached.high is None else f" [{reached.low:.1f}, {reached.high:.1f}]"
        cells = [text, str(len(of)), f"{reached.value:.1f}{interval}", promised]
        cells.append(bytes_text(sum(run["up"] for run in of) / len(of)))
        cells.append("; ".join(_mean_auc(of, f"loss by {threat}") for threat in THREATS))
        cells += [_mean_auc(of, "participation by outsider")] if asks else []
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_auc(of: list[dict[str, Any]], key: str) -> str:
    values = [run["auc"][key]["value"] for run in of if key in run["auc"]]
    return f"{sum(values) / len(values):.2f}" if values else "–"


def place(page: str) -> str:
    """Return the page with its tables made anew: each stands between two marks."""
    for name in NAMES:
        between = rf"(<!-- {name} -->\n).*?(\n<!-- end -->)"
        page = re.sub(between, lambda m, name=name: m[1] + table(name) + m[2], page, flags=re.DOTALL)
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, metavar="FOLDER")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.take:
        take(given.take)
    if given.page:
        PAGE.write_text(place(PAGE.read_text()))
    for name in NAMES:
        print(f"{name}\n\n{table(name)}\n")
