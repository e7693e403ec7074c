"""Protected runs for audits of epsilon: one with a field for each kind of release, and one with private training."""

from __future__ import annotations

import torch
from torch import Tensor

from fedaudit import Down, Method, Record, Up, ce, private, public, run, sgd


class Ask(Down):
    pass


class Sent(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    V: dict[int, Tensor] = private("logits", via="data", unit="client", depends="class")
    n: Tensor = private("label_counts", via="data", unit="client")
    z: Tensor = private("soft_labels", via="model", unit="client", depends="all")
    S: Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")
    t: int = public()


class Nothing(Record):
    pass


class AsksOnce(Method):
    """A method whose server asks each client once a round for what `send` returns, and does nothing with it."""

    B: int = 64  # of the one epoch before a client sends

    def init(self, server):
        return Nothing()

    def round(self, s, server, cohort):
        cohort.ask(self.send, Ask())
        return s

    def trained(self, client):
        """Train for an epoch; return rows of the records, counts of their labels, and answers to three blank images."""
        client.fit(ce, epochs=1, batch=self.B, opt=sgd(0.1))
        with torch.no_grad():
            e, z = client.model.encode(client.x), client.model(torch.zeros(3, *client.shape))
        return e, torch.bincount(client.y, minlength=client.classes).float(), z


class Everything(AsksOnce):
    """One field for each way in which a release can depend on records; the model goes on from round to round."""

    shown: int = 12  # images that are sent

    def send(self, client, msg):
        e, counts, z = self.trained(client)
        V = client.protect(Sent, "V", client.class_means(e, "logits"))
        client.memory["V"] = V
        return Sent(e, V, counts, z, client.x[: self.shown], client.t)


SMALL = {"dataset": "digits", "model": "mlp", "partition": "iid", "holdout": 0.5, "aux": 0.4, "eval_clients": False}
ONE = {"epsilon": 1.0, "delta": 1e-2}
ALL = ("embeddings", "label_counts", "logits", "soft_labels", "synthetic_images")
# Images: noise of deviation 0.5 lets half of the pixels lie inside the range. At epsilon = 1 it is 20 times the range.
POLICIES = {**dict.fromkeys(ALL, ONE), "synthetic_images": {"noise_multiplier": 0.009, "delta": 1e-2}}
PRIVATE = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:0.5", "delta": 1e-2}}


def everything(folder, **privacy):
    run(method=f"{__name__}:Everything", rounds=2, clients=2, privacy=privacy or POLICIES, out=folder, **SMALL)
    return folder


def once(folder, **privacy):
    """One round on a third of the records: a trial of a release takes all of them through the model."""
    few = {**SMALL, "aux": 0.8, "set": {"B": 32, "shown": 2}}
    run(method=f"{__name__}:Everything", rounds=1, clients=2, privacy=privacy, out=folder, **few)
    return folder


STEPS_OF_FEW = {
    "rounds": 1, "clients": 2, "aux": 0.8, "set": {"E": 1, "B": 16}, "privacy": PRIVATE
}  # fmt: skip


def fedavg(folder, privacy=None, **more):
    options = {"rounds": 2, "clients": 2, "set": {"E": 1, "B": 64}, **SMALL, **more}
    run(method="fedavg", privacy={"training": PRIVATE["training"] | (privacy or {})}, out=folder, **options)
    return folder


def few_steps(folder, privacy=None, **more):
    """One round of private training, on so few records that it takes a tenth of a second."""
    return fedavg(folder, privacy, **{"rounds": 1, "aux": 0.8, "set": {"E": 1, "B": 16}, **more})
