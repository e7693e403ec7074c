"""Keeps the raw scores of membership attacks beside the record, to score them anew without attacking again.

`attack_run` leaves one file per attack and threat, RUN/scores/THREAT/ATTACK.safetensors. To read them:

    for part in kept(folder, attack="loss"):            # one `KeptScores` per client, of the last round
        part.client, part.round, part.scores, part.member, part.labels

`pooled_scores(folder, "loss")` has all clients' candidates in one column, as (scores, member) in NumPy. The candidates
of a client, and their order, are the same for every attack on a run: scores of two attacks are paired row by row.

A file keeps what the attack gave, in its own number type, with the truth and the classes; a blind baseline that
gives groups instead of scores keeps the groups. A run that goes on and is attacked again adds a round; scores of a
transcript that has changed since, of other settings or of other code of the attack are replaced.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedaudit.attack.claims import Attacked, Claims, Groups
from fedaudit.attack.score import pooled
from fedaudit.errors import RunError
from fedaudit.runtime.attack_result import AttackResult
from fedaudit.runtime.checkpoint import write_atomic
from fedaudit.runtime.run_record import RunRecord, read_record
from fedaudit.stored_model import StoredModel
from fedaudit.wire.transcript import Transcript

FOLDER = "scores"
COLUMNS = ("scores", "member", "labels")
LAST = "last"  # a column that is there if the scores are of several rounds: those of the last round alone


class About(StoredModel):
    """Says what a file of scores is about. It is stored in the file's metadata."""

    result: AttackResult  # who attacked, by which code, with which settings
    groups: bool  # True for a blind baseline that gives groups, from which the scorer learns
    digests: dict[int, str] = Field(default_factory=dict)  # digests of the transcript, by its last round
    notes: dict[int, list[str]] = Field(default_factory=dict)  # by client


@dataclass(frozen=True)
class KeptScores:
    """The scores that one attack gave for the candidates of one client, from a transcript that ended with one round."""

    attack: str
    threat: str
    client: int
    round: int
    scores: Tensor  # one per candidate, higher for "was trained on"; or groups, if `groups`
    member: Tensor  # the truth
    labels: Tensor  # the candidates' classes
    groups: bool = False
    notes: tuple[str, ...] = ()
    last: Tensor | None = None  # scores of the last round alone, if `scores` are of several

    def attacked(self) -> Attacked:
        """Return this as the scorer takes it, without images."""
        claims = Groups(self.scores) if self.groups else Claims(self.scores, self.notes, self.last)
        return Attacked(self.client, claims, torch.empty(0), self.labels, self.member)


def keep(folder: Path, record: RunRecord, result: AttackResult, parts: Sequence[Attacked]) -> None:
    """Keep the scores of one attack on some clients of a run; those of other clients and rounds stay."""
    path, last = _path(folder, result.attack, result.threat), record.rounds[-1].round if record.rounds else 0
    about = About(
        result=AttackResult(**{name: getattr(result, name) for name in AttackResult.model_fields}),
        groups=isinstance(parts[0].claims, Groups),
        digests={last: record.transcript_digest},
    )
    tensors: dict[str, Tensor] = {}
    if path.exists():
        before, old = _read(path)
        if (before.result, before.groups) == (about.result, about.groups):
            valid = {t: digest for t, digest in before.digests.items() if _is_still(folder, record, t, digest)}
            about.digests, about.notes = valid | about.digests, before.notes
            tensors = {key: tensor for key, tensor in old.items() if _parsed(key)[0] in valid}
    for part in parts:
        claims = part.claims
        given = claims.groups if isinstance(claims, Groups) else claims.scores
        for column, tensor in zip(COLUMNS, (given, part.member, part.y), strict=True):
            tensors[f"round {last}, client {part.client}: {column}"] = tensor.detach().cpu().contiguous().clone()
        tensors.pop(alone := f"round {last}, client {part.client}: {LAST}", None)
        if isinstance(claims, Claims) and claims.last is not None:
            tensors[alone] = claims.last.detach().cpu().contiguous().clone()
        about.notes[part.client] = list(claims.notes) if isinstance(claims, Claims) else []
    write_atomic(path, save(tensors, metadata={"fedaudit": about.model_dump_json()}))


