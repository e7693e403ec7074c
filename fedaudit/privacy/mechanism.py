"""The mechanism: it protects a release on the client, by clipping and Gaussian noise as the policy says.

The order is mechanism, quantisation (in the codec), bytes. Each private field makes an entry for the ledger, also if
nothing protected it: then its noise multiplier is 0 and its epsilon infinite.

The table says how much one record can change a release (privacy rule 5), under replace-one and zero-out. C is the
clipping norm:

    record     one row per record                  2 C and C    (sqrt(m) times it if a record has m rows)
    all        R rows that depend on all records   sqrt(R) 2 C  (both: a record that is zeroed can move such a row
               anywhere in its ball)
    class      class means of clipped rows         sqrt(2) 2 C / (N_c - 1), for class c, and half of it: a record that
               changes its label leaves one class (of N_c) and joins another, and both means move. The set of classes,
               and N_c, which scales the noise, are a release of their own that no noise on the means protects.
               sqrt(m) times it for m tables of means that all contain the record
    histogram  label counts                        sqrt(2) and 1: each record counts once
               other counts                        sqrt(counts) (both): a record may be in all of them, or in none
    range      pixels in [-1, 1]                   sqrt(pixels) 2 (both)
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.calibration import calibrate
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.policy import TRAINING, Policy
from fedaudit.privacy.provenance import Provenance
from fedaudit.rng import generator
from fedaudit.wire.codec import digest_of
from fedaudit.wire.message import Declared, State, Up
from fedaudit.wire.release import Protection


def _no_model(x: Tensor) -> Tensor:
    raise NotApplicable("There is no model here whose logits could be computed. Use clip=C.")


@dataclass
class Context:
    """The mechanism's knowledge of the client whose release it protects."""

    key: tuple[object, ...]  # (seed, client, round, ask, attempt): the noise follows from it and the field
    n: int
    policies: Mapping[str, Policy]
    releases: Callable[[str], int | None]  # planned releases of a kind over the whole run
    images: Callable[[], Tensor]
    encode: Callable[[Tensor], Tensor]
    predict: Callable[[Tensor], Tensor] = _no_model
    plain_fits: int = 0  # all trainings on private records so far that were not DP
    dirty: bool = False  # whether memory holds unprotected values that a task wrote after it read the records
    provenance: Provenance | None = None
    means: dict[str, tuple[float, int]] = field(default_factory=dict)  # digest of a class mean: clipping norm, N_c
    tables: dict[str, int] = field(default_factory=dict)  # digest of a class mean: number of the call that made it
    done: dict[str, tuple[str, list[LedgerEntry]]] = field(default_factory=dict)  # field: digest as released, entries
    spent: dict[str, int] = field(default_factory=dict)  # releases of each kind so far, over all rounds
    absent: Callable[[], frozenset[str]] = frozenset  # fields that are None by the setting, whatever the records are


def protect_field(cls: type[Up], name: str, value: Any, context: Context) -> Any:
    """Protect one field ahead of the reply and return it, so that a task can compute on the value others will see."""
    declared = cls.declared().get(name)
    if declared is None or declared.role != "private":
        raise PrivacyError(f"{cls.__name__}.{name} is not a private field. Give the name of one that is.")
    policy = context.policies.get(declared.kind or "")
    where = f"{cls.__name__}.{name}"
    if where in context.done:
        raise PrivacyError(
            f"{where} was protected before in this task: the same noise on two values hides neither. Protect it once."
        )
    released, entries = (
        (value, [_unprotected(value, where, declared, context)])
        if policy is None
        else _release(value, where, declared, policy, context)
    )
    context.done[where] = (digest_of(released), entries)
    if context.provenance is not None:
        context.provenance.released(name, released)
    return released


def protect(reply: Up, context: Context) -> tuple[Up, dict[str, Protection], list[LedgerEntry]]:
    """Return the reply as it may leave the client, the public parameters of its protection, and the ledger entries."""
    changes: dict[str, Any] = {}
    protection: dict[str, Protection] = {}
    entries: list[LedgerEntry] = []
    sent = {f"{type(reply).__name__}.{name}" for name in reply.declared()}
    for where, (_, of_field) in context.done.items():
        if where not in sent:  # the reply may still hold values that were computed from it
            entries += of_field
    for name, declared in reply.declared().items():
        where = f"{type(reply).__name__}.{name}"
        value = getattr(reply, name)
        if declared is None or declared.role != "private":
            if context.policies and not _traced(value, where, context):
                entries.append(LedgerEntry.unprotected(where, "public", UNTRACED))
            continue
        if value is None and where in context.absent():
            continue  # known before the run, so nothing is released. Any other None is billed like a value
        policy = context.policies.get(declared.kind or "")
        early = context.done.get(where)
        if early is not None and early[0] == digest_of(value):
            of_field = early[1]
        elif early is not None:
            raise PrivacyError(
                f"{where} was protected by client.protect, but another value is in the reply. Put the protected value "
                "into the reply, unchanged."
            )
        elif policy is not None:
            changes[name], of_field = _release(value, where, declared, policy, context)
        else:
            of_field = [_unprotected(value, where, declared, context)]
        entries += of_field
        if policy is not None and of_field:
            protection[name] = of_field[0].public()
    return (dataclasses.replace(reply, **changes) if changes else reply), protection, entries


