"""Attacks on what was released, label inference, and the blind baselines that they are held against."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

import fedaudit
from fedaudit import Down, Method, Record, Up, private
from fedaudit.attack.attack_run import attack_run
from fedaudit.attack.claims import Attacked, Claims, Features, Groups
from fedaudit.attack.membership import auc, auc_difference
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attack.score import learned, settled
from fedaudit.attack.verdict import judge, judge_blind
from fedaudit.attacks.baselines import blind_pixels
from fedaudit.attacks.membership import embedding_match, logit_gap, logit_lira, update_alignment
from fedaudit.attacks.property import label_histogram
from fedaudit.attacks.shared._view import confidence, inputs_of, nearest, received, uploaded
from fedaudit.registry import find
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.runtime.world import World

SMALL = {"dataset": "digits", "model": "mlp", "eval_clients": False, "aux": 0.5, "holdout": 0.45, "validation": 0.05}


def by_name(results):
    return {r.attack: r for r in results}


def attacked(folder, *attacks, **options):
    """What the named attacks found, in order."""
    return attack_run(folder, attacks=list(attacks), **options)[: len(attacks)]


def scene_of(folder, target=0, threat="server"):
    run = RunFolder(folder)
    x, y = run.world.nonmembers(target)
    return Scene(run, run.transcript.view(threat), target, x, y), run.world


# --- paired curves ----------------------------------------------------------------------------------------------------


def test_the_difference_of_two_aucs_by_hand():
    """Members score 4, 1, 3 under a and 4, 1, 2 under b; non-members 2, 0 under a and 3, 0 under b.

    Shares of non-members below the members: a 1, 1/2, 1; b 1, 1/2, 1/2. Their differences 0, 0, 1/2 have mean 1/6 and
    variance 1/12. Shares of members above the non-members: a 2/3, 1; b 1/3, 1; differences 1/3, 0 of variance 1/18.
    Variance of the difference: 1/12/3 + 1/18/2 = 1/18. Taken for independent the two would have 1/18 + 5/36 = 7/36.
    """
    member = [1, 1, 1, 0, 0]
    found = auc_difference([4, 1, 3, 2, 0], [4, 1, 2, 3, 0], member)
    assert found.value == pytest.approx(1 / 6)
    half = 1.959964 * math.sqrt(1 / 18)
    assert (found.low, found.high) == pytest.approx((1 / 6 - half, 1 / 6 + half), abs=1e-6)


def test_the_paired_interval_is_the_bootstraps():
    rng = np.random.default_rng(0)
    member = np.arange(500) < 200
    common = rng.normal(size=500) + 0.8 * member
    a, b = common + 0.5 * rng.normal(size=500), common + 0.7 * rng.normal(size=500)
    draws = []
    for _ in range(600):
        rows = np.concatenate([rng.integers(0, 200, 200), rng.integers(200, 500, 300)])
        draws.append(auc_difference(a[rows], b[rows], member[rows]).value)
    found = auc_difference(a, b, member)
    assert found.value == pytest.approx(roc_auc_score(member, a) - roc_auc_score(member, b))
    assert (found.high - found.low) / (2 * 1.959964) == pytest.approx(np.std(draws), rel=0.1)
    alone = [auc(s, member).high - auc(s, member).low for s in (a, b)]
    assert found.high - found.low < 0.7 * math.hypot(*alone), "the two go together, and that counts"


def test_two_attacks_without_a_wrong_pair_are_not_certain():
    member = np.arange(40) < 20
    perfect = auc_difference(member, np.zeros(40), member)
    assert perfect.value == 0.5
    assert 0.15 < perfect.low < 0.45 < perfect.high < 1
    same = auc_difference(member, member, member)
    assert same.low < 0 == same.value < same.high
    assert auc_difference([1, 0], [0, 1], [1, 0]).interval.startswith("none")


# --- blind baselines and verdicts -------------------------------------------------------------------------------------


def part(claims, member, k=0):
    return Attacked(k, claims, torch.zeros(len(member), 1), torch.zeros(len(member), dtype=torch.long), member)


def coin_flips(rng, n, classes):
    groups = torch.from_numpy(rng.integers(0, classes, n))
    member = torch.zeros(n, dtype=torch.bool)
    member[torch.from_numpy(rng.permutation(n)[: n // 2])] = True
    return groups, member


@pytest.mark.parametrize(("n", "classes"), [(40, 10), (200, 10), (200, 100)])
def test_what_is_learned_of_groups_is_at_chance_if_membership_is(n, classes):
    """Also where a class has few candidates, or two. Both halves scored by each other fail here: the interval of their
    AUC is too narrow."""
    rng = np.random.default_rng(1)
    found, alarms = [], 0
    for _ in range(300):
        groups, member = coin_flips(rng, n, classes)
        found.append(auc(learned(groups, member).numpy(), member.numpy()).value)
        alarms += judge_blind({"prior": [part(Groups(groups), member)]})["prior"].split_broken
    assert np.mean(found) == pytest.approx(0.5, abs=3 * np.std(found) / math.sqrt(300))
    assert alarms <= 8, "one-sided at 99 %: three of 300 come by chance, more than eight in 3 of 1000 such tests"


def test_a_group_that_tells_is_found():
    member = torch.arange(80) < 40
    scores = learned(member.long() * 3 + 1, member)
    assert auc(scores.numpy(), member.numpy()).value == pytest.approx(7 / 8)  # a quarter of the pairs is unjudged
    assert set(scores[member].tolist()) == {21 / 22, 1 / 2}, "20 of 20 in the other half, and one of each added"
    assert judge_blind({"prior": [part(Groups(member.long()), member)]})["prior"].split_broken


def test_only_what_beats_chance_and_the_blind_is_a_leak():
    rng = np.random.default_rng(2)
    member = torch.arange(600) < 300
    tell, noise = torch.from_numpy(rng.normal(size=(2, 600)))
    blind = {"content": [part(Claims(tell + member), member)]}
    assert judge_blind(blind)["content"].split_broken

    def verdict(scores, against, broken=False):
        return judge("mine", [part(Claims(scores), member)], against, broken)

    same = verdict(tell + member + 0.1 * noise, blind, True)
    assert not same.leak
    assert "not above the blind baseline content" in same.verdict
    assert "broken" in same.verdict
    assert same.split_broken
    assert verdict(tell + 2 * member, blind).leak
    guess = {"content": [part(Claims(noise), member)]}
    assert verdict(tell + member, guess).leak
    chance = verdict(tell, guess)
    assert not chance.leak
    assert "not above chance" in chance.verdict
    assert verdict(tell + member, {}).against_blind == {}


def test_a_dithered_side_is_told_by_its_pixels(whole_forest):
    """Non-members with a little noise on each pixel: labels, means and distances are those of an honest split. The
    forest judges one half of the candidates, so that a perfect tell has an AUC of 7/8."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 17, (200, 64), generator=rng) / 8 - 1
    member = torch.arange(200) % 2 == 0
    dithered = x + 0.02 * torch.rand(x.shape, generator=rng) * ~member[:, None]
    for images, broken in ((x, False), (dithered, True)):
        claims = settled(Features(blind_pixels.looks(images)), member)
        found = judge_blind({"pixels": [part(claims, member)]})["pixels"]
        assert found.split_broken is broken
    assert auc(claims.scores.numpy(), member.numpy()).value == pytest.approx(7 / 8)
    assert (claims.scores == 0.5).sum() == 100


