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

from fedaudit import Down, Record, Size, State, Up, load, private, public, relay, state_of
from fedaudit.errors import ContractError, WireError
from fedaudit.wire.codec import decode, decode_tree, encode, encode_lazily, encode_tree, read_header
from fedaudit.wire.codec.grammar import STRING_LIMIT, _Decoder, _fits, _placed
from fedaudit.wire.codec.packing import Held
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
