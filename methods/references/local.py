"""No collaboration: each client trains alone. The floor that every method has to beat.

Nothing of any content crosses the wire; the two empty messages are the harness's own start and end of a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedaudit import Client, Cohort, Down, Plan, Record, Server, Size, Up, ce, register
from fedaudit.methods.shared._libraries import DFFKE_AUTHORS
from fedaudit.methods.shared._local_training import WithViews


class Go(Down):
    pass


class Trained(Up):
    pass


class Nothing(Record):
    pass


@register("local")
class Local(WithViews):
    """Train each client alone. Nothing leaves a client."""

    E: int = 1  # epochs a round
    B: int = 64  # batch size
    eta: float = 0.01  # learning rate

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "dffke_authors": DFFKE_AUTHORS,  # as a row beside that paper's rivals
        "fedaf": {"E": 10, "B": 64, "eta": 0.01, "momentum": 0.9},  # as the rival in that paper
    }

    def init(self, server: Server) -> Nothing:
        return Nothing()

    def round(self, s: Nothing, server: Server, cohort: Cohort) -> Nothing:
        cohort.ask(self.train, Go())
        return s

    def train(self, client: Client, msg: Go) -> Trained:
        client.fit(ce, epochs=self.E, batch=self.B, opt=self.optimiser(self.eta), augment=self.augment)
        return Trained()

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {}
