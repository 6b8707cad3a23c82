"""A row of metrics.jsonl: every field with its unit, its meaning and the module that writes it.

Each contributor to a row returns one of the dataclasses below, and a `StepRow` holds them. Rows are read as
mappings (`read_metrics`): other versions write other keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from retrain.records.row_parts import (
    ApiPause,
    CostSummary,
    EngineUse,
    Evaluation,
    EvalWatch,
    NamedEvaluation,
    PermitUse,
    Value,
    columns,
    measured,
    row_part,
)


@row_part
class Identity:
    """Which step of which run."""

    step: int = measured("", "number of the step, from 1")
    run: str = measured("", "the run's id, `<condition>_s<seed>`")
    condition: str = measured("", "its condition; empty outside a campaign")
    seed: int = measured("", "its seed; -1 is none")
    attempt: int = measured("", "number of the attempt that took this step, from 1")
    timestamp: str = measured("", "when the step ended, UTC")


@row_part
class Timing:
    """How long the step and its parts took. Evaluation and checkpoints are not part of it."""

    step_time_s: float = measured("s", "the whole step")
    sample_time_s: float = measured("s", "sampling, or waiting for samples where `[rate_limiter]` is on")
    reward_time_s: float = measured("s", "scoring completions")
    train_time_s: float = measured("s", "advantages, transform and the optimizer's update")


@row_part
class RolloutSummary:
    """The rollouts of the step and their rewards."""

    batch_size: int = measured("prompts", "prompts of the step")
    group_size: int = measured("rollouts", "rollouts per prompt")
    mean_reward: float = measured("reward", "mean reward of scored rollouts")
    reward_std: float = measured("reward", "their standard deviation")
    correct_rate: float = measured("fraction", "share of scored rollouts with a reward of 1")
    zero_signal_group_fraction: float = measured("fraction", "share of groups whose advantages are all 0")
    max_token_hit_rate: float = measured(
        "fraction", "share of completions cut off at `max_tokens`, or of episodes that a limit ended"
    )
    length_p50: float = measured("tokens", "median length of completions")
    length_p95: float = measured("tokens", "their 95th percentile")
    length_max: int = measured("tokens", "the longest one")
    tokens_per_step: int = measured("tokens", "sampled tokens, informative or not")
    tokens_per_second: float = measured("tokens/s", "sampled tokens over `step_time_s`")
    reward_error_fraction: float = measured("fraction", "share of rollouts whose scoring failed")
    reward_timeout_fraction: float = measured("fraction", "share of rollouts whose scoring took too long")
    reward_faults: int = measured("rollouts", "whose program broke a rule of the sandbox")
    reward_over_limits: int = measured("rollouts", "whose program ran into a limit of memory or files")
    sandbox: str | None = measured("", "where programs of the policy ran, if any did", is_optional=True)


@row_part
class Unscored:
    """The completions of the run so far that have no score."""

    PREFIX: ClassVar[str] = "unscored_"
    fraction: float = measured("fraction", "their share of all completions sampled for training so far")
    outage_fraction: float = measured(
        "fraction", "share whose scorer failed or timed out; the others cannot be judged"
    )
    reason: str = measured("", "why the first of them has none")


@row_part
class EpisodeSummary:
    """The episodes of the step."""

    turns_mean: float = measured("turns", "mean number of turns that the environment answered")
    observation_tokens: int = measured("tokens", "what environments said, in all; not trained on")
    episode_errors: int = measured("episodes", "ended by a failure of their environment")
    episode_retries: int = measured("", "how often one was played again because its process had ended")
    separate_samples: int = measured("samples", "conversations that continue no other of their episode")
    tool_calls: int = measured("calls", "of functions, by all episodes")
    tool_errors: int = measured("calls", "that failed: wrong ones, exceptions, too slow ones")
    cut_turns: int = measured("turns", "that were cut at `max_turn_tokens`; not in `max_token_hit_rate`")
    episode_time_s: float = measured("s", "mean time of an episode, sampling included")
    environment_time_s: float = measured("s", "part of it in which the environment was waited for")
    environment_wait_s: float = measured(
        "s", "sampling stood still: every episode waited for its environment"
    )
    runaway: str | None = measured(
        "",
        "what computed on after its time was over, so that processes play the episodes",
        is_optional=True,
        default=None,
    )


@row_part
class UpdateSummary:
    """The optimizer's updates; zeros in a step without a gradient.

    With several updates, `loss` and `grad_norm` are their means, and the others means over the tokens of all.
    Each is measured before its update is taken.
    """

    updates: int = measured("", "optimizer updates of the step; see `updates_per_batch` and `minibatches`")
    loss: float = measured("", "normalised loss, see `loss_normalization`")
    lr: float = measured("", "learning rate used, all factors included")
    grad_norm: float = measured("", "norm of the gradient before clipping")
    clip_fraction: float = measured("fraction", "share of tokens whose gradient the loss clipped")
    approx_kl: float | None = measured(
        "nats/token", "distance of the policy from the sampler's, estimated from its tokens"
    )
    entropy: float | None = measured(
        "nats/token", "mean of the sampler, else of the updated policy; null without both"
    )
    update_entropy: float | None = measured(
        "nats/token", "mean of the policy as it is updated; with several updates", is_optional=True
    )
    reference_kl: float | None = measured(
        "nats/token", "distance from the policy before training; with `kl_coef`", is_optional=True
    )


@row_part
class Mismatch:
    """The policy's log-probabilities of the sampled tokens, before the first update, beside the sampler's.

    They differ where sampler and trainer compute differently, and where samples are stale.
    """

    PREFIX: ClassVar[str] = "mismatch_"
    kl: float = measured("nats/token", "distance, estimated as `approx_kl`")
    mean: float = measured("nats", "mean absolute difference")
    max: float = measured("nats", "the largest one")


@row_part
class ControlSummary:
    """How the controllers changed the configured step size, and what they noticed."""

    lr_factor: float = measured("", "factor on `lr` from schedule and scaling rule")
    prompts_at_a_time: int = measured("prompts", "prompts sampled and trained on at a time")
    out_of_memory_at: int | None = measured("prompts", "smallest size that did not fit in memory, if any")
    mismatch_rise: str | None = measured(
        "", "last steady rise of `mismatch_kl`, once there was one", is_optional=True, default=None
    )
    no_signal: str | None = measured(
        "", "how long no group has had a signal, and why; from 10 steps on", is_optional=True, default=None
    )
    first_steps: str | None = measured(
        "",
        "digest of the results of the first 10 steps from the first update on, once they are taken; runs in "
        "which it is the same did the same, to the last digit",
        is_optional=True,
        default=None,
    )


Action: TypeAlias = Literal["hold", "throttle", "increase"]
Regime: TypeAlias = Literal["warmup", "retrograde", "memory_bound", "compute_bound", "optimal"]


@row_part
class BackPressureDecision:
    """The back-pressure controller's decision after the step."""

    PREFIX: ClassVar[str] = "bp_"
    action: Action = measured("", "`hold`, `throttle` or `increase`")
    regime: Regime = measured("", "`warmup`, `retrograde`, `memory_bound`, `compute_bound` or `optimal`")
    batch_size: int = measured("prompts", "size of the next step; with micro-batches, prompts at a time")
    p_star: float | None = measured(
        "rollouts",
        "concurrency of the fitted peak; null if there is none or it is not determined",
        may_be_infinite=True,
    )
    sigma: float | None = measured("", "fitted contention; null while the curve is not determined")
    kappa: float | None = measured("", "fitted crosstalk; likewise; 0: no peak")
    utilization: float | None = measured(
        "fraction", "expected throughput over that of the best size allowed; null until three sizes are known"
    )
    throughput: float = measured("tokens/s", "moving average over steps with an update")
    reason: str = measured("", "why, in a few words")


