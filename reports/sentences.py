"""Rows in sentences: what stands out, what a method gives away, and how the figures were made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedaudit.epsilon.joint_verdict import judged, told
from fedaudit.metrics.cost import OUTER, asked, uses_gpu
from fedaudit.metrics.guarantee import OPEN_MODELS
from fedaudit.reports.attack_rows import attacks_of, best_attack
from fedaudit.reports.leak_tests import auc_cell, leaks_by_seed, pooled_attacks
from fedaudit.reports.runs import Group, command
from fedaudit.reports.summary_rows import SummaryRow, refused
from fedaudit.reports.tests_over_seeds import LEVEL, SEEDS
from fedaudit.reports.vocabulary import BY_KEY, VIA, kind_text, protection_text, seen_by, text
from fedaudit.runtime.attack_result import ReconstructionResult, measures_of
from fedaudit.significance import LEVEL as REFUTES

LIMITS = (
    "An attack that finds nothing does not prove that nothing can be found: it is a lower bound on what leaks.",
    "The ledger's guarantee is about released values. It assumes the stated neighbouring relation, and exact "
    "arithmetic; message sizes and timing are not in it.",
    "The best attack is chosen after the fact, by its mean over seeds, from all attacks that ran: a maximum of several "
    "noisy figures is a little too high, for every row alike if they faced the same attacks.",
    "Intervals over seeds are Student's t at 95 %, which treats seeds as independent draws of a normal variable. Two "
    "seeds give very wide intervals; use five or more for comparisons.",
    "Two figures count as different if a t-test over seeds (paired by seed if both have it, otherwise Welch's) "
    f"gives p < {LEVEL:g} after Holm's correction for all comparisons with the same reference, and both have at least "
    f"{SEEDS} seeds. Counted and computed figures (bytes, ledger) carry no mark. A setting near chance is never the "
    "best of a column: if nothing was learnt, attacks find nothing.",
    "The interval of an AUC is over the candidates of all seeds, which are other records in each; all other intervals "
    "over seeds are as above.",
    "Accuracy is that of the last round. The best round on test data is not reported: nobody could have chosen it.",
    "Peak memory of CPU runs is that of the process: runs that shared a process have one figure.",
)


def _membership(row: SummaryRow) -> str:
    """Return what membership attacks show over all seeds, corrected for how many were tried."""
    best = best_attack(row.group, "membership", "auc")
    above = leaks_by_seed(best) if best else []
    tried = pooled_attacks(row.group)
    auc = row.cells["auc"]
    found = f"AUC {auc.value:.3f} ({auc.detail})"
    if not tried or (not tried[0].beyond and any(one.broken for one in tried)):
        return f"Membership attacks say nothing, {found}: the audit split is broken."
    first = tried[0] if tried[0].beyond else next((one for one in tried if one.low > 0.5), tried[0])
    over = f"AUC {first.value:.3f} [{first.low:.3f}, {first.high:.3f}] by {first.found.name}"
    among = f"of {len(tried)} attacks, p = {first.adjusted:.2g} corrected" if len(tried) > 1 else f"p = {first.p:.2g}"
    if first.beyond and first.broken:
        value, low, high = (f"{100 * (end - 0.5):.1f}" for end in (first.value, first.low, first.high))
        return (
            "Members can be told from others better than from the records alone, though the audit split is broken: the "
            f"AUC of {first.found.name} is {value} points [{low}, {high}] above that of the best blind baseline "
            f"({among})."
        )
    if first.beyond:
        where = "in each seed" if above and all(above) else "over all seeds"
        return f"Members can be told from others better than by guessing, {where}: {over} ({among})."
    if any(one.low > 0.5 for one in tried) or any(above):
        return f"Undecided: {over} is above chance by itself, but not when corrected for all attacks ({among})."
    return (
        f"The best membership attack that ran shows no leak, {found}: over all seeds none of {len(tried)} is above "
        "chance beyond its interval. That is no guarantee."
    )


BOUNDS_OF = (  # the columns of lower bounds, and who found them
    ("lower", "An attack on planted records showed"),
    ("noise", "The noise that was found amounts to"),
)


def verdict(row: SummaryRow) -> list[str]:
    """Return one setting in plain words: the guarantee, then what attacks found."""
    epsilon, auc = row.cells["epsilon"], row.cells["auc"]
    if refused(row.group):
        return ["Not run: the privacy setting does not apply to what this method sends."]
    if epsilon.value is None:
        lines = [f"No guarantee can be stated: {epsilon.reason}."]
    elif epsilon.value == 0:
        lines = [
            "Nothing computed from the clients' records crosses the wire. This says nothing about the final models."
        ]
    elif math.isinf(epsilon.value):
        lines = [f"Nothing is guaranteed: {epsilon.detail}."]
        if row.open_models:
            lines.append(f"This is so although the messages are covered ({row.messages}).")
    else:
        lines = [f"Guaranteed, for {row.unit} and all rounds together: ε ≤ {epsilon.value:.3g} ({epsilon.detail})."]
        if row.weak_delta:
            lines.append("Its δ is 1/n or more: publishing one record at random would meet the same guarantee.")
    found = [f"{words} ε ≥ {row.cells[key].value:.3g}" for key, words in BOUNDS_OF if row.cells[key].value is not None]
    if found:
        lines.append(f"{'. '.join(found)}{_said_of_claims(row)}.")
    if auc.value is None:
        lines.append(f"Membership attacks: {auc.reason or 'none'}.")
    else:
        lines.append(_membership(row))
    identified = row.cells["identified"]
    if identified.value is not None:
        share = text(BY_KEY["identified"], identified.value)
        worth = f", {identified.flag}" if identified.flag else ""
        lines.append(f"The best reconstruction identifies {share} of its images{worth}: {identified.detail}.")
    return lines


def _said_of_claims(row: SummaryRow) -> str:
    """Return what all audits of all seeds say together, and at which level."""
    audits = [audit for run in row.group.runs for audit in run.audits]
    at = f"at a level of {REFUTES:g}, corrected for all audits ({sum(a.trials > 0 for a in audits)})"
    return {
        "refuted": f": the claim is refuted ({at})",
        "suspicious": f": suspicious, so repeat the audit; a claim is refuted {at}",
        "cannot tell": f"; the audits could not tell if the noise is as promised {at}",
        "not refuted": f"; no claim is refuted {at}",
    }[told(audits)]


def audit_rows(row: SummaryRow) -> list[dict[str, Any]]:
    """Return each audit with its seed. `together` is its verdict when all audits are considered."""
    audits = [(run.seed, audit) for run in row.group.runs for audit in run.audits]
    words = judged([audit for _, audit in audits])
    return [
        {"seed": seed, **audit.model_dump(), "together": word}
        for (seed, audit), (_, word) in zip(audits, words, strict=True)
    ]


def releases(rows: Sequence[SummaryRow]) -> list[dict[str, Any]]:
    """Return what a method's clients send that was computed from their records. `rows` are its privacy settings."""
    fields: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(rows):
        entries = [entry for client in row.first.ledger for entry in client.entries]
        declared = {release.field: release for release in row.first.releases if release.role == "private"}
        for name in dict.fromkeys(
            [*(e.field for e in entries if e.kind == "training"), *declared, *(e.field for e in entries)]
        ):
            of = [entry for entry in entries if entry.field == name]
            release = declared.get(name)
            kind = of[0].kind if of else (release.kind if release else None)
            via = VIA.get(release.via or "", "") if release else ""
            field = fields.setdefault(
                name,
                {
                    "field": name, "kind": kind or "", "what": kind_text(kind), "via": via,
                    "seen": _seen(row, kind),
                    "protection": [None] * len(rows),
                },
            )  # fmt: skip
            field["protection"][number] = protection_text(of)
    return list(fields.values())


