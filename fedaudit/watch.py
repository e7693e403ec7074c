"""How work that takes long tells somebody how far it is."""

from __future__ import annotations

from collections.abc import Callable

Watch = Callable[[float, float, str], None]  # done, all of it, what is being done
TimedWatch = Callable[[float, float, str, float | None], None]  # and the seconds left; None: nobody can tell yet


def unwatched(done: float, whole: float, what: str) -> None:
    """Nobody is told."""
