"""What membership attacks make of what a view shows: whole runs on made-up views, and the same by other code."""

from __future__ import annotations

import dataclasses
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.stats
import torch
from scenes import Entry, scene
from torch import nn

from fedaudit.attacks.baselines.blind_nearest import BlindNearest
from fedaudit.attacks.baselines.blind_prior import BlindPrior
from fedaudit.attacks.membership import (
    chosen_queries,
    embedding_match,
    entropy,
    gradient_cosine,
    gradient_norm,
    logit_gap,
    modified_entropy,
    prototype_membership,
    rmia,
    shadow,
    update_alignment,
)
from fedaudit.attacks.membership.chosen_queries import ChosenQueries
from fedaudit.attacks.membership.embedding_match import EmbeddingMatch
from fedaudit.attacks.membership.gradient_cosine import GradientCosine
from fedaudit.attacks.membership.gradient_norm import GradientNorm
from fedaudit.attacks.membership.lira import gaussians, log_density
from fedaudit.attacks.membership.logit_gap import LogitGap
from fedaudit.attacks.membership.nearest_synthetic import NearestSynthetic
from fedaudit.attacks.membership.prototype_membership import PrototypeMembership
from fedaudit.attacks.membership.shadow import ShadowModels
from fedaudit.attacks.membership.update_alignment import UpdateAlignment
from fedaudit.attacks.shared import _means, _models
from fedaudit.attacks.shared._means import MeansAttack, ShadowMeans
from fedaudit.attacks.shared._models import ModelAttack, ShadowAttack, Shadows, draw
from fedaudit.errors import ThreatError
from fedaudit.wire.release import Protection


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- updates of several clients ---------------------------------------------------------------------------------------


def test_cosines_by_one_gradient_after_another(monkeypatch):
    """Five candidates, three at a time at most, and two updates of 15 entries."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    x, y, updates = drawn(5, 1, 2, 2), torch.tensor([0, 2, 1, 1, 0]), drawn(2, 15, seed=1)
    sizes, real = [], update_alignment.vmap

    def counted(function, in_dims):
        mapped = real(function, in_dims=in_dims)
        return lambda params, part, labels: sizes.append(len(part)) or mapped(params, part, labels)

    monkeypatch.setattr(update_alignment, "vmap", counted)
    monkeypatch.setattr(update_alignment, "ENTRIES", 3 * 15 + 14)
    wanted = np.zeros((2, 5))
    for i in range(5):
        loss = -model(x[i : i + 1]).log_softmax(1)[0, y[i]]
        g = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))]).numpy()
        for k in range(2):
            u = updates[k].numpy()
            wanted[k, i] = g @ u / math.sqrt((g @ g) * (u @ u))
    assert update_alignment.cosines(model, x, y, updates).detach().numpy() == pytest.approx(wanted, rel=1e-9)
    assert sizes == [3, 2]
    monkeypatch.setattr(update_alignment, "ENTRIES", 1)
    update_alignment.cosines(model, x, y, updates)
    assert sizes[2:] == [1] * 5


@pytest.mark.parametrize("null", ["shrunken", "own"])
@pytest.mark.parametrize(
    ("measure", "together", "last"),
    [
        # Rounds 3 and 7; round 5 shows too little. Losses are 10 t, cosines t, and none in round 7.
        ("loss", 50.0, 70.0),
        ("cosine", 3.0, None),
        ("both", (30 + 3 + 70) / 3, 70.0),
    ],
)
def test_measurements_are_averaged_over_rounds(measure, together, last, null, monkeypatch):
    monkeypatch.setattr(update_alignment, "above_null", lambda measured: measured[0] + measured[1] * 0)
    monkeypatch.setattr(update_alignment, "one_tailed", lambda measured: measured[0] + 1000)
    monkeypatch.setattr(update_alignment, "in_chunks", lambda model, x: model)
    monkeypatch.setattr(update_alignment, "confidence", lambda z, y: z)
    monkeypatch.setattr(UpdateAlignment, "_rounds", lambda self, scene: [3, 5, 7])
    shown = {t: {k: ("entry", torch.tensor([10.0 * t + k])) for k in (0, 4, 2)} for t in (3, 7)}
    monkeypatch.setattr(UpdateAlignment, "_shown", lambda self, scene, t: shown.get(t, {}))
    cosines = {3: torch.tensor([[3.0], [9.0]]), 7: None}
    by_models = {id(of): t for t, of in shown.items()}
    monkeypatch.setattr(UpdateAlignment, "_cosines", lambda self, scene, of: cosines[by_models[id(of)]])
    found = UpdateAlignment(measure=measure, null=null).run(SimpleNamespace(x=None, y=None))
    more = 1000 if null == "own" else 0
    assert found.scores.tolist() == pytest.approx([together + more])
    assert (found.last is None) if last is None else found.last.tolist() == [last + more]


def test_rounds_and_models_that_can_be_compared(monkeypatch):
    """Client 3 has another network, 4 did not answer in round 2, 5's model is not whole."""
    uploads = {k: {9: ("e", "w"), 2: (f"entry {k}", "w"), 4: ("e", "w")} for k in (1, 2, 3, 5, 6)} | {4: {}}
    monkeypatch.setattr(update_alignment, "uploads", lambda scene, k: uploads[k])
    monkeypatch.setattr(update_alignment, "others", lambda scene: [2, 3, 4, 5, 6])
    monkeypatch.setattr(
        update_alignment, "trained", lambda scene, entry, w: None if entry == "entry 5" else f"model of {entry}"
    )
    here = SimpleNamespace(target=1, arch=lambda k: "cnn" if k == 3 else "mlp")
    assert UpdateAlignment()._rounds(here) == [2, 4, 9]
    assert UpdateAlignment(rounds=2)._rounds(here) == [4, 9]
    assert UpdateAlignment()._shown(here, 2) == {
        k: (f"entry {k}", f"model of entry {k}") for k in (1, 2, 6)
    }  # fmt: skip
    uploads[6].pop(2)
    assert UpdateAlignment()._shown(here, 2) == {}, "one other is no null distribution"
    uploads[6][2] = ("entry 6", "w")
    uploads[1].pop(2)
    uploads[4][2] = ("entry 4", "w")
    assert UpdateAlignment()._shown(here, 2) == {}, "the target's is missing"


