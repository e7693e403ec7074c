"""Mutated blobs, run folders, TOML and data files: whatever they hold, nothing but our errors comes of reading them.

    python tests/helpers/tools/fuzz.py --number 1000000 --seed 0 [--kind blob|folder|toml|data]
        [--folders 0.01] [--part 3/10]

With `--part`, that part of the campaign: several processes share it. Each case follows from its kind, the seed and its
number, so that one that failed is made again by naming these; those that once failed are kept in
tests/trust/seeds.json and tried first.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KINDS = ("blob", "folder", "toml", "data")
SEEDS = Path(__file__).parents[2] / "trust" / "seeds.json"
WORDS = [b"1e999", b"-1", b"null", b"[]", b"{}", b"\"\"", b"NaN", b"Infinity", b"9" * 30, b"true", b"[" * 2000, b"0.5",
         b"1" * 5000, b"\0", b"\xff\xfe", b"\xc2\xb2", b"../../x", b"evil:X", b"=", b"'", b"100000000000"]  # fmt: skip
TOML = b"""
method = "fedavg"
rounds = 2
clients = 3
seed = 7
partition = "dirichlet:0.5"
model = "cnn"
participation = 0.5
[set]
E = 1
eta = 0.1
[privacy.training]
epsilon = 1.0
clip = 1.0
"""
MORE = b"""
method = "fedavg+dfrd"
dataset = "hf:imdb?x=text&y=label&length=64"
public_dataset = "npz:mine.npz"
image_size = 32
model = "cnn:2, mlp/64, transformer"
server_model = "mine:Net#width=8"
compress = "topk:0.1"
minimum = 20
dropout = 0.1
quorum = 0.4
precision = "tf32"
step = "recorded"
engine = "stacked"
together = 4
[start]
method = "local"
rounds = 1
[privacy.embeddings]
noise = 1.0
sensitivity = "clip:1"
calibration = "total"
delta = 1e-5
"""
SUITE = b"""
attacks = ["loss", { attack = "lira" }]
threats = ["server", "peer:1"]
trials = 10
[base]
rounds = 1
[grid]
seed = [0, 1]
[[methods]]
method = "fedavg"
[[budgets]]
max = "1 MiB"
per = "round"
"""


VALUES = [None, True, -1, 0, 1e999, float("nan"), 0.5, 10**30, "", "x", "../../x", "evil:X", "\ud800", [], {}, [[]],
          {"": 0}, [None] * 3]  # fmt: skip


def mutated(data: bytes, rng: random.Random) -> bytes:
    """One to four edits: bits, bytes, words put in or over, pieces cut, doubled or swapped; JSON values replaced."""
    if data[:1] == b"{" and rng.random() < 0.5:
        return _other_tree(data, rng)
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(8):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                out[at:at] = rng.choice(WORDS)
            case 3:
                word = rng.choice(WORDS)
                out[at : at + len(word)] = word
            case 4:
                del out[at : at + rng.randint(1, 64)]
            case 5:
                out = out[:at]
            case 6:
                out[at:at] = out[at : at + rng.randint(1, 200)]
            case _:
                _replace_number(out, rng)
    return bytes(out)


def _replace_number(out: bytearray, rng: random.Random) -> None:
    """Something else where a number stood: the edit that gets furthest into a reader."""
    digits = [i for i in range(len(out)) if 48 <= out[i] <= 57]
    if digits:
        begin = end = rng.choice(digits)
        while end < len(out) and 48 <= out[end] <= 57:
            end += 1
        out[begin:end] = rng.choice(WORDS)


def _other_tree(data: bytes, rng: random.Random) -> bytes:
    """JSON that is still JSON: somewhere in the tree a value is another, gone, doubled, or stands elsewhere."""
    lines = data.split(b"\n") if b"\n{" in data else [data]  # rows, or one tree
    number = rng.randrange(len(lines))
    try:
        tree = json.loads(lines[number])
    except ValueError:
        return data[: rng.randrange(len(data))]
    places = list(_places(tree))
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(places)
        other = rng.choice(places)
        try:
            match rng.randrange(4):
                case 0:
                    del holder[key]
                case 1:
                    holder[key] = json.loads(json.dumps(other[0][other[1]]))
                case _:
                    holder[key] = rng.choice(VALUES)
        except (KeyError, IndexError, ValueError, RecursionError):  # an earlier edit took it away
            continue
    lines[number] = json.dumps(tree).encode()
    return b"\n".join(lines)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _pictures(scratch: Path) -> list[Path]:
    """Arrays, packed and not, and a folder of pictures."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (24, 8, 8), dtype=np.uint8), np.arange(24) % 3
    np.savez(scratch / "plain.npz", x=x, y=y, domain=np.array(["a", "b"] * 12))
    np.savez_compressed(scratch / "packed.npz", x=x / np.float32(255), y=y, test_x=x[:6], test_y=y[:6])
    for k in range(12):
        place = scratch / "pictures" / ("train", "test")[k % 2] / f"class {k % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[k]).save(place / f"{k}.{('png', 'jpg', 'bmp')[k % 3]}")
    return [*sorted(scratch.glob("*.npz")), *sorted((scratch / "pictures").rglob("*.*"))]


