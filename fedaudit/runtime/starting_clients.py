"""A run can start with the clients of another run. They bring what they learned there, and what they spent.

`start = { method = "local", rounds = 1, set = { E = 40 } }` names that other run by what sets it apart. Everything that
makes the clients who they are (data, partition, models, seed) is as in the run itself. The other run lies beside this
one, and is carried out first if it is not there yet. Models and the ledger are taken over. A client's memory and the
server's state begin anew, because they belong to the other method.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedaudit.errors import RunError, SettingError
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.runtime.task import ClientState
from fedaudit.setting import Setting
from fedaudit.wire.codec import decode, encode

# These settings say what a method does in a run; the rest says who the clients are and how a run is carried out.
OWN = ("method", "set", "preset", "start", "privacy", "rounds", "participation", "dropout", "quorum", "server_model",
       "eval_every", "eval_clients", "keep_weights")  # fmt: skip


def first_setting(setting: Setting) -> Setting | None:
    """Return the setting of the run from which this one takes its clients; None: they start untrained."""
    if setting.start is None:
        return None
    if foreign := sorted(setting.start.keys() - set(OWN)):
        raise SettingError(
            f"start.{foreign[0]}: both runs have the same clients, so this is set once, outside start. In start "
            f"choose from: {', '.join(OWN)}."
        )
    shared: dict[str, Any] = setting.model_dump(exclude=set(OWN))
    return Setting.make(**shared, **setting.start)


def take_over(first: Path, record: RunRecord, store: Store) -> RunRecord:
    """Put the clients of the finished run in `first` into `store`, and their ledger into `record`. Return `record`."""
    other = read_record(first)
    if other.status != "done":
        raise RunError(
            f"{first}, whose clients this run starts with, is not finished: {other.status}. Go on with it first."
        )
    if other.models != record.models:
        raise SettingError(
            f"{first} has other models ({', '.join(other.models)}) than the run that starts with its clients "
            f"({', '.join(record.models)})."
        )
    before = Store(first / "checkpoint")
    before.peek()
    for k in sorted(before.clients):
        state = before.client(k)
        assert state is not None  # before.clients lists it
        kept = decode(state, ClientState)
        store.put_client(k, 0, 0, encode(ClientState(kept.model, {}, kept.plain_fits, kept.spent)))
    record.ledger = [client.model_copy(deep=True) for client in other.ledger]
    for client in record.ledger:
        client.reopen()
    record.notes.append(
        f"the clients started as {first.name} left them after {len(other.rounds)} rounds of {other.setting.method}"
    )
    return record
