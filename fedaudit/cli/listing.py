"""Texts that the command line prints: lists of methods, attacks and data, and summaries of runs."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fedaudit.errors import SettingError, unknown
from fedaudit.metrics.cost import MEMORY
from fedaudit.metrics.guarantee import OPEN_MODELS, largest_delta, ledger_epsilon, open_models
from fedaudit.metrics.metric import metrics
from fedaudit.metrics.utility import near_chance
from fedaudit.privacy.ledger import unit_in_words
from fedaudit.privacy.mechanisms.base import choices, mechanism_named, mechanism_of
from fedaudit.privacy.policy import TRAINING
from fedaudit.runtime.attack_result import MembershipResult, NotRun, Scored, leak_of, measures_of
from fedaudit.runtime.run_record import EpsilonAudit, RunRecord
from fedaudit.runtime.scores import Accuracy, Reached, Spread
from fedaudit.shape import Shape
from fedaudit.units import bytes_text
from fedaudit.wire.release import Sent

if TYPE_CHECKING:
    from fedaudit.wire.transcript import TranscriptView


def listing(what: str, data_dir: str = ".data") -> list[dict[str, Any]]:
    if what in ("methods", "attacks"):
        from fedaudit import registry

        found = [(name, registry.find(name, what)) for name in registry.names(what)]  # type: ignore[arg-type]
        found.sort(key=lambda row: (getattr(row[1], "tables", ()), row[0]))  # a paper's methods stand together
        return [_class_row(name, cls) for name, cls in found]
    if what == "datasets":
        from fedaudit.data import datasets

        return [_dataset_row(name, data_dir) for name in datasets.names()]
    if what == "models":
        from fedaudit.training import models

        like = {"images": Shape((3, 32, 32)), "rows": Shape((32,)), "tokens": Shape((32,), tokens=1000)}
        rows = [
            {"name": name, "for": " and ".join(of), **models.describe(name, like[of[0]], 10)}
            for name, of in ((name, models.takes(name)) for name in models.names())
        ]
        return rows + [{"name": group, "clients get in turn": ", ".join(of)} for group, of in models.GROUPS.items()]
    if what == "mechanisms":
        return [
            {"name": name, "what it does": mechanism_named(name).summary, "in full": mechanism_named(name).about()}
            for name in choices()
        ]
    from fedaudit.data import partitions

    return [{"name": name, "what it does": text} for name, text in partitions.names().items()]


def short_rows(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a name and a few words for each row, short enough for a line."""
    return [(row["name"], _few_words(row)) for row in rows]


def _few_words(row: dict[str, Any]) -> str:
    if "what it is" in row:
        first = re.split(r"(?<!\bEq)(?<!\bal)\. ", row["what it is"])
        said = first[0] if len(first) == 1 or len(first[0]) > 24 else ". ".join(first[:3])
        return said.replace("\n", " ").rstrip(".")
    if "what it does" in row:
        return str(row["what it does"])
    parts = {key: value for key, value in row.items() if value not in (None, "", row["name"])}
    return ", ".join(f"{key} {'yes' if v is True else 'no' if v is False else v}" for key, v in parts.items())


def details(row: dict[str, Any], cls: type | None = None) -> str:
    """Return the full description of one row, with its settings and its module's docstring."""
    lines = [str(row["name"])]
    for key, value in row.items():
        if key == "settings" and cls is not None:
            lines += ["", "settings (--set NAME=VALUE):"]
            lines += [f"  {name} = {field.default!r}" for name, field in cls.model_fields.items()]  # type: ignore[attr-defined]
        elif key != "name" and value not in (None, ""):
            lines += ["", *textwrap.wrap(f"{key}: {value}", 80)]
    if cls is not None and (doc := inspect.getdoc(inspect.getmodule(cls))):
        lines += ["", doc]
    return "\n".join(lines)


def _class_row(name: str, cls: type) -> dict[str, Any]:
    doc = inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or ""
    options = ", ".join(f"{key}={field.default!r}" for key, field in cls.model_fields.items())  # type: ignore[attr-defined]
    tables = ", ".join(getattr(cls, "tables", ()))
    first = doc.split("\n\n")[0].replace("\n", " ")
    row = {"name": name, **({"in the tables of": tables} if tables else {}), "what it is": first, "settings": options}
    presets = ", ".join(getattr(cls, "presets", {}))
    return {**row, "presets": presets} if presets else row


def _dataset_row(name: str, data_dir: str) -> dict[str, Any]:
    from dataclasses import asdict

    from fedaudit.data import datasets

    facts = asdict(datasets.describe(name))
    facts.pop("name", None)
    return {
        "name": name,
        "here": datasets.available(name, data_dir),
        **{k: None if v is None else str(v) for k, v in facts.items()},
    }


