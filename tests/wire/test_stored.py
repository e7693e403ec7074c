"""Messages as the index stored them, with sorted keys: their text, size and digest are those of the sender."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from fedaudit import LowRank, Record, State, Up, private, public
from fedaudit.wire.codec import encode, read_header, stored_digest, stored_header
from fedaudit.wire.codec.grammar import content_of
from fedaudit.wire.compression import stage_of


class Within(Record):
    z: int
    a: Tensor | None


class Many(Up):
    z: Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")
    w: State = private("weights", via="model", unit="client")
    g: State = private("gradients", via="model", unit="client", finite=False)
    d: dict[str, Within | None] = public()
    f: list[Within] = public()
    a: tuple[Within, int] = public()
    n: int | None = public()


class Number(Up):
    n: int = public()


def seeded(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def rank_one(rows, columns):
    return torch.arange(1.0, rows + 1)[:, None] * torch.ones(1, columns)


def many():
    within = [Within(3, None), Within(4, torch.ones(2)), Within(5, torch.zeros(0))]
    low = LowRank(State({"y": rank_one(6, 7), "b": rank_one(5, 8), "a": torch.ones(3)}), 0.9)
    w = State({"z": seeded(9, 9), "k": seeded(2), "c": seeded(80)}, buffers=["k"])
    return Many(seeded(4, 3).clamp(-1, 1), w, low, {"q": within[0], "b": None, "c": within[1]}, within, (within[1], 7),
                None)  # fmt: skip


def stored(blob):
    """Return what the index keeps of a message: the tree with sorted keys, and the rows of the tensors."""
    head = read_header(blob)
    rows = [[dtype, list(shape), "content", 0, end - begin, ""] for _, (dtype, shape, begin, end) in
            sorted(head.tensors.items())]  # fmt: skip
    return json.loads(json.dumps(head.tree, sort_keys=True)), rows, head.digest


@pytest.mark.parametrize("compress", [None, "topk:0.1", "int8"])
def test_a_stored_message_is_told_as_it_was_sent(compress):
    """Also behind it in its row: the tensors of the message that it answers."""
    blob = encode(many(), stage_of(compress), None)
    sent = read_header(blob)
    tree, rows, digest = stored(blob)
    assert json.dumps(tree, separators=(",", ":")) != sent.text, "nothing was out of order, so nothing was shown"
    head, size = stored_header(tree, [*rows, ["F32", [9], "weights", 0, 36, ""]], digest)
    assert head.text == sent.text
    assert (head.tree, head.digest, size) == (sent.tree, digest, len(blob))
    at = 0
    for i, (dtype, shape, _, _, length, _) in enumerate(rows):
        assert head.tensors[i] == (dtype, tuple(shape), at, at + length)
        at += length
    assert len(head.tensors) == len(sent.tensors)
    assert stored_digest(head, content_of(blob, sent)) == sent.digest
    other = torch.full((500,), 7, dtype=torch.uint8).numpy().tobytes()
    assert stored_digest(head, lambda i: other[: rows[i][4]]) != sent.digest


def test_a_message_without_tensors_is_told_too():
    blob = encode(Number(5))
    head, size = stored_header(*stored(blob))
    assert (head.text, size, head.tensors) == (read_header(blob).text, len(blob), {})
    assert stored_digest(head, bytes) == read_header(blob).digest


def unknown_in(tree):
    """Yield the tree with the class of one record at a time under a name that nobody defined."""
    text = json.dumps(tree)
    places = [i for i in range(len(text)) if text.startswith(".Within", i)]
    for at in places:
        yield json.loads(f"{text[:at]}.Nobody{text[at + 7 :]}")


def test_a_message_with_a_class_that_is_not_known_is_not_told():
    tree, rows, digest = stored(encode(many()))
    assert stored_header(tree, rows, digest) is not None
    found = list(unknown_in(tree))
    assert len(found) == 6
    assert all(stored_header(wrong, rows, digest) is None for wrong in found)
    name, fields = tree["r"]
    assert stored_header({"r": [f"{name}Other", fields]}, rows, digest) is None
    assert stored_header({"r": [name, {**fields, "more": 1}]}, rows, digest) is None
    assert stored_header({"r": [name, {k: v for k, v in fields.items() if k != "n"}]}, rows, digest) is None
