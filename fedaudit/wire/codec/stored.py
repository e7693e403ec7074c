"""Messages as a transcript stored them: their headers, sizes and digests, from a row of the index and the packs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from fedaudit.wire.codec.grammar import STORED_TYPES, Header
from fedaudit.wire.codec.inspection import tensors_in
from fedaudit.wire.codec.packing import FORMAT, NAMES, packed_size
from fedaudit.wire.message import class_named


def stored_header(tree: Any, tensors: Sequence[Any], digest: str) -> tuple[Header, int] | None:
    """Return the header of a message that a transcript stored, and how many bytes the message had.

    `tensors` are its rows in the index: type, shape, ... A row of the index has its keys in alphabetical order. Those
    of a message stand in the order of its class's fields; None if this process does not know the class.
    """
    node = _in_order(tree)
    own = [tensors[i] for i in range(len(tensors_in(tree)))]
    kinds = [(STORED_TYPES[row[0]], tuple(row[1])) for row in own]
    if node is None or any(kind[0] not in NAMES for kind in kinds):
        return None
    text, at, spans = json.dumps(node, separators=(",", ":"), allow_nan=False), 0, {}
    for i, row in enumerate(own):
        spans[i] = row[0], tuple(row[1]), at, at + row[4]
        at += row[4]
    return Header(node, text, digest, spans), packed_size(kinds, f"{FORMAT}:{digest}:{text}")


def _in_order(node: Any) -> Any:
    """Return an encoded tree with the keys in the order in which the encoder writes them; None if a class is unknown.

    Only the order of a record's fields needs the class.
    """
    match node:
        case {"r": [name, fields]}:
            cls = class_named(name)
            if cls is None or set(cls.declared()) != set(fields):
                return None
            parts = {field: _in_order(fields[field]) for field in cls.declared()}
            lost = any(part is None and fields[field] is not None for field, part in parts.items())
            return None if lost else {"r": [name, parts]}
        case {"d": items}:
            values = [[key, _in_order(item)] for key, item in items]
            return None if _lost(items, [value for _, value in values]) else {"d": values}
        case {"l": items} | {"u": items}:
            inner = [_in_order(item) for item in items]
            lost = any(new is None and old is not None for new, old in zip(inner, items, strict=True))
            return None if lost else {next(iter(node)): inner}
        case {"m": [_, names, _]}:
            ordered = {key: node[key] for key in ("m", "as", "svd", "z") if key in node}
            if "svd" in ordered:
                ordered["svd"] = _by_names(ordered["svd"], names)
            if "z" in ordered:
                how, shapes, base = ordered["z"]
                ordered["z"] = [how, _by_names(shapes, names), base]
            return ordered
        case {"q": _, "as": _}:
            return {"q": node["q"], "as": node["as"]}
    return node


def _lost(items: Sequence[Any], values: Sequence[Any]) -> bool:
    return any(new is None and old[1] is not None for old, new in zip(items, values, strict=True))


def _by_names(shapes: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return shapes by name in the order of the state's tensors, which travel under names that begin so."""

    def place(key: str) -> int:
        return next((i for i, name in enumerate(names) if name.startswith(f"{key}|")), len(names))

    return {key: shapes[key] for key in sorted(shapes, key=place)}


def stored_digest(head: Header, content: Callable[[int], Any]) -> str:
    """Return the digest of a message from its header and its tensors' bytes, as the sender computed it."""
    whole = xxhash.xxh3_128(head.text.encode())
    for i in range(len(head.tensors)):
        dtype, shape, _, _ = head.tensors[i]
        whole.update(f"{STORED_TYPES[dtype]}{list(shape)}".encode())
        whole.update(content(i))
    return whole.hexdigest()
