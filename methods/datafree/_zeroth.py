"""FedZGE's objective of the generator, and zeroth-order estimates of its gradient with respect to the images x^.

Equation numbers are those of Ma, Wang and Zhang, AAAI 2025 (see fedzge.py). e is the ensemble's output, f the global
model's; x_u = x + epsilon u holds q perturbations of the B images, e_u and f_u the outputs there. Everything is
computed in double precision: Eq. 17 divides small differences by epsilon.

The gradient with respect to image b is that of L_G as a function of x_b alone, with the other images held. Its
difference along u_ib is exact for each part of Eq. 10. L_fid and L_adv are means over images, so 1/B of the image's own
part changes. L_info changes through p + (sigma(e(x_b + epsilon u_ib)) - sigma(e(x_b))) / B, and L_div through the pairs
that image b is in. So the same answers give q differences for each image, where the batch as a whole gives q in all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedaudit import kl
from fedaudit.methods.shared._ensemble import predict

Distance = Literal["norm", "rms", "ms"]
AT_ONCE = 1 << 28  # bytes of differences of images that are held at once
TINY = math.log(torch.finfo(torch.float32).tiny)  # e to the power of less than this underflows in single precision


def L_fid(e: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(e, y)  # Eq. 3


def L_adv(e: Tensor, f: Tensor, tau: float) -> Tensor:
    return -kl(e, f, tau).mean()  # Eq. 5


def L_div(x: Tensor, z: Tensor, distance: Distance = "norm") -> Tensor:
    return nearness(x, z, distance).exp()  # Eq. 7


def nearness(x: Tensor, z: Tensor, distance: Distance) -> Tensor:
    """Return the exponent of Eq. 7: minus the mean of |x_i - x_j| |z_i - z_j| over all pairs."""
    return -(apart(x, x, distance) * apart(z, z, distance)).mean()


def apart(a: Tensor, b: Tensor, distance: Distance) -> Tensor:
    """Return the distances of the rows of a from those of b: norms, or root mean squares or mean squares over their
    numbers.
    """
    a, b = a.flatten(1).double(), b.flatten(1).double()
    found = cast(Tensor, Norms.apply(a, b))
    if distance == "ms":
        return found.square() / a.shape[1]
    return found / math.sqrt(a.shape[1]) if distance == "rms" else found


class Norms(torch.autograd.Function):
    """Norms of the differences of all rows of a and b, which never exist all at once.

    For 500 images of 3 x 32 x 32 numbers they would take 6 GB, and torch.cdist's own gradient holds them on a GPU. No
    norm comes from products of rows: of rows that are nearly equal, these would leave few digits.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b, found = ctx.saved_tensors
        g = torch.where(found > 0, gradients[0] / found, 0.0)  # equal rows do not pull at each other
        of_a, of_b = ctx.needs_input_grad
        return pulled(a, b, g) if of_a else None, pulled(b, a, g.T) if of_b else None


