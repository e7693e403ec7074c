"""The contract suite: what every method keeps, on every engine. A new method is covered by being registered."""

from __future__ import annotations

import dataclasses
import os
import sys

import pytest
import torch
from engines import Killed, KillEngine
from safetensors.torch import load_file

from fedaudit import Up, registry
from fedaudit.errors import ContractError, RunError
from fedaudit.runtime.declarations.contract import check_declarations
from fedaudit.runtime.engines.serial import SerialEngine
from fedaudit.runtime.runner import run
from fedaudit.wire.transcript import Transcript

CORE = {"fedavg", "dffke", "fedaf", "fedzge", "dfrd", "fedfree", "outside:Exchange"}  # each way of exchanging once
QUICK = {"fedavg", "dfrd", "fedfree", "outside:Exchange"}  # of those, in the quick suite
BILLED = {
    *QUICK,
    "fedaf",
    "fedmd",
    "fednova",
    "heterofl",
    "scaffold",
    "fke",
    "fedavg+dense",
}  # every run compares its bytes

ON_RAY = {"fedavg", "outside:Exchange"}  # in the quick suite


def named(quick, long):
    """Every registered method: those that run with the quick tests, with the long ones, and the rest with the slow."""
    names = [*registry.names("methods"), "outside:Exchange"]
    marks = {name: pytest.mark.long if name in long else pytest.mark.slow for name in names if name not in quick}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


core = pytest.mark.parametrize("method", named(QUICK, CORE), indirect=True)


def narrow(method):
    """A network for it: the method from outside says how wide its embeddings are."""
    return "cnn" if method.startswith("outside:") else "cnn@0.25"


def models(folder):
    return {path.name: load_file(path) for path in sorted((folder / "models").iterdir())}


def same_models(a, b):
    a, b = models(a), models(b)
    return a.keys() == b.keys() and all(torch.equal(a[f][n], b[f][n]) for f in a for n in a[f])


def facts(record):
    """Everything that a repeated run must repeat: all but clocks."""
    rounds = [row.model_dump(exclude={"wall_s"}) for row in record.rounds]
    return rounds, record.result, record.traffic, record.transcript_digest, record.releases, record.ledger


def rows(folder):
    """The transcript without its clock."""
    return [{k: v for k, v in row.items() if k != "at"} for row in Transcript(folder / "transcript").rows()]


@pytest.fixture(params=named(BILLED, {name for name in registry.names("methods") if "+" not in name}))
def method(request):
    return request.param


_whole = {}


@pytest.fixture
def small(tiny):
    """The quick setting with a narrow network; what each client would deploy is evaluated for one method, which takes
    as long as the rest."""
    return lambda method, **values: tiny(method, model=narrow(method), eval_clients=method == "fedavg", **values)


_tried = {}


@pytest.fixture
def tried(tiny):
    """What a method declares, held against what it does: tried once."""

    def of(method):
        if method not in _tried:
            _tried[method] = check_declarations(
                tiny(method, clients=2, model=narrow(method), eval_every=2, eval_clients=False)
            )
        return _tried[method]

    return of


@pytest.fixture
def whole(method, small, tmp_path_factory):
    """An undisturbed run of three rounds, made once per method: (record, folder)."""
    if method not in _whole:
        folder = tmp_path_factory.mktemp("whole") / "run"
        _whole[method] = run(small(method, rounds=3), out=folder), folder
    return _whole[method]


@pytest.fixture
def some(method, small, tmp_path):
    """An undisturbed run: the one that is there, or one round of two clients."""
    return _whole.get(method) or (run(small(method, rounds=1, clients=2), out=tmp_path / "some"), tmp_path / "some")


def same(whole, record, folder):
    return facts(whole[0]) == facts(record) and rows(whole[1]) == rows(folder) and same_models(whole[1], folder)


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[] if m in ON_RAY else pytest.mark.slow) for m in sorted(CORE)], indirect=True
)
def test_same_seed_same_bits(method, whole, small, tmp_path):
    """For most slow, because it says no more than the two below: a run on ray, and a resumed one, repeat the bits."""
    assert same(whole, run(small(method, rounds=3), out=tmp_path / "a"), tmp_path / "a")


@core
def test_another_seed_is_another_run(method, whole, small, tmp_path):
    other = run(small(method, rounds=1, seed=1), out=tmp_path / "a")
    assert facts(whole[0])[0][0] != facts(other)[0][0]


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=pytest.mark.long if m in ON_RAY else pytest.mark.slow) for m in sorted(CORE)],
    indirect=True,
)  # long: they alone would start Ray, for more than ten seconds
@pytest.mark.skipif(bool(os.environ.get("FEDAUDIT_TEST_KERNELS")), reason="Ray's workers have the usual kernels")
def test_serial_equals_ray(method, whole, small, tmp_path, ray_engine):
    assert same(whole, run(small(method, rounds=3), out=tmp_path / "a", engine=ray_engine), tmp_path / "a")


@core
@pytest.mark.parametrize("after", [4, pytest.param(0, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)])
def test_resumed_equals_uninterrupted(method, whole, small, tmp_path, after):
    with pytest.raises(Killed):
        run(small(method, rounds=3), out=tmp_path / "a", engine=KillEngine(after))
    assert same(whole, run(small(method, rounds=3), out=tmp_path / "a", resume=True), tmp_path / "a")


