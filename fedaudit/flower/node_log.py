"""Recording by a mod alone, if only clients can be changed: each node keeps its messages for later.

    app = ClientApp(mods=[RecordingMod(Terms(kinds={"arrays": "weights"}), "pages")])

For every message a node writes the request and the reply as Flower's own bytes, and then the facts on protection. These
come last, so that a message without them is one that was never answered. `collect` reads the messages of all nodes and
makes a run folder. The folder lacks what no client sees: the last global model, and messages that never arrived.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.message_pb2 import Message as Proto
from google.protobuf.message import DecodeError

from fedaudit.errors import FedauditError, RunError
from fedaudit.flower.app import imported, place_of, setting_of
from fedaudit.flower.client import AuditMod, Next, Terms, Told, partition_of
from fedaudit.flower.messages import AUDIT, fields_of, frame_bytes
from fedaudit.flower.record_kinds import Names
from fedaudit.flower.recorder import Answer, Exchange, Recorder
from fedaudit.flower.records import Records
from fedaudit.flower.round_number import round_number
from fedaudit.flower.secure_sums import typed
from fedaudit.progress import unwatched
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.folder import locked
from fedaudit.runtime.run_record import RunRecord

TERMS = "terms.json"


class RecordingMod:
    """A mod that protects as the audit does and keeps all messages in a folder. Put it first in an app's mods."""

    def __init__(self, terms: Terms, folder: Path | str):
        self.terms, self.folder, self.mod = terms, Path(folder), AuditMod(terms)
        self.folder.mkdir(parents=True, exist_ok=True)
        said = {
            "kinds": dict(terms.kinds), "privacy": dict(terms.privacy), "seed": terms.seed, "canaries": terms.canaries,
            "adapter": None if terms.records is None else place_of(terms.records), "partitions": terms.partitions,
        }  # fmt: skip
        write_atomic(self.folder / TERMS, json.dumps(said).encode())

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        k = partition_of(context)
        stem = f"{k:06d}-{len(list(self.folder.glob(f'{k:06d}-*.asked'))):06d}"
        write_atomic(self.folder / f"{stem}.asked", message_to_proto(message).SerializeToString())
        try:
            reply = self.mod(message, context, call_next)
        except FedauditError as e:  # the server cannot be told, but whoever collects the logs is
            write_atomic(self.folder / f"{stem}.failed", str(e).encode())
            raise
        if reply.has_error():
            return reply
        note: Any = reply.content.pop(AUDIT)
        write_atomic(self.folder / f"{stem}.reply", message_to_proto(reply).SerializeToString())
        write_atomic(self.folder / f"{stem}.told", note["told"].encode())
        return reply


@dataclass(frozen=True)
class Page:
    """One message of one node, with its reply if one came."""

    k: int
    n: int  # its number on that node
    asked: Message
    reply: Message | None
    told: Told | None

    @property
    def round(self) -> int:
        """Return the round that the request names; if it names none, the message's number on its node."""
        said = round_number(self.asked)
        return self.n if said is None else said


def _pages(folder: Path) -> Iterator[Page]:
    for path in sorted(folder.glob("*.asked")):
        k, n = (int(part) for part in path.stem.split("-"))
        try:
            told = path.with_suffix(".told")
            done = Told.model_validate_json(told.read_text()) if told.exists() else None
            reply = _message(path.with_suffix(".reply")) if done is not None else None
            yield Page(k, n, _message(path), reply, done)
        except (DecodeError, ValueError, OSError) as e:
            raise RunError(f"{path} is not a node's log: {str(e)[:200]}. Delete it, and collect again.") from e


def _message(path: Path) -> Message:
    return message_from_proto(Proto.FromString(path.read_bytes()))


def collect(folder: Path | str, *, out: Path | str, nodes: int, name: str = "app") -> RunRecord:
    """Make a run folder from what the nodes kept, and return its record."""
    folder, out = Path(folder), Path(out)
    if not (folder / TERMS).exists():
        raise RunError(f"{folder} does not hold nodes' logs: {TERMS} is missing. Name the folder of a RecordingMod.")
    said = json.loads((folder / TERMS).read_text())
    records = None if said["adapter"] is None else imported(said["adapter"], Records)
    terms = Terms(said["kinds"], said["privacy"], records, said["seed"], said["partitions"] or nodes, said["canaries"])
    if failed := sorted(folder.glob("*.failed")):
        raise RunError(
            f"node {int(failed[0].stem.split('-')[0])}: {failed[0].read_text()} The app went on without {len(failed)} "
            "answers like this one, so its run is not audited. Mend the cause, and run the app again."
        )
    groups: dict[tuple[int, str], list[Page]] = {}
    for page in _pages(folder):
        kind = typed(page.asked.metadata.message_type, page.asked.content)
        groups.setdefault((page.round, kind), []).append(page)
    with locked(out):
        recorder = Recorder(out, setting_of(terms, name=name, nodes=nodes), terms, unwatched)
        try:
            for (_, kind), pages in sorted(groups.items(), key=lambda item: (item[0][0], min(p.n for p in item[1]))):
                recorder.ask(kind, [_exchange(page, recorder) for page in pages], round_number(pages[0].asked))
            recorder.note("this run was collected from what the nodes kept; it lacks what no node saw")
            return recorder.finish()
        finally:
            recorder.close()


def _exchange(page: Page, recorder: Recorder) -> Exchange:
    kind = typed(page.asked.metadata.message_type, page.asked.content)
    fields, frame = fields_of(page.asked.content, Names(), kind, recorder.layout)
    asked = fields, frame + frame_bytes(page.asked)
    if page.reply is None:
        return Exchange(page.k, asked, Answer(error="the node gave no answer"))
    fields, frame = fields_of(page.reply.content, recorder.names, kind, recorder.layout)
    return Exchange(page.k, asked, Answer((fields, frame + frame_bytes(page.reply)), page.told))
