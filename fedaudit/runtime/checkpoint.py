"""The store in which a run keeps its state between rounds, and the one point at which a round is committed.

A client's new state is a new file. `HEAD.json` names the files that count. It is replaced atomically after a round, so
a kill at any instant leaves the last whole round. Memory does not grow with the number of clients.

Large tensors in a client's memory are files of their own, named by their content, and the state refers to them. A
buffer that all clients hold is stored once, and a tensor that a task did not change is not written again. A client's
model changes with each training, and stays in the state's own file. What a client has frozen is fetched from its
device once, when its file is written. It is not read with the state: it is taken from another state of this process
that holds it, or mapped from its file.

Files are written in the background, in the order in which they were put here, and so is `HEAD.json`: the next round
goes on meanwhile. If a write fails, the next call of the store raises the error, and no later round is committed. A
state that was held (see `wire.codec.packing`) is given back as it is while there is room for it on its device. It is
written when the round is committed, so a state that a later ask of the round replaces is never written.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from fedaudit.errors import RunError
from fedaudit.wire.codec import held_again, node_of, tensors_in, tree_of
from fedaudit.wire.codec.packing import LARGE, Apart, Blob, Held, raw

BEHIND = 8  # files that may be on their way to the disk at a time
ROOM = 1 << 28  # bytes that several such files may have together
STAYS = 1 << 30  # bytes of states that stay on their device, if its free memory is unknown
STAYS_HERE = 1 << 24  # the same for main memory, which must not grow with the number of clients
_PARTS = b"fedaudit parts 1\n"  # the first bytes of a state that refers to files of large tensors
# The names of the files that a store writes: it removes no other.
OWN = re.compile(r"client-[0-9]{6,}\.[0-9]+\.[0-9]+|server\.[0-9]+|part-[0-9a-f]{32}|\.HEAD\.json\.tmp")


def room_for_states(device: torch.device) -> int:
    """Return how many bytes of clients' states may stay on a device."""
    return torch.cuda.get_device_properties(device).total_memory // 16 if device.type == "cuda" else STAYS_HERE


def write_atomic(path: Path, data: bytes | Sequence[Any]) -> None:
    """Write a file beside `path`, sync it and rename it: readers see the old content or the new, never a part.

    `data` may come in pieces.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with _opened(temporary) as file:
        pieces: Sequence[Any] = [data] if isinstance(data, bytes) else data
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _opened(path: Path) -> BinaryIO:
    """Open a file to be written anew. A link of that name is removed, not followed; a missing folder is made."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o666))
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        path.unlink()
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o666))


@dataclass(frozen=True)
class _Pending:
    """A piece of work under way in the background, and the client state that it writes, if it writes one."""

    done: Future[None]
    size: int = 0
    state: Blob = b""


class _Taken:
    """Counts the bytes that states take on their device. What is frozen lies there once, for all that hold it."""

    def __init__(self) -> None:
        self.bytes = 0
        self._holders: Counter[int] = Counter()  # by the identity of a frozen content: how many states hold it

    def more(self, state: Held) -> int:
        """Return how many bytes more it would be with this state."""
        return state.alone + sum(size for key, size in state.shared.items() if not self._holders[key])

    def add(self, state: Held) -> None:
        self.bytes += self.more(state)
        self._holders.update(state.shared.keys())

    def remove(self, state: Held) -> None:
        self._holders -= Counter(state.shared.keys())  # without those that nobody holds any more
        self.bytes -= self.more(state)