def _unprotected(value: Any, where: str, declared: Declared, context: Context) -> LedgerEntry:
    """Return the entry of a release without a policy.

    It is free only if it follows from protected values, or is the same for all neighbours.
    """
    kind = _kind(declared)
    if kind == "count" and type(value) is int and value == context.n:
        # n is the same for all neighbours under replace-one and zero-out. Under add-or-remove it counts as known.
        return LedgerEntry.free(where, kind, "n is public")
    if declared.via == "released" and _follows(value, context):
        return LedgerEntry.free(where, kind, "derived from what was released", "post-processing")
    if declared.via == "model" and TRAINING in context.policies and _paid(value, where, context):
        return LedgerEntry.free(where, kind, "given the privacy of training", "post-processing of DP-SGD")
    if declared.via in ("model", "released") and context.policies and not _traced(value, where, context):
        return LedgerEntry.unprotected(where, kind, UNTRACED)
    return LedgerEntry.unprotected(where, kind)


def _kind(declared: Declared) -> str:
    assert declared.kind is not None  # every private field has one
    return declared.kind


UNTRACED = "computed in a task that read the records, or holds more of them than was paid for, and traced to nothing"


def _unpaid(context: Context) -> bool:
    """Return whether the client's model or memory hold more of the records than was paid for.

    That counts even if this task does not read the records.
    """
    return context.dirty or context.plain_fits > 0


def _traced(value: Any, where: str, context: Context) -> bool:
    return context.provenance is None or context.provenance.traced(value, where, _unpaid(context))


def _paid(value: Any, where: str, context: Context) -> bool:
    """Return whether a value follows from a model that only private fits have trained on the records."""
    return context.spent.get(TRAINING, 0) > 0 and not context.plain_fits and _traced(value, where, context)


def _follows(value: Any, context: Context) -> bool:
    """Return whether a value follows from released values: the harness saw it, or the task knew nothing else."""
    seen = context.provenance
    return seen is None or seen.is_derived(value) or not (seen.looked or _unpaid(context))


# --- the Gaussian mechanism ------------------------------------------------------------------------------------


def _release(
    value: Any, where: str, declared: Declared, policy: Policy, context: Context
) -> tuple[Any, list[LedgerEntry]]:
    leaves = leaves_of(value, where)
    ready = prepare(value, where, declared, policy, context)
    if policy.mechanism == "pure-noise":
        noisy = with_noise(ready, where, declared, policy, context)
        entry = LedgerEntry.free(where, _kind(declared), "the size only", "pure-noise")
        entry.cosine = _cosine(leaves, noisy)
        return rebuilt(value, iter(noisy)), [entry, *_structure(value, where, declared, context)]
    noisy = with_noise(ready, where, declared, policy, context)
    how, largest = ready.bounded, max(ready.sensitivities, default=0.0)
    entry = LedgerEntry(
        field=where,
        kind=_kind(declared),
        mechanism="gaussian" if how.guaranteed else "gaussian, heuristic sensitivity",
        noise_multiplier=ready.multiplier if how.guaranteed else 0.0,
        relation=how.relation,
        sigma=ready.multiplier * largest,
        sensitivity=largest,
        clip=how.clip,
        condition=how.condition,
        delta=ready.delta,
        claim=policy.epsilon,
        cosine=_cosine(leaves, noisy),
    )
    return rebuilt(value, iter(noisy)), [entry, *_structure(value, where, declared, context)]


@dataclass(frozen=True)
class Bounding:
    """The way in which the values of a release were bounded, for the ledger."""

    relation: str
    clip: float | None = None
    condition: str | None = None
    guaranteed: bool = True  # False: the bound holds for no neighbouring data set