def test_a_ranking_that_is_reliably_wrong_shows_a_broken_split_too():
    member = torch.arange(200) < 100
    scores = -(member.double() + torch.linspace(0, 1, 200).double())
    assert judge_blind({"content": [part(Claims(scores), member)]})["content"].split_broken


@pytest.fixture(scope="module")
def skewed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases") / "skewed"
    fedaudit.run(
        method="fedavg", clients=4, partition="dirichlet:0.3", rounds=2, set={"E": 1, "B": 8, "eta": 0.05},
        out=folder, **{**SMALL, "aux": 0.2},
    )  # fmt: skip
    return folder


def test_blind_baselines_always_run_and_are_at_chance_on_the_honest_split(skewed, whole_forest):
    results = by_name(attack_run(skewed, attacks=["loss"]))
    assert set(results) == {"loss", "blind_nearest", "blind_pixels", "blind_prior"}
    for name in ("blind_nearest", "blind_pixels", "blind_prior"):
        assert results[name].blind
        assert not results[name].split_broken
        assert "leak" not in results[name]
    assert set(results["loss"].against_blind) == {"blind_nearest", "blind_pixels", "blind_prior"}
    assert isinstance(results["loss"].leak, bool)
    assert results["loss"].verdict.endswith(".")
    assert [r.attack for r in attack_run(skewed, attacks=["loss"])] == ["loss"], "the record holds the blind ones"
    assert set(by_name(read_record(skewed).attacks)) == set(results)
    gaps = by_name(attack_run(skewed, attacks=["loss"], clients=[1]))["loss"]
    assert gaps.clients == [1]
    assert set(gaps.against_blind) == {"blind_nearest", "blind_pixels", "blind_prior"}


