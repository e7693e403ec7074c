"""What membership attacks find in all rounds, and in the last one: "Membership over rounds" of docs/results/epsilon.md.

    python benchmarks/studies/epsilon/epsilon_rounds.py OUT.json [--seeds 3] [--first 3] [--shadows 32]

Every attack as it is by default, over all uploads that the transcript kept; the last upload's AUC stands beside it.

FedAvg on digits, three clients of some 50 records that train for ten epochs a round, five rounds, all uploads kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
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
QUERIES = ("loss", "entropy", "modified_entropy", "label_only", "gradient_norm", "gradient_cosine", "update_alignment")
SHADOWS = ("lira", "lira_offline", "rmia", "combined")


def rows(seed: int, shadows: int) -> Iterator[dict[str, Any]]:
    """Yield the AUC of each attack on one run: over all rounds, and of the last."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run(out=out, seed=seed, **SETTING)
        specs: list[dict[str, Any]] = [{"attack": name} for name in QUERIES]
        specs += [{"attack": name, "shadows": shadows} for name in SHADOWS]
        for result in attack_run(out, attacks=specs):
            if isinstance(result, MembershipResult) and not result.blind:
                value, last = result.pooled.auc, result.last_round
                found: dict[str, Any] = {"auc": value.value, "low": value.low, "high": value.high}
                found["last"] = None if last is None else last.value
                yield {"attack": result.attack, "seed": seed, "shadows": shadows, **found}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=3)
    parser.add_argument("--shadows", type=int, default=32)
    chosen = parser.parse_args(arguments)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        found += rows(seed, chosen.shadows)
        chosen.out.write_text(json.dumps({"rounds": found}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
