"""The table of docs/results/sums.md, from the kept figures of the runs.

python benchmarks/studies/sums/table.py --keep AUDIT NAME    # figures of an audit's runs: records/NAME.json
python benchmarks/studies/sums/table.py                      # the table, as it stands in the page
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedaudit.metrics.guarantee import EPSILON
from fedaudit.reports.runs import privacy_text
from fedaudit.reports.tests_over_seeds import over_seeds
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.units import bytes_text

HERE = Path(__file__).parent
NAMES = ("digits",)


def keep(audit: Path, name: str) -> None:
    """Keep one line of figures for each finished run below an audit's folder."""
    kept = []
    for path in sorted(audit.glob("**/record.json")):
        record = read_record(path.parent)
        if record.status == "done":
            kept.append(figures(record))
    kept.sort(key=lambda row: (row["row"], row["seed"]))
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
        if found.get("auc") is not None:
            auc[f"{found['attack']} by {found['threat']}"] = found["auc"]
    epsilon = EPSILON.limited(record)
    return {
        "row": f"{sums} sums, {privacy_text(setting.privacy) if setting.privacy else 'no noise'}",
        "seed": setting.seed,
        "clients": setting.clients,
        "accuracy": test.accuracy,
        "epsilon": "infinite" if epsilon == float("inf") else epsilon,
        "unit": next((e.unit for c in record.ledger for e in c.entries if e.unit == "client"), "record"),
        "to": next((e.to for c in record.ledger for e in c.entries if e.unit == "client"), "everybody"),
        "up": record.bytes("up"),
        "down": record.bytes("down"),
        "seconds": round(sum(row.wall_s for row in record.rounds), 1),
        "auc": auc,
        "device": record.device,
    }


def table(name: str) -> str:
    """Return the table as Markdown: one line for each setting, its figures over seeds."""
    by: dict[str, list[dict[str, Any]]] = {}
    for run in json.loads((HERE / "records" / f"{name}.json").read_text()):
        by.setdefault(run["row"], []).append(run)
    lines = [
        "| setting | accuracy, % | ε, for whom, against whom | up, a run | AUC of `loss`: server; outsider |",
        "| --- | --- | --- | --- | --- |",
    ]
    for text, of in sorted(by.items(), key=lambda item: -sum(run["accuracy"] for run in item[1]) / len(item[1])):
        reached = over_seeds([100 * run["accuracy"] for run in of], (0.0, 100.0))
        epsilon = of[0]["epsilon"]
        promised = "infinite" if epsilon == "infinite" else f"{epsilon:.2f}, a {of[0]['unit']}, {of[0]['to']}"
        sent = bytes_text(sum(run["up"] for run in of) / len(of))
        auc = "; ".join(_mean_auc(of, threat) for threat in ("server", "outsider"))
        accuracy = f"{reached.value:.1f} [{reached.low:.1f}, {reached.high:.1f}]"
        lines.append(f"| {text} | {accuracy} | {promised} | {sent} | {auc} |")
    return "\n".join(lines)


def _mean_auc(of: list[dict[str, Any]], threat: str) -> str:
    values = [run["auc"][key] for run in of for key in run["auc"] if key == f"loss by {threat}"]
    return f"{sum(values) / len(values):.2f}" if values else "–"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", nargs=2, metavar=("AUDIT", "NAME"))
    given = parser.parse_args()
    if given.keep:
        keep(Path(given.keep[0]), given.keep[1])
    for name in NAMES:
        if (HERE / "records" / f"{name}.json").exists():
            print(f"{name}\n\n{table(name)}\n")
