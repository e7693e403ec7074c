"""No unpaid road: methods that move what they saw of the records are billed infinity, refused, or found; careful ones
are not."""

from __future__ import annotations

import math

import cheats
import pytest
import torch

from fedaudit import State, Up
from fedaudit.errors import ContractError, PrivacyError, RunError, WireError
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.declarations.contract import check_declarations
from fedaudit.runtime.runner import run
from fedaudit.training.forward import row_by_row
from fedaudit.wire.codec import encode_tree

pytestmark = pytest.mark.usefixtures("default_twins")

DP = dict([parse_policy("training:noise=1,clip=1")])
EMBEDDINGS = dict([parse_policy("embeddings:eps=1,clip=1")])
LOGITS = dict([parse_policy("logits:eps=1,clip=1")])


@pytest.fixture(params=["serial", pytest.param("ray", marks=pytest.mark.slow)])
def ledger(request, tiny, tmp_path):
    """The record of a small run of `cheats:NAME`, on each engine."""
    engine = request.getfixturevalue("ray_engine") if request.param == "ray" else "serial"

    def make(name, privacy=DP, **values):
        values = {"set": {}, "rounds": 1, **values}
        method = name if ":" in name else f"cheats:{name}"
        setting = tiny(method, clients=2, model="mlp", privacy=privacy, **values)
        return run(setting, out=tmp_path / name, engine=engine)

    return make


def epsilons(record):
    return [client.epsilon for client in record.ledger]


UNPAID = [
    "OwnLoop",
    "OwnLoopAndFit",
    "HeadFirst",
    "ReadBefore",
    "ReadIntoReply",
    "NoFit",
    "Remembers",
    "RemembersText",
    "Launders",
    "PublicNumber",
    "Layers",
    "Number",
    "Publishes",
    "PublishesLater",
    "PublishesQuietly",
    "Order",
    "MemoryOrder",
    "Doubled",
    "Rate",
    "Steps",
    "OneByOne",
    "Again",
    "AgainOneByOne",
    "choices:BitList",
    "choices:OneKnown",
    "choices:Parts",
    "choices:WhichLoss",
    "choices:SameNumber",
    "choices:WhichSetting",
    "choices:Mixes",
    "choices:WhichModel",
    "choices:NewModel",
    "choices:NewMemory",
    "choices:Skips",
    "choices:LooksThenTells",
]


@pytest.mark.parametrize("name", UNPAID)
def test_what_leaves_unpaid_costs_infinity(name, ledger):
    assert epsilons(ledger(name)) == [math.inf, math.inf]


@pytest.mark.parametrize(
    "name", ["Plain", "Counts", "Books", "Twice", "Weighs", "choices:SamePart", "choices:FullBatch"]
)
def test_careful_methods_cost_what_their_training_costs(name, ledger):
    assert all(0 < epsilon < math.inf for epsilon in epsilons(ledger(name)))


@pytest.mark.parametrize(
    "name", ["PlainPublic", "PlainFollows", "PlainMemory", "PlainOnly", "KeepsOrNot", "LooksThenTells"]
)
def test_what_a_model_without_dp_tells_is_billed_also_where_nobody_looks(name, ledger):
    """Under a policy that protects embeddings, and not the training."""
    assert epsilons(ledger(f"choices:{name}", EMBEDDINGS)) == [math.inf, math.inf]


def test_what_was_received_costs_nothing_also_beside_such_a_model(ledger):
    assert all(0 < epsilon < 2 for epsilon in epsilons(ledger("choices:PlainRelays", EMBEDDINGS)))


@pytest.mark.parametrize(("name", "what"), [("First", "message class"), ("FirstRate", "twin")])
def test_what_one_client_alone_does_by_its_records_is_billed(name, what, ledger):
    """Nobody did the same beside it, so that nothing says that the code, and not the records, decided."""
    (asked,) = ledger(name).ledger
    assert asked.epsilon == math.inf
    assert [e.field for e in asked.entries if e.noise_multiplier == 0] == [f"update ({what})"]


def test_one_client_alone_with_one_answer_costs_its_training(ledger):
    assert 0 < ledger("FirstPlain").ledger[0].epsilon < math.inf


def test_one_client_alone_with_hyper_parameters_costs_its_training(ledger):
    assert 0 < ledger("FirstKnown").ledger[0].epsilon < math.inf


