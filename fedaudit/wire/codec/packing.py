"""Packing of tensors into the bytes of a message and back, with as few copies as possible.

The format is safetensors', byte for byte as its own writer makes it. That writer copies each tensor twice, and it would
fetch a model from a GPU tensor by tensor. Here all tensors of one device and type come in one transfer, and are copied
once, into the message. The way back is one transfer, too.

`Held` is a message that stays in the process that made it. Its bytes are made only when somebody reads them. What is
frozen in it (see `frozen`) is neither copied nor fetched from a GPU: it counts by the digest of its content.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from fedaudit.cuda_streams import TRANSFER, kept_stream

# The format's names of the types, in the order in which its writer stores them: the widest alignment first.
NAMES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.uint32: "U32",
    torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16",
    torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
PINNED = 1 << 28  # bytes: a larger transfer does not go through pinned memory
HELD_ON = {"cuda", "cpu"}  # the devices on which messages within a process are held
FORMAT = 1
_PLACE = {dtype: i for i, dtype in enumerate(NAMES)}
Gathered = tuple[list[int], Tensor]
Spans = dict[int, tuple[str, tuple[int, ...], int, int]]  # for each tensor's number: type, shape, begin, end


def raw(t: Tensor) -> Any:
    """Return the bytes of a dense tensor in main memory, without a copy."""
    return t.reshape(-1).view(torch.uint8).numpy() if t.numel() else b""


def at_home(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in main memory, dense. Those of one GPU and type come in one transfer and share memory."""
    return brought(tensors, gathered(tensors))


