"""What DFFKE's teachers say of their own synthetic images, by round, from what crossed the wire.

python benchmarks/studies/dffke/dffke_answers.py RUN...                     a table for each run
python benchmarks/studies/dffke/dffke_answers.py RUN... --json FIGURES.json   the same figures, to be kept

An exchange that takes accuracy away may have bad images, bad answers, or embeddings that have shrunk to one point. The
server can tell these apart. In each round, over the rows of all clients:
- said: the share of images on which their own teacher says the class of the record behind them;
- sure: the mean of the largest probability in these answers;
- length: the root mean square of the docked embeddings that are decoded;
- apart: the variance of these embeddings over rows, as a share of their mean square. It is 0 if all rows are one point;
- missed: the squared distance from these embeddings to those with which the teacher answers, over the variance. It is 1
  for images that tell nothing of the embedding behind them but the mean, and more for worse ones. Only the preset
  `authors` sends these.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedaudit.wire.transcript import Transcript, TranscriptEntry

DOCKED = ("Unified", "UnifiedDocked")
ANSWERS = ("Answered", "AnsweredDocked")
COLUMNS = ("said", "sure", "length", "apart", "missed")


def by_round(run: Path) -> Iterator[tuple[int, dict[int, Any], dict[int, TranscriptEntry], TranscriptEntry]]:
    """Yield each round with its clients' labels and answers, and a message that has all docked embeddings."""
    labels: dict[int, Any] = {}
    answers: dict[int, TranscriptEntry] = {}
    docked: TranscriptEntry | None = None
    t = 0
    for entry in Transcript(run / "transcript").entries():
        if entry.round != t:
            if docked is not None and answers:
                yield t, labels, answers, docked
            t, labels, answers, docked = entry.round, {}, {}, None
        if entry.message == "Shared":
            labels[entry.client] = entry["Y"]
        elif entry.message in DOCKED and docked is None:
            docked = entry
        elif entry.message in ANSWERS:
            answers[entry.client] = entry
    if docked is not None and answers:
        yield t, labels, answers, docked


def figures(run: Path) -> list[dict[str, float]]:
    """Return a row of figures for each round of a run folder."""
    table = []
    for t, labels, answers, docked in by_round(run):
        E, said, sure, near = docked["E"], [], [], []
        for k, answer in answers.items():
            p = answer["Y"][t].softmax(1)
            said.append(p.argmax(1) == labels[k])
            sure.append(p.max(1).values)
            if answer.message == "AnsweredDocked":
                near.append((answer["Z"][t] - E[k]).square().sum(1))
        e = torch.cat([E[k] for k in answers])
        variance, square = e.var(0, correction=0).sum(), e.square().sum(1).mean()
        row = {"said": torch.cat(said).float().mean(), "sure": torch.cat(sure).mean()}
        row |= {"length": e.square().mean().sqrt(), "apart": variance / square}
        if near:
            row["missed"] = torch.cat(near).mean() / variance
        table.append({"round": t, **{name: round(float(value), 4) for name, value in row.items()}})
    return table


def lines(table: list[dict[str, float]]) -> list[str]:
    """Return the figures as a table of Markdown."""
    head = ["| round | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    cells = (["-" if name not in row else f"{row[name]:.3f}" for name in COLUMNS] for row in table)
    return head + [f"| {row['round']} | {' | '.join(of)} |" for row, of in zip(table, cells, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders of dffke")
    parser.add_argument("--json", type=Path, help="where to keep the figures, by the name of the folder")
    given = parser.parse_args()
    names = [run.name for run in given.runs]
    if twice := [name for name in names if names.count(name) > 1]:
        sys.exit(f"Two run folders are named {twice[0]}, and figures are kept by name. Rename one of them.")
    kept = {run.name: figures(run) for run in given.runs}
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    for name, table in kept.items():
        print("\n".join([f"{name}:", *lines(table), ""]))


if __name__ == "__main__":
    main()
