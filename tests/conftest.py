from __future__ import annotations

import gc
import os
import platform
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

HERE = Path(__file__).parent
HELPERS = HERE / "helpers"
# The folders of helpers are on the path: `outside:Class` is found as a user's own module would be.
sys.path[:0] = [*map(str, sorted(path for path in HELPERS.iterdir() if path.is_dir())), str(HELPERS)]

settings.register_profile("fedaudit", deadline=None)  # a busy machine is no failure
settings.load_profile("fedaudit")

KERNELS = os.environ.get("FEDAUDIT_TEST_KERNELS", "")  # none: this machine's own; see `other_kernels`


def pytest_configure(config):
    # The package has a plugin of pytest's, for which pytest would compile all of it in its own way. The processes that
    # tests start cannot use that: each would compile the package again.
    config.pluginmanager.rewrite_hook._must_rewrite.discard("fedaudit")
    config.pluginmanager.rewrite_hook._marked_for_rewrite_cache.clear()
    if KERNELS:
        from other_kernels import installed

        installed(KERNELS)


# Families of cases that are alike: of these a quick run takes every second one, or every fourth. The others are `long`.
SOME_OF = {
    "attack/test_what_tells_nothing.py": {
        "test_neither_place_nor_file_tells_a_member": 2,
        "test_what_is_the_same_for_a_whole_client_tells_no_member": 2,
    },
    "attacks/test_releases.py": {"test_what_is_learned_of_groups_is_at_chance_if_membership_is": 4},
    "epsilon/test_lower_bounds.py": {
        "test_the_number_of_guesses_by_trying_all_shares": 2,
        "test_verdict_bound_and_p_value_agree": 2,
    },
    "epsilon/test_release_path.py": {"test_too_little_noise_is_found_out": 2},
    "epsilon/test_residuals.py": {"test_noise_bill_and_figures_by_hand_on_every_engine": 2},
    "flower/test_app.py": {"test_a_recipe_runs_as_it_stands_and_its_row_is_true": 2},
    "flower/test_in_process_runtime.py": {"test_strategies_run_unchanged": 2},
    "flower/test_server.py": {"test_every_shape_of_an_app_is_recorded_whole": 2},
    "methods/test_fedavg.py": {
        "test_local_steps_stand_in_the_place_of_epochs": 2,
        "test_local_training_moves_and_mirrors_images_if_it_is_asked_to": 2,
    },
    "methods/test_optimiser.py": {"test_every_method_trains_with_it": 2},
    "methods/test_submodel.py": {"test_a_sub_model_is_the_full_one_with_its_other_units_switched_off": 2},
    "metrics/test_metric.py": {
        "test_epsilon_is_infinite_where_plain_models_are_published": 2,
        "test_a_new_metric_is_read_everywhere": 2,
    },
    "privacy/mechanisms/test_discrete.py": {"test_noise_x_09_is_found_and_honest_noise_is_not": 2},
    "runtime/test_planned_traffic.py": {"test_fedzge_tables_2_and_3": 4},
    "runtime/test_summands.py": {"test_a_secure_run_is_the_plain_one_within_rounding": 2},
    "training/test_cuda_graphs.py": {
        "test_a_recorded_fit_is_the_eager_one_to_the_bit": 2,
        "test_a_recorded_stack_is_what_each_would_be_alone": 2,
    },
    "training/test_kept_steps.py": {
        "test_a_second_training_records_nothing_and_has_the_bits_of_one_that_records": 2,
        "test_another_form_is_recorded_anew": 2,
    },
    "training/test_side_by_side.py": {"test_each_ends_as_it_would_alone": 2},
    "training/test_stack.py": {"test_each_ends_as_it_would_alone": 2},
    "trust/test_billing.py": {"test_what_leaves_unpaid_costs_infinity": 4},
    "trust/test_roads.py": {
        "test_honest_code_that_also_sends_protected_counts_stays_finite": 2,
        "test_what_a_function_inside_fit_puts_somewhere_is_billed": 2,
    },
    "verify/test_forgeries.py": {"test_a_forgery_is_named": 2},
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave some cases of large families to `make test-all`. Cases that are `slow` or `long` anyway do not count."""
    seen = Counter()
    for item in items:
        name, file = getattr(item, "originalname", None), item.path
        family = SOME_OF.get(file.relative_to(HERE).as_posix(), {}) if file.is_relative_to(HERE) else {}
        if name not in family or item.get_closest_marker("slow") or item.get_closest_marker("long"):
            continue
        if seen[file, name] % family[name]:
            item.add_marker(pytest.mark.long)
        seen[file, name] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Where files are shared out to several processes: see `sharing_out`."""
    if config.getvalue("dist") != "loadfile":
        return None
    from sharing_out import SharedOut

    return SharedOut(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Nothing that is read now is garbage. Assertions are trees of many small objects, and the search goes over them
    again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    """What was imported so far stays: the search for garbage, which goes over all that lives, need not see it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # a run makes many objects, and little garbage with circles in it


@pytest.fixture(autouse=True)
def _computing():
    """As a run on digits does: what a test computes by hand must come out to the bit."""
    torch.set_num_threads(1)
    if platform.machine() in ("aarch64", "arm64") or KERNELS == "no-onednn":
        torch.backends.mkldnn.set_flags(False)


@pytest.fixture(scope="session", autouse=True)
def _no_power_cut():
    """Runs wait for the disk a dozen times each, against a loss of power, which no test brings about. Kills are felt
    without: what was written is the kernel's by then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


SECRET = bytes(range(32))


@pytest.fixture(scope="session", autouse=True)
def _one_secret():
    """All runs of a session have one secret, so that two runs of one setting have the same noise."""
    from fedaudit.runtime import run_opening

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_opening, "fresh_secret", lambda: SECRET)
        yield


@pytest.fixture(scope="session", autouse=True)
def _twins_where_asked_for():
    """A run has twins where its setting says how many. By default every protected run starts a process for them, a
    second each; tests of that ask for `default_twins`. Yields what says so outside of tests."""
    from fedaudit.runtime import nursery

    real = nursery.has_twins
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nursery, "has_twins", lambda privacy, twins: twins != "auto" and real(privacy, twins))
        yield real


