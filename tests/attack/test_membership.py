"""Membership scores against scikit-learn, scipy, small cases by hand, and simulations of their intervals."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score, roc_curve

from fedaudit.attack import membership
from fedaudit.attack.membership import auc, auc_difference, by_group, membership_scores
from fedaudit.errors import ContractError, SettingError
from fedaudit.runtime.attack_result import Unscored
from fedaudit.stats import clopper_pearson


def toy(n1: int, n0: int, shift: float, seed: int = 0, decimals: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = np.concatenate([rng.normal(shift, 1, n1), rng.normal(0, 1, n0)])
    return scores if decimals is None else scores.round(decimals), np.arange(n1 + n0) < n1


CANDIDATES = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=60).filter(
    lambda rows: len({member for _, member in rows}) == 2
)


@settings(max_examples=60, deadline=None)
@given(CANDIDATES)
def test_auc_and_tpr_equal_scikit_learn_under_ties(rows):
    scores, member = np.array([s for s, _ in rows]), np.array([m for _, m in rows])
    result = membership_scores(scores, member)
    assert result.auc.value == pytest.approx(roc_auc_score(member, scores), abs=1e-12)
    assert 0 <= result.auc.low <= result.auc.value <= result.auc.high <= 1
    fpr, tpr, _ = roc_curve(member, scores, drop_intermediate=False)
    assert result.advantage_best.value == pytest.approx((tpr - fpr).max(), abs=1e-12)
    for estimate in result.tpr_at_fpr:
        if estimate.value is not None:
            assert estimate.value == pytest.approx(tpr[fpr <= estimate.fpr + 1e-12].max())
            assert estimate.fpr_measured <= estimate.fpr + 1e-12
    points = set(zip(fpr.round(9), tpr.round(9), strict=True))
    assert set(zip(np.round(result.roc.fpr, 9), np.round(result.roc.tpr, 9), strict=True)) <= points


@pytest.mark.parametrize("decimals", [None, 1])
def test_nothing_depends_on_the_order_of_rows(decimals):
    scores, member = toy(300, 500, 0.7, decimals=decimals)
    client = np.arange(800) % 3
    one = by_group(scores, member, client, "client")
    order = np.random.default_rng(1).permutation(800)
    assert one == by_group(scores[order], member[order], client[order], "client")
    ascending = np.argsort(scores, kind="stable")
    assert membership_scores(scores, member) == membership_scores(scores[ascending], member[ascending])


def test_by_hand():
    """Members 3, 3, 1, non-members 3, 2, 0 and k = 1 of 3 false positives allowed (FPR 0.4). Pairs: each 3 against
    3, 2, 0 scores 1/2 + 1 + 1, the 1 scores 0 + 0 + 1: AUC = 6/9. The rule is score > 2: both 3s of the members (2/3),
    the 3 of the non-members (1/3). Placements of members 5/6, 5/6, 1/3 and of non-members 1/3, 2/3, 1 have variance
    1/12 and 1/9, hence DeLong's variance is (1/12 + 1/9) / 3 = 7/108, and on the logit scale the half width is
    1.95996 sqrt(7/108) / (2/9)."""
    result = membership_scores([3, 3, 1, 3, 2, 0], [1, 1, 1, 0, 0, 0], fprs=[0.4])
    assert result.auc.value == pytest.approx(6 / 9)
    half = 1.959963985 * math.sqrt(7 / 108) / (2 / 9)
    assert result.auc.low == pytest.approx(1 / (1 + math.exp(half - math.log(2))))
    assert result.auc.high == pytest.approx(1 / (1 + math.exp(-half - math.log(2))))
    (at,) = result.tpr_at_fpr
    assert (at.value, at.fpr_measured, at.threshold) == (pytest.approx(2 / 3), pytest.approx(1 / 3), 2)
    assert result.advantage_best.value == pytest.approx(1 / 3)
    assert result.roc.fpr == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert result.roc.tpr == pytest.approx([0, 2 / 3, 1, 1])


@pytest.mark.parametrize(("k", "n"), [(0, 1), (1, 1), (0, 20), (3, 20), (20, 20), (999, 1000), (17, 100_000)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_clopper_pearson_equals_scipy(k, n, confidence):
    oracle = binomtest(k, n).proportion_ci(confidence, "exact")
    assert clopper_pearson(k, n, confidence) == pytest.approx((oracle.low, oracle.high), abs=1e-12)


def test_an_fpr_that_cannot_be_resolved_says_so():
    ten, one, tenth = membership_scores(*toy(50, 999, 1)).tpr_at_fpr
    assert ten.value > one.value > 0
    assert tenth.value is None
    assert tenth.reason == "an FPR of 0.001 takes 1000 non-members, and there are 999"
    assert membership_scores(*toy(50, 1000, 1)).tpr_at_fpr[2].value is not None


def coverage(draw, repetitions=400, **truths):
    results = [membership_scores(*draw(seed), seed=seed, roc=False, fprs=()) for seed in range(repetitions)]
    return [np.mean([(e := getattr(r, key)).low <= truth <= e.high for r in results]) for key, truth in truths.items()]


def test_intervals_cover_the_truth():
    """P(N(1,1) > N(0,1)) = Phi(1 / sqrt 2) = 0.76025; the best advantage is 2 Phi(1/2) - 1 = 0.38292. Under the null
    every threshold has balanced accuracy 1/2. At 400 repetitions 0.925 is 2.3 standard errors below 0.95."""
    of_auc, of_best = coverage(lambda seed: toy(60, 90, 1, seed), auc=0.76025, advantage_best=0.38292)
    assert 0.925 <= of_auc <= 0.985
    assert of_best >= 0.95
    assert coverage(lambda seed: toy(60, 90, 0, seed), balanced_accuracy=0.5)[0] >= 0.95


def test_the_best_threshold_is_optimistic_and_the_held_out_one_is_not():
    results = [membership_scores(*toy(50, 50, 0, seed), seed=seed, roc=False, fprs=()) for seed in range(300)]
    assert np.mean([r.advantage_best.value for r in results]) > 0.1
    assert abs(np.mean([r.advantage.value for r in results])) < 0.025  # standard error 0.008
    assert "seed 7" in results[7].advantage.how
    assert "optimistic" in results[7].advantage_best.how


def test_perfect_separation_is_not_certainty():
    """20 members above 30 non-members: 20 disjoint pairs without exception, 0.025^(1/20) = 0.8316."""
    result = membership_scores(np.arange(50), np.arange(50) >= 30)
    assert (result.auc.value, result.auc.high) == (1, 1)
    assert result.auc.low == pytest.approx(0.025 ** (1 / 20))
    assert auc(-np.arange(50), np.arange(50) >= 30).value == 0


def test_equal_scores_say_nothing():
    result = membership_scores(np.zeros(2000), np.arange(2000) < 1000)
    assert result.auc.value == result.balanced_accuracy.value == 0.5
    assert result.auc.low < 0.5 < result.auc.high
    assert result.advantage.value == result.advantage_best.value == 0
    assert [e.value for e in result.tpr_at_fpr] == [0, 0, 0]
    assert (result.roc.fpr, result.roc.tpr) == ([0, 1], [0, 1])


def test_one_record_of_a_class():
    result = membership_scores([0.0, 1.0, 2.0], [False, True, False])
    assert (result.auc.value, result.auc.low, result.auc.high) == (0.5, 0, 1)
    assert result.balanced_accuracy.value is None
    assert "at least 2" in result.advantage.reason


def test_roc_is_thinned_and_json_ready():
    scores, member = toy(5000, 20_000, 1)
    roc = membership_scores(scores, member).roc
    assert len(roc.fpr) == len(roc.tpr) <= 200
    assert roc.fpr[0] == 0
    assert roc.fpr[-1] == roc.tpr[-1] == 1
    assert np.all(np.diff(roc.fpr) > 0)
    assert np.all(np.diff(roc.tpr) >= 0)
    assert sum(0 < f < 0.01 for f in roc.fpr) > 60  # log-log: the low end keeps its share
    for labels in (scores.astype(int), np.arange(25_000) % 2):
        for found in by_group(scores, member, labels, "label").values():
            plain = found.model_dump(mode="json")
            assert json.loads(json.dumps(plain, allow_nan=False)) == plain
            assert type(found).model_validate(plain) == found


def test_groups():
    scores, member, client = np.arange(6), np.array([0, 1, 0, 1, 1, 1]), np.array([0, 0, 1, 1, 2, 2])
    of_clients = by_group(scores, member, client, "client")
    assert of_clients["0"].auc.value == 1
    assert of_clients["2"] == Unscored(members=2, nonmembers=0, reason="there are no non-members among the candidates")
    assert membership_scores(scores, member).roc is not None
    assert "roc" not in of_clients["0"].model_dump()
    assert by_group(scores, member, np.array(["a"] * 6), "class")["a"].auc == membership_scores(scores, member).auc


@pytest.mark.parametrize(
    ("scores", "member", "words"),
    [
        ([0.1, math.nan], [0, 1], "1 of 2 scores are NaN or infinite"),
        ([0.1, math.inf], [0, 1], "NaN or infinite"),
        ([0.1, 0.2], [1, 1], "no non-members"),
        ([0.1, 0.2], [0, 0], "no members"),
        ([], [], "no members and no non-members"),
        ([0.1, 0.2], [0, 2], "0 or 1"),
        ([0.1, 0.2], [0, math.nan], "0 or 1"),
        ([0.1, 0.2, 0.3], [0, 1], "3 scores but 2 member flags"),
        ([[0.1], [0.2]], [0, 1], "one value per candidate"),
        ([[0.1], [0.2, 0.3]], [0, 1], "not an array"),
        (["a", "b"], [0, 1], "give numbers"),
    ],
)
def test_hostile_input(scores, member, words):
    with pytest.raises(ContractError, match=words):
        membership_scores(scores, member)


def test_hostile_settings():
    with pytest.raises(SettingError, match="confidence"):
        membership_scores([0, 1], [0, 1], confidence=95)
    with pytest.raises(SettingError, match="false-positive rate"):
        membership_scores([0, 1], [0, 1], fprs=[0])
    with pytest.raises(ContractError, match="3 labels for 2 candidates"):
        by_group([0, 1], [0, 1], [0, 1, 2], "client")


def test_two_attacks_without_a_wrong_pair_have_the_limits_of_both():
    """Each AUC is 1 and its limits are apart, so the difference 0 may be as large as they are apart, either way."""
    from fedaudit.attack.membership import auc_difference

    member = np.array([True] * 6 + [False] * 6)
    perfect, other = member.astype(float), member * 2.0 + 1
    found = auc_difference(perfect, other, member)
    one = auc(perfect, member, 0.975)
    assert found.value == 0
    assert found.low == pytest.approx(one.low - one.high)
    assert found.high == pytest.approx(one.high - one.low)
    assert found.low < -0.1 < 0.1 < found.high


# --- ties, and unequal clients


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


@pytest.mark.parametrize(("members", "others", "told"), [(2, 2, True), (2, 5, True), (1, 5, False), (5, 1, False)])
def test_two_of_each_class_are_enough_for_a_held_out_threshold(members, others, told):
    """Members at 1 and non-members at 0: any threshold that was chosen on one of each is right on the other."""
    result = membership_scores([1.0] * members + [0.0] * others, [True] * members + [False] * others)
    assert (result.balanced_accuracy.value is not None) is told
    if told:
        assert (result.balanced_accuracy.value, result.advantage.value) == (1.0, 1.0)
        assert result.balanced_accuracy.threshold == 1.0
        assert result.balanced_accuracy.low < 1.0


def test_the_tpr_of_many_records_is_the_mixture_over_all_thresholds():
    """400 of each class, FPR 0.3. All 401 numbers of non-members above the threshold are weighted here by scipy's
    binomial, and the mixture of Jeffreys' rates is added up on a grid: its quantiles are the limits."""
    rng = np.random.default_rng(2)
    inside, outside = np.sort(rng.normal(0.8, 1, 400)), np.sort(rng.normal(0, 1, 400))
    j = np.arange(401)
    weight = stats.binom.pmf(j, 400, 0.3)
    over = [0, *((inside > t).sum() for t in outside[::-1]), 400]
    steps = np.array([(over[i] + over[i + 1]) / 2 for i in j])
    slope, level = np.polyfit(j, steps, 1, w=np.sqrt(weight))
    c = np.clip(level + slope * j, 0, 400)
    rates = np.linspace(0, 1, 4001)
    mixture = sum(
        w * stats.beta.cdf(rates, n + 0.5, 400 - n + 0.5) for w, n in zip(weight, c, strict=True) if w > 1e-12
    )
    wanted = [float(np.interp(p, mixture, rates)) for p in (0.025, 0.975)]
    found = membership_scores([*inside, *outside], [1] * 400 + [0] * 400, fprs=[0.3]).tpr_at_fpr[0]
    assert [found.low, found.high] == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize(("n1", "n0"), [(2, 2), (2, 3), (3, 2)])
