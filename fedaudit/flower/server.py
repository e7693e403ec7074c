"""The server's side of an audit: an app's unchanged server, with a grid that shows the recorder every message.

Messages may come from many threads. An error of the audit itself, on a node or here, is kept and raised at every later
call and at the end, because Flower's older servers take an error in one of their threads for a client that failed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast
from unittest import mock

from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.server.compat import app as threaded_server
from flwr.server.workflow import default_workflows
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.run import Run, RunNotRunningException

from fedaudit.errors import FedauditError, RunError
from fedaudit.errors import place_of as raised_at
from fedaudit.flower.client import FAILED, PARTITION, ROLL_CALL, Told
from fedaudit.flower.in_process_runtime import LocalGrid
from fedaudit.flower.messages import AUDIT, Field, fields_of, frame_bytes
from fedaudit.flower.record_kinds import Names
from fedaudit.flower.recorder import Answer, Fields, Recorder, Sending
from fedaudit.flower.round_number import round_number
from fedaudit.flower.secure_sums import typed
from fedaudit.flower.strategies import watched_strategies

ROLL_CALL_S = 300  # seconds that nodes have to say their numbers: a process of a simulation may start in a minute


class AuditedGrid(Grid):
    """A grid whose every exchange is recorded."""

    def __init__(self, inner: Grid, recorder: Recorder):
        self.inner, self.recorder = inner, recorder
        self.lock = inner.lock if isinstance(inner, LocalGrid) else threading.RLock()
        self.failure: FedauditError | None = None  # the first error of the audit itself
        self._numbers: dict[int, int] = {}  # node id: partition-id
        self._sent: dict[str, Sending] = {}  # by message id: pushed, and not yet pulled
        self._early: dict[str, tuple[Message, Sending]] = {}  # pulled by the audit, and not yet by the app
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
        if self.failure is not None and threading.current_thread().daemon:
            raise RunNotRunningException  # ends the thread in which an older server looks for nodes, without a word
        self._raise()
        return self.inner.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        self._raise()
        return self.inner.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = list(messages)
        with self._ours():
            self._pull_waiting()
            sendings = self._send(sent)
        ids = list(self.inner.push_messages(sent))
        with self.lock:
            self._sent |= {m.metadata.message_id: of for m, of in zip(sent, sendings, strict=True)}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = list(message_ids)
        with self.lock:
            early = [self._early.pop(id_) for id_ in wanted if id_ in self._early]
            for _, sending in early:
                sending.taken = True
        replies = list(self.inner.pull_messages(wanted))
        with self._ours():
            self._answer_pushed(replies)
        return [*(reply for reply, _ in early), *replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        with self._ours():
            self._pull_waiting()
            sendings = self._send(sent)
        replies = list(self.inner.send_and_receive(sent, timeout=timeout))
        with self._ours():
            by_node: dict[int, list[Message]] = {}
            for reply in replies:
                by_node.setdefault(reply.metadata.src_node_id, []).append(reply)
            for message, sending in zip(sent, sendings, strict=True):
                waiting = by_node.get(message.metadata.dst_node_id, [])
                self.recorder.answer(sending, self._answer(sending, waiting.pop(0) if waiting else None))
        return replies

    # --- recording ---

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        """Do something of the audit's own, one thread at a time. Keep the first error."""
        with self.lock:
            self._raise()
            try:
                yield
            except FedauditError as e:
                self.failure = e
                raise
            except Exception as e:
                self.failure = RunError(f"The audit of a message failed: {type(e).__name__}: {e}{raised_at(e)}.")
                raise self.failure from e

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Record the answers that the server did not wait for. Raise the first error of the audit, if there was one."""
        with self._ours():
            self._pull_waiting()

    def _send(self, messages: Sequence[Message]) -> list[Sending]:
        """Return what the answers to these messages are noted on, in the messages' order.

        Fields are read before a message is sent, as its receiver may change it. A broadcast is read once.
        """
        groups: dict[tuple[str, int | None], list[tuple[int, Fields]]] = {}
        places: list[tuple[tuple[str, int | None], int, int]] = []
        for message in messages:
            kind = typed(message.metadata.message_type, message.content)
            group = groups.setdefault((kind, round_number(message)), [])
            k = self.number(message.metadata.dst_node_id)
            places.append(((kind, round_number(message)), k, sum(of == k for of, _ in group)))
            group.append((k, self._asked(message, kind)))
        self._broadcast = None
        noted: dict[tuple[str, int | None], dict[int, list[Sending]]] = {}
        for (kind, number), requests in groups.items():
            for sending in self.recorder.send(kind, number, requests):
                noted.setdefault((kind, number), {}).setdefault(sending.k, []).append(sending)
        return [noted[key][k][i] for key, k, i in places]

    def _asked(self, message: Message, kind: str) -> Fields:
        content = message.content
        if self._broadcast is None or self._broadcast[0] is not content:
            fields, _ = fields_of(content, Names(), kind, self.recorder.layout)
            self._broadcast = content, fields
        return self._broadcast[1], frame_bytes(message)

    def _pull_waiting(self) -> None:
        """Record the answers that lie ready for the server. It gets them when it asks, which may be never."""
        if not self._sent:
            return
        replies = list(self.inner.pull_messages(list(self._sent)))
        self._early |= {id_: (reply, self._sent[id_]) for reply in replies if (id_ := _answered(reply)) in self._sent}
        self._answer_pushed(replies, taken=False)

    def _answer_pushed(self, replies: Iterable[Message], taken: bool = True) -> None:
        for reply in replies:
            sending = self._sent.pop(_answered(reply), None)
            if sending is not None:
                self.recorder.answer(sending, self._answer(sending, reply), taken)

    def _answer(self, sending: Sending, reply: Message | None) -> Answer:
        if reply is None:
            return Answer(error="no reply came in time")
        if reply.has_error():
            return Answer(error=f"error {reply.error.code} of the node")  # its text may contain records
        note: Any = reply.content.pop(AUDIT, None)
        if note is not None and FAILED in note:
            raise RunError(note[FAILED])
        told = None if note is None else Told.model_validate_json(note["told"])
        fields, frame = fields_of(reply.content, self.recorder.names, sending.message_type, self.recorder.layout)
        return Answer((fields, frame + frame_bytes(reply)), told)

    def number(self, node_id: int) -> int:
        """Return a client's number: the node's partition-id, from a roll call that is not one of the app's messages."""
        if node_id not in self._numbers:
            self._call_roll()
        return self._numbers[node_id]

    def _call_roll(self) -> None:
        nodes = [n for n in self.inner.get_node_ids() if n not in self._numbers]
        calls = [Message(RecordDict(), dst_node_id=n, message_type=ROLL_CALL) for n in nodes]
        silent = set(nodes)
        for reply in self.inner.send_and_receive(calls, timeout=ROLL_CALL_S):
            if not reply.has_error():
                silent.discard(reply.metadata.src_node_id)
                said = int(cast(Any, reply.content[AUDIT])[PARTITION])
                if said >= 0 and said not in self._numbers.values():
                    self._numbers[reply.metadata.src_node_id] = said
        for n in sorted(nodes):  # nodes without a partition-id, or that are gone
            if n not in self._numbers:
                self._numbers[n] = next(k for k in range(len(nodes) + 1) if k not in self._numbers.values())
            if n in silent:  # perhaps it only starts slowly, and will take part
                self.recorder.note(
                    f"node {n} did not say in time which partition it holds: it counts as client {self._numbers[n]}, "
                    "and may hold the records of another"
                )


