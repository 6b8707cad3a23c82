"""Opens everything that a run needs, and closes it at the end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from retrain.backends import (
    Backend,
    BackendProgress,
    BackendSpec,
    EpisodeProgress,
    Sampling,
    SamplingProgress,
    Trainers,
    connected,
    ignore_progress,
    never,
    plugin_of,
)
from retrain.base import registry
from retrain.base.errors import ConfigError, PromptError, RecordsError
from retrain.base.rollouts import CallForm, Group, Prompt
from retrain.config.adapters import KEY
from retrain.config.campaign import EvalSection
from retrain.config.files import changed_files
from retrain.config.resolve import as_played
from retrain.config.schema import Config
from retrain.plugins.environments import brings_loop
from retrain.plugins.environments import opened as opened_environment
from retrain.plugins.tasks import Task
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.trainer import checkpoint
from retrain.trainer.batch import BoundAlgorithm
from retrain.trainer.budget import Budget
from retrain.trainer.control import Control
from retrain.trainer.episodes import Episodes, SampleGroups
from retrain.trainer.eval_schedule import EvalSchedule, OpenEval
from retrain.trainer.evaluation import HeldOut
from retrain.trainer.journal import Journal
from retrain.trainer.ledger import Ledger
from retrain.trainer.loop import Trainer
from retrain.trainer.metered import MeteredBackend
from retrain.trainer.part import Part
from retrain.trainer.permits import RunPermits
from retrain.trainer.rung import Rung
from retrain.trainer.scoring import Scorer
from retrain.trainer.signs import StepSigns
from retrain.trainer.source import AsyncSource, Source, TrainingSampler, open_source
from retrain.trainer.step_meter import StepMeter
from retrain.trainer.throttle import LoadThrottle
from retrain.trainer.turn_sampling import PlaySeeds, TurnSampler
from retrain.trainer.unscored import UnscoredCount
from retrain.trainer.updates import Updates
from retrain.trainer.warm_up import WarmUp


@dataclass(frozen=True)
class OpenRun:
    """What a run has open when its parts are made."""

    config: Config
    files: RunFiles
    campaign: CampaignFiles
    journal: Journal
    stop: threading.Event  # set: save a checkpoint at the next step boundary and stop
    task: Task
    backend: Backend
    permits: RunPermits
    ledger: Ledger
    source: Source
    control: Control
    throttle: LoadThrottle
    held_out: HeldOut
    evals: Sequence[OpenEval]


def parts_of(run: OpenRun) -> Iterator[Part]:
    """Iterate over all that attaches to the loop, in the order in which the loop calls it.

    What sets money aside comes after whatever else may stop a run, and evaluations, which cost some, last.
    """
    config, training = run.config, run.config.training
    ahead = run.source if isinstance(run.source, AsyncSource) else None
    budget = Budget(config, run.campaign, run.ledger, ahead)
    yield from (run.source, run.control, run.throttle, run.permits, run.ledger)
    yield Rung(run.files.rung, run.source, training.max_steps)
    yield budget
    if config.warmup.steps:
        yield WarmUp(config, run.files.warmup, run.backend, run.journal, budget)
    yield StepSigns(training.lr)
    yield EvalSchedule(config, run.held_out, run.evals, run.journal, budget, run.stop)
    yield UnscoredCount(training.max_unscored, training.max_steps)


@contextmanager
def open_trainer(
    config: Config, files: RunFiles, campaign: CampaignFiles, journal: Journal, stop: threading.Event
) -> Iterator[Trainer]:
    """Build the task, open the reward and connect the backend; close everything at the end."""
    task = _built(config.data.task, config.data.options, config.data.seed)
    permits, ledger = RunPermits(config, files, campaign), Ledger(config, files)
    with ExitStack() as opened:
        opened.callback(ledger.close)
        scorer = _scorer(config.reward.reward, config.reward.params, config, opened)
        asked = [_open_eval(table, config, task, scorer, opened) for table in config.eval.tables]
        saved = partial(checkpoint.written, files.checkpoints)
        journal.watch({"reward": scorer.progress, "evaluate": scorer.progress, "checkpoint": saved})
        is_over = threading.Event()

        def is_leaving() -> bool:
            return stop.is_set() or is_over.is_set()

        spec = BackendSpec(
            seed=config.training.seed,
            model=config.model.model,
            base_url=config.model.base_url,
            lora_rank=config.model.lora_rank,
            alphabet=task.alphabet,
            options=config.backend.options,
            permit=permits.permit,
            observe_call=permits.observe_call,
            observe=_observer(config, journal),
            memory=partial(trainers_here, config, campaign, task),
            is_leaving=is_leaving,
            run_name=permits.label,
            notes=files.directory,
            meter=ledger.meter,
        )
        backend = connected(config.backend.backend, spec)
        opened.callback(backend.close)
        if ledger.price is not None and not backend.info.bills:
            backend = MeteredBackend(backend, ledger.meter)
        sample = sampler_of(config, backend, opened, journal.detail, is_leaving)
        training_sampler = TrainingSampler(config.training, sample, PlaySeeds(config, backend), ledger)
        source = open_source(config, backend.info, task, training_sampler)
        evals = []
        for table, open_eval in zip(config.eval.tables, asked, strict=True):
            sample_eval = sample
            if table.environment:
                played = as_played(config, table)
                sample_eval = sampler_of(played, backend, opened, journal.detail, is_leaving)
            evals.append(open_eval(partial(source.exclusively, sample_eval)))
        with _of_data():  # too long ones, before the first step
            asked_prompts = (prompt for evaluation in evals for prompt in evaluation.prompts)
            backend.check_prompts([*task.train, *task.held_out, *asked_prompts])
        held_out = task.held_out[: config.data.eval_prompts]
        run = OpenRun(
            config=config,
            files=files,
            campaign=campaign,
            journal=journal,
            stop=stop,
            task=task,
            backend=backend,
            permits=permits,
            ledger=ledger,
            source=source,
            control=Control(config, len(task.train)),
            throttle=LoadThrottle(config.throttle, campaign, stop, journal),
            held_out=HeldOut(config, held_out, partial(source.exclusively, sample), scorer.score),
            evals=evals,
        )
        parts = list(parts_of(run))
        for part in parts:
            if part is not ledger:  # which counts calls until the backend is closed
                opened.callback(part.close)
        algorithm = BoundAlgorithm(config, scorer.score)
        opened.callback(is_over.set)
        yield Trainer(
            config=config,
            files=files,
            backend=backend,
            algorithm=algorithm,
            sample=training_sampler,
            source=source,
            updates=Updates(config, backend, algorithm.loss),
            control=run.control,
            throttle=run.throttle,
            meter=StepMeter(backend, config.backpressure, journal),
            journal=journal,
            stop=stop,
            parts=parts,
        )


def _built(name: str, options: Mapping[str, Any], seed: int) -> Task:
    task: Task = registry.check_made("tasks", name, registry.find("tasks", name)(seed=seed, **options))
    return task


def _scorer(reward: str, params: Mapping[str, Any], config: Config, opened: ExitStack) -> Scorer:
    sandbox = {"sandbox": config.reward.sandbox, "sandbox_options": config.reward.sandbox_options}
    scorer = Scorer(reward, params, sandbox, config.training.max_steps)
    opened.callback(scorer.close)
    return scorer


def _open_eval(
    table: EvalSection, config: Config, task: Task, scorer: Scorer, opened: ExitStack
) -> Callable[[SampleGroups], OpenEval]:
    """Build an evaluation's task and open its reward; by default they are the run's."""
    if table.task:
        task = _built(table.task, table.options, config.data.seed)
    reward = scorer.score
    if table.reward:
        own = _scorer(table.reward, table.params, config, opened)
        reward = partial(own.score, ignores_environment=True)
    return partial(OpenEval, table, task.held_out[: table.prompts], reward)


def _observer(config: Config, journal: Journal) -> Callable[[BackendProgress], None]:
    """Return what shows a backend's progress; with episodes, a call for some of their turns tells little."""

    def but_turns(progress: BackendProgress) -> None:
        if not isinstance(progress, SamplingProgress):
            journal.detail(progress)

    return journal.detail if config.environment.is_single_turn else but_turns


