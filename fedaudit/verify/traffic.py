"""Checks of traffic: from the transcript's index and contents, byte by byte, and against the method's declaration.

A message's size follows from its tree and its tensors, so the sizes in the index are recomputed, too. So is the digest
of each message whose tensors were kept. Then come the sums: by round, by field, over the run, and the clients that were
asked. Last, the traffic that the method declares for each round is held against it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedaudit.errors import FedauditError, RunError
from fedaudit.runtime.asking import participants_of
from fedaudit.runtime.plan import in_sums
from fedaudit.runtime.run_record import FieldTraffic, RoundRecord
from fedaudit.verify.case import RECORD, Case
from fedaudit.verify.sum_rows import is_phase
from fedaudit.verify.sums import check_sums_of_clients
from fedaudit.wire.codec import choices, measure, stored_digest, stored_header
from fedaudit.wire.message import Size
from fedaudit.wire.release import Release, Sent
from fedaudit.wire.traffic import Key, compare
from fedaudit.wire.transcript import SERVER, party

INDEX = "transcript/index.jsonl"
Sizes = Mapping[str, Mapping[str, int]]


def check_transcript(case: Case) -> None:
    """Check that every part of the transcript is there and as its index says, and that it is the record's."""
    if not (case.folder / "transcript" / "index.jsonl").is_file():
        case.found.contradicted(
            "transcript", INDEX, "the file", "a transcript", "nothing", "without it nothing can be recomputed"
        )
        return
    contents = case.contents
    for damage in contents.damage:
        case.found.contradicted("transcript", f"transcript/{damage.file}", damage.place, damage.recorded, damage.found)
    if not contents.damage:
        case.found.recomputed("transcript", contents.text())
    case.found.compare(
        "transcript's digest", RECORD, "transcript_digest", case.record.transcript_digest, contents.digest
    )
    if contents.dropped:
        case.found.word(
            "model states of early rounds",
            f"the transcript kept none of {len(contents.dropped)} rounds (keep_weights = "
            f"{case.record.setting.keep_weights}): their messages have a size and a digest, and no content",
        )


def check_traffic(case: Case) -> None:
    """Check all figures of the record that follow from the transcript. The transcript must be whole."""
    read = _Index(case)
    for row in case.transcript.rows():
        read.row(row)
    read.close()
    record = case.record
    rounds = [read.round(row) for row in record.rounds]
    keep = {"round", "participants", "absent", "up_payload", "up_wire", "down_payload", "down_wire"}
    case.found.compare(
        "traffic and clients of each round", RECORD, "rounds",
        [row.model_dump(include=keep) for row in record.rounds], [row.model_dump(include=keep) for row in rounds],
    )  # fmt: skip
    case.found.compare("traffic by field", RECORD, "traffic", record.traffic, read.fields())
    case.found.compare("releases", RECORD, "releases", record.releases, read.releases())
    if not case.foreign_transport:
        asked = [participants_of(record.setting, row.round) for row in record.rounds]
        case.found.compare(
            "clients asked in each round", RECORD, "rounds.participants",
            [row.participants for row in record.rounds], asked, reason="they follow from the seed",
        )  # fmt: skip
    check_sums_of_clients(case)
    check_declared(case, read)


def check_declared(case: Case, read: _Index) -> None:
    """Hold the traffic that the method declares against the measured one, round by round."""
    figure = "declared traffic"
    if case.world is None:
        case.found.word(figure, case.why_no_world)
        return
    method, world = case.world.method, case.world
    if not case.record.traffic_declared:
        declares = not case.foreign_transport and method.traffic(world.plan(1, participants_of(world.setting, 1)))
        if declares and not case.other_code:
            case.found.contradicted(figure, RECORD, "traffic_declared", False, True, "the method declares its traffic")
        else:
            case.found.word(figure, "the method declares none")
        return
    for row in case.record.rounds:
        of = read.by_round[row.round]
        if not row.participants:  # drawn by Poisson, and nobody was
            continue
        try:
            plan = world.plan(row.round, row.participants, asks=of.asks(), choices=of.choices)
            declared = method.traffic(plan)
            if world.setting.aggregate == "secure" and declared is not None:
                sums = [rows.facts() for (t, _), rows in sorted(case.sums.items()) if t == row.round]
                declared = in_sums(method, declared, sums)
            compare(declared, of.whole, method=case.record.setting.method, t=row.round)
        except RunError as e:
            lines = [line for line in str(e).splitlines() if "declared" in line and "measured" in line]
            if case.other_code:
                case.found.word(figure, f"the code here is other code ({case.other_code}), and declares other traffic")
            else:
                told = lines[0].strip() if lines else str(e)[:200]
                at = f"round {row.round}, {' '.join(told.split()[:2])}"
                measured = told.partition("measured")[2].strip() or "other traffic"
                said = told.partition("declared")[2].partition("measured")[0].strip() or "a formula"
                case.found.contradicted(figure, INDEX, at, measured, said, "the transcript against the formula")
            return
        except FedauditError as e:
            case.found.word(figure, f"the formula cannot be computed here: {e}")
            return
        except (KeyError, IndexError, TypeError, AttributeError) as e:  # rows of a sum that no run leaves
            case.found.contradicted(figure, INDEX, f"round {row.round}", "rows of sums", f"{type(e).__name__}: {e}")
            return
    case.found.recomputed(figure, f"{len(case.record.rounds)} rounds agree with the method's formula")


