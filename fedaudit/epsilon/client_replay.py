"""A client's part in a run, performed again: what it released before the noise, beside the bytes that it sent.

Every task of a client is run as it was, in order, with its own records, generators and messages, from the first on.
What `client.protect` gives back is what was sent, so that noise which nobody can draw again (secure = true) does not
lead the repetition astray. That it is the same computation is checked: what was sent unprotected has to come out again,
and so has the state that the client was left with.

Where the run compressed what it sent, the release is made again with its noise and compressed again. If that gives what
was sent, to the bit, the release before compression is looked at. If not, levels (int8) are looked at as what they are,
rounded numbers; of what is left of the others nothing can be told.

A private training is repeated on the path that the run took: alone, or as a stack. Its steps are looked at as they
leave the mechanism (fedaudit.epsilon.private_steps). Records whose gradients are far longer than C, and shorter, are
put through the same path, to see what clipping leaves of them. Where the record does not hold what single steps need,
the training is run beside it with noise and without, in double precision and with steps so small that the model stays
where it is: the difference of the two models is the noise of all steps, and nothing else.
"""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedaudit.epsilon.private_steps import MadeTraining, Span, StepWatch, Told, aligned, doubled, sum_of_noise
from fedaudit.errors import FedauditError, ThreatError
from fedaudit.privacy.dpsgd_stack import PrivateJob, Trained, fit_private_together, private_stacks
from fedaudit.privacy.mechanism import prepare, with_noise
from fedaudit.privacy.mechanism_outputs import Outputs, Training, gated, outputs
from fedaudit.privacy.mechanisms.base import Prepared, mechanism_of
from fedaudit.privacy.noise_key import NoiseKey, noise_generator, task_key
from fedaudit.privacy.policy import TRAINING, Policy
from fedaudit.privacy.trees import leaves_of, rebuilt
from fedaudit.progress import Watch
from fedaudit.rng import seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.method import find_function
from fedaudit.runtime.party import Client
from fedaudit.runtime.task import ClientState, open_client, state_after
from fedaudit.runtime.world import chosen_engine
from fedaudit.training.augment import Augmentation
from fedaudit.training.fit import Fitted, Loss, Until, sgd
from fedaudit.training.stacked.stack import Job
from fedaudit.wire.codec import decode, decode_tree, digest_of, encode, encode_field
from fedaudit.wire.compression import Stage, applies
from fedaudit.wire.message import Declared, Down, Up
from fedaudit.wire.release import UNPROTECTED
from fedaudit.wire.transcript import TranscriptEntry

STEP = 1e-6  # learning rate at which a model stays where it is
MODELS = ("weights", "layers")  # kinds that private training covers
QUIET = 1e-9  # noise multiplier that is none
FEW = 4  # records whose clipped gradients are looked at by themselves
TENSORS = 8  # parameters along which gradients of other lengths are put through the clipping
FAR, NEAR = 10.0, 0.1  # lengths of such gradients, in clipping norms


@dataclass(frozen=True)
class Seen:
    """One protected field of one message: before the noise, and as it arrived."""

    where: str
    kind: str
    dtype: str | None
    client: int
    round: int
    ready: Prepared
    sent: list[Tensor]
    sigma: float | None  # what the transcript says of it
    rounded: bool = False  # it was compressed to 255 levels between the largest magnitude and its negative


@dataclass(frozen=True)
class Stepped:
    """One private training: the noise of its steps by parameter, summed up and in units of the promised deviation."""

    client: int
    round: int
    sigma: float
    steps: int
    noise: dict[str, Tensor]
    clean: dict[str, Tensor]  # the clipped gradients, summed up, as a direction
    largest: float  # norm of a single record's clipped gradient, of a few, over the clipping norm


@dataclass
class Repeated:
    """The repetition of one client's tasks: what it showed, and how far it is from the run."""

    client: int
    seen: list[Seen] = field(default_factory=list)
    trained: list[Stepped] = field(default_factory=list)
    made: list[MadeTraining] = field(default_factory=list)  # trainings whose steps were looked at one by one
    lacking: list[tuple[float, float]] = field(default_factory=list)  # cosine of what is missing with the noise, and p
    apart: float = 0.0  # largest difference of what was sent unprotected and of the last model, relative to its size
    same_state: bool = False
    reasons: list[str] = field(default_factory=list)  # why a release could not be looked at

    def add(self, found: Stepped | None) -> None:
        if found is not None:
            self.trained.append(found)

    @property
    def exact(self) -> bool:
        return self.same_state and self.apart == 0


