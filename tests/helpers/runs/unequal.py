"""Four made-up runs in which everything differs, and their figures recomputed from the raw JSON by other code.

Method "uneven", two seeds on digits and one on MNIST, and one run of "local" on digits that sends nothing:

    clients     0: 10 records, an mlp; 1: 25, a cnn; 2: 60, a cnn; 3: 7, never asked
    spent       the middle client most, by number, by records and by delta
    rounds      four, with unequal participants, bytes and times; one client is absent once; round 3 is not evaluated
    directions  two fields up, one down; payload and wire are unequal in each
    audits      on digits a claim is refuted and another one holds; on MNIST none is refuted
    attacks     on digits one leaks and another one does not; on MNIST none does; one did not run

A smallest and a largest, a first and a last, a mean and a sum, and n and n - 1 are never the same number here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import reported

from fedaudit.privacy.ledger import ClientLedger, LedgerEntry, Total
from fedaudit.runtime.meter import Timing
from fedaudit.runtime.run_record import EpsilonAudit, FieldTraffic, RoundRecord, RunRecord, curve_of
from fedaudit.runtime.scores import Reached, Result, Utility
from fedaudit.setting import Setting
from fedaudit.wire.release import Release

POLICY = {
    "training": {"epsilon": 3.0, "sensitivity": "clip:1", "delta": 0.01},
    "logits": {"epsilon": 5.0, "sensitivity": "clip:2"},
}
SENT = Release(field="Local.w", role="private", kind="weights", via="model", unit="client")
RECORDS = [10, 25, 60, 7]
PARTICIPANTS = [[0, 1, 2], [0, 2], [1, 2], [2]]
SPENT = {0: 2.5, 1: 7.25, 2: 4.0}  # by client, with seed 0; client 3 spent nothing
DELTAS = {0: 0.005, 1: 0.02, 2: 0.01, 3: 0.09}
ACCURACY = [0.41, 0.83, None, 0.74]  # by round: the best one is neither the first nor the last


def scores(accuracy: float, shift: float) -> dict[str, Any]:
    """What a round reached. `shift` differs between seeds."""
    each = [accuracy - 0.21 + shift, accuracy - 0.02, accuracy - 0.11]
    mean = sum(each) / 3
    of_clients = {"mean": mean, "std": math.sqrt(sum((a - mean) ** 2 for a in each) / 3), "each": each}
    local = {"mean": accuracy - 0.04, "std": 0.03, "each": [accuracy - 0.07, accuracy - 0.01, accuracy - 0.04]}
    everywhere = {"mean": accuracy - 0.14, "std": 0.05, "each": [accuracy - 0.2, accuracy - 0.1, accuracy - 0.12]}
    test = {"accuracy": accuracy, "low": accuracy - 0.062, "high": accuracy + 0.047, "n": 170}
    return {
        "global": {"test": test, "local_test": everywhere, "validation": accuracy - 0.3},
        "clients": {"global_test": of_clients, "local_test": local, "validation": local},
    }


def record(method: str = "uneven", seed: int = 0, dataset: str = "digits", sends: bool = True) -> RunRecord:
    """One run. Numbers of another seed or data set are others, and not by one factor."""
    off = 0.013 * seed + (0.1 if dataset == "mnist" else 0.0)
    rounds = [
        RoundRecord(
            round=t, participants=who, up_payload=100 * t * len(who) + 7 * seed if sends else 0,
            up_wire=130 * t * len(who) + 9 * seed if sends else 0, down_payload=310 * len(who) + t if sends else 0,
            down_wire=350 * len(who) + 5 * t if sends else 0,
            absent=[{"client": 1, "reason": "dropped out", "ask": 1}] if t == 2 else [],
            utility=None if reached is None else Utility.model_validate(scores(reached - off, off)),
            wall_s=1.0 * t * t + seed,
        )
        for t, (who, reached) in enumerate(zip(PARTICIPANTS, ACCURACY, strict=True), 1)
    ]  # fmt: skip
    up, down = (sum(getattr(row, name) for row in rounds) for name in ("up_payload", "down_payload"))
    up_wire, down_wire = (sum(getattr(row, name) for row in rounds) for name in ("up_wire", "down_wire"))
    traffic = [
        FieldTraffic(direction="up", field="Local.w", payload=up - 64, buffers=12, wire=up_wire - 80),
        FieldTraffic(direction="up", field="Local.n", payload=64, wire=80),
        FieldTraffic(direction="down", field="Global.w", payload=down, buffers=3, wire=down_wire),
    ]
    last, best = scores(ACCURACY[3] - off, off), scores(ACCURACY[1] - off, off)
    timings = [
        Timing(party="client 0", phase="task", calls=2, wall_s=3.5 + seed, flops=1000, peak_bytes=70),
        Timing(party="client 0", phase="fit", calls=2, wall_s=3.0, flops=900),
        Timing(party="client 1", phase="task", calls=2, wall_s=0.75, flops=250 + seed, peak_bytes=90),
        Timing(party="client 2", phase="task", calls=4, wall_s=8.0, flops=4000, peak_bytes=80),
        Timing(party="client 2", phase="encode", calls=4, wall_s=0.125),
        Timing(party="client 1", phase="decode", calls=2, wall_s=0.0625),
        Timing(party="client 1", phase="protect", calls=2, wall_s=0.5),
        Timing(party="server", phase="round", calls=4, wall_s=1.75),
        Timing(party="evaluation", phase="evaluate", calls=3, wall_s=20.0),
    ]
    return RunRecord(
        status="done",
        setting=Setting.make(
            method=method, clients=4, rounds=4, seed=seed, dataset=dataset, model="mlp:1,cnn:3",
            privacy=POLICY if sends else {},
        ),
        versions=reported.VERSIONS,
        device="x86_64 CPU",
        started=f"2026-02-0{1 + seed}T00:00:00+00:00",
        finished=f"2026-02-0{1 + seed}T00:0{2 + seed}:00+00:00",
        data={
            "shape": [1, 8, 8], "classes": 4, "class_names": list("abcd"), "test": 170, "aux": 11, "public": 5,
            "members": RECORDS, "nonmembers": [3, 8, 20, 2], "validation": [1, 2, 6, 0],
            "counts": [[4, 3, 2, 1], [0, 25, 0, 0], [10, 20, 25, 5], [1, 1, 5, 0]],
        },
        models={"mlp": {"parameters": 321, "clients": 1}, "cnn": {"parameters": 1234, "clients": 3}},
        rounds=rounds,
        curve=curve_of(rounds),
        result=Result(last=Reached(round=4, **last), chosen=Reached(round=2, **best)),
        traffic=traffic if sends else [],
        releases=[SENT] if sends else [],
        ledger=[_spent(k, seed, sends) for k in range(4)],
        published=["global.safetensors"],
        timings=timings,
        peak_rss_bytes=300_000_000 + 7_000_000 * seed,
        transcript_digest=f"{method}-{dataset}-{seed}",
    )  # fmt: skip


def _spent(k: int, seed: int, sends: bool) -> ClientLedger:
    if not sends or k not in SPENT:
        return ClientLedger(client=k, n=RECORDS[k], delta=DELTAS[k], entries=[], epsilon=0.0)
    epsilon = SPENT[k] + 0.5 * seed * (k + 1)
    entries = [
        LedgerEntry(
            field="training", kind="training", mechanism="dp-sgd", noise_multiplier=1.5 - 0.25 * k,
            sigma=1.5 - 0.25 * k, sensitivity=1.0, clip=1.0, relation="add-or-remove", sample_rate=0.1 * (k + 1),
            steps=10 * (k + 2), rounds=[t for t, who in enumerate(PARTICIPANTS, 1) if k in who], delta=DELTAS[k],
        )
    ]  # fmt: skip
    total = Total(epsilon=epsilon, accountant="prv", by_accountant={"prv": epsilon, "rdp": epsilon + 1.5})
    return ClientLedger(
        client=k, n=RECORDS[k], delta=DELTAS[k], entries=entries, by_kind={"training": epsilon},
        by_relation={"add-or-remove": total}, epsilon=epsilon, observers={"training": ["server"]},
    )  # fmt: skip


def audit(verdict: str, claim: float, bound: float, p: float, test: str = "worst pair") -> EpsilonAudit:
    return reported._audit(verdict, claim, bound, claim=f"a claim of {claim:g}").model_copy(
        update={"p_value": p, "test": test}
    )


AUDITS = {  # two claims on digits, of which one is refuted; one on MNIST, which holds
    ("digits", 0): [audit("refuted", 3.0, 4.25, 1e-9), audit("not refuted", 5.0, 1.125, 0.4)],
    ("digits", 1): [audit("not refuted", 5.0, 2.5, 0.2)],
    ("mnist", 0): [audit("not refuted", 3.0, 0.5, 0.7)],
}
AUCS = {  # of the attack that leaks and of the one that does not
    ("digits", 0): (0.71, 0.53), ("digits", 1): (0.65, 0.56), ("mnist", 0): (0.54, 0.51),
}  # fmt: skip


def attacks(dataset: str, seed: int) -> list[dict[str, Any]]:
    strong, weak = AUCS[dataset, seed]
    return [
        {**reported._membership("weak", "outsider", weak, leak=False), "wall_s": 0.25},
        {**reported._membership("strong", "server", strong, leak=dataset == "digits"), "wall_s": 2.0 + seed},
        {**reported._membership("blind_prior", "server", 0.5, blind=True), "wall_s": 0.125},
        {"attack": "peek", "threat": "peer:1", "ran": False, "reason": "it sees nothing"},
    ]


def write(folder: Path) -> Path:
    """The folder of an audit with all four runs."""
    for dataset, seed in AUDITS:
        reported._save(
            folder, f"{dataset}-{seed}", record(seed=seed, dataset=dataset), attacks(dataset, seed),
            AUDITS[dataset, seed],
        )  # fmt: skip
    reported._save(folder, "local-0", record("local", sends=False), [])
    return folder


# --- the same figures by other code: from the JSON files, with sums and loops alone ----------------------------------


def raw(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "runs" / name / "record.json").read_text())


def times_asked(told: dict[str, Any]) -> int:
    count = 0
    for row in told["rounds"]:
        count += len(row["participants"])
    return count


def sent(told: dict[str, Any], direction: str, convention: str = "payload") -> int:
    total = 0
    for row in told["rounds"]:
        total += row[f"{direction}_{convention}"]
    return total


def work(told: dict[str, Any]) -> float:
    """Seconds of clients and server. A fit is part of its task, and an evaluation is nobody's work."""
    return sum(row["wall_s"] for row in told["timings"] if row["phase"] not in ("fit", "evaluate"))


def most_spent(told: dict[str, Any]) -> float:
    return sorted(client["epsilon"] for client in told["ledger"] if client["entries"])[-1]


def student(values: list[float]) -> tuple[float, float, float]:
    """The mean of two values and its 95 % interval: 12.706 is the quantile of Student's t with one degree."""
    a, b = values
    half = 12.7062047364 * abs(a - b) / 2
    return (a + b) / 2, (a + b) / 2 - half, (a + b) / 2 + half
