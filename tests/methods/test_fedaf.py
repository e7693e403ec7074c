"""FedAF, FedDM and the condensation that they share, against numbers derived by hand."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import nn

from fedaudit import ce, load
from fedaudit.errors import SettingError
from fedaudit.methods.condensation import fedaf, feddm
from fedaudit.methods.condensation._condense import Records, Sampled, dm, gathered, in_chunks, seen_ce
from fedaudit.methods.condensation._siamese import views
from fedaudit.registry import find
from fedaudit.rng import generator
from fedaudit.runtime.declarations.contract import check_declarations
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.runner import run
from fedaudit.runtime.task import open_client
from fedaudit.runtime.world import world_of
from fedaudit.training import models
from fedaudit.training.fit import fit, sgd
from fedaudit.wire.transcript import Transcript


def sent(folder, message, t=1):
    entries = Transcript(folder / "transcript").entries()
    return {e.client: e for e in entries if e.message == message and e.round == t}


def client_of(setting, k=0):
    world = world_of(setting.model_dump_json())
    return open_client(world.site(k), 1, 0, Meter("client", 1, world.device), None)


# --- the records of a client, by class ---------------------------------------------------------------------------


def ragged():
    """Class 4 with one record, class 7 with three, class 9 with five, mixed up. A record is its own number."""
    y = torch.tensor([9, 7, 9, 4, 9, 7, 9, 7, 9])
    return torch.arange(9.0).reshape(9, 1, 1, 1), y


def test_draws_b_records_of_each_class_and_averages_by_class():
    """B = 2: one of class 4, two of classes 7 and 9, none twice. The mean of rows (1), (2, 4), (6, 10) is 1, 3, 8."""
    x, y = ragged()
    D = Records(x, y, B=2)
    assert (D.classes, D.N) == ([4, 7, 9], [1, 3, 5])
    seen = set()
    for _ in range(50):
        drawn = D.draw().flatten().long()
        assert y[drawn].tolist() == [4, 7, 7, 9, 9]
        assert len(set(drawn.tolist())) == 5
        seen |= set(drawn.tolist())
    assert seen == set(range(9)), "every record comes up some time"
    assert D.mean(torch.tensor([[1.0], [2], [4], [6], [10]])).flatten().tolist() == [1, 3, 8]


def test_a_batch_that_holds_all_records_is_equation_3_itself():
    """Class means of the record numbers: 3; (1 + 5 + 7) / 3; (0 + 2 + 4 + 6 + 8) / 5."""
    x, y = ragged()
    D = Records(x, y, B=5)
    assert D.mean(D.draw().flatten(1)).flatten().tolist() == pytest.approx([3, 13 / 3, 4])


def test_classes_with_too_few_records_are_not_held():
    x, y = ragged()
    D = Records(x, y, B=2, least=3)
    assert (D.classes, D.N, D.y.tolist()) == ([7, 9], [3, 5], [7] * 3 + [9] * 5)
    assert D.draw().shape == (4, 1, 1, 1)
    assert Records(x, y, B=2, least=6).classes == []


def test_where_condensed_images_start():
    """A single start holds records only, each once while they last; averages of ten draws lie closer together than
    records; noise knows nothing of the records."""
    x, y = ragged()
    D = Records(x / 10, y, B=2)
    torch.manual_seed(0)
    single = D.start("single", 5, 10)
    assert single.shape == (3, 5, 1, 1, 1)
    assert sorted(single[1].flatten()[:3].tolist()) == pytest.approx([0.1, 0.5, 0.7])
    assert sorted(single[2].flatten().tolist()) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])
    average = D.start("average", 200, 10)
    assert average[2].mean().item() == pytest.approx(0.4, abs=0.03)  # 0.283 / sqrt(10) / sqrt(200) = 0.006
    assert average[2].std().item() == pytest.approx(0.283 / math.sqrt(10), rel=0.2)
    torch.manual_seed(0)
    noise = D.start("noise", 5, 10)
    torch.manual_seed(0)
    assert torch.equal(noise, Records(-x, y, B=2).start("noise", 5, 10))
    assert noise.abs().max() <= 1


@pytest.mark.parametrize("how", ["average", "single"])
@pytest.mark.parametrize("n", [1, 2, 3, 9, 10, 11, 29, 30, 49])
def test_few_records_still_give_different_images(n, how):
    """n < IPC = 50 records: fifty images, no two alike. Copies of one image get equal gradients and never separate."""
    torch.manual_seed(n)
    x = torch.rand(n, 1, 4, 4) * 2 - 1
    (S,) = Records(x, torch.zeros(n, dtype=torch.long), B=64).start(how, 50, 10)
    assert len(S.unique(dim=0)) == 50
    assert S.abs().max() <= 1


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_no_average_is_a_record(n):
    """Not even of a class with one record, which starts from noise, or with two, of whose averages of ten draws one in
    500 would be a record."""
    torch.manual_seed(n)
    x = torch.rand(n, 1, 8, 8) * 2 - 1
    (S,) = Records(x, torch.zeros(n, dtype=torch.long), B=64).start("average", 500, 10)
    nearest = (S[:, None] - x[None]).square().mean((2, 3, 4)).sqrt().min()
    assert nearest > 0.01


def test_many_records_are_averaged_ten_at_a_time():
    """Sixty records that are unit vectors: every image holds ten of them with a tenth each, drawn anew for each."""
    x = torch.eye(60).reshape(60, 1, 6, 10)
    torch.manual_seed(0)
    (S,) = Records(x, torch.zeros(60, dtype=torch.long), B=64).start("average", 50, 10)
    assert torch.allclose(S.sum((1, 2, 3)), torch.ones(50))
    assert sorted({round(v, 5) for v in S.flatten().tolist()}) == [0.0, 0.1]
    assert (S.sum(0) > 0).sum() == 60, "every record is in one of the images"
    assert len({tuple(image.flatten().tolist()) for image in S}) == 50


def test_shares_of_few_records_have_the_moments_of_draws():
    """Five records, ten draws with replacement: a share has mean 1/5 and variance 1/5 x 4/5 / 10 = 0.016."""
    x = torch.eye(6)[:5].reshape(5, 1, 2, 3)
    torch.manual_seed(0)
    (S,) = Records(x, torch.zeros(5, dtype=torch.long), B=64).start("average", 20_000, 10)
    shares = S.flatten(1)[:, :5]
    assert torch.allclose(shares.sum(1), torch.ones(20_000), atol=1e-5)
    assert shares.mean(0).tolist() == pytest.approx([0.2] * 5, abs=0.005)
    assert shares.var(0).tolist() == pytest.approx([0.016] * 5, rel=0.05)


@pytest.mark.parametrize("name", ["fedaf", "feddm"])
def test_a_class_of_one_record_is_not_published(name, tiny, tmp_path):
    """By default it is not condensed at all; with least = 1 it is, and no image that leaves is the record."""
    setting = tiny(name, rounds=1, partition="dirichlet:0.2", minimum=2)
    world = world_of(setting.model_dump_json())
    lonely = {(k, c) for k in range(3) for c, n in enumerate(world.members(k)[1].bincount(minlength=10)) if n == 1}
    assert lonely, "the partition has a class of one record"
    run(setting, out=tmp_path / "a")
    held = {(k, c) for k, e in sent(tmp_path / "a", "Condensed").items() for c in e["S"]}
    assert held
    assert not held & lonely

    again = tiny(name, rounds=1, partition="dirichlet:0.2", minimum=2, set={**find(name).quick, "least": 1})
    run(again, out=tmp_path / "b")
    for k, e in sent(tmp_path / "b", "Condensed").items():
        x, y = world.members(k)
        for c, S in e["S"].items():
            away = (S[:, None] - x[y == c][None]).square().mean((2, 3, 4)).sqrt().min()
            assert away > (0.2 if (k, c) in lonely else 0.01), f"client {k}, class {c}"


# --- equations 3, 4 and the batched pass -------------------------------------------------------------------------


def test_dm_by_hand():
    """Eq. 4: means (1, 2), (0, 0) against (0, 4), (3, 0): 1 + 4 + 9 = 14."""
    real, syn = torch.tensor([[1.0, 2], [0, 0]]), torch.tensor([[0.0, 4], [3, 0]])
    assert dm(real, syn).item() == 14
    assert dm(real, syn, "mean").item() == 7  # over two features


def trained_net(arch, shape=(1, 8, 8)):
    """A network whose batch norm has seen data: running statistics other than 0 and 1."""
    torch.manual_seed(1)
    net = models.build(arch, shape=shape, classes=10)
    net.train()
    for _ in range(3):
        net(torch.randn(32, *shape) * 2 + 1)
    return net.eval()


@pytest.mark.parametrize("arch", ["cnn", "cnn_bn", "convnet"])
def test_one_pass_over_all_classes_equals_the_loop(arch):
    """Loss and gradient of Eqs. 3-4 over classes of 1, 3 and 40 records, against a loop that knows no batching."""
    torch.manual_seed(0)
    f = trained_net(arch)
    y = torch.tensor([2] * 3 + [5] + [8] * 40)
    x = torch.rand(44, 1, 8, 8) * 2 - 1
    D = Records(x, y, B=64)
    S = D.start("average", 4, 3).requires_grad_()
    h = f.encode(S.flatten(0, 1)).unflatten(0, S.shape[:2])
    batched = dm(D.mean(in_chunks(f.encode, D.draw())), h.mean(1))
    (g,) = torch.autograd.grad(batched, S)

    loop = torch.zeros(())
    for i, c in enumerate((2, 5, 8)):
        loop = loop + (f.encode(x[y == c]).mean(0) - f.encode(S[i]).mean(0)).pow(2).sum()
    (g_loop,) = torch.autograd.grad(loop, S)
    assert batched.item() == pytest.approx(loop.item(), rel=1e-4)
    # The two sum in another order: some 1e-5 of the largest entry, with one set of kernels or another.
    assert torch.allclose(g, g_loop, rtol=1e-3, atol=1e-4 * g_loop.abs().max().item())
    assert g.abs().max() > 0


# --- equation 17 -------------------------------------------------------------------------------------------------


def test_resampling_never_accumulates():
    """Eq. 17 at gamma = 0.9: after 200 steps the weights are still 0.9 w + 0.1 w~ with |w~| within the bounds of a new
    layer. Read as a recursion they would be 0.9^200 w = 7e-10 w."""
    net = trained_net("cnn_bn")
    with torch.no_grad():
        for p in net.parameters():
            p.add_(3)  # far from any initialisation
    before = {name: t.clone() for name, t in net.state_dict().items()}
    sampled = Sampled(net)
    draws = []
    for _ in range(200):
        f = sampled.interpolate(0.9)
        draws.append(f.encoder.conv2.weight.clone())
    for name, module in f.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = 1 / math.sqrt(module.weight[0].numel())
            for kind in ("weight", "bias"):
                fresh = (getattr(module, kind) - 0.9 * before[f"{name}.{kind}"]) / 0.1
                assert fresh.abs().max() <= bound * (1 + 1e-3)
                assert fresh.abs().max() > bound * 0.5
    assert torch.allclose(f.encoder.bn1.weight, 0.9 * before["encoder.bn1.weight"] + 0.1)  # a fresh norm: 1 and 0
    assert torch.allclose(f.encoder.bn1.bias, 0.9 * before["encoder.bn1.bias"])
    assert torch.equal(f.encoder.bn1.running_mean, before["encoder.bn1.running_mean"])
    assert not torch.equal(draws[-1], draws[-2])
    middle = torch.stack(draws).mean(0)  # w~ has mean 0
    assert torch.allclose(middle, 0.9 * before["encoder.conv2.weight"], atol=0.01)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items()), "the received model is untouched"
    assert torch.allclose(sampled.interpolate(1.0).encoder.conv2.weight, before["encoder.conv2.weight"])


@pytest.mark.parametrize("arch", ["cnn", "cnn_bn", "convnet", "mlp"])
def test_fresh_weights_are_distributed_as_a_new_network(arch):
    """gamma = 0: each layer's largest weight and spread are those of models.build."""
    torch.manual_seed(0)
    new, f = models.build(arch, shape=(1, 8, 8), classes=10), Sampled(trained_net(arch)).interpolate(0.0)
    for (name, p), q in zip(new.named_parameters(), f.parameters(), strict=True):
        if p.numel() >= 100:
            assert q.std().item() == pytest.approx(p.std().item(), rel=0.25, abs=1e-7), name
            assert q.abs().max().item() == pytest.approx(p.abs().max().item(), rel=0.05), name


