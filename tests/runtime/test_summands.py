"""Replies that are brought into a common form before they are added up: by hand, and in secure runs of the methods."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("cryptography")

from fedaudit import Sender, Setting, State, Up, private, registry, run
from fedaudit.aggregation.mean import mean_of
from fedaudit.aggregation.update import update_of
from fedaudit.epsilon.sums import NOISE, audit_sums
from fedaudit.errors import NotApplicable, SettingError
from fedaudit.methods.averaging import fednova
from fedaudit.methods.shared._prototypes import class_sums, means_of_sums
from fedaudit.privacy.noise_key import SIZE, write_secret
from fedaudit.runtime.planned_traffic import plan_traffic
from fedaudit.shape import Shape
from fedaudit.verify.check import verify
from fedaudit.wire.transcript import Transcript

T = torch.tensor
BASE = {
    "clients": 4,
    "rounds": 2,
    "eval_clients": False,
    "eval_every": 2,
    "keep_weights": 3,
    "partition": "dirichlet:1",
}
UPDATES = {"updates": {"epsilon": 8, "clip": 1.0, "delta": 1e-3}}
WAYS = {
    "fednova": {"model": "mlp", "set": {"B": 16, "eta": 0.05}},
    "fedproto": {"model": "mlp", "set": {"B": 32}},
    "fedproto by records": {"method": "fedproto", "model": "mlp", "set": {"B": 32, "weights": "samples"}},
    "fedgh": {"model": "mlp", "set": {"B": 32, "rows": "classes"}},
    "fedzge": {"model": "mlp", "set": {"E_k": 1, "B_k": 32, "E_prime": 1, "E": 2, "B": 16, "q": 2, "d_z": 8}},
    "heterofl": {"model": "cnn_bn", "set": {"B": 32, "eta": 0.05}},
    "fedrolex": {"model": "mlp", "set": {"B": 32, "eta": 0.05, "weighted": False}},
}


def setting(name, **more):
    return Setting.make(**{**BASE, "method": name, **WAYS[name], **more})


def learned(out):
    """All numbers that the server sends to the first client after round 1."""
    entries = Transcript(out / "transcript").entries()
    sent = next(e for e in entries if (e.direction, e.round) == ("down", 2) and not e.fn.startswith("(sum)"))
    found = {}
    for field in sent.fields:
        value = sent[field]
        tensors = value if hasattr(value, "items") else {field: value}
        found |= {str(name): t.double() for name, t in tensors.items()}
    return found


@pytest.mark.parametrize("name", WAYS)
def test_a_secure_run_is_the_plain_one_within_rounding(name, tmp_path):
    """The sums say nothing else than single replies did, the server has none, and the planner knew the bytes.

    FedZGE's generator learns from differences of logits over 0.001, by Adam, which magnifies rounding."""
    secure = setting(name, aggregate="secure")
    run(setting(name), out=tmp_path / "plain")
    record = run(secure, out=tmp_path / "secure")
    a, b = learned(tmp_path / "plain"), learned(tmp_path / "secure")
    assert a.keys() == b.keys()
    apart = max(float((a[n] - b[n]).abs().max()) for n in a)
    assert apart < (5e-3 if name == "fedzge" else 2e-6)
    assert all(one.cut_off == 0 for row in record.rounds for one in row.sums)
    up = {e.message for e in Transcript(tmp_path / "secure" / "transcript").entries() if e.direction == "up"}
    assert up <= {"Advertised", "Shared", "Masked", "Helped", "Distilled"}
    assert plan_traffic(secure)["up"]["bytes_per_round"] == record.rounds[0].up_payload
    alone = registry.find(secure.method).alone_in_sums
    assert any(note.startswith("secure aggregation") and note.endswith(alone) for note in record.notes)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("heterofl", "server"),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in [("heterofl", "shares"), ("fednova", "server")]),
        pytest.param("fednova", "shares", marks=pytest.mark.slow),
    ],
)
def test_a_guarantee_for_clients_holds_for_summands(name, where, tmp_path):
    """Ledger, noise and verification; the noise is on the summands, so their clipped sum is taken away from it."""
    more = {"fednova": {"tau_eff": 5.0}, "heterofl": {"sbn": False}}[name]
    privacy = {"updates": {**UPDATES["updates"], "where": where}}
    aggregate = "secure" if where == "shares" else "plain"
    changed = setting(name, privacy=privacy, aggregate=aggregate, set={**WAYS[name]["set"], **more})
    write_secret(tmp_path / "key", bytes([3]) * SIZE)
    record = run(changed, out=tmp_path / "run", noise_key=tmp_path / "key")
    assert all(ledger.epsilon == pytest.approx(8, rel=1e-5) for ledger in record.ledger)
    found = {audit.test: audit for audit in audit_sums(tmp_path / "run", trials=50)}
    assert found[NOISE].verdict == "not refuted"
    assert found[NOISE].trials > 10_000
    assert not [f for f in verify(tmp_path / "run").findings if f.verdict == "contradicted"]


