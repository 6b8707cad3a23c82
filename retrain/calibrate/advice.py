"""From what was measured to values, each with its reason. Pure: facts in, advice out.

A value that changes what is learned (batch size) is only advised, never written, unless the file
lets back pressure change it anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from retrain.calibrate.facts import OUT_OF_MEMORY, BatchFound, Lengths, StepSplit, WorkersMeasured
from retrain.calibrate.trials import POINTS_FOR_A_LAW
from retrain.config.schema import RateLimiter
from retrain.controllers.usl import UslFit, fit_usl
from retrain.plan.durations import about, format_duration
from retrain.plan.matrix import Plan

MOST_HITS = 0.02  # of completions cut off: more, and rewards are lost to the limit
ROOM = 1.25  # above the longest completion seen
ROUND_TO = 64  # tokens; smaller limits are rounded to a power of two
NEARLY = 0.95  # of the best makespan's speed is good enough for fewer workers
SAME = 1.01  # times a makespan: within the estimate's own error
TOGETHER = 1.25  # times as long as alone: that is no longer noise
ABOVE = 1.1  # times the best concurrency: p* is known no better
MEMORY_SHARE = 0.8  # of free memory, for workers
LONG_WAIT = 0.1  # of a step spent waiting for permits


@dataclass(frozen=True)
class Advice:
    """One key: what it is, what it should be, why."""

    key: str  # section.key
    now: object
    value: object  # equal to `now` if it should stay
    why: str
    is_written: bool = True  # to the calibrated file
    longer: float = 0.0  # fraction that it adds to a step's time at most

    @property
    def is_change(self) -> bool:
        """Whether it differs."""
        return self.value != self.now


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    worker: int  # the heaviest seen; 0 if none was
    free: int
    worker_on_gpus: int = 0  # the heaviest seen, with what PyTorch keeps for later; 0 if none was
    free_on_gpus: int = 0


def worst_of(found: Sequence[Lengths]) -> Lengths:
    """Return the condition with most cause for more tokens, with the longest completion of any."""
    worst = max(found, key=lambda one: (not _why_no_more(one), one.hit_fraction, one.longest))
    return replace(worst, longest=max(one.longest for one in found), p95=max(one.p95 for one in found))


def max_tokens(key: str, found: Lengths, split: Sequence[StepSplit]) -> Advice:
    """Raise what cuts completions off that more room may help; lower what none comes near."""
    now = found.allowed
    if found.hit_fraction > MOST_HITS:
        if against := _why_no_more(found):
            return Advice(key, now, now, f"{found.hit_fraction:.1%} of completions reached it, but {against}")
        value = 2 * now
        extra = found.hit_fraction * now / max(found.median, 1.0)
        sampling = sum(s.sampling_s for s in split) / max(sum(s.mean_s for s in split), 1e-9)
        longer = extra * min(sampling, 1.0)
        why = (
            f"{found.hit_fraction:.1%} of the completions of {found.condition} reached {now}; sampling "
            f"costs up to {extra:.0%} more tokens, a step up to {longer:.0%} more time"
        )
        return Advice(key, now, value, why, longer=longer)
    if not found.hit_fraction and found.longest * ROOM < now / 2:
        value = _rounded(found.longest * ROOM)
        why = (
            f"the longest of all completions had {found.longest} tokens (95 % at most {found.p95:.0f}); "
            "bounds memory and the worst step; if completions grow, max_token_hit_rate will say so"
        )
        return Advice(key, now, value, why)
    why = (
        f"{found.hit_fraction:.1%} of completions reached it; "
        f"median length {found.median:.0f}, longest {found.longest}"
    )
    return Advice(key, now, now, why)


def _why_no_more(found: Lengths) -> str:
    """Return what speaks against more tokens for completions that are cut off; "" if nothing does."""
    if 0 < found.enough <= found.allowed:
        return f"no answer takes more than {found.enough}: the policy has yet to learn where to end"
    if not found.has_signal:
        return "no completion got a reward: whether more room would help is unknown; see `retrain samples`"
    if found.late_hit_fraction <= MOST_HITS:
        return f"only {found.late_hit_fraction:.1%} in the last third of the steps: it learns to end"
    return ""


def _rounded(tokens: float) -> int:
    if tokens >= ROUND_TO:
        return math.ceil(tokens / ROUND_TO) * ROUND_TO
    return 1 << math.ceil(math.log2(max(tokens, 1.0)))


def scaling_of(measured: Sequence[WorkersMeasured]) -> UslFit | None:
    """Fit the Universal Scalability Law across workers; None with too few numbers of them."""
    if len(measured) < POINTS_FOR_A_LAW:
        return None
    points = [float(m.workers) for m in measured], [m.tokens_per_second for m in measured]
    return fit_usl(*points, method="nls")


def max_workers(
    plan: Plan,
    measured: Sequence[WorkersMeasured],
    fit: UslFit | None,
    memory: Memory,
    makespans_s: Mapping[int, float],
) -> Iterator[Advice]:
    """Return the fewest that end the campaign about as early as any, and no later than now.

    Args:
        plan: the campaign.
        measured: what so many did side by side, fewest first.
        fit: the law across workers.
        memory: of a worker, and free.
        makespans_s: what the whole campaign would take, by workers; with those of `measured` and the plan's.
    """
    now = plan.workers
    if not measured or now not in makespans_s:
        return
    bound_s = min(min(makespans_s.values()) / NEARLY, SAME * makespans_s[now])
    value = min(count for count, seconds in makespans_s.items() if seconds <= bound_s)
    reasons = list(_reasons(measured, fit, value, now))
    if value != now:
        then, today = about(makespans_s[value]), about(makespans_s[now])
        reasons.insert(0, f"the campaign takes {then} with {value}, {today} with {now}")
    held = int(MEMORY_SHARE * memory.free / memory.worker) if memory.worker else value
    if held < value:
        value = max(1, held)
        reasons.append(f"memory holds {held} of {memory.worker / 1e6:.0f} MB each")
    why = "; ".join(reasons)
    yield Advice("campaign.max_workers", plan.campaign.max_workers if now != value else value, value, why)
    if value > 1 and not plan.campaign.parallel:
        yield Advice("campaign.parallel", False, True, "several workers at a time pay")


def _reasons(measured: Sequence[WorkersMeasured], fit: UslFit | None, value: int, now: int) -> Iterator[str]:
    """Return what so many workers were seen to do."""
    alone = measured[0]
    chosen = min(measured, key=lambda m: abs(m.workers - value))
    if chosen.workers > 1:
        gain = chosen.tokens_per_second / alone.tokens_per_second * alone.workers
        yield f"{chosen.workers} at a time do {gain:.2g} times what one does"
    else:
        yield "one at a time"
    most = min(measured, key=lambda m: abs(m.workers - max(now, value)))
    slower = most.step_time_s / alone.step_time_s if alone.step_time_s else 1.0
    if slower > TOGETHER and most.workers > 1:
        waits = most.permit_wait_fraction > LONG_WAIT
        cause = f"{most.permit_wait_fraction:.0%} of it waiting for permits" if waits else "all together"
        more = "" if waits or value < now else ": more workers would not help"
        yield f"beside {most.workers} a step takes {slower:.2g} times as long, {cause}{more}"
    if fit is not None and fit.identified and math.isfinite(fit.p_star):
        yield f"the fitted optimum is {fit.p_star:.1f} workers"


def max_concurrent(plan: Plan, waited_fraction: float | None, is_remote: bool) -> Iterator[Advice]:
    """Let the number of permits find itself where steps wait long for one."""
    now = plan.runs[0].config.backend.max_concurrent
    if not is_remote or waited_fraction is None:
        return
    why = f"{waited_fraction:.0%} of a step was waiting for a permit"
    if waited_fraction > LONG_WAIT and now != "auto":
        why += '; "auto" raises the number until the API objects'
        yield Advice("backend.max_concurrent", now, "auto", why)
    else:
        yield Advice("backend.max_concurrent", now, now, why)


def stagger(plan: Plan, split: Sequence[StepSplit], is_remote: bool, workers: int) -> Iterator[Advice]:
    """Spread first calls over a step where an API is shared; elsewhere waiting buys nothing."""
    now = plan.campaign.stagger_seconds
    if not split:
        return
    step_s = sum(s.mean_s for s in split) / len(split)
    if is_remote and workers > 1:
        value = float(f"{step_s / workers:.2g}")
        step = format_duration(step_s)
        why = f"a step of {step} spread over {workers} workers, so that they do not call all at once"
    else:
        value, why = 0.0, "workers share no API, so a wait between launches only costs time"
    yield Advice(
        "campaign.stagger_seconds", now, value if abs(value - now) > 0.5 * now or not value else now, why
    )


def batch_size(now: int, found: BatchFound, follows: bool) -> Advice:
    """Return where throughput is best; written only if the file lets back pressure decide anyway.

    Where the law and the size that was settled on point different ways, nothing is advised.
    """
    at = f"{found.concurrency} rollouts at a time"
    value, verdict = found.batch_size, f"{at} are not too many; no optimum within reach"
    if found.p_star is not None:
        is_above = found.concurrency > ABOVE * found.p_star
        verdict = f"{at} are {'too many' if is_above else 'not too many'}: p* = {found.p_star:.0f}"
        group = found.concurrency / now
        if (found.p_star / group - now) * (value - now) < 0:
            value, verdict = now, f"{verdict}, but steps so far favour batch_size {found.batch_size}: unclear"
    elif value < now and OUT_OF_MEMORY in found.reason:
        verdict = f"{at} are too many: {found.reason}"
    elif value < now:
        value, verdict = now, f"steps so far favour batch_size {value}, but show no optimum: unclear"
    why = f"{verdict}; regimes {', '.join(found.regimes)}"
    if not follows and value != now:
        why += "; another batch learns otherwise, so it is yours to decide"
    return Advice("training.batch_size", now, value, why, is_written=follows)


def limiter_speed(limiter: RateLimiter, batch_size: int, batches_per_unit: float) -> Advice:
    """Set the pace that an unlimited run kept; a buffer that reads each sample once leaves no choice."""
    key, now = "rate_limiter.rate_limit_speed_batch_per_sim", limiter.rate_limit_speed_batch_per_sim
    why = f"an unlimited run trained {batches_per_unit:.3g} batches per production unit"
    if limiter.buffer != "reservoir":
        exact = (limiter.nb_time_steps or batch_size) / batch_size
        why += f"; {limiter.buffer} reads each sample once, so only {exact:g} (or 0, off) can last"
        return Advice(key, now, now, why)
    value = float(f"{batches_per_unit:.3g}")
    return Advice(key, now, now if abs(value - now) < 0.05 * value else value, why)
