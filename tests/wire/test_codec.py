"""The codec: what goes in comes out, in fresh memory; what is damaged or foreign is a WireError and nothing else."""

from __future__ import annotations

import json
from typing import Any, Literal

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from fedaudit import Down, LowRank, Record, Size, State, Up, load, private, public, relay, state_of
from fedaudit.errors import ContractError, WireError
from fedaudit.wire.codec import (
    check_size,
    decode,
    decode_tree,
    digest_of,
    encode,
    encode_lazily,
    encode_tree,
    grammar,
    read_header,
    stored_tensor,
    value_of,
)
from fedaudit.wire.codec.grammar import STRING_LIMIT, _Decoder, _fits, _placed
from fedaudit.wire.codec.packing import Held
from fedaudit.wire.compression import stage_of
from fedaudit.wire.message import size_of

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


class Everything(Down):
    x: Tensor
    w: State
    n: int
    r: float
    s: str
    flag: bool
    maybe: Tensor | None
    several: dict[int, Tensor]
    names: list[str]
    pair: tuple[int, str]


class Inner(Record):
    t: Tensor


class Outer(Record):
    inner: Inner
    many: dict[str, Inner]


class Loose(Up):
    x: Tensor = private("logits", via="data", unit="record", finite=False)


class Strict(Up):
    x: Tensor = private("logits", via="data", unit="record")
    r: float = public()


class Image(Up):
    x: Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")


class Half(Up):
    x: Tensor = private("logits", via="model", unit="client", dtype="float16")


def everything(**changes):
    values = {
        "x": torch.randn(2, 3), "w": State({"a": torch.randn(4), "b": torch.tensor(7)}, buffers=["b"]), "n": 3,
        "r": 0.1, "s": "täxt", "flag": True, "maybe": None, "several": {5: torch.ones(2), 1: torch.zeros(0, 3)},
        "names": ["u", "v"], "pair": (1, "z"),
    }  # fmt: skip
    return Everything(**{**values, **changes})


def same(a, b):
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes(_raw(a)) == bytes(_raw(b))
    if isinstance(a, State):
        return (
            isinstance(b, State) and a.buffers == b.buffers and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Record):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.declared())
    return type(a) is type(b) and a == b


def _raw(t):
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


