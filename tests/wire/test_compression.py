"""Compression of what clients send: what arrives, what it costs to the byte, and that noise comes before it."""

from __future__ import annotations

import hashlib
import json
import math
import re

import pytest
import torch
from protected import AsksOnce

from fedaudit import Down, State, Up, private, public, run
from fedaudit.attack.attack_run import attack_run
from fedaudit.epsilon.residuals import audit_residuals
from fedaudit.errors import SettingError, WireError
from fedaudit.privacy.mechanisms import gaussian
from fedaudit.registry import names
from fedaudit.reports.report import write_report
from fedaudit.runtime.folder import SUMS, setting_key
from fedaudit.runtime.planned_traffic import plan_traffic
from fedaudit.runtime.run_record import read_record
from fedaudit.setting import EXECUTION, ROUNDING, Setting
from fedaudit.suite.budgets import check_budgets, parse_budgets
from fedaudit.wire.codec import choices, decode, encode, fields_of, measure, node_of, read_header, tensors_in
from fedaudit.wire.compression import applies, from_parts, own_names, reference, restored, squeezed, stage_of
from fedaudit.wire.message import Declared, Size
from fedaudit.wire.transcript import Transcript


class Begin(Down):
    w: State


class Reply(Up):
    w: State = private("weights", via="model", unit="client")
    g: State = private("gradients", via="model", unit="client")
    e: torch.Tensor = private("embeddings", via="data", unit="record")
    S: torch.Tensor = private("synthetic_images", via="data", unit="client", dtype="uint8")
    n: torch.Tensor = private("label_counts", via="data", unit="client")
    p: torch.Tensor = public()


def seeded(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(math.prod(shape)))


# --- one tensor ------------------------------------------------------------------------------------------------


def test_topk_keeps_the_largest_magnitudes_where_they_stand():
    """0.07 of 100 numbers are 7 (0.07 * 100 is a little more than 7 in floating point): the last 4 and the first 3 of
    -50, ..., 49 have the largest magnitudes 50, 49, 49, 48, 48, 47, 47."""
    t = torch.arange(-50.0, 50).reshape(10, 10)
    values, at = stage_of("topk:0.07").parts(t)
    assert values.tolist() == [-50, -49, -48, -47, 47, 48, 49]
    assert at.tolist() == [0, 1, 2, 3, 97, 98, 99]
    assert at.dtype == torch.int32
    assert stage_of("topk:0.07").bytes((10, 10)) == 8 * 7
    assert stage_of("topk:0.071").bytes((10, 10)) == 8 * 8, "the share is rounded up"


def test_int8_is_127_levels_to_each_side_of_zero():
    """Scale 127 / 127 = 1: 0.4 is nearest to 0, 0.6 to 1, and the largest magnitude arrives to the bit."""
    t = torch.zeros(64)
    t[:5] = torch.tensor([-127.0, 0.4, 0.6, -3.6, 126.4])
    levels, scale = stage_of("int8").parts(t)
    assert levels[:5].tolist() == [-127, 0, 1, -4, 126]
    assert scale.tolist() == [1.0]
    assert stage_of("int8").bytes((64,)) == 64 + 4
    assert [part.tolist() for part in stage_of("int8").parts(torch.zeros(64))] == [[0] * 64, [0.0]]


@pytest.mark.parametrize("text", ["topk:0.1", "int8", "svd:0.9"])
def test_what_is_small_or_would_not_shrink_travels_as_it_is(text):
    stage = stage_of(text)
    assert stage.parts(seeded(63)) is None
    assert stage.parts(torch.arange(100)) is None
    assert stage.parts(seeded(100).double()) is None
    assert stage.bytes((63,)) == 4 * 63
    assert stage_of("topk:0.5").parts(seeded(100)) is None, "50 numbers and 50 places are 400 bytes"
    assert stage_of("topk:0.48").parts(seeded(100)) is not None
    assert stage_of("svd:0.9").parts(seeded(100)) is None, "a vector has no singular values"


def message():
    w = State({"a": seeded(12, 10), "b": seeded(5), "m": seeded(100)}, buffers={"m"})
    change = 0.1 * seeded(12, 1).sign() * seeded(10).sign() + 1e-3 * seeded(12, 10)  # all but of rank 1
    sent = Begin(State({**w, "a": w["a"] - change, "b": w["b"] + 1}, w.buffers))
    g = State({"a": seeded(12, 10) * 3})
    return sent, Reply(w, g, seeded(20, 8), seeded(4, 25).clamp(-1, 1), torch.ones(80), seeded(90))


