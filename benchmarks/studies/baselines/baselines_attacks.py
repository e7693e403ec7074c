"""The runs of baselines_privacy.toml as Markdown: what attacks on one vector per class found.

python benchmarks/studies/baselines/baselines_attacks.py AUDIT... --json FILE     the figures are kept in FILE
python benchmarks/studies/baselines/baselines_attacks.py FILE                     the table from what was kept

One line per method and epsilon: means over seeds with a 95 % interval of Student's t, or one seed with the interval
within its run. "leak" counts the seeds in which the attack's own verdict is a leak. Where that is no seed, the cell
says "not found by this attack": there may be a leak all the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from fedaudit import RunRecord, read_record
from fedaudit.runtime.attack_result import HistogramResult, NotRun, ReconstructionResult, measures_of
from fedaudit.stats import Estimate, mean_in_range, student_t

FIGURES = {  # attack: measure, its heading, what the verdict is called, and how many digits
    "prototype_membership": ("auc", "membership, AUC", "leak", 3),
    "prototype_property": ("gain", "label shares, gain on uniform", "leak", 2),
    "prototype_inversion": ("mse", "inversion, MSE", "beats_baselines", 3),
}
KINDS = ("prototypes", "logits")


def figures(record: RunRecord) -> dict[str, Any]:
    """Of one run: the clients' accuracy, and what each attack found, with the intervals that figures have there."""
    policy = next((record.setting.privacy[kind] for kind in KINDS if kind in record.setting.privacy), {})
    last = record.result.last
    assert last is not None
    assert last.clients is not None
    assert last.clients.local_test is not None
    found: dict[str, Any] = {
        "method": record.setting.method,
        "seed": record.setting.seed,
        "epsilon": policy.get("epsilon"),
        "own": last.clients.local_test.mean,
        "own_interval": _three(student_t(last.clients.local_test.each))[1:],  # over clients
        "attacks": {},
    }
    for result in record.attacks:
        if result.attack not in FIGURES:
            continue
        measure, _, verdict, _ = FIGURES[result.attack]
        if isinstance(result, NotRun):
            found["attacks"][result.attack] = {"reason": result.reason}
            continue
        of: dict[str, Any] = {"value": _three(measures_of(result)[measure]), "leak": bool(getattr(result, verdict))}
        if isinstance(result, HistogramResult):
            of["presence"] = _three(result.pooled.presence)
            of["source"] = sorted({client.source for client in result.client.values()})
        if isinstance(result, ReconstructionResult):
            of["class_mean"] = _three(result.baselines["class_mean"].mse)
        found["attacks"][result.attack] = of
    return found


def _three(found: Estimate) -> list[float | None]:
    return [found.value, found.low, found.high]


def table(rows: list[dict[str, Any]]) -> str:
    heads = [head for _, head, _, _ in FIGURES.values()]
    heads.insert(2, "held classes, AUC")
    heads.append("class mean instead, MSE")
    lines = [f"| method | epsilon | seeds | own held-out, % | {' | '.join(heads)} |"]
    lines.append("|---|---:|---:|" + "---:|" * (len(heads) + 1))
    for method, epsilon in dict.fromkeys((row["method"], row["epsilon"]) for row in rows):
        of = [row for row in rows if (row["method"], row["epsilon"]) == (method, epsilon)]
        own = [[100 * v for v in (row["own"], *row["own_interval"])] for row in of]
        cells = [str(len(of)), _cell(own, 1, (0, 100))]
        for attack, (_, _, _, digits) in FIGURES.items():
            found = [row["attacks"][attack] for row in of if "value" in row["attacks"].get(attack, {})]
            cells.append(_cell([f["value"] for f in found], digits) + _verdict([f["leak"] for f in found]))
            if attack == "prototype_property":
                cells.append(_cell([f["presence"] for f in found], 2))
            if attack == "prototype_inversion":
                cells.append(_cell([f["class_mean"] for f in found], digits))
        lines.append(f"| {method} | {'open' if epsilon is None else f'{epsilon:g}'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _verdict(leaks: list[bool]) -> str:
    if not leaks:
        return ""
    return f"; leak in {sum(leaks)} of {len(leaks)}" if any(leaks) else "; not found by this attack"


def _cell(estimates: list[list[Any]], digits: int, within: tuple[float, float] | None = None) -> str:
    """Over seeds Student's interval of the mean, `within` a range if there is one; of one seed the interval within that
    run."""
    known = [each for each in estimates if each[0] is not None]
    if not known:
        return "none"
    values = [each[0] for each in known]
    over_seeds = student_t(values) if within is None else mean_in_range(values, *within)
    value, low, high = known[0] if len(known) == 1 else _three(over_seeds)
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


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
