"""What an attack is: a view of the transcript in, claims out. The scorer alone knows the truth.

An attack sees its threat's view, the candidate records, public knowledge (architectures, settings), and an
auxiliary set that no client holds. It never learns who is a member; it is scored afterwards, against intervals.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from fedaudit.config import Frozen, Setting, validated
from fedaudit.errors import ContractError, ThreatError
from fedaudit.records import load
from fedaudit.registry import find, names
from fedaudit.rng import generator, seed_of, seeded
from fedaudit.runner import RunFolder
from fedaudit.task import compute
from fedaudit.transcript import Entry, Threat, TranscriptView
from fedaudit.world import World


@dataclass(frozen=True)
class Claims:
    """What an attack asserts: one score per candidate, higher for "was trained on"."""

    scores: Tensor


class Scene:
    """Everything that an attack on client `target` may use, and nothing else."""

    def __init__(self, run: RunFolder, view: TranscriptView, target: int, x: Tensor, y: Tensor):
        self._world = world = run.world
        self._models_dir, self._published = run.folder / "models", run.record.published
        self.view, self.target, self.x, self.y = view, target, x, y
        self.setting: Setting = world.setting  # public knowledge
        self.shape, self.classes, self.device = world.shape, world.classes, world.device

    def rng(self, purpose: str) -> torch.Generator:
        return generator(self.setting.seed, "attack", self.target, purpose, device=self.device)

    @property
    def auxiliary(self) -> tuple[Tensor, Tensor]:
        """Records of the same distribution that no client holds."""
        return self._world._to_device(self._world.federation.auxiliary())

    def arch(self, k: int) -> str:
        return self._world.archs[k]

    def model(self, arch: str, state: dict[str, Tensor]) -> nn.Module:
        """A model of a known architecture with weights that the view contained."""
        with seeded("attack"):
            return load(self._world.build(arch), state)

    def released(self, kind: str) -> list[tuple[Entry, str]]:
        """The target's uploads of one kind that the view shows and the transcript kept, as (message, field)."""
        return [
            (entry, name)
            for entry in self.view.entries(direction="up", kind=kind, client=self.target)
            for name, field in entry.fields.items()
            if field.get("kind") == kind and entry.kept(name)
        ]

    def published(self) -> nn.Module | None:
        """The final model that anybody gets: the global one, or the target's own where there is none."""
        for name in ("global.safetensors", f"client-{self.target:06d}.safetensors"):
            path = self._models_dir / name
            if name in self._published:
                with safe_open(path, framework="pt") as file:
                    state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                    return self.model(file.metadata()["arch"], state)
        return None


class Attack(Frozen):
    """One file in `attacks/`. Declare what it needs, and write `run`."""

    registered_name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()  # kinds of release; the harness checks that the view has them

    def run(self, scene: Scene) -> Claims:
        raise ContractError(f"{type(self).__name__}.run is missing: it returns Claims.")

    def cannot(self, scene: Scene) -> str | None:
        """Why this attack cannot run on this scene; None if it can."""
        missing = self.needs - scene.view.kinds
        return f"the {scene.view.threat} sees no {', '.join(sorted(missing))}" if missing else None


def attack_run(
    folder: Path | str,
    *,
    attacks: list[str] | None = None,
    threat: str = "server",
    clients: list[int] | None = None,
    watch: Any = None,
) -> list[dict[str, Any]]:
    """Run attacks on a run folder, score them, and add the results to its record."""
    run = RunFolder(folder)
    world = run.world
    parsed = Threat.parse(threat)
    if parsed.peer is not None and parsed.peer >= world.setting.clients:
        raise ThreatError(f"There is no client {parsed.peer}; the run has {world.setting.clients}.")
    chosen = attacks or names("attacks")
    results = []
    with compute(world):
        for number, name in enumerate(chosen):
            attack = validated(find(name, "attacks"), {}, f"setting of {name}")
            if watch:
                watch(number, len(chosen), name)
            results.append(_one(attack, name, run, world, parsed, clients))
    known = {(r["attack"], r["threat"]): r for r in run.record.attacks} | {
        (r["attack"], r["threat"]): r for r in results
    }
    run.record.attacks = [known[key] for key in sorted(known)]
    run.record.save(run.folder)
    return results


def _one(
    attack: Attack, name: str, run: RunFolder, world: World, threat: Threat, clients: list[int] | None
) -> dict[str, Any]:
    view = TranscriptView(run.transcript, threat)
    targets = [k for k in (clients if clients is not None else range(world.setting.clients)) if k != threat.peer]
    scores: list[Tensor] = []
    truth: list[Tensor] = []
    begun = time.perf_counter()
    for k in targets:
        x, y, member = _candidates(world, k)
        scene = Scene(run, view, k, x, y)
        if reason := attack.cannot(scene):
            return {"attack": name, "threat": str(threat), "ran": False, "reason": reason}
        with seeded(world.setting.seed, "attack", name, k, device=world.device):
            claims = attack.run(scene)
        if claims.scores.shape != (len(y),):
            raise ContractError(f"{name} gave scores of shape {tuple(claims.scores.shape)} for {len(y)} candidates.")
        scores.append(claims.scores.detach().double().cpu())
        truth.append(member)
    seed = seed_of(world.setting.seed, "attack", name, "bootstrap")
    return {
        "attack": name,
        "threat": str(threat),
        "ran": True,
        "clients": targets,
        "pooled": membership_scores(torch.cat(scores).numpy(), torch.cat(truth).numpy(), seed),
        "wall_s": round(time.perf_counter() - begun, 3),
    }


def _candidates(world: World, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """As many members as non-members of client k, in random order; the third tensor is the scorer's secret."""
    (xm, ym), (xn, yn) = world.members(k), world.nonmembers(k)
    n = min(len(ym), len(yn))
    rng = generator(world.setting.seed, "scorer", k)
    pick = torch.randperm(len(ym), generator=rng)[:n].to(xm.device)
    x, y = torch.cat([xm[pick], xn[:n]]), torch.cat([ym[pick], yn[:n]])
    member = torch.arange(2 * n) < n
    order = torch.randperm(2 * n, generator=rng)
    return x[order.to(x.device)], y[order.to(x.device)], member[order]


def membership_scores(scores: np.ndarray, member: np.ndarray, seed: int, resamples: int = 1000) -> dict[str, Any]:
    """AUC with a 95 % bootstrap interval over members and non-members."""
    if not np.isfinite(scores).all():
        raise ContractError("An attack gave a score that is not finite.")
    inside, outside = scores[member], scores[~member]
    rng = np.random.default_rng(seed)
    draws = [_auc(rng.choice(inside, len(inside)), rng.choice(outside, len(outside))) for _ in range(resamples)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return {
        "auc": _auc(inside, outside),
        "auc_low": float(low),
        "auc_high": float(high),
        "interval": f"95 % percentile bootstrap, {resamples} resamples",
        "members": len(inside),
        "nonmembers": len(outside),
    }


def _auc(inside: np.ndarray, outside: np.ndarray) -> float:
    """P(member's score > non-member's) + P(equal) / 2."""
    ordered = np.sort(outside)
    below = np.searchsorted(ordered, inside, "left")
    upto = np.searchsorted(ordered, inside, "right")
    return float((below + upto).sum() / (2 * len(inside) * len(outside)))