def test_a_function_has_one_message_class_over_the_run(ledger):
    with pytest.raises(ContractError, match="in another round"):
        ledger("Later", rounds=2)


@pytest.mark.parametrize("name", ["FalseFollows", "LaterFollows"])
def test_what_does_not_follow_from_a_release_is_billed(name, ledger):
    record = ledger(name, EMBEDDINGS)
    assert all(client.by_kind["soft_labels"] == math.inf for client in record.ledger)
    assert all(client.by_kind["embeddings"] < 2 for client in record.ledger)


def test_what_the_harness_derives_from_a_release_is_free(ledger):
    record = ledger("HonestFollows", EMBEDDINGS)
    assert all(client.by_kind["soft_labels"] == 0 and client.epsilon < 2 for client in record.ledger)


@pytest.mark.parametrize(
    ("name", "privacy", "error", "words"),
    [
        ("Listed", DP, ContractError, "carries a Tensor of its own"),
        ("Called", DP, ContractError, "carries a Tensor of its own"),
        ("Keyword", DP, ContractError, "carries a Tensor of its own"),
        ("Overwrites", EMBEDDINGS, PrivacyError, r"Rows\.e was protected .* another value"),
        ("Copies", LOGITS, PrivacyError, "a record that counts more than once"),
        ("MeanOverwritten", LOGITS, PrivacyError, "a mean is bounded by clipping the records"),
        ("WhichClass", DP, ContractError, "The choice of the class would reveal something"),
        ("NamedByData", DP, ContractError, "while it ran"),
        ("Annotated", DP, ContractError, "annotated to return Weights"),
        ("CountsAsItLikes", DP, RunError, "WireError"),
        ("AllBuffers", DP, ContractError, "a buffer, which the model does not"),
        ("Watching", DP, ContractError, "changes an object outside"),
        ("Into", DP, ContractError, "changes an object outside"),
        ("Beside", DP, ContractError, "keeps something of the rows"),
        ("Hooked", DP, ContractError, "has a hook"),
        ("GradientHook", DP, ContractError, "has a hook"),
        ("Changeling", DP, RunError, "WireError"),
        ("DerivesAnything", EMBEDDINGS, PrivacyError, "by is not a hyper-parameter"),
        ("DerivesFromRaw", EMBEDDINGS, PrivacyError, "that client.protect did not give back"),
    ],
)
def test_what_is_refused(name, privacy, error, words, ledger):
    with pytest.raises(error, match=words):
        ledger(name, privacy)


@pytest.mark.parametrize("where", ["list", "attribute", "buffer", "nowhere"])
def test_a_network_keeps_nothing_of_what_goes_through_it(where, ledger):
    if where == "nowhere":
        assert all(0 < epsilon < math.inf for epsilon in epsilons(ledger("Peeking", set={"where": where})))
        return
    with pytest.raises(ContractError, match="Peeks, or what fit computes beside it, keeps something"):
        ledger("Peeking", set={"where": where})


def test_a_private_training_gives_records_one_at_a_time_to_what_is_beside_it(ledger):
    """Else a row that is made of all records would be clipped as if it were one record's."""
    x = torch.arange(12.0).reshape(4, 3)
    assert torch.equal(row_by_row(lambda rows: rows.mean(0, keepdim=True).expand(len(rows), -1), x, size=2), x)
    ledger("BesideMixed")  # its loss fails where a row is not its own record


def test_what_is_beside_a_private_training_works_with_networks(tiny, tmp_path):
    setting = tiny("moon", rounds=2, clients=2, model="mlp", privacy=DP)
    assert all(0 < epsilon < math.inf for epsilon in epsilons(run(setting, out=tmp_path / "moon")))


@pytest.mark.parametrize(("name", "error"), [("Fails", "ValueError"), ("FailsQuietly", "Quiet")])
def test_a_clients_failure_is_billed_and_says_nothing(name, error, ledger, tmp_path):
    record = ledger(name, quorum=0.5)
    (absent,) = record.rounds[0].absent
    assert absent.reason.startswith(f"{error} (update, cheats.py:")
    everything = "".join(path.read_text() for path in (tmp_path / name).rglob("*.json*"))
    assert "my labels are" not in everything
    assert "my labels are" in (tmp_path / name / "errors.log").read_text()
    failed, other = record.ledger
    assert failed.epsilon == math.inf
    assert failed.entries[0].kind == "absence"
    assert other.epsilon < math.inf


