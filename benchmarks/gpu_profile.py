"""Where a round's time goes on a GPU: by phase, by kernel, and what ways there are to run a step of many networks.

    python benchmarks/gpu_profile.py --out runs/profile                      # about two minutes on an H200
    python benchmarks/gpu_profile.py --out runs/profile --only fedavg,ways --seconds 60
    python benchmarks/gpu_profile.py --out runs/profile-tiny --tiny --device cpu   # that it runs

By phase: functions of the harness are timed, the device waited for before and after each, so a phase's own time
(without that of the phases inside it) adds up to the round's. By kernel: torch's profiler over the run, the longest
ones. The lines are those of `gpu_speed.py`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from gpu_speed import COMPILED, LINES, SERIAL, STACKED, Bench, fedfree_row  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.func import functional_call, vmap  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from fedaudit.runtime.lockstep import here  # noqa: E402
from fedaudit.training.cuda_graphs import halves  # noqa: E402

PHASES = """
fedaudit.runtime.runner:_one_round _evaluate_round commit _check_traffic
fedaudit.runtime.task:run_task received open_client encode
fedaudit.runtime.world:World.blank_model World.fresh_model World.members World.site
fedaudit.runtime.checkpoint:Store.client Store.put_client Store.settle Store._write
fedaudit.runtime.party:Client.release Client.settle Client.fit Server.fit Party.optimise
fedaudit.runtime.lockstep:Turn.go_on Turn._away Turn.__post_init__ Globals.put Globals.keep stacks _descend
fedaudit.runtime.meter:Meter.close Meter.__init__
fedaudit.wire.channel:Wire.back Wire._record encode decode
fedaudit.wire.transcript:TranscriptWriter.message TranscriptWriter.end_round
fedaudit.wire.codec.packing:at_home packed unpacked digest Held.copies
fedaudit.wire.codec:digest _digest_there at_home packed unpacked
fedaudit.training.fit:fit
fedaudit.training.cuda_graphs:_capture
fedaudit.training.stacked.stack:_Fitting.__init__ _Fitting._record _Fitting._step _Fitting.go _Fitting.result _mapped
fedaudit.training.descent:_UnderWay.begin Descent.alone
fedaudit.methods.dffke:unify decode outputs DFFKE.train_decoder DFFKE.local_training DFFKE.answer DFFKE.exchange
fedaudit.methods.datafree._decoder:in_chunks load Decoder.__init__ Decoder.forward
"""


TF32, BF16 = {"precision": "tf32"}, {"precision": "bf16"}
LAST = TF32 | {"channels_last": True}


class Clock:
    """Own and whole seconds of each wrapped function, and how often it was called; per thread, one at a time."""

    def __init__(self, device: str):
        self.device, self.rows = device, dict[str, list[float]]()
        self._local = threading.local()

    def sync(self) -> None:
        """Wait for the device; not inside a recording, nor where writing goes on behind: that would undo one."""
        behind = threading.current_thread() is not threading.main_thread() and here() is None
        if self.device.startswith("cuda") and not behind and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    def wrap(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inside: list[float] = self._local.__dict__.setdefault("inside", [])
            self.sync()
            begun = time.perf_counter()
            inside.append(0.0)
            try:
                return fn(*args, **kwargs)
            finally:
                self.sync()
                whole = time.perf_counter() - begun
                row = self.rows.setdefault(name, [0.0, 0.0, 0])
                row[0] += whole - inside.pop()
                row[1] += whole
                row[2] += 1
                if inside:
                    inside[-1] += whole

        return timed

    @contextmanager
    def watching(self) -> Iterator[None]:
        """All phases wrapped. A name that is not there any more is left out."""
        put_back = []
        for line in PHASES.split("\n"):
            module_name, _, names = line.partition(":")
            if not names:
                continue
            module = importlib.import_module(module_name)
            for path in names.split():
                holder: Any = module
                *above, last = path.split(".")
                for part in above:
                    holder = getattr(holder, part, None)
                if (fn := vars(holder).get(last) if holder is not None else None) is None:
                    continue
                put_back.append((holder, last, fn))
                setattr(holder, last, self.wrap(f"{module_name.rpartition('.')[2]}.{path}", fn))
        try:
            yield
        finally:
            for holder, last, fn in put_back:
                setattr(holder, last, fn)


class Profile(Bench):
    """A bench whose variants are looked into instead of compared."""

    ways: ClassVar[dict[str, list[tuple[dict[str, Any], bool]]]] = {  # how, and whether its kernels are looked at
        "fedavg": [(COMPILED | TF32, True), (STACKED | TF32, True), (SERIAL, False)],
        "fedfree_cnn": [(STACKED, True), (SERIAL, False)],
        "dfrd": [(STACKED | TF32, True), (SERIAL, False), (COMPILED | TF32, False)],
        "dffke": [(STACKED | TF32, True)],
        "dffke_second": [(COMPILED | TF32, True)],
        "fedaf": [(COMPILED | TF32, True), (STACKED | TF32, True), (COMPILED | BF16, True), (COMPILED | LAST, False)],
    }
    shorter: ClassVar[dict[str, dict[str, Any]]] = {"fedaf": {"steps": 200, "E": 100}}  # a fifth of the preset's
    # Where kernels are looked at, of which there are millions: a tenth of the docking, a fourth of local training.
    fewer: ClassVar[dict[str, dict[str, Any]]] = {"dffke": {"E_local": 5, "T_Tran": 10}}

    def variants(self, names: dict[str, dict[str, Any]], rounds: int = 2, **setting: Any) -> None:
        rounds = min(rounds, 2)
        if self.name in self.shorter and not self.tiny:
            setting["set"] = {**setting.get("set", {}), **self.shorter[self.name]}
        for how, looked_at in self.ways[self.name]:
            key = "_".join(str(value) for value in how.values())
            for kernels in (False, True) if looked_at else (False,):
                if self.left() < 8:
                    continue
                try:
                    found = (self.kernels if kernels else self.phases)(rounds, {**setting, **how})
                except Exception as e:  # noqa: BLE001 (one way that fails must not cost the others)
                    traceback.print_exc()
                    found = {"failed": f"{type(e).__name__}: {e}".splitlines()[0]}
                self.save(**{key + ("_kernels" if kernels else ""): found})

    def phases(self, rounds: int, setting: dict[str, Any]) -> dict[str, Any]:
        clock = Clock(self.device)
        with clock.watching():
            record, _, took = self.run(**setting, rounds=rounds, eval_every=1)
        table = sorted(clock.rows.items(), key=lambda item: -item[1][0])
        rows = {name: [round(own, 4), round(whole, 4), int(n)] for name, (own, whole, n) in table if whole > 0.003}
        each = [round(r.wall_s, 3) for r in record.rounds]
        return {"rounds_s": each, "run_s": round(took, 2), "own_whole_calls": rows, "notes": record.notes}

    def kernels(self, rounds: int, setting: dict[str, Any]) -> dict[str, Any]:
        activities = [
            torch.profiler.ProfilerActivity.CUDA if self.device != "cpu" else torch.profiler.ProfilerActivity.CPU
        ]
        if self.name in self.fewer and not self.tiny:
            setting = {**setting, "set": {**setting["set"], **self.fewer[self.name]}}
        with torch.profiler.profile(activities=activities) as seen:
            record, _, _ = self.run(**setting, rounds=rounds, eval_every=rounds)
        of = "self_device_time_total" if self.device != "cpu" else "self_cpu_time_total"
        table = sorted(seen.key_averages(), key=lambda row: -getattr(row, of))
        total = sum(getattr(row, of) for row in table)
        top = [[row.key[:90], round(getattr(row, of) / 1e6, 4), row.count] for row in table[:24]]
        return {"rounds_s": [round(r.wall_s, 3) for r in record.rounds], "kernels_s": round(total / 1e6, 3), "top": top}


# --- ways to run a step of many networks -----------------------------------------------------------------------------


def clocked(bench: Profile, step: Callable[[], Any], times: int = 20) -> float:
    """Milliseconds of a step, recorded where there is a GPU."""
    run = step
    if bench.device.startswith("cuda"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step()
        run = graph.replay
    run()
    bench.sync()
    begun = time.perf_counter()
    for _ in range(times):
        run()
    bench.sync()
    return round((time.perf_counter() - begun) / times * 1000, 3)


def on_streams(steps: Sequence[Callable[[], Any]], device: torch.device) -> Callable[[], None]:
    """Return a function that carries out all steps, each on a stream of its own where there is a GPU."""
    streams = [torch.cuda.Stream() for _ in steps] if device.type == "cuda" else []

    def go() -> None:
        if not streams:
            for step in steps:
                step()
            return
        here = torch.cuda.current_stream()
        for step, stream in zip(steps, streams, strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                step()
        for stream in streams:
            here.wait_stream(stream)

    return go


def several(bench: Profile, name: str, makes: dict[str, Callable[[], Callable[[], Any]]]) -> None:
    found: dict[str, Any] = {}
    for way, make in makes.items():
        if bench.left() < 5:
            break
        try:
            found[way] = clocked(bench, make())
        except Exception as e:  # noqa: BLE001
            found[way] = f"{type(e).__name__}: {e}".splitlines()[0][:120]
    bench.save(**{name: found})


def ways(bench: Profile) -> None:
    """Milliseconds of one step of ten networks."""
    from fedaudit.training.models import build
    from fedaudit.training.stacked.convolution_products import conv2d

    device, cuda = torch.device(bench.device), bench.device.startswith("cuda")
    M, B = (2, 4) if bench.tiny else (10, 64)

    def one_after_another(step: Callable[[int], None]) -> None:
        for m in range(M):
            step(m)

    def streams(step: Callable[[int], None]) -> Callable[[], None]:
        return on_streams([functools.partial(step, m) for m in range(M)], device)

    def layer(last: bool, backward: bool) -> dict[str, Callable[[], Callable[[], Any]]]:
        """A convolution 128 -> 128 on 14 x 14 of ten networks, forward and with the gradient of input and weight."""
        form = torch.channels_last if last else torch.contiguous_format

        def grouped() -> Callable[[], Any]:
            x = torch.randn(B, M * 128, 14, 14, device=device).to(memory_format=form).requires_grad_()
            w = torch.randn(M * 128, 128, 3, 3, device=device).to(memory_format=form).requires_grad_()
            return lambda: torch.autograd.grad(F.conv2d(x, w, padding=1, groups=M).sum(), [x, w] if backward else [x])

        def one_by_one(side: bool) -> Callable[[], Callable[[], Any]]:
            def make() -> Callable[[], Any]:
                x = [
                    torch.randn(B, 128, 14, 14, device=device).to(memory_format=form).requires_grad_() for _ in range(M)
                ]
                w = [
                    torch.randn(128, 128, 3, 3, device=device).to(memory_format=form).requires_grad_() for _ in range(M)
                ]

                def step(m: int) -> None:
                    torch.autograd.grad(F.conv2d(x[m], w[m], padding=1).sum(), [x[m], w[m]] if backward else [x[m]])

                return streams(step) if side else lambda: one_after_another(step)

            return make

        def product() -> Callable[[], Any]:
            x = torch.randn(M, B, 128, 14, 14, device=device, requires_grad=True)
            w = torch.randn(M, 128, 128, 3, 3, device=device, requires_grad=True)
            run = vmap(lambda x, w: conv2d(x, w, None, (1, 1)))
            return lambda: torch.autograd.grad(run(x, w).sum(), [x, w] if backward else [x])

        return {"grouped": grouped, "one by one": one_by_one(False), "streams": one_by_one(True), "products": product}

    def whole(arch: str, batch: int, last: bool) -> dict[str, Callable[[], Callable[[], Any]]]:
        """A training step of ten networks: gradients of all parameters."""
        form = torch.channels_last if last else torch.contiguous_format

        def nets() -> list[nn.Module]:
            return [build(arch, shape=(1, 28, 28), classes=10).to(device, memory_format=form).train() for _ in range(M)]

        def rows() -> tuple[Tensor, Tensor]:
            x = torch.randn(M, batch, 1, 28, 28, device=device)
            return x, torch.randint(10, (M, batch), device=device)

        def apart() -> Callable[[], Any]:
            models, (x, y) = nets(), rows()

            def step(m: int) -> None:
                loss = F.cross_entropy(models[m](x[m]), y[m])
                torch.autograd.grad(loss, list(models[m].parameters()))

            return streams(step)

        def stacked(compile: bool) -> Callable[[], Callable[[], Any]]:
            def make() -> Callable[[], Any]:
                models, (x, y) = nets(), rows()
                names = [name for name, _ in models[0].named_parameters()]
                params = {n: torch.stack([dict(f.named_parameters())[n].detach() for f in models]) for n in names}
                rest = {
                    n: torch.stack([dict(f.named_buffers())[n] for f in models]) for n, _ in models[0].named_buffers()
                }
                picks = F.one_hot(y, 10).float()

                def one(p: Any, r: Any, x: Tensor, picked: Tensor) -> Tensor:
                    return -(F.log_softmax(functional_call(models[0], {**p, **r}, (x,)), 1) * picked).sum(1).mean()

                run: Any = vmap(one)
                run = torch.compile(run, dynamic=False) if compile else run

                def step() -> None:
                    leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
                    torch.autograd.grad(run(leaves, rest, x, picks).sum(), list(leaves.values()))

                return step

            return make

        found = {"streams": apart, "stacked": stacked(False)}
        compiled = cuda and not last and arch == "convnet" and torch.backends.cudnn.allow_tf32
        return found | ({"stacked compiled": stacked(True)} if compiled else {})

    for precision, deterministic in (("tf32", True), ("float32", True), ("tf32", False)):
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.benchmark = not deterministic
        said = f"{precision} {'deterministic' if deterministic else 'free'}"
        for last in (False, True):
            at = f"{said}{' channels_last' if last else ''}"
            several(bench, f"layer {at}", layer(last, True))
            several(bench, f"layer to its input {at}", layer(last, False))
            several(bench, f"convnet {at}", whole("convnet", B, last))
        several(bench, f"fedfree_cnn {said}", whole("fedfree_cnn", 10, False))
    torch.use_deterministic_algorithms(False)


# --- a step of condensation ------------------------------------------------------------------------------------------


def condense(bench: Profile) -> None:
    """Milliseconds of the parts of a client's step in FedAF's condensation, at Fashion-MNIST's size."""
    from fedaudit.methods.condensation._condense import Records, Sampled, dm
    from fedaudit.methods.condensation._folded import _carry_out
    from fedaudit.training.cuda_graphs import conditions
    from fedaudit.training.models import build

    device = torch.device(bench.device)
    B, IPC = (8, 4) if bench.tiny else (256, 50)

    def client(P: int) -> tuple[Sampled, Records, Tensor]:
        net = build("convnet", shape=(1, 28, 28), classes=10).to(device)
        x = torch.rand(P * 3 * B, 1, 28, 28, device=device) * 2 - 1
        D = Records(x, torch.arange(len(x), device=device) % P, B)
        D.ahead(0)
        return Sampled(net, folded=True), D, D.start("average", IPC, 10).requires_grad_()

    def step(P: int) -> Callable[[], Any]:
        w, D, S = client(P)

        def go() -> None:
            w.interpolate(0.9)
            mu = D.mean(w.real(D.draw()))
            loss = dm(mu, w.encode(S.flatten(0, 1)).unflatten(0, S.shape[:2]).mean(1))
            torch.autograd.grad(loss, S)

        return go

    def syn(P: int) -> Callable[[], Any]:
        w, _, S = client(P)
        return lambda: torch.autograd.grad(w.encode(S.flatten(0, 1)).square().sum(), S)

    def real(P: int) -> Callable[[], Any]:
        w, D, _ = client(P)
        x = D.draw().clone()
        return lambda: w.real(x)

    def stages(P: int, at: int) -> Callable[[], Any]:
        """The real records through one stage alone."""
        w, D, _ = client(P)
        assert w._folded is not None
        x, dtype = D.draw().clone(), halves() or torch.float32
        with torch.no_grad():
            for i, (stage, (weight, b)) in enumerate(zip(w._folded._stages, w._folded.weights(), strict=True)):
                if i == at:
                    break
                x = _carry_out(x.to(dtype), weight, b, stage.padding, stage.pool)
            x = x.to(dtype).clone(memory_format=torch.preserve_format)

        def go() -> None:
            with torch.no_grad():
                _carry_out(x, weight, b, stage.padding, stage.pool)

        return go

    def product(P: int) -> Callable[[], Any]:
        """The second stage's convolution without what comes after it."""
        x = torch.randn(P * B, 128, 14, 14, device=device, dtype=halves() or torch.float32)
        x = x.to(memory_format=torch.channels_last)
        w = torch.randn(128, 128, 3, 3, device=device, dtype=x.dtype).to(memory_format=torch.channels_last)
        return lambda: F.conv2d(x, w, padding=1)

    def lanes(P: int, K: int) -> Callable[[], Any]:
        return on_streams([step(P) for _ in range(K)], device)

    P_ = functools.partial
    for precision, stepping, free in (
        ("tf32", "compiled", False), ("tf32", "recorded", False), ("bf16", "compiled", False),
        ("tf32", "compiled", True), ("bf16", "compiled", True), ("float32", "recorded", False),
    ):  # fmt: skip
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision != "float32"
        torch.use_deterministic_algorithms(not free)
        torch.backends.cudnn.benchmark = free
        with conditions(stepping, bf16=precision == "bf16", stacked=True):  # type: ignore[arg-type]
            for P in (1, 3):
                several(bench, f"{precision} {stepping}{' free' if free else ''}, {P} classes", {
                    "step": P_(step, P), "weights": lambda P=P: P_(client(P)[0].interpolate, 0.9),
                    "draw": lambda P=P: client(P)[1].draw, "real": P_(real, P), "syn": P_(syn, P),
                    "real 1": P_(stages, P, 0), "real 2": P_(stages, P, 1), "real 3": P_(stages, P, 2),
                    "product 2": P_(product, P),
                    "eight clients": P_(lanes, P, 8),
                })  # fmt: skip
    torch.use_deterministic_algorithms(False)


