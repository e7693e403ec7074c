"""A made-up audit in which the right conclusions are known: the page has to say them, and no others.

Eleven settings on the same data, three seeds each, four classes (chance is 25 %):

    fedavg              90.0 %                 leaks membership: AUC 0.62, blind 0.50 (lift 0.12)
    fedavg+idle         90.1 %, 10 x compute   its distillation changes nothing
    fedavg      eps 8   85.0 %                 the one to use
    fedavg+idle eps 8   85.2 %, 10 x compute   the same guarantee (7.98), not told apart: never recommended
    fedavg      eps 2   70.0 %                 stricter, and 15 points worse
    tilted              80.0 %                 AUC 0.66, but a blind attacker has 0.58 (lift 0.08)
    skewed              80.0 %                 AUC 0.70, where a blind attacker has 0.69: the split is broken
    pictures            80.0 %                 86.5 % of images identified, by guessing 72.2 %
    embedded            80.0 %                 38.3 % identified, by guessing 0.4 %: by far the worst
    lost        eps 1   26.0 %                 near chance: its guarantee and its AUC of 0.5 are no merit
    claims      eps 1   88.0 %                 its claim is refuted, by a noise check; an attack shows 2.25
"""

from __future__ import annotations

import reported

from fedaudit.runtime.meter import Timing
from fedaudit.runtime.scores import GlobalScores

JITTER = (0.0, 0.012, -0.012)
OTHER = (0.004, 0.011, -0.012)  # 0.1 points more in the mean, and no difference that a test tells


def dp(epsilon):
    return {"training": {"epsilon": epsilon, "sensitivity": "clip:1", "delta": 1e-5}}


def made(method, seed, accuracy, *, epsilon=None, ledger=None, seconds=1.0, before=None, jitter=JITTER):
    """A record of one run. `before`: what the model reached before the round's distillation."""
    privacy = dp(epsilon) if epsilon else None
    record = reported._record(
        method, seed, accuracy + jitter[seed], releases=True, privacy=privacy, epsilon=ledger or epsilon
    )
    record.ledger = [client.model_copy(update={"delta": 1e-5}) for client in record.ledger]
    record.timings = [Timing(party="client 0", phase="task", calls=2, wall_s=seconds + 0.01 * seed)]
    if before is not None:
        for row in record.rounds:
            own = row.utility.global_.test.accuracy
            test = row.utility.global_.test.model_copy(update={"accuracy": own + before})
            row.utility.global_points = {"before distillation": GlobalScores(test=test)}
    return record


def blind(auc):
    return reported._membership("blind_prior", "server", auc, blind=True)


def identified(share, chance):
    found = reported._reconstruction("decoder", share)
    found["pooled"]["identification"].update(low=share - 0.02, high=share + 0.02, chance=chance)
    found["baselines"]["mean image"]["identification"].update(value=chance, low=chance, high=chance)
    return found


def noise_check(verdict_, claim, bound):
    return reported._audit(verdict_, claim, bound).model_copy(update={"test": "residuals", "seeks": 0.9})


def write(folder):
    save = reported._save
    for seed in range(3):
        told = [reported._membership("loss", "server", 0.62, leak=True), blind(0.5)]
        save(folder, f"plain-{seed}", made("fedavg", seed, 0.90), told)
        quiet = [reported._membership("loss", "server", 0.51), blind(0.5)]
        idle = made("fedavg+idle", seed, 0.90, seconds=10.0, before=0.0, jitter=OTHER)
        save(folder, f"idle-{seed}", idle, quiet)
        save(folder, f"dp8-{seed}", made("fedavg", seed, 0.85, epsilon=8.0), quiet)
        idle = made("fedavg+idle", seed, 0.85, epsilon=8.0, ledger=7.98, seconds=10.0, before=0.0, jitter=OTHER)
        save(folder, f"idle8-{seed}", idle, quiet)
        save(folder, f"dp2-{seed}", made("fedavg", seed, 0.70, epsilon=2.0), quiet)
        tilted = [reported._membership("loss", "server", 0.66, leak=True), blind(0.58)]
        save(folder, f"tilted-{seed}", made("tilted", seed, 0.80), tilted)
        gap = {"blind_prior": reported._estimate(0.01, 0.03, "DeLong")}
        high = [reported._membership("loss", "server", 0.70, split_broken=True, against_blind=gap), blind(0.69)]
        save(folder, f"skewed-{seed}", made("skewed", seed, 0.80, before=-0.031), high)
        save(folder, f"pictures-{seed}", made("pictures", seed, 0.80), [identified(0.865, 0.722)])
        save(folder, f"embedded-{seed}", made("embedded", seed, 0.80), [identified(0.383, 0.004)])
        save(folder, f"lost-{seed}", made("lost", seed, 0.26, epsilon=1.0), quiet)
        audits = [noise_check("refuted", 1.0, 31.6), reported._audit("not refuted", 1.0, 2.25)]
        save(folder, f"claims-{seed}", made("claims", seed, 0.88, epsilon=1.0), [], audits)
    return folder
