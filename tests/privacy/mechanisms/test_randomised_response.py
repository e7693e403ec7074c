"""Randomised response on labels and label counts."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from noised import Counts, Labels, context, examined, honest, measured, refuted, released
from scipy import stats
from torch import Tensor

from fedaudit import Up, private
from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism import protect
from fedaudit.privacy.mechanisms import randomised_response
from fedaudit.privacy.mechanisms.base import mechanism_named
from fedaudit.privacy.mechanisms.randomised_response import (
    CountScale,
    CountSizes,
    Flips,
    FlipScale,
    ResponseLoss,
    _deviation,
    flip,
    keeps,
)
from fedaudit.privacy.policy import read_policies
from fedaudit.wire.message import KINDS
from fedaudit.wire.release import Protection

ONE = {"mechanism": "randomised-response", "epsilon": 1.0}
HOW = mechanism_named("randomised-response")


def flips(factor):
    """Return a release that flips so many times as often as it promises: q' = factor q, and
    epsilon' = log((1 - q') (k - 1) / q')."""

    def sabotage(ready):
        q = factor * (1 - keeps(1 / ready.multiplier, ready.classes))
        return dataclasses.replace(ready, multiplier=1 / math.log((1 - q) * (ready.classes - 1) / q))

    return sabotage


def test_probabilities_by_hand():
    """epsilon = ln 3, k = 4: a label stays with probability 3 / (3 + 3) = 1/2 and becomes each other with 1/6. At
    u = 0.5 .. 0.666 it moves on by 1, up to 0.833 by 2, above by 3."""
    assert keeps(math.log(3), 4) == pytest.approx(0.5)
    labels, u = torch.tensor([3, 3, 3, 3, 0]), torch.tensor([0.49, 0.51, 0.7, 0.99, 0.9], dtype=torch.float64)
    assert flip(labels, u, 0.5, 4).tolist() == [3, 0, 1, 2, 3]


def test_a_number_that_rounds_up_to_one_moves_a_label_all_the_same():
    """The largest number below 1, for many p: for some of them (u - p) / (1 - p) is 1 in double precision. The label
    becomes the last of the others, and never itself."""
    u, label = torch.tensor([math.nextafter(1.0, 0.0)], dtype=torch.float64), torch.tensor([2])
    many = [p / 1000 for p in range(1, 999)]
    assert any(float((u - p) / (1 - p)) == 1.0 for p in many)
    assert {int(flip(label, u, p, 5)) for p in many} == {1}


@pytest.mark.parametrize("secure", [False, True])
def test_labels_stay_and_go_as_often_as_promised(secure):
    y = torch.zeros(20_000, dtype=torch.long)
    _, _, (sent,) = released(Labels, y, {**ONE, "secure": secure}, n=20_000, classes=5)
    assert sent.dtype == torch.long
    p = keeps(1.0, 5)
    seen = torch.bincount(sent, minlength=5).numpy()
    assert stats.chisquare(seen, 20_000 * np.array([p, *[(1 - p) / 4] * 4])).pvalue > 1e-3
    wrong = keeps(1.1, 5)
    assert stats.chisquare(seen, 20_000 * np.array([wrong, *[(1 - wrong) / 4] * 4])).pvalue < 1e-3


def test_counts_are_estimated_without_bias():
    """epsilon = ln 3, k = 4, n = 12: of the flipped counts (5, 3, 2, 2) the estimate is (5 - 2) / (1/2 - 1/6) = 9, 3, 0
    and 0. Over 2,000 releases its mean is the true counts."""
    true = torch.tensor([90.0, 6.0, 0.0, 24.0])
    made = torch.stack([released(Counts, true, ONE, key, n=120)[2][0] for key in range(2000)])
    error = made.std(0) / math.sqrt(2000)
    assert bool(((made.mean(0) - true).abs() < 4 * error).all())
    p = keeps(1.0, 4)
    r = (1 - p) / 3
    raw = made * (p - r) + 120 * r
    assert torch.allclose(raw, raw.round(), atol=1e-3)
    assert torch.allclose(raw.sum(1), torch.tensor(120.0), atol=1e-2)
    protection = protect(Counts(true), context(n=120, label_counts=ONE))[1]["n"]
    assert bool((made.std(0) <= 1.1 * protection.sigma).all())
    assert protection.keep == pytest.approx(p)
    half = protection.model_copy(update={"keep": 0.5})
    assert HOW.label_counts(torch.tensor([5.0, 3.0, 2.0, 2.0]), half).tolist() == pytest.approx([9, 3, 0, 0])


