"""Three seeds of one run as one stack against the same seeds one after another, on a CPU, all with the engine stacked.

The work: FedAvg with E = 2 and B = 10 for five clients of digits and a small network, whole runs with everything that
the harness does around training but evaluation of the clients. A stack of 15 starts as many operations as one of five.

Processor time is compared: the runs of several seeds work in threads of their own, one at a time, and the clock of the
other benchmarks leaves out only the time in which the calling thread was kept waiting by other work on the machine.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

import fedaudit
from fedaudit.runtime.seeds_together import run_seeds
from fedaudit.setting import Setting

SEEDS = (0, 1, 2)


def make_setting(rounds: int) -> Setting:
    return Setting.make(
        method="fedavg",
        set={"E": 2, "B": 10, "eta": 0.05},
        dataset="digits",
        model="mlp",
        clients=5,
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
        engine="stacked",
    )


def compare(paired, benchmark, folder, *, rounds: int, pairs: int) -> float:
    """Return how many times as fast the three are together."""
    setting, reached = make_setting(rounds), {}

    def together() -> None:
        run_seeds(setting, SEEDS, out=[folder / f"together-{seed}" for seed in SEEDS])

    def alone() -> None:
        for seed in SEEDS:
            fedaudit.run(setting, seed=seed, out=folder / f"alone-{seed}")

    def between() -> None:
        for path in list(folder.iterdir()):
            reached[path.name] = load_file(path / "models" / "global.safetensors")
            shutil.rmtree(path)

    paired(together, alone, pairs=pairs, between=between)
    ratio = float(benchmark.extra_info["cpu_ratio"])
    apart = max(
        float((reached[f"together-{seed}"][name] - t).abs().max())
        for seed in SEEDS
        for name, t in reached[f"alone-{seed}"].items()
    )
    benchmark.extra_info |= {
        "times_as_fast": round(1 / ratio, 2),
        "three_over_one": round(3 * ratio, 2),
        "largest_difference": apart,
    }
    assert apart < 1e-3, "the same training, or the ratio means nothing; that it is equal is shown in float64"
    return 1 / ratio


@pytest.mark.slow
def test_three_seeds_take_two_thirds_of_the_time(paired, benchmark, tmp_path):
    assert compare(paired, benchmark, tmp_path, rounds=3, pairs=5) >= 1.5


def test_quick_three_seeds_together(paired, benchmark, tmp_path):
    """One round, in which opening and closing the runs, which nobody shares, weigh three times as much: hence 1.2."""
    assert compare(paired, benchmark, tmp_path, rounds=1, pairs=3) >= 1.2
