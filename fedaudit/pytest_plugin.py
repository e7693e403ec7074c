"""A pytest plugin: gate communication, privacy, leaks, accuracy and speed of your own method in your own test suite.

    @pytest.mark.comm_budget(uplink="12 MiB", downlink="12 MiB")      # per client and round
    @pytest.mark.accuracy_floor(0.9)
    def test_my_method(federated_run):
        federated_run(method="my_package.my_method:MyMethod", rounds=5)

    def test_its_speed(federated_benchmark):                          # needs pytest-benchmark
        federated_benchmark(method="my_package.my_method:MyMethod", relative_to=BASELINE, max_ratio=1.2)

Marks hold for every `federated_run` of a test. Each is also a fixture, for records that you made elsewhere:
`privacy_budget(record, epsilon=8, delta=1e-5)`, where `record` is a RunRecord, a run folder or a record.json. A gate
that compares intervals may find that it cannot tell. Then it warns; `--fedaudit-cannot-tell fail` is stricter.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fedaudit.gates.finding import Finding

MARKS = {
    "comm_budget": "comm_budget(uplink=None, downlink=None, baseline=None, max_growth=None, per='client-round', "
    "convention='payload'): ceilings for what every federated_run sends, such as '12 MiB' or '1 %'",
    "privacy_budget": "privacy_budget(epsilon, delta=None): the largest epsilon by the ledger, all rounds together",
    "leak_budget": "leak_budget(attack, auc=None, tpr=None, threat='server', set=None, cannot_tell=None): the most "
    "that a membership attack may reach, by its interval",
    "accuracy_floor": "accuracy_floor(floor): the least accuracy on the common test set",
    "metric_budget": "metric_budget(metric, max=None, min=None): a ceiling or a floor for any metric that a budget can "
    "limit, such as own, flops or refuted",
    "claims_hold": "claims_hold(trials=1000, cannot_tell=None): no claim of epsilon is refuted, no declaration broken",
}
WAYS = ("warn", "skip", "fail")  # with a gate that cannot tell
Check = Callable[..., None]

_said = pytest.StashKey[list[tuple[str, str]]]()  # of a session: (error or warning, message), for GitHub
_checked = pytest.StashKey[set[str]]()  # of a test: the gates that judged something


class CannotTell(UserWarning):
    """A gate found neither that its limit is kept nor that it is broken."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fedaudit")
    group.addoption(
        "--fedaudit-cannot-tell",
        choices=WAYS,
        default=None,
        help="what a gate does that cannot tell whether its limit is kept (default: the ini file's, or warn)",
    )
    group.addoption(
        "--fedaudit-format",
        choices=("table", "github"),
        default="table",
        help="github: print broken gates as workflow commands, which GitHub shows beside the change",
    )
    parser.addini("fedaudit_cannot_tell", "what a gate does that cannot tell: warn, skip or fail", default="warn")


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKS.values():
        config.addinivalue_line("markers", line)
    config.stash[_said] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that passes although one of its marks judged nothing."""
    item.stash[_checked] = set()
    yield
    idle = [name for name in MARKS if item.get_closest_marker(name) and name not in item.stash[_checked]]
    if idle:
        pytest.fail(
            f"The mark {idle[0]} judged nothing: the test made no federated_run. Call federated_run, or use the "
            f"fixture {idle[0]} on a record.",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--fedaudit-format") != "github":
        return
    for level, message in config.stash[_said]:
        escaped = message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        terminalreporter.write_line(f"::{level} title=fedaudit gate::{escaped}")


def _judge(request: pytest.FixtureRequest, findings: Sequence[Finding], cannot_tell: str | None = None) -> None:
    """Fail for what is broken, and do with what cannot be told as the mark, the command line or the ini file says."""
    config = request.config
    way = cannot_tell or config.getoption("--fedaudit-cannot-tell") or config.getini("fedaudit_cannot_tell")
    if way not in WAYS:
        raise pytest.UsageError(f"cannot_tell = {way!r} is not a way to go on. Choose from {', '.join(WAYS)}.")
    for finding in findings:
        request.node.stash.setdefault(_checked, set()).add(finding.gate)
    broken = [f.message for f in findings if f.told == "broken"]
    untold = [f.message for f in findings if f.told == "cannot be told"]
    said = config.stash[_said]
    said += [("error", message) for message in broken]
    said += [("error" if way == "fail" else "warning", message) for message in untold]
    if broken or (untold and way == "fail"):
        pytest.fail("\n".join([*broken, *(untold if way == "fail" else [])]), pytrace=False)
    for message in untold:
        if way == "skip":
            pytest.skip(message)
        warnings.warn(CannotTell(message), stacklevel=3)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn a gate's mistakes (a limit that is none, an attack that is not there) into failures without a traceback."""
    from fedaudit.errors import SettingError

    try:
        yield
    except SettingError as e:
        pytest.fail(str(e), pytrace=False)