@pytest.mark.parametrize("text", ["topk:0.1", "int8"])
def test_bytes_of_every_field(text):
    """a: 120 numbers, of which ceil(12) travel with their places (96 bytes), or all as levels (120 + 4 bytes); b is
    small (20 bytes); m is a buffer (400 bytes). e: 160 numbers, 16 of them (128 bytes), or 164. The images are uint8,
    the counts and what is public travel whole."""
    sent, reply = message()
    blob = encode(reply, stage_of(text), sent)
    head = read_header(blob)
    sizes = measure(head, len(blob))
    a, e = (96, 128) if text == "topk:0.1" else (124, 164)
    assert sizes["w"] | {"wire": 0} == {"payload": a + 20, "buffers": 400, "whole": 480 + 20, "wire": 0}
    assert sizes["g"]["payload"] == a
    assert (sizes["e"]["payload"], sizes["e"]["whole"]) == (e, 640)
    assert {name: sizes[name]["payload"] for name in "Snp"} == {"S": 100, "n": 320, "p": 360}
    assert all("whole" not in sizes[name] for name in "Snp")
    assert sum(size["wire"] for size in sizes.values()) == len(blob)
    plain = read_header(encode(reply))
    assert {k: choices(v) for k, v in fields_of(head).items()} == {k: choices(v) for k, v in fields_of(plain).items()}


@pytest.mark.parametrize(("text", "far"), [("topk:0.1", None), ("int8", 0.01), ("svd:0.99", 0.01)])
def test_weights_arrive_as_what_was_sent_down_and_a_change(text, far):
    """Of the weights the difference is compressed, here +-0.1 everywhere; of gradients, the values themselves."""
    sent, reply = message()
    arrived = decode(encode(reply, stage_of(text), sent), Reply, answered=lambda: sent)
    assert list(arrived.w) == ["a", "b", "m"]
    assert arrived.w.buffers == {"m"}
    change = arrived.w["a"] - sent.w["a"]
    if text == "topk:0.1":
        assert int((change != 0).sum()) == 12
        assert int((arrived.g["a"] != 0).sum()) == 12
        assert torch.equal(arrived.g["a"][arrived.g["a"] != 0], reply.g["a"][arrived.g["a"] != 0])
    else:
        assert float((arrived.w["a"] - reply.w["a"]).abs().max()) < far
        assert not torch.equal(arrived.w["a"], reply.w["a"])
    assert torch.equal(arrived.w["m"], reply.w["m"])
    assert torch.equal(arrived.w["b"], reply.w["b"])
    assert torch.equal(arrived.p, reply.p)
    with pytest.raises(WireError, match="that message is not here"):
        decode(encode(reply, stage_of(text), sent), Reply)


def test_another_architecture_is_no_reference():
    """A state that was sent down under other names or shapes says nothing of this one: it is compressed as it is."""
    _, reply = message()
    for other in (State({"a": seeded(10, 12), "b": seeded(5)}), State({"b": seeded(5)})):
        arrived = decode(encode(reply, stage_of("topk:0.1"), Begin(other)), Reply)
        assert int((arrived.w["a"] != 0).sum()) == 12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"topk",[20,8]', '"topk",[20,9]'),
        ('"topk",[20,8]', '"topk",[2000,8000]'),
        ('"topk",[20,8]', '"topk",[20,-8]'),
        ('"topk",[20,8]', '"int8",[20,8]'),
        ('"topk",[20,8]', '"zip",[20,8]'),
        ('"w"]', '"nothing"]'),
    ],
)
def test_hostile_messages_are_refused(old, new):
    """Numbers in a message are no reason to ask for memory, nor for anything but a WireError. (The checksum is set
    right: here the sender is hostile, not the road.)"""
    import xxhash

    from fedaudit.wire.codec import grammar as codec

    sent, reply = message()
    blob = encode(reply, stage_of("topk:0.1"), sent)
    head = read_header(blob)
    assert old in head.text
    text = head.text.replace(old, new)
    h = xxhash.xxh3_128(text.encode())
    tensors = [
        codec.stored_tensor(d, list(s), bytearray(blob[a:b])) for _, (d, s, a, b) in sorted(head.tensors.items())
    ]
    for t in tensors:
        h.update(f"{t.dtype}{list(t.shape)}".encode())
        h.update(codec.raw(t))
    wrong = codec.packed(tensors, f"{codec.FORMAT}:{h.hexdigest()}:{text}")
    if new == '"topk",[20,9]':  # 180 numbers are not more than 16 could be of: places decide
        assert decode(wrong, Reply, answered=lambda: sent).e.shape == (20, 9)
        return
    with pytest.raises(WireError):
        decode(wrong, Reply, answered=lambda: sent)


