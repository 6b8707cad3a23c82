"""Tables of launchers that hand runs to an engine: `[campaign.<launcher>]`, one class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from retrain.config.keys import Section, count, declare, key

PERMITS = (
    "split",
    "split: each run gets its part of backend.max_concurrent; shared: all runs queue for it at one "
    "semaphore, if two nodes prove that they see each other's file locks",
)


@dataclass(frozen=True)
class Slurm(Section, affects="schedule"):
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
    permits: Literal["split", "shared"] = declare(*PERMITS)
    poll_seconds: float = key(10.0, "ask squeue this often", ge=2, le=3600)


@dataclass(frozen=True)
class Ray(Section, affects="schedule"):
    """Where the Ray cluster is, and what each run asks of it."""

    address: str = key(
        "",
        "http://HEAD:8265, what ray.init takes, or local for one that is started here; "
        "default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or the cluster of this machine",
    )
    cpus: float = key(1.0, "CPUs that Ray sets aside for each run", ge=0, le=1e6)
    gpus: float = key(0.0, "GPUs that Ray sets aside for each run", ge=0, le=1e6)
    memory_gb: float = key(0.0, "memory that Ray sets aside for each run, in 10^9 bytes", ge=0, le=1e9)
    resources: dict[str, Any] = key(dict, "custom resources that each run holds, such as tinker = 1")
    autoscales: bool = key(False, "the cluster adds machines by itself: ask for what none has yet")
    runtime_env: dict[str, Any] = key(dict, "Ray's runtime environment for each run")
    setup: list[str] = key(list, "lines of shell that driver and workers run first, such as module load")
    python: str = key("", "the Python that driver and workers run with; default: the one that submits")
    permits: Literal["split", "shared"] = declare(*PERMITS)
    poll_seconds: float = key(
        10.0, "ask Ray for the driver, and read what it wrote, this often", ge=2, le=3600
    )
    share_seconds: float = key(
        0.0, "of earlier versions; has no effect, because tasks are cheap", ge=0, le=86400
    )
