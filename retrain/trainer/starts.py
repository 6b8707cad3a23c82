"""Evaluations before the first step: made once by runs of a campaign that start alike.

The first run to get there makes one, and others of its seed take the record: they wait while it is being
made, as long as they would for their own. If its maker is killed, the next of them makes it; if it takes
very long, each makes its own.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from retrain.base.errors import DamagedRecordError
from retrain.base.locks import hold
from retrain.config.digest import start_digest
from retrain.config.schema import Config
from retrain.records.files import make_directory, read_json, record_of, write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.row_parts import Evaluation, NamedEvaluation, columns
from retrain.records.samples import Rewards

T = TypeVar("T")

POLL_S = 0.2
LONGEST_WAIT_S = 600.0  # a maker that takes longer may be suspended


@dataclass(frozen=True)
class StartRecord:
    """An evaluation before the first step, as its maker shares it."""

    run: str  # that made it
    evaluation: Mapping[str, Any]  # the fields of an Evaluation, or of a NamedEvaluation
    outcomes: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # by question
    scores: Mapping[str, float] = field(default_factory=dict)  # mean reward by question


class Starts:
    """The evaluations before the first step of one run."""

    def __init__(self, config: Config, files: RunFiles, campaign: CampaignFiles) -> None:
        self._config, self._files, self._folder = config, files, campaign.starts
        self._run = config.run.run_id if config.run else ""
        self._columns: dict[str, Any] = {}  # of those that this run has so far
        self._makers: dict[str, str] = {}

    @contextmanager
    def turn(
        self, name: str, stop: threading.Event, waiting: Callable[[], None]
    ) -> Iterator[StartRecord | None]:
        """Return a context with the record of an evaluation, or None, in which this run is to make it.

        A stop ends the wait.
        """
        make_directory(self._folder)
        path = self._path(name)
        lock_file = path.with_suffix(".lock")
        with made_once(lock_file, lambda: _read(path), stop, waiting, LONGEST_WAIT_S) as record:
            yield record

    def share(
        self,
        name: str,
        evaluation: Evaluation | NamedEvaluation,
        outcomes: Rewards,
        scores: Mapping[int, float],
    ) -> None:
        """Write an evaluation that this run made, for all that start alike."""
        record = {"run": self._run, "evaluation": asdict(evaluation), "outcomes": outcomes, "scores": scores}
        write_json(self._path(name), record)

    def keep(self, name: str, evaluation: Evaluation | NamedEvaluation, maker: str = "") -> None:
        """Write an evaluation into this run's own record, and which run made it."""
        self._columns |= columns({name: evaluation})
        self._makers[name] = maker or self._run
        write_json(self._files.start, {"metrics": self._columns, "made_by": self._makers})

    def _path(self, name: str) -> Path:
        return self._folder / f"{start_digest(self._config, name)}.json"


def _read(path: Path) -> StartRecord | None:
    """Return what a run shared; None if there is nothing that this version reads."""
    try:
        content = read_json(path)
        return record_of(StartRecord, content) if content is not None else None
    except (DamagedRecordError, ValueError):
        return None


@contextmanager
def made_once(
    lock_file: Path,
    read: Callable[[], T | None],
    stop: threading.Event,
    waiting: Callable[[], None],
    longest_s: float = math.inf,
) -> Iterator[T | None]:
    """Return a context with what another run made, or None, in which this run is to make it.

    While another one makes it, this one waits: until a stop, for `longest_s`, or until it can take over from
    one that was killed.
    """
    until_s, lock = time.monotonic() + longest_s, None
    made = read()
    while made is None and time.monotonic() < until_s and not stop.is_set():
        if (lock := hold(lock_file)) is not None:
            if os.environ.get("RETRAIN_JOB"):  # other runs may be on other machines
                lock.renew()
            made = read()  # of who held the lock
            break
        waiting()
        stop.wait(POLL_S)
        made = read()
    try:
        yield made
    finally:
        if lock is not None:
            lock.release()
