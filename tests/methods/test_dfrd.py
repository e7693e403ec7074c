"""DFRD, FedFTG, DENSE and FedZKT: every loss by hand, and composition with hosts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from precision import close
from safetensors.torch import load_file
from torch import nn

from fedaudit import Setting, State, adam, registry, run, sgd, state_of
from fedaudit.errors import SettingError
from fedaudit.methods.datafree._datafree import Generators, take_turns
from fedaudit.methods.datafree._generator import (
    Generator,
    Sampler,
    diversity,
    dynamic_weights,
    epsilon,
    label_distribution,
    weighted,
)  # fmt: skip
from fedaudit.methods.datafree._host import Alone
from fedaudit.methods.datafree.dense import L_div, Norms
from fedaudit.methods.datafree.dfrd import DFRD, L_fid, L_gen, L_kl, L_tran, ema
from fedaudit.methods.datafree.fedftg import FedFTG, L_cls, L_md
from fedaudit.methods.datafree.fedzkt import L_SL, local_loss
from fedaudit.training.fit import moments_of
from fedaudit.wire.transcript import Transcript

LN3 = math.log(3)
KL_TS = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)  # KL[(3/4, 1/4) || (1/2, 1/2)]
KL_ST = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)  # KL[(1/2, 1/2) || (3/4, 1/4)]


# --- Eqs. 2-7 -------------------------------------------------------------------------------------------------------


class Says(nn.Module):
    """A teacher with the same logits for whatever it is shown."""

    def __init__(self, *logits):
        super().__init__()
        self.logits = torch.tensor(logits)

    def forward(self, s):
        return self.logits.expand(len(s), -1)


def test_weights_and_labels_from_counts():
    """n = ((3, 0, 0), (1, 4, 0)): class 0 is held 3 : 1, class 1 by client 1 alone, class 2 by nobody.
    p(y) = (4, 4, 0) / 8."""
    n = torch.tensor([[3.0, 0, 0], [1.0, 4, 0]])
    assert dynamic_weights(n).tolist() == [[0.75, 0, 0], [0.25, 1, 0]]
    assert label_distribution(n).tolist() == [0.5, 0.5, 0]
    assert label_distribution(torch.zeros(2, 4)).tolist() == [0.25] * 4  # noise took everything: nothing is known


def test_labels_are_drawn_as_the_distribution_says():
    draw = Sampler(torch.tensor([0.0, 0.75, 0.0, 0.25]), 3, 4000, torch.Generator().manual_seed(1))
    z, y = draw()
    counts = torch.bincount(y, minlength=4)
    assert z.shape == (4000, 3)
    assert counts[0] == counts[2] == 0
    assert abs(counts[1] / 4000 - 0.75) < 0.03  # 4 standard deviations


def test_fidelity_by_hand():
    """Eq. 2. Teachers say (2 ln 3, 0) and (0, 2 ln 3); tau_{.,0} = (3/4, 1/4), tau_{.,1} = (1/4, 3/4). For y = 0 the
    ensemble is (3/2 ln 3, 1/2 ln 3), whose softmax is (3/4, 1/4): the loss is -ln 3/4. For y = 1 the mirror image."""
    tau = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
    y = torch.tensor([0, 1])
    ensemble = weighted([Says(2 * LN3, 0.0), Says(0.0, 2 * LN3)], tau)(torch.zeros(2, 1), y)
    assert ensemble.flatten().tolist() == pytest.approx([1.5 * LN3, 0.5 * LN3, 0.5 * LN3, 1.5 * LN3])
    assert L_fid(ensemble, y).tolist() == pytest.approx([-math.log(0.75)] * 2, abs=1e-6)


def test_tau_tells_the_ensemble_a_label_that_no_image_shows():
    """Three teachers that hold one class each and say it of whatever they are shown. Weighted by tau they are right
    about the label of every image, so fidelity asks nothing of the generator, and f is taught labels that the images
    do not show. All alike, they say the same of every image: one has to show its label."""
    teachers = [Says(*row) for row in (2.0 * torch.eye(3)).tolist()]
    y = torch.arange(3).repeat(4)
    noise = torch.zeros(12, 1)
    n = torch.diag(torch.tensor([5.0, 7, 9]))  # label counts
    assert (weighted(teachers, dynamic_weights(n))(noise, y).argmax(1) == y).all()
    alike = weighted(teachers, dynamic_weights(torch.ones_like(n)))(noise, y)
    assert close(alike, alike[:1].expand_as(alike), terms=3), "nothing of y is in it"


# Four kinds of samples, y = 0 throughout: (teacher right, student wrong), both right, teacher wrong and student right,
# both wrong in different ways.
TEACHER = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0]])
STUDENT = torch.tensor([[0.0, 1, 0], [2, 0, 0], [1, 0, 0], [0, 0, 1]])


@pytest.mark.parametrize(
    ("mask", "counts"),
    [("dfrd", [1, 0, 0, 0]), ("fedftg", [1, 1, 1, 1]), ("dense", [1, 0, 1, 1]), ("one-right", [1, 0, 1, 0])],
)
def test_the_three_masks(mask, counts):
    """Fig. 2: black circles (row 1), red (2), yellow (3), purple (4). Only this paper's mask takes black alone."""
    assert epsilon(mask, STUDENT, TEACHER, torch.zeros(4, dtype=torch.int64)).tolist() == counts