# --- gaps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["means", "clients", "auxiliary"])
def test_a_gap_is_the_targets_less_the_other_sides(pair, monkeypatch):
    calls = []
    monkeypatch.setattr(logit_gap, "class_means", lambda scene: [(1.0,), (4.0,)] if pair == "means" else [])
    monkeypatch.setattr(logit_gap, "tracing", lambda scene, value: torch.tensor([value, 2 * value]))
    answers = {2: (torch.zeros(2, 1), "answer 2"), 5: (torch.ones(3, 1), "answer 5")}
    monkeypatch.setattr(logit_gap, "shared", lambda scene, k, rounds: answers if (k, rounds) == (0, 3) else {})
    monkeypatch.setattr(LogitGap, "_consensus", lambda self, scene, of: ["consensus"] if pair == "clients" else [])

    def distilled(scene, arch, pairs, steps):
        calls.append((arch, pairs, steps))
        return torch.tensor([10.0, 30.0]) if pairs == list(answers.values()) else torch.tensor([1.0, 2.0])

    def imitated(scene, arch, teacher, images, steps):
        calls.append((arch, teacher, images.flatten().tolist(), steps))
        return torch.tensor([5.0, 7.0])

    monkeypatch.setattr(logit_gap, "distilled", distilled)
    monkeypatch.setattr(logit_gap, "imitated", imitated)
    monkeypatch.setattr(logit_gap, "taught", lambda scene, arch, x, y, steps: (arch, len(x), len(y), steps))
    monkeypatch.setattr(logit_gap, "in_chunks", lambda model, x: model)
    monkeypatch.setattr(logit_gap, "confidence", lambda z, y: z)
    here = scene(auxiliary=(torch.zeros(6, 1), torch.zeros(6)))
    found = LogitGap(rounds=3, steps=9).run(here).scores.tolist()
    own = ("net 0", list(answers.values()), 9)
    if pair == "means":
        assert (found, calls) == ([5.0, 10.0], [])
    elif pair == "clients":
        assert (found, calls) == ([9.0, 28.0], [own, ("net 0", ["consensus"], 9)])
    else:
        images = [0.0, 0.0, 1.0, 1.0, 1.0]
        assert (found, calls) == ([5.0, 23.0], [own, ("net 0", ("net 0", 6, 6, 9), images, 9)])


@pytest.mark.parametrize("clip", [None, 1.5])
def test_tracing_by_numpy(clip, monkeypatch):
    """Prototypes of two entries. Class 2 has one auxiliary record, class 3 none, and class 1 no mean."""
    asked = []

    def told(d, a, Sigma, extra, sigma):
        asked.append((d.numpy(), a.numpy(), Sigma.numpy(), extra, sigma))
        return d.sum(1)

    monkeypatch.setattr(logit_gap, "log_ratio", told)
    y = torch.tensor([0, 1, 0, 0, 1, 2])
    x, candidates = drawn(6, 2), drawn(7, 2, seed=4)
    of = torch.tensor([2, 0, 3, 1, 0, 0, 2])
    here = SimpleNamespace(auxiliary=(x, y), x=candidates, y=of, classes=4)
    model = SimpleNamespace(encode=lambda x: 2.0 * x)
    means = {0: torch.tensor([3.0, 1.0]), 2: torch.tensor([1.0, 1.0]), 3: torch.tensor([2.0, 2.0])}
    protection = Protection(mechanism="gaussian", sigma=0.25, clip=clip)
    ratio = logit_gap.tracing(here, model, means, "prototypes", protection)

    def clipped(rows):
        rows = 2.0 * rows.numpy()
        return rows if clip is None else np.array([row * min(1.0, clip / np.linalg.norm(row)) for row in rows])

    known, z = clipped(x), clipped(candidates)
    centre = [known[y == c].mean(0) for c in range(3)]
    spread = sum(np.outer(row - centre[c], row - centre[c]) for row, c in zip(known, y.tolist(), strict=True)) / (6 - 3)
    spread = spread + 1e-3 * np.trace(spread) / 2 * np.eye(2)
    ((d, a, Sigma, extra, sigma),) = asked
    assert d == pytest.approx(z[of == 0] - centre[0])
    assert a == pytest.approx(np.array([3.0, 1.0]) - centre[0])
    assert Sigma == pytest.approx(spread)
    assert (extra, sigma) == (pytest.approx(1 / 3), 0.25)
    wanted = np.zeros(7)
    wanted[of == 0] = (z[of == 0] - centre[0]).sum(1)
    assert ratio.numpy() == pytest.approx(wanted)


