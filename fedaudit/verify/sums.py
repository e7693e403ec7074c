"""Checks of sums of updates: their facts from the transcript's rows, and what they cost each client.

A secure sum leaves its phases in the transcript: who was invited on which terms, who advertised keys, shared, masked
and helped. A noised sum leaves what the server computed. Both must be what setting and policy ask for. Whether the sum
is that of the masked vectors, and its noise the promised one, only `rerun` can tell.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

from fedaudit.aggregation.secure import graph
from fedaudit.aggregation.secure.ring import Ring
from fedaudit.errors import FedauditError
from fedaudit.privacy.ledger import ClientLedger, LedgerEntry
from fedaudit.privacy.updates import Guarantee
from fedaudit.runtime.guarantee import guarantee_of
from fedaudit.runtime.run_record import RoundRecord, SumRecord
from fedaudit.runtime.sums import at_the_clip, last_sum, own_noise
from fedaudit.verify.case import RECORD, Case
from fedaudit.verify.sum_rows import SumRows

INDEX = "transcript/index.jsonl"
FIGURE = "sums of clients"
UPDATE = " (update)"  # ends the name of what a sum's entry in the ledger is for
UNSEEN = {"cut_off"}  # clients alone know it
CLOSE = 1e-9


def check_sums_of_clients(case: Case) -> None:
    """Check the facts of every sum in the record. The transcript must be whole."""
    if not case.sums and not any(row.sums for row in case.record.rounds):
        # References such as local training send messages without a field.
        sent = any(entry.direction == "up" and entry.fields for entry in case.transcript.entries())
        if case.record.setting.aggregate == "secure" and sent:
            case.found.contradicted(FIGURE, INDEX, "rows of sums", "none", "secure sums", "as the setting says")
        return
    wrong = False
    try:
        guarantee = guarantee_of(case.record.setting)
        for i, row in enumerate(case.record.rounds):
            rows = [of for (t, _), of in sorted(case.sums.items()) if t == row.round]
            wrong = _check_invitations(case, guarantee, rows) or wrong
            wrong = _check_round(case, guarantee, i, row, rows) or wrong
    except (FedauditError, KeyError, IndexError, ValueError, AttributeError, TypeError) as e:
        case.found.contradicted(FIGURE, INDEX, "rows of sums", "sums", f"{type(e).__name__}: {e}"[:200])
        return
    if not wrong:
        case.found.recomputed(FIGURE, f"{len(case.sums)} sums: who took part, on which terms, divisors and noise")
        case.found.word("numbers cut off in sums", "only the clients saw them")


def _check_invitations(case: Case, guarantee: Guarantee | None, rows: list[SumRows]) -> bool:
    """Note where clients were invited on other terms than those of the setting; return whether they were."""
    setting = case.record.setting
    for of in rows:
        if of.secure != (setting.aggregate == "secure"):
            at = f"round {of.t}, ask {of.ask}"
            case.found.contradicted(FIGURE, INDEX, at, "secure" if of.secure else "plain", setting.aggregate)
            return True
        for k, (down, _) in sorted(of.phase("advertise").items()):
            said = {name: down[name] for name in ("clients", "threshold", "bound", "largest")}
            now = {
                "clients": len(of.invited), "threshold": setting.threshold,
                "bound": own_noise(guarantee, len(of.invited), setting)[2],
                "largest": said["largest"] if said["largest"] in _weights(case, guarantee) else 1.0,
            }  # fmt: skip
            if name := next((key for key in now if not math.isclose(said[key], now[key], rel_tol=CLOSE)), None):
                at = f"row {down.seq}: to client {k}, Invited.{name}"
                case.found.contradicted(FIGURE, INDEX, at, said[name], now[name], "as the setting says")
                return True
    return False


def _weights(case: Case, guarantee: Guarantee | None) -> set[float]:
    """Return what may be the largest weight: under a guarantee all weigh the same, else a method may weigh by n."""
    return {1.0} if guarantee is not None else {1.0, float(max(case.record.data.members, default=1))}


def _check_round(
    case: Case, guarantee: Guarantee | None, i: int, row: RoundRecord, rows: list[SumRows]
) -> bool:  # fmt: skip
    said = [one.model_dump(exclude=UNSEEN) for one in row.sums]
    now, last = [], last_sum(case.record.rounds[:i])
    for j, of in enumerate(rows):
        one = row.sums[j] if j < len(row.sums) else None
        here = None if guarantee is None else at_the_clip(guarantee, last)
        now.append(_record(case, here, of, one).model_dump(exclude=UNSEEN))
        last = one
    before = len(case.found.list)
    same = case.found.compare(FIGURE, RECORD, f"rounds.{i}.sums", said, now, close=CLOSE)
    if same:
        del case.found.list[before:]  # one finding for all rounds
    return not same


def _record(case: Case, guarantee: Guarantee | None, of: SumRows, said: SumRecord | None) -> SumRecord:
    """Return a sum's record from its rows. Whether a method weighs by n, and so the divisor, is taken from `said`."""
    setting, invited, stayed = case.record.setting, len(of.invited), len(of.stayed)
    facts: dict[str, Any] = {}
    if guarantee is not None:
        facts = {"clip": guarantee.policy.clip, "sigma": guarantee.sigma, "where": guarantee.policy.where}
        if guarantee.vote_sigma is not None:
            facts["within"] = said.within if said is not None else None  # only `rerun` can tell
        expected = setting.participation * setting.clients
        divisor = max(expected, 1.0) if guarantee.poisson else float(invited)
    else:
        divisor = float(stayed)
        if said is not None and said.divisor != divisor and said.divisor in _numbers(of):
            divisor = said.divisor
    if of.secure:
        first = of.invited[0]  # all of them were sent the same
        down = of.phase("advertise")[first][0]
        neighbours = max(map(len, of.neighbours().values()))
        step = down["bound"] * down["largest"] / Ring((), invited).levels
        facts |= {
            "secure": True, "advertised": len(of.answered("advertise")), "shared": len(of.answered("share")),
            "helped": len(of.answered("unmask")), "neighbours": neighbours,
            "threshold": graph.needed(setting.threshold, neighbours + 1), "bound": down["bound"],
            "error": stayed * step / (2 * divisor),
        }  # fmt: skip
    fn = str(of.asked[of.stayed[0]][0].fn)
    return SumRecord(ask=of.ask, fn=fn, invited=invited, stayed=stayed, divisor=divisor, **facts)


