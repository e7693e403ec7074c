"""The parties of a run: the server, the clients, and the cohort that a round asks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import EllipsisType
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor, nn

from fedaudit.aggregation.mean import Mean, mean_of
from fedaudit.aggregation.sender import Sender
from fedaudit.errors import ContractError, NotApplicable, PrivacyError
from fedaudit.privacy.dpsgd import Progress, trained
from fedaudit.privacy.dpsgd_stack import PrivateJob, Trained
from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.mechanism import protect, protect_field
from fedaudit.privacy.mechanism_outputs import OF_TASK, Released, Training, outputs, structure_of
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.privacy.noise_key import noise_generator
from fedaudit.privacy.policy import TRAINING
from fedaudit.privacy.provenance import Provenance
from fedaudit.privacy.sensitivity import Context
from fedaudit.rng import generator, kept
from fedaudit.runtime.lockstep import carry_out, descend, say_alone
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.site import Hub, Rows, RunFacts, Site
from fedaudit.runtime.work_once import check_work, done_alone
from fedaudit.shape import Shape
from fedaudit.training import models
from fedaudit.training.augment import Augmentation
from fedaudit.training.descent import Descent, Kept
from fedaudit.training.fit import Fitted, Loss, Norms, Opt, Turns, Until, carried, model_traces, named, traces
from fedaudit.training.forward import in_chunks, row_by_row
from fedaudit.training.stacked.stack import Job
from fedaudit.wire.codec import Frozen, FrozenPart, digest_of
from fedaudit.wire.message import Down, State, Up, load
from fedaudit.wire.release import Protection

Given = Mapping[str, Tensor] | None | EllipsisType  # the tensors of a model; where they are left out, they are drawn


class Party:
    """The common part of server and client: a clock, generators, a device, and the training loop."""

    def __init__(self, place: RunFacts, name: str, t: int, ask: int, meter: Meter):
        self._place, self._name, self.t, self._ask, self._meter = place, name, t, ask, meter
        self.device = place.device
        self.shape: Shape = place.shape
        self.classes: int = place.classes
        self.rounds: int = place.rounds  # T

    def rng(self, purpose: str) -> torch.Generator:
        """Return a generator of its own for each purpose, the same whenever this round is run."""
        own = purpose.replace("/", "//")  # names are joined by "/": no purpose reaches another name's generator
        return generator(self._place.seed, self._name, self.t, self._ask, own, device=self.device)

    @cached_property
    def public(self) -> tuple[Tensor, Tensor]:
        """Return the public transfer set, of which everybody holds a copy. Labels of another data set are all -1."""
        x, y = self._place.public()
        return x.clone(), y.clone()

    def optimise(
        self,
        params: Sequence[Tensor],
        closure: Callable[[], Tensor],
        *,
        steps: int,
        opt: Opt,
        moments: Mapping[str, Tensor] | None = None,
        repeats: bool = False,
        before: Callable[[int], bool | None] | None = None,
        kept: Kept | None = None,
    ) -> dict[str, Tensor]:
        """Minimise what `closure` computes over `params`, if that is not the training of a model: images, for example.

        Returns what the optimiser remembers; given back as `moments`, the next call goes on where this one ended.

        `repeats`: the closure does the same in every step, on the same memory, and asks the device for nothing. It may
        then be recorded once and replayed, side by side with those of others. Whatever else changes from step to step,
        beside the random numbers, is written by `before` into memory that the closure reads. `before` gets the step's
        number. It returns False if a step has other shapes than the first, and must not be replayed.
        `kept`: the recording that several calls share.
        """
        with self._meter.span("optimise"):
            return descend(Descent(tuple(params), closure, steps, opt, moments, repeats, before, kept))

    def _fit(self, model: nn.Module, loss: Loss, rows: Sequence[Tensor], **options: Any) -> Fitted:
        with self._meter.span("fit"):
            return carry_out(self._job(model, loss, rows, options))

    def _job(self, model: nn.Module, loss: Loss, rows: Sequence[Tensor], options: Mapping[str, Any]) -> Job:
        self._fits = getattr(self, "_fits", 0) + 1
        return Job(model, loss, tuple(rows), self.rng(f"fit {self._fits}"), options)


def _there(state: Mapping[str, Tensor] | None, asked: str) -> Mapping[str, Tensor]:
    """Return a state that was given. None would otherwise become a model with weights that nobody trained."""
    if state is None:
        raise ContractError(
            f"{asked}(state=None): None is not a state. Leave `state` out for a model with new weights."
        )
    return state


class Server(Party):
    """The coordinator. It holds no private data."""

    def __init__(self, hub: Hub, t: int, meter: Meter):
        super().__init__(hub, "server", t, 0, meter)
        self._hub = hub

    @property
    def clients(self) -> int:
        """Return K, the number of clients in the federation."""
        return self._hub.clients

    def arch(self, k: int) -> str:
        """Return the architecture of client k's model, which is public knowledge."""
        return self._hub.archs[k]

    def sender(self, k: int) -> Sender:
        """Return client k as the sender of a reply that enters a sum."""
        return Sender(k, self.t, self._hub.archs, self._hub.shape, self._hub.classes)

    def model(self, arch: str | None = None, *, state: Given = ...) -> models.Net:
        """Return a freshly initialised model, or one with the tensors of a state, in evaluation mode."""
        of = self._hub.server_arch() if arch is None else arch
        return self._hub.build(of) if state is ... else load(self._hub.blank(of), _there(state, "server.model"))

    @property
    def public_labelled(self) -> bool:
        """Return whether the labels of the public set are those of the task."""
        return self._hub.public_labelled

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
        turns: Turns | None = None,
        augment: Augmentation | None = None,
    ) -> Fitted:
        """Train a model on the server's data. The options are those of `Client.fit`."""
        return self._fit(
            model, loss, data, opt=opt, batch=batch, epochs=epochs, steps=steps, given=given, until=until,
            separable=separable, turns=turns, augment=augment,
        )  # fmt: skip


