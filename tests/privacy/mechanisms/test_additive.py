"""What all mechanisms that add noise share: options, entries that follow from a policy, counted releases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from noised import Counts, Images, Many, Rows, context, released
from torch import Tensor

from fedaudit import Up, private
from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.calibration import analytic
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism import protect
from fedaudit.privacy.mechanisms.additive import (
    as_array,
    as_matrix,
    check_finite_floats,
    check_sensitivity,
    counted,
    moves_of,
)
from fedaudit.privacy.mechanisms.base import Prepared, choices, mechanism_named, mechanisms, span
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.sensitivity import Bounding
from fedaudit.wire.release import Protection

GAUSSIAN = mechanism_named("gaussian")


@pytest.mark.parametrize(
    ("kind", "sensitivity", "assume", "words"),
    [
        ("logits", "random-pixel:10", "logits-of-records", None),
        ("logits", "clip:1", "logits-of-records", "only for the random-pixel sensitivity of logits"),
        ("embeddings", "random-pixel:10", "logits-of-records", "only for the random-pixel sensitivity of logits"),
        ("embeddings", "random-pixel:10", "nothing", None),
        ("embeddings", "random-pixel:1.5", "nothing", "give a whole number of edits"),
        ("embeddings", "clip:1.5", "nothing", None),
        ("embeddings", "clip", "nothing", None),
        ("embeddings", "clip:0", "nothing", "give a number above 0"),
        ("embeddings", "clip:-1", "nothing", "give a number above 0"),
        ("embeddings", "clip:inf", "nothing", "give a number above 0"),
        ("embeddings", "clip:one", "nothing", "give a number above 0"),
        ("embeddings", "clap:1", "nothing", "Did you mean 'clip'"),
    ],
)
def test_sensitivities_that_can_be_read(kind, sensitivity, assume, words):
    policy = Policy(epsilon=1.0, sensitivity=sensitivity, assume=assume)
    if words is None:
        check_sensitivity("x", kind, policy)
        return
    with pytest.raises(PrivacyError, match=words):
        check_sensitivity("x", kind, policy)


@pytest.mark.parametrize("relation", ["replace-one", "zero-out"])
def test_an_entry_follows_from_its_policy(relation):
    """epsilon = 1 and clipping to 3: noise of `analytic` for one release, and sqrt(5) times of it for five."""
    made = context(embeddings={"epsilon": 1.0, "delta": 1e-5, "sensitivity": "clip:3", "relation": relation})
    policy = made.policies["embeddings"]
    entry = protect(Rows(torch.randn(4, 2)), made)[2][0]
    once = GAUSSIAN.follows(entry, policy, 1000, 10, 1)
    assert {name: getattr(entry, name) for name in once} == pytest.approx(once)
    assert once["noise_multiplier"] == pytest.approx(analytic(1.0, 1e-5, 1.0))
    assert once["sigma"] == pytest.approx(analytic(1.0, 1e-5, 1.0) * (6 if relation == "replace-one" else 3))
    total = policy.model_copy(update={"calibration": "total"})
    assert GAUSSIAN.follows(entry, total, 1000, 10, 5)["noise_multiplier"] == pytest.approx(
        analytic(1.0, 1e-5, 1.0) * math.sqrt(5)
    )
    assert "noise_multiplier" not in GAUSSIAN.follows(entry, policy, 1000, 10, None)
    named = policy.model_copy(update={"epsilon": None, "noise_multiplier": 7.0})
    assert GAUSSIAN.follows(entry, named, 1000, 10, None)["noise_multiplier"] == 7.0
    bare = entry.model_copy(update={"clip": None, "sigma": None})
    assert not {"clip", "sigma"} & GAUSSIAN.follows(bare, policy, 1000, 10, 1).keys()


def test_releases_that_share_an_epsilon_are_counted():
    rows = Rows.declared()["e"]
    made = context(embeddings={"epsilon": 1.0})
    policy = made.policies["embeddings"]
    assert [counted(policy, rows, "x", made) for _ in range(9)] == [1] * 9
    assert made.spent == {}
    total = policy.model_copy(update={"calibration": "total"})
    assert [counted(total, rows, "x", made) for _ in range(5)] == [5] * 5, "as many as the method declares"
    assert made.spent == {"embeddings": 5}
    with pytest.raises(PrivacyError, match="planned 5 releases of embeddings, and this is number 6"):
        counted(total, rows, "x", made)
    assert counted(total.model_copy(update={"releases": 9}), rows, "x", made) == 9
    made.releases = lambda kind: None
    with pytest.raises(PrivacyError, match="does not declare its traffic"):
        counted(total, rows, "x", made)


def test_counts_that_one_record_may_change():
    """L2: sqrt(2) squared; L1: 2 itself. Rows are no counts."""
    counts, rows = Counts.declared()["n"], Many.declared()["z"]
    assert moves_of(counts, [1.0, math.sqrt(2)], 2) == 2
    assert moves_of(counts, [2.0], 1) == 2
    assert moves_of(counts, [], 2) == 1
    assert moves_of(rows, [3.0], 2) is None


def test_the_smallest_class_is_told_by_the_noise():
    """C = 3, two classes of N_c - 1 = 10: sensitivity sqrt(2) 2 C / 10 under replace-one, half of it under zero-out."""
    told = Protection(mechanism="gaussian", clip=3.0, sensitivity=math.sqrt(2) * 6 / 10, relation="replace-one")
    assert GAUSSIAN.smallest_class(told) == pytest.approx(10)
    assert GAUSSIAN.smallest_class(told.model_copy(update={"relation": "zero-out"})) == pytest.approx(5)
    assert mechanism_named("laplace").smallest_class(told) == pytest.approx(10 * math.sqrt(2))
    for gone in ("clip", "sensitivity"):
        assert GAUSSIAN.smallest_class(told.model_copy(update={gone: None})) is None


def test_rows_of_residuals():
    assert as_matrix(np.zeros(6)).shape == (1, 6)
    assert as_matrix(np.zeros((2, 3))).shape == (2, 3)
    assert as_matrix(np.zeros((2, 3, 4))).shape == (2, 12)


def test_what_each_mechanism_is_for():
    """Which may be named in a policy, train, protect persons, are normal, and can be looked at after rounding."""
    every = mechanisms()

    def those(fact):
        return {name for name, how in every.items() if getattr(how, fact)}

    assert those("trains") == {"dp-sgd"}
    assert choices(trains=True) == ["dp-sgd"]
    assert "dp-sgd" not in choices(trains=False)
    assert set(choices()) == those("chosen")
    assert {"gaussian", "laplace", "skellam", "discrete-gaussian", "randomised-response", "pure-noise"} <= set(
        choices()
    )
    assert not {"none", "post-processing"} & set(choices())
    assert those("normal") >= {"gaussian"}
    assert not those("normal") & {"laplace", "skellam", "discrete-gaussian", "randomised-response"}
    assert those("rounds") >= {"gaussian", "pure-noise"}
    assert not those("rounds") & {"laplace", "skellam", "discrete-gaussian", "randomised-response"}
    assert span([]) == "–"
    assert span([2.0, 2.0001]) == "2"
    assert span([3.0, 0.5]) == "0.5 to 3"


class Views(Up):
    e: tuple[Tensor, ...] = private("embeddings", via="data", unit="record")


@pytest.mark.parametrize(
    ("lengths", "taken"), [((3, 3), True), ((2, 3), True), ((4, 3), False), ((3, 4), False), ((), True)]
)
def test_no_view_of_the_records_has_more_rows_than_there_are(lengths, taken):
    """Three records, of which each view may have as many rows. What depends on all records may have more."""
    made = context(n=3, embeddings={"epsilon": 1.0, "delta": 1e-5}, logits={"epsilon": 1.0, "delta": 1e-5})
    reply = Views(tuple(torch.zeros(length, 2) for length in lengths))
    if taken:
        assert len(protect(reply, made)[0].e) == len(lengths)
    else:
        with pytest.raises(PrivacyError, match=r"more rows than the client has records \(3\)"):
            protect(reply, made)
    assert protect(Many(torch.zeros(4, 2)), made)[0].z.shape == (4, 2)


@pytest.mark.parametrize("name", ["gaussian", "laplace"])
def test_an_entry_of_a_release_by_hand(name):
    """Two tensors of sensitivity 4 and 3, noise of half of it: the larger one is told, and Laplace noise of scale 2
    has a deviation of 2 sqrt(2). A heuristic has no multiplier."""
    how, deviation = mechanism_named(name), math.sqrt(2) if name == "laplace" else 1.0
    policy = Policy(mechanism=name, epsilon=2.0)
    ready = Prepared([], [3.0, 4.0], 0.5, 1e-5, Bounding("zero-out", 1.5, "given this"), deviation)
    assert ready.scales == [1.5, 2.0]
    assert ready.sigmas == pytest.approx([1.5 * deviation, 2 * deviation])
    entry = how.entry("A.b", "logits", policy, ready)
    facts = {"field": "A.b", "kind": "logits", "relation": "zero-out", "sensitivity": 4.0, "delta": 1e-5, "claim": 2.0}
    assert entry == LedgerEntry(
        **facts, mechanism=name, noise_multiplier=0.5, sigma=entry.sigma, clip=1.5, condition="given this"
    )
    assert entry.sigma == pytest.approx(2 * deviation)
    guess = Prepared([], [3.0, 4.0], 0.5, 1e-5, Bounding("zero-out", guaranteed=False), deviation)
    assert how.entry("A.b", "logits", policy, guess) == LedgerEntry(
        **facts, mechanism=f"{name}, heuristic sensitivity", noise_multiplier=0.0, sigma=entry.sigma
    )
    none = how.entry("A.b", "logits", policy, Prepared([], [], 0.5, 1e-5, Bounding("zero-out"), deviation))
    assert (none.sigma, none.sensitivity) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["gaussian", "laplace"])
def test_every_value_of_an_entry_that_its_policy_decides(name):
    """A multiplier of 7 is in the policy, and 0.5 in the entry, whose sigma has to fit that: 0.5 times 6, and sqrt(2)
    times as much of Laplace noise."""
    how = mechanism_named(name)
    policy = Policy(mechanism=name, noise_multiplier=7.0, delta=1e-3, sensitivity="clip:3", relation="zero-out")
    entry = LedgerEntry(field="A.b", kind="logits", mechanism="x", noise_multiplier=0.5, relation="any", sigma=1.0,
                        sensitivity=6.0, clip=9.0)  # fmt: skip
    laplace = name == "laplace"
    told = {"mechanism": name, "relation": "zero-out", "delta": 0.0 if laplace else 1e-3, "claim": None}
    noise = {"noise_multiplier": 7.0, "sigma": pytest.approx(3 * math.sqrt(2) if laplace else 3.0)}
    assert how.follows(entry, policy, 1000, 10, 5) == {**told, **noise, "clip": 3.0}
    assert how.follows(entry, policy, 1000, 10, None) == {**told, **noise, "clip": 3.0}
    for gone in ({"sensitivity": None}, {"sensitivity": 0.0}, {"sigma": None}):
        found = how.follows(entry.model_copy(update=gone), policy, 1000, 10, None)
        assert found == {**told, "noise_multiplier": 7.0, "clip": 3.0}
    no_clip = how.follows(entry.model_copy(update={"clip": None}), policy, 1000, 10, None)
    assert no_clip == {**told, **noise}
    silent = how.follows(entry, policy.model_copy(update={"noise_multiplier": None, "epsilon": 1.0}), 1000, 10, None)
    assert silent == {**told, "claim": 1.0, "sigma": noise["sigma"], "clip": 3.0}
    planned = policy.model_copy(update={"noise_multiplier": None, "epsilon": 2.0, "calibration": "total"})
    wanted = 5 / 2 if laplace else math.sqrt(5) * analytic(2.0, 1e-3, 1.0)
    assert how.follows(entry, planned, 1000, 10, 5)["noise_multiplier"] == pytest.approx(wanted)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_single_number_that_is_not_finite_is_refused(wrong):
    good, bad = torch.zeros(2), torch.tensor([0.0, wrong, 1.0])
    for value in (bad, [good, bad], [bad, good]):
        with pytest.raises(PrivacyError, match="holds NaN or infinity"):
            check_finite_floats(value, "x")
    assert [leaf.tolist() for leaf in check_finite_floats([good, good + 1], "x")] == [[0, 0], [1, 1]]
    with pytest.raises(NotApplicable, match="Gaussian noise needs floating-point"):
        check_finite_floats([good, torch.tensor([1])], "x")


def test_imitated_rows_are_clipped_and_get_the_noise_that_is_told(monkeypatch):
    """[3, 4] is clipped to [1.5, 2] of norm 2.5; the noise is 10 times the standard one. What is not told is not
    done."""
    monkeypatch.setattr(type(GAUSSIAN), "standard", lambda self, like, rng: torch.tensor([[1.0, -1.0], [0.5, 2.0]]))
    rows, rng = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.Generator()

    def imitated(**facts):
        return GAUSSIAN.imitated(rows, Protection(mechanism="gaussian", **facts), rng).tolist()

    assert imitated(clip=2.5, sigma=10.0) == [pytest.approx([11.5, -8]), pytest.approx([6, 20])]
    assert imitated(sigma=10.0) == [[13.0, -6.0], [6.0, 20.0]]
    assert imitated(clip=2.5) == [pytest.approx([1.5, 2.0]), [1.0, 0.0]]


def test_noise_is_added_to_each_tensor_by_its_own_key(monkeypatch):
    """Scales 1.5 and 2. Bytes are clamped to their range afterwards, and nothing else is."""
    asked = []

    def draw(self, like, scale, policy, key):
        asked.append((scale, key))
        return torch.full_like(like, scale)

    monkeypatch.setattr(type(GAUSSIAN), "draw", draw)
    policy, made = Policy(epsilon=1.0), context("k")
    ready = Prepared([torch.tensor([0.25, -4.0]), torch.tensor([-0.5])], [3.0, 4.0], 0.5, 0.0, Bounding("zero-out"))
    declared = Views.declared()["e"]
    noisy = GAUSSIAN.noised(ready, "A.b", declared, policy, made)
    assert [leaf.tolist() for leaf in noisy] == [[1.75, -2.5], [1.5]]
    assert asked == [(1.5, ("k", "A.b", 0)), (2.0, ("k", "A.b", 1))]
    clamped = GAUSSIAN.noised(ready, "A.b", Images.declared()["x"], policy, made)
    assert [leaf.tolist() for leaf in clamped] == [[1.0, -1.0], [1.0]]
    short = Prepared(ready.leaves, [3.0], 0.5, 0.0, Bounding("zero-out"))
    for name in ("gaussian", "skellam"):
        with pytest.raises(ValueError, match="zip"):
            mechanism_named(name).noised(short, "A.b", declared, policy, made)


def test_residuals_are_counted_in_the_deviation_of_their_tensor():
    """Sent less clean, over 1.5 and 2. Noise that is promised to be none at all is divided by the least number."""
    leaves = [torch.tensor([[1.0, 2.0]]), torch.tensor([4.0, 0.0])]
    ready = Prepared(leaves, [3.0, 4.0], 0.5, 0.0, Bounding("zero-out"))
    assert GAUSSIAN.noise(np.array([[4.0, 2.0]]), ready, 0, 0).z.tolist() == [[2.0, 0.0]]
    found = GAUSSIAN.noise(np.array([0.0, 3.0]), ready, 1, 0)
    assert (found.z.tolist(), found.sizes, found.free) == ([[-2.0, 1.5]], None, True)
    silent = Prepared(leaves, [0.0, 0.0], 0.5, 0.0, Bounding("zero-out"))
    assert GAUSSIAN.noise(np.array([4.0, 1e-308]), silent, 1, 0).z.tolist() == [[0.0, pytest.approx(0.4494, rel=1e-3)]]
    assert as_array(torch.tensor([1, 2], dtype=torch.int32)).dtype == np.float64


def test_a_release_that_is_prepared_by_hand():
    """A multiplier in the policy stands; an epsilon is calibrated for, of all planned releases with `total`."""
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    policy = {"noise_multiplier": 0.5, "delta": 1e-3, "sensitivity": "clip:2.5", "relation": "zero-out"}
    how, ready, _ = released(Rows, rows, policy)
    assert torch.allclose(ready.leaves[0], torch.tensor([[1.5, 2.0], [0.3, 0.4]]))
    assert (ready.sensitivities, ready.multiplier, ready.delta, ready.deviation) == ([2.5], 0.5, 1e-3, 1.0)
    assert ready.bounded == Bounding("zero-out", 2.5, "given the encoder")
    assert (ready.classes, ready.grid, ready.moves, how.name) == (None, None, None, "gaussian")
    calibrated = released(Rows, rows, {"epsilon": 1.0, "delta": 1e-3})[1]
    assert calibrated.multiplier == pytest.approx(analytic(1.0, 1e-3, 1.0))
    planned = released(Rows, rows, {"epsilon": 1.0, "delta": 1e-3, "calibration": "total"})[1]
    assert planned.multiplier == pytest.approx(math.sqrt(5) * analytic(1.0, 1e-3, 1.0))


def test_words_of_noise():
    """The worst of the entries is the one with the least noise: its claim, clip and condition are told."""
    facts = {"field": "A.b", "kind": "logits", "mechanism": "gaussian", "relation": "zero-out"}
    much = LedgerEntry(**facts, noise_multiplier=4.0, sigma=9.0, clip=7.0, claim=0.5, rounds=[1, 2], cosine=0.2)
    less = LedgerEntry(**facts, noise_multiplier=2.0, sigma=0.25, clip=1.5, claim=3.0, rounds=[3], cosine=0.6,
                       condition="given this")  # fmt: skip
    bare = LedgerEntry(**facts, noise_multiplier=5.0, rounds=[3])
    assert GAUSSIAN.words([much, less, bare]) == (
        "Gaussian noise, sigma 0.25 to 9, clipped to 1.5 (given this), 4 releases; asked for: ε = 3 per release; "
        "cosine to the raw values 0.40",
        "noise",
    )
    assert GAUSSIAN.words([bare]) == ("Gaussian noise, sigma –, 1 release", "noise")
    guess = LedgerEntry(**facts, noise_multiplier=0.0, sigma=2.0, rounds=[3])
    assert GAUSSIAN.words([guess, less]) == (
        "noise (sigma 0.25 to 2) by a heuristic that guarantees nothing; cosine to the raw values 0.60", "open",
    )  # fmt: skip
