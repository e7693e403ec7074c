"""Fingerprints: what a tiny run of each method sent and ended with, kept as small JSON files.

A run of three rounds on digits: skewed clients of unequal size, batch norm and two architectures where the method
allows, partial participation, a client that drops out. Of every field of every message, and of every final model, the
file keeps the norm and a random projection. A method that computes anything else than it did moves one of them.

    python tests/helpers/tools/fingerprint.py            # all of them anew (`make fingerprints`)
    python tests/helpers/tools/fingerprint.py fedavg     # one
    python tests/helpers/tools/fingerprint.py --check    # write nothing: which field of which round moved

Regenerate only for a change that is meant, and say in the commit message what moved and why.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from fedaudit import FedauditError, Setting, registry, run
from fedaudit.runtime import run_opening
from fedaudit.wire.transcript import Transcript

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "retelling"))  # where this runs as a script

from precision import double

FOLDER = Path(__file__).resolve().parents[2] / "fingerprints"
SECRET = bytes(range(32))  # the key of all noise here, as in the tests
run_opening.fresh_secret = lambda: SECRET

# In double precision, records changed by one part in 1e13 move the numbers of three rounds by 3e-9 at most (DFFKE; most
# methods: below 1e-10). Another processor rounds otherwise by less than that, and another computation moves them more.
TOLERANCE = 1e-6

BASE: dict[str, Any] = {
    "rounds": 3, "clients": 5, "partition": "dirichlet:0.3", "minimum": 20, "aux": 0.5, "public": 0.05,
    "participation": 0.8, "dropout": 0.2, "quorum": 0.25, "seed": 39, "keep_weights": 3, "eval_every": 3,
    "eval_clients": False,
}  # fmt: skip

# The first that a method allows: two architectures, then one with batch norm, then one without.
MODELS: list[dict[str, Any]] = [
    {"model": "cnn_bn:3,mlp:2", "server_model": "cnn_bn"},
    {"model": "cnn_bn"},
    {"model": "cnn"},
]

# Settings that send a method another way than its defaults do: name, method, what is set.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "dffke@readings": (
        "dffke",
        {
            "seed": 40,  # with 39 one part in 1e13 of the rate moves client 1 by a percent: processors would disagree
            "set": {
                "kl": "teacher-first",
                "alternate": "epoch",
                "own": True,
                "statistics": "own",
                "sync": True,
                "fresh": True,
                "md": "MSE",
            },
        },
    ),
    "fedgen@image": ("fedgen", {"set": {"space": "image"}}),
    "fedzge@alternating": ("fedzge", {"set": {"E_G": 3, "moments": "kept", "distance": "rms"}}),
    "fedzge@true": ("fedzge", {"set": {"E_G": 2, "gradient": "true"}}),
    "fedavg@dp-sgd": (
        "fedavg",
        {
            "set": {"B": 16},
            "norm": "group",
            "model": "cnn_bn",
            "privacy": {"training": {"mechanism": "dp-sgd", "sensitivity": "clip:1.0", "noise_multiplier": 0.5}},
        },
    ),
}


def cases() -> list[str]:
    return sorted([*registry.names("methods"), *WAYS])


def path_of(case: str) -> Path:
    return FOLDER / f"{case}.json"


def settings(case: str) -> Iterator[Setting]:
    """What to try for a case, the most telling first."""
    method, given = WAYS.get(case, (case, {}))
    quick = registry.find(method).quick or {"B": 16, "eta": 0.05}  # FedAvg and Local
    hyper = {name: 2 if value == 1 else value for name, value in quick.items()}  # the second step shows what is kept
    hyper = {name: value for name, value in hyper.items() if name in registry.find(method).model_fields}
    hyper |= given.get("set", {})
    for models in MODELS:
        yield Setting.make(**{**BASE, "method": method, **models, **given, "set": hyper})


# --- numbers that stand for a tree of tensors -----------------------------------------------------------------------


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from leaves(value[key], f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}.{i}")
    elif isinstance(value, torch.Tensor):
        yield path, value
    elif hasattr(value, "__dict__") and not isinstance(value, str | int | float | bool | type(None)):
        yield from leaves(vars(value), path)
    else:
        yield path, value


def numbers(value: Any) -> dict[str, Any]:
    """Per part (parameters, statistics of batch norm, whole numbers): [norm, projection]; and what is no number."""
    parts: dict[str, list[tuple[str, np.ndarray]]] = {}
    plain: list[str] = []
    for path, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor | int | float) and not isinstance(leaf, bool):
            array = np.asarray(leaf.double() if isinstance(leaf, torch.Tensor) else leaf, dtype=np.float64).ravel()
            counts = isinstance(leaf, int) or (isinstance(leaf, torch.Tensor) and not leaf.is_floating_point())
            part = "buffers" if "running_" in path else "whole" if counts else "values"
            parts.setdefault(part, []).append((path, array))
        else:
            plain.append(f"{path}={leaf!r}")
    found: dict[str, Any] = {}
    for part, arrays in sorted(parts.items()):
        norm = math.sqrt(sum(float(a @ a) for _, a in arrays))
        seen = sum(float(direction(p, a.size) @ a) for p, a in arrays)
        found[part] = [rounded(norm), rounded(seen), sum(a.size for _, a in arrays)]
    if plain:
        found["plain"] = f"{zlib.crc32('|'.join(plain).encode()):08x}"
    return found


@functools.cache
def direction(path: str, size: int) -> np.ndarray:
    """A projection's row is drawn per leaf, by its name, from numpy's frozen generator."""
    return np.random.RandomState(zlib.crc32(path.encode())).standard_normal(size)


def rounded(x: float) -> float:
    return float(f"{x:.8g}")


def fingerprint(folder: Path) -> dict[str, Any]:
    """Of a finished run: {place: {part: [norm, projection, elements]}}, in the order in which it was sent."""
    found: dict[str, Any] = {}
    for entry in Transcript(folder / "transcript").entries():
        for field in entry.fields:
            where = f"round {entry.round}, ask {entry.ask}, {entry.direction}, {entry.message}.{field}"
            seen = found.setdefault(where, {})
            seen[str(entry.client)] = numbers(entry[field])
    for where, of_clients in found.items():  # a broadcast is kept once
        first = next(iter(of_clients.values()))
        if len(of_clients) > 1 and all(value == first for value in of_clients.values()):
            found[where] = {",".join(of_clients): first}
    for path in sorted((folder / "models").iterdir()):
        found[f"model {path.stem}"] = {"-": numbers(load_file(path))}
    return found


def differences(kept: Mapping[str, Any], now: Mapping[str, Any], tolerance: float = TOLERANCE) -> list[str]:
    """Which field of which round moved, in order; empty where the two agree."""
    moved = []
    for where in dict.fromkeys([*kept, *now]):
        if where not in now or where not in kept:
            moved.append(f"{where}: {'no longer there' if where in kept else 'new'}")
            continue
        if kept[where].keys() != now[where].keys():
            moved.append(f"{where}: clients {'; '.join(kept[where])}, now {'; '.join(now[where])}")
            continue
        for client, parts in kept[where].items():
            for part in dict.fromkeys([*parts, *now[where][client]]):
                before, after = parts.get(part), now[where][client].get(part)
                if not close(before, after, tolerance):
                    moved.append(f"{where}, client {client}, {part}: {before}, now {after}")
    return moved


def close(before: Any, after: Any, tolerance: float) -> bool:
    if not isinstance(before, list) or not isinstance(after, list):
        return before == after
    (norm, seen, size), (norm_now, seen_now, size_now) = before, after
    atol = tolerance * max(norm, 1e-9)
    return size == size_now and abs(norm - norm_now) <= atol and abs(seen - seen_now) <= 2 * atol


# --- making and comparing -------------------------------------------------------------------------------------------


def made(case: str) -> dict[str, Any]:
    """A case's setting and fingerprint, with the most telling model that the method allows."""
    refused = []
    for setting in settings(case):
        with tempfile.TemporaryDirectory() as folder, double(setting.method):
            try:
                run(setting, out=Path(folder) / "run")
            except FedauditError as e:  # the method has one architecture, or none with batch norm
                refused.append(str(e))
                continue
            return {"setting": told(setting), "fingerprint": fingerprint(Path(folder) / "run")}
    raise SystemExit(f"{case} ran with none of the models:\n" + "\n".join(refused))


