"""DP-SGD of several clients at once is DP-SGD of each alone: samples, clipping, noise, steps and ledger."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedaudit import Augment, adam, ce, run, sgd
from fedaudit.errors import PrivacyError
from fedaudit.privacy import dpsgd_stack
from fedaudit.privacy.dpsgd_stack import PrivateJob, fit_private_together, private_stacks
from fedaudit.privacy.mechanism_outputs import Training
from fedaudit.privacy.policy import Policy
from fedaudit.training import models
from fedaudit.training.fit import Opt
from fedaudit.training.stacked.stack import Job
from fedaudit.wire.transcript import Transcript

pytest.importorskip("opacus", reason="DP-SGD needs opacus")


def pulled(f: Any, x: Tensor, y: Tensor, towards: dict[str, Tensor]) -> Tensor:
    far = sum((p - towards[name]).square().sum() for name, p in f.params.items())
    return cross_entropy(f(x), y, reduction="none") + 0.1 * far


def jobs(counts: list[int], **options: Any) -> list[PrivateJob]:
    """Clients of unequal size, of which each has a clipping norm and a noise of its own."""
    made = []
    for i, n in enumerate(counts):
        torch.manual_seed(i)
        model = models.build("cnn@0.25", shape=(1, 8, 8), classes=4).double().eval()
        rows = torch.randn(n, 1, 8, 8, dtype=torch.float64), torch.randint(4, (n,))
        policy = Policy(mechanism="dp-sgd", sensitivity=f"clip:{0.1 * (i + 1)}", noise_multiplier=1.0 + i, delta=1e-3)
        mine: dict[str, Any] = {"opt": sgd(0.5, momentum=0.9), "batch": 6, "epochs": 2, "steps": None, "given": None}
        mine |= options
        loss = mine.pop("loss", ce)
        if loss is pulled:
            mine["given"] = {"towards": {name: p.detach() + i for name, p in model.named_parameters()}}
        rng, noise = (torch.Generator().manual_seed(100 * i + j) for j in (1, 2))
        made.append(PrivateJob(Job(model, loss, rows, rng, mine), noise, policy, 1))
    return made


def distance(these: list[PrivateJob], those: list[PrivateJob]) -> float:
    return max(
        float((a - b).abs().max())
        for p, q in zip(these, those, strict=True)
        for a, b in zip(p.job.model.state_dict().values(), q.job.model.state_dict().values(), strict=True)
    )


CASES: dict[str, dict[str, Any]] = {
    "momentum": {},
    "adam": {"opt": adam(1e-2)},
    "a loss with parameters and given": {"loss": pulled},
    "so many steps": {"epochs": None, "steps": 3},
    "samples that are often empty": {"batch": 1, "epochs": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_together_is_each_alone(case: str) -> None:
    counts = [12, 20, 7]  # of unequal steps, too
    alone, together = jobs(counts, **CASES[case]), jobs(counts, **CASES[case])
    start = [copy.deepcopy(private.job.model) for private in alone]
    assert private_stacks(together)[0] == [[0, 1, 2]]
    wanted = [private.alone() for private in alone]
    found = fit_private_together(together)
    assert distance(alone, together) < 1e-10
    assert [entry for _, entry in found] == [entry for _, entry in wanted]
    assert [(f.epochs, f.steps) for f, _ in found] == [(f.epochs, f.steps) for f, _ in wanted]
    for private, other in zip(alone, together, strict=True):  # the next training draws the same, too
        for a, b in zip(private.generators, other.generators, strict=True):
            assert torch.equal(a.get_state(), b.get_state())
    moved = [
        max(
            float((a - b).abs().max())
            for a, b in zip(was.state_dict().values(), private.job.model.state_dict().values(), strict=True)
        )
        for was, private in zip(start, together, strict=True)
    ]
    assert min(moved) > 1e-3


def test_many_rows_are_clipped_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedaudit.privacy.dpsgd_stack.ROWS", 6)
    alone, together = jobs([20, 25], batch=15), jobs([20, 25], batch=15)
    for private in alone:
        private.alone()
    fit_private_together(together)
    assert distance(alone, together) < 1e-10


def test_a_gradient_without_bound_leaves_all_models_alone() -> None:
    broken = jobs([12, 12])
    broken[1].job.rows[0][:] = float("nan")
    before = [copy.deepcopy(private.job.model.state_dict()) for private in broken]
    with pytest.raises(PrivacyError, match="not finite"):
        fit_private_together(broken)
    for private, was in zip(broken, before, strict=True):
        assert all(torch.equal(t, was[name]) for name, t in private.job.model.state_dict().items())


def test_a_stacked_run_bills_and_sends_what_a_serial_one_does(tmp_path: Any) -> None:
    setting = {
        "method": "fedavg", "dataset": "digits", "clients": 2, "rounds": 1, "model": "mlp", "set": {"E": 1, "B": 32},
        "partition": "dirichlet:0.5", "aux": 0.8, "privacy": {"training": {"noise_multiplier": 1.0}},
    }  # fmt: skip
    one, two = (run(**setting, engine=engine, out=tmp_path / engine) for engine in ("serial", "stacked"))
    assert not [note for note in two.notes if "not stacked" in note]
    assert [c.model_dump() for c in one.ledger] == [c.model_dump() for c in two.ledger]
    a, b = (list(Transcript(tmp_path / engine / "transcript").entries()) for engine in ("serial", "stacked"))
    for x, y in zip(a, b, strict=True):
        for name, t in x["w"].items():
            assert torch.allclose(t, y["w"][name], atol=1e-5)


@pytest.mark.parametrize(("rows", "widest"), [(6, 3), (7, 3), (1, 1)])
def test_so_many_rows_are_in_memory_at_a_time(rows: int, widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 or 7 rows over two clients are 3 of each, and of each one at least."""
    monkeypatch.setattr(dpsgd_stack, "ROWS", rows)
    real, seen = dpsgd_stack._row_gradients, []

    def counted(job: Job, dims: Any) -> Any:
        made = real(job, dims)
        return lambda params, rest, given, x, y: seen.append(x.shape[:2]) or made(params, rest, given, x, y)

    monkeypatch.setattr(dpsgd_stack, "_row_gradients", counted)
    fit_private_together(jobs([20, 25], batch=15, epochs=None, steps=2))
    assert {clients for clients, _ in seen} == {2}
    assert max(width for _, width in seen) == widest


