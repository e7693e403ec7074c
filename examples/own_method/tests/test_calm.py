"""What the method sends, reaches, leaks and guarantees, and how fast it is: held by the plugin that fedaudit brings."""

import pytest

SETTING = {"clients": 2, "model": "mlp", "partition": "iid", "set": {"E": 2, "B": 32, "eta": 0.2}}
DP = {"training": {"epsilon": 8.0, "delta": 1e-3, "sensitivity": "clip:1"}}


@pytest.mark.comm_budget(uplink="40 kB", downlink="40 kB")  # per client and round
@pytest.mark.accuracy_floor(0.5)
@pytest.mark.leak_budget(attack="loss", auc=0.7)  # fails where the attack is shown to reach more
def test_it_stays_small_and_learns(federated_run):
    record = federated_run(method="calm:Calm", rounds=2, **SETTING)
    assert record.status == "done"


@pytest.mark.privacy_budget(epsilon=8, delta=1e-3)
@pytest.mark.claims_hold
def test_it_keeps_what_it_guarantees(federated_run):
    federated_run(method="calm:Calm", rounds=1, privacy=DP, **SETTING)


def test_it_is_as_fast_as_fedavg(federated_benchmark):
    limits = {"max_ratio": 1.3, "max_bytes_ratio": 1.0, "max_flops_ratio": 1.0}
    federated_benchmark(method="calm:Calm", relative_to="fedavg", **limits, **SETTING)
