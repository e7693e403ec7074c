"""Apps of many shapes: each message, round and byte against a count of its own, and no error of the audit is hidden."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import flower_apps
import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedaudit.cli.listing import summary
from fedaudit.errors import FedauditError, RunError, WireError
from fedaudit.flower import App, run_app
from fedaudit.flower import server as server_module
from fedaudit.flower import server as server_side
from fedaudit.metrics.cost import seconds
from fedaudit.runtime.folder import RunFolder

NODES = 3
ROUND = {"Train": 3, "TrainReply": 3}
BOTH = {**ROUND, "Evaluate": 3, "EvaluateReply": 3}
STAGES = ("Setup", "ShareKeys", "CollectMaskedVectors", "Unmask")
SECURE = {f"Train{stage}{reply}": 3 for stage in STAGES for reply in ("", "Reply")}
FIRST = {"GetParameters": 1, "GetParametersReply": 1}  # one node is asked for the first model, before round 1

SHAPES = {  # the messages of each round; the first model's besides
    "strategy": BOTH, "own_start": BOTH, "loop": BOTH, "polling": ROUND, "opacus": ROUND, "xgboost": ROUND,
    "analytics": {"Query": 3, "QueryReply": 3}, "threads": BOTH, "scripts": BOTH, "components": ROUND, "local_dp": BOTH,
    "workflow": BOTH, "secure": SECURE, "secure_with_dp": SECURE,
    "vertical": {"QueryEmbeddings": 3, "QueryEmbeddingsReply": 3, "TrainGradients": 3, "TrainGradientsReply": 3},
}  # fmt: skip


class CountingGrid(Grid):
    """Weighs every message that the app sends and gets, by Flower's own walk over its objects."""

    def __init__(self, inner):
        self.inner, self.lock, self.sizes = inner, threading.Lock(), {"down": [], "up": []}

    def _weighed(self, direction, messages):
        messages = list(messages)
        with self.lock:
            self.sizes[direction] += [
                sum(len(part.deflate()) for part in get_all_nested_objects(m).values()) for m in messages
            ]
        return messages

    def push_messages(self, messages):
        messages = list(messages)
        ids = list(self.inner.push_messages(messages))
        self._weighed("down", messages)
        return ids

    def pull_messages(self, message_ids):
        return self._weighed("up", self.inner.pull_messages(message_ids))

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        replies = self.inner.send_and_receive(messages, timeout=timeout)
        self._weighed("down", messages)
        return self._weighed("up", replies)

    def set_run(self, run):
        self.inner.set_run(run)

    run = property(lambda self: self.inner.run)

    def create_message(self, *args, **options):
        return self.inner.create_message(*args, **options)

    def get_node_ids(self):
        return self.inner.get_node_ids()


class Counted(ServerApp):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.sizes = inner, None

    def __call__(self, grid, context):
        counting = CountingGrid(grid)
        self.sizes = counting.sizes
        self.inner(counting, context)


def ran(name, folder, ray=False, **more):
    client, server = getattr(flower_apps, name)()
    counted = Counted(server)
    record = run_app(App(name, client, counted), out=folder, nodes=NODES, ray=ray, **more)
    return record, counted.sizes


def check(name, folder, record, sizes):
    """The rounds are the app's, every message is there once, and the bytes are those of the other count."""
    run = RunFolder(folder)
    rows = list(run.transcript.entries())
    assert [row.participants for row in record.rounds] == [[0, 1, 2]] * flower_apps.ROUNDS
    for t in (1, 2):
        first = FIRST if t == 1 and name in ("threads", "scripts", "local_dp") else {}
        assert Counter(e.message for e in rows if e.round == t) == {**SHAPES[name], **first}, (name, t)
    for direction in ("down", "up"):
        recorded = sorted(e.row["bytes"] for e in rows if e.direction == direction)
        expected = sorted(sizes[direction])
        if name == "vertical" and direction == "up":  # the app never sees the six answers to its gradients
            recorded = [e.row["bytes"] for e in rows if e.message == "QueryEmbeddingsReply"]
        assert sorted(recorded) == expected
        if name != "vertical":
            assert record.bytes(direction, "wire") == sum(expected)
    assert run.transcript.digest(len(record.rounds)) == record.transcript_digest
    order = [(e.round, e.ask, e.client, e.direction == "up") for e in rows]
    assert order == sorted(order)  # by node, whichever thread came first
    assert "(done)" in summary(record)[0]


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_an_app_is_recorded_whole(name, tmp_path):
    record, sizes = ran(name, tmp_path / "run")
    check(name, tmp_path / "run", record, sizes)


