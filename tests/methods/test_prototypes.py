"""FedProto, FedTGP, FedGH, FedDistill and LG-FedAvg: losses and aggregation by hand, and what travels."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedaudit import run
from fedaudit.attack.attack_run import attack_run
from fedaudit.errors import SettingError
from fedaudit.methods.distillation import feddistill
from fedaudit.methods.prototypes import _transfer as transfer
from fedaudit.methods.prototypes import fedgh, fedproto, fedtgp
from fedaudit.methods.shared import _prototypes as prototypes
from fedaudit.shape import Shape
from fedaudit.training import models
from fedaudit.training.fit import Live
from fedaudit.training.models import Net
from fedaudit.wire.transcript import Transcript

LN2, LN3 = math.log(2), math.log(3)
T = torch.tensor


class Same(Net):
    """e = 2 x, and the logits are e itself."""

    def __init__(self):
        super().__init__(nn.Identity(), nn.Identity(), width=2, arch="by hand")

    def encode(self, x):
        return 2 * x


# --- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("distance", "apart"), [("mse", 5 / 2), ("squared", 5), ("norm", math.sqrt(5))])
def test_fedprotos_loss_by_hand(distance, apart):
    """The record (ln 3 / 2, 0) has the embedding and logits (ln 3, 0): class 0 costs ln 4/3, class 1 ln 4. Its
    prototype is (1, 2) away, so 1 + 4 squared, half of it on average; lambda = 3. Class 1 has no prototype: nothing is
    added."""
    x, y = T([[LN3 / 2, 0.0], [LN3 / 2, 0.0]]), T([0, 1])
    C, held = T([[LN3 - 1, -2.0], [7.0, 7.0]]), T([1.0, 0.0])
    rows = fedproto.regularised(Live(Same()), x, y, C, held, 3.0, distance)
    assert rows.tolist() == pytest.approx([math.log(4 / 3) + 3 * apart, math.log(4)], abs=1e-5)


def test_fedtgps_loss_by_hand():
    """P_i = (0, 0) of class 0; P^^0 = (3, 4), P^^1 = (0, 5), P^^2 = (6, 8): phi = 5, 5, 10. With delta = 2 the own
    class has e^-7 of e^-7 + e^-5 + e^-10."""
    net = fedtgp.GlobalPrototypes(3, 2, None)
    net.P.data = T([[3.0, 4.0], [0.0, 5.0], [6.0, 8.0]])
    value = fedtgp.L_P(Live(net), torch.zeros(1, 2), T([0]), T(2.0))
    expected = -math.log(math.exp(-7) / (math.exp(-7) + math.exp(-5) + math.exp(-10)))
    assert value.tolist() == pytest.approx([expected], abs=1e-6)


def test_the_margin_by_hand():
    """Centres (0, 0), (3, 4), (0, 1): distances 5, 1 and sqrt(18). Farthest: 5; of the nearest, 1, sqrt(18), 1:
    sqrt(18). tau bounds both; a single centre has none."""
    Q = {4: T([0.0, 0.0]), 7: T([3.0, 4.0]), 9: T([0.0, 1.0])}
    assert fedtgp.adaptive_margin(Q, 100.0, "farthest").item() == pytest.approx(5)
    assert fedtgp.adaptive_margin(Q, 100.0, "nearest").item() == pytest.approx(math.sqrt(18))
    assert fedtgp.adaptive_margin(Q, 2.0, "farthest").item() == 2
    assert fedtgp.adaptive_margin({4: Q[4]}, 2.0, "farthest").item() == 0


def test_feddistills_loss_by_hand():
    """Logits (ln 3, 0) are (3/4, 1/4). G^0 = (ln 3, 0): cross-entropy of (3/4, 1/4) with itself is 3/4 ln 4/3 + 1/4 ln
    4; squared differences 0. G^1 = (0, 0): 1/2 ln 4/3 + 1/2 ln 4, and ln^2 3 / 2. gamma = 2; class 2 has no G."""
    x = T([[LN3 / 2, 0.0]] * 2)
    y, G, held = T([0, 1]), T([[LN3, 0.0], [0.0, 0.0]]), torch.ones(2)
    own, a, b = [math.log(4 / 3), math.log(4)], math.log(4 / 3), math.log(4)
    ce = feddistill.distilled(Live(Same()), x, y, G, held, 2.0, "ce").tolist()
    assert ce == pytest.approx([own[0] + 2 * (3 / 4 * a + b / 4), own[1] + a + b], abs=1e-6)
    mse = feddistill.distilled(Live(Same()), x, y, G, held, 2.0, "mse").tolist()
    assert mse == pytest.approx([own[0], own[1] + LN3**2], abs=1e-6)
    none = feddistill.distilled(Live(Same()), x, y, G, torch.zeros(2), 2.0, "mse").tolist()
    assert none == pytest.approx(own, abs=1e-6)


def test_fedghs_header_by_hand():
    """One step on V = (1, 0) of class 0 from zero weights: softmax (1/2, 1/2), gradient -(1/2) V for row 0, +(1/2) V
    for row 1."""
    H = fedgh.HeaderNet(2, 2)
    nn.init.zeros_(H.classifier.weight), nn.init.zeros_(H.classifier.bias)
    fedgh.header_loss(Live(H), T([[1.0, 0.0]]), T([0])).sum().backward()
    assert H.classifier.weight.grad.tolist() == [[-0.5, 0.0], [0.5, 0.0]]


# --- aggregation ----------------------------------------------------------------------------------------------------


def test_class_means_over_clients_by_hand():
    """Class 0: (1, 0) of 1 record and (4, 3) of 3: alike (2.5, 1.5), by records (3.25, 2.25), Eq. 6 half of it. Class 1
    is held by one client; noise that makes all counts nothing leaves the plain mean."""
    sent = {0: {0: T([1.0, 0.0]), 1: T([5.0, 5.0])}, 2: {0: T([4.0, 3.0])}}
    n = {0: T([1.0, 2.0]), 2: T([3.0, 0.0])}
    alike = prototypes.mean_by_class(sent)
    assert {c: v.tolist() for c, v in alike.items()} == {0: [2.5, 1.5], 1: [5.0, 5.0]}
    assert prototypes.mean_by_class(sent, n)[0].tolist() == [3.25, 2.25]
    assert prototypes.mean_by_class(sent, {0: T([-1.0, 2.0]), 2: T([-3.0, 0.0])})[0].tolist() == [2.5, 1.5]
    replies = {k: fedproto.Counted(C, n[k]) for k, C in sent.items()}
    literal = fedproto.FedProto(weights="literal").average(replies, 2)
    assert {c: v.tolist() for c, v in literal.items()} == {0: [1.625, 1.125], 1: [5.0, 5.0]}


def test_the_nearest_prototype_among_those_there_are():
    C, held = T([[0.0, 0.0], [2.0, 2.0], [9.0, 9.0]]), T([1.0, 0.0, 1.0])
    model = Net(nn.Identity(), nn.Linear(2, 3), width=2, arch="by hand")
    nearest, h = prototypes.nearest(model, C, held), T([[2.0, 2.0], [8.0, 8.0]])
    assert nearest(h).argmax(1).tolist() == [0, 2]
    away = nearest(h)[:, [0, 2]] - h.square().sum(1, keepdim=True)
    assert away.tolist() == [[-8.0, -98.0], [-128.0, -2.0]], "minus the squared distances, but for |h|^2"
    assert nearest.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("method", [fedproto.FedProto(), fedtgp.FedTGP()])
def test_clients_are_also_tested_by_the_servers_new_prototypes(method):
    """It has trained with (0, 0) and (9, 9); the server's next ones are (0, 0) and (3, 3). An embedding of (2, 2) is
    nearer to the first before, and to the second afterwards. Without any prototype the classifier answers."""
    model = Net(nn.Identity(), nn.Linear(2, 2), width=2, arch="by hand")
    old, new = ({0: T([0.0, 0.0]), 1: T([far, far])} for far in (9.0, 3.0))
    client = SimpleNamespace(model=model, memory={"C": old}, classes=2, device=torch.device("cpu"))
    h = T([[2.0, 2.0]])
    assert method.points(client)["prototypes"](h).argmax(1).item() == 0
    assert method.next_points(SimpleNamespace(C=new), client)["new prototypes"](h).argmax(1).item() == 1
    assert method.next_points(SimpleNamespace(C={}), client)["new prototypes"] is model


def test_the_largest_cosine_is_the_largest_product():
    v = transfer.simplex(3, 0, torch.device("cpu"))
    model = Net(nn.Identity(), nn.Linear(4, 3), width=4, arch="by hand")
    h = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    cosines = nn.functional.normalize(model(h)) @ v.T
    assert torch.equal(transfer.on_simplex(model, v)(h).argmax(1), cosines.argmax(1))


@pytest.mark.parametrize("method", ["fedproto", "fedktl"])
def test_what_clients_deploy_can_be_published_and_attacked(method, tiny, tmp_path):
    run(tiny(method, public=0.1, rounds=2), out=tmp_path / "a")
    found = attack_run(tmp_path / "a", attacks=["loss"], threat="outsider")[0]
    assert found.ran


# --- runs -----------------------------------------------------------------------------------------------------------


def messages(folder, name, field):
    entries = Transcript(folder / "transcript").entries()
    return {(e.round, e.client): e[field] for e in entries if e.message == name}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[c], b[c]) for c in a)


@pytest.mark.long
def test_frozen_fedtgp_is_fedproto_to_the_bit(tiny, tmp_path):
    both = {"lam": 2.0, "eta": 0.1, "B": 16}
    run(tiny("fedproto", rounds=3, model="cnn_bn", set=both), out=tmp_path / "a")
    run(tiny("fedtgp", rounds=3, model="cnn_bn", set={**both, "S": 0, "start": "mean"}), out=tmp_path / "b")
    for name in ("Global", "Prototypes"):
        a, b = messages(tmp_path / "a", name, "C"), messages(tmp_path / "b", name, "C")
        assert len(a) == 9
        assert all(same(a[key], b[key]) for key in a)
    assert not messages(tmp_path / "a", "Global", "C")[1, 0]
    assert messages(tmp_path / "a", "Global", "C")[3, 0]


@pytest.mark.long
def test_a_trained_prototype_is_nearer_to_its_own_class_than_to_others(tiny, tmp_path):
    options = {"S": 100, "eta_s": 0.1, "hidden": 32, "eta": 0.1, "B": 16}
    run(tiny("fedtgp", rounds=2, model="mlp", partition="iid", set=options), out=tmp_path / "a")
    sent, P = messages(tmp_path / "a", "Prototypes", "C"), messages(tmp_path / "a", "Global", "C")[2, 0]
    rows = torch.stack([P[c] for c in sorted(P)])
    right = [(rows - v).norm(dim=1).argmin().item() == c for k in range(3) for c, v in sent[1, k].items()]
    assert sum(right) > 0.9 * len(right)


def test_fd_leaves_out_the_receivers_own(tiny, tmp_path):
    """G_k of round 2 is the mean of what the others sent in round 1; with `others = false` it is everybody's."""
    run(tiny("feddistill", rounds=2, model="digits-3", partition="iid"), out=tmp_path / "a")
    sent, G = messages(tmp_path / "a", "LocalLogits", "F"), messages(tmp_path / "a", "GlobalLogits", "G")
    assert all(not G[1, k] for k in range(3))
    for k in range(3):
        i, j = (other for other in range(3) if other != k)
        assert all(torch.allclose(G[2, k][c], (sent[1, i][c] + sent[1, j][c]) / 2) for c in G[2, k])
    run(tiny("feddistill", rounds=2, model="digits-3", partition="iid", set={"others": False}), out=tmp_path / "b")
    sent, G = messages(tmp_path / "b", "LocalLogits", "F"), messages(tmp_path / "b", "GlobalLogits", "G")
    assert all(torch.allclose(G[2, 0][c], sum(sent[1, k][c] for k in range(3)) / 3) for c in G[2, 0])


