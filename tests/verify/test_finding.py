"""Single checks of a folder, each on facts that somebody made up."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fedaudit import Down, State
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.verify import accuracy, case, epsilon_audits, ledger, noise_key, rerun, server_rounds, traffic, twins
from fedaudit.verify.case import MOST, Case
from fedaudit.verify.finding import Checked, Findings, differences
from fedaudit.verify.rerun import _Outcome
from fedaudit.wire.codec import encode, read_header


def made(**facts):
    return SimpleNamespace(found=Findings(), **facts)


def told(found):
    return [(one.verdict, one.figure) for one in found.list]


# --- comparing -------------------------------------------------------------------------------------------------------


def test_numbers_are_compared_to_the_last_digit_unless_it_is_said():
    found = Findings()
    assert found.compare("f", "file", "field", 1.0, 1.0)
    assert not found.compare("f", "file", "field", 1.0, 1.0 + 1e-12)
    assert found.compare("f", "file", "field", 1000.0, 1000.5, close=1e-3), "relative to the larger one"
    assert not found.compare("f", "file", "field", 1000.0, 1002.0, close=1e-3)
    assert found.compare("f", "file", "field", 0.0, 0.0009, close=1e-3), "but of small ones as they are"
    assert not found.compare("f", "file", "field", 0.5, -0.4, close=0.5)
    assert found.compare("f", "file", "field", math.nan, math.nan)
    assert not found.compare("f", "file", "field", math.inf, 1e300, close=1.0)
    assert not found.compare("f", "file", "field", "1", 1)


def test_a_difference_with_an_excuse_is_the_authors_word():
    found = Findings()
    assert not found.compare("f", "file", "field", {"a": 1, "b": 2}, {"a": 1, "b": 3}, excuse="other code")
    (one,) = found.list
    assert one.verdict == "the author's word"
    assert one.reason.startswith("other code; field.b is 2")
    assert not found.compare("f", "file", "field", {"a": 1, "b": 2}, {"a": 0, "b": 3}, reason="why")
    assert [(x.verdict, x.field, x.recorded, x.recomputed, x.reason) for x in found.list[1:]] == [
        ("contradicted", "field.a", 1, 0, "why"),
        ("contradicted", "field.b", 2, 3, "why"),
    ]
    assert found.compare("f", "file", "field", [1], [1], excuse="other code")
    assert found.list[-1].verdict == "recomputed"


def test_five_differences_are_told():
    found = Findings()
    found.compare("f", "file", "field", list(range(9)), list(range(1, 10)))
    assert [one.field for one in found.list] == [f"field.{i}" for i in range(5)]
    assert list(differences([1, 2], [1])) == [("", "2 entries", "1 entries")]
    assert [path for path, *_ in differences({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3, "c": 0}]})] == ["a.1.b", "a.1.c"]


def test_a_difference_of_exactly_what_is_allowed_is_none():
    def same(a, b, close=0.0):
        return list(differences(a, b, "x", close)) == []

    assert same(0.0, 0.5, 0.5)
    assert not same(0.0, 0.75, 0.5)
    assert same(2.0, 4.0, 0.5)
    assert same(-4.0, -2.0, 0.5)
    assert not same(2.0, 4.5, 0.5)
    assert same(1, 1.0)
    assert not same(1, True), "a number is no answer to a question"
    assert same(True, True)
    assert not same(True, False)
    assert same("Infinity", math.inf)
    assert not same("Infinity", "-Infinity", 9.0)
    assert same("NaN", math.nan)
    assert not same(math.nan, 1.0, 9.0)
    assert not same("a", "b")
    assert not same(None, 0)
    assert not same("12", ["1", "2"])
    assert list(differences({"a": 1}, {"b": 1})) == [("a", 1, "nothing"), ("b", "nothing", 1)]
    assert list(differences([1, 5], [2, 5])) == [("0", 1, 2)]
    assert list(differences({"a": {"b": 1.0}}, {"a": {"b": 1.5}}, close=0.5)) == []


def test_a_finding_in_a_line():
    found = Findings()
    found.recomputed("f")
    found.recomputed("f", "from it")
    found.word("g", "nobody knows")
    found.contradicted("h", "a.json", "x.y", 0.123456789, 3)
    found.contradicted("h", "a.json", "", "one", None, "why")
    assert [one.text() for one in found.list] == [
        "f: recomputed",
        "f: recomputed. from it",
        "g: the author's word. nobody knows",
        "h: contradicted. a.json: x.y is 0.123457, recomputed 3",
        "h: contradicted. a.json is one, recomputed None (why)",
    ]
    checked = Checked(folder="here", findings=found.list)
    counts = [checked.count(verdict) for verdict in ("recomputed", "the author's word", "contradicted")]
    assert counts == [2, 1, 2]
    assert checked.contradictions == found.list[3:]
    assert (checked.tasks, checked.rerun, checked.seal) == (0, 0, None)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, True), (3, 3), (None, None), (0.5, 0.5), (math.inf, "inf"), (-math.inf, "-inf"), ("a" * 160, "a" * 160),
        ("a" * 161, "a" * 160 + "..."), ([1, "b"], "[1, 'b']"),
    ],
)  # fmt: skip
def test_values_are_shown_as_far_as_a_line_goes(value, shown):
    found = Findings()
    found.contradicted("f", "file", "field", value, value)
    assert (found.list[0].recorded, found.list[0].recomputed) == (shown, shown)
    assert type(found.list[0].recorded) is type(shown)


# --- the case --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "attempts"),
    [(None, 1), ({}, 1), ({"attempt": 0}, 1), ({"attempt": 3}, 4), ({"attempt": -2}, 1), ({"attempt": 10**9}, 1 + MOST),
     ({"attempt": "3"}, 1)],
)  # fmt: skip
def test_noise_may_have_been_drawn_anew_at_each_resumption(head, attempts):
    assert Case.attempts.fget(SimpleNamespace(head=head)) == attempts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"engine": "stacked"}, "the run stacked its clients"),
        ({"deterministic": False}, "the run allowed operations whose results vary"),
        ({"notes": ["other", "resumed on another machine"]}, "the run was resumed under other conditions"),
        ({"notes": ["it was resumed"]}, ""),
        ({"device": "cuda"}, "the device was cuda, is cpu"),
        ({"versions": {"torch": "0.1"}}, "torch was 0.1, is 9"),
    ],
)
def test_why_bits_may_differ_here(changes, words, monkeypatch):
    monkeypatch.setattr(case, "versions", lambda: {"torch": "9"})
    monkeypatch.setattr(case, "BITS", ("torch",))
    monkeypatch.setattr(case, "device_name", lambda device: device)
    monkeypatch.setattr(case, "chosen_engine", lambda setting: setting.engine)
    facts = {"engine": "serial", "deterministic": True, "notes": [], "device": "cpu", "versions": {"torch": "9"}}
    facts |= changes
    setting = SimpleNamespace(engine=facts.pop("engine"), deterministic=facts.pop("deterministic"))
    here = SimpleNamespace(world=SimpleNamespace(device="cpu"), record=SimpleNamespace(setting=setting, **facts))
    found = Case.other_machine.func(here)
    assert words in found if words else found == ""


# --- transcript, data, noise key ------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
def test_a_damaged_transcript_is_not_called_recomputed(damaged, tmp_path):
    (tmp_path / "transcript").mkdir()
    (tmp_path / "transcript" / "index.jsonl").touch()
    damage = [SimpleNamespace(file="a", place="row 1", recorded="x", found="y")] if damaged else []
    contents = SimpleNamespace(damage=damage, text=lambda: "3 messages", digest="d", dropped=[])
    here = made(folder=tmp_path, contents=contents, record=SimpleNamespace(transcript_digest="d"))
    traffic.check_transcript(here)
    first = ("contradicted", "transcript") if damaged else ("recomputed", "transcript")
    assert told(here.found) == [first, ("recomputed", "transcript's digest")]


def test_rounds_to_which_nobody_was_drawn_declare_nothing(monkeypatch):
    """Round 2 has no participants; the others are compared with what was measured in them."""
    compared = []
    monkeypatch.setattr(traffic, "compare", lambda declared, whole, method, t: compared.append((t, declared, whole)))
    setting = SimpleNamespace(aggregate="plain", method="fedavg")
    method = SimpleNamespace(traffic=lambda plan: f"declared {plan}")
    world = SimpleNamespace(method=method, setting=setting, plan=lambda t, who, **more: t)
    rounds = [SimpleNamespace(round=t, participants=who) for t, who in ((1, [0]), (2, []), (3, [1, 2]))]
    record = SimpleNamespace(rounds=rounds, traffic_declared=True, setting=setting)
    here = made(world=world, record=record, sums={}, other_code="", foreign_transport=False)
    by_round = {t: SimpleNamespace(asks=list, choices={}, whole=f"whole {t}") for t in (1, 2, 3)}
    traffic.check_declared(here, SimpleNamespace(by_round=by_round))
    assert compared == [(1, "declared 1", "whole 1"), (3, "declared 3", "whole 3")]


def test_without_a_world_its_data_rest_on_the_authors_word():
    here = made(world=None, why_no_world="the data set is not here")
    accuracy.check_data(here)
    assert [(one.figure, one.reason) for one in here.found.list] == [("data", "the data set is not here")]


@pytest.mark.parametrize(
    ("privacy", "aggregate", "there", "version", "words"),
    [
        ({}, "plain", False, "1.0", []),  # no noise
        ({"logits": {"secure": True}}, "plain", False, "1.0", []),  # of the system alone
        ({"logits": {"epsilon": 1.0}}, "plain", True, "1.0", ["whoever has it can draw noise"]),
        ({"logits": {"epsilon": 1.0}}, "plain", False, "1.0", ["was not handed on"]),
        ({}, "secure", False, "1.0", ["was not handed on"]),
        ({}, "secure", False, "0.1.3", ["older than 0.2.0"]),
        ({"logits": {"epsilon": 1.0}}, "plain", False, "0.1.3", ["was not handed on"]),
        ({"updates": {"epsilon": 1.0}}, "plain", False, "0.0.9", ["older than 0.2.0"]),
    ],
)
def test_what_a_folder_says_of_its_noise(privacy, aggregate, there, version, words, tmp_path):
    if there:
        (tmp_path / "noise.key").touch()
    setting = SimpleNamespace(privacy=privacy, aggregate=aggregate)
    here = made(folder=tmp_path, record=SimpleNamespace(setting=setting, versions={"fedaudit": version}))
    noise_key.check_noise_key(here)
    assert len(here.found.list) == len(words)
    assert all(word in one.reason for word, one in zip(words, here.found.list, strict=True))


# --- done again ------------------------------------------------------------------------------------------------------


class Told(Down):
    w: State


def test_another_message_of_a_sum_is_no_replay():
    message = Told(State({"a": torch.ones(2)}))
    entry = SimpleNamespace(digest=read_header(encode(message)).digest, sender="server", receiver="client 0", round=1,
                            fn="(sum) share", seq=7)  # fmt: skip
    assert server_rounds._Sums._same(None, message, entry).w["a"].tolist() == [1.0, 1.0]
    with pytest.raises(server_rounds._Apart, match="row 7: server to client 0, round 1"):
        server_rounds._Sums._same(None, Told(State({"a": torch.zeros(2)})), entry)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (_Outcome(done=3, exact=3), [("recomputed", "3 of 9 tasks, chosen by seed 5: 3 replies are the same")]),
        (_Outcome(done=3, largest=0.01), [("recomputed", "replies differ by 0.01 at most")]),
        (_Outcome(done=3, largest=0.01, wrong=1), []),
        (
            _Outcome(done=3, exact=2, reasons=["gone"]),
            [("the author's word", "2 of 4 chosen tasks: gone"), ("recomputed", "2 replies are the same")],
        ),
        (_Outcome(done=3, reasons=["gone"]), [("the author's word", "4 of 4 chosen tasks: gone")]),
        (_Outcome(unreadable=4), [("the author's word", "4 of 4 chosen tasks: their messages were not kept")]),
    ],
)
def test_what_is_told_of_tasks_done_again(outcome, words):
    here = made(other_machine="another machine")
    rerun._report(here, outcome, 4, 9, 5)
    assert [one.verdict for one in here.found.list] == [verdict for verdict, _ in words]
    assert all(word in one.reason for (_, word), one in zip(words, here.found.list, strict=True))


def test_a_client_is_followed_to_its_last_task_that_is_wanted(monkeypatch):
    """Tasks 1 to 5, of which 2, 3 and 4 are wanted. 2 comes out from any state; so 1 to 4 are done in order."""
    done, compared = [], []
    tasks = [
        SimpleNamespace(up=SimpleNamespace(seq=i), down=SimpleNamespace(round=i), readable=True) for i in range(1, 6)
    ]
    again = SimpleNamespace(
        case=made(), world=SimpleNamespace(policies={}), why_not="", lacks_terms=lambda asked: False
    )
    monkeypatch.setattr(rerun, "_from_any_state", lambda again, asked, outcome: asked.up.seq == 2)

    def do(again, asked, state):
        done.append(asked.up.seq)
        return SimpleNamespace(state=b"", reply=b"", bill=None, entries=[], error="")

    monkeypatch.setattr(rerun, "_done_as", do)
    monkeypatch.setattr(rerun, "_compare", lambda case, asked, done, outcome: compared.append(asked.up.seq))
    monkeypatch.setattr(rerun, "_check_bill", lambda *_: None, raising=False)
    rerun._rerun_client(again, tasks, {2, 3, 4}, _Outcome())
    assert done == [1, 2, 3, 4]
    assert compared == [3, 4]


# --- twins, ledger, audits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "failed", "wrong"),
    [
        (4, {}, []),
        (5, {}, [("tasks", 5, 4)]),
        (3, {}, [("tasks", 3, 4)]),
        (5, {0: 1}, []),  # a task that failed may have begun
        (6, {0: 1}, [("tasks", 6, "4 to 5")]),
    ],
)
def test_twins_do_the_tasks_of_their_clients(tasks, failed, wrong, monkeypatch):
    monkeypatch.setattr(twins, "_tasks", lambda case: (Counter({0: 3, 1: 1, 2: 9}), Counter(failed), 1))
    facts = SimpleNamespace(clients=[0, 1], tasks=tasks, differences=[], lost=0, wanted="2")
    here = made(record=SimpleNamespace(setting=SimpleNamespace(twins="2", start=None)))
    assert [one[:3] for one in twins._against_transcript(here, facts)] == wrong


def test_all_clients_have_twins_where_all_are_wanted(monkeypatch):
    monkeypatch.setattr(twins, "_tasks", lambda case: (Counter({0: 3, 1: 1}), Counter(), 0))
    here = made(record=SimpleNamespace(setting=SimpleNamespace(twins="all", start=None)))

    def of(clients, tasks, wanted="all"):
        here.record.setting.twins = wanted
        facts = SimpleNamespace(clients=clients, tasks=tasks, differences=[], lost=0, wanted=wanted)
        return [one[:3] for one in twins._against_transcript(here, facts)]

    assert of([0, 1], 4) == []
    assert of([0], 3) == [("clients", 1, "at least 2")]
    assert of([0], 3, "1") == []
    assert of([], 0, "1") == [("clients", 0, "at least 1")]
    assert of([7], 0) == [("clients", "client 7", "a client that did a task")]


def test_epsilons_that_an_audit_may_be_about():
    """A release with noise of 4 sensitivities; totals by kind and relation; claims of the ledger and of policies."""
    entries = [
        SimpleNamespace(noise_multiplier=4.0, delta=1e-5),
        SimpleNamespace(noise_multiplier=0.0, delta=1e-5),
        SimpleNamespace(noise_multiplier=math.inf, delta=1e-5),
        SimpleNamespace(noise_multiplier=4.0, delta=None),
    ]
    row = SimpleNamespace(
        by_kind={"logits": 1.5}, by_relation={"zero-out": SimpleNamespace(epsilon=2.5)}, epsilon=3.5, claim=None,
        entries=entries,
    )  # fmt: skip
    setting = SimpleNamespace(privacy={"logits": {"epsilon": 7}, "training": {"noise_multiplier": 1.0}})
    here = made(record=SimpleNamespace(ledger=[row], setting=setting))
    found = epsilon_audits._epsilons(here)
    assert sorted(found) == pytest.approx(sorted([0.0, math.inf, 1.5, 2.5, 3.5, gaussian_epsilon(0.25, 1e-5), 7.0]))


@pytest.mark.parametrize(
    ("claim", "of_ledger", "wrong"),
    [
        (1.0, 2.0, []),
        (1.0, None, []),  # what cannot be composed has none
        (1.5, None, [("audits.0.claim_epsilon", 1.5, 1.0)]),
        (1.0, 9.0, [("audits.0.ledger_epsilon", 9.0, 2.0)]),
        (math.inf, 2.0, []),
    ],
)
def test_an_audit_is_about_an_epsilon_that_there_is(claim, of_ledger, wrong):
    here, audit = made(), SimpleNamespace(claim_epsilon=claim, ledger_epsilon=of_ledger)
    assert epsilon_audits._check_claims(here, "f", "audits.0", audit, [1.0, 2.0, math.inf]) is bool(wrong)
    assert [(one.field, one.recorded, one.recomputed) for one in here.found.list] == wrong


def test_another_opacus_rounds_otherwise(monkeypatch):
    monkeypatch.setattr("fedaudit.runtime.run_record.versions", lambda: {"opacus": "1.5"})
    for then, other in (({"opacus": "1.5"}, False), ({"opacus": "1.4"}, True), ({}, True)):
        assert ledger._other_opacus(made(record=SimpleNamespace(versions=then))) is other
    assert ledger._same(1.0, 1.0 + 1e-9, 1e-8)
    assert not ledger._same(1.0, 1.0 + 1e-7, 1e-8)
    assert ledger._same(None, None, 1e-8)
    assert not ledger._same(None, 0.0, 1e-8)
    assert ledger._same(math.inf, math.inf, 1e-8)
    assert not ledger._same(math.inf, 1e300, 1e-8)


@pytest.mark.parametrize("foreign", [True, False])
def test_a_foreign_transports_bytes_are_as_it_counted_them(foreign, monkeypatch):
    """Its own frames are around the same payload. Among our own, 99 bytes where 20 travelled are a contradiction."""
    here = made(foreign_transport=foreign)
    index = traffic._Index(here)
    monkeypatch.setattr(traffic, "stored_header", lambda *row: ("head", 50))
    monkeypatch.setattr(index, "_digest", lambda *row: None)
    again = {"w": {"payload": 8, "buffers": 0, "wire": 20}, "(frame)": {"payload": 0, "buffers": 0, "wire": 30}}
    monkeypatch.setattr(traffic, "measure", lambda head, size: again)
    fields = {"w": {"payload": 8, "buffers": 0, "wire": 99, "role": "private"}}
    row = {"fields": fields, "frame": 7, "bytes": 106, "tree": {}, "tensors": [], "digest": "d"}
    found = index._sizes(row, "row 4")
    assert {name: size["wire"] for name, size in found.items()} == (
        {"w": 99, "(frame)": 7} if foreign else {"w": 20, "(frame)": 30}
    )
    assert [one.field for one in here.found.list] == ([] if foreign else ["row 4, (frame)", "row 4, w"])


def test_an_app_brings_its_own_records():
    here = made(world="a world", foreign_transport=True)
    accuracy.check_data(here)
    assert [(one.verdict, one.figure, one.reason) for one in here.found.list] == [
        ("the author's word", "data", "the app brings its own records")
    ]


def test_what_is_said_of_trials_that_are_not_kept(monkeypatch):
    monkeypatch.setattr(epsilon_audits, "_check_verdict", lambda *of: False)
    audits = [
        SimpleNamespace(
            claim=f"claim {n}", test="t", kind="logits", claim_epsilon=0.0, ledger_epsilon=None, guesses=None, trials=n,
            p_value=0.25,
        )
        for n in (0, 1200)
    ]  # fmt: skip
    here = made(record=SimpleNamespace(ledger=[], audits=audits, setting=SimpleNamespace(privacy={})))
    epsilon_audits.check_epsilon_audits(here)
    assert [one.reason.partition(";")[0] for one in here.found.list] == [
        "it was not tried", "its 1,200 trials are not kept",
    ]  # fmt: skip


@pytest.mark.parametrize("cheap", [True, False])
def test_what_a_gate_leaves_out_of_a_ledger(cheap, monkeypatch):
    done = []
    long = ["_check_trainings", "_check_noise", "_check_sizes", "check_second_accountant"]
    for name in long:
        monkeypatch.setattr(ledger, name, lambda case, name=name: done.append(name))
    monkeypatch.setattr(ledger, "check_totals", lambda case, compare: done.append(compare))
    setting = SimpleNamespace(privacy={})
    ledger.check_ledger(
        made(whole=False, record=SimpleNamespace(ledger=[], idle_policies=[], setting=setting)), cheap=cheap
    )
    assert done == ([False] if cheap else [True, *long])


def test_of_tensors_that_a_model_lacks_and_has_too_many_the_first_is_named(monkeypatch, tmp_path):
    """The file has b and c, the state a and b: a is missing."""
    monkeypatch.setattr(accuracy, "_tensors", lambda path: {"b": torch.zeros(1), "c": torch.zeros(1)})
    here = made(folder=tmp_path)
    assert accuracy._differs(here, "m.safetensors", {"a": torch.zeros(1), "b": torch.zeros(1)})
    (found,) = here.found.list
    assert (found.field, found.recorded, found.recomputed) == ("a", "missing", "there")


def test_tasks_done_again_are_counted_from_nothing():
    assert _Outcome() == _Outcome(done=0, exact=0, largest=0.0, unreadable=0, wrong=0, reasons=[])
    here = made(other_machine="")
    rerun._report(here, _Outcome(), 0, 9, 5)
    assert here.found.list == [], "nothing was chosen, and nothing is told"


@pytest.mark.parametrize(
    ("noised", "left"), [(True, ["Local.n", "Other.w"]), (False, ["Local.w", "Local.n", "Other.w"])]
)
def test_what_goes_into_a_noised_sum_costs_nothing_beside_it(noised, left):
    """Of the summed message the field without noise of its own is left out."""
    entries = [
        SimpleNamespace(field="Local.w", noise_multiplier=0.0),
        SimpleNamespace(field="Local.n", noise_multiplier=2.0),
        SimpleNamespace(field="Other.w", noise_multiplier=0.0),
    ]
    sums = {(3, 1): SimpleNamespace(total=SimpleNamespace(message="Local"))}
    again = SimpleNamespace(case=SimpleNamespace(sums=sums), world=SimpleNamespace(guarantee="one" if noised else None))
    asked = SimpleNamespace(up=SimpleNamespace(round=3, ask=1))
    assert [e.field for e in rerun._billed(again, asked, SimpleNamespace(entries=entries))] == left
