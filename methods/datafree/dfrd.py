"""DFRD. Luo et al., "DFRD: Data-Free Robustness Distillation for Heterogeneous Federated Learning", NeurIPS 2023,
Eqs. 2-7.

On the server a conditional generator G is trained. It shall give data on which the uploaded models agree with a label
(fidelity) and the global model does not yet (transferability), and which differ from each other (diversity). The global
model then learns the uploaded models' weighted logits on data from G and from an average of G over the rounds.

`dfrd` trains a global model from scratch; `fedavg+dfrd`, `heterofl+dfrd`, `feddropout+dfrd` and `fedrolex+dfrd` improve
the host's average in each round. Hosts, batch norm and optimisers: see fedaudit/methods/datafree/_datafree.py.

The paper leaves these points open or contradicts itself (the appendices are not in our copy), and we chose:

- Eq. 3 is printed as KL(teacher, student), Eq. 7 as KL(student, teacher). The authors' public code calls torch's
  kl_div, whose first argument is the student's: Eq. 7 writes its order of arguments, and KL(teacher, student) was run.
  So `md` is `teacher-student`; `student-teacher` is as printed. Eq. 3 stays as printed; that code has -KL(student,
  teacher) there, without a gradient through the student (`tran = "student-detached"`), and takes the mean over the rows
  that the mask counts (`rows = "counted"`) instead of the batch.
- No temperature is given: `T` = 1. That code has 10 in Eqs. 3 and 7, without a factor T^2.
- Eq. 4 as printed has plain norms. With as few as 64 pixels the exponential is then 0 in float32, and so is its
  gradient, unless G has nearly collapsed. But Table 5 has 1 to 7 points for it. The default is the form in public code
  of this family: the mean absolute difference of images times the mean squared difference of inputs. `metric = "ms"` is
  that of the authors' code, mean squares of both; `"l2"` is the printed form.
- Eqs. 2, 3 and 7 average logits; `ensemble = "probabilities"` averages softmax outputs, as FedFTG's public code does
  for the student.
- Eq. 6 does not say what w~ is before round 1. The average begins with the first trained generator, w~^1 = w^1; from
  zero it would be half of it. It changes once a round, after the last step, so in round t Eq. 7 uses w~^{t-1}: the
  knowledge of earlier rounds, none in round 1.
- Steps: I times I_g of the generator, then I_d of the global model, with fresh z and y in each. The numbers, optimisers
  (Adam for G, SGD with momentum for f), rates, d and the batch size are ours: see `presets`.
- ncat concatenates "y" itself, which is one-hot here.
- n_{i,t}^y counts a client's records, all of which train in each round. The counts are uploaded in each round: a
  release of kind `label_counts`. Classes that nobody holds are never drawn.
- tau_{i,y} tells the ensemble the label: the holders of y are asked about an image for y, and lean to y whatever it
  shows. The record has fidelity under tau and under the plain mean of logits. On a host f is good already, and labels
  that images do not show made it worse under Eq. 7 as printed (docs/results/dfrd.md). Dynamic weights are a named part
  of the method, so they are the default there too, as in FedFTG; `weighting = "uniform"` weighs all teachers alike.
- The preset `authors` has what their code settles besides: 10 turns of 2 and 5 steps, Adam at 2e-4 with betas 0.5 and
  0.999 for G, SGD without momentum and with decay 1e-4 for f, both new in each turn, a DCGAN (`net`), d = 64, batch
  statistics everywhere, and on FedAvg no feedback. That code also begins Eq. 6 at zero, runs G in evaluation mode while
  f learns, counts labels of the batches that were trained on, and adds a hinge on the length of E(y), weight 0.25.
  These four are not here. Its clients take 20 steps of SGD at batch 64 and rate 0.01 a round.
- L.acc gives each client a random equal share of the test set. The record's `clients.global_test` gives it the whole
  test set: the same in expectation, with less noise. G.acc is `global.test`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedaudit import Server, State, kl, register
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
    Generator,
    Mask,
    Mean,
    Merge,
    Metric,
    Rows,
    Sampler,
    Transfer,
    combined,
    discrepancy,
    diversity,
    dynamic_weights,
    epsilon,
    label_distribution,
    share,
    teach,
    weighted,
)  # fmt: skip

Order = Literal["student-teacher", "teacher-student"]
Weighting = Literal["dynamic", "uniform", "images", "targets"]  # everywhere, nowhere, in Eqs. 2 and 3, in Eq. 7


def L_fid(ensemble: Tensor, y: Tensor) -> Tensor:
    """Return Eq. 2, one value per row; `ensemble` is sum_i tau_{i,y} f_i(s, theta_i)."""
    return cross_entropy(ensemble, y, reduction="none")


def L_tran(
    ensemble: Tensor,
    student: Tensor,
    y: Tensor,
    mask: Mask = "dfrd",
    tran: Transfer = "teacher-student",
    T: float = 1.0,
    rows: Rows = "all",
) -> Tensor:
    """Return Eq. 3, one value per row."""
    return -share(epsilon(mask, student, ensemble, y), rows) * discrepancy(ensemble, student, tran, T)


def L_gen(
    ensemble: Tensor,
    student: Tensor,
    y: Tensor,
    s: Tensor,
    h: Tensor,
    beta_tran: float = 1.0,
    beta_div: float = 1.0,
    mask: Mask = "dfrd",
    metric: Metric = "mean",
    tran: Transfer = "teacher-student",
    T: float = 1.0,
    rows: Rows = "all",
) -> Tensor:
    """Return Eq. 5: L_fid + beta_tran L_tran + beta_div L_div, for a batch."""
    each = L_fid(ensemble, y) + beta_tran * L_tran(ensemble, student, y, mask, tran, T, rows)
    return each.mean() + beta_div * diversity(s, h, metric)  # Eq. 4


def L_kl(student: Tensor, ensemble: Tensor, md: Order = "teacher-student", T: float = 1.0) -> Tensor:
    """Return a term of Eq. 7, for a batch."""
    return (kl(student, ensemble, T) if md == "student-teacher" else kl(ensemble, student, T)).mean()


def ema(w_: State | None, w: State, lam: float) -> State:
    """Return Eq. 6: w~^t = lambda w~^{t-1} + (1 - lambda) w^t."""
    if w_ is None:
        return w
    mixed = {name: lam * w_[name] + (1 - lam) * t if t.is_floating_point() else t for name, t in w.items()}
    return State(mixed, w.buffers)


@register("dfrd", tables="FedZGE DFRD")
class DFRD(DataFree):
    """Distil clients' models with a generator that does not forget. A client sends its weights and its label counts."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **PRESETS,
        "authors": {**AUTHORS, "metric": "ms", "rows": "counted"},
    }

    beta_tran: float = 1.0
    beta_div: float = 1.0
    lam: float = 0.5  # lambda of Eq. 6
    alpha: float = 0.5  # weight of the averaged generator's data in Eq. 7; 0: there is none
    mask: Mask = "dfrd"  # which rows count in Eq. 3
    merge: Merge = "mul"  # o(z, y)
    weighting: Weighting = "dynamic"  # where tau_{i,y} weighs the teachers; elsewhere all are alike
    labels: Literal["dynamic", "uniform"] = "dynamic"  # p(y)
    md: Order = "teacher-student"  # order of the KL in Eq. 7
    tran: Transfer = "teacher-student"  # order of the KL in Eq. 3
    T: float = Field(1.0, gt=0)  # temperature of Eqs. 3 and 7
    rows: Rows = "all"  # over which rows the mean of Eq. 3 goes: all, or those that its mask counts
    metric: Metric = "mean"  # distances in Eq. 4
    ensemble: Mean = "logits"  # what of the teachers is averaged in Eqs. 2, 3 and 7

    def counts_labels(self) -> bool:
        return self.weighting != "uniform" or self.labels == "dynamic"

    def operator(self) -> Merge:
        return self.merge

    def distil(
        self, server: Server, f: nn.Module, teachers: list[nn.Module], n: Tensor, nets: Generators
    ) -> tuple[Generators, Measured]:
        alike = torch.ones_like(n)
        tau = dynamic_weights(n if self.weighting in ("dynamic", "images") else alike)
        tau_md = dynamic_weights(n if self.weighting in ("dynamic", "targets") else alike)
        p = label_distribution(n if self.labels == "dynamic" else alike)
        ensemble, target = weighted(teachers, tau, self.ensemble), weighted(teachers, tau_md, self.ensemble)
        draw = Sampler(p, self.d, self.B, server.rng("z and y"))
        G = self.generator(server, nets.G)
        G_ = self.generator(server, nets.average) if nets.average is not None and self.alpha else None

        def train_generator() -> Tensor:
            z, y = draw()
            h = G.h(z, y)
            s = G(h)
            how = self.beta_tran, self.beta_div, self.mask, self.metric, self.tran, self.T, self.rows
            return L_gen(ensemble(s, y), f(s), y, s, h, *how)

        def labelled(net: Generator) -> tuple[Tensor, Tensor]:
            z, y = draw()
            with torch.no_grad():
                s = net(net.h(z, y))
                return s, target(s, y)

        def distil_robustly() -> Tensor:  # Eq. 7
            s, teacher = labelled(G)
            L_md = L_kl(f(s), teacher, self.md, self.T)
            if G_ is None:
                return L_md
            s_, teacher_ = labelled(G_)
            return L_md + self.alpha * L_kl(f(s_), teacher_, self.md, self.T)

        settle = draw.settle(1), draw.settle(1 if G_ is None else 2)
        beside = [] if G_ is None else [G_]
        after = self.compete(server, G, f, nets, train_generator, distil_robustly, settle=settle, beside=beside)
        with torch.no_grad():
            z, y = Sampler(p, self.d, self.B, server.rng("diagnosis"))()
            h = G.h(z, y)
            s = G(h)
            logits = teach(teachers, s)
            seen = diagnose(f, logits, combined(logits, tau_md, y, self.ensemble), s, y, h)
        return dataclasses.replace(after, average=ema(nets.average, after.G, self.lam)), seen


register_on_hosts(DFRD)
