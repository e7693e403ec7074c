"""The checks of `fedaudit doctor`: what this machine has, what is missing, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedaudit.extras import install

if TYPE_CHECKING:
    from fedaudit.training.device_rates import Rates


@dataclass(frozen=True)
class Finding:
    name: str
    fine: bool | None  # None: not needed for a plain run
    text: str

    def line(self) -> str:
        return f"{ {True: 'ok  ', False: 'BAD ', None: '--  '}[self.fine] }{self.name:<12} {self.text}"


def findings(data_dir: str = ".data") -> Iterator[Finding]:
    yield Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()} on {platform.system()}")
    yield _torch()
    yield _extra("opacus", "DP-SGD and its accountants")
    yield _extra("ray", "the engine ray")
    yield Finding("cores", True, f"{os.cpu_count()}: `fedaudit audit --jobs {max(1, os.cpu_count() or 1)}` uses them")
    free = shutil.disk_usage(".").free
    yield Finding("disk", free > 1 << 30, f"{free / 1e9:.1f} GB free here; a run keeps every message")
    yield _data(data_dir)
    yield _methods()


def _torch() -> Finding:
    import torch

    ours = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 11)
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return Finding("torch", ours, f"{torch.__version__}, {gpus or 'no GPU: --device cpu'}")


def gpu_findings() -> Iterator[Finding]:
    """Measure the GPU, and yield its rates and what makes runs on it fast."""
    import torch

    from fedaudit.suite.gpu_sharing import CONTROL
    from fedaudit.training.device_rates import rates

    if not torch.cuda.is_available():
        yield Finding("gpu", False, "torch sees no GPU here, so there is nothing to measure: leave --gpu out")
        return
    yield from rate_findings(rates(torch.device("cuda")))
    compiles = importlib.util.find_spec("triton") is not None
    yield Finding("compiler", compiles or None, "--step compiled works" if compiles else "no triton: no compiled steps")
    there = shutil.which(CONTROL) is not None
    words = "`fedaudit audit --jobs N` shares the GPU by MPS" if there else f"no {CONTROL}: runs take turns on the GPU"
    yield Finding("sharing", there or None, words)


def rate_findings(found: Rates) -> Iterator[Finding]:
    """Yield the rates of a device in words."""
    products = ", ".join(f"{name} {rate / 1e12:.3g}" for name, rate in found.products.items())
    yield Finding("products", True, f"{products} TFLOP/s, of large matrices")
    moved = f"{found.memory / 1e9:,.0f} GB/s read and written, {found.to_device / 1e9:,.0f} GB/s from main memory"
    yield Finding("memory", True, moved)
    replay = "" if found.replay_s is None else f", {1e6 * found.replay_s:.2g} us in a recording"
    yield Finding("kernels", True, f"{1e6 * found.start_s:.2g} us to start a small one{replay}")


def _extra(module: str, what: str) -> Finding:
    found = importlib.util.find_spec(module) is not None
    return Finding(
        module,
        True if found else None,
        what if found else f"not installed, needed for {what}: {install(module)}",
    )


def _data(data_dir: str) -> Finding:
    from fedaudit.data import available, datasets

    here = [name for name in datasets.names() if available(name, data_dir)]
    return Finding(
        "data", "digits" in here, f"{', '.join(here)}; put others under {data_dir}, or name them as npz:PATH"
    )


def _methods() -> Finding:
    from fedaudit.errors import FedauditError
    from fedaudit.registry import names

    try:
        return Finding("registry", True, f"{len(names('methods'))} methods, {len(names('attacks'))} attacks")
    except FedauditError as e:  # a user's package that cannot be imported
        return Finding("registry", False, str(e))
