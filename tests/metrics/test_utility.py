"""Metrics of utility: when an accuracy counts as learnt."""

from __future__ import annotations

import pytest
import reported

from fedaudit.cli.listing import summary
from fedaudit.metrics import utility
from fedaudit.metrics.metric import metrics
from fedaudit.metrics.utility import near_chance
from fedaudit.runtime.run_record import DataFacts


def data(classes: int, n: int, counts: list[list[int]] | None = None) -> DataFacts:
    return DataFacts(
        shape=[4], classes=classes, class_names=[], test=n, aux=0, public=0, members=[], nonmembers=[], validation=[],
        counts=counts or [],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("classes", "n", "reached", "said"),
    [
        (2, 80, 0.6875, ""),  # from 57.9 %
        (2, 16, 0.6875, "50 % of guessing"),  # from 44.4 %: eleven of sixteen may be luck
        (2, 2000, 0.55, ""),  # from 52.8 %
        (2, 2000, 0.54, "50 % of guessing"),  # from 51.8 %
        (10, 10_000, 0.16, ""),  # from 15.3 %
        (10, 10_000, 0.15, "10 % of guessing"),  # from 14.3 %: above 10 %, and near it
        (100, 10_000, 0.02, ""),  # from 1.7 %
        (100, 10_000, 0.016, "1 % of guessing"),  # from 1.4 %
    ],
)
def test_the_lower_end_of_the_interval_decides(classes, n, reached, said):
    """Wilson's lower end against guessing: 5 % of the way from 1/2 to 1 is 0.525, from 1/10 to 1 it is 0.145. From
    1/100 it would be 0.0595, so there 1.5 times guessing, 0.015, is the limit."""
    assert near_chance(reached, data(classes, n)) == said


@pytest.mark.parametrize(("reached", "said"), [(0.80, ""), (0.77, "76 % of always naming the most frequent class")])
def test_one_answer_to_everything_is_no_learning(reached, said):
    """Two clients with 76 of 100 records in one class, 500 test records: 77 % begins at 73.1 %, 80 % at 76.3 %."""
    assert near_chance(reached, data(2, 500, [[40, 20], [36, 4]])) == said


def test_nothing_is_said_without_an_accuracy_or_classes():
    assert near_chance(None, data(2, 100)) == ""
    assert near_chance(0.1, data(0, 0)) == "", "apps whose data is not known"


def test_a_run_says_on_how_many_records_it_is_near_chance():
    record = reported._record("fedavg", 0, 0.6875, releases=True)
    record.data = data(2, 80)
    assert not any("NEAR CHANCE" in line for line in summary(record))
    record.data = data(2, 16)
    assert "  NEAR CHANCE: on 16 test records it is not clearly above the 50 % of guessing." in summary(record)


@pytest.mark.parametrize(
    ("low", "said"),
    [
        (0.525, "50 % of guessing"), (0.526, "76 % of always naming the most frequent class"),
        (0.76, "76 % of always naming the most frequent class"), (0.761, ""),
    ],
)  # fmt: skip
def test_what_is_exactly_at_a_limit_is_near_it(low, said, monkeypatch):
    monkeypatch.setattr(utility, "wilson", lambda hits, n: (low, 1.0))
    assert near_chance(0.9, data(2, 500, [[40, 20], [36, 4]])) == said


def test_what_readers_are_told_of_each_metric():
    """All three are shares that are estimated over seeds, and more is better; only the last one is folded away."""
    for key, folded in (("accuracy", False), ("own", False), ("global_own", True)):
        metric = metrics()[key]
        said = metric.part, metric.unit, metric.better, metric.sampled, metric.bounds, metric.machine, metric.seeds
        assert said == ("Utility", "share", "high", True, (0, 1), False, "mean"), key
        assert (metric.folded, metric.line) == (folded, False), key
