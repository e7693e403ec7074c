"""skdigits: what a node does."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.metrics import log_loss

from skdigits import task

app = ClientApp()


def opened(message: Message, context: Context):
    """The model as the server sent it, and this node's data."""
    model = task.create_model(context.run_config["local-epochs"])
    task.set_weights(model, message.content["arrays"].to_numpy_ndarrays())
    return model, task.load_data(context.node_config["partition-id"], context.node_config["num-partitions"])


@app.train()
def train(message: Message, context: Context) -> Message:
    model, (data, _) = opened(message, context)
    task.fit(model, data)
    metrics = MetricRecord({"train_acc": float(model.score(*data)), "num-examples": len(data[1])})
    return Message(RecordDict({"arrays": ArrayRecord(task.get_weights(model)), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model, (_, (x, y)) = opened(message, context)
    loss = float(log_loss(y, model.predict_proba(x), labels=model.classes_))
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": float(model.score(x, y)), "num-examples": len(y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
