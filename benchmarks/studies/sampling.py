"""Sampling of completions of skewed lengths: fixed passes, rows that are refilled, and equal lengths.

128 completions of 8 prompts have lengths from a lognormal distribution whose 99th percentile is eight times
its median, where it is cut. The key-value cache has room for 16 of the longest. `passes` samples 16 rows at a
time until the longest of them ends; `refilled` is what a run does; `equal` is the same with as many tokens,
all completions being equally long. In turn, in one process; seconds are the process's own on the processor.

    python -m benchmarks.studies.sampling [--model DIRECTORY] [--median TOKENS] [--json]
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite import script_parser

PROMPTS, GROUP, PROMPT_TOKENS = 8, 16, 20
TAIL = 8  # the longest completion, in medians
SPREAD = np.log(TAIL) / 2.326  # standard deviation of the logarithm: a hundredth is beyond the tail


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, help="default: a small one with random weights")
    parser.add_argument("--median", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(arguments.model or make_model(Path(directory)), arguments.median, arguments.repeat)
    print(json.dumps(found) if arguments.json else table(found))


def make_model(directory: Path) -> Path:
    from tests.extras.tiny_models import save_tiny_model

    return Path(save_tiny_model(directory, hidden=512, layers=4, context=4096))


def measure(model: Path, median: int, repeat: int) -> dict[str, Any]:
    """Return tokens per second on the processor for each way, the best of the repetitions."""
    import torch

    from retrain.backends import BackendSpec
    from retrain.backends.local import connect
    from retrain.backends.rows import Row

    torch.set_num_threads(1)
    options = {"local_files_only": True, "device": "cpu", "threads": 1}
    backend = connect(BackendSpec(seed=0, model=str(model), lora_rank=16, options=options))
    sampler = backend.sampler
    sampler.text.end_ids = ()
    longest = PROMPT_TOKENS + TAIL * median
    sampler.budgets["sample"] = 16 * longest
    draws = np.random.default_rng(0).lognormal(np.log(median), SPREAD, PROMPTS * GROUP)
    skewed = np.clip(np.round(draws), 1, TAIL * median).astype(int)
    equal = np.full(len(skewed), round(skewed.mean()))

    def rows(lengths: np.ndarray) -> list[Row]:
        prompts = [tuple(range(2 + number, 2 + number + PROMPT_TOKENS)) for number in range(PROMPTS)]
        return [Row(prompts[i // GROUP], int(length), stream=i) for i, length in enumerate(lengths)]

    def fill(rows: list[Row]) -> None:
        sampler.fill(rows, 1.0, torch.device("cpu"), "sample")

    def in_passes(rows: list[Row]) -> None:
        for begin in range(0, len(rows), 16):
            fill(rows[begin : begin + 16])

    fill(rows(np.full(PROMPTS * GROUP, 2)))  # allocators, caches
    ways: dict[str, tuple[Callable[[list[Row]], None], np.ndarray]] = {
        "passes": (in_passes, skewed),
        "refilled": (fill, skewed),
        "equal": (fill, equal),
    }
    found: dict[str, Any] = {"model": model.name, "tokens": int(skewed.sum())}
    for _ in range(repeat):
        for name, (way, lengths) in ways.items():
            batch = rows(lengths)
            began_s = time.process_time()
            way(batch)
            speed = int(lengths.sum()) / (time.process_time() - began_s)
            found[name] = max(found.get(name, 0.0), round(speed, 1))
    return found


def table(found: dict[str, Any]) -> str:
    lines = [f"{name:10} {found[name]:10.1f} tokens/s" for name in ("passes", "refilled", "equal")]
    gain, share = found["refilled"] / found["passes"], found["refilled"] / found["equal"]
    return "\n".join([*lines, f"refilled: {gain:.2f} x passes, {share:.2f} of equal lengths"])


if __name__ == "__main__":
    main()
