"""The accuracies that models reached, as a run record keeps them: typed, and validated whenever they are read."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from fedaudit.stats import check_interval
from fedaudit.stored_model import Sparse, StoredModel


class Accuracy(StoredModel):
    """An accuracy on n records, with Wilson's interval."""

    accuracy: float
    low: float
    high: float
    n: int

    @model_validator(mode="after")
    def _lies_within_its_interval(self) -> Accuracy:
        check_interval("accuracy", self.accuracy, self.low, self.high)
        return self


class Sampled(StoredModel):
    """Says how many clients, of how many, a mean is over, and the 95 % interval of the mean over all of them."""

    looked_at: int
    of: int  # clients that have records of this kind
    low: float
    high: float


class Spread(Sparse):
    """Mean and standard deviation over clients, and each client's own value.

    If `sampled` is set, the clients are some of many, drawn at random (see `fedaudit.runtime.utility.looked_at`).
    """

    optional: ClassVar = ("sampled",)

    mean: float
    std: float
    each: list[float]
    sampled: Sampled | None = None

    @model_validator(mode="after")
    def _lies_within_its_interval(self) -> Spread:
        if self.sampled is not None:
            check_interval("mean", self.mean, self.sampled.low, self.sampled.high)
        return self


class GlobalScores(Sparse):
    """The scores of one model on the server's side."""

    optional: ClassVar = ("test_by_domain",)

    test: Accuracy
    local_test: Spread | None = None  # on each client's own held-out records; None: the record is older than this field
    validation: float | None = None  # on all clients' validation records together
    test_by_domain: dict[str, Accuracy] = Field(default_factory=dict)


class ClientScores(Sparse):
    """The scores of the clients' models; None for a set of which nobody has records.

    `matched_test` is the common test set with its classes weighted as in each client's own records. It is there if
    nobody holds out records.
    """

    optional: ClassVar = ("matched_test",)

    global_test: Spread | None = None
    local_test: Spread | None = None
    matched_test: Spread | None = None
    validation: Spread | None = None


class Utility(Sparse):
    """The scores that one round reached. `global_` is `global` in JSON."""

    optional: ClassVar = ("global_points", "points")

    global_: GlobalScores | None = Field(default=None, alias="global")
    clients: ClientScores | None = None
    global_points: dict[str, GlobalScores] = Field(default_factory=dict)  # the server's models within the round
    points: dict[str, ClientScores] = Field(default_factory=dict)  # the clients' models within the round

    def sampled(self) -> Sampled | None:
        """Return how many clients were looked at of how many; None: all of them."""
        sets = [self.clients.global_test, self.clients.local_test] if self.clients else []
        sets += [self.global_.local_test] if self.global_ else []
        return next((row.sampled for row in sets if row is not None and row.sampled is not None), None)

    def validation_score(self) -> float | None:
        """Return what chooses the round: the global model's validation accuracy or, without a global model, the
        clients' mean."""
        if self.global_ is not None:
            return self.global_.validation
        return self.clients.validation.mean if self.clients and self.clients.validation else None

    def test_score(self) -> float | None:
        """Return the global model's accuracy on the common test set, or the clients' mean there."""
        if self.global_ is not None:
            return self.global_.test.accuracy
        return self.clients.global_test.mean if self.clients and self.clients.global_test else None


class _Numbered(StoredModel):
    round: int


class Reached(Utility, _Numbered):
    """A round's utility, with its number."""


class BestTestRound(_Numbered):
    accuracy: float | None = None


class Result(StoredModel):
    """The last round and the one chosen on validation data; the best test round appears only under that name."""

    last: Reached | None = None
    chosen: Reached | None = None
    best_test_round: BestTestRound | None = None
