"""Errors of the device, of memory and of the compiler: a run ends with what is kept and how to go on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fedaudit.runtime.lockstep
from fedaudit import run
from fedaudit.errors import DeviceError, RunError
from fedaudit.runtime.device_errors import crowding, explained, trouble_of
from fedaudit.runtime.isolated_worker import error_as_text, error_of
from fedaudit.setting import Setting
from fedaudit.training import cuda_graphs

SETTING: dict[str, Any] = {"method": "device_fails:Fails", "clients": 3, "model": "mlp", "aux": 0.7, "rounds": 3}


class CompilerError(RuntimeError):
    __module__ = "torch._dynamo.exc"


@pytest.mark.parametrize(
    ("e", "trouble"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "memory"),
        (MemoryError(), "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "memory"),
        (RuntimeError("CUDA error: invalid argument"), "device"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "device"),
        (CompilerError("RuntimeError when making fake tensor call"), "compiler"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("CUDA error"), None),
    ],
)
def test_which_trouble_it_is(e: Exception, trouble: str | None) -> None:
    assert trouble_of(e) == trouble


@pytest.mark.parametrize("kind", ["device", "memory"])
@pytest.mark.parametrize("where", ["client", "server"])
@pytest.mark.parametrize(
    "more", [{}, pytest.param({"engine": "stacked"}, marks=pytest.mark.long)], ids=["serial", "stacked"]
)
def test_a_run_says_what_failed_and_goes_on(kind: str, where: str, more: dict[str, Any], tmp_path: Path) -> None:
    mended, out = tmp_path / "mended", tmp_path / "a"
    setting = {**SETTING, **more, "set": {"kind": kind, "where": where, "until": str(mended)}}
    with pytest.raises(RunError) as said:
        run(**setting, out=out)
    text = str(said.value)
    who = "client 1" if where == "client" else "server"
    first = {"memory": "CUDA out of memory. Tried to allocate 2.00 GiB", "device": "CUDA error: invalid argument"}
    assert text.startswith(f"Round 2, {who}: ")
    assert f"({first[kind]})" in text
    assert f"Rounds 1 to 1 are kept in {out}" in text
    option = "--step eager" if kind == "device" else "--together 1" if more else ""
    assert f"`fedaudit run --out {out} --resume {option}".rstrip() + "`" in text
    assert "Traceback" not in text
    assert "Traceback" in (out / "errors.log").read_text()
    mended.touch()
    step = {"step": "eager"} if kind == "device" else {}
    gone_on = run(**{**setting, **step}, out=out, resume=True)
    assert [r.round for r in gone_on.rounds] == [1, 2, 3]
    assert not any(r.absent for r in gone_on.rounds)
    assert gone_on.transcript_digest == run(**setting, out=tmp_path / "whole").transcript_digest


@pytest.mark.long
def test_in_a_process_of_its_own_it_is_told_alike(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"Round 2, client 1: the device failed under .*CUDA error: invalid argument"):
        run(**{**SETTING, "rounds": 2}, set={"until": str(tmp_path / "no")}, isolate=True, out=tmp_path / "a")


def test_a_clients_own_error_leaves_it_out(tmp_path: Path) -> None:
    record = run(**SETTING, set={"kind": "own", "until": str(tmp_path / "no")}, out=tmp_path / "a")
    assert [[a.client for a in r.absent] for r in record.rounds] == [[], [1], []]


def test_what_was_lacking_is_recognised_behind_the_error_that_explains_it(tmp_path: Path) -> None:
    """By the error itself, and by whatever it was raised from."""
    setting = Setting.make(method="fedavg")
    for trouble, lacked in (("memory", "memory"), ("device", "device"), ("compiler", None)):
        explaining = explained(DeviceError(trouble, "server", "said"), 1, tmp_path, setting)
        assert crowding(explaining) is None
        explaining.__cause__ = DeviceError(trouble, "server", "said")
        assert crowding(explaining) == lacked
    assert crowding(torch.OutOfMemoryError("CUDA out of memory")) == "memory"
    assert crowding(RuntimeError("CUDA error: unspecified launch failure")) == "device"
    assert crowding(RuntimeError("CUDA error: device-side assert triggered")) is None, "its own code did that"
    both = RuntimeError("CUDA error: unspecified launch failure")
    both.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    assert crowding(both) == "memory", "fewer beside it are the remedy"
    circle = ValueError("of itself")
    circle.__cause__ = circle
    assert crowding(circle) is None


def test_before_the_first_round_nothing_is_said_to_be_kept() -> None:
    e = DeviceError("compiler", "server", "no kernel")
    text = str(explained(e, 1, Path("runs/a b"), Setting.make(step="compiled", device="cpu")))
    assert "No round was finished yet in runs/a b" in text
    assert "fedaudit run --out 'runs/a b' --resume --step eager" in text


def test_it_travels_between_processes() -> None:
    e = DeviceError("memory", "client 3", "CUDA out of memory")
    for back in (pickle.loads(pickle.dumps(e)), error_of(error_as_text(e))):  # noqa: S301 (our own)
        assert (type(back), back.trouble, back.who, back.said, str(back)) == (
            DeviceError, "memory", "client 3", "CUDA out of memory", str(e),
        )  # fmt: skip
    assert type(error_of(["DeviceError", "too few"])) is RunError


def test_a_stack_that_is_too_large_is_halved_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight models run out of memory, four do not; the second round begins with four."""
    real, tried = fedaudit.runtime.lockstep.fit_together, []

    def small(jobs: Any, **more: Any) -> Any:
        tried.append(len(jobs))
        if len(jobs) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(jobs, **more)

    monkeypatch.setattr(fedaudit.runtime.lockstep, "fit_together", small)
    monkeypatch.setattr(fedaudit.runtime.lockstep, "_fitted", {})
    setting: dict[str, Any] = {"method": "fedavg", "clients": 8, "model": "mlp", "aux": 0.3, "rounds": 2}
    said: list[str] = []
    record = run(**setting, engine="stacked", out=tmp_path / "a", watch=lambda done, whole, what: said.append(what))
    assert tried == [8, 4, 4, 4, 4]
    note = "not stacked: client_update: 8 models at once ran out of memory: trained 4 at a time"
    assert record.notes == [note]
    assert f"note: {note}" in said
    assert said.index(f"note: {note}") < said.index("round 2"), "at once, not at the end"
    serial = run(**setting, engine="serial", out=tmp_path / "b")
    assert record.result.last.test_score() == pytest.approx(serial.result.last.test_score(), abs=0.01)


def test_a_slower_way_is_said_at_once() -> None:
    said: list[str] = []
    cuda_graphs.unrecorded.clear()
    with cuda_graphs.listening(said.append):
        cuda_graphs.fall_back("a reason")
        cuda_graphs.fall_back("a reason")
    cuda_graphs.fall_back("another")
    assert said == ["a reason"]
    assert list(cuda_graphs.unrecorded) == ["a reason", "another"]
    cuda_graphs.unrecorded.clear()
