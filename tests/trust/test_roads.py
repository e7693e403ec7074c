"""No road past the mechanism: each is billed with infinity, refused or closed in a plain run, with one twin of three
clients; honest code that once looked guilty stays finite."""

from __future__ import annotations

import math

import pytest
import road_box
import torch

from fedaudit.errors import ContractError, RunError, SettingError
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.runner import run

pytestmark = pytest.mark.usefixtures("default_twins")

DP = ["training:noise=1,clip=1"]
EMBEDDINGS = ["embeddings:eps=1,clip=1"]


@pytest.fixture
def ran(tiny, tmp_path):
    """The record of a small run of `roads:NAME`."""

    def make(name, policies=DP, **values):
        values = {"rounds": 1, "set": {}, "aux": 0.2, **values}
        setting = tiny(f"roads:{name}", model="mlp", privacy=dict(map(parse_policy, policies)), **values)
        return run(setting, out=tmp_path / "run")

    return make


def epsilons(record):
    return [client.epsilon for client in record.ledger]


def billed(record):
    """What is billed with infinity, over all clients."""
    return {entry.field for client in record.ledger for entry in client.entries if entry.noise_multiplier == 0}


INSIDE = [
    ("error", "beside"), ("error", "loss"), ("module", "beside"), ("module", "loss"), ("first in module", "loss"),
    ("deque", "loss"), ("array", "beside"), ("environment", "beside"), ("attribute", "loss"),
]  # fmt: skip


@pytest.mark.parametrize(("into", "through"), INSIDE)
def test_what_a_function_inside_fit_puts_somewhere_is_billed(into, through, ran):
    """16 pixels of a record in a field that is called public."""
    record = ran("Inside", set={"into": into, "through": through})
    assert epsilons(record) == [math.inf] * 3
    assert "update (twin)" in billed(record)
    (said,) = record.twins.differences
    assert said.split(", in ")[0] in ("Marked.seen", "absence", "training")


@pytest.mark.parametrize("through", ["beside", "loss"])
def test_a_seed_that_is_set_inside_fit_is_gone_after_it(through, ran):
    record = ran("Inside", set={"into": "seed", "through": through})
    assert (record.twins.held, record.twins.tasks) == (1, 1)
    assert all(0 < epsilon < math.inf for epsilon in epsilons(record))


def test_an_own_networks_forward_is_billed(ran):
    record = ran("Forward")
    assert (epsilons(record), "update (twin)" in billed(record)) == ([math.inf] * 3, True)


def test_what_waits_in_memory_shows_when_it_leaves(ran):
    record = ran("Later", rounds=2)
    assert epsilons(record) == [math.inf] * 3
    (said,) = record.twins.differences
    assert said.startswith("Marked.seen, in update of round 2")
    (entry,) = [e for e in record.ledger[0].entries if e.field == "update (twin)"]
    assert entry.rounds == [2], "billed from that task on, and not before"
    assert "twins.log" in entry.condition


def test_an_own_optimiser_finds_no_raw_sum(ran):
    with pytest.raises(RunError, match=r"AttributeError \(step, roads.py"):
        ran("OwnOptimiser")


def test_a_method_does_not_draw_the_noise_of_its_training(ran):
    """The noise that it draws under the name that the harness once used has nothing to do with the real one."""
    road_box.box.clear()
    ran("DrawsItsNoise")
    for moved, guess in road_box.box:
        a, b = (torch.cat([t.flatten() for t in of.values()]) for of in (moved, guess))
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.05


def test_steps_are_billed_as_they_are_made(ran):
    """Forty-one gradients were let out before the failure, and one after it."""
    record = ran("StopsHalfway")
    steps = [[e.steps for e in client.entries if e.mechanism == "dp-sgd"] for client in record.ledger]
    assert steps == [[41, 1]] * 3
    assert "training (failure)" in billed(record), "that it failed is told, too"


