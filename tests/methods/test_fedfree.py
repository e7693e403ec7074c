"""FedFree and what it is compared with: Per-FedAvg, pFedLA, the constant predictor."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedaudit import State, state_of
from fedaudit.errors import PrivacyError, SettingError
from fedaudit.methods import fedfree, perfedavg, pfedla
from fedaudit.methods.fedfree import Critical, FedFree, Knowledge, Layer
from fedaudit.runtime.contract import check_declarations
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.method import Party
from fedaudit.runtime.runner import run
from fedaudit.training import models
from fedaudit.training.fit import Opt
from fedaudit.wire.traffic import Plan
from fedaudit.wire.transcript import Transcript

DIGITS = {"shape": (1, 8, 8), "classes": 10}


class Bench(Party):
    """A server without a run behind it."""

    def __init__(self, **facts):
        self._meter = Meter("server", 1, torch.device("cpu"))
        self.device = torch.device("cpu")
        self.__dict__.update(facts)

    def rng(self, purpose):
        return torch.Generator().manual_seed(0)


def weights(*rows):
    """A linear layer's weight as `kernel` gives it."""
    return fedfree.kernel(torch.tensor(rows, dtype=torch.float32))


# --- Eq. 2 -------------------------------------------------------------------------------------------------------


def test_relative_change_by_hand():
    """a: (3, 4) -> (3, 9), 25 / 25 = 1. b: weight (1, 2) stays, bias 2 -> 3.5, 2.25 / (1 + 4 + 4) = 0.25."""
    before = State({"a.weight": torch.tensor([3.0, 4.0]), "b.weight": torch.tensor([1.0, 2.0])})
    after = State({"a.weight": torch.tensor([3.0, 9.0]), "b.weight": torch.tensor([1.0, 2.0])})
    before["b.bias"], after["b.bias"] = torch.tensor([2.0]), torch.tensor([3.5])
    assert fedfree.relative_change(before, after, ["a", "b"]).tolist() == pytest.approx([1.0, 0.25])


def training_that_moves(**factors):
    """A client whose training multiplies some layers by a factor: relative change (factor - 1)^2."""
    model = models.build("cnn", **DIGITS)

    def fit(*_, **__):
        with torch.no_grad():
            for name, factor in factors.items():
                for p in model.get_submodule(name.replace("__", ".")).parameters():
                    p.mul_(factor)

    return SimpleNamespace(model=model, memory={}, fit=fit, device=torch.device("cpu"), rng=Bench().rng)


def test_the_k_layers_that_changed_most_are_uploaded():
    """Changes 0.04 (conv1), 0.25 (fc1), 0.09 (classifier), 0 (conv2)."""
    client = training_that_moves(encoder__conv1=1.2, encoder__fc1=0.5, classifier=1.3)
    critical = FedFree(k=2).extract(client, None)
    assert critical.types == {"encoder.fc1": "linear", "classifier": "linear"}
    assert list(critical.layers) == ["encoder.fc1.weight", "encoder.fc1.bias", "classifier.weight", "classifier.bias"]
    assert torch.equal(critical.layers["classifier.bias"], client.model.classifier.bias)
    every = FedFree(k=9).extract(training_that_moves(), None)
    assert len(every.types) == 4


def test_random_layers_do_not_look_at_the_change():
    picks = set()
    for seed in range(8):
        client = training_that_moves(encoder__fc1=0.5)
        client.rng = lambda _, seed=seed: torch.Generator().manual_seed(seed)
        picks.add(tuple(FedFree(k=1, select="random").extract(client, None).types))
    assert len(picks) > 1


# --- which layers, and which correspond --------------------------------------------------------------------------


def test_layers_are_convolutions_and_linear_layers_from_first_to_last():
    """The CNN of Table A1 has five, at depths 0, 1/4, ..., 1. ResNet18 has 17 convolutions, 3 in its short cuts, and 1
    linear layer; MobileNetV2 has the 53 of Table A1."""
    ours = fedfree.layers_of("fedfree_cnn", (3, 32, 32), 10)
    assert [layer.depth for layer in ours.values()] == [0, 0.25, 0.5, 0.75, 1]
    assert [layer.type for layer in ours.values()] == ["conv", "conv", "linear", "linear", "linear"]
    parameters = models.describe("fedfree_cnn", (3, 32, 32), 10)["parameters"]
    assert sum(layer.bytes for layer in ours.values()) == 4 * parameters
    assert len(fedfree.layers_of("resnet18", (3, 32, 32), 10)) == 21
    mobile = fedfree.layers_of("mobilenet_v2", (3, 32, 32), 10)
    assert len(mobile) == 53
    assert max(layer.groups for layer in mobile.values()) == 960


