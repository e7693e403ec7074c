"""Release-path canaries: the real path on worst pairs of records, for each way in which a release depends on them."""

from __future__ import annotations

import contextlib
import json
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from gaussian_by_hand import epsilon_of
from protected import ALL, ONE, SMALL, Everything, once

from fedaudit import ce, run, sgd
from fedaudit.cli.listing import summary
from fedaudit.epsilon import release_path
from fedaudit.epsilon.audit_result import AuditedClaim
from fedaudit.epsilon.lower_bounds import from_scores, from_scores_exactly, gdp_mean_shift
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
from fedaudit.privacy.mechanisms.base import Prepared, mechanism_named
from fedaudit.privacy.policy import Policy
from fedaudit.progress import unwatched
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import EpsilonAudit, read_record
from fedaudit.shape import Shape
from fedaudit.wire.codec import digest_of


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
        pytest.param(kind, marks=pytest.mark.long if kind in ("label_counts", "soft_labels", "logits") else [])
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


@pytest.mark.long
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
    lone = release_path.Side(mock.MagicMock(), value[:1])
    with (
        mock.patch.object(release_path, "_rehearse", return_value=lone),
        mock.patch.object(release_path, "_pair") as pair,
    ):
        release_path._clipped_ends(mock.MagicMock(), release, b"", "record")
    assert [side.value.tolist() for side in pair.call_args.args[1:3]] == [[[1.5] * 4], [other]]


# --- each step by itself --------------------------------------------------------------------------------------------


def release_of(where="Sent.z", client=3, policy=None, **declared):
    """Return a release of client 3 in round 2, ask 1, by a mechanism of normal noise."""
    sent = mock.MagicMock(client=client, round=2, ask=1, row={"fn": "send"})
    facts = {"dtype": None, "finite": True, "via": "data", "kind": "embeddings"} | declared
    release = mock.MagicMock(sent=sent, where=where, policy=policy or Policy(epsilon=1.0, sensitivity="clip:3"))
    release.name, release.declared, release.how = "z", SimpleNamespace(**facts), mechanism_named("gaussian")
    return release


def pair_at(distance, client=3, **more):
    release = release_of(client=client, **more)
    return Pair(release, (None, None), None, None, distance, f"words {distance}")


def ledger_of(client, n, **by_kind):
    return SimpleNamespace(client=client, n=n, by_kind=by_kind, observers={"embeddings": ["server", f"peer {client}"]})


def run_of(*ledger, **policies):
    record = SimpleNamespace(ledger=list(ledger), setting=SimpleNamespace(method="mine"), transcript_digest="d1")
    return SimpleNamespace(record=record, world=SimpleNamespace(policies=policies), folder="there")


def test_which_kinds_are_tried_and_what_is_kept(monkeypatch):
    opened, asked, kept = run_of(logits=1, embeddings=2), [], []
    monkeypatch.setattr(release_path, "closed_run", lambda *how: asked.append(how) or opened)
    monkeypatch.setattr(release_path, "compute", lambda world: contextlib.nullcontext())
    monkeypatch.setattr(release_path, "_audit_kind", lambda run, *how: [how])
    monkeypatch.setattr(release_path, "save_audits", lambda *how: kept.append(how))
    found = audit_releases("there")
    assert found == [(kind, None, 1000, 0.95, unwatched) for kind in ("embeddings", "logits")]
    assert asked == [("there", None, None, "there is no claim to try.")]
    ((*facts, seconds),) = kept
    assert facts == ["there", "d1", found]
    assert 0 <= seconds < 5
    found = audit_releases("there", kinds=["logits"], clients=[4], trials=2, confidence=0.8, watch=print)
    assert found == [("logits", [4], 2, 0.8, print)]


