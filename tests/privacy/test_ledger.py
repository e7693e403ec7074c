"""The ledger tells what was guaranteed: per release, per kind, composed, infinite where nothing protected."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from engines import Killed, KillEngine

from fedaudit import read_record, run
from fedaudit.errors import ContractError, SettingError
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.privacy.ledger import ClientLedger, Ledger, LedgerEntry, Total, grouped_by_relation, unit_in_words
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.declarations.contract import check_declarations


def privacy(*texts):
    return dict(parse_policy(text) for text in texts)


def gauss(field="M.e", kind="embeddings", m=5.0, relation="replace-one", **more):
    return LedgerEntry(field=field, kind=kind, mechanism="gaussian", noise_multiplier=m, relation=relation, **more)


def ledger(*entries, rounds=1, delta=1e-5):
    made = ClientLedger(client=0, n=100, delta=delta)
    for t in range(1, rounds + 1):
        for entry in entries:
            made.add(entry, t)
    made.close()
    return made


def test_fifty_gaussian_releases_compose_by_the_closed_form():
    made = ledger(gauss(claim=1.0), rounds=50)
    assert made.epsilon == pytest.approx(6.57297006703, abs=1e-10)
    total = made.by_relation["replace-one"]
    assert total.accountant == "gaussian-closed-form"
    assert total.by_accountant["rdp"] == pytest.approx(7.07739, abs=1e-5)
    assert made.claim == 1.0, "the paper's own way of counting, beside it"
    assert len(made.entries) == 1
    assert made.entries[0].rounds == list(range(1, 51))


def test_two_kinds_compose_to_the_total():
    """Multipliers 5 and 4, ten rounds each: mu^2 = 10 / 25 + 10 / 16."""
    made = ledger(gauss(), gauss("M.z", "logits", 4.0), rounds=10)
    assert made.by_kind["embeddings"] == pytest.approx(gaussian_epsilon(math.sqrt(10) / 5, 1e-5))
    assert made.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(10 / 25 + 10 / 16), 1e-5))


def test_one_unprotected_release_makes_the_total_infinite():
    made = ledger(gauss(), gauss("M.w", "weights", 0.0, "any"))
    assert made.by_kind["embeddings"] < math.inf
    assert made.by_kind["weights"] == math.inf
    assert made.epsilon == math.inf


def test_relations_are_never_composed():
    made = ledger(gauss(), gauss("training", "training", 1.0, "add-or-remove", sample_rate=0.1, steps=10))
    assert made.epsilon is None
    assert set(made.by_relation) == {"replace-one", "add-or-remove"}
    assert made.by_relation["add-or-remove"].accountant == "prv"
    free = ledger(gauss(), gauss("M.n", "count", math.inf, "any"))
    assert free.epsilon == pytest.approx(gaussian_epsilon(0.2, 1e-5))


def test_infinity_survives_the_record(tiny, tmp_path):
    run(tiny("outside:Exchange", privacy=privacy("embeddings:eps=1,clip=1")), out=tmp_path / "a")
    raw = json.loads((tmp_path / "a" / "record.json").read_text())
    assert raw["ledger"][0]["epsilon"] == "Infinity"
    made = read_record(tmp_path / "a").ledger[0]
    assert made.epsilon == math.inf
    assert made.by_kind["embeddings"] == pytest.approx(
        gaussian_epsilon(math.sqrt(2) / made.entries[0].noise_multiplier, made.delta)
    )
    assert made.by_kind["weights"] == made.by_kind["labels"] == math.inf
    assert made.claim == 1.0
    assert made.entries[0].cosine is not None


def test_observers_include_who_got_a_relay(tiny, tmp_path):
    record = run(tiny("outside:Exchange"), out=tmp_path / "a")
    assert record.ledger[0].observers["embeddings"] == ["server", "client 1", "client 2"]
    assert record.ledger[0].observers["weights"] == ["server"]


def test_total_calibration_meets_its_epsilon_over_the_run(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=3, privacy=privacy("embeddings:eps=1,clip=1,total"))
    record = run(setting, out=tmp_path / "a")
    for client in record.ledger:
        assert client.by_kind["embeddings"] == pytest.approx(1.0, abs=1e-6)


def test_the_ledger_survives_a_resume(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=3, privacy=privacy("embeddings:eps=1,clip=1", "logits:eps=2,clip=1"))
    whole = run(setting, out=tmp_path / "whole")
    with pytest.raises(Killed):
        run(setting, out=tmp_path / "cut", engine=KillEngine(9))
    cut = run(setting, out=tmp_path / "cut", resume=True)
    assert cut.ledger == whole.ledger
    assert cut.transcript_digest == whole.transcript_digest, "a repeated round repeats the same noise"


def test_where_bits_are_not_promised_a_replayed_round_draws_anew(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=2, deterministic=False, privacy=privacy("embeddings:eps=1,clip=1"))
    whole = run(setting, out=tmp_path / "whole")
    with pytest.raises(Killed):
        run(setting, out=tmp_path / "cut", engine=KillEngine(7))
    with pytest.raises(Killed):
        run(setting, out=tmp_path / "cut", resume=True, engine=KillEngine(1))
    head = json.loads((tmp_path / "cut" / "checkpoint" / "HEAD.json").read_text())
    assert head["attempt"] == 1
    assert run(setting, out=tmp_path / "cut", resume=True).transcript_digest != whole.transcript_digest
    assert json.loads((tmp_path / "cut" / "checkpoint" / "HEAD.json").read_text())["attempt"] == 2


def test_an_extended_run_does_not_keep_its_old_totals(tiny, tmp_path):
    policy = privacy("embeddings:eps=1,clip=1")
    run(tiny("outside:Exchange", rounds=1, privacy=policy), out=tmp_path / "a")
    with pytest.raises(Killed):
        run(tiny("outside:Exchange", rounds=4, privacy=policy), out=tmp_path / "a", resume=True, engine=KillEngine(8))
    record = read_record(tmp_path / "a")
    assert record.status == "running"
    assert record.ledger[0].by_kind == {}
    assert record.ledger[0].epsilon is None


def test_rounds_are_fixed_where_noise_was_planned_for_them(tiny, tmp_path):
    policy = privacy("embeddings:eps=1,clip=1,total")
    run(tiny("outside:Exchange", rounds=1, privacy=policy), out=tmp_path / "a")
    with pytest.raises(SettingError, match="rounds = 1, now 2"):
        run(tiny("outside:Exchange", rounds=2, privacy=policy), out=tmp_path / "a", resume=True)


def test_a_policy_that_applied_to_nothing_is_noted(tiny, tmp_path):
    record = run(tiny("fedavg", rounds=1, privacy=privacy("embeddings:eps=1,clip=1")), out=tmp_path / "a")
    assert "the policy on embeddings applied to nothing: fedavg released none" in record.notes


def test_noise_changes_what_crosses_the_wire_and_nothing_else(tiny, tmp_path):
    """Local training reads no noise here: the weights that cross the wire are those of the run without privacy."""
    from fedaudit.wire.transcript import Transcript

    plain = run(tiny("outside:Exchange"), out=tmp_path / "a")
    noisy = run(tiny("outside:Exchange", privacy=privacy("embeddings:eps=1,clip=1")), out=tmp_path / "b")
    assert plain.bytes("up") == noisy.bytes("up")
    pairs = zip(*(Transcript(tmp_path / name / "transcript").entries() for name in "ab"), strict=True)
    for a, b in pairs:
        if a.message == "Shared":
            assert all((a["w"][name] == b["w"][name]).all() for name in a["w"])
            assert not (a["e"] == b["e"]).any()
            assert b.fields["e"].protection.sensitivity == 2.0
            assert a.fields["e"].protection is None


def test_soft_labels_of_released_means_are_free_and_of_raw_means_are_not(tiny, tmp_path):
    policy = privacy("logits:eps=1,clip=1")
    derived = run(tiny("outside:SoftLabels", privacy=policy), out=tmp_path / "a").ledger[0]
    assert derived.by_kind["soft_labels"] == 0
    assert 0 < derived.by_kind["logits"] < math.inf
    assert derived.by_kind["label_counts"] == derived.epsilon == math.inf, "which classes there are went out as it is"
    second = run(tiny("outside:RawSoftLabels", privacy=policy), out=tmp_path / "b").ledger[0]
    assert second.by_kind["soft_labels"] == second.epsilon == math.inf


@pytest.mark.parametrize("texts", [pytest.param((), marks=pytest.mark.long), ("logits:eps=1,clip=1",)])
def test_a_false_derivation_is_found(tiny, texts):
    """With other records behind the same released means, what is derived from them must not change."""
    check_declarations(tiny("outside:SoftLabels", privacy=privacy(*texts)))
    with pytest.raises(ContractError, match=r'Softened\.r is declared via="released", but it changes'):
        check_declarations(tiny("outside:FalseSoftLabels", privacy=privacy(*texts)))


# --- unequal deltas, clients and claims


def entry(kind="embeddings", m=5.0, relation="replace-one", **more):
    return LedgerEntry(field="M.e", kind=kind, mechanism="gaussian", noise_multiplier=m, relation=relation, **more)


def closed(*rounds, delta=1e-5):
    made = ClientLedger(client=0, n=100, delta=delta)
    for t, entries in enumerate(rounds, 1):
        for e in entries:
            made.add(e, t)
    made.close()
    return made


def test_every_step_of_every_round_is_charged():
    training = entry("training", 1.0, "add-or-remove", sample_rate=0.1, steps=10)
    made = closed([training], [training], [training])
    assert made.epsilon == pytest.approx(compose([Event(1.0, 0.1, 30)], 1e-5).epsilon_of_record)


def test_a_kind_under_two_relations_is_told_by_the_dearer():
    made = closed([entry(m=4.0), entry(m=2.0, relation="zero-out")])
    assert made.by_kind["embeddings"] == pytest.approx(gaussian_epsilon(1 / 2, 1e-5))
    assert made.epsilon is None


def test_of_several_claims_the_largest_is_told():
    assert closed([entry(claim=1.0), entry("logits", claim=3.0), entry("labels")]).claim == 3.0


def test_the_cosine_is_the_mean_over_releases():
    made = closed([entry(cosine=0.1)], [entry(cosine=0.2)], [entry(cosine=0.6)])
    assert made.entries[0].cosine == pytest.approx(0.3)


def test_releases_under_other_noise_are_other_entries():
    """Multipliers 5, 2 and 5: mu^2 = 2 / 25 + 1 / 4."""
    made = closed([entry(m=5.0)], [entry(m=2.0)], [entry(m=5.0)])
    assert [e.rounds for e in made.entries] == [[1, 3], [2]]
    assert made.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2 / 25 + 1 / 4), 1e-5))


def test_each_client_is_held_to_its_own_delta():
    """Ten and a thousand records: deltas 1e-1 and 1e-3, and so other epsilons for the same noise."""
    book = Ledger()
    for k, n in ((0, 10), (1, 1000)):
        book.add(k, n, 1 / n, 1, [entry()])
    rows = book.close()
    assert [row.delta for row in rows] == [0.1, 0.001]
    assert [row.epsilon for row in rows] == [pytest.approx(gaussian_epsilon(0.2, d)) for d in (0.1, 0.001)]
    assert rows[0].epsilon < rows[1].epsilon


def test_one_release_without_noise_among_noisy_ones_costs_everything():
    assert compose([Event(5.0), Event(0.0), Event(2.0)], 1e-5).epsilon_of_record == math.inf


@pytest.mark.parametrize(
    ("units", "said"),
    [
        ((), "one record"),
        (("person",), "one person"),
        (("client", "person"), "one person"),
        (("client", "record"), "one record"),
    ],
)
def test_several_protections_are_a_guarantee_for_the_smallest_unit(units, said):
    entries = [SimpleNamespace(unit=unit, noise_multiplier=1.0) for unit in units]
    bare = SimpleNamespace(unit="record", noise_multiplier=0.0)  # what has no noise protects nobody
    assert unit_in_words([SimpleNamespace(entries=[*entries, bare])]) == said


def costs(monkeypatch):
    """Let an entry's multiplier be its cost: they add up. Returns what was asked."""
    asked = []

    def compose(events, delta, compare=True):
        asked.append((len(events), delta, compare))
        spent = math.fsum(1 / e.noise_multiplier if e.noise_multiplier else math.inf for e in events)
        return SimpleNamespace(epsilon_of_record=spent, accountant="mine", by_accountant={"mine": spent}, reason="so")

    monkeypatch.setattr("fedaudit.privacy.ledger.compose", compose)
    return asked


