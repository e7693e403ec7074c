"""FML, FedKD, FedKTL and FedGen on LG-FedAvg: losses by hand, and what travels."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedaudit import Opt, adam, run, sgd
from fedaudit.methods.distillation import _mutual, fedkd, fke, fml, mhat
from fedaudit.methods.prototypes import fedktl
from fedaudit.methods.prototypes._transfer import mmd, simplex
from fedaudit.training.fit import Live
from fedaudit.training.optimiser_parts import ByParts
from fedaudit.wire.message import load
from fedaudit.wire.transcript import Transcript

LN2, LN3 = math.log(2), math.log(3)
T = torch.tensor
KL = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)  # (3/4, 1/4) against (1/2, 1/2)
LK = 1 / 2 * math.log(2 / 3) + 1 / 2 * math.log(2)  # the other way round


class Says(nn.Module):
    """Two networks of one number each: logits (a, 0) and (b, 0), embeddings (a, a) and (b, b)."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = nn.Parameter(T(a)), nn.Parameter(T(b))

    def forward(self, x):
        rows, zero = torch.ones(len(x)), torch.zeros(len(x))
        own, shared = self.a * rows, self.b * rows
        return (
            torch.stack([own, zero], 1),
            torch.stack([shared, zero], 1),
            own[:, None].repeat(1, 2),
            shared[:, None].repeat(1, 2),
        )


# --- losses ---------------------------------------------------------------------------------------------------------


def test_fmls_losses_by_hand():
    """The own network says (3/4, 1/4), the meme (1/2, 1/2); label 0; alpha = 0.9, beta = 0.6.
    Own: 0.9 ln 4/3 + 0.1 KL((1/2, 1/2) || (3/4, 1/4)); meme: 0.6 ln 2 + 0.4 KL((3/4, 1/4) || (1/2, 1/2)).
    Slopes: cross-entropy's is p - y, the KL's is q - p: a: 0.9 (3/4 - 1) + 0.1 (3/4 - 1/2); b: 0.6 (1/2 - 1) +
    0.4 (1/2 - 3/4)."""
    f = Says(LN3, 0.0)
    value = fml.mutual(Live(f), torch.zeros(1, 1), T([0]), 0.9, 0.6)
    assert value.item() == pytest.approx(0.9 * math.log(4 / 3) + 0.1 * LK + 0.6 * LN2 + 0.4 * KL, abs=1e-6)
    value.sum().backward()
    assert f.a.grad.item() == pytest.approx(-0.9 / 4 + 0.1 / 4, abs=1e-6)
    assert f.b.grad.item() == pytest.approx(-0.6 / 2 - 0.4 / 4, abs=1e-6)


def test_fedkds_losses_by_hand():
    """Mentor (3/4, 1/4), mentee (1/2, 1/2), label 0: L_t = ln 4/3, L_s = ln 2, their sum D. Embeddings (ln 3, ln 3) and
    (0, 0): mean square ln^2 3. The value is D + [KL + LK + 2 ln^2 3] / D. Slopes with 1 / D as a weight: a: -1/4 +
    [1/4 + 2 ln 3] / D; b: -1/2 + [-1/4 - 2 ln 3] / D. Literally, each numerator over D^2 times the own slope less."""
    D = math.log(4 / 3) + LN2
    for intensity in ("weight", "literal"):
        f = Says(LN3, 0.0)
        value = fedkd.mutual(Live(f), torch.zeros(1, 1), T([0]), intensity)
        assert value.item() == pytest.approx(D + (KL + LK + 2 * LN3**2) / D, abs=1e-5)
        value.sum().backward()
        a, b = -1 / 4 + (1 / 4 + 2 * LN3) / D, -1 / 2 - (1 / 4 + 2 * LN3) / D
        if intensity == "literal":
            a, b = a + (LK + LN3**2) / D**2 / 4, b + (KL + LN3**2) / D**2 / 2
        assert f.a.grad.item() == pytest.approx(a, abs=1e-5)
        assert f.b.grad.item() == pytest.approx(b, abs=1e-5)


def test_fedkds_energy_grows_from_round_to_round():
    class At:
        def __init__(self, t):
            self.t, self.rounds = t, 4

    method = fedkd.FedKD(T_start=0.8, T_end=1.0)
    assert [method.energy(At(t)) for t in (1, 2, 3, 4)] == pytest.approx([0.8, 0.85, 0.9, 0.95])


