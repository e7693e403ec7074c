"""Other kernels than this machine's own, so that a test that holds on one processor alone fails here too.

`FEDAUDIT_TEST_KERNELS` says which, and `tests/conftest.py` reads it:

- `no-onednn`: convolutions and products are torch's own and BLAS's, as on ARM.
- `by-shape`: sums round otherwise for every shape. Another processor has other tiles and vectors, so six rows alone
  and the same six among others differ there in their last bits, though they may agree here. The same call on the same
  shapes gives the same bits again, as it does everywhere.

Only the test's own process is changed. A test that compares it with a process of its own (Ray's workers, an audit's
workers, an isolated run) compares two kinds of kernels under either, and fails for that reason alone.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

NAMES = ("no-onednn", "by-shape")

# Whatever adds terms up, in an order that a processor chooses.
SUMS = {
    "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm", "addr", "convolution",
    "convolution_backward", "native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward",
    "_batch_norm_with_update", "native_layer_norm", "native_layer_norm_backward", "native_group_norm",
    "native_group_norm_backward", "sum", "mean", "var", "std", "var_mean", "_softmax", "_log_softmax", "logsumexp",
    "_softmax_backward_data", "_log_softmax_backward_data", "nll_loss_forward", "linalg_vector_norm", "norm", "cumsum",
    "mse_loss", "_embedding_bag", "avg_pool2d", "_adaptive_avg_pool2d",
    "_scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip


class ByShape(TorchDispatchMode):
    """Within: each number that a sum gave is moved by one unit in the last place or not at all, by its call's shapes.

    Numbers with few digits stay, as a sum that rounds nothing is the same in every order.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in SUMS:
            shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
            key = zlib.crc32(f"{name} {shapes}".encode())
            for i, t in enumerate(out if isinstance(out, tuple | list) else (out,)):
                if isinstance(t, torch.Tensor) and t.is_floating_point() and t.device.type == "cpu" and t.numel():
                    move(t, key + i)
        return out


def move(t: torch.Tensor, key: int) -> None:
    eps = torch.finfo(t.dtype).eps
    few_digits = (t * 1024).frac() == 0
    t.copy_(torch.where(few_digits, t, t * (1 + eps * steps(t.numel(), key).to(t.dtype).view(t.shape))))


@functools.lru_cache(maxsize=4096)
def steps(n: int, key: int) -> torch.Tensor:
    """-1, 0 or 1 for each of n numbers."""
    return torch.randint(-1, 2, (n,), generator=torch.Generator().manual_seed(key), dtype=torch.int8)


def _by_shape(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    def within(self: threading.Thread) -> None:
        with ByShape():
            run(self)

    return within


def installed(name: str) -> None:
    """Changes the kernels of this process, for good."""
    if name not in NAMES:
        raise pytest.UsageError(f"FEDAUDIT_TEST_KERNELS={name} is not known. Choose from {', '.join(NAMES)}.")
    from fedaudit.runtime import task
    from fedaudit.training import descent

    if name == "by-shape":
        ByShape().__enter__()
        threading.Thread.run = _by_shape(threading.Thread.run)  # a mode is of one thread, and shadows have theirs
        # Steps are not recorded where somebody listens to each of their calls, as this does.
        descent.is_in_torch_dispatch_mode = lambda: len(_get_current_dispatch_mode_stack()) > 1
        return
    task.uses_onednn = lambda world: world.setting.onednn == "on"  # what a setting says still counts
