"""The contract that every method keeps, as checks that anybody can run on their own method.

`check_declarations` is rule 8 of the privacy rules: swap a client's records after its training, and nothing that was
declared `public`, or `via="model"`, may change by a bit. `try_twins` gives every client twins with several sets of
other records, in a protected run. `check_method` does both, and gives a verdict on each field. `further` is a second
trial, for what a method does to other clients or in later rounds alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedaudit.errors import ContractError, FedauditError, PrivacyError, RunError
from fedaudit.privacy.policy import parse_policy
from fedaudit.privacy.sensitivity import dependence
from fedaudit.privacy.trees import leaves_of
from fedaudit.registry import find
from fedaudit.runtime.code_digest import source_of_method
from fedaudit.runtime.declarations.tested import TestedMethod
from fedaudit.runtime.declarations.twins import LOG
from fedaudit.runtime.method import Method, parts_of
from fedaudit.runtime.run_record import TwinFacts, versions
from fedaudit.runtime.runner import run
from fedaudit.runtime.site import Swap
from fedaudit.runtime.task import Done, Task, run_task
from fedaudit.runtime.world import world_of
from fedaudit.setting import Setting
from fedaudit.wire.codec import decode, encode_tree, read_header
from fedaudit.wire.codec.packing import Blob
from fedaudit.wire.message import Declared, Down, Up


class SwapEngine:
    """Runs each task six times and compares the replies.

    1. The task runs as it is.
    2. It runs with other records after the last private fit. Nothing declared `via="model"`, `via="released"` or
    `public()` may change.
    3. Training has the real records, and whatever else reads records gets other ones. The same fields must stay.
    4. It runs with other records from the start. Nothing declared `public()` may change.
    5. and 6. One record alone is another one, in two places. Of what has a row per record, and of what goes into class
    means, one row may change. Counts may move by what one record counts. The noise is scaled for that.

    The clients with other records go their own way from ask to ask, so that what they keep in memory is theirs too.
    `strict` ends the run at the first thing that is not as declared; otherwise all of them are gathered in `broken`.
    """

    in_process = True

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.broken: dict[str, str] = {}  # what is not as declared, by field or by whatever else told of the records
        self.absent: dict[str, str] = {}  # functions that failed with records of other classes, which a run bills
        self.declared: dict[str, Declared] = {}  # the fields that were sent
        self.compared: set[str] = set()  # fields that had to stay the same
        self.changed: set[str] = set()  # fields declared via="data" that did change
        self._states: dict[tuple[str, int], Blob | None] = {}  # the states of the clients with other records

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        for task in tasks:
            done = run_task(dataclasses.replace(task, watch=True))
            if done.reply is not None:
                self._one(task, done)
                self._again(task, done, "late", Swap(done.private_fits), ("model", "released"))
                if not done.brought:  # otherwise training was given what the task read, and the ledger bills it
                    self._again(task, done, "outside", Swap(0, in_fit=False), ("model", "released"))
                self._again(task, done, "early", Swap(0), ())
            yield done

    def close(self) -> None:
        pass

    def _again(self, task: Task, done: Done, way: str, swap: Swap, must_stay: tuple[str, ...]) -> None:
        state = self._states.get((way, task.k), task.state)
        replay = None if way == "early" else done.released
        swapped = run_task(dataclasses.replace(task, state=state, swap=swap, replay=replay))
        if done.reply is None:
            return
        if swapped.reply is None:
            self._states.pop((way, task.k), None)
            if way == "late":
                self._break(
                    f"{task.fn} (absence)",
                    f"{task.fn} failed on client {task.k} when its records were swapped for others: {swapped.error}.",
                )
            else:  # a client with other classes may not fit into this run at all
                self.absent.setdefault(f"{task.fn} (absence)", f"client {task.k}: {swapped.error}")
            return
        self._states[way, task.k] = swapped.state
        sent = functools.partial(decode, task.message, Down)
        before, after = (decode(reply, Up, answered=sent) for reply in (done.reply, swapped.reply))
        if type(before) is not type(after):
            self._break(
                f"{task.fn} (message class)",
                f"{task.fn} returns a {type(before).__name__}, and with other records a {type(after).__name__}: the "
                "class of the message tells of the records. Always return the same class.",
            )
            return
        for name, declared in before.declared().items():
            if declared is not None:
                where = f"{type(before).__name__}.{name}"
                self.declared[where] = declared
                same = _bits(getattr(before, name)) == _bits(getattr(after, name))
                self._hold(where, declared, same, task, way, must_stay)

    def _one(self, task: Task, done: Done) -> None:
        world = world_of(task.setting)
        n = world.site(task.k).count
        for i in sorted({0, n // 2} if n else ()):
            swap = Swap(done.private_fits, only=i)
            swapped = run_task(dataclasses.replace(task, swap=swap, watch=True))
            if done.reply is None or swapped.reply is None:
                continue
            if (moved := max(map(_moved, done.rows, swapped.rows), default=0)) > 1:
                self._break(f"{task.fn} (class means)", _mixed(f"What {task.fn} gives class_means", task.k, moved))
            before, after = decode(done.reply, Up), decode(swapped.reply, Up)
            for name, declared in before.declared().items():
                per_record = declared is not None and declared.role == "private" and dependence(declared) == "record"
                if per_record and declared is not None and declared.kind not in world.policies and hasattr(after, name):
                    where = f"{type(before).__name__}.{name}"
                    leaves = (leaves_of(getattr(message, name), where) for message in (before, after))
                    moved = max((_moved(_rows(a), _rows(b)) for a, b in zip(*leaves, strict=False)), default=0)
                    if moved > 1:
                        self._break(where, _mixed(where, task.k, moved))
            self._counts(task, done, Swap(done.private_fits, only=i, relabel=True))

    def _counts(self, task: Task, done: Done, swap: Swap) -> None:
        """Check how far counts move if one record and its label are swapped."""
        assert done.reply is not None
        before, policies = decode(done.reply, Up), world_of(task.setting).policies
        names = [
            name
            for name, declared in before.declared().items()
            if declared is not None and declared.role == "private" and dependence(declared) == "histogram"
            if declared.kind not in policies
        ]
        swapped = run_task(dataclasses.replace(task, swap=swap)) if names else done
        if swapped.reply is None or type(after := decode(swapped.reply, Up)) is not type(before):
            return
        for name in names:
            where, declared = f"{type(before).__name__}.{name}", before.declared()[name]
            flat = [
                torch.cat([t.double().flatten() for t in leaves_of(getattr(m, name), where)]) for m in (before, after)
            ]
            far = float((flat[0] - flat[1]).norm()) if flat[0].shape == flat[1].shape else math.inf
            most = math.sqrt(2 if declared is not None and declared.kind == "label_counts" else len(flat[0]))
            if far > most * (1 + 1e-6):
                self._break(
                    where,
                    f"{where} holds counts, but if one record of client {task.k} is replaced, they move by "
                    f"{far:.3g}, and the noise is scaled for {most:.3g}. Count each record once.",
                )

    def _hold(
        self, where: str, declared: Declared, same: bool, task: Task, way: str, must_stay: tuple[str, ...]
    ) -> None:
        if declared.role == "public" or declared.via in must_stay:
            if not same:
                said = "public()" if declared.role == "public" else f'via="{declared.via}"'
                self._break(
                    where,
                    f"{where} is declared {said}, but it changes with the records that client {task.k} holds"
                    + _WHEN[way].format(fn=task.fn)
                    + ' Declare it private(..., via="data")'
                    + (', or via="model".' if way == "early" else "."),
                )
            self.compared.add(where)
        elif way == "late" and not same:
            self.changed.add(where)

    def _break(self, where: str, how: str) -> None:
        if self.strict:
            raise ContractError(how)
        self.broken.setdefault(where, how)


def _mixed(what: str, k: int, moved: int) -> str:
    return (
        f"{what} has a row per record, but if one record of client {k} is replaced, {moved} rows change, and the "
        "noise is scaled for one. Compute each row from its own record alone (a model in evaluation mode)."
    )


def _rows(t: Tensor) -> list[bytes]:
    return [row.reshape(-1).view(torch.uint8).numpy().tobytes() for row in t.detach().cpu().contiguous()]


def _moved(before: Sequence[str | bytes], after: Sequence[str | bytes]) -> int:
    """Return how many rows are not there any more, in whatever order."""
    return sum((Counter(before) - Counter(after)).values())


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
    """Hold a method's declarations against what it does. Return the engine, which says which fields stayed and which
    moved."""
    return _tried(setting, SwapEngine())


def _tried(setting: Setting, engine: SwapEngine) -> SwapEngine:
    engine._states.clear()  # those of another trial
    with tempfile.TemporaryDirectory() as folder:
        run(setting, out=Path(folder) / "run", engine=engine)
    return engine


@dataclasses.dataclass(frozen=True)
class DeclarationVerdict:
    """The verdict on one field, or on something else of a message that could tell of the records."""

    field: str
    declared: str
    verdict: Literal["held", "broken", "pays", "billed", "not sent", "not tried"]
    why: str = ""


@dataclasses.dataclass(frozen=True)
class MethodVerdict:
    method: str
    source: str  # digest of the code that was tried
    fields: tuple[DeclarationVerdict, ...]
    setting: Setting
    twin_sets: int = 0  # how many sets of other records every client was compared with; 0: no client had a twin
    beyond: Setting | None = None  # of the further trial; None: there was none

    @property
    def held(self) -> bool:
        return all(row.verdict != "broken" for row in self.fields)

    @property
    def unseen(self) -> str:
        """Return in words what was tried, and what no such trial sees."""
        trials = [self.setting, *([] if self.beyond is None else [self.beyond])]
        clients, rounds = max(of.clients for of in trials), max(of.rounds for of in trials)
        each = "" if self.beyond is None else ", but not each client in each round"
        return (
            f"Tried: clients 0 to {clients - 1} and rounds 1 to {rounds}{each}. Not seen: what a method does only for "
            f"clients from {clients} on, only in rounds after {rounds}, or only under other settings."
        )

    def entry(self) -> TestedMethod:
        """Return the entry for the file of verdicts beside the code."""
        settings = self.setting.model_dump(include={"set", "dataset", "model", "clients", "rounds", "privacy"})
        if self.beyond is not None:
            settings["further"] = self.beyond.model_dump(include=set(FURTHER))
        by = versions().get("fedaudit", "?")
        fields: dict[str, str] = {row.field: row.verdict for row in self.fields}
        return TestedMethod(
            source=self.source, held=self.held, fields=fields, fedaudit=by, settings=settings, twin_sets=self.twin_sets
        )


def setting_for(method: str, **values: object) -> Setting:
    """Return a setting in which a method is tried in seconds; `set` overrides the method's quick hyper-parameters."""
    quick = {**find(method).quick, **values.pop("set", {})}  # type: ignore[attr-defined, dict-item]
    defaults = {"rounds": 2, "clients": 3, "public": 0.1, "aux": 0.1, "device": "cpu"}
    return Setting.make(**{**defaults, "method": method, "set": quick, **values})


