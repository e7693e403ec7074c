"""All methods side by side, from the kept records of the suite `all`: rows, tables, reasons and a picture.

A row is a method on one partition. Figures are means over seeds. An attack is *found* to work if its own verdict is a
leak in more than half of the seeds, and its mean is above a guess by more than its error within the runs allows. With
twenty attacks on a cell one false alarm is not rare, so the level is divided by the number of attacks (Bonferroni).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

from fedaudit.errors import FedauditError
from fedaudit.registry import find
from fedaudit.stats import student_t
from fedaudit.suite.kept_records import BOTH, DP_SGD, MESSAGES, OPEN, CellFigures, Found, MethodRecords

FAMILIES = {  # by the folder of a method
    "averaging": "averaging",
    "submodels": "sub-models",
    "prototypes": "prototypes",
    "distillation": "distillation on public or own records",
    "datafree": "distillation without data",
    "condensation": "condensation",
    "layers": "layers",
    "references": "references",
}
OWN = "your own"
THREATS = ("server", "peer", "outsider")
PARTITIONS = {"iid": "iid", "dirichlet:0.3": "Dirichlet 0.3"}
PROTECTIONS = (DP_SGD, MESSAGES, BOTH)
EPSILONS = (8.0, 2.0)
LEAST = 1e-2  # smallest distance to a guess, and smallest error in percent, that the picture has a place for
MEMBERSHIP = ("membership", "participation")
NOTHING = "a policy on .* protects nothing where (.*) is released"


def family_of(method: str) -> str:
    """Return the family of a method, by the folder of its file; "your own" if it is not one of this package."""
    if ":" in method:
        return OWN
    try:
        module = find(method).__module__
    except FedauditError:
        return OWN
    parts = module.split(".")
    return FAMILIES.get(parts[2], OWN) if module.startswith("fedaudit.methods.") and len(parts) > 3 else OWN


@dataclass(frozen=True)
class Best:
    """The attack of a threat with the highest mean over seeds, among those that were found to work if there are any."""

    attack: str
    value: float  # mean over seeds: AUC, share of the error of a uniform guess that is gone, or of the best guess's MSE
    leaks: int
    seeds: int
    found: bool


@dataclass(frozen=True)
class Mean:
    """A mean over seeds with the 95 % interval of Student's t; without bounds if there is one seed."""

    value: float
    low: float | None
    high: float | None
    seeds: int

    def text(self, scale: float = 100, digits: int = 1) -> str:
        if self.low is None or self.high is None:
            return f"{scale * self.value:.{digits}f}"
        half = (self.high - self.low) / 2
        return f"{scale * self.value:.{digits}f} ± {scale * half:.{digits}f}"


@dataclass(frozen=True)
class Protected:
    """A method under one protection at one epsilon."""

    protection: str
    asked: float
    seeds: int  # cells that were run
    epsilon: float | None  # the largest of the ledgers; None: infinite
    cost: float | None  # accuracy lost, in points, against the same seeds unprotected
    best: Best | None  # of the server's membership attacks
    open: tuple[str, ...] = ()  # fields without any guarantee
    why_not: str | None = None  # why it was refused, or failed


@dataclass(frozen=True)
class MethodRow:
    """A method on one partition."""

    method: str
    family: str
    partition: str
    seeds: int
    global_test: Mean | None
    own: Mean | None
    common: Mean | None
    membership: Mapping[str, Best | None]  # by threat
    labels: Mapping[str, Best | None]
    images: Mapping[str, Best | None]
    protected: tuple[Protected, ...]
    up: float
    down: float
    seconds: float
    missing: str | None = None  # why there are no figures
    records: MethodRecords | None = field(default=None, compare=False)

    @property
    def utility(self) -> float | None:
        """Return the accuracy on the common test set: of the global model, else the mean of the clients' models."""
        mean = self.global_test or self.common
        return None if mean is None else mean.value


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(
    records: Mapping[str, MethodRecords], methods: Sequence[str], partitions: Iterable[str] = tuple(PARTITIONS)
) -> list[MethodRow]:
    """Return a row for each method and partition, family by family. A method without records has a row that says so."""
    order = [*FAMILIES.values(), OWN]
    names = sorted(methods, key=lambda name: (order.index(family_of(name)), "+" in name, name))
    return [_row(name, records.get(name), partition) for partition in partitions for name in names]


