"""What an attack is: a view of the transcript in, claims out. The scorer alone knows the truth.

An attack sees its threat's view, the candidate records, public knowledge (architectures, settings), and an
auxiliary set that no client holds. It never learns who is a member; it is scored afterwards, against intervals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fedaudit.attack.score import Attacked, Claims, Groups, Histogram, Reconstructions, score
from fedaudit.attack.verdict import judge, judge_blind
from fedaudit.errors import ContractError, DataError, ThreatError
from fedaudit.registry import find, names
from fedaudit.rng import generator, seed_of, seeded
from fedaudit.runtime.run_record import save_attacks
from fedaudit.runtime.runner import RunFolder
from fedaudit.runtime.task import ClientState, compute
from fedaudit.runtime.world import World
from fedaudit.setting import Frozen, validated
from fedaudit.wire.codec import Up, decode, load
from fedaudit.wire.transcript import Entry, Threat, TranscriptView

__all__ = ["Attack", "Claims", "Groups", "Histogram", "Reconstructions", "Scene", "attack_run"]

NOBODY = "has nobody to attack but itself"


class Scene:
    """Everything that an attack on client `target` may use, and nothing else."""

    def __init__(self, run: RunFolder, view: TranscriptView, target: int, x: Tensor, y: Tensor):
        self._world = world = run.world
        self._run, self._models_dir, self._published = run, run.folder / "models", run.record.published
        self.view, self.target, self.x, self.y = view, target, x, y
        # Public knowledge. The seed is not: the noise and the split of members follow from it.
        self.setting: dict[str, Any] = world.setting.model_dump(exclude={"seed"})
        self.shape, self.classes, self.device = world.shape, world.classes, world.device

    def rng(self, purpose: str) -> torch.Generator:
        return generator("attack", self.target, purpose, device=self.device)

    @property
    def auxiliary(self) -> tuple[Tensor, Tensor]:
        """Records of the same distribution that no client holds."""
        return self._world._to_device(self._world.federation.auxiliary())

    @property
    def public(self) -> Tensor | None:
        """The images of the public transfer set, which everybody holds; None where the setting has none."""
        return self._world.public()[0] if self._world.setting.public else None

    @property
    def own(self) -> tuple[Tensor, Tensor, ClientState | None]:
        """What a peer knows anyway: its own records, and its state after the last round (None: never asked)."""
        if self.view.threat.peer is None:
            raise ThreatError(f"The {self.view.threat} holds no records of its own; a peer does.")
        k = self.view.threat.peer
        state = self._run.client_state(k)
        return (*self._world.members(k), None if state is None else decode(state, ClientState, device=self.device))

    def arch(self, k: int) -> str:
        return self._world.archs[k]

    def model(self, arch: str, state: dict[str, Tensor]) -> nn.Module:
        """A model of a known architecture with weights that the view contained."""
        with seeded("attack"):
            return load(self._world.build(arch), state)

    def fresh(self, arch: str) -> nn.Module:
        """A model of a known architecture before any training, initialised from the global generator."""
        return self._world.build(arch)

    def released(self, kind: str) -> list[tuple[Entry, str]]:
        """The target's uploads of one kind that the view shows and the transcript kept, as (message, field)."""
        return [
            (entry, name)
            for entry in self.view.entries(direction="up", kind=kind, client=self.target)
            for name, field in entry.fields.items()
            if field.get("kind") == kind and entry.kept(name)
        ]

    @property
    def pool(self) -> tuple[Tensor, Tensor]:
        """What shadows may be trained on: the candidates, then the auxiliary records."""
        x, y = self.auxiliary
        return torch.cat([self.x, x]), torch.cat([self.y, y])

    def replayable(self, upload: Entry) -> list[Entry]:
        """The messages that led the target to an upload; ThreatError where the transcript did not keep them."""
        from fedaudit.attack.replay import downloads

        return downloads(self.view, upload, self._world, self.auxiliary)

    def replay(
        self, upload: Entry, picks: Sequence[Tensor], *, together: int = 64, compile: bool = False
    ) -> Iterator[Up]:
        """What the target would have answered with other records: shadow i holds `pool[picks[i]]`.

        It is the target's own update function on the messages that the view shows; see fedaudit.attack.replay.
        """
        from fedaudit.attack.replay import replay

        messages = self.replayable(upload)
        return replay(self._world, messages, self.pool, picks, together=together, compile=compile)

    def shadows(
        self, upload: Entry, field: str, picks: Sequence[Tensor], *, together: int = 64, compile: bool = False
    ) -> tuple[Tensor, tuple[str, ...]]:
        """The logits of the models in `field` of those answers on the pool: (shadows, rows, classes); and notes.

        They are kept in the run folder, by content: attacks that draw the same shadows share them.
        """
        from fedaudit.attack.replay import answers

        notes: set[str] = set()
        messages, folder = self.replayable(upload), self._run.folder / "shadows"
        table = answers(
            self._world, messages, field, self.pool, picks, folder=folder, together=together, compile=compile,
            notes=notes,
        )  # fmt: skip
        return table, tuple(sorted(notes))

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
    blind: ClassVar[bool] = False  # reads nothing of the run: what it finds is the split's fault, and no leak

    def run(self, scene: Scene) -> Claims | Groups | Reconstructions | Histogram:
        raise ContractError(f"{type(self).__name__}.run is missing: it returns Claims, Reconstructions or a Histogram.")

    def cannot(self, scene: Scene) -> str | None:
        """Why this attack cannot run on this scene; None if it can."""
        missing = [kind for kind in sorted(self.needs) if not scene.released(kind)]
        return f"the {scene.view.threat} sees no {', '.join(missing)} of client {scene.target}" if missing else None


