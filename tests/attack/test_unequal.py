"""Attacks and audits where nothing is equal: tied scores, clients of unequal epsilon, a class nobody holds, baselines
of which one is beaten and another is not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from fedaudit import run
from fedaudit.attack.claims import Attacked, Claims, Groups, Histogram, Reconstructions
from fedaudit.attack.membership import auc, auc_difference, clopper_pearson, membership_scores
from fedaudit.attack.reconstruction import _against_redrawn, _beaten, _Client
from fedaudit.attack.score import histogram, learned
from fedaudit.attack.verdict import judge, judge_blind
from fedaudit.epsilon import one_run, release_path
from fedaudit.epsilon.one_run import _claims, _terms, audit_run, pairs
from fedaudit.epsilon.release_path import Pair, _audit_field, _releases, worst_pair
from fedaudit.privacy.ledger import ClientLedger, LedgerEntry, Total
from fedaudit.runtime.attack_result import Difference
from fedaudit.runtime.folder import RunFolder
from fedaudit.stats import Estimate

# --- one run: ties, the surest pairs, unequal clients --------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two clients whose class means and embeddings are protected; one round."""
    out = tmp_path_factory.mktemp("unequal") / "run"
    policy = {"epsilon": 1.0, "delta": 1e-2}
    run(
        method="outside:Releases", rounds=1, clients=2, partition="dirichlet:0.5", model="mlp", holdout=0.5, aux=0.4,
        eval_clients=False, privacy={"embeddings": policy, "logits": policy}, out=out,
    )  # fmt: skip
    return out


def guessed(folder, gaps, guesses):
    with mock.patch.object(one_run, "_gaps", return_value=(torch.tensor(gaps, dtype=torch.float64), [0, 1])):
        return audit_run(folder, guesses=guesses)[0].how.partition(" guesses right")[0]


def test_tied_pairs_are_no_right_guesses(folder):
    assert guessed(folder, [0.0] * 8, 8) == "0 of 8"
    assert guessed(folder, [3.0, -2.0, 0.0, 0.0, 1.0, 0.0], 6) == "2 of 6"


def test_the_surest_pairs_are_guessed(folder):
    assert guessed(folder, [0.5, 5.0, -4.0, 1.0], 2) == "1 of 2"
    assert guessed(folder, [0.5, 5.0, -4.0, -1.0], 3) == "1 of 3"


def client_row(k, delta, claim, epsilon, relation):
    entry = LedgerEntry(field="M.e", kind="e", mechanism="gaussian", noise_multiplier=1, relation=relation, claim=claim)
    total = {relation: Total(epsilon=epsilon, accountant="prv")}
    return ClientLedger(
        client=k, n=round(1 / delta), delta=delta, entries=[entry], by_relation=total, epsilon=epsilon, claim=claim
    )


def test_terms_and_claims_of_unequal_clients():
    """The largest claim, the worst client's total, and the largest delta, with which least is refuted."""
    rows = [client_row(0, 0.1, 1.0, 2.0, "replace-one"), client_row(1, 0.001, 3.0, 5.0, "add-or-remove")]
    claims = _claims(rows, covered=True)
    assert claims == [("the run, as asked for", 3.0, "add-or-remove"), ("the run, by the ledger", 5.0, "add-or-remove")]
    assert _terms(claims[0], rows, 0.95) == (0.1, 0.95, 2)
    assert _terms(("", 1.0, "replace-one"), rows, 0.95) == (0.1, 0.95, 1)


def test_the_order_of_candidates_tells_nothing(folder):
    seen = []

    class Watches:
        blind = False

        def cannot(self, scene):
            return None

        def run(self, scene):
            seen.append((scene.target, scene.x))
            return Claims(torch.zeros(len(scene.x)))

    found = RunFolder(folder)
    one_run._gaps(found, "watches", Watches(), one_run.Threat.parse("server"), None, lambda *_: None)
    for k, x in seen:
        (inside, _), _ = pairs(found.world, k)
        first = sum(any(torch.equal(a, b) for b in inside) for a in x[: len(inside)])
        assert 0.1 * len(inside) < first < 0.9 * len(inside), "members and others are mixed"


# --- release paths -------------------------------------------------------------------------------------------------


