"""The keys of a TOML file: one dataclass per table, each key with its type, bounds and meaning.

The descriptions are what `retrain schema` shows and what editors complete from. pydantic checks
files against these classes (`retrain.config.checks`); a worker, whose run.toml was checked before it
was written, builds them without importing pydantic.
"""

from __future__ import annotations

from typing import Any, Literal

from retrain.config.keys import (
    CURRENT,
    LARGEST_PERMITS,
    Finish,
    Normalization,
    Over,
    Permits,
    Section,
    Stall,
    Table,
    count,
    key,
    plugin,
)

NO_RUNS = "the campaign would have no runs"
COLDEST = 0.01  # sampling temperature; vLLM takes a lower one for this, and logits over 1e-40 overflow
LARGEST_SEED = 2**32 - 1  # accepted by every random number generator in use
PERMITS = (
    "split",
    "split: each run gets a share of backend.max_concurrent; shared: all runs use one semaphore, "
    "after a test that two nodes see each other's file locks",
)

NO_REWARD = "none"  # the reward of a run that learns from its teacher alone
SINGLE_TURN = "single_turn"  # the environment that is none
FIRST_PERMITS = 4  # initial number when it is adaptive: most APIs can take it


class ModelSection(Section):
    """Which model is trained, and where it is served."""

    model: str = key("", "Hugging Face hub ID or local path; not used by the numpy backend", path="file")
    lora_rank: int = key(32, "rank of the LoRA adapters", ge=1, le=4096)
    base_url: str = key("", "address of a training API (tinker)")
    adapter: str = key("", "start from a finished run, a peft adapter or a tinker:// state", path="adapter")


class TrainingSection(Section):
    """The training loop: number of steps, batch size, learning rate, checkpoints."""

    seed: int = key(-1, "random seed; -1 draws one and records it", ge=-1, le=LARGEST_SEED)
    max_steps: int = count(500, "steps of a run: batches that are sampled and trained on")
    batch_size: int = count(8, "prompts per step")
    group_size: int = count(
        16, "rollouts per prompt", least=2, because="an advantage compares rollouts of one prompt"
    )
    updates_per_batch: int = key(1, "passes over each batch", ge=1, le=64)
    minibatches: int = count(1, "parts of the batch, of whole groups; each pass updates once on every part")
    max_tokens: int = count(10240, "upper bound on a completion's tokens")
    temperature: float = key(0.7, "sampling temperature", ge=COLDEST, le=10)
    lr: float = key(4e-5, "learning rate", gt=0, le=10)
    lr_schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "how the learning rate decays to zero over max_steps of progress"
    )
    lr_warmup_steps: int = count(0, "steps of progress over which the learning rate ramps up", least=0)
    max_grad_norm: float = key(1.0, "gradients are clipped to this global norm", gt=0)
    entropy_bonus: float = key(0.0, "weight of the mean token entropy in the objective", ge=0, le=10)
    save_every: int = count(20, "steps between checkpoints; 0 saves at the end only", least=0, affects="time")
    keep_checkpoints: int = count(2, "newest checkpoints to keep", affects="display")
    eval_every: int = count(0, "steps between evaluations; 0 evaluates at the end only", least=0)
    eval_at_start: bool = key(
        True,
        "also evaluate before the first step, once for all runs of a seed that start alike",
        affects="time",
    )
    max_unscored: float = key(
        0.5,
        "a run ends, to be tried again, once the scorer fails or times out for more than this share of the "
        "completions in ten steps in a row; 1 = never",
        ge=0,
        le=1,
        affects="time",
    )