def test_an_absent_client_pays_for_what_it_did(ran):
    record = ran("AbsentByRecords")
    absent = record.ledger[0]
    assert (absent.epsilon, record.rounds[0].absent[0].client) == (math.inf, 0)
    assert {e.field for e in absent.entries} >= {"update (absence)", "training (failure)"}


@pytest.mark.parametrize("what", ["rows", "width", "list"])
def test_the_structure_of_a_protected_field_is_compared(what, ran):
    """Also if the server has sent all numbers before, so that each of them is known."""
    record = ran("Structure", EMBEDDINGS, set={"what": what})
    assert (epsilons(record), billed(record)) == ([math.inf] * 3, {"update (twin)"})


def test_one_bit_of_structure_is_seen_by_all_twins_together(ran):
    record = ran("Structure", EMBEDDINGS, set={"what": "dtype"}, twins="all")
    assert (epsilons(record), billed(record)) == ([math.inf] * 3, {"update (twin)"})


def test_a_task_does_not_say_what_the_mechanism_gives_back(ran, tmp_path):
    from fedaudit.runtime.folder import RunFolder

    record = ran("Replays", EMBEDDINGS)
    assert all(e == pytest.approx(1) for e in epsilons(record))
    sent = [e["e"] for e in RunFolder(tmp_path / "run").transcript.entries() if e.direction == "up"]
    assert all(float(e.norm(dim=1).mean()) > 5 for e in sent), "rows of norm 1 with noise"


@pytest.mark.parametrize("how", ["scaled", "sorted"])
def test_rows_that_are_made_of_several_records_are_billed(how, ran):
    record = ran("Mixed", EMBEDDINGS, set={"how": how})
    assert (epsilons(record), billed(record)) == ([math.inf] * 3, {"update (twin)"})


@pytest.mark.parametrize(
    ("name", "words"), [("LeavesForServer", "changes an object outside of it"), ("LeavesBeside", "keeps something of")]
)
def test_what_is_left_in_a_module_for_the_server_is_refused(name, words, ran):
    with pytest.raises(ContractError, match=words):
        ran(name)


@pytest.mark.parametrize("how", ["steps", "epochs", "batch", "given", "partition"])
def test_honest_code_that_also_sends_protected_counts_stays_finite(how, ran):
    """A literal 2 with three clients, one epoch, min(B, n) on unequal clients, FedProx with received weights."""
    more = {"partition": "dirichlet:0.3", "set": {"how": "batch"}} if how == "partition" else {"set": {"how": how}}
    record = ran("Honest", [*DP, "label_counts:eps=1"], rounds=2, **more)
    assert billed(record) == set()
    assert (record.twins.held, record.twins.tasks) == (2, 2)


def test_a_record_that_is_there_ten_times_is_said(tiny, tmp_path, fedaudit):
    privacy = dict(map(parse_policy, DP))
    record = run(tiny("fedavg", dataset="tenfold:records", model="mlp", privacy=privacy), out=tmp_path / "run")
    assert 2 <= record.data.copies <= 10
    assert any(f"one record up to {record.data.copies} times" in note for note in record.notes)
    said = " ".join(fedaudit("show", tmp_path / "run")[1].split())
    assert "for one record" in said
    assert f"twins: 1 of {len(record.data.members)} clients had a twin with other records" in said


def test_records_that_are_there_once_are_not_said(ran):
    record = ran("Honest", [*DP, "label_counts:eps=1"])
    assert (record.data.copies, record.notes) == (1, [])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("eta", math.inf, "inf is not finite; give a finite number"),
        ("B", 0, "B = 0: it is a batch size, and must be at least 1"),
        ("E", -1, "E = -1: it is a number of epochs"),
    ],
)
def test_hyper_parameters_are_checked_before_the_run(key, value, words, tiny, tmp_path):
    with pytest.raises(SettingError, match=words):
        run(tiny("fedavg", set={key: value}), out=tmp_path / "run")
    assert not (tmp_path / "run" / "record.json").exists()


def test_audit_can_trust(fedaudit):
    assert "--trust" in fedaudit("audit", "--help")[1]
