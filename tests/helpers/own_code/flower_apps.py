"""Small Flower apps in the shapes that people write: older and newer APIs, own loops, threads, secure sums, trees.

Each function returns an app's two halves. A node's training adds its number and 1 to five parameters, so that every
model can be told by hand.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import LocalDpMod as OlderLocalDpMod
from flwr.client.mod import fixedclipping_mod as older_fixedclipping_mod
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerAppComponents, ServerConfig
from flwr.server import strategy as older
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedXgbBagging, Result

ROUNDS = 2
START = [np.zeros((2, 2), dtype=np.float32), np.zeros(1, dtype=np.float32)]


def number(context: Context) -> int:
    return int(context.node_config["partition-id"])


# --- the newer API ---------------------------------------------------------------------------------------------------


def newer_client(mods=(), metrics=lambda context: {}) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if "arrays" not in message.content:
            return Message(RecordDict(), reply_to=message)
        arrays = [a + number(context) + 1 for a in message.content["arrays"].to_numpy_ndarrays()]
        said = MetricRecord({"num-examples": 10, **metrics(context)})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": said}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"loss": 1.0, "num-examples": 10})}), reply_to=message)

    return app


def served_by(main) -> ServerApp:
    app = ServerApp()
    app.main()(main)
    return app


def strategy():
    def main(grid: Grid, context: Context) -> None:
        FedAvg().start(grid, ArrayRecord(START), num_rounds=ROUNDS)

    return newer_client(), served_by(main)


def configured():
    """As many rounds as the app's config says."""

    def main(grid: Grid, context: Context) -> None:
        FedAvg().start(grid, ArrayRecord(START), num_rounds=int(context.run_config["num-server-rounds"]))

    return newer_client(), served_by(main)


class OwnStart(FedAvg):
    """A strategy that takes the place of Flower's loop, as apps with a tracker of their own do."""

    def start(self, grid, initial_arrays, num_rounds=3, timeout=3600):
        arrays = initial_arrays
        for t in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(t, arrays, ConfigRecord(), grid), timeout=timeout)
            arrays, _ = self.aggregate_train(t, replies)
            list(grid.send_and_receive(self.configure_evaluate(t, arrays, ConfigRecord(), grid), timeout=timeout))
        return Result(arrays=arrays)


def own_start():
    def main(grid: Grid, context: Context) -> None:
        OwnStart().start(grid, ArrayRecord(START), num_rounds=ROUNDS)

    return newer_client(), served_by(main)


def dying(folder: str, times: int = 1):
    """As `strategy`, but node 1 ends its process in the middle of its training. Each time leaves a file in `folder`."""
    client, server = strategy()
    own = client._registered_funcs["train.default"]

    def train(message: Message, context: Context) -> Message:
        if number(context) == 1 and (died := len(os.listdir(folder))) < times:
            (Path(folder) / str(died)).touch()
            os._exit(1)
        return own(message, context)

    client._registered_funcs["train.default"] = train
    return client, server


def _requests(grid, kind, group="", **records):
    content = RecordDict(records)
    return [Message(content, node, kind, group_id=group) for node in grid.get_node_ids()]


def loop():
    """No strategy and no number of a round: training, then evaluation, twice."""

    def main(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(START)
        for _ in range(ROUNDS):
            replies = list(grid.send_and_receive(_requests(grid, "train", arrays=arrays)))
            arrays = replies[0].content["arrays"]
            grid.send_and_receive(_requests(grid, "evaluate", arrays=arrays))

    return newer_client(), served_by(main)


def polling():
    """Messages are pushed one by one and pulled as they come."""

    def main(grid: Grid, context: Context) -> None:
        for t in range(ROUNDS):
            waiting = [next(iter(grid.push_messages([m]))) for m in _requests(grid, "train", arrays=ArrayRecord(START))]
            begun = time.monotonic()
            while waiting and time.monotonic() - begun < 300:
                for id_ in list(waiting):
                    if list(grid.pull_messages([id_])):
                        waiting.remove(id_)
            assert not waiting, t

    return newer_client(), served_by(main)


def opacus():
    """Every node reports the epsilon of this round's training, as apps with an engine for each round do."""
    said = {"epsilon": 1.5, "target_delta": 1e-5}

    def main(grid: Grid, context: Context) -> None:
        FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(START), num_rounds=ROUNDS)

    return newer_client(metrics=lambda context: {**said, "epsilon": 1.5 + number(context) / 10}), served_by(main)


# --- apps that train no model ----------------------------------------------------------------------------------------


def analytics():
    """Histograms, with the rounds numbered from 0 in the messages' group."""
    client = ClientApp()

    @client.query()
    def query(message: Message, context: Context) -> Message:
        counts = MetricRecord({"height": [1, 2, number(context)], "height_count": 3 + number(context)})
        return Message(RecordDict({"query_results": counts}), reply_to=message)

    def main(grid: Grid, context: Context) -> None:
        for t in range(ROUNDS):
            grid.send_and_receive(_requests(grid, "query", str(t)))

    return client, served_by(main)


