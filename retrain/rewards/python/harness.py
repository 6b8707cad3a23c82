"""Runs a program and its tests under limits: a script that inherits only its folder.

Arguments: seconds, bytes of memory, pid of the parent, descriptor of the verdict. Reads solution.py and,
if present, tests.py from the current directory; writes to the descriptor once the tests have passed.
Imports nothing from retrain and little else, because every import is repeated for each program.
"""

import ctypes
import os
import resource
import signal
import sys
import types

FILE_BYTES = 16 << 20
OPEN_FILES = 64
PR_SET_PDEATHSIG = 1
SOLUTION, TESTS = "solution.py", "tests.py"


def main() -> None:
    """Run ./solution.py, then ./tests.py in the same namespace."""
    seconds, memory_bytes, parent, verdict_fd = map(int, sys.argv[1:])
    _limit(seconds, memory_bytes, parent)
    if not os.path.exists(TESTS):  # noqa: PTH110 - importing pathlib adds half of Python's start-up time
        _execute("__main__", _read(SOLUTION))
        return
    tests = _read(TESTS)
    os.unlink(TESTS)  # noqa: PTH108
    namespace = _execute("solution", _read(SOLUTION))
    exec(compile(tests, TESTS, "exec"), namespace)
    os.write(verdict_fd, b"passed")


def _execute(name: str, source: str) -> dict[str, object]:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module
    exec(compile(source, SOLUTION, "exec"), module.__dict__)
    return module.__dict__


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:  # noqa: PTH123
        return file.read()


def _limit(seconds: int, memory_bytes: int, parent: int) -> None:
    hard = {
        resource.RLIMIT_CPU: seconds + 1,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":
        hard |= {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_NPROC: 0}
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before this process could watch it
        sys.exit(1)
    for what, most in hard.items():
        resource.setrlimit(what, (most, most))
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # for systems that do not report the parent's death


if __name__ == "__main__":
    main()
