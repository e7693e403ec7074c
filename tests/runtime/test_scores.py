"""Scores of a round: whose they are where a method has no global model, and intervals that hold their values."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fedaudit.runtime.scores import Accuracy, Spread, Utility

TEST = {"accuracy": 0.8, "low": 0.7, "high": 0.9, "n": 10}
SOME = {"looked_at": 3, "of": 90, "low": 0.2, "high": 0.6}


def spread(mean, **more):
    return {"mean": mean, "std": 0.1, "each": [mean], **more}


def test_a_global_models_scores_come_first():
    both = Utility.model_validate(
        {
            "global": {"test": TEST, "local_test": spread(0.3), "validation": 0.77},
            "clients": {"global_test": spread(0.5), "local_test": spread(0.6), "validation": spread(0.4)},
        }
    )
    assert (both.test_score(), both.validation_score(), both.sampled()) == (0.8, 0.77, None)
    alone = Utility(clients=both.clients)
    assert (alone.test_score(), alone.validation_score()) == (0.5, 0.4)


def test_without_records_there_is_no_score():
    nobody = Utility.model_validate({"clients": {"local_test": spread(0.6)}})
    assert (nobody.test_score(), nobody.validation_score(), nobody.sampled()) == (None, None, None)
    assert (Utility().test_score(), Utility().validation_score(), Utility().sampled()) == (None, None, None)
    blind = Utility.model_validate({"global": {"test": TEST}, "clients": {"validation": spread(0.4)}})
    assert blind.validation_score() is None, "a global model without validation records is not chosen by clients"


@pytest.mark.parametrize("where", ["global_test", "local_test", "global"])
def test_a_sample_of_clients_is_found_wherever_it_was_drawn(where):
    some = spread(0.5, sampled=SOME)
    told = {"global": {"test": TEST, "local_test": some}} if where == "global" else {"clients": {where: some}}
    assert Utility.model_validate(told).sampled().looked_at == 3


@pytest.mark.parametrize(("value", "taken"), [(0.7, True), (0.9, True), (0.65, False), (0.95, False)])
def test_a_value_lies_within_its_interval(value, taken):
    for make in (
        lambda: Accuracy(**{**TEST, "accuracy": value}),
        lambda: Spread(**spread(value, sampled={**SOME, "low": 0.7, "high": 0.9})),
    ):
        if taken:
            make()
        else:
            with pytest.raises(ValidationError, match="outside"):
                make()
