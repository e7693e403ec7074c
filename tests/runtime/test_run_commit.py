"""What a round and the end of a run leave in record, ledger and models, with unequal clients."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.privacy.policy import Policy
from fedaudit.runtime import run_commit
from fedaudit.runtime.method import Method
from fedaudit.runtime.run_record import FieldTraffic, SumRecord
from fedaudit.runtime.run_state import RunState
from fedaudit.wire.message import Size
from fedaudit.wire.release import Release


def test_a_rounds_traffic_is_added_to_the_runs():
    run = SimpleNamespace(traffic={}, releases={}, digest="before")
    run.traffic["up", "Local.w"] = FieldTraffic(direction="up", field="Local.w", wire=100, payload=90, buffers=5)

    def wire(n):
        traffic = SimpleNamespace(
            wire={("up", "Local.w"): 10 * n, ("down", "Global.w"): 7 * n, ("up", "Local.n"): 3},
            sizes={("up", "Local.w"): Size(8 * n, n), ("down", "Global.w"): Size(6 * n, 0)},
            releases={"x": Release(field="Local.w", role="private", kind=f"weights {n}")}, digests=["a", f"b{n}"],
        )  # fmt: skip
        return SimpleNamespace(traffic=traffic)

    run_commit.count(run, wire(1))
    first = run.digest
    run_commit.count(run, wire(2))
    assert {key: (row.wire, row.payload, row.buffers) for key, row in run.traffic.items()} == {
        ("up", "Local.w"): (130, 114, 8), ("down", "Global.w"): (21, 18, 0), ("up", "Local.n"): (6, 0, 0),
    }  # fmt: skip
    assert run.releases["Local.w"].kind == "weights 2"
    assert len({"before", first, run.digest}) == 3
    other = SimpleNamespace(traffic={}, releases={}, digest="other")
    run_commit.count(other, wire(1))
    assert other.digest != first, "each digest is over all rounds before"


def test_entries_are_billed_and_relays_are_listed():
    billed, relayed = [], []
    run = SimpleNamespace(
        bill=lambda *of: billed.append(of), ledger=SimpleNamespace(relayed=lambda *of: relayed.append(of))
    )
    wire = SimpleNamespace(traffic=SimpleNamespace(relayed={("logits", 4), ("labels", 2), ("labels", 1)}))
    run_commit.enter(run, 3, [(5, ["a", "b"]), (1, [])], wire)
    assert billed == [(5, 3, ["a", "b"]), (1, 3, [])]
    assert relayed == [("labels", 1), ("labels", 2), ("logits", 4)]


def sum_of(stayed, threshold=None, secure=True):
    return SumRecord(ask=0, fn="f", invited=9, stayed=stayed, divisor=1.0, secure=secure, threshold=threshold)


@pytest.mark.parametrize(
    ("rounds", "alone", "words"),
    [
        ([[], []], "", []),
        ([[sum_of(4, 3, secure=False)]], "", []),
        ([[sum_of(7, 5)], [sum_of(6, 4), sum_of(8, 6), sum_of(2, 2, secure=False)]], "", ["at least 6", "than 4 "]),
        ([[sum_of(7, 5), sum_of(9)]], "", ["at least 7", "than 2 "]),
        ([[sum_of(7, 5)]], "heads are sent alone", ["at least 7", "than 5 ", "; but heads are sent alone"]),
    ],
)
def test_what_secure_sums_show_the_server(rounds, alone, words):
    record = SimpleNamespace(rounds=[SimpleNamespace(sums=of) for of in rounds])
    found = run_commit.who_sees(SimpleNamespace(record=record, method=SimpleNamespace(alone_in_sums=alone)))
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)
    assert not found or ("; but" in found[0]) is bool(alone)


def test_policies_that_applied_to_nothing_are_noted_once():
    entries = [LedgerEntry.free("Local.z", "logits", "public")]
    known = "the policy on labels applied to nothing: fedavg released none"
    record = SimpleNamespace(ledger=[SimpleNamespace(entries=[]), SimpleNamespace(entries=entries)], notes=[known])
    policies = dict.fromkeys(["prototypes", "logits", "labels"])
    run = SimpleNamespace(
        record=record, world=SimpleNamespace(policies=policies), setting=SimpleNamespace(method="fedavg")
    )
    run_commit._note_idle_policies(run)
    assert record.idle_policies == ["labels", "prototypes"]
    assert record.notes == [known, "the policy on prototypes applied to nothing: fedavg released none"]


class Own(Method):
    """Clients deploy something else than their models."""

    def init(self, server): ...

    def round(self, s, server, cohort): ...

    def personal(self, client):
        return nn.Linear(1, 1)


class Plain(Own):
    personal = Method.personal


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("deployed", [True, False])
@pytest.mark.parametrize("guarantee", [None, SimpleNamespace(delta=1e-3)])
@pytest.mark.parametrize("policies", [{}, {"logits": Policy(epsilon=1.0)}])
def test_which_models_are_published_and_what_that_costs(own, deployed, guarantee, policies, tmp_path, monkeypatch):
    """Noise on sums does not protect clients' own models. They are published where there is no global one."""
    predictor = nn.Linear(1, 1) if deployed else None
    written, billed, opened = {}, [], []
    monkeypatch.setattr(run_commit, "saving_state", lambda path, state, name: (path.name, name))
    monkeypatch.setattr(run_commit, "seeded", lambda *of, device: nullcontext())
    monkeypatch.setattr(run_commit, "decode", lambda *of, **more: SimpleNamespace(model={}))

    def personal(run, k, published):
        opened.append((k, published))
        return nn.Linear(1, 1)

    monkeypatch.setattr(run_commit, "_personal_model", personal)
    store = SimpleNamespace(
        clients={7: 0, 2: 0}, behind=lambda name, job: written.update({name: job}), client=lambda k: b""
    )
    world = SimpleNamespace(
        policies=policies, guarantee=guarantee, device=torch.device("cpu"), model_name=lambda k: f"net {k}"
    )
    run = SimpleNamespace(
        folder=tmp_path, store=store, world=world, setting=SimpleNamespace(rounds=5, seed=1),
        predictor=lambda t: predictor if t == 5 else None, method=(Own if own else Plain)(),
        bill=lambda k, t, entries: billed.append((k, t, [(e.field, e.kind, e.noise_multiplier) for e in entries])),
    )  # fmt: skip
    published = run_commit._save_models(run)
    clients = ["client-000002.safetensors", "client-000007.safetensors"]
    assert published == (["global.safetensors"] if deployed else clients)
    assert list(written) == [f"models/{name}" for name in [*(["global.safetensors"] if deployed else []), *clients]]
    looked_at = own or (not deployed and bool(policies))
    assert opened == ([(2, not deployed), (7, not deployed)] if looked_at else [])
    free = deployed or guarantee is None
    assert billed == ([] if free else [(k, 5, [("(published model)", "weights", 0.0)]) for k in (2, 7)])


