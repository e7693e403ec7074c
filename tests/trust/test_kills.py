"""Kills, a full disk and a folder that cannot be written, with the real commands: nothing lost, equal to the bit.

`tests/suite/test_kill.py` does the same to audits in forks, quickly. Here every process is a command of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from suite_tools import comparable

from fedaudit.wire.transcript import Transcript

KILLS, PARTS = 20, 4  # in parts, which may run beside each other
RUN = ["--method", "fedavg", "--set", "E=1", "--model", "mlp", "--clients", "2", "--rounds", "12"]
SUITE = """
attacks = ["loss"]
[base]
clients = 2
rounds = 6
model = "mlp"
[grid]
seed = [0, 1]
[[methods]]
method = "fedavg"
set = { E = 1 }
[[methods]]
method = "fedproto"
"""


def command(*words: object, **how) -> subprocess.Popen:
    """A command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "fedaudit", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **how,
    )


def ended(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=280)
    return process.returncode, out + err


def run_in(out: Path, **how) -> subprocess.Popen:
    return command("run", *RUN, "--out", out, "--resume", **how)


def audit_in(out: Path, **how) -> subprocess.Popen:
    suite = out.with_suffix(".toml")
    suite.write_text(SUITE)
    return command("audit", suite, "--out", out, "--jobs", 2, **how)


def bits(folder: Path) -> dict[str, object]:
    """All of a run that must come out the same: its record without clocks, its messages, its models, to the byte."""
    models = {p.name: hashlib.blake2b(p.read_bytes()).hexdigest() for p in sorted((folder / "models").iterdir())}
    rows = [{k: v for k, v in row.items() if k != "at"} for row in Transcript(folder / "transcript").rows()]
    return {"record": comparable(folder), "models": models, "messages": rows}


def all_bits(out: Path) -> dict[str, dict[str, object]]:
    return {path.parent.name: bits(path.parent) for path in sorted(out.glob("runs/*/record.json"))}


def began(process: subprocess.Popen, sign: Path) -> bool:
    """Wait until a command has begun to write; whether it has not ended before."""
    while process.poll() is None and not sign.exists():
        time.sleep(0.001)
    return process.poll() is None


def timed(start, out: Path, sign: str) -> float:
    """How long a command takes from its first file on."""
    process = start(out)
    assert began(process, out / sign)
    since = time.monotonic()
    code, said = ended(process)
    assert code == 0, said
    return time.monotonic() - since


def shot(start, out: Path, sign: str, delay: float, everybody: bool) -> bool:
    """Whether a command was killed after so many seconds; else it ended well before."""
    fresh = not (out / sign).exists()
    process = start(out)
    if fresh:
        began(process, out / sign)
    else:  # it imports torch before it goes on: the lock is what it takes first
        _until_locked(process, out)
    time.sleep(delay)
    hit = process.poll() is None
    if hit:
        (os.killpg if everybody else os.kill)(process.pid, signal.SIGKILL)
    said = process.communicate()
    assert hit or process.returncode == 0, said
    return hit