def test_what_is_tried_of_a_kind(monkeypatch):
    fields = [SimpleNamespace(where=where, n=n) for n, where in enumerate(("A.e", "A.f", "A.e"))]
    monkeypatch.setattr(release_path, "released_fields", lambda run, kind, clients: fields if kind != "logits" else [])
    monkeypatch.setattr(release_path, "_not_tried", lambda run, *how: how)
    monkeypatch.setattr(
        release_path, "_audit_field", lambda run, kind, found, *how: [(kind, [f.n for f in found], *how)] * 2
    )
    flips = Policy(mechanism="randomised-response", epsilon=1.0)
    opened = run_of(embeddings=Policy(epsilon=1.0), labels=flips, logits=Policy(epsilon=1.0), training=None)

    def of(kind):
        return release_path._audit_kind(opened, kind, None, 7, 0.9, print)

    ((kind, what, reason, confidence),) = of("training")
    assert (kind, what, confidence) == ("training", "training", 0.9)
    assert "made in training" in reason
    assert of("logits") == [("logits", "logits", "mine released no logits", 0.9)]
    e, f = ("embeddings", [0, 2], 7, 0.9, print), ("embeddings", [1], 7, 0.9, print)
    assert of("embeddings") == [e, e, f, f]
    why = mechanism_named("randomised-response").path
    assert why
    assert of("labels") == [("labels", where, why, 0.9) for where in ("A.e", "A.f")]


class OfField:
    """Three releases of one field, of which one has no pair; the audits of the worst are kept as they were asked."""

    def __init__(self, monkeypatch, **more):
        self.made = {
            1: pair_at(0.5, 1, **more), 3: pair_at(2.0, 3, **more), 4: "no pair", 5: pair_at(1.0, 5, **more)
        }  # fmt: skip
        self.said, self.tried = [], []
        monkeypatch.setattr(release_path, "worst_pair", lambda run, release: self.made[release.sent.client])
        monkeypatch.setattr(Pair, "claim", lambda pair: (pair.distance + 1, 0.01 * pair.client))

        def outcome(pair, side, trial):
            self.tried.append((pair.client, side, trial))
            return 100.0 * side + trial

        monkeypatch.setattr(Pair, "outcome", outcome)
        monkeypatch.setattr(release_path, "held_path", lambda *how: how)
        ledger = [ledger_of(1, 9, embeddings=7.0), ledger_of(3, 9, embeddings=2.5), ledger_of(5, 9)]
        self.run = run_of(*ledger)

    def audit(self, clients, trials=2, kind="embeddings"):
        found = [release_of(client=k) for k in clients]
        return _audit_field(self.run, kind, found, trials, 0.9, lambda *how: self.said.append(how))


def test_the_worst_pair_of_all_clients_is_held_against_the_claim_twice(monkeypatch):
    of = OfField(monkeypatch)
    one, other = of.audit([1, 4, 3, 5])
    assert (one[1], one[2], one[10]) == ("release path", from_scores_exactly, from_scores)
    assert (other[1], other[2], other[10]) == ("release path, Gaussian", gdp_mean_shift, None)
    for place, _, _, scores, member, distance, delta, confidence, how, quantiles, _ in (one, other):
        assert place == AuditedClaim(
            "embeddings", "whoever sees the release: server, peer 3", "Sent.z, one release", 3.0, 2.5
        )
        assert scores.tolist() == [0.0, 1.0, 100.0, 101.0]
        assert member.tolist() == [True, True, False, False]
        assert (distance, delta, confidence) == (2.0, 0.03, 0.9)
        assert how == "words 2.0; client 3, round 2; noise-free releases 2 standard deviations of the noise apart"
        assert quantiles(0.975) == pytest.approx(1.959964, rel=1e-6)
    assert of.tried == [(3, 0, 0), (3, 1, 0), (3, 0, 1), (3, 1, 1)]
    pairs = [(n, 4, f"Sent.z: worst pair of client {k}") for n, k in enumerate((1, 4, 3, 5))]
    assert of.said == [*pairs, (0, 2, "Sent.z: releases of client 3")]
    of.said.clear()
    of.audit([3], 101)
    assert of.said[1:] == [(j, 101, "Sent.z: releases of client 3") for j in (0, 50, 100)]


