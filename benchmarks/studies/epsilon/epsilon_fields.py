"""A method that releases one field of each kind, for benchmarks/studies/epsilon/epsilon_forged.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedaudit import Down, Method, Record, Up, ce, private, sgd


class Ask(Down):
    pass


class Sent(Up):
    e: Tensor = private("embeddings", via="data", unit="record")
    V: dict[int, Tensor] = private("logits", via="data", unit="client", depends="class")
    n: Tensor = private("label_counts", via="data", unit="client")
    z: Tensor = private("soft_labels", via="model", unit="client", depends="all")
    S: Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")


KINDS = tuple(field.kind for field in Sent.declared().values() if field is not None and field.kind is not None)


class Nothing(Record):
    pass


class OneOfEach(Method):
    """Send rows of records, class means, counts, rows that depend on all records, and images."""

    def init(self, server: Any) -> Nothing:
        return Nothing()

    def round(self, s: Nothing, server: Any, cohort: Any) -> Nothing:
        cohort.ask(self.send, Ask())
        return s

    def send(self, client: Any, msg: Ask) -> Sent:
        client.fit(ce, epochs=1, batch=64, opt=sgd(0.1))
        with torch.no_grad():
            e, z = client.model.encode(client.x), client.model(torch.zeros(20, *client.shape))
        counts = torch.bincount(client.y, minlength=client.classes).float()
        return Sent(4 * e, client.class_means(4 * e, "logits"), counts, 4 * z, client.x[:4])
