"""Parties run here in processes of their own. Such a process holds one client's records, or none.

A nursery is a process (`python -m fedaudit.runtime.isolated_worker`) that imports the method and never sees a record.
For each task, and for each of the server's rounds, it forks. The fork is told over a socket what that party may hold,
works in a folder of its own that is removed afterwards, and ends. Nothing that it leaves in its memory, its environment
or its folder reaches the next fork. It sends back JSON and encoded messages, and never anything that executes.

This file is the fork's side. The other side is `engines/isolated`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from fedaudit import errors, registry
from fedaudit.aggregation.mean import Mean
from fedaudit.aggregation.terms import terms_of
from fedaudit.errors import ContractError, DataError, FedauditError, RunError, SettingError
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism_outputs import HandedOver, Neighbour, Tape
from fedaudit.privacy.policy import read_policies
from fedaudit.rng import seeded
from fedaudit.runtime.declarations.twin_client import mixed_means, mixed_rows
from fedaudit.runtime.device_errors import device_error
from fedaudit.runtime.guarantee import guarantee_of
from fedaudit.runtime.meter import Meter, Span, peak_rss
from fedaudit.runtime.method import function_path
from fedaudit.runtime.party import Cohort, Server
from fedaudit.runtime.site import Rows, Swap, drawn_half
from fedaudit.runtime.task import Done, Task, compute, run_task
from fedaudit.runtime.world import World, keep_world, resolve_device
from fedaudit.setting import Setting
from fedaudit.shape import Shape
from fedaudit.training.cuda_graphs import unrecorded
from fedaudit.wire.codec import decode, decode_tree, encode
from fedaudit.wire.compression import stage_of
from fedaudit.wire.message import KINDS, Down, Record, Up
from fedaudit.wire.release import Protection

Stream = io.BufferedRWPair
Frame = tuple[dict[str, Any], list[bytes]]  # a JSON object, and the encoded messages that go with it
LONGEST = 1 << 28  # most bytes of a frame's JSON
LARGEST = 1 << 36  # most bytes of one message
USUAL = ("torch._dynamo",)  # optimisers import it on first use: we import it once here, and not in each fork
FORK = sys.platform == "linux"  # elsewhere a fork is not safe under all libraries: a nursery then serves one party


def send(file: Stream, said: Mapping[str, Any], blobs: list[bytes]) -> None:
    text = json.dumps({"said": said, "blobs": [len(blob) for blob in blobs]}).encode()
    file.write(len(text).to_bytes(8, "little") + text)
    for blob in blobs:
        file.write(blob)
    file.flush()


def receive(file: Stream) -> Frame:
    """Return the next frame. Raise `EOFError` if the other side is gone, and `RunError` if it sent something else."""
    length = int.from_bytes(_exactly(file, 8), "little")
    if length > LONGEST:
        raise RunError(f"A party's process announced a frame of {length} bytes, which is too long.")
    try:
        frame = json.loads(_exactly(file, length))
        said, sizes = frame["said"], frame["blobs"]
        if not isinstance(said, dict) or not all(type(n) is int and 0 <= n <= LARGEST for n in sizes):
            raise ValueError("no frame")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise RunError(f"A party's process sent something that is not a frame ({e}).") from None
    return said, [_exactly(file, size) for size in sizes]


def _exactly(file: Stream, size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise EOFError
    return data


# --- what a party holds ---------------------------------------------------------------------------------------------


def without_data(setting: Setting) -> Setting:
    """Return a copy of the setting that does not say where the records lie."""
    return setting.model_copy(update={"dataset": "(elsewhere)", "data_dir": "", "public_dataset": None})


class Apart(World):
    """The world as a party in its own process sees it: models and method, and the records that it was given."""

    def __init__(self, setting: Setting, facts: Mapping[str, Any], rows: Mapping[str, Any]):
        self.setting = setting
        self._named_by = registry.named_by()
        self.device = resolve_device(setting.device)
        self.method = registry.find(setting.method).make(setting.set, setting.preset)  # type: ignore[attr-defined]
        self.archs = self.method.archs(setting.model, setting.clients)
        self.shape, self.classes = Shape(facts["shape"], facts["tokens"]), facts["classes"]
        self.policies = read_policies(setting.privacy, KINDS)
        self.guarantee = guarantee_of(setting)
        self.compression = stage_of(setting.compress)
        self._templates, self._bases = {}, {}
        self._facts, self._given = facts, {name: self._to_device((x, y)) for name, (x, y) in rows.items()}

    def take(self, rows: Mapping[str, Any]) -> None:
        """Take records, by name. A process of twins holds those of several, and never those of their clients."""
        self._given |= {name: self._to_device((x, y)) for name, (x, y) in rows.items()}

    def turn_to(self, facts: Mapping[str, Any]) -> None:
        """Be the world of another party, or of another round."""
        self._facts = facts
        vars(self).pop("absent", None)

    def public(self) -> Rows:
        if "public" not in self._given:
            raise SettingError(f"{self.setting.method} needs a public transfer set: set --public, for example 0.1.")
        return self._given["public"]

    @property
    def public_labelled(self) -> bool:
        return bool(self._facts["public_labelled"])

    def members(self, k: int) -> Rows:
        return self._only("own", k)

    def seen_members(self, k: int) -> Rows:
        return self._only("own", k)

    def validation(self, k: int) -> Rows:
        return self._only("validation", k)

    def count(self, k: int) -> int:
        if k != self._facts.get("k"):
            raise ContractError(f"This process does not know how many records client {k} has.")
        return int(self._facts["count"])

    def people(self, k: int) -> torch.Tensor | None:
        if k != self._facts.get("k"):
            raise ContractError(f"This process does not know whose records client {k} has.")
        said = self._facts["people"]
        return None if said is None else torch.tensor(said)

    def _only(self, name: str, k: int) -> Rows:
        if k != self._facts.get("k"):
            raise ContractError(f"This process does not hold the records of client {k}.")
        return self._given[f"{name} {k}"]

    def other_rows(self, k: int) -> Rows:
        if f"other {k}" not in self._given:
            raise DataError(
                "The test of declarations swaps records, and this process has no others. Run it without isolation."
            )
        return self._only("other", k)

    @functools.cached_property
    def releases(self) -> Callable[[str], int | None]:
        """Return a function that says how often a kind is released, as the run counted it.

        The method's traffic depends on what all clients hold, so this process cannot count it.
        """
        return self._facts["releases"].get

    @functools.cached_property
    def absent(self) -> Callable[[int], frozenset[str]]:
        return {self._facts["t"]: frozenset(self._facts["absent"])}.__getitem__


# --- in the fork ------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> None:
    """Serve one party: take what it may hold, do its work, and send the result."""
    with connection.makefile("rwb") as file:
        said, blobs = receive(file)
        os.chdir(said["folder"])
        if "environment" in said:  # a twin of a client that is not isolated finds what its client finds
            os.environ.clear()
            os.environ.update(said["environment"])
            sys.path[:] = said["path"]
        else:
            os.environ.update(HOME=said["folder"], TMPDIR=said["folder"])
        setting = Setting.model_validate_json(said["setting"])
        rows = decode_tree(blobs.pop())
        world = Apart(setting, said["facts"], rows)
        keep_world(said["setting"], world)  # whoever asks for the world of a setting gets this one, and no other
        if said["what"] == "task":
            message, state, noise = blobs
            terms = None if said["terms"] is None else terms_of(said["terms"])
            task = Task(said["setting"], **said["task"], message=message, state=state or None, noise=noise, terms=terms)
            send(file, *done_as_frame(run_task(task)))
        elif said["what"] == "twin":
            _twins(file, world, said, blobs)
        else:
            _server(file, world, said, blobs)


def _twins(file: Stream, world: Apart, said: Mapping[str, Any], blobs: list[bytes]) -> None:
    """Carry out tasks of twins until nobody asks for more. What the clients' mechanisms let out comes in frames."""
    while True:
        message, state, *of_client = blobs
        if of_client:  # the records of a twin come with its first task
            world.take(decode_tree(of_client[0]))
        world.turn_to(said["facts"])
        torch.set_default_dtype(getattr(torch, said["dtype"]))
        left = iter(range(said["outputs"]))
        gate = HandedOver((receive(file)[1][0] for _ in left), world.device)
        task = Task(said["setting"], **said["task"], message=message, state=state or None, watch=True)
        done = run_task(task, gate)
        if done.fatal is None:
            gate.finish()
        if done.reply is not None and not gate.differences and (gate.rows or done.rows):
            gate.differences += _mixed(task, done, gate, said["half"], world)
        for _ in left:  # what it did not ask for
            receive(file)
        answer, sent = done_as_frame(done)
        send(file, {**answer, "differences": gate.differences}, sent)
        try:
            said, blobs = receive(file)
        except EOFError:
            return


