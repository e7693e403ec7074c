"""Flower's own simulation, on Ray: the same audit around the same app, in processes of Flower's."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import flower_apps
import pytest
from flwr.app import Context, Message, RecordDict

from fedaudit.cli.listing import summary
from fedaudit.errors import FedauditError, RunError
from fedaudit.flower import App, audited, run_app, simulation
from fedaudit.flower.client import FAILED, identify
from fedaudit.flower.in_process_runtime import run_here
from fedaudit.flower.messages import AUDIT
from fedaudit.runtime.folder import RunFolder


@pytest.mark.slow
def test_the_simulation_leaves_what_this_process_leaves(sk_app, tmp_path):
    """Training draws nothing at random, and node numbers are partition-ids: the models are equal to rounding."""
    import torch

    short = {"num-server-rounds": 2, "local-epochs": 2}
    here = run_app(sk_app, out=tmp_path / "here", nodes=2, config=short)
    there = run_app(sk_app, out=tmp_path / "there", nodes=2, config=short, ray=True)
    assert there.status == "done"
    assert [row.participants for row in there.rounds] == [[0, 1], [0, 1]]
    assert there.bytes("up") == here.bytes("up")
    assert there.bytes("down") == here.bytes("down")
    ours, theirs = (
        [e for e in RunFolder(tmp_path / name).transcript.entries() if e.message == "TrainReply"]
        for name in ("here", "there")
    )
    for a, b in zip(ours, theirs, strict=True):
        assert (a.round, a.client) == (b.round, b.client)
        torch.testing.assert_close(a["arrays"]["0"], b["arrays"]["0"])
        assert a["metrics_num_examples"] == b["metrics_num_examples"]
    assert [c.by_kind for c in there.ledger] == [c.by_kind for c in here.ledger]


@pytest.mark.slow
def test_a_protected_run_in_the_simulation(sk_app, tmp_path):
    """The noise is drawn on the nodes, from the run's seed: the same in either runtime."""
    import torch

    how = {
        "nodes": 2, "config": {"num-server-rounds": 1, "local-epochs": 1}, "canaries": 4,
        "kinds": {"arrays": {"kind": "weights", "update": True}},
        "privacy": {"gradients": {"noise_multiplier": 1.0, "delta": 1e-5}},
    }  # fmt: skip
    for name, ray in (("here", False), ("there", True)):
        record = run_app(sk_app, out=tmp_path / name, ray=ray, **how)
        assert record.ledger[0].by_kind["gradients"] < 10
        assert record.ledger[0].by_kind["count"] == 0.0  # of the canaries too
    ours, theirs = (
        next(e for e in RunFolder(tmp_path / name).transcript.entries() if e.message == "TrainReply")
        for name in ("here", "there")
    )
    torch.testing.assert_close(ours["arrays"]["0"], theirs["arrays"]["0"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "record"), [("strategy", "metrics"), ("threads", "fitres.metrics")])
def test_an_error_of_the_protection_ends_the_simulation(name, record, tmp_path):
    """On a node in another process, with a server of each API."""
    policy = {"gradients": {"epsilon": 4, "sensitivity": "clip:1", "delta": 1e-5}}
    kinds = {record: {"kind": "weights", "update": True}}
    client, server = getattr(flower_apps, name)()
    with pytest.raises(FedauditError, match=r"node \d, train"):
        run_app(App(name, client, server), out=tmp_path / "run", nodes=3, ray=True, kinds=kinds, privacy=policy)
    assert "running" in summary(RunFolder(tmp_path / "run").record)[0]


# --- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_of_the_simulation_changes_nothing(tmp_path):
    """Nodes add 1, 2 and 3 to what they were sent: 0 in round 1, and the mean, 2, in round 2."""
    (tmp_path / "died").mkdir()
    client, server = flower_apps.dying(str(tmp_path / "died"))
    record = run_app(App("dying", client, server), out=tmp_path / "run", nodes=3, ray=True)
    assert len(list((tmp_path / "died").iterdir())) == 1, "a worker died"
    assert [row.absent for row in record.rounds] == [[], []]
    assert [row.redone for row in record.rounds] == [1, 0]
    assert "  1 tasks run again, because their processes were lost; results do not change" in summary(record)
    sent = [e for e in RunFolder(tmp_path / "run").transcript.entries() if e.message == "TrainReply"]
    assert [(e.round, e.client, e["arrays"]["1"].item()) for e in sent] == [
        (t, k, 2 * (t - 1) + k + 1) for t in (1, 2) for k in range(3)
    ]


