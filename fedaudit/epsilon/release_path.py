"""Release-path canaries: what a mechanism's noise really hides, tried on the release itself, with no retraining.

Two neighbouring data sets of one client differ in one whole record. The method's own function gives the release of
each (with the client's trained model; `fit` and `optimise` do nothing), and the real path (clipping, noise,
quantisation, bytes) is run many times on both. Each outcome is projected on the known difference of the two noise-free
releases, scaled by the noise: the most powerful statistic between two Gaussians. `epsilon.from_scores` turns the
projections into a lower bound on epsilon, corrected for the choice of a threshold.

The pair is the worst that was found, by how far apart the noise-free releases are: of the client's own records,
auxiliary images and extreme ones (black, white, inverted, ...), and of what the clipping norm allows a record to do,
over all clients. No noise of the trials is looked at for that, so the choice costs no confidence.

Each pair is held against its claim twice: without taking any distribution for granted, and (where the noise is not
rounded away) as the Gaussians that the claim says they are, which finds more. Both rows say what they could have found,
and "cannot tell" where not even half of the promised noise would have been.

What one record can do, by how a release depends on records (fedaudit.privacy.sensitivity):

    record, class, histogram   a record is swapped, as above. A class mean's claim is "given the classes and their
                               counts", so its records keep their label; a histogram's change it. Of clipped records
                               also the two ends of the clipping ball: a row C u against -C u, and two class means
                               each 2 C / (N_c - 1) apart, which is what the noise was scaled for
    all, range                 the claim is that a record may move every row across its ball (every pixel across its
                               range). Which record does that only retraining can tell; the path is run on two values
                               at opposite ends
    zero-out                   the record's row against a row of zeros; other dependences have no such record

Weights under DP-SGD are made in training, and cannot be tried without repeating it: `epsilon.one_run` is for them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedaudit.epsilon.audit_result import AuditedClaim, held_path
from fedaudit.epsilon.finished_run import closed_run
from fedaudit.epsilon.lower_bounds import Bound, from_scores, from_scores_exactly, gdp_mean_shift
from fedaudit.errors import SettingError
from fedaudit.privacy.mechanism import prepare, protect_field
from fedaudit.privacy.mechanisms.base import Mechanism, Prepared, mechanism_of
from fedaudit.privacy.policy import TRAINING, Policy
from fedaudit.privacy.sensitivity import Context, dependence
from fedaudit.privacy.trees import leaves_of, rebuilt
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import generator, seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.method import find_function
from fedaudit.runtime.party import Client
from fedaudit.runtime.run_record import EpsilonAudit, save_audits
from fedaudit.runtime.site import Rows
from fedaudit.runtime.task import compute, open_client
from fedaudit.runtime.world import World
from fedaudit.shape import Shape
from fedaudit.training.fit import Fitted
from fedaudit.wire.codec import decode, decode_tree, digest_of, encode, encode_tree
from fedaudit.wire.message import Declared, Down, Up, class_named
from fedaudit.wire.transcript import TranscriptEntry

OWN, AUXILIARY = 8, 8  # candidates of each sort, beside the extreme images
TEST = "release path"
GAUSSIAN = "release path, Gaussian"


class Rehearsal(Client):
    """A client with chosen records that trains nothing, and keeps what it would release, before any protection."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.raw: dict[str, Any] = {}  # "Message.field": value

    @classmethod
    def of(cls, world: World, k: int, t: int, ask: int, state: bytes, rows: Rows) -> Rehearsal:
        site, meter = world.site(k, rows), Meter(f"client {k}", t, world.device)
        return open_client(site, t, ask, meter, state, cls=cls)

    def fit(self, *_: Any, **__: Any) -> Fitted:
        return Fitted(0, 0, math.nan)

    def optimise(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        return {}

    def protect(self, message: type[Up], field: str, value: Any) -> Any:
        self.raw[f"{message.__name__}.{field}"] = value
        return value

    def derive(self, make: Callable[..., Any], released: Any, **numbers: float) -> Any:
        return make(released, **numbers)

    @property
    def means(self) -> dict[str, tuple[float, int]]:
        """Return, for each class mean that was made, by its digest: clipping norm and number of records."""
        return self._context.means

    def context(self, *key: object) -> Context:
        """The mechanism's, with a noise of its own and nothing released yet; nobody asks here what can be traced."""
        return dataclasses.replace(self._context, key=(*self._context.key, *key), done={}, spent={}, provenance=None)


@dataclass(frozen=True)
class Side:
    """One of two neighbours: who releases, and the value before any protection."""

    client: Rehearsal
    value: Any


@dataclass(frozen=True)
class Tried:
    """A protected field of a client's message, where a run last sent it."""

    sent: TranscriptEntry
    down: TranscriptEntry  # the message that it answers
    message: type[Up]
    name: str
    declared: Declared
    policy: Policy

    @property
    def where(self) -> str:
        return f"{self.message.__name__}.{self.name}"

    @property
    def how(self) -> Mechanism:
        return mechanism_of(self.policy)


@dataclass(frozen=True)
class Pair:
    """Two neighbours, and the statistic that tells their releases apart."""

    release: Tried
    sides: tuple[Side, Side]
    index: Tensor  # entries of the release, flattened, that differ
    weights: Tensor
    distance: float  # of the noise-free releases, in standard deviations of the noise
    words: str

    @property
    def client(self) -> int:
        return self.release.sent.client

    def claim(self) -> tuple[float, float]:
        """The epsilon that the policy promises for one release, and its delta."""
        ready = _prepared(self.release, self.sides[0])
        return self.release.how.claim(self.release.policy, ready), ready.delta

    def outcome(self, side: int, trial: int) -> float:
        """The real path, once: mechanism, quantisation, bytes; and the statistic of what arrives. Compression is left
        out: it works on what was released, and could only hide a part of what is found here."""
        release, of = self.release, self.sides[side]
        released = protect_field(release.message, release.name, of.value, of.client.context(TEST, side, trial))
        blob = encode_tree(released, release.where, release.declared.dtype, release.declared.finite)
        arrived = torch.cat([leaf.reshape(-1).double() for leaf in leaves_of(decode_tree(blob), release.where)])
        return float(arrived[self.index] @ self.weights)


def audit_releases(
    folder: Path | str,
    *,
    kinds: Sequence[str] | None = None,
    clients: Sequence[int] | None = None,
    trials: int = 1000,
    confidence: float = 0.95,
    watch: Watch | None = None,
) -> list[EpsilonAudit]:
    """Hold the claim of each protected kind of a run against a lower bound from `trials` releases of each neighbour.

    The results are kept in the run folder. What could not be tried is among them, with the reason.
    """
    begun = time.perf_counter()
    if trials < 2:
        raise SettingError(f"--trials {trials}: a bound needs at least 2 releases of each neighbour; try 1000.")
    run = closed_run(folder, kinds, clients, "there is no claim to try.")
    world = run.world
    audits: list[EpsilonAudit] = []
    with compute(world):
        for kind in kinds or sorted(world.policies):
            audits += _audit_kind(run, kind, clients, trials, confidence, watch or unwatched)
    save_audits(run.folder, run.record.transcript_digest, audits, time.perf_counter() - begun)
    return audits


def _audit_kind(
    run: RunFolder, kind: str, clients: Sequence[int] | None, trials: int, confidence: float, watch: Watch
) -> list[EpsilonAudit]:
    if kind == TRAINING:
        reason = (
            "what DP-SGD protects is made in training, which this does not repeat; `fedaudit epsilon audit` is for it"
        )
        return [_not_tried(run, kind, "training", reason, confidence)]
    by_field: dict[str, list[Tried]] = {}
    for release in released_fields(run, kind, clients):
        by_field.setdefault(release.where, []).append(release)
    if by_field and (reason_why := mechanism_of(run.world.policies[kind]).path) is not None:
        return [_not_tried(run, kind, where, reason_why, confidence) for where in by_field]
    if not by_field:
        return [_not_tried(run, kind, kind, f"{run.record.setting.method} released no {kind}", confidence)]
    return [row for found in by_field.values() for row in _audit_field(run, kind, found, trials, confidence, watch)]


def _audit_field(
    run: RunFolder, kind: str, found: list[Tried], trials: int, confidence: float, watch: Watch
) -> list[EpsilonAudit]:
    pairs: list[Pair] = []
    reasons: list[str] = []
    for number, release in enumerate(found):
        watch(number, len(found), f"{release.where}: worst pair of client {release.sent.client}")
        made = worst_pair(run, release)
        (pairs if isinstance(made, Pair) else reasons).append(made)  # type: ignore[arg-type]
    if not pairs:
        return [_not_tried(run, kind, found[0].where, reasons[0], confidence)]
    worst = max(pairs, key=lambda pair: pair.distance)
    claim, delta = worst.claim()
    scores = np.empty((2, trials))
    for j in range(trials):
        if j % 50 == 0:
            watch(j, trials, f"{worst.release.where}: releases of client {worst.client}")
        scores[:, j] = [worst.outcome(side, j) for side in (0, 1)]
    member = np.repeat([True, False], trials)
    how = (
        f"{worst.words}; client {worst.client}, round {worst.release.sent.round}; noise-free releases "
        f"{worst.distance:.3g} standard deviations of the noise apart"
    )
    tests: dict[str, Callable[..., Bound]] = {TEST: from_scores_exactly}
    if worst.release.how.normal and worst.release.declared.dtype != "uint8":
        tests[GAUSSIAN] = gdp_mean_shift
    ledger = next(c for c in run.record.ledger if c.client == worst.client)
    place = AuditedClaim(
        kind=kind,
        threat=f"whoever sees the release: {', '.join(ledger.observers.get(kind, ['server']))}",
        claim=f"{worst.release.where}, one release",
        epsilon=claim,
        ledger=ledger.by_kind.get(kind, math.inf),
    )
    return [
        held_path(
            place,
            test,
            bound,
            scores.ravel(),
            member,
            worst.distance,
            delta,
            confidence,
            how,
            worst.release.how.quantiles,
            from_scores if bound is from_scores_exactly else None,
        )
        for test, bound in tests.items()
    ]


def _not_tried(run: RunFolder, kind: str, what: str, reason: str, confidence: float) -> EpsilonAudit:
    policy, rows = run.world.policies[kind], run.record.ledger
    spent = max((c.by_kind.get(kind, 0.0) for c in rows), default=0.0)
    return EpsilonAudit(
        test=TEST,
        kind=kind,
        threat="nobody",
        claim=f"{what}, one release" if kind != TRAINING else "training, all rounds",
        claim_epsilon=spent if policy.epsilon is None else policy.epsilon,
        ledger_epsilon=spent,
        lower_bound=0.0,
        p_value=1.0,
        trials=0,
        confidence=confidence,
        delta=max((policy.delta_for(c.n) for c in rows), default=0.0),
        verdict="not tried",
        method="none",
        how=reason,
    )


def released_fields(run: RunFolder, kind: str, clients: Sequence[int] | None) -> Iterator[Tried]:
    """Each client's last release of each field of a kind, by ascending client."""
    entries = list(run.transcript.entries())
    downs = {(e.client, e.round, e.ask): e for e in entries if e.direction == "down"}
    last: dict[tuple[int, str], tuple[TranscriptEntry, str]] = {}
    for entry in entries:
        if entry.direction == "up" and (clients is None or entry.client in clients):
            for name, facts in entry.fields.items():
                if facts.kind == kind:
                    last[entry.client, f"{entry.message}.{name}"] = entry, name
    policy = run.world.policies[kind]
    for _, (entry, name) in sorted(last.items(), key=lambda item: item[0]):
        message = cast(type[Up], class_named(entry.class_id))
        declared = message.declared()[name]
        assert declared is not None  # an Up message declares every field
        yield Tried(entry, downs[entry.client, entry.round, entry.ask], message, name, declared, policy)


# --- the worst pair ----------------------------------------------------------------------------------------------


def worst_pair(run: RunFolder, release: Tried) -> Pair | str:
    """The pair of neighbours whose noise-free releases differ most, of those tried; or why there is none."""
    k, depends = release.sent.client, dependence(release.declared)
    state = run.client_state(k)
    assert state is not None  # it has sent something
    if release.declared.via == "released":
        return f"{release.where} follows from what was released before, which is tried itself"
    if depends in ("all", "range"):
        return _opposite_ends(run.world, release, state, depends)
    if release.policy.relation == "zero-out" and depends != "record":
        return f"{release.where}: no record stands for the absence of one where a release depends by {depends}"
    try:
        natural = _swap(run.world, release, state, depends)
        ends = _clipped_ends(run.world, release, state, depends)
        pairs = [pair for pair in (natural, ends) if isinstance(pair, Pair)]
        return max(pairs, key=lambda pair: pair.distance) if pairs else natural
    except Exception as e:  # noqa: BLE001 (somebody's method may not do without its training: the audit says so)
        return f"{release.where} could not be rehearsed without training: {type(e).__name__}: {e}"


def _opposite_ends(world: World, release: Tried, state: bytes, depends: str) -> Pair:
    """Two values of the released shape at opposite ends of what the claim allows one record to change."""
    client = Rehearsal.of(
        world, release.sent.client, release.sent.round, release.sent.ask, state, world.members(release.sent.client)
    )
    template = release.sent[release.name]
    C = release.policy.clip or 1.0
    ends = [
        C * release.how.direction(leaf[0] if leaf.dim() > 1 else leaf).expand_as(leaf)
        if depends == "all" and leaf.numel()
        else torch.ones_like(leaf)
        for leaf in leaves_of(template, release.where)
    ]
    sides = [Side(client, rebuilt(template, iter([sign * end for end in ends]))) for sign in (1, -1)]
    words = "values at opposite ends of the clipping ball" if depends == "all" else "all pixels at 1, and all at -1"
    return _pair(release, sides[0], sides[1], f"{words} (nothing shows that a record reaches them)")


def _clipped_ends(world: World, release: Tried, state: bytes, depends: str) -> Pair | None:
    """Return the ends of what the clipping norm C allows one record to do, for which the noise was scaled; None without
    C."""
    policy = release.policy
    C = release.how.clip(policy)
    if depends not in ("record", "class") or C is None:
        return None
    side = _rehearse(world, release, state, world.members(release.sent.client))
    leaves = leaves_of(side.value, release.where)
    ends: list[tuple[Tensor, Tensor]] = []
    if depends == "record":
        for leaf in leaves:
            a, b = leaf.clone(), leaf.clone()
            u = release.how.direction(leaf[0])
            a[0], b[0] = C * u, 0 * u if policy.relation == "zero-out" else -C * u
            ends.append((a, b))
        words = (
            f"a row at one end of the clipping ball against {'zeros' if policy.relation == 'zero-out' else 'the other'}"
        )
    else:
        means = side.client.means
        counts = [means[digest_of(leaf)][1] for leaf in leaves]
        moved = sorted(range(len(leaves)), key=lambda i: -counts[i])[:2]
        for i, (leaf, n) in enumerate(zip(leaves, counts, strict=True)):
            step = release.how.direction(leaf) * (C / max(n - 1, 1) if i in moved else 0.0)
            ends.append((leaf + step, leaf - step))
            for end in ends[-1]:
                means[digest_of(end)] = (C, n)
        words = f"{len(moved)} class means, each moved by what one record may do to it"
    sides = [Side(side.client, rebuilt(side.value, iter([pair[i] for pair in ends]))) for i in (0, 1)]
    return _pair(release, sides[0], sides[1], f"{words} (nothing shows that a record reaches it)")


def _swap(world: World, release: Tried, state: bytes, depends: str) -> Pair | str:
    k = release.sent.client
    x, y = world.members(k)
    names, images, labels, at = _candidates(world, k)
    base = _rehearse(world, release, state, (x, y))
    reference, sigmas, facts = _noise_free(release, base)
    found: list[tuple[str, Side, Tensor]] = []
    for name, image, label in zip(names, images, labels, strict=True):
        rows = x.clone(), y.clone()
        rows[0][at], rows[1][at] = image, label
        side = _rehearse(world, release, state, rows)
        leaves, _, others = _noise_free(release, side)
        if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in reference] or (
            depends == "class" and others != facts  # the claim is "given the classes and their counts"
        ):
            continue
        scaled = [(a - b).double() / s for a, b, s in zip(leaves, reference, sigmas, strict=True)]
        found.append((name, side, torch.cat([t.reshape(-1) for t in scaled]).to_sparse()))
    if release.policy.relation == "zero-out":
        return _against_zeros(release, found, at)
    apart = [(_norm(a[2] - b[2]), i, j) for i, a in enumerate(found) for j, b in enumerate(found) if i < j]
    distance, i, j = max(apart, default=(0.0, 0, 0))
    if distance == 0:
        return f"no record changes {release.where} unless the model is trained again"
    return _pair(release, found[i][1], found[j][1], f"the record {found[i][0]} against {found[j][0]}")


