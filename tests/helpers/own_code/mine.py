"""Models and data as somebody outside the package would bring them, reached as `mine:name`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedaudit.data import Arrays

WORDS, LENGTH = 40, 10


class Net(nn.Module):
    """For any records of numbers; the head is written down first, and reached last."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(16, classes)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class TwoLayerHead(nn.Module):
    """Classifies with two layers; which of them belong to the classifier only its author knows."""

    def __init__(self, shape: tuple[int, ...], num_classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 12), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body(x))


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Linear(int(np.prod(shape)), classes)


class Reader(nn.Module):
    """Texts by torch's own embedding and attention."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        return self.out(self.attend(x, x, x, need_weights=False)[0].mean(1))


def cancer() -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's breast cancer data, 569 rows of 30 positive features, scaled without a look at them."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    return np.log(found.data + 0.01) / 3, found.target


def texts() -> Arrays:
    """Made: 360 texts of 4 to 10 tokens; a class has words that it likes."""
    rng = np.random.default_rng(0)
    y = np.arange(360) % 3
    likes = rng.dirichlet(np.full(WORDS - 1, 0.2), size=3)
    x = np.stack([1 + rng.choice(WORDS - 1, LENGTH, p=likes[label]) for label in y])
    x[np.arange(LENGTH) >= rng.integers(4, LENGTH + 1, len(y))[:, None]] = 0
    return Arrays(x, y, class_names=("sport", "law", "food"), vocabulary=WORDS)


def by_domain() -> dict[str, np.ndarray]:
    x, y = cancer()
    return {"x": x, "y": y, "domain": np.where(np.arange(len(y)) % 2, "north", "south")}


def drawn() -> tuple[np.ndarray, Tensor]:
    """Draws its records: from the global generators, which are the same whenever it is called."""
    return np.random.rand(120, 4).astype(np.float32), torch.randint(2, (120,))
