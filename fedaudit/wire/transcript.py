"""The transcript: every message of a run, in order, and what each threat may read of it.

On disk it is `index.jsonl` and two packs of tensors per round. The index has one row per message or event, each behind
its own checksum. It is append-only, flushed per row and synced per round. Model states have a pack apart from all
other tensors, so that old states can be dropped. A pack is written before the row that refers to it, so a kill at any
instant loses at most the messages being written. Within a round a tensor is stored once, however often it is sent.
Large messages are written in a background thread, in their order, while the run goes on. So is the end of a round; no
row of the next round is written before it. Digests of messages that lie on a GPU are computed in a thread of their own.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash
from pydantic import ValidationError
from torch import Tensor

from fedaudit.errors import ThreatError, TranscriptError
from fedaudit.wire.codec import (
    Header,
    bases_of,
    check_size,
    class_of,
    content_of,
    known_content,
    moved,
    names_of,
    node_of,
    state_shapes,
    state_tensors,
    stored_tensor,
    value_of,
)
from fedaudit.wire.codec.packing import Blob
from fedaudit.wire.release import Sent

SERVER = "server"
SUM = "sum"  # who "sent" what the server computed from masked vectors
ACTIVE = "active-server"
LARGE = 1 << 18  # bytes from which a message is written in the background: below, the hand-over costs as much
BEHIND = 16  # the most messages that may wait to be written
ROOM = 1 << 28  # the most bytes that they may have together, if there is more than one
PACK = re.compile(r"([0-9]{6,})\.(?:weights|content)\.pack")  # the names of packs: no other file is touched


def party(k: int) -> str:
    return f"client {k}"


# --- writing ---------------------------------------------------------------------------------------------------


class TranscriptWriter:
    """Appends messages and events to a transcript. A run has one writer."""

    def __init__(
        self, folder: Path, *, keep_weights: int, offset: int = 0, last_round: int = 0, seq: int = 0, clock: float = 0.0
    ):
        """Open a transcript and continue after `offset` bytes of index and round `last_round`.

        Anything beyond belongs to an unfinished round and is deleted.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.keep_weights = folder, keep_weights
        self.started = time.time() - clock
        index = folder / "index.jsonl"
        if index.is_symlink():
            raise TranscriptError(f"{index} is a symbolic link, which is not written to. Choose another folder.")
        if offset > (index.stat().st_size if index.exists() else 0):
            raise TranscriptError(
                f"{index} is missing or cut off: the run cannot go on. Start it anew in another folder."
            )
        self._index = open(index, "r+b" if index.exists() else "w+b")  # noqa: SIM115 (closed by close())
        self._index.truncate(offset)
        self._index.seek(offset)
        for pack in folder.iterdir():
            name = PACK.fullmatch(pack.name)
            if name and int(name[1]) > last_round and pack.is_file() and not pack.is_symlink():
                pack.unlink()
        self.seq, self._t = seq, last_round
        self._packs: dict[str, Any] = {}
        self._stored: dict[tuple[str, str], tuple[int, int]] = {}
        self._broadcast: tuple[Blob, list[Any]] | None = None  # the message that went down last, and its tensors
        self._behind = ThreadPoolExecutor(1, "transcript")
        self._digests = ThreadPoolExecutor(1, "digests")  # nobody who waits for one waits for writes before it
        self._pending: deque[tuple[Future[Any], int]] = deque()  # and how many bytes it is
        self._failed: BaseException | None = None  # the first write that failed: after it, no round can end

    def clock(self) -> float:
        """Return the seconds since the run began, without breaks before resumptions. An outsider can measure them."""
        return round(time.time() - self.started, 4)

    def begin_round(self, t: int) -> None:
        self._in_order(functools.partial(setattr, self, "_t", t), 0)

    def message(self, blob: Blob, head: Header, base: Header | None = None, **facts: Any) -> None:
        """Record one message. `facts` are round, ask, fn, from, to, direction, fields, ...

        `base` is the header of the message that this one answers, which was recorded just before. A compressed state
        is a change of a state in that message.
        """
        self._in_order(functools.partial(self._message, blob, head, base, {**self._next(), **facts}), len(blob))

    def event(self, **facts: Any) -> None:
        self._in_order(functools.partial(self._append, {**self._next(), "type": "event", **facts}), 0)

    def prepare(self, head: Header) -> Future[Any] | None:
        """Have the digest of a message on another device computed while its receiver works. Return what to wait for."""
        return self._digests.submit(getattr, head, "digest") if head.costly else None

    def _next(self) -> dict[str, Any]:
        self.seq += 1
        return {"seq": self.seq - 1, "at": self.clock()}

    def _in_order(self, write: Callable[[], None], size: int) -> None:
        """Write now, or after the writes that are waiting. The error of a failed write is raised at the next one."""
        self._make_room(size)
        if size < LARGE and not self._pending:
            write()
        else:
            self._later(write, size)

    def _make_room(self, size: int) -> None:
        while self._pending:
            ahead = sum(of_one for _, of_one in self._pending)
            if not self._pending[0][0].done() and len(self._pending) < BEHIND and ahead + size <= ROOM:
                break
            self._pending.popleft()[0].result()

    def _later(self, write: Callable[[], Any], size: int) -> Future[Any]:
        done = self._behind.submit(self._unless_failed, write)
        self._pending.append((done, size))
        return done

    def _unless_failed(self, write: Callable[[], Any]) -> Any:
        if self._failed is not None:
            raise self._failed
        try:
            return write()
        except BaseException as e:
            self._failed = e
            raise

    def settle(self) -> None:
        """Wait until everything that was recorded is written."""
        while self._pending:
            self._pending.popleft()[0].result()

    def _message(self, blob: Blob, head: Header, base: Header | None, facts: dict[str, Any]) -> None:
        weights = state_tensors(head.tree)
        if any(sent.get("role") == "masked" for sent in facts.get("fields", {}).values()):
            weights = set(range(len(head.tensors)))  # as large as model states, and as soon dropped
        before = self._broadcast
        if self._broadcast is not None and self._broadcast[0] is blob:
            tensors = self._broadcast[1]  # the same message went to another client of this ask
        else:
            tensors, content = [], content_of(blob, head)
            for i in range(len(head.tensors)):
                dtype, shape, begin, end = head.tensors[i]
                pack = "weights" if i in weights else "content"
                digest, offset = self._store(content(i), pack, known_content(blob, i))
                tensors.append([dtype, list(shape), pack, offset, end - begin, digest])
        if facts.get("direction") == "down":
            self._broadcast = blob, tensors
        row = {"type": "message", **facts, "tree": head.tree, "tensors": tensors, "digest": head.digest}
        if base is not None and before is not None and (fields := bases_of(head.tree)):
            row["base"] = {field: moved(node_of(base.tree, field), len(tensors)) for field in fields}
            row["tensors"] = [*tensors, *before[1]]
        self._append(row)

    def end_round(self, t: int) -> int:
        """Sync, drop states that are not kept, and return the index's length: the point to resume from."""
        end = self.end_round_behind(t)
        self.settle()
        return end.result()

    def end_round_behind(self, t: int) -> Future[int]:
        """End a round like `end_round`, but in the background. Return a future of the index's length."""
        self.event(event="round", round=t)
        return self._later(functools.partial(self._end, t), 0)

    def _end(self, t: int) -> int:
        for file in (*self._packs.values(), self._index):
            file.flush()
            os.fsync(file.fileno())
        for file in self._packs.values():
            file.close()
        self._packs.clear()
        self._stored.clear()
        self._broadcast = None
        if (old := t - self.keep_weights) > 0:
            (self.folder / f"{old:06d}.weights.pack").unlink(missing_ok=True)
        return self._index.tell()

    def close(self) -> None:
        self._digests.shutdown()
        self._behind.shutdown()  # waits for all writes
        for file in (*self._packs.values(), self._index):
            file.close()
        self._packs.clear()

    def _store(self, data: memoryview, pack: str, digest: str | None = None) -> tuple[str, int]:
        digest = digest or xxhash.xxh3_128_hexdigest(data)
        key = (pack, digest)
        if key not in self._stored:
            if pack not in self._packs:
                path = self.folder / f"{self._t:06d}.{pack}.pack"
                if path.is_symlink():
                    path.unlink()  # the link, not what it points at
                self._packs[pack] = open(path, "wb")  # noqa: SIM115
            file = self._packs[pack]
            self._stored[key] = (file.tell(), len(data))
            file.write(data)
        return digest, self._stored[key][0]

    def _append(self, row: dict[str, Any]) -> None:
        for file in self._packs.values():
            file.flush()
        text = json.dumps(row, separators=(",", ":"), sort_keys=True).encode()
        self._index.write(xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n")
        self._index.flush()


# --- reading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TranscriptEntry:
    """One message of the transcript. `entry["field"]` decodes that field, in fresh memory."""

    row: dict[str, Any]
    folder: Path
    readable: bool = True

    @property
    def seq(self) -> int:
        return self.row["seq"]

    @property
    def at(self) -> float:
        """Return the seconds since the run's start."""
        return self.row["at"]

    @property
    def round(self) -> int:
        return self.row["round"]

    @property
    def sender(self) -> str:
        return self.row["from"]

    @property
    def receiver(self) -> str:
        return self.row["to"]

    @property
    def client(self) -> int:
        return self.row["client"]

    @property
    def direction(self) -> str:
        return self.row["direction"]

    @property
    def bytes(self) -> int:
        return self.row["bytes"]

    @property
    def message(self) -> str:
        return self._visible("message")

    @property
    def ask(self) -> int:
        return self._visible("ask")

    @property
    def fn(self) -> str:
        """Return the name of the method's function that the message was sent to, or came from."""
        return self._visible("fn")

    @property
    def digest(self) -> str:
        """Return the digest of the whole content."""
        return self._visible("digest")

    @cached_property
    def fields(self) -> dict[str, Sent]:
        """Return for each field its payload, buffers and wire bytes, role, kind, via, unit and protection."""
        try:
            return {name: Sent(**facts) for name, facts in self._visible("fields").items()}
        except (ValidationError, TypeError) as e:
            raise TranscriptError(f"{self._where()}: its fields are damaged: {str(e)[:200]}.") from e

    @property
    def class_id(self) -> str:
        """Return the class of the message, as the codec names it."""
        return class_of(self._visible("tree"))

    def kinds(self) -> set[str]:
        return {f["kind"] for f in self._visible("fields").values() if f.get("kind")}

    def __getitem__(self, field: str) -> Any:
        tree = self._visible("tree")
        if field not in names_of(tree):
            raise TranscriptError(f"{self.message} has no field {field!r}; it has {', '.join(names_of(tree))}.")
        return self._value(node_of(tree, field), plain=True)

    def record(self) -> Any:
        """Return the whole message, as an instance of its class."""
        return self._value(self._visible("tree"), plain=False)

    def state_shapes(self, field: str) -> dict[str, tuple[int, ...]] | None:
        """Return names and shapes if the field is one model state, else None. This reads no tensors."""
        return state_shapes(node_of(self._visible("tree"), field), lambda i: self.row["tensors"][i][1])

    def kept(self, field: str) -> bool:
        """Return whether the content is still there. Model states are kept for the last rounds only."""
        sent = self._visible("fields").get(field, {})
        stored = sent.get("role") == "masked" or state_tensors(node_of(self._visible("tree"), field))
        return not stored or (self.folder / f"{self.round:06d}.weights.pack").exists()

    def _value(self, node: Any, plain: bool) -> Any:
        try:
            return value_of(node, self._tensor, plain=plain, base=self._base)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, RuntimeError) as e:
            raise TranscriptError(f"{self._where()} does not hold a message: {str(e)[:200]}.") from e

    def _base(self, field: str) -> Any:
        """Return the value that the client received in a field of the message that this one answers."""
        return value_of(self.row["base"][field], self._tensor)

    def _where(self) -> str:
        return f"{self.folder / 'index.jsonl'}, row {self.row.get('seq')}"

    def _visible(self, key: str) -> Any:
        if not self.readable:
            raise ThreatError(f"An outsider sees a message's time and size, not its {key}. Use another threat.")
        return self.row[key]

    def _tensor(self, i: int) -> Tensor:
        try:
            dtype, shape, pack, offset, size, digest = self.row["tensors"][i]
            if pack not in ("weights", "content") or not all(type(n) is int and n >= 0 for n in (offset, size)):
                raise ValueError(f"{str(pack)[:40]!r} at {str(offset)[:20]}")
            check_size(dtype, shape, size)
        except (ValueError, TypeError, IndexError, OverflowError) as e:
            raise TranscriptError(f"{self._where()}: its tensor {i} is damaged: {e}.") from e
        path = self.folder / f"{self.round:06d}.{pack}.pack"
        if not path.exists():
            raise TranscriptError(
                f"{self.message} of round {self.round}: its model states were not kept. Run with a larger keep_weights."
            )
        with open(path, "rb") as file:
            if offset + size > os.fstat(file.fileno()).st_size:
                raise TranscriptError(f"{path} is cut off: it does not reach byte {offset + size}.")
            file.seek(offset)
            data = bytearray(file.read(size))
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise TranscriptError(f"{path} is damaged at byte {offset}: the checksum does not match.")
        return stored_tensor(dtype, shape, data)


