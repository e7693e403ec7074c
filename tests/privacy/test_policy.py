"""Policies: what a setting may say about privacy, and what is refused before anything leaves a client."""

from __future__ import annotations

import pytest

from fedaudit import run
from fedaudit.errors import PrivacyError, SettingError
from fedaudit.privacy.policy import Policy, parse_policy, read_policies
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