def _against_zeros(release: Tried, found: list[tuple[str, Side, Tensor]], at: int) -> Pair | str:
    pairs = []
    for name, side, _ in found:
        leaves = [leaf.clone() for leaf in leaves_of(side.value, release.where)]
        for leaf in leaves:
            leaf[at] = 0
        zeroed = Side(side.client, rebuilt(side.value, iter(leaves)))
        pairs.append(_pair(release, side, zeroed, f"the record {name} against a row of zeros"))
    return max(pairs, key=lambda pair: pair.distance)


def _pair(release: Tried, one: Side, other: Side, words: str) -> Pair:
    """The statistic: the difference of the noise-free releases over the variance of the noise, entry by entry."""
    (a, sigmas, _), (b, _, _) = _noise_free(release, one), _noise_free(release, other)
    difference = torch.cat([(p - q).double().reshape(-1) for p, q in zip(a, b, strict=True)]).cpu()
    sigma = torch.cat([torch.full((leaf.numel(),), s, dtype=torch.float64) for leaf, s in zip(a, sigmas, strict=True)])
    index = difference.nonzero()[:, 0]
    weights = difference[index] / sigma[index] ** 2
    distance = float((difference[index] / sigma[index]).norm())
    return Pair(release, (one, other), index, weights, distance, words)