@pytest.fixture(scope="module")
def default_twins(_twins_where_asked_for):
    """Protected runs of this module have as many twins as they have outside of tests."""
    from fedaudit.runtime import nursery

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nursery, "has_twins", _twins_where_asked_for)
        yield


@pytest.fixture(scope="session", autouse=True)
def _few_trees():
    """The blind baselines' forest comes along with every attack on a run, a seventh of a second each. Tests of what
    it finds grow it whole: `whole_forest`."""
    from suite_tools import few_trees

    with pytest.MonkeyPatch.context() as patch:
        few_trees(patch.setattr)
        yield


@pytest.fixture
def whole_forest(monkeypatch):
    from fedaudit.attack import score

    monkeypatch.setattr(score, "TREES", 100)
    monkeypatch.setattr(score, "_known", {})


@pytest.fixture
def undrawn(monkeypatch):
    """Figures without content: most of the time of a report, in tests of something else."""
    from matplotlib.figure import Figure

    def savefig(figure, target, **how):
        empty = "<svg ></svg>"
        target.write(empty) if hasattr(target, "write") else Path(target).write_text(empty)

    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture
def tiny():
    """A setting that runs in about a second. What each client would deploy is evaluated where a test asks for it."""
    from fedaudit.setting import Setting

    def make(method="fedavg", **values):
        from fedaudit.registry import find

        quick = dict(find(method).quick)
        defaults = {"rounds": 2, "clients": 3, "public": 0.1, "set": quick, "aux": 0.6, "eval_clients": False}
        return Setting.make(**{"method": method, **defaults, **values})

    return make


@pytest.fixture
def fedaudit(capsys):
    """Run a command in this process; returns (exit code, stdout, stderr)."""

    from fedaudit.cli.main import main as cli

    def call(*words):
        before = sys.argv
        sys.argv = ["fedaudit", *map(str, words)]
        try:
            cli()
            code = 0
        except SystemExit as e:
            code = e.code or 0
        finally:
            sys.argv = before
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture(scope="session")
def ray_engine():
    """One pool of two workers for the whole session: starting them costs more than the tests. Without the processes of
    Ray that watch over a cluster."""
    pytest.importorskip("ray", reason="the engine ray needs Ray")
    from ray._private.node import Node

    from fedaudit.runtime.engines.ray import RayEngine
    from fedaudit.setting import Setting

    with pytest.MonkeyPatch.context() as patch:
        for name in ("start_monitor", "start_log_monitor", "start_api_server"):
            patch.setattr(Node, name, lambda node, **how: None, raising=False)
        engine = RayEngine(Setting.make(engine="ray", workers=2))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def nursery_at():
    """A process that has imported everything and forks a worker whenever it is asked to: one for the whole session."""
    from suite_tools import started

    with started() as path:
        yield path


@pytest.fixture
def quick(nursery_at, monkeypatch):
    """An audit's workers are forks of the nursery instead of processes that import everything again."""
    from suite_tools import from_nursery

    from fedaudit.suite import scheduler

    monkeypatch.setattr(scheduler._Worker, "start", from_nursery(nursery_at))


@pytest.fixture(scope="session")
def _chromium(tmp_path_factory):
    """One browser for the whole session: starting it costs more than the tests."""
    from browser import started

    with started(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(scope="module")
def chromium(_chromium):
    """The session's browser, as if it had just been started."""
    from browser import as_new

    as_new(_chromium)
    yield _chromium
    as_new(_chromium)


@pytest.fixture(scope="session")
def uneven(tmp_path_factory):
    """The folder of an audit whose runs differ in everything: see helpers/runs/unequal. It is read, never written."""
    import unequal

    return unequal.write(tmp_path_factory.mktemp("uneven"))


@pytest.fixture(scope="session")
def dffke_run(tmp_path_factory):
    """Three clients with encoders of width 64, 64 and 128, three rounds, a buffer of one round."""
    from fedaudit import run
    from fedaudit.methods.datafree.dffke import DFFKE

    out = tmp_path_factory.mktemp("dffke") / "run"
    run(method="dffke", rounds=3, clients=3, model="digits-3", set={**DFFKE.quick, "R": 1}, aux=0.6, out=out)
    return out


@pytest.fixture
def augments(monkeypatch):
    """The augmentation that each fit of a client asks for, in their order."""
    from fedaudit import Client

    asked, plain = [], Client.fit

    def noted(self, *given, **options):
        asked.append(options["augment"])
        return plain(self, *given, **options)

    monkeypatch.setattr(Client, "fit", noted)
    return asked