def _row(method: str, records: MethodRecords | None, partition: str) -> MethodRow:
    cells = [cell for cell in (records.cells if records else ()) if cell.partition == partition]
    plain = [cell for cell in cells if cell.protection == OPEN and cell.status == "done"]
    failed = next((cell.reason for cell in cells if cell.protection == OPEN and cell.status != "done"), None)
    return MethodRow(
        method=method,
        family=family_of(method),
        partition=partition,
        seeds=len(plain),
        global_test=_mean([cell.global_test for cell in plain]),
        own=_mean([cell.own for cell in plain]),
        common=_mean([cell.common for cell in plain]),
        membership={threat: best(plain, threat, MEMBERSHIP) for threat in THREATS},
        labels={threat: best(plain, threat, ("histogram",)) for threat in THREATS},
        images={threat: best(plain, threat, ("reconstruction",)) for threat in THREATS},
        protected=tuple(
            found
            for protection in PROTECTIONS
            for epsilon in EPSILONS
            if (found := _protected(protection, epsilon, cells, plain)) is not None
        ),
        up=_average([cell.up for cell in plain]),
        down=_average([cell.down for cell in plain]),
        seconds=_average([cell.seconds for cell in plain]),
        missing=None if plain else failed or "not run yet",
        records=records,
    )


