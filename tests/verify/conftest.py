"""Honest run folders, made once, and copies of them for forgers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedaudit
from fedaudit.epsilon.one_run import audit_run

SMALL = {"rounds": 2, "clients": 3, "model": "mlp", "engine": "serial", "twins": "off"}
DFFKE = {"E_local": 1, "h": 8, "T_Tran": 1, "T_Dec": 1, "T_FKE": 1, "w_Dec": 2, "R": 1}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"method": "fedavg", "set": {"B": 32, "eta": 0.1}, "partition": "dirichlet:0.5"},
    "other": {"method": "fedavg", "set": {"B": 32, "eta": 0.1}, "partition": "dirichlet:0.5", "seed": 1},
    "noised": {
        "method": "dffke", "set": DFFKE, "partition": "dirichlet:5", "seed": 2,
        "privacy": {"embeddings": {"epsilon": 2.0, "sensitivity": "clip:1"}},
    },
    "trained": {
        "method": "fedavg", "set": {"B": 64, "eta": 0.1}, "partition": "dirichlet:5", "twins": "1",
        "privacy": {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:1"}},
    },
    "summed": {"method": "fedavg", "set": {"B": 64, "eta": 0.1}, "partition": "dirichlet:5", "aggregate": "secure"},
    "shared": {
        "method": "fedavg", "set": {"B": 64, "eta": 0.1}, "partition": "dirichlet:5", "aggregate": "secure",
        "privacy": {"updates": {"epsilon": 8.0, "clip": 1.0, "where": "shares"}},
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def honest(tmp_path_factory):
    """Run folders by name: attacked, audited, sealed. Nobody writes into them: see `copy_of`."""
    folder = tmp_path_factory.mktemp("honest")
    for name, given in RUNS.items():
        fedaudit.run(**{**SMALL, **given}, out=folder / name)
    shutil.copytree(folder / "plain", folder / "attacked")
    fedaudit.attack(folder / "attacked", attacks=["loss", "label_histogram"])
    audit_run(folder / "noised", attack="loss")
    return folder


@pytest.fixture
def copy_of(honest, tmp_path) -> Callable[[str], Path]:
    """A copy of an honest folder, to be forged."""

    def copied(name: str) -> Path:
        return Path(shutil.copytree(honest / name, tmp_path / name))

    return copied
