"""The plugin in somebody else's suite: marks and fixtures pass what is honest and fail what is not, in plain words."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from fedaudit import pytest_plugin as plugin
from fedaudit import run
from fedaudit.attack.attack_run import attack_run
from fedaudit.errors import SettingError
from fedaudit.gates.record_gates import audit_claims
from fedaudit.gates.round_benchmark import Limits
from fedaudit.metrics.metric import metrics
from fedaudit.runtime.attack_result import MembershipResult
from fedaudit.runtime.run_record import EpsilonAudit, read_record, save_attacks, save_audits

pytest_plugins = ["pytester"]

SMALL = 'SMALL = {"clients": 2, "model": "mlp", "partition": "iid", "set": {"E": 1, "B": 64, "eta": 0.2}}\n'
HEAD = f"import pytest\n\n{SMALL}"


@pytest.fixture
def suite(pytester, elsewhere, monkeypatch):
    """Write a test file and run it; return the result with the text that it printed.

    A session within this one forgets what it imported, and parts of torch cannot be imported twice: everything that it
    needs was imported for the run elsewhere, and for the metrics, whose files register their names once.
    """
    metrics()

    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # with it, pytest-benchmark switches itself off

    def call(body, *words):
        pytester.makepyfile(HEAD + body)
        words = ("-q", "--strict-markers", "-p", "no:cacheprovider", "-p", "no:randomly", *words)
        return pytester.runpytest_inprocess(*words)

    return call


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A protected run, as somebody else left it: an attack reached 0.62 [0.58, 0.66], and a claim was refuted."""
    folder = tmp_path_factory.mktemp("elsewhere") / "run"
    run(
        method="fedavg", rounds=1, clients=2, model="mlp", partition="iid", set={"E": 1, "B": 64, "eta": 0.5},
        privacy={"training": {"noise_multiplier": 1.0, "sensitivity": "clip:0.5", "delta": 1e-2}}, flops=True,
        out=folder,
    )  # fmt: skip
    attack_run(folder, attacks=["loss"])
    audit_claims(folder, trials=2)
    none = {"value": None, "reason": "made up"}
    pooled = {
        "members": 50, "nonmembers": 50, "confidence": 0.95, "auc": {"value": 0.62, "low": 0.58, "high": 0.66},
        "balanced_accuracy": none, "advantage": none, "advantage_best": none, "tpr_at_fpr": [],
    }  # fmt: skip
    result = {"attack": "lira", "threat": "server", "ran": True, "claims": "membership", "pooled": pooled}
    audit = EpsilonAudit(
        test="residuals", kind="training", threat="server", claim="training, all rounds", claim_epsilon=1.0,
        ledger_epsilon=1.0, lower_bound=3.25, p_value=1e-9, trials=1000, confidence=0.95, delta=1e-2,
        verdict="refuted", method="noise", how="",
    )  # fmt: skip
    digest = read_record(folder).transcript_digest
    save_attacks(folder, digest, [MembershipResult.model_validate(result)])
    (folder / "audits.json").unlink()
    save_audits(folder, digest, [audit])
    return folder


