"""The errors that fedaudit raises, written for the person who has to fix the problem.

Every message names the object, the cause and the remedy. The command line prints a
`FedauditError` as one paragraph and exits with 2; any other exception is a bug in fedaudit.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class FedauditError(Exception):
    """The base class of all errors that fedaudit raises on purpose."""


class SettingError(FedauditError):
    """A setting is unknown, malformed or contradicts another."""


class DataError(FedauditError):
    """A data set is missing, malformed or too small for its use."""


class WireError(FedauditError):
    """A value cannot cross the wire, or the bytes that arrived are not those that were sent."""


class TranscriptError(FedauditError):
    """A transcript is missing or damaged, or it does not keep the content that was asked for."""


class ThreatError(FedauditError):
    """An attack asked for something that its threat model does not show it."""


class PrivacyError(FedauditError):
    """A privacy policy is malformed, or cannot be applied to the release that it names."""


class NotApplicable(PrivacyError):
    """A setting is well-formed but has nothing to act on.

    Examples are a policy for a kind that the method never releases, and a method for images on rows of numbers.
    """


class ContractError(FedauditError):
    """A method breaks the contract that the harness relies on."""


class RunError(FedauditError):
    """A run could not go on."""


class DeviceError(RunError):
    """A device, its memory or the compiler failed. No party is at fault."""

    def __init__(self, trouble: str, who: str, said: str):
        super().__init__(f"{who}: {said}.")
        self.trouble, self.who, self.said = trouble, who, said

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return DeviceError, (self.trouble, self.who, self.said)  # other processes send it back pickled


def last_frame(e: BaseException, libraries: bool = True) -> traceback.FrameSummary | None:
    """Return the frame that raised the error, or None if unknown.

    With `libraries=False`, return the last frame that is not in an installed library.
    """
    frames = traceback.extract_tb(e.__traceback__)
    if not libraries:
        frames = [frame for frame in frames if "site-packages" not in frame.filename] or frames  # type: ignore[assignment]
    return frames[-1] if frames else None


def place_of(e: BaseException) -> str:
    """Return " (function, file:line)" of the place that raised the error, with a leading space; empty if unknown."""
    at = last_frame(e)
    return "" if at is None else f" ({at.name}, {at.filename.rsplit('/', 1)[-1]}:{at.lineno})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a hint that proposes the nearest known name and then lists all known names."""
    known = sorted(known)
    return f"{nearest(name, known)} There is: {', '.join(known) if known else 'nothing'}."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that proposes the nearest known name; empty if none is near."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    return f"Unknown {what} {name!r}.{did_you_mean(name, known)}"
