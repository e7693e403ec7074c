"""A conditional generator on the server, and the parts that train it: labels, ensembles of teachers, common losses.

`dfrd`, `fedftg` and `dense` use all of it, `fedgen` and `fedzkt` parts. Equation numbers are those of DFRD.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedaudit import answers, kl
from fedaudit.shape import Shape

Merge = Literal["mul", "add", "cat", "ncat", "none"]
Mask = Literal["dfrd", "fedftg", "dense", "one-right"]
Metric = Literal["mean", "ms", "l2"]
Network = Literal["table7", "dcgan"]
Mean = Literal["logits", "probabilities"]
Transfer = Literal["teacher-student", "student-detached"]
Rows = Literal["all", "counted"]
Ensemble = Callable[[Tensor, Tensor], Tensor]  # synthetic data, labels: the teachers' weighted logits


class Generator(nn.Module):
    """s = G(h, w) with h = o(z, y): a linear layer, two transposed convolutions, images in [-1, 1].

    DFRD's own generator is in an appendix that we do not have. This is the one that FedZGE gives in its Table 7 as
    common to the data-free methods. It always uses batch statistics, also as an average over rounds, so the running
    ones do not matter.
    """

    def __init__(self, merge: Merge, d: int, shape: Shape, classes: int, width: int):
        super().__init__()
        channels, height, breadth = shape
        self.merge, self.shape, self.classes = merge, shape, classes
        self.E = nn.Embedding(classes, d) if merge in ("mul", "add", "cat") else None
        inputs = {"cat": 2 * d, "ncat": d + classes}.get(merge, d)
        self.small = (width, -(-height // 4), -(-breadth // 4))
        self.project = nn.Linear(inputs, self.small[0] * self.small[1] * self.small[2])
        self.layers = nn.Sequential(
            nn.BatchNorm2d(width),
            nn.ConvTranspose2d(width, width, 4, 2, 1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(width, width // 2, 4, 2, 1),
            nn.BatchNorm2d(width // 2),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width // 2, channels, 3, 1, 1),
            nn.BatchNorm2d(channels),
            nn.Tanh(),
        )

    def h(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the merge operator o(z, y) of DFRD, Section 4.3."""
        match self.merge:
            case "mul":
                return z * self.embedded(y)
            case "add":
                return z + self.embedded(y)
            case "cat":
                return torch.cat([z, self.embedded(y)], 1)
            case "ncat":
                classes = torch.arange(self.classes, device=y.device)  # one_hot would wait for the GPU to check y
                return torch.cat([z, (y[:, None] == classes).to(z)], 1)
            case "none":
                return z

    def embedded(self, y: Tensor) -> Tensor:
        return cast(Tensor, cast(nn.Embedding, self.E)(y))

    def forward(self, h: Tensor) -> Tensor:
        s = self.layers(self.project(h).unflatten(1, self.small))
        return cast(Tensor, s[..., : self.shape[1], : self.shape[2]])  # sides that 4 does not divide were rounded up