def test_marks_pass_what_is_honest_and_name_what_is_not(suite):
    """One suite: the same run under limits that it keeps, and under one each that it breaks."""
    result = suite(
        """
@pytest.mark.comm_budget(uplink="40 kB", downlink="40 kB")
@pytest.mark.accuracy_floor(0.1)
@pytest.mark.metric_budget("up", max="40 kB")
@pytest.mark.leak_budget(attack="loss", auc=0.95)
def test_kept(federated_run):
    record = federated_run(method="fedavg", rounds=1, **SMALL)
    assert {one.attack for one in record.attacks} >= {"loss"}

@pytest.mark.leak_budget(attack="loss", auc=0.2)
def test_leak(federated_run):
    federated_run(method="fedavg", rounds=1, **SMALL)

@pytest.mark.privacy_budget(epsilon=8, delta=1e-5)
def test_epsilon(federated_run):
    federated_run(method="fedavg", rounds=1, **SMALL)

@pytest.mark.accuracy_floor(0.999)
def test_accuracy(federated_run):
    federated_run(method="fedavg", rounds=1, **SMALL)

@pytest.mark.comm_budget(uplink="40 kB")
def test_doubled(federated_run):
    federated_run(method="fattened:FedAvg", rounds=1, **SMALL)
"""
    )
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines_random(
        [
            "fedavg: loss by server reaches AUC * on * candidates, the budget 0.2 (above it by at least 0.*",
            "fedavg: epsilon is inf at delta = 1e-05, the budget 8; client 0 releases * without protection.",
            "fedavg: accuracy is 0.*, the budget 0.999 (*% under)*",
            "fattened:FedAvg: up traffic is 76.89 kB, the budget 40.00 kB (92.2% over); the largest field is up *",
        ]
    )


@pytest.mark.long
def test_claims_are_tested_and_a_lie_is_refuted(suite):
    """DP-SGD as it is, and with half of its noise in one of two runs: the ledger says the same of both."""
    result = suite(
        """
DP = {"training": {"noise_multiplier": 1.0, "sensitivity": "clip:0.5", "delta": 1e-2}}

@pytest.mark.privacy_budget(epsilon=12, delta=1e-2)
@pytest.mark.claims_hold()
def test_honest(federated_run):
    federated_run(method="fedavg", rounds=1, privacy=DP, **SMALL)

@pytest.mark.claims_hold()
def test_half_of_the_noise(federated_run, monkeypatch):
    from opacus.optimizers import DPOptimizer
    real = DPOptimizer.add_noise
    def less(self):
        real(self)
        for p in self.params:
            p.grad = p.summed_grad.view_as(p) + 0.5 * (p.grad - p.summed_grad.view_as(p))
    monkeypatch.setattr(DPOptimizer, "add_noise", less)
    federated_run(method="fedavg", rounds=1, privacy=DP, **SMALL)

@pytest.mark.privacy_budget(epsilon=0.5, delta=1e-2)
def test_above(federated_run):
    federated_run(method="fedavg", rounds=1, privacy=DP, **SMALL)
"""
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "fedavg: the claim of epsilon = * for training, all rounds is refuted by residuals: at least *",
            "fedavg: epsilon is * at delta = 0.01, the budget 0.5 (*% over); of client *, which spent most, training*",
        ]
    )


ELSEWHERE = """
def test_epsilon(privacy_budget):
    privacy_budget(FOLDER, epsilon=0.01)

def test_leak(leak_budget):
    leak_budget(FOLDER, attack="lira", auc=0.5)

def test_any_metric(metric_budget):
    metric_budget(FOLDER, "own", min=1.5)

def test_no_metric(metric_budget):
    metric_budget(FOLDER, "owm", min=0.5)

def test_kept(leak_budget, accuracy_floor, comm_budget, metric_budget):
    metric_budget(FOLDER, "own", min=0.0)
    leak_budget(FOLDER, attack="lira", auc=0.7)
    accuracy_floor(FOLDER + "/record.json", 0.0)
    comm_budget(FOLDER, uplink="40 kB")

def test_claim(claims_hold):
    claims_hold(FOLDER)

def test_none(leak_budget):
    leak_budget(FOLDER, attack="rmia", auc=0.5)
"""


def test_records_made_elsewhere(suite, elsewhere):
    result = suite(f"FOLDER = {str(elsewhere)!r}\n" + ELSEWHERE)
    result.assert_outcomes(passed=1, failed=6)
    result.stdout.fnmatch_lines_random(
        [
            "fedavg: epsilon is * at each client's own delta, the budget 0.01*",
            "fedavg: lira by server reaches AUC 0.620 [[]0.580, 0.660] on 100 candidates, the budget 0.5 (above it*",
            "fedavg: the claim of epsilon = 1 for training, all rounds is refuted by residuals: at least 3.25*",
            "fedavg: own is 0.*, the budget 1.5 (*% under).",
            "*metric_budget: *owm*own*",
            "*leak_budget: the record of fedavg has no attack rmia by server (it has: lira by server). *",
        ]
    )


