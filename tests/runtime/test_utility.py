"""More clients than are evaluated one by one: who is looked at, what is computed once, and what a run costs."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, pstdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedaudit import Record, Setting, read_record, registry, run
from fedaudit.cli.listing import summary
from fedaudit.data.datasets import load
from fedaudit.errors import ContractError, DataError
from fedaudit.methods.references.local import Local
from fedaudit.reports.runs import grouped, read_runs
from fedaudit.reports.summary_rows import rows_of
from fedaudit.rng import generator
from fedaudit.runtime import utility
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.run_record import RoundRecord
from fedaudit.runtime.scores import Accuracy, BestTestRound, GlobalScores, Utility
from fedaudit.runtime.task import ClientState, compute
from fedaudit.runtime.utility import _frozen, evaluate, hits, results
from fedaudit.runtime.world import World, world_of
from fedaudit.stats import sampled_mean
from fedaudit.wire.codec import decode

FEW = {
    "method": "fedavg", "dataset": "digits", "model": "mlp", "clients": 8, "participation": 0.25, "rounds": 2,
    "partition": "iid", "device": "cpu", "set": {"E": 3, "B": 16, "eta": 0.1},
}  # fmt: skip


# --- who is looked at -----------------------------------------------------------------------------------------------


def test_up_to_a_thousand_clients_are_all_looked_at():
    assert utility.looked_at(0, 1_000) == list(range(1_000))


def test_of_more_a_thousand_are_drawn_by_a_generator_of_that_name():
    found = utility.looked_at(5, 10_000)
    order = torch.randperm(10_000, generator=generator(5, "evaluation", "clients"))
    assert found == sorted(order[:1_000].tolist())
    assert len(set(found)) == 1_000
    assert found != utility.looked_at(6, 10_000)
    assert 4_500 < np.mean(found) < 5_500, "from all of them, not the first"


# --- the interval ---------------------------------------------------------------------------------------------------


def test_the_interval_by_hand():
    """0.2, 0.4, 0.6, 0.8 of 16: mean 0.5; s^2 = (0.09 + 0.01 + 0.01 + 0.09) / 3 = 0.0667; s / sqrt 4 = 0.12910;
    times sqrt(1 - 4/16) = 0.11180; times Student's 97.5 % point with 3 degrees of freedom, 3.18245: 0.35581."""
    assert sampled_mean([0.2, 0.4, 0.6, 0.8], 16) == pytest.approx((0.14419, 0.85581), abs=1e-5)


def test_with_all_of_them_the_interval_is_a_point():
    assert sampled_mean([0.2, 0.4, 0.6, 0.8], 4) == (0.5, 0.5)


def test_equal_values_do_not_make_a_point_of_it():
    """100 times 0.4 of 10,000: 1 - 0.025^(1/100) = 3.622 % of the clients may have other values, from 0 to 1."""
    low, high = sampled_mean([0.4] * 100, 10_000)
    assert (low, high) == pytest.approx((0.4 - 0.03622 * 0.4, 0.4 + 0.03622 * 0.6), abs=1e-5)
    assert sampled_mean([0.4] * 99, 100) == pytest.approx((0.396, 0.406)), "one of a hundred was not drawn"


def test_an_interval_of_accuracies_stays_within_0_and_1():
    low, high = sampled_mean([0.0, 0.0, 1.0], 1_000)
    assert (low, high) == (0.0, 1.0)


# --- what is computed once ------------------------------------------------------------------------------------------


@pytest.fixture
def on_the_test_set(monkeypatch):
    """A list that grows whenever a model is tried on the common test set (359 digits, more than anybody holds)."""
    calls: list[int] = []
    real = utility.right

    def right(model, x, y, *rest):
        if len(y) == 359:
            calls.append(len(y))
        return real(model, x, y, *rest)

    monkeypatch.setattr(utility, "right", right)
    return calls


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 1 + 2 + 1),  # the global model, the two that trained, the start of all others
        ({"model": "mlp:4,mlp@0.5:4", "server_model": "mlp", "method": "local"}, 2 + 2),  # a start of each architecture
        ({"init": "own"}, 1 + 8),  # every client's start is another model
    ],
)
def test_clients_that_were_never_asked_are_scored_once(on_the_test_set, tmp_path, values, expected):
    record = run(Setting.make(**{**FEW, "rounds": 1, **values}), out=tmp_path / "a")
    assert len(on_the_test_set) == expected
    asked = set(record.rounds[0].participants)
    each = record.result.last.clients.global_test.each
    if "model" not in values:
        starts = {score for k, score in enumerate(each) if k not in asked}
        assert (len(starts) == 1) == (values == {}), "one model, one score"


