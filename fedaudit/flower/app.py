"""Reading an app from disk, and running it with the audit.

An app is what `flwr run` takes: a folder with a `pyproject.toml` that names its two halves and its settings. The facts
that an auditor needs are in a table of their own there, or are given when the app is run:

    [tool.fedaudit.flower]
    adapter = "package.module:Class"
    kinds = { "arrays" = "weights", "metrics.num-examples" = "count" }
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedaudit._torchvision import torchvision
from fedaudit.errors import FedauditError, RunError, SettingError, last_frame
from fedaudit.errors import place_of as raised_at
from fedaudit.flower.claims import local_claims
from fedaudit.flower.client import AuditedClientApp, AuditMod, Terms
from fedaudit.flower.in_process_runtime import run_here
from fedaudit.flower.recorder import Recorder
from fedaudit.flower.records import Records
from fedaudit.flower.scripts import halves_of, starts_in
from fedaudit.flower.server import AuditedServerApp
from fedaudit.flower.simulation import lost_workers_replaced
from fedaudit.progress import Watch, unwatched
from fedaudit.registry import check_trusted
from fedaudit.runtime.folder import locked
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.setting import Setting, read_toml

METHOD = "fedaudit.flower.method:FlowerApp"
ERRORS = "errors.log"  # in the run folder: what nodes' and servers' exceptions said


@dataclass(frozen=True)
class App:
    """An app's two halves, its settings, and the kinds of its records."""

    name: str
    client: ClientApp
    server: ServerApp
    config: Mapping[str, Any] = field(default_factory=dict)
    kinds: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None
    client_at: str | None = None  # package.module:attribute, for replaying a client


def read_app(folder: Path, client_args: str = "") -> App:
    """Return the app in a folder, as its pyproject.toml describes it. This imports its code.

    The app may also be two scripts (`fedaudit.flower.scripts`); `client_args` are the arguments of the client's.
    """
    scripts = starts_in(folder)
    values = read_toml(folder / "pyproject.toml") if (folder / "pyproject.toml").exists() or not scripts else {}
    tool = values.get("tool", {})
    try:
        said = tool["flwr"]["app"]
        halves = said["components"]["clientapp"], said["components"]["serverapp"]
    except (KeyError, TypeError):
        if (started := halves_of(scripts, client_args)) is not None:
            ours = _ours(tool)
            with on_path(folder):
                return App(folder.name, *started, {}, ours.get("kinds", {}), ours.get("adapter"))
        if scripts:
            raise SettingError(
                f"{folder} is not a Flower app but a script: {scripts[0]}. The audit can run the halves of an app, or "
                "one script that calls start_server and another that calls start_client. Give the script's client_fn "
                "and strategy to ClientApp(client_fn=...) and ServerApp(config=..., strategy=...), and name both in "
                "pyproject.toml under [tool.flwr.app.components], or call fedaudit.flower.audited with them."
            ) from None
        raise SettingError(
            f"{folder / 'pyproject.toml'} does not describe a Flower app: [tool.flwr.app.components] with clientapp "
            "and serverapp is missing. Add it."
        ) from None
    if client_args:
        raise SettingError("--client-args is for a script that calls start_client. This app has none: leave it out.")
    ours = _ours(tool)
    with on_path(folder):
        client, server = imported(halves[0], ClientApp), imported(halves[1], ServerApp)
    name = values.get("project", {}).get("name", folder.name)
    return App(
        name, client, server, flat(said.get("config", {})), ours.get("kinds", {}), ours.get("adapter"), halves[0]
    )


