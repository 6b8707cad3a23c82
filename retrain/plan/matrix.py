"""Conditions x seeds -> runs, each with its own resolved configuration."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.base import registry
from retrain.base.errors import ConfigError, Problem
from retrain.config.campaign import LARGEST_SEED, Campaign, Condition, Decide, Run
from retrain.config.digest import digest_by_seed
from retrain.config.files import contents_of, with_absolute_paths
from retrain.config.resolve import label_of, label_of_modes, resolve
from retrain.config.schema import Backend, Config
from retrain.config.versions import CURRENT
from retrain.plan.launching import runs_side_by_side
from retrain.records.text import name_of_run, plain

if TYPE_CHECKING:
    from retrain.records.manifest import RunEntry
    from retrain.records.run_row import PlannedRun

FEWEST_SEEDS = 3  # of a campaign with `[decision]`: fewer show nothing
LONGEST_NAME = 64  # characters of a condition's own name that views show


@dataclass(frozen=True)
class RunPlan:
    """One run: a condition with a seed, and everything that its worker needs."""

    run_id: str  # safe as a file name, for any condition name
    condition: str
    seed: int
    config: Config
    config_hash: str

    @property
    def title(self) -> str:
        """What it is called wherever it is shown."""
        return name_of_run(self.run_id, self.condition, self.seed)

    @property
    def max_steps(self) -> int:
        return self.config.training.max_steps

    @property
    def planned(self) -> PlannedRun:
        from retrain.records.run_row import PlannedRun  # not at the top: `explain` needs no records

        return PlannedRun(self.run_id, self.condition, self.seed, self.max_steps, self.config_hash)

    @property
    def answers_alone(self) -> bool:
        """Whether a completion is only the answer, character by character: no reasoning, and no turns."""
        of_characters = registry.hook("backends", self.config.backend.backend, "check_alphabet")
        return of_characters is not None and self.config.environment.is_single_turn

    @property
    def takes_permits(self) -> bool:
        """Whether the backend calls an API under permits; the default is yes."""
        return self._backend_says("takes_permits", otherwise=True)

    @property
    def wants_gpu(self) -> bool:
        return self._backend_says("wants_gpu", otherwise=False)

    def _backend_says(self, hook: str, *, otherwise: bool) -> bool:
        """Return the answer of one of the backend's hooks, given its options."""
        backend = self.config.backend
        answer = registry.ask("backends", backend.backend, hook, backend.options)
        return otherwise if answer is None else bool(answer)

    @property
    def computes_here(self) -> bool:
        """Whether steps compute on this machine's cores; steps with a simulated API mostly wait."""
        return self._backend_says("computes_here", otherwise=False)


@dataclass(frozen=True)
class Plan:
    """All runs of a file, in launch order (all conditions of a seed before the next seed)."""

    name: str
    campaign: Campaign  # how runs are launched; defaults for a file without [campaign]
    runs: tuple[RunPlan, ...]
    is_single_run: bool
    log_dir: Path
    config_hash: str
    decision: Decide | None = None
    search_seeds: tuple[int, ...] = ()  # that choose, with `[campaign.search]`; the others decide
    first_seeds: int = 0  # that a campaign with `[decision]` begins with
    added_seeds: tuple[int, ...] = ()  # by the user, after it had begun
    proposed: int = 0  # conditions, the last ones, that the sampler of `[campaign.search]` proposed

    @cached_property
    def conditions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.condition for run in self.runs))

    @property
    def own_conditions(self) -> tuple[str, ...]:
        """The conditions without those that a sampler proposed."""
        return self.conditions[: len(self.conditions) - self.proposed]

    def first_runs(self) -> dict[str, RunPlan]:
        """Return each condition's first run, by name: seeds change nothing but the seed."""
        first: dict[str, RunPlan] = {}
        for run in self.runs:
            first.setdefault(run.condition, run)
        return first

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    @cached_property
    def reference(self) -> str:
        """The condition that others are compared with."""
        wanted = self.decision.reference if self.decision else ""
        return next((c for c in self.conditions if wanted in (c, label_of(c))), self.conditions[0])

    @property
    def design(self) -> dict[str, object]:
        """What `[decision]` must fix before data are looked at; empty without that table."""
        return vars(self.decision) | {"reference": self.reference} if self.decision else {}

    @property
    def planned_seeds(self) -> tuple[int, ...]:
        """The seeds without those that the user added."""
        return self.seeds[: len(self.seeds) - len(self.added_seeds)]

    @property
    def workers(self) -> int:
        if not self.campaign.parallel:
            return 1
        return min(self.campaign.max_workers or len(self.runs), len(self.runs))

    @property
    def shares_cores(self) -> bool:
        """Whether workers compute side by side on this machine."""
        return self.runs[0].computes_here and runs_side_by_side(self.campaign)

    @property
    def total_steps(self) -> int:
        return sum(run.max_steps for run in self.runs)

    @property
    def backends_with_permits(self) -> tuple[Backend, ...]:
        """The backends of runs that call an API under permits."""
        return tuple(run.config.backend for run in self.runs if run.takes_permits)

    @property
    def permits(self) -> int | None:
        """API calls in flight over all workers, at first if they adapt; None if no run calls one."""
        return min((backend.first_permits for backend in self.backends_with_permits), default=None)

    @property
    def permits_adapt(self) -> bool:
        return any(backend.adapts_permits for backend in self.backends_with_permits)


