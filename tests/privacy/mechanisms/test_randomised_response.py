"""Randomised response on labels and label counts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from noised import Counts, Labels, context, examined, honest, measured, refuted, released
from scipy import stats

from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.mechanism import protect
from fedaudit.privacy.mechanisms import randomised_response
from fedaudit.privacy.mechanisms.base import mechanism_named
from fedaudit.privacy.mechanisms.randomised_response import (
    CountScale,
    CountSizes,
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
