"""The bytes of a message: those of safetensors' own writer, and back in one transfer."""

from __future__ import annotations

import contextlib
import types

import pytest
import safetensors.torch
import torch
import xxhash

from fedaudit import Up, public
from fedaudit.errors import WireError
from fedaudit.wire.codec import (
    content_of,
    decode,
    decode_tree,
    encode,
    encode_lazily,
    encode_tree,
    held_again,
    known_content,
    packing,
    read_header,
    tree_of,
)
from fedaudit.wire.codec.packing import NAMES, Held, at_home, file_of, packed, packed_size, there, unpacked

ALL = [torch.ones(3).to(dtype) for dtype in NAMES]
TENSORS = [*ALL, torch.zeros(0, 4), torch.tensor(2.5), torch.arange(6.0).view(2, 3).T, torch.tensor(True), *ALL]


@pytest.mark.parametrize("head", ["", "1:ab:{}", 'quotes " and \\ and é \u2028 and \n'])
def test_the_bytes_are_those_of_safetensors(head: str) -> None:
    """All types and shapes, more than ten tensors (whose names sort as texts), and a header of any length."""
    tensors = at_home(TENSORS)
    theirs = safetensors.torch.save(
        {str(i): t.clone(memory_format=torch.contiguous_format) for i, t in enumerate(tensors)},
        metadata={"fedaudit": head},
    )
    assert packed(tensors, head) == theirs


