"""A plan: all runs of a file, and what can be asked of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.backends import Devices, DeviceUse, plugin_of
from retrain.config.digest import start_digest, warm_up_digest
from retrain.config.resolve import label_of, plays_episodes, runs_here, runs_side_by_side
from retrain.config.schema import BackendSection, CampaignSection, Config, DecisionSection, EvalSection
from retrain.records.text import name_of_run

if TYPE_CHECKING:
    from retrain.records.run_row import RunEntry

ENOUGH_SEEDS = 6  # to tell the noise of an `[[eval]]`: of three, every third shows by chance none of its own


class Origin(Enum):
    """Why a campaign has a run."""

    GIVEN = "given"  # by the file; of its seeds, `[decision]` may need only some
    ADDED = "added"  # as a further seed, by the user, after the campaign had begun
    PROPOSED = "proposed"  # as a condition, by the sampler of `[campaign.search]`


@dataclass(frozen=True)
class RunPlan:
    """One run: a condition with a seed, and everything that its worker needs."""

    run_id: str  # safe as a file name, for any condition name
    condition: str
    seed: int
    config: Config
    config_hash: str
    origin: Origin = Origin.GIVEN

    @property
    def title(self) -> str:
        """What it is called wherever it is shown."""
        return name_of_run(self.run_id, self.condition, self.seed)

    @property
    def max_steps(self) -> int:
        return self.config.last_step

    @property
    def planned(self) -> RunEntry:
        from retrain.records.run_row import RunEntry  # not at the top: `explain` needs no records

        return RunEntry(self.run_id, self.condition, self.seed, self.max_steps, self.config_hash)

    @property
    def answers_alone(self) -> bool:
        """Whether a completion is only the answer, character by character: no reasoning, and no turns."""
        backend = self.config.backend
        spells = plugin_of(backend.backend).spells(backend.options)
        return spells and not plays_episodes(self.config)

    @property
    def takes_permits(self) -> bool:
        """Whether the backend calls an API under permits."""
        backend = self.config.backend
        return plugin_of(backend.backend).takes_permits(backend.options)

    @property
    def wants_gpu(self) -> int:
        backend = self.config.backend
        return plugin_of(backend.backend).wants_gpu(backend.options)

    @property
    def devices(self) -> Devices:
        backend = self.config.backend
        return plugin_of(backend.backend).devices(backend.options)

    @property
    def computes_here(self) -> bool:
        """Whether steps compute on this machine's cores; steps with a simulated API mostly wait."""
        backend = self.config.backend
        return plugin_of(backend.backend).computes_here(backend.options)


