"""Noise of less than the ledger says, for each kind of release: what each audit says of it.

    python benchmarks/studies/epsilon/epsilon_sabotage.py OUT.json [--case NAME ...] [--seeds 20] [--first 0]
        [--scale X ...]

The noise is scaled where it is drawn, in the run and in its audits; the ledger goes on to claim what it claims: epsilon
= 1 for a release. Digits, three clients, two rounds. What counts for a run is what all of its audits say together
(fedaudit.epsilon.joint_verdict): refuted, suspicious, cannot tell or not refuted, at the level that Holm's correction
leaves.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from epsilon_shared import ONE  # noqa: E402

from fedaudit.epsilon.gradient_canaries import audit_canaries  # noqa: E402
from fedaudit.epsilon.joint_verdict import told  # noqa: E402
from fedaudit.epsilon.release_path import audit_releases  # noqa: E402
from fedaudit.epsilon.residuals import audit_residuals  # noqa: E402
from fedaudit.privacy.mechanisms.gaussian import Gaussian  # noqa: E402
from fedaudit.runtime.declarations.contract import setting_for  # noqa: E402
from fedaudit.runtime.run_record import EpsilonAudit  # noqa: E402
from fedaudit.runtime.runner import run  # noqa: E402

SCALES = (1.0, 0.9, 0.5, 0.0)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "FedZGE, logits": ("fedzge", {"logits": ONE}),
    "DFFKE, embeddings": ("dffke", {"embeddings": ONE}),
    "DFFKE, logits": ("dffke", {"logits": ONE}),
    "DFRD, label counts": ("dfrd", {"label_counts": ONE}),
    "FedAF, class means": ("fedaf", {"logits": ONE}),
    "FedAF, images": ("fedaf", {"synthetic_images": ONE}),
    "FedAvg, DP-SGD": ("fedavg", {"training": {"noise_multiplier": 1.0, "delta": 1e-2}}),
}


@contextmanager
def noise(scale: float) -> Iterator[None]:
    """Noise of so many times what is promised, for releases and for DP-SGD."""
    from opacus.optimizers import DPOptimizer

    release, step = Gaussian.draw, DPOptimizer.add_noise

    def less(self: Gaussian, like: Tensor, sigma: float, *rest: Any) -> Tensor:
        return release(self, like, scale * sigma, *rest)

    def less_in_steps(self: Any) -> None:
        step(self)
        for p in self.params:
            p.grad = p.summed_grad.view_as(p) + scale * (p.grad - p.summed_grad.view_as(p))

    with mock.patch.object(Gaussian, "draw", less), mock.patch.object(DPOptimizer, "add_noise", less_in_steps):
        yield


def audited(case: str, scale: float, seed: int, trials: int) -> list[EpsilonAudit]:
    method, privacy = CASES[case]
    model = {"dffke": "mlp", "fedavg": "mlp"}.get(method, "cnn")
    setting = setting_for(
        method, privacy=privacy, seed=seed, dataset="digits", partition="iid", model=model, eval_clients=False, aux=0.2,
        twins="off",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, noise(scale):
        out = Path(folder) / "run"
        run(setting, out=out)
        found = audit_residuals(out)
        if "training" in privacy:
            return found + audit_canaries(out)
        return found + audit_releases(out, trials=trials)


def rows(
    case: str, seeds: int, trials: int, scales: Iterable[float] = SCALES, first: int = 0
) -> Iterator[dict[str, Any]]:
    """So many seeds at each scale; of the first set (seeds from 0 on) 3 at most with less noise."""
    for scale in scales:
        many = scale == 1.0 or first
        for seed in range(first, first + (seeds if many else min(seeds, 3))):
            audits = audited(case, scale, seed, trials)
            by_test = {
                a.test: {
                    "verdict": a.verdict,
                    "p": a.p_value,
                    "bound": a.lower_bound,
                    "finds": a.finds,
                    "n": a.trials,
                    "tells_at": a.tells_at,
                }
                for a in audits
            }
            yield {"case": case, "noise": scale, "seed": seed, "told": told(audits), "tests": by_test}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--scale", type=float, action="append")
    chosen = parser.parse_args(arguments)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for case in chosen.case or CASES:
        for row in rows(case, chosen.seeds, chosen.trials, chosen.scale or SCALES, chosen.first):
            found.append(row)
            chosen.out.write_text(
                json.dumps({"trials": chosen.trials, "first": chosen.first, "sabotage": found}, indent=1)
            )


if __name__ == "__main__":
    main(sys.argv[1:])
