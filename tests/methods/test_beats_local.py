"""Where a rival's paper says that it beats training alone: few records for each client, and each client's own test.

Digits, 20 clients, Dirichlet 0.5 (about 45 records for each), a small MLP, SGD 0.05 in batches of 10, two epochs a
round, 20 rounds. The rivals' papers compare models on the clients' own records, and so does this: what a client
deploys, and of FedKD and FML the shared network, which travels (FedKD's paper reports its mentee; FML's both networks,
of which the own one does not gain here). FedKTL at rate 0.02: its cosines are scaled by 64.
docs/results/baselines.md has the figures. Minutes on a CPU.
"""

from __future__ import annotations

import functools

import pytest

from fedaudit import run
from fedaudit.stats import student_t

SETTING = {"dataset": "digits", "device": "cpu", "clients": 20, "partition": "dirichlet:0.5", "model": "mlp/64"}
SETTING |= {"server_model": "mlp/64", "public": 0.1, "keep_weights": 0}
TRAINED = {"E": 2, "B": 10, "eta": 0.05}
SEEDS = (0, 1, 2)
ROUNDS = 20
GAINS: dict[str, tuple[dict[str, object], str]] = {  # method: its settings, and whose accuracy
    "lgfedavg": ({}, "client"),
    "fedgen_lg": ({"hidden": 64}, "client"),
    "fedgh": ({}, "client"),
    "feddistill": ({}, "client"),
    "fedproto": ({}, "client"),
    "fedtgp": ({"hidden": 64, "S": 50}, "client"),
    "fedktl": ({"eta": 0.02, "S": 50}, "client"),
    "fml": ({}, "shared"),
    "fedkd": ({}, "shared"),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Accuracy in percent on the clients' own held-out records, mean over clients: of theirs, or the shared model."""
    folder = tmp_path_factory.mktemp("beats")

    @functools.cache
    def last(method, seed):
        values = {**SETTING, "rounds": ROUNDS, "eval_every": ROUNDS, "seed": seed}
        given = GAINS[method][0] if method in GAINS else {}
        return run(method=method, set={**TRAINED, **given}, out=folder / f"{method}-{seed}", **values).result.last

    def reached(method, seed, whose="client"):
        found = last(method, seed)
        return 100 * (found.clients if whose == "client" else found.global_).local_test.mean

    return reached


@pytest.mark.slow
@pytest.mark.parametrize("method", GAINS)
def test_a_client_is_better_off_than_alone(method, own):
    """The mean gain of three seeds is above 0, and no seed loses."""
    gains = [own(method, seed, GAINS[method][1]) - own("local", seed) for seed in SEEDS]
    assert min(gains) >= 0, f"gains over local training: {gains}"
    assert sum(gains) > 0, f"gains over local training: {gains}"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedgen_lg", "fedgh", "feddistill", "fedproto", "fml", "fedkd"])
def test_and_the_gain_is_more_than_the_seeds_differ(method, own):
    gains = [own(method, seed, GAINS[method][1]) - own("local", seed) for seed in SEEDS]
    assert student_t(gains).low > 0, f"gains over local training: {gains}"
