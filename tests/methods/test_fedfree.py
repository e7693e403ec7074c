"""FedFree: each equation by hand, its settings, its traffic."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from bench import DIGITS, Bench
from engines import DropEngine
from safetensors.torch import load_file
from torch import nn

from fedaudit import State, state_of
from fedaudit.errors import SettingError
from fedaudit.methods.layers import _fedfree_alignment as alignment
from fedaudit.methods.layers import _fedfree_layers as layers
from fedaudit.methods.layers import _fedfree_sharing as sharing
from fedaudit.methods.layers import fedfree
from fedaudit.methods.layers._fedfree_layers import Layer, Weights
from fedaudit.methods.layers.fedfree import Critical, FedFree, Knowledge
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.runner import run
from fedaudit.runtime.task import ClientState
from fedaudit.training import models
from fedaudit.wire.codec import decode
from fedaudit.wire.traffic import Plan
from fedaudit.wire.transcript import Transcript


def weights(*rows):
    """A linear layer's weight as `kernel` gives it."""
    return layers.kernel(torch.tensor(rows, dtype=torch.float32))


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
    ours = layers.layers_of("fedfree_cnn", (3, 32, 32), 10)
    assert [layer.depth for layer in ours.values()] == [0, 0.25, 0.5, 0.75, 1]
    assert [layer.type for layer in ours.values()] == ["conv", "conv", "linear", "linear", "linear"]
    parameters = models.describe("fedfree_cnn", (3, 32, 32), 10)["parameters"]
    assert sum(layer.bytes for layer in ours.values()) == 4 * parameters
    assert len(layers.layers_of("resnet18", (3, 32, 32), 10)) == 21
    mobile = layers.layers_of("mobilenet_v2", (3, 32, 32), 10)
    assert len(mobile) == 53
    assert max(layer.groups for layer in mobile.values()) == 960


def test_parameters_against_table_a1():
    """Millions with ten classes, as Table A1 lists them; but for GoogLeNet and MobileNetV2, whose 6.8 and 3.5 are near
    what they have with the 1,000 classes of ImageNet (6.62 and 3.50)."""

    def millions(arch, classes=10):
        return models.describe(arch, (3, 32, 32), classes)["parameters"] / 1e6

    table = {"fedfree_cnn": 3.2, "resnet18": 11.2, "resnet34": 21.3, "resnet50": 23.5, "resnet101": 42.5}
    for arch, listed in {**table, "resnet152": 58.2}.items():
        assert millions(arch) == pytest.approx(listed, abs=0.05)
    assert (round(millions("googlenet"), 2), round(millions("mobilenet_v2"), 2)) == (5.61, 2.24)
    assert (round(millions("googlenet", 1000), 2), round(millions("mobilenet_v2", 1000), 2)) == (6.62, 3.5)


def test_corresponding_is_of_the_same_type_at_the_nearest_depth():
    ours = layers.layers_of("fedfree_cnn", (3, 32, 32), 10)

    def at(kind, depth):
        return layers.corresponding(Layer(kind, depth, 1, 0), ours)

    assert at("conv", 0.0) == "encoder.conv1"
    assert at("conv", 0.125) == "encoder.conv1"  # as near to both: the shallower
    assert at("conv", 0.13) == "encoder.conv2"
    assert at("conv", 1.0) == "encoder.conv2"
    assert at("linear", 0.0) == "encoder.fc1"
    assert at("linear", 0.7) == "encoder.fc2"
    assert layers.corresponding(Layer("conv", 0.5, 1, 0), layers.layers_of("mlp", (1, 8, 8), 10)) is None


# --- Eqs. 3-5 ----------------------------------------------------------------------------------------------------


def test_distillation_loss_by_hand():
    """g = [[1 2 9] [3 4 9]] with bias (1, 0), theta = [[1 0] [0 4] [7 7]] with bias (0, 0, 5): they share 2 outputs and
    2 inputs. On (1, 1): g gives (4, 7), theta (1, 4), 9 + 9 = 18. On (2, 0): (3, 6) and (2, 0), 1 + 36 = 37. Mean 27.5.
    A second layer [[1]] without bias shares one output and one input: 2 - 1 and 3 - 2, mean 1. Together 14.25."""
    X = torch.tensor([[1.0, 1.0, 5.0], [2.0, 0.0, 5.0]])[:, :, None, None]
    g = Weights(weights([1, 2, 9], [3, 4, 9]), torch.tensor([1.0, 0.0]))
    theta = Weights(weights([1, 0], [0, 4], [7, 7]), torch.tensor([0.0, 0.0, 5.0]))
    assert sharing.distillation_loss(g, [theta], X).item() == 27.5
    assert sharing.distillation_loss(g, [theta, Weights(weights([1]), None)], X).item() == 14.25


