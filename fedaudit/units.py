"""Byte counts as text, such as "12 MiB", and back; and the most that may be counted of anything.

MB is a power of ten and MiB a power of two. Several papers print GiB as "GB"; this project does not.
"""

from __future__ import annotations

import re

from fedaudit.errors import SettingError

MANY = 1_000_000  # the most rounds, clients and the like: more is a typing error, and the run would never end
UNITS = {
    **{unit: 1000**i for i, unit in enumerate(("B", "kB", "MB", "GB", "TB"))},
    **{unit: 1024**i for i, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))},
}


def parse_bytes(text: str) -> float:
    """Return the number of bytes that a text such as "12 MiB" stands for."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)\s*", text)
    unit = {name.lower(): size for name, size in UNITS.items()}.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SettingError(f"{text!r} is not a size in bytes: write a number and one of {', '.join(UNITS)}.")
    return float(match[1]) * unit


def bytes_text(n: float, *, binary: bool = False) -> str:
    base, units = (1024, ("B", "KiB", "MiB", "GiB", "TiB")) if binary else (1000, ("B", "kB", "MB", "GB", "TB"))
    power = 0
    while abs(n) >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    unit = units[power]
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
