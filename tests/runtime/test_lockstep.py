"""Functions that take turns in threads of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# In this mode MKL's products depend on the number of threads; on processors without MKL all of them are equal anyway.
OTHER_BITS = {"MKL_CBWR": "COMPATIBLE"}
SCRIPT = """
import torch
from fedaudit.runtime.lockstep import Globals, Turn, take_turns

torch.manual_seed(0)
a, w, c = torch.randn(6, 128), torch.randn(10, 128), torch.randn(10)
for threads in (1, 2):
    torch.set_num_threads(threads)
    turn = Turn(lambda: torch.addmm(c, a, w.t()), Globals(torch.device("cpu")))
    take_turns([turn])
    assert torch.equal(turn.result, torch.addmm(c, a, w.t())), threads
"""


@pytest.mark.slow
def test_a_turn_computes_with_as_many_threads_as_who_gave_it() -> None:
    """A thread that was just started has OpenMP's own number of threads, whatever torch says it has."""
    for cores in ("1", "2"):
        env = {**os.environ, **OTHER_BITS, "OMP_NUM_THREADS": cores}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
