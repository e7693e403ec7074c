"""Several runs on one GPU: a service is started for them, ended after them, and said; here with a stand-in for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedaudit.cuda_streams import CONNECTIONS
from fedaudit.setting import Setting
from fedaudit.suite import gpu_sharing
from fedaudit.suite.cell import Cell
from fedaudit.suite.forecast import Forecast, total
from fedaudit.suite.gpu_sharing import CONTROL, SHARED, at_once, connections, shared_gpu

GPU, CPU = Setting.make(device="cuda"), Setting.make(device="cpu")


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with a GPU and a control program that keeps what it was told."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    program, said = tmp_path / CONTROL, tmp_path / "said"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> {said}\n'
        f"else read word; echo $word $CUDA_MPS_PIPE_DIRECTORY >> {said}; fi\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return said


def test_it_is_there_while_the_runs_are(control: Path) -> None:
    with shared_gpu([CPU, GPU], 3) as what:
        assert what == "the GPU is shared by 3 processes through an MPS server"
        folder = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(folder).is_dir()
    assert control.read_text().splitlines() == [f"start {folder}", f"quit {folder}"]
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not Path(folder).exists()


@pytest.mark.parametrize(("jobs", "asked", "expected"), [(2, "8", "8"), (16, "8", "6"), (200, "8", "1"), (16, "1", "1"),
                                                       (2, "32", "32")])  # fmt: skip
def test_processes_divide_the_connections(jobs: int, asked: str, expected: str, control: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Of 96: as many as a process has alone, for twelve of them. What somebody has asked for stays."""
    monkeypatch.setenv(CONNECTIONS, asked)
    with shared_gpu([GPU], jobs):
        assert os.environ[CONNECTIONS] == expected
    assert os.environ[CONNECTIONS] == asked
    monkeypatch.delenv(CONNECTIONS)
    with shared_gpu([GPU], jobs):
        assert CONNECTIONS not in os.environ
    assert CONNECTIONS not in os.environ
    assert [connections(n) for n in (1, 12, 13, 48, 96, 97)] == [8, 8, 7, 2, 1, 1]


def test_it_ends_with_a_failure_too(control: Path) -> None:
    with pytest.raises(ZeroDivisionError), shared_gpu([GPU], 2):
        raise ZeroDivisionError
    assert control.read_text().splitlines()[-1].startswith("quit")


@pytest.mark.parametrize(("settings", "jobs"), [([CPU, CPU], 4), ([GPU, GPU], 1)])
def test_nothing_is_started_without_need(settings: list[Setting], jobs: int, control: Path) -> None:
    with shared_gpu(settings, jobs) as what:
        assert what is None
    assert not control.exists()


def test_where_it_cannot_be_they_take_turns_and_it_is_said(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = control.parent / CONTROL
    program.write_text("#!/bin/sh\necho Cannot find MPS control daemon process >&2\nexit 1\n")
    with shared_gpu([GPU], 2) as what:
        assert what is not None
        assert "take turns" in what
        assert "Cannot find MPS" in what
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    monkeypatch.setattr(gpu_sharing, "CONTROL", "no-such-program")
    with shared_gpu([GPU], 2) as what:
        assert what == "the processes take turns on the GPU: there is no no-such-program"


def test_one_that_is_there_is_used(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    with shared_gpu([GPU], 2) as what:
        assert what is not None
        assert "already there" in what
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "/somewhere"
    assert not control.exists()


def test_a_forecast_knows_how_much_a_gpu_can_be_shared(control: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes on processors are as many times as fast; on a GPU as was measured with the service, or not at all."""
    assert at_once([CPU], 8) == 8
    assert at_once([CPU, GPU], 8) == SHARED
    assert at_once([GPU], 2) == 2
    assert at_once([GPU], 1) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    assert at_once([GPU], 8) == 1
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somewhere")
    assert at_once([GPU], 8) == SHARED
    four = [Forecast(Cell(Path(str(i)), GPU, [], []), "to do", 0, 600.0) for i in range(4)]
    assert "about 13 min with 4 at a time" in total(four, 4)  # 40 minutes of work, three at once
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    assert "about 40 min with 4 at a time" in total(four, 4)