def test_nan_is_told_as_ever():
    sent, reply = message()
    reply.e[3, 3] = math.nan
    for text in ("topk:0.1", "int8", "svd:0.9"):
        with pytest.raises(WireError, match=r"Reply\.e.* holds NaN"):
            encode(reply, stage_of(text), sent)


# --- the setting -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["topk", "topk:0", "topk:1", "topk:0.00001", "int8:3", "svd:1", "svd:nan", "zip", ""])
def test_a_compression_that_makes_no_sense(text):
    with pytest.raises(SettingError, match="compress"):
        Setting.make(compress=text)


def test_keys_tell_compressed_runs_apart_and_leave_others_as_they_were():
    """Without a compression the key is that of the setting's other values, as before there was a choice."""
    keys = [setting_key(Setting.make(compress=c)) for c in (None, "int8", "topk:0.1", "topk:0.2")]
    assert len(set(keys)) == 4
    others = Setting.make().model_dump(exclude={*EXECUTION, *ROUNDING, *SUMS, "compress"})
    assert keys[0] == hashlib.blake2b(json.dumps(others, sort_keys=True).encode(), digest_size=16).hexdigest()


# --- runs ------------------------------------------------------------------------------------------------------

TINY = {
    "dataset": "digits", "model": "mlp", "clients": 2, "rounds": 2, "partition": "iid", "eval_clients": False,
    "holdout": 0.5, "aux": 0.4, "set": {"eta": 0.1},
}  # fmt: skip
STAGES = ("topk:0.1", "int8", "svd:0.8")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """FedAvg, plain and with each compression: {compression: folder}."""
    folder = tmp_path_factory.mktemp("runs")
    for text in (None, *STAGES):
        run(method="fedavg", compress=text, out=folder / str(text).replace(":", "-"), **TINY)
    return {text: folder / str(text).replace(":", "-") for text in (None, *STAGES)}


def uploads(folder):
    return [entry for entry in Transcript(folder / "transcript").entries() if entry.direction == "up"]


def bytes_of(record, field="Local.w"):
    return next(row for row in record.traffic if row.field == field)


@pytest.mark.parametrize(("text", "one"), [(None, 38440), ("topk:0.1", 7728), ("int8", 9652)])
def test_fedavg_to_the_byte(runs, text, one):
    """The MLP has 8192 + 128 + 1280 + 10 numbers, the last 10 too few to be compressed. Top-k: 820 + 13 + 128 numbers
    of 8 bytes and 40; int8: 9600 and 3 scales and 40. Two clients, two rounds. Planned, measured and on the wire."""
    record = read_record(runs[text])
    assert bytes_of(record).payload == 4 * one
    assert [row.up_payload for row in record.rounds] == [2 * (one + 8)] * 2
    assert bytes_of(record, "Global.w").payload == 4 * 38440, "what the server sends is whole"
    planned = plan_traffic(record.setting)
    assert planned["up"]["bytes"] == record.bytes("up")
    assert planned["total"]["bytes"] == record.bytes("up") + record.bytes("down")
    assert planned.get("at_most", []) == []
    assert sum(entry.bytes for entry in uploads(runs[text])) == record.bytes("up", "wire")
    near = plan_traffic(record.setting, "wire")["up"]["bytes"]
    assert near == pytest.approx(record.bytes("up", "wire"), rel=0.02)
    assert record.notes == []
    assert record.setting.compress == text
    assert [entry.fields["w"].whole for entry in uploads(runs[text])] == [None if text is None else 38440] * 4