def test_the_simplex_is_one():
    for C in (2, 5, 10):
        v = simplex(C, 3, torch.device("cpu"))
        cos = v @ v.T
        assert torch.allclose(cos, torch.eye(C) * (1 + 1 / (C - 1)) - 1 / (C - 1), atol=1e-6)
    assert not torch.equal(simplex(5, 3, torch.device("cpu")), simplex(5, 4, torch.device("cpu")))


def test_fedktls_angles_by_hand():
    """v = (1, 0), (-1, 0); h = (0, 2) is at 90 degrees from both. With m = 30 degrees and s = 2 the own cosine is
    -1/2: logits (-1, 0) for class 0, so ln(1 + e)."""
    v = T([[1.0, 0.0], [-1.0, 0.0]])
    value = fedktl.L_A(T([[0.0, 2.0]]), T([0]), v, 2.0, math.pi / 6)
    assert value.tolist() == pytest.approx([math.log(1 + math.e)], abs=1e-5)


def test_fedktls_second_term_by_hand():
    """f(I)[1] = (b, b) = (1, 1) against Q = (3, 1): mean square 2; mu = 5. Nothing of it where mu = 0."""
    v, x, y = T([[1.0, 0.0], [-1.0, 0.0]]), torch.zeros(1, 1), T([0])

    class Two(nn.Module):
        def forward(self, x):
            return T([[0.0, 2.0]]).repeat(len(x), 1), torch.ones(len(x), 2)

    own = fedktl.L_A(T([[0.0, 2.0]]), y, v, 2.0, 0.1).item()
    pairs = torch.zeros(1, 1), T([[3.0, 1.0]])
    assert fedktl.transfer(Live(Two()), x, y, v, *pairs, 2.0, 0.1, 5.0).item() == pytest.approx(own + 10, abs=1e-5)
    assert fedktl.transfer(Live(Two()), x, y, v, *pairs, 2.0, 0.1, 0.0).item() == pytest.approx(own, abs=1e-5)


def test_the_discrepancy_by_hand():
    """One point each, 2 apart in the square: k is sum_v e^(-1 / v), of themselves 4, so 2 (4 - sum). Of equals 0."""
    a, b = T([[0.0, 0.0]]), T([[1.0, 1.0]])
    expected = 2 * (4 - sum(math.exp(-1 / v) for v in (10, 15, 20, 50)))
    assert mmd(a, b).item() == pytest.approx(expected, abs=1e-5)
    assert mmd(torch.cat([a, b]), torch.cat([b, a])).item() == pytest.approx(0, abs=1e-6)


def test_alignment_by_hand():
    """F(P) = 2 P: Q = 2, 6 of class 0 and 1 of class 1; centres 4 and 1, squares 4, 4, 0, mean 8/3; lambda = 3."""
    P, c, latents = T([[1.0], [3.0], [0.5]]), T([0, 0, 1]), T([[2.0], [6.0], [1.0]])
    value = fedktl.alignment(lambda p: 2 * p, P, c, latents, 3.0)
    assert value.tolist() == pytest.approx([8.0], abs=1e-5)


# --- runs -----------------------------------------------------------------------------------------------------------


def messages(folder, name, field):
    entries = Transcript(folder / "transcript").entries()
    return {(e.round, e.client): e[field] for e in entries if e.message == name}


def fields(folder, name, field):
    return [e.fields[field] for e in Transcript(folder / "transcript").entries() if e.message == name]


def test_fedkd_at_energy_1_sends_the_whole_update(tiny, tmp_path):
    """What the clients sent adds up to what they get: theta of round 1 and the mean update are theta of round 2."""
    options = {"E": 1, "B": 32, "eta": 0.1, "T_start": 1.0, "T_end": 1.0}
    run(tiny("fedkd", model="cnn:2,mlp:1", server_model="cnn", rounds=2, set=options), out=tmp_path / "a")
    n, g = messages(tmp_path / "a", "Update", "n"), messages(tmp_path / "a", "Update", "g")
    down = messages(tmp_path / "a", "Mentee", "g")
    assert all(down[1, k] is None and down[2, k] is not None for k in range(3))
    total = sum(n[1, k] for k in range(3))
    for name, t in down[2, 0].items():
        assert torch.allclose(t, sum(n[1, k] / total * g[1, k][name] for k in range(3)), atol=1e-7)
    size = 4 * sum(t.numel() for t in g[1, 0].values())
    assert [row.payload for row in fields(tmp_path / "a", "Update", "g")] == [size] * 6


