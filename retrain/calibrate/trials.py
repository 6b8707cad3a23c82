"""The short campaigns that a calibration consists of, as TOML tables made from the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config.resolve import merge, overrides_of, with_default_plugins
from retrain.config.schema import BackPressure, Training
from retrain.records.text import count_of

Tables = Mapping[str, Any]
SERVICES = ("loggers", "logger_params")  # they are for the user's results, not for trials
POINTS_FOR_A_LAW = 4  # numbers of workers; with three coefficients, a misfit shows from four points


@dataclass(frozen=True)
class Trial:
    """One short campaign."""

    name: str  # pilot, workers-4, batch, limiter
    what: str  # for people
    runs: int
    steps: int  # of each run
    tables: Tables


@dataclass(frozen=True)
class Effort:
    """Sizes of the trials."""

    seeds: int = 1  # of the pilot, each condition
    steps: int = 30  # of a pilot's run
    probe_steps: int = 10  # of each concurrent run, at least
    probe_s: float = 4.0  # the same in seconds, so that starting one by one hardly counts
    batch_steps: int = 40  # of the batch size search
    most_workers: int = 16  # at a time


def pilot(tables: Tables, effort: Effort, conditions: int, log_dir: Path) -> Trial:
    """Return the trial that runs every condition for a few steps, launched as the campaign would be."""
    changed = _short(tables, effort.steps, log_dir)
    campaign = changed["campaign"]
    known = campaign.get("seeds") or [max(0, changed.get("training", {}).get("seed", 0))]
    campaign["seeds"] = known[: effort.seeds]
    runs = conditions * len(campaign["seeds"])
    what = f"each condition, {count_of(len(campaign['seeds']), 'seed')}"
    return Trial("pilot", what, runs, effort.steps, changed)


def worker_counts(configured: int, cores: float, runs: int, most: int) -> list[int]:
    """Return the worker counts to try: 1, 2, 4, ... beyond those configured and twice the cores."""
    highest = min(max(configured, round(2 * cores), 2), runs, most)
    doubled = {1 << power for power in range(highest.bit_length())}
    tried = {n for n in doubled if n <= highest} | {min(configured, highest)}
    if len(tried) < POINTS_FOR_A_LAW <= highest:
        tried.add(3)
    return sorted(tried)


def concurrent(
    tables: Tables, condition: int, workers: int, steps: int, log_dir: Path, least_s: float = 0.0
) -> Trial:
    """Return the trial of concurrent runs of one condition, whose `steps` take at least `least_s`."""
    changed = _alone(_short(tables, steps, log_dir), condition)
    changed["campaign"] |= {
        "seeds": list(range(workers)),
        "parallel": True,
        "max_workers": workers,
        "stagger_seconds": 0,
    }
    changed["training"] = {**changed.get("training", {}), "save_every": 0, "eval_every": 0}
    changed["data"] = {**changed.get("data", {}), "eval_prompts": 1}
    span = f", {least_s:g} s or more" if least_s else ""
    return Trial(f"workers-{workers}", f"{workers} at a time{span}", workers, steps, changed)


def seeking_batch(tables: Tables, condition: int, steps: int, log_dir: Path) -> Trial:
    """Return the trial of one run whose batch size back pressure chooses."""
    changed = _one_run(tables, condition, steps, log_dir)
    found = {
        **changed.get("backpressure", {}),
        "enabled": True,
        "control": "batch",
        "objective": "throughput",
    }
    batch = changed.get("training", {}).get("batch_size", Training.batch_size)
    found["max_batch_size"] = max(found.get("max_batch_size", BackPressure.max_batch_size), batch)
    found["min_batch_size"] = min(found.get("min_batch_size", BackPressure.min_batch_size), batch)
    changed["backpressure"] = found
    changed["rate_limiter"] = {}
    return Trial("batch", "back pressure over batch sizes", 1, steps, changed)


def unlimited(tables: Tables, condition: int, steps: int, log_dir: Path) -> Trial:
    """Return the trial of one run whose sampling is not limited."""
    changed = _one_run(tables, condition, steps, log_dir)
    changed["rate_limiter"] = {**changed.get("rate_limiter", {}), "rate_limit_speed_batch_per_sim": 0}
    return Trial("limiter", "asynchronous sampling, unlimited", 1, steps, changed)


def _one_run(tables: Tables, condition: int, steps: int, log_dir: Path) -> dict[str, Any]:
    changed = _alone(_short(tables, steps, log_dir), condition)
    changed["campaign"]["seeds"] = [0]
    return changed


def _short(tables: Tables, steps: int, log_dir: Path) -> dict[str, Any]:
    changed = deepcopy(dict(tables))
    changed["campaign"] = {
        **changed.get("campaign", {}),
        "max_steps": steps,
        "retries": 0,
        "pause_after": 0,
        "on_failure": "continue",  # other conditions are still measured
    }
    changed["campaign"].pop("name", None)  # directories are named after their trials
    logging = {key: value for key, value in changed.get("logging", {}).items() if key not in SERVICES}
    changed["logging"] = {**logging, "log_dir": str(log_dir)}
    for table in (changed, *(changed["campaign"].get("conditions") or ())):
        if "warmup" in table:
            table["warmup"] = {}  # not part of what is sized
        if "training" in table:
            table["training"].pop("max_steps", None)
    return changed


def _alone(tables: dict[str, Any], condition: int) -> dict[str, Any]:
    """Merge a condition's own settings into the file's, so that they do not override the trial's."""
    campaign = tables["campaign"]
    if not campaign.get("conditions"):
        return tables
    own = campaign["conditions"][condition]
    below = with_default_plugins(tables)
    alone = {**campaign, "conditions": [{"name": own.get("name", "")}]}
    return {**tables, **merge(below, overrides_of(own)), "campaign": alone}
