"""The four Slurm commands in use, the tasks that squeue lists, and the meaning of failures.

sbatch, squeue and scancel, and scontrol for limits. Never sacct: on sites without accounting, tools that rely
on it consider every job lost. Each raises ClusterDownError if Slurm does not answer, and LaunchError if it
refuses.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import IO

from retrain.base.errors import ClusterDownError, LaunchError
from retrain.base.extras import needs
from retrain.records.text import plain

FORMAT = "%i|%T|%j|%r|%o"  # task, state, job's name, reason, script: the last may contain anything
# Ended tasks, which squeue shows for some minutes (MinJobAge); every other state is live.
OVER = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
LOST = frozenset("BOOT_FAIL NODE_FAIL PREEMPTED REVOKED".split())  # ended through no fault of the task
WAITS = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT".split())
# Normal reasons to wait on a busy cluster.
USUAL_REASONS = frozenset(
    "None Priority Resources JobArrayTaskLimit Dependency Licenses BeginTime Reservation Cleaning".split()
)
ARGUMENT = re.compile(r" (\d+)$")  # of the script: the number of the run of index 0
_TASK = re.compile(r"(\d+)(?:_(\d+))?$")
TIMEOUT_S = 100.0  # Slurm's own commands give up on a silent controller after some ten seconds
ARRAY_LIMIT = re.compile(r"(?:^MaxArraySize\s*=\s*|\bmax_array_tasks=)(\d+)", re.MULTILINE)
USUAL_ARRAY_SIZE = 1001  # Slurm's default, for a site whose configuration does not say
# Printed when the controller is away, starting or busy; anything else is a refusal.
DOWN = re.compile(
    r"unable to contact|connect failure|timed out|temporarily unable|zero bytes|connection refused"
    r"|communication|transport endpoint|munge|unexpected message received|in standby|not responding"
    r"|connection reset|broken pipe|unreachable|no route to host|temporarily unavailable",
    re.IGNORECASE,
)
# A user's defaults for manual use: an SQUEUE_ filter on one partition would hide live tasks, and SBATCH_
# variables override the script that the user was shown.
HABITS = ("SQUEUE_", "SCANCEL_", "SBATCH_")
# Printed by sbatch when a user, an account or the cluster has reached its job limit.
FULL = re.compile(r"job submit limit|SubmitJob|MaxJobCount|job queue full", re.IGNORECASE)
JOB = re.compile(r"^(\d+)(?:;\S+)?$", re.MULTILINE)  # a site's own sbatch may print more
RETRYING = "sleeping and retrying"  # printed by sbatch on a full queue; it retries for two minutes
SLICE_S = 1.0  # how often a command's output so far is read
NO_CLUSTER = re.compile(r"establish a configuration source|DNS SRV lookup failed")
# Printed of tasks that have ended; "no error" of the others of their array.
GONE = re.compile(
    r"invalid job id|already completing|already completed|already finished|no error", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """A line of squeue."""

    job: int
    index: int | None  # None: tasks that were cancelled together before they started
    state: str
    name: str
    reason: str
    script: str

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def waits(self) -> bool:
        return self.state in WAITS

    @property
    def first(self) -> int:
        """Return the number of the run of index 0 in its array."""
        argument = ARGUMENT.search(self.script)
        return int(argument[1]) if argument else 0

    @property
    def label(self) -> str:
        return f"{self.job}" if self.index is None else f"{self.job}_{self.index}"


class QueueFullError(ClusterDownError):
    """The site's job limit is reached; fewer jobs, or the same later, may be accepted."""


def require_commands() -> None:
    """Raise LaunchError, with what to do, unless Slurm's commands are installed."""
    missing = needs("launchers", "slurm").missing_commands()
    if missing:
        raise LaunchError(
            f"{', '.join(missing)}: not found, so Slurm cannot be used here; log in to "
            'a node of the cluster, load its Slurm module, or use launcher = "local"'
        )


def submit(arguments: Sequence[str]) -> int:
    """Submit a batch script, and return the job's number; after ClusterDownError Slurm may have accepted it.

    Raises QueueFullError if Slurm accepts no job of that size at present.
    """
    answer = _run(["sbatch", "--parsable", *arguments])
    if not (jobs := JOB.findall(answer)):
        raise ClusterDownError(f"sbatch answered {plain(answer, 200)!r} instead of a job ID")
    return int(jobs[-1])


def try_submit(script: str, arguments: Sequence[str]) -> None:
    """Have Slurm judge a batch script without submitting it; raises as `submit` does."""
    with tempfile.TemporaryFile() as given:  # and no pipe: sbatch may take long to read it
        given.write(script.encode())
        given.seek(0)
        _run(["sbatch", "--test-only", *arguments], given)


