"""The results of attacks, as a run keeps them: typed, and validated whenever they are read.

A result is `NotRun`, with the reason, or one of four that ran: `MembershipResult`, `ReconstructionResult`,
`HistogramResult` and `ParticipationResult`. Fields that a result does not set are not written, so that files of earlier
versions stay as they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from fedaudit.stats import Estimate, Measured
from fedaudit.stored_model import AsGiven, StoredModel

# --- membership --------------------------------------------------------------------------------------------------


class AtThreshold(Estimate):
    """The estimate for a rule with a threshold, and how the threshold was chosen."""

    threshold: float | None = None
    rule: str = ""
    how: str = ""


class AtFPR(Estimate):
    """The share of members that are found at a false-positive rate."""

    fpr: float
    fpr_measured: float | None = None
    threshold: float | None = None
    rule: str = ""


class ROC(StoredModel):
    """The curve of the best TPR at each FPR."""

    fpr: list[float]
    tpr: list[float]
    drawn: str


class MembershipScores(AsGiven):
    """The quality of membership scores over some candidates."""

    members: int
    nonmembers: int
    confidence: float
    auc: Measured
    balanced_accuracy: AtThreshold
    advantage: AtThreshold
    advantage_best: AtThreshold
    tpr_at_fpr: list[AtFPR]
    roc: ROC | None = None  # of all candidates together


class Unscored(StoredModel):
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
    last_round: Measured | None = None  # AUC of the last round alone, if the scores are of several rounds
    notes: list[str] = Field(default_factory=list)


# --- reconstructions ---------------------------------------------------------------------------------------------


class Rate(Estimate):
    """The share of images that are identified, and what guessing would give."""

    chance: float | None = None
    hits: int | None = None


class Ratio(Estimate):
    mean: str = ""  # geometric


class ReconstructionScores(StoredModel):
    mse: Estimate
    psnr: Estimate
    ssim: Estimate
    cosine: Estimate
    identification: Rate
    ratio: Ratio


class OnlyOne(Estimate):
    """The attack's share of the images that either the attack or the baseline identifies, but not both."""

    attack_only: int
    baseline_only: int


class Difference(AsGiven):
    """The advantage of an attack over a baseline, image by image."""

    mse: Estimate
    confidence: float
    identification: OnlyOne | None = None  # None if images are assigned


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
    """Half the L1 distance to the true label shares, for the claim and for the uniform guess."""

    error: Estimate
    uniform: Estimate
    gain: Estimate
    # AUC for the classes that the client holds; None: the result is older than this figure.
    presence: Estimate | None = None


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
    """The quality of scores that rank clients that took part above those that did not."""

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
    """Says who attacked, with which settings. `source` is a digest of the attack's code."""

    attack: str
    threat: str
    settings: dict[str, Any] = Field(default_factory=dict)  # the attack's own fields
    blind: bool = False  # a baseline that reads nothing of the run
    source: str | None = None
    ran: bool


class NotRun(AttackResult):
    ran: Literal[False] = False
    reason: str = "did not run"


class Ran(AttackResult):
    ran: Literal[True] = True
    clients: list[int] = Field(default_factory=list)  # the clients that were attacked
    left_out: list[str] = Field(default_factory=list)  # why other clients were not attacked; each reason once


class MembershipResult(MembershipFound, Ran):
    wall_s: float = 0.0
    against_blind: dict[str, Measured] = Field(default_factory=dict)  # difference of AUC to each blind baseline
    leak: bool | None = None  # None for a blind baseline, which cannot show a leak
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
    """Return one result that says who attacked whom, and what was found."""
    both = {name: getattr(part, name) for part in (ran, found) for name in part.model_fields_set}
    # `ran` is written, though True is its only possible value.
    both |= {"ran": True, "claims": found.claims, "wall_s": wall_s}
    if isinstance(found, MembershipFound):
        return MembershipResult(**both)
    if isinstance(found, ParticipationFound):
        return ParticipationResult(**both)
    return ReconstructionResult(**both) if isinstance(found, ReconstructionFound) else HistogramResult(**both)


def leak_of(result: Scored) -> bool | None:
    """Return whether a result shows a leak; None for a blind baseline and for reconstructions, which do not answer
    that."""
    return None if isinstance(result, ReconstructionResult) else result.leak


def measures_of(result: Scored) -> dict[str, Estimate]:
    """Return what was measured over all clients together, by name; the TPR at each FPR is in a list of its own."""
    pooled = result.pooled
    return {name: found for name in type(pooled).model_fields if isinstance(found := getattr(pooled, name), Estimate)}