tensors = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
leaves = (
    tensors
    | st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
states = st.dictionaries(st.text(max_size=8), tensors, max_size=4).map(lambda d: State(d, buffers=list(d)[::2]))
trees = st.recursive(
    leaves | states,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(-9, 9) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(trees)
@settings(max_examples=40, deadline=None)
def test_round_trip(tree):
    assert same(tree, decode_tree(encode_tree(tree)))


def test_record_round_trip_and_bytes_are_repeatable():
    message = everything()
    blob = encode(message)
    assert blob == encode(message)
    assert same(message, decode(blob, Everything))
    nested = Outer(Inner(torch.ones(2)), {"k": Inner(torch.zeros(1))})
    assert same(nested, decode(encode(nested), Outer))


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_a_wire_error(blob):
    with pytest.raises(WireError):
        decode_tree(blob)


BLOB = encode(everything(x=torch.arange(6.0).reshape(2, 3)))


@given(st.integers(0, len(BLOB) - 1))
@settings(max_examples=200, deadline=None)
def test_truncated_is_a_wire_error(length):
    with pytest.raises(WireError):
        decode_tree(BLOB[:length])


@given(st.integers(0, 8 * len(BLOB) - 1))
@settings(max_examples=300, deadline=None)
def test_bit_flip_is_a_wire_error(bit):
    damaged = bytearray(BLOB)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        decode_tree(bytes(damaged))


@given(st.binary(min_size=1, max_size=64))
@settings(max_examples=100, deadline=None)
def test_appended_bytes_are_a_wire_error(tail):
    with pytest.raises(WireError):
        decode_tree(BLOB + tail)


@given(
    trees.map(lambda t: json.dumps(str(t)))
    | st.sampled_from(
        [
            "[]",
            "{}",
            '{"r":["os.system",{}]}',
            '{"t":99}',
            '{"m":[0,["a"],[3]]}',
            '{"d":[[[1],2]]}',
            "1e999",
            "[" * 5000,
        ]
    )
)
@settings(max_examples=50, deadline=None)
def test_hostile_trees_with_a_right_checksum_are_wire_errors(text):
    from fedaudit.wire.codec.packing import digest

    head = f"1:{digest(text, [])}:{text}"
    blob = safetensors.torch.save({}, metadata={"fedaudit": head})
    try:
        value = decode_tree(blob)
    except WireError:
        return
    assert isinstance(value, str | int | float | bool | None)  # plain JSON values are valid trees


def test_a_class_that_is_not_defined_here_is_not_made():
    text = '{"r":["builtins.dict",{}]}'
    from fedaudit.wire.codec.packing import digest

    blob = safetensors.torch.save({}, metadata={"fedaudit": f"1:{digest(text, [])}:{text}"})
    with pytest.raises(WireError, match=r"no class builtins\.dict"):
        decode_tree(blob)
    assert decode_tree(blob, plain=True) == {}


def test_decoding_gives_fresh_memory():
    message = everything()
    blob = encode(message)
    a, b = decode(blob, Everything), decode(blob, Everything)
    a.x.fill_(99)
    a.w["a"].fill_(99)
    assert not (b.x == 99).any()
    assert not (message.x == 99).any()
    assert same(message, decode(blob, Everything))


def test_tied_sliced_and_strided_tensors_travel():
    base = torch.arange(12.0).reshape(3, 4)
    message = everything(several={0: base, 1: base, 2: base[1], 3: base.T, 4: base[:, ::2]})
    arrived = decode(encode(message), Everything).several
    for key, value in message.several.items():
        assert torch.equal(arrived[key], value)
    arrived[0].zero_()
    assert torch.equal(arrived[1], base)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": nn.Linear(2, 2)}, r"Everything\.x is a live module"),
        ({"x": nn.Parameter(torch.ones(1))}, r"Everything\.x is a live parameter"),
        ({"x": object()}, r"Everything\.x is a builtins\.object"),
        ({"x": torch.tensor([1.0, torch.nan])}, r"Everything\.x holds NaN"),
        ({"x": torch.tensor([1.0, torch.inf])}, r"Everything\.x holds NaN or infinity"),
        ({"w": State({"a": torch.tensor([torch.nan])})}, r"Everything\.w\['a'\] holds NaN"),
        ({"r": float("nan")}, r"Everything\.r is nan"),
        ({"n": 2**63}, r"Everything\.n = 9223372036854775808 does not fit"),
        ({"n": "three"}, r"Everything\.n is a str, but it is declared as int"),
        ({"n": True}, r"Everything\.n is a bool"),
        ({"s": "a" * 5000}, r"Everything\.s is a text of 5000"),
        ({"several": {(1, 2): torch.ones(1)}}, r"Everything\.several has the key"),
        ({"several": {1: lambda: 0}}, r"Everything\.several\[1\] is a builtins\.function"),
        ({"x": torch.ones(2, device="meta")}, r"Everything\.x is a .* on meta"),
        ({"x": torch.ones(2).to_sparse()}, r"Everything\.x is a torch\.sparse"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, r"Everything\.x is complex"),
    ],
)
def test_what_cannot_travel_names_message_and_field(changes, words):
    with pytest.raises(WireError, match=words):
        encode(everything(**changes))


def test_nan_travels_where_the_field_allows_it():
    assert torch.isnan(decode(encode(Loose(torch.tensor([torch.nan]))), Loose).x).all()
    with pytest.raises(WireError, match=r"Strict\.x"):
        encode(Strict(torch.tensor([torch.nan]), 1.0))


def test_a_sum_that_overflows_is_not_taken_for_nan():
    x = torch.full((4,), 3e38)
    assert torch.equal(decode(encode(Strict(x, 1.0)), Strict).x, x)


def test_uint8_images_arrive_as_what_was_sent():
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    blob = encode(Image(x))
    arrived = decode(blob, Image).x
    assert size_of(arrived).payload == 4 * x.numel()
    assert sum(end - begin for _, _, begin, end in read_header(blob).tensors.values()) == x.numel()
    assert (arrived - x).abs().max() <= 1 / 255 + 1e-6
    assert torch.equal(arrived, decode(encode(Image(arrived)), Image).x)
    with pytest.raises(WireError, match=r"Image\.x leaves \[-1, 1\]"):
        encode(Image(x * 3))


