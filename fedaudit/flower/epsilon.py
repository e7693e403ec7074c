"""Tests of the claims of an app's local DP mods, by running the mods themselves.

A mod claims that two updates as far apart as its sensitivity cannot be told apart better than epsilon allows. Here the
app's mods, unchanged and in their order, are given two such updates instead of trained ones: the two ends of a line of
known direction through the model that a node was sent. The outputs are projected on that line. Nothing is trained and
no records are needed, so a thousand trials take seconds.

If the sensitivity is at least 2 C (C is the clipping norm), the updates begin far outside of C and are clipped to ends
that lie 2 C apart, which tests the clipping, too. If it is less, the ends lie one sensitivity apart, within C, as the
claim says.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from fedaudit.epsilon.audit_result import AuditedClaim, held_path
from fedaudit.epsilon.lower_bounds import Bound, from_scores, gdp_mean_shift
from fedaudit.errors import RunError, SettingError
from fedaudit.flower.claims import TRIED_AS, LocalClaim, local_claims, training_mods
from fedaudit.flower.client import identify
from fedaudit.flower.messages import array_of, contents_of, tensor_of
from fedaudit.flower.uploads import audit_uploads
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import generator, seeded
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.run_record import EpsilonAudit, save_audits
from fedaudit.wire.transcript import TranscriptEntry

TESTS: dict[str, Callable[..., Bound]] = {TRIED_AS: from_scores, f"{TRIED_AS}, Gaussian": gdp_mean_shift}
FAR = 100.0  # length, in clipping norms, of an update that is to be clipped


def audit_mods(
    folder: Path | str,
    app: ClientApp,
    *,
    trials: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    watch: Watch | None = None,
) -> list[EpsilonAudit]:
    """Test the claim of each local DP mod around an app's training by `trials` uploads of each of two updates.

    The request is one of the run's. The uploads that left the run are held against the claim, too
    (fedaudit.flower.uploads). Return the audits, which are also kept in the run folder.
    """
    if trials < 2:
        raise SettingError(f"--trials {trials}: a bound needs at least 2 uploads of each update. Try 1000.")
    run = RunFolder(folder)
    claims = local_claims(app)
    if not claims:
        raise SettingError(
            "No mod around the app's training claims local DP, so there is nothing to test. Add such a mod."
        )
    entry, content = _request(run)
    found: list[EpsilonAudit] = []
    kind = _kind(run)
    for claim in claims:
        found.append(audit_uploads(run, app, claim, kind, confidence))
        scores = _scores(app, claim, content, trials, seed, watch or unwatched)
        found += [_held(run, entry, claim, name, bound, scores, confidence) for name, bound in TESTS.items()]
    save_audits(run.folder, run.record.transcript_digest, found)
    return found


def _kind(run: RunFolder) -> str:
    return "weights" if any(f.kind == "weights" for f in run.record.releases) else "unmapped"


def _request(run: RunFolder) -> tuple[TranscriptEntry, RecordDict]:
    """Return the last request for training whose model the transcript kept, and its content as the node got it."""
    shape = run.record.setting.set.get("messages", {}).get("Train")
    for entry in sorted(run.transcript.entries(), key=lambda e: -e.seq):
        if shape and entry.message == "Train" and all(entry.kept(name) for name in shape["fields"]):
            content = contents_of({name: entry[name] for name in shape["fields"]}, shape["fields"])
            if len([r for r in content.values() if isinstance(r, ArrayRecord)]) == 1:
                return entry, content
    raise RunError(f"{run.folder} keeps no request for training with one array record. Run with a larger keep_weights.")


def _scores(app: ClientApp, claim: LocalClaim, content: RecordDict, trials: int, seed: int, watch: Watch) -> np.ndarray:
    """Return the projections on the line in two rows, one for the uploads from each end."""
    name, start = next((n, r) for n, r in content.items() if isinstance(r, ArrayRecord))
    before = {key: tensor_of(array).double() for key, array in start.items()}
    u = torch.randn(sum(t.numel() for t in before.values()), generator=generator("flower mods", seed)).double()
    u /= u.norm()
    reach = FAR * claim.clip if claim.sensitivity >= 2 * claim.clip else claim.sensitivity / 2
    ends = [_reply_of(name, start, before, sign * reach * u) for sign in (1.0, -1.0)]
    scores = np.empty((2, trials))
    identify()
    logger = logging.getLogger("flwr")
    level = logger.level
    logger.setLevel(logging.ERROR)  # a mod logs every upload
    try:
        with seeded("flower mods", seed, "noise"):
            for j in range(trials):
                if j % 100 == 0:
                    watch(j, trials, f"uploads through {claim.mod}")
                for i, end in enumerate(ends):
                    out = _through(app, content, end)
                    got = torch.cat([tensor_of(a).double().reshape(-1) for a in out.values()])
                    scores[i, j] = float((got - torch.cat([t.reshape(-1) for t in before.values()])) @ u)
    finally:
        logger.setLevel(level)
    return scores


def _reply_of(name: str, start: ArrayRecord, before: dict[str, torch.Tensor], update: torch.Tensor) -> Any:
    """Return a function that answers as an app whose training moved the model by `update`."""
    parts = dict(zip(before, update.split([t.numel() for t in before.values()]), strict=True))
    arrays = {
        key: array_of((t + parts[key].reshape(t.shape)).to(tensor_of(start[key]).dtype)) for key, t in before.items()
    }

    def reply(message: Message, _: Context) -> Message:
        if name == "fitins.parameters":  # the older API: its mods read the reply as what `fit` returned
            made = ndarrays_to_parameters([tensor_of(array).numpy() for array in arrays.values()])
            result = FitRes(Status(Code.OK, ""), made, 1, {})
            return Message(fitres_to_recorddict(result, keep_input=True), reply_to=message)
        return Message(RecordDict({name: ArrayRecord(arrays)}), reply_to=message)

    return reply


def _through(app: ClientApp, content: RecordDict, end: Any) -> ArrayRecord:
    """Return one upload: the app's training mods, put around `end` instead of the training."""
    fn = end
    for mod in reversed(training_mods(app)):
        fn = _around(mod, fn)
    request = Message(RecordDict(dict(content)), dst_node_id=1, message_type="train")
    reply = fn(request, Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {}))
    if reply.has_error():
        raise RunError(f"A mod of the app refuses a message like those of the run: {reply.error.reason}")
    return next(r for r in reply.content.values() if isinstance(r, ArrayRecord))


def _around(mod: Any, inner: Any) -> Any:
    return lambda message, context: mod(message, context, inner)


def _held(
    run: RunFolder,
    entry: TranscriptEntry,
    claim: LocalClaim,
    test: str,
    bound: Callable[..., Bound],
    scores: np.ndarray,
    confidence: float,
) -> EpsilonAudit:
    kind = _kind(run)
    ledger = next((c for c in run.record.ledger if c.client == entry.client), None)
    apart = min(claim.sensitivity, 2 * claim.clip)
    place = AuditedClaim(
        kind=kind,
        threat="whoever sees the upload: server",
        claim=f"{claim.mod}, one upload",
        epsilon=claim.epsilon,
        ledger=math.inf if ledger is None else ledger.by_kind.get(kind, math.inf),
    )
    how = f"two updates {apart:g} apart, on the request to client {entry.client} in round {entry.round}"
    member = np.repeat([True, False], scores.shape[1])
    return held_path(place, test, bound, scores.ravel(), member, apart / claim.sigma, claim.delta, confidence, how)
