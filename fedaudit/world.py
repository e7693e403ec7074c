"""The world of a run, as its setting describes it: data, models, method. Built alike on the driver and in workers.

It is a cache and nothing more: dropping it costs time, never state.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedaudit import models, registry
from fedaudit.config import Setting
from fedaudit.data import Federation, federate, load
from fedaudit.errors import DataError, SettingError
from fedaudit.method import Method
from fedaudit.records import Size
from fedaudit.rng import generator, seeded
from fedaudit.traffic import Plan

Rows = tuple[Tensor, Tensor]


class World:
    def __init__(self, setting: Setting):
        self.setting = setting
        self.device = resolve_device(setting.device)
        self.method: Method = registry.find(setting.method).make(setting.set)  # type: ignore[attr-defined]
        self.archs = models.assign(setting.model, setting.clients)
        dataset = load(setting.dataset, setting.data_dir, size=setting.image_size)
        self.shape, self.classes = dataset.shape, dataset.classes
        self.federation: Federation = federate(
            dataset,
            clients=setting.clients,
            partition=setting.partition,
            seed=setting.seed,
            minimum=setting.minimum,
            holdout=setting.holdout,
            validation=setting.validation,
            aux=setting.aux,
            public=setting.public,
        )
        self._templates: dict[str, models.Net] = {}

    @property
    def server_arch(self) -> str:
        if self.setting.server_model is not None:
            return self.setting.server_model
        if len(set(self.archs)) > 1:
            raise SettingError(
                f"{self.setting.method} asks for one server model, but the clients have several "
                f"({', '.join(sorted(set(self.archs)))}). Name it with --server-model, or choose one --model for all."
            )
        return self.archs[0]

    def fresh_model(self, k: int) -> models.Net:
        """Client k's model before any training: it follows from the seed and k alone."""
        with seeded(self.setting.seed, f"client {k}", "model"):
            model = models.build(self.archs[k], shape=self.shape, classes=self.classes)
        return model.to(self.device).eval()

    def blank_model(self, k: int) -> models.Net:
        """A model of client k's architecture whose weights are about to be replaced."""
        arch = self.archs[k]
        if arch not in self._templates:
            self._templates[arch] = self.fresh_model(k)
        return copy.deepcopy(self._templates[arch])

    def count(self, k: int) -> int:
        return len(self.federation.shards[k].members)

    def members(self, k: int) -> Rows:
        return self._to_device(self.federation.members(k))

    def nonmembers(self, k: int) -> Rows:
        return self._to_device(self.federation.nonmembers(k))

    def validation(self, k: int) -> Rows:
        return self._to_device(self.federation.validation(k))

    def other_rows(self, k: int) -> Rows:
        """As many records as client k trains on, but none of its own: for the test of declarations."""
        x, y = self.federation.auxiliary()
        if not len(x):
            raise DataError("Testing a method's declarations needs an auxiliary set: set aux above 0.")
        n = self.count(k)
        pick = torch.randint(len(x), (n,), generator=generator(self.setting.seed, f"client {k}", "swap"))
        return self._to_device((x[pick], y[pick]))

    @functools.cached_property
    def _public(self) -> Rows:
        return self._to_device(self.federation.public_set())

    def public(self) -> Rows:
        if not self.setting.public:
            raise SettingError(f"{self.setting.method} needs a public transfer set: set --public, for example 0.1.")
        return self._public

    @functools.cached_property
    def test(self) -> Rows:
        return self._to_device(self.federation.test())

    def _to_device(self, rows: Rows) -> Rows:
        return rows[0].to(self.device), rows[1].to(self.device)

    @functools.cached_property
    def model_size(self) -> Callable[[str], Size]:
        """Bytes of a model by its name, as parameters and buffers; measured once on the meta device."""

        @functools.cache
        def size(arch: str) -> Size:
            return model_size(arch, self.shape, self.classes)

        return size

    def plan(self, t: int, participants: list[int], **facts: Any) -> Plan:
        server_arch = self.setting.server_model or self.archs[0]
        return Plan(
            t=t,
            participants=participants,
            n={k: self.count(k) for k in participants},
            archs={k: self.archs[k] for k in participants},
            server_arch=server_arch,
            shape=self.shape,
            classes=self.classes,
            model_size=self.model_size,
            clients=self.setting.clients,
            public=len(self.federation.public),
            **facts,
        )


def model_size(arch: str, shape: tuple[int, int, int], classes: int) -> Size:
    with seeded("size"):
        model = models.build(arch, shape=shape, classes=classes)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return Size(parameters, sum(t.numel() * t.element_size() for t in model.state_dict().values()) - parameters)


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f"Unknown device {name!r}. There is: auto, cpu, cuda, cuda:N.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"The device {name!r} was asked for, but torch sees no GPU here. Use --device cpu.")
    return device


@functools.lru_cache(maxsize=2)
def world_of(setting_json: str) -> World:
    return World(Setting.model_validate_json(setting_json))
