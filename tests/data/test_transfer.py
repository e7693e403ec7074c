"""A public transfer set from another data set: its images in the task's shape, its labels dropped."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedaudit.data import Dataset, load, to_float
from fedaudit.data.transfer import fitted
from fedaudit.errors import SettingError
from fedaudit.runtime.planned_traffic import make_plan
from fedaudit.runtime.runner import run
from fedaudit.runtime.world import World
from fedaudit.setting import Setting
from fedaudit.shape import Shape
from fedaudit.wire.transcript import Transcript


@pytest.fixture
def colours(tmp_path):
    """40 colour images of 16 x 16 in two halves, left and right; 7 classes, which digits does not have."""
    rng = np.random.default_rng(0)
    x = np.zeros((40, 16, 16, 3), dtype=np.uint8)
    x[:, :, :8] = rng.integers(0, 256, (40, 1, 1, 3))
    x[:, :, 8:] = rng.integers(0, 256, (40, 1, 1, 3))
    np.savez(tmp_path / "c.npz", x=x, y=np.arange(40) % 7, test_x=x[:7], test_y=np.arange(7))
    return f"npz:{tmp_path / 'c.npz'}"


def rng():
    return torch.Generator().manual_seed(0)


def test_colour_becomes_grey_and_small(colours):
    """Away from the edge between the halves, an 8 x 8 image has the value 0.299 R + 0.587 G + 0.114 B of each half."""
    data = load(colours)
    x = fitted(data, Shape((1, 8, 8)), 0.0, rng())
    assert x.shape == (40, 1, 8, 8)
    assert x.dtype == torch.uint8
    colour = data.x.double()
    grey = 0.299 * colour[:, 0] + 0.587 * colour[:, 1] + 0.114 * colour[:, 2]
    for column, of in ((0, 0), (7, 15)):
        assert (x[:, 0, :, column].double() - grey[:, :1, of]).abs().max() <= 0.5 + 1e-3


def test_grey_becomes_colour(colours):
    x = fitted(load("digits"), Shape((3, 16, 16)), 0.0, rng())
    assert x.shape[1:] == (3, 16, 16)
    assert torch.equal(x[:, 0], x[:, 2])
    with pytest.raises(SettingError, match="has 3 channels, but the task's images have 2"):
        fitted(load(colours), Shape((2, 8, 8)), 0.0, rng())


def test_a_share_of_it(colours):
    some, all_ = fitted(load(colours), Shape((3, 16, 16)), 0.25, rng()), load(colours).x
    assert len(some) == 10
    assert all(any(torch.equal(a, b) for b in all_) for a in some)
    assert not torch.equal(some, all_[:10])


def test_the_tasks_own_records_stay_with_the_clients(colours):
    """No record of digits is set aside for it, and nobody can tell a label."""
    world = World(Setting.make(method="dsfl", public_dataset=colours))
    assert len(world.federation.public) == 0
    x, y = world.public()
    assert torch.equal(x, to_float(fitted(load(colours), Shape((1, 8, 8)), 0.0, torch.Generator())))
    assert y.tolist() == [-1] * 40
    assert world.plan(1, [0]).public == 40
    share = World(Setting.make(method="dsfl", public_dataset=colours, public=0.5))
    assert len(share.public()[0]) == 20
    assert len(share.federation.public) == 0


@pytest.mark.parametrize("method", ["dsfl", "mhat"])
def test_methods_run_on_it_without_labels(method, colours, tiny, tmp_path):
    """MHAT sends none and learns from none: whatever weight they had, the run is the same."""
    quick = dict(tiny(method).set)
    digests = []
    for i, lam in enumerate((0.0, 5.0) if method == "mhat" else (0.0,)):
        options = {**quick, "lam": lam} if method == "mhat" else quick
        setting = tiny(method, public=0.0, public_dataset=colours, set=options, rounds=2)
        record = run(setting, out=tmp_path / str(i))
        digests.append(record.transcript_digest)
        assert record.data.public == 40
    entries = list(Transcript(tmp_path / "0" / "transcript").entries())
    sent = [e for e in entries if e.message == "Auxiliary"]
    assert all(e["y_p"] is None for e in sent)
    assert sent[0]["x_p"].shape == (32, 1, 8, 8)
    assert len(set(digests)) == 1


def test_labels_of_the_task_are_sent_and_used(tiny, tmp_path):
    quick = dict(tiny("mhat").set)
    digests = {
        run(tiny("mhat", set={**quick, "lam": lam}, rounds=2), out=tmp_path / str(lam)).transcript_digest
        for lam in (0.0, 5.0)
    }
    assert len(digests) == 2
    sent = [e for e in Transcript(tmp_path / "5.0" / "transcript").entries() if e.message == "Auxiliary"]
    assert sent[0]["y_p"].dtype == torch.int32
    assert 0 <= sent[0]["y_p"].min() <= sent[0]["y_p"].max() <= 9


def test_planning_knows_its_size():
    """CIFAR-100's 50,000 images for CIFAR-10, whose own 50,000 then all stay with the ten clients; no label travels."""
    setting = Setting.make(method="mhat", dataset="cifar10", public_dataset="cifar100", clients=10)
    method, plan = make_plan(setting)
    assert (plan.public, plan.n[0], plan.labelled) == (50_000, 5000, False)
    labels = ("down", "Auxiliary.y_p")
    assert method.traffic(plan)[labels] == 0
    assert make_plan(setting.model_copy(update={"public": 0.1}))[1].public == 5000
    _, own = make_plan(setting.model_copy(update={"public_dataset": None, "public": 0.1}))
    assert (own.public, own.n[0]) == (5000, 4500)
    assert method.traffic(own)[labels].payload == 10 * 500 * 4


@pytest.mark.parametrize(("share", "number"), [(0.0, 5), (0.3, 2), (0.05, 1), (0.5, 3)])
def test_rows_of_numbers_are_taken_as_they_are(share, number):
    """A share of five, rounded to the nearest, and one at least; in their order, with their fractions."""
    x = torch.arange(10.0).reshape(5, 2) / 4
    data = Dataset("rows", x, torch.arange(5), x, torch.arange(5), tuple("abcde"))
    found = fitted(data, data.shape, share, torch.Generator().manual_seed(3))
    chosen = torch.randperm(5, generator=torch.Generator().manual_seed(3))[:number].sort().values
    assert torch.equal(found, x[chosen])
    with pytest.raises(SettingError, match="only images can be made to fit"):
        fitted(data, Shape((3,)), share, torch.Generator())
