"""Laplace noise: bounds in L1, epsilon without delta, its cost and the test of its scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from noised import Counts, Images, Many, Means, Rows, context, measured, profile, released, times
from scipy import integrate, stats

from fedaudit.epsilon.noise_tests import Residual, examine
from fedaudit.errors import PrivacyError
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism import protect
from fedaudit.privacy.mechanisms import laplace
from fedaudit.privacy.mechanisms.base import Prepared, mechanism_named
from fedaudit.privacy.mechanisms.laplace import LaplaceLoss, LaplaceScale, LaplaceSizes
from fedaudit.privacy.policy import Policy, read_policies
from fedaudit.privacy.sensitivity import Bounding
from fedaudit.wire.codec import digest_of
from fedaudit.wire.message import KINDS
from fedaudit.wire.release import Protection

TWO = {"mechanism": "laplace", "epsilon": 2.0, "sensitivity": "clip:3"}


def entry(reply, relation="replace-one", **more):
    (declared,) = reply.declared().values()
    return protect(reply, context(**{declared.kind: {**TWO, "relation": relation, **more}}))[2][0]


@pytest.mark.parametrize(("relation", "swing"), [("replace-one", 2), ("zero-out", 1)])
def test_sensitivities_add_up_in_l1(relation, swing):
    """C = 3. A record's row: swing C. Four rows that depend on all records: 4 x 2 C. Label counts: one goes down and
    one up, 2; a zeroed record is missing in one, 1. The scale is sensitivity / epsilon, the deviation sqrt(2) times."""
    row = entry(Rows(torch.randn(8, 5)), relation)
    assert row.sensitivity == swing * 3
    assert row.sigma == pytest.approx(math.sqrt(2) * swing * 3 / 2)
    assert row.noise_multiplier == 0.5
    assert row.delta == 0.0
    assert entry(Many(torch.randn(4, 5)), relation).sensitivity == 4 * 2 * 3
    assert entry(Counts(torch.tensor([400.0, 600.0])), relation).sensitivity == swing


def test_two_class_means_move_by_twice_one():
    """N_c = 11 rows clipped to C = 3: one record moves the mean of a class by 2 C / 10, and it may move two."""
    made = context(prototypes=TWO)
    mean = torch.ones(3)
    made.means[digest_of(mean)] = (3.0, 11)
    assert protect(Means({0: mean}), made)[2][0].sensitivity == pytest.approx(2 * 2 * 3 / 10)


def test_rows_are_clipped_in_l1():
    """[3, 4, 5] has an L1 norm of 12, four times C = 3; [1, -1, 0.5] is within."""
    rows = torch.tensor([[3.0, 4.0, 5.0], [1.0, -1.0, 0.5]])
    _, ready, _ = released(Rows, rows, TWO)
    assert torch.allclose(ready.leaves[0], torch.tensor([[0.75, 1.0, 1.25], [1.0, -1.0, 0.5]]))


@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_is_laplace_of_the_promised_scale(secure):
    """Scale 3 = 2 C / epsilon. Other scales, and a normal distribution of the same deviation, are told apart."""
    policy = {**TWO, "secure": secure}
    noise = released(Rows, torch.zeros(400, 50), policy)[2][0].flatten().double().numpy()
    assert stats.kstest(noise, stats.laplace(0, 3).cdf).pvalue > 1e-3
    assert stats.kstest(noise, stats.laplace(0, 3.5).cdf).pvalue < 1e-3
    assert stats.kstest(noise, stats.norm(0, 3 * math.sqrt(2)).cdf).pvalue < 1e-3
    again = released(Rows, torch.zeros(400, 50), policy)[2][0].flatten().double().numpy()
    assert np.array_equal(noise, again) != secure


def test_total_shares_epsilon_out():
    assert entry(Rows(torch.zeros(4, 2)), calibration="total", releases=7).noise_multiplier == pytest.approx(7 / 2)


def test_the_loss_by_hand():
    """Shift e = ln 4. P[loss = e] = 1/2, P[loss = -e] = e^-e / 2 = 1/8, P[loss <= 0] = e^(-e / 2) / 2 = 1/4; the mean
    is e - 1 + 1/4; delta(0) = 1 - e^(-e / 2) = 1/2."""
    e = math.log(4)
    loss = LaplaceLoss(e)
    assert loss.cdf(np.array([-e - 1e-9, -e, 0.0, e - 1e-9, e])) == pytest.approx([0, 1 / 8, 1 / 4, 1 / 2, 1])
    assert loss.mean() == pytest.approx(e - 3 / 4)
    grid = np.linspace(-e, e, 4001)
    chances = np.diff(np.concatenate([[0.0], loss.cdf(grid)]))
    for x in (0.0, 0.5, 1.0):
        assert profile(grid, chances, x) == pytest.approx(1 - math.exp((x - e) / 2), abs=1e-3)


@pytest.mark.parametrize("order", [1.5, 2.0, 8.0])
def test_the_renyi_divergence_is_the_integral(order):
    def density(x, centre):
        return math.exp(-abs(x - centre)) / 2

    whole, _ = integrate.quad(
        lambda x: density(x, 0) ** order * density(x, 0.7) ** (1 - order), -60, 60, points=[0, 0.7]
    )
    assert LaplaceLoss(0.7).renyi([order])[0] == pytest.approx(math.log(whole) / (order - 1), rel=1e-6)


def test_no_split_of_a_shift_costs_more():
    """Shifts 0.3 and 0.7 of two numbers against one of 1.0: delta of the product, by its definition on a grid."""
    grids = [np.linspace(-e, e, 801) for e in (0.3, 0.7)]
    chances = [np.diff(np.concatenate([[0.0], LaplaceLoss(e).cdf(g)])) for e, g in zip((0.3, 0.7), grids, strict=True)]
    values, both = np.add.outer(*grids).ravel(), np.multiply.outer(*chances).ravel()
    for x in (0.0, 0.3, 0.6, 0.9):
        product = float((both * np.maximum(0, 1 - np.exp(x - values))).sum())
        assert product <= 1 - math.exp((x - 1) / 2) + 1e-4
    assert float((both * np.maximum(0, 1 - np.exp(0.6 - values))).sum()) < 0.9 * (1 - math.exp(-0.2))


@pytest.mark.parametrize(("epsilon", "count"), [(2.0, 1), (0.3, 10), (0.1, 100), (1.0, 30)])
def test_it_composes_as_dp_accounting_says(epsilon, count):
    theirs = pld.from_laplace_mechanism(1 / epsilon).self_compose(count).get_epsilon_for_delta(1e-5)
    ours = compose([Event(1 / epsilon, 1.0, count, LaplaceLoss(epsilon))], 1e-5)
    assert theirs - 1e-3 <= ours.epsilon_of_record <= theirs + 0.03
    assert ours.by_accountant["sum"] == pytest.approx(epsilon * count)
    assert set(ours.by_accountant) == {"sum", "prv", "rdp"}
    assert all(value >= theirs - 1e-3 for value in ours.by_accountant.values())


@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 0.0, 0.0), (0.9, 0.9, 1.0)])
def test_noise_x_09_is_found_and_honest_noise_is_not(factor, least, most):
    """4,000 numbers a run: at a level of 0.001 they find noise x 0.9 in 99 of 100 runs, by the test's own account."""
    share, finding = measured(Rows, torch.ones(20, 20), TWO, 10, times(factor), 30)
    assert finding.finds >= 0.9
    assert finding.tells_at < 1e-3
    assert least <= share <= most
    assert finding.scale == pytest.approx(factor, rel=0.05)
    assert finding.low <= factor <= finding.high


