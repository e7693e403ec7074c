"""Attacks: one file per attack, in a folder for each question that attacks answer. Import name: fedaudit.attacks.

A module can be imported without its folder: `fedaudit.attacks.lira` is the module of that name, wherever it lies.
"""

if __name__ != "fedaudit.attacks":
    raise ImportError(
        f"{__name__!r} would be a second copy of fedaudit.attacks, with classes that no registry knows. "
        "Write `import fedaudit.attacks`."
    )

from fedaudit.registry import without_family

without_family(__name__, __path__)