@pytest.mark.parametrize("method", ["fedproto", "fedtgp", "fedgh", "lgfedavg"])
def test_widths_that_differ_are_refused_with_a_remedy(method, tiny, tmp_path):
    with pytest.raises(SettingError, match=rf"{method} needs one embedding width.*cnn 64.*mlp 128.*cnn/p64"):
        run(tiny(method, model="cnn:2,mlp:1"), out=tmp_path / "a")


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedproto", {"weights": "samples", "predict": "prototypes"}), ("fedgh", {"S": 3, "B_s": 8}), ("lgfedavg", {})],
)
def test_models_of_one_width_may_differ_and_traffic_is_right(method, options, tiny, tmp_path):
    record = run(tiny(method, model="digits-3/p16", set=options, rounds=2), out=tmp_path / "a")
    assert record.status == "done"
    assert record.traffic_declared


@pytest.mark.parametrize(
    ("method", "kind"), [("fedproto", "prototypes"), ("fedgh", "prototypes"), ("feddistill", "logits")]
)
def test_class_means_can_be_protected(method, kind, tiny, tmp_path):
    """What stays open is which classes a client holds, and that is said."""
    record = run(tiny(method, privacy={kind: {"epsilon": 1.0, "sensitivity": "clip:1"}}), out=tmp_path / "a")
    protected = [e for c in record.ledger for e in c.entries if e.kind == kind]
    assert protected
    assert all(e.mechanism == "gaussian" and e.noise_multiplier > 0 for e in protected)
    others = {(e.kind, e.condition) for c in record.ledger for e in c.entries if e.kind != kind}
    assert {kind for kind, _ in others} == {"label_counts"}


