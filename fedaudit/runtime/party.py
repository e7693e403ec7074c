"""Who acts in a run: the server, the clients, and the cohort that a round asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fedaudit.errors import NotApplicable, PrivacyError
from fedaudit.privacy.mechanism import Context, clip_rows, protect, protect_field
from fedaudit.privacy.policy import TRAINING
from fedaudit.rng import generator
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.turns import carry_out, say_alone
from fedaudit.training import models
from fedaudit.training.fit import Fitted, Loss, Norms, Opt, Turns, Until, moments_of
from fedaudit.training.forward import in_chunks
from fedaudit.training.stack import Job
from fedaudit.wire.message import Down, Up

if TYPE_CHECKING:
    from fedaudit.runtime.world import World


class Party:
    """What server and client have in common: a clock, generators, a device, and the training loop."""

    def __init__(self, world: World, name: str, t: int, ask: int, meter: Meter):
        self._world, self._name, self.t, self._ask, self._meter = world, name, t, ask, meter
        self.device = world.device
        self.shape: tuple[int, int, int] = world.shape
        self.classes: int = world.classes
        self.rounds: int = world.setting.rounds  # T

    def rng(self, purpose: str) -> torch.Generator:
        """A generator of its own for each purpose, the same whenever this round is run."""
        return generator(self._world.setting.seed, self._name, self.t, self._ask, purpose, device=self.device)

    def optimise(
        self,
        params: Sequence[Tensor],
        closure: Callable[[], Tensor],
        *,
        steps: int,
        opt: Opt,
        moments: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Minimise what `closure` computes over `params`: for what is no model training, such as images.

        Returns what the optimiser remembers; given back as `moments`, the next call goes on where this one ended.
        """
        say_alone("what it optimises is free-form")
        with self._meter.span("optimise"):
            optimiser = opt.build(list(params), moments)
            for _ in range(steps):
                optimiser.zero_grad(set_to_none=True)
                closure().backward()
                optimiser.step()
            return moments_of(optimiser)

    def _fit(self, model: nn.Module, loss: Loss, rows: Sequence[Tensor], **options: Any) -> Fitted:
        self._fits = getattr(self, "_fits", 0) + 1
        with self._meter.span("fit"):
            return carry_out(Job(model, loss, tuple(rows), self.rng(f"fit {self._fits}"), options))


