"""Opens a run: begins a new folder, or goes on with one, and refuses what would not belong together."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import torch
from pydantic import ValidationError

from fedaudit.data.readers.own_function import digest as digest_of_data
from fedaudit.errors import ContractError, NotApplicable, RunError, SettingError
from fedaudit.privacy.ledger import Ledger
from fedaudit.privacy.mechanisms.base import mechanism_of
from fedaudit.privacy.noise_key import FILE as KEY_FILE
from fedaudit.privacy.noise_key import fresh_secret, read_secret, write_secret
from fedaudit.rng import seeded
from fedaudit.runtime.applicability import inapplicable, released_kinds
from fedaudit.runtime.asking import participants_of
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.code_digest import NOT_COMPARED, code_of, differences, harness, is_same, not_compared
from fedaudit.runtime.declarations.tested import declarations_of
from fedaudit.runtime.declarations.twins import Twins
from fedaudit.runtime.folder import rounding
from fedaudit.runtime.lockstep import beside
from fedaudit.runtime.meter import Timings
from fedaudit.runtime.plan import sent_in_round
from fedaudit.runtime.run_commit import commit
from fedaudit.runtime.run_record import (
    DataFacts,
    ModelFacts,
    RunRecord,
    TwinFacts,
    device_name,
    versions,
)
from fedaudit.runtime.run_state import RunState
from fedaudit.runtime.seal import NAME as SEAL
from fedaudit.runtime.starting_clients import take_over
from fedaudit.runtime.world import World
from fedaudit.setting import EXECUTION, ROUNDING, Setting
from fedaudit.units import bytes_text
from fedaudit.wire.codec import decode
from fedaudit.wire.message import Record
from fedaudit.wire.transcript import TranscriptWriter


def _first_state(run: RunState) -> Record:
    if run.isolated is not None:
        _, (blob,) = run.isolated.server("init", 0, None, [], lambda path, *_: _refuse_asks(run, path))
        return decode(blob, Record, device=run.world.device)
    with seeded(run.setting.seed, "server", 0, device=run.world.device):
        first = run.method.init(run.server(0))
    check_state(run, first, "init")
    return first


def _refuse_asks(run: RunState, path: str) -> Any:
    raise ContractError(
        f"{type(run.method).__name__}.init asks clients ({path}), which only `round` may do. Move it there."
    )


def open_run(run: RunState) -> None:
    """Begin the run in an empty folder, or read the last whole round of a begun one."""
    head = run.store.head()
    if head is None:
        write_atomic(run.folder / "setting.json", run.setting.model_dump_json(indent=1).encode())
        run.record = _new_record(run)
        run.record.beside = beside()
        _begin_twins(run)
        run.transcript = _open_transcript(run, offset=0, last_round=0, seq=0)
        first = _first_state(run)
        if run.first is not None:
            run.ledger = Ledger(take_over(run.first, run.record, run.store).ledger)
        commit(run, 0, first, run.transcript.end_round_behind(0))
    else:
        run.record = _read_head(run, head)
        before = run.record.setting
        _check_same(run, before)
        run.record.setting = run.setting
        run.started = head["round"]
        run.timings = Timings(run.record.timings, run.record.peak_rss_bytes, run.record.peak_gpu_bytes)
        run.traffic = {(row.direction, row.field): row for row in run.record.traffic}
        run.releases = {release.field: release for release in run.record.releases}
        run.ledger = Ledger(run.record.ledger)
        run.digest = run.record.transcript_digest
        run.transcript = _open_transcript(
            run, offset=head["transcript"], last_round=run.started, seq=head["seq"], clock=head["clock"]
        )
        run.committed, run.decoded = run.store.server(head["server"]), None
        _begin_twins(run)
        run.twins.go_on(run.started)
        if run.started < run.setting.rounds:
            _go_on(run, head, before)
    run.watch(run.started, run.setting.rounds, f"ready; {_expected_size(run)}")


COPIES = (
    "a client holds one record up to {0} times: the guarantee is for one copy, and whoever has {0} of them has a "
    "guarantee {0} times as weak"
)


APART = (
    "records of one person lie at up to {0} clients: each client's guarantee is for the records that it holds of a "
    "person itself"
)


def _notes(facts: DataFacts) -> list[str]:
    """Return what the data mean for the guarantee."""
    if facts.persons:
        return [APART.format(facts.most_clients)] if facts.most_clients > 1 else []
    return [COPIES.format(facts.copies)] if facts.copies > 1 else []


def _begin_twins(run: RunState) -> None:
    """Read or draw the run's secret, and say which clients have a twin."""
    run.secret = _secret(run)
    if run.world.policies and run.record.twins is None:
        run.record.twins = TwinFacts(wanted=run.setting.twins)
    facts = run.record.twins or TwinFacts()
    run.twins = Twins(run.world, run.folder, run.secret, facts, run.twin_sets)