def test_half_precision_on_the_wire():
    x = torch.randn(10)
    arrived = decode(encode(Half(x)), Half).x
    assert arrived.dtype == torch.float32
    assert torch.equal(arrived, x.half().float())


def test_undeclared_fields_are_refused_when_the_class_is_defined():
    with pytest.raises(ContractError, match=r"Careless\.x leaves a client undeclared"):

        class Careless(Up):
            x: Tensor

    with pytest.raises(ContractError, match="server has no private data"):

        class Odd(Down):
            x: Tensor = private("logits", via="data", unit="record")

    with pytest.raises(ContractError, match="undeclared"):

        class Passing(Up):
            x: Tensor = relay("logits")

    with pytest.raises(ContractError, match="Did you mean 'logits'"):
        private("logit", via="data", unit="record")
    with pytest.raises(ContractError, match="via is"):
        private("logits", via="magic", unit="record")


def test_messages_are_frozen():
    with pytest.raises(AttributeError):
        everything().n = 4


def test_wrong_message_where_another_is_expected():
    with pytest.raises(WireError, match="A Everything arrived where a Strict"):
        decode(encode(everything()), Strict)


@pytest.mark.parametrize("tensors", [1, 60])
def test_overhead_is_under_one_percent_from_one_megabyte(tensors):
    n = 1_000_000 // 4 // tensors
    state = State({f"encoder.layer{i}.0.conv1.weight": torch.randn(n) for i in range(tensors)})
    blob = encode(everything(w=state))
    assert len(blob) < 1.01 * 4 * n * tensors


def test_sizes_follow_the_papers_convention():
    """4 floats = 16 B of parameters, 1 int64 buffer = 8 B beside; numbers 8, truth values 1, strings their bytes."""
    state = State({"a": torch.randn(4), "b": torch.tensor(7)}, buffers=["b"])
    assert size_of(state) == Size(16, 8)
    assert size_of(5) == Size(8)
    assert size_of(True) == Size(1)
    assert size_of("täx") == Size(4)
    assert size_of({1: torch.ones(2, dtype=torch.uint8)}) == Size(8 + 2)
    assert sum([Size(1, 2), Size(3, 4)]) == Size(4, 6)
    assert 3 * Size(1, 2) == Size(3, 6)


def test_state_of_copies_and_load_refuses_a_foreign_state():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = state_of(model)
    assert state.buffers == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    with torch.no_grad():
        model[0].weight.zero_()
    assert state["0.weight"].abs().sum() > 0
    load(model, state)
    assert torch.equal(model[0].weight, state["0.weight"])
    model[0].weight.data.zero_()
    assert state["0.weight"].abs().sum() > 0
    with pytest.raises(ContractError, match="does not fit the model"):
        load(nn.Linear(3, 3), state)


class HalfState(Up):
    w: State = private("weights", via="model", unit="client", dtype="float16")


def test_a_state_travels_in_its_declared_precision():
    state = State({"a": torch.randn(100), "n": torch.tensor(5)}, buffers=["n"])
    blob = encode(HalfState(state))
    assert sum(end - begin for _, _, begin, end in read_header(blob).tensors.values()) == 200 + 8
    arrived = decode(blob, HalfState).w
    assert torch.equal(arrived["a"], state["a"].half().float())
    assert arrived["n"] == 5
    assert arrived.buffers == {"n"}


def test_nan_does_not_become_a_pixel():
    with pytest.raises(WireError, match=r"Image\.x holds NaN"):
        encode(Image(torch.full((2, 2), torch.nan)))


class Whole(int):
    pass


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize("value", [Whole(3), Text("a"), {"a": Whole(3)}, {Text("a"): 1}])
def test_numbers_and_texts_of_other_classes_do_not_travel(value):
    with pytest.raises(WireError, match=r"Send a plain|has the key"):
        encode_tree(value)


