"""Tables of a whole campaign: its runs and their launching, `[[eval]]`, `[decision]`, `[budget]`, `[run]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from retrain.config.keys import Section, Stall, Table, count, key, plugin
from retrain.config.versions import CURRENT

NO_RUNS = "the campaign would have no runs"
COLDEST = 0.01  # sampling temperature; vLLM takes a lower one for this, and logits over 1e-40 overflow
LARGEST_SEED = 2**32 - 1  # accepted by every random number generator in use
PERMITS = (
    "split",
    "split: each run gets a share of backend.max_concurrent; shared: all runs use one semaphore, "
    "after a test that two nodes see each other's file locks",
)


@dataclass(frozen=True)
class SlurmSection(Section, affects="schedule"):
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
    permits: Literal["split", "shared"] = key(*PERMITS)
    poll_seconds: float = key(10.0, "seconds between two queries with squeue", ge=2, le=3600)


@dataclass(frozen=True)
class RaySection(Section, affects="schedule"):
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
    permits: Literal["split", "shared"] = key(*PERMITS)
    poll_seconds: float = key(10.0, "seconds between two checks of the driver and its records", ge=2, le=3600)


@dataclass(frozen=True)
class ConditionSection(Section):
    """One way to train: a name and what differs from the rest of the file."""

    name: str = key("", "label in tables and charts; default: its two modes", max_length=200)
    advantage_mode: str | None = key(None, "same as in [algorithm]", stands_for="algorithm.advantage_mode")
    transform_mode: str | None = key(None, "same as in [algorithm]", stands_for="algorithm.transform_mode")
    model: Table = key(dict, "overrides of [model]")
    training: Table = key(dict, "overrides of [training]")
    algorithm: Table = key(dict, "overrides of [algorithm]")
    data: Table = key(dict, "overrides of [data]")
    reward: Table = key(dict, "overrides of [reward]")
    environment: Table = key(dict, "overrides of [environment]")
    backend: Table = key(dict, "overrides of [backend]")
    warmup: Table = key(dict, "overrides of [warmup]")
    backpressure: Table = key(dict, "overrides of [backpressure]")
    throttle: Table = key(dict, "overrides of [throttle]")
    rate_limiter: Table = key(dict, "overrides of [rate_limiter]")
    scaling: Table = key(dict, "overrides of [scaling]")


@dataclass(frozen=True)
class SearchSection(Section, affects="schedule"):
    """Drop the worse conditions at some steps, and decide on fresh seeds whether the winner is better."""

    rungs: list[int] = key(list, "steps at which the better part goes on", ge=1)
    keep: float = key(0.5, "fraction of the conditions that goes on at each rung", gt=0, lt=1)
    metric: str = key("mean_reward", "metric that ranks conditions, as `retrain compare` computes it")
    sampler: str = key(
        "",
        "proposes points of the sweep by what earlier ones gave: optuna:tpe, or another of Optuna's; "
        "default: all points are run",
    )
    sampler_options: Table = key(dict, "parameters of Optuna's sampler, such as n_startup_trials = 5")
    trials: int | None = count(None, "points that the sampler proposes")
    trials_per_round: int | None = count(
        None, "points that it proposes at a time; default: 4, or all trials if these are fewer"
    )


@dataclass(frozen=True)
class CampaignSection(Section, affects="schedule"):
    """The matrix of conditions x seeds, and how its runs are launched."""

    name: str = key("", "prefix of the campaign's directory; default: the file's name", max_length=100)
    seeds: list[int] | None = key(
        None, "one run per condition and seed", affects="result", stands_for="training.seed",
        ge=0, le=LARGEST_SEED, min_length=1, because=NO_RUNS,
    )  # fmt: skip
    max_steps: int | None = count(
        None, "steps of every run", affects="result", stands_for="training.max_steps"
    )
    parallel: bool = key(False, "run several workers at a time")
    max_workers: int = key(0, "workers at a time when parallel; 0 = all runs", ge=0, le=100_000)
    stagger_seconds: float = key(0.0, "wait this long between two launches", ge=0, le=1e6)
    launcher: str = plugin(
        "local", "launchers", "launcher_options", "local (processes), inline (this process), slurm, ray"
    )
    retries: int = key(2, "further attempts after an infrastructure failure", ge=0, le=100)
    run_timeout: float = key(0.0, "end a run that takes longer, in seconds; 0 = never", ge=0, le=1e9)
    stall_timeout: Stall = key(
        "auto",
        'end and retry a run that completes no step for this many seconds; 0 = never; "auto" = 20 times its '
        "longest step so far, at least 30 minutes, without any sign of progress",
        ge=0,
        le=1e9,
        needs='a number of seconds of at least 0, or "auto"',
    )
    min_free_memory: float = key(
        0.0, "free memory needed to start a worker: below 1 a fraction of all, else bytes", ge=0, le=1e18
    )
    pause_after: int = count(
        3, "pause launches after this many consecutive infrastructure failures; 0 = never", least=0
    )
    on_failure: Literal["continue", "stop"] = key("continue", "what happens to the other runs when one fails")
    slurm: SlurmSection = key(SlurmSection, 'options of launcher = "slurm"')
    ray: RaySection = key(RaySection, 'options of launcher = "ray"')
    launcher_options: Table = key(dict, "another launcher's; may be written as [campaign.<launcher>]")
    conditions: list[ConditionSection] | None = key(
        None, "the conditions; default: one, the file itself", affects="result", min_length=1, because=NO_RUNS
    )
    sweep: Table = key(
        dict, 'values by key, such as "training.lr": each condition with each; see Sweeps', affects="result"
    )
    search: SearchSection | None = key(None, "drop the worse conditions early; absent: run all to their ends")


@dataclass(frozen=True)
class DecisionSection(Section, affects="schedule"):
    """Add seeds until it is known which conditions differ from a reference."""

    metric: str = key("eval_reward", "metric that decides, as `retrain compare` computes it")
    reference: str = key("", "condition that the others are compared with; default: the first")
    error: float = key(0.05, "probability of a false verdict, over all conditions and looks", ge=1e-9, lt=1)
    smallest_difference: float | None = key(
        None, "smaller differences do not matter, in the metric's unit; default: any matters", gt=0
    )
    max_seeds: int = key(12, "most seeds of a condition", ge=3, le=100)
    budget: str = key(
        "", "no seeds are added after this much running time, as 8h or 1h30m; default: no limit"
    )
    budget_usd: float | None = key(
        None, "no seeds are added once the runs have cost so many dollars; default: no limit", gt=0, le=1e9
    )
    allocate: Literal["equal", "auto"] = key(
        "equal",
        "equal: each round adds a seed to every open condition; auto, for a tight "
        "budget: where a difference is likeliest to be found per second",
    )


@dataclass(frozen=True)
class EvalSection(Section):
    """An evaluation that is not the reward: its own held-out prompts, reward and sampling.

    There may be several, each a table `[[eval]]`.
    """

    name: str = key("", "its rows' fields are `eval_<name>_*`, its file `evals/<name>.jsonl`", max_length=40)
    task: str = plugin("", "tasks", "options", "where its held-out prompts come from; default: [data]")
    options: Table = key(dict, "options of its task")
    reward: str = plugin("", "rewards", "params", "how its completions are scored; default: [reward]")
    params: Table = key(dict, "parameters of its reward")
    environment: str = plugin(
        "",
        "environments",
        "environment_options",
        "what its episodes are played in, with the other keys of [environment]; default: [environment]",
    )
    environment_options: Table = key(dict, "options of its environment")
    every: int = count(0, "steps between its evaluations; 0 evaluates at the end only", least=0)
    at_start: bool = key(False, "also evaluate before the first step, so that a fall from there is seen")
    prompts: int = count(256, "maximum number of its held-out prompts")
    samples: int = count(1, "completions per prompt")
    max_tokens: int | None = count(None, "upper bound on a completion's tokens; default: training.max_tokens")
    temperature: float = key(0.0, "sampling temperature; 0 takes the likeliest token", ge=0, le=10)


@dataclass(frozen=True)
class EvalsSection(Section):
    """Evaluations that are not the reward."""

    tables: list[EvalSection] = key(list, "one per `[[eval]]`")


@dataclass(frozen=True)
class BudgetSection(Section, affects="schedule"):
    """What a campaign may cost, and the prices of tokens."""

    usd: float | None = key(
        None, "dollars; the campaign saves its runs and stops before it costs more", gt=0, le=1e9
    )
    prices: Table = key(
        dict, "dollars per million tokens, one table per model: prefill, cached, sample, train"
    )


@dataclass(frozen=True)
class RunSection(Section, affects="display"):
    """Which run of which campaign this is; written by retrain into run.toml, never by hand."""

    run_id: str = key("", "name of the run's directory")
    campaign: str = key("", "id of the campaign")
    condition: str = key("", "name of the condition")
    config_hash: str = key("", "digest of everything that decides the result")
    files: Table = key(dict, "fingerprints of the files that decide the result, by key")
    origin: Table = key(dict, "contents of origin.json, from which it can be restored")
    version: int = key(CURRENT, "version of the keys' meanings", ge=1)