def test_what_did_not_change_is_not_evaluated_again(on_the_test_set, tmp_path):
    """Three rounds of two clients: the global model and those two each time, and the start in the first."""
    record = run(Setting.make(**{**FEW, "rounds": 3}), out=tmp_path / "a")
    assert len(on_the_test_set) == 3 * (1 + 2) + 1
    assert len(record.result.last.clients.global_test.each) == 8


def by_hand(folder: Path) -> dict[str, list[float]]:
    """Each client's own model, from the checkpoint or as it starts, on the sets that it is tried on."""
    world, store = World(read_record(folder).setting), Store(folder / "checkpoint")
    store.peek()
    found: dict[str, list[float]] = {"global_test": [], "local_test": [], "validation": []}
    for k in range(world.setting.clients):
        model = world.fresh_model(k)
        if (state := store.client(k)) is not None:
            model.load_state_dict(decode(state, ClientState).model)
        sets = {"global_test": world.test, "local_test": world.nonmembers(k), "validation": world.validation(k)}
        with torch.no_grad(), compute(world):
            for name, (x, y) in sets.items():
                found[name].append(int((model.eval()(x).argmax(1) == y).sum()) / len(y))
    return found


@pytest.mark.parametrize("init", ["common", "own"])
def test_below_that_number_every_client_is_scored_by_its_own_model(tmp_path, init):
    """As if each were opened and tried by itself. The record says nothing of a sample."""
    record = run(Setting.make(**FEW, init=init), out=tmp_path / "a")
    found = record.result.last.clients
    for name, each in by_hand(tmp_path / "a").items():
        assert getattr(found, name).each == each
        assert getattr(found, name).sampled is None
    assert record.result.last.global_.local_test.sampled is None
    assert len(set(found.global_test.each)) > 2, "a test that could not tell the clients apart"
    assert "sampled" not in (tmp_path / "a" / "record.json").read_text()
    assert not any("drawn" in note for note in record.notes)


# --- the common test set with a client's own mix of classes ---------------------------------------------------------


def test_a_test_set_is_weighted_by_a_clients_own_classes():
    """Class 0: 1 of 2 right; class 1: 3 of 3; class 2: 0 of 1. With 6 and 2 records of classes 0 and 2 the accuracy is
    (6 x 1/2 + 2 x 0) / 8 = 0.375; with class 1 alone it is 1. Class 3 has no test records and does not count."""
    y = torch.tensor([0, 0, 1, 1, 1, 2])
    is_right = torch.tensor([True, False, True, True, True, False])
    assert utility.matched(is_right, y, torch.tensor([6, 0, 2, 0])) == 0.375
    assert utility.matched(is_right, y, torch.tensor([0, 9, 0, 0])) == 1.0
    assert utility.matched(is_right, y, torch.tensor([6, 0, 2, 40])) == 0.375
    assert utility.matched(is_right, y, torch.tensor([0, 0, 0, 5])) is None


ALL_TRAIN = {**FEW, "clients": 3, "participation": 1.0, "partition": "classes:3", "holdout": 0.0, "validation": 0.0}


def test_without_held_out_records_clients_are_tried_by_their_own_mix(tmp_path):
    """Ten classes, three clients with classes of their own. By hand, from the models of the run."""
    record = run(Setting.make(**{**ALL_TRAIN, "method": "local"}), out=tmp_path / "a")
    found, world = record.result.last.clients, World(record.setting)
    x, y = world.test
    for k, told in enumerate(found.matched_test.each):
        model = world.build(world.archs[k])
        model.load_state_dict(load_file(tmp_path / "a" / "models" / f"client-{k:06d}.safetensors"))
        named = model.eval()(x).argmax(1) == y
        by_hand = fmean(named[y == c].double().mean().item() for c in world.members(k)[1].tolist())
        assert told == pytest.approx(by_hand)
        assert told > found.global_test.each[k] + 0.3, "it knows its own classes"
    assert found.matched_test.mean == pytest.approx(fmean(found.matched_test.each))
    assert found.local_test is None
    (line,) = (line for line in summary(record) if "client models, own classes' mix" in line)
    assert f" {100 * found.matched_test.mean:.2f} % ± " in line


