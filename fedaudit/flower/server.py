"""The server's side of an audit: an app's unchanged server, with a grid that shows the recorder every message.

Flower's strategies run unchanged. While one runs, its `start` is watched for three facts that are in no message: which
strategy it is (and its claim of differential privacy), when a round ends, and the global model after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast
from unittest import mock

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Strategy
from flwr.supercore.run import Run

from fedaudit.flower.claims import strategy_claim
from fedaudit.flower.client import PARTITION, ROLL_CALL, Told
from fedaudit.flower.messages import AUDIT, Field, fields_of, frame_bytes, tensor_of
from fedaudit.flower.record_kinds import Names
from fedaudit.flower.recorder import Exchange, Recorder

Fields = tuple[dict[str, Field], int]


class AuditedGrid(Grid):
    """A grid whose every exchange is recorded."""

    def __init__(self, inner: Grid, recorder: Recorder):
        self.inner, self.recorder = inner, recorder
        self._numbers: dict[int, int] = {}  # node id: partition-id
        self._sent: dict[str, tuple[Message, Fields]] = {}  # sent and not yet answered
        self._broadcast: tuple[RecordDict, dict[str, Field]] | None = None

    # --- the interface of Flower's grids ---

    def set_run(self, run: Run) -> None:
        self.inner.set_run(run)

    @property
    def run(self) -> Run:
        return self.inner.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self.inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self.inner.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self.inner.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        asked = [self._asked(message) for message in sent]
        ids = list(self.inner.push_messages(sent))
        self._sent |= {m.metadata.message_id: (m, fields) for m, fields in zip(sent, asked, strict=True)}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(self.inner.pull_messages(message_ids))
        pairs = [(self._sent.pop(reply.metadata.reply_to_message_id, None), reply) for reply in replies]
        self._record([(*pair, reply) for pair, reply in pairs if pair is not None])
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        asked = [self._asked(message) for message in sent]
        replies = list(self.inner.send_and_receive(sent, timeout=timeout))
        by_node: dict[int, list[Message]] = {}
        for reply in replies:
            by_node.setdefault(reply.metadata.src_node_id, []).append(reply)
        rows = []
        for message, fields in zip(sent, asked, strict=True):
            waiting = by_node.get(message.metadata.dst_node_id, [])
            rows.append((message, fields, waiting.pop(0) if waiting else None))
        self._record(rows)
        return replies

    # --- recording ---

    def close(self) -> None:
        """Record the messages that were sent and never answered."""
        self._record([(message, fields, None) for message, fields in self._sent.values()])
        self._sent.clear()

    def _asked(self, message: Message) -> Fields:
        """Return a message's fields, read before it is sent, as its receiver may change it. Read a broadcast once."""
        content = message.content
        if self._broadcast is None or self._broadcast[0] is not content:
            fields, _ = fields_of(content, Names(), message.metadata.message_type, self.recorder.buffers)
            self._broadcast = content, fields
        return self._broadcast[1], frame_bytes(message)

    def _record(self, rows: list[tuple[Message, Fields, Message | None]]) -> None:
        self._broadcast = None
        by_type: dict[str, list[list[Exchange]]] = {}
        for message, asked, reply in rows:
            asks = by_type.setdefault(message.metadata.message_type, [])
            exchange = self._exchange(self.number(message.metadata.dst_node_id), asked, reply)
            free = next((ask for ask in asks if all(e.k != exchange.k for e in ask)), None)
            if free is None:  # a node that got two messages was asked twice
                asks.append(free := [])
            free.append(exchange)
        for message_type, asks in by_type.items():
            for ask in asks:
                self.recorder.ask(message_type, ask)

    def _exchange(self, k: int, asked: Fields, reply: Message | None) -> Exchange:
        if reply is None:
            return Exchange(k, asked, error="no reply came in time")
        if reply.has_error():
            return Exchange(k, asked, error=f"error {reply.error.code} of the node")  # its text may contain records
        note: Any = reply.content.pop(AUDIT, None)
        told = None if note is None else Told.model_validate_json(note["told"])
        fields, frame = fields_of(
            reply.content, self.recorder.names, reply.metadata.message_type, self.recorder.buffers
        )
        return Exchange(k, asked, (fields, frame + frame_bytes(reply)), told)

    def number(self, node_id: int) -> int:
        """Return a client's number: the node's partition-id, from a roll call that is not one of the app's messages."""
        if node_id not in self._numbers:
            self._call_roll()
        return self._numbers[node_id]

    def _call_roll(self) -> None:
        nodes = [n for n in self.inner.get_node_ids() if n not in self._numbers]
        calls = [Message(RecordDict(), dst_node_id=n, message_type=ROLL_CALL) for n in nodes]
        for reply in self.inner.send_and_receive(calls, timeout=60):
            if not reply.has_error():
                said = int(cast(Any, reply.content[AUDIT])[PARTITION])
                if said >= 0 and said not in self._numbers.values():
                    self._numbers[reply.metadata.src_node_id] = said
        for n in sorted(nodes):  # nodes without a partition-id, or that are gone
            if n not in self._numbers:
                self._numbers[n] = next(k for k in range(len(nodes) + 1) if k not in self._numbers.values())


class AuditedServerApp(ServerApp):
    """An app's unchanged server, with its messages recorded."""

    def __init__(self, inner: ServerApp, recorder: Callable[[], Recorder], config: dict[str, Any] | None = None):
        super().__init__()
        self.inner, self.make_recorder, self.config = inner, recorder, config

    def __call__(self, grid: Grid, context: Context) -> None:
        recorder = self.make_recorder()
        audited = AuditedGrid(grid, recorder)
        if self.config is not None:
            context.run_config = dict(self.config)
        try:
            audited._call_roll()
            with watched_strategies(recorder):
                self.inner(audited, context)
            audited.close()
            recorder.finish()
        finally:
            recorder.close()


@contextlib.contextmanager
def watched_strategies(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder each strategy's name, its claims, and the global model after each round, while this is open."""
    start = Strategy.start

    def watching(self: Strategy, *args: Any, **options: Any) -> Any:
        recorder.note(f"server strategy: {type(self).__name__}")
        if (claim := strategy_claim(self)) is not None:
            recorder.note(claim)
        theirs: Any = options.pop("evaluate_fn", None)
        if len(args) > 6:
            args, theirs = args[:6], args[6]

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            measured = None if theirs is None else theirs(server_round, arrays)
            if server_round > 0:
                found = {name: tensor_of(array) for name, array in arrays.items()}
                recorder.end_round(found, dict(measured or {}))
            return measured

        return start(self, *args, evaluate_fn=evaluate, **options)

    with mock.patch.object(Strategy, "start", watching):
        yield