def test_rounded_releases_and_kinds_without_a_ledger(monkeypatch):
    """Numbers of 256 levels are not normal. Who has no row for a kind has an infinite epsilon, seen by the server."""
    (one,) = OfField(monkeypatch, dtype="uint8").audit([3])
    assert one[1] == "release path"
    place = OfField(monkeypatch).audit([3], kind="logits")[0][0]
    assert (place.kind, place.ledger, place.threat) == ("logits", math.inf, "whoever sees the release: server")
    of = OfField(monkeypatch)
    of.made[3].release.how = mechanism_named("laplace")
    assert [row[1] for row in of.audit([3])] == ["release path"]


def test_a_field_without_any_pair_says_the_first_reason(monkeypatch):
    of = OfField(monkeypatch)
    of.made = {1: "first", 3: "second"}
    monkeypatch.setattr(release_path, "_not_tried", lambda run, *how: how)
    assert of.audit([1, 3]) == [("embeddings", "Sent.z", "first", 0.9)]
    assert of.audit([3]) == [("embeddings", "Sent.z", "second", 0.9)]


@pytest.mark.parametrize(("kind", "claimed", "spent"), [("embeddings", 4.0, 2.5), ("training", 3.5, 3.5)])
def test_what_was_not_tried_says_why(kind, claimed, spent):
    """Clients of 50 and 20 records: delta = 1/n is the largest for the smaller one."""
    policies = {"embeddings": Policy(epsilon=4.0), "training": Policy(noise_multiplier=1.0)}
    opened = run_of(ledger_of(0, 50, embeddings=2.5, training=1.5), ledger_of(1, 20, training=3.5), **policies)
    assert release_path._not_tried(opened, kind, "A.e", "why", 0.9) == EpsilonAudit(
        test="release path", kind=kind, threat="nobody",
        claim="training, all rounds" if kind == "training" else "A.e, one release", claim_epsilon=claimed,
        ledger_epsilon=spent, lower_bound=0.0, p_value=1.0, trials=0, confidence=0.9, delta=1 / 20,
        verdict="not tried", method="none", how="why",
    )  # fmt: skip
    nobody = release_path._not_tried(run_of(**policies), kind, "A.e", "why", 0.9)
    assert (nobody.ledger_epsilon, nobody.delta) == (0.0, 0.0)


def test_each_clients_last_release_of_each_field(monkeypatch):
    """Client 2 releases in rounds 1 and 3, client 0 in round 1 alone; both have two fields of the kind, and others."""
    entries = []
    for t, k in ((1, 2), (1, 0), (3, 2)):
        fields = {
            name: SimpleNamespace(kind=kind) for name, kind in (("f", "embeddings"), ("e", "embeddings"), ("v", "x"))
        }
        facts = {"client": k, "round": t, "ask": 1, "message": "A", "class_id": "m:A"}
        entries += [
            SimpleNamespace(direction="down", fields={"g": SimpleNamespace(kind="embeddings")}, **facts),
            SimpleNamespace(direction="up", fields=fields, **facts),
        ]
    declared = {"e": "declared e", "f": "declared f"}
    message = SimpleNamespace(__name__="A", declared=lambda: declared)
    monkeypatch.setattr(release_path, "class_named", lambda name: {"m:A": message}[name])
    opened = SimpleNamespace(
        transcript=SimpleNamespace(entries=lambda: iter(entries)),
        world=SimpleNamespace(policies={"embeddings": "policy"}),
    )

    def of(clients):
        return [
            (r.sent.client, r.sent.round, r.name, r.declared, entries.index(r.sent) - entries.index(r.down), r.policy)
            for r in released_fields(opened, "embeddings", clients)
        ]

    mine, others = ([(k, t, n, f"declared {n}", 1, "policy") for n in "ef"] for k, t in ((0, 1), (2, 3)))
    assert of(None) == mine + others
    assert of([2]) == others
    assert of([]) == []
    found = next(released_fields(opened, "embeddings", None))
    assert found.where == "A.e"
    assert found.message is message


