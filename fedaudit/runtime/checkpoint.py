"""Where a run keeps its state between rounds, and the one point at which a round becomes a fact.

A client's new state is a new file. `HEAD.json` names the files that count; it is replaced atomically after a round,
so a kill at any instant leaves the last whole round. Memory does not grow with the number of clients.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fedaudit.errors import RunError


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside, sync, rename: readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Store:
    def __init__(self, folder: Path):
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clients: dict[int, str] = {}
        self._head = folder / "HEAD.json"

    def head(self) -> dict[str, Any] | None:
        """The last whole round, or None. Forgets everything after it."""
        head = self.peek()
        if head is not None:
            self._sweep(head["server"])
        return head

    def peek(self) -> dict[str, Any] | None:
        """The last whole round, or None. Changes nothing on disk: for readers beside a run."""
        if not self._head.exists():
            return None
        try:
            head = json.loads(self._head.read_text())
            self.clients = {int(k): name for k, name in head["clients"].items()}
        except (ValueError, KeyError) as e:
            raise RunError(f"{self._head} is damaged ({e}). Start the run anew in another folder.") from e
        return head

    def server(self, name: str) -> bytes:
        return self._read(name)

    def client(self, k: int) -> bytes | None:
        """Client k's last state; None if it was never asked."""
        return self._read(self.clients[k]) if k in self.clients else None

    def put_client(self, k: int, t: int, ask: int, state: bytes) -> None:
        """Client k's state after an ask. It counts for the rest of the round; a kill undoes it."""
        name = f"client-{k:06d}.{t}.{ask}"
        (self.folder / name).write_bytes(state)
        self.clients[k] = name

    def commit(self, t: int, server_state: bytes, facts: dict[str, Any]) -> None:
        """Make round t a fact."""
        name = f"server.{t}"
        (self.folder / name).write_bytes(server_state)
        for file in (name, *(n for n in self.clients.values() if n.split(".")[1] == str(t))):
            with open(self.folder / file, "rb") as handle:
                os.fsync(handle.fileno())
        head = {"round": t, "server": name, "clients": {str(k): v for k, v in self.clients.items()}, **facts}
        write_atomic(self._head, json.dumps(head).encode())
        self._sweep(name)

    def amend(self, **facts: Any) -> None:
        """Change facts of the last whole round, and leave the round as it is."""
        head = json.loads(self._head.read_text())
        write_atomic(self._head, json.dumps({**head, **facts}).encode())

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as e:
            raise RunError(f"The checkpoint misses {name}: {e}. Start the run anew in another folder.") from e

    def _sweep(self, server: str) -> None:
        wanted = {server, self._head.name, *self.clients.values()}
        for file in self.folder.iterdir():
            if file.name not in wanted:
                file.unlink()