def list_tasks(name: str) -> str:
    """List all tasks of this user's jobs with this name, one line each, as `parse` reads them."""
    user = f"--user={os.getuid()}"
    try:
        return _run(["squeue", "-h", "-a", "-r", "-t", "all", user, f"--name={name}", "-o", FORMAT])
    except LaunchError as error:  # a refusal of a query may pass as well
        raise ClusterDownError(str(error)) from error


def parse(text: str) -> list[SlurmTask]:
    """Parse squeue's output; lines without a task are skipped."""
    tasks = []
    for line in text.splitlines():
        fields = line.split("|", 4)
        label = _TASK.match(fields[0])
        if label is not None and len(fields) == 5:
            index = int(label[2]) if label[2] is not None else None
            tasks.append(SlurmTask(int(label[1]), index, *fields[1:]))
    return tasks


def held_back(tasks: Iterable[SlurmTask]) -> dict[str, int]:
    """Count tasks that wait for a reason that may never pass, by Slurm's reason."""
    waiting = (task.reason for task in tasks if task.waits)
    return dict(Counter(reason for reason in waiting if reason not in USUAL_REASONS))


def array_of(indices: Iterable[int]) -> str:
    """Return indices in Slurm's notation: 0-3,7."""
    parts = []
    # in a row, an index minus its place among all is constant
    for _, row in groupby(enumerate(sorted(set(indices))), lambda placed: placed[1] - placed[0]):
        first, *rest = (index for _, index in row)
        parts.append(f"{first}-{rest[-1]}" if rest else f"{first}")
    return ",".join(parts)


def cancel(tasks: Sequence[str], arguments: Sequence[str]) -> None:
    """Cancel or signal tasks; those that have ended are skipped."""
    if tasks:
        _run(["scancel", *arguments, *tasks], ignored=GONE)


def set_cap(job: int, at_a_time: int) -> None:
    """Change how many tasks of an array run at a time; one that has ended is left alone."""
    _run(["scontrol", "update", f"jobid={job}", f"arraytaskthrottle={at_a_time}"], ignored=GONE)


def array_limit() -> int:
    """Return how many tasks one array may have on this site."""
    limits = ARRAY_LIMIT.findall(_run(["scontrol", "show", "config"]))
    return max(1, min(map(int, limits), default=USUAL_ARRAY_SIZE))


def _run(command: list[str], given: IO[bytes] | None = None, ignored: re.Pattern[str] | None = None) -> str:
    try:
        code, out, err = _call(command, given)
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]}: no longer found; load the site's Slurm module") from error
    except TimeoutError as error:
        raise ClusterDownError(
            f"Slurm does not answer ({command[0]} took more than {TIMEOUT_S:g} s)"
        ) from error
    except OSError as error:  # a limit on this user's processes or memory
        raise ClusterDownError(f"{command[0]} cannot be started here ({error.strerror})") from error
    lines = [line for line in err.splitlines() if line.strip()]
    if code == 0 or (ignored and lines and all(ignored.search(line) for line in lines)):
        return out
    raise _error(plain("; ".join(dict.fromkeys(lines)) or f"exit code {code}", 300))


def _error(reason: str) -> LaunchError:
    if NO_CLUSTER.search(reason):
        return LaunchError(
            "Slurm finds neither its configuration nor a controller from here; log in to a node of the "
            'cluster, set SLURM_CONF, or use launcher = "local"'
        )
    if RETRYING in reason or FULL.search(reason):
        return QueueFullError(f"Slurm accepts no more jobs at present: {reason}")
    if DOWN.search(reason):
        return ClusterDownError(f"Slurm does not answer ({reason})")
    keys = {"partition": ".partition", "license": ".licence", "account": ".account"}
    key = next((key for word, key in keys.items() if f"invalid {word}" in reason.lower()), "")
    unused = sorted(name for name in os.environ if name.startswith("SBATCH_"))
    also = f" ({', '.join(unused)} in the environment are ignored)" if unused else ""
    return LaunchError(f"Slurm refuses: {reason}; see [campaign.slurm]{key}{also}")


def _call(command: list[str], given: IO[bytes] | None) -> tuple[int, str, str]:
    """Run a command; kill an sbatch that starts to wait because the queue is full."""
    process = subprocess.Popen(
        command,
        stdin=given or subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith(HABITS)},
        process_group=0,  # the terminal's Ctrl-C is for the orchestrator alone
    )
    with process:
        try:
            out, err = _patiently(process)
        except BaseException:
            process.kill()
            raise
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")


def _patiently(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    until = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return process.communicate(timeout=SLICE_S)
        except subprocess.TimeoutExpired as error:
            if RETRYING.encode() in (error.stderr or b""):
                process.kill()
            elif time.monotonic() > until:
                raise TimeoutError from error