@core  # every method has a drop-out in its fingerprint
def test_partial_participation_and_drop_outs(method, small, tmp_path):
    record = run(small(method, rounds=4, clients=5, participation=0.8, dropout=0.15, quorum=0.25), out=tmp_path / "a")
    assert all(len(row.participants) == 4 for row in record.rounds)
    assert len({tuple(row.participants) for row in record.rounds}) > 1
    absent = [absence for row in record.rounds for absence in row.absent]
    assert absent, "the seed was chosen so that somebody drops out"
    assert all(absence.reason == "dropped out" for absence in absent)
    events = [e for e in Transcript(tmp_path / "a" / "transcript").events() if e["event"] == "absent"]
    assert [(e["client"], e["ask"]) for e in events] == [(a.client, a.ask) for a in absent]


def test_traffic_is_declared_and_right(some):
    """The run itself compares each round's declared and measured bytes and fails on any difference."""
    record, folder = some
    assert record.traffic_declared
    assert sum(row.up_wire for row in record.rounds) == record.bytes("up", "wire")
    assert record.bytes("up", "wire") + record.bytes("down", "wire") == sum(
        entry.bytes for entry in Transcript(folder / "transcript").entries()
    )


@core  # the others with long and slow tests, and by `fedaudit check-method`, whose verdicts are kept with their source
def test_declarations_hold(method, tried):
    """Privacy rule 8: other records after training change nothing that was declared public or via="model". Every such
    field must have been compared."""
    engine = tried(method)
    module = sys.modules[registry.find(method).__module__]
    for cls in vars(module).values():
        if isinstance(cls, type) and issubclass(cls, Up) and cls.__module__ == module.__name__:
            for name, declared in cls.declared().items():
                seen = f"{cls.__name__}.{name}"
                if seen in engine.compared | engine.changed and (declared.role == "public" or declared.via != "data"):
                    assert seen in engine.compared


# --- the checks themselves can fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("liar", ["Liar", "LateLiar"])
def test_a_false_declaration_is_found(liar, tried):
    with pytest.raises(ContractError, match=r'Weights\.w is declared via="model", but it changes'):
        tried(f"outside:{liar}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("FalsePublic", r"Trained\.loss is declared public\(\), but it changes with the records"),
        ("Hoarder", r'Weights\.w is declared via="model", but it changes'),
    ],
)
def test_what_hides_in_training_or_in_memory_is_found(name, words, tried):
    with pytest.raises(ContractError, match=words):
        tried(f"outside:{name}")


def test_the_public_set_is_nobody_elses(tiny, tmp_path):
    """Each client writes into its copy of the public set; the next one must find it clean."""
    record = run(tiny("outside:Scribbler", rounds=1), out=tmp_path / "a")
    sums = [entry["s"] for entry in Transcript(tmp_path / "a" / "transcript").entries() if entry.direction == "up"]
    assert len(set(sums)) == 1
    assert record.status == "done"


def test_what_reads_the_records_is_seen_to_change(tried):
    engine = tried("outside:Exchange")
    assert engine.changed == {"Shared.e", "Shared.y"}
    assert engine.compared == {"Shared.w", "Shared.t", "Answer.z"}


def test_a_false_traffic_declaration_is_found(tiny, tmp_path):
    with pytest.raises(RunError, match=r"Weights\.w +declared +17 B +measured +1[0-9]{2},[0-9]{3} B"):
        run(tiny("outside:Spendthrift"), out=tmp_path / "a")


def test_closures_are_refused(tiny, tmp_path):
    with pytest.raises(ContractError, match="a download that nobody bills"):
        run(tiny("outside:Smuggler"), out=tmp_path / "a")


def test_nobody_shares_memory(tiny, tmp_path):
    """Each client overwrites the message it received and its own model; all of them must have received the original."""
    run(tiny("outside:Vandal", rounds=2), out=tmp_path / "a")
    entries = list(Transcript(tmp_path / "a" / "transcript").entries())
    first = next(e for e in entries if e.direction == "down")["w"]
    for entry in entries:
        if entry.direction == "up" and entry.round == 1:
            assert all(torch.equal(entry["w"][name], first[name]) for name in first)


def test_a_failing_client_is_left_out_and_its_state_unchanged(tiny, tmp_path):
    record = run(tiny("outside:Fragile", rounds=2), out=tmp_path / "a")
    assert [[a.client for a in row.absent] for row in record.rounds] == [[1], [1]]
    assert record.rounds[0].absent[0].reason.startswith("RuntimeError (update, outside.py:")
    assert "a wrong shape" not in record.model_dump_json()  # what an error says may be made of the records
    assert "a wrong shape" in (tmp_path / "a" / "errors.log").read_text()
    assert not list((tmp_path / "a" / "checkpoint").glob("client-000001*"))


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("Broken", RunError, r"0 clients are left, the quorum is 2.*ZeroDivisionError"),
        ("Diverged", RunError, r"WireError \(_checked, grammar\.py"),
        ("NoState", ContractError, "round returned a NoneType"),
    ],
)
def test_what_breaks_says_why(name, error, words, tiny, tmp_path):
    with pytest.raises(error, match=words):
        run(tiny(f"outside:{name}"), out=tmp_path / "a")


def test_tasks_hold_names_and_bytes_only(tiny, tmp_path):
    seen = []

    class Spy(SerialEngine):
        def map(self, tasks):
            tasks = list(tasks)
            seen.extend(tasks)
            return super().map(tasks)

    run(tiny("fedavg", rounds=1), out=tmp_path / "a", engine=Spy())
    for task in seen:
        assert {type(v) for v in dataclasses.asdict(task).values()} <= {str, int, bool, bytes, type(None)}
