"""Gates on records: what an honest record and a bad one are told, and in which words."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from fedaudit import run
from fedaudit.errors import SettingError
from fedaudit.gates import record_gates
from fedaudit.gates.record_gates import accuracy, attacked, claims, communication, finished, leak, privacy
from fedaudit.metrics.guarantee import REFUTED
from fedaudit.privacy.accounting import compose
from fedaudit.runtime.attack_result import MembershipResult, NotRun
from fedaudit.runtime.run_record import Declarations, EpsilonAudit, read_record

DP = {"training": {"epsilon": 8.0, "sensitivity": "clip:1", "delta": 1e-3}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """FedAvg on digits with a small network: one run without protection, one with DP-SGD."""
    top = tmp_path_factory.mktemp("gates")
    common = {"method": "fedavg", "rounds": 1, "clients": 2, "model": "mlp", "partition": "iid", "eval_clients": False}
    run(**common, set={"E": 3, "B": 32, "eta": 0.2}, out=top / "plain")
    run(**common, set={"E": 1, "B": 64, "eta": 0.5}, privacy=DP, out=top / "dp")
    return top


@pytest.fixture
def plain(folders):
    return read_record(folders / "plain")


@pytest.fixture
def dp(folders):
    return read_record(folders / "dp")


def scored(value, low, high, attack="lira", **more):
    """A membership result of 100 candidates with this AUC."""
    none = {"value": None, "reason": "made up"}
    pooled = {
        "members": 50, "nonmembers": 50, "confidence": 0.95, "auc": {"value": value, "low": low, "high": high},
        "balanced_accuracy": none, "advantage": none, "advantage_best": none,
        "tpr_at_fpr": [{"fpr": 0.01, "value": value - 0.5, "low": low - 0.5, "high": high - 0.5}],
    }  # fmt: skip
    return MembershipResult.model_validate(
        {"attack": attack, "threat": "server", "ran": True, "claims": "membership", "pooled": pooled, **more}
    )


def audit(**changes):
    values = {
        "test": "release-path", "kind": "weights", "threat": "server", "claim": "all weights of a client",
        "claim_epsilon": 1.0, "ledger_epsilon": 1.0, "lower_bound": 3.25, "p_value": 1e-9, "trials": 1000,
        "confidence": 0.95, "delta": 1e-5, "verdict": "refuted", "method": "box", "how": "",
    }  # fmt: skip
    return EpsilonAudit(**{**values, **changes})


def test_communication_is_told_as_a_budget_is(plain, tmp_path):
    """The network has 64 x 128 + 128 + 128 x 10 + 10 = 9,610 numbers: 38,440 bytes, and 8 for the count."""
    up, down = communication(plain, tmp_path, uplink="38448 B", downlink="38439 B")
    assert (up.told, down.told) == ("kept", "broken")
    assert "down traffic is 38.44 kB" in down.message
    assert "the largest field is down Global.w" in down.message
    with pytest.raises(SettingError, match="give uplink= or downlink="):
        communication(plain, tmp_path)


def test_an_accuracy_below_its_floor_is_said_with_its_interval(plain):
    reached = plain.result.last.test_score()
    assert accuracy(plain, 0.1).told == "kept"
    found = accuracy(plain, 0.999)
    assert found.told == "broken"
    assert f"accuracy is {reached:.4g}, the budget 0.999" in found.message
    assert "% under)" in found.message
    assert f"[{plain.result.last.global_.test.low:.3f}, " in found.message


# --- privacy -----------------------------------------------------------------------------------------------------


def test_epsilon_is_composed_again_at_the_delta_of_the_budget(dp):
    """A smaller delta has a larger epsilon; the accountant that the ledger uses says which."""
    worst = 0.0
    for row in dp.ledger:
        worst = max(worst, compose([entry.events() for entry in row.entries], 1e-6).epsilon_of_record)
    assert worst > 8.5
    assert privacy(dp, epsilon=8.0).told == "kept"
    assert privacy(dp, epsilon=worst * 1.0001, delta=1e-6).told == "kept"
    found = privacy(dp, epsilon=8.0, delta=1e-6)
    assert found.told == "broken"
    assert f"epsilon is {worst:.4g} at delta = 1e-06, the budget 8 ({worst / 8 - 1:.1%} over)" in found.message
    assert "which spent most, training cost most" in found.message
    assert dp.ledger[0].delta == 1e-3, "the record itself is not changed"


def test_what_is_not_protected_is_named(plain):
    found = privacy(plain, epsilon=8.0, delta=1e-5)
    assert found.told == "broken"
    assert "epsilon is inf at delta = 1e-05, the budget 8; client 0 releases " in found.message
    assert "weights without protection" in found.message


def test_published_models_without_noise_are_said(dp):
    bare = dp.model_copy(
        update={"published": ["client-000000.safetensors"], "setting": dp.setting.model_copy(update={"privacy": {}})}
    )
    found = privacy(bare, epsilon=100.0)
    assert found.told == "broken"
    assert "the clients' models are published, and no noise covers them" in found.message


@pytest.mark.parametrize("limits", [{"epsilon": math.inf}, {"epsilon": -1.0}, {"epsilon": 8.0, "delta": 0.0}])
def test_a_budget_that_limits_nothing_is_refused(dp, limits):
    with pytest.raises(SettingError, match="privacy_budget"):
        privacy(dp, **limits)


# --- leaks -------------------------------------------------------------------------------------------------------


def test_a_leak_is_judged_by_its_interval(plain):
    plain.attacks = [scored(0.7, 0.65, 0.75)]
    (above,) = leak(plain, attack="lira", auc=0.6)
    assert above.told == "broken"
    assert "lira by server reaches AUC 0.700 [0.650, 0.750] on 100 candidates, the budget 0.6" in above.message
    assert "above it by at least 0.050" in above.message
    (below,) = leak(plain, attack="lira", auc=0.75)
    assert below.told == "kept"


def test_a_leak_that_cannot_be_told_says_how_many_candidates_would(plain):
    """0.62 against 0.6: half of the interval is 0.04, the distance 0.02, so four times the 100 candidates."""
    plain.attacks = [scored(0.62, 0.58, 0.66)]
    (found,) = leak(plain, attack="lira", auc=0.6)
    assert found.told == "cannot be told"
    assert "about 401 candidates would tell" in found.message or "about 400 candidates would tell" in found.message


def test_the_tpr_is_at_1_percent(plain):
    plain.attacks = [scored(0.7, 0.65, 0.75, split_broken=True)]
    auc, tpr = leak(plain, attack="lira", auc=0.8, tpr=0.1)
    assert (auc.told, tpr.told) == ("kept", "broken")
    assert "a TPR at 1 % FPR of 0.200 [0.150, 0.250]" in tpr.message
    assert "the audit split is broken" in tpr.message


def test_an_attack_that_is_not_there_is_an_error_with_a_remedy(plain):
    plain.attacks = [scored(0.7, 0.65, 0.75, attack="loss"), NotRun(attack="rmia", threat="server", reason="no model")]
    with pytest.raises(SettingError, match=r"no attack lira by server .it has: loss by server, rmia by server"):
        attacked(plain, "lira", "server")
    with pytest.raises(SettingError, match="rmia did not run on fedavg: no model"):
        attacked(plain, "rmia", "server")
    with pytest.raises(SettingError, match="give auc= or tpr="):
        leak(plain, attack="loss")
    with pytest.raises(SettingError, match="auc = 60 is not a ceiling"):
        leak(plain, attack="loss", auc=60)


# --- claims ------------------------------------------------------------------------------------------------------


def test_a_refuted_claim_is_said_with_its_evidence(dp):
    dp.audits = [audit()]
    found = claims(dp)
    assert found.told == "broken"
    assert "the claim of epsilon = 1 for all weights of a client is refuted by release-path: at least 3.25" in (
        found.message
    )
    assert "95% confidence in 1000 trials" in found.message


def test_claims_are_judged_together(dp):
    """A p-value of 0.0008 refutes alone, below 0.001; among ten tests (Holm) it is 0.008, which is suspicious."""
    alone = audit(p_value=8e-4)
    honest = audit(p_value=1.0, verdict="not refuted", lower_bound=0.0, test="residuals")
    dp.audits = [alone]
    assert claims(dp).told == "broken"
    dp.audits = [alone, *(honest.model_copy(update={"claim": str(i)}) for i in range(9))]
    found = claims(dp)
    assert found.told == "cannot be told"
    assert "'suspicious'" in found.message
    dp.audits = [honest]
    assert claims(dp).told == "kept"


def test_a_refutation_without_a_bound_is_said_by_its_reason(dp):
    dp.audits = [audit(lower_bound=0.0, how="what was sent holds other noise")]
    assert claims(dp).message.endswith("is refuted by release-path: what was sent holds other noise (p = 1e-09).")


def test_a_claim_that_could_not_be_tried_cannot_be_told_and_counts_as_no_refuted_one(dp):
    gone = {"p_value": 1.0, "lower_bound": 0.0, "trials": 0, "verdict": "not tried", "how": "it is gone.", "seeks": 0.9}
    dp.audits = [audit(**gone)]
    found = claims(dp)
    assert found.told == "cannot be told"
    why = "release-path could not try the claim for all weights of a client: it is gone"
    assert found.message == f"fedavg: the verdict on its claims is 'cannot tell': {why}."
    with pytest.raises(SettingError) as refused:
        REFUTED.limited(dp)
    assert str(refused.value) == (
        "The claim for all weights of a client in the run of fedavg is untested, so it cannot count as not refuted: "
        "release-path could not try it: it is gone. Remove that cause and repeat the test, or try the claim with "
        "another one (fedaudit epsilon --help)."
    )
    dp.audits = [audit(**gone), audit(kind="logits", claim="another")]
    assert REFUTED.limited(dp) == 1, "what is refuted comes first"
    assert claims(dp).told == "broken"
    dp.audits = [audit(**gone, ledger_epsilon=0.0)]
    assert REFUTED.limited(dp) == 0, "nothing was released, so nothing is claimed"
    dp.audits = [audit(**gone), audit(test="residuals", verdict="not refuted", p_value=0.5, tells_at=1.0)]
    assert REFUTED.limited(dp) == 0, "another test tried it"
    assert "the tests would miss a real violation" in claims(dp).message


def test_a_broken_declaration_fails_and_no_test_is_an_error(dp):
    with pytest.raises(SettingError, match="No claim of the run of fedavg was tested"):
        claims(dp)
    dp.audits = [audit(p_value=1.0, verdict="not refuted")]
    dp.declarations = Declarations(source="a", tested="broken")
    found = claims(dp)
    assert found.told == "broken"
    assert "fedaudit check-method fedavg" in found.message


def test_a_record_may_be_a_folder_and_has_to_be_finished(folders, plain):
    assert finished(folders / "plain").setting == plain.setting
    assert finished(folders / "plain" / "record.json").setting == plain.setting
    with pytest.raises(SettingError, match="The run of fedavg is running, and no gate can judge it"):
        finished(plain.model_copy(update={"status": "running"}))


# --- made-up records -------------------------------------------------------------------------------------------------


def client(k, epsilon, by_kind):
    made = SimpleNamespace(client=k, epsilon=epsilon, by_kind=by_kind, delta=1e-3, closed=[])
    made.model_copy = lambda deep, update: client(k, epsilon, by_kind) if deep and not update else None
    return made


@pytest.mark.parametrize(
    ("spent", "epsilon", "covered", "ledger", "told", "end"),
    [
        (2.0, 2.0, True, [], "kept", "epsilon is 2 at each client's own delta, the budget 2."),
        (3.0, 2.0, True, [], "broken", "the budget 2 (50.0% over)."),
        (3.0, 0.0, True, [], "broken", "the budget 0."),
        (math.inf, 2.0, False, [], "broken", "2; the clients' models are published, and no noise covers them."),
        (
            3.0, 2.0, True, [client(4, 1.0, {"labels": 1.0}), client(7, 3.0, {"logits": 1.0, "labels": 2.5}),
                             client(9, 2.0, {"logits": 2.0})],
            "broken", "(50.0% over); of client 7, which spent most, labels cost most: 2.5.",
        ),
        (
            math.inf, 2.0, True,
            [client(4, 1.0, {"labels": 1.0}), client(7, None, {"weights": math.inf, "count": 1.0, "labels": math.inf})],
            "broken", "the budget 2; client 7 releases labels, weights without protection.",
        ),
        (3.0, 2.0, True, [client(4, 3.0, {})], "broken", "the budget 2 (50.0% over)."),
    ],
)  # fmt: skip
def test_a_budget_of_epsilon_names_who_spent_most_on_what(spent, epsilon, covered, ledger, told, end, monkeypatch):
    monkeypatch.setattr(record_gates, "EPSILON", SimpleNamespace(limited=lambda record: spent))
    made = SimpleNamespace(ledger=ledger, models_covered=covered, setting=SimpleNamespace(method="fedavg"))
    made.model_copy = lambda update: made
    found = privacy(made, epsilon=epsilon)
    assert (found.gate, found.told) == ("privacy_budget", told)
    assert found.message.startswith("fedavg: epsilon is ")
    assert found.message.endswith(end)


def test_the_last_result_of_an_attack_by_that_threat_counts():
    rows = [scored(0.6, 0.5, 0.7), scored(0.8, 0.7, 0.9), scored(0.9, 0.8, 0.95, attack="rmia"),
            scored(0.55, 0.5, 0.6, threat="published")]  # fmt: skip
    made = SimpleNamespace(attacks=rows, setting=SimpleNamespace(method="fedavg"))
    assert attacked(made, "lira", "server") is rows[1]
    assert attacked(made, "lira", "published") is rows[3]


@pytest.mark.parametrize("there", ["last", "global", "test"])
def test_an_accuracy_has_its_interval_where_there_is_one(there, monkeypatch):
    outcome = SimpleNamespace(kept=False, message=lambda: "It is too low.")
    monkeypatch.setattr(record_gates, "check_budget", lambda budget, record, name: outcome)
    test = SimpleNamespace(low=0.25, high=0.5, n=40)
    last = (
        None if there == "last" else SimpleNamespace(global_=None if there == "global" else SimpleNamespace(test=test))
    )
    made = SimpleNamespace(result=SimpleNamespace(last=last), setting=SimpleNamespace(method="fedavg"))
    found = accuracy(made, 0.9)
    more = " The 95 % interval of the last round is [0.250, 0.500], on 40 records." if there == "test" else ""
    assert (found.gate, found.told, found.message) == ("accuracy_floor", "broken", "It is too low." + more)
