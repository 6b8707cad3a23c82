"""What a step and a campaign can cost at most, from prices, prompts and `max_tokens` alone.

Every completion counts as long as it may be, every prompt as the longest of its task, and of a text a token
for each byte. Steps that are repeated after a kill come on top. Where episodes have several turns, or
rollouts are sampled ahead of training, no such number is known: nothing bounds what environments answer, or
what is sampled and thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.base import registry
from retrain.base.rollouts import Prompt
from retrain.config.prices import price_of
from retrain.config.resolve import as_played, plays_episodes, teachers_of
from retrain.config.schema import Config, EvalSection
from retrain.plan.matrix import Plan
from retrain.records.spending import Tokens

# whose gradient an API computes; of others it first tells the log-probabilities, which is billed as reading
COMMON_LOSSES = ("importance_sampling", "ppo", "cispo")


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens of prompts that one condition's runs read, at most."""

    longest: int  # of a prompt to train on
    held_out: tuple[int, int] = (0, 0)  # how many prompts the run's own evaluation asks, and their tokens
    evals: tuple[tuple[int, int], ...] = ()  # the same of each `[[eval]]`
    further: tuple[tuple[int, int], ...] = ()  # the same, where `[decision]` may have more asked at the end


@dataclass(frozen=True, slots=True)
class MostCost:
    """What a campaign without earlier runs can cost at most."""

    step_usd: float  # of the dearest condition
    campaign_usd: float  # all runs, with their evaluations and warm-up


def reading_of(
    config: Config,
    train: Iterable[Prompt],
    held_out: Iterable[Prompt],
    evals: Sequence[Sequence[Prompt]],
    at_end: Sequence[Sequence[Prompt]] = (),
) -> Reading:
    """Return what a condition's runs read, from its prompts and those of its evaluations.

    Args:
        at_end: what each evaluation asks at most at a run's end, where that may be more than `evals`.
    """
    system = len(str(config.backend.options.get("system_prompt", "")).encode())

    def total(prompts: Iterable[Prompt]) -> tuple[int, int]:
        lengths = [prompt.tokens_at_most + system for prompt in prompts]
        return len(lengths), sum(lengths)

    longest = max((prompt.tokens_at_most for prompt in train), default=0) + system
    further = [most if len(most) > len(own) else () for own, most in zip(evals, at_end, strict=False)]
    return Reading(longest, total(held_out), tuple(map(total, evals)), tuple(map(total, further)))


def why_unbounded(plan: Plan) -> str:
    """Return why nothing bounds a plan's cost; "" if something does."""
    for run in plan.first_runs.values():
        config = run.config
        evals = (as_played(config, table).environment for table in config.eval.tables)
        if plays_episodes(config) or not all(played.is_single_turn for played in evals):
            return "no earlier run has shown what the turns of an episode read"
        if config.rate_limiter.max_staleness:
            return "no earlier run has shown how many rollouts are sampled ahead of training"
    return ""


def most_cost(plan: Plan, readings: Mapping[str, Reading]) -> MostCost | None:
    """Return what a plan can cost at most; None if a price is not known, or nothing bounds it."""
    if why_unbounded(plan):
        return None
    steps_usd, runs_usd = {}, {}
    for condition, run in plan.first_runs.items():
        price, reading = price_of(run.config), readings.get(condition)
        if price is None or reading is None:
            return None
        steps_usd[condition] = _step(run.config, reading).usd(price)
        beside = _beside(run.config, reading).usd(price)
        runs_usd[condition] = run.max_steps * steps_usd[condition] + beside
    at_start_usd = []
    for condition, names in plan.evaluations_at_start.items():
        config, price = plan.first_runs[condition].config, price_of(plan.first_runs[condition].config)
        evaluations = dict(_evaluations(config, readings[condition]))
        for name, times in names.items():
            at_start_usd.append(times * evaluations[name].usd(price) if price else 0.0)
    for condition, times in plan.warm_ups.items():
        config = plan.first_runs[condition].config
        if price := price_of(config):
            at_start_usd.append(times * _warm_up(config).usd(price))
    each_usd = (runs_usd[run.condition] for run in plan.runs)
    return MostCost(max(steps_usd.values()), math.fsum([*each_usd, *at_start_usd]))


def _step(config: Config, reading: Reading) -> Tokens:
    training, algorithm, pressure = config.training, config.algorithm, config.backpressure
    grows = pressure.enabled and pressure.control == "batch"
    prompts = max(training.batch_size, pressure.max_batch_size if grows else 0)
    rollouts = prompts * training.group_size
    trained = training.updates_per_batch * rollouts * (reading.longest + training.max_tokens)
    batches = 1 + config.data.most_refill
    read, sampled = batches * prompts * reading.longest, batches * rollouts * training.max_tokens
    cached = batches * (rollouts - prompts) * reading.longest
    if teachers_of(config):  # which reads each rollout with its prompt
        read += rollouts * (reading.longest + training.max_tokens)
    backend = config.backend
    if registry.ask("backends", backend.backend, "bills", backend.options):
        if teachers_of(config):  # which samples a token with each
            sampled += rollouts
        is_common = algorithm.loss_mode in COMMON_LOSSES and not algorithm.ratio_cap
        if algorithm.kl_coef:  # each rollout is scored by the reference, which samples a token
            read += 2 * trained
            sampled += training.updates_per_batch * rollouts
        elif training.entropy_bonus or not is_common:
            read += trained
    return Tokens(read, cached, sampled, trained)


def _evaluations(config: Config, reading: Reading) -> Iterator[tuple[str, Tokens]]:
    """Iterate over the names of a run's evaluations, "" for its own, and their tokens of one time."""
    several = config.data.eval_samples
    its_table = EvalSection(samples=1 + (several if several > 1 else 0))
    evals = zip(config.eval.tables, reading.evals, strict=True)
    for table, (prompts, read) in ((its_table, reading.held_out), *evals):
        longest = table.max_tokens or config.training.max_tokens
        yield table.name, Tokens(table.samples * read, sample=table.samples * prompts * longest)


def _beside(config: Config, reading: Reading) -> Tokens:
    """Return the tokens of a run's evaluations after steps."""
    tokens = Tokens()
    periods = (config.training.eval_every, *(table.every for table in config.eval.tables))
    for every, (_, once) in zip(periods, _evaluations(config, reading), strict=True):
        times = math.ceil(config.last_step / every) if every else 1
        tokens += Tokens(times * once.prefill, sample=times * once.sample)
    for table, (prompts, read) in zip(config.eval.tables, reading.further, strict=False):
        longest = table.max_tokens or config.training.max_tokens  # besides the end's: it may have been made
        tokens += Tokens(table.samples * read, sample=table.samples * prompts * longest)
    return tokens


def _warm_up(config: Config) -> Tokens:
    """Return the tokens of a warm-up: each row counts as long as the file's longest line."""
    with Path(config.warmup.path).open("rb") as lines:
        longest = max(map(len, lines), default=0)
    return Tokens(train=config.warmup.steps * config.warmup.batch_size * longest)