# Of a second trial. With this seed each of the clients is asked, and the last of them in the first and the last round.
# Half of them are asked in a round, so that it takes about as long as the first trial.
FURTHER: dict[str, Any] = {"clients": 6, "rounds": 4, "participation": 0.5, "seed": 4}


def further(setting: Setting) -> Setting | None:
    """Return the setting of a second trial, of more clients and rounds; None if the first has as many of both."""
    enough = setting.clients >= FURTHER["clients"] and setting.rounds >= FURTHER["rounds"]
    return None if enough else setting.model_copy(update=FURTHER)


# The policies of a run in which a method is tried with twins, if nobody names others. One that covers nothing that the
# method releases does nothing.
TRIAL = (
    "training:noise=1,clip=1", "embeddings:eps=1,clip=1", "logits:eps=1,clip=1", "prototypes:eps=1,clip=1",
    "label_counts:eps=1",
)  # fmt: skip
SETS = 3  # of other records: a bit that is read off the records agrees with all of them once in eight clients
TWINS = "(twins)"  # stands for all replies in a protected run
TWINS_FURTHER = "(twins, further)"  # and for those in a further one


def try_twins(setting: Setting, sets: int = SETS, noise_key: Path | None = None) -> list[DeclarationVerdict]:
    """Give every client a twin for each of several sets of other records, and return what became of it.

    Under the setting's policies, or under those of a trial. A method that cannot train under DP-SGD is tried with its
    messages protected.
    """
    trial = dict(map(parse_policy, TRIAL))
    without_training = {kind: policy for kind, policy in trial.items() if kind != "training"}
    for privacy in [setting.privacy] if setting.privacy else [trial, without_training]:
        norm = "group" if "training" in privacy and setting.norm == "keep" else setting.norm
        values = {**setting.model_dump(), "privacy": privacy, "norm": norm, "twins": "all"}
        try:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                record = run(Setting.make(**values), out=out, twin_sets=sets, noise_key=noise_key)
                log = (out / LOG).read_text() if (out / LOG).exists() else ""
        except (PrivacyError, RunError) as e:  # no DP-SGD for this method
            why = str(e)
            continue
        except ContractError as e:  # the run itself refuses this
            return [DeclarationVerdict(TWINS, "structure", "broken", str(e))]
        facts = record.twins or TwinFacts()
        said = f"all clients, {sets} set{'s' * (sets != 1)} of other records each, under {', '.join(privacy)}"
        if not facts.differences:
            how = f"{facts.held} of {facts.tasks} tasks gave the same reply to the bit"
            return [DeclarationVerdict(TWINS, said, "held" if facts.tasks else "not tried", how)]
        fields = dict.fromkeys(row.split(", in ")[0] for row in facts.differences)
        first = next((line.partition(", ")[2] for line in log.splitlines() if line.startswith("round ")), "")
        how = f"it follows the records by another way than through a mechanism ({_cut(first)})"
        rows = [DeclarationVerdict(field, said, "broken", how) for field in fields]
        return [*rows, DeclarationVerdict(TWINS, said, "broken", f"{facts.held} of {facts.tasks} tasks held")]
    return [DeclarationVerdict(TWINS, "a protected run", "not tried", why)]


