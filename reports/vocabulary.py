"""The report's vocabulary: what each column, release and protection means, for readers who are not privacy experts.

Nothing here says that something is safe. A guarantee is called a guarantee, and a failed attack a failed attack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedaudit.privacy.ledger import ClientLedger, LedgerEntry
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.reports.cell import ReportCell
from fedaudit.units import UNITS, bytes_text


@dataclass(frozen=True)
class Column:
    key: str
    title: str
    part: Literal["Utility", "Guarantee", "Attacks", "Cost"]
    unit: Literal["share", "auc", "epsilon", "bytes", "seconds", "points"]
    better: Literal["high", "low"] | None  # which direction is better for whoever runs the federation
    sampled: bool  # estimated over seeds; otherwise counted or computed, so that every difference is real
    help: str
    bounds: tuple[float, float] = (0.0, math.inf)
    machine: bool = False  # depends on the machine as much as on the method


COLUMNS = (
    Column(
        "accuracy", "Accuracy", "Utility", "share", "high", True,
        "Share of a common test set that is classified right after the last round: by the global model or, if a "
        "method has none, by the clients' models on average.", (0, 1),
    ),
    Column(
        "own", "On own data", "Utility", "share", "high", True,
        "Accuracy of the clients' own models on their own held-out records, averaged over clients.", (0, 1),
    ),
    Column(
        "global_own", "Global on own data", "Utility", "share", "high", True,
        "Accuracy of the one global model on the same held-out records, per client, averaged over clients: what papers "
        "on personalisation print as FedAvg. If it is below the column before it, local training pays.",
        (0, 1),
    ),
    Column(
        "claim", "Claim", "Guarantee", "epsilon", None, False,
        "The epsilon that the setting asked for, as papers state it: for one release of the named kinds, "
        "without the other rounds and without what else is sent.",
    ),
    Column(
        "epsilon", "Ledger ε", "Guarantee", "epsilon", "low", False,
        "The guarantee by the accounting, for the worst-off client and all rounds together: the smaller, the less "
        "anybody can learn about one record. 0: nothing computed from the records was sent. ∞: something was sent "
        "without noise, so nothing is guaranteed. Computed, not estimated: the largest over seeds is shown.",
    ),
    Column(
        "lower", "Attacked ε ≥", "Guarantee", "epsilon", None, True,
        "Empirical lower bound, at 95 % confidence: what attacks on planted records show; the largest of all attacks. "
        "A claim below it is refuted if p < 0.001, corrected for all audits. A small value shows nothing.",
    ),
    Column(
        "noise", "Noise found ε ≥", "Guarantee", "epsilon", None, True,
        "What the accounting gives for the noise that was found on the bytes as sent, at 95 % confidence. It is a "
        "check of the noise and no attack: nobody may be able to reach it. A claim below it is refuted if p < 0.001, "
        "corrected for all audits.",
    ),
    Column(
        "tpr", "TPR at 1 % FPR", "Attacks", "share", "low", True,
        "Best membership attack: the share of the training records that it names while it wrongly names 1 % of the "
        "others. 1 % would be guessing. The best of all attacks that ran, by its mean over seeds.", (0, 1),
    ),
    Column(
        "auc", "Attack AUC", "Attacks", "auc", "low", True,
        "Best membership attack: how often it ranks a record that was trained on above one that was not. 0.5 is a coin "
        "flip, 1 is certainty. The attack that found most, by its mean over seeds; what the best attacker reaches who "
        "sees nothing of the run is given below it. The interval is over the candidates of all seeds.", (0, 1),
    ),
    Column(
        "identified", "Images identified", "Attacks", "share", "low", True,
        "Best reconstruction attack: the share of its images from which the right training record can be picked out "
        "of the candidates. The share by guessing is given below it.", (0, 1),
    ),
    Column(
        "up", "Up", "Cost", "bytes", "low", False,
        "Bytes that one client sends in one round, counted as papers do: number of values times their size.",
    ),
    Column(
        "down", "Down", "Cost", "bytes", "low", False,
        "Bytes that one client receives in one round, counted the same way.",
    ),
    Column(
        "per_byte", "Accuracy per MB up", "Cost", "points", "high", True,
        "Accuracy after the last round, in percent, for each megabyte that all clients together sent in the whole run. "
        "Shown if a run of the report compresses what clients send.",
    ),
    Column(
        "seconds", "Compute", "Cost", "seconds", "low", True,
        "Seconds of all clients' and the server's work, without evaluation: on the GPU if there is one, otherwise "
        "of one CPU thread. It depends on the machine as much as on the method.", machine=True,
    ),
    Column(
        "memory", "Peak memory", "Cost", "bytes", "low", True,
        "Most memory in use: on the GPU if there is one, otherwise of the process, and then earlier runs of the same "
        "process count, too.", machine=True,
    ),
)  # fmt: skip
BY_KEY = {column.key: column for column in COLUMNS}
ONE_SIDED = ("lower", "noise")  # columns of lower bounds, which have no interval


def text(column: Column, value: float | None) -> str:
    """Return a value in its column's unit, as text."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞"
    if column.unit == "share":
        return f"{100 * value:.1f} %"
    if column.unit == "auc":
        return f"{value:.3f}"
    if column.unit == "bytes":
        return bytes_text(value)
    if column.unit == "seconds":
        return f"{value:.1f} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value:.3g}"


