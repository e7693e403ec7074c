"""The runs of baselines_privacy.toml as Markdown: what attacks on one vector per class found.

python docs/results/baselines_attacks.py AUDIT... --json FILE     the figures are kept in FILE
python docs/results/baselines_attacks.py FILE                     the table from what was kept

One line per method and epsilon, means over seeds with a 95 % interval of Student's t; "leak" counts the seeds in which
the attack's own verdict is a leak, with the intervals that it has within a run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedaudit import RunRecord, read_record
from fedaudit.runtime.attack_result import HistogramResult, NotRun, ReconstructionResult, measures_of
from fedaudit.stats import student_t

FIGURES = {  # attack: measure, its heading, what the verdict is called, and how many digits
    "prototype_membership": ("auc", "membership, AUC", "leak", 3),
    "prototype_property": ("gain", "label shares, gain on uniform", "leak", 2),
    "prototype_inversion": ("mse", "inversion, MSE", "beats_baselines", 3),
}
KINDS = ("prototypes", "logits")


def figures(record: RunRecord) -> dict[str, Any]:
    """Of one run: the clients' accuracy, and what each attack found."""
    policy = next((record.setting.privacy[kind] for kind in KINDS if kind in record.setting.privacy), {})
    last = record.result.last
    found: dict[str, Any] = {
        "method": record.setting.method,
        "seed": record.setting.seed,
        "epsilon": policy.get("epsilon"),
        "own": last.clients.local_test.mean if last and last.clients and last.clients.local_test else None,
        "attacks": {},
    }
    for result in record.attacks:
        if result.attack not in FIGURES:
            continue
        measure, _, verdict, _ = FIGURES[result.attack]
        if isinstance(result, NotRun):
            found["attacks"][result.attack] = {"reason": result.reason}
            continue
        of = {"value": measures_of(result)[measure].value, "leak": bool(getattr(result, verdict))}
        if isinstance(result, HistogramResult):
            of["presence"] = result.pooled.presence.value
            of["source"] = sorted({client.source for client in result.client.values()})
        if isinstance(result, ReconstructionResult):
            of["class_mean"] = result.baselines["class_mean"].mse.value
        found["attacks"][result.attack] = of
    return found


def table(rows: list[dict[str, Any]]) -> str:
    heads = [head for _, head, _, _ in FIGURES.values()]
    heads.insert(2, "held classes, AUC")
    heads.append("class mean instead, MSE")
    lines = [f"| method | epsilon | own held-out, % | {' | '.join(heads)} |", "|---|---:|" + "---:|" * (len(heads) + 1)]
    for method, epsilon in dict.fromkeys((row["method"], row["epsilon"]) for row in rows):
        of = [row for row in rows if (row["method"], row["epsilon"]) == (method, epsilon)]
        cells = [_mean([100 * row["own"] for row in of], 1)]
        for attack, (_, _, _, digits) in FIGURES.items():
            found = [row["attacks"][attack] for row in of if "value" in row["attacks"].get(attack, {})]
            leaks = f"; leak in {sum(f['leak'] for f in found)} of {len(found)}" if found else ""
            cells.append(_mean([f["value"] for f in found], digits) + leaks)
            if attack == "prototype_property":
                cells.append(_mean([f["presence"] for f in found if f["presence"] is not None], 2))
            if attack == "prototype_inversion":
                cells.append(_mean([f["class_mean"] for f in found], digits))
        lines.append(f"| {method} | {'open' if epsilon is None else f'{epsilon:g}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: list[float], digits: int) -> str:
    found = student_t(values)
    if found.value is None:
        return "not run"
    if found.low is None:
        return f"{found.value:.{digits}f}"
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def main(words: list[str]) -> None:
    keep = Path(words.pop(words.index("--json") + 1)) if "--json" in words else None
    paths = [Path(word) for word in words if word != "--json"]
    if len(paths) == 1 and paths[0].is_file():
        rows = json.loads(paths[0].read_text())["runs"]
    else:
        files = sorted(file for path in paths for file in path.glob("runs/*/record.json"))
        rows = [figures(record) for record in map(read_record, files) if record.status == "done"]
        rows.sort(key=lambda row: (row["method"], -(row["epsilon"] or 1e9), row["seed"]))
    if keep:
        keep.write_text(json.dumps({"suite": "baselines_privacy.toml", "runs": rows}, separators=(",", ":")) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
