"""The wire: the one road between the parties. It encodes, records, and gives the other side a fresh copy."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from fedaudit.errors import ContractError
from fedaudit.wire.codec import Header, choices, class_of, decode, encode, fields_of, hold, measure, read_header
from fedaudit.wire.message import Declared, Down, Size, Up, class_named
from fedaudit.wire.packing import Blob
from fedaudit.wire.release import Protection, Release, Sent
from fedaudit.wire.traffic import Key
from fedaudit.wire.transcript import SERVER, TranscriptWriter, party


class RoundTraffic:
    """What crossed the wire in one round: sizes by field, who was asked and who replied, and what was chosen."""

    def __init__(self) -> None:
        self.sizes: dict[Key, Size] = {}
        self.whole: dict[Key, Size] = {}  # the same, as if nothing had been compressed
        self.wire: dict[Key, int] = {}
        self.by_client: dict[tuple[str, int], list[int]] = {}  # (direction, client): payload with buffers, wire
        self.asks: list[tuple[list[int], list[int]]] = []
        self.choices: dict[str, dict[int, Any]] = {}
        self.releases: dict[str, Release] = {}
        self.relayed: set[tuple[str, int]] = set()  # kind, client that now sees it
        self.digests: list[str] = []

    def total(self, direction: str) -> tuple[int, int]:
        """Payload (parameters without buffers) and wire bytes in one direction."""
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
        count = self.by_client.setdefault((direction, k), [0, 0])
        count[0] += sum(size["payload"] for size in sizes.values())
        count[1] += sum(size["wire"] for size in sizes.values())
        for name, node in fields_of(head).items():
            self.choices.setdefault(f"{message}.{name}", {})[k] = choices(node)


class Answer(Protocol):
    """What came back from a client: the encoded reply with the parameters of its protection, or why there is none."""

    @property
    def k(self) -> int: ...
    @property
    def reply(self) -> Blob | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def protection(self) -> Mapping[str, Protection]: ...


def _sent(sizes: Mapping[str, int], declared: Declared | None, protection: Protection | None) -> Mapping[str, Any]:
    """A field of a message, as the transcript has it."""
    if protection is None:
        return _unprotected(tuple(sizes.items()), declared)
    return Sent.of(sizes, declared, protection).model_dump()


@functools.lru_cache(maxsize=1024)
def _unprotected(sizes: tuple[tuple[str, int], ...], declared: Declared | None) -> Mapping[str, Any]:
    """Messages of all clients and rounds have mostly the same sizes."""
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
        """`here`: the device of clients that run in this process, where a message need not become bytes to arrive."""
        self.transcript, self.t, self.here = transcript, t, here
        self.traffic = RoundTraffic()
        self._answers = {} if answers is None else answers  # the one message class of each function, over the run
        self._sent: dict[int, tuple[Blob, Header, float]] = {}  # on its way: bounded by what an engine has in hand
        self._last: tuple[Blob, Any, Down] | None = None  # what was decoded last of what went down, and where to

    def down(self, messages: Mapping[int, Down | bytes]) -> Iterator[tuple[int, Blob]]:
        """Bytes for each client, by ascending client. One message object sent to many is encoded once; one that comes
        encoded, from a server in another process, is only looked at."""
        self.traffic.asks.append((sorted(messages), []))
        encoded: dict[int, tuple[Blob, Header]] = {}
        for k in sorted(messages):
            message = messages[k]
            if not isinstance(message, Down | bytes):
                raise ContractError(f"cohort.ask was given a {type(message).__name__}; only a Down message is sent.")
            if id(message) not in encoded:
                encoded.clear()  # a broadcast is one object; of many objects only one needs to be held
                if isinstance(message, bytes):
                    decode(message, Down)
                    blob: Blob = message
                else:
                    blob = encode(message) if self.here is None else hold(message, self.here)
                encoded[id(message)] = blob, read_header(blob)
            blob, head = encoded[id(message)]
            self._sent[k] = blob, head, self.transcript.clock()
            yield k, blob

    def back(self, done: Answer, fn: str, device: Any) -> Up | None:
        """Client k is through: record what it was sent and what it answered, and decode the server's own copy.

        Both rows are written here, so that their order does not depend on which clients ran at the same time.
        """
        k, ask = done.k, len(self.traffic.asks) - 1
        blob, head, sent = self._sent.pop(k)
        self._record(blob, head, "down", k, ask, fn, {}, at=sent)
        if done.reply is None:
            self.transcript.event(event="absent", round=self.t, ask=ask, fn=fn, client=k, reason=done.error)
            return None
        reply = decode(done.reply, Up, device=device, answered=lambda: self._message(blob, device))
        first = self._answers.setdefault(fn, type(reply))
        if first is not type(reply):
            raise ContractError(
                f"{fn}: client {k} answered with a {type(reply).__name__}, another one, or in another round, with a "
                f"{first.__name__}. Which message comes says something of the records: return one class."
            )
        answer = read_header(done.reply)
        self._record(done.reply, answer, "up", k, ask, fn, done.protection, at=self.transcript.clock(), base=head)
        self.traffic.asks[-1][1].append(k)
        return reply

    def _message(self, blob: Blob, device: Any) -> Down:
        """What a client was sent, as it has it: what it answers may be a change of that."""
        if self._last is None or self._last[0] is not blob or self._last[1] != device:
            self._last = blob, device, decode(blob, Down, device=device)
        return self._last[2]

    def sizes(self, direction: str, k: int, head: Header, blob_size: int) -> dict[str, dict[str, int]]:
        """Bytes by field, and around them: "(frame)". Another wire's messages are counted in the bytes it sends."""
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
        class_id = class_of(head.tree)
        message = class_id.rsplit(".", 1)[-1]
        sizes = self.sizes(direction, k, head, len(blob))
        fields: dict[str, Mapping[str, Any]] = {}
        cls = class_named(class_id)
        assert cls is not None  # it was encoded, or decoded, here
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
        self.traffic.digests.append(f"{direction} {k} {head.digest}")
        for name, declared in declarations.items():
            if declared is not None and declared.role == "relay" and declared.kind is not None:
                self.traffic.relayed.add((declared.kind, k))
            if declared is not None and direction == "up":
                where = f"{message}.{name}"
                self.traffic.releases[where] = Release.of(where, declared, protection.get(name))
