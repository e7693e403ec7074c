"""Keys and masks against published vectors."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cryptography")

from fedaudit.aggregation.secure import keys
from fedaudit.aggregation.secure.keys import KeyPair, add_mask, derived, opened, seal, stream
from fedaudit.errors import RunError


def test_both_ends_agree_and_purposes_differ():
    a, b, c = (KeyPair(derived(bytes([i]) * 32, "x")) for i in range(3))
    assert a.agree(b.public, "mask") == b.agree(a.public, "mask")
    assert a.agree(b.public, "mask") != a.agree(b.public, "seal")
    assert a.agree(b.public, "mask") != a.agree(c.public, "mask")
    with pytest.raises(RunError, match="X25519"):
        a.agree(bytes(32), "mask")


def test_a_mask_is_the_key_stream_of_aes_in_counter_mode():
    """NIST's AES-256 of the zero block under the zero key is dc95c078a2408989ad48a21492842087 (FIPS 197 KAT)."""
    vector = np.zeros(4, np.uint32)
    add_mask(vector, bytes(32), 1)
    assert vector.astype("<u4").tobytes().hex() == "dc95c078a2408989ad48a21492842087"
    add_mask(vector, bytes(32), -1)
    assert not vector.any()


def test_a_long_mask_is_one_stream():
    """A mask longer than a chunk goes on where the last chunk ended, and its beginning is that of a short one."""
    long, short = np.zeros(100_003, np.uint32), np.zeros(32_769, np.uint32)
    add_mask(long, bytes(32), 1)
    add_mask(short, bytes(32), 1)
    assert np.array_equal(long[:32_769], short)
    assert len(np.unique(long)) > 99_900


def test_a_sealed_text_opens_for_its_sender_only():
    key = bytes(range(32))
    assert opened(key, 3, seal(key, 3, b"share")) == b"share"
    with pytest.raises(RunError, match="client 4"):
        opened(key, 4, seal(key, 3, b"share"))


def test_without_the_library_it_is_said(monkeypatch):
    keys.check_installed()
    monkeypatch.setattr(keys, "HKDF", None)
    with pytest.raises(RunError, match="needs the library `cryptography`"):
        keys.check_installed()


@pytest.mark.parametrize("words", [1, 32_767, 32_768, 32_769])
def test_a_mask_is_its_stream_word_by_word(words):
    """Around the length of a chunk, 32 768 words."""
    wanted = np.frombuffer(stream(bytes(32), 4 * words), "<u4")
    vector = np.full(words, 5, np.uint32)
    add_mask(vector, bytes(32), 1)
    assert np.array_equal(vector, wanted + np.uint32(5))
    add_mask(vector, bytes(32), -1)
    assert (vector == 5).all()


def test_derived_keys_have_the_size_that_is_asked_for():
    assert len(derived(bytes(32), "x")) == 32
    assert len(derived(bytes(32), "x", 48)) == 48
    assert derived(bytes(32), "x") != derived(bytes(32), "y")
