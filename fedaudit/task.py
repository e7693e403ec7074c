"""A client's task: a pure function of bytes. Every engine runs this one."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fedaudit.errors import ContractError, FedauditError, PrivacyError
from fedaudit.meter import Meter, Span, peak_rss
from fedaudit.method import Client, find_function
from fedaudit.records import Down, Record, State, Up, decode, encode, load, state_of
from fedaudit.rng import seeded
from fedaudit.world import World, world_of


class ClientState(Record):
    """What a client keeps between tasks."""

    model: State
    memory: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What travels to a worker: names and bytes."""

    setting: str  # JSON
    fn: str
    k: int
    t: int
    ask: int
    state: bytes | None  # None: this client was never asked before
    message: bytes
    drop: bool = False  # this client is to fail after it received the message
    swap: int | None = None  # for the test of declarations: other records after so many private fits


@dataclass(frozen=True)
class Done:
    """What comes back. `reply` is None where the client failed; its state is then unchanged."""

    k: int
    state: bytes | None = None
    reply: bytes | None = None
    protection: dict[str, Any] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    rss: int = 0
    gpu: int | None = None
    private_fits: int = 0
    error: str | None = None
    fatal: FedauditError | None = None  # the method or the policy is wrong, not the client


def run_task(task: Task) -> Done:
    """Decode, run the method's function with this client's data, model and memory, protect, encode."""
    world = world_of(task.setting)
    meter = Meter(f"client {task.k}", task.t, world.device, world.setting.flops)
    if task.drop:
        return Done(task.k, error="dropped out")
    try:
        with compute(world), seeded(world.setting.seed, f"client {task.k}", task.t, task.ask, device=world.device):
            with meter.span("decode"):
                message = decode(task.message, Down, device=world.device)
                client = open_client(world, task.k, task.t, task.ask, meter, task.state)
            client.swap_after(task.swap)
            with meter.span("task"):
                reply = find_function(world.method, task.fn)(client, message)
            if not isinstance(reply, Up):
                raise ContractError(
                    f"{task.fn} returned a {type(reply).__name__} on client {task.k}; it must return an Up message."
                )
            with meter.span("encode"):
                blob = encode(reply)
                state = encode(ClientState(state_of(client.model), client.memory))
    except (ContractError, PrivacyError) as e:
        return Done(task.k, error=str(e), fatal=e)
    except Exception as e:  # noqa: BLE001 (a client that fails is left out of the round, and recorded)
        where = traceback.extract_tb(e.__traceback__)[-1]
        error = f"{type(e).__name__}: {e} ({where.name}, {where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        return Done(task.k, error=error, spans=meter.close(), rss=peak_rss(), gpu=meter.peak_gpu())
    fits = client.private_fits
    return Done(task.k, state, blob, spans=meter.close(), rss=peak_rss(), gpu=meter.peak_gpu(), private_fits=fits)


def open_client(world: World, k: int, t: int, ask: int, meter: Meter, state: bytes | None) -> Client:
    """Client k as its last committed state left it."""
    if state is None:
        return Client(world, k, t, ask, meter, world.fresh_model(k), {})
    kept = decode(state, ClientState, device=world.device)
    return Client(world, k, t, ask, meter, load(world.blank_model(k), kept.model), kept.memory)


@contextmanager
def compute(world: World) -> Iterator[None]:
    """The conditions under which equal inputs give equal bits: thread count and deterministic algorithms."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    tf32, benchmark = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    if threads != world.setting.threads:
        torch.set_num_threads(world.setting.threads)
    torch.use_deterministic_algorithms(world.setting.deterministic)
    torch.backends.cudnn.benchmark = not world.setting.deterministic
    try:
        yield
    finally:
        if threads != world.setting.threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark = tf32, benchmark
