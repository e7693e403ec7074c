"""Peers on what is passed on to them, and labels from single layers: a planted leak is found, its repaired twin not."""

from __future__ import annotations

import pytest
import torch
from scenes import Entry, scene
from torch import Tensor

import fedaudit
from fedaudit import Down, Method, Record, State, Up, ce, load, private, relay, sgd, state_of
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.scene import Scene
from fedaudit.attacks.membership import relayed_means
from fedaudit.attacks.membership.relayed_means import means_of_others, others, own
from fedaudit.errors import ContractError
from fedaudit.registry import find
from fedaudit.runtime.folder import RunFolder
from fedaudit.wire.release import Protection

SMALL = {"dataset": "digits", "model": "mlp", "eval_clients": False, "aux": 0.3, "holdout": 0.45, "clients": 3}


class Ask(Down):
    pass


class Shown(Up):
    e: Tensor = private("embeddings", via="data", unit="record")


class Passed(Down):
    E: dict[int, Tensor] = relay("embeddings", by="client")


class Got(Up):
    pass


class Nothing(Record):
    pass


class Relays(Method):
    """Everybody's embeddings by one encoder, passed on to everybody: as they are, or under noise."""

    noise: float = 0.0

    def init(self, server):
        return Nothing()

    def round(self, s, server, cohort):
        rows = {k: r.e for k, r in cohort.ask(self.show, Ask()).items()}
        cohort.ask(self.get, Passed(rows))
        return s

    def show(self, client, msg):
        with torch.no_grad():
            e = client.model.eval().encode(client.x)
        return Shown(e + self.noise * torch.randn(e.shape, generator=client.rng("noise")))

    def get(self, client, msg):
        return Got()


