"""Compact records of runs, small enough to be kept with the project.

python benchmarks/studies/shared/keep_records.py FOLDER... --commit COMMIT [--note TEXT] [--to RECORDS]

A FOLDER is a run, or an audit with its runs. Its records go to benchmarks/studies/TOPIC/records/FOLDER, where TOPIC is
the first word of the folder's name (fedaf of fedaf_gate), or to RECORDS/FOLDER.

Of each run's record.json a file is written: the setting, every
hyper-parameter with the value that it had (so that a default that changes later does not change what was run), the
result of each evaluated round, what attacks found, the ledger's epsilon by kind of message, versions, device, time and
commit. Runs that did not end are kept, with their status.
Run it on the commit that made the runs, or on one with the same defaults.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from fedaudit import RunRecord, read_record, registry
from fedaudit.runtime.attack_result import MembershipResult, ReconstructionResult
from fedaudit.stats import Estimate
from fedaudit.stored_model import plain

STUDIES = Path(__file__).resolve().parents[1]
OURS = ("data_dir", "workers", "gpu_fraction", "ray_address")  # of the machine, not of the experiment


def spread(found: dict[str, Any] | None) -> dict[str, float] | None:
    """Mean and deviation over clients."""
    return None if not found else {key: round(found[key], 6) for key in ("mean", "std")}


def sample(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """One model on a test set: Wilson's interval of 95 %."""
    return None if not found else {key: round(found[key], 6) for key in ("accuracy", "low", "high", "n")}


def evaluated(utility: dict[str, Any]) -> dict[str, Any]:
    of_global, clients = utility.get("global") or {}, utility.get("clients") or {}
    points = {
        name: {test: spread(found.get(test)) for test in ("global_test", "local_test")}
        | ({"matched_test": spread(found["matched_test"])} if found.get("matched_test") else {})
        for name, found in (utility.get("points") or {}).items()
    }
    kept = {
        "global": sample(of_global.get("test")),
        "global_on_own": spread(of_global.get("local_test")),
        "clients": spread(clients.get("global_test")),
        "clients_on_own": spread(clients.get("local_test")),
        "clients_on_own_mix": spread(clients.get("matched_test")),
        "points": points,
        "global_points": {name: sample(p["test"]) for name, p in (utility.get("global_points") or {}).items()},
    }
    return {name: value for name, value in kept.items() if value}


def cosines(record: RunRecord) -> dict[str, float]:
    """How alike what was protected is to what it was before, by kind, over clients and rounds (DFFKE's C_E and C_Y)."""
    found: dict[str, list[float]] = {}
    for entry in (entry for client in record.ledger for entry in client.entries if entry.cosine is not None):
        found.setdefault(entry.kind, []).append(entry.cosine)
    return {kind: round(statistics.fmean(values), 6) for kind, values in sorted(found.items())}


def attacked(record: RunRecord) -> dict[str, Any]:
    """What each attack found: the AUC of members, or the squared error of images, with intervals, and its verdict."""
    found: dict[str, Any] = {}
    for result in record.attacks:
        if isinstance(result, MembershipResult) and result.leak is not None:
            found[result.attack] = {"auc": three(result.pooled.auc), "leak": result.leak}
        if isinstance(result, ReconstructionResult):
            guesses = {name: three(scores.mse) for name, scores in result.baselines.items()}
            mse, beats = three(result.pooled.mse), result.beats_baselines
            found[result.attack] = {"mse": mse, "baselines": guesses, "beats_baselines": beats}
    return found


def three(found: Estimate) -> list[float | None]:
    """An estimate with its interval."""
    values = (found.value, found.low, found.high)
    return [None if value is None else round(value, 6) for value in values]


def by_kind(record: RunRecord) -> dict[str, Any]:
    """The ledger's epsilon of each kind of message, the largest of all clients."""
    kinds = sorted({kind for client in record.ledger for kind in client.by_kind}) if record.setting.privacy else []
    return {kind: plain(max(client.by_kind[kind] for client in record.ledger)) for kind in kinds}


def compact(record: RunRecord, commit: str, note: str) -> dict[str, Any]:
    setting = record.setting.model_dump(mode="json")
    method = registry.find(record.setting.method).make(record.setting.set, record.setting.preset)  # type: ignore[attr-defined]
    rounds = [
        {
            "round": r.round,
            **evaluated(r.utility.model_dump()),
            **({"diagnostics": r.diagnostics} if r.diagnostics else {}),
        }
        for r in record.rounds
        if r.utility
    ]
    return {
        "status": record.status,
        "setting": {key: value for key, value in setting.items() if key not in OURS},
        "hyper_parameters": method.model_dump(mode="json"),
        "rounds_done": len(record.rounds),
        "rounds": rounds,
        **({"failures": record.failures} if record.failures else {}),
        **({"cosines": found} if (found := cosines(record)) else {}),
        **({"attacks": shown} if (shown := attacked(record)) else {}),
        **({"epsilon_by_kind": epsilons} if (epsilons := by_kind(record)) else {}),
        "up_bytes": sum(r.up_payload for r in record.rounds),
        "down_bytes": sum(r.down_payload for r in record.rounds),
        "minutes": round(sum(r.wall_s for r in record.rounds) / 60, 2),
        "device": record.device,
        "versions": record.versions,
        "started": record.started,
        "finished": record.finished,
        "commit": commit,
        "note": note,
    }


def records_of(name: str) -> Path:
    """Return where the records of a study are kept."""
    topic = STUDIES / name.split("_")[0].split("-")[0]
    if not topic.is_dir():
        sys.exit(f"{topic} is not there: name the folder after its study (fedaf_gate), or say --to RECORDS.")
    return topic / "records"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--note", default="")
    parser.add_argument("--to", type=Path, help="default: records/ of the study that the name of FOLDER begins with")
    given = parser.parse_args()
    for folder in given.folders:
        to = given.to or records_of(folder.name)
        for path in sorted(folder.glob("**/record.json")):
            target = to / folder.name / f"{path.parent.name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            kept = compact(read_record(path.parent), given.commit, given.note)
            target.write_text(json.dumps(kept, indent=1) + "\n")
            print(target)


if __name__ == "__main__":
    main()