_PLACE = {"seq": int, "at": float, "round": int, "from": str, "to": str, "client": int, "direction": str, "bytes": int}
_MESSAGE = {"message": str, "ask": int, "fn": str, "digest": str, "fields": dict, "tree": dict, "tensors": list}


CONTENT = ("message", "sum")  # rows with content: what crossed the wire, and what the server computed from it


def _row(text: bytes, where: str) -> dict[str, Any]:
    """Return a row of the index. Raise if anything is missing that its readers rely on."""
    try:
        row = json.loads(text)
        wanted = {"type": str} | (_PLACE | _MESSAGE if row.get("type") in CONTENT else {})
        for key, kind in wanted.items():
            fits = isinstance(row[key], int | float) if kind is float else isinstance(row[key], kind)
            if not fits or (isinstance(row[key], bool) and kind is not bool):
                raise ValueError(f"{key} is a {type(row[key]).__name__}")
        if row["type"] in CONTENT:
            names = names_of(row["tree"])
            if not all(isinstance(row["fields"].get(name, {}), dict) for name in (*names, *row["fields"])):
                raise ValueError("its fields are not tables")
            if any(not isinstance(f.get("kind"), str | None) for f in row["fields"].values()):
                raise ValueError("a kind is not a text")
            state_tensors(row["tree"])
        return row
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as e:
        raise TranscriptError(f"{where} is not a row of a transcript: {type(e).__name__} {str(e)[:200]}.") from e


