"""One run, many canaries: a lower bound on the epsilon of everything that a threat saw, from one federated run.

The theorems (Steinke, Nasr and Jagielski 2023; Mahloujifar, Melis and Chaudhuri 2024) need a fair coin per canary,
independent of all others, and a number of guesses that was fixed before the scores were seen. Here a coin exchanges two
records: one of a pair is trained on, the other is not. That keeps n as it is, which the ledger takes for public; with
records in or out, n would tell how many are in, and given n the coins would no longer be independent.

Where the pairs come from:

- `--canaries M` in the run's setting: auxiliary records with random wrong labels, which nothing but training on them
  teaches. The coins were tossed when the data were dealt out.
- Otherwise the audit split itself. The members are a uniform draw of fixed size from a client's records, so single
  records are no independent coins. But match members with non-members at random: given the pairs that come out, and
  all other members, every choice of one member from each pair was equally likely. These are independent fair coins.
  Ordinary records are hard to tell apart, so this bound is weaker. Whoever uses the order of a release's rows knows
  more than neighbours may tell: the attack must not.

A guess says which record of a pair was trained on: the one with the higher score. Guesses are made where the scores
differ most; a tie counts as wrong. Their number follows from the number of pairs and from the claim (`best_guesses`),
unless it is given: both are known before any score is.

A pair is replace-one. Add-or-remove and zero-out are two steps of their own relation away, and so are their claims
(`steps` in fedaudit.epsilon.lower_bounds). The bound is about the whole view: it refutes a claim for the run, not one
for a kind.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedaudit.attack.attack_run import made
from fedaudit.attack.claims import Claims
from fedaudit.attack.scene import Attack, Scene
from fedaudit.epsilon.audit_result import AuditedClaim, held
from fedaudit.epsilon.lower_bounds import Bound, best_guesses, one_run_fdp, one_run_steinke
from fedaudit.errors import DataError, RunError, SettingError, ThreatError
from fedaudit.privacy.ledger import ClientLedger
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import generator, seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import EpsilonAudit, Guesses, save_audits
from fedaudit.runtime.task import compute
from fedaudit.runtime.world import Rows, World
from fedaudit.wire.transcript import Threat, TranscriptView

Claim = tuple[str, float, str]  # in words, epsilon, and the neighbouring relation that it is stated in
BOUNDS: dict[str, Callable[..., Bound]] = {"Steinke": one_run_steinke, "f-DP": one_run_fdp}


def audit_run(
    folder: Path | str,
    *,
    attack: str = "loss",
    threat: str = "server",
    clients: Sequence[int] | None = None,
    guesses: int | None = None,
    confidence: float = 0.95,
    watch: Watch | None = None,
) -> list[EpsilonAudit]:
    """Hold each claim for a run against what a membership attack guesses right of its canaries, by both bounds.

    The results are kept in the run folder.
    """
    begun = time.perf_counter()
    run = RunFolder(folder)
    if run.record.status != "done":
        raise RunError(f"The run in {folder} is not finished, so its ledger is open. Finish it with --resume.")
    parsed = Threat.parse(threat)
    for k in [*(clients or []), *([] if parsed.peer is None else [parsed.peer])]:
        if not 0 <= k < run.world.setting.clients:
            raise ThreatError(f"There is no client {k}; the run has {run.world.setting.clients}, numbered from 0.")
    name, attacker = made(attack)
    gaps, attacked = _gaps(run, name, attacker, parsed, clients, watch or unwatched)
    m = len(gaps)
    if guesses is not None and not 1 <= guesses <= m:
        raise SettingError(f"--guesses {guesses}: there are {m} pairs, so give a number from 1 to {m}.")
    ledger = [row for row in run.record.ledger if row.client in attacked]
    surest = gaps[gaps.abs().argsort(descending=True, stable=True)]
    audits = []
    for claim in _claims(ledger, run.record.models_covered):
        terms = _terms(claim, ledger, confidence)
        r = guesses or best_guesses(m, claim[1], *terms)
        v = int((surest[:r] > 0).sum())
        how = f"{v} of {r} guesses right on {m} pairs of {pairs_are(run.world)}, of {len(attacked)} clients"
        audits += [
            _verdict(
                f"one run, {name} by the {parsed}, {short}",
                parsed,
                bound(m, r, v, *terms),
                bound(m, r, r, *terms),
                claim,
                ledger,
                how,
                Guesses(bound=short, pairs=m, made=r, right=v, steps=terms[2]),
            )
            for short, bound in BOUNDS.items()
        ]
    save_audits(run.folder, run.record.transcript_digest, audits, time.perf_counter() - begun)
    return audits


def pairs_are(world: World) -> str:
    return "mislabelled canaries" if world.setting.canaries else "members and non-members"


def pairs(world: World, k: int) -> tuple[Rows, Rows]:
    """Records that client k trains on, and as many that it does not: a fair coin for each pair says which is which."""
    federation, shard = world.federation, world.federation.shards[k]
    if world.setting.canaries:
        inside, outside = shard.canaries.T
        return world._to_device(federation.rows(inside)), world._to_device(federation.rows(outside))
    (xm, ym), (xn, yn) = world.candidates(k), world.nonmembers(k)
    n = min(len(ym), len(yn))
    rng = generator(world.setting.seed, "scorer", "pairs", k)
    a, b = (torch.randperm(len(y), generator=rng)[:n].to(y.device) for y in (ym, yn))
    return (xm[a], ym[a]), (xn[b], yn[b])


def _gaps(
    run: RunFolder, name: str, attack: Attack, threat: Threat, clients: Sequence[int] | None, watch: Watch
) -> tuple[Tensor, list[int]]:
    """By how much each trained-on record outscores the other of its pair, over all clients that can be attacked."""
    world, view = run.world, TranscriptView(run.transcript, threat)
    took_part = {row.client for row in run.record.ledger}
    targets = [k for k in (range(world.setting.clients) if clients is None else clients) if k != threat.peer]
    gaps: list[Tensor] = []
    attacked: list[int] = []
    reason = f"the {threat} has nobody to attack but itself"
    with compute(world):
        for number, k in enumerate(targets):
            watch(number, len(targets), f"{name} on client {k}")
            if k not in took_part:
                reason = f"client {k} was never asked"
                continue
            (xi, yi), (xo, yo) = pairs(world, k)
            m = len(yi)
            if m == 0:
                reason = f"client {k} has no pair to guess on: run with --canaries, or with --holdout above 0"
                continue
            order = torch.randperm(2 * m, generator=generator(world.setting.seed, "scorer", "order", k))
            place = order.to(world.device)
            scene = Scene(run, view, k, torch.cat([xi, xo])[place], torch.cat([yi, yo])[place])
            if cannot := attack.cannot(scene):
                reason = cannot
                continue
            with seeded("attack", name, k, device=world.device):
                claims = attack.run(scene)
            if not isinstance(claims, Claims):
                raise SettingError(f"--attack {name}: it tells no members from non-members. Choose one that does.")
            scores = torch.empty(2 * m, dtype=torch.float64)
            scores[order] = claims.scores.detach().double().cpu()
            gaps.append(scores[:m] - scores[m:])
            attacked.append(k)
    if not gaps:
        raise DataError(f"No client can be audited: {reason}.")
    return torch.cat(gaps), attacked


def _claims(ledger: list[ClientLedger], covered: bool) -> list[Claim]:
    """Return what is promised for the run: the largest epsilon that a policy asks for, read as the run's (as papers
    state it), and what the ledger composes, unless more was published than the ledger covers."""
    claims: list[Claim] = []
    stated = max((row.claim for row in ledger if row.claim is not None), default=None)
    if stated is not None:
        relations = {e.relation for row in ledger for e in row.entries if e.claim == stated}
        claims.append(("the run, as asked for", stated, _weakest(relations)))
    totals = [row.epsilon for row in ledger]
    if covered and all(total is not None and math.isfinite(total) for total in totals):
        relations = {r for row in ledger for r, total in row.by_relation.items() if total.epsilon > 0}
        claims.append(("the run, by the ledger", max(t or 0.0 for t in totals), _weakest(relations)))
    return claims or [("none: something is unprotected", math.inf, "replace-one")]


def _weakest(relations: set[str]) -> str:
    """Return, of several relations, one that is two steps from a replacement, if there is one: then less is refuted."""
    return next((r for r in sorted(relations) if r not in ("replace-one", "any")), "replace-one")


def _terms(claim: Claim, ledger: list[ClientLedger], confidence: float) -> tuple[float, float, int]:
    """delta, confidence, and how many steps of the claim's relation a pair is apart."""
    return max(row.delta for row in ledger), confidence, 1 if claim[2] == "replace-one" else 2


def _verdict(
    test: str, threat: Threat, bound: Bound, best: Bound, claim: Claim, ledger: list[ClientLedger], how: str,
    guesses: Guesses,
) -> EpsilonAudit:  # fmt: skip
    """`best`: the bound if every guess had been right. A claim that it does not refute could not have been refuted."""
    words, epsilon, relation = claim
    totals = [row.epsilon for row in ledger]
    spent = None if None in totals else max(t for t in totals if t is not None)
    return held(
        AuditedClaim("run", str(threat), words, epsilon, spent), test, bound, best.epsilon,
        f"{how}; so many guesses can show {best.epsilon:.3g}; {relation}",
        tells_at=best.p_value(epsilon) if math.isfinite(epsilon) else None, guesses=guesses,
    )  # fmt: skip