def test_transferability_by_hand():
    """Eq. 3 with the teacher first: teacher (3/4, 1/4), student (1/2, 1/2). argmax of equal logits is class 0, so for
    y = 0 the student is right (0); swap the classes and it is wrong: -KL[(1/4, 3/4) || (1/2, 1/2)]."""
    student = torch.zeros(1, 2)
    assert L_tran(torch.tensor([[LN3, 0.0]]), student, torch.tensor([0])).item() == 0
    assert L_tran(torch.tensor([[0.0, LN3]]), student, torch.tensor([1])).item() == pytest.approx(-KL_TS, abs=1e-6)
    every = L_tran(torch.tensor([[LN3, 0.0]]), student, torch.tensor([0]), mask="fedftg")
    assert every.item() == pytest.approx(-KL_TS, abs=1e-6)


def test_diversity_by_hand():
    """Eq. 4. s_0 = (0, 0), s_1 = (3, 4): 5 apart; h: 0 and 2: 2 apart. The sum over ordered pairs is 2 * 10, over
    B^2 = 4: exp(-5). By mean differences, as is the default: images 3.5 apart, absolutely, inputs 4, squared: the mean
    over ordered pairs is 2 * 14 / 4. A second input that is 4 away as well halves nothing: (2^2 + 4^2) / 2 = 10, so
    2 * 35 / 4. Equal rows: exp(0)."""
    s, h = torch.tensor([[0.0, 0], [3, 4]]).view(2, 1, 1, 2), torch.tensor([[0.0], [2.0]])
    assert diversity(s, h, "l2").item() == pytest.approx(math.exp(-5))
    assert diversity(s + 5000, h, "l2").item() == pytest.approx(math.exp(-5)), "by differences, not by products"
    assert diversity(s, h).item() == pytest.approx(math.exp(-7))
    assert diversity(s / 5, h, "ms").item() == pytest.approx(math.exp(-1)), "0.5 and 4"
    wide = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    assert diversity(s, wide).item() == pytest.approx(math.exp(-17.5))
    same = torch.ones(3, 4, requires_grad=True)
    for metric in ("l2", "mean", "ms"):
        value = diversity(same, torch.randn(3, 2), metric)
        assert value.item() == 1
        value.backward()
        assert torch.isfinite(same.grad).all()