def test_scores_and_scale_by_hand():
    """Scale 3. Noise of 3 ln 2 lies at the share 1 - 1/4 of the distribution: its score is 0.67449; noise of 0 has the
    score 0. One magnitude of ln 2 scales is smaller with probability 1/2; the scale estimate is ln 2."""
    how, ready, _ = released(Rows, torch.zeros(1, 3), TWO)
    noise = how.noise(np.array([[3 * math.log(2), 0.0, -3 * math.log(2)]]), ready, 0, 0)
    assert noise.z[0] == pytest.approx([0.6744898, 0.0, -0.6744898], abs=1e-6)
    scale = LaplaceScale(1, math.log(2))
    assert scale.p_values() == pytest.approx((0.5, 0.5))
    assert scale.scale == pytest.approx(math.log(2))


def test_normal_noise_of_the_same_deviation_is_found():
    """As large as promised, but of another shape: the scores are too few far out."""
    how, ready, _ = released(Rows, torch.ones(60, 50), TWO)
    sent = ready.leaves[0].double().numpy() + ready.sigmas[0] * np.random.default_rng(0).normal(size=(60, 50))
    noise = how.noise(sent, ready, 0, 0)
    finding = examine([Residual(0, 1, "E", noise.z, 0 * noise.z, noise.sizes)])
    assert finding.p < 1e-3
    assert finding.strongest.name != "scale" or finding.scale > 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epsilon": 0.5, "calibration": "classical"}, "classical calibration is for Gaussian noise"),
        ({"epsilon": 1.0, "sensitivity": "random-pixel"}, "Use clip=C"),
        ({}, "either epsilon or noise_multiplier"),
    ],
)
def test_what_it_does_not_take(values, words):
    with pytest.raises(PrivacyError, match=words):
        read_policies({"embeddings": {"mechanism": "laplace", **values}}, KINDS)