def test_the_ledger_has_the_epsilon_and_no_delta():
    """Any two labels: the ratio of an answer's probabilities is at most e^epsilon, and that is reached."""
    reply, _, (entry, *rest) = protect(Labels(torch.arange(10)), context(n=10, labels=ONE))
    assert reply.y.shape == (10,)
    assert (entry.noise_multiplier, entry.delta, entry.claim, rest) == (1.0, 0.0, 1.0, [])
    p = entry.keep
    assert p / ((1 - p) / 9) == pytest.approx(math.e)
    entry.rounds = [1]
    assert compose([entry.events()], 1e-5).epsilon_of_record <= 1.0
    total = protect(Labels(torch.arange(10)), context(n=10, labels={**ONE, "calibration": "total"}))[2][0]
    assert total.noise_multiplier == 5.0


@pytest.mark.parametrize(("epsilon", "k", "count"), [(2.0, 10, 1), (0.3, 10, 50), (1.0, 2, 20)])
def test_it_composes_as_dp_accounting_says(epsilon, k, count):
    """Their noise parameter is the probability of an answer that is drawn from all k classes: k / (k - 1) (1 - p)."""
    p = keeps(epsilon, k)
    theirs = pld.from_randomized_response((1 - p) * k / (k - 1), k).self_compose(count).get_epsilon_for_delta(1e-5)
    ours = compose([Event(1 / epsilon, 1.0, count, ResponseLoss(epsilon, p))], 1e-5)
    assert theirs - 1e-3 <= ours.epsilon_of_record <= theirs + 0.03
    assert all(value >= theirs - 1e-3 for value in ours.by_accountant.values())
    assert set(ours.by_accountant) == {"sum", "prv", "rdp"}


@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 0.0, 0.0), (0.9, 0.9, 1.0)])
def test_a_tenth_fewer_flips_are_found_in_labels(factor, least, most):
    share, finding = measured(Labels, torch.arange(200) % 10, ONE, 12, flips(factor), 30, n=200)
    assert finding.tells_at < 1e-3
    assert finding.finds >= 0.9
    assert least <= share <= most
    assert finding.scale == pytest.approx(factor, rel=0.05)
    assert finding.low <= factor <= finding.high


@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 0.0, 0.0), (0.9, 0.9, 1.0)])
def test_a_tenth_fewer_flips_are_found_in_counts(factor, least, most, monkeypatch):
    """Counts as unequal as a Dirichlet partition makes them; 40 releases of 500 records. The estimate is made as if
    there were as many flips as promised."""
    monkeypatch.setattr(randomised_response, "flip", lambda labels, u, p, k: flip(labels, u, 1 - factor * (1 - p), k))
    counts = torch.tensor([260.0, 120.0, 60.0, 40.0, 20.0, 0.0])
    share, finding = measured(Counts, counts, ONE, 40, honest, 10, n=500)
    assert finding.tells_at < 1e-3
    assert least <= share <= most
    assert finding.scale == pytest.approx(factor, rel=0.06)
    assert finding.low <= factor <= finding.high


def test_an_estimate_with_other_probabilities_is_found():
    """A tenth fewer flips, and the estimate made to fit: it has no bias, but comes from no whole counts."""
    counts = torch.tensor([260.0, 120.0, 60.0, 40.0, 20.0, 0.0])
    assert refuted(examined(Counts, counts, ONE, 2, 0, flips(0.9), n=500))
    assert not refuted(examined(Counts, counts, ONE, 2, 0, honest, n=500))


def test_equal_counts_cannot_tell():
    finding = examined(Counts, torch.full((5,), 20.0), ONE, 10, 0, honest, n=100)
    assert finding.tells_at == 1.0