class AlgorithmSection(Section):
    """How rewards become gradients."""

    advantage_mode: str = plugin(
        "maxrl", "advantages", "advantage_params", "grpo, rloo, maxrl, reinforce_pp, gdpo"
    )
    advantage_params: Table = key(dict, "parameters of the advantage plugin")
    transform_mode: str = plugin("none", "transforms", "transform_params", "gtpo, gtpo_sepa, gtpo_hicra")
    transform_params: Table = key(dict, "parameters of the transform plugin")
    loss_mode: str = plugin("ppo", "losses", "loss_params", "importance_sampling, ppo, cispo, gspo")
    loss_params: Table = key(dict, "parameters of the loss plugin")
    loss_normalization: Normalization = key("token", "what the loss is divided by; see Algorithm")
    kl_coef: float = key(0.0, "weight of the KL divergence to the policy before training", ge=0, le=100)
    kl_reference: Literal["start", "base"] = key("start", "that policy: with model.adapter, or without")
    ratio_cap: float = key(0.0, "highest importance ratio, trainer's to sampler's; 0: no limit", ge=0)
    ratio_cap_scope: Literal["token", "sequence"] = key("token", "of a token, or of a whole rollout")
    ratio_cap_mode: Literal["truncate", "mask"] = key("truncate", "lower what exceeds it, or leave it out")
    mask_truncated: bool = key(False, "leave completions that max_tokens cut off out of the loss")


class TeacherSection(Section):
    """A model that scores each token which the policy samples, beside or in place of a reward."""

    teacher: str = key(
        "",
        'a finished run: its directory, or "NAME/RUN" in the newest campaign of a name in log_dir; "self"; '
        'with local also a model, or "engine", a server\'s',
        path="teacher",
    )
    mode: Literal["reverse_kl", "jsd"] = key(
        "reverse_kl",
        "reverse_kl: a sampled token's log-ratio is its advantage; jsd: the loss has the generalised "
        "Jensen-Shannon divergence of the whole distributions",
    )
    beta: float = key(0.5, "with jsd: 1 is the reverse KL divergence, 0 the forward one", ge=0, le=1)
    weight: float = key(1.0, "factor on the advantage or the divergence", gt=0, le=1000)
    schedule: Literal["constant", "linear", "cosine"] = key(
        "constant", "how the weight decays to zero over max_steps"
    )
    refresh: bool = key(False, "self: the policy as of every save_every steps, in place of its start")
    prompt: str = key(
        "", 'what the teacher reads as the prompt, such as "{prompt} (answer: {answer})"; default: the same'
    )


class SourceSection(Section):
    """One of several sources of prompts, with its share of each step.

    There may be several, each a table `[[data.source]]`, in place of the task of `[data]`.
    """

    name: str = key("", "its rows' fields are `source_<name>_*`; default: its task", max_length=40)
    task: str = plugin("", "tasks", "options", "where its prompts come from")
    options: Table = key(dict, "options of its task")
    weight: float = key(1.0, "its share of a step's prompts, relative to the others' weights", gt=0, le=1e6)
    from_step: int = count(1, "first step that it has prompts in")
    until_step: int | None = count(None, "last step that it has prompts in; default: the run's last")
    reward: str = plugin("", "rewards", "params", "how its completions are scored; default: [reward]")
    params: Table = key(dict, "parameters of its reward")
    environment: str = plugin(
        "",
        "environments",
        "environment_options",
        "what its episodes are played in, with the other keys of [environment]; default: [environment]",
    )
    environment_options: Table = key(dict, "options of its environment")
    max_tokens: int | None = count(None, "upper bound on a completion's tokens; default: training.max_tokens")
    teacher: str = key(
        "",
        "what its completions learn from, with the other keys of [teacher]; default: [teacher]",
        path="teacher",
    )

    @property
    def label(self) -> str:
        """Its name; by default that of its task, without the module of a dotted path."""
        return self.name or self.task.rpartition(".")[2]

    def is_active(self, step: int) -> bool:
        """Whether it has prompts in a step, numbered from 1."""
        return self.from_step <= step and (self.until_step is None or step <= self.until_step)


