"""This room holds what an attack sees, what it may claim, and how its claims are scored.

`fedaudit.attack` is this package. It can also be called, as `fedaudit.attack(folder, ...)`: a function of that name
could not stand beside a package of that name.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Room(types.ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from fedaudit.attack.attack_run import attack_run

        return attack_run(*args, **options)


sys.modules[__name__].__class__ = _Room
