"""A row of metrics.jsonl: every field with its unit, its meaning and the module that writes it.

Each contributor to a row returns one of the dataclasses below, and a `StepRow` holds them. Rows are read as
mappings (`read_metrics`): other versions write other keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from retrain.records.row_parts import (
    ApiPause,
    CostSummary,
    EngineUse,
    Evaluation,
    EvalWatch,
    NamedEvaluation,
    PermitUse,
    Value,
    column,
    columns,
    row_part,
)


@row_part("trainer/loop.py")
class Identity:
    """Which step of which run."""

    step: int = column("", "number of the step, from 1")
    run: str = column("", "the run's id, `<condition>_s<seed>`")
    condition: str = column("", "its condition; empty outside a campaign")
    seed: int = column("", "its seed; -1 is none")
    attempt: int = column("", "number of the attempt that took this step, from 1")
    timestamp: str = column("", "when the step ended, UTC")


@row_part("trainer/step_meter.py")
class Timing:
    """How long the step and its parts took. Evaluation and checkpoints are not part of it."""

    step_time_s: float = column("s", "the whole step")
    sample_time_s: float = column("s", "sampling, or waiting for samples where `[rate_limiter]` is on")
    reward_time_s: float = column("s", "scoring completions")
    train_time_s: float = column("s", "advantages, transform and the optimizer's update")


@row_part("trainer/batch.py")
class RolloutSummary:
    """The rollouts of the step and their rewards."""

    batch_size: int = column("prompts", "prompts of the step")
    group_size: int = column("rollouts", "rollouts per prompt")
    mean_reward: float | None = column("reward", "mean reward of scored rollouts; null without any")
    reward_std: float | None = column("reward", "their standard deviation")
    correct_rate: float | None = column("fraction", "share of scored rollouts with a reward of 1")
    zero_signal_group_fraction: float = column("fraction", "share of groups whose advantages are all 0")
    max_token_hit_rate: float = column(
        "fraction", "share of completions cut off at `max_tokens`, or of episodes that a limit ended"
    )
    length_p50: float = column("tokens", "median length of completions")
    length_p95: float = column("tokens", "their 95th percentile")
    length_max: int = column("tokens", "the longest one")
    tokens_per_step: int = column("tokens", "sampled tokens, informative or not")
    tokens_per_second: float = column("tokens/s", "sampled tokens over `step_time_s`")
    reward_error_fraction: float = column("fraction", "share of rollouts whose scoring failed")
    reward_timeout_fraction: float = column("fraction", "share of rollouts whose scoring took too long")
    reward_faults: int = column("rollouts", "whose program broke a rule of the sandbox")
    reward_over_limits: int = column("rollouts", "whose program ran into a limit of memory or files")
    sandbox: str | None = column("", "where programs of the policy ran, if any did", is_optional=True)
    parts: Mapping[str, float | None] = column(
        "reward",
        "mean of a part of the reward, by name; null if no rollout has it",
        key="reward_PART",
        default_factory=dict,
    )
    parts_unscored: Mapping[str, float] = column(
        "fraction", "share of rollouts without it, if any", key="reward_PART_unscored", default_factory=dict
    )


@row_part("trainer/refill.py", "with `refill` of `[data]`")
class RefillSummary:
    """Groups of the step that were sampled in place of those that teach nothing.

    Rewards, lengths and tokens of the row are those of all that the step sampled.
    """

    PREFIX: ClassVar[str] = "refill_"
    sampled: int = column("groups", "sampled besides the first batch")
    kept: int = column("groups", "of them, those that were trained on")
    dropped: int = column("groups", "sampled for the step, and not trained on")


@row_part("trainer/sources.py", "with several `[[data.source]]`")
class SourceSummary:
    """What the step sampled of each source of prompts, called NAME."""

    PREFIX: ClassVar[str] = "source_"
    prompts: Mapping[str, int] = column(
        "prompts", "its prompts, those that a refill dropped included", key="source_NAME_prompts"
    )
    tokens: Mapping[str, int] = column("tokens", "sampled for them", key="source_NAME_tokens")
    mean_reward: Mapping[str, float | None] = column(
        "reward", "mean reward of its scored rollouts; null without any", key="source_NAME_mean_reward"
    )
    shown: str = column("", "each one's mean reward and share of the prompts, in words", key="sources")
    teacher_kl: Mapping[str, float] = column(
        "nats/token",
        "as `teacher_kl`, of those that were trained on and have a teacher",
        key="source_NAME_teacher_kl",
        default_factory=dict,
    )


@row_part("trainer/prompts.py", "where the curriculum predicts (`pool`)")
class CurriculumSummary:
    """How often the step's prompts were solved, beside what their curriculum expected."""

    PREFIX: ClassVar[str] = "curriculum_"
    predicted: float = column("fraction", "mean success rate that was expected of the step's prompts")
    seen: float = column("fraction", "mean success rate that was seen")
    prompts: dict[str, int] = column(
        "prompts", "of an expected rate from BIN % up to the next bin's", key="curriculum_prompts_BIN"
    )
    solved: dict[str, float] = column(
        "fraction", "success rate seen of these prompts", key="curriculum_solved_BIN"
    )


