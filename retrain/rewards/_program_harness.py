"""Runs a program and its tests under limits: started as a script with nothing inherited but its folder.

Arguments: a JSON object of limits. Reads solution.py and, if it is there, tests.py from the current
directory; writes to the descriptor `verdict_fd` once the tests have passed. Imports nothing of retrain.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
import types
from pathlib import Path
from typing import Any

FILE_BYTES = 16 << 20
OPEN_FILES = 64
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run ./solution.py, then ./tests.py in the same namespace."""
    limits = json.loads(sys.argv[1])
    _limit(limits)
    source, tests = Path("solution.py").read_text("utf-8"), Path("tests.py")
    if not tests.exists():
        _execute("__main__", source, "solution.py")
        return
    check = tests.read_text("utf-8")
    tests.unlink()
    namespace = _execute("solution", source, "solution.py")
    exec(compile(check, "tests.py", "exec"), namespace)
    os.write(limits["verdict_fd"], b"passed")


def _execute(name: str, source: str, file: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    exec(compile(source, file, "exec"), module.__dict__)
    return module.__dict__


def _limit(limits: dict[str, Any]) -> None:
    seconds = math.ceil(limits["timeout_s"])
    hard = {
        resource.RLIMIT_CPU: seconds + 1,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":
        hard |= {resource.RLIMIT_AS: limits["memory_bytes"], resource.RLIMIT_NPROC: 0}
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != limits["parent"]:  # it died before it could be watched
        sys.exit(1)
    for what, most in hard.items():
        resource.setrlimit(what, (most, most))
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # where the parent's death is not told


if __name__ == "__main__":
    main()
