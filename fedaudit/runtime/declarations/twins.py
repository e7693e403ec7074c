"""The twins of a run: which clients have one, where twins live, what became of them.

Twins live in a process of their own, which was forked from one that has never seen a record. It is given the exchanged
records, and never those of a client, so nothing that a client's task leaves in its process reaches its twin. In a run
with `isolate` each task of a twin has a process for itself, as the client's task has.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.noise_key import derived
from fedaudit.runtime import nursery
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.declarations.twin_client import Answer, Difference, differences, exchanged, paid_fields
from fedaudit.runtime.engines.isolated import encoded_rows, facts_of, plain_task
from fedaudit.runtime.engines.losses import TRIES
from fedaudit.runtime.isolated_worker import Stream, done_of, receive, send, without_data
from fedaudit.runtime.run_record import TwinFacts
from fedaudit.runtime.site import Rows
from fedaudit.runtime.task import Done, Task
from fedaudit.runtime.world import World
from fedaudit.wire.codec.packing import Blob

SHARE = 0.15  # of the clients, at most, if the setting does not say how many: no twin takes longer than its client
FOLDER = "twins"  # in the run folder: states of twins, by client and round
LOG = "twins.log"  # in the run folder: both sides of each difference, for this machine alone
BACK = 2  # rounds that a resumed run may go back


def wanted(text: str, clients: int) -> int:
    """Return how many of so many clients have a twin, as a setting says it."""
    if text == "auto":
        return max(1, int(SHARE * clients))
    return {"all": clients, "off": 0}.get(text) if text in ("all", "off") else min(int(text), clients)  # type: ignore[return-value]


@dataclass
class Twins:
    """Follows the tasks of some clients of a run, which no method can know, and tells where a twin differs."""

    world: World
    folder: Path
    secret: bytes
    facts: TwinFacts
    sets: int = 1  # how many sets of other records a client is compared with; a test of declarations tries several
    broken: list[Difference] = field(default_factory=list)
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        self._states: dict[tuple[int, int], Blob] = {}  # by client, and number of the set of other records
        self._ended: set[int] = set()  # clients whose twin has differed, or is gone
        self._chosen: set[int] = set(self.facts.clients)
        self._share = 0.0  # of the clients; it is known with the first ask
        self._tasks: dict[int, Task] = {}
        self._hosts: dict[int, _Host] = {}  # by number of the set: what one holds, the others never see
        # Taken before any task runs: what tasks leave in the environment is not the twins' to find.
        self._around = {"environment": dict(os.environ), "path": list(sys.path), "folder": os.getcwd()}
        if self.on:
            nursery.nursery_of_twins()  # starts in the background, if it is not there yet

    @property
    def on(self) -> bool:
        return nursery.has_twins(self.world.policies, self.world.setting.twins)

    def choose(self, asked: Sequence[int], new: Sequence[int]) -> None:
        """Say which of the clients that are about to be asked have a twin. `new` are those that have no state yet.

        A twin begins with its client: one that began later would have to take over what its client remembers. Of the
        first clients that are asked, as many have a twin as the setting says. Of those that come later, as large a
        share has one, and at least one of an ask in which there is none.
        """
        if not self.on:
            return
        drawn = sorted(new, key=self._lot)
        if not self._share:
            count = wanted(self.world.setting.twins, len(asked))
            self._share = count / max(1, len(asked))
            self._chosen.update(drawn[:count])
        else:
            self._chosen.update(k for k in drawn if self._lot(k) < 2**64 * self._share)
        if not self._chosen & set(asked):
            self._chosen.update(drawn[:1])

    def _lot(self, k: int) -> int:
        return int.from_bytes(derived(self.secret, "twin", k)[:8], "little")

    def has(self, k: int) -> bool:
        """Return whether client k has a twin that goes on."""
        return k in self._chosen and k not in self._ended

    def ask(self, task: Task) -> Task:
        """Note a task that is about to be carried out, and return it."""
        if task.followed:
            self._tasks[task.k] = task
        return task

    def follow(self, done: Done) -> None:
        """Let the twin of a client do the task that its client has done, and compare what both answer."""
        task = self._tasks.pop(done.k, None)
        if task is None or done.lost or task.drop or done.fatal is not None:
            return
        if task.state is not None and self.world.setting.start is not None and task.k not in self.facts.clients:
            # another run's state, whose bill was taken over with it
            self._states |= {(task.k, number): task.state for number in range(self.sets)}
        if task.state is not None and (task.k, 0) not in self._states:
            self._ended.add(task.k)  # its states are gone: it cannot go on from where it was
            self.facts.lost += 1
            return
        begun = time.perf_counter()
        rows: list[Difference] = []
        for number in range(self.sets):
            twin, found = self._run(task, done, number)
            rows = differences(
                (task.k, task.t, task.ask, task.fn), task.message, Answer(done.reply, done.error),
                Answer(twin.reply, twin.error), found, paid_fields(done.entries),
            )  # fmt: skip
            if twin.state is not None and done.reply is not None:
                self._states[task.k, number] = twin.state
            if rows:
                break
        self._note(task.k, rows, twin)
        self.wall_s += time.perf_counter() - begun
        self.facts.wall_s = round(self.wall_s, 4)

    def _note(self, k: int, rows: Sequence[Difference], twin: Done) -> None:
        self.facts.clients = sorted({*self.facts.clients, k})
        self.facts.tasks += 1
        self.facts.held += not rows
        if rows:
            self._ended.add(k)
            self.broken += rows
            self.facts.differences += [f"{row.field}, in {row.fn} of round {row.round}, client {k}" for row in rows]
            with open(self.folder / LOG, "a") as file:
                file.write("".join(f"{row.text()}\n" for row in rows))
                file.write(f"{twin.detail}\n" if twin.detail else "")

    def entries(self) -> list[LedgerEntry]:
        """Return what each task costs from now on: all clients run the code whose replies follow the records."""
        return [self.broken[0].entry()] if self.broken else []

    # --- where they live ---

    def _run(self, task: Task, done: Done, number: int) -> tuple[Done, list[tuple[str, str]]]:
        isolated = self.world.setting.isolate
        for _ in range(TRIES):
            if isolated:
                self._close_host(number)
            if number not in self._hosts:
                self._hosts[number] = _Host(self.world, None if isolated else self._around)
            try:
                half = int.from_bytes(derived(self.secret, "half", task.k, task.t, task.ask)[:7], "little")
                rows, state = partial(self._rows, number), self._states.get((task.k, number))
                return self._hosts[number].run(task, done, state, rows, half)
            except (EOFError, OSError) as e:
                why = f"its process ended{f' ({e})' if str(e) else ''}"
                self._close_host(number)
        return Done(task.k, error=why, lost=True), []

    def _rows(self, number: int, k: int) -> dict[str, Rows]:
        """Return the records of the twin of client k in a set of other records, drawn from the run's secret."""
        world, others = self.world, self.world.federation.auxiliary()
        seed = int.from_bytes(derived(self.secret, "exchanged", k, number)[:8], "little") >> 1
        rng = torch.Generator().manual_seed(seed)
        mine = {"own": world.seen_members(k), "validation": world.held_out(k, "validation")}
        there = {name: (x.cpu(), y.cpu()) for name, (x, y) in mine.items()}
        twin = {name: exchanged(rows, others, world.classes, rng) for name, rows in there.items()}
        return {**twin, "other": exchanged(twin["own"], others, world.classes, rng)}  # for the twin's neighbours

    def _close_host(self, number: int) -> None:
        if (host := self._hosts.pop(number, None)) is not None:
            host.close()

    def close(self) -> None:
        for number in list(self._hosts):
            self._close_host(number)

    # --- from round to round ---

    def commit(self, t: int) -> None:
        """Keep the twins' states after round t. States of the last rounds stay, for a run that is resumed there."""
        if not self._states:
            return
        folder = self.folder / FOLDER
        folder.mkdir(exist_ok=True)
        for (k, number), state in self._states.items():
            if number == 0:  # a test of declarations, which has more, is not resumed
                write_atomic(folder / f"client-{k:06d}.{t}", bytes(state))
        for k, states in self._kept().items():
            for old in [path for round_, path in states if round_ < t - BACK and (k, 0) in self._states]:
                old.unlink(missing_ok=True)

    def go_on(self, t: int) -> None:
        """Take up the twins' states as they were after round t."""
        clients = self.world.setting.clients
        self._share = wanted(self.world.setting.twins, clients) / clients if t else 0.0
        for k, states in self._kept().items():
            found = [path for round_, path in states if round_ <= t]
            if found and self.has(k):
                self._states[k, 0] = found[-1].read_bytes()
        if self.facts.differences:
            self._again()

    def _again(self) -> None:
        """Go on with the bill of a difference that was found before the run was resumed."""
        for text in self.facts.differences:
            where, _, rest = text.partition(", in ")
            fn, _, rest = rest.partition(" of round ")
            t, _, k = rest.partition(", client ")
            self.broken.append(Difference(int(k), int(t), 0, fn, where, "found before the run was resumed"))
            self._ended.add(int(k))

    def _kept(self) -> dict[int, list[tuple[int, Path]]]:
        """Return the files of kept states by client, by ascending round."""
        found: dict[int, list[tuple[int, Path]]] = {}
        for path in (self.folder / FOLDER).glob("client-*.*"):
            k, _, t = path.name.removeprefix("client-").partition(".")
            if k.isdecimal() and t.isdecimal():
                found.setdefault(int(k), []).append((int(t), path))
        return {k: sorted(states) for k, states in found.items()}


