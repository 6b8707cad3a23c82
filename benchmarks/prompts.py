"""How many sampled tokens curricula and refills save, and where they do not: real campaigns of tiny policies.

    python -m benchmarks.prompts              10 seeds (6 min on two cores)
    python -m benchmarks.prompts --seeds 3    fewer
    python -m benchmarks.prompts --model      the language model (7 min; needs the extra `local`)

Three tasks, of one cipher. `mixed`: at first half of the prompts are unsolvable (four letters whose images
the policy must find), a quarter is mastered, and a quarter is solved now and then (one such letter of two).
`rare`: a third each is mastered, solved now and then, and rarely (two such letters of two). `uniform`: all
are solved now and then. All runs start from one policy of the numpy backend, after a supervised warm-up.

With `--model` a language model of 133,000 parameters adds numbers of one, two and three digits, a third of
the prompts each. Half a minute of training taught it to add, and then wrong digits in the longer answers: at
first it solves nearly all sums of one digit, a third of those of two, and 2 % of those of three.

Reported for each condition: the tokens, sampled for training, after which the mean held-out reward over seeds
is where `shuffle` ends, as a share of `shuffle`'s, with a 90 % interval by resampling seeds; and its
difference from `shuffle` at equal tokens with the interval of `retrain compare --per tokens`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from benchmarks.suite import script_parser
from retrain import Prompt, Task, read_metrics, run_campaign
from retrain.base.rollouts import Floats
from retrain.records.windows import Window
from retrain.results.report.compare import compare
from retrain.results.report.gather import gather
from retrain.results.report.sides import Match, conditions

KNOWN, NEW = "abcdefghij", "klmnopqrst"  # letters whose images the warm-up teaches, and the others
RIGHT = 0.3  # of the images of the others in the warm-up: what a policy that solves them now and then knows
KINDS = {
    "mixed": ("mastered", "sometimes", "unsolvable", "unsolvable"),
    "rare": ("mastered", "sometimes", "rare"),
    "uniform": ("sometimes",) * 4,
}
EACH, HELD_OUT = 76, 24  # prompts of a kind
METRIC = "eval_held_reward"
POINTS = 200  # of a curve over tokens
WINDOW = 20  # points over which it is smoothed
RESAMPLES = 400
CONDITIONS: dict[str, dict[str, Any]] = {
    "shuffle": {},
    "skip": {"curriculum": "skip"},
    "pool": {"curriculum": "pool"},
    "shuffle, refill": {"refill": "tied"},
    "pool, refill": {"curriculum": "pool", "refill": "tied"},
}
MODEL_CONDITIONS = ("shuffle", "skip", "pool")  # of the language model
MODEL_LR = 1e-4


@dataclass(frozen=True)
class Row:
    """One condition in one task."""

    task: str
    condition: str
    token_ratio: float  # to reach what `shuffle` reaches at its end; infinite if it does not
    low: float  # of its 90 % interval
    high: float
    tied_percent: float  # of all sampled groups
    end: float  # held-out reward, mean over the last quarter of the tokens that all have
    difference: float | None  # from `shuffle` there
    difference_low: float | None
    difference_high: float | None


def image(letter: str) -> str:
    """Return the next letter of its ten."""
    ten = KNOWN if letter in KNOWN else NEW
    return ten[(ten.index(letter) + 1) % len(ten)]


def cipher(*, kinds: str = "mixed", seed: int) -> Task:
    """Build the task: `kinds` is one of `KINDS`."""

    def text(kind: str, rng: random.Random) -> str:
        if kind == "unsolvable":
            return "".join(rng.choices(NEW, k=4))
        letters = [
            rng.choice(KNOWN if kind == "mastered" else NEW),
            rng.choice(NEW if kind == "rare" else KNOWN),
        ]
        rng.shuffle(letters)
        return "".join(letters)

    train, held_out = list[str](), list[str]()
    for kind in dict.fromkeys(KINDS[kinds]):
        rng, share = random.Random(f"{seed} {kind}"), KINDS[kinds].count(kind)
        drawn = dict.fromkeys(text(kind, rng) for _ in range(20 * (EACH + HELD_OUT) * share))
        texts = list(drawn)[: (EACH + HELD_OUT) * share]
        cut = len(texts) * HELD_OUT // (EACH + HELD_OUT)
        held_out += texts[:cut]
        train += texts[cut:]
    prompts = [
        Prompt(number, f"{letters}=", "".join(map(image, letters)))
        for number, letters in enumerate([*held_out, *train])
    ]
    split = len(held_out)
    return Task(tuple(prompts[split:]), tuple(prompts[:split]), f"{KNOWN}{NEW}=", 4)


def summed(digits: int, rng: random.Random) -> tuple[str, str]:
    """Return a sum of two numbers of this many digits and its answer, lowest digit first."""
    low, high = 10 ** (digits - 1) if digits > 1 else 0, 10**digits
    left, right = rng.randrange(low, high), rng.randrange(low, high)
    return f"{left}+{right}=", str(left + right)[::-1]


def sums(*, seed: int) -> Task:
    """Build the language model's task: as many sums of one, two and three digits."""
    train, held_out = list[Prompt](), list[Prompt]()
    for digits in (1, 2, 3):
        rng = random.Random(f"{seed} {digits}")
        drawn = dict.fromkeys(summed(digits, rng) for _ in range(20 * (EACH + HELD_OUT)))
        first = len(train) + len(held_out)
        prompts = [Prompt(first + n, *pair) for n, pair in enumerate(list(drawn)[: EACH + HELD_OUT])]
        held_out += prompts[:HELD_OUT]
        train += prompts[HELD_OUT:]
    return Task(tuple(train), tuple(held_out), "0123456789+=", 5)


