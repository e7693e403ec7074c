"""FedAF's condensation, all classes in one pass, against a loop over classes as one would write it from the equations.

Both sides start from the same averages, re-sample the model in every step (Eq. 17) in the same way, draw B records of
each class and take an SGD step on Eq. 10. The loop sends one class after another through,
its steps are eager, and it has the same precision as ours.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedaudit import sgd
from fedaudit.methods.condensation._condense import Records, Sampled, in_chunks
from fedaudit.methods.condensation.fedaf import FedAF, swd_points
from fedaudit.rng import seeded
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.task import compute, open_client
from fedaudit.runtime.world import world_of
from fedaudit.setting import Setting


def client_with(folder, device, *, shape, classes, each, model, **how):
    """A client with `each` random records of every class."""
    n = classes * each
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (n, *shape), dtype=np.uint8), np.arange(n) % classes
    np.savez(folder / "images.npz", x=x, y=y, test_x=x[:classes], test_y=y[:classes])
    setting = Setting.make(
        method="fedaf", dataset=f"npz:{folder / 'images.npz'}", clients=1, partition="iid", holdout=0, validation=0,
        aux=0, model=model, device=device, threads=torch.get_num_threads(), **how,
    )  # fmt: skip
    world = world_of(setting.model_dump_json())
    return world, open_client(world.site(0), 1, 0, Meter("client", 1, world.device), None)


def loop(method, client, D, V):
    """Class by class, through the network as it is."""
    S = D.start(method.start, method.IPC, method.averaged).requires_grad_()
    w = Sampled(client.model, channels_last=False, folded=False)
    of_class = {c: client.x[client.y == c] for c in D.classes}

    def l_loc():
        if method.clamp == "step":
            with torch.no_grad():
                S.clamp_(-1, 1)
        f = w.interpolate(method.gamma)
        loss = torch.zeros((), device=S.device)
        for i, c in enumerate(D.classes):
            real = of_class[c]
            if len(real) > method.B:
                real = real[torch.randperm(len(real), device=real.device)[: method.B]]
            with torch.no_grad():
                mu_real = f.encode(real).mean(0)
            h = f.encode(S[i])
            loss = loss + (mu_real - h.mean(0)).pow(2).sum()
            if method.lambda_loc:
                u = f.classify(h).mean(0)
                loss = loss + method.lambda_loc * swd_points(u[None], V[c][None], method.L).mean()
        return loss

    client.optimise([S], l_loc, steps=method.steps, opt=sgd(method.eta_S, momentum=method.momentum))
    return dict(zip(D.classes, S.detach().clamp(-1, 1), strict=True))


def speed(paired, benchmark, folder, device, *, pairs, method, **client):
    """How many times as fast as the loop: on a CPU in its own seconds, which neighbours hardly change."""
    world, client = client_with(folder, device, **client)
    with compute(world):
        D = Records(client.x, client.y, method.B)
        V = client.class_means(in_chunks(client.model, D.x), "logits", D.y)
        reached = {}

        def side(name, work):
            def go():
                with seeded(0, device=world.device):
                    reached[name] = torch.stack(list(work().values()))
                if world.device.type == "cuda":
                    torch.cuda.synchronize()

            return go

        ours = side("ours", lambda: method.condensed(client, D, V if method.lambda_loc else {}))
        theirs = side("theirs", lambda: loop(method, client, D, V))
        ratio = paired(ours, theirs, pairs=pairs).ratio
        faster = 1 / (benchmark.extra_info["cpu_ratio"] if device == "cpu" else ratio)
        # The same work, or the ratio means nothing: where every record is in every batch, the images are the same too.
        if D.whole and method.lambda_loc == 0:
            moved = (reached["theirs"] - reached["ours"]).abs().max()
            assert moved < 1e-3, f"the images differ by {moved}"
    ms = 1000 * benchmark.extra_info["ours_median_s"] / method.steps
    benchmark.extra_info |= {"faster": round(faster, 2), "ms_a_step": round(ms, 3), "images": reached["ours"].shape[:2]}
    return faster


CPU = [
    # As digits at IPC 10, all classes; B covers a class. Then images of Fashion-MNIST's size and a thin convnet.
    (
        "digits",
        FedAF(steps=10, IPC=10, lambda_loc=0, clamp="step", restart=True),
        {"shape": (1, 8, 8), "classes": 10, "each": 18, "model": "cnn"},
    ),
    (
        "28x28",
        FedAF(steps=3, IPC=10, B=32, clamp="step", restart=True),
        {"shape": (1, 28, 28), "classes": 10, "each": 60, "model": "convnet@0.25"},
    ),
]


@pytest.mark.parametrize(("method", "client"), [row[1:] for row in CPU], ids=[row[0] for row in CPU])
def test_on_a_cpu_no_slower_than_a_loop_over_classes(paired, benchmark, tmp_path, method, client):
    assert speed(paired, benchmark, tmp_path, "cpu", pairs=9, method=method, **client) >= 0.8  # level, and the clock


GPU = [
    # All classes of a data set, at the paper's hyper-parameters. A step at 64 x 64 is bound by memory on both sides.
    (
        "fashion-mnist",
        3,
        FedAF.make({"steps": 100}, "fashion-mnist"),
        {"shape": (1, 28, 28), "classes": 10, "each": 600},
    ),
    # As a client holds them at alpha = 0.1, where there is less to batch; with compiled kernels on our side.
    (
        "three-classes",
        3,
        FedAF.make({"steps": 100}, "fashion-mnist"),
        {"shape": (1, 28, 28), "classes": 3, "each": 2000, "step": "compiled"},
    ),
    # The same in TF32, as runs of the paper's tables are.
    (
        "three-classes-tf32",
        3,
        FedAF.make({"steps": 100}, "fashion-mnist"),
        {"shape": (1, 28, 28), "classes": 3, "each": 2000, "precision": "tf32", "step": "compiled"},
    ),
    ("cifar100", 3, FedAF.make({"steps": 20}, "cifar100"), {"shape": (3, 32, 32), "classes": 100, "each": 50}),
    ("domainnet", 1.5, FedAF.make({"steps": 50}, "domainnet"), {"shape": (3, 64, 64), "classes": 10, "each": 60}),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize(("least", "method", "client"), [row[1:] for row in GPU], ids=[row[0] for row in GPU])
def test_on_a_gpu_three_times_as_fast_as_a_loop_over_classes(paired, benchmark, tmp_path, least, method, client):
    assert speed(paired, benchmark, tmp_path, "cuda", pairs=5, method=method, **client, model="convnet") >= least
