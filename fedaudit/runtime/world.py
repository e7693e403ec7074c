"""The world of a run, as its setting describes it: data, models, method. Driver and workers build it alike.

It is a cache and nothing more: dropping it costs time, never state.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch
import xxhash
from torch import nn

from fedaudit import registry
from fedaudit.data import Federation, federate, load, to_input, transfer_records
from fedaudit.data.datasets import stamp
from fedaudit.errors import ContractError, DataError, SettingError
from fedaudit.privacy.policy import protects_persons, read_policies
from fedaudit.rng import generator, seeded
from fedaudit.runtime.guarantee import check_sums, guarantee_of
from fedaudit.runtime.method import Method
from fedaudit.runtime.plan import arch_on_server, declared_of, plan_of
from fedaudit.runtime.site import Hub, Rows, Site, nobody
from fedaudit.runtime.work_once import Once
from fedaudit.setting import Setting
from fedaudit.training import models, own_model
from fedaudit.training.model_copies import copied, copied_with
from fedaudit.wire.compression import stage_of
from fedaudit.wire.message import (
    KINDS,
    Part,
    Size,
    State,
    Up,
    as_size,
    fixed,
    message_classes,
    model_size,
    state_of,
)
from fedaudit.wire.message import load as put
from fedaudit.wire.traffic import Plan


class World:
    def __init__(self, setting: Setting):
        self.setting = setting
        self._named_by = registry.named_by()
        self.device = resolve_device(setting.device)
        self.method: Method = registry.find(setting.method).make(setting.set, setting.preset)  # type: ignore[attr-defined]
        if self.method.wants_public() and not self.has_public:
            raise SettingError(
                f"{setting.method} needs a public transfer set: set --public, for example 0.2, a share of the data, or "
                "--public-dataset NAME."
            )
        self.archs = self.method.archs(setting.model, setting.clients)
        brought = self.method.federation(setting)
        dataset = brought.dataset if brought else load(setting.dataset, setting.data_dir, size=setting.image_size)
        self.shape, self.classes = dataset.shape, dataset.classes
        self.federation: Federation = brought or federate(
            dataset,
            clients=setting.clients,
            partition=setting.partition,
            seed=setting.seed,
            minimum=setting.minimum,
            holdout=setting.holdout,
            validation=setting.validation,
            aux=setting.aux,
            public=0.0 if setting.public_dataset else setting.public,
            canaries=setting.canaries,
        )
        if setting.public_dataset is not None:
            rng = generator(setting.seed, "data", "public")
            self._foreign = transfer_records(setting.public_dataset, setting.data_dir, self.shape, setting.public, rng)
        self.policies = read_policies(setting.privacy, KINDS)
        if protects_persons(self.policies) and self.federation.dataset.person is None:
            raise SettingError(
                f"privacy: unit = 'person', but data set {dataset.name!r} does not say whose record each one is. Give "
                "it a column `person`, or say unit = 'record'."
            )
        self.guarantee = guarantee_of(setting)
        check_sums(setting, self.method)
        self.compression = stage_of(setting.compress)
        self._templates: dict[str, models.Net] = {}
        self._bases: dict[str, dict[str, torch.Tensor]] = {}  # by architecture: the parameters that are not trained
        self._there = KeptRows(KEPT if self.device.type != "cpu" else KEPT_HERE)

    def misfit(self) -> str | None:
        """Return why the method does not apply to records like these; None if it does."""
        return self.method.cannot_take(self.shape)

    def build(self, arch: str) -> models.Net:
        """Return a freshly initialised model on this run's device, in evaluation mode.

        Parameters that are not trained are the same in all models of an architecture: nobody has to send them.
        """
        model = self._build(arch)
        if names := fixed(model):
            if arch not in self._bases:
                with seeded(self.setting.seed, "model", arch, "not trained"):
                    self._bases[arch] = {name: t for name, t in state_of(self._build(arch)).items() if name in names}
            model.load_state_dict(self._bases[arch], strict=False)
        return model

    def _build(self, arch: str) -> models.Net:
        brought = self.method.build(arch)
        if brought is not None:
            return cast(models.Net, brought.to(self.device).eval())
        with registry.read_from(self._named_by):  # a model of the user's own is code, whoever names it
            model = models.build(arch, shape=self.shape, classes=self.classes)
        if self.setting.norm == "group":
            from fedaudit.privacy.persample import repair

            model = cast(models.Net, repair(model))
        if self.setting.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model.to(self.device).eval()

    @property
    def _arch_on_server(self) -> str:
        return arch_on_server(self.setting, self.method, self.archs)

    @property
    def server_arch(self) -> str:
        chosen = self.setting.server_model or self.method.server_arch(self.setting.model)
        if chosen is not None:
            return chosen
        if len(set(self.archs)) > 1:
            raise SettingError(
                f"{self.setting.method} asks for one server model, but the clients have several "
                f"({', '.join(sorted(set(self.archs)))}). Name it with --server-model, or choose one --model for all."
            )
        return self.archs[0]

    def fresh_model(self, k: int, seed: int | None = None) -> models.Net:
        """Return client k's model before any training.

        If `init` is common, it follows from the seed and its architecture. It then equals the first model that
        `Method.init` builds on the server, if that has the same architecture. If `init` is own, it follows from the
        seed and k.
        """
        arch = self.archs[k]
        if self.setting.init == "common" and seed is None:
            return self.blank_model(k)
        with seeded(self.setting.seed if seed is None else seed, *self._start(k)):
            return self.build(arch)

    def _start(self, k: int) -> tuple[object, ...]:
        """Return the names, beside the seed, from which client k's first model is drawn."""
        if self.setting.init == "own":
            return f"client {k}", "model"
        arch = self.archs[k]
        return ("server", 0) if arch == self._arch_on_server else ("model", arch)

    def blank_model(self, k: int) -> models.Net:
        """Return a model of client k's architecture whose weights are about to be replaced.

        It is built once and copied. If all clients begin alike, it is also the model that they begin with.
        """
        return copied(self._template(k))

    def model_with(self, k: int, state: State) -> models.Net:
        """Return client k's model with the tensors of a state, which become its own."""
        made = copied_with(self._template(k), state)
        return put(self.blank_model(k), state) if made is None else made

    def is_start(self, k: int, model: nn.Module) -> bool:
        """Return whether a model of client k has the very tensors with which all clients of its architecture begin.

        It is False if each client begins with a model of its own.
        """
        if self.setting.init != "common":
            return False
        start, mine = self._template(k).state_dict(), model.state_dict()
        return start.keys() == mine.keys() and all(torch.equal(t, start[name]) for name, t in mine.items())

    def model_name(self, k: int) -> str:
        """Return the name that client k's model gives itself."""
        return name_of(self._template(k))

    def blank(self, arch: str) -> models.Net:
        """Return a model of this architecture whose weights are about to be replaced. Nothing is drawn for it, because
        to draw the weights of a large network takes longer than to copy them.
        """
        names = self._start(self.archs.index(arch)) if arch in self.archs else ("model", arch)
        return copied(self._built(arch, *names))

    def _template(self, k: int) -> models.Net:
        return self._built(self.archs[k], *self._start(k))

    def _built(self, arch: str, *names: object) -> models.Net:
        """Return the one model of an architecture that others are copied from. These names say how it is drawn."""
        if arch not in self._templates:
            with seeded(self.setting.seed, *names):
                self._templates[arch] = self.build(arch)
        return self._templates[arch]

    def count(self, k: int) -> int:
        shard = self.federation.shards[k]
        return len(shard.members) + len(shard.canaries)

    def people(self, k: int) -> torch.Tensor | None:
        """Return whose record each one of client k is; None if the guarantee is for single records."""
        person = self.federation.dataset.person
        return self.federation.people(k) if protects_persons(self.policies) and person is not None else None

    def copies(self) -> int:
        """Return the most exact copies of one record that any client trains on."""
        most = 1
        for k in range(len(self.federation.shards)):
            x, y = self.federation.members(k)
            labels = y.numpy().astype("<i8")
            digests = Counter(
                xxhash.xxh3_128_digest(row.contiguous().numpy().tobytes() + label.tobytes())
                for row, label in zip(x, labels, strict=True)
            )
            most = max(most, max(digests.values(), default=1))
        return most

    def members(self, k: int) -> Rows:
        """Return client k's records in memory of their own.

        A GPU keeps what it got, since bringing records there takes longer than an epoch on them. Main memory keeps them
        too, since making numbers of pixels takes longer than a copy.
        """
        return copied_rows(self.seen_members(k))

    def seen_members(self, k: int) -> Rows:
        """Return client k's records without a copy, for callers that do not change them."""
        return self._there.get(("members", k), lambda: self._to_device(self.federation.members(k)))

    def candidates(self, k: int) -> Rows:
        """Return the members that are exchangeable with the non-members."""
        return self._to_device(self.federation.candidates(k))

    def nonmembers(self, k: int) -> Rows:
        return copied_rows(self.held_out(k, "nonmembers"))

    def validation(self, k: int) -> Rows:
        return copied_rows(self.held_out(k, "validation"))

    def held_out(self, k: int, what: Literal["nonmembers", "validation"]) -> Rows:
        """Return records that client k does not train on, without a copy, for callers that do not change them."""
        of = self.federation.nonmembers if what == "nonmembers" else self.federation.validation
        return self._there.get((what, k), lambda: self._to_device(of(k)))

    def records(self, index: np.ndarray) -> Rows:
        """Return records by their places in the data set, to evaluate those of many clients in one batch."""
        return self._to_device(self.federation.rows(index))

    def other_rows(self, k: int) -> Rows:
        """Return as many records as client k trains on, but none of its own, for the test of declarations."""
        x, y = self.federation.auxiliary()
        if not len(x):
            raise DataError("Testing a method's declarations needs an auxiliary set: set aux above 0.")
        n = self.count(k)
        pick = torch.randint(len(x), (n,), generator=generator(self.setting.seed, f"client {k}", "swap"))
        return self._to_device((x[pick], y[pick]))

    @functools.cached_property
    def _public(self) -> Rows:
        if self.setting.public_dataset is None:
            return self._to_device(self.federation.public_set())
        x = to_input(self._foreign)
        return self._to_device((x, torch.full((len(x),), -1)))

    def public(self) -> Rows:
        """Return the transfer set. Labels of another data set are not labels of this task, and are all -1."""
        if not self.has_public:
            raise SettingError(f"{self.setting.method} needs a public transfer set: set --public, for example 0.1.")
        return self._public

    @property
    def has_public(self) -> bool:
        return self.setting.public > 0 or self.setting.public_dataset is not None

    @property
    def public_labelled(self) -> bool:
        """Return whether the labels of the transfer set are those of this task."""
        return self.setting.public_dataset is None

    @property
    def public_size(self) -> int:
        return len(self.federation.public) if self.setting.public_dataset is None else len(self._foreign)

    @functools.cached_property
    def test(self) -> Rows:
        return self._to_device(self.federation.test())

    def _to_device(self, rows: Rows) -> Rows:
        x = rows[0].to(self.device)
        if self.setting.channels_last and x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        return x, rows[1].to(self.device)

    @functools.cached_property
    def model_size(self) -> Callable[..., Size]:
        """Return a function that gives the bytes of a model or of a part of it, measured once on a built model."""

        @functools.cache
        def size(arch: str, part: Part | None = None) -> Size:
            with seeded("size"):
                return model_size(self.build(arch), part)

        return size

    @functools.cached_property
    def releases(self) -> Callable[[str], int | None]:
        """Return a function that says, by the declared traffic, how often a client will release a kind over the whole
        run."""

        @functools.cache
        def count(kind: str) -> int | None:
            declared = self.method.traffic(self.plan(1, list(range(self.setting.clients))))
            if declared is None:
                return None
            fields = {name for direction, name in declared if direction == "up"}
            known = [declared_of(self.method, name) for name in fields]
            return self.setting.rounds * sum(one is not None and one.kind == kind for one in known)

        return count

    @functools.cached_property
    def absent(self) -> Callable[[int], frozenset[str]]:
        """Return a function that gives the optional fields of uploads ("Message.field") that are always None in round
        t.

        These are the fields that the declared traffic leaves empty before anything of the run is known: that such a
        field is None tells nothing. A run in which one is sent all the same ends with an error.
        """
        known = message_classes(type(self.method).__module__)
        optional = {f"{cls.__name__}.{name}" for cls in known if issubclass(cls, Up) for name in cls.optional()}

        @functools.cache
        def fields(t: int) -> frozenset[str]:
            declared = self.method.traffic(self.plan(t, list(range(self.setting.clients))))
            if declared is None:
                return frozenset()
            sent = {
                name for (direction, name), size in declared.items() if direction == "up" and as_size(size) != Size()
            }
            return frozenset(optional - sent)

        return fields

    def site(self, k: int, rows: Rows | None = None) -> Site:
        """Return client k's side of this world: what its task may hold. If `rows` is given, those are all the records
        it has."""
        return Site(
            seed=self.setting.seed,
            device=self.device,
            shape=self.shape,
            classes=self.classes,
            rounds=self.setting.rounds,
            public=self.public,
            k=k,
            method=self.setting.method,
            hyperparameters=tuple(leaves(self.method.model_dump())),
            policies=self.policies,
            releases=self.releases,
            absent=self.absent,
            fresh_model=functools.partial(self.fresh_model, k),
            model_with=functools.partial(self.model_with, k),
            server_model=lambda: self.build(self.server_arch),
            blank_server_model=lambda: self.blank(self.server_arch),
            own=functools.partial(self.members, k) if rows is None else lambda: rows,
            seen=functools.partial(self.seen_members, k) if rows is None else None,
            validation=functools.partial(self.validation, k) if rows is None else nothing_else,
            others=functools.partial(self.other_rows, k) if rows is None else nothing_else,
            count=self.count(k) if rows is None else len(rows[1]),
            people=functools.partial(self.people, k) if rows is None else nobody,
            once=None if self.setting.flops else self.shared_work,  # FLOPs are counted as they are done, and not billed
        )

    @functools.cached_property
    def shared_work(self) -> Once:
        """Return what does the work that clients of this process share."""
        return Once(self.device)

    @functools.cached_property
    def hub(self) -> Hub:
        """Return the server's side of this world."""
        return Hub(
            seed=self.setting.seed,
            device=self.device,
            shape=self.shape,
            classes=self.classes,
            rounds=self.setting.rounds,
            public=self.public,
            clients=self.setting.clients,
            archs=tuple(self.archs),
            server_arch=lambda: self.server_arch,
            build=self.build,
            blank=self.blank,
            public_labelled=self.public_labelled,
        )

    def plan(self, t: int, participants: list[int], **facts: Any) -> Plan:
        n = {k: self.count(k) for k in range(self.setting.clients)}
        return plan_of(
            self.setting,
            self.method,
            self.archs,
            participants,
            t=t,
            n=n,
            shape=self.shape,
            classes=self.classes,
            model_size=self.model_size,
            public=self.public_size,
            labelled=self.public_labelled,
            records=n,
            **facts,
        )


