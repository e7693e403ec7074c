"""Clients trained together against the same clients one after another, on a CPU.

The work: FedAvg with McMahan et al.'s E = 5 and B = 10 for 20 clients of digits, whole runs with everything that the
harness does around training but evaluation of the clients. A step of so small a network is mostly the starting of its
operations, and a stack of 20 starts them once.
"""

from __future__ import annotations

import platform
import shutil

import pytest
import torch
from safetensors.torch import load_file

import fedaudit
from fedaudit.setting import Setting

CLIENTS = 20


# A stack's batched products gain less on ARM: 1.4 to 1.5 on two processors, for one round and for three. Without it: 1.
LEAST = {"rounds": 2.0, "round": 1.5} if platform.machine() == "x86_64" else {"rounds": 1.25, "round": 1.25}


def make_setting(engine: str, rounds: int) -> Setting:
    return Setting.make(
        method="fedavg",
        set={"E": 5, "B": 10, "eta": 0.05},
        dataset="digits",
        clients=CLIENTS,
        partition="dirichlet:1.0",
        holdout=0.0,
        validation=0.0,
        aux=0.0,
        rounds=rounds,
        eval_every=rounds,
        eval_clients=False,
        keep_weights=1,
        device="cpu",
        threads=torch.get_num_threads(),
        engine=engine,
    )


def compare(paired, benchmark, folder, *, rounds: int, pairs: int) -> float:
    reached = {}

    def carry_out(engine: str) -> None:
        fedaudit.run(make_setting(engine, rounds), out=folder / engine)

    def between() -> None:
        for engine in ("serial", "stacked"):
            if (folder / engine).exists():
                reached[engine] = load_file(folder / engine / "models" / "global.safetensors")
                shutil.rmtree(folder / engine)

    found = paired(lambda: carry_out("stacked"), lambda: carry_out("serial"), pairs=pairs, between=between)
    apart = max(float((reached["stacked"][n] - t).abs().max()) for n, t in reached["serial"].items())
    benchmark.extra_info |= {"times_as_fast": round(1 / found.ratio, 2), "largest_difference": apart}
    assert apart < 1e-3, "the same training, or the ratio means nothing; that it is equal is shown in float64"
    return 1 / found.ratio


@pytest.mark.slow
def test_20_clients_together_are_faster(paired, benchmark, tmp_path):
    assert compare(paired, benchmark, tmp_path, rounds=3, pairs=7) >= LEAST["rounds"]


def test_quick_20_clients_together(paired, benchmark, tmp_path):
    """One round, in which opening and closing the run weigh three times as much."""
    assert compare(paired, benchmark, tmp_path, rounds=1, pairs=3) >= LEAST["round"]
