"""The page docs/results/benchmarks.md and its picture, from the files that `measure.py` left beside this one.

python benchmarks/studies/benchmarks/page.py          # prints the page
python benchmarks/studies/benchmarks/page.py --write  # writes it, and draws the picture
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fedaudit.gates.in_turns import ratio_of
from fedaudit.stats import Estimate

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "results" / "benchmarks.md"
TEXT = """# Rounds a second, release by release

One quick round of every method: two clients on digits, each method's `quick` settings, one thread. The settings show a
change of the code. They say nothing about a method at the size of its paper: [speed](speed.md) has that, on a GPU.

![Rounds a second of each method in both releases](benchmarks.png)

Both releases were measured in turns on one machine ({machine}, load {load}). Seconds in which a process waited for a
core are left out; what other processes do to caches is not. The ratios are hardly touched by that: each is of two
rounds of neighbouring turns. Brackets are 95 % intervals (signed ranks). A method is called slower or faster where its
interval leaves out 1; of {n} methods that did not change, about {chance:.0f} would be so by chance.

{table}

Made by `benchmarks/studies/benchmarks/measure.py`, kept as `NAME.json` beside it, and written here by `page.py`:

```sh
git archive TAG | tar -x -C ../last-release
python benchmarks/studies/benchmarks/measure.py ../last-release . --names 0.1.0 0.2.0
python benchmarks/studies/benchmarks/page.py --write
```

`make bench` saves every benchmark under `.benchmarks`, those of methods and attacks with a ratio to a reference that
was measured in turns; `make bench-compare` holds the last two savings against each other, lists what changed by more
than its noise, and fails where something grew by more than 10 % beyond it.
"""


@dataclass(frozen=True)
class Row:
    """One method in both releases: rounds a second, and the ratio of the seconds of a round with its 95 % interval."""

    method: str
    last: float | None
    this: float | None
    ratio: Estimate | None

    def verdict(self) -> str:
        if self.ratio is None:
            return "new" if self.last is None else "gone"
        if self.ratio.low is None or self.ratio.high is None or self.ratio.low <= 1 <= self.ratio.high:
            return "the same, within noise"
        return "slower" if self.ratio.low > 1 else "faster"

    def cells(self) -> list[str]:
        rates = [f"{rate:.3g}" if rate is not None else "-" for rate in (self.last, self.this)]
        if self.ratio is None or self.ratio.value is None:
            return [self.method, *rates, "-", self.verdict()]
        shown = f"{self.ratio.value:.2f}"
        if self.ratio.low is not None and self.ratio.high is not None:
            shown += f" [{self.ratio.low:.2f}, {self.ratio.high:.2f}]"
        return [self.method, *rates, shown, self.verdict()]


def kept() -> list[dict]:
    """Return what was kept of the last two releases, the earlier first."""
    found = sorted(HERE.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])
    return [json.loads(path.read_text()) for path in found[-2:]]


def rows(last: dict, this: dict) -> list[Row]:
    """Return a row for each method, the slowest round of this release first."""
    found = []
    for method in {*last["seconds"], *this["seconds"]}:
        before, now = (list(chain(*release["seconds"].get(method, []))) for release in (last, this))
        both = before and now
        ratio = ratio_of([b / a for a, b in zip(before, now, strict=True)]) if both else None
        rates = [1 / statistics.median(seconds) if seconds else None for seconds in (before, now)]
        found.append(Row(method, rates[0], rates[1], ratio))
    return sorted(found, key=lambda row: (row.this or row.last or 0.0, row.method))


def table(last: dict, this: dict) -> str:
    names = last["release"], this["release"]
    head = ["method", f"rounds a second, {names[0]}", names[1], f"a round of {names[1]} takes, times", ""]
    lines = [head, ["---", "--:", "--:", "---", "---"], *(row.cells() for row in rows(last, this))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(last: dict, this: dict, path: Path) -> None:
    """Draw both releases' rounds a second, a line for each method, on one axis of powers of ten."""
    from matplotlib.figure import Figure

    found = rows(last, this)
    figure = Figure(figsize=(8, 0.24 * len(found) + 1.2), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(found):
        ends = [rate for rate in (row.last, row.this) if rate is not None]
        axes.plot(ends, [place] * len(ends), color="0.75", linewidth=1, zorder=1)
    for name, colour, marker, rates in (
        (last["release"], "0.45", "o", [row.last for row in found]),
        (this["release"], "tab:blue", "D", [row.this for row in found]),
    ):
        points = [(rate, place) for place, rate in enumerate(rates) if rate is not None]
        axes.scatter(*zip(*points, strict=True), s=22, color=colour, marker=marker, label=name, zorder=2)
    axes.set_xscale("log")
    axes.set_yticks(range(len(found)), [row.method for row in found], fontsize=8)
    axes.set_xlabel("rounds a second (two clients, digits, quick settings, one core)")
    axes.grid(axis="x", color="0.9")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)


def page(last: dict, this: dict) -> str:
    """Return the whole page."""
    both = sum(row.ratio is not None for row in rows(last, this))
    return TEXT.format(
        table=table(last, this), machine=this["machine"], load=this["load"], n=both, chance=max(1.0, 0.05 * both)
    )


def main() -> None:
    releases = kept()
    if len(releases) < 2:
        raise SystemExit(f"{HERE} keeps {len(releases)} releases, and two are compared. Run measure.py first.")
    text = page(*releases)
    if "--write" not in sys.argv[1:]:
        print(text)
        return
    PAGE.write_text(text)
    draw(*releases, PAGE.with_suffix(".png"))


if __name__ == "__main__":
    main()