Probe = Callable[["PrivateFit"], Stepped | None]  # what is to be done with each private training


class Watching(Outputs):
    """The gate of a repetition: it shows the steps of private trainings to whoever asked for it."""

    next: StepWatch | None = None

    def training(self, how: Callable[[], dict[str, str]]) -> Training:
        return super().training(how) if self.next is None else self.next


class Witness(Client):
    """A client that repeats a task. Set `sent` before the task begins."""

    sent: Up
    was: TranscriptEntry
    repeated: Repeated
    probes: Sequence[Probe]
    compression: Stage | None
    answered: Down
    stacked: bool = False  # the run trained its clients as a stack
    promised: float | None = None  # sigma of this round's training, as the ledger has it

    def _train(self, job: PrivateJob) -> Trained:
        """Take the run's path: a stack of this client alone is the same code as one of many."""
        if self.stacked and not private_stacks([job, job])[1]:
            return fit_private_together([job])[0]
        return super()._train(job)

    def protect(self, message: type[Up], field: str, value: Any) -> Any:
        where = f"{message.__name__}.{field}"
        declared = message.declared().get(field)
        mine = isinstance(self.sent, message) and declared is not None and declared.kind in self._site.policies
        if not mine or where in self._context.done:
            return super().protect(message, field, value)
        released = self._see(field, value)
        self._context.done[where] = (digest_of(released), [])
        if self._provenance is not None:
            self._provenance.released(field, released)
        return released

    def _see(self, name: str, value: Any) -> Any:
        """Look at a protected field; returns it as it left the mechanism, as far as that is known."""
        declared, where = self.sent.declared()[name], f"{type(self.sent).__name__}.{name}"
        assert declared is not None
        assert declared.kind is not None
        policy, sent = self._site.policies[declared.kind], getattr(self.sent, name)
        ready = prepare(value, where, declared, policy, self._context)
        arrived, rounded = leaves_of(sent, where), False
        if self.compression is not None and applies(declared):
            noisy = with_noise(ready, where, declared, policy, self._context)
            again = rebuilt(value, iter(noisy))
            if digest_of(self._arrived(again, where, declared)) == digest_of(sent):
                arrived, sent = noisy, again
            elif (
                self.compression.name == "int8"
                and mechanism_of(policy).rounds
                and [t.shape for t in arrived] == [t.shape for t in ready.leaves]
            ):
                rounded = True
            else:
                how = "its noise cannot be drawn again" if policy.secure else "it does not come out again"
                self.repeated.reasons.append(
                    f"{where} was compressed ({self.compression.name}), and {how}: what its noise was cannot be told"
                )
                return sent
        said = (self.was.fields[name].protection or UNPROTECTED).sigma
        seen = Seen(where, declared.kind, declared.dtype, self.id, self.t, ready, arrived, said, rounded)
        self.repeated.seen.append(seen)
        return sent

    def _arrived(self, value: Any, where: str, declared: Declared | None) -> Any:
        """A field as it is at the receiver's."""
        blob = encode_field(value, where, declared, self.compression, self.answered)
        return decode_tree(blob, device=self.device, base=lambda field: getattr(self.answered, field))

    def compare(self, reply: Up) -> None:
        """Compare what was sent unprotected with what comes out now, and return what is protected, before its noise."""
        for name, declared in reply.declared().items():
            where, value = f"{type(reply).__name__}.{name}", getattr(reply, name)
            private = declared is not None and declared.role == "private"
            if private and declared is not None and declared.kind in self._site.policies:
                if where not in self._context.done:
                    self._see(name, value)
                continue
            now = self._arrived(value, where, declared)
            sent = getattr(self.sent, name)
            self.repeated.apart = max(self.repeated.apart, apart(now, sent))
            if declared is not None and declared.kind in MODELS:
                self._hold_against_noise(now, sent)

    def _hold_against_noise(self, now: Any, sent: Any) -> None:
        """Look for the noise of this task's training in what was sent of the model, if that does not come out again."""
        mine = [made for made in self.repeated.made if made.round == self.t]
        if len(mine) != 1 or (noise := sum_of_noise(mine[0])) is None or digest_of(now) == digest_of(sent):
            return
        if not all(isinstance(of, Mapping) and noise.keys() <= of.keys() for of in (now, sent)):
            return  # what was sent is no model that has these parameters
        flat = [
            np.concatenate([of[name].detach().double().cpu().numpy().ravel() for name in noise]) for of in (sent, now)
        ]
        if any(len(of) != sum(n.size for n in noise.values()) for of in flat):
            return
        self.repeated.lacking.append(aligned(flat[0], flat[1], np.concatenate([n.ravel() for n in noise.values()])))

    def _fit_private(
        self, model: nn.Module, loss: Loss, rows: Sequence[Tensor], until: Until | None, separable: bool,
        options: dict[str, Any], beside: Sequence[Callable[[Tensor], Tensor]] = (),
    ) -> Fitted:  # fmt: skip
        before, policy = copy.deepcopy(model), self._site.policies[TRAINING]
        gate, watch = outputs(), None
        number, batch = getattr(self, "_fits", 0) + 1, options["batch"]
        if isinstance(gate, Watching):
            count = options["steps"] or (options["epochs"] or 0) * math.ceil(len(rows[0]) / batch)
            told = Told(
                before, loss, tuple(rows), options["given"] or {}, options["opt"], batch, policy,
                self.promised or (policy.noise_multiplier or math.nan) * (policy.clip or 1.0), (*self._key, number),
                self.device, count, options.get("augment"), self._site.people(),
            )  # fmt: skip
            watch = gate.next = None if told.lacks or not math.isfinite(told.sigma) else StepWatch(told)
        fitted = super()._fit_private(model, loss, rows, until, separable, options, beside)
        entry = self.entries[-1]
        key = (os.urandom(16).hex(),) if policy.secure else self._key
        if fitted.steps:
            fit = PrivateFit(
                self.id, self.t, before, loss, tuple(doubled(row) for row in rows),
                {name: doubled(value) for name, value in (options["given"] or {}).items()},
                options["batch"], options["epochs"], options["steps"], fitted.steps, entry.sigma or 0.0,
                policy.model_copy(update={"delta": entry.delta}), policy.releases or self._site.rounds,
                (*key, self._fits), self.device, options.get("augment"), self._site.people(), self.stacked,
            )  # fmt: skip
            for probe in self.probes:
                if probe is noise_of:
                    self._note(fit, watch, told.lacks if isinstance(gate, Watching) else None)
                    if watch is not None:
                        continue
                with seeded("witness", self.id, self.t, device=self.device):
                    self.repeated.add(probe(fit))
        return fitted

    def _note(self, fit: PrivateFit, watch: StepWatch | None, lacks: str | None) -> None:
        with seeded("witness", self.id, self.t, device=self.device):
            longest = clipped_lengths(fit)
        self.repeated.made.append(
            MadeTraining(
                self.id, self.t, len(fit.rows[0]), min(1.0, fit.batch / len(fit.rows[0])),
                fit.count if watch is None else watch.made, fit.C, fit.sigma if watch is None else watch.told.sigma,
                () if watch is None else tuple(watch.found), Span() if watch is None else watch.span,
                "" if watch is None else watch.wrong, lacks or "", longest,
            )
        )  # fmt: skip


