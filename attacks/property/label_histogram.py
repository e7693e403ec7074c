"""The share of each label among a client's records, from the most telling release that the view shows.

The releases are tried in this order, and the result says which one was read: `label_counts`; `labels`, one per record;
`weights` (or `gradients`), by what training changed in the last layer; `layers`, by a bias with one number per class,
which training moves up for classes that a client has many records of; `classes`, the mere fact that something was
released for a class; `outputs`, the mean of shared predictions, which lean towards the classes that a client has many
records of (Shi et al., arXiv 2502.08001).

From weights: an update is a sum of records' gradients, which differ by class. Auxiliary records give the mean gradient
of each class in the last layer, as the mean of before and after training. The shares are the non-negative combination
of these that comes closest to the update. Rounds that the transcript kept are averaged, weighted by the size of the
update, because records that are learned no longer move the model. "Before" is the model that the client got, else its
upload of an earlier round. If neither is seen, the mean prediction on auxiliary records is taken, which leans towards
the classes that were trained on. If a class has no auxiliary record, the rows of the update are taken: the row of a
class that was trained on moves up.

Shares from counts under noise, and from several updates, are drawn towards equal shares as far as they are noise. For a
client whose classes are nearly equal, the plain shares would be worse than no knowledge at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedaudit.attack.claims import Histogram
from fedaudit.attack.scene import Attack, Scene
from fedaudit.attacks.shared._view import in_chunks, received, uploaded
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.registry import register_attack
from fedaudit.training.models import Net
from fedaudit.wire.message import State
from fedaudit.wire.release import UNPROTECTED

SOURCES = ("label_counts", "labels", "weights", "layers", "classes", "outputs")
SHARPNESS = 8.0  # of the softmax that makes shares of a bias: a bias moves by tenths where shares differ by a factor


@register_attack("label_histogram")
class LabelHistogram(Attack):
    def cannot(self, scene: Scene) -> str | None:
        if self._best(scene) is None:
            return f"the {scene.view.threat} sees nothing of client {scene.target} that this could read labels from"
        return None

    def run(self, scene: Scene) -> Histogram:
        best = self._best(scene)
        assert best is not None  # cannot() has looked
        return best

    def _best(self, scene: Scene) -> Histogram | None:
        for source in SOURCES:
            counts = getattr(self, f"_{source}")(scene)
            if counts is not None:
                counts = counts.double().cpu().clamp(min=0)
                total = float(counts.sum())
                shares = counts / total if total > 0 else torch.full_like(counts, 1 / len(counts))
                return Histogram(shares, source)
        return None

    def _label_counts(self, scene: Scene) -> Tensor | None:
        found = [(entry[name], entry.fields[name].protection) for entry, name in scene.released("label_counts")]
        right = [(n.double(), p) for n, p in found if isinstance(n, Tensor) and n.shape == (scene.classes,)]
        if not right:
            return None
        sigma = max((p.sigma or 0.0) if p else 0.0 for _, p in right)
        return shrunk(torch.stack([n for n, _ in right]), sigma)  # the mean: noise, if there was any, averages out

    def _labels(self, scene: Scene) -> Tensor | None:
        found = [(entry[name], entry.fields[name].protection) for entry, name in scene.released("labels")]
        right = [(y, p) for y, p in found if isinstance(y, Tensor) and not y.is_floating_point() and len(y)]
        if not right:
            return None
        rows = torch.cat([y.flatten() for y, _ in right])
        counts = torch.bincount(rows, minlength=scene.classes)[: scene.classes]
        protection = right[0][1] or UNPROTECTED
        return mechanism_of(protection).label_counts(counts, protection)

    def _weights(self, scene: Scene) -> Tensor | None:
        uploads = uploaded(scene, scene.target)
        found: list[tuple[Tensor, float]] = []
        before: Net | None = None
        for t in sorted(uploads):
            entry, model = uploads[t]
            start = received(scene, entry) or before
            before = model
            if start is not None and (of_round := from_update(scene, start, model)) is not None:
                found.append(of_round)
        if total := sum(size for _, size in found):
            by_round = torch.stack([shares for shares, _ in found])
            mean = torch.stack([shares * size for shares, size in found]).sum(0) / total
            return mean.mean() + shrinkage(by_round) * (mean - mean.mean())
        x, _ = scene.auxiliary
        return in_chunks(before, x).softmax(1).mean(0) if before is not None and len(x) else None

    def _layers(self, scene: Scene) -> Tensor | None:
        """Return shares from single layers: the last one's bias, in the mean over the rounds that uploaded it."""
        found = [
            tensor.double()
            for entry, name in scene.released("layers")
            if isinstance(state := entry[name], State)
            for of, tensor in state.items()
            if of.endswith("bias") and tensor.shape == (scene.classes,)
        ]
        return (SHARPNESS * torch.stack(found).mean(0)).softmax(0) if found else None

    def _classes(self, scene: Scene) -> Tensor | None:
        """Return shares from the classes for which the client released one vector, or images."""
        held = torch.zeros(scene.classes)
        for kind in ("prototypes", "logits", "soft_labels", "synthetic_images"):
            for entry, name in scene.released(kind):
                value = entry[name]
                if (
                    isinstance(value, Mapping)
                    and not isinstance(value, State)
                    and speaks_of_classes(value, kind, scene)
                ):
                    held[list(value)] = 1
        return held if held.any() else None

    def _outputs(self, scene: Scene) -> Tensor | None:
        """Return shares from outputs, as they were uploaded or as they were passed on to a peer.

        These are rows of outputs, also by round or peer.
        """
        found = []
        for kind in ("logits", "soft_labels"):
            seen = [entry[name] for entry, name in scene.released(kind)] + [p.value for p in scene.relayed(kind)]
            for value in seen:
                for item in value.values() if isinstance(value, Mapping) else [value]:
                    if isinstance(item, Tensor) and item.dim() > 1 and item.shape[-1] == scene.classes:
                        rows = item.reshape(-1, scene.classes).double()
                        found.append((rows.softmax(1) if kind == "logits" else rows).mean(0))
        return torch.stack(found).mean(0) if found else None