class DataSection(Section):
    """Where prompts come from."""

    task: str = plugin("sort", "tasks", "options", "where prompts come from")
    options: Table = key(dict, "options of the task plugin")
    seed: int = key(0, "seed of prompts and held-out split, the same for every run", ge=0, le=LARGEST_SEED)
    eval_prompts: int = count(256, "maximum number of held-out prompts to evaluate")
    eval_samples: int = count(1, "answers per held-out prompt for pass@k, besides the greedy one; 1 = none")
    curriculum: str = plugin("shuffle", "curricula", "curriculum_params", "which prompts come next")
    curriculum_params: Table = key(dict, "parameters of the curriculum plugin")
    refill: Literal["none", "tied", "outcome"] = key(
        "none",
        "tied: groups of equal rewards are replaced by further ones; outcome: those all right or all wrong",
    )
    refill_most: int = count(3, "further batches that a refill samples at most")
    source: list[SourceSection] = key(list, "several tasks, each a table [[data.source]]; default: one")

    @property
    def tasks(self) -> str:
        """The names of its tasks, for people."""
        return ", ".join(source.label for source in self.source) or self.task

    @property
    def most_refill(self) -> int:
        """How many further batches a step may sample."""
        return 0 if self.refill == "none" else self.refill_most


class RewardSection(Section):
    """How completions are scored."""

    reward: str = plugin("match", "rewards", "params", "how a completion is scored; none: by a teacher alone")
    params: Table = key(dict, "parameters of the reward plugin")
    sandbox: str = plugin("auto", "sandbox", "sandbox_options", "where programs run that a policy wrote")
    sandbox_options: Table = key(dict, "options of the sandbox plugin")


class EnvironmentSection(Section):
    """What a policy talks to: one completion per prompt, or the turns of an episode."""

    environment: str = plugin(SINGLE_TURN, "environments", "options", "single_turn, guess, tools, your class")
    options: Table = key(dict, "options of the environment plugin")
    max_turns: int = count(16, "turns of an episode")
    max_turn_tokens: int = count(0, "most tokens of a turn; 0 = what is left of training.max_tokens", least=0)
    separate_turns: bool = key(False, "each turn is a sample, of the conversation as it is rendered anew")
    turn_reward: Literal["final", "sum"] = key(
        "final", "final: an episode is worth its last turn's reward; sum: that of all turns, discounted"
    )
    discount: float = key(1.0, "with sum, factor on the reward per turn before it", gt=0, le=1)
    truncated_reward: float | None = key(
        None, "reward of an episode that max_turns or max_tokens ends; default: what its turns are worth"
    )
    error_reward: float | None = key(None, "reward of an episode that fails; default: it is unscored")
    time_limit_s: float = key(60.0, "time that one call of the environment may take", gt=0, le=86400)
    threads: bool = key(False, "sample while plain functions wait; each episode has a thread of its own")
    processes: int = count(
        0, "processes that play the episodes; for functions that compute, may crash or leak; 0: none", least=0
    )

    @property
    def is_single_turn(self) -> bool:
        """Whether a rollout is one completion, and no episode."""
        return self.environment == SINGLE_TURN


class BackendSection(Section):
    """Where the policy lives, and how many API calls may be in flight."""

    backend: str = plugin("numpy", "backends", "options", "numpy, local, tinker")
    max_concurrent: Permits = key(
        4,
        'API calls in flight over all workers (permits); "auto" adapts to the API\'s capacity',
        affects="time",
        ge=1,
        le=LARGEST_PERMITS,
        needs=f'a whole number from 1 to {LARGEST_PERMITS}, or "auto"',
    )
    throttle_dir: str = key(
        "", "share permits with other campaigns through this directory", affects="time", path="directory"
    )
    options: Table = key(dict, "options of the backend plugin")

    @property
    def adapts_permits(self) -> bool:
        """Whether the number of permits adapts to the API's capacity."""
        return self.max_concurrent == "auto"

    @property
    def first_permits(self) -> int:
        return FIRST_PERMITS if self.max_concurrent == "auto" else self.max_concurrent


