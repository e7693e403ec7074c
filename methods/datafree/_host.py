"""Hosts: methods whose clients upload trained models, which a distillation on the server takes as its teachers.

A host's state has the global model in a field `w`, and so have the replies to the first ask of its round. `Host` lists
what else a distillation needs from it. A method that has none of this, such as `fedavg`, is taken as `Plain`: its round
is its training, nothing comes after it, an upload is a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast, runtime_checkable

from torch import nn

from fedaudit import (
    Client,
    Cohort,
    Down,
    Mean,
    Method,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    ce,
    load,
    private,
    state_of,
)
from fedaudit.aggregation.mean import mean_of
from fedaudit.methods.shared._optimiser import WithOptimiser

U = TypeVar("U", bound=Up)


class Holds(Protocol):
    """A host's state."""

    @property
    def w(self) -> State:
        """Return the global model."""
        ...


@runtime_checkable
class Host(Protocol):
    """The questions that a distillation asks of its host, which is a method beside."""

    def train(self, s: Any, server: Server, cohort: Cohort) -> Holds:
        """Carry out the round up to the new global model: one ask, answered by uploads. Return the new state."""
        ...

    def settle(self, s: Any, server: Server, cohort: Cohort) -> Record:
        """Do what has to come last, when the global model is final, such as HeteroFL's query of statistics."""
        ...

    def teacher(self, server: Server, k: int, w: State) -> nn.Module:
        """Return client k's model as the server can run it from the upload."""
        ...

    def goes_on(self) -> bool:
        """Return whether the global model goes on from round to round, and is not replaced by an average."""
        ...

    def measures_statistics(self) -> bool:
        """Return whether `settle` measures batch-norm statistics anew."""
        ...


@dataclass(frozen=True)
class Plain:
    """A method as a host: its round, and no more."""

    method: Method

    def train(self, s: Any, server: Server, cohort: Cohort) -> Holds:
        return cast(Holds, self.method.round(s, server, cohort))

    def settle(self, s: Any, server: Server, cohort: Cohort) -> Record:
        return cast(Record, s)

    def teacher(self, server: Server, k: int, w: State) -> nn.Module:
        return server.model(server.arch(k), state=w)

    def goes_on(self) -> bool:
        return False

    def measures_statistics(self) -> bool:
        return False


def host_of(method: Method) -> Host:
    return method if isinstance(method, Host) else Plain(method)


class Overheard(Cohort):
    """A cohort that keeps the answers it got: a host's replies are the distillation's teachers."""

    def __init__(self, cohort: Cohort, server: Server):
        self.cohort, self.server, self.replies = cohort, server, list[dict[int, Any]]()

    @property
    def ids(self) -> list[int]:  # type: ignore[override]
        return self.cohort.ids

    def ask(self, fn: Callable[[Any, Any], U], message: Down | Mapping[int, Any]) -> dict[int, U]:
        self.replies.append(self.cohort.ask(fn, message))
        return self.replies[-1]

    def mean(self, fn: Callable[[Any, Any], U], message: Down | Mapping[int, Any], *, by: str | None = None) -> Mean[U]:
        method: Any = getattr(fn, "__self__", None)  # the host, whose function it is
        sent = {k: message if isinstance(message, Down) else message[k] for k in self.ids}
        replies = self.ask(fn, message).items()
        return mean_of({k: method.summand(self.server.sender(k), reply, sent[k]) for k, reply in replies}, by)


# --- the host of the data-free mode ---------------------------------------------------------------------------------


class Begin(Down):
    w: State | None  # the global model, where clients start from it


class Uploaded(Up):
    w: State = private("weights", via="model", unit="client")


class Given(Record):
    w: State


class Alone(WithOptimiser):
    """Clients train by themselves and upload; nothing is averaged.

    The papers do not say what goes down. In DFRD's Table 1 L.acc hardly depends on G.acc in this mode, so clients go on
    from their own models (`start = "local"`). FedZGE's Table 8 bills the global model to each client in each round:
    `start = "global"`. Clients of another architecture than the server's then receive it and go on from their own.
    """

    single_replies: ClassVar[str] = "the uploaded models are teachers, each by itself"

    quick: ClassVar[Mapping[str, Any]] = {}

    E: int = 1  # local epochs
    B: int = 64  # local batch size
    eta: float = 0.01  # local learning rate
    start: Literal["local", "global"] = "local"

    def init(self, server: Server) -> Given:
        return Given(state_of(server.model()))

    def round(self, s: Given, server: Server, cohort: Cohort) -> Given:
        return self.train(s, server, cohort)

    def train(self, s: Given, server: Server, cohort: Cohort) -> Given:
        cohort.ask(self.client_update, Begin(s.w if self.start == "global" else None))
        return s

    def settle(self, s: Given, server: Server, cohort: Cohort) -> Given:
        return s

    def teacher(self, server: Server, k: int, w: State) -> nn.Module:
        return server.model(server.arch(k), state=w)

    def goes_on(self) -> bool:
        return True

    def measures_statistics(self) -> bool:
        return False

    def client_update(self, client: Client, msg: Begin) -> Uploaded:
        if msg.w is not None and {n: t.shape for n, t in msg.w.items()} == {
            n: t.shape for n, t in client.model.state_dict().items()
        }:
            load(client.model, msg.w)
        client.fit(ce, epochs=self.E, batch=self.B, opt=self.optimiser(self.eta))
        return Uploaded(state_of(client.model))

    def predictor(self, s: Given, server: Server) -> nn.Module:
        return server.model(state=s.w)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        sent = plan.state() * len(plan.asked(0)) if self.start == "global" else 0
        return {("down", "Begin.w"): sent, ("up", "Uploaded.w"): sum((plan.state(k) for k in plan.replied(0)), Size())}
