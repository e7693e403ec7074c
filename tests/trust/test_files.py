"""Hostile and damaged files: one clear error each, nothing executed, no memory asked for in vain."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from fedaudit import registry, run
from fedaudit.errors import FedauditError, RunError, TranscriptError, WireError
from fedaudit.runtime.checkpoint import Store
from fedaudit.runtime.folder import RunFolder
from fedaudit.wire.codec import decode_tree, encode_tree, read_header, stored_tensor
from fedaudit.wire.transcript import Transcript

EVIL = """
from pathlib import Path
from fedaudit.methods.averaging.fedavg import FedAvg

Path({path!r}).write_text("imported")


class X(FedAvg):
    pass
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "run"
    run(method="fedavg", rounds=1, clients=2, holdout=0.25, out=folder)
    return folder


@pytest.fixture
def a_run(kept, tmp_path):
    return Path(shutil.copytree(kept, tmp_path / "run"))


def blob_with(head: dict, data: bytes = b"") -> bytes:
    text = json.dumps(head).replace('"1e999"', "1e999").encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        (["1e999"], [0, 0]),
        ([10**11], [0, 0]),
        ([-1], [0, 0]),
        ([1], ["1e999", 4]),
        ([1], [0, 10**30]),
        ([1], [4, 0]),
        ([True], [0, 4]),
        ("12", [0, 4]),
        ([[1]], [0, 4]),
        ([0, 10**40], [0, 0]),
    ],
)
def test_a_shape_is_held_against_its_bytes(shape, offsets):
    table = {"0": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}
    blob = blob_with({"__metadata__": {"fedaudit": '1:x:{"t":0}'}, **table}, b"\0" * 4)
    with pytest.raises(WireError):
        read_header(blob)
    with pytest.raises(WireError):
        decode_tree(blob)


def test_an_empty_tensor_asks_for_no_memory():
    with pytest.raises(ValueError, match="bytes are no"):
        stored_tensor("F32", [10**11], bytearray())
    assert stored_tensor("F32", [0, 5], bytearray()).shape == (0, 5)
    assert torch.equal(decode_tree(encode_tree(torch.empty(0, 3))), torch.empty(0, 3))


DEEP = "[" * 100_000 + "]" * 100_000
RECORDS = {
    "deep": DEEP,
    "no object": "[]",
    "nothing": "",
    "digits": '{"schema_version": ' + "9" * 5000 + "}",
}
PARTS = {
    "result": [{"last": 5}, {"last": {"round": 1}}, {"best_test_round": [1]}, 7],
    "timings": [[{}], [{"party": 1}], 5],
    "ledger": [[{}], [5]],
    "rounds": [[{}], 5],
    "data": [{"counts": 5, "class_names": [1]}, 7],
    "traffic": [[{"direction": "sideways"}]],
}


@pytest.mark.parametrize("text", RECORDS.values(), ids=RECORDS)
def test_a_damaged_record_is_one_error(fedaudit, a_run, text):
    (a_run / "record.json").write_text(text)
    for words in (("show", a_run), ("report", a_run), ("transcript", a_run)):
        code, _, err = fedaudit(*words)
        assert (code, "Traceback" in err) == (2, False)


@pytest.mark.parametrize(("part", "value"), [(part, value) for part, values in PARTS.items() for value in values])
def test_wrong_types_in_a_record_are_one_error(fedaudit, a_run, part, value):
    record = json.loads((a_run / "record.json").read_text())
    (a_run / "record.json").write_text(json.dumps({**record, part: value}))
    for words in (("show", a_run), ("report", a_run, "--format", "json,csv")):
        code, _, err = fedaudit(*words)
        assert code in (0, 2)
        assert "Traceback" not in err


@pytest.mark.parametrize(("name", "value"), [("epsilon", -1.0), ("epsilon", "NaN"), ("delta", 2.0), ("delta", "NaN")])
def test_an_impossible_guarantee_is_refused_by_every_reader(fedaudit, kept, a_run, name, value):
    record = json.loads((a_run / "record.json").read_text())
    record["ledger"][0][name] = value
    (a_run / "record.json").write_text(json.dumps(record))
    told = ["record.json is not", f"ledger.0.{name}: Input should be", f"(it is {value})"]
    for words in (("show", a_run), ("report", a_run), ("compare", kept, a_run)):
        code, _, err = fedaudit(*words)
        assert code == 2
        assert all(part in " ".join(err.split()) for part in [*told, "Name a folder of `fedaudit run`"])
    code, out, _ = fedaudit("verify", a_run)
    assert code == 1
    assert all(part in " ".join(out.split()) for part in told)