def test_distillation_loss_of_convolutions_by_hand():
    """g is 3 x 3 with 2 in the middle and 5 in a corner, theta 1 x 1 with 1. On a patch with 3 in the middle and 1 in
    that corner: 2 * 3 + 5 - 3 = 8, squared 64."""
    g = torch.zeros(1, 1, 3, 3)
    g[0, 0, 1, 1], g[0, 0, 0, 0] = 2, 5
    X = torch.full((1, 1, 3, 3), 7.0)
    X[0, 0, 1, 1], X[0, 0, 0, 0] = 3, 1
    theta = layers.kernel(torch.ones(1, 1, 1, 1))
    assert sharing.distillation_loss(Weights(g, None), [Weights(theta, None)], X).item() == 64


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_probing_a_convolution_is_the_convolution(groups):
    """On patches of the kernel's own size, a convolution without padding has one position: the same numbers."""
    conv = nn.Conv2d(4, 8, 3, groups=groups)
    X = torch.randn(5, 4, 3, 3)
    probed = sharing.output(Weights(layers.kernel(conv.weight, groups), conv.bias), X, 8, 4)
    assert torch.allclose(probed, conv(X).flatten(1), atol=1e-5)
    assert torch.equal(layers.kernel(conv.weight, groups, 3)[:3], layers.kernel(conv.weight, groups)[:3])


def share(method, G, thetas, ours, theirs):
    L = {i: Critical(uploaded, types) for i, (uploaded, types) in enumerate(thetas)}
    after, updated = method.share_knowledge(G, L, ours, dict.fromkeys(L, theirs), Bench())
    assert updated == {name.rpartition(".")[0] for name in G if not torch.equal(after[name], G[name])}
    return after


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
    kernel = sharing.average(torch.full((1, 1, 3, 3), 9.0), [torch.ones(2, 2, 1, 1)])
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
    assert alignment.entropy(w, 2).item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert alignment.entropy(w, 2, "tsallis").item() == pytest.approx(6 / 16)
    assert alignment.entropy(w, 2, "tsallis", q=3).item() == pytest.approx(18 / 64)
    assert alignment.entropy(w, 2, "collision").item() == pytest.approx(-math.log(10 / 16))
    assert alignment.entropy(torch.arange(512.0) / 511 - 0.5, 256).item() == pytest.approx(math.log(256), abs=1e-3)
    assert alignment.entropy(torch.full((3,), 0.3), 256).item() == 0


def distribute(method, G, uploads, updated=()):
    """`G` and `uploads` as {layer: (type, weights)}, layers at even depths."""

    def described(of):
        return {name: Layer(kind, n / max(len(of) - 1, 1), 1, 0) for n, (name, (kind, _)) in enumerate(of.items())}

    def state(of):
        return State({f"{name}.weight": torch.tensor(w, dtype=torch.float32) for name, (_, w) in of.items()})

    L = {i: Critical(state(of), {name: kind for name, (kind, _) in of.items()}) for i, of in uploads.items()}
    return method.distribute(state(G), L, described(G), {i: described(of) for i, of in uploads.items()}, set(updated))


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


def test_candidates_are_all_of_the_type_or_the_corresponding_one_or_those_updated():
    """The client's layer is the first: it corresponds to `first`, whose gain is ln 2; `last` would give ln 4, and
    `middle`, into which a layer went, 0.56."""
    G = {
        "first": ("linear", [0.0, 0.0, 3.0, 3.0]),
        "middle": ("linear", [0.0, 0.0, 0.0, 3.0]),
        "last": ("linear", [0.0, 1.0, 2.0, 3.0]),
    }
    uploads = {0: {"l": ("linear", [1.0, 1.0, 1.0, 1.0])}}
    sent = {
        rule: list(distribute(FedFree(bins=4, candidates=rule), G, uploads, {"middle"})[0].g)
        for rule in ("type", "corresponding", "updated")
    }
    assert sent == {"type": ["last.weight"], "corresponding": ["first.weight"], "updated": ["middle.weight"]}
    assert distribute(FedFree(bins=4, candidates="updated"), G, uploads, ()) == {}