def _mean(values: Sequence[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    found = student_t(known)
    return Mean(sum(known) / len(known), found.low, found.high, len(known))


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def best(cells: Sequence[CellFigures], threat: str, claims: Sequence[str]) -> Best | None:
    """Return the best attack of a threat over these cells, which differ in their seeds; None if none ran."""
    every = [_judged(attack, of, number) for attack, (of, number) in _attacks(cells, threat, claims).items()]
    return max(every, key=lambda one: (one.found, one.value), default=None)


def judged(cells: Sequence[CellFigures], threat: str, attack: str) -> Best | None:
    """Return what one attack of a threat came to over these cells; None if it did not run."""
    for claims in (MEMBERSHIP, ("histogram",), ("reconstruction",)):
        if found := _attacks(cells, threat, claims).get(attack):
            return _judged(attack, *found)
    return None


def _attacks(cells: Sequence[CellFigures], threat: str, claims: Sequence[str]) -> dict[str, tuple[list[Found], int]]:
    """Return the results of each attack of a threat that makes such claims, and how many such attacks there are."""
    by_attack: dict[str, list[Found]] = {}
    for cell in cells:
        for found in cell.attacks:
            if found.threat == threat and found.claims in claims and measured(found) is not None:
                by_attack.setdefault(found.attack, []).append(found)
    return {attack: (of, len(by_attack)) for attack, of in by_attack.items()}


def _judged(attack: str, of: Sequence[Found], attacks: int) -> Best:
    """Return an attack's mean over seeds, and whether it works, as one of so many attacks that were tried."""
    values = [value for one in of if (value := measured(one)) is not None]
    leaks = sum(bool(one.leak) for one in of)
    works = 2 * leaks > len(of)
    if works and of[0].claims != "reconstruction":  # whose verdict compares image by image with four guesses
        works = _lower_bound(of, attacks) > (0.0 if of[0].claims == "histogram" else 0.5)
    return Best(attack, _average(values), leaks, len(of), works)


def _lower_bound(of: Sequence[Found], attacks: int) -> float:
    """Return the lower bound of the mean over seeds, at 97.5 % for all attacks together, by the runs' own intervals."""
    values = [one.value for one in of if one.value is not None]
    lows = [one.value - one.low for one in of if one.value is not None and one.low is not None]
    if len(lows) < len(values):
        return -math.inf
    usual, strict = (NormalDist().inv_cdf(1 - 0.025 / number) for number in (1, attacks))
    error = math.sqrt(sum((low / usual) ** 2 for low in lows)) / len(lows)
    return _average(values) - strict * error


def measured(found: Found) -> float | None:
    """Return the figure by which attacks of one sort are compared: an AUC, or the share of a guess's error saved."""
    return found.value if found.claims in MEMBERSHIP else found.over_guessing


def utility(cell: CellFigures) -> float | None:
    return cell.global_test if cell.global_test is not None else cell.common


def _protected(
    protection: str, epsilon: float, cells: Sequence[CellFigures], plain: Sequence[CellFigures]
) -> Protected | None:
    of = [cell for cell in cells if cell.protection == protection and cell.asked == epsilon]
    if not of:
        return None
    done = [cell for cell in of if cell.status == "done"]
    why = next((reason_of(cell) for cell in of if cell.status != "done"), None)
    before = {cell.seed: utility(cell) for cell in plain}
    pairs = [(before.get(cell.seed), utility(cell)) for cell in done]
    costs = [100 * (was - now) for was, now in pairs if was is not None and now is not None]
    epsilons = [cell.epsilon for cell in done]
    return Protected(
        protection,
        epsilon,
        len(done),
        None if not epsilons or None in epsilons else max(e for e in epsilons if e is not None),
        _average(costs) if costs else None,
        best(done, "server", MEMBERSHIP),
        tuple(sorted({name for cell in done for name in cell.open})),
        why,
    )


def reason_of(cell: CellFigures) -> str:
    """Return in a few words why a cell was refused or failed, as the code said it."""
    text = cell.reason or "no reason was noted"
    if found := re.search(NOTHING, text):
        return f"of {found.group(1)}, none takes noise"
    return text.split(". ")[0].rstrip(".")


# --- words ------------------------------------------------------------------------------------------------------------


def shown(best: Best | None, digits: int = 2) -> str:
    """Return a best attack in words."""
    if best is None:
        return "nothing to attack"
    if not best.found:
        return f"not found ({best.value:.{digits}f})"
    return f"{best.value:.{digits}f} {best.attack} ({best.leaks} of {best.seeds})"


def why_unprotected(row: MethodRow) -> str:
    """Return which protections cannot be had by a method, and why; empty if each gives it a finite epsilon."""
    said: dict[str, list[str]] = {}
    for protection in PROTECTIONS:
        of = [one for one in row.protected if one.protection == protection]
        if reason := next((one.why_not for one in of if one.why_not), None):
            said.setdefault(reason, []).append(protection)
        elif of and all(one.epsilon is None for one in of if one.seeds):
            fields = sorted({name for one in of for name in one.open})
            said.setdefault(f"epsilon stays infinite by {', '.join(fields) or 'what cannot be composed'}", []).append(
                protection
            )
    return "; ".join(f"{' and '.join(names)}: {reason}" for reason, names in said.items())


def guarantee(row: MethodRow) -> str:
    """Return the cheapest protection with a finite epsilon at each epsilon that was asked for, and its cost."""
    parts = []
    for epsilon in EPSILONS:
        able = [
            one
            for one in row.protected
            if one.asked == epsilon and one.epsilon is not None and one.cost is not None and one.seeds
        ]
        if able:
            one = min(able, key=lambda one: one.cost or 0.0)
            # Without a global model the clients' own are published, and noise on messages does not cover these.
            but = ", models not covered" if one.protection == MESSAGES and row.global_test is None else ""
            parts.append(f"{one.epsilon:.1f} by {one.protection}{but}: {0.0 - (one.cost or 0.0):+.1f}")
    return "; ".join(parts) or "none"


def risk(row: MethodRow) -> str:
    """Return what was found on a method in one line."""
    if row.missing:
        return row.missing
    parts = []
    for threat in THREATS:
        found = []
        if (member := row.membership.get(threat)) and member.found:
            found.append(f"members (AUC {member.value:.2f}, {member.attack})")
        if (labels := row.labels.get(threat)) and labels.found:
            found.append(f"label shares ({labels.attack})")
        if (images := row.images.get(threat)) and images.found:
            found.append(f"images ({images.attack})")
        if found:
            parts.append(f"{threat}: {', '.join(found)}")
    return "; ".join(parts) or "nothing was found by these attacks"


def kilobytes(value: float) -> str:
    return f"{value / 1e3:.1f}"


COLUMNS = (
    "method", "seeds", "global, %", "own, %", "members: server", "members: peer", "members: outsider", "labels: server",
    "images: server", "epsilon and its cost in points", "cannot be protected, why", "up, kB", "down, kB", "s a round",
    "risk",
)  # fmt: skip


def cells_of_row(row: MethodRow) -> list[str]:
    """Return the texts of a row, in the order of COLUMNS."""
    if row.missing:
        return [row.method, "0", *[""] * (len(COLUMNS) - 3), f"no figures: {row.missing}"]
    return [
        row.method,
        str(row.seeds),
        row.global_test.text() if row.global_test else "none",
        row.own.text() if row.own else "none",
        *(shown(row.membership[threat]) for threat in THREATS),
        shown(row.labels["server"]),
        shown(row.images["server"]),
        guarantee(row),
        why_unprotected(row),
        kilobytes(row.up),
        kilobytes(row.down),
        f"{row.seconds:.2f}",
        risk(row),
    ]


def table(rows: Sequence[MethodRow]) -> str:
    """Return the rows as Markdown, a table for each family."""
    parts = []
    for family in dict.fromkeys(row.family for row in rows):
        lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        lines += [f"| {' | '.join(cells_of_row(row))} |" for row in rows if row.family == family]
        parts.append(f"**{family[0].upper()}{family[1:]}**\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


# --- the place of one method ------------------------------------------------------------------------------------------


def place(mine: MethodRow, others: Sequence[MethodRow]) -> str:
    """Return in a sentence where a method stands among the others: in accuracy, and in what the server finds out."""
    rest = [row for row in others if row.method != mine.method and row.partition == mine.partition and not row.missing]
    better = sum((row.utility or 0.0) > (mine.utility or 0.0) for row in rest)
    auc = _auc(mine)
    leakier = sum(_auc(row) > auc for row in rest)
    where = PARTITIONS.get(mine.partition, mine.partition)
    return (
        f"{where}: accuracy {100 * (mine.utility or 0.0):.1f} %, rank {better + 1} of {len(rest) + 1}; the server's "
        f"best membership AUC {auc:.2f}, {leakier} of {len(rest)} methods give away more"
    )


def _auc(row: MethodRow) -> float:
    found = row.membership.get("server")
    return 0.5 if found is None else found.value


# --- the picture ------------------------------------------------------------------------------------------------------


def picture(rows: Sequence[MethodRow], file: Path, mine: str | None = None) -> Path:
    """Draw accuracy against what the server's best membership attack reaches, one panel for each partition.

    Both axes are logarithmic, in the error and in the distance to a guess: most methods are near each other.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    from fedaudit.reports.figure_labels import Label, label_beside
    from fedaudit.reports.figures import MARKERS, SERIES, style

    partitions = list(dict.fromkeys(row.partition for row in rows))
    families = list(dict.fromkeys(row.family for row in rows))
    with style():
        figure = Figure(figsize=(10, 7.5 * len(partitions)))
        axes = figure.subplots(len(partitions), 1, squeeze=False)[:, 0]
        figure.subplots_adjust(left=0.07, right=0.66, top=0.97, bottom=0.05, hspace=0.14)
        for ax, partition in zip(axes, partitions, strict=True):
            labels = []
            for number, family in enumerate(families):
                of = [
                    row
                    for row in rows
                    if row.partition == partition and row.family == family and row.utility is not None
                ]
                x = [max(2 * _auc(row) - 1, LEAST) for row in of]
                y = [max(100 * (1 - (row.utility or 0.0)), LEAST) for row in of]
                colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
                ax.scatter(x, y, s=22, color=colour, marker=marker, label=family, zorder=3)
                labels += [
                    Label(a, b, row.method, colour, bold=row.method == mine) for row, a, b in zip(of, x, y, strict=True)
                ]
            ax.set(xscale="log", yscale="log", title=PARTITIONS.get(partition, partition))
            ax.invert_yaxis()
            for axis, places, text in (
                (ax.xaxis, (0.02, 0.05, 0.1, 0.2, 0.5, 1.0), lambda value, _: f"{(1 + value) / 2:.3g}"),
                (ax.yaxis, (2, 5, 10, 20, 50, 90), lambda value, _: f"{100 - value:g}"),
            ):
                axis.set_major_locator(FixedLocator(places))
                axis.set_minor_locator(NullLocator())
                axis.set_major_formatter(FuncFormatter(text))
            ax.set_xlabel("best membership AUC of the server (0.5: guessing)")
            ax.set_ylabel("accuracy on the common test set, %")
            label_beside(ax, labels, width=48, size=7.5)
        axes[0].legend(loc="lower left", bbox_to_anchor=(0.12, 0.07), fontsize=7)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110, metadata={"Software": None})
    return file
