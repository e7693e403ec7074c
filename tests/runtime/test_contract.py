"""The trial of a method's declarations, with tasks that answer by hand, and the words of its verdicts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit import Down, Up, private, public, registry
from fedaudit.errors import ContractError, PrivacyError, RunError
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.declarations import contract
from fedaudit.runtime.declarations.contract import (
    DeclarationVerdict,
    MethodVerdict,
    SwapEngine,
    _bits,
    _cut,
    _declared_by,
    _moved,
    _rows,
    _verdict,
    check_method,
    setting_for,
    try_twins,
)
from fedaudit.runtime.run_record import TwinFacts
from fedaudit.runtime.site import Swap
from fedaudit.runtime.task import Done, Task
from fedaudit.setting import Setting
from fedaudit.wire.codec import encode


def test_a_text_that_is_too_long_is_cut():
    assert _cut("abcd", 4) == "abcd"
    assert _cut("abcde", 4) == "abcd..."
    assert _cut("a" * 160) == "a" * 160
    assert _cut("a" * 161) == "a" * 160 + "..."


class Told(Down):
    n: int


class Reply(Up):
    model: torch.Tensor = private("weights", via="model", unit="client")
    data: torch.Tensor = private("gradients", via="data", unit="client")
    rows: torch.Tensor = private("logits", via="data", unit="record")
    labels: torch.Tensor = private("label_counts", via="data", unit="client")
    step: int = public()


class Another(Up):
    step: int = public()


ROWS = torch.arange(10.0).view(5, 2)


def reply(model=0.0, data=0.0, rows=(), labels=(3.0, 2.0, 0.0), step=7):
    """A reply in which these rows, and these values, are other ones."""
    table = ROWS.clone()
    table[list(rows)] += 1
    return encode(Reply(torch.tensor([model]), torch.tensor([data]), table, torch.tensor(labels), step))


def way_of(swap):
    """The name of what a task is repeated for."""
    if swap is None:
        return "first"
    if swap.only is not None:
        return "relabelled" if swap.relabel else "one"
    return "late" if swap.after == 2 else "outside" if not swap.in_fit else "early"


@pytest.fixture
def engine(monkeypatch):
    """A function that lets client 3, of five records and two private fits, answer by hand in each repetition."""

    def tried(strict=False, policies=(), n=5, brought=False, first=None, engine=None, state=b"start", **answers):
        found = engine or SwapEngine(strict)
        found.ran = []
        world = SimpleNamespace(site=lambda k: SimpleNamespace(count=n if k == 3 else 0), policies=policies)
        monkeypatch.setattr(contract, "world_of", lambda setting: world)

        def run_task(task):
            way = way_of(task.swap)
            found.ran.append((way, task))
            if way == "first":
                given = Done(
                    3, b"own", reply(), released=b"noised", private_fits=2, brought=brought, rows=[["a", "b"], ["c"]]
                )
                return first or given
            answer = answers.get(way, reply())
            if isinstance(answer, Done):
                return answer
            return Done(3, f"state of {way}".encode(), answer, rows=[["a", "b"], ["c"]])

        monkeypatch.setattr(contract, "run_task", run_task)
        task = Task("{}", "update", 3, 1, 0, state, encode(Told(1)))
        (found.done,) = found.map([task])
        return found

    return tried


def test_a_task_runs_with_other_records_in_every_way(engine):
    found = engine()
    ran = [(way, task.swap, task.state, task.replay, task.watch) for way, task in found.ran]
    assert ran == [
        ("first", None, b"start", None, True),
        ("one", Swap(2, only=0), b"start", None, True),
        ("relabelled", Swap(2, only=0, relabel=True), b"start", None, False),
        ("one", Swap(2, only=2), b"start", None, True),
        ("relabelled", Swap(2, only=2, relabel=True), b"start", None, False),
        ("late", Swap(2), b"start", b"noised", False),
        ("outside", Swap(0, in_fit=False), b"start", b"noised", False),
        ("early", Swap(0), b"start", None, False),
    ]
    assert found.done.state == b"own", "the run goes on with the task as it is"
    assert (found.broken, found.absent, found.changed) == ({}, {}, set())
    assert found.compared == {"Reply.model", "Reply.step"}
    assert set(found.declared) == {"Reply.model", "Reply.data", "Reply.rows", "Reply.labels", "Reply.step"}
    engine(engine=found, state=b"own")
    states = {way: task.state for way, task in found.ran}
    assert states == {
        "first": b"own", "one": b"own", "relabelled": b"own", "late": b"state of late",
        "outside": b"state of outside", "early": b"state of early",
    }  # fmt: skip


def test_without_a_reply_or_records_there_is_less_to_try(engine):
    assert [way for way, _ in engine(first=Done(3, error="dropped out")).ran] == ["first"]
    assert [way for way, _ in engine(n=0).ran] == ["first", "late", "outside", "early"]
    assert [way for way, _ in engine(n=1, policies=["label_counts"]).ran] == [
        "first",
        "one",
        "late",
        "outside",
        "early",
    ]
    brought = [way for way, _ in engine(brought=True).ran]
    assert brought == ["first", "one", "relabelled", "one", "relabelled", "late", "early"]


@pytest.mark.parametrize(
    ("way", "values", "broken", "changed"),
    [
        ("late", {"model": 1.0}, ["Reply.model"], []),
        ("late", {"step": 8}, ["Reply.step"], []),
        ("late", {"data": 1.0, "labels": (9.0, 2.0, 0.0)}, [], ["Reply.data", "Reply.labels"]),
        ("outside", {"model": 1.0, "data": 1.0}, ["Reply.model"], []),
        ("early", {"model": 1.0, "data": 1.0, "rows": [0, 1, 2]}, [], []),
        ("early", {"step": 8}, ["Reply.step"], []),
        ("one", {"rows": [4]}, [], []),
        ("one", {"rows": [1, 4]}, ["Reply.rows"], []),
        ("relabelled", {"labels": (2.0, 3.0, 0.0)}, [], []),
        ("relabelled", {"labels": (2.0, 3.1, 0.0)}, ["Reply.labels"], []),
        ("relabelled", {"labels": (1.0, 2.0, 0.0)}, ["Reply.labels"], []),
        ("relabelled", {"labels": (3.0, 2.0)}, ["Reply.labels"], []),
    ],
)
def test_what_may_not_change_is_told(engine, way, values, broken, changed):
    found = engine(**{way: reply(**values)})
    assert list(found.broken) == broken
    assert sorted(found.changed) == changed
    if broken:
        with pytest.raises(ContractError) as raised:
            engine(strict=True, **{way: reply(**values)})
        assert str(raised.value) == found.broken[broken[0]]


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("late", 'via="model", but it changes with the records that client 3 holds after training: update reads them '
         'again. Declare it private(..., via="data").'),
        ("outside", 'via="model", but it changes with the records that client 3 holds beside training: update reads '
         'them itself. Declare it private(..., via="data").'),
    ],
)  # fmt: skip
def test_when_a_model_changed_is_told(engine, way, said):
    assert engine(**{way: reply(model=1.0)}).broken["Reply.model"].endswith(said)


def test_a_public_value_of_the_records_is_told_apart(engine):
    said = engine(early=reply(step=8)).broken["Reply.step"]
    assert said == (
        "Reply.step is declared public(), but it changes with the records that client 3 holds. "
        'Declare it private(..., via="data"), or via="model".'
    )


def test_what_a_policy_protects_is_not_tried_record_by_record(engine):
    assert engine(policies=["logits"], one=reply(rows=[0, 1, 2])).broken == {}
    assert list(engine(policies=["label_counts"], one=reply(rows=[0, 1, 2])).broken) == ["Reply.rows"]
    found = engine(policies=["label_counts"], relabelled=reply(labels=(9.0, 9.0, 9.0)))
    assert found.broken == {}


def test_how_far_counts_move_is_told(engine):
    said = engine(relabelled=reply(labels=(6.0, 6.0, 0.0))).broken["Reply.labels"]
    assert "they move by 5, and the noise is scaled for 1.41" in said


def test_rows_of_class_means_are_of_one_record_each(engine):
    one = Done(3, b"", reply(), rows=[["a", "x"], ["c"]])
    assert engine(one=one).broken == {}
    two = Done(3, b"", reply(), rows=[["y", "x"], ["c"]])
    assert "if one record of client 3 is replaced, 2 rows change" in engine(one=two).broken["update (class means)"]


def test_a_failure_with_other_records_tells_of_them(engine):
    failed = Done(3, error="KeyError")
    late = engine(late=failed)
    assert list(late.broken) == ["update (absence)"]
    assert late.broken["update (absence)"].endswith("swapped for others: KeyError.")
    assert late._states.keys() == {("outside", 3), ("early", 3)}
    early = engine(early=failed, outside=failed)
    assert (early.broken, early.absent) == ({}, {"update (absence)": "client 3: KeyError"})
    assert early._states.keys() == {("late", 3)}
    again = engine(engine=early, early=failed)
    assert {way: task.state for way, task in again.ran}["early"] == b"start", "it begins where its client does"
    one = engine(one=failed, relabelled=failed)
    assert (one.broken, one.absent) == ({}, {})


def test_another_class_of_messages_tells_of_the_records(engine):
    other = encode(Another(7))
    found = engine(late=other, one=other, relabelled=other)
    assert list(found.broken) == ["update (message class)"]
    assert "returns a Reply, and with other records a Another" in found.broken["update (message class)"]


def test_rows_and_bits():
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    rows = _rows(table)
    assert rows[0] == rows[2] != rows[1]
    assert len(rows[0]) == 8
    assert _moved(["a", "a", "b", "c"], ["c", "a", "d"]) == 2
    assert _moved(["a"], ["a", "b"]) == 0
    assert len({_bits(v) for v in (1, 2, "1", torch.tensor(0.0), torch.tensor(-0.0), {"a": torch.tensor(0.0)})}) == 6


def test_verdicts_on_fields():
    declared = Reply.declared()
    here = SwapEngine(strict=False)
    here.broken = {"Reply.model": "it moved"}
    here.compared = {"Reply.model", "Reply.step"}
    here.changed = {"Reply.data"}
    rows = {name: _verdict(f"Reply.{name}", of, here) for name, of in declared.items()}
    assert {name: (row.verdict, row.declared) for name, row in rows.items()} == {
        "model": ("broken", 'weights, via="model"'),
        "data": ("pays", 'gradients, via="data"'),
        "rows": ("pays", 'logits, via="data"'),
        "labels": ("pays", 'label_counts, via="data"'),
        "step": ("held", "public()"),
    }
    assert rows["model"].why == "it moved"
    assert rows["data"].why.startswith("it changes with the records")
    assert rows["rows"].why.startswith("it did not change in this trial")


LOGITS = dict([parse_policy("logits:eps=1,clip=1")])


@pytest.fixture
def twins(monkeypatch):
    """A function that tries twins, with runs that end as told: facts, or an error."""

    def tried(outcomes, log="", **values):
        ran, left = [], iter(outcomes)

        def run(setting, out, twin_sets, noise_key):
            ran.append((setting, twin_sets, noise_key))
            outcome = next(left)
            if isinstance(outcome, Exception):
                raise outcome
            if log:
                out.mkdir()
                (out / contract.LOG).write_text(log)
            return SimpleNamespace(twins=outcome)

        monkeypatch.setattr(contract, "run", run)
        sets = {"sets": values.pop("sets")} if "sets" in values else {}
        return try_twins(Setting.make(method="fedavg", dataset="digits", **values), **sets), ran

    return tried


def test_twins_that_hold(twins):
    (row,), ((setting, sets, key),) = twins([TwinFacts(tasks=9, held=8)], privacy=LOGITS)
    assert (row.field, row.verdict) == ("(twins)", "held")
    assert row.declared == "all clients, 3 sets of other records each, under logits"
    assert row.why == "8 of 9 tasks gave the same reply to the bit"
    assert (setting.twins, setting.norm, list(setting.privacy), sets, key) == ("all", "keep", ["logits"], 3, None)
    for none in (TwinFacts(), None):
        (row,), _ = twins([none], privacy=LOGITS, sets=1)
        assert row.verdict == "not tried"
        assert row.declared == "all clients, 1 set of other records each, under logits"


def test_twins_that_differ(twins):
    facts = TwinFacts(tasks=9, held=6, differences=["Reply.a, in update of round 1", "Reply.b, in x", "Reply.a, in y"])
    log = "some words\nround 2, ask 0, client 3, update: Reply.a: 1\nround 3, ask 1\n"
    rows, _ = twins([facts], log, privacy=LOGITS, sets=2)
    assert [(row.field, row.verdict) for row in rows] == [
        ("Reply.a", "broken"), ("Reply.b", "broken"), ("(twins)", "broken"),
    ]  # fmt: skip
    assert rows[1].why.endswith("through a mechanism (ask 0, client 3, update: Reply.a: 1)")
    assert rows[2].why == "6 of 9 tasks held"
    assert {row.declared for row in rows} == {"all clients, 2 sets of other records each, under logits"}


def test_a_method_that_cannot_train_privately_is_tried_with_its_messages_protected(twins):
    rows, ran = twins([PrivacyError("no DP-SGD"), TwinFacts(tasks=2, held=2)])
    kinds = ["training", "embeddings", "logits", "prototypes", "label_counts"]
    assert [list(setting.privacy) for setting, _, _ in ran] == [kinds, kinds[1:]]
    assert [setting.norm for setting, _, _ in ran] == ["group", "keep"]
    assert [row.verdict for row in rows] == ["held"]
    rows, ran = twins([PrivacyError("first"), RunError("second")])
    assert [(row.field, row.declared, row.verdict, row.why) for row in rows] == [
        ("(twins)", "a protected run", "not tried", "second")
    ]
    rows, ran = twins([ContractError("refused")])
    assert [(row.declared, row.verdict, row.why) for row in rows] == [("structure", "broken", "refused")]


def test_a_verdict_on_a_method_is_of_all_its_rows(monkeypatch):
    """Swaps found one field broken, one that pays and one that holds; a function fails; twins tell of one more."""

    def tried(setting, engine):
        assert setting.twins == "off"
        assert not engine.strict
        engine.declared = {"Reply.step": Reply.declared()["step"], "Reply.data": Reply.declared()["data"],
                           "Reply.model": Reply.declared()["model"]}  # fmt: skip
        engine.compared = {"Reply.step", "Reply.model"}
        engine.broken = {"Reply.model": "moved", "update (message class)": "two"}
        engine.absent = {"update (absence)": "client 1: KeyError"}
        return engine

    monkeypatch.setattr(contract, "_tried", tried)
    monkeypatch.setattr(contract, "source_of_method", lambda method: "digest")
    monkeypatch.setattr(contract, "_declared_by", lambda method: {f"Reply.{n}": d for n, d in Reply.declared().items()})
    told = [DeclarationVerdict(where, "t", "broken", "twin") for where in ("Reply.data", "Reply.model", "(twins)")]
    monkeypatch.setattr(contract, "try_twins", lambda setting, sets: told if sets == 2 else [])
    setting = Setting.make(method="fedavg", dataset="digits", twins="all")
    found = check_method(setting, 2)
    assert [(row.field, row.verdict, row.why[:5]) for row in found.fields] == [
        ("Reply.data", "broken", "twin"),
        ("Reply.model", "broken", "moved"),
        ("Reply.step", "held", "the s"),
        ("update (message class)", "broken", "two"),
        ("update (absence)", "billed", "it fa"),
        ("Reply.labels", "not sent", "no cl"),
        ("Reply.rows", "not sent", "no cl"),
        ("(twins)", "broken", "twin"),
    ]
    assert found.fields[0].declared == 'gradients, via="data"'
    assert (found.method, found.source, found.twin_sets, found.held) == ("fedavg", "digest", 2, False)
    without = check_method(setting, 0)
    assert [row.verdict for row in without.fields[:2]] == ["pays", "broken"]
    assert without.twin_sets == 0
    told[2] = DeclarationVerdict("(twins)", "t", "not tried", "why")
    assert check_method(setting, 2).twin_sets == 0

    def refused(setting, engine):
        raise ContractError("the run")

    monkeypatch.setattr(contract, "_tried", refused)
    found = check_method(setting, 2)
    assert (found.fields[0].field, found.fields[0].verdict, found.fields[0].why) == ("(the run)", "broken", "the run")
    assert all(row.field != "(twins)" for row in found.fields), "such a run has no twins"


def test_a_further_trial_is_for_fewer_clients_or_rounds_than_it_has():
    assert contract.further(setting_for("fedavg", clients=6, rounds=4)) is None
    for few in ({}, {"clients": 9}, {"rounds": 9}):
        setting = contract.further(setting_for("fedavg", set={"E": 9}, **few))
        assert (setting.clients, setting.rounds, setting.participation, setting.set["E"]) == (6, 4, 0.5, 9)


def test_the_rows_of_a_further_trial(monkeypatch):
    """What is broken in the first stays as it was told there; twins of the second have a row of their own."""
    ran = []

    def tried(setting, engine):
        ran.append((setting.clients, setting.twins))
        engine.declared = {"Reply.step": Reply.declared()["step"], "Reply.model": Reply.declared()["model"]}
        engine.compared = {"Reply.step", "Reply.model"}
        return engine

    def twins(setting, sets):
        ran.append((setting.clients, sets))
        if setting.clients == 6:
            return [
                DeclarationVerdict(where, "", "broken", "2nd") for where in ("Reply.step", "Reply.model", "(twins)")
            ]
        return [DeclarationVerdict(where, "", "broken", "1st") for where in ("Reply.step", "(twins)")]

    monkeypatch.setattr(contract, "_tried", tried)
    monkeypatch.setattr(contract, "try_twins", twins)
    monkeypatch.setattr(contract, "_declared_by", lambda method: {})
    setting = Setting.make(method="fedavg", dataset="digits", clients=3, rounds=2)
    found = check_method(setting, 3, contract.further(setting))
    assert ran == [(3, "off"), (6, "off"), (3, 3), (6, 1)]
    assert {row.field: row.why for row in found.fields} == {
        "Reply.step": "1st", "Reply.model": "2nd", "(twins)": "1st", "(twins, further)": "2nd",
    }  # fmt: skip
    assert found.entry().settings["further"] == {"clients": 6, "rounds": 4, "participation": 0.5, "seed": 4}
    assert found.unseen == (
        "Tried: clients 0 to 5 and rounds 1 to 4, but not each client in each round. Not seen: what a method does only "
        "for clients from 6 on, only in rounds after 4, or only under other settings."
    )
    assert check_method(setting, 0).unseen.startswith("Tried: clients 0 to 2 and rounds 1 to 2. Not seen: ")
    assert "further" not in check_method(setting, 0).entry().settings


@pytest.mark.parametrize(("error", "verdict"), [(RunError("no"), "not tried"), (ContractError("no"), "broken")])
def test_a_further_trial_that_cannot_be_made(error, verdict, monkeypatch):
    def tried(setting, engine):
        if setting.clients == 6:
            raise error

    monkeypatch.setattr(contract, "_tried", tried)
    monkeypatch.setattr(contract, "_declared_by", lambda method: {})
    setting = Setting.make(method="fedavg", dataset="digits", clients=3, rounds=2)
    found = check_method(setting, 0, contract.further(setting))
    assert [(row.verdict, row.why) for row in found.fields] == [(verdict, "no")]
    assert found.held == (verdict == "not tried")
    if found.held:
        assert "clients 0 to 2 and rounds 1 to 2." in found.unseen


def test_each_trial_begins_with_clients_of_its_own(monkeypatch):
    engine = contract.SwapEngine()
    engine._states["late", 0] = b"of another trial"
    monkeypatch.setattr(contract, "run", lambda setting, out, engine: None)
    assert contract._tried(Setting.make(method="fedavg"), engine)._states == {}


def test_an_entry_says_what_was_tried():
    setting = Setting.make(method="fedavg", dataset="digits", clients=4, rounds=3)
    rows = (DeclarationVerdict("a", "", "held"), DeclarationVerdict("b", "", "pays"))
    found = MethodVerdict("fedavg", "digest", rows, setting, 3)
    entry = found.entry()
    assert found.held
    assert (entry.source, entry.held, entry.fields, entry.twin_sets) == ("digest", True, {"a": "held", "b": "pays"}, 3)
    assert entry.settings.keys() == {"set", "dataset", "model", "clients", "rounds", "privacy"}
    assert (entry.settings["clients"], entry.settings["rounds"]) == (4, 3)
    assert MethodVerdict("fedavg", "digest", rows, setting).twin_sets == 0


def test_a_method_is_tried_in_seconds():
    quick = setting_for("fedavg")
    assert (quick.rounds, quick.clients, quick.public, quick.aux, quick.device) == (2, 3, 0.1, 0.1, "cpu")
    other = setting_for("fedavg", rounds=5, set={"E": 9})
    assert (other.rounds, other.clients, other.set["E"]) == (5, 3, 9)
    assert {**quick.set, "E": 9} == {**other.set}


def test_declared_are_the_messages_that_the_methods_own_modules_define():
    """A host counts as a part of a method; what its module only imports does not."""
    assert _declared_by(registry.find("fedavg")()).keys() == {"Local.w", "Local.n"}
    of_both = _declared_by(registry.find("fedavg+dfrd")())
    assert {"Local.w", "Local.n"} <= of_both.keys()
    assert all(said.kind is not None or said.role == "public" for said in of_both.values())
