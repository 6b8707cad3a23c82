"""Builds a trainer from a run's configuration."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from retrain import registry
from retrain.backends import Backend, BackendSpec
from retrain.config.schema import Config
from retrain.records.layout import RunFiles
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
    """Build the task, open the reward and connect the backend; close everything at the end."""
    data = config.data
    built = registry.find("tasks", data.task)(seed=data.seed, **data.options)
    task: Task = registry.check_made("tasks", data.task, built)
    permits = RunPermits(config, files)
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
            run_name=permits.label,
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