def test_all_that_a_closed_ledger_says(monkeypatch):
    """Multipliers 1/2, 1/4 and free under replace-one: 6 in all; of the kinds 2 and 4."""
    asked = costs(monkeypatch)
    made = ClientLedger(client=3, n=100, delta=1e-4)
    entries = [gauss(m=0.5, claim=7.0), gauss("M.z", "logits", 0.25, claim=9.0), gauss("M.f", "logits", math.inf)]
    for e in entries:
        made.add(e, 5)
    made.close(compare=False)
    assert made.by_kind == {"embeddings": 2.0, "logits": 4.0}
    assert made.by_relation == {
        "replace-one": Total(epsilon=6.0, accountant="mine", by_accountant={"mine": 6.0}, reason="so")
    }
    assert (made.epsilon, made.claim) == (6.0, 9.0)
    assert asked == [(1, 1e-4, False), (2, 1e-4, False), (3, 1e-4, False)]
    asked.clear()
    made.close()
    assert [one[2] for one in asked] == [False, False, True], "only the total is compared"
    made.reopen()
    assert (made.by_kind, made.by_relation, made.epsilon, made.claim) == ({}, {}, None, 9.0)
    assert [e.rounds for e in made.entries] == [[5], [5], [5]]


@pytest.mark.parametrize(
    ("entries", "epsilon"),
    [
        ([], 0.0),
        ([gauss(m=math.inf)], 0.0),
        ([gauss(m=0.5), gauss(m=math.inf, relation="zero-out")], 2.0),
        ([gauss(m=0.5), gauss(m=0.25, relation="zero-out")], None),
        ([gauss(m=0.5), gauss(m=0.25, relation="zero-out"), gauss(m=0.0, relation="any")], math.inf),
    ],
)
def test_costs_under_several_relations_have_no_common_epsilon(monkeypatch, entries, epsilon):
    costs(monkeypatch)
    made = ClientLedger(client=0, n=100, delta=1e-4)
    for e in entries:
        made.add(e, 1)
    made.close()
    assert made.epsilon == epsilon
    assert made.claim is None


