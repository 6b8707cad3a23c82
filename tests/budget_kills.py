"""Kills workers at random moments while a server meters them, and compares its bill with the budget."""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import tomli_w

from retrain.campaign.run import reopen, start
from retrain.config.prices import KINDS, Price
from retrain.records.campaign_state import asked_to_stop
from retrain.records.layout import CampaignFiles, files_of_runs
from retrain.records.spending import Tokens, read_spending
from retrain.trainer import worker
from tests.tinker_api.running import MODEL, RunningServer, write_tokenizer

ALPHABET = "01234="
WORKERS, BATCH, GROUP, LONGEST, PROMPT = 3, 2, 4, 3, 2  # tokens of a completion and of a prompt, at most
RUNS, STEPS = 300, 3  # more runs than are made; each ends soon, with its evaluations
AHEAD_STEPS = 8  # of a run that samples ahead
PRICE = Price(prefill=10.0, cached=2.0, sample=30.0, train=20.0)
PRICES = tomli_w.dumps({"budget": {"prices": {MODEL: {kind: getattr(PRICE, kind) for kind in KINDS}}}})
STEP_USD = Tokens(
    BATCH * PROMPT, BATCH * (GROUP - 1) * PROMPT, BATCH * GROUP * LONGEST, BATCH * GROUP * (PROMPT + LONGEST)
).usd(PRICE)  # the most that a step can cost
# of each worker, at most: the next step, the two evaluations after it, and what is sampled ahead
SET_ASIDE_USD = 12 * STEP_USD
# an evaluation samples four times as many completions as a step: of both held-out prompts, 16
CAMPAIGN = f"""
[model]
model = "{MODEL}"
base_url = "{{url}}"

[training]
batch_size = {BATCH}
group_size = {GROUP}
max_tokens = {LONGEST}
max_steps = {{steps}}
temperature = 1.0
lr = 1e-3
save_every = 2

[data]
task = "successor"
options = {{{{ digits = 1, base = 5, held_out = 0.4 }}}}
eval_samples = 15

[[eval]]
name = "often"
every = 2
samples = 16
temperature = 1.0

[rate_limiter]
max_staleness = {{staleness}}
workers = 2
capacity = 20

[reward]
reward = "partial"

[backend]
backend = "tinker"
max_concurrent = 3
options = {{{{ tokenizer = "{{tokenizer}}", first_retry_s = 0.05 }}}}

{PRICES}

[campaign]
seeds = {{seeds}}
"""


def write_campaign(directory: Path, server: RunningServer, runs: int, steps: int, staleness: int = 0) -> Path:
    """Write a campaign's file, with a tokenizer; with a `staleness`, rollouts are sampled ahead."""
    tokenizer = write_tokenizer(directory / "tokenizer", ALPHABET)
    file, seeds = directory / "campaign.toml", list(range(runs))
    told = {"url": server.url, "tokenizer": tokenizer, "seeds": seeds, "steps": steps}
    file.write_text(CAMPAIGN.format(**told, staleness=staleness))
    return file


@dataclass
class Stop:
    """A campaign that its budget stopped."""

    budget_usd: float
    billed_usd: float
    known_usd: float  # what the runs know to be billed
    at_most_usd: float  # what they count

    @property
    def steps_over(self) -> float:
        """By how many of the most expensive steps the budget was exceeded."""
        return (self.billed_usd - self.budget_usd) / STEP_USD


@dataclass
class Found:
    """What happened."""

    kills: int = 0
    stops: list[Stop] = field(default_factory=list)


PRELOADED = (  # what a worker would import in each of its lives
    "retrain.trainer.opening",
    "retrain.backends.tinker.policy",
    "retrain.plugins.tasks.successor",
    "retrain.plugins.rewards.partial",
    "transformers.models.auto.tokenization_auto",
)


def run_id(seed: int) -> str:
    return f"maxrl_s{seed}"


class Workers:
    """The campaign's workers: forks of this process, which has imported everything."""

    def __init__(self, campaign: CampaignFiles) -> None:
        self._campaign = campaign
        self._alive: dict[int, str] = {}

    def start_missing(self) -> None:
        """Start workers of the first runs that are not done."""
        self.reap()
        open_runs = (name for name in map(run_id, range(RUNS)) if not self._campaign.run(name).done.exists())
        for name in islice(open_runs, WORKERS):
            if name not in self._alive.values():
                self._alive[self._fork(name)] = name

    def reap(self) -> int:
        """Return how many are alive."""
        for pid in list(self._alive):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self._alive[pid]
        return len(self._alive)

    def kill(self, chosen: random.Random) -> bool:
        if not self.reap():
            return False
        pid = chosen.choice(list(self._alive))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        del self._alive[pid]
        return True

    def _fork(self, name: str) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            run = self._campaign.run(name)
            log = os.open(run.output_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, sys.stdout.fileno())
            os.dup2(log, sys.stderr.fileno())
            forget_threads()
            code = worker.run(run.directory, threading.Event())
        except BaseException:  # noqa: BLE001 - a child must not return into the tests
            traceback.print_exc()
        finally:
            os._exit(code)


def forget_threads() -> None:
    """Have the SDK start its thread anew: a fork has none of those that its parent may have started."""
    holders = importlib.import_module("tinker.lib.internal_client_holder")
    holders._internal_client_holder_thread_singleton = holders.InternalClientHolderThreadSingleton()


def kill_with_budget(
    root: Path, kills: int, seed: int, kills_per_stop: int = 10, staleness: int = 0
) -> Found:
    """Kill workers so often; the budget is raised whenever it has stopped the campaign."""
    for name in PRELOADED:
        importlib.import_module(name)
    found, chosen = Found(), random.Random(seed)
    server = RunningServer(root, ALPHABET)
    try:
        steps = AHEAD_STEPS if staleness else STEPS
        file = write_campaign(root, server, RUNS, steps, staleness)
        budget_usd = WORKERS * SET_ASIDE_USD + _more(kills_per_stop, chosen)
        campaign = start(file, [f"budget.usd={budget_usd}", f"logging.log_dir={root / 'logs'}"])
        files = CampaignFiles(campaign.directory)
        while found.kills < kills:
            found.kills += _until_stopped(files, chosen, kills_per_stop)
            found.stops.append(stop_of(server, files, budget_usd))
            budget_usd = found.stops[-1].at_most_usd + _more(kills_per_stop, chosen)
            reopen(files.directory, budget_usd=budget_usd).catch_up()
    finally:
        server.end()
    return found


def _more(kills: int, chosen: random.Random) -> float:
    """Return money for so many kills, and some steps between them."""
    return STEP_USD * (WORKERS + kills * chosen.uniform(1.0, 3.0))


def _until_stopped(files: CampaignFiles, chosen: random.Random, most_kills: int) -> int:
    """Kill workers until the budget stops the campaign; return how often."""
    workers, kills = Workers(files), 0
    while True:
        if not asked_to_stop(files):
            workers.start_missing()
        elif not workers.reap():
            return kills
        time.sleep(chosen.expovariate(1.0))
        kills += kills < most_kills and workers.kill(chosen)
        workers.reap()


def stop_of(server: RunningServer, files: CampaignFiles, budget_usd: float) -> Stop:
    found = (read_spending(run) for run in files_of_runs(files).values())
    spent = [one for one in found if one is not None]
    return Stop(
        budget_usd,
        Tokens(**server.stats()["billed"]).usd(PRICE),
        known_usd=sum(one.usd or 0.0 for one in spent),
        at_most_usd=sum((one.spent_usd or 0.0) + (one.open_usd or 0.0) for one in spent),
    )
