"""What following the records costs: the digests of model, memory and messages, against a round of FedAvg.

The digests are those of the worst case, a task that looks at its records under a policy, so that model and memory are
digested around each training and the reply is traced. They are held against a plain round of the same model, which is
the cheapest round there is: under DP-SGD, where digests are really taken, a round takes many times as long.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import clock
from test_overhead import CLIENTS, make_setting

import fedaudit
from fedaudit.methods.averaging.fedavg import FedAvg
from fedaudit.privacy import mechanism, provenance, sensitivity
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime import party
from fedaudit.setting import Setting

PAIRS = 5


class Looks(FedAvg):
    """FedAvg that looks at its records before it trains, and makes nothing of them."""

    def client_update(self, client: Any, msg: Any) -> Any:
        assert len(client.x)
        client.memory["t"] = client.t
        return super().client_update(client, msg)


@contextmanager
def timed_digests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds of every digest that is taken within."""
    seconds: list[float] = []

    def timed(digest_of: Callable[[Any], str]) -> Callable[[Any], str]:
        def call(value: Any) -> str:
            since = time.thread_time()
            try:
                return digest_of(value)
            finally:
                seconds.append(time.thread_time() - since)

        return call

    with monkeypatch.context() as patch:
        for module in (provenance, mechanism, sensitivity, party):
            patch.setattr(module, "digest_of", timed(module.digest_of))
        yield seconds


def test_digests_cost_at_most_3_percent_of_a_round(benchmark, monkeypatch, tmp_path):
    monkeypatch.setattr("fedaudit.runtime.runner.evaluate", lambda *_, **__: fedaudit.runtime.scores.Utility())
    plain = make_setting(tmp_path, records=250, rounds=1)
    few = tmp_path / "few"
    few.mkdir()
    short = make_setting(few, records=20, rounds=1).model_dump()  # digests do not depend on how much is trained
    policy = dict([parse_policy("training:noise=1,clip=1")])
    looks = Setting.make(**{**short, "method": "test_digests:Looks", "privacy": policy})
    number = 0

    def seconds_of(setting: Setting) -> float:
        nonlocal number
        number += 1
        since = clock()
        fedaudit.run(setting, out=tmp_path / str(number))
        return clock() - since

    seconds_of(plain), seconds_of(looks)  # caches, lazy imports
    ratios = []

    def pair() -> None:
        with timed_digests(monkeypatch) as digests:
            seconds_of(looks)
        assert len(digests) > 10 * CLIENTS  # they were taken
        ratios.append(sum(digests) / seconds_of(plain))

    benchmark.pedantic(pair, rounds=PAIRS)
    if benchmark.disabled:
        pytest.skip("--benchmark-disable: it ran, and nothing was compared")
    share = statistics.median(ratios)
    benchmark.extra_info |= {"share": round(share, 5), "ratios": [round(r, 5) for r in ratios]}
    assert share <= 0.03