class OfWorst:
    """A release whose dependence and relation a test says, and the pairs that are found for it."""

    def __init__(self, monkeypatch, depends, relation="replace-one", natural=None, ends=None, via="data"):
        self.asked = []
        state = SimpleNamespace(client_state=lambda k: f"state {k}", world="world")
        policy = Policy(epsilon=1.0, relation=relation)
        self.release = release_of(policy=policy, via=via)
        monkeypatch.setattr(release_path, "dependence", lambda declared: depends)

        def made(name, value):
            def make(*how):
                self.asked.append((name, how))
                if isinstance(value, Exception):
                    raise value
                return value

            return make

        monkeypatch.setattr(release_path, "_opposite_ends", made("opposite", "opposite ends"))
        monkeypatch.setattr(release_path, "_swap", made("swap", natural))
        monkeypatch.setattr(release_path, "_clipped_ends", made("ends", ends))
        self.found = worst_pair(state, self.release)


@pytest.mark.parametrize("depends", ["all", "range"])
def test_what_depends_on_all_records_is_tried_at_its_ends(monkeypatch, depends):
    of = OfWorst(monkeypatch, depends)
    assert of.found == "opposite ends"
    assert of.asked == [("opposite", ("world", of.release, "state 3", depends))]


def test_of_records_and_ends_those_that_are_farther_apart_count(monkeypatch):
    near, far = pair_at(1.0), pair_at(2.0)
    for natural, ends, worst in (
        (near, far, far), (far, near, far), (near, None, near), ("no record", far, far), ("none", None, "none"),
    ):  # fmt: skip
        of = OfWorst(monkeypatch, "class", natural=natural, ends=ends)
        assert of.found is worst
    assert of.asked == [(name, ("world", of.release, "state 3", "class")) for name in ("swap", "ends")]


def test_what_has_no_pair_says_why(monkeypatch):
    later = OfWorst(monkeypatch, "record", natural=pair_at(1.0), via="released")
    assert later.found == "Sent.z follows from what was released before, which is tried itself"
    absent = OfWorst(monkeypatch, "class", "zero-out", natural=pair_at(1.0))
    assert absent.found == "Sent.z: no record stands for the absence of one where a release depends by class"
    assert isinstance(OfWorst(monkeypatch, "record", "zero-out", natural=pair_at(1.0)).found, Pair)
    broken = OfWorst(monkeypatch, "record", natural=ValueError("no training"))
    assert broken.found == "Sent.z could not be rehearsed without training: ValueError: no training"


def test_one_vector_is_a_row_of_its_own():
    """C = 3 along four equal numbers: 1.5 each, also where there is one dimension alone, or one row."""
    template = {"vector": torch.zeros(4), "row": torch.zeros(1, 4)}
    release = release_of()
    release.sent.__getitem__.side_effect = {"z": template}.__getitem__
    world = mock.MagicMock()
    world.members = lambda k: f"members {k}"
    with mock.patch.object(release_path, "Rehearsal") as rehearsal, mock.patch.object(release_path, "_pair") as pair:
        release_path._opposite_ends(world, release, b"state", "all")
    rehearsal.of.assert_called_once_with(world, 3, 2, 1, b"state", "members 3")
    given, one, other, words = pair.call_args.args
    assert given is release
    assert one.client is other.client is rehearsal.of.return_value
    for side, value in ((one, 1.5), (other, -1.5)):
        assert (side.value["vector"].tolist(), side.value["row"].tolist()) == ([value] * 4, [[value] * 4])
    assert words == "values at opposite ends of the clipping ball (nothing shows that a record reaches them)"


