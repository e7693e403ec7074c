"""The report's vocabulary: what each release and protection means, for readers who are not privacy experts.

What a column means is said by its metric (fedaudit.metrics).

Nothing here says that something is safe. A guarantee is called a guarantee, and a failed attack a failed attack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedaudit.metrics.metric import Metric, metrics
from fedaudit.privacy.ledger import ClientLedger, LedgerEntry
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.reports.cell import ReportCell
from fedaudit.units import UNITS, bytes_text

BY_KEY = metrics()  # live: a metric that is registered later is in it


def text(metric: Metric, value: float | None) -> str:
    """Return a value in its metric's unit, as text."""
    return metric.text(value)


def interval_text(metric: Metric, cell: ReportCell) -> str:
    """Return an interval such as `[84.1, 95.0]`, in the unit of its value, without the unit's name."""
    low, high = cell.low, cell.high
    if low is None or high is None:
        return ""
    if metric.unit == "bytes" and cell.value is not None:
        scale = UNITS[bytes_text(cell.value).split()[1]]
        return f"[{low / scale:.4g}, {high / scale:.4g}]"
    ends = (text(metric, end).removesuffix(" %").removesuffix(" s") for end in (low, high))
    if metric.unit == "share":
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
