"""Gradients of single rows against a slow loop over records, and clipping against opacus."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, mse_loss, softmax

from fedaudit.errors import ContractError, PrivacyError
from fedaudit.privacy.persample import clip_and_sum, repair, row_gradients, validate

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook:UserWarning")  # opacus' hooks

B = 7


class Net(nn.Module):
    def __init__(self, *norm: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8)
        )
        self.classifier = nn.Linear(8, 5)
        self.register_buffer("scale", torch.tensor(0.7))

    def encode(self, x: Tensor) -> Tensor:
        return self.scale * self.encoder(x)

    def classify(self, e: Tensor) -> Tensor:
        return self.classifier(e)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.encode(x))


class Live:
    """`f` as ordinary training offers it."""

    def __init__(self, model: Net) -> None:
        self.model, self.encode, self.classify = model, model.encode, model.classify
        self.params = dict(model.named_parameters())

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)


def plain(f: Any, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(f(x), y, reduction="none")


def proximal(f: Any, x: Tensor, y: Tensor, w0: dict[str, Tensor], rho: float) -> Tensor:
    drift = sum(((p - w0[name]) ** 2).sum() for name, p in f.params.items())
    return cross_entropy(f(x), y, reduction="none") + rho / 2 * drift


def mixed(f: Any, x: Tensor, y: Tensor, teacher: Tensor, anchor: Tensor) -> Tensor:
    e = f.encode(x)
    logits = f.classify(e)
    distil = kl_div(log_softmax(logits / 2, 1), softmax(teacher / 2, 1), reduction="none").sum(1)
    return cross_entropy(logits, y, reduction="none") + 3 * distil + mse_loss(e, anchor[y], reduction="none").mean(1)


@pytest.fixture
def model() -> Net:
    torch.manual_seed(3)
    return Net()


@pytest.fixture
def rows() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    x, teacher = torch.randn(B, 2, 6, 6, generator=g), torch.randn(B, 5, generator=g)
    return x, torch.randint(5, (B,), generator=g), teacher


def settings(loss: Any, model: Net, rows: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    if loss is mixed:
        return rows, {"anchor": torch.linspace(-1, 1, 40).view(5, 8)}
    if loss is proximal:
        return rows[:2], {"w0": {n: p.detach() + 0.1 for n, p in model.named_parameters()}, "rho": 0.3}
    return rows[:2], {}


def slowly(model: Net, loss: Any, rows: tuple[Tensor, ...], given: dict[str, Any]) -> dict[str, Tensor]:
    """One record at a time, by ordinary autograd."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    each = []
    for i in range(len(rows[0])):
        value = loss(Live(model), *(row[i : i + 1] for row in rows), **given).sum()
        each.append(torch.autograd.grad(value, list(trainable.values()), materialize_grads=True))
    return {n: torch.stack(g) for n, g in zip(trainable, zip(*each, strict=True), strict=True)}


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("loss", [plain, proximal, mixed])
def test_against_a_loop_over_records(loss: Any, chunk_size: int | None, model: Net, rows: tuple[Tensor, ...]) -> None:
    rows, given = settings(loss, model, rows)
    before = copy.deepcopy(model.state_dict())
    fast = row_gradients(model, loss, rows, given, chunk_size=chunk_size)
    slow = slowly(model, loss, rows, given)
    assert list(fast) == list(slow)
    for name, g in fast.items():
        assert g.shape == (B, *model.get_parameter(name).shape)
        assert not g.requires_grad
        torch.testing.assert_close(g, slow[name], rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_opacus_hooks_miss_the_proximal_term(model: Net, rows: tuple[Tensor, ...]) -> None:
    """The reason for this file: the same loss through opacus loses rho (w - w0) = -0.03, without a word."""
    from opacus import GradSampleModule

    rows, given = settings(proximal, model, rows)
    hooked = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    proximal(Live(hooked._module), *rows, **given).sum().backward()
    ours = row_gradients(model, proximal, rows, given)
    for name, p in hooked._module.named_parameters():
        torch.testing.assert_close(ours[name] - p.grad_sample, torch.full_like(p.grad_sample, -0.03))


@pytest.mark.parametrize("C", [1e-3, 0.5, 2.0, 1e3])
def test_gradients_and_clipping_equal_opacus(C: float, model: Net, rows: tuple[Tensor, ...]) -> None:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    x, y, _ = rows
    hooked = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(hooked.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=C, expected_batch_size=B
    )
    cross_entropy(hooked(x), y, reduction="sum").backward()
    ours = row_gradients(model, plain, (x, y))
    theirs = dict(hooked._module.named_parameters())
    for name, g in ours.items():
        torch.testing.assert_close(g, theirs[name].grad_sample, rtol=1e-5, atol=1e-5)
    optimizer.clip_and_accumulate()
    summed, norms = clip_and_sum(ours, C)
    assert norms.shape == (B,)
    for name, g in summed.items():
        torch.testing.assert_close(g, theirs[name].summed_grad, rtol=1e-5, atol=1e-5 * min(C, 1))


def test_clipping_by_hand() -> None:
    """Norms over all parameters: 5, 0.5, 0. With C = 1 the first is divided by 5, the others stay."""
    grads = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0], [0.0, 0.0]]), "b": torch.tensor([4.0, 0.4, 0.0])}
    summed, norms = clip_and_sum(grads, 1.0)
    torch.testing.assert_close(norms, torch.tensor([5.0, 0.5, 0.0]))
    torch.testing.assert_close(summed["a"], torch.tensor([0.9, 0.0]))
    torch.testing.assert_close(summed["b"], torch.tensor(1.2))
    assert (
        torch.stack([s.norm() for s in clip_and_sum({n: g[:1] for n, g in grads.items()}, 1.0)[0].values()]).norm() < 1
    )


