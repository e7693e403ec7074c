"""Commits a round, and publishes what a run ends with: the ledger, the record, the models."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import UTC, datetime

import xxhash
from torch import nn

from fedaudit.privacy.ledger import LedgerEntry
from fedaudit.rng import seeded
from fedaudit.runtime.checkpoint import Json, write_atomic
from fedaudit.runtime.folder import saving_state
from fedaudit.runtime.method import Method
from fedaudit.runtime.run_record import (
    FieldTraffic,
    curve_of,
)
from fedaudit.runtime.run_state import Entries, RunState
from fedaudit.runtime.seal import seal_again
from fedaudit.runtime.task import ClientState
from fedaudit.runtime.utility import results
from fedaudit.runtime.world import name_of
from fedaudit.wire.channel import Wire
from fedaudit.wire.codec import decode, encode_lazily
from fedaudit.wire.message import Record, live_state, state_of


def finish(run: RunState) -> None:
    """Publish the models, close the ledger, and mark the record as done."""
    run.record.published = _save_models(run)
    run.store.settle()
    run.record.ledger = run.ledger.close()
    run.note(who_sees(run))
    _note_idle_policies(run)
    run.record.status = "done"
    run.record.finished = datetime.now(UTC).isoformat(timespec="seconds")
    text = run.record.text()
    write_atomic(run.folder / "record.json", text.encode())
    run.store.amend(record=Json(text))
    seal_again(run.folder)


def who_sees(run: RunState) -> list[str]:
    """Return in words what secure sums showed the server; nothing where there were none."""
    sums = [one for row in run.record.rounds for one in row.sums if one.secure]
    if not sums:
        return []
    alone = run.method.alone_in_sums
    return [
        f"secure aggregation: the server sees only sums of at least {min(one.stayed for one in sums)} clients, as long "
        f"as fewer than {min(one.threshold or 2 for one in sums)} that share a client's keys tell it what they know"
        + (f"; but {alone}" if alone else "")
    ]


def _note_idle_policies(run: RunState) -> None:
    used = {entry.kind for client in run.record.ledger for entry in client.entries}
    run.record.idle_policies = sorted(run.world.policies.keys() - used)
    for kind in run.record.idle_policies:
        note = f"the policy on {kind} applied to nothing: {run.setting.method} released none"
        if note not in run.record.notes:
            run.record.notes.append(note)


def count(run: RunState, wire: Wire) -> None:
    """Add a round's traffic, releases and digests to the run's."""
    for (direction, name), sent in wire.traffic.wire.items():
        row = run.traffic.setdefault((direction, name), FieldTraffic(direction=direction, field=name))  # type: ignore[arg-type]
        size = wire.traffic.sizes.get((direction, name))
        row.wire += sent
        if size is not None:
            row.payload += size.payload
            row.buffers += size.buffers
    for release in wire.traffic.releases.values():
        run.releases[release.field] = release
    run.digest = xxhash.xxh3_128_hexdigest((run.digest + "".join(wire.traffic.digests)).encode())


def enter(run: RunState, t: int, entries: Entries, wire: Wire) -> None:
    """Bill a round's entries to their clients, and list who got to see what was relayed."""
    for k, of_client in entries:
        run.bill(k, t, of_client)
    for kind, to in sorted(wire.traffic.relayed):
        run.ledger.relayed(kind, to)


def commit(run: RunState, t: int, state: Record, end: Future[int]) -> None:
    """Commit the round, once its transcript has ended, while the next one begins."""
    run.twins.commit(t)
    blob = run.committed = encode_lazily(state, run.world.device)
    run.decoded = None
    record = run.record
    record.traffic = [run.traffic[key] for key in sorted(run.traffic)]
    record.releases = [run.releases[key] for key in sorted(run.releases)]
    record.timings = run.timings.table()
    record.peak_rss_bytes, record.peak_gpu_bytes = run.timings.peak_rss_bytes, run.timings.peak_gpu_bytes
    record.transcript_digest = run.digest
    record.ledger = run.ledger.rows()
    record.curve = curve_of(record.rounds)
    record.result = results(record.rounds)
    text = record.text()
    facts = {"seq": run.transcript.seq, "attempt": run.attempt, "clock": run.transcript.clock()}
    run.store.commit_behind(
        t,
        blob,
        lambda: {"transcript": end.result(), **facts, "record": Json(text)},
        then=lambda: write_atomic(run.folder / "record.json", text.encode()),
    )


def _save_models(run: RunState) -> list[str]:
    """Save the final models as safetensors: the global one if there is one, and each client's. Return the published
    names."""
    folder = run.folder / "models"
    folder.mkdir(exist_ok=True)
    saved = []

    predictor = run.predictor(run.setting.rounds)
    # If clients deploy their models as they are, no code of the method runs any more: no copy is needed.
    as_it_is = type(run.method).personal is Method.personal and not (predictor is None and run.world.policies)

    def save(name: str, model: nn.Module) -> None:
        state = live_state(model) if as_it_is else state_of(model)
        run.store.behind(f"models/{name}", saving_state(folder / name, state, name_of(model)))
        saved.append(name)

    if predictor is not None:
        save("global.safetensors", predictor)
    with seeded(run.setting.seed, "evaluation", "final", device=run.world.device):
        for k in sorted(run.store.clients):
            name = f"client-{k:06d}.safetensors"
            if not as_it_is:
                save(name, _personal_model(run, k, predictor is None))
                continue
            state = decode(run.store.client(k) or b"", ClientState, device=run.world.device, look=True).model
            run.store.behind(f"models/{name}", saving_state(folder / name, state, run.world.model_name(k)))
            saved.append(name)
    if predictor is None and run.world.guarantee is not None:
        condition = "clients' own models are published, and the noise on sums does not protect them"
        for k in sorted(run.store.clients):
            entry = LedgerEntry.unprotected("(published model)", "weights", condition)
            run.bill(k, run.setting.rounds, [entry])
    # An outsider gets to see the global model or, if a method has none, what the clients deploy.
    return saved[:1] if predictor is not None else saved


def _personal_model(run: RunState, k: int, published: bool) -> nn.Module:
    """Return the model that client k deploys. If that is published, whatever went into it beyond the client's model
    is billed."""
    client = run.client(k)
    model = run.method.personal(client)
    if published and run.world.policies:
        entries = [*client.entries]
        tainted = client.private_training and client.plain_fits > 0  # by an earlier task
        if client.looked or tainted or client.plain_fits > _plain_fits(run, k):
            condition = "personal() read the records, and what it made of them is published"
            entries.append(LedgerEntry.unprotected("(published model)", "weights", condition))
        if entries:
            run.bill(k, run.setting.rounds, entries)
    return model


def _plain_fits(run: RunState, k: int) -> int:
    state = run.store.client(k)
    return 0 if state is None else decode(state, ClientState).plain_fits
