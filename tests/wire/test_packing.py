"""The bytes of a message: those of safetensors' own writer, and back in one transfer."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from fedaudit.errors import WireError
from fedaudit.wire.codec import decode_tree, encode_tree, packing, read_header
from fedaudit.wire.codec.packing import NAMES, at_home, file_of, packed, packed_size, unpacked

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
    pieces = file_of({"a": tensors[1], "b": tensors[0]}, {"k": "v"})
    assert safetensors.torch.load(b"".join(bytes(piece) for piece in pieces))["a"].dtype == torch.float8_e5m2


@pytest.mark.parametrize("text", ["", "a", "abcdefg", "ü"])
def test_the_size_is_known_before_the_bytes(text: str) -> None:
    """Also of no tensors, and of headers that are filled up to a multiple of eight."""
    for tensors in ([], [torch.zeros(3, dtype=torch.int8)], [torch.zeros(2, 2), torch.zeros(0), torch.zeros(5).half()]):
        kinds = [(t.dtype, tuple(t.shape)) for t in tensors]
        assert packed_size(kinds, text) == len(packed(tensors, text))
