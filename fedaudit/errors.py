"""What goes wrong, in words for the person who has to mend it.

Every message names the object, the cause and the remedy. The command line prints a
`FedauditError` as one paragraph and exits with 2; anything else is a bug of ours.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class FedauditError(Exception):
    """Base of all errors that fedaudit raises on purpose."""


class SettingError(FedauditError):
    """A setting is unknown, malformed or contradicts another."""


class DataError(FedauditError):
    """A data set is missing, malformed or too small for what was asked of it."""


class WireError(FedauditError):
    """Something cannot cross the wire, or what arrived is not what was sent."""


class TranscriptError(FedauditError):
    """A transcript is missing, damaged, or asked for what it does not keep."""


class ThreatError(FedauditError):
    """An attack asked for something that its threat model does not show it."""


class PrivacyError(FedauditError):
    """A privacy policy is malformed, or cannot be applied to what it names."""


class NotApplicable(PrivacyError):
    """Well-formed, but about nothing: a policy on what the method never releases, a method of images on rows."""


class ContractError(FedauditError):
    """A method breaks the contract that the harness relies on."""


class RunError(FedauditError):
    """A run could not go on."""


class DeviceError(RunError):
    """A device, its memory or the compiler failed: no party's fault."""

    def __init__(self, trouble: str, who: str, said: str):
        super().__init__(f"{who}: {said}.")
        self.trouble, self.who, self.said = trouble, who, said

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return DeviceError, (self.trouble, self.who, self.said)  # it comes back from other processes


def last_frame(e: BaseException, libraries: bool = True) -> traceback.FrameSummary | None:
    """Where it was raised; without libraries, the last line before that in somebody's own code."""
    frames = traceback.extract_tb(e.__traceback__)
    if not libraries:
        frames = [frame for frame in frames if "site-packages" not in frame.filename] or frames  # type: ignore[assignment]
    return frames[-1] if frames else None


def place_of(e: BaseException) -> str:
    """In brackets, after a space: the function, the file's name and the line where it was raised; empty if unknown."""
    at = last_frame(e)
    return "" if at is None else f" ({at.name}, {at.filename.rsplit('/', 1)[-1]}:{at.lineno})"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence that proposes the nearest known name, then lists what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} There is: {', '.join(known) if known else 'nothing'}."


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    return f"Unknown {what} {name!r}.{did_you_mean(name, known)}"
