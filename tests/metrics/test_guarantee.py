"""What a guarantee is about, in words, over runs that differ in everything."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from fedaudit.errors import SettingError
from fedaudit.metrics import guarantee
from fedaudit.metrics.metric import Metric


def entry(kind="logits", noise=1.0, unit="record", to="everybody"):
    return SimpleNamespace(kind=kind, noise_multiplier=noise, unit=unit, to=to)


def client(epsilon=1.0, delta=1e-3, n=10, entries=None):
    entries = [entry()] if entries is None else entries
    return SimpleNamespace(epsilon=epsilon, delta=delta, n=n, entries=entries)


def record(*clients, status="done", covered=True, privacy=None):
    setting = SimpleNamespace(method="fedavg", privacy=privacy or {})
    return SimpleNamespace(ledger=list(clients), status=status, models_covered=covered, setting=setting)


def test_the_worst_off_client_of_the_worst_run():
    assert guarantee.ledger_epsilon(record(client(1.0), client(3.0), client(9.0, entries=[]))) == 3.0
    assert guarantee.ledger_epsilon(record(client(1.0), client(None))) is None
    assert guarantee.ledger_epsilon(record(client(9.0, entries=[]))) == 0.0
    runs = [record(client(1.0)), record(client(4.0)), record(client(9.0), status="failed")]
    assert guarantee.messages_epsilon(runs) == 4.0
    assert guarantee.messages_epsilon([*runs, record(client(None))]) is None
    assert guarantee.messages_epsilon([record(client(9.0), status="failed")]) is None
    assert guarantee.epsilon(record(client(2.0), covered=False)) == math.inf
    assert guarantee.epsilon(record(client(2.0), status="failed")) is None


def test_deltas_of_those_who_release_something():
    runs = [record(client(delta=1e-3), client(delta=1e-1, entries=[])), record(client(delta=1e-2))]
    assert guarantee.largest_delta(runs) == 1e-2
    assert guarantee.largest_delta([record()]) == 0.0
    assert guarantee.weak_delta([record(client(delta=0.1, n=10))]), "1 / n itself is no privacy"
    assert not guarantee.weak_delta([record(client(delta=0.09, n=10), client(delta=0.5, n=10, entries=[]))])
    assert guarantee.weak_delta([record(client(delta=0.01, n=10), client(delta=0.01, n=200))])


def test_what_a_guarantee_covers_in_words():
    """Two runs with unequal deltas; an unfinished one counts for nothing."""
    runs = [record(client(delta=1e-3), client(delta=5e-2)), record(client(delta=1e-2))]
    assert guarantee._covers(runs) == "δ ≤ 0.05"
    assert guarantee._covers([*runs, record(client(delta=0.9), status="failed")]) == "δ ≤ 0.05"
    bare = client(entries=[entry("soft_labels", 0.0), entry("count", 0.0), entry("logits", 1.0)])
    assert guarantee._covers([runs[0], record(bare)]) == "count, soft labels sent unprotected"
    assert guarantee._covers([record(client(), covered=False)]) == guarantee.OPEN_MODELS
    assert guarantee._covers([record(client(epsilon=0.0))]) == guarantee.NOTHING_SENT
    clients = client(entries=[entry(), entry(unit="client", to="the server"), entry(unit="client", to="peers")])
    assert guarantee._covers([record(clients)]) == "δ ≤ 0.001; for whole clients, against the server"
    endless = client(math.inf, entries=[entry(unit="client", to="the server")])
    assert guarantee._covers([record(endless)]) == "δ ≤ 0.001"


def test_remarks_beside_a_guarantee():
    assert guarantee._remark([record(client(0.0))]).startswith("covers the messages alone")
    assert guarantee._remark([record(client(2.0, delta=0.2, n=10))]).startswith("δ ≥ 1/n")
    assert guarantee._remark([record(client(2.0))]) == ""
    assert guarantee._remark([record(client(math.inf, delta=0.2))]) == ""
    assert guarantee._remark([record(client(2.0), covered=False)]).startswith("the messages alone: ")


def test_claims_that_applied_to_nothing():
    asked = {"logits": {"epsilon": 2}, "prototypes": {"epsilon": 3.5}, "training": {"noise_multiplier": 1.0}}
    one = record(client(entries=[entry("logits")]), privacy=asked)
    assert guarantee.claimed(one) == {"logits": 2.0, "prototypes": 3.5}
    assert guarantee.idle_kinds([one]) == {"prototypes", "training"}
    assert guarantee._idle_claim([one]) == ""
    idle = record(client(entries=[entry("weights")]), privacy=asked)
    assert guarantee._idle_claim([idle]).startswith("applied to nothing")
    exactly = record(client(entries=[entry("weights")]), privacy={"logits": {"epsilon": 2}})
    assert guarantee._idle_claim([exactly]) == "applied to nothing that this method sends"
    assert (guarantee._no_claim([one]), guarantee._no_claim([record()])) == ("", "none made")
    assert guarantee._no_claim([record(privacy={"training": {"noise_multiplier": 1.0}})]) == "not asked for"
    updates = record(client(entries=[entry("weights", unit="client")]), privacy={"updates": {"epsilon": 1}})
    assert guarantee.idle_kinds([updates]) == set()


def made(value=lambda record: record, **more):
    return Metric("m", "M", "Cost", more.pop("unit", "count"), "low", False, "Help.", value, **more)


def test_one_run_with_a_figure_is_a_figure():
    assert made().why_missing([None, 3.0]) == ""
    assert made().why_missing([3.0, 4.0]) == ""
    assert made().why_missing([None, None]) == "not measured"
    assert made(missing=lambda records: "why").why_missing([3.0]) == "why"


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [
        ("count", None, "–"), ("count", math.nan, "not a number"), ("epsilon", math.inf, "∞"),
        ("share", 0.1234, "12.3 %"), ("auc", 0.12345, "0.123"), ("auc", 0.5, "0.500"), ("seconds", 999.94, "999.9 s"),
        ("seconds", 1234.5, "1,234 s"),
        ("seconds", 1000.0, "1,000 s"), ("epsilon", 1.2345, "1.23"),
    ],
)  # fmt: skip
def test_values_as_text(unit, value, text):
    assert made(unit=unit).text(value) == text


def test_a_budget_is_held_against_a_figure():
    run = SimpleNamespace(setting=SimpleNamespace(method="fedavg"))
    assert made(lambda record: 3).limited(run) == 3.0
    with pytest.raises(SettingError, match="has no m: not measured"):
        made(lambda record: None).limited(run)
    with pytest.raises(SettingError, match="because"):
        made(lambda record: 3, refusal=lambda record: "because").limited(run)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (None, guarantee.NOT_COMPOSED),
        (0.0, guarantee.NOTHING_SENT),
        (2.5, "ε = 2.5, δ = 1e-05"),
        (math.inf, "ε = inf, δ = 1e-05"),
    ],
)
def test_what_the_messages_alone_have_in_words(messages, text, monkeypatch):
    monkeypatch.setattr(guarantee, "messages_epsilon", lambda records: messages)
    monkeypatch.setattr(guarantee, "largest_delta", lambda records: 1e-5)
    assert guarantee.messages_text([]) == text


def test_a_finished_run_that_cannot_be_composed_takes_no_budget():
    apart = record(client(None))
    assert guarantee._not_composed(apart).startswith("The run of fedavg released under different")
    assert guarantee._not_composed(record(client(None), status="running")) == ""
    assert guarantee._not_composed(record(client(2.0))) == ""


def test_the_worst_of_several_runs_is_what_they_guarantee():
    """One run sends nothing, the other has an epsilon and a delta that is too large."""
    runs = [record(client(0.0)), record(client(2.0, delta=0.2, n=10))]
    assert guarantee._covers(runs) == "δ ≤ 0.2"
    assert guarantee._remark(runs).startswith("δ ≥ 1/n")


def test_claims_are_refuted_each_by_audits_of_its_sort(monkeypatch):
    def audit(epsilon, of_noise):
        return SimpleNamespace(claim_epsilon=epsilon, claim="logits", of_noise=of_noise)

    found = [audit(1.0, False), audit(2.5, True), audit(1.0, False), audit(4.0, False)]
    monkeypatch.setattr(guarantee, "refuted_claims", lambda records: found)
    assert guarantee.SHOWN.refuted([]) == "refuted: ε = 1 for logits; ε = 4 for logits"
    assert guarantee.FOUND.refuted([]) == "refuted: ε = 2.5 for logits"
    found.pop(1)
    assert guarantee.FOUND.refuted([]) == ""
