"""The channel between the parties. It encodes each message, records it, and gives the receiver a fresh copy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from fedaudit.errors import ContractError
from fedaudit.wire.codec import (
    Header,
    choices,
    class_of,
    decode,
    encode,
    encode_lazily,
    fields_of,
    measure,
    read_header,
)
from fedaudit.wire.codec.packing import Blob
from fedaudit.wire.message import Declared, Down, Record, Size, Up, class_named
from fedaudit.wire.release import Protection, Release, Sent
from fedaudit.wire.traffic import Key
from fedaudit.wire.transcript import SERVER, SUM, TranscriptWriter, party


class RoundTraffic:
    """The traffic of one round: sizes by field, who was asked, who replied, and what the messages chose."""

    def __init__(self) -> None:
        self.sizes: dict[Key, Size] = {}
        self.whole: dict[Key, Size] = {}  # the same, as if nothing had been compressed
        self.wire: dict[Key, int] = {}
        self.asks: list[tuple[list[int], list[int]]] = []
        self.choices: dict[str, dict[int, Any]] = {}
        self.releases: dict[str, Release] = {}
        self.relayed: set[tuple[str, int]] = set()  # kind, client that now sees it
        self.digests: list[str] = []

    def total(self, direction: str) -> tuple[int, int]:
        """Return payload bytes (parameters without buffers) and wire bytes in one direction."""
        payload = sum(size.payload for (d, _), size in self.sizes.items() if d == direction)
        return payload, sum(n for (d, _), n in self.wire.items() if d == direction)

    def add(self, direction: str, k: int, message: str, head: Header, sizes: Mapping[str, dict[str, int]]) -> None:
        for name, size in sizes.items():
            key = (direction, f"{message}.{name}")
            self.wire[key] = self.wire.get(key, 0) + size["wire"]
            if size["payload"] or size["buffers"]:
                self.sizes[key] = self.sizes.get(key, Size()) + Size(size["payload"], size["buffers"])
                before = Size(size.get("whole", size["payload"]), size["buffers"])
                self.whole[key] = self.whole.get(key, Size()) + before
        for name, node in fields_of(head).items():
            self.choices.setdefault(f"{message}.{name}", {})[k] = choices(node)


class Answer(Protocol):
    """A client's answer: the encoded reply with the parameters of its protection, or the reason why there is none."""

    @property
    def k(self) -> int: ...
    @property
    def reply(self) -> Blob | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def protection(self) -> Mapping[str, Protection]: ...


def _sent(sizes: Mapping[str, int], declared: Declared | None, protection: Protection | None) -> Mapping[str, Any]:
    """Return the transcript's entry for one field of a message."""
    if protection is None:
        return _unprotected(tuple(sizes.items()), declared)
    return Sent.of(sizes, declared, protection).model_dump()


@functools.lru_cache(maxsize=1024)
def _unprotected(sizes: tuple[tuple[str, int], ...], declared: Declared | None) -> Mapping[str, Any]:
    """Return the entry of an unprotected field, from a cache: most clients and rounds send the same sizes."""
    return Sent.of(dict(sizes), declared, None).model_dump()