def test_gains_with_either_bin_range_by_hand():
    """Four bins. theta = (0, 1, 2, 3) is spread over its own range: H = ln 4. g = (0, 0, 0, 12) has 3/4 and 1/4 in its
    own: 0.562. With own bins the gain is 0.562 - ln 4 < 0: nothing is sent.

    In common bins, [0, 12] in steps of 3: theta's 0, 1, 2 are in the first and 3 in the second, H = 0.562; g's zeros
    are in the first and 12 in the last, 0.562 too: the gain is 0. With g = (0, 4, 8, 12), H = ln 4 in both: the gain is
    0 with own bins and ln 4 - 0.562 with common ones.
    """
    H = functools.partial(alignment.entropy, bins=4)
    h = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    theta = {"l": torch.tensor([0.0, 1.0, 2.0, 3.0])}
    g = {"narrow": torch.tensor([0.0, 0.0, 0.0, 12.0]), "wide": torch.tensor([[0.0, 4.0], [8.0, 12.0]])}
    pairs = [("l", "narrow"), ("l", "wide")]
    own = alignment.gains(pairs, theta, g, H, "own", {})
    assert own == {("l", "narrow"): pytest.approx(h - math.log(4)), ("l", "wide"): pytest.approx(0)}
    common = alignment.gains(pairs, theta, g, H, "common", {})
    assert common == {("l", "narrow"): pytest.approx(0), ("l", "wide"): pytest.approx(math.log(4) - h)}
    lists = {name: ("linear", w.flatten().tolist()) for name, w in g.items()}
    upload = {0: {"l": ("linear", [0.0, 1.0, 2.0, 3.0])}}
    assert distribute(FedFree(bins=4), lists, upload) == {}
    assert list(distribute(FedFree(bins=4, bin_range="common"), lists, upload)[0].g) == ["wide.weight"]


def test_common_bins_reach_below_the_smaller_layer_too():
    """theta in [-6, -3], g in [3, 6]: the common range is [-6, 6]; in four bins of 3, theta's numbers are in the first
    but for -3, which opens the second; g's 3 and 4 are in the fourth, as 6 is."""
    assert [end.item() for end in alignment.span_of(torch.tensor([-6.0, -3.0]), torch.tensor([[3.0], [6.0]]))] == [
        -6,
        6,
    ]
    H = functools.partial(alignment.entropy, bins=4)
    theta, g = {"l": torch.tensor([-6.0, -3.0])}, {"j": torch.tensor([3.0, 4.0, 6.0])}
    assert alignment.gains([("l", "j")], theta, g, H, "common", {})["l", "j"] == pytest.approx(-math.log(2))


def test_projection_by_hand():
    """g = 1 2 3 4 into six places: 1 2 3 4 and then 0 0 (Eq. 7) or what was there (its text); into three: 1 2 3."""
    g = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    nines = torch.full((2, 3), 9.0)
    assert alignment.project(g, nines, "zero").tolist() == [[1, 2, 3], [4, 0, 0]]
    assert alignment.project(g, nines, "keep").tolist() == [[1, 2, 3], [4, 9, 9]]
    assert alignment.project(g, torch.full((3,), 9.0), "zero").tolist() == [1, 2, 3]
    assert alignment.project(None, torch.full((2,), 9.0), "keep").tolist() == [9, 9]
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
    found = {"deployed": method.personal(client), **method.points(client)}
    states = {"trained": before, "aligned": after}
    other = {"trained": "aligned", "aligned": "trained"}[deploy]
    assert found.keys() == {"deployed", other}
    assert all(torch.equal(state_of(found["deployed"])[name], states[deploy][name]) for name in before)
    assert all(torch.equal(state_of(found[other])[name], states[other][name]) for name in before)
    fresh = SimpleNamespace(model=client.model, memory={})  # who received nothing deploys what it has
    assert all(torch.equal(state_of(method.personal(fresh))[name], after[name]) for name in before)


# --- Eq. 7 where shapes differ -------------------------------------------------------------------------------------


