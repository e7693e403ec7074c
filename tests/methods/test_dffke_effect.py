"""What DFFKE is for, on a small real setting: its clients know what only others have seen. Minutes on a CPU."""

from __future__ import annotations

import pytest

from fedaudit import run

SETTING = {"dataset": "digits", "clients": 5, "partition": "dirichlet:0.1", "keep_weights": 1, "eval_every": 3}
ROUNDS, E, B = 3, 10, 20
EXCHANGE = {"h": 64, "w_Dec": 16, "B_Dec": 20, "T_Tran": 20, "T_Dec": 5, "T_FKE": 4, "R": 1, "kl": "teacher-first"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clients_beat_training_alone_by_fifteen_points(seed, tmp_path):
    """Five clients with a few classes each, three rounds, the KL as in Eq. 8; Adam, its step, the batch and the local
    epochs are the same with and without the exchange. Accuracy of the clients' models on the common test set, mean over
    clients."""
    values = {**SETTING, "rounds": ROUNDS, "seed": seed}
    dffke = {"tau": "off", "E_local": E, "B": B, "eta": 1e-3, **EXCHANGE}
    with_peers = run(method="dffke", set=dffke, out=tmp_path / "dffke", **values)
    local = {"opt": "adam", "E": E, "B": B, "eta": 1e-3}
    alone = run(method="local", set=local, out=tmp_path / "local", **values)
    print(f"seed {seed}: {score(with_peers):.3f} with the exchange, {score(alone):.3f} alone")
    assert score(with_peers) >= score(alone) + 0.15


def score(record):
    return record.result.last.clients.global_test.mean