def pulled(a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """Return the sums over j of g_ij (a_i - b_j), computed for as many rows i at a time as `AT_ONCE` allows."""
    size = max(1, AT_ONCE // max(1, b.numel() * b.element_size()))
    parts = zip(a.split(size), g.split(size), strict=True)
    return torch.cat([torch.einsum("ij,ijd->id", g_i, a_i[:, None] - b) for a_i, g_i in parts])


def L_info(e: Tensor) -> Tensor:
    return minus_entropy(e.softmax(1).mean(0))  # Eq. 8


def minus_entropy(p: Tensor) -> Tensor:
    return torch.xlogy(p, p).sum(-1)  # Eq. 9


@dataclass(frozen=True)
class Objective:
    """L_G, Eq. 10, and its derivatives."""

    tau: float
    beta_1: float
    beta_2: float
    beta_3: float
    distance: Distance = "norm"  # in Eq. 7

    def __call__(self, e: Tensor, f: Tensor, x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        e, f = e.double(), f.double()
        L = L_fid(e, y)
        L = L + self.beta_1 * L_adv(e, f, self.tau) if self.beta_1 else L
        L = L + self.beta_2 * L_div(x, z, self.distance) if self.beta_2 else L
        return L + self.beta_3 * L_info(e) if self.beta_3 else L

    def acting(self, x: Tensor, z: Tensor) -> Objective:
        """Return the objective without L_div if L_div, and with it its gradient, is zero in single precision."""
        if self.beta_2 and nearness(x, z, self.distance).item() < TINY:
            return dataclasses.replace(self, beta_2=0.0)
        return self

    def change(
        self, e: Tensor, e_u: Tensor, f: Tensor, f_u: Tensor, x: Tensor, x_u: Tensor, z: Tensor, y: Tensor
    ) -> Tensor:
        """Return L_G with image b moved along u_ib and the others held, minus L_G: q x B."""
        e, e_u, f, f_u = e.double(), e_u.double(), f.double(), f_u.double()
        q, B = e_u.shape[:2]
        change = (self.own(e_u, f_u, y.expand(q, B)) - self.own(e, f, y)) / B  # Eqs. 3 and 5 are means
        if self.beta_2:
            farther = apart(x_u.flatten(0, 1), x, self.distance).view(q, B, B) - apart(x, x, self.distance)
            moved = -2 * (farther * apart(z, z, self.distance)).sum(-1) / B**2  # Eq. 7 has each pair twice
            change = change + self.beta_2 * L_div(x, z, self.distance) * moved.expm1()
        if self.beta_3:
            s = e.softmax(-1)
            p = s.mean(0)
            change = change + self.beta_3 * (minus_entropy(p + (e_u.softmax(-1) - s) / B) - minus_entropy(p))
        return change

    def own(self, e: Tensor, f: Tensor, y: Tensor) -> Tensor:
        """Return the values that Eqs. 3 and 5 average over images."""
        fid = -e.log_softmax(-1).gather(-1, y[..., None])[..., 0]
        return fid - self.beta_1 * kl(e, f, self.tau) if self.beta_1 else fid

    def partial(self, f: nn.Module, x: Tensor, e: Tensor, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return dL_G/de, the first factor of Eq. 16, and dL_G/dx^ at constant e. Neither needs a client."""
        e, at = e.detach().clone().double().requires_grad_(), x.clone().requires_grad_()
        v, g = torch.autograd.grad(self.acting(x, z)(e, f(at), at, z, y), (e, at), materialize_grads=True)
        return v, g


# --- estimates of dL_G/dx^, without the factor d ---------------------------------------------------------------------


def along_batch(change: Tensor, u: Tensor, epsilon: float) -> Tensor:
    """Return Eq. 17 for the batch. change: L(x + epsilon u_i) - L(x), one number per direction; u: q x B x image."""
    return torch.einsum("q,q...->...", (change / epsilon).to(u.dtype), u) / len(u)


def along_images(change: Tensor, u: Tensor, epsilon: float) -> Tensor:
    """Return Eq. 17 for each image. change: L(.., x_b + epsilon u_ib, ..) - L(x), q x B."""
    return torch.einsum("qb,qb...->b...", (change / epsilon).to(u.dtype), u) / len(u)


def by_batch(
    L_G: Objective, epsilon: float, f: nn.Module, x: Tensor, u: Tensor, e: Tensor, e_u: Tensor, z: Tensor, y: Tensor
) -> Tensor:
    """Return the estimate with all images moved at once along u_i: one difference of the whole L_G per direction."""
    L_G, x_u = L_G.acting(x, z), x + epsilon * u
    f_u = predict(f, x_u.flatten(0, 1)).view_as(e_u)
    L_u = torch.vmap(lambda e, f, x: L_G(e, f, x, z, y))(e_u, f_u, x_u)
    return along_batch(L_u - L_G(e, predict(f, x), x, z, y), u, epsilon)


def by_image(
    L_G: Objective, epsilon: float, f: nn.Module, x: Tensor, u: Tensor, e: Tensor, e_u: Tensor, z: Tensor, y: Tensor
) -> Tensor:
    """Return the estimate with each image moved alone: one difference per image and direction."""
    L_G, x_u = L_G.acting(x, z), x + epsilon * u
    f_u = predict(f, x_u.flatten(0, 1)).view_as(e_u)
    return along_images(L_G.change(e, e_u, predict(f, x), f_u, x, x_u, z, y), u, epsilon)


def by_parts(
    L_G: Objective, epsilon: float, f: nn.Module, x: Tensor, u: Tensor, e: Tensor, e_u: Tensor, z: Tensor, y: Tensor
) -> Tensor:
    """Return Eq. 16 with its second factor estimated image by image.

    All else is exact: dL_G/de, f's part of L_adv, L_div.
    """
    v, g = L_G.partial(f, x, e, z, y)
    return g + along_images(torch.einsum("qbc,bc->qb", e_u.double() - e.double(), v), u, epsilon)


ESTIMATES = {"image": by_image, "batch": by_batch, "split": by_parts}


def true_gradient(
    L_G: Objective, f: nn.Module, x: Tensor, models: Mapping[int, nn.Module], N: Mapping[int, int], e: Tensor,
    z: Tensor, y: Tensor,
) -> Tensor:  # fmt: skip
    """Return Eq. 16 by back-propagation through the clients' models."""
    v, g = L_G.partial(f, x, e, z, y)
    for k in sorted(models):
        at = x.clone().requires_grad_()
        through = (v * (N[k] / sum(N.values()))).to(x.dtype)
        g = g + torch.autograd.grad(models[k](at), at, through)[0]
    return g
