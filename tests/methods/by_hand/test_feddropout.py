"""Federated Dropout, two rounds by hand: units drawn from the seed that travels, local SGD, DFRD's Eq. 1 on the way
back."""

from __future__ import annotations

import torch
from by_hand import close, played, rng
from narrow import MODEL, WIDTHS, cut, put_together, trained

B, ETA = 32, 0.05


def test_two_rounds(tmp_path):
    ran = played("feddropout", tmp_path / "run", rounds=2, model=MODEL, set={"B": B, "eta": ETA})
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    w = dict(ran.states[0].w)
    seeds = set()
    for t in (1, 2):
        taken, parts = {}, {}
        for k, widths in WIDTHS.items():
            seed = rng("server", f"units of client {k}", t).initial_seed() % 2**62
            seeds.add(seed)
            assert ran.sent("RandomPart", t)[k]["seed"] == seed
            draw = torch.Generator().manual_seed(seed)
            taken[k] = [
                torch.randperm(full, generator=draw)[:m].sort().values
                for m, full in zip(widths, WIDTHS[0], strict=True)
            ]
            part = cut(w, taken[k])
            close(part, ran.sent("RandomPart", t)[k]["w"], f"to client {k}")
            parts[k] = trained(ran.net(part, ran.world.archs[k]), *ran.rows[k], k, t, B, ETA)
            close(parts[k], ran.sent("TrainedPart", t)[k]["w"], f"from client {k}")
            assert ran.sent("TrainedPart", t)[k]["n"] == n[k]
        w |= put_together(w, parts, taken, n)  # Eq. 1
        close(w, ran.states[t].w, "the global model")
    assert len(seeds) == 6, "each client draws its own in each round"