def small(counts: list[int], people: int | None = None, **options: Any) -> list[PrivateJob]:
    """Clients with a linear model of a few numbers; the second one's clipping norm is beyond all its gradients."""
    made = []
    for i, n in enumerate(counts):
        torch.manual_seed(i)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3)).double().train(i > 0)
        rows = torch.randn(n, 1, 3, 3, dtype=torch.float64), torch.randint(3, (n,))
        policy = Policy(mechanism="dp-sgd", sensitivity=f"clip:{[0.3, 100, 0.7][i]}", noise_multiplier=0.01 * (i + 1))
        mine = {"opt": sgd(0.5, schedule="cosine"), "batch": 3, "epochs": 2, "steps": None, "given": None, **options}
        rng, noise = (torch.Generator().manual_seed(100 * i + j) for j in (1, 2))
        whose = torch.arange(n) // 2 if people == i else None
        made.append(PrivateJob(Job(model, ce, rows, rng, mine), noise, policy, 1, people=whose))
    return made


@pytest.mark.parametrize("options", [{}, {"augment": Augment(crop=1, flip=True)}, {"epochs": None, "steps": 4}],
                         ids=["cosine", "augmented", "steps"])  # fmt: skip
def test_small_models_together_are_each_alone(options: dict[str, Any]) -> None:
    """Rates that fall, clients that are through earlier, images that are changed, rows that are not clipped."""
    alone, together = small([7, 5, 12], **options), small([7, 5, 12], **options)
    wanted = [private.alone() for private in alone]
    found = fit_private_together(together)
    assert distance(alone, together) < 1e-10
    assert [entry for _, entry in found] == [entry for _, entry in wanted]
    assert [(f.epochs, f.steps) for f, _ in found] == [(f.epochs, f.steps) for f, _ in wanted]
    assert [private.progress.made for private in together] == [f.steps for f, _ in wanted]
    assert [private.job.model.training for private in together] == [False, True, True]
    quiet = small([7, 5, 12], **options)
    for private in quiet:
        object.__setattr__(private, "policy", private.policy.model_copy(update={"noise_multiplier": 1e-9}))
    fit_private_together(quiet)
    assert distance(quiet, together) > 1e-3, "the noise is in the step"