def test_dp_sgd_is_counted_with_releases_that_hold_for_zeroed_records():
    """Only where one of them costs something; what is free under zero-out does not draw it there."""
    training = LedgerEntry(field="training", kind="training", mechanism="dp-sgd", noise_multiplier=1.0,
                           relation="add-or-remove")  # fmt: skip
    zeroed, free = gauss(relation="zero-out"), gauss(m=math.inf, relation="zero-out")
    assert grouped_by_relation([training, zeroed]) == {"zero-out": [training, zeroed]}
    assert grouped_by_relation([training, free]) == {"add-or-remove": [training], "zero-out": [free]}
    assert grouped_by_relation([zeroed, training, gauss()]) == {
        "zero-out": [zeroed, training],
        "replace-one": [gauss()],
    }


def test_entries_of_the_same_release_are_one_and_keep_their_rounds():
    """Cosines are averaged where both have one. A later entry goes to the latest that is like it."""
    made = ClientLedger(client=0, n=100, delta=1e-4)
    for t, cosine in ((1, 0.5), (4, None), (4, 0.2)):
        made.add(gauss(cosine=cosine), t)
    assert [(e.rounds, e.cosine) for e in made.entries] == [([1, 4, 4], pytest.approx(0.4))]
    made.add(gauss(clip=2.0), 5)
    assert [e.rounds for e in made.entries] == [[1, 4, 4], [5]]
    assert gauss().same_as(gauss(cosine=0.3, rounds=[9]))
    assert not gauss().same_as(gauss(delta=0.1))