def demonstration(rng: random.Random) -> dict[str, str]:
    """Return a row of the numpy policy's warm-up."""
    length = rng.choice([2, 2, 2, 4])
    text = "".join(rng.choices(NEW if length > 2 else KNOWN + NEW, k=length))
    is_right = [letter in KNOWN or rng.random() < RIGHT for letter in text]
    images = (image(c) if right else rng.choice(NEW) for c, right in zip(text, is_right, strict=True))
    return {"prompt": f"{text}=", "completion": "".join(images)}


def settings(task: str, steps: int, lr: float) -> dict[str, Any]:
    """Return what all runs of a policy have in common."""
    training = {"batch_size": 8, "group_size": 8, "max_tokens": 6, "temperature": 1.0, "lr": lr}
    every = max(1, steps // 20)
    return {
        "training": {**training, "save_every": 0},
        "data": {"task": f"benchmarks.prompts.{task}"},
        "eval": [{"name": "held", "every": every, "samples": 4, "temperature": 1.0, "at_start": True}],
        "logging": {"samples_per_step": 0},
    }


def run(name: str, tables: dict[str, Any], launched: dict[str, Any]) -> Path:
    """Run a campaign in the working directory; return its directory."""
    path = Path(f"{name}.toml")
    path.write_text(tomli_w.dumps({**tables, **({"campaign": launched} if launched else {})}))
    outcome = run_campaign(path)
    if outcome.exit_code:
        raise SystemExit(f"the campaign failed: see {outcome.directory}")
    return outcome.directory


def warmed_up(tables: dict[str, Any]) -> Path:
    """Return the run whose policy all others start from."""
    rng, file = random.Random(1), Path("warmup.jsonl")
    file.write_text("".join(json.dumps(demonstration(rng)) + "\n" for _ in range(8000)))
    warmup = {"steps": 1200, "path": str(file.absolute()), "batch_size": 32, "lr": 5e-3}
    training = {**tables["training"], "lr": 1e-9}
    start = {**tables, "training": {**training, "seed": 0, "max_steps": 1}, "warmup": warmup}
    return run("start", start, {})


def measure(
    task: str, tables: dict[str, Any], seeds: int, steps: int, names: Sequence[str] = tuple(CONDITIONS)
) -> list[Row]:
    named = [{"name": name, "data": CONDITIONS[name]} for name in names]
    launched = {
        "seeds": list(range(seeds)),
        "max_steps": steps,
        "parallel": True,
        "max_workers": len(os.sched_getaffinity(0)),
        "conditions": named,
    }
    return rows(task, run(task, tables, launched))


def curve_of(metrics: Sequence[dict[str, Any]]) -> tuple[Floats, Floats]:
    """Return tokens sampled so far and the held-out reward then, of each evaluation."""
    tokens = np.cumsum([row["tokens_per_step"] for row in metrics])
    known = [(tokens[n], row[METRIC]) for n, row in enumerate(metrics) if METRIC in row]
    return np.array(known, dtype=float).T[0], np.array(known, dtype=float).T[1]


def reached(curves: Sequence[Floats], target: float) -> float:
    """Return where the smoothed mean of curves reaches a reward, as a share of `shuffle`'s tokens."""
    padded = np.pad(np.nanmean(curves, axis=0), WINDOW // 2, mode="edge")
    smooth = np.convolve(padded, np.ones(WINDOW + 1) / (WINDOW + 1), "valid")
    there = np.flatnonzero(smooth >= target)
    return float((there[0] + 1) / POINTS) if len(there) else np.inf


def rows(task: str, campaign: Path) -> list[Row]:
    record = gather(campaign)
    sides = {side.label: side for side in conditions(record)}
    metrics = {label: [read_metrics(run.directory) for run in side.runs] for label, side in sides.items()}
    ends = {label: min(curve_of(each)[0][-1] for each in runs) for label, runs in metrics.items()}
    grid = np.arange(POINTS * 3) / POINTS * ends["shuffle"]
    curves = {
        label: np.array([np.interp(grid[grid <= ends[label]], *curve_of(each)) for each in runs])
        for label, runs in metrics.items()
    }
    shared = min(ends.values())
    window = Window("tokens", 0.75 * shared, shared)
    compared = compare(Match("", tuple(sides.values()), record), (METRIC,), window).metrics[0]
    gaps = {judged.label: judged.difference for judged in compared.differences}
    means = {side.label: side.sample.mean for side in compared.sides}
    found = []
    for label, each in curves.items():
        ratios = [ratio_of(curves["shuffle"], each, chosen) for chosen in resampled(len(each))]
        low, high = (float(np.quantile(ratios, q, method="nearest")) for q in (0.05, 0.95))
        gap = gaps.get(label)
        found.append(
            Row(
                task,
                label,
                ratio_of(curves["shuffle"], each, np.arange(len(each))),
                low,
                high,
                tied_percent=100 * float(np.mean([tied(each) for each in metrics[label]])),
                end=float(means[label] or np.nan),
                difference=gap.difference if gap else None,
                difference_low=gap.low if gap else None,
                difference_high=gap.high if gap else None,
            )
        )
    return found


def ratio_of(shuffle: Floats, other: Floats, chosen: Any) -> float:
    """Return the share of `shuffle`'s tokens after which others, of these seeds, are where it ends."""
    padded = np.nanmean(shuffle[chosen], axis=0)
    target = float(padded[-WINDOW:].mean())
    return reached(other[chosen], target) / min(1.0, reached(shuffle[chosen], target))


def resampled(seeds: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(seeds, size=seeds) for _ in range(RESAMPLES)]


def tied(metrics: Sequence[dict[str, Any]]) -> float:
    """Return the share of a run's sampled groups that tied."""
    sampled = [row["batch_size"] + row.get("refill_sampled", 0) for row in metrics]
    return float(np.average([row["zero_signal_group_fraction"] for row in metrics], weights=sampled))


def of_ciphers(options: argparse.Namespace) -> list[Row]:
    steps = options.steps or 240
    tables = settings("cipher", steps, 1e-3)
    tables["model"] = {"adapter": str(warmed_up(tables).absolute())}
    found = list[Row]()
    for kinds in KINDS:
        tables["data"]["options"] = {"kinds": kinds}
        found += measure(kinds, tables, options.seeds, steps)
    return found


def of_model(options: argparse.Namespace) -> list[Row]:
    from benchmarks.prompts_model import save_model  # torch

    steps, model = options.steps or 80, Path("model").absolute()
    save_model(model)
    return measure("sums", model_tables(model, steps), options.seeds, steps, MODEL_CONDITIONS)


def model_tables(model: Path, steps: int) -> dict[str, Any]:
    """Return the tables of runs of the language model in a directory."""
    tables = settings("sums", steps, MODEL_LR)
    tables["model"] = {"model": str(model)}
    tables["backend"] = {"backend": "local", "options": {"lora": False, "device": "cpu", "threads": 1}}
    return tables


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, help="default: 240, and 80 of the language model")
    parser.add_argument("--model", action="store_true", help="the sums of the language model instead")
    parser.add_argument("--logs", type=Path, help="directory to keep the campaigns in")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.logs.absolute() if options.logs else Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)
        found = of_model(options) if options.model else of_ciphers(options)
    if options.json:
        print(json.dumps([asdict(row) for row in found]))
        return
    print("task     condition        tokens to shuffle's end    tied   held-out   difference at equal tokens")
    for row in found:
        gap = "" if row.difference is None else f"{row.difference:+.3f}"
        if row.difference_low is not None:
            gap += f" ({row.difference_low:+.3f} to {row.difference_high:+.3f})"
        print(
            f"{row.task:8s} {row.condition:16s} {row.token_ratio:12.2f} ({row.low:.2f} to {row.high:.2f})"
            f"{row.tied_percent:11.0f} % {row.end:10.3f}   {gap}"
        )


if __name__ == "__main__":
    main()
