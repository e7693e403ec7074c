"""What the method sends is gated by the plugin that comes with fedaudit."""

import pytest


@pytest.mark.comm_budget(uplink="40 kB", downlink="40 kB")  # per client and round
def test_it_stays_small(federated_run):
    record = federated_run(method="calm:Calm", rounds=1, clients=2, model="mlp")
    assert record.status == "done"