def test_fedkd_leaves_out_what_the_energy_allows_and_bills_it(tiny, tmp_path):
    """Every run holds the declared bytes against the measured ones; here they are less than half of the model's."""
    options = {"B": 32, "eta": 0.1, "T_start": 0.5, "T_end": 0.6}
    small = run(tiny("fedkd", model="cnn", rounds=2, set=options), out=tmp_path / "a")
    whole = run(tiny("fedkd", model="cnn", rounds=2, set={**options, "T_start": 1.0, "T_end": 1.0}), out=tmp_path / "b")
    assert small.traffic_declared
    assert small.bytes("up") < whole.bytes("up") / 2
    assert small.bytes("up", "wire") < whole.bytes("up", "wire") / 2


def test_who_missed_a_round_gets_the_mentee_whole(tiny, tmp_path):
    options = {"B": 32, "eta": 0.1}
    values = {"model": "mlp", "rounds": 4, "clients": 4, "participation": 0.5}
    record = run(tiny("fedkd", set=options, **values), out=tmp_path / "a")
    theta, g = messages(tmp_path / "a", "Mentee", "theta"), messages(tmp_path / "a", "Mentee", "g")
    before: set[int] = set()
    kept = 0
    for row in record.rounds:
        for k in row.participants:
            assert (theta[row.round, k] is None) == (k in before)
            assert (g[row.round, k] is None) == (k not in before)
            kept += k in before
        before = set(row.participants)
    assert kept, "the seed was chosen so that somebody takes part twice in a row"


def test_a_generator_by_path(tiny, tmp_path):
    """I^c is what the given module makes of Q^c; no public set is needed for it."""

    class Stripes(nn.Module):
        def forward(self, Q: torch.Tensor) -> torch.Tensor:
            return torch.tanh(Q.mean(1))[:, None, None, None].expand(len(Q), 1, 8, 8)

    torch.jit.save(torch.jit.script(Stripes()), str(tmp_path / "G.pt"))
    options = {**fedktl.FedKTL.quick, "generator": str(tmp_path / "G.pt")}
    run(tiny("fedktl", rounds=2, public=0.0, model="digits-3", set=options), out=tmp_path / "a")
    images, Q = messages(tmp_path / "a", "GlobalPairs", "I"), messages(tmp_path / "a", "GlobalPairs", "Q")
    assert not images[1, 0]
    assert images[2, 0].keys() == Q[2, 0].keys() != set()
    for c, image in images[2, 0].items():
        assert torch.allclose(image, torch.tanh(Q[2, 0][c].mean()).expand(1, 8, 8), atol=1e-6)


def test_only_heads_travel_in_fedgen_on_lgfedavg(tiny, tmp_path):
    from fedaudit.registry import find

    record = run(tiny("fedgen_lg", model="digits-3/16", set=dict(find("fedgen_lg").quick)), out=tmp_path / "a")
    for name in ("Broadcast", "Update"):
        for state in messages(tmp_path / "a", name, "theta").values():
            assert {key: tuple(t.shape) for key, t in state.items()} == {
                "classifier.weight": (10, 16), "classifier.bias": (10,),
            }  # fmt: skip
    assert record.result.last.global_ is None
    assert record.traffic_declared


def test_fedkds_longest_gradient_is_any_number_above_0():
    assert fedkd.FedKD(clip=0.5).clip == 0.5
    with pytest.raises(ValidationError):
        fedkd.FedKD(clip=0.0)


def test_a_pair_counts_what_is_trained():
    """A frozen tensor has no optimiser: counted, it would shift the parts behind it."""
    pair = _mutual.Pair(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2, bias=False))
    assert pair.sizes() == (2, 4, 1)
    pair.own.bias.requires_grad_(False)
    assert pair.sizes() == (1, 4, 1)


