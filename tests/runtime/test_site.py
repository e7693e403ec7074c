"""The records that a client's task sees, as they are and with some of them swapped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit.runtime.site import Site, Swap, drawn_half

OWN = torch.arange(6).float().view(6, 1), torch.tensor([0, 1, 2, 0, 1, 2])
OTHERS = 10 + torch.arange(6).float().view(6, 1), torch.tensor([2, 2, 2, 2, 2, 2])


def rows(swap, private_fits, fitting):
    here = SimpleNamespace(swap=swap, own=lambda: OWN, others=lambda: OTHERS, classes=3)
    here._half = lambda number, rest: Site._half(here, number, rest)
    x, y = Site.rows(here, private_fits, fitting=fitting)
    assert OWN[0].flatten().tolist() == [0, 1, 2, 3, 4, 5], "the client's own stay as they are"
    assert OWN[1].tolist() == [0, 1, 2, 0, 1, 2]
    return x.flatten().tolist(), y.tolist()


MINE, THEIRS = ([0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]), ([10, 11, 12, 13, 14, 15], [2] * 6)


@pytest.mark.parametrize(
    ("swap", "fits", "fitting", "found"),
    [
        (None, 9, False, MINE),
        (Swap(after=2), 1, False, MINE),
        (Swap(after=2), 2, False, THEIRS),
        (Swap(after=2), 2, True, THEIRS),
        (Swap(after=2, in_fit=False), 2, True, MINE),
        (Swap(after=2, in_fit=False), 2, False, THEIRS),
        (Swap(after=0, only=4), 0, False, ([0, 1, 2, 3, 14, 5], MINE[1])),
        (Swap(after=1, only=4), 0, False, MINE),
        (Swap(after=0, only=2, relabel=True), 0, True, ([0, 1, 12, 3, 4, 5], [0, 1, 0, 0, 1, 2])),
        (Swap(after=1, half=7), 0, False, MINE),
    ],
)
def test_which_records_a_task_sees(swap, fits, fitting, found):
    assert rows(swap, fits, fitting) == found


def test_the_two_halves_are_all_records():
    first, rest = (rows(Swap(after=0, half=7, rest=rest), 0, False) for rest in (False, True))
    drawn = drawn_half(6, 7, False).tolist()
    assert 0 < sum(drawn) < 6
    assert drawn_half(6, 7, True).tolist() == [not one for one in drawn]
    assert drawn_half(6, 8, False).tolist() != drawn
    for i, swapped in enumerate(drawn):
        assert first[0][i] == (10 + i if swapped else i)
        assert rest[0][i] == (i if swapped else 10 + i)
        assert first[1][i] == (2 if swapped else MINE[1][i])