def test_the_generators_objective_by_hand():
    """Eq. 5 on one black circle and s, h as above is no batch; so two rows: y = 1, teacher (1/4, 3/4), student
    (1/2, 1/2), twice. L_fid = -ln 3/4, L_tran = -KL_TS, L_div = exp(-5); weights 2 and 3."""
    y, teacher, student = torch.tensor([1, 1]), torch.tensor([[0.0, LN3]] * 2), torch.zeros(2, 2)
    s, h = torch.tensor([[0.0, 0], [3, 4]]), torch.tensor([[0.0], [2.0]])
    value = L_gen(teacher, student, y, s, h, beta_tran=2.0, beta_div=3.0, metric="l2")
    assert value.item() == pytest.approx(-math.log(0.75) - 2 * KL_TS + 3 * math.exp(-5), abs=1e-6)


def test_the_average_generator_by_hand():
    """Eq. 6, lambda = 1/4: 0.25 * 4 + 0.75 * 8 = 7. Before round 1 there is none, and the first average is w^1 itself,
    not 0.75 w^1. Counters are not averaged."""
    first = State({"a": torch.tensor([4.0]), "n": torch.tensor(3)}, buffers=["n"])
    then = State({"a": torch.tensor([8.0]), "n": torch.tensor(4)}, buffers=["n"])
    assert ema(None, first, 0.25)["a"].item() == 4
    mixed = ema(first, then, 0.25)
    assert mixed["a"].item() == 7
    assert mixed["n"].item() == 4
    assert mixed.buffers == {"n"}


def test_robust_distillation_by_hand():
    """Eq. 7 as it was run has the teacher first: KL[(3/4, 1/4) || (1/2, 1/2)]; as printed it is the other one. At
    T = 2 a teacher of twice the logits says the same."""
    student, teacher = torch.zeros(2, 2), torch.tensor([[LN3, 0.0]] * 2)
    assert L_kl(student, teacher).item() == pytest.approx(KL_TS, abs=1e-6)
    assert L_kl(student, teacher, "student-teacher").item() == pytest.approx(KL_ST, abs=1e-6)
    assert L_kl(student, 2 * teacher, T=2.0).item() == pytest.approx(KL_TS, abs=1e-6)


class Desk:
    """As much of a server as a distillation needs; notes the value of every closure."""

    shape, classes, device = (1, 8, 8), 3, torch.device("cpu")

    def __init__(self):
        self.values = []

    def rng(self, purpose):
        return torch.Generator().manual_seed(1)

    def optimise(self, params, closure, *, steps, opt, moments=None, before=None, **how):
        optimiser = opt.build(params, moments)
        for i in range(steps):
            if before is not None:
                before(i)
            optimiser.zero_grad()
            value = closure()
            value.backward()
            optimiser.step()
            self.values.append(value.item())
        return moments_of(optimiser)


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Parameter(torch.zeros(3))

    def forward(self, s):
        return self.b.expand(len(s), -1)


def distilled(method, rounds, **student):
    torch.manual_seed(0)
    desk, f = Desk(), Student()
    teachers = [Says(LN3, 0.0, 0.0), Says(LN3, 0.0, 0.0)]
    nets = Generators(state_of(method.generator(desk)))
    trail = []
    for _ in range(rounds):
        nets, _ = method.distil(desk, f, teachers, torch.tensor([[1.0, 0, 0], [3.0, 0, 0]]), nets)
        trail.append(nets)
    return desk, f, trail


def test_averaged_data_enters_from_the_second_round_with_weight_alpha():
    """Teachers and student ignore what they are shown, so both terms of Eq. 7 have the same value, whatever G makes:
    v in round 1, (1 + alpha) v in round 2, where v = KL[(3, 1, 1) / 5 || uniform]. The student's rate is 0."""
    tiny = {"I": 1, "I_g": 0, "I_d": 1, "d": 4, "width": 4, "B": 4, "eta_d": 0.0}
    v = math.log(3) + (3 * math.log(3 / 5) + 2 * math.log(1 / 5)) / 5
    desk, _, _ = distilled(DFRD(alpha=0.5, **tiny), 2)
    assert desk.values == pytest.approx([v, 1.5 * v], abs=1e-6)
    desk, _, _ = distilled(DFRD(alpha=0.0, **tiny), 2)
    assert desk.values == pytest.approx([v, v], abs=1e-6)


