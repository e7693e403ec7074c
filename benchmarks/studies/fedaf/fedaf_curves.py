"""Best rounds of curves that jump: three ways to say how good seeds of one setting are.

python benchmarks/studies/fedaf/fedaf_curves.py RECORD.json...

Of compact records (keep_records.py), one per seed, test accuracy of the global model in %: the best round of each seed,
averaged; the best round of the averaged curve; the last round, and the second half of the rounds, averaged.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path


def curve(path: Path) -> list[float]:
    return [100 * r["global"]["accuracy"] for r in json.loads(path.read_text())["rounds"]]


def said(curves: list[list[float]]) -> dict[str, tuple[float, float]]:
    """Mean and sample deviation over seeds; of the averaged curve, the deviation in its best round."""
    rounds = min(len(c) for c in curves)
    by_round = list(zip(*(c[:rounds] for c in curves), strict=True))
    at_best = max(by_round, key=statistics.fmean)
    columns = {
        "best round of each seed": [max(c[:rounds]) for c in curves],
        "best round of the averaged curve": list(at_best),
        "last round": list(by_round[-1]),
        "second half": [statistics.fmean(c[rounds // 2 : rounds]) for c in curves],
    }
    return {
        name: (statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)
        for name, values in columns.items()
    }


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for name, (mean, spread) in said([curve(Path(word)) for word in sys.argv[1:]]).items():
        print(f"| {name} | {mean:.2f} ± {spread:.2f} |")
