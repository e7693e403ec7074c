"""Settings: one flat, frozen description of a run. The command line overrides the file, the file the defaults."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedaudit.errors import SettingError, did_you_mean
from fedaudit.units import MANY

LARGEST = 1e9  # the largest number in a privacy policy
DEEPEST = 32  # the most levels of tables and lists within each other
LONGEST = 4096  # the most characters in a text


def out_of_bounds(value: Any, depth: int = 0) -> str | None:
    """Return why no setting may hold this value, or None if it may.

    Refused are numbers that are not finite, whole numbers beyond 64 bits, texts that cannot be a file name, and tables
    that are nested too deep.
    """
    match value:
        case int() if not -(1 << 63) <= value < 1 << 63:
            return "a whole number has at most 64 bits"
        case float() if not math.isfinite(value):
            return f"{value} is not finite; give a finite number"
        case str() if len(value) > LONGEST:
            return f"a text of {len(value)} characters, where {LONGEST} are allowed"
        case str() if "\0" in value:
            return "a text with a NUL in it"
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                return "a text that is not valid Unicode"
        case dict() | list() | tuple() if depth >= DEEPEST:
            return f"tables or lists within each other, more than {DEEPEST} deep"
        case dict():
            return next((p for part in (*value, *value.values()) if (p := out_of_bounds(part, depth + 1))), None)
        case list() | tuple():
            return next((p for part in value if (p := out_of_bounds(part, depth + 1))), None)
    return None


def shown(value: Any) -> str:
    """Return a value as text for an error message, cut to about a line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number with more digits than Python prints
        return "what was given"
    return text if len(text) <= 200 else f"{text[:200]}..."


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Setting(Frozen):
    """Everything that a run depends on. Two runs of one setting on one machine give the same bits."""

    method: str = Field("fedavg", description="a name from `fedaudit list methods`, or package.module:Class")
    label: str | None = Field(
        None, min_length=1, max_length=60, pattern=r"^[^\r\n]+$", description="the name of the run's row in reports"
    )
    set: dict[str, Any] = Field(default_factory=dict, description="the method's own hyper-parameters")

    preset: str | None = Field(None, description="the method's hyper-parameters as published for a data set")

    dataset: str = Field(
        "digits",
        description="a name from `fedaudit list datasets`, folder:PATH, npz:PATH, hf:NAME, or package.module:function",
    )
    data_dir: str = Field(".data", description="the folder of the data sets")
    image_size: int | None = Field(None, ge=4, le=4096, description="resize images to this side length")
    clients: int = Field(5, ge=1, le=MANY, description="number of clients, K")
    partition: str = Field("dirichlet:0.5", description="how records are spread: see `fedaudit list partitions`")
    minimum: int = Field(10, ge=2, le=1_000_000_000, description="least number of records for each client")
    holdout: float = Field(0.25, ge=0, lt=1, description="share of a client's records held out as non-members")
    validation: float = Field(0.1, ge=0, lt=1, description="share of a client's records used to choose the round")
    aux: float = Field(0.1, ge=0, lt=1, description="share of all records that no client holds; for attackers")
    public: float = Field(0.0, ge=0, lt=1, description="share of all records that everybody holds: a transfer set")
    public_dataset: str | None = Field(
        None, description="take the transfer set from another data set, without labels (public: a share of it; 0: all)"
    )
    canaries: int = Field(
        0, ge=0, le=MANY, description="pairs of mislabelled records, one of each pair trained on; for epsilon audits"
    )

    model: str = Field(
        "cnn", description="a model, a group such as HtFE-5, resnet18:3,resnet34:2, or package.module:Class"
    )
    server_model: str | None = Field(None, description="the server's model, if the clients' models differ")

    init: Literal["common", "own"] = Field(
        "common",
        description="common: equal architectures start with equal weights, the server's too; own: each client differs",
    )
    norm: Literal["keep", "group"] = Field("keep", description="group: GroupNorm instead of batch norm, for DP-SGD")

    start: dict[str, Any] | None = Field(
        None, description='start with the clients of another run: { method = "local", rounds = 1 }'
    )
    rounds: int = Field(10, ge=0, le=MANY, description="communication rounds, T")
    participation: float = Field(1.0, gt=0, le=1, description="share of clients asked in a round")
    dropout: float = Field(0.0, ge=0, lt=1, description="probability that a client fails to answer an ask")
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed", description="fixed: that many clients a round; poisson: each one by itself, with that probability"
    )
    aggregate: Literal["plain", "secure"] = Field(
        "plain", description="secure: the server learns sums of clients' updates, and no single one"
    )
    threshold: float = Field(
        0.6, gt=0, le=1, description="secure: share of a round's clients that must stay until the sum is unmasked"
    )
    update_bound: float = Field(
        8.0, gt=0, le=LARGEST, description="secure: largest change of a number in an update; more is cut off"
    )
    quorum: float = Field(0.5, gt=0, le=1, description="share of a round's clients that must answer")
    privacy: dict[str, Any] = Field(default_factory=dict, description="a privacy policy for each kind of release")
    compress: str | None = Field(
        None,
        description="compress what clients send, after the noise: topk:0.1 (a share), int8, svd:0.95 (energy)",
    )

    seed: int = Field(0, ge=0, lt=1 << 63, description="the seed of everything random")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    deterministic: bool = Field(True, description="refuse operations whose results vary between runs")
    threads: int = Field(1, ge=1, le=1024, description="threads for one party's computation, equal on all engines")
    onednn: Literal["auto", "on", "off"] = Field("auto", description="oneDNN on CPUs; auto: off for tiny images on ARM")
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32", description="for products and convolutions; tf32 on a GPU keeps 11 bits of each factor, bf16 8"
    )
    channels_last: bool = Field(False, description="store images and convolutions with channels innermost")
    step: Literal["auto", "eager", "recorded", "compiled"] = Field(
        "auto", description="training step on a GPU; auto: recorded (equals eager); compiled: rounding may differ"
    )
    engine: Literal["auto", "serial", "stacked", "ray"] = Field(
        "auto", description="where clients' tasks run; auto: stacked (trained together) on a GPU, serial on a CPU"
    )
    isolate: bool = Field(
        False, description="run each client in a process with its own records only, the server in one without records"
    )
    twins: str = Field(
        "auto", description="clients beside which a twin with other records runs: auto, all, off, or a number"
    )
    together: int = Field(32, ge=1, le=MANY, description="stacked: the most clients in one stack")
    workers: int | None = Field(None, ge=1, le=4096, description="ray: tasks at a time (default: one per core)")
    gpu_fraction: float = Field(0.0, ge=0, le=1, description="ray: share of a GPU that a task takes")
    ray_address: str | None = Field(None, description="ray: an existing cluster")

    eval_every: int = Field(1, ge=1, le=MANY, description="evaluate every so many rounds, and after the last one")
    eval_clients: bool = Field(True, description="also evaluate the model that each client would deploy")
    keep_weights: int = Field(10, ge=0, le=MANY, description="rounds for which the transcript keeps model states")
    flops: bool = Field(False, description="count floating-point operations (slower)")

    @field_validator("*", mode="before")
    @classmethod
    def _within_bounds(cls, value: Any) -> Any:
        if problem := out_of_bounds(value):
            raise ValueError(problem)
        return value

    @field_validator("privacy")
    @classmethod
    def _finite(cls, privacy: dict[str, Any]) -> dict[str, Any]:
        for kind, policy in privacy.items():
            for key, value in policy.items() if isinstance(policy, dict) else ():
                if isinstance(value, int | float) and not abs(value) <= LARGEST:  # nan, too
                    raise ValueError(f"{kind}.{key} = {value} is out of range: at most {LARGEST:g}")
        return privacy

    @field_validator("twins", mode="before")
    @classmethod
    def _known_twins(cls, value: Any) -> Any:
        text = str(value) if type(value) is int else value
        if not isinstance(text, str) or not (text in ("auto", "all", "off") or text.isdecimal()):
            raise ValueError("choose from auto, all, off, or a number of clients")
        return text

    @field_validator("compress")
    @classmethod
    def _known_compression(cls, text: str | None) -> str | None:
        if text is not None:
            parse_compression(text)
        return text

    @classmethod
    def make(cls, /, **values: Any) -> Setting:
        return validated(cls, values, "setting")

    def rounding(self) -> dict[str, Any]:
        """Return the options that change rounding and differ from the usual. A setting's key holds only those."""
        parts: dict[str, Any] = {"precision": self.precision, "channels_last": self.channels_last, "step": self.step}
        usual = {"precision": ("float32",), "channels_last": (False,), "step": ("auto", "eager", "recorded")}
        return {name: value for name, value in parts.items() if value not in usual[name]}


