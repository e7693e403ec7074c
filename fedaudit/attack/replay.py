"""Shadows: an attacker runs a client's own update function again, on other records.

A shadow's upload is what the target would have uploaded if it had held other records. It comes from the method's own
function, called with the messages that the target received, as the transcript has them, and not from a model trained
centrally instead. What an attacker does not know is drawn anew: the client's records (the attacker's own instead), its
generators (other batches, other noise), and whatever it kept from before the first message that is replayed (a fresh
model, an empty memory).

The replay begins at the last message before the upload that brings a whole model of the target's architecture, if the
client then trains that model whatever it held before. That is tried on a few records. Otherwise it begins at the first
message of the run. Anything that a method keeps in its clients' memory from before that message is missing.

Shadows run side by side. Each runs the method's function as it is. If that calls `client.fit`, it waits until all the
others have come to a fit as well, and these are trained as one stack (training/stacked). If that cannot be done,
and under DP-SGD, they are trained one after another, with the same result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import safetensors.torch
import torch
import xxhash
from safetensors import SafetensorError
from torch import Tensor, nn

from fedaudit.errors import FedauditError, ThreatError
from fedaudit.progress import Watch, unwatched
from fedaudit.rng import seed_of, seeded
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.code_digest import ROOMS, harness, source_of_method
from fedaudit.runtime.lockstep import Globals, Turn, take_turns
from fedaudit.runtime.meter import Meter
from fedaudit.runtime.method import find_function
from fedaudit.runtime.party import Client
from fedaudit.runtime.site import Rows, Site
from fedaudit.runtime.task import open_client, state_after
from fedaudit.runtime.world import World
from fedaudit.setting import EXECUTION
from fedaudit.training.forward import in_chunks
from fedaudit.training.models import Net
from fedaudit.wire.codec import decode, encode
from fedaudit.wire.message import Down, Up
from fedaudit.wire.transcript import TranscriptEntry, TranscriptView

FEW = 8  # records on which a beginning is tried
_tried: dict[str, bool] = {}  # the results of such trials

# --- what is replayed ------------------------------------------------------------------------------------------------


def downloads(view: TranscriptView, upload: TranscriptEntry, world: World, rows: Rows) -> list[TranscriptEntry]:
    """Return the messages to the target that lead to `upload`, oldest first. `rows`: any records, to try a beginning
    on."""
    last = (upload.round, upload.ask)
    sent = [e for e in view.entries(direction="down", client=upload.client) if (e.round, e.ask) <= last]
    with seeded("replay"):
        model = world.build(world.archs[upload.client])
    begin = max((i for i, entry in enumerate(sent) if brings_model(entry, model)), default=0)
    if begin and all(map(sent[begin].kept, sent[begin].fields)) and not starts_anew(world, sent[begin], rows):
        begin = 0
    for entry in sent[begin:]:
        if not all(entry.kept(name) for name in entry.fields):
            raise ThreatError(
                f"a replay of client {upload.client} begins in round {sent[begin].round}, whose model states the "
                "transcript did not keep: run with a larger keep_weights"
            )
    return sent[begin:]


def brings_model(entry: TranscriptEntry, model: nn.Module) -> bool:
    """Return whether one field of the message is a whole state of `model`, judged by names and shapes."""
    whole = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    mine = [name for name, field in entry.fields.items() if field.role != "relay"]
    return any(entry.state_shapes(name) == whole for name in mine)


def starts_anew(world: World, entry: TranscriptEntry, rows: Rows) -> bool:
    """Return whether the client's answer to a message, and its model after it, are the same whatever model it had
    before."""
    few = (rows[0][:FEW], rows[1][:FEW])
    key = signature(world, [entry], few, [])
    if key not in _tried:
        try:
            first, second = (
                _perform(world, [_shadow(world, entry.client, 0, few, fresh=i)], entry, [None], False, set())
                for i in range(2)
            )
        except FedauditError:
            _tried[key] = False  # the client needs what it knew before
        else:
            _tried[key] = first[0].result == second[0].result
    return _tried[key]


# --- the world of a shadow -------------------------------------------------------------------------------------------


def _shadow(world: World, k: int, seed: int, rows: Rows, fresh: int | None = None) -> Site:
    """Return client k's site as an attacker rebuilds it: public knowledge, another seed, other records."""

    def model() -> Net:
        if fresh is None:
            return world.fresh_model(k, seed)
        with seeded("replay", "fresh", fresh):
            return world.build(world.archs[k])

    return replace(world.site(k, rows), seed=seed, fresh_model=model)


# --- taking turns ----------------------------------------------------------------------------------------------------


def _take_turns(turns: Sequence[Turn], compile: bool, notes: set[str]) -> None:
    if len(turns) == 1:
        turns[0].refuse = "one shadow at a time was asked for"
    take_turns(turns, compile=compile)
    for turn in turns:
        if turn.error is not None:
            raise turn.error
        notes.update(f"shadows were trained one after another: {reason}" for reason in turn.alone)


# --- replaying -------------------------------------------------------------------------------------------------------


