"""The keys of a TOML file: one dataclass per table, each key with its type, bounds and meaning.

The descriptions are what `retrain schema` shows and what editors complete from. pydantic checks
files against these classes (`retrain.config.drafts`); a worker, whose run.toml was checked before it
was written, builds them without importing pydantic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from retrain.config.campaign import (
    COLDEST,
    LARGEST_SEED,
    BudgetSection,
    CampaignSection,
    DecisionSection,
    EvalsSection,
    RunSection,
)
from retrain.config.keys import LARGEST_PERMITS, Normalization, Permits, Section, Table, count, key, plugin

SINGLE_TURN = "single_turn"  # the environment that is none
FIRST_PERMITS = 4  # initial number when it is adaptive: most APIs can take it


@dataclass(frozen=True)
class ModelSection(Section):
    """Which model is trained, and where it is served."""

    model: str = key("", "Hugging Face hub ID or local path; not used by the numpy backend", path="file")
    lora_rank: int = key(32, "rank of the LoRA adapters", ge=1, le=4096)
    base_url: str = key("", "address of a training API (tinker)")
    adapter: str = key("", "start from a finished run, a peft adapter or a tinker:// state", path="adapter")


@dataclass(frozen=True)
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
    max_unscored: float = key(
        0.5,
        "a run ends, to be tried again, once the scorer fails or times out for more than this share of the "
        "completions in ten steps in a row; 1 = never",
        ge=0,
        le=1,
        affects="time",
    )


@dataclass(frozen=True)
class AlgorithmSection(Section):
    """How rewards become gradients."""

    advantage_mode: str = plugin("maxrl", "advantages", "advantage_params", "grpo, rloo, maxrl, reinforce_pp")
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


@dataclass(frozen=True)
class DataSection(Section):
    """Where prompts come from."""

    task: str = plugin("sort", "tasks", "options", "where prompts come from")
    options: Table = key(dict, "options of the task plugin")
    seed: int = key(0, "seed of prompts and held-out split, the same for every run", ge=0, le=LARGEST_SEED)
    eval_prompts: int = count(256, "maximum number of held-out prompts to evaluate")
    eval_samples: int = count(1, "answers per held-out prompt for pass@k, besides the greedy one; 1 = none")


@dataclass(frozen=True)
class RewardSection(Section):
    """How completions are scored."""

    reward: str = plugin("match", "rewards", "params", "how a completion is scored")
    params: Table = key(dict, "parameters of the reward plugin")
    sandbox: str = plugin("auto", "sandbox", "sandbox_options", "where programs run that a policy wrote")
    sandbox_options: Table = key(dict, "options of the sandbox plugin")


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class WarmUpSection(Section):
    """Supervised training on given completions, before reinforcement learning begins."""

    steps: int = count(0, "supervised optimizer updates before the first step; 0 = none", least=0)
    path: str = key("", "JSONL file; each row has prompt and completion, or messages", path="file")
    batch_size: int = count(8, "rows per update")
    lr: float | None = key(None, "learning rate of these updates; default: training.lr", gt=0, le=10)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class ScalingSection(Section):
    """Scale the learning rate to the actual batch size."""

    rule: Literal["none", "adascale", "adamscale", "legw", "linear", "sqrt"] = key(
        "none", "how the learning rate follows the batch"
    )
    smoothing: float = key(0.999, "smoothing of the gradient noise scale, per initial batch", gt=0, lt=1)
    base_warmup_epochs: float = key(0.0, "legw: epochs of warm-up at the initial batch", ge=0, le=1e6)


@dataclass(frozen=True)
class LoggingSection(Section, affects="display"):
    """Where records are written."""

    log_dir: str = key("logs", "campaigns are written below this directory", min_length=1)
    samples_per_step: int = key(
        4,
        "rollouts of one prompt kept per step, plus the best, the worst and a tied one; 0 = none",
        ge=0,
        le=64,
    )
    loggers: list[str] = plugin(
        list, "loggers", "logger_params", "additional loggers: wandb, tensorboard, mlflow"
    )
    logger_params: Table = key(dict, "parameters of the loggers, one table per logger")


@dataclass(frozen=True)
class Config(Section):
    """A whole TOML file."""

    model: ModelSection = key(ModelSection, "which model is trained")
    training: TrainingSection = key(TrainingSection, "the training loop")
    algorithm: AlgorithmSection = key(AlgorithmSection, "how rewards become gradients")
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
