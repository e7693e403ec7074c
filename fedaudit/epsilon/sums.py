"""Audits of a guarantee for clients: the noise on the sums of a run, canary clients, and the masks of secure sums.

noise     Each client's tasks are performed again, and their updates clipped and added up. What the run made public,
          less that sum, by the promised deviation, is examined as in fedaudit.epsilon.noise_tests.
canaries  The path that a sum takes, clipping, scaling, noise, is gone many times with a canary client whose update
          points in one direction, and as often with that client's update zeroed. The sums' projections bound epsilon.
masks     Masked vectors of one client in two rounds differ by a uniformly random vector, unless a mask was used twice.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fedaudit.aggregation.secure import graph
from fedaudit.aggregation.secure.messages import words_of
from fedaudit.aggregation.secure.ring import HALF
from fedaudit.aggregation.sender import Sender
from fedaudit.aggregation.terms import Terms, bounded, gaussian, in_ring
from fedaudit.aggregation.update import Layout, Slot, Update, clipped, update_of
from fedaudit.epsilon.audit_result import AuditedClaim, held_path
from fedaudit.epsilon.lower_bounds import gdp_mean_shift
from fedaudit.epsilon.noise_tests import SEEKS, Residual, examine
from fedaudit.errors import RunError
from fedaudit.privacy.adaptive_clip import vote
from fedaudit.privacy.updates import Guarantee
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import seed_of
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import EpsilonAudit, SumRecord, save_audits
from fedaudit.runtime.sums import own_noise
from fedaudit.runtime.task import Task, compute, run_task
from fedaudit.setting import Setting
from fedaudit.significance import level_of, said
from fedaudit.stats import check_confidence
from fedaudit.wire.codec import decode, encode, read_header
from fedaudit.wire.message import Down, Up
from fedaudit.wire.transcript import TranscriptEntry

NOISE, CANARIES, MASKS = "noise on sums", "canary clients", "masks"
DIMENSION = 16  # of a canary's update: one direction counts, the others carry noise
KIND = "updates"


def audit_sums(
    folder: Path | str, *, trials: int = 1000, confidence: float = 0.95, watch: Watch | None = None
) -> list[EpsilonAudit]:
    """Audit the guarantee for clients of a finished run. The results are kept in its folder."""
    check_confidence(confidence)
    run = RunFolder(Path(folder))
    guarantee = run.world.guarantee
    if guarantee is None:
        raise RunError(f"{folder} promises nothing to clients: it ran without --privacy updates:...")
    if run.record.status != "done":
        raise RunError(f"{folder} is not finished. Go on with --resume, and audit it then.")
    tests: list[Callable[[], EpsilonAudit]] = [
        lambda: _noise(run, guarantee, confidence, watch or unwatched),
        lambda: canary_audit(guarantee, run.record.setting, trials, confidence),
    ]
    if run.record.setting.aggregate == "secure":
        tests.append(lambda: _masks(run, guarantee, confidence))
    found = []
    for test in tests:
        begun = time.perf_counter()
        found.append(test())
        save_audits(run.folder, run.record.transcript_digest, found[-1:], time.perf_counter() - begun)
    return found


# --- the noise on sums ----------------------------------------------------------------------------------------------


Answers = dict[tuple[int, int, int], tuple[Down, Up]]  # by round, ask and client: what it was sent, its summand


def replies(run: RunFolder, watch: Watch = unwatched) -> Answers:
    """Return what each client was sent and answered: its tasks are performed again, in order.

    The answers are those before any clipping, noise and mask, in the form in which they are added up.
    """
    json, world = run.record.setting.model_dump_json(), run.world
    found: Answers = {}
    states: dict[int, Any] = {}
    sent = [e for e in run.transcript.entries() if e.direction == "down" and not e.fn.startswith("(sum)")]
    answered = {(e.round, e.ask, e.client) for e in run.transcript.entries() if e.direction == "up"}
    with compute(world):
        for i, entry in enumerate(sent):
            if (entry.round, entry.ask, entry.client) not in answered:
                continue  # it dropped out, and its state is as it was
            if not all(map(entry.kept, entry.fields)):
                raise RunError(f"Round {entry.round}: its models were not kept. Run with a larger --keep-weights.")
            message = entry.record()
            task = Task(json, entry.fn, entry.client, entry.round, entry.ask, states.get(entry.client), encode(message))
            done = run_task(task)
            if done.reply is None or done.state is None:
                raise RunError(f"Round {entry.round}, client {entry.client}: {done.error}. It cannot be repeated.")
            states[entry.client] = done.state
            reply = decode(done.reply, Up, device=world.device)
            sender = Sender(entry.client, entry.round, tuple(world.archs), world.shape, world.classes)
            at = entry.round, entry.ask, entry.client
            found[at] = message, world.method.summand(sender, reply, message)
            watch(i, len(sent), f"repeating round {entry.round}")
    return found


def _noise(run: RunFolder, guarantee: Guarantee, confidence: float, watch: Watch) -> EpsilonAudit:
    again = replies(run, watch)
    sums = {(row.round, one.ask): one for row in run.record.rounds for one in row.sums}
    found: list[Residual] = []
    votes: list[float] = []
    for entry in run.transcript.sums():
        one = sums[entry.round, entry.ask]
        now = guarantee if one.clip is None or guarantee.vote_sigma is None else guarantee.at(one.clip)
        ids = sorted(k for t, ask, k in again if (t, ask) == (entry.round, entry.ask))
        if guarantee.policy.where == "client" and not one.secure:
            found += _of_updates(run, guarantee, entry.round, entry.ask, again)
            continue
        sent = [again[entry.round, entry.ask, k] for k in ids]
        # A state is counted from the message that all were sent, if all were sent the same.
        message = sent[0][0] if one_message(sent) else None
        both = [clipped(_update(reply, message), now.policy.clip) for _, reply in sent]
        clean = np.sum([u.real for u, _ in both], axis=0)
        if now.vote_sigma is not None and one.within is not None:
            cast_votes = sum(vote(norm, now.policy.clip) for _, norm in both)
            votes.append(((one.within - 0.5) * one.divisor - cast_votes) / now.vote_sigma)
        made = _update(entry.record(), message).real * one.divisor
        sigma = deviation(now, one, run.record.setting)
        z = ((made - clean) / sigma)[None]
        found.append(Residual(-1, entry.round, "sum", z, (clean / sigma)[None], grain=grid(one) / sigma))
    if not found:
        raise RunError(f"{run.folder} has no sums to examine.")
    if votes:
        found.append(Residual(-1, 1, "votes on the clip", np.array([votes]), np.zeros((1, len(votes)))))
    finding = examine(found, confidence)
    scaled = dataclasses.replace(
        guarantee,
        policy=guarantee.policy.model_copy(
            update={"noise_multiplier": max(guarantee.multiplier * finding.high, 1e-3), "epsilon": None}
        ),
    )
    claim = guarantee.epsilon()
    verdict = said(finding.p, finding.tells_at, confidence)
    bound = scaled.epsilon()
    strongest = finding.strongest
    how = (
        f"noise x {finding.scale:.4g} of what is promised, at most x {finding.high:.4g}, over {len(found)} releases of "
        f"{finding.numbers:,} numbers; strongest of {len(finding.tests)} tests: {strongest.name}, "
        f"p = {strongest.p:.2g}; noise x {finding.finds:.3g} or less would be refuted with a probability of 99 %, at a "
        f"level of {level_of(confidence):g}"
    )
    return EpsilonAudit(
        test=NOISE,
        kind=KIND,
        threat=_threat(guarantee),
        claim="sums of updates, all rounds, for a client",
        claim_epsilon=claim,
        ledger_epsilon=_ledger(run),
        lower_bound=bound if verdict in ("refuted", "suspicious") else min(bound, claim),
        p_value=finding.p,
        trials=finding.numbers,
        confidence=confidence,
        delta=guarantee.delta,
        verdict=verdict,
        method="chi-square and F tests of residuals",
        how=how,
        ceiling=math.inf,
        finds=finding.finds,
        seeks=SEEKS,
        tells_at=finding.tells_at,
    )


def grid(one: SumRecord) -> float:
    """Return the distance between two values that the noise of a sum can have; 0: it is continuous.

    Where a sum has no update in it, or the same one many times, whole steps of noise repeat without any fault.
    """
    if one.bound is None or one.where == "server":
        return 0.0
    return one.bound / (HALF // one.invited)


def one_message(sent: Sequence[tuple[Down, Up]]) -> bool:
    """Return whether all of these replies answer the same message."""
    return len({read_header(encode(message)).digest for message, _ in sent}) == 1


def _update(reply: Up, message: Down | None) -> Update:
    counts = [name for name, d in reply.declared().items() if d is not None and d.kind == "count"]
    by = next((name for name in counts if isinstance(getattr(reply, name), int)), None)  # the weight
    return update_of(reply, message, by, counts=False)


def _of_updates(run: RunFolder, guarantee: Guarantee, t: int, ask: int, again: Answers) -> list[Residual]:
    """Return the residuals of one round's updates, where each client adds its own noise and sends it openly."""
    found = []
    for entry in run.transcript.entries():
        if entry.direction == "up" and (entry.round, entry.ask) == (t, ask) and (t, ask, entry.client) in again:
            message, reply = again[t, ask, entry.client]
            clean = clipped(_update(reply, message), guarantee.policy.clip)[0].real
            z = (_update(entry.record(), message).real - clean) / guarantee.sigma
            found.append(Residual(entry.client, t, "update", z[None], (clean / guarantee.sigma)[None]))
    return found


