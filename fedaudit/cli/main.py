"""The command line. Imports wait until a command needs them, so that --help is instant.

A process needs the options of the one command that it was called with. All others are there with their names and first
words alone: to read all options took nearly half of the time of --help.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from fedaudit import __version__
from fedaudit.cli import completion
from fedaudit.cli.help_group import Helped
from fedaudit.cli.options import Json
from fedaudit.cli.output import print_lines
from fedaudit.errors import FedauditError, SettingError, unknown


class _Stopped(Exception):
    """Carries Ctrl-C past typer, which would otherwise end the program itself."""


class _Commands(Helped):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Stopped from None


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
        completes = any(name.endswith("_COMPLETE") for name in os.environ)  # a shell asks for words: by click's rules
        _command(None if completes else frozenset(sys.argv[1:]))()
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


def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"fedaudit {__version__}")
        raise typer.Exit


# --- lists and starters ---------------------------------------------------------------------------------------------

LISTS = ("methods", "attacks", "datasets", "models", "partitions", "mechanisms")


def _lists(incomplete: str) -> list[str]:
    return [name for name in LISTS if name.startswith(incomplete)]


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


# --- all commands -------------------------------------------------------------------------------------------------

# In the order in which --help lists them: modules of this package, and the functions or groups in them.
COMMANDS = {
    "list": ("main", "list_"),
    "init": ("main", "init"),
    "doctor": ("main", "doctor"),
    "run": ("run", "run"),
    "show": ("show", "show"),
    "transcript": ("show", "transcript"),
    "attack": ("audit", "attack"),
    "audit": ("audit", "audit"),
    "report": ("show", "report"),
    "compare": ("show", "compare"),
    "verify": ("verify", "verify"),
    "seal": ("verify", "seal"),
    "comm": ("traffic", "comm"),
    "check": ("traffic", "check"),
    "check-method": ("check_method", "check_method"),
    "reproduce": ("reproduce", "reproduce"),
    "export": ("show", "export"),
    "privacy": ("privacy", "privacy_app"),
    "epsilon": ("epsilon", "epsilon_app"),
    "flower": ("flower", "flower_app"),
}


def _app(whole: Collection[str] | None = None) -> typer.Typer:
    """Return the program. Only the commands in `whole` have their options; None: all of them."""
    made = typer.Typer(
        cls=_Commands,
        help="Privacy and evaluation audits for federated learning.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback(invoke_without_command=True)(top)
    for name, (module, attribute) in COMMANDS.items():
        found = getattr(importlib.import_module(f"fedaudit.cli.{module}"), attribute)
        if whole is None or name in whole:
            if module == "run":  # its options are made of the fields of a setting, which takes a while
                importlib.import_module("fedaudit.cli.run").give_options()
        elif isinstance(found, typer.Typer):
            found = typer.Typer(help=found.info.help)
        else:
            found = _without_options(found)
        if isinstance(found, typer.Typer):
            made.add_typer(found, name=name)
        else:
            made.command(name)(found)
    return made


def _without_options(function: Callable[..., None]) -> Callable[[], None]:
    def nothing() -> None:
        pass

    nothing.__doc__ = function.__doc__
    return nothing


@functools.cache
def _command(whole: Collection[str] | None = None) -> Any:
    """Return the commands. Options are read from the functions' signatures, once per process."""
    return typer.main.get_command(_app(whole))


def __getattr__(name: str) -> Any:
    if name == "app":  # the whole program, for whoever calls it from Python
        globals()["app"] = _app()
        return globals()["app"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if __name__ == "__main__":
    main()
