"""The run record: the versioned JSON result of one run, validated whenever it is read."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator
from pydantic_core import to_json

from fedaudit.errors import FedauditError, RunError, last_frame
from fedaudit.privacy.ledger import ClientLedger
from fedaudit.privacy.policy import TRAINING
from fedaudit.runtime.attack_result import AnyResult, results
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.meter import Timing
from fedaudit.runtime.scores import Result, Utility
from fedaudit.runtime.seal import seal_again, unseal
from fedaudit.setting import Setting
from fedaudit.stats import check_interval
from fedaudit.stored_model import Delta, Epsilon, Sparse, StoredModel, plain
from fedaudit.wire.release import Release

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
SCHEMA = 1
REFUSED = "the privacy setting does not apply: "  # begins the note in the record of such a run
BESIDE = ("attacks", "audits")  # parts of a record that are kept in files beside it


class FieldTraffic(StoredModel):
    """Bytes of one field of one message in one direction, over the whole run and all clients."""

    direction: Literal["up", "down"]
    field: str
    payload: int = 0  # elements x element size, parameters without buffers: the papers' convention
    buffers: int = 0
    wire: int = 0  # bytes that were really sent


LONG = 240  # letters of an error's text that a sentence about it shows
DROPPED_OUT = "dropped out"  # begins the reason of an absence that the setting asks for
NOT_AWAITED = "the server did not wait for an answer"  # as its strategy has it


class Absence(StoredModel):
    client: int
    ask: int
    reason: str

    @property
    def failed(self) -> bool:
        """Return whether the client failed to answer, and is not absent as setting or strategy have it."""
        return not self.reason.startswith(DROPPED_OUT) and self.reason != NOT_AWAITED


class SumRecord(StoredModel):
    """One sum of clients' updates: who was in it, what scaling did to it, and its noise."""

    ask: int
    fn: str
    invited: int
    stayed: int  # clients whose update is in the sum
    divisor: float  # the sum of the weights, or the public number that a noised sum is divided by
    secure: bool = False
    advertised: int | None = None
    shared: int | None = None
    helped: int | None = None
    neighbours: int | None = None
    threshold: int | None = None  # of a neighbourhood, the members who must help to unmask
    bound: float | None = None  # the largest size of a number in an update
    error: float | None = None  # the most by which scaling to whole numbers moved a number of the mean
    cut_off: int | None = None  # numbers beyond the bound, over all clients; for the auditor only
    clip: float | None = None
    sigma: float | None = None  # deviation of the noise on the sum, or on each update where clients add their own
    where: str | None = None  # who adds it
    within: float | None = None  # the noised share of clients within the clip, by which the next sum's clip moves


class RoundRecord(Sparse):
    optional: ClassVar = ("seeds", "share_s")

    round: int
    participants: list[int]
    absent: list[Absence] = Field(default_factory=list)
    redone: int = 0  # tasks done again, because the process that did them was lost
    up_payload: int
    up_wire: int
    down_payload: int
    down_wire: int
    utility: Utility | None = None
    sums: list[SumRecord] = Field(default_factory=list)
    # Numbers that the method measured about its round, by name.
    diagnostics: dict[str, float] = Field(default_factory=dict)
    wall_s: float  # from the round's beginning to its end, whoever used the time
    # If runs of several seeds took turns: how many there were with this one, and its own part of `wall_s`, which is the
    # time in which it had its turn and its share of what was trained together.
    seeds: int | None = None
    share_s: float | None = None

    @property
    def own_s(self) -> float:
        """Return the seconds that this run's round took, without the time in which other runs had their turn."""
        return self.wall_s if self.share_s is None else self.share_s


class CurvePoint(StoredModel):
    """The bytes sent by the end of an evaluated round, over all clients, and the accuracy reached by then."""

    round: int
    up_payload: int
    up_wire: int
    down_payload: int
    down_wire: int
    accuracy: float | None = None  # the global model's on the common test set; `low` and `high` are its Wilson interval
    low: float | None = None
    high: float | None = None
    # The mean accuracy of the clients' own models on that set; `clients_std`: their standard deviation.
    clients_mean: float | None = None
    clients_std: float | None = None


