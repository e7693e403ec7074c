"""Clipping and noise between a client's computation and its bytes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedaudit import State, Up, private, public
from fedaudit.errors import PrivacyError
from fedaudit.privacy.calibration import analytic
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism import UNTRACED, _cosine, protect, protect_field
from fedaudit.privacy.mechanisms.base import mechanism_named
from fedaudit.privacy.mechanisms.gaussian import system_normal
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.provenance import Provenance
from fedaudit.privacy.sensitivity import Context, clip_rows, random_pixel_sensitivity
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.task import open_client
from fedaudit.runtime.world import world_of
from fedaudit.wire.codec import decode, digest_of, encode


class Rows(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    t: int = public()


class Two(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    z: Tensor = private("logits", via="model", unit="client")


class Many(Up):
    z: dict[int, Tensor] = private("logits", via="model", unit="client")


class Means(Up):
    p: dict[int, Tensor] = private("prototypes", via="data", unit="client")


class Counts(Up):
    n: Tensor = private("label_counts", via="data", unit="client")


class Images(Up):
    x: Tensor = private("synthetic_images", via="data", unit="client")


class Gradients(Up):
    g: State = private("gradients", via="data", unit="client")


class Labels(Up):
    e: Tensor = private("embeddings", via="data", unit="record")


def context(key=(0, "client 0", 1, 0, 0), n=1000, **policies):
    return Context(
        key=key,
        n=n,
        policies={name: Policy(**values) for name, values in policies.items()},
        releases=lambda kind: 7,
        images=lambda: torch.zeros(3, 1, 4, 4),
        encode=lambda x: x.flatten(1),
    )


ONE = {"epsilon": 1.0, "delta": 1e-5}


def noise_of(sigma_values, key=(0, "client 0", 1, 0, 0), shape=(200, 50), **changes):
    zero = torch.zeros(shape)
    reply, _, _ = protect(Rows(zero, 1), context(key, embeddings={**ONE, **changes}))
    return reply.e.flatten().numpy()


def test_no_policy_no_change_and_an_infinite_entry():
    reply = Rows(torch.randn(5, 3), 1)
    after, protection, entries = protect(reply, context())
    assert after is reply
    assert protection == {}
    assert [(e.field, e.noise_multiplier) for e in entries] == [("Rows.e", 0.0)]


@pytest.mark.parametrize(("factor", "accepted"), [(1, True), (2 / 3, False), (3 / 2, False)])
def test_the_noise_has_the_calibrated_sigma(factor, accepted):
    """Kolmogorov-Smirnov on 10,000 numbers, with the wrong sigmas as negative controls. Sensitivity 2 C = 2."""
    sigma = analytic(1.0, 1e-5, 2.0)
    p = stats.kstest(noise_of(sigma), stats.norm(0, sigma * factor).cdf).pvalue
    assert (p > 0.01) == accepted


def test_the_system_generator_is_normal_and_never_repeats():
    a, b = system_normal(20000, chunk=3000), system_normal(20000)
    assert stats.kstest(a, "norm").pvalue > 1e-4
    assert stats.kstest(a, stats.norm(0, 1.5).cdf).pvalue < 1e-4
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert not np.array_equal(noise_of(1, secure=True), noise_of(1, secure=True))


def test_noise_repeats_with_its_key_and_is_independent_otherwise():
    """One key, one noise; another client, round, ask, attempt, field or seed: no correlation beyond chance."""
    base = (0, "client 0", 1, 0, 0)
    assert np.array_equal(noise_of(1, base), noise_of(1, base))
    others = [(1, *base[1:])] + [(*base[:i], v, *base[i + 1 :]) for i, v in ((1, "client 1"), (2, 2), (3, 1), (4, 1))]
    noises = [noise_of(1, key) for key in [base, *others]]
    both, _, _ = protect(
        Two(torch.zeros(200, 50), torch.zeros(200, 50)),
        context(base, embeddings=ONE, logits={**ONE, "noise_multiplier": None}),
    )
    noises += [both.e.flatten().numpy(), both.z.flatten().numpy()]
    for a, b in itertools.combinations(noises, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(len(a))  # four standard errors


def test_rows_are_clipped_before_the_noise():
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert torch.allclose(clip_rows(x, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert x[0, 0] == 3.0, "a copy"
    assert clip_rows(torch.full((4,), 2.0), 1.0).norm() == pytest.approx(1.0)
    assert clip_rows(torch.zeros(0, 5), 1.0).shape == (0, 5)
    huge = torch.full((2, 3), 1e30)
    a, _, _ = protect(Rows(huge, 1), context(embeddings={"noise_multiplier": 1e-9, "sensitivity": "clip:2"}))
    assert a.e.norm(dim=1).max() <= 2 + 1e-5


def entry(reply, **policies):
    made = context(**policies)
    return protect(reply, made)[2][0]


@pytest.mark.parametrize(("relation", "swing"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_joint_sensitivities(relation, swing):
    """Rule 5, C = 3. A row of one record: swing C. R = 8 rows of all records: sqrt(8) 2 C under both relations, since a
    zeroed record can move such a row anywhere in its ball; a whole state is one such row, 12 pixels are 12 of them with
    C = 1. A histogram under replace-one moves one count down and one up: sqrt(2).
    """
    p = {"epsilon": 1.0, "sensitivity": "clip:3", "relation": relation}
    assert entry(Rows(torch.randn(8, 5), 1), embeddings=p).sensitivity == pytest.approx(swing * 3)
    many = Many({1: torch.randn(5, 4), 2: torch.randn(3, 4)})
    assert entry(many, logits=p).sensitivity == pytest.approx(math.sqrt(8) * 2 * 3)
    state = Gradients(State({"a": torch.randn(3, 2), "b": torch.randn(4)}))
    assert entry(state, gradients=p).sensitivity == pytest.approx(2 * 3)
    expected = math.sqrt(2) if relation == "replace-one" else 1
    assert entry(Counts(torch.tensor([3.0, 4.0])), label_counts=p).sensitivity == pytest.approx(expected)
    images = Images(torch.rand(3, 1, 2, 2))
    assert entry(images, synthetic_images=p).sensitivity == pytest.approx(math.sqrt(12) * 2)


class Scores(Up):
    n: Tensor = private("statistics", via="data", unit="client", depends="histogram")


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_noise_for_counts_is_for_records_that_count_once(relation):
    """n = 10. Counts times 1,000, shares of them, or more counts than records would be moved by more than sqrt(2). How
    many records each of three models gets right: one record may be in all three, and another in none: sqrt(3)."""
    p = {"epsilon": 1.0, "relation": relation}

    def billed(counts, kind="label_counts", cls=Counts):
        return protect(cls(torch.tensor(counts)), context(n=10, **{kind: p}))[2][0].sensitivity

    assert billed([4.0, 6.0]) == pytest.approx(math.sqrt(2) if relation == "replace-one" else 1)
    with pytest.raises(PrivacyError, match="counts 10000 labels, but the client has 10 records"):
        billed([4000.0, 6000.0])
    for wrong in ([0.4, 0.6], [-4.0, 6.0]):
        with pytest.raises(PrivacyError, match="not counts"):
            billed(wrong)
    assert billed([10.0, 9.0, 10.0], "statistics", Scores) == pytest.approx(math.sqrt(3))
    assert billed([10.0, 9.0], "statistics", Scores) == pytest.approx(math.sqrt(2))


class TwoTables(Up):
    p: list[dict[int, Tensor]] = private("prototypes", via="data", unit="client")


def test_a_record_is_in_every_table_of_class_means(tiny):
    """Means of two sets of rows of the same records, in one field: a record moves two means in each, so the noise is
    sqrt(2) times that of one table."""
    policy = {"prototypes": {"epsilon": 1.0, "sensitivity": "clip:1"}}
    world = world_of(tiny("fedavg", privacy=policy, model="mlp", set={}).model_dump_json())
    site = world.site(0)
    client = open_client(site, 1, 0, Meter("client 0", 1, world.device), None)
    with torch.no_grad():
        one, other = (client.class_means(rows, "prototypes") for rows in (client.x.flatten(1), -client.x.flatten(1)))
    single, double, twice = (
        protect(TwoTables(tables), dataclasses.replace(client._context, done={}))[2][0].sensitivity
        for tables in ([one], [one, other], [one, one])
    )
    assert double == pytest.approx(math.sqrt(2) * single)
    assert twice == pytest.approx(math.sqrt(2) * single)


def test_what_depends_on_all_records_moves_across_its_ball_also_under_zero_out():
    """A release that is +v with the record and -v without it: the distance is 2 C, and so must the sensitivity be."""
    quiet = {"noise_multiplier": 1e-12, "sensitivity": "clip:1", "relation": "zero-out"}
    moved = [protect(Many({0: s * torch.tensor([[9.0, 0.0]])}), context(logits=quiet)) for s in (1, -1)]
    distance = float((moved[0][0].z[0] - moved[1][0].z[0]).norm())
    assert distance == pytest.approx(moved[0][2][0].sensitivity)


def test_neighbours_differ_by_no_more_than_the_sensitivity():
    """Brute force: over random pairs of neighbouring inputs, the clipped releases stay within 2 C (rows of one record)
    and sqrt(R) 2 C (rows that all depend on it); opposite unit vectors reach the bound."""
    g = torch.Generator().manual_seed(0)
    quiet = {"noise_multiplier": 1e-12, "sensitivity": "clip:1"}
    worst = 0.0
    for _ in range(200):
        a = torch.randn(6, 3, generator=g) * 5
        b = a.clone()
        b[2] = torch.randn(3, generator=g) * 5
        after = [protect(Rows(x, 1), context(embeddings=quiet))[0].e for x in (a, b)]
        worst = max(worst, float((after[0] - after[1]).norm()))
    assert worst <= 2 + 1e-5
    a = torch.tensor([[9.0, 0.0]])
    far = [protect(Rows(s * a, 1), context(embeddings=quiet))[0].e for s in (1, -1)]
    assert float((far[0] - far[1]).norm()) == pytest.approx(2.0)


def test_class_means_need_clipped_records(tmp_path):
    with pytest.raises(PrivacyError, match=r"client\.class_means"):
        protect(Means({0: torch.ones(3)}), context(prototypes=ONE))
    made = context(prototypes={"epsilon": 1.0, "sensitivity": "clip:2"})
    mean = torch.ones(3)
    made.means[digest_of(mean)] = (2.0, 11)
    assert protect(Means({0: mean}), made)[2][0].sensitivity == pytest.approx(math.sqrt(2) * 2 * 2 / 10)
    made.means[digest_of(mean)] = (1.0, 11)
    with pytest.raises(PrivacyError, match=r"clipped to 1\.0, but the policy says 2\.0"):
        protect(Means({0: mean}), made)


def test_a_class_mean_moves_by_no_more_than_its_sensitivity():
    """Brute force over a record that changes its value and its label: each of the two means moves at most
    2 C / (N_c - 1), so both together at most the noise-normalised 1."""
    g = torch.Generator().manual_seed(1)
    for _ in range(200):
        y = torch.tensor([0] * 4 + [1] * 6)
        x = clip_rows(torch.randn(10, 3, generator=g) * 9, 1.0)
        x2, y2 = x.clone(), y.clone()
        x2[0] = clip_rows(torch.randn(1, 3, generator=g) * 9, 1.0)[0]
        y2[0] = 1
        moved = sum(
            float((x[y == c].mean(0) - x2[y2 == c].mean(0)).norm() / (math.sqrt(2) * 2 / (int((y == c).sum()) - 1)))
            ** 2
            for c in (0, 1)
        )
        assert math.sqrt(moved) <= 1 + 1e-6


def test_total_calibration_divides_the_budget():
    """Seven planned releases: the multiplier is sqrt(7) times that of one release at the same mu."""
    one = entry(Rows(torch.randn(4, 2), 1), embeddings=ONE).noise_multiplier
    total = entry(Rows(torch.randn(4, 2), 1), embeddings={**ONE, "calibration": "total"}).noise_multiplier
    assert total == pytest.approx(math.sqrt(7) * one, rel=1e-9)
    made = context(embeddings={**ONE, "calibration": "total"})
    with pytest.raises(PrivacyError, match=r"privacy\.embeddings\.releases"):
        protect(Rows(torch.randn(4, 2), 1), dataclasses.replace(made, releases=lambda kind: None))
    said = entry(Rows(torch.randn(4, 2), 1), embeddings={**ONE, "calibration": "total", "releases": 9})
    assert said.noise_multiplier == pytest.approx(3 * one, rel=1e-9)


def test_random_pixel_is_the_largest_change_of_sampled_edits():
    """The encoder doubles one pixel, which is 0.5 in every image, and ignores the others. A value from U(-1, 1) in its
    place changes the output by at most 2 x 1.5 = 3, and over 4,000 edits of 16 pixels some 250 hit it: close to 3."""

    def encode(x):
        return 2 * x[:, :, 0, 0]

    s = random_pixel_sensitivity(torch.full((5, 1, 4, 4), 0.5), encode, 4000, (0,))
    assert 2.7 < s <= 3.0
    made = context(embeddings={"epsilon": 1.0, "sensitivity": "random-pixel:64"})
    reply, protection, (e,) = protect(Rows(torch.zeros(3, 16), 1), made)
    assert e.noise_multiplier == 0.0, "a heuristic guarantees nothing"
    assert "heuristic" in e.mechanism
    assert e.claim == 1.0
    assert protection["e"].sigma == pytest.approx(analytic(1.0, 0.001, 1.0) * e.sensitivity)
    assert float(reply.e.std()) == pytest.approx(e.sigma, rel=0.4)


def test_logits_counted_as_if_computed_on_the_records():
    """DFFKE's Table 4: Eq. 15 on logits with Appendix G's sensitivity, of the model on the client's records. Here the
    model triples one pixel, 0 in every image, and the encoder would pass on all sixteen: an edit moves the logits by
    3 |u|, u from U(-1, 1). sigma = sqrt(2 ln(1.25 / delta)) Delta / epsilon. The ledger holds it for nothing."""
    values = {"epsilon": 0.5, "delta": 1e-3, "calibration": "classical", "sensitivity": "random-pixel:4000"}
    made = context(logits={**values, "assume": "logits-of-records"})
    made = dataclasses.replace(made, predict=lambda x: 3 * x[:, :, 0, 0])
    reply, protection, (e,) = protect(Many({0: torch.zeros(400, 10), 2: torch.zeros(100, 10)}), made)
    assert 2.7 < e.sensitivity <= 3
    sigma = math.sqrt(2 * math.log(1.25e3)) * e.sensitivity / 0.5
    assert e.sigma == protection["z"].sigma == pytest.approx(sigma)
    assert float(torch.cat(list(reply.z.values())).std()) == pytest.approx(sigma, rel=0.1)
    assert (e.noise_multiplier, e.claim) == (0.0, 0.5)
    assert e.condition.startswith("counted as if computed on the client's records")


@pytest.mark.parametrize(
    ("reply", "kind"), [(Many({0: torch.ones(1, 2)}), "logits"), (Images(torch.zeros(1, 1, 2, 2)), "synthetic_images")]
)
def test_random_pixel_is_not_applicable_elsewhere(reply, kind):
    with pytest.raises(PrivacyError, match=f"not applicable to {kind}: they are not a function of one private image"):
        protect(reply, context(**{kind: {"epsilon": 1.0, "sensitivity": "random-pixel"}}))


def test_pure_noise_holds_nothing_of_the_input():
    a, b = (
        protect(Rows(x, 1), context(embeddings={"mechanism": "pure-noise"}))[0].e
        for x in (torch.zeros(50, 40), torch.ones(50, 40) * 9)
    )
    assert torch.equal(a, b)
    assert stats.kstest(a.flatten().numpy(), "norm").pvalue > 0.01
    e = entry(Rows(torch.randn(50, 40), 1), embeddings={"mechanism": "pure-noise"})
    assert e.noise_multiplier == math.inf
    assert abs(e.cosine) < 0.1


def test_cosine_similarity_falls_with_epsilon():
    x = torch.nn.functional.normalize(torch.randn(500, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    cosines = [
        entry(Rows(x, 1), embeddings={"epsilon": eps, "delta": 1e-2}).cosine for eps in (1000.0, 100.0, 10.0, 1.0, 0.25)
    ]
    assert cosines == sorted(cosines, reverse=True)
    assert cosines[0] > 0.9
    assert cosines[-1] < 0.1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.arange(4), "is torch.int64: Gaussian noise needs floating-point numbers"),
        (torch.tensor([[torch.nan]]), "NaN or infinity before any noise"),
        (torch.tensor([[torch.inf]]), "NaN or infinity before any noise"),
    ],
)
def test_what_takes_no_noise_is_refused(value, words):
    with pytest.raises(PrivacyError, match=words):
        protect(Labels(value), context(embeddings=ONE))


def test_parameters_are_public_and_the_cosine_is_not():
    _, protection, (e,) = protect(Rows(torch.randn(4, 2), 1), context(embeddings=ONE))
    assert set(protection["e"].model_dump()) == {
        "mechanism",
        "sigma",
        "sensitivity",
        "clip",
        "relation",
        "delta",
        "claim",
    }
    assert e.cosine is not None


def test_more_rows_than_records_are_no_rows_of_records():
    with pytest.raises(PrivacyError, match="more rows than the client has records"):
        protect(Rows(torch.randn(101, 2), 1), context(n=100, embeddings=ONE))


def test_a_field_is_protected_once():
    """Twice the same noise would cancel in a difference."""
    made = context(embeddings=ONE)
    protect_field(Rows, "e", torch.randn(4, 2), made)
    with pytest.raises(PrivacyError, match="protected before in this task"):
        protect_field(Rows, "e", torch.randn(4, 2), made)


def test_what_was_protected_is_entered_also_where_it_is_not_sent():
    made = context(embeddings=ONE)
    protect_field(Rows, "e", torch.randn(4, 2), made)
    _, _, entries = protect(Counts(torch.ones(2)), made)
    assert [e.field for e in entries] == ["Rows.e", "Counts.n"]


def test_another_value_than_the_protected_one_is_refused():
    made = context(embeddings=ONE)
    protect_field(Rows, "e", torch.randn(4, 2), made)
    with pytest.raises(PrivacyError, match=r"was protected by client\.protect, but another value"):
        protect(Rows(torch.randn(4, 2), 1), made)


class Number(Up):
    n: int = private("count", via="data", unit="client")


def test_only_the_number_of_records_is_free():
    assert protect(Number(100), context(n=100))[2][0].noise_multiplier == math.inf
    assert protect(Number(7), context(n=100))[2][0].noise_multiplier == 0.0


class Picture(Up):
    x: Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")


def test_noised_images_still_travel_as_bytes():
    reply, _, _ = protect(Picture(torch.zeros(2, 1, 4, 4)), context(synthetic_images=ONE))
    assert float(reply.x.abs().max()) <= 1
    assert decode(encode(reply), Picture).x.shape == (2, 1, 4, 4)


def test_more_releases_than_planned_are_refused():
    made = context(embeddings={**ONE, "calibration": "total", "releases": 2})
    for _ in range(2):
        protect(Rows(torch.randn(4, 2), 1), made)
    with pytest.raises(PrivacyError, match="planned 2 releases of embeddings, and this is number 3"):
        protect(Rows(torch.randn(4, 2), 1), made)


def test_classes_and_counts_are_a_release_of_their_own():
    made = context(prototypes=ONE)
    mean = torch.ones(3)
    made.means[digest_of(mean)] = (1.0, 11)
    _, _, entries = protect(Means({0: mean}), made)
    assert [(e.kind, e.noise_multiplier > 0) for e in entries] == [("prototypes", True), ("label_counts", False)]


class OfModel(Up):
    p: dict[int, Tensor] = private("prototypes", via="model", unit="client")


def test_classes_are_a_release_also_of_what_goes_through_the_model():
    made = context(prototypes=ONE)
    mean = torch.ones(3)
    made.means[digest_of(mean)] = (1.0, 11)
    _, _, (means, classes) = protect(OfModel({0: mean}), made)
    assert (means.kind, classes.kind) == ("prototypes", "label_counts")
    assert classes.noise_multiplier == 0
    assert "scaled by their counts" in classes.condition


class Views(Up):
    e: dict[str, Tensor] = private("embeddings", via="model", unit="record")


@pytest.mark.parametrize(("relation", "swing"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_a_record_moves_its_row_in_every_view(relation, swing):
    """Three views of the same records, C = 3: one record moves a row in each, so swing sqrt(3) C together."""
    p = {"epsilon": 1.0, "sensitivity": "clip:3", "relation": relation}
    views = Views({name: torch.randn(8, 5) for name in "abc"})
    assert entry(views, embeddings=p).sensitivity == pytest.approx(swing * 3 * math.sqrt(3))


@pytest.mark.parametrize(("trained", "plain", "free"), [(1, 0, True), (1, 1, False), (0, 0, False)])
def test_a_model_is_free_after_private_trainings_alone(trained, plain, free):
    made = context(training={"mechanism": "dp-sgd", "noise_multiplier": 1.0})
    made.spent["training"], made.plain_fits = trained, plain
    _, _, (weights,) = protect(Many({1: torch.zeros(4, 3)}), made)
    assert (weights.noise_multiplier == math.inf) is free


class ByClass(Up):
    x: dict[int, Tensor] = private("synthetic_images", via="data", unit="client", dtype="uint8")


@pytest.mark.parametrize("policy", [ONE, {"mechanism": "pure-noise"}])
def test_keys_that_come_from_the_records_are_a_release_whatever_the_noise(policy):
    """Noise on the images of class 3 does not hide that there is a class 3; keys by round (Many) tell nothing."""
    _, _, entries = protect(ByClass({3: torch.zeros(2, 1, 4, 4)}), context(synthetic_images=policy))
    images, classes = entries
    assert images.noise_multiplier > 0
    assert (classes.field, classes.kind, classes.noise_multiplier) == (
        "ByClass.x (classes)",
        "label_counts",
        0,
    )
    _, _, entries = protect(Many({1: torch.zeros(4, 3)}), context(logits=policy))
    assert len(entries) == 1


def test_noise_from_the_systems_entropy_has_the_deviation_that_is_promised():
    """Kolmogorov and Smirnov's test against N(0, 3), and the deviation within five of its standard errors."""
    from scipy.stats import kstest

    from fedaudit.privacy.mechanisms.gaussian import normal_noise

    policy = Policy(epsilon=1.0, delta=1e-3, secure=True)
    noise = normal_noise(torch.zeros(50, 400), 3.0, policy, ("no", "key")).flatten()
    assert float(noise.std()) == pytest.approx(3.0, abs=5 * 3.0 / math.sqrt(2 * 20_000))
    assert kstest(noise.numpy(), "norm", (0, 3)).pvalue > 1e-6