@pytest.mark.parametrize(
    ("words", "outcomes"),
    [((), {"passed": 1, "warnings": 1}), (("--fedaudit-cannot-tell", "skip"), {"skipped": 1}),
     (("--fedaudit-cannot-tell", "fail"), {"failed": 1}), (("-o", "fedaudit_cannot_tell=fail"), {"failed": 1})],
)  # fmt: skip
def test_what_cannot_be_told_is_for_the_user_to_decide(suite, elsewhere, words, outcomes):
    body = f"def test_it(leak_budget):\n    leak_budget({str(elsewhere)!r}, attack='lira', auc=0.6)\n"
    result = suite(body, *words, "-rs", "--fedaudit-format", "github")
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines(["*its interval spans the budget, so it cannot be told*40? candidates would tell*"])
    level = "error" if "failed" in outcomes else "warning"
    result.stdout.fnmatch_lines([f"::{level} title=fedaudit gate::fedavg: lira by server*"])


def test_a_mark_that_judges_nothing_fails(suite):
    result = suite(
        """
@pytest.mark.accuracy_floor(0.5)
def test_idle():
    pass

@pytest.mark.accuracy_floor(most=0.5)
def test_wrong(federated_run):
    federated_run(method="fedavg", rounds=1, **SMALL)
"""
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["The mark accuracy_floor judged nothing: the test made no federated_run.*"])
    result.stdout.fnmatch_lines(["*The mark accuracy_floor: *'floor'. Write accuracy_floor(floor).*"])


# --- benchmarks --------------------------------------------------------------------------------------------------

BENCHMARK = """
def test_speed(federated_benchmark):
    federated_benchmark(method="fedavg", rounds=3, **SMALL)
"""


def test_without_pytest_benchmark_the_error_names_the_extra(suite):
    result = suite(BENCHMARK, "-p", "no:benchmark")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(['federated_benchmark needs pytest-benchmark*pip install "pytest-benchmark*'])


