"""Every message of an app is in the transcript, in the bytes that Flower sends; the folder is a run like any other."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedaudit.cli.main import app as cli
from fedaudit.errors import DataError, RunError, SettingError
from fedaudit.flower import recorder
from fedaudit.flower import recorder as recorder_module
from fedaudit.flower.recorder import Recorder
from fedaudit.runtime.folder import RunFolder
from fedaudit.wire.channel import RoundTraffic
from fedaudit.wire.message import Size

PARAMETERS = 64 * 32 + 32 + 32 * 10 + 10


def test_every_message_is_recorded(torch_run):
    rows = list(RunFolder(torch_run).transcript.entries())
    seen = [(e.round, e.message, e.direction, e.client) for e in rows]
    wanted = [
        (t, message + reply, direction, k)
        for t in (1, 2)
        for message in ("Train", "Evaluate")
        for k in range(3)
        for reply, direction in (("", "down"), ("Reply", "up"))
    ]
    assert seen == wanted


def test_the_model_is_the_mean_of_what_was_recorded(torch_run):
    """FedAvg weights by num-examples, which are equal here up to one record."""
    run = RunFolder(torch_run)
    last = [e for e in run.transcript.entries() if e.message == "TrainReply" and e.round == 2]
    n = torch.tensor([e["metrics_num_examples"] for e in last], dtype=torch.float64)
    mean = {
        name: sum(w * e["arrays"][name].double() for w, e in zip(n / n.sum(), last, strict=True))
        for name in last[0]["arrays"]
    }
    published = load_file(torch_run / "models" / "global.safetensors")
    for name, value in mean.items():
        torch.testing.assert_close(published[name].double(), value, rtol=0, atol=1e-6)
    down = next(e for e in run.transcript.entries() if e.message == "Evaluate" and e.round == 2)
    assert all(torch.equal(down["arrays"][name], published[name]) for name in published)


def test_payload_to_the_digit(torch_run):
    record = RunFolder(torch_run).record
    payload = {(row.direction, row.field): row.payload for row in record.traffic}
    assert payload["up", "TrainReply.arrays"] == 2 * 3 * 4 * PARAMETERS
    assert payload["down", "Train.arrays"] == payload["down", "Evaluate.arrays"] == 2 * 3 * 4 * PARAMETERS
    assert payload["up", "TrainReply.metrics_num_examples"] == 2 * 3 * 8


def test_bytes_are_flowers_own(sk_app, tmp_path, monkeypatch):
    """Against Flower's own walk over the objects of a message: what it pushes is their deflated bytes."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from fedaudit.flower import run_app
    from fedaudit.flower.server import AuditedGrid

    sizes = {"down": [], "up": []}
    real = AuditedGrid.send_and_receive

    def weighed(message):
        return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())

    def send_and_receive(self, messages, *, timeout=None):
        messages = sorted(messages, key=lambda m: m.metadata.dst_node_id)
        sizes["down"] += [weighed(m) for m in messages]
        replies = list(real(self, messages, timeout=timeout))
        sizes["up"] += [weighed(m) for m in replies]
        return replies

    monkeypatch.setattr(AuditedGrid, "send_and_receive", send_and_receive)
    record = run_app(sk_app, out=tmp_path / "run", nodes=2, config={"num-server-rounds": 1, "local-epochs": 1})
    rows = list(RunFolder(tmp_path / "run").transcript.entries())
    for direction in ("down", "up"):
        recorded = [e.row["bytes"] for e in rows if e.direction == direction]
        assert recorded == sizes[direction]
        assert record.bytes(direction, "wire") == sum(sizes[direction])
    arrays = next(e for e in rows if e.message == "TrainReply").fields["arrays"]
    assert arrays.wire > arrays.payload == 8 * (640 + 10)


def test_an_array_that_a_message_holds_twice_is_sent_once():
    """Flower pushes objects by their content; here two of three arrays are the same."""
    import numpy as np
    from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from fedaudit.flower.client import identify
    from fedaudit.flower.messages import fields_of, frame_bytes
    from fedaudit.flower.record_kinds import Names

    identify()
    content = RecordDict({
        "a": ArrayRecord([np.zeros(500), np.zeros(500), np.ones(3)]),
        "b": ArrayRecord([np.zeros(500)]),
        "config": ConfigRecord({"t": 1}),
    })  # fmt: skip
    message = Message(content, dst_node_id=1, message_type="train")
    fields, frame = fields_of(content, Names(), "train")
    whole = sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
    assert frame + frame_bytes(message) + sum(field.wire for field in fields.values()) == whole < 2 * 4000