def _secret(run: RunState) -> bytes:
    """Return the secret from which noise and masks follow: the run folder's, or a new one that is kept there."""
    if not run.setting.privacy and run.setting.aggregate != "secure":
        return b""
    path = run.folder / KEY_FILE
    if not path.exists():
        write_secret(path, fresh_secret() if run.noise_key is None else read_secret(run.noise_key))
    return read_secret(path)


def _go_on(run: RunState, head: dict[str, Any], before: Setting) -> None:
    """Go on with an unfinished or a longer run: what was recorded about its end no longer holds."""
    made_by = (run.record.versions, run.record.device)
    same = made_by == (versions(), device_name(run.world.device)) and is_same(run.record.harness, harness())
    if not same:
        run.record.notes.append(
            "resumed under other versions, by another harness or on another device: the bits may differ from there"
        )
    if not_compared(run.record.code, run.record.harness):  # it may be other code: as if it were
        same = False
        if (note := f"resumed: {NOT_COMPARED}, and the bits may differ from there") not in run.record.notes:
            run.record.notes.append(note)
    if run.record.beside or beside():  # stacks have another size, or other models in them
        note = f"resumed after round {run.started}, with runs of other seeds beside it before or now"
        run.record.notes.append(f"{note}: rounding may differ from there")
        same = False
    if rounding(before) != rounding(run.setting):  # --step, --together or --engine after an error of the device
        same = False
        run.record.notes.append(
            f"resumed after round {run.started} with other steps, stacks or engine: rounding may differ from there"
        )
    if before.keep_weights < run.setting.keep_weights:
        run.record.notes.append(
            f"keep_weights was raised after round {run.started}: model states from before were not all kept"
        )
    # A replayed round may give other values. Equal noise on unequal values would give both away: draw fresh noise.
    run.attempt = head["attempt"] + (0 if run.setting.deterministic and same else 1)
    run.store.amend(attempt=run.attempt)
    run.record.beside = sorted({*run.record.beside, *beside()})
    (run.folder / SEAL).unlink(missing_ok=True)
    run.record.status, run.record.finished, run.record.published = "running", None, []
    for client in run.record.ledger:
        client.reopen()


def _expected_size(run: RunState) -> str:
    """Return in words how much the transcript grows in one round at most: a broadcast is stored once, old model states
    are dropped. Some methods send more in later rounds, so the first, the second and the last are looked at, and
    where the number of clients is drawn, the round with the most."""
    setting, most = run.setting, 0
    last = max(setting.rounds, 1)
    largest = (
        max(range(1, last + 1), key=lambda t: len(participants_of(setting, t))) if _number_is_drawn(setting) else 1
    )
    for t in sorted({1, min(2, last), last, largest}):
        participants = participants_of(setting, t)
        if len(participants) < (2 if setting.aggregate == "secure" else 1):
            continue  # nobody is asked, and there is no sum of one client
        sent = sent_in_round(run.method, run.world.plan(t, participants), setting)
        if sent is None:
            return "the transcript grows by what the method sends, which it does not declare"
        most = max(most, sum(s.payload + s.buffers + s.header for s in sent[0].values()))
    return f"a round adds up to {bytes_text(most)} of messages to the transcript"


def _number_is_drawn(setting: Setting) -> bool:
    """Return whether the number of clients in a round is drawn."""
    return setting.sampling == "poisson"


def check_records(run: RunState) -> None:
    """Refuse records that the method cannot take. In a suite that is a result, and is kept."""
    if why := run.world.misfit():
        if run.refuse_idle and run.store.head() is None:
            run.record = _new_record(run)
            run.record.save(run.folder)
        raise NotApplicable(f"{why}.")


def check_applicable(run: RunState) -> None:
    """Refuse a privacy setting that covers nothing that the method releases."""
    first_and_last = {1, 2, max(run.setting.rounds, 1)}  # some messages are sent in one of these rounds only
    plans = (run.world.plan(t, list(range(run.setting.clients))) for t in sorted(first_and_last))
    if run.world.policies and (reason := inapplicable(run.setting.privacy, released_kinds(run.method, plans))):
        run.transcript.close()
        raise NotApplicable(f"{reason}.")