def test_a_layer_returns_as_it_went_where_the_shapes_are_equal_and_in_part_where_not():
    """theta -> G -> theta. A client's 2 x 3 layer (6 numbers) goes into a 3 x 2 one with enough steps: the shared 2 x 2
    block of G becomes theta's. Back by Eq. 7, in the order of memory: G's first six numbers, row by row of two, into
    rows of three. So only theta[0, :2] returns to where it was; with equal shapes everything does."""
    theta = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    upload, types = State({"l.weight": theta, "l.bias": torch.tensor([7.0, 8.0])}), {"l": "linear"}
    method = FedFree(samples=64, alpha=0.1, steps=400)
    ours, theirs = {"g": Layer("linear", 0, 1, 0)}, {"l": Layer("linear", 0, 1, 0)}

    def there_and_back(rows, columns):
        G = State({"g.weight": torch.full((rows, columns), 9.0), "g.bias": torch.full((rows,), 9.0)})
        G = share(method, G, [(upload, types)], ours, theirs)
        return G["g.weight"], alignment.project(G["g.weight"], theta, "zero"), G["g.bias"]

    G, back, bias = there_and_back(3, 2)
    assert torch.allclose(G, torch.tensor([[1.0, 2.0], [4.0, 5.0], [9.0, 9.0]]), atol=1e-3)
    assert torch.allclose(back, torch.tensor([[1.0, 2.0, 4.0], [5.0, 9.0, 9.0]]), atol=1e-3)
    assert torch.allclose(bias, torch.tensor([7.0, 8.0, 9.0]), atol=1e-3)
    _, back, _ = there_and_back(2, 3)
    assert torch.allclose(back, theta, atol=1e-3)


def gradient_norm(model, x, y):
    model.zero_grad()
    nn.functional.cross_entropy(model.train()(x), y).backward()
    return model.encoder.conv2.weight.grad.norm().item()


def grown(arch, fill, shift):
    """By how much conv2's gradient grows when conv1's 144 numbers are put into its 4,608; then the gradient."""
    torch.manual_seed(1)
    model, x, y = models.build(arch, **DIGITS), torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.normal_(m.bias, std=shift)
    before = gradient_norm(model, x, y)
    g = State({"encoder.conv1.weight": model.encoder.conv1.weight.detach().clone()})
    FedFree(fill=fill).align(SimpleNamespace(model=model, memory={}), Knowledge("encoder.conv2", g))
    return gradient_norm(model, x, y) / before, model.encoder.conv2.weight.grad


def test_zero_fill_under_batch_norm_makes_the_gradient_leap():
    """31 filters of 32 are zero, so their outputs are constant, and batch norm divides by sqrt(0 + 1e-5). Where its
    shift is above 0, as after some training, ReLU lets the gradient pass, and it grows by more than an order of
    magnitude. Where the shift is 0, ReLU stops it: those filters get no gradient at all. `keep` leaves 97 % of the
    layer and its gradient as they were; without batch norm nothing leaps."""
    assert grown("cnn_bn", "zero", 0.1)[0] > 20
    assert 0.5 < grown("cnn_bn", "keep", 0.1)[0] < 2
    ratio, grad = grown("cnn_bn", "zero", 0.0)
    assert ratio < 1
    assert grad[1:].abs().max() == 0 < grad[0].abs().max()
    assert grown("cnn", "zero", 0.0)[0] < 2


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


# --- what a client that drops out is left with.


def test_no_stale_layer_of_fedfree_is_deployed(tmp_path):
    """Client 0 put a layer aside in round 1, trained in round 2, and dropped out before anything came. What it deploys
    is what it trained; not that with the layer of round 1 put back."""
    run(
        method="fedfree", rounds=2, clients=3, model="cnn:2,mlp:1", set={"E": 1, "B": 16, "eta": 0.1, "samples": 32},
        partition="dirichlet:0.5", engine=DropEngine({(0, 2, 1)}), out=tmp_path / "a",
    )  # fmt: skip
    received = [
        (e.client, e.round) for e in Transcript(tmp_path / "a" / "transcript").entries() if e.message == "Knowledge"
    ]
    assert (0, 1) in received, "a layer was put aside"
    held = decode(RunFolder(tmp_path / "a").client_state(0), ClientState)
    assert "trained" not in held.memory
    deployed = load_file(tmp_path / "a" / "models" / "client-000000.safetensors")
    assert all(torch.equal(deployed[name], t) for name, t in held.model.items())