def _until_locked(process: subprocess.Popen, out: Path) -> None:
    """Wait until a command holds the lock of its folder."""
    while process.poll() is None:
        with open(out / ".lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return
        time.sleep(0.002)


def kills(start, sign: str, out: Path, seconds: float, part: int, same) -> None:
    """Kill again and again until a folder is through, then begin the next; all of them come out as if undisturbed."""
    rng = random.Random(f"{sign} {part}")
    hits, number = 0, 0
    while hits < KILLS // PARTS:
        folder = out / str(number)
        if shot(start, folder, sign, rng.uniform(0, seconds / 2), everybody=hits % 2 == 1):
            hits += 1
        else:
            same(folder)
            number += 1
    code, said = ended(start(out / str(number)))
    assert code == 0, said
    same(out / str(number))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "whole"
    return timed(run_in, out, "setting.json"), bits(out)


@pytest.fixture(scope="module")
def whole_audit(tmp_path_factory):
    out = tmp_path_factory.mktemp("audit") / "whole"
    seconds = timed(audit_in, out, ".fedaudit")
    found = all_bits(out)
    assert len(found) == 4
    return seconds, found


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_20_kills_of_a_run(whole_run, tmp_path, part):
    seconds, expected = whole_run

    def same(folder):
        assert bits(folder) == expected

    kills(run_in, "setting.json", tmp_path, seconds, part, same)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_20_kills_of_an_audit_with_two_jobs(whole_audit, tmp_path, part):
    seconds, expected = whole_audit

    def same(folder):
        assert all_bits(folder) == expected

    kills(audit_in, ".fedaudit", tmp_path, seconds, part, same)


def children(pid: int) -> list[int]:
    """The processes below a process, the deepest last."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_costs_its_cell_and_no_other(whole_audit, tmp_path):
    _, expected = whole_audit
    out = tmp_path / "out"
    process = audit_in(out)
    while not (written := list(out.glob("runs/*/record.json"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    victim = children(process.pid)[-1]
    os.kill(victim, signal.SIGKILL)
    code, said = ended(process)
    assert code == 1, said
    assert "its process ended with signal 9" in said
    cells = json.loads((out / "audit.json").read_text())["cells"]
    assert sorted(cell["status"] for cell in cells) == ["done", "done", "done", "failed"]
    assert written
    code, said = ended(audit_in(out))
    assert code == 0, said
    assert all_bits(out) == expected


def limited(size: int):
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 3_000, 20_000, 38_900, 100_000])
def test_no_room_for_a_file_of_a_run(whole_run, tmp_path, size):
    """Every file may grow to so many bytes: the setting, the record, a state, the transcript do not fit, in turn."""
    out = tmp_path / "run"
    code, said = ended(run_in(out, preexec_fn=limited(size)))
    assert code == 2, said
    assert "Traceback" not in said
    assert "File too large" in said
    code, said = ended(run_in(out))
    assert code == 0, said
    assert bits(out) == whole_run[1]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3_000, 60_000])
def test_no_room_for_a_file_of_an_audit(whole_audit, tmp_path, size):
    out = tmp_path / "audit"
    code, said = ended(audit_in(out, preexec_fn=limited(size)))
    assert code in (1, 2), said
    assert "Traceback" not in said
    code, said = ended(audit_in(out))
    assert code == 0, said
    assert all_bits(out) == whole_audit[1]


@pytest.mark.slow
@pytest.mark.parametrize("kib", [8, 64, 400, 1000, 1400])
def test_a_full_disk(whole_run, tmp_path, kib):
    """A disk of so many KiB, in a name space of its own; what it holds is then gone on with where there is room."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    inside = f"mount -t tmpfs -o size={kib}k none {disk} && " + " ".join(
        [sys.executable, "-m", "fedaudit", "run", *RUN, "--out", str(disk / "run"), "--resume"]
    )
    script = f"{inside}; code=$?; mkdir {kept}; cp -a {disk}/run {kept}/; exit $code"
    done = apart(script)
    assert done.returncode == 2, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    code, said = ended(run_in(kept / "run"))
    assert code == 0, said
    assert bits(kept / "run") == whole_run[1]


def apart(script: str) -> subprocess.CompletedProcess:
    """A shell in a name space of its own, where disks may be mounted."""
    if subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode:
        pytest.skip("no name spaces for an ordinary user here")
    return subprocess.run(["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(whole_run, tmp_path):
    out = tmp_path / "run"
    shot(run_in, out, "setting.json", whole_run[0] / 3, everybody=True)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in out.rglob("*") if p.is_file()}
    words = " ".join([sys.executable, "-m", "fedaudit", "run", *RUN, "--out", str(out), "--resume"])
    done = apart(f"mount --bind {out} {out} && mount -o remount,ro,bind {out} && {words}")
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in out.rglob("*") if p.is_file()} == before
    code, said = ended(run_in(out))
    assert code == 0, said
    assert bits(out) == whole_run[1]
