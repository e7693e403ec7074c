"""The client's side of an audit: a mod that protects what leaves a node and tells the auditor how.

It is outside all mods of the app, Flower's own DP mods included. So it protects and records exactly what the app would
have sent.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity
from pydantic import Field as Of
from torch import Tensor

from fedaudit.errors import FedauditError, PrivacyError, RunError, place_of
from fedaudit.flower.messages import AUDIT, Field, fields_of, replaced, tensor_of, ups
from fedaudit.flower.record_kinds import Names, app_policies
from fedaudit.flower.records import Records
from fedaudit.flower.secure_sums import typed
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism import protect
from fedaudit.privacy.sensitivity import Context as Release
from fedaudit.stored_model import AsGiven
from fedaudit.wire.message import State, Up
from fedaudit.wire.release import Protection

RUN_ID = 1  # the id of a run in this process
ROLL_CALL = "query.fedaudit_roll_call"  # asks a node for its number; the mod answers it, and the app never sees it
PARTITION = "partition-id"
FAILED = "failed"  # the text of an error of the audit itself, with which the server's side ends the run
Next = Callable[[Message, Context], Message]


class Told(AsGiven):
    """The facts on one reply that a node's mod tells the auditor: mechanisms' parameters and ledger entries."""

    wall_s: float
    n: int | None = None  # number of the node's records, if an adapter tells
    protection: dict[str, Protection] = Of(default_factory=dict)
    entries: list[LedgerEntry] = Of(default_factory=list)


@dataclass(frozen=True)
class Terms:
    """The settings that both sides of an audit share."""

    kinds: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    records: type[Records] | None = None
    seed: int = 0
    partitions: int = 0  # number of all nodes
    canaries: int = 0

    def count(self, k: int) -> int | None:
        """Return how many records node k trains on; None if no adapter tells."""
        return None if self.records is None else len(self.trained_on(k)[1])

    def trained_on(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the records and labels that node k trains on, planted canaries included."""
        from fedaudit.flower.records import federation_of

        assert self.records is not None
        key = (self.records, self.partitions, self.canaries, self.seed)
        if key not in _federations:
            _federations.clear()
            _federations[key] = federation_of(self.records(), self.partitions, self.canaries, self.seed, "app")
        return _federations[key].members(k)


_federations: dict[tuple[Any, ...], Any] = {}  # a cache of the last federation


class AuditMod:
    """The Flower mod of an audit, for `ClientApp(mods=[...])` or around a whole app."""

    def __init__(self, terms: Terms):
        self.terms = terms
        self.names, self.policies = Names(terms.kinds), app_policies(terms.privacy)

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        k = partition_of(context)
        asked = message.content
        kind = typed(message.metadata.message_type, asked)  # read now: the app's mods take entries out of the request
        before = {r: _state(v) for r, v in asked.items() if isinstance(v, ArrayRecord)} if self._updates else {}
        begun = time.perf_counter()
        with self._planted(k):
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        wall = time.perf_counter() - begun
        try:
            return self._told(kind, reply, before, k, wall, context)
        except FedauditError:
            raise
        except Exception as e:  # an adapter's error or our own: neither may look like a failure of the app
            raise RunError(f"the audit of its reply failed: {type(e).__name__}: {e}{place_of(e)}") from e

    def _told(
        self, kind: str, reply: Message, before: Mapping[str, State], k: int, wall: float, context: Context
    ) -> Message:
        """Protect the reply in place, and return it with the facts for the auditor in it."""
        content = RecordDict(dict(reply.content))  # a copy: the reply may be the request itself, which others hold
        reply.content = content
        n = self.terms.count(k)
        protection, entries = self._protect(content, before, kind, k, n, context)
        told = Told(wall_s=wall, n=n, protection=protection, entries=entries)
        content[AUDIT] = ConfigRecord({"told": told.model_dump_json()})
        return reply

    @property
    def _updates(self) -> bool:
        return any(named.update for named in self.names.said.values())

    @contextlib.contextmanager
    def _planted(self, k: int) -> Iterator[None]:
        """Make the node train on its records with its canaries, if there are canaries."""
        if not self.terms.canaries:
            yield
            return
        assert self.terms.records is not None  # checked before the run
        with self.terms.records().serving(*self.terms.trained_on(k)):
            yield

    def _protect(
        self,
        content: RecordDict,
        before: Mapping[str, State],
        message_type: str,
        k: int,
        n: int | None,
        context: Context,
    ) -> tuple[dict[str, Protection], list[LedgerEntry]]:
        """Clip the content and add noise in place. Return the protection by field and the ledger entries."""
        fields, _ = fields_of(content, self.names, message_type)
        asked, spent = _remembered(context)
        reply = ups([_as_updates(fields, before)], message_type)[0]
        assert isinstance(reply, Up)
        told = Release(
            key=(self.terms.seed, f"client {k}", "flower", asked),
            n=self._n(n, k),
            policies=self.policies,
            releases=lambda kind: None,
            images=_no_records,
            encode=_no_records,
            spent=spent,
        )
        out, protection, entries = protect(reply, told)
        changed = {name: getattr(out, name) for name in fields if getattr(out, name) is not getattr(reply, name)}
        for name, value in changed.items():
            if (named := fields[name].named) is not None and named.update:
                start = _before(fields[name].record, before)
                assert start is not None  # checked where the update was made
                changed[name] = value.like({key: start[key] + t for key, t in value.items()})
        replaced(content, fields, changed)
        context.state[AUDIT] = ConfigRecord({"asked": asked + 1, "spent": json.dumps(told.spent)})
        return protection, entries

    def _n(self, n: int | None, k: int) -> int:
        """Return the number of records for delta = 1/n; -1 if unknown, because an unchecked count is never free."""
        if n is None and any(policy.delta == "1/n" for policy in self.policies.values()):
            raise PrivacyError(
                f"delta = '1/n' needs the number of records of node {k}, which is unknown. Set a number such "
                "as delta = 1e-5, or give an adapter that tells the members."
            )
        return -1 if n is None else n


