"""What a method is, and what it can reach: the server it runs on, the cohort it asks, the client it is sent to.

A method is a frozen set of hyper-parameters. Its state lives in the record that `round` returns and in
`client.model` and `client.memory`, never on `self`. `cohort.ask` is the only road to a client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedaudit import models
from fedaudit.config import Frozen, validated
from fedaudit.errors import ContractError
from fedaudit.fit import Fitted, Loss, Opt, Until, fit
from fedaudit.meter import Meter
from fedaudit.records import Down, Record, Size, State, Up
from fedaudit.rng import generator
from fedaudit.traffic import Plan

if TYPE_CHECKING:
    from fedaudit.world import World


class Method(Frozen):
    """A federated protocol: one file, one paper. Subclass it, declare hyper-parameters as fields, and register it."""

    registered_name: ClassVar[str] = ""
    quick: ClassVar[Mapping[str, Any]] = {}  # hyper-parameters with which a tiny run takes a second

    def init(self, server: Server) -> Record:
        """The state before round 1."""
        raise ContractError(f"{type(self).__name__}.init is missing: it returns the state before round 1, a Record.")

    def round(self, s: Any, server: Server, cohort: Cohort) -> Record:
        """One communication round on the server: the state before it in, the state after it out."""
        raise ContractError(f"{type(self).__name__}.round is missing: it returns the state after a round, a Record.")

    def predictor(self, s: Any, server: Server) -> nn.Module | None:
        """The global model; None where a method has none."""
        return None

    def personal(self, client: Client) -> nn.Module:
        """What this client would deploy."""
        return client.model

    def traffic(self, plan: Plan) -> dict[tuple[str, str], Size | int] | None:
        """Bytes of one round over the whole cohort, by ("up" or "down", "Message.field"). None: not declared."""
        return None

    @classmethod
    def make(cls, values: Mapping[str, Any]) -> Method:
        return validated(cls, dict(values), f"hyper-parameter of {cls.registered_name or cls.__name__}")


class Party:
    """What server and client have in common: a clock, generators, a device, and the training loop."""

    def __init__(self, world: World, name: str, t: int, ask: int, meter: Meter):
        self._world, self._name, self.t, self._ask, self._meter = world, name, t, ask, meter
        self.device = world.device
        self.shape: tuple[int, int, int] = world.shape
        self.classes: int = world.classes

    def rng(self, purpose: str) -> torch.Generator:
        """A generator of its own for each purpose, the same whenever this round is run."""
        return generator(self._world.setting.seed, self._name, self.t, self._ask, purpose, device=self.device)

    def optimise(self, params: Sequence[Tensor], closure: Callable[[], Tensor], *, steps: int, opt: Opt) -> None:
        """Minimise what `closure` computes over `params`: for what is no model training, such as images."""
        with self._meter.span("optimise"):
            optimiser = opt.build(list(params))
            for _ in range(steps):
                optimiser.zero_grad(set_to_none=True)
                closure().backward()
                optimiser.step()

    def _fit(self, model: nn.Module, loss: Loss, rows: Sequence[Tensor], **options: Any) -> Fitted:
        self._fits = getattr(self, "_fits", 0) + 1
        with self._meter.span("fit"):
            return fit(model, loss, rows, rng=self.rng(f"fit {self._fits}"), **options)


class Server(Party):
    """The coordinator. It holds no private data."""

    @property
    def clients(self) -> int:
        """K, the number of clients in the federation."""
        return self._world.setting.clients

    def arch(self, k: int) -> str:
        """The architecture of client k's model: public knowledge."""
        return self._world.archs[k]

    def model(self, arch: str | None = None) -> nn.Module:
        """A freshly initialised model, in evaluation mode."""
        if arch is None:
            arch = self._world.server_arch
        return models.build(arch, shape=self.shape, classes=self.classes).to(self.device).eval()

    @cached_property
    def public(self) -> tuple[Tensor, Tensor]:
        """The public transfer set, which everybody holds."""
        return self._world.public()

    def fit(
        self,
        model: nn.Module,
        loss: Loss,
        data: Sequence[Tensor],
        *,
        opt: Opt,
        batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        given: Mapping[str, Any] | None = None,
        until: Until | None = None,
        separable: bool = True,
    ) -> Fitted:
        return self._fit(
            model, loss, data, opt=opt, batch=batch, epochs=epochs, steps=steps, given=given, until=until,
            separable=separable,
        )  # fmt: skip