class Transcript:
    """Reads a transcript. It may still be in writing, or be cut off."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        if not (self.folder / "index.jsonl").exists():
            raise TranscriptError(
                f"{self.folder} holds no transcript (index.jsonl is missing). Give the folder of a run's transcript."
            )

    def rows(self) -> Iterator[dict[str, Any]]:
        with open(self.folder / "index.jsonl", "rb") as file:
            for number, line in enumerate(file, 1):
                digest, _, text = line.rstrip(b"\n").partition(b" ")
                if line.endswith(b"\n") and xxhash.xxh3_64_hexdigest(text).encode() == digest:
                    yield _row(text, f"{file.name}, line {number}")
                elif not file.read(1):
                    return  # the last row is being written, or was cut off by a kill
                else:
                    raise TranscriptError(f"{file.name}, line {number} is damaged: the checksum does not match.")

    def digest(self, rounds: int) -> str:
        """Return a digest over all messages of the first `rounds` rounds, in order. A run's record holds the same."""
        whole, sent = "", []
        for row in self.rows():
            if row["type"] == "message":
                sent.append(f"{row['direction']} {row['client']} {row['digest']}")
            elif row.get("event") == "round" and row.get("round") != 0:
                if row.get("round") == rounds:
                    return xxhash.xxh3_128_hexdigest((whole + "".join(sent)).encode())
                whole, sent = xxhash.xxh3_128_hexdigest((whole + "".join(sent)).encode()), []
        return whole

    def entries(self) -> Iterator[TranscriptEntry]:
        return (TranscriptEntry(row, self.folder) for row in self.rows() if row["type"] == "message")

    def sums(self) -> Iterator[TranscriptEntry]:
        """Yield the sums that the server computed from masked vectors. They did not cross the wire."""
        return (TranscriptEntry(row, self.folder) for row in self.rows() if row["type"] == "sum")

    def events(self) -> Iterator[dict[str, Any]]:
        return (row for row in self.rows() if row["type"] == "event")

    def view(self, threat: str) -> TranscriptView:
        return TranscriptView(self, Threat.parse(threat))