def _mixed(task: Task, done: Done, twin: HandedOver, half: int, world: World) -> list[tuple[str, str]]:
    """Return which fields have rows that are not made of one record each.

    Two neighbours exchange one half of the records each, with their labels. A third exchanges one record under its
    label, so that no class gets more or fewer records: where few rows are made of many records, only it tells.
    """
    n = world.count(task.k)
    swaps = [Swap(0, in_fit=False, half=half, rest=rest) for rest in (False, True)]
    swaps += [Swap(0, in_fit=False, only=half % n)] if n else []
    exchanged = [*(int(drawn_half(n, half, rest).sum()) for rest in (False, True)), *([1] if n else [])]
    found, digests = [], []
    for swap in swaps:
        gate = Neighbour(twin, world.device)
        digests.append(run_task(dataclasses.replace(task, swap=swap), gate).rows)
        found.append(gate.rows)
    rows = mixed_rows(twin.rows, found, exchanged)
    for mine, *others in zip(done.rows, *digests, strict=False):
        if mixed_means(mine, others, exchanged):
            rows.append((f"{task.fn} (class means)", "rows that were given to class_means are not of one record each"))
    return rows


def _server(file: Stream, world: Apart, said: Mapping[str, Any], blobs: list[bytes]) -> None:
    """Carry out `init`, or one round. Each ask goes out as a frame, and the answers come back as one."""
    t = said["t"]
    meter = Meter("server", t, world.device, world.setting.flops)
    unrecorded.clear()

    def ask(
        cohort: Cohort,
        fn: Callable[..., Any],
        message: Down | Mapping[int, Down],
        how: dict[str, Any] | None = None,
    ) -> Any:
        path = function_path(world.method, fn)
        messages = dict.fromkeys(cohort.ids, message) if isinstance(message, Down) else dict(message)
        kinds: dict[int, int] = {}  # by a message's id(): its number among those that are sent
        sent: list[bytes] = []
        for k in sorted(messages):
            if not isinstance(messages[k], Down):
                raise ContractError(
                    f"cohort.ask was given a {type(messages[k]).__name__}; only a Down message is sent."
                )
            if id(messages[k]) not in kinds:
                kinds[id(messages[k])] = len(sent)
                sent.append(encode(messages[k]))
        since = time.perf_counter()
        to = [[k, kinds[id(messages[k])]] for k in sorted(messages)]
        send(file, {"ask": path, "to": to, "mean": how}, sent)
        back, replies = receive(file)
        meter.exclude(time.perf_counter() - since, [], False)
        cohort.ids[:] = back["left"]
        if how is not None:
            return Mean(decode(replies[0], Up, device=world.device), back["count"])
        return {k: decode(reply, Up, device=world.device) for k, reply in zip(back["replied"], replies, strict=True)}

    def mean(cohort: Cohort, fn: Callable[..., Any], message: Down | Mapping[int, Down], by: str | None) -> Mean[Any]:
        return cast(Mean[Any], ask(cohort, fn, message, {"by": by}))

    try:
        with compute(world), seeded(world.setting.seed, "server", t, device=world.device):
            if said["what"] == "init":
                after = world.method.init(Server(world.hub, t, meter))
            else:
                before = decode(blobs[0], Record, device=world.device)
                with meter.span("round"):
                    after = world.method.round(before, Server(world.hub, t, meter), Cohort(said["ids"], ask, mean))
        if not isinstance(after, Record):
            where = f"{type(world.method).__name__}.{said['what']}"
            raise ContractError(f"{where} returned a {type(after).__name__}; the state is a Record.")
        spans = [dataclasses.asdict(span) for span in meter.close()]
        facts = {"spans": spans, "rss": peak_rss(), "gpu": meter.peak_gpu(), "unrecorded": sorted(unrecorded)}
        send(file, facts, [encode(after)])
    except (EOFError, BrokenPipeError):
        raise
    except Exception as e:  # noqa: BLE001 (raised again on the other side)
        send(file, {"error": error_as_text(e)}, [])