@row_part("trainer/signs.py", "once a completion has no score")
class Unscored:
    """The completions of the run so far that have no score."""

    PREFIX: ClassVar[str] = "unscored_"
    fraction: float = column(
        "fraction", "share of all completions sampled for training so far without a score"
    )
    outage_fraction: float = column(
        "fraction", "share whose scorer failed or timed out; the others cannot be judged"
    )
    reason: str = column("", "why the first of them has none")


@row_part("trainer/episodes.py", "with `[environment]`")
class EpisodeSummary:
    """The episodes of the step."""

    turns_mean: float = column("turns", "mean number of turns that the environment answered")
    observation_tokens: int = column("tokens", "what environments said, in all; not trained on")
    episode_errors: int = column("episodes", "ended by a failure of their environment")
    episode_retries: int = column("", "how often one was played again because its process had ended")
    separate_samples: int = column("samples", "conversations that continue no other of their episode")
    tool_calls: int = column("calls", "of functions, by all episodes")
    tool_errors: int = column("calls", "that failed: wrong ones, exceptions, too slow ones")
    cut_turns: int = column("turns", "that were cut at `max_turn_tokens`; not in `max_token_hit_rate`")
    episode_time_s: float = column("s", "mean time of an episode, sampling included")
    environment_time_s: float = column("s", "part of it in which the environment was waited for")
    environment_wait_s: float = column("s", "sampling stood still: every episode waited for its environment")
    runaway: str | None = column(
        "",
        "what computed on after its time was over, so that processes play the episodes",
        is_optional=True,
        default=None,
    )


@row_part("trainer/updates.py")
class UpdateSummary:
    """The optimizer's updates; zeros in a step without a gradient.

    With several updates, `loss` and `grad_norm` are their means, and the others means over the tokens of all.
    Each is measured before its update is taken.
    """

    updates: int = column("", "optimizer updates of the step; see `updates_per_batch` and `minibatches`")
    loss: float = column("", "normalised loss, see `loss_normalization`")
    lr: float = column("", "learning rate used, all factors included")
    grad_norm: float = column("", "norm of the gradient before clipping")
    clip_fraction: float = column("fraction", "share of tokens whose gradient the loss clipped")
    approx_kl: float | None = column(
        "nats/token", "distance of the policy from the sampler's, estimated from its tokens"
    )
    entropy: float | None = column(
        "nats/token", "mean of the sampler, else of the updated policy; null without both"
    )
    update_entropy: float | None = column(
        "nats/token", "mean of the policy as it is updated; with several updates", is_optional=True
    )
    reference_kl: float | None = column(
        "nats/token", "distance from the policy before training; with `kl_coef`", is_optional=True
    )


