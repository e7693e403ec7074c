"""What the inversion attacks reached on small runs of several methods: one row for each attack that applies.

    python benchmarks/studies/inversion/inversion_others.py AUDIT [--json FILE]
    python benchmarks/studies/inversion/inversion_others.py FILE               # the table of what --json kept

"identified" is what the scorer counts for the attack: the record itself among all, a member as the nearest record, or
the right class. The baseline is the one with the smallest error.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedaudit import read_record
from fedaudit.runtime.attack_result import ReconstructionResult


def collect(audit: Path) -> list[dict[str, Any]]:
    rows = []
    for path in sorted(audit.glob("runs/*/record.json")):
        record = read_record(path.parent)
        for found in record.attacks:
            if isinstance(found, ReconstructionResult) and found.threat == "server":
                best = min(found.baselines, key=lambda name: found.baselines[name].mse.value)
                rows.append(
                    {
                        "attack": found.attack,
                        "method": record.setting.method,
                        "identification": found.pooled.identification.model_dump(),
                        "mse": found.pooled.mse.model_dump(),
                        "baseline": best.replace("_", " "),
                        "baseline_mse": found.baselines[best].mse.value,
                        "verdict": "succeeded" if found.beats_baselines else "failed",
                    }
                )
    return sorted(rows, key=lambda row: (row["attack"], row["method"]))


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| attack | on | identified | chance | MSE | best baseline | its MSE | verdict |", "|---" * 8 + "|"]
    for row in rows:
        rate, mse = row["identification"], row["mse"]
        share = f"{rate['value']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}] | {rate['chance']:.1%}"
        error = f"{mse['value']:.4f} [{mse['low']:.4f}, {mse['high']:.4f}]"
        cells = [f"`{row['attack']}`", row["method"], share, error, row["baseline"], f"{row['baseline_mse']:.4f}"]
        lines.append(f"| {' | '.join(cells)} | {row['verdict']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = collect(given.source) if given.source.is_dir() else json.loads(given.source.read_text())
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