class _Host:
    """The process in which twins do their tasks, as the run sees it."""

    def __init__(self, world: World, around: dict[str, Any] | None):
        self._world, self._known, self._scratch = world, set[int](), ""
        if around is None:  # as an isolated party
            self._scratch = tempfile.mkdtemp(prefix="fedaudit-twin-")
            around = {"folder": self._scratch}
        self._around = {**around, "setting": without_data(world.setting).model_dump_json()}
        ours, theirs = socket.socketpair()
        self._socket: socket.socket = ours
        self._file: Stream = ours.makefile("rwb")
        nursery.nursery_of_twins().hand_over(theirs)

    def run(
        self, task: Task, done: Done, state: Blob | None, rows: Callable[[int], dict[str, Rows]], half: int
    ) -> tuple[Done, list[tuple[str, str]]]:
        """Return the twin's result, and where its gate noticed that it differs."""
        world, first = self._world, not self._known
        outputs = 0 if done.tape is None else sum(1 for _ in done.tape.items())
        said: dict[str, Any] = {
            "what": "twin", "task": plain_task(task), "facts": facts_of(world, task.k, task.t), "outputs": outputs,
            "half": half, "dtype": str(torch.get_default_dtype()).removeprefix("torch."), **self._around,
        }  # fmt: skip
        blobs = [bytes(task.message), bytes(state or b"")]
        if task.k not in self._known:
            own = rows(task.k)
            blobs.append(encoded_rows(world, task.k, own, public=first))
            self._known.add(task.k)
        send(self._file, said, blobs)
        for item in done.tape.items() if done.tape is not None else ():
            send(self._file, {}, [item])
        back, answer = receive(self._file)
        found = [(str(where), str(how)) for where, how in back.pop("differences")]
        return done_of((back, answer), task.k), found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._socket.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