def test_the_numbers_of_fedghs_sum_with_a_single_client():
    """For each of four classes an embedding and a count."""
    plan = SimpleNamespace(classes=4, archs=["mlp"], participants=[0], shape=Shape((1, 8, 8)))
    width = models.build("mlp", shape=(1, 8, 8), classes=4).classifier.in_features
    assert fedgh.FedGH(rows="classes").summed_numbers(plan) == [4 * (width + 1)]


def test_a_decoder_is_trained_on_a_single_public_image():
    """Its encoder reads the image's 64 pixels and gives means and log-variances of H = 3 latents."""
    made, x = [], torch.rand(1, 1, 8, 8)

    def optimise(params, loss, steps, opt):
        made.extend(tuple(p.shape) for p in params)
        assert math.isfinite(float(loss()))

    server = SimpleNamespace(
        public=(x,), rng=lambda purpose: torch.Generator().manual_seed(0), shape=Shape((1, 8, 8)), classes=4,
        device=torch.device("cpu"), optimise=optimise,
    )  # fmt: skip
    transfer.trained_decoder(server, 3, 4, 1)
    assert made[-4:] == [(256, 64), (256,), (6, 256), (6,)]


def test_a_batch_of_class_vectors_has_two_rows_at_least():
    """Batch norm needs two. Of none there is a zero, twice."""
    device = torch.device("cpu")
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert transfer.rows({5: other, 1: one}, (2,), device).tolist() == [[1, 2], [3, 4]]
    assert transfer.rows({5: other}, (2,), device).tolist() == [[3, 4], [3, 4]]
    assert transfer.rows({}, (2,), device).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("weights", ["equal", "samples"])
