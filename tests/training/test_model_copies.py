"""Quick copies of models: equal to what copy.deepcopy gives, and no part of the model they were made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fedaudit.training.model_copies import copied, copied_with
from fedaudit.training.models import build


def same(a: nn.Module, b: nn.Module) -> bool:
    states = a.state_dict(), b.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(t, states[1][n]) for n, t in states[0].items())


@pytest.mark.parametrize("arch", ["cnn_bn", "convnet@0.05", "resnet18_cifar@0.1", "vit_tiny", "mobilenet_v2@0.1"])
def test_a_copy_is_the_model_in_memory_of_its_own(arch: str) -> None:
    model = build(arch, shape=(1, 16, 16), classes=4)
    next(model.parameters()).requires_grad_(False)
    mine, theirs = copied(model), copy.deepcopy(model)
    assert same(mine, model)
    assert str(mine) == str(theirs)
    assert [(n, p.requires_grad) for n, p in mine.named_parameters()] == [
        (n, p.requires_grad) for n, p in model.named_parameters()
    ]
    assert all(type(a) is type(b) for a, b in zip(mine.modules(), model.modules(), strict=True))
    x = torch.randn(2, 1, 16, 16)
    assert torch.equal(mine.eval()(x), model.eval()(x))
    mine.train()(x)
    with torch.no_grad():
        for t in mine.state_dict().values():
            t.add_(1)
    assert same(model, theirs), "training the copy reached the model"
    assert not model.training


def test_what_is_shared_stays_shared_and_attributes_are_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU())
    model[1].weight = model[0].weight
    model.add_module("again", model[2])
    model.seen = [1, [2]]  # type: ignore[assignment]
    model.empty, model[0].also = [], {}  # type: ignore[assignment]
    model[2].also = model[0].also
    model[0].register_forward_hook(lambda m, x, out: out * 2)
    model[0].register_buffer("not kept", torch.ones(1), persistent=False)
    mine = copied(model)
    assert mine[1].weight is mine[0].weight
    assert mine[0].weight is not model[0].weight
    assert mine.again is mine[2]
    mine.seen[1].append(3)  # type: ignore[index]
    assert model.seen == [1, [2]]
    mine.empty.append(1), mine[0].also.update(a=1)  # type: ignore[operator,union-attr]
    assert (model.empty, model[0].also) == ([], {}), "what was empty is a copy too"
    assert mine[2].also is mine[0].also
    x = torch.randn(2, 3)
    assert torch.equal(mine(x), model(x))
    mine[0]._forward_hooks.clear()
    assert len(model[0]._forward_hooks) == 1
    assert mine.state_dict().keys() == model.state_dict().keys()


def test_the_memory_format_is_kept() -> None:
    model = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    assert copied(model).weight.is_contiguous(memory_format=torch.channels_last)


def test_a_copy_takes_the_tensors_of_a_state_for_its_own() -> None:
    model = build("cnn_bn", shape=(1, 8, 8), classes=4).eval()
    next(model.parameters()).requires_grad_(False)
    before = copy.deepcopy(model)
    state = {name: t.clone() + 1 for name, t in model.state_dict().items()}
    mine = copied_with(model, state)
    assert mine is not None
    assert same(model, before)
    found = mine.state_dict()
    assert list(found) == list(state)
    assert all(t.data_ptr() == state[name].data_ptr() for name, t in found.items())
    assert [(n, p.requires_grad, type(p)) for n, p in mine.named_parameters()] == [
        (n, p.requires_grad, type(p)) for n, p in model.named_parameters()
    ]
    assert str(mine) == str(model)
    assert not mine.training


def test_where_a_state_does_not_fit_as_it_is_nothing_is_taken() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 2, 3))
    state = {name: t.clone() for name, t in model.state_dict().items()}
    last = "1.weight"
    for wrong in (
        {**state, "more": torch.zeros(1)},
        {name: t for name, t in state.items() if name != last},
        {**state, last: state[last].double()},
        {**state, last: state[last][:1]},
        {**state, last: state[last].to(memory_format=torch.channels_last)},
    ):
        assert copied_with(model, wrong) is None
    assert copied_with(model, state) is not None
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert copied_with(tied, dict(tied.state_dict())) is None, "two names, one tensor"


def test_a_layer_that_knows_how_it_is_copied_is_asked() -> None:
    """By its class, or by itself."""

    class Knows(nn.Linear):
        def __deepcopy__(self, memo: dict[int, object]) -> nn.Module:
            return nn.Identity()

    model = nn.Sequential(Knows(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].__dict__["__deepcopy__"] = lambda memo: nn.Flatten()
    mine = copied(model)
    assert [type(layer) for layer in mine] == [nn.Identity, nn.Flatten, nn.Linear]


def test_a_layer_is_copied_by_its_attributes_and_not_by_deepcopy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`copy.deepcopy` takes longer than a step of a small network."""
    asked: list[object] = []
    real = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda x, memo=None: asked.append(x) or real(x, memo))
    copied(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert not [x for x in asked if isinstance(x, nn.Module | torch.Tensor)]


def test_of_a_tuple_that_holds_a_list_the_list_is_copied() -> None:
    layer = nn.Linear(1, 1)
    layer.sizes, layer.plain = (3, [4]), (3, "a")  # type: ignore[assignment]
    mine = copied(layer)
    layer.sizes[1].append(5)  # type: ignore[index,union-attr,operator]
    assert mine.sizes == (3, [4])
    assert mine.plain == (3, "a")


def test_plain_layers_are_copied_without_deepcopy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer than a step of a small network. Layers within layers are no reason for it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    with monkeypatch.context() as m:
        m.setattr(copy, "deepcopy", lambda *_: pytest.fail("deepcopy"))
        mine = copied(model)
    assert same(mine, model)
    assert mine[1][0] is not model[1][0]


class Name(str):
    __slots__ = ()


class Own(torch.Tensor):
    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        return self.detach().clone().as_subclass(Own)


def test_plain_values_of_a_kind_of_their_own_are_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words, and tuples of plain values, cannot change: nobody copies them."""
    layer = nn.Linear(1, 1)
    layer.kind, layer.sizes, layer.none = Name("linear"), (3, "a", None), None  # type: ignore[assignment]
    layer.register_parameter("absent", None)
    layer.register_buffer("nothing", None)
    layer.add_module("later", None)
    with monkeypatch.context() as m:
        m.setattr(copy, "deepcopy", lambda *_: pytest.fail("deepcopy"))
        mine = copied(layer)
    assert mine.kind is layer.kind
    assert mine.sizes is layer.sizes
    assert (mine.none, mine.absent, mine.nothing, mine.later) == (None,) * 4


def test_what_hangs_at_a_tensor_is_copied_as_deepcopy_would() -> None:
    """Attributes, classes of their own, and buffers with a gradient; tensors in two places stay one."""
    layer, other = nn.Linear(1, 1), nn.Linear(1, 1)
    tagged, shared, free = torch.ones(1), torch.ones(2), torch.ones(3, requires_grad=True)
    tagged.tag = "mine"  # type: ignore[attr-defined]
    for name, t in (("tagged", tagged), ("shared", shared), ("free", free), ("own", torch.ones(1).as_subclass(Own))):
        layer.register_buffer(name, t)
    other.register_buffer("shared", shared)
    model = nn.Sequential(layer, other)
    mine = copied(model)
    assert mine[0].tagged.tag == "mine"  # type: ignore[union-attr]
    assert mine[0].tagged is not tagged
    assert mine[0].shared is mine[1].shared
    assert mine[0].shared is not shared
    assert (mine[0].free.requires_grad, mine[0].shared.requires_grad) == (True, False)  # type: ignore[union-attr]
    assert type(mine[0].own) is Own
    assert mine[0].own is not layer.own


def test_a_state_is_taken_only_by_a_model_of_plain_tensors() -> None:
    def taken(change: str) -> nn.Module | None:
        model = nn.Linear(2, 1)
        model.register_buffer("scale", torch.ones(1))
        if change == "tag":
            model.scale.tag = 1  # type: ignore[union-attr]
        if change == "kind":
            model.scale = torch.ones(1).as_subclass(Own)
        if change == "leaf":
            model.scale = torch.ones(1, requires_grad=True) * 2
        state = {name: t.detach().clone() for name, t in model.state_dict().items()}
        if change == "device":
            state["bias"] = state["bias"].to("meta")
        return copied_with(model, state)

    assert taken("nothing") is not None
    assert [taken(change) for change in ("tag", "kind", "leaf", "device")] == [None] * 4


def test_a_layer_that_stands_in_two_places_takes_a_state_once() -> None:
    """What is not in the state is copied: a buffer that is not kept, and what is not a tensor."""
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].register_buffer("aside", torch.ones(1), persistent=False)
    model.twin = model[0]
    assert copied_with(model, dict(model.state_dict())) is None, "two names, one tensor"
    del model.twin
    state = {"0.weight": torch.tensor([[5.0]], requires_grad=True), "0.bias": torch.tensor([6.0])}
    mine = copied_with(model, state)
    assert mine is not None
    assert mine[0].weight.is_leaf
    assert mine[0].weight.item() == 5
    assert mine[0].aside is not model[0].aside
    assert mine[0].aside.tolist() == [1]  # type: ignore[operator]
