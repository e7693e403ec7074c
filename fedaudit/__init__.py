"""fedaudit: privacy and evaluation audits for federated learning.

`from fedaudit import ...` gives everything that a method's or an attack's file needs. Imports are deferred, so that
`import fedaudit` and the command line's --help are instant.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedaudit.errors import FedauditError
    from fedaudit.registry import register, register_attack
    from fedaudit.runtime.method import Client, Cohort, Method, Server, in_chunks, weighted_mean
    from fedaudit.runtime.run_record import RunRecord, read_record
    from fedaudit.runtime.runner import run
    from fedaudit.setting import Setting
    from fedaudit.training.fit import Opt, Turns, adam, sgd
    from fedaudit.training.losses import ce, kl
    from fedaudit.wire.codec import Down, Record, Size, State, Up, load, private, public, relay, state_of
    from fedaudit.wire.traffic import NUMBER, Plan

_NAMES = {
    "errors": "FedauditError",
    "registry": "register register_attack",
    "runtime.method": "Client Cohort Method Server in_chunks weighted_mean",
    "runtime.run_record": "RunRecord read_record",
    "runtime.runner": "run",
    "setting": "Setting",
    "training.fit": "Opt Turns adam sgd",
    "training.losses": "ce kl",
    "wire.codec": "Down Record Size State Up load private public relay state_of",
    "wire.traffic": "NUMBER Plan",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedaudit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedaudit.{_HOME[name]}"), name)