@row_part("trainer/teachers.py", "with `[teacher]`, in steps with an update")
class TeacherSummary:
    """What the teacher makes of the tokens that the step trained on."""

    PREFIX: ClassVar[str] = "teacher_"
    kl: float = column("nats/token", "distance of the sampler from the teacher, estimated from its tokens")
    agreement: float | None = column(
        "fraction", "share of tokens where policy and teacher have the same likeliest one", default=None
    )
    outside: float = column("fraction", "share of tokens that the teacher gives a probability below 1e-4")
    weight: float = column("", "of its signal, as `weight` and `schedule` of `[teacher]` say")
    tokens: int = column("tokens", "that it read, prompts included")
    time_s: float = column("s", "in which it scored; part of `train_time_s`")


@row_part("backends/objective.py", "in steps with an update")
class Mismatch:
    """The policy's log-probabilities of the sampled tokens, before the first update, beside the sampler's.

    They differ where sampler and trainer compute differently, and where samples are stale.
    """

    PREFIX: ClassVar[str] = "mismatch_"
    kl: float = column("nats/token", "distance, estimated as `approx_kl`")
    mean: float = column("nats", "mean absolute difference")
    max: float = column("nats", "the largest one")


@row_part("trainer/control.py")
class ControlSummary:
    """How the controllers changed the configured step size, and what they noticed."""

    lr_factor: float = column("", "factor on `lr` from schedule and scaling rule")
    prompts_at_a_time: int = column("prompts", "prompts sampled and trained on at a time")
    out_of_memory_at: int | None = column("prompts", "smallest size that did not fit in memory, if any")


@row_part("trainer/signs.py")
class Signs:
    """What became notable in the steps so far."""

    mismatch_rise: str | None = column(
        "", "last steady rise of `mismatch_kl`, once there was one", is_optional=True, default=None
    )
    no_signal: str | None = column(
        "", "how long no group has had a signal, and why; from 10 steps on", is_optional=True, default=None
    )
    outside_teacher: str | None = column(
        "",
        "how much of what the policy writes its teacher never would, once that is much and does not fall",
        is_optional=True,
        default=None,
    )
    first_steps: str | None = column(
        "",
        "digest of the results of the first 10 steps from the first update on, once they are taken; runs in "
        "which it is the same did the same, to the last digit",
        is_optional=True,
        default=None,
    )


Action: TypeAlias = Literal["hold", "throttle", "increase"]
Regime: TypeAlias = Literal["warmup", "retrograde", "memory_bound", "compute_bound", "optimal"]


@row_part("control/rules/backpressure/__init__.py", "with `[backpressure]`")
class BackPressureDecision:
    """The back-pressure controller's decision after the step."""

    PREFIX: ClassVar[str] = "bp_"
    action: Action = column("", "`hold`, `throttle` or `increase`")
    regime: Regime = column("", "`warmup`, `retrograde`, `memory_bound`, `compute_bound` or `optimal`")
    batch_size: int = column("prompts", "size of the next step; with micro-batches, prompts at a time")
    p_star: float | None = column(
        "rollouts",
        "concurrency of the fitted peak; null if there is none or it is not determined",
        may_be_infinite=True,
    )
    sigma: float | None = column("", "fitted contention; null while the curve is not determined")
    kappa: float | None = column("", "fitted crosstalk; likewise; 0: no peak")
    utilization: float | None = column(
        "fraction", "expected throughput over that of the best size allowed; null until three sizes are known"
    )
    throughput: float = column("tokens/s", "moving average over steps with an update")
    reason: str = column("", "why, in a few words")


@row_part("trainer/control.py", "with `[throttle]`")
class ThrottleSummary:
    """The load of the machine before the step, and what it allowed."""

    PREFIX: ClassVar[str] = "throttle_"
    level: str = column("", "`full`, `reduced`, `minimal` or `paused`")
    load: float | None = column("fraction", "load of the machine, of its busiest resource; at most 1")
    batch_multiplier: float = column("", "factor on the batch")
    wait_s: float = column("s", "pause before the step, while the machine was saturated")
    reason: str = column("", "why, in a few words")