def test_a_run_without_secure_aggregation_says_nothing_of_it(torch_run):
    assert [note for note in RunFolder(torch_run).record.notes if "secure aggregation" in note] == []


def test_nothing_of_the_audit_reaches_the_app(torch_run):
    for entry in RunFolder(torch_run).transcript.entries():
        assert not any("fedaudit" in name for name in entry.fields)


def test_a_run_twice_is_the_same_run(sk_app, tmp_path):
    from fedaudit.flower import run_app

    short = {"num-server-rounds": 1, "local-epochs": 1}
    digests = [
        run_app(sk_app, out=tmp_path / str(i), nodes=2, config=short, seed=seed).transcript_digest
        for i, seed in enumerate((3, 3))
    ]
    assert digests[0] == digests[1]
    with pytest.raises(RunError, match="already holds a run"):
        run_app(sk_app, out=tmp_path / "0", nodes=2, config=short)


def test_a_node_that_fails_is_absent_and_its_words_stay_with_it(sk_run):
    """The server's strategy goes on with the others; what the exception said may be of records, and is in the log."""
    record = RunFolder(sk_run).record
    assert record.status == "done"
    assert [(a.client, a.ask) for a in record.rounds[1].absent] == [(1, 0)]
    assert not record.rounds[0].absent
    assert "patient" not in (sk_run / "record.json").read_text()
    assert "patient" not in (sk_run / "transcript" / "index.jsonl").read_text()
    assert "patient" in (sk_run / "errors.log").read_text()
    rows = [(e.message, e.client) for e in RunFolder(sk_run).transcript.entries() if e.round == 2]
    assert ("Train", 1) in rows
    assert ("TrainReply", 1) not in rows


def test_utility_is_the_global_models(torch_run):
    """Against the app's own evaluation of the published model."""
    from torchdigits import task

    record = RunFolder(torch_run).record
    net = task.Net()
    net.load_state_dict(load_file(torch_run / "models" / "global.safetensors"))
    right = total = 0.0
    for k in range(3):
        _, test = task.load_data(k, 3)
        right, total = right + task.test(net, test)[1] * len(test[1]), total + len(test[1])
    scores = record.result.last.global_
    assert scores.test.accuracy == pytest.approx(right / total, abs=1e-6)
    assert scores.test.n == total == sum(record.data.nonmembers)


@pytest.mark.parametrize("command", ["show", "transcript", "report", "compare", "check"])
def test_the_commands_take_it(undrawn, command, torch_run, tmp_path):
    budget = tmp_path / "budget.toml"
    budget.write_text('[[budget]]\ndirection = "up"\nmax = "9719 B"\n')
    words = {
        "show": ["show", str(torch_run)],
        "transcript": ["transcript", str(torch_run), "--by", "message"],
        "report": ["report", str(torch_run), "--out", str(tmp_path / "report")],
        "compare": ["compare", str(torch_run), str(torch_run)],
        "check": ["check", str(torch_run), "--budget", str(budget)],
    }[command]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output + str(result.exception)


def test_the_gate_is_not_kept_by_less(torch_run, tmp_path):
    """9,640 B of arrays, 8 of the count, 18 of a loss with its name, 53 of three named metrics of an evaluation."""
    budget = tmp_path / "budget.toml"
    budget.write_text('[[budget]]\ndirection = "up"\nmax = "9718 B"\n')
    assert CliRunner().invoke(cli, ["check", str(torch_run), "--budget", str(budget)]).exit_code == 1


def test_without_an_adapter_nobody_knows_the_members(sk_app, tmp_path):
    import dataclasses

    from fedaudit.attack.attack_run import attack_run
    from fedaudit.flower import run_app

    bare = dataclasses.replace(sk_app, adapter=None)
    record = run_app(bare, out=tmp_path / "run", nodes=2, config={"num-server-rounds": 1})
    assert record.data.members == []
    assert record.result.last is None
    assert any("no adapter" in note for note in record.notes)
    # A count that nobody can check is not free.
    assert record.ledger[0].by_kind["count"] == float("inf")
    with pytest.raises(DataError, match="without an adapter"):
        attack_run(tmp_path / "run", attacks=["loss"])
    with pytest.raises(SettingError, match="only an adapter knows"):
        run_app(bare, out=tmp_path / "other", nodes=2, canaries=2)