# --- chosen queries ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Question:
    n: int
    images: torch.Tensor


class Asking(Entry):
    def record(self):
        return Question(7, self["images"])


def test_candidates_are_sent_in_the_batches_that_the_protocol_has(monkeypatch):
    """Seven candidates in batches of three: the last is filled up with its first, whose answers are not read."""
    asked = []
    entry = Asking("down", 0, 4, 1, role="public", images=(None, torch.zeros(3, 1, 2, 2)))
    x = torch.arange(7.0)[:, None, None, None].expand(7, 1, 2, 2)

    def ask(whom, message, name, number):
        asked.append((whom is entry, message.n, message.images[:, 0, 0, 0].tolist(), name, number))
        return message.images[:, 0, 0, :1] * torch.tensor([1.0, 10.0, 100.0])

    monkeypatch.setattr(chosen_queries, "_question", lambda scene: (entry, "images", 3))
    monkeypatch.setattr(chosen_queries, "_outputs", lambda scene, reply, rows: reply[:rows])
    monkeypatch.setattr(chosen_queries, "confidence", lambda z, y: z.gather(1, y[:, None])[:, 0])
    here = scene(x=x, y=torch.tensor([0, 1, 2, 0, 1, 2, 1]), ask=ask)
    assert ChosenQueries().run(here).scores.tolist() == [0.0, 10.0, 200.0, 3.0, 40.0, 500.0, 60.0]
    assert asked == [
        (True, 7, [0.0, 1.0, 2.0], "queries", 0), (True, 7, [3.0, 4.0, 5.0], "queries", 1),
        (True, 7, [6.0, 6.0, 6.0], "queries", 2),
    ]  # fmt: skip


def test_the_question_is_the_last_that_brought_images_and_was_answered_by_outputs():
    """Ask 1 of round 2 is answered by logits, ask 0 by soft labels, that of round 3 by weights, round 1 by logits."""
    images, flat, other = torch.zeros(5, 1, 2, 2), torch.zeros(5, 4), torch.zeros(5, 1, 3, 2)
    answers = [
        Entry("up", 0, 1, 0, z=("logits", None)), Entry("up", 0, 2, 0, p=("soft_labels", None)),
        Entry("up", 0, 2, 1, z=("logits", None)), Entry("up", 0, 3, 0, w=("weights", None)),
        Entry("up", 1, 3, 0, z=("logits", None)),
    ]  # fmt: skip

    def sent(t, ask, dropped=False, **values):
        return Entry("down", 0, t, ask, role="public", dropped=dropped, **{k: (None, v) for k, v in values.items()})

    first, second, third = sent(1, 0, x=images[:2]), sent(2, 0, n=3, w=flat, x=images), sent(2, 1, x=other)
    late = sent(3, 0, x=images)
    here = scene(first, second, third, late, *answers)
    assert chosen_queries._question(here) == (second, "x", 5)
    gone = sent(2, 0, dropped=True, x=images)
    assert chosen_queries._question(scene(first, gone, third, late, *answers)) == (first, "x", 2)
    assert chosen_queries._question(scene(late, third, *answers)) is None


def test_what_chosen_queries_and_matched_rows_need(monkeypatch):
    """What every attack of their kind needs comes first."""
    passive, active = scene(target=2), scene(target=2)
    active.view.threat.name = "active-server"
    assert ChosenQueries().cannot(passive).startswith("not attacked by this: it takes a server that sends")
    for question, words in ((None, "no message asks client 2 for outputs on images that it brings"), ("one", None)):
        monkeypatch.setattr(chosen_queries, "_question", lambda scene, question=question: question)
        why = ChosenQueries().cannot(active)
        assert why is None if words is None else why.endswith(words)
    rows = scene(Entry("up", 2, 1, e=("embeddings", None)), target=2)
    for encoders, words in (([], "sees no encoder of client 2 of a round with embeddings"), (["one"], None)):
        monkeypatch.setattr(EmbeddingMatch, "_encoders", lambda self, scene, encoders=encoders: encoders)
        why = EmbeddingMatch().cannot(rows)
        assert why is None if words is None else why.endswith(words)
        assert EmbeddingMatch().cannot(passive).endswith("sees no embeddings of client 2")


def test_gradients_are_of_whole_models_and_of_models_that_moved(monkeypatch):
    parts = scene(Entry("up", 0, 1, w=("weights", None)))
    for whole, words in (((), "uploads parts of its model, which have no gradient by themselves"), (("one",), None)):
        monkeypatch.setattr(gradient_norm, "whole_uploads", lambda scene, whole=whole: iter(whole))
        why = GradientNorm().cannot(parts)
        assert why is None if words is None else why.endswith(words)
        assert GradientNorm().cannot(scene()).endswith("sees no weights of client 0")
    for moves, words in (([], "of client 0 got and the one that it sent back"), (["one"], None)):
        monkeypatch.setattr(GradientCosine, "_moves", lambda self, scene, moves=moves: moves)
        why = GradientCosine().cannot(scene())
        assert why is None if words is None else why.endswith("client 0 got and the one that it sent back")


