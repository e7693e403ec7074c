"""Bounds of settings: the last value that is taken, and the first that is not."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from pydantic import Field, ValidationError

from fedaudit.errors import SettingError
from fedaudit.setting import (
    DEEPEST,
    LARGEST,
    LONGEST,
    MANY,
    Frozen,
    Setting,
    nested,
    out_of_bounds,
    parse_compression,
    parse_pairs,
    parse_value,
    read_json,
    read_values,
    shown,
    validated,
)

JUST_UNDER_1, JUST_OVER_1 = math.nextafter(1.0, 0.0), math.nextafter(1.0, 2.0)
JUST_OVER_0 = math.nextafter(0.0, 1.0)
# A setting, its least and its largest value, and what lies just outside.
WHOLE = {
    "image_size": (4, 4096), "clients": (1, 1_000_000), "minimum": (2, 1_000_000_000), "canaries": (0, 1_000_000),
    "rounds": (0, 1_000_000), "seed": (0, 2**63 - 1), "threads": (1, 1024), "together": (1, 1_000_000),
    "workers": (1, 4096), "eval_every": (1, 1_000_000), "keep_weights": (0, 1_000_000),
}  # fmt: skip
SHARES = {  # may it be 0, may it be 1
    "holdout": (True, False), "validation": (True, False), "aux": (True, False), "public": (True, False),
    "participation": (False, True), "dropout": (True, False), "threshold": (False, True), "quorum": (False, True),
    "gpu_fraction": (True, True),
}  # fmt: skip


def taken(name, value):
    try:
        return getattr(Setting.make(**{name: value}), name) == value
    except SettingError:
        return False


@pytest.mark.parametrize(("name", "least", "most"), [(name, *bounds) for name, bounds in WHOLE.items()])
def test_whole_numbers(name, least, most):
    assert [taken(name, value) for value in (least - 1, least, most, most + 1)] == [False, True, True, False]


@pytest.mark.parametrize(("name", "zero", "one"), [(name, *ends) for name, ends in SHARES.items()])
def test_shares(name, zero, one):
    tried = (-JUST_OVER_0, 0.0, JUST_OVER_0, JUST_UNDER_1, 1.0, JUST_OVER_1, math.nan)
    assert [taken(name, value) for value in tried] == [False, zero, True, True, one, False, False]


def test_the_bound_of_an_update():
    tried = (0.0, JUST_OVER_0, 1e9, math.nextafter(1e9, 2e9))
    assert [taken("update_bound", value) for value in tried] == [False, True, True, False]


def test_labels():
    tried = ("", "a", "a" * 60, "a" * 61, "two\nlines", "two\rlines")
    assert [taken("label", value) for value in tried] == [False, True, True, False, False, False]


def test_every_number_of_a_setting_has_its_bounds_here():
    kinds = {name: get_args(field.annotation) or (field.annotation,) for name, field in Setting.model_fields.items()}
    assert {name for name, of in kinds.items() if {int, float} & {*of}} == {*WHOLE, *SHARES, "update_bound"}


def test_the_usual_values():
    """As the guide states them: who changes one of them changes everybody's results."""
    usual = Setting.make()
    assert (usual.method, usual.dataset, usual.model, usual.partition) == ("fedavg", "digits", "cnn", "dirichlet:0.5")
    assert (usual.clients, usual.rounds, usual.minimum, usual.seed) == (5, 10, 10, 0)
    assert (usual.holdout, usual.validation, usual.aux, usual.public, usual.canaries) == (0.25, 0.1, 0.1, 0.0, 0)
    assert (usual.participation, usual.dropout, usual.quorum, usual.threshold) == (1.0, 0.0, 0.5, 0.6)
    assert (usual.update_bound, usual.threads, usual.together, usual.gpu_fraction) == (8.0, 1, 32, 0.0)
    assert (usual.eval_every, usual.eval_clients, usual.keep_weights, usual.flops) == (1, True, 10, False)
    assert (usual.deterministic, usual.channels_last, usual.isolate, usual.twins) == (True, False, False, "auto")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (2**63 - 1, None), (2**63, "64 bits"), (-(2**63), None), (-(2**63) - 1, "64 bits"),
        (1.5, None), (math.inf, "not finite"), (-math.inf, "not finite"), (math.nan, "not finite"),
        ("a" * LONGEST, None), ("a" * (LONGEST + 1), f"a text of {LONGEST + 1} characters"),
        ("a\0", "a NUL"), ("\ud800", "not valid Unicode"), ("ü", None), (None, None),
        ([1, [2.0, math.nan]], "not finite"), ((1, "\0"), "a NUL"), ({"a": {"b": 2**63}}, "64 bits"),
        ({"\0": 1}, "a NUL"), ([1, ["a"], {"b": [2]}], None),
    ],
)  # fmt: skip
def test_values_that_no_setting_holds(value, why):
    found = out_of_bounds(value)
    assert found is None if why is None else why in found


def test_tables_may_be_nested_so_deep():
    def deep(levels):
        value = []
        for _ in range(levels - 1):
            value = [value]
        return value

    assert out_of_bounds(deep(DEEPEST)) is None
    assert "more than 32 deep" in out_of_bounds(deep(DEEPEST + 1))
    assert "more than 32 deep" in out_of_bounds({"a": deep(DEEPEST)})
    assert (DEEPEST, LONGEST, MANY, LARGEST) == (32, 4096, 1_000_000, 1e9)