@dataclass(frozen=True)
class PrivateFit:
    """A private training as it was called, to be run again in other ways: in double precision, with tiny steps."""

    client: int
    round: int
    model: nn.Module
    loss: Loss
    rows: tuple[Tensor, ...]
    given: dict[str, Any]
    batch: int
    epochs: int | None
    steps: int | None
    count: int  # steps that it took
    sigma: float  # as the ledger has it
    policy: Policy  # its delta is the training's own as a number: parts of it, of few records, have no other
    fits: int
    key: tuple[object, ...]
    device: torch.device
    augment: Augmentation | None = None
    people: Tensor | None = None  # whose record each one is, if the guarantee is for persons
    stacked: bool = False  # the run trained its clients as a stack

    @property
    def C(self) -> float:
        return self.policy.clip or 1.0

    @property
    def expected(self) -> int:
        """The batch size that steps are divided by."""
        n = len(self.rows[0])
        return max(1, round(min(1.0, self.batch / n) * n))

    @property
    def start(self) -> dict[str, Tensor]:
        return {name: p.detach().double() for name, p in self.model.named_parameters() if p.requires_grad}

    def with_noise(self, multiplier: float | None) -> Policy:
        """The policy with this noise; None: as it is."""
        if multiplier is None:
            return self.policy
        return self.policy.model_copy(update={"noise_multiplier": multiplier, "epsilon": None})

    def after(self, multiplier: float | None = None) -> dict[str, Tensor]:
        """The parameters after all steps. The sample and the noise are drawn as in the run."""
        from fedaudit.privacy.dpsgd import fit_private

        copied, policy = copy.deepcopy(self.model).double(), self.with_noise(multiplier)
        sample, noise = (
            noise_generator(self.key[:-1], f"{what} {self.key[-1]}", device=self.device)
            for what in ("sample", "dp-sgd")
        )
        options: dict[str, Any] = {
            "opt": sgd(STEP), "batch": self.batch, "epochs": self.epochs, "steps": self.steps, "given": self.given,
            "augment": self.augment,
        }  # fmt: skip
        with seeded("witness", "layers", device=self.device):  # dropout draws the same each time
            if self.stacked and self.people is None:
                job = PrivateJob(Job(copied, self.loss, self.rows, sample, options), noise, policy, self.fits)
                if not private_stacks([job, job])[1]:
                    fit_private_together([job])
                    return {name: p.detach() for name, p in copied.named_parameters() if p.requires_grad}
            fit_private(
                copied, self.loss, self.rows, policy=policy, fits=self.fits, people=self.people, rng=sample,
                noise=noise, **options,
            )  # fmt: skip
        return {name: p.detach() for name, p in copied.named_parameters() if p.requires_grad}


