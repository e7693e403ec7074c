"""Release-path canaries: the real path on worst pairs of records, for each way in which a release depends on them."""

from __future__ import annotations

import json
import math
from unittest import mock

import numpy as np
import pytest
import torch
from protected import ALL, ONE, SMALL, Everything, once

from fedaudit import ce, run, sgd
from fedaudit.cli.listing import summary
from fedaudit.epsilon import release_path
from fedaudit.epsilon.release_path import (
    Pair,
    Rehearsal,
    _audit_field,
    _swap,
    audit_releases,
    released_fields,
    worst_pair,
)
from fedaudit.errors import RunError, SettingError
from fedaudit.privacy.calibration import analytic
from fedaudit.privacy.mechanisms import gaussian as gaussian_mechanism
from fedaudit.privacy.mechanisms.base import mechanism_named
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.shape import Shape


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    """A run in which everything is protected by clipping, at epsilon = 1."""
    return once(tmp_path_factory.mktemp("runs") / "clipped", **dict.fromkeys(ALL, ONE))


def free(audits):
    """The rows that take no distribution for granted."""
    return [audit for audit in audits if audit.test == "release path"]


def gaussian(audits):
    return {audit.kind: audit for audit in audits if audit.test == "release path, Gaussian"}


def pair_of(folder, kind):
    found = RunFolder(folder)
    return worst_pair(found, next(released_fields(found, kind, [0])))


# -- the published heuristic, and clipping ------------------------------------------------------------------------

DFFKE = {"tau": "off", "E_local": 2, "B": 32, "h": 4, "T_Tran": 0, "T_Dec": 0, "T_FKE": 0, "w_Dec": 1, "R": 1}


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        ({"sensitivity": "random-pixel", "calibration": "classical"}, "refuted"),
        ({"sensitivity": "clip:1"}, "not refuted"),
        pytest.param({"sensitivity": "clip:0.1", "calibration": "classical"}, "not refuted", marks=pytest.mark.long),
    ],
)
def test_random_pixel_is_refuted_and_clip_is_not(policy, verdict, tmp_path):
    """DFFKE as published: noise for one edited pixel (Appendix G) does not hide a record. Clipping does, on the same
    embeddings, at the same epsilon. With seeds 0 to 7 the bound was 1.56 to 1.95 and p at most 3e-5; with 100
    trials one seed of five was not refuted."""
    privacy = {"embeddings": {"epsilon": 1.0, **policy}}
    run(method="dffke", rounds=1, clients=2, set=DFFKE, privacy=privacy, out=tmp_path / "a", **SMALL)
    trials = 300 if verdict == "refuted" else 60
    audits = audit_releases(tmp_path / "a", trials=trials)
    (found,) = free(audits)
    assert found.ceiling is not None
    assert (found.kind, found.claim_epsilon) == ("embeddings", 1.0)
    # So few trials are too few for half of the noise at delta = 1 / n, and so is the distance at classical noise.
    unseen = {"refuted"} if verdict == "refuted" else {"cannot tell", "not refuted"}
    assert {a.verdict for a in audits} <= unseen
    if verdict == "refuted":
        assert found.lower_bound > 1.5
        assert found.p_value < 1e-4
        assert found.ledger_epsilon == math.inf, "the ledger never took the heuristic for a guarantee"
    else:
        assert found.lower_bound <= found.ledger_epsilon <= 1 + 1e-9
        assert found.p_value > 0.05
    assert found.trials == 2 * trials
    record = read_record(tmp_path / "a")
    assert record.audits == audits
    (line, _) = [line for line in summary(record) if "Shared.E, one release: claimed 1," in line]
    assert f": {found.verdict} (p = " in line
    assert json.loads(record.model_dump_json())["audits"][0]["verdict"] == found.verdict


# -- every dependence ---------------------------------------------------------------------------------------------