def test_points_of_a_round_are_tried_by_the_own_mix_too(tmp_path):
    record = run(Setting.make(**{**ALL_TRAIN, "method": "fedproto"}), out=tmp_path / "a")
    last = record.result.last
    assert last.clients.matched_test == last.points["prototypes"].matched_test != last.points["classifier"].matched_test
    lines = [line for line in summary(record) if "own classes' mix" in line]
    assert len(lines) == 4
    for point, sets in last.points.items():
        told = f"client models, {point}: common {100 * sets.global_test.mean:.2f} % ± "
        (line,) = (line for line in lines if told in line)
        assert f", own classes' mix {100 * sets.matched_test.mean:.2f} % ± " in line


def test_clients_that_were_never_asked_are_tried_by_their_own_mix_too(tmp_path):
    """They share a start, so the common test set gives them one accuracy; their own classes weigh it apart."""
    asked_few = {**ALL_TRAIN, "clients": 8, "participation": 0.25, "rounds": 1}
    record = run(Setting.make(**asked_few), out=tmp_path / "a")
    found, world = record.result.last.clients, World(record.setting)
    never = [k for k in range(8) if k not in record.rounds[0].participants]
    assert len(found.matched_test.each) == 8
    assert len({found.global_test.each[k] for k in never}) == 1
    x, y = world.test
    named = world.fresh_model(never[0]).eval()(x).argmax(1) == y
    for k in never:
        by_hand = fmean(named[y == c].double().mean().item() for c in world.members(k)[1].tolist())
        assert found.matched_test.each[k] == pytest.approx(by_hand)
    assert len({found.matched_test.each[k] for k in never}) > 1


def test_with_held_out_records_nobody_is_tried_by_its_mix(tmp_path):
    run(Setting.make(**{**FEW, "rounds": 1}), out=tmp_path / "a")
    assert "matched_test" not in (tmp_path / "a" / "record.json").read_text()


def test_whoever_holds_nothing_out_is_not_tried_by_its_mix_if_others_do():
    """A mean over a few clients alone would stand beside those of all."""
    world = World(Setting.make(**FEW))
    shards = [dataclasses.replace(shard, nonmembers=shard.nonmembers[:0]) for shard in world.federation.shards[:1]]
    world.federation = dataclasses.replace(world.federation, shards=(*shards, *world.federation.shards[1:]))
    opened = SimpleNamespace(model=world.fresh_model(0))
    found = utility._client_scores(world, 0, lambda k: opened, {}, None)
    assert set(found[utility.DEPLOYED]) == {"global_test", "validation"}


def test_everybody_has_a_mix(monkeypatch):
    """Of many clients a sample is looked at; the mean of what it has is an estimate for all of them."""
    monkeypatch.setattr(utility, "EVERY_CLIENT", 5)
    assert utility._holders(World(Setting.make(**{**FEW, "holdout": 0.0})), "matched_test") == 8


def test_a_mix_leaves_canaries_out():
    """Their labels are drawn at random."""
    world = World(Setting.make(**{**FEW, "canaries": 4, "holdout": 0.0}))
    for k in range(2):
        assert world.federation.labels(k).tolist() == world.federation.candidates(k)[1].tolist()
        assert len(world.federation.labels(k)) < world.count(k)


# --- some of many ---------------------------------------------------------------------------------------------------


@pytest.fixture
def both(tmp_path, monkeypatch):
    """The same run of eight clients, of whom all are looked at, and of whom five are."""
    whole = run(Setting.make(**FEW), out=tmp_path / "whole")
    monkeypatch.setattr(utility, "EVERY_CLIENT", 5)
    return whole, run(Setting.make(**FEW), out=tmp_path / "some"), tmp_path / "some"


