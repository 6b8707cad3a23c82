"""Tests a plugin against the contract of its kind, before a campaign depends on it.

Every check runs the plugin itself: rewards score, losses are differentiated, backends train, launchers start
and end processes. A check that raises has failed, and those of the same kind after it do not run.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from retrain.backends import BackendSpec, Optimization, Sampling, connected, plugin_of
from retrain.base import registry, user_code
from retrain.base.errors import ConfigError, RetrainError
from retrain.base.event_loop import EventLoopThread, LeftBehindError, result_within
from retrain.base.rollouts import FirstTurn, Loss, NextTurn, Prompt, Rollout, TrainingSample
from retrain.campaign.run import start
from retrain.config.schema import EnvironmentSection
from retrain.control.rules.concurrency_limit import CallFacts
from retrain.plugins.advantages import taken_parts
from retrain.plugins.environments import brings_loop
from retrain.plugins.environments.endpoint.session import Rendering
from retrain.plugins.environments.episode import attribute
from retrain.plugins.loggers import LoggedRun
from retrain.plugins.rewards import Answer
from retrain.plugins.rewards.opening import is_pure, open_reward, range_of
from retrain.plugins.sandbox import choose
from retrain.plugins.sandbox.cell import holes
from retrain.records.campaign_state import ask_to_stop
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import RunState
from retrain.trainer.episodes import Episodes
from retrain.trainer.programs import Programs
from retrain.trainer.prompts import PromptStream, open_stream
from retrain.trainer.turn_sampling import Asked

Table = Mapping[str, Any]
Check = Callable[[str, Table], str]  # of a plugin's name and table: returns its problem, "" without
CHECKS: dict[str, list[Check]] = {}  # by kind, in this file's order; each one's docstring says what holds
PROMPTS = (Prompt(0, "12+3=", "15"), Prompt(1, "40+2=", "42"))
MANY = tuple(Prompt(number, f"{number}=", str(number)) for number in range(12))
CHOICES = (1, 3, 12, 30, 5, 1)  # prompts at a time, of those
COMPLETIONS = ("15", "42", "", "7", "no idea", "1" * 500, "\\boxed{15}", "é\n")
TOKENS = 1 << 20  # of a turn: more than a program asks for
STEP = 1e-6  # of the finite difference
PATIENCE_S = 600.0  # for a cluster to begin a run
POLL_S = 0.1
PATIENT_STEPS = 100_000  # of a run that is stopped: more than it will take


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of a plugin; no problem if it holds."""

    kind: str
    check: str
    problem: str


def kinds_of(name: str) -> list[str]:
    """Return which kinds of plugin a name may be, by the function that it names or the module defines."""
    if built_in := [kind for kind in registry.KINDS if name in registry.names(kind)]:
        return built_in
    specs = {kind: registry.spec_of(kind) for kind in registry.KINDS}
    entries = {entry: kind for kind, spec in specs.items() for entry in (spec.entry, spec.opener) if entry}
    last = name.rpartition(".")[2]
    defined = [last] if last in entries else vars(registry.find_module(name))
    if not (kinds := list(dict.fromkeys(entries[entry] for entry in entries if entry in defined))):
        raise ConfigError(f"{name!r} may be of any kind; write: retrain plugins KIND --check {name}")
    return kinds


def check_plugin(
    kind: str, name: str, table: Table, begins: Callable[[str], object] = lambda _: None
) -> Iterator[Finding]:
    """Test a plugin; `table` holds the keys that a campaign file would give it.

    `begins` is called with what each long check tests, before it.
    """
    yield Finding(kind, "its functions can be called as declared", _tried(lambda: _form(kind, name)))
    wrong = _tried(lambda: "; ".join(p.in_table for p in registry.problems_with_table(kind, name, table)))
    yield Finding(kind, "its table is valid", wrong)
    for check in CHECKS[kind]:
        begins(str(check.__doc__))
        problem = _tried(lambda check=check: check(name, table))  # type: ignore[misc]
        yield Finding(kind, str(check.__doc__), problem)
        if problem:  # the next would meet it again, and wait as long
            return


def check_of(kind: str) -> Callable[[Check], Check]:
    """Have a function test the plugins of a kind."""

    def register(check: Check) -> Check:
        CHECKS.setdefault(kind, []).append(check)
        return check

    return register


def _tried(check: Callable[[], str]) -> str:
    try:
        return check()
    except RetrainError as error:
        return str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - what a plugin raises is the finding
        return user_code.fault_of(error) or f"{type(error).__name__}: {error}"


