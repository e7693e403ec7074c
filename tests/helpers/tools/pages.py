"""Scripts, summaries and records of benchmarks/studies, for the tests of the pages that they make."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
STUDIES = ROOT / "benchmarks" / "studies"


def of_study(name: str) -> Path:
    """Return a file or folder by a name that one study uses: `fedaf_gate.toml`, `records/fedaf_gate`."""
    (found,) = STUDIES.glob(f"*/{name}")
    return found


def script(name: str) -> ModuleType:
    """Import a script of a study by its name."""
    spec = importlib.util.spec_from_file_location(name, of_study(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@contextmanager
def script_in_place(name: str) -> Iterator[ModuleType]:
    """Import a script that imports others of its study. The path of imports is as it was afterwards."""
    before = list(sys.path)
    sys.path.insert(0, str(of_study(f"{name}.py").parent))
    try:
        yield script(name)
    finally:
        sys.path[:] = before