def test_a_sample_has_the_scores_of_those_clients(both):
    whole, some, _ = both
    drawn = utility.looked_at(0, 8)
    assert len(drawn) == 5
    assert some.transcript_digest == whole.transcript_digest
    for all_rows, rows in zip(whole.rounds, some.rounds, strict=True):
        everybody, found = all_rows.utility, rows.utility
        for name in ("global_test", "local_test", "validation"):
            each = getattr(everybody.clients, name).each
            assert getattr(found.clients, name).each == [each[k] for k in drawn]
        # The global model sees the records of several clients in one batch, so that a near tie may fall otherwise: one
        # record of the 30 that a client holds out, and one of all that are for validation.
        each = everybody.global_.local_test.each
        assert found.global_.local_test.each == pytest.approx([each[k] for k in drawn], abs=1 / 30)
        assert found.global_.validation == pytest.approx(everybody.global_.validation, abs=1 / 90)


def test_the_record_says_how_many_of_how_many(both):
    _, some, folder = both
    written = read_record(folder)
    for of in (some.result.last, written.result.last):
        rows = [of.clients.global_test, of.clients.local_test, of.clients.validation, of.global_.local_test]
        for row in rows:
            assert (row.sampled.looked_at, row.sampled.of) == (5, 8)
            assert (row.sampled.low, row.sampled.high) == pytest.approx(sampled_mean(row.each, 8))
            assert row.mean == pytest.approx(np.mean(row.each))


def test_it_is_shown_and_noted_in_reports(both):
    _, some, folder = both
    seen = some.result.last.clients.global_test.sampled
    lines = [line for line in summary(some) if "client models, common test set" in line]
    assert "over 5 of 8 clients" in lines[0]
    assert f"[{100 * seen.low:.2f} %, {100 * seen.high:.2f} %]" in lines[0]
    note = "eans over clients are from 5 of 8 clients, drawn at random"
    assert sum(note in line for line in some.notes) == 1, "once, not in every round"
    (row,) = rows_of(grouped(read_runs(folder)[0]))
    assert any(note in line for line in row.notes)


def test_without_client_models_the_global_one_is_noted_too():
    row = {"mean": 0.5, "std": 0.1, "each": [0.5], "sampled": {"looked_at": 1, "of": 9, "low": 0.1, "high": 0.9}}
    test = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 10}
    found = Utility.model_validate({"global": {"test": test, "local_test": row}})
    assert "1 of 9 clients" in utility.sampling_note(found)[0]
    assert utility.sampling_note(Utility()) == []


def test_batches_count_what_each_client_has_right(monkeypatch):
    """Client 2 holds nothing out, and a batch ends within a client's records."""
    world = World(Setting.make(**{**FEW, "seed": 3}))
    shards = list(world.federation.shards)
    shards[2] = dataclasses.replace(shards[2], nonmembers=shards[2].nonmembers[:0])
    world.federation = dataclasses.replace(world.federation, shards=tuple(shards))
    monkeypatch.setattr(utility, "BATCH", 50)
    model, some = world.fresh_model(0), [0, 2, 3, 7]
    found = utility._counts_in_batches(world, model, some, "nonmembers")
    alone = utility._counts_one_by_one(world, model, some, "nonmembers")
    assert [n for _, n in found] == [len(shards[k].nonmembers) for k in some]
    assert found[1] == (0, 0)
    assert len({right for right, _ in alone}) > 2
    for (right, _), (right_alone, _) in zip(found, alone, strict=True):
        assert right == pytest.approx(right_alone, abs=1), "other batches may round a near tie otherwise"
    monkeypatch.setattr(utility, "EVERY_CLIENT", 5)
    assert utility._holders(world, "global_test") == 8
    assert utility._holders(world, "local_test") == 7, "the mean is over those who hold records out"


# --- what it costs --------------------------------------------------------------------------------------------------

RUN = """
import json, re, resource, sys, time
from pathlib import Path
from fedaudit import run
begun = time.perf_counter()
record = run(method="fedavg", dataset=f"npz:{sys.argv[1]}", clients=int(sys.argv[2]), participation=0.01, rounds=3,
             device="cpu", out=sys.argv[3])
used = resource.getrusage(resource.RUSAGE_SELF)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())  # of this program alone
print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "wall_s": time.perf_counter() - begun,
                  "peak_kb": int(peak[1]), "status": record.status, "notes": record.notes}))
"""


