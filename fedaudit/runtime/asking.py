"""Asks clients: sends messages over the wire, runs their tasks on the engine, and collects replies and absences."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedaudit.errors import ContractError, RunError
from fedaudit.privacy.noise_key import task_key
from fedaudit.rng import generator, seed_of
from fedaudit.runtime.declarations.cross_client_check import CrossClientCheck
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.method import function_path
from fedaudit.runtime.party import Cohort
from fedaudit.runtime.run_record import (
    Absence,
)
from fedaudit.runtime.run_state import Entries, RunState
from fedaudit.runtime.task import Task, absence
from fedaudit.setting import Setting
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import encode
from fedaudit.wire.message import Down

Asker = Callable[..., dict[int, Any]]


@dataclass
class RoundSoFar:
    """Collects what the asks of one round leave behind."""

    t: int
    wire: Wire
    meter: Meter  # of the server
    quorum: int
    absent: list[Absence] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)  # the client of each task that was lost and done again
    entries: Entries = field(default_factory=list)
    alike: CrossClientCheck = field(default_factory=CrossClientCheck)


def asker(run: RunState, so_far: RoundSoFar) -> Asker:
    """Return the function through which a cohort of this round asks its clients."""
    t, wire, meter = so_far.t, so_far.wire, so_far.meter

    def ask(cohort: Cohort, fn: Callable[..., Any] | str, message: Down | Mapping[int, Any]) -> dict[int, Any]:
        """Send messages to clients and return their replies by client.

        A method gives its own function and messages; a server in another process gives a name and bytes.
        """
        path = fn if isinstance(fn, str) else function_path(run.method, fn)
        messages = dict.fromkeys(cohort.ids, message) if isinstance(message, Down) else dict(message)
        if strangers := messages.keys() - set(cohort.ids):
            raise ContractError(
                f"{path}: client {min(strangers)} is not in this round's cohort, or failed earlier in the round. "
                "Ask cohort.ids only."
            )
        number = len(wire.traffic.asks)
        run.twins.choose(sorted(messages), [k for k in sorted(messages) if not run.has_begun(k)])
        tasks = (
            run.twins.ask(
                Task(
                    run.json, path, k, t, number, run.store.client(k), blob,
                    drop=drops_out(run.setting, k, t, number), attempt=run.attempt, here=run.engine.in_process,
                    noise=task_key(run.secret, k, t, number, run.attempt), followed=run.twins.has(k),
                )
            )
            for k, blob in wire.down(messages)
        )  # fmt: skip
        replies: dict[int, Any] = {}
        first_error = ""
        waiting = time.perf_counter()
        for done in run.engine.map(tasks):
            meter.exclude(time.perf_counter() - waiting, done.spans, run.engine.in_process)
            run.timings.add(done.spans, done.rss, done.gpu)
            so_far.redone.extend([done.k] * done.redone)
            if done.fatal is not None:
                run.log_failure(t, number, done)
                raise done.fatal
            run.note_alone(path, done.alone)
            run.twins.follow(done)
            reply = wire.back(done, path, run.world.device)
            waiting = time.perf_counter()
            if reply is None or done.state is None:
                first_error = first_error or f"client {done.k}: {done.error}"
                run.log_failure(t, number, done)
                lost = [absence(path)] if done.lost and run.world.policies else []
                so_far.entries.append((done.k, [*done.entries, *lost]))
                so_far.absent.append(Absence(client=done.k, ask=number, reason=str(done.error)))
                cohort.ids.remove(done.k)
                continue
            # A server in another process gets the decompressed reply: it cannot undo a compression itself.
            whole = encode(reply) if run.world.compression else done.reply
            replies[done.k] = whole if isinstance(fn, str) else reply
            run.store.put_client(done.k, t, number, done.state)
            so_far.entries.append((done.k, done.entries))
            so_far.alike.add(path, done.k, done.picked, done.chose)
            run.watch(t - 1, run.setting.rounds, f"round {t}, {path}, {len(replies)}/{len(messages)} clients")
            waiting = time.perf_counter()
        so_far.entries.extend((k, run.twins.entries()) for k in sorted(messages) if run.twins.broken)
        if len(cohort.ids) < so_far.quorum:
            raise RunError(
                f"Round {t}, {path}: {len(cohort.ids)} clients are left, the quorum is {so_far.quorum}. First failure: "
                f"{first_error} (all of it: {run.folder / 'errors.log'}). "
                f"Fix it, lower --quorum or --dropout, and go on with --resume."
            )
        return replies

    return ask


def participants_of(setting: Setting, t: int) -> list[int]:
    """Return the clients that take part in round t, in ascending order."""
    clients = setting.clients
    wanted = max(1, round(setting.participation * clients))
    order = torch.randperm(clients, generator=generator(setting.seed, "server", t, "participants"))
    return sorted(order[:wanted].tolist())


def quorum_of(setting: Setting, participants: list[int]) -> int:
    """Return how many of the participants have to stay until the end of a round."""
    return max(1, -int(-setting.quorum * len(participants) // 1))


def drops_out(setting: Setting, k: int, t: int, ask: int) -> bool:
    """Return whether client k drops out of an ask, as the setting's drop-out rate has it."""
    if not setting.dropout:
        return False
    return seed_of(setting.seed, f"client {k}", t, ask, "dropout") / 2**63 < setting.dropout