def _answered(reply: Message) -> str:
    """Return the id of the message that a reply answers."""
    return reply.metadata.reply_to_message_id


class AuditedServerApp(ServerApp):
    """An app's unchanged server, with its messages recorded."""

    def __init__(self, inner: ServerApp, recorder: Callable[[], Recorder], config: dict[str, Any] | None = None):
        super().__init__()
        self.inner, self.make_recorder, self.config = inner, recorder, config
        self.failure: FedauditError | None = None  # the error of the audit that ended the run
        self.begun = False  # whether a runtime has called it
        self.recorder: Recorder | None = None  # that of the run, once it has begun

    def redone(self) -> None:
        """Note that a runtime did a task of a node again."""
        if self.recorder is not None:
            self.recorder.task_redone()

    def __call__(self, grid: Grid, context: Context) -> None:
        self.begun = True
        self.recorder = recorder = self.make_recorder()
        audited = AuditedGrid(grid, recorder)
        if self.config is not None:
            context.run_config = dict(self.config)
        try:
            audited._call_roll()
            with watched_strategies(recorder), threads_ended():
                self.inner(audited, context)
            audited.close()
            recorder.finish()
        except Exception:
            self.failure = audited.failure
            audited._raise()  # the app fails later, and less clearly, of what failed in the audit
            raise
        finally:
            recorder.close()


@contextlib.contextmanager
def threads_ended() -> Iterator[None]:
    """End the threads in which Flower's older servers look for new nodes, also if the server fails.

    Such a thread would go on while Python shuts down, which ends the process with an abort.
    """
    started: list[tuple[threading.Thread, threading.Event]] = []
    start = threaded_server.start_update_client_manager_thread

    def noting(*args: Any, **options: Any) -> Any:
        made = start(*args, **options)
        started.append((made[0], made[1]))
        return made

    name = "start_update_client_manager_thread"
    with mock.patch.object(threaded_server, name, noting), mock.patch.object(default_workflows, name, noting):
        try:
            yield
        finally:
            for thread, stop in started:
                stop.set()
                thread.join()
