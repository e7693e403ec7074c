"""Flower's logs are for who runs an app; its apps are the examples."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("flwr") is None else []  # an optional extra
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session", autouse=True)
def _quiet():
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


@pytest.fixture(scope="session")
def torch_app():
    from fedaudit.flower import read_app

    return read_app(EXAMPLES / "flower_pytorch")


@pytest.fixture(scope="session")
def sk_app():
    from fedaudit.flower import read_app

    return read_app(EXAMPLES / "flower_sklearn")


SHORT = {"num-server-rounds": 2, "local-epochs": 1}


@pytest.fixture(scope="session")
def torch_run(torch_app, tmp_path_factory):
    from fedaudit.flower import run_app

    out = tmp_path_factory.mktemp("flower") / "torch"
    run_app(torch_app, out=out, nodes=3, config=SHORT)
    return out


@pytest.fixture(scope="session")
def sk_run(sk_app, tmp_path_factory):
    """Node 1 fails in round 2."""
    from skdigits import task

    from fedaudit.flower import run_app

    fit, calls = task.fit, []

    def failing(model, data):
        calls.append(len(calls))
        if calls[-1] == 4:  # three nodes in round 1, then node 0, then node 1
            raise RuntimeError("the disk of this node is full of patient records")
        fit(model, data)

    out = tmp_path_factory.mktemp("flower") / "sk"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "fit", failing)
        run_app(sk_app, out=out, nodes=3, config=SHORT)
    return out