class _Round:
    """One round, as the index has it."""

    def __init__(self) -> None:
        self.wire: dict[Key, int] = defaultdict(int)
        self.sizes: dict[Key, Size] = {}
        self.whole: dict[Key, Size] = {}
        self.choices: dict[str, dict[int, Any]] = {}
        self.asked: dict[int, list[int]] = defaultdict(list)
        self.replied: dict[int, list[int]] = defaultdict(list)
        self.absent: list[dict[str, Any]] = []

    def asks(self) -> list[tuple[list[int], list[int]]]:
        return [(sorted(self.asked[a]), self.replied[a]) for a in range(max(self.asked, default=-1) + 1)]

    def total(self, direction: str, of: str) -> int:
        if of == "wire":
            return sum(n for (d, _), n in self.wire.items() if d == direction)
        return sum(size.payload for (d, _), size in self.sizes.items() if d == direction)


class _Index:
    """Reads the index, and recomputes each message's size and digest from its tree and tensors."""

    def __init__(self, case: Case):
        self.case = case
        self.by_round: dict[int, _Round] = defaultdict(_Round)
        self._releases: dict[str, Release] = {}
        self._packs: dict[Path, bytes] = {}
        self._known: dict[str, str] = {}  # digests of messages that were recomputed, by their content
        self.messages = self.digests = self.unknown = 0
        self.wrong = False

    def row(self, row: dict[str, Any]) -> None:
        if row["type"] == "sum":  # crossed no wire: it has a digest, and no size
            self._sum(row)
        if row["type"] != "message":
            if row.get("event") == "absent":
                absent = {"client": row["client"], "ask": row["ask"], "reason": str(row["reason"])}
                self.by_round[row["round"]].absent.append(absent)
            return
        self.messages += 1
        t, k, way, where = row["round"], row["client"], row["direction"], f"row {row['seq']}"
        ends = (SERVER, party(k)) if way == "down" else (party(k), SERVER)
        if (row["from"], row["to"]) != ends:
            self._wrong(f"{where}, from and to", f"{row['from']} to {row['to']}", f"{ends[0]} to {ends[1]}")
        sizes = self._sizes(row, where)
        of = self.by_round[t]
        if not is_phase(row["fn"]):  # a phase of a secure sum is no ask of the method's
            (of.asked if way == "down" else of.replied)[row["ask"]].append(k)
        for name, size in sizes.items():
            key = (way, f"{row['message']}.{name}")
            of.wire[key] += size["wire"]
            if size["payload"] or size["buffers"]:
                of.sizes[key] = of.sizes.get(key, Size()) + Size(size["payload"], size["buffers"])
                before = Size(size.get("whole", size["payload"]), size["buffers"])
                of.whole[key] = of.whole.get(key, Size()) + before
        for name, node in row["tree"]["r"][1].items():
            of.choices.setdefault(f"{row['message']}.{name}", {})[k] = choices(node)
        if way == "up":
            for name, facts in row["fields"].items():
                if facts.get("role"):
                    field = f"{row['message']}.{name}"
                    self._releases[field] = _release(field, facts)

    def _sum(self, row: dict[str, Any]) -> None:
        stored = stored_header(row["tree"], row["tensors"], row["digest"])
        if stored is not None:
            self._digest(row, stored[0], f"row {row['seq']}")

    def _sizes(self, row: dict[str, Any], where: str) -> Sizes:
        """Return the bytes of a message by field, recomputed; those of the index if the message's class is unknown."""
        said = {
            name: {key: facts[key] for key in ("payload", "buffers", "wire", "whole") if facts.get(key) is not None}
            for name, facts in row["fields"].items()
        } | {"(frame)": {"payload": 0, "buffers": 0, "wire": row["frame"]}}  # fmt: skip
        for size in said.values():
            size.setdefault("payload", 0)
            size.setdefault("buffers", 0)
            size.setdefault("wire", 0)
        if row["bytes"] != sum(size["wire"] for size in said.values()):
            self._wrong(f"{where}, bytes", row["bytes"], sum(size["wire"] for size in said.values()))
        stored = stored_header(row["tree"], row["tensors"], row["digest"])
        if stored is None:
            self.unknown += 1
            return said
        head, size_of_blob = stored
        self._digest(row, head, where)
        again = measure(head, size_of_blob)
        if self.case.foreign_transport:  # its own bytes on the wire; what is in a message is the same
            again = {name: {**size, "wire": said.get(name, {}).get("wire", 0)} for name, size in again.items()}
        for name in sorted(again.keys() | said.keys()):
            if again.get(name) != said.get(name):
                self._wrong(f"{where}, {name}", str(said.get(name)), str(again.get(name)))
        return again

    def _digest(self, row: dict[str, Any], head: Any, where: str) -> None:
        key = f"{head.text} {[tensor[2:] for tensor in row['tensors']]} {row['round']}"
        if key not in self._known:
            kept = [self._pack(row["round"], row["tensors"][i][2]) for i in range(len(head.tensors))]
            if any(pack is None for pack in kept):
                return  # model states of an early round
            self._known[key] = stored_digest(head, self._content(row["tensors"], kept))
            if len(self._known) > 64:
                del self._known[next(iter(self._known))]
        self.digests += row["type"] == "message"
        if self._known[key] != row["digest"]:
            self._wrong(f"{where}, digest", row["digest"], self._known[key])

    @staticmethod
    def _content(tensors: list[Any], packs: list[bytes | None]) -> Callable[[int], Any]:
        def content(i: int) -> Any:
            pack, (_, _, _, offset, size, _) = packs[i], tensors[i]
            return memoryview(pack or b"")[offset : offset + size]

        return content

    def _pack(self, t: int, kind: str) -> bytes | None:
        path = self.case.folder / "transcript" / f"{t:06d}.{kind}.pack"
        if path not in self._packs:
            if len(self._packs) > 2:
                self._packs.clear()
            if not path.is_file():
                return None
            self._packs[path] = path.read_bytes()
        return self._packs[path]

    def _wrong(self, field: str, recorded: Any, recomputed: Any) -> None:
        self.wrong = True
        if sum(finding.figure == "messages" for finding in self.case.found.list) < 5:
            self.case.found.contradicted("messages", INDEX, field, recorded, recomputed)

    def close(self) -> None:
        if not self.wrong:
            self.case.found.recomputed(
                "messages", f"{self.digests:,} of {self.messages:,} digests, and the sizes of "
                f"{self.messages - self.unknown:,}, from trees and tensors"
            )  # fmt: skip
        if self.unknown:
            self.case.found.word(
                "sizes of some messages", f"the classes of {self.unknown:,} messages are not known here"
            )

    def round(self, row: RoundRecord) -> RoundRecord:
        """Return a round of the record with what the index says in the place of what can be recomputed."""
        of = self.by_round[row.round]
        asked = sorted({k for clients in of.asked.values() for k in clients})
        return row.model_copy(
            update={
                # A client that a round chose and did not ask has left nothing in the index.
                "participants": row.participants if set(asked) <= set(row.participants) else asked,
                "absent": [type(row.absent[0])(**a) if row.absent else a for a in of.absent],
                **{f"{way}_{what}": of.total(way, what) for way in ("up", "down") for what in ("payload", "wire")},
            }
        )

    def fields(self) -> list[FieldTraffic]:
        rows: dict[Key, FieldTraffic] = {}
        for of in self.by_round.values():
            for (way, name), sent in of.wire.items():
                row = rows.setdefault((way, name), FieldTraffic(direction=way, field=name))  # type: ignore[arg-type]
                size = of.sizes.get((way, name), Size())
                row.wire, row.payload, row.buffers = (
                    row.wire + sent,
                    row.payload + size.payload,
                    row.buffers + size.buffers,
                )
        return [rows[key] for key in sorted(rows)]

    def releases(self) -> list[Release]:
        return [self._releases[key] for key in sorted(self._releases)]


def _release(field: str, facts: dict[str, Any]) -> Release:
    sent = Sent(**facts)
    return Release(
        field=field, role=sent.role or "", kind=sent.kind, via=sent.via, unit=sent.unit, protection=sent.protection
    )