def test_neighbours_with_other_class_counts_are_left_out(folder):
    """The claim for class means is "given the classes and their counts": a changed label is no neighbour here."""
    found = RunFolder(folder)
    release = next(_releases(found, "logits", [0]))
    real = release_path._candidates

    def only_itself_and_another_label(world, k):
        names, images, labels, at = real(world, k)
        x, y = world.members(k)
        return ["itself", names[-1]], torch.stack([x[at], images[-1]]), [int(y[at]), labels[-1]], at

    assert isinstance(worst_pair(found, release), Pair)
    without = mock.patch.object(release_path, "_clipped_ends", return_value=None)  # records that there are, alone
    with without, mock.patch.object(release_path, "_candidates", only_itself_and_another_label):
        assert worst_pair(found, release) == "no record changes Released.V unless the model is trained again"


@mock.patch.object(release_path, "_clipped_ends", return_value=None)  # which are equally far apart everywhere
def test_of_unequal_clients_the_worst_pair_is_tried(ends, folder):
    found = RunFolder(folder)
    releases = list(_releases(found, "embeddings", None))
    distances = [worst_pair(found, release).distance for release in releases]
    assert distances[0] != distances[1]
    worst = distances.index(max(distances))
    told, *_ = _audit_field(found, "embeddings", releases, 2, 0.95, lambda *_: None)
    assert f"client {worst}, round 1" in told.how
    assert f"{max(distances):.3g} standard deviations" in told.how


def test_the_two_sides_draw_their_own_noise(folder):
    pair = worst_pair(RunFolder(folder), next(_releases(RunFolder(folder), "embeddings", [0])))
    one, other = (np.array([pair.outcome(side, j) for j in range(30)]) for side in (0, 1))
    assert np.std(one - other) > 0.5 * np.std(one)
    assert len(set(one)) == 30


# --- intervals -----------------------------------------------------------------------------------------------------


def test_held_out_intervals_are_of_97_5_percent_each():
    """40 members above, 60 others below: 20 of 20 and 30 of 30 on the held-out halves, limits at 97.5 % each."""
    scores, member = np.r_[np.ones(40), np.zeros(60)], np.arange(100) < 40
    found = membership_scores(scores, member)
    low = (clopper_pearson(20, 20, 0.975)[0] + clopper_pearson(30, 30, 0.975)[0]) / 2
    assert found.balanced_accuracy.low == pytest.approx(low)
    assert found.advantage.low == pytest.approx(2 * low - 1)
    exact = stats.binomtest(20, 20).proportion_ci(0.975, "exact").low
    assert clopper_pearson(20, 20, 0.975)[0] == pytest.approx(exact)


def test_the_dkw_band_by_hand():
    """sqrt(ln(2 / 0.025) / 2 n) for each class, with 2.5 % of failure each: n = 50 and 200."""
    rng = np.random.default_rng(0)
    scores, member = rng.random(250), np.arange(250) < 50
    found = membership_scores(scores, member).advantage_best
    band = math.sqrt(math.log(80) / 100) + math.sqrt(math.log(80) / 400)
    assert found.high == pytest.approx(min(1.0, found.value + band))
    assert found.low == pytest.approx(max(0.0, found.value - band))


def naive(scores, member):
    """Placements pair by pair."""
    a, b = scores[member], scores[~member]
    wins = (a[:, None] > b[None]).astype(float) + 0.5 * (a[:, None] == b[None])
    return wins.mean(1), wins.mean(0)


def test_delongs_variance_has_both_classes():
    """Twelve members, 40 others, scores on a coarse grid: ties. On the logit scale, by hand."""
    rng = np.random.default_rng(1)
    member = np.arange(52) < 12
    scores = rng.integers(0, 8, 52) + 2.0 * member
    inside, outside = naive(scores, member)
    value = inside.mean()
    variance = inside.var(ddof=1) / 12 + outside.var(ddof=1) / 40
    assert outside.var(ddof=1) / 40 > 0.1 * variance
    half = stats.norm.ppf(0.975) * math.sqrt(variance) / (value * (1 - value))
    logit = math.log(value / (1 - value))
    found = auc(scores, member)
    assert found.value == pytest.approx(value)
    assert found.low == pytest.approx(1 / (1 + math.exp(-(logit - half))))
    assert found.high == pytest.approx(1 / (1 + math.exp(-(logit + half))))


