"""The one place that imports torchvision.

PyPI's torchvision wheel is built against torch with CUDA. Next to a CPU-only torch its C++ extension does not load,
which it tolerates. But it then registers shape rules for two operators of that extension, and the import fails with
"operator torchvision::nms does not exist". Nobody here runs these operators, so declaring their signatures is enough.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from fedaudit.errors import SettingError

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
_declared: list[torch.library.Library] = []  # an operator lives as long as the library object that defined it


def torchvision() -> ModuleType:
    """Return the torchvision module. It is imported on the first call, because that takes seconds."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error) or _declared:
            raise SettingError(
                f"torchvision cannot be imported ({error}). Install the torchvision release that belongs to "
                f"torch {torch.__version__}, from the same package index as torch."
            ) from error
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        library.define(operator + _SIGNATURE)
    _declared.append(library)
    return torchvision()
