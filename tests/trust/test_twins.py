"""Twins: on every engine, over kills, from round to round; who has one, and what the record says of it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from outside import Sent

from fedaudit import Down, Up, public, state_of
from fedaudit.errors import SettingError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import Diverged, HandedOver, Recorder, Tape
from fedaudit.privacy.noise_key import NoiseKey, task_key
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.declarations import twins
from fedaudit.runtime.declarations.twin_client import (
    Answer,
    differences,
    exchanged,
    mixed_means,
    mixed_rows,
    paid_fields,
)
from fedaudit.runtime.declarations.twins import wanted
from fedaudit.runtime.run_record import TwinFacts
from fedaudit.runtime.runner import run
from fedaudit.runtime.task import Task, compute, run_task
from fedaudit.runtime.world import world_of
from fedaudit.setting import Setting
from fedaudit.wire.codec import encode

pytestmark = pytest.mark.usefixtures("default_twins")

DP = dict([parse_policy("training:noise=1,clip=1")])
ROWS = dict(map(parse_policy, ["logits:eps=1,clip=1", "embeddings:eps=1,clip=1"]))
SLOW = [pytest.param(engine, marks=pytest.mark.slow) for engine in ("isolated", "ray")]


@pytest.fixture
def ran(tiny, tmp_path, request):
    def make(method, engine="serial", folder="run", resume=False, **values):
        values = {"rounds": 2, "aux": 0.2, "model": "mlp", "privacy": DP, "twins": "all", **values}
        if engine == "isolated":
            values["isolate"] = True
        given = {"ray": lambda: request.getfixturevalue("ray_engine"), "stacked": lambda: "stacked"}.get(engine)
        return run(tiny(method, **values), out=tmp_path / folder, resume=resume, engine=given() if given else None)

    return make


@pytest.mark.parametrize("engine", ["serial", "stacked", *SLOW])
@pytest.mark.parametrize("name", ["SgdTwice", pytest.param("AdamThenPublic", marks=pytest.mark.long)])
def test_honest_twins_hold_on_every_engine(engine, name, ran):
    record = ran(f"follows:{name}", engine, set={})
    assert (record.twins.clients, record.twins.tasks, record.twins.held) == ([0, 1, 2], 6, 6)
    assert all(0 < client.epsilon < math.inf for client in record.ledger)


@pytest.mark.parametrize("engine", ["serial", pytest.param("stacked", marks=pytest.mark.long)])
def test_rates_that_fall_and_augmented_images_hold(engine, ran):
    record = ran("follows:Scheduled", engine, set={}, rounds=1, model="cnn", twins="2")
    assert (record.twins.tasks, record.twins.held) == (2, 2)
    assert all(0 < client.epsilon < math.inf for client in record.ledger)


@pytest.mark.parametrize("how", ["laplace", "discrete-gaussian", "skellam", "gaussian"])
def test_outputs_of_every_mechanism_are_handed_over(how, ran):
    """Rows and counts with noise of each kind, labels by randomised response."""
    delta = "" if how == "laplace" else ",delta=1e-3"
    texts = [f"embeddings:eps=1,{how}{delta}", f"label_counts:eps=1,{how}{delta}", "labels:eps=1,randomised-response"]
    record = ran("follows:SendsThree", set={}, rounds=1, privacy=dict(map(parse_policy, texts)), twins="2")
    assert (record.twins.differences, record.twins.tasks, record.twins.held) == ([], 2, 2)
    entries = [entry for client in record.ledger for entry in client.entries]
    assert all(0 < entry.noise_multiplier < math.inf for entry in entries)
    assert len(entries) == 9


@pytest.mark.parametrize("engine", ["serial", "stacked", *SLOW])
def test_a_cheat_is_billed_on_every_engine(engine, ran):
    """It sends what it wrote into its memory a round ago."""
    record = ran("roads:Later", engine, set={}, twins="1")
    assert [client.epsilon for client in record.ledger] == [math.inf] * 3
    assert (record.twins.tasks, record.twins.held) == (2, 1)


@pytest.mark.long
def test_twins_change_nothing_in_the_run(ran):
    digests = {ran("follows:SgdTwice", set={}, twins=n, folder=n).transcript_digest for n in ("off", "1", "all")}
    assert len(digests) == 1


def test_a_failure_in_both_is_no_difference(ran):
    """The client fails by its number, before it trains: so does its twin, and nothing is told of the records."""
    record = ran("follows:FailsByNumber", set={}, quorum=0.3)
    assert [row.client for row in record.rounds[0].absent] == [1]
    assert (record.twins.tasks, record.twins.held) == (6, 6)


@pytest.mark.parametrize("at", ["before", "after"])
def test_a_failure_of_one_of_the_two_is_a_difference(at, ran):
    record = ran("follows:FailsByRecords", set={"at": at}, quorum=0.1, rounds=1)
    assert record.twins.differences
    assert {row.split(",")[0] for row in record.twins.differences} <= {"absence", "training"}
    assert all(client.epsilon == math.inf for client in record.ledger)


def test_a_resumed_run_goes_on_with_its_twins(ran):
    first = ran("follows:SgdTwice", set={}, rounds=2)
    assert first.twins.tasks == 6
    again = ran("follows:SgdTwice", set={}, rounds=3, resume=True)
    assert (again.twins.tasks, again.twins.held, again.twins.lost) == (9, 9, 0)


def test_a_difference_is_still_billed_after_a_resume(ran):
    first = ran("roads:Later", set={}, rounds=2)
    assert first.twins.differences
    again = ran("roads:Later", set={}, rounds=3, resume=True)
    (entry,) = [e for e in again.ledger[0].entries if e.field == "update (twin)" and 3 in e.rounds]
    assert entry.noise_multiplier == 0
    assert again.twins.differences == first.twins.differences, "its twins have ended"


@pytest.mark.long
def test_states_of_twins_that_are_gone_are_said(ran, tmp_path):
    import shutil

    ran("follows:SgdTwice", set={}, rounds=1)
    shutil.rmtree(tmp_path / "run" / "twins")
    again = ran("follows:SgdTwice", set={}, rounds=2, resume=True)
    assert (again.twins.lost, again.twins.tasks) == (3, 3)
    assert "3 were lost" in again.twins.text()


# --- who has one ------------------------------------------------------------------------------------------------------


def test_how_many_have_one():
    assert [wanted("auto", n) for n in (1, 5, 7, 20, 100)] == [1, 1, 1, 3, 15]
    assert [wanted(text, 5) for text in ("all", "off", "2", "9")] == [5, 0, 2, 5]
    with pytest.raises(SettingError, match="choose from auto, all, off, or a number of clients"):
        Setting.make(twins="some")


def test_which_clients_have_one_follows_the_secret(ran, monkeypatch):
    from fedaudit.runtime import run_opening

    found = []
    for i in range(3):
        monkeypatch.setattr(run_opening, "fresh_secret", lambda i=i: bytes([i] * 32))
        found.append(ran("follows:SgdTwice", set={}, twins="1", folder=str(i), rounds=1, clients=5).twins.clients)
    assert len({tuple(clients) for clients in found}) > 1
    assert all(len(clients) == 1 for clients in found)


def test_clients_that_come_later_have_one_too(ran):
    record = ran("follows:SgdTwice", set={}, clients=6, participation=0.5, rounds=3)
    asked = {k for row in record.rounds for k in row.participants}
    assert record.twins.clients == sorted(asked)
    assert len(asked) > 3


def test_an_ask_without_a_twin_gets_one(tmp_path, monkeypatch):
    """One of the first three has one. Whoever comes later and alone has one, too, whatever the lot says."""
    monkeypatch.setattr(twins.nursery, "nursery_of_twins", lambda: None)
    setting = SimpleNamespace(twins="1", clients=20)
    of_run = twins.Twins(SimpleNamespace(policies={"a": 1}, setting=setting), tmp_path, bytes(32), TwinFacts())
    of_run.choose([0, 1, 2], [0, 1, 2])
    assert sum(map(of_run.has, range(3))) == 1
    for k in range(3, 20):
        of_run.choose([k], [k])
    assert all(map(of_run.has, range(3, 20)))


def test_a_run_without_a_policy_has_none(ran):
    assert ran("follows:SgdTwice", set={}, privacy={}).twins is None


def test_the_record_says_it_in_words():
    assert "no client had a twin" in TwinFacts(wanted="off").text()
    facts = TwinFacts(wanted="auto", clients=[2], tasks=4, held=3, differences=["A.b, in f of round 4, client 2"])
    assert facts.text() == (
        "1 client had a twin with other records: 3 of 4 tasks gave the same reply to the bit; "
        "different: A.b, in f of round 4, client 2"
    )


# --- records, outputs, comparisons ------------------------------------------------------------------------------------


@pytest.mark.parametrize("aux", [0, 40])
@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_all_records_are_exchanged(aux, kind):
    rng = torch.Generator().manual_seed(0)
    make = (lambda n: torch.randn(n, 1, 4, 4)) if kind == "images" else (lambda n: torch.randint(50, (n, 12)))
    x, y = make(30), torch.randint(10, (30,))
    others = make(aux), torch.randint(10, (aux,))
    other, label = exchanged((x, y), others, 10, rng)
    assert (other.shape, other.dtype, label.shape, label.dtype) == (x.shape, x.dtype, y.shape, y.dtype)
    assert not (other[:, None] == x[None]).flatten(2).all(2).any(), "no record of the client is among them"
    assert not (label == y).any(), "each label is another one"
    assert set(label.tolist()) <= set(range(10))


def test_rows_of_one_record_each_are_told_from_mixed_ones():
    x, one, other = torch.arange(8.0).reshape(4, 2), torch.arange(8.0).reshape(4, 2), torch.arange(8.0).reshape(4, 2)
    one[:2] += 1
    other[2:] += 1

    def mixed(one, other, third=x, exchanged=(2, 2, 1)):
        fields = [[("A.b", value)] for value in (x, one, other, third)]
        return [(where, how.partition(",")[0]) for where, how in mixed_rows(fields[0], fields[1:], exchanged)]

    assert mixed(one, other) == []
    assert mixed(one, other, one, (2, 2, 2)) == []
    several = [("A.b", "several rows of it change with one record")]
    assert mixed(one, other, one) == several, "one record was exchanged, and two rows are others"
    assert mixed(one, other, exchanged=(1, 3, 1)) == several
    assert mixed(x, x[:2]) == [], "a half with other labels may have fewer rows"
    other[0] += 1
    assert mixed(one, other) == [("A.b", "a row of it changes with several records")]
    assert mixed(one, x[:2]) != [], "a row that is gone has changed, too"


def test_rows_of_means_may_come_in_any_order_and_some_may_be_missing():
    """Four records; the first two are exchanged, then the last two, then one."""
    mine = ["a", "b", "c", "d"]
    assert not mixed_means(mine, [["d", "A", "c", "B"], ["C", "b", "a"]], [2, 2])
    assert mixed_means(mine, [["A", "B", "c", "x"], ["a", "b", "C", "D"]], [2, 2]), "d changes with a or b"
    assert mixed_means(mine, [["A", "B", "c", "d"], ["a", "x", "C", "D"]], [2, 2]), "b changes with c or d"
    assert mixed_means(["a", "a"], [["a", "A", "A"], ["a", "a"]], [1, 1]), "a row that is there twice is two rows"
    halves, both = [["A", "B"], ["C", "D"]], [2, 2]
    assert mixed_means(["a", "b"], [*halves, ["x", "y"]], [*both, 1]), "few rows, and one record moves two of them"
    assert not mixed_means(["a", "b"], [*halves, ["x", "b"]], [*both, 1])


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("FewMixedMeans", "update (class means)"),
        ("Repeats", "update (class means)"),
        ("RepeatsRow", "Rows.e"),
        ("Mixes", "Rows.e"),
    ],
)
def test_one_record_that_moves_several_rows_is_found(name, where, ran):
    """The noise is scaled for one row of a record, and in the first method half of the records move few rows, too."""
    record = ran(f"cheats:{name}", set={}, rounds=1, clients=2, privacy=ROWS)
    assert {row.split(", in ")[0] for row in record.twins.differences} == {where}
    assert record.twins.held == 0
    assert all(client.by_kind["reply"] == math.inf for client in record.ledger)


@pytest.mark.parametrize(
    ("name", "kind"), [("FewOwnMeans", "logits"), ("OwnMeans", "logits"), ("OwnRows", "embeddings")]
)
def test_rows_of_one_record_each_hold(name, kind, ran):
    record = ran(f"cheats:{name}", set={}, rounds=1, clients=2, privacy=ROWS)
    assert (record.twins.differences, record.twins.tasks, record.twins.held) == ([], 2, 2)
    assert all(0 < client.by_kind[kind] < math.inf for client in record.ledger)


def handed(*items):
    tape = Tape()
    for item in items:
        tape.add(item)
    return HandedOver(tape.items(), torch.device("cpu"))


def test_a_twin_that_asks_for_another_output_ends():
    gate = handed({"what": "A.b", "of": "float32[2]", "paid": False, "value": torch.ones(2)})
    with pytest.raises(Diverged):
        gate.field("A.c", "all", torch.ones(2), lambda: None)
    assert gate.differences == [("A.c", "the client's mechanism let out A.b there")]


def test_a_structure_is_compared_unless_it_is_paid_for():
    for paid, found in ((False, 1), (True, 0)):
        gate = handed({"what": "A.b", "of": "float32[3]", "paid": paid, "value": torch.ones(3)})
        value, _ = gate.field("A.b", "all", torch.zeros(2), lambda: None)
        assert (value.tolist(), len(gate.differences)) == ([1, 1, 1], found)


def test_outputs_that_a_twin_does_not_ask_for_are_a_difference():
    gate = handed({"what": "A.b", "of": "", "paid": False, "value": torch.ones(3)})
    gate.finish()
    assert gate.differences == [("A.b", "the client's mechanism let it out, and the twin did not ask for it")]
    empty = handed()
    empty.finish()
    assert empty.differences == []


def test_absences_and_errors_are_compared():
    task = (0, 1, 0, "f")
    for mine, twin, where in (
        (Answer(None, "E (f)"), Answer(None, "E (f)"), []),
        (Answer(None, "E (f)"), Answer(None, "E (g)"), ["absence"]),
        (Answer(None, "E (f)"), Answer(b"", None), ["absence"]),
        (Answer(b"", None), Answer(None, "E"), ["absence"]),
    ):
        assert [row.field for row in differences(task, b"", mine, twin, [], frozenset())] == where


def test_a_long_tape_leaves_memory_and_comes_back(monkeypatch):
    from fedaudit.privacy import mechanism_outputs

    monkeypatch.setattr(mechanism_outputs, "IN_MEMORY", 100)
    tape = Tape()
    for i in range(5):
        tape.add({"what": "step", "gradient": {"w": torch.full((50,), float(i))}, "at": [i, 5]})
    assert tape._file._rolled
    again = Tape(tape.content())
    gate = HandedOver(again.items(), torch.device("cpu"))
    assert [float(g["w"][0]) for g, _ in gate.gradients()] == [0, 1, 2, 3, 4]


class One(Up):
    v: torch.Tensor = public()


class Two(Up):
    v: torch.Tensor = public()


class Ask(Down):
    t: int


def compared(mine, other, paid=frozenset()):
    answers = (Answer(encode(reply), None) for reply in (mine, other))
    return [row.field for row in differences((0, 1, 0, "f"), encode(Ask(1)), *answers, [], frozenset(paid))]


def test_messages_of_other_classes_are_a_difference():
    assert compared(One(torch.ones(2)), Two(torch.ones(2))) == ["message class"]


def test_types_shapes_and_signs_of_zero_are_compared():
    one = torch.zeros(2)
    assert compared(One(one), One(one.clone())) == []
    for other in (-one, one.double(), one.view(torch.int32), one.reshape(2, 1)):
        assert compared(One(one), One(other)) == ["One.v"]


def test_only_what_is_billed_with_infinity_may_differ():
    free, open_ = LedgerEntry.free("One.v", "count", "n is public"), LedgerEntry.unprotected("One.v", "weights")
    of_part = LedgerEntry.unprotected("One.v (classes)", "label_counts")
    assert (paid_fields([free]), paid_fields([open_]), paid_fields([of_part])) == (set(), {"One.v"}, set())
    assert compared(One(torch.zeros(2)), One(torch.ones(2)), paid_fields([open_])) == []


def test_a_twin_looks_at_no_record_in_a_private_training(ran):
    """A loss and a function beside it that fail on every call fail on the client, and not on its twin."""
    record = ran("follows:FailsInside", set={}, quorum=0.1, rounds=1)
    assert all(", in update" in row for row in record.twins.differences)
    assert record.twins.held == 0
    assert record.twins.tasks == 3


def test_a_training_that_begins_anew_is_recorded_once():
    """A stack that fails is carried out again, client by client."""
    gate = Recorder(NoiseKey(bytes(32)))
    training = gate.training(lambda: {"steps": "2"})
    training.restart(1, [2, 2])
    training.step({"w": torch.zeros(1)})
    training.restart()
    for i in (1.0, 2.0):
        training.step({"w": torch.full((1,), i)})
    handed_over = HandedOver(gate.tape.items(), torch.device("cpu"))
    assert handed_over.begin({"steps": "2"})["active"] == []
    assert [float(g["w"]) for g, _ in handed_over.gradients()] == [1, 2]


def test_the_twins_environment_is_from_before_the_run(ran, monkeypatch):
    """What a client leaves in the environment, its twin does not find."""
    monkeypatch.setenv("SEEN", "nothing")
    record = ran("roads:Inside", set={"into": "environment", "through": "loss"}, rounds=1, twins="1")
    assert record.twins.differences


def test_a_lost_task_that_is_done_again_is_the_same_task(tiny):
    """Nobody saw what the lost one computed, and it draws the same noise: nothing more is told, nothing more billed."""
    setting = tiny("follows:SgdTwice", set={}, model="mlp", privacy=DP, aux=0.2)
    world = world_of(setting.model_dump_json())
    with compute(world):
        message = encode(Sent(state_of(world.fresh_model(0))))
        task = Task(setting.model_dump_json(), "update", 0, 1, 0, None, message, noise=task_key(bytes(32), 0, 1, 0, 0))
        one, again = run_task(task), run_task(task)
        fresh = run_task(dataclasses.replace(task, attempt=1, noise=task_key(bytes(32), 0, 1, 0, 1)))
    assert bytes(one.reply) == bytes(again.reply)
    assert bytes(one.state) == bytes(again.state)
    assert one.entries == again.entries
    assert bytes(fresh.reply) != bytes(one.reply), "another attempt has other noise, and is billed as another task"


def test_a_host_has_a_folder_of_its_own_only_as_an_isolated_party(tiny, monkeypatch):
    handed = []
    monkeypatch.setattr(twins.nursery, "nursery_of_twins", lambda: SimpleNamespace(hand_over=handed.append))
    world = SimpleNamespace(setting=tiny("fedavg"))
    given, own = twins._Host(world, {"folder": "given", "more": 1}), twins._Host(world, None)
    try:
        assert (given._around["folder"], given._around["more"], given._scratch) == ("given", 1, "")
        scratch = Path(own._around["folder"])
        assert scratch.is_dir()
        assert len(handed) == 2
    finally:
        given.close()
        own.close()
        for socket in handed:
            socket.close()
    assert not scratch.exists()