def sampler_of(
    config: Config,
    backend: Backend,
    opened: ExitStack,
    observe: Callable[[EpisodeProgress], None] = ignore_progress,
    is_leaving: Callable[[], bool] = never,
) -> SampleGroups:
    """Return what samples each prompt's group: the backend, or episodes in the run's environment."""
    table = config.environment
    if table.is_single_turn:
        return partial(_single_turns, backend)
    has_template = bool(config.backend.options.get("chat_template"))
    if not (table.separate_turns or backend.info.extends):
        raise ConfigError(
            f"[environment].environment: backend {config.backend.backend!r} cannot append to a turn; set "
            "separate_turns = true, or implement `extend` of retrain.Backend, with `info.extends`"
        )
    form = _offered(config, backend)
    open_episode = opened.enter_context(opened_environment(table.environment, table.options, form))
    programs = None
    if brings_loop(table.environment):
        from retrain.plugins.environments.endpoint.session import Rendering
        from retrain.trainer.programs import Programs  # takes 30 ms, and few runs serve programs

        form_of = cache(lambda schemas: backend.call_form(json.loads(schemas)))
        programs = Programs(
            table, open_episode, Rendering(has_template, backend.read, backend.shown, form_of)
        )
    takes_several = backend.info.remote or backend.info.overlaps
    episodes = Episodes(
        table,
        open_episode,
        TurnSampler(backend, table.max_turn_tokens),
        programs,
        form=form,
        has_template=has_template,
        calls_at_once=config.backend.first_permits if takes_several else 1,
        sample_live=backend.sample_turns if backend.info.answers_turns else None,
        observe=observe,
        is_leaving=is_leaving,
    )
    opened.callback(episodes.close)
    return episodes.play