def test_baselines_by_themselves_are_judged(skewed):
    results = attack_run(skewed, attacks=["blind_prior", "blind_nearest"], clients=[1])
    assert [r.attack for r in results[:2]] == ["blind_prior", "blind_nearest"]
    assert all("split is broken" in r.verdict for r in results), "or that there is no sign of it"


def test_a_split_that_gives_members_other_classes_is_caught(skewed, monkeypatch):
    rows = World.members, World.nonmembers

    def of_classes(which, low):
        def get(world, k):
            x, y = which(world, k)
            return x[(y < 5) == low], y[(y < 5) == low]

        return get

    monkeypatch.setattr(World, "members", of_classes(rows[0], True))
    monkeypatch.setattr(World, "nonmembers", of_classes(rows[1], False))
    results = by_name(attack_run(skewed, attacks=["loss", "blind_prior", "blind_nearest"]))
    assert results["blind_prior"].split_broken
    assert results["blind_prior"].verdict.startswith("The audit split is broken")
    assert results["loss"].split_broken
    assert "split is broken" in results["loss"].verdict
    from fedaudit.cli.listing import summary

    assert any("The audit split is broken" in line for line in summary(read_record(skewed)))


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_the_likelihood_ratio_by_hand():
    """Rows 0 and 2 in one dimension, sigma 1, the candidate at 0, auxiliary records at 1 and -1.

    N(0; 0, 1) / q(0) = 1 / e^-0.5; N(2; 0, 1) / q(2) = e^-2 / ((e^-0.5 + e^-4.5) / 2); the ratio is their mean. In two
    rounds with equal releases each row's quotient counts squared. A candidate that no row can be comes last.
    """
    rows, aux = torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [-1.0]])
    every = torch.ones(2, 2, dtype=torch.bool)
    release = embedding_match.Uploaded(rows, None, torch.tensor([[0.0], [0.0]]), aux, every, 1.0)
    quotients = [math.exp(0.5), 2 * math.exp(-2) / (math.exp(-0.5) + math.exp(-4.5))]
    match = torch.tensor([[True, True], [False, False]])
    once = embedding_match.log_ratio([release], match)
    assert float(once[0]) == pytest.approx(math.log(sum(quotients) / 2), abs=1e-6)
    assert once[1] < once[0]
    twice = embedding_match.log_ratio([release, release], match)
    assert float(twice[0]) == pytest.approx(math.log(sum(q**2 for q in quotients) / 2), abs=1e-6)


@pytest.fixture(scope="module")
def dffke(tmp_path_factory):
    base = tmp_path_factory.mktemp("dffke")

    def run(name, **privacy):
        folder = base / name
        fedaudit.run(  # a run that is there is not repeated
            resume=True,
            method="dffke", clients=2, partition="iid", rounds=2, set={**find("dffke").quick, "h": 8}, privacy=privacy,
            out=folder, **{**SMALL, "aux": 0.7},
        )  # fmt: skip
        return folder

    return run