# --- several seeds as one stack ---------------------------------------------------------------------------------------


def seeds(bench: Profile) -> None:
    """FedFree's row, one seed and three as one stack: a step of ten and of thirty networks, the kernels of one, and in
    which functions a round's time goes."""
    for count in (1, 3):
        bench.save(**{f"{10 * count} networks": _step(bench, 10 * count)})
    for count in (1, 3):
        bench.save(**{f"{count} seeds": _round_of_seeds(bench, count)})


def _step(bench: Profile, count: int) -> dict[str, Any]:
    """Return the milliseconds of a compiled step of so many of FedFree's networks in batches of 10, and its kernels."""
    from fedaudit import ce, sgd
    from fedaudit.training.cuda_graphs import conditions
    from fedaudit.training.models import build
    from fedaudit.training.stacked.stack import Job, fit_together

    device, short, long = torch.device(bench.device), *((10, 20) if bench.tiny else (100, 500))
    arch, shape = ("cnn@0.1", (1, 8, 8)) if bench.tiny else ("fedfree_cnn", (3, 32, 32))

    def train(steps: int) -> float:
        jobs = []
        for i in range(count):
            model = build(arch, shape=shape, classes=10).to(device)
            rows = torch.randn(1000, *shape, device=device), torch.randint(10, (1000,), device=device)
            options = {"opt": sgd(0.01), "batch": 10, "steps": steps}
            jobs.append(Job(model, ce, rows, torch.Generator(device).manual_seed(i), options))
        bench.sync()
        begun = time.perf_counter()
        fit_together(jobs)
        bench.sync()
        return time.perf_counter() - begun

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with conditions("compiled", stacked=True):
        first = train(long)
        took = {steps: min(train(steps) for _ in range(3)) for steps in (short, long)}
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CUDA if bench.device != "cpu" else kinds.CPU]) as seen:
            train(short)
    torch.use_deterministic_algorithms(False)
    of = "self_device_time_total" if bench.device != "cpu" else "self_cpu_time_total"
    rows = sorted(seen.key_averages(), key=lambda row: -getattr(row, of))
    return {
        "first_s": round(first, 2),
        "step_ms": round((took[long] - took[short]) / (long - short) * 1000, 4),
        "beside_steps_ms": round((took[short] - (took[long] - took[short]) / (long - short) * short) * 1000, 1),
        "kernels_ms": round(sum(getattr(row, of) for row in rows) / 1000 / short, 4),
        "longest": [[r.key[:120], round(getattr(r, of) / 1000 / short, 4), r.count / short] for r in rows[:40]],
    }


