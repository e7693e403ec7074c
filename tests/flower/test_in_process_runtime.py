"""The same training as a Flower app and as our FedAvg: the same audit. And Flower's strategies run unchanged."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch

import fedaudit
from fedaudit.attack.attack_run import attack_run
from fedaudit.data import Federation
from fedaudit.flower import Records, run_app, served
from fedaudit.flower.in_process_runtime import run_here
from fedaudit.rng import generator
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.world import world_of

SEED, NODES, ROUNDS, EPOCHS, BATCH, ETA = 5, 3, 2, 2, 32, 0.1
SETTING = fedaudit.Setting.make(
    method="fedavg", set={"E": EPOCHS, "B": BATCH, "eta": ETA}, dataset="digits", clients=NODES, partition="iid",
    validation=0.0, holdout=0.4, model="mlp", rounds=ROUNDS, seed=SEED, device="cpu", engine="serial",
)  # fmt: skip
ATTACKS = ["loss", "entropy", "modified_entropy", "gradient_norm", "update_alignment"]


@functools.cache
def world():
    return world_of(SETTING.model_dump_json())


class AsNative(Records):
    """What our own run of this setting holds."""

    classes = 10

    def _held(self) -> Federation:
        return world().federation

    def members(self, partition, partitions):
        return self._held().members(partition)

    def nonmembers(self, partition, partitions):
        return self._held().nonmembers(partition)

    def auxiliary(self):
        return self._held().auxiliary()

    def test(self):
        return self._held().test()

    def model(self):
        return world().build("mlp")

    def serving(self, x, y):
        return served("torchdigits.task:load_data", ((x, y), (x, y)))


@pytest.fixture(scope="module")
def both(torch_app, tmp_path_factory):
    """Our FedAvg, and the app with our model, our records and our order of batches."""
    from torchdigits import server_app, task

    folder = tmp_path_factory.mktemp("native")
    fedaudit.run(SETTING, out=folder / "ours")
    state = {"k": -1, "t": dict.fromkeys(range(NODES), 0)}

    def load_data(partition, partitions):
        state["k"] = partition
        return world().federation.members(partition), world().federation.nonmembers(partition)

    def batches(n, size, epoch):
        k = state["k"]
        if epoch == 0:
            state["t"][k] += 1
            state["rng"] = generator(SEED, f"client {k}", state["t"][k], 0, "fit 1")
        order = torch.randperm(n, generator=state["rng"])
        return order.split(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "load_data", load_data)
        patch.setattr(task, "batches", batches)
        patch.setattr(task, "Net", lambda: world().build("mlp"))
        patch.setattr(server_app, "Net", lambda: world().fresh_model(0))
        run_app(
            torch_app, out=folder / "theirs", nodes=NODES, adapter=f"{AsNative.__module__}:AsNative", seed=SEED,
            config={"num-server-rounds": ROUNDS, "local-epochs": EPOCHS, "batch-size": BATCH, "learning-rate": ETA},
        )  # fmt: skip
        yield folder / "ours", folder / "theirs"


def test_the_same_models_are_sent(both):
    ours, theirs = (
        [e for e in RunFolder(folder).transcript.entries() if e.direction == "up" and "weights" in e.kinds()]
        for folder in both
    )
    assert len(ours) == len(theirs) == ROUNDS * NODES
    for a, b in zip(ours, theirs, strict=True):
        assert (a.round, a.client) == (b.round, b.client)
        assert list(a["w"]) == list(b["arrays"])
        for name, value in a["w"].items():
            torch.testing.assert_close(b["arrays"][name], value, rtol=0, atol=2e-6)
        assert a["n"] == b["metrics_num_examples"]
        assert a.fields["w"].payload == b.fields["arrays"].payload


def test_the_same_is_reached(both):
    ours, theirs = (RunFolder(folder).record for folder in both)
    for a, b in zip(ours.rounds, theirs.rounds, strict=True):
        assert b.utility.global_.test.accuracy == pytest.approx(a.utility.global_.test.accuracy, abs=0.004)
        assert b.participants == a.participants
    assert theirs.data.members == ours.data.members
    assert theirs.data.counts == ours.data.counts


@pytest.mark.long
def test_the_same_is_found(both):
    """Attacks see the same candidates, and models that differ by rounding."""
    ours, theirs = ({r.attack: r for r in attack_run(folder, attacks=ATTACKS)} for folder in both)
    assert set(ours) == set(theirs) >= set(ATTACKS)
    for name in ATTACKS:
        assert theirs[name].ran, name
        a, b = ours[name], theirs[name]
        assert b.pooled.auc.value == pytest.approx(a.pooled.auc.value, abs=5e-4), name
        assert (b.leak, b.split_broken) == (a.leak, a.split_broken), name
        assert b.clients == a.clients
    for name in ("blind_prior", "blind_pixels", "blind_nearest"):
        assert theirs[name].pooled.auc == ours[name].pooled.auc


@pytest.mark.long
def test_shadows_replay_the_apps_own_training(both):
    """On its requests, with other records: online LiRA runs, as it does on ours."""
    found = attack_run(both[1], attacks=[{"attack": "lira", "shadows": 4}], clients=[0])
    lira = next(r for r in found if r.attack == "lira")
    assert lira.ran, lira.reason
    assert 0.0 <= lira.pooled.auc.value <= 1.0


def test_without_serving_there_are_no_shadows(both, monkeypatch):
    monkeypatch.delattr(AsNative, "serving")
    found = attack_run(both[1], attacks=[{"attack": "lira_offline", "shadows": 2}], clients=[1])
    lira = next(r for r in found if r.attack == "lira_offline")
    assert not lira.ran
    assert "AsNative.serving is missing" in lira.reason


def test_canaries_are_planted_and_trained_on(sk_app, tmp_path):
    """Each node trains on its members and one record of each of its pairs, with a wrong label."""
    from skdigits import task

    seen = []
    fit = task.fit

    def noting(model, data):
        seen.append(data)
        fit(model, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "fit", noting)
        record = run_app(sk_app, out=tmp_path / "run", nodes=2, canaries=6, config={"num-server-rounds": 1})
    held = RunFolder(tmp_path / "run").world.federation
    x, y = task.shuffled()
    for k, data in enumerate(seen):
        shard = held.shards[k]
        assert len(shard.canaries) == 3
        assert len(data[1]) == len(task.load_data(k, 2)[0][1]) + 3 == record.data.members[k]
        planted = held.rows(shard.canaries[:, 0])
        assert np.array_equal(data[1][-3:], planted[1].numpy())
        assert np.allclose(data[0][-3:], planted[0].numpy())
        for image, label in zip(data[0][-3:], data[1][-3:], strict=True):
            true = y[np.abs(x - image).sum(1).argmin()]
            assert label != true
    assert record.ledger[0].by_kind["count"] == 0.0  # which counts them
    assert record.ledger[0].n == record.data.members[0]


# --- Flower's own strategies -----------------------------------------------------------------------------------------


def strategies():
    from flwr.serverapp import strategy as s

    plain = {"fraction_evaluate": 0.0}
    return {
        "FedAvg": lambda: s.FedAvg(**plain),
        "FedProx": lambda: s.FedProx(proximal_mu=0.1, **plain),
        "FedAdam": lambda: s.FedAdam(eta=0.1, **plain),
        "server DP": lambda: s.DifferentialPrivacyServerSideFixedClipping(s.FedAvg(**plain), 0.7, 1.0, 3),
        "client DP": lambda: s.DifferentialPrivacyClientSideFixedClipping(s.FedAvg(**plain), 0.7, 1.0, 3),
    }


@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "FedAdam", "server DP", "client DP"])
def test_strategies_run_unchanged(name, sk_app, tmp_path):
    """The same bits with and without the audit; what a DP wrapper claims stands beside an infinity of the uploads."""
    from flwr.app import ArrayRecord
    from flwr.clientapp import ClientApp
    from flwr.clientapp.mod import fixedclipping_mod
    from flwr.serverapp import ServerApp
    from skdigits import client_app, task

    client = ClientApp(mods=[fixedclipping_mod] if name == "client DP" else [])
    client.train()(client_app.train)
    results, nodes_seen = [], []
    server = ServerApp()

    @server.main()
    def main(grid, context):
        context.run_config.setdefault("local-epochs", 1)
        start = ArrayRecord(task.get_weights(task.create_model(1)))
        nodes_seen.append(sorted(grid.get_node_ids()))
        results.append(strategies()[name]().start(grid, start, num_rounds=2).arrays.to_numpy_ndarrays())

    class Configured(ClientApp):
        def __call__(self, message, context):
            context.run_config = {"local-epochs": 1}
            return client(message, context)

    run_here(server, Configured(), 3, seed=1)
    app = dataclasses.replace(sk_app, server=server, client=client)
    record = run_app(app, out=tmp_path / "run", nodes=3, seed=1, config={"local-epochs": 1})
    assert nodes_seen[0] == nodes_seen[1]
    for bare, audited in zip(*results, strict=True):
        assert np.array_equal(bare, audited)
    claims = [note for note in record.notes if note.startswith("claim of")]
    if "DP" in name:
        assert "noise multiplier 0.7, clipping norm 1" in claims[0]
        assert "there is no protection against the server" in claims[0]
    else:
        assert not claims
    assert record.ledger[0].by_kind["weights"] == float("inf")
    published = RunFolder(tmp_path / "run").record.published
    assert published == ["global.safetensors"]
