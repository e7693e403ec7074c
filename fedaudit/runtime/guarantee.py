"""The guarantee for clients that a setting asks for, and whether the setting's sums go together at all."""

from __future__ import annotations

from fedaudit.errors import NotApplicable, PrivacyError, SettingError
from fedaudit.privacy.update_policy import read_updates
from fedaudit.privacy.updates import Guarantee
from fedaudit.runtime.method import Method
from fedaudit.setting import Setting

EMPTY = 0.1  # the most of delta that rounds without any client may take


def guarantee_of(setting: Setting) -> Guarantee | None:
    """Return the guarantee for clients that a setting asks for; None if it asks for none."""
    policy = read_updates(setting.privacy)
    if policy is None:
        return None
    if policy.where == "shares" and setting.aggregate != "secure":
        raise PrivacyError(
            "privacy.updates: where = 'shares' splits the noise over the clients, and a single reply would have too "
            "little of it. Use --aggregate secure, or where = 'client'."
        )
    if policy.quantile is not None and setting.aggregate == "secure":
        raise PrivacyError(
            "privacy.updates: a clip that follows a quantile needs a vote of each client, and the masked vectors of "
            "secure aggregation carry none. Leave `quantile` out, or use plain sums."
        )
    poisson = setting.sampling == "poisson"
    found = Guarantee(policy, setting.clients, setting.rounds, setting.participation, poisson)
    empty = setting.rounds * (1 - setting.participation) ** (setting.clients - 1)
    if found.amplified and empty > EMPTY * found.delta:
        raise PrivacyError(
            f"privacy.updates: with {setting.clients} clients drawn with probability {setting.participation:g}, rounds "
            f"without any client have probability {empty:.2g} over the run, more than a tenth of delta = "
            f"{found.delta:.2g}, and tell that nobody was there. Raise --participation or --clients."
        )
    return found


def single_replies(method: Method) -> str:
    """Return why a method cannot run where the server learns sums only."""
    name = method.registered_name or type(method).__name__
    reason = method.needs_single_replies() or "it uses cohort.ask for replies that hold something private"
    return f"{name} cannot run with --aggregate secure, where the server learns sums only: {reason}. Use plain sums."


def check_sums(setting: Setting, method: Method) -> None:
    """Raise unless the setting's sums and the method go together."""
    if setting.aggregate == "secure" and setting.compress is not None:
        raise SettingError(
            f"--compress {setting.compress} shrinks single replies, and masked vectors of secure aggregation cannot be "
            "compressed. Leave one of the two out."
        )
    if setting.aggregate == "secure" and method.needs_single_replies():
        raise NotApplicable(single_replies(method))
    updates = read_updates(setting.privacy)
    if updates is not None and updates.where == "client" and type(method).summand is not Method.summand:
        name = method.registered_name or type(method).__name__
        raise NotApplicable(
            f"privacy.updates: where = 'client' sends single updates with noise, and {name} adds up replies in another "
            "form than it sends them in. Choose where = 'server' or 'shares'."
        )
    if (reason := method.needs_single_replies()) and updates is not None:
        name = method.registered_name or type(method).__name__
        raise NotApplicable(
            f"privacy.updates protects sums of updates, and {name} needs single replies: {reason}. "
            "Protect its releases by their kinds."
        )