def test_the_average_follows_the_generator_round_by_round():
    """w~^1 = w^1, w~^2 = w^1 / 2 + w^2 / 2, and the generators of two rounds differ."""
    method = DFRD(I=1, I_g=1, I_d=1, d=4, width=4, B=8)
    _, f, (one, two) = distilled(method, 2)
    name = "project.weight"
    assert torch.equal(one.average[name], one.G[name])
    assert not torch.equal(one.G[name], two.G[name])
    torch.testing.assert_close(two.average[name], (one.G[name] + two.G[name]) / 2)
    assert f.b[0] > 0  # towards the teachers' class


def test_an_optimiser_lasts_over_turns_and_rounds():
    """Momentum 1, rate 1, gradient 1: the second step moves by 2, because it remembers the first, and so on; whether it
    is in the same round or the next."""
    p = nn.Linear(1, 1, bias=False)
    p.weight.data.zero_()
    other, desk, moments = nn.Linear(1, 1), Desk(), ({}, {})
    for turns, expected in ((1, -1.0), (1, -3.0), (2, -10.0)):  # then by 3 and 4
        moments = take_turns(
            desk, other, p, lambda: other.weight.sum(), lambda: p.weight.sum(), turns=turns, steps=(0, 1),
            opts=(sgd(1.0), sgd(1.0, momentum=1.0)), moments=moments,
        )  # fmt: skip
        assert p.weight.item() == expected


def test_the_global_model_stands_still_while_the_generator_trains():
    """Fixed statistics and no gradients in the generator's steps, batch statistics and gradients in its own."""
    G, f, seen = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), []

    def step(net):
        seen.append((f.training, f[0].weight.requires_grad))
        return net(torch.randn(4, 1)).sum()

    opts = sgd(0.1), sgd(0.1)
    take_turns(Desk(), G, f, lambda: step(G), lambda: step(f), turns=2, steps=(2, 1), opts=opts)
    assert seen == [(False, False), (False, False), (True, True)] * 2


@pytest.mark.parametrize(
    ("merge", "h"),
    [
        ("mul", [6.0, 20.0]),
        ("add", [5.0, 9.0]),
        ("cat", [2.0, 4, 3, 5]),
        ("ncat", [2.0, 4, 0, 1, 0]),
        ("none", [2.0, 4]),
    ],
)
def test_merge_operators(merge, h):
    """z = (2, 4), E(1) = (3, 5), y = 1 of three classes. Images are in [-1, 1], of any side."""
    G = Generator(merge, 2, (2, 9, 7), 3, 4)
    if G.E is not None:
        G.E.weight.data[1] = torch.tensor([3.0, 5.0])
    z, y = torch.tensor([[2.0, 4.0]] * 2), torch.tensor([1, 1])
    assert G.h(z, y)[0].tolist() == h
    s = G(G.h(z, y))
    assert s.shape == (2, 2, 9, 7)
    assert s.abs().max() <= 1


# --- the rivals -----------------------------------------------------------------------------------------------------


