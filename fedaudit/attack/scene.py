"""What an attack is: a view of the transcript in, claims out. The scorer alone knows the truth.

An attack sees its threat's view, the candidate records, public knowledge (architectures, settings), and an
auxiliary set that no client holds. It never learns who is a member; it is scored afterwards, against intervals.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fedaudit.attack.claims import Claims, Features, Groups, Histogram, Reconstructions, TookPart
from fedaudit.errors import ContractError, FedauditError, RunError, SettingError, ThreatError
from fedaudit.rng import generator, seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.setting import Frozen
from fedaudit.shape import KINDS, Kind, Shape
from fedaudit.training import own as own_models
from fedaudit.watch import Watch, unwatched
from fedaudit.wire.codec import decode
from fedaudit.wire.message import Down, Up, load
from fedaudit.wire.transcript import ACTIVE, Entry, TranscriptView


@dataclass(frozen=True)
class Passed:
    """What a peer got of another client by way of the server."""

    round: int
    ask: int
    value: Any


class Scene:
    """Everything that an attack on client `target` may use, and nothing else."""

    def __init__(
        self, run: RunFolder, view: TranscriptView, target: int, x: Tensor, y: Tensor, tell: Watch = unwatched
    ):
        self._world = world = run.world
        self._run, self._models_dir, self._published = run, run.folder / "models", run.record.published
        self.view, self.target, self.x, self.y = view, target, x, y
        self.tell = tell  # how far the attack on this client is: for what takes long
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
        return self._world.public()[0] if self._world.has_public else None

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
            if field.kind == kind and entry.kept(name)
        ]

    def relayed(self, kind: str, of: int | None = None) -> list[Passed]:
        """What a peer was passed on of client `of` (the target), of one kind: by the messages that say whose it is."""
        peer, of = self.view.threat.peer, self.target if of is None else of
        if peer is None:  # the server has the uploads themselves
            return []
        found = []
        for entry in self.view.entries(direction="down", client=peer):
            for name, field in entry.fields.items():
                if field.role == "relay" and field.kind == kind and field.by == "client" and entry.kept(name):
                    table = entry[name]
                    if isinstance(table, Mapping) and of in table:
                        found.append(Passed(entry.round, entry.ask, table[of]))
        return found

    def mixed(self, kind: str) -> list[tuple[Entry, str]]:
        """What a peer was passed on of several clients together, of one kind, as (message, field): a relay that does
        not say whose it is, such as a mean over clients."""
        peer = self.view.threat.peer
        if peer is None:
            return []
        return [
            (entry, name)
            for entry in self.view.entries(direction="down", client=peer)
            for name, field in entry.fields.items()
            if field.role == "relay" and field.kind == kind and field.by != "client" and entry.kept(name)
        ]

    def ask(self, like: Entry, message: Down, purpose: str, number: int) -> Up:
        """For an active server: what the target answers to a message where `like` was sent. It is kept apart."""
        from fedaudit.attack.active import ask

        if self.view.threat.name != ACTIVE:
            raise ThreatError(f"The {self.view.threat} follows the protocol; an {ACTIVE} sends messages of its own.")
        return ask(self._run, self.target, like, message, purpose, number)

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
            notes=notes, tell=self.tell,
        )  # fmt: skip
        return table, tuple(sorted(notes))

    def published(self) -> nn.Module | None:
        """The final model that anybody gets: the global one, or the target's own where there is none."""
        found = self.of_all() or self._final(f"client-{self.target:06d}.safetensors")
        return found[0] if found else None

    def of_all(self) -> tuple[nn.Module, str] | None:
        """The final model that all clients made, and its architecture; None where a method has none."""
        return self._final("global.safetensors")

    def _final(self, name: str) -> tuple[nn.Module, str] | None:
        path = self._models_dir / name
        if name not in self._published:
            return None
        try:
            with safe_open(path, framework="pt") as file:
                state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                arch = self._named((file.metadata() or {})["arch"])
                return self.model(arch, state), arch
        except (OSError, SafetensorError, KeyError, RuntimeError, FedauditError) as e:
            raise RunError(f"{path} is no model that a run published: {e}. Run it again.") from e

    def _named(self, arch: str) -> str:
        """An architecture that a file names: code of somebody's own only where the setting names it, too."""
        setting = self._world.setting
        known = {*own_models.paths_in(setting.model), *own_models.paths_in(setting.server_model)}
        if not set(own_models.paths_in(arch)) <= known:
            raise SettingError(f"it names code, {arch!r}, that the run's setting does not")
        return arch


class Attack(Frozen):
    """One file in `attacks/`. Declare what it needs, and write `run`."""

    registered_name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()  # kinds of release; the harness checks that the view has them
    takes: ClassVar[frozenset[Kind]] = KINDS  # records that it can be about
    active: ClassVar[bool] = False  # sends clients messages of its own: for the threat active-server alone
    blind: ClassVar[bool] = False  # reads nothing of the run: what it finds is the split's fault, and no leak

    def run(self, scene: Scene) -> Claims | Groups | Features | Reconstructions | Histogram | TookPart:
        raise ContractError(f"{type(self).__name__}.run is missing: it returns Claims, Reconstructions or a Histogram.")

    def at_once(self, scene: Scene) -> int:
        """So many clients may be attacked at the same time: what takes long is `turns.join`ed, and is one stack."""
        return 1

    def misfit(self, shape: Shape) -> str | None:
        """Why this attack does not apply to records of this shape; None if it does."""
        if shape.kind in self.takes:
            return None
        return f"does not apply: it is for {' and '.join(sorted(self.takes))}, and the records are {shape}"

    def cannot(self, scene: Scene) -> str | None:
        """Why this attack cannot run on this scene; None if it can."""
        if self.active and scene.view.threat.name != ACTIVE:
            return f"not attacked by this: it takes a server that sends messages of its own, the threat {ACTIVE}"
        missing = [kind for kind in sorted(self.needs) if not scene.released(kind)]
        if passed := [kind for kind in missing if scene.relayed(kind)]:
            return (
                f"not attacked by this: the {scene.view.threat} is passed on {', '.join(passed)} of client "
                f"{scene.target}, and this attack needs the upload itself"
            )
        return f"the {scene.view.threat} sees no {', '.join(missing)} of client {scene.target}" if missing else None