@pytest.mark.parametrize(
    "value", [5, [5], [{}], [{"attack": 1}], {"a": 1}, [{"attack": "x", "threat": "y", "ran": True}]]
)
@pytest.mark.parametrize("name", ["attacks", "audits"])
def test_wrong_types_beside_a_record_are_one_error(fedaudit, a_run, name, value):
    digest = json.loads((a_run / "record.json").read_text())["transcript_digest"]
    (a_run / f"{name}.json").write_text(json.dumps({"transcript_digest": digest, name: value}))
    code, _, err = fedaudit("show", a_run)
    assert (code, "Traceback" in err) == (2, False)


def test_a_bug_of_ours_is_not_called_a_damaged_record(fedaudit, a_run, monkeypatch):
    def broken(*_):
        return {}["a key that we forgot"]

    monkeypatch.setattr("fedaudit.cli.show.print_summary", broken)
    code, _, err = fedaudit("show", a_run)
    assert (code, "a bug of fedaudit" in err, "a key that we forgot" in err) == (2, True, True)
    monkeypatch.setenv("FEDAUDIT_TRACEBACK", "1")
    with pytest.raises(KeyError):
        fedaudit("show", a_run)
    monkeypatch.delenv("FEDAUDIT_TRACEBACK")
    record = json.loads((a_run / "record.json").read_text())
    (a_run / "record.json").write_text(json.dumps({**record, "device": "another"}))
    code, _, err = fedaudit("show", a_run)
    assert (code, "does not hold what a run leaves" in err) == (2, True)


@pytest.mark.parametrize("text", ["[]", "5", DEEP, '{"method": 5}', '"x"', "9" * 5000])
def test_a_damaged_setting_is_one_error(fedaudit, a_run, text):
    (a_run / "setting.json").write_text(text)
    code, _, err = fedaudit("run", "--out", a_run, "--resume")
    assert (code, "Traceback" in err) == (2, False)


@pytest.mark.parametrize(
    "change",
    [
        lambda head: [],
        lambda head: {},
        lambda head: {**head, "clients": []},
        lambda head: {**head, "clients": {"x": "client-000000.1.0"}},
        lambda head: {**head, "clients": {"0": "../../../etc/passwd"}},
        lambda head: {**head, "server": "/etc/passwd"},
        lambda head: {**head, "server": 5},
        lambda head: {**head, "round": "1"},
        lambda head: {**head, "transcript": -1},
        lambda head: {**head, "clock": "late"},
    ],
)
def test_a_damaged_head_is_one_error(a_run, change):
    path = a_run / "checkpoint" / "HEAD.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(RunError, match="damaged"):
        Store(a_run / "checkpoint").head()


def test_a_state_refers_to_parts_only(tmp_path):
    from fedaudit.runtime.checkpoint import _PARTS, _split

    for table in (b'[[0, 1, "../x"]]', b"[5]", b"[[", b'[[-1, 1, "part-%s"]]' % (b"0" * 32)):
        with pytest.raises(RunError, match="damaged"):
            _split(_PARTS + len(table).to_bytes(8, "little") + table)


# --- transcripts -------------------------------------------------------------------------------------------------


def rewritten(index: Path, change) -> None:
    """Rows changed by somebody who knows how their checksums are made."""
    lines = []
    for line in index.read_bytes().splitlines():
        row = change(json.loads(line.partition(b" ")[2]))
        text = json.dumps(row, separators=(",", ":"), sort_keys=True).encode()
        lines.append(xxhash.xxh3_64_hexdigest(text).encode() + b" " + text + b"\n")
    index.write_bytes(b"".join(lines))


@pytest.mark.parametrize("content", [b"", b"garbage", b"garbage\nmore\n"])
@pytest.mark.parametrize("command", [("transcript",), ("show",), ("attack", "--attack", "loss"), ("report",)])
def test_the_index_of_a_finished_run_is_held_against_its_digest(fedaudit, a_run, content, command):
    (a_run / "transcript" / "index.jsonl").write_bytes(content)
    code, _, err = fedaudit(command[0], a_run, *command[1:])
    assert (code, "Traceback" in err) == (2, False)


def test_a_message_that_was_swapped_is_noticed(a_run):
    RunFolder(a_run).transcript  # noqa: B018 (as it was left, it is taken)
    rewritten(a_run / "transcript" / "index.jsonl", lambda row: row | ({"digest": "0"} if "digest" in row else {}))
    with pytest.raises(TranscriptError, match="not what the run left"):
        RunFolder(a_run).transcript  # noqa: B018