class Turncoat(dict):
    def items(self):
        return reversed(super().items())


class Shown(list):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    "value", [Turncoat(a=1), Shown([1]), cheats.TwoFaced(), State()], ids=lambda v: type(v).__name__
)
def test_what_could_show_another_content_does_not_travel(value):
    """A digest is taken, then the bytes: what answers for itself could give something else the second time."""
    if isinstance(value, State):
        value = type("Moody", (State,), {})({"w": torch.ones(1)})
    with pytest.raises(WireError, match="A subclass may misreport its content"):
        encode_tree(value)
    with pytest.raises(ContractError, match="must return its fields unchanged"):
        type("Sly", (Up,), {"__getattribute__": object.__getattribute__, "__module__": __name__})


@pytest.mark.parametrize("how", ["dtype", "shape", "zero"])
def test_equal_values_in_other_bytes_are_not_the_model(how, ledger):
    assert epsilons(ledger("Doubled", set={"how": how})) == [math.inf, math.inf]


@pytest.mark.parametrize("where", ["global", "rebound", "class", "attribute", "default", "self"])
def test_what_is_left_behind_is_billed(where, ledger):
    record = ledger("Leaves", set={"where": where})
    assert epsilons(record) == [math.inf, math.inf]
    assert {entry.kind for client in record.ledger for entry in client.entries} >= {"left behind"}


def test_what_a_task_that_saw_no_record_leaves_behind_is_free(ledger):
    record = ledger("CountsItsTasks")
    assert [entry.kind for client in record.ledger for entry in client.entries if entry.kind == "left behind"] == []


def test_how_many_rows_leave_is_a_release(ledger):
    record = ledger("FewerRows", EMBEDDINGS)
    assert epsilons(record) == [math.inf, math.inf]
    assert {entry.field for client in record.ledger for entry in client.entries} >= {"update (twin)"}


def test_a_failure_within_a_private_training_is_billed(ledger):
    failed, other = ledger("FailsInFit", quorum=0.5).ledger
    assert (failed.epsilon, other.epsilon < math.inf) == (math.inf, True)


@pytest.mark.parametrize("ours", [False, True])
def test_an_error_says_nothing_by_its_class_or_by_ours(ours, ledger):
    record = ledger("NamesItsError", set={"ours": ours}, quorum=0.5)
    expected = "ContractError (" if ours else "an error of a class that was made by the task ("
    assert record.rounds[0].absent[0].reason.startswith(expected)
    assert "Saw" not in record.model_dump_json()
    assert "labels [" not in record.model_dump_json()


def test_a_client_that_leaves_the_process_is_a_failed_client(ledger):
    record = ledger("Exits", quorum=0.5)
    assert record.status == "done"
    assert record.rounds[0].absent[0].reason.startswith("SystemExit (")


def test_the_loss_of_a_private_training_stays_with_the_harness(tiny, tmp_path):
    """A figure of the records without noise: `Trained.loss` of FalsePublic is not a number any more."""
    with pytest.raises(RunError, match="WireError"):
        run(tiny("outside:FalsePublic", rounds=1, clients=2, privacy=DP, set={}), out=tmp_path / "a")


@pytest.mark.parametrize("name", ["ReadBefore", "ReadIntoReply", "HeadFirst", "OwnLoop"])
def test_reads_beside_the_training_are_found(name, tiny):
    """Other records for what reads them itself, the real ones inside fit: whatever the order of reading."""
    with pytest.raises(ContractError, match=r'Weights\.w is declared via="model", but it changes'):
        check_declarations(tiny(f"cheats:{name}", rounds=1, clients=2, model="mlp", set={}))


@pytest.mark.parametrize("engine", ["serial", pytest.param("ray", marks=pytest.mark.slow)])
def test_on_every_engine(engine, tiny, tmp_path, request):
    given = request.getfixturevalue("ray_engine") if engine == "ray" else engine
    setting = tiny("cheats:OwnLoopAndFit", rounds=1, clients=2, model="mlp", privacy=DP, set={})
    assert epsilons(run(setting, out=tmp_path / "a", engine=given)) == [math.inf, math.inf]
