"""FedZGE, MHAT and DS-FL: their losses by hand, the zeroth-order estimate, and what travels."""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedaudit import Setting, adam, load, state_of
from fedaudit.errors import PrivacyError, SettingError
from fedaudit.methods.datafree import _zeroth as zo
from fedaudit.methods.datafree.fedzge import FedZGE, Generator, along
from fedaudit.methods.distillation.dsfl import DSFL
from fedaudit.methods.distillation.mhat import MHAT
from fedaudit.methods.shared import _ensemble as shared
from fedaudit.methods.shared._batch_statistics import predict_on_batches
from fedaudit.methods.shared._ensemble import ensemble
from fedaudit.rng import generator
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.planned_traffic import plan_traffic
from fedaudit.runtime.runner import run
from fedaudit.shape import Shape
from fedaudit.training import models
from fedaudit.training.fit import moments_of
from fedaudit.wire.message import Size, as_size
from fedaudit.wire.traffic import NUMBER, Plan
from fedaudit.wire.transcript import Transcript

LN2, LN3 = math.log(2), math.log(3)


# --- losses ------------------------------------------------------------------------------------------------------


def test_fidelity_by_hand():
    """Eq. 3: logits (ln 3, 0) give the first class 3/4, logits (0, 0) give the second 1/2: (ln 4/3 + ln 2) / 2."""
    e = torch.tensor([[LN3, 0.0], [0.0, 0.0]])
    assert zo.L_fid(e, torch.tensor([0, 1])).item() == pytest.approx((math.log(4 / 3) + LN2) / 2, abs=1e-6)


def test_adversarial_by_hand():
    """Eq. 5 at tau = 2: the ensemble's (2 ln 3, 0) is (3/4, 1/4), the global model's (0, 0) is (1/2, 1/2), so minus
    KL = -(3/4 ln 3/2 + 1/4 ln 1/2). With the arguments exchanged it would be -(1/2 ln 2/3 + 1/2 ln 2)."""
    e, f = torch.tensor([[2 * LN3, 0.0]]), torch.zeros(1, 2)
    assert zo.L_adv(e, f, 2.0).item() == pytest.approx(-(0.75 * math.log(1.5) - 0.25 * LN2), abs=1e-6)