def curve_of(rounds: list[RoundRecord]) -> list[CurvePoint]:
    """Return accuracy against cumulated bytes: a point per evaluated round. Rounds that were not evaluated sent bytes
    too."""
    sent = dict.fromkeys(("up_payload", "up_wire", "down_payload", "down_wire"), 0)
    curve = []
    for row in rounds:
        sent = {name: total + getattr(row, name) for name, total in sent.items()}
        if row.utility is None:
            continue
        test = row.utility.global_.test if row.utility.global_ else None
        clients = row.utility.clients.global_test if row.utility.clients else None
        curve.append(
            CurvePoint(
                round=row.round,
                **sent,
                accuracy=test.accuracy if test else None,
                low=test.low if test else None,
                high=test.high if test else None,
                clients_mean=clients.mean if clients else None,
                clients_std=clients.std if clients else None,
            )
        )
    return curve


class Guesses(StoredModel):
    """The guesses about pairs of records from which a bound on epsilon follows, and the name of the bound."""

    bound: str
    pairs: int
    made: int
    right: int
    steps: int  # how many steps of the claim's neighbouring relation the records of a pair are apart


# Tests of the noise on what was sent. All others are attacks: they guess about planted records.
NOISE_CHECKS = ("residuals", "clipping", "noise on sums", "masks")
CERTAIN = "exact bounds"  # the method of an audit that is not random: it holds or it does not


class EpsilonAudit(StoredModel):
    """A claimed epsilon held against a lower bound that was found by experiment, or why it was not tried."""

    test: str
    kind: str
    threat: str
    claim: str  # in words: what the epsilon is claimed for
    claim_epsilon: Epsilon
    ledger_epsilon: Epsilon | None  # None if the ledger's entries cannot be composed
    lower_bound: Epsilon
    p_value: float
    trials: int
    confidence: float
    delta: Delta
    # The verdict of this test by itself; epsilon/joint_verdict.py judges all of them together.
    verdict: Literal["refuted", "suspicious", "not refuted", "cannot tell", "not tried"]
    method: str
    how: str
    ceiling: float | None = None  # the largest bound that this number of trials could give; None: not computed
    # The test would notice noise of this multiple of the promised one (see the test's module).
    finds: float | None = None
    seeks: float | None = None  # the test should notice noise of this multiple of the promised one
    tells_at: float | None = None  # the strictest level at which it would notice that; None: not computed
    guesses: Guesses | None = None  # from which the bound follows; None for tests that do not guess, and older records

    @property
    def of_noise(self) -> bool:
        """Say if the bound is what the accounting gives for the noise that was found, and no attack showed it."""
        return self.test in NOISE_CHECKS

    @property
    def bound(self) -> float | None:
        """The lower bound; None where what refutes the claim gives none."""
        return None if self.verdict == "refuted" and self.lower_bound == 0 else self.lower_bound

    @property
    def certain(self) -> bool:
        """Say if this audit is not random, so that no correction for several tests is due to it."""
        return self.method == CERTAIN

    @model_validator(mode="after")
    def _is_possible(self) -> EpsilonAudit:
        """Refuse probabilities outside of 0 to 1, and a bound above the largest that so many trials could give."""
        for name in ("p_value", "confidence"):
            check_interval(name, getattr(self, name), 0.0, 1.0)
        if self.trials and self.ceiling is not None:
            check_interval("lower_bound", self.lower_bound, 0.0, self.ceiling)
        return self