def _form(kind: str, name: str) -> str:
    spec, found = registry.spec_of(kind), registry.plugin(kind, name)
    found.function()
    hooks = [hook for hook in spec.hooks if found.hook(hook) is None]
    if found.module is None:
        module = registry.find_module(name.rpartition(".")[0] or found.found.__module__)
        if lost := [hook for hook in hooks if hasattr(module, hook)]:
            return f"{', '.join(lost)} have no effect: the function is not called {spec.entry!r}"
    return ""


@check_of("rewards")
def _scores(name: str, table: Table) -> str:
    """it scores right, wrong, empty, long and odd completions within its range"""
    scorer, calls = open_reward(name, table), EventLoopThread()
    columns = registry.needed_by(registry.find_plugin("rewards", name))  # of a function with TRL's signature
    prompts = [replace(prompt, row=dict.fromkeys(columns, prompt.answer)) for prompt in PROMPTS]
    answers = [Answer(text, prompt) for prompt in prompts for text in COMPLETIONS]
    with closing(scorer), closing(calls):
        scores = calls.wait_for(scorer.score_all(answers))
        backwards = calls.wait_for(scorer.score_all(answers[::-1])) if is_pure(name, table) else scores[::-1]
    if [str(score.value) for score in scores] != [str(score.value) for score in backwards[::-1]]:
        return "declares PURE = True, and scores the same completions otherwise in another order"
    judged = [score for score in scores if score.value is not None]
    for score in judged:
        if not np.isfinite(score.value or 0.0):
            return f"returned {score.value}; a reward is a finite number"
    refused = (score.message for score in range_of(name).keep(judged) if score.value is None)
    return next(refused, "" if judged else f"scored none of {len(answers)} completions")


@check_of("sandbox")
def _confines(name: str, table: Table) -> str:
    """programs run in it, and reach no files, network or processes"""
    return f"a program reached {', '.join(found)}" if (found := holes(choose(name, table))) else ""


@check_of("advantages")
def _estimates(name: str, table: Table) -> str:
    """its advantages are finite, of the rewards' shape, and rank rollouts as the rewards do"""
    rewards = np.random.default_rng(0).random((3, 8))
    rewards[2] = 0.5  # a tied group
    before = rewards.copy()
    only_part = {"parts": {"reward": rewards}, "weights": {"reward": 1.0}}  # of a reward without others
    parts = {argument: only_part[argument] for argument in taken_parts(name)}
    advantages = np.asarray(registry.find_plugin("advantages", name)(rewards, **parts, **table))
    if advantages.shape != rewards.shape or not np.isfinite(advantages).all():
        return f"returned {advantages}; needs finite numbers of shape {rewards.shape}"
    if not np.array_equal(rewards, before):
        return "modified its argument `rewards`"
    falls = [row for row in range(2) if (np.diff(advantages[row, np.argsort(rewards[row])]) < -1e-9).any()]
    return "a better rollout of a group got a smaller advantage" if falls else ""


@check_of("transforms")
def _reweighs(name: str, table: Table) -> str:
    """it returns a finite advantage for each token, at any progress"""
    rollout = Rollout(PROMPTS[0], "15", (1, 5, 9), np.array([-0.5, -1.0, -0.1]), ("1", "5", ""), False)
    for progress in (0.0, 0.5, 1.0):
        weights = np.asarray(registry.find_plugin("transforms", name)(rollout, 0.7, progress, **table))
        if weights.shape != (3,) or not np.isfinite(weights).all():
            return f"returned {weights} at progress {progress}; needs 3 finite numbers for 3 tokens"
    return ""


@check_of("losses")
def _slopes(name: str, table: Table) -> str:
    """the slope is the derivative of the summed loss (or the loss is slope times log-probability)"""
    random = np.random.default_rng(0)
    before, advantages = -random.random(12) - 0.1, random.normal(size=12)
    after, sequence = before + random.normal(scale=0.1, size=12), np.repeat(np.arange(3), 4)

    def evaluate(logprobs: Any) -> Any:
        return registry.find_plugin("losses", name)(logprobs, before, advantages, sequence, **table)

    terms = evaluate(after)
    if np.allclose(terms.value, terms.slope * after):  # a weight that is held constant
        return ""
    steps = np.eye(12) * STEP
    rises = [np.sum(evaluate(after + s).value - evaluate(after - s).value) for s in steps]
    slopes = [float(rise) / (2 * STEP) for rise in rises]
    worst = float(np.max(np.abs(np.array(slopes) - terms.slope)))
    return f"differs by {worst:.2g} from the finite difference" if worst > 1e-4 else ""