def _trees(count: int) -> bytes:
    """Return a booster with so many trees, as xgboost writes it to JSON."""
    trees = [{"id": i, "leaf": 0.5} for i in range(count)]
    model = {"gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(count)}, "trees": trees}
    model |= {"iteration_indptr": list(range(count + 1)), "tree_info": [0] * count}
    return json.dumps({"learner": {"gradient_booster": {"model": model}}}).encode()


def xgboost():
    """Trees as bytes: the reply is one more tree, and the strategy puts all trees together."""
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        arrays = ArrayRecord([np.frombuffer(_trees(1), dtype=np.uint8)])
        said = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": arrays, "metrics": said}), reply_to=message)

    def main(grid: Grid, context: Context) -> None:
        start = ArrayRecord([np.frombuffer(_trees(1), dtype=np.uint8)])
        FedXgbBagging(fraction_evaluate=0.0).start(grid, start, num_rounds=ROUNDS)

    return client, served_by(main)


def vertical():
    """Embeddings go up, gradients go down, and nobody waits for the answers to those."""
    client = ClientApp()

    @client.query("embeddings")
    def embeddings(message: Message, context: Context) -> Message:
        rows = ArrayRecord({"embedding": Array(np.full((6, 2), number(context), dtype=np.float32))})
        return Message(RecordDict({"arrays": rows}), reply_to=message)

    @client.train("gradients")
    def gradients(message: Message, context: Context) -> Message:
        return Message(RecordDict(), reply_to=message)

    def main(grid: Grid, context: Context) -> None:
        for _ in range(ROUNDS):
            grid.send_and_receive(_requests(grid, "query.embeddings"))
            grid.push_messages(_requests(grid, "train.gradients", gradients=ArrayRecord(START)))

    return client, served_by(main)


# --- the older API ---------------------------------------------------------------------------------------------------


class Adding(NumPyClient):
    def __init__(self, k: int):
        self.k = k

    def get_parameters(self, config):
        return START

    def fit(self, parameters, config):
        return [p + self.k + 1 for p in parameters], 10, {"loss": 1.0}

    def evaluate(self, parameters, config):
        return 1.0, 10, {"accuracy": 0.5}


def older_client(mods=()) -> ClientApp:
    return ClientApp(client_fn=lambda context: Adding(number(context)).to_client(), mods=list(mods))


def threads():
    """A server function: one thread for each message, and the first model comes from a node."""

    def server_fn(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=older.FedAvg(), config=ServerConfig(num_rounds=ROUNDS))

    return older_client(), ServerApp(server_fn=server_fn)


def scripts():
    """Two scripts of the oldest API, with start_server and start_client."""
    from fedaudit.flower import read_app

    app = read_app(Path(__file__).parent / "flower_scripts", "--partition-id {partition-id}")
    return app.client, app.server


def components():
    """Strategy and config given to the server app itself, with adaptive clipping on the server."""
    start = ndarrays_to_parameters(START)
    inner = older.FedAvg(initial_parameters=start, fraction_evaluate=0.0)
    wrapped = older.DifferentialPrivacyServerSideAdaptiveClipping(
        inner, 1.1, 3, initial_clipping_norm=0.5, clipped_count_stddev=5.0
    )
    return older_client(), ServerApp(config=ServerConfig(num_rounds=ROUNDS), strategy=wrapped)


def local_dp():
    """The older path of the local mod, around an older client, with threads."""
    _, server = threads()
    return older_client([OlderLocalDpMod(1.0, 2.0, 4.0, 1e-5)]), server


def _workflow(strategy, **options):
    def main(grid: Grid, context: Context) -> None:
        made = LegacyContext(context=context, config=ServerConfig(num_rounds=ROUNDS), strategy=strategy())
        DefaultWorkflow(**options)(grid, made)

    return served_by(main)


def workflow():
    return older_client(), _workflow(lambda: older.FedAvg(initial_parameters=ndarrays_to_parameters(START)))


def _plain():
    return older.FedAvg(initial_parameters=ndarrays_to_parameters(START), fraction_evaluate=0.0)


def secure():
    summed = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)
    return older_client([secaggplus_mod]), _workflow(_plain, fit_workflow=summed)


def secure_with_dp():
    """Secure sums of updates that the nodes clip, with noise on the sum."""
    summed = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)
    wrapped = _workflow(
        lambda: older.DifferentialPrivacyClientSideFixedClipping(_plain(), 0.7, 1.0, 3), fit_workflow=summed
    )
    return older_client([secaggplus_mod, older_fixedclipping_mod]), wrapped