def test_diversity_by_hand():
    """Eq. 7 for two images at distance 5 (3-4-5) and noises at distance 2: of the four pairs two count, -5 * 2 each, so
    exp(-20 / 4). As root mean squares over 4 numbers each: 5/2 and 2/2, exp(-2 * 2.5 / 4). As mean squares: 25/4 and
    4/4."""
    x = torch.tensor([[[[0.0, 0.0], [0.0, 0.0]]], [[[3.0, 4.0], [0.0, 0.0]]]])
    z = torch.tensor([[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    assert zo.L_div(x, z).item() == pytest.approx(math.exp(-5), rel=1e-9)
    assert zo.L_div(x, z, distance="rms").item() == pytest.approx(math.exp(-1.25), rel=1e-9)
    assert zo.L_div(x, z, distance="ms").item() == pytest.approx(math.exp(-2 * 25 / 4 * 4 / 4 / 4), rel=1e-9)


def test_diversity_as_published_is_numerically_zero_at_cifar_size():
    """Images uniform in [-1, 1] lie sqrt(3072 * 2/3) = 45 apart, noises sqrt(200) = 14: exp(-630), below every
    gradient that single precision can hold. The rms form gives exp(-0.82 * 1.41) = 0.3."""
    x, z = torch.rand(16, 3, 32, 32) * 2 - 1, torch.randn(16, 100)
    gradient = {}
    for rms in ("norm", "rms"):
        at = x.clone().requires_grad_()
        zo.L_div(at, z, rms).backward()
        gradient[rms] = at.grad
    assert gradient["norm"].abs().max() == 0
    assert gradient["rms"].abs().max() > 0
    assert zo.L_div(x, z, distance="rms").item() == pytest.approx(0.3, abs=0.1)


def test_equilibrium_by_hand():
    """Eqs. 8 and 9: rows (9/10, 1/10) and (1/2, 1/2) average to (7/10, 3/10), while averaged logits would give
    (3/4, 1/4). Rows (3/4, 1/4) and (1/4, 3/4) give -ln 2, the minimum. A class without probability adds 0, no NaN."""
    uneven = torch.tensor([[2 * LN3, 0.0], [0.0, 0.0]])
    assert zo.L_info(uneven).item() == pytest.approx(0.7 * math.log(0.7) + 0.3 * math.log(0.3), abs=1e-6)
    assert zo.L_info(torch.tensor([[LN3, 0.0], [0.0, LN3]])).item() == pytest.approx(-LN2, abs=1e-6)
    assert zo.L_info(torch.tensor([[1000.0, 0.0]])).item() == 0


def test_objective_adds_its_parts():
    """Eq. 10 with beta = (2, 3, 4); each 0 leaves its part out."""
    g = torch.Generator().manual_seed(0)
    e, f, x, z = (torch.randn(4, *s, generator=g) for s in ((3,), (3,), (1, 4, 4), (2,)))
    y = torch.tensor([0, 1, 2, 0])
    parts = [zo.L_fid(e, y), zo.L_adv(e, f, 5.0), zo.L_div(x, z), zo.L_info(e)]
    for betas in ((2.0, 3.0, 4.0), (0.0, 3.0, 4.0), (2.0, 0.0, 4.0), (2.0, 3.0, 0.0), (0.0, 0.0, 0.0)):
        method = FedZGE(**{f"beta_{i}": beta for i, beta in enumerate(betas, 1)})
        whole = sum(beta * part.item() for beta, part in zip((1.0, *betas), parts, strict=True))
        assert method.L_G(e, f, x, z, y).item() == pytest.approx(whole, abs=1e-5)


def test_distillation_by_hand():
    """Eqs. 4 and 20 at tau = 2, teacher (2 ln 3, 0) and student (0, 0): 3/4 ln 3/2 - 1/4 ln 2, the teacher first. A
    label adds lam ln 2. Against soft labels (3/4, 1/4), cross-entropy is ln 2 whatever the labels are."""
    x, e = torch.zeros(1, 2), torch.tensor([[2 * LN3, 0.0]])
    kl = 0.75 * math.log(1.5) - 0.25 * LN2
    y, p = torch.tensor([1]), torch.tensor([[0.75, 0.25]])
    assert shared.distil(lambda x: x, x, e, tau=2.0).tolist() == pytest.approx([kl], abs=1e-6)
    assert shared.distil_labelled(lambda x: x, x, e, y, tau=2.0, lam=3.0).tolist() == pytest.approx([kl + 3 * LN2])
    assert shared.imitate(lambda x: x, x, p).tolist() == pytest.approx([LN2])
    assert shared.imitate(lambda x: x, e / 2, p).tolist() == pytest.approx(
        [-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))]
    )


def test_ensemble_by_hand():
    """N = 10 and 30: weights 1/4 and 3/4 over those who answered; client 7, who did not, has no part in N."""
    outputs = {3: torch.tensor([[4.0, 0.0]]), 1: torch.tensor([[0.0, 8.0]])}
    assert shared.ensemble(outputs, {1: 30, 3: 10, 7: 1000}).tolist() == [[1.0, 6.0]]


def test_entropy_reduction_by_hand():
    """ERA: (0.8, 0.2) and (0.4, 0.6) average to (0.6, 0.4); over T = 0.1 that is (6, 4), so 1 / (1 + e^-2) for the
    first. With N = 1 and 3 the mean is (0.5, 0.5), which no temperature sharpens."""
    p = {0: torch.tensor([[0.8, 0.2]]), 1: torch.tensor([[0.4, 0.6]])}
    assert DSFL().era(shared.ensemble(p, {0: 1, 1: 1}))[0, 0].item() == pytest.approx(1 / (1 + math.exp(-2)), abs=1e-6)
    assert DSFL().era(shared.ensemble(p, {0: 1, 1: 3}))[0].tolist() == pytest.approx([0.5, 0.5])
    assert DSFL(aggregate="sa").era(shared.ensemble(p, {0: 1, 1: 1}))[0].tolist() == pytest.approx([0.6, 0.4])


def test_auxiliary_set_is_walked_through():
    """7 rows, 3 a round: rounds 1 and 2 see rows 0-5, round 3 the last one and the first two again."""
    order = torch.tensor([6, 5, 4, 3, 2, 1, 0])
    assert [shared.auxiliary(order, t, 3).tolist() for t in (1, 2, 3)] == [[6, 5, 4], [3, 2, 1], [0, 6, 5]]


def test_answers_depend_on_their_own_image_alone():
    model = models.build("cnn_bn", shape=(1, 8, 8), classes=10).train()
    x = torch.randn(5, 1, 8, 8)
    together = shared.predict(model, x, batch=4)
    assert together[2].tolist() == pytest.approx(shared.predict(model, x[2:3])[0].tolist(), abs=1e-6)


@pytest.mark.parametrize("answer", [shared.predict, predict_on_batches], ids=["running", "batch"])
@pytest.mark.parametrize("allowed", [(True, True), (True, False), (False, True)])
def test_answers_are_computed_in_single_precision(allowed, answer):
    """Neither convolutions nor products may keep 11 bits of an answer, whatever the run allows elsewhere."""
    seen = []

    class Looking(nn.Module):
        def forward(self, x):
            seen.append(tf32())
            return x

    before = tf32()
    try:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = allowed
        answer(Looking(), torch.zeros(4, 3))
        assert seen == [(False, False)]
        assert tf32() == allowed
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def tf32() -> tuple[bool, bool]:
    """Return whether convolutions and products of matrices may be rounded to TF32 here."""
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


# --- the generator -----------------------------------------------------------------------------------------------


def test_generator_of_table_7():
    """Embedding 10*100; linear 200*8192 + 8192; batch norms 2*(128 + 128 + 64 + 3); transposed convolutions
    128*128*16 + 128 and 128*64*16 + 64; convolution 64*3*9 + 3: 2,043,377."""
    G = Generator(100, (3, 32, 32), 10)
    assert models.count(G) == 2_043_377
    x = G(torch.randn(4, 100), torch.tensor([0, 1, 2, 9]))
    assert x.shape == (4, 3, 32, 32)
    assert x.abs().max() <= 1
    with pytest.raises(SettingError, match=r"30 x 30 images.*--image-size 32"):
        Generator(100, (3, 30, 30), 10)


# --- the zeroth-order estimate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [4, 16, 64])
def test_error_of_the_estimate_falls_as_one_over_root_q(q):
    """For L(x) = <a, x> an estimate from one direction is (a.u) u, u ~ N(0, I_D): its mean is a, and its mean squared
    norm E[(a.u)^2 |u|^2] = (D + 2) |a|^2, so the squared error is (D + 1) |a|^2, and over q directions a q-th of that.
    The batch of B images has D = B d; row by row each image has only its own d."""
    g = torch.Generator().manual_seed(q)
    B, d, trials, epsilon = 8, 12, 400, 1e-3
    a = torch.randn(B, d, generator=g, dtype=torch.double)
    errors = {"batch": 0.0, "images": 0.0}
    for _ in range(trials):
        u = torch.randn(q, B, d, generator=g, dtype=torch.double)
        change = torch.einsum("qbd,bd->qb", epsilon * u, a)  # of <a_b, x_b>, the image's own part of <a, x>
        errors["batch"] += (zo.along_batch(change.sum(1), u, epsilon) - a).square().sum().item() / trials
        errors["images"] += (zo.along_images(change, u, epsilon) - a).square().sum().item() / trials
    norm = a.square().sum().item()
    assert errors["batch"] == pytest.approx((B * d + 1) * norm / q, rel=0.1)
    assert errors["images"] == pytest.approx((d + 1) * norm / q, rel=0.1)


@pytest.fixture
def scene():
    """Two clients and a global model small enough for very many directions, and the true gradient by autograd."""
    torch.manual_seed(0)

    def net():
        return nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).eval()

    clients, f = {0: net(), 1: net()}, net()
    N = {0: 10, 1: 30}
    x, z, y = torch.rand(3, 1, 2, 2) * 2 - 1, torch.randn(3, 2), torch.tensor([0, 1, 2])

    def e(x):
        return 0.25 * clients[0](x) + 0.75 * clients[1](x)

    def truth(method):
        at = x.clone().requires_grad_()
        return torch.autograd.grad(method.L_G(e(at), f(at), at, z, y), at)[0]

    return clients, f, N, x, z, y, e, truth


