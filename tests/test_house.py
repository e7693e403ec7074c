"""The house: rooms import downwards only, and no two modules import each other in a circle."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "fedaudit"
ROOMS = [
    "ground",
    "wire",
    "data",
    "training",
    "privacy",
    "aggregation",
    "runtime",
    "attack",
    "epsilon",
    "metrics",
    "verify",
    "suite",
    "gates",
    "flower",
    "cli",
]  # from the ground upwards
DOORS = {"__init__", "__main__", "pytest_plugin"}  # where users come in: they may reach any room
OUTSIDE = {"methods", "attacks", "reports"}


def room_of(module: str) -> str:
    first = module.split(".")[0]
    return first if first in ROOMS else "ground"


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(HOUSE.rglob("*.py")):
        parts = path.relative_to(HOUSE).with_suffix("").parts
        if parts[0] not in OUTSIDE and parts != ("__init__",):
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def read(path: Path) -> tuple[list[ast.stmt], list[ast.AST], set[int]]:
    """A file's outermost statements that import, those anywhere within, and which of them are for type checkers only.
    The rest of its syntax tree is let go: a million nodes slow down every later test."""
    text = path.read_text()
    tree = ast.parse(text)
    whole = list(ast.walk(tree))
    for_types = {
        id(inner)
        for node in (whole if "TYPE_CHECKING" in text else ())
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = [node for node in whole if isinstance(node, ast.Import | ast.ImportFrom)]
    return [node for node in tree.body if node in found], found, for_types & {*map(id, found)}


def imports(path: Path, *, typing: bool, deferred: bool = True) -> set[str]:
    """The modules of the house that a file imports. `typing`: also what only type checkers import; `deferred`: also
    inside functions."""
    top, whole, for_types = read(path)
    names = modules()
    found = set()
    for node in whole if deferred else top:
        if id(node) in for_types and not typing:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedaudit":
            base = ".".join((node.module or "").split(".")[1:])
            for alias in node.names:
                inner = f"{base}.{alias.name}" if base else alias.name
                found.add(inner if inner in names else base)
        elif isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("fedaudit.") for alias in node.names if alias.name.startswith("fedaudit.")
            }
    return {name for name in found if name}


def test_rooms_import_downwards_only():
    upwards = []
    for name, path in modules().items():
        if name.split(".")[-1] in DOORS or name in DOORS:
            continue
        for other in imports(path, typing=True):
            if other.split(".")[0] in OUTSIDE:
                assert room_of(name) == "cli", f"{name} imports {other}: only the command line may name reports"
            elif ROOMS.index(room_of(other)) > ROOMS.index(room_of(name)):
                upwards.append(f"{name} ({room_of(name)}) imports {other} ({room_of(other)})")
    assert not upwards, "\n".join(upwards)


@pytest.mark.parametrize("deferred", [False, True])
def test_no_circle(deferred):
    """Not even through imports that wait inside a function; what only a type checker reads is no circle."""
    graph = {name: imports(path, typing=False, deferred=deferred) for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> None:
        assert name not in way, " -> ".join([*way[way.index(name) :], name])
        if name in done or name not in graph:
            return
        for other in sorted(graph[name]):
            if other != name:
                visit(other, [*way, name])
        done.add(name)

    for name in sorted(graph):
        visit(name, [])


def test_every_module_lives_in_a_room():
    ground = {
        "setting",
        "errors",
        "rng",
        "units",
        "extras",
        "stats",
        "stored_model",
        "significance",
        "progress",
        "registry",
        "shape",
        "cuda_streams",
        "_torchvision",
        *DOORS,
    }
    flat = {name for name in modules() if "." not in name and name not in ROOMS}
    assert flat <= ground, f"{sorted(flat - ground)} belong into a room: see docs/design/architecture.md"


def test_tests_mirror_the_rooms():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(ROOMS) - {"ground"} <= folders


# Files of a room that no single module fits, and why.
NOT_A_MODULE = {
    "attack/test_what_tells_nothing": "what no attack may go by, under each threat",
    "attacks/test_inversion_by_hand": "steps of several inversion attacks by other code",
    "attacks/test_membership_by_hand": "several membership attacks on made-up views",
    "attacks/test_releases": "attacks of several questions on the releases of one run",
    "attacks/test_stated_settings": "every attack's settings against a table",
    "epsilon/test_new_mechanisms": "each mechanism through both audits of a run",
    "metrics/test_figures": "every metric's figure by hand",
    "methods/test_beats_local": "what several rivals' papers claim",
    "methods/test_coverage": "every method has its tests",
    "methods/test_fingerprints": "every method, one kept run each",
    "methods/test_stated_settings": "every method's numbers against a table",
    "privacy/test_one_epsilon": "a derivation through ledger, accounting and mechanisms",
    "reports/test_conclusions": "a made-up audit with known conclusions, through all of the room",
    "runtime/test_own": "a user's own model and data through every room",
    "runtime/test_summands": "methods whose replies are added up in another form, through runs and audits",
    "suite/test_kill": "kills at random instants, minutes long",
    "suite/test_seeds_together": "a row through scheduler, worker and cell",
    "training/test_small_parts": "small functions of several modules by hand",
    "training/test_traces": "what `fit` looks at before and after a loss",
    "verify/test_forgeries": "a forged folder, whatever part of it",
    "verify/test_gates": "commands that read a folder that was changed",
    "verify/test_honest": "folders that nobody changed are not accused",
    "verify/test_run_again": "a folder's setting run again",
    "verify/test_transcripts": "the transcript of a folder by itself",
}
NO_ROOM = {"trust", "studies"}  # across rooms: what can be believed; pages of results


def module_names(room: str) -> set[str]:
    """The modules and packages of a room, without the underscore of those that are its own."""
    base = ROOT / room if room in OUTSIDE else HOUSE / room
    found = [path for path in base.rglob("*") if path.suffix == ".py" or path.is_dir()]
    return {path.stem.lstrip("_") for path in found}


def test_a_test_file_names_a_module_of_its_room():
    lost, needless = [], set(NOT_A_MODULE)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        room, *_ = path.relative_to(ROOT / "tests").parts
        if room in (*ROOMS, *OUTSIDE) and path.stem.removeprefix("test_") not in module_names(room):
            name = f"{room}/{path.stem}"
            needless.discard(name)
            if name not in NOT_A_MODULE:
                lost.append(name)
        elif (ROOT / "tests" / room).is_dir() and room not in (*ROOMS, *OUTSIDE, *NO_ROOM):
            lost.append(f"{room} is not a room")
    assert not lost, f"name them after the module that they test: {lost}"
    assert not needless, f"these have a module, or are gone: {needless}"


def test_a_mutant_list_names_its_source_file():
    """tests/mutants/fedaudit/privacy/ledger.toml is about fedaudit/privacy/ledger.py."""
    folder = ROOT / "tests" / "mutants"
    names = [path.relative_to(folder).with_suffix("") for path in folder.rglob("*.toml")]
    assert len(names) > 200
    lost = [str(name) for name in names if not ((ROOT / f"{name}.py").is_file() or (ROOT / name).is_file())]
    assert not lost, f"make mutants ARGS=--sort: {lost}"


def test_helpers_of_tests_are_in_named_folders():
    assert not list((ROOT / "tests" / "helpers").glob("*.py")), "put it into a folder: see CONTRIBUTING.md"


@cache
def sources() -> dict[str, str]:
    found = {str(path.relative_to(ROOT)): path.read_text() for path in modules().values()}
    for folder in OUTSIDE:
        found |= {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}
    return found


@pytest.mark.parametrize(
    ("pattern", "home"),
    [
        (r"^Watch\s*=|Callable\[\[(int|float), (int|float), str\], None\]", "fedaudit/progress.py"),
        (r"\bflock\(", "fedaudit/runtime/folder.py"),
        (r"\bextract_tb\(", "fedaudit/errors.py"),
        (r"ser_json_inf_nan|\"-Infinity\"", "fedaudit/stored_model.py"),
        (r"(?<!\w)Plan\(", "fedaudit/runtime/plan.py"),
        (r"cat\(\[\w+\(part\) for part in", "fedaudit/training/forward.py"),
        (r"^class Release\b", "fedaudit/wire/release.py"),
        (r"\bcuda\.Stream\(", "fedaudit/cuda_streams.py"),
        (r"^class EpsilonAudit\b", "fedaudit/runtime/run_record.py"),
        (r"^class Metric\b", "fedaudit/metrics/metric.py"),
        (r"\.epsilon for \w+ in [\w.]+ if \w+\.entries", "fedaudit/metrics/guarantee.py"),
        (r"\bpeak_gpu_bytes or \w+\.peak_rss_bytes", "fedaudit/metrics/cost.py"),
    ],
)
def test_one_copy_of_each(pattern, home):
    found = {name for name, text in sources().items() if re.search(pattern, text, re.MULTILINE)}
    assert found == {home}


def test_the_codecs_grammar_is_in_one_file():
    for name, text in sources().items():
        if not name.startswith("fedaudit/wire/codec/"):
            assert not re.search(r"wire\.codec import[^\n]*\b_\w|\bcodec\._\w", text), f"{name} reaches into the codec"


OPEN = {"AttackResult.settings", "Declarations.settings"}  # an attack's own fields; of the runs that tested


def test_a_record_is_typed():
    """No part of a record is a table of anything; the setting is validated by itself."""
    from fedaudit.runtime.run_record import RunRecord
    from fedaudit.setting import Setting

    seen, loose = set(), set()

    def visit(kind):
        for inner in get_args(kind):
            visit(inner)
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not Setting and kind not in seen:
            seen.add(kind)
            for base in kind.__mro__:
                for name, said in getattr(base, "__annotations__", {}).items():
                    if name in kind.model_fields and re.search(r"\bAny\b", str(said)) and "ClassVar" not in str(said):
                        loose.add(f"{base.__name__}.{name}")
            for field in kind.model_fields.values():
                visit(field.annotation)

    visit(RunRecord)
    assert loose == OPEN
    assert len(seen) > 30, "it reaches the parts of parts"


# --- mechanisms are asked, not told apart ---

COMPARING = ("startswith", "endswith", "get", "index", "partition", "split")  # methods that tell names apart


def names_compared(source: str, names: set[str]) -> list[int]:
    """Return the lines that tell a mechanism by its name: they compare with it, match it, or look it up in a table."""
    found = []

    def is_name(node: ast.AST) -> bool:
        texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return any(text in names for text in texts)

    def is_of_a_mechanism(node: ast.AST) -> bool:
        inner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else node
        return isinstance(inner, ast.Attribute) and inner.attr == "mechanism"

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=others):
                told = any(is_name(side) or is_of_a_mechanism(side) for side in (left, *others))
            case ast.MatchValue(value=value):
                told = is_name(value)
            case ast.Match(subject=subject):
                told = is_of_a_mechanism(subject)
            case ast.Subscript(slice=key):
                told = is_of_a_mechanism(key)
            case ast.Call(func=ast.Attribute(value=of, attr=attr), args=given) if attr in COMPARING:
                told = is_of_a_mechanism(of) or any(is_of_a_mechanism(arg) for arg in given)
            case _:
                told = False
        if told:
            found.append(node.lineno if hasattr(node, "lineno") else 0)
    return found


def test_no_mechanism_is_told_by_its_name():
    """All that depends on a mechanism is in its file. "none" is left out of the names: other things are called so."""
    from fedaudit.privacy.mechanisms.base import mechanisms

    names = {*mechanisms()} - {"none"} | {"DP-SGD"}
    home = "fedaudit/privacy/mechanisms/"
    told = [
        f"{path}:{line}"
        for path, text in sources().items()
        if not path.startswith(home) and any(name in text for name in ("mechanism", *names))
        for line in names_compared(text, names)
    ]
    assert not told, f"ask the mechanism (fedaudit.privacy.mechanisms.base) instead: {', '.join(told)}"


@pytest.mark.parametrize(
    "line",
    [
        'if policy.mechanism == "gaussian": pass',
        'if "gaussian" != name: pass',
        'if name in ("dp-sgd", "none"): pass',
        'if "DP-SGD" in worst.mechanism: pass',
        "if a.mechanism != b.name: pass",
        'words = {"pure-noise": 1}[worst.mechanism]',
        "words = known.get(worst.mechanism)",
        'if policy.mechanism.startswith("gauss"): pass',
        'match name:\n    case "gaussian": pass',
        "match policy.mechanism:\n    case x: pass",
    ],
)
def test_a_test_on_a_mechanisms_name_is_found(line):
    assert names_compared(line, {"gaussian", "dp-sgd", "pure-noise", "DP-SGD"})


def test_naming_a_mechanism_is_no_test():
    assert not names_compared('entry = Entry(mechanism="gaussian")\nhow = mechanism_of(policy).words(x)', {"gaussian"})


# Classes of values that are filled in step by step, by file. All other dataclasses are frozen: what crosses a room's
# door is not changed behind it.
FILLED_IN = {
    "attacks/membership/embedding_match.py": {"Uploaded"},
    "fedaudit/attack/reconstruction.py": {"_Client"},
    "fedaudit/epsilon/client_replay.py": {"Repeated"},
    "fedaudit/epsilon/gradient_canaries.py": {"Canaries", "Scores"},
    "fedaudit/flower/recorder.py": {"Ask", "Sending"},
    "fedaudit/gates/in_turns.py": {"Pairs", "Turns"},
    "fedaudit/privacy/dpsgd.py": {"Progress"},
    "fedaudit/privacy/sensitivity.py": {"Context"},
    "fedaudit/runtime/asking.py": {"RoundSoFar"},
    "fedaudit/runtime/declarations/cross_client_check.py": {"CrossClientCheck"},
    "fedaudit/runtime/declarations/twins.py": {"Twins"},
    "fedaudit/runtime/engines/ray.py": {"_Called", "_Job"},
    "fedaudit/runtime/lockstep.py": {"Turn"},
    "fedaudit/runtime/meter.py": {"Away", "Span"},
    "fedaudit/runtime/sums.py": {"Summing"},
    "fedaudit/runtime/utility.py": {"Known"},
    "fedaudit/training/stacked/kept_steps.py": {"KeptSteps"},
    "fedaudit/suite/cell.py": {"Cell"},
    "fedaudit/suite/reproduce.py": {"Planned"},
    "fedaudit/suite/time_left.py": {"_Running"},
    "fedaudit/verify/case.py": {"Case"},
    "fedaudit/verify/ledger.py": {"_Client"},
    "fedaudit/verify/rerun.py": {"_Outcome"},
    "fedaudit/verify/server_rounds.py": {"_Replay"},
    "fedaudit/verify/sum_rows.py": {"SumRows"},
    "fedaudit/wire/contents.py": {"Contents"},
}
# Classes that hold tensors: two of them are equal only if they are one, because `==` of tensors is no truth value.
NEVER_EQUAL = {
    "attacks/inversion/_invert.py": {"Inverting"},
    "attacks/inversion/_matching.py": {"Matching"},
    "attacks/shared/_means.py": {"Means", "ShadowMeans"},
    "attacks/shared/_models.py": {"Shadows"},
    "fedaudit/data/federation.py": {"Federation", "Shard"},
    "fedaudit/data/readers/arrays.py": {"Arrays"},
    "fedaudit/data/records.py": {"Dataset"},
    "fedaudit/flower/recorder.py": {"Ask", "Sending"},
    "fedaudit/flower/records.py": {"_Given"},
    "fedaudit/privacy/dpsgd_stack.py": {"PrivateJob"},
    "fedaudit/training/descent.py": {"Descent"},
    "fedaudit/training/stacked/kept_steps.py": {"KeptSteps"},
    "fedaudit/training/stacked/stack.py": {"Job"},
    "methods/condensation/_folded.py": {"_Stage"},
}


def dataclasses_of(source: str) -> dict[str, dict[str, bool]]:
    """Return the dataclasses of a file, with what their decorators say."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        for mark in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            called = mark.func if isinstance(mark, ast.Call) else mark
            if ast.unparse(called).split(".")[-1] == "dataclass":
                words = mark.keywords if isinstance(mark, ast.Call) else []
                found[node.name] = {str(word.arg): ast.literal_eval(word.value) for word in words}
    return found