@dataclass(frozen=True)
class Prepared:
    """A release before its noise: the values that noise is added to, and the amount of noise."""

    leaves: list[Tensor]  # bounded
    sensitivities: list[float]  # of each leaf
    multiplier: float  # sigma / sensitivity
    delta: float
    bounded: Bounding

    @property
    def sigmas(self) -> list[float]:
        return [self.multiplier * s for s in self.sensitivities]


def prepare(value: Any, where: str, declared: Declared, policy: Policy, context: Context) -> Prepared:
    """Check and bound a release and return it ready for the noise. The release and its audit both begin here."""
    leaves = leaves_of(value, where)
    for leaf in leaves:
        if not leaf.is_floating_point():
            raise NotApplicable(
                f"{where} is {leaf.dtype}: Gaussian noise needs floating-point numbers. Send floats or drop the policy."
            )
        if not bool(torch.isfinite(leaf).all()):
            raise PrivacyError(
                f"{where} holds NaN or infinity before any noise. Training has probably diverged: lower the learning "
                "rate."
            )
    delta = policy.delta_for(context.n)
    if policy.mechanism == "pure-noise":  # the value is not used: noise of deviation 1 takes its place
        return Prepared(leaves, [1.0] * len(leaves), 1.0, delta, Bounding("any"))
    if dependence(declared) == "record" and any(len(leaf) > context.n for leaf in leaves):
        raise PrivacyError(f"{where} has more rows than the client has records ({context.n}). Send one row per record.")
    bounded, sensitivities, how = _bounded(leaves, where, declared, policy, context)
    return Prepared(bounded, sensitivities, _multiplier(policy, delta, declared, where, context), delta, how)


def with_noise(ready: Prepared, where: str, declared: Declared, policy: Policy, context: Context) -> list[Tensor]:
    """Return the leaves of a release with noise. The same release always gets the same noise."""
    if policy.mechanism == "pure-noise":
        return [_noise(leaf, 1.0, policy, (*context.key, where, i)) for i, leaf in enumerate(ready.leaves)]
    noisy = [
        # In place: one pass to draw the noise, one addition.
        _noise(leaf, sigma, policy, (*context.key, where, i)).add_(leaf)
        for i, (leaf, sigma) in enumerate(zip(ready.leaves, ready.sigmas, strict=True))
    ]
    if declared.dtype == "uint8":
        noisy = [leaf.clamp_(-1, 1) for leaf in noisy]  # the range of uint8 on the wire; this is post-processing
    return noisy


def _structure(value: Any, where: str, declared: Declared, context: Context) -> list[LedgerEntry]:
    """Return entries for what noise on the numbers does not hide: the keys that the client's data chose, and counts."""
    if dependence(declared) == "record" and context.provenance is not None:
        lengths = {len(leaf) for leaf in leaves_of(value, where)} - {context.n}
        if not all(context.provenance.is_known(length) for length in lengths):
            condition = "how many records it is of, where that is neither all of them nor a hyper-parameter"
            return [LedgerEntry.unprotected(f"{where} (length)", _kind(declared), condition)]
    by_class = dependence(declared) == "class"
    if not by_class and not (declared.via == "data" and isinstance(value, Mapping) and not isinstance(value, State)):
        return []
    condition = "which classes there are" + (", and the noise scaled by their counts" if by_class else "")
    return [LedgerEntry.unprotected(f"{where} (classes)", "label_counts", condition)]


def _multiplier(policy: Policy, delta: float, declared: Declared, where: str, context: Context) -> float:
    """Return sigma / sensitivity, and count the release if the calibration is `total`."""
    if policy.noise_multiplier is not None:
        return policy.noise_multiplier
    assert policy.epsilon is not None  # the policy was checked when it was read
    releases = 1
    if policy.calibration == "total":
        planned = policy.releases or context.releases(declared.kind or "")
        if planned is None:
            raise PrivacyError(
                f"{where}: calibration = 'total' needs the number of releases, and this method does not declare its "
                f"traffic. Set privacy.{declared.kind}.releases."
            )
        releases = planned
        kind = declared.kind or ""
        context.spent[kind] = context.spent.get(kind, 0) + 1
        if context.spent[kind] > releases:
            raise PrivacyError(
                f"{where}: calibration = 'total' planned {releases} releases of {kind}, and this is number "
                f"{context.spent[kind]}. Set privacy.{kind}.releases to the number that there will be."
            )
    return calibrate(policy.calibration, policy.epsilon, delta, 1.0, releases)


