"""What the whole suite measures: for each area the script to run and the lines to draw from its JSON."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def script_parser(about: str | None) -> argparse.ArgumentParser:
    """Return a parser for the script that runs; its help begins with the script's docstring as it stands."""
    script = Path(sys.argv[0])
    folder = "benchmarks.studies" if script.parent.name == "studies" else "benchmarks"
    name = folder if script.stem == "__main__" else f"{folder}.{script.stem}"
    as_written = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"python -m {name}", description=about, formatter_class=as_written)


def print_figures(row: Mapping[str, float], *, as_json: bool) -> None:
    """Print what a script has measured: an object, or a line for each figure."""
    if as_json:
        print(json.dumps(row, indent=2))
        return
    width = max(map(len, row)) + 2
    for name, value in row.items():
        print(f"{name:<{width}}{value:>12.4g}")


@dataclass(frozen=True)
class Line:
    """One figure, what it is compared with, and what it must keep to."""

    what: str
    ours: float
    unit: str = ""
    other: float = math.nan
    reference: str = ""  # what `other` is
    at_most: float = math.inf
    at_least: float = -math.inf

    @property
    def ratio(self) -> float:
        """Ours to the reference's."""
        return self.ours / self.other if self.other else math.nan

    @property
    def limit(self) -> str:
        """The bound in words, empty without one."""
        low = f">= {self.at_least:.3g}" if math.isfinite(self.at_least) else ""
        if low and math.isfinite(self.at_most):
            return f"{self.at_least:.3g} to {self.at_most:.3g}"
        return f"<= {self.at_most:.3g}" if math.isfinite(self.at_most) else low

    @property
    def verdict(self) -> str:
        """`met`, `missed`, or nothing where there is no bound."""
        if not self.limit:
            return ""
        return "met" if self.at_least <= self.ours <= self.at_most else "missed"


@dataclass(frozen=True)
class Area:
    """A script of this folder and how its JSON becomes lines."""

    name: str
    module: str
    lines: Callable[[Any], Iterator[Line]]
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # packages without which it cannot run
    peers: tuple[str, ...] = ()  # packages that it compares with, if they are there
    longest_s: float = 600.0
    note: str = ""  # for readers of the figures

    @property
    def command(self) -> list[str]:
        """What is run, and what a reader can run again."""
        return ["python", "-m", f"benchmarks.{self.module}", *self.arguments]


@dataclass(frozen=True)
class Measured:
    """An area's lines, or why there are none."""

    area: Area
    lines: tuple[Line, ...]
    seconds: float
    problem: str = ""
    has_failed: bool = False  # ended with an error, or not in time


def measure(area: Area) -> Measured:
    """Run an area's script in a process of its own."""
    missing = [package for package in area.needs if not find_spec(package)]
    if missing:
        return Measured(area, (), 0.0, f"not measured: {', '.join(missing)} not installed")
    began = time.monotonic()
    command = [sys.executable, *area.command[1:], "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=area.longest_s, check=False)
    except subprocess.TimeoutExpired:
        problem = f"not measured: took over {area.longest_s:g} s"
        return Measured(area, (), area.longest_s, problem, True)
    seconds = time.monotonic() - began
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Measured(area, (), seconds, f"not measured: exit {done.returncode}: {last}", True)
    absent = [package for package in area.peers if not find_spec(package)]
    note = f"without {', '.join(absent)}: not installed" if absent else area.note
    return Measured(area, tuple(area.lines(json.loads(done.stdout))), seconds, note)