class Declarations(StoredModel):
    """Says whether the declarations of the running code's messages were tested, and for which version of its source."""

    source: str  # digest of the code that ran
    tested: Literal["held", "broken", "another source", "never"]
    tested_source: str | None = None  # digest of the code that was tested
    fedaudit: str | None = None  # the version of fedaudit that tested it
    settings: dict[str, Any] = Field(default_factory=dict)  # the settings of the runs that it was tested in
    twin_sets: int = 0  # how many sets of other records every client was compared with; 0: no client had a twin

    def text(self) -> str:
        """Return this in words."""
        again = "`fedaudit check-method` tests them"
        if self.tested == "never":
            return f"never tested ({again}; source {self.source[:12]})"
        by = f"by fedaudit {self.fedaudit}"
        if self.tested == "another source":
            other = (self.tested_source or "")[:12]
            if ":" in self.source and ":" not in other:  # see source.SCHEME
                return f"tested {by} for a source ({other}) that cannot be compared with {self.source[:12]} ({again})"
            return f"tested {by} for another version of the source ({other}); this is {self.source[:12]} ({again})"
        twins = f"; {self.twin_sets} sets of other records for every client" if self.twin_sets else ""
        return f"tested {by}, for this version of the source ({self.source[:12]}): {self.tested}{twins}"


class TwinFacts(StoredModel):
    """Says which clients had a twin with other records, in how many tasks, and in how many both answered the same."""

    wanted: str = "off"  # as the setting says it
    clients: list[int] = Field(default_factory=list)
    tasks: int = 0
    held: int = 0
    lost: int = 0  # twins whose state was gone when the run was resumed
    differences: list[str] = Field(default_factory=list)
    wall_s: float = 0.0

    def text(self, of: int | None = None) -> str:
        """Return this in words; `of`: with how many clients there are, if some had none."""
        if self.wanted == "off":
            return "no client had a twin (--twins off): that replies follow what the mechanisms let out was not tested"
        some = of is not None and of > len(self.clients)
        who = f"{len(self.clients)} of {of} clients" if some else _clients(len(self.clients))
        said = f"{who} had a twin with other records: {self.held} of {self.tasks} tasks gave the same reply to the bit"
        said += " (--twins all compares every client)" if some else ""
        said += f"; {self.lost} were lost when the run was resumed" if self.lost else ""
        return f"{said}; different: {'; '.join(self.differences)}" if self.differences else said


def _clients(number: int) -> str:
    return f"{number} client{'s' * (number != 1)}"


audits: TypeAdapter[list[EpsilonAudit]] = TypeAdapter(list[EpsilonAudit])


class DataFacts(StoredModel):
    """The sizes of the parts of the data; lists are by client."""

    shape: list[int]
    tokens: int = 0  # for texts: how many token ids there are
    classes: int
    class_names: list[str]
    test: int
    aux: int
    public: int
    members: list[int]
    nonmembers: list[int]
    validation: list[int]
    counts: list[list[int]]  # records of each class
    persons: list[int] = Field(default_factory=list)  # by client, if the guarantee is for persons: how many there are
    most_of_person: int = 1  # the most records of one person that a client holds
    most_clients: int = 1  # the most clients that hold records of one person
    copies: int = 1  # the most exact copies of one record that a client holds; counted in protected runs
    digest: str | None = None  # of all arrays of the data set; None: the record is older than this field


class ModelFacts(StoredModel):
    """An architecture: its parameters, and how many clients have it."""

    parameters: int
    clients: int