class WarmUpSection(Section):
    """Supervised training on given completions, before reinforcement learning begins."""

    steps: int = count(0, "supervised optimizer updates before the first step; 0 = none", least=0)
    path: str = key("", "JSONL file; each row has prompt and completion, or messages", path="file")
    batch_size: int = count(8, "rows per update")
    lr: float | None = key(None, "learning rate of these updates; default: training.lr", gt=0, le=10)


class BackPressureSection(Section):
    """Find the batch size at which the backend's throughput is best."""

    enabled: bool = key(False, "let back pressure choose the batch size")
    warmup_steps: int = count(10, "steps spent exploring batch sizes", least=0)
    ema_decay: float = key(0.9, "smoothing of throughput", ge=0, lt=1)
    throttle_margin: float = key(0.85, "operate at this fraction of the optimum", gt=0, le=1)
    increase_margin: float = key(0.5, "grow when below this fraction of the operating point", gt=0, le=1)
    min_batch_size: int = count(1, "minimum prompts per step")
    max_batch_size: int = count(64, "maximum prompts per step")
    objective: Literal["throughput", "goodput"] = key(
        "throughput", "goodput: weight tokens by their statistical efficiency, from the gradient noise scale"
    )
    control: Literal["batch", "microbatch"] = key(
        "batch", "batch: change the optimizer's batch; microbatch: keep it and change the microbatches"
    )
    peak_gflops: float = key(0.0, "the device's peak in GFLOP/s; 0 = unknown", ge=0)
    peak_bw_gb_s: float = key(0.0, "the device's memory bandwidth in GB/s; 0 = unknown", ge=0)


class ThrottleSection(Section):
    """Yield to the other load on this machine."""

    enabled: bool = key(False, "let the machine's load reduce or pause training")
    min_level: Literal["full", "reduced", "minimal", "paused"] = key(
        "full", "least restrictive level allowed"
    )
    prefer_gpu: bool = key(True, "measure GPUs as well as CPU and memory")
    scope: Literal["foreign", "system"] = key(
        "foreign", "foreign: exclude retrain's own load; system: include it"
    )
    control: Literal["microbatch", "batch"] = key(
        "microbatch", "microbatch: keep the optimizer batch and accumulate; batch: make it smaller"
    )
    load_fn: str = key("", "dotted path of a load function: () -> load, 1 is saturated, or None if unknown")
    on_unknown: Literal["full", "reduced", "minimal", "paused"] = key(
        "reduced", "at least this level while the load cannot be read"
    )


class RateLimiterSection(Section):
    """Sample while training, at a fixed ratio and with bounded staleness."""

    max_staleness: int = count(
        0,
        "oldest rollouts trained on, in policy versions; 0 = sampling and training alternate; 1 unless given "
        "where a speed is set",
        least=0,
    )
    rate_limit_speed_batch_per_sim: float = key(
        0.0, "batches trained per production unit; 0 = no rate limit", ge=0, le=1e6
    )
    nb_time_steps: int = count(0, "prompts sampled by one production unit; 0 = batch_size", least=0)
    watermark: int = count(0, "training starts once this many prompts are buffered", least=0)
    buffer: Literal["fifo", "firo", "reservoir"] = key(
        "fifo", "fifo: each once, in order; firo: each once, at random; reservoir: at random, with repeats"
    )
    threshold: int = count(0, "firo: prompts always left in the buffer, so that reads are random", least=0)
    capacity: int = count(0, "capacity of the buffer in prompts; 0 = twice what a batch needs", least=0)
    workers: int = key(1, "production units sampled concurrently, if the backend allows it", ge=1, le=256)


class ScalingSection(Section):
    """Scale the learning rate to the actual batch size."""

    rule: Literal["none", "adascale", "adamscale", "legw", "linear", "sqrt"] = key(
        "none", "how the learning rate follows the batch"
    )
    smoothing: float = key(0.999, "smoothing of the gradient noise scale, per initial batch", gt=0, lt=1)
    base_warmup_epochs: float = key(0.0, "legw: epochs of warm-up at the initial batch", ge=0, le=1e6)