LEAST_SHARE = 1e-4  # the least share of a tensor's numbers that top-k may keep


def parse_compression(text: str) -> tuple[str, float | None]:
    """Return a compression's name and its number: ("topk", 0.1), ("int8", None), ("svd", 0.95).

    Raise ValueError for any other text.
    """
    name, colon, number = text.partition(":")
    bounds = {"topk": (LEAST_SHARE, "the share of numbers that are kept"), "svd": (0.0, "the energy that is kept")}
    if name == "int8" and not colon:
        return name, None
    if name in bounds and colon:
        least, what = bounds[name]
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if least <= value < 1 and value > 0:
            return name, value
        raise ValueError(f"{what} is a number from {least:g} to below 1, as in {name}:{0.1 if least else 0.95}")
    raise ValueError("choose from topk:SHARE (topk:0.1), int8 and svd:ENERGY (svd:0.95)")


# These options say where or how a run is carried out, and how it is called. They do not change its result.
# (One engine, stacked, rounds differently: a setting's key and a resumed run tell it from the others.)
EXECUTION = ("label", "data_dir", "engine", "isolate", "twins", "together", "workers", "gpu_fraction", "ray_address")
# These options change nothing but rounding: `Setting.rounding` says when.
ROUNDING = ("precision", "channels_last", "step")


