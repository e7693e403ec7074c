"""The global model on the test records of each domain: the columns of a table such as FedAF's Table 2."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedaudit import Setting, run
from fedaudit.data.datasets import load
from fedaudit.errors import DataError
from fedaudit.runtime.utility import evaluate
from fedaudit.runtime.world import world_of


class Dark(torch.nn.Module):
    """Says class 0 for a dark image and class 1 for a light one."""

    def forward(self, x):
        light = x.mean((1, 2, 3))
        return torch.stack([-light, light], 1)


def saved(folder):
    """Two domains of 40 records: in `plain` light means class 1, in `turned` every second record is the other way."""
    y = np.arange(80) % 2
    turned = np.arange(80) >= 40
    light = np.where(turned & (np.arange(80) % 4 < 2), 1 - y, y)
    x = np.repeat(light * 255, 16).reshape(80, 1, 4, 4).astype(np.uint8)
    domain = np.where(turned, "turned", "plain")
    np.savez(folder / "d.npz", x=x, y=y, domain=domain)
    return f"npz:{folder / 'd.npz'}"


def test_each_domain_has_its_own_accuracy(tmp_path):
    """`plain` is right throughout, `turned` on half of its 8 test records; the whole test set on three quarters."""
    setting = Setting.make(dataset=saved(tmp_path), clients=2, partition="domain", aux=0.0)
    world = world_of(setting.model_dump_json())
    domain = world.federation.dataset.test_domain
    names = world.federation.dataset.domain_names
    found = evaluate(world, Dark(), None).global_
    assert list(found.test_by_domain) == list(names) == ["plain", "turned"]
    assert found.test_by_domain["plain"].accuracy == 1
    x, y = world.test
    right = (Dark()(x).argmax(1) == y)[domain == 1].double().mean().item()
    assert 0 < right < 1
    assert found.test_by_domain["turned"].accuracy == pytest.approx(right)
    assert [of.n for of in found.test_by_domain.values()] == [int((domain == d).sum()) for d in (0, 1)]
    assert 0 < found.test_by_domain["turned"].low < right < found.test_by_domain["turned"].high < 1


def test_the_record_has_them_and_data_without_domains_does_not(tmp_path):
    values = {"clients": 2, "rounds": 1, "model": "mlp", "aux": 0.0}
    with_domains = run(Setting.make(dataset=saved(tmp_path), partition="domain", **values), out=tmp_path / "a")
    assert set(with_domains.rounds[0].utility.global_.test_by_domain) == {"plain", "turned"}
    without = run(Setting.make(dataset="digits", **values), out=tmp_path / "b")
    assert "test_by_domain" not in without.rounds[0].utility.global_.model_dump()


def test_domains_of_the_test_set_are_held_against_it(tmp_path):
    d = load(saved(tmp_path))
    with pytest.raises(DataError, match="test_domain has to be int64"):
        type(d)(d.name, d.x, d.y, d.test_x, d.test_y, d.class_names, d.domain, d.domain_names, d.test_domain[:-1])