def test_scores_of_gradients_are_over_rounds_oldest_first(monkeypatch):
    """Small gradients speak for a member: minus the logarithm of the norm, of which a 0 has one too."""
    norms = {"new": torch.tensor([1.0, 2.0]), "old": torch.tensor([4.0, 0.0])}
    monkeypatch.setattr(gradient_norm, "whole_uploads", lambda scene: iter([(0, 0, "new"), (0, 0, "old")]))
    monkeypatch.setattr(gradient_norm, "gradient_norms", lambda model, x, y: norms[model])
    found = GradientNorm().run(scene())
    assert found.last.tolist() == pytest.approx([0, -math.log(2)])
    assert found.scores.tolist() == pytest.approx([-math.log(4) / 2, (-math.log(2) - math.log(1e-30)) / 2])


def test_what_training_took_away_from_the_model_that_was_sent(monkeypatch):
    """Rounds 1 and 3 moved; in round 2 nothing did; round 4 has no start, round 5 no end, round 6 another size."""
    start = {t: torch.tensor([1.0 * t, 2.0]) for t in (1, 2, 3, 5, 6)}
    end = {1: torch.tensor([0.5, 2.0]), 2: start[2], 3: torch.tensor([3.0, 1.0]), 4: start[1], 6: torch.zeros(3)}
    monkeypatch.setattr(gradient_cosine, "uploads", lambda scene, k: {t: (t, "w") for t in (3, 1, 2, 4, 5, 6)})
    monkeypatch.setattr(gradient_cosine, "received", lambda scene, entry: start.get(entry))
    monkeypatch.setattr(gradient_cosine, "trained", lambda scene, entry, name: end.get(entry))
    monkeypatch.setattr(gradient_cosine, "flat", lambda model: model)
    found = GradientCosine()._moves(scene())
    assert [(begun.tolist(), change.tolist()) for begun, change in found] == [([1, 2], [0.5, 0]), ([3, 2], [0, 1])]
    monkeypatch.setattr(gradient_cosine, "cosines", lambda model, x, y, change: change * 10 + model[0])
    assert GradientCosine().run(scene()).last.tolist() == [3, 13]


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_rows_are_matched_by_distance_or_under_noise_by_likelihood(sigma, monkeypatch):
    release = SimpleNamespace(sigma=sigma)
    monkeypatch.setattr(EmbeddingMatch, "_encoders", lambda self, scene: [(1, "e"), (2, "e")])
    monkeypatch.setattr(EmbeddingMatch, "_release", lambda self, scene, t, name: release if t == 2 else SimpleNamespace(
        sigma=9.0))  # fmt: skip
    monkeypatch.setattr(EmbeddingMatch, "_matching", lambda self, y, last: "match" if last is release else None)
    monkeypatch.setattr(
        EmbeddingMatch, "_distance", lambda self, releases, match: torch.tensor([4.0, float(len(releases))])
    )
    monkeypatch.setattr(embedding_match, "log_ratio", lambda releases, match: torch.tensor([7.0, float(len(releases))]))
    found = EmbeddingMatch().run(scene()).scores.tolist()
    assert found == ([7, 2] if sigma else [-2, pytest.approx(-math.sqrt(2))])


def test_which_classifier_learns_from_the_shadows(monkeypatch):
    """Its library is slow to import, and stands aside."""
    made = {
        "sklearn": {},
        "sklearn.ensemble": {"RandomForestClassifier": lambda **how: how},
        "sklearn.linear_model": {"LogisticRegression": lambda **how: ("logistic", how)},
        "sklearn.pipeline": {"make_pipeline": lambda *steps: steps},
        "sklearn.preprocessing": {"StandardScaler": lambda: "scaler"},
    }
    for name, parts in made.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**parts))
    forest = {"n_estimators": 100, "min_samples_leaf": 5, "random_state": 7, "n_jobs": 1}
    assert ShadowModels()._made(7) == forest
    assert ShadowModels(classifier="logistic")._made(7) == ("scaler", ("logistic", {"max_iter": 1000}))


@pytest.mark.parametrize(("gamma", "a", "grid"), [
    (None, None, ((1.0, 1.5, 2.0, 4.0), (0.0, 0.3, 0.6, 1.0))), (3.0, None, ((3.0,), (0.0, 0.3, 0.6, 1.0))),
    (None, 0.2, ((1.0, 1.5, 2.0, 4.0), (0.2,))), (3.0, 0.2, None),
])  # fmt: skip
def test_constants_of_rmia_are_tuned_unless_both_are_given(gamma, a, grid, monkeypatch):
    """On the answers to auxiliary records: the probability of the true class."""
    z, y = drawn(2, 5, 3), torch.tensor([0, 1, 2, 2, 1])
    member = torch.tensor([[0, 0, 1, 0, 1], [0, 0, 0, 1, 1]]).bool()
    asked = []
    monkeypatch.setattr(rmia, "tuned", lambda *of: asked.append(of) or (8.0, 9.0))
    found = rmia.RMIA(gamma=gamma, a=a)._constants(Shadows(z, member, y, 2, ()))
    if grid is None:
        assert (found, asked) == ((3.0, 0.2), [])
        return
    assert found == (8.0, 9.0)
    ((p, inside, *tried),) = asked
    assert tuple(tried) == grid
    exp = np.exp(z.numpy())
    np.testing.assert_allclose(p.numpy(), (exp / exp.sum(2, keepdims=True))[:, [2, 3, 4], [2, 2, 1]])
    assert torch.equal(inside, member[:, 2:])


