"""Recommends values from measurements, each with its reason. Pure: facts in, advice out.

A value that changes what is learned (batch size) is only advised, never written, unless the file
lets back pressure change it anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

from retrain.backends import plugin_of
from retrain.campaign.calibrate.benchmarks import (
    OUT_OF_MEMORY,
    POINTS_FOR_A_LAW,
    BatchFound,
    Lengths,
    StepSplit,
    WorkerThroughput,
)
from retrain.config.keys import Tables
from retrain.config.schema import RateLimiterSection
from retrain.control.rules.usl import UslFit, fit_usl
from retrain.plan.matrix import Plan
from retrain.records.text import about, format_duration

MOST_HITS = 0.02  # of completions cut off: more, and rewards are lost to the limit
ROOM = 1.25  # above the longest completion seen
ROUND_TO = 64  # tokens; smaller limits are rounded to a power of two
SAME = 1.01  # times a makespan: within the error of the estimate
TOGETHER = 1.25  # times as long as alone: more than noise
ABOVE = 1.1  # times the best concurrency: p* is known no better
MEMORY_SHARE = 0.8  # of free memory, available to workers
LONG_WAIT = 0.1  # of a step spent waiting for permits
MOST_GROWTH = 8  # times the permits at once: waits say little of what an API bears


@dataclass(frozen=True)
class Advice:
    """One key: its current value, the recommended value, and why."""

    key: str  # section.key
    now: object
    value: object  # equal to `now` if it should stay
    why: str
    is_written: bool = True  # to the calibrated file
    longer: float = 0.0  # upper bound of the fraction that it adds to a step's time

    @property
    def is_change(self) -> bool:
        return self.value != self.now


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    worker: int  # the largest seen; 0 if none was
    free: int
    worker_on_gpus: int = 0  # the largest seen, PyTorch's cache included; 0 if none was
    free_on_gpus: int = 0


def worst_of(found: Sequence[Lengths]) -> Lengths:
    """Return the condition that needs more tokens most, with the longest completion of any."""
    worst = max(found, key=lambda one: (not _why_no_more(one), one.hit_fraction, one.longest))
    return replace(worst, longest=max(one.longest for one in found), p95=max(one.p95 for one in found))


def max_tokens(key: str, lengths: Lengths, split: Sequence[StepSplit]) -> Advice:
    """Raise a limit that cuts off completions, if that may help; lower a limit far above every completion."""
    limit, reached = lengths.allowed, f"{lengths.hit_fraction:.1%} of completions reached it"
    if lengths.hit_fraction > MOST_HITS:
        if against := _why_no_more(lengths):
            return Advice(key, limit, limit, f"{reached}, but {against}")
        value = 2 * limit
        extra = lengths.hit_fraction * limit / max(lengths.median, 1.0)
        sampling = sum(s.sampling_s for s in split) / max(sum(s.mean_s for s in split), 1e-9)
        longer = extra * min(sampling, 1.0)
        why = (
            f"{lengths.hit_fraction:.1%} of the completions of {lengths.condition} reached {limit}; sampling "
            f"costs up to {extra:.0%} more tokens, a step up to {longer:.0%} more time"
        )
        return Advice(key, limit, value, why, longer=longer)
    if not lengths.hit_fraction and lengths.longest * ROOM < limit / 2:
        room = max(lengths.longest * ROOM, 1.0)
        is_small = room < ROUND_TO
        value = 1 << math.ceil(math.log2(room)) if is_small else math.ceil(room / ROUND_TO) * ROUND_TO
        why = (
            f"the longest completion had {lengths.longest} tokens (95 % had at most {lengths.p95:.0f}); "
            "a lower limit bounds memory and the slowest step; max_token_hit_rate shows if completions grow"
        )
        return Advice(key, limit, value, why)
    why = f"{reached}; median length {lengths.median:.0f}, longest {lengths.longest}"
    return Advice(key, limit, limit, why)


def _why_no_more(found: Lengths) -> str:
    """Return why more tokens would not help completions that are cut off; "" if they may."""
    if found.longest < found.allowed:
        return "none had so many tokens: episodes ran out of turns or context"
    if 0 < found.enough <= found.allowed:
        return f"no answer needs more than {found.enough} tokens: the policy has not yet learned to stop"
    if not found.has_signal:
        return "no completion was rewarded, so a higher limit may not help; see `retrain samples`"
    if found.late_hit_fraction <= MOST_HITS:
        late = f"only {found.late_hit_fraction:.1%} in the last third of the steps"
        return f"{late}: the policy is learning to stop"
    return ""


def scaling_of(measured: Sequence[WorkerThroughput]) -> UslFit | None:
    """Fit the Universal Scalability Law across workers; None with too few worker counts."""
    if len(measured) < POINTS_FOR_A_LAW:
        return None
    return fit_usl([m.workers for m in measured], [m.tokens_per_second for m in measured])


def max_workers(
    plan: Plan, measured: Sequence[WorkerThroughput], memory: Memory, makespans_s: Mapping[int, float]
) -> Iterator[Advice]:
    """Return the workers with the shortest makespan, of equal ones the fewest, and what fewer would cost.

    `measured` has each number of concurrent workers, fewest first; `makespans_s` the whole campaign's, by
    number of workers: up to the most measured, and the plan's.
    """
    configured = plan.workers
    if not measured or configured not in makespans_s:
        return
    shortest_s = min(makespans_s.values())
    value = min(count for count, seconds in makespans_s.items() if seconds <= SAME * shortest_s)
    reasons, alone = ["one worker at a time"], measured[0]
    chosen = min(measured, key=lambda m: abs(m.workers - value))
    if chosen.workers > 1:
        gain = chosen.tokens_per_second / alone.tokens_per_second * alone.workers
        reasons = [f"{chosen.workers} workers have {gain:.2g} times the throughput of one"]
    most = min(measured, key=lambda m: abs(m.workers - max(configured, value)))
    slower = most.step_time_s / max(alone.step_time_s, 1e-9)
    if slower > TOGETHER and most.workers > 1:
        waits = most.permit_wait_fraction > LONG_WAIT
        cause = f", {most.permit_wait_fraction:.0%} of it waiting for permits" if waits else ""
        larger = (m.tokens_per_second for m in measured if m.workers > most.workers)
        helps = any(throughput > SAME * most.tokens_per_second for throughput in larger)
        more = "" if waits or helps or value < configured else ": more workers would not help"
        reasons.append(f"with {most.workers} workers a step takes {slower:.2g} times as long{cause}{more}")
    fit = scaling_of(measured)
    if fit is not None and fit.identified and math.isfinite(fit.p_star):
        reasons.append(f"the fitted optimum is {fit.p_star:.1f} workers")
    if value != configured:
        then, today = about(makespans_s[value]), about(makespans_s[configured])
        reasons.insert(0, f"the campaign takes {then} with {value}, {today} with {configured}")
    fewer = max((count for count in makespans_s if count < value), default=configured)
    if fewer != configured:  # whose time is told above
        longer = makespans_s[fewer] / makespans_s[value] - 1
        reasons.append(f"with {fewer} it would take {about(makespans_s[fewer])}, {longer:.0%} longer")
    held = int(MEMORY_SHARE * memory.free / memory.worker) if memory.worker else value
    if held < value:
        value = max(1, held)
        reasons.append(f"free memory fits {held} workers of {memory.worker / 1e6:.0f} MB each")
    current = plan.campaign.max_workers if configured != value else value
    yield Advice("campaign.max_workers", current, value, "; ".join(reasons))
    if value > 1 and not plan.campaign.parallel:
        yield Advice("campaign.parallel", False, True, "concurrent workers end the campaign earlier")


def max_concurrent(
    plan: Plan, waited_fraction: float | None, is_remote: bool, is_unreported: bool = False
) -> Iterator[Advice]:
    """Recommend more permits where steps wait long for one: adaptive ones if the backend reports calls.

    `is_unreported`: runs with "auto" have shown that it reports none, whatever its file declares.
    """
    backend = plan.runs[0].config.backend
    if not is_remote or waited_fraction is None:
        return
    configured, permits = backend.max_concurrent, backend.first_permits
    reports = not is_unreported and plugin_of(backend.backend).reports_calls(backend.options)
    value, why = configured, f"{waited_fraction:.0%} of a step was waiting for a permit"
    if waited_fraction > LONG_WAIT and reports and not backend.adapts_permits:
        value, why = "auto", f'{why}; "auto" raises the limit until the API refuses calls'
    elif waited_fraction > LONG_WAIT and not reports:
        value = math.ceil(permits / max(1 - waited_fraction, 1 / MOST_GROWTH))
        why = f"{why}; the API must take so many calls: the backend reports none, so nothing adapts to it"
    elif backend.adapts_permits and not reports:
        value, why = permits, f'{why}; "auto" stays at this number, as the backend reports no calls'
    yield Advice("backend.max_concurrent", configured, value, why)


def stagger(plan: Plan, split: Sequence[StepSplit], is_remote: bool, workers: int) -> Iterator[Advice]:
    """Spread first calls over a step where workers share an API; otherwise do not stagger launches."""
    configured = plan.campaign.stagger_seconds
    if not split:
        return
    step_s = sum(s.mean_s for s in split) / len(split)
    value, why = 0.0, "workers share no API, so staggered launches only cost time"
    if is_remote and workers > 1:
        value, step = float(f"{step_s / workers:.2g}"), format_duration(step_s)
        why = f"first calls of {workers} workers are spread over one step of {step}, so they do not coincide"
        value = value if abs(value - configured) > 0.5 * configured else configured
    yield Advice("campaign.stagger_seconds", configured, value, why)


def batch_size(now: int, found: BatchFound, follows: bool) -> Advice:
    """Return the batch size with the best throughput; written only if back pressure decides it anyway.

    Where the fitted law and the size that back pressure chose disagree, the current size is kept.
    """
    at = f"{found.concurrency} concurrent rollouts"
    value, verdict = found.batch_size, f"{at} are not too many; no optimum in range"
    if found.p_star is not None:
        is_above = found.concurrency > ABOVE * found.p_star
        verdict = f"{at} are {'too many' if is_above else 'not too many'}: p* = {found.p_star:.0f}"
        group = found.concurrency / now
        if (found.p_star / group - now) * (value - now) < 0:
            verdict += f", but steps so far favor batch_size {found.batch_size}: inconclusive"
            value = now
    elif value < now and OUT_OF_MEMORY in found.reason:
        verdict = f"{at} are too many: {found.reason}"
    elif value < now:
        value, verdict = now, f"steps so far favor batch_size {value}, but show no optimum: inconclusive"
    why = f"{verdict}; regimes {', '.join(found.regimes)}"
    if not follows and value != now:
        why += "; batch size changes what is learned, so the choice is yours"
    return Advice("training.batch_size", now, value, why, is_written=follows)


def limiter_speed(limiter: RateLimiterSection, batch_size: int, batches_per_unit: float) -> Advice:
    """Return the pace that an unlimited run kept; a buffer that reads each sample once allows no other."""
    key, now = "rate_limiter.rate_limit_speed_batch_per_sim", limiter.rate_limit_speed_batch_per_sim
    why = f"an unlimited run trained {batches_per_unit:.3g} batches per production unit"
    value = float(f"{batches_per_unit:.3g}")
    if limiter.buffer != "reservoir":
        exact = (limiter.nb_time_steps or batch_size) / batch_size
        why += f"; {limiter.buffer} reads each sample once, so only {exact:g} (or 0, off) is sustainable"
        value = now
    return Advice(key, now, now if abs(value - now) < 0.05 * value else value, why)


def calibrated(tables: Tables, advice: Sequence[Advice]) -> Tables:
    """Return the tables with the advised values; comments of the original are lost."""
    changed = deepcopy(dict(tables))
    for change in changes_of(advice):
        section, _, key = change.key.partition(".")
        changed.setdefault(section, {})[key] = change.value
    return changed


def changes_of(advice: Sequence[Advice]) -> list[Advice]:
    """Return what is written to the calibrated file."""
    return [one for one in advice if one.is_change and one.is_written]
