"""The client's side: a mod around an app that protects what leaves a node, and tells the auditor how.

It stands outside all mods of the app, Flower's own DP mods among them: what it protects, and what is recorded, is what
would have been sent.
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

from fedaudit.errors import PrivacyError
from fedaudit.flower.messages import AUDIT, Field, fields_of, replaced, tensor_of, ups
from fedaudit.flower.names import Names, app_policies
from fedaudit.flower.records import Records
from fedaudit.kept import AsGiven
from fedaudit.privacy import mechanism
from fedaudit.privacy.ledger import Entry
from fedaudit.wire.message import State, Up
from fedaudit.wire.release import Protection

RUN_ID = 1  # of a run in this process
ROLL_CALL = "query.fedaudit_roll_call"  # who are you? Answered here, and no message of the app
PARTITION = "partition-id"
Next = Callable[[Message, Context], Message]


class Told(AsGiven):
    """What a node's mod tells the auditor of one reply: parameters of mechanisms and entries for the ledger."""

    wall_s: float
    n: int | None = None  # records of the node, where an adapter knows
    protection: dict[str, Protection] = Of(default_factory=dict)
    entries: list[Entry] = Of(default_factory=list)


@dataclass(frozen=True)
class Terms:
    """What both sides of an audit go by."""

    kinds: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    records: type[Records] | None = None
    seed: int = 0
    partitions: int = 0  # nodes in all
    canaries: int = 0

    def count(self, k: int) -> int | None:
        """The records that node k trains on; None where no adapter tells."""
        return None if self.records is None else len(self.trained_on(k)[1])

    def trained_on(self, k: int) -> tuple[Tensor, Tensor]:
        """With the canaries that were planted."""
        from fedaudit.flower.records import federation_of

        assert self.records is not None
        key = (self.records, self.partitions, self.canaries, self.seed)
        if key not in _federations:
            _federations.clear()
            _federations[key] = federation_of(self.records(), self.partitions, self.canaries, self.seed, "app")
        return _federations[key].members(k)


_federations: dict[tuple[Any, ...], Any] = {}  # the last one: a cache, and nothing more


class AuditMod:
    """A Flower mod, for `ClientApp(mods=[...])` or around a whole app."""

    def __init__(self, terms: Terms):
        self.terms = terms
        self.names, self.policies = Names(terms.kinds), app_policies(terms.privacy)

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        k = partition_of(context)
        asked = message.content
        before = {r: _state(v) for r, v in asked.items() if isinstance(v, ArrayRecord)} if self._updates else {}
        begun = time.perf_counter()
        with self._planted(k):
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        wall = time.perf_counter() - begun
        content = RecordDict(dict(reply.content))  # the reply may be the request itself, which others hold
        reply.content = content
        n = self.terms.count(k)
        protection, entries = self._protect(content, before, message.metadata.message_type, k, n, context)
        told = Told(wall_s=wall, n=n, protection=protection, entries=entries)
        content[AUDIT] = ConfigRecord({"told": told.model_dump_json()})
        return reply

    @property
    def _updates(self) -> bool:
        return any(named.update for named in self.names.said.values())

    @contextlib.contextmanager
    def _planted(self, k: int) -> Iterator[None]:
        """The node's own records with its canaries, where there are any."""
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
    ) -> tuple[dict[str, Protection], list[Entry]]:
        """Clip, add noise, and say what it cost: in place."""
        fields, _ = fields_of(content, self.names, message_type)
        asked, spent = _remembered(context)
        reply = ups([_as_updates(fields, before)], message_type)[0]
        assert isinstance(reply, Up)
        told = mechanism.Context(
            key=(self.terms.seed, f"client {k}", "flower", asked),
            n=self._n(n, k),
            policies=self.policies,
            releases=lambda kind: None,
            images=_no_records,
            encode=_no_records,
            spent=spent,
        )
        out, protection, entries = mechanism.protect(reply, told)
        changed = {name: getattr(out, name) for name in fields if getattr(out, name) is not getattr(reply, name)}
        for name, value in changed.items():
            if (named := fields[name].named) is not None and named.update:
                start = before[fields[name].record]
                changed[name] = value.like({key: start[key] + t for key, t in value.items()})
        replaced(content, fields, changed)
        context.state[AUDIT] = ConfigRecord({"asked": asked + 1, "spent": json.dumps(told.spent)})
        return protection, entries

    def _n(self, n: int | None, k: int) -> int:
        """For delta = 1/n. A count that nobody can check is never free: -1 is no count."""
        if n is None and any(policy.delta == "1/n" for policy in self.policies.values()):
            raise PrivacyError(
                f"delta = '1/n', and nobody knows how many records node {k} has. Say delta = 1e-5 or the like, or give "
                "an adapter that tells the members."
            )
        return -1 if n is None else n


def _as_updates(fields: Mapping[str, Field], before: Mapping[str, State]) -> dict[str, Field]:
    """The fields with what is to be protected as an update turned into one, and declared so."""
    made = dict(fields)
    for name, field_ in fields.items():
        if field_.named is None or not field_.named.update:
            continue
        start = before.get(field_.record)
        if start is None or list(start) != list(field_.value):
            raise PrivacyError(
                f"{field_.record}: update = true is for an array record that the request has too, with the same names."
            )
        if odd := [key for key, t in field_.value.items() if not t.is_floating_point()]:
            raise PrivacyError(f"{field_.record}: {odd[0]!r} holds whole numbers, which take no Gaussian noise.")
        difference = field_.value.like({key: t - start[key] for key, t in field_.value.items()})
        made[name] = _Update(field_.record, field_.key, difference, field_.named, field_.wire)
    return made


class _Update(Field):
    @property
    def declared(self) -> Any:
        assert self.named is not None
        return self.named.declared()


def _state(record: ArrayRecord) -> State:
    return State({name: tensor_of(array) for name, array in record.items()})


def _remembered(context: Context) -> tuple[int, dict[str, int]]:
    """How many messages this node has answered, and what it has released of each kind: Flower keeps it for us."""
    kept: Any = context.state.get(AUDIT)
    return (0, {}) if kept is None else (int(kept["asked"]), json.loads(kept["spent"]))


def _no_records(*_: Any) -> Any:
    raise PrivacyError("The random-pixel sensitivity edits images, and an app keeps them to itself. Use clip=C.")


def identify() -> None:
    """Who this process is to Flower, where no runtime of Flower's has said so: messages are signed with it."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SUPERLINK_NODE_ID


def partition_of(context: Context) -> int:
    return int(context.node_config.get(PARTITION, -1))


class AuditedClientApp(ClientApp):
    """An app as it is, with the mod around it, and the answer to the roll call."""

    def __init__(self, inner: ClientApp, mod: AuditMod, config: Mapping[str, Any] | None = None):
        super().__init__()
        self.inner, self.audit_mod, self.config = inner, mod, config

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == ROLL_CALL:
            return Message(RecordDict({AUDIT: ConfigRecord({PARTITION: partition_of(context)})}), reply_to=message)
        if self.config is None:
            return self.audit_mod(message, context, self.inner)
        own = copy.copy(context)
        own.run_config = dict(self.config)
        reply = self.audit_mod(message, own, self.inner)
        context.state = own.state
        return reply
