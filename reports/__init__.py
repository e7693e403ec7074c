"""Pages, tables and figures made from run records. Import it as fedaudit.reports."""

if __name__ != "fedaudit.reports":
    raise ImportError(f"{__name__!r} would be a second copy of fedaudit.reports. Write `import fedaudit.reports`.")