KEPT = 1 << 30  # bytes of records that stay on a GPU
KEPT_HERE = 1 << 25  # bytes of records that stay in main memory


class KeptRows:
    """Keeps records on their device up to a limit in bytes. Records that come later are made again each time."""

    def __init__(self, limit: int) -> None:
        self._rows: dict[tuple[str, int], Rows] = {}
        self._bytes, self._limit = 0, limit

    def get(self, key: tuple[str, int], make: Callable[[], Rows]) -> Rows:
        if key in self._rows:
            return self._rows[key]
        rows = make()
        size = sum(t.numel() * t.element_size() for t in rows)
        if self._bytes + size <= self._limit:
            self._rows[key], self._bytes = rows, self._bytes + size
        return rows


def name_of(model: nn.Module) -> str:
    return str(getattr(model, "arch", type(model).__name__))


def copied_rows(rows: Rows) -> Rows:
    return rows[0].clone(), rows[1].clone()


def nothing_else() -> Rows:
    raise DataError(
        "A client whose records were given, such as a shadow, has no other records. Use those that were given."
    )


def leaves(value: Any) -> Iterator[Any]:
    """Yield the plain values in a tree of dicts and lists."""
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f"Unknown device {name!r}. Choose from auto, cpu, cuda, cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingError(f"The device {name!r} is not supported. Choose from auto, cpu, cuda, cuda:N.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(
            f'The device {name!r} was asked for, but torch sees no GPU here. Use --device cpu, or device = "cpu" in a '
            "suite."
        )
    return device