@check_of("tasks")
def _builds(name: str, table: Table) -> str:
    """the same seed builds the same task, without overlap of splits, within its alphabet"""
    tasks = [registry.find_plugin("tasks", name)(seed=0, **table) for _ in range(2)]
    task = registry.check_made("tasks", name, tasks[0])
    if tasks[0] != tasks[1]:
        return "built another task from the same seed"
    prompts = [*task.train, *task.held_out]
    if not task.train or len({prompt.id for prompt in prompts}) < len(prompts):
        return f"{len(task.train)} prompts to train on; needs some, each with an id of its own"
    trained, held_out = ({prompt.text for prompt in side} for side in (task.train, task.held_out))
    if trained & held_out:
        return "trains on prompts that are held out"
    used = {character for prompt in prompts for character in prompt.text + prompt.answer}
    outside = used - set(task.alphabet) if task.alphabet else ()
    return f"its alphabet lacks {''.join(sorted(outside))!r}" if outside else ""


@check_of("curricula")
def _chooses(name: str, table: Table) -> str:
    """its choices are valid for one prompt, for several and for more than there are, and observed unscored"""
    _played(open_stream(MANY, name, table, 0), CHOICES)
    return ""


@check_of("curricula")
def _goes_on(name: str, table: Table) -> str:
    """its state survives JSON, and after a resume it chooses what it would have chosen"""
    whole, resumed = (open_stream(MANY, name, table, 0) for _ in range(2))
    _played(whole, CHOICES)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    after, again = (_played(stream, CHOICES) for stream in (whole, resumed))
    at = next((n for n, (one, other) in enumerate(zip(after, again, strict=True)) if one != other), None)
    return (
        "" if at is None else f"after a resume it chose {again[at]}, where it would have chosen {after[at]}"
    )


def _played(stream: PromptStream, counts: Sequence[int]) -> list[list[int]]:
    """Draw and observe; return the positions that were drawn each time."""
    random, choices = np.random.default_rng(0), []
    for count in counts:
        draws = stream.draw(count)
        rewards = (random.random((count, 4)) < 0.5).astype(np.float64)
        rewards[random.random(rewards.shape) < 0.1] = np.nan
        rewards[random.random(count) < 0.2] = np.nan  # whole groups
        stream.observe(draws, rewards)
        choices.append([draw.position for draw in draws])
    return choices


@check_of("environments")
def _opens(name: str, table: Table) -> str:
    """an episode can be opened within 60 s"""
    limit_s = EnvironmentSection().time_limit_s
    try:
        episode = result_within(limit_s, registry.bound("environments", name, table))
    except LeftBehindError:
        return f"opening an episode took longer than {limit_s:g} s"
    try:
        registry.check_made("environments", name, episode)
    finally:
        if close := attribute(episode, "close"):
            with suppress(Exception):  # ignored, as in a run
                result_within(limit_s, close)
    return ""


@check_of("environments")
def _plays(name: str, table: Table) -> str:
    """it starts episodes and answers right, wrong, empty, long and odd completions, each call within 60 s"""
    environment = registry.plugin("environments", name)
    open_episode, is_program = environment.bound(table), brings_loop(environment)
    played = (dry_run(open_episode, one, COMPLETIONS, is_program=is_program) for one in PROMPTS)
    return next(filter(None, played), "")


def dry_run(
    open_episode: Callable[[], Any], prompt: Prompt, completions: Sequence[str], *, is_program: bool = False
) -> str:
    """Play an episode as a run does, with completions that no policy chose; return what is wrong, or ""."""
    table, texts = EnvironmentSection(max_turns=len(completions)), cycle(completions)
    programs = Programs(table, open_episode, Rendering()) if is_program else None

    def answered(turn: Asked) -> Rollout:
        """Return a rollout with another turn, of one token."""
        first = turn.prompt if isinstance(turn, FirstTurn) else turn
        before = first.rollout if isinstance(first, NextTurn) else Rollout(first)
        text, tokens = next(texts), (*before.tokens, 0)
        pieces, logprobs = (*before.pieces, text), np.zeros(len(tokens))
        return replace(before, text=text, tokens=tokens, logprobs=logprobs, pieces=pieces)

    def sample(asked: Sequence[Asked], how: Sampling) -> list[Rollout]:
        return list(map(answered, asked))

    with closing(Episodes(table, open_episode, sample, programs)) as episodes:
        ((rollout,),) = (group.rollouts for group in episodes.play([prompt], Sampling(1, TOKENS, 1.0)))
    return rollout.episode.error if rollout.episode else ""