def _norm(difference: Tensor) -> float:
    return float(difference.coalesce().values().norm())


def _noise_free(release: Tried, side: Side) -> tuple[list[Tensor], list[float], list[float]]:
    """The release as it would be without noise, the noise's standard deviation, and the sensitivity, by tensor."""
    ready = _prepared(release, side)
    return [leaf.detach() for leaf in ready.leaves], ready.sigmas, ready.sensitivities


def _prepared(release: Tried, side: Side) -> Prepared:
    """The step that the release itself takes before its noise."""
    context = side.client.context("noise-free")
    return prepare(side.value, release.where, release.declared, release.policy, context)


def _rehearse(world: World, release: Tried, state: bytes, rows: Rows) -> Side:
    """The method's own function on these records, up to the point where the mechanism would take over."""
    sent = release.sent
    client = Rehearsal.of(world, sent.client, sent.round, sent.ask, state, rows)
    message = decode(encode(release.down.record()), Down, device=world.device)
    with seeded(world.setting.seed, f"client {sent.client}", sent.round, sent.ask, device=world.device):
        reply = find_function(world.method, sent.row["fn"])(client, message)
    value = client.raw.get(release.where)
    return Side(client, getattr(reply, release.name) if value is None else value)


def _candidates(world: World, k: int) -> tuple[list[str], Tensor, list[int], int]:
    """Records to try in the place `at` of client k: names, images, labels. All but the last have the label of the
    client's largest class, which is that of the record there."""
    x, y = world.members(k)
    aux = world._to_device(world.federation.auxiliary())[0]
    counts = torch.bincount(y, minlength=world.classes)
    label = int(counts.argmax())
    at = int((y == label).nonzero()[0])
    counts[label] = -1
    rng = generator(world.setting.seed, TEST, k)
    own = torch.randperm(len(x), generator=rng)[:OWN].tolist()
    others = torch.randperm(len(aux), generator=rng)[:AUXILIARY].tolist()
    like = x[at]
    images = {
        **{f"of the client ({i})": x[i] for i in dict.fromkeys([at, *own])},
        **{f"of the auxiliary set ({i})": aux[i] for i in others},
        **_extremes(like, world.shape, rng),
    }
    names = [*images, "with another label"]
    return names, torch.stack([*images.values(), like]), [label] * len(images) + [int(counts.argmax())], at


