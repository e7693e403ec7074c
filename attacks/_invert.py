"""What the inversion attacks share: an image prior, gradient descent on images, an inversion network, and the model
behind a release."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from fedaudit.attack.scene import Scene
from fedaudit.attacks._view import model_of, received
from fedaudit.privacy.mechanism import clip_rows
from fedaudit.shape import Shape
from fedaudit.training import forward
from fedaudit.training.fit import batches
from fedaudit.training.models import Net
from fedaudit.watch import Watch, unwatched
from fedaudit.wire.release import Protection
from fedaudit.wire.transcript import Entry

Rows = Callable[[Tensor, Tensor], Tensor]  # images and their numbers in; one value per image out


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels, one value per image."""
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
    """Images in [-1, 1] with a small loss, each the best of its restarts, and those losses.

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
    """From a vector to an image: a linear layer to a quarter of the size, two times up-sampling and convolution."""

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
    """Train an inverter in squared error; returns it as a function. `draw(index)` gives inputs and images.

    Inputs are standardised by what the first draw of all records says: embeddings come in any scale.
    """
    first, images = draw(torch.arange(records, device=rng.device))
    spread = first.std(0, correction=0)
    # What never varies on the attacker's own images may on the client's: it must not blow up there.
    mean, scale = first.mean(0), spread.clamp(min=max(0.1 * float(spread.mean()), 1e-6))
    model = Inverter(first.shape[1], shape, width).to(images.device).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(steps, 1))
    for step, index in enumerate(_endless(records, batch, rng, steps)):
        tell(step, steps, f"inverter, step {step} of {steps}")
        e, x = draw(index)
        loss = (model((e - mean) / scale) - x).square().mean()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
    model.eval()

    return lambda e: forward.in_chunks(lambda part: model((part - mean) / scale), e, 512)


def _endless(n: int, size: int, rng: torch.Generator, steps: int) -> Iterator[Tensor]:
    done = 0
    while done < steps:
        for index in batches(n, min(size, n), rng):
            yield index
            done += 1
            if done == steps:
                return


# --- what the transcript shows --------------------------------------------------------------------------------------


def per_record(scene: Scene, kind: str) -> list[tuple[Entry, str]]:
    """The target's uploads of a kind with one row per record, oldest first."""
    return [(e, name) for e, name in scene.released(kind) if e.fields[name].unit == "record"]


def model_at(scene: Scene, entry: Entry) -> Net | None:
    """The target's model when it made this upload: from the same message, or else what it had been sent before it in
    that round. None where neither was seen, kept, and a whole model."""
    for name, field in entry.fields.items():
        whole = field.kind == "weights" and entry.kept(name)
        if whole and (found := model_of(scene, scene.target, entry[name])) is not None:
            return found.requires_grad_(False).eval()
    found = received(scene, entry)
    return None if found is None else found.requires_grad_(False).eval()


def starts(scene: Scene, n: int, rng: torch.Generator) -> Callable[[int], Tensor]:
    """Where descent begins: at the mean of the auxiliary images (grey if there are none), then at noise around it."""
    x, _ = scene.auxiliary
    mean = x.mean(0) if len(x) else torch.zeros(scene.shape, device=scene.device)

    def start(r: int) -> Tensor:
        noise = torch.randn(n, *scene.shape, generator=rng, device=scene.device)
        return (mean + (0.5 if r else 0.05) * noise).clamp(-1, 1)

    return start


def same_noise(rows: Tensor, protection: Protection | None, rng: torch.Generator) -> Tensor:
    """What would have been released of these rows: clipped and noised as the mechanism's public parameters say."""
    if protection is None:
        return rows
    noise = torch.randn(rows.shape, generator=rng, device=rows.device, dtype=rows.dtype)
    if protection.mechanism == "pure-noise":
        return noise
    clipped = clip_rows(rows, protection.clip) if protection.clip is not None else rows
    return clipped + (protection.sigma or 0.0) * noise
