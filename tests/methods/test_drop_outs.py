"""What a client that drops out is left with."""

from __future__ import annotations

import torch
from engines import DropEngine
from safetensors.torch import load_file

from fedaudit import run
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import ClientState
from fedaudit.wire.codec import decode
from fedaudit.wire.transcript import Transcript


def test_no_stale_layer_of_fedfree_is_deployed(tmp_path):
    """Client 0 put a layer aside in round 1, trained in round 2, and dropped out before anything came. What it deploys
    is what it trained; not that with the layer of round 1 put back."""
    run(
        method="fedfree", rounds=2, clients=3, model="cnn:2,mlp:1", set={"E": 1, "B": 16, "eta": 0.1, "samples": 32},
        partition="dirichlet:0.5", engine=DropEngine({(0, 2, 1)}), out=tmp_path / "a",
    )  # fmt: skip
    received = [
        (e.client, e.round) for e in Transcript(tmp_path / "a" / "transcript").entries() if e.message == "Knowledge"
    ]
    assert (0, 1) in received, "a layer was put aside"
    held = decode(RunFolder(tmp_path / "a").client_state(0), ClientState)
    assert "trained" not in held.memory
    deployed = load_file(tmp_path / "a" / "models" / "client-000000.safetensors")
    assert all(torch.equal(deployed[name], t) for name, t in held.model.items())
