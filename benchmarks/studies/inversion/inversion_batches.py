"""What `gradient_match` makes of one step on a few records: its own default beside 200 steps from one start.

    python benchmarks/studies/inversion/inversion_batches.py [--seeds 3] [--first 0] [--json FILE]
    python benchmarks/studies/inversion/inversion_batches.py FILE               # the table of what --json kept

A file that is there is added to.

Digits, models as they are initialised, one step of SGD on so many records, which the attacker sees as the change of
the weights. The attacker has 100 other digits. Images are assigned to records so that the sum of squared errors is
least. Seeds choose the model, the records and the starts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch.nn.functional import one_hot

from fedaudit.attack.similarity import PSNR_LIMIT, pixels, psnr
from fedaudit.attacks.inversion._matching import Steps, forecast, match_cosine, simulated
from fedaudit.attacks.inversion.gradient_match import STARTS, inferred, trial
from fedaudit.data import load
from fedaudit.data.records import to_float
from fedaudit.stats import mean_in_range
from fedaudit.training import models

CASES = (("mlp", 1), ("mlp", 8), ("cnn", 8))
ETA, OTHERS = 0.1, 100


def rows(seeds: range) -> list[dict[str, Any]]:
    data = load("digits")
    found = []
    for arch, n in CASES:
        for seed in seeds:
            torch.manual_seed(seed)
            model = models.build(arch, shape=(1, 8, 8), classes=10).train()
            order = torch.randperm(len(data.y))
            x, y = to_float(data.x[order[:n]]), data.y[order[:n]]
            others = to_float(data.x[order[n : n + OTHERS]])
            steps = Steps([torch.arange(n)], ETA)
            update = {name: u.detach() for name, u in simulated(model, x, one_hot(y, 10).float(), steps).items()}
            labels = inferred(model, update, steps, n, others)
            right = int(torch.minimum(torch.bincount(labels, minlength=10), torch.bincount(y, minlength=10)).sum())
            mean = others.mean(0)
            most = forecast(model, torch.zeros_like(x), 10, steps)
            for way, iterations, starts in (("200 steps, one start", 200, 1), ("default", most, STARTS)):
                rng = torch.Generator().manual_seed(seed)

                def begin(r: int, n: int = n, rng: torch.Generator = rng, mean: torch.Tensor = mean) -> torch.Tensor:
                    return (mean + (0.5 if r else 0.05) * torch.randn(n, 1, 8, 8, generator=rng)).clamp(-1, 1)

                begun = time.process_time()
                images = match_cosine(
                    model, update, steps, labels, begin, tv=1e-3, lr=0.1, iterations=iterations, restarts=starts,
                    trial=trial(iterations),
                )  # fmt: skip
                taken = time.process_time() - begun
                i, j = linear_sum_assignment(torch.cdist(images.flatten(1), x.flatten(1)).square().numpy())
                found.append(
                    {"model": arch, "records": n, "seed": seed, "way": way, "steps": iterations, "labels": right,
                     "psnr": [round(v, 3) for v in psnr(pixels(images[i]), pixels(x[j])).tolist()],
                     "seconds": round(taken, 2)}
                )  # fmt: skip
    return found


def table(found: list[dict[str, Any]]) -> str:
    head = ["model", "records", "seeds", "labels right", "search", "PSNR, dB", "seconds"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for model, records, seeds, way in dict.fromkeys((r["model"], r["records"], part(r), r["way"]) for r in found):
        mine = [r for r in found if (r["model"], r["records"], part(r), r["way"]) == (model, records, seeds, way)]
        mean = mean_in_range([value for row in mine for value in row["psnr"]], 0.0, PSNR_LIMIT)
        assert mean.low is not None
        right, of = sum(row["labels"] for row in mine), sum(row["records"] for row in mine)
        seconds = sorted(row["seconds"] for row in mine)[len(mine) // 2]
        shown = f"{mean.value:.1f} [{mean.low:.1f}, {mean.high:.1f}]"
        lines.append(f"| {model} | {records} | {seeds} | {right} of {of} | {way} | {shown} | {seconds:.1f} |")
    return "\n".join(lines)


def part(row: dict[str, Any]) -> str:
    """Three seeds that belong together: the first three, which defaults may have been chosen on, and others."""
    first = row["seed"] // 3 * 3
    return f"{first} to {first + 2}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.source is not None:
        found = json.loads(given.source.read_text())
    else:
        found = rows(range(given.first, given.first + given.seeds))
    if given.json:
        before = json.loads(given.json.read_text()) if given.json.exists() else []
        cases = [*CASES]
        found = sorted([*before, *found], key=lambda r: (cases.index((r["model"], r["records"])), r["seed"]))
        given.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in found) + "\n]\n")
    print(table(found))


if __name__ == "__main__":
    main()
