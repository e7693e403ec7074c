"""What LiRA and RMIA gain by more than the last upload: the table "Membership over rounds" of docs/results/epsilon.md.

    python benchmarks/studies/epsilon/epsilon_rounds.py OUT.json [--seeds 5] [--first 0] [--shadows 32]
        [--rounds 1 --rounds 3 ...]

FedAvg on digits, three clients of some 50 records that train for ten epochs a round, five rounds, all uploads kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedaudit.attack.attack_run import attack_run
from fedaudit.runtime.attack_result import MembershipResult
from fedaudit.runtime.runner import run

SETTING: dict[str, Any] = {
    "method": "fedavg", "set": {"E": 10, "B": 8, "eta": 0.1}, "model": "mlp", "dataset": "digits", "clients": 3,
    "rounds": 5, "keep_weights": 5, "partition": "iid", "aux": 0.8, "holdout": 0.45, "validation": 0.0,
    "eval_clients": False,
}  # fmt: skip


def rows(seed: int, shadows: int, rounds: Sequence[int]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run(out=out, seed=seed, **SETTING)
        for many in rounds:
            specs = [{"attack": name, "shadows": shadows, "rounds": many} for name in ("lira", "rmia")]
            for result in attack_run(out, attacks=specs):
                if isinstance(result, MembershipResult) and not result.blind:
                    value = result.pooled.auc
                    found = {"auc": value.value, "low": value.low, "high": value.high}
                    yield {"attack": result.attack, "rounds": many, "seed": seed, "shadows": shadows, **found}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--shadows", type=int, default=32)
    parser.add_argument("--rounds", type=int, action="append")
    chosen = parser.parse_args(arguments)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        found += rows(seed, chosen.shadows, chosen.rounds or (1, 3, 5))
        chosen.out.write_text(json.dumps({"rounds": found}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
