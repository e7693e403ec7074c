"""The table of docs/results/parity.md: made again from its record, and from checkouts where there are any; where there
are none, twins of the libraries' decisive lines, written by hand, stand for them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import script_in_place
from torch import nn
from torch.nn import functional as F

from fedaudit import State, weighted_mean
from fedaudit.methods.averaging.feddyn import regularised
from fedaudit.methods.averaging.fedntd import not_true_distillation
from fedaudit.methods.averaging.fedprox import proximal
from fedaudit.methods.averaging.moon import contrastive
from fedaudit.methods.averaging.perfedavg import FirstOrder
from fedaudit.methods.averaging.scaffold import controlled
from fedaudit.methods.datafree.fedgen import L_samples
from fedaudit.methods.distillation._mutual import Pair
from fedaudit.methods.distillation.feddistill import distilled
from fedaudit.methods.distillation.fedkd import by_batch
from fedaudit.methods.distillation.fml import FML, joint
from fedaudit.methods.prototypes.fedproto import regularised as prototypical
from fedaudit.methods.prototypes.fedtgp import L_P, GlobalPrototypes, adaptive_margin
from fedaudit.training.fit import Live
from fedaudit.training.models import Net
from fedaudit.wire.svd import factors

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "benchmarks" / "studies" / "parity"
CHECKOUTS = {name: os.environ.get(f"FEDAUDIT_{name.upper()}") for name in ("pfllib", "htfllib")}


@pytest.fixture(scope="module")
def study():
    with script_in_place("parity") as module:
        yield module


@pytest.fixture(scope="module")
def kept():
    return json.loads((STUDY / "parity.json").read_text())


def test_the_page_shows_the_record(study, kept):
    page = (ROOT / "docs" / "results" / "parity.md").read_text()
    assert study.table(kept) in page
    for library in ("pfllib", "htfllib"):
        assert kept[library] in page


def test_the_record_holds_what_the_page_says(study, kept):
    """Every method that is listed has a row that is equal but for rounding."""
    assert kept["limit"] == study.LIMIT == 1e-12
    equal = {row["method"] for row in kept["rows"] if row["equal"]}
    assert equal == {case.__name__ for case in study.CASES}
    assert all(row["difference"] <= study.LIMIT for row in kept["rows"] if row["equal"])
    assert all(row["difference"] > 1e-3 for row in kept["rows"] if not row["equal"]), "what is mended matters"


@pytest.mark.slow
@pytest.mark.skipif(
    not all(CHECKOUTS.values()),
    reason="no checkouts: set FEDAUDIT_PFLLIB and FEDAUDIT_HTFLLIB to those of TsingZ0/PFLlib and TsingZ0/HtFLlib",
)
def test_the_libraries_still_agree(study, kept, tmp_path):
    words = [word for name, path in CHECKOUTS.items() for word in (f"--{name}", path)]
    assert study.main([*words, "--json", str(tmp_path / "again.json")]) == 0
    again = json.loads((tmp_path / "again.json").read_text())
    named = [(row["method"], row["reference"]) for row in kept["rows"]]
    assert [(row["method"], row["reference"]) for row in again["rows"]] == named


def test_a_folder_that_is_no_checkout_is_refused(study, tmp_path):
    with pytest.raises(SystemExit, match=r"is not a checkout of PFLlib or HtFLlib"):
        study.Library(tmp_path, None)


# --- twins ------------------------------------------------------------------------------------------------------------
#
# Each retells the lines of a library that decide what is trained, and is compared with fedaudit's loss by the gradient
# of one batch, in double precision.


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def net():
    return Net(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 4), width=5, arch="by hand")


def batch():
    return torch.randn(9, 6), torch.randint(4, (9,))


def gradient(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def of(model):
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def flat(tensors, model):
    return torch.cat([tensors[name].flatten() for name, _ in model.named_parameters()])


def vector(model):
    return torch.cat([p.flatten() for p in model.parameters()])


def same(a, b, tolerance=1e-12):
    return float((a - b).detach().abs().max()) <= tolerance


def test_average_by_records():
    states = {k: State({"a": torch.randn(3), "b": torch.randn(2, 2)}) for k in range(3)}
    n = {0: 40, 1: 65, 2: 81}
    sums = {name: torch.zeros_like(t) for name, t in states[0].items()}
    for k, w in states.items():
        for name in sums:
            sums[name] += w[name] * (n[k] / sum(n.values()))
    ours = weighted_mean(states, n)
    assert all(same(ours[name], sums[name]) for name in sums)


def test_proximal_step():
    """PFLlib's optimiser adds mu (p - g) to the gradient."""
    model, (x, y) = net(), batch()
    w_t = of(model)
    theirs = gradient(model, F.cross_entropy(model(x), y)) + 0.3 * (vector(model) - flat(w_t, model))
    assert same(gradient(model, proximal(Live(model), x, y, w_t, 0.3).mean()), theirs)


