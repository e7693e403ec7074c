"""FedZGE's server loop: what an estimate is worth in theta_G, alternations and their bill, and the controls."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedaudit import Setting, adam, run
from fedaudit.errors import PrivacyError
from fedaudit.methods.datafree import _zeroth as zo
from fedaudit.methods.datafree.fedzge import FedZGE, Generator, along
from fedaudit.methods.shared._ensemble import ensemble
from fedaudit.rng import generator
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.planned_traffic import plan_traffic
from fedaudit.training.fit import moments_of
from fedaudit.wire.transcript import Transcript

QUICK = dict(FedZGE.quick)


def messages(folder, name):
    return [e for e in Transcript(folder / "transcript").entries() if e.message == name]


# --- the estimate, seen through the generator --------------------------------------------------------------------


@pytest.fixture(scope="module")
def cosines():
    """The cosine of each estimate with the true gradient in theta_G, B = 200 and q = 10: networks on 8 x 8 images."""
    torch.manual_seed(0)

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).eval()

    clients, f, N = {0: net(), 1: net()}, net(), {0: 10, 1: 30}
    G, B, q = Generator(16, (1, 8, 8), 10).train(), 200, 10
    z, y, u = torch.randn(B, 16), torch.randint(10, (B,)), torch.randn(q, B, 1, 8, 8)
    x_hat = G(z, y)
    x = x_hat.detach()
    with torch.no_grad():
        e, e_u = (ensemble({k: c(v) for k, c in clients.items()}, N) for v in (x, (x + 1e-3 * u).flatten(0, 1)))

    def in_theta_G(g):
        return torch.cat([v.flatten() for v in torch.autograd.grad(along(g, x_hat), G.parameters(), retain_graph=True)])

    truth = in_theta_G(zo.true_gradient(FedZGE().L_G, f, x, clients, N, e, z, y))
    return {
        name: torch.cosine_similarity(
            in_theta_G(FedZGE(estimate=name).estimated(f, x, u, e, e_u.view(q, B, 10), z, y)), truth, dim=0
        ).item()
        for name in zo.ESTIMATES
    }


def test_estimates_in_theta_G(cosines):
    """A generator's parameters are common to all images, and the errors of single images, each along directions of its
    own, average out; the batch's q numbers leave nothing to average. Measured: image and split 0.8, batch below 0.2."""
    assert cosines["image"] >= 0.5
    assert cosines["split"] >= 0.5
    assert cosines["batch"] < 0.3


# --- moments, L_div ----------------------------------------------------------------------------------------------


def test_moments_go_on():
    """Two steps of Adam and three more are five; with new moments they are not."""
    ends = {}
    for pieces in ("5", "2 3 kept", "2 3 fresh"):
        w, moments = torch.tensor([1.0, -2.0], requires_grad=True), {}
        for steps in [int(word) for word in pieces.split() if word.isdigit()]:
            optimiser = adam(0.1).build([w], moments if "kept" in pieces else None)
            for _ in range(steps):
                optimiser.zero_grad()
                (w**3).sum().backward()
                optimiser.step()
            moments = moments_of(optimiser)
        ends[pieces] = w.tolist()
    assert ends["5"] == ends["2 3 kept"]
    assert ends["5"] != ends["2 3 fresh"]
    assert set(moments) == {"0.step", "0.exp_avg", "0.exp_avg_sq"}


def test_kept_moments_matter_from_the_second_round_on(tiny, tmp_path):
    queries = {}
    for moments in ("fresh", "kept"):
        run(tiny("fedzge", rounds=3, set={**QUICK, "moments": moments}), out=tmp_path / moments)
        queries[moments] = {e.round: e["x"] for e in messages(tmp_path / moments, "Query")}
    same = [torch.equal(queries["fresh"][t], queries["kept"][t]) for t in (1, 2, 3)]
    assert same == [True, True, False]  # the images of round t are made before its step


def test_diversity_is_left_out_where_it_is_zero():
    """Images of 3 x 32 x 32 in [-1, 1]: exp(-630) is no single-precision number. With root mean squares it is 0.3."""
    torch.manual_seed(0)
    x, z = torch.rand(16, 3, 32, 32) * 2 - 1, torch.randn(16, 100)
    assert FedZGE().L_G.acting(x, z).beta_2 == 0
    assert FedZGE(distance="rms").L_G.acting(x, z).beta_2 == 1
    near = x / 100  # a hundredth of the distances: exp(-6.3)
    assert FedZGE().L_G.acting(near, z).beta_2 == 1
    assert math.exp(zo.TINY) == pytest.approx(torch.finfo(torch.float32).tiny)


