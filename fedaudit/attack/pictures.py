"""Pictures of images side by side, and the small file beside them that other pictures can be made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedaudit.errors import RunError


def draw(lines: Mapping[str, Tensor], path: Path, *, titles: Sequence[str] = (), upright: bool = False) -> None:
    """A PNG of images in [0, 1], (n, C, H, W) a line; `upright` makes a column of each. `titles`: one per image."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = max(len(images) for images in lines.values())
    down, across = (count, len(lines)) if upright else (len(lines), count)
    figure = Figure(figsize=(0.85 * across + 0.9, 0.85 * down + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False)
    for axis in grid.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)
    axes = grid.T if upright else grid
    for line, (name, images) in zip(axes, lines.items(), strict=True):
        for axis, image in zip(line, images, strict=False):
            picture = image.permute(1, 2, 0).cpu().numpy()
            axis.imshow(picture if picture.shape[2] == 3 else picture[..., 0], cmap="gray", vmin=0, vmax=1)
        name_of_line = line[0].set_title if upright else line[0].set_ylabel
        name_of_line(name.replace(" ", "\n"), fontsize=7)
    for axis, title in zip(axes[0], titles, strict=False):
        (axis.set_ylabel if upright else axis.set_title)(title, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path)


def read(path: Path) -> dict[str, Tensor]:
    """What `save` wrote: originals, images, client, record and label of the pictures' images."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise RunError(f"{path} cannot be read: {e}. Run the attack again: fedaudit attack RUN --attack NAME.") from e
