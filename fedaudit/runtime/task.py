"""A client's task: a pure function of bytes. Every engine runs this one."""

from __future__ import annotations

import copy
import platform
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fedaudit.errors import ContractError, FedauditError, PrivacyError
from fedaudit.rng import seeded
from fedaudit.runtime.meter import Meter, Span, peak_rss
from fedaudit.runtime.method import find_function
from fedaudit.runtime.party import Client
from fedaudit.runtime.turns import here
from fedaudit.runtime.world import World, chosen_engine, world_of
from fedaudit.training.recorded import conditions
from fedaudit.wire.codec import decode, decode_tree, encode, encode_tree, read_header
from fedaudit.wire.message import Down, Record, State, Up, load, state_of


class ClientState(Record):
    """What a client keeps between tasks."""

    @classmethod
    def class_id(cls) -> str:
        return "fedaudit.task.ClientState"  # stands in checkpoints: it stays, wherever the class lives

    model: State
    memory: dict[str, Any]
    plain_fits: int  # trainings on private records without DP: they make every release of the model cost
    spent: dict[str, int]  # releases and trainings so far, where a budget was planned for so many


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
    attempt: int = 0  # counts replays of a round where the bits of a replay are not promised: fresh noise
    swap: int | None = None  # for the test of declarations: other records after so many private fits
    replay: bytes | None = None  # for the same test: what client.protect gave back the first time


@dataclass(frozen=True)
class Done:
    """What comes back. `reply` is None where the client failed; its state is then unchanged."""

    k: int
    state: bytes | None = None
    reply: bytes | None = None
    protection: dict[str, Any] = field(default_factory=dict)  # public: parameters of the mechanisms
    entries: list[dict[str, Any]] = field(default_factory=list)  # for the ledger
    released: bytes | None = None  # what client.protect gave back, for the test of declarations
    spans: list[Span] = field(default_factory=list)
    rss: int = 0
    gpu: int | None = None
    private_fits: int = 0
    alone: list[str] = field(default_factory=list)  # stacked: why something was computed for this client alone
    error: str | None = None
    fatal: FedauditError | None = None  # the method or the policy is wrong, not the client


def run_task(task: Task) -> Done:
    """Decode, run the method's function with this client's data, model and memory, protect, encode."""
    if task.drop:
        return Done(task.k, error="dropped out")
    try:
        world = world_of(task.setting)
    except FedauditError as e:  # the data or the setting, as this worker sees them
        return Done(task.k, error=str(e), fatal=e)
    meter = Meter(f"client {task.k}", task.t, world.device, world.setting.flops)
    if (turn := here()) is not None:
        turn.away = meter.away
    try:
        with compute(world), seeded(world.setting.seed, f"client {task.k}", task.t, task.ask, device=world.device):
            with meter.span("decode"):
                message = received(task.message, world.device)
                client = open_client(world, task.k, task.t, task.ask, meter, task.state, task.attempt)
            client.swap_after(task.swap, decode_tree(task.replay, device=world.device) if task.replay else None)
            with meter.span("task"):
                reply = find_function(world.method, task.fn)(client, message)
            if not isinstance(reply, Up):
                raise ContractError(
                    f"{task.fn} returned a {type(reply).__name__} on client {task.k}; it must return an Up message."
                )
            _watch_memory(client, task.state)
            reply, protection = client.release(reply)
            with meter.span("encode"):
                blob = encode(reply)
                state = encode(ClientState(state_of(client.model), client.memory, client.plain_fits, client.spent))
                released = encode_tree(client.released) if client.released else None
    except (ContractError, PrivacyError) as e:
        return Done(task.k, error=str(e), fatal=e)
    except Exception as e:  # noqa: BLE001 (a client that fails is left out of the round, and recorded)
        where = traceback.extract_tb(e.__traceback__)[-1]
        error = f"{type(e).__name__}: {e} ({where.name}, {where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
        return Done(task.k, error=error, spans=meter.close(), rss=peak_rss(), gpu=meter.peak_gpu())
    return Done(
        task.k,
        state,
        blob,
        protection=protection,
        entries=client.entries,
        released=released,
        spans=meter.close(),
        rss=peak_rss(),
        gpu=meter.peak_gpu(),
        private_fits=client.private_fits,
    )