def test_a_server_that_pushes_and_pulls(sk_app, tmp_path):
    """No strategy: the app's own loop. A round ends before the next training."""
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
    from flwr.serverapp import ServerApp
    from skdigits import task

    from fedaudit.flower import audited
    from fedaudit.flower.in_process_runtime import run_here

    server = ServerApp()

    @server.main()
    def main(grid, context):
        weights = task.get_weights(task.create_model(1))
        for t in range(2):
            content = RecordDict({"arrays": ArrayRecord(weights), "config": ConfigRecord({"key": b"\x00\x01", "t": t})})
            nodes = list(grid.get_node_ids())
            ids = grid.push_messages([Message(content, n, MessageType.TRAIN) for n in nodes])
            replies = list(grid.pull_messages(ids))
            weights = replies[0].content["arrays"].to_numpy_ndarrays()
        grid.push_messages([Message(content, nodes[1], MessageType.EVALUATE)])  # and nobody waits for the answer

    pair = audited(sk_app.client, server, out=tmp_path / "run", nodes=2, config=sk_app.config)
    from fedaudit.runtime.folder import locked

    with locked(tmp_path / "run"):
        run_here(pair.server, pair.client, 2, 0)
    record = pair.record()
    assert [row.participants for row in record.rounds] == [[0, 1], [0, 1]]
    assert not record.rounds[1].absent  # the answer that nobody waited for was sent all the same
    first = next(RunFolder(tmp_path / "run").transcript.entries())
    assert first["config"]["t"] == 0
    assert first["config"]["key"].tolist() == [0, 1]
    index = (tmp_path / "run" / "transcript" / "index.jsonl").read_text().splitlines()
    assert sum(json.loads(line.partition(" ")[2])["type"] == "message" for line in index) == 2 * 4 + 2


