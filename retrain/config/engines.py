"""Tables of launchers that submit runs to an engine: `[campaign.<launcher>]`, one class each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from retrain.config.keys import Section, count, declare, key

PERMITS = (
    "split",
    "split: each run gets a share of backend.max_concurrent; shared: all runs use one semaphore, "
    "after a test that two nodes see each other's file locks",
)


@dataclass(frozen=True)
class Slurm(Section, affects="schedule"):
    """What each run requests from Slurm; an empty key is the site's default."""

    partition: str = key("", "sbatch --partition")
    time: str = key("", "sbatch --time, the limit of one attempt; a longer run continues in a new job")
    mem: str = key("", "sbatch --mem")
    gres: str = key("", "sbatch --gres, such as gpu:1")
    cpus: int = count(0, "sbatch --cpus-per-task; 0 = the site's default", least=0)
    licence: str = key("", "sbatch --licenses, held by each run while it runs, such as tinker:1")
    account: str = key("", "sbatch --account")
    setup: list[str] = key(list, "shell commands that a task runs first, such as module load")
    flags: list[str] = key(list, "additional sbatch options, verbatim, after all others")
    python: str = key("", "Python for the workers; default: the Python that submits")
    permits: Literal["split", "shared"] = declare(*PERMITS)
    poll_seconds: float = key(10.0, "seconds between two queries with squeue", ge=2, le=3600)


@dataclass(frozen=True)
class Ray(Section, affects="schedule"):
    """Where the Ray cluster is, and what each run requests from it."""

    address: str = key(
        "",
        "http://HEAD:8265, an address for ray.init, or local to start a cluster on this machine; "
        "default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or this machine's running cluster",
    )
    cpus: float = key(1.0, "CPUs that Ray reserves for each run", ge=0, le=1e6)
    gpus: float = key(0.0, "GPUs that Ray reserves for each run", ge=0, le=1e6)
    memory_gb: float = key(0.0, "memory that Ray reserves for each run, in 10^9 bytes", ge=0, le=1e9)
    resources: dict[str, Any] = key(dict, "custom resources that each run holds, such as tinker = 1")
    autoscales: bool = key(
        False, "the cluster adds nodes by itself, so runs may request what no node has yet"
    )
    runtime_env: dict[str, Any] = key(dict, "Ray's runtime environment for each run")
    setup: list[str] = key(list, "shell commands that driver and workers run first, such as module load")
    python: str = key("", "Python for driver and workers; default: the Python that submits")
    permits: Literal["split", "shared"] = declare(*PERMITS)
    poll_seconds: float = key(10.0, "seconds between two checks of the driver and its records", ge=2, le=3600)
