"""Builds a trainer from a run's configuration."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from retrain import registry
from retrain.backends import Backend, BackendSpec
from retrain.config.schema import Config
from retrain.records.layout import RunFiles, campaign_of
from retrain.tasks import Task
from retrain.trainer.batch import Algorithm
from retrain.trainer.event_loop import EventLoopThread
from retrain.trainer.journal import Journal
from retrain.trainer.loop import Parts, Trainer
from retrain.trainer.permits import RunPermits
from retrain.trainer.scoring import Scorer


@contextmanager
def open_trainer(
    config: Config, files: RunFiles, journal: Journal, stop: threading.Event
) -> Iterator[Trainer]:
    """Build the task, open the reward and connect the backend; close everything at the end.

    Raises:
        ConfigError: a plugin rejects its options.
    """
    data = config.data
    built = registry.find("tasks", data.task)(seed=data.seed, **data.options)
    task: Task = registry.check_made("tasks", data.task, built)
    permits = open_permits(config, files)
    with ExitStack() as opened:
        reward = config.reward
        sandbox = {"sandbox": reward.sandbox, "sandbox_options": reward.sandbox_options}
        scorer = Scorer(reward.reward, reward.params, sandbox)
        opened.callback(scorer.close)
        calls = EventLoopThread()
        opened.callback(calls.close)
        spec = BackendSpec(
            seed=config.training.seed,
            model=config.model.model,
            base_url=config.model.base_url,
            lora_rank=config.model.lora_rank,
            alphabet=task.alphabet,
            options=config.backend.options,
            permit=permits.permit,
            observe_call=permits.observe_call,
            run_name=_label(config),
        )
        name, options = config.backend.backend, config.backend.options
        connected = registry.bound("backends", name, options)(spec)
        backend: Backend = registry.check_made("backends", name, calls.wait_for(connected))
        opened.callback(lambda: calls.wait_for(backend.close()))
        if check := getattr(backend, "check_prompts", None):  # too long ones, before the first step
            check([*task.train, *task.held_out])
        algorithm = Algorithm.of(config, scorer.score)
        trainer = Trainer(Parts(config, files, backend, task, algorithm, permits, journal, stop, calls))
        opened.callback(trainer.close)
        yield trainer


def open_permits(config: Config, files: RunFiles) -> RunPermits:
    """Return the run's share, where a launcher divided permits among runs, or those that it shares.

    Shared permits belong to its campaign, or to all campaigns that name the same `throttle_dir`.
    """
    own = int(os.environ.get("RETRAIN_OWN_PERMITS") or 0)
    shared = Path(config.backend.throttle_dir or campaign_of(files.directory).permits)
    return RunPermits(
        files.directory / "permits" if own else shared,
        own or config.backend.first_permits,
        _label(config),
        adapts=config.backend.adapts_permits,
        is_own=bool(own),
    )


def _label(config: Config) -> str:
    return config.run.run_id if config.run else "run"
