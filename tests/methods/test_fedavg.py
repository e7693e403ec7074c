"""FedProx, FedDyn, MOON, FedBN, FedNTD and FedNova: their losses by hand, what makes each of them FedAvg, and what they
keep."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedaudit import Augment, FedauditError, run
from fedaudit.methods.averaging.fedbn import travels
from fedaudit.methods.averaging.feddyn import regularised
from fedaudit.methods.averaging.fednova import FedNova
from fedaudit.methods.averaging.fedprox import proximal
from fedaudit.methods.averaging.moon import contrastive, l_con
from fedaudit.runtime.party import Client
from fedaudit.training.fit import Live
from fedaudit.training.models import Net, build
from fedaudit.wire.transcript import Transcript

LN2, LN3 = math.log(2), math.log(3)


class Scaled(Net):
    """e = x; two logits (a x_1, 0) with the one parameter a."""

    def __init__(self, a):
        super().__init__(nn.Identity(), nn.Identity(), width=2, arch="by hand")
        self.a = nn.Parameter(torch.tensor(a))

    def classify(self, e):
        return torch.stack([self.a * e[:, 0], torch.zeros(len(e))], 1)


# --- losses ---------------------------------------------------------------------------------------------------------


def test_proximal_loss_by_hand():
    """a = 1, w^t = 3, mu = 0.5: 0.25 (1 - 3)^2 = 1 on top of the cross-entropy. Logits (ln 3, 0) are (3/4, 1/4): class
    0 costs ln 4/3, class 1 ln 4. The slope of the second term is mu (a - w^t) = -1."""
    model = Scaled(1.0)
    x, y = torch.tensor([[LN3, 0.0], [LN3, 0.0]]), torch.tensor([0, 1])
    rows = proximal(Live(model), x, y, {"a": torch.tensor(3.0)}, 0.5)
    assert rows.tolist() == pytest.approx([math.log(4 / 3) + 1, math.log(4) + 1], abs=1e-6)
    still = torch.zeros(1, 2), torch.tensor([0])
    proximal(Live(model), *still, {"a": torch.tensor(3.0)}, 0.5).sum().backward()
    assert model.a.grad.item() == pytest.approx(-1.0)


def test_dynamic_regulariser_by_hand():
    """a = 1, g = 0.3, theta^{t-1} = 3, alpha = 0.5: - 0.3 + 0.25 (1 - 3)^2 = 0.7 beside ln 2 of equal logits; its slope
    is -g + alpha (a - theta^{t-1}) = -1.3."""
    model = Scaled(1.0)
    still = torch.zeros(1, 2), torch.tensor([0])
    value = regularised(Live(model), *still, {"a": torch.tensor(0.3)}, {"a": torch.tensor(3.0)}, 0.5)
    assert value.item() == pytest.approx(LN2 + 0.7, abs=1e-6)
    value.sum().backward()
    assert model.a.grad.item() == pytest.approx(-1.3)


def test_contrastive_loss_by_hand():
    """tau = 0.5. z = (1, 0), z_glob = (2, 0), z_prev = (0, 3): cosines 1 and 0, so -log e^2 / (e^2 + 1) = ln(1 + e^-2).
    Turned round, ln(1 + e^2). Where z_prev is z_glob, ln 2."""
    z = torch.tensor([[1.0, 0.0]] * 3)
    glob, prev = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]]), torch.tensor([[0.0, 3.0], [2.0, 0.0], [2.0, 2.0]])
    expected = [math.log(1 + math.exp(-2)), math.log(1 + math.exp(2)), LN2]
    assert l_con(z, glob, prev, 0.5).tolist() == pytest.approx(expected, abs=1e-6)
    x, y = torch.tensor([[1.0, 0.0]] * 3), torch.tensor([0, 0, 0])
    rows = contrastive(Live(Scaled(0.0)), x, y, glob, prev, 3.0, 0.5)
    assert rows.tolist() == pytest.approx([LN2 + 3 * v for v in expected], abs=1e-5)


# --- what makes them FedAvg -------------------------------------------------------------------------------------------

SAME = {"E": 2, "B": 32, "eta": 0.1}


def models(folder):
    return {path.name: load_file(path) for path in sorted((folder / "models").iterdir())}


def entries(folder, direction, field):
    return [e[field] for e in Transcript(folder / "transcript").entries() if e.direction == direction]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def ran(tiny, tmp_path):
    def make(method, name, **values):
        chosen = {**SAME, **values.pop("set", {})}
        given = {"rounds": 3, "model": "cnn_bn@0.5", "eval_every": 3, **values}
        record = run(tiny(method, set=chosen, **given), out=tmp_path / name)
        return record, tmp_path / name

    return make


_fedavg = {}  # its models by setting: several are held against them


def same_as_fedavg(ran, method, **values):
    plain = {**values, "set": {}}
    if str(plain) not in _fedavg:
        _fedavg[str(plain)] = models(ran("fedavg", "b", **plain)[1])
    a, b = models(ran(method, "a", **values)[1]), _fedavg[str(plain)]
    return a.keys() == b.keys() and all(equal(a[file], b[file]) for file in a)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "off"), [("fedprox", {"mu": 0.0}), ("moon", {"mu": 0.0}), ("fedntd", {"beta": 0.0})]
)
def test_without_its_term_it_is_fedavg_to_the_bit(method, off, ran):
    assert same_as_fedavg(ran, method, set=off)


@pytest.mark.parametrize(("method", "on"), [("fedprox", {"mu": 0.1}), ("moon", {"mu": 1.0}), ("fedntd", {"beta": 1.0})])
def test_with_its_term_it_is_not(method, on, ran):
    assert not same_as_fedavg(ran, method, set=on)


def test_fednova_takes_only_steps_whose_weights_are_known():
    FedNova.make({"momentum": 0.9})
    FedNova.make({"mu": 0.1})
    for wrong in ({"opt": "adam"}, {"opt": "adam", "mu": 0.1}, {"momentum": 0.9, "mu": 0.1}):
        with pytest.raises(FedauditError, match=r"mu and momentum|step of adam"):
            FedNova.make(wrong)


@pytest.mark.slow
def test_the_number_of_steps_costs_nothing_under_dp_sgd(tiny, tmp_path):
    """It follows from n, which stays the same when a record is replaced; so the client's total is finite."""
    private = {"training": {"mechanism": "dp-sgd", "sensitivity": "clip:1.0", "noise_multiplier": 0.8}}
    setting = tiny("fednova", rounds=1, clients=2, model="mlp", aux=0.8, set={"B": 16}, privacy=private)
    record = run(setting, out=tmp_path / "a")
    assert all(client.by_kind["count"] == 0 for client in record.ledger)