@pytest.mark.parametrize(
    "value", [3, "a", True, None, 2.5, -(2**63), 2**63 - 1, "a" * STRING_LIMIT, {1: "a"}, [1, (2,)]]
)
def test_plain_values_arrive_as_they_are(value):
    found = decode_tree(encode_tree(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (1, int, True), (True, int, False), (1.0, int, False), (True, bool, True), (1, bool, False),
        (1, float, True), (1.5, float, True), (True, float, False), ("1", float, False),
        (None, None, True), (0, None, False), (None, int | None, True), ("a", int | None, False),
        ("a", Literal["a", "b"], True), ("c", Literal["a", "b"], False),
        ({1: 2.0}, dict[int, float], True), ({1: "a"}, dict[int, float], False), ({"a": 2.0}, dict[int, float], False),
        ([1, 2], list[int], True), ([1, "a"], list[int], False), ((1, 2), list[int], False),
        ((1, 2, 3), tuple[int, ...], True), ((1, "a"), tuple[int, ...], False), ([1], tuple[int, ...], False),
        ((1, "a"), tuple[int, str], True), ((1,), tuple[int, str], False), ((1, 2), tuple[int, str], False),
        (object(), Any, True),
    ],
)  # fmt: skip
def test_what_fits_a_declared_type(value, hint, fits):
    assert _fits(value, hint) is fits


@pytest.mark.parametrize(
    "placed", [{"data_offsets": [0.0, 8]}, {"data_offsets": [0, 8.0]}, {"data_offsets": [False, 8]}, {"shape": [2.0]}]
)
def test_a_tensors_place_is_told_in_whole_numbers(placed):
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    assert _placed(whole, 10, 30) == ("F32", (2,), 10, 18)
    with pytest.raises(ValueError, match="it cannot hold a tensor of shape"):
        _placed({**whole, **placed}, 10, 30)


def test_a_compressed_state_that_lacks_a_tensor_is_refused():
    """It names two tensors, and the message holds one."""
    state = {"m": [0, ["a", "b"], []], "z": ["topk", {}, None]}
    assert list(_Decoder([torch.ones(1), torch.ones(2)]).value(state)) == ["a", "b"]
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        _Decoder([torch.ones(1)]).value(state)


class Mixed(Up):
    x: Tensor = public()
    y: Tensor = public(finite=False)


class NoTensor(Up):
    n: int = public()


def test_a_message_with_one_format_that_cannot_be_held_is_made_bytes_at_once():
    """float32 is held, float8 is not: the message as a whole is not. One without any tensor is."""
    message = Mixed(torch.ones(3), torch.ones(2).to(torch.float8_e4m3fn))
    made = encode_lazily(message, torch.device("cpu"))
    assert isinstance(made, bytes)
    assert made == encode(message)
    held = encode_lazily(NoTensor(3), torch.device("cpu"))
    assert isinstance(held, Held)
    assert bytes(held) == encode(NoTensor(3))


@pytest.mark.parametrize(
    "node",
    [
        {"f": "nan"}, {"t": 0}, {"q": 1, "as": "uint8"}, {"z": [2, "int8", [2]]},
        {"m": [4, ["a"], []], "z": ["int8", {}, None]},
        {"m": [4, ["a"], []]}, {"d": [["k", 1]]}, {"l": [1]}, {"u": [1]}, {"r": ["nobody", {}]},
    ],
)  # fmt: skip
def test_a_node_with_something_more_is_none(node):
    tensors = [
        torch.ones(1), torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([1, 2], dtype=torch.int8),
        torch.tensor([0.5]), torch.ones(2),
    ]  # fmt: skip
    decoder = _Decoder(tensors)
    decoder.plain = True
    decoder.value(node)
    with pytest.raises(ValueError, match="there is no such node"):
        decoder.value({**node, "more": 1})


@pytest.mark.parametrize(
    "node",
    [
        {"f": "infinity"}, {"q": 0, "as": "int9"}, {"z": [0, "zip", [1]]},
        {"m": [0, ["a"], []], "z": ["zip", {}, None]},
        {"t": "0"}, {"l": {}}, [1],
    ],
)  # fmt: skip
def test_a_node_of_no_known_kind_is_refused(node):
    with pytest.raises(ValueError, match="there is no such node"):
        _Decoder([torch.ones(1)]).value(node)