def test_fedprotos_client_sends_its_means_and_counts_if_they_weigh(weights, monkeypatch):
    fits = []

    class Trains:
        classes, device, memory = 3, torch.device("cpu"), {}
        x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([2, 2])
        model = nn.Linear(1, 1)

        def fit(self, loss, **how):
            fits.append((loss, how))

        def class_means(self, e, kind):
            return {2: (e.tolist(), kind)}

    client = Trains()
    client.model.width, client.model.encode = 2, lambda x: x * 3
    monkeypatch.setattr(fedproto, "Prototypes", lambda C: ("means", C))
    monkeypatch.setattr(fedproto, "Counted", lambda C, n: ("counted", C, n.tolist()))
    method = fedproto.FedProto(weights=weights)
    C = {1: torch.tensor([4.0, 5.0])}
    sent = method.local_update(client, SimpleNamespace(C=C))
    means = {2: ([[3.0], [6.0]], "prototypes")}
    assert sent == (("means", means) if weights == "equal" else ("counted", means, [0, 0, 2]))
    assert client.memory["C"] is C
    ((loss, how),) = fits
    assert loss is fedproto.regularised
    assert (how["epochs"], how["batch"]) == (method.E, method.B)
    given = how["given"]
    assert given["C"][1].tolist() == [4, 5]
    assert given["held"].tolist() == [False, True, False]
    assert (given["lam"], given["distance"]) == (method.lam, method.distance)
    assert not client.model.training


