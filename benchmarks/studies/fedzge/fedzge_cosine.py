"""What FedZGE's estimates are worth: python benchmarks/studies/fedzge/fedzge_cosine.py [--json FILE] [--repeats 3]

Five clients of digits (mlp), each trained alone; a fresh generator and a fresh global model, as in a first round. For
batches of several sizes the cosine of each estimate with the true gradient, in the images x^ and, through the
generator, in theta_G, which is what is trained. Mean over draws of G, f, z, y^ and u, with the standard deviation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedaudit import Setting, load, run
from fedaudit.methods.datafree._zeroth import ESTIMATES, true_gradient
from fedaudit.methods.datafree.fedzge import FedZGE, Generator, along
from fedaudit.methods.shared._ensemble import ensemble, predict
from fedaudit.rng import seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.wire.codec import decode

SIZES = ((50, 10), (200, 10), (800, 10))  # B, q
SETTING = Setting.make(
    method="local", clients=5, partition="dirichlet:0.5", model="mlp", rounds=1, device="cpu", eval_clients=False,
    set={"E": 10, "B": 32, "eta": 0.1},
)  # fmt: skip


def measured(sizes: tuple[tuple[int, int], ...] = SIZES, repeats: int = 3) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        run(SETTING, out=Path(folder) / "run")
        kept = RunFolder(Path(folder) / "run")
        world = kept.world
        models = {}
        for k in range(SETTING.clients):
            state = kept.client_state(k)
            assert state is not None
            models[k] = load(world.blank_model(k), decode(state, ClientState).model).eval()
    N = {k: world.count(k) for k in models}
    rows = []
    for B, q in sizes:
        found: dict[tuple[str, str], list[float]] = {}
        for repeat in range(repeats):
            with seeded("fedzge cosine", B, q, repeat):
                G, f = Generator(100, world.shape, world.classes).train(), world.build("mlp")
                z, y = torch.randn(B, 100), torch.randint(world.classes, (B,))
                u = torch.randn(q, B, *world.shape)
            x_hat = G(z, y)
            x = x_hat.detach()
            e, e_u = (
                ensemble({k: predict(m, v) for k, m in models.items()}, N) for v in (x, (x + 1e-3 * u).flatten(0, 1))
            )
            truth = true_gradient(FedZGE().L_G, f, x, models, N, e, z, y)
            for name in ESTIMATES:
                g = FedZGE(estimate=name).estimated(f, x, u, e, e_u.view(q, B, -1), z, y)
                found.setdefault((name, "images"), []).append(_cosine(g, truth))
                found.setdefault((name, "theta_G"), []).append(
                    _cosine(_in_theta_G(g, x_hat, G), _in_theta_G(truth, x_hat, G))
                )
        for (name, where), values in found.items():
            rows.append(
                {"B": B, "q": q, "estimate": name, "in": where, "mean": statistics.fmean(values), "std": _std(values)}
            )
    return rows


def markdown(kept: dict[str, Any]) -> str:
    """The table of the results page."""
    rows = {(row["B"], row["estimate"], row["in"]): row for row in kept["rows"]}
    sizes = sorted({B for B, _, _ in rows})
    lines = [f"| estimate | in | {' | '.join(f'B = {B}' for B in sizes)} |", f"|---|---|{'---|' * len(sizes)}"]
    for name in ESTIMATES:
        for where, shown in (("images", "x^"), ("theta_G", "theta_G")):
            cells = [f"{rows[B, name, where]['mean']:.2f} ± {rows[B, name, where]['std']:.2f}" for B in sizes]
            lines.append(f"| {name} | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _in_theta_G(g: Tensor, x_hat: Tensor, G: Generator) -> Tensor:
    return torch.cat([v.flatten() for v in torch.autograd.grad(along(g, x_hat), G.parameters(), retain_graph=True)])


def _cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def _std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    kept = {"repeats": given.repeats, "rows": measured(repeats=given.repeats)}
    print(markdown(kept))
    if given.json:
        given.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