def test_an_empty_sample_sums_to_zero(model: Net, rows: tuple[Tensor, ...]) -> None:
    grads = row_gradients(model, plain, (rows[0][:0], rows[1][:0]))
    summed, norms = clip_and_sum(grads, 1.0)
    assert len(norms) == 0
    assert all(torch.equal(summed[n], torch.zeros_like(p)) for n, p in model.named_parameters())


def test_only_trainable_parameters_count(model: Net, rows: tuple[Tensor, ...]) -> None:
    rows, given = settings(proximal, model, rows)
    model.encoder.requires_grad_(False)
    fast, slow = row_gradients(model, proximal, rows, given), slowly(model, proximal, rows, given)
    assert list(fast) == ["classifier.weight", "classifier.bias"]
    for name in fast:
        torch.testing.assert_close(fast[name], slow[name])


@pytest.mark.parametrize("share", ["layer", "parameter"])
def test_shared_parameters_are_one(share: str, model: Net, rows: tuple[Tensor, ...]) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    if share == "layer":
        second = first
    second.weight = first.weight
    model.classifier = nn.Sequential(first, nn.ReLU(inplace=True), second, nn.Linear(8, 5))  # type: ignore[assignment]
    before = dict(model.named_parameters())
    fast = row_gradients(model, plain, rows[:2])
    assert all(p is before[n] for n, p in model.named_parameters())  # nothing is left behind in the model
    slow = slowly(model, plain, rows[:2], {})
    assert list(fast) == list(slow)
    for name in fast:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-5, atol=1e-6)


def test_dropout_draws_for_each_row(rows: tuple[Tensor, ...]) -> None:
    torch.manual_seed(0)
    model = Net(nn.Dropout(0.5))
    same = (rows[0][:1].expand(4, -1, -1, -1), rows[1][:1].expand(4))

    def draw() -> Tensor:
        torch.manual_seed(1)
        return row_gradients(model, plain, same)["classifier.weight"]

    assert not torch.allclose(draw()[0], draw()[1])
    assert torch.equal(draw(), draw())
    model.eval()
    torch.testing.assert_close(draw()[0], draw()[1])


BAD = [
    nn.BatchNorm2d(4),
    nn.BatchNorm2d(4, affine=False),
    nn.BatchNorm2d(4, track_running_stats=False),
    nn.BatchNorm2d(4).requires_grad_(False),
    nn.InstanceNorm2d(4, track_running_stats=True),
    nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_layers_that_mix_rows_are_named_and_repaired(bad: nn.Module, training: bool, rows: tuple[Tensor, ...]) -> None:
    model = Net(copy.deepcopy(bad)).train(training)
    for refuse in (validate, lambda m: row_gradients(m, plain, rows[:2])):
        with pytest.raises(PrivacyError, match=r"encoder\.1: (Batch|Instance)Norm2d.*GroupNorm.*ModuleValidator\.fix"):
            refuse(model)
    fixed = repair(model)
    validate(fixed)
    assert isinstance(model.encoder[1], type(bad))
    assert isinstance(fixed.encoder[1], nn.GroupNorm | nn.InstanceNorm2d)  # type: ignore[index, union-attr]
    fast, slow = row_gradients(fixed, plain, rows[:2]), slowly(fixed, plain, rows[:2], {})  # type: ignore[arg-type]
    for name in fast:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-5, atol=1e-6)
    kept = {n: p for n, p in model.named_parameters() if not n.startswith("encoder.1.")}
    assert all(torch.equal(p, fixed.get_parameter(n)) for n, p in kept.items())


def test_other_layers_that_opacus_names(model: Net) -> None:
    validate(model)
    model.classifier = nn.LSTM(8, 5)  # type: ignore[assignment]
    with pytest.raises(PrivacyError, match=r"classifier: LSTM.*DPLSTM") as e:
        validate(model)
    assert "GroupNorm" not in str(e.value)  # no norm is in its way


def test_without_opacus(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.setitem(sys.modules, "opacus.validators", None)
    validate(model)
    with pytest.raises(PrivacyError, match=r"encoder\.1"):
        validate(Net(nn.BatchNorm2d(4)))
    with pytest.raises(PrivacyError, match=r"pip install .opacus>=1\.5"):
        repair(model)


def test_a_loss_that_reduces_is_refused(model: Net, rows: tuple[Tensor, ...]) -> None:
    with pytest.raises(ContractError, match="one value per row"):
        row_gradients(model, lambda f, x, y: cross_entropy(f(x), y), rows[:2])


def test_rows_of_different_length_are_refused(model: Net, rows: tuple[Tensor, ...]) -> None:
    with pytest.raises(ContractError, match="one common number of rows"):
        row_gradients(model, plain, (rows[0], rows[1][:3]))


@pytest.mark.parametrize("C", [0, -1.0, float("nan"), float("inf"), None, True])
def test_bad_clipping_norm(C: Any) -> None:
    with pytest.raises(PrivacyError, match=r"clipping norm C = .*give a finite number above 0"):
        clip_and_sum({"w": torch.ones(2, 3)}, C)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(value: float) -> None:
    with pytest.raises(PrivacyError, match=r"1 of 2 row gradients are not finite \(in w\)"):
        clip_and_sum({"v": torch.ones(2), "w": torch.tensor([[1.0, value], [1.0, 1.0]])}, 1.0)


def test_nothing_to_clip() -> None:
    with pytest.raises(PrivacyError, match="no trainable parameter"):
        clip_and_sum({}, 1.0)