def _round_of_seeds(bench: Profile, count: int) -> dict[str, Any]:
    """Return the seconds of each round of so many seeds, and in which functions the later rounds' time went."""
    from stack_samples import StackSamples

    from fedaudit.runtime import runner
    from fedaudit.runtime.seeds_together import run_seeds

    samples, folder = StackSamples(), Path(tempfile.mkdtemp(prefix="profile-"))
    real, begun = runner._one_round, False

    def one_round(run: Any, t: int) -> None:
        nonlocal begun
        if t == 2 and not begun:  # the first round compiles
            begun = True
            until_the_end.enter_context(samples.watching())
        real(run, t)

    with ExitStack() as until_the_end, mock.patch.object(runner, "_one_round", one_round):
        setting = fedfree_row(bench, 3 if bench.tiny else 5)
        records = run_seeds(setting, range(count), out=[folder / str(seed) for seed in range(count)])
    each = [[round(r.wall_s, 3) for r in record.rounds] for record in records]
    return {"rounds_s": each, "sampled_s": round(samples.seconds, 2), "samples": samples.table()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="fedfree_cnn,fedavg,ways,dfrd,dffke")
    parser.add_argument("--seconds", type=float, default=150.0, help="nothing further begins after these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    bench = Profile(chosen.out, chosen.device, chosen.tiny, chosen.seconds)
    for name in chosen.only.split(","):
        bench.name, bench.figures = name, {}
        bench.save(torch=torch.__version__, seconds_left=round(bench.left(), 1))
        try:
            {"ways": ways, "condense": condense, "seeds": seeds}.get(name, LINES.get(name))(bench)
        except Exception as e:  # noqa: BLE001 (a line that fails must not cost the others)
            traceback.print_exc()
            bench.save(failed=f"{type(e).__name__}: {e}".splitlines()[0])
        print(json.dumps({name: round(bench.left(), 1)}), flush=True)


if __name__ == "__main__":
    main()
