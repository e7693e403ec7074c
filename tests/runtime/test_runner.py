"""A run: record, resume, evaluation, participation, errors."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from engines import DropEngine

from fedaudit import Setting, read_record, run
from fedaudit.errors import RunError, SettingError, WireError
from fedaudit.privacy.calibration import gaussian_epsilon
from fedaudit.privacy.policy import parse_policy
from fedaudit.rng import generator, seed_of, seeded
from fedaudit.runtime import runner
from fedaudit.runtime.run_record import RoundRecord
from fedaudit.runtime.scores import Accuracy, BestTestRound, GlobalScores, Utility
from fedaudit.runtime.task import compute
from fedaudit.runtime.utility import results
from fedaudit.runtime.world import World
from fedaudit.wire.message import Size
from fedaudit.wire.transcript import Transcript


def test_the_folder_holds_record_transcript_and_models(tiny, tmp_path):
    record = run(tiny("fedavg"), out=tmp_path / "a")
    assert read_record(tmp_path / "a") == record
    assert record.status == "done"
    assert {p.name for p in (tmp_path / "a" / "models").iterdir()} == {
        "global.safetensors", "client-000000.safetensors", "client-000001.safetensors", "client-000002.safetensors",
    }  # fmt: skip
    assert record.published == ["global.safetensors"]
    assert (tmp_path / "a" / "transcript" / "index.jsonl").exists()


@pytest.mark.slow
def test_python_and_command_line_write_the_same_record(tiny, tmp_path):
    python = run(method="fedavg", rounds=2, clients=3, set={"E": 1}, out=tmp_path / "a")
    command = [sys.executable, "-m", "fedaudit", "run", "--method", "fedavg", "--rounds", "2", "--clients", "3"]
    command += ["--set", "E=1"]
    out = subprocess.run([*command, "--out", str(tmp_path / "b"), "--json"], capture_output=True, text=True, check=True)
    shell = json.loads(out.stdout)
    assert shell["transcript_digest"] == python.transcript_digest
    assert shell["result"] == json.loads(python.model_dump_json())["result"]
    assert all(line.startswith("fedavg on digits: ") for line in out.stderr.splitlines()), "no bar: no terminal"


@pytest.mark.long
def test_fedavg_learns_digits(tmp_path):
    training = {"E": 5, "B": 8, "eta": 0.1}
    record = run(method="fedavg", partition="iid", rounds=2, set=training, eval_every=2, out=tmp_path / "a")
    test = record.result.last.global_.test
    assert test.accuracy > 0.85
    assert test.low < test.accuracy < test.high
    clients = record.result.last.clients
    assert len(clients.local_test.each) == 5
    assert clients.local_test.mean == pytest.approx(sum(clients.local_test.each) / 5)


def test_local_shares_nothing(tmp_path, tiny):
    record = run(tiny("local", eval_clients=True), out=tmp_path / "a")
    assert record.bytes("up") == record.bytes("down") == 0
    assert record.bytes("up", "wire") > 0
    assert record.result.last.global_ is None
    assert record.result.last.clients.global_test.mean > 0


def test_results_name_last_chosen_and_best_test_round():
    """Validation is best in round 1, the test set in round 3, and round 4 is the last."""

    def row(t, validation, test):
        reached = None
        if test is not None:
            accuracy = Accuracy(accuracy=test, low=0, high=1, n=9)
            reached = Utility(global_=GlobalScores(test=accuracy, validation=validation))
        sent = dict.fromkeys(("up_payload", "up_wire", "down_payload", "down_wire"), 0)
        return RoundRecord(round=t, participants=[0], utility=reached, wall_s=1, **sent)

    rounds = [(1, 0.9, 0.5), (2, 0.8, 0.6), (3, 0.9, 0.7), (4, 0.7, 0.4), (5, None, None)]
    found = results([row(*values) for values in rounds])
    assert found.last.round == 4
    assert found.chosen.round == 1
    assert found.best_test_round == BestTestRound(round=3, accuracy=0.7)


def test_evaluation_rounds_and_no_client_evaluation(tiny, tmp_path):
    record = run(tiny("fedavg", rounds=5, eval_every=2, eval_clients=False), out=tmp_path / "a")
    assert [row.round for row in record.rounds if row.utility] == [2, 4, 5]
    assert record.rounds[-1].utility.clients is None


def test_heterogeneous_clients(tiny, tmp_path):
    record = run(tiny("local", model="digits-3"), out=tmp_path / "a")
    assert set(record.models) == {"cnn", "cnn_bn", "mlp"}
    with pytest.raises(SettingError, match="asks for one server model, but the clients have several"):
        run(tiny("fedavg", model="digits-3"), out=tmp_path / "b")


def test_a_second_run_in_the_same_folder_is_refused(tiny, tmp_path):
    run(tiny("local", rounds=1), out=tmp_path / "a")
    with pytest.raises(RunError, match="already holds a run"):
        run(tiny("local", rounds=1), out=tmp_path / "a")


@pytest.mark.long
def test_resume_can_add_rounds_but_not_change_the_setting(tiny, tmp_path):
    run(tiny("fedavg", rounds=1), out=tmp_path / "a")
    longer = run(tiny("fedavg", rounds=3), out=tmp_path / "a", resume=True)
    whole = run(tiny("fedavg", rounds=3), out=tmp_path / "b")
    assert longer.transcript_digest == whole.transcript_digest
    with pytest.raises(SettingError, match=r"clients = 3, now 4"):
        run(tiny("fedavg", rounds=3, clients=4), out=tmp_path / "a", resume=True)
    with pytest.raises(SettingError, match="asks for fewer"):
        run(tiny("fedavg", rounds=2), out=tmp_path / "a", resume=True)


def test_resume_of_a_finished_run_changes_nothing(tiny, tmp_path):
    first = run(tiny("local", rounds=1), out=tmp_path / "a")
    assert run(tiny("local", rounds=1), out=tmp_path / "a", resume=True) == first


def test_only_one_process_at_a_time(tiny, tmp_path):
    from fedaudit.runtime.folder import locked

    with locked(tmp_path / "a"), pytest.raises(RunError, match="Another process is running"):
        run(tiny("local"), out=tmp_path / "a")


@pytest.mark.parametrize("delay", [0.05, 0.35, 0.8])
@pytest.mark.slow  # tests/suite/test_kill.py kills runs within an audit in the quick suite
def test_sigkill_and_resume(tmp_path, delay):
    """A real kill, at an instant that nobody chose: the resumed run equals one that was never disturbed."""
    setting = {"method": "fedavg", "rounds": 6, "clients": 3, "set": {"E": 2}}
    whole = run(**setting, out=tmp_path / "whole")
    (tmp_path / "s.toml").write_text('method="fedavg"\nrounds=6\nclients=3\nset={E=2}\n')
    command = [sys.executable, "-m", "fedaudit", "run", str(tmp_path / "s.toml"), "--out", str(tmp_path / "cut")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.time() + 60
    while not (tmp_path / "cut" / "record.json").exists() and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    cut = run(**setting, out=tmp_path / "cut", resume=True)
    assert cut.transcript_digest == whole.transcript_digest
    assert cut.result == whole.result


@pytest.mark.long
def test_old_client_states_do_not_pile_up(tiny, tmp_path):
    run(tiny("fedavg", rounds=4), out=tmp_path / "a")
    assert len(list((tmp_path / "a" / "checkpoint").iterdir())) == 3 + 2  # three clients, server, HEAD


def test_progress_is_told(tiny, tmp_path):
    told = []
    run(tiny("local"), out=tmp_path / "a", watch=lambda *what: told.append(what))
    assert told[0] == (0, 2, "ready; a round adds up to 0 B of messages to the transcript")
    assert told[-1] == (2, 2, "round 2")


def test_damaged_checkpoints_and_records_say_so(tiny, tmp_path):
    run(tiny("local", rounds=1), out=tmp_path / "a")
    (tmp_path / "a" / "checkpoint" / "HEAD.json").write_text("{")
    with pytest.raises(RunError, match=r"HEAD\.json is damaged"):
        run(tiny("local", rounds=2), out=tmp_path / "a", resume=True)
    for text, words in (
        ("{", "cannot be read"),
        ('{"schema_version": 99}', "schema version 99"),
        ('{"schema_version": 1}', "not a valid run record"),
    ):
        (tmp_path / "a" / "record.json").write_text(text)
        with pytest.raises(RunError, match=words):
            read_record(tmp_path / "a")
    with pytest.raises(RunError, match="holds no run"):
        read_record(tmp_path / "nothing")


def test_a_damaged_client_state_fails_that_client(tiny, tmp_path):
    run(tiny("fedavg", rounds=1, quorum=1.0), out=tmp_path / "a")
    state = next((tmp_path / "a" / "checkpoint").glob("client-000002*"))
    blob = bytearray(state.read_bytes())
    blob[len(blob) // 2] ^= 1
    state.write_bytes(bytes(blob))
    with pytest.raises((RunError, WireError), match=r"checksum|damaged"):
        run(tiny("fedavg", rounds=2, quorum=1.0), out=tmp_path / "a", resume=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"round": 3}, r"Unknown setting 'round'. Did you mean 'rounds'\?"),
        ({"rounds": -1}, r"setting rounds = -1"),
        ({"participation": 0}, "participation"),
        ({"method": "fedavgg"}, r"Unknown method 'fedavgg'. Did you mean 'fedavg'"),
        ({"method": "nowhere:Method"}, "cannot be imported"),
        ({"method": "outside:ce"}, "is not a Method"),
        ({"set": {"EE": 3}}, r"Unknown hyper-parameter of fedavg 'EE'. Did you mean 'E'"),
        ({"set": {"E": "many"}}, "hyper-parameter of fedavg E = 'many'"),
        ({"dataset": "digit"}, "Did you mean 'digits'"),
        ({"model": "resnet19"}, "Did you mean 'resnet1"),
        ({"partition": "dirichlet"}, "dirichlet"),
        ({"device": "cuda"} if not torch.cuda.is_available() else {"device": "gpu"}, "device"),
    ],
)
def test_bad_settings_are_explained(values, words, tmp_path):
    with pytest.raises(SettingError, match=words):
        run(**{"rounds": 1, **values}, out=tmp_path / "a")


def test_a_public_set_is_asked_for_by_name(tmp_path):
    world_setting = Setting.make(method="local")
    from fedaudit.runtime.world import World

    with pytest.raises(SettingError, match="needs a public transfer set: set --public"):
        World(world_setting).public()


def test_generators_are_derived_and_forks_leave_no_trace():
    a = torch.rand(3, generator=generator(0, "client 1", 2, "noise"))
    assert torch.equal(a, torch.rand(3, generator=generator(0, "client 1", 2, "noise")))
    assert not torch.equal(a, torch.rand(3, generator=generator(0, "client 1", 3, "noise")))
    assert seed_of(1, 23) != seed_of(12, 3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with seeded(0, "server"):
        b = torch.rand(2)
    with seeded(0, "server"):
        assert torch.equal(b, torch.rand(2))
    assert torch.equal(before, torch.get_rng_state())


def test_timings_and_flops(tiny, tmp_path):
    run(tiny("fedavg", rounds=1, flops=True), out=tmp_path / "first")  # the first round of a process imports modules
    record = run(tiny("fedavg", rounds=1, flops=True, set={"E": 6}), out=tmp_path / "a")
    by = {(row.party, row.phase): row for row in record.timings}
    assert by["client 0", "fit"].wall_s <= by["client 0", "task"].wall_s
    assert by["client 0", "task"].flops > 1e6
    assert by["server", "round"].flops == 0, "averaging is no work that the counter knows; the clients' is theirs"
    assert by["server", "round"].wall_s < by["client 0", "task"].wall_s
    assert by["client 0", "task"].peak_bytes > 1e7
    assert record.peak_rss_bytes > 1e7


def test_attacks_survive_what_happens_to_the_run(tiny, tmp_path):
    from fedaudit.attack.attack_run import attack_run

    run(tiny("fedavg", rounds=1), out=tmp_path / "a")
    attack_run(tmp_path / "a", attacks=["loss"])
    assert "loss" in {a.attack for a in run(tiny("fedavg", rounds=1), out=tmp_path / "a", resume=True).attacks}
    run(tiny("fedavg", rounds=2), out=tmp_path / "a", resume=True)
    assert read_record(tmp_path / "a").attacks == [], "they were on another transcript"


def test_an_attacker_does_not_get_the_seed(tiny, tmp_path):
    from fedaudit.attack.scene import Scene
    from fedaudit.runtime.folder import RunFolder

    run(tiny("fedavg", rounds=1), out=tmp_path / "a")
    folder = RunFolder(tmp_path / "a")
    scene = Scene(folder, folder.transcript.view("server"), 0, torch.empty(0), torch.empty(0))
    assert "seed" not in scene.setting


def test_candidates_are_exchangeable(tmp_path):
    """Records sorted by class, more non-members than members: the labels alone must tell nothing."""
    import numpy as np

    from fedaudit.attack.attack_run import candidates_of
    from fedaudit.runtime.world import World

    x = np.random.default_rng(0).integers(0, 255, (2000, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(2000) // 200)
    world = World(
        Setting.make(method="local", dataset=f"npz:{tmp_path / 'd.npz'}", clients=2, partition="iid", holdout=0.6)
    )
    for k in range(2):
        _, y, member = candidates_of(world, k)
        inside, outside = y[member].float(), y[~member].float()
        error = float((inside.var() / len(inside) + outside.var() / len(outside)).sqrt())
        assert abs(float(inside.mean() - outside.mean())) < 4 * error


def test_a_client_that_did_not_change_is_not_evaluated_again(tiny, tmp_path, monkeypatch):
    from fedaudit.runtime import utility as evaluate

    calls = []
    real = evaluate._client_scores
    monkeypatch.setattr(evaluate, "_client_scores", lambda world, k, *rest: calls.append(k) or real(world, k, *rest))
    run(tiny("fedavg", rounds=3, clients=6, participation=0.34, eval_clients=True), out=tmp_path / "a")
    assert len(calls) == 6 + 2 + 2


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    run(method="fedavg", rounds=1, clients=3, out=folder)
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "{folder}"], "is a folder"),
        (["run", "--out", "{file}"], "is a file"),
        (["run", "--device", "mps", "--out", "{new}"], "not supported"),
        (["run", "{badset}", "--out", "{new}"], "is not a table"),
        (["attack", "{run}", "--client", "99"], "There is no client 99"),
    ],
)
def test_plausible_mistakes_are_no_tracebacks(words, message, a_run, fedaudit, tmp_path):
    """Anything but a paragraph and exit code 2 would come through the command line, and fail here."""
    places = {
        "folder": tmp_path, "file": tmp_path / "f", "new": tmp_path / "n", "run": a_run, "badset": tmp_path / "s.toml",
    }  # fmt: skip
    places["file"].write_text("x")
    places["badset"].write_text("set = 5")
    code, _, err = fedaudit(*(word.format(**places) for word in words))
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_one_client_against_itself_has_nobody_to_attack(tiny, tmp_path):
    from fedaudit.attack.attack_run import attack_run

    run(tiny("fedavg", rounds=1), out=tmp_path / "a")
    (result,) = attack_run(tmp_path / "a", attacks=["loss"], threat="peer:0", clients=[0])
    assert not result.ran


# --- accuracy against bytes -----------------------------------------------------------------------------------------


def test_the_record_holds_accuracy_against_cumulated_bytes(tiny, fedaudit, tmp_path):
    """Four rounds, evaluated in the second and the last: two points, with what all rounds so far have sent. The model
    is 54,824 bytes, for three clients, up (with 8 for the count) and down."""
    record = run(tiny("fedavg", rounds=4, eval_every=2, eval_clients=True), out=tmp_path / "a")
    assert [point.round for point in record.curve] == [2, 4]
    assert [point.up_payload for point in record.curve] == [2 * 3 * 54_832, 4 * 3 * 54_832]
    assert [point.down_payload for point in record.curve] == [2 * 3 * 54_824, 4 * 3 * 54_824]
    last, reached = record.curve[-1], record.result.last
    assert (last.up_wire, last.down_wire) == (record.bytes("up", "wire"), record.bytes("down", "wire"))
    assert (last.accuracy, last.low, last.high) == tuple(
        getattr(reached.global_.test, key) for key in ("accuracy", "low", "high")
    )
    assert last.clients_mean == reached.clients.global_test.mean
    shown = json.loads(fedaudit("show", tmp_path / "a", "--json")[1])
    assert shown["curve"] == [point.model_dump() for point in record.curve]


def test_a_curve_that_the_rounds_do_not_add_up_to_is_refused(tiny, tmp_path):
    run(tiny("local", rounds=2, eval_clients=True), out=tmp_path / "a")
    path = tmp_path / "a" / "record.json"
    written = json.loads(path.read_text())
    assert [point["accuracy"] for point in written["curve"]] == [None, None]  # there is no global model
    assert all(point["clients_mean"] > 0 for point in written["curve"])
    written["curve"][1]["up_payload"] = 5
    path.write_text(json.dumps(written))
    with pytest.raises(RunError, match="the curve does not follow from the rounds"):
        read_record(path)
    del written["curve"]  # as records were before they had one
    path.write_text(json.dumps(written))
    assert len(read_record(path).curve) == 2


@pytest.mark.parametrize("deterministic", [True, False])
def test_operations_of_other_bits_are_refused_within_a_run_alone(deterministic):
    setting = Setting.make(threads=2, deterministic=deterministic, onednn="off")
    before = torch.get_deterministic_debug_mode(), torch.get_num_threads(), torch.backends.cudnn.benchmark
    with compute(SimpleNamespace(setting=setting, device=torch.device("cpu"))):
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.backends.cudnn.benchmark is not deterministic
        assert torch.get_num_threads() == 2
    assert before == (torch.get_deterministic_debug_mode(), torch.get_num_threads(), torch.backends.cudnn.benchmark)


# --- unequal clients, deltas and rounds


def privacy(*texts):
    return dict(parse_policy(text) for text in texts)


@pytest.fixture(scope="module")
def two_deltas(tmp_path_factory):
    """Embeddings at delta 1e-3, logits at 1e-6; clients of unequal size; client 1 drops out of round 1's second ask."""
    setting = Setting.make(
        method="outside:Exchange", rounds=2, clients=3, partition="dirichlet:0.3", aux=0.1, set={"steps": 2},
        privacy=privacy("embeddings:eps=1,clip=1,delta=1e-3", "logits:eps=2,clip=1,delta=1e-6"),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("deltas") / "run"
    return run(setting, out=folder, engine=DropEngine({(1, 1, 1)})), folder


def test_of_two_deltas_the_smallest_is_the_clients(two_deltas):
    record, _ = two_deltas
    assert [row.delta for row in record.ledger] == [1e-6] * 3
    for row in record.ledger:  # calibrated at its own delta, composed at the client's
        entry = next(e for e in row.entries if e.kind == "embeddings")
        assert entry.delta == 1e-3
        assert gaussian_epsilon(1 / entry.noise_multiplier, 1e-3) == pytest.approx(1.0)
        mu = math.sqrt(len(entry.rounds)) / entry.noise_multiplier
        assert row.by_kind["embeddings"] == pytest.approx(gaussian_epsilon(mu, 1e-6))


def test_each_client_has_a_delta_of_its_own_size(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=1, partition="dirichlet:0.3", privacy=privacy("embeddings:eps=1,clip=1"))
    record = run(setting, out=tmp_path / "a")
    sizes = [World(setting).count(k) for k in range(3)]
    assert len(set(sizes)) == 3
    assert [(row.n, row.delta) for row in record.ledger] == [(n, pytest.approx(1 / n)) for n in sizes]


def test_who_drops_out_of_the_second_ask_is_seen_by_nobody_there(two_deltas):
    """Client 1 sent its embeddings in the first ask and failed in the second, whose message it had received."""
    record, folder = two_deltas
    assert [(a.client, a.ask) for a in record.rounds[0].absent] == [(1, 1)]
    entries = list(Transcript(folder / "transcript").entries())
    assert {e.client for e in entries if (e.round, e.ask, e.direction) == (1, 1, "down")} == {0, 1, 2}
    assert {e.client for e in entries if (e.round, e.ask, e.direction) == (1, 1, "up")} == {0, 2}
    of = {row.client: {e.kind: e.rounds for e in row.entries} for row in record.ledger}
    assert of[1]["embeddings"] == [1, 2], "what was released before it dropped out is paid"
    assert of[1]["logits"] == [2], "what it never sent is not"
    assert of[0]["logits"] == [1, 2]


def test_a_dropped_clients_state_is_that_of_its_last_reply(two_deltas):
    """It trained in the first ask of round 1 and answered; round 2 goes on from there."""
    _, folder = two_deltas
    shared = [e for e in Transcript(folder / "transcript").entries() if e.client == 1 and e.message == "Shared"]
    assert [e.round for e in shared] == [1, 2]
    assert read_record(folder).status == "done"


# --- rounds, asks and fits that differ


def test_the_digest_is_of_all_rounds(tiny, tmp_path):
    """Local sends the same two empty messages in each round; one round and two are not the same protocol."""
    digests = [run(tiny("local", rounds=t), out=tmp_path / str(t)).transcript_digest for t in (1, 2)]
    assert digests[0] != digests[1]


def test_traffic_adds_up_over_unequal_rounds(tiny, tmp_path):
    setting = tiny("outside:Exchange", rounds=3, clients=4, partition="dirichlet:0.3", participation=0.5)
    record = run(setting, out=tmp_path / "a")
    assert len({row.up_payload for row in record.rounds}) > 1, "other clients, other sizes"
    for direction in ("up", "down"):
        for convention in ("payload", "wire"):
            total = sum(getattr(row, f"{direction}_{convention}") for row in record.rounds)
            assert record.bytes(direction, convention) == total


@pytest.mark.parametrize(
    ("first", "done", "other_code", "runs"),
    [(False, False, False, 0), (True, False, False, 1), (True, True, False, 0), (True, True, True, 1)],
)
def test_the_run_that_another_starts_from_is_made_first(first, done, other_code, runs, tmp_path, monkeypatch):
    begun, real = [], runner.run
    monkeypatch.setattr(runner, "run", lambda setting, **how: begun.append((setting, how["out"], how["resume"])))
    monkeypatch.setattr(runner, "first_setting", lambda setting: "the first" if first else None)
    monkeypatch.setattr(runner, "folder_name", lambda setting: f"folder of {setting}")
    monkeypatch.setattr(runner, "_is_done", lambda folder: done)
    monkeypatch.setattr(runner, "_is_other_code", lambda folder, setting: other_code)
    monkeypatch.setattr(runner.nursery, "start_for", lambda *how: None)
    monkeypatch.setattr(runner, "RunState", lambda *of: of)
    monkeypatch.setattr(runner, "_go", lambda state: state)
    beside = tmp_path / "folder of the first"
    assert real(method="local", device="cpu", out=tmp_path / "run")[6] == (beside if first else None)
    assert begun == [("the first", beside, True)] * runs


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_run_by_itself_forgets_what_others_did_not_record(in_turns, monkeypatch):
    reasons = {"of another run"}
    monkeypatch.setattr(runner, "here", lambda: "a turn" if in_turns else None)
    monkeypatch.setattr(runner, "begin_run", reasons.clear)
    monkeypatch.setattr(runner, "_explaining", lambda run: nullcontext())
    monkeypatch.setattr(runner, "_all_rounds", lambda run: sorted(reasons))
    monkeypatch.setattr(runner, "_close", lambda run: None)
    assert runner._go(None) == (["of another run"] if in_turns else [])


@pytest.mark.parametrize("declared", [None, {}, {("up", "Local.w"): 3}])
@pytest.mark.parametrize("aggregate", ["plain", "secure"])
def test_the_record_says_whether_a_method_declares_its_traffic(declared, aggregate, monkeypatch):
    """In secure sums the declaration is that of the sums. Fields that were never to be sent are refused."""
    compared = []
    monkeypatch.setattr(runner, "compare", lambda *of, **more: compared.append(of))
    monkeypatch.setattr(runner, "in_sums", lambda method, declared, sums: ("in sums", declared, sums))
    world = SimpleNamespace(plan=lambda *of, **more: "plan", absent=lambda t: {"Local.n"}, compression=None)
    run = SimpleNamespace(
        world=world, method=SimpleNamespace(traffic=lambda plan: declared),
        record=SimpleNamespace(traffic_declared=None), setting=SimpleNamespace(aggregate=aggregate),
        note=lambda notes: None,
    )  # fmt: skip
    traffic = SimpleNamespace(asks=[], choices={}, sizes={("up", "Local.n"): Size()}, whole="whole")
    runner._check_traffic(run, 3, [0], SimpleNamespace(traffic=traffic), ["facts"])
    assert run.record.traffic_declared is (declared is not None)
    held = ("in sums", declared, ["facts"]) if aggregate == "secure" and declared is not None else declared
    assert compared == [(held, "whole")]
    traffic.sizes = {("up", "Local.n"): Size(4, 0)}
    with pytest.raises(RunError, match=r"round 3: Local\.n was sent"):
        runner._check_traffic(run, 3, [0], SimpleNamespace(traffic=traffic), [])


def test_a_run_of_which_nothing_is_said_goes_on_with_none_and_refuses_nothing(tmp_path, monkeypatch):
    """What each word of the caller becomes, and what it is without it."""
    started, cleared = [], []
    monkeypatch.setattr(runner, "RunState", lambda *of: of)
    monkeypatch.setattr(runner, "_go", lambda state: state)
    monkeypatch.setattr(runner.nursery, "start_for", lambda *of: started.append(of))
    monkeypatch.setattr(runner, "clear_unfinished", cleared.append)
    setting, *rest = runner.run(method="fedavg", device="cpu", out=str(tmp_path / "a"), twins="2")
    assert (setting.method, setting.engine, setting.twins) == ("fedavg", "serial", "2")
    assert rest == [tmp_path / "a", False, runner.unwatched, None, False, None, None, 1]
    assert started == [({}, "2")]
    assert cleared == []
    (tmp_path / "a" / "record.json").touch()
    setting, *rest = runner.run(
        setting, out=tmp_path / "a", resume=True, watch="watch", engine="stacked", refuse_idle=True, noise_key="key",
        overwrite=True, twin_sets=5, seed=9,
    )  # fmt: skip
    assert (setting.engine, setting.seed, setting.twins) == ("stacked", 9, "2")
    assert rest == [tmp_path / "a", True, "watch", None, True, None, "key", 5]
    assert cleared == [tmp_path / "a"]
    assert len(started) == 1, "it has read its data before"
    there = runner.run(setting, out=tmp_path / "b", engine=SimpleNamespace())
    assert isinstance(there[4], SimpleNamespace), "an engine that is already running"
    assert runner.run.__kwdefaults__ == {
        "out": None, "resume": False, "watch": None, "engine": None, "refuse_idle": False, "noise_key": None,
        "overwrite": False, "twin_sets": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("code", "now", "other"), [(None, "new", False), ("new", "new", False), ("old", "new", True)])
def test_a_first_run_of_other_code_is_made_again(code, now, other, monkeypatch, tmp_path):
    record = SimpleNamespace(code=code, status="done")
    monkeypatch.setattr(runner, "read_record", lambda folder: record)
    monkeypatch.setattr(runner, "code_of_setting", lambda setting: now)
    monkeypatch.setattr(runner, "differences", lambda a, b: [] if a == b else ["a line"])
    assert runner._is_other_code(tmp_path, None) is other
    assert not runner._is_done(tmp_path)
    (tmp_path / "record.json").touch()
    assert runner._is_done(tmp_path)
    record.status = "running"
    assert not runner._is_done(tmp_path)


@pytest.mark.parametrize("given", [None, "an engine"])
@pytest.mark.parametrize("begun", [True, False])
def test_what_a_run_began_is_closed_and_an_engine_of_others_goes_on(given, begun, monkeypatch):
    closed = []
    monkeypatch.setattr(runner, "forget_recorded_steps", lambda: closed.append("steps"))
    run = SimpleNamespace(given_engine=given, store=SimpleNamespace(abandon=lambda: closed.append("store")))
    if begun:
        run.twins = SimpleNamespace(close=lambda: closed.append("twins"))
        run.engine = SimpleNamespace(close=lambda: closed.append("engine"))
    runner._close(run)
    assert closed == ["twins"] * begun + ["store"] + ["engine"] * (begun and given is None) + ["steps"]


@pytest.mark.parametrize(
    ("started", "status", "rounds"),
    [(0, "running", [1, 2, 3]), (2, "running", [3]), (3, "running", []), (3, "done", None)],
)
@pytest.mark.parametrize("refuse_idle", [True, False])
def test_the_rounds_that_are_left_are_carried_out(started, status, rounds, refuse_idle, monkeypatch):
    done = []
    monkeypatch.setattr(runner, "compute", lambda world: nullcontext())
    for name in ("check_records", "open_run", "check_applicable", "finish"):
        monkeypatch.setattr(runner, name, lambda run, name=name: done.append(name))
    monkeypatch.setattr(runner, "_one_round", lambda run, t: done.append(t))
    monkeypatch.setattr(runner, "read_record", lambda folder: f"the record of {folder}")
    run = SimpleNamespace(
        world=None, record=SimpleNamespace(status=status), started=started, setting=SimpleNamespace(rounds=3),
        refuse_idle=refuse_idle, transcript=SimpleNamespace(close=lambda: done.append("closed")), folder="FOLDER",
    )  # fmt: skip
    found = runner._all_rounds(run)
    assert done[:2] == ["check_records", "open_run"]
    if rounds is None:
        assert (found, done[2:]) == ("the record of FOLDER", ["closed"])
    else:
        assert found is run.record
        assert done[2:] == ["check_applicable"] * refuse_idle + [*rounds, "finish", "closed"]


@pytest.mark.parametrize(
    ("t", "every", "evaluated"), [(2, 2, True), (3, 2, False), (5, 2, True), (4, 3, False), (3, 9, False)]
)
@pytest.mark.parametrize("eval_clients", [True, False])
def test_every_so_many_rounds_and_the_last_are_evaluated(t, every, evaluated, eval_clients, monkeypatch):
    """Five rounds. What is deployed is kept for the end."""
    told, asked, notes = [], [], []
    monkeypatch.setattr(runner, "evaluate", lambda *of, **more: asked.append((of, more)) or "utility")
    monkeypatch.setattr(runner, "sampling_note", lambda utility: [f"note on {utility}"])
    monkeypatch.setattr(runner, "offers_next_points", lambda method: False)
    method = SimpleNamespace(
        predictor=lambda state, server: f"predictor of {state}", global_points=lambda state, server: "points",
        next_points=None,
    )  # fmt: skip
    run = SimpleNamespace(
        setting=SimpleNamespace(eval_every=every, rounds=5, seed=1, eval_clients=eval_clients), method=method,
        watch=lambda *of: told.append(of), world=SimpleNamespace(device=torch.device("cpu")), server=lambda t: t,
        client="clients", scores="known", store=SimpleNamespace(clients={}), deployed=None, note=notes.extend,
        timings=SimpleNamespace(add=lambda spans: notes.append([(s.party, s.round, s.phase) for s in spans])),
    )  # fmt: skip
    found = runner._evaluate_round(run, t, "state")
    if not evaluated:
        assert (found, told, asked, run.deployed) == (None, [], [], None)
        return
    assert found == "utility"
    assert told == [(t - 1, 5, f"round {t}, evaluating")]
    assert run.deployed == (t, "predictor of state")
    ((of, more),) = asked
    assert of == (run.world, "predictor of state", "clients" if eval_clients else None)
    assert (more["known"], more["global_points"], more["next_points"]) == ("known", "points", None)
    assert notes == [[("evaluation", t, "evaluate")], "note on utility"]


def test_rounds_one_by_one_end_with_the_last(tiny, tmp_path):
    with pytest.raises(SettingError, match="cannot be taken round by round"):
        runner.RoundByRound(tiny().model_copy(update={"start": "another"}), tmp_path)
    by_hand = runner.RoundByRound(tiny(rounds=2), tmp_path)
    assert by_hand.setting.eval_every == runner.MANY
    by_hand._run = SimpleNamespace(record=SimpleNamespace(rounds=[1, 2]))
    with pytest.raises(RunError, match="all 2 rounds of the run are over"):
        by_hand.round()


class Rounds:
    """Stands in for everything around `_one_round`, and keeps what was called in which order."""

    def __init__(self, monkeypatch, turn=None, participants=(0, 2), isolated=None, in_process=True, compression=None):
        self.did, self.asked, self.clock = [], [], iter([10.0, 13.45678])
        self.facts = SimpleNamespace(
            entries=["own"], absent=[], redone=[1, 4], alike=SimpleNamespace(entries=lambda: ["alike"])
        )
        self.run = SimpleNamespace(
            setting=SimpleNamespace(rounds=5, flops="flops", seed=3), now=0, answers="answers", isolated=isolated,
            engine=SimpleNamespace(in_process=in_process), state="before", watch=self.call("watch"),
            world=SimpleNamespace(device=torch.device("cpu"), compression=compression,
                                  shared_work=SimpleNamespace(forget=lambda: None)), server=self.server,
            transcript=SimpleNamespace(begin_round=self.call("begin"), end_round_behind=self.call("end", "end")),
            timings=SimpleNamespace(add=self.call("timings")), record=SimpleNamespace(rounds=["round 1"]),
            method=SimpleNamespace(round=self.round, diagnostics=lambda after: {f"of {after}": 1.5}),
            note=lambda notes: self.did.append(("note", list(notes))),
        )  # fmt: skip
        self.wire = SimpleNamespace(traffic=SimpleNamespace(total={"up": (10, 11), "down": (20, 22)}.get))
        self.turn, put = turn, monkeypatch.setattr
        put(runner, "here", lambda: turn)
        put(runner.time, "perf_counter", lambda: next(self.clock))
        put(runner, "unrecorded", ["reason"])
        put(runner, "participants_of", lambda setting, t: list(participants))
        put(runner, "quorum_of", lambda setting, who: f"quorum of {who}")
        put(runner, "Wire", lambda *of: self.asked.append(("wire", *of)) or self.wire)
        put(runner, "Meter", self.meter)
        put(runner, "RoundSoFar", lambda *of: self.asked.append(("so far", *of)) or self.facts)
        put(runner, "asker", lambda run, so_far: "ask")
        put(runner, "summing_of", lambda *of: SimpleNamespace(mean="mean", facts="facts", entries=["sum"], records=[]))
        put(runner, "Cohort", lambda *of: of)
        put(runner, "peak_rss", lambda: "rss")
        for name in ("check_state", "_check_traffic", "count", "enter", "commit"):
            put(runner, name, self.call(name))
        put(runner, "_evaluate_round", self.call("evaluate"))
        put(runner, "_round_in_own_process", lambda *of: self.did.append(("apart", *of[1:])) or "after")

    def call(self, name, result=None):
        return lambda *of: self.did.append((name, *(one for one in of if one is not self.run))) or result

    def meter(self, party, t, device, flops):
        self.asked.append(("meter", party, t, device.type, flops))
        return SimpleNamespace(
            away="away", span=lambda phase: nullcontext(self.asked.append(("span", phase))), close=lambda: "spans",
            peak_gpu=lambda: "gpu",
        )  # fmt: skip

    def server(self, t, meter):
        return "server", t, meter.away

    def round(self, state, server, cohort):
        if self.turn is not None:
            self.turn.waited_s += 1.25
        self.did.append(("round", state, server, cohort))
        with seeded(3, "server", 4):
            expected = torch.rand(2).tolist()
        assert torch.rand(2).tolist() == expected, "the server's generator of this round"
        return "after"


def test_a_round_from_its_beginning_to_its_row(monkeypatch):
    """Round 4 of 5: who is asked, what is metered, noted, counted, paid for and committed, and in which order."""
    stage = Rounds(monkeypatch)
    before = torch.get_rng_state()
    runner._one_round(stage.run, 4)
    assert torch.equal(before, torch.get_rng_state())
    assert stage.run.now == 4
    transcript, entries = stage.run.transcript, ["own", "alike", "sum"]
    (meter,) = [one[3] for one in stage.asked if one[0] == "so far"]
    assert stage.asked == [
        ("wire", transcript, 4, "answers", torch.device("cpu")), ("meter", "server", 4, "cpu", "flops"),
        ("so far", 4, stage.wire, meter, "quorum of [0, 2]"), ("span", "round"),
    ]  # fmt: skip
    assert stage.did == [
        ("watch", 3, 5, "round 4"), ("begin", 4), ("round", "before", ("server", 4, "away"), ([0, 2], "ask", "mean")),
        ("check_state", "after", "round"), ("timings", "spans", "rss", "gpu"), ("note", ["steps not recorded: reason"]),
        ("_check_traffic", 4, [0, 2], stage.wire, "facts"), ("end", 4), ("evaluate", 4, "after"), ("count", stage.wire),
        ("enter", 4, entries, stage.wire), ("commit", 4, "after", "end"), ("watch", 4, 5, "round 4"),
    ]  # fmt: skip
    assert stage.run.record.rounds == ["round 1", RoundRecord(
        round=4, participants=[0, 2], absent=[], redone=2, up_payload=10, up_wire=11, down_payload=20, down_wire=22,
        utility=None, sums=[], diagnostics={"of after": 1.5}, wall_s=3.4568, seeds=None, share_s=None,
    )]  # fmt: skip


def test_a_round_in_which_nobody_was_drawn_leaves_the_state(monkeypatch):
    stage = Rounds(monkeypatch, participants=())
    runner._one_round(stage.run, 4)
    assert [row[0] for row in stage.did] == [
        "watch", "begin", "note", "note", "end", "evaluate", "count", "enter", "commit", "watch",
    ]  # fmt: skip
    assert stage.did[2] == ("note", ["round 4: no client was drawn, and the state stayed as it was"])
    assert ("commit", 4, "before", "end") in stage.did
    assert stage.run.record.rounds[1].participants == []


def test_a_servers_round_in_its_own_process(monkeypatch):
    stage = Rounds(monkeypatch, isolated="apart", in_process=False)
    runner._one_round(stage.run, 4)
    assert stage.did[2] == ("apart", "apart", 4, ([0, 2], "ask", "mean"), "ask")
    assert not {"round", "timings", "check_state"} & {row[0] for row in stage.did}
    assert ("commit", 4, "after", "end") in stage.did
    assert stage.asked[0][-1] is None, "what is sent is bytes, for another process"
    squeezed = Rounds(monkeypatch, compression="svd")
    runner._one_round(squeezed.run, 4)
    assert squeezed.asked[0][-1] is None, "and where it is compressed"


@pytest.mark.parametrize(("beside", "seeds", "share"), [([5, 6], 3, 2.2068), ([], None, None)])
def test_a_round_beside_other_seeds_says_its_own_share(beside, seeds, share, monkeypatch):
    """3.45678 seconds, of which others had 1.25."""
    turn = SimpleNamespace(waited_s=7.0, beside=beside, away=None)
    stage = Rounds(monkeypatch, turn)
    runner._one_round(stage.run, 4)
    row = stage.run.record.rounds[1]
    assert (row.seeds, row.share_s, row.wall_s) == (seeds, share, 3.4568)
    assert turn.away == "away"


def test_what_a_server_in_its_own_process_asks_is_asked_here(monkeypatch):
    """Replies of single clients, and means: of one message to all, of a message for each, of one to some."""
    checked, meant, told = [], [], []
    monkeypatch.setattr(runner, "encode", lambda what: f"bytes of {what}")
    monkeypatch.setattr(runner, "decode", lambda blob, kind, device: f"{kind.__name__} {blob}")
    monkeypatch.setattr(runner, "check_path", lambda *of: checked.append(of))
    monkeypatch.setattr(runner, "find_function", lambda method, path: f"{method}.{path}")

    def mean(fn, message, by):
        meant.append((fn, message, by))
        return SimpleNamespace(value="the mean", count=2)

    cohort = SimpleNamespace(ids=(0, 2), mean=mean)
    one, other = "".join(["blo", "b 1"]), "".join(["blo", "b 2"])

    def server(what, t, state, ids, answers):
        assert (what, t, state, ids) == ("round", 4, "bytes of state", [0, 2])
        assert answers("train", {0: one}, None) == ({0: "reply"}, [0, 2], 0)
        assert answers("learn", {2: one, 0: one}, {"by": "n"}) == ({0: "bytes of the mean"}, [0, 2], 2)
        answers("learn", {0: one, 2: other}, {"by": None})
        answers("learn", {2: other}, {"by": None})
        said = {"spans": [{"party": "server", "round": 4, "phase": "round", "wall_s": 1.0, "cpu_s": 2.0}],
                "rss": 7, "gpu": 8, "unrecorded": ["why"]}  # fmt: skip
        return said, ("blob after",)

    run = SimpleNamespace(
        method="method", state="state", world=SimpleNamespace(device="cpu"),
        timings=SimpleNamespace(add=lambda *of: told.append(of)), note=lambda notes: told.append(list(notes)),
    )  # fmt: skip
    asked = []
    monkeypatch.setattr(runner, "Span", lambda **span: span)
    after = runner._round_in_own_process(
        run, SimpleNamespace(server=server), 4, cohort, lambda *of: asked.append(of) or {0: "reply"}
    )
    assert after == "Record blob after"
    assert asked == [(cohort, "train", {0: one})]
    assert checked == [("method", "train"), *[("method", "learn")] * 3]
    assert meant == [
        ("method.learn", "Down blob 1", "n"), ("method.learn", {0: "Down blob 1", 2: "Down blob 2"}, None),
        ("method.learn", {2: "Down blob 2"}, None),
    ]  # fmt: skip
    (spans, rss, gpu), notes = told
    assert (spans[0]["phase"], rss, gpu, notes) == ("round", 7, 8, ["steps not recorded: why"])


@pytest.mark.parametrize(("now", "shown"), [(0, 1), (1, 1), (3, 3)])
def test_an_error_of_a_device_is_explained_and_any_other_stays(now, shown, monkeypatch):
    logged, asked = [], []
    found = SimpleNamespace(who="server")
    monkeypatch.setattr(runner, "device_error", lambda e, who: found if "device" in str(e) else None)
    monkeypatch.setattr(runner, "explained", lambda *of: asked.append(of) or RunError("explained"))
    run = SimpleNamespace(now=now, folder="FOLDER", setting="SETTING", log=logged.append, tell_slower=lambda why: None)
    with pytest.raises(RunError, match="explained"), runner._explaining(run):
        raise ValueError("a device is full")
    assert asked == [(found, shown, "FOLDER", "SETTING")]
    (text,) = logged
    assert text.startswith(f"round {now}, server: Traceback")
    with pytest.raises(KeyError), runner._explaining(run):
        raise KeyError("other")
    assert len(logged) == 1


@pytest.mark.parametrize(("device", "waited"), [("cpu", []), ("cuda:1", [torch.device("cuda", 1)])])
def test_a_round_that_is_asked_for_is_the_next_and_is_waited_for(device, waited, tiny, tmp_path, monkeypatch):
    """Two rounds are over; the third is carried out, and its row returned."""
    did, calls, at = [], [], torch.device(device)
    by_hand = runner.RoundByRound(tiny(rounds=3), tmp_path)
    rows = ["round 1", "round 2"]
    by_hand._run = SimpleNamespace(
        record=SimpleNamespace(rounds=rows), world=SimpleNamespace(device=at),
        store=SimpleNamespace(settle=lambda: did.append("settled")),
    )  # fmt: skip
    monkeypatch.setattr(runner, "_explaining", lambda run: nullcontext(did.append("explaining")))
    monkeypatch.setattr(runner, "compute", lambda world: nullcontext(did.append("compute")))
    monkeypatch.setattr(runner, "_one_round", lambda run, t: rows.append(f"round {t}"))
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    assert by_hand.round() == "round 3"
    assert calls == waited
    by_hand.settle()
    assert did == ["explaining", "compute", "settled"]
    assert by_hand.record.rounds is rows


@pytest.mark.parametrize("fails", [False, True])
def test_rounds_one_by_one_are_opened_and_closed_in_order(fails, tiny, tmp_path, monkeypatch):
    did = []

    @contextmanager
    def locked(folder):
        did.append(("locked", folder))
        yield
        did.append("unlocked")

    state = SimpleNamespace(world="world", transcript=SimpleNamespace(close=lambda: did.append("transcript")))
    monkeypatch.setattr(runner, "locked", locked)
    monkeypatch.setattr(runner, "RunState", lambda *of: did.append(of[1:]) or state)
    monkeypatch.setattr(runner, "_explaining", lambda run: nullcontext())
    monkeypatch.setattr(runner, "compute", lambda world: nullcontext())
    monkeypatch.setattr(runner, "check_records", lambda run: did.append("checked"))
    monkeypatch.setattr(runner, "open_run", lambda run: did.append("opened") or (1 / 0 if fails else None))
    monkeypatch.setattr(runner, "_close", lambda run: did.append("closed"))
    begun = [("locked", tmp_path), (tmp_path, False, runner.unwatched, None, False), "checked", "opened"]
    if fails:
        with pytest.raises(ZeroDivisionError), runner.RoundByRound(tiny(), tmp_path):
            pass
        assert did[:5] == [*begun, "closed"]
        assert "transcript" not in did
    else:
        with runner.RoundByRound(tiny(), tmp_path) as opened:
            assert opened._run is state
            assert did == begun
        assert did == [*begun, "transcript", "closed", "unlocked"]