class RunRecord(Sparse):
    optional: ClassVar = ("beside",)

    schema_version: Literal[1] = 1
    status: Literal["running", "done", "refused"] = "running"  # refused: the privacy setting does not apply
    setting: Setting
    versions: dict[str, str]
    device: str
    started: str
    finished: str | None = None
    data: DataFacts
    models: dict[str, ModelFacts]
    rounds: list[RoundRecord] = Field(default_factory=list)
    curve: list[CurvePoint] = Field(default_factory=list)  # accuracy against cumulated bytes
    result: Result = Field(default_factory=Result)
    traffic: list[FieldTraffic] = Field(default_factory=list)
    traffic_declared: bool = True
    releases: list[Release] = Field(default_factory=list)
    ledger: list[ClientLedger] = Field(default_factory=list)
    timings: list[Timing] = Field(default_factory=list)
    peak_rss_bytes: int = 0
    peak_gpu_bytes: int = 0
    transcript_digest: str = ""  # over all messages in order: equal digests, equal protocols to the bit
    published: list[str] = Field(default_factory=list)
    attacks: list[AnyResult] = Field(default_factory=list)
    audits: list[EpsilonAudit] = Field(default_factory=list)  # claims of epsilon held against lower bounds
    notes: list[str] = Field(default_factory=list)
    harness: str | None = None  # digest of fedaudit's own code that computes a run
    # Whether the method's were tested; None: the record is older than this field.
    declarations: Declarations | None = None
    twins: TwinFacts | None = None  # None: nothing was promised, so nothing was tested
    code: dict[str, dict[str, str]] | None = None  # digests of the method's modules, and the values it ran with
    idle_policies: list[str] = Field(default_factory=list)  # kinds in setting.privacy that were never released
    beside: list[int] = Field(default_factory=list)  # seeds whose runs took turns with this one, at any time

    @property
    def models_covered(self) -> bool:
        """Return whether the models that are published at the end follow from what the ledger counts.

        A global model does. Clients' models, which are published if a method has no global one, do only if all training
        is private.
        """
        return not self.published or "global.safetensors" in self.published or TRAINING in self.setting.privacy

    @model_validator(mode="before")
    @classmethod
    def _each_client_drew_its_own(cls, raw: Any) -> Any:
        """Fill in the start of a record from before there was a choice: every client had started from a model of its
        own."""
        if isinstance(raw, dict) and isinstance(raw.get("setting"), dict) and "init" not in raw["setting"]:
            return {**raw, "setting": {**raw["setting"], "init": "own"}}
        return raw

    @field_validator("setting")
    @classmethod
    def _asks_for_what_can_be(cls, setting: Setting) -> Setting:
        """Refuse policies whose epsilon or delta is impossible: the tables of a report show them as they are."""
        for kind, policy in setting.privacy.items():
            for name, most in (("epsilon", math.inf), ("delta", 1.0)):
                try:
                    number = float(policy[name])
                except (KeyError, TypeError, ValueError):
                    continue  # it is not given, or a word such as 1/n
                if not 0 <= number <= most:
                    raise ValueError(f"privacy.{kind}.{name} = {number:g} is not a number from 0 to {most:g}")
        return setting

    @model_validator(mode="after")
    def _curve_follows_from_the_rounds(self) -> RunRecord:
        """Give a record from before there was a curve its curve; refuse one whose curve does not follow from its
        rounds."""
        derived = curve_of(self.rounds)
        if self.curve and self.curve != derived:
            raise ValueError("the curve does not follow from the rounds")
        self.curve = derived
        return self

    @property
    def privacy_applies(self) -> bool | None:
        """Return whether any policy of the setting protected anything; None if the setting has none."""
        if not self.setting.privacy:
            return None
        return self.status != "refused" and set(self.idle_policies) != set(self.setting.privacy)

    @property
    def failures(self) -> str:
        """Say how often clients failed to answer, and why the first of them did; empty if none failed.

        A client that failed is not asked again in the round.
        """
        missing = [(row.round, absence) for row in self.rounds for absence in row.absent if absence.failed]
        if not missing:
            return ""
        count, rounds = len(missing), len({t for t, _ in missing})
        t, first = missing[0]
        why = first.reason if len(first.reason) <= LONG else f"{first.reason[: LONG - 1].rstrip()}…"
        often = f"Clients failed to answer {count} time{'s' * (count != 1)}, in {rounds} of {len(self.rounds)} rounds."
        where = "If more is known, it is in errors.log in the run's folder."
        return f"{often} The first: client {first.client} in round {t}: {why.rstrip('.')}. {where}"

    def refuse(self, folder: Path, reason: str) -> None:
        """Record that the privacy setting does not apply to the method, and why. That is a result, not a failure."""
        self.status, self.idle_policies = "refused", sorted(self.setting.privacy)
        self.notes = [REFUSED + reason]
        self.save(folder)

    def save(self, folder: Path) -> None:
        """Write record.json. Attacks and audits lie beside it: a run that goes on must not lose or repeat them."""
        self.saving(folder)()

    def saving(self, folder: Path) -> Callable[[], None]:
        """Return a function that writes the record later, as it is now."""
        text = self.text().encode()
        return lambda: write_atomic(folder / "record.json", text)

    def text(self) -> str:
        """Return the record as JSON, without the parts that lie beside it."""
        return self.model_dump_json(indent=1, exclude=set(BESIDE))

    def bytes(self, direction: str, convention: Literal["payload", "wire"] = "payload") -> int:
        return sum(getattr(row, convention) for row in self.traffic if row.direction == direction)


