"""Time the ways to run a training step of ten ResNet-18 on a GPU, beside the floor that its arithmetic sets.

    python benchmarks/gpu_resnets.py --out runs/resnets                       # about three minutes on an H200
    python benchmarks/gpu_resnets.py --out runs/resnets --seconds 60 --cases resnet18_cifar:64
    python benchmarks/gpu_resnets.py --out runs/resnets-tiny --tiny --device cpu   # that it runs

A step takes the gradient of all parameters and makes a step of SGD with momentum, for each of ten models on a batch of
its own. `serial eager` is what the serial engine does, without a recording; all others are recorded. `floor` is the
arithmetic of the step over the rate that products of matrices reach on the same machine in the same precision.
`free` lets torch choose kernels by time, so that two runs need not give the same bits.

One file for each case, written as soon as a figure is known: milliseconds of a step by way.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from gpu_profile import Profile, clocked, on_streams
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedaudit.training.cuda_graphs import conditions
from fedaudit.training.models import build
from fedaudit.training.stacked.convolution_products import neighbours
from fedaudit.training.stacked.layers import FullNorm, in_full, quicker
from fedaudit.training.stacked.mapped_loss import Caller, Functional, places

CASES = "resnet18_cifar:64,resnet18:256,resnet18_cifar:256,resnet18:64,resnet18_cifar:100,resnet18:100"
LAST, PLAIN = torch.channels_last, torch.contiguous_format
Step = Callable[[], Any]


class Ten:
    """Ten networks of one architecture, a batch for each, and the ways to step them."""

    def __init__(self, arch: str, batch: int, models: int, size: int, device: torch.device, bf16: bool):
        self.arch, self.batch, self.M, self.size, self.device, self.bf16 = arch, batch, models, size, device, bf16

    def nets(self, form: torch.memory_format = PLAIN) -> list[nn.Module]:
        shape = (3, self.size, self.size)
        built = [build(self.arch, shape=shape, classes=10) for _ in range(self.M)]
        return [f.to(self.device).to(memory_format=form).train() for f in built]

    def rows(self, form: torch.memory_format = PLAIN) -> tuple[list[Tensor], list[Tensor]]:
        shape = self.batch, 3, self.size, self.size
        x = [torch.randn(shape, device=self.device).to(memory_format=form) for _ in range(self.M)]
        return x, [torch.randint(10, (self.batch,), device=self.device) for _ in range(self.M)]

    def cast(self) -> Any:
        """Return a context in which factors are rounded to 16 bits, or one that changes nothing."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    def one_by_one(self, form: torch.memory_format = PLAIN, lanes: bool = False, compiled: bool = False) -> Step:
        """Return the step of each model after the other, or each on a stream of its own."""
        models, (x, y) = self.nets(form), self.rows(form)
        if compiled:
            for f in models:
                f.compile(dynamic=False)
        params = [list(f.parameters()) for f in models]
        moments = [[torch.zeros_like(p) for p in of_model] for of_model in params]

        def step(m: int) -> None:
            with self.cast():
                loss = F.cross_entropy(models[m](x[m]).float(), y[m])
            descend(params[m], list(torch.autograd.grad(loss, params[m])), moments[m])

        steps = [functools.partial(step, m) for m in range(self.M)]
        return on_streams(steps, self.device) if lanes else lambda: [of_model() for of_model in steps]

    def stacked(self, compiled: bool = False, products: bool = False) -> Step:
        """Return the step of all models as one, mapped over models: convolutions of ten groups, or products."""
        models, (x, y) = self.nets(), self.rows()
        model = in_products(models[0]) if products else quicker(models[0], compiled=compiled)
        caller = Caller(in_full(model) if self.bf16 else model)
        named_places = places(caller)
        named = [dict(f.named_parameters()) for f in models]
        held = [dict(f.named_buffers()) for f in models]
        params = {n: torch.stack([of_model[n].detach() for of_model in named]) for n in named[0]}
        rest = {n: torch.stack([of_model[n] for of_model in held]) for n in held[0]}
        moments = [torch.zeros_like(p) for p in params.values()]
        seen, picks = torch.stack(x), F.one_hot(torch.stack(y), 10).float()

        def one(p: Any, r: Any, x: Tensor, picked: Tensor) -> Tensor:
            z = Functional(caller, p, r, named_places)(x)
            return -(F.log_softmax(z, 1) * picked).sum(1).mean()

        run: Any = vmap(one)
        run = torch.compile(run, dynamic=False) if compiled else run

        def step() -> None:
            leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
            with conditions("recorded", bf16=self.bf16, stacked=True):
                loss = run(leaves, rest, seen, picks).sum()
            descend(list(params.values()), list(torch.autograd.grad(loss, list(leaves.values()))), moments)

        return step

    def flops(self) -> float:
        """Return the floating-point operations of a step of all models, two for each product and sum."""
        model = build(self.arch, shape=(3, self.size, self.size), classes=10)
        x, y = torch.randn(2, 3, self.size, self.size), torch.zeros(2, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            F.cross_entropy(model(x), y).backward()
        return counter.get_total_flops() / 2 * self.batch * self.M


class _Products(nn.Conv2d):
    """A convolution as a product with the neighbours of each pixel, of which a stride leaves some out."""

    def forward(self, input: Tensor) -> Tensor:
        down, right = self.stride
        kernel, padding = (cast(tuple[int, int], pair) for pair in (self.kernel_size, self.padding))
        seen = neighbours(input, kernel, padding)[:, ::down, ::right]
        flat = seen.flatten(0, 2) @ self.weight.permute(2, 3, 1, 0).flatten(0, 2)
        return flat.unflatten(0, seen.shape[:3]).permute(0, 3, 1, 2)


class _PlainNorm(FullNorm, nn.BatchNorm2d):
    """A batch norm in training, as a compiler joins it with what is around it: torch's own asks for a memory format,
    which a map over models cannot answer. Running statistics are left out; they are small."""

    def forward(self, input: Tensor) -> Tensor:
        x = input.float()
        mean = x.mean((0, 2, 3), keepdim=True)
        var = (x - mean).square().mean((0, 2, 3), keepdim=True)
        out = (x - mean) * (var + self.eps).rsqrt() * self.weight[:, None, None] + self.bias[:, None, None]
        return out.to(input.dtype)


def in_products(model: nn.Module) -> nn.Module:
    """Turn a model's convolutions into products and its batch norms into plain operations, and return it. For training,
    and for convolutions without a bias."""
    for m in model.modules():
        if type(m) is nn.Conv2d:
            m.__class__ = _Products
        elif type(m) is nn.BatchNorm2d:
            m.__class__ = _PlainNorm
    return model


@torch.no_grad()
def descend(params: list[Tensor], grads: list[Tensor], moments: list[Tensor]) -> None:
    """Make one step of SGD with momentum 0.9, in place."""
    torch._foreach_mul_(moments, 0.9)
    torch._foreach_add_(moments, grads)
    torch._foreach_add_(params, moments, alpha=-0.01)


def eager(bench: Profile, step: Step, times: int = 5) -> float:
    """Return the milliseconds of a step without a recording."""
    for _ in range(2):
        step()
    bench.sync()
    begun = time.perf_counter()
    for _ in range(times):
        step()
    bench.sync()
    return round((time.perf_counter() - begun) / times * 1000, 3)


def rate(bench: Profile, bf16: bool) -> float:
    """Return the operations a second that a large product of matrices reaches here."""
    n = 256 if bench.tiny else 8192
    a = torch.randn(n, n, device=bench.device, dtype=torch.bfloat16 if bf16 else torch.float32)
    return 2 * n**3 / (eager(bench, lambda: a @ a, 10) / 1000)


def ways(ten: Ten, compiling: bool) -> dict[str, tuple[bool, Callable[[], Step]]]:
    """Return each way's name, whether torch may choose kernels by time, and what makes its step."""
    found: dict[str, tuple[bool, Callable[[], Step]]] = {
        "serial eager": (False, ten.one_by_one),
        "one by one": (False, ten.one_by_one),
        "streams": (False, lambda: ten.one_by_one(lanes=True)),
        "streams, channels last": (False, lambda: ten.one_by_one(LAST, lanes=True)),
        "streams, channels last, free": (True, lambda: ten.one_by_one(LAST, lanes=True)),
        "grouped": (False, ten.stacked),
        "grouped, free": (True, ten.stacked),
    }
    if compiling:
        found["streams, channels last, compiled"] = (False, lambda: ten.one_by_one(LAST, lanes=True, compiled=True))
        found["grouped, compiled"] = (False, lambda: ten.stacked(compiled=True))
        found["products, compiled"] = (False, lambda: ten.stacked(compiled=True, products=True))
    return found


def case(bench: Profile, arch: str, batch: int, bf16: bool, only: str) -> None:
    """Time every way of one architecture, batch and precision; `compiled` ways come in a pass of their own."""
    ten = Ten(arch, 4 if bench.tiny else batch, 2 if bench.tiny else 10, 32, torch.device(bench.device), bf16)
    if only == "plain":
        reached = rate(bench, bf16)
        bench.save(flops=ten.flops(), rate=reached, floor=round(ten.flops() / reached * 1000, 3))
    for name, (free, make) in ways(ten, only == "compiled").items():
        if ("compiled" in name) != (only == "compiled") or bench.left() < (40 if "compiled" in name else 4):
            continue
        torch.use_deterministic_algorithms(not free)
        torch.backends.cudnn.benchmark = free
        begun = time.perf_counter()
        try:
            took: Any = eager(bench, make()) if name == "serial eager" else clocked(bench, make(), 5)
        except Exception as e:  # noqa: BLE001 (a way that fails must not cost the others)
            took = f"{type(e).__name__}: {e}".splitlines()[0][:160]
        bench.save(**{name: took, f"seconds to measure: {name}": round(time.perf_counter() - begun, 1)})
        if bench.device.startswith("cuda"):
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=CASES, help="ARCHITECTURE:BATCH, in order")
    parser.add_argument("--seconds", type=float, default=180.0, help="nothing further begins after these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    bench = Profile(chosen.out, chosen.device, chosen.tiny, chosen.seconds)
    kept: dict[str, dict[str, Any]] = {}
    cases = [(arch, int(batch)) for arch, _, batch in (one.partition(":") for one in chosen.cases.split(","))]
    for only, some in (("plain", cases[:2]), ("compiled", cases[:2]), ("plain", cases[2:])):
        for arch, batch in some:
            for bf16 in (False, True):
                torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
                bench.name = f"{arch}_{batch}_{'bf16' if bf16 else 'tf32'}"
                bench.figures = kept.setdefault(bench.name, {"torch": torch.__version__})
                case(bench, arch, batch, bf16, only)
                kept[bench.name] = bench.figures
    torch.use_deterministic_algorithms(False)


if __name__ == "__main__":
    main()
