"""The runs of a fedfree*.toml as Markdown tables: accuracy on the clients' own held-out records, and FedFree's choices.

python benchmarks/studies/fedfree/fedfree_table.py OUT [--json FILE]     the figures are kept in FILE
python benchmarks/studies/fedfree/fedfree_table.py FILE                  the tables from what was kept
python benchmarks/studies/fedfree/fedfree_table.py FILE --wide           a row per method, its partitions side by side
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fedaudit import RunRecord, read_record
from fedaudit.wire.transcript import Transcript

COMMON = ("E", "B", "eta", "tau", "alpha", "beta")  # settings that tell no two rows of a table apart
COLUMNS = {
    "own": "own test, %",
    "other": "the other point, own test, %",  # FedFree: with the received layer put in, or before
    "global_own": "global model, own tests, %",
    "common": "common test, %",
    "global": "global model, common test, %",
}


def name(record: RunRecord) -> str:
    setting = record.setting
    told = [f"{k} = {v}" for k, v in setting.set.items() if k not in COMMON]
    epochs = setting.set.get("E", 1)
    regime = [f"{setting.rounds} rounds of {epochs} epochs"] if setting.rounds == 4 else []
    return ", ".join([setting.method, *(["init = own"] if setting.init == "own" else []), *regime, *told])


def figures(record: RunRecord) -> dict[str, float | None]:
    """Of the last round of one run: shares, and kB that a client sends and receives in a round."""
    last = record.result.model_dump()["last"]
    of_global, points = last["global"] or {}, list(last.get("points", {}).values())
    tasks = sum(len(t.participants) for t in record.rounds)

    def mean(of: dict[str, Any], which: str) -> float | None:
        return of[which]["mean"] if of.get(which) else None

    return {
        "own": mean(last["clients"], "local_test"),
        "other": mean(points[0], "local_test") if points else None,
        "global_own": mean(of_global, "local_test"),
        "common": mean(last["clients"], "global_test"),
        "global": of_global["test"]["accuracy"] if of_global else None,
        **{way: record.bytes(way, "payload") / tasks / 1e3 for way in ("up", "down")},
    }


def choices(folder: Path) -> dict[str, dict[str, int]]:
    """FedFree: how often which layer was critical, and which global layer replaced which. Reads names alone."""
    critical: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    if not (folder / "transcript").is_dir():
        return {"critical": {}, "sent": {}}  # only the record was kept
    for entry in Transcript(folder / "transcript").entries():
        if entry.message == "Critical":
            critical.update(list(entry["types"]))
        elif entry.message == "Knowledge":
            weight = next(iter(entry.state_shapes("g") or {}))
            sent[f"{weight.rpartition('.')[0]} for {entry['layer']}"] += 1
    return {"critical": dict(critical), "sent": dict(sent)}


def collect(out: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(out.glob("runs/*/record.json")):
        record = read_record(path.parent)
        if record.status != "done":
            continue  # its last round is not the last round
        where = {"partition": record.setting.partition, "model": record.setting.model, "method": name(record)}
        run = {"seed": record.setting.seed, "rounds": len(record.rounds), "device": record.device, **figures(record)}
        rows.append({**where, **run, **choices(path.parent)})
    return rows


def cell(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    spread = f" ± {100 * statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{100 * statistics.mean(known):.1f}{spread}"


def shares(counted: list[dict[str, int]]) -> tuple[int, str]:
    total = sum((Counter(c) for c in counted), Counter())
    n = sum(total.values())
    return n, ", ".join(f"{what} {100 * k / n:.0f} %" for what, k in total.most_common(5))


def tables(rows: list[dict[str, Any]]) -> str:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["partition"], row["model"], row["method"]), []).append(row)
    head = ["partition", "model", "method", "seeds", *COLUMNS.values(), "kB up", "kB down"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for key, of in sorted(groups.items()):
        shown = [cell([row[column] for row in of]) for column in COLUMNS]
        shown += [f"{statistics.mean(row[way] for row in of):.1f}" for way in ("up", "down")]
        lines.append("| " + " | ".join([*key, str(len(of)), *shown]) + " |")
    lines.append("")
    for key, of in sorted(groups.items()):
        uploads, chosen = shares([row["critical"] for row in of])
        replaced, swaps = shares([row["sent"] for row in of])
        if uploads:
            lines.append(
                f"- {', '.join(key)}: uploaded {chosen}; sent back ({replaced} for {uploads} uploads): {swaps}"
            )
    return "\n".join(lines)


def wide(rows: list[dict[str, Any]]) -> str:
    """On own records and on the common test set of each partition, and how many seeds each has."""
    partitions = sorted({row["partition"] for row in rows})
    head = ["method", *(f"{name}, {test}" for name in partitions for test in ("own", "common")), "seeds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for method in dict.fromkeys(row["method"] for row in sorted(rows, key=lambda row: row["method"])):
        of = {name: [r for r in rows if (r["method"], r["partition"]) == (method, name)] for name in partitions}
        cells = [cell([row[test] for row in of[name]]) for name in partitions for test in ("own", "common")]
        seeds = "/".join(str(n) for n in sorted({len(found) for found in of.values() if found}))
        lines.append(f"| {method} | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines)


if __name__ == "__main__":
    side_by_side = "--wide" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--wide"]
    if len(words) not in (1, 3) or (len(words) == 3 and words[1] != "--json"):
        sys.exit(__doc__)
    source = Path(words[0])
    kept = collect(source) if source.is_dir() else json.loads(source.read_text())
    if len(words) == 3:
        Path(words[2]).write_text(json.dumps(kept, indent=1) + "\n")
    print(wide(kept) if side_by_side else tables(kept))