def test_two_records_of_a_class_are_enough_for_the_interval_of_a_difference(n1, n0):
    """One attack has one pair in the wrong order, the other has two; of two values there is a variance."""
    a = np.array([5.0, 1.0, 6.0][:n1] + [2.0, 0.0, 0.0][:n0])
    b = np.array([0.5, 4.0, 6.0][:n1] + [2.0, 1.0, 0.0][:n0])
    member = np.arange(n1 + n0) < n1
    (a1, a0), (b1, b0) = naive(a, member), naive(b, member)
    half = stats.norm.ppf(0.975) * math.sqrt((a1 - b1).var(ddof=1) / n1 + (a0 - b0).var(ddof=1) / n0)
    found = auc_difference(a, b, member)
    assert found.value == pytest.approx(a1.mean() - b1.mean())
    assert half > 0
    assert (found.low, found.high) == pytest.approx((max(-1, found.value - half), min(1, found.value + half)))
    alone = auc_difference(a[[0, *range(n1, n1 + n0)]], b[[0, *range(n1, n1 + n0)]], member[n1 - 1 :])
    assert (alone.low, alone.high) == (-1.0, 1.0)


@pytest.mark.parametrize(("fpr", "k"), [(0.29, 29), (0.1, 10), (0.3, 30), (0.999, 99)])
def test_as_many_false_positives_as_the_rate_allows(fpr, k):
    """0.29 * 100 is 28.999... in floating point, and means 29 of 100. At most all but one are allowed."""
    scores = [*range(100), *(t + 0.5 for t in range(100))]
    (at,) = membership_scores(scores, [0] * 100 + [1] * 100, fprs=[fpr]).tpr_at_fpr
    assert at.threshold == 99 - k
    assert (at.fpr_measured, at.value) == (pytest.approx(k / 100), pytest.approx((k + 1) / 100))


