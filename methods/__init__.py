"""Methods: one file per method, one paper each. Import name: fedaudit.methods."""

if __name__ != "fedaudit.methods":
    raise ImportError(
        f"{__name__!r} would be a second copy of fedaudit.methods, with message classes that no transcript knows. "
        "Write `import fedaudit.methods`."
    )
