"""Every claim of differential privacy stands beside the ledger, with what is wrong with it on its face."""

from __future__ import annotations

import math

import flower_apps
import pytest
from flwr.client import mod as older_mods
from flwr.clientapp import mod as newer_mods
from flwr.server import strategy as older
from flwr.serverapp import strategy as newer

from fedaudit.flower import App, audit_mods, run_app
from fedaudit.flower.claims import (
    TRIED_AS,
    CentralClaim,
    LocalClaim,
    Reported,
    _free,
    local_claims,
    reported,
    reported_audit,
    strategy_claim,
)
from fedaudit.privacy.calibration import gaussian_epsilon


def wrappers():
    """All DP wrappers of Flower, of both APIs: fixed and adaptive, clipping on the server and on clients."""
    for api in (older, newer):
        inner = api.FedAvg()
        for side in ("Server", "Client"):
            fixed = getattr(api, f"DifferentialPrivacy{side}SideFixedClipping")
            adaptive = getattr(api, f"DifferentialPrivacy{side}SideAdaptiveClipping")
            yield fixed(inner, 0.7, 0.5, 10), 0.7, 0.5
            # sigma_b = 5 counts against z = 1: (1 - 1 / (2 * 5)^2)^(-1/2)
            yield adaptive(inner, 1.0, 10, initial_clipping_norm=0.3, clipped_count_stddev=5.0), 1.005038, 0.3
    yield older.DPFedAvgFixed(older.FedAvg(), 10, 0.5, 0.7, server_side_noising=True), 0.7, 0.5
    yield older.DPFedAvgFixed(older.FedAvg(), 10, 0.5, 0.7, server_side_noising=False), 0.7, 0.5


@pytest.mark.parametrize(("strategy", "noise", "clip"), list(wrappers()))
def test_every_wrapper_becomes_a_claim(strategy, noise, clip):
    claim = strategy_claim(strategy)
    assert claim.noise_multiplier == pytest.approx(noise, rel=1e-5)
    assert (claim.clip, claim.sampled) == (clip, 10)
    said = claim.audit(rounds=4, ledger=math.inf)
    assert said.claim_epsilon == pytest.approx(gaussian_epsilon(2 / claim.noise_multiplier, 1e-5))
    assert (said.verdict, said.ledger_epsilon) == ("not tried", math.inf)
    protected = "there is no protection against the server" in claim.text
    assert protected != (getattr(strategy, "server_side_noising", True) is False)


def test_noise_for_more_nodes_than_took_part_is_told():
    """Noise of z C / m on the mean of n < m nodes is that of a multiplier z n / m."""
    claim = strategy_claim(newer.DifferentialPrivacyServerSideFixedClipping(newer.FedAvg(), 0.8, 1.0, 20))
    assert "the noise multiplier is 0.2, not 0.8" in claim.remark(5)
    assert claim.remark(20) is None
    assert strategy_claim(newer.FedAvg()) is None


@pytest.mark.parametrize("mods", [older_mods, newer_mods])
def test_the_local_mod_is_known_in_both_places(mods):
    (claim,) = local_claims(flower_apps.newer_client([mods.LocalDpMod(1.0, 2.0, 4.0, 1e-5)]))
    assert (claim.epsilon, claim.clip, claim.sensitivity) == (4.0, 1.0, 2.0)


def test_an_older_local_mod_is_tried(tmp_path):
    """The honest mod around an older client: not refuted, by uploads through the mod itself."""
    client, server = flower_apps.local_dp()
    record = run_app(App("local_dp", client, server), out=tmp_path / "run", nodes=2)
    (untried,) = record.audits
    assert (untried.verdict, untried.claim_epsilon, untried.claim) == ("not tried", 4.0, "LocalDpMod, one upload")
    found = audit_mods(tmp_path / "run", client, trials=60)
    assert all(row.trials and row.verdict != "refuted" for row in found)


def test_an_epsilon_in_metrics_becomes_a_claim(tmp_path):
    """1.5, 1.6 and 1.7 in each of two rounds: the largest is 1.7, and a run of two rounds has 3.4 by composition."""
    client, server = flower_apps.opacus()
    record = run_app(App("opacus", client, server), out=tmp_path / "run", nodes=3)
    (said,) = record.audits
    assert (said.claim_epsilon, said.delta, said.ledger_epsilon) == (pytest.approx(1.7), 1e-5, math.inf)
    assert any("node 2 reports" in note and "the run has 3.4, at delta 2e-05" in note for note in record.notes)


def test_an_epsilon_that_grows_is_that_of_the_run():
    grows = [Reported(0, 1.0, 1e-5), Reported(0, 1.4, 1e-5), Reported(1, 0.9, 1e-5)]
    said, remark = reported_audit(grows, math.inf)
    assert said.claim_epsilon == 1.4
    assert remark is None
    assert reported(0, [{"loss": 0.3}, {"epsilon": 2.0, "target_delta": 1e-6}]) == Reported(0, 2.0, 1e-6)
    assert reported(0, [{"epsilon": "none"}, {"eps": True}]) is None


@pytest.mark.parametrize(("sensitivity", "weaker"), [(1.0, True), (3.9, True), (4.0, False), (5.0, False)])
def test_a_sensitivity_below_twice_the_clip_is_told(sensitivity, weaker):
    """Two updates of norm 2 may lie 4 apart."""
    claim = LocalClaim("mod", 1.0, 1e-5, 2.0, sensitivity)
    assert claim.sigma == pytest.approx(sensitivity * math.sqrt(2 * math.log(1.25e5)))
    assert ("may lie 4 apart, more than this sensitivity" in claim.text) is weaker
    assert f"clipping norm 2, sensitivity {sensitivity:g}" in claim.text


