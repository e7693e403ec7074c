"""Scripts of docs/results, for the tests of the pages that they make."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, RESULTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
