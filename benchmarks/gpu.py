"""One machine with a GPU: speed of each phase against the device's own peaks, memory, several runs at a time.

    python -m benchmarks.gpu [--size 0.6] [--json FILE]
    python -m benchmarks.gpu --device cpu --small           the same code on a CPU: a toy model, no goals

Needs PyTorch, transformers and peft beside retrain's own requirements, and no network: the model has random
weights. Each part runs in a process of its own; one that fails, or cannot run here, says why, and the others
still run. NVML is read through nvidia-ml-py.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.__main__ import machine, plain, shown
from benchmarks.areas import ranks
from benchmarks.suite import Area, Line, Measured, measure, script_parser
from retrain.control.machine.nvidia import gpu_count

MODULE = "gpu_parts"


@dataclass(frozen=True)
class Part:
    """One measurement, a function of `benchmarks.gpu_parts`."""

    name: str
    function: str
    longest_s: float = 900.0
    gpus: int = 0  # of NVIDIA, at least


PEAKS = Part("Model, and peaks of the device", "peaks")
PARTS = (
    Part("Sampling and training", "phases"),
    Part("Out of memory", "out_of_memory"),
    Part("Several runs", "several_runs", 5400.0),
    Part("Load and throttle", "load"),
    Part("NVML", "nvml", gpus=1),
    Part("Ranks of one run", "ranks", gpus=2),  # a script of its own
)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--small", action="store_true", help="a toy model")
    parser.add_argument("--size", choices=("0.6", "1.7"), default="0.6", help="billions of parameters")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 4, 8], help="at a time")
    parser.add_argument("--parts", choices=[part.function for part in PARTS], nargs="*", help="default: all")
    parser.add_argument("--json", nargs="?", const="-", help="a file, as well; alone: on stdout, instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = list(measure_all(options, Path(directory)))
    if options.json == "-":
        print(json.dumps([plain(one) for one in found]))
    elif options.json:
        text = json.dumps({"machine": machine(), "device": options.device, "areas": list(map(plain, found))})
        Path(options.json).write_text(text)
    sys.exit(any(one.has_failed for one in found))


def measure_all(options: argparse.Namespace, directory: Path) -> Iterator[Measured]:
    """Make the model, measure the device's peaks, and iterate over what the parts measured."""
    arguments = ["--device", options.device, "--size", "small" if options.small else options.size]
    arguments += ["--directory", str(directory), "--runs", *map(str, options.runs)]
    peaks = measured(PEAKS, arguments, options)
    yield peaks
    arguments += ["--peaks", *(str(line.ours) for line in peaks.lines[1:])] if peaks.lines else []
    for part in PARTS:
        if not options.parts or part.function in options.parts:
            yield measured(part, arguments, options)


def measured(part: Part, arguments: list[str], options: argparse.Namespace) -> Measured:
    area = Area(part.name, MODULE, lines_of, (part.function, *arguments), longest_s=part.longest_s)
    if part.function == "ranks":
        area = Area(part.name, "ranks", ranks, ("--shard",), longest_s=part.longest_s)
    if part.gpus > (0 if options.device == "cpu" else gpu_count()):
        found = Measured(area, (), 0.0, f"not measured: needs NVIDIA GPUs: {part.gpus}")
    else:
        found = measure(area)
    return found if options.json == "-" else shown(found)


def lines_of(rows: list[dict[str, Any]]) -> Iterator[Line]:
    return (Line(**row) for row in rows)


if __name__ == "__main__":
    main()
