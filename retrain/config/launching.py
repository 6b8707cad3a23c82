"""What a campaign's launcher says about itself: where workers run, and which keys it does not use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.config.keys import Tables
from retrain.config.schema import CampaignSection


def options_of(campaign: CampaignSection) -> Tables:
    """Return the table `[campaign.<launcher>]`; empty for a launcher that has none."""
    table = getattr(campaign, campaign.launcher, None)
    return (
        asdict(table)
        if is_dataclass(table) and not isinstance(table, type)
        else dict(campaign.launcher_options)
    )


def runs_here(campaign: CampaignSection | None) -> bool:
    """Whether workers start at once on this machine, whose memory they take; so does a file's only run."""
    campaign = campaign or CampaignSection()
    return bool(registry.ask("launchers", campaign.launcher, "runs_here", options_of(campaign)))


def runs_side_by_side(campaign: CampaignSection) -> bool:
    """Whether several workers can run at a time on this machine."""
    return runs_here(campaign) and "parallel" not in unused_keys(campaign)


def unused_keys(campaign: CampaignSection) -> Mapping[str, str]:
    """Return the keys of `[campaign]` that its launcher does not use, each with the reason.

    Raises ConfigError if the launcher names a key that does not exist.
    """
    options = options_of(campaign)
    reasons: Mapping[str, str] = registry.ask("launchers", campaign.launcher, "unused_keys", options)
    names = {one.name for one in fields(campaign)}
    if wrong := [key for key in reasons if key not in names]:
        hint = registry.hint(wrong[0], names, "correct the name")
        raise ConfigError(f"{campaign.launcher!r}: unused_keys: [campaign] has no key {wrong[0]!r}; {hint}")
    return reasons