def test_limits_of_a_tpr_hold_its_value():
    """Of 10 members all lie above, or none: the limits by the mixture are wider on one side, and never leave it out."""
    for shift, value in ((1000, 1.0), (-1000, 0.0)):
        scores = [*range(100), *(t + shift for t in range(10))]
        (at,) = membership_scores(scores, [0] * 100 + [1] * 10, fprs=[0.1]).tpr_at_fpr
        assert at.value == value
        assert at.low <= value <= at.high
        assert at.high - at.low > 0.1


def test_a_single_record_has_no_difference_with_an_interval():
    found = auc_difference([0.0, 1.0, 2.0], [1.0, 0.0, 2.0], [False, True, False])
    assert (found.value, found.low, found.high) == (pytest.approx(0.5), -1.0, 1.0)


def test_points_of_a_roc_are_spread_over_the_logarithm():
    """1,000 others with scores of their own: 199 numbers from 1 to 1,000, those that round alike once, and 0."""
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(1, 1, 300), rng.normal(0, 1, 1000)])
    roc = membership_scores(scores, np.arange(1300) < 300).roc
    k = sorted({0, *(round(1000 ** (i / 198)) for i in range(199))})
    assert roc.fpr == pytest.approx([n / 1000 for n in k])
    outside = np.sort(scores[300:])[::-1]
    assert roc.tpr[5] == pytest.approx((scores[:300] > outside[k[5]]).mean())


