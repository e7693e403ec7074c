"""Descents: recorded or not, the same steps; what a recording draws is given back."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedaudit import adam, sgd
from fedaudit.training import cuda_graphs
from fedaudit.training import descent as descents
from fedaudit.training.descent import Descent, Kept, _UnderWay, side_by_side
from fedaudit.training.fit import Opt


def descent(opt: Opt, device: str = "cpu", seed: int = 0, steps: int = 20) -> tuple[torch.Tensor, Descent]:
    """A target that `before` moves, noise in every step, and a closure that changes what it minimises."""
    start = torch.Generator().manual_seed(seed)
    x = torch.randn(6, generator=start).double().to(device).requires_grad_()
    target = torch.zeros(6, dtype=torch.float64, device=device)

    def closure() -> torch.Tensor:
        with torch.no_grad():
            x.clamp_(-2, 2)
        noise = torch.rand(6, device=device, dtype=torch.float64)
        return ((x - target - noise) ** 2).sum()

    def before(i: int) -> None:
        target.fill_(float(i)).add_(torch.rand(6, device=device, dtype=torch.float64))

    return x, Descent([x], closure, steps, opt, repeats=True, before=before)


def by_hand(opt: Opt) -> torch.Tensor:
    """The loop as one would write it."""
    x, d = descent(opt)
    optimiser = opt.build([x])
    for i in range(d.steps):
        assert d.before is not None
        d.before(i)
        optimiser.zero_grad()
        d.closure().backward()
        optimiser.step()
    return x.detach()


@pytest.mark.parametrize("opt", [sgd(0.05, momentum=0.9), adam(0.05)], ids=["sgd", "adam"])
def test_a_recorded_descent_is_the_eager_one_to_the_bit(opt: Opt, replays: list[int]) -> None:
    torch.manual_seed(5)
    wanted = by_hand(opt)
    ended = torch.get_rng_state()
    found = []
    for how in ("eager", "recorded"):
        torch.manual_seed(5)
        x, d = descent(opt)
        with cuda_graphs.conditions(how):  # type: ignore[arg-type]
            d.alone()
        found.append(x.detach())
        assert torch.equal(torch.get_rng_state(), ended), "what was drawn while recording is given back"
    assert replays == [20]
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted)


def test_a_step_of_another_shape_is_not_replayed(replays: list[int]) -> None:
    """Every fourth has half of the numbers, and says so."""
    found = []
    for how in ("eager", "recorded"):
        x, memory = torch.ones(6, requires_grad=True), torch.zeros(6)
        now = [memory]

        def before(i: int, now: list[torch.Tensor] = now, memory: torch.Tensor = memory) -> bool:
            usual = i % 4 != 3
            now[0] = memory.copy_(torch.arange(6.0) + i) if usual else torch.arange(3.0) - i
            return usual

        def closure(x: torch.Tensor = x, now: list[torch.Tensor] = now) -> torch.Tensor:
            return (x[: len(now[0])] - now[0]).square().sum()

        with cuda_graphs.conditions(how):  # type: ignore[arg-type]
            Descent([x], closure, 12, sgd(0.1), repeats=True, before=before).alone()
        found.append(x.detach())
    assert replays == [9]
    assert torch.equal(*found)


def test_what_does_not_repeat_or_is_short_is_not_recorded(replays: list[int]) -> None:
    _, d = descent(sgd(0.1), steps=cuda_graphs.WORTH_IT - 1)
    with cuda_graphs.conditions("recorded"):
        assert not d.records
        assert not Descent(d.params, d.closure, 100, d.opt).records
        assert Descent(d.params, d.closure, 100, d.opt, repeats=True).records
    assert not Descent(d.params, d.closure, 100, d.opt, repeats=True).records  # steps are eager here


def test_moments_go_on(replays: list[int]) -> None:
    """Two descents of ten steps, the second with what the first's optimiser remembers, are one of twenty."""
    once, d = descent(adam(0.05))
    torch.manual_seed(1)
    d.alone()
    twice, d = descent(adam(0.05))
    torch.manual_seed(1)
    moments = Descent([twice], d.closure, 10, d.opt, before=d.before).alone()
    Descent([twice], d.closure, 10, d.opt, moments, before=lambda i: d.before(10 + i)).alone()  # type: ignore[misc]
    assert torch.equal(once.detach(), twice.detach())