class Store:
    def __init__(self, folder: Path, stays: int | None = None):
        """Open the store in `folder`. `stays` is how many bytes of states may stay on their device."""
        self.folder = folder
        self.clients: dict[int, str] = {}
        self._stays = STAYS if stays is None else stays
        # By client: the file of a state that stays on its device, and the state.
        self._held: dict[int, tuple[str, Held]] = {}
        self._taken = _Taken()  # by those
        self._unwritten: set[int] = set()  # those of them whose file is not written yet
        self._head = folder / "HEAD.json"
        self._behind = ThreadPoolExecutor(1, "checkpoint")
        self._pending: dict[str, _Pending] = {}  # by name, in order: the work under way in the background
        self._failed: BaseException | None = None  # the first write that failed: nothing is committed after it
        self._last: dict[str, Any] | None = None  # the head as it was written last
        self._compared: dict[str, tuple[int, int]] = {}  # parts whose content was compared with their digest
        # These three belong to the thread that writes:
        self._parts: dict[str, list[str]] = {}  # by file of a state: the files that it refers to
        self._fresh: set[str] = set()  # parts that were written since the last whole round
        self._whole_parts: dict[str, int] = {}  # frozen parts that lie there, and their sizes

    def head(self) -> dict[str, Any] | None:
        """Return the facts of the last whole round, or None, and remove everything after it."""
        head = self.peek()
        if head is not None:
            self._sweep(head["server"], self.clients)
        return head

    def peek(self) -> dict[str, Any] | None:
        """Return the facts of the last whole round, or None. This changes nothing on disk: it is for readers beside a
        run."""
        if not self._head.exists():
            return None
        try:
            head = _checked(json.loads(self._head.read_text()))
            self.clients = {int(k): name for k, name in head["clients"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as e:
            raise RunError(f"{self._head} is damaged ({e}). Start the run anew in another folder.") from e
        return head

    def server(self, name: str) -> bytes:
        return self._read(name)

    def client(self, k: int) -> Blob | None:
        """Return client k's last state; None if it was never asked."""
        if k in self._held and self._held[k][0] == self.clients.get(k):
            return self._held[k][1]
        return self._whole(self.clients[k]) if k in self.clients else None

    def put_client(self, k: int, t: int, ask: int, state: Blob) -> None:
        """Keep client k's state after an ask. It counts for the rest of the round; a kill undoes it."""
        name = f"client-{k:06d}.{t}.{ask}"
        before, self.clients[k] = self.clients.get(k, name), name
        written = k not in self._unwritten
        self._unwritten.discard(k)
        if k in self._held:
            self._taken.remove(self._held.pop(k)[1])
        if isinstance(state, Held) and self._taken.bytes + self._taken.more(state) <= self._stays:
            self._taken.add(state)
            self._held[k] = name, state
            self._unwritten.add(k)
        else:
            self._later(name, lambda: self._put(name, state), len(state), state)
        if before != name and before.split(".")[1] == str(t) and written:  # from an earlier ask of this round: nobody
            self._later(f"without {before}", lambda: self._remove(before))  # goes back to it

    def _put(self, name: str, state: Blob) -> None:
        """Write a state, and the files that it refers to."""
        inside = _remembered(state)
        apart = {i for i, _, _ in inside}
        home = state.at_home(apart) if isinstance(state, Held) else []
        pieces: list[list[Any]] = []
        at = 0
        for i, begin, end in inside:
            if isinstance(state, Held) and i in state.frozen:
                part = self._keep_frozen(state, i)
            elif isinstance(state, Held):
                part = self._keep(raw(home[i]), state.content(i))
            else:
                part = self._keep(state[begin:end])
            # First so many bytes of the state's own, then the content of that file.
            pieces.append([begin - at, end - begin, part])
            at = end
        self._parts[name] = [part for *_, part in pieces]
        table = json.dumps(pieces).encode()
        before_own = [_PARTS, len(table).to_bytes(8, "little"), table] if pieces else []
        if isinstance(state, Held):
            self._write(name, [*before_own, *(piece for _, piece in state.pieces(home, apart))])
        else:
            self._write(name, [*before_own, _without(state, pieces)] if pieces else [state])

    def _keep(self, content: Any, digest: str | None = None) -> str:
        """Return the name of a file with this content; write the file if there is none yet."""
        name = f"part-{digest or xxhash.xxh3_128_hexdigest(content)}"
        if not self._is_whole(name, len(content)):
            (self.folder / name).unlink(missing_ok=True)  # never written over: somebody may have it mapped
            self._write(name, [content])
            self._fresh.add(name)
        return name

    def _keep_frozen(self, state: Held, i: int) -> str:
        """Return the name of a file with a frozen tensor, which leaves its device only if there is no file yet."""
        name, size = f"part-{state.frozen[i].digest}", state.frozen[i].of.nbytes
        if self._whole_parts.get(name) != size:
            if not self._is_whole(name, size):
                self._keep(raw(state.home_of(i)), state.frozen[i].digest)
            self._whole_parts[name] = size
        return name

    def _is_whole(self, name: str, size: int) -> bool:
        """Return whether a file is there with all its bytes. After a kill in the middle of writing it has fewer."""
        path = self.folder / name
        return path.exists() and path.stat().st_size == size

    def _remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)
        self._parts.pop(name, None)

    def _whole(self, name: str) -> Blob:
        """Return a state with the tensors that it refers to put back in their places. Frozen ones are not read."""
        if name in self._pending:
            return self._pending[name].state  # it may not be on the disk yet
        blob = self._read(name)
        if not blob.startswith(_PARTS):
            return blob
        pieces, own = _split(blob)
        apart, at = [], 0
        for before, size, part in pieces:
            begin, at = at + before, at + before + size
            ways = partial(self._read_part, part, size), partial(self._mapped, part, size)
            apart.append(Apart(begin, at, part.removeprefix("part-"), *ways))
        return held_again(own, apart)

    def _read_part(self, name: str, size: int) -> bytes:
        content = self._read(name)
        if len(content) != size:
            raise _damaged(name, f"it has {len(content)} bytes, and {size} were written")
        return content

    def _mapped(self, name: str, size: int) -> Tensor:
        """Return the bytes of a part. They come into memory when somebody looks at them.

        All of them are compared with the digest in the file's name when the file is mapped for the first time. Who
        changes them changes a copy, not the file. A file that is swept away stays readable as long as it is mapped.
        """
        path = self.folder / name
        try:
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size != size:
                    raise _damaged(name, f"it has {found.st_size} bytes, and {size} were written")
                if self._compared.get(name) != (stamp := (found.st_ino, found.st_mtime_ns)):
                    if name != f"part-{_digest_in(file)}":
                        raise _damaged(name, "its content is not the one that was written")
                    self._compared[name] = stamp
            return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        except (OSError, RuntimeError) as e:
            raise _missing(name, e) from e

    def commit(self, t: int, server_state: Blob, facts: Mapping[str, Any]) -> None:
        """Commit round t."""
        self.commit_behind(t, server_state, lambda: facts)
        self.settle()

    def commit_behind(
        self,
        t: int,
        server_state: Blob,
        facts: Callable[[], Mapping[str, Any]],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Commit round t while the next one goes on, then call `then`. `facts` may wait for something."""
        name, clients = f"server.{t}", dict(self.clients)
        unwritten = [self._held[k] for k in sorted(self._unwritten)]
        self._unwritten.clear()

        def make_a_fact() -> None:
            for file, state in unwritten:
                self._put(file, state)
            self._write(name, _pieces(server_state))
            for file in (name, *sorted(self._fresh), *(n for n in clients.values() if n.split(".")[1] == str(t))):
                with open(self.folder / file, "rb") as handle:
                    os.fsync(handle.fileno())
            head = {"round": t, "server": name, "clients": {str(k): v for k, v in clients.items()}, **facts()}
            self._write_head(head)
            self._fresh.clear()
            self._sweep(name, clients)
            then()

        self._later(self._head.name, make_a_fact, len(server_state))

    def amend(self, **facts: Any) -> None:
        """Change facts of the last whole round, and leave the round as it is."""
        self.settle()
        self._write_head({**(self._last or self.peek() or {}), **facts})

    def _write_head(self, head: dict[str, Any]) -> None:
        write_atomic(self._head, _json_of(head).encode())
        self._last = head

    def settle(self) -> None:
        """Wait until everything that was put here is written; raise the error of a write that failed."""
        for name in list(self._pending):
            self._wait(name)

    def abandon(self) -> None:
        """Wait until nothing is being written any more. For a run that ends by an error: errors of writing are not
        raised."""
        for name in list(self._pending):
            with suppress(Exception):
                self._wait(name)

    def _wait(self, name: str) -> None:
        if name in self._pending:
            self._pending.pop(name).done.result()

    def behind(self, name: str, work: Callable[[], None]) -> None:
        """Write something else of the run in the background as well: it is there after `settle`."""
        self._later(name, work)

    def _later(self, name: str, work: Callable[[], object], size: int = 0, state: Blob = b"") -> None:
        """Do some work while the run goes on. What waits is bounded, so that memory does not grow with the number of
        clients."""
        while self._pending and not self._has_room(size):
            self._wait(next(iter(self._pending)))
        self._wait(name)
        self._pending[name] = _Pending(self._behind.submit(self._unless_failed, work), size, state)

    def _has_room(self, size: int) -> bool:
        ahead = sum(pending.size for pending in self._pending.values())
        return len(self._pending) < BEHIND and ahead + size <= ROOM

    def _unless_failed(self, work: Callable[[], object]) -> None:
        if self._failed is not None:
            raise self._failed
        try:
            work()
        except BaseException as e:
            self._failed = e
            raise

    def _write(self, name: str, content: Sequence[Any]) -> None:
        with _opened(self.folder / name) as file:
            for piece in content:
                file.write(piece)

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as e:
            raise _missing(name, e) from e

    def _sweep(self, server: str, clients: Mapping[int, str]) -> None:
        """Remove the files that do not count any more."""
        wanted = {server, self._head.name, *clients.values()}
        for name in clients.values():
            wanted.update(self._referred(name))
        self._parts = {name: parts for name, parts in self._parts.items() if name in wanted}
        self._whole_parts = {name: size for name, size in self._whole_parts.items() if name in wanted}
        for name in [*self._compared]:  # a list: the thread that reads may add some meanwhile
            if name not in wanted:
                self._compared.pop(name, None)
        for file in self.folder.iterdir():
            if file.name not in wanted and OWN.fullmatch(file.name) and file.is_file() and not file.is_symlink():
                file.unlink()

    def _referred(self, name: str) -> list[str]:
        if name not in self._parts:
            blob = self._read(name)
            self._parts[name] = [part for *_, part in _split(blob)[0]] if blob.startswith(_PARTS) else []
        return self._parts[name]


def _missing(name: str, why: Exception) -> RunError:
    return RunError(f"The checkpoint misses {name}: {why}. Start the run anew in another folder.")


def _damaged(name: str, why: str) -> RunError:
    return RunError(f"{name} in the checkpoint is damaged: {why}. Start the run anew in another folder.")


def _digest_in(file: BinaryIO) -> str:
    h = xxhash.xxh3_128()
    while piece := file.read(1 << 20):
        h.update(piece)
    return h.hexdigest()


def _pieces(blob: Blob) -> list[Any]:
    return [piece for _, piece in blob.pieces(blob.at_home())] if isinstance(blob, Held) else [blob]


def _remembered(state: Blob) -> list[tuple[int, int, int]]:
    """Return the large tensors of a client's memory, in order: their numbers, and where they lie in its state."""
    tree, tensors = tree_of(state)
    spans = sorted((*tensors[i][2:], i) for i in tensors_in(node_of(tree, "memory")))
    return [(i, begin, end) for begin, end, i in spans if end - begin >= LARGE]


def _without(state: bytes, pieces: list[list[Any]]) -> bytes:
    """Return the state's own bytes: all but what lies in other files."""
    own, at = [], 0
    for before, length, _ in pieces:
        own.append(state[at : at + before])
        at += before + length
    return b"".join([*own, state[at:]])


def _split(blob: bytes) -> tuple[list[list[Any]], bytes]:
    begin = len(_PARTS) + 8
    length = int.from_bytes(blob[len(_PARTS) : begin], "little")
    try:
        pieces = json.loads(blob[begin : begin + length])
        for before, size, part in pieces:
            if not (type(before) is int and type(size) is int and min(before, size) >= 0 and OWN.fullmatch(part)):
                raise ValueError(f"no such part: {str(part)[:80]}")
    except (ValueError, TypeError, RecursionError) as e:
        raise RunError(f"A state in the checkpoint is damaged ({e}). Start the run anew in another folder.") from e
    return pieces, blob[begin + length :]


class Json(str):
    """A fact whose text is JSON already."""


def _json_of(head: Mapping[str, Any]) -> str:
    rows = (f"{json.dumps(key)}: {fact if isinstance(fact, Json) else json.dumps(fact)}" for key, fact in head.items())
    return "{" + ", ".join(rows) + "}"


def _checked(head: Any) -> dict[str, Any]:
    """Return the head if it is what `commit` writes and names nothing outside the folder; else raise ValueError."""
    if not isinstance(head, dict) or not isinstance(head["clients"], dict):
        raise ValueError("it is not a JSON object")
    for name in (head["server"], *head["clients"].values()):
        if not isinstance(name, str) or not OWN.fullmatch(name):
            raise ValueError(f"no such file: {str(name)[:80]}")
    for key in {"round", "transcript", "seq", "attempt"} & head.keys():
        if type(head[key]) is not int or head[key] < 0:
            raise ValueError(f"{key} is not a whole number")
    if not isinstance(head.get("clock", 0.0), int | float) or type(head["round"]) is not int:
        raise ValueError("clock or round is not a number")
    return head