def test_of_one_round_rmia_tells_no_last(monkeypatch):
    """The score of a candidate is over the auxiliary records that a shadow left out: the last was left out by none."""
    z, y = drawn(2, 5, 3), torch.tensor([0, 1, 2, 2, 1])
    member = torch.tensor([[0, 0, 1, 0, 1], [0, 0, 0, 1, 1]]).bool()
    target = drawn(5, 3, seed=3)
    shadows = Shadows(z, member, y, 2, ("note",))
    monkeypatch.setattr(rmia.RMIA, "attacked_rounds", lambda self, scene, online: [(target, shadows)])
    found = rmia.RMIA(gamma=1.5, a=0.25).run(scene())
    assert (found.last, found.notes) == (None, ("note",))

    def true_p(logits):
        exp = np.exp(logits.numpy())
        return exp[np.arange(5), y.numpy()] / exp.sum(1)

    of = np.stack([true_p(row) for row in z])
    out = np.array([of[:, i][~member[:, i].numpy()].mean() for i in range(4)])
    ratio = true_p(target)[:4] / ((1.25 * out + 0.75) / 2)
    share = [np.mean([r >= 1.5 * w for w in ratio[2:]]) for r in ratio[:2]]
    wanted = [s + r / (1 + r) / 4 for s, r in zip(share, ratio[:2], strict=True)]
    assert found.scores.tolist() == pytest.approx(wanted)


def test_two_shadows_of_one_candidate_have_a_variance():
    """(1 - 2)^2 + (3 - 2)^2 over 2 - 1; the third shadow is not chosen."""
    phi, chosen = torch.tensor([[1.0], [3.0], [50.0]]).double(), torch.tensor([[True], [True], [False]])
    for each in (True, False):
        mean, variance = gaussians(phi, chosen, each)
        assert (mean.item(), variance.item()) == (2, 2)


@pytest.mark.parametrize("alike", [True, False])
def test_updates_from_one_broadcast_have_one_gradient(alike, monkeypatch):
    """Clients that began apart have one each. A client whose start was not seen is left out."""
    starts = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([1.0, 2.0]), 3: torch.tensor([1.0, 2.0 if alike else 3.0])}
    ends = {k: torch.tensor([0.5 * k, 1.0]) for k in (0, 1, 2, 3)}
    asked = []

    def cosines(model, x, y, changes):
        asked.append((model.tolist(), changes.tolist()))
        return changes[:, :1] * 10

    monkeypatch.setattr(update_alignment, "received", lambda scene, entry: starts.get(entry))
    monkeypatch.setattr(update_alignment, "flat", lambda model: model)
    monkeypatch.setattr(update_alignment, "cosines", cosines)
    monkeypatch.setattr(update_alignment, "FEWEST", 2)
    shown = {k: (k, end) for k, end in ends.items()}
    found = UpdateAlignment()._cosines(scene(), shown)
    assert found.tolist() == [[10], [5], [-5]]
    changes = [(starts[k] - ends[k]).tolist() for k in (0, 1, 3)]
    if alike:
        assert asked == [([1, 2], changes)]
    else:
        assert asked == [(starts[k].tolist(), [change]) for k, change in zip((0, 1, 3), changes, strict=True)]
    shown.pop(3)
    assert UpdateAlignment()._cosines(scene(), shown) is None, "two are too few"
    assert UpdateAlignment()._cosines(scene(target=2), {k: (k, end) for k, end in ends.items()}) is None


def test_the_attacked_model_is_the_last_that_was_uploaded_or_the_published(monkeypatch):
    seen = scene(published=lambda: "published")
    monkeypatch.setattr(_models, "whole_uploads", lambda scene: iter([("entry", "w", "last"), ("entry", "w", "first")]))
    assert _models.target_model(seen) == "last"
    monkeypatch.setattr(_models, "whole_uploads", lambda scene: iter(()))
    assert _models.target_model(seen) == "published"


def test_blind_baselines_see_nothing_but_the_candidates():
    """Near to an auxiliary record speaks for a member; and the labels are groups."""
    x, held = torch.tensor([[0.0], [4.0]]), (torch.tensor([[1.0], [9.0]]), torch.tensor([0, 1]))
    seen = scene(x=x, y=torch.tensor([2, 1]), auxiliary=held)
    assert BlindNearest().run(seen).scores.tolist() == [-1, -3]
    assert BlindNearest().cannot(seen) is None
    assert BlindNearest().cannot(scene()) == "there is no auxiliary set: set aux above 0"
    assert BlindPrior().run(seen).groups.tolist() == [2, 1]


def reply_of(**fields):
    """Fields by name: kind and value. None: nothing is declared of it."""
    declared = {name: None if kind is None else SimpleNamespace(kind=kind) for name, (kind, _) in fields.items()}
    return SimpleNamespace(declared=lambda: declared, **{name: value for name, (_, value) in fields.items()})


