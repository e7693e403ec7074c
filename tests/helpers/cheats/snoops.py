"""Methods that leave things for later tasks and look for what others left, wherever code can: `snoops:Class`."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, ClassVar

from cheats import STEP, Marked
from outside import Averages, Last, Sent, ce

from fedaudit import load, state_of, weighted_mean
from fedaudit.data import Federation
from fedaudit.errors import FedauditError
from fedaudit.runtime.world import world_of

LEFT: list[int] = []
SECRET = "FEDAUDIT_TEST_SECRET"


def of_others(world: Any, me: int | None) -> int:
    """Records of other clients that can be had here."""
    found = sum(isinstance(thing, Federation) for thing in gc.get_referrers(Federation))  # objects refer to their class
    for k in range(3):
        if k != me:
            for ask in (lambda k=k: world.members(k), lambda k=k: world_of(world.setting.model_dump_json()).members(k)):
                try:
                    found += len(ask()[1])
                except FedauditError:
                    continue
    return found


class Snoops(Averages):
    shared: ClassVar[list[int]] = []

    def round(self, s, server, cohort):
        replies = cohort.ask(self.update, Sent(s.w))
        w = weighted_mean({k: r.w for k, r in replies.items()}, dict.fromkeys(replies, 1.0))
        of_records = of_others(server._hub.build.__self__, None)
        return Last(w, sum(r.t for r in replies.values()) + 1000 * of_records)

    def update(self, client, msg, kept=[]):  # noqa: B006
        file, here = Path("left-by-a-client"), os.environ
        found = len(LEFT) + len(self.shared) + len(kept) + file.exists() + ("LEFT" in here) + (SECRET in here)
        world = client._site.fresh_model.func.__self__
        found += len(self.__dict__.get("left", ())) + len(getattr(world, "left", ()))
        found += 1000 * of_others(world, client.id)
        for place in (
            LEFT,
            self.shared,
            kept,
            self.__dict__.setdefault("left", []),
            vars(world).setdefault("left", []),
        ):
            place.append(client.id)
        file.write_text("x")
        here["LEFT"] = "x"
        load(client.model, msg.w)
        client.fit(ce, **STEP)
        return Marked(state_of(client.model), int(found))

    def diagnostics(self, s):
        return {"found": float(s.t)}


class Asks(Averages):
    """Asks for what is no function of it."""

    def round(self, s, server, cohort):
        cohort.ask(lambda client, msg: None, Sent(s.w))
        return s