def deviation(guarantee: Guarantee, one: SumRecord, setting: Setting) -> float:
    """Return the deviation that the noise of one sum should have."""
    if guarantee.policy.where == "server":
        return guarantee.sigma
    if guarantee.policy.where == "client":
        return guarantee.sigma * math.sqrt(one.stayed)
    return guarantee.sigma * math.sqrt(one.stayed / graph.needed(setting.threshold, one.invited))


def _threat(guarantee: Guarantee) -> str:
    return f"whoever sees the sums: {guarantee.entry('', 'weights', 1.0).to}"


def _ledger(run: RunFolder) -> float | None:
    epsilons = [client.epsilon for client in run.record.ledger]
    return None if None in epsilons or not epsilons else max(e for e in epsilons if e is not None)


# --- canary clients -------------------------------------------------------------------------------------------------


def canary_audit(guarantee: Guarantee, setting: Setting, trials: int, confidence: float) -> EpsilonAudit:
    """Hold one sum's epsilon against canary clients: the sum with one, and with its update zeroed, many times over."""
    scores = np.array([projection(guarantee, setting, i, there) for there in (True, False) for i in range(trials)])
    member = np.repeat([True, False], trials)
    one = dataclasses.replace(guarantee, rounds=1, poisson=False)  # to whom knows that the client takes part
    noise = guarantee.policy.model_copy(update={"noise_multiplier": guarantee.multiplier, "epsilon": None})
    claim = dataclasses.replace(one, policy=noise).epsilon()
    place = AuditedClaim(KIND, _threat(guarantee), "one sum of updates, for a client", claim, None)
    how = f"canary clients through clipping, scaling and noise, {trials} sums with and {trials} without"
    distance = 1 / guarantee.multiplier
    return held_path(place, CANARIES, gdp_mean_shift, scores, member, distance, guarantee.delta, confidence, how)


