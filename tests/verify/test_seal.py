"""What is said of a seal: whether it holds, and what it shows without a signature."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit.verify import seal as module
from fedaudit.verify.finding import Findings


@pytest.mark.parametrize(
    ("signed", "key", "said"),
    [
        (False, None, ["seal"]),
        (True, None, ["signature", "seal"]),
        (True, "mine.pub", ["signature", "seal"]),
    ],
)
def test_a_seal_without_a_signature_is_said_to_show_no_forgery(signed, key, said, monkeypatch):
    files = {"record.json": "a" * 32, "transcript/index.jsonl": "b" * 32}
    signature = SimpleNamespace(public_key="c" * 64) if signed else None
    seal = SimpleNamespace(files=files, digest=module.digest_over(files), signature=signature, broken_by=lambda now: [])
    monkeypatch.setattr(module, "Seal", SimpleNamespace(of=lambda folder: seal))
    monkeypatch.setattr(module, "read_seal", lambda folder: seal)
    monkeypatch.setattr(module, "check_signature", lambda seal, key: None)
    found = Findings()
    module.check_seal(SimpleNamespace(folder="run", found=found), key)
    assert [one.figure for one in found.list] == said
    assert "2 files" in str(found.list[-1])
    assert ("unsigned" in str(found.list[-1])) is not signed
