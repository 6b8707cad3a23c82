"""Which run is published, of which step, and why it was chosen: never silently one of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.base.errors import ConfigError, RecordsError
from retrain.config.keys import as_meant
from retrain.config.resolve import build
from retrain.config.schema import Config
from retrain.records.layout import campaign_of, is_campaign, is_single_run
from retrain.records.text import count_of, first_of, plain
from retrain.records.windows import Window
from retrain.results.report.gather import CampaignRecord, RunHistory, gather
from retrain.results.report.sides import final_value, side_of
from retrain.results.report.tables import significant
from retrain.trainer.checkpoint import NAME, Checkpoint, of_step, steps_of

JUDGES = ("eval_reward", "mean_reward")  # of which seed is best: the first that all seeds have


@dataclass(frozen=True)
class Choice:
    """A run's checkpoint."""

    campaign: CampaignRecord
    run: RunHistory
    config: Config
    checkpoint: Checkpoint
    why: str  # this seed, of several; "" if there was no choice


def choose(
    directory: Path, name: str, *, best: bool = False, step: int | None = None, unfinished: bool = False
) -> Choice:
    """Return the checkpoint to publish of a run, or of a campaign's run or condition of that name.

    Raises:
        ConfigError: there is no such run, several could be meant, or it is not finished.
        RecordsError: it has no checkpoint that can be read.
    """
    campaign, runs = _runs(directory, name)
    run, why = (runs[0], "") if len(runs) == 1 else _best_seed(runs, best=best)
    if not run.config:
        raise RecordsError(
            f"{run.directory / 'run.toml'}: cannot be read, or was changed after it was planned"
        )
    root = run.directory / "checkpoints"
    steps = steps_of(root)
    kept = ", ".join(map(str, steps)) or "none"
    if step is None and not (run.is_done or unfinished):
        raise ConfigError(
            f"{run.name} is not finished ({run.state}, step {run.step} of {run.max_steps}); --unfinished "
            f"publishes its newest checkpoint, --step N another (kept: {kept})"
        )
    step = steps[-1] if step is None and steps else step
    checkpoint = None if step is None else of_step(root, step)
    if checkpoint is None:
        which = "" if step is None else f" of step {step}"
        raise RecordsError(
            f"{root}: has no checkpoint{which} that can be read (kept: {kept}); --step N names another"
        )
    return Choice(campaign, run, build(Config, as_meant(run.config)), checkpoint, why)


def _runs(directory: Path, name: str) -> tuple[CampaignRecord, Sequence[RunHistory]]:
    """Return the campaign that a directory belongs to, and the runs that are meant."""
    place = directory.resolve()
    if is_single_run(directory):
        if name:
            raise ConfigError(f"{directory}: is a run; name only its campaign's directory with {name!r}")
        campaign = gather(campaign_of(place).directory)
        return campaign, [run for run in campaign.runs if run.directory.resolve() == place]
    if (checkpoint := NAME.fullmatch(place.name)) and is_single_run(place.parent.parent):
        fix = f"name its run's directory, and the checkpoint with --step {int(checkpoint[1])}"
        raise ConfigError(f"{directory}: is a checkpoint; {fix}")
    if not is_campaign(directory):
        raise ConfigError(f"{directory}: is no campaign and no run; `retrain status` lists those in logs/")
    campaign = gather(directory)
    names = first_of([plain(label) for label in campaign.conditions], 10)
    if not name and len(campaign.conditions) > 1:
        raise ConfigError(f"{directory}: has several conditions; name one after it: {names}")
    runs = side_of(campaign, name or campaign.conditions[0]).runs
    if not runs:
        raise ConfigError(f"{directory}: has no condition or run {plain(name)!r}; it has {names}")
    return campaign, runs


def _best_seed(runs: Sequence[RunHistory], *, best: bool) -> tuple[RunHistory, str]:
    """Return the best seed of a condition, if it is asked for, and why: by the first metric that all have."""
    done = [run for run in runs if run.is_done]
    count = f"{len(done)} of {count_of(len(runs), 'seed')} finished"
    condition = plain(runs[0].condition)
    if not best or not done:
        names = first_of([run.name for run in done or runs], 10)
        fix = f"name one ({names}), or add --best" if done else f"name one ({names}) with --unfinished"
        raise ConfigError(f"condition {condition!r} has several runs, {count}; {fix}")
    for metric in JUDGES:
        values = [final_value(run, metric, Window()) for run in done]
        rewards = [value for value in values if value is not None]
        if len(rewards) == len(done):
            best_reward = max(rewards)
            why = f"the best by {metric}, {significant(best_reward)}, of {len(done)} finished seeds"
            return done[rewards.index(best_reward)], why
    raise ConfigError(
        f"condition {condition!r}: its seeds have no reward in common to choose by; name one of "
        f"{first_of([run.name for run in done], 10)}"
    )