def measured(records: Path, clients: int) -> dict:
    out = records.parent / str(clients)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(records), str(clients), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_ten_thousand_clients_take_a_minute_and_hardly_more_memory_than_one_thousand(tmp_path):
    """Default options, 1 % of the clients in each of three rounds, on 150,000 images of 8 x 8 (some 13 records each).
    60 s of processor time: a busy machine makes that a longer wait, of at most 5 minutes here."""
    rng = np.random.default_rng(0)
    centres = rng.uniform(0, 255, (10, 1, 8, 8))
    y, test_y = rng.integers(0, 10, 150_000), rng.integers(0, 10, 2_000)
    drawn = [
        np.clip(centres[of] + rng.normal(0, 60, (len(of), 1, 8, 8)), 0, 255).astype(np.uint8) for of in (y, test_y)
    ]
    np.savez(tmp_path / "records.npz", x=drawn[0], y=y, test_x=drawn[1], test_y=test_y)
    few, many = measured(tmp_path / "records.npz", 1_000), measured(tmp_path / "records.npz", 10_000)
    assert few["status"] == many["status"] == "done"
    assert any("1,000 of 10,000 clients" in note for note in many["notes"])
    assert many["cpu_s"] < 60
    assert many["wall_s"] < 300
    assert many["peak_kb"] < 1.5 * few["peak_kb"]


# --- further points of a round that a method offers for evaluation: scored as the deployed models are, beside them.


class TwoPoints(Local):
    """Deploys what it trained; offers that again, and the same model with its classes turned round."""

    def points(self, client):
        turned = copy.deepcopy(client.model)
        for p in turned.classifier.parameters():
            p.data = p.data.flip(0)
        return {"turned": turned, "trained": client.model}


class Uneven(Local):
    def points(self, client):
        return {"early": client.model} if client.id == 0 else {}


def setting(cls):
    name = f"{__name__}:{cls.__name__}"
    return Setting.make(method=name, rounds=1, clients=3, partition="dirichlet:0.3", set={"E": 2})


def test_points_are_scored_beside_what_is_deployed(tmp_path, fedaudit):
    utility = run(setting(TwoPoints), out=tmp_path / "a").result.last
    assert set(utility.points) == {"trained", "turned"}
    assert utility.points["trained"] == utility.clients, "one and the same model"
    turned = utility.points["turned"]
    assert turned.global_test.each != utility.clients.global_test.each
    for scores in (turned.global_test, turned.local_test, turned.validation):
        assert scores.mean == pytest.approx(fmean(scores.each))
        assert scores.std == pytest.approx(pstdev(scores.each))
    _, shown, _ = fedaudit("show", tmp_path / "a")
    assert "client models, turned: common" in shown


def test_a_point_that_only_some_clients_offer_is_refused(tmp_path):
    with pytest.raises(ContractError, match=r"different names for different clients .*early"):
        run(setting(Uneven), out=tmp_path / "a")


def test_a_point_is_a_module(tmp_path, monkeypatch):
    monkeypatch.setattr(TwoPoints, "points", lambda self, client: {"early": torch.zeros(1)})
    with pytest.raises(ContractError, match="points: early returned a Tensor"):
        run(setting(TwoPoints), out=tmp_path / "a")


class Told(Local):
    """Offers each client's model with the number of the round in its last bias: what the server knows and no client."""

    def round(self, s, server, cohort):
        super().round(s, server, cohort)
        return After(server.t)

    def next_points(self, s, client):
        seen.append((s.t, client.id))
        changed = copy.deepcopy(client.model)
        changed.classifier.bias.data[s.t] += 1e6
        return {"told": changed}


class After(Record):
    t: int


seen = []