def test_nothing_that_clipping_protects_is_accused(clipped):
    audits = audit_releases(clipped, trials=40)
    assert sorted(a.kind for a in free(audits)) == sorted(ALL)
    assert sorted(gaussian(audits)) == sorted(set(ALL) - {"synthetic_images"}), "those are rounded and clamped"
    assert {a.verdict for a in audits} <= {"not refuted", "cannot tell"}
    assert all(a.trials == 80 and a.lower_bound < 1 and "private" not in a.model_dump_json() for a in audits)
    assert len(read_record(clipped).audits) == len(audits)
    again = audit_releases(clipped, kinds=["label_counts"], trials=20)
    kept = read_record(clipped).audits
    assert len(kept) == len(audits), "a new audit of a claim takes the old one's place"
    assert again[0] in kept


@pytest.mark.long
def test_an_audit_says_what_it_could_have_found(clipped):
    """60 trials a side: perfect scores show at most so much, and half of the noise (twice the distance) is too little.
    600 find it by the shift of the means at a level of 0.001, with 99 %: 2 mu - (3.09 + 2.33) sqrt(2 / 600) exceeds
    mu = 0.43, the claim's."""
    few, many = (audit_releases(clipped, kinds=["soft_labels"], trials=n) for n in (20, 600))
    assert [a.verdict for a in few] == ["cannot tell", "cannot tell"]
    assert all(a.finds < 0.5 for a in few)
    assert few[0].ceiling < 2 < many[0].ceiling
    assert gaussian(many)["soft_labels"].finds >= 0.5
    assert gaussian(many)["soft_labels"].tells_at < 0.001 < gaussian(few)["soft_labels"].tells_at
    assert gaussian(many)["soft_labels"].verdict == "not refuted"


@pytest.mark.parametrize("kind", ALL)
def test_too_little_noise_is_found_out(kind, clipped, monkeypatch):
    """The path itself is tried: with a tenth of the noise that the policy promises, every claim falls."""
    real = gaussian_mechanism.normal_noise
    monkeypatch.setattr(gaussian_mechanism, "normal_noise", lambda like, sigma, *rest: real(like, sigma / 10, *rest))
    for found in audit_releases(clipped, kinds=[kind], trials=50):
        assert (found.verdict, found.lower_bound > 1.2, found.p_value < 0.01) == ("refuted", True, True)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.long if kind in ("label_counts", "soft_labels") else [])
        for kind in ALL
        if kind != "synthetic_images"
    ],
)
def test_half_of_the_noise_is_found_out(kind, clipped, monkeypatch):
    """Means that are 2 mu apart, mu = 0.43 the claim's, are known to sqrt(2 / 200): 2 mu - mu is 4.3 of those, where
    1.6 refute."""
    real = gaussian_mechanism.normal_noise
    monkeypatch.setattr(gaussian_mechanism, "normal_noise", lambda like, sigma, *rest: real(like, sigma / 2, *rest))
    found = gaussian(audit_releases(clipped, kinds=[kind], trials=200))[kind]
    assert (found.verdict, found.lower_bound > 1) == ("refuted", True)


def test_how_far_apart_neighbours_are(clipped):
    """In units of the noise m Delta, m the multiplier. Opposite ends of R rows in a ball: 2 C sqrt(R) apart, which is
    Delta: 1/m. Pixels, all of them: 1/m. Counts of two classes change by 1 each: sqrt(2) = Delta: 1/m. A clipped row
    from one end of its ball to the other: 2 C = Delta. Two class means by 2 C / (N - 1) each, over a noise of m sqrt(2)
    2 C / (N - 1): 1/m. Records that were found move a row by less than 2 C, and, the label kept, one mean by less than
    2 C / N: below 1 / (sqrt(2) m)."""
    m = analytic(1.0, 1e-2, 1.0)
    for kind in ALL:
        assert pair_of(clipped, kind).distance * m == pytest.approx(1, rel=1e-5)
    run, state = RunFolder(clipped), RunFolder(clipped).client_state(0)
    for kind, depends, most in (("embeddings", "record", 1.0), ("logits", "class", 1 / math.sqrt(2))):
        natural = _swap(run.world, next(released_fields(run, kind, [0])), state, depends)
        assert 0.1 < natural.distance * m <= most