def test_flips_that_all_go_to_one_class_are_found():
    """As many flips as promised, but every flipped label becomes the next class."""
    how, ready, _ = released(Labels, torch.zeros(2000, dtype=torch.long), ONE, n=2000)
    rng = np.random.default_rng(0)
    sent = np.where(rng.random(2000) < keeps(1.0, 10), 0, 1).astype(float)
    z = how.noise(sent, ready, 0, 0).z
    assert stats.kstest(z.ravel(), "norm").pvalue < 1e-9
    assert stats.kstest(how.noise(released(Labels, torch.zeros(2000, dtype=torch.long), ONE, 7, n=2000)[2][0].double()
                                  .numpy(), ready, 0, 0).z.ravel(), "norm").pvalue > 1e-3  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("embeddings", {}, "randomised response is for labels and label_counts"),
        ("weights", {}, "Use DP-SGD"),
        ("labels", {"epsilon": None, "noise_multiplier": 2.0}, "takes an epsilon"),
        ("labels", {"calibration": "classical"}, "classical calibration"),
        ("labels", {"mechanism": "gaussian"}, "Use mechanism = 'randomised-response'"),
    ],
)
def test_what_it_does_not_take(kind, values, words):
    with pytest.raises(PrivacyError, match=words):
        read_policies({kind: {**ONE, **values}}, KINDS)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Labels(torch.tensor([0, 10])), "outside of 0 to 9"),
        (Labels(torch.zeros(2)), "one class number per record"),
        (Labels(torch.zeros(11, dtype=torch.long)), "more labels than the client has records"),
        (Counts(torch.tensor([4.0, 5.0])), "counts 9 labels, but the client has 10"),
        (Counts(torch.tensor([4.5, 5.5])), "not counts"),
    ],
)
def test_values_that_it_does_not_take(reply, words):
    with pytest.raises(PrivacyError, match=words):
        protect(reply, context(n=10, labels=ONE, label_counts=ONE))


def test_an_entry_follows_from_its_policy():
    """epsilon = 2 ln 3 over two releases, k = 4: ln 3 each, so that a label stays with 1/2 and becomes each other with
    1/6. The deviation of counts is for all n labels."""
    made = context(n=12, label_counts={"mechanism": "randomised-response", "epsilon": 2 * math.log(3)})
    policy = made.policies["label_counts"]
    entry = protect(Counts(torch.tensor([3.0, 3.0, 3.0, 3.0])), made)[2][0]
    once = HOW.follows(entry, policy, 12, 4, 1)
    assert {name: getattr(entry, name) for name in once} == pytest.approx(once)
    assert once["sigma"] == entry.sigma
    twice = HOW.follows(entry, policy, 12, 4, 2)
    assert twice["keep"] == pytest.approx(0.5)
    assert twice["noise_multiplier"] == pytest.approx(1 / math.log(3))
    halved = protect(
        Counts(torch.tensor([3.0, 3.0, 3.0, 3.0])),
        context(n=12, label_counts={"mechanism": "randomised-response", "epsilon": math.log(3)}),
    )[2][0]
    assert twice["sigma"] == pytest.approx(halved.sigma)
    assert set(HOW.follows(entry, policy, 12, 4, None)) == {"mechanism", "relation", "delta", "claim"}
    of_labels = entry.model_copy(update={"sigma": None})
    assert "sigma" not in HOW.follows(of_labels, policy, 12, 4, 1)


def test_imitated_labels_stay_as_often_as_is_sent():
    """Labels 0 to 3 of which all are there: a half stays, and each other class is as likely."""
    rows = torch.arange(4).repeat(5000)
    made = HOW.imitated(rows, Protection(mechanism=HOW.name, keep=0.5), torch.Generator().manual_seed(0))
    assert made.dtype == rows.dtype
    seen = torch.bincount((made - rows) % 4, minlength=4).numpy()
    assert stats.chisquare(seen, 20_000 * np.array([1 / 2, 1 / 6, 1 / 6, 1 / 6])).pvalue > 1e-3
    assert int(made.max()) == 3


def test_its_label_says_whether_epsilon_is_for_the_whole_run():
    made = {"mechanism": "randomised-response", "epsilon": 2.0}
    (each,) = context(labels=made).policies.values()
    (whole,) = context(labels={**made, "calibration": "total"}).policies.values()
    assert HOW.label(each) == "ε=2, randomised response"
    assert HOW.label(whole) == "ε=2, whole run, randomised response"


def test_the_epsilon_of_fewer_flips_by_hand():
    """k = 4 and epsilon = ln 3: half of the labels are flipped. Half as often: log(3/4 * 3 / (1/4)) = ln 9."""
    _, ready, _ = released(Labels, torch.arange(4), {**ONE, "epsilon": math.log(3)}, n=4, classes=4)
    assert HOW.epsilon_at(ready, 1.0, 0.0) == pytest.approx(math.log(3))
    assert HOW.epsilon_at(ready, 0.5, 0.0) == pytest.approx(math.log(9))
    assert HOW.epsilon_at(ready, 0.0, 0.0) == math.inf
    assert HOW.epsilon_at(ready, 1.9, 0.0) == 0.0, "a label that is nearly always another tells something else"


