"""The runs of a fedfree*.toml as Markdown tables: accuracy on the clients' own held-out records, and FedFree's choices.

python docs/results/fedfree_table.py OUT
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from pathlib import Path

from fedaudit import RunRecord, read_record
from fedaudit.wire.transcript import Transcript

COMMON = ("E", "B", "eta", "tau", "alpha", "beta")  # settings that tell no two rows of a table apart


def name(record: RunRecord) -> str:
    setting = record.setting
    return ", ".join([setting.method, *(f"{k} = {v}" for k, v in setting.set.items() if k not in COMMON)])


def cell(values: list[float]) -> str:
    spread = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f}{spread}"


def utility(records: list[RunRecord]) -> list[str]:
    """Local test, common test, and the global model on the common test; then kB that a client sends and receives."""
    last = [r.result["last"] for r in records]
    shown = [cell([u["clients"][which]["mean"] for u in last]) for which in ("local_test", "global_test")]
    shown.append(cell([u["global"]["test"]["accuracy"] for u in last]) if last[0]["global"] else "-")
    tasks = [sum(len(t.participants) for t in r.rounds) for r in records]
    for way in ("up", "down"):
        kB = statistics.mean(r.bytes(way, "payload") / n for r, n in zip(records, tasks, strict=True)) / 1e3
        shown.append(f"{kB:.1f}")
    return shown


def layers(folders: list[Path]) -> str | None:
    """FedFree: how often which layer was critical, and which global layer replaced which."""
    critical: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for folder in folders:
        for entry in Transcript(folder / "transcript").entries():
            if entry.message == "Critical":
                critical.update(list(entry["types"]))
            elif entry.message == "Knowledge":
                weight = next(iter(entry["g"]))
                sent[f"{weight.rpartition('.')[0]} for {entry['layer']}"] += 1
    if not critical:
        return None
    uploads = sum(critical.values())
    chosen = ", ".join(f"{layer} {100 * n / uploads:.0f} %" for layer, n in critical.most_common(5))
    swaps = ", ".join(f"{swap} {100 * n / sum(sent.values()):.0f} %" for swap, n in sent.most_common(5))
    return f"uploaded: {chosen}; sent back ({sum(sent.values())} for {uploads} layers uploaded): {swaps}"


def main(out: Path) -> None:
    groups: dict[tuple[str, str, str], list[Path]] = {}
    for path in sorted(out.glob("runs/*/record.json")):
        record = read_record(path.parent)
        key = (record.setting.partition, record.setting.model, name(record))
        groups.setdefault(key, []).append(path.parent)
    print("| partition | model | method | seeds | own test, % | common test, % | global model, % | kB up | kB down |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (partition, model, method), folders in sorted(groups.items()):
        numbers = " | ".join(utility([read_record(folder) for folder in folders]))
        print(f"| {partition} | {model} | {method} | {len(folders)} | {numbers} |")
    print()
    for (partition, model, method), folders in sorted(groups.items()):
        if text := layers(folders):
            print(f"- {partition}, {model}, {method}: {text}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