def replay(
    world: World,
    messages: Sequence[TranscriptEntry],
    pool: Rows,
    picks: Sequence[Tensor],
    *,
    together: int = 64,
    compile: bool = False,
    notes: set[str] | None = None,
) -> Iterator[Up]:
    """Yield what shadow i answers to the last of `messages`, after getting all of them, with the records
    `pool[picks[i]]`.

    `together` shadows are held at a time; if it is 1, each is trained alone.
    """
    if world.setting.start is not None:
        raise ThreatError(
            "the clients started as another run left them, and the messages of that run are not in this transcript: "
            "shadows would start untrained. Attack a run without start."
        )
    notes = set() if notes is None else notes
    k = messages[0].client
    for first in range(0, len(picks), together):
        numbers = range(first, min(first + together, len(picks)))
        sites = [_shadow(world, k, seed_of("replay", k, i), (pool[0][picks[i]], pool[1][picks[i]])) for i in numbers]
        states: list[bytes | None] = [None] * len(sites)
        replies: list[bytes] = []
        for entry in messages:
            results = [turn.result for turn in _perform(world, sites, entry, states, compile, notes)]
            states, replies = [state for state, _ in results], [reply for _, reply in results]
        yield from (decode(reply, Up, device=world.device) for reply in replies)


def _perform(
    world: World,
    sites: Sequence[Site],
    entry: TranscriptEntry,
    states: Sequence[bytes | None],
    compile: bool,
    notes: set[str],
) -> list[Turn]:
    """Send one message to several shadows. A turn's result is the state after it and the reply, as bytes."""
    message, device = encode(entry.record()), world.device
    turns = []
    for site, state in zip(sites, states, strict=True):
        generators = Globals(device)
        generators.seed(site.seed, f"client {entry.client}", entry.round, entry.ask)
        turns.append(_turn(world, site, entry, message, state, generators))
    with seeded("replay", device=device):  # so that the caller's generators stay as they are
        try:
            _take_turns(turns, compile, notes)
        except FedauditError:
            raise
        except Exception as e:
            raise ThreatError(
                f"client {entry.client}'s {entry.fn} of round {entry.round} cannot be replayed from what the view "
                f"shows: {type(e).__name__}: {e}"
            ) from e
    return turns


def _turn(
    world: World, site: Site, entry: TranscriptEntry, message: bytes, state: bytes | None, generators: Globals
) -> Turn:
    """Return a turn that gives one message to one shadow, as `run_task` would."""
    t, ask = entry.round, entry.ask

    def work() -> tuple[bytes, bytes]:
        meter = Meter("replay", t, world.device)
        received = decode(message, Down, device=world.device)
        client: Client = open_client(site, t, ask, meter, state, message=received)
        reply = find_function(world.method, entry.fn)(client, received)
        kept = client.settle()
        reply, _ = client.release(reply)
        after = state_after(client, kept)
        if world.compression is not None:  # an attacker would see the reply only after its compression
            sent = decode(message, Down, device=world.device)
            reply = decode(encode(reply, world.compression, sent), Up, device=world.device, answered=lambda: sent)
        return encode(after), encode(reply)

    return Turn(work, generators)


# --- what is kept of them --------------------------------------------------------------------------------------------


def signature(
    world: World, messages: Sequence[TranscriptEntry], pool: Rows, picks: Sequence[Tensor], *more: object
) -> str:
    """Return a name for what a replay computes, made from its content, so that nothing stale is ever found under it."""
    h = hashlib.blake2b(digest_size=16)
    setting = world.setting.model_dump(exclude={"seed", *EXECUTION})
    rest = [[e.fn, e.round, e.ask, e.digest] for e in messages]
    h.update(json.dumps([setting, world.archs, rest, messages[0].client, _code(world), *more], sort_keys=True).encode())
    for tensor in (*pool, *picks):
        flat = tensor.detach().cpu().contiguous()
        h.update(f"{flat.dtype}{list(flat.shape)}{xxhash.xxh3_128_hexdigest(flat.numpy().data)}".encode())
    return h.hexdigest()


def _code(world: World) -> list[str]:
    """Return the versions of everything that computes: the harness, the method, torch, the kind of device."""
    return [harness((*ROOMS, "attack")), source_of_method(world.method), torch.__version__, world.device.type]


def answers(
    world: World,
    messages: Sequence[TranscriptEntry],
    field: str,
    pool: Rows,
    picks: Sequence[Tensor],
    *,
    folder: Path,
    together: int,
    compile: bool,
    notes: set[str],
    tell: Watch = unwatched,
) -> Tensor:
    """Return the logits of each shadow's uploaded model (its reply's `field`) on the whole pool: (shadows, rows,
    classes).

    They are kept in `folder` under the signature. Only a shadow's answers are needed, and they are small.
    """
    path = folder / f"{signature(world, messages, pool, picks, field, together, compile)}.safetensors"
    if path.exists():
        try:
            found = safetensors.torch.load(path.read_bytes())
            with safetensors.safe_open(path, framework="pt") as file:
                notes.update(json.loads(file.metadata()["notes"]))
            return found["logits"].to(world.device)
        except (SafetensorError, KeyError, TypeError, ValueError):
            path.unlink()  # it is damaged, and is made again
    own: set[str] = set()
    rows = []
    replies = replay(world, messages, pool, picks, together=together, compile=compile, notes=own)
    tell(0, len(picks), f"{min(together, len(picks))} of {len(picks)} shadows at a time")
    for number, reply in enumerate(replies, 1):
        tell(number, len(picks), f"shadow {number} of {len(picks)}")
        with seeded("replay"):
            model = world.build(world.archs[messages[0].client])
        model.load_state_dict(getattr(reply, field))
        rows.append(logits(model, pool[0]))
    table = torch.stack(rows)
    kept = {"logits": table.cpu().contiguous()}
    write_atomic(path, safetensors.torch.save(kept, metadata={"notes": json.dumps(sorted(own))}))
    notes.update(own)
    return table


def logits(model: nn.Module, x: Tensor, batch: int = 1024) -> Tensor:
    """Return the model's outputs in evaluation mode, computed a batch at a time."""
    return in_chunks(model.eval(), x, batch)