def _apply(check: Check, marker: pytest.Mark) -> None:
    """Call a check with the arguments of a mark. Arguments that it does not take are the test's mistake."""
    try:
        inspect.signature(check).bind(*marker.args, **marker.kwargs)
    except TypeError as e:
        takes = MARKS[marker.name].partition(": ")[0]
        pytest.fail(f"The mark {marker.name}: {e}. Write {takes}.", pytrace=False)
    check(*marker.args, **marker.kwargs)


@pytest.fixture
def comm_budget(request: pytest.FixtureRequest) -> Check:
    """Return a function that fails the test if a record sends more: `comm_budget(record, uplink="12 MiB", ...)`."""

    def check(
        record: Any,
        *,
        uplink: str | None = None,
        downlink: str | None = None,
        baseline: str | None = None,
        max_growth: str | None = None,
        per: str = "client-round",
        convention: str = "payload",
    ) -> None:
        from fedaudit.gates.record_gates import communication
        from fedaudit.runtime.run_record import RunRecord, read_record

        given = record if isinstance(record, RunRecord) else read_record(record)
        with _plain_errors():
            found = communication(
                given,
                request.path.parent,
                uplink=uplink,
                downlink=downlink,
                baseline=baseline,
                max_growth=max_growth,
                per=per,
                convention=convention,
            )
        _judge(request, found)

    return check


@pytest.fixture
def privacy_budget(request: pytest.FixtureRequest) -> Check:
    """Return a function that fails the test if a ledger guarantees less: `privacy_budget(record, epsilon=8)`."""

    def check(record: Any, epsilon: float, delta: float | None = None) -> None:
        from fedaudit.gates.record_gates import finished, privacy

        with _plain_errors():
            found = privacy(finished(record), epsilon=epsilon, delta=delta)
        _judge(request, [found])

    return check


@pytest.fixture
def leak_budget(request: pytest.FixtureRequest) -> Check:
    """Return a function that fails the test if an attack reached more: `leak_budget(record, attack="loss", auc=0.6)`.

    The record has to hold the attack's result.
    """

    def check(
        record: Any,
        attack: str,
        auc: float | None = None,
        tpr: float | None = None,
        threat: str = "server",
        cannot_tell: str | None = None,
    ) -> None:
        from fedaudit.gates.record_gates import finished, leak

        with _plain_errors():
            found = leak(finished(record), attack=attack, auc=auc, tpr=tpr, threat=threat)
        _judge(request, found, cannot_tell)

    return check


@pytest.fixture
def accuracy_floor(request: pytest.FixtureRequest) -> Check:
    """Return a function that fails the test if a record's accuracy is lower: `accuracy_floor(record, 0.9)`."""

    def check(record: Any, floor: float) -> None:
        from fedaudit.gates.record_gates import accuracy, finished

        with _plain_errors():
            found = accuracy(finished(record), floor)
        _judge(request, [found])

    return check


@pytest.fixture
def metric_budget(request: pytest.FixtureRequest) -> Check:
    """Return a function that fails the test if a figure is off its limit: `metric_budget(record, "own", min=0.8)`."""

    def check(record: Any, metric: str, max: float | str | None = None, min: float | None = None) -> None:
        from fedaudit.gates.record_gates import finished, limited

        with _plain_errors():
            found = limited(finished(record), metric, max=max, min=min)
        _judge(request, [found])

    return check


