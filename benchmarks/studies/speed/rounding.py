"""See how far rounding grows in two rounds with ResNet-18, in float64, with four clients of digits.

python benchmarks/studies/speed/rounding.py FILE        # about eight minutes on a CPU

It keeps the largest difference of a number that crossed the wire, by round. In DFFKE with narrow ResNet-18: of the
engine `stacked` from `serial`, which does the same arithmetic in another order, with the decoder's frozen networks
mapped over, and side by side. In FedAvg with whole ones: of a run whose pixels are nudged by a relative 1e-15, which is
a few roundings, from one whose pixels are not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), *map(str, (HERE.parents[3] / "tests" / "helpers").glob("*/"))]

import torch  # noqa: E402
from gpu_speed import SERIAL, STACKED, Bench  # noqa: E402
from precision import double  # noqa: E402

from fedaudit import registry  # noqa: E402
from fedaudit.data import federation  # noqa: E402
from fedaudit.runtime.world import world_of  # noqa: E402
from fedaudit.training.stacked import networks  # noqa: E402
from fedaudit.wire.transcript import Transcript  # noqa: E402


def sent(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of floats that crossed the wire, by the round and the place in which it did."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                keep(f"{name} {key}", part)
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            found[name] = value.double()

    for entry in Transcript(folder / "transcript").entries():
        for field in entry.fields:
            keep(f"{entry.round} {entry.ask} {entry.direction} {entry.client} {field}", entry[field])
    return found


def main() -> None:
    bench = Bench(Path(sys.argv[1]).parent, "cpu", False, 1000)
    steps = dict(registry.find("dffke").quick) | {"T_Dec": 3, "B_Dec": 50}  # type: ignore[attr-defined]
    setting = {"method": "dffke", "dataset": "digits", "clients": 4, "rounds": 2, "keep_weights": 2, "aux": 0.3}
    setting |= {"model": "resnet18_cifar@0.125", "partition": "dirichlet:0.5", "set": steps}
    with double("dffke"):
        serial, mapped = (sent(bench.run(**setting, **how)[1]) for how in (SERIAL, STACKED))
        always = {name: mock.Mock(return_value=True) for name in ("goes_apart", "records_steps")}
        with mock.patch.multiple(networks, **always):
            apart = sent(bench.run(**setting, **STACKED)[1])
    deep = {"method": "fedavg", "dataset": "digits", "clients": 4, "rounds": 2, "keep_weights": 2}
    deep |= {"model": "resnet18_cifar", "partition": "dirichlet:0.5", "set": {"E": 3, "B": 16}}
    pixels = federation.to_input
    with double("fedavg"):
        alone = sent(bench.run(**deep, **SERIAL)[1])
        world_of.cache_clear()  # it holds the pixels
        with mock.patch.object(federation, "to_input", lambda *of, **how: pixels(*of, **how) * (1 + 1e-15)):
            nudged = sent(bench.run(**deep, **SERIAL)[1])
    found = {
        name: {r: max(float((one[k] - other[k]).abs().max()) for k in one if k.startswith(r)) for r in "12"}
        for name, one, other in (
            ("mapped", serial, mapped), ("side_by_side", serial, apart), ("fedavg_nudged", alone, nudged)
        )
    }  # fmt: skip
    Path(sys.argv[1]).write_text(
        json.dumps({"how": __doc__, "torch": torch.__version__, "farthest_by_round": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
