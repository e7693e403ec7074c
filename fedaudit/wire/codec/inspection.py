"""Looks at encoded records without decoding them: sizes of fields, choices, names and numbers of tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fedaudit.wire.compression import PARTS, own_names

if TYPE_CHECKING:
    from fedaudit.wire.codec.grammar import Header


def _walk(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield all nodes of an encoded tree as (what, node)."""
    match node:
        case {"t": int()} | {"q": int()}:
            yield "tensor", node
        case {"z": [int(), str(), list()]}:
            yield "parts", node
        case {"m": _}:
            yield "state", node
        case {"d": items}:
            for key, item in items:
                yield "key", key
                yield from _walk(item)
        case {"l": items} | {"u": items}:
            for item in items:
                yield from _walk(item)
        case {"r": [_, fields]}:
            for item in fields.values():
                yield from _walk(item)
        case {"k": item}:
            yield "frozen", item
            yield from _walk(item)
        case _:
            yield "plain", node


def fields_of(head: Header) -> dict[str, Any]:
    return head.tree["r"][1]


def _plain_size(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, bool):
        return 1
    return len(value.encode()) if isinstance(value, str) else 8


def measure(head: Header, blob_size: int) -> dict[str, dict[str, int]]:
    """Return the bytes of each field: payload (the papers' convention), buffers, and what really travelled for it.

    Bytes of no field (the frame of the message, the table of tensors) are under "(frame)". A compressed field also has
    "whole", its payload without compression.
    """
    length = {i: end - begin for i, (_, _, begin, end) in head.tensors.items()}
    sizes: dict[str, dict[str, int]] = {}
    for name, node in fields_of(head).items():
        payload = buffers = wire = saved = 0
        for what, item in _walk(node):
            if what == "tensor":
                payload += length[item["t"] if "t" in item else item["q"]]
            elif what == "parts":
                first, how, shape = item["z"]
                sent = sum(length[first + i] for i in range(len(PARTS[how])))
                payload += sent
                saved += 4 * math.prod(shape) - sent
            elif what == "state":
                first, names, which = item["m"]
                inside = sum(length[first + i] for i in which)
                buffers += inside
                payload += sum(length[first + i] for i in range(len(names))) - inside
                for name_of, shape in item["z"][1].items() if "z" in item else ():
                    parts = [names.index(name_of + end) for end in PARTS[item["z"][0]]]
                    saved += 4 * math.prod(shape) - sum(length[first + i] for i in parts)
            elif what != "frozen":
                payload += _plain_size(item)
                wire -= _plain_size(item)  # it travels in the tree, which `text` counts below
        text = len(json.dumps(node, separators=(",", ":")).encode())
        sizes[name] = {"payload": payload, "buffers": buffers, "wire": wire + payload + buffers + text}
        if saved:
            sizes[name]["whole"] = payload + saved
    sizes["(frame)"] = {"payload": 0, "buffers": 0, "wire": blob_size - sum(s["wire"] for s in sizes.values())}
    return sizes


def choices(tree: Any) -> Any:
    """Return an encoded value without its tensors: which layers, which classes.

    A tensor becomes None, a state the list of its names, a state of low rank the ranks and shapes of its factors. A
    compressed value looks as if it had not been compressed.
    """
    match tree:
        case {"t": _} | {"q": _} | {"z": [int(), str(), list()]}:
            return None
        case {"m": [_, names, _], "z": [how, shapes, _]}:
            return own_names(how, names, shapes)
        case {"m": _, "svd": shapes}:
            return shapes
        case {"m": [_, names, _]}:
            return list(names)
        case {"d": items}:
            return {key: choices(item) for key, item in items}
        case {"l": items} | {"u": items}:
            return [choices(item) for item in items]
        case {"r": [_, fields]}:
            return {name: choices(item) for name, item in fields.items()}
        case _:
            return tree


def class_of(tree: Any) -> str:
    """Return the class id of an encoded record."""
    return str(tree["r"][0])


def node_of(tree: Any, field: str) -> Any:
    """Return the encoded value of one field of an encoded record, or None if it has no such field."""
    return tree["r"][1].get(field)


def names_of(tree: Any) -> list[str]:
    """Return the names of the fields of an encoded record, sorted."""
    return sorted(tree["r"][1])


def tensors_in(node: Any) -> set[int]:
    """Return the numbers of all tensors of an encoded value."""
    found: set[int] = set()
    for what, item in _walk(node):
        match what, item:
            case "tensor", {"t": i} | {"q": i}:
                found.add(i)
            case "parts", {"z": [first, how, _]}:
                found.update(range(first, first + len(PARTS[how])))
            case "state", {"m": [first, names, _]}:
                found.update(range(first, first + len(names)))
    return found


def frozen_in(node: Any) -> set[int]:
    """Return the numbers of the tensors of an encoded value that are frozen."""
    return set().union(*(tensors_in(item) for what, item in _walk(node) if what == "frozen"))


def state_tensors(node: Any) -> set[int]:
    """Return the numbers of the tensors that belong to model states."""
    states = [item["m"] for what, item in _walk(node) if what == "state"]
    return {first + i for first, names, _ in states for i in range(len(names))}


def state_shapes(node: Any, shape: Callable[[int], Sequence[int]]) -> dict[str, tuple[int, ...]] | None:
    """Return the shape of each named tensor if the value is one model state.

    Return None for any other value, and if a method has sent other tensors in place of the state's own.
    """
    match node:
        case {"svd": _}:
            return None
        case {"m": [first, names, _], "z": [how, shapes, _]}:
            at = {name: tuple(shape(first + i)) for i, name in enumerate(names)}
            return {name: tuple(shapes.get(name, at.get(name, ()))) for name in own_names(how, names, shapes)}
        case {"m": [first, names, _]}:
            return {name: tuple(shape(first + i)) for i, name in enumerate(names)}
    return None


def bases_of(tree: Any) -> list[str]:
    """Return the fields of the answered message of which parts of an encoded reply are changes."""
    states = [item for what, item in _walk(tree) if what == "state"]
    return sorted({str(item["z"][2]) for item in states if "z" in item and item["z"][2] is not None})


def moved(node: Any, by: int) -> Any:
    """Return an encoded state with its tensor numbers raised by `by`."""
    first, names, buffers = node["m"]
    return {**node, "m": [first + by, names, buffers]}