def test_corresponding_is_of_the_same_type_at_the_nearest_depth():
    ours = fedfree.layers_of("fedfree_cnn", (3, 32, 32), 10)

    def at(kind, depth):
        return fedfree.corresponding(Layer(kind, depth, 1, 0), ours)

    assert at("conv", 0.0) == "encoder.conv1"
    assert at("conv", 0.125) == "encoder.conv1"  # as near to both: the shallower
    assert at("conv", 0.13) == "encoder.conv2"
    assert at("conv", 1.0) == "encoder.conv2"
    assert at("linear", 0.0) == "encoder.fc1"
    assert at("linear", 0.7) == "encoder.fc2"
    assert fedfree.corresponding(Layer("conv", 0.5, 1, 0), fedfree.layers_of("mlp", (1, 8, 8), 10)) is None


# --- Eqs. 3-5 ----------------------------------------------------------------------------------------------------


def test_distillation_loss_by_hand():
    """g = [[1 2 9] [3 4 9]] with bias (1, 0), theta = [[1 0] [0 4] [7 7]] with bias (0, 0, 5): they share 2 outputs and
    2 inputs. On (1, 1): g gives (4, 7), theta (1, 4), 9 + 9 = 18. On (2, 0): (3, 6) and (2, 0), 1 + 36 = 37. Mean 27.5.
    A second layer [[1]] without bias shares one output and one input: 2 - 1 and 3 - 2, mean 1. Together 14.25."""
    X = torch.tensor([[1.0, 1.0, 5.0], [2.0, 0.0, 5.0]])[:, :, None, None]
    g = weights([1, 2, 9], [3, 4, 9]), torch.tensor([1.0, 0.0])
    theta = weights([1, 0], [0, 4], [7, 7]), torch.tensor([0.0, 0.0, 5.0])
    assert fedfree.distillation_loss(g, [theta], X).item() == 27.5
    assert fedfree.distillation_loss(g, [theta, (weights([1]), None)], X).item() == 14.25


def test_distillation_loss_of_convolutions_by_hand():
    """g is 3 x 3 with 2 in the middle and 5 in a corner, theta 1 x 1 with 1. On a patch with 3 in the middle and 1 in
    that corner: 2 * 3 + 5 - 3 = 8, squared 64."""
    g = torch.zeros(1, 1, 3, 3)
    g[0, 0, 1, 1], g[0, 0, 0, 0] = 2, 5
    X = torch.full((1, 1, 3, 3), 7.0)
    X[0, 0, 1, 1], X[0, 0, 0, 0] = 3, 1
    theta = fedfree.kernel(torch.ones(1, 1, 1, 1))
    assert fedfree.distillation_loss((g, None), [(theta, None)], X).item() == 64


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_probing_a_convolution_is_the_convolution(groups):
    """On patches of the kernel's own size, a convolution without padding has one position: the same numbers."""
    conv = nn.Conv2d(4, 8, 3, groups=groups)
    X = torch.randn(5, 4, 3, 3)
    probed = fedfree.output(fedfree.kernel(conv.weight, groups), conv.bias, X, 8, 4)
    assert torch.allclose(probed, conv(X).flatten(1), atol=1e-5)
    assert torch.equal(fedfree.kernel(conv.weight, groups, 3)[:3], fedfree.kernel(conv.weight, groups)[:3])


def share(method, G, thetas, ours, theirs):
    L = {i: Critical(layers, types) for i, (layers, types) in enumerate(thetas)}
    return method.share_knowledge(G, L, ours, dict.fromkeys(L, theirs), Bench())


def linear(name, w, b):
    tensors = {f"{name}.weight": torch.tensor(w), f"{name}.bias": torch.tensor(b)}
    return State(tensors), {name: "linear"}


