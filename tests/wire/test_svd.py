"""States that travel as their largest singular values: what arrives, what it costs, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from fedaudit import LowRank, State, Up, private
from fedaudit.errors import ContractError, WireError
from fedaudit.privacy.trees import rebuilt
from fedaudit.wire.codec import choices, decode, decode_tree, encode, encode_tree, fields_of, measure, read_header
from fedaudit.wire.message import size_of


class Change(Up):
    g: State = private("gradients", via="model", unit="client")


def turned(*values, rows=6, columns=8):
    """A matrix with these singular values."""
    torch.manual_seed(1)
    U, V = torch.linalg.qr(torch.randn(rows, rows))[0], torch.linalg.qr(torch.randn(columns, columns))[0]
    return U[:, : len(values)] * torch.tensor(values) @ V[: len(values)]


@pytest.mark.parametrize(("energy", "K"), [(0.5, 1), (0.639, 1), (0.641, 2), (0.989, 2), (0.991, 3)])
def test_the_fewest_singular_values_that_hold_the_energy(energy, K):
    """Squares 64, 35 and 1 of 100: the first holds 0.64, two hold 0.99."""
    values = [8.0, 35**0.5, 1.0]
    state = LowRank(State({"w": turned(*values)}), energy)
    sent, shapes = state.factors()
    assert shapes == {"w": [K, 6, 8]}
    assert {name: tuple(t.shape) for name, t in sent.items()} == {"w|U": (6, K), "w|s": (K,), "w|V": (K, 8)}
    assert sent["w|s"].tolist() == pytest.approx(values[:K], abs=1e-5)
    left = turned(*values[:K])
    assert torch.allclose(state.recovered()["w"], left, atol=1e-5)
    arrived = decode(encode(Change(state)), Change).g
    assert type(arrived) is State
    assert torch.equal(arrived["w"], state.recovered()["w"])


def test_at_energy_1_the_whole_arrives_to_the_bit():
    state = State({"w": turned(8.0, 1.0), "b": torch.randn(6)})
    arrived = decode(encode(Change(LowRank(state, 1.0))), Change).g
    assert all(torch.equal(arrived[name], state[name]) for name in state)
    assert encode(Change(LowRank(state, 1.0))) == encode(Change(state))


def test_bytes_of_field_and_wire():
    """K = 1: 6 + 1 + 8 floats instead of 48. The vector, the counter and the buffer travel whole."""
    tensors = {"w": turned(9.0, 0.1), "b": torch.zeros(6), "mean": turned(9.0, 0.1), "n": torch.tensor(3)}
    state = LowRank(State(tensors, buffers={"mean", "n"}), 0.9)
    blob = encode(Change(state))
    sizes = measure(read_header(blob), len(blob))
    assert (sizes["g"]["payload"], sizes["g"]["buffers"]) == (4 * (15 + 6), 4 * 48 + 8)
    assert sum(size["wire"] for size in sizes.values()) == len(blob)
    assert size_of(state).payload == 84
    assert choices(fields_of(read_header(blob))["g"]) == {"w": [1, 6, 8]}
    arrived = decode(blob, Change).g
    assert arrived.buffers == {"mean", "n"}
    assert list(arrived) == list(tensors)
    assert arrived["n"].item() == 3


def test_what_factors_would_only_lengthen_travels_whole():
    """Rank 3 of 6 x 8 has 3 x 15 = 45 numbers of 48; rank 4 would have 60."""
    assert LowRank(State({"w": turned(1.0, 1.0, 1.0)}), 0.99).factors()[1] == {"w": [3, 6, 8]}
    assert LowRank(State({"w": turned(1.0, 1.0, 1.0, 1.0)}), 0.99).factors()[1] == {}


def test_convolutions_and_nothing_at_all():
    """A convolution is a matrix by output channel; zeros have rank 0 and cost nothing."""
    kernel = (torch.arange(1.0, 9)[:, None] * torch.ones(1, 27)).reshape(8, 3, 3, 3)
    state = LowRank(State({"conv": kernel, "zero": torch.zeros(4, 5)}), 0.9)
    assert state.factors()[1] == {"conv": [1, 8, 3, 3, 3], "zero": [0, 4, 5]}
    arrived = decode(encode(Change(state)), Change).g
    assert torch.allclose(arrived["conv"], kernel, atol=1e-4)
    assert torch.equal(arrived["zero"], torch.zeros(4, 5))
    assert measure(read_header(blob := encode(Change(state))), len(blob))["g"]["payload"] == 4 * (8 + 1 + 27)


def test_noise_is_added_to_the_state_and_what_is_left_travels_as_before():
    state = LowRank(State({"w": turned(9.0, 0.1)}), 0.9)
    noisy = rebuilt(state, iter([state["w"].flatten() + 1]))
    assert isinstance(noisy, LowRank)
    assert noisy.energy == 0.9
    assert torch.equal(noisy["w"], state["w"] + 1)


def test_what_is_not_finite_is_named():
    with pytest.raises(WireError, match=r"Change\.g\['w'\] holds NaN"):
        encode(Change(LowRank(State({"w": torch.full((3, 3), torch.nan)}), 0.9)))


@pytest.mark.parametrize("energy", [0.0, -1.0, 1.5])
def test_an_energy_is_a_share(energy):
    with pytest.raises(ContractError, match="is not in"):
        LowRank(State({}), energy)


@pytest.mark.parametrize("shape", [[1, 6, 9], [2, 6, 8], [1, 48], [1, "x", 8], []])
def test_factors_that_do_not_fit_are_refused(shape):
    blob = encode_tree({"g": LowRank(State({"w": turned(9.0, 0.1)}), 0.9)})
    head = read_header(blob)
    tree = json.loads(head.text)
    tree["d"][0][1]["svd"]["w"] = shape
    from fedaudit.wire.codec.grammar import _Decoder

    tensors = list(LowRank(State({"w": turned(9.0, 0.1)}), 0.9).factors()[0].values())
    with pytest.raises((ValueError, IndexError)):
        _Decoder(tensors).value(tree)
    assert torch.allclose(decode_tree(blob)["g"]["w"], turned(9.0), atol=1e-4)