def test_which_classes_may_change():
    changing, unequal = {}, {}
    for room in ("fedaudit", *sorted(OUTSIDE)):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(tuple(f"fedaudit/{other}/" for other in OUTSIDE)):
                continue  # a link: the file is read in its own place
            text = path.read_text()
            said = dataclasses_of(text) if "dataclass" in text else {}
            if may := {one for one, words in said.items() if not words.get("frozen", False)}:
                changing[name] = may
            if never := {one for one, words in said.items() if not words.get("eq", True)}:
                unequal[name] = never
    assert changing == FILLED_IN
    assert unequal == NEVER_EQUAL


def conftest() -> Any:
    spec = importlib.util.spec_from_file_location("a_conftest", ROOT / "tests" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_families_of_which_a_quick_run_takes_some_are_there() -> None:
    """A family that has another name now would be run whole, and nobody would know why the suite takes longer."""
    for file, families in conftest().SOME_OF.items():
        text = (ROOT / "tests" / file).read_text()
        for name in families:
            before = text.partition(f"def {name}(")
            assert before[1], f"tests/{file} has no {name}"
            assert "@pytest.mark.parametrize" in before[0][-1500:], f"tests/{file}::{name} has no cases"


def test_of_a_family_every_so_many_th_case_stays_quick() -> None:
    """Of seven cases, one of them slow, the first, third and fifth that are not; other tests stay as they are."""
    of = conftest()

    class Item:
        def __init__(self, file: str, name: str | None, *marks: str):
            self.path, self.marks = of.HERE / file, list(marks)
            if name is not None:
                self.originalname = name

        def get_closest_marker(self, name: str) -> bool:
            return name in self.marks

        def add_marker(self, mark: Any) -> None:
            self.marks.append(mark.name)

    family = "verify/test_forgeries.py", "test_a_forgery_is_named"
    marks = ["", "", "slow", "", "", "", ""]
    cases = [Item(*family, *filter(None, [mark])) for mark in marks]
    others = [Item(family[0], "test_another"), Item("verify/test_gates.py", family[1]), Item(family[0], None)]
    of.pytest_collection_modifyitems([*others, *cases])
    assert [item.marks for item in cases] == [[], ["long"], ["slow"], [], ["long"], [], ["long"]]
    assert [item.marks for item in others] == [[], [], []]
