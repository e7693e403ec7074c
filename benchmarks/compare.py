"""Two savings of the benchmarks held against each other: `make bench-compare`, or python benchmarks/compare.py [A B].

Machines differ, and one machine differs from day to day. What gates is therefore each benchmark's ratio of ours to a
reference, both measured in turn in one run: it fails where the ratio of B is more than THRESHOLD times that of A, and
by more than their noise. The noise is the 95 % interval of each ratio (of the median over pairs, by order statistics):
two intervals that overlap may be of equal ratios. What changed by more than its noise is listed once more below the
table. Exit code 0: nothing grew beyond threshold and noise; 1: something did; 2: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOW = "`make bench` saves one; name two with A=FILE B=FILE"


class CannotCompare(Exception):
    """What is missing or damaged, and the remedy."""


@dataclass(frozen=True)
class Row:
    """One benchmark in the earlier and the later saving; None where it is not in one of them, or has no ratio."""

    name: str
    a: float | None
    b: float | None
    a_range: tuple[float, float] | None = None  # None: too few pairs for an interval
    b_range: tuple[float, float] | None = None

    @property
    def growth(self) -> float | None:
        return None if self.a is None or self.b is None else self.b / self.a

    @property
    def changed(self) -> bool | None:
        """Whether the ratio changed by more than its noise; None where that is not known."""
        if self.a_range is None or self.b_range is None:
            return None
        return self.a_range[1] < self.b_range[0] or self.b_range[1] < self.a_range[0]

    def verdict(self, threshold: float) -> str:
        if self.growth is None:
            return "only in A" if self.a is not None else "only in B" if self.b is not None else "no ratio, not gated"
        if 1 / threshold <= self.growth <= threshold:
            return "same"
        if self.changed is False:
            return "within noise"
        return "SLOWER" if self.growth > threshold else "faster"


def latest_two(folder: Path) -> tuple[Path, Path]:
    """The last two savings of one machine, the earlier first. Those of different machines are not mixed unasked."""
    found = sorted(folder.glob("**/*.json"), key=lambda path: (_when(path), path.name))
    if not found:
        raise CannotCompare(f"There is no saving below {folder}. {HOW}.")
    beside = [path for path in found if path.parent == found[-1].parent]
    if len(beside) < 2:
        raise CannotCompare(f"There is one saving only, {found[-1]}. Two are needed: {HOW}.")
    return beside[-2], beside[-1]


def _when(path: Path) -> str:
    return str(read(path).get("datetime", ""))


def find(name: str, folder: Path) -> Path:
    """A path, or the number or a part of the name of one saving below the folder."""
    if Path(name).is_file():
        return Path(name)
    found = sorted(path for path in folder.glob("**/*.json") if name in path.name)
    numbered = [path for path in found if path.name.startswith(f"{name}_")]
    found = numbered or found
    if not found:
        raise CannotCompare(f"There is no file {name}, nor a saving of that name below {folder}. {HOW}.")
    if len(found) > 1:
        raise CannotCompare(f"{name} fits {len(found)} savings below {folder}: {', '.join(p.name for p in found)}.")
    return found[0]


def read(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise CannotCompare(f"{path} cannot be read: {e}. Remove it, or name two others.") from e
    if not isinstance(saved, dict) or not isinstance(saved.get("benchmarks"), list):
        raise CannotCompare(f"{path} is no saving of pytest-benchmark: it has no list of benchmarks. {HOW}.")
    return saved


def compare(a: Path, b: Path) -> list[Row]:
    first, second = (_by_name(read(path)) for path in (a, b))
    rows = []
    for name in sorted({*first, *second}):
        before, after = first.get(name, {}), second.get(name, {})
        rows.append(Row(name, _ratio(before), _ratio(after), interval(before), interval(after)))
    if all(row.growth is None for row in rows):
        raise CannotCompare(
            f"{a} and {b} have no benchmark with a ratio in common; there is nothing to gate on. {HOW}."
        )
    return rows


def _by_name(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one.get("fullname", one["name"]): one.get("extra_info", {}) for one in saved["benchmarks"]}


def _ratio(info: dict[str, Any]) -> float | None:
    ratio = info.get("ratio")
    return float(ratio) if isinstance(ratio, int | float) and ratio > 0 and math.isfinite(ratio) else None


def interval(info: dict[str, Any]) -> tuple[float, float] | None:
    """The narrowest pair of order statistics that holds the median with 95 %; none where there are too few pairs."""
    ratios = sorted(info.get("ratios", []))
    n = len(ratios)
    below, k = 0.0, 0
    while k < n // 2 and below + math.comb(n, k) / 2**n <= 0.025:
        below += math.comb(n, k) / 2**n
        k += 1
    return (ratios[k - 1], ratios[n - k]) if k else None


def shown(interval: tuple[float, float] | None) -> str:
    return f"[{interval[0]:.3f}, {interval[1]:.3f}]" if interval else ""


def table(rows: list[Row], threshold: float) -> str:
    head = ("benchmark", "A", "interval", "B", "interval", "B / A", "")
    lines = [head]
    for row in rows:
        numbers = [f"{value:.3f}" if value is not None else "-" for value in (row.a, row.b, row.growth)]
        ranges = shown(row.a_range), shown(row.b_range)
        lines.append((row.name, numbers[0], ranges[0], numbers[1], ranges[1], numbers[2], row.verdict(threshold)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Hold two savings of the benchmarks against each other.")
    parser.add_argument(
        "savings", nargs="*", metavar="A B", help="files, or numbers of savings; default: the latest two"
    )
    parser.add_argument("--threshold", type=float, default=1.1, help="growth of a ratio beyond which it fails (1.1)")
    parser.add_argument("--folder", type=Path, default=Path(".benchmarks"), help="where savings lie")
    given = parser.parse_args(words)
    try:
        if not given.threshold >= 1:
            raise CannotCompare(f"--threshold {given.threshold}: write a factor of at least 1, such as 1.1.")
        if len(given.savings) not in (0, 2):
            raise CannotCompare(f"Two savings are compared, not {len(given.savings)}: name both, or neither.")
        a, b = (find(name, given.folder) for name in given.savings) if given.savings else latest_two(given.folder)
        rows = compare(a, b)
    except CannotCompare as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"A: {a}\nB: {b}\nratios of ours to a reference measured in the same run; the lower, the better\n")
    print(table(rows, given.threshold))
    changed = [row for row in rows if row.changed]
    print(
        f"\n{len(changed)} of {sum(row.changed is not None for row in rows)} ratios changed by more than their noise."
    )
    for row in sorted(changed, key=lambda row: -(row.growth or 0.0)):
        print(f"  {row.name}: {row.a:.3f} {shown(row.a_range)} before, {row.b:.3f} {shown(row.b_range)} now")
    slower = [row for row in rows if row.verdict(given.threshold) == "SLOWER"]
    gated = sum(row.growth is not None for row in rows)
    print(f"\n{len(slower)} of {gated} ratios grew by more than a factor of {given.threshold:g}.")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
