"""Freed memory stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedaudit
from fedaudit.training import allocator

# Twice six pieces of 4 MB, freed in turn: how many pages the system has to hand out for the second six.
FAULTS = """
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("allocator", sys.argv[1])
allocator = importlib.util.module_from_spec(spec)
spec.loader.exec_module(allocator)
print(allocator.keep_freed())
def take():
    pieces = [bytearray(4 << 20) for _ in range(6)]
    for piece in pieces:
        piece[::4096] = b"1" * len(piece[::4096])
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**env: str) -> tuple[str, int]:
    path = Path(fedaudit.__file__).parent / "training" / "allocator.py"
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_") and key != "LD_PRELOAD"}
    command = [sys.executable, "-c", FAULTS, str(path)]
    done = subprocess.run(command, env=plain | env, capture_output=True, text=True, check=True)
    said, count = done.stdout.split()
    return said, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_what_was_freed_is_taken_again_without_the_system() -> None:
    said, count = faults()
    assert said == "True"
    assert count < 600, "a tenth of 24 MB"
    said, count = faults(MALLOC_ARENA_MAX="1")  # who says something of his own is left alone
    assert said == "False"
    assert count > 3000


@pytest.mark.parametrize(
    ("variables", "agreed", "asked"),
    [
        ({}, (1, 1), [(-3, 1 << 25), (-1, 1 << 27)]),
        ({}, (1, 0), [(-3, 1 << 25), (-1, 1 << 27)]),
        ({}, (0, 1), [(-3, 1 << 25)]),
        ({"LD_PRELOAD": "x"}, (1, 1), []),
        ({"PATH": "x", "MALLOC_TRIM_THRESHOLD_": "1"}, (1, 1), []),
        ({"MY_MALLOC_": "1", "LD_PRELOADED": "1"}, (1, 1), [(-3, 1 << 25), (-1, 1 << 27)]),
    ],
)
def test_what_the_c_library_is_asked_for(
    variables: dict[str, str], agreed: tuple[int, int], asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[int, int]] = []

    def mallopt(what: int, size: int) -> int:
        said.append((what, size))
        return agreed[len(said) - 1]

    monkeypatch.setattr(allocator, "os", SimpleNamespace(environ=variables))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert allocator.keep_freed.__wrapped__() is (bool(asked) and agreed == (1, 1))
    assert said == asked
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert allocator.keep_freed.__wrapped__() is False, "another C library"
