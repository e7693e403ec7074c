"""The noise of a run itself, on the bytes as they were sent: all clients, all rounds.

Each client's tasks are performed again (fedaudit.epsilon.client_replay), and (what was sent - the release without
noise) by sigma is examined (fedaudit.epsilon.noise_tests): is it as large as the ledger says, of the promised shape,
and independent over rows, fields, rounds and clients? For DP-SGD it is the noise of each step, held against a step that
the audit makes itself (fedaudit.epsilon.private_steps); what the ledger counts is counted again from what was done; and
what was sent is held against what the run's own key gives.

The lower bound on epsilon follows from the scale alone: the claim's formula with the largest noise that the residuals
allow. What another test refutes (reused noise, say) refutes the claim without giving it another epsilon. Where steps of
DP-SGD are as promised and only what was sent is not what they give, neither scale nor bound is told: they are not those
of what was sent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedaudit.epsilon.client_replay import Probe, Repeated, Seen, Stepped, noise_of, repeat
from fedaudit.epsilon.finished_run import closed_run, other_conditions
from fedaudit.epsilon.noise_tests import SEEKS, Finding, Residual, Test, examine, numbers_to_tell, residual
from fedaudit.epsilon.noise_values import spacing
from fedaudit.epsilon.private_steps import MadeTraining, Span
from fedaudit.epsilon.recount import counted_again
from fedaudit.errors import ContractError, FedauditError
from fedaudit.privacy.accounting import Event, compose
from fedaudit.privacy.mechanisms.additive import TINY
from fedaudit.privacy.mechanisms.base import Mechanism, mechanism_of
from fedaudit.privacy.policy import TRAINING
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import seed_of
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import EpsilonAudit, save_audits
from fedaudit.runtime.task import compute
from fedaudit.significance import Said, level_of, said
from fedaudit.stats import Floats, check_confidence
from fedaudit.wire.compression import SMALL

TEST = "residuals"
FAITHFUL = 1e-3  # relative difference up to which a repetition is the run's computation but for rounding
STRAY = 1e-2  # relative difference from which on a repetition under the same conditions is another computation
ALIGNED = 1e-6  # p-value below which what is missing lies along the noise
ACCUSES = ("refuted", "suspicious")
GRAINS = 2  # a release is rounded when its noise is added, and its noise when it is scaled
LARGE = 1 << 16  # numbers of a parameter that are looked at
LEVELS = np.arange(256) / 127.5 - 1  # what a uint8 field can say


def audit_residuals(
    folder: Path | str,
    *,
    kinds: Sequence[str] | None = None,
    clients: Sequence[int] | None = None,
    confidence: float = 0.95,
    watch: Watch | None = None,
    beside: Callable[[RunFolder, int], Probe] | None = None,
) -> list[EpsilonAudit]:
    """Examine the noise of each protected field, and of private training. The results are kept in the run folder.

    `beside`: what else is to be done with each private training of a client, while it is repeated."""
    begun = time.perf_counter()
    check_confidence(confidence)
    run = closed_run(folder, kinds, clients, "there is no noise to examine.")
    world = run.world
    wanted = set(kinds or world.policies)
    took_part = [row.client for row in run.record.ledger if clients is None or row.client in clients]
    repeated: list[Repeated] = []
    reasons: list[str] = []
    with compute(world):
        for k in took_part:
            try:
                more = [] if beside is None else [beside(run, k)]
                repeated.append(repeat(run, k, watch or unwatched, noise_of, *more))
                reasons += repeated[-1].reasons
            except FedauditError as e:
                reasons.append(str(e))
            except Exception as e:  # noqa: BLE001 (somebody's method may not bear a repetition: the audit says so)
                reasons.append(f"client {k} could not be repeated: {type(e).__name__}: {e}")
    noise = _noise_by_field(run, repeated)
    audits = []
    for kind in sorted(wanted):
        of_kind = _audit_kind(run, kind, repeated, noise, reasons, confidence)
        audits += [_counted(audit, run, kind, took_part, repeated, reasons) for audit in of_kind]
    save_audits(run.folder, run.record.transcript_digest, audits, time.perf_counter() - begun)
    return audits


def _noise_by_field(run: RunFolder, repeated: list[Repeated]) -> dict[str, list[Residual]]:
    """Return the noise of each protected field, and of private training, over all clients and rounds."""
    found: dict[str, list[Residual]] = {}
    for of_client in repeated:
        for seen in of_client.seen:
            how = mechanism_of(run.world.policies[seen.kind])
            found.setdefault(seen.where, []).extend(_of_field(seen, how))
        for made in of_client.made:
            found.setdefault(TRAINING, []).extend(_of_steps(made))
        if not any(made.found for made in of_client.made):
            found.setdefault(TRAINING, []).extend(r for step in of_client.trained for r in _of_sum(step))
    return {where: residuals for where, residuals in found.items() if residuals}


def _counted(
    audit: EpsilonAudit, run: RunFolder, kind: str, clients: list[int], repeated: list[Repeated], reasons: list[str]
) -> EpsilonAudit:
    """Return the audit, held against how many clients it should have looked at. Of some, it cannot tell of all."""
    due = {
        row.client for row in run.record.ledger if row.client in clients and any(e.kind == kind for e in row.entries)
    }
    missing = sorted(due - {found.client for found in repeated})
    if not missing or not audit.trials:
        return audit
    why = f"; client {missing[0]} could not be repeated: {reasons[0]}" if reasons else ""
    how = f"{audit.how}; {len(due) - len(missing)} of {len(due)} clients were looked at{why}"
    quiet = audit.verdict == "not refuted"
    return audit.model_copy(update={"how": how} | ({"verdict": "cannot tell", "tells_at": 1.0} if quiet else {}))


def _audit_kind(
    run: RunFolder, kind: str, repeated: list[Repeated], noise: dict[str, list[Residual]], reasons: list[str],
    confidence: float,
) -> list[EpsilonAudit]:  # fmt: skip
    if kind == TRAINING:
        if TRAINING not in noise:
            return [_not_tried(run, kind, "training, all rounds", reasons, confidence)]
        return [_audit_training(run, noise, repeated, confidence)]
    fields: dict[str, list[Seen]] = {}
    for found in repeated:
        for seen in found.seen:
            if seen.kind == kind:
                fields.setdefault(seen.where, []).append(seen)
    if not fields:
        return [_not_tried(run, kind, f"{kind}, one release", reasons, confidence)]
    return [_audit_field(run, seen, noise, repeated, confidence) for seen in fields.values()]


def _audit_field(
    run: RunFolder, seen: list[Seen], noise: dict[str, list[Residual]], repeated: list[Repeated], confidence: float
) -> EpsilonAudit:
    first, policy = seen[0], run.world.policies[seen[0].kind]
    exact = all(found.exact for found in repeated)
    how = mechanism_of(policy)
    finding = examine(noise[first.where], confidence, exact=exact, others=_others(noise, first.where))
    delta = max(s.ready.delta for s in seen)
    claim = how.claim(policy, replace(first.ready, delta=delta))
    bound = how.epsilon_at(first.ready, finding.high, delta)
    said = [s for s in seen if s.sigma is not None and not math.isclose(s.sigma, max(s.ready.sigmas), rel_tol=1e-4)]
    wrong = (
        f"the transcript says sigma = {said[0].sigma:.4g} of round {said[0].round}, the policy gives "
        f"{max(said[0].ready.sigmas):.4g}"
        if said
        else ""
    )
    note = _rounds_to_tell(finding, len({s.round for s in seen}))
    return _audit(
        run, first.kind, f"{first.where}, one release", claim, bound, delta, finding, repeated, len(seen), wrong, note
    )


def _others(noise: dict[str, list[Residual]], where: str) -> list[Residual]:
    return [r for other, residuals in noise.items() if other != where for r in residuals]


def _rounds_to_tell(finding: Finding, rounds: int) -> str:
    """Return how many rounds like these would be enough, where there are too few numbers to tell."""
    if finding.tells_at < level_of(finding.confidence):
        return ""
    needed = numbers_to_tell(level_of(finding.confidence))
    if finding.numbers >= needed:
        return "so much of it was rounded away that more rounds of this size are needed than can be said"
    return f"about {math.ceil(needed * rounds / finding.numbers)} rounds of this size would tell noise x {SEEKS:g}"


def _of_field(seen: Seen, how: Mechanism) -> list[Residual]:
    """Return the residuals of one release, by tensor."""
    found = []
    for i, (arrived, clean, sigma) in enumerate(zip(seen.sent, seen.ready.leaves, seen.ready.sigmas, strict=True)):
        sent, free = _array(arrived), _array(clean)
        at = (seen.client, seen.round, f"{seen.where} {i}")
        seed = seed_of(TEST, seen.client, seen.round, i) % 2**32
        if sent.shape != free.shape:
            raise ContractError(f"{at[2]}: {sent.shape} was sent, and {free.shape} comes out again.")
        if (levels := _levels(seen, sent)) is None:
            noise = how.noise(sent, seen.ready, i, seed)
            same = noise.z.size == free.size
            whole = free.reshape(noise.z.shape) if same else np.zeros(noise.z.shape)
            grain = GRAINS * spacing(sent, _eps(arrived, clean)) / max(sigma, TINY)
            found.append(
                Residual(
                    *at, noise.z, whole, noise.sizes, grain.reshape(noise.z.shape) if same else 0.0, noise.free and same
                )
            )
        else:  # rounded numbers are looked at for normal noise alone
            made = residual(
                sent, how.centre(free), sigma, client=at[0], round=at[1], part=at[2], levels=levels, seed=seed
            )
            found.append(replace(made, clean=free.reshape(made.z.shape)))
    return found


def _eps(*tensors: Tensor) -> float:
    """Return the relative spacing of the coarsest format among these."""
    return max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=0.0)


def _levels(seen: Seen, sent: Floats) -> Floats | None:
    """The values that could travel, where the release was rounded to them."""
    if seen.dtype == "uint8":
        return LEVELS
    if seen.rounded and sent.size >= SMALL and (largest := float(np.abs(sent).max())) > 0:
        return np.arange(-127, 128) / 127 * largest
    return None


def _array(t: Tensor) -> Floats:
    return t.detach().double().cpu().numpy()


def _of_steps(made: MadeTraining) -> list[Residual]:
    return [
        Residual(
            made.client, made.round, name, _some(step.noise[name]), _some(step.clean[name]),
            grain=_some(step.grain[name]), step=step.number,
        )
        for step in made.found
        for name in step.noise
    ]  # fmt: skip


def _of_sum(step: Stepped) -> list[Residual]:
    return [
        Residual(step.client, step.round, name, _matrix(noise), _matrix(step.clean[name]))
        for name, noise in step.noise.items()
    ]


def _audit_training(
    run: RunFolder, noise: dict[str, list[Residual]], repeated: list[Repeated], confidence: float
) -> EpsilonAudit:
    trainings = [made for found in repeated for made in found.made]
    exact = all(found.exact for found in repeated)
    span = sum((made.span for made in trainings), Span())
    more = [Test("members", span.p), Test("outside", span.p_outside)] if span.dimensions else []
    # A step is held against the same step, made here: it is known to the bit but for rounding.
    finding = examine(noise[TRAINING], confidence, exact=True, others=_others(noise, TRAINING), more=more)
    ledger = max(run.record.ledger, key=lambda c: c.by_kind.get(TRAINING, 0.0))
    claim = ledger.by_kind.get(TRAINING, 0.0)
    bound = math.inf
    if finding.high > 0:
        events = [
            Event(e.noise_multiplier * finding.high, e.sample_rate, e.steps * len(e.rounds))
            for e in ledger.entries
            if e.kind == TRAINING
        ]
        bound = compose(events, ledger.delta, compare=False).epsilon_of_record
    wrong = _clipped_wrongly(trainings, repeated)
    if wrong_count := counted_again(run, trainings):
        wrong, bound = "; ".join(filter(None, [wrong, wrong_count.words])), max(bound, wrong_count.epsilon)
    known = {e.sigma for row in run.record.ledger for e in row.entries if e.kind == TRAINING and e.sigma is not None}
    sigmas = [step.sigma for found in repeated for step in found.trained] + [made.sigma for made in trainings]
    foreign = [sigma for sigma in sigmas if not any(math.isclose(sigma, other, rel_tol=1e-6) for other in known)]
    if foreign:
        wrong = f"the ledger has no training with sigma = {foreign[0]:.4g}, which comes out"
    otherwise = _sent_otherwise(run, trainings, repeated)
    wrong = "; ".join(filter(None, [wrong, otherwise]))
    # Steps that are as promised, beside something else that was sent: their noise is not that of what was sent.
    foreign_noise = bool(otherwise) and said(finding.p, finding.tells_at, confidence) not in ACCUSES
    again = "what was sent does not come out again to the bit: this is the noise of the code as it is now"
    how = ["" if exact or foreign_noise else again]
    how += [f"single steps were not looked at: {made.lacks}" for made in trainings if made.lacks][:1]
    if looked := sum(len(made.found) for made in trainings):
        how.append(f"{looked} of {sum(made.steps for made in trainings)} steps were made again")
    releases = len(trainings) or sum(len(found.trained) for found in repeated)
    return _audit(
        run, TRAINING, "training, all rounds", claim, None if foreign_noise else bound, ledger.delta, finding, repeated,
        releases, wrong, "; ".join(filter(None, how)),
    )  # fmt: skip


def _clipped_wrongly(trainings: list[MadeTraining], repeated: list[Repeated]) -> str:
    largest = max(
        [made.longest for made in trainings] + [step.largest for found in repeated for step in found.trained],
        default=0.0,
    )
    if largest > 1 + 1e-6:
        return f"a record's gradient has {largest:.4g} times the clipping norm"
    return next((made.wrong for made in trainings if made.wrong), "")


def _sent_otherwise(run: RunFolder, trainings: list[MadeTraining], repeated: list[Repeated]) -> str:
    """Return why what was sent is not what the run's own key gives; empty where it is, or where that cannot be told."""
    apart = max((found.apart for found in repeated), default=0.0)
    if apart <= FAITHFUL or any(made.lacks for made in trainings) or not trainings:
        return ""
    cosines = [cosine for found in repeated for cosine, p in found.lacking if p < ALIGNED]
    if cosines and max(map(abs, cosines)) > 0.2:
        return (
            f"what was sent differs from what the run's key gives along the noise itself (cosine "
            f"{max(cosines, key=abs):.2g}): it does not hold that noise"
        )
    if STRAY < apart < math.inf and not other_conditions(run):
        return f"what was sent is not what this code makes of the run's own key (relative difference {apart:.2g})"
    return ""