# --- results as frames, and back --------------------------------------------------------------------------------------


def error_as_text(e: BaseException) -> list[str]:
    """Return the name of one of our errors, and the arguments from which its class can be made again."""
    if (found := device_error(e, "server")) is not None:
        return ["DeviceError", found.trouble, found.who, found.said]
    if isinstance(e, FedauditError):
        return [type(e).__name__, str(e)]
    return ["RunError", f"{type(e).__name__}: {e}{errors.place_of(e)}"]


def error_of(text: Any) -> FedauditError:
    """Return the error that a process reported, as one of our error classes, found by its name."""
    name, *words = (str(part)[:10_000] for part in text)
    if name == "DeviceError" and len(words) == 3:
        return errors.DeviceError(*words)
    cls = getattr(errors, name, None)
    if isinstance(cls, type) and issubclass(cls, FedauditError) and cls is not errors.DeviceError:
        return cls(" ".join(words))
    return RunError(" ".join(words))


_PLAIN = (
    "rows", "k", "layout", "cut", "rss", "gpu", "private_fits", "brought", "picked", "chose", "alone", "error",
    "detail",
)  # fmt: skip
_BLOBS = ("state", "reply", "released", "tape")


def done_as_frame(done: Done) -> Frame:
    said = {name: getattr(done, name) for name in _PLAIN}
    said["protection"] = {name: of.model_dump() for name, of in done.protection.items()}
    said["entries"] = [entry.model_dump() for entry in done.entries]
    said["spans"] = [dataclasses.asdict(span) for span in done.spans]
    said["fatal"] = None if done.fatal is None else error_as_text(done.fatal)
    blobs = {name: getattr(done, name) for name in _BLOBS if getattr(done, name) is not None}
    said["blobs"] = list(blobs)
    return said, [blob.content() if isinstance(blob, Tape) else blob for blob in blobs.values()]