def _as_updates(fields: Mapping[str, Field], before: Mapping[str, State]) -> dict[str, Field]:
    """Return the fields, with those that are protected as updates replaced by their differences from the request."""
    made = dict(fields)
    for name, field_ in fields.items():
        if field_.named is None or not field_.named.update:
            continue
        start = _before(field_.record, before)
        if start is None or list(start) != list(field_.value):
            raise PrivacyError(
                f"{field_.record}: update = true is for an array record that the request has, too, with the same "
                "names. Remove it here."
            )
        if odd := [key for key, t in field_.value.items() if not t.is_floating_point()]:
            raise PrivacyError(
                f"{field_.record}: {odd[0]!r} holds whole numbers, to which Gaussian noise cannot be added. "
                "Leave out update = true."
            )
        difference = field_.value.like({key: t - start[key] for key, t in field_.value.items()})
        made[name] = _Update(field_.record, field_.key, difference, field_.named, field_.wire)
    return made


def _before(record: str, before: Mapping[str, State]) -> State | None:
    """Return the arrays of the request that a record of the reply is an update of: by its name, or the only ones.

    Flower's older API calls them `fitins.parameters` in the request and `fitres.parameters` in the reply.
    """
    return before.get(record, next(iter(before.values())) if len(before) == 1 else None)


class _Update(Field):
    @property
    def declared(self) -> Any:
        assert self.named is not None
        return self.named.declared()


def _state(record: ArrayRecord) -> State:
    return State({name: tensor_of(array) for name, array in record.items()})


def _remembered(context: Context) -> tuple[int, dict[str, int]]:
    """Return how many messages this node has answered and its releases by kind, which Flower keeps in the context."""
    kept: Any = context.state.get(AUDIT)
    return (0, {}) if kept is None else (int(kept["asked"]), json.loads(kept["spent"]))


def _no_records(*_: Any) -> Any:
    raise PrivacyError("The random-pixel sensitivity needs the images, which an app does not show. Use clip=C.")


def identify() -> None:
    """Set this process's identity for Flower, which signs messages with it, as no runtime of Flower has set one."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SUPERLINK_NODE_ID


def partition_of(context: Context) -> int:
    return int(context.node_config.get(PARTITION, -1))


class AuditedClientApp(ClientApp):
    """An unchanged app with the mod around it, which also answers the roll call."""

    def __init__(self, inner: ClientApp, mod: AuditMod, config: Mapping[str, Any] | None = None):
        super().__init__()
        self.inner, self.audit_mod, self.config = inner, mod, config

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == ROLL_CALL:
            return Message(RecordDict({AUDIT: ConfigRecord({PARTITION: partition_of(context)})}), reply_to=message)
        own = context if self.config is None else copy.copy(context)
        if self.config is not None:
            own.run_config = dict(self.config)
        try:
            reply = self.audit_mod(message, own, self.inner)
        except FedauditError as e:  # ours: an error reply would let the app go on without this node
            said = {FAILED: f"node {partition_of(context)}, {message.metadata.message_type}: {e}"}
            return Message(RecordDict({AUDIT: ConfigRecord(said)}), reply_to=message)
        context.state = own.state
        return reply
