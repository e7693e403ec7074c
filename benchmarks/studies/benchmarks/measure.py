"""Rounds of every method of two trees of this repository, in turns: a release against the last.

    git archive TAG | tar -x -C ../last-release                 # the last release's tree
    python benchmarks/studies/benchmarks/measure.py ../last-release . --names 0.1.0 0.2.0

leaves a file NAME.json for each tree beside this one: for each method the seconds of its rounds, turn by turn. A
process for each tree carries out a few rounds of a method whenever it is its turn, so that both suffer alike from
whatever else the machine does. Only `fedaudit.run` is used, which both trees have. `page.py` makes the table and the
picture.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TURNS, ROUNDS = 3, 5  # of each turn's rounds the first warms up, and the last is evaluated: neither is timed
COMMON: dict[str, Any] = {"clients": 2, "public": 0.1, "aux": 0.6, "eval_clients": False, "device": "cpu"}


def clock() -> float:
    """Seconds, without those in which this thread waited for other processes to leave it a core."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return time.perf_counter() - int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return time.perf_counter()


def rounds_of(method: str) -> list[float]:
    """Return the seconds of the rounds of one quick run, without its first and its last."""
    import fedaudit
    from fedaudit import registry

    begun: dict[int, float] = {}
    took: list[float] = []

    def watch(done: int, total: int, text: str) -> None:
        words = text.split()
        if len(words) == 2 and words[0] == "round" and 1 < int(words[1]) < total:
            t = int(words[1])
            if done == t - 1:
                begun[t] = clock()
            elif t in begun:
                took.append(clock() - begun.pop(t))

    folder = Path(tempfile.mkdtemp())
    try:
        fedaudit.run(
            method=method, set=dict(registry.find(method).quick), rounds=ROUNDS, eval_every=ROUNDS, watch=watch,
            out=folder / "run", **COMMON,
        )  # fmt: skip
    finally:
        shutil.rmtree(folder)
    return took


def serve() -> None:
    """Answer each line, a method's name, with the seconds of its rounds; an empty line with all names."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a run prints is not an answer
    for line in sys.stdin:
        if name := line.strip():
            answer: Any = rounds_of(name)
        else:
            import fedaudit
            from fedaudit import registry

            names = [name for name in registry.names("methods") if "+" not in name]
            answer = {"version": fedaudit.__version__, "methods": names}
        said.write(json.dumps(answer) + "\n")
        said.flush()


class Tree:
    """The process of one tree."""

    def __init__(self, folder: Path):
        env = {**os.environ, "PYTHONPATH": str(folder.resolve()), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], env=env, cwd=tempfile.gettempdir(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.known = self.ask("")

    def ask(self, line: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"The process of {self.process.args} ended at {line!r}; its error stands above.")
        return json.loads(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time rounds of every method of two trees, in turns.")
    parser.add_argument("trees", nargs="*", type=Path, metavar="LAST THIS")
    parser.add_argument("--names", nargs=2, default=None, help="of the two releases; default: their versions")
    parser.add_argument("--out", type=Path, default=HERE, help="where NAME.json is left")
    parser.add_argument("--only", nargs="*", default=None, help="methods; default: all")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    if len(given.trees) != 2:
        parser.error("name two trees: the last release's and this one's")
    trees = [Tree(folder) for folder in given.trees]
    names = given.names or [tree.known["version"] for tree in trees]
    if names[0] == names[1]:
        parser.error(f"both trees are of version {names[0]}: give --names")
    methods = sorted({name for tree in trees for name in tree.known["methods"]})
    methods = [name for name in methods if given.only is None or name in given.only]
    found: list[dict[str, list[list[float]]]] = [{}, {}]
    for number, method in enumerate(methods, 1):
        print(f"{number}/{len(methods)} {method}", file=sys.stderr, flush=True)
        for turn in range(TURNS):
            for i in (0, 1) if turn % 2 == 0 else (1, 0):
                if method in trees[i].known["methods"]:
                    found[i].setdefault(method, []).append([round(s, 5) for s in trees[i].ask(method)])
        for name, seconds in zip(names, found, strict=True):  # after each method: a stop loses nothing
            keep(given.out / f"{name}.json", name, seconds)


def keep(path: Path, release: str, seconds: dict[str, list[list[float]]]) -> None:
    """Write what was measured of one release."""
    kept = {
        "release": release, "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1), "setting": COMMON, "seconds": seconds,
    }  # fmt: skip
    path.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