def done_of(frame: Frame, k: int) -> Done:
    """Return a client's result from what its process sent, after checking that it says only what it may say."""
    said, blobs = frame
    try:
        found: dict[str, Any] = dict(zip(said["blobs"], blobs, strict=True))
        if not found.keys() <= set(_BLOBS) or said["k"] != k:
            raise ValueError("it speaks for somebody else")
        spans = [Span(**span) for span in said["spans"]]
        fatal = None if said["fatal"] is None else error_of(said["fatal"])
        if "tape" in found:
            found["tape"] = Tape(found["tape"])
        plain = {name: said[name] for name in _PLAIN} | found
        protection = {name: Protection(**of) for name, of in said["protection"].items()}
        entries = [LedgerEntry(**entry) for entry in said["entries"]]
        return Done(**plain, protection=protection, entries=entries, spans=spans, fatal=fatal)
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        return Done(k, error=f"its process sent something that is not a result ({type(e).__name__})", lost=True)


# --- the nursery --------------------------------------------------------------------------------------------------


def main() -> None:
    """Import what parties need, then fork for each connection that is handed over; without fork, serve one and end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides, and closes the connection
    control = socket.socket(fileno=int(sys.argv[1]))
    if not sys.argv[2]:
        registry.names("methods")  # a nursery for parties of all methods: each fork has the package's own by then
    for name in (*USUAL, *sys.argv[3:]):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    before = _threads()
    try:
        if sys.argv[2]:
            registry.find(sys.argv[2])
        # A method may compute while it is imported; torch then has threads, and a fork is not safe.
        fork = FORK and _threads() == before
        control.sendall(b"f" if fork else b"o")
    except FedauditError:
        control.sendall(b"e")  # the run then imports the method itself, and reports what is wrong
        return
    _serve_all(control, fork)


def nurse(control: socket.socket) -> None:
    """Be the nursery in a fork of a process that has imported all that parties need and can be forked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.sendall(b"f")
    _serve_all(control, fork=True)


def _serve_all(control: socket.socket, fork: bool) -> None:
    if fork:
        # Nobody waits for the forks: the end of their connection shows that they are done.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        word, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        connection = socket.socket(fileno=fds[0])
        if not fork:
            serve(connection)
            return
        if os.fork() == 0:
            control.close()
            code = 1
            try:
                serve(connection)
                code = 0
            finally:
                os._exit(code)
        connection.close()


def _threads() -> int:
    return len(os.listdir("/proc/self/task")) if FORK else 0


if __name__ == "__main__":
    main()