def test_nothing_is_recorded_while_a_node_of_this_process_works(tmp_path, monkeypatch):
    """Two threads that read arrays at once fail in Python before 3.11.8, and a node would be missing."""
    inside, most = [], []

    def alone(own):
        def call(*args):
            inside.append(own)
            most.append(len(inside))
            time.sleep(0.02)
            try:
                return own(*args)
            finally:
                inside.remove(own)

        return call

    monkeypatch.setattr(server_side, "fields_of", alone(server_side.fields_of))
    monkeypatch.setattr(flower_apps.Adding, "fit", alone(flower_apps.Adding.fit))
    ran("threads", tmp_path / "run")
    assert max(most) == 1


def test_a_node_that_does_not_say_its_number_is_named(tmp_path, monkeypatch):
    """Its number is a guess then, and an attack on it would be held against another node's records."""
    from fedaudit.flower import in_process_runtime

    own = in_process_runtime.LocalGrid.send_and_receive

    def slow(self, messages, *, timeout=None):
        replies = own(self, messages, timeout=timeout)
        if timeout == server_side.ROLL_CALL_S:
            return [reply for reply in replies if reply.metadata.src_node_id != in_process_runtime.FIRST + 1]
        return replies

    monkeypatch.setattr(in_process_runtime.LocalGrid, "send_and_receive", slow)
    record, _ = ran("strategy", tmp_path / "run")
    (said,) = (note for note in record.notes if "did not say in time" in note)
    assert said.startswith(f"node {in_process_runtime.FIRST + 1} ")
    assert "counts as client 1" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_under_ray(name, tmp_path):
    record, sizes = ran(name, tmp_path / "run", ray=True)
    if name == "vertical":  # answers that come after the server has ended are not waited for
        assert [row.participants for row in record.rounds] == [[0, 1, 2]] * 2
    else:
        check(name, tmp_path / "run", record, sizes)


# --- errors of the audit itself --------------------------------------------------------------------------------------

POLICY = {"privacy": {"gradients": {"epsilon": 4, "sensitivity": "clip:1", "delta": 1e-5}}}
WEIGHTS = {"kind": "weights", "update": True}


@pytest.mark.parametrize(
    ("name", "record"),
    [("strategy", "metrics"), ("threads", "fitres.metrics"), ("xgboost", "arrays"), ("vertical", "arrays")],
)
def test_an_error_of_the_protection_ends_the_run(name, record, tmp_path):
    """Also in a thread of an older server, which takes it for a client that failed, and where nobody waits."""
    before = threading.enumerate()
    with pytest.raises(FedauditError, match=r"node \d, \w+"):
        ran(name, tmp_path / "run", kinds={record: WEIGHTS}, **POLICY)
    assert "running" in summary(RunFolder(tmp_path / "run").record)[0]
    left = [t for t in threading.enumerate() if t not in before and not t.name.startswith("checkpoint")]
    assert not left, left


@pytest.mark.parametrize("name", ["strategy", "threads"])
def test_an_error_of_the_recording_ends_the_run(name, tmp_path, monkeypatch):
    from fedaudit.flower import recorder

    def failing(*_):
        raise WireError("the second message is damaged")

    monkeypatch.setattr(recorder, "ups", failing)
    with pytest.raises(WireError, match="second message"):
        ran(name, tmp_path / "run")


def test_an_error_of_the_apps_server_has_a_place(tmp_path):
    client, _ = flower_apps.strategy()

    def main(grid, context):
        raise KeyError("no-such-config")

    with pytest.raises(RunError, match=r"The app's server failed: KeyError: 'no-such-config' \(main, test_server\.py:"):
        run_app(App("x", client, flower_apps.served_by(main)), out=tmp_path / "run", nodes=2)
    assert "no-such-config" in (tmp_path / "run" / "errors.log").read_text()


def test_a_simulation_that_does_not_start_is_told_from_the_app(tmp_path, monkeypatch):
    """By the first cause, as Flower's simulation raises an error of its own around Ray's."""
    from fedaudit.flower import app as module

    def failing(pair, nodes):
        pair.folder.mkdir(exist_ok=True)
        try:
            raise OSError("The current node timed out during startup.")
        except OSError as e:
            raise RuntimeError("An error was encountered. Ending simulation.") from e

    monkeypatch.setattr(module, "in_simulation", failing)
    words = r"Flower's simulation did not begin the app: it failed: OSError: The current node timed out"
    with pytest.raises(RunError, match=words):
        run_app(App("x", *flower_apps.strategy()), out=tmp_path / "run", nodes=2, ray=True)