def shrunk(rows: Tensor, sigma: float) -> Tensor:
    """Return the mean of rows (rounds, classes), drawn towards equal shares as far as its noise says."""
    mean = rows.mean(0)
    return mean.mean() + shrinkage(rows, sigma) * (mean - mean.mean())


def shrinkage(rows: Tensor, sigma: float | None = None) -> float:
    """Return James and Stein's factor, at least 0: how much of the mean's distance from equal shares is not noise.

    With C classes the distance has p = C - 1 dimensions. The variance of the mean in one of them is sigma^2 / T if the
    noise of a row is known, and the factor 1 - (p - 2) sigma^2 / T / |m - c|^2. Otherwise it is estimated from how T
    rows differ, with v = p (T - 1) degrees of freedom: 1 - (p - 2) / (v + 2) S / T / |m - c|^2, S their squares. One
    row of unknown noise, or fewer than four classes, is taken as it is.
    """
    T, p = len(rows), rows.shape[1] - 1
    mean = rows.mean(0)
    far = float((mean - mean.mean()).square().sum())
    apart = rows - rows.mean(1, keepdim=True) - (mean - mean.mean())
    if p < 3 or (sigma is None and T < 2):
        return 1.0
    noise = sigma**2 / T if sigma is not None else float(apart.square().sum()) / T / (p * (T - 1) + 2)
    return max(0.0, 1 - (p - 2) * noise / far) if far > 0 else 1.0


def speaks_of_classes(value: Mapping[object, object], kind: str, scene: Scene) -> bool:
    """Return whether a value is a table by class, with one vector, or images, for each class.

    A table by round or peer has rows of outputs instead.
    """
    if not all(isinstance(c, int) and c in range(scene.classes) for c in value):
        return False
    wanted = 4 if kind == "synthetic_images" else 1
    return all(isinstance(item, Tensor) and item.dim() == wanted for item in value.values())


def last_layer(model: Net) -> nn.Linear | None:
    layers = [m for m in model.classifier.modules() if isinstance(m, nn.Linear)]
    return layers[-1] if layers else None


def from_update(scene: Scene, start: Net, model: Net) -> tuple[Tensor, float] | None:
    """Return shares by class, and the size of the update that they were read from."""
    old, new = last_layer(start), last_layer(model)
    if old is None or new is None or old.weight.shape != new.weight.shape:
        return None
    update = torch.cat([(a - b).detach().double().flatten(1) for a, b in zip(rows(old), rows(new), strict=True)], 1)
    _, y = scene.auxiliary
    if len(y.unique()) < scene.classes:
        shares = (-update.sum(1)).clamp(min=0).cpu()
    else:
        basis = (class_gradients(scene, start) + class_gradients(scene, model)) / 2
        shares = torch.from_numpy(nnls(basis.flatten(1).T.cpu().numpy(), update.flatten().cpu().numpy())[0])
    total = float(shares.sum())
    return (shares / total, float(update.norm())) if total > 0 else None


def rows(layer: nn.Linear) -> list[Tensor]:
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias[:, None]]


def class_gradients(scene: Scene, model: Net) -> Tensor:
    """Return the mean gradient of the last layer over each class's auxiliary records.

    It is class x row x column, with the bias last.
    """
    x, y = scene.auxiliary
    inputs: list[Tensor] = []
    layer = last_layer(model)
    assert layer is not None
    handle = layer.register_forward_hook(lambda _, given, __: inputs.append(given[0].double()))
    error = (in_chunks(model, x).softmax(1) - one_hot(y, scene.classes)).double()
    handle.remove()
    e = torch.cat(inputs)
    if layer.bias is not None:
        e = torch.cat([e, e.new_ones(len(e), 1)], 1)
    return torch.stack([error[y == c].T @ e[y == c] / (y == c).sum() for c in range(scene.classes)])
