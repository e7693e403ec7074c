"""The cost of private training, counted again from what was done, and held against the ledger.

A ledger is a list of numbers that the run wrote about itself: sample rates, steps, clipping norms, noise multipliers
and deltas. All of them follow from the calls that a repetition sees: how many records a client has, the batch size, the
steps that left the mechanism, and the policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedaudit.epsilon.private_steps import MadeTraining
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.ledger import ClientLedger
from fedaudit.privacy.policy import TRAINING, Policy
from fedaudit.runtime.folder import RunFolder

CLOSE = 1e-3  # relative difference of two accountants' epsilon


@dataclass(frozen=True)
class WrongCount:
    """A number of the ledger that is not what was done, in words, and the epsilon of what was done."""

    words: str
    epsilon: float


def counted_again(run: RunFolder, trainings: list[MadeTraining]) -> WrongCount | None:
    """Return where the ledger says less than what was done costs; None where it does not."""
    policy = run.world.policies[TRAINING]
    found: list[WrongCount] = []
    composed: dict[tuple[object, ...], float] = {}
    for row in run.record.ledger:
        mine = [made for made in trainings if made.client == row.client]
        if not mine:
            continue
        # The ledger composes at one delta for all kinds; it is this policy's own where there is no other policy.
        delta = policy.delta_for(row.n) if len(run.world.policies) == 1 else row.delta
        words = _differences(row, mine, policy, delta)
        events = tuple((made.sigma / (policy.clip or 1.0), made.q, made.steps) for made in mine)
        key = (events, delta)
        if key not in composed:
            composed[key] = compose([Event(*e) for e in _joined(events)], delta, compare=False).epsilon_of_record
        epsilon, said = composed[key], row.by_kind.get(TRAINING, 0.0)
        if epsilon > said * (1 + CLOSE) + CLOSE:
            words.append(f"epsilon = {said:.4g}, and what was done costs {epsilon:.4g}")
        if words:
            found.append(WrongCount(f"the ledger of client {row.client} says {'; '.join(words)}", epsilon))
    return max(found, key=lambda wrong: wrong.epsilon, default=None)


def _joined(events: tuple[tuple[float, float, int], ...]) -> list[tuple[float, float, int]]:
    """Return the events with the steps of equal ones added up."""
    steps: dict[tuple[float, float], int] = {}
    for multiplier, q, count in events:
        steps[multiplier, q] = steps.get((multiplier, q), 0) + count
    return [(multiplier, q, count) for (multiplier, q), count in steps.items()]


def _differences(row: ClientLedger, mine: list[MadeTraining], policy: Policy, delta: float) -> list[str]:
    """Return each number of a client's ledger that promises more than was done."""
    entries = [e for e in row.entries if e.kind == TRAINING]
    words = []
    steps, made = sum(e.steps * len(e.rounds) for e in entries), sum(m.steps for m in mine)
    if steps < made:
        words.append(f"{steps} steps, and {made} were made")
    rate, q = min((e.sample_rate for e in entries), default=0.0), max(m.q for m in mine)
    if rate < q * (1 - 1e-9):
        words.append(f"a sample rate of {rate:.4g}, and it was {q:.4g}")
    for e in entries:
        if e.clip is not None and policy.clip is not None and not math.isclose(e.clip, policy.clip, rel_tol=1e-9):
            words.append(f"a clipping norm of {e.clip:.4g}, and the policy's is {policy.clip:.4g}")
        if e.sigma is not None and e.noise_multiplier * (policy.clip or 1.0) > e.sigma * (1 + 1e-6):
            words.append(f"a noise multiplier of {e.noise_multiplier:.4g}, and its sigma is {e.sigma:.4g}")
        if policy.noise_multiplier is not None and e.noise_multiplier < policy.noise_multiplier * (1 - 1e-9):
            words.append(f"a noise multiplier of {e.noise_multiplier:.4g}, and {policy.noise_multiplier:.4g} is asked")
        if e.delta is not None and e.delta > delta * (1 + 1e-9):
            words.append(f"delta = {e.delta:.3g}, and the policy's is {delta:.3g}")
    if row.delta > delta * (1 + 1e-9):
        words.append(f"delta = {row.delta:.3g} for the client, and the policy's is {delta:.3g}")
    return words