@pytest.mark.parametrize("estimate", ["image", "batch", "split"])
@pytest.mark.parametrize("betas", [(1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (20.0, 0.0, 0.0), (0.0, 20.0, 0.0)])
def test_estimate_converges_to_the_true_gradient(scene, estimate, betas):
    """With 20,000 directions the expected error is sqrt(13 / 20000) = 2.5 % of the gradient for the batch (D = 12),
    less for the split estimate. Without the factor d it is unbiased; with it, 4 times as long."""
    _, f, _, x, z, y, e, truth = scene
    options = {"estimate": estimate, "distance": "rms", **{f"beta_{i}": beta for i, beta in enumerate(betas, 1)}}
    u = torch.randn(20_000, *x.shape)
    with torch.no_grad():
        there, everywhere = e(x), e((x + 1e-3 * u).flatten(0, 1)).view(len(u), 3, 3)
    unbiased = FedZGE(scale="unbiased", **options)
    g, true = unbiased.estimated(f, x, u, there, everywhere, z, y), truth(unbiased)
    assert (g - true).norm() / true.norm() < 0.08
    paper = FedZGE(**options).estimated(f, x, u, there, everywhere, z, y)
    assert torch.allclose(paper, 4 * g)


def test_true_gradient_is_autograds(scene):
    clients, f, N, x, z, y, e, truth = scene
    method = FedZGE(gradient="true", distance="rms")
    g = zo.true_gradient(method.L_G, f, x, clients, N, e(x).detach(), z, y)
    assert (g - truth(method)).norm() / truth(method).norm() < 1e-5


def test_estimate_trains_the_generator():
    """Eqs. 18 and 19 with a fixed, known teacher: images of class c are those with the c-th pixel brightest. One Adam
    step at a time along the split estimate, the fidelity loss falls."""
    torch.manual_seed(0)
    G, method = Generator(4, (1, 4, 4), 4), FedZGE(estimate="split", beta_1=0, beta_2=0, beta_3=0, q=10)

    def teacher(x):
        return 3 * x.flatten(1)[:, :4]

    fidelity = []
    for _ in range(12):
        z, y, u = torch.randn(32, 4), torch.arange(32) % 4, torch.randn(10, 32, 1, 4, 4)
        x_hat = G(z, y)
        x = x_hat.detach()
        e, e_u = teacher(x), teacher((x + 1e-3 * u).flatten(0, 1)).view(10, 32, 4)
        g = method.estimated(nn.Flatten(), x, u, e, e_u, z, y)
        step = adam(0.01).build(list(G.parameters()))
        (g * x_hat).sum().backward()
        step.step()
        step.zero_grad()
        fidelity.append(zo.L_fid(e, y).item())
    assert fidelity[-1] < fidelity[0] / 2


# --- traffic -----------------------------------------------------------------------------------------------------


@functools.cache
def parameters(arch: str, classes: int) -> int:
    return models.describe(arch, (3, 32, 32), classes)["parameters"]


def plan(classes: int, archs: list[str], server: str | None = None, public: int = 50_000) -> Plan:
    ids = range(len(archs))
    return Plan(
        t=1,
        participants=list(ids),
        n=dict.fromkeys(ids, 5000),
        archs=dict(enumerate(archs)),
        server_arch=server or archs[0],
        shape=Shape((3, 32, 32)),
        classes=classes,
        model_size=lambda arch: Size(4 * parameters(arch, classes), 12345),  # buffers are in no published figure
        clients=len(archs),
        public=public,
    )


def round_bytes(method, of: Plan, without: str = "") -> int:
    return sum(as_size(s).payload for (_, name), s in method.traffic(of).items() if name != without)


def test_what_travels_beyond_table_8():
    """Table 8, per client and round, x = 500*3*32*32*4 bytes and f = 500*10*4; every method adds N_k, one number."""
    of = plan(10, ["resnet18"])
    x, f = 500 * 3072 * 4, 500 * 10 * 4
    table = {
        FedZGE(): (x + f + 10 * x) + (f + 10 * f),
        MHAT(): (x + 500 * 4 + f) + f,
        DSFL(): (x + f) + f,
    }
    for method, published in table.items():
        assert round_bytes(method, of) - published == NUMBER
    assert round_bytes(DSFL(weights="equal"), of) == table[DSFL()]
    assert round_bytes(MHAT(), plan(10, ["resnet18"], public=0)) == round_bytes(MHAT(), of)  # planned without data


def test_true_gradients_cost_the_models():
    archs = ["resnet18", "resnet34"]
    of = plan(10, archs)
    sent = FedZGE(gradient="true").traffic(of)
    assert sent["up", "OpenAnswer.theta"].payload == 4 * sum(parameters(arch, 10) for arch in archs)
    assert as_size(sent["down", "Query.x_u"]).payload == 0


# --- runs --------------------------------------------------------------------------------------------------------


def messages(folder):
    return list(Transcript(folder / "transcript").entries())


def test_no_weight_ever_travels(tiny, tmp_path):
    """Every message of a run, in both directions: images, outputs and counts, and nothing that depends on the model."""
    for arch in ("cnn_bn", "mlp"):
        run(tiny("fedzge", model=arch), out=tmp_path / arch)
        for entry in messages(tmp_path / arch):
            assert entry.kinds() <= {"logits", "count"}
            for name in entry.fields:
                value = entry[name]
                assert isinstance(value, int) or value.shape[-1] in (8, 10)  # images of 8 x 8, or outputs
    cnn, mlp = ([e.fields for e in messages(tmp_path / arch)] for arch in ("cnn_bn", "mlp"))
    assert [{n: f.payload for n, f in a.items()} for a in cnn] == [{n: f.payload for n, f in b.items()} for b in mlp]


def test_queries_are_what_algorithm_1_sends(tiny, tmp_path):
    """x^ in [-1, 1]; the perturbations differ from it by epsilon times a standard normal number."""
    run(tiny("fedzge", rounds=1, set={**FedZGE.quick, "q": 20, "epsilon": 0.01}), out=tmp_path / "a")
    entries = messages(tmp_path / "a")
    query = next(e for e in entries if e.message == "Query")
    x, x_u = query["x"], query["x_u"]
    assert x.shape == (16, 1, 8, 8)
    assert x_u.shape == (20, 16, 1, 8, 8)
    assert x.abs().max() <= 1
    u = (x_u - x) / 0.01
    assert u.mean().item() == pytest.approx(0, abs=0.03)
    assert u.std().item() == pytest.approx(1, abs=0.02)
    answers = [e for e in entries if e.message == "Answer"]
    assert [e["f"].shape for e in answers] == [(21 * 16, 10)] * 3
    N = [e["N"] for e in answers]
    e = sum(n / sum(N) * a["f"][:16] for n, a in zip(N, answers, strict=True))
    consensus = next(m for m in entries if m.message == "Consensus")
    assert torch.allclose(consensus["e"], e, atol=1e-5)


def test_true_gradients_release_the_weights_and_the_ledger_says_so(tiny, tmp_path):
    setting = tiny("fedzge", rounds=1, model="cnn:1,cnn_bn:1,mlp:1", server_model="cnn")
    record = run(setting.model_copy(update={"set": {**FedZGE.quick, "gradient": "true"}}), out=tmp_path / "a")
    assert {r.kind for r in record.releases} >= {"logits", "weights", "count"}
    assert all(client.by_kind["weights"] == math.inf for client in record.ledger)
    zeroth = run(setting, out=tmp_path / "b")
    assert all(client.by_kind.keys() == {"logits", "count"} for client in zeroth.ledger)


def test_policy_on_logits_counts_all_rows(tiny, tmp_path):
    """Every one of the (1 + q) B = 48 rows depends on every record: sensitivity sqrt(48) * 2 C under clipping C = 3."""
    policy = {"logits": {"noise_multiplier": 1.0, "sensitivity": "clip:3"}}
    record = run(tiny("fedzge", rounds=1, privacy=policy), out=tmp_path / "a")
    entry = next(e for e in record.ledger[0].entries if e.kind == "logits")
    assert entry.sensitivity == pytest.approx(math.sqrt(48) * 6)
    assert record.ledger[0].by_kind["logits"] < math.inf


@pytest.mark.parametrize("method", ["fedzge", "mhat", "dsfl"])
def test_heterogeneous_clients(method, tiny, tmp_path):
    setting = tiny(method, rounds=1, clients=4, model="cnn:1,cnn_bn:1,mlp:2", server_model="cnn_bn")
    record = run(setting, out=tmp_path / "a")
    assert record.result.last.global_.test.n > 0


@pytest.mark.parametrize("options", [{"E_prime": 0}, {"estimate": "split", "scale": "unbiased", "distance": "rms"}])
def test_switches_run_and_keep_to_their_traffic(options, tiny, tmp_path):
    """The run itself holds declared against measured bytes."""
    run(tiny("fedzge", rounds=1, set={**FedZGE.quick, **options}), out=tmp_path / "a")
    assert {e.message for e in messages(tmp_path / "a")} == {"Query", "Answer"} | (
        set() if options.get("E_prime") == 0 else {"Consensus", "Distilled"}
    )


def test_equal_weights_need_no_counts(tiny, tmp_path):
    run(tiny("dsfl", rounds=1, set={**DSFL.quick, "weights": "equal"}), out=tmp_path / "a")
    labels = [e for e in messages(tmp_path / "a") if e.message == "SoftLabels"]
    assert [e["N"] for e in labels] == [None] * 3
    assert all(torch.allclose(e["p"].sum(1), torch.ones(32)) for e in labels)


@pytest.mark.long
@pytest.mark.parametrize("method", ["mhat", "dsfl"])
def test_distillation_on_an_auxiliary_set_learns(method, tiny, tmp_path):
    """Nothing but outputs on 180 public images reaches the server's model; guessing gives 10 %."""
    options = {"E_k": 4, "B_k": 32, "E_prime": 2, "E": 20}
    record = run(tiny(method, rounds=2, partition="iid", set=options, eval_every=2), out=tmp_path / "a")
    assert record.result.last.global_.test.accuracy > 0.5


# --- fedZGE's server loop: what an estimate is worth in theta_G, alternations and their bill, and the controls.


QUICK = dict(FedZGE.quick)


def sent(folder, name):
    return [e for e in Transcript(folder / "transcript").entries() if e.message == name]


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


@pytest.mark.long
def test_kept_moments_matter_from_the_second_round_on(tiny, tmp_path):
    queries = {}
    for moments in ("fresh", "kept"):
        run(tiny("fedzge", rounds=3, set={**QUICK, "moments": moments}), out=tmp_path / moments)
        queries[moments] = {e.round: e["x"] for e in sent(tmp_path / moments, "Query")}
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


def differences(a, b, distance):
    """Return the distances as they are written down: all differences of rows, then their squares."""
    squares = (a.flatten(1).double()[:, None] - b.flatten(1).double()[None]).square()
    return {"norm": squares.sum(2).sqrt(), "rms": squares.mean(2).sqrt(), "ms": squares.mean(2)}[distance]


@pytest.mark.parametrize("distance", ["norm", "rms", "ms"])
@pytest.mark.parametrize("at_once", [1, 2 * 5 * 12 * 8, 1 << 28])  # a row at a time, two (the last alone), all
def test_distances_and_their_gradients_are_those_of_all_differences(monkeypatch, distance, at_once):
    """Images 0 and 1 are 1e-6 apart: products of rows, in place of differences, would keep 4 digits of that."""
    monkeypatch.setattr(zo, "AT_ONCE", at_once)
    g = torch.Generator().manual_seed(3)
    a, b = (torch.rand(n, 3, 2, 2, generator=g, dtype=torch.double) * 2 - 1 for n in (7, 5))
    b[0] = a[0] + 1e-6 * torch.randn(3, 2, 2, generator=g)
    g_out = torch.rand(7, 5, generator=g, dtype=torch.double)
    found, wanted = [], []
    for of, into in ((zo.apart, found), (differences, wanted)):
        at = [t.clone().requires_grad_() for t in (a, b)]
        distances = of(*at, distance)
        into += [distances.detach(), *torch.autograd.grad(distances, at, g_out)]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert found[0][0, 0].item() == pytest.approx(wanted[0][0, 0].item(), rel=1e-12)


@pytest.mark.parametrize("distance", ["norm", "rms", "ms"])
def test_equal_images_do_not_pull_at_each_other(distance):
    """Rows 0 and 1 are the same, and each has distance 0 to itself: their gradient comes from row 2 alone."""
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]], dtype=torch.double, requires_grad=True)
    (g,) = torch.autograd.grad(zo.apart(x, x, distance).sum(), x)
    pull = {"norm": (0.6, 0.8), "rms": (0.6 / math.sqrt(2), 0.8 / math.sqrt(2)), "ms": (3.0, 4.0)}[distance]
    for row, times in enumerate((-2, -2, 4)):  # each pair is there twice
        assert g[row].tolist() == pytest.approx([times * p for p in pull], rel=1e-12)


