"""Sharing one GPU among several runs: NVIDIA's Multi-Process Service lets their kernels run at the same time.

Without it the processes take turns on the device, and small networks leave most of it idle in each turn. The service
cannot be started if another user's is running, if the driver lacks it, and inside some containers. The processes then
take turns, and the audit says so.

The service has a pool of connections to the device, of which each process takes some for itself. They are divided among
the processes where there are many.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence

import torch

from fedaudit.cuda_streams import CONNECTIONS, ENOUGH
from fedaudit.runtime.world import on_gpu
from fedaudit.setting import Setting

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 10  # seconds allowed to start or to end the service
POOL = 96  # connections that processes may ask for together: two for each of the 48 that the service allows
SHARED = 3.0  # speed-up over one process, of nine small networks on one H200 with the service (docs/results)


def at_once(settings: Sequence[Setting], jobs: int) -> float:
    """Return how many times faster than one process `jobs` processes are.

    On processors this is `jobs`. On a GPU, kernels run at the same time only with the service: the factor is at most
    the one measured with it, and 1 without it."""
    if jobs < 2 or not any(map(on_gpu, settings)):
        return float(max(1, jobs))
    there = "CUDA_MPS_PIPE_DIRECTORY" in os.environ or shutil.which(CONTROL) is not None
    return min(float(jobs), SHARED) if there else 1.0


def connections(jobs: int) -> int:
    """Return how many connections to the device each of several processes asks for: as alone, while the pool lasts."""
    return min(ENOUGH, max(1, POOL // jobs))


@contextlib.contextmanager
def shared_gpu(settings: Sequence[Setting], jobs: int) -> Iterator[str | None]:
    """Run a service of this audit's own while several processes use a GPU. Yield a note on it; None if not needed."""
    if jobs < 2 or not torch.cuda.is_available() or not any(map(on_gpu, settings)):
        yield None
        return
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "the GPU is shared through the MPS server that is already there"
        return
    if shutil.which(CONTROL) is None:
        yield f"the processes take turns on the GPU: there is no {CONTROL}"
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        where = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        env = {**os.environ, **where}
        try:
            started = subprocess.run([CONTROL, "-d"], env=env, capture_output=True, text=True, timeout=SECONDS)
            trouble = started.stderr.strip() if started.returncode else None
        except (OSError, subprocess.TimeoutExpired) as e:
            trouble = str(e)
        if trouble is not None:
            yield f"the processes take turns on the GPU: {CONTROL} did not start ({trouble or 'it gave no reason'})"
            return
        before = dict(os.environ)
        os.environ.update(where)  # the workers inherit these
        if before.get(CONNECTIONS) == str(ENOUGH):  # asked for by this package, and by nobody else
            os.environ[CONNECTIONS] = str(connections(jobs))
        try:
            yield f"the GPU is shared by {jobs} processes through an MPS server"
        finally:
            for name in where:
                os.environ.pop(name, None)
            if CONNECTIONS in before:
                os.environ[CONNECTIONS] = before[CONNECTIONS]
            with contextlib.suppress(
                OSError, subprocess.TimeoutExpired
            ):  # the service ends with its clients in any case
                subprocess.run([CONTROL], env=env, input="quit\n", capture_output=True, text=True, timeout=SECONDS)