# --- unequal deltas, clients and claims


class TwoKinds(Up):
    a: dict[int, Tensor] = private("logits", via="model", unit="client")
    b: Tensor = private("embeddings", via="data", unit="record")


def test_noise_follows_the_sensitivity_and_no_two_tensors_share_it():
    """Clipping norm 3 and two tensors of 40 rows that depend on all records: 2 C sqrt(80). Embeddings, C = 1/2: 1."""
    policies = {
        "logits": Policy(noise_multiplier=2.0, sensitivity="clip:3"),
        "embeddings": Policy(noise_multiplier=1.0, sensitivity="clip:0.5"),
    }
    key = (0, "client 0", 1, 0, 0)
    context = Context(
        key, 100, policies, releases=lambda _: 1, images=lambda: torch.zeros(1, 1, 2, 2), encode=lambda x: x
    )
    zeros = torch.zeros(40, 100)
    reply, protection, _ = protect(TwoKinds({0: zeros, 1: zeros}, zeros), context)
    noises = [reply.a[0], reply.a[1], reply.b]
    wanted = [2.0 * 6 * math.sqrt(80), 2.0 * 6 * math.sqrt(80), 1.0]
    for noise, sigma in zip(noises, wanted, strict=True):  # the standard deviation of 4,000 is 1.1 % uncertain
        assert float(noise.std()) == pytest.approx(sigma, rel=0.06)
    assert protection["a"].sigma == pytest.approx(wanted[0])
    for i in range(3):
        for j in range(i):
            assert abs(np.corrcoef(noises[i].flatten(), noises[j].flatten())[0, 1]) < 4 / math.sqrt(4000)


