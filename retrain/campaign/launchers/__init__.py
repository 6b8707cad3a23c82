"""Launchers: where workers execute.

A plugin is one file or folder with `open_launcher(assignment) -> Launcher`. It starts
`python -m retrain.trainer.worker RUN_DIR` somewhere and reports its end; the worker does the rest. The
outcome of a run is read from its directory: the cluster's answer is only a hint.

There are two kinds. The first starts each submitted run immediately (`queues = False`: `local`, `inline`), so
the supervisor admits workers one by one. The second submits runs to a cluster with its own queue
(`queues = True`: `slurm`, `ray`): it gets all runs at once, keeps up to `assignment.workers` of them running,
and continues after the orchestrator has exited. A later orchestrator, possibly on another machine, calls
`queued` to learn what the cluster still has; so the cluster must identify runs by name alone.

The keys of a launcher's table `[campaign.<name>]` are the keyword-only parameters of `open_launcher`; the
table is `assignment.options` as well. The tables of `slurm` and `ray` are classes in `config/schema.py`: as
sections of the schema their keys have defaults, bounds and descriptions in the reference and in editors, and
are checked in a file that uses another launcher today. The functions of `LauncherPlugin` are called before a
campaign's directory exists.

A cluster sets two environment variables of its workers: `RETRAIN_JOB` names the cluster's task (see
`base/locks.py`: such a worker renews a lease in run.lock, because locks may not reach other machines)
and `RETRAIN_OWN_PERMITS` is the worker's own number of permits, instead of a share of the campaign's.

Not plugins, but shared: `cluster` (for `queues = True`) and `shared_permits` (of several machines).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from retrain.backends import Devices
from retrain.base.errors import Problem
from retrain.base.registry import PluginSpec
from retrain.config.keys import Tables


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a launcher is opened for; constant while it is open."""

    campaign: str  # its id: the name of its directory
    directory: Path  # absolute
    runs: Mapping[str, Path]  # of all runs, by run id, in launch order: their directories
    workers: int  # maximum at a time; 0: only to find and end what was submitted
    permits: int | None  # initial limit on API calls in flight, all workers together; None without an API
    where: Path  # working directory of the workers
    permits_adapt: bool = False  # the limit adapts to the API's capacity
    permit_directories: tuple[Path, ...] = ()  # backend.throttle_dir: permits shared with other campaigns
    gpu_runs: Mapping[str, int] = field(default_factory=dict)  # runs that train on any GPUs, and on how many
    devices: Devices = field(default_factory=Devices)  # the most that a run needs, if it uses several
    options: Tables = field(default_factory=dict)  # the table [campaign.<launcher>]
    say: Callable[[str], None] = lambda text: None  # shows a notice to the user


@dataclass(frozen=True, slots=True)
class Begun:
    """A worker has started; only from launchers that queue."""

    run_id: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's end: which run, and the exit code (minus the signal if one ended it; None if unknown)."""

    run_id: str
    exit_code: int | None
    why: str = ""  # the cluster's reason, used if the worker left no message
    cut_short: bool = False  # by the cluster: a time limit, a lost machine
    is_lost: bool = False  # lost with its machine or in the cluster's restart; other runs may be lost too
    taken_back: bool = False  # cancelled by hand in the cluster: not retried


class Launcher(Protocol):
    """Starts, watches and ends workers. All runs are named by their ids in `Assignment.runs`."""

    queues: bool  # True: takes all runs at once and starts `workers` at a time by itself

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        """Start workers, or queue them.

        Returns:
            The runs that were accepted; the others may be submitted again.

        Raises:
            ClusterDownError: the cluster does not answer at present; nothing was accepted.
            LaunchError: it refuses, and a retry would not help.
        """

    def queued(self) -> Collection[str]:
        """Return the runs that an earlier orchestrator submitted and the cluster still has.

        Raises:
            ClusterDownError: the cluster does not answer at present.
        """

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Watch runs that an earlier orchestrator submitted, or that are alive without a task.

        Raises:
            LaunchError: they cannot be watched from here.
        """

    def poll(self, timeout_s: float) -> Sequence[Begun | Ended]:
        """Wait for an event, `wake` or the timeout; return what happened."""

    def wake(self) -> None:
        """Make a running `poll` return; safe in a signal handler."""

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        """Ask workers to save and exit, or kill them; queued runs never start."""


class LauncherPlugin:
    """What the file of a launcher may define beside `open_launcher`, each as here without it.

    `options` is the table `[campaign.<launcher>]`.
    """

    @staticmethod
    def check_options(options: Tables) -> Iterable[Problem | str]:
        """Return the problems of the table, each as `key: what is wrong`."""
        return ()

    @staticmethod
    def check_campaign(assignment: Assignment) -> Iterable[str]:
        """Return the problems that are found without the cluster."""
        return ()

    @staticmethod
    def check_cluster(assignment: Assignment) -> None:
        """Query the cluster; raise LaunchError if it cannot run the campaign."""

    @staticmethod
    def script(assignment: Assignment) -> str:
        """Return what would be submitted; only a launcher with a cluster defines it."""
        return ""

    @staticmethod
    def at_a_time(assignment: Assignment) -> int | None:
        """Return the cap of concurrent runs, if permits may lower `assignment.workers`."""
        return None

    @staticmethod
    def runs_here(options: Tables) -> bool:
        """Whether workers start at once on this machine."""
        return False

    @staticmethod
    def unused_keys(options: Tables) -> Mapping[str, str]:
        """Return why a key of [campaign] has no effect with this launcher, by key."""
        return {}


SPEC = PluginSpec(
    "launcher",
    "open_launcher",
    ("assignment",),
    members=("queues", "submit", "queued", "adopt", "poll", "wake", "cancel"),
    returns=Launcher,
    functions=LauncherPlugin,
    judge="check_options",
)