class LoggingSection(Section, affects="display"):
    """Where records are written."""

    log_dir: str = key("logs", "campaigns are written below this directory", min_length=1)
    samples_per_step: int = key(
        4,
        "rollouts of a prompt per source that are kept of a step, plus best, worst and a tied one; 0 = none",
        ge=0,
        le=64,
    )
    mirror: str = key(
        "", "an address of fsspec, as s3://BUCKET/PREFIX, to which the campaign is copied while it runs"
    )
    loggers: list[str] = plugin(
        list, "loggers", "logger_params", "additional loggers: wandb, tensorboard, mlflow, trackio"
    )
    logger_params: Table = key(dict, "parameters of the loggers, one table per logger")


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
    at_start: bool | None = key(None, "also evaluate before the first step; default: training.eval_at_start")
    prompts: int = count(256, "maximum number of its held-out prompts")
    samples: int = count(1, "completions per prompt")
    max_tokens: int | None = count(None, "upper bound on a completion's tokens; default: training.max_tokens")
    temperature: float = key(0.0, "sampling temperature; 0 takes the likeliest token", ge=0, le=10)


class EvalsSection(Section):
    """Evaluations that are not the reward."""

    tables: list[EvalSection] = key(list, "one per `[[eval]]`")


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


class ConditionSection(Section):
    """One way to train: a name and what differs from the rest of the file."""

    name: str = key("", "label in tables and charts; default: its two modes", max_length=200)
    advantage_mode: str | None = key(None, "same as in [algorithm]", stands_for="algorithm.advantage_mode")
    transform_mode: str | None = key(None, "same as in [algorithm]", stands_for="algorithm.transform_mode")
    model: Table = key(dict, "overrides of [model]")
    training: Table = key(dict, "overrides of [training]")
    algorithm: Table = key(dict, "overrides of [algorithm]")
    teacher: Table = key(dict, "overrides of [teacher]")
    data: Table = key(dict, "overrides of [data]")
    reward: Table = key(dict, "overrides of [reward]")
    environment: Table = key(dict, "overrides of [environment]")
    backend: Table = key(dict, "overrides of [backend]")
    warmup: Table = key(dict, "overrides of [warmup]")
    backpressure: Table = key(dict, "overrides of [backpressure]")
    throttle: Table = key(dict, "overrides of [throttle]")
    rate_limiter: Table = key(dict, "overrides of [rate_limiter]")
    scaling: Table = key(dict, "overrides of [scaling]")


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
    notify: list[str] = key(
        list, "a command that gets each alert as JSON on its standard input; see Watching", affects="display"
    )
    notify_url: str = key("", "an address to which each alert is posted as JSON", affects="display")
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


class DecisionSection(Section, affects="schedule"):
    """Add seeds until it is known which conditions differ from a reference."""

    metric: str = key("eval_reward", "metric that decides, as `retrain compare` computes it")
    reference: str = key("", "condition that the others are compared with; default: the first")
    error: float = key(0.05, "probability of a false verdict, over all conditions and looks", ge=1e-9, lt=1)
    smallest_difference: float | None = key(
        None, "smaller differences do not matter, in the metric's unit; default: any matters", gt=0
    )
    max_seeds: int = key(12, "most seeds of a condition", ge=3, le=100)
    max_questions: int | None = key(
        None,
        "most questions that the `[[eval]]` of the metric asks at a run's end: more than its `prompts` where "
        "these are most of the noise after the first six seeds; default: its `prompts`",
        ge=2,
    )
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
    over: Over = key(
        "last",
        "part of a run whose mean is compared: [from, to], both included; whole; last: its last tenth of "
        "steps, at least ten",
        needs='two numbers in a list, "whole" or "last"',
    )
    per: Literal["steps", "tokens", "rollouts", "seconds", "usd"] = key(
        "steps", "what `over` counts: steps, or what a run has spent, so that it is compared at equal cost"
    )
    rungs: list[float] = key(
        list,
        "where conditions are looked at, ascending, in the unit of `per`: one that differs goes no further, "
        "others do once a rung is unlikely to show more; runs end at the last",
    )
    finish: Finish = key(
        False,
        "run all max_steps, also where the window ends before them: true, all runs; reference and winner: "
        "these, once there are verdicts",
        needs='true, false or "reference and winner"',
    )