def test_values_of_every_kind_of_node():
    """Of uint8, 0 is -1 and 255 is 1. Of two levels 1 and -2 with the scale 0.5, the values are 0.5 and -1."""
    tensors = [torch.tensor([0, 255], dtype=torch.uint8), torch.tensor([1, -2], dtype=torch.int8), torch.tensor([0.5])]
    decoder = _Decoder(tensors)
    assert decoder.value({"q": 0, "as": "uint8"}).tolist() == [-1.0, 1.0]
    assert decoder.value({"z": [1, "int8", [2]]}).tolist() == [0.5, -1.0]
    assert decoder.value({"f": "-inf"}) == float("-inf")
    assert decoder.value({"d": [[1, {"l": [None]}], ["b", {"u": []}]]}) == {1: [None], "b": ()}
    with pytest.raises(ValueError, match="True is not a key"):
        decoder.value({"d": [[True, 1]]})
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is shorter"):
        decoder.value({"m": [2, ["a", "b"], []]})
    state = decoder.value({"m": [1, ["a", "b"], [1]]})
    assert (list(state), state.buffers) == (["a", "b"], {"b"})


def test_a_state_of_low_rank_in_half_precision_arrives_in_full():
    """Both at once: factors, and sent as another type. Whole numbers beside them are not touched."""
    w = torch.outer(torch.arange(1.0, 7), torch.ones(8))
    blob = encode(HalfState(LowRank(State({"w": w, "n": torch.tensor([3])}, buffers=["n"]), 0.9)))
    assert {row[0] for row in read_header(blob).tensors.values()} == {"F16", "I64"}
    arrived = decode(blob, HalfState).w
    assert (arrived["w"].dtype, arrived["n"].dtype) == (torch.float32, torch.int64)
    assert torch.allclose(arrived["w"], w, atol=1e-2)
    assert arrived.buffers == {"n"}


def test_a_state_in_its_declared_precision_is_told_by_its_type():
    state = State({"a": torch.tensor([0.1, 2.0]), "n": torch.tensor(5), "u": torch.tensor([7], dtype=torch.uint8)})
    arrived = decode(encode(HalfState(state)), HalfState).w
    assert [t.dtype for t in arrived.values()] == [torch.float32, torch.int64, torch.uint8]
    assert arrived["a"].tolist() == state["a"].half().float().tolist()


def test_pixels_at_the_limits_of_their_range():
    """A millionth beyond 1 is rounding, more is not. One NaN among pixels is one too many."""
    edge = torch.tensor([1 + 1e-6, -1 - 1e-6, 0.0, 1 / 127.5], dtype=torch.float64)
    assert decode(encode(Image(edge)), Image).x.tolist() == pytest.approx([1, -1, 1 / 255, 1 / 127.5], abs=1 / 254)
    with pytest.raises(WireError, match=r"leaves \[-1, 1\]"):
        encode(Image(edge * 1.0000001))
    with pytest.raises(WireError, match="no uint8 can carry"):
        encode(Image(torch.tensor([0.5, torch.nan])))
    assert decode(encode(Image(torch.zeros(0, 3))), Image).x.shape == (0, 3)
    levels = read_header(blob := encode(Image(torch.tensor([-1.0, -0.5, 0.5, 1.0])))).tensors[0]
    assert list(blob[levels[2] : levels[3]]) == [0, 64, 191, 255]


def test_what_is_not_compressed_in_a_state_must_be_finite_too():
    class_of_reply = HalfState  # a type of its own: nothing is compressed, and all must be finite
    with pytest.raises(WireError, match=r"\['b'\] holds NaN"):
        encode(class_of_reply(State({"a": torch.ones(80), "b": torch.tensor([torch.nan])})), stage_of("int8"))
    with pytest.raises(WireError, match=r"PlainState\.w\['b'\] holds NaN"):
        encode(PlainState(State({"a": torch.ones(80), "b": torch.tensor([torch.nan])})), stage_of("int8"))


class PlainState(Up):
    w: State = private("weights", via="model", unit="client")


def test_a_header_that_claims_more_than_arrived():
    """Its claim is one byte beyond the end, and the text without that byte would be whole."""
    blob = encode_tree({"a": 1})
    length = int.from_bytes(blob[:8], "little")
    assert len(blob) == 8 + length
    with pytest.raises(WireError, match=f"the header claims {length + 1} bytes, but {len(blob)} arrived"):
        read_header((length + 1).to_bytes(8, "little") + blob[8:])
    assert read_header(memoryview(blob)).tree == {"d": [["a", 1]]}
    with pytest.raises(WireError, match=r"it has format 2, and this program reads format 1"):
        read_header(blob.replace(b'"1:', b'"2:'))