@pytest.mark.parametrize("last", [False, True])
def test_the_weights_order_in_memory_changes_no_number(last):
    """f at gamma = 1 is the received model, however its weights are stored, and still at other weights afterwards."""
    net = trained_net("cnn_bn")
    x = torch.randn(5, 1, 8, 8)
    sampled = Sampled(net, channels_last=last)
    assert sampled.f.encoder.conv2.weight.is_contiguous(memory_format=torch.channels_last) is last
    sampled.interpolate(0.5)
    with torch.no_grad():
        assert torch.allclose(sampled.interpolate(1.0)(x), net(x), atol=1e-5)
        assert not torch.allclose(sampled.interpolate(0.9)(x), net(x), atol=1e-2)


@pytest.mark.parametrize("arch", ["cnn_bn", "convnet"])
def test_how_batch_norm_behaves(arch):
    """Frozen: each row alone, the received statistics. Joint: the batch's, in one pass, as a network in training mode;
    the received statistics stay."""
    net = trained_net(arch)
    x = torch.randn(300, 1, 8, 8)  # more than one chunk
    frozen, joint = Sampled(net), Sampled(net, "joint")
    assert torch.allclose(frozen.real(x)[:2], net.encode(x[:2]), atol=1e-5)
    assert not torch.allclose(joint.real(x)[:2], joint.real(x[:2]), atol=1e-2)
    before = joint.f.encoder.bn1.running_mean.clone()
    together = copy.deepcopy(net).train().encode(x)
    assert torch.allclose(joint.real(x), together, atol=1e-5)
    assert torch.equal(joint.f.encoder.bn1.running_mean, before)
    assert not joint.real(x).requires_grad


