"""The settings with which two libraries run the rivals: presets `htfllib` and `pflib`.

HtFLlib (github.com/TsingZ0/HtFLlib, commit e959261d, 23 April 2026) keeps them in `system/total.sh`, "pre-tuned
hyperparameters", and in the defaults of `system/main.py`. DFFKE ran its rivals with it (Section 4.1). PFLlib
(github.com/TsingZ0/PFLlib, commit d832e76f, 29 November 2025) has defaults alone. Both train by plain SGD in batches of
10, one epoch a round: at rate 0.01 (HtFLlib) and 0.005 (PFLlib). What a method has beside stands in its own file.

Both leave the last batch of an epoch out if it is smaller than the others, and HtFLlib does not shuffle. Neither is a
setting here: all records train, in another order in each epoch.
"""

from __future__ import annotations

from typing import Any

HTFLLIB: dict[str, Any] = {"E": 1, "B": 10, "eta": 0.01}
PFLIB: dict[str, Any] = {"E": 1, "B": 10, "eta": 0.005}
