"""What leaves a node is protected by kind, and what nobody named is billed infinity."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedaudit.errors import PrivacyError, SettingError
from fedaudit.flower import run_app
from fedaudit.flower.client import AuditMod, Terms, Told, identify
from fedaudit.flower.messages import AUDIT
from fedaudit.flower.records import Records
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.runtime.folder import RunFolder

UPDATE = {"kind": "weights", "update": True}


class Ten(Records):
    """Ten records on every node."""

    classes = 2

    def members(self, partition, partitions):
        return np.zeros((10, 3)), np.zeros(10, dtype=int)

    def nonmembers(self, partition, partitions):
        return np.ones((10, 3)), np.ones(10, dtype=int)


def asked(arrays, k=0, **records):
    """A request to node k, and its context."""
    identify()
    content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord({"server-round": 1}), **records})
    context = Context(1, 1001, {"partition-id": k, "num-partitions": 2}, RecordDict(), {})
    return Message(content, dst_node_id=1001, message_type="train"), context


def replying(**records):
    return lambda message, context: Message(RecordDict(records), reply_to=message)


def told(reply):
    return Told.model_validate_json(reply.content[AUDIT]["told"])


def arrays_of(reply, name="arrays"):
    return {key: torch.from_numpy(array.numpy().copy()) for key, array in reply.content[name].items()}


START = [np.full((3, 4), 2.0, dtype=np.float32), np.zeros(3, dtype=np.float32)]
STEP = [np.full((3, 4), 1.0, dtype=np.float32), np.full(3, 2.0, dtype=np.float32)]
NORM = math.sqrt(12 * 1.0 + 3 * 4.0)  # of the step


def moved():
    return [a + b for a, b in zip(START, STEP, strict=True)]


def update_mod(policy, **more):
    return AuditMod(Terms({"arrays": UPDATE}, {"gradients": policy}, **{"records": Ten, "partitions": 2, **more}))


def test_an_update_is_clipped_as_one_vector_and_added_to_what_was_sent():
    """With next to no noise: sent + C step / |step|."""
    mod = update_mod({"noise_multiplier": 1e-9, "sensitivity": "clip:0.5"})
    message, context = asked(START)
    reply = mod(message, context, replying(arrays=ArrayRecord(moved())))
    for start, step, (_, got) in zip(START, STEP, arrays_of(reply).items(), strict=True):
        torch.testing.assert_close(got, torch.from_numpy(start + 0.5 * step / np.float32(NORM)), rtol=0, atol=1e-5)


def test_a_small_update_is_left_as_it_is():
    mod = update_mod({"noise_multiplier": 1e-9, "sensitivity": "clip:100"})
    reply = mod(*asked(START), replying(arrays=ArrayRecord(moved())))
    for want, (_, got) in zip(moved(), arrays_of(reply).items(), strict=True):
        torch.testing.assert_close(got, torch.from_numpy(want), rtol=0, atol=1e-5)


def test_the_noise_has_the_deviation_that_is_billed():
    """Sensitivity 2 C of the whole update: noise multiplier 3 and C = 0.5 are a deviation of 3, over 4,000 entries."""
    big = [np.zeros((80, 50), dtype=np.float32)]
    mod = update_mod({"noise_multiplier": 3.0, "sensitivity": "clip:0.5"})
    reply = mod(*asked(big), replying(arrays=ArrayRecord(big)))
    got = next(iter(arrays_of(reply).values()))
    assert float(got.std()) == pytest.approx(3.0, rel=0.06)
    assert abs(float(got.mean())) < 0.2
    entry = next(e for e in told(reply).entries if e.kind == "gradients")
    assert (entry.sigma, entry.sensitivity, entry.clip, entry.relation) == (3.0, 1.0, 0.5, "replace-one")
    assert told(reply).protection["arrays"].sigma == 3.0


def test_no_two_messages_have_the_same_noise():
    """By node, by message and by seed; the node's own state counts, so that a restart does not begin again."""
    big = [np.zeros((20, 20), dtype=np.float32)]

    def noise(k, times, seed=0):
        _, context = asked(big, k)
        mod = update_mod({"noise_multiplier": 1.0, "sensitivity": "clip:1"}, seed=seed)
        return [arrays_of(mod(asked(big, k)[0], context, replying(arrays=ArrayRecord(big))))["0"] for _ in range(times)]

    first, second = noise(0, 2)
    (other,), (reseeded,) = noise(1, 1), noise(0, 1, seed=1)
    assert torch.equal(first, noise(0, 1)[0])  # and yet a run is the same run again
    for a, b in [(first, second), (first, other), (first, reseeded)]:
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.3


