"""fedaudit: privacy and evaluation audits for federated learning.

`from fedaudit import ...` gives everything that the file of a method or an attack needs, and all that a notebook calls.
Imports are deferred, so that `import fedaudit` and the command line's --help are instant.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

__version__ = "0.2.0"

for _link in ("methods", "attacks", "reports"):  # symbolic links in a checkout, folders where installed
    if Path(__file__).with_name(_link).is_file():
        raise ImportError(
            f"{Path(__file__).with_name(_link)} is a text file. In the repository it is a symbolic link to ../{_link}. "
            "This checkout was made on a system without symbolic links, such as Windows without developer mode. Check "
            "out again with `git config core.symlinks true`, on Linux, macOS or WSL; or install a wheel."
        )

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypeVar

    from torch import Tensor, nn

    M = TypeVar("M", bound=nn.Module)

    from fedaudit.aggregation.mean import Mean, weighted_mean
    from fedaudit.aggregation.sender import Sender
    from fedaudit.attack.claims import Claims, Groups, Histogram, Reconstructions
    from fedaudit.attack.scene import Attack, Scene
    from fedaudit.errors import FedauditError
    from fedaudit.registry import register, register_attack
    from fedaudit.reports.compare import compare
    from fedaudit.reports.report import write_report as report
    from fedaudit.reports.run_tables import Tables
    from fedaudit.runtime.declarations.contract import check_declarations
    from fedaudit.runtime.method import Method
    from fedaudit.runtime.party import Client, Cohort, Server
    from fedaudit.runtime.run_record import RunRecord, read_record
    from fedaudit.runtime.runner import run
    from fedaudit.runtime.seeds_together import run_seeds
    from fedaudit.setting import Setting
    from fedaudit.suite.scheduler import audit
    from fedaudit.training.augment import Augment
    from fedaudit.training.fit import Opt, Running, Turns, adam, sgd
    from fedaudit.training.forward import in_chunks
    from fedaudit.training.losses import ce, kl
    from fedaudit.training.stacked.networks import Many, answers
    from fedaudit.wire.codec import Frozen, freeze
    from fedaudit.wire.message import (
        Down,
        LowRank,
        Part,
        Record,
        Size,
        State,
        Up,
        private,
        public,
        relay,
        state_of,
        trained,
    )
    from fedaudit.wire.traffic import NUMBER, Plan

_NAMES = {
    "aggregation.mean": "Mean weighted_mean",
    "aggregation.sender": "Sender",
    "attack.claims": "Claims Groups Histogram Reconstructions",
    "attack.scene": "Attack Scene",
    "errors": "FedauditError",
    "registry": "register register_attack",
    "reports.compare": "compare",
    "runtime.declarations.contract": "check_declarations",
    "runtime.method": "Method",
    "runtime.party": "Client Cohort Server",
    "runtime.run_record": "RunRecord read_record",
    "runtime.runner": "run",
    "runtime.seeds_together": "run_seeds",
    "setting": "Setting",
    "suite.scheduler": "audit",
    "training.augment": "Augment",
    "training.fit": "Opt Running Turns adam sgd",
    "training.forward": "in_chunks",
    "training.losses": "ce kl",
    "training.stacked.networks": "Many answers",
    "wire.codec": "Frozen freeze",
    "wire.message": "Down LowRank Part Record Size State Up private public relay state_of trained",
    "wire.traffic": "NUMBER Plan",
}
_HOME = {name: (module, name) for module, names in _NAMES.items() for name in names.split()}
_HOME["report"] = ("reports.report", "write_report")
__all__ = ["__version__", "attack", "load", *sorted(_HOME)]


@overload
def load(what: str | Path) -> Tables: ...
@overload
def load(what: M, state: Mapping[str, Tensor], part: Part | None = None) -> M: ...
def load(what: Any, *rest: Any, **named: Any) -> Any:
    """Return the tables of a run or an audit, or put a state into a model.

    Given a folder, return its tables: `fedaudit.load("audit").runs` is a data frame. Given a model and a state, copy
    the state into the model, or into a part of it, and return the model. The two never share memory.
    """
    if isinstance(what, str | Path):
        return importlib.import_module("fedaudit.reports.run_tables").tables_of(what)
    return importlib.import_module("fedaudit.wire.message").load(what, *rest, **named)


def __getattr__(name: str) -> Any:
    if name == "attack":  # a package that can be called like a function: fedaudit/attack/__init__.py says how
        return importlib.import_module("fedaudit.attack")
    if name not in _HOME:
        raise AttributeError(f"module 'fedaudit' has no attribute {name!r}")
    module, inside = _HOME[name]
    return getattr(importlib.import_module(f"fedaudit.{module}"), inside)


def __dir__() -> list[str]:
    return sorted(__all__)
