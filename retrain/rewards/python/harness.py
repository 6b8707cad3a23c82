"""Runs a program and its tests under limits: started as a script with nothing inherited but its folder.

Arguments: seconds, bytes of memory, pid of the parent, descriptor of the verdict. Reads solution.py and,
if it is there, tests.py from the current directory; writes to the descriptor once the tests have passed.
Imports nothing of retrain and little else, since every import is paid for each program.
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
    if not os.path.exists(TESTS):  # noqa: PTH110 - pathlib costs half as much again as Python itself
        _execute("__main__", _read(SOLUTION))
        return
    tests = _read(TESTS)
    os.unlink(TESTS)  # noqa: PTH108
    namespace = _execute("solution", _read(SOLUTION))
    exec(compile(tests, TESTS, "exec"), namespace)
    os.write(verdict_fd, b"passed")


def _execute(name: str, source: str) -> dict[str, object]:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
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
    if os.getppid() != parent:  # it died before it could be watched
        sys.exit(1)
    for what, most in hard.items():
        resource.setrlimit(what, (most, most))
    signal.setitimer(signal.ITIMER_REAL, seconds + 1)  # where the parent's death is not told


if __name__ == "__main__":
    main()
