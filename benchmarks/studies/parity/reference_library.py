"""Runs the client and server classes of a checkout of PFLlib or HtFLlib, unchanged, on records that are given.

Nothing of the libraries is copied: their modules are imported from the checkout. Replaced are what they read from disk
(records, models, items that clients and server exchange as files), the architecture, and every random order or draw, so
that a run of fedaudit can share its own with them. A deviation of a library from a paper is mended only where a case of
`parity.py` says so, by a name that the library's module looks up (`mend`).
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import random
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

# What the libraries' own command lines set, as far as their constructors ask for it.
ARGUMENTS: dict[str, Any] = {
    "device": "cpu", "dataset": "given", "algorithm": "parity", "goal": "parity", "num_clients": 3, "join_ratio": 1.0,
    "random_join_ratio": False, "few_shot": 0, "time_select": False, "time_threthold": 1e9, "top_cnt": 100,
    "auto_break": False, "save_folder_name": "temp", "save_folder_name_full": "items", "eval_gap": 1, "dlg_gap": 100,
    "global_rounds": 3, "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False,
    "batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0, "learning_rate_decay": False,
    "learning_rate_decay_gamma": 0.99, "models_folder_name": "", "localize_feature_extractor": False,
}  # fmt: skip


class Split(nn.Module):
    """A network of fedaudit under the names that the libraries use: a base and a head."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.base, self.head = net.encoder, net.classifier

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a split network's tensors under fedaudit's names."""
    names = {"base.": "encoder.", "head.": "classifier."}
    state = model.state_dict()
    return {names[name[:5]] + name[5:] if name[:5] in names else name: t for name, t in state.items()}


class Instead:
    """A module or object of which some names mean something else."""

    def __init__(self, of: Any, **others: Any) -> None:
        self._of, self._others = of, others

    def __getattr__(self, name: str) -> Any:
        return self._others[name] if name in self._others else getattr(self._of, name)


@dataclass
class Given:
    """What a run of fedaudit hands to the library: records, batches, draws, first weights. `t` is the round."""

    rows: Mapping[int, tuple[Tensor, Tensor]]
    batches: Callable[[int, int], Iterator[Tensor]]  # client, round: index batches, one epoch after the other
    model: Callable[[int, bool], nn.Module]  # client, whether the shared one: a network with its first weights
    shuffled: Callable[[int, int], Iterator[Tensor]] | None = None  # round, rows on the server: index batches
    t: int = 1
    epochs: dict[tuple[int, int], Any] = field(default_factory=dict)


class Loader:
    """A client's records in the run's batches. Each pass over it is the next epoch."""

    def __init__(self, epochs: Callable[[], Sequence[Tensor]], rows: Sequence[Tensor]) -> None:
        self._epochs, self._rows, self._first = epochs, rows, list(epochs())
        self._passes = 0

    def __len__(self) -> int:
        return len(self._first)

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        for b in self._first if self._passes == 1 else self._epochs():
            yield tuple(row[b] for row in self._rows)


class Collated:
    """A list of samples on the server, in the run's batches. Each pass over it is the next epoch."""

    def __init__(self, samples: Sequence[Any], epochs: Callable[[int], Sequence[Tensor]]) -> None:
        self._samples, self._epochs = samples, epochs

    def __iter__(self) -> Iterator[Any]:
        for b in self._epochs(len(self._samples)):
            yield default_collate([self._samples[i] for i in b.tolist()])


