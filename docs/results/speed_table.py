"""The table of docs/results/speed.md, from what `benchmarks/gpu_speed.py --out FOLDER` left.

python docs/results/speed_table.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PARTS = {"dfrd": "server"}  # lines that are about a part of a round; the others are about all of it


def rows(folder: Path) -> list[list[str]]:
    """A row for each line and each way of carrying it out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        figures: dict[str, Any] = json.loads(path.read_text())
        part = PARTS.get(path.stem, "round")
        for way, values in figures.items():
            if isinstance(values, dict) and f"{part}_s" in values:
                times = values.get(f"{part}_times", 1.0)
                first, peak = values["first_round_s"], values["peak_gpu_gb"]
                found.append([path.stem, way, f"{values[f'{part}_s']:.2f}", f"{times:.1f}", f"{first:.1f}", f"{peak}"])
            elif isinstance(values, dict) and "times" in values:
                found.append(
                    [path.stem, way, f"{values['s']:.2f}", f"{values['times']:.1f}", f"{values['first_s']}", ""]
                )
    return found


def main() -> None:
    head = ["line", "carried out", "seconds a round", "times as fast", "first round", "GPU memory, GB"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows(Path(sys.argv[1])):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
