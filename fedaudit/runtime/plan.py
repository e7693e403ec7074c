"""The plan of a round: what a method's declared traffic depends on. One copy for runs and for what is planned only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedaudit.runtime.method import Method
from fedaudit.setting import Setting
from fedaudit.shape import Shape
from fedaudit.wire.compression import Stage, applies, stage_of
from fedaudit.wire.message import Declared, Size, Up, as_size, message_classes
from fedaudit.wire.traffic import Key, Plan


def arch_on_server(setting: Setting, method: Method, archs: Sequence[str]) -> str:
    """The server's model; where clients differ and nobody named one, the first client's."""
    return setting.server_model or method.server_arch(setting.model) or archs[0]


def plan_of(
    setting: Setting,
    method: Method,
    archs: Sequence[str],
    participants: list[int],
    *,
    t: int,
    n: Mapping[int, int],
    shape: Shape,
    classes: int,
    model_size: Callable[..., Size],
    public: int,
    labelled: bool,
    **facts: Any,
) -> Plan:
    """Round t with these participants; `n` are their numbers of records, `facts` what else is known of it."""
    return Plan(
        t=t,
        participants=participants,
        n={k: n[k] for k in participants},
        archs={k: archs[k] for k in participants},
        server_arch=arch_on_server(setting, method, archs),
        shape=shape,
        classes=classes,
        model_size=model_size,
        clients=setting.clients,
        public=public,
        labelled=labelled,
        **facts,
    )


# --- with compression ------------------------------------------------------------------------------------------


def declared_of(method: Method, name: str) -> Declared | None:
    """What the method's message says of an uploaded "Message.field"."""
    message, _, field = name.partition(".")
    for cls in message_classes(type(method).__module__):
        if cls.__name__ == message and issubclass(cls, Up) and (declared := cls.declared().get(field)) is not None:
            return declared
    return None


def as_sent(
    method: Method, compress: str | None, declared: Mapping[Key, Size | int]
) -> tuple[dict[Key, Size], frozenset[Key]]:
    """The declared traffic of a run under a setting's `compress`, and the fields whose size only the run tells."""
    stage = stage_of(compress)
    if stage is None:
        return {key: as_size(size) for key, size in declared.items()}, frozenset()
    return compressed(method, stage, declared)


def compressed(
    method: Method, stage: Stage, declared: Mapping[Key, Size | int]
) -> tuple[dict[Key, Size], frozenset[Key]]:
    """The declared traffic of a run that compresses what clients send, and the fields whose size only the run tells:
    their numbers decide (svd), or the method declares their bytes without their shapes. They count as if whole."""
    sizes: dict[Key, Size] = {}
    unknown: set[Key] = set()
    for key, size in declared.items():
        sizes[key] = as_size(size)
        if key[0] == "up" and applies(declared_of(method, key[1])):
            sizes[key], known = stage.size(sizes[key])
            if not known or (sizes[key].payload and not as_size(size).tensors):
                unknown.add(key)
    return sizes, frozenset(unknown)


def unplanned(
    method: Method, stage: Stage, declared: Mapping[Key, Size | int], measured: Mapping[Key, Size]
) -> Iterator[str]:
    """Notes on fields whose compressed size is another than the method's declaration leads one to plan with."""
    planned, unknown = compressed(method, stage, declared)
    for key in sorted(planned.keys() - unknown):
        if planned[key] != measured.get(key, Size()):
            yield (
                f"{key[1]}: its compressed size is not what its declared traffic leads to. Declare each tensor by its "
                "own shape: plan.state(), plan.tensor(rows, columns)"
            )
