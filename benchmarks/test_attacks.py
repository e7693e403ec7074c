"""One small attack of each kind on one run, in turns with the blind baselines, which read nothing of the run.

The baselines run with every attack, so a ratio near 1 is an attack that costs next to nothing.
"""

from __future__ import annotations

import shutil

import pytest

import fedaudit

KINDS = [
    pytest.param({"attack": "loss"}, id="membership from a model"),
    pytest.param({"attack": "gradient_norm"}, id="membership from gradients"),
    pytest.param({"attack": "label_histogram"}, id="label shares"),
    pytest.param({"attack": "lira", "shadows": 2}, id="membership by shadow models", marks=pytest.mark.slow),
    pytest.param({"attack": "gradient_match", "steps": 20, "most": 1}, id="images from an update",
                 marks=pytest.mark.slow),
    pytest.param({"attack": "participation", "steps": 50}, id="who took part", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A run of FedAvg on digits: two of four clients take part in each of two rounds."""
    folder = tmp_path_factory.mktemp("attacked") / "run"
    fedaudit.run(
        method="fedavg", rounds=2, clients=4, participation=0.5, model="mlp", set={"E": 1, "B": 64, "eta": 0.1},
        aux=0.3, eval_clients=False, device="cpu", out=folder,
    )  # fmt: skip
    return folder


@pytest.mark.benchmark(group="an attack of each kind")
@pytest.mark.parametrize("attack", KINDS)
def test_an_attack(paired, benchmark, attacked, tmp_path, attack):
    copy = tmp_path / "run"

    def between() -> None:
        """Attack a fresh copy each time: what an attack left behind would save the next one its work."""
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(attacked, copy)

    threat = "outsider" if attack["attack"] == "participation" else "server"  # the server knows who took part

    def ours() -> None:
        found = fedaudit.attack(copy, attacks=[attack], threat=threat)
        assert all(one.ran for one in found if one.attack == attack["attack"])

    between()
    paired(ours, lambda: fedaudit.attack(copy, attacks=["blind_nearest"], threat=threat), pairs=8, between=between)
    benchmark.extra_info["attack"] = attack["attack"]
