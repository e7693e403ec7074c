"""Batch norms that leave rows out, against torch's on the rows that count."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedaudit.training.stacked.masked_norms import (
    COUNT,
    CountingTogether,
    MaskedNorms,
    Unmaskable,
    batch_norm,
    counts_of,
    maskable,
    one_channel,
)

MASK = torch.tensor([True, False, True, True, False])


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 2, 4)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
def test_statistics_are_those_of_the_rows_that_count(shape: tuple[int, ...], affine: bool, tracked: bool) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    norm = kind(3, momentum=0.3, eps=0.01, affine=affine, track_running_stats=tracked).double()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if affine:
        nn.init.uniform_(norm.weight, 1, 2)
        nn.init.uniform_(norm.bias, 1, 2)
    if tracked:
        norm.running_mean.fill_(2.0)  # type: ignore[union-attr]
    theirs = copy.deepcopy(norm)
    with MaskedNorms(MASK):
        mine = norm(x)
    assert torch.allclose(mine[MASK], theirs(x[MASK]))
    if tracked:
        assert torch.allclose(norm.running_mean, theirs.running_mean)  # type: ignore[arg-type]
        assert torch.allclose(norm.running_var, theirs.running_var)  # type: ignore[arg-type]
    assert mine.shape == x.shape


def test_in_evaluation_and_elsewhere_nothing_is_changed() -> None:
    norm = nn.BatchNorm1d(3).eval()
    x = torch.randn(4, 3)
    with MaskedNorms(MASK):
        assert torch.equal(norm(x), F.batch_norm(x, torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3)))
        assert torch.equal(F.relu(x), x.clamp(min=0))
    with MaskedNorms(MASK), pytest.raises(Unmaskable, match="saw 4 rows of a batch of 5"):
        norm.train()(x)


def test_what_is_not_said_is_as_in_torch() -> None:
    x, mean, var = torch.tensor([[1.0], [3.0]]), torch.zeros(1), torch.ones(1)
    out = batch_norm(torch.tensor([True, True]), x, mean, var)
    assert out.flatten().tolist() == pytest.approx([-1 / (1 + 1e-5) ** 0.5, 1 / (1 + 1e-5) ** 0.5], abs=1e-7)
    assert (mean.item(), var.item()) == pytest.approx((0.2, 0.9 + 0.1 * 2.0)), "a tenth, of the unbiased variance"


def test_which_norms_can_leave_rows_out() -> None:
    class Own(nn.BatchNorm1d):
        pass

    kinds = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2)]
    assert all(map(maskable, kinds))
    assert not any(map(maskable, [Own(2), nn.BatchNorm1d(2, momentum=None), nn.GroupNorm(1, 2), nn.SyncBatchNorm(2)]))


@pytest.mark.parametrize(
    ("layer", "training", "found"),
    [
        (nn.BatchNorm1d(1), True, True), (nn.BatchNorm1d(1), False, False), (nn.BatchNorm1d(2), True, False),
        (nn.BatchNorm1d(1, track_running_stats=False), False, True), (nn.Linear(1, 1), True, False),
    ],
    ids=["training", "evaluation", "two channels", "untracked", "no norm"],
)  # fmt: skip
def test_norms_of_one_channel_that_look_at_the_batch(layer: nn.Module, training: bool, found: bool) -> None:
    assert one_channel(nn.Sequential(nn.BatchNorm2d(3), layer).train(training)) is found


def test_batches_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One addition for all norms: none for a norm that did not run, two for one that ran twice. Other additions, and
    other counts, are done as they come."""
    net = nn.ModuleList([nn.BatchNorm1d(3, affine=False) for _ in range(4)])
    counts = [norm.num_batches_tracked for norm in net]
    counts[0].fill_(5)
    added: list[int] = []
    inner = torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda of, by: added.append(len(of)) or inner(of, by))
    x, total = torch.randn(4, 3), torch.zeros(2)
    with CountingTogether(counts[:3]) as together:
        net[0](net[0](x))
        net[1](x)
        net[3](x)
        total.add_(1)
        total += torch.ones(2)  # as a residual block adds
        counts[2].add_(2)
        counts[2].add_(1, alpha=3)
        counts[2].sub_(1)
        assert [int(count) for count in counts] == [5, 0, 4, 1]
        assert counts[1].add_(1) is counts[1]
    together.add()
    assert [int(count) for count in counts] == [7, 2, 4, 1]
    assert added == [2, 2]
    assert total.tolist() == [2, 2]
    together.add()
    assert [int(count) for count in counts] == [7, 2, 4, 1], "each is added once"
    assert {name.rpartition(".")[2] for name, t in net.named_buffers() if not t.is_floating_point()} == {COUNT}


def test_counts_that_nobody_reads_at_once() -> None:
    """A batch norm without a momentum averages over all batches, and reads their number as soon as it has counted."""
    kinds = nn.BatchNorm1d(2), nn.BatchNorm2d(2, momentum=None), nn.BatchNorm1d(2, track_running_stats=False)
    assert counts_of(nn.Sequential(*kinds, nn.Linear(1, 1))) == ["0.num_batches_tracked"]
    assert counts_of(kinds[0]) == ["num_batches_tracked"]
