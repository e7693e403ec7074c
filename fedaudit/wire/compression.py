"""Compression of clients' messages: a stage of the wire after the noise and before the bytes, for any method.

    topk:p     the ceil(p n) numbers of largest magnitude, and where they stand        8 bytes each
    int8       n whole numbers q in [-127, 127] and a scale s = max |t| / 127: t = s q  n + 4 bytes
    svd:e      U, s and V with a share e of the energy (fedaudit.wire.svd)              4 K (rows + columns + 1) bytes

It is for float32 tensors of `SMALL` numbers or more in releases of the kinds in `COMPRESSED`. All else travels
unchanged: whole numbers, labels, counts, statistics and buffers (a variance must stay positive), fields that are
declared with a type of their own (uint8 images), states that a method itself sends as `LowRank`, and tensors that would
not shrink.

A model's weights or layers are compressed as a change: their difference from the state in the message that the client
answers, if that state has tensors of the same names and shapes. Both sides know that state. The receiver gets it plus
the compressed difference. Other releases (gradients, embeddings, logits) are compressed as they are.

Noise comes first. Changing a protected value afterwards costs no privacy, so the ledger does not count compression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedaudit.setting import LEAST_SHARE, parse_compression
from fedaudit.wire import svd
from fedaudit.wire.message import TENSOR_HEADER, Declared, Record, Size, State

COMPRESSED = frozenset({"weights", "gradients", "layers", "embeddings", "logits", "soft_labels", "prototypes"})
MODELS = frozenset({"weights", "layers"})  # kinds that are compressed as a difference from the state sent down
SMALL = 64  # numbers in a tensor: one with fewer travels unchanged
NUMBER_BYTES = 4  # bytes of a float32, and of a position


@dataclass(frozen=True)
class Stage:
    """One way to compress, with its number: a share for topk, an energy for svd."""

    name: str
    number: float | None

    def parts(self, t: Tensor) -> tuple[Tensor, ...] | None:
        """Return the parts that travel instead of a tensor, or None if the tensor itself travels."""
        if t.dtype != torch.float32 or t.numel() < SMALL:
            return None
        if self.name == "svd":
            return svd.factors(t, self.number or 1.0) if t.dim() > 1 else None
        if self.bytes(t.shape) == NUMBER_BYTES * t.numel():
            return None
        return _largest(t, self._kept(t.numel())) if self.name == "topk" else _levels(t)

    def _kept(self, n: int) -> int:
        """Return k = ceil(p n). Rounding first makes 0.07 * 100 give 7, despite errors in the sixteenth digit."""
        return math.ceil(round((self.number or 1.0) * n, 9))

    def bytes(self, shape: Sequence[int]) -> int | None:
        """Return the bytes of a float32 tensor of this shape, or None if they depend on its numbers."""
        n = math.prod(shape)
        if n < SMALL or (self.name == "svd" and len(shape) < 2):
            return NUMBER_BYTES * n
        if self.name == "svd":
            return None
        sent = n + NUMBER_BYTES if self.name == "int8" else 2 * NUMBER_BYTES * self._kept(n)
        return min(sent, NUMBER_BYTES * n)

    def size(self, whole: Size) -> tuple[Size, bool]:
        """Return the compressed size of a field that is declared as `whole`, and whether it is known before the run.

        A tensor whose size is not known counts as uncompressed.
        """
        saved = extra = 0
        known = True
        for shape, count in whole.tensors.items():
            sent, n = self.bytes(shape), NUMBER_BYTES * math.prod(shape)
            known = known and sent is not None
            if sent is not None and sent < n:
                saved += count * (n - sent)
                extra += count * TENSOR_HEADER * (len(PARTS[self.name]) - 1)
        return Size(whole.payload - saved, whole.buffers, whole.header + extra), known


def stage_of(text: str | None) -> Stage | None:
    """Return the stage that a setting names, or None without one."""
    return None if text is None else Stage(*parse_compression(text))


def applies(declared: Declared | None) -> bool:
    """Return whether a field is one that gets compressed."""
    return declared is not None and declared.kind in COMPRESSED and declared.dtype is None and declared.finite


def reference(declared: Declared | None, value: object, message: Record | None) -> tuple[str, State] | None:
    """Return the field and the state, in the answered message, of which a model's state is sent as a change.

    Return None if there is no such state.
    """
    if message is None or declared is None or declared.kind not in MODELS or not isinstance(value, State):
        return None
    wanted = value.parameters
    for name in message.declared():
        sent = getattr(message, name)
        if isinstance(sent, State) and all(k in sent and sent[k].shape == t.shape for k, t in wanted.items()):
            return name, sent
    return None


# --- one tensor ------------------------------------------------------------------------------------------------


def _largest(t: Tensor, k: int) -> tuple[Tensor, Tensor]:
    flat = t.detach().reshape(-1)
    # Sort by position: the order of equal magnitudes is then the same on every device, and so are the bytes.
    order = torch.sort(flat.abs(), descending=True, stable=True).indices[:k].sort().values
    return flat[order], order.to(torch.int32)


def _levels(t: Tensor) -> tuple[Tensor, Tensor]:
    scale = (t.detach().abs().max() / 127).reshape(1)
    levels = t.detach() / scale if float(scale) > 0 else torch.zeros_like(t)  # the codec reports a NaN
    return levels.round().clamp(-127, 127).to(torch.int8), scale


def _from_largest(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    values, at = parts
    n = math.prod(shape)
    if values.dim() != 1 or values.shape != at.shape or n > len(values) / LEAST_SHARE:
        raise ValueError(f"{len(values)} numbers and their positions do not make a tensor of shape {list(shape)}")
    where = at.long()
    if len(where) and not 0 <= int(where.min()) <= int(where.max()) < n:
        raise ValueError(f"a position lies outside of a tensor of shape {list(shape)}")
    return torch.zeros(n, dtype=values.dtype, device=values.device).index_copy_(0, where, values).reshape(shape)


def _from_levels(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    levels, scale = parts
    if list(levels.shape) != list(shape) or scale.shape != (1,):
        raise ValueError(f"levels of shape {list(levels.shape)} do not make a tensor of shape {list(shape)}")
    return levels.to(scale.dtype) * scale


def _from_factors(parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    U, s, V = parts
    return svd.product(U, s, V, shape)


PARTS = {"topk": ("|v", "|i"), "int8": ("|q", "|s"), "svd": svd.PARTS}  # put behind a tensor's name in a state
_BACK: dict[str, Callable[[Sequence[Tensor], Sequence[int]], Tensor]] = {
    "topk": _from_largest, "int8": _from_levels, "svd": _from_factors,
}  # fmt: skip


def from_parts(name: str, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return the tensor that the receiver gets from the parts."""
    if name not in _BACK or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"there is no compression {str(name)[:40]!r} of a tensor of shape {str(shape)[:80]}")
    return _BACK[name](parts, shape)