def _seen(row: SummaryRow, kind: str | None) -> str:
    return "stays on the client" if kind == "training" else f"seen by {seen_by(row.first.ledger, kind or '')}"


def ledger_rows(row: SummaryRow) -> list[dict[str, str]]:
    """Return the ledger of the worst-off client of the first seed, kind by kind."""
    clients = [client for client in row.first.ledger if client.entries]
    if not clients:
        return []
    worst = max(clients, key=lambda c: math.inf if c.epsilon is None else c.epsilon)
    lines = [
        {"what": kind.replace("_", " "), "epsilon": text(BY_KEY["epsilon"], value), "note": ""}
        for kind, value in sorted(worst.by_kind.items())
    ]
    for relation, total in worst.by_relation.items():
        if relation == "any":
            continue
        by = ", ".join(f"{name} {value:.4g}" for name, value in total.by_accountant.items() if math.isfinite(value))
        note = "; ".join(part for part in (total.reason, f"accountants: {by}" if by else "") if part)
        what = f"the part with noise, composed ({relation})"
        lines.append({"what": what, "epsilon": text(BY_KEY["epsilon"], total.epsilon), "note": note})
    together = "not composed" if worst.epsilon is None else text(BY_KEY["epsilon"], worst.epsilon)
    note = "something is sent without noise" if worst.epsilon == math.inf else f"δ = {worst.delta:.2g}"
    if row.open_models:
        lines.append({"what": "published models", "epsilon": text(BY_KEY["epsilon"], math.inf), "note": OPEN_MODELS})
        together, note = text(BY_KEY["epsilon"], math.inf), f"the messages alone: {row.messages}"
    lines.append({"what": f"client {worst.client}, all together", "epsilon": together, "note": note})
    return lines


