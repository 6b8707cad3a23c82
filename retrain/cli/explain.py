"""`retrain explain`: what a file would run, how long it would take, and what to check first."""

from __future__ import annotations

import difflib
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text
from typer import Option

from retrain.base.errors import EXIT_CONFIG, ConfigError
from retrain.cli import MOST_CONDITIONS, AsJson, ConfigFile, Overrides, duration
from retrain.cli.render.tables import console, fitted, left_out, print_result
from retrain.records.text import about, count_of, dollars, format_duration, gib, number, plain, plain_lines

if TYPE_CHECKING:
    from retrain.plan.designs import Designs
    from retrain.plan.estimate.devices import DeviceSplit, DeviceSplits
    from retrain.plan.estimate.money import CostForecast
    from retrain.plan.estimate.wall_time import WallTime
    from retrain.plan.explain import Explanation, MemoryUse, SourceShares
    from retrain.plan.matrix import Plan

WRITABLE = 0o222
MOST_SEEDS = 8  # more are abbreviated
MOST_WARNINGS = 20
CHECK_STYLES = {"pass": "green", "warn": "yellow", "unknown": "cyan"}
UNRELIABLE = {"short": " (a short pilot: see below)", "heavy": " (unreliable: see below)"}


def command(
    file: ConfigFile,
    overrides: Overrides = None,
    logs: Path | None = Option(
        None, "--from", metavar="LOGS", help="Forecast from the records of earlier campaigns."
    ),
    budget: str = Option(
        "", "--budget", metavar="TIME", help="Longest acceptable wall time, such as 6h or 1h30m."
    ),
    design: bool = Option(
        False, "--design", help="Write the design that --from recommends into the file's [decision]."
    ),
    check: bool = Option(False, "--check", help="Exit with code 2 if a line of the checklist warns."),
    as_json: AsJson = False,
) -> None:
    """Check a file, show its run matrix and forecast its time and cost; nothing is created.

    Use it before every campaign: first for the pilot to run, then with --from for an estimate.

    Example: retrain explain campaign.toml --from logs --budget 6h
    """
    from retrain.campaign.admission import free_memory
    from retrain.campaign.launcher_setup import ask_launcher, checked_plan
    from retrain.config.load import fixed_keys, load_config, sets_key, value_origins
    from retrain.config.toml_files import naming_bases
    from retrain.control.machine import cpu_capacity
    from retrain.plan.build import draws_seeds
    from retrain.plan.explain import SUGGESTED, explain_plan

    budget_s = duration(budget, "--budget") if budget else None
    settings = overrides or ()
    with naming_bases(file):
        config = load_config(file, settings)
        plan, checked = checked_plan(config, file.name)
    if design:
        _check_design(file, plan, logs, settings)
    history = None
    if logs is not None:
        from retrain.plan.estimate.history import learn

        history = learn(logs, plan.conditions)
    explanation = explain_plan(
        plan,
        checked,
        history,
        cpu_capacity(),
        shlex.quote(str(file)),
        learned_from=shlex.quote(str(logs)) if logs else "",
        budget_s=budget_s,
        sets_max_tokens=sets_key(file, settings, "training", "max_tokens"),
        fixed=fixed_keys(file, settings, SUGGESTED),
        script=ask_launcher(plan, "script"),
        free_memory=free_memory,
    )
    if logs is not None and plan.decision is not None:
        from retrain.plan.designs import plan_designs  # imports numpy

        time_s = explanation.wall_time.p50_s if explanation.wall_time else None
        cost_usd = explanation.cost.p50_usd if explanation.cost else None
        designs = plan_designs(plan, logs, time_s=time_s, cost_usd=cost_usd)
        explanation = replace(explanation, designs=designs)
    explanation = replace(explanation, values=value_origins(file, settings))
    if as_json:
        print_result(explanation)
    else:
        _show(explanation, are_drawn=draws_seeds(config))
    if design and explanation.designs is not None:
        _write_design(file, explanation.designs)
    if check and any(line.state == "warn" for line in explanation.checklist):
        raise typer.Exit(EXIT_CONFIG)