def test_what_nobody_named_costs_infinity():
    mod = update_mod({"noise_multiplier": 1.0})
    reply = mod(
        *asked(START),
        replying(arrays=ArrayRecord(moved()), extra=ArrayRecord(START), metrics=MetricRecord({"loss": 0.5})),
    )
    bills = {entry.field: (entry.kind, entry.noise_multiplier) for entry in told(reply).entries}
    assert bills["TrainReply.extra"] == bills["TrainReply.metrics"] == ("unmapped", 0.0)
    assert bills["TrainReply.arrays"] == ("gradients", 1.0)
    assert np.array_equal(reply.content["extra"].to_numpy_ndarrays()[0], START[0])


def test_a_count_is_free_only_where_it_is_the_number_of_records():
    kinds = {"metrics.n": "count", "metrics.m": "count"}
    metrics = MetricRecord({"n": 10, "m": 9, "loss": 0.1})
    known = AuditMod(Terms(kinds, {}, Ten, partitions=2))(*asked(START), replying(metrics=metrics))
    bills = {entry.field: entry.noise_multiplier for entry in told(known).entries}
    assert bills == {"TrainReply.metrics_n": math.inf, "TrainReply.metrics_m": 0.0, "TrainReply.metrics": 0.0}
    unknown = AuditMod(Terms(kinds, {}))(*asked(START), replying(metrics=metrics))
    assert {entry.noise_multiplier for entry in told(unknown).entries} == {0.0}


def test_rows_of_records_are_clipped_each():
    """unit = record: one row each, 2 C; here C = 1, and next to no noise."""
    rows = np.array([[3.0, 4.0], [0.3, 0.4]], dtype=np.float32)
    mod = AuditMod(
        Terms({"features": {"kind": "embeddings", "unit": "record"}},
              {"embeddings": {"noise_multiplier": 1e-9, "sensitivity": "clip:1"}}, Ten, partitions=2)
    )  # fmt: skip
    reply = mod(*asked(START), replying(features=ArrayRecord({"e": Array(rows)})))
    got = arrays_of(reply, "features")["e"]
    torch.testing.assert_close(got, torch.tensor([[0.6, 0.8], [0.3, 0.4]]), rtol=0, atol=1e-5)
    entry = next(e for e in told(reply).entries if e.kind == "embeddings")
    assert entry.sensitivity == 2.0


def test_a_key_with_the_message_type_goes_first():
    from fedaudit.flower.record_kinds import Names

    names = Names({"arrays": "weights", "evaluate.arrays": "logits", "train.other.arrays": "gradients"})
    assert names.of("train", "arrays").kind == "weights"
    assert names.of("evaluate", "arrays").kind == "logits"
    assert names.of("train.other", "arrays").kind == "gradients"
    assert names.of("train", "others") is None


@pytest.mark.parametrize(
    ("kinds", "privacy", "words"),
    [
        ({}, {"training": {"epsilon": 1.0}}, "without fedaudit's DP-SGD"),
        ({"arrays": "weights"}, {"weights": {"epsilon": 1.0}}, "DP-SGD"),
        ({"arrays": "wieghts"}, {}, "wieghts"),
        ({"arrays": {"kind": "logits", "update": True}}, {}, "update = true is for the weights"),
    ],
)
def test_what_cannot_be_protected_is_refused_before_anything_runs(kinds, privacy, words):
    with pytest.raises((PrivacyError, SettingError), match=words):
        AuditMod(Terms(kinds, privacy))


def test_what_turns_out_not_to_fit_is_refused():
    mod = update_mod({"noise_multiplier": 1.0})
    with pytest.raises(PrivacyError, match="with the same names"):
        mod(*asked(START), replying(arrays=ArrayRecord(START[:1])))
    counters = [START[0], np.zeros(3, dtype=np.int64)]
    with pytest.raises(PrivacyError, match="whole numbers"):
        mod(*asked(counters), replying(arrays=ArrayRecord(counters)))
    with pytest.raises(PrivacyError, match="needs the number of records"):
        update_mod({"epsilon": 1.0}, records=None)(*asked(START), replying(arrays=ArrayRecord(moved())))


def test_a_request_that_the_app_writes_into_is_still_what_was_sent():
    """The update is the difference from the request as it came, whatever the app does to it."""

    def greedy(message, context):
        reply = RecordDict({"arrays": ArrayRecord(moved())})
        message.content["arrays"] = ArrayRecord(moved())
        return Message(reply, reply_to=message)

    mod = update_mod({"noise_multiplier": 1e-9, "sensitivity": "clip:0.5"})
    reply = mod(*asked(START), greedy)
    assert float(arrays_of(reply)["0"].mean()) == pytest.approx(2 + 0.5 / NORM, abs=1e-5)


