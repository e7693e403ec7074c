"""Membership attacks on a model, with and without shadows: by hand, against other people's code, and on digits."""

from __future__ import annotations

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import scipy
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from fedaudit import run
from fedaudit.attack.attack_run import attack_run, candidates_of, rescore
from fedaudit.attack.membership import membership_scores
from fedaudit.attack.scene import Scene
from fedaudit.attacks.membership import rmia
from fedaudit.attacks.membership.combined import Combined, learned, measured
from fedaudit.attacks.membership.entropy import entropy
from fedaudit.attacks.membership.label_only import LabelOnly
from fedaudit.attacks.membership.lira import confidences, likelihood_ratio, own_variance
from fedaudit.attacks.membership.lira_offline import one_sided
from fedaudit.attacks.membership.modified_entropy import modified_entropy
from fedaudit.attacks.membership.rmia import RMIA, dominated, finer, tuned
from fedaudit.attacks.membership.shadow import ShadowModels
from fedaudit.attacks.shared._models import Shadows, draw, fill, last_upload, log_rest, records, target_model
from fedaudit.errors import SettingError, ThreatError
from fedaudit.registry import find, names
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.world import World
from fedaudit.training.models import build

QUERY = ("loss", "entropy", "modified_entropy", "label_only")
SHADOW = ("lira", "lira_offline", "rmia", "shadow")
QUICK = {"label_only": {"queries": 60}, **{name: {"shadows": 2} for name in SHADOW[:3]}}
QUICK["shadow"] = {"shadows": 2, "classifier": "logistic"}
QUICK["combined"] = {"shadows": 4}


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    """Logits whose softmax is these probabilities."""
    return torch.tensor(rows, dtype=torch.float64).log() + 3.0  # a softmax does not see the 3


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_entropy_by_hand():
    """p = (1/2, 1/4, 1/4): 1/2 ln 2 + 2 (1/4) ln 4 = 3/2 ln 2. A certain prediction has 0, a uniform one ln 3."""
    found = entropy(torch.cat([logits((0.5, 0.25, 0.25)), torch.tensor([[100.0, 0, 0], [1, 1, 1]])]))
    assert found.tolist() == pytest.approx([1.5 * math.log(2), 0, math.log(3)], abs=1e-12)


def test_modified_entropy_by_hand():
    """p = (1/2, 1/4, 1/4).

    y = 0: -(1/2) ln(1/2) - 2 (1/4) ln(3/4) = 0.346574 + 0.143841 = 0.490415
    y = 1: -(3/4) ln(1/4) - (1/2) ln(1/2) - (1/4) ln(3/4) = 1.039721 + 0.346574 + 0.071921 = 1.458215
    """
    z = logits((0.5, 0.25, 0.25)).repeat(2, 1)
    assert modified_entropy(z, torch.tensor([0, 1])).tolist() == pytest.approx([0.490415, 1.458215], abs=1e-6)


def test_a_certain_mistake_is_told_from_a_certain_hit():
    """p = (1 - e, e) with e = exp(-200), far below what a float keeps beside 1.

    y = 0: -(e) ln(1 - e) - e ln(1 - e) = 0. y = 1: -(1 - e) ln e - (1 - e) ln e = 400.
    """
    z = torch.tensor([[200.0, 0], [200.0, 0]], dtype=torch.float64)
    assert modified_entropy(z, torch.tensor([0, 1])).tolist() == pytest.approx([0, 400], abs=1e-9)
    assert entropy(z).max() < 1e-80, "the plain entropy holds both for members"


