"""The engine of `--isolate` runs each client's task in a process of its own, which holds that client's records only.

The server's rounds run in a process that holds no records. The numbers are those of the serial engine, to the bit. The
process of the run itself keeps the data, hands each party what it may hold, carries what crosses the wire, and
evaluates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedaudit.errors import RunError
from fedaudit.runtime.engines.losses import TRIES, lost_too_often
from fedaudit.runtime.isolated_worker import Frame, Stream, done_of, error_of, receive, send, without_data
from fedaudit.runtime.nursery import Nursery
from fedaudit.runtime.site import Rows
from fedaudit.runtime.task import Done, Task, run_task
from fedaudit.runtime.world import World, world_of
from fedaudit.setting import Setting
from fedaudit.wire.codec import encode_tree
from fedaudit.wire.message import KINDS

# Name, messages, and for a mean its weights: replies (a mean is one), who is left, and how many are in a mean.
Answers = Callable[[str, Mapping[int, bytes], Mapping[str, Any] | None], tuple[dict[int, bytes], list[int], int]]


class IsolatedEngine:
    in_process = False

    def __init__(self, setting: Setting):
        self._setting = setting
        self._scratch = Path(tempfile.mkdtemp(prefix="fedaudit-"))
        self._nursery: Nursery | None = None

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        return map(self._client, tasks)

    def server(self, what: str, t: int, state: bytes | None, ids: list[int], answers: Answers) -> Frame:
        """Carry out `init` or one `round` in a process without records; `answers` answers what it asks. Return its last
        frame."""
        world = world_of(self._setting.model_dump_json())
        said = {"what": what, "t": t, "ids": ids, "facts": facts_of(world, None)}
        with self._party(said, [*([state] if state is not None else []), encoded_rows(world)], world) as file:
            while True:
                back, blobs = self._heard(file, f"The server's {what}")
                if "error" in back:
                    raise error_of(back["error"])
                if "ask" not in back:
                    return back, blobs
                try:
                    messages = {int(k): blobs[i] for k, i in back["to"]}
                except (ValueError, IndexError, TypeError) as e:
                    raise RunError(f"The server's process asked for something that is not a valid ask ({e}).") from None
                replies, left, count = answers(str(back["ask"]), messages, back.get("mean"))
                send(file, {"replied": list(replies), "left": left, "count": count}, list(replies.values()))

    def _client(self, task: Task) -> Done:
        if task.drop:
            return run_task(task)
        world = world_of(task.setting)
        said = {
            "what": "task",
            "task": plain_task(task),
            "facts": facts_of(world, task.k, task.t),
            "terms": None if task.terms is None else dataclasses.asdict(task.terms),
        }
        own = {"own": world.members(task.k), "validation": world.validation(task.k)}
        blobs = [bytes(task.message), bytes(task.state or b""), task.noise, encoded_rows(world, task.k, own)]
        for losses in range(TRIES):
            try:
                with self._party(said, blobs, world) as file:
                    return dataclasses.replace(done_of(receive(file), task.k), redone=losses)
            except (EOFError, OSError) as e:
                why = "its process ended before it answered" + (f" ({e})" if str(e) else "")
        raise lost_too_often(task, why, "Make room, and go on with --resume.")

    @contextlib.contextmanager
    def _party(self, said: Mapping[str, Any], blobs: list[bytes], world: World) -> Iterator[Stream]:
        """Start a process for one party and tell it what it may hold; its folder is removed when it ends."""
        if self._nursery is None or self._nursery.spent:
            self._stop()
            preload = ["opacus"] if self._setting.privacy else []  # for DP-SGD and ledgers
            self._nursery = Nursery(self._setting.method, self._scratch, preload)
        folder = tempfile.mkdtemp(dir=self._scratch)
        ours, theirs = socket.socketpair()
        try:
            with ours, ours.makefile("rwb") as file:
                self._nursery.hand_over(theirs)
                setting = without_data(world.setting).model_dump_json()
                send(file, {**said, "setting": setting, "folder": folder}, blobs)
                yield file
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _heard(self, file: Stream, who: str) -> Frame:
        try:
            return receive(file)
        except (EOFError, OSError):
            raise RunError(f"{who} ended without an answer: its process is gone. Go on with --resume.") from None

    def _stop(self) -> None:
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self._scratch, ignore_errors=True)


def facts_of(world: World, k: int | None, t: int = 0) -> dict[str, Any]:
    """Return what a party knows of the run beside its setting, as plain values."""
    facts: dict[str, Any] = {
        "shape": list(world.shape),
        "tokens": world.shape.tokens,
        "classes": world.classes,
        "public_labelled": world.public_labelled,
    }
    if k is not None:
        facts |= {"k": k, "t": t, "count": world.count(k), "releases": _releases(world), "absent": _absent(world, t)}
        people = world.people(k)
        facts["people"] = None if people is None else people.tolist()
    return facts


@functools.lru_cache(maxsize=2)
def _releases(world: World) -> dict[str, int | None]:
    return {kind: world.releases(kind) for kind in sorted(KINDS)} if world.policies else {}


def _absent(world: World, t: int) -> list[str]:
    return sorted(world.absent(t)) if world.policies else []


def plain_task(task: Task) -> dict[str, Any]:
    """Return what JSON can say of a task."""
    return {name: getattr(task, name) for name in ("fn", "k", "t", "ask", "attempt", "followed")}


def encoded_rows(world: World, k: int = -1, own: Mapping[str, Rows] | None = None, public: bool = True) -> bytes:
    """Return the records that a party holds: a client's own, and the public set."""
    rows: dict[str, Any] = {"public": list(world.public())} if public and world.has_public else {}
    rows |= {f"{name} {k}": list(of) for name, of in (own or {}).items()}
    return encode_tree(rows, finite=False)
