"""Make docs/results/methods.md, its HTML and its picture from the kept records of the suite `all`.

python benchmarks/studies/all/methods_page.py --keep AUDIT    keep the small records of an audit, or of a packed one
python benchmarks/studies/all/methods_page.py --write         make the page, its HTML and its picture again

The records lie in fedaudit/suites/all_records, one file for each method, because `fedaudit audit --beside all` compares
with them. In the page, what stands between two marks is made here, and the rest is written by hand. A cell that was
not run is named with its forecast.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import methods_findings  # beside this file

from fedaudit import registry
from fedaudit.attack.attack_run import made
from fedaudit.reports import method_comparison as comparison
from fedaudit.reports.method_comparison import MethodRow, Protected, rows_of
from fedaudit.suite.beside import records_folder
from fedaudit.suite.kept_records import MethodRecords, cells_of, gathered, key_of, read_records, write_records
from fedaudit.suite.suite_file import Suite, read_suite, shipped

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "methods.md"
HTML = PAGE.with_suffix(".html")
PICTURE = PAGE.with_suffix(".png")
TEMPLATE = Path(__file__).with_name("methods_template.html")
RECORDS = records_folder("all")
SKEWED = "dirichlet:0.3"
NOT_IN_SUITE = {  # attacks that no cell of the suite asks for, with the reason
    "chosen_queries": "its attacker is an active server, which changes the run",
    "imprint": "its attacker is an active server, which changes the run",
    "blind_nearest": "a baseline, which runs beside every attack: leaks are above it",
    "blind_pixels": "a baseline, which runs beside every attack: leaks are above it",
    "blind_prior": "a baseline, which runs beside every attack: leaks are above it",
}
UNREAD = {  # kinds of release that no attack reads, with the reason
    "count": "a number of records, which all neighbouring data sets share; a server takes it for granted",
    "statistics": "sent for batch norms only, and the model here has none",
}


# --- what the suite asks for ------------------------------------------------------------------------------------------


def attacks_of_suite(suite: Suite) -> list[str]:
    """Return the attacks that the suite runs on some cell."""
    specs = [*suite.wanted(), *(spec for extra in suite.extra for spec in extra.attacks)]
    return sorted({made(spec)[0] for spec in specs})


def cells_missing(suite: Suite, records: Mapping[str, MethodRecords]) -> dict[str, int]:
    """Return how many cells of each method have no record."""
    kept = {cell.key for of in records.values() for cell in of.cells}
    missing: dict[str, int] = {}
    for setting in suite.cells():
        if key_of(setting) not in kept:
            missing[setting.method] = missing.get(setting.method, 0) + 1
    return missing


# --- parts of the page ------------------------------------------------------------------------------------------------


def parts(suite: Suite, records: Mapping[str, MethodRecords]) -> dict[str, str]:
    """Return the made parts of the page, by the name of their mark."""
    rows = rows_of(records, registry.names("methods"))
    by = {name: [row for row in rows if row.partition == name] for name in comparison.PARTITIONS}
    return {
        "counts": counts(suite, records),
        "findings": methods_findings.text(rows),
        **{f"table {name}": comparison.table(of) for name, of in by.items()},
        **{f"protections {name}": protections(of) for name, of in by.items()},
        "attacks": attack_table(suite, records),
        "fields": field_table(records),
        "left out": left_out(suite, records),
    }


def counts(suite: Suite, records: Mapping[str, MethodRecords]) -> str:
    cells = [cell for of in records.values() for cell in of.cells]
    number = {status: sum(cell.status == status for cell in cells) for status in ("done", "refused", "failed")}
    attacks = sum(len(cell.attacks) for cell in cells)
    wanted = len(suite.cells())
    return (
        f"{len(records)} methods, {number['done']} of {wanted} cells run, {number['refused']} refused with a reason, "
        f"{number['failed']} failed, {wanted - len(cells)} not run; {attacks} attacks with a result."
    )


def protections(rows: Sequence[MethodRow]) -> str:
    """Return what each protection costs a method: points of accuracy, the ledger's epsilon, and the server's AUC."""
    columns = [(name, epsilon) for name in comparison.PROTECTIONS for epsilon in comparison.EPSILONS]
    heads = ["method", "unprotected, %", "AUC", *(f"{name}, {epsilon:g}" for name, epsilon in columns)]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in rows:
        if row.missing or not row.protected:
            continue
        found = {(one.protection, one.asked): one for one in row.protected}
        texts = [_protected(found.get(column)) for column in columns]
        accuracy = "none" if row.utility is None else f"{100 * row.utility:.1f}"
        lines.append(f"| {row.method} | {accuracy} | {_auc(row)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _auc(row: MethodRow) -> str:
    best = row.membership["server"]
    return "none" if best is None else f"{best.value:.2f}{'' if best.found else ' n.f.'}"


def _protected(one: Protected | None) -> str:
    if one is None:
        return ""
    if not one.seeds:
        return "refused"
    epsilon = "∞" if one.epsilon is None else f"{one.epsilon:.1f}"
    cost = "?" if one.cost is None else f"{0.0 - one.cost:+.1f}"
    auc = "none" if one.best is None else f"{one.best.value:.2f}{'' if one.best.found else ' n.f.'}"
    return f"{cost}; ε {epsilon}; {auc}"


def attack_table(suite: Suite, records: Mapping[str, MethodRecords]) -> str:
    """Return for each attack and threat in how many methods of each kind of release it works, of those it ran on."""
    sent = {of.kind for method in records.values() for of in method.fields}
    kinds = sorted(kind for kind in sent if kind is not None and kind not in UNREAD)
    lines = [f"| attack | by | {' | '.join(kinds)} |", f"|{'---|' * (len(kinds) + 2)}"]
    for attack in attacks_of_suite(suite):
        for threat in comparison.THREATS:
            texts = [_of_kind(attack, threat, kind, records) for kind in kinds]
            if any(texts):
                lines.append(f"| {attack} | {threat} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _of_kind(attack: str, threat: str, kind: str, records: Mapping[str, MethodRecords]) -> str:
    ran = found = 0
    for method in records.values():
        if all(of.kind != kind for of in method.fields):
            continue
        cells = [cell for cell in method.cells if cell.protection == comparison.OPEN and cell.partition == SKEWED]
        one = comparison.judged(cells, threat, attack)
        ran += one is not None
        found += one is not None and one.found
    return f"{found} of {ran}" if ran else ""


def field_table(records: Mapping[str, MethodRecords]) -> str:
    """Return every field that leaves a client, by its kind, with the methods that send it."""
    by_kind: dict[str, dict[str, list[str]]] = {}
    for method in records.values():
        for of in method.fields:
            by_kind.setdefault(of.kind or "public", {}).setdefault(of.field, []).append(method.method)
    lines = ["| kind | field: methods | attacked |", "|---|---|---|"]
    for kind, fields in sorted(by_kind.items()):
        said = "; ".join(f"`{name}`: {', '.join(sorted(of))}" for name, of in sorted(fields.items()))
        lines.append(f"| {kind} | {said} | {UNREAD.get(kind, 'yes')} |")
    return "\n".join(lines)


def left_out(suite: Suite, records: Mapping[str, MethodRecords]) -> str:
    """Return what is not on the page, and why: attacks, methods and cells."""
    lines = [f"- Attack `{name}`: {why}." for name, why in sorted(NOT_IN_SUITE.items())]
    ran = {found.attack for of in records.values() for cell in of.cells for found in cell.attacks}
    for attack in attacks_of_suite(suite):
        if attack not in ran:
            reasons = sorted({of.not_run[attack] for of in records.values() if attack in of.not_run})
            lines.append(f"- Attack `{attack}` ran on no cell: {reasons[0] if reasons else 'no cell was run'}.")
    seconds = _seconds_of_cell(records)
    missing = cells_missing(suite, records)
    if missing:
        most = sum(missing.values()) * seconds / 60
        forecast = f"{most:.0f} to {2 * most:.0f} minutes of one core" if seconds else "no forecast"
        lines.append(
            f"- {sum(missing.values())} cells were not run ({forecast}, by the {seconds:.0f} s of rounds and attacks "
            "that a cell took here; imports and files come on top). "
            "`fedaudit audit --suite all --missing` runs them alone. Cells of each method: "
            + ", ".join(f"{method} {number}" for method, number in sorted(missing.items()))
            + "."
        )
    for method in sorted(records):
        for cell in records[method].cells:
            if cell.status == "failed":
                of = f"{cell.protection} at epsilon {cell.asked:g}" if cell.asked else "unprotected"
                lines.append(f"- Failed: {method}, {cell.partition}, seed {cell.seed}, {of}: {cell.reason}")
    return "\n".join(lines)


def _seconds_of_cell(records: Mapping[str, MethodRecords]) -> float:
    """Return the mean seconds of a cell: its rounds and its attacks."""
    done = [cell.wall for of in records.values() for cell in of.cells if cell.status == "done"]
    return sum(done) / len(done) if done else 0.0


# --- the files --------------------------------------------------------------------------------------------------------


def mark(name: str, text: str) -> str:
    return f"<!-- made: {name} -->\n\n{text}\n\n<!-- end -->"


def with_parts(page: str, made_parts: Mapping[str, str]) -> str:
    """Return the page with its made parts replaced. Raise if a part has no mark."""
    for name, text in made_parts.items():
        pattern = re.compile(rf"<!-- made: {re.escape(name)} -->.*?<!-- end -->", re.DOTALL)
        if not pattern.search(page):
            raise SystemExit(f"{PAGE} has no mark for {name!r}. Write <!-- made: {name} --> and <!-- end -->.")
        page = pattern.sub(lambda _, name=name, text=text: mark(name, text), page)
    return page


def html_page(rows: Sequence[MethodRow]) -> str:
    """Return the sortable, filterable page: one row for each method and partition."""
    heads = ["family", "records", *comparison.COLUMNS]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = []
    for row in rows:
        texts = [row.family, comparison.PARTITIONS[row.partition], *comparison.cells_of_row(row)]
        body.append("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in texts) + "</tr>")
    template = TEMPLATE.read_text()
    families = json.dumps(list(dict.fromkeys(row.family for row in rows)))
    return template.replace("@HEAD@", head).replace("@BODY@", "\n".join(body)).replace("@FAMILIES@", families)


def main(words: list[str]) -> None:
    if words and words[0] == "--keep":
        files = write_records(RECORDS, gathered(cell for word in words[1:] for cell in cells_of(Path(word))))
        print(f"{len(files)} files in {RECORDS}, {sum(file.stat().st_size for file in files) / 1e6:.2f} MB")
        return
    suite, records = read_suite(shipped("all")), read_records(RECORDS)
    page = with_parts(PAGE.read_text(), parts(suite, records))
    rows = rows_of(records, registry.names("methods"))
    if words != ["--write"]:
        print(page)
        return
    PAGE.write_text(page)
    HTML.write_text(html_page(rows))
    comparison.picture(rows, PICTURE)
    print(f"written: {PAGE}, {HTML}, {PICTURE}")


if __name__ == "__main__":
    main(sys.argv[1:])
