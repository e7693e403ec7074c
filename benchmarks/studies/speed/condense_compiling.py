"""How long a compiler takes for the kernels of FedAF's condensation, on a CPU.

    python benchmarks/studies/speed/condense_compiling.py --json condense_compiling.json

FedAF's network on CIFAR-10's shape, folded as on a GPU: the embeddings of images without gradient, and with one. A
process does this once, with an empty cache of compiled kernels; `--times` processes do it one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SHAPE, ROWS = (3, 32, 32), 64


def first_step() -> float:
    """Return the seconds of the first embeddings and their gradient, nearly all of which is compiling."""
    from fedaudit.methods.condensation import _folded
    from fedaudit.methods.condensation._condense import Sampled
    from fedaudit.training import models

    torch.compile(lambda t: t.relu() + 1)(torch.randn(64))  # what the first compiling of a process takes beside
    vars(_folded)["_fuses"] = lambda x: True  # as on a GPU with compiled steps
    f = Sampled(models.build("convnet", shape=SHAPE, classes=10).eval(), folded=True, channels_last=True)
    f.interpolate(0.9)
    x = torch.randn(ROWS, *SHAPE)
    begun = time.perf_counter()
    f.real(x)
    f.encode(x.requires_grad_()).sum().backward()
    took = time.perf_counter() - begun
    if _folded._uncompiled:
        raise SystemExit(f"Not compiled: {_folded._uncompiled}. See the warnings above.")
    return took


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--times", type=int, default=3)
    asked.add_argument("--json", type=Path)
    asked.add_argument("--once", action="store_true", help="in this process; prints the seconds")
    found = asked.parse_args(words)
    if found.once:
        print(first_step())
        return
    seconds = [_in_a_process() for _ in range(found.times)]
    kept = {
        "seconds": [round(s, 1) for s in seconds],
        "median": round(statistics.median(seconds), 1),
        "torch": torch.__version__,
        "machine": f"{platform.machine()} CPU",
    }
    print(json.dumps(kept))
    if found.json:
        found.json.write_text(json.dumps(kept, indent=1) + "\n")


def _in_a_process() -> float:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, "--once"], env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