def clipped_lengths(fit: PrivateFit) -> float:
    """Return how far one record moves a step's sum at most, in clipping norms, by records that are made for it.

    Each has a gradient of 10 C or 0.1 C along one entry of one parameter; one has it along two parameters at once; and
    one of 100 C is added to a step that already holds another in the opposite direction. The sums are taken from the
    training's own steps without noise, and their lengths are computed here.
    """
    names = list(fit.start)
    some = names[:: -(-len(names) // TENSORS)]
    row = tuple(r[:1] for r in fit.rows)

    def total(*records: tuple[tuple[str, float], ...]) -> dict[str, Tensor]:
        marks = torch.arange(len(records), device=fit.device)
        made = replace(
            fit, rows=(marks, *(torch.cat([r] * len(records)) for r in row)), batch=len(records), epochs=None, steps=1,
            people=None, augment=None, loss=functools.partial(_made_gradient, records=records),
        )  # fmt: skip
        after, start = made.after(QUIET), fit.start
        return {name: (start[name] - after[name]) / STEP * len(records) for name in start}

    def length(sums: dict[str, Tensor]) -> float:
        return math.sqrt(sum(float(t.double().square().sum()) for t in sums.values()))

    C, found = fit.C, []
    for name in some:
        far = total(((name, FAR * C),))
        found.append(length(far) / C)
        near = length(total(((name, NEAR * C),))) / C
        found.append(near if near > 2 * NEAR else 0.0)  # what is short stays as it is
    if len(names) > 1:
        found.append(length(total(((names[0], FAR * C), (names[-1], FAR * C)))) / C)
    one = ((names[0], FAR * C),)
    both, alone = total(one, ((names[0], -FAR * FAR * C),)), total(one)
    found.append(length({name: both[name] - alone[name] for name in both}) / C)
    return max(found)


def _made_gradient(f: Any, mark: Tensor, *rows: Tensor, records: Any, **given: Any) -> Tensor:
    """Return losses whose gradients are as long as `records` say, along the first entry of the named parameters."""
    of_each = torch.stack([sum(g * f.params[name].reshape(-1)[0] for name, g in record) for record in records])
    return of_each[mark]


def noise_of(fit: PrivateFit) -> Stepped:
    """The noise of all steps: the model with it less the model without."""
    noisy, clean, start = fit.after(), fit.after(QUIET), fit.start
    unit = STEP / fit.expected * fit.sigma * math.sqrt(fit.count)
    largest = 0.0
    for i in range(min(FEW, len(fit.rows[0]))):
        alone = tuple(row[i : i + 1] for row in fit.rows)
        one = replace(fit, rows=alone, batch=1, epochs=None, steps=1, people=None).after(QUIET)
        norm = torch.stack([(start[name] - p).norm() for name, p in one.items()]).norm()
        largest = max(largest, float(norm) / STEP / fit.C)
    noise = {name: (clean[name] - noisy[name]) / unit for name in clean}
    directions = {name: (start[name] - clean[name]) / STEP for name in clean}
    return Stepped(fit.client, fit.round, fit.sigma, fit.count, noise, directions, largest)


def apart(a: Any, b: Any) -> float:
    """The largest difference of two trees' numbers, relative to the largest number; infinite where they differ else."""
    if digest_of(a) == digest_of(b):
        return 0.0
    try:
        mine, other = leaves_of(a, "it"), leaves_of(b, "it")
    except FedauditError:
        return math.inf
    if [t.shape for t in mine] != [t.shape for t in other]:
        return math.inf
    gaps = [float((p.double() - q.double()).abs().max()) for p, q in zip(mine, other, strict=True) if p.numel()]
    size = max((float(q.double().abs().max()) for q in other if q.numel()), default=0.0)
    return max(gaps, default=math.inf) / (size or 1.0)


def repeat(run: RunFolder, k: int, watch: Watch, *probes: Probe) -> Repeated:
    """All tasks of client k that it answered, again. Call it inside `compute(world)`."""
    world = run.world
    if world.setting.start is not None:
        raise ThreatError("the clients started as another run left them, which this folder does not hold")
    found = Repeated(k)
    tasks = list(_tasks(run, k))
    state: bytes | None = None
    secret = run.secret
    for number, (down, up) in enumerate(tasks):
        watch(number, len(tasks), f"client {k}, round {down.round}")
        if not all(down.kept(name) for name in down.fields):
            raise ThreatError(
                f"the transcript did not keep what client {k} was sent in round {down.round}: run with a larger "
                "keep_weights"
            )
        site, meter = world.site(k), Meter(f"client {k}", down.round, world.device)
        key = NoiseKey(task_key(secret, k, down.round, down.ask, 0), once=False)
        with (
            gated(Watching(key)),
            seeded(world.setting.seed, f"client {k}", down.round, down.ask, device=world.device),
        ):
            message = decode(encode(down.record()), Down, device=world.device)
            client = open_client(site, down.round, down.ask, meter, state, message=message, cls=Witness)
            client.sent = decode(encode(up.record()), Up, device=world.device)
            client.was, client.repeated, client.probes = up, found, probes
            client.compression, client.answered = world.compression, copy.deepcopy(message)
            client.stacked, client.promised = chosen_engine(world.setting) == "stacked", _promised(run, k, down.round)
            reply = find_function(world.method, down.fn)(client, message)
            kept = client.settle()
            client.compare(reply)
            state = encode(state_after(client, kept))
    left = run.client_state(k)
    if left is None or state is None:
        raise ThreatError(f"the checkpoint has no state of client {k}: run it again")
    found.same_state = left == state
    if not found.same_state:
        mine, other = (decode(blob, ClientState).model for blob in (state, left))
        found.apart = max(found.apart, apart(mine, other))
    return found


def _promised(run: RunFolder, k: int, t: int) -> float | None:
    """Return the deviation of the noise on a step's sum that the ledger has for client k's training in a round."""
    entries = [e for row in run.record.ledger if row.client == k for e in row.entries if e.kind == TRAINING]
    return max((e.sigma for e in entries if t in e.rounds and e.sigma), default=None)


def _tasks(run: RunFolder, k: int) -> Iterator[tuple[TranscriptEntry, TranscriptEntry]]:
    """Return what client k was sent and answered, in order; a task without an answer changed nothing."""
    sent: dict[tuple[int, int], TranscriptEntry] = {}
    for entry in run.transcript.entries():
        if entry.client != k:
            continue
        if entry.direction == "down":
            sent[entry.round, entry.ask] = entry
        elif (entry.round, entry.ask) in sent:
            if not all(entry.kept(name) for name in entry.fields):
                raise ThreatError(
                    f"the transcript did not keep what client {k} sent in round {entry.round}: run with a larger "
                    "keep_weights"
                )
            yield sent.pop((entry.round, entry.ask)), entry
