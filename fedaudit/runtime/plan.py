"""The plan of a round holds what a method's declared traffic depends on. Runs and mere plans of runs both use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fedaudit.aggregation.secure.graph import degree, neighbours
from fedaudit.aggregation.secure.messages import SumFacts, traffic_of
from fedaudit.runtime.method import Method
from fedaudit.setting import Setting
from fedaudit.shape import Shape
from fedaudit.wire.compression import Stage, applies, stage_of
from fedaudit.wire.message import Declared, Size, Up, as_size, message_classes
from fedaudit.wire.traffic import NUMBER, Key, Plan


def arch_on_server(setting: Setting, method: Method, archs: Sequence[str]) -> str:
    """Return the server's architecture; if clients differ and nobody named one, the first client's."""
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
    """Return the plan of round t with these participants.

    `n` are their numbers of records, `facts` whatever else is known of the round.
    """
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


# --- with secure aggregation -----------------------------------------------------------------------------------


def in_sums(method: Method, declared: Mapping[Key, Size | int], sums: Sequence[SumFacts]) -> dict[Key, Size | int]:
    """Return a round's declared traffic where secure sums take the place of private replies."""
    hidden = summed_fields(method, declared)
    sizes: dict[Key, Size | int] = {key: as_size(size) for key, size in declared.items() if key not in hidden}
    for facts in sums:
        for key, size in traffic_of(facts).items():
            sizes[key] = sizes.get(key, Size()) + size
    return sizes


def summed_fields(method: Method, declared: Mapping[Key, Size | int]) -> set[Key]:
    """Return the declared uploads that travel inside of sums: all fields of messages that hold something private."""
    private = set()
    for cls in message_classes(type(method).__module__):
        if issubclass(cls, Up) and any(d is not None and d.role == "private" for d in cls.declared().values()):
            private.add(cls.__name__)
    return {key for key in declared if key[0] == "up" and key[1].partition(".")[0] in private}


def planned_sums(method: Method, declared: Mapping[Key, Size | int], plan: Plan, threshold: float) -> list[SumFacts]:
    """Return what a round's secure sums will be if nobody drops out."""
    ids = list(plan.participants)
    near = neighbours(ids, degree(len(ids), threshold), 0)
    lengths = method.summed_numbers(plan)
    if lengths is None:
        numbers = 0
        for key in summed_fields(method, declared):
            size = as_size(declared[key])
            numbers += size.numbers or size.payload // NUMBER  # a size without a shape is one of numbers
        lengths = [numbers // len(ids)]
    return [SumFacts(ids, near, ids, ids, ids, length) for length in lengths]


# --- with compression ------------------------------------------------------------------------------------------


def declared_of(method: Method, name: str) -> Declared | None:
    """Return what the method's message declares for an uploaded "Message.field"; None if nothing is found."""
    message, _, field = name.partition(".")
    for cls in message_classes(type(method).__module__):
        if cls.__name__ == message and issubclass(cls, Up) and (declared := cls.declared().get(field)) is not None:
            return declared
    return None


def as_sent(
    method: Method, compress: str | None, declared: Mapping[Key, Size | int]
) -> tuple[dict[Key, Size], frozenset[Key]]:
    """Return a run's declared traffic under a setting's `compress`, and the fields whose size only the run can tell."""
    stage = stage_of(compress)
    if stage is None:
        return {key: as_size(size) for key, size in declared.items()}, frozenset()
    return compressed(method, stage, declared)


def compressed(
    method: Method, stage: Stage, declared: Mapping[Key, Size | int]
) -> tuple[dict[Key, Size], frozenset[Key]]:
    """Return the declared traffic of a run that compresses what clients send, and the fields whose size only the run
    can tell.

    The size of such a field depends on its numbers (svd), or the method declares its bytes without its shapes. It
    counts as if it were sent whole.
    """
    sizes: dict[Key, Size] = {}
    unknown: set[Key] = set()
    for key, size in declared.items():
        sizes[key] = as_size(size)
        if key[0] == "up" and applies(declared_of(method, key[1])):
            sizes[key], known = stage.size(sizes[key])
            if not known or (sizes[key].payload and not as_size(size).tensors):
                unknown.add(key)
    return sizes, frozenset(unknown)


def sent_in_round(method: Method, plan: Plan, setting: Setting) -> tuple[dict[Key, Size], frozenset[Key]] | None:
    """Return what a planned round sends, compressed and in sums as the setting says, and the fields that are upper
    bounds. Return None if the method does not declare its traffic.
    """
    declared = method.traffic(plan)
    if declared is None:
        return None
    sizes, unknown = as_sent(method, setting.compress, declared)
    if setting.aggregate == "secure":
        summed = in_sums(method, declared, planned_sums(method, declared, plan, setting.threshold))
        sizes = {key: as_size(size) for key, size in summed.items()}
    return sizes, unknown


def unplanned(
    method: Method, stage: Stage, declared: Mapping[Key, Size | int], measured: Mapping[Key, Size]
) -> Iterator[str]:
    """Yield a note on each field whose compressed size differs from what the method's declaration leads one to plan
    with."""
    planned, unknown = compressed(method, stage, declared)
    for key in sorted(planned.keys() - unknown):
        if planned[key] != measured.get(key, Size()):
            yield (
                f"{key[1]}: its compressed size does not follow from its declared traffic. Declare each tensor by its "
                "own shape: plan.state(), plan.tensor(rows, columns)"
            )
