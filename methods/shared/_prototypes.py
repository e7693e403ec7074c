"""One vector per class, as FedProto, FedTGP, FedGH, FedDistill and FedKTL share it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fedaudit import NUMBER, Mean, Plan, Server, Size, Up, load, private
from fedaudit.errors import SettingError
from fedaudit.shape import Shape
from fedaudit.training import models
from fedaudit.training.models import Net

ByClass = dict[int, Tensor]


def head(model: nn.Module) -> set[str]:
    """Return the names of a model's tensors that belong to its classifier."""
    return {name for name in model.state_dict() if name.startswith("classifier.")}


def with_head(model: Net, w: Mapping[str, Tensor]) -> Net:
    """Return a copy of the model with another classifier."""
    return load(copy.deepcopy(model), w, head)


@functools.cache
def width_of(arch: str, shape: Shape, classes: int) -> int:
    return int(models.describe(arch, shape, classes)["width"])


def common_width(server: Server, method: str) -> int:
    """Return the width of all clients' embeddings. Embeddings of several widths cannot be averaged or compared."""
    archs = {server.arch(k) for k in range(server.clients)}
    widths = {arch: width_of(arch, server.shape, server.classes) for arch in sorted(archs)}
    if len(set(widths.values())) > 1:
        listed = ", ".join(f"{arch} {width}" for arch, width in widths.items())
        raise SettingError(
            f"{method} needs one embedding width, but the clients' models have several ({listed}). Give all of them "
            "one: a width behind the model's name, such as HtFE-10/512 (average pooling) or cnn/p64 (a projection)."
        )
    return next(iter(widths.values()))


def mean_by_class(sent: Mapping[int, ByClass], n: Mapping[int, Tensor] | None = None) -> ByClass:
    """Return the mean over the clients that hold a class, alike or by their counts n_k (one number a class)."""
    held = sorted({c for of_client in sent.values() for c in of_client})
    means = {}
    for c in held:
        who = [k for k in sorted(sent) if c in sent[k]]
        vectors = torch.stack([sent[k][c] for k in who])
        weights = None if n is None else torch.stack([n[k][c] for k in who]).clamp_min(0).to(vectors)
        even = weights is None or not bool(weights.sum() > 0)  # noise could have made the counts nothing
        means[c] = vectors.mean(0) if even or weights is None else weights / weights.sum() @ vectors
    return means


class ClassSums(Up):
    """A client's class means as they are added up: rows of zeros for classes that it does not hold."""

    S: Tensor = private("prototypes", via="data", unit="client")  # a row for each class, times what it weighs
    held: Tensor = private("label_counts", via="data", unit="client")  # what each class weighs
    n: int | None = private("count", via="data", unit="client")  # the client's weight; None: all weigh the same


ONE_HOLDER = "the mean of a class that one client alone holds is that client's"


def class_sums(vectors: ByClass, classes: int, counts: Tensor | None = None) -> ClassSums:
    """Return class means in the form in which they are added up, alike or by counts (one number a class).

    With counts, the sums are weighted by n, the counts' total, and each mean thereby by its count.
    """
    like = next(iter(vectors.values()))
    rows, held = table(vectors, classes, like)
    if counts is None:
        return ClassSums(rows, held, None)
    counts = counts.to(like).clamp_min(0) * held  # noise could have made a count negative
    n = round(float(counts.sum()))
    share = counts / max(n, 1)
    return ClassSums(rows * share[:, None], share, n)


def means_of_sums(mean: Mean[ClassSums]) -> ByClass:
    """Return the mean of each class that anybody holds."""
    sums = mean.value
    weight = sums.held * (mean.count if sums.n is None else sums.n)
    # Less than half a record, or half a client where all weigh the same, is rounding or noise.
    return {c: sums.S[c] / sums.held[c] for c in torch.nonzero(weight > 0.5).flatten().tolist()}


def table(vectors: ByClass, classes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors as rows of a matrix, 0 for a class that has none, and a 1 for each class that has one."""
    rows, held = like.new_zeros(classes, like.shape[-1]), like.new_zeros(classes)
    for c, vector in vectors.items():
        rows[c], held[c] = vector, 1
    return rows, held


BEHIND = 20.0  # logits by which a class without a prototype stays behind one that has one


def nearest(model: Net, C: Tensor, held: Tensor) -> Net:
    """Return a model that predicts the class whose prototype is nearest to the embedding, among the existing
    prototypes.

    -|h - C_c|^2 is 2 C_c h - |C_c|^2 but for |h|^2, which is the same for all classes: a linear layer. So the model is
    one of its architecture, and can be saved and published as any other. A class without a prototype gets the logit of
    the first class that has one less `BEHIND`, and is never the nearest.
    """
    weight, bias, first = 2 * C, -C.square().sum(1), int(held.argmax())
    weight = torch.where(held[:, None] > 0, weight, weight[first])
    return with_classifier(model, weight, torch.where(held > 0, bias, bias[first] - BEHIND))


def with_classifier(model: Net, weight: Tensor, bias: Tensor) -> Net:
    """Return a copy of the model with other numbers in its last layer."""
    changed = copy.deepcopy(model)
    layer = nn.Linear(weight.shape[1], weight.shape[0], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    changed.classifier = layer
    return changed


def bill(plan: Plan, field: str, ids: Iterable[int], entries: int, nobody: bool = False) -> Size:
    """Return the size of a vector with the number of its class, for each class in the messages to or from `ids`.

    When planning, the classes that a client holds come up, and those that anybody holds go down. `nobody` says that
    there are none yet.
    """
    up = {k: plan.held(k) for k in plan.participants}
    everybody = {c for held in up.values() for c in held}
    expected = {k: [] if nobody else everybody if field.startswith("Global") else up[k] for k in ids}
    return sum(((plan.tensor(entries) + NUMBER) * len(plan.choice(field, k, expected[k])) for k in ids), Size())