def _reached_lines(reached: Reached) -> Iterator[str]:
    if reached.global_:
        test, own = reached.global_.test, reached.global_.local_test
        yield f"    global model, common test set   {_interval(test)}, n = {test.n}"
        if own:  # records from before this was measured have none
            yield f"    global model, own held-out sets {_spread(own)} over {_clients(own)}"
    if reached.clients:
        if everywhere := reached.clients.global_test:
            yield f"    client models, common test set   {_spread(everywhere)} over {_clients(everywhere)}"
        if held_out := reached.clients.local_test:
            yield f"    client models, own held-out set  {_spread(held_out)} over {_clients(held_out)}"
        if like_own := reached.clients.matched_test:
            yield f"    client models, own classes' mix  {_spread(like_own)} over {_clients(like_own)}"
    for point, of_global in reached.global_points.items():
        yield f"    global model, {point}: {_interval(of_global.test, ' ')}"
    for point, sets in reached.points.items():
        each = {"common": sets.global_test, "own": sets.local_test, "own classes' mix": sets.matched_test}.items()
        values = ", ".join(f"{who} {_spread(row)}" for who, row in each if row)
        yield f"    client models, {point}: {values} over {_clients(sets.global_test or sets.local_test)}"


def _interval(test: Accuracy, gap: str = "  ") -> str:
    return f"{_percent(test.accuracy)}{gap}[{_percent(test.low)}, {_percent(test.high)}]"


def _spread(row: Spread) -> str:
    spread = f"{_percent(row.mean)} ± {_percent(row.std)}"
    if (seen := row.sampled) is None:
        return spread
    return f"{spread} [{_percent(seen.low)}, {_percent(seen.high)}]"


def _clients(row: Spread | None) -> str:
    seen = row.sampled if row else None
    return f"{seen.looked_at:,} of {seen.of:,} clients" if seen else "clients"


def summary(record: RunRecord) -> list[str]:
    """Return a summary of a run, about a dozen lines."""
    setting = record.setting
    absent = sum(len(row.absent) for row in record.rounds)
    missing = f", {absent} answer{'s' * (absent != 1)} missing: clients failed or dropped out" if absent else ""
    failed = [f"  {record.failures}"] if record.failures else []
    lines = [
        f"{setting.method} on {setting.dataset}: {setting.clients} clients, {setting.partition}, "
        f"{len(record.rounds)} of {setting.rounds} rounds, seed {setting.seed} ({record.status}{missing})",
        *failed,
    ]
    last, chosen = record.result.last, record.result.chosen
    same = last is not None and chosen is not None and last.round == chosen.round
    both = [(last, f"last round{', also the one chosen on validation data' if same else ''}")]
    both += [] if same else [(chosen, "round chosen on validation data")]
    for reached, title in both:
        if reached is not None:
            lines += [f"  {title} ({reached.round}):", *_reached_lines(reached)]
    lines += _near_chance(record)
    if (best := record.result.best_test_round) and best.accuracy is not None:
        lines.append(f"  best test round ({best.round}), as papers report it: {_percent(best.accuracy)}")
    for direction in ("up", "down"):
        payload, wire = record.bytes(direction), record.bytes(direction, "wire")
        how = f", compressed by {setting.compress}" if setting.compress and direction == "up" else ""
        sizes = f"{bytes_text(payload)} payload, {bytes_text(wire)} on the wire"
        lines.append(f"  {direction:<4} {sizes}, all clients and rounds{how}")
    if redone := sum(row.redone for row in record.rounds):
        lines.append(f"  {redone} tasks run again, because their processes were lost; results do not change")
    lines += ledger_lines(record)
    if record.declarations is not None:
        lines.append(f"  declarations: {record.declarations.text()}")
    if record.twins is not None:
        lines.append(f"  twins: {record.twins.text(len(record.data.members))}")
    for attack in record.attacks:
        who = f"attack {attack.attack} by the {attack.threat}"
        if isinstance(attack, NotRun):
            lines.append(f"  {who} did not run: {attack.reason}")
            continue
        lines.append(f"  {who}: {_found(attack)}")
        if isinstance(attack, MembershipResult) and attack.split_broken and attack.blind:
            lines.append(f"    {attack.verdict}")
    lines += [_audit_line(audit) for audit in record.audits]
    further = ((metric, metric.value(record)) for metric in metrics().values() if metric.line)
    lines += [f"  {metric.title}: {metric.text(value)}" for metric, value in further if value is not None]
    memory = bytes_text(MEMORY.value(record) or 0, binary=True)
    lines.append(f"  {_time_taken(record)}, peak memory {memory}, {record.device}")
    lines.append(f"  {_carried_out(record)}")
    return lines + [f"  note: {note}" for note in record.notes]