# --- states ----------------------------------------------------------------------------------------------------


def squeezed(state: State, stage: Stage, base: State | None) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return the tensors that travel for a state, by name, and the shapes of those that travel in parts."""
    sent: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for name, t in state.items():
        parts = None
        if name not in state.buffers and t.dtype == torch.float32:
            parts = stage.parts(t.detach() if base is None else t.detach() - base[name])
        if parts is None:
            sent[name] = t
        else:
            shapes[name] = list(t.shape)
            sent |= {name + end: part for end, part in zip(PARTS[stage.name], parts, strict=True)}
    return sent, shapes


def restored(
    name: str, sent: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], base: State | None
) -> dict[str, Tensor]:
    """Return the tensors of the state that the receiver gets, in the order in which they were sent."""
    ends = PARTS[name]
    tensors: dict[str, Tensor] = {}
    for key, t in sent.items():
        own = key[: -len(ends[0])] if key.endswith(ends) else key
        if own not in shapes:
            tensors[key] = t
        elif key.endswith(ends[0]):
            left = from_parts(name, [sent[own + end] for end in ends], shapes[own])
            tensors[own] = left if base is None else base[own] + left
    return tensors


def own_names(name: str, sent: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of a state's own tensors, given the names of the tensors that travel."""
    ends = PARTS[name]
    owners = [key[: -len(ends[0])] if key.endswith(ends) else key for key in sent]
    return list(dict.fromkeys(o if o in shapes else key for o, key in zip(owners, sent, strict=True)))
