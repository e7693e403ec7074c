"""Runs the study of docs/results/sums.md, attacks its runs, and keeps the figures that the page needs.

python benchmarks/studies/sums/run.py OUT --jobs 8             # the three suites, 60 runs
python benchmarks/studies/sums/run.py OUT --suites digits      # one of them
python benchmarks/studies/sums/run.py OUT --tiny               # one seed and two rounds: does it work here?
python benchmarks/studies/sums/run.py --data .data/sums   # writes fashion.npz, where Fashion-MNIST's files are

The suites name no attacks: all clients of all runs would be attacked. Here the first clients of each run are attacked,
as many as CLIENTS says. OUT/figures has one JSON file for each suite, which `table.py --take OUT/figures` keeps.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from fedaudit.attack.attack_run import attack_run
from fedaudit.runtime.run_record import read_record

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from table import figures  # noqa: E402

SUITES = ("digits", "fashion_100", "fashion_1000")
THREATS = ("server", "peer:0", "outsider")
CLIENTS = {100: 40, 1000: 60}  # of so many clients, the number that is attacked by `loss`
ASKED = 100  # clients of 1,000 whose participation is guessed: about one in eight is never asked
SOURCE = Path("/usr/share/datasets/fashion-mnist")
RECORDS, TESTED = 12_000, 2_000


def write_data(folder: Path) -> None:
    """Write the first images of Fashion-MNIST, from its idx files, as arrays."""

    def numbers(name: str, skip: int) -> np.ndarray:
        return np.frombuffer(gzip.decompress((SOURCE / name).read_bytes()), np.uint8)[skip:]

    folder.mkdir(parents=True, exist_ok=True)
    x, test_x = (numbers(f"{of}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28) for of in ("train", "t10k"))
    y, test_y = (numbers(f"{of}-labels-idx1-ubyte.gz", 8).astype(np.int64) for of in ("train", "t10k"))
    np.savez_compressed(
        folder / "fashion.npz",
        x=x[:RECORDS], y=y[:RECORDS], test_x=test_x[:TESTED], test_y=test_y[:TESTED],
    )  # fmt: skip


def attacked(folder: Path) -> float:
    """Attack one run, and return how long it took."""
    begun = time.perf_counter()
    clients = read_record(folder).setting.clients
    some = list(range(CLIENTS[clients]))
    for threat in THREATS:
        attack_run(folder, attacks=["loss"], threat=threat, clients=some)
    if clients == 1000:
        attack_run(folder, attacks=["participation"], threat="outsider", clients=list(range(ASKED)))
    return time.perf_counter() - begun


def carry_out(suite: str, out: Path, jobs: int, tiny: bool) -> None:
    """Run a suite, attack its runs, and write their figures."""
    path = HERE / f"{suite}.toml"
    if tiny:
        text = path.read_text().replace("seed = [0, 1, 2]", "seed = [0]").replace("rounds = 20", "rounds = 2")
        path = out / f"{suite}.toml"
        path.write_text(text.replace("eval_every = 20", "eval_every = 2"))
    runs = out / suite
    command = [sys.executable, "-m", "fedaudit", "audit", str(path), "--out", str(runs), "--jobs", str(jobs)]
    begun = time.perf_counter()
    subprocess.run(command, check=False)  # a cell that is refused does not stop the others
    ran = time.perf_counter() - begun
    folders = [p.parent for p in sorted(runs.glob("**/record.json")) if read_record(p.parent).status == "done"]
    with ProcessPoolExecutor(jobs) as pool:
        spent = list(pool.map(attacked, folders))
    cells = sum(1 for _ in tomllib.loads(path.read_text())["methods"]) * (1 if tiny else 3)
    kept = [figures(read_record(folder)) for folder in folders]
    (out / "figures").mkdir(exist_ok=True)
    (out / "figures" / f"{suite}.json").write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{suite}: {len(folders)} of {cells} runs in {ran:.0f} s, attacks {sum(spent):.0f} s of one core", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--suites", nargs="*", default=SUITES)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--data", type=Path)
    given = parser.parse_args()
    if given.data:
        write_data(given.data)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        for suite in given.suites:
            carry_out(suite, given.out, given.jobs, given.tiny)
