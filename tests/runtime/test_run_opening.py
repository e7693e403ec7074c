"""What a run writes down before its first round: facts about its data, and the secret of its noise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedaudit.privacy.noise_key import FILE, SIZE, write_secret
from fedaudit.runtime.run_opening import _secret, data_facts, model_facts
from fedaudit.runtime.world import World
from fedaudit.setting import Setting


@pytest.fixture
def world():
    return World(Setting.make(clients=3, public=0.1, model="mlp:2,cnn:1"))


def test_the_parts_of_the_data_are_counted(world):
    facts, federation = data_facts(world), world.federation
    assert facts.members == [len(shard.members) for shard in federation.shards]
    assert facts.nonmembers == [len(shard.nonmembers) for shard in federation.shards]
    assert facts.validation == [len(shard.validation) for shard in federation.shards]
    assert len({*facts.members, *facts.nonmembers, *facts.validation}) == 9, "no two are alike"
    assert (facts.test, facts.aux, facts.classes) == (len(federation.dataset.test_y), len(federation.aux), 10)
    assert facts.public == len(federation.public) > 0
    labels = [federation.dataset.y[torch.as_tensor(shard.members)] for shard in federation.shards]
    assert facts.counts == [[int((y == c).sum()) for c in range(10)] for y in labels]
    assert (facts.persons, facts.most_of_person, facts.most_clients, facts.copies) == ([], 1, 1, 1)


def test_persons_are_counted_at_each_client_and_over_clients(world, monkeypatch):
    """Client 0 has three records of one person and one of another, who has two records at client 1 and one at 2."""
    people = [torch.tensor([5, 8, 5, 5]), torch.tensor([9, 8, 8]), torch.tensor([8])]
    monkeypatch.setattr(world, "people", people.__getitem__)
    facts = data_facts(world)
    assert facts.persons == [2, 2, 1]
    assert facts.most_of_person == 3
    assert facts.most_clients == 3


def test_a_client_without_records_has_no_person(world, monkeypatch):
    monkeypatch.setattr(world, "people", lambda k: torch.tensor([4] * k, dtype=torch.long))
    facts = data_facts(world)
    assert (facts.persons, facts.most_of_person, facts.most_clients) == ([0, 1, 1], 2, 2)


def test_each_architecture_is_counted_once(world):
    """An mlp on 64 pixels: 64 x 128 + 128 and 128 x 10 + 10 parameters."""
    found = model_facts(world)
    assert {name: facts.clients for name, facts in found.items()} == {"mlp": 2, "cnn": 1}
    assert found["mlp"].parameters == 64 * 128 + 128 + 128 * 10 + 10


def opened(folder, noise_key=None, **values):
    return SimpleNamespace(setting=Setting.make(**values), folder=folder, noise_key=noise_key)


def test_a_run_without_noise_and_masks_has_no_secret(tmp_path):
    assert _secret(opened(tmp_path)) == b""
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("values", [{"aggregate": "secure"}, {"privacy": {"logits": {"epsilon": 1.0}}}])
def test_a_secret_is_drawn_once_and_kept(values, tmp_path):
    found = _secret(opened(tmp_path, **values))
    assert len(found) == SIZE
    assert (tmp_path / FILE).exists()
    write_secret(tmp_path / "other", bytes(SIZE))
    assert _secret(opened(tmp_path, tmp_path / "other", **values)) == found, "the folder's own comes first"


def test_a_secret_is_taken_from_another_run_where_that_is_asked_for(tmp_path):
    write_secret(tmp_path / "other", bytes(range(1, SIZE + 1)))
    found = _secret(opened(tmp_path, tmp_path / "other", aggregate="secure"))
    assert found == bytes(range(1, SIZE + 1))