MEASURES = {
    "membership": ("auc", "tpr", "balanced_accuracy"),
    "reconstruction": ("identification", "mse", "psnr", "ssim", "cosine"),
    "histogram": ("error", "uniform", "gain", "presence"),
    "participation": ("auc",),
}
BOUNDS = {
    **dict.fromkeys(("auc", "tpr", "balanced_accuracy", "identification", "error", "uniform", "presence"), (0.0, 1.0)),
    **dict.fromkeys(("ssim", "cosine", "gain"), (-1.0, 1.0)),
    "mse": (0.0, math.inf),
}
MEASURE_WORDS = {
    "auc": "AUC",
    "tpr": "TPR at 1 % FPR",
    "balanced_accuracy": "balanced accuracy",
    "identification": "identified",
    "mse": "MSE",
    "psnr": "PSNR, dB",
    "ssim": "SSIM",
    "cosine": "cosine",
    "error": "error of the label shares",
    "uniform": "error of uniform shares",
    "gain": "gain",
    "presence": "AUC of held classes",
}


def attack_rows(row: SummaryRow) -> list[dict[str, Any]]:
    """Return every attack on a setting, with its figures or the reason why it did not run."""
    lines = []
    for found in sorted(attacks_of(row.group), key=lambda f: (f.claims, f.blind, f.threat, f.attack)):
        measures = MEASURES.get(found.claims, ())
        others = [k for r in found.results.values() for k, v in measures_of(r).items() if v.value is not None]
        figures = {}
        for measure in dict.fromkeys([*measures, *(k for k in others if k not in ("advantage", "advantage_best"))]):
            one = found.claims == "membership" and measure == "auc"  # one AUC has one interval on all of a page
            cell = auc_cell(found) if one else found.cell(measure, BOUNDS.get(measure, (-math.inf, math.inf)))
            if cell.value is not None:
                figures[MEASURE_WORDS.get(measure, measure.replace("_", " "))] = cell
        first = next(iter(found.results.values()), None)
        rebuilt = first if isinstance(first, ReconstructionResult) else None
        baselines = {name: of.identification.value for name, of in rebuilt.baselines.items()} if rebuilt else {}
        lines.append(
            {
                "attack": found.attack, "settings": found.settings, "threat": found.threat, "claims": found.claims,
                "blind": found.blind,
                "figures": figures, "reason": found.reason, "verdict": first.verdict if first else "",
                "seeds": len(found.results), "baselines": {k: v for k, v in baselines.items() if v is not None},
                "beats": rebuilt.beats_baselines if rebuilt else None,
                "left_out": list(dict.fromkeys(first.left_out)) if first else [],
            }
        )  # fmt: skip
    return lines


def traffic(row: SummaryRow) -> list[dict[str, Any]]:
    """Return bytes by field, for one client and round of the first seed. Headers are the rest of what was sent."""
    times = asked(row.first) or 1
    lines: list[dict[str, Any]] = [
        {"direction": t.direction, "field": t.field, "payload": t.payload / times, "wire": t.wire / times}
        for t in row.first.traffic
    ]
    frames = [line for line in lines if line["field"].endswith("(frame)")]
    kept = [line for line in lines if not line["field"].endswith("(frame)")]
    for direction in ("up", "down"):
        wire = sum(line["wire"] for line in frames if line["direction"] == direction)
        if wire:
            kept.append({"direction": direction, "field": "names and shapes", "payload": 0, "wire": wire})
    largest = max((line["wire"] for line in kept), default=0) or 1
    return [
        {**line, "share": line["wire"] / largest}
        for line in sorted(kept, key=lambda x: (x["direction"] != "up", -x["wire"]))
    ]


def phases(row: SummaryRow) -> list[dict[str, Any]]:
    """Return seconds by party and phase, over all clients. Phases marked `inside` are parts of those above them."""
    sums: dict[tuple[str, str], float] = {}
    gpu = uses_gpu(row.first)
    for r in row.first.timings:
        who = "clients" if r.party.startswith("client") else r.party
        key = (who, r.phase)
        sums[key] = sums.get(key, 0.0) + ((r.gpu_s if gpu else r.wall_s) or 0.0)
    largest = max(sums.values(), default=0.0) or 1.0
    order = {"clients": 0, "server": 1}
    return [
        {"party": who, "phase": phase, "seconds": s, "share": s / largest, "inside": phase not in (*OUTER, "evaluate")}
        for (who, phase), s in sorted(sums.items(), key=lambda x: (order.get(x[0][0], 2), x[0][1] not in OUTER, -x[1]))
        if s / largest > 0.001
    ]


def made(group: Group) -> dict[str, Any]:
    """Return what is needed to repeat a row."""
    record = group.runs[0].record
    setting = record.setting.model_dump(mode="json", exclude={"seed"})
    return {
        "label": group.label,
        "command": command(record.setting),
        "seeds": [run.seed for run in group.runs],
        "setting": setting,
        "device": record.device,
        "finished": max((run.record.finished or "" for run in group.runs), default=""),
        "digests": {run.seed: run.record.transcript_digest for run in group.runs},
        "models": {arch: facts.model_dump() for arch, facts in record.models.items()},
    }


def versions(rows: Sequence[SummaryRow]) -> list[str]:
    """Return each set of versions that runs were made with."""
    sets = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in run.record.versions.items()) + f"; {run.record.device}"
        for row in rows
        for run in row.group.runs
    )
    return list(sets)
