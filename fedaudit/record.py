"""The run record: the versioned JSON result of one run, validated whenever it is read."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedaudit.config import Setting
from fedaudit.errors import RunError
from fedaudit.privacy.ledger import ClientLedger
from fedaudit.store import write_atomic

if TYPE_CHECKING:
    import torch

SCHEMA = 1


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), ser_json_inf_nan="strings")


class FieldTraffic(Part):
    """Bytes of one field of one message in one direction, over the whole run and all clients."""

    direction: Literal["up", "down"]
    field: str
    payload: int = 0  # elements x element size, parameters without buffers: the papers' convention
    buffers: int = 0
    wire: int = 0  # what was really sent


class Absence(Part):
    client: int
    ask: int
    reason: str


class RoundRecord(Part):
    round: int
    participants: list[int]
    absent: list[Absence] = Field(default_factory=list)
    up_payload: int
    up_wire: int
    down_payload: int
    down_wire: int
    utility: dict[str, Any] | None = None
    wall_s: float


class Release(Part):
    """A field that left clients, as its message declared it, with the protection it had."""

    field: str
    role: str
    kind: str | None = None
    via: str | None = None
    unit: str | None = None
    protection: dict[str, Any] | None = None


class RunRecord(Part):
    schema_version: Literal[1] = 1
    status: Literal["running", "done"] = "running"
    setting: Setting
    versions: dict[str, str]
    device: str
    started: str
    finished: str | None = None
    data: dict[str, Any]
    models: dict[str, dict[str, int]]
    rounds: list[RoundRecord] = Field(default_factory=list)
    result: dict[str, Any] = Field(default_factory=dict)
    traffic: list[FieldTraffic] = Field(default_factory=list)
    traffic_declared: bool = True
    releases: list[Release] = Field(default_factory=list)
    ledger: list[ClientLedger] = Field(default_factory=list)
    timings: list[dict[str, Any]] = Field(default_factory=list)
    peak_rss_bytes: int = 0
    peak_gpu_bytes: int = 0
    transcript_digest: str = ""  # over all messages in order: equal digests, equal protocols to the bit
    published: list[str] = Field(default_factory=list)
    attacks: list[dict[str, Any]] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write record.json. Attacks are kept beside it: a run that goes on must not lose or repeat them."""
        write_atomic(folder / "record.json", self.model_dump_json(indent=1, exclude={"attacks"}).encode())

    def bytes(self, direction: str, convention: Literal["payload", "wire"] = "payload") -> int:
        return sum(getattr(row, convention) for row in self.traffic if row.direction == direction)


def read_record(folder: Path | str) -> RunRecord:
    """The record of a run folder. Damaged or foreign files are an error that says so."""
    path = Path(folder)
    path = path / "record.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(
            f"{folder} holds no run: record.json is missing. `fedaudit run --out {folder}` makes one."
        ) from None
    except (ValueError, OSError) as e:
        raise RunError(f"{path} cannot be read: {e}.") from e
    if isinstance(raw, dict) and raw.get("schema_version") != SCHEMA:
        raise RunError(
            f"{path} has schema version {raw.get('schema_version')!r}; this fedaudit reads version {SCHEMA}. "
            "Use the version that wrote it, or run again."
        )
    try:
        record = RunRecord.model_validate(raw)
        record.attacks = _read_attacks(path.with_name("attacks.json"), record.transcript_digest)
        return record
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{path} is no valid run record: {where}: {first['msg']}.") from None


def save_attacks(folder: Path, transcript_digest: str, results: list[dict[str, Any]]) -> None:
    saved = {"transcript_digest": transcript_digest, "attacks": results}
    write_atomic(folder / "attacks.json", json.dumps(saved, indent=1).encode())


def _read_attacks(path: Path, transcript_digest: str) -> list[dict[str, Any]]:
    """The attacks on this very transcript; those on an earlier state of it no longer count."""
    try:
        saved = json.loads(path.read_text())
        return saved["attacks"] if saved["transcript_digest"] == transcript_digest else []
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise RunError(f"{path} cannot be read: {e}. Remove it, and attack again.") from e


def versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "platform": f"{sys.platform}-{platform.machine()}"}
    for name in ("fedaudit", "torch", "torchvision", "numpy", "safetensors", "opacus", "ray"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
