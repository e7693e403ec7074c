"""Bytes in words. MB are powers of ten, MiB powers of two; several papers print GiB as "GB", this project does not."""

from __future__ import annotations


def bytes_text(n: float, *, binary: bool = False) -> str:
    base, units = (1024, ("B", "KiB", "MiB", "GiB", "TiB")) if binary else (1000, ("B", "kB", "MB", "GB", "TB"))
    power = 0
    while abs(n) >= base and power < len(units) - 1:
        n, power = n / base, power + 1
    unit = units[power]
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
