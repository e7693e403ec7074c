"""The import of torchvision where its wheel does not fit torch, with both stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedaudit import _torchvision
from fedaudit.errors import SettingError


@pytest.fixture
def wheel(monkeypatch):
    """The import fails until both operators are declared. `said` is the error until then."""
    made = SimpleNamespace(said="operator torchvision::nms does not exist", defined=[], libraries=[], needs=2)

    def library(name, kind):
        made.libraries.append((name, kind))
        return SimpleNamespace(define=made.defined.append)

    def imported(name):
        if len(made.defined) < made.needs:
            raise RuntimeError(made.said)
        return f"the module {name}"

    monkeypatch.setattr(_torchvision, "_declared", [])
    monkeypatch.setattr(_torchvision.torch.library, "Library", library)
    monkeypatch.setattr(_torchvision.importlib, "import_module", imported)
    return made


def test_missing_operators_are_declared_once(wheel):
    signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    assert _torchvision.torchvision() == "the module torchvision"
    assert wheel.libraries == [("torchvision", "FRAGMENT")]
    assert wheel.defined == [f"nms{signature}", f"qnms{signature}"]
    assert len(_torchvision._declared) == 1, "operators live as long as their library"
    assert _torchvision.torchvision() == "the module torchvision"
    assert len(wheel.libraries) == 1


@pytest.mark.parametrize("said", ["operator torchvision::nms does not exist", "no such symbol"])
def test_what_declaring_does_not_help_is_told(wheel, said):
    wheel.said, wheel.needs = said, 9
    with pytest.raises(SettingError, match="torchvision cannot be imported"):
        _torchvision.torchvision()
    assert len(wheel.libraries) == ("torchvision::" in said)


def test_a_wheel_that_fits_needs_nothing(wheel):
    wheel.needs = 0
    assert _torchvision.torchvision() == "the module torchvision"
    assert wheel.libraries == []