def test_answers_are_logits_or_logarithms_of_soft_labels():
    here = scene()
    z = torch.arange(12.0).reshape(2, 2, 3)
    embeddings, wide, few = torch.zeros(4, 3), torch.zeros(4, 5), torch.zeros(1, 1, 3)
    others = {"n": (None, torch.zeros(4, 3)), "e": ("embeddings", embeddings), "w": ("logits", wide)}
    found = chosen_queries._outputs(here, reply_of(**others, z=("logits", z)), 3)
    assert found.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    assert found.dtype == torch.float64
    p = torch.tensor([[0.5, 0.5, 0.0]])
    soft = chosen_queries._outputs(here, reply_of(few=("logits", torch.zeros(0, 3)), p=("soft_labels", p)), 1)
    assert soft[0].tolist() == pytest.approx([math.log(0.5), math.log(0.5), math.log(1e-7)])
    for rows, given in ((4, {"few": ("logits", few)}), (4, others), (1, {"t": ("logits", "words")})):
        with pytest.raises(ThreatError, match="does not answer with outputs"):
            chosen_queries._outputs(here, reply_of(**given), rows)
    exact = chosen_queries._outputs(here, reply_of(few=("logits", few)), 3)
    assert len(exact) == 1, "as many numbers as rows were asked for"


# --- means, shadows, models -------------------------------------------------------------------------------------------


def test_each_class_is_held_against_the_shadows_that_have_it(monkeypatch):
    """Class 0: three shadows; class 1: one alone; class 2: another width; class 4 has no candidate."""
    calls = []

    def ratio(m, of_shadows, inside):
        calls.append((m.tolist(), of_shadows.tolist(), inside.tolist()))
        return torch.arange(1.0, inside.shape[1] + 1, dtype=torch.float64)

    monkeypatch.setattr(prototype_membership, "ratio", ratio)
    of = [
        {0: torch.tensor([1.0]), 1: torch.tensor([1.0]), 2: torch.tensor([1.0])}, {2: torch.tensor([1.0])},
        {0: torch.tensor([2.0]), 4: torch.tensor([1.0])}, {0: torch.tensor([4.0]), 4: torch.tensor([2.0])},
    ]  # fmt: skip
    member = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 0, 1], [0, 1, 1, 0, 0], [1, 1, 0, 0, 1]]).bool()
    vectors = {c: torch.full((2 if c == 2 else 1,), 9.0) for c in (0, 1, 2, 4)}
    shadows = ShadowMeans(of, member, ("a note",))
    monkeypatch.setattr(
        PrototypeMembership,
        "compared",
        lambda self, scene, online: (SimpleNamespace(of=vectors), shadows) if online else 0,
    )
    here = scene(y=torch.tensor([1, 0, 2, 3, 0]))
    found = PrototypeMembership().run(here)
    assert found.scores.tolist() == [0.0, 1.0, 0.0, 0.0, 2.0]
    assert found.notes == ("a note",)
    assert calls == [([9.0], [[1.0], [2.0], [4.0]], [[False, True], [True, False], [True, True]])]


def test_the_ratio_of_class_means_by_numpy():
    """Five shadows, three entries; candidate 0 is in some, 1 in all of them, 2 in none."""
    m, of = drawn(3), drawn(5, 3, seed=2)
    inside = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0], [0, 1, 0]]).bool()
    rows = of.numpy()
    mu_in, mu_out = rows[[0, 2]].mean(0), rows[[1, 3, 4]].mean(0)
    s2 = rows.var(0, ddof=1)
    s2 = s2 + 0.1 * s2.mean() + 1e-12
    wanted = ((m.numpy() - (mu_in + mu_out) / 2) * (mu_in - mu_out) / s2).sum()
    assert prototype_membership.ratio(m, of, inside).tolist() == pytest.approx([wanted, 0.0, 0.0])


def test_log_densities_are_scipys():
    phi, mean, variance = drawn(4), drawn(4, seed=1), drawn(4, seed=2).square() + 0.1
    wanted = scipy.stats.norm.logpdf(phi.numpy(), mean.numpy(), variance.sqrt().numpy())
    assert log_density(phi, mean, variance).numpy() == pytest.approx(wanted)


@pytest.mark.parametrize("each", [True, False])
def test_gaussians_over_unequal_numbers_of_shadows(each):
    phi = drawn(5, 3).numpy()
    chosen = np.array([[1, 0, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1]], dtype=bool)
    columns = [phi[chosen[:, i], i] for i in range(3)]
    squares = [((column - column.mean()) ** 2).sum() for column in columns]
    own = [s / (len(column) - 1) for s, column in zip(squares, columns, strict=True)]
    wanted = own if each else [sum(squares) / (2 + 1 + 3)] * 3
    mean, variance = gaussians(torch.from_numpy(phi), torch.from_numpy(chosen), each)
    assert mean.numpy() == pytest.approx([column.mean() for column in columns])
    assert variance.numpy() == pytest.approx(wanted)
    one = gaussians(torch.tensor([[2.0]]), torch.tensor([[True]]), each)
    assert (one[0].item(), one[1].item()) == (2.0, pytest.approx(1e-12))


