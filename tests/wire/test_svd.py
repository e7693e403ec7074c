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
from fedaudit.wire.svd import factorised, factors, product, recombined


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


def test_as_many_numbers_as_the_matrix_has_are_not_fewer():
    """Rank 1 of 3 x 5 has 9 numbers of 15. Of 2 x 3 it has 6 of 6, and of 3 x 3 it has 7 of 9."""
    for rows, columns, K in ((3, 5, 1), (2, 3, None), (3, 3, 1), (1, 9, None), (2, 4, 1)):
        found = factors(torch.outer(torch.arange(1.0, rows + 1), torch.ones(columns)), 0.9)
        assert (found and len(found[1])) == K
        if found is not None:
            assert [tuple(part.shape) for part in found] == [(rows, K), (K,), (K, columns)]


def test_the_energy_is_held_when_it_is_reached_exactly():
    """Squares 16 and 4 of 20: the first alone holds 0.8 of them."""
    matrix = torch.zeros(8, 9)
    matrix[0, 0], matrix[1, 1] = 4.0, 2.0
    assert [len(factors(matrix, energy)[1]) for energy in (0.5, 0.8, 0.801, 1.0)] == [1, 1, 2, 2]
    small = 1e-3 * matrix
    assert len(factors(small, 0.9)[1]) == 2, "a share, whatever the whole is"
    empty = factors(torch.zeros(4, 5), 0.5)
    assert [tuple(part.shape) for part in empty] == [(4, 0), (0,), (0, 5)]
    assert factors(torch.zeros(0, 5), 0.5) is None
    tall = factors(torch.outer(torch.ones(9), torch.arange(3.0)), 0.9)
    assert [tuple(part.shape) for part in tall] == [(9, 1), (1,), (1, 3)]


def test_one_number_that_is_not_finite_leaves_a_matrix_whole():
    matrix = torch.ones(6, 8)
    matrix[2, 3] = torch.inf
    sent, shapes = factorised({"w": matrix, "v": torch.ones(6, 8)}, 0.9)
    assert shapes == {"v": [1, 6, 8]}
    assert list(sent) == ["w", "v|U", "v|s", "v|V"]
    assert sent["w"] is matrix


def test_factors_are_put_together_by_their_names():
    """A name that only looks like a factor's is one of its own. Rank and shape must be those that were told."""
    U, s, V = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0]), torch.tensor([[1.0, 0.0, 4.0]])
    sent = {"x|U": torch.zeros(2), "w|U": U, "w|s": s, "w|V": V, "b": torch.ones(1)}
    whole = recombined(sent, {"w": [1, 2, 3]})
    assert list(whole) == ["x|U", "w", "b"]
    assert whole["w"].tolist() == [[3.0, 0.0, 12.0], [6.0, 0.0, 24.0]]
    assert whole["x|U"] is sent["x|U"]
    with pytest.raises(ValueError, match="the factors of w are not of rank 2"):
        recombined(sent, {"w": [2, 2, 3]})
    with pytest.raises(ValueError, match="do not make a matrix of rank 1"):
        recombined({**sent, "w|V": torch.ones(3, 3)}, {"w": [1, 2, 3]})
    with pytest.raises(ValueError, match="the factors of w are not of rank 1"):
        recombined({**sent, "w|s": torch.ones(2)}, {"w": [1, 2, 3]})
    assert product(U, s, V, (2, 3, 1)).tolist() == [[[3.0], [0.0], [12.0]], [[6.0], [0.0], [24.0]]]
    for wrong in ((V, s, V), (U, torch.ones(1, 1), V), (U, s, torch.ones(3, 1)), (U, torch.ones(2), V)):
        with pytest.raises(ValueError, match="the factors do not make a matrix of rank"):
            product(*wrong, (2, 3))


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


def test_a_matrix_of_rank_one_needs_one_factor_and_zeros_need_none():
    """4 x 5 numbers: one column, one value and one row, 10 numbers; of zeros not even these."""
    one = torch.outer(torch.tensor([1.0, -2.0, 3.0, 0.5]), torch.tensor([2.0, 0.0, 1.0, -1.0, 4.0]))
    U, s, V = factors(one, 0.9)
    assert (U.shape, s.shape, V.shape) == ((4, 1), (1,), (1, 5))
    assert torch.allclose(U * s @ V, one, atol=1e-5)
    U, s, V = factors(torch.zeros(4, 5), 0.9)
    assert (U.shape, s.shape, V.shape) == ((4, 0), (0,), (0, 5))