@pytest.fixture
def claims_hold(request: pytest.FixtureRequest) -> Check:
    """Return a function that fails the test if a claim of a record was refuted: `claims_hold(record)`.

    The record has to hold the audits that tested its claims.
    """

    def check(record: Any, cannot_tell: str | None = None) -> None:
        from fedaudit.gates.record_gates import claims, finished

        with _plain_errors():
            found = claims(finished(record))
        _judge(request, [found], cannot_tell)

    return check


@pytest.fixture
def federated_run(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    comm_budget: Check,
    privacy_budget: Check,
    leak_budget: Check,
    accuracy_floor: Check,
    metric_budget: Check,
    claims_hold: Check,
) -> Callable[..., Any]:
    """Return a function that runs a setting in the test's folder and returns its record.

    Call it as `federated_run(method=..., rounds=...)`. It also applies the test's marks: it attacks the run for
    `leak_budget`, and tests the run's claims for `claims_hold`.
    """
    count = 0

    def call(**setting: Any) -> Any:
        nonlocal count
        from fedaudit import run
        from fedaudit.gates.record_gates import TRIALS, audit_claims, make_attack
        from fedaudit.runtime.run_record import read_record

        count += 1
        folder = tmp_path / f"federated-run-{count}"
        record = run(out=folder, **setting)

        def attack_and_check(
            attack: str,
            auc: float | None = None,
            tpr: float | None = None,
            threat: str = "server",
            set: dict[str, Any] | None = None,
            cannot_tell: str | None = None,
        ) -> None:
            with _plain_errors():
                make_attack(folder, attack=attack, threat=threat, set=set)
            leak_budget(folder, attack, auc, tpr, threat, cannot_tell)

        def test_and_check(trials: int = TRIALS, cannot_tell: str | None = None) -> None:
            with _plain_errors():
                audit_claims(folder, trials)
            claims_hold(folder, cannot_tell)

        gates: dict[str, Check] = {  # those that take no time first
            "comm_budget": partial(comm_budget, record),
            "accuracy_floor": partial(accuracy_floor, record),
            "metric_budget": partial(metric_budget, record),
            "privacy_budget": partial(privacy_budget, record),
            "leak_budget": attack_and_check,
            "claims_hold": test_and_check,
        }
        for name, check in gates.items():
            for marker in request.node.iter_markers(name):
                _apply(check, marker)
        return read_record(folder)

    return call


@pytest.fixture
def federated_benchmark(request: pytest.FixtureRequest, tmp_path: Path, comm_budget: Check) -> Callable[..., Any]:
    """Return a function that times rounds of a setting as samples of pytest-benchmark and returns what it found.

    Call it as `federated_benchmark(method=..., rounds=5)`. With `relative_to=BASELINE` (or a table of settings) rounds
    of that reference are timed in turns with the method's, and `max_ratio`, `max_bytes_ratio` and `max_flops_ratio`
    limit how many times as much a round may take.
    """
    if not request.config.pluginmanager.hasplugin("benchmark"):
        from fedaudit.extras import install

        pytest.fail(
            "federated_benchmark needs pytest-benchmark, which is not installed or is switched off: "
            f"{install('benchmark')}, or leave out -p no:benchmark.",
            pytrace=False,
        )
    samples = request.getfixturevalue("benchmark")
    count = 0

    def call(
        *,
        rounds: int | None = None,
        relative_to: Any = None,
        max_ratio: float | None = None,
        max_bytes_ratio: float | None = None,
        max_flops_ratio: float | None = None,
        flops: bool = True,
        cannot_tell: str | None = None,
        **setting: Any,
    ) -> Any:
        nonlocal count
        from fedaudit.gates.round_benchmark import Limits, benchmark_rounds, findings

        count += 1
        limits = Limits(max_ratio, max_bytes_ratio, max_flops_ratio)
        with _plain_errors():
            found = benchmark_rounds(
                samples,
                setting,
                tmp_path / f"federated-benchmark-{count}",
                rounds=rounds,
                relative_to=relative_to,
                limits=limits,
                flops=flops,
            )
        for marker in request.node.iter_markers("comm_budget"):
            _apply(partial(comm_budget, found.record), marker)
        _judge(request, findings(found, limits), cannot_tell)
        return found

    return call