def told(setting: Setting) -> dict[str, Any]:
    default = Setting().model_dump()
    return {key: value for key, value in setting.model_dump().items() if value != default[key]}


def moved(case: str) -> list[str]:
    kept = json.loads(path_of(case).read_text())
    setting = Setting.make(**kept["setting"])
    with tempfile.TemporaryDirectory() as folder, double(setting.method):
        run(setting, out=Path(folder) / "run")
        return differences(kept["fingerprint"], fingerprint(Path(folder) / "run"))


def written(found: Mapping[str, Any]) -> str:
    """One line per field of a message, so that a diff shows what moved."""
    lines = [f"  {json.dumps(where)}: {json.dumps(values)}" for where, values in found["fingerprint"].items()]
    return f'{{"setting": {json.dumps(found["setting"])},\n"fingerprint": {{\n' + ",\n".join(lines) + "\n}}\n"


def main(words: list[str]) -> int:
    check = "--check" in words
    wrong = 0
    for case in [word for word in words if word != "--check"] or cases():
        if check:
            found = moved(case)
            wrong += bool(found)
            print("\n  ".join([f"{case}: {'moved' if found else 'as it was'}", *found[:20]]), flush=True)
            continue
        found = made(case)
        before = json.loads(path_of(case).read_text())["fingerprint"] if path_of(case).exists() else {}
        path_of(case).write_text(written(found))
        lines = differences(before, found["fingerprint"]) if before else []
        print("\n  ".join([f"{case}: written, {found['setting'].get('model')}", *lines[:20]]), flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
