"""A run in a process that has neither Opacus nor Ray nor torchvision: what went wrong is written to an open file."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import pytest

LACKING = ("opacus", "ray", "torchvision")


class Absent:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in LACKING:
            raise ImportError(name)


def main() -> None:
    told, out = int(sys.argv[1]), sys.argv[2]
    for name in [name for name in sys.modules if name.split(".")[0] in ("fedaudit", *LACKING)]:
        del sys.modules[name]  # this process is a fork of one that has imported them
    sys.meta_path.insert(0, Absent())
    try:
        import fedaudit

        fedaudit.run(method="fedavg", rounds=1, clients=2, out=f"{out}/a")
        with pytest.raises(fedaudit.FedauditError, match=r"pip install .ray>=2\.40"):
            fedaudit.run(method="fedavg", rounds=1, clients=2, engine="ray", out=f"{out}/b")
        os.write(told, f"came through {fedaudit.__file__}".encode())
    except BaseException:
        os.write(told, traceback.format_exc().encode())
        raise