class DCGAN(Generator):
    """The generator of DFRD's authors: transposed convolutions of 4 x 4 from one pixel, each but the first doubling the
    side, no norm behind the first, ReLU, tanh; weights ~ N(0, 0.02).

    At 32 x 32 and width 128 it has 512, 256 and 128 channels. Other sides have as many doublings as they need, and are
    cut.
    """

    def __init__(self, merge: Merge, d: int, shape: Shape, classes: int, width: int):
        super().__init__(merge, d, shape, classes, width)
        inputs = self.project.in_features
        del self.project
        doublings = max(1, math.ceil(math.log2(max(shape[1:]) / 4)))
        channels = [width * 2 ** (doublings - 1 - i) for i in range(doublings)]
        layers: list[nn.Module] = [nn.ConvTranspose2d(inputs, channels[0], 4, bias=False), nn.ReLU()]
        for before, after in itertools.pairwise(channels):
            layers += [nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.ConvTranspose2d(channels[-1], shape[0], 4, 2, 1, bias=False), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        for layer in self.layers:
            if isinstance(layer, nn.ConvTranspose2d):
                nn.init.normal_(layer.weight, 0.0, 0.02)

    def forward(self, h: Tensor) -> Tensor:
        s = self.layers(h[..., None, None])
        return cast(Tensor, s[..., : self.shape[1], : self.shape[2]])


NETWORKS: dict[Network, type[Generator]] = {"table7": Generator, "dcgan": DCGAN}


# --- labels ---------------------------------------------------------------------------------------------------------


def dynamic_weights(n: Tensor) -> Tensor:
    """Return tau_{i,y} = n_i^y / n_S^y from counts (clients, classes); 0 where nobody holds y (DFRD, Section 3.2)."""
    return n / n.sum(0).clamp_min(torch.finfo(n.dtype).tiny)


def label_distribution(n: Tensor) -> Tensor:
    """Return p(y) = n_S^y / sum_y n_S^y."""
    held = n.sum(0)
    return held / held.sum() if bool(held.sum() > 0) else torch.full_like(held, 1 / len(held))


class Sampler:
    """Draws z ~ N(0, I), or uniformly from [0, 1), and y ~ p(y), from one generator.

    Labels are drawn by inversion: torch.multinomial has no deterministic form on GPUs.
    """

    def __init__(self, p: Tensor, d: int, B: int, rng: torch.Generator, noise: str = "normal"):
        self.d, self.B, self.rng, self.noise = d, B, rng, noise
        cumulated = p.double().cpu().cumsum(0)
        self.cumulated = (cumulated / cumulated[-1]).to(rng.device)

        self._settled: list[tuple[Tensor, Tensor]] = []
        self._given = 0

    def settle(self, batches: int) -> Callable[[int], None]:
        """Draw so many batches beforehand, for recorded steps. The next calls give them, in memory that stays."""

        def draw(step: int) -> None:
            fresh = [self._draw() for _ in range(batches)]
            self._settled += [(z.clone(), y.clone()) for z, y in fresh[len(self._settled) :]]
            for kept, new in zip(self._settled, fresh, strict=False):
                for mine, drawn in zip(kept, new, strict=True):
                    mine.copy_(drawn)
            self._given, self._batches = 0, batches

        return draw

    def __call__(self) -> tuple[Tensor, Tensor]:
        if not self._settled:
            return self._draw()
        self._given += 1
        return self._settled[(self._given - 1) % self._batches]

    def _draw(self) -> tuple[Tensor, Tensor]:
        device = self.rng.device
        random = torch.rand if self.noise == "uniform" else torch.randn
        z = random(self.B, self.d, generator=self.rng, device=device)
        u = torch.rand(self.B, generator=self.rng, device=device, dtype=torch.float64)
        return z, torch.searchsorted(self.cumulated, u, right=True)


# --- teachers -------------------------------------------------------------------------------------------------------


def teach(teachers: Sequence[nn.Module], s: Tensor) -> Tensor:
    """Return f_i(s, theta_i) for all teachers, (teachers, rows, classes): the one place where they are called."""
    return answers(teachers, s)


def combined(logits: Tensor, tau: Tensor, y: Tensor, mean: Mean = "logits") -> Tensor:
    """Return sum_i tau_{i,y} f_i(s, theta_i) from the teachers' logits; tau is (teachers, classes).

    By probabilities, it is the logarithm of sum_i tau_{i,y} softmax f_i(s), which is a vector of logits again.
    """
    weights = tau[:, y, None]
    if mean == "logits":
        return (weights * logits).sum(0)
    shares = (weights * logits.softmax(-1)).sum(0)
    return shares.clamp_min(torch.finfo(shares.dtype).tiny).log()


def weighted(teachers: Sequence[nn.Module], tau: Tensor, mean: Mean = "logits") -> Ensemble:
    """Return the ensemble of Eqs. 2, 3 and 7 as a function of synthetic data and their labels."""
    return lambda s, y: combined(teach(teachers, s), tau, y, mean)


# --- losses ---------------------------------------------------------------------------------------------------------


def epsilon(mask: Mask, student: Tensor, teacher: Tensor, y: Tensor) -> Tensor:
    """Return which rows count for transferability: DFRD's (diamond), FedFTG's (triangle), DENSE's (nabla).

    `one-right` is DENSE's in the code of DFRD's authors: exactly one of the two says y.
    """
    if mask == "fedftg":
        return torch.ones_like(y, dtype=student.dtype)
    f, ensemble = student.argmax(1), teacher.argmax(1)
    match mask:
        case "dfrd":
            counts = (f != y) & (ensemble == y)
        case "dense":
            counts = f != ensemble
        case "one-right":
            counts = (f == y) != (ensemble == y)
    return counts.to(student.dtype)


def discrepancy(teacher: Tensor, student: Tensor, tran: Transfer = "teacher-student", T: float = 1.0) -> Tensor:
    """Return how far teacher and student are apart for the generator, one value per row: Eq. 3 without its mask.

    `student-detached` is KL(student, teacher) without a gradient through the student, as DFRD's authors have it.
    """
    return kl(teacher, student, T) if tran == "teacher-student" else kl(student.detach(), teacher, T)


def share(counts: Tensor, rows: Rows = "all") -> Tensor:
    """Return the weights of rows in a mean: over all rows, or over those that count alone (none of them: all 0)."""
    return counts if rows == "all" else counts * (len(counts) / counts.sum().clamp_min(1))


def _norms(a: Tensor) -> Tensor:
    """Return how far all rows are from each other. The quick way has no gradient where two rows are equal."""
    return torch.cdist(a, a, compute_mode="donot_use_mm_for_euclid_dist")


def _mean_squares(a: Tensor) -> Tensor:
    return _norms(a).square() / a.shape[1]  # differences of all pairs at once would be as large as the batch squared


def diversity(s: Tensor, h: Tensor, metric: Metric = "mean") -> Tensor:
    """Return Eq. 4: exp(-sum_{j,k} |s_j - s_k| |h_j - h_k| / B^2).

    `mean` is the form in public code of this family: the mean absolute difference of the images times the mean squared
    difference of their inputs. `ms` is that of DFRD's authors: mean squared differences of both. `l2` has the plain
    norms that are printed, which grow with the number of pixels.
    """
    s, h = s.flatten(1), h.flatten(1)
    match metric:
        case "mean":
            apart = torch.cdist(s, s, p=1) / s.shape[1] * _mean_squares(h)
        case "ms":
            apart = _mean_squares(s) * _mean_squares(h)
        case "l2":
            apart = _norms(s) * _norms(h)
    return torch.exp(-apart.mean())
