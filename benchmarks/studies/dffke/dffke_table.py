"""A folder of runs as a table: accuracy of the clients' models in %, and the cosines of Table 4.

python benchmarks/studies/dffke/dffke_table.py audit/dffke

Last round: on the common test set and on own held-out records, mean ± standard deviation over seeds of the mean over
clients; where a method has two points of a round, after the exchange and, in columns of its own, before it. Best
round: the paper's statistic, of the round with the best mean on the common test set, mean ± standard deviation over
clients, averaged over seeds.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from fedaudit.runtime.run_record import RunRecord, read_record


def group(record: RunRecord, common: set[str]) -> str:
    """What sets this run apart from the others, but for its seed."""
    setting = record.setting.model_dump(exclude=common | {"seed"})
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in setting.items()).replace('"', "")


def mean_std(values: list[float], digits: int) -> str:
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def collaborators(record: RunRecord) -> int:
    """How many clients ever took part: the others' untrained models are no result of the method (Table 6)."""
    return max(1, round(record.setting.set.get("pi", 1.0) * record.setting.clients))


def cosine(record: RunRecord, kind: str) -> float | None:
    values = [e.cosine for c in record.ledger for e in c.entries if e.kind == kind and e.cosine is not None]
    return statistics.fmean(values) if values else None


def over_clients(scores: dict[str, Any], test: str, m: int) -> list[float]:
    """Percent of each of the first m clients."""
    return [100 * value for value in scores[test]["each"][:m]]


def best_round(record: RunRecord) -> tuple[float, float]:
    """Mean and deviation over clients in the round in which the mean is largest: as papers report it."""
    m = collaborators(record)
    utilities = [row.utility.model_dump() for row in record.rounds if row.utility]
    rounds = [over_clients(utility["clients"], "global_test", m) for utility in utilities]
    best = max(rounds, key=statistics.fmean)
    return statistics.fmean(best), statistics.pstdev(best)


def table(folder: Path) -> list[str]:
    records = [read_record(path.parent) for path in sorted(folder.glob("**/record.json"))]
    records = [record for record in records if record.status == "done"]
    settings = [record.setting.model_dump() for record in records]
    common = {key for key in settings[0] if all(s[key] == settings[0][key] for s in settings)} - {"method"}
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(group(record, common), []).append(record)
    lines = [
        "| run | seeds | common | own | trained: common | own | best round: common | global model | C_E | C_Y | "
        "MB a round | s a round |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in groups.items():
        cells = [name, str(len(runs))]
        last = [(r.result.model_dump()["last"], collaborators(r)) for r in runs]
        for point in ("", "trained"):
            for test in ("global_test", "local_test"):
                scores = [(u["clients"] if not point else u.get("points", {}).get(point), m) for u, m in last]
                means = [statistics.fmean(over_clients(of, test, m)) for of, m in scores if of and of[test]]
                cells.append(mean_std(means, 1) if means else "")
        best = [best_round(r) for r in runs]
        cells.append(" ± ".join(f"{statistics.fmean(values):.1f}" for values in zip(*best, strict=True)))
        models = [100 * u["global"]["test"]["accuracy"] for u, _ in last if u["global"]]
        cells.append(mean_std(models, 1) if models else "")
        for kind in ("embeddings", "logits"):
            values = [c for r in runs if (c := cosine(r, kind)) is not None]
            cells.append(f"{statistics.fmean(values):.3f}" if values else "")
        bytes_ = [(row.up_wire + row.down_wire) / 1e6 for r in runs for row in r.rounds]
        cells += [
            f"{statistics.fmean(bytes_):.1f}",
            f"{statistics.fmean(row.wall_s for r in runs for row in r.rounds):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]))))