def test_feddm_perturbs_to_the_surface_of_the_ball():
    net = trained_net("cnn")
    sampled = Sampled(net)
    w = torch.cat([p.flatten() for p in net.parameters()])
    moves = []
    for _ in range(3):
        f = sampled.perturb(5.0)
        moves.append(torch.cat([p.flatten() for p in f.parameters()]) - w)
        assert moves[-1].norm().item() == pytest.approx(5, rel=1e-4)
    assert abs(torch.nn.functional.cosine_similarity(moves[0], moves[1], dim=0)) < 0.1


# --- equations 5, 8, 10 ------------------------------------------------------------------------------------------


def test_means_are_over_the_clients_that_hold_the_class():
    """Eq. 8: class 0 is held by clients 0 and 2: ((1, 3) + (3, 5)) / 2 = (2, 4), not divided by K = 3; class 1 by 1."""
    V = {0: {0: torch.tensor([1.0, 3])}, 1: {1: torch.tensor([7.0, 8])}, 2: {0: torch.tensor([3.0, 5])}}
    mean = fedaf.mean_by_class(V)
    assert {c: v.tolist() for c, v in mean.items()} == {0: [2, 4], 1: [7, 8]}


def test_swd_against_scipy():
    """Both readings of F(u, v). Points: the projection of a point mass is a point mass, so SciPy gets one sample each
    and theta is drawn again from the same seed. Entries: SciPy gets the ten entries."""
    torch.manual_seed(3)
    u, v = torch.randn(4, 10), torch.randn(4, 10) + 1
    torch.manual_seed(7)
    ours = fedaf.swd_points(u, v, 20).mean(1)
    torch.manual_seed(7)
    theta = torch.randn(20, 10)
    theta /= theta.norm(dim=1, keepdim=True)
    for c in range(4):
        each = [wasserstein_distance([float(u[c] @ a)], [float(v[c] @ a)]) for a in theta]
        assert ours[c].item() == pytest.approx(np.mean(each), rel=1e-5)
        assert fedaf.swd_entries(u, v)[c].mean().item() == pytest.approx(wasserstein_distance(u[c], v[c]), rel=1e-5)


def test_swd_by_hand():
    """u - v = (3, 4), theta in the plane: the mean of 5 |cos| over directions is 10 / pi. As entries, (4, 1) and
    (0, 2) sort to (1, 4) and (0, 2): (1 + 2) / 2."""
    torch.manual_seed(0)
    value = fedaf.swd_points(torch.tensor([[3.0, 4]]), torch.zeros(1, 2), 200_000).mean().item()
    assert value == pytest.approx(10 / math.pi, rel=0.01)
    assert fedaf.swd_entries(torch.tensor([[4.0, 1]]), torch.tensor([[0.0, 2]])).mean().item() == 1.5


# --- equations 12-15 ---------------------------------------------------------------------------------------------

R = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
Z = torch.tensor([[2.0, 0], [0, 0], [-1, 0], [1, 0]])  # logits of four condensed images
Y = torch.tensor([0, 0, 1, 1])


