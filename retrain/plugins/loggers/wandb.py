"""Runs in Weights & Biases: a campaign is a group, a condition and a seed are tags.

W&B decides whether it works online, and as whom: `WANDB_MODE=offline`, `wandb login`. The x axis is our own
step, because W&B's cannot go back: a resumed run would lose its repeated steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from retrain.base import extras
from retrain.plugins.loggers import LoggedRun, Logger, Row, numbers

EXTRA = "wandb"
PACKAGES = ("wandb",)
DEFAULT_PROJECT = "retrain"
# W&B's default is 15; unwritten rows are lost when a worker is killed, and no call makes it write
WRITES_EVERY_S = 5


def open_logger(
    run: LoggedRun,
    *,
    project: str = "",
    entity: str = "",
    mode: Literal["", "online", "offline", "disabled"] = "",
) -> Logger:
    """Start a W&B run, or continue the one of an earlier attempt.

    Args:
        run: the run to log.
        project: its project; default: WANDB_PROJECT, else "retrain".
        entity: user or team; default: WANDB_ENTITY, else the one logged in.
        mode: online or offline; default: WANDB_MODE, else online.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # no crash reports to third parties
    wandb = extras.load("wandb", EXTRA, "wandb")
    return _Wandb(wandb, run, project or os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT), entity, mode)


class _Wandb(Logger):
    durable_after_s = 3.0 * WRITES_EVERY_S

    def __init__(self, wandb: Any, run: LoggedRun, project: str, entity: str, mode: str) -> None:
        settings = {"console": "off", "silent": True, "save_code": False, "disable_git": True}
        interval = "x_transaction_log_flush_interval"  # experimental: a later W&B may lack it
        if hasattr(wandb.Settings(), interval):
            settings[interval] = WRITES_EVERY_S
        self._run = wandb.init(
            project=project,
            entity=entity or None,
            mode=mode or None,
            group=run.campaign or None,
            name=run.run_id,
            tags=[tag[:64] for tag in (run.condition, f"seed {run.seed}") if tag],
            id=run.stored_id or None,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.settings),
            reinit="create_new",  # several runs may share a process
            settings=wandb.Settings(**settings),
        )
        self.id = str(self._run.id)
        self._attempt = run.attempt
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"step": row["step"], "attempt": self._attempt, **numbers(row)})

    def close(self, state: str, result: Row) -> None:
        self._run.summary.update({"state": state, **{f"final_{k}": v for k, v in numbers(result).items()}})
        self._run.finish(exit_code=0 if state in ("done", "interrupted") else 1)
