"""torchdigits: the model, the data of one partition, and how both are used."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

SPARE = 200  # images that no node gets


class Net(nn.Module):
    """A small network for images of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def shuffled():
    """All images, from -1 to 1, in an order that is the same on every node."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2024))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    return x[order], torch.tensor(labels)[order]


def load_data(partition_id, num_partitions):
    """One node's training images and its test images."""
    x, y = (part[SPARE:] for part in shuffled())
    mine = torch.arange(partition_id, len(y), num_partitions)
    train, test = mine[: len(mine) * 3 // 4], mine[len(mine) * 3 // 4 :]
    return (x[train], y[train]), (x[test], y[test])


def batches(n, size, epoch):
    """The order of one epoch, in batches."""
    return torch.randperm(n).split(size)


def train(net, data, epochs, batch_size, lr):
    """Train in place; returns the mean loss of the last epoch."""
    x, y = data
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    net.train()
    total = 0.0
    for epoch in range(epochs):
        total = 0.0
        for rows in batches(len(y), batch_size, epoch):
            optimizer.zero_grad()
            loss = cross_entropy(net(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
    return total / len(y)


@torch.no_grad()
def test(net, data):
    """Loss and accuracy."""
    x, y = data
    logits = net.eval()(x)
    return cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()