# --- whole functions, on classes of unequal size with ties, against loops


def uneven_classes() -> tuple[np.ndarray, np.ndarray]:
    """Return 23 members and 41 others in mixed order, with ties within and between the classes."""
    rng = np.random.default_rng(6)
    scores = np.concatenate([rng.normal(0.9, 1.0, 23), rng.normal(0.0, 1.2, 41)]).round(1)
    order = rng.permutation(64)
    return scores[order], (np.arange(64) < 23)[order]


def wins_of(a: float, others: np.ndarray) -> float:
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for b in others) / len(others)


def test_every_figure_of_uneven_classes_by_loops():
    scores, member = uneven_classes()
    inside, outside = scores[member], scores[~member]
    found = membership_scores(scores, member, seed=3, confidence=0.9, fprs=(0.1, 0.01))
    assert (found.members, found.nonmembers, found.confidence) == (23, 41, 0.9)
    of1, of0 = [wins_of(a, outside) for a in inside], [1 - wins_of(b, inside) for b in outside]
    mean, z = np.mean(of1), stats.norm.ppf(0.95)
    half = z * np.sqrt(np.var(of1, ddof=1) / 23 + np.var(of0, ddof=1) / 41) / (mean * (1 - mean))
    odds = np.log(mean / (1 - mean))
    limits = [1 / (1 + np.exp(-(odds + side * half))) for side in (-1, 1)]
    assert (found.auc.value, found.auc.low, found.auc.high) == pytest.approx((mean, *limits))
    gaps = {t: (inside >= t).mean() - (outside >= t).mean() for t in np.unique(scores)}
    best, band = max(gaps.values()), sum(np.sqrt(np.log(4 / 0.1) / (2 * n)) for n in (23, 41))
    top = found.advantage_best
    assert (top.value, top.low, top.high) == pytest.approx((best, max(0.0, best - band), min(1.0, best + band)))
    rng = np.random.default_rng(3)
    order1, order0 = rng.permutation(23), rng.permutation(41)
    sorted1, sorted0 = np.sort(inside), np.sort(outside)
    choose1, use1 = sorted1[order1[:11]], sorted1[order1[11:]]
    choose0, use0 = sorted0[order0[:20]], sorted0[order0[20:]]
    chosen = {t: (choose1 >= t).mean() - (choose0 >= t).mean() for t in np.unique([*choose1, *choose0])}
    t = next(t for t in chosen if chosen[t] >= max(chosen.values()) - 1e-12)
    tp, tn = int((use1 >= t).sum()), int((use0 < t).sum())
    rates = [stats.binomtest(k, n).proportion_ci(0.95, "exact") for k, n in ((tp, 12), (tn, 21))]
    value, low, high = (tp / 12 + tn / 21) / 2, (rates[0].low + rates[1].low) / 2, (rates[0].high + rates[1].high) / 2
    balanced, advantage = found.balanced_accuracy, found.advantage
    assert (balanced.value, balanced.low, balanced.high) == pytest.approx((value, low, high))
    wanted = (2 * value - 1, 2 * low - 1, 2 * high - 1)
    assert (advantage.value, advantage.low, advantage.high) == pytest.approx(wanted)
    assert balanced.threshold == advantage.threshold == t
    assert "(seed 3)" in balanced.how
    tenth, none = found.tpr_at_fpr
    at = np.sort(outside)[::-1][4]  # four of 41 may be false
    assert (tenth.fpr, tenth.threshold, tenth.value) == pytest.approx((0.1, at, (inside > at).mean()))
    assert tenth.fpr_measured == pytest.approx((outside > at).mean())
    assert (none.value, none.reason) == (None, "an FPR of 0.01 takes 100 non-members, and there are 41")
    points = {0.0: (inside > outside.max()).mean()}
    for k in range(1, 42):
        over = np.sort(outside)[::-1][k] if k < 41 else -np.inf
        points[(outside > over).mean()] = (inside > over).mean()
    assert dict(zip(found.roc.fpr, found.roc.tpr, strict=True)) == pytest.approx(points)
    assert membership_scores(scores, member, roc=False).roc is None
    plain = membership_scores(scores, member)
    assert plain == membership_scores(scores, member, seed=0, confidence=0.95, fprs=(0.1, 0.01, 0.001), roc=True)


