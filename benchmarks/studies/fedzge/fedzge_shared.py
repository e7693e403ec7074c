"""FedZGE's server loops as a table.

python benchmarks/studies/fedzge/fedzge_shared.py AUDIT [--json FILE]
python benchmarks/studies/fedzge/fedzge_shared.py --page FILE      the table from what was kept

For each loop the global model's accuracy in the last round, with a Wilson interval of 95 % over the test records, and
how often the ensemble's answer to x^ is the label y^ that the generator was given, in the first and in the last ten
rounds (for generated images only). Where the clients do not learn (E_k = 0), above them the ceiling: the clients'
ensemble itself on the test records.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fedaudit.methods.datafree.fedzge import FedZGE
from fedaudit.methods.shared._ensemble import ensemble, predict
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.stats import wilson
from fedaudit.wire.codec import decode
from fedaudit.wire.message import load

FACTS = ("images", "gradient", "estimate", "moments", "distance", "E_G", "E_prime")
DEFAULTS = {key: FedZGE.model_fields[key].default for key in FACTS}


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
    test = record.result.last.global_.test
    accuracy, n = test.accuracy, test.n
    low, high = wilson(round(accuracy * n), n)
    shares = {r.round: share for r in record.rounds for share in r.diagnostics.values()}
    last = record.setting.rounds
    return {
        **{key: options[key] for key in FACTS},
        "model": record.setting.model,
        "seed": record.setting.seed,
        "rounds": last,
        "accuracy": accuracy,
        "low": low,
        "high": high,
        "curve": [[r.round, r.utility.global_.test.accuracy] for r in record.rounds if r.utility],
        "agreement_first": _mean([v for t, v in shares.items() if t <= 10]),
        "agreement_last": _mean([v for t, v in shares.items() if t > last - 10]),
        "MiB_per_round": sum(r.up_payload + r.down_payload for r in record.rounds) / max(len(record.rounds), 1) / 2**20,
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def name_of(loop: dict[str, Any]) -> str:
    return ", ".join(f"{key} {loop[key]}" for key in FACTS if loop[key] != DEFAULTS[key]) or "as it is"


def markdown(result: dict[str, Any]) -> str:
    """The table of a results page."""
    lines = [
        "| FedZGE with | model | seed | global, % [95 %] | e = y^, first ten rounds | last ten |",
        "|---|---|---|---|---|---|",
    ]
    if result["ensemble"] is not None:
        model, seed = result["setting"]["model"], result["setting"]["seed"]
        lines.append(f"| the clients' ensemble itself | {model} | {seed} | {_percent(result['ensemble'])} | | |")
    for loop in result["loops"]:
        shares = [
            "-" if loop[key] is None else f"{100 * loop[key]:.0f} %" for key in ("agreement_first", "agreement_last")
        ]
        lines.append(
            f"| {name_of(loop)} | {loop['model']} | {loop['seed']} | {_percent(loop)} | {' | '.join(shares)} |"
        )
    return "\n".join(lines)


def _percent(found: dict[str, Any]) -> str:
    return f"{100 * found['accuracy']:.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("audit", type=Path, nargs="?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args()
    if given.page:
        print(markdown(json.loads(given.page.read_text())))
        return
    folders = [RunFolder(path.parent) for path in sorted(given.audit.glob("runs/*/record.json"))]
    loops = [f for f in folders if f.record.setting.method == "fedzge" and f.record.status == "done"]
    setting, top = loops[0].record.setting, None
    if setting.set.get("E_k") == 0 and loops[0].client_state(0) is not None:  # None: only the record was kept
        right, n = ceiling(loops[0])
        low, high = wilson(right, n)
        top = {"accuracy": right / n, "low": low, "high": high, "n": n}
    result = {
        "setting": {
            key: getattr(setting, key) for key in ("dataset", "model", "partition", "clients", "seed", "start")
        },
        "device": loops[0].record.device,
        "versions": loops[0].record.versions,
        "ensemble": top,
        "loops": sorted((row(f) for f in loops), key=lambda r: (-r["accuracy"], r["seed"])),
    }
    print(markdown(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