def _cut(text: str, most: int = 160) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def check_method(setting: Setting, sets: int = SETS, beyond: Setting | None = None) -> MethodVerdict:
    """Return a verdict on each field of each message that a method's clients may send.

    Records are swapped, and all clients have twins with `sets` sets of other records (none if it is 0). `beyond` is the
    setting of a further trial (see `further`), in which twins have one set.
    """
    method: Method = find(setting.method).make(setting.set, setting.preset)  # type: ignore[attr-defined]
    engine = SwapEngine(strict=False)
    rows: list[DeclarationVerdict] = []
    try:
        _tried(setting.model_copy(update={"twins": "off"}), engine)
        beyond = beyond and _tried_further(beyond, engine, rows)
    except ContractError as e:  # the run itself refuses this
        rows.append(DeclarationVerdict("(the run)", "", "broken", str(e)))
    rows += [_verdict(where, declared, engine) for where, declared in sorted(engine.declared.items())]
    structure = {where: how for where, how in engine.broken.items() if where not in engine.declared}
    rows += [DeclarationVerdict(where, "structure", "broken", how) for where, how in structure.items()]
    for where, how in engine.absent.items():
        why = f"it fails with records of other classes ({how}), and a failure after a look is billed"
        rows.append(DeclarationVerdict(where, "structure", "billed", why))
    for where, declared in sorted(_declared_by(method).items()):
        if where not in engine.declared:
            why = "no client sent it in this trial: try other settings"
            rows.append(DeclarationVerdict(where, _said(declared), "not sent", why))
    if sets and all(row.field != "(the run)" for row in rows):
        twins = {row.field: row for row in try_twins(setting, sets)}
        if beyond is not None:
            again = {TWINS_FURTHER if row.field == TWINS else row.field: row for row in try_twins(beyond, 1)}
            twins = {name: dataclasses.replace(row, field=name) for name, row in again.items()} | twins
        for i, row in enumerate(rows):
            if (of_twin := twins.pop(row.field, row)) is not row and row.verdict != "broken":
                rows[i] = dataclasses.replace(of_twin, declared=row.declared)
        rows += twins.values()
    tried = sets if any(row.field == TWINS and row.verdict != "not tried" for row in rows) else 0
    return MethodVerdict(setting.method, source_of_method(method), tuple(rows), setting, tried, beyond)