def test_numbers_of_a_policy():
    def policy(value):
        return taken("privacy", {"logits": {"epsilon": value}})

    tried = (1e9, -1e9, math.nextafter(1e9, 2e9), -math.nextafter(1e9, 2e9))
    assert [policy(value) for value in tried] == [True, True, False, False]


def test_a_value_in_an_error_is_about_a_line():
    assert shown("a" * 198) == repr("a" * 198)
    assert shown("a" * 199) == repr("a" * 199)[:200] + "..."
    assert shown(10**5000) == "what was given"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("topk:0.1", ("topk", 0.1)), ("topk:0.0001", ("topk", 0.0001)), ("topk:0.00009", None), ("topk:1", None),
        ("topk", None), ("topk:", None), ("int8", ("int8", None)), ("int8:", None), ("int8:2", None),
        ("svd:0.95", ("svd", 0.95)), ("svd:0", None), ("svd:1e-9", ("svd", 1e-9)), ("svd:1", None), ("svd:nan", None),
        ("zip", None), ("zip:0.1", None),
    ],
)  # fmt: skip
def test_compressions(text, found):
    if found is not None:
        assert parse_compression(text) == found
        assert taken("compress", text)
        return
    with pytest.raises(ValueError, match=r"choose from|is a number from"):
        parse_compression(text)
    assert not taken("compress", text)


def test_options_that_change_rounding():
    assert Setting.make(step="recorded").rounding() == {}
    assert Setting.make(step="eager", precision="float32").rounding() == {}
    assert Setting.make(step="compiled", precision="tf32", channels_last=True).rounding() == {
        "precision": "tf32", "channels_last": True, "step": "compiled",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "kept"), [("all", "all"), (3, "3"), ("12", "12"), (True, None), (-1, None), (1.5, None)]
)
def test_numbers_of_twins(value, kept):
    if kept is None:
        with pytest.raises(SettingError, match="choose from auto, all, off"):
            Setting.make(twins=value)
    else:
        assert Setting.make(twins=value).twins == kept


def test_values_are_read_as_toml_or_as_text():
    assert [parse_value(text) for text in ("3", "0.5", "true", "[1, 2]", "digits", '"3"')] == [
        3, 0.5, True, [1, 2], "digits", "3",
    ]  # fmt: skip
    with pytest.raises(SettingError, match="not finite"):
        parse_value("inf")


def test_files_of_settings(tmp_path):
    (tmp_path / "a.json").write_text('{"rounds": 3}')
    (tmp_path / "a.toml").write_text("rounds = 4")
    (tmp_path / "list.json").write_text("[1]")
    assert read_values(tmp_path / "a.json") == {"rounds": 3}
    assert read_values(tmp_path / "a.toml") == {"rounds": 4}
    with pytest.raises(SettingError, match="does not hold a table"):
        read_json(tmp_path / "list.json")
    with pytest.raises(SettingError, match="is a folder"):
        read_values(tmp_path)


def test_a_setting_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Setting.make().seed = 3


def test_wrong_keys_and_wrong_values_are_told_together():
    class Small(Frozen):
        rounds: int = Field(3, ge=1)
        seed: int = 0

    assert validated(Small, {"seed": 4}, "key of the file") == Small(rounds=3, seed=4)
    with pytest.raises(SettingError) as told:
        validated(Small, {"rounds": 0, "sead": 1}, "key of the file")
    assert str(told.value).splitlines() == [
        "key of the file rounds = 0: input should be greater than or equal to 1.",
        "Unknown key of the file 'sead'. Did you mean 'seed'? There is: rounds, seed.",
    ]


def test_pairs_of_the_command_line():
    assert parse_pairs([" E = 5 ", "name=a=b", "empty="]) == {"E": 5, "name": "a=b", "empty": ""}
    for pair in ("E", "=5", " =5"):
        with pytest.raises(SettingError, match=r"write NAME=VALUE"):
            parse_pairs([pair])


def test_parts_of_a_method_have_settings_of_their_own():
    pairs = {"host.E": 1, "host.inner.B": 2, "eta": 0.1, "host": {"eta": 3, "E": 4}, "host.B": 5}
    assert nested(pairs) == {"host": {"E": 4, "inner": {"B": 2}, "eta": 3, "B": 5}, "eta": 0.1}
    assert nested({"a": 1, "b": {"c": 2}}) == {"a": 1, "b": {"c": 2}}
    assert nested({"a": {"b": 1}, "c": 2}) == {"a": {"b": 1}, "c": 2}
    with pytest.raises(SettingError, match=r"--set E\.B=\.\.\.: E was set to 5 before"):
        nested({"E": 5, "E.B": 1})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "a = [", "is not valid TOML"), ("a.json", "{", "is not valid JSON"),
        ("a.toml", "a = inf", "inf is not finite"), ("a.json", '{"a": 1e999}', "inf is not finite"),
        ("missing.toml", None, "There is no file"), ("missing.json", None, "There is no file"),
    ],
)  # fmt: skip
def test_files_that_hold_no_settings(name, text, said, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SettingError, match=said):
        read_values(tmp_path / name)
