"""Condensed images as they crossed the wire: one row per client and class, from a run's transcript.

    python benchmarks/studies/fedaf/fedaf_pictures.py RUN PICTURE.png [ROUND]

Without ROUND the last one. Any method that releases `synthetic_images` by class will do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from fedaudit.data.records import to_uint8
from fedaudit.wire.transcript import Transcript

COLUMNS, SIDE, GAP, MARGIN = 12, 48, 2, 130  # images in a row, pixels of an image, between images, left for the text


def rows(run: Path, t: int | None) -> list[tuple[int, int, int, np.ndarray]]:
    """(round, client, class, images as bytes), by client and class."""
    view = Transcript(run / "transcript").view("server")
    entries = [e for e in view.entries(direction="up", kind="synthetic_images") if t is None or e.round == t]
    if not entries:
        sys.exit(
            f"{run} released no synthetic images{'' if t is None else f' in round {t}'}. Name a run of fedaf or feddm."
        )
    last = max(e.round for e in entries)
    found = []
    for entry in entries:
        if entry.round == last:
            (field,) = (name for name, facts in entry.fields.items() if facts.kind == "synthetic_images")
            for c, images in entry[field].items():
                found.append((last, entry.client, c, to_uint8(images).permute(0, 2, 3, 1).numpy()))
    return sorted(found, key=lambda row: row[:3])


def draw(run: Path, picture: Path, t: int | None) -> None:
    table = rows(run, t)
    sheet = Image.new("RGB", (MARGIN + COLUMNS * (SIDE + GAP), len(table) * (SIDE + GAP)), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (_, k, c, images) in enumerate(table):
        pen.text((4, i * (SIDE + GAP) + SIDE // 2 - 6), f"client {k}, class {c}", fill="black")
        for j, image in enumerate(images[:COLUMNS]):
            tile = Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)
            at = (MARGIN + j * (SIDE + GAP), i * (SIDE + GAP))
            sheet.paste(tile.convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST), at)
    sheet.save(picture)
    print(f"{picture}: round {table[0][0]}, {len(table)} rows")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    draw(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) == 4 else None)
