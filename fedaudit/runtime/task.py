"""A client's task is a pure function of bytes. Every engine runs this one."""

from __future__ import annotations

import dataclasses
import functools
import math
import platform
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch

from fedaudit.aggregation.secure.messages import Masked
from fedaudit.aggregation.sender import Sender
from fedaudit.aggregation.terms import Terms, entered
from fedaudit.errors import ContractError, FedauditError, PrivacyError, last_frame, place_of
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import HandedOver, Outputs, Recorder, Tape, gated
from fedaudit.privacy.noise_key import NoiseKey
from fedaudit.rng import seeded
from fedaudit.runtime.declarations.twin_client import TwinClient
from fedaudit.runtime.device_errors import device_error
from fedaudit.runtime.lockstep import Left, here
from fedaudit.runtime.meter import Meter, Span, peak_rss
from fedaudit.runtime.method import find_function
from fedaudit.runtime.party import Client
from fedaudit.runtime.run_record import DROPPED_OUT
from fedaudit.runtime.site import Site, Swap
from fedaudit.runtime.world import World, chosen_engine, world_of
from fedaudit.training.allocator import keep_freed
from fedaudit.training.cuda_graphs import conditions
from fedaudit.training.fit import traces
from fedaudit.wire.codec import decode, decode_tree, encode, encode_lazily, encode_tree
from fedaudit.wire.codec.packing import Blob, Held
from fedaudit.wire.message import Down, Record, State, Up, class_ids, fresh, live_state
from fedaudit.wire.release import Protection

C = TypeVar("C", bound=Client)


class ClientState(Record):
    """The state that a client keeps between tasks."""

    @classmethod
    def class_id(cls) -> str:
        return "fedaudit.task.ClientState"  # checkpoints hold this name: it stays, wherever the class lives

    model: State
    memory: dict[str, Any]
    plain_fits: int  # trainings on private records without DP: after one, every release of the model is billed
    spent: dict[str, int]  # releases and trainings so far, if a budget was planned for a number of them
    dirty: bool = False  # memory holds something unprotected, written by a task that looked at the records
    released: dict[str, str] = dataclasses.field(default_factory=dict)  # digests of values in memory that were released


@dataclass(frozen=True)
class Task:
    """A task as it travels to a worker: names and bytes. If the worker is this process, tensors may be held instead of
    bytes."""

    setting: str  # JSON
    fn: str
    k: int
    t: int
    ask: int
    state: Blob | None  # None: this client was never asked before
    message: Blob
    drop: bool = False  # True: this client drops out after it received the message
    attempt: int = 0  # counts replays of a round whose bits may differ, so that each draws fresh noise
    swap: Swap | None = None  # for the test of declarations: when to swap in other records, and for what
    watch: bool = False  # for the same test: report what went into class means, row by row
    here: bool = False  # True: it runs in the process that asks, so the result need not be bytes
    replay: bytes | None = None  # for the same test: what client.protect gave back the first time
    noise: bytes = b""  # the key of this task's noise; it follows from the run's secret
    followed: bool = False  # whether the client has a twin, which is handed what its mechanisms let out
    terms: Terms | None = None  # how the reply enters a sum, if it does not leave the client by itself


@dataclass(frozen=True)
class Done:
    """The result of a task. `reply` is None if the client failed; its state is then unchanged."""

    k: int
    state: Blob | None = None
    reply: Blob | None = None
    protection: dict[str, Protection] = field(default_factory=dict)  # parameters of the mechanisms, which are public
    entries: list[LedgerEntry] = field(default_factory=list)  # for the ledger
    released: bytes | None = None  # what client.protect gave back, for the test of declarations
    tape: Tape | None = None  # what its mechanisms let out, if it has a twin
    spans: list[Span] = field(default_factory=list)
    rss: int = 0
    gpu: int | None = None
    private_fits: int = 0
    # Where the known things that it sent, kept or loaded may come from.
    picked: list[list[str]] = field(default_factory=list)
    chose: bool = False  # whether this message, after a look, is one of several that its function may give
    brought: bool = False  # whether training was given what the task read itself; that is billed in any case
    layout: str = ""  # of a reply that enters a sum: its fields and their shapes, which everybody knows
    cut: int = 0  # and how many of its numbers were cut off; for the auditor only
    rows: list[list[str]] = field(default_factory=list)  # for a watched task: digests of the rows of each class_means
    alone: list[str] = field(default_factory=list)  # stacked engine: why something was computed for this client alone
    error: str | None = None  # type and place of the error, and nothing about the records
    detail: str = ""  # the whole text of the error, for the log on the machine that runs this
    lost: bool = False  # True: nobody knows what it had looked at when it failed
    redone: int = 0  # how often it was lost before, with the process that did it
    fatal: FedauditError | None = None  # the method or the policy is wrong, not the client


def run_task(task: Task, gate: Outputs | None = None) -> Done:
    """Decode, run the method's function with this client's data, model and memory, protect, and encode the result.

    `gate` is given for a twin: it hands over what the client's mechanisms let out.
    """
    if task.drop:
        return Done(task.k, error=DROPPED_OUT)
    gate = gate or (Recorder if task.followed else Outputs)(NoiseKey(task.noise))
    with gated(gate):
        return _gated_task(task, gate)


