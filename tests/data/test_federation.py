"""Records that are shared out already: who holds which, what is put aside, and canaries."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fedaudit.data.federation import Federation, _mislabelled, _part, _shard, federate, share_out
from fedaudit.data.records import Dataset
from fedaudit.errors import DataError, SettingError

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


def test_who_trains_on_what_canaries_last(dataset):
    """Members and the first of each pair; candidates are without canaries, whose labels betray them."""
    whose = dataclasses.replace(dataset, person=torch.arange(N) // 2)
    found = share_out(whose, HELD, AUX, seed=3, canaries=5, cls=Federation)
    for k, (members, out) in enumerate(HELD):
        mine = [*members.tolist(), *found.shards[k].canaries[:, 0].tolist()]
        assert found.members(k)[1].tolist() == found.dataset.y[mine].tolist()
        assert found.people(k).tolist() == [i // 2 for i in mine]
        assert found.candidates(k)[1].tolist() == found.dataset.y[members].tolist()
        assert found.nonmembers(k)[1].tolist() == found.dataset.y[out].tolist()
        assert found.counts()[k].tolist() == np.bincount(found.dataset.y[mine], minlength=4).tolist()
    assert share_out(dataset, HELD, AUX, seed=3, cls=Federation).people(0) is None
    assert len(found.test()[1]) == 1
    assert found.auxiliary()[1].tolist() == found.dataset.y[found.aux].tolist()


@pytest.mark.parametrize(
    ("fraction", "total", "part"),
    [(0.0, 100, 0), (0.25, 10, 3), (0.24, 10, 2), (0.25, 100, 25), (0.001, 100, 1), (0.5, 3, 2), (0.499, 3, 1)],
)
def test_a_fraction_is_rounded_and_not_zero(fraction, total, part):
    assert _part(fraction, total) == part


@pytest.mark.parametrize(
    ("total", "holdout", "validation", "sizes"),
    [
        (40, 0.25, 0.1, (26, 10, 4)),
        (10, 0.6, 0.3, (2, 5, 3)),  # one less for the larger part, so that two are left to train on
        (5, 0.4, 0.4, (2, 1, 2)),
        (4, 0.5, 0.25, (2, 1, 1)),
        (3, 0.0, 0.5, (2, 0, 1)),
        (2, 0.0, 0.0, (2, 0, 0)),
        (3, 0.5, 0.5, None),  # one of each leaves one to train on
        (1, 0.0, 0.0, None),
    ],
)
def test_two_records_to_train_on_come_first(total, holdout, validation, sizes):
    records, rng = np.arange(100, 100 + total), np.random.default_rng(0)
    canaries = np.zeros((1, 2), dtype=np.int64)
    if sizes is None:
        with pytest.raises(DataError, match=f"client 3 has {total} records, too few"):
            _shard(3, records, canaries, holdout, validation, rng)
        return
    shard = _shard(3, records, canaries, holdout, validation, rng)
    assert (len(shard.members), len(shard.nonmembers), len(shard.validation)) == sizes
    every = [*shard.members, *shard.nonmembers, *shard.validation]
    assert sorted(every) == records.tolist()
    assert all((np.diff(of) > 0).all() for of in (shard.members, shard.nonmembers, shard.validation))
    assert shard.canaries is canaries


def test_shares_of_all_records_are_set_aside(dataset):
    """Of 40 records 8 are auxiliary and 4 public; the clients hold the other 28. More public ones leave the rest of
    the auxiliary ones as they were."""
    few, more = (
        federate(dataset, clients=2, partition="iid", seed=5, aux=0.2, public=public, minimum=5)
        for public in (0.1, 0.3)
    )
    assert (len(few.aux), len(few.public), len(more.public)) == (8, 4, 12)
    assert few.aux.tolist() == more.aux.tolist()
    held = [i for shard in few.shards for of in (shard.members, shard.nonmembers, shard.validation) for i in of]
    assert sorted([*held, *few.aux, *few.public]) == list(range(N))
    assert few.public.tolist() == sorted(few.public.tolist())
    plain = federate(dataset, clients=2, partition="iid", seed=5, minimum=5)
    assert (len(plain.aux), len(plain.public)) == (4, 0), "a tenth, and nothing public"
    assert [len(shard.nonmembers) for shard in plain.shards] == [5, 5], "a quarter of 18, rounded up"
    assert [len(shard.validation) for shard in plain.shards] == [2, 2]
    assert all(shard.canaries.shape == (0, 2) for shard in plain.shards)


def test_one_class_has_no_wrong_label(dataset):
    one = dataclasses.replace(dataset, y=torch.zeros(N).long(), class_names=("a",))
    with pytest.raises(SettingError, match="has one class"):
        _mislabelled(one, np.array([[0, 1]]), np.random.default_rng(0))
