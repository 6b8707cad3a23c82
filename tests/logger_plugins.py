"""Loggers of a user's own, named by dotted path: one that writes a file, one that fails, one that hangs.

And a reward that kills its process when its loggers are watched to have taken eight steps.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time

from retrain import find_plugin

NEVER = threading.Event()


class Recorder:
    """Writes what it is told, an object a line."""

    def __init__(self, run, name):
        self.id = run.stored_id or f"id-of-attempt-{run.attempt}"
        self._path = run.directory / name
        told = {"campaign": run.campaign, "run": run.run_id, "condition": run.condition, "seed": run.seed}
        self._tell({"opened": self.id, "attempt": run.attempt, "settings": run.settings} | told)

    def rows(self, rows):
        for row in rows:
            self._tell({"step": row["step"], "mean_reward": row["mean_reward"]})

    def flush(self):
        self._tell({"flushed": True})

    def close(self, state, result):
        self._tell({"closed": state, "result": dict(result)})

    def _tell(self, what):
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")


def recording(run, *, name: str = "recorded.jsonl"):
    return Recorder(run, name)


def unwilling(run):
    raise ConnectionError("judge.example: no route to host")


class Failing(Recorder):
    def rows(self, rows):
        raise ConnectionError("the line is dead")


def failing(run):
    return Failing(run, "failing.jsonl")


class Hanging(Recorder):
    def rows(self, rows):
        NEVER.wait()


def hanging(run):
    return Hanging(run, "hanging.jsonl")


class Unflushable(Recorder):
    def flush(self):
        raise OSError("https://me:hunter2@logs.example is full\n" + "SELECT " * 99)


def unflushable(run):
    return Unflushable(run, "unflushable.jsonl")


class Leaving(Recorder):
    def rows(self, rows):
        raise SystemExit("not logged in")


def leaving(run):
    return Leaving(run, "leaving.jsonl")


class Slow(Recorder):
    """Takes its time for each row."""

    def rows(self, rows):
        for row in rows:
            time.sleep(0.02)
            super().rows([row])


def slow(run):
    return Slow(run, "slow.jsonl")


class Away(Recorder):
    """Refuses rows until a file `back` is beside the campaign."""

    def __init__(self, run, name):
        super().__init__(run, name)
        self._back = run.directory.parent.parent / "back"

    def rows(self, rows):
        if not self._back.exists():
            raise ConnectionError("away")
        super().rows(rows)


def away(run):
    return Away(run, "away.jsonl")


class Hiccup(Recorder):
    """Refuses the first call."""

    has_refused = False

    def rows(self, rows):
        if not self.has_refused:
            self.has_refused = True
            raise ConnectionError("a hiccup")
        super().rows(rows)


def hiccup(run):
    return Hiccup(run, "hiccup.jsonl")


class Watched:
    """A logger of ours, of which is known how far it is."""

    def __init__(self, run, name, **params):
        self.run, self.step = run, 0
        self._logger = find_plugin("loggers", name)(run, **params)
        WATCHED.append(self)

    def rows(self, rows):
        self._logger.rows(rows)
        self.step = rows[-1]["step"]

    def __getattr__(self, name):
        return getattr(self._logger, name)


WATCHED: list[Watched] = []


def watched_wandb(run):
    return Watched(run, "wandb")


def watched_tensorboard(run):
    return Watched(run, "tensorboard")


def watched_mlflow(run, *, tracking_uri: str):
    return Watched(run, "mlflow", tracking_uri=tracking_uri)


def watched_trackio(run):
    return Watched(run, "trackio")


SCORED = itertools.count()


def killed_when_logged(completion, prompt, *, loggers: int = 3):
    """Kill the first attempt with seed 1 after eight steps, as soon as all loggers took them."""
    if next(SCORED) == 8 * 8:  # completions
        while len(WATCHED) < loggers:
            time.sleep(0.05)
        if (WATCHED[0].run.seed, WATCHED[0].run.attempt) == (1, 1):
            while any(logger.step < 8 for logger in WATCHED):
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
    return float(completion == prompt.answer)