class Largest(TorchDispatchMode):
    """Keeps the number of bytes of the largest tensor that any operation returns, and the operations' names."""

    def __init__(self):
        super().__init__()
        self.bytes, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        made = [t for t in made if not t._is_view() and 0 not in t.stride()]  # a view takes no memory
        self.bytes = max([self.bytes, *(t.numel() * t.element_size() for t in made)])
        self.names.add(func.overloadpacket._qualified_op_name)
        return out


@pytest.mark.parametrize("distance", ["norm", "rms", "ms"])
def test_diversity_of_500_images_never_holds_all_their_differences(distance):
    """They are 500 x 500 x 3072 doubles, 6.1 GB, and ten times that for ten directions. No tensor is above 256 MiB."""
    x, x_u = (torch.empty(*q, 500, 3, 32, 32, device="meta") for q in ((), (10,)))
    z, x = torch.empty(500, 100, device="meta"), x.requires_grad_()
    e, y = torch.empty(500, 10, device="meta"), torch.empty(500, dtype=torch.long, device="meta")
    e_u = e.expand(10, 500, 10)
    L_G = zo.Objective(tau=5.0, beta_1=1.0, beta_2=1.0, beta_3=1.0, distance=distance)
    with Largest() as largest:
        zo.L_div(x, z, distance).backward()
        L_G.change(e, e_u, e, e_u, x.detach(), x_u, z, y)
        torch.vmap(lambda e, f, x: L_G(e, f, x, z, y))(e_u, e_u, x_u)
    assert 10 * 500 * 3072 * 8 <= largest.bytes <= 1 << 28  # the moved images themselves, in doubles
    assert "aten::_cdist_backward" not in largest.names  # on a GPU it makes a tensor of all differences inside


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