def read_record(folder: Path | str) -> RunRecord:
    """Return the record of a run folder. Raise RunError for damaged or foreign files."""
    path = Path(folder)
    path = path / "record.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(_no_record(Path(folder))) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise RunError(f"{path} cannot be read: it is not JSON ({e}). Name a folder that `fedaudit run` made.") from e
    except (ValueError, OSError, RecursionError) as e:
        raise RunError(f"{path} cannot be read: {e}. Name a folder that `fedaudit run` made.") from e
    if isinstance(raw, dict) and raw.get("schema_version") != SCHEMA:
        raise RunError(
            f"{path} has schema version {raw.get('schema_version')!r}; this fedaudit reads version {SCHEMA}. "
            "Use the version that wrote it, or run again."
        )
    try:
        record = RunRecord.model_validate(raw)
        record.attacks = _read_beside(path, "attacks", record.transcript_digest, results)
        record.audits = _read_beside(path, "audits", record.transcript_digest, audits)
        return record
    except ValidationError as e:
        raise RunError(f"{path} is not a valid run record: {_first(e)}. Name a folder of `fedaudit run`.") from None
    except DAMAGE as e:
        raise RunError(
            f"{path} is not a valid run record: {type(e).__name__} {str(e)[:200]}. Name a folder of `fedaudit run`."
        ) from None


def _no_record(folder: Path) -> str:
    """Return that a folder holds no run, and what to do: an audit's folder holds runs below it."""
    below = sorted(path.parent for form in ("*/record.json", "*/*/record.json") for path in folder.glob(form))
    if below:
        number = "1 run" if len(below) == 1 else f"{len(below)} runs"
        return f"{folder} holds no run itself, but {number} below it, as an audit does. Name one, such as {below[0]}."
    return f"{folder} holds no run: record.json is missing. `fedaudit run --out {folder}` makes one."


def _first(e: ValidationError) -> str:
    """Return where the first of the errors is, what it is, and the value there."""
    first = e.errors()[0]
    value = first["input"]  # a whole table, if the error is not about one figure
    found = f" (it is {str(value)[:80]})" if isinstance(value, str | int | float) else ""
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}{found}" if place else f"{first['msg']}{found}"