@pytest.mark.parametrize("method", [fml.FML, fedkd.FedKD])
def test_which_optimiser_a_pair_of_networks_has(method):
    """DFFKE's code: Adam at 0.001 with a decay of 1e-5 for the own network, SGD at 0.01 for the rest, clipped at 10."""
    pair = SimpleNamespace(sizes=lambda: (2, 3, 1))
    authors = method(**method.presets["dffke_authors"])
    opts = adam(0.001, weight_decay=1e-5), sgd(0.01), sgd(0.01)
    parts = [(size, opt.make, opt.options) for size, opt in zip((2, 3, 1), opts, strict=True)]
    assert authors.of_pair(authors.eta, pair) == Opt(ByParts, {"parts": parts, "clip": 10.0})
    assert (authors.E, authors.B, authors.crop, authors.flip, authors.jitter) == (1, 100, 4, True, 0.4)
    library = method(**method.presets["htfllib"])
    of = library.optimiser(0.01)
    parts = [(size, torch.optim.SGD, of.options) for size in (2, 3, 1)]
    assert library.of_pair(0.01, pair) == Opt(ByParts, {"parts": parts, "clip": library.clip})
    assert library.clip is not None
    assert method(eta_shared=0.5, opt="adam").of_pair(0.25, pair).options["clip"] is None
    assert method(opt="adam").of_pair(0.25, pair).make is torch.optim.Adam
    with pytest.raises(ValidationError, match='eta_shared belongs to opt = "adam"'):
        method(eta_shared=0.1)
    with pytest.raises(ValidationError, match='clip belongs to opt = "sgd" or to eta_shared'):
        method(opt="adam", clip=1.0)


@pytest.mark.parametrize("method", ["fml", "fedkd"])
def test_a_pair_of_networks_trains_on_views_with_two_optimisers(method, tiny, tmp_path):
    """Whole runs of the preset, with its views and without: what is sent differs."""
    from fedaudit.registry import find

    quick = {**find(method).presets["dffke_authors"], "B": 16}
    records = [
        run(tiny(method, model="mlp", set={**quick, **views}), out=tmp_path / str(i))
        for i, views in enumerate(({}, {"crop": 0, "flip": False, "jitter": 0.0}))
    ]
    assert all(record.status == "done" for record in records)
    assert records[0].transcript_digest != records[1].transcript_digest


def test_fmls_joint_loss_by_hand():
    """As its mutual loss, but divergences are means over the two classes, and each reaches both networks.

    The own logit's slope of 0.4 KL(own || meme) / 2 with own = p: p (1 - p) ln 3 = 3/16 ln 3; the meme's slope of
    0.1 KL(meme || own) / 2 with both at q = 1/2: q (1 - q) (0 - ln 3) = -1/4 ln 3."""
    f = Says(LN3, 0.0)
    value = fml.joint(Live(f), torch.zeros(1, 1), T([0]), 0.9, 0.6)
    assert value.item() == pytest.approx(0.9 * math.log(4 / 3) + 0.05 * LK + 0.6 * LN2 + 0.2 * KL, abs=1e-6)
    value.sum().backward()
    assert f.a.grad.item() == pytest.approx(-0.9 / 4 + 0.05 / 4 + 0.2 * 3 / 16 * LN3, abs=1e-6)
    assert f.b.grad.item() == pytest.approx(-0.6 / 2 - 0.2 / 4 - 0.05 / 4 * LN3, abs=1e-6)


