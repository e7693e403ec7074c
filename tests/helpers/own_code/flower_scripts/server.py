"""A server as older tutorials write it: a script that waits for clients."""

from flwr.server import ServerConfig, start_server
from flwr.server.strategy import FedAvg

history = start_server(server_address="0.0.0.0:8080", config=ServerConfig(num_rounds=2), strategy=FedAvg())
print(history.losses_distributed)