def test_the_limits_of_a_tpr_are_quantiles_of_a_mixture():
    """The number of non-members above the true threshold is binomial; a line through the members above it, Jeffreys."""
    scores, member = uneven_classes()
    inside, outside = np.sort(scores[member]), np.sort(scores[~member])
    weight = stats.binom.pmf(np.arange(42), 41, 0.2)
    down = outside[::-1]
    over = [0, *((inside > t).sum() for t in down), 23]
    steps = np.array([(over[j] + over[j + 1]) / 2 for j in range(42)])
    line = np.polyfit(np.arange(42), steps, 1, w=np.sqrt(weight))
    c = np.clip(np.polyval(line, np.arange(42)), 0, 23)
    low, high = membership._tpr_interval(inside, outside, 0.2, 0.9)
    for limit, share in ((low, 0.05), (high, 0.95)):
        assert (weight * stats.beta.cdf(limit, c + 0.5, 23 - c + 0.5)).sum() == pytest.approx(share, rel=1e-5)
    found = membership._tpr_at(inside, outside, 0.2, 0.9)
    assert (found.low, found.high) == pytest.approx((min(low, found.value), max(high, found.value)))


def test_two_attacks_on_uneven_classes_by_loops():
    a, member = uneven_classes()
    b = (0.6 * a + np.random.default_rng(1).normal(size=64)).round(1)
    found = auc_difference(a, b, member, 0.9)
    gaps1 = [wins_of(x, a[~member]) - wins_of(y, b[~member]) for x, y in zip(a[member], b[member], strict=True)]
    gaps0 = [wins_of(y, b[member]) - wins_of(x, a[member]) for x, y in zip(a[~member], b[~member], strict=True)]
    half = stats.norm.ppf(0.95) * np.sqrt(np.var(gaps1, ddof=1) / 23 + np.var(gaps0, ddof=1) / 41)
    value = np.mean(gaps1)
    assert (found.value, found.low, found.high) == pytest.approx((value, value - half, value + half))
    same = auc_difference(a, a, member, 0.9)
    each = auc(a, member, 0.95)
    assert (same.value, same.low, same.high) == pytest.approx((0.0, each.low - each.high, each.high - each.low))
    few = auc_difference([3.0, 1.0, 2.0], [1.0, 2.0, 3.0], [1, 0, 0], 0.9)
    assert (few.value, few.low, few.high) == (1.0, -1.0, 1.0)


