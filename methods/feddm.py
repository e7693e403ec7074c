"""FedDM. Xiong et al., "FedDM: Iterative Distribution Matching for Communication-Efficient Federated Learning", CVPR
2023, as FedAF (Wang et al., CVPR 2024, Section 5.1 and Appendix A) runs it for its comparison.

Left open by FedAF's account, and chosen here:

- w ~ P(w_r) is a Gaussian at the received w_r, cut to the ball of radius rho. In as many dimensions as a network has
  parameters such noise lies on the ball's surface, so Gaussian noise is scaled down to length rho.
- FedDM matches the class means of logits as well as those of embeddings (`logits`); FedAF's Eq. 4, given there as the
  loss of both methods, has the embeddings only.
- The clipped gradient is that of all images of a client together.
- As in FedAF: 8-bit images, kept in [-1, 1], started anew in each round from averages of real ones; momentum 0.9 for
  both optimisers (FedAF's Appendix A); classes of any size; batch norm frozen while condensing.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedaudit import NUMBER, Down, Method, Record, State, Up, ce, load, private, register, sgd, state_of
from fedaudit.methods._condense import Records, Sampled, Start, closure, dm, gathered, in_chunks


class Global(Down):
    w: State


class Condensed(Up):
    S: dict[int, Tensor] = private("synthetic_images", via="data", unit="client", dtype="uint8")  # S_k, by class


class Trained(Record):
    w: State


@register("feddm")
class FedDM(Method):
    IPC: int = 50  # condensed images per class
    steps: int = 1000  # of condensation, a round
    B: int = 256  # records of each class in a step
    eta_S: float = 1.0  # image learning rate
    clip: float = 2.0  # norm of the images' gradient
    rho: float = 5.0  # radius of the perturbation
    logits: bool = True  # match mean logits as well
    start: Start = "average"
    averaged: int = 10  # records in a starting average
    least: int = 1  # fewest records that make a class held
    E: int = 500  # epochs on the server
    B_w: int = 256  # batch size on the server
    eta_w: float = 0.001  # learning rate on the server
    momentum: float = 0.9  # of both optimisers

    quick: ClassVar = {"IPC": 2, "steps": 2, "B": 16, "E": 2, "B_w": 16, "eta_w": 0.05}
    presets: ClassVar = {"fashion-mnist": {}, "cifar10": {}, "cifar100": {}, "domainnet": {"IPC": 20}}

    def init(self, server):
        return Trained(state_of(server.model()))

    def round(self, s, server, cohort):  # on the server
        sent = cohort.ask(self.condense, Global(s.w))
        w = load(server.model(), s.w)
        S = gathered({k: a.S for k, a in sent.items()})
        server.fit(w, ce, S, epochs=self.E, batch=self.B_w, opt=sgd(self.eta_w, momentum=self.momentum))
        return Trained(state_of(w))

    def condense(self, client, msg):  # on client k
        load(client.model, msg.w)
        D = Records(client.x, client.y, self.B, self.least)
        if not D.classes:
            return Condensed({})
        S = D.start(self.start, self.IPC, self.averaged).requires_grad_()
        S.register_hook(lambda g: g * (self.clip / g.norm()).clamp(max=1))
        w_r = Sampled(client.model)

        def loss(S):
            f = w_r.perturb(self.rho)  # w ~ P(w_r)
            real = in_chunks(f.encode, D.draw())
            syn = f.encode(S.flatten(0, 1))
            matched = dm(D.mean(real), syn.unflatten(0, S.shape[:2]).mean(1))
            if not self.logits:
                return matched
            return matched + dm(D.mean(f.classify(real)), f.classify(syn).unflatten(0, S.shape[:2]).mean(1))

        client.optimise([S], closure(loss, S), steps=self.steps, opt=sgd(self.eta_S, momentum=self.momentum))
        return Condensed(dict(zip(D.classes, S.detach().clamp(-1, 1), strict=True)))

    def predictor(self, s, server):
        return load(server.model(), s.w)

    def traffic(self, plan):
        images = plan.tensor(self.IPC, *plan.shape, size=1) + NUMBER  # of one class, and which
        classes = {k: plan.choice("Condensed.S", k, plan.held(k, self.least)) for k in plan.replied(0)}
        return {
            ("down", "Global.w"): plan.state() * len(plan.asked(0)),
            ("up", "Condensed.S"): sum(images * len(classes[k]) for k in plan.replied(0)),
        }