@pytest.fixture(scope="module")
def protected_run(sk_app, tmp_path_factory):
    out = tmp_path_factory.mktemp("flower") / "protected"
    policy = {"noise_multiplier": 2.0, "sensitivity": "clip:0.5", "delta": 1e-5}
    record = run_app(
        sk_app, out=out, nodes=2, config={"num-server-rounds": 2, "local-epochs": 1}, kinds={"arrays": UPDATE},
        privacy={"gradients": policy, "logits": policy},
    )  # fmt: skip
    return out, record


def test_the_ledger_of_a_protected_run(protected_run):
    """Two releases of noise multiplier 2 are one of 2 / sqrt(2); metrics beside them are not protected."""
    _, record = protected_run
    for client in record.ledger:
        assert client.by_kind["gradients"] == pytest.approx(gaussian_epsilon(math.sqrt(2) / 2, 1e-5), rel=0.02)
        assert client.by_kind["unmapped"] == client.epsilon == math.inf
        assert client.by_kind["count"] == 0.0
    assert record.idle_policies == ["logits"]
    assert any("EvaluateReply.metrics was given no kind" in note for note in record.notes)


def test_the_transcript_of_a_protected_run_has_what_left_the_node(protected_run):
    """What was sent is the noisy model, and says how it was protected; the mean of it is the next global model."""
    out, _ = protected_run
    rows = [e for e in RunFolder(out).transcript.entries() if e.round == 1]
    ups = [e for e in rows if e.message == "TrainReply"]
    assert all(e.fields["arrays"].kind == "weights" for e in ups)
    assert all(e.fields["arrays"].protection.sigma == 2.0 for e in ups)
    down = next(e for e in rows if e.message == "Evaluate")
    n = [e["metrics_num_examples"] for e in ups]
    mean = sum(w * e["arrays"]["0"] for w, e in zip(n, ups, strict=True)) / sum(n)
    torch.testing.assert_close(down["arrays"]["0"], mean)
    assert float(ups[0]["arrays"]["0"].std()) == pytest.approx(2.0, rel=0.15)


def test_a_node_that_fails_under_a_policy_is_billed_for_it(sk_app, tmp_path, monkeypatch):
    from skdigits import task

    fit, calls = task.fit, []

    def failing(model, data):
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError
        fit(model, data)

    monkeypatch.setattr(task, "fit", failing)
    record = run_app(
        sk_app, out=tmp_path / "run", nodes=3, config={"num-server-rounds": 1}, kinds={"arrays": UPDATE},
        privacy={"gradients": {"noise_multiplier": 1.0, "delta": 1e-5}},
    )  # fmt: skip
    kinds = {client.client: set(client.by_kind) for client in record.ledger}
    assert "absence" in kinds[1]
    assert "absence" not in kinds[0] | kinds[2]


def test_persons_of_an_app_are_not_known():
    from fedaudit.flower.record_kinds import app_policies

    with pytest.raises(PrivacyError, match="which of an app's records belong to one person"):
        app_policies({"embeddings": {"epsilon": 8.0, "sensitivity": "clip:1", "unit": "person"}})


def test_a_node_remembers_what_it_has_released():
    from fedaudit.flower.client import _remembered

    _, context = asked([np.zeros(2)])
    assert _remembered(context) == (0, {})
    context.state[AUDIT] = ConfigRecord({"asked": 3, "spent": '{"weights": 2, "logits": 1}'})
    assert _remembered(context) == (3, {"weights": 2, "logits": 1})


def test_an_update_of_the_older_api_is_the_change_from_its_request():
    """Flower calls the arrays `fitins.parameters` in the request and `fitres.parameters` in the reply."""
    identify()
    content = RecordDict({"fitins.parameters": ArrayRecord(START)})
    context = Context(1, 1001, {"partition-id": 0, "num-partitions": 2}, RecordDict(), {})
    request = Message(content, dst_node_id=1001, message_type="train")
    mod = AuditMod(Terms({"fitres.parameters": UPDATE}, {"gradients": {"noise_multiplier": 1e-9, "delta": 1e-5}}))
    reply = mod(request, context, replying(**{"fitres.parameters": ArrayRecord(moved())}))
    sent = arrays_of(reply, "fitres.parameters")
    for start, end, got in zip(START, moved(), sent.values(), strict=True):
        assert np.allclose(got.numpy() - start, (end - start) / NORM, atol=1e-5)  # clipped to 1, as the default is
    assert told(reply).protection["fitres_parameters"].mechanism == "gaussian"


def test_terms_without_a_word_ask_for_nothing():
    terms = Terms()
    assert (terms.kinds, terms.privacy, terms.records, terms.seed, terms.partitions, terms.canaries) == (
        {}, {}, None, 0, 0, 0,
    )  # fmt: skip