class Items:
    """What HtFLlib's parties write to files and read again: copies, as files are."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str], Any] = {}
        self.shared: set[tuple[str, str]] = set()  # handed out themselves: what is done to them stays

    def save(self, item: Any, role: str, name: str, path: Any = None) -> None:
        if name in ("protos", "logits"):
            item = type(item)(list, sorted(item.items()))  # by class, whatever came first in the batches
        self.kept[role, name] = copy.deepcopy(item)

    def load(self, role: str, name: str, path: Any = None) -> Any:
        found = self.kept.get((role, name))
        return found if (role, name) in self.shared else copy.deepcopy(found)


class Library:
    """A checkout's classes, ready to be constructed."""

    def __init__(self, checkout: Path, given: Given) -> None:
        self.root = checkout / "system" if (checkout / "system").is_dir() else checkout
        if not (self.root / "flcore" / "clients").is_dir():
            raise SystemExit(f"{checkout} is not a checkout of PFLlib or HtFLlib: it has no system/flcore/clients.")
        self.given, self.items = given, Items()
        self.modules: dict[str, types.ModuleType] = {}

    @contextlib.contextmanager
    def imported(self, *names: str) -> Iterator[Library]:
        """Within: the named modules of `flcore`, in double precision, without their prints."""
        before = {name: m for name, m in sys.modules.items() if name.split(".")[0] in ("flcore", "utils", "h5py")}
        for name in before:
            del sys.modules[name]
        sys.modules |= self._stubs()
        sys.path.insert(0, str(self.root))
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        quiet = contextlib.redirect_stdout(io.StringIO())
        try:
            with quiet:
                for name in names:
                    self.modules[name.rpartition(".")[2]] = importlib.import_module(f"flcore.{name}")
                self._replace()
                yield self
        finally:
            torch.set_default_dtype(dtype)
            sys.path.remove(str(self.root))
            for name in [name for name in sys.modules if name.split(".")[0] in ("flcore", "utils", "h5py")]:
                del sys.modules[name]
            sys.modules |= before

    def _stubs(self) -> dict[str, types.ModuleType]:
        """Return what the libraries import beside torch, where it reads files or knows architectures."""

        def module(name: str, **content: Any) -> types.ModuleType:
            made = types.ModuleType(name)
            vars(made).update(content)
            return made

        def read_client_data(dataset: str, k: int, is_train: bool = True, few_shot: int = 0) -> list[Any]:
            return list(zip(*self.given.rows[k], strict=True))

        def split(args: Any, cid: int = 0, feature_dim: Any = None, is_global: bool = False) -> nn.Module:
            return self.given.model(cid, is_global)

        utils = module("utils", __path__=[])
        return {
            "h5py": module("h5py"),
            "utils": utils,
            "utils.data_utils": module("utils.data_utils", read_client_data=read_client_data),
            "utils.dlg": module("utils.dlg", DLG=None),
            "flcore.trainmodel.models": module("flcore.trainmodel.models", BaseHeadSplit=split),
        }

    def _replace(self) -> None:
        everything = [m for name, m in sys.modules.items() if name.startswith("flcore.") and m is not None]
        in_order = Instead(random, sample=lambda found, k: list(found)[:k])
        for module in everything:
            for name, instead in (("load_item", self.items.load), ("save_item", self.items.save)):
                if hasattr(module, name):
                    setattr(module, name, instead)
            if hasattr(module, "random"):
                module.random = in_order  # type: ignore[attr-defined]
            if module.__name__.startswith("flcore.servers.") and hasattr(module, "DataLoader"):
                module.DataLoader = self._server_loader  # type: ignore[attr-defined]
        base = sys.modules["flcore.clients.clientbase"]
        given = self.given

        def load_train_data(client: Any, batch_size: int | None = None) -> Loader:
            drawn = given.batches(client.id, given.t)
            return Loader(lambda: next(drawn), given.rows[client.id])  # type: ignore[arg-type,return-value]

        base.Client.load_train_data = load_train_data

    def _server_loader(self, samples: Sequence[Any], *options: Any, **more: Any) -> Collated:
        given = self.given
        assert given.shuffled is not None, "this server shuffles: give its batches"
        key = (given.t, len(samples))
        if key not in given.epochs:
            given.epochs[key] = given.shuffled(*key)
        return Collated(samples, lambda n: next(given.epochs[key]))  # type: ignore[arg-type,return-value]

    def mend(self, module: str, **names: Any) -> None:
        """Let names mean something else within one of the library's modules."""
        vars(self.modules[module]).update(names)

    def server(self, module: str, name: str, **arguments: Any) -> Any:
        """Return the library's server with its clients, by its own constructor."""
        args = Namespace(**{**ARGUMENTS, "num_clients": len(self.given.rows), **arguments})
        made = getattr(self.modules[module], name)(args, 0)
        made.selected_clients = list(made.clients)
        return made