def _some(values: Floats) -> Floats:
    """Return numbers of a parameter, not more than are looked at."""
    return values if values.size <= LARGE else values.reshape(1, -1)[:, :: -(-values.size // LARGE)]


def _matrix(t: Tensor) -> Floats:
    flat = t.reshape(len(t), -1) if t.dim() > 1 else t.reshape(1, -1)
    if flat.numel() > LARGE:
        flat = flat.reshape(1, -1)[:, :: -(-flat.numel() // LARGE)]
    return _array(flat)


def _audit(
    run: RunFolder, kind: str, claim: str, epsilon: float, bound: float | None, delta: float, finding: Finding,
    repeated: list[Repeated], releases: int, wrong: str, note: str = "",
) -> EpsilonAudit:  # fmt: skip
    """Return the audit of one claim. `bound`: None if what was found is not what was sent."""
    apart = max(found.apart for found in repeated)
    faithful = apart <= FAITHFUL
    p = min(finding.p, 1e-15) if wrong else finding.p
    counts = faithful or kind == TRAINING or bool(wrong)
    verdict: Said = said(p, finding.tells_at, finding.confidence) if counts else "cannot tell"
    if not faithful and verdict == "not refuted":
        verdict = "cannot tell"
    strongest = finding.strongest
    over = f"{releases} releases of {len(repeated)} clients"
    how = [
        f"noise x {finding.scale:.4g} of what is promised, at most x {finding.high:.4g}, over {over}",
        f"strongest of {len(finding.tests)} tests: {strongest.name}, p = {strongest.p:.2g}"
        + (f" ({strongest.worst})" if strongest.worst else ""),
        f"noise x {finding.finds:.3g} or less would be refuted with a probability of 99 %, at a level of "
        f"{level_of(finding.confidence):g}",
    ]
    if bound is None:
        how = [f"how much noise it holds cannot be told, and no bound follows, over {over}"]
    if not faithful:
        how.append(f"what was sent, or the client's model, does not come out again (relative difference {apart:.2g})")
        if other := other_conditions(run):
            how.append(f"the run was made with {other}: repeat the audit where that is the same")
    worst = max(run.record.ledger, key=lambda c: c.by_kind.get(kind, 0.0))
    return EpsilonAudit(
        test=TEST,
        kind=kind,
        threat=f"whoever sees the release: {', '.join(worst.observers.get(kind, ['server']))}",
        claim=claim,
        claim_epsilon=epsilon,
        ledger_epsilon=worst.by_kind.get(kind, math.inf),
        lower_bound=0.0 if bound is None else bound if verdict in ACCUSES else min(bound, epsilon),
        p_value=p,
        trials=finding.numbers,
        confidence=finding.confidence,
        delta=delta,
        verdict=verdict,
        method="chi-square and F tests of residuals",
        how="; ".join([*([wrong] if wrong else []), *how, *([note] if note else [])]),
        ceiling=math.inf,
        finds=finding.finds,
        seeks=SEEKS,
        tells_at=finding.tells_at if faithful or kind == TRAINING else 1.0,
    )


def _not_tried(run: RunFolder, kind: str, claim: str, reasons: list[str], confidence: float) -> EpsilonAudit:
    spent = max((c.by_kind.get(kind, 0.0) for c in run.record.ledger), default=0.0)
    policy = run.world.policies[kind]
    released = any(e.kind == kind for row in run.record.ledger for e in row.entries)
    none = f"{run.record.setting.method} released no {kind}"
    lossy = released and bool(reasons) and run.record.setting.compress is not None
    return EpsilonAudit(
        test=TEST,
        kind=kind,
        threat="nobody",
        claim=claim,
        claim_epsilon=spent if policy.epsilon is None else policy.epsilon,
        ledger_epsilon=spent,
        lower_bound=0.0,
        p_value=1.0,
        trials=0,
        confidence=confidence,
        delta=max((policy.delta_for(c.n) for c in run.record.ledger), default=0.0),
        verdict="cannot tell" if lossy else "not tried",
        method="none",
        how=(reasons[0] if reasons else "nothing protected came out again") if released else none,
        seeks=SEEKS if released else None,
    )