def test_one_image_moves_alone():
    """change[i, b] is L_G with image b at x_u[i, b], all others at x, minus L_G at x: computed as those words say."""
    g = torch.Generator().manual_seed(1)
    B, q = 4, 3
    L_G = zo.Objective(tau=2.0, beta_1=0.7, beta_2=1.5, beta_3=0.6, distance="rms")
    e, f, x, z = (torch.randn(B, *s, generator=g).double() for s in ((3,), (3,), (1, 2, 2), (2,)))
    e_u, f_u, x_u = (torch.randn(q, B, *s, generator=g).double() for s in ((3,), (3,), (1, 2, 2)))
    y = torch.tensor([0, 2, 1, 1])
    change = L_G.change(e, e_u, f, f_u, x, x_u, z, y)
    for i in range(q):
        for b in range(B):
            moved = [v.clone() for v in (e, f, x)]
            for v, there in zip(moved, (e_u, f_u, x_u), strict=True):
                v[b] = there[i, b]
            assert change[i, b].item() == pytest.approx((L_G(*moved, z, y) - L_G(e, f, x, z, y)).item(), abs=1e-12)


# --- alternations and their bill ---------------------------------------------------------------------------------


def test_ten_generator_steps_are_ten_times_the_queries():
    """Table 8's query and answer, ten times each; the ensemble's output goes down once a round, as before."""
    one, ten = (
        {(row["direction"], row["field"]): row["bytes"] for row in plan_traffic(setting)["fields"]}
        for setting in (
            Setting.make(method="fedzge", dataset="cifar10", clients=10, rounds=100, set={"E_G": steps})
            for steps in (1, 10)
        )
    )
    x, f = 500 * 3 * 32 * 32 * 4, 500 * 10 * 4
    assert one["down", "Query.x_u"] == 10 * 10 * x  # a round: ten clients, ten directions
    assert one["up", "Answer.f"] == 10 * 11 * f
    for name in (("down", "Query.x"), ("down", "Query.x_u"), ("up", "Answer.f"), ("up", "Answer.N")):
        assert ten[name] == 10 * one[name]
    assert ten["down", "Consensus.e"] == one["down", "Consensus.e"] == 10 * f


def test_comm_says_so(fedaudit):
    """Algorithm 1's 63.17 GB of Table 2, and what ten alternations would cost: nearly ten times that."""
    for options, printed in (((), "63.17 GiB"), (("--set", "E_G=10"), "631.49 GiB")):
        code, out, _ = fedaudit("comm", "fedzge", *options)
        assert code == 0
        assert printed in out


def test_alternations_in_a_run(tiny, tmp_path):
    """Three queries a round, and the run itself holds declared against measured bytes, with a client that drops out.
    Clients train before the first only: their answers to one image would otherwise change from query to query."""
    options = {**QUICK, "E_G": 3, "gradient": "true"}
    for gradient in ("zeroth", "true"):
        setting = tiny("fedzge", rounds=2, clients=5, dropout=0.2, seed=1, quorum=0.2)
        setting = setting.model_copy(update={"set": {**options, "gradient": gradient}})
        record = run(setting, out=tmp_path / gradient)
        assert any(row.absent for row in record.rounds)
        asks = {(e.round, e.ask) for e in messages(tmp_path / gradient, "Query")}
        assert asks == {(t, i) for t in (1, 2) for i in range(3)}
    weights = messages(tmp_path / "true", "OpenAnswer")
    assert {e.ask for e in weights} == {0}, "the models, which stay as they are for the round, travel once"


def test_directions_are_never_used_twice(tiny, tmp_path):
    """u of every image, direction, alternation and round: 2 * 2 * 2 * 16 independent normal vectors of 64 numbers. Two
    of them have a cosine of 0 +- 1/8; the largest of 8128 pairs is below 5 standard deviations."""
    run(tiny("fedzge", rounds=2, set={**QUICK, "E_G": 2, "epsilon": 0.01}), out=tmp_path / "a")
    seen = {(e.round, e.ask): e for e in messages(tmp_path / "a", "Query") if e.client == 0}
    u = torch.cat([((e["x_u"] - e["x"]) / 0.01).reshape(-1, 64) for e in seen.values()])
    assert len(u) == 128
    assert u.std().item() == pytest.approx(1, abs=0.05)
    unit = u / u.norm(dim=1, keepdim=True)
    assert (unit @ unit.T - torch.eye(128)).abs().max() < 5 / 8


