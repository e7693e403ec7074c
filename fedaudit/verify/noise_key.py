"""Says what a run folder gives away about its noise: whoever can draw it again can subtract it."""

from __future__ import annotations

from pathlib import Path

from fedaudit.privacy.noise_key import FILE
from fedaudit.setting import Setting
from fedaudit.verify.case import Case

FIGURE = "noise key"


def check_noise_key(case: Case) -> None:
    """Say whether the key of the run's noise is in the folder, and what that means for who gets the folder."""
    for line in told_by_folder(case.folder, case.record.setting):
        case.found.word(FIGURE, line)
    if _drawn_by_key(case.record.setting) and not (case.folder / FILE).is_file():
        case.found.word(FIGURE, f"{FILE} was not handed on: the noise can be neither subtracted nor drawn again")


def told_by_folder(folder: Path, setting: Setting) -> list[str]:
    """Return in words which noise can be subtracted by whoever has this folder; nothing if none can."""
    lines = []
    if _drawn_by_key(setting) and (folder / FILE).is_file():
        lines.append(
            f"{FILE} is in the folder: whoever has it can draw the noise again and subtract it. It is for a reviewer "
            "who may see the clients' values. Leave it out of what you publish: the seal holds without it"
        )
    return lines


def _drawn_by_key(setting: Setting) -> bool:
    """Return whether some policy's noise follows from the key, and not from the operating system's entropy."""
    return any(not (isinstance(policy, dict) and policy.get("secure")) for policy in setting.privacy.values())