def _tried_further(setting: Setting, engine: SwapEngine, rows: list[DeclarationVerdict]) -> Setting | None:
    """Hold the declarations against a further trial. Return its setting; None if the method cannot run in it."""
    try:
        _tried(setting.model_copy(update={"twins": "off"}), engine)
    except ContractError:
        raise
    except FedauditError as e:
        words = f"{setting.clients} clients, {setting.rounds} rounds"
        rows.append(DeclarationVerdict("(further trial)", words, "not tried", str(e)))
        return None
    return setting


def _verdict(where: str, declared: Declared, engine: SwapEngine) -> DeclarationVerdict:
    said = _said(declared)
    if where in engine.broken:
        return DeclarationVerdict(where, said, "broken", engine.broken[where])
    if where in engine.compared:
        return DeclarationVerdict(where, said, "held", "the same to the bit with other records")
    moved = "it changes with the records" if where in engine.changed else "it did not change in this trial"
    return DeclarationVerdict(where, said, "pays", f"{moved}, and every release is billed")


def _said(declared: Declared) -> str:
    return "public()" if declared.role == "public" else f'{declared.kind}, via="{declared.via}"'


def _declared_by(method: Method) -> dict[str, Declared]:
    """Return the fields of the messages that the modules of a method define for its clients."""
    found: dict[str, Declared] = {}
    for module in {type(part).__module__ for _, part in parts_of(method, "")}:
        for cls in vars(sys.modules[module]).values():
            if isinstance(cls, type) and issubclass(cls, Up) and cls.__module__ == module:
                found |= {f"{cls.__name__}.{name}": said for name, said in cls.declared().items() if said is not None}
    return found