def test_lgkm_by_hand():
    """Eq. 13: class 0 has the mean logits (1, 0), at tau = 0.5 that is (2, 0): t_0 = (q, 1 - q), q = e^2 / (1 + e^2).
    Class 1 has (0, 0): t_1 = (1/2, 1/2) = r_1, no divergence. Eq. 15 with r_0 = (3/4, 1/4) is half of
    3/4 ln(.75/q) + 1/4 ln(.25/(1-q)) + q ln(q/.75) + (1-q) ln((1-q)/.25)."""
    q = math.exp(2) / (1 + math.exp(2))
    forth = 0.75 * math.log(0.75 / q) + 0.25 * math.log(0.25 / (1 - q))
    back = q * math.log(q / 0.75) + (1 - q) * math.log((1 - q) / 0.25)
    value = fedaf.lgkm(Z, Y, R, torch.ones(2), 0.5)
    assert value.item() == pytest.approx(0.5 * (forth + back), rel=1e-5)
    # The softmax of the mean, not the mean of the softmaxes.
    wrong = (Z[:2] / 0.5).softmax(1).mean(0)
    assert abs(wrong[0].item() - q) > 0.05


def test_lgkm_counts_only_classes_with_images_and_soft_labels():
    """The divergence of class 0 alone: class 1 is unheld, or has no image in the batch, and r_1 far away."""
    far = torch.tensor([[0.75, 0.25], [0.99, 0.01]])
    alone = fedaf.lgkm(Z, Y, R, torch.ones(2), 1.0).item()
    assert fedaf.lgkm(Z, Y, far, torch.tensor([1.0, 0]), 1.0).item() == pytest.approx(alone)
    assert fedaf.lgkm(Z[:2], Y[:2], far, torch.ones(2), 1.0).item() == pytest.approx(alone)
    assert fedaf.lgkm(Z, Y, far, torch.ones(2), 1.0).item() > alone + 0.5


