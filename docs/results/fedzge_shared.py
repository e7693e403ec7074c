"""The shared-clients study of FedZGE as a table: python docs/results/fedzge_shared.py AUDIT [--json FILE]

For each server loop the global model's accuracy in the last round, with a Wilson interval of 95 % over the test set,
and how often the ensemble's answer to x^ is the label y^ that the generator was given, in the first and in the last ten
rounds (for generated images only). Above them the ceiling: the ensemble of the clients itself on the test records.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from fedaudit.methods._ensemble import ensemble, predict
from fedaudit.rng import generator
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.stats import wilson
from fedaudit.wire.codec import decode
from fedaudit.wire.message import load

FACTS = ("images", "gradient", "estimate", "moments", "distance", "E_G")
DEFAULTS = {
    "images": "trained",
    "gradient": "zeroth",
    "estimate": "image",
    "moments": "fresh",
    "distance": "norm",
    "E_G": 1,
}


def agreement(folder: RunFolder) -> dict[int, float]:
    """By round: the share of images whose ensemble output has its largest entry at y^; the round's first query."""
    setting, device = folder.record.setting, folder.world.device
    found = {}
    answers: dict[int, dict[int, Any]] = {}
    for entry in folder.transcript.entries():
        if entry.message in ("Answer", "OpenAnswer") and entry.ask == 0:
            answers.setdefault(entry.round, {})[entry.client] = entry
    for t, replies in answers.items():
        B = folder.world.method.B
        e = ensemble({k: r["f"][:B] for k, r in replies.items()}, {k: r["N"] for k, r in replies.items()})
        rng = generator(setting.seed, "server", t, 0, "y 0", device=device)
        y = torch.randint(folder.world.classes, (B,), generator=rng, device=device).cpu()
        found[t] = (e.cpu().argmax(1) == y).double().mean().item()
    return found


def ceiling(folder: RunFolder) -> tuple[int, int]:
    """Test records that the ensemble of the clients gets right, and all of them."""
    world = folder.world
    x, y = world.test
    outputs = {}
    for k in range(folder.record.setting.clients):
        state = folder.client_state(k)
        assert state is not None
        kept = decode(state, ClientState, device=world.device)
        outputs[k] = predict(load(world.blank_model(k), kept.model), x)
    e = ensemble(outputs, {k: world.count(k) for k in outputs})
    return int((e.argmax(1) == y).sum()), len(y)


def row(folder: RunFolder) -> dict[str, Any]:
    record = folder.record
    options = {**DEFAULTS, **record.setting.set}
    test = record.result["last"]["global"]["test"]
    accuracy, n = test["accuracy"], test["n"]
    low, high = wilson(round(accuracy * n), n)
    shares = agreement(folder) if options["images"] != "real" else {}
    last = record.setting.rounds
    return {
        **{key: options[key] for key in FACTS},
        "rounds": last,
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "curve": [[r.round, r.utility["global"]["test"]["accuracy"]] for r in record.rounds if r.utility],
        "agreement_first": _mean([v for t, v in shares.items() if t <= 10]),
        "agreement_last": _mean([v for t, v in shares.items() if t > last - 10]),
        "MiB_per_round": sum(r.up_payload + r.down_payload for r in record.rounds) / max(len(record.rounds), 1) / 2**20,
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("audit", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folders = [RunFolder(path.parent) for path in sorted(given.audit.glob("runs/*/record.json"))]
    loops = [f for f in folders if f.record.setting.method == "fedzge" and f.record.status == "done"]
    right, n = ceiling(loops[0])
    result = {
        "setting": {
            key: getattr(loops[0].record.setting, key) for key in ("dataset", "model", "partition", "seed", "start")
        },
        "device": loops[0].record.device,
        "ensemble": {"accuracy": right / n, "n": n},
        "loops": sorted((row(f) for f in loops), key=lambda r: -r["accuracy"]),
    }
    print(f"the clients' ensemble: {100 * right / n:.1f} % of {n}")
    for r in result["loops"]:
        name = ", ".join(f"{key} {r[key]}" for key in FACTS if r[key] != DEFAULTS[key]) or "image"
        shares = [
            f"{100 * r[key]:.0f} %" if r[key] is not None else "-" for key in ("agreement_first", "agreement_last")
        ]
        print(
            f"{name:<40} {100 * r['accuracy']:.1f} [{100 * r['low']:.1f}, {100 * r['high']:.1f}]  "
            f"e = y^ {' -> '.join(shares)}"
        )
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
