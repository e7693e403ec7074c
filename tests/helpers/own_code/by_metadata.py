"""An attack that looks at no content: it scores candidates by where they stand, and by what surrounds them.

It holds the folder of images that the clients' records come from, finds each candidate's file there, and scores it by
the file's name, time or size; or it scores it by its position among the candidates, or by what the view tells of its
client: number, bytes, time and order of its messages, how many candidates there are of it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedaudit.attack.claims import Claims, TookPart
from fedaudit.attack.scene import Attack, Scene

OF_FILES = ("name", "time", "size")
OF_PLACES = ("position", "middle", "parity")
OF_CLIENTS = ("client", "candidates", "bytes", "clock", "arrival")


@functools.cache
def files_of(folder: Path | str) -> dict[bytes, tuple[int, float, int]]:
    """Return the place by name, the time and the size of each training image's file, by its pixels. Read once: a
    folder is written before it is attacked, and not again."""
    files = sorted((Path(folder) / "train").rglob("*.png"))
    facts = {}
    for place, file in enumerate(files):
        with Image.open(file) as image:
            pixels = np.asarray(image).tobytes()
        facts[pixels] = (place, file.stat().st_mtime, file.stat().st_size)
    return facts


class ByMetadata(Attack):
    folder: str
    rule: str

    def run(self, scene: Scene) -> Claims:
        n = len(scene.y)
        if self.rule in OF_FILES:
            known = files_of(self.folder)
            pixels = ((scene.x + 1) * 127.5).round().to(torch.uint8)
            found = [known[image.numpy().tobytes()][OF_FILES.index(self.rule)] for image in pixels]
            return Claims(torch.tensor(found, dtype=torch.float64))
        if self.rule in OF_PLACES:
            i = torch.arange(n, dtype=torch.float64)
            by: dict[str, Tensor] = {"position": i, "middle": (i - (n - 1) / 2).abs(), "parity": i % 2}
            return Claims(by[self.rule])
        return Claims(torch.full((n,), of_client(scene, self.rule), dtype=torch.float64))


def of_client(scene: Scene, rule: str) -> float:
    """Return one number for a whole client."""
    seen = list(scene.view.entries(client=scene.target))
    if rule in ("client", "candidates"):
        return float(scene.target if rule == "client" else len(scene.y))
    if rule == "bytes":
        return float(sum(entry.bytes for entry in seen))
    return max((entry.at if rule == "clock" else float(entry.seq) for entry in seen), default=0.0)


class Active(ByMetadata):
    """The same, by a server that may send messages of its own."""

    active: ClassVar[bool] = True


class WhoTookPart(Attack):
    rule: str

    def run(self, scene: Scene) -> TookPart:
        return TookPart(of_client(scene, self.rule))
