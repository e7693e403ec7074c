"""What DFFKE's memory buffers take at the end of a run, against the paper's R (|Dec| + N h b) (Section 4.3).

python benchmarks/studies/dffke/dffke_buffer.py RUN
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedaudit.methods.datafree._buffer import buffer_bytes, formula_bytes, held
from fedaudit.methods.datafree._decoder import decoder_size
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.wire.codec import decode


def buffers(run: Path) -> list[dict[str, int]]:
    """One row per client: rounds held, rows N of a round on average, bytes as they are and by the formula."""
    folder = RunFolder(run)
    world = folder.world
    Dec = decoder_size(world.method.h, world.shape, world.method.w_Dec)
    table = []
    for k in range(world.setting.clients):
        state = folder.client_state(k)
        if state is None:  # it was never asked
            continue
        memory = decode(state, ClientState).memory
        rows = [sum(past.rows("E", i) for i in past.keys("E")) for past in held(memory).values()]
        N = sum(rows) / max(len(rows), 1)
        formula = formula_bytes(len(rows), Dec.payload + Dec.buffers, round(N), world.method.h)
        table.append({"client": k, "R": len(rows), "N": round(N), "bytes": buffer_bytes(memory), "formula": formula})
    return table


def main() -> None:
    print("client   rounds   rows a round            bytes   R(|Dec| + N h b)")
    for row in buffers(Path(sys.argv[1])):
        print(f"{row['client']:>6}{row['R']:>9}{row['N']:>15}{row['bytes']:>17,}{row['formula']:>19,}")


if __name__ == "__main__":
    main()