@row_part("control/rules/scaling.py", "with `[scaling]` or goodput")
class ScalingDecision:
    """The learning-rate rule's decision for the step."""

    PREFIX: ClassVar[str] = "scaling_"
    lr_factor: float  # the row has its product with the schedule's
    scale: float = column("", "batch of the step over the configured one, in prompts")
    effective_scale: float = column("", "the same, in groups that had a gradient")
    gain: float = column("", "steps at the configured batch that this step is worth")
    progress: float = column("steps", "sum of the gains of all steps before")
    noise_scale: float = column(
        "prompts", "where gradient noise equals signal; null if unknown", may_be_infinite=True
    )
    reason: str = column("", "why, in a few words")


@row_part("trainer/step_meter.py", "with `peak_gflops` or `peak_bw_gb_s`")
class RooflineSummary:
    """What limits each phase (`prefill`, `decode`, `train`) on this hardware."""

    bounds: Mapping[str, str] = column(
        "", "`compute_bound`, `memory_bound`, `overhead_bound` or `unknown`", key="roofline_PHASE"
    )
    mfu: Mapping[str, float | None] = column("fraction", "share of peak arithmetic used", key="mfu_PHASE")
    mbu: Mapping[str, float | None] = column("fraction", "share of memory bandwidth used", key="mbu_PHASE")


@row_part("trainer/source.py", "with `[rate_limiter]`")
class PipelineStats:
    """Asynchronous sampling so far: counts of the whole run, waits and idle fractions of this attempt."""

    PREFIX: ClassVar[str] = "rate_"
    ratio: float | None = column("", "realised samples per batch over the target; null without a pace")
    producer_wait_s: float = column("s", "producers waiting for room, pace or fresher weights; summed")
    consumer_wait_s: float = column("s", "training waiting for samples")
    producer_idle_fraction: float = column("fraction", "share of the producers' time spent waiting")
    consumer_idle_fraction: float = column("fraction", "share of training's time spent waiting")
    sample_age_mean: float = column("updates", "mean age of the latest batch in policy versions")
    sample_age_max: int = column("updates", "greatest age in it")
    dropped: int = column("samples", "dropped because they were too old")
    lost: int = column("samples", "under way when a process ended; sampled again")
    outstanding: int = column("samples", "in the buffer unseen, or on their way")
    produced: int = column("samples", "produced")
    units: int = column("units", "production units")
    batches: int = column("batches", "batches trained on")
    batches_per_unit: float | None = column("", "batches over units; the pace an unlimited run settles at")
    prompts_at_a_time: int | None = column(
        "prompts", "prompts sampled at a time", is_optional=True, default=None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Everything recorded for one step; a part that is off is None."""

    identity: Identity
    timing: Timing
    permits: PermitUse | None = None
    cost: CostSummary | None = None
    api: ApiPause | None = None
    rollouts: RolloutSummary
    refill: RefillSummary | None = None
    sources: SourceSummary | None = None
    curriculum: CurriculumSummary | None = None
    unscored: Unscored | None = None
    episodes: EpisodeSummary | None
    update: UpdateSummary
    teacher: TeacherSummary | None = None
    mismatch: Mismatch | None = None
    control: ControlSummary
    signs: Signs | None = None
    back_pressure: BackPressureDecision | None
    throttle: ThrottleSummary | None
    scaling: ScalingDecision | None
    roofline: RooflineSummary | None
    engine: EngineUse | None
    pipeline: PipelineStats | None = None
    evaluation: Evaluation | None = None
    evals: Mapping[str, NamedEvaluation] = field(default_factory=dict)
    eval_watch: EvalWatch | None = None
    others: Mapping[str, Any] = field(default_factory=dict)  # `row_part`s without a field of their own

    def columns(self) -> dict[str, Value]:
        parts = (getattr(self, part.name) for part in dataclasses.fields(self))
        return {key: value for part in parts for key, value in columns(part).items()}
