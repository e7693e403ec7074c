"""Which networks one can stand for in a stack: what tells them apart beside their tensors."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from jobs import distance
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit import ce, sgd
from fedaudit.training.stacked import likeness
from fedaudit.training.stacked.likeness import structure
from fedaudit.training.stacked.stack import Job, fit_together
from fedaudit.training.stacked.stackable import stacks


class Own(nn.Module):
    """A layer that prints nothing of what hangs on it."""

    def __init__(self, **hangs: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 8), nn.Linear(8, 4)
        self.act: Callable[[Tensor], Tensor] = F.relu
        for name, value in hangs.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.act(self.a(x.flatten(1))))
        return out

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * x


def of_a_file(act: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a network whose class has the name that another file's has."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            return act(self.a(x))

    return Net()


class Kind(Enum):
    A = 1
    B = 2


class OtherKind(Enum):
    A = 1


def scaled(by: float) -> Callable[[Tensor], Tensor]:
    return lambda x: by * x


def times(x: Tensor, by: float) -> Tensor:
    return by * x


class Remembers:
    def __init__(self, what: int) -> None:
        self.what = what


def emptied(net: nn.Module) -> None:
    for p in net.parameters():
        p.data.zero_()


class Listed(list[int]):
    def __init__(self, *parts: int) -> None:
        super().__init__(parts)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (F.relu, torch.sin),
        (torch.sin, torch.cos),
        (scaled(2.0), scaled(3.0)),
        (functools.partial(times, by=2.0), functools.partial(times, by=3.0)),
        (0.1, 0.2),
        (1, True),
        (1.0, 1),
        ("mean", "sum"),
        ([1, 2], [2, 1]),
        ((1,), [1]),
        ({"a": 1}, {"a": 2}),
        (Kind.A, Kind.B),
        (Kind.A, OtherKind.A),
        (nn.ReLU, nn.Tanh),
        (torch.float32, torch.float64),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, dtype=torch.bfloat16).float(), torch.zeros(2, dtype=torch.float64)),
        (np.zeros(2), np.ones(2)),
        ({1, 2}, {1, 3}),
        (Remembers(1), Remembers(2)),
        (Listed(1, 2), Listed(1, 3)),
        ([nn.Linear(2, 2).apply(emptied)], [nn.Linear(2, 3).apply(emptied)]),
        ([nn.Linear(2, 2).apply(emptied)], [nn.Linear(2, 2)]),
        ({1: F.relu}.get, {1: torch.sin}.get),
        (torch.Tensor.sin, torch.Tensor.cos),
        (F.gelu, F.softplus),
        (scaled, None),
        (lambda: 1, lambda: 2),
    ],
)
def test_what_hangs_on_a_layer_tells_networks_apart(one: Any, other: Any) -> None:
    """Also where torch prints both networks alike, and their tensors have one form."""
    nets = Own(hangs=one), Own(hangs=one), Own(hangs=other)
    assert len({str(net) for net in nets}) == 1
    assert structure(nets[0]) == structure(nets[1]) != structure(nets[2])
    assert repr(structure(nets[0])) == repr(structure(nets[1])) != repr(structure(nets[2])), "keys are made of it"


def test_heads_and_classes_of_one_name_tell_networks_apart() -> None:
    few, many = (nn.TransformerEncoderLayer(8, heads) for heads in (2, 4))
    assert str(few) == str(many)
    assert structure(few) != structure(many)
    assert structure(few) == structure(nn.TransformerEncoderLayer(8, 2))
    one, other = of_a_file(F.relu), of_a_file(torch.sin)
    assert str(one) == str(other)
    assert structure(one) != structure(other)


def test_networks_of_one_maker_are_alike() -> None:
    """Each with parts of its own, to which it refers in several ways, and in another mode."""

    def make(by: float) -> Own:
        net = Own(act=scaled(by), again=functools.partial(times, by=by), sizes=torch.Size([2, 3]), kind=Kind.A)
        net.parts = [net.a.weight, {"b": net.b}, weakref.ref(net.a.bias)]  # type: ignore[assignment]
        net.how = net.doubled  # type: ignore[assignment]
        net.state = Remembers(3)  # type: ignore[assignment]
        return net

    one, other = make(2.0), make(2.0).eval()
    assert structure(one) == structure(other) == structure(one)
    assert structure(one) != structure(make(3.0))
    assert structure(nn.LSTM(3, 4)) == structure(nn.LSTM(3, 4))


def test_a_part_of_the_network_in_another_place_is_another_network() -> None:
    one, other = Own(), Own()
    one.parts, other.parts = [one.a], [other.b]  # type: ignore[assignment]
    assert structure(one) != structure(other)


def test_what_cannot_be_described_is_like_nothing() -> None:
    around: list[Any] = []
    around.append(around)
    for value in (around, np.array([object()]), torch.zeros(2, dtype=torch.bfloat16), threading.Lock()):
        assert structure(Own(hangs=value)) != structure(Own(hangs=value))


def test_functions_are_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """They refer to what they were made around, which would live as long as the process."""
    monkeypatch.setattr(likeness, "MOST", 3)
    for by in range(10):
        structure(Own(act=scaled(float(by))))
    assert len(likeness._functions[scaled(0.0).__code__]) == 3
    assert structure(Own(act=scaled(9.0))) == structure(Own(act=scaled(9.0)))


def test_networks_that_differ_in_a_function_train_as_each_would_alone() -> None:
    acts = [F.relu, torch.sin, F.relu, torch.sin]

    def made() -> list[Job]:
        jobs = []
        for i, act in enumerate(acts):
            torch.manual_seed(i)
            net = Own(act=act).to(torch.float64)
            rows = torch.randn(8, 1, 8, 8, dtype=torch.float64), torch.randint(4, (8,))
            options = {"opt": sgd(0.5), "batch": 4, "epochs": 3}
            jobs.append(Job(net, ce, rows, torch.Generator().manual_seed(i), options))
        return jobs

    together, alone = made(), made()
    groups, left = stacks(together)
    assert (groups, left) == ([[0, 2], [1, 3]], {})
    for group in groups:
        fit_together([together[i] for i in group])
    for job in alone:
        job.alone()
    assert distance(together, alone) < 1e-12
    assert stacks([made()[0], made()[1]])[1] == {0: "the models differ", 1: "the models differ"}