@dataclass(frozen=True)
class Threat:
    """The kind of attacker: `server` (honest but curious), `active-server`, which may send clients messages of its own,
    `peer:k`, or `outsider`."""

    name: str
    peer: int | None = None

    @classmethod
    def parse(cls, text: str) -> Threat:
        if text in ("server", ACTIVE, "outsider"):
            return cls(text)
        kind, _, k = text.partition(":")
        if kind == "peer" and k.isascii() and k.isdigit() and len(k) < 10:
            return cls("peer", int(k))
        raise ThreatError(
            f"Unknown threat {text!r}. Choose from server, {ACTIVE}, peer:k (k is a client's number), outsider."
        )

    def __str__(self) -> str:
        return self.name if self.peer is None else f"{self.name}:{self.peer}"


class TranscriptView:
    """The part of a transcript that one threat may read.

    The server sees everything, a peer its own messages, an outsider only sizes and times.
    """

    def __init__(self, transcript: Transcript, threat: Threat):
        self._transcript, self.threat = transcript, threat

    @cached_property
    def _entries(self) -> list[TranscriptEntry]:
        """Return the visible entries. They are read once: attacks on many clients search them again and again."""
        entries = (e for e in self._transcript.entries() if self.threat.peer in (None, e.client))
        if self.threat.name != "outsider":
            return list(entries)
        seen = ("seq", "at", "round", "from", "to", "client", "direction", "bytes")
        return [TranscriptEntry({key: e.row[key] for key in seen}, Path(), readable=False) for e in entries]

    @cached_property
    def _sums(self) -> list[TranscriptEntry]:
        """Return what a server knows of each client's masked reply: the sum that it is in, in that reply's place."""
        if self.threat.name not in (SERVER, ACTIVE):
            return []
        return [
            TranscriptEntry({**entry.row, "client": k}, entry.folder)
            for entry in self._transcript.sums()
            for k in entry.row.get("clients", ())
        ]

    @cached_property
    def _by_client(self) -> dict[int, list[TranscriptEntry]]:
        by: dict[int, list[TranscriptEntry]] = {}
        for entry in self._entries:
            by.setdefault(entry.client, []).append(entry)
        return by

    def entries(
        self, *, direction: str | None = None, kind: str | None = None, client: int | None = None, t: int | None = None
    ) -> Iterator[TranscriptEntry]:
        """Yield entries. Who asks for a kind gets sums as well, where secure aggregation hides the replies in them."""
        found = self._entries if client is None else self._by_client.get(client, ())
        summed = [] if kind is None else [e for e in self._sums if client in (None, e.client)]
        for entry in (*found, *summed):
            if direction is not None and entry.direction != direction:
                continue
            if t is not None and entry.round != t:
                continue
            if kind is not None and (not entry.readable or kind not in entry.kinds()):
                continue
            yield entry

    @cached_property
    def kinds(self) -> set[str]:
        """Return the kinds of release that this threat can read at all."""
        if self.threat.name == "outsider":
            return set()
        return {kind for entry in (*self.entries(), *self._sums) for kind in entry.kinds()}
