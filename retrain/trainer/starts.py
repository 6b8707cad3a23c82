"""Evaluations before the first step: made once by runs of a campaign that start alike.

The first run to get there makes one, and others of its seed take the record: they wait while it is being
made, as long as they would for their own. If its maker is killed, the next of them makes it; if it takes
very long, each makes its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retrain.base.errors import DamagedRecordError
from retrain.config.digest import start_digest
from retrain.config.schema import Config
from retrain.records.files import make_directory, read_json, record_of, write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.row_parts import Evaluation, NamedEvaluation, columns
from retrain.records.samples import Rewards
from retrain.trainer.made_once import made_once

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
