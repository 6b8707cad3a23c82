"""Tables of launchers that hand runs to an engine: `[campaign.<launcher>]`, one class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from retrain.config.keys import Section, count, declare, key


@dataclass(frozen=True)
class Slurm(Section):
    """What each run asks of Slurm; anything left empty is the site's default."""

    partition: str = key("", "sbatch --partition")
    time: str = key("", "sbatch --time, the longest attempt; a longer run goes on in a new job")
    mem: str = key("", "sbatch --mem")
    gres: str = key("", "sbatch --gres, such as gpu:1")
    cpus: int = count(0, "sbatch --cpus-per-task; 0 = the site's default", least=0)
    licence: str = key("", "sbatch --licenses, held by each run while it runs, such as tinker:1")
    account: str = key("", "sbatch --account")
    setup: list[str] = key(list, "lines of shell that a task runs first, such as module load")
    flags: list[str] = key(list, "more options of sbatch, verbatim, after all others")
    python: str = key("", "the Python that workers run with; default: the one that submits")
    permits: Literal["split", "shared"] = declare(
        "split",
        "split: each run gets its part of backend.max_concurrent; shared: all runs queue for it at one "
        "semaphore, if two nodes prove that they see each other's file locks",
    )
    poll_seconds: float = key(10.0, "ask squeue this often", ge=2, le=3600)
