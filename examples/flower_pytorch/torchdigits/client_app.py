"""torchdigits: what a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from torchdigits import task

app = ClientApp()


def opened(message: Message, context: Context):
    """The model as the server sent it, and this node's data."""
    net = task.Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net, task.load_data(context.node_config["partition-id"], context.node_config["num-partitions"])


@app.train()
def train(message: Message, context: Context) -> Message:
    net, (data, _) = opened(message, context)
    config = context.run_config
    loss = task.train(net, data, config["local-epochs"], config["batch-size"], config["learning-rate"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[1])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    net, (_, data) = opened(message, context)
    loss, accuracy = task.test(net, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