def _check_design(file: Path, plan: Plan, logs: Path | None, settings: Sequence[str]) -> None:
    """Refuse --design before anything is computed where it can write nothing."""
    if plan.decision is None:
        problem = "[decision] is missing; add it with metric and smallest_difference"
    elif logs is None:
        problem = "--design needs earlier campaigns; name them with --from LOGS"
    elif settings:
        problem = "--design writes into the file, which --set changes; write the settings into it first"
    elif not (os.access(file, os.W_OK) and file.stat().st_mode & WRITABLE):
        problem = f"is read-only; `chmod u+w {shlex.quote(str(file))}`, or copy it"
    else:
        return
    raise ConfigError(f"{file}: {problem}")


def _write_design(file: Path, designs: Designs) -> None:
    """Write the recommended keys into the file, and print what has changed."""
    from retrain.config.toml_files import read_file, read_toml, with_keys, write_file

    if not designs.recommended:
        raise ConfigError(f"{file}: no design is recommended, and the file is as it was: {designs.notes[-1]}")
    path = file.resolve()  # a link stays one
    before = with_table = read_file(path).decode()
    if "decision" not in read_toml(path):  # it is in a file that this one extends, which others may as well
        with_table = f"{before.rstrip()}\n\n[decision]\n"
    if designs.designs and designs.recommended == designs.designs[0].keys:
        typer.echo(f"{file}: its own design stays", err=True)
        return
    after = with_keys(with_table, file.name, "decision", designs.recommended)
    try:
        write_file(path, after)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); it is as it was") from error
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), str(file), str(file), lineterm="")
    for line in lines:
        typer.echo(plain(line, 500), err=True)


def _show(explanation: Explanation, *, are_drawn: bool) -> None:
    out = console()
    rows = [
        (
            c.condition, f"{len(c.seeds)} drawn" if are_drawn else _seeds(c.seeds), str(c.max_steps),
            f"{c.batch_size} x {c.group_size} = {c.concurrency}", str(c.max_tokens), c.backend, c.task,
        )
        for c in explanation.conditions[:MOST_CONDITIONS]
    ]  # fmt: skip
    title = f"{explanation.name}: {_at_most(explanation)}{count_of(explanation.total_runs, 'run')}"
    columns = ("condition", "seeds", ">steps", ">concurrency a step", ">max_tokens", "backend", "task")
    out.print(fitted(title, columns, rows, out.width))
    for line in _lines(explanation):
        out.print(line, soft_wrap=True)
    if explanation.designs:
        for part in _designs(explanation.designs, out.width):
            out.print(part, soft_wrap=not isinstance(part, Table))


def _designs(designs: Designs, width: int) -> Iterator[str | Text | Table]:
    rows: list[tuple[str, ...]] = []
    for design in designs.designs:
        time = "" if design.time_s is None else about(design.time_s)
        time += "" if design.cost_usd is None else f" {dollars(design.cost_usd)}"
        shares = (design.power, design.cost_off, design.cost_equal, design.cost_p90)
        spread = f"{design.spread:.2g} ({design.spread_low:.2g} to {design.spread_high:.2g})"
        finds = "none" if design.finds is None else f"{design.finds:.2g}"
        seen = "" if design.seen is None else f"{design.seen:+.2g}"
        costs = (f"{share:.0%}" for share in shares)
        rows.append((design.design, f"{design.difference:.2g}", *costs, finds, seen, spread, time))
    if rows:
        title = f"designs, by {count_of(designs.seeds, 'seed')} of history, and what they find and cost"
        columns = "compared,>off by,>found,>cost,>if equal,>P90,>finds,>seen,>SD of a pair,>time"
        yield fitted(title, columns.split(","), rows, width)
    if designs.questions:
        rows = []
        for each in designs.questions:
            finds = "none" if each.finds is None else f"{each.finds:.2g}"
            costs = (f"{share:.0%}" for share in (each.power, each.cost_off, each.cost_equal, each.cost_p90))
            rows.append((str(each.questions), *costs, finds, f"{each.spread:.2g}"))
        columns = ">questions,>found,>cost,>if equal,>P90,>finds,>SD of a pair"
        title = f"the first of these designs, with so many questions at {designs.questions_at}"
        yield fitted(title, columns.split(","), rows, width)
    rows = []
    for agreement in designs.agreements:
        correlation, interval = "unknown", ""
        if agreement.correlation is not None:
            correlation = f"{agreement.correlation:.2f}"
            interval = f"{agreement.low:.2f} to {agreement.high:.2f}"
        rows.append((agreement.early, correlation, interval, f"{agreement.flips} of {agreement.pairs}"))
    if rows:
        columns = "early part,>correlation,>95 % interval,>pairs of other sign"
        title = "differences over an early part and at the end"
        yield fitted(title, columns.split(","), rows, width)
    if designs.designs:
        yield _shares(designs.simulated)
        yield "a design answers its own question: a window over early steps is about early steps"
    if designs.noise:
        yield str(designs.noise)
    yield from (Text(f"note: {plain(note, 500)}", "yellow") for note in designs.notes)
    if designs.recommended and designs.recommended != designs.designs[0].keys:
        from retrain.config.keys import quote

        yield Text("recommended, in [decision] (--design writes it):", "bold")
        yield from (f"    {key} = {quote(value)}" for key, value in designs.recommended.items())