@pytest.mark.parametrize(("dtype", "p"), [(torch.float32, 0.22), (torch.float32, 0.48), (torch.float64, 0.06)])
def test_the_largest_number_that_is_drawn_points_at_another_label(dtype, p):
    """Just below 1, (u - p) / (1 - p) is rounded to 1, which is one step beyond the last of the other labels."""
    u = torch.tensor([1 - torch.finfo(dtype).eps / 2], dtype=dtype)
    assert float((u - p) / (1 - p)) == 1.0
    for k in (2, 3, 10):
        assert flip(torch.tensor([1]), u, p, k).tolist() == [0], "the last step leads to the label before"


def test_the_deviation_of_an_estimated_count_by_hand():
    """12 labels, of which each stays with 1/2 and becomes each other with 1/6: 1/4 is the larger variance,
    12/4 = 3, and the estimate divides by 1/2 - 1/6. With 0.9 and 0.4 the labels that come from others vary more."""
    assert _deviation(12, 1 / 2, 1 / 6) == pytest.approx(3 * math.sqrt(3))
    assert _deviation(50, 0.9, 0.4) == pytest.approx(math.sqrt(50 * 0.24) / 0.5)
    made = context(n=12, classes=4, label_counts={"mechanism": "randomised-response", "epsilon": math.log(3)})
    assert protect(Counts(torch.tensor([3.0, 3.0, 3.0, 3.0])), made)[2][0].sigma == pytest.approx(3 * math.sqrt(3))


def test_flips_of_unequal_histograms_are_scored_by_shares():
    """Two clients with 10 and 40 records, the first of whom sends twice. The score is less each answer's true share."""
    few, many = np.array([8.0, 2.0]), np.array([10.0, 30.0])
    parts = [
        CountSizes(few, np.array([6.0, 4.0]), 0.7),
        CountSizes(many, np.array([15.0, 25.0]), 0.7),
        CountSizes(few, np.array([7.0, 3.0]), 0.7),
    ]
    by_hand = -(6 * 0.8 + 4 * 0.2) - (15 * 0.25 + 25 * 0.75) - (7 * 0.8 + 3 * 0.2)
    assert CountScale(parts).value == pytest.approx(by_hand)
    empty = [CountSizes(np.zeros(2), np.array([1.0, 0.0]), 0.7)]
    assert CountScale(empty).value == 0.0


def test_two_classes_are_enough_and_one_is_not():
    for classes in (2, 3):
        reply = protect(Labels(torch.tensor([0, 1, 1])), context(n=3, classes=classes, labels=ONE))[0]
        assert len(reply.y) == 3
    with pytest.raises(NotApplicable, match="at least two classes"):
        protect(Labels(torch.zeros(3, dtype=torch.long)), context(n=3, classes=1, labels=ONE))


@pytest.mark.parametrize("sent", [[4.0, 6.0], [0.123, 9.877]])
def test_noise_of_counts_is_not_free(sent):
    """Tests of single values take every number for possible. It holds for whole counts and for others."""
    found = randomised_response._noise_of_counts(
        np.array(sent) if sent[0] < 1 else (np.array(sent) - 10 * 0.3) / 0.4,
        np.array([3.0, 7.0]), 2, 0.7, np.random.default_rng(0),
    )  # fmt: skip
    assert found.free is False
    assert found.z.shape == (1, 1)


def test_the_test_of_flipped_labels_is_binomial():
    """Two tensors of 30 and 50 labels, of which 4 and 9 were flipped and a fifth should be: 13 of 80, by scipy's own
    distribution. Limits are where 13 or more, or 13 or fewer, are so rare."""
    scale = Flips(4, 30, 0.2).test([Flips(4, 30, 0.2), Flips(9, 50, 0.2)])
    assert scale == FlipScale(13, 80, 0.2)
    assert Flips(9, 50, 0.2).test([Flips(4, 30, 0.1)]) == FlipScale(4, 30, 0.1)
    assert scale.scale == pytest.approx(13 / 16)
    assert scale.p_values() == pytest.approx((stats.binom.cdf(13, 80, 0.2), stats.binom.sf(12, 80, 0.2)))
    low, high = scale.limits(0.1, 0.02)
    assert stats.binom.sf(12, 80, 0.2 * low) == pytest.approx(0.05)
    assert stats.binom.cdf(13, 80, 0.2 * high) == pytest.approx(0.02)
    assert FlipScale(0, 80, 0.2).p_values() == pytest.approx((0.8**80, 1.0))
    assert FlipScale(1, 80, 0.2).p_values() == pytest.approx((0.8**80 + 16 * 0.8**79, 1 - 0.8**80))