def test_class_means_are_moved_by_what_one_record_may_do():
    """Three class means of 5, 1 and 3 records, of four numbers each. The two largest move by C / (N - 1) = 3/4 and
    3/2, in each number half of that. The means at the ends are known to the mechanism by C and their records."""
    leaves = [torch.full((4,), float(i)) for i in range(3)]
    means = {digest_of(leaf): (9.0, n) for leaf, n in zip(leaves, (5, 1, 3), strict=True)}
    side = release_path.Side(SimpleNamespace(means=means), dict(enumerate(leaves)))
    with (
        mock.patch.object(release_path, "_rehearse", return_value=side) as rehearse,
        mock.patch.object(release_path, "_pair") as pair,
    ):
        world = SimpleNamespace(members=lambda k: f"members {k}")
        release = release_of()
        release_path._clipped_ends(world, release, b"state", "class")
    rehearse.assert_called_once_with(world, release, b"state", "members 3")
    _, one, other, words = pair.call_args.args
    steps = (3 / 4 / 2, 0.0, 3 / 2 / 2)
    for end, sign in ((one, 1), (other, -1)):
        assert end.client is side.client
        for i, step in enumerate(steps):
            assert end.value[i].tolist() == pytest.approx([i + sign * step] * 4)
            assert means[digest_of(end.value[i])] == (3.0, (5, 1, 3)[i])
    assert words == "2 class means, each moved by what one record may do to it (nothing shows that a record reaches it)"


def test_one_class_of_one_record_is_divided_by_one():
    leaf = torch.zeros(4)
    side = release_path.Side(SimpleNamespace(means={digest_of(leaf): (9.0, 1)}), {0: leaf})
    with (
        mock.patch.object(release_path, "_rehearse", return_value=side),
        mock.patch.object(release_path, "_pair") as pair,
    ):
        release_path._clipped_ends(mock.MagicMock(), release_of(), b"", "class")
    assert pair.call_args.args[1].value[0].tolist() == [1.5] * 4


def test_without_a_clipping_norm_nothing_is_known_of_its_ends():
    world = mock.MagicMock()
    unclipped = release_of(policy=Policy(epsilon=1.0, sensitivity="random-pixel"))
    assert release_path._clipped_ends(world, unclipped, b"", "record") is None
    assert release_path._clipped_ends(world, release_of(), b"", "histogram") is None


def prepared(leaves, sigmas, sensitivities=(1.0,)):
    return SimpleNamespace(leaves=leaves, sigmas=list(sigmas), sensitivities=list(sensitivities))


class OfSwap:
    """Four records to try in place 1 of three, of which the release is known: (value, value) by record."""

    def __init__(self, monkeypatch, depends="record", relation="replace-one", values=(0.0, 3.0, -5.0, 1.0), facts=None):
        names, images = ["a", "b", "c", "d"], torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        monkeypatch.setattr(release_path, "_candidates", lambda world, k: (names, images, [7, 7, 7, 8], 1))
        self.rows = []

        def rehearse(world, release, state, rows):
            self.rows.append((rows[0].flatten().tolist(), rows[1].tolist()))
            return release_path.Side("client", rows[0][1, 0].item())

        def noise_free(release, side):
            number = int(side.value)
            if number == 9:  # the record that is there
                return [torch.zeros(1), torch.zeros(2)], [2.0, 4.0], [1.0, 1.0]
            value = values[number - 1]
            shapes = [torch.full((1,), value), torch.full((2,), value)]
            return (shapes[:1] if value == 1.0 else shapes), [2.0, 4.0], (facts or {}).get(number, [1.0, 1.0])

        monkeypatch.setattr(release_path, "_rehearse", rehearse)
        monkeypatch.setattr(release_path, "_noise_free", noise_free)
        monkeypatch.setattr(release_path, "_pair", lambda release, one, other, words: (one.value, other.value, words))
        monkeypatch.setattr(release_path, "_against_zeros", lambda release, found, at: ([f[0] for f in found], at))
        world = SimpleNamespace(members=lambda k: (torch.tensor([[8.0], [9.0], [10.0]]), torch.tensor([5, 6, 7])))
        release = release_of(policy=Policy(epsilon=1.0, relation=relation))
        self.found = _swap(world, release, b"", depends)


