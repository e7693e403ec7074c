"""What the suite of all methods finds, in ten sentences. Every figure in them is computed from the kept records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fedaudit.reports.method_comparison import Best, MethodRow, Protected, judged, utility
from fedaudit.stats import student_t
from fedaudit.suite.kept_records import OPEN, SentField

IID, SKEWED = "iid", "dirichlet:0.3"
CLASS_MEANS = ("fedgh", "fedproto", "fedtgp", "fedktl", "feddistill")


class Book:
    """Rows by partition and method, with short ways to say figures of them."""

    def __init__(self, rows: Sequence[MethodRow]):
        self.rows: Mapping[tuple[str, str], MethodRow] = {(row.partition, row.method): row for row in rows}
        self.seeds = {row.method: row.seeds for row in rows}

    def seeded(self, methods: Iterable[str]) -> str:
        """Return how many seeds these methods have, as words."""
        found = sorted({self.seeds[method] for method in methods})
        if len(found) > 1:
            return f"{found[0]} to {found[-1]} seeds each"
        return "one seed each" if found == [1] else f"{found[0]} seeds each"

    def of(self, method: str, partition: str) -> MethodRow:
        return self.rows[partition, method]

    def family(self, name: str, partition: str) -> list[MethodRow]:
        return [
            row for (where, _), row in self.rows.items()
            if where == partition and row.family == name and "+" not in row.method and not row.missing
        ]  # fmt: skip

    def attack(self, method: str, partition: str, attack: str, threat: str = "server") -> Best | None:
        records = self.of(method, partition).records
        cells = [c for c in (records.cells if records else ()) if c.partition == partition and c.protection == OPEN]
        return judged(cells, threat, attack)

    def protected(self, method: str, partition: str, protection: str, epsilon: float) -> Protected | None:
        of = self.of(method, partition).protected
        return next((one for one in of if (one.protection, one.asked) == (protection, epsilon) and one.seeds), None)

    def above(self, method: str, partition: str, first: str, second: str, epsilon: float) -> str:
        """Return how many points a method is above under one protection than under another: seed by seed, 95 %."""
        records = self.of(method, partition).records
        of = [c for c in (records.cells if records else ()) if c.partition == partition and c.asked == epsilon]
        one, other = (
            {c.seed: u for c in of if c.protection == p and (u := utility(c)) is not None} for p in (first, second)
        )
        found = student_t([100 * (one[seed] - other[seed]) for seed in sorted(one.keys() & other.keys())])
        if found.low is None or found.high is None:
            return f"{found.value:+.1f}"
        return f"{found.value:+.1f} [{found.low:.1f}, {found.high:.1f}]"


def both(say: Callable[[str], str], unit: str = "") -> str:
    """Return a figure of the even records and of the skewed ones."""
    return f"{say(IID)}{unit} on iid records and {say(SKEWED)}{unit} on skewed ones"


def span(values: Iterable[float | None], digits: int = 2) -> str:
    known = sorted(value for value in values if value is not None)
    if not known:
        return "no figure"
    low, high = f"{known[0]:.{digits}f}", f"{known[-1]:.{digits}f}"
    return low if low == high else f"{low} to {high}"


def auc(best: Best | None) -> str:
    return "no figure" if best is None else f"{best.value:.2f}"


def cost(one: Protected | None) -> str:
    return "no figure" if one is None or one.cost is None else f"{one.cost:.1f}"


def sentences(rows: Sequence[MethodRow]) -> list[str]:
    """Return the ten findings."""
    book = Book(rows)
    return [
        _embeddings(book),
        _condensed(book),
        _averaging(book),
        _submodels(book),
        _label_shares(book),
        _class_means(book),
        _answers(book),
        _cost_of_dp_sgd(book),
        _noise_on_answers(book),
        _never(book),
    ]


def _embeddings(book: Book) -> str:
    say = book.protected
    return (
        "**DFFKE's embeddings give its records away.** The server tells members from others with an AUC of "
        + both(lambda p: auc(book.attack("dffke", p, "embedding_match")))
        + ", also where clients train by DP-SGD at epsilon = 2 ("
        + both(lambda p: auc(one.best) if (one := say("dffke", p, "DP-SGD", 2.0)) else "no figure")
        + "), and the decoder's images have "
        + both(
            lambda p: f"{100 * (b.value if (b := book.attack('dffke', p, 'decoder')) else 0):.0f} %",
            " less squared error than the best guess",
        )
        + "; noise on its messages at epsilon = 8 takes the AUC to "
        + both(lambda p: auc(one.best) if (one := say("dffke", p, "messages", 8.0)) else "no figure")
        + " and costs "
        + both(lambda p: cost(say("dffke", p, "messages", 8.0)), " points")
        + ", while the weights beside them keep the ledger infinite."
    )


def _condensed(book: Book) -> str:
    images = ("fedaf", "feddm")
    return (
        "**Condensed images are not free of records.** The distance to FedAF's and FedDM's images, ten a class, tells "
        "members with an AUC of "
        + both(lambda p: " and ".join(auc(book.attack(m, p, "nearest_synthetic")) for m in images))
        + ", the highest here after DFFKE's; DP-SGD is refused for both, and noise on the images at epsilon = 8 costs "
        + both(lambda p: " and ".join(cost(book.protected(m, p, "messages", 8.0)) for m in images), " points")
        + ": at this scale there is no useful protection for condensation."
    )


def _averaging(book: Book) -> str:
    def found(p: str) -> str:
        of = [row.membership["server"] for row in book.family("averaging", p)]
        works = [best for best in of if best is not None and best.found]
        return f"in {len(works)} of {len(of)} ({span(best.value for best in of if best)})"

    return (
        "**How models are averaged hardly matters to a server that looks for members.** The ten averaging methods have "
        f"three seeds each; a membership attack is found to work {both(found)}, with the methods' best AUC in brackets."
    )


def _submodels(book: Book) -> str:
    return (
        "**Sending a part of the model hides nobody.** With sub-models of a half and a quarter of the width, the "
        "server's best AUC on iid records is "
        + span(b.value for row in book.family("sub-models", IID) if (b := row.membership["server"]))
        + f", and {auc(book.of('fedavg', IID).membership['server'])} with FedAvg's whole model; on skewed records "
        + span(b.value for row in book.family("sub-models", SKEWED) if (b := row.membership["server"]))
        + f" and {auc(book.of('fedavg', SKEWED).membership['server'])}."
    )


def _label_shares(book: Book) -> str:
    rows = [row for (p, _), row in book.rows.items() if p == SKEWED and not row.missing and row.records]
    counted = [row for row in rows if any(of.kind == "label_counts" for of in _f(row)) and row.labels["server"]]
    weights = [
        row for row in rows
        if row.labels["server"] and {"weights"} <= (kinds := {of.kind for of in _f(row)})
        and not kinds & {"label_counts", "labels"}
    ]  # fmt: skip
    found = [row for row in weights if (b := row.labels["server"]) and b.found]
    return (
        f"**Label shares are seen where records are skewed.** The {len(counted)} methods that send label "
        f"counts in the clear give them away ({span(b.value for r in counted if (b := r.labels['server']))} of the "
        "uniform guess's error is gone); of "
        f"{len(weights)} that send weights and neither counts nor labels, the server still reads label shares from "
        f"{len(found)} ({span(b.value for r in found if (b := r.labels['server']))} of the error gone)."
    )


def _f(row: MethodRow) -> Sequence[SentField]:
    return row.records.fields if row.records else ()


def _class_means(book: Book) -> str:
    means = ("prototype_membership", "prototype_inversion", "prototype_property")
    worked = [
        (method, attack) for p in (IID, SKEWED) for method in CLASS_MEANS for attack in means
        if (b := book.attack(method, p, attack)) is not None and b.found
    ]  # fmt: skip
    said = "found nothing" if not worked else f"found something in {len(worked)} of {2 * 15} cases"
    return (
        "**One vector for each class gave nothing away to the attacks on such vectors.** Attacks on class means "
        f"(FedGH, FedProto, FedTGP, FedKTL, FedDistill; {book.seeded(CLASS_MEANS)}) {said}; the AUC of "
        + span(b.value for m in CLASS_MEANS if (b := book.of(m, IID).membership["server"]))
        + " on iid records comes from the clients' own models, which count as published where a method has no global "
        f"one, and it is that of training alone ({auc(book.of('local', IID).membership['server'])})."
    )


def _answers(book: Book) -> str:
    who = ("dsfl", "mhat")

    def members(p: str) -> str:
        of = [book.of(m, p).membership["server"] for m in who]
        return " and ".join(f"{auc(best)}{'' if best and best.found else ' (not found)'}" for best in of)

    told = [m for p in (IID, SKEWED) for m in who if (best := book.of(m, p).membership["server"]) and best.found]
    title = (
        "Answers on public records say little of members here, and much of label shares."
        if told
        else "Answers on public records hide members here, and not label shares."
    )
    end = "is nearly so for members" if told else "holds for members as far as these attacks go"

    def labels(m: str) -> str:
        best = book.of(m, SKEWED).labels["server"]
        return "no figure" if best is None else f"{best.value:.2f}{'' if best.found else ' (not found)'}"

    return (
        f"**{title}** For DS-FL and MHAT the server's best AUC is "
        f"{both(members)}, but on skewed records {labels('dsfl')} and {labels('mhat')} of the error of a guess "
        f"at the label shares is gone ({book.seeded(who)}): that data stay private because only answers travel {end}, "
        "and does not hold for label shares."
    )


def _cost_of_dp_sgd(book: Book) -> str:
    def costs(p: str, epsilon: float) -> str:
        of = [book.protected(row.method, p, "DP-SGD", epsilon) for row in book.family("averaging", p)]
        return span((one.cost for one in of if one), 1)

    return (
        "**With 250 records a client DP-SGD is affordable for averaging at epsilon = 8, and not at 2.** It costs the "
        f"ten averaging methods {both(lambda p: costs(p, 8.0), ' points')} at 8, and "
        f"{both(lambda p: costs(p, 2.0), ' points')} at 2 (three seeds each, as many steps as without it)."
    )


def _noise_on_answers(book: Book) -> str:
    say = book.protected
    pairs = [[say("mhat", p, of, 8.0) for of in ("messages", "DP-SGD")] for p in (IID, SKEWED)]
    never = all(noise and sgd and (noise.cost or 0.0) >= (sgd.cost or 0.0) for noise, sgd in pairs)
    return (
        "**Noise on messages pays for FedMD, whose server needs little of them.** At epsilon = 8 it costs it "
        + both(lambda p: cost(say("fedmd", p, "messages", 8.0)), " points")
        + ", where DP-SGD costs "
        + both(lambda p: cost(say("fedmd", p, "DP-SGD", 8.0)))
        + f" (but then covers the messages alone, and not the clients' models). MHAT, whose server also learns the "
        f"labels of its public records, is {'no' if never else 'another'} example of that: noise costs it "
        + both(lambda p: cost(say("mhat", p, "messages", 8.0)))
        + ", and DP-SGD "
        + both(lambda p: cost(say("mhat", p, "DP-SGD", 8.0)))
        + ". Seed by seed DP-SGD has "
        + both(lambda p: book.above("mhat", p, "DP-SGD", "messages", 8.0), " points")
        + f" more than noise, which {book.seeds['mhat']} seeds hardly tell from none. DS-FL's soft labels, from which "
        "alone its server learns, lose "
        + both(lambda p: cost(say("dsfl", p, "messages", 8.0)), " points")
        + " by noise, and "
        + both(lambda p: cost(say("dsfl", p, "DP-SGD", 8.0)))
        + " by DP-SGD, which covers them as post-processing."
    )


def _never(book: Book) -> str:
    able = lambda row: any(one.epsilon is not None for one in row.protected)  # noqa: E731
    rows = [row for (p, _), row in book.rows.items() if p == IID and row.protected]
    never = sorted(row.method for row in rows if not able(row))
    return (
        f"**{len(never)} of {len(rows)} methods that were tried have no finite epsilon under any protection**: "
        f"{', '.join(never)}. HeteroFL's loss does not separate over records, FedAF and FedDM descend on images in a "
        "way that DP-SGD cannot bound, and class means and condensed images show which classes a client holds, which "
        "no noise on their values hides."
    )


def text(rows: Sequence[MethodRow]) -> str:
    """Return the findings as a numbered list."""
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences(rows), 1))