def test_missing_answers_stand_on_the_line_that_says_done(tmp_path):
    """Node 1 fails in both rounds, in training and in evaluation."""
    client, server = flower_apps.strategy()
    train = client._registered_funcs

    def failing(own):
        def call(message, context):
            if context.node_config["partition-id"] == 1:
                raise ValueError("its disk is full")
            return own(message, context)

        return call

    client._registered_funcs = {name: failing(own) for name, own in train.items()}
    record = run_app(App("x", client, server), out=tmp_path / "run", nodes=3)
    assert "(done, 4 answers missing" in summary(record)[0]


@pytest.mark.slow
def test_the_command_exits_with_the_error(tmp_path):
    """In a process of its own, with an app whose policy cannot be kept: one line, exit code 2, no abort."""
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(
        "[tool.flwr.app.components]\nclientapp = 'halves:client'\nserverapp = 'halves:server'\n"
    )
    (app / "halves.py").write_text("import flower_apps\n\nclient, server = flower_apps.threads()\n")
    words = ["flower", "run", str(app), "--out", str(tmp_path / "run"), "--kind", "fitres.metrics=weights:update"]
    code = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from fedaudit.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, ":".join(sys.path), *words, "--privacy", "gradients:eps=4,clip=1,delta=1e-5"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "error: node" in done.stderr
    assert "Traceback" not in done.stderr
    assert "(done" not in done.stdout


# --- time ------------------------------------------------------------------------------------------------------------


def test_the_time_of_a_round_is_the_whole_rounds(tmp_path):
    """Training sleeps 0.1 s on each of three nodes, the server 0.2 s; our own scoring is left out. Budgets, reports and
    exports take the metric of time: here nodes work one after the other, so it is that of all rounds."""
    client, _ = flower_apps.strategy()
    own = client._registered_funcs["train.default"]

    def slow(message, context):
        time.sleep(0.1)
        return own(message, context)

    def main(grid, context):
        for t in (1, 2):
            list(grid.send_and_receive(flower_apps._requests(grid, "train", str(t))))
            time.sleep(0.2)
            list(grid.send_and_receive(flower_apps._requests(grid, "evaluate", str(t))))

    client._registered_funcs["train.default"] = slow
    record = run_app(App("x", client, flower_apps.served_by(main)), out=tmp_path / "run", nodes=3)
    assert all(row.wall_s >= 0.5 for row in record.rounds)
    assert seconds(record) == pytest.approx(sum(row.wall_s for row in record.rounds), abs=0.001)
    spent = {(row.party, row.phase): row.wall_s for row in record.timings}
    assert spent["server", "round"] >= 0.4
    assert spent["client 2", "task"] >= spent["client 2", "train"] >= 0.2
    assert spent["client 2", "task"] == pytest.approx(spent["client 2", "train"] + spent["client 2", "evaluation"])


def test_rounds_are_told_by_the_apps_number_and_not_by_arrival(tmp_path):
    """Six messages of two rounds, from six threads, in an order that changes; those of round 1 are all sent first."""
    client, _ = flower_apps.strategy()

    def main(grid, context):
        nodes = list(grid.get_node_ids())
        for t in (7, 9):
            content = RecordDict({"arrays": ArrayRecord([np.zeros(2, dtype=np.float32)])})
            sent = [Message(content, n, "train", group_id=str(t)) for n in reversed(nodes)]
            threads = [threading.Thread(target=grid.send_and_receive, args=([m],)) for m in sent]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    record = run_app(App("x", client, flower_apps.served_by(main)), out=tmp_path / "run", nodes=3)
    assert [row.participants for row in record.rounds] == [[0, 1, 2], [0, 1, 2]]
    rows = [(e.round, e.client, e.direction) for e in RunFolder(tmp_path / "run").transcript.entries()]
    assert rows == [(t, k, way) for t in (1, 2) for k in range(3) for way in ("down", "up")]


def test_a_broadcast_is_read_once_and_each_message_has_its_own_frame(monkeypatch):
    read = []

    def fields_of(content, names, kind, layout):
        read.append((content, kind, layout))
        return f"fields of {content}", 99

    monkeypatch.setattr(server_module, "fields_of", fields_of)
    monkeypatch.setattr(server_module, "frame_bytes", lambda message: message.frame)
    here = SimpleNamespace(_broadcast=None, recorder=SimpleNamespace(layout="layout"))
    one, other = "".join(["on", "e"]), "other"
    messages = [SimpleNamespace(content=content, frame=n) for n, content in enumerate((one, one, other, one), 5)]
    found = [server_module.AuditedGrid._asked(here, message, "train") for message in messages]
    assert found == [("fields of one", 5), ("fields of one", 6), ("fields of other", 7), ("fields of one", 8)]
    assert read == [(content, "train", "layout") for content in ("one", "other", "one")]
