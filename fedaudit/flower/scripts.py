"""Apps of Flower's older tutorials: one script that calls `start_server`, and one that calls `start_client`.

Such a script connects to a network and returns when all is over, so an audit cannot be put into it. But everything that
the audit needs is in the call: a strategy, a config, a client. Each script is run up to that call; the client's is run
once for each node.
"""

from __future__ import annotations

import ast
import contextlib
import runpy
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import flwr.client
import flwr.server
from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.server import ServerAppComponents
from flwr.serverapp import ServerApp

from fedaudit.errors import SettingError
from fedaudit.flower.client import partition_of

CLIENTS = ("start_client", "start_numpy_client")
SERVERS = ("start_server",)
STARTERS = (*CLIENTS, *SERVERS, "start_simulation")
PLACES = {"{partition-id}": "partition-id", "{num-partitions}": "num-partitions"}  # in the client script's arguments


@dataclass(frozen=True)
class Start:
    """A call in a script that starts clients, a server or both."""

    path: Path
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.path.name}, line {self.line}, calls {self.name}"


def starts_in(folder: Path) -> list[Start]:
    """Return the calls in the files of a folder that start clients or a server."""
    found = []
    for path in sorted(folder.glob("*.py")):
        with contextlib.suppress(SyntaxError, ValueError, OSError):
            for node in ast.walk(ast.parse(path.read_bytes())):
                called = node.func if isinstance(node, ast.Call) else None
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
                if name in STARTERS:
                    found.append(Start(path, node.lineno, name))  # type: ignore[attr-defined]
    return found


def halves_of(found: Sequence[Start], client_args: str) -> tuple[ClientApp, ServerApp] | None:
    """Return the two halves of scripts; None if there is not one script for each of them."""
    clients = {start.path for start in found if start.name in CLIENTS}
    servers = {start.path for start in found if start.name in SERVERS}
    if len(clients) != 1 or len(servers) != 1 or clients == servers:
        return None
    return (
        ClientApp(client_fn=ScriptClients(clients.pop(), client_args)),
        ServerApp(server_fn=ScriptServer(servers.pop())),
    )


class ScriptServer:
    """A server function that takes strategy and config from a script's call of `start_server`."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, context: Context) -> ServerAppComponents:
        given = started(self.path, [], SERVERS)
        names = ("server", "config", "strategy", "client_manager")
        return ServerAppComponents(**{name: given.get(name) for name in names})


class ScriptClients:
    """A client function that takes each node's client from a run of the client's script.

    A client is kept for its node's later messages, as in a process of its own.
    """

    def __init__(self, path: Path, arguments: str):
        self.path, self.arguments = path, arguments
        self._clients: dict[int, dict[str, Any]] = {}

    def __reduce__(self) -> Any:
        return ScriptClients, (self.path, self.arguments)  # clients stay in their process

    def __call__(self, context: Context) -> Client:
        k = partition_of(context)
        if k not in self._clients:
            words = shlex.split(self.arguments)
            for place, key in PLACES.items():
                words = [word.replace(place, str(context.node_config[key])) for word in words]
            self._clients[k] = started(self.path, words, CLIENTS)
        given = self._clients[k]
        client = given["client_fn"](context) if given.get("client_fn") is not None else given["client"]
        return client if isinstance(client, Client) else client.to_client()


class _Started(BaseException):
    """Ends a script at its call. It is no Exception, which a script might catch."""

    def __init__(self, name: str, options: dict[str, Any]):
        super().__init__(name)
        self.name, self.options = name, options


def started(path: Path, words: Sequence[str], starters: Sequence[str]) -> dict[str, Any]:
    """Run a script up to its call of one of these functions, and return the options of that call."""

    def noting(name: str) -> Any:
        def start(**options: Any) -> None:
            raise _Started(name, options)

        return start

    here = str(path.resolve().parent)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [str(path), *words]))
        stack.enter_context(mock.patch.object(sys, "path", [here, *sys.path]))
        for module, names in ((flwr.client, CLIENTS), (flwr.server, SERVERS)):
            for name in names:
                stack.enter_context(mock.patch.object(module, name, noting(name)))
        why = "it came to its end"
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Started as e:
            if e.name in starters:
                return e.options
            why = f"it called {e.name}"
        except SystemExit as e:
            why = f"it ended with exit code {e.code}"
    said = f" with the arguments {shlex.join(words)!r}" if words else " without arguments"
    raise SettingError(
        f"{path.name} was run{said} and did not call {' or '.join(starters)}: {why}. Give the arguments of a client's "
        "script with --client-args, such as '--partition-id {partition-id}'."
    )
