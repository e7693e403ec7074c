"""A server that sends messages of its own: what it gets is found and kept apart, and the run stays as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fedaudit
from fedaudit import Down, Method, Record, Up, ce, private, sgd
from fedaudit.attack import active_server
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.scene import Scene
from fedaudit.attacks.inversion.imprint import between, trap
from fedaudit.errors import ThreatError
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import Done
from fedaudit.training.models import build
from fedaudit.wire.codec import decode, encode

SMALL = {"dataset": "digits", "model": "mlp", "eval_clients": False, "aux": 0.3, "holdout": 0.45, "clients": 2}
ACTIVE = "active-server"


class Images(Down):
    x: Tensor


class Answer(Up):
    f: Tensor = private("logits", via="model", unit="client", depends="all")


class Nothing(Record):
    pass


class Answers(Method):
    """Clients overtrain, and answer what they are asked about."""

    def init(self, server):
        return Nothing()

    def round(self, s, server, cohort):
        cohort.ask(self.answer, Images(torch.zeros(40, *server.shape)))
        return s

    def answer(self, client, msg):
        if client.t == 1 and "trained" not in client.memory:
            client.fit(ce, epochs=30, batch=16, opt=sgd(0.2))
            client.memory["trained"] = 1
        with torch.no_grad():
            return Answer(client.model.eval()(msg.x))


def attacked(folder, name, threat=ACTIVE):
    (found,) = [result for result in attack_run(folder, attacks=[name], threat=threat) if result.attack == name]
    return found


@pytest.mark.parametrize(("privacy", "leaks"), [({}, True), ({"logits": {"epsilon": 0.1, "delta": 1e-3}}, False)])
def test_queries_of_the_servers_choice(privacy, leaks, tmp_path):
    """Answers as they are give members away; under noise for the queries' number of rows they do not."""
    setting = {**SMALL, "aux": 0.85, "holdout": 0.5}
    fedaudit.run(method=f"{__name__}:Answers", rounds=1, privacy=privacy, out=tmp_path / "a", **setting)
    found = attacked(tmp_path / "a", "chosen_queries")
    assert found.leak is leaks, found.verdict


@pytest.mark.long
@pytest.mark.parametrize(("privacy", "leaks"), [({}, True), ({"soft_labels": {"epsilon": 0.1, "delta": 1e-3}}, False)])
def test_candidates_in_the_place_of_dsfls_open_set(privacy, leaks, tmp_path):
    """DS-FL as it is, overtrained: a server that puts candidates where x_p was reads members off the soft labels."""
    setting = {**SMALL, "aux": 0.45, "public": 0.4, "holdout": 0.45, "partition": "iid"}
    hard = {"E_k": 10, "B_k": 8, "B": 500, "E": 1, "E_prime": 1, "weights": "equal"}
    fedaudit.run(method="dsfl", rounds=1, set=hard, privacy=privacy, out=tmp_path / "a", **setting)
    found = attacked(tmp_path / "a", "chosen_queries")
    assert found.leak is leaks, found.verdict
    names = sorted(path.name for path in (tmp_path / "a" / "active").iterdir())
    assert names[0] == "queries-client-000000-0000.message"
    assert "not attacked by this" in attacked(tmp_path / "a", "chosen_queries", "server").reason


@pytest.fixture(scope="module", params=["plain", "private"])
def stepped(request, tmp_path_factory):
    """FedAvg with one step a round, without protection and under DP-SGD."""
    folder = tmp_path_factory.mktemp("active") / request.param
    privacy = {"training": {"noise_multiplier": 1.0, "delta": 1e-2}} if request.param == "private" else {}
    one = {"E": 1, "B": 4096, "eta": 0.1}
    setting = {**SMALL, "aux": 0.8, "privacy": privacy}
    fedaudit.run(method="fedavg", rounds=1, set=one, out=folder, **setting)
    return folder, request.param == "plain"


