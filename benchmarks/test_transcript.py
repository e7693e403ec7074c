"""The transcript against plain files that hold the same bytes.

Writing: what is recorded is synced once in a round on both sides. The transcript also hashes every tensor, to store it
once, and flushes after every message, to lose at most one when it is killed. Reading checks the hash. The bounds are
wide: they are there to catch work that was not there before.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from fedaudit import State, Up, private
from fedaudit.wire.codec import encode, read_header
from fedaudit.wire.transcript import Transcript, TranscriptWriter

MESSAGES = 10


class Model(Up):
    w: State = private("weights", via="model", unit="client")


def messages() -> list[bytes]:
    """5 MB each, in ten tensors."""
    rng = torch.Generator().manual_seed(0)
    return [
        encode(Model(State({f"layer{i}.weight": torch.randn(125_000, generator=rng) for i in range(10)})))
        for _ in range(MESSAGES)
    ]


def record(folder: Path, blobs: list[bytes]) -> None:
    writer = TranscriptWriter(folder, keep_weights=1)
    writer.begin_round(1)
    for k, blob in enumerate(blobs):
        head = read_header(blob)
        writer.message(
            blob, head, round=1, ask=0, client=k, direction="up", message="Model", bytes=len(blob), fields={}
        )
    writer.end_round(1)
    writer.close()


def rate(benchmark, blobs: list[bytes]) -> None:
    seconds = benchmark.extra_info["ours_median_s"]
    benchmark.extra_info["megabytes_per_s"] = round(sum(map(len, blobs)) / 1e6 / seconds)


@pytest.mark.slow
def test_recording_against_writing_a_file(paired, benchmark, tmp_path):
    blobs = messages()

    def ours() -> None:
        record(tmp_path / "transcript", blobs)

    def theirs() -> None:
        with open(tmp_path / "plain", "wb") as file:
            for blob in blobs:
                file.write(blob)
            file.flush()
            os.fsync(file.fileno())

    def between() -> None:
        shutil.rmtree(tmp_path / "transcript", ignore_errors=True)
        (tmp_path / "plain").unlink(missing_ok=True)
        os.sync()

    ratio = paired(ours, theirs, pairs=20, between=between).ratio
    rate(benchmark, blobs)
    assert ratio <= 2


@pytest.mark.slow
def test_reading_against_reading_a_file(paired, benchmark, tmp_path):
    blobs = messages()
    record(tmp_path, blobs)
    for k, blob in enumerate(blobs):
        (tmp_path / f"plain-{k}").write_bytes(blob)

    def ours() -> None:
        for entry in Transcript(tmp_path).entries():
            entry["w"]

    def theirs() -> None:
        for k in range(MESSAGES):
            torch.frombuffer(bytearray((tmp_path / f"plain-{k}").read_bytes()), dtype=torch.uint8)

    ratio = paired(ours, theirs, pairs=20).ratio
    rate(benchmark, blobs)
    assert ratio <= 4  # one open, one seek and one hash for each of the ten tensors
