"""The one gate through which outputs of mechanisms reach a client's task: noised gradients, and noised fields.

In a task that runs by itself the gate lets everything through. For a client that has a twin the gate keeps a copy of
each output (`Recorder`). In the twin's task the outputs are handed over from that copy instead of computed
(`HandedOver`); see `fedaudit.runtime.declarations.twin_client`.

A gate belongs to the thread of its task. It is no attribute of the client: a method cannot see from its client whether
somebody keeps a copy.
"""

from __future__ import annotations

import copy
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.noise_key import NoiseKey
from fedaudit.rng import numpys
from fedaudit.wire.codec import decode_tree, encode_tree
from fedaudit.wire.message import State

T = TypeVar("T")
Step = tuple[dict[str, Tensor], tuple[int, int]]  # a noised gradient; how much of how much is through before it
Released = tuple[Any, list[LedgerEntry]]  # a field as it may leave, and its entries for the ledger
IN_MEMORY = 1 << 26  # bytes of a tape that stay in memory; a longer one goes on in a temporary file
_here = threading.local()


class Tape:
    """Outputs of mechanisms in the order in which they were let out, encoded. It is gone when nobody holds it."""

    def __init__(self, content: bytes = b""):
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY)  # noqa: SIM115 (it is closed when the tape is gone)
        self._file.write(content)

    def add(self, item: Mapping[str, Any]) -> None:
        blob = encode_tree(dict(item), finite=False)
        self._file.write(len(blob).to_bytes(8, "little") + blob)

    def mark(self) -> int:
        return self._file.tell()

    def cut(self, mark: int) -> None:
        """Forget what came after a mark."""
        self._file.seek(mark)
        self._file.truncate()

    def items(self) -> Iterator[bytes]:
        """Yield the encoded outputs, in order."""
        end = self._file.tell()
        self._file.seek(0)
        while self._file.tell() < end:
            yield self._file.read(int.from_bytes(self._file.read(8), "little"))

    def content(self) -> bytes:
        end = self._file.tell()
        self._file.seek(0)
        return self._file.read(end)

    def __reduce__(self) -> tuple[type[Tape], tuple[bytes]]:  # on its way from another process
        return Tape, (self.content(),)


class Outputs:
    """The gate of a task that nobody follows."""

    followed = False  # whether this task is compared with another to the bit

    def __init__(self, key: NoiseKey):
        self.key = key
        self.replay: list[Any] = []  # replaces what `protect` would give back, for the test of declarations
        self.tape: Tape | None = None

    def field(self, where: str, depends: str, value: Any, make: Callable[[], Released]) -> Released:
        """Let out a field that a mechanism protects. `depends` says how it depends on the records."""
        return make()

    def training(self, how: Callable[[], dict[str, str]]) -> Training:
        """Begin a private training. `how` describes what it is told beside the records."""
        return Training()


class Training:
    """The gate of one private training that nobody follows."""

    def restart(self, slot: int = 0, active: list[int] | None = None) -> None:
        """Begin the steps, anew if a stack of them failed. In a stack, say where the client is, and how many are."""

    def step(self, gradient: Mapping[str, Tensor], at: tuple[int, int] = (0, 1)) -> None:
        """Let out the noised gradient of one step. `at` says how much of the training is through before it."""


class Recorder(Outputs):
    """The gate of a client that has a twin: it keeps a copy of what it lets out."""

    followed = True

    def __init__(self, key: NoiseKey):
        super().__init__(key)
        self.tape: Tape = Tape()

    def field(self, where: str, depends: str, value: Any, make: Callable[[], Released]) -> Released:
        released, entries = make()
        # A structure that is billed by itself (which classes there are) is paid for.
        paid = any(entry.noise_multiplier == 0 for entry in entries)
        self.tape.add({"what": where, "of": structure_of(value), "paid": paid, "value": released})
        return released, entries

    def training(self, how: Callable[[], dict[str, str]]) -> Training:
        return _RecordedTraining(self.tape, how())


class _RecordedTraining(Training):
    def __init__(self, tape: Tape, how: dict[str, str]):
        self._tape, self._how, self._mark = tape, how, tape.mark()

    def restart(self, slot: int = 0, active: list[int] | None = None) -> None:
        self._tape.cut(self._mark)
        self._tape.add({"what": "training", "how": self._how, "slot": slot, "active": active or []})

    def step(self, gradient: Mapping[str, Tensor], at: tuple[int, int] = (0, 1)) -> None:
        copied = {name: g.detach() for name, g in gradient.items()}
        self._tape.add({"what": "step", "gradient": copied, "at": list(at)})


class Diverged(BaseException):
    """Ends a twin's task that asks for an output which the client's task did not have there."""