class Derived(Up):
    p: Tensor = private("prototypes", via="released", unit="client")


@pytest.mark.parametrize(
    ("looked", "derived", "dirty", "free"),
    [
        (False, False, False, True),  # the task knew nothing but what it was sent
        (True, False, False, False),
        (True, True, False, True),
        (False, False, True, False),  # its memory holds more than was paid for
        (False, True, True, True),
    ],
)
def test_what_follows_from_released_values_is_free(looked, derived, dirty, free):
    value, seen = torch.ones(3), Provenance(None, (), {})
    if looked:
        seen.look(torch.nn.Linear(1, 1), {})
    if derived:
        seen.derived(value, "class_means")
    made = context(embeddings=ONE)
    made.provenance, made.dirty = seen, dirty
    (found,) = protect(Derived(value), made)[2]
    assert found.noise_multiplier == (math.inf if free else 0.0)
    assert found.mechanism == ("post-processing" if free else "none")
    assert (found.condition == UNTRACED) is not free


def test_nobody_follows_a_task_without_provenance():
    (found,) = protect(Derived(torch.ones(3)), context(embeddings=ONE))[2]
    assert (found.mechanism, found.noise_multiplier) == ("post-processing", math.inf)


# --- words of a report


def in_words(*entries):
    return mechanism_named(entries[0].mechanism).words(entries)