def test_fedftg_by_hand():
    """Client 0 says (3/4, 1/4), client 1 (1/4, 3/4), alpha_{.,0} = (0.6, 0.4), the student (1/2, 1/2), y = 0.
    L_cls = -0.6 ln 3/4 - 0.4 ln 1/4; L_md = KL_TS whatever the weights, by symmetry, while the KL of the averaged
    logits would be less: teachers are compared one by one."""
    logits = torch.tensor([[[LN3, 0.0]], [[0.0, LN3]]])
    alpha, y = torch.tensor([[0.6, 0.5], [0.4, 0.5]]), torch.tensor([0])
    assert L_cls(logits, alpha, y).item() == pytest.approx(-0.6 * math.log(0.75) - 0.4 * math.log(0.25), abs=1e-6)
    assert L_md(logits, torch.zeros(1, 2), alpha, y).item() == pytest.approx(KL_TS, abs=1e-6)
    assert -L_tran((alpha[:, y, None] * logits).sum(0), torch.zeros(1, 2), y, "fedftg") < 0.1 * KL_TS


def test_fedftg_the_two_play_against_each_other():
    """Teachers and student ignore what they are shown: the generator's loss is L_cls - L_md + L_dis, the student's
    L_md. n is on class 0: L_cls = -ln 3/5, L_md = KL[(3, 1, 1) / 5 || uniform]; L_dis has no weight here."""
    method = FedFTG(I=1, I_g=1, I_d=1, d=4, width=4, B=4, eta_d=0.0, lambda_dis=0.0)
    desk, _, _ = distilled(method, 1)
    md = 0.6 * math.log(1.8) + 0.4 * math.log(0.6)
    assert desk.values[1] == pytest.approx(md, abs=1e-6)
    assert desk.values[0] == pytest.approx(-math.log(0.6) - md, abs=1e-6)


def test_dense_by_hand():
    """L_div counts where the two disagree: row 1 of two. L_BN: a batch of two images of one channel with mean 1 and
    variance 4 (as 3, 3, -1, -1) against the running mean 0 and variance 1: |1 - 0| + |4 - 1| = 4, and half of that
    over two teachers of which one has no batch norm. Heard once, then forgotten."""
    teacher, student = torch.tensor([[0.0, LN3], [LN3, 0.0]]), torch.zeros(2, 2)
    y = torch.tensor([0, 1])
    assert L_div(teacher, student, y).tolist() == pytest.approx([-KL_TS, 0], abs=1e-6)
    assert L_div(teacher, student, y.flip(0), rows="counted").tolist() == pytest.approx([-2 * KL_TS, 0], abs=1e-6)
    normed = nn.BatchNorm2d(1).eval()
    norms = Norms([normed, Says(0.0)])
    normed(torch.tensor([3.0, 3, -1, -1]).view(2, 1, 1, 2))
    assert norms.L_BN().item() == pytest.approx(2.0)
    assert norms.L_BN() == 0


def test_fedzkt_by_hand():
    """|3/4 - 1/2| + |1/4 - 1/2| = 1/2. On the device: ln 2 for equal logits, and mu / 2 * (1 + 4) for parameters that
    are 1 and 2 away from what was received, mu = 0.2."""
    assert L_SL(torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])).item() == 0.5

    class f:
        params = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}  # noqa: RUF012

        def __call__(self, x):
            return torch.zeros(len(x), 2)

    received = {"a": torch.zeros(1), "b": torch.zeros(1)}
    loss = local_loss(f(), torch.zeros(3, 1), torch.tensor([0, 1, 0]), received, 0.2)
    assert loss.tolist() == pytest.approx([math.log(2) + 0.5] * 3, abs=1e-6)


@pytest.mark.parametrize(("opt", "made"), [("sgd", sgd(0.3)), ("adam", adam(0.3))])
def test_fedzkt_trains_locally_as_set(opt, made):
    seen = []
    client = SimpleNamespace(model=nn.Linear(2, 2), fit=lambda loss, **options: seen.append(options["opt"]))
    registry.find("fedzkt").make({"opt": opt, "eta": 0.3}).local_update(client, None)
    assert seen == [made]


