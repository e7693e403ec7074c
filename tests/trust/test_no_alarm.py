"""No false alarm: neither the rules nor twins of all clients bill any of the package's own methods.

Two policies each: DP-SGD, and noise on what the method sends. Three cases are quick; the others run with `-m slow`.
"""

from __future__ import annotations

import math

import pytest

from fedaudit import registry
from fedaudit.errors import PrivacyError
from fedaudit.privacy.policy import parse_policy
from fedaudit.runtime.declarations.contract import setting_for
from fedaudit.runtime.runner import run

POLICIES = {
    "releases": ["embeddings:eps=1,clip=1", "logits:eps=1,clip=1", "prototypes:eps=1,clip=1"],
    "training": ["training:noise=1,clip=1"],
}
ALARMS = ("left behind", "(training)", "(choice)", "(message class)", "(length)", "(absence)", "public ")
# Per-FedAvg has an optimiser of its own, whose `step` torch wraps when the first one is made.
QUICK = {("perfedavg", "releases"), ("fedavg", "training"), ("fedproto", "releases"), ("dffke", "releases")}


def cases():
    for name in registry.names("methods"):
        for what in POLICIES:
            marks = [] if (name, what) in QUICK else [pytest.mark.slow]
            yield pytest.param(name, what, marks=marks, id=f"{name}-{what}")


@pytest.mark.parametrize(("name", "what"), list(cases()))
def test_a_method_of_the_package_raises_no_alarm(name, what, tmp_path):
    privacy = dict(map(parse_policy, POLICIES[what]))
    norm = "group" if what == "training" else "keep"
    setting = setting_for(name, rounds=1, clients=2, privacy=privacy, norm=norm, eval_clients=False, twins="all")
    try:
        record = run(setting, out=tmp_path / "run")
    except PrivacyError as e:
        if what != "training":
            raise
        pytest.skip(f"no DP-SGD for it: {e}")
    entries = [entry for client in record.ledger for entry in client.entries]
    assert entries or name in ("constant", "local")
    assert not [e.field for e in entries if any(alarm in f"{e.kind} {e.field}" for alarm in ALARMS)]
    assert not [absence for row in record.rounds for absence in row.absent]
    assert record.twins.differences == []
    assert record.twins.held == record.twins.tasks
    assert record.twins.tasks or name in ("constant", "local")
    if what == "training":  # infinite is what reads the records again and is covered by no policy, and nothing else
        again = {release.field for release in record.releases if release.via == "data"}
        unpaid = {e.field for e in entries if e.noise_multiplier == 0 and e.field != "(published model)"}
        assert {field.removesuffix(" (classes)") for field in unpaid} <= again
        assert unpaid or name == "constant" or all(client.epsilon < math.inf for client in record.ledger)
