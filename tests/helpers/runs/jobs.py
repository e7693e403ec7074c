"""Trainings of small models that differ in how much they train, for tests of stacks and of recorded steps."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedaudit import Augment, Running, adam, ce, sgd
from fedaudit.training import models
from fedaudit.training.fit import Fitted
from fedaudit.training.stacked.stack import Job


def held_out(f: Any, x: Tensor, y: Tensor, held: Tensor) -> Tensor:
    return cross_entropy(f(x).masked_fill(held == 0, 0.0), y, reduction="none").mean()


def pulled(f: Any, x: Tensor, y: Tensor, towards: dict[str, Tensor]) -> Tensor:
    far = sum((p - towards[name]).square().sum() for name, p in f.params.items())
    return cross_entropy(f(x), y, reduction="none") + 0.1 * far


def mirrored(f: Any, x: Tensor, y: Tensor) -> Tensor:
    """One value per row, through a pass of twice as many."""
    straight, turned = f(torch.cat([x, x.flip(-1)])).chunk(2)
    return cross_entropy(straight + turned, y, reduction="none")


def until_fits(f: Any, x: Tensor, y: Tensor) -> bool:
    return float(cross_entropy(f(x), y)) < 0.5


def until_nearly_fits(f: Any, x: Tensor, y: Tensor) -> bool:
    return float(cross_entropy(f(x), y)) < 1.2


def scored(f: Any, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of each row, and whether its label is right."""
    out = f(x)
    losses = cross_entropy(out, y, reduction="none")
    return torch.stack([losses, (out.argmax(1) == y).to(losses.dtype)], 1)


def scored_and_shifted(f: Any, x: Tensor, y: Tensor, shift: Tensor) -> Tensor:
    return scored(lambda x: f(x) + shift, x, y)


def make(arch: str, counts: list[int], each: Any = None, **options: Any) -> list[Job]:
    """Jobs with so many records each; `each(i, model)` gives further options of job i."""
    jobs = []
    for i, n in enumerate(counts):
        torch.manual_seed(i)
        model = models.build(arch, shape=(1, 8, 8), classes=4).to(torch.float64).eval()
        rows = torch.randn(n, 1, 8, 8, dtype=torch.float64), torch.randint(4, (n,))
        loss = options.get("loss", ce)
        mine = {"opt": sgd(0.1), "batch": 4, "epochs": 2, **options, **(each(i, model) if each else {})}
        mine.pop("loss", None)
        jobs.append(Job(model, loss, rows, torch.Generator().manual_seed(i), mine))
    return jobs


def make_single(arch: str, counts: list[int], **options: Any) -> list[Job]:
    """Return jobs whose models and rows are in single precision, of which 16 bits are an approximation."""
    jobs = make(arch, counts, **options)
    for job in jobs:
        job.model.float()
        object.__setattr__(job, "rows", (job.rows[0].float(), job.rows[1]))
    return jobs


def distance(these: list[Job], those: list[Job]) -> float:
    return max(
        float((a - b).abs().max())
        for p, q in zip(these, those, strict=True)
        for a, b in zip(p.model.state_dict().values(), q.model.state_dict().values(), strict=True)
    )


CASES: dict[str, dict[str, Any]] = {
    "unequal counts": {"arch": "mlp"},
    "momentum, decay, nesterov": {
        "arch": "cnn@0.25",
        "opt": sgd(0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    },
    "adam keeps each model's own count": {"arch": "cnn@0.25", "opt": adam(1e-2, weight_decay=1e-2)},
    "batch norm": {"arch": "cnn_bn@0.25", "opt": sgd(0.1, momentum=0.9)},
    "batch norm, own batch sizes": {
        "arch": "cnn_bn@0.25",
        "opt": sgd(0.1, momentum=0.9),
        "each": lambda i, m: {"batch": (3, 8, 64, 5)[i], "epochs": 3},
    },
    "batch norm that sees other rows": {"arch": "cnn_bn@0.25", "loss": mirrored},
    "batch norm left alone": {"arch": "cnn_bn@0.25", "norms": "running"},
    "until": {"arch": "mlp", "epochs": 15, "until": until_fits},
    "until with batch norm": {"arch": "cnn_bn@0.25", "epochs": 8, "until": until_nearly_fits},
    "running": {
        "arch": "mlp",
        "loss": scored_and_shifted,
        "epochs": 25,
        "each": lambda i, m: {
            "until": Running((0.7, 0.6, 0.8, 0.1)[i]),
            "given": {"shift": torch.tensor([0.1 * i, 0.0, 0.0, 0.0], dtype=torch.float64)},
        },
    },
    "running, augmented, batch norm": {
        "arch": "cnn_bn@0.25",
        "loss": scored,
        "epochs": 8,
        "augment": Augment(crop=1, flip=True),
        "each": lambda i, m: {"until": Running((0.4, 0.1, 0.3, 0.45)[i])},
    },
    "own numbers of epochs": {"arch": "mlp", "each": lambda i, m: {"epochs": i}},
    "own numbers of steps": {"arch": "mlp", "each": lambda i, m: {"epochs": None, "steps": 3 + 2 * i}},
    "own batch sizes": {"arch": "mlp", "each": lambda i, m: {"batch": 2 + 3 * i}},
    "whole batches": {"arch": "mlp", "batch": 64},
    "given": {
        "arch": "mlp",
        "loss": pulled,
        "each": lambda i, m: {"given": {"towards": {k: p.detach() + 0.1 for k, p in m.named_parameters()}}},
    },
    "adam, and models that come differently far": {
        "arch": "mlp",
        "loss": held_out,
        "separable": False,
        "opt": adam(1e-2),
        "each": lambda i, m: {"given": {"held": torch.tensor([1, 1, i % 2, 1])}},
    },
    "cosine, by epoch": {
        "arch": "cnn@0.25",
        "opt": adam(1e-2, schedule="cosine"),
        "each": lambda i, m: {"epochs": 2 + i},
    },
    "cosine, by step": {
        "arch": "mlp",
        "opt": sgd(0.1, momentum=0.9, schedule="cosine"),
        "each": lambda i, m: {"epochs": None, "steps": 5 + 2 * i},
    },
    "augmented": {"arch": "mlp", "augment": Augment(crop=2, flip=True, jitter=0.4)},
    "augmented, batch norm": {"arch": "cnn_bn@0.25", "augment": Augment(crop=1, fill=0.5), "epochs": 3},
    "does not separate": {
        "arch": "mlp",
        "loss": held_out,
        "separable": False,
        "each": lambda i, m: {"given": {"held": torch.tensor([1, 1, i % 2, 1])}},
    },
}
COUNTS = [13, 30, 21, 8]  # batches of 4: one of 5 at the end of 13 and 21, one of 2 of 30, none of 8


@functools.cache
def trained(case: str) -> tuple[list[Job], list[Fitted]]:
    """A case's models, trained one by one, and what was said of each: to hold others against, and not to go on with."""
    jobs = make(counts=COUNTS, **CASES[case])
    return jobs, [job.alone() for job in jobs]
