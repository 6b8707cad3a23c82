"""What the runs that train beside this one take of the machine's memory."""

from __future__ import annotations

import os
from contextlib import suppress

from retrain import registry
from retrain.backends import Trainers
from retrain.config.schema import Config
from retrain.errors import RecordsError
from retrain.records.layout import RunFiles, campaign_of
from retrain.records.manifest import read_manifest
from retrain.tasks import Task


def trainers_here(config: Config, files: RunFiles, task: Task) -> Trainers | None:
    """Return the estimate of a run, and how many of its campaign run at a time; None if there is none."""
    estimate = registry.hook("backends", config.backend.backend, "memory")
    each = estimate(config, task.train) if estimate is not None else None
    count = 1
    if not os.environ.get("RETRAIN_JOB"):  # which a cluster may start anywhere
        with suppress(RecordsError):
            manifest = read_manifest(campaign_of(files.directory).manifest)
            count = manifest.workers if manifest else 1
    return None if each is None else Trainers(each, max(1, count))