def test_the_two_records_that_are_farthest_apart_are_swapped(monkeypatch):
    """Releases of 0, 3 and -5 in each number: b and c are 8 apart. d gives another shape, and is left out."""
    of = OfSwap(monkeypatch)
    assert of.found == (2.0, 3.0, "the record b against c")
    labels = {1.0: 7, 2.0: 7, 3.0: 7, 4.0: 8, 9.0: 6}
    assert of.rows == [([8.0, x, 10.0], [5, labels[x], 7]) for x in (9.0, 1.0, 2.0, 3.0, 4.0)]


def test_means_with_other_counts_are_no_neighbours(monkeypatch):
    """c has another count of its class: of class means it is left out, of rows it is not."""
    counts = {3: [1.0, 2.0]}
    assert OfSwap(monkeypatch, "class", facts=counts).found == (1.0, 2.0, "the record a against b")
    assert OfSwap(monkeypatch, "record", facts=counts).found == (2.0, 3.0, "the record b against c")


def test_records_that_change_nothing_are_no_pair(monkeypatch):
    same = OfSwap(monkeypatch, values=(2.0, 2.0, 2.0, 1.0)).found
    assert same == "no record changes Sent.z unless the model is trained again"
    assert OfSwap(monkeypatch, values=(1.0, 1.0, 1.0, 1.0)).found == same, "there is none at all"


def test_the_absence_of_a_record_is_tried_for_all_that_were_found(monkeypatch):
    assert OfSwap(monkeypatch, relation="zero-out").found == (["a", "b", "c"], 1)


def test_distances_are_in_deviations_of_each_tensors_noise(monkeypatch):
    """One number of deviation 2 and two of deviation 4: value^2 (1/4 + 2/16) is its square."""
    found = {}
    monkeypatch.setattr(
        release_path, "_norm", lambda difference: found.setdefault(len(found), difference.to_dense().tolist()) and 1.0
    )
    OfSwap(monkeypatch)
    assert found == {0: [-1.5, -0.75, -0.75], 1: [2.5, 1.25, 1.25], 2: [4.0, 2.0, 2.0]}
    monkeypatch.undo()
    assert release_path._norm(torch.tensor([3.0, 0.0, -4.0]).to_sparse()) == 5.0


def test_a_row_of_zeros_is_held_against_the_longest_record(monkeypatch):
    """In both tensors of a release the row at place 1 is zeroed."""
    monkeypatch.setattr(
        release_path, "_pair", lambda release, one, other, words: SimpleNamespace(
            distance=float(one.value[0].sum()), one=one, other=other, words=words
        ),
    )  # fmt: skip
    found = [
        (name, release_path.Side(f"client {name}", [torch.full((2, 2), v), torch.full((3, 1), v)]), None)
        for name, v in (("a", 1.0), ("b", 4.0), ("c", 2.0))
    ]
    worst = release_path._against_zeros(release_of(), found, 1)
    assert worst.words == "the record b against a row of zeros"
    assert worst.one is found[1][1]
    assert worst.other.client == "client b"
    assert [t.tolist() for t in worst.other.value] == [[[4.0, 4.0], [0.0, 0.0]], [[4.0], [0.0], [4.0]]]
    assert found[1][1].value[0].tolist() == [[4.0, 4.0]] * 2, "the record's own stays"