@pytest.mark.parametrize(("intensity", "weights"), [("batch", "samples"), ("batch", "equal"), ("weight", "samples")])
def test_fedkds_client_trains_a_pair_and_sends_the_change(intensity, weights, monkeypatch):
    """The mentee begins as it was sent, or as it was kept and changed; W_h is kept from round to round."""
    fits, loaded = [], []

    class Trains:
        device, width = torch.device("cpu"), 3
        model, memory = SimpleNamespace(width=3), {}

        def server_model(self, *, state):
            loaded.append(state)
            made = load(nn.Linear(2, 1, bias=False), state)
            made.width = 2
            return made

        def fit(self, loss, **how):
            fits.append((loss, how))
            with torch.no_grad():
                how["model"].shared.weight.add_(1)
                how["model"].W_h.weight.fill_(7.0)

        def __len__(self):
            return 11

    class Low:
        def __init__(self, g, energy):
            self.change, self.energy = g["weight"].tolist(), energy

    class Together:
        def __init__(self, own, shared, W_h):
            self.own, self.shared, self.W_h = own, shared, W_h

    monkeypatch.setattr(fedkd, "Pair", Together)
    monkeypatch.setattr(fedkd.FedKD, "of_pair", lambda self, eta, pair: (eta, pair))
    monkeypatch.setattr(fedkd, "LowRank", Low)
    monkeypatch.setattr(fedkd.FedKD, "energy", lambda self, client: 0.75)
    monkeypatch.setattr(fedkd, "Update", lambda g, n: ((g.change, g.energy), n))
    method = fedkd.FedKD(intensity=intensity, weights=weights, E=2, B=5, eta=0.25, clip=4.0)
    client, theta = Trains(), fedkd.State({"weight": T([[1.0, 2.0]])})
    sent = method.local_update(client, fedkd.Mentee(theta, None))
    assert sent == (([[1, 1]], 0.75), 11 if weights == "samples" else None)
    assert client.memory["theta"] is theta
    assert client.memory["W_h"]["weight"].tolist() == [[7, 7]] * 3
    ((loss, how),) = fits
    pair = how.pop("model")
    assert (pair.own, pair.shared.weight.tolist()) == (client.model, [[2, 3]])
    plain = {"epochs": 2, "batch": 5, "opt": (0.25, pair), "augment": None}
    if intensity == "batch":
        assert (loss, how) == (fedkd.by_batch, plain | {"separable": False})
    else:
        assert (loss, how) == (fedkd.mutual, plain | {"given": {"intensity": intensity}})
    monkeypatch.setattr(fedkd, "load", lambda net, state: loaded.append(state) or load(net, state))
    method.local_update(client, fedkd.Mentee(None, fedkd.State({"weight": T([[10.0, 10.0]])})))
    assert [state["weight"].tolist() for state in loaded] == [[[1, 2]], [[11, 12]], [[7, 7]] * 3]


def test_fedktls_traffic_by_hand(monkeypatch):
    monkeypatch.setattr(fedktl, "bill", lambda plan, field, who, width, nobody=False: (field, who, width, nobody))
    for t in (1, 2):
        plan = SimpleNamespace(t=t, asked=lambda ask: [0, 1, 2], replied=lambda ask: [0, 2], shape=(3, 4, 5), classes=7)
        assert fedktl.FedKTL(H=6).traffic(plan) == {
            ("down", "GlobalPairs.seed"): fedktl.NUMBER * 3,
            ("down", "GlobalPairs.I"): ("GlobalPairs.I", [0, 1, 2], 60, t == 1),
            ("down", "GlobalPairs.Q"): ("GlobalPairs.Q", [0, 1, 2], 6, t == 1),
            ("up", "Prototypes.P"): ("Prototypes.P", [0, 2], 7, False),
        }


@pytest.mark.parametrize(
    ("pi", "K", "members"),
    [(1.0, 3, [0, 1, 2]), (0.5, 4, [0, 1]), (0.01, 4, [0]), (0.6, 4, [0, 1]), (0.7, 4, [0, 1, 2])],
)
def test_a_share_of_fkes_clients_collaborates(pi, K, members):
    assert [k for k in range(K) if fke.FKE(pi=pi).collaborates(k, K)] == members


@pytest.mark.parametrize(("public", "labelled", "rows"), [(0, True, 5), (3, True, 3), (9, False, 5)])
def test_mhats_traffic_by_hand(public, labelled, rows):
    """Three are asked, two answer, four are told. Sizes are numbers here."""
    plan = SimpleNamespace(
        public=public, labelled=labelled, classes=7, asked=lambda ask: [0] * (3 + ask), replied=lambda ask: [0, 2],
        tensor=lambda *sizes: math.prod(sizes) * 4, rows=lambda n: n * 100,
    )  # fmt: skip
    assert mhat.MHAT(B=5).traffic(plan) == {
        ("down", "Auxiliary.x_p"): rows * 100 * 3, ("down", "Auxiliary.y_p"): rows * 4 * 3 if labelled else 0,
        ("up", "LocalOutputs.f"): rows * 7 * 4 * 2, ("up", "LocalOutputs.N"): mhat.NUMBER * 2,
        ("down", "GlobalOutputs.f"): rows * 7 * 4 * 4,
    }  # fmt: skip