@pytest.fixture(scope="module", params=[0.0, 20.0], ids=["leaks", "repaired"])
def relays(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("relays") / str(request.param)
    fedaudit.run(method=f"{__name__}:Relays", rounds=1, set={"noise": request.param}, out=folder, **SMALL)
    return folder, request.param == 0.0


def test_a_peer_finds_members_in_what_is_passed_on_to_it(relays):
    folder, leaks = relays
    (found,) = [r for r in attack_run(folder, attacks=["relayed_match"], threat="peer:0") if not r.blind]
    assert found.clients == [1, 2]
    assert found.leak is leaks, found.verdict
    if leaks:
        assert found.pooled.auc.value > 0.95


def test_a_scene_has_what_was_passed_on_and_nothing_else(relays):
    folder, _ = relays
    run = RunFolder(folder)
    view = run.transcript.view("peer:0")
    x, y = run.world.members(1)
    scene = Scene(run, view, 1, x, y)
    (passed,) = scene.relayed("embeddings")
    (other,) = scene.relayed("embeddings", 2)
    sent = {e.client: e["e"] for e in run.transcript.entries() if e.direction == "up" and e.message == "Shown"}
    assert torch.equal(passed.value, sent[1])
    assert torch.equal(other.value, sent[2])
    assert scene.relayed("logits") == []
    assert Scene(run, run.transcript.view("server"), 1, x, y).relayed("embeddings") == []


def test_reasons_are_true(relays):
    folder, _ = relays
    (found,) = [r for r in attack_run(folder, attacks=["embedding_match"], threat="peer:0") if not r.blind]
    assert found.reason.startswith("not attacked by this: the peer:0 is passed on embeddings of client 1")
    (found,) = [r for r in attack_run(folder, attacks=["relayed_match"], threat="server") if not r.blind]
    assert "has the uploads themselves" in found.reason


def test_a_relay_says_by_what_it_is_keyed():
    with pytest.raises(ContractError, match="by of relay"):
        relay("embeddings", by="clients")


# -- outputs: one row for each record, by client; on the public set ---------------------------------------------------


class ShownOutputs(Up):
    Y: Tensor = private("logits", via="data", unit="record")


class PassedOutputs(Down):
    Y: dict[int, dict[int, Tensor]] = relay("logits", by="client")  # by peer and round


class RelaysOutputs(Relays):
    """Everybody's outputs on its own records, passed on by client and round, as DFFKE's are."""

    def round(self, s, server, cohort):
        rows = {k: {server.t: r.Y} for k, r in cohort.ask(self.show, Ask()).items()}
        cohort.ask(self.get, PassedOutputs(rows))
        return s

    def show(self, client, msg):
        with torch.no_grad():
            y = client.model.eval()(client.x)
        return ShownOutputs(y + self.noise * torch.randn(y.shape, generator=client.rng("noise")))


def of(folder, attack, threat="peer:0"):
    (found,) = [result for result in attack_run(folder, attacks=[attack], threat=threat) if not result.blind]
    return found


@pytest.mark.parametrize(("noise", "leaks"), [(0.0, True), (20.0, False)])
def test_a_peer_finds_members_in_outputs_on_their_records(noise, leaks, tmp_path):
    method = f"{__name__}:RelaysOutputs"
    fedaudit.run(method=method, rounds=1, set={"noise": noise}, out=tmp_path / "a", **SMALL)
    found = of(tmp_path / "a", "relayed_match")
    assert found.pooled.auc.value > 0.9 if leaks else found.pooled.auc.value < 0.6, found.verdict
    labels = of(tmp_path / "a", "label_histogram")  # what it is passed on tells of labels, too
    assert {row.source for row in labels.client.values()} == {"outputs"}
    run = RunFolder(tmp_path / "a")
    (sent,) = [e["Y"] for e in run.transcript.entries() if e.message == "ShownOutputs" and e.client == 1]
    scene = Scene(run, run.transcript.view("peer:0"), 1, *run.world.members(1))
    shares = find("label_histogram", "attacks")().run(scene).shares
    assert torch.allclose(shares, sent.double().softmax(1).mean(0))


@pytest.mark.long
@pytest.mark.parametrize(("privacy", "leaks"), [({}, True), ({"logits": {"epsilon": 0.1, "delta": 1e-3}}, False)])
def test_a_peer_finds_members_by_answers_on_the_public_set(privacy, leaks, tmp_path):
    """FKE, overtrained: a copy of the target's model, made of its logits, knows them; not under noise."""
    few = {**SMALL, "clients": 2, "aux": 0.3, "public": 0.5, "partition": "iid"}
    hard = {"E_local": 20, "B": 16, "tau": "off", "eta": 1e-2, "T_FKE": 0}
    fedaudit.run(method="fke", rounds=1, set=hard, privacy=privacy, out=tmp_path / "a", **few)
    found = of(tmp_path / "a", {"attack": "logit_gap", "steps": 200})
    assert found.leak is leaks, found.verdict


def test_dffkes_logits_are_attacked(tmp_path):
    """As the method is: embeddings are docked to another width, and outputs on what is decoded of them remain."""
    fedaudit.run(method="dffke", rounds=1, out=tmp_path / "a", set=find("dffke", "methods").quick, **SMALL)
    found = of(tmp_path / "a", "relayed_match")
    assert found.ran
    assert found.clients == [1, 2]


# -- means of several clients -----------------------------------------------------------------------------------------


class Sent(Down):
    w: State


class Mean(Up):
    C: dict[int, Tensor] = private("prototypes", via="data", unit="client", depends="class")


class Common(Down):
    C: dict[int, Tensor] = relay("prototypes")


class Start(Record):
    w: State


class RelaysMeans(Relays):
    """The mean over clients of everybody's class means at one model, passed on, as FedAF's V is."""

    def init(self, server):
        return Start(state_of(server.model()))

    def round(self, s, server, cohort):
        sent = {k: r.C for k, r in cohort.ask(self.show, Sent(s.w)).items()}
        held = {c for of_client in sent.values() for c in of_client}
        cohort.ask(self.get, Common({c: torch.stack([v[c] for v in sent.values() if c in v]).mean(0) for c in held}))
        return s

    def show(self, client, msg):
        load(client.model, msg.w)
        with torch.no_grad():
            e = client.model.eval().encode(client.x).flatten(1)
        return Mean(client.class_means(e, "prototypes"))


@pytest.mark.parametrize(("privacy", "leaks"), [({}, True), ({"prototypes": {"epsilon": 0.1, "delta": 1e-3}}, False)])
def test_a_peer_finds_members_in_means_over_clients(privacy, leaks, tmp_path):
    """Two others, about four records of a class each: their mean leans towards its records; not under noise."""
    few = {**SMALL, "aux": 0.85, "partition": "iid"}
    fedaudit.run(method=f"{__name__}:RelaysMeans", rounds=1, privacy=privacy, out=tmp_path / "a", **few)
    found = of(tmp_path / "a", "relayed_means")
    assert found.leak is leaks, found.verdict
    if leaks:
        assert "has the uploads themselves" in of(tmp_path / "a", "relayed_means", "server").reason
        assert "passed on no embeddings or outputs" in of(tmp_path / "a", "relayed_match").reason


def test_the_others_mean_by_hand():
    """V = 5 of three clients, v = 3: the others have (15 - 3) / 2 = 6. What only others hold stays."""
    V = {0: torch.tensor([5.0]), 1: torch.tensor([7.0])}
    assert others(V, {0: torch.tensor([3.0])}, 3) == {0: torch.tensor([6.0]), 1: torch.tensor([7.0])}


def test_fedafs_means_are_attacked(tmp_path):
    fedaudit.run(method="fedaf", rounds=1, out=tmp_path / "a", set=find("fedaf", "methods").quick, **SMALL)
    found = of(tmp_path / "a", "relayed_means")
    assert found.ran
    assert found.clients == [1, 2]


# -- labels from single layers -------------------------------------------------------------------------------------


class Layer(Up):
    L: State = private("layers", via="model", unit="client")


class LastLayer(Method):
    """The last layer alone, with its bias or without."""

    bias: bool = True

    def init(self, server):
        return Nothing()

    def round(self, s, server, cohort):
        cohort.ask(self.train, Ask())
        return s

    def train(self, client, msg):
        client.fit(ce, epochs=3, batch=32, opt=sgd(0.2))
        state = state_of(client.model)
        last = list(state)[-2:]
        return Layer(State({name: state[name] for name in last if self.bias or name.endswith("weight")}))


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_of_a_single_layer_tells_labels(bias, tmp_path):
    setting = {**SMALL, "partition": "dirichlet:0.2", "clients": 5, "seed": 1}
    fedaudit.run(method=f"{__name__}:LastLayer", rounds=1, set={"bias": bias}, out=tmp_path / "a", **setting)
    (found,) = attack_run(tmp_path / "a", attacks=["label_histogram"])[:1]
    if bias:
        assert {c.source for c in found.client.values()} == {"layers"}
        assert found.leak, found.verdict
    else:
        assert "could read labels from" in found.reason


# --- messages by hand -----------------------------------------------------------------------------------------------


def sent(t, ask, value, sigma=None, client=1):
    protection = None if sigma is None else Protection(mechanism="gaussian", sigma=sigma)
    return Entry("up", client, t, ask, protection=protection, v=("logits", {0: torch.tensor([value])}))


def test_a_peers_own_mean_is_that_of_the_ask_before():
    """The mean of all comes with ask 2 of round 3. The peer sent means in asks 0, 1 and 2, and in other rounds."""
    passed = Entry("down", 1, 3, 2, role="relay", V=("logits", {0: torch.tensor([9.0])}))
    entries = [sent(2, 0, 1.0), sent(3, 0, 2.0), sent(3, 1, 3.0, sigma=0.5), sent(3, 2, 4.0), sent(3, 1, 5.0, client=0)]
    v, protection = own(scene(*entries, peer=1), "logits", passed)
    assert v[0].tolist() == [3.0]
    assert protection.sigma == 0.5
    assert own(scene(*entries[:1], peer=1), "logits", passed)[0] == {}


@pytest.mark.parametrize(("participation", "K"), [(1.0, 5), (0.6, 3), (0.2, 2)])
def test_as_many_are_in_a_mean_as_take_part(participation, K, monkeypatch):
    """The mean is 9, the peer's own 3: the others' is (9 K - 3) / (K - 1), and their noise is of K - 1 clients."""
    passed = Entry("down", 1, 3, 2, role="relay", V=("logits", {0: torch.tensor([9.0]), 2: torch.tensor([7.0])}))
    nothing = Entry("down", 1, 4, 2, role="relay", V=("logits", torch.zeros(3)))
    monkeypatch.setattr(relayed_means, "received", lambda scene, entry: f"model of round {entry.round}")
    here = scene(sent(3, 1, 3.0, sigma=0.5), peer=1, setting={"participation": participation, "clients": 5},
                 mixed=lambda kind: [(passed, "V"), (nothing, "V")] if kind == "logits" else [])  # fmt: skip
    ((model, means, kind, protection),) = means_of_others(here)
    assert (model, kind) == ("model of round 3", "logits")
    assert means[0].item() == pytest.approx((9 * K - 3) / (K - 1))
    assert means[2].item() == 7.0, "it sent none of that class"
    assert protection.sigma == pytest.approx(0.5 / (K - 1) ** 0.5)
    monkeypatch.setattr(relayed_means, "received", lambda scene, entry: None)
    assert means_of_others(here) == []