def attack_run(
    folder: Path | str,
    *,
    attacks: Sequence[str | Mapping[str, Any]] | None = None,
    threat: str = "server",
    clients: list[int] | None = None,
    watch: Any = None,
) -> list[dict[str, Any]]:
    """Run attacks on a run folder, score them, and add the results to its record.

    An attack is named, or given with its settings: `{"attack": "loss", ...}`. The blind baselines always run, and every
    membership result is held against them.
    """
    run = RunFolder(folder)
    world = run.world
    parsed = Threat.parse(threat)
    for k in [*(clients or []), *([] if parsed.peer is None else [parsed.peer])]:
        if not 0 <= k < world.setting.clients:
            raise ThreatError(f"There is no client {k}; the run has {world.setting.clients}, numbered from 0.")
    chosen = [made(spec) for spec in (names("attacks") if attacks is None else attacks)]
    named = {name for name, _ in chosen}
    blind = [made(name) for name in names("attacks") if find(name, "attacks").blind]  # type: ignore[attr-defined]
    chosen += [(name, attack) for name, attack in blind if name not in named]
    found = []
    with compute(world):
        for number, (name, attack) in enumerate(chosen):
            if watch:
                watch(number, len(chosen), name)
            found.append(_one(attack, name, run, world, parsed, clients))
    _judge(found)
    before = {(r["attack"], r["threat"]): r for r in run.record.attacks}
    results = [result for result, _ in found if result["attack"] in named or _is_news(result, before)]
    known = before | {(r["attack"], r["threat"]): r for r in results}
    save_attacks(run.folder, run.record.transcript_digest, [known[key] for key in sorted(known)])
    return results


def _judge(found: list[tuple[dict[str, Any], list[Attacked]]]) -> None:
    """Add to each membership result what it means."""
    claims = [(r, parts) for r, parts in found if r["ran"] and r["claims"] == "membership"]
    blind = {r["attack"]: parts for r, parts in claims if r["blind"]}
    verdicts = judge_blind(blind)
    broken = any(verdict["split_broken"] for verdict in verdicts.values())
    for result, parts in claims:
        name = result["attack"]
        result.update(verdicts[name] if result["blind"] else judge(name, parts, blind, broken))


def _is_news(result: dict[str, Any], before: Mapping[tuple[str, str], dict[str, Any]]) -> bool:
    """Whether a baseline that nobody named tells more than the record holds."""
    old = before.get((result["attack"], result["threat"]), {})
    if not result["ran"]:
        return not old and not result["reason"].endswith(NOBODY)
    return len(result["clients"]) > len(old.get("clients", []))


def made(spec: str | Mapping[str, Any]) -> tuple[str, Attack]:
    """An attack by its name, or by a table with its name and settings."""
    settings = {} if isinstance(spec, str) else dict(spec)
    name = spec if isinstance(spec, str) else settings.pop("attack", None)
    if not isinstance(name, str):
        raise ContractError(f"{spec!r} names no attack: write a name, or {{attack = NAME, SETTING = VALUE}}.")
    return name, validated(find(name, "attacks"), settings, f"setting of {name}")


def _one(
    attack: Attack, name: str, run: RunFolder, world: World, threat: Threat, clients: list[int] | None
) -> tuple[dict[str, Any], list[Attacked]]:
    view = TranscriptView(run.transcript, threat)
    targets = [k for k in (clients if clients is not None else range(world.setting.clients)) if k != threat.peer]
    result = {"attack": name, "threat": str(threat), "settings": attack.model_dump(mode="json"), "blind": attack.blind}
    parts: list[Attacked] = []
    begun = time.perf_counter()
    reasons: list[str] = []
    for k in targets:
        x, y, member = _candidates(world, k)
        scene = Scene(run, view, k, x, y)
        if reason := attack.cannot(scene):
            reasons.append(reason)
            continue
        with seeded("attack", name, k, device=world.device):
            try:
                parts.append(Attacked(k, attack.run(scene), x, y, member))
            except ThreatError as e:  # found out on the way
                reasons.append(str(e))
    if not parts:
        return {**result, "ran": False, "reason": reasons[0] if reasons else f"{threat} {NOBODY}"}, []
    seed = seed_of("attack", name, "scorer") % 2**32
    result |= {"ran": True, "clients": [part.client for part in parts], "left_out": reasons}
    result |= score(parts, world, run.folder / "pictures" / str(threat).replace(":", "-"), name, seed)
    # What is judged afterwards are scores: images of every attack's candidates would fill the memory.
    scores = [replace(part, x=part.x[:0]) for part in parts] if result["claims"] == "membership" else []
    return {**result, "wall_s": round(time.perf_counter() - begun, 3)}, scores


def _candidates(world: World, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """As many members as non-members of client k, in random order; the third tensor is the scorer's secret."""
    (xm, ym), (xn, yn) = world.candidates(k), world.nonmembers(k)
    n = min(len(ym), len(yn))
    if n == 0:
        raise DataError(f"Client {k} has no held-out records to tell members from: set --holdout above 0.")
    rng = generator(world.setting.seed, "scorer", k)
    members, others = (torch.randperm(len(y), generator=rng)[:n].to(y.device) for y in (ym, yn))
    x, y = torch.cat([xm[members], xn[others]]), torch.cat([ym[members], yn[others]])
    member = torch.arange(2 * n) < n
    order = torch.randperm(2 * n, generator=rng)
    return x[order.to(x.device)], y[order.to(x.device)], member[order]