def _gated_task(task: Task, gate: Outputs) -> Done:
    try:
        world = world_of(task.setting)
    except FedauditError as e:  # something is wrong with the data or the setting as this worker sees them
        return Done(task.k, error=str(e), fatal=e)
    meter = Meter(f"client {task.k}", task.t, world.device, world.setting.flops)
    if (turn := here()) is not None:
        turn.away = meter.away
    client: Client | None = None
    try:
        with compute(world), seeded(world.setting.seed, f"client {task.k}", task.t, task.ask, device=world.device):
            with meter.span("decode"):
                message = received(task.message, world.device)
                site = dataclasses.replace(world.site(task.k), swap=task.swap)
                cls = TwinClient if isinstance(gate, HandedOver) else Client
                client = open_client(site, task.t, task.ask, meter, task.state, task.attempt, message, cls)
            client.watched = [] if task.watch else None
            if task.replay:
                gate.replay = decode_tree(task.replay, device=world.device)
            fn, known = find_function(world.method, task.fn), class_ids()
            if world.policies:
                _wrap_steps(fn)
            before = traces(fn, {}) if world.policies else []
            with meter.span("task"):
                reply = fn(client, message)
            saw = client.looked or client.private_fits > 0
            if world.policies and saw and traces(fn, {}) != before:
                client.bill(left_behind(task.fn))
            _check_reply(reply, fn, known, task)
            kept = client.settle()
            reply, protection = client.release(reply)
            layout, cut = "", 0
            if task.terms is not None:
                with meter.span("sum"):
                    sender = Sender(task.k, task.t, tuple(world.archs), world.shape, world.classes)
                    summand = world.method.summand(sender, reply, message)
                    told = entered(summand, message, task.terms, task.k, world.device)
                reply, layout, cut = told.reply, told.layout, told.cut
                protection = {} if isinstance(reply, Masked) else protection
            with meter.span("encode"):
                at = world.device if task.here else None
                answered = _kept(task.message, world.device) if world.compression else None
                blob = encode(reply, world.compression, answered) if world.compression else encode_lazily(reply, at)
                state = encode_lazily(state_after(client, kept), at)
                released = encode_tree(client.released) if client.released else None
    except (KeyboardInterrupt, Left):
        raise
    except BaseException as e:  # noqa: BLE001 (a client that fails is left out of the round, and recorded)
        where = last_frame(e)
        if (found := device_error(e, f"client {task.k}")) is not None:  # not the client's fault: the run ends
            return Done(task.k, error=str(found), detail="".join(traceback.format_exception(e)), fatal=found)
        if isinstance(e, ContractError | PrivacyError) and where and OURS in Path(where.filename).parents:
            return Done(task.k, error=str(e), fatal=e)
        error = f"{_known_name(type(e))}{place_of(e)}"
        detail = "".join(traceback.format_exception(e))
        entries = [] if client is None else client.entries  # what it did is paid for, also if it does not answer
        entries += [absence(task.fn)] if client is not None and world.policies and _may_tell(client) else []
        spans, gpu, rss = meter.close(), meter.peak_gpu(), peak_rss()
        return Done(task.k, error=error, detail=detail, entries=entries, spans=spans, rss=rss, gpu=gpu, tape=gate.tape)
    return Done(
        task.k,
        state,
        blob,
        protection=protection,
        entries=client.entries,
        released=released,
        tape=gate.tape,
        spans=meter.close(),
        rss=peak_rss(),
        gpu=meter.peak_gpu(),
        private_fits=client.private_fits,
        brought=client.brought,
        picked=client.picked,
        layout=layout,
        cut=cut,
        rows=client.watched or [],
        chose=bool(world.policies) and client.looked and len(promised(getattr(fn, "__func__", fn))) != 1,
    )


# An error raised by code in this folder is about the method; any other was raised by the method.
OURS = Path(__file__).resolve().parents[1]


def _known_name(cls: type) -> str:
    """Return a class's name if it was there before the run: a class that a task made may be made of records."""
    known = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls
    return cls.__name__ if known else "an error of a class that was made by the task"


def _may_tell(client: Client) -> bool:
    """Return whether what this client did so far may depend on its records in a way that was not paid for."""
    return client.looked or client.fitting or client.dirty or client.plain_fits > 0


_last: list[tuple[Blob, torch.device, Down]] = []  # the message that was decoded last: a cache, and nothing more


def received(message: Blob, device: torch.device) -> Down:
    """Return the message in fresh memory. A broadcast is decoded once for all clients in this process, and copied for
    each."""
    if isinstance(message, Held) and message.seen(device) is None:
        return decode(message, Down, device=device)  # all tensors of a type in one copy
    return cast(Down, fresh(_kept(message, device)))


def _kept(message: Blob, device: torch.device) -> Down:
    """Return the message as it was decoded, to be read only: a method works on copies, and may change those."""
    if not _last or _last[0][0] is not message or _last[0][1] != device:
        _last[:] = [(message, device, decode(message, Down, device=device, look=True))]
    return _last[0][2]


