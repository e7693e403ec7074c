"""A runtime for Flower apps in this process: nodes run one after the other by number, with draws from the run's seed.

Flower's own simulation starts Ray, takes seconds to start and draws other samples every time. This grid gives an app
the same messages. They are copied into new memory, so that no node can write into another's.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import NUM_PARTITIONS_KEY, PARTITION_ID_KEY, SUPERLINK_NODE_ID, ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run

from fedaudit.flower.client import ROLL_CALL, RUN_ID, identify
from fedaudit.rng import seeded

FIRST = 1001  # the number of the first node


class LocalGrid(Grid):
    """A grid whose nodes answer at once, in this process."""

    def __init__(self, app: ClientApp, nodes: int, seed: int, log: Path | None = None):
        self.app, self.seed, self.log = app, seed, log
        self.contexts = {
            FIRST + k: Context(
                run_id=RUN_ID,
                node_id=FIRST + k,
                node_config={PARTITION_ID_KEY: k, NUM_PARTITIONS_KEY: nodes},
                state=RecordDict(),
                run_config={},
            )
            for k in range(nodes)
        }
        self._run = Run.create_empty(run_id=RUN_ID)
        self._numbers = itertools.count(1)
        self._asked = dict.fromkeys(self.contexts, 0)
        self._replies: dict[str, Message] = {}
        # One node at a time: each has this process's generators for itself. An audit of this grid takes the same lock:
        # Python before 3.11.8 fails if two threads read the header of an array at once (python/cpython#106905).
        self.lock = threading.RLock()

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        with self.lock:
            for message in sent:
                message.metadata.__dict__["_message_id"] = f"{next(self._numbers):036d}"  # has the length of a UUID
            for message in sorted(sent, key=lambda m: m.metadata.dst_node_id):
                self._replies[message.metadata.message_id] = self._answer(message)
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        with self.lock:
            found = [self._replies.pop(id_) for id_ in message_ids if id_ in self._replies]
        return sorted(
            found, key=lambda m: m.metadata.src_node_id
        )  # sorted, so that sums do not depend on the order of drawing

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        received = message_from_proto(message_to_proto(message))
        if message.metadata.message_type != ROLL_CALL:
            self._asked[node] += 1
        try:
            with seeded(self.seed, f"node {node - FIRST}", self._asked[node]):
                reply = self.app(received, self.contexts[node])
        except Exception as e:  # noqa: BLE001 (a failing node answers with an error, as in Flower)
            if self.log is not None:
                with open(self.log, "a") as file:
                    file.write(f"node {node - FIRST}: {''.join(traceback.format_exception(e))}\n")
            error = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=f"{type(e)}:<'{e}'>")  # in Flower's words
            reply = Message(error, reply_to=message)
        return reply


def run_here(server: ServerApp, client: ClientApp, nodes: int, seed: int, log: Path | None = None) -> None:
    """Run an app's server, with its nodes in this process."""
    identify()
    grid = LocalGrid(client, nodes, seed, log)
    context = Context(run_id=RUN_ID, node_id=SUPERLINK_NODE_ID, node_config={}, state=RecordDict(), run_config={})
    with seeded(seed, "flower server"):
        server(grid=grid, context=context)
