"""Which attacks read which field of which method: the table "Fields and attacks" of docs/results/epsilon.md.

    python benchmarks/studies/epsilon/epsilon_attacked.py OUT.json [--method NAME ...]

Every method is run for two rounds on a few records. Every attack is asked whether it can attack client 0 there, as the
server, as an active server and as a peer. Of those that can, it is written down which kinds of the client's uploads
they asked the view for, and which fields they read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fedaudit.attack.scene import Attack, Scene
from fedaudit.errors import FedauditError
from fedaudit.registry import find, names
from fedaudit.runtime.declarations.contract import setting_for
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.runner import run
from fedaudit.runtime.task import compute
from fedaudit.wire.transcript import Threat, TranscriptEntry, TranscriptView

THREATS = ("server", "active-server", "peer:1")
TARGET = 0


@contextmanager
def watched(seen: set[str]) -> Iterator[None]:
    """Write down the fields of the target's uploads that are asked for by kind, or read."""
    entries, item = TranscriptView.entries, TranscriptEntry.__getitem__

    def asked(self: TranscriptView, **how: Any) -> Iterator[TranscriptEntry]:
        for entry in entries(self, **how):
            kind = how.get("kind")
            if kind is not None and entry.direction == "up" and entry.client == TARGET:
                seen.update(f"{entry.message}.{n}" for n, f in entry.fields.items() if f.kind == kind)
            yield entry

    def read(self: TranscriptEntry, name: str) -> Any:
        if self.direction == "up" and self.client == TARGET:
            seen.add(f"{self.message}.{name}")
        for other, field in self.fields.items():
            if self.direction == "down" and field.role == "relay" and other == name:
                seen.add(f"relayed {field.kind}")
        return item(self, name)

    with mock.patch.object(TranscriptView, "entries", asked), mock.patch.object(TranscriptEntry, "__getitem__", read):
        yield


def rows(method: str) -> Iterator[dict[str, Any]]:
    """Yield the fields that client 0 sent in a run of a method, and the attacks that read each of them."""
    model = "mlp" if method not in ("fedfree",) else "cnn"
    setting = setting_for(method, dataset="digits", partition="iid", model=model, aux=0.5, holdout=0.4, keep_weights=2,
                          eval_clients=False)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run(setting, out=out)
        opened = RunFolder(out)
        fields: dict[str, dict[str, Any]] = {}
        for entry in opened.transcript.entries():
            if entry.direction == "up":
                for name, field in entry.fields.items():
                    if field.kind is not None and field.role == "private":
                        fields.setdefault(f"{entry.message}.{name}", {"kind": field.kind, "attacks": set()})
        with compute(opened.world):
            for attack in names("attacks"):
                for threat in THREATS:
                    for read in _read(opened, attack, threat):
                        for where, row in fields.items():
                            if read in (where, f"relayed {row['kind']}"):
                                row["attacks"].add(attack)
    for where, row in sorted(fields.items()):
        yield {"method": method, "field": where, "kind": row["kind"], "attacks": sorted(row["attacks"])}


def _read(opened: RunFolder, name: str, threat: str) -> set[str]:
    """Return the fields that one attack read while it found out that it can run; none if it cannot."""
    world = opened.world
    attack: Attack = find(name, "attacks")()
    if attack.blind or attack.misfit(world.shape) is not None:
        return set()
    (x, y), (other, label) = world.candidates(TARGET), world.nonmembers(TARGET)
    view = TranscriptView(opened.transcript, Threat.parse(threat))
    seen: set[str] = set()
    with watched(seen):
        import torch

        scene = Scene(opened, view, TARGET, torch.cat([x, other]), torch.cat([y, label]))
        try:
            return set() if attack.cannot(scene) else seen
        except FedauditError:
            return set()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", action="append")
    chosen = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    for method in chosen.method or names("methods"):
        try:
            found += rows(method)
        except FedauditError as e:
            print(f"{method}: {e}", file=sys.stderr)
        chosen.out.write_text(json.dumps({"attacked": found}, indent=1))
        print(method, [(r["field"], len(r["attacks"])) for r in found if r["method"] == method], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
