"""Where an error came from, and names that are nearly right."""

from __future__ import annotations

import difflib
import json

import pytest

from fedaudit.errors import DeviceError, did_you_mean, last_frame, place_of, unknown


def raised(libraries_last):
    """An error of the standard library, or one that seems to come from an installed package."""
    try:
        if libraries_last:
            exec(compile("def inner():\n    raise ValueError\ninner()", "/x/site-packages/y/z.py", "exec"), {})
        json.loads("{")
    except ValueError as e:
        return e


def test_the_last_frame_is_the_librarys_unless_it_is_left_out():
    error = raised(libraries_last=True)
    assert last_frame(error).filename == "/x/site-packages/y/z.py"
    assert last_frame(error).name == "inner"
    assert last_frame(error, libraries=False).name == "raised"
    assert place_of(error) == " (inner, z.py:2)"


def test_an_error_without_frames_is_from_nowhere():
    assert last_frame(ValueError()) is None
    assert last_frame(ValueError(), libraries=False) is None
    assert place_of(ValueError()) == ""
    other = raised(libraries_last=False)
    assert last_frame(other) == last_frame(other, libraries=False)


def test_where_all_frames_are_a_librarys_the_last_of_them_is_told():
    error = raised(libraries_last=True)
    error.__traceback__ = error.__traceback__.tb_next  # without this file's own frame
    assert last_frame(error, libraries=False).name == "inner"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("fedvag", " Did you mean 'fedavg'? There is: fedavg, local."), ("x", " There is: fedavg, local.")],
)
def test_the_nearest_name_is_proposed(name, hint):
    assert did_you_mean(name, ["local", "fedavg"]) == hint
    assert unknown("method", name, ["local", "fedavg"]) == f"Unknown method {name!r}.{hint}"


def test_nothing_to_choose_from_is_said():
    assert did_you_mean("x", []) == " There is: nothing."


def test_a_device_error_survives_its_way_back():
    cls, words = DeviceError("memory", "client 3", "out of memory").__reduce__()  # as pickle does
    back = cls(*words)
    assert (back.trouble, back.who, back.said, str(back)) == (
        "memory", "client 3", "out of memory", "client 3: out of memory.",
    )  # fmt: skip


def test_one_name_is_proposed_where_several_are_near():
    """From half of the letters alike on: `ab` and `ax` share one of two, as do no letters of `cd`."""
    assert did_you_mean("fedavg", ["fedavgm", "fedavh", "zz"]).startswith(" Did you mean 'fedavgm'? There is: fedavgm")
    assert did_you_mean("ab", ["ax"]) == " Did you mean 'ax'? There is: ax."
    assert did_you_mean("abc", ["axy"]) == " There is: axy."


def test_the_first_look_for_near_names_asks_for_one(monkeypatch):
    asked = []
    monkeypatch.setattr(difflib, "get_close_matches", lambda *given, **how: asked.append((*given, how)) or [])
    did_you_mean("x", ["b", "a"])
    assert asked == [("x", ["a", "b"], {"n": 1, "cutoff": 0.5})]
