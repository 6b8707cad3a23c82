"""Builds a trainer from a run's configuration."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from retrain import registry
from retrain.backends import Backend, BackendSpec
from retrain.config.schema import Config
from retrain.records.layout import RunFiles, permits_directory
from retrain.tasks import Task
from retrain.trainer.batch import Algorithm
from retrain.trainer.event_loop import EventLoopThread
from retrain.trainer.journal import Journal
from retrain.trainer.loop import Parts, Trainer
from retrain.trainer.permits import RunPermits
from retrain.trainer.scoring import Scorer

if TYPE_CHECKING:
    from retrain.trainer.machine import MachineLoad


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
        name, options = config.backend.backend, config.backend.options
        connected = registry.bound("backends", name, options)(_spec(config, task, permits))
        backend: Backend = registry.check_made("backends", name, calls.wait_for(connected))
        opened.callback(lambda: calls.wait_for(backend.close()))
        check_prompts = getattr(
            backend, "check_prompts", None
        )  # finds prompts that are too long before the first step
        if check_prompts is not None:
            check_prompts([*task.train, *task.held_out])
        algorithm, machine = Algorithm.of(config, scorer.score), _machine(config, files, stop)
        trainer = Trainer(
            Parts(config, files, backend, task, algorithm, permits, journal, stop, calls, machine)
        )
        opened.callback(trainer.close)
        yield trainer


def open_permits(config: Config, files: RunFiles) -> RunPermits:
    """Return the campaign's permits, or the run's share where a launcher divided them among runs."""
    own = int(os.environ.get("RETRAIN_OWN_PERMITS") or 0)
    return RunPermits(
        files.directory / "permits" if own else permits_of(config, files),
        own or config.backend.first_permits,
        _label(config),
        adapts=config.backend.adapts_permits,
        is_own=bool(own),
    )


def permits_of(config: Config, files: RunFiles) -> Path:
    """Return the directory of a run's permits: shared by campaigns, or its own campaign's."""
    if config.backend.throttle_dir:
        return Path(config.backend.throttle_dir)
    return permits_directory(files.directory)


def _machine(config: Config, files: RunFiles, stop: threading.Event) -> MachineLoad | None:
    if not config.throttle.enabled:
        return None
    from retrain.trainer.machine import MachineLoad

    return MachineLoad(config.throttle, files.directory, stop)


def _spec(config: Config, task: Task, permits: RunPermits) -> BackendSpec:
    return BackendSpec(
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


def _label(config: Config) -> str:
    return config.run.run_id if config.run else "run"
