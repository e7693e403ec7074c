"""Shared by the inversion attacks: an image prior, gradient descent on images, an inversion network, and the model
behind a release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedaudit.attack.scene import Scene
from fedaudit.attacks.shared._view import model_of, received
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.progress import Watch, unwatched
from fedaudit.runtime.lockstep import join
from fedaudit.shape import Shape
from fedaudit.training import forward
from fedaudit.training.fit import batches
from fedaudit.training.models import Net
from fedaudit.wire.release import Protection
from fedaudit.wire.transcript import TranscriptEntry

Rows = Callable[[Tensor, Tensor], Tensor]  # images and their numbers in; one value per image out


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, one value per image."""
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1)
    across = (x[..., 1:] - x[..., :-1]).abs().flatten(1)
    return down.mean(1) + across.mean(1)


def descend(
    loss: Rows,
    starts: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float,
    restarts: int = 1,
    batch: int = 64,
    signed: bool = False,
    tell: Watch = unwatched,
) -> tuple[Tensor, Tensor]:
    """Return images in [-1, 1] with a small loss, each the best of its restarts, and those losses.

    `starts(r)` gives restart r's images. `signed`: Adam sees the gradient's sign only (Geiping et al.). The step falls
    to a tenth at three eighths, five eighths and seven eighths of the way, as there.
    """
    best, value = torch.empty(0), torch.empty(0)
    for r in range(restarts):
        start = starts(r)
        found: list[Tensor] = []
        at: list[Tensor] = []
        for index in torch.arange(len(start), device=start.device).split(batch):
            done = sum(map(len, found))
            x = start[index].clone().requires_grad_()
            optimiser = torch.optim.Adam([x], lr=lr)
            falls = [steps * k // 8 for k in (3, 5, 7)]
            schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, falls, gamma=0.1)
            for step in range(steps):
                tell(r + (done + len(index) * step / steps) / len(start), restarts, f"step {step} of {steps}")
                (x.grad,) = torch.autograd.grad(loss(x, index).sum(), x)
                if signed:
                    x.grad.sign_()
                optimiser.step()
                schedule.step()
                with torch.no_grad():
                    x.clamp_(-1, 1)
            found.append(x.detach())
            at.append(loss(x, index).detach())
        images, reached = torch.cat(found), torch.cat(at)
        if r == 0:
            best, value = images, reached
        else:
            better = reached < value
            best = torch.where(better[:, None, None, None], images, best)
            value = torch.where(better, reached, value)
    return best, value


class Inverter(nn.Module):
    """A network from a vector to an image: a linear layer to a quarter of the size, two times up-sampling and
    convolution.
    """

    def __init__(self, inputs: int, shape: Shape, width: int) -> None:
        super().__init__()
        channels, self.height, self.breadth = shape
        self.seed = (2 * width, math.ceil(self.height / 4), math.ceil(self.breadth / 4))
        self.linear = nn.Sequential(nn.Linear(inputs, math.prod(self.seed)), nn.LeakyReLU(0.2))
        self.layers = nn.Sequential(
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Tanh(),
        )
        for before_norm in (
            self.layers[1],
            self.layers[5],
        ):  # the norm removes a bias: Adam would follow rounding errors
            before_norm.bias.requires_grad_(False)

    def forward(self, e: Tensor) -> Tensor:
        image = self.layers(self.linear(e).unflatten(1, self.seed))
        return image[..., : self.height, : self.breadth]


def learn(
    draw: Callable[[Tensor], tuple[Tensor, Tensor]],
    records: int,
    shape: Shape,
    *,
    steps: int,
    batch: int,
    width: int,
    lr: float,
    rng: torch.Generator,
    tell: Watch = unwatched,
) -> Callable[[Tensor], Tensor]:
    """Train an inverter in squared error, and return it as a function. `draw(index)` gives inputs and images.

    Inputs are standardised by the first draw of all records, because embeddings come in any scale.
    """
    first, images = draw(torch.arange(records, device=rng.device))
    spread = first.std(0, correction=0)
    # An entry that never varies on the attacker's own images may vary on the client's. It must not blow up there.
    mean, scale = first.mean(0), spread.clamp(min=max(0.1 * float(spread.mean()), 1e-6))
    model = Inverter(first.shape[1], shape, width).to(images.device).train()

    def standard(index: Tensor) -> tuple[Tensor, Tensor]:
        e, x = draw(index)
        return (e - mean) / scale, x

    join(Inverting(model, standard, records, steps, batch, lr, rng, tell))
    model.eval()
    return lambda e: forward.in_chunks(lambda part: model((part - mean) / scale), e, 512)