@row_part
class ThrottleSummary:
    """The load of the machine before the step, and what it allowed."""

    PREFIX: ClassVar[str] = "throttle_"
    level: str = measured("", "`full`, `reduced`, `minimal` or `paused`")
    load: float | None = measured("fraction", "load of the machine, of its busiest resource")
    batch_multiplier: float = measured("", "factor on the batch")
    reason: str = measured("", "why, in a few words")


@row_part
class ScalingDecision:
    """The learning-rate rule's decision for the step."""

    PREFIX: ClassVar[str] = "scaling_"
    lr_factor: float  # the row has its product with the schedule's
    scale: float = measured("", "batch of the step over the configured one, in prompts")
    effective_scale: float = measured("", "the same, in groups that had a gradient")
    gain: float = measured("", "steps at the configured batch that this step is worth")
    progress: float = measured("steps", "sum of the gains of all steps before")
    noise_scale: float = measured(
        "prompts", "where gradient noise equals signal; null if unknown", may_be_infinite=True
    )
    reason: str = measured("", "why, in a few words")


@row_part
class RooflineSummary:
    """What limits each phase (`prefill`, `decode`, `train`) on this hardware."""

    bounds: Mapping[str, str] = measured(
        "", "`compute_bound`, `memory_bound`, `overhead_bound` or `unknown`", key="roofline_PHASE"
    )
    mfu: Mapping[str, float | None] = measured("fraction", "share of peak arithmetic used", key="mfu_PHASE")
    mbu: Mapping[str, float | None] = measured("fraction", "share of memory bandwidth used", key="mbu_PHASE")


