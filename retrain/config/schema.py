"""What a TOML file may say: one dataclass per table, each key with its type, bounds and meaning.

The descriptions are what `retrain schema` shows and what editors complete from. pydantic checks
files against these classes (`retrain.config.load`); a worker, whose run.toml was checked before it
was written, builds them without importing pydantic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from retrain.config.engines import Ray, Slurm
from retrain.config.keys import Normalization, Permits, Section, Table, count, declare, key, permits, plugin
from retrain.config.run_table import Run

FIRST_PERMITS = 4  # where their number adapts itself: what most APIs bear
LARGEST_SEED = 2**32 - 1  # what every random generator in use accepts


@dataclass(frozen=True)
class Model(Section):
    """Which model is trained, and where it is served."""

    model: str = key("", "hub id or local path; the numpy backend builds its own", path="file")
    lora_rank: int = key(32, "rank of the LoRA adapters", ge=1, le=4096)
    base_url: str = key("", "address of a training API (tinker)")


@dataclass(frozen=True)
class Training(Section):
    """The loop: how many steps, of which size, how fast."""

    seed: int = key(-1, "random seed; -1 draws one and records it", ge=-1, le=LARGEST_SEED)
    max_steps: int = count(500, "optimizer updates of a run")
    batch_size: int = count(8, "prompts per step")
    group_size: int = count(
        16,
        "rollouts per prompt",
        least=2,
        because="an advantage compares rollouts of one prompt",
    )
    max_tokens: int = count(10240, "upper bound on a completion's tokens")
    temperature: float = key(0.7, "sampling temperature", gt=0, le=10)
    lr: float = key(4e-5, "learning rate", gt=0, le=10)
    lr_schedule: Literal["constant", "linear", "cosine"] = declare(
        "constant", "how the learning rate falls to zero over max_steps of progress"
    )
    lr_warmup_steps: int = count(0, "steps of progress over which the learning rate rises", least=0)
    max_grad_norm: float = key(1.0, "gradients are clipped to this global norm", gt=0)
    entropy_bonus: float = key(0.0, "weight of the mean token entropy in the objective", ge=0, le=10)
    save_every: int = count(20, "steps between checkpoints; 0 saves at the end only", least=0, affects="time")
    keep_checkpoints: int = count(2, "newest checkpoints to keep", affects="display")
    eval_every: int = count(0, "steps between evaluations; 0 evaluates at the end only", least=0)


@dataclass(frozen=True)
class Algorithm(Section):
    """How rewards become gradients."""

    advantage_mode: str = plugin("maxrl", "advantages", "advantage_params", "grpo, rloo, maxrl, reinforce_pp")
    advantage_params: Table = key(dict, "parameters of the advantage plugin")
    transform_mode: str = plugin(
        "none", "transforms", "transform_params", "none, gtpo, gtpo_sepa, gtpo_hicra"
    )
    transform_params: Table = key(dict, "parameters of the transform plugin")
    loss_mode: str = plugin("ppo", "losses", "loss_params", "importance_sampling, ppo, cispo, gspo")
    loss_params: Table = key(dict, "parameters of the loss plugin")
    loss_normalization: Normalization = declare("token", "what the loss is divided by; see Algorithm")
    kl_coef: float = key(0.0, "weight of the KL divergence to the policy before training", ge=0, le=100)


@dataclass(frozen=True)
class Data(Section):
    """Where prompts come from."""

    task: str = plugin("sort", "tasks", "options", "where prompts come from")
    options: Table = key(dict, "options of the task plugin")
    seed: int = key(0, "seed of prompts and held-out split, the same for every run", ge=0, le=LARGEST_SEED)
    eval_prompts: int = count(256, "at most this many held-out prompts are evaluated")
    eval_samples: int = count(
        1, "beside the greedy one, so many sampled answers per prompt, for pass@k; 1 = none"
    )


@dataclass(frozen=True)
class Reward(Section):
    """How completions are scored."""

    reward: str = plugin("match", "rewards", "params", "how a completion is scored")
    params: Table = key(dict, "parameters of the reward plugin")


@dataclass(frozen=True)
class Backend(Section):
    """Where the policy lives, and how many API calls may be in flight."""

    backend: str = plugin("numpy", "backends", "options", "numpy, local, tinker")
    max_concurrent: Permits = permits(
        4,
        'API calls in flight over all workers (permits); "auto" finds what the API bears',
        affects="time",
    )
    throttle_dir: str = key(
        "", "share permits with other campaigns through this directory", affects="time", path="directory"
    )
    options: Table = key(dict, "options of the backend plugin")

    @property
    def adapts_permits(self) -> bool:
        """Whether the number of permits follows what the API bears."""
        return self.max_concurrent == "auto"

    @property
    def first_permits(self) -> int:
        """Permits that there are to begin with."""
        return FIRST_PERMITS if self.max_concurrent == "auto" else self.max_concurrent


@dataclass(frozen=True)
class WarmUp(Section):
    """Learn from written completions before reinforcement learning begins."""

    steps: int = count(0, "supervised optimizer updates before the first step; 0 = none", least=0)
    path: str = key("", "JSONL file: prompt and completion, or messages, in each row", path="file")
    batch_size: int = count(8, "rows per update")
    lr: float | None = key(None, "learning rate of these updates; default: training.lr", gt=0, le=10)


@dataclass(frozen=True)
class BackPressure(Section):
    """Find the batch size at which the backend's throughput is best."""

    enabled: bool = key(False, "let back pressure choose the batch size")
    warmup_steps: int = count(10, "steps spent exploring batch sizes", least=0)
    ema_decay: float = key(0.9, "smoothing of throughput", ge=0, lt=1)
    throttle_margin: float = key(0.85, "operate at this share of the optimum", gt=0, le=1)
    increase_margin: float = key(0.5, "grow when below this share of the operating point", gt=0, le=1)
    min_batch_size: int = count(1, "never fewer prompts per step")
    max_batch_size: int = count(64, "never more prompts per step")
    objective: Literal["throughput", "goodput"] = declare(
        "throughput", "goodput: count tokens for what they teach, by the gradient noise scale"
    )
    control: Literal["batch", "microbatch"] = declare(
        "batch", "batch: change the optimizer's batch; microbatch: keep it and change what runs at a time"
    )
    peak_gflops: float = key(0.0, "the device's peak in GFLOP/s; 0 = unknown", ge=0)
    peak_bw_gb_s: float = key(0.0, "the device's memory bandwidth in GB/s; 0 = unknown", ge=0)


