"""Seals of small folders: which files are in them, and the part of the noise key. Digests by hashlib alone."""

from __future__ import annotations

import hashlib
import json
import threading

import pytest

from fedaudit.errors import RunError
from fedaudit.privacy.noise_key import FILE as KEY
from fedaudit.runtime import seal as seal_module
from fedaudit.runtime.seal import CHUNK, Seal, Signature, digest_over, read_seal, seal_again, write_seal


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "transcript").mkdir()
    (tmp_path / "transcript" / "index.jsonl").write_text("{}")
    (tmp_path / "transcript" / "half.tmp").write_text("being written")
    (tmp_path / "record.json").write_bytes(b"r" * (CHUNK + 1))
    (tmp_path / "log.txt").write_text("not sealed")
    (tmp_path / KEY).write_bytes(b"a key")
    return tmp_path


def by_hand(content):
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def test_a_seal_is_over_names_and_contents(folder):
    seal = Seal.of(folder)
    wanted = {KEY: by_hand(b"a key"), "record.json": by_hand(b"r" * (CHUNK + 1)),
              "transcript/index.jsonl": by_hand(b"{}")}  # fmt: skip
    assert seal.files == wanted
    assert list(seal.files) == sorted(wanted)
    assert seal.digest == by_hand(json.dumps(sorted([name, digest] for name, digest in wanted.items())).encode())
    assert seal.signature is None


def test_a_large_folder_s_files_are_read_several_at_a_time(folder, monkeypatch):
    """The first file waits until another one is being read. The seal is the same, file by file."""
    small = Seal.of(folder)
    beside, real, names = threading.Barrier(2, timeout=10), seal_module._digest, []

    def meets_another(path):
        names.append(path.name)
        beside.wait()
        return real(path)

    (folder / "attacks.json").write_text("")  # the least, though not the last
    monkeypatch.setattr(seal_module, "SEVERAL", 1)
    monkeypatch.setattr(seal_module, "_digest", meets_another)
    monkeypatch.setattr(seal_module.os, "cpu_count", lambda: 2)
    large = Seal.of(folder)
    assert large.files == {**small.files, "attacks.json": by_hand(b"")}
    assert names[0] == "record.json", "the largest comes first, so that it is not waited for alone"
    assert sorted(names) == sorted(["attacks.json", "index.jsonl", "record.json", KEY])


def test_a_file_that_cannot_be_read_is_an_error_in_a_large_folder_too(folder, monkeypatch):
    def unreadable(path):
        raise OSError(f"{path.name} cannot be read")

    monkeypatch.setattr(seal_module, "SEVERAL", 1)
    monkeypatch.setattr(seal_module, "_digest", unreadable)
    with pytest.raises(OSError, match="cannot be read"):
        Seal.of(folder)


def test_a_key_that_was_not_handed_on_counts_as_it_was(folder):
    before = Seal.of(folder)
    write_seal(folder, before)
    (folder / KEY).unlink()
    assert Seal.of(folder) == before
    (folder / KEY).write_bytes(b"another key")
    now = Seal.of(folder)
    assert now.files[KEY] == by_hand(b"another key")
    assert before.broken_by(now) == [KEY]


def test_without_a_seal_a_missing_key_is_not_there(folder):
    (folder / KEY).unlink()
    assert KEY not in Seal.of(folder).files
    (folder / "seal.json").write_text("not a seal")
    assert KEY not in Seal.of(folder).files
    with pytest.raises(RunError, match="does not hold a seal"):
        read_seal(folder)


def test_what_was_edited_removed_or_added_breaks_it(folder):
    before = Seal.of(folder)
    (folder / "record.json").write_text("other")
    (folder / "transcript" / "index.jsonl").unlink()
    (folder / "models").mkdir()
    (folder / "models" / "global.safetensors").write_bytes(b"m")
    assert before.broken_by(Seal.of(folder)) == ["models/global.safetensors", "record.json", "transcript/index.jsonl"]
    old = before.model_copy(update={"files": {n: d for n, d in before.files.items() if n != KEY}})
    assert old.broken_by(before) == [], "a seal from before keys were sealed"


@pytest.mark.parametrize("signed", [False, True])
def test_what_is_added_is_sealed_unless_the_seal_is_signed(folder, signed):
    before = Seal.of(folder)
    if signed:
        before = before.model_copy(update={"signature": Signature(public_key="aa", signature="bb")})
    write_seal(folder, before)
    (folder / "attacks.json").write_text("[]")
    seal_again(folder)
    now = read_seal(folder)
    assert now == (before if signed else Seal.of(folder))
    assert ("attacks.json" in now.files) is not signed


def test_a_record_by_itself_is_not_sealed(tmp_path):
    (tmp_path / "record.json").write_text("{}")
    seal_again(tmp_path)
    assert read_seal(tmp_path) is None


def test_the_files_that_break_a_seal_in_words():
    def seal(digest=None, **files):
        return Seal(digest=digest_over(files) if digest is None else digest, files=files)

    whole = seal(a="1", b="2", c="3", d="4")
    assert whole.broken_text(whole) == ""
    assert whole.broken_text(seal(a="1", b="0", c="3", e="5")) == "not as it was sealed: b, d, e"
    assert whole.broken_text(seal()) == "not as it was sealed: a, b, c and 1 more file"
    assert whole.broken_text(seal(f="1")) == "not as it was sealed: a, b, c and 2 more files"
    typed = seal("typed", a="1")
    assert typed.broken_text(seal(a="1")) == "its digest is not that of the files in seal.json"