@row_part
class PipelineStats:
    """Asynchronous sampling so far: counts of the whole run, waits and idle fractions of this attempt."""

    PREFIX: ClassVar[str] = "rate_"
    ratio: float | None = measured("", "realised samples per batch over the target; null without a pace")
    producer_wait_s: float = measured("s", "producers waiting for room, pace or fresher weights; summed")
    consumer_wait_s: float = measured("s", "training waiting for samples")
    producer_idle_fraction: float = measured("fraction", "share of the producers' time spent waiting")
    consumer_idle_fraction: float = measured("fraction", "share of training's time spent waiting")
    sample_age_mean: float = measured("updates", "mean age of the latest batch in policy versions")
    sample_age_max: int = measured("updates", "greatest age in it")
    dropped: int = measured("samples", "dropped because they were too old")
    lost: int = measured("samples", "under way when a process ended; sampled again")
    outstanding: int = measured("samples", "in the buffer unseen, or on their way")
    produced: int = measured("samples", "produced")
    units: int = measured("units", "production units")
    batches: int = measured("batches", "batches trained on")
    batches_per_unit: float | None = measured("", "batches over units; the pace an unlimited run settles at")
    prompts_at_a_time: int | None = measured(
        "prompts", "prompts sampled at a time", is_optional=True, default=None
    )


def _by(writer: str, when: str = "always") -> dict[str, str]:
    return {"by": writer, "when": when}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Everything recorded for one step; a part that is off is None."""

    identity: Identity = field(metadata=_by("trainer/loop.py"))
    timing: Timing = field(metadata=_by("trainer/step_meter.py"))
    permits: PermitUse = field(metadata=_by("trainer/permits.py"))
    cost: CostSummary | None = field(
        metadata=_by("trainer/budget.py", "where the API bills tokens, or they have a price")
    )
    api: ApiPause | None = field(
        metadata=_by("trainer/step_meter.py", "where the API says why it waits (`tinker`)"), default=None
    )
    rollouts: RolloutSummary = field(metadata=_by("trainer/batch.py"))
    unscored: Unscored | None = field(
        metadata=_by("trainer/scoring.py", "once a completion has no score"), default=None
    )
    episodes: EpisodeSummary | None = field(metadata=_by("trainer/episodes.py", "with `[environment]`"))
    update: UpdateSummary = field(metadata=_by("trainer/updates.py"))
    mismatch: Mismatch | None = field(
        metadata=_by("backends/objective.py", "in steps with an update"), default=None
    )
    control: ControlSummary = field(metadata=_by("trainer/control.py"))
    back_pressure: BackPressureDecision | None = field(
        metadata=_by("control/rules/backpressure/__init__.py", "with `[backpressure]`")
    )
    throttle: ThrottleSummary | None = field(metadata=_by("trainer/control.py", "with `[throttle]`"))
    scaling: ScalingDecision | None = field(
        metadata=_by("control/rules/scaling/rules.py", "with `[scaling]` or goodput")
    )
    roofline: RooflineSummary | None = field(
        metadata=_by("trainer/step_meter.py", "with `peak_gflops` or `peak_bw_gb_s`")
    )
    engine: EngineUse | None = field(
        metadata=_by("backends/engines/metrics.py", "where a server samples that has metrics")
    )
    pipeline: PipelineStats | None = field(metadata=_by("trainer/source.py", "with `[rate_limiter]`"))
    evaluation: Evaluation | None = field(
        metadata=_by("trainer/evaluation.py", "every `eval_every` steps"), default=None
    )
    evals: Mapping[str, NamedEvaluation] = field(
        metadata=_by("trainer/eval_schedule.py", "with `[[eval]]`"), default_factory=dict
    )
    eval_watch: EvalWatch | None = field(
        metadata=_by("trainer/eval_schedule.py", "with `[[eval]]`"), default=None
    )

    def columns(self) -> dict[str, Value]:
        parts = (getattr(self, part.name) for part in dataclasses.fields(self))
        return {key: value for part in parts for key, value in columns(part).items()}