def test_one_server_step_is_one_gradient_step():
    """L_D = mean_n ||(W - V) x_n + (b - c)||^2, so with r_n the vector inside: W -= alpha 2/N sum_n r_n x_n^T, and
    b -= alpha 2/N sum_n r_n."""
    W, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 0.0])
    V, c = torch.tensor([[0.5, 2.0], [3.0, 5.0]]), torch.tensor([0.0, 2.0])
    G = State({"g.weight": W, "g.bias": b, "other.weight": torch.ones(3, 3)})
    ours = {"g": Layer("linear", 0, 1, 0), "other": Layer("conv", 1, 1, 0)}
    theta, types = State({"l.weight": V, "l.bias": c}), {"l": "linear"}
    new = share(FedFree(samples=7, alpha=0.1), G, [(theta, types)], ours, {"l": Layer("linear", 1, 1, 0)})
    X = torch.randn(7, 2, 1, 1, generator=Bench().rng("")).flatten(1)
    r = X @ (W - V).T + (b - c)
    assert torch.allclose(new["g.weight"], W - 0.1 * 2 / 7 * r.T @ X)
    assert torch.allclose(new["g.bias"], b - 0.1 * 2 / 7 * r.sum(0))
    assert torch.equal(new["other.weight"], G["other.weight"])  # nobody uploaded a layer that corresponds to it
    assert torch.equal(G["g.weight"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))  # the state before stays what it was


def test_many_server_steps_transfer_the_shared_block_and_leave_the_rest():
    """Two clients' layers agree in function on the shared 1 x 2 block up to their mean: g's block goes to the mean."""
    G, _ = linear("g", [[1.0, 2.0, 9.0], [3.0, 4.0, 9.0]], [1.0, 0.0])
    ours, theirs = {"g": Layer("linear", 0, 1, 0)}, {"l": Layer("linear", 0, 1, 0)}
    clients = [linear("l", [[5.0, 1.0]], [2.0]), linear("l", [[7.0, 3.0]], [4.0])]
    new = share(FedFree(samples=64, alpha=0.1, steps=300), G, clients, ours, theirs)
    assert torch.allclose(new["g.weight"], torch.tensor([[6.0, 2.0, 9.0], [3.0, 4.0, 9.0]]), atol=1e-3)
    assert torch.allclose(new["g.bias"], torch.tensor([3.0, 0.0]), atol=1e-3)


def test_plain_averaging_by_hand():
    """[[2 4]] and [[4 0] [6 0] [1 1]] into a 2 x 2 layer: (2 + 4) / 2, (4 + 0) / 2 in the row that both have; 6, 0 in
    the second. Biases 1 and (3, 5, 7): 2 and 5. A 1 x 1 kernel in a 3 x 3 one replaces the middle and no more."""
    G, _ = linear("g", [[9.0, 9.0], [9.0, 9.0]], [9.0, 9.0])
    ours, theirs = {"g": Layer("linear", 0, 1, 0)}, {"l": Layer("linear", 0, 1, 0)}
    clients = [linear("l", [[2.0, 4.0]], [1.0]), linear("l", [[4.0, 0.0], [6.0, 0.0], [1.0, 1.0]], [3.0, 5.0, 7.0])]
    new = share(FedFree(share="average"), G, clients, ours, theirs)
    assert new["g.weight"].tolist() == [[3, 2], [6, 0]]
    assert new["g.bias"].tolist() == [2, 5]
    kernel = fedfree.average(torch.full((1, 1, 3, 3), 9.0), [torch.ones(2, 2, 1, 1)])
    assert kernel.flatten().tolist() == [9, 9, 9, 9, 1, 9, 9, 9, 9]


def test_a_grouped_global_model_is_refused():
    server = Bench(model=lambda: SimpleNamespace(arch="mobilenet_v2"), **DIGITS)
    with pytest.raises(SettingError, match=r"mobilenet_v2.*grouped"):
        FedFree().init(server)


# --- Eqs. 6, 7 ---------------------------------------------------------------------------------------------------


