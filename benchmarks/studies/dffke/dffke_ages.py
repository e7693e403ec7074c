"""What DFFKE's memory buffer is worth by age: images of each round that a client still holds, looked at by others.

python benchmarks/studies/dffke/dffke_ages.py RUN...            runs of several seeds beside each other
python benchmarks/studies/dffke/dffke_ages.py benchmarks/studies/dffke/dffke_ages.json   what was kept
python benchmarks/studies/dffke/dffke_ages.py RUN... --json benchmarks/studies/dffke/dffke_ages.json

A run must have kept its buffers whole (R = "unlimited"). For the last client, per round s in its buffer, over the
images of all clients:
- label: the share that a reference (trained on the records of all clients together) recognises as the record's class;
- target: the share whose target logits (by the latest model of the image's owner, which is the teacher) say that class;
- moved: how far an image lies from the same row's image of the newest round, in units of the distance between two
  random images of the newest round: 0 is a copy, 1 another image.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from fedaudit.methods.datafree._buffer import held
from fedaudit.methods.datafree._decoder import decode as images_of
from fedaudit.rng import seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.wire.codec import decode


def reference(world):
    x, y = (torch.cat(parts) for parts in zip(*(world.members(k) for k in range(world.setting.clients)), strict=True))
    with seeded("reference"):
        model = world.fresh_model(0)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(30):
            for rows in torch.randperm(len(y)).split(64):
                optimizer.zero_grad()
                cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
    return model.eval()


@torch.no_grad()
def ages(folder: Path) -> list[dict[str, float]]:
    world = RunFolder(folder).world
    with torch.enable_grad():
        judge = reference(world)
    blobs = {k: RunFolder(folder).client_state(k) for k in range(world.setting.clients)}
    states = {k: decode(blob, ClientState) for k, blob in blobs.items() if blob is not None}
    models = {}
    for k, state in states.items():
        models[k] = world.blank_model(k)
        models[k].load_state_dict(state.model)
        models[k].eval()
    past = held(states[max(states)].memory)
    labels = {i: world.members(i)[1] for i in states}
    rounds = {s: p.read() for s, p in past.items()}
    pixels = world.method.pixels
    made = {
        s: {i: images_of(p["Dec"], e, world.shape, pixels=pixels) for i, e in p["E"].items()} for s, p in rounds.items()
    }
    newest = made[max(made)]
    table = []
    for s, by_client in made.items():
        label = torch.cat([judge(x).argmax(1) == labels[i] for i, x in by_client.items()])
        target = torch.cat([models[i](x).argmax(1) == labels[i] for i, x in by_client.items()])
        moved = torch.cat([(x - newest[i]).flatten(1).norm(dim=1) for i, x in by_client.items()]).mean()
        apart = torch.cat([(x - x.roll(1, 0)).flatten(1).norm(dim=1) for x in newest.values()]).mean()
        shares = {"label": label.float().mean(), "target": target.float().mean(), "moved": moved / apart}
        table.append({"round": s, **{name: float(value) for name, value in shares.items()}})
    return table


def table(kept: list[list[dict[str, float]]]) -> list[str]:
    """A row per round, the runs side by side."""
    lines = ["| images of round | a reference sees the class, % | their target says the class, % | moved |"]
    lines.append("|---|---|---|---|")
    for rows in zip(*kept, strict=True):
        shares = [" / ".join(f"{100 * row[name]:.1f}" for row in rows) for name in ("label", "target")]
        moved = " / ".join(f"{row['moved']:.2f}" for row in rows)
        lines.append(f"| {rows[0]['round']} | {' | '.join(shares)} | {moved} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, or one file that --json wrote")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    kept = [ages(run) for run in given.runs] if given.runs[0].is_dir() else json.loads(given.runs[0].read_text())
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join(table(kept)))


if __name__ == "__main__":
    main()
