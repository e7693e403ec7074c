"""FedFTG. Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated
Learning", CVPR 2022: hard samples from a conditional generator, customised label sampling, class-level ensemble.

`fedftg` is its use from scratch, as DFRD's Table 1 has it; `fedavg+fedftg` is the paper's, and `heterofl+fedftg`,
`feddropout+fedftg`, `fedrolex+fedftg` are DFRD's extensions of it. Hosts: see fedaudit/methods/_datafree.py.

    L_cls = sum_i alpha_{i,y} CE(f_i(s), y)        fidelity
    L_md  = sum_i alpha_{i,y} KL(f_i(s), f(s))     model discrepancy: the generator raises it, f lowers it
    L_dis = exp(-sum_{j,k} ||s_j - s_k|| ||z_j - z_k|| / B^2)
    generator: min lambda_cls L_cls + lambda_dis L_dis - L_md;   global model: min L_md

The paper is not among ours; this is written from its published description. Chosen where that leaves room:

- What distinguishes it from DFRD: the teachers are compared one by one, not as one ensemble of logits; every sample
  counts in L_md (epsilon = 1); L_dis takes the noise z, not o(z, y); no average of the generator.
- The order of the KL is that of DFRD's Eq. 3, which cites it. (Its authors' code has mean absolute differences of
  logits instead, and mean absolute distances in L_dis: `metric = "mean"`.)
- The label enters the generator as one-hot, next to z. Steps, rates and sizes are those of `dfrd`, as in DFRD's tables.
- alpha_{i,y} and p(y) from label counts as in DFRD's Section 3.2: a release of kind `label_counts`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import cross_entropy

from fedaudit import kl, register, state_of
from fedaudit.methods._datafree import (
    DataFree,
    Sampler,
    diversity,
    dynamic_weights,
    label_distribution,
    register_on_hosts,
)


def L_cls(teachers, alpha, y):
    """sum_i alpha_{i,y} CE(f_i(s), y), one value per row; `teachers` holds logits (clients, rows, classes)."""
    each = cross_entropy(teachers.flatten(0, 1), y.repeat(len(teachers)), reduction="none").view(len(teachers), -1)
    return (alpha[:, y] * each).sum(0)


def L_md(teachers, student, alpha, y):
    """sum_i alpha_{i,y} KL(f_i(s), f(s)), one value per row."""
    return (alpha[:, y] * kl(teachers, student[None])).sum(0)


@register("fedftg")
class FedFTG(DataFree):
    lambda_cls: float = 1.0
    lambda_dis: float = 1.0
    metric: Literal["l2", "mean"] = "l2"  # distances in L_dis

    def counts_labels(self):
        return True

    def operator(self):
        return "ncat"

    def distil(self, server, f, teachers, n, nets):
        alpha = dynamic_weights(n)  # class-level ensemble
        draw = Sampler(label_distribution(n), self.d, self.B, server.rng("z and y"))  # customised label sampling
        G = self.generator(server, nets["G"])

        def generator():
            z, y = draw()
            s = G(G.h(z, y))
            logits = torch.stack([f_i(s) for f_i in teachers])
            rows = self.lambda_cls * L_cls(logits, alpha, y) - L_md(logits, f(s), alpha, y)
            return rows.mean() + self.lambda_dis * diversity(s, z, self.metric)

        def global_model():
            z, y = draw()
            with torch.no_grad():
                s = G(G.h(z, y))
                logits = torch.stack([f_i(s) for f_i in teachers])
            return L_md(logits, f(s), alpha, y).mean()

        self.compete(server, G, f, generator, global_model)
        return {"G": state_of(G)}


register_on_hosts(FedFTG)
