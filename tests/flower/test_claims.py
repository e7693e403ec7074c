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
from fedaudit.flower.claims import LocalClaim, Reported, _free, local_claims, reported, reported_audit, strategy_claim
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