def test_entropies_by_hand():
    """Weights 0, 0, 0, 1 in two bins: p = (3/4, 1/4). Tsallis of order 2: 1 - 10/16; of order 3: (1 - 28/64) / 2.
    Collision: -ln(10/16). The largest weight belongs to the last bin, and equal weights are all in one."""
    w = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    assert fedfree.entropy(w, 2).item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert fedfree.entropy(w, 2, "tsallis").item() == pytest.approx(6 / 16)
    assert fedfree.entropy(w, 2, "tsallis", q=3).item() == pytest.approx(18 / 64)
    assert fedfree.entropy(w, 2, "collision").item() == pytest.approx(-math.log(10 / 16))
    assert fedfree.entropy(torch.arange(512.0) / 511 - 0.5, 256).item() == pytest.approx(math.log(256), abs=1e-3)
    assert fedfree.entropy(torch.full((3,), 0.3), 256).item() == 0


def distribute(method, G, uploads):
    """`G` and `uploads` as {layer: (type, weights)}, layers at even depths."""

    def layers(of):
        return {name: Layer(kind, n / max(len(of) - 1, 1), 1, 0) for n, (name, (kind, _)) in enumerate(of.items())}

    def state(of):
        return State({f"{name}.weight": torch.tensor(w, dtype=torch.float32) for name, (_, w) in of.items()})

    L = {i: Critical(state(of), {name: kind for name, (kind, _) in of.items()}) for i, of in uploads.items()}
    return method.distribute(state(G), L, layers(G), {i: layers(of) for i, of in uploads.items()})


def test_the_largest_positive_gain_is_sent_and_nothing_where_there_is_none():
    """In four bins: spread over all four ln 4, over two ln 2, all but one equal 0.56, constant 0.

    Client 0: conv gains ln 4 - 0 = ln 4, linear ln 2 - 0.56: conv. Client 1: its conv already has ln 4, its linear
    gains ln 2. Client 2: every gain is negative or 0. Client 3: linear has more than the global linear, and conv does
    not count for it although conv has more: the types differ.
    """
    spread, two, one, none = [0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 3.0, 3.0], [0.0, 0.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0]
    G = {"gc": ("conv", spread), "gl": ("linear", two)}
    uploads = {
        0: {"c": ("conv", none), "l": ("linear", one)},
        1: {"c": ("conv", spread), "l": ("linear", none)},
        2: {"c": ("conv", spread), "l": ("linear", spread)},
        3: {"l": ("linear", spread)},
    }
    messages = distribute(FedFree(bins=4), G, uploads)
    assert {i: (m.layer, list(m.g)) for i, m in messages.items()} == {0: ("c", ["gc.weight"]), 1: ("l", ["gl.weight"])}
    assert torch.equal(messages[0].g["gc.weight"], torch.tensor(spread))


def test_candidates_are_all_of_the_type_or_the_corresponding_one():
    """The client's layer is the first: it corresponds to `first`, whose gain is ln 2; `last` would give ln 4."""
    G = {"first": ("linear", [0.0, 0.0, 3.0, 3.0]), "last": ("linear", [0.0, 1.0, 2.0, 3.0])}
    uploads = {0: {"l": ("linear", [1.0, 1.0, 1.0, 1.0])}}
    assert list(distribute(FedFree(bins=4), G, uploads)[0].g) == ["last.weight"]
    assert list(distribute(FedFree(bins=4, candidates="corresponding"), G, uploads)[0].g) == ["first.weight"]


def test_projection_by_hand():
    """g = 1 2 3 4 into six places: 1 2 3 4 and then 0 0 (Eq. 7) or what was there (its text); into three: 1 2 3."""
    g = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    nines = torch.full((2, 3), 9.0)
    assert fedfree.project(g, nines, "zero").tolist() == [[1, 2, 3], [4, 0, 0]]
    assert fedfree.project(g, nines, "keep").tolist() == [[1, 2, 3], [4, 9, 9]]
    assert fedfree.project(g, torch.full((3,), 9.0), "zero").tolist() == [1, 2, 3]
    assert fedfree.project(None, torch.full((2,), 9.0), "keep").tolist() == [9, 9]
    assert nines.tolist() == [[9, 9, 9], [9, 9, 9]]


