"""Policies: what a setting may say about privacy, and what is refused before anything leaves a client."""

from __future__ import annotations

import pytest

from fedaudit import run
from fedaudit.errors import PrivacyError, SettingError
from fedaudit.privacy.policy import Policy, parse_policy, protects_persons, read_policies
from fedaudit.wire.message import KINDS


def test_command_line_form():
    assert parse_policy("embeddings:eps=1,clip=1") == ("embeddings", {"epsilon": 1, "sensitivity": "clip:1"})
    assert parse_policy("logits:eps=0.5,total,zero-out,delta=1e-5") == (
        "logits",
        {"epsilon": 0.5, "calibration": "total", "relation": "zero-out", "delta": 1e-5},
    )
    assert parse_policy("embeddings:pure-noise") == ("embeddings", {"mechanism": "pure-noise"})
    assert parse_policy("embeddings:eps=1,random-pixel") == (
        "embeddings",
        {"epsilon": 1, "sensitivity": "random-pixel"},
    )
    assert parse_policy("training:noise=1.1,clip=0.5,secure")[1]["secure"] is True


def test_the_table_of_the_documentation():
    values = {
        "mechanism": "gaussian",
        "epsilon": 1.0,
        "delta": "1/n",
        "calibration": "analytic",
        "sensitivity": "clip:1.0",
    }
    policy = read_policies({"embeddings": values}, KINDS)["embeddings"]
    assert policy == Policy(epsilon=1.0)
    assert policy.clip == 1.0
    assert policy.delta_for(50) == 0.02


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("embeddings:eps=0", "epsilon"),
        ("embeddings:eps=-1", "epsilon"),
        ("embeddings:eps=nan", "nan is not finite"),
        ("embeddings:eps=1,delta=0", "delta"),
        ("embeddings:eps=1,delta=1", "delta"),
        ("embeddings:eps=1,delta=some", "delta = 'some'"),
        ("embeddings:eps=1,clip=0", "above 0"),
        ("embeddings:eps=1,clip=-2", "above 0"),
        ("embeddings:eps=1,clip=wide", "above 0"),
        ("embeddings:eps=2,classical", "proven for epsilon <= 1 only"),
        ("embeddings:clip=1", "either epsilon or noise_multiplier"),
        ("embeddings:eps=1,noise=2", "either epsilon or noise_multiplier"),
        ("embeddings:noise=0", "noise_multiplier = 0"),
        ("embeddings:eps=1,releases=0", "releases = 0"),
        ("embeddings:eps=1,sensitivity=guess", "Unknown sensitivity of privacy.embeddings 'guess'"),
        ("embeddings:eps=1,dp-sgd", "'dp-sgd' is for privacy.training only"),
        ("training:eps=1,random-pixel", "random-pixel is about images"),
        ("training:eps=1,zero-out", "it takes no relation and no calibration"),
        ("training:eps=1,total", "it takes no relation and no calibration"),
        ("embeddings:eps=1,random-pixel=0.5", "whole number"),
        ("embeddings:eps=1,random-pixel,assume=logits-of-records", "only for the random-pixel sensitivity of logits"),
        ("logits:eps=1,clip=1,assume=logits-of-records", "only for the random-pixel sensitivity of logits"),
        ("embedding:eps=1", "Did you mean 'embeddings'"),
        ("weights:eps=1", "Use DP-SGD: training"),
        ("layers:eps=1", "Use DP-SGD: training"),
        ("labels:eps=1", "class numbers, which take no Gaussian noise"),
        ("count:eps=1", "takes no Gaussian noise"),
        ("embeddings", "write KIND:OPTIONS"),
        ("embeddings:epsilonn=1", "unknown option 'epsilonn=1'"),
        ("embeddings:eps=one", "epsilon"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(text, words, tmp_path):
    with pytest.raises((PrivacyError, SettingError), match=words):
        run(method="outside:Exchange", rounds=1, clients=2, privacy=dict([parse_policy(text)]), out=tmp_path / "a")
    assert not (tmp_path / "a" / "transcript").exists()


def test_the_usual_values_of_a_policy():
    assert Policy().model_dump() == {
        "mechanism": "gaussian", "epsilon": None, "delta": "1/n", "calibration": "analytic", "sensitivity": "clip:1.0",
        "assume": "nothing", "relation": "replace-one", "noise_multiplier": None, "releases": None, "unit": "record",
        "secure": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("sensitivity", "clip", "samples"),
    [("clip:2.5", 2.5, None), ("clip", 1.0, 256), ("random-pixel", None, 256), ("random-pixel:9", None, 9)],
)
def test_a_bound_that_is_read_from_its_words(sensitivity, clip, samples):
    policy = Policy(epsilon=1.0, sensitivity=sensitivity)
    assert policy.clip == clip
    if samples is not None:
        assert policy.samples == samples


@pytest.mark.parametrize(("delta", "n", "found"), [("1/n", 50, 0.02), (0.25, 50, 0.25), ("1e-3", 50, 1e-3)])
def test_the_delta_of_so_many_records(delta, n, found):
    assert Policy(epsilon=1.0, delta=delta).delta_for(n) == found


def test_policies_of_several_kinds():
    """Training has its own mechanism, and what is for clients is read elsewhere."""
    found = read_policies(
        {"logits": {"epsilon": 1.0}, "updates": {"epsilon": 8.0}, "training": {"noise_multiplier": 2.0}}, KINDS
    )
    assert found == {"logits": Policy(epsilon=1.0), "training": Policy(mechanism="dp-sgd", noise_multiplier=2.0)}
    assert not protects_persons(found)
    assert not protects_persons({})
    person = {"epsilon": 1.0, "unit": "person"}
    assert protects_persons(read_policies({"logits": person, "embeddings": person}, KINDS))
    assert protects_persons({"a": Policy(), "b": Policy(unit="person")})


PERSON = {"epsilon": 1.0, "unit": "person"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logits": PERSON, "embeddings": {"epsilon": 1.0}}, "logits protects persons, and embeddings single records"),
        (
            {"logits": {**PERSON, "mechanism": "laplace"}},
            "laplace with sensitivity clip:1.0 is not bounded for several",
        ),
        ({"embeddings": {**PERSON, "sensitivity": "random-pixel"}}, "Choose from gaussian with clip=C"),
        ({"logits": {"epsilon": 1.0, "mechanism": "none"}}, "mechanism"),
        (
            {"logits": {"epsilon": 1.0, "mechanism": "dp-sgd"}},
            "'dp-sgd' is for privacy.training only. Choose from disc",
        ),
        ({"training": {"epsilon": 1.0, "mechanism": "gaussian"}}, "'gaussian' is for fields only. Choose from dp-sgd."),
        ({"logits": 3}, "write a table"),
        ({"logit": {"epsilon": 1.0}}, "Did you mean 'logits'"),
        ({"trainin": {"epsilon": 1.0}}, "Did you mean 'training'"),
        ({"logits": {"epsilon": 1.0, "delta": "2"}}, "delta"),
        ({"logits": {"epsilon": 1.0, "klip": 2}}, "Unknown option of privacy.logits 'klip'"),
    ],
)
def test_policies_that_are_refused(values, words):
    with pytest.raises(PrivacyError) as told:
        read_policies(values, KINDS)
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("logits:eps=1,classical,gaussian", {"epsilon": 1, "calibration": "classical", "mechanism": "gaussian"}),
        ("logits:noise = 2 , replace-one", {"noise_multiplier": 2, "relation": "replace-one"}),
        ("logits:random-pixel=9,releases=4", {"sensitivity": "random-pixel:9", "releases": 4}),
        ("logits:random-pixel,secure", {"sensitivity": "random-pixel", "secure": True}),
        ("logits:clip=0.5,secure=false", {"sensitivity": "clip:0.5", "secure": False}),
        ("logits:unit=person,skellam", {"unit": "person", "mechanism": "skellam"}),
    ],
)
def test_options_of_a_command_line(text, values):
    assert parse_policy(text) == ("logits", values)


@pytest.mark.parametrize("rest", ["clip", "secured", "eps", "laplace=1", "analytic=2", "unit"])
def test_options_that_are_not_known_on_a_command_line(rest):
    with pytest.raises(PrivacyError, match="unknown option"):
        parse_policy(f"logits:{rest}")
    for text in ("logits", "logits:"):
        with pytest.raises(PrivacyError, match="write KIND:OPTIONS"):
            parse_policy(text)
