"""Sub-models: which units belong together, Eq. 1 of DFRD, and what static, random and rolling extraction do with it."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedaudit import State, ce, load, run, state_of, weighted_mean
from fedaudit.errors import PrivacyError, SettingError
from fedaudit.methods.datafree._host import Alone, Plain
from fedaudit.methods.submodels._submodel import (
    average,
    budgets,
    choose,
    extract,
    family_of,
    layout,
    placed,
    positions,
)
from fedaudit.methods.submodels.feddropout import drawn
from fedaudit.methods.submodels.fedrolex import FedRolex
from fedaudit.methods.submodels.heterofl import HeteroFL, folded, masked_ce, scaler
from fedaudit.runtime.world import World
from fedaudit.training import models
from fedaudit.wire.transcript import Transcript


def first(width, m):
    return torch.arange(m)


# --- widths ---------------------------------------------------------------------------------------------------------


def test_budgets_by_hand():
    """N = 10, sigma = 4. rho = 5: floor(i / 2) = 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, capped at 4. rho = 10: i itself.
    rho = 40: 4 i, so everybody has 1/16. Three clients, rho = 5: floor(5/3), floor(10/3), 5 = 1, 3, 5."""
    assert budgets(10, 4, 5) == [Fraction(1, d) for d in (1, 2, 2, 4, 4, 8, 8, 16, 16, 16)]
    assert budgets(10, 4, 10) == [Fraction(1, d) for d in (2, 4, 8, 16, 16, 16, 16, 16, 16, 16)]
    assert budgets(10, 4, 40) == [Fraction(1, 16)] * 10
    assert budgets(3, 4, 5) == [Fraction(1, d) for d in (2, 8, 16)]
    assert FedRolex(rho=5).archs("cnn", 3) == ["cnn@0.5", "cnn@0.125", "cnn@0.0625"]
    assert FedRolex(sigma=0).archs("cnn", 2) == ["cnn", "cnn"]


@pytest.mark.parametrize("clients", [1, 2, 3, 4, 5, 6, 10, 40])
def test_by_default_somebody_has_the_whole_network(clients):
    """rho = 5 wherever it leaves the first client whole, floor(5 / N) = 0: six clients or more."""
    archs = HeteroFL().archs("cnn", clients)
    assert archs[0] == "cnn"
    assert archs == HeteroFL(rho=min(5, clients - 1)).archs("cnn", clients)
    assert (HeteroFL(rho=5).archs("cnn", clients)[0] == "cnn") == (clients > 5)


def test_what_nobody_has_trained_is_in_the_record(tiny, tmp_path):
    """Two clients of half the width: HeteroFL never reaches the other units. cnn on 8 x 8 digits has filters 16 and 32
    of 3 x 3, 64 units on 128 values, 10 classes; at half the width 8, 16, 32 units on 64.

    Parameters: 16 x 9 + 16 + 32 x 16 x 9 + 32 + 64 x 128 + 64 + 10 x 64 + 10 = 13,706. Trained: 8 x 9 + 8 + 16 x 8 x 9
    + 16 + 32 x 64 + 32 + 10 x 32 + 10 = 3,658. FedRolex rolls on by one unit a round, and reaches more of them."""
    half = {"clients": 2, "model": "cnn@0.5:2", "rounds": 3}
    static = run(tiny("heterofl", **half), out=tmp_path / "a")
    assert [row.diagnostics["untrained"] for row in static.rounds] == pytest.approx([1 - 3658 / 13706] * 3)
    rolling = run(tiny("fedrolex", **half), out=tmp_path / "b")
    found = [row.diagnostics["untrained"] for row in rolling.rounds]
    assert found[0] == pytest.approx(1 - 3658 / 13706)
    assert found[0] > found[1] > found[2] > 0
    whole = run(tiny("heterofl", clients=2, rounds=1), out=tmp_path / "c")
    assert whole.rounds[0].diagnostics["untrained"] == 0


def test_a_distillation_hands_its_hosts_share_on(tiny, tmp_path):
    record = run(tiny("heterofl+feddf", clients=2, rounds=1, model="cnn_bn@0.5:2"), out=tmp_path / "a")
    assert record.rounds[0].diagnostics.keys() == {"untrained", "agreement"}


def test_widths_may_be_listed_but_of_one_family():
    assert HeteroFL().archs("cnn:1,cnn@0.5:2", 3) == ["cnn", "cnn@0.5", "cnn@0.5"]
    assert HeteroFL().server_arch("cnn@0.5:2,cnn@0.25:1") == "cnn"
    for several in ("cnn:1,mlp:1", "digits-3"):
        with pytest.raises(SettingError, match="cut out of one network"):
            family_of(several)


def test_another_server_model_is_refused(tiny, tmp_path):
    with pytest.raises(SettingError, match="Sub-models of cnn are cut out of cnn itself; --server-model mlp"):
        run(tiny("fedrolex", server_model="mlp"), out=tmp_path / "a")


# --- which units belong together ------------------------------------------------------------------------------------

SLOW = ("resnet50_cifar", "googlenet", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_v2_s")
FAMILIES = ["mlp", "cnn", "cnn_bn", "convnet", "fedfree_cnn", "resnet18_cifar", "resnet18"]
FAMILIES += [pytest.param(name, marks=pytest.mark.slow) for name in SLOW]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sub_model_is_the_full_one_with_its_other_units_switched_off(name):
    """Zeros everywhere but in the sub-model's entries make every other unit put out 0 (batch norms have weight and
    bias 0 there too), so the full network must compute what the sub-model does. One wrong index, and it does not."""
    shape, R = (1, 16, 16) if "_cifar" not in name else (3, 16, 16), Fraction("0.3")
    rng = torch.Generator().manual_seed(5)
    torch.manual_seed(0)
    full = models.build(name, shape=shape, classes=10).eval()
    for m in full.modules():
        if isinstance(m, nn.BatchNorm2d):
            for t in (m.weight.data, m.bias.data, m.running_mean):
                t.normal_(generator=rng)
            m.running_var.uniform_(0.5, 2, generator=rng)
    w = state_of(full)
    plan = layout(name, shape, 10)
    where = positions(plan, choose(plan, R, lambda n, m: torch.randperm(n, generator=rng)[:m]), w)
    sub = load(models.build(f"{name}@0.3", shape=shape, classes=10), extract(w, where)).eval()
    off = {n: torch.ones_like(t) if n.endswith("running_var") else torch.zeros_like(t) for n, t in w.items()}
    for n, t in off.items():
        t[where[n]] = w[n][where[n]]
    x = torch.randn(2, *shape, generator=rng)
    with torch.no_grad():
        torch.testing.assert_close(load(full, off)(x), sub(x), rtol=1e-4, atol=1e-5)


def test_a_flattened_channel_takes_its_pixels_along():
    """cnn at 1x8x8 ends in 32 channels of 2x2 pixels: channel c is columns 4c..4c+3 of the linear layer."""
    plan = layout("cnn", (1, 8, 8), 10)
    assert list(plan.widths.values()) == [16, 32, 64]
    conv1, conv2, fc1 = plan.widths
    units = {conv1: torch.tensor([3]), conv2: torch.tensor([1, 5]), fc1: torch.tensor([0, 9])}
    w = state_of(models.build("cnn", shape=(1, 8, 8), classes=10))
    where = positions(plan, units, w)
    rows, columns = where["encoder.fc1.weight"]
    assert rows.flatten().tolist() == [0, 9]
    assert columns.tolist() == [4, 5, 6, 7, 20, 21, 22, 23]
    part = extract(w, where)
    assert torch.equal(part["encoder.conv2.weight"], w["encoder.conv2.weight"][[1, 5]][:, [3]])
    assert torch.equal(part["classifier.weight"], w["classifier.weight"][:, [0, 9]])
    assert torch.equal(part["classifier.bias"], w["classifier.bias"])


def test_what_is_added_has_the_same_units():
    plan = layout("resnet18_cifar", (3, 16, 16), 10)
    stem, block = plan.axes["encoder.conv1.weight"][0], plan.axes["encoder.layer1.0.conv2.weight"][0]
    assert stem == block == plan.axes["encoder.layer1.1.bn2.running_var"][0]
    assert plan.axes["encoder.layer2.0.conv2.weight"][0] == plan.axes["encoder.layer2.0.downsample.0.weight"][0] != stem
    assert plan.axes["encoder.layer1.0.conv1.weight"] != (stem, stem)  # inside a block units are free


@pytest.mark.parametrize(("name", "why"), [("vit_tiny", "cannot be traced"), ("shufflenet_v2_x1_5", "mixes channels")])
def test_what_has_no_sub_models_says_why(name, why):
    with pytest.raises(SettingError, match=f"Model '{name}' has no sub-models: .*{why}"):
        layout(name, (3, 32, 32), 10)


# --- Eq. 1 ----------------------------------------------------------------------------------------------------------


def test_selective_average_by_hand():
    """Four entries. Client 0 (p = 1) trained entries 0, 1 to 2, 4; client 1 (p = 3) trained 1, 2 to 8, 6.
    Entry 0: 2. Entry 1: (1 * 4 + 3 * 8) / 4 = 7. Entry 2: 6. Entry 3: nobody, stays 5. The counter: (1 + 3 * 2) / 4,
    rounded to 2. The buffer does not travel and stays."""
    w = State({"a": torch.full((4,), 5.0), "c": torch.tensor(0), "b": torch.tensor([9.0])}, buffers=["b"])
    where = {0: {"a": (torch.tensor([0, 1]),), "c": ()}, 1: {"a": (torch.tensor([1, 2]),), "c": ()}}
    shapes = {name: t.shape for name, t in w.items()}
    changes = {
        0: {"a": torch.tensor([2.0 - 5, 4.0 - 5]), "c": torch.tensor(1)},
        1: {"a": torch.tensor([8.0 - 5, 6.0 - 5]), "c": torch.tensor(2)},
    }
    parts = {k: placed(change, where[k], shapes, frozenset()) for k, change in changes.items()}
    assert parts[1]["a"].tolist() == [0, 3, 1, 0]
    mean = average(w, weighted_mean(parts, {0: 1, 1: 3}), {0: 0.25, 1: 0.75}, where)
    assert mean["a"].tolist() == [2, 7, 6, 5]
    assert mean["c"].item() == 2
    assert mean["c"].dtype == torch.int64
    assert mean["b"].tolist() == [9]
    assert mean.buffers == {"b"}


def final(folder):
    return load_file(folder / "models" / "global.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("method", ["fedrolex", "feddropout", "heterofl"])
def test_at_full_widths_it_is_fedavg(method, tiny, tmp_path):
    """sigma = 0 gives everybody the whole model. HeteroFL's batch-norm statistics come from its query. Changes are
    averaged here and models there, hence the rounding."""
    local = {"B": 32, "eta": 0.05}
    run(tiny("fedavg", model="cnn_bn", set=local), out=tmp_path / "fedavg")
    extra = {"masked": False} if method == "heterofl" else {}
    run(tiny(method, model="cnn_bn", set={**local, "sigma": 0, **extra}), out=tmp_path / method)
    a, b = final(tmp_path / "fedavg"), final(tmp_path / method)
    names = [n for n in a if method != "heterofl" or not ("running" in n or "tracked" in n)]
    assert len(names) >= 12
    assert all(torch.allclose(a[n], b[n], rtol=1e-5, atol=1e-6) for n in names)


def test_what_nobody_trains_stays_as_it_was(tiny, tmp_path):
    """Static, everybody at half width: the upper half of each layer keeps its initial values, the lower half moves."""
    half = {"model": "cnn@0.5:3", "set": {"B": 32, "eta": 0.05}}
    run(tiny("heterofl", rounds=0, **half), out=tmp_path / "before")
    run(tiny("heterofl", rounds=2, **half), out=tmp_path / "after")
    a, b = (final(tmp_path / f)["encoder.conv2.weight"] for f in ("before", "after"))
    assert torch.equal(a[16:], b[16:])
    assert torch.equal(a[:, 8:], b[:, 8:])
    assert (a[:16, :8] != b[:16, :8]).any()


# --- which units ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("R", ["1/16", "1/8", "0.3", "1/2", "1"])
def test_rolling_windows_cover_every_unit_equally(R):
    """Over n rounds a window of m units, one unit further each round, meets each of the n units exactly m times."""
    plan = layout("cnn", (1, 8, 8), 10)
    for group, n in plan.widths.items():
        met, m = torch.zeros(n, dtype=torch.int64), math.ceil(n * Fraction(R))
        for t in range(4, 4 + n):
            units, _ = FedRolex().units(plan, Fraction(R), SimpleNamespace(t=t), 0)
            assert len(units[group].unique()) == m
            met[units[group]] += 1
        assert met.tolist() == [m] * n


def test_the_window_begins_where_the_round_says():
    """Width 16, m = 4: round 1 takes 0..3, round 15 takes 14, 15 and wraps to 0, 1."""
    plan = layout("cnn", (1, 8, 8), 10)
    for t, expected in ((1, [0, 1, 2, 3]), (15, [0, 1, 14, 15]), (17, [0, 1, 2, 3])):
        units, _ = FedRolex().units(plan, Fraction(1, 4), SimpleNamespace(t=t), 0)
        assert units[0].tolist() == expected


def test_random_units_follow_from_the_seed_that_travels(tiny, tmp_path):
    """Client 0 has the full width, so its message holds the whole global model, and each other client's must be what
    its seed cuts out of that."""
    record = run(tiny("feddropout", model="cnn:1,cnn@0.5:2"), out=tmp_path / "a")
    plan = layout("cnn", (1, 8, 8), 10)
    seeds = set()
    for t in (1, 2):
        entries = Transcript(tmp_path / "a" / "transcript").entries()
        sent = {e.client: e for e in entries if e.direction == "down" and e.round == t}
        whole = sent[0]["w"]
        for k in (1, 2):
            units = choose(plan, Fraction(1, 2), drawn(sent[k]["seed"]))
            part = extract(whole, positions(plan, units, whole))
            assert all(torch.equal(part[n], sent[k]["w"][n]) for n in part)
            seeds.add(sent[k]["seed"])
    assert len(seeds) == 4
    assert record.traffic_declared


# --- HeteroFL -------------------------------------------------------------------------------------------------------


def test_masked_cross_entropy_by_hand():
    """Logits (ln 3, 5, 0), class 1 not held: it becomes 0, so softmax is (3, 1, 1) / 5 and the loss of class 0 ln(5/3).
    Unmasked it would be ln((3 + e^5 + 1) / 3)."""
    logits = torch.tensor([[math.log(3), 5.0, 0.0]]).requires_grad_()
    loss = masked_ce(lambda x: x, logits, torch.tensor([0]), torch.tensor([1.0, 0.0, 1.0]))
    assert loss.item() == pytest.approx(math.log(5 / 3), abs=1e-6)
    loss.sum().backward()
    assert logits.grad[0, 1] == 0  # a class that is not held does not move


def test_the_scaler_divides_what_hidden_layers_put_out():
    """One hidden layer: the embedding is relu((W x + b) / R). Folded into the weights it is the same network."""
    torch.manual_seed(0)
    net = models.build("mlp@0.25", shape=(1, 2, 2), classes=3)
    x = torch.randn(5, 1, 2, 2)
    plain, logits = net.encode(x), net(x)
    with scaler(net, 0.25):
        assert torch.allclose(net.encode(x), plain / 0.25)
        scaled = net(x)
    assert torch.equal(net(x), logits)
    assert torch.allclose(folded(copy.deepcopy(net), 0.25)(x), scaled)
    assert not torch.allclose(scaled, logits)


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("scaled", [True, False])
def test_a_teacher_and_a_deployed_model_are_scaled_as_in_training(scaled, ratio):
    """An upload of a narrow client is run with its hidden layers divided by R, and without the scaler as it is."""
    torch.manual_seed(0)
    net = models.build("mlp" if ratio == 1 else f"mlp@{ratio}", shape=(1, 2, 2), classes=3)
    x = torch.randn(5, 1, 2, 2)
    with scaler(net, ratio if scaled else 1.0):
        wanted = net(x)
    method = HeteroFL(scaled=scaled)
    server = SimpleNamespace(arch=lambda k: net.arch, model=lambda arch: models.build(arch, shape=(1, 2, 2), classes=3))
    assert torch.allclose(method.teacher(server, 4, state_of(net))(x), wanted)
    before = copy.deepcopy(net.state_dict())
    assert torch.allclose(method.personal(SimpleNamespace(model=net))(x), wanted)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items()), "the client's model stays"


@pytest.mark.parametrize("host", [FedRolex(), Plain(None), Alone()], ids=["submodel", "plain", "alone"])
def test_a_teacher_has_its_own_client_s_width(host):
    """The upload of a narrow client does not fit the network of the first one."""
    nets = {k: models.build(arch, shape=(1, 2, 2), classes=3) for k, arch in ((0, "mlp"), (4, "mlp@0.5"))}
    server = SimpleNamespace(
        arch=lambda k: nets[k].arch,
        model=lambda arch, state: load(models.build(arch, shape=(1, 2, 2), classes=3), state),
    )
    x = torch.randn(5, 1, 2, 2)
    for k, net in nets.items():
        assert torch.allclose(host.teacher(server, k, state_of(net)).eval()(x), net.eval()(x))


def test_a_teacher_without_statistics_normalises_its_own_batch():
    """With `sbn` no running statistics travel; without it they are those of the upload."""
    torch.manual_seed(0)
    net = models.build("cnn_bn@0.5", shape=(1, 4, 4), classes=3)
    for m in net.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.running_mean.fill_(3.0)
    server = SimpleNamespace(arch=lambda k: net.arch, model=lambda arch: models.build(arch, shape=(1, 4, 4), classes=3))
    x = torch.randn(6, 1, 4, 4)
    kept, own = (HeteroFL(sbn=sbn, scaled=False).teacher(server, 0, state_of(net)).eval() for sbn in (False, True))
    assert torch.allclose(kept(x), net.eval()(x))
    assert torch.allclose(own(x), copy.deepcopy(net).train()(x), atol=1e-5)


def test_static_batch_norm_asks_for_statistics_of_the_global_model(tiny, tmp_path):
    """One client whose records are one batch: the first batch norm's mean and (unbiased) variance are those of what the
    global model's first convolution makes of the records. Nothing but parameters travels before that."""
    setting = tiny("heterofl", model="cnn_bn", clients=1, rounds=1, set={"B": 10_000, "sigma": 0})
    record = run(setting, out=tmp_path / "a")
    w = final(tmp_path / "a")
    x, _ = World(setting).members(0)
    net = models.build("cnn_bn", shape=(1, 8, 8), classes=10)
    with torch.no_grad():
        out = load(net, w).encoder.conv1(x)
    torch.testing.assert_close(w["encoder.bn1.running_mean"], out.mean((0, 2, 3)))
    torch.testing.assert_close(w["encoder.bn1.running_var"], out.var((0, 2, 3)))
    assert [(r.field, r.kind, r.via) for r in record.releases if r.kind == "statistics"] == [
        ("Statistics.s", "statistics", "data")
    ]
    for entry in Transcript(tmp_path / "a" / "transcript").entries():
        if entry.message in ("Part", "TrainedPart", "Query"):
            assert not any("running" in name for name in entry["w"])


