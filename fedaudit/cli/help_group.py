"""A group of commands that shows the help of arguments with every version of typer and click.

Since 8.5, click itself takes the help of an argument. Versions of typer that do not know this lose the help; it is
then put back from the command's signature.
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
