"""Metrics of utility: what the models of a run reach."""

from __future__ import annotations

from fedaudit.metrics.metric import Metric, register
from fedaudit.runtime.run_record import DataFacts, RunRecord
from fedaudit.stats import wilson

NEAR_CHANCE = 0.05  # of the way from guessing to no mistake is still near chance,
MUCH_BETTER = 1.5  # but no more than so many times what guessing gives: of 100 classes, 2 % is not near 1 %


def accuracy(record: RunRecord) -> float | None:
    return record.result.last.test_score() if record.result.last else None


def accuracy_interval(record: RunRecord) -> tuple[float, float, str] | None:
    """Return the interval of the global model's accuracy in the last round; None for a method without such a model."""
    last = record.result.last
    return (
        (last.global_.test.low, last.global_.test.high, "Wilson, over test records") if last and last.global_ else None
    )


def near_chance(reached: float | None, data: DataFacts) -> str:
    """Return in words the accuracy without learning that a model's is not clearly above; empty if it is.

    The lower end of Wilson's 95 % interval decides. It has to lie well above what guessing among the classes gives, and
    above the share of the most frequent class among the clients' records, which one answer to everything would reach.
    A mean over clients or seeds on the same test records is at least as exact as one model's accuracy, so its interval
    is taken as if it were one.
    """
    if reached is None or not data.classes:
        return ""
    low, guessing = wilson(reached * data.test, data.test)[0], 1 / data.classes
    if low <= min(guessing + NEAR_CHANCE * (1 - guessing), MUCH_BETTER * guessing):
        return f"{100 * guessing:.0f} % of guessing"
    by_class = [sum(held) for held in zip(*data.counts, strict=True)]
    largest = max(by_class, default=0) / max(sum(by_class), 1)
    return f"{100 * largest:.0f} % of always naming the most frequent class" if low <= largest else ""


def _no_accuracy(record: RunRecord) -> str:
    if record.result.last is None:
        return (
            f"The run of {record.setting.method} has no evaluated round, so it has no accuracy. Run at "
            "least one round with evaluation."
        )
    if record.result.last.test_score() is None:
        return f"The run of {record.setting.method} evaluated no model: run it with --eval-clients."
    return ""


def _own(record: RunRecord) -> float | None:
    clients = record.result.last.clients if record.result.last else None
    return clients.local_test.mean if clients and clients.local_test else None


def _global_own(record: RunRecord) -> float | None:
    of_global = record.result.last.global_ if record.result.last else None
    return of_global.local_test.mean if of_global and of_global.local_test else None


ACCURACY = register(
    Metric(
        "accuracy", "Accuracy", "Utility", "share", "high", True,
        "Share of a common test set that is classified right after the last round: by the global model or, if a "
        "method has none, by the clients' models on average.",
        accuracy, (0, 1), interval=accuracy_interval, refusal=_no_accuracy, line=False,
    )
)  # fmt: skip
register(
    Metric(
        "own", "On own data", "Utility", "share", "high", True,
        "Accuracy of the clients' own models on their own held-out records, averaged over clients.",
        _own, (0, 1), line=False,
    )
)  # fmt: skip
register(
    Metric(
        "global_own", "Global on own data", "Utility", "share", "high", True,
        "Accuracy of the one global model on the same held-out records, per client, averaged over clients: what papers "
        "on personalisation print as FedAvg. If it is below the column before it, local training pays.",
        _global_own, (0, 1), folded=True, line=False,
    )
)  # fmt: skip