def _shares(simulated: int) -> str:
    """Return what shares rest on; the error is that of a 95 % interval of a share of one half."""
    points = 100 * 1.96 * 0.5 / math.sqrt(simulated)
    return f"shares of {count_of(simulated, 'simulated campaign')}, sampling error up to {points:.0f} points"


def _at_most(explanation: Explanation) -> str:
    return "at most " if explanation.may_stop_earlier else ""


def _lines(explanation: Explanation) -> Iterator[str | Text]:
    before: tuple[SourceShares, ...] = ()
    for condition in explanation.conditions[:MOST_CONDITIONS]:
        yield from (f"  {condition.condition}: {plain(key, 200)}" for key in condition.differs)
        changed, before = condition.sources if condition.sources != before else (), condition.sources
        for shares in changed:
            steps = f"step {shares.from_step}"
            if shares.until_step > shares.from_step:
                steps = f"steps {shares.from_step} to {shares.until_step}"
            each = ", ".join(f"{prompts:.3g} of {name}" for name, prompts in shares.prompts.items())
            yield f"  {condition.condition}, {steps}: prompts a step: {plain(each, 200)}"
    yield from left_out(len(explanation.conditions))
    yield ""
    facts = (*_steps(explanation), *_launch(explanation), *_forecast(explanation))
    yield from (f"{name:<24}{plain(value, 500)}" for name, value in facts)
    if explanation.wall_time:
        yield from (f"  {plain(note, 500)}" for note in explanation.wall_time.notes)
    if explanation.script:
        yield f"\nscript for {explanation.launcher}:\n"
        yield from (f"    {line}" for line in plain_lines(explanation.script))
    if explanation.values:
        yield Text("\nwhere the values come from", "bold")
        yield from (f"  {plain(v.file)}  {plain(v.key)} = {plain(v.value, 100)}" for v in explanation.values)
    shown = explanation.warnings[:MOST_WARNINGS]
    yield from (Text(f"\nnote: {plain(warning, 500)}", "yellow") for warning in shown)
    if len(explanation.warnings) > len(shown):
        yield Text(f"\n{len(explanation.warnings) - len(shown)} more notes; --json lists all", "yellow")
    yield Text("\nbefore a full run", "bold")
    shown_commands = {explanation.pilot_command} if explanation.wall_time is None else set()
    for check in explanation.checklist:
        answer = f"{check.question}: {plain(check.answer, 500)}"
        yield Text.assemble((f"{check.state:<8}", CHECK_STYLES[check.state]), answer)
        if check.command and check.command not in shown_commands:  # several answers may name it
            yield Text(f"        {plain(check.command, 500)}", "dim")
            shown_commands.add(check.command)


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) <= MOST_SEEDS:
        return " ".join(map(str, seeds))
    return f"{seeds[0]} {seeds[1]} ... {seeds[-1]} ({len(seeds)})"


