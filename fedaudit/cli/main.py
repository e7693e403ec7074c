"""The command line. Heavy imports wait until a command needs them, so that --help is instant."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedaudit import __version__
from fedaudit.cli import completion
from fedaudit.cli.audit import attack, audit
from fedaudit.cli.check_method import check_method
from fedaudit.cli.epsilon import epsilon_app
from fedaudit.cli.flower import flower_app
from fedaudit.cli.help_group import Helped
from fedaudit.cli.options import Json
from fedaudit.cli.output import print_lines
from fedaudit.cli.privacy import privacy_app
from fedaudit.cli.reproduce import reproduce
from fedaudit.cli.run import run
from fedaudit.cli.show import compare, export, report, show, transcript
from fedaudit.cli.traffic import check, comm
from fedaudit.cli.verify import seal, verify
from fedaudit.errors import FedauditError, SettingError, unknown


class _Stopped(Exception):
    """Carries Ctrl-C past typer, which would otherwise end the program itself."""


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


@functools.cache
def _command() -> Any:
    """Return all commands. Their options are read from the functions' signatures, once per process."""
    return typer.main.get_command(app)


def main() -> None:
    """Run the command line. An expected error prints one paragraph and exits with 2, never with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that is not valid Unicode is still printed
    try:
        if any("\0" in word for word in sys.argv):
            raise SettingError(
                "The command line has a NUL character, which no name and no number may contain. Remove it."
            )
        _command()()
    except FedauditError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except (_Stopped, KeyboardInterrupt):
        print("stopped; run the same command to start again", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has left
        sys.stderr.close()
        sys.exit(141)
    except OSError as e:  # for example a folder in the place of a file, a missing permission or a full disk
        print(f"error: {e}.", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"fedaudit {__version__}")
        raise typer.Exit


# --- lists and starters ---------------------------------------------------------------------------------------------

LISTS = ("methods", "attacks", "datasets", "models", "partitions", "mechanisms")


def _lists(incomplete: str) -> list[str]:
    return [name for name in LISTS if name.startswith(incomplete)]


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help=" | ".join(LISTS), autocompletion=_lists)],
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this one alone, with all its settings.", show_default=False, autocompletion=completion.list_names
        ),
    ] = None,
    as_json: Json = False,
    data_dir: Annotated[str, typer.Option(help="Where data sets lie.")] = ".data",
) -> None:
    """List methods, attacks, datasets, models, partitions or mechanisms; with a NAME, describe that one in full."""
    if what not in LISTS:
        raise SettingError(unknown("list", what, LISTS))
    if what in ("methods", "attacks") and name is None and not as_json:
        from fedaudit.cli.method_list import print_by_family

        print_by_family("methods" if what == "methods" else "attacks")
        return
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
        print(f"{len(rows)} {what}; for one in full: fedaudit list {what} NAME")


@app.command()
def init(
    what: Annotated[str, typer.Argument(help="method | attack | suite | tests | ci")],
    path: Annotated[
        Path | None, typer.Argument(help="The file to write. Default: a usual name.", show_default=False)
    ] = None,
) -> None:
    """Write a starter file that runs as it is: a method, an attack, a suite, tests, or gates for your CI."""
    from fedaudit.cli.starters import begin

    for file in begin(what, path):
        print(file)


@app.command()
def doctor(
    data_dir: Annotated[str, typer.Option(help="Where data sets lie.")] = ".data",
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure the GPU's own rates, too: a few seconds.")] = False,
) -> None:
    """Check what fedaudit can use on this machine. Exit code 1 if a plain run would not work."""
    from fedaudit.cli.doctor import findings, gpu_findings

    found = list(findings(data_dir))
    for finding in found:
        print(finding.line())
    for finding in gpu_findings() if gpu else ():
        found.append(finding)
        print(finding.line(), flush=True)
    if any(finding.fine is False for finding in found):
        raise typer.Exit(1)


# --- all others, in the order in which --help lists them -------------------------------------------------------

for command in (run, show, transcript, attack, audit, report, compare, verify, seal, comm, check):
    app.command()(command)
app.command("check-method")(check_method)
app.command()(reproduce)
app.command()(export)
app.add_typer(privacy_app, name="privacy")
app.add_typer(epsilon_app, name="epsilon")
app.add_typer(flower_app, name="flower")


if __name__ == "__main__":
    main()