def test_words_are_of_the_release_with_the_least_noise():
    """Two releases of unequal noise, cosines and rounds, and one by a heuristic, which guarantees nothing."""
    shared = {"field": "Rows.e", "kind": "embeddings", "mechanism": "gaussian", "relation": "replace-one"}
    much = LedgerEntry(
        **shared, noise_multiplier=3.0, sigma=6.0, clip=1.0, claim=1.0, cosine=0.25, rounds=[1, 2], condition="n known"
    )
    little = LedgerEntry(**shared, noise_multiplier=2.0, sigma=4.0, clip=2.0, claim=8.0, cosine=0.75, rounds=[3])
    text, colour = in_words(much, little)
    assert colour == "noise"
    assert text == (
        "Gaussian noise, sigma 4 to 6, clipped to 2, 3 releases; asked for: ε = 8 per release; cosine to the raw "
        "values 0.50"
    )
    assert in_words(much)[0] == (
        "Gaussian noise, sigma 6, clipped to 1 (n known), 2 releases; asked for: ε = 1 per release; cosine to the raw "
        "values 0.25"
    )
    guess = LedgerEntry(**{**shared, "mechanism": "gaussian, heuristic sensitivity"}, noise_multiplier=0.0, sigma=5.0)
    assert in_words(guess) == ("noise (sigma 5) by a heuristic that guarantees nothing", "open")
    assert in_words(much, guess)[1] == "open"


