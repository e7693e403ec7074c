"""The worker process, which carries out cells one at a time: it reads a line of JSON and answers in lines of JSON.

A line may also name several cells that differ in the seed alone. Their runs then go on side by side.

It has everything imported, because it is forked from a process that has (`forker.py`), and forks for each cell. So a
cell starts at once, its peak memory is its own, and whatever kills it (memory, a crash in a user's extension) kills
nothing else. The process from which twins are forked is itself a fork of this one, once for all cells: it never holds
a cell's records. When the audit ends, its end of the pipe closes, and the cell stops at that instant. The next audit
goes on from the last whole round.

Where processes cannot be forked, this module is run for each cell, and imports everything itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedaudit.errors import RunError
from fedaudit.runtime import nursery

if TYPE_CHECKING:
    from fedaudit.progress import Watch
    from fedaudit.suite.cell import Cell

# Modules that optimisers, scores, baselines and pictures would otherwise import on first use.
USUAL = (
    "torch._dynamo", "scipy.stats", "sklearn.ensemble", "matplotlib.backends.backend_agg", "matplotlib.figure",
    "PIL.PngImagePlugin",
)  # fmt: skip
BEAR_A_FORK = {"jemalloc_bg_thd"}  # names of threads that survive a fork
FORK = sys.platform == "linux"  # elsewhere forking is not safe with all libraries, so a process serves one cell


def main(preload: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the audit decides, and closes the pipe
    replies = os.dup(1)
    os.dup2(2, 1)  # what a method prints goes to the log, not among the replies
    with _ending_with(0):  # if the audit is killed meanwhile, the next one need not wait for these imports
        fork = prepare(preload)
    serve(0, replies, fork)
    os._exit(0)  # unloading all modules would take seconds, and the next audit would have to wait


def prepare(preload: list[str]) -> bool:
    """Import all that a cell may need. Return True if this process can still be forked.

    A user's method may compute while it is imported. torch then has threads, and a fork would wait for them for ever.
    """
    gc.disable()  # what is imported stays: to look through it again and again takes a second
    try:
        return _prepare(preload)
    finally:
        gc.freeze()  # nor does any fork look through it, which would copy the pages that they share
        gc.enable()


def _prepare(preload: list[str]) -> bool:
    importlib.import_module("fedaudit.suite.cell")
    importlib.import_module("fedaudit.runtime.isolated_worker")
    before = _threads()
    for name in (*USUAL, *preload):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    from fedaudit.registry import names

    names("methods"), names("attacks")
    _read_code()
    return FORK and _threads() == before


def _read_code() -> None:
    """Read the code whose digest every cell's record and results hold: each fork would take a second for it."""
    from fedaudit.registry import find, names
    from fedaudit.runtime.code_digest import harness, source_of

    harness()
    for name in names("attacks"):
        source_of(find(name, "attacks"))


def _threads() -> int:
    """Return the number of this process's threads, without those of memory allocators that start again after a fork.

    pyarrow has such a thread, and comes along with scikit-learn if it is installed. These threads are not a reason to
    import everything for each cell."""
    if not FORK:
        return 0
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return len([name for name in names if name not in BEAR_A_FORK])


def serve(requests: int, replies: int, fork: bool = True) -> None:
    """Answer requests until the other side closes the pipe. Without `fork`, answer one request."""
    with open(requests, "rb", buffering=0, closefd=False) as pipe:
        while line := pipe.readline():
            if not fork:
                _work(json.loads(line), requests, replies)
                return
            _start_nursery(json.loads(line))
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    nursery.take_over()
                    _work(json.loads(line), requests, replies)
                    code = 0
                except BaseException:  # noqa: BLE001 (the fork ends here in any case; the log has the traceback)
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(BrokenPipeError):  # the audit is gone; so is its end of the other pipe
                _say(replies, {"over": os.waitstatus_to_exitcode(status)})
    nursery.end()


def _start_nursery(request: dict[str, Any]) -> None:
    """Fork the process from which twins are forked, if a cell has any. It serves all later cells, too."""
    settings = [cell["setting"] for cell in request["cells"]]
    if any(nursery.is_needed(setting["privacy"], setting["twins"]) for setting in settings):
        from fedaudit.runtime.isolated_worker import nurse

        with contextlib.suppress(RunError, OSError):  # without it, a cell starts one of its own
            nursery.nursery_of_twins(nurse).wait()  # only this process can hear that it is ready


def _work(request: dict[str, Any], requests: int, replies: int) -> None:
    from fedaudit.attack import shared_results
    from fedaudit.suite.cell import carry_out, carry_out_together

    shared_results.share(Path(request["shared"]) if request.get("shared") else None)
    threading.Thread(target=_stop_with, args=(requests,), daemon=True).start()
    cells = [_cell(of_cell) for of_cell in request["cells"]]
    last: dict[int, tuple[float, str]] = {}

    def watching(i: int) -> Watch:
        def watch(t: float, rounds: float, what: str) -> None:
            if (t, what) != last.get(i):
                last[i] = (t, what)
                _say(replies, {"cell": i, "t": t, "rounds": rounds, "what": what})

        return watch

    if len(cells) == 1:
        carry_out(cells[0], watching(0))
        _say(replies, _end(0, cells[0]))
        return
    for i, cell in enumerate(carry_out_together(cells, [watching(i) for i in range(len(cells))])):
        _say(replies, _end(i, cell))


def _end(i: int, cell: Cell) -> dict[str, Any]:
    return {"cell": i, "status": cell.status, "reason": cell.reason, "crowded": cell.crowded}


def _cell(request: dict[str, Any]) -> Cell:
    from fedaudit.setting import Setting
    from fedaudit.suite.cell import Cell

    setting = Setting.make(**request["setting"])
    cell = Cell(Path(request["folder"]), setting, request["attacks"], request["threats"], request["trials"])
    cell.keep_stale, cell.trust = request["keep_stale"], request["trust"]
    return cell


@contextlib.contextmanager
def _ending_with(requests: int) -> Iterator[None]:
    """End this process if the other side closes the pipe during the block. Unread data stays in the pipe."""
    over = threading.Event()

    def look() -> None:
        pipe = select.poll()
        pipe.register(requests, 0)  # report its end only
        while not over.is_set():
            if pipe.poll(100):
                os._exit(1)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()  # the thread must be gone before a fork


def _stop_with(requests: int) -> None:
    """End this process when the pipe closes. Nothing is sent while a cell runs, so a read returns at the end only."""
    os.read(requests, 1)
    os._exit(1)


def _say(replies: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


if __name__ == "__main__":
    main(sys.argv[1:])