def test_a_short_run_plans_a_long_one(torch_run, sk_run):
    """9,719 B of payload up for each node and round; a round with an absent node is left out."""
    result = CliRunner().invoke(cli, ["flower", "comm", str(torch_run), "--nodes", "50", "--rounds", "100", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["up"] == 100 * 50 * 9719
    fields = {(row["direction"], row["field"]): row["bytes"] for row in found["fields"]}
    assert fields["down", "Train.arrays"] == 50 * 4 * PARAMETERS

    from fedaudit.flower.traffic_forecast import planned

    record = RunFolder(sk_run).record
    whole = planned(sk_run, nodes=3, rounds=1)
    assert (whole.up, whole.down) == (record.rounds[0].up_payload, record.rounds[0].down_payload)
    wire = planned(sk_run, nodes=3, rounds=1, convention="wire")
    assert wire.up == record.rounds[0].up_wire


def counting(folder, fails_in=None):
    """An app that keeps its own round on disk and goes on from there; its server may fail in a round."""
    import flower_apps
    from flwr.app import ArrayRecord

    client, _ = flower_apps.strategy()
    kept = folder / "round.txt"

    def main(grid, context):
        for t in range(int(kept.read_text()) + 1 if kept.exists() else 1, 4):
            start = ArrayRecord([a + t for a in flower_apps.START])
            list(grid.send_and_receive(flower_apps._requests(grid, "train", str(t), arrays=start)))
            if t == fails_in:
                raise KeyError("power")
            kept.write_text(str(t))

    from fedaudit.flower import App

    return App("counting", client, flower_apps.served_by(main))


def test_a_run_goes_on_where_its_app_goes_on(tmp_path):
    """The server fails in round 2: rounds 2 and 3 follow later, and the transcript is that of a run without a break."""
    from fedaudit.flower import run_app

    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole = run_app(counting(tmp_path / "whole"), out=tmp_path / "a", nodes=2)
    with pytest.raises(RunError, match="The app's server failed"):
        run_app(counting(tmp_path / "broken", fails_in=2), out=tmp_path / "b", nodes=2)
    with pytest.raises(RunError, match=r"ended after round 1\. If the app goes on .* use --resume"):
        run_app(counting(tmp_path / "broken"), out=tmp_path / "b", nodes=2)
    resumed = run_app(counting(tmp_path / "broken"), out=tmp_path / "b", nodes=2, resume=True)
    assert resumed.transcript_digest == whole.transcript_digest
    assert [row.participants for row in resumed.rounds] == [[0, 1]] * 3
    assert resumed.traffic == whole.traffic
    assert resumed.ledger == whole.ledger
    assert RunFolder(tmp_path / "b").transcript.digest(3) == resumed.transcript_digest
    assert any("resumed after round 1" in note for note in resumed.notes)
    calls = {(row.party, row.phase): row.calls for row in resumed.timings}
    assert calls["server", "round"] == calls["client 0", "task"] == 3  # times before the break count too
    with pytest.raises(RunError, match="already holds a run"):
        run_app(counting(tmp_path / "broken"), out=tmp_path / "b", nodes=2, resume=True)


def test_an_app_that_begins_again_is_said_to_do_so(tmp_path):
    from fedaudit.flower import run_app

    (tmp_path / "app").mkdir()
    with pytest.raises(RunError, match="The app's server failed"):
        run_app(counting(tmp_path / "app", fails_in=2), out=tmp_path / "run", nodes=2)
    (tmp_path / "app" / "round.txt").unlink()
    with pytest.raises(RunError, match="rounds up to 1, and the app begins with round 1: it does not go on"):
        run_app(counting(tmp_path / "app"), out=tmp_path / "run", nodes=2, resume=True)
    with pytest.raises(SettingError, match="other settings"):
        run_app(counting(tmp_path / "app"), out=tmp_path / "run", nodes=2, resume=True, seed=5)


def test_an_app_without_numbers_cannot_go_on(tmp_path):
    import flower_apps

    from fedaudit.flower import App, run_app

    client, _ = flower_apps.loop()

    def main(grid, context):
        for _ in range(2):
            list(grid.send_and_receive(flower_apps._requests(grid, "train")))
        raise KeyError("power")

    app = App("x", client, flower_apps.served_by(main))
    with pytest.raises(RunError, match="The app's server failed"):
        run_app(app, out=tmp_path / "run", nodes=2)
    with pytest.raises(RunError, match="does not number its rounds"):
        run_app(app, out=tmp_path / "run", nodes=2, resume=True)


KILLED = """
import os, signal, sys
from pathlib import Path
import flower_apps
from flwr.app import ArrayRecord
from fedaudit.flower import App, run_app

kept, dies = Path(sys.argv[1]) / "round.txt", sys.argv[3] == "dies"
client, _ = flower_apps.strategy()

def main(grid, context):
    for t in range(int(kept.read_text()) + 1 if kept.exists() else 1, 4):
        start = ArrayRecord([a + t for a in flower_apps.START])
        sent = list(grid.push_messages(flower_apps._requests(grid, "train", str(t), arrays=start)))
        if dies and t == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        list(grid.pull_messages(sent))
        kept.write_text(str(t))

record = run_app(App("x", client, flower_apps.served_by(main)), out=sys.argv[2], nodes=2, resume=not dies)
print(record.transcript_digest, [row.round for row in record.rounds])
"""


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    """SIGKILL in the middle of round 3, after the nodes have answered. The digest is that of a run without a break."""
    import os
    import subprocess
    import sys

    def command(app, out, how):
        (tmp_path / app).mkdir(exist_ok=True)
        words = [sys.executable, "-c", KILLED, str(tmp_path / app), str(tmp_path / out), how]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)

    assert command("app", "run", "dies").returncode == -9
    assert RunFolder(tmp_path / "run").record.status == "running"
    resumed, whole = command("app", "run", "goes on"), command("whole", "other", "goes on")
    assert resumed.returncode == whole.returncode == 0, resumed.stderr + whole.stderr
    assert resumed.stdout == whole.stdout
    assert resumed.stdout.split(" ", 1)[1] == "[1, 2, 3]\n"


# --- single steps of the recorder, by hand


def test_bytes_of_rounds_add_up_by_field():
    """A field without a payload, such as a frame, has wire bytes alone."""
    here = SimpleNamespace(traffic={}, releases={}, digest="")
    for payload, buffers, wire in ((12, 4, 30), (20, 8, 50)):
        seen = RoundTraffic()
        seen.wire = {("up", "A.w"): wire, ("up", "A.(frame)"): 7, ("down", "B.w"): 1}
        seen.sizes = {("up", "A.w"): Size(payload, buffers)}
        seen.digests = [f"{wire}"]
        Recorder._count(here, seen)
    assert {key: (row.payload, row.buffers, row.wire) for key, row in here.traffic.items()} == {
        ("up", "A.w"): (32, 12, 80), ("up", "A.(frame)"): (0, 0, 14), ("down", "B.w"): (0, 0, 2),
    }  # fmt: skip
    once = xxhash.xxh3_128_hexdigest(b"30")
    assert here.digest == xxhash.xxh3_128_hexdigest(f"{once}50".encode())


@pytest.mark.parametrize("unknown", ["model", "arrays", "world"])
def test_arrays_that_nobody_knows_are_no_model(unknown):
    known = {"model": "m", "arrays": "a", "world": "w"} | {unknown: None}
    assert Recorder._loaded(SimpleNamespace(**known)) is None


def test_a_round_has_the_largest_number_that_its_requests_name():
    here = SimpleNamespace(wire="open", number=None, t=4)
    for named, number in ((None, None), (3, 3), (None, 3), (2, 3), (5, 5)):
        Recorder._begin(here, named)
        assert (here.number, here.t) == (number, 4)


@pytest.mark.parametrize("remark", [None, "it does not grow"])
def test_a_remark_on_a_reported_epsilon_is_noted(remark, monkeypatch):
    notes = []
    rounds = [SimpleNamespace(participants=[0, 1, 2], absent=[SimpleNamespace(client=1)])]
    record = SimpleNamespace(ledger=[SimpleNamespace(epsilon=1.0), SimpleNamespace(epsilon=3.0)], rounds=rounds)
    central = SimpleNamespace(audit=lambda t, ledger: ("central", t, ledger), remark=lambda least: f"{least} took part")
    here = SimpleNamespace(
        record=record, t=6, local=[SimpleNamespace(audit=lambda ledger: ("local", ledger))], central=[central],
        reported=["said"], note=notes.append,
    )  # fmt: skip
    monkeypatch.setattr(recorder, "reported_audit", lambda found, ledger: (("reported", found, ledger), remark))
    assert Recorder._claimed(here) == [("local", 3.0), ("central", 6, 3.0), ("reported", ["said"], 3.0)]
    assert notes == ["2 took part", *([remark] if remark else [])]


def test_the_bytes_of_a_message_are_those_that_flower_sent(monkeypatch):
    """Its frame and its fields as Flower has them; a field that Flower does not have took none there."""
    ours = {"(frame)": {"blob": 1}, "a": {"blob": 2}, "b": {"blob": 3}}
    monkeypatch.setattr(recorder_module, "measure", lambda head, size: ours if (head, size) == ("head", 6) else {})
    here = SimpleNamespace(flower={("up", 3): ({"a": SimpleNamespace(wire=70)}, 11)})
    found = recorder_module.FlowerWire.sizes(here, "up", 3, "head", 6)
    assert {name: size["wire"] for name, size in found.items()} == {"(frame)": 11, "a": 70, "b": 0}
    assert [size["blob"] for size in found.values()] == [1, 2, 3]


def test_a_model_is_published_again_in_the_same_place(tmp_path):
    """Where there is none, nothing is written; the second time its file is overwritten."""
    model = torch.nn.Linear(2, 1)
    kept = SimpleNamespace(folder=tmp_path, _loaded=lambda: None)
    assert Recorder._publish(kept) == []
    assert not list(tmp_path.iterdir())
    kept._loaded = lambda: model
    assert Recorder._publish(kept) == ["global.safetensors"]
    model.weight.data += 1
    assert Recorder._publish(kept) == ["global.safetensors"]
    assert torch.equal(load_file(tmp_path / "models" / "global.safetensors")["weight"], model.weight)


def test_an_ask_is_complete_when_all_nodes_have_answered():
    def sendings(*answers):
        return [recorder.Sending(k, "train", {}, answer) for k, answer in enumerate(answers)]

    assert recorder.Ask("train", sendings("a", "b")).complete
    assert not recorder.Ask("train", sendings("a", None)).complete
    assert not recorder.Ask("train", sendings(None, None)).complete
    assert recorder.Ask("train").complete, "nobody was asked"