def test_images_of_eight_bits_are_refused():
    with pytest.raises(PrivacyError, match="travels as uint8"):
        protect(Images(torch.zeros(1, 1, 2, 2)), context(synthetic_images=TWO))


def test_imitated_noise_is_laplace_of_the_deviation_that_is_sent():
    """Deviation 3, hence scale 3 / sqrt(2). Kolmogorov and Smirnov tell it from another and from a normal one."""
    how = mechanism_named("laplace")
    made = how.imitated(torch.zeros(20_000), Protection(mechanism="laplace", sigma=3.0), torch.Generator())
    found = made.double().numpy()
    assert stats.kstest(found, "laplace", (0, 3 / math.sqrt(2))).pvalue > 1e-3
    assert stats.kstest(found, "laplace", (0, 3)).pvalue < 1e-3
    rows = how.imitated(
        torch.tensor([[8.0, 8.0]]), Protection(mechanism="laplace", sigma=0.0, clip=4.0), torch.Generator()
    )
    assert rows.tolist() == [[2.0, 2.0]], "clipped in L1"


def test_quantiles_are_those_of_noise_with_deviation_1():
    """Of Laplace's distribution at scale 1 / sqrt(2), by scipy's own; the middle is 0, and both sides are alike."""
    shares = np.array([0.001, 0.2, 0.5, 0.7, 0.999])
    found = mechanism_named("laplace").quantiles(shares)
    assert found == pytest.approx(stats.laplace.ppf(shares, scale=1 / math.sqrt(2)), abs=1e-12)


def test_the_test_of_the_scale_by_chi_square():
    """Magnitudes 0.5, 2 and 1 of one tensor and 4 of another: four that add up to 7.5, twice of which is a chi-square
    number of 8 degrees. Limits are where so little, or so much, is as rare as the level says."""
    parts = [LaplaceSizes(np.array([[0.5, 2.0, 1.0]])), LaplaceSizes(np.array([4.0]))]
    scale = parts[0].test(parts)
    assert (scale.n, scale.total) == (4, 7.5)
    assert scale.scale == 7.5 / 4
    assert scale.p_values() == pytest.approx((stats.chi2.cdf(15, 8), stats.chi2.sf(15, 8)))
    low, high = scale.limits(0.1, 0.02)
    assert stats.chi2.sf(15 / low, 8) == pytest.approx(0.05)
    assert stats.chi2.cdf(15 / high, 8) == pytest.approx(0.02)
    found = scale.finds(0.02, 0.9)
    assert stats.chi2.cdf(stats.chi2.ppf(0.02, 8) / found, 8) == pytest.approx(0.9)
    assert scale.level(0.5, 0.9) == pytest.approx(stats.chi2.cdf(0.5 * stats.chi2.ppf(0.9, 8), 8))
    assert scale.level(found, 0.9) == pytest.approx(0.02)


def test_noise_by_its_inverse_distribution():
    """v = 1/2 lies at ln 2, -3/4 at -ln 4, 0 at 0; the ends are cut off at 53 bits."""
    v = torch.tensor([0.5, -0.75, 0.0, 1.0, -1.0], dtype=torch.float64)
    end = 53 * math.log(2)
    assert laplace._laplace(v).tolist() == pytest.approx([math.log(2), -math.log(4), 0.0, end, -end])


