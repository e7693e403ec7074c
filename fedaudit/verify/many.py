"""Verification of many run folders, several at a time, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from fedaudit import registry
from fedaudit.errors import RunError
from fedaudit.progress import Watch, unwatched
from fedaudit.verify.check import verify
from fedaudit.verify.finding import Checked


def verify_all(
    folders: Sequence[Path], *, jobs: int = 1, trust: bool = False, watch: Watch | None = None, **how: Any
) -> list[Checked]:
    """Check run folders, `jobs` of them at a time, and return what was found about each, in their order.

    `trust` lets code run that is not fedaudit's. `how` is passed on to `verify`.
    """
    tell = watch or unwatched
    if jobs == 1 or len(folders) < 2:
        return [_verified(folder, how, _part_of(tell, i, len(folders), folder)) for i, folder in enumerate(folders)]
    found: dict[int, Checked] = {}
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(min(jobs, len(folders)), context, registry.trust, (trust,)) as pool:
        tell(0, len(folders), "starting")
        # The largest first, so that none is left alone at the end.
        order = sorted(range(len(folders)), key=lambda i: _size(folders[i]), reverse=True)
        waiting = {pool.submit(_verified, folders[i], how): i for i in order}
        try:
            for done in as_completed(waiting):
                i = waiting[done]
                found[i] = done.result()
                tell(len(found), len(folders), folders[i].name)
        except BrokenProcessPool:
            raise RunError(
                "A process that checked a run was killed, probably because memory ran out. Lower --jobs."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
    return [found[i] for i in range(len(folders))]


def _verified(folder: Path, how: Mapping[str, Any], watch: Watch | None = None) -> Checked:
    return verify(folder, watch=watch, **how)


def _part_of(watch: Watch, number: int, whole: int, folder: Path) -> Watch:
    """Return a watch of one folder that tells how far all of them are."""

    def tell(done: float, of: float, what: str) -> None:
        watch(number + min(done / (of or 1), 1.0), whole, f"{folder.name}: {what}")

    return tell


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "transcript").glob("*") if path.is_file())