class Fuzz:
    def __init__(self, scratch: Path):
        import torch

        from fedaudit import run
        from fedaudit.wire.codec import encode_tree
        from fedaudit.wire.message import State

        self.scratch = scratch
        state = State({"w": torch.ones(3, 2), "n": torch.tensor(5)}, buffers=["n"])
        value = {"a": state, "b": [1, 0.5, "x", None, (True,)], 3: torch.zeros(0, 4), "c": torch.ones(2).half()}
        self.blobs = [encode_tree(value), encode_tree([torch.arange(4)] * 2), encode_tree({"m": {"d": {}}})]
        self.kept = scratch / "kept"
        run(method="fedavg", rounds=1, clients=2, out=self.kept)
        self.whole = shutil.copytree(self.kept, scratch / "whole")
        self.budget = scratch / "budget.toml"
        self.budget.write_text('[[budgets]]\nmax = "1 MiB"\nper = "round"\n')
        self.files = [p for p in sorted(self.kept.rglob("*")) if p.is_file() and p.name not in (".lock", ".fedaudit")]
        self.pictures = _pictures(scratch)
        self.tries: dict[str, Callable[[random.Random], None]] = {
            "blob": self.blob, "folder": self.folder, "toml": self.toml, "data": self.data,
        }  # fmt: skip

    def case(self, kind: str, seed: int, number: int) -> str | None:
        """What came of a case that is not one of our errors; None: all is well."""
        from fedaudit.errors import FedauditError

        try:
            self.tries[kind](random.Random(f"{kind} {seed} {number}"))
        except FedauditError:
            return None
        except Exception as e:  # noqa: BLE001 (that is what is looked for)
            return f"{type(e).__name__}: {str(e)[:200]}"
        return None

    def blob(self, rng: random.Random) -> None:
        from fedaudit.wire.codec import decode_tree, read_header

        blob = mutated(rng.choice(self.blobs), rng)
        read_header(blob)
        decode_tree(blob, plain=True)

    def toml(self, rng: random.Random) -> None:
        from fedaudit.setting import Setting, read_toml
        from fedaudit.suite.suite_file import read_suite
        from fedaudit.wire import compression

        path = self.scratch / "file.toml"
        if rng.random() < 0.7:
            path.write_bytes(mutated(rng.choice([TOML, MORE]), rng))
            found = Setting.make(**read_toml(path))
            if found.compress is not None:
                compression.stage_of(found.compress)
        else:
            path.write_bytes(mutated(SUITE, rng))
            read_suite(path)

    def data(self, rng: random.Random) -> None:
        """Somebody's own arrays or pictures, one file of which is damaged."""
        from fedaudit.data import load
        from fedaudit.data.datasets import _load

        path = rng.choice(self.pictures)
        before = path.read_bytes()
        try:
            path.write_bytes(mutated(before, rng))
            _load.cache_clear()
            load(f"npz:{path}" if path.suffix == ".npz" else f"folder:{self.scratch / 'pictures'}")
        finally:
            path.write_bytes(before)

    def folder(self, rng: random.Random) -> None:
        """One file of a run folder is mutated, and everything that reads a folder reads it."""
        from fedaudit.cli.listing import summary, traffic_table
        from fedaudit.errors import FedauditError
        from fedaudit.reports.compare import compare
        from fedaudit.reports.report import write_report
        from fedaudit.runtime.checkpoint import Store
        from fedaudit.runtime.folder import RunFolder, claim
        from fedaudit.runtime.run_record import read_record, reading
        from fedaudit.suite.budgets import check_runs
        from fedaudit.wire.transcript import Transcript

        def within(read: Callable[[], object]) -> None:
            with reading(self.kept):
                read()

        path = rng.choice(self.files)
        before = path.read_bytes()
        try:
            path.write_bytes(mutated(before, rng))
            for read in (
                lambda: claim(self.kept, "run"),
                lambda: within(lambda: summary(read_record(self.kept))),
                lambda: traffic_table(RunFolder(self.kept).transcript.view("server"), "field"),
                lambda: [e.record() for e in Transcript(self.kept / "transcript").entries()],
                lambda: Store(self.kept / "checkpoint").peek(),
                lambda: RunFolder(self.kept).client_state(0),
                lambda: within(lambda: check_runs([self.kept], self.budget)),
                lambda: within(lambda: compare(self.kept, self.whole)),
                lambda: write_report(self.kept, ["md", "json", "csv", "latex"], self.scratch / "report"),
            )[: None if rng.random() < 0.2 else 6]:  # reports are slow
                try:
                    read()
                except FedauditError:
                    continue
        finally:
            path.write_bytes(before)


