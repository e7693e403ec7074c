"""A run in double precision that a test retells by hand: its records, its messages, its states, its draws.

A retelling imports no function of the method and none of the harness's training. What it shares with the run are the
records, the networks' first weights and the random numbers, which follow from names: `rng` for what a party draws,
`epoch` for the order of its records, `drawing` for the global generator (layers' first weights, dropout).

    ran = played("fedavg", tmp_path, set={"B": 16, "eta": 0.1})
    ran.rows[k]                  # client k's records (x, y)
    ran.first[k]                 # its model's weights before any training
    ran.states[0], ran.states[1] # the server's state before round 1, after round 1
    ran.down(1), ran.up(1)       # round 1's messages of the first ask by client, as the method's own records
    ran.down(1, ask=1)           # of the second ask
    ran.sent("Local")            # the same by the message's name
    ran.model(k), ran.memory(k)  # what client k held after round 1 (None: it never answered)
    ran.net(weights, arch)       # a network with these weights, to compute with
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from precision import double
from torch import Tensor, nn

from fedaudit import Down, Method, Setting, Up, registry, run
from fedaudit.rng import generator, seeded
from fedaudit.runtime.engines.serial import SerialEngine
from fedaudit.runtime.task import ClientState, Done, Task
from fedaudit.runtime.world import World
from fedaudit.training import models
from fedaudit.wire.codec import decode

SEED = 3
Rows = tuple[Tensor, Tensor]
Place = tuple[int, int]  # round, ask


@dataclass
class Played:
    """What a run did, for a retelling."""

    world: World
    rows: dict[int, Rows]  # each client's records
    first: dict[int, dict[str, Tensor]]  # each client's model before any training
    states: list[Any] = field(default_factory=list)  # the server's: before round 1, after round 1, ...
    asked: dict[Place, dict[int, Any]] = field(default_factory=dict)
    answered: dict[Place, dict[int, Any]] = field(default_factory=dict)
    held: dict[tuple[int, int], ClientState] = field(default_factory=dict)  # by round and client: its last state

    def down(self, t: int = 1, ask: int = 0) -> dict[int, Any]:
        """What the clients were sent in that ask, as the method's own messages; empty where there was no such ask."""
        return self.asked.get((t, ask), {})

    def up(self, t: int = 1, ask: int = 0) -> dict[int, Any]:
        """What they answered, after protection and codec. Who failed is absent."""
        return self.answered.get((t, ask), {})

    def sent(self, message: str, t: int = 1) -> dict[int, Any]:
        """The messages of that name in round t, by client. Fields by attribute, or by name: m["w"]."""
        return {
            k: Named(found)
            for way in (self.asked, self.answered)
            for (round, _), of_clients in way.items()
            for k, found in of_clients.items()
            if round == t and type(found).__name__ == message
        }

    def order(self, k: int, t: int = 1) -> list[str]:
        """The names of the messages to client k in round t."""
        return [type(by[k]).__name__ for (round, _), by in sorted(self.asked.items()) if round == t and k in by]

    def model(self, k: int, t: int = 1) -> dict[str, Tensor] | None:
        """Client k's own model after round t."""
        state = self._state(k, t)
        return None if state is None else dict(state.model)

    def memory(self, k: int, t: int = 1) -> dict[str, Any] | None:
        state = self._state(k, t)
        return None if state is None else state.memory

    def net(self, w: Mapping[str, Tensor], arch: str | None = None) -> nn.Module:
        """A network with these weights, in training mode."""
        arch = arch or self.world.server_arch
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            net = models.build(arch, shape=self.world.shape, classes=self.world.classes)
        finally:
            torch.set_default_dtype(before)
        net.load_state_dict(copy.deepcopy(dict(w)))
        return net.train()

    def _state(self, k: int, t: int) -> ClientState | None:
        return next((self.held[s, k] for s in range(t, 0, -1) if (s, k) in self.held), None)


class Named:
    """A message whose fields are also found by their names in brackets."""

    def __init__(self, message: Any):
        self._message = message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._message, name)


class Watching(SerialEngine):
    """The serial engine, with every message and every client's state looked at on its way."""

    def __init__(self, ran: Played):
        self.ran = ran

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        for task in tasks:
            self.ran.asked.setdefault((task.t, task.ask), {})[task.k] = decode(task.message, Down)
            (done,) = super().map([task])
            if done.reply is not None and done.state is not None:
                self.ran.answered.setdefault((task.t, task.ask), {})[task.k] = decode(done.reply, Up)
                self.ran.held[task.t, task.k] = decode(done.state, ClientState)
            yield done


def played(method: str, folder: Path, *, rounds: int = 1, **setting: Any) -> Played:
    """Run `method` on digits in double precision: three clients, unequal and skewed, if not said else."""
    defaults = {"clients": 3, "partition": "dirichlet:0.3", "public": 0.1, "aux": 0.7, "init": "own"}
    defaults |= {"eval_every": rounds, "eval_clients": False}  # what is evaluated are copies
    values = {"method": method, "seed": SEED, "rounds": rounds, "keep_weights": rounds, **defaults, **setting}
    states: list[Any] = []
    cls = registry.find(method)
    begin, step = cls.init, cls.round  # type: ignore[attr-defined]

    def init(self: Method, server: Any) -> Any:
        states.append(begin(self, server))
        return states[-1]

    def round(self: Method, s: Any, server: Any, cohort: Any) -> Any:
        states.append(step(self, s, server, cohort))
        return states[-1]

    with double(method), mock.patch.object(cls, "init", init), mock.patch.object(cls, "round", round):
        made = Setting.make(**values)
        world = World(made)
        rows = {k: world.members(k) for k in range(made.clients)}
        first = {k: copy.deepcopy(dict(world.fresh_model(k).state_dict())) for k in rows}
        ran = Played(world, rows, first, states)
        run(made, out=folder / "run", engine=Watching(ran))
        if made.public:
            _ = world.public()  # kept in double precision
    return ran


def rng(party: str, purpose: str, t: int = 1, ask: int = 0, seed: int = SEED) -> torch.Generator:
    """What `server.rng(purpose)` or `client.rng(purpose)` is; party is "server" or "client 2"."""
    return generator(seed, party, t, ask, purpose)


def drawing(party: str, t: int = 1, ask: int | None = None, seed: int = SEED) -> AbstractContextManager[None]:
    """Within: the global generator as `round` (party "server") or a client's task finds it. Ask: a client's."""
    return seeded(seed, party, t, *([] if ask is None else [ask]))


def epoch(order: torch.Generator, n: int, B: int) -> list[Tensor]:
    """The batches of one epoch: shuffled, the last one shorter; a single row left over joins the batch before.

    A client's n-th fit of a task draws from rng("client k", "fit n", t, ask), all its epochs from that one generator.
    """
    permuted = torch.randperm(n, generator=order)
    cuts = list(range(0, n, B))
    if len(cuts) > 1 and n - cuts[-1] == 1:
        cuts.pop()
    return [permuted[a:b] for a, b in zip(cuts, [*cuts[1:], n], strict=True)]


def close(told: Mapping[str, Tensor], ran: Mapping[str, Tensor], what: str = "") -> None:
    """Equal to 1e-6, tensor by tensor, with the same names."""
    assert told.keys() == ran.keys(), f"{what}: {sorted(told.keys() ^ ran.keys())}"
    for name, t in ran.items():
        torch.testing.assert_close(told[name], t, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{what} {n}: {m}")
