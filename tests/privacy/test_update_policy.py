"""The policy on clients' updates: its usual values, what is taken and what is refused, and its words."""

from __future__ import annotations

import math

import pytest

from fedaudit.errors import PrivacyError
from fedaudit.privacy.update_policy import UpdatePolicy, parse_updates, read_updates


def read(**values):
    return read_updates({"updates": values, "logits": {"epsilon": 1.0}})


def test_the_usual_values_of_a_policy():
    policy = read(epsilon=8.0)
    assert policy.model_dump() == {
        "unit": "client", "where": "server", "clip": 1.0, "quantile": None, "clip_rate": 0.2, "epsilon": 8.0,
        "noise_multiplier": None, "delta": "1/K", "secure": False,
    }  # fmt: skip
    assert read_updates({"logits": {"epsilon": 1.0}}) is None
    assert read_updates({}) is None


@pytest.mark.parametrize(
    "values",
    [
        {"epsilon": 0.01}, {"noise_multiplier": 1e-9}, {"epsilon": 1.0, "clip": 1e-9}, {"epsilon": 1.0, "clip": 1e9},
        {"epsilon": 1.0, "quantile": 1e-9}, {"epsilon": 1.0, "quantile": 0.999}, {"epsilon": 1.0, "delta": 0.5},
        {"epsilon": 1.0, "quantile": 0.5, "clip_rate": 1e-9}, {"epsilon": 1.0, "where": "client"},
        {"epsilon": 1.0, "delta": "1e-5"}, {"epsilon": 1.0, "clip_rate": 0.0},
    ],
)  # fmt: skip
def test_policies_that_are_taken(values):
    found = read(**values)
    assert {key: getattr(found, key) for key in values} == values


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "give either epsilon or noise_multiplier"),
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, "give either epsilon or noise_multiplier"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0.0; give a finite number above 0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier = inf; give a finite"),
        ({"epsilon": 1.0, "clip": 0.0}, "clip = 0; give a number above 0"),
        ({"epsilon": 1.0, "clip": math.inf}, "clip = inf; give a number above 0"),
        ({"epsilon": 1.0, "quantile": 0.5, "clip_rate": math.inf}, "clip_rate = inf"),
        ({"epsilon": 1.0, "delta": "often"}, "delta = 'often'; write a number between 0 and 1"),
        ({"epsilon": 1.0, "delta": 0.0}, "delta"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta"),
        ({"epsilon": 1.0, "unit": "record"}, "option of privacy.updates unit"),
        ({"epsilon": 1.0, "klip": 1.0}, "Unknown option of privacy.updates 'klip'. Did you mean 'clip'"),
    ],
)
def test_policies_that_are_refused(values, words):
    with pytest.raises(PrivacyError) as told:
        read(**values)
    assert words in str(told.value)


def test_a_policy_is_a_table():
    with pytest.raises(PrivacyError, match=r"privacy\.updates = 8: write a table"):
        read_updates({"updates": 8})


def test_a_policy_in_words():
    assert UpdatePolicy(epsilon=8.0).text() == "ε=8 per client, clip 1, noise by the server"
    other = UpdatePolicy(noise_multiplier=1.5, clip=2.5, where="shares")
    assert other.text() == "noise 1.5x per client, clip 2.5, noise in shares"
    assert UpdatePolicy(epsilon=1.0, where="client").text().endswith("noise by each client")


@pytest.mark.parametrize(
    ("delta", "clients", "found"),
    [("1/K", 50, 0.02), ("1/K", 2, 0.5), ("1/K", 1, 0.5), (0.25, 50, 0.25), ("0.1", 9, 0.1)],
)
def test_the_delta_of_so_many_clients(delta, clients, found):
    assert UpdatePolicy(epsilon=1.0, delta=delta).delta_for(clients) == found


def test_options_of_a_command_line():
    text = "eps = 8, clip=2,unit=client,secure,noise=1.5,delta=1/K,where=shares"
    assert parse_updates("whole", text) == {
        "epsilon": 8, "clip": 2, "unit": "client", "secure": True, "noise_multiplier": 1.5, "delta": "1/K",
        "where": "shares",
    }  # fmt: skip
    assert parse_updates("whole", "secure=false") == {"secure": False}
    for wrong in ("klip=1", "clip", "secured", ""):
        with pytest.raises(PrivacyError, match=r"--privacy 'whole': unknown option"):
            parse_updates("whole", wrong)