def test_fedzkt_collects_and_gives_back(tiny, tmp_path):
    """What a device deploys is what the server sent back, not what it trained."""
    run(tiny("fedzkt", model="digits-3", server_model="cnn", rounds=1), out=tmp_path / "a")
    for e in Transcript(tmp_path / "a" / "transcript").entries():
        kept = load_file(tmp_path / "a" / "models" / f"client-{e.client:06d}.safetensors")
        if e.message == "Transferred":
            assert all(torch.equal(kept[n], t) for n, t in e["w"].items())
        elif e.message == "OnDevice":
            assert any(not torch.equal(kept[n], t) for n, t in e["w"].items())


# --- composition ----------------------------------------------------------------------------------------------------


def final(folder):
    return load_file(folder / "models" / "global.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("host", ["fedavg", "fedrolex"])
def test_without_steps_a_distillation_leaves_its_host_bit_for_bit(host, tiny, tmp_path):
    local = {"B": 32, "eta": 0.05}
    run(tiny(host, set=local), out=tmp_path / "host")
    run(tiny(f"{host}+dfrd", set={"host": local, "I": 0, "d": 4, "width": 4}), out=tmp_path / "both")
    a, b = final(tmp_path / "host"), final(tmp_path / "both")
    assert all(torch.equal(a[n], b[n]) for n in a)
    quick = dict(registry.find(f"{host}+dfrd").quick)
    run(tiny(f"{host}+dfrd", set={"host": local, **quick}), out=tmp_path / "steps")
    assert any(not torch.equal(a[n], t) for n, t in final(tmp_path / "steps").items())


def test_every_distillation_is_composed_with_every_host():
    for distillation in ("dfrd", "fedftg", "dense"):
        assert type(registry.find(distillation).make({}).host) is Alone
        for host in ("fedavg", "heterofl", "feddropout", "fedrolex"):
            made = registry.find(f"{host}+{distillation}").make({"host": {"E": 7}})
            assert type(made.host) is registry.find(host)
            assert made.host.E == 7
    with pytest.raises(SettingError, match=r"host\.rhoo"):
        registry.find("fedrolex+dfrd").make({"host": {"rhoo": 5}})


def test_heterofl_settles_after_the_distillation(tiny, tmp_path):
    """Statistics are those of the distilled model: the query comes last, and carries what the run ends with."""
    quick = dict(registry.find("heterofl+dfrd").quick)
    run(tiny("heterofl+dfrd", model="cnn_bn", rounds=1, set=quick), out=tmp_path / "a")
    rows = list(Transcript(tmp_path / "a" / "transcript").entries())
    assert [e.message for e in rows if e.direction == "down" and e.client == 0] == ["Part", "HowMany", "Query"]
    asked = next(e for e in rows if e.message == "Query")["w"]
    end = final(tmp_path / "a")
    assert all(torch.equal(end[n], t) for n, t in asked.items())


@pytest.mark.long
def test_data_free_clients_go_on_from_their_own_models(tiny, tmp_path):
    """start = local: nothing goes down but a word, and L.acc is that of clients who train alone."""
    local = {"B": 32, "eta": 0.05}
    quick = dict(registry.find("dfrd").quick)
    alone = run(tiny("local", set=local), out=tmp_path / "local")
    free = run(tiny("dfrd", set={**quick, "host": local}), out=tmp_path / "dfrd")
    assert free.bytes("down") == 0
    assert free.result.last.clients == alone.result.last.clients
    sent = run(tiny("dfrd", set={**quick, "host": {**local, "start": "global"}}), out=tmp_path / "sent")
    assert sent.bytes("down") == 2 * 3 * 4 * 13_706


@pytest.mark.long
def test_label_counts_are_a_release_that_can_be_protected(tiny, tmp_path):
    """A histogram changes by sqrt(2) when a record changes its label. DENSE asks for none."""
    quick = dict(registry.find("fedavg+dfrd").quick)
    policy = {"label_counts": {"epsilon": 1.0}}
    record = run(tiny("fedavg+dfrd", rounds=1, set=quick, privacy=policy), out=tmp_path / "a")
    release = next(r for r in record.releases if r.kind == "label_counts")
    assert release.protection.sensitivity == pytest.approx(math.sqrt(2))
    assert not [r for r in run(tiny("fedavg+dense"), out=tmp_path / "b").releases if r.kind == "label_counts"]


def test_presets_of_a_composition_are_its_hosts_and_settings_go_over_them_key_by_key():
    """DFRD, Section 4.3: rho = 10 on SVHN and CIFAR-10, 5 on CIFAR-100, for the sub-model hosts."""
    method = registry.find("fedrolex+dfrd").make({"host": {"E": 3}}, "cifar10")
    assert (method.host.rho, method.host.E) == (10, 3)
    assert registry.find("fedrolex+dfrd").make({}, "cifar100").host.rho == 5
    assert "host" not in registry.find("fedavg+dfrd").presets.get("cifar10", {})
    dense = registry.find("fedrolex+dense").make({}, "cifar10")
    assert (dense.host.rho, dense.I) == (10, 10), "the budget of the other two"
    assert registry.find("dense").make({}, "one-shot").I_g == 30


# --- the positive control of distillation without data: one teacher that knows all classes, a student from scratch.


# DENSE's generator does not see the label: it has to be fitted to each batch of noise anew, with more steps a turn, and
# to teachers with batch norm, whose statistics it imitates.
BUDGETS = {
    "dfrd": ("cnn", 5, {}),
    "fedftg": ("cnn", 5, {}),
    "dense": ("cnn_bn", 8, {"I_g": 30, "I_d": 10}),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", BUDGETS)
def test_a_student_reaches_four_fifths_of_its_teacher(method, tmp_path):
    """Digits, preset `digits`, one client that holds everything. The round is chosen on validation data."""
    model, rounds, values = BUDGETS[method]
    record = run(
        Setting.make(
            method=method, preset="digits", model=model, clients=1, partition="iid", holdout=0.0, aux=0.0,
            rounds=rounds, init="own", onednn="on", set={**values, "host": {"E": 2, "B": 32, "eta": 0.1}},
        ),
        out=tmp_path / "run",
    )  # fmt: skip
    teacher = record.result.last.clients.global_test.mean
    student = record.result.chosen.global_.test.accuracy
    assert teacher > 0.9
    assert student >= 0.8 * teacher, f"{student:.3f} of {teacher:.3f}"


def test_the_presets_of_dfrds_authors_give_all_three_one_budget():
    """They differ in what is a method's own; on FedAvg the clients go on from the plain average."""
    own = {"metric", "rows", "merge", "classes", "mask", "batches", "lambda_1", "lambda_2"}
    budgets = []
    for name in ("dfrd", "fedftg", "dense"):
        alone, hosted = (registry.find(f"{host}{name}").presets["authors"] for host in ("", "fedavg+"))
        assert hosted == {**alone, "feedback": False}
        assert "feedback" not in registry.find(f"heterofl+{name}").presets["authors"]
        budgets.append({key: value for key, value in alone.items() if key not in own})
    assert budgets[0] == budgets[1] == budgets[2]
    assert {key: budgets[0][key] for key in ("I", "I_g", "I_d", "optimisers", "T", "tran")} == {
        "I": 10, "I_g": 2, "I_d": 5, "optimisers": "turn", "T": 10, "tran": "student-detached",
    }  # fmt: skip
    dfrd, fedftg, dense = (registry.find(name).presets["authors"] for name in ("dfrd", "fedftg", "dense"))
    assert (dfrd["metric"], dfrd["rows"]) == ("ms", "counted")
    assert (fedftg["metric"], fedftg["merge"], fedftg["classes"]) == ("ms", "cat", "mean")
    assert (dense["merge"], dense["mask"], dense["rows"], dense["batches"]) == ("mul", "one-right", "counted", "step")
    assert (dense["lambda_1"], dense["lambda_2"]) == (0, 1)  # their networks keep no statistics
