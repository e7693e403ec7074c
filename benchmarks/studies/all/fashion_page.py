"""Set the methods on Fashion-MNIST beside the same methods on digits, in docs/results/methods.md.

python benchmarks/studies/all/fashion_page.py --keep AUDIT    keep the small records of an audit of all_fashion.toml
python benchmarks/studies/all/fashion_page.py --write         make the section again

The records lie beside this file, in fashion_records, one file for each method. Digits have their own
(see methods_page.py). In the page, what stands between two marks is made here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import methods_page as page  # beside this file
import numpy as np
from scipy.stats import rankdata, spearmanr

from fedaudit import registry
from fedaudit.reports import method_comparison as comparison
from fedaudit.reports.method_comparison import Best, MethodRow, rows_of
from fedaudit.suite.kept_records import OPEN, MethodRecords, cells_of, gathered, read_records, write_records
from fedaudit.suite.suite_file import Suite, read_suite, shipped

RECORDS = Path(__file__).with_name("fashion_records")
DRAWS = 2000  # of the bootstrap
PROTECTED = 100  # seconds of a protected cell, between the two that were timed
Pairs = Sequence[tuple[MethodRow, MethodRow]]  # a method on digits, and on Fashion-MNIST


def pairs(digits: Mapping[str, MethodRecords], fashion: Mapping[str, MethodRecords], partition: str) -> Pairs:
    """Return the rows of the methods that ran on both."""
    names = registry.names("methods")
    both = zip(rows_of(digits, names, [partition]), rows_of(fashion, names, [partition]), strict=True)
    return [(ours, theirs) for ours, theirs in both if not ours.missing and not theirs.missing]


def auc(row: MethodRow) -> Best | None:
    return row.membership["server"]


def carried_over(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Return Spearman's correlation of two lists, and its 95 % interval: the bootstrap's over their entries."""
    x, y = np.asarray(first), np.asarray(second)
    rng = np.random.default_rng(0)
    at = np.stack([rng.integers(len(x), size=len(x)) for _ in range(DRAWS)])
    by_draw = [ranks - ranks.mean(1, keepdims=True) for ranks in (rankdata(x[at], axis=1), rankdata(y[at], axis=1))]
    spread = np.sqrt(np.prod([(ranks**2).sum(1) for ranks in by_draw], axis=0))
    told = spread > 0  # a draw of equal entries has no order
    low, high = np.quantile((by_draw[0] * by_draw[1]).sum(1)[told] / spread[told], [0.025, 0.975])
    return float(spearmanr(x, y).statistic), float(low), float(high)