def test_few_records_and_many_points_by_hand():
    """Two non-members at an FPR of one half: none, one or both lie above the threshold, with 1/4, 1/2 and 1/4."""
    inside, outside = np.array([0.5, 1.5, 2.5, 3.5, 4.5]), np.array([1.0, 3.0])
    steps = np.array([(0 + 2) / 2, (2 + 4) / 2, (4 + 5) / 2])
    weight = np.array([0.25, 0.5, 0.25])
    c = (weight @ steps) + (steps[2] - steps[0]) / 2 * np.array([-1, 0, 1])
    for limit, share in zip(membership._tpr_interval(inside, outside, 0.5, 0.8), (0.1, 0.9), strict=True):
        assert (weight * stats.beta.cdf(limit, c + 0.5, 5.5 - c)).sum() == pytest.approx(share, rel=1e-5)
    apart = auc([5.0, 6.0, 1.0, 2.0, 3.0, 4.0], [1, 1, 0, 0, 0, 0], 0.9)  # two disjoint pairs, no exception
    assert (apart.value, apart.low, apart.high) == (1.0, pytest.approx(0.05**0.5), 1.0)
    scores, member = uneven_classes()
    assert auc(scores, member) == auc(scores, member, 0.95)
    assert auc_difference(scores, -scores, member) == auc_difference(scores, -scores, member, 0.95)
    even = np.arange(200.0)
    assert membership_scores(even, even % 2 == 0, fprs=(0.29,)).tpr_at_fpr[0].fpr_measured == 0.29
    drawn = membership._roc(even[::2], even[1::2], points=5).fpr
    assert drawn == [0.0, 0.01, 0.05, 0.22, 1.0]  # 1, 4.64, 21.5 and 100 of 100


@pytest.mark.parametrize(("members", "fpr"), [(40, 0.01), (4000, 0.01), (4000, 0.99)])
def test_limits_of_high_confidence_count_unlikely_thresholds(members, fpr):
    """One false positive of a hundred is allowed; that there are eight or more happens once in 100,000 times. So does,
    where all but one are allowed, that there are 92 or fewer."""
    inside, outside = np.arange(float(members)) * 100 / members, np.arange(100.0)
    weight = stats.binom.pmf(np.arange(101), 100, fpr)
    over = [0, *((inside > t).sum() for t in outside[::-1]), members]
    steps = np.array([(over[j] + over[j + 1]) / 2 for j in range(101)])
    c = np.clip(np.polyval(np.polyfit(np.arange(101), steps, 1, w=np.sqrt(weight)), np.arange(101)), 0, members)
    low, high = membership._tpr_interval(inside, outside, fpr, 1 - 1e-5)
    beyond = (weight * stats.beta.sf(high, c + 0.5, members - c + 0.5)).sum()
    under = (weight * stats.beta.cdf(low, c + 0.5, members - c + 0.5)).sum()
    assert (beyond if fpr < 0.5 else under) == pytest.approx(5e-6, rel=0.02)