@pytest.mark.parametrize(
    "change",
    [
        lambda row: 5,
        lambda row: {},
        lambda row: row | {"tree": []},
        lambda row: row | {"tree": {"r": ["x", {"a": {"m": 5}}]}},
        lambda row: row | {"fields": 5},
        lambda row: row | {"client": "0"},
        lambda row: row | {"round": "../../x"},
        lambda row: row | {"fields": {"w": {"kind": []}}},
    ],
)
def test_a_row_that_is_none_is_one_error(a_run, change):
    rewritten(a_run / "transcript" / "index.jsonl", lambda row: change(row) if row["type"] == "message" else row)
    with pytest.raises(TranscriptError, match="not a row of a transcript"):
        list(Transcript(a_run / "transcript").rows())


@pytest.mark.parametrize(
    "tensor",
    [
        5,
        [],
        ["F32", [10**11], "content", 0, 0, ""],
        ["F32", [1], "../../x", 0, 4, ""],
        ["F32", [1], "content", 10**9, 4, ""],
        ["F32", [10**9], "content", 0, 4 * 10**9, ""],
        ["F32", [1], "content", -4, 4, ""],
    ],
)
def test_a_tensor_of_a_row_is_held_against_its_pack(a_run, tensor):
    def change(row):
        return row | {"tensors": [tensor] * len(row["tensors"])} if row["type"] == "message" else row

    for pack in (a_run / "transcript").glob("*.weights.pack"):
        shutil.copy(pack, pack.with_name(pack.name.replace("weights", "content")))
    rewritten(a_run / "transcript" / "index.jsonl", change)
    entry = next(e for e in Transcript(a_run / "transcript").entries() if e.row["tensors"])
    with pytest.raises(TranscriptError):
        entry.record()


# --- models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut off", "no metadata", "gone", "another"])
def test_a_model_that_no_run_published_is_one_error(fedaudit, a_run, how):
    import safetensors.torch

    path = a_run / "models" / "global.safetensors"
    if how == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "gone":
        path.unlink()
    else:
        safetensors.torch.save_file({"a": torch.ones(1)}, path, metadata={"arch": "cnn"} if how == "another" else None)
    code, _, err = fedaudit("attack", a_run, "--attack", "loss", "--threat", "outsider")
    assert (code, "Traceback" in err) == (2, False)
    assert "global.safetensors" in err


# --- outside code ------------------------------------------------------------------------------------------------


def test_a_run_folder_imports_nothing_of_its_own(fedaudit, undrawn, a_run, tmp_path, monkeypatch):
    told = tmp_path / "told"
    (a_run / "evil_here.py").write_text(EVIL.format(path=str(told)))
    for name in ("record.json", "setting.json"):
        (a_run / name).write_text((a_run / name).read_text().replace('"fedavg"', '"evil_here:X"'))
    monkeypatch.chdir(a_run)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    for words in (("attack", "."), ("attack", ".", "--trust"), ("run", "--resume", "--out", "."),
                  ("epsilon", "audit", "."), ("show", "."), ("report", ".")):  # fmt: skip
        code, _, err = fedaudit(*words)
        assert "Traceback" not in err
        assert code == (0 if words[0] in ("show", "report") else 2), words
        assert not told.exists()
    assert "evil_here" not in sys.modules


def test_outside_code_is_imported_from_pythonpath_when_trusted(a_run, tmp_path, monkeypatch):
    told = tmp_path / "told"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "known_code.py").write_text(EVIL.format(path=str(told)))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "code"), *sys.path])
    try:
        with registry.read_from(a_run):
            with pytest.raises(FedauditError, match="--trust"):
                registry.find("known_code:X")
            assert not told.exists()
            registry.trust()
            assert registry.find("known_code:X").__name__ == "X"
    finally:
        registry.trust(False)
    assert told.exists()


def test_somebody_elses_report_is_left_as_it_is(fedaudit, undrawn, a_run):
    (a_run / "report.md").write_text("my own report")
    code, _, err = fedaudit("report", a_run, "--format", "md")
    assert (code, "is not a report" in err) == (2, True)
    assert (a_run / "report.md").read_text() == "my own report"
    (a_run / "report.md").unlink()
    for _ in range(2):  # our own is replaced
        assert fedaudit("report", a_run, "--format", "md,json,csv,latex,html")[0] == 0
