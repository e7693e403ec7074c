"""Reads the file that wandb writes offline."""

from __future__ import annotations

import struct


def records_of(path):
    """The messages in wandb's own file, as its own classes. The frame is LevelDB's log: after seven bytes, blocks of 32
    KiB with records of checksum (4 bytes), length (2), type (1: whole, 2 to 4: first, middle, last)."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""
