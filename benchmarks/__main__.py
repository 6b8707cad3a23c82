"""Every benchmark, one table per area: ours, a peer or reference, their ratio, the limit.

    python -m benchmarks [AREA ...] [--json FILE] [--markdown FILE]

Under a quarter of an hour on two cores. Peers that are not installed are left out, and said so:
pip install portalocker training-throttle trl
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.areas import AREAS
from benchmarks.suite import Area, Line, Measured, measure

COLUMNS = ("what", "ours", "reference", "", "ratio", "limit", "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("areas", nargs="*", help="scripts of this folder, as semaphore; default: all")
    parser.add_argument("--json", type=Path, help="write the lines here as well")
    parser.add_argument("--markdown", type=Path, help="write the tables here as well")
    options = parser.parse_args()
    known = {area.module: area for area in AREAS}
    if unknown := [name for name in options.areas if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its byte code
    began = time.monotonic()
    for target in (options.json, options.markdown):
        if target and not os.access(target.parent, os.W_OK):
            parser.error(f"{target}: its directory is not there or cannot be written")
    found: list[Measured] = []
    for area in AREAS:
        if not options.areas or area.module in options.areas:
            found.append(shown(measure(area)))
            write(found, options.json, options.markdown)  # an interrupt keeps the areas before it
    missed = sum(line.verdict == "missed" for one in found for line in one.lines)
    print(f"{time.monotonic() - began:.0f} s; {missed} limits missed")
    sys.exit(any(one.has_failed for one in found))


def write(found: list[Measured], as_json: Path | None, as_markdown: Path | None) -> None:
    if as_json:
        as_json.write_text(json.dumps({"machine": machine(), "areas": list(map(plain, found))}, indent=1))
    if as_markdown:
        as_markdown.write_text(markdown(found))


def shown(measured: Measured) -> Measured:
    table = Table(title=f"{measured.area.name} ({measured.seconds:.0f} s)", title_justify="left")
    for column in COLUMNS:
        table.add_column(column)
    for line in measured.lines:
        table.add_row(*cells(line))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table if measured.lines else f"{measured.area.name}: {measured.problem}")
    if measured.lines and measured.problem:
        console.print(measured.problem)
    return measured


def cells(line: Line) -> tuple[str, ...]:
    compared = not math.isnan(line.other)
    return (
        line.what,
        f"{line.ours:.3g} {line.unit}".rstrip(),
        f"{line.other:.3g} {line.unit}".rstrip() if compared else "",
        line.reference,
        f"{line.ratio:.3g}" if compared and not math.isnan(line.ratio) else "",
        line.limit,
        line.verdict,
    )


def markdown(found: list[Measured]) -> str:
    about = machine()
    lines = [
        "# Benchmarks",
        "",
        "Written by `python -m benchmarks --markdown docs/benchmarks.md`, not by hand.",
        f"{about['date']}, {about['cores']} cores ({about['processor']}), {about['memory_gb']} GB, "
        f"Python {about['python']}, retrain {about['retrain']}.",
        "Ratios were measured side by side in one run; absolute figures are this machine's.",
    ]
    for one in found:
        lines += ["", f"## {one.area.name}", "", f"`{' '.join(one.area.command)}`"]
        lines += ["", f"{one.problem[0].upper()}{one.problem[1:]}."] if one.problem else []
        if one.lines:
            header = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
            lines += ["", *header, *("| " + " | ".join(cells(line)) + " |" for line in one.lines)]
    return "\n".join(lines) + "\n"


def plain(measured: Measured) -> dict[str, object]:
    area: Area = measured.area
    rows = [
        {
            key: value if not isinstance(value, float) or math.isfinite(value) else None
            for key, value in dataclasses.asdict(line).items()
        }
        | {"verdict": line.verdict}
        for line in measured.lines
    ]
    return {"area": area.name, "command": area.command, "problem": measured.problem, "lines": rows}


def machine() -> dict[str, object]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "retrain": version("retrain"),
    }


def processor() -> str:
    try:
        facts = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in facts if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    main()