def test_two_records_of_a_class_have_a_variance_and_one_has_none():
    """Members 1 and 3, others 0 and 2: three of four pairs are right, each side's shares are 1/2 and 1."""
    found = membership.auc([1.0, 3.0, 0.0, 2.0], [1, 1, 0, 0])
    half = 1.959964 * math.sqrt(2 * 0.125 / 2) / (0.75 * 0.25)
    limits = [1 / (1 + math.exp(-(math.log(3) + sign * half))) for sign in (-1, 1)]
    assert (found.value, found.interval) == (0.75, "DeLong, logit scale")
    assert [found.low, found.high] == pytest.approx(limits, rel=1e-4)
    alone = membership.auc([1.0, 0.0, 2.0], [1, 0, 0])
    assert (alone.value, alone.low, alone.high) == (0.5, 0.0, 1.0)


def test_the_shares_below_and_above_each_candidate_by_hand():
    """Members 3, 1, 2 and others 2, 0, 3, 5: a tie counts one half. The order is that of the candidates."""
    scores = np.array([2.0, 3.0, 0.0, 1.0, 3.0, 2.0, 5.0])
    member = np.array([False, True, False, True, False, True, False])
    below, above = membership._placements(scores, member)
    assert below == pytest.approx([2.5 / 4, 1 / 4, 1.5 / 4])
    assert above == pytest.approx([1.5 / 3, 3 / 3, 0.5 / 3, 0.0])


@pytest.mark.parametrize("turned", [False, True])
def test_attacks_that_differ_on_one_class_alone_are_paired(turned):
    """The others are alike, and lie between the members: one attack has the first of them above, one the second. Or
    the members are alike, and so are the others with the two attacks."""
    a, b = np.array([3.0, 1, 3, 1, 3, 1, 2, 2, 2, 2]), np.array([1.0, 3, 3, 1, 3, 1, 2, 2, 2, 2])
    member = (np.arange(10) < 6) ^ turned
    found = auc_difference(a, b, member, 0.9)
    half = stats.norm.ppf(0.95) * math.sqrt(np.var([1, -1, 0, 0, 0, 0], ddof=1) / 6)
    assert (found.value, found.low, found.high) == pytest.approx((0.0, -half, half))
    assert found.interval == "DeLong, paired"


def test_a_rate_next_to_one_leaves_out_one_record():
    """Five non-members: four are allowed above the threshold, however near to 1 the rate is."""
    (at,) = membership_scores([0.0, 1, 2, 3, 4, 2.5, -1], [0] * 5 + [1] * 2, fprs=[1 - 1e-12]).tpr_at_fpr
    assert (at.threshold, at.fpr_measured, at.value) == (0.0, 0.8, 0.5)


def test_so_many_records_as_a_rate_takes_are_named():
    """1 / (1 / 49) is a little more than 49 in floating point, and 49 are enough."""
    for number in (48, 49):
        (at,) = membership_scores([*range(number), 0.5], [0] * number + [1], fprs=[1 / 49]).tpr_at_fpr
        assert (at.value is None) is (number < 49)
    (few,) = membership_scores([0.0, 1.0, 0.5], [0, 0, 1], fprs=[1 / 49]).tpr_at_fpr
    assert few.reason == f"an FPR of {1 / 49:g} takes 49 non-members, and there are 2"


def test_a_step_that_the_line_leaves_out_is_within_the_limits():
    """One of a hundred members lies above ten of the others, and all above eleven: the line sees about half."""
    inside, outside = np.r_[np.full(99, 88.5), 99.5], np.arange(100.0)
    low, high = membership._tpr_interval(inside, outside, 0.1, 0.2)
    found = membership._tpr_at(inside, outside, 0.1, 0.2)
    assert 0.01 < low < high
    assert (found.value, found.low, found.high) == (0.01, 0.01, high)