def test_who_saw_what():
    """The server sees each kind but training, once; another client what is passed on to it, and not its own."""
    book = Ledger()
    book.add(2, 10, 0.1, 1, [gauss(), gauss("training", "training")])
    book.add(0, 20, 0.05, 1, [gauss("M.z", "logits")])
    book.add(2, 99, 0.9, 2, [gauss()])
    book.relayed("embeddings", 0)
    book.relayed("embeddings", 0)
    book.relayed("embeddings", 2)
    rows = book.rows()
    assert [(row.client, row.n, row.delta) for row in rows] == [(0, 20, 0.05), (2, 10, 0.1)]
    assert [row.observers for row in rows] == [
        {"logits": ["server"]}, {"embeddings": ["server", "client 0"], "training": []},
    ]  # fmt: skip
    assert [[e.rounds for e in row.entries] for row in rows] == [[[1]], [[1, 2], [1]]]
    assert Ledger(rows).clients == {0: rows[0], 2: rows[1]}


def test_the_usual_values_of_an_entry_and_what_is_public():
    plain = gauss()
    assert plain.model_dump() == {
        "field": "M.e", "kind": "embeddings", "mechanism": "gaussian", "noise_multiplier": 5.0,
        "relation": "replace-one", "sample_rate": 1.0, "steps": 1, "rounds": [], "unit": "record", "to": "everybody",
        **dict.fromkeys(("sigma", "sensitivity", "clip", "condition", "delta", "claim", "grid", "moves", "keep",
                         "cosine")),
    }  # fmt: skip
    told = gauss(sigma=2.0, clip=3.0, cosine=0.5).public().model_dump(exclude_none=True)
    assert (told["mechanism"], told["sigma"], told["clip"], "cosine" in told) == ("gaussian", 2.0, 3.0, False)
    open_ = LedgerEntry.unprotected("M.e", "logits", "why")
    assert open_ == LedgerEntry(field="M.e", kind="logits", mechanism="none", noise_multiplier=0.0, relation="any",
                                condition="why")  # fmt: skip
    free = LedgerEntry.free("M.e", "logits", "why")
    assert free == open_.model_copy(update={"noise_multiplier": math.inf})
    assert LedgerEntry.free("M.e", "logits", "why", "pure-noise").mechanism == "pure-noise"


@pytest.mark.parametrize(("noise", "said"), [(0.0, "one record"), (math.inf, "one record"), (1.0, "one whole client")])
def test_what_is_free_or_open_is_no_guarantee_for_anybody(noise, said):
    rows = [SimpleNamespace(entries=[]), SimpleNamespace(entries=[gauss(m=noise, unit="client")])]
    assert unit_in_words(rows) == said
