"""Cases in which nothing is equal: two deltas, clients of unequal size, claims, kinds and noises that differ.

Where all clients and policies are alike, the largest of them is also the smallest, and taking the wrong one is right.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedaudit import Up, private, sgd
from fedaudit.epsilon.lower_bounds import from_counts, from_scores
from fedaudit.privacy import dpsgd
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.privacy.dpsgd import fit_private, multiplier_for
from fedaudit.privacy.ledger import ClientLedger, Ledger, LedgerEntry
from fedaudit.privacy.mechanism import protect
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.sensitivity import Context
from fedaudit.stats import cp_lower, cp_upper
from fedaudit.training import models


def entry(kind="embeddings", m=5.0, relation="replace-one", **more):
    return LedgerEntry(field="M.e", kind=kind, mechanism="gaussian", noise_multiplier=m, relation=relation, **more)


def ledger(*rounds, delta=1e-5):
    made = ClientLedger(client=0, n=100, delta=delta)
    for t, entries in enumerate(rounds, 1):
        for e in entries:
            made.add(e, t)
    made.close()
    return made


def test_every_step_of_every_round_is_charged():
    training = entry("training", 1.0, "add-or-remove", sample_rate=0.1, steps=10)
    made = ledger([training], [training], [training])
    assert made.epsilon == pytest.approx(compose([Event(1.0, 0.1, 30)], 1e-5).epsilon_of_record)


def test_a_kind_under_two_relations_is_told_by_the_dearer():
    made = ledger([entry(m=4.0), entry(m=2.0, relation="zero-out")])
    assert made.by_kind["embeddings"] == pytest.approx(gaussian_epsilon(1 / 2, 1e-5))
    assert made.epsilon is None


def test_of_several_claims_the_largest_is_told():
    assert ledger([entry(claim=1.0), entry("logits", claim=3.0), entry("labels")]).claim == 3.0


def test_the_cosine_is_the_mean_over_releases():
    made = ledger([entry(cosine=0.1)], [entry(cosine=0.2)], [entry(cosine=0.6)])
    assert made.entries[0].cosine == pytest.approx(0.3)


def test_releases_under_other_noise_are_other_entries():
    """Multipliers 5, 2 and 5: mu^2 = 2 / 25 + 1 / 4."""
    made = ledger([entry(m=5.0)], [entry(m=2.0)], [entry(m=5.0)])
    assert [e.rounds for e in made.entries] == [[1, 3], [2]]
    assert made.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2 / 25 + 1 / 4), 1e-5))


def test_each_client_is_held_to_its_own_delta():
    """Ten and a thousand records: deltas 1e-1 and 1e-3, and so other epsilons for the same noise."""
    book = Ledger()
    for k, n in ((0, 10), (1, 1000)):
        book.add(k, n, 1 / n, 1, [entry()])
    rows = book.close()
    assert [row.delta for row in rows] == [0.1, 0.001]
    assert [row.epsilon for row in rows] == [pytest.approx(gaussian_epsilon(0.2, d)) for d in (0.1, 0.001)]
    assert rows[0].epsilon < rows[1].epsilon


def test_one_release_without_noise_among_noisy_ones_costs_everything():
    assert compose([Event(5.0), Event(0.0), Event(2.0)], 1e-5).epsilon_of_record == math.inf


class Two(Up):
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
    reply, protection, _ = protect(Two({0: zeros, 1: zeros}, zeros), context)
    noises = [reply.a[0], reply.a[1], reply.b]
    wanted = [2.0 * 6 * math.sqrt(80), 2.0 * 6 * math.sqrt(80), 1.0]
    for noise, sigma in zip(noises, wanted, strict=True):  # the standard deviation of 4,000 is 1.1 % uncertain
        assert float(noise.std()) == pytest.approx(sigma, rel=0.06)
    assert protection["a"].sigma == pytest.approx(wanted[0])
    for i in range(3):
        for j in range(i):
            assert abs(np.corrcoef(noises[i].flatten(), noises[j].flatten())[0, 1]) < 4 / math.sqrt(4000)


def ce(f, x, y):
    return cross_entropy(f(x), y, reduction="none")


def trained(n, batch, epochs, fits, epsilon=2.0):
    torch.manual_seed(0)
    model = models.build("mlp", shape=(1, 4, 4), classes=3)
    rows = torch.randn(n, 1, 4, 4), torch.randint(3, (n,))
    _, made = fit_private(
        model, ce, rows, opt=sgd(0.1), batch=batch, epochs=epochs, steps=None, given=None, fits=fits,
        policy=Policy(mechanism="dp-sgd", epsilon=epsilon),
        rng=torch.Generator().manual_seed(1), noise=torch.Generator().manual_seed(2),
    )  # fmt: skip
    return made


def test_several_trainings_of_several_epochs_together_meet_epsilon():
    """37 records in batches of 10: q = 10/37, four steps an epoch, two epochs, three trainings: 24 steps."""
    made = trained(37, 10, epochs=2, fits=3)
    assert (made.steps, made.sample_rate, made.delta) == (8, pytest.approx(10 / 37), pytest.approx(1 / 37))
    spent = compose([Event(made.noise_multiplier, 10 / 37, 24)], 1 / 37, compare=False).epsilon_of_record
    assert 1.8 < spent <= 2.0


@pytest.mark.parametrize(
    ("delta", "q", "steps"), [(1.09e-5, 0.02, 200), (1e-5, 0.0191, 200), (1e-5, 0.02, 191), (1e-5, 0.02, 200)]
)
def test_a_shared_calibration_is_enough_for_the_client_that_needs_most(delta, q, steps):
    """Rounded to two digits: 1.09e-5 to 1.0e-5, 0.0191 to 0.020, 191 to 200. The other way would be too little."""
    spent = compose([Event(multiplier_for(1.0, delta, q, steps), q, steps)], delta, compare=False).epsilon_of_record
    assert 0.9 < spent <= 1.0


def test_a_shared_calibration_is_sought_on_the_safe_side(monkeypatch):
    """Less delta, a higher rate, more steps: what the accountant says of them is more than any client spends."""
    asked = []
    monkeypatch.setattr(dpsgd, "calibrated", lambda *values: asked.append(values) or 1.0)
    multiplier_for(1.0, 1.09e-5, 0.0191, 191)
    assert asked == [(1.0, pytest.approx(1.0e-5), pytest.approx(0.020), 200)]


def test_delta_is_taken_off_both_rates():
    """TP 180 of 200, FP 10 of 100, delta 0.05, by hand at alpha / 2 = 2.5 % each."""
    tpr, fpr = float(cp_lower(180, 200, 0.025)), float(cp_upper(10, 100, 0.025))
    wanted = max(math.log((tpr - 0.05) / fpr), math.log((1 - fpr - 0.05) / (1 - tpr)))
    assert from_counts(180, 20, 10, 90, delta=0.05).epsilon == pytest.approx(wanted)
    flipped = from_counts(90, 10, 20, 180, delta=0.05).epsilon
    tpr, fpr = float(cp_lower(90, 100, 0.025)), float(cp_upper(20, 200, 0.025))
    assert flipped == pytest.approx(max(math.log((tpr - 0.05) / fpr), math.log((1 - fpr - 0.05) / (1 - tpr))))


def test_tied_scores_do_not_add_members_to_a_threshold():
    """Members: two at -5, 38 tied at 1; non-members: 58 at 0, two at 3. "score >= 1" is the threshold of the members'
    rank 3: it stands for 37 of 40, though with the tie there are 38; and has 2 false positives. "score > 0", of the
    non-members' rank 3, has 38 of 40 and stands for 3 false positives. Bonferroni over 7 + 7 thresholds at 95 %."""
    scores = np.concatenate([[-5.0] * 2, [1.0] * 38, [0.0] * 58, [3.0] * 2])
    found = from_scores(scores, np.arange(100) < 40, delta=0.0)
    each = 0.05 / 14 / 2  # ranks 0, 1, 3, 7, 10, 15, 20 of 40, and 0, 1, 3, 7, 15, 22, 30 of 60
    by_members = math.log(float(cp_lower(37, 40, each)) / float(cp_upper(2, 60, each)))
    by_others = math.log(float(cp_lower(38, 40, each)) / float(cp_upper(3, 60, each)))
    assert by_members > by_others
    assert found.epsilon == pytest.approx(by_members)
    assert (found.detail["tp"], found.detail["fp"], found.detail["rule"]) == (37, 2, "score >= threshold")


@pytest.mark.parametrize("tied", [0.5, 1.0])
def test_ties_between_the_classes_show_nothing(tied):
    """All scores tied, and half of them: nothing can be told, and no bound is above 0."""
    rng = np.random.default_rng(0)
    scores = np.where(rng.random(200) < tied, 0.0, rng.random(200))
    assert from_scores(scores, np.arange(200) % 2 == 0, delta=1e-5).epsilon == 0.0
