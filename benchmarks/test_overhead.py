"""What the harness costs: FedAvg inside it against the loop that one would write by hand for the same training.

The work is FedAvg's own on CIFAR-10 (McMahan et al. 2017, section 3: 100 clients of 500 images, B = 50, a CNN of about
10^6 parameters), on random images and with E = 1 instead of the paper's 5: a fifth of the training for the same
messages, so five times the overhead.

The harness is billed for the whole of `run`: opening the folder, encoding, decoding, transcript, clients' states,
checkpoints, fsyncs, record and final models. Only its evaluation is switched off, because the loop has none. The loop
keeps its images as float tensors and its global model in memory, checks nothing, and writes nothing.
"""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import fedaudit
from fedaudit.rng import generator, seeded
from fedaudit.runtime.scores import Utility
from fedaudit.runtime.world import world_of
from fedaudit.setting import Setting
from fedaudit.training import models

CLIENTS, B, ETA = 2, 50, 0.1
MODEL = "fedfree_cnn@0.6"  # 1.18 M parameters at 3x32x32


def make_setting(folder, *, records: int, rounds: int) -> Setting:
    n = CLIENTS * records
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8), np.arange(n) % 10
    path = folder / "images.npz"
    np.savez(path, x=x, y=y, test_x=x[:10], test_y=y[:10])
    return Setting.make(
        method="fedavg",
        set={"E": 1, "B": B, "eta": ETA},
        dataset=f"npz:{path}",
        clients=CLIENTS,
        partition="iid",
        holdout=0,
        validation=0,
        aux=0,
        model=MODEL,
        rounds=rounds,
        eval_every=rounds,
        eval_clients=False,
        device="cpu",
        threads=torch.get_num_threads(),
    )


def by_hand(setting: Setting, data, shape, classes) -> dict[str, torch.Tensor]:
    """FedAvg as a script: the training of `setting`, drawn from the same seeds."""
    with seeded(setting.seed, "server", 0):
        model = models.build(setting.model, shape=shape, classes=classes)
    w = {name: p.clone() for name, p in model.state_dict().items()}
    n = sum(len(y) for _, y in data)
    model.train()
    for t in range(1, setting.rounds + 1):
        mean = {name: torch.zeros_like(p) for name, p in w.items()}
        for k, (x, y) in enumerate(data):
            model.load_state_dict(w)
            opt = torch.optim.SGD(model.parameters(), lr=ETA)
            rng = generator(setting.seed, f"client {k}", t, 0, "fit 1")
            for i in torch.randperm(len(y), generator=rng).split(B):
                opt.zero_grad()
                cross_entropy(model(x[i]), y[i]).backward()
                opt.step()
            for name, p in model.state_dict().items():
                mean[name].add_(p, alpha=len(y) / n)
        w = mean
    return w


def compare(paired, benchmark, monkeypatch, folder, *, records: int, rounds: int, pairs: int) -> float:
    # No setting does this: a run evaluates after its last round at least.
    nothing = Utility.model_validate({"global": None, "clients": None})
    monkeypatch.setattr("fedaudit.runtime.runner.evaluate", lambda *_, **__: nothing)
    setting = make_setting(folder, records=records, rounds=rounds)
    world = world_of(setting.model_dump_json())  # cached: neither side is billed for reading the images
    data = [world.members(k) for k in range(CLIENTS)]
    assert [len(y) for _, y in data] == [records] * CLIENTS
    reached: dict[str, dict[str, torch.Tensor]] = {}

    def harness() -> None:
        fedaudit.run(setting, out=folder / "run")

    def loop() -> None:
        reached["loop"] = by_hand(setting, data, world.shape, world.classes)

    def between() -> None:
        if (folder / "run").exists():
            reached["harness"] = load_file(folder / "run" / "models" / "global.safetensors")
            shutil.rmtree(folder / "run")
            os.sync()  # else the disk works off one side's files during the other's turn

    ratio = paired(harness, loop, pairs=pairs, between=between).ratio
    parameters = sum(p.numel() for p in reached["loop"].values())
    assert parameters >= 1_000_000

    # The same training, or the ratio means nothing. Weights move little in a few steps: measure by the way they went.
    with seeded(setting.seed, "server", 0):
        first = models.build(setting.model, shape=world.shape, classes=world.classes).state_dict()
    for name, p in reached["loop"].items():
        assert (reached["harness"][name] - p).norm() <= 1e-3 * (p - first[name]).norm(), name
    same = all(torch.equal(reached["harness"][name], p) for name, p in reached["loop"].items())
    benchmark.extra_info |= {"parameters": parameters, "same_bits": same}
    return ratio


@pytest.mark.slow
def test_fedavg_costs_at_most_5_percent_over_a_loop_by_hand(paired, benchmark, monkeypatch, tmp_path):
    assert compare(paired, benchmark, monkeypatch, tmp_path, records=500, rounds=2, pairs=20) <= 1.05


def test_quick_fedavg_against_a_loop_by_hand(paired, benchmark, monkeypatch, tmp_path):
    """Half the images and one round, so the costs of opening and closing a run weigh four times as much, on x86
    more than on ARM: hence 1.5."""
    assert compare(paired, benchmark, monkeypatch, tmp_path, records=250, rounds=1, pairs=8) <= 1.5
