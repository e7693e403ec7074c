"""What an audit of a path says it would find, it finds: by drawing such paths."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fedaudit.epsilon.audit_result import SEEKS, AuditedClaim, held, held_path, would_find
from fedaudit.epsilon.lower_bounds import from_scores, gdp_mean_shift, one_run_fdp


def drawn(apart: float, trials: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = np.concatenate([apart + rng.normal(size=trials), rng.normal(size=trials)])
    return scores, np.repeat([True, False], trials)


@pytest.mark.parametrize(("bound", "trials"), [(gdp_mean_shift, 200), (from_scores, 1000)])
def test_what_it_says_it_would_find_it_finds(bound, trials):
    """Noise x `finds` is refuted in 99 of 100: of 60, at least 56. At the level `tells_at`, half of the noise is."""
    claim, delta, apart = 1.0, 1e-2, 0.45
    finds, tells_at = would_find(bound, apart, trials, claim, delta, 0.95)
    assert 0 < finds < 1
    found = [bound(*drawn(apart / finds, trials, seed), delta).p_value(claim) < 0.001 for seed in range(60)]
    assert sum(found) >= 56
    half = np.array([bound(*drawn(apart / SEEKS, trials, seed), delta).p_value(claim) for seed in range(60)])
    assert (half <= tells_at * 1.01).sum() >= 56
    assert np.median(half) > tells_at / 1e6


def test_the_row_of_a_path():
    place = AuditedClaim("logits", "server", "Y, one release", 1.0, 2.0)
    row = held_path(place, "path", gdp_mean_shift, *drawn(0.45, 400, 0), 0.45, 1e-2, 0.95, "two rows")
    assert (row.claim_epsilon, row.ledger_epsilon, row.kind, row.trials, row.seeks) == (1.0, 2.0, "logits", 800, 0.5)
    assert row.how.startswith("two rows; these trials could show at most epsilon = ")
    assert f"would find noise x {row.finds:g} at a level of 0.001" in row.how
    without = held_path(place, "path", gdp_mean_shift, *drawn(20.0, 400, 0), 0.45, 1e-2, 0.95, "two rows")
    assert (without.verdict, row.verdict == "refuted") == ("refuted", False)
    few = held_path(place, "path", gdp_mean_shift, *drawn(0.45, 10, 0), 0.45, 1e-2, 0.95, "two rows")
    assert (few.verdict, few.finds < 0.5) == ("cannot tell", True)


def test_a_bound_that_perfect_guesses_could_not_raise_cannot_tell():
    """Eight guesses, all right: p = (e / (1 + e))^8 and more: no claim of 1 falls by that."""
    place = AuditedClaim("run", "server", "the run", 1.0, None)
    for guesses, word in ((8, "cannot tell"), (200, "not refuted")):
        best = one_run_fdp(guesses, guesses, guesses, 1e-2)
        bound = one_run_fdp(guesses, guesses, guesses // 2, 1e-2)
        row = held(place, "guesses", bound, best.epsilon, "", tells_at=best.p_value(1.0))
        assert (row.verdict, row.ceiling) == (word, best.epsilon)
    open_claim = AuditedClaim("run", "server", "none: something is unprotected", np.inf, np.inf)
    assert held(open_claim, "guesses", bound, best.epsilon, "", tells_at=None).verdict == "not refuted"


def test_a_claim_of_nothing_has_no_noise_to_miss():
    """Pure noise claims epsilon 0: whatever shows refutes it, so that no share of noise is sought."""
    place = AuditedClaim("logits", "server", "pure noise", 0.0, 0.0)
    row = held_path(place, "path", gdp_mean_shift, *drawn(0.0, 100, 0), 0.0, 1e-2, 0.95, "two rows")
    assert (row.finds, row.tells_at, row.verdict) == (None, None, "not refuted")
    assert "would find" not in row.how
    assert held_path(place, "path", gdp_mean_shift, *drawn(9.0, 100, 0), 0.0, 1e-2, 0.95, "").verdict == "refuted"


def test_the_largest_scale_that_is_refuted_is_told():
    """A bound that refutes where the means are 16 or more apart: at a distance of 2, noise x 0.1 is and x 0.25 is not,
    nor is half of it. Of so many trials chance takes next to nothing."""

    def bound(scores, member, delta, confidence):
        refutes = scores[member].mean() - scores[~member].mean() > 16
        return SimpleNamespace(p_value=lambda claim: 1e-4 if refutes else 0.02)

    assert would_find(bound, 2.0, 10**5, 1.0, 1e-2, 0.95) == (0.1, 0.02)
    assert would_find(bound, 8.1, 10**5, 1.0, 1e-2, 0.95) == (0.5, 1e-4)


def test_chance_takes_something_from_the_difference_that_is_sought():
    """Ten trials, a distance of 4 and half of the noise: 8 less 2.326 sqrt((2 + 16) / 10) is 4.879."""
    seen = []

    def bound(scores, member, delta, confidence):
        seen.append(scores[member].mean() - scores[~member].mean())
        return SimpleNamespace(p_value=lambda claim: 1.0)

    assert would_find(bound, 4.0, 10, 1.0, 1e-2, 0.95) == (0.0, 1.0)
    assert seen[-1] == pytest.approx(8 - 2.32635 * np.sqrt((2 + 64 / 4) / 10), rel=1e-4)


def test_the_row_of_a_path_asks_each_bound_for_what_it_is_for():
    """Six scores of either class. The bound sees them and its ceiling, the quick one what would be found with three."""
    seen, sought = [], []

    def bound(scores, member, delta, confidence):
        seen.append((list(scores), list(member), delta, confidence))
        return gdp_mean_shift(scores, member, delta, confidence)

    def quick(scores, member, delta, confidence):
        sought.append((scores, list(member), delta, confidence))
        return SimpleNamespace(p_value=lambda claim: 0.3 if claim == 1.5 else 0.4)

    place = AuditedClaim("logits", "server", "Y, one release", 1.5, 2.0)
    scores, member = np.array([1.0, 2.5, 4.0, 0.5, -1.0, 0.0]), np.repeat([True, False], 3)
    row = held_path(place, "path", bound, scores, member, 3.0, 1e-2, 0.9, "two rows", lambda u: 10 * u, quick)
    apart = 3.0 / SEEKS - 2.3263479 * np.sqrt((2 + (3.0 / SEEKS) ** 2 / 4) / 3)
    assert sought[-1][0] == pytest.approx([10 / 6 + apart, 5 + apart, 50 / 6 + apart, 10 / 6, 5, 50 / 6])
    assert all(given[1:] == ([True] * 3 + [False] * 3, 1e-2, 0.9) for given in sought)
    assert seen == [
        ([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [True] * 3 + [False] * 3, 1e-2, 0.9),
        (list(scores), list(member), 1e-2, 0.9),
    ]
    top = gdp_mean_shift(*(np.array(part) for part in seen[0][:2]), 1e-2, 0.9).epsilon
    found = gdp_mean_shift(scores, member, 1e-2, 0.9)
    assert (row.finds, row.tells_at, row.seeks, row.ceiling, row.test) == (0.0, 0.3, SEEKS, top, "path")
    assert (row.lower_bound, row.p_value, row.confidence, row.delta) == (found.epsilon, found.p_value(1.5), 0.9, 1e-2)
    assert row.how.startswith(f"two rows; these trials could show at most epsilon = {top:.3g}, and would find no lack ")
