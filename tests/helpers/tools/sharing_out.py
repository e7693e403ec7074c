"""How `make test` shares its files out to two processes: the long ones first, so that both end at the same time, and
those that want the same expensive thing (a pool of Ray's, a nursery of workers, a run of an app, a browser) to one
process."""

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
}  # fmt: skip
JOINED = {"nursery": "ray"}  # the scheduler's tests want both
SECONDS = {
    "ray": 130, "flower": 25, "browser": 25, "tests/trust/test_billing.py": 25, "tests/trust/test_check_method.py": 18,
    "tests/verify/test_forgeries.py": 17, "tests/epsilon/test_release_path.py": 12,
    "tests/epsilon/test_noise_tests.py": 14, "tests/runtime/test_stacked.py": 14, "tests/trust/test_twins.py": 14,
    "tests/test_mutants.py": 11, "tests/attacks/test_models.py": 11, "tests/reports/test_report.py": 10,
    "tests/trust/test_roads.py": 10, "tests/training/test_models.py": 10,
    "tests/methods/test_datafree.py": 9, "tests/training/test_cuda_graphs.py": 9, "tests/methods/test_fedaf.py": 9,
    "tests/reports/test_export.py": 9, "tests/test_own_budgets.py": 8, "tests/methods/by_hand/test_dfrd.py": 8,
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