def test_fedavg_by_singular_values_to_the_byte(runs):
    """K singular values of a matrix of m x n are K (m + n + 1) numbers; the bias of 128 and that of 10 are vectors, and
    travel whole. K is read from the factors that crossed. Planned: at most what the whole has."""
    record, total = read_record(runs["svd:0.8"]), 0
    for entry in uploads(runs["svd:0.8"]):
        shapes = [row[1] for row in entry.row["tensors"]]
        K, k = (next(s[1] for s in shapes if len(s) == 2 and s[0] == rows and s[1] < 64) for rows in (128, 10))
        assert 0 < K < 43
        assert 0 < k < 10
        one = 4 * (K * (128 + 64 + 1) + 128 + k * (10 + 128 + 1) + 10)
        assert entry.fields["w"].payload == one
        total += one
    assert bytes_of(record).payload == total
    planned = plan_traffic(record.setting)
    assert planned["at_most"] == ["Local.w"]
    assert planned["up"]["bytes"] == 4 * (38440 + 8) > record.bytes("up")


@pytest.mark.parametrize("text", STAGES)
def test_the_method_goes_on_with_what_arrived(runs, text):
    """w_2 is the mean, by records, of what the transcript has of round 1, not of what the clients had."""
    downs = [e for e in Transcript(runs[text] / "transcript").entries() if e.direction == "down" and e.round == 2]
    first = [entry for entry in uploads(runs[text]) if entry.round == 1]
    n = [entry["n"] for entry in first]
    before = next(e for e in Transcript(runs[text] / "transcript").entries() if e.direction == "down")["w"]
    for name in before:
        mean = sum(m / sum(n) * entry["w"][name] for m, entry in zip(n, first, strict=True))
        assert torch.allclose(downs[0]["w"][name], mean, atol=1e-6)
    change = first[0]["w"]["encoder.fc1.weight"] - before["encoder.fc1.weight"]
    if text == "topk:0.1":
        assert 0.9 * 820 < int((change != 0).sum()) <= 820
    if text == "svd:0.8":
        assert int(torch.linalg.matrix_rank(change, rtol=1e-4)) < 43
    assert first[0].state_shapes("w") == {name: tuple(t.shape) for name, t in before.items()}
    assert read_record(runs[text]).transcript_digest != read_record(runs[None]).transcript_digest


def test_attacks_see_what_arrived(runs):
    """The model that an attack rebuilds from the transcript is what is left after the compression."""
    (result, *_) = attack_run(runs["topk:0.1"], attacks=["loss"], threat="server")
    assert result.attack == "loss"
    assert result.ran


def test_accuracy_per_byte_in_the_report(runs, tmp_path):
    write_report(runs[None].parent, ["json", "md", "csv"], out=tmp_path)
    rows = {row["label"]: row for row in json.loads((tmp_path / "report.json").read_text())["rows"]}
    assert len(rows) == 4
    for text, folder in runs.items():
        record = read_record(folder)
        cell = next(row for label, row in rows.items() if f"compress={text}" in label)["cells"]["per_byte"]
        assert cell["value"] == pytest.approx(100 * record.result.last.test_score() / (record.bytes("up") / 1e6))
        assert cell["low"] < cell["value"] < cell["high"]
    assert "Accuracy per MB up" in (tmp_path / "report.md").read_text()
    (tmp_path / "alone").mkdir()
    write_report(runs[None], ["md"], out=tmp_path / "alone")
    assert "per MB" not in (tmp_path / "alone" / "report.md").read_text()


def test_budgets_know_compressed_runs(runs):
    """Four runs; the ceiling for int8 is held by that one alone, and what is not compressed has its own."""
    text = [
        {"compress": "int8", "direction": "up", "max": 9660.0},
        {"compress": "none", "direction": "up", "max": 9660.0},
    ]
    found = check_budgets(parse_budgets(text, "budgets"), [runs[None].parent], "budgets")
    assert [(outcome.run.rsplit("/", 1)[1], outcome.kept) for outcome in found] == [("int8", True), ("None", False)]


def test_comm_plans_with_compression(fedaudit):
    code, out, _ = fedaudit("comm", "fedavg", "--model", "mlp", "--compress", "int8", "--rounds", 1, "--clients", 1)
    assert code == 0
    code, plain, _ = fedaudit("comm", "fedavg", "--model", "mlp", "--rounds", 1, "--clients", 1)
    assert out != plain
    code, out, _ = fedaudit("comm", "fedavg", "--model", "mlp", "--compress", "svd:0.9", "--rounds", 1)
    assert "only a run tells" in out
    assert fedaudit("comm", "fedavg", "--compress", "zip")[0] == 2