def test_dynamic_penalty_and_its_square():
    """PFLlib has alpha / 2 times the norm; the paper its square, and fedaudit."""
    model, (x, y) = net(), batch()
    w_t, g = of(model), of(model)
    ours = gradient(model, regularised(Live(model), x, y, g, w_t, 0.3).mean())
    for square, equal in ((False, False), (True, True)):
        far = torch.norm(vector(model) - flat(w_t, model), 2)
        loss = F.cross_entropy(model(x), y) - torch.dot(vector(model), flat(g, model))
        theirs = gradient(model, loss + 0.15 * (far**2 if square else far))
        assert same(ours, theirs) is equal


def test_controlled_step():
    """PFLlib's optimiser adds the server's c and takes the client's away."""
    model, (x, y) = net(), batch()
    c, c_i = of(model), of(model)
    theirs = gradient(model, F.cross_entropy(model(x), y)) + flat(c, model) - flat(c_i, model)
    assert same(gradient(model, controlled(Live(model), x, y, c, c_i).mean()), theirs)


def test_contrastive_logarithm():
    model, (x, y) = net(), batch()
    z_glob, z_prev = torch.randn(9, 5), torch.randn(9, 5)
    rep = model.encode(x)
    near, old = (torch.exp(F.cosine_similarity(rep, z) / 0.5) for z in (z_glob, z_prev))
    theirs = F.cross_entropy(model.classify(rep), y) + 1.5 * torch.mean(-torch.log(near / (near + old)))
    ours = contrastive(Live(model), x, y, z_glob, z_prev, 1.5, 0.5).mean()
    assert same(gradient(model, ours), gradient(model, theirs))


def test_classes_that_are_not_true():
    """PFLlib picks the other classes by a mask and reshapes."""
    model, (x, y) = net(), batch()
    z, z_g = model(x), torch.randn(9, 4)
    mask = torch.arange(4).repeat(9, 1) != y[:, None]
    pred, told = (logits[mask].view(9, 3) / 1.0 for logits in (z, z_g))
    far = nn.KLDivLoss(reduction="batchmean")(F.log_softmax(pred, 1), F.softmax(told, 1))
    ours = not_true_distillation(Live(model), x, y, z_g, 1.5, 1.0).mean()
    assert same(gradient(model, ours), gradient(model, F.cross_entropy(z, y) + 1.5 * far))


def test_first_order_meta_step():
    """PFLlib steps to w~ on one half, puts w back, and steps by the gradient found there."""
    model, (x, y), (x_2, y_2) = net(), batch(), batch()
    start = [p.detach().clone() for p in model.parameters()]
    opt = FirstOrder(model.parameters(), alpha=0.1, beta=0.2)
    for rows, labels in ((x, y), (x_2, y_2)):
        opt.zero_grad()
        F.cross_entropy(model(rows), labels).backward()
        opt.step()
    ours = vector(model).detach()
    for p, w in zip(model.parameters(), start, strict=True):
        p.data = w.clone()
    first = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for p, g in zip(model.parameters(), first, strict=True):
        p.data.add_(g, alpha=-0.1)
    second = torch.autograd.grad(F.cross_entropy(model(x_2), y_2), list(model.parameters()))
    theirs = torch.cat([(w - 0.2 * g).flatten() for w, g in zip(start, second, strict=True)])
    assert same(ours, theirs)


def test_prototypes_copied_into_a_batch():
    """HtFLlib replaces the rows of classes that have a prototype, and takes the mean square of all."""
    model, (x, y) = net(), batch()
    C, held = torch.randn(4, 5), torch.tensor([1.0, 0.0, 1.0, 1.0])
    rep = model.encode(x)
    new = rep.detach().clone()
    for i, label in enumerate(y.tolist()):
        if held[label]:
            new[i] = C[label]
    theirs = F.cross_entropy(model.classify(rep), y) + 2.0 * F.mse_loss(new, rep)
    ours = prototypical(Live(model), x, y, C, held, 2.0, "mse").mean()
    assert same(gradient(model, ours), gradient(model, theirs))


def test_trained_prototypes():
    """HtFLlib: distances by the squares, the margin on the own class; the margin by a loop over pairs."""
    P, P_i, c = GlobalPrototypes(4, 5, 7), torch.randn(9, 5), torch.randint(4, (9,))
    centres = {j: torch.randn(5) for j in range(4)}
    gap = dict.fromkeys(centres, 1000000000.0)
    for a in centres:
        for b in centres:
            if a > b:
                far = float(torch.norm(centres[a] - centres[b]))
                gap[a], gap[b] = min(gap[a], far), min(gap[b], far)
    delta = adaptive_margin(centres, 100.0, "nearest")
    assert abs(float(delta) - max(gap.values())) < 1e-12
    made = P.F(P.P)
    dist = torch.sqrt((P_i**2).sum(1, keepdim=True) - 2 * P_i @ made.T + (made**2).sum(1))
    theirs = F.cross_entropy(-(dist + F.one_hot(c, 4) * delta), c)
    assert same(gradient(P, L_P(Live(P), P_i, c, delta).mean()), gradient(P, theirs), 1e-10)