# The errors that reading a part of a record may raise if that part is not what we wrote.
DAMAGE = (
    KeyError, TypeError, AttributeError, ValueError, IndexError, ArithmeticError, StopIteration, RuntimeError,
    AssertionError,
)  # fmt: skip


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn errors from using the free-form parts of a record into a RunError that names `what`.

    Content that is not as we wrote it counts as damage. If the record is as its run left it, the fault is ours, and the
    error says so. If FEDAUDIT_TRACEBACK is set, errors come as they are.
    """
    try:
        yield
    except FedauditError:
        raise
    except DAMAGE as e:
        if os.environ.get("FEDAUDIT_TRACEBACK"):
            raise
        at = last_frame(e)
        found = f"{type(e).__name__} {str(e)[:200]}" + (f", in {at.name}" if at else "")
        if isinstance(what, Path) and _as_left(what):
            raise RunError(
                f"{what} is as its run left it, and fedaudit fails on it ({found}): a bug of fedaudit. Please report "
                "it with what the same command prints under FEDAUDIT_TRACEBACK=1."
            ) from e
        raise RunError(
            f"{what}: a record does not hold what a run leaves ({found}). Run it again in another folder."
        ) from e


def _as_left(folder: Path) -> bool:
    """Return whether a record is what the last checkpoint of its run says, so that nobody has changed it since."""
    try:
        said = json.loads((folder / "checkpoint" / "HEAD.json").read_text())["record"]
        now = json.loads((folder / "record.json").read_text())
        return {k: v for k, v in now.items() if k not in BESIDE} == {k: v for k, v in said.items() if k not in BESIDE}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def save_attacks(folder: Path, transcript_digest: str, found: list[AnyResult]) -> None:
    _save_beside(folder, "attacks", transcript_digest, plain(found))


def save_audits(folder: Path, transcript_digest: str, found: list[EpsilonAudit], seconds: float = 0.0) -> None:
    """Keep audits; a new one takes the place of an earlier one of the same claim by the same test.

    `seconds` is how long all of them took together.
    """
    known = _read_beside(folder / "record.json", "audits", transcript_digest, audits)
    by_claim = {(audit.test, audit.claim): audit for audit in [*known, *found]}
    took = audit_seconds(folder, transcript_digest) | ({found[0].test: round(seconds, 3)} if found else {})
    unseal(folder)
    _save_beside(folder, "audits", transcript_digest, plain([by_claim[key] for key in sorted(by_claim)]), seconds=took)
    seal_again(folder)


def audit_seconds(folder: Path, transcript_digest: str) -> dict[str, float]:
    """Return how long the audits of this very transcript took, by test; empty if nobody noted it."""
    try:
        saved = json.loads((folder / "audits.json").read_text())
        if saved["transcript_digest"] != transcript_digest:
            return {}
        return {str(test): float(took) for test, took in saved.get("seconds", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _save_beside(folder: Path, name: str, transcript_digest: str, found: list[dict[str, Any]], **more: Any) -> None:
    saved = {"transcript_digest": transcript_digest, name: found, **more}
    write_atomic(folder / f"{name}.json", to_json(saved, indent=1))  # json.dumps takes ten times as long if it indents


def _read_beside(record: Path, name: str, transcript_digest: str, of: TypeAdapter[list[T]]) -> list[T]:
    """Return what was found on this very transcript. What was found on an earlier state of it no longer counts."""
    path = record.with_name(f"{name}.json")
    try:
        saved = json.loads(path.read_text())
        return of.validate_python(saved[name] if saved["transcript_digest"] == transcript_digest else [])
    except FileNotFoundError:
        return []
    except ValidationError as e:
        raise RunError(f"{path} cannot be read: {name}.{_first(e)}. Remove it, and {name[:-1]} again.") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OSError) as e:
        raise RunError(f"{path} cannot be read: {e}. Remove it, and {name[:-1]} again.") from e


def versions() -> dict[str, str]:
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions of the packages in use, looked up once: that takes as long as a round of a small run."""
    import torch

    from fedaudit import __version__  # known also in a checkout that is not installed

    found = {"python": platform.python_version(), "platform": f"{sys.platform}-{platform.machine()}"}
    found["cpu"] = _cpu()
    found["fedaudit"] = __version__
    for name in ("torch", "torchvision", "numpy", "safetensors", "opacus", "ray"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


BITS = ("platform", "cpu", "torch", "cuda")  # versions on which the last bits of a result depend


def same_machine_type(a: RunRecord, b: RunRecord) -> bool:
    """Return whether two runs were on one type of machine, where equal settings give equal bits.

    A record from before the processor was recorded is on none.
    """
    known = "cpu" in a.versions and "cpu" in b.versions
    return known and a.device == b.device and all(a.versions.get(name) == b.versions.get(name) for name in BITS)


def _cpu() -> str:
    """Return the processor and the instructions that torch uses on it: with others, the last bits may differ."""
    import torch

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