# --- whole functions


class Seen:
    """A provenance that knows certain values by their sum, and notes what is released."""

    looked = True

    def __init__(self, *known):
        self.known, self.noted, self.asked = known, [], []

    def released(self, name, value):
        self.noted.append((name, value))

    def traced(self, value, where, unpaid):
        self.asked.append((where, unpaid))
        return float(value.sum()) in self.known

    def is_derived(self, value):
        return False


def test_a_field_that_is_protected_ahead_is_sent_as_it_was_made():
    """With a policy it is noised, and its entry is the reply's; without one it is sent as it is, and billed."""
    rows = torch.randn(4, 2)
    for policies, noised in (({"embeddings": ONE}, True), ({}, False)):
        made = context(**policies)
        made.provenance = Seen()
        sent = protect_field(Rows, "e", rows, made)
        assert torch.equal(sent, rows) is not noised
        assert made.provenance.noted == [("e", sent)]
        digest, entries = made.done["Rows.e"]
        assert digest == digest_of(sent)
        assert [(e.field, e.noise_multiplier > 0) for e in entries] == [("Rows.e", noised)]
        made.provenance = None
        reply, protection, found = protect(Rows(sent, 3), made)
        assert reply.e is sent
        assert found == entries
        assert list(protection) == (["e"] if noised else [])
        if noised:
            assert protection["e"] == entries[0].public()
    for wrong in ("t", "nothing"):
        with pytest.raises(PrivacyError, match="is not a private field"):
            protect_field(Rows, wrong, rows, context())