def test_the_difference_of_correlated_attacks_is_paired():
    rng = np.random.default_rng(2)
    member = np.arange(60) < 20
    a = rng.normal(size=60) + member
    b = a + 0.3 * rng.normal(size=60)
    (a1, a0), (b1, b0) = naive(a, member), naive(b, member)
    half = stats.norm.ppf(0.975) * math.sqrt((a1 - b1).var(ddof=1) / 20 + (a0 - b0).var(ddof=1) / 40)
    found = auc_difference(a, b, member)
    assert found.value == pytest.approx(a1.mean() - b1.mean())
    assert (found.low, found.high) == (
        pytest.approx(found.value - half),
        pytest.approx(found.value + half),
    )


# --- claims --------------------------------------------------------------------------------------------------------


def test_groups_are_learned_on_the_other_half():
    """Five members and nine others, told perfectly by their group: three and five are judged, by two and four."""
    member = torch.arange(14) < 5
    share = learned(member.long(), member)
    judged = share != 0.5
    assert (int(judged[member].sum()), int(judged[~member].sum())) == (3, 5)
    assert share[member & judged].unique().tolist() == [pytest.approx(3 / 4)]  # (2 + 1) / (2 + 2)
    assert share[~member & judged].unique().tolist() == [pytest.approx(1 / 6)]  # (0 + 1) / (4 + 2)


def labelled(*labels):
    """A world of three classes, of which nobody holds the last."""
    rows = [torch.tensor(y) for y in labels]
    return SimpleNamespace(classes=3, members=lambda k: (torch.zeros(len(rows[k]), 1, 2, 2), rows[k]))


def part(k, claims, member=None, n=0):
    member = torch.ones(n, dtype=torch.bool) if member is None else member
    return Attacked(k, claims, torch.zeros(len(member), 1, 2, 2), torch.zeros(len(member), dtype=torch.long), member)


