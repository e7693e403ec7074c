"""Pack the records of an audit into one small file, without curves, clients and classes of attacks.

python benchmarks/studies/all/pack_audit.py AUDIT FILE.jsonl.xz

One line for each cell: its folder's name, its record, and its attacks' results over all clients together. What a
page of results needs is in it; what `fedaudit verify` needs stays in the folder. An audit under way can be packed, too.
"""

from __future__ import annotations

import json
import lzma
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

LEFT_OUT = ("client", "class", "picture", "settings", "matched_by")  # of an attack's result
LEFT_OUT_OF_POOLED = ("roc",)


def packed(folder: Path) -> str | None:
    """Return the line of a cell; None if its record cannot be read yet."""
    try:
        record = json.loads((folder / "record.json").read_text())
        file = folder / "attacks.json"
        attacks = json.loads(file.read_text())["attacks"] if file.exists() else []
    except (OSError, ValueError):
        return None
    row = {"folder": folder.name, "record": record, "attacks": [_small(result) for result in attacks]}
    return json.dumps(row, separators=(",", ":"))


def _small(result: dict[str, Any]) -> dict[str, Any]:
    small = {key: value for key, value in result.items() if key not in LEFT_OUT}
    if isinstance(small.get("pooled"), dict):
        small["pooled"] = {key: value for key, value in small["pooled"].items() if key not in LEFT_OUT_OF_POOLED}
    return small


def main(words: list[str]) -> None:
    """Write the file."""
    audit, file = Path(words[0]), Path(words[1])
    folders = sorted(path.parent for path in (audit / "runs").glob("*/record.json"))
    with ProcessPoolExecutor() as pool, lzma.open(file, "wt", preset=3) as out:
        lines = [line for line in pool.map(packed, folders, chunksize=32) if line is not None]
        out.writelines(line + "\n" for line in lines)
    print(f"{len(lines)} of {len(folders)} cells in {file}, {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