@dataclass(frozen=True)
class Throttle(Section):
    """Yield to what else this machine does."""

    enabled: bool = key(False, "let the machine's load reduce or pause training")
    min_level: Literal["full", "reduced", "minimal", "paused"] = declare(
        "full", "never less restrictive than this"
    )
    prefer_gpu: bool = key(True, "read GPUs as well as processors and memory")
    scope: Literal["foreign", "system"] = declare(
        "foreign", "foreign: leave out our own load; system: count it"
    )
    control: Literal["microbatch", "batch"] = declare(
        "microbatch", "microbatch: keep the optimizer batch and accumulate; batch: make it smaller"
    )
    load_fn: str = key("", "dotted path of your own measure: () -> load in [0, 1], or None if unknown")
    on_unknown: Literal["full", "reduced", "minimal", "paused"] = declare(
        "reduced", "at least this level while the load cannot be read"
    )


@dataclass(frozen=True)
class RateLimiter(Section):
    """Sample beside training, at a fixed ratio, never too far ahead."""

    max_staleness: int = count(
        0, "oldest rollouts trained on, in policy versions; 0 = sample, then train, in turn", least=0
    )
    rate_limit_speed_batch_per_sim: float = key(
        0.0, "batches trained per production unit; 0 = as fast as each side can", ge=0, le=1e6
    )
    nb_time_steps: int = count(0, "prompts sampled by one production unit; 0 = batch_size", least=0)
    watermark: int = count(0, "training starts once this many prompts are buffered", least=0)
    buffer: Literal["fifo", "firo", "reservoir"] = declare(
        "fifo", "fifo: each once, in order; firo: each once, at random; reservoir: at random, with repeats"
    )
    threshold: int = count(0, "firo: prompts that stay behind, so that reading is random", least=0)
    capacity: int = count(0, "prompts that the buffer holds; 0 = twice what a batch needs", least=0)
    workers: int = key(1, "production units sampled at a time, if the backend allows it", ge=1, le=256)


