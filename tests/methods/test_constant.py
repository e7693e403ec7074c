"""The constant predictor: what one class per client is worth."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bench import DIGITS

from fedaudit.methods.references.constant import Constant
from fedaudit.runtime.runner import run
from fedaudit.training import models


def test_with_one_class_per_client_a_constant_is_perfect(tiny, tmp_path):
    record = run(tiny("constant", eval_clients=True, clients=10, partition="classes:1", rounds=1), out=tmp_path / "a")
    clients = record.result.last.clients
    assert clients.local_test.each == [1.0] * 10
    assert clients.global_test.mean == pytest.approx(0.1, abs=0.02)
    assert record.bytes("up") == record.bytes("down") == 0


def test_the_constant_is_the_most_frequent_class():
    client = SimpleNamespace(model=models.build("cnn", **DIGITS), y=torch.tensor([7, 3, 3, 0]), classes=10)
    Constant().count(client, None)
    assert client.model(torch.randn(4, 1, 8, 8)).argmax(1).tolist() == [3, 3, 3, 3]
