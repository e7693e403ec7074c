"""The command line. Heavy imports wait until a command needs them, so that --help is instant."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from fedaudit import __version__
from fedaudit.cli.epsilon import epsilon_app
from fedaudit.cli.flower import flower_app
from fedaudit.cli.helped import Helped
from fedaudit.cli.output import (
    chosen_clients,
    print_forecast,
    print_lines,
    print_summary,
    print_table,
    progress_bar,
    wrapped,
)
from fedaudit.cli.reproduce import reproduce
from fedaudit.errors import FedauditError, SettingError, unknown
from fedaudit.kept import plain
from fedaudit.setting import MANY, Setting, nested, parse_pairs, parse_value, read_toml

if TYPE_CHECKING:
    pass


class _Stopped(Exception):
    """Ctrl-C, before the command line's library takes it for the end of the program."""


class _Commands(Helped):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Stopped from None


app = typer.Typer(
    cls=_Commands,
    help="Privacy and evaluation audits for federated learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AS_IS = "On digits too the method's own defaults, where nothing is said of how to train."
Trust = Annotated[bool, typer.Option("--trust", help="Import code outside fedaudit that the run names.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]


@functools.cache
def _command() -> Any:
    """All commands with their options, which are read from the functions' signatures: once in a process."""
    return typer.main.get_command(app)


def main() -> None:
    """Entry point: an expected error is one paragraph and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that is no valid Unicode is still printed
    try:
        if any("\0" in word for word in sys.argv):
            raise SettingError("There is a NUL in the command line, which no name and no number has. Take it out.")
        _command()()
    except FedauditError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except (_Stopped, KeyboardInterrupt):
        print("stopped; the same command begins anew", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        sys.exit(141)
    except OSError as e:  # a folder where a file should be, no permission, a full disk
        print(f"error: {e}.", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"fedaudit {__version__}")
        raise typer.Exit


# --- list ------------------------------------------------------------------------------------------------------

LISTS = ("methods", "attacks", "datasets", "models", "partitions")


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help=" | ".join(LISTS))],
    name: Annotated[str | None, typer.Argument(help="One of them, with all its settings.", show_default=False)] = None,
    as_json: Json = False,
    data_dir: Annotated[str, typer.Option(help="Where data sets lie.")] = ".data",
) -> None:
    """What there is: methods, attacks, datasets, models or partitions, a line each; with a name, all about it."""
    if what not in LISTS:
        raise SettingError(unknown("list", what, LISTS))
    from fedaudit.cli.listing import details, listing, short_rows

    rows = listing(what, data_dir)
    if name is not None:
        known = [row["name"] for row in rows]
        if name not in known:
            raise SettingError(unknown(what.removesuffix("s"), name, known))
        rows = [row for row in rows if row["name"] == name]
    if as_json:
        print(json.dumps(rows, indent=1))
    elif name is not None:
        from fedaudit import registry

        print(details(rows[0], registry.find(name, what) if what in ("methods", "attacks") else None))  # type: ignore[arg-type]
    else:
        short = short_rows([row for row in rows if "+" not in row["name"]])
        print_lines(short, (max(len(row[0]) for row in short),))
        if both := [row["name"] for row in rows if "+" in row["name"]]:
            hosts, parts = (sorted({name.split("+")[i] for name in both}) for i in (0, 1))
            print(f"and HOST+NAME, with hosts {', '.join(hosts)}\n  and names {', '.join(parts)}")
        print(f"{len(rows)} {what}; all about one: fedaudit list {what} NAME")


@app.command()
def init(
    what: Annotated[str, typer.Argument(help="method | attack | suite | ci")],
    path: Annotated[Path | None, typer.Argument(help="The file. Default: a usual name.", show_default=False)] = None,
) -> None:
    """Write a file to begin with, which runs as it is: a method, an attack, a suite, or a gate for your CI."""
    from fedaudit.cli.starters import begin

    for file in begin(what, path):
        print(file)


@app.command()
def doctor(data_dir: Annotated[str, typer.Option(help="Where data sets lie.")] = ".data") -> None:
    """What this machine has of what fedaudit can use. Exit code 1 where a plain run would not work."""
    from fedaudit.cli.doctor import findings

    found = list(findings(data_dir))
    for finding in found:
        print(finding.line())
    if any(finding.fine is False for finding in found):
        raise typer.Exit(1)


# --- run -------------------------------------------------------------------------------------------------------

_SHORT = {"set", "privacy"}  # given by repeated options of their own


def run(
    file: Path | None,
    out: Path | None,
    resume: bool,
    as_is: bool,
    trust: bool,
    as_json: bool,
    set_: list[str],
    privacy: list[str],
    **options: Any,
) -> None:
    """Run one method on one data set, and leave record, transcript and models in a folder.

    Options can also come from a TOML file; the command line wins over the file, the file over the defaults.
    """
    values: dict[str, Any] = {}
    if resume and out is not None and file is None and (out / "setting.json").exists():
        try:
            values = json.loads((out / "setting.json").read_text())
        except (ValueError, RecursionError, OSError) as e:
            raise SettingError(f"{out / 'setting.json'} is damaged ({e}). Name the settings again.") from None
        if not isinstance(values, dict):
            raise SettingError(f"{out / 'setting.json'} is damaged: it holds no table. Name the settings again.")
    of_folder = dict(values)  # nobody typed it: code that it names is imported by the rules of trust
    if file is not None:
        values |= read_toml(file)
    given = {key: value for key, value in options.items() if value is not None}
    named_by_user = file is not None or "method" in given or not values
    values |= given
    if isinstance(values.get("start"), str):
        values["start"] = parse_value(values["start"])
    for key in ("set", "privacy", "start"):
        if not isinstance(values.get(key) or {}, dict):
            raise SettingError(f"{key} = {values[key]!r}: it is a table, [{key}] in the file.")
    values["set"] = _over(values.get("set", {}), nested(parse_pairs(set_)))
    if privacy:
        from fedaudit.privacy.policy import parse_policy

        values["privacy"] = {**values.get("privacy", {}), **dict(parse_policy(text) for text in privacy)}
    if named_by_user and file is None and not as_is:
        values = _first_run(values)
    setting = Setting.make(**values)
    from fedaudit import registry
    from fedaudit.runtime.folder import default_folder
    from fedaudit.runtime.runner import run as run_setting
    from fedaudit.runtime.source import outside_code

    folder = out or default_folder(setting)
    registry.trust(trust)
    by_folder = not named_by_user or bool(outside_code(of_folder, but=given))
    source = registry.read_from(folder) if by_folder else contextlib.nullcontext()
    try:
        with source, progress_bar(f"{setting.method} on {setting.dataset}") as watch:
            record = run_setting(setting, out=folder, resume=resume, watch=watch)
    except KeyboardInterrupt:
        words = shlex.join(["fedaudit", "run", "--out", str(folder), "--resume"])
        print(f"stopped; `{words}` goes on from the last whole round", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        print(record.model_dump_json(indent=1))
    else:
        print_summary(record)
        print(f"Everything is in {folder}")


def _first_run(values: dict[str, Any]) -> dict[str, Any]:
    """On the embedded digits, where nobody said how to train: settings of the method's own with which it learns there.
    What was chosen is printed, and stands in the record as if it had been typed."""
    from fedaudit import registry

    name = values.get("method", Setting.model_fields["method"].default)
    if values.get("dataset", "digits") != "digits" or ":" in name:
        return values
    cls: Any = registry.find(name)
    more: dict[str, Any] = {}
    if cls.needs_public and not values.get("public") and not values.get("public_dataset"):
        more["public"] = 0.2
    if cls.on_digits and not values["set"] and values.get("preset") is None:
        more["set"] = dict(cls.on_digits)
    if more:
        print(f"a first run on digits: {', '.join(f'{k} = {v}' for k, v in more.items())}", file=sys.stderr)
    return {**values, **more}


def _over(table: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The file's table with the command line's values; a table within goes over the file's, key by key."""
    merged = dict(table)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


def _run_signature() -> inspect.Signature:
    """One option per field of `Setting`, with the field's own description: written once, there."""

    def keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    setting_file = typer.Argument(metavar="[SETTING.toml]", help="A file with settings.", show_default=False)
    set_option = typer.Option("--set", metavar="NAME=VALUE", help="A hyper-parameter of the method; repeatable.")
    privacy_option = typer.Option(
        "--privacy", metavar="KIND:...", help="A policy, such as training:eps=8,clip=1; repeatable."
    )
    parameters = [
        keyword("file", Annotated[Path | None, setting_file], None),
        keyword(
            "out", Annotated[Path | None, typer.Option(help="The folder for everything.", show_default=False)], None
        ),
        keyword("resume", Annotated[bool, typer.Option("--resume", help="Go on from the last whole round.")], False),
        keyword("as_is", Annotated[bool, typer.Option("--as-is", help=AS_IS)], False),
        keyword("trust", Trust, False),
        keyword("as_json", Json, False),
        keyword("set_", Annotated[list[str], set_option], []),
        keyword("privacy", Annotated[list[str], privacy_option], []),
    ]
    for name, field in Setting.model_fields.items():
        if name in _SHORT:
            continue
        kind: Any = field.annotation
        if get_origin(kind) is Literal:
            kind = str
        elif type(None) in get_args(kind):
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
            kind = str if get_origin(kind) is dict else kind  # a table, as TOML writes it
        shown = False if field.default is None else str(field.default)
        option = typer.Option(help=_sentence(field.description or ""), show_default=shown)
        parameters.append(keyword(name, Annotated[kind | None, option], None))
    return inspect.Signature(parameters)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if words else ""


run.__signature__ = _run_signature()  # type: ignore[attr-defined]
run.__annotations__ = {p.name: p.annotation for p in run.__signature__.parameters.values()}  # type: ignore[attr-defined]
app.command("run")(run)


# --- show, transcript ------------------------------------------------------------------------------------------


@app.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a folder of runs, as an audit's.")],
    as_json: Json = False,
) -> None:
    """What a run reached and cost; of an audit, a table of its rows."""
    from fedaudit.runtime.folder import check_transcript
    from fedaudit.runtime.run_record import read_record, reading

    of_runs = not (run / "record.json").exists() and run.is_dir() and any(run.glob("*/record.json"))
    if of_runs or (run / "audit.json").is_file() or (run / "runs").is_dir():
        _show_audit(run, as_json)
        return
    record = read_record(run)
    if (run / "transcript").is_dir():
        check_transcript(run, record)
    if as_json:
        print(record.model_dump_json(indent=1))
    else:
        with reading(run):
            print_summary(record)


def _show_audit(folder: Path, as_json: bool) -> None:
    from fedaudit.reports import short
    from fedaudit.runtime.run_record import reading

    with reading(folder):
        print(short.as_json(folder) if as_json else short.table(folder))


@app.command()
def transcript(
    run: RunArgument,
    by: Annotated[str, typer.Option(help="message | field | client | round | entry")] = "field",
    threat: Annotated[str, typer.Option(help="server, peer:k or outsider: show what that one sees.")] = "server",
    as_json: Json = False,
) -> None:
    """What crossed the wire: who sent how much of what."""
    from fedaudit.cli.listing import traffic_table
    from fedaudit.runtime.folder import RunFolder
    from fedaudit.runtime.run_record import reading
    from fedaudit.wire.transcript import Threat

    of = RunFolder(run)
    peer, clients = Threat.parse(threat).peer, of.record.setting.clients
    if peer is not None and peer >= clients:
        raise SettingError(f"--threat {threat}: there is no client {peer}; the run has {clients}, numbered from 0.")
    with reading(run):
        rows = traffic_table(of.transcript.view(threat), by)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        # A message counts once for each of its fields, so that messages by field do not add up.
        total = () if by == "entry" or threat == "outsider" else ("payload", "wire")
        title = f"{run}, by {by}" if threat != "outsider" else f"{run}: sizes and times, all that an outsider sees"
        print_table(rows, title, total=total if by == "field" or not total else ("messages", *total), narrow=True)


# --- attack, audit, report -------------------------------------------------------------------------------------


@app.command()
def attack(
    run: RunArgument,
    attack: Annotated[list[str] | None, typer.Option(help="An attack's name; repeatable. Default: all.")] = None,
    set_: Annotated[list[str], typer.Option("--set", metavar="[ATTACK.]NAME=VALUE", help="An attack's setting.")] = [],  # noqa: B006
    threat: Annotated[str, typer.Option(help="server, active-server, peer:k or outsider.")] = "server",
    client: Annotated[str, typer.Option(help="all, or a client's number.")] = "all",
    again: Annotated[
        bool, typer.Option("--rescore", help="Attack nothing: score and judge anew what earlier attacks left.")
    ] = False,
    trust: Trust = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="All figures, and why an attack did not run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Attack what crossed the wire in a run, and score it with intervals."""
    from fedaudit import registry
    from fedaudit.attack.attack_run import attack_run, rescore
    from fedaudit.cli.attacks import print_attacks
    from fedaudit.registry import names

    registry.trust(trust)
    clients = chosen_clients(client)
    chosen = _with_settings(attack or names("attacks"), parse_pairs(set_))
    if again:
        if attack or set_ or client != "all":
            raise SettingError("--rescore scores anew all that was kept: leave --attack, --set and --client out.")
        results = rescore(run)
    else:
        with progress_bar("attacks") as watch:
            results = attack_run(run, attacks=chosen, threat=threat, clients=clients, watch=watch)
    if as_json:
        print(json.dumps(plain(results), indent=1))
    else:
        print_attacks(results, verbose)


def _with_settings(attacks: list[str], pairs: dict[str, Any]) -> list[dict[str, Any]]:
    """`NAME=VALUE` is for the only attack named; `ATTACK.NAME=VALUE` says which."""
    tables: dict[str, dict[str, Any]] = {name: {"attack": name} for name in attacks}
    for key, value in pairs.items():
        name, dot, setting = key.rpartition(".")
        if not dot and len(attacks) == 1:
            name = attacks[0]
        if name not in tables:
            raise SettingError(
                f"--set {key}=...: which attack? Write --set ATTACK.{setting}=..., of {', '.join(attacks)}."
            )
        tables[name][setting] = value
    return list(tables.values())


@app.command()
def audit(
    suite: Annotated[Path | None, typer.Argument(help="A suite. Default: the quickstart.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(help="The folder for runs and report.")] = Path("audit"),
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Runs at a time, each in a process of its own.")] = 1,
    engine: Annotated[
        str | None, typer.Option(help="auto | serial | stacked | ray, for all runs.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List cells, bytes and time, and run nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run every cell again, whatever is finished.")] = False,
    keep_stale: Annotated[
        bool, typer.Option("--keep-stale", help="Let finished cells count that other code made.")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --dry-run: time a round of each kind.")] = False,
    on: Annotated[str, typer.Option(help="here | ray: cells as processes, or as tasks of a Ray cluster.")] = "here",
    ray_address: Annotated[
        str | None, typer.Option(help="With --on ray: the cluster. Default: one on this machine.", show_default=False)
    ] = None,
) -> None:
    """Run a whole suite, attack it, and report. What is finished is not repeated; after a kill, run it again.

    Exit code 0 if every cell came through and every budget was kept, 1 if not, 2 for a suite that makes no sense.
    """
    from fedaudit.suite.suite_file import read_suite

    what = read_suite(suite)
    if dry_run:
        _forecast(what, out, jobs, engine, measure, force=force, keep_stale=keep_stale)
        return
    from fedaudit.reports.report import write_report
    from fedaudit.suite.scheduler import audit as audit_suite

    try:
        with progress_bar("audit", remaining=False) as watch:
            cells = audit_suite(
                what, out, watch, jobs, engine, force=force, keep_stale=keep_stale, on=_where(on, ray_address),
                ray_address=ray_address,
            )  # fmt: skip
    except KeyboardInterrupt:
        print("stopped; the same command goes on from each run's last whole round", file=sys.stderr)
        raise typer.Exit(130) from None
    errors = {str(cell.folder): cell.error for cell in cells if cell.error}
    pages = write_report(out)  # it lists the cells that failed, which the audit has left word of
    for cell in cells:
        if cell.again is not None:
            print(f"again: {cell.folder}: {cell.again}")
    refused = Counter(f"{c.setting.method}: {c.reason}" for c in cells if c.status == "refused")
    for reason, number in refused.items():
        print(f"does not apply ({number} cells): {reason}")
    for folder, error in errors.items():
        print(f"failed: {folder}: {error}", file=sys.stderr)
    _show_audit(out, as_json=False)
    kept = _budgets_kept(what, [cell.folder for cell in cells if cell.status == "done"])
    print(f"The report is in {pages[0]}")
    if errors or not kept:
        raise typer.Exit(1)


def _where(on: str, ray_address: str | None) -> Any:
    from fedaudit.errors import SettingError, unknown

    if on not in ("here", "ray"):
        raise SettingError(unknown("place for cells", on, ("here", "ray")))
    if ray_address is not None and on != "ray":
        raise SettingError("--ray-address says where a cluster is, and is for --on ray.")
    return on


def _forecast(suite: Any, out: Path, jobs: int, engine: str | None, measure: bool, **how: bool) -> None:
    from fedaudit.suite.forecast import forecast
    from fedaudit.suite.scheduler import make_cells

    forecasts = forecast(make_cells(suite, out, engine), measure, **how)
    print_forecast(forecasts, jobs)


def _budgets_kept(suite: Any, runs: list[Path]) -> bool:
    if not suite.budgets:
        return True
    from fedaudit.suite.budgets import check_budgets

    outcomes = check_budgets(suite.budgets, runs, "budgets of the suite")
    print_table([outcome.row() for outcome in outcomes], "budgets")
    for outcome in outcomes:
        if not outcome.kept:
            print(outcome.message())
    return all(outcome.kept for outcome in outcomes)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of runs.")],
    format: Annotated[str, typer.Option(help="html, md, json, csv, latex; several with commas.")] = "html,md",
    out: Annotated[
        Path | None, typer.Option(help="Where to, with all figures as SVG and PNG. Default: DIR.", show_default=False)
    ] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only rows whose label matches.", show_default=False)
    ] = None,
    columns: Annotated[
        str, typer.Option(help="Columns of the LaTeX table, such as accuracy,epsilon. Default: all.")
    ] = "",
) -> None:
    """Set the runs below a folder side by side: one row per method and privacy setting, over seeds."""
    from fedaudit.reports.report import write_report

    names = list(dict.fromkeys(name.strip() for name in format.split(",") if name.strip()))
    if not names:
        raise SettingError(f"--format {format!r} names no format. Write html, md, json, csv or latex.")
    keys = [key.strip() for key in columns.split(",") if key.strip()]
    for path in write_report(folder, names, out, figures=out is not None, like=rows, columns=keys):
        print(path)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="DIR_A", help="A folder of runs.")],
    after: Annotated[Path, typer.Argument(metavar="DIR_B", help="Another: the later one.")],
    max_drop: Annotated[
        list[str], typer.Option(metavar="COLUMN=AMOUNT", help="A gate: accuracy=2 (points), up=10%; repeatable.")
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """What changed between two folders of runs, and whether it is more than noise.

    Exit code 0 if nothing did, 1 if a figure changed by more than noise (time and memory do not count), 3 if none did
    but one differs and the seeds are too few to tell, 2 where there is nothing to compare. With --max-drop it is about
    those figures alone: 1 if the mean of one became worse by more than allowed, otherwise 0.
    """
    from fedaudit.reports import compare as compare_
    from fedaudit.runtime.run_record import reading

    limits = [compare_.Limit.parse(text) for text in max_drop]
    with reading(f"{before} or {after}"):
        result = compare_.compare(before, after)
    print(compare_.as_json(result) if as_json else wrapped(compare_.as_text(result)))
    if limits:
        broken = [line for limit in limits for line in limit.breaks(result)]
        for line in broken:
            print(f"worse than allowed: {line}", file=sys.stderr)
        raise typer.Exit(1 if broken else 0)
    if result.changed or result.untold:
        raise typer.Exit(1 if result.changed else 3)


# --- communication ---------------------------------------------------------------------------------------------


@app.command()
def comm(
    method: Annotated[str, typer.Argument(help="A method's name, or package.module:Class.")],
    dataset: Annotated[str, typer.Option(help="A data set's name; its files are not needed.")] = "cifar10",
    model: Annotated[str, typer.Option(help="A model, a group, or resnet18:3,resnet34:3,resnet50:4.")] = "resnet18",
    server_model: Annotated[str | None, typer.Option(help="The server's model, where clients differ.")] = None,
    clients: Annotated[int, typer.Option(min=1, max=MANY, help="K.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, max=MANY, help="T.")] = 100,
    participation: Annotated[float, typer.Option(help="Share of clients asked in a round.")] = 1.0,
    public: Annotated[float, typer.Option(help="Share of the records in a public set.")] = 0.0,
    public_dataset: Annotated[str | None, typer.Option(help="Another data set as the public set.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side length of the images.")] = None,
    partition: Annotated[
        str | None, typer.Option(help="Average over partitions such as dirichlet:0.1. Default: records spread evenly.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, max=10_000, help="How many partitions to average over.")] = 30,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="Of the partitions.")] = 0,
    preset: Annotated[str | None, typer.Option(help="The method's published hyper-parameters.")] = None,
    set_: Annotated[list[str], typer.Option("--set", metavar="NAME=VALUE", help="A hyper-parameter; repeatable.")] = [],  # noqa: B006
    compress: Annotated[
        str | None, typer.Option(help="Compression of what clients send: topk:0.1 | int8 | svd:0.95.")
    ] = None,
    convention: Annotated[
        str, typer.Option(help="payload (as papers count) | wire (headers and buffers too)")
    ] = "payload",
    as_json: Json = False,
) -> None:
    """Plan the traffic of a full-size experiment to the byte: no training, no data."""
    from fedaudit.runtime.planned_traffic import plan_traffic

    setting = Setting.make(
        method=method, dataset=dataset, model=model, server_model=server_model, clients=clients, rounds=rounds,
        participation=participation, public=public, public_dataset=public_dataset, image_size=image_size, preset=preset,
        set=nested(parse_pairs(set_)), seed=seed, compress=compress, **({"partition": partition} if partition else {}),
    )  # fmt: skip
    planned = plan_traffic(setting, convention, draws if partition else 0)
    if as_json:
        print(json.dumps(planned, indent=1))
        return
    over = f", mean of {draws} partitions {partition}" if partition else ""
    print_table(planned["fields"], f"{method}, one round of {planned['participants']} clients ({convention}{over})")
    for name in ("up", "down", "total"):
        part = planned[name]
        big = max(planned["total"].values()) >= 1e9
        units = ("GB", "GiB") if big else ("MB", "MiB")
        print(
            f"{name:<6} {part['bytes']:>20,.0f} B over {rounds} rounds = "
            + " = ".join(f"{part[unit]:.2f} {unit}" for unit in units)
            + (f", ± {part['bytes_std'] / part['bytes']:.1%} from one partition to another"
               if part.get("bytes_std") and part["bytes"] else "")
        )  # fmt: skip
    if planned.get("at_most"):
        print(f"at most: how far {compress} shrinks {', '.join(planned['at_most'])} only a run tells")


@app.command()
def check(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or the folder of an audit.")],
    budget: Annotated[Path, typer.Option(help="A TOML file of ceilings and floors.")],
    format: Annotated[str, typer.Option(help="table | github | junit")] = "table",
) -> None:
    """Hold runs against budgets: exit code 0 if all are kept, 1 if not, 2 for a budget that makes no sense."""
    from fedaudit.runtime.run_record import reading
    from fedaudit.suite.budgets import FORMATS, check_runs, github_error

    if format not in FORMATS:
        raise SettingError(unknown("format", format, FORMATS))
    try:
        with reading(", ".join(map(str, runs))):
            outcomes = check_runs(runs, budget)
    except FedauditError as e:
        if format == "github":  # beside the change, not only in a log
            print(github_error("fedaudit", str(e)))
        raise
    if format == "table":
        print_table([outcome.row() for outcome in outcomes], f"{budget}")
        for outcome in outcomes:
            if not outcome.kept:
                print(outcome.message())
    else:
        print(FORMATS[format](outcomes))
    if not all(outcome.kept for outcome in outcomes):
        raise typer.Exit(1)


@app.command("check-method")
def check_method(
    methods: Annotated[
        list[str],
        typer.Argument(metavar="METHOD...", help="Names, package.module:Class, all, or edited."),
    ],
    set_: Annotated[list[str], typer.Option("--set", metavar="NAME=VALUE", help="A hyper-parameter; repeatable.")] = [],  # noqa: B006
    model: Annotated[str, typer.Option(help="The clients' models.")] = "cnn",
    clients: Annotated[int, typer.Option(min=1, max=1000, help="How many clients.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="How many rounds.")] = 2,
    privacy: Annotated[list[str], typer.Option("--privacy", metavar="KIND:...", help="A policy; repeatable.")] = [],  # noqa: B006
    write: Annotated[
        bool, typer.Option("--write", help="Keep the verdict beside the code, for later records.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Test what a method declares of its messages: other records, and nothing that should stay may change by a bit.

    `all` is every registered method, `edited` those without a verdict on their present source. Exit code 0 if all
    declarations held, 1 if one is broken.
    """
    from fedaudit import registry
    from fedaudit.privacy.policy import parse_policy
    from fedaudit.runtime import contract, tested

    given = {"model": model, "clients": clients, "rounds": rounds, "privacy": dict(map(parse_policy, privacy))}
    verdicts: list[contract.MethodVerdict] = []
    for name in tested.chosen(methods):
        verdict = contract.check_method(contract.setting_for(name, set=parse_pairs(set_), **given))
        verdicts.append(verdict)
        path = tested.write(registry.find(name), verdict.entry()) if write else None
        if not as_json:
            word = "held" if verdict.held else "BROKEN"
            print_table([vars(row) for row in verdict.fields], f"{name}, source {verdict.source[:12]}: {word}")
            if path is not None:
                print(f"Kept in {path}")
    if as_json:
        rows = [
            {"method": v.method, **v.entry().model_dump(), "why": {r.field: r.why for r in v.fields}} for v in verdicts
        ]
        print(json.dumps(rows, indent=1))
    if not all(verdict.held for verdict in verdicts):
        raise typer.Exit(1)


# --- privacy ---------------------------------------------------------------------------------------------------

privacy_app = typer.Typer(cls=Helped, help="Calibrate noise, and compose what releases cost.", no_args_is_help=True)
app.add_typer(privacy_app, name="privacy")
app.add_typer(epsilon_app, name="epsilon")
app.add_typer(flower_app, name="flower")
app.command()(reproduce)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN|AUDIT", help="A run folder, or the folder of an audit.")],
    to: Annotated[str, typer.Option(help="tensorboard | mlflow | wandb | junit | csv")],
    out: Annotated[str, typer.Option(help="A folder; junit: a file; mlflow: also the address of a store.")],
    project: Annotated[str, typer.Option(help="mlflow: the experiment; wandb: the project.")] = "fedaudit",
    budget: Annotated[Path | None, typer.Option(help="junit: budgets, whose verdicts stand among the others.")] = None,
) -> None:
    """Write runs for TensorBoard, MLflow or Weights & Biases, their verdicts as JUnit, or their tables as CSV.

    Nothing is sent anywhere: wandb is written offline, mlflow into a folder or the store that was named.
    """
    from fedaudit.reports.export import export as write

    print(write(run, to, out, project=project, budget=budget))


@privacy_app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(max=1e6, help="What the release, or all of them together, may cost.")],
    delta: Annotated[float, typer.Option(help="Failure probability.")],
    sensitivity: Annotated[float, typer.Option(help="L2 sensitivity.")] = 1.0,
    calibration: Annotated[str, typer.Option(help="classical | analytic | total")] = "analytic",
    releases: Annotated[
        int, typer.Option(max=1_000_000_000, help="Releases that together meet epsilon; needs --calibration total.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """The standard deviation of Gaussian noise that meets an epsilon."""
    from fedaudit.privacy.calibration import calibrate as sigma_for

    if releases != 1 and calibration != "total":
        raise SettingError(
            f"--releases {releases} with --calibration {calibration}, which is about one release. With --calibration "
            "total all releases together meet epsilon."
        )
    if calibration not in ("classical", "analytic", "total"):
        raise SettingError(unknown("calibration", calibration, ["classical", "analytic", "total"]))
    sigma = sigma_for(calibration, epsilon, delta, sensitivity, releases)  # type: ignore[arg-type]
    result = {
        "sigma": sigma,
        "noise_multiplier": sigma / sensitivity,
        "epsilon": epsilon,
        "delta": delta,
        "sensitivity": sensitivity,
        "calibration": calibration,
        "releases": releases,
    }
    print(json.dumps(result, indent=1) if as_json else f"sigma = {sigma:.10g}")


@privacy_app.command()
def compose(
    noise_multiplier: Annotated[float, typer.Option(help="sigma / sensitivity.")],
    delta: Annotated[float, typer.Option(help="Failure probability.")],
    releases: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="How many releases, or steps.")] = 1,
    sample_rate: Annotated[float, typer.Option(help="Poisson sampling rate of a step; 1: all records.")] = 1.0,
    as_json: Json = False,
) -> None:
    """What releases cost together, by each accountant."""
    from fedaudit.privacy.accounting import Event
    from fedaudit.privacy.accounting import compose as compose_events

    done = compose_events([Event(noise_multiplier, sample_rate, releases)], delta)
    result = {
        "epsilon_of_record": done.epsilon_of_record,
        "accountant": done.accountant,
        "epsilon": done.by_accountant,
        "delta": delta,
        "relation": "that of the sensitivity" if sample_rate == 1 else "add-or-remove",
        "reason": done.reason,
    }
    if as_json:
        print(json.dumps(result, indent=1))
        return
    print(f"epsilon = {done.epsilon_of_record:.10g} at delta = {delta:g} ({done.accountant})")
    for name, value in done.by_accountant.items():
        print(f"  {name:<22} {value:.10g}")


if __name__ == "__main__":
    main()