@pytest.mark.long
def test_embeddings_without_noise_give_members_away_and_with_it_do_not(dffke):
    (found,) = attacked(dffke("plain"), "embedding_match")
    assert found.pooled.auc.value > 0.99
    assert found.leak
    noisy = dffke("noisy", embeddings={"epsilon": 1.0, "sensitivity": "clip:1.0"})
    (found,) = attacked(noisy, "embedding_match")
    assert not found.leak
    assert found.pooled.auc.low < 0.5 < found.pooled.auc.high
    little = dffke("little", embeddings={"noise_multiplier": 0.005, "sensitivity": "clip:1.0"})
    (found,) = attacked(little, "embedding_match")
    assert found.leak, "the noise is too little to hide anybody, and the ratio uses what it leaves"


def test_a_peer_and_an_outsider_see_no_embeddings(skewed):
    for threat in ("peer:1", "outsider"):
        (found,) = attacked(skewed, "embedding_match", threat=threat)
        assert not found.ran
        assert "sees no embeddings of client 0" in found.reason


# --- updates ----------------------------------------------------------------------------------------------------------


def test_the_one_tailed_test_by_hand():
    """Two others at 0 and 2: mean 1, variance 2. The target at 1 + sqrt 2 lies one standard deviation above."""
    measured = torch.tensor([[1 + math.sqrt(2), 1.0], [0.0, 0.0], [2.0, 2.0]])
    assert update_alignment.one_tailed(measured).tolist() == pytest.approx([0.8413447, 0.5], abs=1e-6)


def test_the_shrunken_null_by_hand():
    """Two others with means 1, 1, 7 and variance 2 each. The variance of the means is 12, of which 2 / 2 is noise: the
    weight of a candidate's own mean is 11 / 12, and 1 / 12 that of the mean of all, 3."""
    null = [[0.0, 0.0, 6.0], [2.0, 2.0, 8.0]]
    found = update_alignment.above_null(torch.tensor([[2.0, 7 / 6, 0.0], *null]))
    deviation = math.sqrt(2 * (1 + 11 / 24))
    assert found.tolist() == pytest.approx([(2 - 7 / 6) / deviation, 0, (0 - 20 / 3) / deviation], abs=1e-6)


def test_means_that_are_noise_alone_are_all_one():
    """Where the others' means differ by less than their noise, every candidate has the mean of all."""
    measured = torch.tensor([[1.0, 1.0], [0.0, 2.0], [2.0, 0.0]])
    assert update_alignment.above_null(measured).tolist() == pytest.approx([0, 0], abs=1e-6)


def test_the_cosine_is_that_of_the_record_that_was_trained_on():
    """One step of gradient descent on one record has cosine 1 with that record's gradient."""
    from fedaudit.training import models

    torch.manual_seed(0)
    model = models.build("mlp", shape=(1, 8, 8), classes=10)
    x, y = torch.randn(5, 1, 8, 8), torch.arange(5)
    loss = torch.nn.functional.cross_entropy(model(x[2:3]), y[2:3])
    step = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    found = update_alignment.cosines(model, x, y, torch.stack([step, -step]))
    assert found.shape == (2, 5)
    assert float(found[0, 2]) == pytest.approx(1, abs=1e-5)
    assert int(found[0].argmax()) == 2
    assert torch.allclose(found[0], -found[1])


@pytest.fixture(scope="module")
def overtrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases") / "overtrained"
    fedaudit.run(
        method="fedavg", clients=4, partition="iid", rounds=2, set={"E": 15, "B": 8, "eta": 0.2}, out=folder, **SMALL
    )
    return folder


@pytest.mark.long
def test_updates_of_an_overtrained_model_give_members_away(overtrained):
    measures = ("cosine", "loss", "both")
    for found in attacked(overtrained, *({"attack": "update_alignment", "measure": m} for m in measures)):
        assert found.leak, found.verdict
    published = {"attack": "update_alignment", "null": "own"}
    (found,) = attacked(overtrained, published)
    assert found.leak, found.verdict
    (found,) = attacked(overtrained, "update_alignment", threat="peer:2")
    assert not found.ran
    assert "the null distribution" in found.reason