def test_a_point_of_the_servers_new_state_is_scored_anew_in_each_round(tmp_path):
    """One of three clients is asked in a round; the others are as they were, and their point is another one all the
    same: the class whose number is the round's wins for every record, so that the accuracy is that class's share."""
    seen.clear()
    name = f"{__name__}:Told"
    record = run(
        Setting.make(method=name, rounds=2, clients=3, partition="iid", participation=0.34), out=tmp_path / "a"
    )
    world = World(record.setting)
    for t, row in enumerate(record.rounds, 1):
        share = float((world.test[1] == t).double().mean())
        assert row.utility.points["told"].global_test.mean == pytest.approx(share)
    assert seen == [(t, k) for t in (1, 2) for k in range(3)]


@pytest.mark.parametrize("method", ["lgfedavg", "fedgh", "fedgen_lg"])
def test_the_new_head_is_the_servers(method, tiny, tmp_path, monkeypatch):
    """HtFLlib's point of evaluation: the client's encoder after training under the head that it will get next."""
    cls, found = registry.find(method), {}
    of = cls.next_points

    def kept(self, s, client):
        found[client.id] = of(self, s, client)["new head"].state_dict(), client.model.state_dict(), s
        return of(self, s, client)

    monkeypatch.setattr(cls, "next_points", kept)
    record = run(tiny(method, rounds=1, eval_clients=True), out=tmp_path / "a")
    assert record.result.last.points.keys() == {"new head"}
    for new, own, s in found.values():
        head = getattr(s, "theta_g", None) or s.theta
        assert head.keys() == {"classifier.weight", "classifier.bias"}
        for tensor, value in new.items():
            assert torch.equal(value, head[tensor] if tensor in head else own[tensor])
        assert not torch.equal(new["classifier.weight"], own["classifier.weight"])


# --- the global model on the test records of each domain: the columns of a table such as FedAF's Table 2.


class Dark(torch.nn.Module):
    """Says class 0 for a dark image and class 1 for a light one."""

    def forward(self, x):
        light = x.mean((1, 2, 3))
        return torch.stack([-light, light], 1)


def saved(folder):
    """Two domains of 40 records: in `plain` light means class 1, in `turned` every second record is the other way."""
    y = np.arange(80) % 2
    turned = np.arange(80) >= 40
    light = np.where(turned & (np.arange(80) % 4 < 2), 1 - y, y)
    x = np.repeat(light * 255, 16).reshape(80, 1, 4, 4).astype(np.uint8)
    domain = np.where(turned, "turned", "plain")
    np.savez(folder / "d.npz", x=x, y=y, domain=domain)
    return f"npz:{folder / 'd.npz'}"


def test_each_domain_has_its_own_accuracy(tmp_path):
    """`plain` is right throughout, `turned` on half of its 8 test records; the whole test set on three quarters."""
    setting = Setting.make(dataset=saved(tmp_path), clients=2, partition="domain", aux=0.0)
    world = world_of(setting.model_dump_json())
    domain = world.federation.dataset.test_domain
    names = world.federation.dataset.domain_names
    found = evaluate(world, Dark(), None).global_
    assert list(found.test_by_domain) == list(names) == ["plain", "turned"]
    assert found.test_by_domain["plain"].accuracy == 1
    x, y = world.test
    right = (Dark()(x).argmax(1) == y)[domain == 1].double().mean().item()
    assert 0 < right < 1
    assert found.test_by_domain["turned"].accuracy == pytest.approx(right)
    assert [of.n for of in found.test_by_domain.values()] == [int((domain == d).sum()) for d in (0, 1)]
    assert 0 < found.test_by_domain["turned"].low < right < found.test_by_domain["turned"].high < 1


def test_the_record_has_them_and_data_without_domains_does_not(tmp_path):
    values = {"clients": 2, "rounds": 1, "model": "mlp", "aux": 0.0}
    with_domains = run(Setting.make(dataset=saved(tmp_path), partition="domain", **values), out=tmp_path / "a")
    assert set(with_domains.rounds[0].utility.global_.test_by_domain) == {"plain", "turned"}
    without = run(Setting.make(dataset="digits", **values), out=tmp_path / "b")
    assert "test_by_domain" not in without.rounds[0].utility.global_.model_dump()


def test_domains_of_the_test_set_are_held_against_it(tmp_path):
    d = load(saved(tmp_path))
    with pytest.raises(DataError, match="test_domain has to be int64"):
        type(d)(d.name, d.x, d.y, d.test_x, d.test_y, d.class_names, d.domain, d.domain_names, d.test_domain[:-1])