def _check_reply(reply: Any, fn: Callable[..., Any], known: frozenset[str], task: Task) -> None:
    """Raise ContractError unless the reply's class was fixed before the run; a free choice would tell something
    unbilled."""
    if not isinstance(reply, Up):
        raise ContractError(
            f"{task.fn} returned a {type(reply).__name__} on client {task.k}; it must return an Up message."
        )
    if type(reply).class_id() not in known:
        raise ContractError(
            f"{task.fn} made the message class {type(reply).__name__} while it ran: the name and the fields of "
            "such a class may tell of the records. Define it in the method's module."
        )
    classes = promised(getattr(fn, "__func__", fn))
    if classes and not isinstance(reply, classes):
        raise ContractError(
            f"{task.fn} returned a {type(reply).__name__} on client {task.k}; it is annotated to return "
            f"{' or '.join(cls.__name__ for cls in classes)}."
        )


@functools.cache
def promised(fn: Callable[..., Any]) -> tuple[type[Up], ...]:
    """Return the message classes that a function is annotated to return; empty if the annotation does not say."""
    try:
        hint = get_type_hints(fn).get("return")
    except (NameError, TypeError):  # a name that only type checkers know
        return ()
    hints = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return hints if all(isinstance(h, type) and issubclass(h, Up) and h is not Up for h in hints) else ()


def absence(fn: str) -> LedgerEntry:
    """Return the ledger's entry for a client that failed after it had looked at its records: the failure may tell of
    them."""
    condition = "that it failed, after it had looked at its records"
    return LedgerEntry.unprotected(f"{fn} (absence)", "absence", condition)


def _wrap_steps(fn: Callable[..., Any]) -> None:
    """Let torch wrap the `step` of optimisers that the code of a task defines.

    It does so when the first one is made, which would look as if the task had written into its own code.
    """
    for value in list(vars(sys.modules[fn.__module__]).values()):
        own = isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        if own and not getattr(value.step, "hooked", False):
            torch.optim.Optimizer._patch_step_function(value.__new__(value))


def left_behind(fn: str) -> LedgerEntry:
    """Return the ledger's entry for a task that wrote outside of model, memory and reply, where anybody may find it."""
    condition = "changed globals, attributes or defaults of its code, in a task that had looked at its records"
    return LedgerEntry.unprotected(f"{fn} (left behind)", "left behind", condition)


def state_after(client: Client, kept: dict[str, str]) -> ClientState:
    """Return what the client keeps, to be encoded. The model's tensors are not copied for it."""
    model = live_state(client.model)
    return ClientState(model, client.memory, client.plain_fits, client.spent, client.dirty, released=kept)


def open_client(
    site: Site,
    t: int,
    ask: int,
    meter: Meter,
    state: Blob | None,
    attempt: int = 0,
    message: Down | None = None,
    cls: type[C] | None = None,
) -> C:
    """Return the client of a site as its last committed state left it. `cls` may be a subclass that does some things
    differently."""
    make = cast(type[C], cls or Client)
    if state is None:
        return make(site, t, ask, meter, site.fresh_model(), {}, attempt=attempt, message=message)
    kept = decode(state, ClientState, device=site.device)
    model = site.model_with(kept.model)
    return make(
        site, t, ask, meter, model, kept.memory, kept.plain_fits, kept.spent, attempt,
        dirty=kept.dirty, released=kept.released, message=message,
    )  # fmt: skip


@contextmanager
def compute(world: World) -> Iterator[None]:
    """Set the conditions under which equal inputs give equal bits: thread count, kernels, deterministic algorithms."""
    keep_freed()
    debugging: Any = torch.utils.deterministic
    threads, strictness = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    benchmark, fill = torch.backends.cudnn.benchmark, debugging.fill_uninitialized_memory
    if threads != world.setting.threads:
        torch.set_num_threads(world.setting.threads)
    # use_deterministic_algorithms does the same, but imports torch's compiler first: two seconds of every process.
    torch.set_deterministic_debug_mode("error" if world.setting.deterministic else "default")
    torch.backends.cudnn.benchmark = not world.setting.deterministic
    debugging.fill_uninitialized_memory = False  # a debugging aid that costs up to a quarter of a step
    onednn = torch.backends.mkldnn.set_flags(uses_onednn(world))[0]
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allowed = world.device.type == "cuda" and world.setting.precision != "float32"
    _allow_tf32(allowed, allowed)  # torch's own default allows TF32 in convolutions, not in matrix products
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
        torch.set_deterministic_debug_mode(strictness)
        torch.backends.cudnn.benchmark, debugging.fill_uninitialized_memory = benchmark, fill


def _allow_tf32(products: bool, convolutions: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = products, convolutions


def uses_onednn(world: World) -> bool:
    """Return whether oneDNN computes on the CPU. On ARM its overhead makes steps on tiny images take twice as long."""
    if world.setting.onednn != "auto":
        return world.setting.onednn == "on"
    return not (platform.machine() in ("aarch64", "arm64") and math.prod(world.shape[1:]) <= 16 * 16)
