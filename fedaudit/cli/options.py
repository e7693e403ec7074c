"""Options and arguments that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Trust = Annotated[bool, typer.Option("--trust", help="Import code outside fedaudit that the run names.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
SeedsTogether = Annotated[
    bool,
    typer.Option("--seeds-together", help="Run the seeds of a row side by side, with their clients as one stack."),
]
