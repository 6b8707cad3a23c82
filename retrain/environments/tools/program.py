"""A tool that runs programs in a sandbox."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from retrain.environments.tools.functions import ToolError
from retrain.sandbox import Limits, Sandbox, SandboxError, choose
from retrain.sandbox.cell import Cell
from retrain.sandbox.inside import values

LONGEST_OUTPUT = 1 << 16  # bytes
# what a program prints is what the policy reads, so its error is printed as well
SHOWING = """\
import traceback
try:
    exec(compile({program!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    error.__traceback__ = error.__traceback__.tb_next
    traceback.print_exception(error)
    print("".join(traceback.format_exception(error)), end="")
"""


class Programs:
    """Sandboxes that wait for programs; they are opened when first needed."""

    def __init__(self, sandbox: str, options: Mapping[str, Any], limit_s: float, memory_bytes: int) -> None:
        self._name, self._options = sandbox, options
        self._limits = Limits(limit_s, memory_bytes)
        self._idle: list[Cell] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @cached_property
    def sandbox(self) -> Sandbox:
        """Where programs run; ConfigError if it cannot be used here."""
        return choose(self._name, self._options)

    def python(self, program: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            program: the source text; print what you want to know.
        """
        try:
            cell = self._take()
        except SandboxError as error:
            raise ToolError(f"the sandbox failed: {error}") from error
        is_sound = True
        try:
            return self._run(cell, program)
        except SandboxError as error:
            is_sound = False
            raise ToolError(f"the sandbox failed: {error}") from error
        finally:
            self._give_back(cell, is_sound)

    def close(self) -> None:
        """End all sandboxes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for cell in idle:
            cell.close()

    def _take(self) -> Cell:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Cell(self.sandbox)

    def _give_back(self, cell: Cell, is_sound: bool) -> None:
        with self._lock:
            if is_sound and not self._is_closed:
                self._idle.append(cell)
                return
        cell.close()

    def _run(self, cell: Cell, program: str) -> str:
        running = cell.start(self._limits)
        try:
            job = {"job": "stdio", "source": SHOWING.format(program=program), "input": ""}
            running.send(values.frame(job))
            output = running.output(LONGEST_OUTPUT)
        finally:
            running.close()
        ended = cell.ended(stop=output is None)
        if output is None:
            raise ToolError(f"the program printed more than {LONGEST_OUTPUT >> 10} KB")
        if not ended.in_time:
            raise ToolError(f"the program took longer than {self._limits.seconds:g} s")
        if ended.over:
            raise ToolError(f"the program ran out of {' and '.join(sorted(ended.over))}")
        if ended.broke:
            raise ToolError(f"the program {ended.broke}")
        if ended.code < 0:
            raise ToolError(f"the program was ended by signal {-ended.code}")
        return output.decode("utf-8", "replace")