@pytest.mark.long
def test_rounds_are_samples_and_the_json_is_pytest_benchmarks_own(suite, pytester):
    """Three rounds of two clients: 2 x 38,448 bytes up (9,610 numbers of 4 bytes and a count), 2 x 38,440 down. The
    second saving is compared with the first by pytest-benchmark, in a session and by its own command."""
    words = ("--benchmark-autosave", "--benchmark-storage", str(pytester.path / "kept"))
    suite(BENCHMARK, *words).assert_outcomes(passed=1)
    result = suite(BENCHMARK, *words, "--benchmark-compare", "--benchmark-compare-fail", "median:10000%")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_speed (0001_*"])
    files = sorted((pytester.path / "kept").rglob("*.json"))
    assert len(files) == 2
    (found,) = json.loads(files[0].read_text())["benchmarks"]
    assert found["stats"]["rounds"] == 3
    info = found["extra_info"]
    assert (info["bytes_up"], info["bytes_down"]) == (2 * 38_448, 2 * 38_440)
    assert info["wire_up"] > info["bytes_up"]
    assert info["flops"] > 1e6
    assert info["gpu_s"] is None
    assert info["peak_host_bytes"] > 50e6
    members = sum(read_members())
    assert info["samples_per_s"] == pytest.approx(members / info["round_s"])
    assert 0 < info["round_s"] <= 1.05 * found["stats"]["max"]
    assert (info["engine"], info["step"], info["precision"]) == ("serial", "eager", "float32")
    done = subprocess.run(
        [sys.executable, "-m", "pytest_benchmark", "--storage", str(pytester.path / "kept"), "compare", "0001", "0002"],
        capture_output=True, text=True, check=False, cwd=pytester.path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test_speed") == 2


def read_members():
    from fedaudit.runtime.world import world_of
    from fedaudit.setting import Setting

    setting = Setting.make(method="fedavg", clients=2, model="mlp", partition="iid")
    world = world_of(setting.model_dump_json())
    return [len(world.members(k)[1]) for k in range(2)]


@pytest.mark.long
def test_pytest_benchmark_chooses_the_number_of_rounds(suite):
    """Four rounds at least by its option: one more to calibrate, one for the result, one before all of them."""
    body = """
def test_speed(federated_benchmark, benchmark):
    found = federated_benchmark(method="fedavg", flops=False, **SMALL)
    assert benchmark.stats["rounds"] == 4
    assert len(found.record.rounds) == 7
    assert found.costs.flops is None
    assert all(row.utility is None for row in found.record.rounds)
"""
    suite(body, "--benchmark-min-rounds=4", "--benchmark-max-time=0").assert_outcomes(passed=1)


RATIO = """
SMALL["set"] = {"E": 4, "B": 32, "eta": 0.2}  # most of a round is training

@pytest.mark.parametrize("turn", range(TURNS))
def test_slower(federated_benchmark, turn):
    federated_benchmark(method="gated:Slower", relative_to="fedavg", max_ratio=1.2, flops=False, **SMALL)

@pytest.mark.parametrize("turn", range(TURNS))
def test_same(federated_benchmark, turn):
    federated_benchmark(method="gated:Same", relative_to="fedavg", max_ratio=1.2, flops=False, **SMALL)
"""


@pytest.mark.slow
def test_a_method_made_slower_fails_and_another_passes_20_times_each(suite):
    """On a machine that is busy: where it is not, processes that count are started, two more than there are cores."""
    wanted = len(os.sched_getaffinity(0)) + 2
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(max(0, wanted - int(os.getloadavg()[0])))
    ]
    try:
        result = suite(f"TURNS = 20\n{RATIO}", "--fedaudit-cannot-tell", "skip", "-rA")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    failed = [line for line in result.outlines if line.startswith("FAILED ")]
    passed = [line for line in result.outlines if line.startswith("PASSED ")]
    assert not [line for line in failed if "test_same" in line], "an equal method was called slower"
    assert not [line for line in passed if "test_slower" in line], "a slower method passed"
    result.assert_outcomes(passed=20, failed=20)


@pytest.mark.slow
def test_exact_ratios_need_no_luck(suite):
    """Twice the epochs are twice the training: FLOPs and nothing else. Messages of two trees are 1.5 times the bytes:
    up 2 of 1, down 1 of 1. A reference may be any change of the setting."""
    result = suite(
        """
def gate(federated_benchmark, method, **limits):
    return federated_benchmark(method=method, rounds=1, relative_to="fedavg", **limits, **SMALL)

def test_flops(federated_benchmark):
    gate(federated_benchmark, "gated:Twice", max_flops_ratio=1.9, max_bytes_ratio=1)

def test_bytes(federated_benchmark):
    gate(federated_benchmark, "fattened:FedAvg", max_flops_ratio=1.0, max_bytes_ratio=1.4)

def test_equal(federated_benchmark):
    found = gate(federated_benchmark, "gated:Same", max_flops_ratio=1, max_bytes_ratio=1)
    assert found.reference.setting.set["B"] == 64

def test_few(federated_benchmark):
    gate(federated_benchmark, "gated:Same", max_ratio=1.2)

def test_alone(federated_benchmark):
    federated_benchmark(method="fedavg", max_ratio=1.2, **SMALL)
"""
    )
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines_random(
        [
            "gated:Twice: a round computes * FLOPs, 2 times the * of fedavg, the limit 1.9 (5.3% over).",
            "fattened:FedAvg: a round sends 230.66 kB, 1.5 times the 153.78 kB of fedavg, the limit 1.4 (7.1% over);"
            " the largest field is *",
            "*rounds = 1 are too few to gate a ratio: give 8 at least.",
            "*max_ratio = 1.2: give relative_to= as well*",
        ]
    )


@pytest.mark.long
def test_a_disabled_benchmark_gates_what_is_exact_and_no_time(suite):
    body = """
def test_it(federated_benchmark):
    found = federated_benchmark(
        method="gated:Slower", relative_to="fedavg", max_ratio=0.1, max_bytes_ratio=1, flops=False, **SMALL)
    assert found.compared is None
"""
    suite(body, "--benchmark-disable").assert_outcomes(passed=1)


# --- each part alone, without a session ------------------------------------------------------------------------------


def finding(gate, told, message):
    return SimpleNamespace(gate=gate, told=told, message=message)


@pytest.fixture
def asking():
    """What a gate knows of its test. Options and the ini file say what the dictionary says."""
    given = {"--fedaudit-cannot-tell": None, "fedaudit_cannot_tell": "warn", "--fedaudit-format": "table"}
    config = SimpleNamespace(getoption=given.get, getini=given.get, stash={plugin._said: []})
    return SimpleNamespace(config=config, node=SimpleNamespace(stash={}), given=given)


KEPT, BROKEN, UNTOLD = (finding(f"gate {told}", told, f"it is {told}") for told in ("kept", "broken", "cannot be told"))


@pytest.mark.parametrize(
    ("mark", "option", "ini", "level", "raised"),
    [
        (None, None, "warn", "warning", None), (None, None, "skip", "warning", "Skipped"),
        (None, "warn", "fail", "warning", None), (None, "fail", "warn", "error", "Failed"),
        ("skip", "fail", "warn", "warning", "Skipped"), ("warn", "fail", "fail", "warning", None),
    ],
)  # fmt: skip
def test_what_cannot_be_told_goes_by_the_mark_then_the_option_then_the_file(mark, option, ini, level, raised, asking):
    asking.given |= {"--fedaudit-cannot-tell": option, "fedaudit_cannot_tell": ini}
    stopped, noted = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            plugin._judge(asking, [KEPT, UNTOLD], mark)
        except (pytest.fail.Exception, pytest.skip.Exception) as e:
            stopped, noted = type(e).__name__, e
    assert stopped == raised
    assert noted is None or noted.msg == "it is cannot be told"
    assert [str(one.message) for one in caught] == ([] if raised else ["it is cannot be told"])
    assert asking.node.stash[plugin._checked] == {"gate kept", "gate cannot be told"}
    assert asking.config.stash[plugin._said] == [(level, "it is cannot be told")]


def test_what_is_broken_fails_without_a_traceback(asking):
    """What cannot be told is told along where it counts as broken."""
    for way, told in (("warn", "it is broken"), ("fail", "it is broken\nit is cannot be told")):
        with pytest.raises(pytest.fail.Exception) as failed:
            plugin._judge(asking, [UNTOLD, KEPT, BROKEN], way)
        assert (failed.value.msg, failed.value.pytrace) == (told, False)
    assert [level for level, _ in asking.config.stash[plugin._said]] == ["error", "warning", "error", "error"]
    plugin._judge(asking, [KEPT])
    with pytest.raises(pytest.UsageError, match="cannot_tell = 'stop' is not a way"):
        plugin._judge(asking, [KEPT], "stop")


def test_a_warning_is_shown_at_the_test(asking):
    def check():  # as the fixtures' functions are
        plugin._judge(asking, [UNTOLD])

    with pytest.warns(plugin.CannotTell) as caught:
        check()
    here = inspect.currentframe().f_lineno
    assert (caught[0].filename, here - caught[0].lineno) == (__file__, 1)


def test_mistakes_of_a_gate_and_of_a_mark_are_failures_without_a_traceback():
    with pytest.raises(pytest.fail.Exception, match="no such attack") as failed, plugin._plain_errors():
        raise SettingError("no such attack")
    assert failed.value.pytrace is False
    with pytest.raises(ValueError, match="a bug"), plugin._plain_errors():
        raise ValueError("a bug")
    called = []

    def check(floor, *, more=None):
        called.append((floor, more))

    plugin._apply(check, pytest.mark.accuracy_floor(0.5, more=1).mark)
    assert called == [(0.5, 1)]
    with pytest.raises(
        pytest.fail.Exception, match=r"^The mark accuracy_floor: .*\. Write accuracy_floor\(floor\)\.$"
    ) as failed:
        plugin._apply(check, pytest.mark.accuracy_floor(roof=0.5).mark)
    assert failed.value.pytrace is False
    assert len(called) == 1


def test_a_mark_without_a_run_is_told_without_a_traceback():
    marks = {"accuracy_floor", "comm_budget"}
    item = SimpleNamespace(stash={}, get_closest_marker=lambda name: name in marks)

    def called(*judged):
        step = plugin.pytest_runtest_call(item)
        next(step)
        assert item.stash[plugin._checked] == set()
        item.stash[plugin._checked].update(judged)
        next(step, None)

    called("accuracy_floor", "comm_budget", "leak_budget")
    with pytest.raises(pytest.fail.Exception, match="The mark comm_budget judged nothing") as failed:
        called("accuracy_floor")
    assert failed.value.pytrace is False


def test_broken_gates_are_told_to_github_alone(asking):
    lines = []
    asking.config.stash[plugin._said] = [("error", "50 % over\r\n"), ("warning", "so")]
    reporter = SimpleNamespace(write_line=lines.append)
    plugin.pytest_terminal_summary(reporter, asking.config)
    assert lines == []
    asking.given["--fedaudit-format"] = "github"
    plugin.pytest_terminal_summary(reporter, asking.config)
    assert lines == ["::error title=fedaudit gate::50 %25 over%0D%0A", "::warning title=fedaudit gate::so"]


def test_a_benchmark_hands_on_what_it_is_asked(asking, monkeypatch, tmp_path):
    """Operations are counted unless the test says otherwise. Each call has a folder of its own."""
    asked, judged = [], []
    there = {"benchmark": True}
    asking.config.pluginmanager = SimpleNamespace(hasplugin=there.get)
    asking.getfixturevalue = lambda name: f"the fixture {name}"
    asking.node.iter_markers = lambda name: (
        [pytest.mark.comm_budget(uplink="1 kB").mark] if name == "comm_budget" else []
    )

    def rounds(samples, setting, folder, **how):
        asked.append((samples, setting, folder, how))
        return SimpleNamespace(record="its record")

    monkeypatch.setattr("fedaudit.gates.round_benchmark.benchmark_rounds", rounds)
    monkeypatch.setattr("fedaudit.gates.round_benchmark.findings", lambda found, limits: [(found, limits)])
    monkeypatch.setattr(plugin, "_judge", lambda request, found, way: judged.append((found[0][1], way)))
    made = inspect.unwrap(plugin.federated_benchmark)
    call = made(asking, tmp_path, lambda record, **limits: judged.append((record, limits)))
    call(method="fedavg", max_ratio=2.0, max_bytes_ratio=3.0, max_flops_ratio=4.0, rounds=5, cannot_tell="skip")
    call(relative_to={"method": "local"}, flops=False)
    limits, none = Limits(2.0, 3.0, 4.0), Limits(None, None, None)
    assert asked == [
        ("the fixture benchmark", {"method": "fedavg"}, tmp_path / "federated-benchmark-1",
         {"rounds": 5, "relative_to": None, "limits": limits, "flops": True}),
        ("the fixture benchmark", {}, tmp_path / "federated-benchmark-2",
         {"rounds": None, "relative_to": {"method": "local"}, "limits": none, "flops": False}),
    ]  # fmt: skip
    held = ("its record", {"uplink": "1 kB"})
    assert judged == [held, (limits, "skip"), held, (none, None)]
    there.clear()
    with pytest.raises(pytest.fail.Exception, match="needs pytest-benchmark") as failed:
        made(asking, tmp_path, None)
    assert failed.value.pytrace is False
