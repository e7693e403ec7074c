"""Protection of a reply on the client: each private field goes through the mechanism that its policy names.

The order is mechanism, quantisation (in the codec), bytes. Each private field makes an entry for the ledger, also if
nothing protected it: then its noise multiplier is 0 and its epsilon infinite. The mechanisms themselves are in
fedaudit.privacy.mechanisms, the bounds on one record's effect in fedaudit.privacy.sensitivity.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fedaudit.errors import PrivacyError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanisms.base import Prepared, mechanism_of
from fedaudit.privacy.mechanisms.dp_sgd import AfterDpSgd
from fedaudit.privacy.mechanisms.free import PostProcessing
from fedaudit.privacy.policy import TRAINING, Policy
from fedaudit.privacy.sensitivity import Context, dependence, row_count
from fedaudit.privacy.trees import leaves_of, rebuilt
from fedaudit.wire.codec import digest_of
from fedaudit.wire.message import Declared, State, Up
from fedaudit.wire.release import Protection


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
        else context.let_out(
            where, dependence(declared), value, lambda: _release(value, where, declared, policy, context)
        )
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
            make = functools.partial(_release, value, where, declared, policy, context)
            changes[name], of_field = context.let_out(where, dependence(declared), value, make)
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
        return LedgerEntry.free(where, kind, "derived from what was released", PostProcessing.name)
    if declared.via == "model" and TRAINING in context.policies and _paid(value, where, context):
        return LedgerEntry.free(where, kind, "given the privacy of training", AfterDpSgd.name)
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


# --- one release -----------------------------------------------------------------------------------------------


def _release(
    value: Any, where: str, declared: Declared, policy: Policy, context: Context
) -> tuple[Any, list[LedgerEntry]]:
    leaves, how = leaves_of(value, where), mechanism_of(policy)
    ready = how.prepare(value, where, declared, policy, context)
    noisy = how.noised(ready, where, declared, policy, context)
    entry = how.entry(where, _kind(declared), policy, ready)
    entry.cosine, entry.unit = _cosine(leaves, noisy), policy.unit
    return rebuilt(value, iter(noisy)), [entry, *_structure(value, where, declared, context)]


def prepare(value: Any, where: str, declared: Declared, policy: Policy, context: Context) -> Prepared:
    """Return a release checked, bounded and ready for the noise of its mechanism."""
    return mechanism_of(policy).prepare(value, where, declared, policy, context)


def with_noise(ready: Prepared, where: str, declared: Declared, policy: Policy, context: Context) -> list[Tensor]:
    """Return the leaves of a release with the noise of its mechanism. The same release always gets the same noise."""
    return mechanism_of(policy).noised(ready, where, declared, policy, context)


def _structure(value: Any, where: str, declared: Declared, context: Context) -> list[LedgerEntry]:
    """Return entries for what noise on the numbers does not hide: the keys that the client's data chose, and counts."""
    by_class = dependence(declared) == "class"
    if not by_class and not (declared.via == "data" and isinstance(value, Mapping) and not isinstance(value, State)):
        return []
    condition = "which classes there are" + (", and the noise scaled by their counts" if by_class else "")
    return [LedgerEntry.unprotected(f"{where} (classes)", "label_counts", condition)]


def _cosine(raw: list[Tensor], noisy: list[Tensor]) -> float | None:
    """Return the mean cosine similarity of rows before and after the noise, for the auditor only.

    These are C_E and C_Y of DFFKE's Table 4.
    """
    both = zip(raw, noisy, strict=True)
    pairs = [
        (a.reshape(row_count(a), -1), b.reshape(row_count(b), -1))
        for a, b in both
        if a.numel() and a.is_floating_point()
    ]
    if not pairs:
        return None
    values = torch.cat([cosine_similarity(a, b, dim=1) for a, b in pairs])
    return float(values.mean())
