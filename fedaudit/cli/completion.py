"""Words for shell completion: methods, attacks, data sets, models and presets, without importing torch.

`fedaudit --install-completion` sets it up. Methods, attacks and presets are read from their files. The names of data
sets and models stand here, because the modules that define them import torch; a test holds them against those modules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedaudit.cli.method_list import listed, of_other_packages, on_hosts
from fedaudit.registry import Group

DATASETS = (
    "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "tinyimagenet", "folder:", "npz:", "hf:",
)  # fmt: skip
MODELS = (
    "cnn", "cnn_bn", "mlp", "convnet", "convnet_padded", "conv4", "conv4_pooled", "fedfree_cnn", "vit_tiny", "resnet18",
    "resnet34", "resnet50", "resnet101", "resnet152", "resnet18_cifar", "resnet34_cifar", "resnet50_cifar",
    "resnet101_cifar", "resnet152_cifar", "googlenet", "efficientnet_v2_s", "mobilenet_v2", "mobilenet_v3_small",
    "mobilenet_v3_large", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0", "transformer", "HtFE-1", "HtFE-2", "HtFE-5",
    "HtFE-10", "fedfree-8", "digits-3",
)  # fmt: skip
PARTITIONS = ("iid", "dirichlet:0.5", "dirichlet:0.1", "shards:2")
THREATS = ("server", "outsider", "peer:0", "active-server")


def methods(incomplete: str) -> list[str]:
    """Return the methods that begin so. Those on hosts, as fedavg+dfrd, come once a plus is typed."""
    names = [*(one.name for one in listed("methods")), *of_other_packages("methods")]
    if "+" in incomplete:
        names += [f"{host}+{name}" for name, hosts in on_hosts("methods").items() for host in hosts]
    return _begin(names, incomplete)


def attacks(incomplete: str) -> list[str]:
    return _begin([*(one.name for one in listed("attacks")), *of_other_packages("attacks")], incomplete)


def datasets(incomplete: str) -> list[str]:
    return _begin(DATASETS, incomplete)


def models(incomplete: str) -> list[str]:
    return _begin(MODELS, incomplete)


def partitions(incomplete: str) -> list[str]:
    return _begin(PARTITIONS, incomplete)


def threats(incomplete: str) -> list[str]:
    return _begin(THREATS, incomplete)


def presets(ctx: Any, incomplete: str) -> list[str]:
    """Return the presets of the method that the command line names, or of all methods if it names none."""
    known = presets_of_all()
    method = (ctx.params or {}).get("method")
    names = known.get(method, ()) if method else sorted({name for of in known.values() for name in of})
    return _begin(names, incomplete)


def presets_of_all() -> dict[str, tuple[str, ...]]:
    """Return the names of each method's presets, from the files of the methods."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(_folder("methods").glob("*/*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and (name := _registered_as(node)) is not None:
                found[name] = _keys_of_presets(node)
    return found


def named(group: str, incomplete: str) -> list[str]:
    """Return the names of one list of `fedaudit list` that begin so."""
    lists = {"methods": methods, "attacks": attacks, "datasets": datasets, "models": models, "partitions": partitions}
    return lists[group](incomplete) if group in lists else []


def list_names(ctx: Any, incomplete: str) -> list[str]:
    return named(str((ctx.params or {}).get("what", "")), incomplete)


def _folder(group: Group) -> Path:
    return Path(__file__).parents[1] / group


def _registered_as(cls: ast.ClassDef) -> str | None:
    for call in cls.decorator_list:
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "register":
            first = call.args[0]
            return str(first.value) if isinstance(first, ast.Constant) else None
    return None


def _keys_of_presets(cls: ast.ClassDef) -> tuple[str, ...]:
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if node.target.id == "presets" and isinstance(node.value, ast.Dict):
            return tuple(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return ()


def _begin(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