def orders(by_partition: Mapping[str, Pairs]) -> str:
    """Return how far the order of the methods on digits is that on Fashion-MNIST, as a table."""
    lines = ["| records | methods | accuracy | AUC of the server's best membership attack |", "|---|---|---|---|"]
    for partition, said in comparison.PARTITIONS.items():
        of = by_partition[partition]
        texts = []
        for read in (lambda row: row.utility, lambda row: None if auc(row) is None else auc(row).value):
            known = [(a, b) for a, b in ((read(ours), read(theirs)) for ours, theirs in of) if None not in (a, b)]
            rho, low, high = carried_over([a for a, _ in known], [b for _, b in known])
            texts.append(f"{rho:.2f} [{low:.2f}, {high:.2f}], {len(known)} methods")
        lines.append(f"| {said} | {len(of)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def table(rows: Pairs) -> str:
    """Return a row for each method: accuracy, members, labels and images on both data sets."""
    heads = ["method", "accuracy, %: digits", "Fashion", "members by the server: digits", "Fashion"]
    heads += ["labels: digits", "Fashion", "images: digits", "Fashion"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for of in rows:
        accuracy = ["none" if row.utility is None else f"{100 * row.utility:.1f}" for row in of]
        found = [_best(row_of["server"]) for kind in ("membership", "labels", "images") for row_of in _both(of, kind)]
        lines.append(f"| {of[0].method} | {' | '.join([*accuracy, *found])} |")
    return "\n".join(lines)


def _both(of: tuple[MethodRow, MethodRow], kind: str) -> list[Mapping[str, Best | None]]:
    return [getattr(row, kind) for row in of]


def _best(best: Best | None) -> str:
    if best is None:
        return "none"
    return f"{best.value:.2f} {best.attack}" if best.found else f"not found ({best.value:.2f})"


def counts(suite: Suite, records: Mapping[str, MethodRecords]) -> str:
    """Return how many cells of the suite ran, and what the others would take by the time that these took."""
    cells = [cell for of in records.values() for cell in of.cells]
    done = [cell for cell in cells if cell.status == "done"]
    half = median(cell.wall for cell in done)
    wanted = suite.cells()
    plain = sum(not setting.privacy for setting in wanted) - sum(cell.protection == OPEN for cell in cells)
    noised = len(wanted) - len(cells) - plain
    seeds = ", ".join(map(str, sorted({cell.seed for cell in cells})))
    attacks = sum(len(cell.attacks) for cell in cells)
    return (
        f"{len(records)} methods, {len(done)} cells run, {len(cells) - len(done)} refused or failed, seed {seeds}; "
        f"{attacks} attacks with a result. Half of the cells took less than {half:.0f} s of rounds and attacks. "
        f"Not run: {plain} unprotected cells, by that time {plain * half / 3600:.1f} hours of one core, and "
        f"{noised} protected ones, at {PROTECTED} s a cell {noised * PROTECTED / 3600:.0f} hours: "
        "DP-SGD took 31 s with FedAvg and 222 s with FedProto."
    )


def findings(rows: Pairs) -> str:
    """Return what of the findings on digits is seen here again, on iid records, in sentences."""
    of = {ours.method: (ours, theirs) for ours, theirs in rows}

    def both(name: str, kind: str = "membership") -> str:
        first, second = (_best(getattr(row, kind)["server"]) for row in of[name])
        return f"{second} (digits: {first})"

    averaging = [theirs for ours, theirs in of.values() if ours.family == of["fedavg"][0].family]
    works = [auc(row).value for row in averaging if auc(row) is not None and auc(row).found]
    range_of = f"at an AUC of {min(works):.2f} to {max(works):.2f}" if works else ""
    first = sorted((auc(theirs).value, ours.method) for ours, theirs in of.values() if auc(theirs) is not None)[::-1]
    lost = [ours.method for ours, theirs in of.values() if _found(ours) and not _found(theirs)]
    won = [ours.method for ours, theirs in of.values() if _found(theirs) and not _found(ours)]
    return "\n".join(
        [
            f"- DFFKE's embeddings tell members: {both('dffke')}; the decoder's images of records: "
            f"{both('dffke', 'images')}.",
            f"- Condensed images tell members: FedAF {both('fedaf')}, FedDM {both('feddm')}.",
            f"- Of the {len(averaging)} averaging methods {len(works)} have a membership attack that works {range_of}.",
            "- The highest of the server's AUCs: "
            + ", ".join(f"{name} {value:.2f}" for value, name in first[:6])
            + ".",
            f"- Found on digits and not here: {', '.join(lost) or 'none'}. Found here and not on digits: "
            f"{', '.join(won) or 'none'}. One seed finds less than three, and among {len(of)} methods at a level of "
            "2.5 % one or two are found by chance.",
        ]
    )


def _found(row: MethodRow) -> bool:
    best = auc(row)
    return best is not None and best.found


def parts() -> dict[str, str]:
    """Return the made parts of the section, by the name of their mark."""
    digits, fashion = read_records(page.RECORDS), read_records(RECORDS)
    rows = {partition: pairs(digits, fashion, partition) for partition in comparison.PARTITIONS}
    tables = {f"fashion table {partition}": table(of) for partition, of in rows.items()}
    return {
        "fashion counts": counts(read_suite(shipped("all")), fashion),  # its cells, on other images
        "fashion orders": orders(rows),
        "fashion findings": findings(rows["iid"]),
        **tables,
    }


def main(words: list[str]) -> None:
    if words and words[0] == "--keep":
        files = write_records(RECORDS, gathered(cell for word in words[1:] for cell in cells_of(Path(word))))
        print(f"{len(files)} files in {RECORDS}, {sum(file.stat().st_size for file in files) / 1e6:.2f} MB")
        return
    made = page.with_parts(page.PAGE.read_text(), parts())
    if words == ["--write"]:
        page.PAGE.write_text(made)
    else:
        print("\n\n".join(parts().values()))


if __name__ == "__main__":
    main(sys.argv[1:])
