"""The areas of the suite: which figures of each script matter, and their limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.suite import Area, Line


def startup(rows: list[dict[str, Any]]) -> Iterator[Line]:
    median = {row["command"]: row["median_s"] for row in rows}
    for command, reference in (
        ("retrain --help", "python -c 'import typer'"),
        ("worker's imports", "python -c 'import numpy'"),
    ):
        yield Line(command, median[command], "s", median[reference], reference)
    libraries = "python -c 'import typer, pydantic'"
    for command, most in (
        ("retrain explain quickstart.toml", 2.5),
        ("retrain explain campaign.toml", 2.5),
        ("retrain status logs", 2),
    ):
        limit = most * median[libraries]
        yield Line(command, median[command], "s", median[libraries], libraries, at_most=limit)


def prompts(rows: list[dict[str, Any]]) -> Iterator[Line]:
    best = min((row["token_ratio"] for row in rows if row["task"] == "mixed"), default=0.0)
    for row in rows:
        if row["condition"] == "shuffle":
            continue
        what = f"{row['task']}: {row['condition']}, of shuffle's tokens"
        at_most = 1.1 if row["task"] == "uniform" else math.inf
        if row["task"] == "mixed" and row["token_ratio"] == best:
            at_most = 0.65
        yield Line(what, row["token_ratio"], at_most=at_most)
        what = f"{row['task']}: {row['condition']}, held-out reward at equal tokens"
        yield Line(what, row["end"], "", row["end"] - row["difference"], "shuffle")


def campaign_overhead(row: dict[str, Any]) -> Iterator[Line]:
    ideal_s = row["ideal_s"] + row["start_up_of_all_waves_s"]
    what = f"{row['runs']} one-second runs on {row['workers']} workers"
    yield Line(what, row["campaign_s"], "s", ideal_s, "waves x 1 s + start-up", at_most=1.1 * ideal_s)


def semaphore(rows: list[dict[str, Any]]) -> Iterator[Line]:
    designs = {row["design"]: row for row in rows}
    ours = designs.pop("FileSemaphore")
    limits: dict[str, tuple[str, str, dict[str, float]]] = {
        "jain_busy": ("fairness (Jain), busy", "", {"at_least": 0.99}),
        "jain_thinking": ("fairness (Jain), thinking", "", {"at_least": 0.99}),
        "jain_of_256": ("fairness (Jain), 256 waiters, 40 entries each", "", {"at_least": 0.99}),
        "overtakes_of_64_percent": ("entries that overtook an earlier one of 64", "%", {"at_most": 1.0}),
        "waste_percent": ("idle permit time during contention", "%", {"at_most": 1.0}),
        "acquire_cpu_us": ("acquire and release, processor time", "us", {}),
        "hand_off_ms_p50": ("hand-off, median", "ms", {}),
        "idle_cpu_percent": ("23 waiters, share of a core", "%", {"at_most": 1.0}),
        "kill_to_free_ms_max": ("kill -9 to release, worst", "ms", {"at_most": 20.0}),
        "over_admissions": ("holders above the permits", "", {"at_most": 0}),
    }
    for key, (what, unit, limit) in limits.items():
        for name, other in designs.items():
            yield Line(what, ours[key], unit, other[key], name, **limit)


def status_at_scale(found: dict[str, Any]) -> Iterator[Line]:
    by_name = {row["what"]: row for row in found["measured"]}
    ours, naive = by_name["survey"], by_name["read every row"]
    what = f"status of {found['runs']} runs x {found['rows']} rows"
    yield Line(what, ours["median_s"], "s", naive["median_s"], "reading every row", at_most=0.3)
    yield Line("its memory", ours["peak_rss_mb"], "MB", naive["peak_rss_mb"], "reading every row", at_most=60)


def board_at_scale(found: dict[str, float]) -> Iterator[Line]:
    what = f"board of {found['runs']} live runs x {found['rows']} rows: its table"
    yield Line(what, found["table_s"], "s", at_most=1.0)
    yield Line("a condition's curves", found["curves_s"], "s", at_most=1.0)
    yield Line("curves of all runs", found["curves_of_all_runs_s"], "s")
    yield Line("processor time while it is looked at", found["cpu_ms_per_second"], "ms/s", at_most=20.0)
    yield Line("updates of the table", found["updates_per_minute"], "per minute")
    yield Line("its memory", found["peak_rss_mb"], "MB", at_most=150.0)


def memory_at_scale(found: dict[str, Any]) -> Iterator[Line]:
    by_name = {row["what"]: row["peak_rss_mb"] for row in found["measured"]}
    libraries = by_name.pop("libraries alone")
    by_name.pop("plain json and csv loop")
    for what, peak_mb in by_name.items():
        yield Line(what, peak_mb, "MB", libraries, "libraries alone", at_most=200)


def records(rows: list[dict[str, Any]]) -> Iterator[Line]:
    by_name = {row["what"]: row for row in rows}
    for what in ("rows and status", "and checkpoints"):
        yield Line(f"{what}, of a 50 ms step", by_name[what]["percent"], "%", at_most=2.0)


def resume(row: dict[str, Any]) -> Iterator[Line]:
    yield Line(f"what is left of {row['runs']} runs", row["decision, s"], "s", at_most=1.0)
    many = f"winners of {row['orchestrators at once']} orchestrators started at once"
    yield Line(many, row["won"], at_most=1, at_least=1)


def numpy_backend(runs: list[dict[str, Any]]) -> Iterator[Line]:
    steps = len(runs[0]["rewards"])
    slowest_s = max(run["cpu_s"][-1] for run in runs)
    yield Line(f"{steps} steps of sort, slowest seed", slowest_s, "CPU s", at_most=6.0)
    worst = min(sum(run["rewards"][-20:]) / 20 for run in runs)
    yield Line("reward in the last 20 steps, worst seed", worst, at_least=0.95)
    yield Line("held-out accuracy, worst seed", min(run["held_out_accuracy"] for run in runs), at_least=0.9)


def back_pressure(found: dict[str, Any]) -> Iterator[Line]:
    rows = {row["controller"]: row for row in found["rows"]}
    limits = {"ours, margin 0.85": (3.5, 7.0), "ours, margin 1.0": (3.0, 6.0)}
    rivals = [name for name in rows if name not in limits]
    for name, (mean, worst) in limits.items():
        row = rows[name]
        best = min(rivals, key=lambda rival: rows[rival]["mean_regret"])
        of_best = rows[best]
        yield Line(f"{name}: mean regret", row["mean_regret"], "%", of_best["mean_regret"], best, mean)
        yield Line(f"{name}: worst scenario", row["worst_regret"], "%", of_best["worst_regret"], best, worst)
        yield Line(f"{name}: random worlds", row["random_regret"], "%", of_best["random_regret"], best, 3.0)
        yield Line(f"{name}: random worlds, p95", row["random_p95"], "%", of_best["random_p95"], best, 8.0)
        yield Line(f"{name}: a decision", row["step_us"], "us", of_best["step_us"], best, 100.0)
    published = rows["published contract"]
    ours = rows["ours, margin 0.85"]
    yield Line("mean regret", ours["mean_regret"], "%", published["mean_regret"], "published contract")


def rate_limiter(found: dict[str, Any]) -> Iterator[Line]:
    for speed in sorted({row["speed"] for row in found["pace"]}):
        on, off = (
            next(r["worst_percent"] for r in found["pace"] if (r["limiter"], r["speed"]) == (state, speed))
            for state in ("on", "off")
        )
        yield Line(f"drift over any 100 batches, {speed}", on, "%", off, "no limiter", at_most=5.0)
    waits = next(row for row in found["overlap"] if row["training"] == "waits")
    yield Line("overlap, equal halves", waits["speedup"], "x", waits["best_possible"], "ideal", at_least=1.7)


def estimator(found: dict[str, Any]) -> Iterator[Line]:
    for row in found["light"]:
        what, bound = row["area"], row["limit"]
        limit = {} if bound is None else {"at_most": 100 * bound}
        rule = 100 * abs(row["rule_mean_error"])
        yield Line(f"{what}: P50 off", 100 * row["p50_median_error"], "%", rule, "rule of thumb", **limit)
        covered = 100 * row["p90_coverage"]
        yield Line(f"{what}: end before P90", covered, "%", at_least=85.0, at_most=95.0)
    for row in found["heavy"]:
        yield Line(f"{row['area']}, heavy tails: P90 labelled", 100 * row["labelled"], "%", at_least=85.0)
    for row in found["runs_differ"]:
        what = f"runs differ by {row['run_deviation']:.0%}, {row['earlier_runs']} earlier: end before P90"
        yield Line(what, 100 * row["p90_coverage"], "%", at_least=88.0)
    yield Line("1,000 runs x 500 steps, pilot and permits", found["large_cpu_s"], "CPU s", at_most=1.0)


def trainers(rows: list[dict[str, Any]]) -> Iterator[Line]:
    sides = {(row["case"], row["side"]): row for row in rows}
    for case in dict.fromkeys(case for case, _ in sides):
        ours, trl = sides[case, "retrain"], sides.get((case, "trl"), {})
        yield from against(case, ours, trl, "TRL", 1.4, 0.7)
        for what, least in (("updates", ours["steps"]), ("tied_groups", -math.inf)):
            name = f"{case}: {what.replace('_', ' ')}, of {ours['steps' if least > 0 else 'groups']}"
            yield Line(name, ours[what], "", trl.get(what, math.nan), "TRL", at_least=least)
        if parts := sides.get((case, "trl_parts")):
            yield from against(case, ours, parts, "TRL, batch in 4 parts", -math.inf, math.inf)


def against(
    case: str, ours: dict[str, Any], other: dict[str, Any], name: str, least: float, most: float
) -> Iterator[Line]:
    rate, memory = other.get("steps_per_second", math.nan), other.get("memory_mb", math.nan)
    spread = f" ({other['lowest_ratio']:.2f} to {other['highest_ratio']:.2f} x)" if other else ""
    yield Line(
        f"{case}: steps{spread}", ours["steps_per_second"], "/CPU s", rate, name, at_least=least * rate
    )
    yield Line(f"{case}: memory", ours["memory_mb"], "MB", memory, name, at_most=most * memory)


def environments(found: dict[str, Any]) -> Iterator[Line]:
    shares = {row["loop"]: row["busy_percent"] for row in found["loops"]}
    server = shares.pop("episodes, a server")
    in_process = shares.pop("episodes, a sampler in process")
    for name, share in shares.items():
        yield Line("32 rows of a server busy, episodes", server, "%", share, name, at_least=85)
    called = shares["episodes, a sampler in process, one call at a time"]
    yield Line("32 rows in process busy", in_process, "%", called, "one call at a time", at_least=85)
    yield Line("turn by turn, 32 at a time", shares["turn by turn, 32 at a time"], "%", at_most=40)
    yield Line("machinery of a turn", found["overhead"]["turn_ms"], "CPU ms", at_most=1.0)
    yield Line("machinery of a turn in process", found["overhead"]["fed_turn_ms"], "CPU ms", at_most=1.0)
    ratios = found["single_turn"]
    yield Line("single turns over the backend's call", ratios["default"], "x", at_most=1.05)
    yield Line("the same as episodes of one turn", ratios["as_episodes"], "x")


def gpu(areas: list[dict[str, Any]]) -> Iterator[Line]:
    for area in areas:
        if area["problem"]:
            yield Line(f"{area['area']}: {area['problem']}", math.nan)
        for line in area["lines"]:
            facts = {key: value for key, value in line.items() if key != "verdict" and value is not None}
            yield Line(**{"ours": math.nan, **facts})


def trl_gradients(rows: list[dict[str, Any]]) -> Iterator[Line]:
    for name in dict.fromkeys(row["loss_normalization"] for row in rows):
        own = [row for row in rows if row["loss_normalization"] == name]
        what = f"{name} against TRL's {own[0]['loss_type']}, {len(own)} batches: worst relative difference"
        yield Line(what, max(row["relative_error"] for row in own), at_most=1e-5)


def trl_teacher(rows: list[dict[str, Any]]) -> Iterator[Line]:
    for name in dict.fromkeys(row["trainer"] for row in rows):
        own = [row for row in rows if row["trainer"] == name]
        what = f"{own[0]['mode']} against TRL's {name}, {len(own)} steps: worst relative difference"
        yield Line(f"{what} of gradients", max(row["gradient_error"] for row in own), at_most=1e-5)
        losses = [row["loss_error"] for row in own if row["loss_error"] is not None]
        if losses:
            yield Line(f"{what} of losses", max(losses), at_most=1e-5)


def reward_sandbox(found: dict[str, Any]) -> Iterator[Line]:
    cost = found["overhead"]
    what = "a program that does nothing, in bubblewrap"
    yield Line(what, cost["bubblewrap"], "ms", cost["process"], "process", at_most=cost["process"] + 15)
    for name, one in found["batch"].items():
        what = f"128 programs of 50 ms, {name}, over plain processes"
        yield Line(what, one["wall_s"] / one["plain_s"], "x", at_most=1.2)
    for name, left in found["left"].items():
        for what in ("processes", "files", "descriptors"):
            yield Line(f"{what} left by {left['programs']} programs, {name}", left[what], at_most=0)
        yield Line(f"memory grown by them, {name}", left["grown_mb"], "MB", at_most=10.0)


def ranks(rows: list[dict[str, Any]]) -> Iterator[Line]:
    for row in rows:
        cut = ", layers in pieces" if row["layers"] == "pieces" else ""
        apart = f" on {row['nodes']} nodes" if row["nodes"] > 1 else ""
        what = f"{row['work']} work, ranks: {row['ranks']}{apart}{cut}"
        least = 1.6 if what == "growing work, ranks: 2" else -math.inf
        if row["ranks"] > 1:
            yield Line(f"{what}: work per second to one rank's", row["speed_up"], "x", at_least=least)
        most = 3.0 if row["ranks"] == 1 else math.inf
        yield Line(f"{what}: time for messages", row["exchanged_percent"], "%", at_most=most)


def usl_intervals(rows: list[dict[str, Any]]) -> Iterator[Line]:
    for name in ("sigma", "kappa", "lambda"):
        held = [row[f"{name}_held"] for row in rows]
        mean = sum(held) / len(held)
        yield Line(
            f"{name} within its 95 % interval, {len(rows)} designs", mean, "%", at_least=93, at_most=97
        )
        yield Line(f"{name}, the design with the fewest", min(held), "%")
    false = max(row["false_optima"] for row in rows)
    yield Line("p* claimed for a curve without one, worst design", false, "%", at_most=5.0)


def evidence(found: dict[str, Any]) -> Iterator[Line]:
    rows = {(row["metric"], row["difference"]): row for row in found["rows"]}
    for metric in dict.fromkeys(metric for metric, _ in rows):
        none, one, two = (rows[metric, difference] for difference in (0.0, 1.0, 2.0))
        fixed, least = "t test, 12 seeds", one["t_test"] - 5
        yield Line(f"{metric}: found, equal", none["found"], "%", none["t_test"], fixed, at_most=6.0)
        yield Line(f"{metric}: found, 1 SD apart", one["found"], "%", one["t_test"], fixed, at_least=least)
        for what, row in (("equal", none), ("2 SD apart", two)):
            yield Line(f"{metric}: seeds, {what}", row["seeds"], "%", 100.0, fixed, at_most=60.0)
    yield Line("4 equal conditions and a reference: any found", found["family"], "%", at_most=6.0)


STUDIES = {  # result of each script of `studies/`
    "allocation": '`allocate = "auto"` finds as much as equal rounds for 62 to 79 % of their cost',
    "backpressure_live": "on two real systems, 0.95 to 1.06 of the best batch's throughput",
    "backpressure_optimum": "p\\* is reported in 86 % of decisions if it is 26, in none if it is 84 or more",
    "bill": "forecasts of 20 campaigns' cost: P50 0.1 % below the bill on average, all bills below P90",
    "calculator": "a model of two layers learns to use a calculator: 0.95 to 0.99 of held-out sums are right",
    "cluster_scale": "10,000 runs on a simulated Slurm: 2.0 ms of the orchestrator's CPU per finished run",
    "compare_aa": "differences found between identical conditions: 1.5 to 6 %; with a bootstrap 14 to 28 %",
    "decision_campaigns": "390 of 400 real campaigns were killed: all decided as without kills",
    "environments_verifiers": "32 rows of a server are busy 28 % of the time, 3.3 % with verifiers' loop",
    "permits": "adaptive permits at an API that accepts six calls: 6.00 on average, 12 refusals in 600 s",
    "question_intervals": "intervals from three or more seeds contain 91 to 97 % of simulated differences",
    "ray_scale": "100 runs on Ray: 0.3 s of the orchestrator's CPU, 13 requests",
    "real_engine": "two runs share a vLLM that is killed after a step: all 6 steps, no server left",
    "sampling": "refilling a batch gives 2.7 to 2.8 times the tokens per second of sampling in passes",
    "scaling": "with `adascale` and `adamscale`, 0.19 to 0.30 of a large batch's gap remains",
    "slurm_scale": "2,000 runs on Slurm: 7.2 s of the orchestrator's CPU",
    "staleness_bias": "prompts sampled but never trained on: 0; in order of arrival up to 56",
    "throttle": "own work on two cores counts as a load of 0.01; training-throttle reports 1",
    "verdict_curves": "rungs find two alternatives on `sort` in 100 % of draws, at 43 % of all runs' cost",
    "watch": "`status --watch` of 100 live runs takes 1.6 % of a core",
}
AREAS = (
    Area("Start-up", "startup", startup),
    Area("Campaign overhead", "campaign_overhead", campaign_overhead),
    Area("Semaphore", "semaphore", semaphore, peers=("portalocker",)),
    Area("Status at scale", "status_at_scale", status_at_scale),
    Area("Board at scale", "board_at_scale", board_at_scale, needs=("starlette", "uvicorn", "vl_convert")),
    Area("Memory at scale", "memory_at_scale", memory_at_scale),
    Area("Records", "journal_overhead", records),
    Area("Resume", "resume_decision", resume),
    Area("numpy backend", "numpy_backend", numpy_backend),
    Area("Back pressure", "backpressure", back_pressure),
    Area("Reward sandbox", "reward_sandbox", reward_sandbox, ("--full",)),
    Area("Rate limiter", "rate_limiter", rate_limiter),
    Area(
        "Prompts",
        "prompts",
        prompts,
        longest_s=1800.0,
    ),
    Area(
        "Prompts, language model",
        "prompts",
        prompts,
        ("--model",),
        needs=("torch", "transformers"),
        longest_s=1800.0,
    ),
    Area("Environments", "environments", environments, peers=("trl",)),
    Area(
        "Trainers",
        "trainers",
        trainers,
        ("--rounds", "3"),
        needs=("torch", "transformers", "peft"),
        peers=("trl",),
        longest_s=1800.0,
    ),
    Area(
        "GPU, small size on the CPU",
        "gpu",
        gpu,
        ("--device", "cpu", "--small"),
        needs=("torch", "transformers", "peft"),
        longest_s=1800.0,
        note="no GPU was available: these lines show that each part runs, with a toy model on a CPU, and not "
        "how fast a GPU is; on a GPU, `python -m benchmarks.gpu` measures the same and has goals",
    ),
    Area("Ranks of one run", "ranks", ranks, needs=("torch", "transformers", "peft")),
    Area("Gradients", "trl_gradients", trl_gradients, needs=("torch", "peft", "trl")),
    Area("Teachers", "trl_teacher", trl_teacher, needs=("torch", "peft", "trl")),
    Area("Intervals of the USL fit", "usl_intervals", usl_intervals),
    Area("Sequential comparison", "evidence", evidence, needs=("scipy",)),
    Area("Estimator", "estimator", estimator, ("--worlds", "60")),
)