def test_the_pair_differs_in_one_record_and_in_no_training(clipped):
    found = RunFolder(clipped)
    pair = _swap(found.world, next(released_fields(found, "embeddings", [0])), found.client_state(0), "record")
    (a, b), members = (side.client for side in pair.sides), RunFolder(clipped).world.members(0)
    changed = [i for i in range(len(a)) if not torch.equal(a.x[i], b.x[i])]
    assert len(changed) == 1
    assert sum(not torch.equal(a.x[i], members[0][i]) for i in range(len(a))) <= 1
    rows = (pair.sides[0].value != pair.sides[1].value).any(1).nonzero()[:, 0].tolist()
    assert rows == changed, "the other rows are the same to the bit: the encoder is one"
    assert isinstance(a, Rehearsal)
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))


def test_zero_out_is_tried_against_zeros(tmp_path):
    """Its sensitivity is C: a pair that exchanges records would accuse it wrongly."""
    zero_out = {**ONE, "relation": "zero-out"}
    once(tmp_path / "a", embeddings=zero_out, label_counts=zero_out)
    pair = pair_of(tmp_path / "a", "embeddings")
    assert "a row of zeros" in pair.words
    assert pair.distance * analytic(1.0, 1e-2, 1.0) == pytest.approx(1, rel=1e-5)
    audits = audit_releases(tmp_path / "a", trials=100)
    assert gaussian(audits)["embeddings"].verdict != "refuted"
    assert free(audits)[-1].verdict == "not tried"


def test_pure_noise_claims_zero_and_multipliers_what_they_give(tmp_path):
    """sigma / sensitivity = 2 at delta = 0.01 is epsilon = 0.91946, where Phi(1/4 - 2 e) - e^e Phi(-1/4 - 2 e) = 0.01
    (Balle and Wang 2018)."""
    multiplier = {"noise_multiplier": 2.0, "delta": 1e-2}
    once(tmp_path / "a", embeddings={"mechanism": "pure-noise"}, label_counts=multiplier)
    assert pair_of(tmp_path / "a", "embeddings").distance > 1, "before the noise took their place they were far apart"
    embeddings, counts = free(audit_releases(tmp_path / "a", trials=60))
    assert (embeddings.claim_epsilon, embeddings.lower_bound, embeddings.verdict) == (0, 0, "not refuted")
    e = counts.claim_epsilon
    assert e == pytest.approx(0.91946, abs=5e-6)
    phi = torch.special.ndtr(torch.tensor([0.25 - 2 * e, -0.25 - 2 * e], dtype=torch.float64))
    assert float(phi[0] - math.exp(e) * phi[1]) == pytest.approx(1e-2, rel=1e-6)


# -- what cannot be tried, and what a user gets wrong -------------------------------------------------------------


def test_training_is_not_tried_and_says_so(tmp_path):
    privacy = {"training": {"noise_multiplier": 1.0, "delta": 1e-2}, "prototypes": ONE}
    run(method="fedavg", rounds=1, clients=2, privacy=privacy, out=tmp_path / "a", **SMALL)
    prototypes, training = audit_releases(tmp_path / "a")
    assert (training.verdict, training.trials, training.lower_bound) == ("not tried", 0, 0)
    assert "fedaudit epsilon audit" in training.how
    assert (prototypes.verdict, prototypes.how) == ("not tried", "fedavg released no prototypes")
    assert any("not tried: what DP-SGD protects" in line for line in summary(read_record(tmp_path / "a")))


class Stubborn(Everything):
    """Its release needs the training that a rehearsal leaves out."""

    def send(self, client, msg):
        fitted = client.fit(ce, epochs=1, batch=32, opt=sgd(0.1))
        sent = super().send(client, msg)
        return sent if fitted.steps else 1 / fitted.steps


def test_a_method_that_cannot_be_rehearsed_is_no_crash(tmp_path):
    setting = {"method": f"{__name__}:Stubborn", "rounds": 1, "clients": 2, "privacy": {"embeddings": ONE}, **SMALL}
    run(out=tmp_path / "a", **setting)
    (found,) = audit_releases(tmp_path / "a", trials=10)
    assert found.verdict == "not tried"
    assert "ZeroDivisionError" in found.how