FAR = 10.0  # times a row: what clipping has to hold back


def _extremes(like: Tensor, shape: Shape, rng: torch.Generator) -> dict[str, Tensor]:
    """Records that no data set has, of the kind that `like` is of."""
    random = torch.rand(like.shape, generator=rng).to(like.device)
    if shape.kind == "tokens":
        return {
            "all padding": torch.zeros_like(like),
            "all the last token": torch.full_like(like, shape.tokens - 1),
            "reversed": like.flip(0),
            "random tokens": (random * shape.tokens).long().clamp(max=shape.tokens - 1),
        }
    if shape.kind == "rows":
        return {
            "all zero": torch.zeros_like(like),
            "negated": -like,
            "far out": FAR * like,
            "far out, negated": -FAR * like,
            "random signs": ((random > 0.5) * 2.0 - 1) * like.abs().max(),
        }
    rows, columns = torch.meshgrid(*(torch.arange(n, device=like.device) for n in like.shape[1:]), indexing="ij")
    return {
        "all black": torch.full_like(like, -1),
        "all white": torch.ones_like(like),
        "all grey": torch.zeros_like(like),
        "inverted": -like,
        "chequered": ((rows + columns) % 2 * 2.0 - 1).expand_as(like),
        "random black and white": (random > 0.5) * 2.0 - 1,
    }