class Client(Party):
    """Client k with its records, its model and its memory, for the length of one task."""

    def __init__(
        self,
        site: Site,
        t: int,
        ask: int,
        meter: Meter,
        model: models.Net,
        memory: dict[str, Any],
        plain_fits: int = 0,
        spent: dict[str, int] | None = None,
        attempt: int = 0,
        *,
        dirty: bool = False,
        released: Mapping[str, str] | None = None,
        message: Down | None = None,
    ):
        super().__init__(site, f"client {site.k}", t, ask, meter)
        self._site = site
        self.id = site.k
        self.model = model
        self.memory = memory  # plain trees of tensors, states, numbers and strings, which can be encoded
        self.private_fits = 0
        self.brought = (
            False  # whether training was given what the task read itself: it is billed as training without DP
        )
        self.plain_fits = plain_fits  # trainings on private records without DP, over all rounds
        self.spent = spent or {}  # releases by kind and trainings so far, if a budget was planned for a number of them
        self.looked = False  # whether this task read records other than through fit
        self.fitting = False  # True within a training on the records: a failure there may be due to them
        self.dirty = dirty  # whether memory holds something unprotected, written by a task that looked at the records
        _bills[self] = []
        self.released: list[Any] = []  # what client.protect gave back
        # Digests of what went into class means, for the test of declarations.
        self.watched: list[list[str]] | None = None
        self._attempt = attempt
        self._seen: dict[tuple[bool, bool], Rows] = {}
        self._provenance: Provenance | None = None
        if site.policies:  # without a policy nothing is promised, and no value needs to be traced
            known = (t, self.id, len(self), *site.hyperparameters)
            self._provenance = Provenance(message, known, released or {})

    @property
    def entries(self) -> list[LedgerEntry]:
        """Return the entries for the ledger so far: a copy. The bill itself is not the client's to change."""
        return list(_bills[self])

    def bill(self, *entries: LedgerEntry) -> None:
        """Add entries for the ledger. Called by the harness."""
        _bills[self] += entries

    @property
    def picked(self) -> list[list[str]]:
        """Return, for each known thing that it sent, kept or loaded by choice, the ways in which that may have come
        about."""
        return [] if self._provenance is None else self._provenance.picked

    @property
    def x(self) -> Tensor:
        """Return the private records (members), in [-1, 1]."""
        self._look()
        return self._rows()[0]

    @property
    def y(self) -> Tensor:
        self._look()
        return self._rows()[1]

    def _look(self) -> None:
        self.looked = True
        if self._provenance is not None:
            self._provenance.look(self.model, self.memory)

    def _rows(self, fitting: bool = False, look: bool = False) -> Rows:
        """Return the records. They are loaded once, and again if the test of declarations swaps them.

        `look`: nobody changes what comes back or hands it on, so that it need not be this task's own copy.
        """
        swap = self._site.swap
        swapped = swap is not None and self.private_fits >= swap.after
        key = (fitting and swap is not None, swapped)
        if key not in self._seen and look and swap is None and self._site.seen is not None:
            return self._site.seen()
        if key not in self._seen:
            self._seen[key] = self._site.rows(self.private_fits, fitting=fitting)
        return self._seen[key]

    @property
    def validation(self) -> tuple[Tensor, Tensor]:
        """Return the records that this client holds out to choose by; none of them trains."""
        self._look()
        return self._site.validation()

    def server_model(self, *, state: Given = ...) -> models.Net:
        """Return a freshly initialised model of the server's architecture, which everybody knows, or one with the
        tensors of a state.
        """
        if state is ...:
            return self._site.server_model()
        return load(self._site.blank_server_model(), _there(state, "client.server_model"))

    def __len__(self) -> int:
        return self._site.count

    @property
    def private_training(self) -> bool:
        """Return whether training on the records is DP-SGD in this run."""
        return TRAINING in self._site.policies

    @cached_property
    def _context(self) -> Context:
        return Context(
            key=self._key,
            let_out=self._let_out,
            n=len(self),
            policies=self._site.policies,
            releases=self._site.releases,
            absent=lambda: self._site.absent(self.t),
            images=lambda: self._rows()[0],
            encode=lambda x: self.model.eval().encode(x),
            predict=lambda x: self.model.eval()(x),
            classes=self.classes,
            plain_fits=self.plain_fits,
            dirty=self.dirty,
            provenance=self._provenance,
            spent=self.spent,
            most=self._most,
        )

    @cached_property
    def _most(self) -> int:
        """Return how many records one person has here, at most; 1 if the guarantee is for single records."""
        people = self._site.people()
        return 1 if people is None or not len(people) else int(people.unique(return_counts=True)[1].max())

    @property
    def _key(self) -> tuple[object, ...]:
        """Return the names of this task's noise: in a run the task's own key, which is not the client's to know."""
        own = (self._site.seed, self._name, self.t, self._ask, self._attempt)  # for shadows and rehearsals
        return own if outputs() is None else (OF_TASK,)

    @staticmethod
    def _let_out(where: str, depends: str, value: Any, make: Callable[[], Released]) -> Released:
        gate = outputs()
        return make() if gate is None else gate.field(where, depends, value, make)

    def protect(self, message: type[Up], field: str, value: Any) -> Any:
        """Return `value` as it will leave in `message.field`. Whatever is computed from the result is post-processing,
        and free."""
        gate = outputs()
        if gate is not None and gate.replay:
            released = gate.replay.pop(0)
            self._context.done[f"{message.__name__}.{field}"] = (digest_of(released), [])
            if self._provenance is not None:
                self._provenance.released(field, released)
        else:
            released = protect_field(message, field, value, self._context)
        self.released.append(released)
        return released

    def derive(self, make: Callable[..., Any], released: Any, **numbers: float) -> Any:
        """Return `make(released, **numbers)`: post-processing of what `protect` gave back, in this task or an earlier
        one.

        The harness carries it out, so that the result is free also in a task that looks at its records. `make` is a
        plain function that brings nothing of its own; the numbers are hyper-parameters of the method.
        """
        seen = self._provenance
        if seen is not None:
            if carried(make):
                raise PrivacyError(f"client.derive: {make!r} carries values of its own. Give a plain function.")
            if not seen.is_released(released):
                raise PrivacyError(
                    "client.derive was given a value that client.protect did not give back. Give that value, unchanged."
                )
            if wrong := [name for name, value in numbers.items() if not seen.is_known(value)]:
                raise PrivacyError(
                    f"client.derive: {', '.join(wrong)} is not a hyper-parameter of the method. Give only such."
                )
        value = make(released, **numbers)
        if seen is not None:
            seen.derived(value, getattr(make, "__qualname__", repr(make)))
        return value

    def once(self, make: Callable[..., Any], *parts: FrozenPart, **given: Any) -> Any:
        """Return `make(*parts, **given)`, where each part is a copy of what is frozen there.

        Clients of one process that hold equal contents do it once. Each of them pays for it, and gets a copy of its
        own. `make` is a function of a module that depends on its arguments alone, and `given` are numbers and texts.
        """
        check_work(make, parts, given)
        if self._site.once is None:
            return done_alone(make, parts, given, self.device)
        return self._site.once.do(make, parts, given, self.t, self._meter.away)

    def class_means(self, rows: Tensor, kind: str, y: Tensor | None = None) -> dict[int, Tensor]:
        """Return the mean of the rows of each class present. The rows are clipped first if the kind's policy clips."""
        y = self.y if y is None else y
        policy = self._site.policies.get(kind)
        how = None if policy is None else mechanism_of(policy)
        C = None if how is None or policy is None else how.clip(policy)
        if how is not None and C is not None:
            rows = how.clipped(rows, C)
            if len(rows) > len(self):
                raise PrivacyError(
                    f"client.class_means was given {len(rows)} rows, and the client has {len(self)} records: a record "
                    "that counts more than once is not bounded by the noise of its class. Give one row per record."
                )
        if self.watched is not None:
            self.watched.append([digest_of(row) for row in rows])
        means, call = {}, max(self._context.tables.values(), default=-1) + 1
        for c in y.unique().tolist():
            of_class = rows[y == c]
            means[c] = of_class.mean(0)
            if C is not None:
                digest = digest_of(means[c])
                smallest = min(len(of_class), self._context.means.get(digest, (C, len(of_class)))[1])
                self._context.means[digest] = (C, smallest)  # if two classes have equal means, the smaller class counts
                self._context.tables.setdefault(digest, call)
        return means

    def settle(self) -> dict[str, str]:
        """Close the task: what it changed outside of private fits is marked as tainted. Called by the harness.

        Returns which values in memory are as they were released, for the tasks to come.
        """
        if self._provenance is None:
            return {}
        kept = self._provenance.settle(self.model, self.memory)
        self.dirty = self.dirty or self._provenance.dirty
        if self._provenance.tainted and self.private_training:
            self.plain_fits += 1
        return kept

    def release(self, reply: Up) -> tuple[Up, dict[str, Protection]]:
        """Return the reply as it may leave, and the public parameters of its protection. Called by the harness."""
        check_buffers(reply, self.model)
        self._context.plain_fits, self._context.dirty = self.plain_fits, self.dirty
        with self._meter.span("protect"):
            reply, protection, entries = protect(reply, self._context)
        self.bill(*entries)
        return reply, protection

    def optimise(
        self,
        params: Sequence[Tensor],
        closure: Callable[[], Tensor],
        *,
        steps: int,
        opt: Opt,
        moments: Mapping[str, Tensor] | None = None,
        repeats: bool = False,
        before: Callable[[int], bool | None] | None = None,
        kept: Kept | None = None,
    ) -> dict[str, Tensor]:
        """Minimise a closure as `Party.optimise` does; it counts as training on the records."""
        if self.private_training:
            raise NotApplicable(
                "client.optimise cannot be made private: DP-SGD bounds what single records do to a loss that fit "
                "reduces, and this one is free-form. Run this method without privacy.training."
            )
        after = super().optimise(
            params, closure, steps=steps, opt=opt, moments=moments, repeats=repeats, before=before, kept=kept
        )
        self.brought = True
        self.plain_fits += 1
        self.private_fits += 1
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
        augment: Augmentation | None = None,
    ) -> Fitted:
        """Train this client's model on its private records, or on `data` built from received messages or noise.

        `beside`: what fixed models compute for each record, computed once; the loss gets it after the record's own
        rows. Such a function looks at one record at a time (a model in evaluation mode), so that DP-SGD still bounds
        what a record can do. In a private training it is given the records one at a time.
        `augment`: what makes other images of each batch. `beside` and a function `until` see the records as they are.
        """
        options: dict[str, Any] = {"opt": opt, "batch": batch, "epochs": epochs, "steps": steps, "given": given}
        options["augment"] = augment
        model = model or self.model
        # Training copies the rows that it picks, so it may look at the kept ones; the method's functions get all.
        rows = self._rows(fitting=True, look=until is None and not beside) if data is None else data
        if data is None and self.private_training:
            if turns is not None or norms != "batch":
                raise NotApplicable("fit: DP-SGD samples all records alike, without turns or frozen batch norms.")
            return self._fit_on_records(model, loss, rows, until, separable, options, beside)
        rows = (*rows, *(in_chunks(fixed, rows[0]) for fixed in beside))
        self.brought = self.brought or bool(self.looked and (given or data is not None))
        self.fitting = data is None
        options |= {"until": until, "separable": separable, "turns": turns, "norms": norms}
        gate = outputs()
        if data is not None and gate is not None and gate.followed:
            # What it trains on is nobody's secret, so the twin's result must be the same to the bit: both train alone.
            say_alone("a training that a twin repeats is carried out alone, so that both round alike")
            with self._meter.span("fit"):
                fitted = self._job(model, loss, rows, options).alone()
        else:
            fitted = self._fit(model, loss, rows, **options)
        self.fitting = False
        if data is None:
            self.plain_fits += 1
            self.private_fits += 1
        elif self.looked:
            self.plain_fits += 1  # the data may have been built from the records that this task looked at
        return fitted

    def _fit_on_records(
        self,
        model: nn.Module,
        loss: Loss,
        rows: Sequence[Tensor],
        until: Until | None,
        separable: bool,
        options: dict[str, Any],
        beside: Sequence[Callable[[Tensor], Tensor]],
    ) -> Fitted:
        """Train privately. Whatever fails in here may fail because of the records, also if the task goes on."""
        before = [model_traces(model), *(traces(fixed, {}) for fixed in beside)]
        self.fitting = True
        try:
            with kept(self.device):  # what happens in there leaves the global generators as they were
                rows = (*rows, *(row_by_row(fixed, rows[0]) for fixed in beside))
                fitted = self._fit_private(model, loss, rows, until, separable, options, beside)
        except BaseException:
            condition = "a training on the records did not end"
            self.bill(LedgerEntry.unprotected("training (failure)", "training", condition))
            raise
        if before != [model_traces(model), *(traces(fixed, {}) for fixed in beside)]:
            raise ContractError(
                f"{type(model).__name__}, or what fit computes beside it, keeps something of the rows that go "
                "through it: what it saw of the records would leave the training unprotected. A forward pass "
                "returns its result, and writes nowhere."
            )
        self.fitting = False
        return fitted

    def _fit_private(
        self,
        model: nn.Module,
        loss: Loss,
        rows: Sequence[Tensor],
        until: Until | None,
        separable: bool,
        options: dict[str, Any],
        beside: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> Fitted:
        if until is not None:
            raise PrivacyError(
                f"{self._site.method} stops training by looking at its records (until=...), which DP-SGD does "
                "not account for. Set its stopping rule off, so that it trains for a fixed number of epochs."
            )
        if not separable:
            raise NotApplicable(
                f"{self._site.method} trains on a loss that does not separate over records (separable=False); "
                "no clipping of single records' gradients exists for it. Run it without privacy.training."
            )
        policy = self._site.policies[TRAINING]
        self._fits = getattr(self, "_fits", 0) + 1
        self.spent[TRAINING] = self.spent.get(TRAINING, 0) + 1
        planned = policy.releases or self._site.rounds
        if policy.epsilon is not None and self.spent[TRAINING] > planned:
            raise PrivacyError(
                f"privacy.training planned {planned} trainings of client {self.id}, and this is number "
                f"{self.spent[TRAINING]}. Say how many there will be over the run: privacy.training.releases."
            )
        key = (os.urandom(16).hex(),) if policy.secure else self._key
        seen = self._provenance
        assert seen is not None  # there is a policy
        seen.before_fit(model)
        rng, noise = (noise_generator(key, f"{what} {self._fits}", device=self.device) for what in ("sample", "dp-sgd"))
        gate, progress = outputs(), Progress()
        let_out = (
            Training() if gate is None else gate.training(lambda: described(model, loss, len(rows[0]), options, beside))
        )
        job = Job(model, loss, tuple(rows), rng, options)
        try:
            with self._meter.span("fit"):
                fitted, entry = self._train(
                    PrivateJob(job, noise, policy, planned, let_out, progress, self._site.people())
                )
            self.bill(entry)
        except BaseException:
            if (made := progress.entry()) is not None:
                self.bill(made)  # steps are paid for when they are made
            raise
        seen.after_fit(model)
        self.private_fits += 1
        return fitted

    def _train(self, job: PrivateJob) -> Trained:
        """Carry out a private training. An audit that repeats a task takes the path that the run took."""
        return carry_out(job)


# By client: the entries for the ledger. They are no attribute, so that a task does not change its own bill.
_bills: WeakKeyDictionary[Client, list[LedgerEntry]] = WeakKeyDictionary()


def described(
    model: nn.Module, loss: Loss, n: int, options: Mapping[str, Any], beside: Sequence[Callable[..., Any]] = ()
) -> dict[str, str]:
    """Return all that a private training is told beside the records, as texts and digests.

    Each of these must be known without the records: a loss, a start or a number that follows one record changes what
    all others do, and the noise hides one record alone.
    """
    opt = options["opt"]
    return {
        "records": str(n),
        **{name: str(options[name]) for name in ("batch", "epochs", "steps")},
        "optimiser": f"{opt.make.__qualname__} {opt.schedule} {digest_of_all(dict(opt.options))}",
        "augmentation": "" if options.get("augment") is None else digest_of_all(carried(options["augment"])),
        "loss": f"{named(loss)} {digest_of_all(carried(loss))}",
        "given": digest_of_all(options["given"] or {}),
        "beside": digest_of_all([[named(fixed), carried(fixed, but=(Party,))] for fixed in beside]),
        "start": digest_of_all(model),
        "parameters": structure_of({name: p.detach() for name, p in trained(model).items()}),
    }


def digest_of_all(value: Any) -> str:
    """Return a digest of numbers, tensors, networks and frozen values, and of what holds them; of anything else its
    type counts.
    """
    found: list[str] = []
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, nn.Module):
            found.append(type(value).__qualname__)
            todo.append(dict(value.state_dict()))
        elif isinstance(value, Mapping):
            found.append(f"{type(value).__name__} {list(map(str, value))}")
            todo += value.values()
        elif isinstance(value, list | tuple):
            found.append(f"{type(value).__name__} {len(value)}")
            todo += value
        elif isinstance(value, Tensor):
            found.append(f"{value.dtype} {list(value.shape)} {digest_of(value.detach())}")
        elif isinstance(value, Frozen):
            found.append(f"frozen {digest_of(value)}")
        else:
            plain = isinstance(value, str | int | float | bytes | None)
            found.append(repr(value) if plain else type(value).__qualname__)
    return xxhash.xxh3_128_hexdigest("\n".join(found).encode())


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def check_buffers(reply: Up, model: nn.Module) -> None:
    """Raise ContractError if a reply calls something a buffer that is not one. Papers do not count the bytes of
    buffers."""
    sent = {field: getattr(reply, field) for field in reply.declared()}
    states = {field: state for field, state in sent.items() if isinstance(state, State) and state.buffers}
    if states:
        parameters = {name for name, _ in model.named_parameters()}
        known = set(model.state_dict()) - parameters
        for field, state in states.items():
            foreign = {name for name in state.buffers - known if name.rsplit(".", 1)[-1] not in STATISTICS}
            if wrong := foreign | (state.buffers & parameters):
                raise ContractError(
                    f"{type(reply).__name__}.{field} calls {min(wrong)!r} a buffer, which the model does not: its "
                    "bytes would not be counted. Build the state with state_of(model)."
                )


