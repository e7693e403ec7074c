"""Run records in; pages, tables and figures out. Import name: fedaudit.reports."""

if __name__ != "fedaudit.reports":
    raise ImportError(f"{__name__!r} would be a second copy of fedaudit.reports. Write `import fedaudit.reports`.")