class Wire:
    """One round's traffic through one transcript."""

    def __init__(
        self,
        transcript: TranscriptWriter,
        t: int,
        answers: dict[str, type[Up]] | None = None,
        here: torch.device | None = None,
    ):
        """Start a round. `here` is the device of clients in this process; messages to them need not become bytes."""
        self.transcript, self.t, self.here = transcript, t, here
        self.traffic = RoundTraffic()
        self._answers = {} if answers is None else answers  # the one message class of each function, over the run
        # Under way; an engine's clients in hand bound its size. Last: what to wait for until its digest is known.
        self._sent: dict[int, tuple[Blob, Header, float, Future[Any] | None]] = {}
        self._last: tuple[Blob, Any, Down] | None = None  # the Down message that was decoded last, and its device

    def down(self, messages: Mapping[int, Down | bytes]) -> Iterator[tuple[int, Blob]]:
        """Yield each client and its encoded message, by ascending client.

        One message object that goes to many clients is encoded once. A message that comes encoded, from a server in
        another process, is only checked.
        """
        self.traffic.asks.append((sorted(messages), []))
        encoded: dict[int, tuple[Blob, Header, Future[Any] | None]] = {}
        for k in sorted(messages):
            message = messages[k]
            if not isinstance(message, Down | bytes):
                raise ContractError(f"cohort.ask was given a {type(message).__name__}. Give it a Down message.")
            if id(message) not in encoded:
                encoded.clear()  # a broadcast is one object; if there are many objects, one at a time is enough
                if isinstance(message, bytes):
                    decode(message, Down)
                    blob: Blob = message
                else:
                    blob = encode_lazily(message, self.here)  # bytes, if the clients are elsewhere
                head = read_header(blob)
                encoded[id(message)] = blob, head, self.transcript.prepare(head)
            blob, head, digest = encoded[id(message)]
            self._sent[k] = blob, head, self.transcript.clock(), digest
            yield k, blob

    def back(self, done: Answer, fn: str, device: Any) -> Up | None:
        """Record a finished client's message and its reply, and return the server's own copy of the reply.

        Return None if the client did not reply.

        Both rows are written here, so that their order does not depend on which clients ran at the same time.
        """
        k, ask = done.k, len(self.traffic.asks) - 1
        blob, head, sent, digest = self._sent.pop(k)
        if digest is not None:
            digest.exception()  # one that failed fails again below, where it is needed
        self._record(blob, head, "down", k, ask, fn, {}, at=sent)
        if done.reply is None:
            self.transcript.event(event="absent", round=self.t, ask=ask, fn=fn, client=k, reason=done.error)
            return None
        reply = decode(done.reply, Up, device=device, answered=lambda: self._message(blob, device))
        first = self._answers.setdefault(fn, type(reply))
        if first is not type(reply):
            raise ContractError(
                f"{fn}: client {k} answered with a {type(reply).__name__}; another client, or it in another round, "
                f"with a {first.__name__}. The choice of the class would reveal something about the records: always "
                "return one class."
            )
        answer = read_header(done.reply)
        self._record(done.reply, answer, "up", k, ask, fn, done.protection, at=self.transcript.clock(), base=head)
        self.traffic.asks[-1][1].append(k)
        return reply

    def aside(self, direction: str, k: int, message: Record, phase: str, ask: int) -> Any:
        """Carry a message that is no ask of the method's own: it is billed, recorded, and decoded on the other side."""
        blob = encode(message)
        self._record(blob, read_header(blob), direction, k, ask, f"(sum) {phase}", {}, at=self.transcript.clock())
        return decode(blob, type(message))

    def left(self, k: int, ask: int, phase: str, reason: str) -> None:
        """Record that a client did not answer a message that is no ask of the method's own."""
        self.transcript.event(event="absent", round=self.t, ask=ask, fn=f"(sum) {phase}", client=k, reason=reason)

    def summed(self, value: Up, fn: str, ask: int, clients: Sequence[int]) -> None:
        """Record the sum of some clients' replies that the server computed, as what it knows of each of them."""
        blob = encode(value)
        head = read_header(blob)
        sizes = measure(head, len(blob))
        fields = {
            name: _sent(dict.fromkeys(sizes[name], 0), declared, None) for name, declared in value.declared().items()
        }
        self.transcript.message(
            blob, head, None, **{"from": SUM, "to": SERVER, "type": "sum"}, round=self.t, ask=ask, fn=fn,
            client=-1, direction="up", message=type(value).__name__, bytes=0, frame=0, fields=fields,
            clients=list(clients),
        )  # fmt: skip

    def _message(self, blob: Blob, device: Any) -> Down:
        """Return the message as the client received it, because its reply may be a change of that."""
        if self._last is None or self._last[0] is not blob or self._last[1] != device:
            self._last = blob, device, decode(blob, Down, device=device)
        return self._last[2]

    def sizes(self, direction: str, k: int, head: Header, blob_size: int) -> dict[str, dict[str, int]]:
        """Return the bytes of each field, and under "(frame)" the bytes around them.

        A subclass for another transport counts the bytes that this transport really sends.
        """
        return measure(head, blob_size)

    def _record(
        self,
        blob: Blob,
        head: Header,
        direction: str,
        k: int,
        ask: int,
        fn: str,
        protection: Mapping[str, Protection],
        at: float,
        base: Header | None = None,
    ) -> None:
        digest = head.digest  # before the transcript's thread fetches the same tensors
        class_id = class_of(head.tree)
        message = class_id.rsplit(".", 1)[-1]
        sizes = self.sizes(direction, k, head, len(blob))
        fields: dict[str, Mapping[str, Any]] = {}
        cls = class_named(class_id)
        assert cls is not None  # this process has encoded or decoded it
        declarations = cls.declared()
        for name, declared in declarations.items():
            fields[name] = _sent(sizes[name], declared, protection.get(name))
        ends = (SERVER, party(k)) if direction == "down" else (party(k), SERVER)
        self.transcript.message(
            blob,
            head,
            base,
            **{"from": ends[0], "to": ends[1]},
            at=at,
            round=self.t,
            ask=ask,
            fn=fn,
            client=k,
            direction=direction,
            message=message,
            bytes=sum(size["wire"] for size in sizes.values()),
            frame=sizes["(frame)"]["wire"],
            fields=fields,
        )
        self.traffic.add(direction, k, message, head, sizes)
        self.traffic.digests.append(f"{direction} {k} {digest}")
        for name, declared in declarations.items():
            if declared is not None and declared.role == "relay" and declared.kind is not None:
                self.traffic.relayed.add((declared.kind, k))
            if declared is not None and direction == "up":
                where = f"{message}.{name}"
                self.traffic.releases[where] = Release.of(where, declared, protection.get(name))