def _read_head(run: RunState, head: dict[str, Any]) -> RunRecord:
    try:
        return RunRecord.model_validate(head["record"])
    except ValidationError as e:
        raise RunError(
            f"{run.folder} was begun by another version of fedaudit ({e.error_count()} fields differ). Finish it "
            "with that version, or start anew in another folder."
        ) from None


def _open_transcript(run: RunState, **where: Any) -> TranscriptWriter:
    return TranscriptWriter(run.folder / "transcript", keep_weights=run.setting.keep_weights, **where)


def _check_same(run: RunState, before: Setting) -> None:
    old, new = before.model_dump(), run.setting.model_dump()
    free = [*EXECUTION, *ROUNDING, "keep_weights", "quorum", "dropout"]
    free += [] if _planned_for_rounds(run) else ["rounds"]
    other = [key for key in old if old[key] != new[key] and key not in free]
    other += [key for key in ("precision", "channels_last") if old[key] != new[key]]
    if other:
        raise SettingError(
            f"{run.folder} was begun with another setting: "
            + ", ".join(f"{key} = {old[key]!r}, now {new[key]!r}" for key in other)
            + ". Resume with the same, or choose another --out."
        )
    code = run.record.code  # None: the record is older than this field
    if code is not None and (changed := differences(code, code_of(run.method, run.setting))):
        raise SettingError(
            f"{run.folder} was begun by other code: {'; '.join(changed)}. Its rounds would not belong together: "
            "say --overwrite to start anew in this folder, choose another --out, or take the change back."
        )
    if run.setting.rounds < run.record.rounds[-1].round if run.record.rounds else False:
        raise SettingError(
            f"{run.folder} has {len(run.record.rounds)} rounds; --rounds asks for fewer. Ask for at least as many."
        )


def _planned_for_rounds(run: RunState) -> bool:
    """Return whether some noise was calibrated so that all rounds together meet an epsilon: their number is then
    fixed."""
    guarantee = run.world.guarantee
    on_sums = guarantee is not None and guarantee.policy.epsilon is not None
    return on_sums or any(mechanism_of(policy).plans_ahead(policy) for policy in run.world.policies.values())


def _new_record(run: RunState) -> RunRecord:
    return RunRecord(
        setting=run.setting,
        versions=versions(),
        device=device_name(run.world.device),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        data=(facts := data_facts(run.world)),
        notes=_notes(facts),
        harness=harness(),
        declarations=declarations_of(run.method),
        code=code_of(run.method, run.setting),
        models=model_facts(run.world),
    )


def data_facts(world: World) -> DataFacts:
    """Return the sizes of the parts of a run's data, and the digest of the data set."""
    federation = world.federation
    held = [people for k in range(len(federation.shards)) if (people := world.people(k)) is not None]
    counts = [people.unique(return_counts=True)[1] for people in held]
    clients = torch.cat([people.unique() for people in held]).unique(return_counts=True)[1] if held else None
    return DataFacts(
        shape=list(world.shape),
        tokens=world.shape.tokens,
        classes=world.classes,
        class_names=list(federation.dataset.class_names),
        test=len(federation.dataset.test_y),
        aux=len(federation.aux),
        public=world.public_size,
        members=[world.count(k) for k in range(len(federation.shards))],
        nonmembers=[len(s.nonmembers) for s in federation.shards],
        validation=[len(s.validation) for s in federation.shards],
        counts=federation.counts().tolist(),
        persons=[len(of) for of in counts],
        most_of_person=max((int(of.max()) for of in counts if len(of)), default=1),
        most_clients=1 if clients is None or not len(clients) else int(clients.max()),
        copies=world.copies() if world.policies and not held else 1,
        digest=digest_of_data(federation.dataset),
    )


def model_facts(world: World) -> dict[str, ModelFacts]:
    """Return the size of each architecture of a run, and how many clients have it."""
    return {
        arch: ModelFacts(parameters=world.model_size(arch).payload // 4, clients=world.archs.count(arch))
        for arch in dict.fromkeys(world.archs)
    }


def check_state(run: RunState, state: Any, where: str) -> None:
    """Refuse a state of the server that is not a Record."""
    if not isinstance(state, Record):
        raise ContractError(
            f"{type(run.method).__name__}.{where} returned a {type(state).__name__}; the state is a Record."
        )
