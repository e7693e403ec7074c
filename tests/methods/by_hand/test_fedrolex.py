"""FedRolex, two rounds by hand: rolling windows cut out of the global network, local SGD, DFRD's Eq. 1 on the way
back."""

from __future__ import annotations

import torch
from by_hand import close, played
from narrow import MODEL, WIDTHS, cut, put_together, trained

B, ETA = 32, 0.05


def test_two_rounds(tmp_path):
    ran = played("fedrolex", tmp_path / "run", rounds=2, model=MODEL, set={"B": B, "eta": ETA})
    n = {k: len(y) for k, (_, y) in ran.rows.items()}
    assert len(set(n.values())) == 3, "sizes differ, or the weights of Eq. 1 are not tested"
    w = dict(ran.states[0].w)
    for t in (1, 2):
        taken, parts = {}, {}
        for k, widths in WIDTHS.items():
            # The window of round t begins at unit t - 1 of each layer; client 2 has units 0-3, then 1-4.
            taken[k] = [
                (torch.arange(m) + t - 1).remainder(full).sort().values
                for m, full in zip(widths, WIDTHS[0], strict=True)
            ]
            part = cut(w, taken[k])
            close(part, ran.sent("Part", t)[k]["w"], f"to client {k}")
            parts[k] = trained(ran.net(part, ran.world.archs[k]), *ran.rows[k], k, t, B, ETA)
            close(parts[k], ran.sent("TrainedPart", t)[k]["w"], f"from client {k}")
            assert ran.sent("TrainedPart", t)[k]["n"] == n[k]
        w |= put_together(w, parts, taken, n)  # Eq. 1
        close(w, ran.states[t].w, "the global model")
