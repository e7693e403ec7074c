"""The help of arguments, whichever versions of typer and click meet.

click has taken the help of an argument itself since 8.5. Versions of typer that do not know of this lose it on the way:
it is then put back from the command's signature.
"""

from __future__ import annotations

import inspect
from typing import Any

import typer
from typer.models import ArgumentInfo
from typer.utils import get_params_from_function


class Helped(typer.core.TyperGroup):
    """A group whose commands say what their arguments are."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        callback = getattr(command, "callback", None)
        if command is not None and callback is not None:
            declared = get_params_from_function(inspect.unwrap(callback))
            for param in command.params:
                said = declared[param.name].default if param.name in declared else None
                if isinstance(said, ArgumentInfo) and not getattr(param, "help", None):
                    param.help = said.help
        return command
