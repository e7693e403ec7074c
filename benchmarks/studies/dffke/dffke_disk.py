"""What an unlimited buffer of DFFKE takes on disk: measured over a few rounds, carried on to twenty.

python benchmarks/studies/dffke/dffke_disk.py OUT [--dataset cifar10] [--model resnet18] [--rounds 4] [--h 512]
    [--device cuda]

Ten clients, all records, h = 512, `keep_weights = 1`. What is written does not hang on how long anybody trains, so
local training and decoder have one epoch a round and the exchange none. The folder is measured after each reply and
round: `at rest` is after a round, `peak` the most within it, when old and new states of the clients lie side by side.
From the second round on each adds the same (`a_round`): the last increase is carried on to round 20. Prints JSON; the
models that a run publishes at its end are in `end`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from fedaudit import run

LAST = 20


def size(folder: Path) -> dict[str, int]:
    """Bytes of the files, by part of a run's folder."""
    parts = {"checkpoint": 0, "transcript": 0, "models": 0}
    for name in parts:
        for path in (folder / name).glob("**/*"):
            try:
                parts[name] += path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:  # swept away meanwhile
                continue
    return parts


def a_round(N: int, h: int, h_k: int, classes: int, Dec: int) -> dict[str, int]:
    """Bytes that a round adds, by the formula: Dec and E~ to the buffer, which lies there once; E_k, Y_k, E~ and two
    sets of logits to the transcript, however many clients get them."""
    return {"checkpoint": Dec + 4 * N * h, "transcript": 4 * N * (h_k + h) + 8 * N + 2 * 4 * N * classes}


def carried_on(rest: list[int], peak: list[int], end: int, last: int = LAST) -> dict[str, int]:
    """After, within and at the end of round `last`: what was measured, and the last increase for every round left."""
    grown = rest[-1] - rest[-2]
    more = (last - len(rest)) * grown
    return {"a_round": grown, "at_rest": rest[-1] + more, "peak": peak[-1] + more, "end": end + more}


def settled(out: Path, t: int) -> None:
    """Wait until round t is written, which goes on behind the run: what it makes needless is gone before its record."""
    while len(json.loads((out / "record.json").read_text())["rounds"]) < t:
        time.sleep(0.01)


def measured(out: Path, **values: Any) -> dict[str, Any]:
    parts: dict[int, dict[str, int]] = {}
    peak: dict[int, int] = {}

    def watch(t: int, rounds: int, what: str) -> None:
        over = what == f"round {t}" and t
        if over:
            settled(out, t)
        now = size(out)
        if over:
            parts[t] = now
        peak[t + 1] = max(peak.get(t + 1, 0), sum(now.values()))

    run(method="dffke", out=out, watch=watch, **values)
    rounds = sorted(parts)
    end = size(out)
    rest = [sum(parts[t].values()) for t in rounds]
    return {
        "setting": values,
        "rounds": [{"round": t, **parts[t], "peak": peak[t]} for t in rounds],
        "end": end,
        f"round_{LAST}": carried_on(rest, [peak[t] for t in rounds], sum(end.values())),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--h", type=int, default=512)
    parser.add_argument("--device", default="cuda")
    given = vars(parser.parse_args())
    folder, h = given.pop("out"), given.pop("h")
    method = {"R": "unlimited", "h": h, "tau": "off", "E_local": 1, "T_Tran": 1, "T_Dec": 1, "T_FKE": 0}
    fixed = {"partition": "dirichlet-capped:1", "holdout": 0.1, "validation": 0.02, "aux": 0.0, "keep_weights": 1}
    print(json.dumps(measured(folder, **given, **fixed, eval_every=given["rounds"], set=method), indent=1))