def test_a_file_is_that_of_safetensors() -> None:
    tensors = {f"layer {i}": t for i, t in enumerate(at_home(TENSORS))}
    theirs = safetensors.torch.save(
        {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, metadata={"arch": "é"}
    )
    assert b"".join(file_of(tensors, {"arch": "é"})) == theirs


def test_nothing_is_a_message_too() -> None:
    assert packed([], "x") == safetensors.torch.save({}, metadata={"fedaudit": "x"})
    assert decode_tree(encode_tree({"a": 1})) == {"a": 1}


def test_one_transfer_brings_every_tensor_back_in_memory_of_its_own() -> None:
    blob = encode_tree(list(TENSORS))
    found = unpacked(blob, read_header(blob).tensors, torch.device("cpu"))
    assert len({t.untyped_storage().data_ptr() for t in found if t.numel()}) == sum(t.numel() > 0 for t in found)
    for t, wanted in zip(found, decode_tree(blob), strict=True):
        assert t.dtype == wanted.dtype
        assert torch.equal(t, wanted)
    nothing = encode_tree([torch.zeros(0, 3)])
    assert unpacked(nothing, read_header(nothing).tensors, torch.device("cpu"))[0].shape == (0, 3)


def test_tensors_tile_their_message() -> None:
    blob = encode_tree([torch.ones(4), torch.zeros(4)])
    spans = read_header(blob).tensors
    one, other = spans[0], spans[1]
    for wrong in ({0: one}, {0: one, 1: one}, {0: other}):
        with pytest.raises(ValueError, match="tensors"):
            unpacked(blob, wrong, torch.device("cpu"))


def test_tied_and_sliced_tensors_travel_whole() -> None:
    base = torch.arange(10.0)
    found = decode_tree(encode_tree([base, base, base[2:5], base[::3]]))
    assert [t.tolist() for t in found] == [base.tolist(), base.tolist(), [2, 3, 4], [0, 3, 6, 9]]


def test_the_first_value_that_is_not_finite_is_named() -> None:
    fine, wrong = torch.ones(3), torch.tensor([1.0, float("inf")])
    with pytest.raises(WireError, match=r"value\['b'\] holds NaN"):
        encode_tree({"a": fine, "b": wrong, "c": wrong})
    large = torch.full((4,), torch.finfo(torch.float32).max)  # whose sum is infinite, and they are not
    assert torch.equal(decode_tree(encode_tree({"a": large}))["a"], large)


def test_what_lies_elsewhere_is_brought_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if half of the tensors lay on a GPU: the same bytes, and one sum tells whether all is finite."""
    monkeypatch.setattr(packing, "_is_home", lambda t: t.dim() == 0 or t.dtype not in (torch.float32, torch.bool))
    assert sum(len(group) for group, _ in packing.gathered(TENSORS)) > 4
    for mine, wanted in zip(at_home(TENSORS), TENSORS, strict=True):
        assert mine.dtype == wanted.dtype
        assert torch.equal(mine, wanted)
    tree = {"a": torch.arange(6.0).view(2, 3).T, "b": torch.zeros(0), "c": torch.ones(3), "d": torch.tensor(2.0)}
    there = encode_tree(tree)
    monkeypatch.undo()
    assert there == encode_tree(tree)


@pytest.mark.parametrize("bad", [0, 2])
def test_one_bad_number_among_what_was_gathered_is_named(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_is_home", lambda t: False)
    tensors = [torch.ones(2), torch.full((2,), 3e38), torch.ones(3)]
    encode_tree(tensors)  # the sum overflows, and nothing is wrong
    tensors[bad][1] = torch.nan
    with pytest.raises(WireError, match=rf"value\[{bad}\] holds NaN"):
        encode_tree(tensors)
    encode_tree(tensors, finite=False)


def test_types_that_only_safetensors_knows_are_left_to_it() -> None:
    """Numbers of eight bits with a point have no place in our order. Its own writer takes them, with all others."""
    tensors = [torch.ones(3), torch.ones(2).to(torch.float8_e5m2)]
    blob = packed(tensors, "head")
    found = safetensors.torch.load(blob)
    assert found["1"].dtype == torch.float8_e5m2
    assert found["0"].tolist() == [1.0] * 3
    assert safetensors.torch.load(packed(tensors[1:], "head"))["0"].dtype == torch.float8_e5m2
    pieces = file_of({"a": tensors[1], "b": tensors[0]}, {"k": "v"})
    assert safetensors.torch.load(b"".join(bytes(piece) for piece in pieces))["a"].dtype == torch.float8_e5m2


@pytest.mark.parametrize("text", ["", "a", "abcdefg", "ü"])
def test_the_size_is_known_before_the_bytes(text: str) -> None:
    """Also of no tensors, and of headers that are filled up to a multiple of eight."""
    for tensors in ([], [torch.zeros(3, dtype=torch.int8)], [torch.zeros(2, 2), torch.zeros(0), torch.zeros(5).half()]):
        kinds = [(t.dtype, tuple(t.shape)) for t in tensors]
        assert packed_size(kinds, text) == len(packed(tensors, text))


@pytest.mark.parametrize(("ready", "limit"), [(None, 12), (None, 11), ("an event", 13)])
def test_a_transfer_from_a_gpu_waits_for_what_it_must(ready, limit, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an event it goes by a stream of its own, after the event. Up to a limit it goes through pinned memory."""
    said: list[object] = []

    class Stream:
        def __init__(self, name: str):
            self.name = name

        def wait_event(self, event: object) -> None:
            said.append((self.name, "waits for", event))

        def synchronize(self) -> None:
            said.append((self.name, "is done"))

    class Here:
        def copy_(self, flat: object, non_blocking: bool) -> None:
            said.append(("copy", non_blocking))

    @contextlib.contextmanager
    def within(stream: Stream):
        said.append((stream.name, "begins"))
        yield
        said.append((stream.name, "ends"))

    def empty(shape: object, dtype: object, pin_memory: bool) -> Here:
        said.append(("pinned", pin_memory, shape, dtype))
        return Here()

    flat = types.SimpleNamespace(
        device=types.SimpleNamespace(type="cuda"), numel=lambda: 3, element_size=lambda: 4, shape=(3,), dtype="F32"
    )
    monkeypatch.setattr(packing, "PINNED", limit)
    monkeypatch.setattr(packing, "kept_stream", lambda *_: Stream("own"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("current"))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(packing, "torch", types.SimpleNamespace(cuda=torch.cuda, empty=empty))
    assert isinstance(packing._brought(flat, ready), Here)
    name = "current" if ready is None else "own"
    waits = [] if ready is None else [(name, "waits for", ready)]
    assert said == [
        (name, "begins"), *waits, ("pinned", limit >= 12, (3,), "F32"), ("copy", True), (name, "is done"),
        (name, "ends"),
    ]  # fmt: skip


def test_what_is_home_is_not_gathered() -> None:
    assert packing.gathered(TENSORS) == []
    assert packing._is_home(torch.ones(2))
    assert not packing._is_home(torch.empty(2, device="meta"))


def test_a_large_tensor_is_known_by_its_content() -> None:
    """From 65 536 bytes on. Equal bytes of another type or shape are another content."""
    large, small = torch.arange(16384.0), torch.arange(16383.0)
    found = packing.contents_of(
        [small, large, large.clone(), large.view(2, -1), large.view(torch.int32), large + 1, large[::2],
         torch.empty(1 << 16, device="meta"), torch.ones(1 << 16, dtype=torch.uint8)]
    )  # fmt: skip
    assert sorted(found) == [1, 2, 3, 4, 5, 8]
    assert found[1] is found[2]
    assert len({id(content) for content in found.values()}) == 5
    assert found[1].digest == xxhash.xxh3_128_hexdigest(large.numpy().tobytes()) == found[3].digest != found[5].digest
    assert (found[1].tensor, found[1].finite) == (None, False)
    turned = torch.arange(40000.0).view(200, 200).T
    assert packing.contents_of([turned])[0].digest == xxhash.xxh3_128_hexdigest(turned.contiguous().numpy().tobytes())


class Both(Up):
    a: torch.Tensor = public()
    b: torch.Tensor = public(finite=False)


def test_a_large_tensor_is_held_once_and_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second message with the same content shares the first one's copy, and its numbers are not summed again."""
    x, y = torch.arange(20000.0), torch.arange(20000.0) + 0.5
    first = encode_lazily(Both(x, y), torch.device("cpu"))
    content = packing.contents_of([x, y])
    assert content[0].finite
    assert not content[1].finite, "nobody asked whether it is"
    summed: list[int] = []
    whole = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda t, *rest, **kw: summed.append(t.numel()) or whole(t, *rest, **kw))
    again = encode_lazily(Both(x.clone(), torch.ones(3)), torch.device("cpu"))
    assert summed == []
    assert again._own[0] is first._own[0]
    assert first._own[0].data_ptr() != x.data_ptr()
    assert (first.content(0), again.content(1)) == (content[0].digest, None)
    x[0] = 7
    assert encode_lazily(Both(x, y), torch.device("cpu"))._own[0] is not first._own[0]


def test_one_sum_for_all_that_was_gathered_and_one_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all lay on a GPU: one sum over 5 numbers. If one of them need not be finite, each other has its own."""
    summed: list[int] = []
    whole = torch.Tensor.sum
    monkeypatch.setattr(torch.Tensor, "sum", lambda t, *rest, **kw: summed.append(t.numel()) or whole(t, *rest, **kw))
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda sums: pytest.fail("what is in main memory is looked at one by one"))
    encode_tree([torch.ones(2), torch.zeros(0), torch.ones(3)])
    assert summed == [2, 3]
    monkeypatch.setattr(torch, "stack", stack)
    monkeypatch.setattr(packing, "_is_home", lambda t: False)
    summed.clear()
    encode_tree([torch.ones(2), torch.zeros(0), torch.ones(3), torch.arange(7)])
    assert summed == [5]
    summed.clear()
    encode(Both(torch.ones(2), torch.full((3,), torch.nan)))
    assert summed == [2]


def test_a_held_message_is_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if floats lay on a GPU: they are joined and come when they are asked for. All else is copied at once."""
    tensors = [torch.arange(6.0).view(2, 3).T, torch.arange(3), torch.full((2,), 9.0), torch.zeros(0)]
    monkeypatch.setattr(packing, "_is_home", lambda t: t.dtype != torch.float32)
    there = packing.gathered(tensors)
    held = Held('{"u":[{"t":0},{"t":1},{"t":2},{"t":3}]}', tensors, there)
    monkeypatch.undo()
    kept = [t.clone() for t in tensors]
    wanted = encode_tree(tuple(kept))
    tensors[1].add_(5)  # the sender goes on
    assert len(held) == len(wanted)
    assert held.spans == read_header(wanted).tensors
    assert held.tree == read_header(wanted).tree
    assert [(t.is_meta, tuple(t.shape)) for t in held._own] == [
        (True, (3, 2)), (False, (3,)), (True, (2,)), (True, (0,)),
    ]  # fmt: skip
    assert [t.tolist() for t in held.at_home()] == [t.tolist() for t in kept]
    assert "tensors" not in vars(held)
    assert bytes(held) == wanted
    assert not {"tensors", "digest"} & vars(held).keys(), "bytes are made and not kept"
    rebuild, given = held.__reduce__()
    assert rebuild(*given) == wanted, "another process gets bytes"
    pieces = held.pieces(held.at_home())
    assert [i for i, _ in pieces] == [-1, 1, 0, 2, 3]
    assert tree_of(held) == (held.tree, held.spans)
    assert "digest" not in vars(held)
    assert read_header(held).digest == read_header(wanted).digest
    assert held.at_home() is held.tensors
    assert bytes(held) == wanted
    there_now = content_of(held, read_header(held))
    there_then = content_of(wanted, read_header(wanted))
    assert [bytes(there_now(i)) for i in range(4)] == [bytes(there_then(i)) for i in range(4)]
    assert held.seen(torch.device("cpu")) is None, "they do not lie one by one"
    for one, other in zip(held.copies(torch.device("cpu")), held.copies(torch.device("cpu")), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert not one.numel() or one.data_ptr() != other.data_ptr()
    assert [t.tolist() for t in held.copies(torch.device("cpu"))] == [t.tolist() for t in kept]


def test_a_held_message_may_be_looked_at_where_it_lies() -> None:
    held = encode_lazily(Both(torch.ones(2), torch.zeros(3)), torch.device("cpu"))
    assert held.seen(torch.device("cpu")) is held._own
    assert held.seen(torch.device("meta")) is None
    seen, own = decode(held, Both, look=True), decode(held, Both)
    assert seen.a.data_ptr() == held._own[0].data_ptr() != own.a.data_ptr()
    assert decode_tree(held).a.data_ptr() != held._own[0].data_ptr()
    assert set(decode_tree(held, plain=True)) == {"a", "b"}
    assert known_content(held, 0) is None
    assert known_content(bytes(held), 0) is None


def test_what_is_held_again_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = encode(Both(torch.arange(20000.0), torch.ones(3)))
    monkeypatch.setattr(packing, "_copy", None)
    held = held_again(blob)
    assert bytes(held) == blob
    assert packing.contents_of([torch.arange(20000.0)])[0].finite
    assert held.content(0) == packing.contents_of([torch.arange(20000.0)])[0].digest
    with pytest.raises(WireError, match="the checksum does not match"):
        held_again(blob[:-1] + b"\x01")


@pytest.mark.parametrize(
    "spans",
    [
        {0: ("U8", (1,), 0, 1), 1: ("F32", (1,), 1, 5)},
        {0: ("F32", (1,), 0, 4), 1: ("I32", (1,), 4, 8), 2: ("F32", (1,), 8, 12)},
    ],
)
def test_tensors_lie_type_by_type_and_aligned(spans) -> None:
    text = b"{}      "
    size = max(end for *_, end in spans.values())
    blob = len(text).to_bytes(8, "little") + text + bytes(size)
    placed = {i: (name, shape, 16 + begin, 16 + end) for i, (name, shape, begin, end) in spans.items()}
    with pytest.raises(ValueError, match="do not lie type by type"):
        unpacked(blob, placed, torch.device("cpu"))
    whole = unpacked(blob, {0: ("U8", (size,), 16, 16 + size)}, torch.device("cpu"))
    assert whole[0].tolist() == [0] * size
    with pytest.raises(ValueError, match="it is longer than its tensors"):
        unpacked(blob + b"0", {0: ("U8", (size,), 16, 16 + size)}, torch.device("cpu"))


def test_an_empty_tensor_may_lie_anywhere() -> None:
    blob = (8).to_bytes(8, "little") + b"{}      " + b"\x07\x09"
    spans = {0: ("U8", (1,), 16, 17), 1: ("F32", (0, 3), 17, 17), 2: ("U8", (1,), 17, 18)}
    found = unpacked(blob, spans, torch.device("cpu"))
    assert [t.tolist() for t in found] == [[7], [], [9]]
    assert found[1].dtype == torch.float32


def test_a_gpu_is_named_as_its_tensors_name_it(monkeypatch):
    """ "cuda" is the current one, and tensors on it say which that is: contents are looked up by that name."""
    made = {"cuda": torch.device("cuda", 3), "cpu": torch.device("cpu")}
    monkeypatch.setattr(torch, "empty", lambda n, device: types.SimpleNamespace(device=made[str(device)]))
    assert there(torch.device("cuda")) == torch.device("cuda", 3)
    assert there(torch.device("cpu")) == torch.device("cpu")