def interval_text(column: Column, cell: ReportCell) -> str:
    """Return an interval such as `[84.1, 95.0]`, in the unit of its value, without the unit's name."""
    low, high = cell.low, cell.high
    if low is None or high is None:
        return ""
    if column.unit == "bytes" and cell.value is not None:
        scale = UNITS[bytes_text(cell.value).split()[1]]
        return f"[{low / scale:.4g}, {high / scale:.4g}]"
    ends = (text(column, end).removesuffix(" %").removesuffix(" s") for end in (low, high))
    if column.unit == "share":
        ends = (end if end not in ("0.0", "100.0") else end[:-2] for end in ends)
    return f"[{', '.join(ends)}]"


KINDS = {
    "weights": "all weights of the client's trained model",
    "gradients": "gradients of the training loss",
    "layers": "some layers of the client's trained model",
    "statistics": "statistics of the model's layers (means and variances of batch norm)",
    "embeddings": "what the model's encoder makes of the client's records, one row per record",
    "labels": "the labels of the client's records",
    "logits": "class scores",
    "soft_labels": "class probabilities",
    "prototypes": "one average embedding per class",
    "label_counts": "how many records of each class the client has",
    "count": "how many records the client has",
    "synthetic_images": "images made to train as the client's records do",
    "training": "local training on the client's records",
}
VIA = {
    "data": "computed from the records",
    "model": "computed from the trained model",
    "released": "computed from what was already released",
}


def kind_text(kind: str | None) -> str:
    return KINDS.get(kind or "", (kind or "something").replace("_", " "))


def seen_by(ledgers: Iterable[ClientLedger], kind: str) -> str:
    """Return who sees a kind of release of a client."""
    seen = {who for ledger in ledgers for who in ledger.observers.get(kind, [])}
    clients = sorted(who for who in seen if who.startswith("client"))
    parts = [*(["the server"] if "server" in seen else [])]
    if clients:
        parts.append(f"{'other clients' if len(clients) > 1 else clients[0]}, passed on by the server")
    return " and ".join(parts) or "nobody"


def protection_text(entries: Sequence[LedgerEntry]) -> tuple[str, str]:
    """Return how a field was protected, in words, and one of "open", "noise", "free" for its colour."""
    if not entries:
        return "not in the ledger", "open"
    return mechanism_of(min(entries, key=lambda e: e.noise_multiplier)).words(entries)
