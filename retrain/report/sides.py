"""Turns command-line arguments into the sides of a comparison.

A directory is a campaign or a run; a name after it is a condition or a run of that campaign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import ConfigError
from retrain.records.text import plain
from retrain.report.gather import CampaignRecord, RunHistory, gather


@dataclass(frozen=True)
class Side:
    """The runs of a condition, or a single run."""

    label: str
    runs: tuple[RunHistory, ...]


@dataclass(frozen=True)
class Match:
    """Sides to compare with the first."""

    title: str
    sides: tuple[Side, ...]


def choose(arguments: Sequence[str]) -> tuple[Match, ...]:
    """Return what to compare.

    `CAMPAIGN` compares its conditions with the first of them; `CAMPAIGN a b` those two;
    `CAMPAIGN1 CAMPAIGN2` their common conditions, pair by pair; `CAMPAIGN1 a CAMPAIGN2 b`
    a condition of one with a condition of the other; `RUN1 RUN2` two runs.

    Raises:
        ConfigError: a name is unknown or ambiguous; the message lists the candidates.
        RecordsError: a directory does not exist.
    """
    named = _read(arguments)
    campaigns = [campaign for campaign, _ in named]
    tags = _tags(campaigns)
    if not any(names for _, names in named):
        return (_conditions(campaigns[0]),) if len(named) == 1 else _common_conditions(campaigns, tags)
    sides = [side for (one, names), tag in zip(named, tags, strict=True) for side in _of(one, names, tag)]
    if len(sides) < 2:
        raise ConfigError(
            f"only {sides[0].label!r} is named; name what to compare it with: {_offer(campaigns[0])}"
        )
    return (Match("", tuple(sides)),)


def conditions(campaign: CampaignRecord) -> tuple[Side, ...]:
    """Return a campaign's conditions as sides."""
    return tuple(Side(label, campaign.of_condition(label)) for label in campaign.conditions)


def _read(arguments: Sequence[str]) -> list[tuple[CampaignRecord, list[str]]]:
    """Return each directory's campaign, and the conditions or runs selected from it."""
    named: list[tuple[CampaignRecord, list[str]]] = []
    for argument in arguments:
        if named and argument in _names(named[-1][0]):
            named[-1][1].append(argument)
        elif named and not Path(argument).is_dir():
            last = named[-1][0]
            raise ConfigError(
                f"{plain(argument)!r} is neither a directory nor a condition or run of "
                f"{last.directory}, which has {_offer(last)}"
            )
        else:
            named.append((gather(Path(argument)), []))
    return named


def _names(campaign: CampaignRecord) -> set[str]:
    return {*campaign.conditions, *(name for run in campaign.runs for name in _names_of(run))}


def _names_of(run: RunHistory) -> tuple[str, str]:
    """Return a run's id, and its name as `status` shows it."""
    return run.run_id, f"{run.condition}_s{run.seed}"


def _offer(campaign: CampaignRecord) -> str:
    return ", ".join(campaign.conditions[:10])


def _conditions(campaign: CampaignRecord) -> Match:
    sides = conditions(campaign)
    if len(sides) < 2:
        only = sides[0].label if sides else "no run"
        raise ConfigError(
            f"{campaign.directory}: contains only {only}; add another campaign, or name two of its runs"
        )
    return Match("", sides)


def _common_conditions(campaigns: Sequence[CampaignRecord], tags: Sequence[str]) -> tuple[Match, ...]:
    both = list(zip(campaigns, tags, strict=True))
    if all(len(campaign.conditions) == 1 for campaign in campaigns):
        return (Match("", tuple(_side(campaign, campaign.conditions[0], tag) for campaign, tag in both)),)
    shared = [label for label in campaigns[0].conditions if all(label in c.conditions for c in campaigns)]
    if not shared:
        have = "; ".join(f"{campaign.directory} has {_offer(campaign)}" for campaign in campaigns)
        raise ConfigError(f"the campaigns share no condition ({have}); name one after each directory")
    return tuple(
        Match(label, tuple(_side(campaign, label, tag) for campaign, tag in both)) for label in shared
    )


def _of(campaign: CampaignRecord, names: Sequence[str], tag: str) -> list[Side]:
    chosen = names or campaign.conditions
    if not names and len(chosen) != 1:
        raise ConfigError(
            f"{campaign.directory}: has several conditions; name one after it: {_offer(campaign)}"
        )
    return [_side(campaign, name, tag) for name in chosen]


def _side(campaign: CampaignRecord, name: str, tag: str) -> Side:
    runs = campaign.of_condition(name) or tuple(run for run in campaign.runs if name in _names_of(run))
    if not tag:
        return Side(name, runs)
    return Side(tag if tag.startswith(name) else f"{name} ({tag})", runs)  # a run's directory names both


def _tags(campaigns: Sequence[CampaignRecord]) -> list[str]:
    """Return short labels of campaigns: the last four digits of their ids, if those differ."""
    if len(campaigns) == 1:
        return [""]
    short = [campaign.id.rpartition("-")[2] for campaign in campaigns]
    return short if len(set(short)) == len(short) else [campaign.id for campaign in campaigns]