def test_tasks_done_again_are_counted_in_their_round(tmp_path):
    client, _ = flower_apps.strategy()

    def main(grid, context):
        for t in (1, 2, 3):
            list(grid.send_and_receive(flower_apps._requests(grid, "train", str(t))))
            if t == 2:
                pair.server.redone()

    pair = audited(client, flower_apps.served_by(main), out=tmp_path / "run", nodes=2)
    pair.server.redone()  # before the run has begun: there is no round to count it in
    run_here(pair.server, pair.client, 2, 0)
    assert [row.redone for row in pair.record().rounds] == [0, 1, 0]


class Workers:
    """Flower's backend with a pool of one worker. `fate(number)` is the error with which that worker's task ends."""

    def __init__(self, monkeypatch, fate, gone=False):
        ray_actor = pytest.importorskip("flwr.simulation.ray_transport.ray_actor")
        from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

        self.numbers, self.tasks, self.redone, self.gone = itertools.count(), {}, 0, gone
        self.pool = pool = object.__new__(ray_actor.BasicActorPool)
        pool.pool, pool._future_to_actor, pool.create_actor_fn = [self.start()], {}, self.start
        self.backend = object.__new__(RayBackend)
        self.backend.pool, self.backend.app_fn = pool, lambda: None
        self.context = Context(1, 7, {"partition-id": 2}, RecordDict(), {})

        def get(future):
            number, context = self.tasks[future]
            if (error := fate(number)) is not None:
                raise error
            return "2", f"the answer of worker {number}", context

        monkeypatch.setattr(ray_actor.ray, "get", get)
        monkeypatch.setattr(simulation, "RayContact", lambda ray: SimpleNamespace(check=self.check))

    def start(self):
        def remote(app, message, cid, context):
            self.tasks[future := object()] = number, context
            return future

        number = next(self.numbers)
        return SimpleNamespace(number=number, run=SimpleNamespace(remote=remote))

    def check(self, then):
        if self.gone:
            raise RunError(f"Ray is gone: its agent does not answer. {then}")

    def answer(self):
        identify()
        with simulation.lost_workers_replaced(lambda: setattr(self, "redone", self.redone + 1)):
            message = Message(RecordDict(), dst_node_id=7, message_type="train")
            message.metadata.__dict__["_message_id"] = "1"
            return self.backend.process_message(message, self.context)[0]


def lost():
    from ray.exceptions import RayActorError

    return RayActorError(error_msg="it died\nin many words")


def test_a_lost_task_is_done_again_by_a_new_worker(monkeypatch):
    workers = Workers(monkeypatch, lambda number: lost() if number == 0 else None)
    assert workers.answer() == "the answer of worker 1"
    assert workers.redone == 1
    assert [worker.number for worker in workers.pool.pool] == [1], "the dead one gets no further task"


def test_a_task_that_is_lost_three_times_ends_the_run(monkeypatch):
    workers = Workers(monkeypatch, lambda number: lost())
    said = workers.answer().content[AUDIT][FAILED]
    assert said.startswith(
        "node 2, train: the task was lost 3 times with the process that did it: RayActorError: it died"
    )
    assert "without --ray" in said
    assert (len(workers.tasks), workers.redone) == (3, 2)


def test_without_ray_no_worker_is_waited_for(monkeypatch):
    """Ray goes with its worker: one that is started then never comes up."""
    workers = Workers(monkeypatch, lambda number: setattr(workers, "gone", True) or lost())
    said = workers.answer().content[AUDIT][FAILED]
    assert said.startswith("node 2, train: Ray is gone: its agent does not answer.")
    assert next(workers.numbers) == 1, "no worker was started after the first"
    workers.tasks.clear()
    assert "Ray is gone" in workers.answer().content[AUDIT][FAILED]
    assert not workers.tasks, "Ray ends a process that uses what it has lost"


def test_an_error_of_the_apps_own_is_no_loss(monkeypatch):
    workers = Workers(monkeypatch, lambda number: ValueError("its disk is full"))
    with pytest.raises(ValueError, match="disk"):
        workers.answer()
    assert (len(workers.tasks), workers.redone) == (1, 0)
    assert [worker.number for worker in workers.pool.pool] == [0]
