"""A client as older tutorials write it: a script with an argument, which connects to a server."""

import argparse

import flwr as fl
from model import START


class Adding(fl.client.NumPyClient):
    def __init__(self, k: int):
        self.k, self.fits = k, 0

    def get_parameters(self, config):
        return START

    def fit(self, parameters, config):
        self.fits += 1
        return [p + self.k + 1 for p in parameters], 10, {"fits": self.fits}

    def evaluate(self, parameters, config):
        return 1.0, 10, {"accuracy": 0.5}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--partition-id", type=int, required=True)
    k = parser.parse_args().partition_id
    try:
        fl.client.start_client(server_address="127.0.0.1:8080", client=Adding(k).to_client())
    except Exception:  # noqa: BLE001 (people write it, and the audit's end of the script must pass through)
        print("the server has gone")