@dataclass(frozen=True)
class Plan:
    """All runs of a file, in launch order (all conditions of a seed before the next seed)."""

    name: str
    campaign: CampaignSection  # how runs are launched; defaults for a file without [campaign]
    runs: tuple[RunPlan, ...]
    is_single_run: bool
    log_dir: Path
    config_hash: str
    decision: DecisionSection | None = None
    search_seeds: tuple[int, ...] = ()  # that choose, with `[campaign.search]`; the others decide
    mirror: str = ""  # the address to which it is copied
    first_seeds: int = 0  # that a campaign with `[decision]` begins with

    @cached_property
    def conditions(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(run.condition for run in self.runs))

    @cached_property
    def proposed_conditions(self) -> tuple[str, ...]:
        """The conditions that a sampler proposed, in that order."""
        return tuple(dict.fromkeys(run.condition for run in self.runs if run.origin is Origin.PROPOSED))

    @cached_property
    def first_runs(self) -> Mapping[str, RunPlan]:
        """Each condition's first run, by name: seeds change nothing but the seed."""
        first: dict[str, RunPlan] = {}
        for run in self.runs:
            first.setdefault(run.condition, run)
        return first

    @cached_property
    def evaluations_at_start(self) -> Mapping[str, Mapping[str, int]]:
        """How many runs of a condition make each evaluation before the first step, "" being the run's own.

        Runs of a seed that start alike make it once; it counts for the first of their conditions.
        """
        digests, counted = dict[str, dict[str, str]](), set[tuple[str, int]]()
        for condition, run in self.first_runs.items():
            config = replace(run.config, training=replace(run.config.training, seed=-1))
            tables = (EvalSection(at_start=config.training.eval_at_start), *config.eval.tables)
            digests[condition] = {
                table.name: start_digest(config, table.name)
                for table in tables
                if config.evaluates_at_start(table)
            }
        counts: dict[str, dict[str, int]] = {condition: {} for condition in digests}
        for run in self.runs:
            for name, digest in digests[run.condition].items():
                if (digest, run.seed) not in counted:
                    counted.add((digest, run.seed))
                    counts[run.condition][name] = counts[run.condition].get(name, 0) + 1
        return counts

    @cached_property
    def warm_ups(self) -> Mapping[str, int]:
        """How many runs of a condition train their `[warmup]`; the others of their seed take it from them."""
        digests = {
            condition: warm_up_digest(replace(run.config, training=replace(run.config.training, seed=-1)))
            for condition, run in self.first_runs.items()
            if run.config.warmup.steps
        }
        makers: dict[tuple[str, int], str] = {}
        for run in self.runs:
            if run.condition in digests:
                makers.setdefault((digests[run.condition], run.seed), run.condition)
        return Counter(makers.values())

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(run.seed for run in self.runs))

    @cached_property
    def reference(self) -> str:
        """The condition that others are compared with."""
        name = self.decision.reference if self.decision else ""
        return next((c for c in self.conditions if name in (c, label_of(c))), self.conditions[0])

    @property
    def design(self) -> dict[str, object]:
        """What `[decision]` must fix before data are looked at; empty without that table."""
        return vars(self.decision) | {"reference": self.reference} if self.decision else {}

    @cached_property
    def added_seeds(self) -> tuple[int, ...]:
        """The seeds that the user added."""
        return tuple(dict.fromkeys(run.seed for run in self.runs if run.origin is Origin.ADDED))

    @cached_property
    def planned_seeds(self) -> tuple[int, ...]:
        """The seeds without those that the user added."""
        return tuple(dict.fromkeys(run.seed for run in self.runs if run.origin is not Origin.ADDED))

    @property
    def workers(self) -> int:
        if not self.campaign.parallel:
            return 1
        return min(self.campaign.max_workers or len(self.runs), len(self.runs))

    @property
    def device_use(self) -> DeviceUse | None:
        """How many devices each run uses, of how many; None if that is not one number, or not known."""
        backends = [run.config.backend for run in self.first_runs.values()]
        uses = {plugin_of(backend.backend).device_use(backend.options) for backend in backends}
        use, options = uses.pop(), backends[0].options
        if uses or use is None or options.get("nodes", 1) != 1:
            return None
        if runs_here(self.campaign):
            return use
        if options.get("devices", 1) != use.count:  # all that a job finds
            return None
        return DeviceUse(use.count, use.count * self.workers, "device")  # that it asks its cluster for

    @property
    def shares_cores(self) -> bool:
        """Whether workers compute side by side on this machine."""
        return self.runs[0].computes_here and runs_side_by_side(self.campaign)

    @property
    def devices_each(self) -> int:
        """How many devices of this machine each run takes; 1 if runs differ, or it is not known."""
        use = self.device_use
        return use.count if use is not None and runs_side_by_side(self.campaign) else 1

    def room(self, cores: float) -> float:
        """Return how many runs at a time have devices, or cores, of their own here; 0 if none shares any."""
        use = self.device_use
        if use is not None and self.devices_each > 1:
            return use.there / use.count
        return cores if self.shares_cores else 0.0

    @property
    def total_steps(self) -> int:
        return sum(run.max_steps for run in self.runs)

    @cached_property
    def backends_with_permits(self) -> tuple[BackendSection, ...]:
        """The backends of conditions whose runs call an API under permits."""
        return tuple(run.config.backend for run in self.first_runs.values() if run.takes_permits)

    @property
    def permits(self) -> int | None:
        """API calls in flight over all workers, at first if they adapt; None if no run calls one."""
        return min((backend.first_permits for backend in self.backends_with_permits), default=None)

    @property
    def permits_adapt(self) -> bool:
        """Whether the number of permits follows the API: "auto", with a backend that reports its calls."""
        return any(
            backend.adapts_permits and plugin_of(backend.backend).reports_calls(backend.options)
            for backend in self.backends_with_permits
        )