def test_what_flipped_labels_would_tell_by_hand():
    """With half as many flips, a tenth of 80, 11 or fewer come about in nine of ten cases, which the promise has at
    that level. More flips than there are labels are all of them."""
    scale = FlipScale(13, 80, 0.2)
    most = next(m for m in range(81) if stats.binom.cdf(m, 80, 0.1) >= 0.9)
    assert most == 12
    assert scale.level(0.5, 0.9) == pytest.approx(stats.binom.cdf(most, 80, 0.2))
    assert scale.level(7.0, 0.9) == 1.0
    many = FlipScale(130, 800, 0.2)
    found = many.finds(0.01, 0.9)
    levels = {i / 100: stats.binom.cdf(stats.binom.ppf(0.9, 800, 0.2 * i / 100), 800, 0.2) for i in range(1, 100)}
    assert found == pytest.approx(max(at for at, level in levels.items() if level < 0.01))
    assert 0.5 < found < 0.99
    assert FlipScale(0, 3, 0.2).finds(0.01, 0.9) == 0.0, "three labels tell nothing"


def test_scores_of_labels_by_hand():
    """k = 5 and p = 0.6: the share of a label that moved on by j lies in tenths j - 1 to j, and that of one that stayed
    above 0.4, where the random number says."""
    u = np.random.default_rng(3).random(6)
    sent, clean = np.array([1.0, 2.0, 0.0, 4.0, 3.0, 1.0]), np.array([0.0, 2.0, 4.0, 1.0, 4.0, 1.0])
    found = randomised_response._noise_of_labels(sent, clean, 5, 0.6, np.random.default_rng(3))
    shares = [u[0] / 10, 0.4 + 0.6 * u[1], u[2] / 10, (2 + u[3]) / 10, (3 + u[4]) / 10, 0.4 + 0.6 * u[5]]
    assert found.z.shape == (1, 6)
    assert found.z[0] == pytest.approx(stats.norm.ppf(shares))
    assert found.sizes == Flips(4, 6, pytest.approx(0.4))
    assert found.free is False


@pytest.mark.parametrize("u", [0.0, 1.0])
def test_scores_at_the_ends_are_finite(u):
    """A share of 0 or 1 is a number that is as far out as a double tells."""
    drawn = SimpleNamespace(random=lambda shape=None: u if shape is None else np.full(shape, u))
    labels = randomised_response._noise_of_labels(np.array([1.0, 0.0]), np.zeros(2), 2, 0.75, drawn).z[0]
    assert labels == pytest.approx([-37.04, stats.norm.ppf(0.25)] if u == 0 else [stats.norm.ppf(0.25), 8.2], abs=0.02)
    made = np.array([0.0, 1.0]) if u == 0 else np.array([1.0, 0.0])
    counts = randomised_response._noise_of_counts((made - 0.25) / 0.5, np.array([1.0, 0.0]), 2, 0.75, drawn).z
    assert counts == pytest.approx(np.array([[-37.04 if u == 0 else 8.2]]), abs=0.02)


def bernoulli_sums(chances):
    """Return the probability of each number of successes, trial by trial."""
    found = [1.0]
    for p in chances:
        found = [a * (1 - p) + b * p for a, b in zip([*found, 0.0], [0.0, *found], strict=True)]
    return np.array(found)


@pytest.mark.parametrize("made", [[4, 6, 2], [0, 12, 0], [-1, 14, -1], [15, -3, 0]])
def test_the_score_of_counts_by_hand(made):
    """12 labels, 7 of them of the largest class, k = 3 and p = 0.7: its count is the sum of 7 trials of 0.7 and 5 of
    0.15. A count that cannot be is taken for the nearest that can."""
    clean, made = np.array([3.0, 7.0, 2.0]), np.array(made, dtype=float)
    found = randomised_response._noise_of_counts((made - 12 * 0.15) / 0.55, clean, 3, 0.7, np.random.default_rng(5))
    chances, at = bernoulli_sums([0.7] * 7 + [0.15] * 5), int(min(max(made[1], 0), 12))
    share = chances[:at].sum() + np.random.default_rng(5).random() * chances[at]
    assert found.z == pytest.approx(np.array([[stats.norm.ppf(share)]]))
    assert found.sizes.clean is clean
    assert found.sizes.made == pytest.approx(made)
    assert (found.sizes.p, found.free) == (0.7, False)