def test_label_shares_are_held_against_each_clients_own():
    """Client 0 has (3/4, 1/4, 0), client 1 (0, 1, 0). Claims (1/2, 1/2, 0) and (0, 1/2, 1/2): errors 1/4 and 1/2."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.5, 0.5, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert [found.client[k].error for k in "01"] == [pytest.approx(0.25), pytest.approx(0.5)]
    assert [found.client[k].uniform for k in "01"] == [pytest.approx(5 / 12), pytest.approx(2 / 3)]


def test_a_gain_within_its_interval_is_no_leak():
    """Gains of 0.42 and 0.17 over the uniform guess: above 0 in the mean, and their interval holds 0."""
    world = labelled([0, 0, 0, 1], [1, 1])
    claims = [Histogram(torch.tensor([0.75, 0.25, 0.0])), Histogram(torch.tensor([0.0, 0.5, 0.5]))]
    found = histogram([part(k, c) for k, c in enumerate(claims)], world, "mine")
    assert found.pooled.gain.value > 0 > found.pooled.gain.low
    assert found.leak is False
    assert found.verdict.startswith("No leak shown")


# --- verdicts ------------------------------------------------------------------------------------------------------


def scored(scores, member):
    return [part(0, Claims(torch.as_tensor(np.asarray(scores, dtype=np.float64))), torch.as_tensor(member))]


@pytest.fixture(scope="module")
def candidates():
    rng = np.random.default_rng(3)
    member = np.arange(200) % 2 == 0
    return rng.normal(size=200), rng.normal(size=200), member


def test_an_auc_within_its_interval_is_no_leak(candidates):
    noise, _, member = candidates
    parts = scored(noise + 0.1 * member, member)
    value = auc(noise + 0.1 * member, member)
    assert value.low < 0.5 < value.value
    assert judge("mine", parts, {}, False).leak is False


def test_who_beats_chance_and_not_the_blind_baseline_shows_no_leak(candidates):
    """On a broken split: of two baselines one is at chance and beaten; the other finds as much as the attack."""
    noise, other, member = candidates
    strong = scored(noise + 2.0 * member, member)
    blind = {"weak": scored(other, member), "as_good": scored(noise + 2.0 * member + 0.2 * other, member)}
    found = judge("mine", strong, blind, True)
    assert found.against_blind["weak"].low > 0 >= found.against_blind["as_good"].low
    assert found.leak is False
    assert "not above the blind baseline as_good" in found.verdict
    assert judge("mine", strong, {"weak": blind["weak"]}, True).leak is True


def test_on_an_honest_split_an_attack_is_held_against_chance_alone(candidates):
    """A baseline at chance that happened to find nearly as much in its noise takes nothing from a leak."""
    noise, other, member = candidates
    mine, lucky = scored(noise + 0.5 * member, member), scored(0.5 * noise + other + 0.4 * member, member)
    found = judge("mine", mine, {"lucky": lucky}, False)
    assert found.against_blind["lucky"].low <= 0
    assert found.leak is True
    assert judge("mine", mine, {"lucky": lucky}, True).leak is False


def test_blind_baselines_are_corrected_for_their_number(candidates):
    """An AUC that is above chance at 99 %, and not at 99.8 %: broken when alone, not as one of five."""
    noise, other, member = candidates
    shift = next(
        s for s in np.linspace(0.2, 1, 401)
        if auc(noise + s * member, member, 0.99).low > 0.5 >= auc(noise + s * member, member, 0.998).low
    )  # fmt: skip
    told = scored(noise + shift * member, member)
    assert judge_blind({"a": told})["a"].split_broken is True
    five = {"a": told, **{name: scored(other, member) for name in "bcde"}}
    assert judge_blind(five)["a"].split_broken is False


def test_a_split_told_the_wrong_way_round_is_broken_too(candidates):
    noise, _, member = candidates
    assert judge_blind({"a": scored(noise - 2.0 * member, member)})["a"].split_broken is True
    groups = Groups(torch.as_tensor(member).long())
    learned_parts = [part(0, groups, torch.as_tensor(member))]
    assert judge_blind({"a": learned_parts})["a"].split_broken is True


# --- reconstructions -----------------------------------------------------------------------------------------------


def test_the_gain_over_redrawn_records():
    """Where every record is a member, drawn anew they are the same: ratio 1, gain 0. Where one of two is, and it is ten
    times as near, half of the draws are the other."""
    d = torch.tensor([[0.2, 0.5, 0.7]], dtype=torch.float64)
    log_ratio, gain = _against_redrawn(d.min(1).values, d, 3)
    assert (log_ratio.item(), gain.item()) == (pytest.approx(0), pytest.approx(0))
    d = torch.tensor([[0.1, 1.0]], dtype=torch.float64)
    log_ratio, gain = _against_redrawn(d[:, 0], d, 1)
    assert math.log(0.1) * 0.8 < log_ratio.item() < math.log(0.1) * 0.2
    assert 0.2 < gain.item() < 0.8


def test_every_baseline_has_to_be_beaten():
    scores = {"hit": np.zeros(20), "chance": np.full(20, 0.5)}
    better, worse = (Difference(mse=Estimate(value=value, low=value - 0.5), confidence=0.975) for value in (1.0, -1.0))
    assert _beaten(scores, {"a": better, "b": worse}) == []
    assert _beaten(scores, {"a": better, "b": better}) == ["MSE"]


def test_the_class_mean_baseline_knows_the_class():
    """Auxiliary images: class 0 all 1, class 1 all -1, none of class 2, for which the mean of all stands in."""
    x = torch.cat([torch.ones(3, 1, 2, 2), -torch.ones(1, 1, 2, 2)])
    client = SimpleNamespace(
        auxiliary=(x, torch.tensor([0, 0, 0, 1])),
        world=SimpleNamespace(classes=3),
        labels=lambda: torch.tensor([1, 2, 0]),
    )
    assert _Client.class_mean(client).mean((1, 2, 3)).tolist() == [-1.0, 0.5, 1.0]


def test_a_class_nobody_holds_is_counted_and_not_scored():
    world = SimpleNamespace(
        classes=3, shape=(1, 2, 2), members=lambda k: (torch.zeros(4, 1, 2, 2), torch.tensor([0, 0, 1, 1]))
    )
    claims = Reconstructions(torch.rand(3, 1, 2, 2), labels=torch.tensor([2, 1, 2]))
    client = _Client(part(0, claims, n=4), world, (torch.zeros(1), torch.zeros(1)), torch.nn.Identity(), "mine")
    assert client.not_held == 2
    assert client.given.tolist() == [1]
    assert torch.equal(client.images, claims.images[1:2])
    assert client.target.tolist() in ([2], [3])