def test_mutual_learning_of_a_library():
    """HtFLlib calls backward on both losses, so that their gradients add up, and divides by classes; clipped apart."""
    pair, (x, y) = Pair(net(), net()), batch()
    KL = nn.KLDivLoss(reduction="none")
    z, z_g, _, _ = pair(x)
    other = [KL(F.log_softmax(a, 1), F.softmax(b, 1)).mean() for a, b in ((z, z_g), (z_g, z))]
    loss = F.cross_entropy(z, y) * 0.5 + other[0] * 0.5
    loss_g = F.cross_entropy(z_g, y) * 0.7 + other[1] * 0.3
    loss.backward(retain_graph=True)
    loss_g.backward()
    theirs = torch.cat([p.grad.flatten() for p in pair.parameters()])
    assert same(gradient(pair, joint(Live(pair), x, y, 0.5, 0.7).mean()), theirs)


def test_each_network_is_clipped_by_itself():
    pair, (x, y) = Pair(net(), net()), batch()
    opt = FML(clip=0.05, momentum=0.0).of_pair(1.0, pair)
    before = [p.detach().clone() for p in pair.parameters()]
    made = opt.build(list(pair.parameters()))
    joint(Live(pair), x, y, 0.5, 0.7).mean().backward()
    made.step()
    steps = [w - p.detach() for w, p in zip(before, pair.parameters(), strict=True)]
    for part in (steps[:4], steps[4:]):
        assert abs(float(torch.cat([s.flatten() for s in part]).norm()) - 0.05) < 1e-6
    assert FML().of_pair(1.0, pair).make is torch.optim.SGD


def test_mentor_and_mentee_of_a_library():
    """HtFLlib: losses of the batch, divided by both cross-entropies, with gradients through everything."""
    pair, (x, y) = Pair(net(), net(), nn.Linear(5, 5, bias=False)), batch()
    rep, rep_g = pair.own.encode(x), pair.shared.encode(x)
    out, out_g = pair.own.classify(rep), pair.shared.classify(rep_g)
    CE, CE_g = F.cross_entropy(out, y), F.cross_entropy(out_g, y)
    KL = nn.KLDivLoss(reduction="none")
    L_d = KL(F.log_softmax(out, 1), F.softmax(out_g, 1)).mean() / (CE + CE_g)
    L_d_g = KL(F.log_softmax(out_g, 1), F.softmax(out, 1)).mean() / (CE + CE_g)
    L_h = F.mse_loss(rep, pair.W_h(rep_g)) / (CE + CE_g)
    theirs = gradient(pair, (CE + L_d + L_h) + (CE_g + L_d_g + L_h))
    assert same(gradient(pair, by_batch(Live(pair), x, y).mean()), theirs)


def test_ranks_of_a_library():
    """HtFLlib counts up until the energy is exceeded; a matrix that needs all values falls through with rank 0."""
    numbers, fell = np.random.RandomState(1), 0
    for i in range(60):
        matrix = numbers.standard_normal((30, 40 if i % 3 else 4)) * np.exp(-0.3 * np.arange(40 if i % 3 else 4))
        energy = 0.5 + 0.4999 * i / 59
        s = np.linalg.svd(matrix, compute_uv=False)
        rank = 0
        for k in range(len(s)):
            if (s[:k] ** 2).sum() > energy * (s**2).sum():
                rank = k
                break
        ours = factors(torch.from_numpy(matrix), energy)
        fell += rank == 0
        assert ours is None or rank in (0, len(ours[1]))
        assert ours is None or rank
    assert fell, "some need all"


def test_distilled_logits_and_their_softmax():
    """HtFLlib until 29 November 2025: cross-entropy against the softmax; since then against the raw logits."""
    model, (x, y) = net(), batch()
    G, held = torch.randn(4, 4), torch.ones(4)
    ours = gradient(model, distilled(Live(model), x, y, G, held, 0.7, "ce").mean())
    for soft, equal in ((True, True), (False, False)):
        out = model(x)
        target = G[y].softmax(1) if soft else G[y]
        assert same(ours, gradient(model, F.cross_entropy(out, y) + 0.7 * F.cross_entropy(out, target))) is equal


def test_logits_weighed_by_records():
    teachers, y = torch.randn(3, 9, 4), torch.randint(4, (9,))
    p = torch.tensor([40, 65, 81]) / 186
    mean = sum(w * logits for w, logits in zip(p, teachers, strict=True))
    assert same(L_samples(teachers, p, y).mean(), F.cross_entropy(mean, y))
