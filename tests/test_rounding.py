"""The bound that tests put on rounding, and the other kernels under which it must hold."""

from __future__ import annotations

import functools

import pytest
import torch
from other_kernels import ByShape, installed
from precision import close, rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("terms", [10, 100, 1000])
def test_sums_in_another_order_are_close_and_a_wrong_term_is_not(terms: int, dtype: torch.dtype) -> None:
    """Numbers in [0, 1], so the sum of their sizes is the sum. Leaving out one of them moves it by 1 / terms or so."""
    x = torch.rand(50, terms, generator=torch.Generator().manual_seed(terms), dtype=dtype)
    forth, back = (functools.reduce(torch.add, rows.T) for rows in (x, x.flip(1)))
    assert close(forth, back, terms)
    assert not close(forth, back - x[:, 0], terms)
    assert not torch.equal(forth, back), "nothing was rounded, so nothing was compared"


def test_the_bound_by_hand() -> None:
    """eps is 2^-23 and 2^-52; sixteen terms of size 2 are 2^5 of them."""
    assert rounding(16, scale=2) == 2**-18
    assert rounding(16, torch.float64, 2) == 2**-47
    a = torch.tensor([1.0, -2.0])
    assert close(a, a + torch.tensor([0.0, 2**-18]), 16)
    assert not close(a, a + torch.tensor([0.0, 2**-17]), 16)
    assert not close(a, a + torch.tensor([0.0, 2**-18]), 16, scale=1)


def test_other_shapes_types_and_what_is_no_number_are_not_close() -> None:
    a = torch.ones(3)
    assert not close(a, a[:2], 10)
    assert not close(a, a.double(), 10)
    assert not close(a, torch.tensor([1.0, torch.nan, 1.0]), 10)
    assert close(a[:0], a[:0], 10)


def test_kernels_by_shape_round_rows_alone_otherwise_than_among_others() -> None:
    """By a unit in the last place; the same call again gives the same bits; whole numbers stay."""
    torch.manual_seed(0)
    x, w = torch.randn(9, 7), torch.randn(7, 5)
    plain = x @ w
    with ByShape():
        first, again, alone = x @ w, x @ w, x[:3] @ w
        counted = torch.arange(12.0).sum()
    assert torch.equal(first, again)
    assert not torch.equal(first[:3], alone)
    assert close(first, plain, 7)
    assert close(alone, first[:3], 7)
    assert counted == 66
    assert torch.equal(x @ w, plain), "afterwards the kernels are as before"


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(pytest.UsageError, match=r"FEDAUDIT_TEST_KERNELS=fast is not known\. Choose from no-onednn"):
        installed("fast")