def gathered(tensors: Sequence[Tensor], but: Collection[int] = ()) -> list[Gathered]:
    """Return, for each GPU and type, the numbers of its tensors, all but `but`, and those tensors joined into one."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        if not _is_home(t) and i not in but:
            groups.setdefault((t.device, t.dtype), []).append(i)
    return [(group, torch.cat([tensors[i].detach().reshape(-1) for i in group])) for group in groups.values()]


def brought(tensors: Sequence[Tensor], there: Sequence[Gathered], ready: Any = None) -> list[Tensor]:
    """Return the tensors in main memory. Each group in `there` comes in one transfer, after the event `ready`."""
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
    """Return a tensor in main memory. Pinned memory takes it at the full rate, and is reused for the next message.

    With `ready`, an event after which the tensor is complete, the transfer does not wait for the device's other work.
    """
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
    """Return a message: tensors in main memory, named by their number, and `head` under the metadata key `fedaudit`."""
    if any(t.dtype not in NAMES for t in tensors):
        return safetensors.torch.save({str(i): t.clone() for i, t in enumerate(tensors)}, metadata={"fedaudit": head})
    text, order, _ = _laid_out(tensors, {"fedaudit": head})
    return b"".join([text, *(raw(tensors[i]) for i in order)])


def packed_size(kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]], head: str) -> int:
    """Return how many bytes `packed` gives for tensors of these types and shapes."""
    table, _, spans = _table(tuple(kinds), ())
    text = f'{{"__metadata__":{_json({"fedaudit": head})}{table}}}'.encode()
    return 8 + len(text) + -len(text) % 8 + max((end for *_, end in spans.values()), default=0)


def file_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[Any]:
    """Return tensors in main memory as the pieces of a safetensors file."""
    if any(t.dtype not in NAMES for t in tensors.values()):
        return [safetensors.torch.save(dict(tensors), metadata=dict(metadata))]
    dense = [t.detach().contiguous() for t in tensors.values()]
    text, order, _ = _laid_out(dense, metadata, list(tensors))
    return [text, *(raw(dense[i]) for i in order)]


def _laid_out(
    tensors: Sequence[Tensor], metadata: Mapping[str, str], names: Sequence[str] = ()
) -> tuple[bytes, list[int], Spans]:
    """Return the bytes before the tensors, the order of the tensors, and their positions.

    Without `names`, tensors are named by their numbers.
    """
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
    """Return the description of tensors of these types and shapes, their order, and their positions after the header.

    It is cached, because most messages of a class have the same types and shapes.
    """
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


_DIGEST_AT = 8 + len(f'{{"__metadata__":{{"fedaudit":"{FORMAT}:')  # the digest's position in a message


def digest(tree: str, tensors: Sequence[Tensor], frozen: Mapping[int, Content] | None = None) -> str:
    """Return the digest of the tree and of all bytes of tensors in main memory. Of a frozen tensor, which may lie
    elsewhere, the digest of its content stands for its bytes.
    """
    h = xxhash.xxh3_128(tree.encode())
    for i, t in enumerate(tensors):
        h.update(f"{t.dtype}{list(t.shape)}".encode())
        h.update(frozen[i].digest.encode() if frozen and i in frozen else raw(t))
    return h.hexdigest()


def _copy(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format)


class Content:
    """The content of a large tensor in main memory, or of a frozen one. This process holds one copy of equal tensors on
    a device.

    Only reading all of a tensor tells whether it changed. The object's identity does not, nor does torch's count of
    changes: writes through numpy or `.data` are not counted.
    """

    def __init__(self, digest: str):
        self.digest = digest
        self.tensor: Tensor | None = None  # the copy that is held
        self.finite = False  # whether all of its numbers were checked and are finite
        self._count = 0  # torch's count of changes of that copy, when it was made

    @property
    def of(self) -> Tensor:
        """Return the tensor that is held, to be read only."""
        assert self.tensor is not None, "nothing is held yet"
        return self.tensor

    def held(self, t: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the tensor that is held. If there is none yet, hold a copy of `t`, which has this content."""
        if self.tensor is None:
            self.tensor = copy(t)
            self._count = _changes(self.tensor)
        return self.tensor

    @property
    def changed(self) -> bool:
        """Return whether somebody changed the tensor that is held, as far as torch counts changes."""
        return self.tensor is not None and _changes(self.tensor) != self._count

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a copy or a pickle of a content holds. Its tensor is another one, with a count of its own."""
        vars(self).update(state)
        self._count = 0 if self.tensor is None else _changes(self.tensor)


def _changes(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version  # torch does not count for tensors made in inference mode


LARGE = 1 << 16  # bytes from which a tensor is recognised by its content
_contents: weakref.WeakValueDictionary[Any, Content] = weakref.WeakValueDictionary()  # a cache only


def contents_of(tensors: Sequence[Tensor], but: Collection[int] = ()) -> dict[int, Content]:
    """Return, by number, the contents of the large tensors in main memory among these. Skip those in `but`."""
    found = {}
    for i, t in enumerate(tensors):
        if t.numel() * t.element_size() >= LARGE and _is_home(t) and i not in but:
            digest = xxhash.xxh3_128_hexdigest(raw(t.detach().contiguous()))
            key = digest, t.dtype, tuple(t.shape)
            found[i] = _contents.get(key) or _contents.setdefault(key, Content(digest))
    return found


def frozen_content(t: Tensor, found: str | None = None) -> Content:
    """Return the content of a tensor that stays as it is, on its device.

    `found` is its digest, if that is known: then nobody else has the tensor, and it is held without a copy.
    """
    copy = _copy if found is None else torch.detach
    if found is None:
        found = xxhash.xxh3_128_hexdigest(raw(_brought(t.detach().contiguous())))
    key = found, t.dtype, tuple(t.shape), t.device
    content = _contents.get(key) or _contents.setdefault(key, Content(found))
    content.held(t, copy)
    return content


def held_content(found: str, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> Content | None:
    """Return the content of a frozen tensor that this process holds on a device, by its digest; None if it does not."""
    content = _contents.get((found, dtype, tuple(shape), device))
    return None if content is None or content.tensor is None else content


def there(device: torch.device) -> torch.device:
    """Return a device as the tensors on it name it: a GPU has its number."""
    return torch.empty(0, device=device).device


@dataclass(frozen=True)
class Apart:
    """A tensor of a client's state that lies in a file of its own: its place in the state, and ways to its bytes."""

    begin: int
    end: int
    digest: str  # of its bytes
    read: Callable[[], bytes]
    mapped: Callable[[], Tensor]  # gives the file's bytes without reading them

    def content(self, dtype: str, shape: Sequence[int]) -> Content:
        """Return it as a frozen content. Its file is mapped unless this process holds the tensor already."""
        kind = _DTYPES[dtype]
        known = held_content(self.digest, kind, shape, torch.device("cpu"))
        return known or frozen_content(self.mapped().view(kind).view(tuple(shape)), self.digest)