def test_the_statistic_of_two_neighbours_by_hand(monkeypatch):
    """Differences 2, 0 at sigma 0.5 and 0, -3 at sigma 4: weights 2 / 0.25 and -3 / 16; distance (4, -3/4)."""
    values = {
        "one": [torch.tensor([[3.0, 1.0]]), torch.tensor([2.0, 2.0])],
        "other": [torch.tensor([[1.0, 1.0]]), torch.tensor([2.0, 5.0])],
    }
    contexts = []
    monkeypatch.setattr(
        release_path, "prepare", lambda value, where, declared, policy, context: contexts.append(
            (where, context)
        ) or prepared(values[value], (0.5, 4.0), (1.0, 8.0)),
    )  # fmt: skip
    sides = [release_path.Side(SimpleNamespace(context=lambda *key, name=name: (name, *key)), name) for name in values]
    release = release_of()
    found = release_path._pair(release, *sides, "words")
    assert (found.release, found.sides, found.words, found.client) == (release, tuple(sides), "words", 3)
    assert found.index.tolist() == [0, 3]
    assert found.weights.tolist() == pytest.approx([8.0, -3 / 16])
    assert found.distance == pytest.approx(math.hypot(4.0, 0.75))
    assert contexts == [("Sent.z", ("one", "noise-free")), ("Sent.z", ("other", "noise-free"))]
    leaves, sigmas, sensitivities = release_path._noise_free(release, sides[1])
    assert [leaf.tolist() for leaf in leaves] == [[[1.0, 1.0]], [2.0, 5.0]]
    assert (sigmas, sensitivities) == ([0.5, 4.0], [1.0, 8.0])


def test_a_claim_and_an_outcome_are_those_of_the_side_that_is_asked(monkeypatch):
    """What arrives is (10, 20, 30) or twice that: entries 0 and 2 count, with weights 1 and 0.5."""
    sides = tuple(release_path.Side(SimpleNamespace(context=lambda *key, n=n: (n, *key)), float(n)) for n in (1, 2))
    release = release_of(policy=Policy(noise_multiplier=2.0))
    release.message = "message"
    pair = Pair(release, sides, torch.tensor([0, 2]), torch.tensor([1.0, 0.5], dtype=torch.float64), 1.0, "")
    asked = []

    def protected(message, name, value, context):
        asked.append((message, name, context))
        return {"a": value * torch.tensor([10.0, 20.0]), "b": value * torch.tensor([[30.0]])}

    monkeypatch.setattr(release_path, "protect_field", protected)
    assert [pair.outcome(side, 7) for side in (0, 1)] == [25.0, 50.0]
    assert asked == [("message", "z", (n, "release path", side, 7)) for side, n in ((0, 1), (1, 2))]
    ready = {1.0: Prepared([], [1.0], 2.0, 0.01, None), 2.0: Prepared([], [1.0], 5.0, 0.05, None)}
    monkeypatch.setattr(release_path, "_prepared", lambda release, side: ready[side.value])
    assert pair.claim() == (pytest.approx(epsilon_of(2.0, 0.01), rel=1e-4), 0.01)


@pytest.mark.parametrize(("raw", "wanted"), [({}, "reply"), ({"Sent.z": "early"}, "early"), ({"Sent.y": 1}, "reply")])
def test_a_rehearsal_gives_what_would_be_released(monkeypatch, raw, wanted):
    """What was protected ahead of the reply, otherwise what the reply has."""
    client, calls = SimpleNamespace(raw=raw), []
    monkeypatch.setattr(release_path.Rehearsal, "of", lambda *how: calls.append(how) or client)
    monkeypatch.setattr(release_path, "encode", lambda value: value)
    monkeypatch.setattr(release_path, "decode", lambda blob, cls, device: blob)
    monkeypatch.setattr(
        release_path,
        "find_function",
        lambda method, fn: lambda c, m: calls.append((method, fn, c, m)) or SimpleNamespace(z="reply"),
    )
    release = release_of()
    release.down.record.return_value = "down"
    world = SimpleNamespace(device=torch.device("cpu"), setting=SimpleNamespace(seed=1), method="method")
    side = release_path._rehearse(world, release, b"state", "rows")
    assert (side.client, side.value) == (client, wanted)
    assert calls == [(world, 3, 2, 1, b"state", "rows"), ("method", "send", client, "down")]