@dataclass(frozen=True)
class Scaling(Section):
    """Scale the learning rate to the batch that is really used."""

    rule: Literal["none", "adascale", "adamscale", "legw", "linear", "sqrt"] = declare(
        "none", "how the learning rate follows the batch"
    )
    smoothing: float = key(0.999, "per initial batch, of the gradient noise scale", gt=0, lt=1)
    base_warmup_epochs: float = key(0.0, "legw: epochs of warm-up at the initial batch", ge=0, le=1e6)


@dataclass(frozen=True)
class Logging(Section, affects="display"):
    """Where records go."""

    log_dir: str = key("logs", "campaigns are written below this directory", min_length=1)
    samples_per_step: int = key(
        4,
        "rollouts of a prompt kept per step, with the best, the worst and a tie; 0 = none",
        ge=0,
        le=64,
    )
    loggers: list[str] = plugin(
        list, "loggers", "logger_params", "log to these as well: wandb, tensorboard, mlflow"
    )
    logger_params: Table = key(dict, "parameters of loggers, a table for each by its name")


@dataclass(frozen=True)
class Condition(Section):
    """One way to train: a name and what differs from the rest of the file."""

    name: str = key("", "how views call it; default: its two modes", max_length=200)
    advantage_mode: str | None = key(None, "short for [algorithm]", stands_for="algorithm.advantage_mode")
    transform_mode: str | None = key(None, "short for [algorithm]", stands_for="algorithm.transform_mode")
    model: Table = key(dict, "overrides of [model]")
    training: Table = key(dict, "overrides of [training]")
    algorithm: Table = key(dict, "overrides of [algorithm]")
    data: Table = key(dict, "overrides of [data]")
    reward: Table = key(dict, "overrides of [reward]")
    backend: Table = key(dict, "overrides of [backend]")
    warmup: Table = key(dict, "overrides of [warmup]")
    backpressure: Table = key(dict, "overrides of [backpressure]")
    throttle: Table = key(dict, "overrides of [throttle]")
    rate_limiter: Table = key(dict, "overrides of [rate_limiter]")
    scaling: Table = key(dict, "overrides of [scaling]")


@dataclass(frozen=True)
class Campaign(Section, affects="schedule"):
    """The matrix of conditions x seeds, and how its runs are launched."""

    name: str = key("", "prefix of the campaign's directory; default: the file's name", max_length=100)
    seeds: list[Any] | None = key(
        None,
        "one run per condition and seed",
        affects="result",
        stands_for="training.seed",
        json_schema_extra={"items": {"type": "integer", "minimum": 0, "maximum": LARGEST_SEED}},
    )
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
    stall_timeout: float = key(
        0.0, "end and retry a run that completes no step for so many seconds; 0 = never", ge=0, le=1e9
    )
    min_free_memory: float = key(
        0.0, "start no worker with less free: below 1 a fraction of all memory, else bytes", ge=0, le=1e18
    )
    pause_after: int = count(
        3, "pause launches when so many runs in a row failed for infrastructure; 0 = never", least=0
    )
    on_failure: Literal["continue", "stop"] = declare(
        "continue", "what the other runs do when one has failed"
    )
    slurm: Slurm = declare(Slurm, 'how launcher = "slurm" asks for its jobs')
    ray: Ray = declare(Ray, 'how launcher = "ray" asks for its jobs')
    launcher_options: Table = key(dict, "of another launcher; may be written as [campaign.<launcher>]")
    conditions: list[Condition] | None = declare(
        None, "the conditions; default: one, the file as it is", affects="result"
    )


@dataclass(frozen=True)
class Config(Section):
    """A whole TOML file."""

    model: Model = declare(Model, "which model is trained")
    training: Training = declare(Training, "the loop")
    algorithm: Algorithm = declare(Algorithm, "how rewards become gradients")
    data: Data = declare(Data, "where prompts come from")
    reward: Reward = declare(Reward, "how completions are scored")
    backend: Backend = declare(Backend, "where the policy lives")
    campaign: Campaign | None = declare(None, "conditions x seeds; absent: the file describes one run")
    warmup: WarmUp = declare(WarmUp, "learn from written completions first")
    backpressure: BackPressure = declare(BackPressure, "find the best batch size")
    throttle: Throttle = declare(Throttle, "yield to what else this machine does")
    rate_limiter: RateLimiter = declare(RateLimiter, "sample beside training")
    scaling: Scaling = declare(Scaling, "scale the learning rate to the batch")
    logging: Logging = declare(Logging, "where records go")
    run: Run | None = declare(None, "written by retrain into run.toml")