def test_fedbn_without_batch_norm_is_fedavg_to_the_bit(ran):
    assert same_as_fedavg(ran, "fedbn", model="cnn@0.5")


@pytest.mark.long
def test_feddyn_at_alpha_0_is_fedavg_of_equal_weights_to_the_bit(ran):
    """Clients of equal size (131 records each), so that FedAvg's weights are equal too."""
    even = {"partition": "iid", "clients": 2, "public": 0.0, "aux": 0.72}
    assert same_as_fedavg(ran, "feddyn", set={"alpha": 0.0}, **even)


@pytest.mark.long
def test_as_alpha_vanishes_feddyns_clients_train_as_fedavgs_and_its_server_overshoots(ran):
    """Round 1: replies tend to FedAvg's; theta^1 = mean - h / alpha = 2 mean - theta^0 where everybody answered."""
    small = ran("feddyn", "a", set={"alpha": 1e-6}, rounds=2)[1]
    plain = ran("fedavg", "b", rounds=2)[1]
    down, up = entries(small, "down", "theta"), entries(small, "up", "theta")
    names = down[0].parameters
    for mine, fedavgs in zip(up[:3], entries(plain, "up", "w")[:3], strict=True):
        assert all(torch.allclose(mine[name], fedavgs[name], atol=1e-5) for name in names)
    for name in names:
        mean = sum(theta[name] for theta in up[:3]) / 3
        assert torch.allclose(down[3][name], 2 * mean - down[0][name], atol=1e-5)
    assert not torch.allclose(down[3]["classifier.weight"], sum(w["classifier.weight"] for w in up[:3]) / 3, atol=1e-4)