def test_what_a_function_holds_by_name():
    inside = 3

    def holds():
        return inside

    assert _free(holds) == {"inside": 3}
    assert _free(len) == {}, "a builtin has no code"
    assert _free(lambda: 1) == {}, "nothing is held"


def test_what_nodes_report_in_words():
    """Node 3 begins anew in each of three rounds, node 1 in two; node 2 grows. The run of node 3 is the longest."""
    found = [Reported(3, 2.0, None), Reported(1, 1.5, 1e-3), Reported(2, 1.0, 1e-6), Reported(3, 1.0, None),
             Reported(1, 1.5, 1e-3), Reported(2, 9.0, None), Reported(3, 2.0, None)]  # fmt: skip
    said, remark = reported_audit(found, 7.0)
    assert remark == (
        "node 3 reports an epsilon of at most 2 in each of 3 rounds, and it does not grow: it is that of one round. "
        "By basic composition the run has 5, at delta 0.003"
    )
    assert (said.claim_epsilon, said.delta, said.ledger_epsilon, said.threat) == (9.0, 1e-3, 7.0, "server")
    assert (said.claim, said.test, said.kind) == ("reported by the app's metrics", "claim", "weights")
    assert (said.lower_bound, said.p_value, said.trials, said.confidence, said.method) == (0.0, 1.0, 0, 0.95, "")
    assert reported_audit([Reported(0, 1.0, None)], None)[0].delta == 1e-5
    assert reported_audit([Reported(0, 1.0, None)], None)[1] is None, "one round may be the whole run"


@pytest.mark.parametrize(
    ("tables", "wanted"),
    [
        ([{"eps": 3}, {"epsilon": 1.0}], (3.0, None)),
        ([{"epsilon_spent": 0.0, "delta": 1e-4}], (0.0, 1e-4)),
        ([{"privacy_epsilon": 2.0, "target-delta": 1e-7, "privacy_delta": 1e-3}], (2.0, 1e-7)),
        ([{"eps": -1.0}, {"eps": 5.0, "delta": 1}], (5.0, None)),
        ([{"epsilon": 1.0, "eps": 2.0, "target_delta": 1e-9, "delta": 1e-4}], (1.0, 1e-9)),
        ([{"epsilon": 1.0, "target_delta": math.nan, "delta": -0.5, "privacy_delta": 1e-4}], (1.0, 1e-4)),
        ([{"epsilon": math.nan}, {"epsilon": 1.0, "delta": 1.5}], (1.0, None)),
        ([{"epsilon": True}], None),
        ([], None),
    ],
)
def test_which_entry_of_the_metrics_is_an_epsilon(tables, wanted):
    assert reported(4, tables) == (None if wanted is None else Reported(4, *wanted))


def test_a_central_claim_in_words_and_figures():
    claim = CentralClaim("W", 0.5, 1.5, 8)
    assert claim.text.startswith("claim of W: noise multiplier 0.5, clipping norm 1.5, for the models that the server")
    assert CentralClaim("W", 0.5, None, 8, True).text.startswith(
        "claim of W: noise multiplier 0.5, for the sum of all updates; each node adds a part"
    )
    assert claim.remark(7) == "W scales its noise for 8 nodes, and 7 took part: the noise multiplier is 0.438, not 0.5"
    assert [claim.remark(nodes) for nodes in (0, 8, 9)] == [None] * 3
    assert CentralClaim("W", 0.5, 1.5, None).remark(1) is None
    said = claim.audit(9, 3.0)
    assert (said.claim, said.threat, said.delta, said.ledger_epsilon) == (
        "W, 9 rounds",
        "outsider and peers",
        1e-5,
        3.0,
    )
    assert said.claim_epsilon == pytest.approx(gaussian_epsilon(6.0, 1e-5))
    assert CentralClaim("W", 0.0, None, None).audit(1, None).claim_epsilon == math.inf


@pytest.mark.parametrize(
    ("has", "wanted"),
    [
        ({}, None),
        ({"noise_multiplier": "much"}, None),
        ({"noise_multiplier": 1}, (1.0, None, None, False)),
        ({"noise_multiplier": 0.5, "clip_norm": 2, "num_sampled_clients": 4}, (0.5, 2.0, 4, False)),
        ({"noise_multiplier": 0.5, "clipping_norm": 3.0, "clip_norm": 2.0}, (0.5, 3.0, None, False)),
        ({"noise_multiplier": 0.5, "clip_norm": "x", "num_sampled_clients": 4.5, "server_side_noising": False},
         (0.5, None, None, True)),
        ({"noise_multiplier": 0.5, "server_side_noising": True}, (0.5, None, None, False)),
    ],
)  # fmt: skip
def test_what_a_strategy_claims_by_its_attributes(has, wanted):
    strategy = type("Mine", (), has)()
    assert strategy_claim(strategy) == (None if wanted is None else CentralClaim("Mine", *wanted))


def test_a_local_claim_that_nobody_tried():
    said = LocalClaim("M", 4.0, 1e-6, 0.5, 1.0).audit(8.0)
    assert (said.claim, said.claim_epsilon, said.delta, said.ledger_epsilon) == ("M, one upload", 4.0, 1e-6, 8.0)
    assert (said.test, said.threat, said.verdict) == (TRIED_AS, "whoever sees the upload: server", "not tried")