@pytest.mark.parametrize(
    ("facts", "kept", "published", "policies", "entries"),
    [
        ({}, 0, True, True, []),
        ({"looked": True}, 0, True, True, ["(published model)"]),
        ({"looked": True}, 0, False, True, []),  # a global model is published instead
        ({"looked": True}, 0, True, False, []),  # nothing is promised
        ({"plain_fits": 2}, 2, True, True, []),  # billed with the tasks that trained
        ({"plain_fits": 2}, 1, True, True, ["(published model)"]),  # personal() trained
        ({"plain_fits": 2, "private_training": True}, 2, True, True, ["(published model)"]),
        ({"private_training": True}, 0, True, True, []),
        ({"entries": [LedgerEntry.unprotected("training", "training")]}, 0, True, True, ["training"]),
    ],
)
def test_what_goes_into_a_published_model_is_billed(facts, kept, published, policies, entries, monkeypatch):
    monkeypatch.setattr(run_commit, "_plain_fits", lambda run, k: kept)
    base = {"entries": [], "private_training": False, "plain_fits": 0, "looked": False}
    client, billed = SimpleNamespace(**(base | facts)), []
    run = SimpleNamespace(
        client=lambda k: client, method=SimpleNamespace(personal=lambda of: (of, "model")),
        world=SimpleNamespace(policies=policies), setting=SimpleNamespace(rounds=5),
        bill=lambda k, t, of: billed.append((k, t, [e.field for e in of])),
    )  # fmt: skip
    assert run_commit._personal_model(run, 3, published) == (client, "model")
    assert billed == ([(3, 5, entries)] if entries else [])


@pytest.mark.parametrize(
    ("policies", "guarantee", "delta"),
    [
        ({}, None, 1 / 40),
        ({"logits": Policy(epsilon=1.0)}, None, 1 / 40),
        ({"logits": Policy(epsilon=1.0), "labels": Policy(epsilon=1.0, delta=1e-3)}, None, 1e-3),
        ({"logits": Policy(epsilon=1.0)}, SimpleNamespace(delta=1e-4), 1e-4),
        ({"labels": Policy(epsilon=1.0, delta=1e-5)}, SimpleNamespace(delta=1e-4), 1e-5),
    ],
)
def test_a_client_has_the_smallest_of_its_deltas(policies, guarantee, delta):
    seen = []
    world = SimpleNamespace(count=lambda k: 10 * k, policies=policies, guarantee=guarantee)
    run = SimpleNamespace(world=world, ledger=SimpleNamespace(add=lambda *of: seen.append(of)))
    RunState.bill(run, 4, 2, ["an entry"])
    ((k, n, found, t, entries),) = seen
    assert (k, n, t, entries) == (4, 40, 2, ["an entry"])
    assert math.isclose(found, delta)
