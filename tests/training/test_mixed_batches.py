"""Rows of several networks in one batch: filled up to one shape, each gets what its own network says."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedaudit import adam, state_of
from fedaudit.methods.datafree._decoder import Decoder, Discrepancy, train_decoder
from fedaudit.shape import Shape
from fedaudit.training import cuda_graphs, models
from fedaudit.training.descent import Descent
from fedaudit.training.fit import Opt
from fedaudit.training.stacked import networks as networks_module
from fedaudit.training.stacked.mixed_batches import Mixed
from fedaudit.training.stacked.networks import Many

CPU = torch.device("cpu")
SIZES = [5, 1, 9, 4]  # rows of four networks
ORDER = [[0, 1, 5, 6, 14, 15], [2, 7, 8, 9, 10, 11], [3, 4, 12, 16, 17, 18], [0, 13]]  # by network: 2 1 1 2, ...
ORDER.append([6, 7, 8])  # and one of the third network alone


def networks() -> list[nn.Module]:
    made = []
    for seed, arch in enumerate(("cnn_bn@0.25", "mlp", "cnn_bn@0.25", "mlp")):
        torch.manual_seed(seed)
        made.append(models.build(arch, shape=(1, 8, 8), classes=4).to(torch.float64).eval())
    return made


def mixed(nets: list[nn.Module]) -> Mixed:
    return Mixed(Many(nets), SIZES, [torch.tensor(rows) for rows in ORDER], torch.device("cpu"))


def test_each_row_goes_through_its_own_network_whatever_the_shapes(replays: list[int]) -> None:
    """Row by row and with the gradient of the images; a batch of another size is said to be one."""
    nets = networks()
    owner = torch.arange(4).repeat_interleave(torch.tensor(SIZES))
    x = torch.randn(19, 1, 8, 8, dtype=torch.float64)
    with cuda_graphs.conditions("recorded", stacked=True):
        fixed = mixed(nets)
    split = mixed(nets)
    assert (fixed.repeats, split.repeats) == (True, False)
    memory = fixed.index
    for i in (1, 0, 2, 4, 3):
        assert fixed.put(i) is split.put(i) is (len(ORDER[i]) == 6)
        assert (fixed.index is memory) is (len(ORDER[i]) == 6), "a recording reads the same memory"
        found = []
        for of in (fixed, split):
            assert of.index.tolist() == ORDER[i]
            images = x[of.index].requires_grad_()
            out = of(images)
            (gradient,) = torch.autograd.grad((out * torch.arange(4)).square().sum(), images)
            found.append((out, gradient))
        torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=1e-12)
        by_hand = torch.cat([nets[int(owner[row])](x[row : row + 1]) for row in ORDER[i]])
        torch.testing.assert_close(found[0][0], by_hand, atol=1e-12, rtol=1e-12)


def test_networks_that_look_at_whole_batches_are_not_filled_up(replays: list[int]) -> None:
    nets: list[nn.Module] = [net.train() for net in networks()]
    with cuda_graphs.conditions("recorded", stacked=True):
        assert not mixed(nets).repeats


@pytest.mark.parametrize("stepping", ["eager", "recorded"])
def test_one_after_the_other_nothing_is_filled_up(stepping: cuda_graphs.Stepping, replays: list[int]) -> None:
    with cuda_graphs.conditions(stepping, stacked=stepping == "eager"):
        assert not mixed(networks()).repeats


@pytest.mark.parametrize(("md", "replayed"), [("none", [6]), ("MSE", [])])
def test_a_decoder_that_is_trained_in_recorded_steps_is_the_eager_one(
    md: Discrepancy, replayed: list[int], replays: list[int]
) -> None:
    """DFFKE's, on rows of four clients: its batch norms' statistics too, and with a last batch of another size. With a
    discrepancy of models, batches that mix clients are split, each step otherwise: no step is recorded."""
    found = []
    for stepping in ("eager", "recorded"):
        nets = dict(enumerate(networks()))
        torch.manual_seed(7)
        Dec, theta_z = Decoder(4, Shape((1, 8, 8)), width=2).double(), {}
        for k, net in nets.items():
            theta_z[k] = state_of(nn.Linear(net.width, 4).double())  # type: ignore[arg-type]
        E = {k: torch.randn(n, 4, dtype=torch.float64) for k, n in enumerate(SIZES)}
        with cuda_graphs.conditions(stepping, stacked=True):  # type: ignore[arg-type]
            state = train_decoder(Alone(), Dec, nets, theta_z, E, epochs=3, batch=6, opt=adam(0.01), md=md)  # type: ignore[arg-type]
        found.append(dict(state))
    assert replays == replayed, "19 rows are two batches of six and one of seven"
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=1e-10)


def test_a_batch_of_one_network_is_filled_up_with_nothing(replays: list[int]) -> None:
    """A recorded step picks the network by its number, which it reads from one place; networks that are no stack are
    not recorded."""
    nets = [models.build("cnn_bn@0.25", shape=(1, 8, 8), classes=4).double().eval() for _ in range(3)]
    order = [torch.tensor(rows) for rows in ([0, 2, 4], [5, 6, 8], [9, 10, 11], [1, 2, 3], [7])]
    x = torch.randn(12, 1, 8, 8, dtype=torch.float64)
    with cuda_graphs.conditions("recorded", stacked=True):
        fixed = Mixed(Many(nets), [5, 4, 3], order, CPU)
        assert not Mixed(Many(networks()), SIZES, [torch.tensor([0, 1])], CPU).repeats
        for some, pickable in (([0, 2], True), ([0, 2, 1], False), ([1, 0, 2], False), ([0], False), ([], False)):
            assert Many(networks()[i] for i in some).pickable is pickable, some
    split = Mixed(Many(nets), [5, 4, 3], order, CPU)
    assert (fixed.repeats, split.repeats) == (True, False)
    memory = fixed.owner
    for i, owner in ((3, 0), (1, 1), (2, 2), (0, 0), (4, 1)):
        assert fixed.put(i) is split.put(i) is (i < 4)
        assert fixed.owner.tolist() == split.owner.tolist() == [owner]
        assert (fixed.owner is memory) is (i < 4)
        images = x[fixed.index].requires_grad_()
        found = fixed(images)
        torch.testing.assert_close(found, nets[owner](images), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(split(images), found, atol=1e-12, rtol=1e-12)
        assert torch.autograd.grad(found.sum(), images)[0].abs().sum() > 0


@pytest.mark.parametrize("deep", [True, False])
def test_a_decoder_by_client_that_is_trained_in_recorded_steps_is_the_eager_one(
    deep: bool, monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    """As DFFKE's author does it: batches of one client, answers, and the inverse CE against all peers but that client;
    one of four clients is no peer that anybody knows. Deep networks answer in one pass."""
    found, passes = [], set()
    inner = networks_module.each_on_its_lane
    monkeypatch.setattr(networks_module, "goes_apart", lambda network, rows: deep)
    monkeypatch.setattr(
        networks_module, "each_on_its_lane", lambda runs, rows: passes.add(len(runs)) or inner(runs, rows)
    )
    for stepping in ("eager", "recorded"):
        torch.manual_seed(7)
        nets, before = (
            {k: models.build("cnn_bn@0.25", shape=(1, 8, 8), classes=4).double().eval() for k in ids}
            for ids in ((3, 5, 6, 8), (3, 6, 8))
        )
        Dec = Decoder(4, Shape((1, 8, 8)), width=2).double()
        theta_z = {k: state_of(nn.Linear(net.width, 4).double()) for k, net in nets.items()}
        E = {k: torch.randn(n, 4, dtype=torch.float64) for k, n in zip(nets, (9, 6, 7, 13), strict=True)}
        Y = {k: torch.randn(len(e), 4, dtype=torch.float64) for k, e in E.items()}
        with cuda_graphs.conditions(stepping, stacked=True):  # type: ignore[arg-type]
            state = train_decoder(
                Alone(), Dec, nets, theta_z, E, epochs=2, batch=6, opt=adam(0.01), md="inverse-CE", Y=Y, peers=before,  # type: ignore[arg-type]
                answers=True, by_client=True,
            )  # fmt: skip
        found.append(dict(state))
    assert replays == [16], "two epochs of two turns, in each a batch of each of four clients"
    assert passes == ({4} if deep else set()), "a client's own network, and its three peers"
    torch.testing.assert_close(found[0], found[1], atol=1e-10, rtol=1e-10)


class Alone:
    """A server that trains at once."""

    def rng(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(1)

    def optimise(
        self, params: list[Tensor], closure: Callable[[], Tensor], *, steps: int, opt: Opt, **how: Any
    ) -> None:
        Descent(params, closure, steps, opt, **how).alone()


def test_no_batches_at_all() -> None:
    empty: list[Tensor] = []
    assert Mixed(Many(networks()), SIZES, empty, torch.device("cpu")).put(0)


def test_each_network_gets_as_many_rows_as_it_has_in_any_batch(replays: list[int]) -> None:
    """At most 2, 1, 5 and 3 of a batch's rows belong to the four networks, so 11 go through them, and not 20."""
    with cuda_graphs.conditions("recorded", stacked=True):
        fixed = mixed(networks())
    seen: list[tuple[int, int]] = []
    inner = fixed._networks.each

    def each(xs: list[Tensor], only: list[int]) -> list[Tensor]:
        seen.extend((i, len(x)) for i, x in zip(only, xs, strict=True))
        return inner(xs, only=only)

    fixed._networks.each = each  # type: ignore[method-assign, assignment]
    fixed.put(0)
    assert fixed(torch.randn(6, 1, 8, 8, dtype=torch.float64)).shape == (6, 4)
    assert seen == [(0, 2), (1, 1), (2, 5), (3, 3)]