def test_user_errors(clipped, tmp_path):
    for words, options in (
        ("Did you mean 'embeddings'", {"kinds": ["embedings"]}),
        ("There is no client 7", {"clients": [7]}),
        ("at least 2", {"trials": 1}),
    ):
        with pytest.raises(SettingError, match=words):
            audit_releases(clipped, **options)
    unfinished = once(tmp_path / "a", embeddings=ONE)
    path = unfinished / "record.json"
    path.write_text(path.read_text().replace('"status": "done"', '"status": "running"'))
    with pytest.raises(RunError, match="not finished"):
        audit_releases(unfinished)


# --- ties, and unequal clients


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


def test_neighbours_with_other_class_counts_are_left_out(folder):
    """The claim for class means is "given the classes and their counts": a changed label is no neighbour here."""
    found = RunFolder(folder)
    release = next(released_fields(found, "logits", [0]))
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
    releases = list(released_fields(found, "embeddings", None))
    distances = [worst_pair(found, release).distance for release in releases]
    assert distances[0] != distances[1]
    worst = distances.index(max(distances))
    told, *_ = _audit_field(found, "embeddings", releases, 2, 0.95, lambda *_: None)
    assert f"client {worst}, round 1" in told.how
    assert f"{max(distances):.3g} standard deviations" in told.how


def test_the_two_sides_draw_their_own_noise(folder):
    pair = worst_pair(RunFolder(folder), next(released_fields(RunFolder(folder), "embeddings", [0])))
    one, other = (np.array([pair.outcome(side, j) for j in range(30)]) for side in (0, 1))
    assert np.std(one - other) > 0.5 * np.std(one)
    assert len(set(one)) == 30


@pytest.mark.parametrize(("depends", "value"), [("all", 3 / 2), ("range", 1.0)])
def test_opposite_ends_of_what_a_claim_allows(depends, value):
    """C = 3 and rows of four numbers: 3 / sqrt(4) in each, on either side. Pixels are 1 and -1 whatever C is."""
    template = {"a": torch.zeros(2, 4), "nothing": torch.zeros(0, 4)}
    sent = mock.MagicMock(client=0, round=1, ask=0)
    sent.__getitem__.return_value = template
    release = mock.MagicMock(sent=sent, where="Sent.z", policy=mock.MagicMock(clip=3.0))
    release.how = mechanism_named("gaussian")
    with mock.patch.object(release_path, "Rehearsal"), mock.patch.object(release_path, "_pair") as pair:
        release_path._opposite_ends(mock.MagicMock(), release, b"", depends)
    _, one, other, words = pair.call_args.args
    for side, sign in ((one, 1), (other, -1)):
        assert torch.allclose(side.value["a"], torch.full((2, 4), sign * value))
    assert ("clipping ball" in words) is (depends == "all")


def test_extreme_rows_are_as_large_as_the_row_that_they_are_made_of():
    like = torch.tensor([0.5, -4.0, 3.0])
    made = release_path._extremes(like, Shape((3,)), torch.Generator().manual_seed(1))
    assert made["far out"].tolist() == [5.0, -40.0, 30.0]
    assert made["random signs"].abs().tolist() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(("relation", "other"), [("replace-one", [-1.5, -1.5, -1.5, -1.5]), ("zero-out", [0.0] * 4)])
def test_the_ends_of_what_clipping_allows_one_record(relation, other):
    """C = 3 and rows of four numbers: the first row has 3 / sqrt(4) in each, on either side, or nothing on the other.
    All other rows stay."""
    value = torch.arange(8.0).reshape(2, 4) + 10
    release = mock.MagicMock(where="Sent.z", policy=mock.MagicMock(clip=3.0, relation=relation))
    release.how = mechanism_named("gaussian")
    side = release_path.Side(mock.MagicMock(), value)
    with (
        mock.patch.object(release_path, "_rehearse", return_value=side),
        mock.patch.object(release_path, "_pair") as pair,
    ):
        release_path._clipped_ends(mock.MagicMock(), release, b"", "record")
    _, one, two, words = pair.call_args.args
    assert one.value.tolist() == [[1.5] * 4, [14.0, 15.0, 16.0, 17.0]]
    assert two.value.tolist() == [other, [14.0, 15.0, 16.0, 17.0]]
    assert ("against zeros" in words) is (relation == "zero-out")
