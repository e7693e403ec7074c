"""Kept records of DFFKE (keep_records.py) as a table: the clients' models in the last round, over seeds.

python benchmarks/studies/dffke/dffke_kept.py benchmarks/studies/dffke/records/dffke_digits

Accuracy in %, of the mean over clients: mean ± sample standard deviation over seeds, on the common test set and on own
held-out records; after the exchange and, where a round has two points, before it. C_E and C_Y: cosine of what was
protected with what it was before, over clients and rounds, where something was. Members: the AUC of `embedding_match`.
Images: the squared error of `decoder` over that of the best of its guesses, which have seen no message. In brackets: in
how many runs the attack's own verdict is a success.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEAD = "| run | seeds | common | own | trained: common | own |"
NOISE = "| noise | seeds | C_E | C_Y | common | own | members, AUC | images, error | epsilon of E_k | of the logits |"


def mean_std(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def policy(rule: dict[str, Any]) -> str:
    if rule.get("mechanism") == "pure-noise":
        return "pure noise"
    way = "as claimed" if rule["sensitivity"].startswith("random-pixel") else "by clipping, per release"
    return f"epsilon = {rule['epsilon']:g} {way}"


def label(record: dict[str, Any]) -> str:
    setting, values = record["setting"], record["hyper_parameters"]
    if setting["method"] != "dffke":
        return {"local": "local", "fedavg": "FedAvg, clients after local training"}[setting["method"]]
    if setting["privacy"]:
        return policy(setting["privacy"]["embeddings"])
    if not values["T_FKE"]:
        return "alone (`T_FKE = 0`)"
    return f"`{values['kl']}`, R = {values['R']}, T_FKE = {values['T_FKE']}"


def last(record: dict[str, Any], point: str, test: str) -> float | None:
    """Percent, the mean over clients after the last round."""
    row = record["rounds"][-1]
    if point == "exchanged":
        return 100 * float(row["clients" if test == "global_test" else "clients_on_own"]["mean"])
    found = row.get("points", {}).get(point, {}).get(test)
    return 100 * float(found["mean"]) if found else None


def grouped(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Records by what was run, in a fixed order, each with its seeds."""
    groups: dict[str, list[dict[str, Any]]] = {}
    records = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for record in sorted(records, key=lambda r: (r["setting"]["method"] == "dffke", label(r), r["setting"]["seed"])):
        groups.setdefault(label(record), []).append(record)
    return groups


def found_by(records: list[dict[str, Any]]) -> list[str]:
    """Return the cells of two attacks: mean ± deviation over seeds, and how often the attack says that it succeeded.
    A row on which an attack was not asked for has a dash.
    """
    return [_cell(records, "embedding_match", "leak", _auc), _cell(records, "decoder", "beats_baselines", _error)]


def _auc(found: dict[str, Any]) -> float:
    return float(found["auc"][0])


def _error(found: dict[str, Any]) -> float:
    return float(found["mse"][0]) / min(float(guess[0]) for guess in found["baselines"].values())


def _cell(records: list[dict[str, Any]], attack: str, verdict: str, value: Callable[[dict[str, Any]], float]) -> str:
    of = [record["attacks"][attack] for record in records if attack in record.get("attacks", {})]
    if not of:
        return "-"
    if len(of) < len(records):
        raise SystemExit(f"{attack} was run on {len(of)} of {len(records)} seeds. Run it on all of them, or on none.")
    return f"{_spread([value(found) for found in of])} ({sum(found[verdict] for found in of)} of {len(of)})"


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def epsilon(records: list[dict[str, Any]], kind: str) -> str:
    """The ledger's epsilon of a kind of message after the last round, the largest over clients and seeds."""
    values = [float(record.get("epsilon_by_kind", {}).get(kind, "inf")) for record in records]
    return f"{max(values):.1f}" if max(values) < float("inf") else "infinite"


def table(folder: Path) -> list[str]:
    groups = grouped(folder)
    noisy = any(record["setting"]["privacy"] for records in groups.values() for record in records)
    lines = [NOISE if noisy else HEAD]
    lines.append("|" + "---|" * (lines[0].count("|") - 1))
    for name, records in groups.items():
        columns = [("exchanged", test) for test in ("global_test", "local_test")]
        columns += [] if noisy else [("trained", test) for test in ("global_test", "local_test")]
        cells = []
        for point, test in columns:
            values = [value for record in records if (value := last(record, point, test)) is not None]
            cells.append(mean_std(values) if values else "")
        if noisy:
            kept = [record.get("cosines", {}) for record in records]
            alike = [[c[kind] for c in kept if kind in c] for kind in ("embeddings", "logits")]
            cells = [f"{statistics.fmean(values):.3f}" if values else "1" for values in alike] + cells
            cells += [*found_by(records), *(epsilon(records, kind) for kind in ("embeddings", "logits"))]
        bare = noisy and not records[0]["setting"]["privacy"] and records[0]["hyper_parameters"]["T_FKE"]
        shown = "none" if bare else name
        models = [100 * r["rounds"][-1]["global"]["accuracy"] for r in records if "global" in r["rounds"][-1]]
        shown += f" (global model: {mean_std(models)})" if models else ""
        lines.append(f"| {shown} | {len(records)} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print("\n".join(table(Path(sys.argv[1]))))