def _ours(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table [tool.fedaudit.flower] of a pyproject.toml."""
    ours: dict[str, Any] = tool.get("fedaudit", {}).get("flower", {})
    if more := ours.keys() - {"adapter", "kinds"}:
        raise SettingError(
            f"[tool.fedaudit.flower] has {min(more)!r}, which is not a key of it. Choose from adapter and kinds."
        )
    return ours


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config with inner tables flattened as Flower passes them on: names joined by dots."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        made |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return made


@contextlib.contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Make the app's folder importable from now on: its code may import more while it runs, also on Ray's workers."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
    yield


def imported(place: str, cls: type) -> Any:
    """Return the object that `package.module:attribute` names; raise an error if it is not a `cls`."""
    module, _, name = place.partition(":")
    check_trusted(place)
    try:
        code = _module(module)
    except FedauditError:
        raise
    except Exception as e:  # a user's file, which may do anything while it is imported
        missing = isinstance(e, ModuleNotFoundError) and e.name is not None and f"{module}.".startswith(f"{e.name}.")
        if missing or (isinstance(e, ValueError | TypeError) and not module):
            raise SettingError(f"{place!r} cannot be imported: {e}. Write package.module:attribute.") from e
        at = last_frame(e, libraries=False)
        where = f" ({at.filename}, line {at.lineno}: {at.line})" if at else ""
        advice = " Install what it needs." if isinstance(e, ImportError) else ""
        raise SettingError(f"{place!r} fails while it is imported: {type(e).__name__}: {e}{where}.{advice}") from e
    found: Any = getattr(code, name, None) if name else None
    if found is None:
        raise SettingError(f"{module} has no {name!r}, which {place!r} names. Write package.module:attribute.")
    fits = isinstance(found, type) and issubclass(found, cls) if cls is Records else isinstance(found, cls)
    if not fits:
        raise SettingError(f"{place!r} is a {type(found).__name__}, but should be a {cls.__name__}.")
    return found


def _module(name: str) -> Any:
    """Return a module of an app. Beside a torch without CUDA, lend it the repair of torchvision that it may need."""
    try:
        return importlib.import_module(name)
    except RuntimeError as e:
        if "operator torchvision::" not in str(e):
            raise
        torchvision()
        return importlib.import_module(name)


def place_of(records: type[Records]) -> str:
    return f"{records.__module__}:{records.__qualname__}"


def setting_of(
    terms: Terms,
    *,
    name: str,
    nodes: int,
    config: Mapping[str, Any] = MappingProxyType({}),
    client_at: str | None = None,
    keep_weights: int = 10,
) -> Setting:
    """Return the setting of an app's run, with which its folder can be read again."""
    hyper = {
        "app": name,
        "kinds": dict(terms.kinds),
        "config": dict(config),
        "adapter": None if terms.records is None else place_of(terms.records),
        "client": client_at,
    }
    rounds = config.get("num-server-rounds")
    return Setting.make(
        method=METHOD, set=hyper, dataset=name, clients=nodes, partition="the app's own", holdout=0.5, validation=0.0,
        aux=0.0, canaries=terms.canaries, model=name, rounds=rounds if isinstance(rounds, int) else 0,
        privacy=dict(terms.privacy), seed=terms.seed, device="cpu", deterministic=False, onednn="on", engine="serial",
        eval_clients=False, keep_weights=keep_weights,
    )  # fmt: skip


@dataclass(frozen=True)
class Audited:
    """An app's two halves with the audit around them, for any Flower runtime. `record` reads the run's record."""

    client: AuditedClientApp
    server: AuditedServerApp
    folder: Path

    def record(self) -> RunRecord:
        return read_record(self.folder)


def audited(
    client_app: ClientApp,
    server_app: ServerApp,
    *,
    out: Path | str,
    nodes: int,
    kinds: Mapping[str, Any] | None = None,
    privacy: Mapping[str, Any] | None = None,
    adapter: type[Records] | None = None,
    config: Mapping[str, Any] | None = None,
    canaries: int = 0,
    seed: int = 0,
    keep_weights: int = 10,
    name: str = "app",
    client_at: str | None = None,
    watch: Watch | None = None,
    resume: bool = False,
) -> Audited:
    """Return an unchanged app whose messages are all recorded in `out`, metered, and protected by our policies.

    `kinds` names its records (`record_kinds`). `adapter` tells its members (fedaudit.flower.records). `config`
    is the run's config, if the runtime has none. With `resume`, `out` may hold an unfinished run of an app that goes on
    from a state of its own.
    """
    if canaries and adapter is None:
        raise SettingError("Canaries are planted among a node's records, which only an adapter knows. Give an adapter.")
    folder = Path(out)
    terms = Terms(dict(kinds or {}), dict(privacy or {}), adapter, seed, nodes, canaries)
    setting = setting_of(
        terms, name=name, nodes=nodes, config=config or {}, client_at=client_at, keep_weights=keep_weights
    )
    mod = AuditMod(terms)

    def recorder() -> Recorder:
        made = Recorder(folder, setting, terms, watch or unwatched, resume)
        made.local = local_claims(client_app)
        for claim in made.local:
            made.note(claim.text)
        return made

    return Audited(
        AuditedClientApp(client_app, mod, config),
        AuditedServerApp(server_app, recorder, None if config is None else dict(config)),
        folder,
    )


def run_app(
    app: App,
    *,
    out: Path | str,
    nodes: int,
    privacy: Mapping[str, Any] | None = None,
    kinds: Mapping[str, Any] | None = None,
    adapter: str | None = None,
    config: Mapping[str, Any] | None = None,
    canaries: int = 0,
    seed: int = 0,
    keep_weights: int = 10,
    ray: bool = False,
    watch: Watch | None = None,
    resume: bool = False,
) -> RunRecord:
    """Run an app with all its messages recorded: in this process, or in Flower's own simulation on Ray."""
    if unknown_keys := (config or {}).keys() - app.config.keys():
        raise SettingError(
            f"The app has no config {min(unknown_keys)!r}. Choose from {', '.join(app.config) or 'none'}."
        )
    place = adapter or app.adapter
    pair = audited(
        app.client,
        app.server,
        out=out,
        nodes=nodes,
        kinds={**app.kinds, **(kinds or {})},
        privacy=privacy,
        adapter=None if place is None else imported(place, Records),
        config={**app.config, **(config or {})},
        canaries=canaries,
        seed=seed,
        keep_weights=keep_weights,
        name=app.name,
        client_at=app.client_at,
        watch=watch,
        resume=resume,
    )
    with locked(pair.folder):
        try:
            if ray:
                in_simulation(pair, nodes)
            else:
                run_here(pair.server, pair.client, nodes, seed, pair.folder / ERRORS)
        except FedauditError:
            raise
        except Exception as e:  # the app's own server, which may raise anything
            if pair.server.failure is not None:  # a runtime may raise an error of its own for it
                raise pair.server.failure from e
            with open(pair.folder / ERRORS, "a") as log:
                log.write(f"server: {''.join(traceback.format_exception(e))}\n")
            first = _first_cause(e)  # Flower's simulation puts an error of its own around it
            who = "The app's server" if pair.server.begun else "Flower's simulation did not begin the app: it"
            raise RunError(
                f"{who} failed: {type(first).__name__}: {first}{raised_at(first)}. {pair.folder / ERRORS} has the rest."
            ) from e
    if (record := pair.record()).status != "done":
        raise RunError("The runtime ended before the app's server had: its run is not complete. Run the app again.")
    return record


def _first_cause(e: BaseException) -> BaseException:
    """Return the error that an error was raised from, and so on to the first."""
    while e.__cause__ is not None:
        e = e.__cause__
    return e


def in_simulation(pair: Audited, nodes: int) -> None:
    """Run the app in Flower's own simulation on Ray, with one core for each node at a time."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    from flwr.simulation import run_simulation

    with lost_workers_replaced(pair.server.redone):
        run_simulation(
            server_app=pair.server,
            client_app=pair.client,
            num_supernodes=nodes,
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
