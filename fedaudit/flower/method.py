"""A Flower app as a method, for attacks and audits of a finished run. Only Flower's runtime can run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from pydantic import Field
from torch import nn

from fedaudit.data import Federation
from fedaudit.errors import DataError, ThreatError
from fedaudit.flower.app import imported
from fedaudit.flower.client import identify
from fedaudit.flower.messages import contents_of, fields_of, message_class, ups
from fedaudit.flower.record_kinds import UNMAPPED, Named, Names
from fedaudit.flower.records import Records, as_net, federation_of
from fedaudit.flower.secure_sums import PROTOCOL
from fedaudit.registry import check_trusted
from fedaudit.runtime.method import Method
from fedaudit.setting import Setting
from fedaudit.wire.message import Declared, Down, Up


class FlowerApp(Method):
    """A Flower app by its name. `messages` has the shapes of the messages that its run saw."""

    foreign_transport: ClassVar[bool] = True

    app: str = "app"
    kinds: dict[str, Any] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    adapter: str | None = None
    client: str | None = None
    messages: dict[str, Any] = Field(default_factory=dict)

    def model_post_init(self, _: Any) -> None:
        for name, shape in self.messages.items():
            reply = name.endswith("Reply")
            declared = {field: self._declared(of) if reply else None for field, of in shape["fields"].items()}
            message_class(name, declared, Up if reply else Down)

    @staticmethod
    def _declared(of: Mapping[str, Any]) -> Declared:
        named = None if of["named"] is None else Named(**of["named"])
        if named is None and of.get("role") is not None:  # runs from before secure sums were understood have no role
            return next(said for said in PROTOCOL.values() if said.role == of["role"])
        kind, unit = (UNMAPPED, "client") if named is None else (named.kind, named.unit)
        return Declared("private", kind, via="data", unit=unit, finite=False)  # type: ignore[arg-type]

    def records(self) -> Records:
        if self.adapter is None:
            raise DataError(
                f"The run of {self.app} was made without an adapter, so the members are unknown. Subclass "
                "fedaudit.flower.Records beside the app, name it as adapter, and run again."
            )
        return cast(Records, imported(self.adapter, Records)())

    # --- called by a run's world ---

    def archs(self, model: str, clients: int) -> list[str]:
        return [model] * clients

    def federation(self, setting: Setting) -> Federation:
        if self.client is not None:
            check_trusted(self.client)  # checked here, because the later import does not know who named it
        return federation_of(self.records(), setting.clients, setting.canaries, setting.seed, self.app)

    def build(self, arch: str) -> nn.Module:
        model = self.records().model()
        if model is None:
            raise ThreatError(
                f"The adapter of {self.app} gives no model, so its arrays cannot be loaded. Write the adapter's model()"
            )
        return as_net(model, arch)

    # --- a client's tasks, for a replay ---

    def train(self, client: Any, message: Down) -> Up:
        return self._answer(client, message)

    def evaluate(self, client: Any, message: Down) -> Up:
        return self._answer(client, message)

    def query(self, client: Any, message: Down) -> Up:
        return self._answer(client, message)

    def _answer(self, client: Any, message: Down) -> Up:
        """Run the app's own function on the client's records, and return its reply."""
        if self.client is None:
            raise ThreatError("the run does not say where its ClientApp lies, so no client can be replayed")
        app = imported(self.client, ClientApp)
        identify()
        shape = self.messages[type(message).__name__]
        content = contents_of({name: getattr(message, name) for name in shape["fields"]}, shape["fields"])
        asked = Message(content, dst_node_id=client.id, message_type=shape["type"])
        node = {"partition-id": client.id, "num-partitions": 1}
        context = Context(0, client.id, node, RecordDict(), dict(self.config))
        with self.records().serving(client.x, client.y):
            reply = app(asked, context)
        fields, _ = fields_of(reply.content, Names(self.kinds), shape["type"])
        return cast(Up, ups([fields], shape["type"])[0])