def test_a_model_that_sorts_records_gets_them_back(stepped):
    """In the order of brightness, records that have a bin of their own come back as they are; not under DP-SGD."""
    folder, leaks = stepped
    before = (folder / "record.json").read_bytes(), (folder / "transcript" / "index.jsonl").read_bytes()
    found = attacked(folder, "imprint")
    assert found.beats_baselines is leaks
    if leaks:
        assert found.pooled.identification.value > 0.3
    assert ((folder / "record.json").read_bytes(), (folder / "transcript" / "index.jsonl").read_bytes()) == before
    sent = sorted(path.name for path in (folder / "active").iterdir())
    assert sent == ["imprint-client-000000-0000.message", "imprint-client-000001-0000.message"]
    w = decode((folder / "active" / sent[0]).read_bytes(), Down).w
    first = next(t for name, t in w.items() if name.endswith("weight"))
    assert bool((first == first[0]).all()), "the weights that were used are kept: every row measures the same"


def test_between_neighbours_lies_what_one_record_added():
    """Two records, three units: unit 0 has both, unit 1 the second, unit 2 none. g = 2 and 3."""
    x = torch.tensor([[0.5, -0.5], [1.0, 0.25]], dtype=torch.float64)
    weight = torch.stack([2 * x[0] + 3 * x[1], 3 * x[1], torch.zeros(2, dtype=torch.float64)])
    bias = torch.tensor([5.0, 3.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(between(weight, bias), x)


def test_the_trap_sorts_by_brightness():
    """Unit j is on for exactly the auxiliary records above its quantile, and passes on what the others do."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build("mlp", shape=(1, 8, 8), classes=10)
    aux = torch.rand(500, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    trap(model, aux, torch.Generator().manual_seed(1))
    first, last = (m for m in model.modules() if isinstance(m, torch.nn.Linear))
    on = (first(aux.flatten(1)) > 0).float().mean(0)
    wanted = 1 - torch.linspace(0, 1, first.out_features + 2)[1:-1]
    assert (on - wanted).abs().max() < 0.01
    assert bool((last.weight == last.weight[:, :1]).all())
    assert len(last.weight[:, 0].unique()) == 10


def test_who_may_send_and_who_may_not(stepped):
    folder, _ = stepped
    run = RunFolder(folder)
    passive = attacked(folder, "imprint", "server")
    assert passive.reason.startswith("not attacked by this: it takes a server that sends messages of its own")
    assert "it sends nothing" in attacked(folder, "loss").reason
    assert attacked(folder, "chosen_queries").reason.startswith("not visible: no message asks client 0")
    x, y = run.world.members(0)
    entry = next(run.transcript.entries())
    with pytest.raises(ThreatError, match="follows the protocol"):
        Scene(run, run.transcript.view("server"), 0, x, y).ask(entry, entry.record(), "none", 0)


def test_a_message_of_ones_own_is_kept_and_answered_by_the_sealed_client(monkeypatch, tmp_path):
    """In the place of a message of round 5, ask 2, with the noise of no other attempt."""
    done, keys, tasks = {}, [], []
    run = SimpleNamespace(
        folder=tmp_path, secret="secret", client_state=lambda k: f"state of {k}",
        record=SimpleNamespace(setting=SimpleNamespace(model_dump_json=lambda: "setting")),
        world=SimpleNamespace(device=torch.device("cpu")),
    )  # fmt: skip
    monkeypatch.setattr(active_server, "task_key", lambda *of: keys.append(of) or b"noise")
    monkeypatch.setattr(active_server, "run_task", lambda task: tasks.append(task) or Done(task.k, **done))
    like, message = SimpleNamespace(fn="answer", round=5, ask=2), Images(torch.tensor([1.0, 2.0]))
    done["reply"] = encode(Answer(torch.tensor([3.0])))
    reply = active_server.ask(run, 7, like, message, "queries", 12)
    assert (type(reply), reply.f.tolist()) == (Answer, [3])
    (task,) = tasks
    assert (task.setting, task.fn, task.k, task.t, task.ask) == ("setting", "answer", 7, 5, 2)
    assert (task.state, task.noise, task.attempt) == ("state of 7", b"noise", 2**30 + 12)
    assert keys == [("secret", 7, 5, 2, 2**30 + 12)]
    (path,) = (tmp_path / "active").iterdir()
    assert path.name == "queries-client-000007-0012.message"
    assert path.read_bytes() == task.message
    assert decode(task.message, Images).x.tolist() == [1, 2]
    done.clear()
    done["error"] = "dropped out"
    with pytest.raises(ThreatError, match="client 7 did not answer the message of an active server: dropped out"):
        active_server.ask(run, 7, like, message, "queries", 13)
