"""What is said where setting.json is not the setting of the record."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from fedaudit.setting import Setting
from fedaudit.verify.code import check_copies
from fedaudit.verify.finding import Findings


@pytest.mark.parametrize("gone", [["clients"], ["seed", "privacy"]])
def test_an_entry_that_is_not_there_is_named(gone, tmp_path):
    """Options that came later may be missing; of these entries the first one is told."""
    setting = Setting.make(method="fedavg", clients=3)
    known = {key: value for key, value in setting.model_dump(mode="json").items() if key not in gone}
    (tmp_path / "setting.json").write_text(json.dumps(known))
    case = SimpleNamespace(folder=tmp_path, record=SimpleNamespace(setting=setting), head=None, found=Findings())
    check_copies(case)
    wrong = [one for one in case.found.list if one.verdict == "contradicted"]
    assert [(one.figure, one.field) for one in wrong] == [("setting", gone[0])]
