"""skdigits: what the server does."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from skdigits import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    weights = task.get_weights(task.create_model(context.run_config["local-epochs"]))
    FedAvg().start(grid=grid, initial_arrays=ArrayRecord(weights), num_rounds=context.run_config["num-server-rounds"])