def _bounded(
    leaves: list[Tensor], where: str, declared: Declared, policy: Policy, context: Context
) -> tuple[list[Tensor], list[float], Bounding]:
    """Return the leaves with their norms bounded, the sensitivity of each, and the way in which it was bounded."""
    depends = dependence(declared)
    plain = Bounding(policy.relation)
    swing = 2.0 if policy.relation == "replace-one" else 1.0
    if policy.sensitivity.startswith("random-pixel"):
        assumed = declared.kind == "logits" and policy.assume == "logits-of-records"
        if not assumed and (declared.kind != "embeddings" or depends != "record"):
            hint = ", or say assume=logits-of-records and have no guarantee" if declared.kind == "logits" else ""
            raise NotApplicable(
                f"{where}: the random-pixel sensitivity is not applicable to {declared.kind}: they are not a function "
                f"of one private image whose pixel could be edited. Use clip=C{hint}."
            )
        output = context.predict if assumed else context.encode
        s = random_pixel_sensitivity(context.images(), output, policy.samples, context.key)
        condition = "random-pixel edits bound no neighbouring data set"
        if assumed:
            condition = f"counted as if computed on the client's records; {condition}"
        return leaves, [s] * len(leaves), Bounding(policy.relation, condition=condition, guaranteed=False)
    C = policy.clip or 1.0
    if depends == "histogram":
        counts = _histogram_sensitivity(leaves, where, declared, policy.relation, context.n)
        return leaves, [counts] * len(leaves), plain
    if depends == "range":
        pixels = sum(leaf.numel() for leaf in leaves)
        return [leaf.clamp(-1, 1) for leaf in leaves], [2.0 * math.sqrt(pixels)] * len(leaves), plain
    if depends == "class":
        how = Bounding(policy.relation, C, "given the classes and their counts")
        tables = math.sqrt(_tables(leaves, context))
        return leaves, [tables * _class_sensitivity(leaf, where, C, swing, context) for leaf in leaves], how
    clipped = [clip_rows(leaf, C) for leaf in leaves]
    if depends == "record":
        how = Bounding(policy.relation, C, "given the encoder")
        return clipped, [swing * C * math.sqrt(len(leaves))] * len(leaves), how
    rows = sum(row_count(leaf) for leaf in leaves)
    return clipped, [2.0 * C * math.sqrt(rows)] * len(leaves), Bounding(policy.relation, C)


def dependence(declared: Declared) -> str:
    """Return how a release depends on the records: as declared, else by its kind, else by its unit."""
    if declared.depends is not None:
        return declared.depends
    by_kind = {"label_counts": "histogram", "synthetic_images": "range", "prototypes": "class"}
    return by_kind.get(declared.kind or "", "record" if declared.unit == "record" else "all")


def _class_sensitivity(leaf: Tensor, where: str, C: float, swing: float, context: Context) -> float:
    made = context.means.get(digest_of(leaf))
    if made is None:
        raise NotApplicable(
            f"{where}: a mean is bounded by clipping the records that go into it, not the mean itself. Compute it with "
            "client.class_means(rows, kind), which clips as the policy says."
        )
    if made[0] != C:
        raise PrivacyError(f"{where}: its rows were clipped to {made[0]}, but the policy says {C}. Clip them to that.")
    return math.sqrt(2) * swing * C / max(made[1] - 1, 1)


def _tables(leaves: list[Tensor], context: Context) -> int:
    """Return the largest number of tables that these class means may come from.

    A record moves two means in each table.
    """
    digests = [digest_of(leaf) for leaf in leaves]
    made = {context.tables.get(digest, 0) for digest in digests}
    return len(made) * max(map(digests.count, digests), default=1)


def _histogram_sensitivity(leaves: list[Tensor], where: str, declared: Declared, relation: str, n: int) -> float:
    if any(bool((leaf < 0).any()) or bool((leaf != leaf.round()).any()) for leaf in leaves):
        raise PrivacyError(
            f"{where} is declared as a histogram, but holds numbers that are not counts: its noise is scaled for "
            "records that count 1 each. Send whole numbers from 0 up, and scale them at the receiver."
        )
    if declared.kind != "label_counts":
        return math.sqrt(max(1, sum(leaf.numel() for leaf in leaves)))
    if (total := sum(float(leaf.sum()) for leaf in leaves)) > n:
        raise PrivacyError(
            f"{where} counts {total:g} labels, but the client has {n} records: the noise is scaled for records that "
            "count once. Send one histogram of the records."
        )
    return math.sqrt(2) if relation == "replace-one" else 1.0


