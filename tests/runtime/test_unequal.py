"""Runs in which nothing is equal: two deltas, clients of unequal size, two private fits in a task, memory written from
records, accuracy that falls, a client that is never asked, and one that drops out in the second ask."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from engines import DropEngine

from fedaudit import State, read_record, run, weighted_mean
from fedaudit.errors import ContractError
from fedaudit.privacy import dpsgd
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.asking import drops_out, participants_of, quorum_of
from fedaudit.runtime.run_record import RoundRecord
from fedaudit.runtime.scores import Accuracy, BestTestRound, GlobalScores, Utility
from fedaudit.runtime.utility import _frozen, results
from fedaudit.runtime.world import World
from fedaudit.setting import Setting
from fedaudit.wire.transcript import Transcript


def privacy(*texts):
    return dict(parse_policy(text) for text in texts)


@pytest.fixture(scope="module")
def two_deltas(tmp_path_factory):
    """Embeddings at delta 1e-3, logits at 1e-6; clients of unequal size; client 1 drops out of round 1's second ask."""
    setting = Setting.make(
        method="outside:Exchange", rounds=2, clients=3, partition="dirichlet:0.3", aux=0.1, set={"steps": 2},
        privacy=privacy("embeddings:eps=1,clip=1,delta=1e-3", "logits:eps=2,clip=1,delta=1e-6"),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("deltas") / "run"
    return run(setting, out=folder, engine=DropEngine({(1, 1, 1)})), folder


def test_of_two_deltas_the_smallest_is_the_clients(two_deltas):
    record, _ = two_deltas
    assert [row.delta for row in record.ledger] == [1e-6] * 3
    for row in record.ledger:  # calibrated at its own delta, composed at the client's
        entry = next(e for e in row.entries if e.kind == "embeddings")
        assert entry.delta == 1e-3
        assert gaussian_epsilon(1 / entry.noise_multiplier, 1e-3) == pytest.approx(1.0)
        mu = math.sqrt(len(entry.rounds)) / entry.noise_multiplier
        assert row.by_kind["embeddings"] == pytest.approx(gaussian_epsilon(mu, 1e-6))


def test_each_client_has_a_delta_of_its_own_size(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=1, partition="dirichlet:0.3", privacy=privacy("embeddings:eps=1,clip=1"))
    record = run(setting, out=tmp_path / "a")
    sizes = [World(setting).count(k) for k in range(3)]
    assert len(set(sizes)) == 3
    assert [(row.n, row.delta) for row in record.ledger] == [(n, pytest.approx(1 / n)) for n in sizes]


def test_who_drops_out_of_the_second_ask_is_seen_by_nobody_there(two_deltas):
    """Client 1 sent its embeddings in the first ask and failed in the second, whose message it had received."""
    record, folder = two_deltas
    assert [(a.client, a.ask) for a in record.rounds[0].absent] == [(1, 1)]
    entries = list(Transcript(folder / "transcript").entries())
    assert {e.client for e in entries if (e.round, e.ask, e.direction) == (1, 1, "down")} == {0, 1, 2}
    assert {e.client for e in entries if (e.round, e.ask, e.direction) == (1, 1, "up")} == {0, 2}
    of = {row.client: {e.kind: e.rounds for e in row.entries} for row in record.ledger}
    assert of[1]["embeddings"] == [1, 2], "what was released before it dropped out is paid"
    assert of[1]["logits"] == [2], "what it never sent is not"
    assert of[0]["logits"] == [1, 2]


def test_a_dropped_clients_state_is_that_of_its_last_reply(two_deltas):
    """It trained in the first ask of round 1 and answered; round 2 goes on from there."""
    _, folder = two_deltas
    shared = [e for e in Transcript(folder / "transcript").entries() if e.client == 1 and e.message == "Shared"]
    assert [e.round for e in shared] == [1, 2]
    assert read_record(folder).status == "done"


def test_two_private_fits_share_neither_noise_nor_sample(tiny, tmp_path):
    seeds = []
    real = dpsgd.fit_private

    def watched(*args, **options):
        seeds.append((options["rng"].initial_seed(), options["noise"].initial_seed()))
        return real(*args, **options)

    setting = tiny("outside:TwiceTrained", rounds=2, clients=2, privacy=privacy("training:noise=1,clip=1"))
    with mock.patch.object(dpsgd, "fit_private", watched):
        run(setting, out=tmp_path / "a")
    assert len(seeds) == 2 * 2 * 2, "two fits of two clients in two rounds"
    assert len({seed for pair in seeds for seed in pair}) == 2 * len(seeds)


def test_memory_written_from_records_is_paid_under_dp_sgd(tiny, tmp_path):
    """Hoarder keeps its records in memory and sends them, a later ask, as if they came from the model."""
    setting = tiny("outside:Hoarder", rounds=1, clients=2, privacy=privacy("training:noise=1,clip=1"))
    for row in run(setting, out=tmp_path / "a").ledger:
        assert row.by_kind["weights"] == math.inf
        assert row.epsilon == math.inf


def test_memory_written_before_the_first_look_is_free_under_dp_sgd(tiny, tmp_path):
    """Exchange remembers the rounds, then looks at its records: its weights are post-processing all the same."""
    setting = tiny("outside:Exchange", rounds=2, clients=2, privacy=privacy("training:noise=1,clip=1"))
    for row in run(setting, out=tmp_path / "a").ledger:
        assert row.by_kind["weights"] == 0
        assert row.by_kind["embeddings"] == math.inf


# --- results --------------------------------------------------------------------------------------------------------


def utility(test, validation):
    accuracy = Accuracy(accuracy=test, low=0, high=1, n=9)
    return Utility(global_=GlobalScores(test=accuracy, validation=validation))


def rounds(*utilities):
    sent = dict.fromkeys(("up_payload", "up_wire", "down_payload", "down_wire"), 0)
    return [RoundRecord(round=t, participants=[0], utility=u, wall_s=1, **sent) for t, u in enumerate(utilities, 1)]


def test_a_run_that_gets_worse_is_told_by_its_last_round():
    found = results(rounds(utility(0.5, 0.4), utility(0.9, 0.6), utility(0.7, 0.8), utility(0.3, 0.2)))
    assert (found.last.round, found.last.global_.test.accuracy) == (4, 0.3)
    assert (found.chosen.round, found.chosen.global_.test.accuracy) == (3, 0.7)
    assert found.best_test_round == BestTestRound(round=2, accuracy=0.9)


def test_of_equal_rounds_the_earliest_is_chosen():
    found = results(rounds(*[utility(0.5, 0.4)] * 3))
    assert (found.chosen.round, found.best_test_round.round) == (1, 1)


def test_rounds_that_were_not_evaluated_are_passed_over():
    assert results(rounds(utility(0.5, 0.4), None)).last.round == 1


# --- who takes part ---------------------------------------------------------------------------------------------------


def test_a_client_that_is_never_asked_spends_nothing_and_is_still_evaluated(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=1, clients=4, participation=0.5, eval_clients=True)
    record = run(setting, out=tmp_path / "a")
    asked = record.rounds[0].participants
    assert len(asked) == 2
    assert [row.client for row in record.ledger] == asked
    assert len(record.rounds[0].utility.clients.global_test.each) == 4
    assert {p.name for p in (tmp_path / "a" / "models").glob("client*")} == {
        f"client-{k:06d}.safetensors" for k in asked
    }


@pytest.mark.parametrize(
    ("quorum", "participants", "needed"), [(0.5, 5, 3), (0.5, 4, 2), (0.34, 3, 2), (0.01, 7, 1), (1.0, 3, 3)]
)
def test_the_quorum_is_rounded_up(quorum, participants, needed):
    assert quorum_of(Setting.make(quorum=quorum), list(range(participants))) == needed


@pytest.mark.parametrize(("share", "clients", "wanted"), [(0.1, 3, 1), (0.5, 5, 2), (0.8, 5, 4), (1.0, 3, 3)])
def test_the_share_of_participants_is_rounded_and_never_zero(share, clients, wanted):
    setting = Setting.make(participation=share, clients=clients)
    rounds = [participants_of(setting, t) for t in range(1, 9)]
    assert {len(ids) for ids in rounds} == {wanted}
    assert all(ids == sorted(set(ids)) for ids in rounds)
    assert wanted in (1, clients) or len({tuple(ids) for ids in rounds}) > 1


def test_drop_outs_are_as_frequent_as_set_and_differ_by_round_and_ask():
    setting = Setting.make(dropout=0.3)
    drops = [drops_out(setting, k, t, ask) for k in range(20) for t in range(20) for ask in range(5)]
    assert abs(sum(drops) / 2000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 2000)
    by_ask = torch.tensor(drops).reshape(20, 20, 5)
    assert (by_ask != by_ask[:, :1]).any()
    assert (by_ask != by_ask[:, :, :1]).any()
    assert (by_ask != by_ask[:1]).any()


# --- a mean of unequal clients ----------------------------------------------------------------------------------------


def test_a_weighted_mean_of_unequal_clients_by_hand():
    """Weights 1 and 3: 0.25 a + 0.75 b; counters 5 and 10: 8.75, rounded to 9."""
    a = State({"w": torch.tensor([0.0, 4.0]), "n": torch.tensor(5)}, buffers=["n"])
    b = State({"w": torch.tensor([8.0, 0.0]), "n": torch.tensor(10)}, buffers=["n"])
    mean = weighted_mean({7: b, 2: a}, {2: 1, 7: 3})
    assert mean["w"].tolist() == [6.0, 1.0]
    assert mean["n"].item() == 9
    assert mean["n"].dtype == torch.int64
    assert set(mean.buffers) == {"n"}


def test_who_did_not_answer_is_no_part_of_the_mean():
    a = State({"w": torch.tensor([1.0])})
    assert weighted_mean({2: a}, {2: 1, 7: 3})["w"].tolist() == [1.0]


def test_evaluating_a_model_leaves_it_as_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).train()
    tried = _frozen(model, "predictor")
    assert (model.training, tried.training, tried[1].training) == (True, False, False)
    assert tried[0].weight is not model[0].weight
    assert torch.equal(tried[0].weight, model[0].weight)
    with pytest.raises(ContractError, match=r"Method\.personal returned a dict"):
        _frozen({}, "personal")
