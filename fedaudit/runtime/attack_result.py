"""What an attack found, as a run keeps it: typed, and validated whenever it is read.

A result is `NotRun`, with the reason, or one of four that ran: `MembershipResult`, `ReconstructionResult`,
`HistogramResult` and `ParticipationResult`. What a result does not say is not written, so that files of earlier
versions stay as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from fedaudit.kept import AsGiven, Kept
from fedaudit.stats import Estimate, Measured

# --- membership --------------------------------------------------------------------------------------------------


class AtThreshold(Estimate):
    """Of a rule with a threshold, and how that was chosen."""

    threshold: float | None = None
    rule: str = ""
    how: str = ""


class AtFPR(Estimate):
    """The share of members that are found at a false-positive rate."""

    fpr: float
    fpr_measured: float | None = None
    threshold: float | None = None
    rule: str = ""


class ROC(Kept):
    """The best TPR at each FPR."""

    fpr: list[float]
    tpr: list[float]
    drawn: str


class MembershipScores(AsGiven):
    """What membership scores of some candidates are worth."""

    members: int
    nonmembers: int
    confidence: float
    auc: Measured
    balanced_accuracy: AtThreshold
    advantage: AtThreshold
    advantage_best: AtThreshold
    tpr_at_fpr: list[AtFPR]
    roc: ROC | None = None  # of all candidates together


class Unscored(Kept):
    """Candidates that cannot be scored: one of the two classes is missing."""

    members: int
    nonmembers: int
    reason: str


OfGroups = dict[str, MembershipScores | Unscored]  # by the group's name


class MembershipFound(AsGiven):
    claims: Literal["membership"] = "membership"
    pooled: MembershipScores
    client: OfGroups = Field(default_factory=dict)
    class_: OfGroups = Field(default_factory=dict, alias="class")
    notes: list[str] = Field(default_factory=list)


# --- reconstructions ---------------------------------------------------------------------------------------------


class Rate(Estimate):
    """The share of images that are identified, and what guessing would give."""

    chance: float | None = None
    hits: int | None = None


class Ratio(Estimate):
    mean: str = ""  # geometric


class ReconstructionScores(Kept):
    mse: Estimate
    psnr: Estimate
    ssim: Estimate
    cosine: Estimate
    identification: Rate
    ratio: Ratio


class OnlyOne(Estimate):
    """Of the images that one of two identifies and the other does not, the attack's share."""

    attack_only: int
    baseline_only: int


class Difference(AsGiven):
    """How much better an attack is than a baseline, image by image."""

    mse: Estimate
    confidence: float
    identification: OnlyOne | None = None  # not where images are assigned


class ReconstructionFound(AsGiven):
    claims: Literal["reconstruction"] = "reconstruction"
    pooled: ReconstructionScores
    baselines: dict[str, ReconstructionScores]
    client: dict[str, ReconstructionScores]
    differences: dict[str, Difference]
    beats_baselines: bool
    verdict: str
    picture: str | None
    matched_by: list[str]
    not_held: int
    unassigned: int
    data_range: float
    window: int


# --- histograms of labels ----------------------------------------------------------------------------------------


class HistogramScores(AsGiven):
    """Half the L1 distance to the true label shares, of the claim and of the uniform guess."""

    error: Estimate
    uniform: Estimate
    gain: Estimate
    presence: Estimate | None = None  # AUC of held classes; a result from before it was computed: None


class ClientHistogram(AsGiven):
    error: float
    uniform: float
    claimed: list[float]
    source: str = ""


class HistogramFound(AsGiven):
    claims: Literal["histogram"] = "histogram"
    pooled: HistogramScores
    client: dict[str, ClientHistogram]
    measure: str
    leak: bool
    verdict: str


# --- who took part -----------------------------------------------------------------------------------------------


class ParticipationScores(AsGiven):
    """How well scores rank clients that took part above those that did not."""

    auc: Measured
    took_part: int
    others: int


class ClientScore(AsGiven):
    score: float
    took_part: bool


class ParticipationFound(AsGiven):
    claims: Literal["participation"] = "participation"
    pooled: ParticipationScores
    client: dict[str, ClientScore]
    leak: bool
    verdict: str


Findings = MembershipFound | ReconstructionFound | HistogramFound | ParticipationFound


# --- results -----------------------------------------------------------------------------------------------------


class AttackResult(AsGiven):
    """Who attacked, with what settings. `source` is a digest of the attack's code."""

    attack: str
    threat: str
    settings: dict[str, Any] = Field(default_factory=dict)  # the attack's own fields
    blind: bool = False  # reads nothing of the run: a baseline
    source: str | None = None
    ran: bool


class NotRun(AttackResult):
    ran: Literal[False] = False
    reason: str = "did not run"


class Ran(AttackResult):
    ran: Literal[True] = True
    clients: list[int] = Field(default_factory=list)  # that were attacked
    left_out: list[str] = Field(default_factory=list)  # why others were not, each once


class MembershipResult(MembershipFound, Ran):
    wall_s: float = 0.0
    against_blind: dict[str, Measured] = Field(default_factory=dict)  # difference of AUC to each blind baseline
    leak: bool | None = None  # None: a blind baseline, which shows none
    split_broken: bool = False  # members can be told from the records alone
    verdict: str = ""


class ReconstructionResult(ReconstructionFound, Ran):
    wall_s: float = 0.0


class HistogramResult(HistogramFound, Ran):
    wall_s: float = 0.0


class ParticipationResult(ParticipationFound, Ran):
    wall_s: float = 0.0


def _sort(raw: Any) -> str:
    given = raw if isinstance(raw, dict) else {name: getattr(raw, name, None) for name in ("ran", "claims")}
    return str(given.get("claims") or "membership") if given.get("ran") else "none"


AnyResult = Annotated[
    Annotated[NotRun, Tag("none")]
    | Annotated[MembershipResult, Tag("membership")]
    | Annotated[ReconstructionResult, Tag("reconstruction")]
    | Annotated[HistogramResult, Tag("histogram")]
    | Annotated[ParticipationResult, Tag("participation")],
    Discriminator(_sort),
]
Scored = MembershipResult | ReconstructionResult | HistogramResult | ParticipationResult
results: TypeAdapter[list[AnyResult]] = TypeAdapter(list[AnyResult])


def result_of(ran: Ran, found: Findings, wall_s: float) -> Scored:
    """Who attacked whom, and what was found, as one result."""
    both = {name: getattr(part, name) for part in (ran, found) for name in part.model_fields_set}
    both |= {"ran": True, "claims": found.claims, "wall_s": wall_s}  # said, though it is the only possible value
    if isinstance(found, MembershipFound):
        return MembershipResult(**both)
    if isinstance(found, ParticipationFound):
        return ParticipationResult(**both)
    return ReconstructionResult(**both) if isinstance(found, ReconstructionFound) else HistogramResult(**both)


def leak_of(result: Scored) -> bool | None:
    """Whether it shows a leak; None where that is not what it says: of a blind baseline, of reconstructions."""
    return None if isinstance(result, ReconstructionResult) else result.leak


def measures_of(result: Scored) -> dict[str, Estimate]:
    """What was measured over all clients together, by name; the TPR at each FPR is in a list of its own."""
    pooled = result.pooled
    return {name: found for name in type(pooled).model_fields if isinstance(found := getattr(pooled, name), Estimate)}
