"""FedFTG. Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
Learning", CVPR 2022: hard samples from a conditional generator, customised label sampling, class-level ensemble.

`fedftg` is its use from scratch, as DFRD's Table 1 has it; `fedavg+fedftg` is the paper's, and `heterofl+fedftg`,
`feddropout+fedftg`, `fedrolex+fedftg` are DFRD's extensions of it. Hosts, batch norm and optimisers: see
fedaudit/methods/datafree/_datafree.py.

    L_cls = sum_i alpha_{i,y} CE(f_i(s), y)        fidelity
    L_md  = sum_i alpha_{i,y} KL(f_i(s), f(s))     model discrepancy: the generator raises it, f lowers it
    L_dis = exp(-sum_{j,k} ||s_j - s_k|| ||z_j - z_k|| / B^2)
    generator: min lambda_cls L_cls + lambda_dis L_dis - L_md;   global model: min L_md

We do not have the paper; this is written from its published description. Where that leaves room, we chose:

- It differs from DFRD as follows. The teachers are compared one by one, not as one ensemble of logits; every sample
  counts in L_md (epsilon = 1); L_dis takes the noise z, not o(z, y); there is no average of the generator.
- The order of the KL is that of DFRD's Eq. 3, which cites it. (Its authors' code has mean absolute differences of
  logits for the generator instead, and trains f on the weighted mean of the teachers' softmax outputs.)
- L_dis has the distances of that code: mean absolute ones of images, mean squared ones of noise. `metric = "l2"`: plain
  norms, under which it is 0 (see dfrd.py).
- The label enters the generator as one-hot, next to z (`merge`). Steps, rates and sizes are those of `dfrd`, as in
  DFRD's tables.
- The preset `authors` is FedFTG as DFRD's authors ran it as a rival. Besides steps, rates and networks it has a
  temperature of 10 (`T`), KL(f(s), f_i(s)) without a gradient through f for the generator (`tran`), a mean over classes
  in L_md (`classes`), mean squares of both in L_dis, and an embedding of the label next to z.
- alpha_{i,y} and p(y) come from label counts as in DFRD's Section 3.2: a release of kind `label_counts`. `weighting`
  and `labels` have the settings of `dfrd`, so that the two can be compared like with like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import Server, register
from fedaudit.methods.datafree._datafree import (
    AUTHORS,
    PRESETS,
    DataFree,
    Generators,
    Measured,
    diagnose,
    register_on_hosts,
)
from fedaudit.methods.datafree._generator import (
    Merge,
    Metric,
    Sampler,
    Transfer,
    combined,
    discrepancy,
    diversity,
    dynamic_weights,
    label_distribution,
    teach,
)  # fmt: skip


def L_cls(teachers: Tensor, alpha: Tensor, y: Tensor) -> Tensor:
    """Return sum_i alpha_{i,y} CE(f_i(s), y), one value per row; `teachers` holds logits (clients, rows, classes)."""
    each = cross_entropy(teachers.flatten(0, 1), y.repeat(len(teachers)), reduction="none").view(len(teachers), -1)
    return (alpha[:, y] * each).sum(0)


def L_md(
    teachers: Tensor,
    student: Tensor,
    alpha: Tensor,
    y: Tensor,
    tran: Transfer = "teacher-student",
    T: float = 1.0,
    classes: Literal["sum", "mean"] = "sum",
) -> Tensor:
    """Return sum_i alpha_{i,y} KL(f_i(s), f(s)), one value per row."""
    each = discrepancy(teachers, student[None], tran, T) / (student.shape[-1] if classes == "mean" else 1)
    return (alpha[:, y] * each).sum(0)


@register("fedftg", tables="FedZGE DFRD")
class FedFTG(DataFree):
    """Repair the averaged model with generated hard images. A client sends its weights and its label counts."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **PRESETS,
        "authors": {**AUTHORS, "metric": "ms", "merge": "cat", "classes": "mean"},
    }

    lambda_cls: float = 1.0
    lambda_dis: float = 1.0
    metric: Metric = "mean"  # distances in L_dis
    weighting: Literal["dynamic", "uniform"] = "dynamic"  # alpha_{i,y}: by label counts, or all teachers alike
    labels: Literal["dynamic", "uniform"] = "dynamic"  # p(y)
    merge: Merge = "ncat"  # how the generator takes its label
    tran: Transfer = "teacher-student"  # order of the KL in the generator's L_md
    T: float = Field(1.0, gt=0)  # temperature of L_md
    classes: Literal["sum", "mean"] = "sum"  # what L_md is over the classes

    def counts_labels(self) -> bool:
        return "dynamic" in (self.weighting, self.labels)

    def operator(self) -> Merge:
        return self.merge

    def distil(
        self, server: Server, f: nn.Module, teachers: list[nn.Module], n: Tensor, nets: Generators
    ) -> tuple[Generators, Measured]:
        alike = torch.ones_like(n)
        alpha = dynamic_weights(n if self.weighting == "dynamic" else alike)  # class-level ensemble
        p = label_distribution(n if self.labels == "dynamic" else alike)  # customised label sampling
        draw = Sampler(p, self.d, self.B, server.rng("z and y"))
        G = self.generator(server, nets.G)
        how = self.T, self.classes

        def generator() -> Tensor:
            z, y = draw()
            s = G(G.h(z, y))
            logits = teach(teachers, s)
            rows = self.lambda_cls * L_cls(logits, alpha, y) - L_md(logits, f(s), alpha, y, self.tran, *how)
            return rows.mean() + self.lambda_dis * diversity(s, z, self.metric)

        def global_model() -> Tensor:
            z, y = draw()
            with torch.no_grad():
                s = G(G.h(z, y))
                logits = teach(teachers, s)
            return L_md(logits, f(s), alpha, y, "teacher-student", *how).mean()

        settle = draw.settle(1), draw.settle(1)
        after = self.compete(server, G, f, nets, generator, global_model, settle=settle)
        with torch.no_grad():
            z, y = Sampler(p, self.d, self.B, server.rng("diagnosis"))()
            s = G(G.h(z, y))
            logits = teach(teachers, s)
        return after, diagnose(f, logits, combined(logits, alpha, y), s, y, z)


register_on_hosts(FedFTG)
