"""No collaboration: each client trains alone. The floor that every method has to beat.

Nothing of any content crosses the wire; the two empty messages are the harness's own start and end of a task.
"""

from __future__ import annotations

from fedaudit import Down, Method, Record, Up, ce, register, sgd


class Go(Down):
    pass


class Trained(Up):
    pass


class Nothing(Record):
    pass


@register("local")
class Local(Method):
    E: int = 1  # epochs a round
    B: int = 64  # batch size
    eta: float = 0.01  # learning rate

    def init(self, server):
        return Nothing()

    def round(self, s, server, cohort):
        cohort.ask(self.train, Go())
        return s

    def train(self, client, msg):
        client.fit(ce, epochs=self.E, batch=self.B, opt=sgd(self.eta))
        return Trained()

    def traffic(self, plan):
        return {}
