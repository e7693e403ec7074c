"""Sensitivity: how much one record can change a release, and the clipping that makes it so (privacy rule 5).

The table holds under replace-one and zero-out. C is the clipping norm. A mechanism measures in one norm: L2 (Gaussian
noise) or L1 (Laplace noise). `joint` says how far k things move together that move by 1 each: sqrt(k) in L2, k in L1.

    record     one row per record                  2 C and C    (joint(m) times it if a record has m rows)
    all        R rows that depend on all records   joint(R) 2 C (both: a record that is zeroed can move such a row
               anywhere in its ball)
    class      class means of clipped rows         joint(2) 2 C / (N_c - 1), for class c, and half of it: a record that
               changes its label leaves one class (of N_c) and joins another, and both means move. The set of classes,
               and N_c, which scales the noise, are a release of their own that no noise on the means protects.
               joint(m) times it for m tables of means that all contain the record
    histogram  label counts                        joint(2) and 1: each record counts once
               other counts                        joint(counts) (both): a record may be in all of them, or in none
    range      pixels in [-1, 1]                   joint(pixels) 2 (both)

If the unit is a person who has g records at most, all of which are others in a neighbouring data set: `record`
joint(g) times it (g rows move), `histogram` g times it (g records move the same counts), `all` and `range` as they are
(what moves anywhere in its ball for one record moves no farther for g). Means of classes are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import Released
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.persons import of_persons
from fedaudit.privacy.policy import Policy
from fedaudit.privacy.provenance import Provenance
from fedaudit.wire.codec import digest_of
from fedaudit.wire.message import Declared

Norm = Literal[1, 2]


def _no_model(x: Tensor) -> Tensor:
    raise NotApplicable("There is no model here whose logits could be computed. Use clip=C.")


@dataclass
class Context:
    """The mechanism's knowledge of the client whose release it protects."""

    key: tuple[object, ...]  # the noise follows from it and the field, see `noise_key`
    n: int
    policies: Mapping[str, Policy]
    releases: Callable[[str], int | None]  # planned releases of a kind over the whole run
    images: Callable[[], Tensor]
    encode: Callable[[Tensor], Tensor]
    predict: Callable[[Tensor], Tensor] = _no_model
    classes: int | None = None  # of the labels; None if nobody knows
    plain_fits: int = 0  # all trainings on private records so far that were not DP
    dirty: bool = False  # whether memory holds unprotected values that a task wrote after it read the records
    provenance: Provenance | None = None
    means: dict[str, tuple[float, int]] = field(default_factory=dict)  # digest of a class mean: clipping norm, N_c
    tables: dict[str, int] = field(default_factory=dict)  # digest of a class mean: number of the call that made it
    done: dict[str, tuple[str, list[LedgerEntry]]] = field(default_factory=dict)  # field: digest as released, entries
    spent: dict[str, int] = field(default_factory=dict)  # releases of each kind so far, over all rounds
    # Lets out what a mechanism made of a field: see `mechanism_outputs`.
    let_out: Callable[[str, str, Any, Callable[[], Released]], Released] = lambda where, depends, value, make: make()
    most: int = 1  # records of one person, at most, if the guarantee is for persons
    absent: Callable[[], frozenset[str]] = frozenset  # fields that are None by the setting, whatever the records are


@dataclass(frozen=True)
class Bounding:
    """The way in which the values of a release were bounded, for the ledger."""

    relation: str
    clip: float | None = None
    condition: str | None = None
    guaranteed: bool = True  # False: the bound holds for no neighbouring data set


def joint(k: int, norm: Norm = 2) -> float:
    """Return how far k things move together that move by 1 each."""
    return math.sqrt(k) if norm == 2 else float(k)


