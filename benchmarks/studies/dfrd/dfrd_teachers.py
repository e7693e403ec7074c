"""What a distillation could learn from the models that clients uploaded last, on the test set.

python benchmarks/studies/dfrd/dfrd_teachers.py RUN...

Runs of `fedavg`. Per run, accuracy in %: of FedAvg's average, of the mean of the clients' logits, and of the mean
weighted by tau_{i,y} (DFRD, Section 3.2), which needs a label: once it is given the true one, once a wrong one. There
the table has how often the ensemble says the wrong label that it was given, and how often what is on the image.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fedaudit.methods.datafree._generator import dynamic_weights
from fedaudit.runtime.folder import RunFolder
from fedaudit.wire.message import load


@torch.no_grad()
def teachers(folder: Path) -> dict[str, float]:
    run = RunFolder(folder)
    world, T = run.world, run.record.setting.rounds
    x, y = world._to_device(world.federation.test())
    uploads = {e.client: e["w"] for e in run.transcript.view("server").entries(direction="up", kind="weights", t=T)}
    z = torch.stack([load(world.blank_model(k), w).eval()(x) for k, w in sorted(uploads.items())])
    counts = [torch.bincount(world.members(k)[1], minlength=world.classes) for k in sorted(uploads)]
    tau = dynamic_weights(torch.stack(counts).to(z))

    def says(label: torch.Tensor) -> torch.Tensor:
        return (tau[:, label, None] * z).sum(0).argmax(1)

    shift = torch.randint(1, world.classes, y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    wrong = (y + shift) % world.classes
    utility = run.record.rounds[-1].utility
    assert utility is not None  # every run evaluates its last round
    shares = {
        "FedAvg": utility.global_.test.accuracy,
        "mean of logits": (z.mean(0).argmax(1) == y).float().mean(),
        "tau, true label": (says(y) == y).float().mean(),
        "tau, wrong label: says it": (says(wrong) == wrong).float().mean(),
        "tau, wrong label: says the image's": (says(wrong) == y).float().mean(),
    }
    return {name: 100 * float(share) for name, share in shares.items()}


def main() -> None:
    rows = [teachers(Path(folder)) for folder in sys.argv[1:]]
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print("| " + " | ".join(f"{value:.1f}" for value in row.values()) + " |")


if __name__ == "__main__":
    main()
