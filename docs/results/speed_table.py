"""The table of docs/results/speed.md, from what `benchmarks/gpu_speed.py --out FOLDER` left.

python docs/results/speed_table.py [FOLDER]          # default: what is kept beside this file
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = ["line", "carried out", "a round, s", "times", "clients, s", "times", "server, s", "times", "first round, s"]


def rows(folder: Path) -> list[str]:
    """A row for each line and each way of carrying it out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        figures: dict[str, Any] = json.loads(path.read_text())
        for way, values in figures.items():
            if isinstance(values, dict) and "round_s" in values:
                parts = [(values[f"{part}_s"], values[f"{part}_times"]) for part in ("round", "clients", "server")]
                cells = [text for seconds, times in parts for text in (f"{seconds:.2f}", f"{times:.1f}")]
                found.append([path.stem, way, *cells, f"{values['first_round_s']:.1f}"])
            elif isinstance(values, dict) and "times" in values:
                seconds, times, first = values["s"], values["times"], values["first_s"]
                found.append([path.stem, way, f"{seconds:.2f}", f"{times:.1f}", "", "", "", "", f"{first:.1f}"])
    return ["| " + " | ".join(cells) + " |" for cells in found]


def main() -> None:
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    print("\n".join(rows(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("speed")))))


if __name__ == "__main__":
    main()
