"""The base class of attacks, and the scene that an attack sees.

An attack sees its threat's view, the candidate records, public knowledge (architectures, settings), and an auxiliary
set that no client holds. It returns claims, and never learns who is a member. The scorer alone knows the truth, and
scores the claims afterwards, against intervals.
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
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import generator, seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.setting import Frozen
from fedaudit.shape import KINDS, Kind, Shape
from fedaudit.training import own_model as own_models
from fedaudit.wire.codec import decode
from fedaudit.wire.message import Down, Up, load
from fedaudit.wire.transcript import ACTIVE, TranscriptEntry, TranscriptView


@dataclass(frozen=True)
class Passed:
    """A value of another client that a peer got by way of the server."""

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
        self.tell = tell  # reports how far the attack on this client is, if it takes long
        # Public knowledge. The seed is not public: the noise and the split of members follow from it.
        self.setting: dict[str, Any] = world.setting.model_dump(exclude={"seed"})
        self.shape, self.classes, self.device = world.shape, world.classes, world.device

    def rng(self, purpose: str) -> torch.Generator:
        return generator("attack", self.target, purpose, device=self.device)

    @property
    def auxiliary(self) -> tuple[Tensor, Tensor]:
        """Return records of the same distribution that no client holds."""
        return self._world._to_device(self._world.federation.auxiliary())

    @property
    def public(self) -> Tensor | None:
        """Return the images of the public transfer set, which everybody holds; None if the setting has none."""
        return self._world.public()[0] if self._world.has_public else None

    @property
    def own(self) -> tuple[Tensor, Tensor, ClientState | None]:
        """Return what a peer knows anyway: its own records, and its state after the last round (None: never asked)."""
        if self.view.threat.peer is None:
            raise ThreatError(f"The {self.view.threat} holds no records of its own. Only a peer does.")
        k = self.view.threat.peer
        state = self._run.client_state(k)
        return (*self._world.members(k), None if state is None else decode(state, ClientState, device=self.device))

    def arch(self, k: int) -> str:
        return self._world.archs[k]

    def model(self, arch: str, state: dict[str, Tensor]) -> nn.Module:
        """Return a model of a known architecture with weights that the view contained."""
        with seeded("attack"):
            return load(self._world.build(arch), state)

    def fresh(self, arch: str) -> nn.Module:
        """Return a model of a known architecture before any training, initialised from the global generator."""
        return self._world.build(arch)

    def released(self, kind: str) -> list[tuple[TranscriptEntry, str]]:
        """Return the target's uploads of one kind that the view shows and the transcript kept, as (message, field)."""
        return [
            (entry, name)
            for entry in self.view.entries(direction="up", kind=kind, client=self.target)
            for name, field in entry.fields.items()
            if field.kind == kind and entry.kept(name)
        ]

    def relayed(self, kind: str, of: int | None = None) -> list[Passed]:
        """Return the values of one kind that a peer was passed on from client `of` (None: the target).

        Only messages that say whose value it is count.
        """
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

    def mixed(self, kind: str) -> list[tuple[TranscriptEntry, str]]:
        """Return what a peer was passed on from several clients together, of one kind, as (message, field).

        Such a relay does not say whose value it is: a mean over clients, for example.
        """
        peer = self.view.threat.peer
        if peer is None:
            return []
        return [
            (entry, name)
            for entry in self.view.entries(direction="down", client=peer)
            for name, field in entry.fields.items()
            if field.role == "relay" and field.kind == kind and field.by != "client" and entry.kept(name)
        ]

    def ask(self, like: TranscriptEntry, message: Down, purpose: str, number: int) -> Up:
        """Return what the target answers to an active server's message, sent instead of `like`. It is kept apart."""
        from fedaudit.attack.active_server import ask

        if self.view.threat.name != ACTIVE:
            raise ThreatError(f"The {self.view.threat} follows the protocol; an {ACTIVE} sends messages of its own.")
        return ask(self._run, self.target, like, message, purpose, number)

    @property
    def pool(self) -> tuple[Tensor, Tensor]:
        """Return the records that shadows may be trained on: the candidates, then the auxiliary records."""
        x, y = self.auxiliary
        return torch.cat([self.x, x]), torch.cat([self.y, y])

    def replayable(self, upload: TranscriptEntry) -> list[TranscriptEntry]:
        """Return the messages that led the target to an upload. Raise ThreatError if the transcript lacks them."""
        from fedaudit.attack.replay import downloads

        return downloads(self.view, upload, self._world, self.auxiliary)

    def replay(
        self, upload: TranscriptEntry, picks: Sequence[Tensor], *, together: int = 64, compile: bool = False
    ) -> Iterator[Up]:
        """Yield what the target would have answered with other records: shadow i holds `pool[picks[i]]`.

        It is the target's own update function on the messages that the view shows; see fedaudit.attack.replay.
        """
        from fedaudit.attack.replay import replay

        messages = self.replayable(upload)
        return replay(self._world, messages, self.pool, picks, together=together, compile=compile)

    def shadows(
        self, upload: TranscriptEntry, field: str, picks: Sequence[Tensor], *, together: int = 64, compile: bool = False
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Return the logits of the models in `field` of those answers on the pool: (shadows, rows, classes); and notes.

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
        """Return the final model that anybody gets: the global one, or the target's own if there is none."""
        found = self.of_all() or self._final(f"client-{self.target:06d}.safetensors")
        return found[0] if found else None

    def of_all(self) -> tuple[nn.Module, str] | None:
        """Return the final model that all clients made, and its architecture; None if a method has none."""
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
            raise RunError(f"{path} is not a model that a run published: {e}. Run it again.") from e

    def _named(self, arch: str) -> str:
        """Return an architecture that a file names. A user's own code is accepted only if the setting names it, too."""
        setting = self._world.setting
        known = {*own_models.paths_in(setting.model), *own_models.paths_in(setting.server_model)}
        if not set(own_models.paths_in(arch)) <= known:
            raise SettingError(f"it names code, {arch!r}, that the run's setting does not")
        return arch


class Attack(Frozen):
    """The base class of attacks, one file each in `attacks/`. Declare what the attack needs, and write `run`."""

    registered_name: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()  # kinds of release that the view must have; the harness checks it
    takes: ClassVar[frozenset[Kind]] = KINDS  # kinds of records that it can attack
    active: ClassVar[bool] = False  # True: it sends clients messages of its own, under the threat active-server only
    # True: it reads nothing of the run, so what it finds is the split's fault, not a leak.
    blind: ClassVar[bool] = False

    def run(self, scene: Scene) -> Claims | Groups | Features | Reconstructions | Histogram | TookPart:
        raise ContractError(
            f"{type(self).__name__}.run is missing. Write it: it returns Claims, Reconstructions or a Histogram."
        )

    def at_once(self, scene: Scene) -> int:
        """Return how many clients may be attacked at the same time. Work that takes long is `turns.join`ed, and is one
        stack."""
        return 1

    def misfit(self, shape: Shape) -> str | None:
        """Return why this attack does not apply to records of this shape; None if it does."""
        if shape.kind in self.takes:
            return None
        return f"does not apply: it is for {' and '.join(sorted(self.takes))}, and the records are {shape}"

    def cannot(self, scene: Scene) -> str | None:
        """Return why this attack cannot run on this scene; None if it can."""
        if self.active and scene.view.threat.name != ACTIVE:
            return f"not attacked by this: it takes a server that sends messages of its own, the threat {ACTIVE}"
        missing = [kind for kind in sorted(self.needs) if not scene.released(kind)]
        if passed := [kind for kind in missing if scene.relayed(kind)]:
            return (
                f"not attacked by this: the {scene.view.threat} is passed on {', '.join(passed)} of client "
                f"{scene.target}, and this attack needs the upload itself"
            )
        return f"the {scene.view.threat} sees no {', '.join(missing)} of client {scene.target}" if missing else None
