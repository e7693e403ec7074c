"""Tensors and the bytes of a message, with as few copies as there can be: in safetensors' format, byte for byte as its
own writer has it.

That writer copies each tensor twice, and a model on a GPU would come over tensor by tensor. Here all tensors of one
device and type come in one transfer, and are copied once, into the message; back there is one transfer too.

`Held` is a message that stays in the process that made it: nobody puts its bytes together before somebody reads them.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from fedaudit.cuda_streams import TRANSFER, kept_stream

# By the names of the format, in the order in which its writer puts them: what needs the widest alignment first.
NAMES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.uint32: "U32",
    torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
PINNED = 1 << 28  # bytes of a message that pinned memory is kept for
HELD_ON = {"cuda", "cpu"}  # the devices on which messages within a process are held
FORMAT = 1
_PLACE = {dtype: i for i, dtype in enumerate(NAMES)}
Gathered = tuple[list[int], Tensor]
Spans = dict[int, tuple[str, tuple[int, ...], int, int]]  # by number of the tensor: type, shape, begin, end


def raw(t: Tensor) -> Any:
    """The bytes of a dense tensor in main memory, not copied."""
    return t.reshape(-1).view(torch.uint8).numpy() if t.numel() else b""


def at_home(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in main memory, dense; those of one GPU and type in one transfer, then parts of one memory."""
    return brought(tensors, gathered(tensors))