@pytest.mark.long
def test_alternations_in_a_run(tiny, tmp_path):
    """Three queries a round, and the run itself holds declared against measured bytes, with a client that drops out.
    Clients train before the first only: their answers to one image would otherwise change from query to query."""
    options = {**QUICK, "E_G": 3, "gradient": "true"}
    for gradient in ("zeroth", "true"):
        setting = tiny("fedzge", rounds=2, clients=5, dropout=0.2, seed=1, quorum=0.2)
        setting = setting.model_copy(update={"set": {**options, "gradient": gradient}})
        record = run(setting, out=tmp_path / gradient)
        assert any(row.absent for row in record.rounds)
        asks = {(e.round, e.ask) for e in sent(tmp_path / gradient, "Query")}
        assert asks == {(t, i) for t in (1, 2) for i in range(3)}
    weights = sent(tmp_path / "true", "OpenAnswer")
    assert {e.ask for e in weights} == {0}, "the models, which stay as they are for the round, travel once"


def test_directions_are_never_used_twice(tiny, tmp_path):
    """u of every image, direction, alternation and round: 2 * 2 * 2 * 16 independent normal vectors of 64 numbers. Two
    of them have a cosine of 0 +- 1/8; the largest of 8128 pairs is below 5 standard deviations."""
    run(tiny("fedzge", rounds=2, set={**QUICK, "E_G": 2, "epsilon": 0.01}), out=tmp_path / "a")
    seen = {(e.round, e.ask): e for e in sent(tmp_path / "a", "Query") if e.client == 0}
    u = torch.cat([((e["x_u"] - e["x"]) / 0.01).reshape(-1, 64) for e in seen.values()])
    assert len(u) == 128
    assert u.std().item() == pytest.approx(1, abs=0.05)
    unit = u / u.norm(dim=1, keepdim=True)
    assert (unit @ unit.T - torch.eye(128)).abs().max() < 5 / 8


