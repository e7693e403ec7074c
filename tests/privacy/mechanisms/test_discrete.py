"""Noise of whole numbers: discrete Gaussian and Skellam."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution as pld
from noised import Answers, Counts, Images, Means, Rows, context, measured, profile, released, times
from scipy import stats
from torch import Tensor

from fedaudit import Up, private
from fedaudit.errors import PrivacyError
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.calibration import gaussian_delta
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism import protect
from fedaudit.privacy.mechanisms import discrete
from fedaudit.privacy.mechanisms.base import Prepared, mechanism_named
from fedaudit.privacy.mechanisms.discrete import ORDERS, UnitShift, WholeScale, WholeSizes, reach
from fedaudit.privacy.policy import Policy, read_policies
from fedaudit.privacy.sensitivity import Bounding
from fedaudit.wire.message import KINDS
from fedaudit.wire.release import Protection

BOTH = ("discrete-gaussian", "skellam")


def policy(name, **values):
    return {"mechanism": name, "epsilon": 2.0, "delta": 1e-5, "sensitivity": "clip:3", **values}


def chances(name, sigma):
    p = mechanism_named(name).chances(sigma)
    return p, np.arange(len(p)) - (len(p) - 1) // 2


def test_probabilities_by_hand():
    """Discrete Gaussian, sigma = 1: weights 1, e^-1/2, e^-2, e^-9/2, ... add up to 2.5066283 (Jacobi's theta, within
    1e-8 of sqrt(2 pi)), so that P[0] = 0.3989423 and P[1] = 0.2419707. Skellam, variance 2: two Poisson numbers of mean
    1 are equal with probability e^-2 (1 + 1 + 1/4 + 1/36 + 1/576 + ...) = 0.3085083."""
    p, k = chances("discrete-gaussian", 1.0)
    assert p[k == 0] == pytest.approx(0.3989423, abs=1e-7)
    assert p[k == 1] == pytest.approx(0.2419707, abs=1e-7)
    p, k = chances("skellam", math.sqrt(2))
    equal = math.exp(-2) * math.fsum(1 / math.factorial(j) ** 2 for j in range(30))
    assert equal == pytest.approx(0.3085083, abs=1e-7)
    assert p[k == 0] == pytest.approx(equal)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("sigma", [0.7, 3.0, 300.0])
def test_probabilities_add_up_and_have_the_deviation(name, sigma):
    p, k = chances(name, sigma)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert float(p @ k) == pytest.approx(0, abs=1e-9)
    if name == "skellam" or sigma > 1:
        assert float(p @ k**2) == pytest.approx(sigma**2, rel=1e-6)
    assert len(p) == 2 * reach(sigma) + 1


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("secure", [False, True])
def test_counts_get_whole_noise_of_the_promised_probabilities(name, secure):
    """10,000 counts that depend on one record each would be too few to tell sigma from 1.1 sigma by a chi-square test
    of the values -3 .. 3 and the two tails; ten times as many are not."""
    values = policy(name, noise_multiplier=1.2, epsilon=None, relation="zero-out", secure=secure)
    how, ready, _ = released(Counts, torch.zeros(10), values)
    assert ready.sigmas == [1.2]
    u = torch.from_numpy(np.random.default_rng(0).random(100_000))
    drawn = how.whole(u, 1.2).numpy()
    p, k = chances(name, 1.2)

    def fits(expected):
        cells = [np.abs(k) > 3, *(k == j for j in range(-3, 4))]
        seen = [(np.abs(drawn) > 3).sum(), *((drawn == j).sum() for j in range(-3, 4))]
        return stats.chisquare(seen, [len(drawn) * expected[cell].sum() for cell in cells]).pvalue

    assert fits(p) > 1e-3
    wider = mechanism_named(name).chances(1.1 * 1.2)
    cut = (len(wider) - len(p)) // 2
    assert fits(wider[cut : cut + len(p)] / wider[cut : cut + len(p)].sum()) < 1e-3
    _, _, (noisy,) = released(Counts, torch.tensor([400.0, 600.0]), values)
    assert torch.equal(noisy, noisy.round())


@pytest.mark.parametrize("name", BOTH)
def test_rows_lie_on_a_grid_and_within_their_ball(name):
    rows = torch.randn(20, 8, generator=torch.Generator().manual_seed(0)) * 5
    _, ready, (noisy,) = released(Rows, rows, policy(name))
    assert math.log2(ready.grid).is_integer()
    assert 256 <= ready.sigmas[0] / ready.grid < 512
    for values in (ready.leaves[0], noisy):
        assert torch.equal((values / ready.grid).round(), values / ready.grid)
    clipped = rows * (3 / rows.norm(dim=1, keepdim=True)).clamp(max=1)
    assert bool((ready.leaves[0].abs() <= clipped.abs() + 1e-6).all()), "towards zero: no row gets longer"
    assert float((ready.leaves[0] - clipped).abs().max()) <= ready.grid + 1e-6
    entry = protect(Rows(rows), context(embeddings=policy(name)))[2][0]
    assert entry.sensitivity == 6.0
    assert entry.sigma == pytest.approx(6 * ready.multiplier)


def test_a_record_moves_two_label_counts_and_all_other_counts():
    def moves(reply, **values):
        (declared,) = reply.declared().values()
        return protect(reply, context(**{declared.kind: policy("skellam", **values)}))[2][0].moves

    assert moves(Counts(torch.tensor([400.0, 600.0]))) == 2
    assert moves(Counts(torch.tensor([400.0, 600.0])), relation="zero-out") == 1
    assert moves(Answers(torch.tensor([4.0, 6.0, 7.0]))) == 3


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("sigma", "order"), [(0.8, 2), (1.5, 3), (4.0, 9), (4.0, 30)])
def test_the_renyi_divergence_is_bounded(name, sigma, order):
    """Exactly, over whole numbers: log sum p(k)^a p(k - 1)^(1 - a) / (a - 1), and it is not far below."""
    p, _ = chances(name, sigma)
    loss = np.log(p[1:]) - np.log(p[:-1])
    top = (loss * (order - 1)).max()
    exact = (top + math.log(float((p[1:] * np.exp(loss * (order - 1) - top)).sum()))) / (order - 1)
    bound = mechanism_named(name).unit_renyi([order], sigma)[0]
    assert exact <= bound * (1 + 1e-9)
    if name == "discrete-gaussian" or sigma >= 1.5:
        assert exact >= 0.45 * bound


def test_rows_of_one_number_are_bounded_by_the_bound_for_rows():
    """A shift by one step, sigma of 4 steps: m = 4. For Skellam (2 a + 5) / (4 m^2 sigma^2) comes on top."""
    for name in BOTH:
        how = mechanism_named(name)
        assert how.of_rows(4.0, 4.0).renyi([8]) == pytest.approx(
            8 / 32 + (21 / (4 * 16 * 16) if name == "skellam" else 0)
        )


@pytest.mark.parametrize("m", [0.7, 2.0, 6.0])
def test_a_curve_by_renyi_divergence_lies_above_the_gaussians(m):
    """The Gaussian has the same divergence, a / (2 m^2): its delta is below the curve at every epsilon, also between
    the points of the grid, and not far: the masses add up to 1."""
    loss = mechanism_named("discrete-gaussian").of_rows(m, 300.0)
    values, p = loss.atoms
    assert p.sum() + loss.infinite == pytest.approx(1, abs=1e-9)
    for epsilon in np.linspace(0.01, 10 / m, 37):
        curve, truth = profile(values, p, epsilon) + loss.infinite, gaussian_delta(epsilon, 1 / m)
        assert curve >= truth * (1 - 1e-9)
        if truth > 1e-12:
            assert curve <= 9 * truth + 1e-9


@pytest.mark.parametrize(("sigma", "count"), [(1.0, 1), (5.0, 10), (20.0, 100)])
def test_counts_compose_as_dp_accounting_says(sigma, count):
    theirs = pld.from_discrete_gaussian_mechanism(sigma, 1).self_compose(count).get_epsilon_for_delta(1e-5)
    ours = compose([Event(sigma, 1.0, count, mechanism_named("discrete-gaussian").of_counts(sigma))], 1e-5)
    assert theirs - 1e-3 <= ours.epsilon_of_record <= theirs + 0.03
    assert ours.by_accountant["rdp"] >= theirs
    p, k = chances("skellam", sigma)
    table = {int(j): float(q) for j, q in zip(k, p, strict=True)}
    shifted = {j + 1: q for j, q in table.items()}
    pair = pld.from_two_probability_mass_functions(
        {j: math.log(q) for j, q in shifted.items()}, {j: math.log(q) for j, q in table.items()}
    )
    ours = compose([Event(sigma, 1.0, count, mechanism_named("skellam").of_counts(sigma))], 1e-5)
    theirs = pair.self_compose(count).get_epsilon_for_delta(1e-5)
    assert theirs - 1e-3 <= ours.epsilon_of_record <= theirs + 0.03
    assert ours.by_accountant["rdp"] >= theirs


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("reply", "kind"), [(Rows(torch.zeros(4, 3)), "embeddings"), (Counts(torch.tensor([3.0, 997.0])), "label_counts")]
)
def test_calibrated_noise_meets_its_epsilon(name, reply, kind):
    """The ledger's epsilon of one release, and of five that share epsilon, is at most what was asked for: and not much
    less, as noise would be wasted."""
    for extra, rounds in (({}, [1]), ({"calibration": "total"}, [1, 2, 3, 4, 5])):
        entry = protect(reply, context(**{kind: policy(name, **extra)}))[2][0]
        entry.rounds = rounds
        spent = compose([entry.events()], 1e-5).epsilon_of_record
        assert 0.8 * 2 <= spent <= 2.0 + 1e-9


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 0.0, 0.0), (0.9, 0.9, 1.0)])
def test_noise_x_09_is_found_and_honest_noise_is_not(name, factor, least, most):
    """Rows: 2,400 numbers a run; counts: 2,500 of deviation 1.5 or so."""
    for cls, value, values, releases in (
        (Rows, torch.ones(20, 12), policy(name), 10),
        (Counts, torch.full((100,), 10.0), policy(name, epsilon=4.0), 25),
    ):
        share, finding = measured(cls, value, values, releases, times(factor), 10)
        assert finding.tells_at < 1e-3
        assert finding.finds >= 0.9
        assert least <= share <= most
        assert finding.scale == pytest.approx(factor, rel=0.06)
        assert finding.low <= factor <= finding.high


def test_what_they_do_not_take():
    for values, words in (
        ({"epsilon": 0.5, "calibration": "classical"}, "classical calibration is for Gaussian noise"),
        ({"sensitivity": "random-pixel"}, "Use clip=C"),
    ):
        with pytest.raises(PrivacyError, match=words):
            read_policies({"embeddings": policy("skellam", **values)}, KINDS)
    with pytest.raises(PrivacyError, match="off its grid"):
        protect(Images(torch.zeros(1, 1, 2, 2)), context(synthetic_images=policy("skellam")))


def test_the_divergence_of_one_step_by_hand():
    """Skellam, a = 2: a / (2 v) = 1 and the least of (2 a + 5) / (4 v^2) = 9/4 and 3 / (2 v) = 3/2 for v = 1; for v = 4
    it is 1/4 and the least of 9/64 and 3/8. Other orders are rounded up. The discrete Gaussian has a / (2 v)."""
    skellam, gaussian = mechanism_named("skellam"), mechanism_named("discrete-gaussian")
    assert skellam.unit_renyi([2, 1.5], 1.0) == pytest.approx([2.5, 2.5])
    assert skellam.unit_renyi([2, 3], 2.0) == pytest.approx([1 / 4 + 9 / 64, 3 / 8 + 11 / 64])
    assert skellam.unit_renyi([20], 2.0) == pytest.approx([20 / 8 + 3 / 8]), "45/64 is more"
    assert skellam.of_rows(2.0, 10.0).renyi([1.5]) == pytest.approx([1 / 4 + 9 / 1600])
    assert gaussian.unit_renyi([2, 1.5], 2.0) == pytest.approx([1 / 4, 1.5 / 8])
    assert gaussian.of_rows(2.0, 10.0).renyi([1.5]) == pytest.approx([1.5 / 8])


def test_one_release_of_several_counts_adds_them_up():
    """Three counts, sigma = 2 sqrt(3) in steps of 1: 3 a / (2 * 12) for the discrete Gaussian."""
    how = mechanism_named("discrete-gaussian")
    assert how.one_release(2.0, 3) == pytest.approx(np.array(ORDERS) / 8)
    assert how.one_release(2.0, None) == pytest.approx(np.array(ORDERS) / 8)


@pytest.mark.parametrize("name", BOTH)
def test_imitated_noise_has_the_deviation_that_is_sent(name):
    """Rows are clipped to 2 and get noise of deviation 3: 40,000 numbers, so that 2 % are five standard errors."""
    how, rng = mechanism_named(name), torch.Generator().manual_seed(0)
    protection = Protection(mechanism=name, sigma=3.0, clip=2.0)
    rows = torch.zeros(100, 400)
    rows[:, 0] = 7.0
    made = how.imitated(rows, protection, rng)
    assert float(made[:, 1:].std()) == pytest.approx(3.0, rel=0.02)
    assert float(made[:, 0].mean()) == pytest.approx(2.0, abs=5 * 3 / 10)
    assert float(how.standard(rows, rng).std()) == pytest.approx(1.0, rel=0.02)


def test_an_entry_of_counts_follows_from_its_policy():
    """Under replace-one two counts move by 1: sensitivity sqrt(2), and as many moves as its square says."""
    counts = Counts(torch.tensor([400.0, 600.0]))
    for relation, moves in (("replace-one", 2), ("zero-out", 1)):
        made = context(label_counts=policy("skellam", relation=relation))
        entry = protect(counts, made)[2][0]
        rules = made.policies["label_counts"]
        found = mechanism_named("skellam").follows(entry, rules, 1000, 10, 1)
        assert (found["grid"], found["moves"]) == (1.0, moves)
        assert {name: getattr(entry, name) for name in found} == pytest.approx(found)
        five = mechanism_named("skellam").follows(entry, rules, 1000, 10, 5)
        assert five["noise_multiplier"] > 1.5 * found["noise_multiplier"]
        assert "noise_multiplier" not in mechanism_named("skellam").follows(entry, rules, 1000, 10, None)


def test_what_is_never_computed_has_no_weight():
    assert (reach(0.1), reach(1.0), reach(10.0)) == (14, 26, 152)


@pytest.mark.parametrize("name", BOTH)
def test_of_unequal_class_means_the_least_noise_has_256_steps_at_least(name):
    """Means of 3 and of 81 records: one record moves the second 40 times less, and its noise is on the same grid."""
    means = {0: torch.full((4,), 0.5), 1: torch.full((4,), -0.25)}
    _, ready, noisy = released(Means, means, policy(name), tables=[{0: 3, 1: 81}])
    assert ready.sigmas[0] == pytest.approx(40 * ready.sigmas[1])
    assert 256 <= ready.sigmas[1] / ready.grid < 512
    for leaf in noisy:
        assert torch.equal((leaf / ready.grid).round(), leaf / ready.grid)


@pytest.mark.parametrize("name", BOTH)
def test_the_event_of_an_entry_by_hand(name):
    """Two steps in each of three rounds. Rows compose by their bound, counts as often as one record moves them, and
    what has no noise, or is free, by its multiplier alone."""
    how = mechanism_named(name)
    facts = {"field": "Sent.z", "kind": "embeddings", "mechanism": name, "relation": "replace-one", "steps": 2,
             "rounds": [1, 2, 3]}  # fmt: skip
    rows = how.event(LedgerEntry(**facts, noise_multiplier=2.0, sigma=12.0, grid=0.03125))
    assert (rows.noise_multiplier, rows.sample_rate, rows.count) == (2.0, 1.0, 6)
    assert rows.loss.renyi([3.0]) == pytest.approx(how.of_rows(2.0, 256.0).renyi([3.0]))
    counts = how.event(LedgerEntry(**facts, noise_multiplier=2.0, sigma=3.0, grid=1.0, moves=2))
    assert (counts.noise_multiplier, counts.count) == (2.0, 12)
    assert counts.loss is not None
    for m, sigma, grid in ((math.inf, 12.0, 1.0), (0.0, 12.0, 1.0), (2.0, None, 1.0), (2.0, 12.0, None)):
        assert how.event(LedgerEntry(**facts, noise_multiplier=m, sigma=sigma, grid=grid)) == Event(m, 1.0, 6)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("moves", [None, 3])
def test_so_much_of_the_noise_costs_what_a_release_of_that_noise_costs(name, moves):
    how = mechanism_named(name)
    at = lambda multiplier, scale: how.epsilon_at(SimpleNamespace(multiplier=multiplier, moves=moves), scale, 1e-5)  # noqa: E731
    assert at(2.0, 0.5) == pytest.approx(at(1.0, 1.0))
    assert at(2.0, 0.5) > at(2.0, 1.0) > at(2.0, 1.5)
    assert at(2.0, 4e-4) == math.inf
    assert at(2.0, 6e-4) < math.inf


@pytest.mark.parametrize("name", BOTH)
def test_noise_on_a_grid_is_not_free(name):
    """Tests of single values take every number for possible, which steps of a grid are not."""
    ready = SimpleNamespace(grid=0.5, sigmas=[1.0], leaves=[torch.zeros(4)])
    found = mechanism_named(name).noise(np.array([0.0, 0.5, -1.0, 3.0]), ready, 0, seed=1)
    assert found.free is False
    assert found.z.shape == (1, 4) or found.z.size == 4
    order = np.argsort(found.z.ravel())
    assert order.tolist() == [2, 0, 1, 3], "more noise has a higher score"


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("sigma", [0.5, 2.3])
def test_probabilities_by_scipys_own(name, sigma):
    """Weights exp(-k^2 / (2 sigma^2)), added up; and the difference of two Poisson numbers of mean sigma^2 / 2 each.
    What is far out has the least probability, and not 0."""
    p, k = chances(name, sigma)
    assert k.tolist() == list(range(-reach(sigma), reach(sigma) + 1))
    if name == "skellam":
        wanted = stats.skellam.pmf(k, sigma**2 / 2, sigma**2 / 2)
    else:
        weights = [math.exp(-(j**2) / (2 * sigma**2)) for j in k]
        wanted = np.array(weights) / math.fsum(weights)
    near = np.abs(k) < 8 * sigma
    assert p[near] == pytest.approx(wanted[near], rel=1e-6)
    assert (p >= 1e-300).all()
    assert p[0] == p[-1] < 1e-20


@pytest.mark.parametrize("name", BOTH)
def test_whole_numbers_at_their_shares(name):
    """A share just below P[X < 0] is -1, and from there on 0; just above P[X <= 1] it is 2. Beyond all shares the
    largest whole number is drawn."""
    how, (p, k) = mechanism_named(name), chances(name, 1.5)
    zero = int(np.flatnonzero(k == 0)[0])
    below = float(np.cumsum(p)[zero - 1])
    u = [below - 1e-9, below + 1e-9, below + p[zero] + p[zero + 1] + 1e-9, 0.0, 1.0 + 1e-9]
    drawn = how.whole(torch.tensor(u, dtype=torch.float64), 1.5)
    assert drawn.dtype == torch.float64
    assert drawn.tolist() == [-1.0, 0.0, 2.0, float(-reach(1.5)), float(reach(1.5))]


def by_definition(p, k, at, u):
    """Return the normal score of a whole number, from the nearer end."""
    if at < 0:
        return stats.norm.ppf(p[k < at].sum() + u * p[k == at].sum())
    return -stats.norm.ppf(p[k > at].sum() + (1 - u) * p[k == at].sum())


@pytest.mark.parametrize("name", BOTH)
def test_scores_of_whole_noise_by_hand(name):
    """Steps of 1/2, a deviation of 1.5 in the second tensor: 3 steps. Sent less clean is -2, 0, 1, 9 and very many
    steps."""
    how = mechanism_named(name)
    ready = Prepared(
        [torch.zeros(1), torch.tensor([1.0, 0.5, 2.0, 0.0, 0.0])], [8.0, 3.0], 0.5, 0.0, Bounding("any"), grid=0.5
    )
    found = how.noise(np.array([0.0, 0.5, 2.5, 4.5, 1e5]), ready, 1, seed=4)
    (p, k), u = chances(name, 3.0), np.random.default_rng(4).random((1, 5))[0]
    wanted = [by_definition(p, k, at, u[i]) for i, at in enumerate([-2, 0, 1, 9, reach(3.0)])]
    assert found.z.shape == (1, 5)
    assert found.z[0] == pytest.approx(wanted, rel=1e-6)
    assert found.sizes.k.tolist() == [[-2.0, 0.0, 1.0, 9.0, 2e5]]
    assert (found.sizes.sigma, found.free) == (3.0, False)
    assert found.sizes.chances(2.0) == pytest.approx(how.chances(2.0))
    low = how.noise(np.array([-1e5, 0.0, 0.0, 0.0, 0.0]), ready, 1, seed=4).z[0, 0]
    assert low == pytest.approx(by_definition(p, k, -reach(3.0), u[0]), rel=1e-6)
    without = Prepared(ready.leaves, [8.0, 3.0], 0.5, 0.0, Bounding("any"))
    whole = how.noise(np.array([0.0, 0.5, 2.0, 0.0, 0.0]), without, 1, seed=4)
    assert (whole.sizes.k[0, 0], whole.sizes.sigma) == (-1.0, 1.5)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("secure", [False, True])
def test_noise_on_a_grid_follows_the_number_that_is_drawn(monkeypatch, name, secure):
    """Deviations of 4 and 1.5 on a grid of 1/2: 8 and 3 steps. At the share 1/2 no noise is drawn."""
    how, (p, k) = mechanism_named(name), chances(name, 3.0)
    two = float(p[k < 2].sum() + p[k == 2][0] / 2)
    keys = []
    monkeypatch.setattr(discrete, "noise_generator", lambda key, what, device: keys.append((key, what)))
    monkeypatch.setattr(discrete, "system_uniform", lambda n: np.array([two, 0.5][:n]) if secure else 1 / 0)
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.tensor([two, 0.5][: math.prod(shape)]).double())
    leaves = [torch.tensor([0.5]), torch.tensor([1.0, -2.0])]
    ready = Prepared(leaves, [8.0, 3.0], 0.5, 0.0, Bounding("any"), grid=0.5)
    rules = Policy(mechanism=name, epsilon=1.0, secure=secure)
    one, other = how.noised(ready, "A.b", Rows.declared()["e"], rules, context("k"))
    assert other.tolist() == [2.0, -2.0], "two steps of 1/2, and none"
    assert (other.dtype, one.shape) == (torch.float32, (1,))
    first, steps = chances(name, 8.0)
    at = int(steps[np.searchsorted(np.cumsum(first), two)])
    assert one.tolist() == [0.5 + at / 2]
    assert keys == ([] if secure else [(("k", "A.b", 0), "noise"), (("k", "A.b", 1), "noise")])
    whole = Prepared([torch.tensor([1.0, -2.0])], [6.0], 0.5, 0.0, Bounding("any"))
    assert how.noised(whole, "A.b", Rows.declared()["e"], rules, context("k"))[0].tolist() == [3.0, -2.0]


@pytest.mark.parametrize("name", BOTH)
def test_a_release_of_no_tensors_has_a_grid(name):
    """As of noise of deviation 1: 1/256."""

    class Views(Up):
        e: tuple[Tensor, ...] = private("embeddings", via="data", unit="record")

    _, ready, noisy = released(Views, (), policy(name))
    assert (ready.grid, ready.moves, noisy) == (1 / 256, None, [])


@pytest.mark.parametrize("name", BOTH)
def test_the_event_of_counts_is_in_steps_of_the_grid(name):
    facts = {"field": "A.n", "kind": "label_counts", "mechanism": name, "relation": "zero-out", "rounds": [1]}
    how = mechanism_named(name)
    entry = LedgerEntry(**facts, noise_multiplier=2.0, sigma=3.0, grid=0.5, moves=1)
    assert how.event(entry) == Event(2.0, 1.0, 1, UnitShift(how, 6.0))


@pytest.mark.parametrize("name", BOTH)
def test_the_loss_of_a_unit_shift_by_hand(name):
    """log p(k) - log p(k - 1), ascending, each with p(k): of the discrete Gaussian (1 - 2 k) / (2 sigma^2)."""
    how, (p, k) = mechanism_named(name), chances(name, 1.5)
    loss = UnitShift(how, 1.5)
    values, weights = loss.atoms
    table = sorted((math.log(p[i] / p[i - 1]), p[i]) for i in range(1, len(p)))
    assert values == pytest.approx([value for value, _ in table])
    assert (np.diff(values) >= 0).all()
    assert weights.sum() == pytest.approx(1 - p[0])
    middle = np.abs(values) < 3
    assert weights[middle] == pytest.approx([w for v, w in table if abs(v) < 3])
    if name == "discrete-gaussian":
        assert values[middle][::-1] == pytest.approx([(1 - 2 * j) / 4.5 for j in k if abs(1 - 2 * j) < 13.5])
    assert loss.infinite == 1e-30
    assert loss.renyi([2.0, 3.5]) == pytest.approx(how.unit_renyi([2.0, 3.5], 1.5))


@pytest.mark.parametrize("name", BOTH)
def test_the_test_of_whole_noise_by_hand(name):
    """Two tensors of deviation 2 and one of 3: squares over sigma^2, each as often as there are numbers."""
    how = mechanism_named(name)
    parts = [
        WholeSizes(np.array([[1.0, -3.0]]), 2.0, how.chances),
        WholeSizes(np.array([[6.0]]), 3.0, how.chances),
        WholeSizes(np.array([[2.0], [0.0], [5.0]]), 2.0, how.chances),
    ]
    scale = parts[0].test(parts)
    assert isinstance(scale, WholeScale)
    assert parts[0].test(parts[1:2]).value == 4.0, "one tensor is enough"
    assert scale.value == pytest.approx((1 + 9 + 4 + 25) / 4 + 36 / 9)
    assert [t.tolist() for t in scale._times] == [[5.0], [1.0]]
    for sigma, scores, now, less, more in zip(
        (2.0, 3.0), scale._scores, scale._chances, scale._at(0.5), scale._at(5.0), strict=True
    ):
        far = reach(sigma)
        k = np.arange(-far, far + 1)
        assert scores == pytest.approx((k**2 / sigma**2)[None])
        assert now == pytest.approx(how.chances(sigma)[None], rel=1e-9)
        narrow, wide = reach(0.5 * sigma), reach(5.0 * sigma)
        assert less[0, far - narrow : far + narrow + 1] == pytest.approx(how.chances(0.5 * sigma), rel=1e-9)
        assert less[0, : far - narrow].sum() + less[0, far + narrow + 1 :].sum() == 0
        cut = how.chances(5.0 * sigma)[wide - far : wide + far + 1]
        assert cut.sum() < 1 - 1e-9
        assert more[0] == pytest.approx(cut / cut.sum(), rel=1e-9)
        assert more.sum() == pytest.approx(1, abs=1e-12)
        assert less.shape == more.shape == (1, 2 * far + 1)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("moves", [None, 2])
@pytest.mark.parametrize(("epsilon", "releases"), [(0.5, 3), (2.0, 1), (60.0, 1)])
def test_no_less_noise_than_is_calibrated_meets_epsilon(name, moves, epsilon, releases):
    """By the divergence of all releases together, converted by hand; a millionth less is too little."""
    how = mechanism_named(name)
    m = how.multiplier(Policy(mechanism=name, epsilon=epsilon), 1e-5, releases, moves)

    def spent(multiplier):
        a = np.array(ORDERS)
        return (releases * how.one_release(multiplier, moves) + np.log1p(-1 / a) - np.log(1e-5 * a) / (a - 1)).min()

    assert spent(m) <= epsilon < spent(m * (1 - 1.01e-6))


def test_an_epsilon_that_no_noise_meets_is_refused():
    with pytest.raises(PrivacyError, match="No noise makes 3 releases meet"):
        mechanism_named("skellam").multiplier(Policy(mechanism="skellam", epsilon=1e-5), 1e-5, 3, None)


@pytest.mark.parametrize("moves", [1, 4])
def test_one_release_of_skellam_counts_by_hand(moves):
    """Each count has noise of deviation m sqrt(moves), and as many divergences add up; rows have 256 steps."""
    how = mechanism_named("skellam")
    v = 4.0 * moves
    wanted = [moves * (math.ceil(a) / (2 * v) + min((2 * math.ceil(a) + 5) / (4 * v * v), 3 / (2 * v))) for a in ORDERS]
    assert how.one_release(2.0, moves) == pytest.approx(wanted)
    rows = [math.ceil(a) / 8 + (2 * math.ceil(a) + 5) / (4 * 4 * 256**2) for a in ORDERS]
    assert how.one_release(2.0, None) == pytest.approx(rows)


def test_a_grid_is_shown():
    how = mechanism_named("skellam")
    facts = {"field": "A.n", "kind": "label_counts", "mechanism": "skellam", "relation": "zero-out"}
    assert how.shown(LedgerEntry(**facts, noise_multiplier=1.0)) == "skellam"
    shown = how.shown(LedgerEntry(**facts, noise_multiplier=1.0, sigma=2.0, sensitivity=3.0, grid=0.25))
    assert shown == "skellam, sigma 2, sensitivity 3, zero-out, in steps of 0.25"


@pytest.mark.parametrize("name", BOTH)
def test_an_entry_of_rows_has_their_grid_and_no_moves(name):
    how = mechanism_named(name)
    rules = Policy(mechanism=name, epsilon=1.0)
    ready = Prepared([], [3.0, 4.0], 0.5, 1e-5, Bounding("zero-out", 1.5), grid=0.25, moves=3)
    entry = how.entry("A.b", "logits", rules, ready)
    assert entry == LedgerEntry(
        field="A.b", kind="logits", mechanism=name, noise_multiplier=0.5, relation="zero-out", sigma=2.0,
        sensitivity=4.0, clip=1.5, delta=1e-5, claim=1.0, grid=0.25, moves=3,
    )  # fmt: skip
    found = how.follows(entry.model_copy(update={"sensitivity": 3.0}), rules, 100, 10, None)
    assert (found["grid"], found["moves"]) == (1.0, 9)
    nothing = how.follows(entry.model_copy(update={"sensitivity": None}), rules, 100, 10, None)
    assert nothing["moves"] == 0
    of_rows = how.follows(entry.model_copy(update={"moves": None}), rules, 100, 10, None)
    assert not {"grid", "moves"} & of_rows.keys()