def gathered(tensors: Sequence[Tensor]) -> list[Gathered]:
    """What lies on GPUs: of each GPU and type the numbers of the tensors, and all of them as one."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if not _is_home(t):
            groups.setdefault((t.device, t.dtype), []).append(i)
    return [(group, torch.cat([tensors[i].detach().reshape(-1) for i in group])) for group in groups.values()]


def brought(tensors: Sequence[Tensor], there: Sequence[Gathered], ready: Any = None) -> list[Tensor]:
    """The tensors in main memory; those that were gathered in one transfer of each group, once they are `ready`."""
    elsewhere = {i for group, _ in there for i in group}
    found = [t if i in elsewhere else t.detach().contiguous() for i, t in enumerate(tensors)]
    for group, whole in there:
        parts = _brought(whole, ready).split([tensors[i].numel() for i in group])
        for i, part in zip(group, parts, strict=True):
            found[i] = part.view(tensors[i].shape)
    return found


def _is_home(t: Tensor) -> bool:
    return t.device.type == "cpu"


def _brought(flat: Tensor, ready: Any = None) -> Tensor:
    """In main memory. Pinned memory takes it at the full rate, and is used again for the next message.

    With `ready`, an event after which it is there, nothing else that the device has to do is waited for."""
    if flat.device.type != "cuda":
        return flat.cpu()
    stream = torch.cuda.current_stream(flat.device) if ready is None else kept_stream(TRANSFER, flat.device)
    with torch.cuda.stream(stream):
        if ready is not None:
            stream.wait_event(ready)
        small = flat.numel() * flat.element_size() <= PINNED
        here = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=small)
        here.copy_(flat, non_blocking=True)
        stream.synchronize()
    return here


def packed(tensors: Sequence[Tensor], head: str) -> bytes:
    """The message: tensors in main memory, named by their number, and `head` under the metadata key `fedaudit`."""
    if any(t.dtype not in NAMES for t in tensors):
        return safetensors.torch.save({str(i): t.clone() for i, t in enumerate(tensors)}, metadata={"fedaudit": head})
    text, order, _ = _laid_out(tensors, {"fedaudit": head})
    return b"".join([text, *(raw(tensors[i]) for i in order)])


def file_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Any]:
    """Tensors in main memory as a file of safetensors, piece by piece."""
    if any(t.dtype not in NAMES for t in tensors.values()):
        return [safetensors.torch.save(dict(tensors), metadata=dict(metadata))]
    dense = [t.detach().contiguous() for t in tensors.values()]
    text, order, _ = _laid_out(dense, metadata, list(tensors))
    return [text, *(raw(dense[i]) for i in order)]


def _laid_out(
    tensors: Sequence[Tensor], metadata: Mapping[str, str], names: Sequence[str] = ()
) -> tuple[bytes, list[int], Spans]:
    """What stands before the tensors, the order in which they lie, and where. Without names they have numbers."""
    table, order, spans = _table(tuple((t.dtype, tuple(t.shape)) for t in tensors), tuple(names))
    text = f'{{"__metadata__":{_json(dict(metadata))}{table}}}'.encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    placed = {i: (name, shape, start + begin, start + end) for i, (name, shape, begin, end) in spans.items()}
    return len(text).to_bytes(8, "little") + text, order, placed


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@functools.lru_cache(maxsize=256)
def _table(
    kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...], names: tuple[str, ...]
) -> tuple[str, list[int], Spans]:
    """How tensors of these types and shapes are described, the order in which they lie, and where, from the first on.
    The same for all messages of a class, mostly."""
    names = names or tuple(str(i) for i in range(len(kinds)))
    order, at = sorted(range(len(kinds)), key=lambda i: (_PLACE[kinds[i][0]], names[i])), 0
    rows, spans = "", {}
    for i in order:
        dtype, shape = kinds[i]
        end = at + math.prod(shape) * dtype.itemsize
        rows += f",{_json(names[i])}:{_json({'dtype': NAMES[dtype], 'shape': shape, 'data_offsets': (at, end)})}"
        spans[i] = NAMES[dtype], shape, at, end
        at = end
    return rows, order, spans


_DIGEST_AT = 8 + len(f'{{"__metadata__":{{"fedaudit":"{FORMAT}:')  # where it stands in a message


def digest(tree: str, tensors: Sequence[Tensor]) -> str:
    """Of the tree and of all bytes of tensors in main memory."""
    h = xxhash.xxh3_128(tree.encode())
    for t in tensors:
        h.update(f"{t.dtype}{list(t.shape)}".encode())
        h.update(raw(t))
    return h.hexdigest()


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format)


class Content:
    """What a large tensor in main memory holds: of equal ones, one copy is held in this process.

    Only a look at all of it tells whether it is as it was. An object that is the same, or the number of changes that
    torch counts, would not: who writes through numpy, or through `.data`, is not counted.
    """

    def __init__(self, digest: str):
        self.digest = digest
        self.tensor: Tensor | None = None  # the one that is held
        self.finite = False  # whether somebody looked, and all of its numbers are

    def held(self, t: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """The tensor that is held, or from now on a copy of this one, which has this content."""
        if self.tensor is None:
            self.tensor = copy(t)
        return self.tensor


LARGE = 1 << 16  # bytes from which a tensor is known by its content
_contents: weakref.WeakValueDictionary[Any, Content] = weakref.WeakValueDictionary()  # a cache, and nothing more


def contents_of(tensors: Sequence[Tensor]) -> dict[int, Content]:
    """By number: of the large tensors among these, which lie in main memory."""
    found = {}
    for i, t in enumerate(tensors):
        if t.numel() * t.element_size() >= LARGE and _is_home(t):
            digest = xxhash.xxh3_128_hexdigest(raw(t.detach().contiguous()))
            key = digest, t.dtype, tuple(t.shape)
            found[i] = _contents.get(key) or _contents.setdefault(key, Content(digest))
    return found


class Held:
    """A message that was encoded here: the tree as text, and the tensors as they were, where they are.

    It is what its bytes are, and nobody may change it: whoever decodes it gets copies of the tensors.
    """

    def __init__(
        self,
        text: str,
        tensors: Sequence[Tensor],
        there: Sequence[Gathered],
        known: Mapping[int, Content] | None = None,
        mine: bool = False,
    ):
        """`known`: of some tensors, by number, their content, which may be held already. `mine`: nobody else has the
        tensors, so that they need not be copied."""
        elsewhere = {i for group, _ in there for i in group}
        self.text, self._there = text, list(there)
        self._known = known = known or {}
        copy = torch.detach if mine else _copy
        self._own = [
            known[i].held(t, copy) if i in known else torch.empty_like(t, device="meta") if i in elsewhere else copy(t)
            for i, t in enumerate(tensors)
        ]
        unknown = "0" * 32  # as long as a digest: where things lie does not depend on it
        head = {"fedaudit": f"{FORMAT}:{unknown}:{text}"}
        self._start, self._order, self.spans = _laid_out(self._own, head)
        self._length = len(self._start) + sum(end - begin for *_, begin, end in self.spans.values())
        self._ready = _done_by_now(there)

    def __len__(self) -> int:
        return self._length

    @cached_property
    def tensors(self) -> list[Tensor]:
        """All of them in main memory; to be kept there."""
        return brought(self._own, self._there, self._ready)

    def at_home(self) -> list[Tensor]:
        """The same for the moment, if nobody keeps them."""
        return vars(self).get("tensors") or brought(self._own, self._there, self._ready)

    @cached_property
    def digest(self) -> str:
        return digest(self.text, self.tensors)

    @cached_property
    def tree(self) -> Any:
        """What the text says, for who leaves it as it is."""
        return json.loads(self.text)

    def content(self, i: int) -> str | None:
        """The digest of a tensor's bytes, where it is known."""
        return self._known[i].digest if i in self._known else None

    def pieces(self, home: Sequence[Tensor]) -> list[tuple[int, Any]]:
        """What stands before the tensors (-1), and the bytes of each by its number, as they follow one another."""
        found = vars(self).get("digest") or digest(self.text, home)
        start = self._start[:_DIGEST_AT] + found.encode() + self._start[_DIGEST_AT + len(found) :]
        return [(-1, start), *((i, raw(home[i])) for i in self._order)]

    def __bytes__(self) -> bytes:
        return b"".join([piece for _, piece in self.pieces(self.at_home())])

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(self),)  # in another process it is bytes

    def seen(self, device: torch.device) -> list[Tensor] | None:
        """The tensors themselves, to look at, where they are on that device one by one."""
        return None if self._there or device.type != "cpu" else self._own

    def copies(self, device: torch.device) -> list[Tensor]:
        """The tensors on a device, in memory of their own."""
        here = device.type == "cpu"
        found = [t if t.is_meta else t.clone() if here else t.to(device) for t in self._own]
        for group, whole in self._there:
            sizes = [self._own[i].numel() for i in group]
            parts = cast(Any, torch.split_with_sizes_copy)(whole.to(device), sizes)
            for i, part in zip(group, parts, strict=True):
                found[i] = part.view(self._own[i].shape)
        return found