def test_show_says_how_a_run_was_compressed(fedaudit, runs):
    said = " ".join(fedaudit("show", runs["int8"])[1].split())  # long lines are broken
    assert said.count("compressed by int8") == 1
    assert re.search(r" up [^,]*, [^,]* on the wire, all clients and rounds, compressed by int8 down ", said)
    assert "compressed" not in fedaudit("show", runs[None])[1]


def test_resumed_under_another_compression_is_refused(runs):
    with pytest.raises(SettingError, match="compress = 'int8', now None"):
        run(method="fedavg", out=runs["int8"], resume=True, **{**TINY, "rounds": 3})


# --- engines ---------------------------------------------------------------------------------------------------


def test_stacked_clients_send_the_same(runs, tmp_path):
    """A stack rounds otherwise, in the last bits: a level more or less is all that may come of it."""
    run(method="fedavg", compress="int8", engine="stacked", out=tmp_path / "a", **{**TINY, "rounds": 1})
    for mine, other in zip(uploads(tmp_path / "a"), uploads(runs["int8"])[:2], strict=True):
        assert mine.bytes == other.bytes
        for name, t in mine["w"].items():
            assert torch.allclose(t, other["w"][name], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("text", STAGES)
def test_clients_on_ray_send_the_same_to_the_bit(runs, ray_engine, tmp_path, text):
    done = run(method="fedavg", compress=text, out=tmp_path / "a", engine=ray_engine, **TINY)
    assert done.transcript_digest == read_record(runs[text]).transcript_digest


@pytest.mark.slow
@pytest.mark.parametrize("text", STAGES)
def test_clients_and_server_in_processes_of_their_own_send_the_same_to_the_bit(runs, tmp_path, text):
    done = run(method="fedavg", compress=text, out=tmp_path / "a", isolate=True, **TINY)
    assert done.transcript_digest == read_record(runs[text]).transcript_digest


# --- with noise ------------------------------------------------------------------------------------------------


class Sent(Up):
    e: torch.Tensor = private("embeddings", via="data", unit="record")
    t: int = public()


class Embeds(AsksOnce):
    def send(self, client, msg):
        e = client.protect(Sent, "e", self.trained(client)[0][:, :8])
        client.memory["e"] = e[:3]
        return Sent(e, client.t)


NOISE = {"embeddings": {"epsilon": 1.0, "delta": 1e-2}}


def protected(folder, text, **policy):
    privacy = {"embeddings": {**NOISE["embeddings"], **policy}}
    values = {**TINY, "set": {}, "privacy": privacy}
    run(method=f"{__name__}:Embeds", compress=text, out=folder, **values)
    return folder


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("noisy")
    return {text: protected(folder / str(text).replace(":", "-"), text) for text in (None, *STAGES)}


@pytest.mark.parametrize("text", STAGES)
def test_noise_comes_first_and_the_ledger_does_not_know_of_compression(noisy, text):
    """What is sent is what the compression leaves of the very release that the run without it sent."""
    assert read_record(noisy[text]).ledger == read_record(noisy[None]).ledger
    for mine, plain in zip(uploads(noisy[text]), uploads(noisy[None]), strict=True):
        sent, released = mine["e"], plain["e"]
        assert not torch.equal(sent, released)
        assert mine.fields["e"].protection == plain.fields["e"].protection
        if text == "topk:0.1":
            kept = sent != 0
            assert int(kept.sum()) == math.ceil(0.1 * released.numel())
            assert torch.equal(sent[kept], released[kept])
            assert float(released[~kept].abs().max()) <= float(released[kept].abs().min())
        elif text == "int8":
            assert float((sent - released).abs().max()) <= float(released.abs().max()) / 127 * 0.501


@pytest.mark.parametrize("text", STAGES)
def test_honest_noise_under_compression_is_not_refuted(noisy, text):
    (found,) = audit_residuals(noisy[text])
    assert found.verdict == "not refuted", found.how


def scaled(monkeypatch):
    real = gaussian.normal_noise
    monkeypatch.setattr(gaussian, "normal_noise", lambda like, sigma, *rest: real(like, 0.5 * sigma, *rest))


@pytest.mark.parametrize(("text", "verdict"), [("topk:0.1", "cannot tell"), ("int8", "refuted")])
def test_half_the_noise_is_found_in_levels_and_never_passed_over(tmp_path, monkeypatch, text, verdict):
    """Made by a mechanism with half the noise, audited by an honest one: levels are numbers, rounded. Of what top-k
    left nothing can be said."""
    with monkeypatch.context() as m:
        scaled(m)
        protected(tmp_path / "a", text)
    (found,) = audit_residuals(tmp_path / "a")
    assert found.verdict == verdict, found.how
    if verdict == "cannot tell":
        assert "was compressed (topk)" in found.how


def test_half_the_noise_of_the_code_itself_is_found(tmp_path, monkeypatch):
    """The mechanism in the code has half the noise, in the run and in its repetition: what was sent comes out again."""
    scaled(monkeypatch)
    (found,) = audit_residuals(protected(tmp_path / "a", "topk:0.1"))
    assert found.verdict == "refuted"


def test_noise_of_the_system_under_topk_cannot_be_told(tmp_path):
    (found,) = audit_residuals(protected(tmp_path / "a", "topk:0.1", secure=True))
    assert found.verdict == "cannot tell"
    assert "cannot be drawn again" in found.how


def test_private_training_under_compression(tmp_path):
    """DP-SGD: the noise is in the model before it is compressed. The ledger is the same, and the noise as promised."""
    privacy = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:0.5", "delta": 1e-2}}
    values = {**TINY, "rounds": 1, "method": "fedavg", "privacy": privacy}
    for text in (None, "topk:0.1"):
        run(compress=text, out=tmp_path / str(text)[:4], **values)
    assert read_record(tmp_path / "topk").ledger == read_record(tmp_path / "None").ledger
    (found,) = audit_residuals(tmp_path / "topk")
    assert found.verdict == "not refuted", found.how


def test_sizes_add_up_by_shape():
    """Two states of one shape, and a tensor: 3 x 8192 numbers in three tensors have three scales."""
    size = Size(4 * 8192, tensors={(64, 128): 1}) * 2 + Size(4 * 8192, 8, tensors={(8192,): 1}) + 8
    assert stage_of("int8").size(size) == (Size(3 * (8192 + 4) + 8, 8), True)
    assert stage_of("topk:0.1").size(size) == (Size(3 * 8 * 820 + 8, 8), True)
    assert stage_of("svd:0.5").size(size) == (size, False)


# --- every method ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("text", ["topk:0.1", "int8", "svd:0.8"])
@pytest.mark.parametrize("method", names("methods"))
def test_every_method_runs_compressed(tiny, tmp_path, method, text):
    """Declared and measured agree (the run would end otherwise), and what is planned is what is sent, wherever a method
    declares its tensors one by one."""
    record = run(tiny(method, compress=text, eval_clients=False), out=tmp_path / "a")
    assert record.status == "done"
    assert [note for note in record.notes if "compressed size" in note] == []
    assert sum(entry.bytes for entry in uploads(tmp_path / "a")) == record.bytes("up", "wire")


# --- fields that hold several tensors, and hostile places ---------------------------------------------------------


class Several(Up):
    g: dict[int, State] = private("gradients", via="model", unit="client")
    e: list[torch.Tensor] = private("embeddings", via="data", unit="record")


def test_states_and_tensors_inside_a_table_are_compressed_too():
    """Two states of 100 numbers and two tensors of 80: 10 and 8 numbers of each travel, with their places."""
    reply = Several({3: State({"a": seeded(10, 10)}), 5: State({"a": seeded(4, 25)})}, [seeded(8, 10), seeded(80)])
    blob = encode(reply, stage_of("topk:0.1"))
    sizes = measure(read_header(blob), len(blob))
    assert sizes["g"]["payload"] == 2 * 8 * 10 + 2 * 8, "and two keys"
    assert sizes["e"]["payload"] == 2 * 8 * 8
    arrived = decode(blob, Several)
    assert [int((arrived.g[k]["a"] != 0).sum()) for k in (3, 5)] == [10, 10]
    assert [tuple(t.shape) for t in arrived.e] == [(8, 10), (80,)]


@pytest.mark.parametrize("at", [[0, 4], [-1, 2], [5, 0], [1, -3]])
def test_positions_outside_of_the_tensor_are_refused(at):
    parts = (torch.ones(2), torch.tensor(at, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"a position lies outside of a tensor of shape \[4\]"):
        from_parts("topk", parts, [4])


def test_the_first_and_the_last_position_are_inside():
    parts = (torch.tensor([7.0, 9.0]), torch.tensor([0, 3], dtype=torch.int32))
    assert from_parts("topk", parts, [2, 2]).tolist() == [[7.0, 0.0], [0.0, 9.0]]
    assert from_parts("int8", (torch.tensor([-127, 64], dtype=torch.int8), torch.tensor([0.5])), [2]).tolist() == [
        -63.5,
        32.0,
    ]
    for parts in ((torch.ones(2), torch.zeros(1, dtype=torch.int32)), (torch.ones(1, 1), torch.zeros(1, 1))):
        with pytest.raises(ValueError, match="do not make a tensor"):
            from_parts("topk", parts, [4])
    with pytest.raises(ValueError, match="levels of shape"):
        from_parts("int8", (torch.zeros(2, dtype=torch.int8), torch.ones(2)), [2])


def test_sizes_at_the_limits():
    """63 numbers are small, 64 are not. Half of the numbers with their places are no less than all."""
    topk, int8 = stage_of("topk:0.1"), stage_of("int8")
    assert (topk.bytes((63,)), topk.bytes((64,))) == (252, 8 * 7)
    assert (int8.bytes((63,)), int8.bytes((64,))) == (252, 68)
    assert (topk.parts(seeded(63)), topk.parts(seeded(64).double())) == (None, None)
    assert topk.parts(seeded(64)) is not None
    assert stage_of("topk:0.5").parts(seeded(64)) is None
    assert stage_of("topk:0.48").parts(seeded(64)) is not None
    assert stage_of("topk:0.9").bytes((64,)) == 256
    assert stage_of("svd:0.5").bytes((64,)) == 256, "a vector has no singular values"
    assert stage_of("svd:0.5").bytes((8, 8)) is None
    whole = Size(4 * 64 * 3, 5, 100, {(64,): 2, (8, 8): 1, (3,): 4}, 204)
    size, known = int8.size(whole)
    assert (size.payload, size.buffers, size.header, known) == (3 * 68, 5, 100 + 3 * 70, True)


def test_every_part_of_a_compressed_tensor_is_one_of_its_own():
    """Numbers and places of each of two tensors, after those of two states: eight tensors in all."""
    reply = Several({3: State({"a": seeded(10, 10)}), 5: State({"a": seeded(4, 25)})}, [seeded(8, 10), seeded(80)])
    tree = read_header(encode(reply, stage_of("topk:0.1"))).tree
    found = [tensors_in(node_of(tree, name)) for name in ("g", "e")]
    assert [len(of) for of in found] == [4, 4]
    assert found[0] | found[1] == set(range(8))


def test_what_may_be_compressed_and_what_may_not():
    """A kind on the list, without a type of its own, and finite."""
    for kind in ("weights", "gradients", "layers", "embeddings", "logits", "soft_labels", "prototypes"):
        assert applies(Declared("private", kind))
        assert not applies(Declared("private", kind, dtype="float16"))
        assert not applies(Declared("private", kind, finite=False))
    for kind in ("labels", "label_counts", "count", "statistics", "synthetic_images"):
        assert not applies(Declared("private", kind))
    assert not applies(Declared("public"))
    assert not applies(None)


class Two(Down):
    a: int
    v: State
    w: State


def test_the_first_state_with_the_same_tensors_is_the_reference():
    """Buffers need not be there. Weights and layers have one, gradients have none."""
    state = State({"x": torch.zeros(3), "m": torch.ones(1)}, buffers=["m"])
    fits, more = State({"x": torch.ones(3)}), State({"x": torch.full((3,), 2.0), "y": torch.ones(1)})
    for kind in ("weights", "layers"):
        assert reference(Declared("private", kind), state, Two(1, fits, more)) == ("v", fits)
        name, found = reference(Declared("private", kind), state, Two(1, State({"x": torch.ones(2)}), more))
        assert (name, found) == ("w", more)
    weights = Declared("private", "weights")
    assert reference(weights, state, Two(1, State({"y": torch.ones(3)}), State())) is None
    assert reference(Declared("private", "gradients"), state, Two(1, fits, more)) is None
    assert reference(weights, torch.ones(3), Two(1, fits, more)) is None
    assert reference(None, state, Two(1, fits, more)) is None
    assert reference(weights, state, None) is None


def test_equal_magnitudes_are_taken_by_their_place(monkeypatch):
    """Of 64 numbers of one magnitude the first are taken. A GPU sorts them so only if it is asked to."""
    asked = {}
    sort = torch.sort
    monkeypatch.setattr(torch, "sort", lambda t, **kw: asked.update(kw) or sort(t, **kw))
    t = torch.ones(64)
    t[::2] = -1
    values, at = stage_of("topk:0.1").parts(t)
    assert at.tolist() == list(range(7))
    assert values.tolist() == [-1, 1, -1, 1, -1, 1, -1]
    assert asked == {"descending": True, "stable": True}


def test_nothing_is_divided_by_a_scale_of_zero(monkeypatch):
    rounded = []
    clamp = torch.Tensor.clamp
    monkeypatch.setattr(torch.Tensor, "clamp", lambda t, *at: rounded.append(bool(t.isfinite().all())) or clamp(t, *at))
    stage_of("int8").parts(torch.zeros(64))
    stage_of("int8").parts(torch.arange(64.0))
    assert rounded == [True, True]


def test_how_large_a_tensor_may_be_of_so_few_numbers():
    """One number may be all that is left of 10 000, and not of one more. Of nothing, nothing is left."""
    one = (torch.tensor([2.0]), torch.tensor([9], dtype=torch.int32))
    assert from_parts("topk", one, [100, 100]).sum() == 2
    with pytest.raises(ValueError, match="do not make a tensor of shape"):
        from_parts("topk", one, [73, 137])
    none = (torch.zeros(0), torch.zeros(0, dtype=torch.int32))
    assert from_parts("topk", none, [0, 4]).shape == (0, 4)
    for name, shape in (("zip", [4]), ("topk", [-1]), ("topk", [2, -1]), ("topk", [2.0]), ("topk", [True])):
        with pytest.raises(ValueError, match="there is no compression"):
            from_parts(name, one, shape)
    with pytest.raises(ValueError, match="levels of shape"):
        from_parts("int8", (torch.zeros(2, dtype=torch.int8), torch.ones(1)), [1, 2])


def test_a_state_in_parts_and_back():
    """w and v are compressed as changes; b is small, m a buffer, n whole numbers, and x|q only looks like a part."""
    w, v, base = torch.arange(64.0).view(8, 8), torch.zeros(70), torch.full((8, 8), 2.0)
    state = State({"w": w, "b": torch.ones(3), "m": torch.arange(80.0), "n": torch.arange(90), "x|q": torch.ones(2),
                   "v": v}, buffers=["m"])  # fmt: skip
    before = State({**state, "w": base, "v": torch.zeros(70)})
    sent, shapes = squeezed(state, stage_of("int8"), before)
    assert list(sent) == ["w|q", "w|s", "b", "m", "n", "x|q", "v|q", "v|s"]
    assert shapes == {"w": [8, 8], "v": [70]}
    assert own_names("int8", list(sent), shapes) == ["w", "b", "m", "n", "x|q", "v"]
    back = restored("int8", sent, shapes, before)
    assert list(back) == list(state)
    assert torch.allclose(back["w"], w, atol=61 / 254 + 1e-5)
    assert float(back["w"][7, 7]) == pytest.approx(63)
    assert all(torch.equal(back[name], state[name]) for name in ("b", "m", "n", "x|q", "v"))
    alone = restored("int8", *squeezed(state, stage_of("int8"), None), None)
    assert torch.allclose(alone["w"], w, atol=63 / 254 + 1e-5)
    assert torch.allclose(restored("int8", sent, shapes, None)["w"], w - 2, atol=61 / 254 + 1e-5)
    mixed = {"w|q": sent["w|q"], "b": sent["b"], "w|s": sent["w|s"]}
    assert list(restored("int8", mixed, shapes, None)) == ["w", "b"], "in the place of its first part"


def test_a_known_size_and_one_that_is_only_a_bound():
    size, known = stage_of("svd:0.5").size(Size(400, 3, 7, {(10,): 2, (70,): 1}, 90))
    assert (size, size.header, known) == (Size(400, 3), 7, True), "vectors travel whole"
    size, known = stage_of("svd:0.5").size(Size(800, 3, 7, {(10, 10): 1, (70,): 1}))
    assert (size, size.header, known) == (Size(800, 3), 7, False)
    assert stage_of(None) is None
    assert stage_of("topk:0.25").number == 0.25