def _single_turns(backend: Backend, prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
    with _of_data():
        return backend.sample(prompts, how)


@contextmanager
def _of_data() -> Iterator[None]:
    """Name the data as the place of a prompt that cannot be read, which may be an environment's elsewhere."""
    try:
        yield
    except PromptError as error:
        problem = registry.read_problem(str(error), registry.PLACED)
        raise ConfigError(str(problem if problem.where else problem.below("data"))) from error


def _offered(config: Config, backend: Backend) -> CallForm | None:
    """Show the environment's functions to the policy; return how it writes calls, None without functions.

    Raises:
        ConfigError: the backend, or its chat template, does not support functions or turns.
    """
    table = config.environment
    schemas = registry.ask("environments", table.environment, "tools", table.options)
    if schemas:
        return backend.offer_tools(schemas, is_extended=not table.separate_turns)
    if not table.separate_turns:
        backend.check_turns()
    return None


def trainers_here(config: Config, campaign: CampaignFiles, task: Task) -> Trainers | None:
    """Return the estimate of a run, and how many of its campaign run at a time; None if there is none."""
    each = plugin_of(config.backend.backend).memory(config, task.train)
    if each is None:
        return None
    from retrain.records.manifest import read_manifest  # takes 30 ms

    count = 1
    if not os.environ.get("RETRAIN_JOB"):  # which a cluster may start anywhere
        with suppress(RecordsError):
            manifest = read_manifest(campaign.manifest)
            count = manifest.workers if manifest else 1
    return Trainers(each, max(1, count))


def start_anew(config: Config, trainer: Trainer) -> None:
    """Load the weights that a run starts from; a ConfigError if they are not those that were planned."""
    if not (adapter := config.model.adapter):
        return
    known = {key: text for key, text in config.run.files.items() if key == KEY} if config.run else {}
    if changed := changed_files(config, known):
        raise ConfigError([f"{problem}; restore it" for problem in changed])
    is_reference = config.algorithm.kl_coef > 0 and config.algorithm.kl_reference == "start"
    trainer.backend.start_from(adapter, is_reference=is_reference)


def check_reference(config: Config, trainer: Trainer) -> None:
    """Raise a ConfigError if a resumed run's KL term needs another reference than its checkpoint has."""
    algorithm = config.algorithm
    if not (config.model.adapter and algorithm.kl_coef):
        return
    if trainer.backend.has_start() != (algorithm.kl_reference == "start"):
        raise ConfigError(
            "[algorithm]: kl_coef or kl_reference was changed, and the checkpoint has not the reference that "
            "the run now needs; undo the change, or start the run again"
        )
