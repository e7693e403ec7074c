"""Planning communication: what a full-size experiment sends, by the method's own declaration; no training, no data."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fedaudit import models, registry
from fedaudit.config import Setting
from fedaudit.data import datasets
from fedaudit.errors import SettingError, unknown
from fedaudit.method import Method
from fedaudit.records import FRAME, Size, as_size, model_size
from fedaudit.traffic import Plan

CONVENTIONS = ("payload", "wire")


def make_plan(setting: Setting) -> tuple[Method, Plan]:
    """A round of the setting on a data set of the published size, spread evenly, every record trained on."""
    facts = datasets.describe(setting.dataset)
    if facts.classes is None or facts.shape is None or facts.train is None:
        raise SettingError(
            f"The size of {setting.dataset} is not known without reading it. Plan with a named data set."
        )
    shape, classes = facts.shape, facts.classes
    if setting.image_size:
        shape = (shape[0], setting.image_size, setting.image_size)
    method: Method = registry.find(setting.method).make(setting.set, setting.preset)  # type: ignore[attr-defined]
    archs = method.archs(setting.model, setting.clients)
    participants = list(range(max(1, round(setting.participation * setting.clients))))
    public = round(facts.train * setting.public)

    @functools.cache
    def size(arch: str) -> Size:
        with torch.device("meta"):
            return model_size(models.build(arch, shape=shape, classes=classes))

    return method, Plan(
        t=1,
        participants=participants,
        n=dict.fromkeys(participants, (facts.train - public) // setting.clients),
        archs={k: archs[k] for k in participants},
        server_arch=setting.server_model or method.server_arch(setting.model) or archs[0],
        shape=shape,
        classes=classes,
        model_size=size,
        clients=setting.clients,
        public=public,
    )


def plan_traffic(setting: Setting, convention: str = "payload") -> dict[str, Any]:
    """Bytes by direction and field, of one round and of all of them."""
    if convention not in CONVENTIONS:
        raise SettingError(unknown("convention", convention, CONVENTIONS))
    method, plan = make_plan(setting)
    declared = method.traffic(plan)
    if declared is None:
        raise SettingError(
            f"{setting.method} does not declare its traffic. Write its `traffic(plan)`, or measure a run."
        )
    fields: list[dict[str, Any]] = []
    for (direction, name), declared_size in sorted(declared.items()):
        size = as_size(declared_size)
        count = size.payload if convention == "payload" else size.payload + size.buffers + size.header
        fields.append({"direction": direction, "field": name, "bytes": count})
    if convention == "wire":  # each message that has a field travels once per participant, in a frame of its own
        for direction, message in sorted({(row["direction"], row["field"].partition(".")[0]) for row in fields}):
            frames = FRAME * len(plan.participants)
            fields.append({"direction": direction, "field": f"{message}.(frame)", "bytes": frames})
    result: dict[str, Any] = {
        "method": setting.method,
        "convention": convention,
        "rounds": setting.rounds,
        "clients": setting.clients,
        "participants": len(plan.participants),
        "fields": fields,
    }
    for name, wanted in (("up", {"up"}), ("down", {"down"}), ("total", {"up", "down"})):
        per_round = sum(row["bytes"] for row in fields if row["direction"] in wanted)
        total = per_round * setting.rounds
        result[name] = {
            "bytes_per_round": per_round,
            "bytes": total,
            "MB": total / 1000**2,
            "GB": total / 1000**3,
            "MiB": total / 1024**2,
            "GiB": total / 1024**3,
        }
    return result