def _numbers(of: SumRows) -> set[float]:
    """Return the numbers in a sum: one of them is the sum of the weights, if there are weights."""
    if of.total is None:
        return set()
    values = (of.total.row["tree"]["r"][1].get(name) for name in of.total.fields)
    return {float(value) for value in values if isinstance(value, int | float)}


# --- the ledger ------------------------------------------------------------------------------------------------


def check_update_entries(case: Case, guarantee: Guarantee) -> list[tuple[str, str, str]]:
    """Return where clients' entries for sums are not what the policy on updates costs: place, recorded, recomputed."""
    billed: dict[int, list[tuple[int, LedgerEntry]]] = defaultdict(list)
    for _, of in sorted(case.sums.items()):
        if of.total is None:
            return [(f"round {of.t}, ask {of.ask}", "no sum", "the sum of the replies")]
        entry = _entry(case, at_the_clip(guarantee, _before(case, of)), of)
        for k in range(guarantee.clients) if guarantee.amplified else of.invited:
            billed[k].append((of.t, entry))
    wrong = []
    for ledger in case.record.ledger:
        again = ClientLedger(client=ledger.client, n=ledger.n, delta=ledger.delta)
        for t, entry in billed.pop(ledger.client, []):
            again.add(entry, t)
        said = [entry for entry in ledger.entries if entry.field.endswith(UPDATE)]
        if (apart := _first_apart(said, again.entries)) is not None:
            a, b = apart
            wrong.append((f"ledger of client {ledger.client}, {(b or a).field}", _words(a), _words(b)))  # type: ignore[union-attr]
    wrong += [(f"ledger of client {k}", "nothing", _words(rows[0][1])) for k, rows in sorted(billed.items()) if rows]
    return wrong


def _before(case: Case, of: SumRows) -> SumRecord | None:
    """Return the sum before this one, in its round or in the last round that has any."""
    earlier = [row for row in case.record.rounds if row.round < of.t]
    here = [one for row in case.record.rounds if row.round == of.t for one in row.sums if one.ask < of.ask]
    return here[-1] if here else last_sum(earlier)


def _entry(case: Case, guarantee: Guarantee, of: SumRows) -> LedgerEntry:
    assert of.total is not None  # the caller has looked
    fields = of.total.fields.values()
    kinds = sorted({facts.kind for facts in fields if facts.role is not None and facts.kind not in (None, "count")})
    grid = None
    if of.secure:
        levels = Ring((), len(of.invited)).levels
        grid = own_noise(guarantee, len(of.invited), case.record.setting)[2] / levels
    return guarantee.entry(f"{of.total.message}{UPDATE}", (kinds or ["weights"])[0] or "weights", grid)


def _first_apart(
    a: list[LedgerEntry], b: list[LedgerEntry]
) -> tuple[LedgerEntry | None, LedgerEntry | None] | None:  # fmt: skip
    """Return the first entries that differ by more than rounding; None if all are the same."""
    for x, y in itertools.zip_longest(a, b):
        if x is None or y is None or not _alike(x.model_dump(), y.model_dump()):
            return x, y
    return None


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(
        math.isclose(a[name], b[name], rel_tol=CLOSE) if isinstance(a[name], float) and b[name] else a[name] == b[name]
        for name in a
    )


def _words(entry: LedgerEntry | None) -> str:
    if entry is None:
        return "no entry"
    return (
        f"{len(entry.rounds)} rounds {entry.rounds[:4]}, {entry.mechanism}, noise x {entry.noise_multiplier:.6g}, clip "
        f"{entry.clip}, for one {entry.unit}, to {entry.to}, {entry.relation}, rate {entry.sample_rate:.4g}, delta "
        f"{entry.delta}, claim {entry.claim}, grid {entry.grid}"
    )