class HandedOver(Outputs):
    """The gate of a twin: it hands over what the client's mechanisms let out."""

    followed = True

    def __init__(self, items: Iterator[bytes], device: torch.device):
        super().__init__(NoiseKey(b""))  # a twin draws no noise
        self._items, self._device = items, device
        self._next: dict[str, Any] | None = None
        self.differences: list[tuple[str, str]] = []  # where the twin came to differ, and how
        # Fields with a row for each record, as they were before any protection.
        self.rows: list[tuple[str, Any]] = []
        self.trainings: list[Trained] = []  # what trainings on the records left behind, for a twin's neighbour
        self.released: list[Any] = []

    def _look(self) -> dict[str, Any]:
        if self._next is None:
            blob = next(self._items, None)
            self._next = {"what": "the end"} if blob is None else decode_tree(blob, device=self._device)
        return self._next

    def _take(self, what: str) -> dict[str, Any]:
        item = self._look()
        if item["what"] != what:
            self.differ(what, f"the client's mechanism let out {item['what']} there")
        self._next = None
        return item

    def differ(self, where: str, how: str) -> None:
        self.differences.append((where, how))
        raise Diverged(f"{where}: {how}")

    def field(self, where: str, depends: str, value: Any, make: Callable[[], Released]) -> Released:
        item, mine = self._take(where), structure_of(value)
        if depends == "record":
            self.rows.append((where, value))
        self.released.append(item["value"])
        if mine != item["of"] and not item["paid"]:
            self.differences.append((where, f"its keys, shapes or types follow the records ({item['of']}, {mine})"))
        return item["value"], []

    def begin(self, how: dict[str, str]) -> dict[str, Any]:
        """Begin a private training and return how it was carried out. It must be told what the client's was told."""
        item = self._take("training")
        if other := [name for name in how if item["how"].get(name) != how[name]]:
            told = ", ".join(f"{name} {item['how'].get(name)}, with other records {how[name]}" for name in other)
            self.differences.append((f"training ({', '.join(other)})", f"it was told {told}"))
        return item

    def gradients(self) -> Iterator[Step]:
        """Yield the noised gradients of a training's steps, as many as the client made, and where each of them is."""
        while self._look()["what"] == "step":
            item = self._take("step")
            done, planned = item["at"]
            yield item["gradient"], (done, planned)

    def trained(self, tensors: Callable[[], list[Tensor]], train: Callable[[], T]) -> T:
        """Carry out a training on the records, and keep what it left behind."""
        result = train()
        left = [t.detach().clone() for t in tensors()]
        self.trainings.append(Trained(result, left, torch.get_rng_state(), random.getstate(), numpys.state()))
        return result

    def finish(self) -> None:
        """Note that the task is over. What the client still let out after that is a difference, too."""
        rest = [self._look()["what"]]
        while self._look()["what"] != "the end":
            self._next = None
        if rest != ["the end"] and not self.differences:
            self.differences.append((rest[0], "the client's mechanism let it out, and the twin did not ask for it"))


@dataclass(frozen=True)
class Trained:
    """What a training left behind: its result, its tensors, and the global generators."""

    result: Any
    tensors: list[Tensor]
    torch_state: Tensor
    python_state: Any
    numpy_state: Any


class Neighbour(HandedOver):
    """The gate of a twin's neighbour, some of whose records are others: it is given all that the twin was given."""

    def __init__(self, twin: HandedOver, device: torch.device):
        super().__init__(iter(()), device)
        self._trainings, self._released = list(twin.trainings), copy.deepcopy(twin.released)

    def field(self, where: str, depends: str, value: Any, make: Callable[[], Released]) -> Released:
        if depends == "record":
            self.rows.append((where, value))
        if not self._released:
            self.differ(where, "the twin's mechanism did not let it out")
        return self._released.pop(0), []

    def trained(self, tensors: Callable[[], list[Tensor]], train: Callable[[], T]) -> T:
        if not self._trainings:
            self.differ("training", "the twin did not train there")
        left = self._trainings.pop(0)
        with torch.no_grad():
            for mine, theirs in zip(tensors(), left.tensors, strict=True):
                mine.copy_(theirs)
        torch.set_rng_state(left.torch_state)
        random.setstate(left.python_state)
        numpys.put_back(left.numpy_state)
        return left.result


def structure_of(value: Any) -> str:
    """Return the keys, shapes and types of a value as text; nothing of its numbers."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, State | Mapping):
        inside = ", ".join(f"{key!r}: {structure_of(item)}" for key, item in value.items())
        return f"{type(value).__name__}{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(map(structure_of, value))}]"
    return type(value).__name__


class _OfTask:
    """Stands for the key of the task in whose thread it is asked."""

    def generator(self, *names: object, device: torch.device | str = "cpu") -> torch.Generator:
        gate = outputs()
        assert gate is not None  # only a client with a gate has this key
        return gate.key.generator(*names, device=device)


OF_TASK = _OfTask()


def outputs() -> Outputs | None:
    """Return the gate of the task in this thread; None outside of a run's tasks."""
    return getattr(_here, "gate", None)


@contextmanager
def gated(gate: Outputs) -> Iterator[None]:
    """Carry out a task with this gate."""
    before = outputs()
    _here.gate = gate
    try:
        yield
    finally:
        _here.gate = before
