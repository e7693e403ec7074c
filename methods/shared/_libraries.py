"""The settings with which public code runs the rivals: presets `htfllib`, `pflib` and `dffke_authors`.

HtFLlib (github.com/TsingZ0/HtFLlib, commit e959261d, 23 April 2026) keeps them in `system/total.sh`, "pre-tuned
hyperparameters", and in the defaults of `system/main.py`. DFFKE ran its rivals with it (Section 4.1). PFLlib
(github.com/TsingZ0/PFLlib, commit d832e76f, 29 November 2025) has defaults alone. Both train by plain SGD in batches of
10, one epoch a round: at rate 0.01 (HtFLlib) and 0.005 (PFLlib). What a method has beside stands in its own file.

Both leave the last batch of an epoch out if it is smaller than the others, and HtFLlib does not shuffle. Neither is a
setting here: all records train, in another order in each epoch.

DFFKE's author (github.com/HaowenGuan/DFFKE, 15 September 2024) took HtFLlib's rivals over into code of an earlier state
than the paper. There they train by Adam at 0.001 with a weight decay of 1e-5, in batches of 100, one epoch a round, on
images that are moved, mirrored and coloured, like DFFKE's own. What a client trains beside its own network has SGD at
0.01, as in HtFLlib. A server's training has HtFLlib's rate and DFFKE's batch size. Class means are taken of such images
there, and of the plain ones here. That code rounds augmented images to 8 bits, and standardises channels. It tests
twice in a round where the server sends something new, and reports the best of all tests; here these are two points of
the round.
"""

from __future__ import annotations

from typing import Any

HTFLLIB: dict[str, Any] = {"E": 1, "B": 10, "eta": 0.01}
DFFKE_AUTHORS: dict[str, Any] = {
    "opt": "adam", "E": 1, "B": 100, "eta": 0.001, "weight_decay": 1e-5, "crop": 4, "flip": True, "jitter": 0.4,
    "colours": "torchvision",
}  # fmt: skip
PFLIB: dict[str, Any] = {"E": 1, "B": 10, "eta": 0.005}