class Client(Party):
    """Client k with its records, its model and what it remembers, for the length of one task."""

    def __init__(self, world: World, k: int, t: int, ask: int, meter: Meter, model: models.Net, memory: dict[str, Any]):
        super().__init__(world, f"client {k}", t, ask, meter)
        self.id = k
        self.model = model
        self.memory = memory  # plain trees of tensors, states, numbers and strings; survives the codec
        self.private_fits = 0
        self._swap_after: int | None = None

    @property
    def x(self) -> Tensor:
        """The private records (members), in [-1, 1]."""
        return self._rows[0]

    @property
    def y(self) -> Tensor:
        return self._rows[1]

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        swapped = self._swap_after is not None and self.private_fits >= self._swap_after
        return self._world.other_rows(self.id) if swapped else self._world.members(self.id)

    @cached_property
    def public(self) -> tuple[Tensor, Tensor]:
        """The public transfer set, which everybody holds."""
        return self._world.public()

    def __len__(self) -> int:
        return self._world.count(self.id)

    def swap_after(self, private_fits: int | None) -> None:
        """For the test of declarations: after so many private fits, hold other records, as many as before."""
        self._swap_after = private_fits

    def fit(
        self,
        loss: Loss,
        data: Sequence[Tensor] | None = None,
        *,
        opt: Opt,
        batch: int,
        epochs: int | None = None,
        steps: int | None = None,
        given: Mapping[str, Any] | None = None,
        until: Until | None = None,
        separable: bool = True,
        model: nn.Module | None = None,
    ) -> Fitted:
        """Train this client's model on its private records, or on `data` built from received messages or noise."""
        fitted = self._fit(
            model or self.model, loss, self._rows if data is None else data, opt=opt, batch=batch, epochs=epochs,
            steps=steps, given=given, until=until, separable=separable,
        )  # fmt: skip
        if data is None:
            self.private_fits += 1
            if self.private_fits == self._swap_after:
                del self._rows
        return fitted


class Cohort:
    """The clients of one round. Built by the run; a method sees `ids` and `ask`."""

    def __init__(self, ids: Sequence[int], ask: Callable[..., dict[int, Up]]):
        self.ids = list(ids)
        self._ask = ask

    def ask(self, fn: Callable[[Any, Any], Up], message: Down | Mapping[int, Down]) -> dict[int, Up]:
        """Send a message to the clients, run `fn` there, and return who answered what, by ascending client.

        `fn` is a function of the running method. With a dict, only its keys are asked. A client that fails is
        absent here and from later asks of the round.
        """
        return self._ask(self, fn, message)


def function_path(method: Method, fn: Callable[..., Any]) -> str:
    """The name by which a client finds `fn` again: a function of the method, or of a method inside it."""
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    for prefix, part in _parts(method, ""):
        if owner is part and getattr(type(part), name, None) is getattr(fn, "__func__", None):
            return f"{prefix}{name}"
    raise ContractError(
        f"cohort.ask was given {getattr(fn, '__qualname__', fn)!r}, which is no function of "
        f"{type(method).__name__}. A closure or a foreign function would be a download that nobody bills: write it as "
        "a function of the method, and send what it needs in the message."
    )


def _parts(method: Method, prefix: str) -> list[tuple[str, Method]]:
    found = [(prefix, method)]
    for name in type(method).model_fields:
        value = getattr(method, name)
        if isinstance(value, Method):
            found += _parts(value, f"{prefix}{name}.")
    return found


def find_function(method: Method, path: str) -> Callable[[Client, Down], Up]:
    found: Any = method
    for part in path.split("."):
        found = getattr(found, part)
    return cast(Callable[[Client, Down], Up], found)


def weighted_mean(states: Mapping[int, State], weights: Mapping[int, float]) -> State:
    """sum_k (n_k / n) w_k, by ascending client so that the bits do not depend on who answered first."""
    if not states:
        raise ContractError("weighted_mean: no client answered.")
    ids = sorted(states)
    n = sum(weights[k] for k in ids)
    if n <= 0:
        raise ContractError(f"weighted_mean: the weights sum to {n}.")
    first = states[ids[0]]
    mean = {}
    for name, like in first.items():
        exact = like.dtype if like.is_floating_point() else torch.float64  # counters are averaged, then rounded
        total = torch.zeros_like(like, dtype=exact)
        for k in ids:
            total.add_(states[k][name].to(exact), alpha=weights[k] / n)
        mean[name] = total if like.is_floating_point() else total.round().to(like.dtype)
    return State(mean, buffers=first.buffers)
