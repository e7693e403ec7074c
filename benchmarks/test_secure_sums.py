"""What secure aggregation costs: a round of FedAvg with it against the same round without.

100 clients with 500 images each and a CNN of 1.18 million parameters, FedAvg's own work on CIFAR-10 (McMahan et al.
2017, section 3) with one epoch of the paper's five. The quick form has 100 images a client, a fifth of the training
for the same messages: its limit is the same. Both rounds are timed in one process, whole `run`s, without evaluation.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import fedaudit
from fedaudit.setting import Setting

CLIENTS, B = 100, 50
MODEL = "fedfree_cnn@0.6"  # 1.18 M parameters at 3x32x32
MOST = 3.0  # times the plain round


def setting(folder, records: int, aggregate: str) -> Setting:
    n = CLIENTS * records
    rng = np.random.default_rng(0)
    path = folder / "images.npz"
    if not path.exists():
        x, y = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), np.arange(n) % 10
        np.savez(path, x=x, y=y, test_x=x[:10], test_y=y[:10])
    return Setting.make(
        method="fedavg", set={"E": 1, "B": B, "eta": 0.1}, dataset=f"npz:{path}", clients=CLIENTS, partition="iid",
        holdout=0, validation=0, aux=0, model=MODEL, rounds=1, eval_clients=False, keep_weights=1, aggregate=aggregate,
    )  # fmt: skip


def seconds(folder, records: int, aggregate: str) -> float:
    made = setting(folder, records, aggregate)
    begun = time.perf_counter()
    record = fedaudit.run(made, out=folder / aggregate)
    took = time.perf_counter() - begun
    assert len(record.rounds[0].participants) == CLIENTS
    return took


@pytest.mark.parametrize("records", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_a_secure_round_costs_at_most_three_plain_ones(records, tmp_path):
    pytest.importorskip("cryptography")
    plain, secure = (seconds(tmp_path, records, aggregate) for aggregate in ("plain", "secure"))
    print(f"{records} records: plain {plain:.1f} s, secure {secure:.1f} s, {secure / plain:.2f} times")
    assert secure <= MOST * plain
