"""The round that a request names: in its group, or in a config of a name that is in use."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedaudit.flower.client import identify
from fedaudit.flower.round_number import round_number


@pytest.mark.parametrize(
    ("group", "config", "said"),
    [
        ("3", {"server-round": 9}, 3), ("0", {}, 0), ("", {"server-round": 4}, 4), ("", {"current_round": 5}, 5),
        ("", {"lr": 3}, None), ("cohort-1", {}, None), ("", {"round": True}, None), ("", {"round": 2.0}, None),
        ("", {"round": 1, "server-round": 2}, 2),
    ],
)  # fmt: skip
def test_the_number_of_a_request(group, config, said):
    identify()
    message = Message(RecordDict({"config": ConfigRecord(config)}), 1, "train", group_id=group)
    assert round_number(message) == said