U = TypeVar("U", bound=Up)


class Cohort:
    """The clients of one round. The run builds it; a method sees `ids`, `ask` and `mean`."""

    def __init__(
        self,
        ids: Sequence[int],
        ask: Callable[..., dict[int, Up]],
        mean: Callable[..., Mean[Any]] | None = None,
    ):
        self.ids = list(ids)
        self._ask, self._mean = ask, mean

    def ask(self, fn: Callable[[Any, Any], U], message: Down | Mapping[int, Any]) -> dict[int, U]:
        """Send a message to the clients, run `fn` there, and return who answered what, by ascending client.

        `fn` is a function of the running method. With a dict, only its keys are asked. A client that fails is
        absent here and from later asks of the round.
        """
        return cast(dict[int, U], self._ask(self, fn, message))

    def mean(self, fn: Callable[[Any, Any], U], message: Down | Mapping[int, Any], *, by: str | None = None) -> Mean[U]:
        """Send a message to the clients, run `fn` there, and return the mean of the replies as the harness computes it.

        `by` names the field of the reply that holds its weight; None: all weigh the same. Under secure aggregation the
        server learns this mean and no single reply. A client that fails is absent here and from later asks.
        """
        if self._mean is None:
            return mean_of(self.ask(fn, message), by)
        return cast(Mean[U], self._mean(self, fn, message, by))
