"""Write as many images of Fashion-MNIST as digits has, for all_fashion.toml.

python benchmarks/studies/all/fashion_subset.py .data/all [--data-dir .data]

FOLDER/fashion.npz gets the first 1,438 training and the first 359 test images, as they lie in the data set's files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from fedaudit.data import load

TRAINED, TESTED = 1438, 359  # of digits


def main(arguments: list[str] | None = None) -> Path:
    """Write the file, and return where it lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", default=".data")
    given = parser.parse_args(arguments)
    data = load("fashion-mnist", given.data_dir)
    given.folder.mkdir(parents=True, exist_ok=True)
    path: Path = given.folder / "fashion.npz"
    np.savez_compressed(
        path, x=data.x[:TRAINED].numpy(), y=data.y[:TRAINED].numpy(),
        test_x=data.test_x[:TESTED].numpy(), test_y=data.test_y[:TESTED].numpy(),
    )  # fmt: skip
    return path


if __name__ == "__main__":
    print(main())