def test_statistics_can_be_put_under_a_policy(tiny, tmp_path):
    policy = {"statistics": {"epsilon": 1.0, "sensitivity": "clip:1"}}
    record = run(tiny("heterofl", model="cnn_bn", rounds=1, privacy=policy), out=tmp_path / "a")
    protected = [r.protection for r in record.releases if r.field == "Statistics.s"]
    assert protected[0].sensitivity == 2
    assert (final(tmp_path / "a")["encoder.bn2.running_var"] >= 0).all()


def test_a_mask_made_from_labels_is_refused_under_dp_sgd(tiny, tmp_path):
    policy = {"training": {"noise_multiplier": 1.0}}
    with pytest.raises(PrivacyError, match="does not separate over records"):
        run(tiny("heterofl", rounds=1, privacy=policy), out=tmp_path / "a")


def test_the_scaler_reaches_the_gradients_of_single_rows():
    """DP-SGD differentiates row by row; the scaler must be inside, or it trains another network than it deploys."""
    from fedaudit.privacy.persample import row_gradients

    torch.manual_seed(0)
    net = models.build("mlp@0.25", shape=(1, 2, 2), classes=3)
    x, y = torch.randn(4, 1, 2, 2), torch.tensor([0, 1, 2, 0])
    with scaler(net, 0.25):
        rows = row_gradients(net, ce, (x, y))["encoder.fc1.weight"]
        ce(net, x, y).sum().backward()
    torch.testing.assert_close(rows.sum(0), net.encoder.fc1.weight.grad)