def _time_taken(record: RunRecord) -> str:
    """Return the seconds of all rounds, and this run's own if the runs of other seeds took turns with it."""
    seconds, own = sum(row.wall_s for row in record.rounds), sum(row.own_s for row in record.rounds)
    if not record.beside:
        return f"{seconds:.1f} s"
    others = f"seed{'s' if len(record.beside) > 1 else ''} {', '.join(map(str, record.beside))}"
    return f"{seconds:.1f} s beside {others}, {own:.1f} s of them its own"


FELL_BACK = ("not stacked: ", "steps not recorded: ")  # notes on what was done in a slower way begin so


def _carried_out(record: RunRecord) -> str:
    """Return in words how the run was carried out: engine, steps, precision, and whether something fell back."""
    setting, on_cpu = record.setting, record.device.endswith("CPU")
    steps = "eager" if on_cpu else "recorded" if setting.step == "auto" else setting.step
    precision = setting.precision if setting.precision == "bf16" or not on_cpu else "float32"
    slower = sum(note.startswith(FELL_BACK) for note in record.notes)
    engine = setting.engine if setting.engine != "auto" else "serial" if on_cpu else "stacked"
    text = f"engine {engine}, {steps} steps, {precision}"
    return f"{text}; slower than that in {slower} respect{'s' if slower > 1 else ''}: see the notes" if slower else text


def _near_chance(record: RunRecord) -> list[str]:
    """Return a warning that nothing was learnt and which settings to try; empty if something was."""
    from fedaudit.registry import find

    last, n = record.result.last, record.data.test
    if last is None or not (chance := near_chance(last.test_score(), record.data)):
        return []
    own_models = last.clients.global_test if last.clients else None
    if last.global_ is not None and own_models is not None and not near_chance(own_models.mean, record.data):
        return [
            f"  GLOBAL MODEL NEAR CHANCE: on {n:,} test records it is not clearly above the {chance}.",
            f"    The clients' own models learnt: {_percent(own_models.mean)}. This is fine if clients adapt the "
            "model; else train it with smaller steps.",
        ]
    name = record.setting.method
    first: dict[str, Any] = {}
    if ":" not in name:  # otherwise it is a user's code, which is not imported just for advice
        with contextlib.suppress(SettingError):  # a method of a package that is not installed here
            first = dict(getattr(find(name), "on_digits", {}))
    flat = {f"{k}.{j}" if isinstance(v, dict) else k: w for k, v in first.items() for j, w in _parts(v)}
    advice = " ".join(f"--set {key}={value}" for key, value in flat.items()) or "more epochs and a larger learning rate"
    if first and all(record.setting.set.get(key) == value for key, value in first.items()):
        advice = "another --seed, --partition iid, a smaller learning rate"  # the run has these settings already
    if TRAINING in record.setting.privacy:  # with noise, few large steps learn best
        advice = (
            "larger batches and a larger learning rate than without noise, as DP-SGD needs (FedAvg on digits: "
            "--set E=3 --set B=150 --set eta=1), or a larger epsilon"
        )
    return [
        f"  NEAR CHANCE: on {n:,} test records it is not clearly above the {chance}.",
        f"    If nothing was learnt, attacks find nothing. Try {advice}, or more --rounds.",
    ]