def test_a_field_that_is_known_to_be_none_is_no_release():
    """Any other None is billed like a value."""
    made = context()
    made.absent = lambda: frozenset({"Two.z"})
    _, protection, entries = protect(Two(None, None), made)
    assert [e.field for e in entries] == ["Two.e"]
    assert protection == {}
    made.absent = frozenset
    assert [e.field for e in protect(Two(torch.ones(1, 1), None), made)[2]] == ["Two.e", "Two.z"]
    made.absent = lambda: frozenset({"Two.z"})
    assert [e.field for e in protect(Two(None, torch.ones(1, 1)), made)[2]] == ["Two.e", "Two.z"]


class Open(Up):
    x: Tensor = public()


class OfTheModel(Up):
    x: Tensor = private("logits", via="model", unit="client")


@pytest.mark.parametrize(("dirty", "plain", "unpaid"), [(False, 0, False), (True, 0, True), (False, 1, True)])
def test_public_fields_are_traced_where_there_is_a_policy(dirty, plain, unpaid):
    made = context(embeddings=ONE)
    made.provenance, made.dirty, made.plain_fits = Seen(6.0), dirty, plain
    assert protect(Open(torch.full((2,), 3.0)), made)[2] == []
    (found,) = protect(Open(torch.full((2,), 4.0)), made)[2]
    assert found == LedgerEntry.unprotected("Open.x", "public", UNTRACED)
    assert made.provenance.asked == [("Open.x", unpaid)] * 2
    made.policies = {}
    assert protect(Open(torch.full((2,), 4.0)), made)[2] == []