# --- the global model on each client's own held-out records: in the record, in `show`, in a report's table.


SETTING = {"device": "cpu", "clients": 4, "partition": "dirichlet:0.2", "rounds": 1, "set": {"eta": 0.1, "B": 16}}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "a"
    return folder, run(Setting.make(method="fedavg", **SETTING), out=folder)


def test_it_is_the_published_model_on_every_clients_own_records(done):
    """Recomputed from the published file: per client right / held out, then the plain mean over clients."""
    folder, record = done
    world = World(record.setting)
    model = world.build("cnn")
    model.load_state_dict(load_file(folder / "models" / "global.safetensors"))
    each = []
    for k in range(4):
        x, y = world.federation.nonmembers(k)
        each.append((model(x).argmax(1) == y).double().mean().item())
    found = record.result.last.global_.local_test
    assert found.each == pytest.approx(each)
    assert found.mean == pytest.approx(sum(each) / 4)
    assert found.std == pytest.approx((sum((a - sum(each) / 4) ** 2 for a in each) / 4) ** 0.5)
    assert found.each != record.result.last.clients.local_test.each, "the clients trained on from it"
    assert len(set(each)) > 1, "a test that could not tell one client's records from another's"


def test_it_needs_no_client_to_be_opened(tmp_path, done):
    record = run(Setting.make(method="fedavg", **SETTING, eval_clients=False), out=tmp_path / "a")
    assert record.result.last.global_.local_test == done[1].result.last.global_.local_test


def test_it_is_shown_under_its_own_name(done):
    mean = done[1].result.last.global_.local_test.mean
    lines = [line for line in summary(done[1]) if "global model, own held-out sets" in line]
    assert lines
    assert f"{100 * mean:.2f}" in lines[0].replace("%", "")
    (row,) = rows_of(grouped(read_runs(done[0])[0]))
    assert row.cells["global_own"].value == mean
    assert row.cells["own"].value == done[1].result.last.clients.local_test.mean != mean


def test_without_a_global_model_or_held_out_records_there_is_none(tmp_path):
    local = run(Setting.make(method="local", **SETTING), out=tmp_path / "a")
    assert local.result.last.global_ is None
    (row,) = rows_of(grouped(read_runs(tmp_path / "a")[0]))
    assert (row.cells["global_own"].value, row.cells["global_own"].reason) == (None, "not measured")
    nothing = run(Setting.make(method="fedavg", **SETTING, holdout=0), out=tmp_path / "b")
    assert nothing.result.last.global_.local_test is None
    assert not any("own held-out sets" in line for line in summary(read_record(tmp_path / "b")))


# --- unequal clients, deltas and rounds


def scores(test, validation):
    accuracy = Accuracy(accuracy=test, low=0, high=1, n=9)
    return Utility(global_=GlobalScores(test=accuracy, validation=validation))


def rounds(*utilities):
    sent = dict.fromkeys(("up_payload", "up_wire", "down_payload", "down_wire"), 0)
    return [RoundRecord(round=t, participants=[0], utility=u, wall_s=1, **sent) for t, u in enumerate(utilities, 1)]


def test_a_run_that_gets_worse_is_told_by_its_last_round():
    found = results(rounds(scores(0.5, 0.4), scores(0.9, 0.6), scores(0.7, 0.8), scores(0.3, 0.2)))
    assert (found.last.round, found.last.global_.test.accuracy) == (4, 0.3)
    assert (found.chosen.round, found.chosen.global_.test.accuracy) == (3, 0.7)
    assert found.best_test_round == BestTestRound(round=2, accuracy=0.9)


def test_of_equal_rounds_the_earliest_is_chosen():
    found = results(rounds(*[scores(0.5, 0.4)] * 3))
    assert (found.chosen.round, found.best_test_round.round) == (1, 1)


def test_rounds_that_were_not_evaluated_are_passed_over():
    assert results(rounds(scores(0.5, 0.4), None)).last.round == 1


def test_evaluating_a_model_leaves_it_as_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).train()
    tried = _frozen(model, "predictor")
    assert (model.training, tried.training, tried[1].training) == (True, False, False)
    assert tried[0].weight is not model[0].weight
    assert torch.equal(tried[0].weight, model[0].weight)
    with pytest.raises(ContractError, match=r"Method\.personal returned a dict"):
        _frozen({}, "personal")


