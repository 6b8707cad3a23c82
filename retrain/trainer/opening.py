"""Opens everything that a run needs, and closes it at the end."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache, partial

from retrain.backends import Backend, BackendSpec, Sampling, Trainers, connected, plugin_of
from retrain.backends.progress import BackendProgress, EpisodeProgress, SamplingProgress
from retrain.base import registry
from retrain.base.errors import ConfigError, PromptError, RecordsError
from retrain.base.rollouts import Group, Prompt
from retrain.config.files import KEY, changed_files
from retrain.config.resolve import as_played, plays_episodes, teachers_of
from retrain.config.schema import NO_REWARD, Config, EvalSection
from retrain.plugins.environments import brings_loop
from retrain.plugins.environments import opened as opened_environment
from retrain.plugins.tasks import Task
from retrain.plugins.tasks.opening import build_task, task_of
from retrain.records.decision import read_looks
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.trainer import checkpoint
from retrain.trainer.batch import BoundAlgorithm, SampleGroups, advantage_weights
from retrain.trainer.budget import Budget, Ledger
from retrain.trainer.control import Control, LoadThrottle
from retrain.trainer.ending import Ending
from retrain.trainer.episodes import Episodes
from retrain.trainer.evaluation import EvalSchedule, HeldOut, OpenEval
from retrain.trainer.journal import Journal
from retrain.trainer.loop import OpenRun, Trainer
from retrain.trainer.metered import MeteredBackend
from retrain.trainer.part import Part
from retrain.trainer.permits import RunPermits
from retrain.trainer.refill import Refill
from retrain.trainer.signs import StepSigns, UnscoredCount
from retrain.trainer.source import AsyncSource, TrainingSampler, open_source
from retrain.trainer.sources import RunScorer, SourceRows, sample_by_source
from retrain.trainer.starts import Starts
from retrain.trainer.step_meter import StepMeter
from retrain.trainer.teachers import TeacherSignal
from retrain.trainer.turn_sampling import TurnSampler
from retrain.trainer.warm_up import WarmUp


def parts_of(run: OpenRun) -> Iterator[Part]:
    """Iterate over all that attaches to the loop, in the order in which the loop calls it.

    What sets money aside comes after whatever else may stop a run, and evaluations, which cost some, last.
    """
    config, training = run.config, run.config.training
    ahead = run.source if isinstance(run.source, AsyncSource) else None
    budget = Budget(config, run.campaign, run.ledger, ahead)
    yield from (run.source, run.refill, run.control, run.throttle, run.permits, run.ledger)
    on_axis = (config.run.ends_per, config.run.ends_at) if config.run else ()
    yield Ending(run.files.rung, run.source, config.last_step, *on_axis)
    yield budget
    if config.data.source:
        yield SourceRows(config.data.source)
    if config.warmup.steps:
        yield WarmUp(run, budget)
    if run.teacher:
        yield run.teacher
    yield StepSigns(training.lr)
    starts = Starts(config, run.files, run.campaign)
    yield EvalSchedule(config, run.evaluators, run.journal, budget, run.stop, starts)
    if config.reward.reward != NO_REWARD:
        yield UnscoredCount(training.max_unscored)


@contextmanager
def open_trainer(
    config: Config,
    files: RunFiles,
    campaign: CampaignFiles,
    journal: Journal,
    stop: threading.Event,
    resumed: checkpoint.Checkpoint | None,
) -> Iterator[Trainer]:
    """Build the task, open the reward and connect the backend; close everything at the end."""
    task = task_of(config)
    permits, ledger = RunPermits(config, files, campaign), Ledger(config, files)
    with ExitStack() as opened, ExitStack() as scoring:
        opened.callback(ledger.close)
        scorer = scoring.enter_context(closing(RunScorer(config)))
        evals = [  # before the backend is connected, which may cost time and money
            (table, *_asked(table, task, config, campaign), scorer.of_evaluation(table))
            for table in config.eval.tables
        ]
        saved = partial(checkpoint.written, files.checkpoints)
        journal.watch({"reward": scorer.progress, "evaluate": scorer.progress, "checkpoint": saved})
        is_closing = threading.Event()

        def is_leaving() -> bool:
            return stop.is_set() or is_closing.is_set()

        backend = _connected(config, files, campaign, task, journal, permits, ledger, is_leaving)
        opened.callback(backend.close)
        opened.push(scoring.pop_all())  # closed before the backend, on whose ranks it scores

        def open_sampler(played: Config) -> SampleGroups:
            return sampler_of(played, backend, opened, journal.detail, is_leaving)

        sample = sample_by_source(config, open_sampler)
        sampler = TrainingSampler(config, backend.info, sample, ledger)
        meter = StepMeter(backend, journal)
        signal_parts = [part for part, weight in advantage_weights(config).items() if weight]
        refill = Refill(config.data, scorer.score, meter, signal_parts)
        source = open_source(config, backend.info, task, sampler, refill)
        if not isinstance(source, AsyncSource):  # by which ranks sample while rank 0 scores
            scorer.use_ranks(backend)
        evaluators: list[HeldOut | OpenEval] = []
        for table, prompts, further, score in evals:
            eval_sample = open_sampler(as_played(config, table)) if table.environment else sample
            eval_sample = partial(source.exclusively, eval_sample)
            evaluators.append(OpenEval(config, table, prompts, score, eval_sample, further))
        held_out = task.held_out[: config.data.eval_prompts]
        if held_out and config.reward.reward != NO_REWARD:  # then only an [[eval]] has one
            evaluators.append(HeldOut(config, held_out, scorer.score, partial(source.exclusively, sample)))
        with _of("data"):  # too long ones, before the first step
            asked_prompts = (prompt for _, *asked, _ in evals for prompts in asked for prompt in prompts)
            backend.check_prompts([*task.train, *task.held_out, *asked_prompts])
        if hint := config.teacher.prompt:
            with _of("teacher"):
                backend.check_prompts([prompt.hinted(hint) for prompt in task.train])
        teacher = TeacherSignal(config, backend) if teachers_of(config) else None
        run = OpenRun(
            config=config,
            files=files,
            campaign=campaign,
            journal=journal,
            stop=stop,
            backend=backend,
            algorithm=BoundAlgorithm(config, refill.score, teacher),
            sampler=sampler,
            source=source,
            control=Control(config, len(task.train)),
            throttle=LoadThrottle(config.throttle, campaign, stop, journal),
            meter=meter,
            refill=refill,
            permits=permits,
            ledger=ledger,
            teacher=teacher,
            evaluators=evaluators,
        )
        trainer = Trainer(run, list(parts_of(run)))
        for part in [part for part in trainer.parts if part is not ledger]:  # closed after the backend
            opened.callback(part.close)
        opened.callback(is_closing.set)
        if resumed is not None:
            trainer.resume(resumed)
        _require_start(config, backend, is_resumed=resumed is not None)
        yield trainer


def _asked(
    table: EvalSection, task: Task, config: Config, campaign: CampaignFiles
) -> tuple[Sequence[Prompt], Sequence[Prompt]]:
    """Return the prompts that an evaluation asks, and those that it asks as well at the run's end.

    Raises ConfigError if the task holds out fewer than are asked of all runs.
    """
    if table.task:
        task = build_task(table.task, table.options, config.data.seed)
    prompts, questions = task.held_out[: table.prompts], read_looks(campaign.looks).questions
    if questions is None or questions.evaluation != table.name:
        return prompts, ()
    further, there = task.held_out[table.prompts : questions.count], len(task.held_out)
    if there < questions.count and questions.are_more:
        raise ConfigError(
            f"[decision].max_questions: all runs are asked {questions.count} questions of [[eval]] "
            f"{table.name!r}, and its task holds out {there} now; restore its data"
        )
    return prompts, further


def _connected(
    config: Config,
    files: RunFiles,
    campaign: CampaignFiles,
    task: Task,
    journal: Journal,
    permits: RunPermits,
    ledger: Ledger,
    is_leaving: Callable[[], bool],
) -> Backend:
    """Return the backend, connected; where its calls have a price, they are counted."""
    has_episodes = plays_episodes(config)

    def observe(progress: BackendProgress) -> None:
        if not has_episodes or not isinstance(progress, SamplingProgress):
            journal.detail(progress)  # a call for some of the turns of episodes tells little

    def trainers_here() -> Trainers | None:
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

    spec = BackendSpec(
        seed=config.training.seed,
        model=config.model.model,
        base_url=config.model.base_url,
        lora_rank=config.model.lora_rank,
        alphabet=task.alphabet,
        options=config.backend.options,
        permit=permits.permit,
        observe_call=permits.observe_call,
        observe=observe,
        memory=trainers_here,
        is_leaving=is_leaving,
        run_name=permits.label,
        notes=files.directory,
        campaign=campaign.directory,
        meter=ledger.meter,
    )
    backend = connected(config.backend.backend, spec)
    try:
        backend.check_run(config)
    except ConfigError:
        backend.close()
        raise
    is_counted = ledger.price is None or backend.info.bills
    return backend if is_counted else MeteredBackend(backend, ledger.meter)


def _require_start(config: Config, backend: Backend, *, is_resumed: bool) -> None:
    """Load the adapter that a run starts from, if any; once resumed, check that a KL term has its reference.

    Raises:
        ConfigError: the weights are not those that were planned, or the reference is another one.
    """
    model, algorithm = config.model, config.algorithm
    starts_as_reference = algorithm.kl_reference == "start"
    if not model.adapter:
        return
    if not is_resumed:
        planned = {key: text for key, text in config.run.files.items() if key == KEY} if config.run else {}
        if changed := changed_files(config, planned):
            raise ConfigError([f"{problem}; restore it" for problem in changed])
        backend.start_from(model.adapter, is_reference=algorithm.kl_coef > 0 and starts_as_reference)
    elif algorithm.kl_coef and backend.has_start() != starts_as_reference:
        raise ConfigError(
            "[algorithm]: kl_coef or kl_reference was changed, and the checkpoint lacks the reference that "
            "the run now needs; undo the change, or start the run again"
        )


def sampler_of(
    config: Config,
    backend: Backend,
    opened: ExitStack,
    observe: Callable[[EpisodeProgress], None] = lambda _: None,
    is_leaving: Callable[[], bool] = lambda: False,
) -> SampleGroups:
    """Return what samples each prompt's group: the backend, or episodes in the run's environment.

    Raises:
        ConfigError: the backend, or its chat template, does not support functions or turns.
    """
    table = config.environment
    if table.is_single_turn:

        def sample(prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
            with _of("data"):
                return backend.sample(prompts, how)

        return sample
    has_template = bool(config.backend.options.get("chat_template"))
    if not (table.separate_turns or backend.info.extends):
        raise ConfigError(
            f"[environment].environment: backend {config.backend.backend!r} cannot append to a turn; set "
            "separate_turns = true, or implement `extend` of retrain.Backend, with `info.extends`"
        )
    form = None  # of calls of the environment's functions, which are shown to the policy
    environment = registry.plugin("environments", table.environment)
    if schemas := environment.functions.tools(table.options):
        form = backend.offer_tools(schemas, is_extended=not table.separate_turns)
    elif not table.separate_turns:
        backend.check_turns()
    open_episode = opened.enter_context(opened_environment(environment, table.options, form))
    programs = None
    if brings_loop(environment):
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
    return opened.enter_context(closing(episodes)).play


@contextmanager
def _of(section: str) -> Iterator[None]:
    """Name a section as the place of a prompt that cannot be read; it may be an environment's elsewhere."""
    try:
        yield
    except PromptError as error:
        problem = registry.read_problem(str(error), registry.PLACED)
        raise ConfigError(str(problem if problem.where else problem.below(section))) from error
