"""Attacks: one file per attack. Import name: fedaudit.attacks."""

if __name__ != "fedaudit.attacks":
    raise ImportError(
        f"{__name__!r} would be a second copy of fedaudit.attacks, with classes that no registry knows. "
        "Write `import fedaudit.attacks`."
    )