@pytest.mark.parametrize("secure", [False, True])
def test_drawn_noise_follows_the_number_that_is_drawn(monkeypatch, secure):
    """u = 3/4 is v = 1/2, and noise of scale 3 is 3 ln 2; u = 1/8 is v = -3/4. Numbers keep the type of the values."""
    u = [0.75, 0.125]
    how, policy = mechanism_named("laplace"), Policy(mechanism="laplace", epsilon=1.0, secure=secure)
    monkeypatch.setattr(laplace, "system_uniform", lambda n: np.array(u[:n]) if secure else 1 / 0)
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.tensor(u, dtype=torch.float64).reshape(shape))
    like = torch.zeros(2, 1, dtype=torch.float32)
    drawn = how.draw(like, 3.0, policy, ("k",))
    assert (drawn.shape, drawn.dtype) == ((2, 1), torch.float32)
    assert drawn.ravel().tolist() == pytest.approx([3 * math.log(2), -3 * math.log(4)])
    standard = how.standard(like, torch.Generator())
    assert (standard.shape, standard.dtype) == ((2, 1), torch.float32)
    assert standard.ravel().tolist() == pytest.approx([math.log(2) / math.sqrt(2), -math.log(4) / math.sqrt(2)])


def test_scores_of_each_tensor_by_hand():
    """Scales 1.5 and 2. A noise of -2 scales lies at the share e^-2 / 2; what is very far out is still a number."""
    how = mechanism_named("laplace")
    ready = Prepared([torch.tensor([[1.0]]), torch.tensor([4.0, 0.0, 1.0])], [3.0, 4.0], 0.5, 0.0, Bounding("any"))
    found = how.noise(np.array([0.0, 1e6, 1.0]), ready, 1, 0)
    assert found.z.tolist() == [pytest.approx([stats.norm.ppf(math.exp(-2) / 2), 37.04, 0.0], abs=0.01)]
    assert found.sizes.sizes.tolist() == [[2.0, 5e5, 0.0]]
    assert found.free is True
    first = how.noise(np.array([[2.5]]), ready, 0, 0)
    assert first.z[0, 0] == pytest.approx(stats.norm.ppf(1 - math.exp(-1) / 2))
    silent = Prepared([torch.tensor([4.0])], [0.0], 0.5, 0.0, Bounding("any"))
    assert how.noise(np.array([4.0]), silent, 0, 0).z.tolist() == [[0.0]]


def test_the_event_and_the_epsilon_of_an_entry_by_hand():
    """Two steps in each of three rounds; a multiplier of 1/2 shifts by 2."""
    how = mechanism_named("laplace")
    facts = {"field": "A.b", "kind": "logits", "mechanism": "laplace", "relation": "zero-out", "steps": 2,
             "rounds": [1, 2, 4]}  # fmt: skip
    assert how.event(LedgerEntry(**facts, noise_multiplier=0.5)) == Event(0.5, 1.0, 6, LaplaceLoss(2.0))
    for m in (0.0, math.inf):
        assert how.event(LedgerEntry(**facts, noise_multiplier=m)) == Event(m, 1.0, 6)
    assert how.epsilon(0.25, 1e-5) == 4.0
    assert how.epsilon(1e-6, 1e-5) == math.inf
    assert how.epsilon(2e-6, 1e-5) == 5e5
    loss = LaplaceLoss(2.0)
    assert (loss.pure, loss.largest, loss.infinite) == (2.0, 2.0, 0.0)
    assert how.delta(Policy(mechanism="laplace", epsilon=1.0, delta=1e-3), 10) == 0.0
    assert how.multiplier(Policy(mechanism="laplace", epsilon=4.0), 0.0, 3, None) == 0.75


def test_its_direction_and_its_words():
    """One number alone is the worst of its L1 norm. A sigma of 3 is a scale of 3 / sqrt(2)."""
    how = mechanism_named("laplace")
    assert how.direction(torch.full((2, 2), 7.0)).tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert how.direction(torch.zeros(0)).shape == (0,)
    facts = {"field": "A.b", "kind": "logits", "mechanism": "laplace", "relation": "zero-out", "noise_multiplier": 1.0}
    assert how.shown(LedgerEntry(**facts)) == "laplace"
    assert how.shown(LedgerEntry(**facts, sigma=3.0, sensitivity=2.0)) == (
        "laplace, sigma 3, sensitivity 2, zero-out, scale 2.121 (L1)"
    )
    assert (how.norm, how.deviation, how.normal, how.rounds, how.persons) == (1, math.sqrt(2), False, False, False)
