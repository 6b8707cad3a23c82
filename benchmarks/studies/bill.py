"""Does a campaign cost what `retrain explain` forecast from a pilot, and as often as P50 and P90 say?

    python -m benchmarks.studies.bill [--campaigns 20] [--pilot 20] [--steps 60] [--lr 1e-4] [--json]

Each campaign has two conditions, two seeds, evaluations and rollouts sampled ahead, on the numpy backend with
prices; its pilot is of one seed, or of two with `--pilot-seeds 2`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.suite import print_figures, script_parser
from retrain.campaign.run import start
from retrain.config.load import load_config
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.explain import explain_plan
from retrain.plan.preflight import preflight
from retrain.results.status import survey

CAMPAIGN = """
[training]
batch_size = 4
group_size = 4
max_tokens = 6
max_steps = {steps}
eval_every = 12
temperature = 1.0
lr = {lr}

[data]
task = "successor"
eval_prompts = 6
eval_samples = 4

[[eval]]
name = "often"
every = 5
prompts = 4

[rate_limiter]
max_staleness = 1

[reward]
reward = "partial"

[budget.prices.numpy]
prefill = 10
cached = 2
sample = 30
train = 20

[campaign]
launcher = "inline"

[[campaign.conditions]]
name = "small"

[[campaign.conditions]]
name = "large"
training.group_size = 8

[logging]
log_dir = "{logs}"
"""


def forecast_and_bill(root: Path, number: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Return P50, P90 and the bill of a campaign, in dollars."""
    file = root / f"{number}.toml"
    file.write_text(CAMPAIGN.format(steps=options.steps, lr=options.lr, logs=root / f"{number}"))
    seeds = [[10 * number + seed for seed in some] for some in (range(options.pilot_seeds), (8, 9))]
    start(file, [f"campaign.seeds={seeds[0]}", f"campaign.max_steps={options.pilot}"]).execute()
    plan = plan_runs(load_config(file, [wanted := f"campaign.seeds={seeds[1]}"]), file.name)
    found = explain_plan(plan, preflight(plan, file.name), learn(root / f"{number}"), 1.0, file.name).cost
    billed = survey(start(file, [wanted]).execute().directory)[0].cost_usd
    assert found is not None
    assert billed is not None
    return found.p50_usd, found.p90_usd, billed


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--campaigns", type=int, default=20)
    parser.add_argument("--pilot", type=int, default=20, help="steps of a pilot")
    parser.add_argument("--pilot-seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = [forecast_and_bill(Path(directory), n, options) for n in range(options.campaigns)]
    errors = [p50 / bill - 1 for p50, _, bill in found]
    row = {
        "campaigns": len(found),
        "forecast over bill, less 1, mean": statistics.fmean(errors),
        "its size, median": statistics.median(map(abs, errors)),
        "its size, at worst": max(map(abs, errors)),
        "bills up to P50": statistics.fmean(bill <= p50 for p50, _, bill in found),
        "bills up to P90": statistics.fmean(bill <= p90 for _, p90, bill in found),
        "P90 over P50, less 1, median": statistics.median(p90 / p50 - 1 for p50, p90, _ in found),
    }
    print_figures(row, as_json=options.json)


if __name__ == "__main__":
    main()