def test_the_direction_of_updates_needs_no_other_client(tmp_path):
    """One client alone has no null distribution, and the cosines of its own updates tell its records."""
    few = {**SMALL, "clients": 1, "partition": "iid", "aux": 0.9}
    fedaudit.run(method="fedavg", rounds=2, set={"E": 15, "B": 8, "eta": 0.2}, out=tmp_path / "a", **few)
    alone, aligned = attacked(tmp_path / "a", "gradient_cosine", "update_alignment")
    assert not aligned.ran
    assert alone.leak, alone.verdict
    assert alone.last_round is not None


def test_cosines_are_those_of_each_round(overtrained):
    """The mean over rounds, computed here from the messages."""
    from fedaudit.attack.attack_run import candidates_of
    from fedaudit.attack.scene import Scene
    from fedaudit.attacks.membership.gradient_cosine import GradientCosine
    from fedaudit.runtime.folder import RunFolder

    opened = RunFolder(overtrained)
    x, y, _ = candidates_of(opened.world, 0)
    scene = Scene(opened, opened.transcript.view("server"), 0, x, y)
    by_round = []
    for t in (1, 2):
        down = next(e for e in opened.transcript.entries() if (e.direction, e.client, e.round) == ("down", 0, t))
        up = next(e for e in opened.transcript.entries() if (e.direction, e.client, e.round) == ("up", 0, t))
        start, end = (scene.model("mlp", next(m[n] for n in m.fields if m.state_shapes(n))) for m in (down, up))
        moved = torch.cat(
            [(a - b).detach().flatten() for a, b in zip(start.parameters(), end.parameters(), strict=True)]
        )
        found = []
        for one, label in zip(x[:3], y[:3], strict=True):
            start.zero_grad()
            torch.nn.functional.cross_entropy(start.eval()(one[None]), label[None]).backward()
            slope = torch.cat([p.grad.flatten() for p in start.parameters()])
            found.append(float(torch.dot(moved, slope) / moved.norm() / slope.norm()))
        by_round.append(found)
    claims = GradientCosine().run(scene)
    assert claims.last[:3].tolist() == pytest.approx(by_round[1], abs=1e-4)
    both = [sum(pair) / 2 for pair in zip(*by_round, strict=True)]
    assert claims.scores[:3].tolist() == pytest.approx(both, abs=1e-4)


# --- synthetic images -------------------------------------------------------------------------------------------------