def clip_rows(t: Tensor, C: float) -> Tensor:
    """Return a copy with each row (dimension 0) scaled down to L2 norm C if it is longer. A vector is one row."""
    flat = t.reshape(row_count(t), -1) if t.numel() else t
    if not t.numel():
        return t.clone()
    norms = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    return (flat * (C / norms.clamp(min=C))).reshape(t.shape)


def row_count(t: Tensor) -> int:
    return len(t) if t.dim() > 1 else 1


def random_pixel_sensitivity(
    images: Tensor, encode: Callable[[Tensor], Tensor], samples: int, key: tuple[object, ...]
) -> float:
    """Return the largest change of the output over sampled edits of one random pixel (DFFKE, Appendix G).

    An edit sets the pixel to a value from U(0, 255), here U(-1, 1). The result bounds the effect of the edits that were
    tried, and of nothing else.
    """
    rng = generator(*key, "random-pixel", device=images.device)
    if images.dim() != 4:
        raise PrivacyError(
            "random-pixel edits a pixel, but these records are not images and have none. Use clip=C, which bounds "
            "the effect of any record."
        )
    n, channels, height, width = images.shape
    largest = 0.0
    for begin in range(0, samples, 256):
        count = min(256, samples - begin)
        index, row, column = (
            torch.randint(high, (count,), generator=rng, device=images.device) for high in (n, height, width)
        )
        before = images[index]
        after = before.clone()
        value = torch.rand(count, channels, generator=rng, device=images.device) * 2 - 1
        after[torch.arange(count, device=images.device), :, row, column] = value
        with torch.no_grad():
            change = (encode(after) - encode(before)).flatten(1)
        largest = max(largest, float(torch.linalg.vector_norm(change, dim=1).max()))
    if largest == 0:
        raise PrivacyError(
            "random-pixel: no sampled edit changed the output, so there is no noise to scale. Use clip=C."
        )
    return largest


def _noise(like: Tensor, sigma: float, policy: Policy, key: tuple[object, ...]) -> Tensor:
    if policy.secure:
        return torch.from_numpy(system_normal(like.numel())).to(like).reshape(like.shape).mul_(sigma)
    rng = generator(*key, "noise", device=like.device)
    return torch.randn(like.shape, generator=rng, device=like.device, dtype=like.dtype).mul_(sigma)


def system_normal(n: int, chunk: int = 1 << 20) -> np.ndarray:
    """Return n standard normal numbers from the operating system's entropy, by inversion of 53-bit uniforms."""
    from scipy.special import ndtri

    out = np.empty(n)
    for begin in range(0, n, chunk):
        count = min(chunk, n - begin)
        uniform = (np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)).astype(np.float64)
        out[begin : begin + count] = ndtri((uniform + 0.5) * 2.0**-53)
    return out


def _cosine(raw: list[Tensor], noisy: list[Tensor]) -> float | None:
    """Return the mean cosine similarity of rows before and after the noise, for the auditor only.

    These are C_E and C_Y of DFFKE's Table 4.
    """
    both = zip(raw, noisy, strict=True)
    pairs = [(a.reshape(row_count(a), -1), b.reshape(row_count(b), -1)) for a, b in both if a.numel()]
    if not pairs:
        return None
    values = torch.cat([cosine_similarity(a, b, dim=1) for a, b in pairs])
    return float(values.mean())


# --- trees of tensors ------------------------------------------------------------------------------------------


def leaves_of(value: Any, where: str) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, State):  # one vector: a record's effect on a state has no smaller unit
        return [torch.cat([t.reshape(-1) for t in value.values()])] if value else []
    if isinstance(value, Mapping):
        return [leaf for key in value for leaf in leaves_of(value[key], f"{where}[{key!r}]")]
    if isinstance(value, list | tuple):
        return [leaf for i, item in enumerate(value) for leaf in leaves_of(item, f"{where}[{i}]")]
    raise NotApplicable(
        f"{where} is a {type(value).__name__}: Gaussian noise needs a floating-point tensor. Send one, or remove the "
        "policy."
    )


def rebuilt(value: Any, leaves: Iterator[Tensor]) -> Any:
    """Return the same tree with other tensors, taken from `leaves` in order."""
    if isinstance(value, Tensor):
        return next(leaves)
    if isinstance(value, State):
        parts = next(leaves).split([t.numel() for t in value.values()]) if value else ()
        both = zip(value.items(), parts, strict=True)
        return value.like({name: part.reshape(t.shape) for (name, t), part in both})
    if isinstance(value, Mapping):
        return {key: rebuilt(item, leaves) for key, item in value.items()}
    return type(value)(rebuilt(item, leaves) for item in value)
