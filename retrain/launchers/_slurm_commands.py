"""The four Slurm commands that are used, and what it means when they fail.

sbatch, squeue and scancel, and scontrol for one limit. Never sacct: sites without accounting have
none, and tools that rely on it take every job there for lost.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

from retrain.errors import EngineDownError, LaunchError
from retrain.launchers._slurm_queue import FORMAT
from retrain.records.text import plain

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
TIMEOUT_S = 100.0  # Slurm's own commands give up on a silent controller after some ten seconds
USUAL_ARRAY_SIZE = 1001  # Slurm's default, for a site whose configuration does not say
# What a controller that is away, starting or busy makes its commands say; anything else is a refusal.
DOWN = re.compile(
    r"unable to contact|connect failure|timed out|temporarily unable|zero bytes|connection refused"
    r"|communication|transport endpoint|munge|unexpected message received|in standby|not responding",
    re.IGNORECASE,
)
# A user's settings for looking by hand: one that shows a single partition would hide living tasks.
HABITS = ("SQUEUE_", "SCANCEL_")
GONE = re.compile(r"invalid job id|already completing|already completed", re.IGNORECASE)


def require_commands() -> None:
    """Make sure that Slurm's commands are here.

    Raises:
        LaunchError: one is not; says what to do.
    """
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)}: not found, so Slurm cannot be asked for anything from here; go to "
            'a machine of the cluster, load its Slurm module, or use launcher = "local"'
        )


def submit(arguments: Sequence[str]) -> int:
    """Submit a batch script; gives the job's number.

    Raises:
        EngineDownError: Slurm does not answer; it may still have taken the job.
        LaunchError: it refuses the job.
    """
    said = _run(["sbatch", "--parsable", *arguments])
    try:
        return int(said.strip().split(";")[0])
    except ValueError:
        raise LaunchError(f"sbatch answered {plain(said, 200)!r} instead of a job's number") from None


def try_submit(script: str, arguments: Sequence[str]) -> None:
    """Have Slurm judge a batch script without submitting it; raises as `submit` does."""
    _run(["sbatch", "--test-only", *arguments], script)


def list_tasks(names: Sequence[str]) -> str:
    """List all tasks of this user's jobs with these names, one line each, as `_slurm_queue` reads them.

    Raises:
        EngineDownError: Slurm does not answer.
    """
    user = f"--user={os.getuid()}"
    try:
        return _run(
            ["squeue", "-h", "-a", "-r", "-t", "all", user, f"--name={','.join(names)}", "-o", FORMAT]
        )
    except EngineDownError:
        raise
    except LaunchError as error:
        raise EngineDownError(str(error)) from error


def cancel(tasks: Sequence[str], arguments: Sequence[str]) -> None:
    """Cancel or signal tasks; those that are over already are passed over.

    Raises:
        EngineDownError: Slurm does not answer.
        LaunchError: it refuses.
    """
    if tasks:
        _run(["scancel", *arguments, *tasks], passed_over=GONE)


def array_limit() -> int:
    """Give how many tasks one array may have on this site.

    Raises:
        EngineDownError: Slurm does not answer.
    """
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _run(["scontrol", "show", "config"]), re.MULTILINE)
    return max(1, int(found[1])) if found else USUAL_ARRAY_SIZE


def _run(command: list[str], text: str | None = None, passed_over: re.Pattern[str] | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            errors="replace",
            env={name: text for name, text in os.environ.items() if not name.startswith(HABITS)},
            process_group=0,  # a Ctrl-C on the terminal is for us alone
        )
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]}: not found any more; load the site's Slurm module") from error
    except subprocess.TimeoutExpired as error:
        raise EngineDownError(
            f"Slurm does not answer ({command[0]} took more than {TIMEOUT_S:g} s)"
        ) from error
    said = [line for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == 0 or (passed_over and all(passed_over.search(line) for line in said)):
        return done.stdout
    reason = plain("; ".join(dict.fromkeys(said)) or f"exit code {done.returncode}", 300)
    if DOWN.search(reason):
        raise EngineDownError(f"Slurm does not answer ({reason})")
    raise LaunchError(f"Slurm refuses: {reason}{_hint(reason)}")


def _hint(reason: str) -> str:
    for words, key in (("partition", "partition"), ("license", "licence"), ("account", "account")):
        if f"invalid {words}" in reason.lower():
            return f"; see [campaign.slurm].{key}"
    return "; see [campaign.slurm]"