def plan_runs(
    config: Config,
    file_name: str = "campaign",
    drawn_seed: int | None = None,
    added_seeds: int = 0,
    proposed: int = 0,
) -> Plan:
    """Return the plan of a file's runs; its name names the campaign if the file does not.

    A file without a seed gets the `drawn_seed`, or draws one. With `[decision]` the plan has all runs that
    may be needed. `added_seeds` further ones follow all others. Of the conditions, the last `proposed` are a
    sampler's.

    Raises ConfigError with every problem of `[campaign.search]`, or of `[decision]`.
    """
    campaign, given = config.campaign or Campaign(), _seeds(config, drawn_seed)
    seeds = _with_further(config, given, added_seeds)
    bases = [(name, with_absolute_paths(base)) for name, base in _conditions(config)]
    contents = [contents_of(base) for _, base in bases]
    known = [
        (name, base, files, digest_by_seed(base, files))
        for (name, base), files in zip(bases, contents, strict=True)
    ]
    runs = [_run(*condition, seed) for seed in seeds for condition in known]
    plan = Plan(
        name=campaign.name or Path(file_name).stem or "campaign",
        campaign=campaign,
        runs=tuple(runs),
        is_single_run=config.campaign is None,
        log_dir=Path(config.logging.log_dir),
        config_hash=hashlib.sha256("".join(r.config_hash for r in runs).encode()).hexdigest()[:16],
        decision=_decide(config),
        search_seeds=tuple(given) if campaign.search else (),
        first_seeds=FEWEST_SEEDS if campaign.search else max(FEWEST_SEEDS, len(given)),
        added_seeds=tuple(seeds[len(seeds) - added_seeds :]),
        proposed=proposed,
    )
    _require_sound(plan, len(given), file_name)
    return plan


def _require_sound(plan: Plan, seeds: int, file_name: str) -> None:
    """Raise ConfigError with every problem of `[campaign.search]`, or of `[decision]`."""
    search, problems = plan.campaign.search, list[Problem]()
    if search is not None:
        from retrain.plan.search import search_problems  # not at the top: few files have the table

        problems = [one.below("campaign", "search") for one in search_problems(plan, search)]
    if plan.decision is not None and not problems:
        from retrain.plan.decidable import decision_problems  # nor this

        problems = [one.below("decision") for one in decision_problems(plan.decision, plan, seeds)]
    if problems:
        raise ConfigError([f"{file_name} {problem}" for problem in problems])


def _decide(config: Config) -> Decide | None:
    """Return the table by which a campaign decides; a search always does."""
    search = config.campaign.search if config.campaign else None
    return config.decision or (Decide(metric=search.metric) if search else None)


def planned_runs(config: Config, drawn_seed: int | None, added_seeds: int = 0) -> list[RunEntry]:
    """List a file's runs in launch order, without reading the files they name; none if the seed is not known.

    Only the types of the file need to be valid.
    """
    if drawn_seed is None and config.training.seed < 0 and not (config.campaign and config.campaign.seeds):
        return []
    from retrain.records.manifest import RunEntry  # not at the top: `explain` needs no records

    conditions, seeds = _conditions(config), _with_further(config, _seeds(config, drawn_seed), added_seeds)
    return [
        RunEntry(_run_id(name, seed), name, seed, base.training.max_steps)
        for seed in seeds
        for name, base in conditions
    ]


def _conditions(config: Config) -> list[tuple[str, Config]]:
    """Resolve every condition, except for its seed, by name."""
    found: Sequence[Condition | None] = (config.campaign and config.campaign.conditions) or [None]
    if config.campaign is not None:  # without all others, which would be copied for each
        config = dataclasses.replace(config, campaign=dataclasses.replace(config.campaign, conditions=None))
    resolved = [(condition, resolve(config, condition, seed=0)) for condition in found]
    return [(_name(condition, base), base) for condition, base in resolved]


def _seeds(config: Config, drawn_seed: int | None) -> Sequence[int]:
    if config.campaign and config.campaign.seeds:
        return config.campaign.seeds
    if config.training.seed >= 0:
        return [config.training.seed]
    if drawn_seed is not None:
        return [drawn_seed]
    import secrets  # not at the top: costs 4 ms, and most files give a seed

    return [secrets.randbelow(LARGEST_SEED + 1)]


def _with_further(config: Config, given: Sequence[int], added: int) -> list[int]:
    """Return the seeds that are given, those that `[decision]` may add, and those that the user added."""
    table, is_search = _decide(config), bool(config.campaign and config.campaign.search)
    most = len(given)
    if table is not None:
        most = max(most, len(given) + table.max_seeds if is_search else table.max_seeds)
    further = (s for s in chain(range(max(given) + 1, LARGEST_SEED + 1), range(max(given))) if s not in given)
    return [*given, *islice(further, most - len(given) + added)]


def _run_id(condition: str, seed: int) -> str:
    return f"{label_of(condition)}_s{seed}"


def _name(condition: Condition | None, resolved: Config) -> str:
    if condition is not None and condition.name:
        return shown_name(condition.name)
    if condition is None and resolved.run is not None:
        return shown_name(resolved.run.condition)
    return label_of_modes(resolved.algorithm.advantage_mode, resolved.algorithm.transform_mode)


def shown_name(name: str) -> str:
    """Return a name if it is short and safe to print on a terminal, else its label."""
    return name if name == plain(name, LONGEST_NAME) != "" else label_of(name)


def _run(
    condition: str, base: Config, contents: dict[str, str], digest_of: Callable[[int], str], seed: int
) -> RunPlan:
    run_id = _run_id(condition, seed)
    resolved = dataclasses.replace(base, training=dataclasses.replace(base.training, seed=seed))
    config_hash = digest_of(seed)
    identity = Run(run_id, "", condition, config_hash, contents, version=CURRENT)
    return RunPlan(run_id, condition, seed, dataclasses.replace(resolved, run=identity), config_hash)