def _parts(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else [("", value)]


def _audit_line(audit: EpsilonAudit) -> str:
    """Return one line with claim, ledger and lower bound side by side."""
    text = f"  epsilon, {audit.claim}: claimed {audit.claim_epsilon:.4g}, "
    text += "ledger not composed, " if audit.ledger_epsilon is None else f"ledger {audit.ledger_epsilon:.4g}, "
    if not audit.trials:
        return f"{text}{audit.verdict}: {audit.how}"
    least = "" if audit.bound is None else f"at least {audit.bound:.4g}: "
    return f"{text}{least}{audit.verdict} (p = {audit.p_value:.2g}, {audit.trials} trials, {audit.test})"


def ledger_lines(record: RunRecord) -> list[str]:
    """Return what the run guarantees, for the worst client: never less alarming than it is."""
    lines, messages = [], "  privacy: "
    if open_models([record]):
        lines.append(f"  privacy: epsilon = infinity for each client: {OPEN_MODELS}")
        messages = "    the messages alone: "
    if not record.ledger or not any(ledger.entries for ledger in record.ledger):
        return [*lines, f"{messages}nothing computed from private data was released"]
    open_fields = sorted({e.field for c in record.ledger for e in c.entries if e.noise_multiplier == 0})
    if open_fields:
        lines.append(f"  privacy: epsilon = infinity for each client; not protected: {', '.join(open_fields)}")
    elif record.status == "done":
        worst = ledger_epsilon(record)
        if worst is None:
            lines.append(
                f"{messages}no joint epsilon, as releases have different neighbouring relations; see the record"
            )
        else:
            relations = sorted({r for c in record.ledger for r, total in c.by_relation.items() if total.epsilon > 0})
            lines.append(
                f"{messages}epsilon = {worst:.4g} at delta <= {largest_delta([record]):.2g} for the worst client, all "
                "rounds together"
                + (f" ({', '.join(relations)}, for {unit_in_words(record.ledger)})" if relations else "")
            )
            lines += _weak_delta(record)
    for field in sorted({e.field for c in record.ledger for e in c.entries if e.noise_multiplier > 0 or e.claim}):
        entries = [e for c in record.ledger for e in c.entries if e.field == field]
        least = min(entries, key=lambda e: e.noise_multiplier)  # of the client with the least noise
        text = f"    {field} ({least.kind}): {mechanism_of(least).shown(least)}"
        if least.condition:
            text += f", {least.condition}"
        if least.claim is not None:
            text += f"; asked for: epsilon {least.claim:g} " + ("over the run" if least.steps > 1 else "per release")
        cosines = [e.cosine for e in entries if e.cosine is not None]
        if cosines:
            text += f"; cosine to the raw values {sum(cosines) / len(cosines):.3f}"
        lines.append(text)
    return lines


def _weak_delta(record: RunRecord) -> list[str]:
    """Return a warning if a client's delta is 1/n or more; empty if none is."""
    weak = [c for c in record.ledger if c.entries and c.delta * c.n >= 1 and (c.epsilon or 0.0) > 0]
    if not weak:
        return []
    most = max(weak, key=lambda c: c.delta * c.n)
    return [
        f"    WARNING: delta = {most.delta:.2g} is 1/n or more for {len(weak)} of {len(record.ledger)} clients "
        f"(n = {most.n}). Publishing one record at random would meet that, too. Choose less, such as "
        f"delta={0.1 / max(c.n for c in record.ledger):.0e}."
    ]


def _found(attack: Scored) -> str:
    """Return the first measure of an attack that ran, with its interval, and say if it is a leak."""
    name, first = next(iter(measures_of(attack).items()))
    if first.value is None:
        return first.reason or "no number"
    text = f"{'AUC' if name == 'auc' else name} {first.shown()}"
    return text + {True: ", a leak", False: ", no leak shown", None: ""}[leak_of(attack)]


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def protections(record: RunRecord) -> dict[str, str]:
    """Return how fields are protected that carry no noise of their own, such as weights after DP-SGD, by the ledger."""
    entries = [entry for client in record.ledger for entry in client.entries]
    return {entry.field: mechanism_of(entry).shown(entry) for entry in entries if entry.noise_multiplier > 0}


def traffic_table(view: TranscriptView, by: str, covered: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return messages and bytes, grouped by message, field, client or round; `entry` lists them one by one.

    `covered` says of fields without noise of their own how they are protected."""
    keys = ("message", "field", "client", "round", "entry")
    if by not in keys:
        raise SettingError(unknown("--by", by, keys))
    rows: dict[Any, dict[str, Any]] = {}
    for entry in view.entries():
        if by == "entry" or not entry.readable:
            rows[entry.seq] = {
                "seq": entry.seq,
                "round": entry.round,
                "from": entry.sender,
                "to": entry.receiver,
                **({"message": entry.message} if entry.readable else {}),
                "bytes": entry.bytes,
            }
            continue
        for name, field in [*entry.fields.items(), ("(frame)", Sent(wire=entry.row["frame"]))]:
            label: Any = {
                "message": entry.message,
                "field": f"{entry.message}.{name}",
                "client": entry.client,
                "round": entry.round,
            }[by]
            row = rows.setdefault(
                (entry.direction, label),
                {"direction": entry.direction, by: label, "messages": 0, "payload": 0, "buffers": 0, "wire": 0},
            )
            if by == "field":
                none = (covered or {}).get(label, "none") if field.role == "private" else None
                row |= {"kind": field.kind, "protection": field.protection.model_dump() if field.protection else none}
            row["messages"] += 1 if by == "field" or name == "(frame)" else 0
            for size in ("payload", "buffers", "wire"):
                row[size] += getattr(field, size)
    return [rows[key] for key in sorted(rows)]
