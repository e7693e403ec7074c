"""How an attack tells its progress."""

from __future__ import annotations

from fedaudit.attack import attack_run
from fedaudit.attack.attack_run import _within


def told(title, times, monkeypatch):
    """Report steps 0, 1, ... of 10 at these times, and return what was told of part 2 of 5."""
    found, clock = [], iter(times)
    now = [0.0]
    monkeypatch.setattr(attack_run.time, "monotonic", lambda: now[0])
    tell = _within(lambda *said: found.append(said), 2, 5, title)
    for i, at in enumerate(clock):
        now[0] = at
        tell(i, 10, f"step {i}")
    return found


def test_without_a_title_every_step_is_told(monkeypatch):
    assert told("", [100.0, 100.0, 100.0], monkeypatch) == [
        (2.0, 5, "step 0"),
        (2.1, 5, "step 1"),
        (2.2, 5, "step 2"),
    ]


def test_with_a_title_steps_are_told_ten_times_a_second(monkeypatch):
    found = told("loss, ", [100.0, 100.05, 100.1, 100.15, 100.3], monkeypatch)
    assert [said for *_, said in found] == ["loss, step 0", "loss, step 2", "loss, step 4"]


def test_the_first_step_is_told_at_once(monkeypatch):
    assert len(told("loss, ", [0.0], monkeypatch)) == 1


def test_more_than_all_is_all(monkeypatch):
    found = []
    tell = _within(lambda *said: found.append(said), 0, 2)
    tell(15, 10, "")
    tell(0, 0, "")
    assert [done for done, *_ in found] == [1, 0]