@pytest.mark.parametrize(("n", "off", "far"), [(12, 0.009, False), (12, 0.011, True), (4000, 0.039, False),
                                               (4000, 0.041, True), (4000, -0.041, True)])  # fmt: skip
def test_counts_that_are_not_whole_are_far_out(n, off, far):
    """One of three is off, by more than 0.01 of up to 1,000 records, and by more than 0.04 of 4,000. Counts that lie
    outside are brought back."""
    clean = np.array([n - 4.0, 3.0, 1.0])
    made = np.array([n + 2.0, -2.0 + off, 0.0])
    found = randomised_response._noise_of_counts((made - n * 0.15) / 0.55, clean, 3, 0.7, np.random.default_rng(5))
    assert (found.z == 37.0).all() == far
    assert found.sizes.made == pytest.approx(np.array([n, 0, 0] if far else [n + 2, -2, 0]))
    assert (found.sizes.p, found.free, found.z.shape) == (0.7, False, (1, 1))
    assert found.sizes.clean is clean


def test_the_probabilities_of_counts_at_another_scale_by_hand():
    """p = 0.7: three tenths are flipped, half as often 0.15. Of three classes each other gets a half of it. The rows
    are weighted with the true counts, times two for the client that sends twice."""
    few, many = np.array([8.0, 2.0, 0.0]), np.array([10.0, 30.0])
    parts = [CountSizes(few, few, 0.7), CountSizes(many, many, 0.7), CountSizes(few, few, 0.7)]
    (alone,) = parts[1].test(parts[1:2])._at(1.0)
    assert alone == pytest.approx(np.array([[0.7, 0.3], [0.3, 0.7]]))
    scale = parts[0].test(parts)
    three, two = scale._at(0.5)
    assert three == pytest.approx(np.array([[0.85, 0.075, 0.075], [0.075, 0.85, 0.075], [0.075, 0.075, 0.85]]))
    assert two == pytest.approx(np.array([[0.85, 0.15], [0.15, 0.85]]))
    assert scale._at(9.0)[0] == pytest.approx(np.array([[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]))
    assert scale._chances[1] == pytest.approx(np.array([[0.7, 0.3], [0.3, 0.7]]))
    assert [t.tolist() for t in scale._times] == [[16.0, 4.0, 0.0], [10.0, 30.0]]
    assert [s.tolist() for s in scale._scores] == [[[-0.8, -0.2, 0.0]] * 3, [[-0.25, -0.75]] * 2]


def test_the_loss_of_an_answer_by_hand():
    """epsilon = ln 3 and p = 1/2: +ln 3 with 1/2, -ln 3 with 1/6, and 0 with 1/3. Probabilities that do not fit are
    made to add up, and none is below 0."""
    loss = ResponseLoss(math.log(3), 0.5)
    values, chances = loss.atoms
    assert values == pytest.approx([-math.log(3), 0, math.log(3)])
    assert chances == pytest.approx([1 / 6, 1 / 3, 1 / 2])
    assert (loss.pure, loss.infinite, loss.largest) == (math.log(3), 0.0, math.log(3))
    assert ResponseLoss(math.log(3), 0.9).atoms[1] == pytest.approx([1 / 4, 0, 3 / 4])


def test_the_event_of_an_entry_by_hand():
    """Two steps in each of three rounds. What has no noise, is free, or does not say how often a label stays, goes by
    its multiplier alone."""
    facts = {"field": "Sent.y", "kind": "labels", "mechanism": HOW.name, "relation": "replace-one", "steps": 2,
             "rounds": [1, 2, 4]}  # fmt: skip
    told = HOW.event(LedgerEntry(**facts, noise_multiplier=0.5, keep=0.4))
    assert told == Event(0.5, 1.0, 6, ResponseLoss(2.0, 0.4))
    for m, keep in ((0.0, 0.4), (math.inf, 0.4), (0.5, None)):
        assert HOW.event(LedgerEntry(**facts, noise_multiplier=m, keep=keep)) == Event(m, 1.0, 6)


def test_a_release_of_labels_and_its_entry_by_hand():
    """epsilon = 2 ln 3 for five releases of all, two of which this one counts as: ln 3 of two, k = 4."""
    policy = {**ONE, "epsilon": 2 * math.log(3), "calibration": "total", "releases": 2, "relation": "zero-out"}
    labels = torch.tensor([3, 0, 1])
    how, ready, (sent,) = released(Labels, labels, policy, n=3, classes=4)
    assert ready.leaves[0] is labels
    assert (ready.sensitivities, ready.delta, ready.deviation) == ([1.0], 0.0, 1.0)
    assert (ready.classes, ready.moves, ready.grid) == (4, None, None)
    assert ready.multiplier == pytest.approx(1 / math.log(3))
    assert (ready.bounded.relation, ready.bounded.guaranteed) == ("zero-out", True)
    assert sent.dtype == torch.int64
    rules = context(labels=policy).policies["labels"]
    entry = how.entry("Labels.y", "labels", rules, ready)
    assert entry == LedgerEntry(
        field="Labels.y", kind="labels", mechanism="randomised-response", noise_multiplier=ready.multiplier,
        relation="zero-out", delta=0.0, claim=rules.epsilon, keep=entry.keep,
    )  # fmt: skip
    assert entry.keep == pytest.approx(0.5)


def test_a_release_of_counts_and_its_entry_by_hand():
    """epsilon = ln 3, k = 4, n = 12: p = 1/2, r = 1/6, and a deviation of sqrt(12 / 4) / (1/3) = 3 sqrt(3)."""
    policy = {**ONE, "epsilon": math.log(3)}
    how, ready, (sent,) = released(Counts, torch.tensor([7, 0, 1, 4]), policy, n=12, classes=None)
    assert (ready.sensitivities, ready.delta, ready.classes, ready.moves) == ([1.0], 0.0, 4, 2)
    assert ready.sigmas == pytest.approx([3 * math.sqrt(3)])
    assert ready.scales == pytest.approx([1 / math.log(3)])
    assert sent.dtype == torch.float32
    assert released(Counts, torch.tensor([7.0, 5.0]).double(), policy, n=12)[2][0].dtype == torch.float64
    rules = context(label_counts=policy).policies["label_counts"]
    entry = how.entry("Counts.n", "label_counts", rules, ready)
    assert entry == LedgerEntry(
        field="Counts.n", kind="label_counts", mechanism="randomised-response", noise_multiplier=ready.multiplier,
        relation="replace-one", sigma=entry.sigma, sensitivity=1.0, delta=0.0, claim=math.log(3), keep=entry.keep,
    )  # fmt: skip
    assert (entry.sigma, entry.keep) == pytest.approx((3 * math.sqrt(3), 0.5))


def test_a_release_by_numbers_that_are_given(monkeypatch):
    """epsilon = ln 3, k = 4: at u = 1/2 a label moves on by 1, from 2/3 on by 2, from 5/6 on by 3. The counts 2, 0, 1
    and 1 are labels 0, 0, 2, 3, which become 0, 1, 0, 2: the estimate is (m - 4 / 6) / (1/3)."""
    u, keys = torch.tensor([0.3, 0.5, 0.7, 0.9], dtype=torch.float64), []
    monkeypatch.setattr(type(HOW), "_uniform", lambda self, like, policy, key: keys.append((like.tolist(), key)) or u)
    policy = {**ONE, "epsilon": math.log(3)}
    (labels,) = released(Labels, torch.tensor([3, 3, 3, 1], dtype=torch.int32), policy, "k", n=9, classes=4)[2]
    assert (labels.tolist(), labels.dtype) == ([3, 0, 1, 0], torch.int32)
    (counts,) = released(Counts, torch.tensor([2.0, 0.0, 1.0, 1.0]), policy, "k", n=4)[2]
    assert counts.tolist() == pytest.approx([4, 1, 1, -2])
    assert keys == [([3, 3, 3, 1], ("k", "Labels.y", 0)), ([0, 0, 2, 3], ("k", "Counts.n", 0))]


@pytest.mark.parametrize("secure", [False, True])
def test_numbers_that_are_drawn_by_key_or_by_the_system(secure):
    policy = context(labels={**ONE, "secure": secure}).policies["labels"]
    like = torch.zeros(2, 30)
    one, same, other = (HOW._uniform(like, policy, (key,)) for key in "aab")
    assert (one.shape, one.dtype) == ((2, 30), torch.float64)
    assert bool(((one >= 0) & (one < 1)).all())
    assert torch.equal(one, same) is not secure
    assert not torch.equal(one, other)


class Bytes(Up):
    y: Tensor = private("labels", via="data", unit="record", dtype="uint8")


class OfAll(Up):
    y: Tensor = private("labels", via="data", unit="client")


class Two(Up):
    y: tuple[Tensor, ...] = private("labels", via="data", unit="record")


@pytest.mark.parametrize(
    ("reply", "facts", "words"),
    [
        (Labels(torch.tensor([0, 3, 2])), {}, None),
        (Labels(torch.tensor([], dtype=torch.long)), {}, None),
        (Labels(torch.tensor([0, 4])), {}, "outside of 0 to 3"),
        (Labels(torch.tensor([-1, 3])), {}, "outside of 0 to 3"),
        (Labels(torch.tensor([0, 3, 2, 1])), {}, "more labels than the client has records"),
        (Labels(torch.tensor([[0, 3]])), {}, "takes one vector"),
        (Labels(torch.tensor([0, 3])), {"classes": None}, "the number of classes is not known"),
        (Bytes(torch.tensor([0, 3])), {}, "travels as uint8"),
        (OfAll(torch.tensor([0, 3])), {}, "one class number per record"),
        (Two((torch.tensor([0]), torch.tensor([1]))), {}, "takes one vector"),
        (Counts(torch.tensor([3.0, 0.0])), {}, None),
        (Counts(torch.tensor([3.0, -1.0, 1.0])), {}, "not counts"),
        (Counts(torch.tensor([1.5, 1.5])), {}, "not counts"),
        (Counts(torch.tensor([1.0, 1.0])), {}, "counts 2 labels, but the client has 3"),
        (Counts(torch.tensor([3.0])), {}, "at least two classes"),
        (Counts(torch.tensor([[3.0, 0.0]])), {}, "takes one vector"),
    ],
)
def test_values_at_the_limits_of_what_it_takes(reply, facts, words):
    made = context(**{"n": 3, "classes": 4, "labels": ONE, "label_counts": ONE, **facts})
    if words is None:
        assert len(protect(reply, made)[2]) == 1
        return
    with pytest.raises(PrivacyError, match=words):
        protect(reply, made)


def test_a_protection_that_does_not_say_how_often_a_label_stays():
    """All of them stay."""
    rows, told = torch.tensor([2, 0, 1, 1]), Protection(mechanism=HOW.name)
    assert HOW.imitated(rows, told, torch.Generator().manual_seed(0)).tolist() == [2, 0, 1, 1]
    assert HOW.label_counts(torch.tensor([5.0, 3.0, 0.0]), told).tolist() == [5.0, 3.0, 0.0]


def test_estimated_counts_are_never_below_zero():
    """k = 3, p = 1/2, r = 1/4, n = 8: (m - 2) / (1/4) of 5, 3 and 0."""
    half = Protection(mechanism=HOW.name, keep=0.5)
    assert HOW.label_counts(torch.tensor([5.0, 3.0, 0.0]), half).tolist() == pytest.approx([12, 4, 0])


def test_its_words():
    """The worst of the entries is the one with the least noise."""
    facts = {"field": "Sent.y", "kind": "labels", "mechanism": HOW.name, "relation": "replace-one"}
    much = LedgerEntry(**facts, noise_multiplier=2.0, keep=0.2, claim=0.5, rounds=[1, 2])
    less = LedgerEntry(**facts, noise_multiplier=0.5, keep=0.4567, claim=2.0, rounds=[3])
    assert HOW.words([much, less]) == (
        "randomised response: a label stays in 45.7%, 3 releases; asked for: ε = 2 per release", "noise",
    )  # fmt: skip
    assert HOW.words([LedgerEntry(**facts, noise_multiplier=0.5, rounds=[3])]) == (
        "randomised response: a label stays in 100.0%, 1 release", "noise",
    )  # fmt: skip
    assert HOW.shown(less) == "randomised-response, a label stays with probability 0.4567, replace-one"
    assert HOW.shown(LedgerEntry(**facts, noise_multiplier=0.5)).endswith("with probability 1, replace-one")


@pytest.mark.parametrize(("scale", "epsilon"), [(1.99, 0.0), (2.0, 0.0), (2.5, 0.0), (1e-9, math.log(6e9))])
def test_the_epsilon_of_very_many_and_very_few_flips(scale, epsilon):
    """k = 4 and epsilon = ln 3: half of the labels are flipped, at most all of them."""
    _, ready, _ = released(Labels, torch.arange(4), {**ONE, "epsilon": math.log(3)}, n=4, classes=4)
    assert HOW.epsilon_at(ready, scale, 0.0) == pytest.approx(epsilon)
    assert HOW.epsilon_at(ready, -1.0, 0.0) == math.inf