def _steps(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "total campaign steps", f"{_at_most(explanation)}{explanation.total_campaign_steps}"
    at_start = {"warm-up": explanation.warm_ups, "evaluation": explanation.evaluations_at_start}
    if counts := [count_of(number, what) for what, number in at_start.items() if number]:
        evaluations = f"{_at_most(explanation)}{' and '.join(counts)}"
        yield "before training", f"{evaluations}, one for all runs of a seed that start alike"
    yield from (("" if row else "search", line) for row, line in enumerate(explanation.search))
    for row, expected in enumerate(explanation.expected_seeds):
        off = f"off by {number(expected.difference)} {expected.unit}" if expected.difference else "equal"
        runs = f"{expected.runs:.0f} of {explanation.total_runs} runs"
        whole = expected.runs / explanation.total_runs * explanation.total_campaign_steps
        ends_early = bool(explanation.search) or expected.steps < 0.99 * whole  # at rungs
        steps = f", {expected.steps:.0f} of {explanation.total_campaign_steps} steps" if ends_early else ""
        took = "" if expected.time_s is None else f", about {about(expected.time_s)}"
        took += "" if expected.cost_usd is None else f", {dollars(expected.cost_usd)}"
        yield (
            "" if row else "seeds that it takes",
            f"{off}: {expected.seeds:.1f} on average, {runs}{steps}{took}; "
            f"a difference found in {expected.found:.0%}",
        )
    if explanation.expected_seeds:
        yield "", _shares(explanation.expected_seeds[0].simulated)
    if further := explanation.questions:
        count = f"{further.evaluation}: {further.asked}, or up to {further.most} if they are the noise"
        counted = "the most" if further.expected is None else f"{further.expected}, by earlier seeds"
        if further.time_s is not None:
            count += f"; time and cost count {counted}"
        if further.time_s is not None and further.forecast < further.most:
            usd = "" if further.cost_usd is None else f" and {dollars(further.cost_usd)}"
            count += f"; with {further.most} they are {about(further.time_s)}{usd} (P50)"
        yield "questions at the end", count


def _launch(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "effective parallelism", f"{explanation.effective_parallelism} ({explanation.launcher})"
    if explanation.permits is not None:
        adapted = " at first, then adapted to the API" if explanation.permits_adapt else ""
        yield "permits (API calls)", f"{explanation.permits}{adapted}"
    yield "log directory", f"{explanation.log_dir}/"
    for label, key in (("starts from", "adapter"), ("learns from", "teacher")):
        values = dict.fromkeys(getattr(condition, key) for condition in explanation.conditions)
        for row, value in enumerate(values if any(values) else ()):
            yield "" if row else label, value or f"no {key}"
    if explanation.sandboxes:
        yield "programs run in", ", ".join(explanation.sandboxes)
    yield from dict.fromkeys(("memory of a run", _memory(use)) for use in explanation.memory)


def _forecast(explanation: Explanation) -> Iterator[tuple[str, str]]:
    """Iterate over time and cost, the budget, the prices and, without a forecast, the highest cost."""
    if explanation.wall_time is not None:
        kind = ", at most" if explanation.may_stop_earlier else ", forecast"  # the expected: with the seeds
        yield from _time(explanation.wall_time, kind)
        yield from device_ways(explanation.devices)
        if explanation.cost is not None:
            yield from _cost(explanation.cost, kind)
    else:
        *needed, last = explanation.unknown
        yield "wall time", f"unknown; it depends on {', '.join(needed)} and {last}"
        yield "measure it with", explanation.pilot_command
    if explanation.budget_usd is not None:
        yield "budget", f"{dollars(explanation.budget_usd)}, at which it stops"
    for row, (model, price) in enumerate(explanation.prices.items()):
        kinds = (
            f"prompts ${price.prefill:g}, cached ${price.cached:g}, "
            f"sampled ${price.sample:g}, trained ${price.train:g}"
        )
        source = f"of {price.as_of}, {price.source}" if price.as_of else price.source
        yield "" if row else "prices, million tokens", f"{plain(model)}: {kinds} ({source})"
    if explanation.cost is None and (most := explanation.cost_at_most) is not None:
        of_all = f"{dollars(most.step_usd)} a step, {dollars(most.campaign_usd)} in all"
        yield "cost, at most", f"{of_all}, if every completion is as long as max_tokens"
    if explanation.cost_unknown:
        yield "cost, forecast", f"unknown; {explanation.cost_unknown}"


def device_ways(splits: DeviceSplits | None) -> Iterator[tuple[str, str]]:
    """Iterate over ways of sharing devices among runs, as label and text."""
    if splits is None:
        return

    def way(split: DeviceSplit) -> str:
        runs, devices = count_of(split.runs, "run"), count_of(split.devices, splits.kind)
        return f"{runs} x {devices}: {about(split.p50_s)}{'' if split.is_measured else ' by the law'}"

    ways, best = [f"{way(splits.planned)}, as planned"] if splits.planned else [], splits.best
    if best is None:
        ways.append("no other number was measured; `retrain calibrate` measures more")
    elif best == splits.planned:
        ways.append("no known way is faster")
    else:
        parallel = "campaign.parallel = true, " if best.runs > 1 and not splits.is_parallel else ""
        keys = f"{parallel}campaign.max_workers = {best.runs}, backend.options.devices = {best.devices}"
        ways.append(f"{way(best)}: better [{keys}]")
    yield count_of(splits.there, splits.kind), "; ".join(ways)
    if splits.more_devices:
        yield "more for each run", way(splits.more_devices)
    if splits.more_runs:
        yield "one more run at a time", way(splits.more_runs)
    clauses = [f"measured on {', '.join(map(str, splits.measured))}"]
    if splits.sigma is not None:
        clauses.append(f"law over ranks: sigma {splits.sigma:.3g}, kappa {splits.kappa:.2g}")
    yield "", "; ".join([*clauses, *([splits.note] if splits.note else [])])


def _cost(cost: CostForecast, kind: str) -> Iterator[tuple[str, str]]:
    shown, has_several = cost.conditions[:MOST_CONDITIONS], len(cost.conditions) > 1
    yield f"cost{kind}", f"P50 {dollars(cost.p50_usd)}, P90 {dollars(cost.p90_usd)}"
    for c in shown if has_several else ():
        source = ", from runs with other settings" if c.match == "other settings" else ""
        each = f"{dollars(c.run_usd)} a run{source}"
        yield "", f"{plain(c.condition)}: P50 {dollars(c.p50_usd)}, P90 {dollars(c.p90_usd)}; {each}"
    for row, c in enumerate(shown):
        whose = f"{plain(c.condition)}: " if has_several else ""
        yield (
            "" if row else "tokens of a step",
            f"{whose}prompts {c.prefill_tokens:,.0f}, cached {c.cached_tokens:,.0f}, "
            f"sampled {c.sampled_tokens:,.0f}, trained {c.trained_tokens:,.0f}",
        )


def _memory(use: MemoryUse) -> str:
    free = "" if use.free_bytes is None else f"; {gib(use.free_bytes)} are free"
    return f"about {gib(use.peak_bytes)} at its peak ({use.parts}){free}"


def _time(time: WallTime, kind: str) -> Iterator[tuple[str, str]]:
    measured = f"{count_of(time.measured_runs, 'earlier run')}, {count_of(time.measured_steps, 'step')}"
    yield "median step time", f"{format_duration(time.median_step_time_s)} (of {measured})"
    outside = {"start-up": time.startup_s, "end": time.closing_s}
    if times := [f"{what} {format_duration(s)}" for what, s in outside.items() if s is not None]:
        yield "outside the steps", f"{', '.join(times)} a run"
    rule = "total steps x median step time / parallelism"
    yield "rule of thumb", f"{about(time.rule_of_thumb_s)} ({rule})"
    yield "wall time, lower bound", f"{about(time.lower_bound_s)} (total work over parallelism)"
    to = f" to {about(time.slowest_p50_s)}" if time.slowest_p50_s is not None else ""
    forecast = f"P50 {about(time.p50_s)}{to}, P90 {about(time.p90_s)}{UNRELIABLE.get(time.tail, '')}"
    yield f"wall time{kind}", forecast
    waits = f", {time.permit_wait_fraction:.0%} of a step waiting" if time.permit_wait_fraction > 0.01 else ""
    free = " with unlimited permits" if time.slowest_p50_s is not None else ""
    yield "limited by", f"{time.limited_by} ({count_of(time.waves, 'wave')}{waits}){free}"
    for row, change in enumerate(time.changes):
        yield "what would shorten it" if row == 0 else "", f"{change.text}{free} [{change.setting}]"
    if time.actual_over_p50:
        ratios = sorted({f"{ratio:.2f}" for ratio in time.actual_over_p50})
        took = " to ".join([ratios[0], ratios[-1]][: len(ratios)])
        yield "earlier forecasts", f"{len(time.actual_over_p50)}; actual time was {took} of P50"
