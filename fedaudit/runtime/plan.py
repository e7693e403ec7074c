"""The plan of a round: what a method's declared traffic depends on. One copy for runs and for what is planned only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedaudit.runtime.method import Method
from fedaudit.setting import Setting
from fedaudit.training.models import Shape
from fedaudit.wire.message import Size
from fedaudit.wire.traffic import Plan


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
