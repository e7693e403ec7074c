"""How `make test` shares its files out to two processes: the long ones first, so that both end at the same time, and
those that want the same expensive thing (a pool of Ray's, a nursery of workers, a run of an app, a browser, the process
for twins, runs that are only read) to one process."""

from __future__ import annotations

from typing import Any

from xdist.scheduler.loadfile import LoadFileScheduling

TOGETHER = {
    "ray": (
        "tests/test_contract.py", "tests/suite/test_scheduler.py", "tests/wire/test_compression.py",
        "tests/runtime/test_losses.py", "tests/epsilon/test_client_replay.py",
    ),
    "nursery": (
        "tests/cli/test_main.py", "tests/suite/test_kill.py", "tests/suite/test_reproduce.py",
        "tests/runtime/test_starting_clients.py", "tests/trust/test_stale.py", "tests/trust/test_isolate.py",
        "tests/test_readme.py", "tests/test_packaging.py",
    ),
    "flower": ("tests/flower/",),
    "browser": ("tests/reports/test_html.py", "tests/reports/test_figures.py", "tests/reports/test_brief.py"),
    "twins": (
        "tests/trust/test_twins.py", "tests/trust/test_billing.py", "tests/trust/test_roads.py",
        "tests/trust/test_no_alarm.py", "tests/trust/test_check_method.py",
    ),
    "honest": (
        "tests/verify/test_forgeries.py", "tests/verify/test_gates.py", "tests/verify/test_honest.py",
        "tests/verify/test_ledger.py", "tests/verify/test_transcripts.py", "tests/verify/test_code.py",
    ),
    "dffke": (
        "tests/methods/test_dffke.py", "tests/studies/test_dffke_page.py", "tests/studies/test_dffke_scripts.py",
    ),
}  # fmt: skip
JOINED = {"nursery": "ray", "honest": "twins"}  # the scheduler's tests want both; one of the honest runs has a twin
SECONDS = {
    "ray": 130, "twins": 95, "flower": 25, "browser": 25, "tests/methods/test_fedavg.py": 15,
    "tests/runtime/test_stacked.py": 15, "tests/epsilon/test_noise_tests.py": 14, "tests/methods/test_datafree.py": 13,
    "tests/attacks/test_models.py": 13, "tests/epsilon/test_release_path.py": 12, "dffke": 12,
    "tests/methods/test_fedaf.py": 11, "tests/attacks/test_releases.py": 11, "tests/test_mutants.py": 11,
    "tests/methods/by_hand/test_dffke.py": 10, "tests/reports/test_report.py": 10, "tests/training/test_models.py": 10,
    "tests/methods/test_fedzge.py": 9, "tests/training/test_cuda_graphs.py": 9, "tests/reports/test_export.py": 9,
    "tests/runtime/test_seeds_together.py": 9, "tests/runtime/test_summands.py": 9, "tests/attacks/test_means.py": 9,
    "tests/cli/test_epsilon.py": 9, "tests/suite/test_budgets.py": 8, "tests/runtime/test_runner.py": 8,
    "tests/runtime/test_sums.py": 8, "tests/test_own_budgets.py": 8, "tests/methods/by_hand/test_dfrd.py": 7,
    "tests/methods/test_fingerprints.py": 7, "tests/suite/test_beside.py": 7, "tests/runtime/test_utility.py": 7,
    "tests/runtime/test_own.py": 7, "tests/attacks/test_relayed_means.py": 7,
    "tests/methods/by_hand/test_fedaf.py": 6, "tests/attacks/test_participation.py": 6,
    "tests/studies/test_epsilon_page.py": 5, "tests/studies/test_fashion_page.py": 4,
    "tests/studies/test_methods_page.py": 4, "tests/studies/test_authors_page.py": 3,
}  # fmt: skip
# about, on one core; of others what follows from how many tests they have
EACH = 0.1


def unit_of(file: str) -> str:
    """Which files go to one process: named by the thing that they share, or a file by itself."""
    found = next((thing for thing, files in TOGETHER.items() if file.startswith(files)), file)
    return JOINED.get(found, found)


class SharedOut(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: Any) -> None:
        longest = max(self.workqueue, key=lambda unit: SECONDS.get(unit, EACH * len(self.workqueue[unit])))
        self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)
