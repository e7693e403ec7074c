"""fedaudit: privacy and evaluation audits for federated learning.

`from fedaudit import ...` gives everything that a method's or an attack's file needs. Imports are deferred, so that
`import fedaudit` and the command line's --help are instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedaudit.config import Setting
    from fedaudit.errors import FedauditError
    from fedaudit.fit import Opt, Turns, adam, sgd
    from fedaudit.losses import ce, kl
    from fedaudit.method import Client, Cohort, Method, Server, weighted_mean
    from fedaudit.record import RunRecord, read_record
    from fedaudit.records import Down, Record, Size, State, Up, load, private, public, relay, state_of
    from fedaudit.registry import register, register_attack
    from fedaudit.runner import run
    from fedaudit.traffic import NUMBER, Plan

_HOME = {
    "Setting": "config", "FedauditError": "errors", "Opt": "fit", "Turns": "fit", "adam": "fit", "sgd": "fit",
    "ce": "losses", "kl": "losses",
    "Client": "method", "Cohort": "method", "Method": "method", "Server": "method", "weighted_mean": "method",
    "RunRecord": "record", "read_record": "record",
    "Down": "records", "Record": "records", "Size": "records", "State": "records", "Up": "records", "load": "records",
    "private": "records", "public": "records", "relay": "records", "state_of": "records",
    "register": "registry", "register_attack": "registry", "run": "runner", "NUMBER": "traffic", "Plan": "traffic",
}  # fmt: skip
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedaudit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedaudit.{_HOME[name]}"), name)
