"""The runs of fedaf.toml or fedaf_fmnist.toml as a table: mean and deviation over seeds, and what was published.

python docs/results/fedaf_table.py OUT
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from fedaudit import RunRecord, read_record

PUBLISHED = {  # Table 1, Fashion-MNIST, alpha 0.02, 0.05, 0.1: the highest accuracy within 20 rounds
    "fedavg": ("56.50 ± 5.55", "69.14 ± 5.84", "82.19 ± 5.67"),
    "feddm": ("85.36 ± 0.96", "86.08 ± 0.68", "86.65 ± 0.31"),
    "fedaf": ("87.53 ± 0.32", "87.29 ± 0.23", "87.91 ± 0.41"),
}
ALPHAS = ("dirichlet:0.02", "dirichlet:0.05", "dirichlet:0.1")


def name(record: RunRecord) -> str:
    setting = record.setting
    without = [what for key, what in (("lambda_loc", "CDC"), ("lambda_glob", "LGKM")) if setting.set.get(key) == 0]
    return setting.method + "".join(f", w/o {what}" for what in without)


def accuracy(record: RunRecord, which: str) -> float | None:
    """In percent, of the global model, or of the clients' own on average where there is no global one."""
    found = record.result[which]
    if found is None:
        return None
    if "accuracy" in found:
        return 100 * found["accuracy"]
    if found["global"] is not None:
        return 100 * found["global"]["test"]["accuracy"]
    return 100 * found["clients"]["global_test"]["mean"] if found["clients"] else None


def cell(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.2f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.2f}{spread}"


def main(out: Path) -> None:
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for path in sorted(out.glob("runs/*/record.json")):
        record = read_record(path.parent)
        groups.setdefault((record.setting.partition, name(record)), []).append(record)
    print("| partition | method | seeds | rounds | last | chosen | best test round | published | MB up a client |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (partition, method), records in sorted(groups.items()):
        first = records[0].setting
        paper = "-"
        if first.dataset == "fashion-mnist" and partition in ALPHAS:
            paper = PUBLISHED.get(method, ("-",) * 3)[ALPHAS.index(partition)]
        rounds = "/".join(str(n) for n in sorted({len(r.rounds) for r in records}))
        up = statistics.mean(r.bytes("up", "payload") / sum(len(t.participants) for t in r.rounds) for r in records)
        scores = [cell([accuracy(r, which) for r in records]) for which in ("last", "chosen", "best_test_round")]
        print(
            f"| {partition} | {method} | {len(records)} | {rounds} | {' | '.join(scores)} | {paper} | {up / 1e6:.3f} |"
        )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
