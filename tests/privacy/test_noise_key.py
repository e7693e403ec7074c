"""The key of a task's noise: from the run's secret, by names that nothing joins, and once each."""

from __future__ import annotations

import stat

import pytest
import torch

from fedaudit.errors import PrivacyError, RunError
from fedaudit.privacy.noise_key import (
    NoiseKey,
    derived,
    fresh_secret,
    noise_generator,
    read_secret,
    task_key,
    write_secret,
)

SECRET = bytes(range(32))


def test_no_two_lists_of_names_are_alike():
    names = [("a", "b"), ("a/b",), ("a", "/b"), ("a/", "b"), ("", "a", "b"), ("ab",), ("a", "b", "")]
    assert len({derived(SECRET, *of) for of in names}) == len(names)
    assert derived(SECRET, "a") != derived(bytes(32), "a")


def test_each_task_has_a_key_of_its_own():
    keys = {task_key(SECRET, k, t, ask, n) for k in range(3) for t in range(3) for ask in range(2) for n in range(2)}
    assert len(keys) == 36


def test_each_generator_is_given_once():
    key = NoiseKey(SECRET)
    first = torch.randn(4, generator=key.generator("dp-sgd 1"))
    other = torch.randn(4, generator=key.generator("dp-sgd 2"))
    assert not torch.equal(first, other)
    with pytest.raises(PrivacyError, match=r"The noise of dp-sgd 1 was drawn before"):
        key.generator("dp-sgd 1")
    again = NoiseKey(SECRET, once=False)
    for _ in range(2):
        assert torch.equal(torch.randn(4, generator=again.generator("dp-sgd 1")), first)


def test_a_task_without_a_key_draws_no_noise():
    with pytest.raises(PrivacyError, match="has no key for its noise"):
        NoiseKey(b"").generator("noise")


def test_names_alone_serve_shadows():
    a, b = (torch.randn(3, generator=noise_generator((0, "client 1", i), "noise")) for i in (1, 2))
    assert not torch.equal(a, b)
    assert torch.equal(a, torch.randn(3, generator=noise_generator((0, "client 1", 1), "noise")))


def test_the_secret_is_kept_for_its_owner_alone(tmp_path):
    path, secret = tmp_path / "noise.key", fresh_secret()
    write_secret(path, secret)
    assert read_secret(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert fresh_secret() != secret


@pytest.mark.parametrize("content", ["", "00", "zz" * 32, None])
def test_a_file_that_holds_no_key_is_refused(content, tmp_path):
    path = tmp_path / "noise.key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RunError, match=r"noise\.key"):
        read_secret(path)
