"""Byte counts as text and back, by hand."""

from __future__ import annotations

import pytest

from fedaudit.errors import SettingError
from fedaudit.units import bytes_text, parse_bytes


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("7 B", 7), ("12 MiB", 12 * 2**20), ("1.5kB", 1500), ("  3 mb ", 3_000_000), ("2 KIB", 2048), ("4GB", 4e9),
        ("0.25 GiB", 2**28), ("6 TB", 6e12), ("1 TiB", 2**40),
    ],
)  # fmt: skip
def test_a_size_is_read(text, n):
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["12", "MB", "12 XB", "-3 MB", "1. MB", "1,5 MB", "", "3 MB more"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SettingError, match="is not a size in bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("n", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1.00 kB", "1000 B"),
        (1024, "1.02 kB", "1.00 KiB"),
        (-2500, "-2.50 kB", "-2.44 KiB"),
        (3_000_000, "3.00 MB", "2.86 MiB"),
        (2**30, "1.07 GB", "1.00 GiB"),
        (5e12, "5.00 TB", "4.55 TiB"),
        (7e15, "7000.00 TB", "6366.46 TiB"),
    ],
)
def test_a_size_is_written(n, decimal, binary):
    assert (bytes_text(n), bytes_text(n, binary=True)) == (decimal, binary)