def test_a_tensor_ends_within_its_message():
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}
    assert _placed(whole, 10, 22) == ("F32", (2,), 14, 22)
    for wrong, length in (
        (whole, 21),
        ({**whole, "data_offsets": [-4, 4]}, 40),
        ({**whole, "data_offsets": [12, 4]}, 40),
    ):
        with pytest.raises(ValueError, match="it cannot hold a tensor of shape"):
            _placed(wrong, 10, length)


def test_sizes_of_stored_tensors_are_checked_before_memory_is_asked_for():
    check_size("F32", [1] * 64, 4)
    check_size("I64", [(1 << 48) - 1, 0], 0)
    for dtype, shape, size, words in (
        ("F9", [1], 4, "no tensor type"), ("F32", [1] * 65, 4, "is not a tensor's shape"),
        ("F32", (1,), 4, "is not a tensor's shape"), ("F32", [-1, -1], 4, "is not a tensor's shape"),
        ("F32", [True], 4, "is not a tensor's shape"), ("F32", [1 << 48, 0], 0, "is not a tensor's shape"),
        ("F32", [2], 4, "4 bytes are not a F32 tensor"), ("U8", [2], 3, "3 bytes are not a U8 tensor"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            check_size(dtype, shape, size)
    assert stored_tensor("I16", [2, 1], bytearray(b"\x01\x00\x00\x01")).tolist() == [[1], [256]]
    empty = stored_tensor("F64", [0, 3], bytearray())
    assert (empty.dtype, tuple(empty.shape)) == (torch.float64, (0, 3))


def test_a_message_at_the_limit_may_travel(monkeypatch):
    blob = encode_tree({"a": 1})
    monkeypatch.setattr(grammar, "BLOB_LIMIT", len(blob))
    assert decode_tree(blob) == {"a": 1}
    monkeypatch.setattr(grammar, "BLOB_LIMIT", len(blob) - 1)
    with pytest.raises(WireError, match="is over the limit"):
        decode_tree(blob)


def test_keys_and_values_of_a_table_are_held_against_their_types():
    assert not _fits({1: 2.0, 3: "a"}, dict[int, float])
    assert not _fits({1: 2.0, "a": 3.0}, dict[int, float])
    assert not _fits(3, dict[int, float])
    assert _fits({}, dict[int, float])
    assert not _fits((1, 2, "a"), tuple[int, ...])
    assert not _fits([1, 2, "a"], list[int])
    assert not _fits(("a", 1), tuple[int, int])


def test_fields_are_read_one_by_one():
    """Of a stored message, only the tensors of the value that is asked for are read."""
    read = []

    def tensor(i):
        read.append(i)
        return torch.full((2,), float(i))

    node = {"r": ["nobody", {"a": {"t": 5}, "w": {"m": [2, ["x", "y"], [1]]}}]}
    found = value_of(node, tensor, plain=True)
    assert read == [5, 2, 3]
    assert found["w"]["y"].tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="no class nobody is defined here"):
        value_of(node, tensor)
    with pytest.raises(ValueError, match="that message is not here"):
        value_of({"m": [0, [], []], "z": ["int8", {}, "w"]}, tensor)
    base = value_of({"m": [0, ["a|q", "a|s"], []], "z": ["int8", {"a": [2]}, "w"]},
                    [torch.tensor([1, 2], dtype=torch.int8), torch.tensor([0.5])].__getitem__,
                    base=lambda field: {"a": torch.tensor([10.0, 20.0])} if field == "w" else None)  # fmt: skip
    assert base["a"].tolist() == [10.5, 21.0]


def test_a_digest_tells_contents_apart_and_not_places():
    a = {"x": torch.arange(6.0).view(2, 3), "n": float("nan")}
    same_content = {"x": torch.arange(6.0).view(3, 2).T.contiguous().view(2, 3) * 0 + a["x"], "n": float("nan")}
    assert digest_of(a) == digest_of(same_content)
    assert digest_of(a) != digest_of({**a, "x": a["x"].view(3, 2)})
    assert digest_of(a) != digest_of({**a, "x": a["x"].int()})
    assert digest_of(a) != digest_of({**a, "n": 1.0})
    assert digest_of(torch.tensor([torch.inf])) != digest_of(torch.tensor([torch.nan]))