def projection(guarantee: Guarantee, setting: Setting, trial: int, there: bool) -> float:
    """Return the sum's projection on the canary's direction, in one trial. The other clients' updates are zero.

    The noise follows from the run's seed: with one noise for all runs, a false alarm would be one of them all.
    """
    policy, own = guarantee.policy, ("canary", setting.seed, trial, there)
    invited = max(2, round(setting.participation * setting.clients))
    adding = graph.needed(setting.threshold, invited)  # as few as may stay
    layout = Layout((Slot("w", "w", (DIMENSION,), False, "state"),), "")
    _, noise, bound = own_noise(guarantee, invited, setting)
    direction = np.zeros(DIMENSION)
    direction[seed_of("direction", trial) % DIMENSION] = 1.0
    total = np.zeros(DIMENSION)
    secure = setting.aggregate == "secure"
    words = np.zeros(DIMENSION, np.uint32)
    clients = adding if policy.where == "shares" else 1
    for i in range(clients):
        real = 100 * policy.clip * direction if there and i == 0 else np.zeros(DIMENSION)
        terms = Terms(None, invited, bound, 1.0, True, (*own, i), "00" * 32 if secure else None, {}, noise)
        update = Update(layout, real, np.zeros(0), 1.0)
        if policy.where == "server" and not secure:
            total += clipped(update, policy.clip)[0].real
            continue
        update, _ = bounded(update, terms)
        if secure:
            words += in_ring(update, terms)[0]
        else:
            total += update.real
    if secure:
        total = layout.ring(invited, bound, 1.0).decoded(words)[0]
    if policy.where == "server":
        total = total + gaussian(own, "sum noise", guarantee.sigma, DIMENSION, secure=policy.secure)
    return float(total @ direction)


# --- masks ----------------------------------------------------------------------------------------------------------


def _masks(run: RunFolder, guarantee: Guarantee, confidence: float) -> EpsilonAudit:
    by_client: dict[int, list[TranscriptEntry]] = {}
    for entry in run.transcript.entries():
        if entry.message == "Masked" and entry.kept("y"):
            by_client.setdefault(entry.client, []).append(entry)
    pairs = [(a, b) for of in by_client.values() for a, b in pairwise(of)]
    firsts = [of[0] for of in by_client.values()]
    pairs += list(pairwise(firsts))
    p = 1.0
    for a, b in pairs:
        apart = words_of(a["y"]) - words_of(b["y"])
        top = np.bincount((apart >> 24).astype(np.int64), minlength=256)
        p = min(p, float(stats.chisquare(top).pvalue) * len(pairs))
    verdict = said(min(p, 1.0), 0.0, confidence) if pairs else "not tried"
    return EpsilonAudit(
        test=MASKS,
        kind=KIND,
        threat="server",
        claim="masked vectors are uniformly random",
        claim_epsilon=guarantee.epsilon(),
        ledger_epsilon=_ledger(run),
        lower_bound=0.0,
        p_value=min(p, 1.0),
        trials=len(pairs),
        confidence=confidence,
        delta=guarantee.delta,
        verdict=verdict,
        method="chi-square on differences of masked vectors",
        how=f"{len(pairs)} pairs of masked vectors, of one client in two rounds and of two clients in one",
        ceiling=0.0,
    )