class Server(Party):
    """The coordinator. It holds no private data."""

    @property
    def clients(self) -> int:
        """K, the number of clients in the federation."""
        return self._world.setting.clients

    def arch(self, k: int) -> str:
        """The architecture of client k's model: public knowledge."""
        return self._world.archs[k]

    def model(self, arch: str | None = None) -> models.Net:
        """A freshly initialised model, in evaluation mode."""
        if arch is None:
            arch = self._world.server_arch
        return self._world.build(arch)

    @cached_property
    def public(self) -> tuple[Tensor, Tensor]:
        """The public transfer set, of which everybody holds a copy. Labels of another data set are all -1."""
        x, y = self._world.public()
        return x.clone(), y.clone()

    @property
    def public_labelled(self) -> bool:
        """Whether the labels of the public set are of the task."""
        return self._world.public_labelled

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

    def __init__(
        self,
        world: World,
        k: int,
        t: int,
        ask: int,
        meter: Meter,
        model: models.Net,
        memory: dict[str, Any],
        plain_fits: int = 0,
        spent: dict[str, int] | None = None,
        attempt: int = 0,
    ):
        super().__init__(world, f"client {k}", t, ask, meter)
        self.id = k
        self.model = model
        self.memory = memory  # plain trees of tensors, states, numbers and strings; survives the codec
        self.private_fits = 0
        self.plain_fits = plain_fits  # trainings on private records without DP, over all rounds
        self.spent = spent or {}  # releases by kind and trainings so far, where a budget was planned for so many
        self.looked = False  # whether this task read records other than through fit
        self.entries: list[dict[str, Any]] = []  # for the ledger
        self.released: list[Any] = []  # what client.protect gave back
        self._attempt = attempt
        self._replay: list[Any] | None = None
        self._swap_after: int | None = None
        self._means: list[Tensor] = []  # keeps the ids in the context valid

    @property
    def x(self) -> Tensor:
        """The private records (members), in [-1, 1]."""
        self.looked = True
        return self._rows[0]

    @property
    def y(self) -> Tensor:
        self.looked = True
        return self._rows[1]

    @cached_property
    def _rows(self) -> tuple[Tensor, Tensor]:
        swapped = self._swap_after is not None and self.private_fits >= self._swap_after
        return self._world.other_rows(self.id) if swapped else self._world.members(self.id)

    @cached_property
    def public(self) -> tuple[Tensor, Tensor]:
        """The public transfer set, of which everybody holds a copy."""
        x, y = self._world.public()
        return x.clone(), y.clone()

    @property
    def validation(self) -> tuple[Tensor, Tensor]:
        """The records that this client holds out to choose by; none of them trains."""
        self.looked = True
        return self._world.validation(self.id)

    def server_model(self) -> models.Net:
        """A freshly initialised model of the server's architecture, which everybody knows."""
        return self._world.build(self._world.server_arch)

    def __len__(self) -> int:
        return self._world.count(self.id)

    @property
    def private_training(self) -> bool:
        """Whether training on the records is DP-SGD in this run."""
        return TRAINING in self._world.policies

    def swap_after(self, private_fits: int | None, replay: list[Any] | None = None) -> None:
        """For the test of declarations: after so many private fits, hold other records, as many as before.

        `replay` stands in for what `protect` would give back, so that what is derived from it must not change.
        """
        self._swap_after, self._replay = private_fits, replay

    @cached_property
    def _context(self) -> Context:
        return Context(
            key=(self._world.setting.seed, self._name, self.t, self._ask, self._attempt),
            n=len(self),
            policies=self._world.policies,
            releases=self._world.releases,
            images=lambda: self.x,
            encode=lambda x: self.model.eval().encode(x),
            predict=lambda x: self.model.eval()(x),
            plain_fits=self.plain_fits,
            spent=self.spent,
        )

    def protect(self, message: type[Up], field: str, value: Any) -> Any:
        """`value` as it will leave in `message.field`. What is computed from that is post-processing, and free."""
        if self._replay:
            released = self._replay.pop(0)
            self._context.done[f"{message.__name__}.{field}"] = (released, [])
        else:
            released = protect_field(message, field, value, self._context)
        self.released.append(released)
        return released

    def class_means(self, rows: Tensor, kind: str, y: Tensor | None = None) -> dict[int, Tensor]:
        """The mean of the rows of each class present, the rows clipped first where the kind's policy clips."""
        y = self.y if y is None else y
        policy = self._world.policies.get(kind)
        C = policy.clip if policy is not None and policy.mechanism == "gaussian" else None
        if C is not None:
            rows = clip_rows(rows, C)
        means = {}
        for c in y.unique().tolist():
            of_class = rows[y == c]
            means[c] = of_class.mean(0)
            if C is not None:
                self._context.means[id(means[c])] = (C, len(of_class))
        self._means += means.values()
        return means

    def release(self, reply: Up) -> tuple[Up, dict[str, Any]]:
        """The reply as it may leave, and the public parameters of its protection. Called by the harness."""
        self._context.plain_fits = self.plain_fits
        with self._meter.span("protect"):
            reply, protection, entries = protect(reply, self._context)
        self.entries += entries
        return reply, protection

    def optimise(
        self,
        params: Sequence[Tensor],
        closure: Callable[[], Tensor],
        *,
        steps: int,
        opt: Opt,
        moments: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """As the server's; it counts as training on the records."""
        if TRAINING in self._world.policies:
            raise NotApplicable(
                "client.optimise cannot be made private: DP-SGD bounds what single records do to a loss that fit "
                "reduces, and this one is free-form. Run this method without privacy.training."
            )
        after = super().optimise(params, closure, steps=steps, opt=opt, moments=moments)
        self.plain_fits += 1
        self._count_private_fit()
        return after

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
        turns: Turns | None = None,
        norms: Norms = "batch",
        beside: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> Fitted:
        """Train this client's model on its private records, or on `data` built from received messages or noise.

        `beside`: what fixed models make of each record, computed once; the loss gets it after the record's own rows.
        Such a function looks at one record at a time (a model in evaluation mode), so that DP-SGD still bounds what a
        record can do.
        """
        options = {"opt": opt, "batch": batch, "epochs": epochs, "steps": steps, "given": given}
        model = model or self.model
        rows = self._rows if data is None else data
        rows = (*rows, *(in_chunks(fixed, rows[0]) for fixed in beside))
        if data is None and TRAINING in self._world.policies:
            if turns is not None or norms != "batch":
                raise NotApplicable("fit: DP-SGD samples all records alike, without turns or frozen batch norms.")
            return self._fit_private(model, loss, rows, until, separable, options)
        fitted = self._fit(model, loss, rows, until=until, separable=separable, turns=turns, norms=norms, **options)
        if data is None:
            self.plain_fits += 1
            self._count_private_fit()
        elif self.looked:
            self.plain_fits += 1  # the data may have been built from the records that this task looked at
        return fitted

    def _fit_private(
        self,
        model: nn.Module,
        loss: Loss,
        rows: Sequence[Tensor],
        until: Until | None,
        separable: bool,
        options: dict[str, Any],
    ) -> Fitted:
        from fedaudit.privacy.dpsgd import fit_private

        if until is not None:
            raise PrivacyError(
                f"{self._world.setting.method} stops training by looking at its records (until=...), which DP-SGD does "
                "not account for. Set its stopping rule off, so that it trains for a fixed number of epochs."
            )
        if not separable:
            raise NotApplicable(
                f"{self._world.setting.method} trains on a loss that does not separate over records (separable=False); "
                "no clipping of single records' gradients exists for it. Run it without privacy.training."
            )
        policy = self._world.policies[TRAINING]
        self._fits = getattr(self, "_fits", 0) + 1
        self.spent[TRAINING] = self.spent.get(TRAINING, 0) + 1
        planned = policy.releases or self._world.setting.rounds
        if policy.epsilon is not None and self.spent[TRAINING] > planned:
            raise PrivacyError(
                f"privacy.training planned {planned} trainings of client {self.id}, and this is number "
                f"{self.spent[TRAINING]}. Say how many there will be over the run: privacy.training.releases."
            )
        say_alone("DP-SGD draws another number of records in each step")
        key = (os.urandom(16).hex(),) if policy.secure else self._context.key
        with self._meter.span("fit"):
            fitted, entry = fit_private(
                model,
                loss,
                rows,
                rng=generator(*key, f"sample {self._fits}", device=self.device),
                noise=generator(*key, f"dp-sgd {self._fits}", device=self.device),
                policy=policy,
                fits=planned,
                **options,
            )
        self.entries.append(entry)
        if self.looked and options["given"]:
            self.plain_fits += 1  # what the loss was given may have been built from the records
        self._count_private_fit()
        return fitted

    def _count_private_fit(self) -> None:
        self.private_fits += 1
        if self.private_fits == self._swap_after:
            del self._rows


U = TypeVar("U", bound=Up)


class Cohort:
    """The clients of one round. Built by the run; a method sees `ids` and `ask`."""

    def __init__(self, ids: Sequence[int], ask: Callable[..., dict[int, Up]]):
        self.ids = list(ids)
        self._ask = ask

    def ask(self, fn: Callable[[Any, Any], U], message: Down | Mapping[int, Any]) -> dict[int, U]:
        """Send a message to the clients, run `fn` there, and return who answered what, by ascending client.

        `fn` is a function of the running method. With a dict, only its keys are asked. A client that fails is
        absent here and from later asks of the round.
        """
        return cast(dict[int, U], self._ask(self, fn, message))