def validated(cls: type, values: dict[str, Any], what: str) -> Any:
    """Build and return a pydantic model. Its errors become one `SettingError` with each key, cause and remedy."""
    try:
        return cls(**values)
    except ValidationError as e:
        known = cls.model_fields  # type: ignore[attr-defined]
        lines = []
        for error in e.errors():
            key = ".".join(str(part) for part in error["loc"])
            if error["type"] == "extra_forbidden":
                lines.append(f"Unknown {what} {key!r}.{did_you_mean(key, known)}")
            else:
                lines.append(f"{what} {key} = {shown(error.get('input'))}: {error['msg'].lower()}.")
        raise SettingError("\n".join(lines)) from None


def read_toml(path: Path | str) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise SettingError(f"There is no file {path}. Check the path.") from None
    except (ValueError, RecursionError) as e:  # not TOML, not text, a number of 5,000 digits, endless brackets
        raise SettingError(f"{path} is not valid TOML: {e}.") from None
    if problem := out_of_bounds(values):
        raise SettingError(f"{path}: {problem}.")
    return values


def read_values(path: Path | str) -> dict[str, Any]:
    """Return the table in a file: TOML, or JSON as a run leaves it in setting.json."""
    path = Path(path)
    if path.is_dir():
        raise SettingError(f"{path} is a folder. --from {path} runs the setting of the run in it again.")
    return read_json(path) if path.suffix == ".json" else read_toml(path)


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise SettingError(f"There is no file {path}. Check the path.") from None
    except (ValueError, RecursionError, OSError) as e:
        raise SettingError(f"{path} is not valid JSON: {str(e)[:200]}.") from None
    if not isinstance(values, dict):
        raise SettingError(f"{path} does not hold a table. Name a setting.json that a run left.")
    if problem := out_of_bounds(values):
        raise SettingError(f"{path}: {problem}.")
    return values


def parse_value(text: str) -> Any:
    """Return a value as TOML reads it. Any other text is a string, so a command line needs no quotes."""
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as e:  # a number of 5,000 digits, endless brackets
        raise SettingError(f"{shown(text)} is not a valid value: {e}.") from None
    if problem := out_of_bounds(value):
        raise SettingError(f"{shown(text)} is not a valid value: {problem}.")
    return value


def parse_pairs(pairs: list[str]) -> dict[str, Any]:
    """Return pairs such as `["E=5", "eta=0.1"]` as a dict."""
    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise SettingError(f"--set {pair!r}: write NAME=VALUE, for example --set E=5.")
        values[key.strip()] = parse_value(text.strip())
    return values


def nested(pairs: dict[str, Any]) -> dict[str, Any]:
    """Return `{"host.E": 1}` as `{"host": {"E": 1}}`, because a part of a method has settings of its own."""
    values: dict[str, Any] = {}
    for key, value in pairs.items():
        *path, last = key.split(".")
        table = values
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise SettingError(
                    f"--set {key}=...: {part} was set to {shown(table)} before, which has no parts. Leave out one of "
                    "the two."
                )
        table[last] = (
            {**table[last], **value} if isinstance(value, dict) and isinstance(table.get(last), dict) else value
        )
    return values