@check_of("backends")
def _trains(name: str, table: Table) -> str:
    """it samples, takes a step, saves, and resumes from what it saved, and reports calls that hold permits"""
    reported: list[CallFacts] = []
    held: list[None] = []

    def permit() -> nullcontext[None]:
        held.append(None)
        return nullcontext()

    spec = BackendSpec(0, alphabet="0123456789+=", options=table, permit=permit, observe_call=reported.append)
    sampling = Sampling(2, 8, 1.0)
    with tempfile.TemporaryDirectory() as home:
        backend, other = connected(name, spec), connected(name, spec)
        groups = backend.sample(PROMPTS, sampling)
        if [len(group.rollouts) for group in groups] != [2, 2]:
            return f"returned {len(groups)} groups; needs a group of 2 rollouts for each of 2 prompts"
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if any(len(r.tokens) != len(r.logprobs) or not 0 < len(r.tokens) <= 8 for r in rollouts):
            return "a rollout needs 1 to max_tokens tokens, each with a log-probability"
        samples = [
            TrainingSample(rollout, np.ones(len(rollout.tokens)), 0.1, number)
            for number, group in enumerate(groups)
            for rollout in group.rollouts
        ]
        loss = Loss("ppo", registry.find_plugin("losses", "ppo"))
        stats = backend.update(samples, loss, Optimization(lr=1e-3))
        if not np.isfinite([stats.loss, stats.grad_norm]).all():
            return f"the step's loss is {stats.loss}, its gradient's norm {stats.grad_norm}"
        backend.save(Path(home))
        other.load(Path(home))
        after, loaded = (
            [rollout.text for group in each.sample(PROMPTS, sampling) for rollout in group.rollouts]
            for each in (backend, other)
        )
        is_alike = after == loaded or not backend.info.deterministic
        for closed in (backend, other, backend):
            closed.close()
    if held and not reported:
        return (
            'holds permits and reports no call to `spec.observe_call`: with max_concurrent = "auto" the '
            "number of permits would never change"
        )
    if reported and not plugin_of(name).reports_calls(table):
        return "reports its calls: define `reports_calls(options)`, or max_concurrent is not advised to adapt"
    return "" if is_alike else "samples differently after a load"


@check_of("loggers")
def _logs(name: str, table: Table) -> str:
    """it logs rows, flushes, closes, and continues in a second attempt"""
    with tempfile.TemporaryDirectory() as home:
        logger_id = ""
        for attempt in (1, 2):
            at = Path(home)
            run = LoggedRun("check", "a_s0", "a", 0, attempt, attempt - 1, at, {}, logger_id, at)
            logger = registry.check_made("loggers", name, registry.find_plugin("loggers", name)(run, **table))
            logger_id = str(logger.id)
            logger.rows([{"step": attempt, "mean_reward": 0.5, "timestamp": "2026-01-01T00:00:00Z"}])
            logger.flush()
            logger.close("done", {"mean_reward": 0.5})
    return "" if logger_id else "its id is empty, so the next attempt cannot continue it"


@check_of("launchers")
def _finishes(name: str, table: Table) -> str:
    """it runs the workers of a small campaign to their end"""
    return _launched(name, table, 2, RunState.DONE)


@check_of("launchers")
def _ends(name: str, table: Table) -> str:
    """it stops a worker when asked"""
    return _launched(name, table, PATIENT_STEPS, RunState.INTERRUPTED)


def _launched(name: str, table: Table, steps: int, wanted: RunState) -> str:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as home:  # which the cluster's machines may see
        file = Path(home) / "check.toml"
        tables = {
            "training": {"batch_size": 1, "group_size": 2, "max_tokens": 2, "max_steps": steps},
            "data": {"task": "successor"},
            "logging": {"log_dir": home},
            "campaign": {"seeds": [0], "launcher": name, **({name: dict(table)} if table else {})},
        }
        file.write_text(tomli_w.dumps(tables))
        campaign = start(file, (), None, Path.cwd())

        def stop_when_trained() -> None:
            begun_s, metrics = time.monotonic(), campaign.files_of(campaign.plan.runs[0].run_id).metrics
            while not metrics.exists() and time.monotonic() < begun_s + PATIENCE_S:
                time.sleep(POLL_S)
            ask_to_stop(CampaignFiles(campaign.directory), now=False)

        if wanted is not RunState.DONE:
            threading.Thread(target=stop_when_trained, daemon=True).start()
        states = set(campaign.execute().states.values())
    return "" if states == {wanted} else f"its run is {', '.join(sorted(states))}; it should be {wanted}"