@pytest.mark.parametrize("deploy", ["trained", "aligned"])
def test_the_received_layer_is_put_in_and_what_is_deployed(deploy):
    client = SimpleNamespace(model=models.build("cnn", **DIGITS), memory={})
    before = state_of(client.model)
    g = State({"classifier.weight": torch.ones(2, 3), "classifier.bias": torch.full((2,), 5.0)})
    method = FedFree(deploy=deploy)
    method.align(client, Knowledge("encoder.conv1", g))
    after = state_of(client.model)
    assert after["encoder.conv1.weight"].flatten().tolist() == [1.0] * 6 + [0.0] * 138
    assert after["encoder.conv1.bias"].tolist() == [5.0, 5.0] + [0.0] * 14
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"encoder.conv1.weight", "encoder.conv1.bias"}
    deployed = state_of(method.personal(client))
    expected = before if deploy == "trained" else after
    assert all(torch.equal(deployed[name], expected[name]) for name in before)


# --- traffic -----------------------------------------------------------------------------------------------------


def plan(**facts):
    return Plan(1, [0, 1], {0: 9, 1: 9}, {0: "cnn", 1: "mlp"}, "fedfree_cnn", (1, 8, 8), 10, lambda arch: None, **facts)


def test_traffic_follows_from_the_choice():
    """cnn: conv1 has 16 * 9 + 16 = 160 numbers, the classifier 64 * 10 + 10 = 650; mlp: fc1 has 64 * 128 + 128 = 8320.
    The global conv2 has 64 * 32 * 25 + 64 = 51264. Names: "encoder.conv1" 13 bytes, "classifier" 10,
    "encoder.fc1" 11."""
    choices = {
        "Critical.layers": {
            0: ["encoder.conv1.weight", "encoder.conv1.bias", "classifier.weight", "classifier.bias"],
            1: ["encoder.fc1.weight", "encoder.fc1.bias"],
        },
        "Knowledge.layer": {0: "encoder.conv1"},
        "Knowledge.g": {0: ["encoder.conv2.weight", "encoder.conv2.bias"]},
    }
    assert FedFree().traffic(plan(asks=[([0, 1], [0, 1]), ([0], [0])], choices=choices)) == {
        ("up", "Critical.layers"): 4 * (160 + 650 + 8320),
        ("up", "Critical.types"): (13 + 4) + (10 + 6) + (11 + 6),
        ("down", "Knowledge.layer"): 13,
        ("down", "Knowledge.g"): 4 * 51264,
    }


