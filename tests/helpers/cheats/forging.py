"""Edits of a run folder as a forger makes them: with right checksums, and with what follows from an edited figure."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from fedaudit.runtime.run_record import RunRecord, curve_of
from fedaudit.runtime.seal import Seal, write_seal
from fedaudit.runtime.utility import results


def put_record(folder: Path, record: RunRecord) -> None:
    """Write a record as a careful forger does: what follows from the rounds follows, in the checkpoint, too."""
    record.curve, record.result = curve_of(record.rounds), results(record.rounds)
    put_raw(folder, json.loads(record.text()))


def put_raw(folder: Path, raw: dict[str, Any]) -> None:
    (folder / "record.json").write_text(json.dumps(raw, indent=1))
    head = json.loads((folder / "checkpoint" / "HEAD.json").read_text())
    (folder / "checkpoint" / "HEAD.json").write_text(json.dumps({**head, "record": raw}))


def put_beside(folder: Path, name: str, edit: Callable[[list[Any]], Any]) -> None:
    """Edit attacks.json or audits.json."""
    saved = json.loads((folder / f"{name}.json").read_text())
    edit(saved[name])
    (folder / f"{name}.json").write_text(json.dumps(saved, indent=1))


def index_rows(transcript: Path) -> list[dict[str, Any]]:
    """Return the rows of a transcript's index, without their checksums."""
    lines = (transcript / "index.jsonl").read_text().splitlines()
    return [json.loads(line.partition(" ")[2]) for line in lines]


def put_index(transcript: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as a transcript's index, each with its checksum."""
    texts = [json.dumps(row, separators=(",", ":"), sort_keys=True) for row in rows]
    lines = [f"{xxhash.xxh3_64_hexdigest(text.encode())} {text}\n" for text in texts]
    (transcript / "index.jsonl").write_text("".join(lines))


def put_rows(folder: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Edit the rows of the index, and give each its checksum again."""
    rows = index_rows(folder / "transcript")
    put_index(folder / "transcript", edit(rows) or rows)


def seal(folder: Path) -> None:
    write_seal(folder, Seal.of(folder))