def test_a_rehearsal_trains_and_protects_nothing():
    client = object.__new__(Rehearsal)
    client.raw = {}
    assert (client.fit("loss", epochs=3).epochs, client.fit().steps) == (0, 0)
    assert math.isnan(client.fit().loss)
    assert client.optimise([], None, steps=3) == {}
    assert client.protect(SimpleNamespace(__name__="A"), "e", 5) == 5
    assert client.raw == {"A.e": 5}
    assert client.derive(lambda x, by: x * by, 3, by=4) == 12


def test_the_records_that_are_tried_in_place_of_one(monkeypatch):
    """Labels 2, 1, 1, 0, 1, 0: the largest class is 1, first at place 1, and the next largest is 0."""
    x, y = torch.arange(6.0)[:, None], torch.tensor([2, 1, 1, 0, 1, 0])
    aux = 100 + torch.arange(3.0)[:, None]
    world = SimpleNamespace(
        members=lambda k: (x, y), classes=4, setting=SimpleNamespace(seed=3), shape=Shape((1,)),
        federation=SimpleNamespace(auxiliary=lambda: "aux"), _to_device=lambda rows: {"aux": (aux, "labels")}[rows],
    )  # fmt: skip
    monkeypatch.setattr(release_path, "OWN", 2)
    monkeypatch.setattr(release_path, "AUXILIARY", 2)
    monkeypatch.setattr(release_path, "_extremes", lambda like, shape, rng: {"far": like * 10})
    names, images, labels, at = release_path._candidates(world, 5)
    assert at == 1
    assert names[0] == "of the client (1)"
    assert names[-2:] == ["far", "with another label"]
    own = [int(name[15:-1]) for name in names if name.startswith("of the client")]
    others = [int(name[22:-1]) for name in names if name.startswith("of the auxiliary set")]
    assert len(own) in (2, 3), "its own place, and two more unless that is among them"
    assert len(others) == len(set(others)) == 2
    assert images.flatten().tolist() == [*own, *(100 + i for i in others), 10.0, 1.0]
    assert labels == [1] * (len(names) - 1) + [0]


def test_extreme_records_of_each_kind_by_hand():
    rng = torch.Generator().manual_seed(5)
    random = torch.rand(2, 3, generator=torch.Generator().manual_seed(5))
    like = torch.tensor([[0.5, -0.25, 0.0], [1.0, -1.0, 0.75]])[None]
    made = release_path._extremes(like, Shape((1, 2, 3)), rng)
    plain = {"all black": -1.0, "all white": 1.0, "all grey": 0.0}
    for name, value in plain.items():
        assert made[name].tolist() == [[[value] * 3] * 2]
    assert torch.equal(made["inverted"], -like)
    assert made["chequered"].tolist() == [[[-1.0, 1.0, -1.0], [1.0, -1.0, 1.0]]]
    assert made["random black and white"].tolist() == [[[1.0 if u > 0.5 else -1.0 for u in row] for row in random]]
    assert list(made) == [*plain, "inverted", "chequered", "random black and white"]
    row = torch.tensor([0.5, -4.0, 3.0])
    made = release_path._extremes(row, Shape((3,)), torch.Generator().manual_seed(5))
    random = torch.rand(3, generator=torch.Generator().manual_seed(5)).tolist()
    assert {name: t.tolist() for name, t in made.items()} == {
        "all zero": [0.0] * 3, "negated": [-0.5, 4.0, -3.0], "far out": [5.0, -40.0, 30.0],
        "far out, negated": [-5.0, 40.0, -30.0], "random signs": [4.0 if u > 0.5 else -4.0 for u in random],
    }  # fmt: skip
    tokens = torch.tensor([3, 1, 4, 1, 5])
    made = release_path._extremes(tokens, SimpleNamespace(kind="tokens", tokens=50), torch.Generator().manual_seed(5))
    random = torch.rand(5, generator=torch.Generator().manual_seed(5)).tolist()
    assert {name: t.tolist() for name, t in made.items()} == {
        "all padding": [0] * 5, "all the last token": [49] * 5, "reversed": [5, 1, 4, 1, 3],
        "random tokens": [int(u * 50) for u in random],
    }  # fmt: skip