class BudgetSection(Section, affects="schedule"):
    """What a campaign may cost, and the prices of tokens."""

    usd: float | None = key(
        None, "dollars; the campaign saves its runs and stops before it costs more", gt=0, le=1e9
    )
    prices: Table = key(
        dict, "dollars per million tokens, one table per model: prefill, cached, sample, train"
    )


class RunSection(Section, affects="display"):
    """Which run of which campaign this is; written by retrain into run.toml, never by hand."""

    run_id: str = key("", "name of the run's directory")
    campaign: str = key("", "id of the campaign")
    condition: str = key("", "name of the condition")
    config_hash: str = key("", "digest of everything that decides the result")
    files: Table = key(dict, "fingerprints of the files that decide the result, by key")
    origin: Table = key(dict, "contents of origin.json, from which it can be restored")
    version: int = key(CURRENT, "version of the keys' meanings", ge=1)
    ends_at: float = key(0.0, "amount at which it ends before max_steps; 0: it does not", affects="result")
    ends_per: str = key("steps", "what `ends_at` counts, as decision.per", affects="result")


class Config(Section):
    """A whole TOML file."""

    model: ModelSection = key(ModelSection, "which model is trained")
    training: TrainingSection = key(TrainingSection, "the training loop")
    algorithm: AlgorithmSection = key(AlgorithmSection, "how rewards become gradients")
    teacher: TeacherSection = key(TeacherSection, "a model to learn from")
    data: DataSection = key(DataSection, "where prompts come from")
    reward: RewardSection = key(RewardSection, "how completions are scored")
    environment: EnvironmentSection = key(EnvironmentSection, "what the policy talks to")
    backend: BackendSection = key(BackendSection, "where the policy lives")
    eval: EvalsSection = key(EvalsSection, "evaluations that are not the reward, each a table [[eval]]")
    campaign: CampaignSection | None = key(None, "conditions x seeds; absent: the file describes one run")
    decision: DecisionSection | None = key(
        None, "add seeds until differences are known; absent: run those given"
    )
    budget: BudgetSection = key(BudgetSection, "what it may cost, and the prices of tokens")
    warmup: WarmUpSection = key(WarmUpSection, "supervised training on given completions first")
    backpressure: BackPressureSection = key(BackPressureSection, "find the best batch size")
    throttle: ThrottleSection = key(ThrottleSection, "yield to the other load on this machine")
    rate_limiter: RateLimiterSection = key(RateLimiterSection, "sample while training")
    scaling: ScalingSection = key(ScalingSection, "scale the learning rate to the batch size")
    logging: LoggingSection = key(LoggingSection, "where records are written")
    run: RunSection | None = key(None, "written by retrain into run.toml")

    def evaluates_at_start(self, table: EvalSection | None = None) -> bool:
        """Whether the run's own evaluation, or an `[[eval]]`, is also made before the first step."""
        at_start = table.at_start if table else None
        return self.training.eval_at_start if at_start is None else at_start

    @property
    def last_step(self) -> int:
        """After how many steps a run ends at the latest."""
        is_earlier = self.run is not None and self.run.ends_at and self.run.ends_per == "steps"
        return (
            min(self.training.max_steps, int(self.run.ends_at))
            if self.run and is_earlier
            else self.training.max_steps
        )