def test_a_network_without_any_row_is_not_run(replays: list[int]) -> None:
    with cuda_graphs.conditions("recorded", stacked=True):
        fixed = Mixed(Many(networks()), [2, 0, 3, 0], [torch.tensor([0, 1, 4]), torch.tensor([2, 3, 4])], CPU)
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    nets = networks()
    torch.testing.assert_close(fixed(x), torch.cat([nets[0](x[:2]), nets[2](x[2:])]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("deep", [True, False])
def test_all_others_answer_beside_each_row_s_own_network(
    deep: bool, monkeypatch: pytest.MonkeyPatch, replays: list[int]
) -> None:
    """Batches of one network, and batches that mix networks, with recorded steps and without."""
    passes: list[int] = []
    inner = networks_module.each_on_its_lane
    monkeypatch.setattr(networks_module, "goes_apart", lambda network, rows: deep)
    monkeypatch.setattr(
        networks_module, "each_on_its_lane", lambda runs, rows: passes.append(len(runs)) or inner(runs, rows)
    )
    torch.manual_seed(3)
    nets, peers = (
        [models.build("cnn_bn@0.25", shape=(1, 8, 8), classes=4).double().eval() for _ in range(n)] for n in (3, 2)
    )
    x = torch.randn(12, 1, 8, 8, dtype=torch.float64)
    orders = {True: [[0, 2, 4], [9, 10, 11], [5, 6, 8]], False: [[0, 5, 9], [1, 2, 10], [3, 6, 7]]}
    owner = [0] * 5 + [1] * 4 + [2] * 3
    for (alone, order), stepping in itertools.product(orders.items(), ("recorded", "eager")):
        with cuda_graphs.conditions(stepping, stacked=True):  # type: ignore[arg-type]
            fixed = Mixed(Many(nets), [5, 4, 3], [torch.tensor(rows) for rows in order], CPU)
            others = Many(peers)
            for i, rows in enumerate(order):
                fixed.put(i)
                passes.clear()
                found, said = fixed.beside(x[fixed.index], others)
                wanted = torch.cat([nets[owner[row]](x[row : row + 1]) for row in rows])
                torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
                torch.testing.assert_close(said, [net(x[rows]) for net in peers], atol=1e-12, rtol=1e-12)
                assert (passes == [3]) is (deep and alone and stepping == "recorded"), "one pass of all of them"