@dataclass(frozen=True, eq=False)
class Inverting:
    """The training of one inverter. The trainings for several clients can be one stack.

    Each has its own inputs, and draws them from its own generator, as alone.
    """

    model: Inverter
    draw: Callable[[Tensor], tuple[Tensor, Tensor]]
    records: int
    steps: int
    batch: int
    lr: float
    rng: torch.Generator
    tell: Watch = unwatched

    def like(self, other: object) -> bool:
        same = ("records", "steps", "batch", "lr")
        return (
            isinstance(other, Inverting)
            and stacks_on(self.rng.device)
            and all(getattr(self, name) == getattr(other, name) for name in same)
            and self.rng.device == other.rng.device
            and _shapes(self.model) == _shapes(other.model)
        )

    def alone(self) -> None:
        free = [p for p in self.model.parameters() if p.requires_grad]
        self._train([self], free, lambda es: [self.model(es[0])])

    def together(self, others: Sequence[Inverting]) -> list[None]:
        """Train all inverters as one stack: weights and statistics get one more dimension.

        The losses are summed. An inverter's weights reach its own loss alone, so that each gets the gradient that it
        would get by itself.
        """
        jobs = [self, *others]
        before = [job.rng.get_state() for job in jobs]
        of_each = [dict(job.model.named_parameters()) for job in jobs]
        weights = {
            name: torch.stack([own[name].detach() for own in of_each]).requires_grad_(p.requires_grad)
            for name, p in of_each[0].items()
        }
        free = [stacked for stacked in weights.values() if stacked.requires_grad]
        kept = [dict(job.model.named_buffers()) for job in jobs]
        statistics = {name: torch.stack([b[name] for b in kept]) for name in kept[0]}

        def one(weights: dict[str, Tensor], statistics: dict[str, Tensor], e: Tensor) -> Tensor:
            return functional_call(self.model, (weights, statistics), (e,))

        mapped = vmap(one)
        try:
            self._train(jobs, free, lambda es: mapped(weights, statistics, torch.stack(es)))
        except BaseException:
            for job, state in zip(jobs, before, strict=True):
                job.rng.set_state(state)
            raise
        with torch.no_grad():
            for i, (own, buffers) in enumerate(zip(of_each, kept, strict=True)):
                for name, tensor in {**own, **buffers}.items():
                    tensor.copy_((weights if name in weights else statistics)[name][i])
        return [None] * len(jobs)

    def _train(
        self, jobs: Sequence[Inverting], free: Sequence[Tensor], images: Callable[[list[Tensor]], Iterable[Tensor]]
    ) -> None:
        optimiser = torch.optim.Adam(free, lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(self.steps, 1))
        whom = "inverter" if len(jobs) == 1 else f"inverters of {len(jobs)} clients"
        orders = [_endless(job.records, job.batch, job.rng, job.steps) for job in jobs]
        for step in range(self.steps):
            self.tell(step, self.steps, f"{whom}, step {step} of {self.steps}")
            drawn = [job.draw(next(order)) for job, order in zip(jobs, orders, strict=True)]
            made = images([e for e, _ in drawn])
            loss = torch.stack([(x_ - x).square().mean() for x_, (_, x) in zip(made, drawn, strict=True)]).sum()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            schedule.step()


# Where small networks are stacked: many small kernels leave a GPU idle. On a processor a stack was no faster; what it
# gains on a GPU is measured by the lines `decoders` and `matching` of benchmarks/gpu_speed.py (docs/results/speed.md).
STACKS = {"cuda"}
CLIENTS = 16  # clients that are attacked at the same time on a GPU


def stacks_on(device: torch.device) -> bool:
    return device.type in STACKS


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: t.shape for name, t in model.state_dict().items()}


def _endless(n: int, size: int, rng: torch.Generator, steps: int) -> Iterator[Tensor]:
    done = 0
    while done < steps:
        for index in batches(n, min(size, n), rng):
            yield index
            done += 1
            if done == steps:
                return


# --- what the transcript shows --------------------------------------------------------------------------------------


def per_record(scene: Scene, kind: str) -> list[tuple[TranscriptEntry, str]]:
    """Return the target's uploads of a kind with one row per record, oldest first."""
    return [(e, name) for e, name in scene.released(kind) if e.fields[name].unit == "record"]


def model_at(scene: Scene, entry: TranscriptEntry) -> Net | None:
    """Return the target's model when it made this upload.

    It is the one in the same message, or else the one that the target had been sent before it in that round. Returns
    None if neither was seen, kept, and a whole model.
    """
    for name, field in entry.fields.items():
        whole = field.kind == "weights" and entry.kept(name)
        if whole and (found := model_of(scene, scene.target, entry[name])) is not None:
            return found.requires_grad_(False).eval()
    found = received(scene, entry)
    return None if found is None else found.requires_grad_(False).eval()


def starts(scene: Scene, n: int, rng: torch.Generator) -> Callable[[int], Tensor]:
    """Return a function that gives the start of descent for each restart.

    The first is the mean of the auxiliary images (grey if there are none), the others are noise around it.
    """
    x, _ = scene.auxiliary
    mean = x.mean(0) if len(x) else torch.zeros(scene.shape, device=scene.device)

    def start(r: int) -> Tensor:
        noise = torch.randn(n, *scene.shape, generator=rng, device=scene.device)
        return (mean + (0.5 if r else 0.05) * noise).clamp(-1, 1)

    return start


def same_noise(rows: Tensor, protection: Protection | None, rng: torch.Generator) -> Tensor:
    """Return what would have been released of these rows, clipped and noised by the mechanism's public parameters."""
    if protection is None:
        return rows
    return mechanism_of(protection).imitated(rows, protection, rng)