_last: list[tuple[bytes, torch.device, Down]] = []  # the message that was decoded last: a cache, and nothing more


def received(message: bytes, device: torch.device) -> Down:
    """The message in fresh memory. A broadcast is decoded once for all clients in this process, and copied for each."""
    if not _last or _last[0][0] is not message or _last[0][1] != device:
        _last[:] = [(message, device, decode(message, Down, device=device))]
    return copy.deepcopy(_last[0][2])


def _watch_memory(client: Client, before: bytes | None) -> None:
    """Under DP-SGD, a memory that was written by a task which looked at the records is no longer free of them.

    Whole numbers and names (rounds, layers) are let pass: bookkeeping is made of them, and records are not.
    """
    if not client.private_training or not client.looked:
        return
    old = decode(before, ClientState).memory if before is not None else {}
    if _content(old) != _content(client.memory):
        client.plain_fits += 1


def _content(memory: Any) -> list[str]:
    """Digests of the tensors and fractions in a tree."""
    if isinstance(memory, Mapping):
        return [digest for value in memory.values() for digest in _content(value)]
    if isinstance(memory, list | tuple):
        return [digest for value in memory for digest in _content(value)]
    return [read_header(encode_tree(memory)).digest] if isinstance(memory, torch.Tensor | float) else []


def open_client(
    world: World,
    k: int,
    t: int,
    ask: int,
    meter: Meter,
    state: bytes | None,
    attempt: int = 0,
    cls: type[Client] = Client,
) -> Client:
    """Client k as its last committed state left it."""
    if state is None:
        return cls(world, k, t, ask, meter, world.fresh_model(k), {}, attempt=attempt)
    kept = decode(state, ClientState, device=world.device)
    model = load(world.blank_model(k), kept.model)
    return cls(world, k, t, ask, meter, model, kept.memory, kept.plain_fits, kept.spent, attempt)


@contextmanager
def compute(world: World) -> Iterator[None]:
    """The conditions under which equal inputs give equal bits: thread count, kernels, deterministic algorithms."""
    debugging: Any = torch.utils.deterministic
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark, fill = torch.backends.cudnn.benchmark, debugging.fill_uninitialized_memory
    if threads != world.setting.threads:
        torch.set_num_threads(world.setting.threads)
    torch.use_deterministic_algorithms(world.setting.deterministic)
    torch.backends.cudnn.benchmark = not world.setting.deterministic
    debugging.fill_uninitialized_memory = False  # a debugging aid that costs up to a quarter of a step
    onednn = torch.backends.mkldnn.set_flags(uses_onednn(world))[0]
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allowed = world.device.type == "cuda" and world.setting.precision != "float32"
    _allow_tf32(allowed, allowed)  # torch's own default: convolutions yes, products no
    step = world.setting.step if world.setting.step != "auto" else "recorded"
    stacked = chosen_engine(world.setting) == "stacked"
    try:
        with conditions(step, bf16=world.setting.precision == "bf16", stacked=stacked):
            yield
    finally:
        _allow_tf32(*tf32)
        torch.backends.mkldnn.set_flags(onednn)
        if threads != world.setting.threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark, debugging.fill_uninitialized_memory = benchmark, fill


def _allow_tf32(products: bool, convolutions: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions


def uses_onednn(world: World) -> bool:
    """Whether oneDNN computes on the CPU. On ARM its overhead makes steps on tiny images take twice as long."""
    if world.setting.onednn != "auto":
        return world.setting.onednn == "on"
    _, height, width = world.shape
    return not (platform.machine() in ("aarch64", "arm64") and height * width <= 16 * 16)