def test_a_single_client_is_a_stack_too() -> None:
    (one,), (other,) = small([7]), small([7])
    wanted = one.alone()
    ((fitted, entry),) = fit_private_together([other])
    assert distance([one], [other]) < 1e-10
    assert (fitted.steps, entry) == (wanted[0].steps, wanted[1])


def test_which_trainings_become_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client whose persons are protected takes its whole stack along; so does an optimiser that counts for all."""
    assert private_stacks(small([7, 5])) == ([[0, 1]], {})
    told = "gradients of a person's records are summed before they are clipped"
    assert private_stacks(small([7, 5], people=1)) == ([], {0: told, 1: told})
    all_steps = small([7, 5], opt=Opt(torch.optim.AdamW, {"lr": 0.1}), epochs=None, steps=2)
    told = "its optimiser counts steps for all of a stack"
    assert private_stacks(all_steps) == ([], {0: told, 1: told})
    monkeypatch.setattr(dpsgd_stack, "halves", lambda: "half")
    told = "gradients of single rows are taken in full precision"
    assert private_stacks(small([7, 5])) == ([], {0: told, 1: told})


def test_an_index_is_filled_up_with_its_first_entry() -> None:
    assert dpsgd_stack._filled(torch.tensor([4, 2]), 4).tolist() == [4, 2, 4, 4]
    assert dpsgd_stack._filled(torch.tensor([4, 2]), 2).tolist() == [4, 2]
    assert dpsgd_stack._filled(torch.tensor([], dtype=torch.long), 2).tolist() == [0, 0]
    assert dpsgd_stack._along(torch.ones(2), torch.ones(2, 3, 4)).shape == (2, 1, 1)
    assert dpsgd_stack._along(torch.ones(2, 3), torch.ones(2, 3, 4)).shape == (2, 3, 1)


class Noted(Training):
    """A gate that keeps what it lets out."""

    def __init__(self) -> None:
        self.steps: list[Any] = []

    def restart(self, slot: int = 0, active: list[int] | None = None) -> None:
        self.steps.append((slot, active))

    def step(self, gradient: Any, at: tuple[int, int] = (0, 1)) -> None:
        self.steps.append(({name: g.clone() for name, g in gradient.items()}, at))


def of_one(f: Any, x: Tensor) -> Tensor:
    return f(x).square().sum(1)


def test_each_noised_gradient_goes_through_its_gate() -> None:
    """Two clients with rows of one tensor, three steps and two: the second place is that of the one with fewer."""
    both = []
    for _ in range(2):
        made = []
        for private in small([7, 5]):
            job = Job(
                private.job.model, of_one, private.rows[:1], private.job.rng, {**private.job.options, "epochs": 1}
            )
            made.append(PrivateJob(job, private.noise, private.policy, 1, Noted()))
        both.append(made)
    alone, together = both
    for private in alone:
        private.alone()
    fit_private_together(together)
    assert distance(alone, together) < 1e-10
    assert [private.gate.steps[0] for private in together] == [(0, [2, 2, 1]), (1, [2, 2])]
    for one, other in zip(alone, together, strict=True):
        assert [at for _, at in one.gate.steps[1:]] == [at for _, at in other.gate.steps[1:]]
        for (mine, _), (theirs, _) in zip(one.gate.steps[1:], other.gate.steps[1:], strict=True):
            assert list(mine) == list(theirs) == ["1.weight", "1.bias"]
            assert all(torch.allclose(mine[name], theirs[name], atol=1e-10) for name in mine)
    assert private_stacks(small([7]))[0] in ([], [[0]])
