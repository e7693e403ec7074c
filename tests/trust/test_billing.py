"""No unpaid road: methods that move what they saw of the records are billed infinity, refused, or found; careful ones
are not."""

from __future__ import annotations

import math

import pytest

from fedaudit.errors import ContractError, PrivacyError, RunError
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.contract import check_declarations
from fedaudit.runtime.runner import run

DP = dict([parse_policy("training:noise=1,clip=1")])
EMBEDDINGS = dict([parse_policy("embeddings:eps=1,clip=1")])
LOGITS = dict([parse_policy("logits:eps=1,clip=1")])


@pytest.fixture
def ledger(tiny, tmp_path):
    """The ledger of a small run of `cheats:NAME`."""

    def make(name, privacy=DP, **values):
        setting = tiny(f"cheats:{name}", rounds=1, clients=2, model="mlp", privacy=privacy, set={}, **values)
        return run(setting, out=tmp_path / name)

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
]


@pytest.mark.parametrize("name", UNPAID)
def test_what_leaves_unpaid_costs_infinity(name, ledger):
    assert epsilons(ledger(name)) == [math.inf, math.inf]


@pytest.mark.parametrize("name", ["Plain", "Counts", "Books", "Twice", "Weighs"])
def test_careful_methods_cost_what_their_training_costs(name, ledger):
    assert all(0 < epsilon < math.inf for epsilon in epsilons(ledger(name)))


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
        ("WhichClass", DP, ContractError, "Which message comes says something"),
        ("NamedByData", DP, ContractError, "while it ran"),
        ("Annotated", DP, ContractError, "annotated to return Weights"),
        ("CountsAsItLikes", DP, RunError, "WireError"),
        ("AllBuffers", DP, ContractError, "a buffer, which the model does not"),
        ("DerivesAnything", EMBEDDINGS, PrivacyError, "by is no hyper-parameter"),
        ("DerivesFromRaw", EMBEDDINGS, PrivacyError, "as it was"),
    ],
)
def test_what_is_refused(name, privacy, error, words, ledger):
    with pytest.raises(error, match=words):
        ledger(name, privacy)


def test_a_clients_failure_is_billed_and_says_nothing(ledger, tmp_path):
    record = ledger("Fails", quorum=0.5)
    (absent,) = record.rounds[0].absent
    assert absent.reason.startswith("ValueError (update, cheats.py:")
    everything = "".join(path.read_text() for path in (tmp_path / "Fails").rglob("*.json*"))
    assert "my labels are" not in everything
    assert "my labels are" in (tmp_path / "Fails" / "errors.log").read_text()
    failed, other = record.ledger
    assert failed.epsilon == math.inf
    assert failed.entries[0].kind == "absence"
    assert other.epsilon < math.inf


def test_a_client_that_leaves_the_process_is_a_failed_client(ledger):
    record = ledger("Leaves", quorum=0.5)
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


@pytest.mark.parametrize("engine", ["serial", "ray"])
def test_on_every_engine(engine, tiny, tmp_path, request):
    given = request.getfixturevalue("ray_engine") if engine == "ray" else engine
    setting = tiny("cheats:OwnLoopAndFit", rounds=1, clients=2, model="mlp", privacy=DP, set={})
    assert epsilons(run(setting, out=tmp_path / "a", engine=given)) == [math.inf, math.inf]