class Held:
    """A message that was encoded in this process: the tree as text, and the tensors on their own devices.

    It stands for its bytes, and nobody may change it. Decoding gives copies of the tensors, but of frozen ones the
    tensors themselves.
    """

    def __init__(
        self,
        text: str,
        tensors: Sequence[Tensor],
        there: Sequence[Gathered],
        known: Mapping[int, Content] | None = None,
        mine: bool = False,
        frozen: Mapping[int, Content] | None = None,
    ):
        """Hold a message. `known` gives, by number, the contents of some tensors, which may be held already. `mine`
        says that nobody else has the tensors, so that they need not be copied. `frozen` gives the contents of those
        that are frozen."""
        elsewhere = {i for group, _ in there for i in group}
        self.text, self._there = text, list(there)
        self.frozen = frozen or {}
        self._known = known = {**(known or {}), **self.frozen}
        copy = torch.detach if mine else _copy
        self._own = [
            known[i].held(t, copy) if i in known else torch.empty_like(t, device="meta") if i in elsewhere else copy(t)
            for i, t in enumerate(tensors)
        ]
        unknown = "0" * 32  # as long as a digest, so that all positions are right before the digest is known
        head = {"fedaudit": f"{FORMAT}:{unknown}:{text}"}
        self._start, self._order, self.spans = _laid_out(self._own, head)
        self._length = len(self._start) + sum(end - begin for *_, begin, end in self.spans.values())
        self._ready = _done_by_now([*(whole for _, whole in there), *(self._own[i] for i in self.frozen)])

    def __len__(self) -> int:
        return self._length

    @property
    def elsewhere(self) -> bool:
        """Return whether its digest needs tensors from another device."""
        return bool(self._there)

    @cached_property
    def shared(self) -> dict[int, int]:
        """Return the bytes of each frozen tensor, by the identity of its content, which other messages may hold too."""
        return {id(content): self._own[i].nbytes for i, content in self.frozen.items()}

    @cached_property
    def alone(self) -> int:
        """Return the bytes of all but its frozen tensors."""
        return self._length - sum(self._own[i].nbytes for i in self.frozen)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Return all tensors in main memory, and keep them there."""
        return self.at_home()

    def at_home(self, but: Collection[int] = ()) -> list[Tensor]:
        """Return all tensors in main memory, without keeping them there. Frozen ones in `but` stay where they are."""
        if "tensors" in vars(self):
            return self.tensors
        home = brought(self._own, self._there, self._ready)
        return [self.home_of(i) if i in self.frozen and i not in but else t for i, t in enumerate(home)]

    def home_of(self, i: int) -> Tensor:
        """Return a frozen tensor in main memory."""
        t = self._own[i]
        return t if _is_home(t) else _brought(t, self._ready)

    @cached_property
    def digest(self) -> str:
        home = self.at_home(self.frozen) if self.frozen else self.tensors
        return digest(self.text, home, self.frozen)

    @cached_property
    def tree(self) -> Any:
        """Return the parsed text. Callers must not change it."""
        return json.loads(self.text)

    def content(self, i: int) -> str | None:
        """Return the digest of a tensor's bytes, or None if it is not known."""
        return self._known[i].digest if i in self._known else None

    def pieces(self, home: Sequence[Tensor], but: Collection[int] = ()) -> list[tuple[int, Any]]:
        """Return (-1, the bytes before the tensors), then (number, bytes) for each tensor, in their order.

        Those in `but` are left out.
        """
        found = vars(self).get("digest") or digest(self.text, home, self.frozen)
        start = self._start[:_DIGEST_AT] + found.encode() + self._start[_DIGEST_AT + len(found) :]
        return [(-1, start), *((i, raw(home[i])) for i in self._order if i not in but)]

    def __bytes__(self) -> bytes:
        return b"".join([piece for _, piece in self.pieces(self.at_home())])

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (bytes(self),)  # another process gets it as bytes

    def seen(self, device: torch.device) -> list[Tensor] | None:
        """Return the tensors themselves, to be read only, or None if they do not lie one by one on that device."""
        apart = bool(self._there) or any(not _is_home(self._own[i]) for i in self.frozen)
        return None if apart or device.type != "cpu" else self._own

    def copies(self, device: torch.device) -> list[Tensor]:
        """Return copies of the tensors on a device. Frozen ones come as they are, from there or from main memory."""
        here = device.type == "cpu"
        found = [
            t if t.is_meta else self._frozen(i, device) if i in self.frozen else t.clone() if here else t.to(device)
            for i, t in enumerate(self._own)
        ]
        for group, whole in self._there:
            sizes = [self._own[i].numel() for i in group]
            parts = cast(Any, torch.split_with_sizes_copy)(whole.to(device), sizes)
            for i, part in zip(group, parts, strict=True):
                found[i] = part.view(self._own[i].shape)
        return found

    def _frozen(self, i: int, device: torch.device) -> Tensor:
        """Return a frozen tensor for a reader on a device. One in main memory stays there, if none is held there."""
        t = self._own[i]
        if t.device == device:
            return t
        if (known := held_content(self.frozen[i].digest, t.dtype, t.shape, there(device))) is not None:
            return known.of
        return t if _is_home(t) else t.to(device)


