"""A small folder of runs, the same to the byte each time: what the tests of reports work on.

Six settings: one that sends nothing, one unprotected, one with noise in training, one whose policy applies to nothing
and that has learnt nothing, one with a hostile name and a refuted claim, one that was refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from fedaudit.privacy.ledger import ClientLedger, LedgerEntry, Total
from fedaudit.runtime.attack_result import results
from fedaudit.runtime.meter import Timing
from fedaudit.runtime.run_record import (
    EpsilonAudit,
    FieldTraffic,
    RoundRecord,
    RunRecord,
    save_attacks,
    save_audits,
)
from fedaudit.runtime.scores import Reached, Result, Utility
from fedaudit.setting import Setting
from fedaudit.wire.release import Release

HOSTILE = "my_pkg.a|b:Evil<i>_&%$"
VERSIONS = {"python": "3.11.7", "platform": "linux-x86_64", "fedaudit": "0.1.0", "torch": "2.13.0"}
NONE = {"value": None, "reason": "not measured"}
COUNTS = [[6, 0, 2, 17], [5, 20, 0, 1]]


def write(folder: Path) -> Path:
    """The whole folder."""
    for seed, (accuracy, auc) in enumerate([(0.50, 0.55), (0.52, 0.56), (0.48, 0.54)]):
        _save(folder, f"local-{seed}", _record("local", seed, accuracy), [_membership("loss", "outsider", auc)])
    for seed, (accuracy, auc) in enumerate([(0.90, 0.61), (0.91, 0.63), (0.89, 0.62)]):
        attacks = [
            _membership("loss", "server", auc, leak=True, verdict="A leak: it is above chance."),
            _membership("prior", "server", 0.5, blind=True),
            _reconstruction("decoder", 0.4 + 0.1 * seed),
            _histogram(),
            {"attack": "peek", "threat": "peer:1", "ran": False, "reason": "the peer:1 sees no embeddings of client 0"},
        ]
        _save(folder, f"fedavg-{seed}", _record("fedavg", seed, accuracy, releases=True), attacks, picture=True)
    noise = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}}
    for seed, accuracy in enumerate([0.70, 0.72, 0.68]):
        record = _record("fedavg", seed, accuracy, releases=True, privacy=noise, epsilon=9.2 + 0.1 * seed)
        audits = [_audit("not refuted", 9.2, 1.5)] if seed == 0 else []
        _save(folder, f"fedavg-dp-{seed}", record, [_membership("loss", "server", 0.52 + 0.01 * seed)], audits)
    idle = {"embeddings": {"epsilon": 1.0, "sensitivity": "clip:1"}}
    record = _record("protos", 0, 0.26, releases=True, privacy=idle)
    record.notes = ["the policy on embeddings applied to nothing: protos released none"]
    _save(folder, "protos-0", record, [])
    claimed = {"weights": {"mechanism": "pure-noise"}}
    for seed, accuracy in enumerate([0.60, 0.61]):
        record = _record(HOSTILE, seed, accuracy, releases=True, privacy=claimed, set={"E": 5 + seed * 0})
        audits = [_audit("refuted", 1.0, 2.25, claim="one release of Local.w")]
        _save(folder, f"evil-{seed}", record, [], audits)
    record = _record("fedaf", 0, 0.5, privacy={"logits": {"epsilon": 1.0}})
    refused = RunRecord(**{
        **record.model_dump(), "status": "refused", "rounds": [], "curve": [], "result": {}, "traffic": [],
        "ledger": [], "timings": [],
        "notes": ["the privacy setting does not apply: fedaf releases no logits that take noise"],
    })  # fmt: skip
    _save(folder, "fedaf-0", refused, [])
    return folder


def _save(
    folder: Path, name: str, record: RunRecord, attacks: list, audits: list | None = None, picture: bool = False
) -> None:
    run = folder / "runs" / name
    record.save(run)
    save_attacks(run, record.transcript_digest, results.validate_python(attacks))
    if audits:
        save_audits(run, record.transcript_digest, audits)
    if picture:
        from PIL import Image

        (run / "pictures").mkdir()
        Image.new("L", (24, 8), 128).save(run / "pictures" / "decoder.png")


def _record(
    method: str,
    seed: int,
    accuracy: float,
    *,
    releases: bool = False,
    privacy: dict[str, Any] | None = None,
    epsilon: float | None = None,
    set: dict[str, Any] | None = None,
) -> RunRecord:
    """Two clients, two rounds. Each client sends 1000 bytes a round if it sends anything, and receives 500."""
    noisy = epsilon is not None
    entries = []
    if releases:
        entries = [
            LedgerEntry(
                field="Local.w", kind="weights", relation="any", rounds=[1, 2],
                mechanism="post-processing of DP-SGD" if noisy else "none",
                noise_multiplier=math.inf if noisy else 0.0,
            ),
            LedgerEntry(
                field="Local.n", kind="count", relation="any", rounds=[1, 2], mechanism="none",
                noise_multiplier=math.inf, condition="n is public",
            ),
        ]  # fmt: skip
    if noisy:
        entries.append(
            LedgerEntry(
                field="training", kind="training", mechanism="dp-sgd", noise_multiplier=1.0, sigma=1.0, sensitivity=1.0,
                clip=1.0, relation="add-or-remove", sample_rate=0.25, steps=20, rounds=[1, 2], delta=0.04,
            )
        )  # fmt: skip
    total = epsilon if noisy else (math.inf if releases else 0.0)
    by_kind = {"weights": 0.0 if noisy else math.inf, "count": 0.0, **({"training": epsilon} if noisy else {})}
    relations = {"any": Total(epsilon=0.0 if noisy else total, accountant="gaussian-closed-form")}
    if noisy:
        prv = Total(epsilon=epsilon, accountant="prv", by_accountant={"prv": epsilon, "rdp": epsilon + 1})
        relations["add-or-remove"] = prv
    ledger = [
        ClientLedger(
            client=k, n=25, delta=0.04, entries=entries, by_kind=by_kind if releases else {},
            by_relation=relations if releases else {}, epsilon=total,
            observers={"weights": ["server"], "count": ["server"]} if releases else {},
        )
        for k in (0, 1)
    ]  # fmt: skip
    up, down = (1000, 500) if releases else (0, 0)
    rounds = [
        RoundRecord(
            round=t, participants=[0, 1], up_payload=2 * up, up_wire=2 * up + 40, down_payload=2 * down,
            down_wire=2 * down + 40, utility=_utility(score), wall_s=1.5,
        )
        for t, score in ((1, accuracy - 0.01), (2, accuracy))
    ]  # fmt: skip
    fields = [("up", "Local.w", up), ("down", "Global.w", down)] if releases else []
    return RunRecord(
        status="done",
        setting=Setting.make(
            method=method, clients=2, rounds=2, seed=seed, partition="dirichlet:0.3", privacy=privacy or {},
            set=set or {},
        ),
        versions=VERSIONS,
        device="x86_64 CPU",
        started="2026-01-01T00:00:00+00:00",
        finished="2026-01-01T00:01:00+00:00",
        data={
            "shape": [1, 8, 8], "classes": 4, "class_names": ["0", "1", "2", "3"], "test": 100, "aux": 0, "public": 0,
            "members": [25, 25], "nonmembers": [25, 25], "validation": [5, 5], "counts": COUNTS,
        },
        models={"cnn": {"parameters": 250, "clients": 2}},
        rounds=rounds,
        result=Result(last=_reached(2, accuracy)),
        traffic=[FieldTraffic(direction=d, field=f, payload=4 * n, wire=4 * n + 20) for d, f, n in fields],
        releases=[
            Release(field="Local.w", role="private", kind="weights", via="model", unit="client"),
            Release(field="Local.n", role="private", kind="count", via="data", unit="client"),
        ]
        if releases
        else [],
        ledger=ledger,
        timings=[
            _timing("client 0", "task", 1.0 + 0.1 * seed), _timing("client 1", "task", 2.0),
            _timing("client 0", "fit", 0.9), _timing("server", "round", 0.25), _timing("evaluation", "evaluate", 0.5),
        ],
        peak_rss_bytes=400_000_000 + 1_000_000 * seed,
        transcript_digest=f"{method}-{seed}-{accuracy:g}",  # other messages give another accuracy
    )  # fmt: skip


def _timing(party: str, phase: str, wall: float) -> Timing:
    return Timing(party=party, phase=phase, calls=2, wall_s=wall)


def _utility(accuracy: float) -> Utility:
    own = {"mean": accuracy - 0.05, "std": 0.0, "each": [accuracy - 0.05] * 2}
    everywhere = {"mean": accuracy - 0.02, "std": 0.0, "each": [accuracy - 0.02] * 2}
    test = {"accuracy": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.09, "n": 100}
    return Utility.model_validate(
        {
            "global": {"test": test, "local_test": everywhere, "validation": accuracy},
            "clients": {"global_test": own, "local_test": own, "validation": own},
        }
    )


def _reached(t: int, accuracy: float) -> Reached:
    return Reached(round=t, **_utility(accuracy).model_dump())


def _estimate(value: float, half: float, interval: str, **more: Any) -> dict[str, Any]:
    return {"value": value, "low": value - half, "high": value + half, "interval": interval, **more}


def _membership(attack: str, threat: str, auc: float, **more: Any) -> dict[str, Any]:
    roc = {"fpr": [0.0, 0.01, 0.1, 1.0], "tpr": [0.0, 0.02, auc - 0.3, 1.0], "drawn": "steps, flat to the right"}
    pooled = {
        "members": 200,
        "nonmembers": 200,
        "confidence": 0.95,
        **dict.fromkeys(("balanced_accuracy", "advantage", "advantage_best"), NONE),
        "auc": _estimate(auc, 0.04, "DeLong, logit scale"),
        "tpr_at_fpr": [
            _estimate(auc - 0.3, 0.04, "Clopper-Pearson", fpr=0.1),
            _estimate(auc - 0.5, 0.01, "Clopper-Pearson", fpr=0.01),
            {"fpr": 0.001, "value": None, "reason": "an FPR of 0.001 takes 1000 non-members, and there are 200"},
        ],
        "roc": roc,
    }
    base = {"attack": attack, "threat": threat, "ran": True, "clients": [0, 1], "left_out": [], "claims": "membership"}
    return {**base, "pooled": pooled, **more}


def _reconstruction(attack: str, share: float) -> dict[str, Any]:
    none = dict.fromkeys(("psnr", "ssim", "cosine", "ratio"), NONE)
    pooled = {
        "mse": _estimate(0.05, 0.01, "Student's t"),
        "identification": _estimate(share, 0.1, "Clopper-Pearson", chance=0.04),
    }
    baseline = {"mse": _estimate(0.2, 0.01, "Student's t"), "identification": _estimate(0.05, 0.04, "CP")}
    return {
        "attack": attack, "threat": "server", "ran": True, "clients": [0, 1], "left_out": [],
        "claims": "reconstruction", "pooled": {**none, **pooled}, "baselines": {"mean image": {**none, **baseline}},
        "beats_baselines": True, "picture": "pictures/decoder.png", "verdict": "Succeeded: it beats every baseline.",
        "client": {}, "differences": {}, "matched_by": ["row"], "not_held": 0, "unassigned": 0, "data_range": 1.0,
        "window": 7,
    }  # fmt: skip


def _histogram() -> dict[str, Any]:
    pooled = {"error": _estimate(0.1, 0.02, "Student's t"), "uniform": _estimate(0.4, 0.05, "Student's t")}
    return {
        "attack": "shares", "threat": "server", "ran": True, "clients": [0], "claims": "histogram",
        "pooled": {**pooled, "gain": NONE}, "client": {}, "measure": "half the L1 distance", "leak": False,
        "verdict": "",
    }  # fmt: skip


def _audit(
    verdict: str, claim_epsilon: float, bound: float, claim: str = "training, all rounds together"
) -> EpsilonAudit:
    return EpsilonAudit(
        test="worst pair", threat="server", kind="weights", claim=claim, claim_epsilon=claim_epsilon,
        ledger_epsilon=claim_epsilon, lower_bound=bound, p_value=1e-6, trials=1000, confidence=0.95,
        delta=1e-5, verdict=verdict, method="Clopper-Pearson over thresholds", how="by scores",
    )  # fmt: skip
