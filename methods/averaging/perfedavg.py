"""Per-FedAvg. Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", NeurIPS 2020, Algorithm 1, in its two approximations FO and HF.

All clients look for one w from which a single gradient step on a client's own records leads to a good model for it.

Where the paper is silent or was not at hand, we chose:

- FO leaves out the second derivative, so a meta step is two gradients at two points; each is one step of `fit`, with an
  optimiser that remembers w in between. FO can therefore be trained with DP-SGD (two trainings a round: say
  privacy.training.releases). HF needs two gradients on one batch, which `fit` does not give: it runs in
  `client.optimise`, and is refused under DP-SGD.
- The batches D, D' (and D'' in HF) are fresh ones: FO takes them in turn from a shuffled epoch, HF draws each anew.
- Batch-norm statistics are collected at every point that is evaluated (w~ and w +- delta u too), and averaged.
- `delta`, half the width of HF's finite difference: 1e-3. Much larger ones step over the kinks of ReLU networks.
- alpha has to stay well below the inverse of the loss's curvature (the paper assumes it): at alpha = 0.1 on digits, w
  itself ends at chance, and HF does not train.
- A client deploys w after `adapt` steps of rate alpha on its own records, one as in the paper's objective. It adapts
  the w that it received at the beginning of the round; the round's own average reaches it in the next one.
- The average is over the clients that answered, without weights, as Algorithm 1 writes it (1 / rn).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedaudit import (
    Client,
    Cohort,
    Down,
    Opt,
    Plan,
    Record,
    Server,
    Size,
    State,
    Up,
    ce,
    load,
    private,
    register,
    sgd,
    state_of,
)
from fedaudit.methods.shared._travelling import SendsTrained

Gradient = dict[str, Tensor]


class Initial(Down):
    w: State


class Updated(Up):
    w: State = private("weights", via="model", unit="client")


class Averaged(Record):
    w: State


class FirstOrder(torch.optim.Optimizer):
    """An optimiser for which two steps are one meta step.

    The first step goes to w~ = w - alpha grad f(w, D). The second goes from w by the gradient that was found there, w
    <- w - beta grad f(w~, D').
    """

    def __init__(self, params: Iterable[Tensor], alpha: float, beta: float):
        super().__init__(params, {"alpha": alpha, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                w = self.state[p].pop("w", None)
                if w is None:
                    self.state[p]["w"] = p.clone()
                    p.sub_(p.grad, alpha=group["alpha"])
                else:
                    p.copy_(w.sub_(p.grad, alpha=group["beta"]))


def hessian_free(
    grad: Callable[[Mapping[str, Tensor], Tensor], Gradient],
    w: Mapping[str, Tensor],
    D: Sequence[Tensor],
    alpha: float,
    delta: float,
) -> Gradient:
    """Return (I - alpha H) grad f(w~, D'), H u as [grad f(w + delta u, D'') - grad f(w - delta u, D'')] / (2 delta).

    `grad(w, batch)` gives a gradient by parameter name; D holds the three batches.
    """
    first = grad(w, D[0])
    u = grad({name: w[name] - alpha * first[name] for name in w}, D[1])  # at w~
    ahead, behind = (grad({name: w[name] + sign * delta * u[name] for name in w}, D[2]) for sign in (1, -1))
    return {name: u[name] - alpha * (ahead[name] - behind[name]) / (2 * delta) for name in w}


@register("perfedavg", tables="FedFree")
class PerFedAvg(SendsTrained):
    """Learn a model that a client adapts with a step or two. A client sends its weights."""

    on_digits: ClassVar = {"E": 5, "B": 16, "alpha": 0.05, "beta": 0.1}
    quick: ClassVar = {"tau": 10, "B": 16, "alpha": 0.01, "beta": 0.2}
    # As FedFree ran it: Table A2, with the epochs of Section 4.1 (Table A2 has 30), as for its other rivals.
    presets: ClassVar = {
        **{name: {"E": 5, "B": 10, "alpha": 0.01, "beta": 0.01} for name in ("cifar10", "cifar100")},
        "pflib": {"E": 1, "B": 10, "alpha": 0.005, "beta": 0.005},  # one rate for both steps
    }

    variant: Literal["FO", "HF"] = "FO"
    tau: int = 10  # local meta steps
    E: int | None = None  # local epochs: as many meta steps as there are batches in them, instead of tau
    B: int = 40  # size of each batch
    alpha: float = 0.01  # rate of the step that personalises
    beta: float = 0.001  # rate of the meta step
    delta: float = 1e-3  # HF: half the width of the difference
    adapt: int = 1  # steps of rate alpha from w to what a client deploys

    def init(self, server: Server) -> Averaged:
        return Averaged(state_of(server.model(), self.part))  # w_0

    def round(self, s: Averaged, server: Server, cohort: Cohort) -> Averaged:
        return Averaged(cohort.mean(self.client_update, Initial(s.w)).value.w)  # i in A_k

    def client_update(self, client: Client, msg: Initial) -> Updated:  # on client i
        load(client.model, msg.w, self.part)
        w = copy.deepcopy(client.model)
        if self.variant == "FO":
            opt = Opt(FirstOrder, {"alpha": self.alpha, "beta": self.beta})
            client.fit(ce, steps=2 * self.meta_steps(client), batch=self.B, opt=opt, model=w)
        else:
            self.fit_hessian_free(client, w)
        if self.adapt:
            client.fit(ce, steps=self.adapt, batch=self.B, opt=sgd(self.alpha))
        return Updated(state_of(w, self.part))  # w_{k+1,tau}^i

    def meta_steps(self, client: Client) -> int:
        return self.tau if self.E is None else self.E * -(-len(client) // self.B)

    def fit_hessian_free(self, client: Client, model: nn.Module) -> None:
        w = {name: p for name, p in model.named_parameters() if p.requires_grad}
        x, y, rng = client.x, client.y, client.rng("meta batches")
        model.train()

        def grad(at: Mapping[str, Tensor], batch: Tensor) -> Gradient:
            at = {name: t.detach().requires_grad_() for name, t in at.items()}
            loss = ce(lambda x: functional_call(model, at, (x,)), x[batch], y[batch]).mean()
            return dict(zip(at, torch.autograd.grad(loss, list(at.values())), strict=True))

        def meta() -> Tensor:  # a function whose gradient in w is the direction of the meta step
            D = [torch.randperm(len(x), generator=rng, device=client.device)[: self.B] for _ in range(3)]
            step = hessian_free(grad, w, D, self.alpha, self.delta)
            return torch.stack([(step[name].detach() * w[name]).sum() for name in w]).sum()

        client.optimise(list(w.values()), meta, steps=self.meta_steps(client), opt=sgd(self.beta))
        model.eval()

    def predictor(self, s: Averaged, server: Server) -> nn.Module:
        return load(server.model(), s.w, self.part)

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int]:
        return {
            ("down", "Initial.w"): plan.state(part=self.part) * len(plan.asked(0)),
            ("up", "Updated.w"): plan.state(part=self.part) * len(plan.replied(0)),
        }