def campaign(
    number: int,
    seed: int,
    kinds: tuple[str, ...] = KINDS,
    share_of_folders: float = 0.01,
    part: tuple[int, int] = (1, 1),
) -> list[list]:
    """The cases that did not end well, as [kind, seed, number, what]. Folders and data are slow, and get a share."""
    scratch = Path(tempfile.mkdtemp(prefix="fuzz-"))
    failed: list[list] = []
    try:
        fuzz = Fuzz(scratch)
        kept = [tuple(case) for case in json.loads(SEEDS.read_text())] if SEEDS.exists() else []
        slow = {"folder", "data"}
        shares = {kind: share_of_folders if kind in slow else (1 - 2 * share_of_folders) / 2 for kind in kinds}
        whole, (mine, parts) = sum(shares.values()), part
        new = ((kind, seed, i) for kind in kinds for i in range(mine - 1, round(number * shares[kind] / whole), parts))
        for kind, of_seed, i in [*(c for c in kept if c[0] in kinds), *new]:
            if (what := fuzz.case(kind, of_seed, i)) is not None:
                failed.append([kind, of_seed, i, what])
                print(*failed[-1], flush=True)
    finally:
        shutil.rmtree(scratch)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=1_000_000, help="cases of the whole campaign")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--folders", type=float, default=0.01, help="the share of run folders, which are slow")
    parser.add_argument("--part", default="1/1", help="which part of it, such as 3/10")
    given = parser.parse_args()
    begun = time.perf_counter()
    mine, parts = map(int, given.part.split("/"))
    failed = campaign(given.number, given.seed, tuple(given.kind or KINDS), given.folders, (mine, parts))
    what = f"{given.number} cases" + (f", part {given.part}" if parts > 1 else "")
    print(f"{what}, seed {given.seed}: {len(failed)} failed, {time.perf_counter() - begun:.0f} s")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