@pytest.mark.parametrize(
    ("policies", "spent", "plain", "known", "wanted"),
    [
        (("training",), 1, 0, True, ("post-processing of DP-SGD", math.inf, "given the privacy of training")),
        (("training",), 0, 0, True, ("none", 0.0, None)),
        (("training",), 1, 1, True, ("none", 0.0, None)),
        (("training",), 1, 0, False, ("none", 0.0, UNTRACED)),
        (("embeddings",), 1, 0, True, ("none", 0.0, None)),
        (("embeddings",), 1, 0, False, ("none", 0.0, UNTRACED)),
        ((), 1, 0, False, ("none", 0.0, None)),
    ],
)
def test_a_release_of_the_model_is_paid_by_training_alone(policies, spent, plain, known, wanted):
    made = context(**dict.fromkeys(policies, ONE))
    made.provenance, made.plain_fits, made.spent = Seen(*([6.0] if known else [])), plain, {"training": spent}
    (found,) = protect(OfTheModel(torch.full((2,), 3.0)), made)[2]
    assert (found.mechanism, found.noise_multiplier, found.condition) == wanted


def test_the_cosine_of_rows_before_and_after_by_hand():
    """Rows at 0, 90 and 60 degrees: (1 + 0 + 1/2) / 3. Whole numbers and empty tensors have none."""
    raw = [torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([3.0, 0.0]), torch.tensor([1, 2]), torch.zeros(0, 2)]
    noisy = [torch.tensor([[5.0, 0.0], [7.0, 0.0]]), torch.tensor([1.0, math.sqrt(3)]), torch.tensor([2, 1]), raw[3]]
    assert _cosine(raw, noisy) == pytest.approx(0.5)
    assert _cosine(raw[2:], noisy[2:]) is None
    assert _cosine(raw[3:], noisy[3:]) is None
    with pytest.raises(ValueError, match="zip"):
        _cosine(raw, noisy[:2])


@pytest.mark.parametrize("unit", ["record", "person"])
def test_an_entry_has_the_cosine_and_the_unit_of_its_release(unit):
    rows = torch.tensor([[3.0, 4.0]])
    made = context(embeddings={"noise_multiplier": 1e-9, "delta": 1e-5, "unit": unit})
    (entry,) = protect(Rows(rows, 1), made)[2]
    assert entry.cosine == pytest.approx(1.0)
    assert entry.unit == unit