def test_a_decoder_sees_latents_with_the_noise_that_its_encoder_says(monkeypatch):
    """Mean m and log-variance v: the latent is m + noise exp(v / 2), the divergence (m^2 + e^v - 1 - v) / 2."""
    values, latents = [], []

    class Makes(nn.Module):
        def forward(self, z):
            latents.append(z.detach())
            return torch.zeros(len(z), 1, 2, 2)

    def optimise(params, loss, steps, opt):
        with torch.no_grad():
            for p in params:
                p.zero_()
            params[-1].copy_(torch.tensor([0.5, 2.0 * math.log(3.0)]))
        values.append(loss().item())
        assert (steps, opt.options["lr"]) == (9, 1e-3)

    x = torch.full((1, 1, 2, 2), 0.5)
    server = SimpleNamespace(public=(x,), rng=lambda purpose: torch.Generator().manual_seed(0), optimise=optimise)
    monkeypatch.setattr(transfer, "decoder", lambda server, H, width: Makes())
    assert not transfer.trained_decoder(server, 1, 4, 9).training
    rng = torch.Generator().manual_seed(0)
    torch.randint(1, (1,), generator=rng)
    noise = torch.randn(1, 1, generator=rng).item()
    assert latents[0].item() == pytest.approx(0.5 + 3 * noise, rel=1e-5)
    assert values == [pytest.approx(4 * 0.25 + (0.25 + 9 - 1 - 2 * math.log(3)) / 2, rel=1e-5)]


@pytest.mark.parametrize("weights", ["equal", "samples", "literal"])
def test_fedprotos_server_averages_sums_or_single_replies(weights, monkeypatch):
    """Classes that nobody sent stay as they were. Equation 6 as written needs single replies."""
    asked = []
    cohort = SimpleNamespace(
        ask=lambda fn, message: asked.append(("ask", message.C)) or "replies",
        mean=lambda fn, message, by: asked.append(("mean", message.C, by)) or "mean",
    )
    new = {1: torch.tensor([5.0])}
    monkeypatch.setattr(fedproto, "means_of_sums", lambda mean: new if mean == "mean" else None)
    monkeypatch.setattr(
        fedproto.FedProto, "average", lambda self, replies, classes: new if replies == "replies" else None
    )
    before = {0: torch.tensor([1.0]), 1: torch.tensor([2.0])}
    method = fedproto.FedProto(weights=weights)
    after = method.round(SimpleNamespace(C=before), SimpleNamespace(classes=3), cohort)
    assert {c: v.tolist() for c, v in after.C.items()} == {0: [1], 1: [5]}
    (call,) = asked
    assert call[0] == ("ask" if weights == "literal" else "mean")
    assert call[1] is before or call[1].keys() == before.keys()
    assert call[2:] == ({"equal": (None,), "samples": ("n",), "literal": ()}[weights])
    assert bool(method.needs_single_replies()) is (weights == "literal")