def kept(
    folder: Path | str,
    *,
    attack: str | None = None,
    threat: str | None = None,
    clients: Iterable[int] | None = None,
    all_rounds: bool = False,
    record: RunRecord | None = None,
) -> list[KeptScores]:
    """Return the scores that attacks on a run left, by attack, threat, round and client.

    They are those of the record's last round, unless all are asked for. The list is empty if nothing was kept of this
    transcript. `record` is the run's, if the caller has read it.
    """
    folder = Path(folder)
    record = read_record(folder) if record is None else record
    chosen = None if clients is None else set(clients)
    found = []
    paths = sorted((folder / FOLDER).glob("*/*.safetensors"))
    if attack is not None and threat is not None:
        paths = [path for path in paths if path == _path(folder, attack, threat)]
    for path in paths:
        about, tensors = _read(path)
        who = about.result
        if attack not in (None, who.attack) or threat not in (None, who.threat):
            continue
        for t, k in sorted({_parsed(key)[:2] for key in tensors}):
            if chosen is not None and k not in chosen:
                continue
            digest = about.digests.get(t)
            if _is_last(record, t, digest) or (all_rounds and _is_still(folder, record, t, digest)):
                scores, member, labels = (tensors[f"round {t}, client {k}: {column}"] for column in COLUMNS)
                notes = tuple(about.notes.get(k, ()))
                last = tensors.get(f"round {t}, client {k}: {LAST}")
                found.append(
                    KeptScores(who.attack, who.threat, k, t, scores, member, labels, about.groups, notes, last)
                )
    return found


def pooled_scores(
    folder: Path | str, attack: str, threat: str = "server", clients: Iterable[int] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return scores and truth of all candidates of all clients that an attack was run on."""
    parts = kept(folder, attack=attack, threat=threat, clients=clients)
    if not parts:
        there = sorted({f"{part.attack} by the {part.threat}" for part in kept(folder)})
        raise RunError(
            f"{folder} keeps no scores of {attack} by the {threat}"
            + (f"; it has those of {', '.join(there)}. " if there else ". ")
            + f"`fedaudit attack {folder} --attack {attack} --threat {threat}` leaves them."
        )
    return pooled([part.attacked() for part in parts], attack)


def _path(folder: Path, attack: str, threat: str) -> Path:
    plain = re.sub("[^A-Za-z0-9_.-]", "_", attack)
    if plain != attack:  # so that two names that look the same here get different files
        plain += "-" + hashlib.blake2b(attack.encode(), digest_size=4).hexdigest()
    return folder / FOLDER / threat.replace(":", "-") / f"{plain}.safetensors"


def _parsed(key: str) -> tuple[int, int, str]:
    """Return round, client and column of a key."""
    found = re.fullmatch(r"round (\d{1,9}), client (\d{1,9}): (scores|member|labels|last)", key)
    if found is None:
        raise RunError(f"{key[:60]!r} is not a name of kept scores")
    return int(found[1]), int(found[2]), found[3]


def _is_last(record: RunRecord, t: int, digest: str | None) -> bool:
    return digest == record.transcript_digest and t == (record.rounds[-1].round if record.rounds else 0)


def _is_still(folder: Path, record: RunRecord, t: int, digest: str | None) -> bool:
    """Return whether an earlier round's transcript is the beginning of the present one."""
    return 0 < t <= len(record.rounds) and Transcript(folder / "transcript").digest(t) == digest


def _read(path: Path) -> tuple[About, dict[str, Tensor]]:
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        tensors = load(data)
        about = About.model_validate_json(json.loads(data[8 : 8 + size])["__metadata__"]["fedaudit"])
        keys = {_parsed(key)[:2] for key in tensors}
        for t, k in keys:
            lengths = {tensors[f"round {t}, client {k}: {column}"].shape for column in COLUMNS}
            if (alone := tensors.get(f"round {t}, client {k}: {LAST}")) is not None:
                lengths.add(alone.shape)
            if len(lengths) != 1 or len(next(iter(lengths))) != 1:
                raise ValueError(f"client {k} has columns of different lengths")
        return about, tensors
    except (SafetensorError, ValidationError, OSError, ValueError, KeyError, TypeError, RunError) as e:
        raise RunError(f"{path} does not hold the scores of an attack: {e}. Remove it, and attack again.") from e
