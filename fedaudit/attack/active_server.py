"""A server that does not follow the protocol sends a client a message of its own choice, and gets a real answer.

The client is sealed: its records, its state after the last round, its code and its protection are what they are in the
run. Only the message is the attacker's. The function that answers is one that the run called, in a round that the run
had, with fresh noise. Nothing of it enters the run's transcript, ledger or checkpoint. What was sent is kept apart, in
`active/` of the run folder. What the client would have paid for the answer comes on top of its ledger.
"""

from __future__ import annotations

from fedaudit.errors import ThreatError
from fedaudit.privacy.noise_key import task_key
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.folder import RunFolder
from fedaudit.runtime.task import Task, run_task
from fedaudit.wire.codec import decode, encode
from fedaudit.wire.message import Down, Up
from fedaudit.wire.transcript import TranscriptEntry

FOLDER = "active"
ATTEMPT = 1 << 30  # larger than any replay's number, so that noise and samples are drawn anew


def ask(run: RunFolder, k: int, like: TranscriptEntry, message: Down, purpose: str, number: int) -> Up:
    """Return client k's answer to `message`, sent in the place of `like`. `number` counts the messages of one attack on
    it."""
    blob = encode(message)
    write_atomic(run.folder / FOLDER / f"{purpose}-client-{k:06d}-{number:04d}.message", blob)
    setting = run.record.setting.model_dump_json()
    attempt = ATTEMPT + number
    noise = task_key(run.secret, k, like.round, like.ask, attempt)
    state = run.client_state(k)
    done = run_task(Task(setting, like.fn, k, like.round, like.ask, state, blob, attempt=attempt, noise=noise))
    if done.reply is None:
        raise ThreatError(f"client {k} did not answer the message of an active server: {done.error}")
    return decode(done.reply, Up, device=run.world.device, answered=lambda: message)
