"""`retrain calibrate`: measure short real runs and recommend settings."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from typer import Option

from retrain.base.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED
from retrain.cli import AsJson, ConfigFile, Overrides, duration
from retrain.cli.explain import device_ways
from retrain.cli.render.tables import console, messages, print_result, table
from retrain.cli.run import interruptible, say_at_once
from retrain.config.keys import as_toml
from retrain.records.text import about, count_of, dollars, format_duration, gib, plain

if TYPE_CHECKING:
    from retrain.campaign.calibrate.conclude import Calibration

ENDING_BENCHMARK = "ending the benchmark; reporting what was measured"
BARS = 24  # characters of the longest


def command(
    file: ConfigFile,
    overrides: Overrides = None,
    budget: str = Option(
        "30m", "--budget", metavar="TIME", help="Time limit of all benchmarks, such as 30m or 2h."
    ),
    steps: int = Option(30, min=4, max=1000, metavar="N", help="Steps of each pilot run."),
    seeds: int = Option(1, min=1, max=16, metavar="N", help="Seeds of each condition in the pilot."),
    most_workers: int = Option(
        16, min=1, max=1024, metavar="N", help="Largest number of concurrent workers to try."
    ),
    probe_seconds: float = Option(
        4.0, min=0.0, metavar="SECONDS", help="Minimum time for each number of workers."
    ),
    output: Path | None = Option(
        None, "-o", "--output", metavar="FILE", help="The calibrated file; default: FILE.calibrated.toml."
    ),
    as_json: AsJson = False,
) -> None:
    """Run a pilot and write a file with the recommended settings.

    Use it before a large campaign: it runs every condition for a few steps, then several workers
    concurrently, and searches for the best batch size. Your file is never changed. Ctrl-C ends it and reports
    what was measured so far.

    Example: retrain calibrate campaign.toml --budget 20m
    """
    from retrain.campaign.calibrate import Calibrator, check_target
    from retrain.campaign.calibrate.benchmarks import Effort
    from retrain.cli.render.live import EventLines

    budget_s = duration(budget, "--budget")
    target = output or file.with_name(f"{file.stem}.calibrated.toml")
    calibrator = Calibrator(
        file,
        overrides or (),
        Effort(seeds=seeds, steps=steps, most_workers=most_workers, probe_s=probe_seconds),
    )
    check_target(target, file)
    errors = messages()
    benchmarks = list(calibrator.benchmarks(Path(calibrator.plan.log_dir)))
    rows = [
        (benchmark.name, benchmark.what, f"{benchmark.runs} x {benchmark.steps}") for benchmark in benchmarks
    ]
    title = f"calibration: at most {about(budget_s)}"
    errors.print(table(title, ("benchmark", "what", ">runs x steps"), rows))
    steps_tried = sum(benchmark.runs * benchmark.steps for benchmark in benchmarks)
    total = calibrator.plan.total_steps
    errors.print(f"{steps_tried} steps or more, {steps_tried / max(1, total):.0%} of the campaign's {total}")
    probes = sum(benchmark.name.startswith("workers-") for benchmark in benchmarks)
    if probes and probe_seconds:
        benchmarks_of_workers = f"{count_of(probes, 'benchmark')} of workers, however short steps are"
        errors.print(f"and {about(probes * probe_seconds)} or more for {benchmarks_of_workers}")
    with interruptible(lambda now: calibrator.interrupt(now=now), say_at_once, ENDING_BENCHMARK):
        calibration = calibrator.run(
            budget_s,
            lambda: EventLines(errors),
            lambda benchmark: errors.print(f"{benchmark.name}: {benchmark.what}"),
        )
    try:
        if calibration.steps:  # otherwise nothing was measured, and an earlier file may hold more
            calibration = calibrator.write(calibration, target)
    finally:  # what was measured is shown although the file cannot be written
        if as_json:
            print_result(calibration)
        else:
            _show(calibration, _spent(calibration, steps_tried, total, budget_s))
    if calibration.was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not calibration.steps:
        raise typer.Exit(EXIT_RUN_FAILED)


def _spent(calibration: Calibration, announced: int, total: int, budget_s: float) -> str:
    """Return what a calibration took, and by how much that is more than was announced."""
    cost = "" if calibration.cost_usd is None else f", cost {dollars(calibration.cost_usd)}"
    late_s, taken = calibration.seconds - budget_s, calibration.steps_taken
    late = f" ({about(late_s)} more than allowed)" if late_s >= 1 else ""
    more = f" ({announced} were announced)" if taken > announced else ""
    share = f", {taken / max(1, total):.0%} of the campaign's {total}"
    return f"took {about(calibration.seconds)}{late}{cost} and {count_of(taken, 'step')}{more}{share}"


def _show(calibration: Calibration, spent: str) -> None:
    for part in (_steps, _lengths, _workers, _facts, _advice, _times):
        for shown in part(calibration):
            console().print(shown, soft_wrap=isinstance(shown, str))
    for line in _ends(calibration, spent):
        console().print(line, soft_wrap=True)


def _steps(calibration: Calibration) -> Iterator[Table | str]:
    if not calibration.steps:
        yield "no condition completed two steps, so step times are unknown"
        return
    rows = [
        (
            s.condition,
            str(s.steps),
            format_duration(s.median_s),
            format_duration(s.mean_s),
            *(f"{part / s.mean_s:.0%}" for part in (s.sampling_s, s.scoring_s, s.training_s)),
            format_duration(s.permit_wait_s),
        )
        for s in calibration.steps
    ]
    shares = (">sampling", ">scoring", ">training", ">permit wait of all calls")
    yield table("breakdown of step time", ("condition", ">steps", ">median", ">mean", *shares), rows)


def _lengths(calibration: Calibration) -> Iterator[Table]:
    rows = [
        (
            c.condition, str(c.allowed), f"{c.hit_fraction:.1%}",
            f"{c.median:.0f}", f"{c.p95:.0f}", str(c.longest),
        )
        for c in calibration.lengths
    ]  # fmt: skip
    if rows:
        columns = ("condition", ">max_tokens", ">hit the limit", ">median", ">P95", ">longest")
        yield table("completion length in tokens", columns, rows)


def _workers(calibration: Calibration) -> Iterator[Table | str]:
    law = calibration.scaling
    if law is None:
        return
    best = max(m.tokens_per_second for m in law.measured)
    rows = [
        (
            str(m.workers), f"{m.tokens_per_second:,.0f}", format_duration(m.step_time_s),
            f"{m.permit_wait_fraction:.0%}", "#" * round(BARS * m.tokens_per_second / best),
        )
        for m in law.measured
    ]  # fmt: skip
    columns = (">workers", ">tokens/s", ">step", ">permit wait", "throughput")
    yield table("throughput by number of workers", columns, rows)
    if law.sigma is not None and law.kappa is not None:
        optimum = f"best at {law.p_star:.1f} workers" if law.p_star else "no optimum in range"
        yield f"scalability law: sigma {law.sigma:.3g}, kappa {law.kappa:.2g}, {optimum}"
    if law.note:
        yield plain(law.note)


def _facts(calibration: Calibration) -> Iterator[str]:
    memory, disk = calibration.memory, calibration.disk
    if (batch := calibration.batch) is not None:
        regimes = f"back pressure: {', '.join(batch.regimes)}"
        if batch.is_conclusive:
            p_star = batch.p_star
            star = "no optimum in range" if p_star is None else f"p* = {p_star:.0f} concurrent rollouts"
            configured = f"{batch.concurrency} are configured; ended at {batch.batch_size} prompts"
            yield f"{regimes}; {star}, {configured}"
        else:
            yield f"{regimes}; too few steps counted to judge any batch size ({plain(batch.reason)})"
    if memory.worker:
        yield f"memory: {gib(memory.worker)} a worker, {gib(memory.free)} free"
    if memory.worker_on_gpus:
        taken = f"{gib(memory.worker_on_gpus)} a worker, with what PyTorch keeps for later"
        yield f"GPU memory: {taken}; {gib(memory.free_on_gpus)} free"
    if calibration.out_of_memory_at is not None:
        short = f"{calibration.out_of_memory_at} prompts at a time did not fit in memory"
        yield f"{short}, so steps were split and took longer"
    for label, way in device_ways(calibration.devices):
        yield f"{label}: {way}" if label else way
    if disk is not None:
        needed = f"{gib(disk.checkpoints)} of checkpoints, {gib(disk.records)} of records"
        short = "; NOT ENOUGH" if disk.checkpoints + disk.records > disk.free else ""
        yield f"disk: {needed}, {gib(disk.free)} free{short}"


def _advice(calibration: Calibration) -> Iterator[Table]:
    rows = []
    for advice in calibration.advice:
        recommended = as_toml(advice.value) if advice.is_change else "keep"
        why = advice.why if advice.is_written or not advice.is_change else f"{advice.why} (not written)"
        rows.append((advice.key, as_toml(advice.now), recommended, why))
    if rows:
        yield table("recommended settings", ("key", ">current", ">recommended", "reason"), rows)


def _times(calibration: Calibration) -> Iterator[str]:
    if calibration.before is None or calibration.after is None:
        yield "wall time: unknown, because no condition completed two steps"
        return
    for name, time in (("current", calibration.before), ("recommended", calibration.after)):
        to = f" to {about(time.slowest_p50_s)}" if time.slowest_p50_s is not None else ""
        forecast = f"P50 {about(time.p50_s)}{to}, P90 {about(time.p90_s)}, limited by {time.limited_by}"
        yield f"wall time, {name:<13}{forecast}"
    yield from (f"  {plain(note)}" for note in calibration.after.notes)


def _ends(calibration: Calibration, spent: str) -> Iterator[str]:
    for reason in calibration.left_out:
        yield f"skipped: {plain(reason)}"
    yield f"{spent}; records in {plain(calibration.directory)}"
    if calibration.written:
        file = plain(shlex.quote(calibration.written))
        pilot = f" --from {plain(shlex.quote(calibration.pilot))}" if calibration.steps else ""
        yield f"wrote {plain(calibration.written)}; next: retrain explain {file}{pilot}"