def bounded(
    leaves: list[Tensor], where: str, declared: Declared, policy: Policy, context: Context, norm: Norm = 2
) -> tuple[list[Tensor], list[float], Bounding]:
    """Return the leaves with their norms bounded, the sensitivity of each, and the way in which it was bounded."""
    depends, most = dependence(declared), context.most
    plain = Bounding(policy.relation, condition=None if policy.unit == "record" else of_persons(most))
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
        s = random_pixel_sensitivity(context.images(), output, policy.samples, (*context.key, where))
        condition = "random-pixel edits bound no neighbouring data set"
        if assumed:
            condition = f"counted as if computed on the client's records; {condition}"
        return leaves, [s] * len(leaves), Bounding(policy.relation, condition=condition, guaranteed=False)
    C = policy.clip or 1.0
    if depends == "histogram":
        counts = _histogram_sensitivity(leaves, where, declared, policy.relation, context.n, norm)
        return leaves, [most * counts] * len(leaves), plain
    if depends == "range":
        pixels = sum(leaf.numel() for leaf in leaves)
        return [leaf.clamp(-1, 1) for leaf in leaves], [2.0 * joint(pixels, norm)] * len(leaves), plain
    if depends == "class" and policy.unit == "person":
        raise NotApplicable(
            f"{where}: means of classes are not bounded for all records of a person. Which classes there are is told "
            "in any case, so there is no guarantee to lose: say unit = 'record'."
        )
    if depends == "class":
        how = Bounding(policy.relation, C, "given the classes and their counts")
        tables = joint(_tables(leaves, context), norm)
        return leaves, [tables * _class_sensitivity(leaf, where, C, swing, context, norm) for leaf in leaves], how
    clipped = [clip_rows(leaf, C, norm) for leaf in leaves]
    if depends == "record":
        given = "given the encoder" if policy.unit == "record" else f"given the encoder; {of_persons(most)}"
        how = Bounding(policy.relation, C, given)
        return clipped, [swing * C * joint(most * len(leaves), norm)] * len(leaves), how
    rows = sum(row_count(leaf) for leaf in leaves)
    return clipped, [2.0 * C * joint(rows, norm)] * len(leaves), Bounding(policy.relation, C, plain.condition)


def dependence(declared: Declared) -> str:
    """Return how a release depends on the records: as declared, else by its kind, else by its unit."""
    if declared.depends is not None:
        return declared.depends
    by_kind = {"label_counts": "histogram", "synthetic_images": "range", "prototypes": "class"}
    return by_kind.get(declared.kind or "", "record" if declared.unit == "record" else "all")


def _class_sensitivity(leaf: Tensor, where: str, C: float, swing: float, context: Context, norm: Norm) -> float:
    made = context.means.get(digest_of(leaf))
    if made is None:
        raise NotApplicable(
            f"{where}: a mean is bounded by clipping the records that go into it, not the mean itself. Compute it with "
            "client.class_means(rows, kind), which clips as the policy says."
        )
    if made[0] != C:
        raise PrivacyError(f"{where}: its rows were clipped to {made[0]}, but the policy says {C}. Clip them to that.")
    return joint(2, norm) * swing * C / max(made[1] - 1, 1)


def _tables(leaves: list[Tensor], context: Context) -> int:
    """Return the largest number of tables that these class means may come from.

    A record moves two means in each table.
    """
    digests = [digest_of(leaf) for leaf in leaves]
    made = {context.tables.get(digest, 0) for digest in digests}
    return len(made) * max(map(digests.count, digests), default=1)


def _histogram_sensitivity(
    leaves: list[Tensor], where: str, declared: Declared, relation: str, n: int, norm: Norm
) -> float:
    if any(bool((leaf < 0).any()) or bool((leaf != leaf.round()).any()) for leaf in leaves):
        raise PrivacyError(
            f"{where} is declared as a histogram, but holds numbers that are not counts: its noise is scaled for "
            "records that count 1 each. Send whole numbers from 0 up, and scale them at the receiver."
        )
    if declared.kind != "label_counts":
        return joint(max(1, sum(leaf.numel() for leaf in leaves)), norm)
    if (total := sum(float(leaf.sum()) for leaf in leaves)) > n:
        raise PrivacyError(
            f"{where} counts {total:g} labels, but the client has {n} records: the noise is scaled for records that "
            "count once. Send one histogram of the records."
        )
    return joint(2, norm) if relation == "replace-one" else 1.0


def clip_rows(t: Tensor, C: float, norm: Norm = 2) -> Tensor:
    """Return a copy with each row (dimension 0) scaled down to norm C if it is longer. A vector is one row."""
    flat = t.reshape(row_count(t), -1) if t.numel() else t
    if not t.numel():
        return t.clone()
    norms = torch.linalg.vector_norm(flat, norm, dim=1, keepdim=True)
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
    rng = noise_generator(key, "random-pixel", device=images.device)
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