# --- rounds, asks and fits that differ


def test_clients_are_scored_on_what_they_held_out(tiny, tmp_path):
    """By hand from the published models; the second round's scores are not those of the first."""
    setting = tiny("local", rounds=2, partition="dirichlet:0.3", set={"eta": 0.1, "B": 16}, eval_clients=True)
    record = run(setting, out=tmp_path / "a")
    world = World(setting)
    told = [row.utility.clients.local_test.each for row in record.rounds]
    assert told[0] != told[1]
    for k in range(3):
        model = world.build(world.archs[k])
        model.load_state_dict(load_file(tmp_path / "a" / "models" / f"client-{k:06d}.safetensors"))
        x, y = world.nonmembers(k)
        inside = world.members(k)
        assert told[1][k] == pytest.approx(hits(model.eval(), x, y) / len(y))
        assert told[1][k] != pytest.approx(hits(model, *inside) / len(inside[1])), "not what it trained on"


def test_only_clients_of_another_version_are_evaluated_again(monkeypatch):
    """Three clients. Then client 1 has another state; then points that follow the server's state are asked for."""
    opened = []
    world = SimpleNamespace(setting=SimpleNamespace(seed=0, clients=3))

    def scores(world, k, open_client, starts, next_points):
        opened.append(k)
        return {utility.DEPLOYED: (k, "deployed", len(opened)), "aligned": (k, "aligned")}

    monkeypatch.setattr(utility, "_client_scores", scores)
    monkeypatch.setattr(utility, "_over_clients", lambda world, each: SimpleNamespace(each=list(each)))
    monkeypatch.setattr(utility, "_points", lambda each: ["aligned"])
    monkeypatch.setattr(utility, "Utility", SimpleNamespace)
    known, versions = utility.Known(), {0: ("a", 1), 1: ("b", 1), 2: ("c", 1)}
    found = evaluate(world, None, lambda k: None, versions.__getitem__, known)
    assert opened == [0, 1, 2]
    assert found.clients.each == [(0, "deployed", 1), (1, "deployed", 2), (2, "deployed", 3)]
    assert found.points["aligned"].each == [(k, "aligned") for k in range(3)]
    versions[1] = ("b", 2)
    found = evaluate(world, None, lambda k: None, versions.__getitem__, known)
    assert opened == [0, 1, 2, 1]
    assert found.clients.each == [(0, "deployed", 1), (1, "deployed", 4), (2, "deployed", 3)]
    evaluate(world, None, lambda k: None, versions.__getitem__, known, next_points=lambda client: {})
    assert opened == [0, 1, 2, 1, 0, 1, 2]
    assert not hasattr(evaluate(world, None, None, versions.__getitem__, known), "clients")
    assert len(opened) == 7


@pytest.mark.parametrize(
    ("validation", "share"), [([(3, 4), (1, 2), (0, 0)], 4 / 6), ([(0, 0), (0, 0), (0, 0)], None), ([(0, 3)] * 3, 0.0)]
)
def test_a_global_models_validation_is_the_share_over_all_clients(validation, share, monkeypatch):
    """Right answers of all clients over records of all; a client's own accuracy counts if it has records."""
    own = [(1, 2), (0, 0), (3, 4)]
    counts = {"validation": validation, "nonmembers": own}
    monkeypatch.setattr(utility, "_counts_one_by_one", lambda world, model, clients, what: counts[what])
    test = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "n": 4}
    monkeypatch.setattr(utility, "accuracy", lambda model, x, y: test)
    seen = []
    monkeypatch.setattr(utility, "_spread", lambda values, holders: seen.append((values, holders)))
    monkeypatch.setattr(utility, "_holders", lambda world, what: 3)
    world = SimpleNamespace(
        setting=SimpleNamespace(clients=3, seed=0), test=("x", "y"),
        federation=SimpleNamespace(dataset=SimpleNamespace(test_domain=None)),
    )  # fmt: skip
    assert utility._global_scores(world, None).validation == share
    assert seen == [([0.5, 0.75], 3)]
