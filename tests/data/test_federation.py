"""Records that are shared out already: who holds which, what is put aside, and canaries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedaudit.data.federation import Federation, share_out
from fedaudit.data.records import Dataset
from fedaudit.errors import SettingError

N, AUX = 40, np.arange(20, 40)
HELD = [(np.arange(0, 8), np.arange(8, 10)), (np.arange(10, 15), np.arange(15, 20))]


@pytest.fixture
def dataset():
    """Records 0 to 39 of four classes, by turns."""
    y = torch.arange(N) % 4
    return Dataset("made up", torch.zeros(N, 1, 2, 2, dtype=torch.uint8), y, torch.zeros(
        1, 1, 2, 2, dtype=torch.uint8), torch.zeros(1, dtype=torch.long), ("a", "b", "c", "d"))  # fmt: skip


def test_each_holds_what_was_given_and_the_rest_is_aside(dataset):
    found = share_out(dataset, HELD, AUX[::-1], seed=3, cls=Federation)
    for shard, (members, out) in zip(found.shards, HELD, strict=True):
        assert shard.members.tolist() == members.tolist()
        assert shard.nonmembers.tolist() == out.tolist()
        assert len(shard.validation) == 0
        assert shard.canaries.shape == (0, 2)
    assert found.aux.tolist() == AUX.tolist(), "in order"
    assert len(found.public) == 0
    assert found.dataset is dataset, "no label was changed"


def test_canaries_are_pairs_of_auxiliary_records_with_wrong_labels(dataset):
    """Five pairs, dealt to two clients by turns: three and two."""
    found = share_out(dataset, HELD, AUX, seed=3, canaries=5, cls=Federation)
    pairs = [shard.canaries for shard in found.shards]
    assert [len(of) for of in pairs] == [3, 2]
    drawn = sorted(np.concatenate(pairs).ravel().tolist())
    assert len(set(drawn)) == 10
    assert sorted([*drawn, *found.aux.tolist()]) == AUX.tolist(), "a canary is no auxiliary record any more"
    changed = (found.dataset.y != dataset.y).nonzero().ravel().tolist()
    assert changed == drawn, "every canary has a wrong label, and nobody else"
    assert set(found.dataset.y[drawn].tolist()) <= {0, 1, 2, 3}
    again = share_out(dataset, HELD, AUX, seed=3, canaries=5, cls=Federation)
    other = share_out(dataset, HELD, AUX, seed=4, canaries=5, cls=Federation)
    assert torch.equal(again.dataset.y, found.dataset.y)
    assert sorted(np.concatenate([s.canaries for s in other.shards]).ravel().tolist()) != drawn


def test_a_coin_decides_which_of_a_pair_is_trained_on(dataset):
    firsts = [share_out(dataset, HELD, AUX, seed=s, canaries=10, cls=Federation).shards[0].canaries for s in range(20)]
    higher = sum(int((pairs[:, 0] > pairs[:, 1]).sum()) for pairs in firsts)
    assert 30 <= higher <= 70, "100 tosses; outside with probability below 1e-4"


def test_there_are_as_many_canaries_as_auxiliary_records_at_most(dataset):
    assert len(share_out(dataset, HELD, AUX, seed=0, canaries=10, cls=Federation).aux) == 0
    with pytest.raises(SettingError, match="11 pairs of canaries take 22 auxiliary records, but there are 20"):
        share_out(dataset, HELD, AUX, seed=0, canaries=11, cls=Federation)