def test_a_total_budget_is_not_overdrawn(tiny, tmp_path):
    """Two rounds of three answers each are six releases of logits, and a plan counts one a round unless told."""
    policy = {"epsilon": 5.0, "sensitivity": "clip:3", "calibration": "total"}
    setting = tiny("fedzge", rounds=2, privacy={"logits": policy})
    with pytest.raises(
        PrivacyError, match=r"planned 2 releases of logits, and this is number 3.*privacy.logits.releases"
    ):
        run(setting.model_copy(update={"set": {**QUICK, "E_G": 3}}), out=tmp_path / "a")
    told = tiny("fedzge", rounds=2, privacy={"logits": {**policy, "releases": 6}})
    record = run(told.model_copy(update={"set": {**QUICK, "E_G": 3}}), out=tmp_path / "b")
    assert record.ledger[0].by_kind["logits"] <= 5.0 + 1e-6


# --- controls ----------------------------------------------------------------------------------------------------


def test_a_frozen_generator_is_never_trained(tiny, tmp_path):
    """No directions travel, no weights either, whatever `gradient` says, and theta_G's parameters stay."""
    for gradient in ("zeroth", "true"):
        options = {**QUICK, "images": "frozen", "gradient": gradient}
        record = run(tiny("fedzge", set=options), out=tmp_path / gradient)
        assert {r.kind for r in record.releases} == {"logits", "count"}
        assert all(len(e["x_u"]) == 0 for e in messages(tmp_path / gradient, "Query"))
    assert len({read_digest(tmp_path / gradient) for gradient in ("zeroth", "true")}) == 1
    x = [e["x"] for e in messages(tmp_path / "zeroth", "Query") if e.client == 0]
    assert not torch.equal(x[0], x[1]), "new noise in each round"


def read_digest(folder):
    return RunFolder(folder).record.transcript_digest


def test_real_images_are_the_public_sets(tiny, tmp_path):
    run(tiny("fedzge", set={**QUICK, "images": "real"}), out=tmp_path / "a")
    public = RunFolder(tmp_path / "a").world.public()[0].flatten(1)
    for query in messages(tmp_path / "a", "Query"):
        assert all((public == row).all(1).any() for row in query["x"].flatten(1))
        assert len(query["x_u"]) == 0


# --- it learns ---------------------------------------------------------------------------------------------------


ROUNDS = 8


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """Three mlp clients on digits, trained once; then eight rounds of each server loop on them."""
    folder = tmp_path_factory.mktemp("loops")
    base = {"clients": 3, "model": "mlp", "rounds": ROUNDS, "eval_every": ROUNDS, "eval_clients": False, "public": 0.1}
    base["aux"] = 0.5
    start = {"method": "local", "rounds": 1, "set": {"E": 10, "B": 32, "eta": 0.1}}
    options = {"E_k": 0, "E_prime": 0, "B": 64, "E": 5, "eta_G": 0.006}
    ways = {"image": {}, "frozen": {"images": "frozen"}, "true": {"gradient": "true"}}
    for name, way in ways.items():
        setting = Setting.make(method="fedzge", partition="iid", start=start, set={**options, **way}, **base)
        run(setting, out=folder / name)
    return {name: RunFolder(folder / name) for name in ways}


def agreement(folder, t):
    """How often the ensemble's answer to x^ is y^ in round t, which only the server knows."""
    answers = {e.client: e for e in folder.transcript.entries() if e.round == t and e.message.endswith("Answer")}
    e = ensemble({k: a["f"][:64] for k, a in answers.items()}, {k: a["N"] for k, a in answers.items()})
    y = torch.randint(10, (64,), generator=generator(folder.record.setting.seed, "server", t, 0, "y 0"))
    share = (e.argmax(1) == y).double().mean().item()
    assert folder.record.rounds[t - 1].diagnostics == {"agreement of e with y^": share}
    return share


def test_agreement_rises_and_a_frozen_generators_does_not(loops):
    """The first round's images are those of an untrained generator: one in ten, give or take 0.04. After seven steps
    nearly all are what they were to be, with the estimate as with true gradients."""
    first, last = ({name: agreement(f, t) for name, f in loops.items()} for t in (1, ROUNDS))
    assert first["image"] == first["frozen"] == first["true"] < 0.3
    assert last["image"] > 0.7
    assert last["true"] > 0.7
    assert last["frozen"] < 0.3
