"""Methods: one file per method, one paper each, in a folder for each family. Import name: fedaudit.methods.

A module can be imported without its family: `fedaudit.methods.fedavg` is the module of that name, wherever it lies.
"""

if __name__ != "fedaudit.methods":
    raise ImportError(
        f"{__name__!r} would be a second copy of fedaudit.methods, with message classes that no transcript knows. "
        "Write `import fedaudit.methods`."
    )

from fedaudit.registry import without_family

without_family(__name__, __path__)
