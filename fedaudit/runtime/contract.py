"""The contract that every method keeps, as checks that anybody can run on an own method.

`check_declarations` is rule 8 of the privacy rules: swap a client's records after its training, and nothing that was
declared `public`, or `via="model"`, may change by a bit.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fedaudit.errors import ContractError
from fedaudit.runtime.runner import run
from fedaudit.runtime.site import Swap
from fedaudit.runtime.task import Done, Task, run_task
from fedaudit.setting import Setting
from fedaudit.wire.codec import decode, encode_tree, read_header
from fedaudit.wire.message import Up


class SwapEngine:
    """Runs each task four times: as it is; with other records after the last private fit, and with other records for
    all that reads them itself while training has the real ones, where nothing declared `via="model"`, `via="released"`
    or `public()` may change; and with other records from the start, where nothing `public()` may.

    The clients with other records go their own way from ask to ask, so that what they keep in memory is theirs too.
    """

    in_process = True

    def __init__(self) -> None:
        self.compared: set[str] = set()  # fields that had to stay, and did
        self.changed: set[str] = set()  # fields declared via="data" that did change
        self._states: dict[tuple[str, int], bytes | None] = {}  # of the clients with other records

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        for task in tasks:
            done = run_task(task)
            if done.reply is not None:
                self._again(task, done, "late", Swap(done.private_fits), ("model", "released"))
                if not done.brought:  # else training was given what the task read, and the ledger knows
                    self._again(task, done, "outside", Swap(0, in_fit=False), ("model", "released"))
                self._again(task, done, "early", Swap(0), ())
            yield done

    def close(self) -> None:
        pass

    def _again(self, task: Task, done: Done, way: str, swap: Swap, must_stay: tuple[str, ...]) -> None:
        state = self._states.get((way, task.k), task.state)
        replay = None if way == "early" else done.released
        swapped = run_task(dataclasses.replace(task, state=state, swap=swap, replay=replay))
        if swapped.reply is None and way != "late":  # a client with other classes may not fit into this run at all
            self._states.pop((way, task.k), None)
            return
        if done.reply is None or swapped.reply is None:
            raise ContractError(f"{task.fn} failed on client {task.k} once its records were others: {swapped.error}.")
        self._states[way, task.k] = swapped.state
        before, after = decode(done.reply, Up), decode(swapped.reply, Up)
        if type(before) is not type(after):
            raise ContractError(
                f"{task.fn} returns a {type(before).__name__}, and with other records a {type(after).__name__}: which "
                "message comes tells of the records. Return one class, always."
            )
        for name, declared in before.declared().items():
            if declared is None:
                continue
            where = f"{type(before).__name__}.{name}"
            same = _bits(getattr(before, name)) == _bits(getattr(after, name))
            if declared.role == "public" or declared.via in must_stay:
                if not same:
                    said = "public()" if declared.role == "public" else f'via="{declared.via}"'
                    raise ContractError(
                        f"{where} is declared {said}, but it changes with the records that client {task.k} holds"
                        + _WHEN[way].format(fn=task.fn)
                        + ' Declare it private(..., via="data")'
                        + (', or via="model".' if way == "early" else ".")
                    )
                self.compared.add(where)
            elif way == "late" and not same:
                self.changed.add(where)


_WHEN = {
    "late": " after training: {fn} reads them again.",
    "outside": " beside training: {fn} reads them itself.",
    "early": ".",
}


def _bits(value: object) -> str:
    return read_header(encode_tree({"v": value})).digest if not isinstance(value, Tensor) else _tensor_bits(value)


def _tensor_bits(t: Tensor) -> str:
    return read_header(encode_tree(torch.atleast_1d(t).contiguous().view(torch.uint8))).digest


def check_declarations(setting: Setting) -> SwapEngine:
    """Hold a method's declarations against what it does. Returns which fields stayed and which moved."""
    engine = SwapEngine()
    with tempfile.TemporaryDirectory() as folder:
        run(setting, out=Path(folder) / "run", engine=engine)
    return engine