def test_lgkm_as_a_mean_over_the_classes():
    """Three classes, one of them without an image: half of the sum over the other two."""
    r = torch.tensor([[0.75, 0.2, 0.05], [0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    z = torch.cat([Z, torch.zeros(4, 1)], 1)
    total = fedaf.lgkm(z, Y, r, torch.ones(3), 1.0).item()
    assert total > 0.01
    assert fedaf.lgkm(z, Y, r, torch.ones(3), 1.0, "mean").item() == pytest.approx(total / 2)


def test_soft_targets_are_probabilities():
    """Eq. 12 after noise: (1.2, -0.3, 0.3) and (0.8, 0.3, 0.3) average to (1, 0, 0.3): (1, 1e-8, 0.3) / 1.3."""
    R_k = {0: {1: torch.tensor([1.2, -0.3, 0.3])}, 2: {1: torch.tensor([0.8, 0.3, 0.3])}}
    r, held = fedaf.FedAF().soft_targets(R_k, 3, torch.device("cpu"))
    assert held.tolist() == [0, 1, 0]
    assert r[1].tolist() == pytest.approx([1 / 1.3, 0, 0.3 / 1.3], abs=1e-6)
    assert r.sum(1).tolist() == pytest.approx([1, 1, 1])
    assert (r > 0).all()


def test_lgkm_has_a_gradient():
    """T depends on w: the gradient of lambda LGKM in the first layer is that of finite differences, and not 0."""
    torch.manual_seed(0)
    net = models.build("mlp", shape=(1, 2, 2), classes=2).double()
    x, y = torch.randn(4, 1, 2, 2, dtype=torch.double), Y
    given = {"S": (x, y), "r": R.double(), "held": torch.ones(2).double(), "tau": 2.0}
    weight = net.encoder.fc1.weight

    def lgkm_only():
        both = fedaf.l_glob(net, x, y, lambda_glob=3.0, **given).mean()
        return both - ce(net, x, y).mean()

    (g,) = torch.autograd.grad(lgkm_only(), weight)
    assert g.abs().max() > 1e-4
    at = divmod(int(g.abs().argmax()), g.shape[1])
    with torch.no_grad():
        step = 1e-5
        weight[at] += step
        up = lgkm_only().item()
        weight[at] -= 2 * step
        down = lgkm_only().item()
    assert (up - down) / (2 * step) == pytest.approx(g[at].item(), rel=1e-5)


def test_l_glob_by_hand():
    """Eq. 14 with f the identity on logits: rows of cross-entropy, each plus lambda LGKM over all images (S) or over
    the batch (S None). The batch is the two images of class 1: mean logits (0, 0) = r_1, so LGKM is 0 there."""
    identity = nn.Identity()
    given = {"r": R, "held": torch.ones(2), "tau": 1.0, "lambda_glob": 2.0}
    rows = ce(identity, Z[2:], Y[2:])
    assert rows.tolist() == pytest.approx([math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))])
    batch = fedaf.l_glob(identity, Z[2:], Y[2:], S=None, **given)
    assert batch.tolist() == pytest.approx(rows.tolist())
    every = fedaf.l_glob(identity, Z[2:], Y[2:], S=(Z, Y), **given)
    more = 2 * fedaf.lgkm(Z, Y, R, torch.ones(2), 1.0).item()
    assert more > 0.001
    assert (every - rows).tolist() == pytest.approx([more, more], rel=1e-4)


@pytest.mark.parametrize("loss", [fedaf.l_glob, seen_ce])
def test_a_mini_batch_on_the_server_goes_through_one_view(loss):
    """With aug_w: the loss of the images as the view drawn next makes them; without, of the images as they are. The
    images of Eq. 13 are not moved."""
    torch.manual_seed(0)
    f = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    x, y = torch.rand(4, 1, 6, 6) * 2 - 1, torch.tensor([0, 1, 1, 0])
    given = {} if loss is seen_ce else {"r": R, "held": torch.ones(2), "tau": 1.0, "lambda_glob": 2.0, "S": (x, y)}
    torch.manual_seed(3)
    moved = views("siamese", x)[0]
    assert (moved - x).abs().max() > 0.1
    torch.manual_seed(3)
    seen = loss(f, x, y, aug="siamese", **given)
    torch.testing.assert_close(seen, loss(f, moved, y, aug="none", **given))
    assert not torch.allclose(seen, loss(f, x, y, aug="none", **given))


# --- whole rounds ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One run of FedAF for several tests that only read it."""
    from fedaudit.setting import Setting

    folder = tmp_path_factory.mktemp("fedaf") / "run"
    torch.set_num_threads(1)
    setting = Setting.make(method="fedaf", rounds=2, clients=3, aux=0.1, set=dict(find("fedaf").quick), eval_every=2)
    return setting, folder, run(setting, out=folder)


def test_mean_logits_on_the_wire_are_equation_5_and_8_and_11(ran):
    """V_k of the transcript against a loop over classes at the model of the transcript; V its mean; R_k = softmax(V_k /
    tau)."""
    setting, folder, _ = ran
    world = world_of(setting.model_dump_json())
    logits, peers, condensed = (sent(folder, name) for name in ("MeanLogits", "Peers", "Condensed"))
    net = load(world.build("cnn"), sent(folder, "Global")[0]["w"])
    for k, entry in logits.items():
        x, y = world.members(k)
        V = entry["V"]
        assert sorted(V) == sorted(set(y.tolist())) == sorted(condensed[k]["S"])
        for c, v in V.items():
            with torch.no_grad():
                assert torch.allclose(v, net(x[y == c]).mean(0), atol=1e-5)
            assert torch.allclose(condensed[k]["R"][c], (v / 2.0).softmax(0))
    for c, v in peers[0]["V"].items():
        held = [entry["V"][c] for entry in logits.values() if c in entry["V"]]
        assert torch.allclose(v, sum(held) / len(held), atol=1e-6)


def test_images_travel_with_one_byte_a_channel(ran):
    """2 images a class of 8 x 8 grey, 1 byte each, and 8 bytes that name the class; on the grid of 256 levels."""
    _, folder, record = ran
    entries = [e for t in (1, 2) for e in sent(folder, "Condensed", t).values()]
    classes = sum(len(e["S"]) for e in entries)
    (row,) = (row for row in record.traffic if row.field == "Condensed.S")
    assert row.payload == classes * (2 * 8 * 8 * 1 + 8)
    for images in entries[0]["S"].values():
        levels = (images + 1) * 127.5
        assert (levels - levels.round()).abs().max() < 1e-3
        assert images.shape == (2, 1, 8, 8)


@pytest.mark.parametrize("name", ["fedaf", "feddm"])
def test_unclamped_images_travel_as_float32_and_are_billed_so(name, tiny, tmp_path):
    """2 images a class of 8 x 8 grey, 4 bytes each, and 8 bytes that name the class; some pixel is outside [-1, 1]."""
    setting = tiny(name, rounds=1, set={**find(name).quick, "clamp": "none", "eta_S": 500.0})
    record = run(setting, out=tmp_path / "a")
    entries = sent(tmp_path / "a", "CondensedFloats").values()
    (row,) = (row for row in record.traffic if row.field == "CondensedFloats.S")
    assert row.payload == sum(len(e["S"]) for e in entries) * (2 * 8 * 8 * 4 + 8)
    assert max(S.abs().max() for e in entries for S in e["S"].values()) > 1


@pytest.mark.parametrize("name", ["fedaf", "feddm"])
@pytest.mark.parametrize(
    ("preset", "deviation", "mean"),
    [
        ("authors", 2 * (0.2023 + 0.1994 + 0.2010) / 3, [2 * m - 1 for m in (0.4914, 0.4822, 0.4465)]),
        ("authors-cifar100", 2 * (0.2673 + 0.2564 + 0.2762) / 3, [2 * m - 1 for m in (0.5071, 0.4866, 0.4409)]),
        ("authors-fashion-mnist", 1.0, [0.0]),
    ],
)
def test_the_preset_authors_is_what_public_code_does(name, preset, deviation, mean):
    """Means and deviations in [0, 1], as that code has them, brought to [-1, 1]: 2 m - 1 and 2 s."""
    method = find(name).make({}, preset)
    assert method.sigma_x == method.aug_sigma == pytest.approx(deviation, abs=5e-4)
    assert list(method.aug_fill) == pytest.approx(mean, abs=5e-4)
    assert (method.clamp, method.aug, method.aug_w, method.least) == ("none", "siamese", "siamese-each", 50)


@pytest.mark.parametrize("name", ["fedaf", pytest.param("feddm", marks=pytest.mark.long)])
def test_condensing_and_training_augment_in_the_units_that_are_set(name, tiny, tmp_path):
    """The same seed and settings but for the fill: condensed images and the trained model both differ."""
    images, models_ = [], []
    for fill in ((-1.0,), (0.25,)):
        values = {"aug": "siamese", "aug_fill": fill, "eta_S": 500.0, "steps": 6}
        run(tiny(name, rounds=1, clients=2, set={**find(name).quick, **values}), out=tmp_path / f"c{fill[0]}")
        images.append(sent(tmp_path / f"c{fill[0]}", "Condensed")[0]["S"])
        values = {"aug_w": "siamese-each", "aug_fill": fill}
        run(tiny(name, clients=2, set={**find(name).quick, **values}), out=tmp_path / f"w{fill[0]}")
        models_.append(sent(tmp_path / f"w{fill[0]}", "Global", 2)[0]["w"])
    assert any(not torch.equal(S, images[1][c]) for c, S in images[0].items())
    assert any(not torch.equal(t, models_[1][n]) for n, t in models_[0].items())


def test_the_server_trains_on_what_it_received(tiny, tmp_path):
    """Round 2 sends the weights that training by hand on the images of round 1's transcript gives, to the bit."""
    setting = tiny("feddm")
    run(setting, out=tmp_path / "a")
    x, y = gathered({k: e["S"] for k, e in sent(tmp_path / "a", "Condensed").items()})
    net = world_of(setting.model_dump_json()).build("cnn")
    load(net, sent(tmp_path / "a", "Global", 1)[0]["w"])
    rng = generator(0, "server", 1, 0, "fit 1")
    fit(net, ce, (x, y), epochs=2, batch=16, opt=sgd(0.05, momentum=0.9), rng=rng)
    after = sent(tmp_path / "a", "Global", 2)[0]["w"]
    assert all(torch.equal(t, net.state_dict()[name]) for name, t in after.items())


@pytest.mark.parametrize(
    ("without", "gone"),
    [
        ({"lambda_loc": 0}, {"Peers.V"}),
        ({"lambda_glob": 0}, {"Condensed.R"}),
        ({"lambda_loc": 0, "lambda_glob": 0}, {"Peers.V", "Condensed.R", "MeanLogits.V"}),
        ({"lambda_loc": 0, "soft": "records"}, {"Peers.V", "MeanLogits.V"}),
    ],
)
def test_an_ablation_sends_only_what_it_needs(without, gone, tiny, tmp_path):
    setting = tiny("fedaf", rounds=1, set={**find("fedaf").quick, **without})
    record = run(setting, out=tmp_path / "a")
    empty = {row.field for row in record.traffic if not row.payload and not row.field.endswith("(frame)")}
    assert empty == gone


@pytest.mark.long
def test_soft_labels_are_free_from_released_means_and_charged_from_records(tiny, tmp_path):
    """Noise on the logits: R_k follows from the noisy V_k that left, and its entry is post-processing. Means of the
    records' own soft labels are another message, with an entry of their own."""
    noisy = {"logits": {"noise_multiplier": 5.0}}
    record = run(tiny("fedaf", rounds=1, privacy=noisy), out=tmp_path / "a")
    logits, condensed = sent(tmp_path / "a", "MeanLogits"), sent(tmp_path / "a", "Condensed")
    for k, entry in condensed.items():
        assert all(torch.equal(r, (logits[k]["V"][c] / 2.0).softmax(0)) for c, r in entry["R"].items())
    assert next(r for r in record.releases if r.field == "Condensed.R").via == "released"

    again = tiny("fedaf", rounds=1, set={**find("fedaf").quick, "soft": "records"})
    record = run(again, out=tmp_path / "b")
    assert next(r for r in record.releases if r.field == "CondensedAnew.R").via == "data"
    check_declarations(again)
    world = world_of(again.model_dump_json())
    net = load(world.build("cnn"), sent(tmp_path / "b", "Global")[0]["w"])
    x, y = world.members(0)
    for c, r in sent(tmp_path / "b", "CondensedAnew")[0]["R"].items():
        with torch.no_grad():
            assert torch.allclose(r, (net(x[y == c]) / 2.0).softmax(1).mean(0), atol=1e-6)


@pytest.mark.long
def test_released_soft_labels_may_not_follow_the_records(tiny):
    assert {"Condensed.R"} <= check_declarations(tiny("fedaf", rounds=1)).compared


def test_images_with_noise_still_fit_into_8_bits(tiny, tmp_path):
    noisy = {"synthetic_images": {"noise_multiplier": 0.001}}
    record = run(tiny("feddm", rounds=1, privacy=noisy), out=tmp_path / "a")
    assert not record.rounds[0].absent
    assert all(S.abs().max() <= 1 for e in sent(tmp_path / "a", "Condensed").values() for S in e["S"].values())


@pytest.mark.parametrize("method", [fedaf.FedAF(steps=20, IPC=5, eta_S=5.0), feddm.FedDM(steps=60, IPC=5)])
def test_condensation_brings_the_means_together(method, tiny):
    """The distance of Eq. 4 at the received weights falls to less than a half of that at the start (noise)."""
    client = client_of(tiny("fedaf"))
    method = method.model_copy(update={"start": "noise"})
    D = Records(client.x, client.y, 1000)
    torch.manual_seed(0)
    begun = D.start("noise", 5, 1)
    torch.manual_seed(0)
    if isinstance(method, fedaf.FedAF):
        V = client.class_means(in_chunks(client.model, D.x), "logits", D.y)
        ended = torch.stack(list(method.condensed(client, D, V).values()))
    else:
        from fedaudit import state_of

        ended = torch.stack(list(method.condense(client, feddm.Global(state_of(client.model))).S.values()))

    def distance(S):
        f = client.model.eval()
        syn = in_chunks(f.encode, S.flatten(0, 1)).unflatten(0, S.shape[:2]).mean(1)
        return dm(D.mean(in_chunks(f.encode, D.x)), syn).item()

    assert distance(ended) < 0.5 * distance(begun)
    assert ended.abs().max() <= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("name", ["fedaf", "feddm"])
def test_on_a_gpu_nothing_waits_and_bits_repeat(name, tiny, tmp_path, monkeypatch):
    """The recorded step: no host synchronisation inside `optimise`, and the same run twice gives the same bits."""
    from fedaudit.runtime.party import Party

    optimise = Party.optimise

    def watched(self, *args, **options):
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimise(self, *args, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Party, "optimise", watched)
    steps = {**find(name).quick, "steps": 20, "B": 4}
    setting = tiny(name, device="cuda", model="cnn_bn", engine="serial", set=steps)
    a, b = (run(setting, out=tmp_path / part) for part in "ab")
    assert a.transcript_digest == b.transcript_digest
    assert not a.rounds[0].absent


class OneGradient:
    """As much of a client as condensation needs; it takes one gradient and no step."""

    def __init__(self, model):
        self.model, self.memory = model, {}

    def optimise(self, params, closure, *, steps, opt, **how):
        torch.manual_seed(1)  # the same directions for all
        closure().backward()
        self.gradient = params[0].grad.clone()


@pytest.mark.long
def test_share_of_cdc_in_the_gradient(tiny):
    """lambda_loc |grad F| / |grad DM| at the images' start, at Fashion-MNIST's published weight, for each pair of
    scales. As read by default CDC moves an image by less than a hundredth of what Eq. 4 does; the sum over the
    projections is L = 50 times that, and Eq. 4 as a mean over the 128 x 3 x 3 = 1,152 features 1,152 times."""
    torch.manual_seed(0)
    f = trained_net("convnet", (1, 28, 28))
    x, y = torch.rand(60, 1, 28, 28) * 2 - 1, torch.arange(60) % 3
    D = Records(x, y, B=64)
    V = torch.stack([f(x[y == c]).mean(0).detach() for c in range(3)]) + 0.5  # peers who differ
    size = {}
    for method in [
        fedaf.FedAF.make({"swd_scale": a, "dm_scale": b, "gamma": 1.0, "IPC": 4, "lambda_loc": weight})
        for a in ("mean", "sum")
        for b in ("sum", "mean")
        for weight in (0.0, 0.001)
    ]:
        client = OneGradient(f)
        torch.manual_seed(0)
        method.condensed(client, D, dict(enumerate(V)) if method.lambda_loc else {})
        size[method.swd_scale, method.dm_scale, method.lambda_loc] = client.gradient
    share = {
        (a, b): ((size[a, b, 0.001] - size[a, b, 0.0]).norm() / size[a, b, 0.0].norm()).item()
        for a in ("mean", "sum")
        for b in ("sum", "mean")
    }
    assert 0 < share["mean", "sum"] < 0.01
    assert share["sum", "sum"] == pytest.approx(50 * share["mean", "sum"], rel=0.05)
    assert share["mean", "mean"] == pytest.approx(1152 * share["mean", "sum"], rel=0.05)


def test_cdc_pulls_mean_logits_to_the_peers(tiny):
    """Eq. 10: with a large lambda_loc the condensed images' mean logits end nearer to V than without, where V is far
    from the client's own. (A classifier of larger weights than a new one's, so that images can move logits.)"""
    client = client_of(tiny("fedaf"))
    client.model.classifier.weight.data.mul_(10)
    D = Records(client.x, client.y, 64)
    own = client.class_means(in_chunks(client.model, D.x), "logits", D.y)
    V = {c: v + torch.linspace(-0.5, 0.5, 10) for c, v in own.items()}

    def gap(lambda_loc):
        torch.manual_seed(0)
        method = fedaf.FedAF(steps=20, IPC=4, eta_S=5.0, gamma=1.0, lambda_loc=lambda_loc)
        S = torch.stack(list(method.condensed(client, D, V if lambda_loc else {}).values()))
        u = in_chunks(client.model, S.flatten(0, 1)).unflatten(0, S.shape[:2]).mean(1)
        return (u - torch.stack(list(V.values()))).abs().mean().item()

    assert gap(1.0) < 0.8 * gap(0)


def test_a_class_that_nobody_sent_has_no_part_in_cdc():
    """Whether a client answers must not tell which classes it holds. Without v_1 the images of class 1 move as without
    CDC, those of 0 and 2 as with all of V; without any of V all move as without CDC."""
    torch.manual_seed(0)
    f = trained_net("convnet", (1, 28, 28))
    x, y = torch.rand(60, 1, 28, 28) * 2 - 1, torch.arange(60) % 3
    D = Records(x, y, B=64)
    V = {c: f(x[y == c]).mean(0).detach() + 0.5 for c in range(3)}
    method = fedaf.FedAF.make({"gamma": 1.0, "IPC": 4, "lambda_loc": 10.0, "swd": "entries"})

    def moved(V):
        client = OneGradient(f)
        torch.manual_seed(0)
        method.condensed(client, D, V)
        return client.gradient

    plain, whole, part = moved({}), moved(V), moved({c: V[c] for c in (0, 2)})
    assert not torch.allclose(plain, whole, rtol=1e-3)
    assert torch.allclose(part[1], plain[1], rtol=1e-4, atol=1e-7)
    assert torch.allclose(part[[0, 2]], whole[[0, 2]], rtol=1e-4, atol=1e-7)
    assert torch.equal(moved({7: V[0]}), plain)


def test_feddm_clips_the_gradient_of_the_images(tiny):
    """One step at learning rate 1 moves the images by at most the clipping norm, 2 or 1e-3."""
    from fedaudit import state_of

    client = client_of(tiny("feddm"))
    message = feddm.Global(state_of(client.model))
    D = Records(client.x, client.y, 256)
    moves = []
    for clip in (2.0, 1e-3, 1e3, 1e6):
        torch.manual_seed(0)
        begun = D.start("average", 4, 10)
        torch.manual_seed(0)
        S = feddm.FedDM(steps=1, IPC=4, clip=clip, restart=True).condense(client, message).S
        moves.append((torch.stack(list(S.values())) - begun).norm().item())
    assert 5e-3 < moves[0] <= 2
    assert 0.5e-3 < moves[1] <= 1.001e-3  # less than the norm, because pixels stop at the edge of [-1, 1]
    assert moves[2] == moves[3], "a gradient that is shorter stays as it is"


@pytest.mark.long
def test_images_may_go_on_where_the_last_round_ended(tiny, tmp_path):
    """restart=False and no step of condensation: round 2 sends what round 1 sent; restart=True draws other averages."""
    for restart, same in ((False, True), (True, False)):
        setting = tiny("fedaf", set={**find("fedaf").quick, "steps": 0, "restart": restart})
        folder = tmp_path / str(restart)
        run(setting, out=folder)
        first, second = sent(folder, "Condensed", 1)[0]["S"], sent(folder, "Condensed", 2)[0]["S"]
        assert all(torch.equal(S, second[c]) for c, S in first.items()) == same


def test_images_that_run_away_are_an_error_that_names_the_remedy(tiny):
    """A rate far too large: at clamp=end each step goes further out; clamp=step holds them, with the same rate."""
    client = client_of(tiny("fedaf", model="cnn"))
    D = Records(client.x, client.y, 1000)
    wild = fedaf.FedAF(steps=30, IPC=2, eta_S=1e12, sigma_x=0.5, lambda_loc=0)
    said = r"client 0 are not finite after 30 steps.* of 1000000000000.0 in units of sigma_x = 0.5 .*"
    with pytest.raises(SettingError, match=said + r"Set sigma_x=.* or eta_S=\.\.\. lower, or clamp=step"):
        wild.condensed(client, D, {})
    held = wild.model_copy(update={"clamp": "step"}).condensed(client, D, {})
    assert all(S.isfinite().all() for S in held.values())


@pytest.mark.parametrize(("sigma_x", "runs_away"), [(1.0, True), (0.402, False)])
def test_a_rate_that_is_too_long_for_pixels_is_not_for_their_deviations(tiny, sigma_x, runs_away):
    """One class, one image, features a x of pixels x: Eq. 4 is a^2 |x - mean|^2, with a curvature of 2 a^2. Steps with
    a momentum of 0.9 stay bounded up to a curvature of 2 (1 + 0.9) / (eta_S sigma_x^2): 3.8 at a rate of 1 in pixels
    of [-1, 1], 23.5 in units of 0.402. A curvature of 12 lies between the two."""

    class Times(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.tensor(math.sqrt(6)))

        def forward(self, x):
            return self.a * x.flatten(1)

    client = client_of(tiny("fedaf"))
    client.model = models.Net(Times(), nn.Linear(64, 10), width=64, arch="times")
    D = Records(client.x[client.y == 3], client.y[client.y == 3], 1000)
    method = fedaf.FedAF(steps=300, IPC=1, sigma_x=sigma_x, lambda_loc=0, gamma=1.0)
    if runs_away:
        with pytest.raises(SettingError, match="are not finite after 300 steps"):
            method.condensed(client, D, {})
    else:
        assert torch.allclose(method.condensed(client, D, {})[3][0], D.x.mean(0), atol=1e-4)


def test_one_domain_per_client(tiny, tmp_path):
    """Feature skew: three domains of digits (as they are, inverted, mirrored), each held by one client."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images * 255 / 16).astype(np.uint8)[:600, None]
    y = digits.target[:600]
    domain = np.arange(600) % 3
    x[domain == 1] = 255 - x[domain == 1]
    x[domain == 2] = x[domain == 2][..., ::-1]
    np.savez(tmp_path / "d.npz", x=x, y=y, test_x=x[:50], test_y=y[:50], domain=domain)
    setting = tiny("fedaf", dataset=f"npz:{tmp_path / 'd.npz'}", partition="domain", rounds=1, aux=0.1)
    run(setting, out=tmp_path / "a")
    brightness = [
        torch.stack(list(e["S"].values())).mean().item() for _, e in sorted(sent(tmp_path / "a", "Condensed").items())
    ]
    assert all(len(e["S"]) == 10 for e in sent(tmp_path / "a", "Condensed").values())
    assert brightness[1] > 0.2 > 0 > brightness[0]


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10", "cifar100", "domainnet"])
def test_presets_are_the_published_settings(name):
    """Section 5.1 and Appendix A."""
    rates = {"fashion-mnist": 0.2, "cifar10": 1.0, "cifar100": 0.1, "domainnet": 1.0}
    weights = {
        "fashion-mnist": (0.001, 2.0),
        "cifar10": (1e-4, 0.01),
        "cifar100": (1e-4, 0.01),
        "domainnet": (0.01, 0.1),
    }
    a, b = fedaf.FedAF.make({}, name), feddm.FedDM.make({}, name)
    assert (a.eta_S, (a.lambda_loc, a.lambda_glob), a.gamma) == (rates[name], weights[name], 0.9)
    for method in (a, b):
        assert (method.steps, method.B, method.E, method.B_w, method.eta_w) == (1000, 256, 500, 256, 0.001)
        assert (method.IPC == 20) == (name == "domainnet")
        assert method.IPC in (20, 50)
    assert (b.rho, b.clip, b.eta_S) == (5, 2, 1)


def test_a_class_of_one_image_has_the_logits_of_that_image():
    """Two images of class 0, one of class 2, none of class 1, and nobody holds class 3: Eq. 13 is a mean over a class's
    own images, and Eq. 15 counts classes 0 and 2 alone; divided, by two."""
    z = torch.tensor([[1.0, 0.0, 2.0, 0.0], [3.0, 1.0, 0.0, 0.0], [0.0, 0.5, 2.5, 1.0]])
    r = torch.softmax(torch.arange(16.0).view(4, 4) / 5, 1)
    held = torch.tensor([1.0, 1.0, 1.0, 0.0])
    wanted = 0.0
    for c, mean in ((0, (z[0] + z[1]) / 2), (2, z[2])):
        p, q = r[c], torch.softmax(mean / 2.0, 0)
        wanted += 0.5 * float((p * (p / q).log()).sum() + (q * (q / p).log()).sum())
    y = torch.tensor([0, 0, 2])
    assert float(fedaf.lgkm(z, y, r, held, 2.0)) == pytest.approx(wanted, abs=1e-6)
    assert float(fedaf.lgkm(z, y, r, held, 2.0, "mean")) == pytest.approx(wanted / 2, abs=1e-6)
    first = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert torch.allclose(fedaf.lgkm(z, y, r, first, 2.0, "mean"), fedaf.lgkm(z, y, r, first, 2.0)), "one class"
    assert float(fedaf.lgkm(z, y, r, torch.zeros(4), 2.0, "mean")) == 0
