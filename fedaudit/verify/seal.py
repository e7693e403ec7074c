"""Checks of a run's seal: every sealed file is as it was, and a signature is that of the key one expects."""

from __future__ import annotations

from pathlib import Path

from fedaudit.errors import RunError
from fedaudit.runtime.seal import NAME, Seal, digest_over, read_seal
from fedaudit.verify.case import Case
from fedaudit.verify.signature import check_signature

FIGURE = "seal"


def check_seal(case: Case, key: Path | None = None) -> Seal:
    """Check a run folder's seal, and its signature if it has one or a key is given. Return the seal as of now."""
    now = Seal.of(case.folder)
    try:
        seal = read_seal(case.folder)
    except RunError as e:
        case.found.contradicted(FIGURE, NAME, "the file", str(e)[:200], now.digest)
        return now
    if seal is None:
        if key is not None:
            case.found.contradicted(FIGURE, NAME, "the file", "nothing", "a seal signed by the key")
        else:
            case.found.word(FIGURE, f"the folder is not sealed (`fedaudit seal {case.folder}` seals it as it is)")
        return now
    broken = seal.broken_by(now)
    for name in broken[:5]:
        said, found = seal.files.get(name), now.files.get(name)
        reason = "it was added" if said is None else "it is missing" if found is None else "it was changed"
        case.found.contradicted(
            FIGURE, name, "the file", said or "not sealed", found or "nothing", f"{reason} after the folder was sealed"
        )
    if seal.digest != digest_over(seal.files):
        case.found.contradicted(FIGURE, NAME, "digest", seal.digest, digest_over(seal.files), "over its own files")
        broken.append(NAME)
    if seal.signature is not None or key is not None:
        if why := check_signature(seal, key):
            case.found.contradicted("signature", NAME, "signature", why, "a signature of the seal by the key")
        elif key is None and seal.signature is not None:
            whose = f"by the key {seal.signature.public_key[:16]}..."
            case.found.word("signature", f"it holds, {whose}; --key tells whether that is the author's key")
        else:
            case.found.recomputed("signature", f"by the key in {key}")
    if not broken:
        unsigned = "" if seal.signature is not None else "; unsigned, so it shows damage and slips, not forgery"
        case.found.recomputed(FIGURE, f"{seal.digest[:16]}..., {len(seal.files)} files{unsigned}")
    return now