@pytest.mark.parametrize("module", [entropy, modified_entropy])
def test_a_surer_prediction_speaks_for_a_member(module, monkeypatch):
    monkeypatch.setattr(ModelAttack, "by_round", lambda self, scene, score: score("model"))
    monkeypatch.setattr(module, "logits_of", lambda model, x: torch.tensor([[9.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))
    attack = module.Entropy if module is entropy else module.ModifiedEntropy
    found = attack().run(SimpleNamespace(x=None, y=torch.tensor([0, 0, 0])))
    assert found[0] > found[1] > found[2]
    assert (found <= 0).all(), "minus an entropy"


def test_all_models_that_were_seen_are_attacked_and_the_last_stands_beside_them(monkeypatch):
    """Uploads come newest first. Without any the published model is attacked."""
    uploads = [("entry", "field", value) for value in (8.0, 4.0, 3.0)]
    monkeypatch.setattr(_models, "whole_uploads", lambda scene: iter(uploads))
    here = scene(published=lambda: 50.0)

    def of(rounds):
        found = ModelAttack(rounds=rounds).by_round(here, lambda value: torch.tensor([value]))
        return found.scores.tolist(), found.last and found.last.tolist()

    assert of(None) == ([5.0], [8.0])
    assert of(2) == ([6.0], [8.0])
    assert of(1) == ([8.0], None)
    uploads.clear()
    assert of(None) == ([50.0], None)


def test_pairs_of_shadows_share_the_candidates_out():
    """Seven candidates: three in the first of two shadows, four in the second; each is as large as the target, 6."""
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    pool = (None, torch.cat([y, torch.arange(30) % 3]))
    here = scene(
        Entry("up", 0, 1, n=("count", 6)), y=y, pool=pool, rng=lambda name: torch.Generator().manual_seed(len(name))
    )
    picks, member, repeated = draw(here, 4, True)
    assert [int(row[:7].sum()) for row in member] == [3, 4, 3, 4]
    for a, b in ((0, 1), (2, 3)):
        assert (member[a, :7] ^ member[b, :7]).all(), "each candidate is in one of the two"
    assert (member[0] ^ member[2])[:7].any(), "the next two share them out anew"
    assert [len(pick) for pick in picks] == [6] * 4
    assert not repeated
    assert all(
        sorted(set(pick.tolist())) == row.nonzero()[:, 0].tolist() for pick, row in zip(picks, member, strict=True)
    )
    _, outside, _ = draw(here, 2, False)
    assert not outside[:, :7].any(), "offline, no candidate is in any"


@pytest.mark.parametrize(("auxiliary", "repeated"), [(3, True), (0, False), (5, False)])
def test_too_few_auxiliary_records_are_repeated(auxiliary, repeated):
    """Online, a shadow of 8 records with 3 candidates in it has 5 others."""
    y = torch.tensor([0, 0, 0, 0, 0, 0])
    pool = (None, torch.zeros(6 + auxiliary).long())
    here = scene(Entry("up", 0, 1, n=("count", 8)), y=y, pool=pool, rng=lambda name: torch.Generator().manual_seed(1))
    picks, member, told = draw(here, 2, True)
    assert told is repeated
    assert [len(pick) for pick in picks] == [8 if auxiliary else 3] * 2
    assert member[:, 6:].all()


def test_a_series_of_rounds_ends_at_the_first_that_cannot_be_replayed(monkeypatch):
    """Uploads newest first: 9, 7 and 4, of which 4 cannot be replayed. If the newest cannot, that is said."""
    uploads = [(t, "w", f"model {t}") for t in (9, 7, 4)]
    monkeypatch.setattr(_models, "whole_uploads", lambda scene: iter(uploads))
    monkeypatch.setattr(_models, "draw", lambda scene, shadows, online: ([shadows, online], "member", True))
    monkeypatch.setattr(_models, "logits_of", lambda model, x: (model, x))

    def shadows(entry, field, picks, together, compile):
        if entry == 4:
            raise ThreatError("gone")
        return torch.tensor([float(entry)]), (f"{field} {picks} {together} {compile}",)

    here = scene(pool=("pool x", "pool y"), shadows=shadows)
    found = ShadowAttack(shadows=6, together=5).attacked_rounds(here, online=True)
    assert [target for target, _ in found] == [("model 7", "pool x"), ("model 9", "pool x")]
    assert [of.logits.tolist() for _, of in found] == [[7.0], [9.0]]
    for _, of in found:
        assert (of.member, of.y, of.candidates, of.auxiliary) == ("member", "pool y", 4, slice(4, None))
        assert of.notes[0] == "w [6, True] 5 False"
        assert "some are repeated" in of.notes[1]
    assert len(ShadowAttack(rounds=1).attacked_rounds(here, online=True)) == 1
    uploads.pop(0)
    uploads.pop(0)
    with pytest.raises(ThreatError, match="gone"):
        ShadowAttack().attacked_rounds(here, online=True)


@pytest.mark.parametrize("repeated", [True, False])
def test_the_last_class_means_are_compared_with_those_of_shadows(repeated, monkeypatch):
    last = SimpleNamespace(entry="last entry", field="p")
    monkeypatch.setattr(_means, "releases", lambda scene: ["first", last])
    monkeypatch.setattr(_means, "draw", lambda scene, shadows, online: ((shadows, online), "member", repeated))
    monkeypatch.setattr(_means, "vectors", lambda value, classes: (value, classes))
    asked = []

    def replay(entry, picks, together):
        asked.append((entry, picks, together))
        return [SimpleNamespace(p=1), SimpleNamespace(p=2)]

    target, shadows = MeansAttack(shadows=5, together=3).compared(scene(replay=replay), online=False)
    assert (target, shadows.of, shadows.member) == (last, [(1, 3), (2, 3)], "member")
    assert asked == [("last entry", (5, False), 3)]
    assert len(shadows.notes) == repeated


@pytest.mark.parametrize(
    ("found", "auxiliary", "error", "words"),
    [
        ([], 2, None, "sees no vectors by class of client 0"),
        (["first", "last"], 0, None, "no auxiliary records to make shadows of"),
        (["first", "last"], 2, ThreatError("not replayable"), "not replayable"),
        (["first", "last"], 2, None, None),
    ],
)
def test_what_attacks_on_class_means_need(found, auxiliary, error, words, monkeypatch):
    monkeypatch.setattr(_means, "releases", lambda scene: [SimpleNamespace(entry=name) for name in found])
    asked = []

    def replayable(entry):
        asked.append(entry)
        if error is not None:
            raise error

    y = torch.zeros(auxiliary).long()
    told = MeansAttack().cannot(scene(auxiliary=(y, y), replayable=replayable))
    assert told is None if words is None else words in told
    assert asked == (["last"] if found and auxiliary else [])


def test_without_auxiliary_images_nothing_is_calibrated():
    image = torch.ones(1, 1, 2, 2)
    released = Entry("up", 0, 1, s=("synthetic_images", image))
    found = [NearestSynthetic(calibrate=calibrate).run(scene(released)).scores.tolist() for calibrate in (True, False)]
    assert found[0] == found[1] == [-2.0] * 4


def test_a_class_with_few_shadows_on_one_side_is_learned_with_the_others(monkeypatch):
    """Five of each are asked for. Class 0 has nine members and four others, class 1 five of both: class 0 goes to the
    classifier of all classes, which has the class among its columns."""
    made = []

    class Model:
        def fit(self, X, inside):
            made.append((X.shape, int(inside.sum()), int((~inside).sum())))
            self.answer = 0.1 * len(made)
            return self

        def predict_proba(self, asked):
            return np.full((len(asked), 2), self.answer)

    attack = ShadowModels(least=5)
    monkeypatch.setattr(ShadowModels, "_made", lambda self, seed: Model())
    labels = np.array([0] * 13 + [1] * 10)
    inside = np.array([True] * 9 + [False] * 4 + [True] * 5 + [False] * 5)
    X, asked_y = np.zeros((23, 2)), np.array([1, 0, 1, 0, 0])
    scores = attack.learn(X, labels, inside, np.zeros((5, 2)), asked_y, 3, 0)
    assert made == [((10, 2), 5, 5), ((23, 5), 14, 9)]
    assert scores.tolist() == pytest.approx([0.1, 0.2, 0.1, 0.2, 0.2])


@pytest.mark.parametrize("rounds", [1, 2])
def test_shadows_classifier_sees_the_answers_of_all_rounds(rounds, monkeypatch):
    """Two candidates and three auxiliary records, two shadows. The last round alone stands beside them, if there are
    others."""
    member = torch.tensor([[0, 0, 1, 0, 1], [0, 0, 0, 1, 1]]).bool()
    y, learned = torch.tensor([0, 1, 1, 0, 1]), []
    made = [
        (drawn(5, 2, seed=t), Shadows(drawn(2, 5, 2, seed=t + 10), member, y, 2, (f"note {t}", "all")))
        for t in range(rounds)
    ]
    monkeypatch.setattr(ShadowModels, "attacked_rounds", lambda self, scene, online: made if not online else None)
    monkeypatch.setattr(shadow, "features", lambda z: z.numpy() * 2)

    def learn(self, *of):
        learned.append(of)
        return np.array([float(len(learned)), 0.5])

    monkeypatch.setattr(ShadowModels, "learn", learn)
    here = scene(y=y[:2], rng=lambda purpose: torch.Generator().manual_seed(len(purpose)))
    found = ShadowModels().run(here)
    assert found.notes == ("all", "note 0", "note 1")[: rounds + 1]
    assert found.scores.tolist() == [rounds, 0.5], "all rounds together come last"
    assert found.last is None if rounds == 1 else found.last.tolist() == [1, 0.5]
    assert len(learned) == rounds
    X, labels, inside, asked, asked_y, classes, seed = learned[-1]
    answers = [of_round.logits[:, 2:].numpy() * 2 for _, of_round in made]
    np.testing.assert_array_equal(X, np.concatenate([a.reshape(6, 2) for a in answers], 1))
    np.testing.assert_array_equal(asked, np.concatenate([z[:2].numpy() * 2 for z, _ in made], 1))
    assert labels.tolist() == [1, 0, 1] * 2
    assert inside.tolist() == [True, False, True, False, True, True]
    assert (asked_y.tolist(), classes) == ([0, 1], 3)
    assert seed == int(torch.randint(2147483647, (), generator=torch.Generator().manual_seed(len("classifier"))))
    assert learned[0][0].shape == (6, 2), "the last round alone"
