"""The whole content of a transcript, read once: every row, every pack and every tensor, held against its digests.

Whoever computes something from a transcript calls `check_contents` first, so that a damaged or missing part is an error
and not a figure over what is left. `look_through` lists all damage instead of raising at the first.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from fedaudit.errors import TranscriptError
from fedaudit.wire.transcript import CONTENT, PACK, Transcript

INDEX = "index.jsonl"
MOST = 20  # pieces of damage that are listed: after so many, nothing of the folder can be believed
Span = tuple[int, int, str]  # of a tensor in its pack: first byte, bytes, digest


@dataclass(frozen=True)
class Damage:
    """One part of a transcript that is not what its index says."""

    file: str  # within the transcript's folder
    place: str
    recorded: str
    found: str

    def text(self) -> str:
        return f"{self.file}, {self.place}: {self.found}, where the index says {self.recorded}"


@dataclass
class Contents:
    """The parts of a transcript that were found. `dropped` are the rounds whose model states were not kept."""

    messages: int = 0
    rounds: int = 0
    tensors: int = 0  # that the index names, each place in a pack once
    read: int = 0  # of them, those that are there and have their digest
    dropped: tuple[int, ...] = ()
    digest: str = ""  # over all messages in order, as in the run's record
    damage: list[Damage] = field(default_factory=list)

    def text(self) -> str:
        """Return how much was read of how much, in words."""
        of = f"{self.read:,} of {self.tensors:,} stored tensors of {self.messages:,} messages"
        return of + (f"; the model states of {len(self.dropped)} rounds were not kept" if self.dropped else "")


def look_through(folder: Path, rounds: int, keep_weights: int) -> Contents:
    """Return what a transcript of so many whole rounds holds, and all damage to it.

    `keep_weights` is the number of last rounds whose model states must be there.
    """
    found = Contents()
    packs: dict[tuple[int, str], set[Span]] = defaultdict(set)
    whole, sent, seq, ended = "", [], -1, False
    try:
        for row in Transcript(folder).rows():
            place = f"row {row.get('seq')}"
            if row.get("seq") != seq + 1:
                found.damage.append(Damage(INDEX, place, f"row {seq + 1}", f"row {row.get('seq')}"))
            seq = row.get("seq", seq + 1)
            if ended:
                found.damage.append(Damage(INDEX, place, f"an end after round {rounds}", "more rows"))
                break
            if row["type"] in CONTENT:
                if row["type"] == "message":  # a sum is what the server computed, and crossed no wire
                    found.messages += 1
                    sent.append(f"{row['direction']} {row['client']} {row['digest']}")
                for tensor in row["tensors"]:
                    _, _, pack, offset, size, digest = tensor
                    packs[row["round"], pack].add((offset, size, digest))
            elif row.get("event") == "round":
                if row.get("round") != 0:
                    whole, sent = xxhash.xxh3_128_hexdigest((whole + "".join(sent)).encode()), []
                    found.rounds += 1
                ended = row.get("round") == rounds
    except (TranscriptError, KeyError, ValueError, TypeError) as e:
        found.damage.append(Damage(INDEX, f"after row {seq}", "a row", str(e)[:200]))
    if not ended and not found.damage:
        found.damage.append(Damage(INDEX, "its end", f"{rounds} rounds", f"{found.rounds} rounds"))
    found.digest = whole
    dropped = set()
    for (t, kind), spans in sorted(packs.items()):
        if len(found.damage) >= MOST:
            break
        found.tensors += len(spans)
        path = folder / f"{t:06d}.{kind}.pack"
        if not path.is_file():
            if kind == "weights" and t <= rounds - keep_weights:
                dropped.add(t)
            elif any(size for _, size, _ in spans):
                found.damage.append(Damage(path.name, "the file", f"{len(spans)} tensors", "it is missing"))
            continue
        found.read += _read_pack(path, spans, found.damage)
    found.dropped = tuple(sorted(dropped))
    known = {f"{t:06d}.{kind}.pack" for t, kind in packs}
    for path in sorted(folder.glob("*.pack")):
        if PACK.fullmatch(path.name) and path.name not in known and path.stat().st_size:
            found.damage.append(Damage(path.name, "the file", "no such file", f"{path.stat().st_size} bytes"))
    return found


def _read_pack(path: Path, spans: set[Span], damage: list[Damage]) -> int:
    """Return how many tensors of a pack have their digest, and note those that have not."""
    size, good, covered = path.stat().st_size, 0, 0
    with open(path, "rb") as file:
        data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        view = memoryview(data)
        try:
            for offset, length, digest in sorted(spans):
                covered = max(covered, offset + length)
                if not (type(offset) is int and type(length) is int and offset >= 0 and offset + length <= size):
                    damage.append(Damage(path.name, f"byte {offset}", f"{length} bytes", f"it ends at byte {size}"))
                elif (now := xxhash.xxh3_128_hexdigest(view[offset : offset + length])) != digest:
                    damage.append(Damage(path.name, f"byte {offset}", f"digest {digest}", f"digest {now}"))
                else:
                    good += 1
                if len(damage) >= MOST:
                    break
        finally:
            view.release()
            if size:
                data.close()
    if covered < size:
        damage.append(Damage(path.name, f"byte {covered}", "its end", f"{size - covered} bytes that no message has"))
    return good


def check_contents(folder: Path, rounds: int, keep_weights: int, digest: str) -> Contents:
    """Return what a transcript holds, all of it as its index and its run's record say; raise TranscriptError if not."""
    found = look_through(folder, rounds, keep_weights)
    if found.digest != digest:
        raise TranscriptError(
            f"{folder} is not what the run left: its digest is {found.digest or 'that of nothing'}, the record "
            f"has {digest[:40] or 'none'}. Run it again in another folder."
        )
    if found.damage:
        more = f" ({len(found.damage)} parts are damaged)" if len(found.damage) > 1 else ""
        raise TranscriptError(
            f"{folder} is damaged: {found.damage[0].text()}{more}. Copy it again from where it was made, or run it "
            "again in another folder."
        )
    return found
