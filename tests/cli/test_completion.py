"""Shell completion: it knows the names that commands take, and asks nothing that takes seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedaudit.cli import completion
from fedaudit.registry import names


def test_methods_and_attacks_are_those_of_the_registry():
    assert set(completion.methods("")) == {name for name in names("methods") if "+" not in name}
    assert "fedavg+dfrd" in completion.methods("fedavg+")
    assert set(completion.methods("fedavg+")) == {name for name in names("methods") if name.startswith("fedavg+")}
    assert set(completion.attacks("")) == set(names("attacks"))
    assert completion.methods("dff") == ["dffke"]


def test_data_sets_and_models_are_those_of_their_modules():
    from fedaudit.data import datasets
    from fedaudit.training import models

    assert tuple(name.removesuffix("PATH").removesuffix("NAME") for name in datasets.names()) == completion.DATASETS
    assert (*models.names(), *models.GROUPS) == completion.MODELS


def test_presets_are_those_of_the_method():
    from fedaudit.registry import find

    for name, found in completion.presets_of_all().items():
        assert set(found) <= set(find(name).presets), name
    digits = completion.presets(SimpleNamespace(params={"method": "fedavg"}), "")
    assert digits == list(find("fedavg").presets)
    assert set(digits) < set(completion.presets(SimpleNamespace(params={}), ""))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("fedaudit run --method fedz", "fedzge"),
        pytest.param("fedaudit attack --attack rm", "rmia", marks=pytest.mark.long),
        pytest.param("fedaudit run --dataset fash", "fashion-mnist", marks=pytest.mark.long),
        pytest.param("fedaudit run --model resnet18_", "resnet18_cifar", marks=pytest.mark.long),
        pytest.param("fedaudit run --method fedzge --preset au", "authors", marks=pytest.mark.long),
        pytest.param("fedaudit list methods dffk", "dffke", marks=pytest.mark.long),
    ],
)
def test_the_shell_gets_the_name(words, expected):
    """As bash asks for it, in a process of its own, which has to do without torch."""
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['fedaudit'];"
        "from fedaudit.cli.main import _command; _command()(prog_name='fedaudit')"
    )
    asked = {
        "_FEDAUDIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1),
        "_TYPER_COMPLETE_ARGS": words,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert expected in done.stdout.split(), done.stderr[-500:]
