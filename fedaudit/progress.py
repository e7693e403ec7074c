"""The types of progress callbacks, which long work calls to tell how far it is."""

from __future__ import annotations

from collections.abc import Callable

Watch = Callable[[float, float, str], None]  # amount done, whole amount, what is being done
TimedWatch = Callable[[float, float, str, float | None], None]  # and the seconds left; None: not known yet


def unwatched(done: float, whole: float, what: str) -> None:
    """Do nothing: the progress callback for callers that do not watch."""
