"""The transcript of a run folder by itself: rows, messages and packs that are not what they say."""

from __future__ import annotations

import pytest
import torch
from forging import put_record, put_rows, seal

from fedaudit.errors import TranscriptError
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import read_record
from fedaudit.verify.check import verify
from fedaudit.wire.contents import check_contents, look_through


def again(folder) -> None:
    """Let the record have the digest of the transcript as it is, as a careful forger does."""
    record = read_record(folder)
    record.transcript_digest = look_through(folder / "transcript", 2, 10).digest
    put_record(folder, record)
    seal(folder)


def test_a_message_that_is_not_its_digests(copy_of):
    """A digest in the index that no content has: its row's checksum and the transcript's digest are right."""
    folder = copy_of("plain")
    put_rows(folder, lambda rows: rows[1].update(digest="0" * 32))
    again(folder)
    found = verify(folder).contradictions
    assert any(f.file == "transcript/index.jsonl" and f.field == "row 1, digest" for f in found)


def test_another_message_of_the_server(copy_of):
    """The last message to a client is replaced, with all digests on the way; its reply is not known to differ."""
    import xxhash

    from fedaudit.wire.codec import stored_digest, stored_header

    folder = copy_of("plain")

    def change(rows):
        at = max(i for i, row in enumerate(rows) if row.get("direction") == "down")
        row = rows[at]
        pack = folder / "transcript" / f"{row['round']:06d}.weights.pack"
        data = bytearray(pack.read_bytes())
        dtype, shape, kind, offset, size, _ = row["tensors"][0]
        own = bytearray(data[offset : offset + size])
        own[:4] = torch.tensor([0.5]).numpy().tobytes()
        row["tensors"][0] = [dtype, shape, kind, len(data), size, xxhash.xxh3_128_hexdigest(bytes(own))]
        data += own
        pack.write_bytes(data)
        head, _ = stored_header(row["tree"], row["tensors"], row["digest"])
        spans = [tensor[3:5] for tensor in row["tensors"]]
        row["digest"] = stored_digest(head, lambda i: bytes(data[spans[i][0] : sum(spans[i])]))

    put_rows(folder, change)
    again(folder)
    assert not verify(folder).contradictions, "in itself, the folder is consistent"
    named = {finding.figure for finding in verify(folder, rerun=0.01, seed=0).contradictions}
    assert "server's rounds" in named


@pytest.mark.parametrize("what", ["cut", "longer", "stranger"])
def test_packs_that_are_not_whole(copy_of, what):
    folder = copy_of("plain")
    pack = folder / "transcript" / "000001.weights.pack"
    if what == "cut":
        pack.write_bytes(pack.read_bytes()[:-8])
    elif what == "longer":
        pack.write_bytes(pack.read_bytes() + b"12345678")
    else:
        (folder / "transcript" / "000009.weights.pack").write_bytes(b"12345678")
    name = "000009.weights.pack" if what == "stranger" else pack.name
    with pytest.raises(TranscriptError, match=name):
        RunFolder(folder).transcript  # noqa: B018


def test_what_was_read_is_counted(honest):
    found = check_contents(honest / "plain" / "transcript", 2, 10, read_record(honest / "plain").transcript_digest)
    assert found.read == found.tensors > 10
    assert found.text().startswith(f"{found.tensors} of {found.tensors} stored tensors of 12 messages")