def test_entries_that_few_train_move_by_the_mean_over_those(tmp_path):
    """With little noise the guarantee's model is that of equal weights: every width has its share of the clients."""
    tiny = {"updates": {"noise_multiplier": 1e-6, "clip": 1e3, "delta": 1e-3}}
    options = {**WAYS["heterofl"]["set"], "sbn": False, "weighted": False}
    way = {"set": options, "model": "cnn", "rounds": 1, "eval_every": 1}
    run(setting("heterofl", **way), out=tmp_path / "plain")
    run(setting("heterofl", **way, privacy=tiny), out=tmp_path / "noised")
    a, b = (load_file(tmp_path / of / "models" / "global.safetensors") for of in ("plain", "noised"))
    assert all(torch.allclose(a[n], b[n], atol=0.02) for n in a)
    assert max(float((a[n] - b[n]).abs().max()) for n in a) > 0


@pytest.mark.parametrize(
    ("name", "more", "error", "words"),
    [
        ("fednova", {}, SettingError, "does not learn how many steps"),
        ("heterofl", {}, NotApplicable, "one sum in a round, and heterofl takes another one, statistics"),
        ("fedrolex", {"where": "client"}, NotApplicable, "fedrolex adds up replies in another form"),
    ],
)
def test_what_a_guarantee_does_not_go_with_is_refused(name, more, error, words, tmp_path):
    privacy = {"updates": {**UPDATES["updates"], **more}}
    with pytest.raises(error, match=words):
        run(setting(name, privacy=privacy, rounds=1, eval_every=1), out=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("fedproto", {"weights": "literal"}, "number of clients that hold a class"),
        ("fedtgp", {}, "the centres are trained on each client's class means"),
        ("fedgh", {}, "the header is trained on each client's class means"),
        ("fedzge", {"gradient": "true"}, "a true gradient goes through each client's model"),
        ("feddropout", {}, "each client trains units of its own"),
    ],
)
def test_who_still_needs_single_replies_says_why(name, options, reason):
    assert reason in registry.find(name)(**options).needs_single_replies()


# --- by hand


def test_class_means_as_sums_by_hand():
    """Class 0: (1, 0) of 1 record and (4, 3) of 3, alike (2.5, 1.5), by records (3.25, 2.25). Class 1: one client, (5,
    5) of 2. Nobody has class 2. A count below 0 is noise, and counts as 0."""
    sent = {0: {0: T([1.0, 0.0]), 1: T([5.0, 5.0])}, 2: {0: T([4.0, 3.0])}}
    n = {0: T([1.0, 2.0, -7.0]), 2: T([3.0, 0.0, 0.0])}
    alike = means_of_sums(mean_of({k: class_sums(C, 3) for k, C in sent.items()}, None))
    assert {c: v.tolist() for c, v in alike.items()} == {0: [2.5, 1.5], 1: [5.0, 5.0]}
    weighted = means_of_sums(mean_of({k: class_sums(C, 3, n[k]) for k, C in sent.items()}, "n"))
    assert {c: pytest.approx(v.tolist()) for c, v in weighted.items()} == {0: [3.25, 2.25], 1: [5.0, 5.0]}
    assert class_sums(sent[0], 3, T([-1.0, 2.0, 0.0])).n == 2


def test_a_normalised_step_by_hand():
    """Two steps with momentum 1/2: ||a||_1 = 1 + 3/2. From 1 to 6 in 2.5 is a step of 2; a statistic moves as it is."""
    message = fednova.Global(State({"w": T([1.0]), "m": T([1.0])}, buffers=["m"]))
    reply = fednova.Local(State({"w": T([6.0]), "m": T([4.0])}, buffers=["m"]), 2, 7)
    sender = Sender(0, 1, ("mlp",), Shape((1, 8, 8)), 10)
    step = fednova.FedNova(momentum=0.5).summand(sender, reply, message)
    assert (step.d["w"].tolist(), step.d["m"].tolist(), step.n) == ([2.0], [3.0], 7)
    assert step.a == pytest.approx(0.0025)


class Tally(Up):
    w: State = private("weights", via="model", unit="client")
    many: torch.Tensor = private("count", via="data", unit="client")
    n: int = private("count", via="data", unit="client")


def test_counts_do_not_enter_a_guarantee():
    """They would use up the clip. Without a guarantee they are added up with the rest."""
    reply = Tally(State({"w": T([3.0])}), T([1.0, 0.0]), 7)
    assert update_of(reply, None, "n").real.tolist() == [3.0, 1.0, 0.0]
    bare = update_of(reply, None, "n", counts=False)
    assert bare.real.tolist() == [3.0]
    assert [slot.form for slot in bare.layout.slots] == ["state", "none", "weight"]