@pytest.mark.long
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


def test_a_frozen_generator_is_never_trained(tiny, tmp_path):
    """No directions travel, no weights either, whatever `gradient` says, and theta_G's parameters stay."""
    for gradient in ("zeroth", "true"):
        options = {**QUICK, "images": "frozen", "gradient": gradient}
        record = run(tiny("fedzge", set=options), out=tmp_path / gradient)
        assert {r.kind for r in record.releases} == {"logits", "count"}
        assert all(len(e["x_u"]) == 0 for e in sent(tmp_path / gradient, "Query"))
    assert len({read_digest(tmp_path / gradient) for gradient in ("zeroth", "true")}) == 1
    x = [e["x"] for e in sent(tmp_path / "zeroth", "Query") if e.client == 0]
    assert not torch.equal(x[0], x[1]), "new noise in each round"


def read_digest(folder):
    return RunFolder(folder).record.transcript_digest


def test_real_images_are_the_public_sets(tiny, tmp_path):
    run(tiny("fedzge", set={**QUICK, "images": "real"}), out=tmp_path / "a")
    public = RunFolder(tmp_path / "a").world.public()[0].flatten(1)
    for query in sent(tmp_path / "a", "Query"):
        assert all((public == row).all(1).any() for row in query["x"].flatten(1))
        assert len(query["x_u"]) == 0


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


@pytest.mark.long
def test_agreement_rises_and_a_frozen_generators_does_not(loops):
    """The first round's images are those of an untrained generator: one in ten, give or take 0.04. After seven steps
    nearly all are what they were to be, with the estimate as with true gradients."""
    first, last = ({name: agreement(f, t) for name, f in loops.items()} for t in (1, ROUNDS))
    assert first["image"] == first["frozen"] == first["true"] < 0.3
    assert last["image"] > 0.7
    assert last["true"] > 0.7
    assert last["frozen"] < 0.3


@pytest.mark.parametrize(
    ("tested", "names"),
    [
        ("end", []),
        ("batch", ["test batch statistics"]),
        ("inner", ["test batch statistics", "test batch statistics, inner step 5"]),
    ],
)
def test_which_points_of_a_round_are_scored_by_test_batches(tested, names):
    net = models.build("cnn_bn@0.25", shape=(1, 8, 8), classes=4)
    theta = state_of(net)
    learned = SimpleNamespace(theta=theta, inner={5: theta} if tested == "inner" else {})
    server = SimpleNamespace(model=lambda state: load(models.build("cnn_bn@0.25", shape=(1, 8, 8), classes=4), state))
    assert list(FedZGE(tested=tested).global_points(learned, server)) == names