def fedaf(folder, **settings):
    quick = {"IPC": 3, "steps": 3, "B": 16, "E": 1, "B_w": 16, "eta_w": 0.05}
    fedaudit.run(
        method="fedaf", clients=3, partition="iid", rounds=1, set={**quick, **settings}, out=folder,
        **{**SMALL, "aux": 0.6},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def from_records(tmp_path_factory):
    return fedaf(tmp_path_factory.mktemp("fedaf") / "single", start="single")


@pytest.mark.long
def test_condensed_images_that_began_as_records_give_them_away(from_records, tmp_path):
    spaces = [{"attack": "nearest_synthetic", "space": space} for space in ("pixel", "feature")]
    noise = fedaf(tmp_path / "noise", start="noise")
    for single, fresh in zip(attacked(from_records, *spaces), attacked(noise, *spaces), strict=True):
        assert single.leak
        assert single.pooled.auc.value > 0.6
        assert not fresh.leak
        assert single.pooled.auc.low > fresh.pooled.auc.value


def test_nearest_is_measured_to_the_last_digit():
    """Products would give the distance of a far row to itself as 0.02 or so."""
    rows = torch.randn(7, 64) * 1000
    assert nearest(rows, rows.flip(0)).abs().max() == 0
    assert nearest(rows[:0], rows).shape == (0,)


# --- outputs ----------------------------------------------------------------------------------------------------------


def test_the_ratio_of_a_mean_by_hand():
    """One dimension, Sigma = 1, no noise, exact mu: a mean at 1/2 is most likely for N = 4 (N a^2 - log N is smallest).

    S = 1/4; for d = 2: 4 * 2 * 0.5 / 4 - 4 * 4 / (2 * 16) = 1/2.
    """
    found = logit_gap.log_ratio(torch.tensor([[2.0]]), torch.tensor([0.5]), torch.tensor([[1.0]]), 0.0, 0.0)
    assert float(found) == pytest.approx(0.5, abs=1e-6)


def test_mean_logits_of_few_records_give_them_away(from_records):
    (found,) = attacked(from_records, "logit_gap")
    assert found.leak, found.verdict


def test_confidence_is_the_log_odds():
    logits = torch.tensor([[math.log(0.7), math.log(0.2), math.log(0.1)], [40.0, 0.0, 0.0]])
    found = confidence(logits, torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([math.log(0.7 / 0.3), 40 - math.log(2)])


def test_lira_with_one_spread_by_hand():
    """Others at 0 and 2, and at 10 and 14: means 1 and 12, squares 1 + 1 + 4 + 4 over two degrees of freedom: 5."""
    measured = torch.tensor([[1 + math.sqrt(5), 12.0], [0.0, 10.0], [2.0, 14.0]])
    assert logit_lira.one_tailed(measured, few=8).tolist() == pytest.approx([1, 0], abs=1e-6)
    assert logit_lira.one_tailed(measured, few=2)[0] == pytest.approx(math.sqrt(5) / math.sqrt(2))


@pytest.mark.long
def test_shared_soft_labels_are_read_with_their_images_and_attacked(tmp_path):
    fedaudit.run(
        method="dsfl", clients=3, partition="iid", rounds=1, public=0.3, out=tmp_path / "a",
        set={"E_k": 25, "B_k": 8, "E_prime": 1, "E": 1, "B": 400, "eta_k": 0.004}, **SMALL,
    )  # fmt: skip
    scene, world = scene_of(tmp_path / "a")
    entry, field = scene.released("soft_labels")[0]
    images = inputs_of(scene, entry, len(entry[field]))
    assert images is not None
    assert nearest(images.flatten(1), world.public()[0].flatten(1)).max() == 0
    assert inputs_of(scene, entry, 7) is None
    specs = [{"attack": name, "steps": 120} for name in ("logit_gap", "logit_lira")]
    gap, lira = attacked(tmp_path / "a", *specs)
    for found in (gap, lira):
        assert found.pooled.auc.low > 0.5, found.verdict
    (aux,) = attacked(
        tmp_path / "a", {"attack": "logit_lira", "null": "auxiliary", "shadows": 2, "steps": 20}, clients=[0]
    )
    assert aux.ran
    assert aux.clients == [0]
    (histogram,) = attacked(tmp_path / "a", "label_histogram")
    assert {row.source for row in histogram.client.values()} == {"outputs"}
    (none,) = attacked(tmp_path / "a", "nearest_synthetic")
    assert "no synthetic images" in none.reason, "public images are nobody's"


# --- labels -----------------------------------------------------------------------------------------------------------


class Begin(Down):
    pass


class Told(Up):
    n: Tensor = private("label_counts", via="data", unit="client")


class Nothing(Record):
    pass


class Counting(Method):
    """Uploads how many records of each class there are, and nothing else."""

    def init(self, server):
        return Nothing()

    def round(self, s, server, cohort):
        cohort.ask(self.count, Begin())
        return s

    def count(self, client, msg):
        return Told(torch.bincount(client.y, minlength=10).float())


def test_label_counts_are_the_histogram(tmp_path):
    fedaudit.run(method=f"{__name__}:Counting", clients=3, partition="dirichlet:0.3", rounds=1,
                 out=tmp_path / "a", **SMALL)  # fmt: skip
    (found,) = attacked(tmp_path / "a", "label_histogram")
    assert found.pooled.error.value == pytest.approx(0, abs=1e-9)
    assert {row.source for row in found.client.values()} == {"label_counts"}


def test_weights_tell_the_histogram_better_than_a_uniform_guess(skewed):
    (found,) = attacked(skewed, "label_histogram")
    assert found.claims == "histogram"
    assert found.client["0"].source == "weights"
    assert found.pooled.gain.low > 0
    assert found.pooled.error.value < 0.5 * found.pooled.uniform.value


def test_the_classes_that_something_was_released_for_are_told(from_records):
    (found,) = attacked(from_records, "label_histogram")
    assert {row.source for row in found.client.values()} == {"classes"}


def test_labels_beside_embeddings_are_the_histogram(dffke):
    (found,) = attacked(dffke("plain"), "label_histogram")
    assert found.client["0"].source == "labels"
    assert found.pooled.error.value == pytest.approx(0, abs=1e-9)


# --- reading a view ---------------------------------------------------------------------------------------------------


def test_the_model_before_and_after_training_is_found_in_the_view(skewed):
    scene, _ = scene_of(skewed)
    models = uploaded(scene, 0)
    assert sorted(models) == [1, 2]
    entry, after = models[2]
    before = received(scene, entry)
    sent = next(e for e in scene.view.entries(direction="down", client=0, t=2))["w"]
    assert all(torch.equal(t, before.state_dict()[name]) for name, t in sent.items())
    assert not all(torch.equal(t, after.state_dict()[name]) for name, t in sent.items())


def test_each_attack_says_in_one_line_what_it_is():
    from fedaudit.cli.listing import listing

    rows = {row["name"]: row["what it is"] for row in listing("attacks")}
    mine = {"embedding_match", "update_alignment", "logit_gap", "logit_lira", "nearest_synthetic", "label_histogram"}
    for name in mine | {"blind_prior", "blind_nearest"}:
        assert 20 < len(rows[name]) <= 120, name
        assert rows[name].endswith("."), name


def test_shrinkage_by_hand():
    """Five classes, p = 4. Two rows, (3, 1, 1, 1, -1) and (1, 1, 1, 1, 1): the mean is (2, 1, 1, 1, 0), 1 from equal
    shares in two classes: |m - c|^2 = 2. Each row lies (1, 0, 0, 0, -1) from the mean: S = 4.

    Known sigma = 1: 1 - (4 - 2) (1 / 2) / 2 = 1/2. Estimated, v = 4: 1 - (2 / 6) (4 / 2) / 2 = 2/3.
    """
    rows = torch.tensor([[3.0, 1, 1, 1, -1], [1, 1, 1, 1, 1]]).double()
    assert label_histogram.shrinkage(rows, 1.0) == pytest.approx(1 / 2)
    assert label_histogram.shrinkage(rows) == pytest.approx(2 / 3)
    assert label_histogram.shrunk(rows, 1.0).tolist() == pytest.approx([1.5, 1, 1, 1, 0.5])
    assert label_histogram.shrinkage(rows, 0.0) == 1, "no noise"
    assert label_histogram.shrinkage(rows, 9.0) == 0, "nothing but noise"
    assert label_histogram.shrinkage(rows[:1]) == 1, "one row of unknown noise"
    assert label_histogram.shrinkage(rows[:, :3], 9.0) == 1, "too few classes"


def test_shares_of_nearly_equal_classes_are_nearer_by_it():
    """Ten classes of 40 records each but for two, counts under noise of 10: squared errors over 200 draws."""
    rng = torch.Generator().manual_seed(0)
    true = torch.full((10,), 40.0).double()
    true[0], true[1] = 44, 36
    rows = true + 10 * torch.randn(200, 3, 10, generator=rng, dtype=torch.float64)
    plain, drawn = rows.mean(1), torch.stack([label_histogram.shrunk(row, 10.0) for row in rows])
    error = [(estimate - true).square().sum(1).mean() for estimate in (plain, drawn)]
    assert error[1] < 0.5 * error[0]
    skewed = torch.tensor([200.0, 100, 50, 20, 10, 5, 5, 5, 3, 2]).double()
    kept = label_histogram.shrinkage(skewed + 10 * torch.randn(3, 10, generator=rng, dtype=torch.float64), 10.0)
    assert kept > 0.97, "where shares differ, hardly anything is taken away"


@pytest.mark.parametrize("seen", [True, False])
def test_rows_without_an_encoder_match_nothing(seen, monkeypatch):
    monkeypatch.setattr(Attack, "cannot", lambda self, scene: None)
    monkeypatch.setattr(embedding_match.EmbeddingMatch, "_encoders", lambda self, scene: ["one"] if seen else [])
    found = embedding_match.EmbeddingMatch().cannot(SimpleNamespace(view=SimpleNamespace(threat="server"), target=3))
    assert found == (None if seen else "the server sees no encoder of client 3 of a round with embeddings")