def test_one_recording_serves_several_descents(replays: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks in turn, as a generator and a model: their steps are recorded once each, batch norm's statistics
    are as if there had been no recording, and each network sees what the other has become. A turn of 5 steps would not
    be worth a recording; all turns together are."""
    monkeypatch.setattr(cuda_graphs, "WORTH_IT", 16)
    found = []
    for how in ("eager", "recorded"):
        torch.manual_seed(3)
        a, b = (torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).double() for _ in range(2))
        x = torch.zeros(6, 3, dtype=torch.float64)
        changed = [*a.buffers(), *b.buffers()]
        kept = {net: Kept(20, changed) for net in (a, b)}

        def before(i: int, x: torch.Tensor = x) -> None:
            x.copy_(torch.randn(6, 3, dtype=torch.float64))

        def loss(a: torch.nn.Module = a, b: torch.nn.Module = b, x: torch.Tensor = x) -> torch.Tensor:
            return (b(a(x)) - 1).square().mean()

        with cuda_graphs.conditions(how):  # type: ignore[arg-type]
            for _ in range(4):
                for net in (a, b):
                    for p in (*a.parameters(), *b.parameters()):
                        p.requires_grad_(False)
                    params = list(net.requires_grad_().parameters())
                    Descent(params, loss, 5, sgd(0.1), repeats=True, before=before, kept=kept[net]).alone()
        found.append([t.detach().clone() for net in (a, b) for t in net.state_dict().values()])
    assert replays == [20, 20]
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))
    assert not torch.equal(found[0][3], torch.zeros(3, dtype=torch.float64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
def test_on_a_gpu_side_by_side_gives_the_bits_of_each_alone() -> None:
    alone, drawn, ended = [], [], []
    with cuda_graphs.conditions("recorded"):
        for seed in range(3):
            torch.cuda.manual_seed(seed)
            x, d = descent(sgd(0.05, momentum=0.9), "cuda", seed, steps=50 + seed)
            drawn.append(torch.cuda.get_rng_state())
            d.alone()
            alone.append(x.detach())
            ended.append(torch.cuda.get_rng_state())
        torch.cuda.manual_seed(77)
        before = torch.cuda.get_rng_state()
        several = [descent(sgd(0.05, momentum=0.9), "cuda", seed, steps=50 + seed) for seed in range(3)]
        found = side_by_side([d for _, d in several], drawn)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for (x, _), (_, state), wanted, after in zip(several, found, alone, ended, strict=True):
        assert torch.equal(x.detach(), wanted)
        assert torch.equal(state, after)


class Generator:
    """Stands in for a GPU's generator, whose states are names."""

    def __init__(self) -> None:
        self.did: list[Any] = []
        self.now, self.made = "usual", 0

    def graphsafe_get_state(self) -> str:
        return self.now

    def graphsafe_set_state(self, state: str) -> None:
        self.now = state
        self.did.append(state)

    def clone_state(self) -> str:
        self.made += 1
        return f"mine {self.made}"

    def set_state(self, state: Any) -> None:
        self.did.append((self.now, "set to", state))

    def get_state(self) -> str:
        return f"end of {self.now}"


@pytest.mark.parametrize("counts", [(2, 3), (2,)])
def test_descents_side_by_side_have_streams_and_states_of_their_own(
    counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of unequal lengths: the shorter is through before. The generator is as it was, also after an error."""
    generator, did, device = Generator(), [], torch.device("cpu")

    class UnderWay:
        def __init__(self, made: Any):
            self.descent, self.optimiser = made, f"optimiser {made.name}"

        def begin(self) -> None:
            did.append(("begin", self.descent.name, generator.now))

        def step(self, i: int) -> None:
            if self.descent.name == "bad":
                raise ValueError("bad")
            did.append((i, self.descent.name, generator.now))

    def stream(name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: did.append((name, "waits for", other.name)))

    usual = stream("usual")
    put = monkeypatch.setattr
    put(descents, "shared", lambda of: generator if of == device else None)
    put(descents, "_UnderWay", UnderWay)
    put(descents, "lane", lambda number, of: stream(f"lane {number}"))
    put(descents, "moments_of", lambda optimiser: f"moments of {optimiser}")
    put(torch.cuda, "current_stream", lambda of: usual)
    put(torch.cuda, "stream", lambda lane: nullcontext(did.append(f"on {lane.name}")))
    put(torch.cuda, "synchronize", lambda of: did.append(("through", of)))
    made = [SimpleNamespace(name="abc"[i], steps=n, device=device) for i, n in enumerate(counts)]
    states: Any = [f"drawn {i}" for i in range(len(counts))]
    found = side_by_side(made, states)  # type: ignore[arg-type]
    names = [(i, f"mine {i + 1}", "abc"[i]) for i in range(len(counts))]
    assert found == [(f"moments of optimiser {name}", f"end of {mine}") for _, mine, name in names]
    expected: list[Any] = []
    for i, mine, name in names:
        expected += [(f"lane {i}", "waits for", "usual"), f"on lane {i}", ("begin", name, mine)]
    for step in range(max(counts)):
        for i, mine, name in names:
            expected += [f"on lane {i}", (step, name, mine)] if step < counts[i] else []
    expected += [("usual", "waits for", f"lane {i}") for i, *_ in names] + [("through", device)]
    assert did == expected
    assert [row for row in generator.did if isinstance(row, tuple)] == [
        (mine, "set to", f"drawn {i}") for i, mine, _ in names
    ]
    assert generator.now == "usual"
    made[0].name = "bad"
    with pytest.raises(ValueError, match="bad"):
        side_by_side(made, states)  # type: ignore[arg-type]
    assert generator.now == "usual"


@pytest.mark.parametrize(("steps", "i", "asked"), [(0, 0, []), (1, 0, [0]), (3, 2, [2]), (3, 3, [])])
def test_nothing_is_drawn_for_a_step_that_does_not_come(steps, i, asked):
    seen: list[int] = []
    under = SimpleNamespace(descent=SimpleNamespace(before=seen.append, steps=steps), alike=False)
    _UnderWay._before(under, i)
    assert seen == asked
    assert under.alike is bool(asked), "what says nothing leaves the step as it was"
