"""Says what a run folder gives away about its noise: whoever can draw it again can subtract it."""

from __future__ import annotations

from pathlib import Path

from fedaudit.privacy.noise_key import FILE
from fedaudit.privacy.update_policy import UPDATES
from fedaudit.setting import Setting
from fedaudit.verify.case import Case

FIGURE = "noise key"


def check_noise_key(case: Case) -> None:
    """Say whether the key of the run's noise is in the folder, and what that means for who gets the folder."""
    for line in told_by_folder(case.folder, case.record.setting):
        case.found.word(FIGURE, line)
    if not _drawn_by_key(case.record.setting) or (case.folder / FILE).is_file():
        return
    if _sums_by_seed(case):
        case.found.word(
            FIGURE, "the run is older than 0.2.0: what hides sums follows from the seed, which setting.json holds. "
            "Whoever has the folder can draw it again and subtract it",
        )  # fmt: skip
        return
    case.found.word(FIGURE, f"{FILE} was not handed on: the noise can be neither subtracted nor drawn again")


def _sums_by_seed(case: Case) -> bool:
    """Return whether a run's sums are of a version that drew their noise and masks from the seed."""
    setting, version = case.record.setting, case.record.versions.get("fedaudit", "0")
    return (UPDATES in setting.privacy or setting.aggregate == "secure") and version.startswith(("0.0", "0.1"))


def told_by_folder(folder: Path, setting: Setting) -> list[str]:
    """Return in words which noise can be subtracted by whoever has this folder; nothing if none can."""
    lines = []
    if _drawn_by_key(setting) and (folder / FILE).is_file():
        lines.append(
            f"{FILE} is in the folder: whoever has it can draw noise and masks again and subtract them. It is for a "
            "reviewer who may see the clients' values. Leave it out of what you publish: the seal holds without it"
        )
    return lines


def _drawn_by_key(setting: Setting) -> bool:
    """Return whether noise or masks follow from the key, and not all from the operating system's entropy."""
    return setting.aggregate == "secure" or any(
        not (isinstance(policy, dict) and policy.get("secure")) for policy in setting.privacy.values()
    )
