"""Audits on whole runs, again and again: how often an honest run, or an honest split, is accused.

    python benchmarks/studies/epsilon/epsilon_whole_runs.py OUT.json [--first 1000] [--runs 400]
    python benchmarks/studies/epsilon/epsilon_whole_runs.py benchmarks/studies/epsilon/records/whole_runs.json \
        --count OUT.json ...

Each repetition is a run of its own: FedAvg with DP-SGD on digits, two clients, one round, a seed that nothing else
used. `true claim`: audits of it as they are; the ledger's claim holds, so p < 0.05 comes about in 5 %. `null`: gradient
canaries without any gradient, so that no coin can be told and every bound above 0 is an error. Twice: batches of 64,
where sampling makes the claim smaller, and all records in every step, where the claim is as tight as it can be.

Blind baselines: the same run's split as it is, where "broken" is an error, and with noise of at most 0.02 on the pixels
of non-members, where it is the truth.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from epsilon_shared import DIGITS, PRIVATE, rate  # noqa: E402

from fedaudit.attack.attack_run import attack_run  # noqa: E402
from fedaudit.epsilon import gradient_canaries  # noqa: E402
from fedaudit.epsilon.gradient_canaries import audit_canaries  # noqa: E402
from fedaudit.epsilon.residuals import audit_residuals  # noqa: E402
from fedaudit.rng import generator  # noqa: E402
from fedaudit.runtime.attack_result import MembershipResult  # noqa: E402
from fedaudit.runtime.run_record import EpsilonAudit  # noqa: E402
from fedaudit.runtime.runner import run  # noqa: E402
from fedaudit.runtime.site import Rows  # noqa: E402
from fedaudit.runtime.world import World  # noqa: E402
from fedaudit.significance import LEVEL  # noqa: E402

Row = dict[str, Any]
SMALL: Row = {**DIGITS, "holdout": 0.5, "aux": 0.4}
BATCHES = {"batches of 64": 64, "all records": 1 << 20}
CANARIES = 200  # of each client
BLIND = ("blind_nearest", "blind_pixels", "blind_prior")


def one(seed: int, folder: Path, residuals_only: bool = False) -> Iterator[Row]:
    for name, batch in BATCHES.items():
        out = folder / name
        run(
            method="fedavg", rounds=1, clients=2, set={"E": 1, "B": batch}, privacy=PRIVATE, seed=seed,
            eval_clients=False, out=out, **SMALL,
        )  # fmt: skip
        yield from (said(a, name, "true claim", seed) for a in audit_residuals(out))
        if residuals_only:
            continue
        yield from (said(a, name, "true claim", seed) for a in audit_canaries(out, canaries=CANARIES))
        with mock.patch.object(gradient_canaries, "STEEP", 0.0):
            yield from (said(a, name, "null", seed) for a in audit_canaries(out, canaries=CANARIES))
    if residuals_only:
        return
    yield from split(out, "honest", seed)
    with mock.patch.object(World, "nonmembers", dithered):
        yield from split(out, "dithered", seed)


def said(audit: EpsilonAudit, regime: str, case: str, seed: int) -> Row:
    wrong = audit.p_value < 0.05 if case == "true claim" else audit.lower_bound > 0
    return {
        "test": audit.test, "regime": regime, "case": case, "seed": seed, "wrong": wrong, "p": audit.p_value,
        "bound": audit.lower_bound, "claim": audit.claim_epsilon,
    }  # fmt: skip


def split(folder: Path, case: str, seed: int) -> Iterator[Row]:
    for result in attack_run(folder, attacks=list(BLIND)):
        if isinstance(result, MembershipResult):
            value = result.pooled.auc
            yield {
                "test": result.attack, "case": case, "seed": seed, "broken": result.split_broken, "auc": value.value,
                "low": value.low, "high": value.high,
            }  # fmt: skip


honest = World.nonmembers


def dithered(self: World, k: int) -> Rows:
    x, y = honest(self, k)
    return x + 0.02 * torch.rand(x.shape, generator=generator(self.setting.seed, "dither", k)), y


def counted(rows: list[Row]) -> Iterator[Row]:
    """How often each test spoke, of how many runs; of residuals also how p-values are spread."""
    for test, regime, case in sorted({(r["test"], r.get("regime", ""), r["case"]) for r in rows}):
        some = [r for r in rows if (r["test"], r.get("regime", ""), r["case"]) == (test, regime, case)]
        spoke = sum(r["wrong"] if "wrong" in r else r["broken"] for r in some)
        seeds = [min(r["seed"] for r in some), max(r["seed"] for r in some)]
        row = {"test": test, "regime": regime, "case": case, **rate(spoke, len(some), "spoke"), "seeds": seeds}
        if case == "true claim":
            row["refuted"] = rate(sum(r["p"] < LEVEL for r in some), len(some))
        yield row


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--residuals", action="store_true", help="residuals alone")
    parser.add_argument("--count", type=Path, nargs="+", help="files that this script made: count them together")
    chosen = parser.parse_args(arguments)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    if chosen.count:
        for path in chosen.count:
            found += json.loads(path.read_text())["whole_runs"]
        chosen.out.write_text(json.dumps({"whole_runs": list(counted(found))}, indent=1))
        return
    for seed in range(chosen.first, chosen.first + chosen.runs):
        with tempfile.TemporaryDirectory() as folder:
            found += one(seed, Path(folder), chosen.residuals)
        chosen.out.write_text(json.dumps({"whole_runs": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