def test_log_of_the_rest_is_right_at_both_ends():
    z = torch.randn(50, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    direct = torch.stack([z[:, [j for j in range(7) if j != i]].logsumexp(1) for i in range(7)], 1) - z.logsumexp(
        1, keepdim=True
    )
    torch.testing.assert_close(log_rest(z), direct, atol=1e-10, rtol=1e-10)


# phi of two candidates (columns) in four shadows; the target's phi is (3, 0).
PHI = torch.tensor([[3.0, 1.0], [5.0, 5.0], [-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
MEMBER = torch.tensor([[True, True], [True, True], [False, False], [False, False]])
TARGET = torch.tensor([3.0, 0.0], dtype=torch.float64)


def test_online_lira_by_hand():
    """Candidate 1: in (3, 5): mean 4, variance 2; out (-1, 1): mean 0, variance 2; at 3:
    -(1/2) (1/2) + (1/2) (9/2) = 2, the variances cancel.
    Candidate 2: in (1, 5): mean 3, variance 8; out: mean 0, variance 2; at 0:
    -(1/2) (9/8 + ln 8) + (1/2) (0 + ln 2) = -9/16 - ln 2.
    One variance for all: in (2 + 8) / 2 = 5, out 2.
    Candidate 1: -(1/2) (1/5 + ln 5) + (1/2) (9/2 + ln 2) = 2.15 - (1/2) ln 2.5
    Candidate 2: -(1/2) (9/5 + ln 5) + (1/2) ln 2 = -0.9 - (1/2) ln 2.5
    """
    own = likelihood_ratio(TARGET, PHI, MEMBER, each=True)
    assert own.tolist() == pytest.approx([2, -9 / 16 - math.log(2)], abs=1e-12)
    common = likelihood_ratio(TARGET, PHI, MEMBER, each=False)
    assert common.tolist() == pytest.approx([2.15 - math.log(2.5) / 2, -0.9 - math.log(2.5) / 2], abs=1e-12)


def test_offline_lira_by_hand():
    """All four as "out". Candidate 1: mean 2, squares 1 + 9 + 9 + 1 = 20; candidate 2: mean 3/2, squares
    1/4 + 49/4 + 25/4 + 1/4 = 19. Own: (3 - 2) / sqrt(20 / 3), -(3/2) / sqrt(19 / 3); common: variance 39 / 6."""
    own, common = one_sided(TARGET, PHI, each=True), one_sided(TARGET, PHI, each=False)
    assert own.tolist() == pytest.approx([math.sqrt(3 / 20), -1.5 * math.sqrt(3 / 19)], abs=1e-12)
    assert common.tolist() == pytest.approx([math.sqrt(6 / 39), -1.5 * math.sqrt(6 / 39)], abs=1e-12)


def test_lira_reads_its_confidences_from_logits():
    """phi = log(p / (1 - p)): with p = 0.8 of the true class ln 4, with 0.5 ln 1, with 0.1 -ln 9. Rows after the
    candidates are auxiliary records, which LiRA does not look at."""
    target = logits((0.8, 0.1, 0.1), (0.5, 0.25, 0.25), (0.9, 0.05, 0.05))
    shadows = torch.stack([target, logits((0.1, 0.8, 0.1), (0.25, 0.25, 0.5), (0.2, 0.2, 0.6))])
    phi, of_shadows = confidences(target, shadows, torch.tensor([0, 0]))
    assert phi.tolist() == pytest.approx([math.log(4), 0])
    assert of_shadows.tolist() == [pytest.approx([math.log(4), 0]), pytest.approx([-math.log(9), -math.log(3)])]


def test_few_shadows_share_one_variance():
    assert [own_variance("auto", n) for n in (63, 64)] == [False, True]
    assert own_variance("candidate", 2)
    assert not own_variance("global", 256)


def test_equal_shadows_give_finite_scores():
    """A variance of 0, as answers rounded to equal numbers give it, is no division by 0."""
    for each in (True, False):
        assert likelihood_ratio(TARGET, PHI * 0, MEMBER, each).isfinite().all()
        assert one_sided(TARGET, PHI * 0, each).isfinite().all()


def test_rmia_by_hand():
    """a = 1/2: p = (3/2 p_out + 1/2) / 2. Two candidates x, four auxiliary records z, three shadows.

                 x1    x2    z1    z2      z3    z4
    p_out        0.2   0.6   0.2   0.9     0.6   0.2
    p            0.4   0.7   0.4   0.925   0.7   0.4
    p(.|theta)   0.8   0.35  0.1   0.4625  0.7   0.8
    ratio        2     0.5   0.25  0.5     1     2

    gamma = 1.9: gamma ratio_z = 0.475, 0.95, 1.9, 3.8, of which x1 reaches three and x2 one: 3/4 and 1/4. p_out is the
    mean over the shadows without the record: x1 has 0.1 and 0.3 and, in the last, which is said to be trained on it, a
    value that must not count. The same for z1; all others have p_out in every shadow.
    """
    p_theta = [0.8, 0.35, 0.1, 0.4625, 0.7, 0.8]
    p = torch.tensor([[0.1, 0.6, 0.1, 0.9, 0.6, 0.2], [0.3, 0.6, 0.3, 0.9, 0.6, 0.2], [0.99, 0.6, 0.99, 0.9, 0.6, 0.2]])
    member = torch.zeros(3, 6, dtype=torch.bool)
    member[2, 0] = member[2, 2] = True
    two = torch.stack([p, 1 - p], -1).double().log()
    shadows = Shadows(two, member, torch.zeros(6, dtype=torch.int64), candidates=2, notes=())
    ratio = RMIA().ratios(logits(*((q, 1 - q) for q in p_theta)), shadows, 0.5)
    assert ratio.tolist() == pytest.approx([2, 0.5, 0.25, 0.5, 1, 2], abs=1e-6)
    assert dominated(ratio[:2], ratio[2:], 1.9).tolist() == [0.75, 0.25]


def test_rmia_agrees_with_an_independent_implementation():
    """Every pair (x, z) by itself, on random probabilities: the same share to the last digit, and the same AUC."""
    rng = np.random.default_rng(0)
    p, member = rng.uniform(0.05, 1, (6, 40)), rng.random((6, 40)) < 0.5
    member[:, :15] = False  # candidates: offline shadows hold none of them
    target, gamma, a = rng.uniform(0.05, 1, 40), 1.5, 0.3
    shares = np.zeros(15)
    for x in range(15):
        for z in range(15, 40):
            p_x, p_z = (((1 + a) * p[~member[:, i], i].mean() + 1 - a) / 2 for i in (x, z))
            shares[x] += (target[x] / p_x) / (target[z] / p_z) >= gamma
    two = torch.from_numpy(np.log(np.stack([p, 1 - p], -1)))
    shadows = Shadows(two, torch.from_numpy(member), torch.zeros(40, dtype=torch.int64), candidates=15, notes=())
    ratio = RMIA().ratios(torch.from_numpy(np.log(np.stack([target, 1 - target], -1))), shadows, a)
    assert dominated(ratio[:15], ratio[15:], gamma).tolist() == pytest.approx((shares / 25).tolist())


def test_rmia_is_tuned_to_how_sure_members_are():
    """Shadows give what they hold 0.3 to 1, and the rest 0 to 0.4: the pair that is chosen tells members of each shadow
    best, by an AUC of scikit-learn's for each pair and shadow."""
    rng = torch.Generator().manual_seed(0)
    member = torch.rand(8, 200, generator=rng) < 0.5
    member[1], member[3] = ~member[0], ~member[2]  # every record is left out twice at least
    p = torch.where(member, 0.3 + 0.7 * torch.rand(8, 200, generator=rng), 0.4 * torch.rand(8, 200, generator=rng))
    gamma, a = tuned(p.double(), member, (1.0, 4.0), (0.0, 1.0))
    assert (gamma, a) in [(g, m) for g in (1.0, 4.0) for m in (0.0, 1.0)]
    best = {}
    for pair in [(g, m) for g in (1.0, 4.0) for m in (0.0, 1.0)]:
        values = []
        for i in range(8):
            rest = [j for j in range(8) if j != i]
            out = torch.stack([p[rest, r][~member[rest, r]].mean() for r in range(200)]).double()
            ratio = p[i].double() / (((1 + pair[1]) * out + 1 - pair[1]) / 2)
            score = finer(dominated(ratio, ratio[~member[i]], pair[0]), ratio, int((~member[i]).sum()))
            values.append(roc_auc_score(member[i].numpy(), score.numpy()))
        best[pair] = np.mean(values)
    assert (gamma, a) == max(best, key=best.get)


def test_gradient_norms_by_hand():
    """One linear layer on x = (1, 2), logits 0: p = (1/2, 1/2), the gradient of the weights is (p - y) x, that of the
    bias p - y: its norm is sqrt(1/2) sqrt(1 + 4 + 1)."""
    from fedaudit.attacks.membership.gradient_norm import gradient_norms

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 2))
    torch.nn.init.zeros_(model[1].weight)
    torch.nn.init.zeros_(model[1].bias)
    found = gradient_norms(model, torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([0]))
    assert found.tolist() == pytest.approx([math.sqrt(3)])


def test_ties_of_rmia_are_ordered_and_no_order_is_changed():
    share, ratio = torch.tensor([0.25, 0.25, 0.5, 0.0]), torch.tensor([1e9, 0.1, 0.0, 1e300], dtype=torch.float64)
    found = finer(share, ratio, 4)
    assert found.argsort(descending=True).tolist() == [2, 0, 1, 3]


def linear(seed: int):
    """A linear classifier of 8x8 images into two classes, images well inside [-1, 1], and their distances."""
    rng = torch.Generator().manual_seed(seed)
    w, x = torch.randn(64, generator=rng), torch.rand(60, 1, 8, 8, generator=rng) - 0.5
    margin = x.flatten(1) @ w + 0.1
    return w, x, (margin > 0).long(), margin.abs().double() / w.norm(), rng


def test_label_only_finds_the_distance_to_a_plane():
    """|w x + b| / |w|. The search is from outside, so never below it; and 1000 labels bring it within some 15 %."""
    w, x, y, true, rng = linear(0)
    asked = 0

    def predict(images):
        nonlocal asked
        asked += len(images)
        return (images.flatten(1) @ w + 0.1 > 0).long()

    others = torch.rand(100, 1, 8, 8, generator=rng) * 2 - 1
    errors = []
    for queries in (100, 1000):
        asked = 0
        found = LabelOnly(queries=queries).distances(predict, x, y, others, torch.Generator().manual_seed(1))
        assert asked - len(others) <= queries * len(x), "the budget is a bound"
        assert (found >= true - 1e-4).all()
        errors.append(float((found / true).median()))
    assert errors[1] < 1.15 < errors[0]


def test_label_only_without_a_boundary_gives_one_distance_to_all():
    _, x, y, _, rng = linear(0)
    found = LabelOnly().distances(lambda images: torch.ones(len(images), dtype=torch.int64), x, y * 0 + 1, x, rng)
    assert found.tolist() == pytest.approx([2 * 8] * 60)  # from corner to corner of [-1, 1]^64


@pytest.mark.long
def test_a_shadow_classifier_learns_what_there_is_to_learn():
    """Members have probability 0.9 of the true class and others 0.5, in class 0; in class 1 the other way round, which
    one classifier without the class could not tell; class 2 has too few examples for a classifier of its own."""
    rng = np.random.default_rng(0)
    labels, inside = np.array([0] * 200 + [1] * 200 + [2] * 20), np.arange(420) % 2 == 0
    sure = np.where((labels == 1) ^ inside, 0.9, 0.5) + rng.uniform(-0.05, 0.05, 420)
    X = np.log(np.stack([sure, 1 - sure], 1))
    for settings in ({}, {"classifier": "logistic"}, {"per_class": False}):
        found = ShadowModels(**settings).learn(X, labels, inside, X, labels, 3, seed=0)
        for c in range(3 if settings != {"classifier": "logistic"} else 2):
            assert roc_auc_score(inside[labels == c], found[labels == c]) > 0.95, (settings, c)


# --- what shadows are trained on -------------------------------------------------------------------------------------


def scene_of(folder, k=0, threat="server"):
    opened = RunFolder(folder)
    x, y, member = candidates_of(opened.world, k)
    return Scene(opened, opened.transcript.view(threat), k, x, y), member


SETTING = {
    "method": "fedavg", "set": {"E": 12, "B": 8, "eta": 0.2}, "model": "mlp", "clients": 2, "rounds": 1,
    "partition": "iid", "aux": 0.8, "holdout": 0.45, "validation": 0.0, "eval_clients": False,
}  # fmt: skip
PRIVATE = {"training": {"mechanism": "dp-sgd", "epsilon": 1.0, "sensitivity": "clip:1.0"}}


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    """FedAvg that trains for 12 epochs on 79 digits per client."""
    folder = tmp_path_factory.mktemp("leaky") / "run"
    run(out=folder, **SETTING)
    return folder


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """The same with DP-SGD at epsilon 1."""
    folder = tmp_path_factory.mktemp("private") / "run"
    run(out=folder, **SETTING, privacy=PRIVATE)
    return folder


def test_online_shadows_hold_half_of_the_candidates_each(leaky):
    scene, _ = scene_of(leaky)
    picks, member, repeated = draw(scene, 6, online=True)
    n, candidates = scene._world.count(0), len(scene.y)
    assert records(scene) == n, "the view shows the count"
    assert [len(pick.unique()) for pick in picks] == [n] * 6
    assert not repeated
    inside = member[:, :candidates]
    assert (inside.sum(0) == 3).all(), "each candidate is in half of the shadows"
    assert (inside.sum(1) == candidates // 2).all()
    assert torch.equal(inside[0], ~inside[1])
    assert not torch.equal(inside[0], inside[2])


def test_offline_shadows_hold_no_candidate_and_leave_auxiliary_records_out(leaky):
    scene, _ = scene_of(leaky)
    picks, member, _ = draw(scene, 6, online=False)
    candidates = len(scene.y)
    assert not member[:, :candidates].any()
    assert all(len(pick.unique()) == scene._world.count(0) for pick in picks)
    labels = scene.auxiliary[1]
    for c in labels.unique():
        assert (member[:, candidates:][:, labels == c].double().mean(1) <= 0.51).all()


def test_auxiliary_records_follow_the_candidates_labels():
    y, rng = torch.arange(1000) % 10, torch.Generator().manual_seed(0)
    like = torch.tensor([0] * 30 + [1] * 10)
    found = y[fill(like, y, 80, 0.0, rng)]
    assert found.bincount(minlength=10).tolist() == [60, 20, 0, 0, 0, 0, 0, 0, 0, 0]
    short = y[fill(like, y, 80, 0.5, rng)].bincount(minlength=10)  # class 0 has 50 to give; others fill in
    assert int(short.sum()) == 80
    assert int(short[0]) == 50
    assert int(short[1]) >= 20
    assert len(fill(like, y, 2000, 0.5, rng).unique()) == 500, "no more than there are"


def test_too_few_auxiliary_records_are_repeated_and_said(tiny, tmp_path):
    run(tiny("fedavg", aux=0.02, model="mlp", rounds=1, partition="iid"), out=tmp_path / "a")
    (result,) = named(attack_run(tmp_path / "a", attacks=[{"attack": "rmia", "shadows": 2}], clients=[0]), "rmia")
    assert "too few auxiliary records" in result.notes[0]
    scene, _ = scene_of(tmp_path / "a")
    picks, _, repeated = draw(scene, 2, online=False)
    assert repeated
    assert [len(pick) for pick in picks] == [scene._world.count(0)] * 2


def test_the_count_is_estimated_where_the_view_shows_none(leaky):
    scene, _ = scene_of(leaky, threat="outsider")
    scene.released = lambda kind: []
    assert records(scene) == pytest.approx(scene._world.count(0), abs=2)


# --- on digits -------------------------------------------------------------------------------------------------------


def named(results, *wanted):
    return [result for result in results if result.attack in wanted]


def auc(result):
    return result.pooled.auc


def few(name, shadows=4):
    return {"attack": name, "shadows": shadows}


@pytest.mark.long
def test_an_over_trained_fedavg_is_given_away(leaky):
    """Every interval is above 1/2, and shadows tell more than the loss does."""
    found = named(attack_run(leaky, attacks=["loss", few("lira"), few("rmia")]), "loss", "lira", "rmia")
    assert len(found) == 3
    by_name = {result.attack: auc(result) for result in found}
    assert all(value.low > 0.5 for value in by_name.values()), by_name
    assert by_name["lira"].low > by_name["loss"].value
    assert by_name["rmia"].value > by_name["loss"].value


def test_white_box_features_and_more_rounds_tell_too(leaky):
    """Gradient norms tell members. Over all uploads LiRA is no worse than over the last one: an upload before it has
    shadows of its own."""
    many = [{"attack": "lira", "shadows": 4, "rounds": 3}, "gradient_norm"]
    lira, norm = named(attack_run(leaky, attacks=many), "lira", "gradient_norm")
    assert norm.leak
    (one,) = named(attack_run(leaky, attacks=[few("lira")]), "lira")
    assert auc(lira).value > auc(one).value - 0.02


def test_a_model_that_saw_no_candidate_gives_nothing_away(leaky):
    """A shadow without candidates in the target's place: what is in an attack's own draws must not look like a leak."""
    scores, truth = [], []
    for k in range(2):
        scene, member = scene_of(leaky, k)
        entry, field, _ = last_upload(scene)
        picks, _, _ = draw(scene, 2, online=False)
        target = scene.shadows(entry, field, picks)[0][0].double()
        _, shadows = find("lira", "attacks")(shadows=4).attacked_rounds(scene, online=True)[-1]
        phi, of_shadows = confidences(target, shadows.logits, scene.y)
        scores.append(likelihood_ratio(phi, of_shadows, shadows.member[:, : len(scene.y)], each=False))
        truth.append(member)
    found = membership_scores(torch.cat(scores).numpy(), torch.cat(truth).numpy()).auc
    assert found.low < 0.5 < found.high


@pytest.mark.long
def test_under_dp_sgd_the_loss_gives_nothing_away(private, leaky):
    (result,) = named(attack_run(private, attacks=["loss"]), "loss")
    (without,) = named(attack_run(leaky, attacks=["loss"]), "loss")
    assert auc(result).low < 0.5 < auc(result).high
    assert auc(result).value < auc(without).value


@pytest.mark.slow
def test_under_dp_sgd_shadows_give_nothing_away(private):
    """The shadows train with DP-SGD as the client did, with noise of their own."""
    for result in named(attack_run(private, attacks=[few("lira"), few("rmia")]), "lira", "rmia"):
        assert auc(result).low < 0.5 < auc(result).high, result.attack


@pytest.mark.long
def test_all_of_them_run_on_a_run_and_say_the_same_again(leaky):
    """Also where the shadows are trained anew."""
    specs = [{"attack": name, **QUICK.get(name, {})} for name in (*QUERY, *SHADOW)]

    def once():
        found = named(attack_run(leaky, attacks=specs, clients=[1]), *QUERY, *SHADOW)
        return [result.model_copy(update={"wall_s": 0.0}) for result in found]

    first = once()
    assert [result.attack for result in first] == [*QUERY, *SHADOW]
    assert all(result.ran for result in first)
    shutil.rmtree(leaky / "shadows")
    assert once() == first


def test_an_attack_tells_how_far_it_is(leaky):
    """Baselines first, then the attack by client and shadow; never backwards, and never beyond the whole."""
    shutil.rmtree(leaky / "shadows", ignore_errors=True)
    told = []
    attack_run(leaky, attacks=[few("lira_offline")], watch=lambda done, whole, what: told.append((done, whole, what)))
    shares = [done / whole for done, whole, _ in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    words = [what for _, _, what in told]
    assert "blind_pixels, client 1" in words
    assert "lira_offline, client 1: 4 of 4 shadows at a time" in words
    third, whole = next((done, whole) for done, whole, what in told if what == "lira_offline, client 1")
    assert (third, whole) == (3.5, 4), "three baselines, and the first of two clients"


def test_the_attacks_share_one_set_of_offline_shadows(leaky):
    shutil.rmtree(leaky / "shadows", ignore_errors=True)
    attack_run(leaky, attacks=[{"attack": name, **QUICK[name]} for name in SHADOW[1:]], clients=[0])
    assert len(list((leaky / "shadows").iterdir())) == 1


def by_scipy(target, shadows, inside, y):
    """LiRA's Algorithm 1 in NumPy and SciPy, a candidate at a time, with one deviation for all: (candidates,)."""
    phi = [np.log(p) - np.log1p(-p) for p in (scipy.special.softmax(z, -1) for z in (target, shadows))]
    at, of_shadows = (of.take(range(len(y)), -2)[..., np.arange(len(y)), y] for of in phi)
    centred = {True: [], False: []}
    for j in range(len(y)):
        for side in (True, False):
            some = of_shadows[inside[:, j] == side, j]
            centred[side].append((some.mean(), some - some.mean()))
    deviation = {
        side: np.sqrt(sum((rest**2).sum() for _, rest in of) / sum(len(rest) - 1 for _, rest in of))
        for side, of in centred.items()
    }
    density = {
        side: [scipy.stats.norm(mean, deviation[side]).logpdf(at[j]) for j, (mean, _) in enumerate(of)]
        for side, of in centred.items()
    }
    return np.array(density[True]) - np.array(density[False])


def plainly_trained(w, arch, x, y, *, E, B, eta):
    """The client's update in plain PyTorch, from the weights that it was sent."""
    model = build(arch, shape=tuple(x.shape[1:]), classes=10)
    model.load_state_dict(w)
    opt = torch.optim.SGD(model.parameters(), lr=eta)
    for _ in range(E):
        for rows in torch.randperm(len(y)).split(B):
            opt.zero_grad()
            nn.functional.cross_entropy(model.train()(x[rows]), y[rows]).backward()
            opt.step()
    return model.eval()


def lira_of(folder, k, shadows):
    """Client k's candidates: LiRA's scores, the target's logits, the shadows, the scene and the truth."""
    scene, member = scene_of(folder, k)
    target, made = find("lira", "attacks")(shadows=shadows, variance="global").attacked_rounds(scene, online=True)[-1]
    phi, of_shadows = confidences(target, made.logits, scene.y)
    scores = likelihood_ratio(phi, of_shadows, made.member[:, : len(scene.y)], each=False)
    return scores.numpy(), target.numpy(), made, scene, member.numpy()


def test_lira_agrees_with_an_independent_implementation(leaky):
    for k in range(2):
        ours, target, made, scene, _ = lira_of(leaky, k, shadows=4)
        inside = made.member[:, : len(scene.y)].numpy()
        theirs = by_scipy(target, made.logits.numpy(), inside, scene.y.numpy())
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_shadows_in_plain_pytorch_give_the_same_auc(leaky):
    """64 shadows that hold the same records as ours, trained by another loop in another order: to 0.01."""
    ours, theirs, truth = [], [], []
    for k in range(2):
        scores, target, made, scene, member = lira_of(leaky, k, shadows=64)
        (sent,) = scene.view.entries(direction="down", client=k, t=1)
        x, y = scene.pool
        with torch.random.fork_rng():
            torch.manual_seed(k)
            models = [plainly_trained(sent["w"], "mlp", x[held], y[held], **SETTING["set"]) for held in made.member]
        with torch.no_grad():
            answers = torch.stack([model(scene.x).double() for model in models]).numpy()
        ours.append(scores)
        theirs.append(by_scipy(target, answers, made.member[:, : len(scene.y)].numpy(), scene.y.numpy()))
        truth.append(member)
    mine, plain = (roc_auc_score(np.concatenate(truth), np.concatenate(scores)) for scores in (ours, theirs))
    assert mine > 0.7
    assert mine == pytest.approx(plain, abs=0.01)


def test_the_auc_is_scikit_learns(leaky):
    scores, truth = [], []
    for k in range(2):
        scene, member = scene_of(leaky, k)
        scores.append(find("entropy", "attacks")().run(scene).scores)
        truth.append(member)
    (result,) = named(attack_run(leaky, attacks=["entropy"]), "entropy")
    wanted = roc_auc_score(torch.cat(truth).numpy(), torch.cat(scores).numpy())
    assert auc(result).value == pytest.approx(wanted, abs=1e-12)


def test_label_only_stands_on_the_gap_attack_of_art(leaky):
    """ART's rule-based attack calls a record a member if it is rightly classified, so that its true-positive rate is
    the accuracy on members and its false-positive rate that on the others. Those are the records with a distance above
    0."""
    membership = pytest.importorskip("art.attacks.inference.membership_inference", reason="needs ART")
    classification = pytest.importorskip("art.estimators.classification", reason="needs ART")
    scene, member = scene_of(leaky)
    model = target_model(scene)
    theirs = membership.MembershipInferenceBlackBoxRuleBased(
        classification.PyTorchClassifier(model, nn.CrossEntropyLoss(), scene.shape, scene.classes, device_type="cpu")
    )
    called = theirs.infer(scene.x.numpy(), scene.y.numpy()).ravel().astype(bool)
    ours = LabelOnly(queries=16).run(scene).scores.numpy() > 0
    assert (ours == called).all()
    right = (model(scene.x).argmax(1) == scene.y).numpy()
    assert called[member].mean() == right[member].mean()
    assert called[~member].mean() == right[~member].mean()
    assert 0 < right[~member].mean() < 1


def test_true_positives_at_low_false_positives_are_arts(leaky):
    privacy = pytest.importorskip("art.metrics.privacy", reason="needs ART")
    rng = np.random.default_rng(0)
    member = np.arange(2000) % 2 == 0
    scores = rng.normal(size=2000) + member
    for at in membership_scores(scores, member).tpr_at_fpr:
        ((fpr, tpr, _),) = privacy.get_roc_for_fpr(scores, member.astype(int), targeted_fpr=at.fpr)
        assert at.value == pytest.approx(tpr)
        assert at.fpr_measured == pytest.approx(fpr)


# --- who may see what ------------------------------------------------------------------------------------------------


def test_no_attack_sees_who_is_a_member(leaky, monkeypatch):
    """The scene has no such thing, and nothing that an attack calls asks the world for it."""
    for name in (*QUERY, *SHADOW):
        scene, member = scene_of(leaky)
        shown = {key: getattr(scene, key) for key in dir(scene) if key[0] != "_" and key != "own"}
        assert not [key for key in shown if "member" in key]
        for value in shown.values():
            if isinstance(value, torch.Tensor) and value.shape == member.shape:
                assert not torch.equal(value.bool(), member)
                assert not torch.equal(value.bool(), ~member)
        with monkeypatch.context() as patch:
            for secret in ("members", "nonmembers", "validation", "candidates", "count"):
                patch.setattr(World, secret, lambda *_, secret=secret: pytest.fail(f"asked for {secret}"))
            claims = find(name, "attacks")(**QUICK.get(name, {})).run(scene)
        assert claims.scores.shape == member.shape


def test_without_the_upload_models_are_queried_and_no_shadows_made(leaky):
    results = attack_run(leaky, attacks=["loss", "entropy", *SHADOW], threat="outsider")
    for result in named(results, "loss", "entropy"):
        assert result.ran, "there is the published model"
    for result in named(results, *SHADOW):
        assert not result.ran
        assert "the outsider sees no weights" in result.reason


def test_parts_of_a_model_have_no_shadows(tiny, tmp_path):
    """heterofl with static batch norm uploads parameters and keeps the statistics."""
    run(tiny("heterofl", model="cnn_bn@0.25", rounds=1, eval_clients=False), out=tmp_path / "a")
    lira, loss = named(attack_run(tmp_path / "a", attacks=["lira", "loss"]), "lira", "loss")
    assert "uploads parts of its model" in lira.reason
    assert loss.ran


def test_a_method_that_fails_in_a_replay_is_a_reason(leaky, monkeypatch):
    def refuse(self, scene, online, **_):
        raise ThreatError("client 0's train of round 1 cannot be replayed")

    monkeypatch.setattr(find("lira", "attacks"), "attacked_rounds", refuse)
    (result,) = named(attack_run(leaky, attacks=["lira"]), "lira")
    assert not result.ran
    assert "cannot be replayed" in result.reason


def test_every_attack_is_described_in_a_line_of_its_own():
    from fedaudit.cli.listing import listing

    rows = {row["name"]: row for row in listing("attacks")}
    texts = [rows[name]["what it is"] for name in (*QUERY, *SHADOW)]
    assert len(set(texts)) == 8
    assert all(20 < len(text) < 250 for text in texts)
    assert "gamma=None" in rows["rmia"]["settings"]
    assert not [name for name in names("attacks") if name.startswith("_")]


def test_a_wrong_setting_is_named(leaky):
    with pytest.raises(SettingError, match="setting of rmia a = 2"):
        attack_run(leaky, attacks=[{"attack": "rmia", "a": 2}])


# --- several rounds --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rounds") / "run"
    run(out=folder, **{**SETTING, "rounds": 2, "clients": 1, "aux": 0.9})
    return folder


def test_scores_are_the_mean_over_all_uploads_with_the_last_beside(two_rounds):
    """The mean of minus the loss under both uploads, computed here; with rounds = 1 the last upload alone."""
    scene, _ = scene_of(two_rounds)
    of_each = []
    for entry, field in scene.released("weights"):
        model = scene.model("mlp", entry[field]).eval()
        of_each.append(-nn.functional.cross_entropy(model(scene.x).double(), scene.y, reduction="none"))
    first, second = of_each
    assert not torch.allclose(first, second)
    claims = find("loss", "attacks")().run(scene)
    assert torch.allclose(claims.scores, (first + second) / 2, atol=1e-6)
    assert torch.allclose(claims.last, second, atol=1e-6)
    alone = find("loss", "attacks")(rounds=1).run(scene)
    assert torch.allclose(alone.scores, second, atol=1e-6)
    assert alone.last is None


def test_the_record_has_the_last_round_beside_all(two_rounds):
    """Its AUC is that of an attack on the last round alone. Scoring anew gives it, too."""
    over = ("loss", "lira", "combined")
    specs = [{"attack": name, **QUICK.get(name, {})} for name in over]
    every = named(attack_run(two_rounds, attacks=specs), *over)
    again = {result.attack: result.last_round for result in rescore(two_rounds)}
    alone = named(attack_run(two_rounds, attacks=[{**spec, "rounds": 1} for spec in specs]), *over)
    for both, one in zip(every, alone, strict=True):
        assert both.last_round == one.pooled.auc, both.attack
        assert again[both.attack] == one.pooled.auc, both.attack
        assert one.last_round is None
        assert both.pooled.auc != one.pooled.auc, both.attack


def test_measurements_of_the_combined_attack_by_hand():
    """Two references that do not hold the record, at p = 1/2 and 1/4 of two classes, and one that holds it, at 0.99.

    phi of the references is 0 and -ln 3: mean -ln 3 / 2, variance (ln 3)^2 / 2. The target's p = 3/4 has phi = ln 3.
    The mean of p without the record is 3/8.
    """
    ln3 = math.log(3)
    references = torch.stack([logits((0.5, 0.5)), logits((0.25, 0.75)), logits((0.99, 0.01))])
    holds = torch.tensor([[False], [False], [True]])
    found = measured(logits((0.75, 0.25)), references, holds, torch.tensor([0]))[0]
    ratios = [math.log(0.75 / (((1 + a) * 0.375 + 1 - a) / 2)) for a in (0.0, 0.3, 0.6, 1.0)]
    assert found.tolist() == pytest.approx([ln3, 1.5 * ln3 / (ln3 / math.sqrt(2)), *ratios], abs=1e-9)
    one = measured(logits((0.75, 0.25)), references, torch.tensor([[True], [False], [True]]), torch.tensor([0]))
    assert one.isnan().all(), "one reference has no spread"


def test_shadows_teach_the_weights():
    """A measurement that tells members gets the say, one that does not gets none, and the sign is learned."""
    rng = torch.Generator().manual_seed(0)
    member = torch.arange(400) % 2 == 0
    tells, noise = torch.randn(400, generator=rng).double() - 2 * member, torch.randn(400, generator=rng).double()
    asked = torch.tensor([[-3.0, 0.0], [3.0, 0.0], [-3.0, 5.0]], dtype=torch.float64)
    scores = learned(torch.stack([tells, noise], 1), member, asked)
    assert scores[0] > 2 > -2 > scores[1]
    assert abs(scores[2] - scores[0]) < 2
    with pytest.raises(ThreatError, match="too few auxiliary records"):
        learned(torch.stack([tells, noise], 1), torch.ones(400, dtype=torch.bool), asked)


@pytest.mark.long
def test_the_combined_attack_tells_what_its_parts_tell(two_rounds):
    results = attack_run(two_rounds, attacks=[few("combined", 8), few("lira_offline", 8)])
    combined, offline = named(results, "combined", "lira_offline")
    assert combined.leak
    assert auc(combined).value > auc(offline).value - 0.03


def test_one_variance_for_all_records_of_the_combined_attack():
    """Record 0: two references, phi 0 and 2, squares 2. Record 1: three, phi 0, 3 and 6, squares 18. The variance is
    (2 + 18) / (1 + 2), and a record with one reference gives nothing to it."""

    def at(phi):
        return torch.tensor([phi, 0.0], dtype=torch.float64)

    references = torch.stack(
        [torch.stack([at(a), at(b), at(c)]) for a, b, c in ((0.0, 0.0, 9.0), (2.0, 3.0, 0.0), (99.0, 6.0, 0.0))]
    )
    holds = torch.tensor([[False, False, False], [False, False, True], [True, False, True]])
    found = measured(torch.stack([at(3.0)] * 3), references, holds, torch.zeros(3, dtype=torch.long))
    deviation = math.sqrt(20 / 3)
    assert found[:2, 0].tolist() == pytest.approx([3.0, 3.0])
    assert found[:2, 1].tolist() == pytest.approx([(3 - 1) / deviation, 0.0])
    assert found[2].isnan().all()


def test_the_combined_attack_takes_offline_shadows(monkeypatch):
    """Shadows that hold candidates would teach by the truth. The last round is told where there are several."""
    asked = []

    def rounds(self, scene, online):
        asked.append(online)
        return [("first", SimpleNamespace(notes=("b",))), ("last", SimpleNamespace(notes=("a", "b")))]

    monkeypatch.setattr(Combined, "attacked_rounds", rounds)
    monkeypatch.setattr(Combined, "_scores", lambda self, rounds: torch.tensor([float(len(rounds))]))
    found = Combined().run(None)
    assert asked == [False]
    assert (found.scores.item(), found.last.item(), found.notes) == (2.0, 1.0, ("a", "b"))


def test_constants_of_rmia_are_tried_on_shadows_that_stand_in_for_the_target(monkeypatch):
    """Three shadows, three records. For the first, records 0 and 1 were left out by others: by shadow 1 at 0.2, and by
    shadows 1 and 2 at 0.4 and 0.8; record 2 by nobody. With a = 0.5 p(x) is (1.5 p_out + 0.5) / 2."""
    seen, scores = [], []
    monkeypatch.setattr(rmia, "dominated", lambda ratio, z, gamma: seen.append((ratio.tolist(), z.tolist())) or ratio)
    monkeypatch.setattr(rmia, "finer", lambda share, ratio, n: scores.append(n) or share)
    p = torch.tensor([[0.9, 0.1, 0.5], [0.2, 0.4, 0.5], [0.3, 0.8, 0.5]]).double()
    member = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 0, 1]]).bool()
    assert rmia.tuned(p, member, (2.0,), (0.5,)) == (2.0, 0.5)
    first = [0.9 / (1.5 * 0.2 + 0.5) * 2, 0.1 / (1.5 * 0.6 + 0.5) * 2]
    assert seen[0] == (pytest.approx(first), pytest.approx(first[1:])), (
        "held against the one that it was not trained on"
    )
    third = [0.3 / (1.5 * 0.2 + 0.5) * 2, 0.8 / (1.5 * 0.25 + 0.5) * 2]
    assert seen[1] == (pytest.approx(third), pytest.approx(third[1:]))
    assert len(seen) == 2, "the second was trained on none of those that are known"
    assert scores == [1, 1]
    assert rmia.tuned(p[:1], member[:1], (2.0,), (0.5,)) == (2.0, 0.3), "nobody stands in"