def test_planned_traffic_is_an_expectation():
    """cnn has 160 + 4640 + 8256 + 650 numbers in 4 layers, mlp 8320 + 1290 in 2: two layers are half and all."""
    declared = FedFree().traffic(plan())
    assert declared["up", "Critical.layers"] == 4 * ((160 + 4640 + 8256 + 650) // 2 + 8320 + 1290)
    total = models.describe("fedfree_cnn", (1, 8, 8), 10)["parameters"]
    assert declared["down", "Knowledge.g"] == 2 * round(4 * total / 5)


def test_different_models_share_layers(tiny, tmp_path):
    """Three architectures; the run compares declared with measured bytes, and one round's choice is added up here."""
    setting = tiny("fedfree", model="digits-3", rounds=2)
    record = run(setting, out=tmp_path / "a")
    entries = list(Transcript(tmp_path / "a" / "transcript").entries())
    critical = [e for e in entries if e.message == "Critical"]
    assert len(critical) == 6
    assert all(len(e["types"]) == 2 for e in critical)
    measured = sum(t.numel() * 4 for e in critical for t in e["layers"].values())
    assert measured == next(row.payload for row in record.traffic if row.field == "Critical.layers")
    received = [e for e in entries if e.message == "Knowledge"]
    assert received
    assert all(
        e["layer"] in c["types"] for e in received for c in critical if (c.round, c.client) == (e.round, e.client)
    )


# --- the constant predictor --------------------------------------------------------------------------------------


def test_with_one_class_per_client_a_constant_is_perfect(tiny, tmp_path):
    record = run(tiny("constant", clients=10, partition="classes:1", rounds=1), out=tmp_path / "a")
    clients = record.result["last"]["clients"]
    assert clients["local_test"]["each"] == [1.0] * 10
    assert clients["global_test"]["mean"] == pytest.approx(0.1, abs=0.02)
    assert record.bytes("up") == record.bytes("down") == 0


def test_the_constant_is_the_most_frequent_class():
    client = SimpleNamespace(model=models.build("cnn", **DIGITS), y=torch.tensor([7, 3, 3, 0]), classes=10)
    from fedaudit.methods.constant import Constant

    Constant().count(client, None)
    assert client.model(torch.randn(4, 1, 8, 8)).argmax(1).tolist() == [3, 3, 3, 3]


# --- Per-FedAvg --------------------------------------------------------------------------------------------------


def test_first_order_steps_by_hand():
    """f(w) = w^2 / 2 at w = 2, alpha = 0.5, beta = 0.1: w~ = 2 - 0.5 * 2 = 1, then 2 - 0.1 * 1 = 1.9. Once more:
    w~ = 0.95, 1.9 - 0.095 = 1.805."""
    w = torch.tensor([2.0], requires_grad=True)
    optimiser = Opt(perfedavg.FirstOrder, {"alpha": 0.5, "beta": 0.1}).build([w])
    seen = []
    for _ in range(4):
        optimiser.zero_grad()
        (w**2 / 2).sum().backward()
        optimiser.step()
        seen.append(w.item())
    assert seen == pytest.approx([1.0, 1.9, 0.95, 1.805])


def test_hessian_free_direction_by_hand():
    """f(w) = w^4 / 4 at w = 1, alpha = 0.1: grad = w^3, so w~ = 0.9 and u = 0.729. The central difference of w^3 along
    u is 3 u + delta^2 u^3, and the direction u - 0.1 (3 u + delta^2 u^3). Each gradient uses its own batch."""
    used = []

    def grad(w, batch):
        used.append(batch)
        return {"w": w["w"] ** 3}

    u, delta = 0.729, 0.5
    step = perfedavg.hessian_free(grad, {"w": torch.tensor(1.0, dtype=torch.float64)}, ["D", "D'", "D''"], 0.1, delta)
    assert step["w"].item() == pytest.approx(u - 0.1 * (3 * u + delta**2 * u**3))
    assert used == ["D", "D'", "D''", "D''"]


def test_hessian_free_is_the_derivative_of_the_adapted_loss():
    """On one batch, (I - alpha H(w)) grad f(w - alpha grad f(w)) is the gradient of f(w - alpha grad f(w)): autograd's,
    through both gradients, against one meta step of rate 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    w = dict(model.named_parameters())

    def f(at):
        return nn.functional.cross_entropy(torch.func.functional_call(model, at, (x,)), y)

    first = torch.autograd.grad(f(w), list(w.values()), create_graph=True)
    adapted = {name: t - 0.3 * g for (name, t), g in zip(w.items(), first, strict=True)}
    exact = torch.autograd.grad(f(adapted), list(w.values()))
    client = SimpleNamespace(x=x, y=y, rng=Bench().rng, device=torch.device("cpu"), optimise=Bench().optimise)
    before = copy.deepcopy(w)
    perfedavg.PerFedAvg(variant="HF", tau=1, B=6, alpha=0.3, beta=1.0, delta=1e-4).fit_hessian_free(client, model)
    for (name, t), g in zip(w.items(), exact, strict=True):
        assert torch.allclose(before[name] - t, g, atol=1e-7)


def test_per_fedavg_counts_epochs_or_steps():
    """25 records in batches of 10 are 3 batches: 5 epochs make 15 meta steps."""
    client = range(25)
    assert perfedavg.PerFedAvg(tau=7).meta_steps(client) == 7
    assert perfedavg.PerFedAvg.make({}, "cifar10").meta_steps(client) == 15


def test_per_fedavg_deploys_one_step_from_what_it_received(tiny, tmp_path):
    """With every record in the batch, the step is that of the client's whole loss."""
    setting = tiny("perfedavg", rounds=1, set={"tau": 2, "B": 10_000, "alpha": 0.2, "variant": "HF"})
    run(setting, out=tmp_path / "a")
    from safetensors.torch import load_file

    from fedaudit.runtime.world import world_of

    world = world_of(setting.model_dump_json())
    w = next(iter(Transcript(tmp_path / "a" / "transcript").entries()))["w"]
    model = world.build("cnn")
    model.load_state_dict(w)
    x, y = world.members(0)
    nn.functional.cross_entropy(model(x), y).backward()
    deployed = load_file(tmp_path / "a" / "models" / "client-000000.safetensors")
    for name, p in model.named_parameters():
        assert torch.allclose(deployed[name], p - 0.2 * p.grad, atol=1e-5)


def test_hessian_free_declarations_hold(tiny):
    engine = check_declarations(tiny("perfedavg", rounds=1, set={"variant": "HF", "tau": 2}))
    assert engine.compared == {"Updated.w"}


def test_first_order_trains_with_dp_sgd_and_hessian_free_is_refused(tiny, tmp_path):
    privacy = {"training": {"noise_multiplier": 1.0}}
    record = run(tiny("perfedavg", rounds=1, privacy=privacy), out=tmp_path / "FO")
    entries = {e.mechanism for c in record.ledger for e in c.entries if e.field == "Updated.w"}
    assert entries == {"post-processing of DP-SGD"}
    with pytest.raises(PrivacyError, match="optimise cannot be made private"):
        run(tiny("perfedavg", rounds=1, privacy=privacy, set={"variant": "HF"}), out=tmp_path / "HF")


# --- pFedLA ------------------------------------------------------------------------------------------------------


def test_a_layer_is_what_lies_in_one_module():
    names = ["encoder.conv1.weight", "encoder.conv1.bias", "encoder.bn1.weight", "encoder.bn1.running_mean", "token"]
    assert pfedla.layers(names) == [names[:2], names[2:4], ["token"]]


def test_pfedla_round_by_hand():
    """Two clients, one layer of one number, theta = (1, 3); a hypernetwork without hidden layers whose weights and
    biases are 0 gives alpha = (1/2, 1/2), so theta-bar = 2 for both. Client 0 answers +1, client 1 does not answer.

    In alpha_j the slope of theta-bar_0 Delta theta_0 is theta_j: (1, 3), mean 2. Through the softmax the biases of
    hypernetwork 0 move by eta_h / 2 (1 - 2, 3 - 2), its weights by that times v_0, and v_0 by 0, as the weights are 0.
    theta_0 = 2 + 1, theta_1 = 3 as before; a counter (3, 4) is mixed to 3.5, rounded to 4, and grows by 5.
    """
    theta = State({"a.weight": torch.tensor([[1.0], [3.0]]), "a.count": torch.tensor([3, 4])}, buffers=["a.count"])
    psi = State({"0.weight": torch.zeros(2, 1, 2), "0.bias": torch.zeros(2, 2)})
    v = torch.tensor([[10.0], [20.0]])
    sent = {}

    class Cohort:
        ids = (0, 1)

        def ask(self, fn, messages):
            sent.update(messages)
            return {0: pfedla.Update(State({"a.weight": torch.tensor([1.0]), "a.count": torch.tensor(5)}, ["a.count"]))}

    method = pfedla.PFedLA(eta_h=0.01, depth=0)
    after = method.round(pfedla.Hyper(theta, v, psi), Bench(clients=2), Cohort())
    assert [m.theta_bar["a.weight"].item() for m in sent.values()] == [2, 2]
    assert [m.theta_bar["a.count"].item() for m in sent.values()] == [4, 4]
    assert after.theta["a.weight"].flatten().tolist() == [3, 3]
    assert after.theta["a.count"].tolist() == [9, 4]
    assert after.psi["0.bias"].flatten().tolist() == pytest.approx([-0.005, 0.005, 0, 0])
    assert after.psi["0.weight"].flatten().tolist() == pytest.approx([-0.05, 0.05, 0, 0])
    assert after.v.flatten().tolist() == [10, 20]
    assert (theta["a.weight"].flatten().tolist(), psi["0.bias"].abs().sum().item()) == ([1, 3], 0)


def test_hypernetworks_give_weights_that_sum_to_one_for_each_layer():
    server = Bench(clients=3, model=lambda: models.build("cnn", **DIGITS))
    s = pfedla.PFedLA(width=8, depth=2).init(server)
    alpha = pfedla.HN(s.v, s.psi, 3)
    assert alpha.shape == (3, 4, 3)
    assert torch.allclose(alpha.sum(2), torch.ones(3, 4))
    by_hand = s.v[1]
    for d in range(3):
        by_hand = by_hand @ s.psi[f"{d}.weight"][1] + s.psi[f"{d}.bias"][1]
        by_hand = by_hand.relu() if d < 2 else by_hand
    assert torch.allclose(alpha[1], by_hand.view(4, 3).softmax(1), atol=1e-6)