def test_feddyns_server_adds_up_over_rounds(ran):
    """h adds up -alpha / m (theta_k - theta^{t-1}) over all rounds and the clients that took part in each."""
    record, folder = ran("feddyn", "a", set={"alpha": 0.1}, clients=4, participation=0.5, rounds=4, model="cnn")
    assert len({tuple(row.participants) for row in record.rounds}) > 1
    sent = {(e.round, e.client, e.direction): e["theta"] for e in Transcript(folder / "transcript").entries()}
    name = "classifier.weight"
    h = torch.zeros_like(sent[1, record.rounds[0].participants[0], "down"][name])
    for row in record.rounds[:-1]:
        t, P = row.round, row.participants
        before = sent[t, P[0], "down"][name]
        h = h - 0.1 / 4 * sum(sent[t, k, "up"][name] - before for k in P)
        after = sum(sent[t, k, "up"][name] for k in P) / len(P) - h / 0.1
        following = record.rounds[t].participants[0]
        assert torch.allclose(sent[t + 1, following, "down"][name], after, atol=1e-5)


# --- FedBN's split ----------------------------------------------------------------------------------------------------


def test_batch_norm_never_travels_and_everything_else_does(ran):
    folder = ran("fedbn", "a")[1]
    every = set(build("cnn_bn", shape=(1, 8, 8), classes=10).state_dict())
    own = {name for name in every if ".bn" in name}
    assert len(own) == 10
    for state in [*entries(folder, "down", "w"), *entries(folder, "up", "w")]:
        assert set(state) == every - own
    a, b = (models(folder)[f"client-{k:06d}.safetensors"] for k in (0, 1))
    assert not any(torch.equal(a[name], b[name]) for name in own if "num_batches" not in name)


def test_group_norm_travels():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.BatchNorm2d(4))
    assert travels(model) == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.long
def test_moon_compares_with_its_own_last_model(ran):
    """In round 1 there is none, and the contrastive loss has no influence: round 2 is the first that differs."""
    plain, moon = ran("fedavg", "b")[1], ran("moon", "a", set={"mu": 5.0})[1]
    a, b = entries(plain, "up", "w"), entries(moon, "up", "w")
    name = "encoder.conv1.weight"
    assert [torch.allclose(x[name], y[name], atol=1e-7) for x, y in zip(a, b, strict=True)] == [True] * 3 + [False] * 6


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "moon", "fedbn", "fedntd", "fedavgm", "heterofl", "fedrolex"])
def test_local_steps_stand_in_the_place_of_epochs(method, tiny, monkeypatch, tmp_path):
    """A client with two batches an epoch makes `steps` steps, whatever E is; without `steps` it makes E epochs."""
    asked = []
    plain = Client.fit

    def noted(self, *given, **options):
        asked.append((options.get("steps"), options.get("epochs")))
        return plain(self, *given, **options)

    monkeypatch.setattr(Client, "fit", noted)
    for more, wanted in (({"steps": 3}, (3, None)), ({}, (None, 2))):
        asked.clear()
        setting = {"E": 2, "B": 64, "eta": 0.1, **more}
        run(tiny(method, engine="serial", model="cnn@0.25", rounds=1, set=setting), out=tmp_path / str(len(more)))
        assert set(asked) == {wanted}


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "moon", "fedbn", "fedntd", "fedavgm", "heterofl", "fedrolex"])
def test_local_training_moves_and_mirrors_images_if_it_is_asked_to(method, tiny, augments, tmp_path):
    """Each setting reaches `fit` by itself; pixels from outside are black, and without both nothing is augmented."""
    cases = [
        ({}, None),
        ({"crop": 2}, Augment(crop=2, flip=False, fill=-1.0)),
        ({"flip": True}, Augment(crop=0, flip=True, fill=-1.0)),
    ]
    for i, (more, wanted) in enumerate(cases):
        augments.clear()
        setting = {"B": 64, "eta": 0.1, **more}
        run(tiny(method, engine="serial", model="cnn@0.25", rounds=1, set=setting), out=tmp_path / str(i))
        assert set(augments) == {wanted}


@pytest.mark.long
def test_mirrored_images_change_what_is_learned(ran):
    """The clients' weights differ from those of plain training, stacked or one after another, in the same way."""
    plain, stacked, serial = (
        entries(ran("fedavg", name, **more)[1], "up", "w")[0]["encoder.conv1.weight"]
        for name, more in (
            ("plain", {}),
            ("stacked", {"set": {"flip": True}, "engine": "stacked"}),
            ("serial", {"set": {"flip": True}, "engine": "serial"}),
        )
    )
    assert not torch.allclose(plain, stacked, atol=1e-4)
    assert torch.allclose(stacked, serial, atol=1e-5)