def _done_by_now(tensors: Sequence[Tensor]) -> Any:
    """Return an event that marks the end of the GPU's work so far, or None if no tensor lies on a GPU."""
    if not any(t.is_cuda for t in tensors):
        return None
    event = torch.cuda.Event()
    event.record()
    return event


Blob = bytes | Held


def unpacked(blob: bytes, spans: Spans, device: torch.device) -> list[Tensor]:
    """Return the tensors of a message on a device, each in its own memory. `spans` must fit the blob's length."""
    start = at = 8 + int.from_bytes(blob[:8], "little")
    for begin, end in sorted((begin, end) for _, _, begin, end in spans.values()):
        if begin != at:
            raise ValueError("its tensors leave gaps or overlap")
        at = end
    if at != len(blob):
        raise ValueError("it is longer than its tensors")
    if start == len(blob):
        return [_empty(spans[i], device) for i in range(len(spans))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that bytes are not writable, but nothing writes
        whole = torch.frombuffer(memoryview(blob)[start:], dtype=torch.uint8).to(device)
    found = [_empty(spans[i], device) for i in range(len(spans))]
    by_type: dict[str, list[int]] = {}  # the tensors of one type lie together
    for i in sorted((i for i in spans if spans[i][3] > spans[i][2]), key=lambda i: spans[i][2:]):
        by_type.setdefault(spans[i][0], []).append(i)
    for name, group in by_type.items():
        begin, end, dtype = spans[group[0]][2] - start, spans[group[-1]][3] - start, _DTYPES[name]
        sizes = [(spans[i][3] - spans[i][2]) // dtype.itemsize for i in group]
        if sum(sizes) * dtype.itemsize != end - begin or begin % dtype.itemsize:
            raise ValueError("its tensors do not lie type by type")
        # Copies, so that each tensor is aligned and shares no memory with the others.
        parts = cast(Any, torch.split_with_sizes_copy)(whole[begin:end].view(dtype), sizes)
        for i, part in zip(group, parts, strict=True):
            found[i] = part.view(spans[i][1])
    return found


_DTYPES = {name: dtype for dtype, name in NAMES.items()}


def _empty(span: tuple[str, tuple[int, ...], int, int], device: torch.device) -> Tensor:
    return torch.empty(span[1], dtype=_DTYPES[span[0]], device=device)
