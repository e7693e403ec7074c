"""Runs of several seeds side by side: one setting, several seeds, and one stack of all their clients.

A GPU is not busy with ten small networks, and takes little longer for thirty. So the runs of several seeds take turns
in one process, each in a thread of its own, and only one of them goes on at any time (`lockstep`). A run goes on until
its clients have come to their trainings, and waits there. When all runs wait, the trainings that are alike become one
stack, and each run goes on with its own results.

Each run has a world, records, generators, noise, transcript, folder and record of its own, as alone. The numbers are
those of the run alone up to rounding, as with the engine `stacked`. A run that fails leaves the others alone.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedaudit.errors import RunError, SettingError
from fedaudit.progress import Watch, unwatched
from fedaudit.runtime.folder import default_folder
from fedaudit.runtime.lockstep import Globals, Turn, here, take_turns
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.runtime.run_state import before_cuda
from fedaudit.runtime.runner import run
from fedaudit.runtime.task import compute
from fedaudit.runtime.world import resolve_device, world_of
from fedaudit.setting import Setting
from fedaudit.training.cuda_graphs import begin_run


@dataclass(frozen=True)
class Place:
    """One run of several: its setting, its folder, and how it reports progress."""

    setting: Setting
    folder: Path
    watch: Watch = unwatched


@dataclass(frozen=True)
class Ended:
    """The end of one run of several: its record, or the error with which it ended."""

    record: RunRecord | None = None
    error: Exception | None = None


def run_seeds(
    setting: Setting,
    seeds: Sequence[int],
    *,
    out: Sequence[Path | str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    watch: Watch | None = None,
) -> list[RunRecord]:
    """Run a setting with several seeds side by side, and return their records in the order of `seeds`.

    `out` are the folders of the runs, one for each seed. If some runs fail, the others are carried out to their end
    first; the error then names all that failed.
    """
    settings = [stackable_setting(setting.model_copy(update={"seed": seed})) for seed in seeds]
    folders = [default_folder(one) for one in settings] if out is None else [Path(folder) for folder in out]
    if len(folders) != len(settings):
        raise SettingError(f"{len(settings)} seeds need as many folders, not {len(folders)}. Name one for each seed.")
    told = watch or unwatched
    places = [Place(one, folder, told_of(one.seed, told)) for one, folder in zip(settings, folders, strict=True)]
    ended = run_together(places, resume=resume, overwrite=overwrite)
    failed = [(place, end.error) for place, end in zip(places, ended, strict=True) if end.error is not None]
    if len(failed) == 1 and len(places) == 1:
        raise failed[0][1]
    if failed:
        lines = [f"seed {place.setting.seed} ({place.folder}): {_text(error)}" for place, error in failed]
        raise RunError(
            f"{len(failed)} of {len(places)} seeds that ran side by side failed; the others are done.\n"
            + "\n".join(lines)
        ) from failed[0][1]
    return [end.record for end in ended if end.record is not None]


def told_of(seed: int, watch: Watch) -> Watch:
    """Return a progress callback that names the seed."""
    return lambda done, whole, what: watch(done, whole, f"seed {seed}: {what}")


def stackable_setting(setting: Setting) -> Setting:
    """Return the setting with the engine that trains clients together, or refuse if it asks for another one."""
    if setting.isolate or setting.engine not in ("auto", "stacked"):
        what = "--isolate" if setting.isolate else f"--engine {setting.engine}"
        raise SettingError(
            f"--seeds-together trains the clients of several seeds as one stack, which {what} does not. Leave one of "
            "the two out."
        )
    if setting.flops:
        raise SettingError(
            "--seeds-together trains the clients of several seeds as one stack, and --flops counts each client's "
            "operations alone. Leave one of the two out."
        )
    return setting.model_copy(update={"engine": "stacked"})


def alike(a: Setting, b: Setting) -> bool:
    """Return whether two settings differ in nothing but the seed."""
    return a.model_copy(update={"seed": b.seed}) == b


def run_together(
    places: Sequence[Place], *, resume: bool = False, overwrite: bool = False, refuse_idle: bool = False
) -> list[Ended]:
    """Carry out runs of one setting with several seeds side by side, and return how each ended.

    Runs that are done already, or that are the only ones left, are carried out as usual.
    """
    check(places)
    places = [replace(place, setting=stackable_setting(place.setting)) for place in places]
    how = {"resume": resume, "overwrite": overwrite, "refuse_idle": refuse_idle}
    works = [
        functools.partial(run, place.setting, out=place.folder, watch=place.watch, **how)  # type: ignore[arg-type]
        for place in places
    ]
    ended: list[Ended | None] = [
        _ended(work) if resume and is_over(place) else None for work, place in zip(works, places, strict=True)
    ]
    left = [i for i, one in enumerate(ended) if one is None]
    if len(left) == 1:
        ended[left[0]] = _ended(works[left[0]])
    elif left:
        for i, end in zip(left, _side_by_side([places[i] for i in left], [works[i] for i in left]), strict=True):
            ended[i] = end
    return [end for end in ended if end is not None]


def check(places: Sequence[Place]) -> None:
    """Refuse runs that cannot go on side by side."""
    if not places:
        raise SettingError("No seeds were given. Name at least one.")
    if here() is not None:
        raise RunError("Runs that go on side by side cannot start others that do. Start them one after another.")
    first = places[0].setting
    for place in places:
        stackable_setting(place.setting)
        if not alike(first, place.setting):
            raise SettingError(
                "Only runs of one setting with several seeds go on side by side; these differ in more than the seed."
            )
    seeds = [place.setting.seed for place in places]
    if len(set(seeds)) < len(seeds):
        raise SettingError(f"The seeds {', '.join(map(str, seeds))} are not all different. Name each one once.")
    folders = [place.folder.resolve() for place in places]
    if len(set(folders)) < len(folders):
        raise SettingError("Two seeds have the same folder. Name one for each seed.")


def is_over(place: Place) -> bool:
    """Return whether the folder holds this run with all its rounds."""
    if not (place.folder / "record.json").exists():
        return False
    record = read_record(place.folder)
    return record.status == "done" and len(record.rounds) >= place.setting.rounds


def _side_by_side(places: Sequence[Place], works: Sequence[Callable[[], RunRecord]]) -> list[Ended]:
    shared = places[0].setting  # all but the seed
    before_cuda(shared)
    device = resolve_device(shared.device)
    begin_run()
    # All runs have these conditions. The first to end must not take them away from the others.
    with world_of.room_for(len(places)), compute(world_of(shared.model_dump_json())):
        turns = [
            Turn(functools.partial(contextvars.copy_context().run, work), Globals(device), seed=place.setting.seed)
            for place, work in zip(places, works, strict=True)
        ]
        take_turns(turns)
    for turn in turns:
        if turn.error is not None and not isinstance(turn.error, Exception):
            raise turn.error
    return [Ended(turn.result, turn.error if isinstance(turn.error, Exception) else None) for turn in turns]


def _ended(work: Callable[[], RunRecord]) -> Ended:
    try:
        return Ended(work())
    except Exception as e:  # noqa: BLE001 (kept, so that the other runs are carried out)
        return Ended(error=e)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