def chosen_engine(setting: Setting) -> str:
    """Return the engine's name; auto is stacked on a GPU, where one small network leaves most of the device idle."""
    if setting.isolate and setting.engine not in ("auto", "serial"):
        raise SettingError(
            f"--isolate runs each client's task in a process of its own, one after the other, which --engine "
            f"{setting.engine} does not. Leave one of the two out."
        )
    if setting.engine != "auto" or setting.isolate:
        return "serial" if setting.isolate else setting.engine
    return "stacked" if on_gpu(setting) else "serial"


def on_gpu(setting: Setting) -> bool:
    """Return whether this setting's run is for a GPU, even if there is none here: a folder's name must not depend on
    that."""
    return setting.device.startswith("cuda") or (setting.device == "auto" and torch.cuda.is_available())


_held: list[tuple[str, World]] = []  # in a process that runs one party: the only world there is


def keep_world(setting_json: str, world: World) -> None:
    """Make `world` the only world that this process knows: the one of a single party."""
    world_of.cache_clear()
    _held[:] = [(setting_json, world)]


class Worlds:
    """Builds the world of a setting, and keeps the last few."""

    def __init__(self, room: int):
        self._room = room
        self._made: dict[str, World] = {}  # the one that was used last comes last
        self._behind: dict[str, Any] = {}  # what the names of a setting stood for when its run began

    def __call__(self, setting_json: str) -> World:
        """Return the world of a setting, given as JSON."""
        if _held:
            if _held[0][0] != setting_json:
                raise ContractError(
                    "This process serves one party of one run, and cannot open the world of another setting."
                )
            return _held[0][1]
        world = self._made.pop(setting_json, None) or World(Setting.model_validate_json(setting_json))
        self._made[setting_json] = world
        self._drop()
        return world

    def begun(self, setting: Setting) -> World:
        """Return the world of a run that begins. It is a new one if the setting's names stand for something else by
        now: the user wrote the file again, or imported the module anew.
        """
        setting_json, now = setting.model_dump_json(), _behind(setting)
        if not _held and self._behind.get(setting_json, now) != now:
            self._made.pop(setting_json, None)
        world = self(setting_json)
        self._behind[setting_json] = now
        self._drop()
        return world

    @contextmanager
    def room_for(self, number: int) -> Iterator[None]:
        """Keep so many worlds more within this context: runs that take turns would build theirs anew each time."""
        self._room += number
        try:
            yield
        finally:
            self._room -= number
            self._drop()

    def cache_clear(self) -> None:
        """Forget all worlds."""
        self._made.clear()
        self._behind.clear()

    def _drop(self) -> None:
        while len(self._made) > self._room:
            del self._made[next(iter(self._made))]
        for setting_json in self._behind.keys() - self._made.keys():
            del self._behind[setting_json]


def _behind(setting: Setting) -> list[Any]:
    """Return what the names of users' own data and models in a setting stand for now."""
    data = [setting.dataset, *([setting.public_dataset] if setting.public_dataset else [])]
    own = [*own_model.paths_in(setting.model), *own_model.paths_in(setting.server_model)]
    return [*map(stamp, data), *map(own_model.maker, own)]


world_of = Worlds(room=2)
