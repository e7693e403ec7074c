"""DFFKE's synthetic data by round (the paper's Figures 4 and 5), from what crossed the wire in a run.

    python benchmarks/studies/dffke/dffke_pictures.py RUN --rounds 1,5,10,20 --client 0 --out pictures.png

Decoder and translated embeddings are in the transcript. It keeps model states of the last rounds only, so run with
keep_weights at least as large as the number of rounds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from fedaudit import registry
from fedaudit.errors import TranscriptError
from fedaudit.methods.datafree._decoder import decode
from fedaudit.runtime.run_record import read_record
from fedaudit.wire.transcript import Transcript, TranscriptEntry

DECODED = ("Unified", "UnifiedDocked")  # the messages with decoder and embeddings


def synthetic(run: Path, rounds: list[int], client: int, columns: int) -> dict[int, tuple[Tensor, Tensor]]:
    """By round: images in [-1, 1] decoded from `columns` of the client's embeddings, as many classes as it has, and
    their labels. The same records in every round."""
    record = read_record(run)
    shape, setting = tuple(record.data.shape), record.setting
    pixels = registry.find(setting.method).make(setting.set, setting.preset).pixels  # type: ignore[attr-defined]
    unified: dict[int, TranscriptEntry] = {}  # what any client received in a round: all receive the same
    labels: Tensor | None = None
    for entry in Transcript(run / "transcript").entries():
        if entry.message in DECODED and entry.round in rounds and entry.round not in unified:
            unified[entry.round] = entry
        elif entry.message == "Shared" and entry.client == client and labels is None:
            labels = entry["Y"]
    if labels is None:
        raise TranscriptError(f"{run}: client {client} never sent embeddings. Choose another --client.")
    rows = one_of_each(labels)[:columns]
    pictures = {}
    for t, entry in sorted(unified.items()):
        E = entry["E"]
        if client in E:  # it may have sat out this round
            pictures[t] = decode(entry["Dec"], E[client][rows], shape, pixels=pixels), labels[rows]
    if not pictures:
        raise TranscriptError(
            f"{run}: client {client} took part in none of the rounds {rounds}. Choose other --rounds."
        )
    return pictures


def one_of_each(labels: Tensor) -> Tensor:
    """Row numbers: the first record of every class, then the second of every class, and so on."""
    order = torch.argsort(labels, stable=True)
    starts = torch.searchsorted(labels[order], labels[order])
    return order[torch.argsort(torch.arange(len(labels)) - starts, stable=True)]


def draw(pictures: dict[int, tuple[Tensor, Tensor]], title: str, out: Path) -> Figure:
    """A grid: one line per round, one column per record."""
    lines, columns = len(pictures), len(next(iter(pictures.values()))[1])
    figure = Figure(figsize=(0.8 * columns + 0.8, 0.8 * lines + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis, label in zip(axes[0], next(iter(pictures.values()))[1].tolist(), strict=True):
        axis.set_title(f"class {label}", fontsize=7)
    for line, (t, (images, _)) in zip(axes, pictures.items(), strict=True):
        for axis, image in zip(line, images, strict=True):
            pixels = ((image.clamp(-1, 1) + 1) / 2).permute(1, 2, 0).numpy()
            axis.imshow(pixels if pixels.shape[2] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        line[0].set_ylabel(f"t = {t}", fontsize=8)
    figure.suptitle(title, fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder of dffke")
    parser.add_argument("--rounds", default="1,5,10,20", help="which rounds, by commas (default: 1,5,10,20)")
    parser.add_argument("--client", type=int, default=0, help="whose embeddings (default: 0)")
    parser.add_argument("--columns", type=int, default=10, help="how many records (default: 10)")
    parser.add_argument("--title", default="", help="above the grid")
    parser.add_argument("--out", type=Path, default=Path("dffke.png"), help="the picture (default: dffke.png)")
    options = parser.parse_args()
    rounds = [int(t) for t in options.rounds.split(",")]
    draw(synthetic(options.run, rounds, options.client, options.columns), options.title, options.out)
    print(options.out)


if __name__ == "__main__":
    main()