def _done_by_now(there: Sequence[Gathered]) -> Any:
    """An event at which what was asked of the GPU so far is done; None without one."""
    if not any(whole.is_cuda for _, whole in there):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


Blob = bytes | Held


def unpacked(blob: bytes, spans: Spans, device: torch.device) -> list[Tensor]:
    """The tensors of a message on a GPU, each in memory of its own. `spans` were held against the blob's length."""
    start = at = 8 + int.from_bytes(blob[:8], "little")
    for begin, end in sorted((begin, end) for _, _, begin, end in spans.values()):
        if begin != at:
            raise ValueError("its tensors leave gaps, or lie on one another")
        at = end
    if at != len(blob):
        raise ValueError("it is longer than its tensors")
    if start == len(blob):
        return [_empty(spans[i], device) for i in range(len(spans))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that bytes are not writable: nothing writes
        whole = torch.frombuffer(memoryview(blob)[start:], dtype=torch.uint8).to(device)
    found = [_empty(spans[i], device) for i in range(len(spans))]
    by_type: dict[str, list[int]] = {}  # they lie type by type
    for i in sorted((i for i in spans if spans[i][3] > spans[i][2]), key=lambda i: spans[i][2]):
        by_type.setdefault(spans[i][0], []).append(i)
    for name, group in by_type.items():
        begin, end, dtype = spans[group[0]][2] - start, spans[group[-1]][3] - start, _DTYPES[name]
        sizes = [(spans[i][3] - spans[i][2]) // dtype.itemsize for i in group]
        if sum(sizes) * dtype.itemsize != end - begin or begin % dtype.itemsize:
            raise ValueError("its tensors do not lie type by type")
        # Copies: aligned, and no part of the others' memory.
        parts = cast(Any, torch.split_with_sizes_copy)(whole[begin:end].view(dtype), sizes)
        for i, part in zip(group, parts, strict=True):
            found[i] = part.view(spans[i][1])
    return found


_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def _empty(span: tuple[str, tuple[int, ...], int, int], device: torch.device) -> Tensor:
    return torch.empty(span[1], dtype=_DTYPES[span[0]], device=device)
