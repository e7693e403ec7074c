"""Runs that several files look at."""

from __future__ import annotations

import pytest

from fedaudit import run
from fedaudit.methods.datafree.dffke import DFFKE


@pytest.fixture(scope="session")
def dffke_run(tmp_path_factory):
    """Three clients with encoders of width 64, 64 and 128, three rounds, a buffer of one round."""
    out = tmp_path_factory.mktemp("dffke") / "run"
    run(method="dffke", rounds=3, clients=3, model="digits-3", set={**DFFKE.quick, "R": 1}, aux=0.6, out=out)
    return out
